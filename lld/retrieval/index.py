"""Index folders: float16 vectors in shards, a FAISS index made of them, a BM25 index, and the manifest that
vouches for them.

    FOLDER/vectors/00000.npy …   (rows, D) float16, one shard after another in the corpus's order
    FOLDER/index.faiss           made of the shards; absent where only the torch backend is to read them
    FOLDER/bm25/                 instead of both
    FOLDER/manifest.json         written last, with size and checksum of every file

A build works in FOLDER.partial and renames it at the end. Killed, it goes on from the last whole shard; as
shards are cut and batched by the corpus alone, the folder is the same to the bit (on one machine, with one
number of threads). A second build of the same folder is refused while the first runs.
"""

import fcntl
import hashlib
import io
import json
import os
import re
import sys
from datetime import timedelta
from pathlib import Path

import bm25s
import faiss
import numpy as np
import torch
from accelerate import PartialState
from tqdm import tqdm

from lld.config import Retriever
from lld.files import replace_file
from lld.retrieval import memory
from lld.retrieval.corpus import Corpus
from lld.retrieval.encoder import Encoder, encoder_style

BUILD = (
    "python -m lld.retrieval build --corpus CORPUS --out FOLDER --encoder NAME --index "
    "flat|hnsw|ivf-pq|ivf-sq|none|bm25"
)
SHARD_ROWS = 1 << 14  # what a kill can cost: 20 s of encoding on a GPU, minutes on a CPU
TRAIN_ROWS = 1 << 18  # vectors that k-means and quantisers are trained on, at most
# That processes wait for each other, who encode while one trains and adds for hours; torch's own limit is
# minutes
WAIT = timedelta(days=7)
SAME_VECTOR = 0.95  # cosine of one passage encoded twice; E5 gives two unrelated passages 0.7 to 0.8
VERIFY_BYTES = 1e9  # files up to this in sum are compared with their checksums at every opening (a second)
WORD = re.compile(r"\w+")


def faiss_factory(name: str, num_vectors: int, dim: int) -> str:
    """The FAISS factory string behind an alias, or `name` itself: 4 sqrt(N) lists to a power of two, PQ of 4
    dimensions a byte.

    "np" spares the annealing of polysemous codes, which took 60 of 61 s of training and serves a filter that
    is not used here.
    """
    lists = 1 << max(0, round(np.log2(4 * num_vectors**0.5)))
    # FAISS wants 39 training vectors a list
    while lists > 1 and 39 * lists > min(num_vectors, TRAIN_ROWS * 4):
        lists //= 2
    return {
        "flat": "Flat",
        "hnsw": "HNSW32",
        "ivf-pq": f"OPQ{dim // 4},IVF{lists},PQ{dim // 4}x8np",
        "ivf-sq": f"IVF{lists},SQ8",
    }.get(name, name)


class Vectors:
    """The vectors (N, D) of an index folder: float16 shards, memory-mapped, so that opening reads nothing."""

    def __init__(self, folder: Path):
        self.shards = [_load_shard(path) for path in sorted((folder / "vectors").glob("[0-9]*.npy"))]
        self.starts = np.cumsum([0] + [len(shard) for shard in self.shards])
        self.dim = self.shards[0].shape[1] if self.shards else 0

    def __len__(self) -> int:
        return int(self.starts[-1])

    def take(self, rows: np.ndarray) -> np.ndarray:
        """The vectors of `rows` (any shape), float32 with D as a last axis."""
        vectors = np.empty((rows.size, self.dim), np.float32)
        flat = rows.reshape(-1)
        shard_of = np.searchsorted(self.starts, flat, side="right") - 1
        for number in np.unique(shard_of):
            at = np.flatnonzero(shard_of == number)
            vectors[at] = self.shards[number][flat[at] - self.starts[number]]
        return vectors.reshape(*rows.shape, self.dim)


def _load_shard(path: Path) -> np.ndarray:
    try:
        shard_ND = np.load(path, mmap_mode="c")  # "c": torch wants a writable array
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


def _write_shard(path: Path, vectors_ND: np.ndarray) -> None:
    aside, buffer = path.with_suffix(".partial"), io.BytesIO()
    np.save(buffer, vectors_ND)  # not to the file: numpy's error of a full disk has no errno and no name
    with open(aside, "wb") as file:
        file.write(buffer.getbuffer())
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)  # a shard with its name is whole


def _missing_shards(folder: Path, plan: dict) -> list[tuple[Path, int, int]]:
    """(file, first row, end) of the shards that are not there; this process's share of them where there are
    several."""
    state = PartialState()
    starts = range(0, plan["num_passages"], plan["shard_rows"])
    shards = [
        (
            folder / "vectors" / f"{number:05d}.npy",
            start,
            min(start + plan["shard_rows"], plan["num_passages"]),
        )
        for number, start in enumerate(starts)
    ]
    return [shard for shard in shards[state.process_index :: state.num_processes] if not shard[0].exists()]


def encode_shards(folder: Path, corpus: Corpus, encoder: Encoder, plan: dict) -> None:
    """Encodes the shards that are missing, holding one at a time; several processes of accelerate share
    them."""
    state, missing = PartialState(), _missing_shards(folder, plan)
    done = len(corpus) // state.num_processes - sum(end - start for _, start, end in missing)
    with tqdm(
        total=len(corpus) // state.num_processes,
        initial=max(0, done),
        desc="encoding",
        unit="passage",
        smoothing=0.02,
        disable=not state.is_main_process,
    ) as bar:
        for path, start, end in missing:
            vectors_ND = encoder.encode(
                list(corpus.contents(start, end)), "passage", plan["batch_size"], bar.update
            )
            _write_shard(path, vectors_ND.numpy().astype(np.float16))


def import_shards(folder: Path, index_file: str, corpus: Corpus, encoder: Encoder, plan: dict) -> None:
    """Shards from the vectors of a flat FAISS file, such as Search-R1's `e5_Flat.index`, instead of from the
    encoder."""
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
    # Mapped, not read
    vectors_ND = faiss.rev_swig_ptr(index.get_xb(), index.ntotal * index.d).reshape(index.ntotal, index.d)
    check_vectors(index_file, index.ntotal, index.d, vectors_ND[0].copy(), corpus, encoder)
    for path, start, end in tqdm(
        _missing_shards(folder, plan),
        desc=f"copying {index_file}",
        unit="shard",
        disable=not PartialState().is_main_process,
    ):
        _write_shard(path, vectors_ND[start:end].astype(np.float16))


def write_flat(path: Path, vectors: Vectors) -> None:
    """A flat inner-product index as FAISS writes one (header, then float32 rows), streamed instead of held in
    memory."""
    header = bytearray(faiss.serialize_index(faiss.IndexFlatIP(vectors.dim)).tobytes())
    header[8:16] = len(vectors).to_bytes(8, "little")  # ntotal; before it come the kind and D, 4 bytes each
    header[-8:] = (len(vectors) * vectors.dim).to_bytes(8, "little")
    with open(path, "wb") as file:
        file.write(header)
        for shard in tqdm(
            vectors.shards, desc="writing index", unit="shard", disable=len(vectors.shards) < 8
        ):
            file.write(shard.astype(np.float32).tobytes())
            file.flush()
        os.fsync(file.fileno())


def write_faiss(folder: Path, factory: str) -> None:
    """folder/index.faiss from the shards: trained on a fixed sample, then filled shard by shard."""
    vectors, aside = Vectors(folder), folder / "index.faiss.partial"
    if factory == "Flat":
        write_flat(aside, vectors)
    else:
        try:
            index = faiss.index_factory(vectors.dim, factory, faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as error:
            raise ValueError(
                f"FAISS cannot make an index {factory!r} of dimension {vectors.dim} "
                f"({str(error).splitlines()[-1].strip()}): see its factory strings, or use flat, hnsw, "
                "ivf-pq or ivf-sq"
            ) from None
        if not index.is_trained:
            rows = np.random.default_rng(0).permutation(len(vectors))[:TRAIN_ROWS]
            index.train(vectors.take(np.sort(rows)))
        # FAISS looks at one list, or 16 neighbours, unless told otherwise
        if factory.startswith("HNSW") or "IVF" in factory:
            faiss.ParameterSpace().set_index_parameters(
                index, "efSearch=128" if factory.startswith("HNSW") else "nprobe=64"
            )
        for shard in tqdm(vectors.shards, desc=f"adding to {factory}", unit="shard"):
            index.add(shard.astype(np.float32))
        faiss.write_index(index, str(aside))
    os.replace(aside, folder / "index.faiss")


def build_bm25(corpus: Corpus) -> bm25s.BM25:
    """The BM25 index of a corpus (Lucene's formula, k1 0.9 and b 0.4 as in Pyserini)."""
    vocabulary: dict[str, int] = {}
    word_ids = []
    for contents in tqdm(
        corpus.contents(0, len(corpus)), total=len(corpus), desc="reading words", disable=len(corpus) < 10_000
    ):
        words = WORD.findall(contents.lower())
        word_ids.append(
            np.fromiter(
                (vocabulary.setdefault(word, len(vocabulary)) for word in words), np.int32, len(words)
            )
        )
    if not vocabulary:
        raise ValueError(f"{corpus.path} holds no word: BM25 has nothing to match")
    index = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
    index.index((word_ids, vocabulary), create_empty_token=False, show_progress=False)
    return index


def open_bm25(folder: Path, corpus: Corpus) -> bm25s.BM25:
    """The BM25 index of an index folder, mapped from the disk.

    ValueError where its files do not fit each other and the corpus.
    """
    remedy = f"delete the folder and build it again (`{BUILD}`)"
    try:
        index = bm25s.BM25.load(folder / "bm25", mmap=True, show_progress=False)
        starts, rows, words = index.scores["indptr"], index.scores["indices"], list(index.vocab_dict.values())
        whole = (
            len(index.scores["data"]) == len(rows) == int(starts[-1])
            and starts[0] == 0
            and bool((np.diff(starts) >= 0).all())
        )
        whole &= not words or (0 <= min(words) and max(words) < len(starts) - 1)
        if rows.nbytes <= VERIFY_BYTES and len(rows):
            whole &= 0 <= rows.min() and int(rows.max()) < len(corpus)
        whole &= index.scores["num_docs"] == len(corpus)
    except (
        OSError,
        EOFError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        RecursionError,
    ) as error:
        raise ValueError(
            f"{folder / 'bm25'} is damaged ({type(error).__name__}: {error}): {remedy}"
        ) from None
    if not whole:
        raise ValueError(
            f"{folder / 'bm25'} is damaged: its files do not fit each other, or not {len(corpus)} "
            f"passages; {remedy}"
        )
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
    """Makes, or goes on making, the index folder `out`.

    index: "flat", "hnsw", "ivf-pq", "ivf-sq" or a FAISS factory string; "none" leaves the shards to the torch
    backend; "bm25" needs no encoder. A finished folder of the same corpus and encoder gets this FAISS index
    instead of the one it has. vectors: a flat FAISS file to copy the vectors from. Raises ValueError where
    `out` holds something else, or the very same, or is being built by another process.
    """
    state, final, folder = (
        PartialState(cpu=not torch.cuda.is_available(), timeout=WAIT),
        Path(out),
        Path(f"{out}.partial"),
    )
    with state.main_process_first():  # the others find the Arrow file there
        corpus = Corpus(corpus_path)
    plan, factory = {"corpus_sha256": corpus.sha256, "num_passages": len(corpus)}, index
    if index != "bm25":
        encoder = Encoder(encoder_name, max_tokens)
        factory = faiss_factory(index, len(corpus), encoder.dim)
        plan |= {
            "encoder": encoder_name,
            "dim": encoder.dim,
            "style": encoder.style,
            "max_tokens": max_tokens,
            "shard_rows": shard_rows,
            "batch_size": batch_size,
            "vectors": vectors and Path(vectors).name,
        }
    if final.exists():
        folder = final
    lock = _lock(folder, final) if state.is_main_process else None
    try:
        if folder == final:
            _check_addition(final, plan, factory)
        elif state.is_main_process:
            _begin(folder, plan)
        state.wait_for_everyone()
        if index != "bm25":
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


def _lock(folder: Path, final: Path) -> int:
    """A lock on the folder itself, which leaves no file behind and goes with the process.

    ValueError where another process holds it.
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
    if folder != final and final.exists():  # another finished between our look and our lock
        os.close(lock)
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()
        raise ValueError(f"another process has just built {final}: open it, or choose another --out")
    return lock


def _begin(folder: Path, plan: dict) -> None:
    """Fills the folder of a build, or goes on in one that was begun with the same plan."""
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
    if "encoder" in plan:
        (folder / "vectors").mkdir(exist_ok=True)
    replace_file(path, json.dumps(plan, indent=2) + "\n")


def _finish(folder: Path, final: Path, manifest: dict) -> None:
    """Writes the manifest, with checksums of all files, and gives the folder its name."""
    for left in (folder / "plan.json", *folder.rglob("*.partial")):
        left.unlink(missing_ok=True)
    known = {}
    if folder == final:  # its vectors were not touched, and are not read again
        known = {
            name: about
            for name, about in read_manifest(final).get("files", {}).items()
            if name.startswith("vectors/")
        }
    paths = {
        str(path.relative_to(folder)): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }
    with tqdm(paths.items(), desc="checksums", unit="file", disable=len(paths) < 100) as bar:
        files = {
            name: known.get(name) or {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            for name, path in bar
        }
    replace_file(folder / "manifest.json", json.dumps(manifest | {"files": files}, indent=2) + "\n")
    if folder != final:
        folder.rename(final)


def _check_addition(final: Path, plan: dict, factory: str) -> None:
    """Refuses to work in a finished folder unless only its FAISS index is to be another."""
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


def read_manifest(folder: Path) -> dict:
    """What an index folder says of itself; ValueError where that is missing or damaged."""
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
    """ValueError unless the folder is whole and was built for `options`' encoder and backend."""
    part = {"faiss": "index.faiss", "torch": "vectors", "bm25": "bm25"}[options.backend]
    if built_for(manifest) != options.backend and (
        "bm25" in (built_for(manifest), options.backend) or not (folder / part).exists()
    ):
        raise ValueError(
            f"{folder} was built as {manifest['index']!r} and holds no {part}, which backend "
            f"{options.backend!r} reads: set retriever.backend {built_for(manifest)}, or build again "
            f"(`{BUILD}`)"
        )
    expected = (
        {}
        if options.backend == "bm25"
        else {"style": encoder_style(options.encoder), "encoder": options.encoder}
    )
    for name, value in expected.items():
        # A model's folder may have moved; its name may not
        last = lambda v: Path(v).name if name == "encoder" else v
        if name not in manifest or last(manifest[name]) != last(value):
            raise ValueError(
                f"{folder} was built with {name} {manifest.get(name)!r}, not {value!r}: set "
                f"retriever.encoder to match, or build again (`{BUILD}`)"
            )
    if not (folder / part).exists():
        raise ValueError(f"{folder} is damaged: it holds no {part}; delete it and build it again (`{BUILD}`)")
    parts = (part, "vectors") if options.rerank else (part,)
    check_files(
        folder,
        {name: about for name, about in manifest.get("files", {}).items() if name.split("/")[0] in parts},
    )


def sha256_of(path: Path) -> str:
    """The checksum of a file, about 1 GB a second on one core where the disk gives it."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def check_files(folder: Path, files: dict[str, dict], most_bytes: float = VERIFY_BYTES) -> None:
    """Compares files with the manifest's entries.

    Sizes always, checksums where the files are `most_bytes` in sum or fewer. Raises ValueError with the first
    file that is not as it was built.
    """
    total = sum(about["bytes"] for about in files.values())
    if total > most_bytes:
        print(
            f"retriever: checksums of {total / 1e9:.1f} GB are not compared; `python -m lld.retrieval "
            f"check {folder}` does",
            file=sys.stderr,
            flush=True,
        )
    for name, about in tqdm(
        files.items(), desc="checksums", unit="file", disable=total < 4e9 or total > most_bytes
    ):
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


def fingerprint(*parts) -> str:
    """A short name for an index: equal for equal `parts` (manifest, corpus, size and time of a bare file,
    search options)."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def check_vectors(where: str, num_vectors: int, dim: int, first_D, corpus: Corpus, encoder: Encoder) -> None:
    """Refuses vectors that are not this encoder's of this corpus; `first_D` is the stored vector of passage
    0, or None."""
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
