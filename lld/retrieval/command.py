"""`python -m lld.retrieval build`, and `check`."""

import argparse
import os
import shlex
import shutil
import sys
import time
from pathlib import Path

import torch

from lld.config import Retriever
from lld.files import DISK_ERRORS
from lld.retrieval.build import build_index
from lld.retrieval.index import check_files, read_manifest
from lld.retrieval.shards import SHARD_ROWS


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
    args = parser.parse_args(arguments)
    for name in ("max_tokens", "batch_size", "shard_rows") if args.command == "build" else ():
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if args.command == "build" and args.vectors and not Path(args.vectors).is_file():
        parser.error(f"--vectors {args.vectors}: there is no such file")
    return args


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
        encoder = f" --encoder {shlex.quote(manifest['encoder'])}"
    print(
        f"{args.out}: {manifest['num_passages']:,} passages, index {manifest['index']}, "
        f"{_size(Path(args.out))}, made in {time.monotonic() - began:.0f} s"
    )
    index, corpus = shlex.quote(args.out), shlex.quote(args.corpus)
    print(f"serve it: python retriever_server.py --index {index} --corpus {corpus}{encoder}")


def _size(folder: Path) -> str:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _is_disk_fault(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return True
    # numpy's OSError has no errno; FAISS raises RuntimeError.
    return "requested and" in str(error) or "write error" in str(error)
