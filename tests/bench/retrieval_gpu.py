"""Exact search of the torch backend on a GPU against what reading the vectors once must take.

    python tests/bench/retrieval_gpu.py                       # 21 million x 768 in float16: 32.3 GB of GPU
      memory
    python tests/bench/retrieval_gpu.py --dtype int8          # half of that
    python tests/bench/retrieval_gpu.py --num 60000           # without a GPU: the same code on the CPU, as a
      check

Vectors are random (their values do not matter to the time), made where they are searched. "bound ms" is their
size over the memory's bandwidth, measured by copying 1 GB within it (read and written: twice its bytes); from
some number of queries on the matrix product takes longer than reading ("product ms", at the rate of a large
square one). "same" is the share of the top 10 that a float64 product of the first CHECKED vectors also has.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from lld.retrieval.exact import nearest, quantize

ROWS = 1 << 17  # made at once
CHECKED = 100_000


def seconds(work, times: int = 5) -> float:
    """Median wall time of `work`, after one run to warm up."""
    taken = []
    for _ in range(times + 1):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return sorted(taken[1:])[times // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=21_000_000)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--dtype", choices=("float16", "int8"), default="float16")
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 8, 64, 256])
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    def unit(num):
        return torch.nn.functional.normalize(torch.randn(num, args.dim, device=device), dim=1)

    matrix_ND = torch.empty(args.num, args.dim, dtype=getattr(torch, args.dtype), device=device)
    scales_N1 = torch.empty(args.num, 1, device=device) if args.dtype == "int8" else None
    for start in range(0, args.num, ROWS):
        end = min(start + ROWS, args.num)
        if scales_N1 is None:
            matrix_ND[start:end] = unit(end - start).half()
        else:
            matrix_ND[start:end], scales_N1[start:end] = quantize(unit(end - start))
    one_gb = torch.empty(1 << (30 if args.num > CHECKED else 20), dtype=torch.uint8, device=device)
    other = torch.empty_like(one_gb)
    bandwidth = 2 * one_gb.numel() / seconds(lambda: other.copy_(one_gb))
    side = 4096 if device.type == "cuda" and args.num > CHECKED else 512
    square = torch.randn(side, side, device=device).to(
        torch.float16 if device.type == "cuda" else torch.float32
    )
    rate = 2 * square.shape[0] ** 2 * square.shape[1] / seconds(lambda: square @ square.T)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(
        "| device | vectors | queries | ms | bound ms | product ms | of the bound | queries/s | same "
        "|\n|---|---|---|---|---|---|---|---|---|"
    )
    for num in args.queries:
        queries_QD = unit(num).cpu()
        taken = seconds(lambda: nearest([(0, matrix_ND, scales_N1)], queries_QD, 10))
        read, product = (
            matrix_ND.numel() * matrix_ND.element_size() / bandwidth,
            2 * num * matrix_ND.numel() / rate,
        )
        some_ND = matrix_ND[:CHECKED].double() * (1 if scales_N1 is None else scales_N1[:CHECKED])
        expected_QK = (queries_QD.to(device).double() @ some_ND.T).topk(10).indices.tolist()
        found_QK = nearest(
            [(0, matrix_ND[:CHECKED], None if scales_N1 is None else scales_N1[:CHECKED])], queries_QD, 10
        )[1].tolist()
        same = sum(len(set(a) & set(b)) for a, b in zip(expected_QK, found_QK, strict=True)) / (10 * num)
        print(
            f"| {name} | {args.num:,} x {args.dim} {args.dtype} | {num} | {1e3 * taken:.2f} | "
            f"{1e3 * read:.2f} | {1e3 * product:.2f} | {max(read, product) / taken:.2f} | "
            f"{num / taken:.0f} | {same:.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
