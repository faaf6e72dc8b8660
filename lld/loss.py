"""Surrogates, KL, LLDS and its gates as pure tensor functions: (B, T) terms to be minimised, unreduced.

The caller reduces them: sequence mean (paper, Eq. 1) or token mean (official code), over the tokens of the
whole optimizer step. "Paper" is arXiv 2512.04220v2, "official code"
vengdeng/LLDS-On-Group-Relative-Policy-Optimization-Collapse-in-Search-R1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lld.config import Loss

# exp stays finite in float32 (e^20 = 4.9e8): an infinite ratio times a zero advantage is NaN, and one NaN
# ends the run. A ratio this large has no usable gradient anyway.
MAX_LOG_RATIO = 20.0


def surrogate_terms(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    kind: str = "grpo",
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """(B, T) policy-gradient terms -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), 0 outside the mask.

    "grpo" (paper, Eq. 1): r = exp(log pi - log pi_old) of each token. "gspo" (arXiv 2507.18071 in its token
    form, as the official code has it): r = exp(log pi - sg(log pi) + sg(mean log-ratio of the row)), whose
    value is the same for the whole row and whose gradient is each token's own. `mask_BT` is true (or
    non-zero) on tokens the model wrote; log-probabilities elsewhere may be anything, NaN included. Log-ratios
    are clamped to ±20.
    """
    assert (
        advantages_B.shape == logprobs_BT.shape[:1]
        and mask_BT.shape == logprobs_BT.shape == old_logprobs_BT.shape
    )
    mask_BT = mask_BT.bool()
    # Masked before exp: the gradient of a masked inf is 0 * inf = NaN.
    log_ratio_BT = torch.where(mask_BT, logprobs_BT - old_logprobs_BT.detach(), 0.0)
    if kind == "gspo":
        num_tokens_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        mean_B1 = log_ratio_BT.detach().sum(dim=1, keepdim=True) / num_tokens_B1
        log_ratio_BT = torch.where(mask_BT, logprobs_BT - logprobs_BT.detach(), 0.0) + mean_B1
    elif kind != "grpo":
        raise ValueError(f"surrogate kind {kind!r}: must be 'grpo' or 'gspo'")
    ratio_BT = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantages_B1 = advantages_B[:, None]
    clipped_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    terms_BT = -torch.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)
    return torch.where(mask_BT, terms_BT, 0.0)


def tis(log_ratio_BT: torch.Tensor, options: Loss) -> torch.Tensor:
    """clip(w, floor, cap), w = pi_old / mu: truncated importance sampling (TIS).

    IMPALA's truncation (arXiv 1802.01561) for the gap between a trainer and its sampler, as in TRL's mode
    token_truncate; floor 0, cap 2.
    """
    return log_ratio_BT.exp().clamp(options.correction_floor, options.correction_cap)


def mis(log_ratio_BT: torch.Tensor, options: Loss) -> torch.Tensor:
    """w where floor <= w <= cap, else 0: masked importance sampling (MIS), TRL's mode token_mask.

    IcePop (of the Ling team) is this one with floor .5 and cap 5.
    """
    ratio_BT = log_ratio_BT.exp()
    inside_BT = (ratio_BT >= options.correction_floor) & (ratio_BT <= options.correction_cap)
    return torch.where(inside_BT, ratio_BT, 0.0)


def tis_sequence(log_ratio_BT: torch.Tensor, options: Loss) -> torch.Tensor:
    """`tis` of the ratio of the whole response, prod_t w_t: TRL's mode sequence_truncate."""
    return tis(clamped(log_ratio_BT.sum(1, keepdim=True)), options)


def mis_sequence(log_ratio_BT: torch.Tensor, options: Loss) -> torch.Tensor:
    """`mis` of the ratio of the whole response, prod_t w_t: TRL's mode sequence_mask."""
    return mis(clamped(log_ratio_BT.sum(1, keepdim=True)), options)


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
    weights_BT = CORRECTIONS[options.correction](clamped(log_ratio_BT), options)
    return torch.where(mask_BT.bool(), weights_BT, 1.0)


def clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    """Log-ratios within ±20, where exp stays finite in float32."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def kl_terms(logprobs_BT: torch.Tensor, ref_logprobs_BT: torch.Tensor) -> torch.Tensor:
    """(B, T) estimates of KL(pi || pi_ref): k3 = exp(d) - d - 1, d = log pi_ref - log pi, clamped to ±10.

    verl's "low_var_kl". As in the official code a clamped token (d > 2.6 or d < -11) has no gradient. Not
    masked: the caller does that.
    """
    # Clamping d changes neither value nor gradient (k3 is clamped much earlier). It keeps exp from
    # overflowing: 0 * inf = NaN.
    log_ratio_BT = (ref_logprobs_BT.detach() - logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_ratio_BT.exp() - log_ratio_BT - 1).clamp(-10.0, 10.0)


def token_gate(delta_BT: torch.Tensor, action_ids_BT: torch.Tensor) -> torch.Tensor:
    """The token's own likelihood fell (Eq. 9)."""
    return delta_BT > 0


def action_gate(delta_BT: torch.Tensor, action_ids_BT: torch.Tensor) -> torch.Tensor:
    """The signed falls of the tokens of the token's action add up to more than zero (Eq. 4)."""
    B, T = delta_BT.shape
    # One column per action and one for id 0. T + 1 always suffice and need no max() on the host.
    sums_BK = delta_BT.new_zeros(B, T + 1).scatter_add(1, action_ids_BT.long(), delta_BT)
    return sums_BK.gather(1, action_ids_BT.long()) > 0


def response_gate(delta_BT: torch.Tensor, action_ids_BT: torch.Tensor) -> torch.Tensor:
    """The signed falls of all tokens of the row add up to more than zero (Eq. 10)."""
    return delta_BT.sum(dim=1, keepdim=True) > 0


# The values of loss.lld_gate: falls in likelihood (0 on tokens the model did not write) and action ids ->
# bool that broadcasts to (B, T). Every gate is also logged (gate/*), whichever of them is trained with.
GATES = {
    "token": token_gate,
    "action": action_gate,
    "response": response_gate,
}


def lld_gate(delta_BT: torch.Tensor, action_ids_BT: torch.Tensor, gate: str) -> torch.Tensor:
    """(B, T) bool: whether LLDS acts on a token, given the falls in likelihood delta = log pi_old - log pi.

    `action_ids_BT` is 0 for tokens the model did not write, whose delta may be anything, and k in 1..T for
    those of the row's k-th action. No gradient flows through a gate. Raises ValueError for an unknown one.
    """
    if gate not in GATES:
        raise ValueError(f"LLDS gate {gate!r}: must be one of {', '.join(map(repr, GATES))}")
    written_BT = action_ids_BT > 0
    # In float64, so that a sum near 0 does not depend on the order of a GPU's atomic additions.
    delta_BT = torch.where(written_BT, delta_BT.detach().double(), 0.0)
    return written_BT & GATES[gate](delta_BT, action_ids_BT)


def preserved_rows(advantages_B: torch.Tensor, preserve: str) -> torch.Tensor:
    """(B,) bool: the rows LLDS preserves, those with A >= 0 ("nonnegative") or A > 0 ("positive").

    A >= 0 includes the groups whose answers are all wrong or all right (paper, Sec. 5).
    """
    if preserve not in ("nonnegative", "positive"):
        raise ValueError(f"LLDS preserve {preserve!r}: must be 'nonnegative' or 'positive'")
    return advantages_B >= 0 if preserve == "nonnegative" else advantages_B > 0


def lld_terms(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    action_ids_BT: torch.Tensor,
    *,
    gate: str,
    preserve: str = "nonnegative",
    tolerance: float = 0.0,
) -> torch.Tensor:
    """(B, T) LLDS terms max(0, log pi_old - log pi - tolerance) where the gate is open and the row preserved.

    `tolerance` is in nats a token (ours; the paper has none). It is subtracted from every fall, also in the
    gates: that of an action or a response opens where its falls add up to more than tolerance times the
    number of its tokens. The caller applies weights, lambda and the normaliser. `action_ids_BT` as for
    `lld_gate`.
    """
    assert (
        advantages_B.shape == logprobs_BT.shape[:1]
        and action_ids_BT.shape == logprobs_BT.shape == old_logprobs_BT.shape
    )
    delta_BT = old_logprobs_BT.detach() - logprobs_BT - tolerance
    open_BT = lld_gate(delta_BT, action_ids_BT, gate) & preserved_rows(advantages_B, preserve)[:, None]
    # relu, not maximum or clamp: at a tie, as for every token right after a rollout, its gradient is 0.
    return torch.where(open_BT, torch.relu(delta_BT), 0.0)


def answer_weights(answer_mask_BT: torch.Tensor, beta: float) -> torch.Tensor:
    """(B, T) weights of the LLDS terms: beta on tokens of the final answer span, 1 elsewhere.

    LLDS-MA, Eq. 5; the gate stays unweighted.
    """
    return torch.where(answer_mask_BT.bool(), beta, 1.0)


def answer_beta(mean_valid_searches: float, cfg: Loss) -> float:
    """The weight beta in [0, 1] of answer tokens at a step with V = `mean_valid_searches` an episode.

    "constant": lld_answer_weight. "paper" (B.2.1): min(V / lld_answer_searches, 1). "code":
    min(lld_answer_weight max(V - 1, 0), 1), the official min(lambda_answer max(V - 1, 0), lambda) in units of
    lambda.
    """
    if cfg.lld_answer_schedule == "constant":
        return cfg.lld_answer_weight
    if cfg.lld_answer_schedule == "paper":
        return min(mean_valid_searches / cfg.lld_answer_searches, 1.0)
    if cfg.lld_answer_schedule == "code":
        return min(cfg.lld_answer_weight * max(mean_valid_searches - 1.0, 0.0), 1.0)
    raise ValueError(
        f"loss.lld_answer_schedule = {cfg.lld_answer_schedule!r}: must be 'constant', 'paper' or 'code'"
    )
