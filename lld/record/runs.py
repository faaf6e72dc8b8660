"""Reads run folders: logs, options, differences between runs, and the outcome of each."""

import json
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from lld.config import Config
from lld.record.phases import COLLAPSE
from lld.settings import parse_yaml, to_dict

MAX_STEP = 10**9  # no run is that long
LARGEST = 1e100  # to be drawn; sums of these are finite
WINDOW = 10  # steps of the running mean
# A gradient surge: the median of 5 steps exceeds 5 times the median of up to 50 steps before.
SURGE_RATIO, SURGE_WIDTH, SURGE_BEFORE = 5.0, 5, 50
# The reward (running mean) "held" if the last value is at least this share of the best,
HELD = 0.75
# and "rose" if the last value is also at least this multiple of the first.
ROSE = 1.25
COLLAPSE_SHARE, COLLAPSE_FALL = 0.5, 0.1  # see find_collapse
SETTING_SECTIONS = (
    "model",
    "data",
    "rollout",
    "reward",
    "advantage",
    "loss",
    "optim",
    "retriever",
    "tinyworld",
)


# Control characters except tab and newline, bidirectional controls, and lone surrogates.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    """Untrusted text (of a file, a passage, a model) made safe for a terminal.

    Characters that could move the cursor, set colours or reverse the text become U+FFFD.
    """
    return _CONTROLS.sub("\ufffd", str(text))


def parse_json(text: str | bytes, where: str, remedy: str) -> dict:
    """The object in a JSON text; ValueError, with `where` and `remedy`, for anything else."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"{where} is damaged (brackets nested too deeply): {remedy}") from None
    except ValueError as error:
        # Not JSON, not UTF-8, or a number with thousands of digits.
        raise ValueError(f"{where} is damaged ({error}): {remedy}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where} is damaged ({type(value).__name__} in place of an object): {remedy}")
    return value


def read_rows(path: Path) -> list[dict]:
    """The rows of a JSONL log, each with a step; [] if there is no file.

    An incomplete last line is still being written and left out. A damaged line raises ValueError.
    """
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        row = parse_json(line, f"{path} line {number}", "delete the line")
        if type(row.get("step")) is not int or not 0 <= row["step"] < MAX_STEP:
            raise ValueError(
                f"{path} line {number} is damaged (step = {str(row.get('step'))[:40]!r} is no whole number "
                "from 0): delete the line"
            )
        rows.append(row)
    return rows


def read_metrics(run_dir: str | Path) -> list[dict]:
    """The rows of RUN/metrics.jsonl in file order; an incomplete last line is left out.

    ValueError if the file is missing, damaged or has no rows yet.
    """
    path = Path(run_dir) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"no {path}: give the folder of a run (option run.dir)")
    rows = read_rows(path)
    if not rows:
        raise ValueError(f"{path} has no rows yet: wait for the first step")
    return rows


def is_number(value) -> bool:
    """Whether a logged value is a number that can be drawn and summed with others."""
    return isinstance(value, (int, float)) and abs(value) <= LARGEST


def series(rows: Sequence[dict], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of the rows that have a finite number under `name`."""
    pairs = [(row["step"], row[name]) for row in rows if is_number(row.get(name))]
    return [step for step, _ in pairs], [value for _, value in pairs]


def running_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """The mean of each value and up to `window` - 1 values before it.

    It uses no later values, so that a collapse is not drawn too early.
    """
    return [
        sum(values[max(0, i + 1 - window) : i + 1]) / len(values[max(0, i + 1 - window) : i + 1])
        for i in range(len(values))
    ]


def labels(run_dirs: Sequence[Path]) -> list[str]:
    """The folders' names, with as many parents as it takes to distinguish them."""
    parts = [Path(path).resolve().parts for path in run_dirs]
    depth = 1
    while depth < max(map(len, parts)) and len({path[-depth:] for path in parts}) < len(set(parts)):
        depth += 1
    return ["/".join(path[-depth:]) for path in parts]


def _plain(value, depth: int = 0):
    """A value of a YAML file that JSON can hold.

    Other types become text; so does anything nested more deeply than an option can be.
    """
    if isinstance(value, (list, dict)) and depth == 3:
        return "…"
    if isinstance(value, list):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item, depth + 1) for name, item in value.items()}
    return (
        value
        if value is None or isinstance(value, (str, bool)) or is_number(value)
        else f"a {type(value).__name__}"
    )


def flat(tree: dict) -> dict:
    """`section.option` -> value, of options by section."""
    return {
        f"{section}.{name}": value
        for section, options in tree.items()
        if isinstance(options, dict)
        for name, value in options.items()
    }


def read_options(run_dir: str | Path) -> dict:
    """`section.option` -> value of RUN/config.yaml, as far as it is there; empty if there is no such file."""
    path = Path(run_dir) / "config.yaml"
    if not path.is_file():
        return {}
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({error}): restore it, or move it away and the report does without"
        ) from None
    return _plain(flat(tree)) if isinstance(tree, dict) else {}


def defaults() -> dict:
    """`section.option` -> its default, as `read_options` has the values."""
    return _plain(flat(to_dict(Config())))


def differences(options: Sequence[dict]) -> dict[str, list]:
    """Option -> one value per run (None if a run lacks it), for options that differ; without `run.dir`.

    For a single run: the options that depart from the defaults, as [value, default].
    """
    if len(options) == 1:
        options = [options[0], defaults()]
        names = [name for name in options[0] if name in options[1]]
    else:
        names = list(dict.fromkeys(name for some in options for name in some))
    table = {name: [some.get(name) for some in options] for name in names if name != "run.dir"}
    return {name: values for name, values in table.items() if any(value != values[0] for value in values)}


def method(options: dict) -> str:
    """A run's method by its name in the paper: GRPO, GRPO + LLDS, GRPO + LLDS-MA.

    A gate other than the default is appended.
    """
    preset = options.get("loss.preset", "none")
    name = str(options.get("loss.kind", "grpo") if preset == "none" else preset).upper()
    if not options.get("loss.lld_weight"):
        return name
    less_on_answers = (
        options.get("loss.lld_answer_schedule", "constant") != "constant"
        or options.get("loss.lld_answer_weight", 1.0) != 1.0
    )
    gate = options.get("loss.lld_gate", "action")
    return f"{name} + LLDS" + "-MA" * less_on_answers + f" ({gate} gate)" * (gate != "action")


def settings(options: Sequence[dict]) -> list[str]:
    """For each run, its options that differ besides LLDS's and the seed, as text.

    Runs with the same text may be compared. Of several options that split the runs in the same way, such as
    the paths of a world, only the first is named. A path is cut to its last two parts where these suffice.
    """
    texts, seen = [[] for _ in options], set()
    for name, values in differences(options).items() if len(options) > 1 else ():
        if name.split(".")[0] not in SETTING_SECTIONS or name.startswith("loss.lld_"):
            continue
        split = _split(values)
        if split in seen:
            continue
        seen.add(split)
        short = ["/".join(value.split("/")[-2:]) if isinstance(value, str) else value for value in values]
        for text, value in zip(texts, short if _split(short) == split else values, strict=True):
            text.append(f"{name} = {value}")
    return [", ".join(text) for text in texts]


def _split(values: Sequence) -> tuple[int, ...]:
    """For each value, the first place of an equal one."""
    texts = [json.dumps(value) for value in values]
    return tuple(texts.index(text) for text in texts)


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
