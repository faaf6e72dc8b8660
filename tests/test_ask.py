"""lld.ask: what is shown of an episode, on the hand-set policy of tests/test_evaluate.py."""

import io
import json
import re
import shutil
from dataclasses import replace

import pytest
from test_evaluate import one_thread, world  # noqa: F401 (fixtures)

from lld.ask import agent as agent_module
from lld.ask import session
from lld.ask.screen import Screen, split_parts
from lld.evaluate import evaluate_questions
from lld.evaluation.options import checkpoint_of
from lld.retrieval.luck import Luck
from lld.tools import Passage, RetrieverError

OPENED = {}  # agents of this file, by configuration: opening one takes seconds


@pytest.fixture(autouse=True)
def opened_once(monkeypatch):
    make = agent_module.Agent
    monkeypatch.setattr(
        agent_module, "Agent", lambda cfg: OPENED.setdefault(cfg.model.path, None) or keep(cfg)
    )

    def keep(cfg):
        OPENED[cfg.model.path] = make(cfg)
        return OPENED[cfg.model.path]


def ask(world, *words):  # noqa: F811
    return session.main(["--ckpt", str(world / "ckpt"), "--config", str(world / "tiny.yaml"), *words])


class Input(io.StringIO):
    """Standard input: a pipe, or a terminal at which lines are typed; an exception in a line's place."""

    def __init__(self, text: str, terminal: bool = False):
        super().__init__(text)
        self.terminal = terminal

    def isatty(self):
        return self.terminal


def test_parts_of_a_turn():
    text = "<think> I need\nit. </think> so <search> who <b> wrote it </search>"
    words = [("think", ["I", "need", "it."]), ("text", ["so"]), ("search", ["who", "<b>", "wrote", "it"])]
    assert split_parts(text, ended=True) == words
    assert split_parts("<think> a </think> <sear", ended=False) == [("think", ["a"])]
    assert split_parts("<think> a bc", ended=False) == [("think", ["a"])]
    assert split_parts("1 < 2 and", ended=False) == [("text", ["1", "<", "2"])]
    assert split_parts("<answer> </answer>", ended=True) == []


def test_what_is_shown_of_an_unfinished_turn_is_never_taken_back():
    text = "<think> I ne<ed </think>\n<search> who <i> it </search> </answer> <answer> <think> x"

    def flat(text, ended):
        return [
            (n, label, word) for n, (label, words) in enumerate(split_parts(text, ended)) for word in words
        ]

    whole = flat(text, True)
    for end in range(len(text) + 1):
        shown = flat(text[:end], False)
        assert shown == whole[: len(shown)], text[:end]


def test_an_episode_is_shown_as_it_comes_and_is_the_one_that_eval_plays(world, capsys):  # noqa: F811
    assert ask(world, "question 0 of kind alpha") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:5] == [
        "search   ada",
        "         1  Ada",
        "         2  Ada",
        "answer   arden",
        "sources  Ada",
    ]
    assert re.fullmatch(r" {9}1 search, 6 tokens, \d+\.\d s", shown[5]) and shown[6:] == [""]
    assert ask(world, "--json", "question", "0", "of", "kind", "alpha") == 0
    record = json.loads(capsys.readouterr().out)
    agent = OPENED[str(world / "ckpt")]
    (question,) = [agent_module.Question("q", "question 0 of kind alpha", (), "")]
    played = evaluate_questions(agent.engine, agent.tokenizer, [question], agent.search, agent.cfg, seed=0)
    assert record["turns"] == played[0]["turns"] and record["sources"] == ["Ada"]
    assert (record["answer"], record["num_searches"], record["stop_reason"]) == ("arden", 1, "answer")


def test_words_are_on_the_screen_before_the_turn_ends(world):  # noqa: F811
    agent = make_agent(world)
    out = io.StringIO()
    seen = []
    writes = Screen.writes

    class Watched(Screen):
        def writes(self, text, ended):
            writes(self, text, ended)
            seen.append((out.getvalue(), ended))

    record = agent.play("question 2 of kind gamma", Watched(out, False))
    lines = out.getvalue().splitlines()
    assert [text for text, _ in seen][:3] == ["", "text     hmm", "text     hmm hmm"] and not seen[2][1]
    assert lines[0] == "text    " + " hmm" * 8 and lines[1].startswith("reads    ")
    assert lines[-1] == "answer   arden" and len(record["turns"]) == 2


def test_failed_searches_fail_on_the_screen_too(world, monkeypatch):  # noqa: F811
    agent = make_agent(world)
    luck = Luck(0.999999, lambda *_: [[Passage("", '"Nobody"\nknows')]], 1)
    monkeypatch.setattr(agent, "search", replace(agent.search, luck=luck))
    for screen in (None, Screen(io.StringIO(), False)):
        record = agent.play("question 0 of kind alpha", screen)
        assert record["turns"][0]["passages"] == ['"Nobody"\nknows'], screen


def make_agent(world):  # noqa: F811
    args = session.parse_arguments(["--ckpt", str(world / "ckpt"), "--config", str(world / "tiny.yaml")])
    return agent_module.Agent(session.read_options(args))


def test_a_prompt_stays_open_and_ctrl_c_ends_a_turn_only(world, capsys, monkeypatch):  # noqa: F811
    agent = make_agent(world)
    found, typed = agent.search, iter(["kind alpha", "", "kind alpha", KeyboardInterrupt, "kind beta"])

    def search(queries):
        agent.search = found
        raise KeyboardInterrupt

    def read_line(prompt):
        line = next(typed, EOFError)
        if isinstance(line, str):
            return line
        raise line

    agent.search = search
    monkeypatch.setattr("sys.stdin", Input("", terminal=True))
    monkeypatch.setattr("builtins.input", read_line)
    assert ask(world) == 0
    shown = capsys.readouterr().out
    assert "Ctrl-C ends a turn" in " ".join(shown.split()) and shown.count("stopped") == 1
    assert shown.count("answer   arden") == 2 and shown.count("sources  Ada") == 1
    assert "nothing was read" in shown


def test_questions_from_a_pipe_give_a_json_line_each(world, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr("sys.stdin", Input("kind alpha\n\nkind beta\n"))
    assert ask(world, "--json") == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["question"] for record in records] == ["kind alpha", "kind beta"]
    assert [record["num_searches"] for record in records] == [1, 0] and records[1]["sources"] == []


def test_questions_that_are_not_utf8_are_named(world, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"kind \xff\n"), encoding="utf-8"))
    assert ask(world, "--json") == 2
    assert "the questions are not UTF-8 (" in capsys.readouterr().err


def test_a_failing_search_and_too_long_a_question_are_told(world, capsys, monkeypatch):  # noqa: F811
    agent = make_agent(world)

    def search(queries):
        raise RetrieverError("gone")

    monkeypatch.setattr(agent, "search", search)
    assert ask(world, "kind alpha") == 3
    assert "lld.ask: gone" in capsys.readouterr().err
    assert ask(world, "word " * 300) == 2
    assert "rollout.max_prompt_tokens = 200" in capsys.readouterr().err


def test_a_terminal_is_told_nothing_that_it_would_obey(monkeypatch):
    out = io.StringIO()
    monkeypatch.setenv("COLUMNS", "30")
    screen = Screen(out, colour=False)
    screen.finds([Passage("0", '"\x1b[2JTitle\x07 that is far too long for a line"\ntext')])
    screen.writes("<think> \x1b]0;me\x07 and a thought that is longer than a line </think>", ended=True)
    screen.end_line()
    text = out.getvalue()
    assert "\x1b" not in text and "\x07" not in text
    assert all(len(line) <= 30 for line in text.splitlines()) and len(text.splitlines()) > 3
    Screen(out, colour=True).line("answer", "x", "answer")
    assert "\x1b[1;32mx\x1b[0m" in out.getvalue()


def test_colours_are_for_terminals_that_want_them(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert session.wants_colour(Input("", terminal=True)) and not session.wants_colour(Input(""))
    monkeypatch.setenv("TERM", "dumb")
    assert not session.wants_colour(Input("", terminal=True))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not session.wants_colour(Input("", terminal=True))


def test_a_runs_folder_means_its_best_checkpoint(world, tmp_path, capsys):  # noqa: F811
    assert checkpoint_of("org/name") == "org/name"
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert session.main(["--ckpt", str(tmp_path / "run"), "kind alpha"]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err
    for step in (2, 10):
        folder = tmp_path / "run" / "checkpoints" / f"step_{step:06d}"
        shutil.copytree(world / "ckpt", folder)
        (folder / "manifest.json").write_text("{}")
    assert checkpoint_of(str(tmp_path / "run")) == str(folder)
    (tmp_path / "run" / "checkpoints" / "best.json").write_text('{"checkpoint": "step_000002"}')
    shutil.copy(world / "tiny.yaml", tmp_path / "run" / "config.yaml")
    assert session.main(["--ckpt", str(tmp_path / "run"), "kind alpha"]) == 0
    told = capsys.readouterr()
    assert "answer   arden" in told.out and f"options of {tmp_path / 'run' / 'config.yaml'}" in told.err
    assert str(folder.with_name("step_000002")) in OPENED


def test_a_mistake_is_one_line(tmp_path, capsys):
    assert session.main(["--ckpt", str(tmp_path), "who?"]) == 2
    assert "no config.json in it" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert session.main(["--ckpt", str(tmp_path), "optim.lrr=1", "who?"]) == 2
    assert "did you mean 'lr'?" in capsys.readouterr().err
