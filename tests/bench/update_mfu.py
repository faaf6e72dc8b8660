"""Model flop utilisation of the update on a GPU, at the shapes of Qwen2.5-3B and 7B with random weights. One
command:

    python tests/bench/update_mfu.py [--shapes 3b,7b] [--tokens 8192,16384,32768] [--no-checkpointing]
    [--optimizer] [--compile]

Packed rows of a run's lengths (a prompt of 176 tokens, episodes of 500 to 2,500, a third of it scored) go
through `Policy` under bf16 autocast with float32 weights, then through the backward pass, as in a micro-batch
of update.py. MFU counts what the mathematics needs: 6 flop a weight and token below the head, 6 a weight of
the head and scored token, and causal attention; what is computed again (gradient checkpointing, the head's
logits) is time, not work. It stands beside the GPU's nominal dense bf16 rate and beside the rate of a large
bf16 matrix product measured in the same run. `--optimizer` adds clipping and AdamW to the step (3B: 16 bytes
a weight; a 7B model's moments do not fit beside its weights and gradients on 80 GB). `--compile` has
torch.compile make each decoder layer, which train.py does not. The last column is the paper's step, 512 x 5
episodes of 1,500 tokens: forward and backward of all, forward alone (a third of it) for the reference and for
pi_old of nine updates in ten.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from transformers import Qwen2Config, Qwen2ForCausalLM

from lld.policy import Policy

SHAPES = {  # width, intermediate, layers, heads, key/value heads, vocabulary, tied
    "3b": (2048, 11_008, 36, 16, 2, 151_936, True),
    "7b": (3584, 18_944, 28, 28, 4, 152_064, False),
    "tiny": (128, 256, 2, 4, 2, 1_000, True),
}
# Dense bf16 flop a second
NOMINAL = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}


def make_lm(shape: str, device: str):
    width, intermediate, layers, heads, kv_heads, vocabulary, tied = SHAPES[shape]
    options = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        max_position_embeddings=8192,
    )
    with torch.device(device):
        return Qwen2ForCausalLM(options).train()


def make_rows(tokens: int, vocabulary: int, device: str):
    """Rows whose lengths add up to `tokens`, padded, and which of their tokens are scored."""
    generator, lengths = torch.Generator().manual_seed(0), []
    while (left := tokens - sum(lengths)) > 0:
        length = min(left, int(torch.randint(500, 2500, (1,), generator=generator)))
        lengths.append(length if left - length > 256 else left)  # no row is a stump
    T, position_T = max(lengths), torch.arange(max(lengths))
    inside_BT = position_T < torch.tensor(lengths)[:, None]
    scored_BT = (
        inside_BT & (position_T >= 176) & ((torch.tensor(lengths)[:, None] - 1 - position_T) % 450 < 150)
    )
    return (
        torch.randint(0, vocabulary, (len(lengths), T), generator=generator).to(device),
        scored_BT.to(device),
        lengths,
    )


def seconds(call, device: str, repeats: int = 3) -> float:
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(repeats + 1):
        sync()
        start = time.perf_counter()
        call()
        sync()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="3b,7b")
    parser.add_argument("--tokens", default="8192,16384,32768")
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--optimizer", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--device", default="cuda", help="cpu only to see that the script works, with --shapes tiny"
    )
    args = parser.parse_args()
    device = args.device
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("update_mfu.py: no GPU here; --device cpu --shapes tiny --tokens 2048 only tries the script")
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    nominal = next((rate for key, rate in NOMINAL.items() if key in name), None)
    size = 512 if device == "cpu" or args.shapes == "tiny" else 8192
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    rate = 2 * size**3 / seconds(lambda: a @ a, device)
    print(
        f"{name}, torch {torch.__version__}: a {size} x {size} bf16 matrix product runs at "
        f"{rate / 1e12:.1f} TFLOP/s\n"
    )
    print(
        "| shape | tokens | rows | scored | s | tokens/s | MFU, nominal | MFU, measured matmul | peak GB | "
        "s of the paper's update |\n" + "|---" * 10 + "|"
    )
    for shape in args.shapes.split(","):
        lm = make_lm(shape, device)
        if not args.no_checkpointing:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        if args.compile:
            for layer in lm.model.layers:
                layer.compile()
        policy, body = Policy(lm), sum(p.numel() for p in lm.model.layers.parameters())
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
        for tokens in map(int, args.tokens.split(",")):
            ids_BT, scored_BT, lengths = make_rows(tokens, lm.config.vocab_size, device)

            def step():
                with torch.autocast(device, torch.bfloat16):
                    logprobs_BT, _ = policy(ids_BT, scored_BT)
                logprobs_BT.sum().backward()
                if args.optimizer:
                    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()

            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            try:
                took = seconds(step, device)
            except torch.OutOfMemoryError:
                print(f"| {shape} | {tokens:,} | out of memory |", flush=True)
                break
            width, layers, scored = lm.config.hidden_size, lm.config.num_hidden_layers, int(scored_BT.sum())
            flop = (
                6 * body * tokens
                + 6 * lm.config.vocab_size * width * scored
                + 6 * layers * width * sum(length**2 for length in lengths)
            )
            peak = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if device == "cuda" else ""
            paper = took / tokens * 2560 * 1500 * (1 + (1 + 0.9) / 3)
            share = f"{flop / took / nominal:.1%}" if nominal else ""
            print(
                f"| {shape} | {tokens:,} | {len(lengths)} | {scored:,} | {took:.3f} | {tokens / took:,.0f} "
                f"| {share} | {flop / took / rate:.1%} | {peak} | {paper:,.0f} |",
                flush=True,
            )
        lm = policy = optimizer = None  # before the next shape is made
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
