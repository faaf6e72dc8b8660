"""Seconds and peak memory of the LM head with loss.support "kept" beside "full".

    python tests/bench/kept_speed.py [--tokens 512] [--width 256] [--repeats 3]

One forward and backward pass of `token_scores` over random states: for V = 400 and Qwen2.5's 151,936 ids, and
several numbers of kept ids a token. Kept ids are drawn from a Zipf-like distribution, as text has them, so
that tokens share many. Seconds: processor time of one thread, the least of the repeats. Memory: the largest
sum of tensors that a pass allocates and has not freed, weight gradient included.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
from lld.model.lm_head import token_scores

CASES = {400: (1, 10, 100, 400), 151_936: (1, 10, 100, 1_000)}  # vocabulary: kept ids of a token


def make_kept(vocabulary: int, count: int, targets_N: torch.Tensor):
    """`count` different ids for each token, its target among them."""
    generator = torch.Generator().manual_seed(count)
    weights_V = 1 / torch.arange(1, vocabulary + 1).double()
    ids = []
    for target in targets_N.tolist():
        # Races of exponential variables draw without replacement
        times_V = torch.empty(vocabulary).exponential_(generator=generator) / weights_V
        times_V[target] = 0
        ids.append(times_V.topk(count, largest=False).indices)
    return torch.cat(ids).int(), torch.full((len(ids),), count, dtype=torch.int32)


def one_pass(head, hidden_NC, targets_N, kept) -> None:
    head.weight.grad = hidden_NC.grad = None
    token_scores(hidden_NC, head, targets_N, 1.0, False, None, kept)[0].sum().backward()


def seconds(work, repeats: int) -> float:
    work()
    found = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def peak_bytes(work, head, hidden_NC) -> int:
    head.weight.grad = hidden_NC.grad = None  # what is freed inside was not seen when it was made
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiled:
        work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| vocabulary | kept ids a token | kept by any | s | against full | peak MB | against full |")
    print("|---" * 7 + "|")
    for vocabulary, counts in CASES.items():
        head = torch.nn.Linear(args.width, vocabulary, bias=False)
        hidden_NC = torch.randn(args.tokens, args.width, requires_grad=True)
        targets_N = torch.randint(0, vocabulary, (args.tokens,))
        full = None
        for count in (None, *counts):
            kept = None if count is None else make_kept(vocabulary, count, targets_N)

            def work(kept=kept, head=head, hidden_NC=hidden_NC, targets_N=targets_N):
                one_pass(head, hidden_NC, targets_N, kept)

            row = seconds(work, args.repeats), peak_bytes(work, head, hidden_NC)
            full = full or row
            name = "full | " if kept is None else f"{count:,} | {len(kept[0].unique()):,}"
            print(
                f"| {vocabulary:,} | {name} | {row[0]:.3f} | {row[0] / full[0]:.2f} | {row[1] / 1e6:.1f} | "
                f"{row[1] / full[1]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
