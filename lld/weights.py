"""How much each token counts: weights of the policy terms, and the means over tokens and responses.

A weight multiplies a token's policy-gradient term and nothing else: KL, entropy, penalties and LLDS stay as
they are, and so do the denominators. Each rule is one function with its formula and source, and one entry of
a literal table. No gradient flows through a weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lld.loss import Tokens, exp_of

if TYPE_CHECKING:
    from lld.config import Loss

# ---- corrections for a sampler other than the trainer


def tis(log_ratio_BT: torch.Tensor, options: Loss) -> torch.Tensor:
    """clip(w, floor, cap), w = pi_old / mu: truncated importance sampling (TIS).

    IMPALA's truncation (arXiv 1802.01561) for the gap between a trainer and its sampler, as in TRL's mode
    token_truncate; floor 0, cap 2.
    """
    return exp_of(log_ratio_BT).clamp(options.correction_floor, options.correction_cap)


def mis(log_ratio_BT: torch.Tensor, options: Loss) -> torch.Tensor:
    """w where floor <= w <= cap, else 0: masked importance sampling (MIS), TRL's mode token_mask.

    IcePop (of the Ling team) is this one with floor .5 and cap 5.
    """
    ratio_BT = exp_of(log_ratio_BT)
    inside_BT = (ratio_BT >= options.correction_floor) & (ratio_BT <= options.correction_cap)
    return torch.where(inside_BT, ratio_BT, 0.0)


def tis_sequence(log_ratio_BT: torch.Tensor, options: Loss) -> torch.Tensor:
    """`tis` of the ratio of the whole response, prod_t w_t: TRL's mode sequence_truncate."""
    return tis(log_ratio_BT.sum(1, keepdim=True), options)


def mis_sequence(log_ratio_BT: torch.Tensor, options: Loss) -> torch.Tensor:
    """`mis` of the ratio of the whole response, prod_t w_t: TRL's mode sequence_mask."""
    return mis(log_ratio_BT.sum(1, keepdim=True), options)


# The values of loss.correction besides "none": log pi_old - log mu of every token, 0 where the model did not
# write -> weights of the policy terms, (B, T) or (B, 1). pi_old is the trainer's, mu the sampler's.
CORRECTIONS = {
    "tis": tis,
    "mis": mis,
    "tis_sequence": tis_sequence,
    "mis_sequence": mis_sequence,
}


def correction_weights(
    old_logprobs_BT: torch.Tensor, sampled_logprobs_BT: torch.Tensor, mask_BT: torch.Tensor, options: Loss
) -> torch.Tensor:
    """(B, T) weights that correct the policy terms for a sampler other than the trainer; 1 outside the mask.

    Without a gradient. `sampled_logprobs_BT` are under the distribution that was sampled from, after top-p.
    """
    log_ratio_BT = torch.where(mask_BT.bool(), old_logprobs_BT - sampled_logprobs_BT, 0.0).detach()
    weights_BT = CORRECTIONS[options.correction](log_ratio_BT, options)
    return torch.where(mask_BT.bool(), weights_BT, 1.0)


# ---- weights by what a token or its response is


def positives(t: Tokens, weight: float) -> torch.Tensor:
    """`weight` where A > 0, else 1: W-REINFORCE with .1, NSR with 0 (arXiv 2506.01347), on A = +-1."""
    return torch.where(t.advantages_B1 > 0, weight, 1.0)


def negatives(t: Tokens, weight: float) -> torch.Tensor:
    """`weight` where A < 0, else 1: with 0 only right answers teach ("pos only", arXiv 2505.18830)."""
    return torch.where(t.advantages_B1 < 0, weight, 1.0)


def off_policy(t: Tokens, threshold: float) -> torch.Tensor:
    """0 where A < 0 and the row's mean of log pi_old - log pi exceeds `threshold`, else 1.

    Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): wrong responses from which the policy has
    already moved away teach no more. pi_old is what the ratio divides by; in the paper that is the sampler
    (loss.old_logprobs).
    """
    is_stale_B1 = t.row_mean(-t.log_ratio_BT.detach()) > threshold
    return torch.where((t.advantages_B1 < 0) & is_stale_B1, 0.0, 1.0)


def high_entropy(t: Tokens, share: float) -> torch.Tensor:
    """1 on the `share` of the update's tokens with the highest entropy, else 0 (arXiv 2506.01939; .2)."""
    return t.chosen["high_entropy"]


def clip_cov(t: Tokens, share: float) -> torch.Tensor:
    """0 on `share` of the update's tokens, drawn from those with a covariance in (1, 5), else 1: Clip-Cov.

    arXiv 2505.22617; share .0002. Unlike there, tokens that the clip already removed may be drawn too.
    """
    return 1.0 - t.chosen["clip_cov"]


def nthr(t: Tokens, beta: float) -> torch.Tensor:
    """2 |.5 - p| where A < 0 and the token's score exceeds beta times the group's threshold, else 1: NTHR.

    arXiv 2505.18830, beta 1; p is the group's share of right answers, `selection.nthr_weights` the score.
    """
    return t.chosen["nthr"]


# The keys of loss.weights: tokens and the rule's number -> (B, T) or (B, 1) weights.
WEIGHTS = {
    "positives": positives,
    "negatives": negatives,
    "off_policy": off_policy,
    "high_entropy": high_entropy,
    "clip_cov": clip_cov,
    "nthr": nthr,
}


# ---- aggregation: a row's share of the loss of an update


def sequence_mean(sums_B, lengths_B, counts: dict[str, int], options: Loss) -> torch.Tensor:
    """Mean over the rows of the mean over a row's tokens (paper, Eq. 1; GRPO, GSPO)."""
    return sums_B / lengths_B.clamp(min=1) / max(1, counts["rows"])


def token_mean(sums_B, lengths_B, counts: dict[str, int], options: Loss) -> torch.Tensor:
    """Mean over all tokens of the update (official code; DAPO, arXiv 2503.14476)."""
    return sums_B / max(1, counts["tokens"])


def constant(sums_B, lengths_B, counts: dict[str, int], options: Loss) -> torch.Tensor:
    """Sum over a row's tokens / constant_tokens, mean over the rows (Dr. GRPO, arXiv 2503.20783)."""
    return sums_B / (max(1, counts["rows"]) * options.constant_tokens)


# The values of loss.aggregation: sums of a row's terms (B,), numbers of its tokens (B,), numbers of rows and
# tokens of the whole update, and options -> (B,) shares of the loss.
AGGREGATIONS = {
    "sequence_mean": sequence_mean,
    "token_mean": token_mean,
    "constant": constant,
}
