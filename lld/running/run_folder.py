"""The folder of a run: may it be written, is it this run's, do its logs hold every step once."""

import json
import os
from pathlib import Path

import yaml

from lld import config, settings
from lld.files import replace_file
from lld.record import metrics, runs
from lld.running.checkpoint import folder_of


def check_place(run_dir: Path) -> None:
    """Raises ValueError if the run folder cannot be written."""
    present = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not present.is_dir() or not os.access(present, os.W_OK):
        raise ValueError(
            f"run.dir = {run_dir}: {present} is "
            f"{'read-only, or not yours to write to' if present.is_dir() else 'a file, not a folder'}; "
            "choose another run.dir"
        )


def check_run_dir(run_dir: Path, cfg: config.Config, resume: bool) -> None:
    """Raises ValueError if a new run would overwrite an old one, or a resumed run has different options."""
    log = run_dir / "config.yaml"
    if not resume:
        left = next((name for name in ("metrics.jsonl", "checkpoints") if (run_dir / name).exists()), None)
        if log.exists():
            raise ValueError(
                f"run.dir = {run_dir} already holds a run: continue it with --resume {run_dir}, or choose "
                "another run.dir, or delete the folder"
            )
        if left:
            raise ValueError(
                f"run.dir = {run_dir} holds {left} of a run whose config.yaml is gone: restore that file, or "
                "choose another run.dir, or delete the folder"
            )
        return
    if not log.exists():
        raise ValueError(f"--resume: run.dir = {run_dir} holds no run")
    before, now, defaults = (
        runs.read_options(run_dir),
        settings.to_dict(cfg),
        settings.to_dict(config.Config()),
    )
    if not before:
        raise ValueError(
            f"--resume: {log} holds no options: restore it, or start a new run with model.path set to a "
            "checkpoint"
        )
    for section, options in now.items():
        for name, value in options.items():
            # An option added since the run began had its default value.
            was = before.get(f"{section}.{name}", defaults[section][name])
            if section != "plan" and f"{section}.{name}" not in settings.RESUMABLE and was != value:
                raise ValueError(
                    f"--resume: {section}.{name} was {was!r} and is {value!r} now; a resumed run keeps its "
                    f"options: give `--resume {run_dir}` alone, which takes them all (free to change: "
                    f"{', '.join(settings.RESUMABLE)})"
                )


def begin_run(run_dir: Path, cfg: config.Config, first_step: int) -> None:
    """Writes config.yaml, and drops log rows of steps that will be repeated."""
    replace_file(
        run_dir / "config.yaml", yaml.safe_dump(settings.to_dict(cfg), sort_keys=False), durable=True
    )
    for name in ("metrics.jsonl", "updates.jsonl", "timings.jsonl"):
        metrics.truncate_rows(run_dir / name, lambda line: json.loads(line)["step"], first_step)
    metrics.truncate_rows(
        run_dir / "warnings.log",
        lambda line: int(line.split()[1].rstrip(":")) if line.startswith("step ") else -1,
        first_step,
    )


def check_logs(run_dir: Path, num_steps: int, num_updates: int) -> None:
    """Raises ValueError unless every log holds each of the first `num_steps` steps once, in order.

    Otherwise a resumed run would append to a log with gaps.
    """
    for name, updates in (("metrics.jsonl", (None,)), ("updates.jsonl", range(num_updates))):
        path, rows, damaged = run_dir / name, [], []
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else (), start=1):
            try:
                row = runs.parse_json(line, "", "")
                rows.append((row["step"], row.get("update") if name == "updates.jsonl" else None))
            except (ValueError, KeyError):
                damaged.append(number)
        expected = [(step, update) for step in range(num_steps) for update in updates]
        rows = [row for row in rows if not isinstance(row[0], int) or row[0] < num_steps]
        if rows == expected:
            continue
        place = next(
            (i for i, (row, wanted) in enumerate(zip(rows, expected, strict=False)) if row != wanted),
            min(len(rows), len(expected)),
        )
        step = expected[min(place, len(expected) - 1)][0]
        lines = f", and line {damaged[0]} cannot be read" if damaged else ""
        raise ValueError(
            f"{path} does not hold steps 0 to {num_steps - 1} once each: it goes wrong at step "
            f"{step}{lines}. It was cut or changed after it was written: restore it, "
            f"or delete the checkpoints after more than {step} steps ({folder_of(run_dir, step + 1)} and "
            "later ones), so that --resume makes those steps again"
        )
