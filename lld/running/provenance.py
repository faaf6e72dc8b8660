"""Fingerprints of a run's input and code, kept in run.json with every session of the run.

Computing them takes milliseconds to a second (0.6 s for 170,000 questions). Questions are hashed as loaded.
The start policy is hashed from its small files and 64 blocks of each large one: that detects different
weights, but may miss a single flipped byte. The fingerprint of corpus and index comes from the retriever, if
it reports one (Search-R1's does not).
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import transformers
from transformers.utils import cached_file

from lld import config, files, settings
from lld.episode import Question
from lld.model import adapters
from lld.record import runs

ROOT = Path(__file__).parents[2]
TOKENIZER, WEIGHTS = (
    ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.jinja", "special_tokens_map.json"),
    ("*.safetensors", "*.bin", "config.json", "adapter_config.json", "generation_config.json"),
)


def of_input(
    cfg: config.Config,
    questions: Sequence[Question],
    held_out: dict[str, Sequence[Question]],
    index: str | None,
) -> dict[str, str]:
    """Fingerprints by name; an input without one is left out."""
    found = {"questions": of_questions(questions)} | {
        f"held-out questions {name}": of_questions(some) for name, some in held_out.items()
    }
    found |= {"corpus and index": index} if index else {}
    folder = folder_of_model(cfg.model.path)
    return found | (
        {"tokenizer": of_files(folder, TOKENIZER), "start policy": of_files(folder, WEIGHTS)}
        if folder
        else {}
    )


def of_questions(questions: Iterable[Question]) -> str:
    digest = hashlib.sha256()
    for question in questions:
        digest.update(
            repr((question.id, question.text, question.golden_answers, question.source)).encode(
                "utf-8", "surrogatepass"
            )
        )
    return digest.hexdigest()[:16]


def of_files(folder: Path, patterns: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        for block in files.sampled_blocks(path):
            digest.update(block)
    return digest.hexdigest()[:16]


def folder_of_model(path: str) -> Path | None:
    """Folder of a local model, or the cache folder of a hub model; None if it is not there."""
    if Path(path).is_dir():
        return Path(path)
    try:
        found = cached_file(path, "config.json", local_files_only=True)
    except OSError:
        return None
    return Path(found).parent if found else None


def base_fingerprint(path: str) -> str | None:
    """Of the weights to which the adapters in `path` are added; None for a whole model."""
    base = adapters.base_of(path)
    folder = folder_of_model(base) if base is not None else None
    return of_files(folder, WEIGHTS) if folder else None


def code_sha256(program: str) -> str:
    """One checksum of the paths and contents of a program at the top, such as eval.py, and all of lld/."""
    paths = [ROOT / program, *sorted((ROOT / "lld").rglob("*.py"))]
    lines = [f"{path.relative_to(ROOT).as_posix()}\0{files.sha256_of(path)}\n" for path in paths]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def git_commit() -> str | None:
    """The commit of this code, with "+changes" where files differ from it; None outside a git checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def of_code() -> dict[str, str]:
    """Fingerprint of the code, git commit ("" if unknown), and versions of Python, torch, transformers."""
    return {
        "commit": git_commit() or "",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
        "code": code_sha256("train.py")[:16],
    }


def read(run_dir: Path) -> dict:
    path = run_dir / "run.json"
    remedy = "restore it, or delete it, and the run goes on without a check of its input"
    about = runs.parse_json(path.read_bytes(), str(path), remedy) if path.is_file() else {}
    inputs, sessions = about.get("inputs", {}), about.get("sessions", [])
    if not isinstance(inputs, dict) or not isinstance(sessions, list) or {*map(type, sessions)} - {dict}:
        raise ValueError(f'{path} is damaged ("inputs" or "sessions"): {remedy}')
    return about


def check_input(run_dir: Path, now: dict[str, str], reads_start: bool) -> None:
    """Raises ValueError if the input of a run to be resumed has changed.

    reads_start: whether the start policy is still read, for the KL term or as the base of adapters. If it is
    not, the weights come from the checkpoint alone.
    """
    before = read(run_dir).get("inputs", {})
    for name, value in now.items():
        matters = name != "start policy" or reads_start
        if matters and before.get(name, value) != value:
            raise ValueError(
                f"--resume: the {name} of {run_dir} changed since the run began (fingerprint {before[name]}, "
                f"now {value}): it would be another run from here on. Restore what was there, or start a new "
                f"run from a checkpoint (model.path); to go on all the same delete {json.dumps(name)} from "
                f'"inputs" in {run_dir / "run.json"}'
            )


def begin_session(
    run_dir: Path, cfg: config.Config, first_step: int, now: dict[str, str], num_processes: int
) -> str | None:
    """Adds this session to run.json; returns a notice if code or versions differ from the last session.

    Input fingerprints are those of the first session. Of a changed option, old and new value are kept.
    """
    about, code = read(run_dir), of_code() | {"processes": num_processes, "threads": torch.get_num_threads()}
    sessions = about.get("sessions") or (
        [{"first_step": 0} | {name: value for name, value in about.items() if name != "inputs"}]
        if about
        else []
    )
    was, options = runs.read_options(run_dir), runs.flat(settings.to_dict(cfg))
    changed = {
        name: [was[name], value]
        for name, value in json.loads(json.dumps(options)).items()
        if name in was and was[name] != value and name.split(".")[0] != "plan"
    }
    session = (
        {"first_step": first_step, "time": time.strftime("%Y-%m-%dT%H:%M:%S"), "host": os.uname().nodename}
        | code
        | ({"changed": changed} if changed else {})
    )
    first = {name: about.get(name, code[name]) for name in ("commit", "torch", "transformers", "python")}
    files.replace_file(
        run_dir / "run.json",
        json.dumps(
            first | {"inputs": now | about.get("inputs", {}), "sessions": [*sessions, session]}, indent=1
        )
        + "\n",
        durable=True,
    )
    different = [
        f"{name} {sessions[-1][name]} -> {value}"
        for name, value in code.items()
        if sessions and name in sessions[-1] and sessions[-1][name] != value
    ]
    return (
        f"resumed with other {', '.join(different)}: from step {first_step} on this need not be, bit for "
        "bit, the run it would have been (run.json keeps both)"
        if different
        else None
    )
