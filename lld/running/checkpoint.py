"""Save, find and resume checkpoints: atomic, and exact on resume.

A checkpoint is a Hugging Face folder that `from_pretrained` opens (of a run with LoRA: one of adapters, in
peft's format), plus `trainer_state.pt` with what an exact
restart needs: optimizer moments, the step (which determines learning rate, data position and the seed of
every episode), torch's RNG state, and the snapshots that LLDS may compare with. In a sharded run each process
writes its shard of moments and snapshots to its own file, `shard_RANK-of-NUMBER.pt`
(torch.distributed.checkpoint would read its index with pickle). `manifest.json` is written last and lists
every file with size and checksum. Opening a checkpoint cannot run code: it holds safetensors, JSON, and
tensors, numbers and strings that are read with weights_only.
"""

import json
import os
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError

from lld.files import WriteError, fingerprint, flush_to_disk, replace_file
from lld.record import runs

# Suffixes of files that a loader may open.
READ = (".safetensors", ".bin", ".pt", ".json", ".jinja", ".txt", ".model")


def folder_of(run_dir: str | Path, num_steps: int) -> Path:
    return Path(run_dir) / "checkpoints" / f"step_{num_steps:06d}"


def save(
    run_dir: str | Path,
    num_steps: int,
    lm,
    tokenizer,
    trainer_state: dict,
    *,
    accelerator=None,
    weights: dict | None = None,
    shard: dict | None = None,
) -> Path:
    """Writes the checkpoint after `num_steps` steps to a temporary folder, and renames it when complete.

    `trainer_state` holds only tensors, numbers, strings, lists and dicts, because it is read back with
    weights_only. With an accelerator this is a collective: each process writes its own `shard`, the main
    process writes the rest, with `weights` as the full weights of the model. Raises WriteError on every
    process if the disk is full or the folder cannot be written; older checkpoints are left unchanged.
    """
    folder = folder_of(run_dir, num_steps)
    aside = folder.with_name(folder.name + ".partial")
    is_main = accelerator is None or accelerator.is_main_process
    gather = gather_object if accelerator is not None else lambda own: own

    def together(action: Callable):
        """Results of `action` on all processes; raises WriteError on all of them if one could not write."""
        done = failure = cause = None
        try:
            done = action()
        except (OSError, RuntimeError, SafetensorError) as error:
            if isinstance(error, RuntimeError) and "inline_container" not in str(error):
                raise  # torch.save names its container in write errors
            free_gb = shutil.disk_usage(run_dir).free / 1e9
            failure, cause = (
                f"checkpoint {folder} could not be written with {free_gb:.1f} GB free on its disk: "
                f"{str(error).splitlines()[0]}",
                error,
            )
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
    together(
        lambda: (
            _write(folder, aside, num_steps, lm, weights, tokenizer, trainer_state, written)
            if is_main
            else None
        )
    )
    return folder


def _begin(aside: Path) -> None:
    _discard(aside)
    aside.mkdir(parents=True)


def _discard(path: Path) -> None:
    """Removes `path`, whether a folder, a file or a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _write_shard(path: Path, shard: dict) -> dict:
    torch.save(shard, path)
    flush_to_disk(path)
    return {path.name: fingerprint(path)}


def _write(
    folder: Path,
    aside: Path,
    num_steps: int,
    lm,
    weights: dict | None,
    tokenizer,
    trainer_state: dict,
    written: dict,
) -> None:
    lm.save_pretrained(aside, state_dict=weights)
    tokenizer.save_pretrained(aside)
    torch.save({"num_steps": num_steps} | trainer_state, aside / "trainer_state.pt")
    own = [path for path in sorted(aside.rglob("*")) if path.is_file() and path.name not in written]
    for path in own:
        # safetensors makes its files readable only by their owner, whatever the umask.
        path.chmod((aside / "trainer_state.pt").stat().st_mode)
    files = written | {str(path.relative_to(aside)): fingerprint(path) for path in own}
    (aside / "manifest.json").write_text(json.dumps({"num_steps": num_steps, "files": files}, indent=1))
    for path in [*own, aside / "manifest.json"]:
        flush_to_disk(path)
    _discard(folder)
    os.replace(aside, folder)
    flush_to_disk(folder.parent)


def found(run_dir: str | Path) -> list[tuple[int, Path]]:
    """(steps, folder) of all checkpoint folders, oldest first, complete or not.

    Only names that `folder_of` makes count; copies under other names, links and files are ignored.
    """
    paths = [
        path
        for path in (Path(run_dir) / "checkpoints").glob("step_*")
        if path.is_dir() and not path.is_symlink()
    ]
    steps = [(int(path.name[5:]), path) for path in paths if path.name[5:].isdecimal()]
    return sorted(pair for pair in steps if pair[1] == folder_of(run_dir, pair[0]))


def prune(run_dir: str | Path, keep: int, proven: int, best: Sequence[int] = ()) -> None:
    """Removes all checkpoints but the `keep` newest (0: keep all) and those after `best` steps.

    Partially written ones are always removed. Checkpoints after more than `proven` steps are not yet known to
    be good: they stay, and so does the newest good one. Results of eval.py inside a checkpoint stay.
    """
    for partial in (Path(run_dir) / "checkpoints").glob("step_*.partial"):
        _discard(partial)
    folders = found(run_dir)
    for _, path in folders:
        if not (path / "manifest.json").exists() and (path / "eval").is_dir():
            _keep_eval(path)  # an earlier removal was interrupted
    whole = [(steps, path) for steps, path in folders if (path / "manifest.json").exists()]
    good = [(steps, path) for steps, path in whole if steps <= proven]
    for steps, old in good[: -max(1, keep - (len(whole) - len(good)))] if keep else []:
        if steps in best:
            continue
        if (old / "eval").is_dir():
            _keep_eval(old)
        else:
            # Rename first, so that an interrupted removal cannot leave what looks like a complete checkpoint.
            os.replace(old, old.with_name(old.name + ".partial"))
            _discard(old.with_name(old.name + ".partial"))


def _keep_eval(folder: Path) -> None:
    # First, so that an interrupted removal cannot leave what looks like a complete checkpoint.
    (folder / "manifest.json").unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.name != "eval":
            _discard(path)


def better(best: tuple[float, int] | None, row: dict, num_steps: int) -> tuple[float, int] | None:
    """(held-out EM, steps) of the best checkpoint so far, given the evaluation `row` after `num_steps` steps.

    EM is the unweighted mean of `eval/*/em` over the benchmarks of eval.during_training. A mean of 0 is never
    best; at a tie the earlier checkpoint stays best.
    """
    scores = [value for name, value in row.items() if name.startswith("eval/") and name.endswith("/em")]
    mean = sum(scores) / len(scores) if scores else 0.0
    return (mean, num_steps) if mean > (best[0] if best else 0.0) else best


def write_best(run_dir: str | Path, best: tuple[float, int]) -> None:
    """Writes the name and score of the best checkpoint to checkpoints/best.json."""
    em, num_steps = best
    told = {
        "checkpoint": folder_of(run_dir, num_steps).name,
        "em": em,
        "rule": "highest mean of eval/*/em over eval.during_training, the earlier at a tie",
    }
    replace_file(Path(run_dir) / "checkpoints" / "best.json", json.dumps(told, indent=1) + "\n", durable=True)


def latest(run_dir: str | Path, proven: int | None = None) -> Path | None:
    """The newest complete checkpoint of a run, or None; a folder without manifest.json is incomplete.

    With `proven`, only checkpoints after at most that many steps count.
    """
    whole = [
        path
        for steps, path in found(run_dir)
        if (path / "manifest.json").exists() and (proven is None or steps <= proven)
    ]
    return whole[-1] if whole else None


def read_manifest(folder: Path) -> dict:
    """A checkpoint's manifest: {"num_steps", "files": {name: fingerprint}}.

    Raises ValueError if it is missing, damaged, or that of another checkpoint.
    """
    path, remedy = folder / "manifest.json", "delete the folder to resume from the checkpoint before"
    if not path.is_file():
        raise ValueError(f"{folder} is no checkpoint of a run: it has no manifest.json")
    manifest = runs.parse_json(path.read_bytes(), str(path), remedy)
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise ValueError(f"{path} is damaged (it lists no files): {remedy}")
    present = {item.name for item in folder.iterdir() if item.suffix in READ and item.name != "manifest.json"}
    described = {"adapter_config.json"} & files.keys() or {"config.json"}
    missing = sorted((present | described | {"trainer_state.pt"}) - files.keys())
    if missing or not any(name.endswith(".safetensors") for name in files):
        raise ValueError(
            f"{path} does not list {missing[0] if missing else 'any weights'}: the list or the folder was "
            f"changed; {remedy}"
        )
    if folder.name != folder_of(".", manifest.get("num_steps", -1)).name:
        raise ValueError(
            f"{path} is that of a checkpoint after {manifest.get('num_steps')} steps: {folder.name} is a "
            "copy under another name; delete or rename it"
        )
    return manifest


def check(folder: Path) -> None:
    """Raises ValueError if a file of the checkpoint is missing, truncated or changed."""
    for name, expected in read_manifest(folder)["files"].items():
        path = folder / name
        if not path.is_file():
            raise ValueError(
                f"checkpoint {folder} lacks {name}; delete the folder to resume from the one before"
            )
        found = fingerprint(path)
        if found != expected:
            raise ValueError(
                f"checkpoint {folder}: {name} has {found['bytes']} bytes and checksum "
                f"{found['sha256'][:12]}, but {expected['bytes']} and "
                f"{expected['sha256'][:12]} were written; it is damaged, delete the folder to resume from "
                "the one before"
            )


def load_trainer_state(folder: Path, parameters: dict[str, torch.Tensor]) -> dict:
    """Loads the trainer state of a checkpoint; call `check` first.

    Its `parts` is a list of dicts with optimizer and snapshots: one dict with full tensors, or one dict for
    each process of a sharded run, memory-mapped. Raises ValueError if the model's shapes differ.
    """
    state = _open(folder / "trainer_state.pt", mmap=False)
    shards = sorted(folder.glob("shard_*.pt"))
    state["parts"] = [_open(path, mmap=True) for path in shards] or [
        {name: state.pop(name) for name in ("optimizer", "snapshots")}
    ]
    shapes = {name: list(tensor.shape) for name, tensor in parameters.items()}
    if state["shapes"] != shapes:
        different = sorted(
            name
            for name in state["shapes"].keys() | shapes.keys()
            if state["shapes"].get(name) != shapes.get(name)
        )
        raise ValueError(
            f"checkpoint {folder} is of another model: {different[0]} has shape "
            f"{state['shapes'].get(different[0])} there and {shapes.get(different[0])} here; "
            "resume with the model.path it was trained with"
        )
    return state


def _open(path: Path, mmap: bool) -> dict:
    try:
        return torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"checkpoint {path.parent}: {path.name} holds more than tensors, numbers and strings and is "
            f"not opened, because it could run code; train.py never writes such a file ({reason})"
        ) from None
