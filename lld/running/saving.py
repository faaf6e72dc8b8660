"""Decides which weights of a run are known to be good, and saves checkpoints."""

import functools
from pathlib import Path

import torch

from lld.episode import Batch
from lld.record import sentinel
from lld.running import checkpoint, sharding, survive
from lld.running.run import Run
from lld.update import score_batch

# The run ends after this many consecutive steps without a single finite gradient.
MAX_IDLE_STEPS = 3


class NotFinite(Exception):
    """Weights, or all gradients of several steps, are not finite, so no checkpoint is saved."""


def enter_rollout(run: Run, step: int) -> None:
    """Enters the rollout phase, in which weights do not change and the watchdog may save them.

    It may not if weights are sharded, if the optimizer is in CPU memory meanwhile, or in a replay.
    """
    run.guard.phase("rollout", step)
    has_all = not (sharding.is_sharded(run.models.bare) or run.cfg.optim.cpu_in_rollout)
    if run.box is None and has_all:
        run.guard.rescue = functools.partial(write_checkpoint, run, step)


def enter_update(run: Run) -> None:
    run.guard.phase("update")
    with run.guard.saving:  # waits for a checkpoint that the watchdog is writing: it ends the run then
        run.guard.rescue = None


def check_weights(run: Run, row: dict, batch: Batch) -> None:
    """Raises NotFinite if training has broken; otherwise records which weights are now known to be good.

    It has broken if weights are not finite on any process, if the weights after the last step give
    log-probabilities that are not finite, or after MAX_IDLE_STEPS consecutive steps without an update. Every
    process must call it.
    """
    progress, step = run.progress, row["step"]
    check_finite(run)
    if is_idle(run, row):
        progress.num_idle_steps += 1
    else:
        progress.num_idle_steps = 0
        progress.num_proven_steps = step
    if progress.num_idle_steps == MAX_IDLE_STEPS:
        raise NotFinite(f"no update could be made in {MAX_IDLE_STEPS} steps: every gradient was not finite")
    if step + 1 == run.cfg.run.steps:
        check_last_weights(run, batch)
        progress.num_proven_steps = run.cfg.run.steps
    waiting = progress.unproven_checkpoint
    if waiting is not None and waiting <= min(step, progress.num_proven_steps):
        progress.unproven_checkpoint = None
        settle(run)


def check_finite(run: Run) -> None:
    broken = [
        name
        for name, weight in sharding.parameters(run.models.bare).items()
        if not sharding.local(weight).isfinite().all()
    ]
    if survive.largest(run.accelerator, len(broken)):
        names = ", ".join(broken[:2]) or "on another process"
        raise NotFinite(f"weights are not finite after the update ({names})")


def check_last_weights(run: Run, batch: Batch) -> None:
    """Scores a few rows with the weights after the last step, since no later update will check them."""
    rows = list(range(min(len(batch.names), run.accelerator.num_processes)))
    few = batch.rows(rows)
    if not score_batch(run.accelerator, run.models.policy, few, run.cfg).isfinite().all():
        raise NotFinite("log-probabilities are not finite after the last update")


def is_idle(run: Run, row: dict) -> bool:
    """Whether a step skipped all its updates."""
    return row.get("skipped_updates") == run.cfg.optim.updates_per_rollout


def best_of(run: Run, row: dict, evaluated: dict) -> tuple[float, int] | None:
    """The best evaluation so far, given the step's `row` and its evaluation.

    After a step without an update the evaluation does not count: the weights are those of an earlier step.
    """
    if is_idle(run, row):
        return run.progress.best
    return checkpoint.better(run.progress.best, evaluated, row["step"] + 1)


def save_if_due(run: Run) -> None:
    """Saves a checkpoint every save_every steps, after the last step, and after the best evaluation.

    If the step made no update, saves after the next step that makes one. A replay saves nothing.
    """
    if run.box is not None:
        return
    progress, options = run.progress, run.cfg.run
    num_steps = progress.num_steps
    is_last = num_steps == options.steps
    is_best = progress.best is not None and progress.best[1] == num_steps
    is_due = is_last or is_best or progress.checkpoint_overdue or num_steps % options.save_every == 0
    progress.checkpoint_overdue = is_due and progress.num_idle_steps > 0 and not is_last
    if is_due and not progress.checkpoint_overdue:
        save(run, num_steps)


def save(run: Run, num_steps: int) -> Path:
    """Saves the checkpoint after `num_steps` steps if it does not exist, and prunes older ones.

    Every process must call it. Returns the folder.
    """
    run.guard.phase("checkpoint")
    write_checkpoint(run, num_steps)
    run.progress.unproven_checkpoint = num_steps
    settle(run)
    run.guard.phase(survive.WAITING)
    run.accelerator.wait_for_everyone()
    return checkpoint.folder_of(run.dir, num_steps)


def settle(run: Run) -> None:
    """Writes best.json and removes old checkpoints, as far as newer weights are known to be good."""
    progress = run.progress
    if progress.best and progress.best[1] <= progress.num_proven_steps:
        progress.best_proven = progress.best
    if not run.accelerator.is_main_process:
        return
    if progress.best_proven:
        checkpoint.write_best(run.dir, progress.best_proven)
    best = [pair[1] for pair in (progress.best, progress.best_proven) if pair]
    checkpoint.prune(run.dir, run.cfg.run.keep_checkpoints, progress.num_proven_steps, best)


def write_checkpoint(run: Run, num_steps: int) -> Path | None:
    """Writes the checkpoint after `num_steps` steps if it does not exist; returns its folder.

    If weights are sharded, all processes write it together (a collective). Otherwise the main process does,
    and the others return None.
    """
    accelerator, models = run.accelerator, run.models
    folder = checkpoint.folder_of(run.dir, num_steps)
    is_written = accelerator.is_main_process and (folder / "manifest.json").exists()
    if sharding.is_sharded(models.bare):
        if not survive.largest(accelerator, is_written):
            checkpoint.save(
                run.dir,
                num_steps,
                models.lm,
                run.tokenizer,
                shared_state(run),
                accelerator=accelerator,
                weights=sharding.whole_weights(models.bare, accelerator),
                shard={
                    "optimizer": sharding.optimizer_state(run.optimizer),
                    "snapshots": run.snapshots,
                },
            )
        return folder
    if not accelerator.is_main_process:
        return None
    if not is_written:
        checkpoint.save(run.dir, num_steps, models.lm, run.tokenizer, trainer_state(run))
    return folder


def shared_state(run: Run) -> dict:
    """The part of the trainer state that is the same on every process: without optimizer and snapshots."""
    return {
        "rng": torch.get_rng_state(),
        "shapes": sharding.shapes(run.models.bare),
        "proven": run.progress.num_proven_steps,
        "sentinel": sentinel.pack_sentinel(run.recorder.sentinel),
    }


def trainer_state(run: Run) -> dict:
    """All that an exact restart needs besides weights and step, for unsharded weights."""
    return shared_state(run) | {"optimizer": run.optimizer.state_dict(), "snapshots": run.snapshots}
