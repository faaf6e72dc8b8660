"""Files: written aside and renamed, JSON lines, checksums."""

import hashlib
import os
from pathlib import Path

from lld.record.metrics import naming


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
