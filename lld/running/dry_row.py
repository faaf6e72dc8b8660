"""Computes the metrics of made-up episodes before the first rollout, to check their names."""

from dataclasses import replace

import torch

from lld.config import Config
from lld.episode import Batch, Episode, Question, Turn, collate
from lld.evaluate import episode_record, summarize
from lld.record import metrics, monitor
from lld.selection import chosen_by_update
from lld.tools import TOOLS, Passage
from lld.update import Scores, loss_of, update_counts

GOLD, OTHER = "gold", "other"


class NoText:
    """Stands in for a tokenizer: the made-up episodes have no text."""

    def decode(self, token_ids: list[int], **_) -> str:
        return ""


def check_names(cfg: Config) -> None:
    """Raises ValueError if the run would log a name that the glossary does not define.

    Without this check the run would fail at its first log, after a full rollout and update.
    """
    unknown = sorted(name for name in logged_names(cfg) if not metrics.described(name))
    if unknown:
        raise ValueError(
            f"the run would log {', '.join(unknown)}, which lld/record/glossary.py does not define: "
            "add an entry to GLOSSARY there that says what it is, its unit, and what is healthy"
        )


def logged_names(cfg: Config) -> set[str]:
    """Names logged for loss terms, gates, displacement by part and turn, episodes, and evaluation."""
    rewards_PG = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    advantages_PG = torch.tensor([[1.0, -1.0], [0.0, 0.0]])
    episodes = [made_up("a", 0, GOLD), made_up("a", 1, OTHER), made_up("b", 0, OTHER), made_up("b", 1, OTHER)]
    batch = collate(episodes, advantages_PG, pad_id=0)
    old_BT = torch.zeros(batch.token_ids_BT.shape)
    new_BT = torch.where(batch.action_ids_BT > 0, -0.1, 0.0)
    scores = Scores(
        old_BT=old_BT,
        new_BT=new_BT,
        entropy_BT=torch.zeros_like(old_BT),
        final_BT=new_BT,
        anchor_BT=old_BT,
        rows=[list(range(len(episodes)))],
    )
    names = {f"loss/{term}" for term in loss_terms(batch, scores, cfg)}
    names |= metrics.describe_episodes(episodes, rewards_PG).keys()
    names |= monitor.describe(batch, scores, episodes, cfg).keys()
    evaluated = summarize([episode_record(NoText(), episode) for episode in episodes])
    return names | {f"eval/benchmark/{name}" for name in evaluated}


def loss_terms(batch: Batch, scores: Scores, cfg: Config) -> dict[str, torch.Tensor]:
    rows = scores.rows[0]
    old_BT, new_BT = scores.old_BT, scores.new_BT
    counts = update_counts(batch, rows, cfg.loss.lld_preserve)
    tables = (new_BT, scores.entropy_BT, old_BT, old_BT, old_BT)
    batch = replace(batch, chosen={"nthr": torch.ones_like(old_BT)})
    batch = chosen_by_update(batch, [rows], old_BT, scores.entropy_BT, cfg.loss)
    _, terms = loss_of(batch, *tables, counts, 1.0, cfg.loss)
    return terms


def made_up(question: str, sample: int, answer: str) -> Episode:
    """An episode that calls every tool once and then answers.

    Each turn has three tokens: one of thought, one of action, one observed.
    """
    turns = []
    for kind in (*TOOLS, "answer"):
        start = 3 * len(turns)
        turn = Turn(
            start=start,
            end=start + 2,
            observation_end=start + 3,
            kind=kind,
            content=answer,
            stop="stop_string",
            tag_start=start + 1,
        )
        if kind == "search":
            turn.passages, turn.searched = (Passage("0", f"Title\n{answer}"),), True
        turns.append(turn)
    action_ids = [number for turn in range(len(turns)) for number in (turn + 1, turn + 1, 0)]
    return Episode(
        question=Question(question, question, (GOLD,), "made up"),
        sample=sample,
        prompt_ids=[0],
        token_ids=[0] * len(action_ids),
        action_ids=action_ids,
        logprobs=[0.0] * len(action_ids),
        turns=turns,
        stop_reason="answer",
    )
