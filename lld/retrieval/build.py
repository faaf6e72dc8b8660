"""Builds index folders: `python -m lld.retrieval build`, and `check`.

A build works in FOLDER.partial and renames it at the end. An interrupted build is continued: only missing
shards are encoded. Shards and batches depend on corpus and options only, so the folder is bit-identical (on
one machine, with one number of threads). While a build runs, a second one of the same folder is refused.
"""

import argparse
import fcntl
import io
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import faiss
import numpy as np
import torch
from accelerate import PartialState
from tqdm import tqdm

from lld.config import Retriever
from lld.files import DISK_ERRORS, fingerprint, replace_file, written_aside
from lld.retrieval import memory
from lld.retrieval.bm25 import build_bm25
from lld.retrieval.corpus import Corpus
from lld.retrieval.encoder import Encoder
from lld.retrieval.index import Vectors, check_files, check_vectors, read_manifest

# Rows a shard. A killed build loses at most one: 20 s of encoding on a GPU, minutes on a CPU.
SHARD_ROWS = 1 << 14
TRAIN_ROWS = 1 << 18  # at most, for k-means and quantisers
TRIAL_ROWS = 256  # of a shard, in the trial before vectors are encoded
# Ranks wait for hours while one of them trains and fills the index; PyTorch's default timeout is minutes.
WAIT = timedelta(days=7)


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


def _write_shard(path: Path, vectors_ND: np.ndarray) -> None:
    """Writes a shard aside first: a shard with its final name is complete."""
    buffer = io.BytesIO()
    # Not np.save to the file: on a full disk its error has no errno and no file name.
    np.save(buffer, vectors_ND)
    with written_aside(path, durable=True) as aside:
        aside.write_bytes(buffer.getbuffer())


def _missing_shards(folder: Path, plan: dict) -> list[tuple[Path, int, int]]:
    """(file, first row, end) of the missing shards of this rank; ranks take shards in turn."""
    state = PartialState()
    shards = []
    for number, start in enumerate(range(0, plan["num_passages"], plan["shard_rows"])):
        end = min(start + plan["shard_rows"], plan["num_passages"])
        shards.append((folder / "vectors" / f"{number:05d}.npy", start, end))
    return [shard for shard in shards[state.process_index :: state.num_processes] if not shard[0].exists()]


def encode_shards(folder: Path, corpus: Corpus, encoder: Encoder, plan: dict) -> None:
    """Encodes this rank's missing shards, with one in memory at a time."""
    state = PartialState()
    missing = _missing_shards(folder, plan)
    total = len(corpus) // state.num_processes
    num_done = max(0, total - sum(end - start for _, start, end in missing))
    quiet = not state.is_main_process
    with tqdm(
        total=total, initial=num_done, desc="encoding", unit="passage", smoothing=0.02, disable=quiet
    ) as bar:
        for path, start, end in missing:
            texts = list(corpus.contents(start, end))
            vectors_ND = encoder.encode(texts, "passage", plan["batch_size"], bar.update)
            _write_shard(path, vectors_ND.numpy().astype(np.float16))


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
    missing = _missing_shards(folder, plan)
    quiet = not PartialState().is_main_process
    for path, start, end in tqdm(missing, desc=f"copying {index_file}", unit="shard", disable=quiet):
        _write_shard(path, vectors_ND[start:end].astype(np.float16))


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


def write_faiss(folder: Path, factory: str) -> None:
    """Builds folder/index.faiss from the shards: trained on a fixed sample, then filled shard by shard."""
    vectors = Vectors(folder)
    path = folder / "index.faiss"
    with written_aside(path, aside=folder / "index.faiss.partial") as aside:
        if factory == "Flat":
            write_flat(aside, vectors)
        else:
            faiss.write_index(_make_faiss(vectors, factory), str(aside))


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


def _try_faiss(factory: str, dim: int, plan: dict) -> None:
    """ValueError for an index that could not be made once the vectors are there; tries the first shards."""
    ends = [min(plan["num_passages"], number * plan["shard_rows"]) for number in range(3)]
    sizes = [min(end - start, TRIAL_ROWS) for start, end in itertools.pairwise(ends) if end > start]
    _empty_faiss(factory, dim, sizes)


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
        _try_faiss(factory, encoder.dim, plan)
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
    build.add_argument("--out", required=True, help="folder to make; an interrupted build is continued")
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
    """Builds, then prints what was built and how to serve it."""
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
    encoder = ""
    if manifest.get("encoder", Retriever.encoder) != Retriever.encoder:
        encoder = f" --encoder {manifest['encoder']}"
    print(
        f"{args.out}: {manifest['num_passages']:,} passages, index {manifest['index']}, "
        f"{_size(Path(args.out))}, made in {time.monotonic() - began:.0f} s"
    )
    print(f"serve it: python retriever_server.py --index {args.out} --corpus {args.corpus}{encoder}")


def _size(folder: Path) -> str:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _is_disk_fault(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return True
    # numpy's OSError has no errno; FAISS raises RuntimeError.
    return "requested and" in str(error) or "write error" in str(error)


def main() -> None:
    args = parse_arguments()
    try:
        check(Path(args.folder)) if args.command == "check" else build(args)
    except ValueError as error:
        message = str(error).replace("retriever.corpus", "--corpus").replace("retriever.encoder", "--encoder")
        print(f"error: {message}", file=sys.stderr)
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
