"""Decode against the bandwidth bound, prefill against the matrix-product bound, and a step of the paper's recipe extrapolated, on one GPU.

    python tests/bench/rollout_gpu.py --shape 7b [--slots 128 256] [--paged] [--graphs]

Random bf16 weights of Qwen2.5's shapes in our engine, greedy, no stop strings. Decode bound: weights and the keys and values in use, read once a step at
the bandwidth of a copy measured here. Prefill bound: 2 operations a parameter and token at the rate of a large matrix product measured here. The
recipe: 512 questions x 5 episodes, a prompt of 150 tokens once a question, 900 tokens of observations and 300 sampled ones an episode; an update of 8 operations a
parameter and token (forward, recomputation, backward) at 45 % of the matrix-product rate. --device cpu --shape tiny only shows that the script runs.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from rollout_speed import shaped_tokenizer

from lld import attention, graphs
from lld.engine import Engine

SHAPES = {  # hidden, ffn, layers, heads, key heads, vocabulary
    "tiny": (128, 256, 2, 4, 2, 1000), "0.5b": (896, 4864, 24, 14, 2, 151936), "3b": (2048, 11008, 36, 16, 2, 151936), "7b": (3584, 18944, 28, 28, 4, 152064),
}  # fmt: skip


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--slots", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--context", type=int, default=1024, help="tokens of a row before decoding")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--paged", action="store_true", help="read the cache by torch's varlen kernel")
    parser.add_argument("--graphs", action="store_true", help="replay decode steps as CUDA graphs")
    args = parser.parse_args()
    attention.PAGED, device, dtype = args.paged, args.device, torch.bfloat16
    hidden, ffn, layers, heads, key_heads, vocabulary = SHAPES[args.shape]
    tokenizer = shaped_tokenizer(40)
    config = Qwen2Config(vocab_size=vocabulary, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=key_heads, max_position_embeddings=32768)
    with torch.device(device):
        torch.set_default_dtype(dtype)
        lm = Qwen2ForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    size = 1 << (28 if device == "cuda" else 20)
    source, side = torch.empty(size, dtype=torch.uint8, device=device), 8192 if device == "cuda" else 256
    bandwidth = 2 * size / seconds(lambda: source.clone(), device)
    square = torch.randn(side, side, dtype=dtype, device=device)
    rate = 2 * side**3 / seconds(lambda: square @ square, device)
    num_weights = sum(p.numel() for p in lm.parameters()) - vocabulary * hidden  # the embedding is looked up, not multiplied
    print(f"\n{args.shape}: {num_weights / 1e9:.2f} G weights in matrix products; measured {bandwidth / 1e9:.0f} GB/s and {rate / 1e12:.1f} TFLOP/s\n")
    print("| slots | decode ms/step | tokens/s | bound ms | of bound | prefill tokens/s | MFU | 512 x 5: rollout s | update s |\n|---|---|---|---|---|---|---|---|---|")
    for slots in args.slots:
        engine = Engine(lm, tokenizer, num_slots=slots, temperature=0, top_p=1.0, stop_strings=(), eos_ids=(), cuda_graphs=args.graphs)
        for key in range(slots):
            engine.add(key, [20 + key % 50] * args.context, [0], 256)
        began, fed = time.perf_counter(), 0
        while fed < slots * args.context:
            engine.step()
            fed = engine.num_fed
        prefill = slots * args.context / (time.perf_counter() - began)
        for _ in range(2 * graphs.REPEATS):  # rows of one length meet a shape often enough for its capture
            engine.step()
        step = seconds(engine.step, device, 10)
        bound = (2 * num_weights + 2 * 2 * layers * key_heads * (hidden // heads) * slots * args.context) / bandwidth
        rollout = 2560 * 300 * step / slots + (2560 * 900 + 512 * 150) / prefill
        update = 8 * num_weights * 2560 * 1350 / (0.45 * rate)
        print(f"| {slots} | {step * 1e3:.1f} | {slots / step:.0f} | {bound * 1e3:.1f} | {bound / step:.0%} | {prefill:.0f} | {2 * num_weights * prefill / rate:.0%} | {rollout:.0f} | {update:.0f} |")


if __name__ == "__main__":
    main()
