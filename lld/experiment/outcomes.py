"""Rows of a run's log -> one row of an experiment's record: what became of the run.

A value that does not exist is None, and an empty field in the CSV: the run did not fall, or no response of
that kind was sampled.
"""

import csv
import fcntl
import io
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from lld import files
from lld.experiment.grid import Run
from lld.record import phases
from lld.record.contexts import CONTEXTS
from lld.record.courses import find_collapse
from lld.record.runs import (
    is_number,
    parse_json,
    read_metrics,
    read_rows,
    running_mean,
    series,
)

END = 40  # steps of a level: of the end, and of the best one
EARLY = 100  # steps before which few runs have fallen
CURVE = 25  # steps of a point of a curve
CHANGES = "+changes"  # ends a commit of run.json whose files were changed
FELL = 0.75  # a run fell if its EM of the end is below this share of its best level
# Column of the record -> the logged number that it follows
FOLLOWED = {
    "em": "em",
    "entropy": "entropy",
    "entropy_right": "entropy/correct",
    "entropy_wrong": "entropy/incorrect",
    "right": "likelihood/correct_old",
    "wrong": "likelihood/incorrect_old",
    "valid": "valid_actions",
    "truncated": "truncated",
    "tokens": "response_tokens",
    "kept_mass": "kept_mass",
    "drift": "drift",
}
# Signs and phases of lld/record/phases.py whose first step is recorded
SIGNS = ("displacement", "flattening", "gap", "spiral", "collapse")
EXTREMES = ("entropy", "entropy_right", "entropy_wrong", "right", "wrong")  # least and most are recorded too
ABOUT = ("world", "arm", "rate", "seed", "steps")
NUMBERS = ("rate", "seed", "steps")
TEXTS = (*ABOUT[:2], "options", "fingerprint", "commit", "machine")


def ending(rows: Sequence[dict], name: str) -> float | None:
    """The mean over the last 40 steps; None if none of them has a value."""
    values = series(rows[-END:], name)[1]
    return fmean(values) if values else None


def fall(steps: Sequence[int], values: Sequence[float]) -> dict[str, float | None]:
    """The best level, the largest fall below it, and when a level was below 3/4 of the best one before.

    A level is a mean of 40 steps, its step the last of them. em_fall: a share of the best level before.
    lost_step: the first level below; fell_step: from this one on all were. None: no such level.
    """
    best = largest = lost = since = None
    for step, now in zip(steps[END - 1 :], running_mean(values, END)[END - 1 :], strict=True):
        best = now if best is None else max(best, now)
        largest = max(largest or 0.0, 1 - now / best if best else 0.0)
        since = None if now >= FELL * best else step if since is None else since
        lost = since if lost is None else lost
    return {"em_peak": best, "em_fall": largest, "lost_step": lost, "fell_step": since}


def onset(steps: Sequence[int], values: Sequence[float]) -> int | None:
    """The first step of the ten at which `lld.record.phases.Rise` sees a rise."""
    watch = phases.Rise()
    for index, value in enumerate(values):
        if watch.update(value):
            return steps[index - phases.WINDOW + 1]
    return None


def curve(rows: Sequence[dict], name: str) -> str:
    """Means of 25 steps each with 3 digits, separated by spaces; '-' where the log has no value."""
    points = []
    for start in range(0, len(rows), CURVE):
        values = series(rows[start : start + CURVE], name)[1]
        points.append(f"{fmean(values):.3g}" if values else "-")
    return "" if set(points) <= {"-"} else " ".join(points)


def parse_curve(text: str) -> list[tuple[float, float]]:
    """[(middle step, value)] of a curve's text."""
    return [
        ((index + 0.5) * CURVE, float(point))
        for index, point in enumerate(text.split())
        if point not in ("-", "nan")
    ]


def alarms(rows: Sequence[dict], num_updates: int) -> dict[str, int | None]:
    """The first step of each sign and phase of lld/record/phases.py; None if it never came."""
    detector, first = phases.Detector(num_updates), dict.fromkeys(SIGNS)
    for row in rows:
        phase = detector.update(row)
        flat, wide = detector.wrong.risen, detector.gap < phases.GAP
        shown = (detector.displaced, flat, wide, flat and wide, phase == phases.COLLAPSE)
        for name, shows in zip(SIGNS, shown, strict=True):
            if shows and first[name] is None:
                first[name] = row["step"]
    return {f"alarm_{name}": step for name, step in first.items()}


def course(name: str, rows: Sequence[dict], logged: str) -> dict[str, float | None]:
    """Means of the first 10 values and of the last 40 steps; of some names also the extreme means of 10."""
    values = series(rows, logged)[1]
    row = {f"{name}_start": fmean(values[: phases.WINDOW]) if values else None}
    row[f"{name}_end"] = ending(rows, logged)
    if name in EXTREMES:
        levels = running_mean(values)[phases.WINDOW - 1 :]
        row |= {f"{name}_least": min(levels, default=None), f"{name}_most": max(levels, default=None)}
    return row


def by_context(rows: Sequence[dict]) -> dict[str, float | None]:
    """What the log tells apart by what the context has seen: onsets, entropies, early advantage, drift."""
    row = {}
    for name in CONTEXTS:
        steps, values = series(rows, f"entropy/incorrect/{name}")
        row[f"onset_{name}"] = onset(steps, values)
        row[f"entropy_wrong_{name}_end"] = ending(rows, f"entropy/incorrect/{name}")
        row[f"entropy_right_{name}_end"] = ending(rows, f"entropy/correct/{name}")
    for logged in ("advantage", "drift"):
        for suffix in ("", *(f"/{name}" for name in CONTEXTS)):
            values = series(rows[:EARLY], logged + suffix)[1]
            row[f"early_{logged}{suffix.replace('/', '_')}"] = fmean(values) if values else None
    return row


def describe_run(rows: Sequence[dict], benchmark: str | None = None, num_updates: int = 2) -> dict:
    """The outcome of a run from the rows of its metrics.jsonl; `benchmark` is the held-out set that counts.

    em_end, and all that ends in _end: `ending`. em_peak, em_fall, lost_step, fell_step: `fall`.
    collapse_step: `lld.record.courses.find_collapse`. onset_*: `onset` of the entropy of wrong responses, as
    a whole and by what the context has seen. early_*: means of the first 100 steps. displacement: mean of
    displacement/correct over all steps. Likelihoods: nats per token.
    """
    steps, ems = series(rows, "em")
    held_out = series(rows, f"eval/{benchmark}/em")[1]
    row = {"em_end": ending(rows, "em")} | fall(steps, ems)
    row["collapse_step"] = find_collapse(*series(rows, "reward/mean"))["collapse_step"]
    row |= {"held_out_start": held_out[0] if held_out else None, "held_out_peak": max(held_out, default=None)}
    row["held_out_end"] = held_out[-1] if held_out else None
    for name, logged in FOLLOWED.items():
        row |= course(name, rows, logged)
    gaps = [
        row[FOLLOWED["wrong"]] - row[FOLLOWED["right"]]
        for row in rows[-END:]
        if is_number(row.get(FOLLOWED["wrong"])) and is_number(row.get(FOLLOWED["right"]))
    ]
    row |= {
        "gap_end": fmean(gaps) if gaps else None,
        "onset": onset(*series(rows, FOLLOWED["entropy_wrong"])),
    }
    row |= by_context(rows)
    row |= alarms(rows, num_updates)
    row["skipped_updates"] = sum(series(rows, "skipped_updates")[1])
    displacements = series(rows, "displacement/correct")[1]
    row["displacement"] = fmean(displacements) if displacements else None
    return row | {f"curve_{name}": curve(rows, logged) for name, logged in FOLLOWED.items()}


def record_of(run: Run) -> dict:
    """The row of a finished run: what it is, what became of it, and where it was made."""
    about = run.folder / "run.json"
    made = parse_json(about.read_bytes(), str(about), "delete it") if about.exists() else {}
    benchmark = run.cfg.eval.during_training[0] if run.cfg.eval.during_training else None
    rows = read_metrics(run.folder)[: run.steps]  # a run may have been continued beyond these steps
    row = {"world": run.world, "arm": run.arm, "rate": run.rate, "seed": run.seed, "steps": run.steps}
    row |= describe_run(rows, benchmark, run.cfg.optim.updates_per_rollout)
    timings = series(read_rows(run.folder / "timings.jsonl"), "time/step_s")[1]
    row |= {"seconds": sum(timings[: run.steps]), "options": " ".join(run.asked)}
    row["fingerprint"] = run.fingerprint
    row["commit"] = " ".join(commits_of(made, run.steps))
    row["machine"] = machine()
    return {name: rounded(value) for name, value in row.items()}


def commits_of(made: dict, steps: int) -> list[str]:
    """The commits that played the first `steps` steps, by run.json: 18 digits of each, and CHANGES."""
    sessions = [some for some in made.get("sessions") or [] if some.get("first_step", 0) < steps] or [made]
    names = dict.fromkeys(str(some["commit"]) for some in sessions if some.get("commit"))
    return [name[:18] + CHANGES * name.endswith(CHANGES) for name in names]


def machine() -> str:
    """This machine's processor and number of cores, as far as it tells."""
    names = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    name = next((line.split(":")[1].strip() for line in names if line.startswith("model name")), "")
    return f"{name or platform.machine()}, {os.cpu_count()} cores"


def rounded(value: object) -> object:
    """A float with 4 digits."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


# ----------------------------------------------------------------------------------------------------
# the record


def read_record(path: Path) -> list[dict]:
    """The rows of a record, [] if there is none; numbers as floats, empty fields as None."""
    if not path.is_file():
        return []
    try:
        with files.naming(path), open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is damaged ({error}): restore it") from None
    places: dict[str, int] = {}
    for number, row in enumerate(rows, start=2):
        missing = [name for name in (*ABOUT, "fingerprint") if not row.get(name)]
        if missing or None in row or None in row.values():
            raise ValueError(
                f"{path} line {number} is damaged ({', '.join(missing) or 'fields'}): restore it"
            )
        if (first := places.setdefault(row["fingerprint"], number)) != number:
            raise ValueError(f"{path}: lines {first} and {number} hold the same run: delete one of them")
    return [{name: _parsed(name, text, path) for name, text in row.items()} for row in rows]


def _parsed(name: str, text: str, path: Path) -> object:
    if name in TEXTS or name == "rate" or name.startswith("curve_"):
        return text
    try:
        return None if text == "" else int(text) if name in NUMBERS else float(text)
    except ValueError:
        raise ValueError(f"{path} is damaged ({name} = {text[:40]!r} is no number): restore it") from None


def add_to_record(path: Path, row: dict) -> None:
    """Adds a row to the CSV, unless it holds the run already.

    The file is replaced as a whole: a kill leaves the old one or the new one. Of several processes, one at a
    time reads and writes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        rows = read_record(path)
        if row["fingerprint"] not in {known["fingerprint"] for known in rows}:
            files.replace_file(path, csv_text([*rows, row]), durable=True)
    finally:
        os.close(folder)


def csv_text(rows: Sequence[dict]) -> str:
    """Comma-separated lines with the names of all rows in order of first appearance; None is empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows([{name: _shown(value) for name, value in row.items()} for row in rows])
    return file.getvalue()


def _shown(value: object) -> object:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else value
