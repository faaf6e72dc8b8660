"""The server's contract: Search-R1's client can talk to it, ours too, and bad input is never a 5xx."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import uvicorn
from conftest import ROOT
from fastapi.testclient import TestClient

import retriever_server
from lld.config import Retriever
from lld.retrieval.backends import open_retriever
from lld.retrieval.client import Client, check_health
from lld.retrieval.service import make_app
from retriever_server import parse_options

TEXTS = ['"Red"\nred apple', '"Blue"\nblue sky', '"Green"\ngreen apple pie', '"Ünï"\nödd “text” </answer>']


@pytest.fixture(scope="module")
def retriever(tmp_path_factory):
    path = tmp_path_factory.mktemp("server") / "corpus.jsonl"
    path.write_text(
        "".join(json.dumps({"id": f"d{i}", "contents": text}) + "\n" for i, text in enumerate(TEXTS))
    )
    return open_retriever(Retriever(url=None, corpus=str(path), backend="bm25"))


@pytest.fixture(scope="module")
def client(retriever):
    # One event loop for all requests
    with TestClient(make_app(retriever, topk=2), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def live_url(retriever):
    """A real uvicorn in a thread, on a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(make_app(retriever, topk=2), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            assert thread.is_alive(), "uvicorn did not start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


QUERIES = ["green pie", "ödd", "sky"]
BEST = ["d2", "d3", "d1"]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("topk", [None, 1, 2, 99])
def test_documents_come_bare_or_with_scores_for_any_number_of_queries(client, retriever, count, topk):
    """Search-R1's server fails for return_scores=false, and is silently wrong for exactly two queries."""
    queries = QUERIES[:count]
    expected = retriever.search(queries, topk or 2)
    assert [hits[0].id for hits in expected] == BEST[:count] and all(
        len(hits) == min(topk or 2, 4) for hits in expected
    )
    scored = client.post("/retrieve", json={"queries": queries, "topk": topk, "return_scores": True})
    assert scored.json() == {
        "result": [
            [{"document": {"id": p.id, "contents": p.contents}, "score": p.score} for p in hits]
            for hits in expected
        ]
    }
    bare = client.post("/retrieve", json={"queries": queries, "topk": topk, "return_scores": False})
    assert bare.json() == {
        "result": [[{"id": p.id, "contents": p.contents} for p in hits] for hits in expected]
    }
    assert scored.status_code == bare.status_code == 200


def test_topk_and_return_scores_may_be_left_out(client):
    assert client.post("/retrieve", json={"queries": ["pie"]}).json()["result"][0] == [
        {"id": "d2", "contents": TEXTS[2]},
        {"id": "d0", "contents": TEXTS[0]},
    ]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"{}",
        b'{"queries": null}',
        b'{"queries": "x"}',
        b'{"queries": [1]}',
        b'{"queries": [null]}',
        b'{"queries": [["x"]]}',
        b'{"queries": ["x"], "topk": 0}',
        b'{"queries": ["x"], "topk": -1}',
        b'{"queries": [], "topk": 0}',
        b'{"queries": ["x"], "topk": 1.5}',
        b'{"queries": ["x"], "topk": NaN}',
        b'{"queries": ["x"], "topk": Infinity}',
        b'{"queries": ["x"], "topk": "many"}',
        b'{"queries": ["x"], "return_scores": "perhaps"}',
        b'{"queries": ["\\ud800"]}',
        b'{"\\ud800": 1}',
        b'{"queries": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_bad_input_is_refused_as_the_clients_fault(client, body):
    reply = client.post("/retrieve", content=body, headers={"Content-Type": "application/json"})
    assert 400 <= reply.status_code < 500, reply.text
    assert reply.json()["detail"]


@pytest.mark.parametrize("query", ["", " ", "?!", "\x00", "x" * 100_000, "🙂", "red\nblue"])
def test_odd_queries_are_answered(client, query):
    reply = client.post("/retrieve", json={"queries": [query], "topk": 1000, "return_scores": True})
    assert reply.status_code == 200 and {item["document"]["id"] for item in reply.json()["result"][0]} == {
        "d0",
        "d1",
        "d2",
        "d3",
    }


def test_a_topk_below_one_says_so(client):
    reply = client.post("/retrieve", json={"queries": ["x"], "topk": 0})
    assert reply.status_code == 422 and reply.json() == {
        "detail": "body.topk: Input should be greater than 0"
    }


def test_health(client):
    reply = client.get("/health").json()
    assert len(reply.pop("fingerprint")) == 16 and reply == {
        "status": "ok",
        "corpus_size": 4,
        "backend": "bm25",
        "encoder": None,
    }


def test_search_r1s_client_can_talk_to_it(live_url):
    """`_batch_search` and `_passages2string` of Search-R1's generation.py, written anew: its payload, its way
    of reading."""
    payload = {"queries": ["green pie apple", "sky"], "topk": 3, "return_scores": True}
    results = httpx.post(f"{live_url}/retrieve", json=payload).json()["result"]
    references = []
    for documents in results:
        text = ""
        for number, item in enumerate(documents):
            title, *lines = item["document"]["contents"].split("\n")
            text += f"Doc {number + 1}(Title: {title}) " + "\n".join(lines) + "\n"
        references.append(text)
    assert (
        references[0]
        == 'Doc 1(Title: "Green") green apple pie\nDoc 2(Title: "Red") red apple\nDoc 3(Title: "Blue") '
        "blue sky\n"
    )
    assert references[1].startswith('Doc 1(Title: "Blue") blue sky\nDoc 2(')


def test_our_client_gets_what_the_retriever_found(live_url, retriever):
    check_health(Retriever(url=live_url))
    assert Client([live_url], timeout_s=10).search(QUERIES, 3) == retriever.search(QUERIES, 3)


def test_many_clients_at_once(live_url, retriever):
    def ask(i):
        return Client([live_url], timeout_s=10).search([QUERIES[i % 3], f"apple {i}"], 2)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(40))) == [
            retriever.search([QUERIES[i % 3], f"apple {i}"], 2) for i in range(40)
        ]


def test_the_command_line_beats_the_yaml_and_the_yaml_the_defaults(tmp_path):
    (tmp_path / "run.yaml").write_text("retriever: {corpus: a.jsonl, backend: bm25, topk: 5}\n")
    options, args = parse_options(["--config", str(tmp_path / "run.yaml"), "--topk", "7", "--port", "9"])
    assert (options.corpus, options.backend, options.topk, options.encoder, args.host, args.port) == (
        "a.jsonl",
        "bm25",
        7,
        Retriever.encoder,
        "127.0.0.1",
        9,
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--backend", "bm25", "--corpus", "none.jsonl", "--port", "0"],
            "error: no corpus file none.jsonl: set --corpus",
        ),
        (["--backend", "bm25", "--port", "0"], "error: --corpus is null"),
        (["--corpus", "x", "--port", "0"], "error: --index is null and backend is null"),
        (["--topk", "0"], "error: --topk = 0: must be greater than 0"),
        (
            ["--backend", "bm25", "--corpus", "x", "--host", ""],
            "error: --host is empty, which would serve every network",
        ),
        (["--backend", "bm25", "--corpus", "x", "--host", " "], "error: --host is empty"),
        (["--backend", "bm25", "--corpus", "x", "--port", "70000"], "error: --port = 70000: must be from 0"),
        (["--host", "no such host"], "error: --host no such host --port 8000 is no address"),
        (
            ["--backend", "bm25", "--corpus", "x", "--host", "192.0.2.1"],
            "error: cannot serve on 192.0.2.1 port 8000",
        ),
        (["--max-passages", "0"], "error: --max-passages = 0: must be greater than 0"),
        (["--cache-mb", "-1"], "error: --cache-mb = -1.0: must be 0 or more"),
        (
            ["--corpus", "x", "--cache-mb", "1e9", "--port", "0"],
            "error: cache and requests may need 1000001.04 GB of memory",
        ),
    ],
)
def test_a_mistake_ends_the_command_with_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["retriever_server.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        retriever_server.main()
    assert message in capsys.readouterr().err


def test_a_port_in_use_is_named_before_an_index_is_opened(monkeypatch, capsys):
    monkeypatch.setattr(
        "lld.retrieval.backends.open_retriever", lambda *_: pytest.fail("the index was opened")
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setattr(
            "sys.argv", ["retriever_server.py", "--backend", "bm25", "--corpus", "x", "--port", port]
        )
        with pytest.raises(SystemExit, match="2"):
            retriever_server.main()
    said = capsys.readouterr()
    assert (
        f"error: cannot serve on 127.0.0.1 port {port} (Address already in use): stop what listens there, "
        "or choose another --port" in said.err
    )
    assert "http://" not in said.out


def test_a_mistake_is_told_before_the_large_libraries_are_imported(tmp_path):
    program = (
        "import sys, retriever_server; retriever_server.parse_options(['--topk', '3']); print([name "
        "for name in ('torch', 'faiss', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_a_port_is_held_but_refuses_until_the_index_is_open():
    bound = retriever_server.bind("127.0.0.1", 0)
    with bound, pytest.raises(ConnectionRefusedError):
        socket.create_connection(bound.getsockname())


def test_the_command_says_where_it_listens_and_ends_with_0_when_told_to_stop(tmp_path):
    """The line comes when the address answers; SIGTERM is obeyed, not died of."""
    (tmp_path / "c.jsonl").write_text(
        "".join(json.dumps({"id": i, "contents": text}) + "\n" for i, text in enumerate(TEXTS))
    )
    command = [
        sys.executable,
        str(ROOT / "retriever_server.py"),
        "--backend",
        "bm25",
        "--corpus",
        str(tmp_path / "c.jsonl"),
        "--port",
        "0",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=tmp_path
    ) as process:
        line = process.stdout.readline()
        address = line.rsplit(" ", 1)[1].strip()
        assert line.startswith(
            "4 passages, backend bm25, listening on http://127.0.0.1:"
        ) and not address.endswith(":0")
        assert (
            httpx.post(f"{address}/retrieve", json={"queries": ["sky"]}, trust_env=False).json()["result"][0][
                0
            ]["id"]
            == "1"
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
