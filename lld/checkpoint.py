"""Save, find, resume: atomic and exact.

A checkpoint is a Hugging Face folder that `from_pretrained` opens, plus `trainer_state.pt` with what an exact restart
needs: optimizer moments, the step (from which learning rate, data position and every episode's seed follow), torch's RNG
and the snapshots LLDS may compare with. Of a sharded run each process writes its share of moments and snapshots to a file of
its own, `shard_RANK-of-NUMBER.pt` (torch.distributed.checkpoint would read its index with pickle). `manifest.json`, written last, names every file with its size and checksum.
Nothing in it can run code when it is opened: safetensors, JSON, and tensors, numbers and strings read with weights_only.
"""

import errno
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
import yaml
from accelerate.utils import gather_object
from safetensors import SafetensorError

from lld import config, metrics

DISK_ERRORS = tuple(getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EACCES", "EPERM", "EIO", "ENOTDIR", "ESTALE"))


class WriteError(RuntimeError):
    """The run's folder takes no more; the message names the reason and what is left."""


def folder_of(run_dir: str | Path, num_steps: int) -> Path:
    return Path(run_dir) / "checkpoints" / f"step_{num_steps:06d}"


def save(run_dir: str | Path, num_steps: int, lm, tokenizer, trainer_state: dict, *, accelerator=None, weights: dict | None = None, shard: dict | None = None) -> Path:
    """Writes the checkpoint after `num_steps` steps aside and renames it when it is whole.

    `trainer_state` holds tensors, numbers, strings, lists and dicts only: it is read back with weights_only. With an accelerator
    every process calls: each writes its own `shard`, the main one all else, with `weights` for the model's whole ones.
    WriteError, on all of them, where the disk is full or the folder cannot be written; older checkpoints are then as they were.
    """
    folder = folder_of(run_dir, num_steps)
    aside = folder.with_name(folder.name + ".partial")
    is_main = accelerator is None or accelerator.is_main_process
    gather = gather_object if accelerator is not None else lambda own: own

    def together(action: Callable):
        """What `action` returns on each process, if it could write on all of them."""
        done = failure = cause = None
        try:
            done = action()
        except (OSError, RuntimeError, SafetensorError) as error:
            if isinstance(error, RuntimeError) and "inline_container" not in str(error):
                raise  # not torch.save's word for a write that failed
            free_gb = shutil.disk_usage(run_dir).free / 1e9
            failure, cause = f"checkpoint {folder} could not be written with {free_gb:.1f} GB free on its disk: {str(error).splitlines()[0]}", error
        outcomes = gather([(done, failure)])
        failures = [failure for _, failure in outcomes if failure]
        if failures:
            if is_main:
                shutil.rmtree(aside, ignore_errors=True)
            raise WriteError(failures[0]) from cause
        return [done for done, _ in outcomes]

    together(lambda: _begin(aside) if is_main else None)
    written = {}
    if shard is not None:
        own = aside / f"shard_{accelerator.process_index:05d}-of-{accelerator.num_processes:05d}.pt"
        for files in together(lambda: _write_shard(own, shard)):
            written |= files
    together(lambda: _write(folder, aside, num_steps, lm, weights, tokenizer, trainer_state, written) if is_main else None)
    return folder


def _begin(aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def _write_shard(path: Path, shard: dict) -> dict:
    torch.save(shard, path)
    _flush(path)
    return {path.name: fingerprint(path)}


def _write(folder: Path, aside: Path, num_steps: int, lm, weights: dict | None, tokenizer, trainer_state: dict, written: dict) -> None:
    lm.save_pretrained(aside, state_dict=weights)
    tokenizer.save_pretrained(aside)
    torch.save({"num_steps": num_steps} | trainer_state, aside / "trainer_state.pt")
    own = [path for path in sorted(aside.rglob("*")) if path.is_file() and path.name not in written]
    for path in own:
        path.chmod((aside / "trainer_state.pt").stat().st_mode)  # safetensors' files are for their owner alone, whatever the umask
    files = written | {str(path.relative_to(aside)): fingerprint(path) for path in own}
    (aside / "manifest.json").write_text(json.dumps({"num_steps": num_steps, "files": files}, indent=1))
    for path in [*own, aside / "manifest.json"]:
        _flush(path)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(aside, folder)
    _flush(folder.parent)


def prune(run_dir: str | Path, keep: int, best: int | None) -> None:
    """Removes all checkpoints but the `keep` newest (0: none) and the one after `best` steps; half-written ones always.

    What eval.py wrote into one stays.
    """
    folder = Path(run_dir) / "checkpoints"
    for partial in folder.glob("step_??????.partial"):
        shutil.rmtree(partial)
    whole = [path for path in sorted(folder.glob("step_??????")) if best is None or path != folder_of(run_dir, best)]
    for old in whole[:-keep] if keep else []:
        (old / "manifest.json").unlink(missing_ok=True)  # first, so that a kill leaves nothing that could be taken for whole
        for path in old.iterdir() if (old / "eval").is_dir() else ():
            if path.name != "eval":
                path.unlink() if path.is_file() else shutil.rmtree(path)
        if not (old / "eval").is_dir():
            shutil.rmtree(old)


def better(best: tuple[float, int] | None, row: dict, num_steps: int) -> tuple[float, int] | None:
    """(held-out EM, steps) of the best checkpoint so far, given the row of an evaluation after `num_steps` steps.

    The rule: the plain mean of `eval/*/em` over the benchmarks of eval.during_training; 0 is never best, the earlier wins a tie.
    """
    scores = [value for name, value in row.items() if name.startswith("eval/") and name.endswith("/em")]
    mean = sum(scores) / len(scores) if scores else 0.0
    return (mean, num_steps) if mean > (best[0] if best else 0.0) else best


def write_best(run_dir: str | Path, best: tuple[float, int]) -> None:
    """checkpoints/best.json names the best checkpoint, for whoever evaluates it."""
    em, num_steps = best
    told = {"checkpoint": folder_of(run_dir, num_steps).name, "em": em, "rule": "highest mean of eval/*/em over eval.during_training, the earlier at a tie"}
    metrics.replace_file(Path(run_dir) / "checkpoints" / "best.json", json.dumps(told, indent=1) + "\n")


def last_good(run_dir: str | Path) -> str:
    """What a run that ended badly says of its checkpoints."""
    folder = latest(run_dir)
    return f"The last good checkpoint is {folder}" if folder else "There is no checkpoint yet"


def latest(run_dir: str | Path) -> Path | None:
    """The newest whole checkpoint of a run, or None; folders without a manifest were never finished."""
    folders = [path for path in (Path(run_dir) / "checkpoints").glob("step_??????") if (path / "manifest.json").exists()]
    return max(folders, default=None)


def check(folder: Path) -> None:
    """Raises ValueError where a file of the checkpoint is missing, cut short or changed."""
    manifest = folder / "manifest.json"
    if not manifest.is_file():
        raise ValueError(f"{folder} is no checkpoint of a run: it has no manifest.json")
    for name, expected in json.loads(manifest.read_text())["files"].items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"checkpoint {folder} lacks {name}; delete the folder to resume from the one before")
        found = fingerprint(path)
        if found != expected:
            raise ValueError(
                f"checkpoint {folder}: {name} has {found['bytes']} bytes and checksum {found['sha256'][:12]}, but {expected['bytes']} and "
                f"{expected['sha256'][:12]} were written; it is damaged, delete the folder to resume from the one before"
            )


def load_trainer_state(folder: Path, parameters: dict[str, torch.Tensor]) -> dict:
    """The trainer's state of a checkpoint (`check` it first); raises ValueError where it belongs to a model of other shapes.

    `parts` holds optimizer and snapshots: one dict of whole tensors, or one a process of a sharded run, read as needed.
    """
    state = _open(folder / "trainer_state.pt", mmap=False)
    shards = sorted(folder.glob("shard_*.pt"))
    state["parts"] = [_open(path, mmap=True) for path in shards] or [{name: state.pop(name) for name in ("optimizer", "snapshots")}]
    shapes = {name: list(tensor.shape) for name, tensor in parameters.items()}
    if state["shapes"] != shapes:
        different = sorted(name for name in state["shapes"].keys() | shapes.keys() if state["shapes"].get(name) != shapes.get(name))
        raise ValueError(
            f"checkpoint {folder} is of another model: {different[0]} has shape {state['shapes'].get(different[0])} there and {shapes.get(different[0])} here; "
            "resume with the model.path it was trained with"
        )
    return state


def _open(path: Path, mmap: bool) -> dict:
    try:
        return torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"checkpoint {path.parent}: {path.name} holds more than tensors, numbers and strings and is not opened, because it could run code; train.py never writes such a file ({reason})") from None


def fingerprint(path: Path) -> dict:
    """{"bytes", "sha256"} of a file, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def check_place(run_dir: Path) -> None:
    """Raises ValueError where a run's folder cannot be written."""
    present = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not present.is_dir() or not os.access(present, os.W_OK):
        raise ValueError(f"run.dir = {run_dir}: {present} is {'read-only, or not yours to write to' if present.is_dir() else 'a file, not a folder'}; choose another run.dir")


def check_run_dir(run_dir: Path, cfg: config.Config, resume: bool) -> None:
    """Raises ValueError where a new run would overwrite an old one, or a resumed one has other options."""
    log = run_dir / "config.yaml"
    if not resume:
        if log.exists():
            raise ValueError(f"run.dir = {run_dir} already holds a run: continue it with --resume, or choose another run.dir, or delete the folder")
        return
    if not log.exists():
        raise ValueError(f"--resume: run.dir = {run_dir} holds no run")
    before, now, defaults = yaml.safe_load(log.read_text()), config.to_dict(cfg), config.to_dict(config.Config())
    for section, options in now.items():
        for name, value in options.items():
            was = before.get(section, {}).get(name, defaults[section][name])  # an option that is newer than the run had its default
            if section != "plan" and f"{section}.{name}" not in config.RESUMABLE and was != value:
                raise ValueError(f"--resume: {section}.{name} was {was!r} and is {value!r} now; a resumed run keeps its options (free to change: {', '.join(config.RESUMABLE)})")


def begin_run(run_dir: Path, cfg: config.Config, first_step: int) -> None:
    """Writes what is run, and drops rows of steps that will be repeated."""
    run_dir.mkdir(parents=True, exist_ok=True)
    config.save(cfg, run_dir / "config.partial")
    os.replace(run_dir / "config.partial", run_dir / "config.yaml")
    git = shutil.which("git")
    commit = subprocess.run([git, "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip() if git else ""
    about = {"commit": commit, "torch": torch.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0]}
    (run_dir / "run.json").write_text(json.dumps(about, indent=1))
    for name in ("metrics.jsonl", "updates.jsonl", "timings.jsonl"):
        metrics.truncate_rows(run_dir / name, first_step)
