"""Passages on disk: a jsonl file, read once into an Arrow file that is memory-mapped from then on."""

import array
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from tqdm import tqdm

from lld.data.passages import open_lines, parse_passage, read_lines, repeated_ids
from lld.protocol import Passage

# A file up to this size is read into memory at every start; no Arrow file is written for it.
SMALL_BYTES = 1 << 22
BATCH_ROWS = 1 << 14
SCHEMA = pa.schema([("id", pa.large_string()), ("contents", pa.large_string())])


class Corpus:
    """The passages of a jsonl or jsonl.gz file; `corpus[i]` is line i (from 0).

    Lines are parsed and checked once (about 8 µs each) and written to an Arrow file under $LLD_CACHE (default
    ~/.cache/lld). Later starts memory-map that file, as long as the jsonl keeps its size and modification
    time. Files up to SMALL_BYTES are read into memory instead. `sha256` is that of the uncompressed jsonl.
    Raises ValueError with file and line number for a malformed line and a repeated id, and for a missing or
    empty file.
    """

    def __init__(self, path: str | Path):
        self.path = str(path)
        if not Path(path).is_file():
            raise ValueError(
                f'no corpus file {path}: set retriever.corpus to a jsonl (or .jsonl.gz) of {{"id", '
                f'"contents"}}'
            )
        status = os.stat(path)
        self.source = {"size": str(status.st_size), "mtime_ns": str(status.st_mtime_ns)}
        if status.st_size <= SMALL_BYTES:
            sink = pa.BufferOutputStream()
            self._convert(sink)
            self._open(sink.getvalue())
            return
        arrow = arrow_path(path)
        if not self._open_cached(arrow):
            aside = arrow.with_suffix(f".{os.getpid()}.partial")
            try:
                arrow.parent.mkdir(parents=True, exist_ok=True)
                try:
                    with pa.OSFile(str(aside), "wb") as sink:
                        self._convert(sink)
                    os.replace(aside, arrow)  # atomic among processes
                finally:
                    aside.unlink(missing_ok=True)
            except OSError as error:
                raise ValueError(
                    f"cannot keep the passages of {path} in {arrow.parent} ({error}): make room there, or "
                    "set LLD_CACHE "
                    "to another folder"
                ) from None
            self._open(pa.memory_map(str(arrow)))

    def _open_cached(self, arrow: Path) -> bool:
        if not arrow.is_file():
            return False
        try:
            self._open(pa.memory_map(str(arrow)))
        except (pa.ArrowInvalid, OSError, KeyError):  # truncated, or another file
            return False
        return self.source == {name: self.about.get(name) for name in self.source}

    def _open(self, source) -> None:
        reader = pa.ipc.open_file(source)
        *self.batches, (_, about) = [
            reader.get_batch_with_custom_metadata(i) for i in range(reader.num_record_batches)
        ]
        self.batches = [batch for batch, _ in self.batches]
        self.about = {key.decode(): value.decode() for key, value in dict(about or {}).items()}
        self.sha256, self.num_passages = self.about["sha256"], int(self.about["num_passages"])

    def _convert(self, sink) -> None:
        """Writes batches of BATCH_ROWS passages; the metadata of a last, empty batch holds the checksum."""
        digest, hashes, rows, line = hashlib.sha256(), array.array("q"), [], b""
        size = os.path.getsize(self.path)
        with (
            pa.ipc.new_file(sink, SCHEMA) as writer,
            open_lines(self.path) as file,
            tqdm(desc=f"reading {self.path}", unit="passage", disable=size <= SMALL_BYTES) as bar,
        ):

            def flush():
                columns = [pa.array(column, pa.large_string()) for column in zip(*rows, strict=True)]
                writer.write_batch(pa.record_batch(columns, schema=SCHEMA))

            for number, line in enumerate(read_lines(file, self.path), start=1):
                digest.update(line)
                passage = parse_passage(line, f"{self.path} line {number}")
                hashes.append(hash(passage.id))  # 8 bytes each, less than the ids
                rows.append((passage.id, passage.contents))
                if len(rows) == BATCH_ROWS:
                    flush()
                    bar.update(len(rows))
                    rows.clear()
            if not hashes:
                raise ValueError(f"{self.path} is empty: a corpus needs at least one passage")
            if rows:
                flush()
            if problem := next(repeated_ids(self.path, hashes), None):
                raise ValueError(problem)
            about = {"sha256": digest.hexdigest(), "num_passages": str(len(hashes)), **self.source}
            writer.write_batch(pa.record_batch([[], []], schema=SCHEMA), custom_metadata=about)

    def __len__(self) -> int:
        return self.num_passages

    def __getitem__(self, row: int) -> Passage:
        return self.passage(row)

    def passage(self, row: int, score: float = 0.0) -> Passage:
        """The passage on line `row` (from 0), with the score of a search."""
        batch, at = self.batches[row // BATCH_ROWS], row % BATCH_ROWS
        return Passage(batch.column(0)[at].as_py(), batch.column(1)[at].as_py(), score)

    def contents(self, start: int, end: int) -> Iterator[str]:
        """The texts of passages [start, end), one by one."""
        while start < end:
            at = start % BATCH_ROWS
            some = self.batches[start // BATCH_ROWS].column(1).slice(at, end - start)
            yield from some.to_pylist()
            start += len(some)


def arrow_path(path: str | Path) -> Path:
    """The path of a corpus's Arrow file.

    It depends on the corpus's path alone, so the file of a changed corpus replaces the old one.
    """
    folder = Path(os.environ.get("LLD_CACHE") or "~/.cache/lld").expanduser() / "corpora"
    resolved = Path(path).resolve()
    return folder / f"{resolved.name}-{hashlib.sha256(str(resolved).encode()).hexdigest()[:16]}.arrow"


def count_hits(corpus: Corpus, topk: int) -> int:
    """`topk`, or all passages of a smaller corpus."""
    if topk < 1:
        raise ValueError(f"topk = {topk}: must be 1 or more")
    return min(topk, len(corpus))


def take_hits(corpus: Corpus, rows, scores) -> list[Passage]:
    """The passages of `rows` with their scores; rows of -1 (FAISS found fewer) are left out."""
    return [
        corpus.passage(int(row), float(score)) for row, score in zip(rows, scores, strict=True) if row >= 0
    ]
