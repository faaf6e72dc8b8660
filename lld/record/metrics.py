"""Metrics of episodes and of optimizer steps, timings, and the JSONL logs.

`metrics.jsonl` holds what a run computed, one row a step, and is bit-identical when a run is repeated or
resumed; `timings.jsonl` holds what depends on the machine.
"""

import fnmatch
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lld.episode import Episode
from lld.files import append_jsonl, replace_file
from lld.record.glossary import GLOSSARY
from lld.reward import exact_match, gold_in_results
from lld.selection import truncated
from lld.tools import TOOLS


def summarize_updates(update_rows: list[dict]) -> dict[str, float]:
    """One row for all optimizer steps of a rollout.

    Means of the losses, mean and maximum of the gradient norm, number of skipped steps.
    """
    names = sorted({name for row in update_rows for name in row if name.startswith("loss")})
    values = {name: [row[name] for row in update_rows if name in row] for name in [*names, "grad_norm"]}
    norms = values.pop("grad_norm")
    means = {name: sum(some) / len(some) for name, some in values.items()}
    return means | {
        "grad_norm": sum(norms) / len(norms) if norms else 0.0,
        "grad_norm_max": max(norms, default=0.0),
        "skipped_updates": sum(row["skipped_updates"] for row in update_rows),
    }


def described(name: str) -> bool:
    """Whether the glossary defines `name`; a '*' in an entry stands for any text, such as a benchmark."""
    return name in GLOSSARY or any(
        "*" in pattern and fnmatch.fnmatchcase(name, pattern) for pattern in GLOSSARY
    )


def mean(values: list[float]) -> float:
    """The mean of `values`; 0 if there are none."""
    return sum(values) / max(1, len(values))


def answer_match(episode: Episode) -> float:
    """Exact match of the answer; 0 without an answer."""
    if episode.answer is None:
        return 0.0
    return exact_match(episode.answer, episode.question.golden_answers)


def has_gold(episode: Episode) -> bool | None:
    """Whether a retrieved passage holds a gold answer; None for a yes/no question."""
    contents = [passage.contents for turn in episode.turns for passage in turn.passages]
    return gold_in_results(episode.question.golden_answers, contents)


def describe_episodes(episodes: list[Episode], rewards_PG: torch.Tensor) -> dict[str, float]:
    """Metrics of a step's episodes and their rewards."""
    turns = [turn for episode in episodes for turn in episode.turns]
    searches = [turn for turn in turns if turn.searched]
    attempts = [turn for turn in turns if turn.kind != "answer"]
    found = [has_gold(episode) for episode in episodes]
    row = {
        "reward/mean": float(rewards_PG.mean()),
        "reward/std": float(rewards_PG.std(dim=1).mean()),
        "reward/mixed_groups": float((rewards_PG != rewards_PG[:, :1]).any(dim=1).float().mean()),
        "em": mean([answer_match(episode) for episode in episodes]),
        "searches": mean([e.num_searches for e in episodes]),
        "turns": mean([len(e.turns) for e in episodes]),
        "valid_actions": mean([turn.kind != "invalid" for turn in turns]),
        "valid_searches": mean([turn.kind == "search" for turn in attempts]),
        "answered": mean([e.stop_reason == "answer" for e in episodes]),
        "truncated": mean([truncated(episode) for episode in episodes]),
        "cut_passages": mean([turn.num_cut_passages for turn in searches]),
        "response_tokens": mean([e.num_model_tokens for e in episodes]),
        "episode_tokens": mean([len(e.prompt_ids) + len(e.token_ids) for e in episodes]),
        "gold_in_results": mean([hit for hit in found if hit is not None]),
    }
    for kind in TOOLS:
        if kind != "search":  # its calls are "searches"
            calls = [sum(turn.tool_was_read and turn.kind == kind for turn in e.turns) for e in episodes]
            row[f"calls/{kind}"] = mean(calls)
    return row


def append_rows(path: Path, rows: list[dict]) -> None:
    """Appends JSON lines and flushes them to the disk; every name must be in the glossary.

    Raises OSError with the file's name if it cannot be written.
    """
    unknown = [name for row in rows for name in row if not described(name)]
    assert not unknown, f"not in GLOSSARY of lld/record/glossary.py: {unknown}"
    append_jsonl(path, rows)


def replace_last_row(path: Path, row: dict) -> None:
    """Replaces the last row of a log by `row`."""
    lines = path.read_text().split("\n")[:-1]
    replace_file(path, "".join(line + "\n" for line in [*lines[:-1], json.dumps(row)]), durable=True)


def truncate_rows(path: Path, step_of: Callable[[str], int], num_steps: int) -> None:
    """Drops the lines of steps that a resumed run will repeat.

    Also drops lines without a step (`step_of` raises) and an incomplete last line of a killed run.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text(errors="replace").split("\n")[:-1]:
        try:
            kept += [line] if step_of(line) < num_steps else []
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
    replace_file(path, "".join(line + "\n" for line in kept), durable=True)


class Timed:
    """A search function that adds up the seconds it takes."""

    def __init__(self, search):
        self.search = search
        self.luck = getattr(search, "luck", None)
        self.seconds = 0.0

    def __call__(self, queries: list[str]):
        start = time.perf_counter()
        try:
            return self.search(queries)
        finally:
            self.seconds += time.perf_counter() - start

    def reset(self) -> float:
        """The seconds since the last reset, summed over threads."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Clock:
    """Seconds of one step, phase by phase."""

    def __init__(self):
        self.start = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}
        self.search_s = 0.0  # of the rollout
        self.sampled_tokens = 0  # in the rollout by the model, on all processes

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self.last
        self.last = now

    def row(self, num_processes: int, trained_tokens: int) -> dict[str, float]:
        """time/* in seconds, speed/* in tokens a second."""
        return {
            **{f"time/{name}_s": seconds for name, seconds in self.laps.items()},
            "time/search_s": self.search_s,
            "time/step_s": self.last - self.start,
            "speed/sampled_tokens_per_s": self.sampled_tokens / num_processes / self.laps["rollout"],
            "speed/trained_tokens_per_s": trained_tokens / self.laps["update"],
        }
