"""A plan before a run: memory of each process by kind, time and tokens of a step, disk, from the model's
config alone.

The memory terms follow what is alive at the peaks of lld/engine/engine.py, lld/policy.py and lld/update.py;
tests/bench/plan_memory.py holds them against measured peaks. Times are estimates: arithmetic on the figures
of section `plan`.
"""

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lld import config
from lld.engine import decoder, engine
from lld.model import lm_head, load
from lld.retrieval import memory
from lld.running import sharding
from lld.tinyworld import world

GB = 1e9
# Published architectures by hub name, for a plan without a download
SHAPES = Path(__file__).parents[2] / "configs" / "shapes"
# Assumed of a GPU: CUDA's and NCCL's own memory, and the share that fragmentation costs
CONTEXT, FRAGMENTS = 1.0 * GB, 0.04


@dataclass(frozen=True)
class Shape:
    """What memory and time depend on. Parameters: of all, of a decoder layer, of the largest tensor."""

    hidden: int
    layers: int
    query: int  # width of all query heads together
    kv: int  # width of all key heads together; values have the same
    ffn: int
    vocab: int
    tied: bool
    params: int
    layer_params: int
    largest: int

    @property
    def head(self) -> int:
        return self.hidden * self.vocab

    @property
    def matmul_params(self) -> int:
        """Weights that every token is multiplied with."""
        return self.params - (0 if self.tied else self.head)


def shape_of(model_config) -> Shape:
    """Counted on a model without memory, so that biases and norms are in."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(model_config)
    width = (
        getattr(model_config, "head_dim", None)
        or model_config.hidden_size // model_config.num_attention_heads
    )
    layers = [
        sum(weight.numel() for weight in module.parameters())
        for module in lm.modules()
        if type(module).__name__ in (lm._no_split_modules or ())
    ]
    return Shape(
        model_config.hidden_size,
        model_config.num_hidden_layers,
        model_config.num_attention_heads * width,
        model_config.num_key_value_heads * width,
        model_config.intermediate_size,
        model_config.vocab_size,
        bool(model_config.tie_word_embeddings),
        sum(weight.numel() for weight in lm.parameters()),
        max(layers, default=0),
        max(weight.numel() for weight in lm.parameters()),
    )


def read_shape(cfg: config.Config) -> Shape:
    """The shape of `model.path`: a folder's config.json, the tiny world's policy before it is made, a file of
    configs/shapes, or the hub's."""
    path = cfg.model.path
    if cfg.tinyworld.dir and Path(path) == Path(cfg.tinyworld.dir) / "policy" and not Path(path).exists():
        return shape_of(
            world.policy_shape(
                cfg.tinyworld,
                world.make_tokenizer(world.make_world(cfg.tinyworld), cfg.retriever.topk),
            )
        )
    published = SHAPES / f"{path.removesuffix('-Instruct')}.json"
    try:
        if not Path(path).exists() and published.is_file():
            options = json.loads(published.read_text())
            return shape_of(AutoConfig.for_model(options.pop("model_type"), **options))
        return shape_of(load.read_shape(cfg.model))
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"cannot read the shape of model.path = {path!r}: give a folder with its config.json, or put "
            f"that file at {published} ({error})"
        ) from None


@dataclass(frozen=True)
class Setup:
    """How a run is spread: `memory` bytes are there for each process, None where nobody knows."""

    processes: int
    sharded: bool  # FSDP2
    on_gpu: bool
    memory: float | None


def read_setup(cfg: config.Config) -> Setup:
    """As launched, unless section `plan` speaks of GPUs that are not here."""
    told, here = cfg.plan, torch.cuda.is_available()
    on_gpu = here or told.gpus is not None or told.gpu_memory_gb is not None
    processes = told.gpus or int(os.environ.get("WORLD_SIZE", 1))
    launched = sharding.asked("FSDP") and processes > 1
    sharded = launched if told.shard == "launcher" else told.shard == "fsdp" and processes > 1
    if told.gpu_memory_gb is not None:
        available = told.gpu_memory_gb * GB
    elif here:
        available = float(torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", 0))).total_memory)
    else:
        available = (
            None if on_gpu else memory.available_bytes() / int(os.environ.get("LOCAL_WORLD_SIZE", processes))
        )
    return Setup(processes, sharded, on_gpu, available)


def cache_sizes(prompt: int, longest: int, on_gpu: bool = False) -> tuple[int, int]:
    """Tokens a slot of the engine's cache has room for, before and after it grows for the last time; on a GPU
    it never does (decoder.SlotCache)."""
    if on_gpu:
        return 0, decoder.grown(0, longest)
    before = size = decoder.LENGTH_BUCKET
    while size < longest:
        before, size = size, decoder.grown(size, max(prompt, size + 1), longest)
    return before, size


def estimate(cfg: config.Config, shape: Shape, setup: Setup) -> dict[str, dict[str, float]]:
    """Bytes of one process at the peak of each phase, by kind. Episodes are as long as they may be."""
    rollout, optim = cfg.rollout, cfg.optim
    half = setup.on_gpu and cfg.model.mixed_precision == "bf16"
    share = setup.processes if setup.sharded else 1
    compute = 2 if half else 4  # bytes of what a matrix multiplication yields
    stored = 2 if half and optim.name == "adamw_offload" else 4  # of a weight
    # Of the residual stream, which autocast leaves in the type of the weights
    stream = 2 if half and (stored == 2 or setup.sharded) else 4
    N, C, L, A, F, V = shape.params, shape.hidden, shape.layers, shape.query, shape.ffn, shape.vocab

    always = {
        "weights": N * stored / share,
        "optimizer": N * {"adamw": 8, "adamw_8bit": 2 + 2 * 4 / 256, "adamw_offload": 0}[optim.name] / share,
    }
    always |= {
        name: N * stored / share
        for name, there in (("reference", cfg.loss.kl_weight > 0), ("anchor", cfg.loss.lld_lag_steps > 0))
        if there
    }
    if setup.sharded or half and stored == 4:
        always["rollout copy"] = float(N * compute)
    cast = 2 if half and stored == 4 and not setup.sharded else 0  # bytes of a weight's copy under autocast
    # Of each weight, until its block ends; of the head a slice
    copy = {"autocast's copy": float((shape.matmul_params - shape.head) * cast)} if cast else {}
    # FSDP2 gathers layers one ahead; embedding and head stay until a pass is over
    root = shape.head * (1 if shape.tied else 2)
    gathered = {"FSDP": float(compute * (2 * shape.layer_params + root))} if setup.sharded else {}

    before, size = cache_sizes(
        min(cfg.plan.prompt_tokens, rollout.max_prompt_tokens), rollout.max_episode_tokens, setup.on_gpu
    )
    slot_token = 2 * L * shape.kv * compute
    # In float32: logits, their log-probabilities, probabilities, these padded; top-p may sort all
    sampling = {"logits": rollout.num_slots * V * (16 + 24 * (rollout.top_p < 1))}
    rows = max(1, min(engine.PASS_TOKENS // (rollout.max_observation_tokens + 1), rollout.num_slots))
    # As bool and as numbers, on a GPU for each query head of a key head; the varlen kernel needs none
    mask = 0 if half else rollout.max_episode_tokens * (5 + 4 * setup.on_gpu * A // shape.kv)
    reading = {
        "activations": rows
        * (rollout.max_observation_tokens + 1)
        * ((2 * C + A + 2 * shape.kv) * compute + 4 * F * compute + mask)
    }
    growing = {"cache growing": rollout.num_slots * before * slot_token}
    phases = {
        "rollout": always
        | {"optimizer": always["optimizer"] * (not optim.cpu_in_rollout)}
        | {"KV cache": rollout.num_slots * size * slot_token}
        | max(sampling, reading, growing, key=total)
    }

    tokens, written = micro_batch(cfg)
    width = min(V, max(1024, lm_head.SLICE_LOGITS.get("cuda" if setup.on_gpu else "cpu", 2**27) // written))
    # In float32; the slice before is still there
    slices = (written * width * 12 if width < V else written * V * 8) + width * C * cast
    # What the final norm and the head read
    last = tokens * C * (12 if stream == 4 else 8) + written * C * (stream + compute % 4)
    reading = {"activations": tokens * pass_bytes(shape, stream, compute)}
    scoring = {"activations": tokens * C * stream + written * C * (stream + compute % 4), "logits": slices}
    phases["scoring"] = always | copy | gathered | max(reading, scoring, key=total)

    # The peak is one of three: the end of the forward pass, the head going backward, the last layer going
    # backward.
    saved = saved_bytes(shape, stream, compute)
    kept = tokens * L * (C * stream if cfg.model.gradient_checkpointing else saved)
    # DDP's buckets are a second copy
    gradients = {"gradients": N * 4 / share * (1 if setup.sharded or setup.processes == 1 else 2)}
    if setup.sharded:
        # Gradients on their way
        gathered["FSDP"] += 2 * shape.layer_params * (compute + 4) + shape.head * compute
    ends = [copy | {"activations": kept + last, "logits": slices}]
    copy = {} if cfg.model.gradient_checkpointing else copy
    # And the gradient of the head's weights
    ends += [copy | {"activations": kept + last + written * C * 4, "logits": slices + shape.head * 4}]
    ends += [
        copy
        | {
            "activations": kept
            + tokens * (saved * cfg.model.gradient_checkpointing + 2 * F * compute + 8 * C),
            "tied head's gradient": shape.head * 4 * shape.tied,
        }
    ]
    phases["update"] = always | gradients | gathered | max(ends, key=total)
    phases["optimizer step"] = always | gradients
    if setup.on_gpu:
        phases = {
            name: kinds | {"CUDA, fragments": CONTEXT + FRAGMENTS * total(kinds)}
            for name, kinds in phases.items()
        }
    return phases


def local_processes(setup: Setup) -> int:
    """Processes of one machine: as launched, and of GPUs elsewhere no more than eight."""
    launched = os.environ.get("LOCAL_WORLD_SIZE")
    return (
        int(launched)
        if launched and int(os.environ.get("WORLD_SIZE", 1)) == setup.processes
        else min(setup.processes, 8)
    )


def host_memory(cfg: config.Config, shape: Shape, setup: Setup) -> dict[str, dict[str, float]]:
    """Bytes of CPU memory of one machine with GPUs, by kind: while models are opened, and while the run goes
    on.

    Every process opens each model whole, in float32, and places it before it opens the next (train.build).
    """
    N, processes = shape.params, local_processes(setup)
    half = cfg.model.mixed_precision == "bf16"
    share = setup.processes if setup.sharded else 1
    stored = 2 if half and cfg.optim.name == "adamw_offload" else 4
    offloaded = {"float32 weights": 4.0 * N * processes} if cfg.optim.name == "adamw_offload" else {}
    opening = {"a whole model in each process": 4.0 * N * processes} | offloaded
    running = offloaded | ({"gradients, moments": 12.0 * N * processes} if offloaded else {})
    if cfg.optim.cpu_in_rollout and not offloaded:
        running["moments in a rollout"] = 8.0 * N / share * processes
    if cfg.loss.lld_lag_steps:
        running["snapshots"] = float(stored) * N / share * processes * (cfg.loss.lld_lag_steps + 1)
    if cfg.monitor.crash_box:
        running["crash box"] = (
            2.0 * N * (stored + (12 if offloaded else {"adamw": 8, "adamw_8bit": 2}[cfg.optim.name]))
        )
    return {
        "opening models": opening,
        "training": running | {"a checkpoint's weights": float(4 if setup.sharded else stored) * N},
    }


def total(kinds: dict[str, float]) -> float:
    return float(sum(kinds.values()))


def micro_batch(cfg: config.Config) -> tuple[int, int]:
    """Tokens of one forward pass of the update, and those of them that the model wrote, when its rows are as
    long as they may be."""
    rollout, optim = cfg.rollout, cfg.optim
    longest = rollout.max_episode_tokens
    # A longer row goes alone
    tokens = (
        optim.micro_batch_size * longest
        if optim.micro_batch_tokens is None
        else max(optim.micro_batch_tokens, longest)
    )
    written = min(
        (rollout.max_turns + 1) * rollout.max_new_tokens,
        longest - min(cfg.plan.prompt_tokens, rollout.max_prompt_tokens),
    )
    return tokens, tokens * written // longest


def pass_bytes(shape: Shape, stream: int, compute: int) -> int:
    """Of a token, in the middle of the MLP of a pass without gradients: embeddings, the layer's input, the
    residual and its norm; three of the MLP's width."""
    return 4 * shape.hidden * stream + 3 * shape.ffn * compute


def saved_bytes(shape: Shape, stream: int, compute: int) -> int:
    """Of a token, for the backward pass of a decoder layer.

    Two norms keep their input, the normed input and their output, the latter once for each matrix where
    autocast casts it; attention keeps queries, keys, values, what it yields and that laid out for the next
    matrix; the MLP four of its width.
    """
    norms = {(4, 4): 24, (4, 2): 26, (2, 2): 16}[stream, compute]
    return norms * shape.hidden + compute * (3 * shape.query + 2 * shape.kv + 4 * shape.ffn)


@dataclass(frozen=True)
class Times:
    """Seconds of a step of one process by part, with the arithmetic in words; tokens are those of all
    processes."""

    parts: dict[str, tuple[float, str]]
    tokens: int
    written: int


def times(cfg: config.Config, shape: Shape, setup: Setup) -> Times:
    """An estimate, on the figures of section `plan`: multiplications 2 a weight and token, 6 with the
    backward pass, 8 where it recomputes."""
    told, optim = cfg.plan, cfg.optim
    flops, bandwidth = told.tflops * 1e12 * told.efficiency, told.bandwidth_gb_s * GB * told.efficiency
    N, compute = shape.params, 2 if cfg.model.mixed_precision == "bf16" else 4
    rows = cfg.rollout.num_questions * cfg.rollout.group_size
    length = min(
        told.prompt_tokens + told.written_tokens + told.observation_tokens, cfg.rollout.max_episode_tokens
    )
    own = rows / setup.processes  # episodes of a process
    # Attention looks back half an episode on average
    token = 2 * shape.matmul_params + 2 * shape.layers * shape.query * length
    slots = min(cfg.rollout.num_slots, own)
    steps = own * told.written_tokens / slots
    step_bytes = N * compute + slots * length * 2 * shape.layers * shape.kv * compute
    read = own * (told.prompt_tokens / cfg.rollout.group_size + told.observation_tokens)
    scored = (
        (1 - 1 / optim.updates_per_rollout)
        + (cfg.loss.kl_weight > 0)
        + (cfg.loss.lld_lag_steps > 0)
        + (1 / cfg.monitor.rescore_every if cfg.monitor.rescore_every else 0)
    )
    passes = 8 if cfg.model.gradient_checkpointing else 6
    micro = (
        own / optim.micro_batch_size
        if optim.micro_batch_tokens is None
        else own * length / optim.micro_batch_tokens
    )
    parts = {
        "decode": (
            steps * max(step_bytes / bandwidth, slots * token / flops),
            f"{steps:,.0f} steps of {slots:.0f} slots, each reads {step_bytes / GB:.1f} GB",
        ),
        "prefill": (read * token / flops, f"{read:,.0f} tokens x {token / 1e9:.1f} GFLOP"),
        "scoring": (
            scored * own * length * token / flops,
            f"{scored:.1f} passes over {own * length:,.0f} tokens",
        ),
        "update": (
            passes / 2 * own * length * token / flops,
            f"{own * length:,.0f} tokens x {passes / 2 * token / 1e9:.0f} GFLOP",
        ),
    }
    if optim.name == "adamw_offload":
        parts["optimizer"] = (
            optim.updates_per_rollout
            * N
            * ((4 + compute) / (told.host_gb_s * GB) + 32 / (told.cpu_gb_s * GB)),
            f"{optim.updates_per_rollout} x ({4 + compute} bytes a weight to and from CPU memory, 32 "
            "within it)",
        )
    else:
        share = setup.processes if setup.sharded else 1
        moved = 16 if optim.name == "adamw_8bit" else 28
        parts["optimizer"] = (
            optim.updates_per_rollout * N / share * moved / bandwidth,
            f"{optim.updates_per_rollout} x {moved} bytes a weight",
        )
    if setup.sharded:
        moved = N * ((scored + 2) * micro * compute + micro * 4 + compute)
        parts["communication"] = (
            moved / (told.link_gb_s * GB),
            f"{moved / GB:,.0f} GB of weights and gradients between GPUs, as if nothing hid it",
        )
    elif setup.processes > 1:
        parts["communication"] = (
            optim.updates_per_rollout * 8 * N / (told.link_gb_s * GB),
            f"{optim.updates_per_rollout} x 8 bytes a weight",
        )
    return Times(parts, rows * length, rows * told.written_tokens)


def disk(cfg: config.Config, shape: Shape) -> dict[str, tuple[float, str]]:
    """Bytes a run leaves in `run.dir`."""
    run, told = cfg.run, cfg.plan
    length = min(
        told.prompt_tokens + told.written_tokens + told.observation_tokens, cfg.rollout.max_episode_tokens
    )
    weight = {
        "adamw": 4 + 8,
        "adamw_8bit": 4 + 2,
        "adamw_offload": (2 if cfg.model.mixed_precision == "bf16" else 4) + 12,
    }[cfg.optim.name] + 4 * (cfg.loss.lld_lag_steps + 1) * (cfg.loss.lld_lag_steps > 0)
    count = run.keep_checkpoints + 2 if run.keep_checkpoints else -(-run.steps // run.save_every) + 1
    logs = -(-run.steps // cfg.monitor.trajectories_every) if cfg.monitor.trajectories_every else 0
    episodes = cfg.monitor.trajectories_questions * cfg.rollout.group_size
    evaluations = (
        (run.steps // cfg.eval.every + cfg.eval.at_start) * len(cfg.eval.during_training)
        if cfg.eval.every
        else 0
    )
    return {
        "checkpoints": (
            shape.params * float(weight) * count,
            f"{shape.params * weight / GB:.1f} GB each ({weight} bytes a weight), {count} at most"
            + (": the newest, the best, and one being written" if run.keep_checkpoints else ""),
        ),
        "trajectories": (
            float(logs * episodes * length * 70),
            f"{logs} logs of {episodes} episodes, about 70 bytes a token",
        ),
        "evaluations": (
            float(evaluations * cfg.eval.max_questions * length * 6),
            f"{evaluations} of {cfg.eval.max_questions} questions at most, about 6 bytes a token",
        ),
    }


def reduced(cfg: config.Config, shape: Shape, setup: Setup) -> config.Config | None:
    """`cfg` with as many slots and as large micro-batches, halved and halved again, as fit; None where even
    the smallest do not."""
    while True:
        over = [name for name, kinds in estimate(cfg, shape, setup).items() if total(kinds) > setup.memory]
        rollout, optim = cfg.rollout, cfg.optim
        if not over:
            return cfg
        if "rollout" in over:
            if rollout.num_slots <= 8:
                return None
            cfg = replace(cfg, rollout=replace(rollout, num_slots=max(8, rollout.num_slots // 2)))
        elif "optimizer step" in over or micro_batch(cfg)[0] <= rollout.max_episode_tokens:
            return None
        else:
            tokens = max(rollout.max_episode_tokens, micro_batch(cfg)[0] // 2)
            cfg = replace(cfg, optim=replace(optim, micro_batch_tokens=tokens))


def remedies(cfg: config.Config, shape: Shape, setup: Setup) -> list[str]:
    """What could be changed, each with the memory it would take, and with fewer slots and smaller
    micro-batches where that is not enough."""
    changes = {"as it is": (cfg, setup)}
    if not cfg.model.gradient_checkpointing:
        changes["model.gradient_checkpointing=true"] = (
            replace(cfg, model=replace(cfg.model, gradient_checkpointing=True)),
            setup,
        )
    if not setup.sharded:
        for name in ("adamw_8bit", "adamw_offload"):
            if cfg.optim.name != name and setup.on_gpu and (name != "adamw_offload" or setup.processes == 1):
                changes[f"optim.name={name}"] = (replace(cfg, optim=replace(cfg.optim, name=name)), setup)
        for number in sorted({setup.processes, 2, 4, 8} - {1}) if setup.on_gpu else ():
            if number >= setup.processes:
                whole = replace(cfg, optim=replace(cfg.optim, name="adamw"))
                changes[f"sharded over {number} GPUs (FSDP)"] = (
                    whole,
                    replace(setup, processes=number, sharded=True),
                )
    elif setup.processes < 8:
        changes["sharded over 8 GPUs"] = (cfg, replace(setup, processes=8))
    if cfg.loss.kl_weight > 0:
        changes["loss.kl_weight=0"] = (replace(cfg, loss=replace(cfg.loss, kl_weight=0.0)), setup)
    lines = []
    for label, (changed, where) in changes.items():
        peak = max(map(total, estimate(changed, shape, where).values()))
        less = reduced(changed, shape, where)
        options = (
            [
                f"{name}={new}"
                for name, new, old in (
                    ("rollout.num_slots", less.rollout.num_slots, changed.rollout.num_slots),
                    (
                        "optim.micro_batch_tokens",
                        less.optim.micro_batch_tokens,
                        changed.optim.micro_batch_tokens,
                    ),
                )
                if new != old
            ]
            if less
            else []
        )
        verdict = "does not fit, whatever the slots and micro-batches"
        if less:
            verdict = (
                (
                    f"with {' '.join(options)} "
                    f"{max(map(total, estimate(less, shape, where).values())) / GB:.1f} GB"
                )
                if options
                else "fits"
            )
        lines.append(f"  {label}: {peak / GB:.1f} GB; {verdict}")
    return lines


def describe(cfg: config.Config, shape: Shape, setup: Setup) -> str:
    """The plan as it is printed."""
    device = "GPU" if setup.on_gpu else "CPU process"
    limit = f" of {setup.memory / GB:.1f} GB" if setup.memory else ""
    how = (
        "weights, gradients and optimizer sharded"
        if setup.sharded
        else "each with the whole model"
        if setup.processes > 1
        else "not sharded"
    )
    phases = estimate(cfg, shape, setup)
    unit, name = (GB, "GB") if max(map(total, phases.values())) > GB else (1e6, "MB")
    kinds = list(dict.fromkeys(kind for parts in phases.values() for kind in parts))
    tokens, written = micro_batch(cfg)
    lines = (
        []
        if setup.on_gpu
        else [
            (
                "No GPU here: this is the plan of a CPU process. For GPUs elsewhere: plan.gpus=8 "
                "plan.gpu_memory_gb=80, and plan.shard=fsdp for sharded weights."
            ),
            "",
        ]
    )
    lines += [
        (
            f"{cfg.model.path}: {shape.params / 1e9:.2f} B parameters, {shape.layers} layers of "
            f"{shape.hidden}, vocabulary {shape.vocab:,}{' (tied)' if shape.tied else ''}"
        ),
        f"{setup.processes} {device}{'s' * (setup.processes > 1 and setup.on_gpu)}{'es' * (setup.processes > 1 and not setup.on_gpu)}{limit}, {how}; {cfg.optim.name}, "
        f"{cfg.model.mixed_precision if setup.on_gpu else 'no'} mixed precision, gradient checkpointing {'on' if cfg.model.gradient_checkpointing else 'off'}",
        "",
        (
            f"Memory of each {device}, {name}, with all episodes as long as allowed "
            f"({cfg.rollout.max_episode_tokens:,} tokens): {cfg.rollout.num_slots} slots, micro-batches of "
            f"{tokens:,} tokens, {written:,} of them written"
        ),
        f"{'':22}" + "".join(f"{phase:>16}" for phase in phases),
    ]
    lines += [
        f"{kind:22}"
        + "".join(
            f"{parts[kind] / unit:16.2f}" if parts.get(kind) else f"{'':16}" for parts in phases.values()
        )
        for kind in kinds
        if any(parts.get(kind) for parts in phases.values())
    ]
    lines += [f"{'sum':22}" + "".join(f"{total(parts) / unit:16.2f}" for parts in phases.values())]
    if setup.on_gpu:
        number = local_processes(setup)
        lines += ["", f"CPU memory of each machine ({number} process{'es' * (number > 1)}), {name}:"]
        lines += [
            (
                f"  {phase:14}{total(kinds) / unit:8.2f}  "
                f"{', '.join(f'{kind} {size / unit:.2f}' for kind, size in kinds.items())}"
            )
            for phase, kinds in host_memory(cfg, shape, setup).items()
        ]
        step = times(cfg, shape, setup)
        seconds = sum(part for part, _ in step.parts.values())
        told = cfg.plan
        lines += [
            "",
            (
                f"A step, estimated for {told.tflops:.0f} TFLOP/s and {told.bandwidth_gb_s:.0f} GB/s of "
                "which "
                f"{100 * told.efficiency:.0f} % are reached, {told.link_gb_s:.0f} GB/s between GPUs, "
                f"{told.host_gb_s:.0f} GB/s to CPU memory;"
            ),
        ]
        lines += [
            (
                f"an episode assumed to have {told.prompt_tokens} prompt + {told.written_tokens} written + "
                f"{told.observation_tokens} observation tokens (options plan.…)"
            )
        ]
        lines += [f"  {what:14}{part:8.0f} s   {why}" for what, (part, why) in step.parts.items()]
        lines += [
            (
                f"  {'sum':14}{seconds:8.0f} s   {step.tokens:,} tokens, {step.written:,} written; "
                f"{cfg.run.steps} steps: {cfg.run.steps * seconds / 3600:.0f} h, without searches and "
                "evaluations"
            )
        ]
    lines += ["", "Disk:"] + [
        f"  {what:14}{size / GB:8.2f} GB  {why}" for what, (size, why) in disk(cfg, shape).items()
    ]
    return "\n".join(lines)


def refuse_combination(cfg: config.Config, setup: Setup) -> None:
    """Raises ValueError for an optimizer that works on whole tensors where they are cut."""
    if setup.sharded and cfg.optim.name != "adamw":
        raise ValueError(
            f"optim.name = {cfg.optim.name!r} works on whole weights, and here they are sharded: use adamw "
            "(on one GPU: launch without FSDP)"
        )
    if setup.processes > 1 and cfg.optim.name == "adamw_offload":
        raise ValueError(
            f"optim.name = 'adamw_offload' with {setup.processes} processes: DDP's buckets cannot hold "
            "float32 gradients of bf16 weights; shard instead (configs/accelerate/gpu-8.yaml), or use one "
            "GPU"
        )


def main(cfg: config.Config) -> int:
    """`train.py --plan`: prints the plan on the first process; the exit code, 2 where it does not fit."""
    shape, setup = read_shape(cfg), read_setup(cfg)
    refuse_combination(cfg, setup)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        print(describe(cfg, shape, setup))
    if setup.memory is None:
        if first:
            print("\nHow much memory a GPU has is not known here: plan.gpu_memory_gb=80 says it.")
        return 0
    phase, peak = max(
        ((name, total(kinds)) for name, kinds in estimate(cfg, shape, setup).items()),
        key=lambda item: item[1],
    )
    if peak <= setup.memory:
        if first:
            print(f"\nFits: {peak / GB:.1f} of {setup.memory / GB:.1f} GB, most of it in phase {phase!r}.")
        return 0
    if first:
        lines = "\n".join(remedies(cfg, shape, setup))
        print(
            f"\nDoes not fit: phase {phase!r} needs {peak / GB:.1f} GB and there are "
            f"{setup.memory / GB:.1f}. What would, and what it would take:\n{lines}"
        )
    return 2


def check(cfg: config.Config) -> None:
    """Before a run on a GPU: ValueError where what is always there cannot fit, a warning where the peak may
    not. The estimate counts on the longest episodes, so it alone refuses nothing."""
    setup = read_setup(replace(cfg, plan=config.Plan()))
    refuse_combination(cfg, setup)
    if not torch.cuda.is_available():
        return
    shape = read_shape(cfg)
    check_host(cfg, shape, setup)
    phases = estimate(cfg, shape, setup)
    fixed = max(
        total(
            {
                kind: size
                for kind, size in kinds.items()
                if kind in ("weights", "optimizer", "reference", "anchor", "gradients", "rollout copy")
            }
        )
        for kinds in phases.values()
    )
    peak = max(map(total, phases.values()))
    told = (
        f"{{:.1f}} GB of a GPU's {setup.memory / GB:.1f} GB; `train.py --plan` prints the terms. What "
        "would fit:\n" + "\n".join(remedies(cfg, shape, setup))
        if peak > setup.memory
        else ""
    )
    if fixed > setup.memory:
        raise ValueError(f"weights, gradients, optimizer and copies alone take {told.format(fixed / GB)}")
    if told and os.environ.get("RANK", "0") == "0":
        print(
            f"train.py: with episodes as long as allowed this run takes {told.format(peak / GB)}",
            file=sys.stderr,
            flush=True,
        )


def check_host(cfg: config.Config, shape: Shape, setup: Setup) -> None:
    """ValueError where a machine's CPU memory cannot even hold the models while they are opened, a warning
    where training may not fit.

    What the kernel does of itself, it does without a word: it kills the largest process.
    """
    available = memory.available_bytes()
    for phase, kinds in host_memory(cfg, shape, setup).items():
        if total(kinds) <= available:
            continue
        told = (
            f"{phase} takes {total(kinds) / GB:.1f} GB of CPU memory on a machine with "
            f"{local_processes(setup)} processes ({', '.join(kinds)}), and {available / GB:.1f} GB are "
            "available"
        )
        if phase == "opening models":
            raise ValueError(f"{told}: use a machine with more, fewer processes on it, or a smaller model")
        if os.environ.get("RANK", "0") == "0":
            print(f"train.py: {told}; `train.py --plan` prints the terms", file=sys.stderr, flush=True)
