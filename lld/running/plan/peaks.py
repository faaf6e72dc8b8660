"""Memory of each process at the peak of each phase, from the model's shape and the options.

The terms follow what is allocated at the peaks of lld/engine/engine.py, lld/policy.py and lld/update.py;
tests/bench/plan_memory.py compares them with measured peaks.
"""

from lld import config
from lld.engine import decoder, engine
from lld.model import lm_head
from lld.running.plan.processes import GB, Setup, Widths, widths_of
from lld.running.plan.shape import Shape, matrices, trained_params

# Assumed for a GPU: bytes used by CUDA and NCCL themselves, and the share lost to fragmentation.
CONTEXT, FRAGMENTS = 1.0 * GB, 0.04
# Of a kept id in a micro-batch: ids, places, rows and what sorts them (int64), logits and their gradients
KEPT_BYTES = 80


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


def total(kinds: dict[str, float]) -> float:
    return float(sum(kinds.values()))


def highest_peak(cfg: config.Config, shape: Shape, setup: Setup) -> float:
    """Bytes of the phase that needs the most memory."""
    return max(map(total, estimate(cfg, shape, setup).values()))


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


def resident(cfg: config.Config, shape: Shape, setup: Setup, widths: Widths) -> dict[str, float]:
    """Bytes in memory in every phase: weights, moments, frozen copies, and the gradients in DDP's buckets."""
    buckets = {} if setup.sharded or setup.processes == 1 else {"DDP": 4.0 * trained_params(cfg, shape)}
    moments = {"adamw": 8, "adamw_8bit": 2 + 2 * 4 / 256, "adamw_offload": 0}[cfg.optim.name]
    weights = shape.params * widths.stored / widths.share
    if cfg.model.lora_rank:
        return {"weights": weights} | resident_adapters(cfg, shape, setup, widths) | buckets
    kinds = {"weights": weights, "optimizer": shape.params * moments / widths.share} | buckets
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
    """`resident` plus float32 gradients."""
    kinds = resident(cfg, shape, setup, widths)
    kinds["gradients"] = trained_params(cfg, shape) * 4 / widths.share
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


def episodes_kept(cfg: config.Config) -> float:
    """Bytes of a step's kept ids on each process: 4 an id, in its episodes and in the batch made of them."""
    tokens = cfg.rollout.num_questions * cfg.rollout.group_size * cfg.plan.written_tokens
    return 2.0 * tokens * (4 * cfg.plan.kept_ids + 4) if cfg.loss.support == "kept" else 0.0
