"""Exact search: inner products of the queries with all vectors, chunk by chunk, on the CPU or on all GPUs."""

import numpy as np
import torch

from lld.protocol import Passage
from lld.retrieval.corpus import Corpus, count_hits, take_hits
from lld.retrieval.encoder import Encoder
from lld.retrieval.index import Vectors, check_vectors

# Vectors scored at once on the CPU; with QUERY_ROWS queries this is 16 MB of scores.
CHUNK_ROWS = 1 << 14
GPU_CHUNK_ROWS = 1 << 18  # the same on a GPU
QUERY_ROWS = 256


@torch.inference_mode()
def nearest(parts: list[tuple], queries_QD: torch.Tensor, num_hits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and rows (Q, K) of the best inner products, best first.

    parts: (first row, matrix, scales of int8 or None). GPUs work in parallel: all kernels are launched before
    the first result is copied back. A part may be empty: there can be more GPUs than passages.
    """
    best = [_nearest_in_part(*part, queries_QD, num_hits) for part in parts if len(part[1])]
    scores_QK = torch.cat([scores.cpu() for scores, _ in best], 1)
    rows_QK = torch.cat([rows.cpu() for _, rows in best], 1)
    scores_QK, kept_QK = scores_QK.topk(min(num_hits, scores_QK.shape[1]))
    return scores_QK, rows_QK.gather(1, kept_QK)


def _nearest_in_part(
    first: int,
    matrix_ND: torch.Tensor,
    scales_N1: torch.Tensor | None,
    queries_QD: torch.Tensor,
    num_hits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    on_gpu = matrix_ND.device.type == "cuda"
    chunk_rows = GPU_CHUNK_ROWS if on_gpu else CHUNK_ROWS
    asked_QD = queries_QD.to(matrix_ND.device, torch.float16 if on_gpu else torch.float32)
    scores_QK = rows_QK = None
    for start in range(0, len(matrix_ND), chunk_rows):
        chunk_ND = matrix_ND[start : start + chunk_rows].to(asked_QD.dtype)
        if on_gpu:
            # Accumulates and returns float32, since scores rounded to float16 would tie. Reads each float16
            # vector once, without a float32 copy.
            scores_QN = torch.mm(asked_QD, chunk_ND.T, out_dtype=torch.float32)
        else:
            scores_QN = asked_QD @ chunk_ND.T
        if scales_N1 is not None:
            scores_QN *= scales_N1[start : start + chunk_rows].T
        some_QK, at_QK = scores_QN.topk(min(num_hits, scores_QN.shape[1]))
        at_QK = at_QK + (first + start)
        scores_QK = some_QK if scores_QK is None else torch.cat([scores_QK, some_QK], 1)
        rows_QK = at_QK if rows_QK is None else torch.cat([rows_QK, at_QK], 1)
        scores_QK, kept_QK = scores_QK.topk(min(num_hits, scores_QK.shape[1]))
        rows_QK = rows_QK.gather(1, kept_QK)
    return scores_QK, rows_QK


def quantize(vectors_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes (N, D) and float32 scales (N, 1), with codes * scales close to the vectors.

    Each vector has its own scale, which maps its largest absolute entry to 127.
    """
    scales_N1 = vectors_ND.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return (vectors_ND.float() / scales_N1).round().to(torch.int8), scales_N1


class TorchSearch:
    """Exact inner-product search over float16 vectors, or over int8 made of them (nearly exact).

    `parts` are (first row, matrix, scales or None): on the CPU one per shard, mapped from the disk if
    float16; on GPUs one per GPU.
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
            self.parts = []
            for start, shard_ND in _shards_of(vectors):
                matrix_ND = torch.from_numpy(shard_ND)
                if dtype == "int8":
                    self.parts.append((start, *quantize(matrix_ND)))
                else:
                    self.parts.append((start, matrix_ND, None))

    @staticmethod
    def _over_gpus(vectors: Vectors, dtype: str) -> list[tuple[int, torch.Tensor, torch.Tensor | None]]:
        """Splits the rows evenly over the GPUs, copied shard by shard: at most one shard is held twice."""
        count = torch.cuda.device_count()
        parts = []
        for number in range(count):
            first = len(vectors) * number // count
            end = len(vectors) * (number + 1) // count
            device = f"cuda:{number}"
            stored = torch.int8 if dtype == "int8" else torch.float16
            matrix_ND = torch.empty(end - first, vectors.dim, dtype=stored, device=device)
            scales_N1 = torch.empty(end - first, 1, device=device) if dtype == "int8" else None
            for start, shard_ND in _shards_of(vectors):
                low, high = max(start, first), min(start + len(shard_ND), end)
                if low >= high:
                    continue
                piece_ND = torch.from_numpy(shard_ND[low - start : high - start]).to(device)
                at = slice(low - first, high - first)
                if dtype == "int8":
                    matrix_ND[at], scales_N1[at] = quantize(piece_ND)
                else:
                    matrix_ND[at] = piece_ND
            parts.append((first, matrix_ND, scales_N1))
        return parts

    def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        num_hits = count_hits(self.corpus, topk)
        if not queries:
            return []
        queries_QD = self.encoder.encode(queries, "query")
        found = []
        for start in range(0, len(queries), QUERY_ROWS):
            scores_QK, rows_QK = nearest(self.parts, queries_QD[start : start + QUERY_ROWS], num_hits)
            found += [
                take_hits(self.corpus, rows_K, scores_K)
                for rows_K, scores_K in zip(rows_QK.tolist(), scores_QK.tolist(), strict=True)
            ]
        return found


def _shards_of(vectors: Vectors):
    """(first row, shard) of every shard."""
    return zip(vectors.starts[:-1].tolist(), vectors.shards, strict=True)
