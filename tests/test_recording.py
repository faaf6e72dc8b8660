"""Recordings: what was found once is found again, by every process, without the index."""

import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import pytest

from lld.config import Retriever
from lld.protocol import Passage
from lld.retrieval.client import make_search
from lld.retrieval.recording import Recording
from lld.settings import from_dict
from lld.tools import RetrieverError


class Fickle:
    """A search that never answers a query the same way twice."""

    def __init__(self):
        self.asked = []

    def __call__(self, queries):
        self.asked += queries
        return [[Passage(f"{len(self.asked)}", f'"T"\n{query} «ü🙂»\x00', 0.1 + 0.2)] for query in queries]


def test_a_replay_is_what_the_run_saw_to_the_bit(tmp_path):
    path, search = str(tmp_path / "new" / "searches.sqlite"), Fickle()
    # Two processes of a run
    first, second = Recording(path, 3, search, "index"), Recording(path, 3, search, "index")
    seen = [
        record.record(queries)
        for record, queries in ((first, ["a", "b", "a"]), (second, ["b", "c"]), (first, ["c", "é", ""]))
    ]
    assert search.asked == ["a", "b", "c", "é", ""] and seen[0][0] == seen[0][2] and seen[0][1] == seen[1][0]
    replay = Recording(path, 3)
    assert [replay.replay(["a", "b", "a"]), replay.replay(["b", "c"]), replay.replay(["c", "é", ""])] == seen


def test_the_first_answer_holds_where_two_ask_at_once(tmp_path):
    records = [Recording(str(tmp_path / "x"), 1, Fickle(), "index") for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: records[i % 4].record([f"q{i // 8}", f"r{i // 8}"]), range(160)))
    assert all(found[i] == found[8 * (i // 8)] for i in range(160))


def test_what_found_nothing_is_recorded_too(tmp_path):
    path, search = (
        str(tmp_path / "x"),
        lambda queries: [[] if query == "the" else [Passage("1", query)] for query in queries],
    )
    seen = Recording(path, 3, search, "index").record(["the", "a"])
    assert seen == [[], [Passage("1", "a")]] and Recording(path, 3, Fickle(), "index").record(
        ["the", "a"]
    ) == seen == Recording(path, 3).replay(["the", "a"])


def test_what_was_not_asked_is_named_and_what_failed_is_not_kept(tmp_path):
    path = str(tmp_path / "x")

    def broken(queries):
        raise RetrieverError("gone")

    with pytest.raises(RetrieverError):
        Recording(path, 3, broken, "index").record(["b"])
    good = Recording(path, 3, Fickle(), "index")
    good.record(["c"])
    for query in ("a", "b"):
        with pytest.raises(
            ValueError, match=f"has no search '{query}' with topk 3: the run is not the recorded one"
        ):
            Recording(path, 3).replay(["c", query])


def test_recordings_that_do_not_fit_are_refused(tmp_path):
    path = str(tmp_path / "x")
    Recording(path, 3, Fickle(), "one").record(["a"])
    with pytest.raises(ValueError, match="was recorded from index one, not two"):
        Recording(path, 3, Fickle(), "two")
    with pytest.raises(ValueError, match="recorded with topk 3, not 5: set retriever.topk"):
        Recording(path, 5)
    with pytest.raises(ValueError, match="no such recording"):
        Recording(str(tmp_path / "none"), 3)
    (tmp_path / "text").write_text("no database " * 100)
    with pytest.raises(ValueError, match="is no recording of searches"):
        Recording(str(tmp_path / "text"), 3)


def test_the_options_record_and_replay(tmp_path):
    corpus, path = tmp_path / "c.jsonl", str(tmp_path / "r.sqlite")
    corpus.write_text(
        "".join(
            json.dumps({"id": str(i), "contents": text}) + "\n"
            for i, text in enumerate(["red", "blue", "red red"])
        )
    )
    search = make_search(Retriever(url=None, corpus=str(corpus), backend="bm25", topk=2, record=path))
    found = search(["red", "blue"])
    corpus.unlink()
    assert (
        make_search(Retriever(url="http://127.0.0.1:9", topk=2, replay=path))(["blue", "red"]) == found[::-1]
    )
    assert sqlite3.connect(path).execute("SELECT count(*) FROM searches").fetchone() == (2,)
    with pytest.raises(ValueError, match="retriever.record = 'a' does nothing with retriever.replay = 'b'"):
        from_dict({"retriever": {"record": "a", "replay": "b"}})
