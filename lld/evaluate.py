"""Held-out questions -> scores and saved trajectories.

One episode per question, every question scored, with evaluation's own sampling settings. (Search-R1 drops the
last partial batch and, because a flag is lost, samples its validation at temperature 1.)
"""

from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from lld.config import Config
from lld.engine.engine import Engine
from lld.episode import Episode, Question
from lld.protocol import decode
from lld.reward import cover_exact_match, exact_match, gold_in_results, token_f1
from lld.rollout import Budgets, rollout
from lld.tools import Search, Unplayed

AVERAGES = {  # the columns of the paper's tables
    "GenAvg": ("nq", "triviaqa", "popqa"),
    "MHAvg": ("hotpotqa", "2wiki", "musique", "bamboogle"),
    "Avg": ("nq", "triviaqa", "popqa", "hotpotqa", "2wiki", "musique", "bamboogle"),
}
RESAMPLED_VALUES = 1 << 22  # drawn at once by the bootstrap; bounds its memory


def evaluate_questions(
    engine: Engine,
    tokenizer,
    questions: Sequence[Question],
    search: Search,
    cfg: Config,
    *,
    seed: int,
    progress: Callable[[int], None] | None = None,
    accelerator: Accelerator | None = None,
) -> list[dict]:
    """Plays one episode per question; returns their records (`episode_record`) in the order of `questions`.

    The engine has the sampling settings; turns come from `eval`, token budgets from `rollout`. With an
    accelerator process r of R plays questions r, r + R, …; every process must call, and gets all records.
    Raises RetrieverError or whatever else ended the rollout (tools.Unplayed), on all processes if on one:
    otherwise the others would block, waiting for its records.
    """
    rank, num_processes = 0, 1
    if accelerator is not None:
        rank, num_processes = accelerator.process_index, accelerator.num_processes
    own, errors = [], []
    try:
        episodes = rollout(
            engine,
            tokenizer,
            list(questions[rank::num_processes]),
            search,
            Budgets.of(cfg.rollout, cfg.eval.max_turns),
            num_samples=1,
            seed=seed,
            step=-1,  # no training step has this number, so no training episode shares its random numbers
            empty_results="show",  # every question is scored, and nothing is learned from the empty block
            overlap_search=cfg.rollout.overlap_search,
            progress=progress,
        )
        own = [(rank + i * num_processes, episode_record(tokenizer, e)) for i, e in enumerate(episodes)]
    except Unplayed as error:
        if num_processes == 1:
            raise
        errors = [error]
    if num_processes > 1:
        own, errors = gather_object(own), gather_object(errors)
    if errors:
        raise errors[0]
    return [record for _, record in sorted(own, key=lambda item: item[0])]


def episode_record(tokenizer, episode: Episode) -> dict:
    """One episode as plain JSON types: scores in [0, 1], counts, and turns as text."""
    question, answer = episode.question, episode.answer

    def score(metric):
        return 0.0 if answer is None else metric(answer, question.golden_answers)

    turns = [
        {
            "text": decode(tokenizer, episode.token_ids[turn.start : turn.end]),
            "kind": turn.kind,
            "content": turn.content,
            "stop": turn.stop,
            "passages": [passage.contents for passage in turn.passages],
            "observation": decode(tokenizer, episode.token_ids[turn.end : turn.observation_end]),
        }
        for turn in episode.turns
    ]
    return {
        "id": question.id,
        "source": question.source,
        "question": question.text,
        "golden_answers": list(question.golden_answers),
        "answer": answer,
        "em": score(exact_match),
        "f1": score(token_f1),
        "cover_em": score(cover_exact_match),
        "num_searches": episode.num_searches,
        "num_turns": len(turns),
        "num_valid_actions": sum(turn["kind"] != "invalid" for turn in turns),
        "truncated": episode.stop_reason == "length" or any(turn["stop"] == "length" for turn in turns),
        "gold_in_results": gold_in_results(
            question.golden_answers, [text for turn in turns for text in turn["passages"]]
        ),
        "stop_reason": episode.stop_reason,
        "turns": turns,
    }


def summarize(records: Sequence[dict]) -> dict[str, float]:
    """Means over questions, and valid actions over actions.

    "gold_in_results" is absent where it is undefined for every question. The names are those of
    `eval/<benchmark>/…` in metrics.jsonl and in the table of eval.py.
    """
    assert records, "no records to summarize"

    def mean(name):
        return sum(record[name] for record in records) / len(records)

    found = [record["gold_in_results"] for record in records if record["gold_in_results"] is not None]
    metrics = {
        "em": mean("em"),
        "f1": mean("f1"),
        "cover_em": mean("cover_em"),
        "searches": mean("num_searches"),
        "valid_action_rate": sum(record["num_valid_actions"] for record in records)
        / sum(record["num_turns"] for record in records),
        "truncation_rate": mean("truncated"),
        "answered_rate": sum(record["answer"] is not None for record in records) / len(records),
        "num_questions": len(records),
    }
    return metrics | ({"gold_in_results": sum(found) / len(found)} if found else {})


def bootstrap_means(values: Sequence[float], *, num_resamples: int = 2000, seed: int = 0) -> torch.Tensor:
    """(num_resamples,) float64 bootstrap means of `values`, one value per question.

    Each is the mean of N of the N values, drawn with replacement (Efron & Tibshirani 1993, ch. 13).
    """
    values_N = torch.as_tensor(values, dtype=torch.float64)
    N = len(values_N)
    assert N > 0 and num_resamples > 0
    generator = torch.Generator().manual_seed(seed)
    rows = max(1, RESAMPLED_VALUES // N)
    means = [
        values_N[torch.randint(N, (min(rows, num_resamples - done), N), generator=generator)].mean(1)
        for done in range(0, num_resamples, rows)
    ]
    return torch.cat(means)


def percentile_interval(means: torch.Tensor, level: float = 0.95) -> tuple[float, float]:
    """The interval that holds the central `level` of bootstrap means.

    It covers the variation due to the choice of questions, not that due to the training seed.
    """
    assert 0 < level < 1
    low, high = means.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=means.dtype)).tolist()
    return low, high


def paper_averages(em_by_benchmark: dict) -> dict:
    """GenAvg, MHAvg and Avg of the paper's tables: plain means, None where a benchmark is missing."""
    return {
        name: sum(em_by_benchmark[member] for member in members) / len(members)
        if all(member in em_by_benchmark for member in members)
        else None
        for name, members in AVERAGES.items()
    }
