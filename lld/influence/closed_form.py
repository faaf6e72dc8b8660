"""Who displaced whom: the first-order influence of a group's episodes on its correct responses.

The first-order influence is a closed form at the LM head (paper, Thm. 4.2; NTHR, arXiv 2505.18830). A token's
residual is g = e_y - pi(.|context). At the first update of a rollout (ratio 1, LLDS 0) the policy gradient of
token m with respect to the head's weights is -c_m g_m h_m^T / temperature, where c_m is its advantage times
its share of the loss, and so a step of plain gradient descent changes the log-probability of token n by

    lr c_m <g_n, g_m> <h_n, h_m> / temperature^2        to first order, h = the last hidden state before the
      token.

"The head alone" is the head as an untied copy: what the step does to the embeddings and to the layers below
is left out (lld/influence/measured.py measures it). All signs are those of the paper's Delta: negative where
likelihood falls.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import one_hot

from lld.config import Loss
from lld.episode import Batch, Episode
from lld.policy import Policy
from lld.update import update_counts
from lld.weights import AGGREGATIONS

CHUNK = 256  # tokens whose residuals over the vocabulary are in memory at once, twice


@dataclass(frozen=True)
class Group:
    """The episodes of one question, as many as there are rows in `batch`."""

    episodes: list[Episode]
    batch: Batch

    @property
    def right(self) -> list[int]:
        """The rows of the correct responses: those with A > 0, as in all metrics."""
        return (self.batch.advantages_B > 0).nonzero()[:, 0].tolist()


@dataclass(frozen=True)
class Tokens:
    """The N tokens that the model wrote in a group, row by row.

    Of each: the hidden state before it, its id, and its row and column in the batch.
    """

    states_NC: torch.Tensor
    targets_N: torch.Tensor
    row_N: torch.Tensor
    column_N: torch.Tensor

    def of(self, rows: list[int]) -> torch.Tensor:
        """Indices of the tokens of some rows, in order."""
        return torch.isin(self.row_N, torch.tensor(rows, device=self.row_N.device)).nonzero()[:, 0]


@torch.no_grad()
def read_tokens(policy: Policy, batch: Batch) -> Tokens:
    """The model's tokens of a group with their last hidden states, on the policy's device."""
    part = batch.rows(list(range(len(batch.names))), next(policy.parameters()).device)
    scored_BT = part.action_ids_BT > 0
    return Tokens(*policy.states(part.token_ids_BT, scored_BT), *scored_BT.nonzero(as_tuple=True))


def loss_shares(batch: Batch, options: Loss) -> torch.Tensor:
    """(B,) float64 c of the closed form: a row's advantage times the weight of its tokens in the loss.

    See `update.loss_of`.
    """
    counts = update_counts(batch, list(range(len(batch.names))), "nonnegative")
    lengths_B = (batch.action_ids_BT > 0).sum(1)
    return AGGREGATIONS[options.aggregation](batch.advantages_B.double(), lengths_B, counts, options)


@torch.no_grad()
def pair_influence(
    tokens: Tokens,
    head: torch.nn.Module,
    shares_B: torch.Tensor,
    right: list[int],
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """(M, N) change of log p of correct token m by token n's loss term, in nats per unit of learning rate.

    `right`: rows of the correct responses; M counts their tokens, in the order of `tokens`. Residuals are
    recomputed chunk by chunk, so that at most two chunks over the vocabulary are in memory.
    """
    heard_M = tokens.of(right)
    pairs_MN = tokens.states_NC.new_zeros(len(heard_M), len(tokens.row_N))

    def residuals(index_n):
        logits_nV = head(tokens.states_NC[index_n]) / temperature
        return one_hot(tokens.targets_N[index_n], logits_nV.shape[1]) - logits_nV.softmax(1)

    for place_m in torch.arange(len(heard_M), device=heard_M.device).split(chunk):
        heard_m = heard_M[place_m]
        residual_mV = residuals(heard_m)
        for index_n in torch.arange(len(tokens.row_N), device=heard_M.device).split(chunk):
            alike_mn = (residual_mV @ residuals(index_n).T) * (
                tokens.states_NC[heard_m] @ tokens.states_NC[index_n].T
            )
            pairs_MN[place_m[:, None], index_n] = (
                alike_mn * shares_B.to(alike_mn)[tokens.row_N[index_n]] / temperature**2
            )
    return pairs_MN


def influence_matrix(
    pairs_MN: torch.Tensor, tokens: Tokens, right: list[int], num_rows: int
) -> dict[str, torch.Tensor]:
    """{"total", "raising", "lowering"}: (G, R) sums over the token pairs of member g and correct response r.

    Over all pairs, over the positive and over the negative ones.
    """
    member_NG = one_hot(tokens.row_N, num_rows).to(pairs_MN)
    right_MR = member_NG[tokens.of(right)][:, right]

    def fold(values_MN: torch.Tensor) -> torch.Tensor:
        return (right_MR.T @ values_MN @ member_NG).T

    return {
        "total": fold(pairs_MN),
        "raising": fold(pairs_MN.clamp(min=0)),
        "lowering": fold(pairs_MN.clamp(max=0)),
    }
