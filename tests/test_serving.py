"""Many clients and one index: batches, cache, limits, a queue that is full, a retriever that fails, a server that is told to stop."""

import asyncio
import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient

from lld.protocol import Passage
from lld.serving import Batcher, Busy, Cache
from retriever_server import GRACE_S, Limits, make_app


class Slow:
    """A retriever that remembers what it was asked and takes its time."""

    backend, encoder, fingerprint, corpus = "slow", None, "f" * 16, range(10)

    def __init__(self, seconds: float = 0.02):
        self.seconds, self.asked, self.fails = seconds, [], lambda queries: False

    def search(self, queries, topk):
        self.asked.append((list(queries), topk))
        time.sleep(self.seconds)
        if self.fails(queries):
            raise RuntimeError("CUDA out of memory")
        return [[Passage(str(rank), f"{query} {rank}", 1.0 - rank / 10) for rank in range(topk)] for query in queries]


def together(retriever, requests, **options):
    """The results, or errors, of requests (queries, topk) made at once; and the batcher."""

    async def run():
        batcher = Batcher(retriever, **options)
        found = await asyncio.gather(*(batcher.search(queries, topk) for queries, topk in requests), return_exceptions=True)
        stats = batcher.stats()
        await batcher.close()
        return found, stats

    return asyncio.run(run())


def test_requests_at_once_are_searched_for_at_once_and_each_gets_its_own():
    retriever = Slow()
    found, stats = together(retriever, [([f"q{i}", f"r{i}"], 2) for i in range(20)])
    assert [[p.contents for passages in hits for p in passages] for hits in found] == [[f"q{i} 0", f"q{i} 1", f"r{i} 0", f"r{i} 1"] for i in range(20)]
    assert [len(queries) for queries, _ in retriever.asked] == [40]
    assert stats["batches"] == {"count": 1, "mean": 40.0, "largest": 40} and stats["requests"] == 20 and stats["queue"] == {"waiting": 0, "running": 0}


def test_batches_are_bounded_and_hold_one_topk():
    retriever = Slow()
    found, _ = together(retriever, [([f"q{i}"], 1 + i % 2) for i in range(20)], max_batch=4)
    assert [len(hits[0]) for hits in found] == [1, 2] * 10
    assert all(len(queries) <= 4 for queries, _ in retriever.asked) and sum(len(queries) for queries, _ in retriever.asked) == 20
    assert all(int(query[1:]) % 2 == topk - 1 for queries, topk in retriever.asked for query in queries)


def test_searches_side_by_side_share_what_waits():
    retriever = Slow(0.1)
    started = time.perf_counter()
    found, stats = together(retriever, [([f"q{i}"], 1) for i in range(30)], num_searches=3)
    assert sorted(len(queries) for queries, _ in retriever.asked) == [10, 10, 10] and time.perf_counter() - started < 0.25
    assert [hits[0][0].contents for hits in found] == [f"q{i} 0" for i in range(30)] and stats["queue"] == {"waiting": 0, "running": 0}


def test_searches_side_by_side_share_the_threads_and_a_lone_one_has_all():
    import torch

    retriever, before = Slow(0.1), torch.get_num_threads()
    search, threads = retriever.search, []
    retriever.search = lambda queries, topk: threads.append((len(queries), torch.get_num_threads())) or search(queries, topk)
    torch.set_num_threads(4)
    try:
        together(retriever, [(["q"], 1)], num_searches=2)
        together(retriever, [([f"q{i}"], 1) for i in range(6)], num_searches=2)
        together(retriever, [([f"q{i}"], 1) for i in range(6)], num_searches=1)
        assert torch.get_num_threads() == 4, "the caller's own threads were changed"
    finally:
        torch.set_num_threads(before)
    assert threads == [(1, 4), (3, 2), (3, 2), (6, 4)]


def test_a_lone_request_waits_no_longer_than_it_must():
    started = time.perf_counter()
    together(Slow(0), [(["q"], 1)], max_wait_s=0.05)
    assert 0.04 < time.perf_counter() - started < 1


def test_a_query_is_searched_for_once_however_many_ask():
    retriever = Slow()
    found, stats = together(retriever, [(["same", "same"], 1)] * 9)
    assert retriever.asked == [(["same"], 1)] and all(len(hits) == 2 for hits in found)

    async def later():
        batcher = Batcher(retriever)
        first = asyncio.create_task(batcher.search(["x"], 1))
        await asyncio.sleep(0.012)  # under way by now
        return await asyncio.gather(first, batcher.search(["x"], 1)), await batcher.search(["x"], 1), batcher.stats()

    retriever.asked.clear()
    *_, stats = asyncio.run(later())
    assert retriever.asked == [(["x"], 1)] and stats["cache"] == {"entries": 1, "hits": 1, "hit_rate": round(1 / 3, 4)}


def test_the_cache_forgets_what_was_not_asked_for_lately():
    cache = Cache(2, "index")
    for query in "abacd":
        if cache.get(query, 3) is None:
            cache.put(query, 3, [Passage(query, query)])
    assert [cache.get(query, 3) is not None for query in "abcd"] == [False, False, True, True]
    assert cache.get("d", 2) is None and Cache(0, "index").get("a", 3) is None
    empty = Cache(0, "index")
    empty.put("a", 3, [])
    assert not empty.found


def test_a_failing_search_fails_its_requests_and_no_others():
    retriever = Slow()
    retriever.fails = lambda queries: "bad" in queries
    found, stats = together(retriever, [(["a"], 1), (["bad"], 2), (["b"], 1)])
    assert isinstance(found[1], RuntimeError) and [hits[0][0].contents for hits in (found[0], found[2])] == ["a 0", "b 0"]
    assert stats["failed_requests"] == 1


def test_a_full_queue_is_said_so():
    found, _ = together(Slow(), [([f"q{i}"], 1) for i in range(5)], max_waiting=3)
    assert [isinstance(hits, Busy) for hits in found] == [False] * 3 + [True] * 2


@pytest.fixture(scope="module")
def client():
    with TestClient(make_app(Slow(0), topk=2, limits=Limits(queries=50, topk=20, body_mb=12.0)), raise_server_exceptions=False) as client:
        yield client


@pytest.mark.parametrize("body, reason", [({"queries": ["x"] * 51}, "body.queries: 51 asked for, at most 50"), ({"queries": ["x"], "topk": 21}, "body.topk: 21 asked for, at most 20"), ({"queries": ["x"], "topk": 10**30}, "body.topk: that many asked")])
def test_limits_are_said(client, body, reason):
    reply = client.post("/retrieve", json=body)
    assert reply.status_code == 422 and reply.json()["detail"].startswith(reason)


def test_bodies_of_ten_megabytes(client):
    reply = client.post("/retrieve", json={"queries": ["é" * 1_600_000, "x" * 400_000], "topk": 1})  # \\u00e9 each
    assert reply.status_code == 200 and len(reply.json()["result"]) == 2
    reply = client.post("/retrieve", json={"queries": ["x" * 13_000_000]})
    assert reply.status_code == 413 and reply.json()["detail"] == "a body of more than 12000000 bytes"
    unannounced = client.post("/retrieve", content=(b"x" * 1_000_000 for _ in range(13)))
    assert unannounced.status_code == 413


def test_a_broken_retriever_is_a_500_and_the_server_lives_on():
    retriever = Slow(0)
    retriever.fails = lambda queries: "bad" in queries
    with TestClient(make_app(retriever, topk=1), raise_server_exceptions=False) as client:
        assert client.post("/retrieve", json={"queries": ["bad"]}).status_code == 500
        assert client.post("/retrieve", json={"queries": ["good"]}).status_code == 200
        assert client.get("/stats").json()["failed_requests"] == 1


def test_stats(client):
    client.post("/retrieve", json={"queries": ["a", "b"]})
    stats = client.get("/stats").json()
    assert stats["queries"] >= 2 and 0 < stats["latency_ms"]["p50"] <= stats["latency_ms"]["p90"] <= stats["latency_ms"]["p99"] and set(stats) >= {"queue", "batches", "cache", "uptime_s"}


def random_json(draw: random.Random, depth: int = 0):
    kinds = ["queries", "number", "text", "null", "bool"] + (["list", "dict"] if depth < 3 else [])
    kind = draw.choice(kinds)
    text = lambda: "".join(draw.choice(["a", " ", "\x00", "é", "🙂", "\ud800", '"', "</answer>", "\u2028", "\\"]) for _ in range(draw.randrange(12)))
    if kind == "queries":
        return {"queries": [text() for _ in range(draw.randrange(4))], draw.choice(["topk", "return_scores", text()]): random_json(draw, depth + 1)}
    if kind == "list":
        return [random_json(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == "dict":
        return {draw.choice(["queries", "topk", "return_scores", text()]): random_json(draw, depth + 1) for _ in range(draw.randrange(4))}
    return {"number": draw.choice([0, -1, 1, 3, 1e400, -1e-9, 2.5, 10**40, float("nan")]), "text": text(), "null": None, "bool": draw.random() < 0.5}[kind]


def test_no_request_however_odd_is_a_5xx(client):
    """A fuzz run: random JSON, random bytes, mutilated good bodies, odd paths, methods and headers."""
    draw, statuses = random.Random(0), set()
    for number in range(600):
        body = json.dumps(random_json(draw)).encode()
        if number % 3 == 1:
            body = draw.randbytes(draw.randrange(60))
        elif number % 3 == 2:
            body = bytearray(json.dumps({"queries": ["who?", "é"], "topk": 3, "return_scores": True}).encode())
            for _ in range(draw.randrange(4)):
                body[draw.randrange(len(body))] = draw.randrange(256)
            body = bytes(body[: draw.randrange(len(body) + 1)] if draw.random() < 0.3 else body)
        headers = {"Content-Type": draw.choice(["application/json", "text/plain", "", "application/json; charset=utf-16", "multipart/form-data"])}
        method, path = draw.choice(["POST"] * 8 + ["GET", "PUT", "DELETE", "HEAD", "OPTIONS"]), draw.choice(["/retrieve"] * 8 + ["/health", "/stats", "/", "/retrieve/x", "/%00"])
        reply = client.request(method, path, content=body, headers=headers)
        statuses.add(reply.status_code)
        assert reply.status_code < 500, (method, path, headers, body, reply.text)
    assert {200, 422, 405, 404} <= statuses


def test_a_server_told_to_stop_answers_what_it_has_taken_on():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(make_app(Slow(0.5), topk=3), log_level="warning", timeout_graceful_shutdown=GRACE_S))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx.post, f"http://127.0.0.1:{listener.getsockname()[1]}/retrieve", json={"queries": ["q"]}, timeout=20, trust_env=False)
            time.sleep(0.2)
            server.should_exit = True  # what uvicorn does on SIGTERM
            assert asked.result().status_code == 200 and len(asked.result().json()["result"][0]) == 3
        thread.join(10)
        assert not thread.is_alive()


def test_a_client_that_leaves_takes_nobody_with_it():
    retriever = Slow(0.05)

    async def run():
        batcher = Batcher(retriever)
        leaving, staying = asyncio.create_task(batcher.search(["same"], 1)), asyncio.create_task(batcher.search(["same"], 1))
        await asyncio.sleep(0.02)
        leaving.cancel()
        return (await staying)[0][0].contents, await batcher.search(["next"], 1)

    assert asyncio.run(run())[0] == "same 0"
    assert threading.active_count() < 50
