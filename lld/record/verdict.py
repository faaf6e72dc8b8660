"""One line about a run: did it work, and what to do next. By the rules of the alarm and of the outcome."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lld.record import courses, phases, runs

# Two standard errors of a difference between two exact matches, where the log has no number of questions.
NOISE = 0.1
SOON = 2 * phases.SHORT  # steps without two evaluations that are too few to judge by the reward


class Course(NamedTuple):
    """Held-out exact match of a run, a mean over its benchmarks; `noise` is what chance alone can move it."""

    first: float
    now: float
    best: float
    best_at: int  # steps done
    noise: float


def held_out_course(rows: Sequence[dict], options: dict) -> Course | None:
    """The course of the exact match; None before the second evaluation."""
    found: dict[int, list[float]] = {}
    by_benchmark = courses.held_out_scores(rows, options)
    for scores in by_benchmark.values():
        for num_steps, score in scores:
            found.setdefault(num_steps, []).append(score)
    most = max(map(len, found.values()), default=0)
    means = {at: sum(some) / most for at, some in sorted(found.items()) if len(some) == most}
    if len(means) < 2:
        return None
    (first, *_), (*_, now) = means.values(), means.values()
    best_at = max(means, key=means.__getitem__)
    sizes = [max(row.get(f"eval/{name}/num_questions", 0) for row in rows) for name in by_benchmark]
    spread = max(0.0, sum(em * (1 - em) for em in (first, means[best_at])))
    # Every benchmark has the same weight, however many questions it has
    noise = 2 * math.sqrt(spread * sum(1 / size for size in sizes)) / most if all(sizes) else NOISE
    return Course(first, now, means[best_at], best_at, noise)


def judge(rows: Sequence[dict], options: dict) -> dict[str, str]:
    """{"kind": "good", "plain" or "bad", "text": the line} for the rows of a run and its options.

    `options` as of runs.read_options. What the alarm says goes before the scores.
    """
    rows = [{name: value for name, value in row.items() if runs.is_number(value)} for row in rows]
    updates, wanted = options.get("optim.updates_per_rollout"), options.get("run.steps")
    detector = phases.Detector(updates if runs.is_number(updates) else 2)
    for row in rows:
        detected = detector.update(row)
    phase, course = rows[-1].get("phase", detected), held_out_course(rows, options)
    outcome = courses.outcome(rows, options)
    goes_on = runs.is_number(wanted) and outcome["steps"] < wanted
    if phase == phases.COLLAPSE or outcome["verdict"] == "collapsed":
        return {"kind": "bad", "text": f"It collapsed{_collapse(outcome, course)}"}
    if phase in (phases.FLATTENING, phases.SPIRAL):
        begins = "A collapse threatens" if goes_on else "It ended near a collapse"
        said = f"{begins}, in phase {int(phase)} ({phases.NAMES[int(phase)]}): {_scores(course, outcome)}"
        return {"kind": "bad", "text": f"{said}. {phases.remedy(options)}"}
    if detector.idle >= phases.LONG:
        return {
            "kind": "bad",
            "text": f"Nothing to learn from: no group was mixed for {detector.idle} steps. If all answers "
            "are wrong, take easier questions, a warm start or reward.kind=format; if all are right, harder "
            "questions.",
        }
    if course is None and outcome["steps"] < SOON:
        return {"kind": "plain", "text": f"Too early to tell after {outcome['steps']} steps."}
    kind, said = _result(course, outcome, goes_on)
    return {"kind": kind, "text": said}


def _collapse(outcome: dict, course: Course | None) -> str:
    reward = outcome["reward"]
    fall = f": reward {reward['best']:.2f} at its best, {reward['last']:.2f} now" if reward else ""
    before = f"the checkpoint after {course.best_at} steps" if course else "a checkpoint of before"
    return f"{fall}. Start a new run from {before} (model.path), with a smaller optim.lr."


def _scores(course: Course | None, outcome: dict) -> str:
    if course is None:
        reward = outcome["reward"]
        return f"reward {reward['first']:.2f} -> {reward['last']:.2f}" if reward else "no reward was logged"
    best = ""
    if course.best > max(course.first, course.now):
        best = f", best {course.best:.3f} after {course.best_at} steps"
    return f"held-out EM {course.first:.3f} -> {course.now:.3f}{best}"


def _result(course: Course | None, outcome: dict, goes_on: bool) -> tuple[str, str]:
    """Kind and line of a run without an alarm: by held-out exact match, without it by the reward."""
    scores = _scores(course, outcome)
    if course is None:
        rose, fell = outcome["verdict"] == "rose", outcome["verdict"] == "fell"
        lost = False
    else:
        rose, fell = course.now - course.first > course.noise, course.first - course.now > course.noise
        lost = min(course.best - course.now, course.best - course.first) > course.noise
        scores += f" (chance alone: up to {course.noise:.2f})"
    if lost and not fell:
        return "plain", f"It worked and is losing it: {scores}. Use the best checkpoint; lower optim.lr."
    if fell:
        return "bad", f"It gets worse: {scores}. Lower optim.lr; docs/alarm.md lists symptoms and remedies."
    if rose and goes_on:
        return "good", f"It works so far: {scores}. Let it go on."
    if rose:
        return (
            "good",
            f"It worked: {scores}. Evaluate it with eval.py, or resume it with a larger run.steps.",
        )
    after = "Let it go on" if goes_on else "Resume it with a larger run.steps, or raise optim.lr"
    return "plain", f"No clear change {'yet' if goes_on else 'at the end'}: {scores}. {after}."


def describe_checkpoint(run_dir: str | Path) -> str:
    """A run's best checkpoint, or its newest, with the command that evaluates it; "" if it has none."""
    folder = Path(run_dir)
    whole = {
        path.parent.name: path.parent
        for path in sorted(
            folder.glob("checkpoints/step_*[0-9]/manifest.json"),
            key=lambda path: (len(path.parent.name), path),
        )
    }
    if not whole:
        return ""
    told = folder / "checkpoints" / "best.json"
    remedy = "delete it, and the newest checkpoint is named"
    best = runs.parse_json(told.read_bytes(), str(told), remedy).get("checkpoint") if told.is_file() else ""
    chosen, what = (whole[str(best)], "best") if str(best) in whole else (list(whole.values())[-1], "newest")
    return (
        f"{what} checkpoint: {chosen}; its score on all held-out questions: python eval.py --ckpt "
        f"{shlex.quote(str(chosen))} --config {shlex.quote(str(folder / 'config.yaml'))}"
    )


def describe_end(run_dir: str | Path) -> str:
    """Lines for the console: what a run has reached, and the command to evaluate its checkpoint."""
    folder = Path(run_dir)
    rows, options = runs.read_metrics(folder), runs.read_options(folder)
    scores, reward = courses.describe_scores(rows, options), courses.course(rows, "reward/mean", runs.WINDOW)
    lines = [
        f"{folder}: {rows[-1]['step'] + 1} of {options.get('run.steps', '?')} steps"
        + (f"; held-out {scores}" if scores else "")
    ]
    if reward:
        which = (
            f"means of the first and last {reward['window']} steps"
            if reward["window"] > 1
            else "first and last step"
        )
        lines[0] += f"; reward {reward['first']:.3f} -> {reward['last']:.3f} ({which})"
    lines.append(judge(rows, options)["text"])
    if checkpoint := describe_checkpoint(folder):
        lines.append(checkpoint)
    return "\n".join(lines)
