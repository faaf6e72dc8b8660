"""Passages for queries: the search backends, opening them, and `python -m lld.retrieval build`.

A backend is a class with `search(queries, topk) -> list[list[Passage]]`, best passage first:

- faiss: a FAISS file, on the CPU, mapped from the disk. Search-R1's own `e5_Flat.index` and `wiki-18.jsonl`
  work as
  they are.
- torch: exact search, chunk by chunk, over the float16 shards of an index folder, or over int8 made of them;
  on all GPUs there
  are, or on the CPU, where float16 shards stay mapped from the disk.
- bm25: words (k1 0.9, b 0.4), no neural encoder. Without an index folder it is built in memory when opened. A
  word is a run
  of letters and digits in lower case: no stemming and no stop words, which would confuse or lose made-up
  names. Equal scores come in corpus order, and passages that share no word with the query fill up the list
  with score 0.
- random, empty, oracle: controls of an experiment (controls.py).
"""

import argparse
import dataclasses
import os
import shutil
import sys
import time
from pathlib import Path

import bm25s
import faiss
import numpy as np
import torch

from lld.config import Config, Retriever
from lld.protocol import Passage
from lld.retrieval import memory
from lld.retrieval.controls import EmptySearch, OracleSearch, RandomSearch
from lld.retrieval.corpus import Corpus
from lld.retrieval.encoder import Encoder
from lld.retrieval.index import (
    BUILD,
    SHARD_ROWS,
    WORD,
    Vectors,
    build_bm25,
    build_index,
    built_for,
    check_files,
    check_vectors,
    fingerprint,
    match_manifest,
    open_bm25,
    read_manifest,
)
from lld.rules import check_retriever

CHUNK_ROWS = 1 << 14  # vectors scored at once on the CPU: with QUERY_ROWS queries 16 MB of scores
GPU_CHUNK_ROWS = 1 << 18  # and on a GPU
QUERY_ROWS = 256
BM25_BYTES = 12  # bytes of BM25 index a byte of packed or plain corpus, while it is built in memory


def _num_hits(corpus: Corpus, topk: int) -> int:
    if topk < 1:
        raise ValueError(f"topk = {topk}: must be 1 or more")
    return min(topk, len(corpus))


def _hits(corpus: Corpus, rows, scores) -> list[Passage]:
    # -1: FAISS found fewer
    return [corpus.passage(int(row), float(score)) for row, score in zip(rows, scores) if row >= 0]


class FaissSearch:
    """Search in a FAISS index file; an L2 index gets negated distances as scores, so that higher is always
    better.

    params: FAISS's search parameters, such as "nprobe=64" or "efSearch=128"; "" keeps those of the file. With
    `rerank` the best so many are scored again with the float16 vectors on the disk, `rerank` random reads a
    query: a small compressed index in memory then gives nearly exact results.
    """

    backend = "faiss"

    def __init__(
        self,
        path: Path,
        corpus: Corpus,
        encoder: Encoder,
        params: str = "",
        rerank: int = 0,
        vectors: Vectors | None = None,
    ):
        self.corpus, self.encoder, self.rerank, self.vectors = corpus, encoder, rerank, vectors
        try:
            self.index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise ValueError(
                f"{path} is not a FAISS index ({str(error).splitlines()[0]}): give an index file or a "
                f"folder made by `{BUILD}`"
            ) from None
        self.higher_is_better = self.index.metric_type == faiss.METRIC_INNER_PRODUCT
        first_D = None
        if self.higher_is_better:
            try:
                first_D = vectors.take(np.array([0]))[0] if vectors else self.index.reconstruct(0)
            except RuntimeError:  # some compressed indexes cannot give a vector back
                pass
        check_vectors(str(path), self.index.ntotal, self.index.d, first_D, corpus, encoder)
        # A flat index's own rows: PyTorch's product over them takes a fifth of FAISS's time for a batch, half
        # for one.
        self.flat = None
        if isinstance(self.index, faiss.IndexFlatIP):
            rows_ND = faiss.rev_swig_ptr(self.index.get_xb(), self.index.ntotal * self.index.d).reshape(
                -1, self.index.d
            )
            self.flat = [(0, torch.from_numpy(rows_ND), None)]
        try:
            faiss.ParameterSpace().set_index_parameters(self.index, params) if params else None
        except RuntimeError as error:
            raise ValueError(
                f"retriever.faiss_params = {params!r}: {path} does not take it "
                f"({str(error).splitlines()[-1].strip()})"
            ) from None

    def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        num_hits = _num_hits(self.corpus, topk)
        if not queries:
            return []
        queries_QD = self.encoder.encode(queries, "query").numpy()
        scores_QK, rows_QK = self._nearest(queries_QD, min(len(self.corpus), max(num_hits, self.rerank)))
        if self.rerank:
            scores_QK = np.einsum("qd,qkd->qk", queries_QD, self.vectors.take(np.maximum(rows_QK, 0)))
            scores_QK[rows_QK < 0] = -np.inf
            order_QK = np.argsort(-scores_QK, axis=1, kind="stable")[:, :num_hits]
            scores_QK, rows_QK = (
                np.take_along_axis(scores_QK, order_QK, 1),
                np.take_along_axis(rows_QK, order_QK, 1),
            )
        elif not self.higher_is_better:
            scores_QK = -scores_QK
        return [_hits(self.corpus, rows_K, scores_K) for rows_K, scores_K in zip(rows_QK, scores_QK)]

    def _nearest(self, queries_QD: np.ndarray, num_hits: int) -> tuple[np.ndarray, np.ndarray]:
        if self.flat is None:
            return self.index.search(queries_QD, num_hits)
        blocks = [
            nearest(self.flat, torch.from_numpy(queries_QD[start : start + QUERY_ROWS]), num_hits)
            for start in range(0, len(queries_QD), QUERY_ROWS)
        ]
        return tuple(torch.cat(some).numpy() for some in zip(*blocks))


@torch.inference_mode()
def nearest(parts: list[tuple], queries_QD: torch.Tensor, num_hits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and rows (Q, K) of the best inner products, best first, over parts (first row, matrix, int8's
    scales or None).

    GPUs work at once: nothing waits for them before the last lines.
    """
    best = []
    for first, matrix_ND, scales_N1 in parts:
        on_gpu = matrix_ND.device.type == "cuda"
        chunk_rows = GPU_CHUNK_ROWS if on_gpu else CHUNK_ROWS
        asked_QD = queries_QD.to(matrix_ND.device, torch.float16 if on_gpu else torch.float32)
        scores_QK = rows_QK = None
        for start in range(0, len(matrix_ND), chunk_rows):
            chunk_ND = matrix_ND[start : start + chunk_rows].to(asked_QD.dtype)
            # Sums in float32: scores rounded to half would tie. On a GPU this reads each float16 vector once
            # and writes no copy.
            scores_QN = (
                torch.mm(asked_QD, chunk_ND.T, out_dtype=torch.float32) if on_gpu else asked_QD @ chunk_ND.T
            )
            if scales_N1 is not None:
                scores_QN *= scales_N1[start : start + chunk_rows].T
            some_QK, at_QK = scores_QN.topk(min(num_hits, scores_QN.shape[1]))
            at_QK = at_QK + (first + start)
            scores_QK = some_QK if scores_QK is None else torch.cat([scores_QK, some_QK], 1)
            rows_QK = at_QK if rows_QK is None else torch.cat([rows_QK, at_QK], 1)
            scores_QK, kept_QK = scores_QK.topk(min(num_hits, scores_QK.shape[1]))
            rows_QK = rows_QK.gather(1, kept_QK)
        best.append((scores_QK, rows_QK))
    scores_QK = torch.cat([scores.cpu() for scores, _ in best], 1)
    rows_QK = torch.cat([rows.cpu() for _, rows in best], 1)
    scores_QK, kept_QK = scores_QK.topk(min(num_hits, scores_QK.shape[1]))
    return scores_QK, rows_QK.gather(1, kept_QK)


def quantize(vectors_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes (N, D) and scales (N, 1), float32, with codes * scales near the vectors: a scale a vector,
    its largest entry at 127."""
    scales_N1 = vectors_ND.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return (vectors_ND.float() / scales_N1).round().to(torch.int8), scales_N1


class TorchSearch:
    """Exact inner-product search over float16 vectors, or over int8 made of them (a quarter of float32,
    nearly exact).

    `parts` are (first row, matrix, scales or None): on the CPU one a shard, mapped from the disk if float16;
    on GPUs one each.
    """

    backend = "torch"

    def __init__(
        self, where: str, vectors: Vectors, corpus: Corpus, encoder: Encoder, dtype: str = "float16"
    ):
        self.corpus, self.encoder = corpus, encoder
        check_vectors(where, len(vectors), vectors.dim, vectors.take(np.array([0]))[0], corpus, encoder)
        if encoder.device.type == "cuda":
            self.parts = self._over_gpus(vectors, dtype)
        else:
            shards = zip(vectors.starts.tolist(), map(torch.from_numpy, vectors.shards))
            self.parts = [
                (start, *quantize(shard)) if dtype == "int8" else (start, shard, None)
                for start, shard in shards
            ]

    @staticmethod
    def _over_gpus(vectors: Vectors, dtype: str) -> list[tuple[int, torch.Tensor, torch.Tensor | None]]:
        """Equal runs of rows on every GPU, copied shard by shard: nothing but one shard is held twice."""
        count, parts = torch.cuda.device_count(), []
        bounds = [len(vectors) * number // count for number in range(count + 1)]
        for number, (first, end) in enumerate(zip(bounds, bounds[1:])):
            device = f"cuda:{number}"
            matrix_ND = torch.empty(
                end - first,
                vectors.dim,
                dtype=torch.int8 if dtype == "int8" else torch.float16,
                device=device,
            )
            scales_N1 = torch.empty(end - first, 1, device=device) if dtype == "int8" else None
            for start, shard in zip(vectors.starts.tolist(), vectors.shards):
                low, high = max(start, first), min(start + len(shard), end)
                if low >= high:
                    continue
                piece_ND, at = (
                    torch.from_numpy(shard[low - start : high - start]).to(device),
                    slice(low - first, high - first),
                )
                if dtype == "int8":
                    matrix_ND[at], scales_N1[at] = quantize(piece_ND)
                else:
                    matrix_ND[at] = piece_ND
            parts.append((first, matrix_ND, scales_N1))
        return parts

    def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        num_hits = _num_hits(self.corpus, topk)
        if not queries:
            return []
        queries_QD, found = self.encoder.encode(queries, "query"), []
        for start in range(0, len(queries), QUERY_ROWS):
            scores_QK, rows_QK = nearest(self.parts, queries_QD[start : start + QUERY_ROWS], num_hits)
            found += [
                _hits(self.corpus, rows_K, scores_K)
                for rows_K, scores_K in zip(rows_QK.tolist(), scores_QK.tolist())
            ]
        return found


class BM25Search:
    """Search by words; the same query always gives the same passages in the same order."""

    backend = "bm25"
    encoder = None

    def __init__(self, index: bm25s.BM25, corpus: Corpus):
        self.index, self.corpus = index, corpus

    def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        num_hits = _num_hits(self.corpus, topk)
        return [self._search_one(query, num_hits) for query in queries]

    def _search_one(self, query: str, num_hits: int) -> list[Passage]:
        scores_N = self.index.get_scores_from_ids(self.index.get_tokens_ids(WORD.findall(query.lower())))
        cut = np.partition(scores_N, -num_hits)[-num_hits]
        above = np.flatnonzero(scores_N > cut)
        # Bm25s's own top-k takes any of the equals
        level = np.flatnonzero(scores_N == cut)[: num_hits - len(above)]
        rows = np.concatenate([above, level])
        rows = rows[np.argsort(-scores_N[rows], kind="stable")]
        return _hits(self.corpus, rows, scores_N[rows])


def open_retriever(options: Retriever, reserved_bytes: float = 0.0):
    """The search backend that `options` describe, checked against corpus, encoder and memory; ValueError with
    the remedy if not.

    It has `search`, `backend`, `corpus`, `encoder` (None without one) and `fingerprint`, which changes when
    its results may. A backend of None is what the index folder was built for, or faiss for a file.
    `reserved_bytes` of memory are spoken for.
    """
    if options.corpus is None:
        raise ValueError(
            'retriever.corpus is null: a search in this process needs a jsonl of {"id", "contents"}'
        )
    path = (
        Path(options.index)
        if options.index is not None and options.backend in ("faiss", "torch", "bm25", None)
        else None
    )
    if path is not None and not path.exists():
        raise ValueError(f"no index {path}: build one (`{BUILD}`) or mend retriever.index")
    if path is None and options.backend in ("faiss", "torch", None):
        raise ValueError(
            "retriever.index is null and backend is "
            f"{repr(options.backend) if options.backend else 'null'}: build an index (`{BUILD}`) or set "
            "retriever.backend bm25"
        )
    if path is not None and path.is_file() and options.backend not in ("faiss", None):
        raise ValueError(
            f"retriever.index = {options.index} is a file, which only backend faiss opens; "
            f"{options.backend!r} needs a folder made by `{BUILD}`"
        )
    manifest = read_manifest(path) if path is not None and path.is_dir() else None
    if options.backend is None:
        options = dataclasses.replace(options, backend=built_for(manifest) if manifest else "faiss")
        check_retriever(Config(retriever=options))  # options that this backend does not read
    _refuse_gpus_for_each(options)
    if manifest is not None:
        match_manifest(path, manifest, options)
    if path is None and options.backend in ("bm25", "oracle") and Path(options.corpus).is_file():
        memory.check(
            "bm25 in memory",
            BM25_BYTES * os.path.getsize(options.corpus),
            0,
            0,
            options.max_memory_gb,
            reserved=reserved_bytes,
        )
    corpus = Corpus(options.corpus)
    if manifest is not None and corpus.sha256 != manifest["corpus_sha256"]:
        raise ValueError(
            f"{path} was built from another corpus ({manifest['num_passages']} passages) than "
            f"{corpus.path} ({len(corpus)}): set retriever.corpus to that one, or build again (`{BUILD}`)"
        )
    retriever = _open_backend(options, path, manifest, corpus, reserved_bytes)
    bare = [path.stat().st_size, path.stat().st_mtime_ns] if path is not None and path.is_file() else None
    retriever.fingerprint = fingerprint(
        options.backend,
        corpus.sha256,
        manifest,
        bare,
        options.encoder,
        options.dtype,
        options.faiss_params,
        options.rerank,
        options.oracle_questions,
    )
    return retriever


def _refuse_gpus_for_each(options: Retriever) -> None:
    """Several processes of one launch would each lay the whole index over all GPUs."""
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    if (
        num_processes > 1
        and options.backend == "torch"
        and options.device == "auto"
        and torch.cuda.is_available()
    ):
        raise ValueError(
            f"retriever.url is null and backend is 'torch': each of the {num_processes} processes would "
            "lay the whole index over all GPUs. "
            "Start retriever_server.py once and set retriever.url, or set retriever.device cpu"
        )


def _open_backend(
    options: Retriever, path: Path | None, manifest: dict | None, corpus: Corpus, reserved_bytes: float
):
    if options.backend == "random":
        return RandomSearch(corpus)
    if options.backend == "empty":
        return EmptySearch(corpus)
    if options.backend in ("bm25", "oracle"):
        words = BM25Search(build_bm25(corpus) if path is None else open_bm25(path, corpus), corpus)
        return words if options.backend == "bm25" else OracleSearch(words, corpus, options.oracle_questions)
    device = "cpu" if options.device == "cpu" or not torch.cuda.is_available() else "cuda"
    vectors = Vectors(path) if path.is_dir() else None
    if options.backend == "torch":
        needed = len(vectors) * (vectors.dim + 4 if options.dtype == "int8" else 2 * vectors.dim)
        where = "GPU memory" if device == "cuda" else "memory"
        memory.check(
            f"torch {options.dtype}",
            needed,
            len(vectors),
            vectors.dim,
            options.max_memory_gb,
            where,
            reserved_bytes,
        )
        return TorchSearch(
            str(path),
            vectors,
            corpus,
            Encoder(options.encoder, manifest["max_tokens"], device),
            options.dtype,
        )
    file = path / "index.faiss" if path.is_dir() else path
    memory.check(
        f"faiss {file.name}",
        file.stat().st_size,
        len(corpus),
        manifest["dim"] if manifest else 0,
        options.max_memory_gb,
        reserved=reserved_bytes,
    )
    if options.rerank and not (vectors and len(vectors)):
        raise ValueError(
            f"retriever.rerank = {options.rerank} needs the float16 vectors of an index folder; {path} "
            f"holds none: build one (`{BUILD}`) or set rerank 0"
        )
    encoder = Encoder(options.encoder, manifest["max_tokens"] if manifest else 256, device)
    return FaissSearch(
        file,
        corpus,
        encoder,
        options.faiss_params,
        options.rerank,
        vectors if vectors and len(vectors) else None,
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lld.retrieval",
        description="Build an index folder for the retriever (`accelerate launch -m lld.retrieval build …` "
        "uses several GPUs), or check one.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="compare every file of a folder with its checksum")
    check.add_argument("folder")
    build = commands.add_parser("build")
    build.add_argument("--corpus", required=True, help='jsonl or jsonl.gz of {"id", "contents"}')
    build.add_argument(
        "--out", required=True, help="folder to make; one that a kill left behind is gone on with"
    )
    build.add_argument("--encoder", default=Retriever.encoder, help="hub name or folder")
    build.add_argument(
        "--index",
        default="flat",
        help="flat, hnsw, ivf-pq, ivf-sq, a FAISS factory string, none (vectors for the torch backend "
        "only), or bm25",
    )
    build.add_argument("--max-tokens", type=int, default=256, help="of a passage; what is longer is cut")
    build.add_argument(
        "--batch-size",
        type=int,
        default=256 if torch.cuda.is_available() else 32,
        help="passages encoded together",
    )
    build.add_argument(
        "--shard-rows", type=int, default=SHARD_ROWS, help="passages a shard: what a kill can cost"
    )
    build.add_argument(
        "--vectors",
        help="a flat FAISS file, such as Search-R1's, to take the vectors from instead of encoding",
    )
    return parser.parse_args(arguments)


def check(folder: Path) -> None:
    """Reads every file of an index folder and compares it with the manifest."""
    files = read_manifest(folder).get("files")
    if not files:
        raise ValueError(
            f"{folder} was built before manifests held checksums: there is nothing to compare it with; "
            "build again to have them"
        )
    check_files(folder, files, float("inf"))
    print(f"{folder}: {len(files)} files, {_size(folder)}, are as they were built")


def build(args: argparse.Namespace) -> None:
    """Builds, and says what was made and how to serve it."""
    began = time.monotonic()
    build_index(
        args.corpus,
        args.out,
        args.encoder,
        args.index,
        args.max_tokens,
        batch_size=args.batch_size,
        shard_rows=args.shard_rows,
        vectors=args.vectors,
    )
    if int(os.environ.get("RANK", 0)):
        return
    manifest = read_manifest(Path(args.out))
    encoder = (
        f" --encoder {manifest['encoder']}"
        if manifest.get("encoder", Retriever.encoder) != Retriever.encoder
        else ""
    )
    print(
        f"{args.out}: {manifest['num_passages']:,} passages, index {manifest['index']}, "
        f"{_size(Path(args.out))}, made in {time.monotonic() - began:.0f} s"
    )
    print(f"serve it: python retriever_server.py --index {args.out} --corpus {args.corpus}{encoder}")


def _size(folder: Path) -> str:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _is_disk_fault(error: Exception) -> bool:
    from lld.files import DISK_ERRORS

    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return True
    # numpy's OSError has no errno, FAISS raises a RuntimeError.
    return "requested and" in str(error) or "write error" in str(error)


def main() -> None:
    args = parse_arguments()
    try:
        check(Path(args.folder)) if args.command == "check" else build(args)
    except ValueError as error:
        print(
            f"error: {error}".replace("retriever.corpus", "--corpus").replace(
                "retriever.encoder", "--encoder"
            ),
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    except (OSError, RuntimeError) as error:
        if not _is_disk_fault(error):
            raise
        where = Path(args.folder if args.command == "check" else args.out)
        there = next(folder for folder in (where, *where.absolute().parents) if folder.exists())
        print(
            f"error: {where} could not be written with {shutil.disk_usage(there).free / 1e9:.1f} GB free "
            f"there ({error}): make room and give the same command again; what was finished is kept",
            file=sys.stderr,
        )
        raise SystemExit(7) from None
