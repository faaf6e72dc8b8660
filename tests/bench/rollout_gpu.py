"""Decode against the bandwidth bound, prefill against the matrix-product bound, and a step of the paper's
recipe extrapolated, on one GPU.

    python tests/bench/rollout_gpu.py --shape 7b [--slots 64 128 256] [--modes eager graphs flash-attn]

Random bf16 weights of Qwen2.5's shapes in our engine, greedy, no stop strings. Decode bound: weights and the
keys and values in use, read once a step at the bandwidth of a copy measured here. Prefill bound: 2 operations
a parameter and token at the rate of a large matrix product measured here. The recipe: 512 questions x 5
episodes, a prompt of 150 tokens once a question, 900 tokens of observations and 300 sampled ones an episode;
an update of 8 operations a parameter and token (forward, recomputation, backward) at 45 % of the
matrix-product rate. Modes: steps one by one or replayed as CUDA graphs, with SDPA or with flash-attn.
--device cpu --shape tiny only shows that the script runs.
"""

import argparse
import functools
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path[:0] = [str(Path(__file__).parent.parent.parent), str(Path(__file__).parent)]
from rollout_speed import shaped_tokenizer

from lld.engine import graphs, spans
from lld.engine.engine import PASS_TOKENS, Engine
from lld.model.joined import join_weights

SHAPES = {  # hidden, ffn, layers, heads, key heads, vocabulary
    "tiny": (128, 256, 2, 4, 2, 1000),
    "0.5b": (896, 4864, 24, 14, 2, 151936),
    "3b": (2048, 11008, 36, 16, 2, 151936),
    "7b": (3584, 18944, 28, 28, 4, 152064),
}
MODES = ("eager", "graphs", "flash-attn", "flash-attn graphs")
BYTES, SIDE = (
    1 << 28,
    8192,
)  # copied, and of matrices multiplied, to measure a GPU; a pretended one takes less


def seconds(call, device: str, repeats: int = 5) -> float:
    """The best of a few calls; waits for the GPU."""
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return min(took)


@functools.cache
def bandwidth(device: str) -> float:
    """Bytes a second of a copy within the device's memory, read and written."""
    size = BYTES if device == "cuda" else 1 << 20
    source = torch.empty(size, dtype=torch.uint8, device=device)
    return 2 * size / seconds(lambda: source.clone(), device)


@functools.cache
def rate(device: str) -> float:
    """Operations a second of a large matrix product in bf16."""
    side = SIDE if device == "cuda" else 256
    square = torch.randn(side, side, dtype=torch.bfloat16, device=device)
    return 2 * side**3 / seconds(lambda: square @ square, device)


@functools.lru_cache(1)
def make_lm(shape: str, device: str):
    """Random bf16 weights of a shape, laid out as those that the engine gets in training."""
    hidden, ffn, layers, heads, key_heads, vocabulary = SHAPES[shape]
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
    }
    heads = {"num_attention_heads": heads, "num_key_value_heads": key_heads, "max_position_embeddings": 32768}
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            lm = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(buffer.dtype == torch.float32 for buffer in lm.buffers()), (
        "rotary frequencies do not bear bf16"
    )
    if device == "cuda":
        join_weights(lm)
    return lm


def measure_decode(
    shape: str, slots: int, mode: str = "eager", *, context: int = 1024, device: str = "cuda", steps: int = 10
) -> dict:
    """Time of a decode step with `slots` rows of `context` tokens beside its bound, and of their prefill.

    `mode` is one of MODES. Raises ValueError where flash-attn is asked for and not installed.
    """
    kernel = spans.flash_attn_with_kvcache
    if mode.startswith("flash-attn") and kernel is None:
        raise ValueError(f"mode = {mode!r}: flash-attn is not installed (requirements-gpu.txt)")
    hidden, _, layers, heads, key_heads, vocabulary = SHAPES[shape]
    lm = make_lm(shape, device)
    # Rows that are read first sample while the others are read: none may end before the clock stops
    turns = 2 * graphs.REPEATS + steps + 8 + -(-slots * context // PASS_TOKENS)
    num_weights = sum(p.numel() for p in lm.parameters()) - vocabulary * hidden  # the embedding is looked up
    kept = 2 * 2 * layers * key_heads * (hidden // heads)  # bytes of a token's keys and values
    options = {"num_slots": slots, "temperature": 0, "top_p": 1.0, "stop_strings": (), "eos_ids": ()}
    spans.flash_attn_with_kvcache = kernel if mode.startswith("flash-attn") else None
    try:
        graphed = mode.endswith("graphs")
        tokenizer = shaped_tokenizer(40)
        engine = Engine(lm, tokenizer, **options, cuda_graphs=graphed, max_tokens=context + turns)
        for key in range(slots):
            engine.add(key, [20 + key % 50] * context, [0], turns)
        began = time.perf_counter()
        while engine.num_fed < slots * context:
            engine.step()
        prefill = slots * context / (time.perf_counter() - began)
        for _ in range(2 * graphs.REPEATS):  # rows of one length meet a shape often enough for its capture
            engine.step()
        step = seconds(engine.step, device, steps)
        assert engine.num_active == slots, "rows ended while they were timed"
    finally:
        spans.flash_attn_with_kvcache = kernel
    bound = (2 * num_weights + kept * slots * context) / bandwidth(device)
    return {
        "shape": shape,
        "slots": slots,
        "mode": mode,
        "context": context,
        "weights": num_weights,
        "decode_ms": 1e3 * step,
        "decode_tokens_per_s": slots / step,
        "bound_ms": 1e3 * bound,
        "of_bound": bound / step,
        "prefill_tokens_per_s": prefill,
        "prefill_mfu": 2 * num_weights * prefill / rate(device),
    }


def recipe(found: dict, device: str) -> tuple[float, float]:
    """Seconds of a rollout and of an update of 512 questions x 5 episodes."""
    rollout = (
        2560 * 300 / found["decode_tokens_per_s"] + (2560 * 900 + 512 * 150) / found["prefill_tokens_per_s"]
    )
    return rollout, 8 * found["weights"] * 2560 * 1350 / (0.45 * rate(device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--modes", choices=MODES, nargs="+", default=["eager", "graphs"])
    parser.add_argument("--context", type=int, default=1024, help="tokens of a row before decoding")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device = args.device
    if args.shape == "tiny":
        globals().update(BYTES=1 << 20, SIDE=256)
    print(
        f"\n{args.shape}: {bandwidth(device) / 1e9:.0f} GB/s and {rate(device) / 1e12:.1f} TFLOP/s measured\n"
    )
    columns = "slots | mode | decode ms/step | tokens/s | bound ms | of bound | prefill tokens/s | MFU"
    print(f"| {columns} | 512 x 5: rollout s | update s |")
    print("|---" * 10 + "|")
    for slots in args.slots:
        for mode in args.modes:
            found = measure_decode(args.shape, slots, mode, context=args.context, device=device)
            rollout, update = recipe(found, device)
            print(
                f"| {slots} | {mode} | {found['decode_ms']:.1f} | {found['decode_tokens_per_s']:.0f} | "
                f"{found['bound_ms']:.1f} "
                f"| {found['of_bound']:.0%} | {found['prefill_tokens_per_s']:.0f} | "
                f"{found['prefill_mfu']:.0%} "
                f"| {rollout:.0f} | {update:.0f} |"
            )


if __name__ == "__main__":
    main()
