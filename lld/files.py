"""Files: written aside and renamed, JSON lines, checksums."""

import errno
import hashlib
import os
from contextlib import contextmanager
from pathlib import Path


def replace_file(path: Path, text: str, durable: bool = False) -> None:
    """Writes a file aside and renames it: whoever reads it, also after a kill, finds the old text or the new,
    whole; where `durable` also after a power cut, for a few ms."""
    aside = path.with_suffix(".partial")
    aside.unlink(missing_ok=True)  # it may be a link to elsewhere
    with naming(aside), open(aside, "w") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(aside, path)
    if durable:
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def fingerprint(path: Path) -> dict:
    """{"bytes", "sha256"} of a file, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


@contextmanager
def naming(path: Path):
    """A write that fails, as on a full disk, does not say to which file: now it does."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


DISK_ERRORS = tuple(
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EACCES", "EPERM", "EIO", "ENOTDIR", "ESTALE")
)


class WriteError(RuntimeError):
    """The run's folder takes no more; the message names the reason and what is left."""
