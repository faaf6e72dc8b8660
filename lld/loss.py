"""Surrogates, KL, LLDS and its gates as pure tensor functions: (B, T) terms to be minimised, unreduced.

Reduction is the caller's: sequence mean (paper, Eq. 1) or token mean (official code), over the tokens of the
whole optimizer step. "Paper" is arXiv 2512.04220v2, "official code"
vengdeng/LLDS-On-Group-Relative-Policy-Optimization-Collapse-in-Search-R1.
"""

import torch

from lld.config import Loss

# exp stays finite in float32 (e^20 = 4.9e8): an infinite ratio times a zero advantage is NaN, and one NaN
# ends the run.
# No ratio this far out carries a usable gradient.
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
    """(B, T) clipped policy-gradient terms -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), zero outside
    the mask.

    "grpo" (paper, Eq. 1): r = exp(log pi - log pi_old) of each token. "gspo" (arXiv 2507.18071 in its token
    form, as the official code has it): r = exp(log pi - sg(log pi) + sg(mean log-ratio of the row)), whose
    value is one for the row and whose gradient is each token's. `mask_BT` is true (or non-zero) on tokens the
    model wrote; log-probabilities elsewhere may be anything, NaN included. Log-ratios are clamped to ±20.
    """
    assert (
        advantages_B.shape == logprobs_BT.shape[:1]
        and mask_BT.shape == logprobs_BT.shape == old_logprobs_BT.shape
    )
    mask_BT = mask_BT.bool()
    # Masked before exp: the gradient of a masked inf is 0 * inf = NaN.
    log_ratio_BT = torch.where(mask_BT, logprobs_BT - old_logprobs_BT.detach(), 0.0)
    if kind == "gspo":
        mean_B1 = log_ratio_BT.detach().sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(
            min=1
        )
        log_ratio_BT = torch.where(mask_BT, logprobs_BT - logprobs_BT.detach(), 0.0) + mean_B1
    elif kind != "grpo":
        raise ValueError(f"surrogate kind {kind!r}: must be 'grpo' or 'gspo'")
    ratio_BT = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantages_B1 = advantages_B[:, None]
    terms_BT = -torch.minimum(
        ratio_BT * advantages_B1, ratio_BT.clamp(1 - clip_low, 1 + clip_high) * advantages_B1
    )
    return torch.where(mask_BT, terms_BT, 0.0)


def kl_terms(logprobs_BT: torch.Tensor, ref_logprobs_BT: torch.Tensor) -> torch.Tensor:
    """(B, T) estimates of KL(pi || pi_ref): k3 = exp(d) - d - 1, d = log pi_ref - log pi, cut at 10 (verl's
    "low_var_kl").

    As in the official code a token beyond the cut (d > 2.6 or d < -11) has no gradient. Unmasked: the
    caller's mask applies.
    """
    # The clamp of d changes neither value nor gradient (k3 is cut long before), but exp must not overflow: 0
    # * inf = NaN.
    log_ratio_BT = (ref_logprobs_BT.detach() - logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_ratio_BT.exp() - log_ratio_BT - 1).clamp(-10.0, 10.0)


def gate_BT(delta_BT: torch.Tensor, action_ids_BT: torch.Tensor, gate: str) -> torch.Tensor:
    """(B, T) bool: whether LLDS acts on a token the model wrote, given the falls in likelihood delta = log
    pi_old - log pi.

    "token": the token's own fall is positive (Eq. 9). "response": the signed falls of the row's tokens add up
    to more than zero (Eq. 10). "action": those of the token's own action do (Eq. 4). `action_ids_BT` is 0 for
    tokens the model did not write, whose delta may be anything, and k in 1..T for those of the row's k-th
    action. No gradient flows through a gate.
    """
    written_BT = action_ids_BT > 0
    # In float64, so that a sum near 0 does not depend on the order in which a GPU's atomic additions take
    # place.
    delta_BT = torch.where(written_BT, delta_BT.detach().double(), 0.0)
    if gate == "token":
        return delta_BT > 0
    if gate == "response":
        return written_BT & (delta_BT.sum(dim=1, keepdim=True) > 0)
    if gate == "action":
        # One column an action and one for id 0. T + 1 suffice and need no max() on the host.
        sums_BK = delta_BT.new_zeros(delta_BT.shape[0], delta_BT.shape[1] + 1).scatter_add(
            1, action_ids_BT.long(), delta_BT
        )
        return written_BT & (sums_BK.gather(1, action_ids_BT.long()) > 0)
    raise ValueError(f"LLDS gate {gate!r}: must be 'token', 'response' or 'action'")


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
    """(B, T) LLDS terms max(0, log pi_old - log pi - tolerance) where gate and row are open to it, zero
    elsewhere.

    `tolerance` is in nats a token (ours; the paper has none): every fall counts from there on, also in the
    gates, so that of an action or a response opens where its falls add up to more than tolerance times the
    number of its tokens. Preserved are rows with A >= 0, which takes in all-wrong and all-right groups
    (paper, Sec. 5), or with `preserve="positive"` only A > 0. Weights, lambda and the normaliser are the
    caller's. `action_ids_BT` as for `gate_BT`.
    """
    assert (
        advantages_B.shape == logprobs_BT.shape[:1]
        and action_ids_BT.shape == logprobs_BT.shape == old_logprobs_BT.shape
    )
    if preserve not in ("nonnegative", "positive"):
        raise ValueError(f"LLDS preserve {preserve!r}: must be 'nonnegative' or 'positive'")
    preserved_B = advantages_B >= 0 if preserve == "nonnegative" else advantages_B > 0
    delta_BT = old_logprobs_BT.detach() - logprobs_BT - tolerance
    open_BT = gate_BT(delta_BT, action_ids_BT, gate) & preserved_B[:, None]
    # relu, not maximum or clamp: at a tie, which every token is right after a rollout, its gradient is 0.
    return torch.where(open_BT, torch.relu(delta_BT), 0.0)


def answer_weights(answer_mask_BT: torch.Tensor, beta: float) -> torch.Tensor:
    """(B, T) weights of the LLDS terms: beta on tokens of the final answer span, 1 elsewhere (LLDS-MA, Eq. 5;
    the gate stays unweighted)."""
    return torch.where(answer_mask_BT.bool(), beta, 1.0)


def answer_beta(mean_valid_searches: float, cfg: Loss) -> float:
    """The weight beta in [0, 1] of answer tokens at a step whose episodes made V = `mean_valid_searches`
    valid searches on average.

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
