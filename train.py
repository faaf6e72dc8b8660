"""Trains a search agent: `accelerate launch train.py --config configs/tiny.yaml [--resume]
[section.option=value …]`.

Exit codes: 0 done; 1 a bug, with its traceback; 2 a mistake in the options; 3 the retriever is gone; 4
stopped by monitor.stop_in_phase; 5 SIGTERM, SIGINT or SIGHUP, or the launcher is gone; 6 numbers that are not
finite; 7 the run's folder cannot be written; 8 the watchdog; 9 another process is gone.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

# On shared cores OpenMP threads that spin while they wait made a step 20 times slower; must be set before
# torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from lld.running import lock

LAUNCHER = lock.launcher()  # before the seconds that torch takes, in which it may die

import torch
import transformers
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, gather_object, set_seed
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from lld import config, files, protocol, settings
from lld.advantages import group_advantages
from lld.data import load_benchmark, load_questions, questions_of_step
from lld.engine.engine import Engine
from lld.episode import Batch, Episode, Question, collate
from lld.evaluate import evaluate_questions, summarize
from lld.loss import answer_beta
from lld.model.load import check_fit, load_lm, load_tokenizer, read_shape
from lld.policy import Policy
from lld.record import metrics, monitor, phases, runs, trajectories
from lld.record import sentinel as sentinel_module
from lld.report.figure import write_report
from lld.retrieval.client import check_health, make_search
from lld.reward import score_episodes
from lld.rollout import Budgets, check_prompts, open_engine, rollout
from lld.running import checkpoint, crashbox, optimizers, plan, provenance, sharding, survive
from lld.tinyworld import prepare
from lld.tools import RetrieverError, Unplayed
from lld.update import learning_rate, score_batch, update_policy

# Share of a step's groups that may be dropped because a query found nothing; beyond it those that never
# search would be favoured
MAX_EMPTY_GROUPS = 0.5
MAX_IDLE_STEPS = 3  # steps in a row without a single finite gradient, after which a run ends


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", help="YAML of options; needed unless --replay is given")
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="BOX",
        help="make the updates of a crash box again, with the options given here changed",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in run.dir from its newest checkpoint"
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print what the run would take of memory, time and disk, and end: 0 if it fits, 2 if not",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.option=value")
    try:
        settings.refuse_dashes(argv)
    except ValueError as error:
        parser.error(runs.printable(error))
    args = parser.parse_intermixed_args(argv)
    guard = survive.Guard()
    guard.prepare(LAUNCHER)
    try:
        if (args.config is None) == (args.replay is None) or (args.replay and args.resume):
            raise ValueError("give either --config CONFIG, or --replay BOX without --resume")
        if args.replay:
            return train(guard, crashbox.replay_options(args.replay, args.overrides), False, args.replay)
        cfg = settings.load(args.config, args.overrides)
        return plan.main(cfg) if args.plan else train(guard, cfg, args.resume)
    except ValueError as error:  # the user's; everything else is ours and keeps its traceback
        print(f"train.py: {runs.printable(error)}", file=sys.stderr)
        return survive.USER
    except RetrieverError as error:
        print(f"train.py: {runs.printable(error)}", file=sys.stderr)
        return survive.RETRIEVER
    except (files.WriteError, OSError) as error:
        gone = guard.run_dir is not None and (isinstance(error, lock.Gone) or not guard.run_dir.exists())
        if isinstance(error, OSError) and not gone and error.errno not in files.DISK_ERRORS:
            raise
        if guard.run_dir is None:  # the tiny world
            print(
                f"train.py: {error}. Nothing was trained: make room or mend the folder's permissions, and "
                "give the same command again.",
                file=sys.stderr,
            )
            return survive.DISK
        print(f"train.py: {error}. {after_disk(guard.run_dir, gone)}", file=sys.stderr)
        return survive.DISK
    except KeyboardInterrupt:  # a signal before the first step; later ones stop the run in order
        name = signal.Signals(guard.signal or signal.SIGINT).name
        print(
            f"train.py: {name} received while the run was prepared: nothing was trained, and the same "
            "command starts again.",
            file=sys.stderr,
        )
        return survive.SIGNAL
    except RuntimeError as error:
        if not survive.lost_peer(error):
            raise
        phase, step = guard.now
        print(
            f"train.py: rank {guard.rank}: another process of this run ended or fell silent (phase "
            f"{phase!r} of step {step}; {survive.short(error)}); see its own message. "
            f"{guard.save_what_stands()}",
            file=sys.stderr,
            flush=True,
        )
        leave_report(guard, args.replay)
        os._exit(survive.PEER)  # an orderly exit would wait for the one that is gone
    finally:
        leave_report(guard, args.replay)
        guard.close()


def after_disk(run_dir: Path, gone: bool) -> str:
    """What is left, and how to go on, where a run's folder could not be written, or is gone."""
    if gone:
        return f"{run_dir} is gone, and all that was in it: start the run again."
    last = checkpoint.latest(run_dir)
    left = (
        f"The last good checkpoint is {last}, and it is untouched" if last else "There is no checkpoint yet"
    )
    again = "continue with --resume" if (run_dir / "config.yaml").exists() else "start the run again"
    return f"{left}: make room or mend the folder's permissions, then {again}."


def leave_report(guard: survive.Guard, box: Path | None) -> None:
    """However a run ended: what it has reached, its report, and what to type next. Best effort, as something
    else may be broken already."""
    if guard.run_dir is None or guard.rank or not (guard.run_dir / "metrics.jsonl").exists():
        return
    guard.phase("report")
    try:
        ends = runs.describe_end(guard.run_dir) if box is None else crashbox.compare(box, guard.run_dir)
        print(
            f"{ends}\n{write_report([guard.run_dir] if box is None else [box, guard.run_dir], guard.run_dir)}",
            flush=True,
        )
    # No row yet, a damaged log, a closed console: the exit code must say why the run ended
    except Exception as error:
        print(f"train.py: no report was written: {error}", file=sys.stderr, flush=True)


@dataclass
class Parts:
    """What a run works with. `bare` is `policy` without DDP around it, `lm` the model inside; `twin` is the
    engine's copy of it, None where the engine reads `lm` itself; `snapshots` are its weights, or this
    process's shards of them, at the start of the last lld_lag_steps + 1 steps, oldest first."""

    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    questions: list[Question]
    held_out: dict[str, list[Question]]
    search: metrics.Timed
    policy: torch.nn.Module
    bare: Policy
    lm: torch.nn.Module
    twin: torch.nn.Module | None
    reference: torch.nn.Module | None
    anchor: torch.nn.Module | None
    optimizer: torch.optim.Optimizer
    snapshots: list[dict]
    detector: phases.Detector
    guard: survive.Guard
    best: tuple[float, int] | None = None
    phase: int = 0
    idle_steps: int = 0  # in a row of which no update was made
    proven: int = -1  # after so many steps the weights are known to be good: a finite gradient came from them
    named: tuple[float, int] | None = None  # the best of which that is known; best.json's
    waiting: int | None = None  # steps of the newest checkpoint of which it is not
    owed: bool = False  # a checkpoint was due when no update could be made
    recent: crashbox.Recent | None = None
    sentinel: Batch | None = None


def train(guard: survive.Guard, cfg: config.Config, resume: bool, box: Path | None = None) -> int:
    """Runs until `run.steps` rollout steps are done; returns the process's exit code. With a crash box the
    episodes are those in the box and nothing is played or evaluated."""
    parts, first_step = build(guard, cfg, resume, box)
    accelerator, run_dir = parts.accelerator, Path(cfg.run.dir)
    try:
        row = evaluate(parts, cfg, 0) if cfg.eval.at_start and first_step == 0 else {}
        if row and accelerator.is_main_process:
            tell_scores(cfg, [{"step": 0} | row])
        if first_step and box is None:
            settle(parts, cfg)  # a kill may have come between the last checkpoint and this
            make_up_evaluation(parts, cfg, first_step)
    except Unplayed as error:
        return stop(parts, cfg, first_step, *reason(parts, str(error)))
    steps = tqdm(
        range(first_step, cfg.run.steps),
        desc="training",
        initial=first_step,
        total=cfg.run.steps,
        disable=None if accelerator.is_main_process else True,
    )
    for step in steps:
        clock = metrics.Clock()
        guard.phase("rollout", step)
        # Whether this process has all that a checkpoint needs
        alone = not (sharding.is_sharded(parts.bare) or cfg.optim.cpu_in_rollout)
        guard.rescue = (
            functools.partial(write_checkpoint, parts, cfg, step) if box is None and alone else None
        )
        with sharding.optimizer_on_cpu(parts.optimizer, cfg.optim.cpu_in_rollout):
            episodes, found, failure = (
                play(parts, cfg, step)
                if box is None
                else (
                    crashbox.read_episodes(
                        box, step, cfg.rollout.group_size, parts.lm.get_input_embeddings().num_embeddings
                    ),
                    crashbox.read_dropped(box, step),
                    None,
                )
            )
        if failure:
            return stop(parts, cfg, step, *reason(parts, failure))
        clock.lap("rollout")
        guard.phase("update")
        guard.rescue = None
        keep_for_later(parts, cfg, step, episodes)
        learned, update_rows, batch = learn(parts, cfg, step, episodes, clock)
        row |= learned | found
        broken = not_finite(parts, cfg, row, batch)
        if broken:
            return give_up(parts, cfg, step, broken)

        last = step + 1 == cfg.run.steps
        if cfg.eval.every and ((step + 1) % cfg.eval.every == 0 or last):
            try:
                evaluated = evaluate(parts, cfg, step + 1)
                parts.best, row = best_of(parts, cfg, row, evaluated), row | evaluated
            except Unplayed as error:  # to be made up; what the row has of the start's must not pass for it
                failure, row = (
                    str(error),
                    {name: value for name, value in row.items() if not name.startswith("eval/")},
                )
        clock.lap("eval")
        guard.phase("logs")
        began = warn(parts, cfg, row)
        if accelerator.is_main_process:
            guard.lock.check()
            timings = clock.row(
                parts.search.reset(), episodes, accelerator.num_processes, int(batch.lengths_B.sum())
            )
            metrics.append_rows(run_dir / "updates.jsonl", update_rows)
            metrics.append_rows(run_dir / "metrics.jsonl", [row])
            metrics.append_rows(run_dir / "timings.jsonl", [{"step": step} | timings])
            accelerator.log(row | timings, step=step)
            guard.beat(
                step, cfg.run.steps, timings["time/step_s"], int(batch.lengths_B.sum()), row["reward/mean"]
            )
            if any(name.startswith("eval/") for name in row) and (step > 0 or cfg.eval.every == 1 or last):
                tell_scores(cfg, runs.read_rows(run_dir / "metrics.jsonl"))
            steps.set_postfix(
                reward=f"{row['reward/mean']:.3f}",
                entropy=f"{row.get('entropy', math.nan):.3f}",
                searches=f"{row['searches']:.2f}",
            )
        if began and parts.recent is not None and accelerator.is_main_process:
            folder = parts.recent.write(
                run_dir,
                cfg,
                parts.lm,
                parts.tokenizer,
                parts.reference and accelerator.unwrap_model(parts.reference).lm,
            )
            tqdm.write(
                f"crash box: {folder}; try another loss on it with train.py --replay {folder} "
                "loss.lld_weight=0.2"
            )
        row = {}
        if failure or guard.agreed(accelerator):
            return stop(parts, cfg, step + 1, *reason(parts, failure))
        if began and began >= cfg.monitor.stop_in_phase > 0:
            return stop(
                parts,
                cfg,
                step + 1,
                f"phase {began} ({phases.NAMES[began]}) has begun and monitor.stop_in_phase = "
                f"{cfg.monitor.stop_in_phase}.",
                survive.PHASE,
            )
        if box is None and is_due(parts, cfg, step + 1):
            save(parts, cfg, step + 1)
    accelerator.end_training()
    guard.outcome = "done"
    return 0


def learn(
    parts: Parts, cfg: config.Config, step: int, episodes: list[Episode], clock: metrics.Clock
) -> tuple[dict, list[dict], Batch]:
    """Trains on the episodes of a step; returns its row of metrics, a row for each optimizer step, and the
    batch."""
    accelerator = parts.accelerator
    rewards = score_episodes(episodes, parts.tokenizer, cfg.reward)
    rewards_PG = torch.tensor(rewards).view(-1, cfg.rollout.group_size)
    batch = collate(
        episodes,
        group_advantages(rewards_PG, cfg.advantage),
        parts.tokenizer.pad_token_id,
    )
    row = {
        "step": step,
        "failed_groups": 1 - len(rewards_PG) / cfg.rollout.num_questions,
    } | metrics.describe_episodes(episodes, rewards_PG)
    row |= {"lld_beta": answer_beta(row["searches"], cfg.loss), "lr": learning_rate(step, cfg.optim)}
    for group in parts.optimizer.param_groups:
        group["lr"] = row["lr"]
    # At a run's first step there is no older policy
    anchor = parts.anchor if len(parts.snapshots) > 1 else None
    update_rows, scores = update_policy(
        accelerator,
        parts.policy,
        parts.reference,
        parts.optimizer,
        batch,
        cfg,
        beta=row["lld_beta"],
        anchor=anchor,
    )
    clock.lap("update")
    if due(step, cfg.monitor.rescore_every):
        scores.final_BT = score_batch(accelerator, parts.policy, batch, cfg, cfg.optim.updates_per_rollout)
    if parts.sentinel is None and cfg.monitor.sentinel_every:
        parts.sentinel = sentinel_module.choose_sentinel(
            batch, scores.old_BT, episodes, cfg.monitor.sentinel_size
        )
    if parts.sentinel is not None and due(step, cfg.monitor.sentinel_every):
        row |= sentinel_module.describe_sentinel(accelerator, parts.policy, parts.sentinel, cfg)
    clock.lap("rescore")
    row |= metrics.summarize_updates(update_rows) | monitor.describe(batch, scores, episodes, cfg)
    update_rows = [
        {"step": step, "update": u} | update_row | monitor.describe_update(batch, scores, u, cfg)
        for u, update_row in enumerate(update_rows)
    ]
    if due(step, cfg.monitor.trajectories_every) and accelerator.is_main_process:
        rows = range(min(len(episodes), cfg.monitor.trajectories_questions * cfg.rollout.group_size))
        records = trajectories.describe(
            parts.tokenizer, step, episodes, batch, scores, rewards, list(rows), cfg.loss.lld_tolerance
        )
        trajectories.write(Path(cfg.run.dir) / "trajectories" / f"step_{step:06d}.jsonl", records)
    clock.lap("monitor")
    return row, update_rows, batch


def keep_for_later(parts: Parts, cfg: config.Config, step: int, episodes: list[Episode]) -> None:
    """What must be remembered before the update: the weights LLDS may compare with, and the crash box's."""
    if parts.recent is not None and parts.accelerator.is_main_process:
        parts.recent.before(step, parts.bare, lambda: trainer_state(parts))
        parts.recent.keep(step, episodes)
    keep_snapshot(parts, cfg.loss.lld_lag_steps)  # last: a replay of the box adds this step's weights itself


def warn(parts: Parts, cfg: config.Config, row: dict) -> int:
    """Writes the run's phase into the row; returns it where it is a later one than at the step before, else
    0. Loudly."""
    before = parts.phase
    row["phase"] = parts.phase = parts.detector.update(row)
    begins = row["phase"] > max(1, before)
    text = parts.detector.warning(row, row["phase"] if begins else 0)
    if text and parts.accelerator.is_main_process:
        if row["phase"] == phases.COLLAPSE and parts.best:
            text += f" The best checkpoint so far is {checkpoint.folder_of(cfg.run.dir, parts.best[1])}."
        tqdm.write(f"*** WARNING *** {text}", file=sys.stderr)
        with open(Path(cfg.run.dir) / "warnings.log", "a") as file:
            file.write(text + "\n")
    return row["phase"] if begins else 0


def tell_scores(cfg: config.Config, rows: list[dict]) -> None:
    """A line on the console about the last evaluation of these rows, and the report as the log stands."""
    log = Path(cfg.run.dir) / "metrics.jsonl"
    options = {"eval.at_start": cfg.eval.at_start, "eval.every": cfg.eval.every, "run.steps": cfg.run.steps}
    report = f"; {write_report([log.parent], log.parent)}" if log.exists() else ""
    tqdm.write(f"held-out {runs.describe_scores(rows, options)}{report}")


def build(
    guard: survive.Guard, cfg: config.Config, resume: bool, box: Path | None = None
) -> tuple[Parts, int]:
    """Opens and checks everything before any work starts; returns it with the step to start from."""
    sharding.check_launch()
    check_trackers(cfg.run.trackers)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    run_dir, on_gpu = Path(cfg.run.dir), torch.cuda.is_available()
    if not on_gpu and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as under `accelerate launch`; a small policy gains nothing from more
    mixed_precision = cfg.model.mixed_precision if on_gpu else "no"
    # Torch's own is minutes
    patience = (
        timedelta(seconds=survive.PATIENCE * cfg.run.watchdog_s)
        if cfg.run.watchdog_s
        else timedelta(days=365)
    )
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        log_with=list(cfg.run.trackers) or None,
        project_dir=run_dir,
        cpu=not on_gpu,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=patience)],
    )
    sharded = sharding.is_asked(accelerator)
    if sharded and cfg.monitor.crash_box:
        raise ValueError(
            f"monitor.crash_box = {cfg.monitor.crash_box} with sharded weights: a box is kept whole by one "
            "process, which is what sharding is to avoid; set it to 0, or train without FSDP"
        )
    if cfg.run.deterministic:
        # Read when the first matrix is multiplied on a GPU
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(cfg.run.deterministic, warn_only=True)
    # Episodes and data order have their own generators; this is for anything a model may draw
    set_seed(cfg.run.seed)
    checkpoint.check_place(run_dir)
    guard.lock = take_lock(run_dir, accelerator)
    checkpoint.check_run_dir(run_dir, cfg, resume)
    if cfg.tinyworld.dir is not None:
        with accelerator.main_process_first():
            prepare.prepare_world(cfg.tinyworld, cfg.rollout, cfg.retriever.topk)
    resumed = checkpoint.latest(run_dir if box is None else box) if resume or box else None
    if resumed is not None:
        checkpoint.check(resumed)
        if resume:
            checkpoint.check_logs(
                run_dir, int(resumed.name.removeprefix("step_")), cfg.optim.updates_per_rollout
            )
    tokenizer = load_tokenizer(cfg.model)
    questions, held_out, search = ([], {}, metrics.Timed(None)) if box else open_world(cfg, tokenizer)

    made_of = (
        provenance.of_input(cfg, questions, held_out, getattr(search.search, "fingerprint", None))
        if box is None
        else {}
    )
    if resume:
        provenance.check_input(run_dir, made_of, cfg.loss.kl_weight)

    plan.check(cfg)
    start = cfg.model if resumed is None else dataclasses.replace(cfg.model, path=str(resumed))
    lm = load_lm(start)
    check_fit(lm, tokenizer, cfg.rollout.max_episode_tokens)
    dtype = optimizers.weight_dtype(cfg.optim, accelerator.mixed_precision)
    twin = (
        sharding.rollout_copy(lm, accelerator)
        if box is None and (sharded or (accelerator.mixed_precision == "bf16" and dtype == torch.float32))
        else None
    )
    if cfg.model.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    # One whole float32 model a process at a time: each goes where it belongs before the next is opened.
    place = (
        functools.partial(sharding.shard, accelerator=accelerator)
        if sharded
        else functools.partial(accelerator.prepare_model, evaluation_mode=True)
    )
    frozen = lambda model: place(Policy(optimizers.cast(model, dtype)).requires_grad_(False))
    policy = place(Policy(lm)) if sharded else Policy(lm)
    optimizer = optimizers.make(policy, cfg.optim, dtype)
    policy, optimizer = (
        (policy, optimizer)
        if sharded
        else accelerator.prepare(
            policy, optimizer, device_placement=[True, cfg.optim.name != "adamw_offload"]
        )
    )
    reference = frozen(load_lm(cfg.model)) if cfg.loss.kl_weight > 0 else None
    anchor = frozen(load_lm(start)) if cfg.loss.lld_lag_steps else None
    bare = accelerator.unwrap_model(policy)
    first_step, snapshots, state = 0, [], {}
    if resumed is not None:
        state = checkpoint.load_trainer_state(resumed, expected_shapes(cfg.model))
        sharding.load_optimizer(optimizer, [part["optimizer"] for part in state["parts"]])
        torch.set_rng_state(state["rng"])
        first_step, snapshots = (
            state["num_steps"],
            sharding.load_snapshots(bare, [part["snapshots"] for part in state["parts"]]),
        )
    guard.watch(run_dir, accelerator, cfg.run.watchdog_s)
    if accelerator.is_main_process:
        notice = provenance.begin_session(run_dir, cfg, first_step, made_of, accelerator.num_processes)
        checkpoint.begin_run(run_dir, cfg, first_step)
        print(f"train.py: {notice}" if notice else "", end="\n" if notice else "", file=sys.stderr)
    accelerator.wait_for_everyone()  # the log is cut to first_step rows before anybody reads it
    if sharded and not (run_dir / "run.json").exists():
        raise ValueError(
            f"run.dir = {run_dir}: process {accelerator.process_index} does not see what the main process "
            "wrote there; choose a folder that all machines share"
        )
    if cfg.run.trackers:
        accelerator.init_trackers(
            "lld",
            config={
                f"{s}.{k}": str(v) for s, options in settings.to_dict(cfg).items() for k, v in options.items()
            },
            init_kwargs={"wandb": {"name": run_dir.name, "dir": str(run_dir)}},
        )
    parts = Parts(
        accelerator,
        tokenizer,
        questions,
        held_out,
        search,
        policy,
        bare,
        bare.lm,
        twin,
        reference,
        anchor,
        optimizer,
        snapshots,
        phases.Detector(cfg.optim.updates_per_rollout),
        guard,
    )
    parts.proven, parts.waiting = (
        state.get("proven", first_step - 1),
        first_step if resume and state else None,
    )
    parts.idle_steps = max(0, first_step - 1 - parts.proven)
    if cfg.monitor.sentinel_every and state.get("sentinel") is not None:
        parts.sentinel = Batch(**state["sentinel"])
    remember(parts, cfg, box or run_dir, first_step)
    return parts, first_step


def take_lock(run_dir: Path, accelerator: Accelerator) -> lock.Lock:
    """This process's hold on the run's folder; ValueError on all of them where another run has it."""
    taken = refusal = None
    if accelerator.is_main_process:
        try:
            taken = lock.take(run_dir)
        except (ValueError, OSError) as error:
            refusal = str(error)
    refusal = broadcast_object_list([refusal])[0]
    if refusal:
        raise ValueError(refusal)
    return taken or lock.take(run_dir, accelerator.process_index)


def check_trackers(names: Sequence[str]) -> None:
    """Raises ValueError for a tracker that accelerate does not know, or would leave out because its package
    is not installed."""
    installed = [tracker.value for tracker in get_available_trackers()]
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ValueError(
                f"run.trackers names {name!r}: accelerate knows {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}"
            )
        if name not in installed:
            raise ValueError(
                f"run.trackers names {name!r}, which is not installed: pip install "
                f"{name.replace('_', '-')}, or drop it from run.trackers"
            )


def open_world(
    cfg: config.Config, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Question], dict[str, list[Question]], metrics.Timed]:
    """Training questions, held-out questions and the search tool, each checked."""
    questions = load_questions(cfg.data.train, split=cfg.data.train_split, sources=cfg.data.train_sources)
    held_out = (
        {name: load_benchmark(cfg, name)[: cfg.eval.max_questions] for name in cfg.eval.during_training}
        if cfg.eval.every
        else {}
    )
    for some in (questions, *held_out.values()):
        check_prompts(tokenizer, some, cfg.rollout.max_prompt_tokens)
    protocol.check_observation_budget(tokenizer, cfg.retriever.topk, cfg.rollout.max_observation_tokens)
    check_health(cfg.retriever)
    return questions, held_out, metrics.Timed(make_search(cfg.retriever))


def remember(parts: Parts, cfg: config.Config, folder: Path, first_step: int) -> None:
    """What the recorder knew when the run in `folder` had made `first_step` steps."""
    for row in runs.read_rows(folder / "metrics.jsonl"):
        if row["step"] < first_step:
            parts.phase = parts.detector.update(row)
            if row["step"] > 0 or cfg.eval.every == 1:  # the first row holds the evaluation at the start
                parts.best = best_of(parts, cfg, row, row)
                parts.named = parts.best if parts.best and parts.best[1] <= parts.proven else parts.named
    parts.recent = crashbox.Recent(cfg.monitor.crash_box) if cfg.monitor.crash_box else None


def new_engine(parts: Parts, cfg: config.Config, sampling: config.Rollout | config.Eval) -> Engine:
    """An engine with the temperature and top_p of training or of evaluation, on the policy's weights or on a
    copy of them made now; every process must call."""
    if parts.twin is not None:
        sharding.refresh(parts.twin, parts.bare, parts.accelerator.device)
    lm = (parts.twin or parts.lm).eval()
    return open_engine(lm, parts.tokenizer, cfg.rollout, sampling)


def play(parts: Parts, cfg: config.Config, step: int) -> tuple[list[Episode], dict, str | None]:
    """The step's episodes, question by question, on every process, without the groups in which a search
    failed or, unless `retriever.empty_results` is "show", found nothing; and what the row of metrics says of
    the latter.

    Where more groups failed than `rollout.max_failed_groups` allows, or found nothing than MAX_EMPTY_GROUPS,
    on all processes together: no episodes, and why. Each process plays whole groups of every num_processes-th
    question.
    """
    accelerator, options = parts.accelerator, cfg.rollout
    questions = questions_of_step(parts.questions, step, options.num_questions, cfg.run.seed)
    mine = list(enumerate(questions))[accelerator.process_index :: accelerator.num_processes]
    ids = [question.id for question in questions]
    repeats = [ids[:index].count(ids[index]) for index, _ in mine]
    played, failure = [], None
    try:
        with (
            accelerator.autocast(),
            progress_bar(parts, len(mine) * options.group_size, "rollout") as progress,
        ):
            played = rollout(
                new_engine(parts, cfg, options),
                parts.tokenizer,
                [question for _, question in mine],
                parts.search,
                Budgets.of(options),
                num_samples=options.group_size,
                seed=cfg.run.seed,
                step=step,
                repeats=repeats,
                max_failed_groups=int(options.max_failed_groups * len(questions)),
                empty_results=cfg.retriever.empty_results,
                overlap_search=options.overlap_search,
                progress=parts.guard.ticks(progress),
            )
    except Unplayed as error:
        failure = str(error)
    failures = [text for text in gather_object([failure]) if text]
    if failures:
        return [], {}, failures[0]
    groups = [
        (index, played[i * options.group_size : (i + 1) * options.group_size])
        for i, (index, _) in enumerate(mine)
    ]
    groups = [group for _, group in sorted(gather_object(groups), key=lambda group: group[0])]
    kept, failures, empty = sort_groups(groups)
    if len(failures) > options.max_failed_groups * len(questions):
        return [], {}, failures[0]
    if len(empty) > MAX_EMPTY_GROUPS * len(questions) or (
        empty and len(kept) < cfg.optim.updates_per_rollout
    ):
        return (
            [],
            {},
            (
                f"{len(empty)} of {len(questions)} groups were dropped for a search without a passage "
                f"({empty[0]}, for one): mend the index, "
                "or set retriever.empty_results=show, which shows the model an empty block and which a "
                "resumed run may change"
            ),
        )
    return kept, {"empty_groups": len(empty) / len(questions)}, None


def sort_groups(groups: list[list[Episode]]) -> tuple[list[Episode], list[str], list[str]]:
    """The episodes of the groups in which every search found something, and why the others are dropped:
    failed, found nothing."""
    kept, failures, empty = [], [], []
    for group in groups:
        reasons = {episode.stop_reason: episode.failure for episode in group if episode.failure}
        if "failed_search" in reasons:
            failures.append(reasons["failed_search"])
        elif reasons:
            empty.append(reasons["empty_search"])
        else:
            kept += group
    return kept, failures, empty


def evaluate(parts: Parts, cfg: config.Config, num_steps: int) -> dict[str, float]:
    """Metrics on the held-out questions after `num_steps` steps; the trajectories go to eval/<benchmark>/ of
    the run's folder."""
    row, accelerator = {}, parts.accelerator
    for name, questions in parts.held_out.items():
        parts.guard.phase("evaluation")
        num_mine = len(questions[accelerator.process_index :: accelerator.num_processes])
        with accelerator.autocast(), progress_bar(parts, num_mine, f"evaluating {name}") as progress:
            engine = new_engine(parts, cfg, cfg.eval)
            records = evaluate_questions(
                engine,
                parts.tokenizer,
                questions,
                parts.search,
                cfg,
                seed=cfg.run.seed,
                progress=parts.guard.ticks(progress),
                accelerator=accelerator,
            )
        row |= {f"eval/{name}/{key}": value for key, value in summarize(records).items()}
        if accelerator.is_main_process:
            path = Path(cfg.run.dir) / "eval" / name / f"step_{num_steps:06d}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return row


def make_up_evaluation(parts: Parts, cfg: config.Config, num_steps: int) -> None:
    """Makes the evaluation after `num_steps` steps that a signal or a failed search cut short before the run
    was resumed."""
    log = Path(cfg.run.dir) / "metrics.jsonl"
    row = runs.read_rows(log)[-1]
    if (
        not cfg.eval.every
        or (num_steps % cfg.eval.every and num_steps != cfg.run.steps)
        or any(name.startswith("eval/") for name in row)
    ):
        return
    evaluated = evaluate(parts, cfg, num_steps)
    parts.best = best_of(parts, cfg, row, evaluated)
    if parts.accelerator.is_main_process:
        metrics.replace_last_row(
            log,
            {name: value for name, value in row.items() if name != "phase"}
            | evaluated
            | {"phase": row["phase"]},
        )
        parts.accelerator.log(evaluated, step=num_steps - 1)
        tell_scores(cfg, runs.read_rows(log))
    save(parts, cfg, num_steps)


def best_of(parts: Parts, cfg: config.Config, row: dict, evaluated: dict) -> tuple[float, int] | None:
    """The best evaluation so far, after that of the step of `row`; one without an update does not count: its
    weights are an earlier step's."""
    return (
        parts.best
        if row.get("skipped_updates") == cfg.optim.updates_per_rollout
        else checkpoint.better(parts.best, evaluated, row["step"] + 1)
    )


def is_due(parts: Parts, cfg: config.Config, num_steps: int) -> bool:
    """Whether a checkpoint is to be saved now; where it would be but no update could be made, after the next
    that is."""
    last = num_steps == cfg.run.steps
    wanted = (
        last
        or parts.owed
        or num_steps % cfg.run.save_every == 0
        or (parts.best is not None and parts.best[1] == num_steps)
    )
    parts.owed = wanted and parts.idle_steps > 0 and not last
    return wanted and not parts.owed


def settle(parts: Parts, cfg: config.Config) -> None:
    """What must wait until an update succeeded after a checkpoint: it may be called the best, and older ones
    may go."""
    if parts.best and parts.best[1] <= parts.proven:
        parts.named = parts.best
    if parts.accelerator.is_main_process:
        if parts.named:
            checkpoint.write_best(cfg.run.dir, parts.named)
        checkpoint.prune(
            cfg.run.dir,
            cfg.run.keep_checkpoints,
            parts.proven,
            [best[1] for best in (parts.best, parts.named) if best],
        )


def save(parts: Parts, cfg: config.Config, num_steps: int) -> Path:
    """The checkpoint after `num_steps` steps, unless it is there already; then older ones are pruned."""
    parts.guard.phase("checkpoint")
    folder = checkpoint.folder_of(cfg.run.dir, num_steps)
    write_checkpoint(parts, cfg, num_steps)
    parts.waiting = num_steps
    settle(parts, cfg)
    parts.guard.phase(survive.WAITING)
    parts.accelerator.wait_for_everyone()
    return folder


def write_checkpoint(parts: Parts, cfg: config.Config, num_steps: int) -> Path | None:
    """The checkpoint after `num_steps` steps: by all processes together where weights are sharded, else by
    the main one."""
    accelerator, folder = parts.accelerator, checkpoint.folder_of(cfg.run.dir, num_steps)
    present = accelerator.is_main_process and (folder / "manifest.json").exists()
    if sharding.is_sharded(parts.bare):
        if not survive.largest(accelerator, present):
            weights = sharding.whole_weights(parts.bare, accelerator)
            shard = {"optimizer": sharding.optimizer_state(parts.optimizer), "snapshots": parts.snapshots}
            checkpoint.save(
                cfg.run.dir,
                num_steps,
                parts.lm,
                parts.tokenizer,
                shared_state(parts),
                accelerator=accelerator,
                weights=weights,
                shard=shard,
            )
    elif not accelerator.is_main_process:
        return None
    elif not present:
        checkpoint.save(cfg.run.dir, num_steps, parts.lm, parts.tokenizer, trainer_state(parts))
    return folder


def shared_state(parts: Parts) -> dict:
    """What an exact restart needs besides weights and step, and every process knows."""
    return {
        "rng": torch.get_rng_state(),
        "shapes": sharding.shapes(parts.bare),
        "proven": parts.proven,
        "sentinel": sentinel_module.pack_sentinel(parts.sentinel),
    }


def trainer_state(parts: Parts) -> dict:
    """All an exact restart needs besides weights and step, where nothing is sharded."""
    return shared_state(parts) | {"optimizer": parts.optimizer.state_dict(), "snapshots": parts.snapshots}


def stop(parts: Parts, cfg: config.Config, num_steps: int, why: str, code: int) -> int:
    """Saves the checkpoint after `num_steps` steps, says why the run ends, and returns its exit code."""
    folder = save(parts, cfg, num_steps)
    lost = code == survive.PHASE and parts.phase == phases.COLLAPSE
    on = (
        (
            "--resume would go on with a collapsed policy, so start a new run from a checkpoint of before "
            "(model.path)"
        )
        if lost
        else "continue with --resume"
    )
    parts.accelerator.print(f"train.py: {why} Saved {folder}; {on}.", file=sys.stderr)
    parts.guard.outcome = "stopped"
    return code


def reason(parts: Parts, failure: str | None) -> tuple[str, int]:
    """Why a run stops whose rollout or evaluation was not played to its end, on any process, and its exit
    code."""
    name = parts.guard.agreed(parts.accelerator)
    if name:
        return f"stopped by {name}, as asked.", survive.SIGNAL
    return f"{failure}\nNothing was trained on the failed search.", survive.RETRIEVER


def not_finite(parts: Parts, cfg: config.Config, row: dict, batch: Batch) -> str | None:
    """What is wrong after a step's updates: weights that are not finite on any process, weights that compute
    no finite numbers after the last step, or too many steps in a row of which no update was made. What waited
    for a sign that all is well, goes on."""
    broken = [
        name
        for name, weight in sharding.parameters(parts.bare).items()
        if not sharding.local(weight).isfinite().all()
    ]
    if survive.largest(parts.accelerator, len(broken)):
        return f"weights are not finite after the update ({', '.join(broken[:2]) or 'on another process'})"
    step, idle = row["step"], row["skipped_updates"] == cfg.optim.updates_per_rollout
    parts.idle_steps, parts.proven = (parts.idle_steps + 1, parts.proven) if idle else (0, step)
    if parts.idle_steps == MAX_IDLE_STEPS:
        return f"no update could be made in {parts.idle_steps} steps: every gradient was not finite"
    if step + 1 == cfg.run.steps:  # no later update will tell
        few = sentinel_module.take(batch, list(range(min(len(batch.names), parts.accelerator.num_processes))))
        if not score_batch(parts.accelerator, parts.policy, few, cfg).isfinite().all():
            return "log-probabilities are not finite after the last update"
        parts.proven = cfg.run.steps
    if parts.waiting is not None and parts.waiting <= step and parts.waiting <= parts.proven:
        parts.waiting = None
        settle(parts, cfg)
    return None


def give_up(parts: Parts, cfg: config.Config, step: int, why: str) -> int:
    """Ends a run that has nothing worth saving; the last good checkpoint stays."""
    good, newest = checkpoint.latest(cfg.run.dir, parts.proven), checkpoint.latest(cfg.run.dir)
    told = f"The last good checkpoint is {good}" if good else "There is no good checkpoint"
    told += (
        f" ({newest} is newer, but no update could be made from it: do not use it)" if newest != good else ""
    )
    parts.accelerator.print(
        f"train.py: step {step}: {why}. No checkpoint was written. {told}. --resume would repeat the same "
        "steps: start a new run with "
        f"model.path {'set to it' if good else 'as it was'} and a smaller optim.lr or optim.max_grad_norm, "
        "or mend what the message of the skipped update names.",
        file=sys.stderr,
    )
    parts.guard.outcome = "given up"
    return survive.NOT_FINITE


def keep_snapshot(parts: Parts, lag: int) -> None:
    """Remembers this step's weights where LLDS compares with an older policy, and loads the oldest into the
    anchor."""
    if lag:
        parts.snapshots = (parts.snapshots + [sharding.snapshot(parts.bare)])[-lag - 1 :]
        sharding.restore(parts.accelerator.unwrap_model(parts.anchor), parts.snapshots[0])


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def progress_bar(parts: Parts, total: int, what: str) -> tqdm:
    """On a terminal only (`disable=None`): in a log file each redrawing would be a line."""
    return tqdm(
        total=total, desc=what, leave=False, disable=None if parts.accelerator.is_main_process else True
    )


def expected_shapes(options: config.Model) -> dict[str, torch.Tensor]:
    """The tensors that a model of `options.path` would have, without their memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            read_shape(options), trust_remote_code=options.trust_remote_code
        ).state_dict()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
