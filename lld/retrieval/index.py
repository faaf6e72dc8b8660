"""Index folders: their files, and checks that they are complete and match corpus, encoder and backend.

FOLDER/vectors/00000.npy …   shards (rows, D) float16, in the order of the corpus
FOLDER/index.faiss           built from the shards; absent with --index none, for the torch backend only
FOLDER/bm25/                 instead of both
FOLDER/manifest.json         written last, with size and checksum of every file
"""

import hashlib
import json
import resource
import sys
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from lld.config import Retriever
from lld.files import sha256_of
from lld.retrieval.corpus import Corpus
from lld.retrieval.encoder import Encoder, encoder_style, model_name

BUILD = (
    "python -m lld.retrieval build --corpus CORPUS --out FOLDER --encoder NAME --index "
    "flat|hnsw|ivf-pq|ivf-sq|none|bm25"
)
# Least cosine of one passage encoded twice; with E5 two unrelated passages have 0.7 to 0.8.
SAME_VECTOR = 0.95
# Files up to this size in total are checksummed at every opening, which takes a second.
VERIFY_BYTES = 1e9


class Vectors:
    """The vectors (N, D) of an index folder: float16 shards, memory-mapped, so opening reads only headers."""

    def __init__(self, folder: Path):
        paths = sorted((folder / "vectors").glob("[0-9]*.npy"), key=lambda path: (len(path.name), path.name))
        _allow_files(len(paths))
        self.shards = [_load_shard(path) for path in paths]
        self.starts = np.cumsum([0] + [len(shard) for shard in self.shards])
        self.dim = self.shards[0].shape[1] if self.shards else 0

    def __len__(self) -> int:
        return int(self.starts[-1])

    def take(self, rows: np.ndarray) -> np.ndarray:
        """The vectors of `rows` (any shape), float32, with D as the last dimension."""
        vectors = np.empty((rows.size, self.dim), np.float32)
        flat = rows.reshape(-1)
        shard_of = np.searchsorted(self.starts, flat, side="right") - 1
        for number in np.unique(shard_of):
            at = np.flatnonzero(shard_of == number)
            vectors[at] = self.shards[number][flat[at] - self.starts[number]]
        return vectors.reshape(*rows.shape, self.dim)


def _allow_files(num: int) -> None:
    """Raises this process's limit of open files for `num` maps: wiki-18 has 1,283, a shell allows 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    if num >= most:
        raise ValueError(
            f"{num} files of vectors are more than the {most} open files that are allowed here (ulimit -Hn): "
            "raise that limit, or build with a larger --shard-rows"
        )
    if soft != resource.RLIM_INFINITY and soft < num + 1024:  # for connections and the rest
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(num + 1024, most), hard))


def _load_shard(path: Path) -> np.ndarray:
    try:
        shard_ND = np.load(path, mmap_mode="c")  # copy-on-write: torch wants it writable
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): delete the folder and build it again (`{BUILD}`)"
        ) from None
    if shard_ND.dtype != np.float16 or shard_ND.ndim != 2:
        raise ValueError(
            f"{path} holds {shard_ND.dtype} of shape {shard_ND.shape}, not float16 vectors: delete the "
            f"folder and build it again (`{BUILD}`)"
        )
    return shard_ND


def read_manifest(folder: Path) -> dict:
    """The manifest of an index folder; ValueError if it is missing or damaged."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no manifest.json, so it is no index folder: make one with `{BUILD}`"
        )
    try:
        manifest = json.loads(path.read_text())
        named = [manifest[name] for name in ("index", "corpus_sha256", "num_passages")]
        files = {
            name: (int(about["bytes"]), str(about["sha256"]))
            for name, about in manifest.get("files", {}).items()
        }
        if not isinstance(named[0], str) or any(
            Path(name).is_absolute() or ".." in Path(name).parts for name in files
        ):
            raise TypeError("index or files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error!r:.200}): build the index again (`{BUILD}`)") from None
    return manifest


def built_for(manifest: dict) -> str:
    """The backend that an index folder was built for."""
    return {"bm25": "bm25", "none": "torch"}.get(manifest["index"], "faiss")


def match_manifest(folder: Path, manifest: dict, options: Retriever) -> None:
    """ValueError unless the folder is complete and was built for the encoder and backend of `options`."""
    part = {"faiss": "index.faiss", "torch": "vectors", "bm25": "bm25"}[options.backend]
    if built_for(manifest) != options.backend and (
        "bm25" in (built_for(manifest), options.backend) or not (folder / part).exists()
    ):
        raise ValueError(
            f"{folder} was built as {manifest['index']!r} and holds no {part}, which backend "
            f"{options.backend!r} reads: set retriever.backend {built_for(manifest)}, or build again "
            f"(`{BUILD}`)"
        )
    if options.backend != "bm25":
        _match_encoder(folder, manifest, options.encoder)
    if not (folder / part).exists():
        raise ValueError(f"{folder} is damaged: it holds no {part}; delete it and build it again (`{BUILD}`)")
    parts = (part, "vectors") if options.rerank else (part,)
    files = manifest.get("files", {})
    check_files(folder, {name: about for name, about in files.items() if name.split("/")[0] in parts})


def _match_encoder(folder: Path, manifest: dict, encoder: str) -> None:
    same_style = manifest.get("style") == encoder_style(encoder)
    # A model's folder may have moved, so only its name is compared.
    same_name = "encoder" in manifest and model_name(manifest["encoder"]) == model_name(encoder)
    if same_style and same_name:
        return
    name = "style" if not same_style else "encoder"
    value = encoder_style(encoder) if not same_style else encoder
    raise ValueError(
        f"{folder} was built with {name} {manifest.get(name)!r}, not {value!r}: set retriever.encoder to "
        f"match, or build again (`{BUILD}`)"
    )


def check_files(folder: Path, files: dict[str, dict], most_bytes: float = VERIFY_BYTES) -> None:
    """Compares files with the manifest's entries; ValueError names the first that differs.

    Sizes are always compared; checksums only if the files have at most `most_bytes` together.
    """
    total = sum(about["bytes"] for about in files.values())
    if total > most_bytes:
        print(
            f"retriever: checksums of {total / 1e9:.1f} GB are not compared; `python -m lld.retrieval "
            f"check {folder}` does",
            file=sys.stderr,
            flush=True,
        )
    quiet = total < 4e9 or total > most_bytes
    for name, about in tqdm(files.items(), desc="checksums", unit="file", disable=quiet):
        path = folder / name
        found = path.stat().st_size if path.is_file() else "no"
        if found != about["bytes"]:
            raise ValueError(
                f"{path} is damaged: {found} bytes instead of {about['bytes']}; delete {folder} and build "
                f"it again (`{BUILD}`)"
            )
        if total <= most_bytes and sha256_of(path) != about["sha256"]:
            raise ValueError(
                f"{path} is damaged: its checksum is not that of the build; delete {folder} and build it "
                f"again (`{BUILD}`)"
            )


def index_fingerprint(*parts) -> str:
    """A short name for an index, equal for equal `parts`.

    Parts are manifest, corpus, size and sampled content of a bare file, search options, and the questions
    that the oracle knows.
    """
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def check_vectors(where: str, num_vectors: int, dim: int, first_D, corpus: Corpus, encoder: Encoder) -> None:
    """ValueError unless the vectors were made by this encoder from this corpus.

    Compares count, dimension and passage 0. first_D: the stored vector of passage 0, or None to skip that
    comparison.
    """
    if num_vectors != len(corpus):
        raise ValueError(
            f"{where} holds {num_vectors} vectors but {corpus.path} holds {len(corpus)} passages: give the "
            f"corpus the index was built from, or build again ({BUILD})"
        )
    if dim != encoder.dim:
        raise ValueError(
            f"{where} has dimension {dim} but {encoder.name} gives {encoder.dim}: set retriever.encoder to "
            "the one the index was built with"
        )
    if first_D is not None:
        cosine = float(torch.as_tensor(first_D).float() @ encoder.encode([corpus[0].contents], "passage")[0])
        if cosine < SAME_VECTOR:
            raise ValueError(
                f"{where}: the stored vector of passage {corpus[0].id!r} and {encoder.name}'s agree only "
                f"to {cosine:.2f} (cosine): another encoder, or a corpus in another order; set "
                "retriever.encoder and retriever.corpus to those the index was built with"
            )
