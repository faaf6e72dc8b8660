"""Which episodes and tokens a step trains on: filters of episodes, and choices among all tokens of an update.

Each rule is one function with its source, and one entry of a literal table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import one_hot

from lld.episode import Batch, Episode
from lld.update import plan_updates, rows_of_update, score_both, trained_action_ids, trained_temperature

if TYPE_CHECKING:
    from lld.config import Config, Loss

# ---- episodes that are not trained on


def truncated(episode: Episode) -> bool:
    """Ran out of context, or of a turn's token budget: DAPO's overlong filtering (arXiv 2503.14476)."""
    return episode.stop_reason == "length" or any(turn.stop == "length" for turn in episode.turns)


def void_turn(episode: Episode) -> bool:
    """Has a turn with neither a tool call nor an answer: SimpleTIR's filter (arXiv 2509.02479)."""
    return any(turn.kind == "invalid" for turn in episode.turns)


# The values of loss.drop: episode -> whether all its tokens are left out of the loss.
FILTERS = {
    "truncated": truncated,
    "void_turn": void_turn,
}


def trained_rows(episodes: list[Episode], options: Loss) -> torch.Tensor | None:
    """(B,) bool: the episodes that no filter drops; None without a filter.

    A dropped episode keeps its place in its group's mean and in all metrics, but not in any term or
    denominator of the loss.
    """
    if not options.drop:
        return None
    return torch.tensor([not any(FILTERS[name](episode) for name in options.drop) for episode in episodes])


# ---- choices among all tokens of an update (an optimizer step; a rollout has `optim.updates_per_rollout`)


@dataclass(frozen=True)
class Update:
    """All rows of an update under the policy before the rollout's first update: (R, T) tensors."""

    logprobs_RT: torch.Tensor
    entropies_RT: torch.Tensor
    advantages_R1: torch.Tensor
    mask_RT: torch.Tensor
    seed: int

    def covariances(self) -> torch.Tensor:
        """(R, T) products of what A and log pi depart from their means over the update's tokens by."""

        def centred(values_RT: torch.Tensor) -> torch.Tensor:
            return values_RT - values_RT[self.mask_RT].mean()

        return centred(self.advantages_R1.expand_as(self.mask_RT)) * centred(self.logprobs_RT)


def highest_entropies(update: Update, share: float) -> torch.Tensor:
    """The `share` of the tokens with the highest entropy: as many as reach its quantile 1 - share."""
    return largest(update, update.entropies_RT, 1 + int(share * (int(update.mask_RT.sum()) - 1)))


def some_of_high_cov(update: Update, share: float) -> torch.Tensor:
    """`share` of the tokens (one at least), drawn at random from those with a covariance in (1, 5)."""
    cov_RT = update.covariances()
    places = ((cov_RT > 1) & (cov_RT < 5) & update.mask_RT).flatten().nonzero()[:, 0]
    count = max(1, int(share * int(update.mask_RT.sum())))
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(update.seed))
    return marked(cov_RT, places[order[:count]])


def largest_cov(update: Update, share: float) -> torch.Tensor:
    """The `share` of the tokens (one at least) with the largest covariance."""
    return largest(update, update.covariances(), max(1, int(share * int(update.mask_RT.sum()))))


def largest(update: Update, values_RT: torch.Tensor, count: int) -> torch.Tensor:
    """(R, T) bool: the `count` trained tokens with the largest values, no more where values are equal."""
    values_RT = values_RT.masked_fill(~update.mask_RT, -torch.inf)
    return marked(values_RT, values_RT.flatten().topk(count).indices)


def marked(like_RT: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Bool, true at the flat indices `places`."""
    return torch.zeros(like_RT.numel(), dtype=torch.bool).index_fill(0, places, True).view_as(like_RT)


# Rules of loss.weights and loss.penalties that compare all tokens of an update: it and the rule's number ->
# (R, T) bool.
CHOOSERS = {
    "high_entropy": highest_entropies,
    "clip_cov": some_of_high_cov,
    "kl_cov": largest_cov,
}


def choices(options: Loss) -> dict[str, float]:
    """The rules in use that compare all tokens of an update, with their numbers."""
    return {
        name: number for name, number in {**options.weights, **options.penalties}.items() if name in CHOOSERS
    }


# ---- NTHR: which wrong tokens lower the likelihood of right answers

CHUNK = 256  # tokens whose residuals over the vocabulary are in memory at once


def nthr_weights(
    states_NC: torch.Tensor,
    residuals: Callable[[torch.Tensor], torch.Tensor],
    row_N: torch.Tensor,
    advantages_G: torch.Tensor,
    beta: float,
) -> torch.Tensor:
    """(N,) weights of the tokens of one group: 2 |.5 - p| on wrong tokens of high score, else 1.

    NTHR (arXiv 2505.18830). The score of token n is the sum over the tokens m of right responses of
    <g_m, g_n> <h_m, h_n>, g = e_y - pi(.|context), h the last hidden state before the token. Chosen are the
    tokens of wrong responses above beta times the least, over the right responses, of their tokens' mean
    score. `residuals` maps indices (n,) to g (n, V); `row_N` are the tokens' rows in the group.
    """
    right_N, wrong_N = (advantages_G > 0)[row_N], (advantages_G < 0)[row_N]
    weights_N = states_NC.new_ones(len(row_N))
    if not (right_N.any() and wrong_N.any()):
        return weights_N
    # sum over m of g_m h_m^T first: no pair of tokens is formed
    cross_VC = sum(
        residuals(index_n).T @ states_NC[index_n] for index_n in right_N.nonzero()[:, 0].split(CHUNK)
    )
    index_N = torch.arange(len(row_N), device=row_N.device)
    scores_N = torch.cat(
        [((residuals(index_n) @ cross_VC) * states_NC[index_n]).sum(1) for index_n in index_N.split(CHUNK)]
    )
    least = min(scores_N[row_N == row].mean() for row in row_N[right_N].unique())
    eta = 2 * abs(0.5 - float((advantages_G > 0).double().mean()))
    return torch.where(wrong_N & (scores_N > beta * least), eta, weights_N)


@torch.no_grad()
def nthr_table(accelerator, policy, batch: Batch, cfg: Config) -> torch.Tensor:
    """(B, T) `nthr_weights` of every group under the policy before the update, on every process.

    Tokens of dropped rows enter no score and no threshold; p counts their rows, as the group's mean does.
    """
    bare, size = accelerator.unwrap_model(policy).eval(), cfg.rollout.group_size
    head, table_BT = bare.lm.get_output_embeddings(), torch.zeros(batch.token_ids_BT.shape)
    num_groups = len(batch.names) // size
    for group in range(accelerator.process_index, num_groups, accelerator.num_processes):
        rows = list(range(group * size, (group + 1) * size))
        part = batch.rows(rows, accelerator.device)
        written_BT = trained_action_ids(part) > 0
        with accelerator.autocast():
            states_NC, targets_N = bare.states(part.token_ids_BT, written_BT)

        def residuals(index_n, states_NC=states_NC, targets_N=targets_N):
            logits_nV = (head(states_NC[index_n]) / trained_temperature(cfg)).float()
            return one_hot(targets_N[index_n], logits_nV.shape[1]) - logits_nV.softmax(1)

        weights_N = nthr_weights(
            states_NC.float(),
            residuals,
            written_BT.nonzero()[:, 0],
            part.advantages_B,
            cfg.loss.weights["nthr"],
        )
        row_BT = torch.ones(written_BT.shape, device=accelerator.device).masked_scatter(written_BT, weights_N)
        table_BT[rows, : row_BT.shape[1]] = row_BT.cpu()
    return accelerator.reduce(table_BT.to(accelerator.device), "sum").cpu()


# ---- what train.py calls


def choose_tokens(accelerator, policy, batch: Batch, cfg: Config) -> Batch:
    """`batch` with what the rules choose that compare all tokens of an update (CHOOSERS).

    They compare under the policy before the first update, so that a choice depends neither on micro-batches
    nor on the number of processes. That scores every row once more than without such a rule. Their
    papers compare under the policy at the moment of the update.
    """
    if "nthr" in cfg.loss.weights:
        batch = replace(batch, chosen={"nthr": nthr_table(accelerator, policy, batch, cfg)})
    if not choices(cfg.loss):
        return batch
    plan = plan_updates(batch.lengths_B.tolist(), cfg.optim.updates_per_rollout, accelerator.num_processes)
    scored = score_both(accelerator, policy, batch, plan, cfg)
    # Each row belongs to one process and is 0 on the others, so a sum gathers all.
    scored = [accelerator.reduce(table_BT.to(accelerator.device), "sum").cpu() for table_BT in scored]
    return chosen_by_update(batch, [rows_of_update(shares) for shares in plan], *scored, cfg.loss)


def chosen_by_update(
    batch: Batch, updates: list[list[int]], logprobs_BT, entropies_BT, options: Loss
) -> Batch:
    """`batch` with `chosen`, found among the rows of each update."""
    mask_BT = trained_action_ids(batch) > 0
    chosen = {name: torch.zeros(mask_BT.shape, dtype=torch.bool) for name in choices(options)}
    for rows in updates:
        update = Update(
            logprobs_BT[rows],
            entropies_BT[rows],
            batch.advantages_B[rows, None],
            mask_BT[rows],
            seed=int(batch.token_ids_BT[rows].sum()),  # the same when a run is repeated or resumed
        )
        for name, number in choices(options).items():
            if update.mask_RT.any():
                chosen[name][rows] = CHOOSERS[name](update, number)
    chosen = {name: table_BT.float() for name, table_BT in chosen.items()}
    return replace(batch, chosen=batch.chosen | chosen)
