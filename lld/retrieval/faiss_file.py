"""Search in a FAISS index file on the CPU, memory-mapped."""

from pathlib import Path

import faiss
import numpy as np
import torch

from lld.protocol import Passage
from lld.retrieval import exact
from lld.retrieval.corpus import Corpus, count_hits, take_hits
from lld.retrieval.encoder import Encoder
from lld.retrieval.index import BUILD, Vectors, check_vectors


class FaissSearch:
    """Search in a FAISS index file.

    With an L2 index the scores are negated distances, so that higher is always better.
    params: FAISS's search parameters, such as "nprobe=64" or "efSearch=128"; "" keeps those of the file.
    rerank: number of best rows to score again with the float16 vectors on the disk, at one random read each.
    A small compressed index in memory then gives nearly exact results.
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
        self.corpus = corpus
        self.encoder = encoder
        self.rerank = rerank
        self.vectors = vectors
        try:
            self.index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise ValueError(
                f"{path} is not a FAISS index ({str(error).splitlines()[0]}): give an index file or a "
                f"folder made by `{BUILD}`"
            ) from None
        self.higher_is_better = self.index.metric_type == faiss.METRIC_INNER_PRODUCT
        check_vectors(str(path), self.index.ntotal, self.index.d, self._first_vector(), corpus, encoder)
        # A view of a flat index's rows. PyTorch's matrix product over them takes a fifth of FAISS's time for
        # a batch and half for one query.
        self.flat = None
        if isinstance(self.index, faiss.IndexFlatIP):
            num, dim = self.index.ntotal, self.index.d
            rows_ND = faiss.rev_swig_ptr(self.index.get_xb(), num * dim).reshape(-1, dim)
            self.flat = [(0, torch.from_numpy(rows_ND), None)]
        if params:
            self._set_parameters(path, params)

    def _first_vector(self) -> np.ndarray | None:
        """The stored vector of passage 0; None if the index cannot return it or is an L2 index."""
        if not self.higher_is_better:
            return None
        if self.vectors is not None:
            return self.vectors.take(np.array([0]))[0]
        try:
            return self.index.reconstruct(0)
        except RuntimeError:  # some compressed indexes cannot reconstruct
            return None

    def _set_parameters(self, path: Path, params: str) -> None:
        try:
            faiss.ParameterSpace().set_index_parameters(self.index, params)
        except RuntimeError as error:
            raise ValueError(
                f"retriever.faiss_params = {params!r}: {path} does not take it "
                f"({str(error).splitlines()[-1].strip()})"
            ) from None

    def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        num_hits = count_hits(self.corpus, topk)
        if not queries:
            return []
        queries_QD = self.encoder.encode(queries, "query").numpy()
        scores_QK, rows_QK = self._nearest(queries_QD, min(len(self.corpus), max(num_hits, self.rerank)))
        if self.rerank:
            scores_QK = np.einsum("qd,qkd->qk", queries_QD, self.vectors.take(np.maximum(rows_QK, 0)))
            scores_QK[rows_QK < 0] = -np.inf
            order_QK = np.argsort(-scores_QK, axis=1, kind="stable")[:, :num_hits]
            scores_QK = np.take_along_axis(scores_QK, order_QK, 1)
            rows_QK = np.take_along_axis(rows_QK, order_QK, 1)
        elif not self.higher_is_better:
            scores_QK = -scores_QK
        return [
            take_hits(self.corpus, rows_K, scores_K)
            for rows_K, scores_K in zip(rows_QK, scores_QK, strict=True)
        ]

    def _nearest(self, queries_QD: np.ndarray, num_hits: int) -> tuple[np.ndarray, np.ndarray]:
        if self.flat is None:
            return self.index.search(queries_QD, num_hits)
        blocks = [
            exact.nearest(self.flat, torch.from_numpy(queries_QD[start : start + exact.QUERY_ROWS]), num_hits)
            for start in range(0, len(queries_QD), exact.QUERY_ROWS)
        ]
        return tuple(torch.cat(some).numpy() for some in zip(*blocks, strict=True))
