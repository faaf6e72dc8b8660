"""Estimates the memory of a retriever before it is loaded; if it is too much, names what would fit."""

import os
import re
import sys
from pathlib import Path

import psutil
import torch

GB = 1e9
CGROUP = Path("/sys/fs/cgroup")


def vector_bytes(factory: str, dim: int) -> float:
    """Bytes per vector in a FAISS index of this factory string.

    Sum of its code, its id in an inverted list, and its graph edges.

    >>> vector_bytes("Flat", 768), vector_bytes("IVF16384,SQ8", 768)
    (3072.0, 776.0)
    >>> vector_bytes("OPQ192,IVF16384,PQ192x8", 768)
    200.0
    """
    parts = factory.split(",")
    reduced = re.search(r"(?:OPQ\d+_|PCAR?|RR)(\d+)", parts[0])
    dim = int(reduced[1]) if reduced else dim
    code = 4.0 * dim
    for part in parts:
        if match := re.fullmatch(r"(?:HNSW\d+_)?PQ(\d+)(?:x(\d+))?(?:fsr?)?(?:np)?", part):
            code = int(match[1]) * int(match[2] or 8) / 8
        elif match := re.fullmatch(r"(?:HNSW\d+_)?SQ(fp16|bf16|\d+)", part):
            code = dim * (2 if match[1] in ("fp16", "bf16") else int(match[1]) / 8)
        elif match := re.fullmatch(r"RaBitQ(\d*)", part):
            bits = int(match[1] or 1)
            code = dim * bits / 8 + (8 if bits == 1 else 20)
    if any(part.startswith("IVF") for part in parts):
        code += 8
    if match := re.match(r"HNSW(\d+)", parts[0]):
        # Edges of the lowest level, 5 % for the levels above, and 12 bytes for level and offset.
        code += 4 * 2 * int(match[1]) * 1.05 + 12
    return code


def choices(num_vectors: int, dim: int) -> dict[str, float]:
    """Bytes of every way to hold the vectors, largest first."""

    def of(factory):
        return num_vectors * vector_bytes(factory, dim)

    return {
        "faiss hnsw": of("HNSW32"),
        "faiss flat": of("Flat"),
        "torch float16": num_vectors * dim * 2.0,
        "faiss ivf-sq": of("IVF1,SQ8"),
        "torch int8": num_vectors * (dim + 4.0),
        "faiss ivf-pq": of(f"IVF1,PQ{dim // 4}x8"),
    }


def available_bytes() -> float:
    """Memory that is still free: the machine's, or the control group's (cgroup v2) if that is less."""
    free = psutil.virtual_memory().available
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        # The page cache counts as used, but can be reclaimed.
        free = free if limit == "max" else min(free, int(limit) - int(used) + int(stat.get("file", 0)))
    except (OSError, ValueError):
        pass
    return float(free)


def gpu_bytes() -> float:
    """Free memory of all GPUs together, less a tenth of each for the searches themselves."""
    return sum(0.9 * torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count()))


def check(
    what: str,
    needed: float,
    num_vectors: int,
    dim: int,
    limit_gb: float | None = None,
    where: str = "memory",
    reserved: float = 0.0,
) -> None:
    """Prints the estimate; if `needed` bytes are not available, raises ValueError and names what would fit.

    Mapped files count in full: an exact search reads all of them for every batch, and from the disk if they
    do not fit. `reserved`: bytes of host memory that are already promised.
    """
    free = (
        limit_gb * GB if limit_gb is not None else gpu_bytes() if where == "GPU memory" else available_bytes()
    )
    free -= 0.0 if where == "GPU memory" else reserved
    print(
        f"retriever: {what}: {needed / GB:.2f} GB of {where}, {free / GB:.2f} GB available",
        file=sys.stderr,
        flush=True,
    )
    if needed <= free:
        return
    fitting = (
        [f"{name} ({size / GB:.2f} GB)" for name, size in choices(num_vectors, dim).items() if size <= free]
        if dim
        else []
    )
    if fitting:
        made = "made by `python -m lld.retrieval build`; --vectors FILE takes those of a flat FAISS file"
        remedy = f"what would fit: {', '.join(fitting)} ({made})"
    else:
        remedy = "nothing here would fit: use a machine with more, a smaller corpus, or a GPU"
    count = f" for {num_vectors:,} vectors of {dim}" if dim else ""
    raise ValueError(
        f"{what} needs {needed / GB:.2f} GB of {where}{count}, and {free / GB:.2f} GB are available; "
        f"{remedy}. retriever.max_memory_gb overrules the limit"
    )


def check_processes(what: str, needed: float) -> None:
    """ValueError if all processes of this machine, each with its own `needed` bytes, need more than it has.

    Of all its memory: what is free depends on how many of them have loaded theirs.
    """
    processes, total = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), float(psutil.virtual_memory().total)
    if processes > 1 and needed * processes > total:
        raise ValueError(
            f"{what} takes {needed / GB:.2f} GB in each of {processes} processes, more than the "
            f"{total / GB:.2f} GB of this machine: start retriever_server.py once and set retriever.url"
        )


def check_server(needed: float, limit_gb: float | None) -> None:
    """Like `check`, for a server's memory besides its index: cache, requests and replies in progress."""
    free = limit_gb * GB if limit_gb is not None else available_bytes()
    print(
        f"retriever: cache and requests: at most {needed / GB:.2f} GB of memory, {free / GB:.2f} GB "
        "available",
        file=sys.stderr,
        flush=True,
    )
    if needed > free:
        raise ValueError(
            f"cache and requests may need {needed / GB:.2f} GB of memory, and {free / GB:.2f} GB are "
            "available: lower --cache-mb, --max-passages or --max-body-mb, or raise --max-memory-gb"
        )


def check_build(factory: str, num_vectors: int, dim: int, train_rows: int) -> None:
    """Like `check`, for building a FAISS index.

    A flat index is streamed to the disk; any other is held in memory, with its training vectors.
    """
    held = (
        0.0
        if factory in ("Flat", "none")
        else num_vectors * vector_bytes(factory, dim)
        + (0.0 if factory.startswith("HNSW") else 4.0 * min(num_vectors, train_rows) * dim)
    )
    check(f"building {factory}", held, num_vectors, dim)
