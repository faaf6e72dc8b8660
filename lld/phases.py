"""Early warning: the three phases of the death spiral (paper, Sec. 4.2, Fig. 2), detected online from a run's own log.

The rule adds up by how much correct responses lose likelihood under the updates, in units of their own negative
log-likelihood, beyond an allowance (a one-sided CUSUM, Page 1954), and looks at the other signals only then:

    x = displacement/correct / |likelihood/correct_old| of a step, cut at ±0.3;   S = max(0, S - x - 0.01)

    1 stagnation     S > 0.3: correct responses have not become likelier for a while although they are rewarded
    2 decay          S > 2: the falls add up to twice these responses' whole negative log-likelihood
    3 acceleration   decay, and at least two of: S grew by more than 0.5 over the last window; mean entropy above 1.3 times its
                     lowest so far; median of ratio/q999 - 1 above twice its level in the first two windows; median gradient
                     norm above twice its level there

With one update a rollout x is that of the re-scored rollouts (`final/displacement/correct`, monitor.rescore_every), the only
steps that say something. A window is 10 steps. A phase is reported while its condition holds. Being relative to |log-likelihood| and to the run's own
beginning, the rule knows no model's scale; its constants were chosen on runs of seed 0 of the tiny world (README).
"""

import statistics

WINDOW = 10  # steps
ALLOWANCE, LARGEST_FALL = 0.01, 0.3
STAGNATION, DECAY, GROWTH = 0.3, 2.0, 0.5
ENTROPY_RISE, TAIL_RISE, GRADIENT_RISE = 1.3, 2.0, 2.0
NAMES = ("healthy", "stagnation", "decay", "acceleration")


class Detector:
    """Feeds on rows of metrics.jsonl, one by one, and says which phase the run is in; `num_updates` is optim.updates_per_rollout."""

    def __init__(self, num_updates: int = 2):
        # At the only update of a rollout the policy still is the old one: nothing has moved until it is re-scored.
        self.displacement = "displacement/correct" if num_updates > 1 else "final/displacement/correct"
        self.rows: list[dict] = []
        self.falls: list[float] = [0.0]  # S after each step
        self.lowest_entropy = float("inf")

    def update(self, row: dict) -> int:
        self.rows.append({name: row[name] for name in ("entropy", "ratio/q999", "grad_norm") if name in row})
        if len(self.rows) >= WINDOW and (entropies := self._values("entropy")):
            self.lowest_entropy = min(self.lowest_entropy, statistics.fmean(entropies))
        fall = 0.0  # no mixed group: nothing was learned, so nothing was displaced; or not re-scored
        if self.displacement in row and "likelihood/correct_old" in row:
            relative = row[self.displacement] / max(abs(row["likelihood/correct_old"]), 1e-6)
            fall = -max(-LARGEST_FALL, min(LARGEST_FALL, relative)) - ALLOWANCE
        self.falls.append(max(0.0, self.falls[-1] + fall))
        if self.falls[-1] <= DECAY:
            return int(self.falls[-1] > STAGNATION)
        return 3 if self._signs_of_acceleration() >= 2 else 2

    def _signs_of_acceleration(self) -> int:
        if len(self.rows) <= 2 * WINDOW:  # the run's own beginning is what the signals are compared with
            return 0
        median = lambda name, start, end: statistics.median(self._values(name, start, end) or [0.0])
        first = lambda name: median(name, 0, 2 * WINDOW)
        return sum([
            self.falls[-1] - self.falls[-1 - WINDOW] > GROWTH,
            statistics.fmean(self._values("entropy") or [0.0]) > ENTROPY_RISE * self.lowest_entropy,
            median("ratio/q999", -WINDOW, None) - 1 > TAIL_RISE * (first("ratio/q999") - 1),
            median("grad_norm", -WINDOW, None) > GRADIENT_RISE * first("grad_norm"),
        ])  # fmt: skip

    def _values(self, name: str, start: int | None = -WINDOW, end: int | None = None) -> list[float]:
        return [row[name] for row in self.rows[start:end] if name in row]


def detect(rows: list[dict], num_updates: int = 2) -> list[int]:
    """The phase at each row of a run."""
    detector = Detector(num_updates)
    return [detector.update(row) for row in rows]
