"""File helpers: atomic replacement, JSON lines, checksums."""

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

DISK_ERRORS = {  # of the disk, or of a path that cannot be used; all others are bugs
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
    *(errno.ESTALE, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
}

# Blocks read from a large file, and bytes a block; smaller files are read completely.
PLACES, BLOCK = 64, 4096


class WriteError(RuntimeError):
    """A folder cannot be written; the message gives the reason."""


@contextmanager
def written_aside(path: Path, aside: Path | None = None, durable: bool = False):
    """Yields a temporary path to write to, which replaces `path` when the block ends.

    Readers see the old file or the new one, never a partial one. After an exception `path` is unchanged and
    the temporary file is removed; after a kill it may be left behind. With `durable` the new file also
    survives a power cut, at a cost of a few ms. An OSError names the file.
    """
    aside = aside or path.with_suffix(".partial")
    aside.unlink(missing_ok=True)  # could be a link to another file
    try:
        with naming(aside):
            yield aside
            if durable:
                flush_to_disk(aside)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    if durable:
        flush_to_disk(path.parent)


def replace_file(path: Path, text: str, durable: bool = False) -> None:
    """Replaces a text file atomically (`written_aside`)."""
    with written_aside(path, durable=durable) as aside:
        aside.write_text(text)


def flush_to_disk(path: Path) -> None:
    """Waits until a file, or a folder's directory entries, are on the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def append_jsonl(path: Path, rows: Iterable[dict]) -> None:
    """Appends JSON lines and returns when they are on the disk. An OSError names the file."""
    with naming(path), open(path, "a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, read in blocks; about 1 GB a second on one core."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def sampled_blocks(path: Path) -> Iterator[bytes]:
    """A small file whole, or PLACES blocks spread over a large one, to tell its content in milliseconds."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size <= PLACES * BLOCK:
            yield file.read()
            return
        for place in range(PLACES):
            file.seek(place * (size - BLOCK) // (PLACES - 1))
            yield file.read(BLOCK)


def fingerprint(path: Path) -> dict:
    """{"bytes", "sha256"} of a file."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


@contextmanager
def naming(path: Path):
    """Adds the file's name to an OSError without one, such as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None
