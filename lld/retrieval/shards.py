"""The passages' vectors in shards: encoded, or copied from a flat FAISS file."""

import io
from pathlib import Path

import faiss
import numpy as np
from accelerate import PartialState
from tqdm import tqdm

from lld.files import written_aside
from lld.retrieval.corpus import Corpus
from lld.retrieval.encoder import Encoder
from lld.retrieval.index import check_vectors

# Rows a shard. A killed build loses at most one: 20 s of encoding on a GPU, minutes on a CPU.
SHARD_ROWS = 1 << 14


def encode_shards(folder: Path, corpus: Corpus, encoder: Encoder, plan: dict) -> None:
    """Encodes this rank's missing shards, with one in memory at a time."""
    state = PartialState()
    missing = missing_shards(folder, plan)
    total = len(corpus) // state.num_processes
    num_done = max(0, total - sum(end - start for _, start, end in missing))
    quiet = not state.is_main_process
    with tqdm(
        total=total, initial=num_done, desc="encoding", unit="passage", smoothing=0.02, disable=quiet
    ) as bar:
        for path, start, end in missing:
            texts = list(corpus.contents(start, end))
            vectors_ND = encoder.encode(texts, "passage", plan["batch_size"], bar.update)
            write_shard(path, vectors_ND.numpy().astype(np.float16))


def import_shards(folder: Path, index_file: str, corpus: Corpus, encoder: Encoder, plan: dict) -> None:
    """Copies shards from a flat FAISS file, such as Search-R1's `e5_Flat.index`, instead of encoding."""
    try:
        index = faiss.read_index(index_file, faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise ValueError(
            f"--vectors {index_file} is not a FAISS index ({str(error).splitlines()[0]})"
        ) from None
    if not isinstance(index, faiss.IndexFlat):
        raise ValueError(
            f"--vectors {index_file} is a {type(index).__name__}: only a flat index still has its vectors"
        )
    # A view of the memory-mapped file: no vector is read yet.
    vectors_ND = faiss.rev_swig_ptr(index.get_xb(), index.ntotal * index.d).reshape(index.ntotal, index.d)
    check_vectors(index_file, index.ntotal, index.d, vectors_ND[0].copy(), corpus, encoder)
    missing = missing_shards(folder, plan)
    quiet = not PartialState().is_main_process
    for path, start, end in tqdm(missing, desc=f"copying {index_file}", unit="shard", disable=quiet):
        write_shard(path, vectors_ND[start:end].astype(np.float16))


def missing_shards(folder: Path, plan: dict) -> list[tuple[Path, int, int]]:
    """(file, first row, end) of the missing shards of this rank; ranks take shards in turn."""
    state = PartialState()
    shards = []
    for number, start in enumerate(range(0, plan["num_passages"], plan["shard_rows"])):
        end = min(start + plan["shard_rows"], plan["num_passages"])
        shards.append((folder / "vectors" / f"{number:05d}.npy", start, end))
    return [shard for shard in shards[state.process_index :: state.num_processes] if not shard[0].exists()]


def write_shard(path: Path, vectors_ND: np.ndarray) -> None:
    """Writes a shard aside first: a shard with its final name is complete."""
    buffer = io.BytesIO()
    # Not np.save to the file: on a full disk its error has no errno and no file name.
    np.save(buffer, vectors_ND)
    with written_aside(path, durable=True) as aside:
        aside.write_bytes(buffer.getbuffer())
