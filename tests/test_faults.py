"""Whole runs against a server that is killed, hangs, and lies: what was trained on is what was retrieved, and
nothing else."""

import dataclasses
import gc
import json
import random
import socket
import struct
import time
import weakref
import zlib
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from types import SimpleNamespace

import pytest
import torch
from conftest import make_tokenizer
from test_rollout import BUDGETS, ScriptedEngine, play, rollout
from test_train import rows, write_config

import train
from lld import episode as episode_module
from lld import protocol, settings
from lld.episode import Question
from lld.model.load import load_tokenizer
from lld.protocol import Passage
from lld.record.metrics import Clock, Timed
from lld.retrieval.client import Client
from lld.running import playing, setup
from lld.tools import RetrieverError

FAULTS = ("killed", "hangs", "short", "garbage", "empty", "blank", "error", "half")


class Unreliable(BaseHTTPRequestHandler):
    """Answers well, and remembers what it answered, or does the next of FAULTS; `draw` decides, request by
    request."""

    def do_POST(self):
        cls = type(self)
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        with cls.lock:
            fault = FAULTS[len(cls.faults) % len(FAULTS)] if cls.draw.random() < cls.share else None
            cls.served += 1
            passages = {
                query: [
                    {
                        "document": {
                            "id": f"{cls.served}-{rank}",
                            "contents": f'"T {cls.served}"\nabout {query} {rank}',
                        },
                        "score": 1.0,
                    }
                    for rank in range(3)
                ]
                for query in queries
            }
            if fault is not None:
                cls.faults.append(fault)
            elif cls.served > 1:  # the first is the question of health
                cls.good.append(
                    {
                        query: [item["document"]["contents"] for item in items]
                        for query, items in passages.items()
                    }
                )
        body = json.dumps({"result": [passages[query] for query in queries]}).encode()
        if fault == "hangs":
            time.sleep(0.5)
        if fault == "killed":
            # A reset, as from a dead process
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return self.connection.close()
        lists = [passages[query] for query in queries]
        lies = {
            "garbage": b"<html>\xff",
            "short": lists[:-1],
            "empty": [[]] * len(queries),
            "blank": [[{"document": {"id": "0", "contents": "  "}}]] * len(queries),
        }
        if fault in lies:
            body = (
                lies[fault]
                if isinstance(lies[fault], bytes)
                else json.dumps({"result": lies[fault]}).encode()
            )
        try:
            self.send_response(500 if fault == "error" else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if fault == "half" else body)
        except OSError:
            pass  # the client has given up

    def log_message(self, *_):
        pass


def run(folder, name, monkeypatch, share, server_class=Unreliable, arguments=(), **rollout):
    """Trains against such a server; returns exit code, its handler, and the episodes of every step that was
    trained on."""
    handler = type(
        "Handler",
        (server_class,),
        {"draw": random.Random(1), "share": 0.0, "served": 0, "faults": [], "good": [], "lock": Lock()},
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    tree = {
        "retriever": {"url": f"http://127.0.0.1:{server.server_port}", "retries": 0, "timeout_s": 0.25},
        "eval": {"every": 0},
        "rollout": {"num_questions": 6, "num_slots": 2, "max_failed_groups": 0.9, **rollout},
        "run": {"dir": str(folder / name), "steps": 4, "save_every": 4},
        "optim": {"lr": 1e-6},
    }
    trained, collate = [], episode_module.collate

    def spy(episodes, *rest):
        trained.append(list(episodes))
        return collate(episodes, *rest)

    check_health = setup.check_health
    with monkeypatch.context() as patch:
        patch.setattr(episode_module, "collate", spy)
        patch.setattr(
            setup,
            "check_health",
            lambda options: (
                check_health(dataclasses.replace(options, timeout_s=20)),
                setattr(handler, "share", share),
            ),
        )
        code = train.main(["--config", str(write_config(folder, name, **tree)), *arguments])
    server.shutdown()
    server.server_close()
    return code, handler, trained


def observations(episode) -> list[list[int]]:
    return [
        episode.token_ids[turn.end : turn.observation_end]
        for turn in episode.turns
        if turn.kind == "search" and turn.observation_end > turn.end
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_only_what_was_retrieved_is_trained_on(folder, monkeypatch, overlap):
    """Every observation of every trained episode is, token for token, the rendering of a good reply to its
    very query."""
    code, handler, trained = run(
        folder, f"faulty-{overlap}", monkeypatch, 0.3, overlap_search=overlap, num_questions=10
    )
    assert code == 0 and len(trained) == 4 and len(set(handler.faults)) >= 4, (code, handler.faults)
    tokenizer = load_tokenizer(settings.load(str(folder / f"faulty-{overlap}.yaml")).model)
    retrieved = {(query, tuple(contents)) for reply in handler.good for query, contents in reply.items()}
    num_observations = 0
    for episode in (episode for episodes in trained for episode in episodes):
        assert not episode.failure and episode.stop_reason in ("answer", "turns", "length")
        searched = [turn for turn in episode.turns if turn.searched]
        for turn in searched:
            assert (turn.content, tuple(passage.contents for passage in turn.passages)) in retrieved
        for turn, ids in zip(searched, observations(episode), strict=True):
            assert ids == protocol.render_observation(tokenizer, list(turn.passages), 100)[0]
            num_observations += 1
    assert num_observations > 15
    logged = rows(folder / f"faulty-{overlap}")
    assert [row["failed_groups"] + row["empty_groups"] for row in logged] == pytest.approx(
        [1 - len(episodes) / 30 for episodes in trained]
    ) and sum(row["failed_groups"] for row in logged) > 0
    for episodes in trained:  # whole groups
        assert len(episodes) % 3 == 0 and all(
            len({e.question.id for e in episodes[i : i + 3]}) == 1 for i in range(0, len(episodes), 3)
        )


def test_above_the_rate_the_run_stops_with_a_checkpoint(folder, monkeypatch, capsys):
    code, handler, trained = run(folder, "too-faulty", monkeypatch, 1.0, max_failed_groups=0.4)
    message = capsys.readouterr().err
    assert (
        code == 3
        and not trained
        and "Nothing was trained on the failed search" in message
        and "last reason" in message
    )
    assert (folder / "too-faulty" / "checkpoints" / "step_000000" / "manifest.json").exists() and len(
        handler.faults
    ) >= 1


class Choosy(Unreliable):
    """Finds nothing for one query in `every`, by its hash, and passages for all others."""

    every = 7

    def do_POST(self):
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        found = [
            []
            if zlib.crc32(query.encode()) % self.every == 0
            else [{"document": {"id": "0", "contents": f'"T"\nabout {query}'}}]
            for query in queries
        ]
        body = json.dumps({"result": found}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_queries_that_find_nothing_cost_their_own_groups_and_a_resumed_run_can_go_on(
    folder, monkeypatch, capsys
):
    """One such query took all groups of its request with it, and the run stopped, again and again at the same
    place."""
    code, _, trained = run(folder, "choosy", monkeypatch, 0, Choosy, max_failed_groups=0.0)
    logged = rows(folder / "choosy")
    dropped = pytest.approx([1 - len(episodes) / 18 for episodes in trained])
    assert (
        code == 0
        and [row["empty_groups"] for row in logged] == dropped
        and all(row["failed_groups"] == 0 for row in logged)
    )
    assert 0 < sum(row["empty_groups"] for row in logged) < 2
    Nothing = type("Nothing", (Choosy,), {"every": 1})
    code, _, trained = run(folder, "nothing", monkeypatch, 0, Nothing)
    message = capsys.readouterr().err
    assert (
        code == 3
        and not trained
        and "groups were dropped for a search without a passage (the query " in message
        and "set retriever.empty_results=show" in message
    )
    code, _, trained = run(
        folder, "nothing", monkeypatch, 0, Nothing, arguments=["--resume", "retriever.empty_results=show"]
    )
    assert (
        code == 0
        and [len(episodes) for episodes in trained] == [18] * 4
        and all(row["empty_groups"] == 0 for row in rows(folder / "nothing"))
    )
    assert any(turn.searched and not turn.passages for episode in trained[0] for turn in episode.turns)


def failing_once(queries):
    if "bad" in queries:
        raise RetrieverError("gone")
    return [[Passage("0", '"T"\ntext')] for _ in queries]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_search_ends_its_episodes_and_no_others(overlap):
    tokenizer = make_tokenizer()
    turns = [
        [["<search> bad </search>", "<answer> never </answer>"]],
        [["<search> fine </search>", "<answer> a </answer>"]],
    ]
    episodes = play(tokenizer, failing_once, turns, overlap_search=overlap, max_failed_groups=1)
    assert [e.stop_reason for e in episodes] == ["failed_search", "answer"] and [
        e.failure for e in episodes
    ] == ["gone", ""]
    assert episodes[0].num_searches == 0 and set(episodes[0].action_ids) == {1}, (
        "nothing stands where the passages would"
    )
    with pytest.raises(RetrieverError, match="gone"):
        play(tokenizer, failing_once, turns * 2, overlap_search=overlap, max_failed_groups=1)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("over_http", [False, True])
def test_a_failed_search_keeps_no_engine_in_memory(over_http, overlap):
    """Its traceback held the engine, and so 15 GB of cache during the update."""
    client = Client(["http://127.0.0.1:9"], timeout_s=1, retries=1)
    search = partial(client.search, topk=1) if over_http else failing_once
    turns = [[["<search> bad </search>", "<answer> never </answer>"]]]
    tokenizer = make_tokenizer()
    engine, questions = ScriptedEngine(tokenizer, turns), [Question("q/0", "who?", ("gold",), "q")]
    options = BUDGETS | {"overlap_search": overlap, "max_failed_groups": 1}
    gone = weakref.ref(engine)
    gc.disable()
    try:
        rollout(engine, tokenizer, questions, search, num_samples=1, seed=0, step=0, **options)
        del engine
        assert gone() is None
    finally:
        gc.enable()


def test_updates_take_any_number_of_rows():
    """A step that lost groups still makes all its updates, on every process, with every row once."""
    from lld.update import plan_updates

    for rows_left in range(10, 40, 3):
        plan = plan_updates(torch.randint(5, 99, (rows_left,)).tolist(), 10, 3)
        assert sorted(row for shares in plan for share in shares for row in share) == list(range(rows_left))
        sizes = [sum(map(len, shares)) for shares in plan]
        assert len(sizes) == 10 and max(sizes) - min(sizes) <= 1 and min(sizes) >= 1


def test_the_time_of_searches_is_that_of_the_rollout_alone(monkeypatch):
    def draw_groups(run, step):
        run.search.seconds += 2.0
        return [], {}

    monkeypatch.setattr(playing, "draw_groups", draw_groups)
    monkeypatch.setattr(playing.saving, "enter_rollout", lambda run, step: None)
    monkeypatch.setattr(playing.saving, "enter_update", lambda run: None)
    search, clock = Timed(None), Clock()
    search.seconds = 5.0  # of an evaluation at the start
    playing.play(
        SimpleNamespace(cfg=settings.Config(), box=None, optimizer=None, search=search, clock=clock), 0
    )
    search.seconds += 7.0  # of one after the step
    clock.lap("update")
    assert clock.row(1, 0)["time/search_s"] == 2.0
