"""Glossary of every logged name, running means over processes, and the JSONL log.

`metrics.jsonl` holds what a run computed, one row a step, and is bit-identical when a run is repeated or
resumed; `timings.jsonl` holds what the clock said.
"""

import fnmatch
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lld.episode import Episode
from lld.files import naming, replace_file
from lld.record.glossary import GLOSSARY
from lld.reward import exact_match, gold_in_results
from lld.tools import TOOLS


def summarize_updates(update_rows: list[dict]) -> dict[str, float]:
    """The optimizer steps of a rollout as one row: means of losses, mean and maximum of the gradient norm,
    number skipped."""
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
    """Whether the glossary defines `name`; eval names hold the benchmark in place of '*'."""
    return name in GLOSSARY or any(
        "*" in pattern and fnmatch.fnmatchcase(name, pattern) for pattern in GLOSSARY
    )


def describe_episodes(episodes: list[Episode], rewards_PG: torch.Tensor) -> dict[str, float]:
    """What the episodes of a step were like; names in GLOSSARY."""
    turns = [turn for episode in episodes for turn in episode.turns]
    searches = [turn for turn in turns if turn.searched]
    attempts = [turn for turn in turns if turn.kind != "answer"]
    found = [
        gold_in_results(
            e.question.golden_answers, [passage.contents for turn in e.turns for passage in turn.passages]
        )
        for e in episodes
    ]

    def mean(values):
        return sum(values) / max(1, len(values))

    return {
        "reward/mean": float(rewards_PG.mean()),
        "reward/std": float(rewards_PG.std(dim=1).mean()),
        "reward/mixed_groups": float((rewards_PG != rewards_PG[:, :1]).any(dim=1).float().mean()),
        "em": mean(
            [0.0 if e.answer is None else exact_match(e.answer, e.question.golden_answers) for e in episodes]
        ),
        "searches": mean([e.num_searches for e in episodes]),
        "turns": mean([len(e.turns) for e in episodes]),
        "valid_actions": mean([turn.kind != "invalid" for turn in turns]),
        "valid_searches": mean([turn.kind == "search" for turn in attempts]),
        "answered": mean([e.stop_reason == "answer" for e in episodes]),
        "truncated": mean(
            [e.stop_reason == "length" or any(turn.stop == "length" for turn in e.turns) for e in episodes]
        ),
        "cut_passages": mean([turn.num_cut_passages for turn in searches]),
        "response_tokens": mean([e.num_model_tokens for e in episodes]),
        "episode_tokens": mean([len(e.prompt_ids) + len(e.token_ids) for e in episodes]),
        "gold_in_results": mean([hit for hit in found if hit is not None]),
        # The search tool's are "searches" above
        **{
            f"calls/{kind}": mean([sum(t.answered and t.kind == kind for t in e.turns) for e in episodes])
            for kind in TOOLS
            if kind != "search"
        },
    }


def append_rows(path: Path, rows: list[dict]) -> None:
    """Appends JSON lines and makes sure they are on the disk; every name must be in the glossary. An OSError
    names the file."""
    unknown = [name for row in rows for name in row if not described(name)]
    assert not unknown, f"not in metrics.GLOSSARY: {unknown}"
    with naming(path), open(path, "a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())


def replace_last_row(path: Path, row: dict) -> None:
    """Puts `row` in the place of the log's last one."""
    lines = path.read_text().split("\n")[:-1]
    replace_file(path, "".join(line + "\n" for line in [*lines[:-1], json.dumps(row)]), durable=True)


def truncate_rows(path: Path, step_of: Callable[[str], int], num_steps: int) -> None:
    """Drops lines of steps that a resumed run is about to repeat, those that have no step (`step_of` raises),
    and a last one cut short by a kill."""
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
    """A search function that knows how long it has run."""

    def __init__(self, search):
        self.search, self.seconds = search, 0.0

    def __call__(self, queries: list[str]):
        start = time.perf_counter()
        try:
            return self.search(queries)
        finally:
            self.seconds += time.perf_counter() - start

    def reset(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Clock:
    """Seconds of the phases of one step."""

    def __init__(self):
        self.start = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self.last = now - self.last, now

    def row(
        self, search_s: float, episodes: list[Episode], num_processes: int, trained_tokens: int
    ) -> dict[str, float]:
        sampled = sum(episode.num_model_tokens for episode in episodes)
        return {
            **{f"time/{name}_s": seconds for name, seconds in self.laps.items()},
            "time/search_s": search_s,
            "time/step_s": self.last - self.start,
            "speed/sampled_tokens_per_s": sampled / num_processes / self.laps["rollout"],
            "speed/trained_tokens_per_s": trained_tokens / self.laps["update"],
        }
