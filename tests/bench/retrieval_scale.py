"""Approximate indexes against exact search: recall@10, memory, cost of building and searching, at 60k real
vectors and at any number of jittered ones.

    python tests/bench/retrieval_scale.py --index FOLDER --encoder FOLDER --questions 200 --num 0 1000000
    4000000 --work /somewhere/with/10GB

Vectors beyond the real ones are real ones, jittered: each real passage is copied with Gaussian noise of the
real vectors' own covariance, a third of a vector long (cosine to the original about 0.95), and scaled to
length 1. Queries are real questions. Memory is the size of the index file (tests show that vector_bytes
predicts it); "of flat" compares with float32 vectors. With rerank the float16 vectors stay on the disk (in
the page cache here) and 200 candidates a query are read and scored exactly. Costs are processor time, all
questions searched for in one batch: seconds on one core, whatever else runs.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path

import faiss
import numpy as np
import torch

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from lld.retrieval.encoder import Encoder
from lld.retrieval.exact import nearest, quantize
from lld.retrieval.index import Vectors
from lld.retrieval.shards import write_shard

SHARD = 1 << 16


def jittered(real: Vectors, num: int, folder: Path) -> Vectors:
    """`num` vectors in shards under `folder`: the real ones first, then jittered copies, in the order of the
    passages."""
    if (folder / "vectors").is_dir() and len(Vectors(folder)) == num:
        return Vectors(folder)
    (folder / "vectors").mkdir(parents=True, exist_ok=True)
    draw, base_ND = np.random.default_rng(0), real.take(np.arange(len(real)))
    spread_DD = np.linalg.cholesky(np.cov(base_ND.T) + 1e-9 * np.eye(real.dim)).astype(np.float32)
    for number, start in enumerate(range(0, num, SHARD)):
        path, rows = folder / "vectors" / f"{number:05d}.npy", np.arange(start, min(start + SHARD, num))
        vectors_ND = base_ND[rows % len(real)]
        noise_ND = draw.standard_normal(vectors_ND.shape, dtype=np.float32) @ spread_DD.T
        vectors_ND += (
            np.where(rows[:, None] < len(real), 0, 0.33)
            * noise_ND
            / np.linalg.norm(noise_ND, axis=1, keepdims=True)
        )
        write_shard(path, (vectors_ND / np.linalg.norm(vectors_ND, axis=1, keepdims=True)).astype(np.float16))
    return Vectors(folder)


def build(vectors: Vectors, factory: str, path: Path, train_rows: int):
    began = time.process_time()
    index = faiss.index_factory(vectors.dim, factory, faiss.METRIC_INNER_PRODUCT)
    if not index.is_trained:
        index.train(vectors.take(np.sort(np.random.default_rng(0).permutation(len(vectors))[:train_rows])))
    for shard in vectors.shards:
        index.add(shard.astype(np.float32))
    faiss.write_index(index, str(path))
    return index, time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index", required=True, help="index folder of real vectors")
    parser.add_argument("--encoder", required=True)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument(
        "--num", type=int, nargs="+", default=[0], help="numbers of vectors; 0: the real ones"
    )
    parser.add_argument("--work", required=True, help="folder for vectors and indexes")
    parser.add_argument("--train-rows", type=int, default=65536)
    parser.add_argument(
        "--factories", nargs="+", default=["IVF{lists},SQ8", "IVF{lists},PQ96x8np", "IVF{lists},RaBitQ3"]
    )
    parser.add_argument("--skip-int8", action="store_true")
    parser.add_argument("--probes", type=int, nargs="+", default=[16, 64])
    args = parser.parse_args()
    real = Vectors(Path(args.index))
    texts = [
        json.loads(line)["question"]
        for path in sorted((ROOT.parent / "shared" / "data" / "qa").glob("*.jsonl"))
        if path.stem != "train"
        for line in path.open()
    ]
    queries_QD = Encoder(args.encoder, device="cpu").encode(
        texts[:: len(texts) // args.questions][: args.questions], "query"
    )
    print(
        "| vectors | index | build, CPU s | MB | of flat | search | recall@10 | CPU ms a query "
        "|\n|---|---|---|---|---|---|---|---|"
    )
    for num in args.num:
        folder = Path(args.work) / str(num or len(real))
        vectors = real if not num or num <= len(real) else jittered(real, num, folder)
        folder.mkdir(parents=True, exist_ok=True)
        flat_mb = 4 * len(vectors) * vectors.dim / 1e6
        parts = [
            (start, torch.from_numpy(shard), None)
            for start, shard in zip(vectors.starts[:-1].tolist(), vectors.shards, strict=True)
        ]
        began = time.process_time()
        exact_QK = nearest(parts, queries_QD, 10)[1].numpy()
        print(
            f"| {len(vectors):,} | torch float16, mapped | 0 | {flat_mb / 2:.0f} | 1/2 | exact | 1.000 | "
            f"{1000 * (time.process_time() - began) / len(queries_QD):.1f} |",
            flush=True,
        )

        def recall(rows_QK):
            return np.mean(
                [len(set(a) & set(b)) / 10 for a, b in zip(exact_QK.tolist(), rows_QK.tolist(), strict=True)]
            )

        began = time.process_time()
        small = [] if args.skip_int8 else [(start, *quantize(shard)) for start, shard, _ in parts]
        built_s, began = time.process_time() - began, time.process_time()
        rows_QK = nearest(small, queries_QD, 10)[1].numpy() if small else None
        small and print(
            f"| | torch int8 | {built_s:.0f} | {flat_mb / 4 + 4 * len(vectors) / 1e6:.0f} | 1/4.0 | exact "
            f"| {recall(rows_QK):.3f} | {1000 * (time.process_time() - began) / len(queries_QD):.1f} |",
            flush=True,
        )
        del small
        lists = 1 << round(np.log2(len(vectors) ** 0.5))  # fewer than faiss_factory's 4 sqrt(N): two cores
        for template in args.factories:
            factory, path = template.format(lists=lists), folder / "index.faiss"
            index, built_s = build(vectors, factory, path, args.train_rows)
            size_mb = path.stat().st_size / 1e6
            head = f"| | {factory} | {built_s:.0f} | {size_mb:.0f} | 1/{flat_mb / size_mb:.1f} |"
            for probes in args.probes:
                name = f"efSearch={2 * probes}" if factory.startswith("HNSW") else f"nprobe={probes}"
                faiss.ParameterSpace().set_index_parameters(index, name)
                for rerank in (0,) if re.fullmatch(r"HNSW\d+", factory) else (0, 200):
                    began = time.process_time()
                    _, rows_QK = index.search(queries_QD.numpy(), max(10, rerank))
                    if rerank:
                        scores_QK = np.einsum(
                            "qd,qkd->qk", queries_QD.numpy(), vectors.take(np.maximum(rows_QK, 0))
                        )
                        rows_QK = np.take_along_axis(rows_QK, np.argsort(-scores_QK, axis=1)[:, :10], 1)
                    print(
                        f"{head} {name}{', rerank 200' if rerank else ''} | {recall(rows_QK):.3f} | "
                        f"{1000 * (time.process_time() - began) / len(queries_QD):.1f} |",
                        flush=True,
                    )
                    head = "| | | | | |"
            path.unlink()


if __name__ == "__main__":
    main()
