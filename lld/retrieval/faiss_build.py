"""FAISS indexes made from the shards."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import faiss
import numpy as np
from tqdm import tqdm

from lld.files import written_aside
from lld.retrieval.index import Vectors

TRAIN_ROWS = 1 << 18  # at most, for k-means and quantisers
INSIDE = ("index", "base_index", "storage")  # what IndexPreTransform, IndexRefine and IndexHNSW are made of
TRIAL_ROWS = 256  # of a shard, in the trial before vectors are encoded


def faiss_factory(name: str, num_vectors: int, dim: int) -> str:
    """The FAISS factory string behind an alias, or `name` itself.

    4 sqrt(N) lists, rounded to a power of two; PQ with one byte per 4 dimensions. "np" turns off polysemous
    training, which took 60 of 61 s of training and is for a filter that is not used here.
    """
    lists = 1 << max(0, round(np.log2(4 * num_vectors**0.5)))
    # FAISS wants 39 training vectors per list.
    while lists > 1 and 39 * lists > min(num_vectors, TRAIN_ROWS * 4):
        lists //= 2
    return {
        "flat": "Flat",
        "hnsw": "HNSW32",
        "ivf-pq": f"OPQ{dim // 4},IVF{lists},PQ{dim // 4}x8np",
        "ivf-sq": f"IVF{lists},SQ8",
    }.get(name, name)


def write_faiss(folder: Path, factory: str) -> None:
    """Builds folder/index.faiss from the shards: trained on a fixed sample, then filled shard by shard."""
    vectors = Vectors(folder)
    path = folder / "index.faiss"
    with written_aside(path, aside=folder / "index.faiss.partial") as aside:
        if factory == "Flat":
            write_flat(aside, vectors)
        else:
            faiss.write_index(_make_faiss(vectors, factory), str(aside))


def write_flat(path: Path, vectors: Vectors) -> None:
    """Streams a flat inner-product index to the disk in FAISS's format: header, then float32 rows."""
    header = bytearray(faiss.serialize_index(faiss.IndexFlatIP(vectors.dim)).tobytes())
    # ntotal, after the type and D of 4 bytes each.
    header[8:16] = len(vectors).to_bytes(8, "little")
    header[-8:] = (len(vectors) * vectors.dim).to_bytes(8, "little")
    with open(path, "wb") as file:
        file.write(header)
        quiet = len(vectors.shards) < 8
        for shard in tqdm(vectors.shards, desc="writing index", unit="shard", disable=quiet):
            file.write(shard.astype(np.float32).tobytes())
            file.flush()
        os.fsync(file.fileno())


def _make_faiss(vectors: Vectors, factory: str):
    index = _empty_faiss(factory, vectors.dim)
    if not index.is_trained:
        rows = np.random.default_rng(0).permutation(len(vectors))[:TRAIN_ROWS]
        index.train(vectors.take(np.sort(rows)))
    # FAISS's own defaults search one list, or 16 neighbours.
    if factory.startswith("HNSW"):
        faiss.ParameterSpace().set_index_parameters(index, "efSearch=128")
    elif "IVF" in factory:
        faiss.ParameterSpace().set_index_parameters(index, "nprobe=64")
    for shard in tqdm(vectors.shards, desc=f"adding to {factory}", unit="shard"):
        index.add(shard.astype(np.float32))
    return index


def _empty_faiss(factory: str, dim: int, trial_rows: Sequence[int] = ()):
    """An index without vectors; ValueError if FAISS knows no such index, or cannot fill it shard by shard.

    trial_rows: random vectors to add at first, shard by shard, unless the index must be trained before.
    """
    try:
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
        for rows in trial_rows if index.is_trained else ():
            index.add(np.random.default_rng(rows).standard_normal((rows, dim), np.float32))
    except RuntimeError as error:
        raise ValueError(
            f"FAISS cannot make an index {factory!r} of dimension {dim} "
            f"({str(error).splitlines()[-1].strip()}): see its factory strings, or use flat, hnsw, ivf-pq or "
            "ivf-sq"
        ) from None
    return index


def try_faiss(factory: str, dim: int, plan: dict) -> None:
    """ValueError for an index that could not be made once the vectors are there; tries the first shards.

    Of one that must be trained only this is known: k-means wants a vector for each of its clusters.
    """
    ends = [min(plan["num_passages"], number * plan["shard_rows"]) for number in range(3)]
    sizes = [min(end - start, TRIAL_ROWS) for start, end in itertools.pairwise(ends) if end > start]
    index, most = _empty_faiss(factory, dim, sizes), min(plan["num_passages"], TRAIN_ROWS)
    if _clusters(index) > most:
        raise ValueError(
            f"FAISS cannot make an index {factory!r}: it is trained on {most} vectors, which are too few for "
            f"its {_clusters(index)} clusters; ask for fewer lists (IVF) or bits of a code (PQ)"
        )


def _clusters(index) -> int:
    """The clusters of the largest k-means in an inverted file or product quantiser; 1 without one."""
    inverted = faiss.try_extract_index_ivf(index)
    inner = faiss.downcast_index(inverted or index)
    while nested := next((getattr(inner, name, None) for name in INSIDE if hasattr(inner, name)), None):
        inner = faiss.downcast_index(nested)
    codes = getattr(inner, "pq", None)
    return max(inverted.nlist if inverted else 1, codes.ksub if codes else 1)
