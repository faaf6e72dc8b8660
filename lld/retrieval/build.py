"""Builds index folders.

A build works in FOLDER.partial and renames it at the end. An interrupted build is continued: only missing
shards are encoded. Shards and batches depend on corpus and options only, so the folder is bit-identical (on
one machine, with one number of threads). While a build runs, a second one of the same folder is refused.
"""

import fcntl
import json
import os
import shutil
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import PartialState
from tqdm import tqdm

from lld.files import fingerprint, replace_file
from lld.retrieval import memory
from lld.retrieval.bm25 import build_bm25
from lld.retrieval.corpus import Corpus
from lld.retrieval.encoder import Encoder
from lld.retrieval.faiss_build import TRAIN_ROWS, faiss_factory, try_faiss, write_faiss
from lld.retrieval.index import read_manifest
from lld.retrieval.shards import SHARD_ROWS, encode_shards, import_shards

# Ranks wait for hours while one of them trains and fills the index; PyTorch's default timeout is minutes.
WAIT = timedelta(days=7)


def build_index(
    corpus_path: str,
    out: str,
    encoder_name: str,
    index: str = "flat",
    max_tokens: int = 256,
    *,
    batch_size: int = 32,
    shard_rows: int = SHARD_ROWS,
    vectors: str | None = None,
) -> None:
    """Builds the index folder `out`, or continues an interrupted build of it.

    index: "flat", "hnsw", "ivf-pq", "ivf-sq" or a FAISS factory string; "none" writes the shards only, for
    the torch backend; "bm25" needs no encoder. In a finished folder of the same corpus and encoder, this
    FAISS index replaces the old one.
    vectors: a flat FAISS file to copy the vectors from.
    Raises ValueError if `out` holds anything else, already holds this index, or is being built by another
    process.
    """
    state = PartialState(cpu=not torch.cuda.is_available(), timeout=WAIT)
    final = Path(out)
    folder = final if final.exists() else Path(f"{final}.partial")  # `out` may end in a slash
    # Rank 0 writes the Arrow file, then the others open it.
    with state.main_process_first():
        corpus = Corpus(corpus_path)
    plan, encoder, factory = _plan(
        corpus, encoder_name, index, max_tokens, batch_size=batch_size, shard_rows=shard_rows, vectors=vectors
    )
    lock = _lock(folder, final) if state.is_main_process else None
    try:
        if folder == final:
            _check_addition(final, plan, factory)
        elif state.is_main_process:
            _begin(folder, plan)
        state.wait_for_everyone()
        if encoder is not None:
            memory.check_build(factory, len(corpus), encoder.dim, TRAIN_ROWS)
            if vectors:
                import_shards(folder, vectors, corpus, encoder, plan)
            else:
                encode_shards(folder, corpus, encoder, plan)
            state.wait_for_everyone()
        if state.is_main_process:
            if index == "bm25":
                build_bm25(corpus).save(folder / "bm25", show_progress=False)
            elif index != "none":
                write_faiss(folder, factory)
            _finish(folder, final, {"index": factory} | plan)
    finally:
        if lock is not None:
            os.close(lock)
    state.wait_for_everyone()


def _plan(
    corpus: Corpus,
    encoder_name: str,
    index: str,
    max_tokens: int,
    *,
    batch_size: int,
    shard_rows: int,
    vectors: str | None,
) -> tuple[dict, Encoder | None, str]:
    """The plan (all that the folder's bytes depend on), encoder (None for bm25) and FAISS factory string."""
    plan = {"corpus_sha256": corpus.sha256, "num_passages": len(corpus)}
    if index == "bm25":
        return plan, None, index
    encoder = Encoder(encoder_name, max_tokens)
    plan |= {
        "encoder": encoder_name,
        "dim": encoder.dim,
        "style": encoder.style,
        "max_tokens": max_tokens,
        "shard_rows": shard_rows,
        "batch_size": batch_size,
        "vectors": vectors and Path(vectors).name,
    }
    factory = faiss_factory(index, len(corpus), encoder.dim)
    if index != "none":
        try_faiss(factory, encoder.dim, plan)
    return plan, encoder, factory


def _lock(folder: Path, final: Path) -> int:
    """Locks the folder itself: there is no lock file, and the lock ends with the process.

    Returns the file descriptor; ValueError if another process holds the lock.
    """
    if final.exists() and not final.is_dir():
        raise ValueError(f"{final} exists and is no folder: delete it or choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ValueError(f"another process is building {final}: wait until it is done, or stop it") from None
    except OSError:  # a file system without locks
        pass
    if folder != final and final.exists():  # finished before we had the lock
        os.close(lock)
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()
        raise ValueError(f"another process has just built {final}: open it, or choose another --out")
    return lock


def _begin(folder: Path, plan: dict) -> None:
    """Starts a build, or checks that the interrupted one was started with the same plan.

    What lies there without a plan may be of another corpus or encoder: it is deleted.
    """
    path = folder / "plan.json"
    if path.is_file():
        try:
            begun = dict(json.loads(path.read_text()))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is damaged ({error}): delete {folder} and build again") from None
        for name in plan.keys() | begun.keys():
            if plan.get(name) != begun.get(name):
                raise ValueError(
                    f"{folder} was begun with {name} {begun.get(name)!r}, not {plan.get(name)!r}: give the "
                    "same to go on, or delete the folder"
                )
        return
    for part in (folder / "vectors", folder / "bm25"):
        if part.exists():
            shutil.rmtree(part)
    (folder / "index.faiss").unlink(missing_ok=True)
    if "encoder" in plan:
        (folder / "vectors").mkdir(exist_ok=True)
    replace_file(path, json.dumps(plan, indent=2) + "\n")


def _finish(folder: Path, final: Path, manifest: dict) -> None:
    """Writes the manifest, with checksums of all files, and renames the folder to `final`.

    The plan goes last: a build killed in here is either finished or continued.
    """
    for left in folder.rglob("*.partial"):
        left.unlink(missing_ok=True)
    known = {}
    if folder == final:
        # The vectors are unchanged: keep their checksums, without reading them again.
        before = read_manifest(final).get("files", {})
        known = {name: about for name, about in before.items() if name.startswith("vectors/")}
    others = {folder / "manifest.json", folder / "plan.json"}
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path not in others]
    files = {}
    for path in tqdm(paths, desc="checksums", unit="file", disable=len(paths) < 100):
        name = str(path.relative_to(folder))
        files[name] = known.get(name) or fingerprint(path)
    replace_file(folder / "manifest.json", json.dumps(manifest | {"files": files}, indent=2) + "\n")
    if folder != final:
        folder.rename(final)
    (final / "plan.json").unlink(missing_ok=True)


def _check_addition(final: Path, plan: dict, factory: str) -> None:
    """ValueError unless all that changes in a finished folder is its FAISS index."""
    try:
        there = read_manifest(final)
    except ValueError:
        there = {}
    same = all(
        there.get(name) == plan.get(name)
        for name in ("corpus_sha256", "encoder", "style", "max_tokens", "shard_rows")
    )
    if not same or factory in ("none", "bm25", there.get("index")):
        raise ValueError(
            f"{final} exists: delete it or choose another --out (in a folder of the same vectors only "
            "another --index can be made)"
        )
