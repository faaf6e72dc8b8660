"""Opens the search backend of a run and checks it against corpus, encoder and memory.

A backend is a class with `search(queries, topk) -> list[list[Passage]]`, best passage first:

- faiss (faiss_file.py): a FAISS file, on the CPU, memory-mapped. Search-R1's own `e5_Flat.index` and
  `wiki-18.jsonl` work unchanged.
- torch (exact.py): exact search, chunk by chunk, over the float16 shards of an index folder or an int8 copy
  of them; on all GPUs, or on the CPU, where float16 shards stay memory-mapped.
- bm25 (bm25.py): words, no neural encoder. Without an index folder it is built in memory when opened.
- random, empty, oracle (controls.py): experimental controls.
"""

import dataclasses
import hashlib
import os
from pathlib import Path

import torch

from lld.config import Config, Retriever
from lld.data.passages import unpacked_bytes
from lld.files import sampled_blocks
from lld.retrieval import memory
from lld.retrieval.controls import EmptySearch, OracleSearch, RandomSearch
from lld.retrieval.corpus import Corpus
from lld.retrieval.encoder import Encoder
from lld.retrieval.index import BUILD, Vectors, built_for, index_fingerprint, match_manifest, read_manifest
from lld.rules import check_retriever

BM25_BYTES = 12  # to build it in memory, per byte of the unpacked corpus
USE_INDEX = ("faiss", "torch", "bm25", None)  # backends that read retriever.index
NEED_INDEX = ("faiss", "torch", None)
# Backends that need nothing but the corpus; `retriever.backend` accepts these names besides those below.
OF_CORPUS = {"random": RandomSearch, "empty": EmptySearch}


def open_retriever(options: Retriever, reserved_bytes: float = 0.0):
    """The search backend that `options` describe; ValueError with the remedy on a mismatch.

    It has `search`, `backend`, `corpus`, `encoder` (None without one) and `fingerprint`, which changes
    whenever its results may. A backend of None means the one the index folder was built for, or faiss for a
    file. reserved_bytes: host memory that is already promised to something else.
    """
    if options.corpus is None:
        raise ValueError(
            'retriever.corpus is null: a search in this process needs a jsonl of {"id", "contents"}'
        )
    path = _find_index(options)
    manifest = read_manifest(path) if path is not None and path.is_dir() else None
    if options.backend is None:
        options = dataclasses.replace(options, backend=built_for(manifest) if manifest else "faiss")
        # Refuses options that this backend does not read.
        check_retriever(Config(retriever=options))
    _refuse_gpus_for_each(options)
    if manifest is not None:
        match_manifest(path, manifest, options)
    _check_memory(options, path, manifest, reserved_bytes)
    corpus = Corpus(options.corpus)
    if manifest is not None and corpus.sha256 != manifest["corpus_sha256"]:
        raise ValueError(
            f"{path} was built from another corpus ({manifest['num_passages']} passages) than "
            f"{corpus.path} ({len(corpus)}): set retriever.corpus to that one, or build again (`{BUILD}`)"
        )
    retriever = _open_backend(options, path, manifest, corpus, reserved_bytes)
    retriever.fingerprint = index_fingerprint(
        options.backend,
        corpus.sha256,
        manifest,
        _mark_of_file(path) if path is not None and path.is_file() else None,
        options.encoder,
        options.dtype,
        options.faiss_params,
        options.rerank,
        retriever.known if options.backend == "oracle" else None,
    )
    return retriever


def _check_memory(options: Retriever, path: Path | None, manifest: dict | None, reserved: float) -> None:
    """ValueError if BM25 or a FAISS index would not fit; called before the corpus is read, which is slow."""
    limit = options.max_memory_gb
    if path is None and options.backend in ("bm25", "oracle") and Path(options.corpus).is_file():
        needed = BM25_BYTES * unpacked_bytes(options.corpus)
        memory.check("bm25 in memory", needed, 0, 0, limit, reserved=reserved)
        memory.check_processes("bm25 in memory", needed)
    if options.backend == "faiss":
        file = path / "index.faiss" if path.is_dir() else path
        num_vectors, dim = (manifest["num_passages"], manifest["dim"]) if manifest else _header(path)
        memory.check(f"faiss {file.name}", file.stat().st_size, num_vectors, dim, limit, reserved=reserved)


def _header(path: Path) -> tuple[int, int]:
    """(vectors, dimensions) that a FAISS file's header tells; (0, 0) where it tells nothing of the kind."""
    with path.open("rb") as file:
        header = file.read(16)
    dim, num_vectors = int.from_bytes(header[4:8], "little"), int.from_bytes(header[8:16], "little")
    return (num_vectors, dim) if 0 < dim < 1 << 16 and num_vectors < 1 << 40 else (0, 0)


def _mark_of_file(path: Path) -> list:
    """Size and a checksum of sampled blocks of a bare FAISS file, which has no manifest with checksums."""
    return [path.stat().st_size, hashlib.sha256(b"".join(sampled_blocks(path))).hexdigest()]


def _find_index(options: Retriever) -> Path | None:
    """retriever.index if the backend reads it, else None; ValueError if missing or of the wrong kind."""
    if options.index is None or options.backend not in USE_INDEX:
        if options.backend in NEED_INDEX:
            backend = "null" if options.backend is None else repr(options.backend)
            raise ValueError(
                f"retriever.index is null and backend is {backend}: "
                f"build an index (`{BUILD}`) or set retriever.backend bm25"
            )
        return None
    path = Path(options.index)
    if not path.exists():
        raise ValueError(f"no index {path}: build one (`{BUILD}`) or mend retriever.index")
    if path.is_file() and options.backend not in ("faiss", None):
        raise ValueError(
            f"retriever.index = {options.index} is a file, which only backend faiss opens; "
            f"{options.backend!r} needs a folder made by `{BUILD}`"
        )
    return path


def _refuse_gpus_for_each(options: Retriever) -> None:
    """ValueError if each of several ranks would copy the whole index to all GPUs."""
    num_processes = int(os.environ.get("WORLD_SIZE", 1))
    on_gpus = options.backend == "torch" and options.device == "auto" and torch.cuda.is_available()
    if num_processes > 1 and on_gpus:
        raise ValueError(
            f"retriever.url is null and backend is 'torch': each of the {num_processes} processes would "
            "lay the whole index over all GPUs. "
            "Start retriever_server.py once and set retriever.url, or set retriever.device cpu"
        )


def _open_backend(
    options: Retriever, path: Path | None, manifest: dict | None, corpus: Corpus, reserved_bytes: float
):
    if options.backend in OF_CORPUS:
        return OF_CORPUS[options.backend](corpus)
    if options.backend in ("bm25", "oracle"):
        # Imported here, because importing faiss and bm25s takes a second.
        from lld.retrieval.bm25 import BM25Search, build_bm25, open_bm25

        words = BM25Search(build_bm25(corpus) if path is None else open_bm25(path, corpus), corpus)
        return words if options.backend == "bm25" else OracleSearch(words, corpus, options.oracle_questions)
    device = "cpu" if options.device == "cpu" or not torch.cuda.is_available() else "cuda"
    if options.backend == "torch":
        return _open_torch(options, path, manifest, corpus, device, reserved_bytes)
    return _open_faiss(options, path, manifest, corpus, device)


def _open_torch(
    options: Retriever, path: Path, manifest: dict, corpus: Corpus, device: str, reserved_bytes: float
):
    from lld.retrieval.exact import TorchSearch

    vectors = Vectors(path)
    bytes_each = vectors.dim + 4 if options.dtype == "int8" else 2 * vectors.dim
    where = "GPU memory" if device == "cuda" else "memory"
    if device == "cpu" and options.dtype == "int8":  # float16 is mapped, and the processes share it
        memory.check_processes("torch int8", len(vectors) * bytes_each)
    memory.check(
        f"torch {options.dtype}",
        len(vectors) * bytes_each,
        len(vectors),
        vectors.dim,
        options.max_memory_gb,
        where,
        reserved_bytes,
    )
    encoder = Encoder(options.encoder, manifest["max_tokens"], device)
    return TorchSearch(str(path), vectors, corpus, encoder, options.dtype)


def _open_faiss(options: Retriever, path: Path, manifest: dict | None, corpus: Corpus, device: str):
    from lld.retrieval.faiss_file import FaissSearch

    file = path / "index.faiss" if path.is_dir() else path
    vectors = Vectors(path) if path.is_dir() else None
    if vectors is not None and not len(vectors):
        vectors = None
    if options.rerank and vectors is None:
        raise ValueError(
            f"retriever.rerank = {options.rerank} needs the float16 vectors of an index folder; {path} "
            f"holds none: build one (`{BUILD}`) or set rerank 0"
        )
    encoder = Encoder(options.encoder, manifest["max_tokens"] if manifest else None, device)
    return FaissSearch(file, corpus, encoder, options.faiss_params, options.rerank, vectors)
