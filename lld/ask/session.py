"""Asks a checkpoint questions, and shows how it answers them.

    python -m lld.ask --ckpt RUN [--config configs/x.yaml] [--json] ["question"] [section.key=value ...]

RUN is a run's folder (its best checkpoint is taken), a checkpoint or a hub name. Without a question a prompt
stays open, or questions are read from a pipe, one a line. Every question is an episode of its own: the policy
knows nothing of earlier ones. Options are those of the run; without one they are the defaults, so
`retriever.url=…`, or `retriever.url=null retriever.corpus=… retriever.backend=bm25`, says where to search.

Ctrl-C ends a turn, Ctrl-D the session. Exit codes: 0 done; 2 a mistake in what was asked for; 3 the search
failed; 130 Ctrl-C.
"""

import argparse
import dataclasses
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lld import settings
from lld.ask.screen import Screen, wants_colour
from lld.config import Config
from lld.evaluation.options import checkpoint_of, lies_in_run, options_of
from lld.model.folder import check_folder
from lld.record.runs import printable
from lld.tools import RetrieverError

if TYPE_CHECKING:
    from lld.ask.agent import Agent

PROMPT = "? "
INTERRUPTED = 130  # as shells report a process that SIGINT ended
NO_ANSWER = {
    "turns": "no answer: all its turns are used up (eval.max_turns)",
    "length": "no answer: the episode is full (rollout.max_episode_tokens)",
}


def main(argv: list[str] | None = None) -> int:
    try:
        settings.refuse_dashes(sys.argv[1:] if argv is None else argv)
        args = parse_arguments(argv)
        cfg = read_options(args)
        # Imports torch, which takes seconds: mistakes in the options are reported before.
        from lld.ask.agent import Agent

        agent = Agent(cfg)
        screen = Screen(sys.stdout, wants_colour(sys.stdout) and not args.json)
        if args.question:
            return ask(agent, args.question, screen, args.json)
        return converse(agent, screen, args.json)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, RetrieverError) as error:
        return tell(error)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lld.ask", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ckpt", required=True, metavar="RUN", help="run folder, checkpoint or hub name")
    parser.add_argument("--config", metavar="YAML", help="options; default: those of the checkpoint's run")
    parser.add_argument("--json", action="store_true", help="print one JSON object a question, no stream")
    parser.add_argument("words", nargs="*", metavar="question or section.key=value")
    args = parser.parse_intermixed_args(argv)
    args.overrides = [word for word in args.words if re.match(r"\w+\.\w[\w.]*=", word)]
    args.question = " ".join(word for word in args.words if word not in args.overrides).strip()
    return args


def read_options(args: argparse.Namespace) -> Config:
    """The options to play with: one slot, and model.path is the checkpoint."""
    ckpt = checkpoint_of(args.ckpt)
    check_folder(ckpt, "--ckpt")
    if args.config is not None or lies_in_run(Path(ckpt)):
        cfg = options_of(Path(ckpt), args.config, args.overrides, questions=False)
    else:
        cfg = settings.with_overrides({}, args.overrides)
    return dataclasses.replace(
        cfg,
        model=dataclasses.replace(cfg.model, path=ckpt),
        rollout=dataclasses.replace(cfg.rollout, num_slots=1, overlap_search=False),
    )


def converse(agent: "Agent", screen: Screen, as_json: bool) -> int:
    """Answers questions until the input ends; returns the exit code of the last one in a pipe, else 0."""
    at_terminal, code = sys.stdin.isatty(), 0
    if at_terminal:
        import readline  # noqa: F401 (input() then has a history and editing)

        screen.line("", f"{agent.cfg.model.path}: Ctrl-C ends a turn, Ctrl-D the session")
    for question in read_questions(at_terminal):
        try:
            if not (at_terminal or as_json):
                screen.line(PROMPT.strip(), question, "question")
            code = ask(agent, question, screen, as_json)
        except KeyboardInterrupt:
            screen.end_line()
            screen.line("", "stopped")
            agent.reset()
            if not at_terminal:
                return INTERRUPTED
        except (ValueError, RetrieverError) as error:
            screen.end_line()
            code = tell(error)
            agent.reset()
    return 0 if at_terminal else code


def read_questions(at_terminal: bool) -> Iterator[str]:
    if not at_terminal:
        try:
            yield from filter(None, map(str.strip, sys.stdin))
        except UnicodeDecodeError as error:
            raise ValueError(f"the questions are not UTF-8 ({error}): convert them with iconv") from None
        return
    while True:
        try:
            question = input(PROMPT).strip()
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            print()
            return
        if question:
            yield question


def ask(agent: "Agent", question: str, screen: Screen, as_json: bool) -> int:
    """Plays one episode and shows it; returns 0. Raises ValueError and RetrieverError."""
    began = time.monotonic()
    record = agent.play(question, None if as_json else screen)
    record["seconds"] = round(time.monotonic() - began, 3)
    if as_json:
        print(json.dumps(record), flush=True)
        return 0
    screen.end_line()
    if record["answer"] is None:
        screen.line("", NO_ANSWER.get(record["stop_reason"], f"no answer: {record['stop_reason']}"))
    else:
        screen.line("sources", describe_sources(record), "sources" if record["sources"] else "doubt")
    searches = f"{record['num_searches']} search" + "es" * (record["num_searches"] != 1)
    screen.line("", f"{searches}, {record['num_tokens']} tokens, {record['seconds']:.1f} s\n")
    return 0


def describe_sources(record: dict) -> str:
    """The titles of the passages that contain the answer, or why there are none."""
    if record["sources"]:
        return "; ".join(record["sources"])
    return "no passage that was read contains this answer" if record["num_searches"] else "nothing was read"


def tell(error: Exception) -> int:
    print(printable(f"lld.ask: {error}"), file=sys.stderr, flush=True)
    return 3 if isinstance(error, RetrieverError) else 2
