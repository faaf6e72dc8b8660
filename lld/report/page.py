"""Run folders -> one self-contained HTML page: the template `report.html` with the logs inserted as JSON.

Retrieved passages and model output are untrusted text. They are inserted as JSON with all markup characters
escaped, and the page's script shows them as text nodes only. The content security policy allows the one
script and the one style sheet by their hashes, and nothing else.
"""

import base64
import collections
import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

from lld.config import keys_of
from lld.protocol import PARTS
from lld.record import phases, runs, verdict
from lld.record.glossary import GLOSSARY
from lld.rules import clip_bounds

TEMPLATE = Path(__file__).with_name("report.html")
# A page of this size still opens at once; all groups of a 3B run would take several times as much.
TRAJECTORIES_MB = 24.0
DIGITS = 5  # significant digits of a drawn number
# In JSON these characters occur inside strings only.
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
# Lone surrogates, which are valid neither in UTF-8 nor in a browser.
_SURROGATE = re.compile("[\ud800-\udfff]")
WINDOWS = 4  # quarters of a run, for `by_update`


def _rounded(value: float) -> float | int | None:
    """A number with DIGITS significant digits; None if it cannot be drawn."""
    if not runs.is_number(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")


def columns(rows: Sequence[dict]) -> dict[str, dict]:
    """Name -> {"v": one value or null per row}, or {"i": row indices, "v": values} if most rows have none."""
    table = {}
    for name in sorted({name for row in rows for name in row} - {"step"}):
        present = [
            (index, value) for index, row in enumerate(rows) if (value := _rounded(row.get(name))) is not None
        ]
        if 2 * len(present) < len(rows):
            table[name] = {"i": [index for index, _ in present], "v": [value for _, value in present]}
        else:
            table[name] = {"v": [_rounded(row.get(name)) for row in rows]}
    return table


def by_update(rows: Sequence[dict], name: str = "displacement/correct") -> list[dict]:
    """The mean of `name` by update within the rollout, for each quarter of a run.

    Returns [{"first_step", "last_step", "means"}], with one mean per update (None without values).
    """
    some = [row for row in rows if runs.is_number(row.get(name)) and "update" in row]
    if not some:
        return []
    first, last = some[0]["step"], some[-1]["step"]
    cells: dict[int, dict[int, list[float]]] = {}
    for row in some:
        window = min(WINDOWS - 1, (row["step"] - first) * WINDOWS // (last - first + 1))
        cells.setdefault(window, {}).setdefault(row["update"], []).append(row[name])

    def first_step_of(window: int) -> int:
        return first + math.ceil(window * (last - first + 1) / WINDOWS)

    return [
        {
            "first_step": first_step_of(w),
            "last_step": first_step_of(w + 1) - 1,
            "means": [_rounded(sum(v) / len(v)) if (v := by.get(u)) else None for u in range(max(by) + 1)],
        }
        for w, by in sorted(cells.items())
    ]


def read_trajectories(path: Path) -> list[list[dict]]:
    """The groups of one RUN/trajectories/step_N.jsonl, in file order.

    A question may be drawn twice in a step: a sample number that comes again begins another group.
    """
    groups: dict[tuple[str, int], list[dict]] = {}
    drawn: collections.Counter = collections.Counter()
    for row in runs.read_rows(path):
        name = str(row["question"]["id"])
        drawn[name, row["sample"]] += 1
        groups.setdefault((name, drawn[name, row["sample"]]), []).append(row)
    return list(groups.values())


def question_displacement(group: Sequence[dict], later: str) -> dict | None:
    """A bar of Fig. 3a: mean change in log-likelihood, from `old` to `later`, of correct responses (A > 0).

    A response's change is the sum over the tokens that the model wrote (Eq. 2). None without a correct
    response whose values are all finite.
    """
    changes = []
    for row in group:
        if row["advantage"] > 0 and row[later] is not None:
            pairs = [
                (old, new)
                for old, new, action in zip(row["old"], row[later], row["action_ids"], strict=False)
                if action
            ]
            if all(runs.is_number(old) and runs.is_number(new) for old, new in pairs):
                changes.append(sum(new - old for old, new in pairs))
    if not changes:
        return None
    return {
        "question": group[0]["question"]["text"],
        "delta": _rounded(sum(changes) / len(changes)),
        "responses": len(changes),
    }


class _Table:
    """Assigns numbers to values, in order of first use; each value is kept once."""

    def __init__(self):
        self.numbers = {}

    def __call__(self, value) -> int:
        return self.numbers.setdefault(value, len(self.numbers))


def compact_turn(turn: dict, passages: _Table) -> list:
    """A turn as a list, with its passages as (number, score)."""
    found = [[passages((p["id"], p["contents"])), _rounded(p["score"])] for p in turn["passages"]]
    names = ("start", "tag_start", "end", "observation_end", "kind", "content", "stop")
    return [*(turn[name] for name in names), int(turn["searched"]), found]


def differences_to(old: Sequence, values: Sequence | None) -> list | None:
    """`values` minus `old`, None at entries where either is not a number; None without values."""
    if values is None:
        return None
    return [
        _rounded(b - a) if runs.is_number(a) and runs.is_number(b) else None
        for a, b in zip(old, values, strict=True)
    ]


def compact_episode(row: dict, words: _Table, passages: _Table) -> dict:
    """A line of a trajectory file: tokens and passages by number, log-probabilities of the model's tokens.

    `sampled`, `new` and `final` become differences to `old`, so that rounding cannot hide a small change.
    """
    written = [index for index, action in enumerate(row["action_ids"]) if action]
    scores = {}
    for name in ("old", "sampled", "new", "final"):
        values = row[name] if name == "old" else row.get(name)
        scores[name] = None if values is None else [values[index] for index in written]
    old = scores["old"]
    return {
        **{name: row[name] for name in ("sample", "stop_reason", "answer")},
        **{name: _rounded(row[name]) for name in ("reward", "em", "advantage")},
        "turns": [compact_turn(turn, passages) for turn in row["turns"]],
        "tokens": [words(token) for token in row["tokens"]],
        "written": "".join("1" if action > 0 else "0" for action in row["action_ids"]),
        "parts": "".join(map(str, row["part_ids"])),
        "old": [_rounded(value) for value in old],
        "sampled": differences_to(old, scores["sampled"]),
        "new": differences_to(old, scores["new"]),
        "final": differences_to(old, scores["final"]),
        "gates": {
            name: "".join(str(int(gate[index] or 0)) for index in written)
            for name, gate in (row.get("gates") or {}).items()
        },
    }


def compact_step(groups: Sequence[Sequence[dict]]) -> dict:
    """The groups of one step as the page's viewer reads them."""
    words, passages = _Table(), _Table()
    packed = [
        {
            "question": group[0]["question"],
            "prompt": group[0]["prompt"],
            "episodes": [compact_episode(row, words, passages) for row in group],
        }
        for group in groups
    ]
    return {
        "groups": packed,
        "words": list(words.numbers),
        "passages": [list(passage) for passage in passages.numbers],
    }


def evenly(sizes: Sequence[int], room: int) -> list[int]:
    """As many evenly spaced indices, with the first and the last, as fit into `room`; at least the last."""
    for count in range(len(sizes), 1, -1):
        chosen = [round(i * (len(sizes) - 1) / (count - 1)) for i in range(count)]
        if sum(sizes[index] for index in chosen) <= room:
            return chosen
    return [len(sizes) - 1] if sizes else []


def escaped_json(content) -> str:
    """JSON that is safe between <script> tags; ValueError for NaN and infinities.

    <, >, & and JavaScript's line separators are escaped, lone surrogates replaced.
    """
    text = _SURROGATE.sub(
        "\ufffd", json.dumps(content, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    )
    return text.translate(_ESCAPES)


def collect_trajectories(run_dir: Path, room: int) -> tuple[dict, dict[int, str]]:
    """The summary of a run's trajectories, and step -> JSON of the steps that fit into `room` bytes.

    The summary has the bars of Fig. 3a for every recorded step. Reads one file at a time, because all files
    of a 3B run would not fit into memory.
    """
    texts, bars = {}, {"new": [], "final": []}
    for path in sorted((run_dir / "trajectories").glob("step_*.jsonl")):
        try:
            groups = read_trajectories(path)
            if not groups:
                continue
            step = groups[0][0]["step"]
            texts[step] = escaped_json(compact_step(groups))
            for later in bars:
                if all(row[later] is not None for group in groups for row in group):
                    bars[later].append(
                        {
                            "step": step,
                            "bars": [bar for group in groups if (bar := question_displacement(group, later))],
                        }
                    )
        except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"{path} is damaged ({type(error).__name__}: {error}): delete it, and the report does without"
            ) from None
    later = "final" if bars["final"] else "new"
    steps = list(texts)
    shown = [steps[index] for index in evenly([len(text) for text in texts.values()], room)]
    return {"steps": shown, "recorded": len(steps), "later": later, "bars": bars[later]}, {
        step: texts[step] for step in shown
    }


def page_content(
    run_dirs: Sequence[str | Path], trajectories_mb: float = TRAJECTORIES_MB
) -> tuple[dict, dict[str, str]]:
    """The content of the page's first data block, and id -> JSON of the blocks that it reads on demand."""
    folders = [Path(run_dir) for run_dir in run_dirs]
    # An option that a run's file lacks had its default; without a file nothing is known.
    options = [some and runs.defaults() | some for some in map(runs.read_options, folders)]
    room = int(trajectories_mb * 1e6 / len(folders))
    shown, blocks = [], {}
    named = zip(folders, runs.labels(folders), runs.settings(options), strict=True)
    for index, (folder, label, setting) in enumerate(named):
        rows = runs.read_metrics(folder)
        about, updates = folder / "run.json", folder / "updates.jsonl"
        trajectories, texts = collect_trajectories(folder, room)
        blocks |= {f"trajectories-{index}-{step}": text for step, text in texts.items()}
        shown.append(
            {
                "label": label,
                "about": runs.parse_json(
                    about.read_bytes(), str(about), "delete it, and the report does without"
                )
                if about.is_file()
                else {},
                "method": runs.method(options[index]) if options[index] else "unknown (no config.yaml)",
                "setting": setting,
                "options": options[index],
                "clip": clip_of(options[index]),
                "outcome": runs.outcome(rows, options[index]),
                "verdict": verdict.judge(rows, options[index]),
                "remedy": phases.remedy(options[index]),
                "checkpoint": verdict.describe_checkpoint(folder),
                "steps": [row["step"] for row in rows],
                "columns": columns(rows),
                "by_update": by_update(runs.read_rows(updates)) if updates.is_file() else [],
                "trajectories": trajectories,
            }
        )
    content = {
        "runs": shown,
        "differences": runs.differences(options),
        "glossary": GLOSSARY,
        "parts": PARTS,
        "gates": keys_of("loss", "GATES"),
    }
    return content, blocks


def clip_of(options: dict) -> list[float | None] | None:
    """The ratios between which a run's loss keeps the gradient (`clip_bounds`): [low, high or null].

    None where they are not known: without a config.yaml, or where it holds no numbers.
    """
    names = {name.removeprefix("loss."): value for name, value in options.items()}
    try:
        return [bound if runs.is_number(bound) else None for bound in clip_bounds(SimpleNamespace(**names))]
    except (TypeError, OverflowError, AttributeError):
        return None


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def render(content: dict, blocks: dict[str, str]) -> Iterable[str]:
    """The page in pieces: the template, filled with its security policy, content and trajectories."""
    template = TEMPLATE.read_text(encoding="utf-8")

    def between(start: str, end: str) -> str:
        return template[template.index(start) + len(start) : template.index(end)]

    policy = (
        f"default-src 'none'; script-src {_hash(between('<script>', '</script>'))}; style-src "
        f"{_hash(between('<style>', '</style>'))}; base-uri 'none'; form-action 'none'"
    )
    head, tail = template.replace("{{policy}}", policy, 1).split("{{content}}")
    yield head
    yield f'<script type="application/json" id="content">{escaped_json(content)}</script>\n'
    for name, text in blocks.items():
        yield f'<script type="application/json" id="{name}">{text}</script>\n'
    yield tail


def write_page(
    run_dirs: Sequence[str | Path], path: str | Path, trajectories_mb: float = TRAJECTORIES_MB
) -> None:
    """Writes the report of the runs: one HTML file that needs no server and no network.

    Metrics, options and files that a run lacks are shown as missing. Raises ValueError for a folder without
    metrics and for damaged logs.
    """
    pieces = render(*page_content(run_dirs, trajectories_mb))
    # In a folder from elsewhere the file may be a link: do not write through it.
    Path(path).unlink(missing_ok=True)
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(pieces)
