"""How a run of train.py ends: exit codes, last messages, last checkpoint, report."""

import os
import signal
import sys
from pathlib import Path

import torch

from lld import files
from lld.record import phases, runs, verdict
from lld.running import checkpoint, crashbox, lock, recording, survive
from lld.running.run import Run
from lld.running.saving import NotFinite, save
from lld.tools import RetrieverError, Unplayed


class PhaseBegun(Exception):
    """A phase began in which monitor.stop_in_phase stops the run."""


def stop_if_asked(run: Run, began: int, unplayed: Unplayed | None) -> None:
    """Raises the exception that ends a run after a finished step, if there is one; every process must call.

    `unplayed` if the evaluation failed; Interrupted if any process has received a signal; PhaseBegun if
    `began`, the phase that has just begun (0: none), is one to stop in.
    """
    if unplayed is not None:
        raise unplayed
    if run.guard.agreed(run.accelerator):
        raise survive.Interrupted("after a finished step")
    last = run.cfg.monitor.stop_in_phase
    if began and began >= last > 0:
        raise PhaseBegun(
            f"phase {began} ({phases.NAMES[began]}) has begun and monitor.stop_in_phase = {last}."
        )


def end_early(run: Run, error: Unplayed | PhaseBegun | NotFinite) -> int:
    """Ends a run before its last step: saves a checkpoint, prints why, and returns the exit code.

    Every process must call it. After NotFinite no checkpoint is saved.
    """
    # The traceback's frames keep the engine alive: free its cache before the checkpoint is made.
    error.__traceback__ = None
    if isinstance(error, NotFinite):
        return give_up(run, str(error))
    if isinstance(error, PhaseBegun):
        return stop(run, str(error), survive.PHASE)
    signal_name = run.guard.agreed(run.accelerator)
    if signal_name:
        return stop(run, f"stopped by {signal_name}, as asked.", survive.SIGNAL)
    return stop(run, f"{error}\nNothing was trained on the failed search.", survive.RETRIEVER)


def stop(run: Run, why: str, code: int) -> int:
    folder = save(run, run.progress.num_steps)
    how = f"continue with --resume {run.dir}"
    if code == survive.PHASE and run.recorder.phase == phases.COLLAPSE:
        how = (
            "--resume would go on with a collapsed policy, so start a new run from a checkpoint of before "
            "(model.path)"
        )
    run.accelerator.print(f"train.py: {why} Saved {folder}; {how}.", file=sys.stderr)
    run.guard.outcome = "stopped"
    return code


def give_up(run: Run, why: str) -> int:
    """Prints which checkpoint is the last good one, and saves none; returns the exit code."""
    good, newest = checkpoint.latest(run.dir, run.progress.num_proven_steps), checkpoint.latest(run.dir)
    left = f"The last good checkpoint is {good}" if good else "There is no good checkpoint"
    if newest != good:
        left += f" ({newest} is newer, but no update could be made from it: do not use it)"
    run.accelerator.print(
        f"train.py: step {run.progress.num_steps}: {why}. No checkpoint was written. {left}. "
        "--resume would repeat the same steps: start a new run with "
        f"model.path {'set to it' if good else 'as it was'} and a smaller optim.lr or optim.max_grad_norm, "
        "or mend what the message of the skipped update names.",
        file=sys.stderr,
    )
    run.guard.outcome = "given up"
    return survive.NOT_FINITE


def finish(run: Run) -> int:
    """Ends a run after its last step; returns the exit code."""
    run.accelerator.end_training()
    run.guard.outcome = "done"
    return 0


def exit_code(error: BaseException, guard: survive.Guard, box: Path | None) -> int | None:
    """Prints why the command ended and returns its exit code; None for a bug, which keeps its traceback."""
    if isinstance(error, KeyboardInterrupt):
        name = signal.Signals(guard.signal or signal.SIGINT).name
        tell(
            f"{name} received while the run was prepared: nothing was trained, and the same command "
            "starts again."
        )
        return survive.SIGNAL
    if isinstance(error, ValueError):  # a mistake of the user
        tell(runs.printable(error))
        return survive.USER
    if isinstance(error, RetrieverError):
        tell(runs.printable(error))
        return survive.RETRIEVER
    if isinstance(error, (files.WriteError, OSError)):
        return disk_code(error, guard.run_dir)
    if isinstance(error, torch.OutOfMemoryError):
        phase, step = guard.now
        last = guard.run_dir and checkpoint.latest(guard.run_dir)
        tell(
            f"rank {guard.rank}: no GPU memory left (phase {phase!r} of step {step}; "
            f"{survive.short(error)}). Lower optim.micro_batch_tokens for an update, rollout.num_slots for a "
            "rollout, or see `train.py --plan`, which does not count other processes on the GPU. "
            + (f"Continue with --resume {guard.run_dir} ({last.name})." if last else "No checkpoint yet.")
        )
        return survive.USER
    if isinstance(error, RuntimeError) and survive.lost_peer(error):
        phase, step = guard.now
        tell(
            f"rank {guard.rank}: another process of this run ended or fell silent (phase {phase!r} of step "
            f"{step}; {survive.short(error)}); see its own message. {guard.save_what_stands()}"
        )
        leave_report(guard, box)
        os._exit(survive.PEER)  # a normal exit would block on the dead process
    return None


def tell(text: str) -> None:
    print(f"train.py: {text}", file=sys.stderr, flush=True)


def disk_code(error: OSError | files.WriteError, run_dir: Path | None) -> int | None:
    """Prints that a folder could not be written and returns the exit code; None for any other OSError."""
    gone = run_dir is not None and (isinstance(error, lock.Gone) or not run_dir.exists())
    if isinstance(error, OSError) and not gone and error.errno not in files.DISK_ERRORS:
        return None
    if run_dir is None:  # during setup, e.g. the tiny world's folder
        tell(
            f"{error}. Nothing was trained: make room, mend the permissions or name another folder, and give "
            "the command again."
        )
    else:
        tell(f"{error}. {after_disk(run_dir, gone)}")
    return survive.DISK


def after_disk(run_dir: Path, gone: bool) -> str:
    """What is left and how to continue, if the run folder could not be written or is gone."""
    if gone:
        return f"{run_dir} is gone, and all that was in it: start the run again."
    last = checkpoint.latest(run_dir)
    left = "There is no checkpoint yet"
    if last:
        left = f"The last good checkpoint is {last}, and it is untouched"
    again = (
        f"continue with --resume {run_dir}" if (run_dir / "config.yaml").exists() else "start the run again"
    )
    return f"{left}: make room, mend the permissions or remove what is in the way, then {again}."


def leave_report(guard: survive.Guard, box: Path | None) -> None:
    """Prints what the run has reached and what to type next, and draws its report, however the run ended.

    Best effort, since something else may be broken already.
    """
    run_dir = guard.run_dir
    if run_dir is None or guard.rank or not (run_dir / "metrics.jsonl").exists():
        return
    guard.phase("report")
    try:
        if box is None:
            end, folders = verdict.describe_end(run_dir), [run_dir]
        else:
            end, folders = crashbox.compare(box, run_dir), [box, run_dir]
        print(f"{end}\n{recording.draw_report(folders, run_dir)}", flush=True)
    # E.g. no row yet, a damaged log, a closed console: keep the exit code that says why the run ended.
    except Exception as error:
        tell(f"no report was written: {error}")
