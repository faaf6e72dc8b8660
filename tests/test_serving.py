"""Many clients and one index: batches, cache, limits, a queue that is full, a retriever that fails, a server
that is told to stop."""

import asyncio
import contextlib
import json
import random
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient

from lld.protocol import Passage
from lld.retrieval.batching import Batcher, Busy, Cache
from lld.retrieval.service import Limits, guarded_protocol, make_app
from retriever_server import GRACE_S


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
        return [
            [Passage(str(rank), f"{query} {rank}", 1.0 - rank / 10) for rank in range(topk)]
            for query in queries
        ]


def together(retriever, requests, **options):
    """The results, or errors, of requests (queries, topk) made at once; and the batcher."""

    async def run():
        batcher = Batcher(retriever, **options)
        found = await asyncio.gather(
            *(batcher.search(queries, topk) for queries, topk in requests), return_exceptions=True
        )
        stats = batcher.stats()
        await batcher.close()
        return found, stats

    return asyncio.run(run())


def test_requests_at_once_are_searched_for_at_once_and_each_gets_its_own():
    retriever = Slow()
    found, stats = together(retriever, [([f"q{i}", f"r{i}"], 2) for i in range(20)])
    assert [[p.contents for passages in hits for p in passages] for hits in found] == [
        [f"q{i} 0", f"q{i} 1", f"r{i} 0", f"r{i} 1"] for i in range(20)
    ]
    assert [len(queries) for queries, _ in retriever.asked] == [40]
    assert (
        stats["batches"] == {"count": 1, "mean": 40.0, "largest": 40}
        and stats["requests"] == 20
        and stats["queue"] == {"waiting": 0, "running": 0}
    )


def test_batches_are_bounded_and_hold_one_topk():
    retriever = Slow()
    found, _ = together(retriever, [([f"q{i}"], 1 + i % 2) for i in range(20)], max_batch=4)
    assert [len(hits[0]) for hits in found] == [1, 2] * 10
    assert (
        all(len(queries) <= 4 for queries, _ in retriever.asked)
        and sum(len(queries) for queries, _ in retriever.asked) == 20
    )
    assert all(int(query[1:]) % 2 == topk - 1 for queries, topk in retriever.asked for query in queries)


def test_searches_side_by_side_share_what_waits():
    retriever = Slow(0.1)
    started = time.perf_counter()
    found, stats = together(retriever, [([f"q{i}"], 1) for i in range(30)], num_searches=3)
    assert (
        sorted(len(queries) for queries, _ in retriever.asked) == [10, 10, 10]
        and time.perf_counter() - started < 0.25
    )
    assert [hits[0][0].contents for hits in found] == [f"q{i} 0" for i in range(30)] and stats["queue"] == {
        "waiting": 0,
        "running": 0,
    }


def test_searches_side_by_side_share_the_threads_and_a_lone_one_has_all():
    import torch

    retriever, before = Slow(0.1), torch.get_num_threads()
    search, threads = retriever.search, []
    retriever.search = lambda queries, topk: (
        threads.append((len(queries), torch.get_num_threads())) or search(queries, topk)
    )
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


def test_a_client_that_stays_alone_waits_for_company_once():
    async def run():
        batcher, lone = Batcher(Slow(0), max_wait_s=0.2), []
        for number in range(5):
            started = time.perf_counter()
            await batcher.search([f"q{number}"], 1)
            lone.append(time.perf_counter() - started)
        started = time.perf_counter()
        await asyncio.gather(*(batcher.search([f"r{number}"], 1) for number in range(9)))
        return lone, batcher.stats()["batches"]

    lone, batches = asyncio.run(run())
    assert lone[0] > 0.19 and max(lone[1:]) < 0.15
    assert batches == {"count": 5 + 1, "mean": round((5 + 9) / 6, 2), "largest": 9}


def test_a_query_that_comes_while_a_search_ends_is_not_forgotten():
    """Asked in the very turn of the event loop in which the one before was answered, again and again."""

    async def run():
        batcher = Batcher(Slow(0), max_wait_s=0.001)
        for number in range(50):
            await batcher.search([f"q{number}"], 1)
        await batcher.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_query_is_searched_for_once_however_many_ask():
    retriever = Slow()
    found, stats = together(retriever, [(["same", "same"], 1)] * 9)
    assert retriever.asked == [(["same"], 1)] and all(len(hits) == 2 for hits in found)

    async def later():
        batcher = Batcher(retriever)
        first = asyncio.create_task(batcher.search(["x"], 1))
        await asyncio.sleep(0.012)  # under way by now
        return (
            await asyncio.gather(first, batcher.search(["x"], 1)),
            await batcher.search(["x"], 1),
            batcher.stats(),
        )

    retriever.asked.clear()
    *_, stats = asyncio.run(later())
    assert retriever.asked == [(["x"], 1)] and (
        stats["cache"]["entries"],
        stats["cache"]["hits"],
        stats["cache"]["hit_rate"],
    ) == (1, 1, round(1 / 3, 4))


def test_the_cache_forgets_what_was_not_asked_for_lately():
    one = Cache(1e9, "index")
    one.put("a", 3, [Passage("a", "a")])
    cache = Cache(2 * one.num_bytes, "index")
    for query in "abacd":
        if cache.get(query, 3) is None:
            cache.put(query, 3, [Passage(query, query)])
    assert [cache.get(query, 3) is not None for query in "abcd"] == [False, False, True, True]
    assert cache.get("d", 2) is None and Cache(0, "index").get("a", 3) is None
    empty = Cache(0, "index")
    empty.put("a", 3, [])
    assert not empty.found and empty.num_bytes == 0


def test_the_cache_is_bounded_by_what_it_holds_not_by_the_number_of_searches():
    """Long queries and long lists of passages count as what they take; a search remembered twice counts
    once."""
    cache = Cache(2e6, "index")
    for number in range(50):
        cache.put(f"{number} " + "x" * 100_000, 3, [])
    assert cache.num_bytes <= 2e6 and 15 <= len(cache.found) <= 20
    for number in range(50):
        cache.put(f"{number}", 1000, [Passage(str(rank), "y" * 500) for rank in range(200)])
    real = sum(
        sys.getsizeof(query)
        + sum(sys.getsizeof(p) + sys.getsizeof(p.id) + sys.getsizeof(p.contents) for p in found)
        for (_, query, _), found in cache.found.items()
    )
    assert real <= cache.num_bytes <= 2e6 and cache.num_bytes < 2 * real
    for _ in range(5):
        cache.put("49", 1000, [Passage(str(rank), "y" * 500) for rank in range(200)])
    assert cache.num_bytes <= 2e6 and len(cache.found) > 5


def test_a_client_that_is_alone_keeps_the_thread_that_was_used_last():
    """Each thread has its own OpenMP team: a lone client that goes round the threads finds every team
    asleep."""
    retriever = Slow(0.02)
    search, threads = retriever.search, []
    retriever.search = lambda queries, topk: threads.append(threading.get_ident()) or search(queries, topk)

    async def run():
        batcher = Batcher(retriever, num_searches=3, max_batch=1, max_wait_s=0.001)
        await asyncio.gather(*(batcher.search([f"q{number}"], 1) for number in range(3)))
        together = set(threads)
        threads.clear()
        for number in range(6):
            await batcher.search([f"r{number}"], 1)
        await batcher.close()
        return together

    assert len(asyncio.run(run())) == 3 and len(set(threads)) == 1


def test_what_is_promised_at_a_time_is_bounded():
    found, stats = together(Slow(), [([f"q{i}", f"r{i}"], 10) for i in range(5)], max_passages=60)
    assert [isinstance(hits, Busy) for hits in found] == [False] * 3 + [True] * 2 and stats[
        "failed_requests"
    ] == 2

    async def alone():  # one that is larger than the bound is answered when nothing else is under way
        batcher = Batcher(Slow(), max_passages=60)
        return [len(await batcher.search([f"{number} {i}" for i in range(10)], 10)) for number in range(2)]

    assert asyncio.run(alone()) == [10, 10]


def test_a_failing_search_fails_its_requests_and_no_others():
    retriever = Slow()
    retriever.fails = lambda queries: "bad" in queries
    found, stats = together(retriever, [(["a"], 1), (["bad"], 2), (["b"], 1)])
    assert isinstance(found[1], RuntimeError) and [hits[0][0].contents for hits in (found[0], found[2])] == [
        "a 0",
        "b 0",
    ]
    assert stats["failed_requests"] == 1


def test_a_bad_query_in_a_batch_fails_its_own_request_alone():
    retriever = Slow(0)
    retriever.fails = lambda queries: "bad" in queries
    found, stats = together(retriever, [(["a", "b"], 1), (["c", "bad"], 1), (["c"], 1)])
    assert isinstance(found[1], RuntimeError)
    assert [[hits[0].contents for hits in found[i]] for i in (0, 2)] == [["a 0", "b 0"], ["c 0"]]
    assert sorted(map(len, (queries for queries, _ in retriever.asked))) == [1, 1, 1, 1, 4]
    assert stats["failed_requests"] == 1 and stats["queue"] == {"waiting": 0, "running": 0}


def test_a_request_of_more_queries_than_may_wait_is_answered_when_none_waits():
    found, _ = together(Slow(), [([f"q{i}" for i in range(5)], 1), (["r"], 1)], max_waiting=3)
    assert len(found[0]) == 5 and isinstance(found[1], Busy)


def test_a_full_queue_is_said_so():
    found, _ = together(Slow(), [([f"q{i}"], 1) for i in range(5)], max_waiting=3)
    assert [isinstance(hits, Busy) for hits in found] == [False] * 3 + [True] * 2


@pytest.fixture(scope="module")
def client():
    with TestClient(
        make_app(Slow(0), topk=2, limits=Limits(queries=50, topk=20, passages=300, body_mb=12.0)),
        raise_server_exceptions=False,
    ) as client:
        yield client


@pytest.mark.parametrize(
    "body, reason",
    [
        ({"queries": ["x"] * 51}, "body.queries: 51 asked for, at most 50"),
        ({"queries": ["x"], "topk": 21}, "body.topk: 21 asked for, at most 20"),
        ({"queries": ["x"], "topk": 10**30}, "body.topk: that many asked"),
        (
            {"queries": ["x"] * 31, "topk": 10},
            "body.queries x topk: 310 asked for, at most 300 are answered; ask for less, or start the "
            "server with a higher --max-passages",
        ),
    ],
)
def test_limits_are_said(client, body, reason):
    reply = client.post("/retrieve", json=body)
    assert reply.status_code == 422 and reply.json()["detail"].startswith(reason)


def test_bodies_of_ten_megabytes(client):
    # \\u00e9 each
    reply = client.post("/retrieve", json={"queries": ["é" * 1_600_000, "x" * 400_000], "topk": 1})
    assert reply.status_code == 200 and len(reply.json()["result"]) == 2
    reply = client.post("/retrieve", json={"queries": ["x" * 13_000_000]})
    assert (
        reply.status_code == 413
        and reply.json()["detail"] == "a body of more than 12000000 bytes (--max-body-mb)"
    )
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
    assert (
        stats["queries"] >= 2
        and 0 < stats["latency_ms"]["p50"] <= stats["latency_ms"]["p90"] <= stats["latency_ms"]["p99"]
        and set(stats) >= {"queue", "batches", "cache", "uptime_s"}
    )


def random_json(draw: random.Random, depth: int = 0):
    kinds = ["queries", "number", "text", "null", "bool"] + (["list", "dict"] if depth < 3 else [])
    kind = draw.choice(kinds)

    def text():
        return "".join(
            draw.choice(["a", " ", "\x00", "é", "🙂", "\ud800", '"', "</answer>", "\u2028", "\\"])
            for _ in range(draw.randrange(12))
        )

    if kind == "queries":
        return {
            "queries": [text() for _ in range(draw.randrange(4))],
            draw.choice(["topk", "return_scores", text()]): random_json(draw, depth + 1),
        }
    if kind == "list":
        return [random_json(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == "dict":
        return {
            draw.choice(["queries", "topk", "return_scores", text()]): random_json(draw, depth + 1)
            for _ in range(draw.randrange(4))
        }
    return {
        "number": draw.choice([0, -1, 1, 3, 1e400, -1e-9, 2.5, 10**40, float("nan")]),
        "text": text(),
        "null": None,
        "bool": draw.random() < 0.5,
    }[kind]


def test_no_request_however_odd_is_a_5xx(client):
    """A fuzz run: random JSON, random bytes, mutilated good bodies, odd paths, methods and headers."""
    draw, statuses = random.Random(0), set()
    for number in range(600):
        body = json.dumps(random_json(draw)).encode()
        if number % 3 == 1:
            body = draw.randbytes(draw.randrange(60))
        elif number % 3 == 2:
            body = bytearray(
                json.dumps({"queries": ["who?", "é"], "topk": 3, "return_scores": True}).encode()
            )
            for _ in range(draw.randrange(4)):
                body[draw.randrange(len(body))] = draw.randrange(256)
            body = bytes(body[: draw.randrange(len(body) + 1)] if draw.random() < 0.3 else body)
        headers = {
            "Content-Type": draw.choice(
                [
                    "application/json",
                    "text/plain",
                    "",
                    "application/json; charset=utf-16",
                    "multipart/form-data",
                ]
            )
        }
        method, path = (
            draw.choice(["POST"] * 8 + ["GET", "PUT", "DELETE", "HEAD", "OPTIONS"]),
            draw.choice(["/retrieve"] * 8 + ["/health", "/stats", "/", "/retrieve/x", "/%00"]),
        )
        reply = client.request(method, path, content=body, headers=headers)
        statuses.add(reply.status_code)
        assert reply.status_code < 500, (method, path, headers, body, reply.text)
    assert {200, 422, 405, 404} <= statuses


def test_a_get_of_the_root_says_what_to_ask(client):
    assert "/retrieve" in client.get("/").json()["POST"]


@contextlib.contextmanager
def live(limits: Limits):
    """The port of a real uvicorn in a thread."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(
                make_app(Slow(0), topk=3, limits=limits), log_level="critical", http=guarded_protocol(limits)
            )
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(10)


def reply_of(connection: socket.socket) -> bytes:
    """What comes until the server closes; a reset is an end too."""
    connection.settimeout(5)
    said = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            said += piece
    return said


def test_connections_that_do_not_finish_what_they_began_are_closed():
    """No byte at all, half a request line, half the headers, half a body, a byte now and then; others are
    served meanwhile."""
    head = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    whole = b'{"queries": ["q"], "topk": 2}'
    first = head + b"Content-Length: %d\r\n\r\n" % len(whole) + whole
    with live(Limits(request_s=0.4)) as port:
        begun = [
            b"",
            b"POST /retr",
            head,
            head + b"Content-Length: 900\r\n\r\n{",
            head + b"Content-Length: 900\r\n\r\n{",
            first,
        ]
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in begun]
        for connection, some in zip(connections, begun, strict=True):
            connection.sendall(some)
        started = time.perf_counter()
        for _ in range(3):  # a byte now and then does not begin the deadline anew
            time.sleep(0.1)
            connections[4].sendall(b" ")
            connections[1].sendall(b"i")
        connections[5].sendall(b"POST /re")  # the second request of a connection that is kept
        assert (
            httpx.post(
                f"http://127.0.0.1:{port}/retrieve", json={"queries": ["q"]}, trust_env=False
            ).status_code
            == 200
        )
        said = [reply_of(connection) for connection in connections]
        assert time.perf_counter() - started < 3
    assert said[:3] == [b"", b"", b""]
    assert all(b"408 Request Timeout" in reply and b"--request-s" in reply for reply in said[3:5])
    assert said[5].startswith(b"HTTP/1.1 200") and said[5].count(b"HTTP/1.1") == 1


def test_a_reply_that_nobody_reads_is_given_up_and_a_slow_reader_is_not():
    # 24 MB come back
    body = json.dumps({"queries": [f"{i} " + "x" * 4000 for i in range(60)], "topk": 100}).encode()
    ask = (
        b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % len(body)
        + body
    )
    with live(Limits(request_s=0.4)) as port:
        deaf, slow = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
        for connection in (slow, deaf):
            connection.sendall(ask)
        read = b""
        for _ in range(12):  # longer than the deadline
            time.sleep(0.1)
            read += slow.recv(1 << 21)
        while len(read.partition(b"\r\n\r\n")[2]) < int(
            read.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
        ):
            read += slow.recv(1 << 22)
        assert len(json.loads(read.partition(b"\r\n\r\n")[2])["result"]) == 60
        assert len(reply_of(deaf)) < len(read) - 1_000_000


def test_more_connections_than_allowed_are_told_so():
    with live(Limits(connections=3, request_s=5)) as port:
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        time.sleep(0.05)
        with socket.create_connection(("127.0.0.1", port)) as extra:
            said = reply_of(extra)
        assert b"503" in said and b"3 connections are open already (--max-connections)" in said
        for connection in idle:
            connection.close()
        time.sleep(0.05)
        assert (
            httpx.post(
                f"http://127.0.0.1:{port}/retrieve", json={"queries": ["q"]}, trust_env=False
            ).status_code
            == 200
        )


def test_bodies_that_arrive_side_by_side_are_bounded(monkeypatch):
    monkeypatch.setattr("lld.retrieval.service.BODIES", 2)
    head = (
        b"POST /retrieve HTTP/1.1\r\nHost: x\r\n"
        b"Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
    )
    with live(Limits(body_mb=0.1, request_s=1.0)) as port:
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        for connection in connections:
            connection.sendall(head + b" " * 90_000)
            time.sleep(0.05)
        said = [reply_of(connection) for connection in connections]
    assert [reply.split()[1] for reply in said] == [b"408", b"408", b"429"]


def test_a_server_told_to_stop_answers_what_it_has_taken_on():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(
                make_app(Slow(0.5), topk=3),
                log_level="warning",
                http=guarded_protocol(Limits()),
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(
                httpx.post,
                f"http://127.0.0.1:{listener.getsockname()[1]}/retrieve",
                json={"queries": ["q"]},
                timeout=20,
                trust_env=False,
            )
            time.sleep(0.2)
            server.should_exit = True  # what uvicorn does on SIGTERM
            assert asked.result().status_code == 200 and len(asked.result().json()["result"][0]) == 3
        thread.join(10)
        assert not thread.is_alive()


def test_a_client_that_leaves_takes_nobody_with_it():
    retriever = Slow(0.05)

    async def run():
        batcher = Batcher(retriever)
        leaving, staying = (
            asyncio.create_task(batcher.search(["same"], 1)),
            asyncio.create_task(batcher.search(["same"], 1)),
        )
        await asyncio.sleep(0.02)
        leaving.cancel()
        return (await staying)[0][0].contents, await batcher.search(["next"], 1)

    assert asyncio.run(run())[0] == "same 0"
    assert threading.active_count() < 50
