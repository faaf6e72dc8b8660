"""Estimates memory per process, time per step and disk of a run, from the model's config alone.

The memory terms follow what is allocated at the peaks of lld/engine/engine.py, lld/policy.py and
lld/update.py; tests/bench/plan_memory.py compares them with measured peaks. Times are computed from the
hardware figures in config section `plan`.
"""

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lld import config
from lld.engine import decoder, engine
from lld.model import lm_head, load
from lld.retrieval import memory
from lld.running import sharding
from lld.tinyworld import policy, world

GB = 1e9
# config.json files of published models by hub name, so that a plan needs no download.
SHAPES = Path(__file__).parents[2] / "configs" / "shapes"
# Assumed for a GPU: bytes used by CUDA and NCCL themselves, and the share lost to fragmentation.
CONTEXT, FRAGMENTS = 1.0 * GB, 0.04
# Of a kept id in a micro-batch: ids, places, rows and what sorts them (int64), logits and their gradients
KEPT_BYTES = 80


@dataclass(frozen=True)
class Shape:
    """Widths and parameter counts of a model, on which memory and time depend."""

    hidden: int
    layers: int
    query: int  # total width of the query heads
    kv: int  # total width of the key heads; same for values
    ffn: int
    vocab: int
    tied: bool
    params: int  # of the full model
    layer_params: int  # of one decoder layer

    @property
    def head(self) -> int:
        return self.hidden * self.vocab

    @property
    def matmul_params(self) -> int:
        """Number of weights that every token is multiplied with."""
        return self.params - (0 if self.tied else self.head)


def matrices(shape: Shape, names: Iterable[str]) -> list[tuple[int, int]]:
    """(inputs, outputs) of the matrices `names` of a decoder layer."""
    sizes = {
        "q_proj": (shape.hidden, shape.query),
        "k_proj": (shape.hidden, shape.kv),
        "v_proj": (shape.hidden, shape.kv),
        "o_proj": (shape.query, shape.hidden),
        "gate_proj": (shape.hidden, shape.ffn),
        "up_proj": (shape.hidden, shape.ffn),
        "down_proj": (shape.ffn, shape.hidden),
    }
    return [sizes[name] for name in names]


def trained_params(cfg: config.Config, shape: Shape) -> int:
    """Number of weights that are trained: all, or those of the adapters."""
    if not cfg.model.lora_rank:
        return shape.params
    sums = [inputs + outputs for inputs, outputs in matrices(shape, cfg.model.lora_targets)]
    return shape.layers * cfg.model.lora_rank * sum(sums)


def shape_of(model_config) -> Shape:
    """The shape of a model; parameters are counted on the meta device, including biases and norms."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(model_config)
    head_width = getattr(model_config, "head_dim", None)
    if head_width is None:
        head_width = model_config.hidden_size // model_config.num_attention_heads
    layers = [
        sum(weight.numel() for weight in module.parameters())
        for module in lm.modules()
        if type(module).__name__ in (lm._no_split_modules or ())
    ]
    return Shape(
        hidden=model_config.hidden_size,
        layers=model_config.num_hidden_layers,
        query=model_config.num_attention_heads * head_width,
        kv=model_config.num_key_value_heads * head_width,
        ffn=model_config.intermediate_size,
        vocab=model_config.vocab_size,
        tied=bool(model_config.tie_word_embeddings),
        params=sum(weight.numel() for weight in lm.parameters()),
        layer_params=max(layers, default=0),
    )


def read_shape(cfg: config.Config) -> Shape:
    """The shape of `model.path`.

    Read from config.json of a local folder, the options of a tiny-world policy that is not made yet, a file
    in configs/shapes, or the hub. Raises ValueError if none can be read.
    """
    path = cfg.model.path
    if cfg.tinyworld.dir and Path(path) == Path(cfg.tinyworld.dir) / "policy" and not Path(path).exists():
        tokenizer = policy.make_tokenizer(world.make_world(cfg.tinyworld), cfg.retriever.topk)
        return shape_of(policy.policy_shape(cfg.tinyworld, tokenizer))
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
    """Number and kind of processes of a run, and the bytes that each has (None: unknown)."""

    processes: int
    sharded: bool  # FSDP2
    on_gpu: bool
    memory: float | None


def read_setup(cfg: config.Config) -> Setup:
    """The setup as launched, unless section `plan` describes GPUs of another machine."""
    asked, here = cfg.plan, torch.cuda.is_available()
    on_gpu = here or asked.gpus is not None or asked.gpu_memory_gb is not None
    processes = asked.gpus or int(os.environ.get("WORLD_SIZE", 1))
    fsdp = sharding.asked("FSDP") if asked.shard == "launcher" else asked.shard == "fsdp"
    if asked.gpu_memory_gb is not None:
        available = asked.gpu_memory_gb * GB
    elif here:
        device = int(os.environ.get("LOCAL_RANK", 0))
        available = float(torch.cuda.get_device_properties(device).total_memory)
    elif on_gpu:
        available = None
    else:
        available = memory.available_bytes() / int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return Setup(processes, fsdp and processes > 1, on_gpu, available)


def cache_sizes(prompt: int, longest: int, on_gpu: bool = False) -> tuple[int, int]:
    """Tokens that fit into a slot of the KV cache, before and after it grows for the last time.

    On a GPU it never grows (decoder.SlotCache), and the size before is 0.
    """
    if on_gpu:
        return 0, decoder.grown(0, longest)
    before = size = decoder.LENGTH_BUCKET
    while size < longest:
        before, size = size, decoder.grown(size, max(prompt, size + 1), longest)
    return before, size


@dataclass(frozen=True)
class Widths:
    """Bytes per number of each kind of tensor, and the number of processes that weights are sharded over."""

    compute: int  # result of a matrix multiplication
    stored: int  # weight
    stream: int  # residual stream; autocast keeps the weights' dtype
    cast: int  # autocast's copy of a weight; 0 if none
    share: int  # processes that share one copy of the weights


def widths_of(cfg: config.Config, setup: Setup) -> Widths:
    """The widths of a run, from mixed precision, optimizer and sharding."""
    bf16 = setup.on_gpu and cfg.model.mixed_precision == "bf16"
    stored = 2 if bf16 and (cfg.optim.name == "adamw_offload" or cfg.model.lora_rank) else 4
    return Widths(
        compute=2 if bf16 else 4,
        stored=stored,
        stream=2 if bf16 and (stored == 2 or setup.sharded) else 4,
        cast=2 if bf16 and stored == 4 and not setup.sharded else 0,
        share=setup.processes if setup.sharded else 1,
    )


def estimate(cfg: config.Config, shape: Shape, setup: Setup) -> dict[str, dict[str, float]]:
    """Bytes of one process at the peak of each phase, by kind, with episodes of maximal length."""
    widths = widths_of(cfg, setup)
    peaks = {
        "rollout": rollout_peak(cfg, shape, setup, widths),
        "scoring": scoring_peak(cfg, shape, setup, widths),
        "update": update_peak(cfg, shape, setup, widths),
        "optimizer step": trained_weights(cfg, shape, setup, widths),
    }
    if cfg.loss.support == "kept":
        ids = micro_batch(cfg)[1] * cfg.plan.kept_ids
        for phase in ("scoring", "update"):
            peaks[phase]["kept ids"] = float(KEPT_BYTES * ids)
        for kinds in peaks.values() if not setup.on_gpu else ():
            kinds["kept ids"] = kinds.get("kept ids", 0.0) + episodes_kept(cfg)
    if setup.on_gpu:
        for kinds in peaks.values():
            kinds["CUDA, fragments"] = CONTEXT + FRAGMENTS * total(kinds)
    return peaks


def episodes_kept(cfg: config.Config) -> float:
    """Bytes of a step's kept ids on each process: 4 an id, in its episodes and in the batch made of them."""
    tokens = cfg.rollout.num_questions * cfg.rollout.group_size * cfg.plan.written_tokens
    return 2.0 * tokens * (4 * cfg.plan.kept_ids + 4) if cfg.loss.support == "kept" else 0.0


def resident(cfg: config.Config, shape: Shape, setup: Setup, widths: Widths) -> dict[str, float]:
    """Bytes in memory in every phase: weights, optimizer moments, frozen copies."""
    moments = {"adamw": 8, "adamw_8bit": 2 + 2 * 4 / 256, "adamw_offload": 0}[cfg.optim.name]
    weights = shape.params * widths.stored / widths.share
    if cfg.model.lora_rank:
        return {"weights": weights} | resident_adapters(cfg, shape, setup, widths)
    kinds = {"weights": weights, "optimizer": shape.params * moments / widths.share}
    if cfg.loss.kl_weight > 0:
        kinds["reference"] = weights
    if cfg.loss.lld_lag_steps > 0:
        kinds["anchor"] = weights
    if setup.sharded or widths.compute < widths.stored or cfg.rollout.weights != "trainer":
        kinds["rollout copy"] = float(shape.params * widths.compute)
    return kinds


def resident_adapters(cfg: config.Config, shape: Shape, setup: Setup, widths: Widths) -> dict[str, float]:
    """Bytes of adapters, autocast's copies of them, their moments, and the matrices copied for the engine."""
    adapters, copied = trained_params(cfg, shape), set(cfg.model.lora_targets)
    if setup.on_gpu:  # `join_weights` copies these in any case
        copied |= {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    merged = shape.layers * sum(inputs * outputs for inputs, outputs in matrices(shape, copied))
    return {
        "adapters": float(adapters * (4 + widths.compute % 4)),
        "optimizer": float(adapters * 8),
        "rollout copy": float(merged * widths.compute),
    }


def trained_weights(cfg: config.Config, shape: Shape, setup: Setup, widths: Widths) -> dict[str, float]:
    """`resident` plus float32 gradients; DDP's buckets are a second copy of those."""
    kinds = resident(cfg, shape, setup, widths)
    copies = 1 if setup.sharded or setup.processes == 1 else 2
    kinds["gradients"] = trained_params(cfg, shape) * 4 / widths.share * copies
    return kinds


def rollout_peak(cfg: config.Config, shape: Shape, setup: Setup, widths: Widths) -> dict[str, float]:
    """The KV cache, and the largest of: sampling, reading observations, growing the cache."""
    rollout = cfg.rollout
    kinds = resident(cfg, shape, setup, widths)
    if cfg.optim.cpu_in_rollout:
        kinds["optimizer"] = 0.0
    prompt = min(cfg.plan.prompt_tokens, rollout.max_prompt_tokens)
    before, size = cache_sizes(prompt, rollout.max_episode_tokens, setup.on_gpu)
    slots_token = rollout.num_slots * 2 * shape.layers * shape.kv * widths.compute
    kinds["KV cache"] = float(size * slots_token)

    # float32: logits, log-probabilities, probabilities, padded probabilities; top-p may also sort them all.
    sampled = 40 if rollout.cuts else 16
    sampling = {"logits": float(rollout.num_slots * shape.vocab * sampled)}

    chunk = rollout.max_observation_tokens + 1
    rows = max(1, min(engine.PASS_TOKENS // chunk, rollout.num_slots))
    attention = (2 * shape.hidden + shape.query + 2 * shape.kv) * widths.compute
    mlp = 4 * shape.ffn * widths.compute
    mask = mask_bytes(cfg, shape, setup, widths)
    reading = {"activations": float(rows * chunk * (attention + mlp + mask))}

    growing = {"cache growing": float(before * slots_token)}
    return kinds | max(sampling, reading, growing, key=total)


def mask_bytes(cfg: config.Config, shape: Shape, setup: Setup, widths: Widths) -> int:
    """Bytes per token of the engine's attention mask: 0 for the varlen kernel, else one entry per key.

    An entry is held both as bool and as a number, on a GPU once for each query head of a key head.
    """
    if setup.on_gpu and widths.compute == 2:
        return 0
    numbers = 4 * shape.query // shape.kv if setup.on_gpu else 0
    return cfg.rollout.max_episode_tokens * (5 + numbers)


def scoring_peak(cfg: config.Config, shape: Shape, setup: Setup, widths: Widths) -> dict[str, float]:
    """Bytes at the peak of a pass without gradients: in the MLP of a layer, or in the LM head."""
    kinds = resident(cfg, shape, setup, widths)
    if widths.cast:
        kinds["autocast's copy"] = autocast_copy(shape, widths)
    if setup.sharded:
        kinds["FSDP"] = gathered_weights(shape, widths)
    tokens, written = micro_batch(cfg)
    layer = {"activations": float(tokens * pass_bytes(shape, widths.stream, widths.compute))}
    states = tokens * shape.hidden * widths.stream
    # The head reads its states in the dtype of the matrix multiplication.
    read = written * shape.hidden * (widths.stream + widths.compute % 4)
    head = {"activations": float(states + read), "logits": logits_bytes(shape, setup, widths, written)}
    return kinds | max(layer, head, key=total)


def update_peak(cfg: config.Config, shape: Shape, setup: Setup, widths: Widths) -> dict[str, float]:
    """Bytes at the peak of an update.

    That is the largest of: end of the forward pass, backward pass of the head, backward pass of the last
    layer.
    """
    kinds = trained_weights(cfg, shape, setup, widths)
    if setup.sharded:
        # Besides the gathered weights: gradients that wait for their reduce-scatter.
        on_their_way = 2 * shape.layer_params * (widths.compute + 4) + shape.head * widths.compute
        kinds["FSDP"] = gathered_weights(shape, widths) + on_their_way
    tokens, written = micro_batch(cfg)
    checkpointing, rank = cfg.model.gradient_checkpointing, cfg.model.lora_rank
    saved = saved_bytes(shape, widths.stream, widths.compute)
    saved += widths.compute * rank * len(cfg.model.lora_targets)  # between the two factors of an adapter
    kept = tokens * shape.layers * (shape.hidden * widths.stream if checkpointing else saved)
    logits = logits_bytes(shape, setup, widths, written)

    norm = tokens * shape.hidden * (12 if widths.stream == 4 else 8)
    head = written * shape.hidden * (widths.stream + widths.compute % 4)
    forward = {"activations": float(kept + norm + head), "logits": logits}
    # Adds the gradients of the head's states and weights.
    head_backward = {
        "activations": forward["activations"] + written * shape.hidden * 4,
        "logits": logits + (0 if rank else shape.head * 4),
    }
    last_layer = tokens * (2 * shape.ffn * widths.compute + 8 * shape.hidden)
    if checkpointing:
        last_layer += tokens * saved
    layer_backward = {"activations": float(kept + last_layer)}
    if shape.tied and not rank:
        layer_backward["tied head's gradient"] = float(shape.head * 4)

    ends = [forward, head_backward, layer_backward]
    if widths.cast:
        # With gradient checkpointing a block frees its copies when its forward pass ends.
        for end in ends[:1] if checkpointing else ends:
            end["autocast's copy"] = autocast_copy(shape, widths)
    return kinds | max(ends, key=total)


def autocast_copy(shape: Shape, widths: Widths) -> float:
    """Bytes of autocast's copies of all weights but the head's, which is cast slice by slice."""
    return float((shape.matmul_params - shape.head) * widths.cast)


def gathered_weights(shape: Shape, widths: Widths) -> float:
    """Bytes of the weights that FSDP2 holds gathered.

    It prefetches one layer ahead of the one it runs; embedding and head stay gathered until the pass is over.
    """
    root = shape.head * (1 if shape.tied else 2)
    return float(widths.compute * (2 * shape.layer_params + root))


def logits_bytes(shape: Shape, setup: Setup, widths: Widths, written: int) -> float:
    """Bytes of the LM head's float32 logits for `written` tokens, at once or in slices of the vocabulary.

    With slices, the previous slice is still in memory.
    """
    limit = lm_head.SLICE_LOGITS.get("cuda" if setup.on_gpu else "cpu", 2**27)
    width = min(shape.vocab, max(1024, limit // written))
    weights = width * shape.hidden * widths.cast
    of_logit = 12 if width < shape.vocab else 8
    return float(written * width * of_logit + weights)


def local_processes(setup: Setup) -> int:
    """Processes on one machine: as launched, or at most 8 if `plan` describes GPUs of another machine."""
    launched = os.environ.get("LOCAL_WORLD_SIZE")
    if launched and int(os.environ.get("WORLD_SIZE", 1)) == setup.processes:
        return int(launched)
    return min(setup.processes, 8)


def host_memory(cfg: config.Config, shape: Shape, setup: Setup) -> dict[str, dict[str, float]]:
    """Bytes of CPU memory of one machine with GPUs, by kind: while models are loaded, and during training.

    Every process loads one full float32 model at a time, and moves or shards it before it loads the next.
    """
    weights, processes = shape.params, local_processes(setup)
    offload = cfg.optim.name == "adamw_offload"
    stored = 2 if offload and cfg.model.mixed_precision == "bf16" else 4
    trained = trained_params(cfg, shape)
    share = setup.processes if setup.sharded else 1
    frozen = 2.0 if cfg.model.lora_rank and cfg.model.mixed_precision == "bf16" else 4.0
    opening = {"a whole model in each process": frozen * weights * processes}
    training = {}
    if offload:
        opening["float32 weights"] = 4.0 * weights * processes
        training["float32 weights"] = 4.0 * weights * processes
        training["gradients, moments"] = 12.0 * weights * processes
    elif cfg.optim.cpu_in_rollout:
        training["moments in a rollout"] = 8.0 * weights / share * processes
    if cfg.loss.lld_lag_steps:
        snapshots = cfg.loss.lld_lag_steps + 1
        training["snapshots"] = float(stored) * trained / share * processes * snapshots
    if cfg.monitor.crash_box:
        moments = {"adamw": 8, "adamw_8bit": 2, "adamw_offload": 12}[cfg.optim.name]
        training["crash box"] = 2.0 * weights * (stored + moments)
    if cfg.loss.support == "kept":
        training["kept ids"] = episodes_kept(cfg) * processes
    training["a checkpoint's weights"] = float(4 if setup.sharded else stored) * trained
    return {"opening models": opening, "training": training}


def total(kinds: dict[str, float]) -> float:
    return float(sum(kinds.values()))


def micro_batch(cfg: config.Config) -> tuple[int, int]:
    """Tokens of one forward pass of the update, and how many of them the model wrote.

    Assumes rows of maximal length.
    """
    rollout, optim = cfg.rollout, cfg.optim
    longest = rollout.max_episode_tokens
    if optim.micro_batch_tokens is None:
        tokens = optim.micro_batch_size * longest
    else:
        # A row longer than the budget is a micro-batch of its own.
        tokens = max(optim.micro_batch_tokens, longest)
    prompt = min(cfg.plan.prompt_tokens, rollout.max_prompt_tokens)
    written = min((rollout.max_turns + 1) * rollout.max_new_tokens, longest - prompt)
    return tokens, tokens * written // longest


def pass_bytes(shape: Shape, stream: int, compute: int) -> int:
    """Bytes per token inside the MLP of a pass without gradients.

    Four tensors of the model's width (embeddings, layer input, residual, its norm) and three of the MLP's.
    """
    return 4 * shape.hidden * stream + 3 * shape.ffn * compute


def saved_bytes(shape: Shape, stream: int, compute: int) -> int:
    """Bytes per token that a decoder layer saves for its backward pass.

    Each of the two norms saves its input, the normalised input and its output; the output once per matrix if
    autocast casts it. Attention saves queries, keys, values, its output and a contiguous copy of the output.
    The MLP saves four tensors of its width.
    """
    norms = {(4, 4): 24, (4, 2): 26, (2, 2): 16}[stream, compute]
    return norms * shape.hidden + compute * (3 * shape.query + 2 * shape.kv + 4 * shape.ffn)


@dataclass(frozen=True)
class Times:
    """Seconds of a step by activity, each with its arithmetic in words.

    The times are those of one process; `tokens` and `written` count the tokens of all processes.
    """

    parts: dict[str, tuple[float, str]]
    tokens: int
    written: int


@dataclass(frozen=True)
class Work:
    """What one process computes in a step, with the episode length that section `plan` assumes."""

    episodes: float
    length: int  # tokens per episode
    token_flop: int  # FLOP per token of a forward pass
    scored: float  # passes without gradients over all tokens
    flops: float  # achieved FLOP/s
    bandwidth: float  # achieved bytes/s
    compute: int  # bytes per number in a matrix multiplication

    @property
    def tokens(self) -> float:
        return self.episodes * self.length

    def seconds(self, tokens: float) -> float:
        """Seconds of one forward pass over `tokens`."""
        return tokens * self.token_flop / self.flops


def episode_length(cfg: config.Config) -> int:
    """Tokens per episode that section `plan` assumes."""
    assumed = cfg.plan
    tokens = assumed.prompt_tokens + assumed.written_tokens + assumed.observation_tokens
    return min(tokens, cfg.rollout.max_episode_tokens)


def work_of_step(cfg: config.Config, shape: Shape, setup: Setup) -> Work:
    length = episode_length(cfg)
    scored = 1 - 1 / cfg.optim.updates_per_rollout
    if cfg.loss.kl_weight > 0:
        scored += 1
    if cfg.loss.lld_lag_steps > 0:
        scored += 1
    if cfg.monitor.rescore_every:
        scored += 1 / cfg.monitor.rescore_every
    return Work(
        episodes=cfg.rollout.num_questions * cfg.rollout.group_size / setup.processes,
        length=length,
        # On average a token attends to half an episode.
        token_flop=2 * shape.matmul_params + 2 * shape.layers * shape.query * length,
        scored=scored,
        flops=cfg.plan.tflops * 1e12 * cfg.plan.efficiency,
        bandwidth=cfg.plan.bandwidth_gb_s * GB * cfg.plan.efficiency,
        compute=2 if cfg.model.mixed_precision == "bf16" else 4,
    )


def step_times(cfg: config.Config, shape: Shape, setup: Setup) -> Times:
    """Estimates the time of a step from the figures in section `plan`.

    FLOP per weight and token: 2 for a forward pass, 6 with the backward pass, 8 with gradient checkpointing;
    2 less where the weights are frozen.
    """
    work = work_of_step(cfg, shape, setup)
    passes = (4 if cfg.model.gradient_checkpointing else 3) - (cfg.model.lora_rank > 0)
    parts = rollout_times(cfg, shape, work)
    parts["scoring"] = (
        work.scored * work.seconds(work.tokens),
        f"{work.scored:.1f} passes over {work.tokens:,.0f} tokens",
    )
    parts["update"] = (
        passes * work.seconds(work.tokens),
        f"{work.tokens:,.0f} tokens x {passes * work.token_flop / 1e9:.0f} GFLOP",
    )
    parts["optimizer"] = optimizer_time(cfg, shape, setup, work)
    if setup.processes > 1:
        parts["communication"] = communication_time(cfg, shape, setup, work)
    rows = cfg.rollout.num_questions * cfg.rollout.group_size
    return Times(parts, rows * work.length, rows * cfg.plan.written_tokens)


def rollout_times(cfg: config.Config, shape: Shape, work: Work) -> dict[str, tuple[float, str]]:
    """Times of decoding (bound by memory or compute) and of prefill: prompts once a group, observations."""
    slots = min(cfg.rollout.num_slots, work.episodes)
    steps = work.episodes * cfg.plan.written_tokens / slots
    cache = slots * work.length * 2 * shape.layers * shape.kv * work.compute
    step_bytes = shape.params * work.compute + cache
    read = work.episodes * (cfg.plan.prompt_tokens / cfg.rollout.group_size + cfg.plan.observation_tokens)
    return {
        "decode": (
            steps * max(step_bytes / work.bandwidth, work.seconds(slots)),
            f"{steps:,.0f} steps of {slots:.0f} slots, each reads {step_bytes / GB:.1f} GB",
        ),
        "prefill": (work.seconds(read), f"{read:,.0f} tokens x {work.token_flop / 1e9:.1f} GFLOP"),
    }


def optimizer_time(cfg: config.Config, shape: Shape, setup: Setup, work: Work) -> tuple[float, str]:
    updates, weights = cfg.optim.updates_per_rollout, trained_params(cfg, shape)
    if cfg.optim.name == "adamw_offload":
        moved = 4 + work.compute
        of_weight = moved / (cfg.plan.host_gb_s * GB) + 32 / (cfg.plan.cpu_gb_s * GB)
        why = f"{updates} x ({moved} bytes a weight to and from CPU memory, 32 within it)"
        return updates * weights * of_weight, why
    moved = 16 if cfg.optim.name == "adamw_8bit" else 28
    share = setup.processes if setup.sharded else 1
    return updates * weights / share * moved / work.bandwidth, f"{updates} x {moved} bytes a weight"


def communication_time(cfg: config.Config, shape: Shape, setup: Setup, work: Work) -> tuple[float, str]:
    link = cfg.plan.link_gb_s * GB
    if not setup.sharded:
        updates = cfg.optim.updates_per_rollout
        moved = updates * 8 * trained_params(cfg, shape)
        return moved / link, f"{updates} x 8 bytes a weight"
    if cfg.optim.micro_batch_tokens is None:
        micro_batches = work.episodes / cfg.optim.micro_batch_size
    else:
        micro_batches = work.tokens / cfg.optim.micro_batch_tokens
    gathers = (work.scored + 2) * micro_batches
    moved = shape.params * (gathers * work.compute + micro_batches * 4 + work.compute)
    why = f"{moved / GB:,.0f} GB of weights and gradients between GPUs, as if nothing hid it"
    return moved / link, why


def disk_use(cfg: config.Config, shape: Shape) -> dict[str, tuple[float, str]]:
    """Bytes that a run leaves in `run.dir`, by kind, each with its arithmetic in words."""
    run, length = cfg.run, episode_length(cfg)
    weight, trained = checkpoint_bytes(cfg), trained_params(cfg, shape)
    count = -(-run.steps // run.save_every) + 1
    why = ""
    if run.keep_checkpoints:
        count = run.keep_checkpoints + 2
        why = ": the newest, the best, and one being written"
    logs = -(-run.steps // cfg.monitor.trajectories_every) if cfg.monitor.trajectories_every else 0
    episodes = cfg.monitor.trajectories_questions * cfg.rollout.group_size
    evaluations = 0
    if cfg.eval.every:
        evaluations = (run.steps // cfg.eval.every + cfg.eval.at_start) * len(cfg.eval.during_training)
    return {
        "checkpoints": (
            trained * float(weight) * count,
            f"{trained * weight / GB:.1f} GB each ({weight} bytes a weight), {count} at most{why}",
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


def checkpoint_bytes(cfg: config.Config) -> int:
    """Bytes per weight in a checkpoint: weight, moments, and the snapshots that a lagged anchor needs."""
    bf16 = cfg.model.mixed_precision == "bf16"
    size = {"adamw": 4 + 8, "adamw_8bit": 4 + 2, "adamw_offload": (2 if bf16 else 4) + 12}[cfg.optim.name]
    if cfg.loss.lld_lag_steps > 0:
        size += 4 * (cfg.loss.lld_lag_steps + 1)
    return size


def shrink_to_fit(cfg: config.Config, shape: Shape, setup: Setup) -> config.Config | None:
    """`cfg` with slots and micro-batches halved until it fits; None if even the smallest do not fit."""
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


def alternatives(cfg: config.Config, setup: Setup) -> dict[str, tuple[config.Config, Setup]]:
    """Changes that save memory: {label: (options, setup)}; the first entry changes nothing."""
    found = {"as it is": (cfg, setup)}
    if not cfg.model.gradient_checkpointing:
        model = replace(cfg.model, gradient_checkpointing=True)
        found["model.gradient_checkpointing=true"] = (replace(cfg, model=model), setup)
    if not setup.sharded and setup.on_gpu and not cfg.model.lora_rank:
        # DDP cannot train offloaded weights (see refuse_combination).
        offered = ("adamw_8bit", "adamw_offload") if setup.processes == 1 else ("adamw_8bit",)
        for name in offered:
            if cfg.optim.name != name:
                found[f"optim.name={name}"] = (replace(cfg, optim=replace(cfg.optim, name=name)), setup)
        if cfg.optim == replace(cfg.optim, name="adamw", cpu_in_rollout=False):
            found["model.lora_rank=16"] = (replace(cfg, model=replace(cfg.model, lora_rank=16)), setup)
        for number in sorted({setup.processes, 2, 4, 8} - {1}):
            if number >= setup.processes and "nthr" not in cfg.loss.weights:
                whole = replace(cfg, optim=replace(cfg.optim, name="adamw"))
                spread = replace(setup, processes=number, sharded=True)
                found[f"sharded over {number} GPUs (FSDP)"] = (whole, spread)
    if setup.sharded and setup.processes < 8:
        found["sharded over 8 GPUs"] = (cfg, replace(setup, processes=8))
    if cfg.loss.kl_weight > 0 and not cfg.model.lora_rank:
        found["loss.kl_weight=0"] = (replace(cfg, loss=replace(cfg.loss, kl_weight=0.0)), setup)
    return found


def highest_peak(cfg: config.Config, shape: Shape, setup: Setup) -> float:
    """Bytes of the phase that needs the most memory."""
    return max(map(total, estimate(cfg, shape, setup).values()))


def verdict(cfg: config.Config, shape: Shape, setup: Setup) -> str:
    """Whether it fits as it is, with fewer slots and smaller micro-batches, or not at all; as text."""
    less = shrink_to_fit(cfg, shape, setup)
    if less is None:
        return "does not fit, whatever the slots and micro-batches"
    options = []
    if less.rollout.num_slots != cfg.rollout.num_slots:
        options.append(f"rollout.num_slots={less.rollout.num_slots}")
    if less.optim.micro_batch_tokens != cfg.optim.micro_batch_tokens:
        options.append(f"optim.micro_batch_tokens={less.optim.micro_batch_tokens}")
    if not options:
        return "fits"
    return f"with {' '.join(options)} {highest_peak(less, shape, setup) / GB:.1f} GB"


def remedies(cfg: config.Config, shape: Shape, setup: Setup) -> list[str]:
    """One line per alternative: the memory it needs, and whether it fits."""
    lines = []
    for label, (changed, changed_setup) in alternatives(cfg, setup).items():
        peak = highest_peak(changed, shape, changed_setup)
        lines.append(f"  {label}: {peak / GB:.1f} GB; {verdict(changed, shape, changed_setup)}")
    return lines


def unit_of(peaks: dict[str, dict[str, float]]) -> tuple[float, str]:
    """Unit of the printed table: (bytes, name)."""
    return (GB, "GB") if max(map(total, peaks.values())) > GB else (1e6, "MB")


def format_plan(cfg: config.Config, shape: Shape, setup: Setup) -> str:
    """The plan as text."""
    lines = [*format_run(cfg, shape, setup), "", *format_peaks(cfg, shape, setup)]
    if setup.on_gpu:
        lines += ["", *format_host_memory(cfg, shape, setup), "", *format_times(cfg, shape, setup)]
    lines += ["", "Disk:"]
    for what, (size, why) in disk_use(cfg, shape).items():
        lines.append(f"  {what:14}{size / GB:8.2f} GB  {why}")
    return "\n".join(lines)


def format_run(cfg: config.Config, shape: Shape, setup: Setup) -> list[str]:
    """Lines with the model, the devices and the options that memory depends on."""
    lines = []
    if not setup.on_gpu:
        lines += [
            "No GPU here: this is the plan of a CPU process. For GPUs elsewhere: plan.gpus=8 "
            "plan.gpu_memory_gb=80, and plan.shard=fsdp for sharded weights.",
            "",
        ]
    if setup.sharded:
        how = "weights, gradients and optimizer sharded"
    elif setup.processes > 1:
        how = "each with the whole model"
    else:
        how = "not sharded"
    device = "GPU" if setup.on_gpu else "CPU process"
    plural = "s" if setup.on_gpu else "es"
    devices = f"{setup.processes} {device}{plural if setup.processes > 1 else ''}"
    if setup.memory:
        devices += f" of {setup.memory / GB:.1f} GB"
    tied = " (tied)" if shape.tied else ""
    precision = cfg.model.mixed_precision if setup.on_gpu else "no"
    checkpointing = "on" if cfg.model.gradient_checkpointing else "off"
    adapters = ""
    if cfg.model.lora_rank:
        adapters = f"; {trained_params(cfg, shape) / 1e6:.1f} M in adapters of rank {cfg.model.lora_rank}"
    return [
        *lines,
        f"{cfg.model.path}: {shape.params / 1e9:.2f} B parameters, {shape.layers} layers of "
        f"{shape.hidden}, vocabulary {shape.vocab:,}{tied}{adapters}",
        f"{devices}, {how}; {cfg.optim.name}, {precision} mixed precision, gradient checkpointing "
        f"{checkpointing}",
    ]


def format_peaks(cfg: config.Config, shape: Shape, setup: Setup) -> list[str]:
    """Lines of the memory table: one column per phase, one line per kind, and the sums."""
    peaks = estimate(cfg, shape, setup)
    unit, name = unit_of(peaks)
    tokens, written = micro_batch(cfg)
    device = "GPU" if setup.on_gpu else "CPU process"
    lines = [
        f"Memory of each {device}, {name}, with all episodes as long as allowed "
        f"({cfg.rollout.max_episode_tokens:,} tokens): {cfg.rollout.num_slots} slots, micro-batches of "
        f"{tokens:,} tokens, {written:,} of them written",
        f"{'':22}" + "".join(f"{phase:>16}" for phase in peaks),
    ]
    for kind in dict.fromkeys(kind for kinds in peaks.values() for kind in kinds):
        sizes = [kinds.get(kind, 0) / unit for kinds in peaks.values()]
        if any(sizes):
            lines.append(f"{kind:22}" + "".join(f"{size:16.2f}" if size else f"{'':16}" for size in sizes))
    sums = [total(kinds) / unit for kinds in peaks.values()]
    return [*lines, f"{'sum':22}" + "".join(f"{size:16.2f}" for size in sums)]


def format_host_memory(cfg: config.Config, shape: Shape, setup: Setup) -> list[str]:
    unit, name = unit_of(estimate(cfg, shape, setup))
    number = local_processes(setup)
    processes = "1 process" if number == 1 else f"{number} processes"
    lines = [f"CPU memory of each machine ({processes}), {name}:"]
    for phase, kinds in host_memory(cfg, shape, setup).items():
        terms = ", ".join(f"{kind} {size / unit:.2f}" for kind, size in kinds.items())
        lines.append(f"  {phase:14}{total(kinds) / unit:8.2f}  {terms}")
    return lines


def format_times(cfg: config.Config, shape: Shape, setup: Setup) -> list[str]:
    step, assumed = step_times(cfg, shape, setup), cfg.plan
    seconds = sum(part for part, _ in step.parts.values())
    lines = [
        f"A step, estimated for {assumed.tflops:.0f} TFLOP/s and {assumed.bandwidth_gb_s:.0f} GB/s of which "
        f"{100 * assumed.efficiency:.0f} % are reached, {assumed.link_gb_s:.0f} GB/s between GPUs, "
        f"{assumed.host_gb_s:.0f} GB/s to CPU memory;",
        f"an episode assumed to have {assumed.prompt_tokens} prompt + {assumed.written_tokens} written + "
        f"{assumed.observation_tokens} observation tokens (options plan.…)",
    ]
    for what, (part, why) in step.parts.items():
        lines.append(f"  {what:14}{part:8.0f} s   {why}")
    lines.append(
        f"  {'sum':14}{seconds:8.0f} s   {step.tokens:,} tokens, {step.written:,} written; "
        f"{cfg.run.steps} steps: {cfg.run.steps * seconds / 3600:.0f} h, without searches and evaluations"
    )
    return lines


def refuse_combination(cfg: config.Config, setup: Setup) -> None:
    """Raises ValueError for what cannot work on sharded weights, or not under DDP."""
    if setup.sharded and "nthr" in cfg.loss.weights:
        raise ValueError(
            "loss.weights nthr reads hidden states and the whole head, which a sharded policy does not have "
            "in one piece: drop it, or train without FSDP"
        )
    if setup.sharded and cfg.model.lora_rank > 0:
        raise ValueError(
            f"model.lora_rank = {cfg.model.lora_rank} with sharded weights: a group of FSDP cannot hold "
            "frozen bf16 weights and float32 adapters; launch without FSDP (each GPU holds the whole model, "
            "in bf16), or train all weights (model.lora_rank=0)"
        )
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


def is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def main(cfg: config.Config) -> int:
    """`train.py --plan`: prints the plan on the first process; returns 2 if it does not fit, else 0."""
    shape, setup = read_shape(cfg), read_setup(cfg)
    refuse_combination(cfg, setup)
    lines = [format_plan(cfg, shape, setup), ""]
    code = 0
    sums = {phase: total(kinds) for phase, kinds in estimate(cfg, shape, setup).items()}
    phase = max(sums, key=sums.get)
    peak = sums[phase] / GB
    if setup.memory is None:
        lines.append("How much memory a GPU has is not known here: plan.gpu_memory_gb=80 says it.")
    elif sums[phase] <= setup.memory:
        lines.append(f"Fits: {peak:.1f} of {setup.memory / GB:.1f} GB, most of it in phase {phase!r}.")
    else:
        code = 2
        lines.append(
            f"Does not fit: phase {phase!r} needs {peak:.1f} GB and there are {setup.memory / GB:.1f}. "
            "What would, and what it would take:"
        )
        lines += remedies(cfg, shape, setup)
    if is_first_process():
        print("\n".join(lines))
    return code


def check(cfg: config.Config) -> None:
    """Before a run on a GPU: raises ValueError if weights, gradients, optimizer and copies do not fit.

    Only warns if the peak does not fit, because it is estimated for episodes of maximal length.
    """
    setup = read_setup(replace(cfg, plan=config.Plan()))
    refuse_combination(cfg, setup)
    if not torch.cuda.is_available():
        return
    shape = read_shape(cfg)
    check_host(cfg, shape, setup)
    peak = highest_peak(cfg, shape, setup)
    if peak <= setup.memory:
        return
    remedy = (
        f"GB of a GPU's {setup.memory / GB:.1f} GB; `train.py --plan` prints the terms. What would fit:\n"
        + "\n".join(remedies(cfg, shape, setup))
    )
    fixed = total(trained_weights(cfg, shape, setup, widths_of(cfg, setup)))
    if fixed > setup.memory:
        raise ValueError(f"weights, gradients, optimizer and copies alone take {fixed / GB:.1f} {remedy}")
    if is_first_process():
        print(
            f"train.py: with episodes as long as allowed this run takes {peak / GB:.1f} {remedy}",
            file=sys.stderr,
            flush=True,
        )


def check_host(cfg: config.Config, shape: Shape, setup: Setup) -> None:
    """Raises ValueError if the models do not fit into CPU memory while they are loaded.

    Only warns if training may not fit. Without this check the kernel would kill the largest process without a
    message.
    """
    available = memory.available_bytes()
    for phase, kinds in host_memory(cfg, shape, setup).items():
        if total(kinds) <= available:
            continue
        needed = (
            f"{phase} takes {total(kinds) / GB:.1f} GB of CPU memory on a machine with "
            f"{local_processes(setup)} processes ({', '.join(kinds)}), and {available / GB:.1f} GB are "
            "available"
        )
        if phase == "opening models":
            raise ValueError(f"{needed}: use a machine with more, fewer processes on it, or a smaller model")
        if is_first_process():
            print(f"train.py: {needed}; `train.py --plan` prints the terms", file=sys.stderr, flush=True)
