"""What became of a run: the course of its reward and scores, surges, and the collapse of the reward."""

import math
import statistics
from collections.abc import Sequence

from lld.record.phases import COLLAPSE
from lld.record.runs import WINDOW, is_number, running_mean, series

# A gradient surge: the median of 5 steps exceeds 5 times the median of up to 50 steps before.
SURGE_RATIO, SURGE_WIDTH, SURGE_BEFORE = 5.0, 5, 50
# The reward (running mean) "held" if the last value is at least this share of the best,
HELD = 0.75
# and "rose" if the last value is also at least this multiple of the first.
ROSE = 1.25
COLLAPSE_SHARE, COLLAPSE_FALL = 0.5, 0.1  # see find_collapse


def gradient_surge(rows: Sequence[dict]) -> int | None:
    """The first step at which the gradient norm jumps and stays high; None without one.

    That is where the norm, and the median of the 5 steps from there, exceed 5 times the median of up to 50
    steps before (at least 10).
    """
    steps, norms = series(rows, "grad_norm")
    for i in range(10, len(norms) - SURGE_WIDTH + 1):
        if (
            norms[i] > SURGE_RATIO * (before := statistics.median(norms[max(0, i - SURGE_BEFORE) : i]))
            and statistics.median(norms[i : i + SURGE_WIDTH]) > SURGE_RATIO * before
        ):
            return steps[i]
    return None


def course(rows: Sequence[dict], name: str, window: int) -> dict | None:
    """First, best and last mean of `window` steps of a metric (fewer in a short run); None if not logged."""
    steps, values = series(rows, name)
    if not values:
        return None
    # In a short run the first and the last window must not be the same.
    window = min(window, max(1, len(values) // 2))
    smooth = running_mean(values, window)[window - 1 :]  # full windows only
    steps = steps[-len(smooth) :]
    best = max(range(len(smooth)), key=smooth.__getitem__)
    return {
        "first": smooth[0],
        "best": smooth[best],
        "best_step": steps[best],
        "last": smooth[-1],
        "window": window,
    }


def outcome(rows: Sequence[dict], options: dict) -> dict:
    """The outcome of a run.

    steps, steps_wanted: done and configured.
    verdict: on the reward: "rose", "held", "fell", or "collapsed" (and did not recover).
    reward, likelihood: first, best and last mean of 10 steps (fewer in a short run).
    held_out: benchmark -> (steps done, EM) of each evaluation, and the best of them.
    phases: phase -> (first step, last step, number of steps).
    surge: first step of a gradient surge. skipped_updates: their number.
    """
    reward = course(rows, "reward/mean", WINDOW)
    held, rose = True, False
    if reward:  # by shares; by a distance from a reward of 0 or a punishment on
        first, best, last = (reward[name] for name in ("first", "best", "last"))
        held = last >= HELD * best if first > 0 else best - last <= COLLAPSE_FALL
        rose = last >= ROSE * first if first > 0 else last - first >= COLLAPSE_FALL
    collapsed = (
        rows[-1].get("phase") == COLLAPSE
        or find_collapse(*series(rows, "reward/mean"))["collapse_step"] is not None
    )
    held_out = {
        name: {"scores": scores, "best": max(scores, key=lambda score: score[1])}
        for name, scores in sorted(held_out_scores(rows, options).items())
    }
    phases = {}
    for row in rows:
        if row.get("phase") and is_number(row["phase"]):
            first, _, count = phases.get(int(row["phase"]), (row["step"], 0, 0))
            phases[int(row["phase"])] = (first, row["step"], count + 1)
    return {
        "steps": rows[-1]["step"] + 1,
        "steps_wanted": options.get("run.steps"),
        "verdict": ("rose" if rose else "held") if held else "collapsed" if collapsed else "fell",
        "reward": reward,
        "held_out": held_out,
        "likelihood": course(rows, "likelihood/correct_old", WINDOW),
        "phases_logged": any("phase" in row for row in rows),
        "phases": phases,
        "surge": gradient_surge(rows),
        "skipped_updates": sum(series(rows, "skipped_updates")[1]),
    }


def held_out_scores(rows: Sequence[dict], options: dict) -> dict[str, list[tuple[int, float]]]:
    """benchmark -> [(steps done, EM)] of a run's evaluations, in order; 0 steps is before training."""
    found: dict[str, list[tuple[int, float]]] = {}
    # Whether the EM in the row of step 0 is from before training; else it is from after the first step.
    at_start = (
        options.get("eval.at_start", True)
        and options.get("eval.every") != 1
        and options.get("run.steps") != 1
    )
    for row in rows:
        for name, value in row.items():
            if name.startswith("eval/") and name.endswith("/em") and is_number(value):
                found.setdefault(name.split("/")[1], []).append(
                    (0 if at_start and row["step"] == 0 else row["step"] + 1, value)
                )
    return found


def describe_scores(rows: Sequence[dict], options: dict) -> str:
    """The newest, first and best score of each benchmark, as text.

    Such as 'tiny EM 0.720 after 25 steps (start 0.460, best 0.720 after 25 steps)'.
    """

    def when(num_steps):
        return f"after {num_steps} steps" if num_steps else "at the start"

    texts = []
    for name, scores in held_out_scores(rows, options).items():
        (first, start), (last, now), (at, best) = (
            scores[0],
            scores[-1],
            max(scores, key=lambda score: score[1]),
        )
        others = (
            (
                f" ({f'start {start:.3f}' if first == 0 else f'{start:.3f} {when(first)}'}, best {best:.3f} "
                f"{when(at)})"
            )
            if len(scores) > 1
            else ""
        )
        texts.append(f"{name} EM {now:.3f} {when(last)}{others}")
    return ", ".join(texts)


def find_collapse(steps: Sequence[int], rewards: Sequence[float]) -> dict:
    """The first collapse of the reward: when its running mean stays far below its earlier maximum.

    The mean is over 10 steps, full windows only. It must be below half of its earlier maximum, and at least
    0.1 below it, for 10 steps in a row. Returns

    - collapse_step: the first of these 10 steps; None without a collapse.
    - falling_step: the step from which on the mean was at least 0.1 below the maximum without a break; None
      without a collapse.
    - peak: the maximum up to the collapse, or of the whole run.
    - fall: the largest distance from an earlier maximum in the whole run.

    Half, because a dip or a plateau after the best step is not a collapse. 0.1, because the noise of such a
    mean is 0.02 to 0.03 with 80 episodes a step; a reward that never reached 0.1 cannot collapse. 10 steps in
    a row, because a low, noisy reward may cross the limit once by chance; a fall in the last 10 steps is
    therefore not counted. The maximum may be that of the warm start.
    """
    means = running_mean(rewards)
    peak, fall, falling, stretch, found = -math.inf, 0.0, None, 0, None
    for index in range(WINDOW - 1, len(means)):
        peak = max(peak, means[index])
        fall = max(fall, peak - means[index])
        falling = (
            None if peak - means[index] < COLLAPSE_FALL else steps[index] if falling is None else falling
        )
        stretch = stretch + 1 if falling is not None and means[index] < COLLAPSE_SHARE * peak else 0
        if stretch == WINDOW and found is None:
            found = {"collapse_step": steps[index - WINDOW + 1], "falling_step": falling, "peak": peak}
    return (
        found or {"collapse_step": None, "falling_step": None, "peak": peak if math.isfinite(peak) else None}
    ) | {"fall": fall}
