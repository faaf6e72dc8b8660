"""Glossary of every logged name, running means over processes, and the JSONL log.

`metrics.jsonl` holds what a run computed, one row a step, and is bit-identical when a run is repeated or
resumed; `timings.jsonl` holds what the clock said.
"""

import fnmatch
import json
import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch

from lld.episode import Episode
from lld.files import replace_file
from lld.reward import exact_match, gold_in_results

GLOSSARY = {
    "step": "rollout step, from 0",
    "failed_groups": (
        "share of the step's groups dropped because a search of theirs failed or found nothing; 0"
    ),
    "empty_groups": (
        "share of the step's groups dropped because a query of theirs found nothing "
        "(retriever.empty_results); 0"
    ),
    "reward/mean": "mean reward of all episodes; rises, then levels off",
    "reward/std": (
        "mean over questions of the (unbiased) standard deviation within a group; 0 leaves nothing to learn"
    ),
    "reward/mixed_groups": "share of groups whose episodes differ in reward; only these move the policy",
    "em": "mean exact match of the training episodes, whatever the reward",
    "update": "optimizer step within the rollout step, from 0 (updates.jsonl)",
    "loss": (
        "the minimised sum per optimizer step; in metrics.jsonl, as the next three, averaged over the "
        "step's updates"
    ),
    "loss/policy": "mean surrogate term per token (Eq. 1); near 0",
    "loss/kl": "mean k3 estimate of KL(policy || reference) per token, nats; slow growth",
    "loss/lld": "mean LLDS term per token of the model, before lambda; above 0 from the second update on",
    "lld_beta": "LLDS-MA's weight on answer tokens; 1 is plain LLDS",
    "entropy": (
        "mean entropy of the next-token distribution on the model's tokens, nats; an explosion is "
        "collapse, 0 is determinism"
    ),
    "grad_norm": "mean gradient norm before clipping over the step's updates",
    "grad_norm_max": "largest gradient norm of the step's updates",
    "skipped_updates": "updates not made because their loss or gradient was not finite; 0",
    "lr": "learning rate of the step",
    "ratio/mean": "mean of pi/pi_old over tokens; near 1",
    "ratio/max": "largest pi/pi_old of a token",
    "ratio/q999": "its 99.9 % quantile, the tail that widens before a collapse",
    "ratio/clipped": "share of tokens whose gradient the clip removed; below 0.1",
    "likelihood/correct_old": "mean log pi_old per token of responses with A > 0, nats",
    "likelihood/correct_new": "the same under the policy at the moment of its update",
    "likelihood/incorrect_old": "mean log pi_old per token of responses with A < 0",
    "likelihood/incorrect_new": "the same under the policy at the moment of its update",
    "likelihood/neutral_old": (
        "mean log pi_old per token of responses with A = 0 (all-correct and all-wrong groups)"
    ),
    "likelihood/neutral_new": "the same under the policy at the moment of its update",
    "displacement/correct": (
        "mean of log pi - log pi_old per token of responses with A > 0; steadily below "
        "0 is lazy likelihood displacement"
    ),
    "displacement/incorrect": "the same for A < 0; below 0 is what the update asks for",
    "displacement/neutral": "the same for A = 0",
    "displacement/*/per_action": "mean over actions of the sum over their tokens (Def. 4.1)",
    "displacement/*/per_response": "mean over responses of the sum over their tokens (Eq. 2)",
    "displacement/*/q*": "quantiles (5, 50, 95 %) of the displacement of a token",
    "displacement/*/*/turn*": "mean per token on the think, search or answer part of the turn-th action",
    "displaced/*": (
        "share of tokens, actions or responses of the class whose likelihood fell by more than "
        "monitor.NOISE a token"
    ),
    "final/*": (
        "displacement and share displaced once more, from before the first to after the last update "
        "of the rollout (Def. 4.1)"
    ),
    "gate/*/open": (
        "share of the tokens of responses with A >= 0 on which this gate of LLDS opens, whether "
        "LLDS is on or not"
    ),
    "gate/*/penalty": "mean LLDS term per such token under this gate, before lambda",
    "nll/searches*": (
        "mean negative log-likelihood per token of responses with that many searches, before "
        "the update (Fig. 6)"
    ),
    "wrong/first_action": "mean log-likelihood per token of the first action of wrong episodes (Fig. 5)",
    "wrong/second_action": (
        "the same of the second action of those that began with a search: it has read the passages"
    ),
    "wrong/observation_match": (
        "share, among wrong episodes that began with a search and whose question "
        "also has a right one, of those whose first search found the passages of a "
        "right one (Fig. 5)"
    ),
    "sentinel/likelihood": (
        "mean log-likelihood per token of the first correct episodes of the run, re-scored"
    ),
    "sentinel/displacement": (
        "its change since they were sampled; a fall is forgetting or displacement that stayed"
    ),
    "phase": "0 healthy, 1 stagnation, 2 decay, 3 acceleration, 4 collapse (lld/record/phases.py)",
    "sampler_gap/mean": (
        "mean |log p(trainer) - log p(sampler)| per token before the first update; "
        "float32: below 1e-5, bf16: below .003 (more with top_p < 1: the sampler cuts its "
        "distribution)"
    ),
    "sampler_gap/max": "largest such gap; float32: below 1e-4, bf16: about .1",
    "searches": "searches carried out per episode",
    "turns": "actions per episode",
    "valid_actions": "share of actions that were a search or an answer",
    "valid_searches": "share of the actions that are no answer which are well-formed searches (Fig. 4)",
    "answered": "share of episodes that ended with an answer",
    "truncated": "share of episodes that ran out of context, or of a turn's token budget",
    "cut_passages": "passages shortened to fit the observation budget, per search",
    "response_tokens": "model-written tokens per episode",
    "episode_tokens": "tokens per episode, prompt and observations included",
    "gold_in_results": (
        "share of episodes (yes/no questions left out) in which some retrieved passage holds a gold answer"
    ),
    "eval/*/em": "exact match on held-out questions, greedy unless eval.temperature says otherwise",
    "eval/*/f1": "token F1 on them",
    "eval/*/cover_em": "share whose answer contains a gold answer",
    "eval/*/searches": "searches per question there",
    "eval/*/valid_action_rate": "valid actions there",
    "eval/*/truncation_rate": "truncated episodes there",
    "eval/*/answered_rate": "episodes with an answer there",
    "eval/*/gold_in_results": "episodes whose passages hold a gold answer there",
    "eval/*/num_questions": "questions asked there",
    "time/rollout_s": "seconds of sampling and searching",
    "time/search_s": (
        "seconds spent inside the search function (overlaps with sampling where rollout.overlap_search)"
    ),
    "time/update_s": "seconds of scoring and updating",
    "time/monitor_s": "seconds of computing and writing what the recorder logs",
    "time/rescore_s": "seconds of re-scoring after the last update, and of the sentinel",
    "time/eval_s": "seconds of evaluation",
    "time/step_s": "seconds of the whole step",
    "speed/sampled_tokens_per_s": "model-written tokens per second of rollout, per process",
    "speed/trained_tokens_per_s": (
        "tokens (prompt and observations included) per second of update, all processes"
    ),
}


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
    mean = lambda values: sum(values) / max(1, len(values))
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


@contextmanager
def naming(path: Path):
    """A write that fails, as on a full disk, does not say to which file: now it does."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


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
