"""Detects, online from a run's log, the phases of the death spiral (paper, Sec. 4.2, Fig. 2) and collapse.

Phases 1 to 3 rest on a one-sided CUSUM (Page 1954): S sums how much likelihood correct responses lose in the
updates, relative to their negative log-likelihood and beyond an allowance. A window is 10 steps.

    x = displacement/correct / |likelihood/correct_old| of a step, clamped to ±0.3
    S = max(0, S - x - 0.01)

    1 stagnation     S > 0.3: for a while correct responses have not become likelier, although rewarded.
    2 decay          S > 2: the losses sum to twice the negative log-likelihood of these responses.
    3 acceleration   S > 2, and at least two of
                     - S grew by more than 0.5 over the last window
                     - mean entropy is above 1.3 times its lowest so far
                     - median of ratio/q999 - 1 is above twice its median in the first two windows
                     - median gradient norm is above twice its median in the first two windows

With one update per rollout, x is computed from `final/displacement/correct`, on the steps that were re-scored
(monitor.rescore_every); the other steps do not change S.

    4 collapse       At least two of these signs, or a lost reward for 10 steps in a row. The mean of the last
                     5 steps is compared with the best mean of a window so far (the first windows are
                     shorter). It needs no likelihood, because a collapsed run has no correct responses.
                     - reward lost: below half, and at least 0.1 lower
                     - no mixed group for 5 steps, together with a lost reward
                     - answered below half
                     - valid_actions below half
                     - truncated higher by 0.5
                     - entropy above 3 times, or below a twentieth, of its mean over the first 5 steps

A phase is reported while its condition holds. Every comparison is with the run itself, so the rule does not
depend on a model's scale. The constants of phases 1 to 3 were chosen on runs of the tiny world with seed 0;
docs/alarm.md evaluates them and phase 4.
"""

import math
import statistics

WINDOW = 10  # steps
ALLOWANCE, LARGEST_FALL = 0.01, 0.3
STAGNATION, DECAY, GROWTH = 0.3, 2.0, 0.5
ENTROPY_RISE, TAIL_RISE, GRADIENT_RISE = 1.3, 2.0, 2.0
SHORT = 5  # steps of the means for a collapse
# Steps in a row of a lost reward that are a collapse without a second sign, or of no mixed group that are
# worth a warning.
LONG = 10
HALF, LOST_REWARD, TRUNCATED_RISE = 0.5, 0.1, 0.5
ENTROPY_HIGH, ENTROPY_LOW = 3.0, 0.05  # multiples of the first steps' mean
BETTER = {
    "reward/mean": max,
    "reward/mixed_groups": max,
    "answered": max,
    "valid_actions": max,
    "truncated": min,
}
WATCHED = (*BETTER, "entropy", "ratio/q999", "grad_norm")
NAMES = ("healthy", "stagnation", "decay", "acceleration", "collapse")
COLLAPSE = NAMES.index("collapse")


class Detector:
    """The phase of a run, from its rows of metrics.jsonl, one by one.

    num_updates: optim.updates_per_rollout. After `update`, `signs` holds the signs of a collapse in words
    (one alone is not a collapse), and `idle` the number of steps in a row without a mixed group.
    """

    def __init__(self, num_updates: int = 2):
        # With one update per rollout, its forward pass still has the old policy, so the displacement is 0
        # until the rollout is re-scored.
        self.displacement = "displacement/correct" if num_updates > 1 else "final/displacement/correct"
        self.rows: list[dict] = []
        self.falls: list[float] = [0.0]  # S after each step
        self.lowest_entropy = float("inf")
        self.best: dict[str, float] = {}  # name -> best mean of a window so far
        self.signs: list[str] = []
        # Steps in a row with a lost reward, and without a mixed group.
        self.lost_for = self.idle = 0

    def update(self, row: dict) -> int:
        self.rows.append({name: row[name] for name in WATCHED if name in row})
        if len(self.rows) >= WINDOW and (entropies := self._values("entropy")):
            self.lowest_entropy = min(self.lowest_entropy, statistics.fmean(entropies))
        # Stays 0 if the row lacks the displacement or the likelihood of correct responses: there was no mixed
        # group, or the step was not re-scored.
        fall = 0.0
        if self.displacement in row and "likelihood/correct_old" in row:
            relative = row[self.displacement] / max(abs(row["likelihood/correct_old"]), 1e-6)
            fall = -max(-LARGEST_FALL, min(LARGEST_FALL, relative)) - ALLOWANCE
        self.falls.append(max(0.0, self.falls[-1] + fall))
        if self._has_collapsed():
            return COLLAPSE
        if self.falls[-1] <= DECAY:
            return int(self.falls[-1] > STAGNATION)
        return 3 if self._signs_of_acceleration() >= 2 else 2

    def _signs_of_acceleration(self) -> int:
        if len(self.rows) <= 2 * WINDOW:  # the first two windows are the reference
            return 0

        def median(name, start, end):
            return statistics.median(self._values(name, start, end) or [0.0])

        def first(name):
            return median(name, 0, 2 * WINDOW)

        return sum(
            [
                self.falls[-1] - self.falls[-1 - WINDOW] > GROWTH,
                statistics.fmean(self._values("entropy") or [0.0]) > ENTROPY_RISE * self.lowest_entropy,
                median("ratio/q999", -WINDOW, None) - 1 > TAIL_RISE * (first("ratio/q999") - 1),
                median("grad_norm", -WINDOW, None) > GRADIENT_RISE * first("grad_norm"),
            ]
        )

    def warning(self, row: dict, phase: int) -> str | None:
        """The message after the update with `row`, if `phase` begins (0: none does).

        Also if no group has been mixed for LONG steps. None if there is nothing to report.
        """
        begins = f"step {row['step']}: phase {phase} ({NAMES[phase]}) begins"
        if phase == COLLAPSE:
            what = ", ".join(self.signs)
            return (
                f"{begins}: {what} (best {WINDOW} steps -> last {SHORT}). Updates from here on only cost "
                "time: end the run (monitor.stop_in_phase=4 does it) and "
                "start a new one from a checkpoint of before (model.path), with a smaller optim.lr."
            )
        if phase:

            def value(name):
                return row.get(name, math.nan)

            return (
                f"{begins}: correct responses lose likelihood, {value('displacement/correct'):+.4f} nats a "
                f"token at this step; entropy {value('entropy'):.3f}, ratio tail "
                f"{value('ratio/q999'):.2f}, "
                f"gradient norm {value('grad_norm'):.2f}. If the reward stops rising, lower optim.lr or "
                "raise loss.lld_weight."
            )
        if self.idle == LONG and not self.signs:
            return (
                f"step {row['step']}: nothing to learn from: for {LONG} steps no group held both right and "
                f"wrong answers, and the mean reward is {row.get('reward/mean', math.nan):.2f}. "
                "Groups all wrong need easier questions, a warm start or a reward that pays for the "
                "format; groups all right, harder questions."
            )
        return None

    def _has_collapsed(self) -> bool:
        """Whether there are two signs of a collapse, or the reward was lost for LONG steps; sets `signs`."""
        now, best = {}, self.best
        for name, better in BETTER.items():
            if values := self._values(name, -SHORT):
                now[name] = statistics.fmean(values)
                level = statistics.fmean(self._values(name))
                best[name] = better(best.get(name, level), level)
        self.idle = self.idle + 1 if self.rows[-1].get("reward/mixed_groups") == 0 else 0

        def below(name, share):
            return name in now and now[name] < share * best[name]

        reward_lost = below("reward/mean", HALF) and now["reward/mean"] <= best["reward/mean"] - LOST_REWARD
        lost = {
            "reward/mean": reward_lost,
            # Only with a lost reward: groups that are all right are not mixed either.
            "reward/mixed_groups": reward_lost and self.idle >= SHORT,
            "answered": below("answered", HALF),
            "valid_actions": below("valid_actions", HALF),
            "truncated": "truncated" in now and now["truncated"] >= best["truncated"] + TRUNCATED_RISE,
        }
        self.signs = [
            f"{name} {best[name]:.2f} -> {now[name]:.2f}" for name, is_lost in lost.items() if is_lost
        ]
        if entropies := self._values("entropy", 0, SHORT):
            start, end = (
                statistics.fmean(entropies),
                statistics.fmean(self._values("entropy", -SHORT) or entropies),
            )
            if not ENTROPY_LOW * start <= end <= ENTROPY_HIGH * start:
                self.signs.append(f"entropy {start:.2f} -> {end:.2f}")
        self.lost_for = self.lost_for + 1 if reward_lost else 0
        return len(self.rows) >= SHORT and (len(self.signs) >= 2 or self.lost_for >= LONG)

    def _values(self, name: str, start: int | None = -WINDOW, end: int | None = None) -> list[float]:
        return [row[name] for row in self.rows[start:end] if name in row]


def detect(rows: list[dict], num_updates: int = 2) -> list[int]:
    """The phase at each row of a run."""
    detector = Detector(num_updates)
    return [detector.update(row) for row in rows]
