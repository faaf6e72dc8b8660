"""`open_run`: opens and checks everything a run needs, before any work starts."""

import dataclasses
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, set_seed
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from lld import protocol, settings
from lld.config import Config, Model
from lld.data import load_benchmark, load_questions
from lld.engine.fit import check_fit
from lld.episode import Batch, Question
from lld.model import adapters
from lld.model.load import load_lm, load_tokenizer, read_shape
from lld.policy import Policy
from lld.record import phases, runs
from lld.record.metrics import Timed
from lld.retrieval.client import check_health, make_search
from lld.reward import check_own_reward
from lld.rollout import check_prompts
from lld.running import (
    checkpoint,
    crashbox,
    dry_row,
    lock,
    lora,
    optimizers,
    provenance,
    recording,
    run_folder,
    sharding,
    trackers,
)
from lld.running.plan.checks import check_plan
from lld.running.run import Models, Progress, Recorder, Run
from lld.running.survive import PATIENCE, Guard


def open_run(guard: Guard, cfg: Config, resume: bool, box: Path | None = None) -> Run:
    """Opens a run: a new one, one resumed from its newest checkpoint, or the replay of a crash box.

    Every process must call it. Raises ValueError for a mistake of the user, and RetrieverError if the
    retriever does not answer.
    """
    sharding.check_launch()
    trackers.check(cfg.run.trackers)
    check_own_reward(cfg.reward)
    dry_row.check_names(cfg)
    accelerator = open_accelerator(cfg)
    resumed = open_folder(guard, cfg, resume, box, accelerator)
    tokenizer = load_tokenizer(cfg.model)
    questions, held_out, search, inputs = [], {}, Timed(None), {}
    if box is None:
        questions, held_out, search = open_world(cfg, tokenizer)
        fingerprint = getattr(search.search, "fingerprint", None)
        inputs = provenance.of_input(cfg, questions, held_out, fingerprint)
    if resume:
        reads_start = cfg.loss.kl_weight > 0 or cfg.model.lora_rank > 0
        provenance.check_input(Path(cfg.run.dir), inputs, reads_start)
    check_plan(cfg)
    models, optimizer = load_models(cfg, accelerator, tokenizer, resumed, plays=box is None)
    run = Run(
        cfg=cfg,
        guard=guard,
        accelerator=accelerator,
        tokenizer=tokenizer,
        questions=questions,
        held_out=held_out,
        search=search,
        models=models,
        optimizer=optimizer,
        snapshots=[],
        recorder=Recorder(make_detector(cfg)),
        progress=Progress(),
        box=box,
    )
    if resumed is not None:
        restore(run, resumed, resume)
    begin_session(run, inputs)
    recording.recall(run, box or run.dir)
    if cfg.monitor.crash_box:
        run.recorder.recent = crashbox.Recent(cfg.monitor.crash_box)
    return run


def make_detector(cfg: Config) -> phases.Detector:
    """The detector of phases, whose warnings advise what would change this run."""
    advice = phases.remedy(runs.flat(settings.to_dict(cfg)))
    return phases.Detector(cfg.optim.updates_per_rollout, advice)


def open_accelerator(cfg: Config) -> Accelerator:
    """Makes the Accelerator, and applies torch's global settings: threads, determinism, seed."""
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and "OMP_NUM_THREADS" not in os.environ:
        # As under `accelerate launch`; a small policy is not faster with more threads.
        torch.set_num_threads(1)
    # Torch's default timeout of a collective is only minutes; the watchdog is to act first.
    patience = timedelta(days=365)
    if cfg.run.watchdog_s:
        patience = timedelta(seconds=PATIENCE * cfg.run.watchdog_s)
    accelerator = Accelerator(
        mixed_precision=cfg.model.mixed_precision if on_gpu else "no",
        log_with=list(cfg.run.trackers) or None,
        project_dir=Path(cfg.run.dir),
        cpu=not on_gpu,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=patience)],
    )
    if cfg.rollout.weights == "bf16" and accelerator.mixed_precision == "bf16":
        raise ValueError(
            "rollout.weights = 'bf16' does nothing with model.mixed_precision = 'bf16' on a GPU, where the "
            "sampler is in bf16 anyway: drop it, or set model.mixed_precision=no"
        )
    if on_gpu and cfg.optim.name == "adamw_offload":
        # Its step is work of the CPU, and `accelerate launch` asks for one thread.
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    if sharding.is_asked(accelerator) and cfg.monitor.crash_box:
        raise ValueError(
            f"monitor.crash_box = {cfg.monitor.crash_box} with sharded weights: a box is kept whole by one "
            "process, which is what sharding is to avoid; set it to 0, or train without FSDP"
        )
    if cfg.run.deterministic:
        # cuBLAS reads this at the first matrix multiplication on the GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(cfg.run.deterministic, warn_only=True)
    # Episodes and data order have their own generators; this seeds whatever a model may draw.
    set_seed(cfg.run.seed)
    return accelerator


def open_folder(
    guard: Guard, cfg: Config, resume: bool, box: Path | None, accelerator: Accelerator
) -> Path | None:
    """Locks and checks the run folder, and returns the checkpoint to start from, or None for a new run.

    The checkpoint has been checked. Also makes the tiny world if one is configured.
    """
    run_dir = Path(cfg.run.dir)
    run_folder.check_place(run_dir)
    guard.lock = take_lock(run_dir, accelerator)
    run_folder.check_run_dir(run_dir, cfg, resume)
    if cfg.tinyworld.dir is not None:
        from lld.tinyworld import prepare  # needs the retriever packages

        with accelerator.main_process_first():
            prepare.prepare_world(cfg.tinyworld, cfg.rollout, cfg.retriever.topk)
    if box is None and not resume:
        return None
    resumed = checkpoint.latest(box or run_dir)
    if resumed is None and resume and (rows := runs.read_rows(run_dir / "metrics.jsonl")):
        accelerator.print(
            f"--resume: {run_dir} holds no checkpoint: starts again from step 0, and its {len(rows)} logged "
            "steps are played again"
        )
    if resumed is not None:
        checkpoint.check(resumed)
    if resumed is not None and resume:
        num_steps = int(resumed.name.removeprefix("step_"))
        run_folder.check_logs(run_dir, num_steps, cfg.optim.updates_per_rollout)
    return resumed


def take_lock(run_dir: Path, accelerator: Accelerator) -> lock.Lock:
    """Takes this process's lock of the run folder; ValueError on all processes if another run has it."""
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


def open_world(
    cfg: Config, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Question], dict[str, list[Question]], Timed]:
    """Opens and checks the training questions, the held-out questions and the search tool."""
    questions = load_questions(cfg.data.train, split=cfg.data.train_split, sources=cfg.data.train_sources)
    held_out = {}
    if cfg.eval.every:
        for name in cfg.eval.during_training:
            held_out[name] = load_benchmark(cfg, name)[: cfg.eval.max_questions]
    for some in (questions, *held_out.values()):
        check_prompts(tokenizer, some, cfg.rollout.max_prompt_tokens)
    protocol.check_observation_budget(tokenizer, cfg.retriever.topk, cfg.rollout.max_observation_tokens)
    check_health(cfg.retriever)
    return questions, held_out, Timed(make_search(cfg.retriever))


def load_models(
    cfg: Config,
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
    resumed: Path | None,
    plays: bool,
) -> tuple[Models, torch.optim.Optimizer]:
    """Loads the policy with its optimizer, and the frozen models that the options need.

    Each process loads one full float32 model at a time, and moves or shards it before it loads the next.
    """
    # The plan was checked: to another process, what this one loads would look like memory that is missing
    accelerator.wait_for_everyone()
    if cfg.model.lora_rank:
        return lora.load_models(cfg, accelerator, tokenizer, resumed, plays)
    sharded = sharding.is_asked(accelerator)
    start = cfg.model if resumed is None else dataclasses.replace(cfg.model, path=str(resumed))
    lm = load_lm(start)
    check_fit(lm, tokenizer, cfg.rollout.max_episode_tokens)
    dtype = optimizers.weight_dtype(cfg.optim, accelerator.mixed_precision)
    bf16_copy = accelerator.mixed_precision == "bf16" and dtype == torch.float32
    needs_copy = plays and (sharded or bf16_copy or cfg.rollout.weights != "trainer")
    rollout_copy = sharding.rollout_copy(lm, accelerator) if needs_copy else None
    if cfg.model.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})

    def frozen(options: Model) -> torch.nn.Module:
        policy = Policy(optimizers.cast(load_lm(options), dtype)).requires_grad_(False)
        if sharded:
            return sharding.shard(policy, accelerator)
        return accelerator.prepare_model(policy, evaluation_mode=True)

    if sharded:
        policy = sharding.shard(Policy(lm), accelerator)
        optimizer = optimizers.make(policy, cfg.optim, dtype)
    else:
        policy = Policy(lm)
        optimizer = optimizers.make(policy, cfg.optim, dtype)
        moved = [True, cfg.optim.name != "adamw_offload"]
        policy, optimizer = accelerator.prepare(policy, optimizer, device_placement=moved)
    reference = frozen(cfg.model) if cfg.loss.kl_weight > 0 else None
    anchor = frozen(start) if cfg.loss.lld_lag_steps else None
    bare = accelerator.unwrap_model(policy)
    return Models(policy, bare, bare.lm, rollout_copy, reference, anchor), optimizer


def restore(run: Run, folder: Path, resume: bool) -> None:
    """Loads optimizer, RNG state, snapshots and progress from the checkpoint in `folder`."""
    state = checkpoint.load_trainer_state(folder, expected_shapes(run.cfg.model))
    sharding.load_optimizer(run.optimizer, [part["optimizer"] for part in state["parts"]])
    torch.set_rng_state(state["rng"])
    run.snapshots = sharding.load_snapshots(run.models.bare, [part["snapshots"] for part in state["parts"]])
    num_steps = state["num_steps"]
    progress = run.progress
    progress.num_steps = num_steps
    progress.num_proven_steps = state.get("proven", num_steps - 1)
    progress.num_idle_steps = max(0, num_steps - 1 - progress.num_proven_steps)
    if resume:
        progress.unproven_checkpoint = num_steps
    if run.cfg.monitor.sentinel_every and state.get("sentinel") is not None:
        run.recorder.sentinel = Batch(**state["sentinel"])


def begin_session(run: Run, inputs: dict[str, str]) -> None:
    """Starts the watchdog, writes config.yaml and run.json, and opens the trackers.

    Also drops log rows of steps that will be repeated.
    """
    cfg, accelerator = run.cfg, run.accelerator
    run.guard.watch(run.dir, accelerator, cfg.run.watchdog_s)
    # The updates of a step may take longer than the watchdog waits.
    guard, models = run.guard, run.models
    for model in (models.bare, models.reference, models.anchor):
        if isinstance(model, torch.nn.Module):
            model.register_forward_hook(lambda *_: guard.sign_of_life())
    if accelerator.is_main_process:
        first_step = run.progress.num_steps
        notice = provenance.begin_session(run.dir, cfg, first_step, inputs, accelerator.num_processes)
        run_folder.begin_run(run.dir, cfg, first_step)
        if notice:
            print(f"train.py: {notice}", file=sys.stderr)
        repeats = cfg.rollout.num_questions / max(1, len(run.questions))
        if repeats > 1 and run.box is None:
            told = f"{len(run.questions)} training questions: a step asks each of them {repeats:.1f} times"
            print(f"train.py: {told} (rollout.num_questions)", file=sys.stderr)
    accelerator.wait_for_everyone()  # the log is truncated before it is read
    if sharding.is_asked(accelerator) and not (run.dir / "run.json").exists():
        raise ValueError(
            f"run.dir = {run.dir}: process {accelerator.process_index} does not see what the main process "
            "wrote there; choose a folder that all machines share"
        )
    trackers.begin(run)


def expected_shapes(options: Model) -> dict[str, torch.Tensor]:
    """The state_dict of a model of `options.path` on the meta device: shapes without memory."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(
            read_shape(options), trust_remote_code=options.trust_remote_code
        )
        if options.lora_rank:
            adapters.add(lm, options)
        return lm.state_dict()
