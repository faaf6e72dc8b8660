"""Trajectory files as the page shows them: bars of Fig. 3a, and the steps that fit, as compact JSON."""

import collections
import json
import re
from collections.abc import Sequence
from pathlib import Path

from lld.record import runs

DIGITS = 5  # significant digits of a drawn number
# In JSON these characters occur inside strings only.
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
# Lone surrogates, which are valid neither in UTF-8 nor in a browser.
_SURROGATE = re.compile("[\ud800-\udfff]")


def rounded(value: float) -> float | int | None:
    """A number with DIGITS significant digits; None if it cannot be drawn."""
    if not runs.is_number(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")


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
        "delta": rounded(sum(changes) / len(changes)),
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
    found = [[passages((p["id"], p["contents"])), rounded(p["score"])] for p in turn["passages"]]
    names = ("start", "tag_start", "end", "observation_end", "kind", "content", "stop")
    return [*(turn[name] for name in names), int(turn["searched"]), found]


def differences_to(old: Sequence, values: Sequence | None) -> list | None:
    """`values` minus `old`, None at entries where either is not a number; None without values."""
    if values is None:
        return None
    return [
        rounded(b - a) if runs.is_number(a) and runs.is_number(b) else None
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
        **{name: rounded(row[name]) for name in ("reward", "em", "advantage")},
        "turns": [compact_turn(turn, passages) for turn in row["turns"]],
        "tokens": [words(token) for token in row["tokens"]],
        "written": "".join("1" if action > 0 else "0" for action in row["action_ids"]),
        "parts": "".join(map(str, row["part_ids"])),
        "old": [rounded(value) for value in old],
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
