"""Passages for queries: corpus, encoder, three search backends, and `python -m lld.retrieval build`.

A backend is a class with `search(queries, topk) -> list[list[Passage]]`, best passage first:

- faiss: an exact inner-product index, or any other file `faiss.read_index` opens, memory-mapped, on the CPU. Search-R1's
  own `e5_Flat.index` and `wiki-18.jsonl` work as they are.
- torch: exact search, chunk by chunk, over a float16 or float32 matrix on disk; on the GPU where there is one.
- bm25: words (k1 0.9, b 0.4), no neural encoder. Without an index folder it is built in memory when opened. A word is a run
  of letters and digits in lower case: no stemming and no stop words, which would confuse or lose made-up names. Equal
  scores come in corpus order, and passages that share no word with the query fill up the list with score 0.
"""

import argparse
import gzip
import hashlib
import json
import mmap
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import bm25s
import faiss
import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer

from lld.config import Retriever
from lld.protocol import Passage

BUILD = "python -m lld.retrieval build --corpus CORPUS --out FOLDER --encoder NAME --backend faiss|torch|bm25"
SCAN_BYTES = 1 << 26
CHUNK_ROWS = 1 << 16  # vectors scored at once by the torch backend
SAME_VECTOR = 0.95  # cosine of one passage encoded twice; E5 gives two unrelated passages 0.7 to 0.8
WORD = re.compile(r"\w+")


def parse_passage(line: bytes, where: str, score: float = 0.0) -> Passage:
    """The passage in one jsonl line; ValueError naming `where` unless it is {"id": …, "contents": non-empty string}."""
    try:
        record = json.loads(line.decode())  # given bytes, json.loads takes as long again to guess the encoding
        record["contents"].encode()  # a lone surrogate would break the tokenizer and the server's reply much later
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{where}: {line[:80]!r} must be a JSON object with \"id\" and \"contents\" in UTF-8 ({error!r}); mend or delete the line") from None
    if not isinstance(record.get("id"), (str, int)) or not record["contents"].strip():
        raise ValueError(f"{where}: {line[:80]!r} needs an \"id\" (string or number) and a non-empty \"contents\"; mend or delete the line")
    return Passage(str(record["id"]), record["contents"], score)


class Corpus:
    """A jsonl file of passages, memory-mapped: only where lines start is held, and `corpus[i]` parses line i.

    A .gz is unpacked into an unnamed temporary file, so leave a big corpus unpacked. `sha256` is of the unpacked bytes.
    With `validate` every line is parsed once (about 4 µs each); without, a fingerprint must vouch for the file.
    Raises ValueError for a missing or empty file, a malformed line and a repeated id, with file and line number.
    """

    def __init__(self, path: str | Path, validate: bool = True):
        self.path = str(path)
        if not Path(path).is_file():
            raise ValueError(f"no corpus file {path}: set retriever.corpus to a jsonl (or .jsonl.gz) of {{\"id\", \"contents\"}}")
        with tempfile.TemporaryFile() if self.path.endswith(".gz") else open(path, "rb") as file:
            if self.path.endswith(".gz"):
                try:
                    with gzip.open(path) as packed:
                        shutil.copyfileobj(packed, file, SCAN_BYTES)
                except (EOFError, OSError) as error:
                    raise ValueError(f"cannot unpack {path} ({error}): fetch it again") from None
                file.flush()
            if file.seek(0, 2) == 0:
                raise ValueError(f"{path} is empty: a corpus needs at least one passage")
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # outlives the file object
        digest, ends = hashlib.sha256(), []
        for start in range(0, len(self.bytes), SCAN_BYTES):
            block = self.bytes[start : start + SCAN_BYTES]
            digest.update(block)
            ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + start + 1)
        if self.bytes[-1:] != b"\n":
            ends.append([len(self.bytes)])
        self.bounds = np.concatenate([[0], *ends]).astype(np.int64)
        self.sha256 = digest.hexdigest()
        if validate:
            self._refuse_repeated_ids()

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, row: int) -> Passage:
        return self.passage(row)

    def passage(self, row: int, score: float = 0.0) -> Passage:
        """The passage on line `row` (from 0), with a search's score."""
        return parse_passage(self.bytes[self.bounds[row] : self.bounds[row + 1]], f"{self.path} line {row + 1}", score)

    def _refuse_repeated_ids(self) -> None:
        rows = tqdm(range(len(self)), desc=f"checking {self.path}", disable=len(self) < 1_000_000)
        hashes = np.fromiter((hash(self[row].id) for row in rows), np.int64, len(self))  # 8 bytes a passage, unlike a set of ids
        order = np.argsort(hashes, kind="stable")
        for at in np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]]):
            first, second = order[at], order[at + 1]
            if self[first].id == self[second].id:
                raise ValueError(f"{self.path} line {second + 1}: id {self[second].id!r} was used on line {first + 1}; ids must differ")


def encoder_style(name: str) -> dict[str, str]:
    """What an encoder expects, from the last part of its name: {"query": prefix, "passage": prefix, "pooling": "mean" | "cls"}.

    "e5" as a word of the name: "query: " / "passage: ", mean. "bge": an instruction before queries, CLS. Any other: no
    prefix, mean. These are Search-R1's rules. `1_Pooling/config.json` in a local folder overrules the pooling; ValueError
    if it asks for another kind.
    """
    words = re.split(r"[^a-z0-9]+", Path(name).name.lower())
    style = {"query": "", "passage": "", "pooling": "mean"}
    if "e5" in words:
        style |= {"query": "query: ", "passage": "passage: "}
    elif "bge" in words:
        style |= {"query": "Represent this sentence for searching relevant passages: ", "pooling": "cls"}
    pooling_file = Path(name) / "1_Pooling" / "config.json"
    if pooling_file.is_file():
        options = json.loads(pooling_file.read_text())
        modes = [key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for key, on in options.items() if on is True and key.startswith("pooling_mode_")]
        mode = options.get("pooling_mode") or "+".join(modes)  # sentence-transformers >= 6 writes one name
        if mode not in ("mean", "cls"):
            raise ValueError(f"{pooling_file} asks for {mode!r} pooling: use an encoder with mean or cls pooling")
        style["pooling"] = mode
    return style


class Encoder:
    """A text encoder from a hub name or folder: fp16 on a GPU, fp32 on the CPU; safe to call from several threads."""

    def __init__(self, name: str, max_tokens: int = 256):
        self.name, self.max_tokens, self.style = name, max_tokens, encoder_style(name)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(name)
            self.model = AutoModel.from_pretrained(name, dtype=torch.float16 if self.device.type == "cuda" else torch.float32)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot load the encoder {name!r}: give retriever.encoder a hub name or a folder with model and tokenizer ({error})") from None
        self.model.to(self.device).eval()
        self.dim = self.model.config.hidden_size
        self.lock = threading.Lock()  # a fast tokenizer refuses two threads at once ("Already borrowed")

    @torch.inference_mode()
    def encode(self, texts: list[str], kind: str, batch_size: int = 32) -> torch.Tensor:
        """Unit vectors (Q, D), float32 on the CPU, of "query" or "passage" texts cut at `max_tokens`, in the order given."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # texts of like length share a batch: less padding
        vectors_QD = torch.empty(len(texts), self.dim)
        for start in range(0, len(texts), batch_size):
            rows = order[start : start + batch_size]
            prefixed = [self.style[kind] + texts[row] for row in rows]
            with self.lock:
                tokens = self.tokenizer(prefixed, padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt").to(self.device)
            hidden_QTD = self.model(**tokens).last_hidden_state.float()
            if self.style["pooling"] == "cls":
                pooled_QD = hidden_QTD[:, 0]
            else:
                mask_QT1 = tokens["attention_mask"].unsqueeze(-1)
                pooled_QD = (hidden_QTD * mask_QT1).sum(1) / mask_QT1.sum(1)
            vectors_QD[rows] = torch.nn.functional.normalize(pooled_QD, dim=-1).cpu()
        return vectors_QD


def _num_hits(corpus: Corpus, topk: int) -> int:
    if topk < 1:
        raise ValueError(f"topk = {topk}: must be 1 or more")
    return min(topk, len(corpus))


def _hits(corpus: Corpus, rows, scores) -> list[Passage]:
    return [corpus.passage(int(row), float(score)) for row, score in zip(rows, scores) if row >= 0]  # -1: FAISS found fewer


def _check_vectors(where: str, num_vectors: int, dim: int, first_D, corpus: Corpus, encoder: Encoder) -> None:
    """Refuses vectors that are not this encoder's of this corpus; `first_D` is the stored vector of passage 0, or None."""
    if num_vectors != len(corpus):
        raise ValueError(f"{where} holds {num_vectors} vectors but {corpus.path} holds {len(corpus)} passages: give the corpus the index was built from, or build again ({BUILD})")
    if dim != encoder.dim:
        raise ValueError(f"{where} has dimension {dim} but {encoder.name} gives {encoder.dim}: set retriever.encoder to the one the index was built with")
    if first_D is not None:
        cosine = float(torch.as_tensor(first_D).float() @ encoder.encode([corpus[0].contents], "passage")[0])
        if cosine < SAME_VECTOR:
            raise ValueError(f"{where}: the stored vector of passage {corpus[0].id!r} and {encoder.name}'s agree only to {cosine:.2f} (cosine): another encoder, or a corpus in another order; set retriever.encoder and retriever.corpus to those the index was built with")


class FaissSearch:
    """Search in a FAISS index file; an L2 index gets negated distances as scores, so that higher is always better."""

    backend = "faiss"

    def __init__(self, path: Path, corpus: Corpus, encoder: Encoder):
        self.corpus, self.encoder = corpus, encoder
        try:
            self.index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise ValueError(f"{path} is not a FAISS index ({str(error).splitlines()[0]}): give an index file or a folder made by `{BUILD}`") from None
        try:
            first_D = self.index.reconstruct(0) if self.index.metric_type == faiss.METRIC_INNER_PRODUCT else None
        except RuntimeError:  # some compressed indexes cannot give a vector back
            first_D = None
        _check_vectors(str(path), self.index.ntotal, self.index.d, first_D, corpus, encoder)

    def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        num_hits = _num_hits(self.corpus, topk)
        if not queries:
            return []
        scores_QK, rows_QK = self.index.search(self.encoder.encode(queries, "query").numpy(), num_hits)
        if self.index.metric_type != faiss.METRIC_INNER_PRODUCT:
            scores_QK = -scores_QK
        return [_hits(self.corpus, rows_K, scores_K) for rows_K, scores_K in zip(rows_QK, scores_QK)]


class TorchSearch:
    """Exact inner-product search over an .npy matrix; kept on the GPU if that leaves half of its free memory to others."""

    backend = "torch"

    def __init__(self, path: Path, corpus: Corpus, encoder: Encoder):
        self.corpus, self.encoder = corpus, encoder
        self.vectors_ND = torch.from_numpy(np.load(path, mmap_mode="c"))  # "c": torch wants a writable array; nothing is written
        _check_vectors(str(path), *self.vectors_ND.shape, self.vectors_ND[0], corpus, encoder)
        if encoder.device.type == "cuda" and self.vectors_ND.nbytes < torch.cuda.mem_get_info(encoder.device)[0] / 2:
            self.vectors_ND = self.vectors_ND.to(encoder.device)

    @torch.inference_mode()
    def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        num_hits = _num_hits(self.corpus, topk)
        if not queries:
            return []
        queries_QD = self.encoder.encode(queries, "query").to(self.encoder.device)
        scores_QK = torch.empty(len(queries), 0, device=self.encoder.device)
        rows_QK = torch.empty(len(queries), 0, dtype=torch.long, device=self.encoder.device)
        for start in range(0, len(self.corpus), CHUNK_ROWS):
            chunk_ND = self.vectors_ND[start : start + CHUNK_ROWS].to(self.encoder.device).float()  # products in half would tie
            scores_QN = queries_QD @ chunk_ND.T
            best_QK, at_QK = scores_QN.topk(min(num_hits, scores_QN.shape[1]))
            scores_QK, rows_QK = torch.cat([scores_QK, best_QK], 1), torch.cat([rows_QK, at_QK + start], 1)
            scores_QK, kept_QK = scores_QK.topk(min(num_hits, scores_QK.shape[1]))
            rows_QK = rows_QK.gather(1, kept_QK)
        return [_hits(self.corpus, rows_K, scores_K) for rows_K, scores_K in zip(rows_QK.tolist(), scores_QK.tolist())]


def build_bm25(corpus: Corpus) -> bm25s.BM25:
    """The BM25 index of a corpus (Lucene's formula, k1 0.9 and b 0.4 as in Pyserini)."""
    vocabulary: dict[str, int] = {}
    rows = tqdm(range(len(corpus)), desc="reading words", disable=len(corpus) < 10_000)
    word_ids = [[vocabulary.setdefault(word, len(vocabulary)) for word in WORD.findall(corpus[row].contents.lower())] for row in rows]
    if not vocabulary:
        raise ValueError(f"{corpus.path} holds no word: BM25 has nothing to match")
    index = bm25s.BM25(k1=0.9, b=0.4, method="lucene")
    index.index((word_ids, vocabulary), create_empty_token=False, show_progress=False)
    return index


class BM25Search:
    """Search by words; the same query always gives the same passages in the same order."""

    backend = "bm25"
    encoder = None

    def __init__(self, index: bm25s.BM25, corpus: Corpus):
        self.index, self.corpus = index, corpus

    def search(self, queries: list[str], topk: int) -> list[list[Passage]]:
        num_hits = _num_hits(self.corpus, topk)
        return [self._search_one(query, num_hits) for query in queries]

    def _search_one(self, query: str, num_hits: int) -> list[Passage]:
        scores_N = self.index.get_scores_from_ids(self.index.get_tokens_ids(WORD.findall(query.lower())))
        cut = np.partition(scores_N, -num_hits)[-num_hits]
        above = np.flatnonzero(scores_N > cut)
        level = np.flatnonzero(scores_N == cut)[: num_hits - len(above)]  # bm25s's own top-k takes any of the equals
        rows = np.concatenate([above, level])
        rows = rows[np.argsort(-scores_N[rows], kind="stable")]
        return _hits(self.corpus, rows, scores_N[rows])


def encode_corpus(corpus: Corpus, encoder: Encoder, block_rows: int = 4096) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks (first row, (N, D) float32) of the corpus's vectors, in order, with a progress bar."""
    with tqdm(total=len(corpus), desc="encoding", unit="passage") as bar:
        for start in range(0, len(corpus), block_rows):
            rows = range(start, min(start + block_rows, len(corpus)))
            yield start, encoder.encode([corpus[row].contents for row in rows], "passage").numpy()
            bar.update(len(rows))


def build_index(corpus_path: str, out: str, encoder_name: str, backend: str = "faiss", max_tokens: int = 256, dtype: str = "float16") -> None:
    """Writes an index folder (the index and manifest.json); `dtype` is that of the torch backend's matrix.

    It is written to `out`.partial and renamed at the end, so a folder named `out` is whole. ValueError if it exists.
    """
    final, folder = Path(out), Path(f"{out}.partial")
    if final.exists():
        raise ValueError(f"{out} exists: delete it or choose another --out")
    corpus = Corpus(corpus_path)
    manifest = {"backend": backend, "corpus_sha256": corpus.sha256, "num_passages": len(corpus)}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if backend == "bm25":
        build_bm25(corpus).save(folder / "bm25")
    else:
        encoder = Encoder(encoder_name, max_tokens)
        manifest |= {"encoder": encoder_name, "dim": encoder.dim, "style": encoder.style, "max_tokens": max_tokens}
        if backend == "faiss":
            index = faiss.IndexFlatIP(encoder.dim)
            for _, vectors_ND in encode_corpus(corpus, encoder):
                index.add(vectors_ND)
            faiss.write_index(index, str(folder / "index.faiss"))
        else:
            matrix_ND = np.lib.format.open_memmap(folder / "vectors.npy", "w+", dtype, (len(corpus), encoder.dim))
            for start, vectors_ND in encode_corpus(corpus, encoder):
                matrix_ND[start : start + len(vectors_ND)] = vectors_ND
            matrix_ND.flush()
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    folder.rename(final)


def read_manifest(folder: Path, options: Retriever) -> dict:
    """The manifest of an index folder; ValueError unless it is whole and was built for `options`' backend and encoder."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no manifest.json, so it is no index folder: make one with `{BUILD}`")
    try:
        manifest = json.loads(path.read_text())
        expected = {"backend": options.backend} | ({} if options.backend == "bm25" else {"style": encoder_style(options.encoder), "encoder": options.encoder})
        found = {name: manifest[name] for name in ("corpus_sha256", "num_passages")} | {name: manifest.get(name) for name in expected}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): build the index again (`{BUILD}`)") from None
    for name, value in expected.items():
        last = lambda v: Path(v).name if name == "encoder" and v else v  # a model's folder may have moved; its name may not
        if last(found[name]) != last(value):
            raise ValueError(f"{folder} was built with {name} {found[name]!r}, not {value!r}: set retriever.{'backend' if name == 'backend' else 'encoder'} to match, or build again (`{BUILD}`)")
    return manifest


def open_retriever(options: Retriever) -> FaissSearch | TorchSearch | BM25Search:
    """The search backend that `options` describe, checked against corpus and encoder; ValueError with the remedy if not."""
    if options.corpus is None:
        raise ValueError("retriever.corpus is null: a search in this process needs a jsonl of {\"id\", \"contents\"}")
    if options.index is None:
        if options.backend != "bm25":
            raise ValueError(f"retriever.index is null and backend is {options.backend!r}: build an index (`{BUILD}`) or set retriever.backend bm25")
        corpus = Corpus(options.corpus)
        return BM25Search(build_bm25(corpus), corpus)
    path = Path(options.index)
    if not path.exists():
        raise ValueError(f"no index {path}: build one (`{BUILD}`) or mend retriever.index")
    if path.is_file():
        if options.backend != "faiss":
            raise ValueError(f"retriever.index = {options.index} is a file, which only backend faiss opens; {options.backend!r} needs a folder made by `{BUILD}`")
        return FaissSearch(path, Corpus(options.corpus), Encoder(options.encoder))
    manifest = read_manifest(path, options)
    corpus = Corpus(options.corpus, validate=False)
    if corpus.sha256 != manifest["corpus_sha256"]:
        raise ValueError(f"{path} was built from another corpus ({manifest['num_passages']} passages) than {corpus.path} ({len(corpus)}): set retriever.corpus to that one, or build again (`{BUILD}`)")
    if options.backend == "bm25":
        return BM25Search(bm25s.BM25.load(path / "bm25", mmap=True), corpus)
    encoder = Encoder(options.encoder, manifest["max_tokens"])
    if options.backend == "torch":
        return TorchSearch(path / "vectors.npy", corpus, encoder)
    return FaissSearch(path / "index.faiss", corpus, encoder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lld.retrieval", description="Build an index folder for the retriever.")
    build = parser.add_subparsers(required=True, metavar="build").add_parser("build")
    build.add_argument("--corpus", required=True, help='jsonl or jsonl.gz of {"id", "contents"}')
    build.add_argument("--out", required=True, help="folder to make")
    build.add_argument("--encoder", default=Retriever.encoder, help="hub name or folder")
    build.add_argument("--backend", default="faiss", choices=("faiss", "torch", "bm25"))
    build.add_argument("--max-tokens", type=int, default=256, help="of a passage; what is longer is cut")
    build.add_argument("--dtype", default="float16", choices=("float16", "float32"), help="of the torch backend's matrix")
    args = parser.parse_args()
    try:
        build_index(args.corpus, args.out, args.encoder, args.backend, args.max_tokens, args.dtype)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
