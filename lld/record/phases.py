"""Detects, online from a run's log, the way into the death spiral (paper, Sec. 4.2) and collapse itself.

A window is 10 steps. Displacement alone does not tell a sick run from a healthy one (docs/alarm.md), so it is
a phase without an alarm; what tells them apart is what becomes of the wrong responses.

    1 displacement   S > 2, where S is a one-sided CUSUM (Page 1954) of what correct responses lose:
                     x = displacement/correct / |likelihood/correct_old| of a step, clamped to ±0.3
                     S = max(0, S - x - 0.01)
    2 flattening     entropy/incorrect (median of a window) has been more than 30 % above its least so far,
                     and above that of the first window, for a window of steps in a row: the distribution of
                     wrong responses flattens.
    3 spiral         2, and wrong responses are less likely than right ones by more than 0.4 nats a token
                     (likelihood/incorrect_old - likelihood/correct_old, mean of a window).

With one update per rollout, x is computed from `final/displacement/correct`, on the steps that were re-scored
(monitor.rescore_every); the other steps do not change S. Phases 2 and 3 need no second update.

    4 collapse       At least two of these signs, or a lost reward for 10 steps in a row. The mean of the last
                     5 steps is compared with the best mean of a window so far (the first windows are
                     shorter). It needs no likelihood, because a collapsed run has no correct responses.
                     - reward lost: below half, and at least 0.1 lower
                     - no mixed group for 5 steps, together with a lost reward
                     - answered below half
                     - valid_actions below half
                     - truncated higher by 0.5
                     - entropy above 3 times, or below a twentieth, of its mean over the first 5 steps

The highest phase whose condition holds is reported. docs/alarm.md says how the constants were chosen and what
the phases are worth.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping

WINDOW = 10  # steps
ALLOWANCE, LARGEST_FALL, DISPLACED = 0.01, 0.3, 2.0
RISE, GAP = 1.3, -0.4
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
WRONG, RIGHT, FLAT = "likelihood/incorrect_old", "likelihood/correct_old", "entropy/incorrect"
WATCHED = (*BETTER, "entropy", FLAT, WRONG, RIGHT)
NAMES = ("healthy", "displacement", "flattening", "spiral", "collapse")
DISPLACEMENT, FLATTENING, SPIRAL, COLLAPSE = range(1, 5)
# Options that cut what is sampled from, and the values that cut nothing
CUTS = {"rollout.top_p": 1.0, "rollout.min_p": 0.0, "rollout.top_k": 0}


def remedy(options: Mapping[str, object]) -> str:
    """What to do about flattening or a spiral in a run with these options ("section.option" -> value).

    Only what would change the run: a sampler that does not cut, or whose kept ids are trained already, is not
    the cause; one at a lower temperature than the loss is (docs/experiment.md). Without options (a log
    alone) a cut is named as one of two cases.
    """
    cuts = {name: whole for name, whole in CUTS.items() if options.get(name, whole) != whole}
    sampled, trained = options.get("rollout.temperature"), options.get("loss.temperature")
    if None not in (sampled, trained) and sampled < trained:
        cause = f"Sampled at temperature {sampled:g}, trained at {trained:g}: make them equal. Or lower"
    elif options.get("loss.support") == "kept" or ("rollout.top_p" in options and not cuts):
        cause = "Lower"
    elif cuts:
        cut = ", ".join(f"{name} {options[name]}" for name in cuts)
        whole = " ".join(f"{name}={value:g}" for name, value in cuts.items())
        cause = f"The sampler cuts ({cut}) and the loss does not: set loss.support=kept, or {whole}. Or lower"
    else:
        cause = "If the sampler cuts (rollout.top_p below 1), set loss.support=kept or rollout.top_p=1. "
        cause += "Otherwise lower"
    weight = options.get("loss.lld_weight")
    now = f" ({weight:g} now)" if isinstance(weight, (int, float)) else ""
    return f"{cause} optim.lr, or raise loss.lld_weight{now}."


class Rise:
    """Whether the median of the last 10 values was 30 % above its least so far, for 10 values in a row.

    And above the first such median: entropy that falls in training and comes back is no alarm.
    """

    def __init__(self):
        self.values: deque[float] = deque(maxlen=WINDOW)
        self.first, self.least, self.held = None, math.inf, 0
        self.level = math.nan

    def update(self, value: float) -> bool:
        self.values.append(value)
        if len(self.values) == WINDOW:
            level = self.level = statistics.median(self.values)  # one wild step does not move it
            self.first = level if self.first is None else self.first
            self.least = min(self.least, level)
            self.held = self.held + 1 if level > max(self.first, RISE * self.least) else 0
        return self.risen

    @property
    def risen(self) -> bool:
        return self.held >= WINDOW


class Detector:
    """The phase of a run, from its rows of metrics.jsonl, one by one.

    num_updates: optim.updates_per_rollout; advice: what the warning of flattening or a spiral ends with
    (`remedy`). After `update`, `signs` holds the signs of a collapse in words
    (one alone is not a collapse), and `idle` the number of steps in a row without a mixed group.
    """

    def __init__(self, num_updates: int = 2, advice: str = remedy({})):
        # With one update per rollout, its forward pass still has the old policy, so the displacement is 0
        # until the rollout is re-scored.
        self.displacement = "displacement/correct" if num_updates > 1 else "final/displacement/correct"
        self.advice = advice
        self.rows: list[dict] = []
        self.falls: list[float] = [0.0]  # S after each step
        self.wrong = Rise()
        self.best: dict[str, float] = {}  # name -> best mean of a window so far
        self.signs: list[str] = []
        # Steps in a row with a lost reward, and without a mixed group.
        self.lost_for = self.idle = 0

    def update(self, row: dict) -> int:
        self.rows.append({name: row[name] for name in WATCHED if name in row})
        # Stays 0 if the row lacks the displacement or the likelihood of correct responses: there was no mixed
        # group, or the step was not re-scored.
        fall = 0.0
        if self.displacement in row and RIGHT in row:
            relative = row[self.displacement] / max(abs(row[RIGHT]), 1e-6)
            fall = -max(-LARGEST_FALL, min(LARGEST_FALL, relative)) - ALLOWANCE
        self.falls.append(max(0.0, self.falls[-1] + fall))
        if FLAT in row:
            self.wrong.update(row[FLAT])
        if self._has_collapsed():
            return COLLAPSE
        if self.wrong.risen:
            return SPIRAL if self.gap < GAP else FLATTENING
        return DISPLACEMENT if self.displaced else 0

    @property
    def displaced(self) -> bool:
        """Whether correct responses have lost twice their negative log-likelihood."""
        return self.falls[-1] > DISPLACED

    @property
    def gap(self) -> float:
        """Log-likelihood of wrong minus right responses, nats a token, over the last window; 0 without it."""
        wrong, right = self._values(WRONG), self._values(RIGHT)
        return statistics.fmean(wrong) - statistics.fmean(right) if wrong and right else 0.0

    def warning(self, row: dict, phase: int) -> str | None:
        """The message after the update with `row`, if `phase` begins (0: none does).

        Also if no group has been mixed for LONG steps. None if there is nothing to report.
        """
        begins = f"step {row['step']}: phase {phase} ({NAMES[phase]}) begins"
        if phase == COLLAPSE:
            what = ", ".join(self.signs)
            return (
                f"{begins}: {what} (best {WINDOW} steps -> last {SHORT}). Look at its responses; few such "
                "runs come back to their best. To go back, end it (monitor.stop_in_phase=4 does so) and "
                "start a new one from a checkpoint of before (model.path), with a smaller optim.lr."
            )
        if phase in (FLATTENING, SPIRAL):
            return (
                f"{begins}: entropy of wrong responses {self.wrong.least:.2f} at its least -> "
                f"{self.wrong.level:.2f} nats; they are {abs(self.gap):.2f} nats a token "
                f"{'less' if self.gap < 0 else 'more'} likely than right ones. {self.advice}"
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
