"""The tiny world's folder: passages, questions and a warm-started policy, made once, then checked."""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from safetensors import SafetensorError

from lld import config, files
from lld.record import runs
from lld.tinyworld.demonstrations import SEARCHES_IN_VAIN, make_demonstrations
from lld.tinyworld.policy import BATCH_SIZE, make_policy, make_tokenizer, warm_start
from lld.tinyworld.wording import Wording
from lld.tinyworld.world import make_questions, make_world, passages, question_row

VERSION = 1  # of what `prepare_world` writes; raise it with every change of the bytes
MAX_DEMONSTRATIONS = 16_000  # further ones would be seen too rarely to be worth rendering


def _identity(cfg: config.TinyWorld, topk: int) -> dict:
    """The options that determine the contents of a prepared folder; its path is not one of them.

    Without free wording its options are left out: they change nothing, and older folders do not name them.
    """
    of_words = {"num_words", "thought_words", "word_entropy", "thought_spread"}
    unread = {"dir"} | (set() if cfg.num_words else of_words)
    options = {name: value for name, value in dataclasses.asdict(cfg).items() if name not in unread}
    return {**options, "topk": topk, "version": VERSION}


def _check_prepared(folder: Path, identity: dict) -> dict:
    """The description of a prepared folder; ValueError if it is not a world or has other options."""
    description = folder / "world.json"
    if not description.is_file():
        raise ValueError(
            f"tinyworld.dir = {str(folder)!r} holds other files and no world.json: choose another "
            "tinyworld.dir or empty it"
        )
    remedy = "delete the folder or choose another tinyworld.dir"
    world = runs.parse_json(description.read_bytes(), str(description), remedy)
    found = world.get("identity")
    if not isinstance(found, dict) or not isinstance(world.get("longest"), dict):
        raise ValueError(f"{description} is damaged (no identity and longest in it): {remedy}")
    if found != identity:
        apart = ", ".join(
            f"{name} {found.get(name)!r} there, {identity.get(name)!r} asked"
            for name in sorted(found.keys() | identity.keys())
            if found.get(name) != identity.get(name)
        )
        raise ValueError(
            f"tinyworld.dir = {str(folder)!r} holds a world made with other options ({apart}): {remedy}"
        )
    return world


def _check_room(cfg: config.TinyWorld, longest: dict[str, int], rollout: config.Rollout) -> None:
    """Raises ValueError for a rollout that would cut the warm start's prompts, turns or observations."""
    options = {
        "prompt": "max_prompt_tokens",
        "turn": "max_new_tokens",
        "observation": "max_observation_tokens",
        "episode": "max_episode_tokens",
    }
    for what, option in options.items():
        asked = getattr(rollout, option)
        if asked < longest[what]:
            raise ValueError(
                f"rollout.{option} = {asked}: the tiny world's longest flawless {what} has {longest[what]} "
                "tokens; raise the option"
            )
    if cfg.two_hop_share > 0 and rollout.max_turns < 2:
        raise ValueError(
            f"rollout.max_turns = {rollout.max_turns}: two-hop questions take two searches; raise it or "
            "set tinyworld.two_hop_share 0"
        )
    if cfg.num_words and rollout.max_turns < SEARCHES_IN_VAIN:
        raise ValueError(
            f"rollout.max_turns = {rollout.max_turns}: with free wording a search in vain is repeated, up to "
            f"{SEARCHES_IN_VAIN} searches; raise it or set tinyworld.num_words 0"
        )


@contextlib.contextmanager
def _hold(folder: Path):
    """Creates the folder if it is missing, and locks it against processes that make the same world.

    On a file system without locks all of them make it, and the first one to finish wins.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            _wait_for_lock(descriptor, folder)
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # not empty: another process has made the world
            if made:
                folder.rmdir()
        raise
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"{folder}: another process is making this world; waiting for it", file=sys.stderr, flush=True)
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def prepare_world(cfg: config.TinyWorld, rollout: config.Rollout, topk: int) -> None:
    """Writes corpus.jsonl, train.jsonl, heldout.jsonl, policy/ and world.json under `cfg.dir`, once.

    The text files are a pure function of `cfg` and `topk`; so are the policy's weights, up to rounding, which
    depends on the machine and the number of threads. Call it on one process; a second run waits for the first
    one's world. The files are written into a new folder next to `cfg.dir`, which is then renamed: an
    interrupted call leaves no world that looks complete, and no existing folder with files is removed or
    written into. Raises ValueError if the folder was made with other options or if the `rollout` lengths are
    too short for this world, files.WriteError if it cannot be written.
    """
    folder = Path(cfg.dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"tinyworld.dir = {cfg.dir!r} is a file, not a folder: choose another tinyworld.dir")
    identity = _identity(cfg, topk)
    try:
        if not _is_filled(folder):
            with _hold(folder):
                if not _is_filled(folder):
                    _make_folder(cfg, rollout, topk, folder, identity)
    except (OSError, RuntimeError, SafetensorError) as error:
        if not _is_write_error(error):
            raise
        raise files.WriteError(
            f"tinyworld.dir = {cfg.dir!r} cannot be written: {str(error).splitlines()[0]}"
        ) from error
    _check_room(cfg, _check_prepared(folder, identity)["longest"], rollout)


def _is_filled(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _is_write_error(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in files.DISK_ERRORS
    # A SafetensorError is raised only by writing here. torch.save's RuntimeError contains this word.
    return isinstance(error, SafetensorError) or "inline_container" in str(error)


def _make_folder(
    cfg: config.TinyWorld, rollout: config.Rollout, topk: int, folder: Path, identity: dict
) -> None:
    """Makes the world in a new temporary folder, which replaces the empty `folder` when it is complete."""
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        partial.chmod(folder.stat().st_mode & 0o7777)  # mkdtemp gives access to the owner only
        _fill(partial, cfg, rollout, topk, folder, identity)
        try:
            os.rename(partial, folder)
        except OSError:
            if not any(folder.iterdir()):  # otherwise, without locks, another process was first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fill(
    partial: Path, cfg: config.TinyWorld, rollout: config.Rollout, topk: int, folder: Path, identity: dict
) -> None:
    world = make_world(cfg)
    train, held_out = make_questions(world, cfg)
    wording = Wording(cfg, world) if cfg.num_words else None
    tokenizer = make_tokenizer(world, topk, wording.words if wording else ())
    corpus = partial / "corpus.jsonl"
    files.write_jsonl(corpus, [{"id": p.id, "contents": p.contents} for p in passages(world)])
    for name, questions in (("train", train), ("heldout", held_out)):
        rows = [question_row(world, question, f"tiny_{name}_{i}") for i, question in enumerate(questions)]
        files.write_jsonl(partial / f"{name}.jsonl", rows)
    count = min(MAX_DEMONSTRATIONS, BATCH_SIZE * cfg.warm_start_steps)
    demonstrations, longest = make_demonstrations(
        world, train, tokenizer, corpus, count, topk, cfg.seed, wording
    )
    _check_room(cfg, longest, rollout)  # before training, which takes minutes
    policy = make_policy(cfg, tokenizer)
    print(
        f"{folder}: making passages, questions and a policy, with {cfg.warm_start_steps} steps of warm start "
        "(some minutes, once)",
        flush=True,
    )
    losses = warm_start(policy, demonstrations, cfg.warm_start_steps, cfg.seed)
    policy.save_pretrained(partial / "policy")
    tokenizer.save_pretrained(partial / "policy")
    description = {"identity": identity, "longest": longest, "warm_start_losses": [losses[0], losses[-1]]}
    (partial / "world.json").write_text(json.dumps(description, indent=2) + "\n")
