"""What flows: `Episode`, between talking and learning, and `Batch`, between Python and tensors."""

from dataclasses import dataclass, field

import torch

from lld.protocol import Passage

THINK, SEARCH, ANSWER = 1, 2, 3  # parts of a response


@dataclass(frozen=True)
class Question:
    """One question of a dataset."""

    id: str  # "source/id", unique over all sources
    text: str
    golden_answers: tuple[str, ...]
    source: str
    supporting_titles: tuple[str, ...] = ()  # the gold pages, where they are known


@dataclass
class Turn:
    """One action and what came back. Offsets count from the first token after the prompt.

    Tokens [start, end) are the model's; [end, observation_end) are the observation, empty after the last
    action. From `tag_start` on they are the action itself, `<search>` or `<answer>` and what follows (`end`
    for an invalid one). `stop` says why the sampler stopped: "stop_string", "eos" or "length" (the turn's
    budget).
    """

    start: int
    end: int
    observation_end: int
    kind: str  # "search", "answer" or "invalid"
    content: str
    stop: str
    tag_start: int
    passages: tuple[Passage, ...] = ()
    num_cut_passages: int = 0
    searched: bool = False  # False for a search in the last turn, which is not carried out


@dataclass
class Episode:
    """One conversation, token for token as it happened; nothing in it is ever decoded and encoded again.

    `token_ids`, `action_ids` and `logprobs` have equal length and exclude the prompt. `action_ids[t]` is 0
    for a token the model did not write and k for a token of its k-th action; `logprobs[t]` is that of the
    distribution it was sampled from (0.0 where action_ids is 0). `stop_reason` is "answer", "turns" (out of
    turns), "length" (out of context), "failed_search" or "empty_search" (one that found nothing); of the last
    two `failure` says more, and such an episode is never trained on.
    """

    question: Question
    sample: int
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    action_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    stop_reason: str = ""
    failure: str = ""

    @property
    def name(self) -> str:
        return f"{self.question.id}#{self.sample}"

    @property
    def answer(self) -> str | None:
        """The final answer, or None where the model gave none."""
        last = self.turns[-1] if self.turns else None
        return last.content if last is not None and last.kind == "answer" else None

    @property
    def answer_span(self) -> tuple[int, int] | None:
        """[start, end) of "<answer> … </answer>" in `token_ids`, tags included."""
        return (self.turns[-1].tag_start, self.turns[-1].end) if self.answer is not None else None

    @property
    def num_searches(self) -> int:
        """Valid searches that were carried out (Search-R1 also counts those of the last turn, which are
        not)."""
        return sum(turn.searched for turn in self.turns)

    @property
    def num_model_tokens(self) -> int:
        return sum(1 for action in self.action_ids if action)


@dataclass(frozen=True)
class Batch:
    """All episodes of a rollout as (B, T) tensors, prompt included and padded on the right; entry t describes
    token t.

    `token_ids_BT`, `action_ids_BT` (0 on prompt, observations and padding), `part_ids_BT` (THINK, SEARCH or
    ANSWER on the model's tokens, 0 elsewhere; tags belong to their action) and `sampled_logprobs_BT` come
    from the episodes, `advantages_B` from their rewards, `lengths_B` counts prompt and response.
    """

    token_ids_BT: torch.Tensor
    action_ids_BT: torch.Tensor
    part_ids_BT: torch.Tensor
    sampled_logprobs_BT: torch.Tensor
    advantages_B: torch.Tensor
    lengths_B: torch.Tensor
    names: tuple[str, ...]


def collate(episodes: list[Episode], advantages_PG: torch.Tensor, pad_id: int) -> Batch:
    """Episodes, in the order of `advantages_PG` read row by row, as one right-padded batch.

    Causal attention never looks right, so right padding needs no attention mask.
    """
    B, T = len(episodes), max(len(e.prompt_ids) + len(e.token_ids) for e in episodes)
    assert advantages_PG.numel() == B
    token_ids_BT = torch.full((B, T), pad_id)
    action_ids_BT = torch.zeros(B, T, dtype=torch.long)
    part_ids_BT = torch.zeros(B, T, dtype=torch.long)
    sampled_logprobs_BT = torch.zeros(B, T)
    lengths_B = torch.zeros(B, dtype=torch.long)
    for row, episode in enumerate(episodes):
        start = len(episode.prompt_ids)
        end = start + len(episode.token_ids)
        token_ids_BT[row, :end] = torch.tensor(episode.prompt_ids + episode.token_ids)
        action_ids_BT[row, start:end] = torch.tensor(episode.action_ids)
        sampled_logprobs_BT[row, start:end] = torch.tensor(episode.logprobs)
        part_ids_BT[row, start:end] = (action_ids_BT[row, start:end] > 0) * THINK
        for turn in episode.turns:
            part_ids_BT[row, start + turn.tag_start : start + turn.end] = (
                SEARCH if turn.kind == "search" else ANSWER
            )
        lengths_B[row] = end
    return Batch(
        token_ids_BT,
        action_ids_BT,
        part_ids_BT,
        sampled_logprobs_BT,
        advantages_PG.flatten(),
        lengths_B,
        tuple(e.name for e in episodes),
    )
