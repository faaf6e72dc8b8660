"""Fetches Search-R1's questions, passages and index from the Hugging Face hub: `python -m lld.data get`.

The hub's own commands begin a file anew after a kill; these files have tens of GB. Here a file is written to
NAME.CHECKSUM.partial, continued where it ended, compared with the hub's checksum and then renamed.
RECORD says what was compared, so that nothing is fetched or read twice.
"""

import fcntl
import gzip
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import httpx
from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers
from tqdm import tqdm

from lld.files import naming, replace_file, written_aside

RECORD = "fetched.json"
BLOCK_BYTES = 1 << 22
# wiki-18.jsonl is 2.8 times as large as its gzip file, whose own entry of the size wraps at 4 GB.
UNPACKED = 3.0
FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
BENCHMARKS = {
    "nq": "nq/test.jsonl",
    "triviaqa": "triviaqa/test.jsonl",
    "popqa": "popqa/test.jsonl",
    "hotpotqa": "hotpotqa/dev.jsonl",
    "2wiki": "2wikimultihopqa/dev.jsonl",
    "musique": "musique/dev.jsonl",
    "bamboogle": "bamboogle/test.jsonl",
}


class HubError(RuntimeError):
    """The hub does not give a file, or gives a damaged one; the message holds the remedy."""


@dataclass(frozen=True)
class Source:
    repository: str  # a data set of the hub
    name: str  # the file's path there
    path: str  # its path in the folder that receives it


@dataclass(frozen=True)
class Part:
    """Files that are fetched together, and the file that is joined or unpacked from them, if any."""

    sources: tuple[Source, ...]
    makes: str | None = None


@dataclass(frozen=True)
class File:
    """A `Source` as the hub describes it."""

    url: str  # at a fixed commit
    path: str
    size: int  # bytes
    # SHA-256 of a large file, git's SHA-1 of a small one
    checksum: str


PARTS = {
    "questions": Part(
        (
            Source("PeterJinGo/nq_hotpotqa_train", "train.parquet", "questions/train.parquet"),
            *(Source(FLASHRAG, name, f"questions/{name}") for name in BENCHMARKS.values()),
        )
    ),
    "corpus": Part(
        (Source("PeterJinGo/wiki-18-corpus", "wiki-18.jsonl.gz", "wiki-18.jsonl.gz"),), makes="wiki-18.jsonl"
    ),
    "index": Part(
        tuple(Source("PeterJinGo/wiki-18-e5-index", name, name) for name in ("part_aa", "part_ab")),
        makes="e5_Flat.index",
    ),
}


def get(names: Sequence[str], to: Path, delete_parts: bool = False) -> None:
    """Makes the files of the PARTS called `names` in the folder `to`; a second call goes on where one ended.

    With `delete_parts` what a file was joined or unpacked from is removed afterwards. Raises ValueError for a
    mistake, such as a disk that is too small; HubError if the hub does not give a file; OSError for the disk.
    """
    to.mkdir(parents=True, exist_ok=True)
    with naming(to), _locked(to):
        record = _Record(to)
        jobs = [
            _Job(name, PARTS[name].makes, _look_up(PARTS[name]), record) for name in PARTS if name in names
        ]
        for job in jobs:
            job.adopt()
            print(job.describe(), flush=True)
        refuse_full_disk(jobs, to, delete_parts)
        for job in jobs:
            job.carry_out()
            if delete_parts and job.makes is not None:
                for file in job.files:
                    (to / file.path).unlink(missing_ok=True)


@contextmanager
def _locked(to: Path) -> Iterator[None]:
    with open(to / f"{RECORD}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another command is fetching into {to}: wait for its end") from None
        yield


class _Record:
    """Which files of the folder are known to be right: RECORD, {path: size, and what it was made from}."""

    def __init__(self, to: Path):
        self.to, self.path = to, to / RECORD
        try:
            self.entries = json.loads(self.path.read_text()) if self.path.is_file() else {}
        except ValueError:
            raise ValueError(f"{self.path} is damaged: delete it, and its files are compared anew") from None

    def holds(self, path: str, files: Sequence[File]) -> bool:
        """Whether the file at `path` is the one that was made of these files."""
        there = self.to / path
        known = there.is_file() and path in self.entries
        return known and self.entries[path] | _entry(there, files) == self.entries[path]

    def add(self, path: str, files: Sequence[File], there: Path) -> None:
        """Records what `path` holds, or will hold when the complete file `there` has got that name."""
        self.entries[path] = _entry(there, files) | {"from": [file.url for file in files]}
        replace_file(self.path, json.dumps(self.entries, indent=1) + "\n", durable=True)

    def adopt(self, path: str, files: Sequence[File]) -> None:
        """Records a file that somebody else put there, if it holds these files, one after the other.

        Raises ValueError if it holds something else: it is not overwritten.
        """
        there = self.to / path
        if self.holds(path, files) or not there.exists():
            return
        unpacked = files[0].path.endswith(".gz") and not path.endswith(".gz")
        if unpacked or not _equals(there, files):
            raise ValueError(
                f"{there} is not what this command puts there: rename or delete it, or leave its part out of "
                "--what"
            )
        self.add(path, files, there)


def _entry(there: Path, files: Sequence[File]) -> dict:
    return {"bytes": there.stat().st_size, "checksums": [file.checksum for file in files]}


@dataclass(frozen=True)
class _Job:
    """A part's files on the hub, and how many of them are here already."""

    name: str
    makes: str | None
    files: Sequence[File]
    record: _Record

    def adopt(self) -> None:
        if self.makes is not None:
            self.record.adopt(self.makes, self.files)
        for file in self.files if not self.is_done() else ():
            self.record.adopt(file.path, [file])

    def is_done(self) -> bool:
        if self.makes is not None:
            return self.record.holds(self.makes, self.files)
        return all(self.record.holds(file.path, [file]) for file in self.files)

    def bytes_to_fetch(self) -> int:
        return 0 if self.is_done() else sum(map(self._missing, self.files))

    def _missing(self, file: File) -> int:
        if self.record.holds(file.path, [file]):
            return 0
        partial = _partial(self.record.to, file)
        return file.size - (partial.stat().st_size if partial.is_file() else 0)

    def bytes_to_write(self) -> int:
        """The size of what is still to be joined or unpacked; of a gzip file it is estimated."""
        if self.makes is None or self.is_done():
            return 0
        return int(sum(file.size * (UNPACKED if file.path.endswith(".gz") else 1) for file in self.files))

    def describe(self) -> str:
        fetched, written = self.bytes_to_fetch(), self.bytes_to_write()
        parts = [f"{size_text(fetched)} to fetch"] * (fetched > 0)
        parts += [f"about {size_text(written)} to write"] * (written > 0)
        total = size_text(sum(file.size for file in self.files))
        return f"{self.name}: {total} on the hub, {', '.join(parts) or 'complete here'}"

    def carry_out(self) -> None:
        if self.is_done():
            return
        for file in self.files:
            if not self.record.holds(file.path, [file]):
                _fetch(file, self.record)
        if self.makes is not None:
            _make(self.makes, self.files, self.record)


def refuse_full_disk(jobs: Sequence[_Job], to: Path, delete_parts: bool) -> None:
    """Raises ValueError where the folder's disk has less room than the command takes at its peak."""
    used = peak = 0
    for job in jobs:
        used += job.bytes_to_fetch() + job.bytes_to_write()
        peak = max(peak, used)
        if delete_parts and job.bytes_to_write():
            used -= sum(file.size for file in job.files)
    free = shutil.disk_usage(to).free
    if peak > free:
        remedy = "give --to on another disk, or fewer parts by --what"
        raise ValueError(
            f"{to} has {size_text(free)} free, and {size_text(peak)} are needed at the peak: {remedy}"
            + ("" if delete_parts else ", or --delete-parts")
        )
    if peak:
        print(f"{size_text(peak)} needed at the peak, {size_text(free)} free in {to}", flush=True)


def size_text(size: float) -> str:
    """A number of bytes for people."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} bytes"


def _look_up(part: Part) -> list[File]:
    return [look_up(source) for source in part.sources]


def look_up(source: Source) -> File:
    """Asks the hub for a file's size, checksum and commit; HubError if it does not say."""
    where = {"repo_id": source.repository, "filename": source.name, "repo_type": "dataset"}
    with _of_the_hub(source.repository):
        about = get_hf_file_metadata(hf_hub_url(**where), token=False, timeout=20)
        if about.size is None or about.commit_hash is None or len(about.etag or "") not in (40, 64):
            raise HubError(f"the hub gives neither size nor checksum of {source.repository}/{source.name}")
        url = hf_hub_url(**where, revision=about.commit_hash)
    return File(url, source.path, about.size, about.etag)


@contextmanager
def _of_the_hub(what: str) -> Iterator[None]:
    """Turns errors of the connection into HubError."""
    offline = (
        "on a machine without network, run the same command on one that has it, copy the folder, and give "
        "the same paths"
    )
    try:
        yield
    except errors.OfflineModeIsEnabled:
        raise HubError(f"HF_HUB_OFFLINE is set, so {what} is not asked for: unset it, or {offline}") from None
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        raise HubError(f"the hub refuses {what} ({code}): give the same command again later") from None
    except (httpx.HTTPError, ConnectionError) as error:
        raise HubError(
            f"the hub does not answer for {what} ({type(error).__name__}: {error}): give the same command "
            f"again, which goes on from here; {offline}"
        ) from None


def _partial(to: Path, file: File) -> Path:
    return to / f"{file.path}.{file.checksum[:12]}.partial"


def _fetch(file: File, record: _Record) -> None:
    """Fetches a file, or the rest of it, and compares its checksum."""
    partial, there = _partial(record.to, file), record.to / file.path
    partial.parent.mkdir(parents=True, exist_ok=True)
    if partial.is_file() and partial.stat().st_size > file.size:
        partial.unlink()
    headers = build_hf_headers(token=False) | {"Accept-Encoding": "identity"}
    with _of_the_hub(file.path), open(partial, "ab") as out:
        try:
            http_get(
                file.url,
                out,
                resume_size=out.tell(),
                headers=headers,
                expected_size=file.size,
                displayed_filename=file.path,
            )
        except OSError as error:
            if error.errno is not None or isinstance(error, httpx.HTTPError | ConnectionError):
                raise
            raise HubError(f"{file.path} ended early or late ({error})") from None
    if not _equals(partial, [file]):
        partial.unlink()
        raise HubError(
            f"{file.path} arrived damaged (its checksum is not the hub's {file.checksum}) and was "
            "removed: the same command fetches it again, and no other file"
        )
    record.add(file.path, [file], partial)
    os.replace(partial, there)


def _equals(path: Path, files: Sequence[File]) -> bool:
    """Whether a file holds these files, one after the other, by size and checksum."""
    total = sum(file.size for file in files)
    if path.stat().st_size != total:
        return False
    with open(path, "rb") as opened, _bar(f"checking {path.name}", total) as bar:
        return all(_digest(opened, file, bar) == file.checksum for file in files)


def _digest(opened, file: File, bar: tqdm) -> str:
    """The checksum of the next `file.size` bytes, of the kind that the hub gives of it."""
    digest = hashlib.sha256() if len(file.checksum) == 64 else hashlib.sha1(f"blob {file.size}\0".encode())
    left = file.size
    while left and (block := opened.read(min(left, BLOCK_BYTES))):
        digest.update(block)
        left -= len(block)
        bar.update(len(block))
    return digest.hexdigest()


def _make(makes: str, files: Sequence[File], record: _Record) -> None:
    """Joins the files, or unpacks the only one, into the file called `makes`."""
    there = record.to / makes
    with (
        written_aside(there, there.with_name(f"{makes}.partial"), durable=True) as aside,
        open(aside, "wb") as out,
        _bar(f"writing {makes}", sum(file.size for file in files)) as bar,
    ):
        for file in files:
            _append(record.to / file.path, out, bar)
        out.flush()
        record.add(makes, files, aside)


def _append(path: Path, out, bar: tqdm) -> None:
    """Appends a file to `out`, unpacked if it is a gzip file."""
    read = 0
    with open(path, "rb") as raw, gzip.open(raw) if path.suffix == ".gz" else nullcontext(raw) as opened:
        while block := opened.read(BLOCK_BYTES):
            out.write(block)
            bar.update(raw.tell() - read)
            read = raw.tell()


def _bar(text: str, total: int) -> tqdm:
    return tqdm(desc=text, total=total, unit="B", unit_scale=True, disable=None if total > 1 << 28 else True)
