"""Writes a step to the logs, the console and the crash box."""

import math
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from lld.episode import Batch, Episode
from lld.loss import answer_beta
from lld.record import courses, metrics, monitor, phases, runs, sentinel, trajectories
from lld.running import checkpoint, lora, sharding, trackers
from lld.running.run import Run
from lld.running.saving import best_of, trainer_state
from lld.update import Scores, learning_rate, score_batch

# Steps until the first report: the curves begin to show, without waiting for an evaluation.
FIRST_REPORT = runs.WINDOW


def due(step: int, every: int) -> bool:
    """Whether `step` is a multiple of `every`; never where that is 0."""
    return every > 0 and step % every == 0


def describe_rollout(run: Run, step: int, episodes: list[Episode], rewards_PG: torch.Tensor) -> dict:
    """The part of the step's metrics row that is known before the update.

    It includes the learning rate and LLDS-MA's weight on answers.
    """
    row = {"step": step} | metrics.describe_episodes(episodes, rewards_PG)
    row["lld_beta"] = answer_beta(row["searches"], run.cfg.loss)
    row["lr"] = learning_rate(step, run.cfg.optim)
    return row


def prepare_update(run: Run, step: int, episodes: list[Episode], lr: float) -> None:
    """Copies the weights from before the update, for crash box and LLDS, and sets the learning rate."""
    recent = run.recorder.recent
    if recent is not None and run.accelerator.is_main_process:
        recent.before(step, run.models.bare, lambda: trainer_state(run))
        recent.keep(step, episodes)
    # After the crash box's copy: a replay of the box adds the snapshot of this step itself.
    num_snapshots = run.cfg.loss.lld_lag_steps + 1
    if num_snapshots > 1:
        run.snapshots = [*run.snapshots, sharding.snapshot(run.models.bare)][-num_snapshots:]
        anchor = run.models.anchor
        if isinstance(anchor, lora.Older):
            anchor.weights = run.snapshots[0]
        else:
            sharding.restore(run.accelerator.unwrap_model(anchor), run.snapshots[0])
    for group in run.optimizer.param_groups:
        group["lr"] = lr


def describe_learning(
    run: Run,
    step: int,
    episodes: list[Episode],
    batch: Batch,
    scores: Scores,
    update_rows: list[dict],
) -> dict:
    """Metrics of the step about what the updates did; also adds each update's metrics to `update_rows`.

    If due, the rollout is scored once more (sets `scores.final_BT`), and so is the sentinel.
    """
    cfg, policy, recorder = run.cfg, run.models.policy, run.recorder
    row = {}
    run.clock.lap("update")
    if due(step, cfg.monitor.rescore_every):
        scores.final_BT = score_batch(run.accelerator, policy, batch, cfg, cfg.optim.updates_per_rollout)
    if recorder.sentinel is None and cfg.monitor.sentinel_every:
        size = cfg.monitor.sentinel_size
        recorder.sentinel = sentinel.choose_sentinel(batch, scores.old_BT, episodes, size)
    if recorder.sentinel is not None and due(step, cfg.monitor.sentinel_every):
        row |= sentinel.describe_sentinel(run.accelerator, policy, recorder.sentinel, cfg)
    run.clock.lap("rescore")
    row |= metrics.summarize_updates(update_rows) | monitor.describe(batch, scores, episodes, cfg)
    for number, update_row in enumerate(update_rows):
        described = monitor.describe_update(batch, scores, number, cfg)
        update_rows[number] = {"step": step, "update": number} | update_row | described
    return row


def write_trajectories(
    run: Run, step: int, episodes: list[Episode], batch: Batch, scores: Scores, rewards: list[float]
) -> None:
    """If due, writes the episodes of the first questions, with the numbers of every token."""
    options = run.cfg.monitor
    if due(step, options.trajectories_every) and run.accelerator.is_main_process:
        size = options.trajectories_questions * run.cfg.rollout.group_size
        rows = list(range(min(len(episodes), size)))
        tolerance = run.cfg.loss.lld_tolerance
        records = trajectories.describe(
            run.tokenizer, step, episodes, batch, scores, rewards, rows, tolerance
        )
        trajectories.write(run.dir / "trajectories" / f"step_{step:06d}.jsonl", records)
        trackers.log_trajectories(run, step, records)
    run.clock.lap("monitor")


def warn(run: Run, row: dict) -> int:
    """Adds the phase to the row, and writes a warning to console and warnings.log if there is one.

    Returns the phase if a later one (2 or above) has begun, else 0.
    """
    recorder, best = run.recorder, run.progress.best
    before = recorder.phase
    row["phase"] = recorder.phase = recorder.detector.update(row)
    began = row["phase"] if row["phase"] > max(1, before) else 0
    text = recorder.detector.warning(row, began)
    if text and run.accelerator.is_main_process:
        if row["phase"] == phases.COLLAPSE and best:
            text += f" The best checkpoint so far is {checkpoint.folder_of(run.dir, best[1])}."
        tqdm.write(f"*** WARNING *** {text}", file=sys.stderr)
        with open(run.dir / "warnings.log", "a") as file:
            file.write(text + "\n")
    return began


def log_step(run: Run, row: dict, update_rows: list[dict], episodes: list[Episode], batch: Batch) -> int:
    """Logs a finished step, prints a warning if there is one, and writes the crash box if a phase begins.

    Returns the phase of the collapse that has begun, else 0.
    """
    run.clock.lap("eval")
    run.guard.phase("logs")
    began = warn(run, row)
    run.progress.num_steps = row["step"] + 1
    if run.accelerator.is_main_process:
        write_rows(run, row, update_rows, episodes, batch)
        if began:
            write_crash_box(run)
    return began


def write_rows(run: Run, row: dict, update_rows: list[dict], episodes: list[Episode], batch: Batch) -> None:
    """Appends a finished step to the logs, and updates trackers, heartbeat and progress bar."""
    step, accelerator = row["step"], run.accelerator
    run.guard.lock.check()
    num_tokens = int(batch.lengths_B.sum())
    timings = run.clock.row(accelerator.num_processes, num_tokens)
    metrics.append_rows(run.dir / "updates.jsonl", update_rows)
    metrics.append_rows(run.dir / "metrics.jsonl", [row])
    metrics.append_rows(run.dir / "timings.jsonl", [{"step": step} | timings])
    accelerator.log(row | timings, step=step)
    run.guard.beat(step, run.cfg.run.steps, timings["time/step_s"], num_tokens, row["reward/mean"])
    evaluated = any(name.startswith("eval/") for name in row)
    # The first row may hold the evaluation at the start, which was printed then.
    if evaluated and (step > 0 or run.cfg.eval.every == 1 or step + 1 == run.cfg.run.steps):
        tell_scores(run, runs.read_rows(run.dir / "metrics.jsonl"))
    elif step + 1 == FIRST_REPORT and run.box is None:
        tqdm.write(draw_report([run.dir], run.dir))
    run.bar.set_postfix(
        reward=f"{row['reward/mean']:.3f}",
        entropy=f"{row.get('entropy', math.nan):.3f}",
        searches=f"{row['searches']:.2f}",
    )


def write_crash_box(run: Run) -> None:
    """Writes the crash box, if monitor.crash_box keeps one."""
    if run.recorder.recent is None:
        return
    reference = run.models.reference and run.accelerator.unwrap_model(run.models.reference).lm
    folder = run.recorder.recent.write(run.dir, run.cfg, run.models.lm, run.tokenizer, reference)
    tqdm.write(
        f"crash box: {folder}; try another loss on it with train.py --replay {folder} loss.lld_weight=0.2"
    )


def tell_scores(run: Run, rows: list[dict]) -> None:
    """Prints a line about the last evaluation of these rows, and draws the report from the log so far."""
    log, cfg = run.dir / "metrics.jsonl", run.cfg
    options = {"eval.at_start": cfg.eval.at_start, "eval.every": cfg.eval.every, "run.steps": cfg.run.steps}
    report = f"{run.dir / 'report.html'} comes after {FIRST_REPORT} steps and at every evaluation"
    if log.exists():
        report = draw_report([run.dir], run.dir)
        trackers.log_figure(run, rows[-1]["step"])
    tqdm.write(f"held-out {courses.describe_scores(rows, options)}; {report}")


def draw_report(folders: list[Path], out: Path) -> str:
    """`write_report`, with matplotlib imported only when there is something to draw."""
    from lld.report.figure import write_report

    return write_report(folders, out)


def recall(run: Run, folder: Path) -> None:
    """Rebuilds recorder and progress as of `progress.num_steps` steps, from the log in `folder`."""
    recorder, progress = run.recorder, run.progress
    for row in runs.read_rows(folder / "metrics.jsonl"):
        if row["step"] >= progress.num_steps:
            continue
        recorder.phase = recorder.detector.update(row)
        # The first row holds the evaluation at the start, unless every step is evaluated.
        if row["step"] > 0 or run.cfg.eval.every == 1:
            progress.best = best_of(run, row, row)
            if progress.best and progress.best[1] <= progress.num_proven_steps:
                progress.best_proven = progress.best
