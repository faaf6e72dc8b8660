"""Passages of a corpus file: one JSON object a line, plain or in gzip."""

import array
import gzip
import json
import os
import zlib
from collections.abc import Iterator

import numpy as np

from lld.protocol import Passage, is_blank


def parse_passage(line: bytes, where: str) -> Passage:
    """The passage in one jsonl line, {"id": string or number, "contents": non-empty string}.

    Anything else raises ValueError with `where`.
    """
    try:
        # With bytes, json.loads takes twice as long: it guesses the encoding.
        record = json.loads(line.decode())
        name, contents = str(record["id"]), record["contents"]
        # A lone surrogate would only fail much later, in the tokenizer or in the server's reply.
        (name + contents).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f'{where}: {_start(line)} must be a JSON object with "id" and "contents" in UTF-8 ({reason}); '
            "mend or delete the line"
        ) from None
    if not isinstance(record["id"], (str, int)) or isinstance(record["id"], bool) or is_blank(contents):
        raise ValueError(
            f'{where}: {_start(line)} needs an "id" (string or number) and a non-empty "contents"; mend or '
            "delete the line"
        )
    return Passage(name, contents)


def _start(line: bytes) -> str:
    """The first 80 bytes of a line, for a message: control characters are escaped."""
    return repr(line[:80].decode(errors="replace").strip())


def open_lines(path: str):
    try:
        return gzip.open(path) if path.endswith(".gz") else open(path, "rb")
    except OSError as error:
        raise ValueError(
            f"cannot read {path} ({error.strerror}): mend its permissions, or give another corpus"
        ) from None


def unpacked_bytes(path: str) -> int:
    """The size of a corpus; that of a packed one is estimated from its first megabyte."""
    size = os.path.getsize(path)
    if not path.endswith(".gz"):
        return size
    try:
        with open(path, "rb") as file:
            packed = file.read(1 << 20)
        unpacker = zlib.decompressobj(wbits=31)  # gzip's format
        num_unpacked = len(unpacker.decompress(packed, 1 << 26))
    except (OSError, zlib.error):  # said when it is read
        return size
    num_read = len(packed) - len(unpacker.unconsumed_tail) - len(unpacker.unused_data)
    return size * num_unpacked // max(1, num_read)


def read_lines(file, path: str) -> Iterator[bytes]:
    try:
        yield from file
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"cannot unpack {path} ({error}): fetch it again") from None


def repeated_ids(path: str, hashes: array.array) -> Iterator[str]:
    """A message for each line whose id an earlier line had; `hashes` are those of the ids, line by line."""
    ordered = np.sort(np.frombuffer(hashes, np.int64))
    suspects = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    if not suspects:
        return
    seen: dict[str, int] = {}
    with open_lines(path) as file:
        for number, line in enumerate(file, start=1):
            if hashes[number - 1] in suspects:
                name = parse_passage(line, f"{path} line {number}").id
                if name in seen:
                    yield f"{path} line {number}: id {name!r} was used on line {seen[name]}; ids must differ"
                seen.setdefault(name, number)
