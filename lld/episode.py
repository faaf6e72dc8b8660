"""The data that rollout and update exchange: `Episode`, in Python types, and `Batch`, as tensors."""

from array import array
from dataclasses import dataclass, field

import torch

from lld.protocol import PART_IDS
from lld.tools import TOOLS, Passage

# Ids of the parts of a response.
THINK, SEARCH, ANSWER = PART_IDS["think"], PART_IDS["search"], PART_IDS["answer"]


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
    """One action and its observation. Offsets count from the first token after the prompt."""

    # Tokens [start, end) are the model's; [end, observation_end) are the observation, if any
    start: int
    end: int
    observation_end: int
    kind: str  # a key of TOOLS, "answer" or "invalid"
    content: str  # the query or the answer
    stop: str  # why the sampler stopped: "stop_string", "eos" or "length" (the turn's budget)
    tag_start: int  # first token of "<search>" or "<answer>"; `end` for an invalid action
    # Set only for a search that was carried out; one in the last turn is not.
    passages: tuple[Passage, ...] = ()
    num_cut_passages: int = 0
    searched: bool = False

    @property
    def tool_was_read(self) -> bool:
        """Whether a tool was run for this action, and its result fitted into the episode."""
        return self.kind in TOOLS and self.observation_end > self.end


@dataclass
class Episode:
    """One conversation as token ids, exactly as read and sampled; they are never decoded and re-encoded.

    `token_ids`, `action_ids` and `logprobs` have equal length and exclude the prompt. `action_ids[t]` is 0
    for a token the model did not write and k for a token of its k-th action. `logprobs[t]` is under the
    distribution that token t was sampled from (0.0 where action_ids is 0).

    With loss.support "kept", `kept_ids` holds the ids that the sampler could have drawn, token after token
    (int32), and `kept_counts[t]` their number at token t (0 where action_ids is 0); else both are empty.

    `stop_reason` is "answer", "turns" (out of turns), "length" (out of context), "failed_search" or
    "empty_search" (a query without results). For the last two `failure` has the message; such an episode is
    never trained on.
    """

    question: Question
    sample: int
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    action_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept_ids: array = field(default_factory=lambda: array("i"))
    kept_counts: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    stop_reason: str = ""
    failure: str = ""
    unlucky: bool = False  # all its searches find random passages (retriever.fail_share)

    @property
    def name(self) -> str:
        return f"{self.question.id}#{self.sample}"

    @property
    def answer(self) -> str | None:
        """The final answer, or None where the model gave none."""
        last = self.turns[-1] if self.turns else None
        return last.content if last is not None and last.kind == "answer" else None

    @property
    def num_searches(self) -> int:
        """Valid searches that were carried out.

        Search-R1 also counts searches in the last turn, which are not carried out.
        """
        return sum(turn.searched for turn in self.turns)

    @property
    def num_model_tokens(self) -> int:
        return sum(1 for action in self.action_ids if action)


@dataclass(frozen=True)
class Batch:
    """Episodes as (B, T) tensors, prompt included and padded on the right; entry t describes token t."""

    token_ids_BT: torch.Tensor
    action_ids_BT: torch.Tensor  # 0 on prompt, observations and padding
    # A value of PART_IDS on the model's tokens, else 0; tags belong to their action
    part_ids_BT: torch.Tensor
    sampled_logprobs_BT: torch.Tensor
    advantages_B: torch.Tensor
    lengths_B: torch.Tensor  # tokens of prompt and response
    names: tuple[str, ...]  # of the episodes
    # The ids that each token was drawn from, row by row and token by token; None if not recorded
    kept_ids_K: torch.Tensor | None = None
    kept_counts_BT: torch.Tensor | None = None  # how many, per token
    trained_B: torch.Tensor | None = None  # false: no token of the row is in the loss; None: all are
    # (B, T): weights, mostly 0 and 1, of rules of the loss that compare the tokens of several rows
    chosen: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def kept(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`kept_ids_K` and `kept_counts_BT`, if they were recorded."""
        return None if self.kept_ids_K is None else (self.kept_ids_K, self.kept_counts_BT)

    def rows(self, rows: list[int], device=None) -> "Batch":
        """The given rows, cut to the longest of them, on `device`."""
        length, kept_ids_K = int(self.lengths_B[rows].max()), None
        if self.kept is not None:
            ids = self.kept_ids_K.split(self.kept_counts_BT.sum(1).tolist())
            kept_ids_K = torch.cat([ids[row] for row in rows]).to(device)

        return Batch(
            self.token_ids_BT[rows, :length].to(device),
            self.action_ids_BT[rows, :length].to(device),
            self.part_ids_BT[rows, :length].to(device),
            self.sampled_logprobs_BT[rows, :length].to(device),
            self.advantages_B[rows].to(device),
            self.lengths_B[rows].to(device),
            tuple(self.names[row] for row in rows),
            kept_ids_K,
            None if kept_ids_K is None else self.kept_counts_BT[rows, :length].to(device),
            None if self.trained_B is None else self.trained_B[rows].to(device),
            {name: table_BT[rows, :length].to(device) for name, table_BT in self.chosen.items()},
        )


def collate(
    episodes: list[Episode], advantages_PG: torch.Tensor, pad_id: int, trained_B: torch.Tensor | None = None
) -> Batch:
    """`episodes`, in the row-major order of `advantages_PG`, as one right-padded batch.

    `trained_B` is false where an episode is left out of the loss; None trains on all.

    Causal attention never reaches padding on the right, so no attention mask is needed.
    """
    B, T = len(episodes), max(len(e.prompt_ids) + len(e.token_ids) for e in episodes)
    assert advantages_PG.numel() == B
    token_ids_BT = torch.full((B, T), pad_id)
    action_ids_BT = torch.zeros(B, T, dtype=torch.long)
    part_ids_BT = torch.zeros(B, T, dtype=torch.long)
    sampled_logprobs_BT = torch.zeros(B, T)
    lengths_B = torch.zeros(B, dtype=torch.long)
    kept_ids_K = kept_counts_BT = None
    if all(episode.kept_counts for episode in episodes):
        kept_ids_K = torch.cat([torch.frombuffer(e.kept_ids, dtype=torch.int32) for e in episodes])
        kept_counts_BT = torch.zeros(B, T, dtype=torch.int32)
    for row, episode in enumerate(episodes):
        start = len(episode.prompt_ids)
        end = start + len(episode.token_ids)
        token_ids_BT[row, :end] = torch.tensor(episode.prompt_ids + episode.token_ids)
        action_ids_BT[row, start:end] = torch.tensor(episode.action_ids)
        sampled_logprobs_BT[row, start:end] = torch.tensor(episode.logprobs)
        if kept_counts_BT is not None:
            kept_counts_BT[row, start:end] = torch.tensor(episode.kept_counts)
        part_ids_BT[row, start:end] = (action_ids_BT[row, start:end] > 0) * THINK
        for turn in episode.turns:
            if turn.kind != "invalid":
                part_ids_BT[row, start + turn.tag_start : start + turn.end] = PART_IDS[turn.kind]
        lengths_B[row] = end
    return Batch(
        token_ids_BT,
        action_ids_BT,
        part_ids_BT,
        sampled_logprobs_BT,
        advantages_PG.flatten(),
        lengths_B,
        tuple(e.name for e in episodes),
        kept_ids_K,
        kept_counts_BT,
        trained_B,
    )


def searches_of(episodes: list[Episode], like_PG: torch.Tensor) -> torch.Tensor:
    """Numbers of searches of episodes, in the shape (P, G) of `like_PG`."""
    return torch.tensor([episode.num_searches for episode in episodes]).view_as(like_PG)
