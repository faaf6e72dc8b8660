"""Early warning: the three phases of the death spiral (paper, Sec. 4.2, Fig. 2), detected online from a run's own log.

The rule looks at the last `WINDOW` steps, and only at signals that a run without held-out questions has too:

    D, its standard error s   displacement/correct, the change of log-likelihood per token of correct responses
    1 stagnation     D - s < 0: correct responses do not get likelier although they are rewarded
    2 decay          D + 2 s < 0: they get less likely, beyond chance
    3 acceleration   decay, and at least two of: D below that of the window before by more than its own size again;
                     mean entropy above 1.3 times its lowest so far; median of ratio/q999 - 1 above twice its level in the
                     first two windows; median gradient norm above twice its level there

A phase is reported while its condition holds; none in the first two windows, which are the run's own baseline.
"""

import statistics

WINDOW = 10  # steps
ENTROPY_RISE, TAIL_RISE, GRADIENT_RISE = 1.3, 2.0, 2.0
NAMES = ("healthy", "stagnation", "decay", "acceleration")


class Detector:
    """Feeds on rows of metrics.jsonl, one by one, and says which phase the run is in."""

    def __init__(self):
        self.rows: list[dict] = []
        self.lowest_entropy = float("inf")

    def update(self, row: dict) -> int:
        self.rows.append({name: row[name] for name in ("displacement/correct", "entropy", "ratio/q999", "grad_norm") if name in row})
        entropy = self._mean("entropy")
        if entropy is not None:
            self.lowest_entropy = min(self.lowest_entropy, entropy)
        if len(self.rows) <= 2 * WINDOW:
            return 0
        values = self._values("displacement/correct")
        if len(values) < WINDOW // 2:  # no mixed group in most steps: nothing is learned, so nothing is displaced
            return 0
        mean, error = statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5
        if mean - error >= 0:
            return 0
        if mean + 2 * error >= 0:
            return 1
        return 3 if self._signs_of_acceleration(mean) >= 2 else 2

    def _signs_of_acceleration(self, mean: float) -> int:
        before = self._mean("displacement/correct", -2 * WINDOW, -WINDOW)
        median = lambda name, start, end: statistics.median(self._values(name, start, end) or [0.0])
        first = lambda name: median(name, 0, 2 * WINDOW)
        return sum([
            before is not None and mean < min(2 * before, 0.0),
            self._mean("entropy") > ENTROPY_RISE * self.lowest_entropy,
            median("ratio/q999", -WINDOW, None) - 1 > TAIL_RISE * (first("ratio/q999") - 1),
            median("grad_norm", -WINDOW, None) > GRADIENT_RISE * first("grad_norm"),
        ])  # fmt: skip

    def _values(self, name: str, start: int | None = -WINDOW, end: int | None = None) -> list[float]:
        return [row[name] for row in self.rows[start:end] if name in row]

    def _mean(self, name: str, start: int | None = -WINDOW, end: int | None = None) -> float | None:
        values = self._values(name, start, end)
        return statistics.fmean(values) if values else None


def detect(rows: list[dict]) -> list[int]:
    """The phase at each row of a run."""
    detector = Detector()
    return [detector.update(row) for row in rows]
