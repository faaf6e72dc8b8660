"""Reads run folders: logs, options, and what differs between runs."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from lld.config import Config
from lld.settings import parse_yaml, to_dict

MAX_STEP = 10**9  # no run is that long
LARGEST = 1e100  # to be drawn; sums of these are finite
WINDOW = 10  # steps of the running mean
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
