"""The retriever client against servers that answer well, badly, late or not at all."""

import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from lld.config import Retriever
from lld.protocol import Passage
from lld.retrieval import client
from lld.retrieval.client import Client, check_health, make_search, read_result
from lld.tools import Malformed, Refused, RetrieverError, ServerFault, TimedOut, Unreachable


def search_over_http(queries, *, url, topk, timeout_s, retries):
    return Client([url], timeout_s=timeout_s, retries=retries).search(queries, topk)


GOOD = {"result": [[{"document": {"id": "7", "contents": '"A"\nb'}, "score": 0.5}]]}


@contextmanager
def server(*replies):
    """A server that gives the n-th request the n-th of `replies` (the last one for ever): (status, body,
    seconds to wait).

    A body that is a function gets the request. Yields (url, requests), a request being (path, parsed body,
    client port).
    """
    requests, stopped = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # keeps the connection open

        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, request, self.client_address[1]))
            status, body, wait_s = replies[min(len(requests), len(replies)) - 1]
            stopped.wait(wait_s)
            body = body(request) if callable(body) else body
            body = body if isinstance(body, bytes) else json.dumps(body).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                pass  # the client has given up

        def log_message(self, *_):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}", requests
    finally:
        stopped.set()
        httpd.shutdown()
        thread.join()
        httpd.server_close()


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """The back-off pauses asked for; none is waited out."""
    asked = []
    monkeypatch.setattr(client.time, "sleep", asked.append)
    return asked


def search_r1_reply(request):
    """What Search-R1's retrieval_server.py answers: `topk` documents a query, with scores."""
    return {
        "result": [
            [
                {"document": {"id": str(k), "contents": f'"{query}"\ntext {k}'}, "score": 0.9 - k / 10}
                for k in range(request["topk"])
            ]
            for query in request["queries"]
        ]
    }


@pytest.mark.parametrize("path", ["", "/", "/retrieve", "/retrieve/"])
def test_search_r1s_server_is_understood(path):
    with server((200, search_r1_reply, 0)) as (url, requests):
        found = search_over_http(["x", "y"], url=url + path, topk=2, timeout_s=5, retries=0)
    assert found == [
        [Passage("0", '"x"\ntext 0', 0.9), Passage("1", '"x"\ntext 1', 0.8)],
        [Passage("0", '"y"\ntext 0', 0.9), Passage("1", '"y"\ntext 1', 0.8)],
    ]
    assert [request[:2] for request in requests] == [
        ("/retrieve", {"queries": ["x", "y"], "topk": 2, "return_scores": True})
    ]


def test_no_queries_no_request():
    with server((200, GOOD, 0)) as (url, requests):
        assert search_over_http([], url=url, topk=3, timeout_s=5, retries=3) == []
    assert requests == []


def test_the_connection_is_kept():
    with server((200, GOOD, 0)) as (url, requests):
        client = Client([url], timeout_s=5)
        for _ in range(3):
            client.search(["x"], 1)
    assert len(requests) == 3 and len({port for _, _, port in requests}) == 1


def test_proxies_of_the_environment_are_not_asked(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with server((200, GOOD, 0)) as (url, _):
        assert search_over_http(["x"], url=url, topk=1, timeout_s=5, retries=0)[0][0].id == "7"


def test_documents_without_id_or_score_and_more_than_topk():
    items = [
        {"document": {"contents": "a"}},
        {"id": 5, "contents": "b", "title": "t"},
        {"document": {"id": "6", "contents": "c"}, "score": 2},
    ]
    assert read_result({"result": [items]}, 1, 3) == [
        [Passage("", "a", 0.0), Passage("5", "b", 0.0), Passage("6", "c", 2.0)]
    ]
    assert read_result({"result": [items]}, 1, 2) == [[Passage("", "a", 0.0), Passage("5", "b", 0.0)]]


@pytest.mark.parametrize(
    "body, reason",
    [
        (b"<html>busy", "JSONDecodeError"),
        (b"\xff\xfe\xfa", "UnicodeDecodeError"),
        ([], 'the reply holds no list "result"'),
        ({"result": None}, 'the reply holds no list "result"'),
        ({"result": GOOD["result"] * 3}, "3 results for 2 queries"),
        ({"result": GOOD["result"]}, "1 results for 2 queries"),
        ({"result": [None, *GOOD["result"]]}, "no list of passages for query 1 of 2"),
        (
            {"result": [[{"document": {"id": "1", "contents": None}}]] * 2},
            'a passage without "contents" for query 1 of 2',
        ),
        ({"result": [[{"document": "text"}]] * 2}, 'a passage without "contents" for query 1 of 2'),
        ({"result": [["text"]] * 2}, 'a passage without "contents" for query 1 of 2'),
    ],
)
def test_a_malformed_reply_is_asked_for_again_and_never_an_empty_passage(body, reason):
    with server((200, body, 0)) as (url, requests), pytest.raises(RetrieverError) as raised:
        search_over_http(["x", "y"], url=url, topk=1, timeout_s=5, retries=2)
    assert len(requests) == 3
    message = str(raised.value)
    assert (
        f"{url}/retrieve failed 3 attempts with 2 queries" in message
        and reason in message
        and "start one with `python retriever_server.py" in message
    )


def test_an_empty_list_is_an_answer_and_asked_for_once():
    """Search-R1's BM25 server answers so where no word is known; the other queries of the request keep their
    passages."""
    with server((200, {"result": [[], *GOOD["result"]]}, 0)) as (url, requests):
        assert search_over_http(["the", "x"], url=url, topk=1, timeout_s=5, retries=3) == [
            [],
            [Passage("7", '"A"\nb', 0.5)],
        ]
    assert len(requests) == 1


def test_documents_with_nothing_to_be_seen_are_left_out():
    items = [{"contents": " \n"}, {"contents": "\u200b\ufeff"}, {"contents": "\u200bx"}]
    assert read_result({"result": [items, items[:2]]}, 2, 3) == [[Passage("", "\u200bx", 0.0)], []]


def test_odd_ids_scores_and_half_characters():
    """JSON can spell half a character, which no tokenizer takes, and numbers that are none."""
    body = r"""{"result": [[{"document": {"id": true, "contents": "a\ud800b"}, "score": NaN},
        {"document": {"id": null, "contents": "\ud83d\ude42"}, "score": true},
        {"document": {"id": [1], "contents": "c"}, "score": -Infinity},
        {"document": {"id": "\udc00", "contents": "d"}, "score": "0.5"},
        {"id": 7, "contents": "e", "score": %s}]]}"""
    [found] = read_result(json.loads(body % ("9" * 400)), 1, 5)
    assert [(p.id, p.contents, p.score) for p in found] == [
        ("", "a\ufffdb", 0.0),
        ("", "\U0001f642", 0.0),
        ("", "c", 0.0),
        ("\ufffd", "d", 0.0),
        ("7", "e", 0.0),
    ]


def test_a_short_trouble_is_survived_with_growing_pauses(pauses):
    with server((500, b"boom", 0), (200, b"{", 0), (503, b"", 0), (200, GOOD, 0)) as (url, requests):
        assert search_over_http(["x"], url=url, topk=1, timeout_s=5, retries=3) == [
            [Passage("7", '"A"\nb', 0.5)]
        ]
    assert len(requests) == 4 and pauses == [0.5, 1.0, 2.0]


def test_pauses_are_bounded(pauses):
    with server((500, b"", 0)) as (url, requests), pytest.raises(RetrieverError):
        search_over_http(["x"], url=url, topk=1, timeout_s=5, retries=8)
    assert len(requests) == 9 and pauses == [0.5, 1, 2, 4, 8, 8, 8, 8]


def test_a_night_of_attempts_is_no_overflow(pauses, monkeypatch):
    def gone(*_):
        raise Unreachable("gone")

    monkeypatch.setattr(Client, "_ask", gone)
    with pytest.raises(Unreachable, match="failed 2001 attempts"):
        search_over_http(["x"], url="http://127.0.0.1:9", topk=1, timeout_s=5, retries=2000)
    assert set(pauses[4:]) == {8.0}


def test_a_server_error_names_status_and_text():
    with (
        server((500, b"CUDA out of memory", 0)) as (url, requests),
        pytest.raises(
            RetrieverError, match="failed 2 attempts .*status 500: 'CUDA out of memory'.*retriever.url"
        ),
    ):
        search_over_http(["x"], url=url, topk=1, timeout_s=5, retries=1)
    assert len(requests) == 2


@pytest.mark.parametrize("status", [400, 404, 422, 302])
def test_a_refusal_is_not_repeated(status):
    with (
        server((status, b"no such thing", 0)) as (url, requests),
        pytest.raises(
            RetrieverError, match=f"/retrieve refused the request with status {status}: 'no such thing'"
        ),
    ):
        search_over_http(["x"], url=url, topk=1, timeout_s=5, retries=5)
    assert len(requests) == 1


def test_a_slow_server_times_out():
    started = time.monotonic()
    with server((200, GOOD, 30)) as (url, requests):
        with pytest.raises(
            RetrieverError, match=r"failed 2 attempts .*no reply within 0.2 s \(retriever.timeout_s"
        ):
            search_over_http(["x"], url=url, topk=1, timeout_s=0.2, retries=1)
        assert len(requests) == 2
    assert time.monotonic() - started < 10


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_a_server_that_is_down(pauses):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(
        RetrieverError, match=f"retriever {url}/retrieve failed 3 attempts .*ConnectError.*start one with"
    ):
        search_over_http(["x"], url=url, topk=1, timeout_s=5, retries=2)
    assert pauses == [0.5, 1.0]
    with pytest.raises(RetrieverError, match="failed 1 attempt with 1 queries"):
        check_health(Retriever(url=url))


def test_check_health_asks_one_real_question():
    with server((200, search_r1_reply, 0)) as (url, requests):
        check_health(Retriever(url=url))
    assert len(requests) == 1 and requests[0][1]["topk"] == 1 and len(requests[0][1]["queries"]) == 1
    with server((200, {"result": [[]]}, 0)) as (url, requests):
        check_health(Retriever(url=url))  # an index may hold nothing of Hamlet
    with (
        server((200, {"result": [None]}, 0)) as (url, requests),
        pytest.raises(RetrieverError, match="no list of passages for query 1 of 1"),
    ):
        check_health(Retriever(url=url))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "", "ftp://x"])
def test_an_address_that_is_none_is_the_users_mistake(url):
    with pytest.raises(ValueError, match="must begin with http"):
        make_search(Retriever(url=url))
    with pytest.raises(ValueError, match="must begin with http"):
        search_over_http(["x"], url=url, topk=1, timeout_s=5, retries=0)


def test_make_search_passes_its_options(pauses):
    with server((500, b"", 0), (200, search_r1_reply, 0)) as (url, requests):
        search = make_search(Retriever(url=url, topk=4, retries=1))
        assert [len(passages) for passages in search(["x", "y"])] == [4, 4]
    assert requests[1][1]["topk"] == 4
    with (
        server((200, GOOD, 30)) as (url, _),
        pytest.raises(RetrieverError, match="1 attempt with .*within 0.1 s"),
    ):
        make_search(Retriever(url=url, timeout_s=0.1, retries=0))(["x"])


def test_make_search_without_url_searches_here(tmp_path):
    (tmp_path / "c.jsonl").write_text(
        "".join(
            json.dumps({"id": str(i), "contents": text}) + "\n"
            for i, text in enumerate(["red", "blue", "red red"])
        )
    )
    search = make_search(Retriever(url=None, corpus=str(tmp_path / "c.jsonl"), backend="bm25", topk=2))
    assert len(search.fingerprint) == 16
    assert [[p.id for p in passages] for passages in search(["red", "blue"])] == [["2", "0"], ["1", "0"]]
    assert search([]) == []


@pytest.mark.parametrize(
    "reply, kind",
    [
        ((500, b"", 0), ServerFault),
        ((429, b"busy", 0), ServerFault),
        ((200, b"{", 0), Malformed),
        ((200, {"result": []}, 0), Malformed),
        ((404, b"", 0), Refused),
        ((200, GOOD, 30), TimedOut),
    ],
)
def test_failures_have_types(reply, kind):
    with server(reply) as (url, _), pytest.raises(kind):
        search_over_http(["x"], url=url, topk=1, timeout_s=0.3, retries=0)
    with pytest.raises(Unreachable):
        search_over_http(["x"], url=f"http://127.0.0.1:{free_port()}", topk=1, timeout_s=0.3, retries=0)


def test_replicas_share_the_work_and_stand_in_for_each_other(pauses):
    with (
        server((200, search_r1_reply, 0)) as (first, asked_first),
        server((200, search_r1_reply, 0)) as (second, asked_second),
    ):
        client = Client([first, second], timeout_s=5)
        for _ in range(6):
            client.search(["x"], 1)
        assert len(asked_first) == len(asked_second) == 3
    with server((500, b"", 0)) as (bad, _asked_bad), server((200, search_r1_reply, 0)) as (good, asked_good):
        client = Client([bad, f"http://127.0.0.1:{free_port()}", good], timeout_s=5, retries=2)
        assert all(len(client.search(["x"], 2)[0]) == 2 for _ in range(3))
    assert len(asked_good) == 3 and not pauses, "a replica that was not tried yet needs no pause before it"


def test_every_replica_is_tried_before_a_pause(pauses):
    with (
        server((500, b"", 0)) as (first, asked_first),
        server((500, b"", 0)) as (second, asked_second),
        pytest.raises(ServerFault, match="failed 5 attempts"),
    ):
        Client([first, second], timeout_s=5, retries=4).search(["x"], 1)
    assert (len(asked_first), len(asked_second)) == (3, 2) and pauses == [0.5, 1.0]


def test_the_deadline_counts_all_attempts_and_pauses(monkeypatch):
    started = time.monotonic()
    with server((200, GOOD, 30)) as (url, requests), pytest.raises(TimedOut, match="failed 3 attempts"):
        # 0.3 + 0.5 + 0.3 + 1.0 would be too late; sleep is not waited out here
        Client([url], timeout_s=0.3, retries=50, deadline_s=1.7).search(["x"], 1)
    assert len(requests) == 3 and time.monotonic() - started < 2


def test_a_reply_that_trickles_is_late(monkeypatch):
    """httpx's read limit begins anew with every byte: such a reply would hold a run for ever."""
    stop = threading.Event()

    class Trickling(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            try:
                while not stop.wait(0.05):
                    self.wfile.write(b" ")
                    self.wfile.flush()
            except OSError:
                pass

        do_GET = do_POST

        def log_message(self, *_):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Trickling)
    httpd.daemon_threads = True
    threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    started = time.monotonic()
    try:
        with pytest.raises(TimedOut):
            search_over_http(
                ["x"], url=f"http://127.0.0.1:{httpd.server_port}", topk=1, timeout_s=0.4, retries=0
            )
        assert Client([f"http://127.0.0.1:{httpd.server_port}"], timeout_s=0.4).fingerprints() == [None]
    finally:
        stop.set()
        httpd.shutdown()
        httpd.server_close()
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    "health",
    [
        b"no JSON",
        b"[" * 100_000,
        b"{}",
        b"[]",
        b'{"fingerprint": ["a"]}',
        b'{"fingerprint": {}}',
        b'{"fingerprint": null}',
    ],
)
def test_a_fingerprint_that_is_none_is_not_known(health):
    client = Client(["http://there"], timeout_s=5)
    client.http = httpx.Client(
        transport=httpx.MockTransport(lambda request: httpx.Response(200, content=health))
    )
    assert client.fingerprints() == [None]


def test_replicas_of_different_indexes_are_refused(monkeypatch):
    with (
        server((200, search_r1_reply, 0)) as (first, _),
        server((200, search_r1_reply, 0)) as (second, asked),
    ):
        check_health(Retriever(url=first, replicas=(second,)))  # Search-R1's servers do not say
        assert len(asked) == 1
        monkeypatch.setattr(Client, "fingerprints", lambda self: ["a", None, "b"])
        with pytest.raises(ValueError, match=r"hold different indexes \(a, b\): start them with the same"):
            check_health(Retriever(url=first, replicas=(second,)))
    check_health(Retriever(url="http://127.0.0.1:9", replay="there"))  # a replay asks nobody
