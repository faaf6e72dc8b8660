"""Surrogates, KL, penalties, LLDS and its gates as pure tensor functions: (B, T) terms, unreduced.

Names: r = pi / pi_old of a token, A the advantage of its response, sg stops a gradient. Each method is one
function with its formula and source, and one entry of a literal table, from which an option chooses it.
Weights and means are in lld/weights.py, advantages in lld/advantages.py. docs/losses.md lists
all methods. "Paper" is arXiv 2512.04220v2, "official code"
vengdeng/LLDS-On-Group-Relative-Policy-Optimization-Collapse-in-Search-R1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lld.config import Loss

# exp stays finite in float32 (e^20 = 4.9e8): an infinite ratio times a zero advantage is NaN, and one NaN
# ends the run. A ratio this large has no usable gradient anyway.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Tokens:
    """What the rules read of a micro-batch. Outside `mask_BT` log pi may be anything, NaN included.

    `mask_BT` is true on the tokens to train: those that the model wrote, in rows that are not dropped.
    `chosen` holds the weights that `lld.selection` found for rules that compare several rows, (B, T) each.
    """

    logprobs_BT: torch.Tensor  # log pi; the gradient flows through it
    log_ratio_BT: torch.Tensor  # log pi - log pi_old, likewise; 0 outside the mask
    advantages_B1: torch.Tensor
    mask_BT: torch.Tensor
    chosen: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, logprobs_BT, old_logprobs_BT, advantages_B, mask_BT, chosen=None) -> Tokens:
        assert (
            advantages_B.shape == logprobs_BT.shape[:1]
            and mask_BT.shape == logprobs_BT.shape == old_logprobs_BT.shape
        )
        mask_BT = mask_BT.bool()
        # Masked before exp: the gradient of a masked inf is 0 * inf = NaN.
        log_ratio_BT = torch.where(mask_BT, logprobs_BT - old_logprobs_BT.detach(), 0.0)
        return cls(logprobs_BT, log_ratio_BT, advantages_B[:, None], mask_BT, chosen or {})

    def row_mean(self, values_BT: torch.Tensor) -> torch.Tensor:
        """(B, 1) means of values that are 0 outside the mask."""
        return values_BT.sum(dim=1, keepdim=True) / self.mask_BT.sum(dim=1, keepdim=True).clamp(min=1)


def exp_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of log-ratios, clamped to ±20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


# ---- surrogates: what of a token's policy gradient is kept


def clip_terms(log_ratio_BT: torch.Tensor, t: Tokens, options: Loss) -> torch.Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), PPO's clip (arXiv 1707.06347)."""
    ratio_BT = exp_of(log_ratio_BT)
    clipped_BT = ratio_BT.clamp(1 - options.clip_low, 1 + options.clip_high)
    return -torch.minimum(ratio_BT * t.advantages_B1, clipped_BT * t.advantages_B1)


def grpo(t: Tokens, options: Loss) -> torch.Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), each token's own r (arXiv 2402.03300; paper, Eq. 1).

    DAPO's clip-higher (arXiv 2503.14476) is clip_low .2, clip_high .28.
    """
    return clip_terms(t.log_ratio_BT, t, options)


def unclipped(t: Tokens, options: Loss) -> torch.Tensor:
    """-r A: the policy gradient with importance ratios alone, as KL-Cov has it (arXiv 2505.22617)."""
    return -exp_of(t.log_ratio_BT) * t.advantages_B1


def dual_clip(t: Tokens, options: Loss) -> torch.Tensor:
    """`grpo`, and for A < 0 at most -c A (c = clip_dual, 3): dual-clip PPO (arXiv 1912.09729).

    A wrong token whose ratio exceeds c has no gradient. TRL's two-sided clip, delta = c, is the same.
    """
    terms_BT = grpo(t, options)
    most_B1 = -options.clip_dual * t.advantages_B1
    return torch.where(t.advantages_B1 < 0, torch.minimum(terms_BT, most_B1), terms_BT)


def with_own_gradient(log_ratio_BT: torch.Tensor, t: Tokens) -> torch.Tensor:
    """The row's mean log-ratio as value, each token's own log-ratio as gradient.

    exp of it has the value of the response's ratio, the geometric mean of its tokens' ones. The mean of such
    terms over the row has the gradient of that ratio.
    """
    mean_B1 = t.row_mean(log_ratio_BT.detach())
    return torch.where(t.mask_BT, log_ratio_BT - log_ratio_BT.detach(), 0.0) + mean_B1


def gspo(t: Tokens, options: Loss) -> torch.Tensor:
    """`grpo` with s = exp(mean over the row of log r) for r (arXiv 2507.18071), in its token form.

    As the official code has it: each token's term has the value of the row's and the token's own gradient.
    The authors clip to [1 - 3e-4, 1 + 4e-4].
    """
    return clip_terms(with_own_gradient(t.log_ratio_BT, t), t, options)


def gmpo(t: Tokens, options: Loss) -> torch.Tensor:
    """-A exp(mean over the row of c), c = min(log r, clip_high) if A > 0, max(log r, -clip_low) if A < 0.

    GMPO (arXiv 2507.20673), in the token form of `gspo`; the bounds are on log r, the authors' are .4.
    """
    clipped_BT = torch.where(
        t.advantages_B1 > 0,
        t.log_ratio_BT.clamp(max=options.clip_high),
        t.log_ratio_BT.clamp(min=-options.clip_low),
    )
    return -exp_of(with_own_gradient(clipped_BT, t)) * t.advantages_B1


def cispo(t: Tokens, options: Loss) -> torch.Tensor:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi (arXiv 2506.13585): no token loses its gradient.

    The authors set no lower bound (clip_low 1); ScaleRL (arXiv 2510.13786) has an upper bound of 5
    (clip_high 4).
    """
    ratio_BT = exp_of(t.log_ratio_BT.detach()).clamp(1 - options.clip_low, 1 + options.clip_high)
    return -ratio_BT * t.advantages_B1 * t.logprobs_BT


def sapo(t: Tokens, options: Loss) -> torch.Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A: a gate in place of the clip (arXiv 2511.20347).

    tau = sapo_tau_positive (1.0) where A > 0, else sapo_tau_negative (1.05); at r = 1 the slope is that of r.
    """
    taus_B1 = torch.full_like(t.advantages_B1, options.sapo_tau_positive)
    tau_B1 = torch.where(t.advantages_B1 > 0, taus_B1, options.sapo_tau_negative)
    gate_BT = (tau_B1 * (exp_of(t.log_ratio_BT) - 1)).sigmoid() * 4 / tau_B1
    return -gate_BT * t.advantages_B1


def vespo(t: Tokens, options: Loss) -> torch.Tensor:
    """-sg(W^k e^(l (1 - W))) A log pi, W = product of the row's r: VESPO (arXiv 2602.10693).

    k, l = 2, 3 where A >= 0, else 3, 2; W is kept within 1e-8 and e^20. The factor is 1 at W = 1.
    """
    log_w_B1 = t.log_ratio_BT.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).sum(dim=1, keepdim=True)
    log_w_B1 = log_w_B1.clamp(math.log(1e-8), MAX_LOG_RATIO)
    k_B1, l_B1 = (torch.where(t.advantages_B1 >= 0, *pair) for pair in ((2.0, 3.0), (3.0, 2.0)))
    return -(k_B1 * log_w_B1 + l_B1 * (1 - log_w_B1.exp())).exp() * t.advantages_B1 * t.logprobs_BT


# The values of loss.kind: tokens and options -> (B, T) terms; outside the mask anything.
SURROGATES = {
    "grpo": grpo,
    "gspo": gspo,
    "dual_clip": dual_clip,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "unclipped": unclipped,
    "vespo": vespo,
}


def surrogate_terms(t: Tokens, options: Loss) -> torch.Tensor:
    """(B, T) policy-gradient terms by the rule `options.kind`, to be minimised, 0 outside the mask."""
    if options.kind not in SURROGATES:
        raise ValueError(f"loss.kind = {options.kind!r}: must be one of {', '.join(map(repr, SURROGATES))}")
    return torch.where(t.mask_BT, SURROGATES[options.kind](t, options), 0.0)


# ---- KL and penalties: terms beside the policy gradient


def kl_terms(logprobs_BT: torch.Tensor, ref_logprobs_BT: torch.Tensor) -> torch.Tensor:
    """(B, T) estimates of KL(pi || pi_ref): k3 = exp(d) - d - 1, d = log pi_ref - log pi, clamped to ±10.

    verl's "low_var_kl". As in the official code a clamped token (d > 2.6 or d < -11) has no gradient. Not
    masked: the caller does that.
    """
    # Clamping d changes neither value nor gradient (k3 is clamped much earlier). It keeps exp from
    # overflowing: 0 * inf = NaN.
    log_ratio_BT = (ref_logprobs_BT.detach() - logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (log_ratio_BT.exp() - log_ratio_BT - 1).clamp(-10.0, 10.0)


def unbiased(t: Tokens, ref_logprobs_BT: torch.Tensor) -> torch.Tensor:
    """r k3: its gradient is that of KL(pi || pi_ref) under samples of pi_old (arXiv 2512.02556)."""
    return exp_of(t.log_ratio_BT) * kl_terms(t.logprobs_BT, ref_logprobs_BT)


# The values of loss.kl_estimator: tokens and log pi_ref (B, T) -> (B, T) terms; outside the mask anything.
KL_ESTIMATORS = {
    "k3": lambda t, ref_logprobs_BT: kl_terms(t.logprobs_BT, ref_logprobs_BT),
    "unbiased": unbiased,
}


def nll(t: Tokens, weight: float) -> torch.Tensor:
    """-weight log pi where A > 0: imitates right answers (VAPO, arXiv 2504.05118; weight .1 there)."""
    return torch.where(t.advantages_B1 > 0, -weight * t.logprobs_BT, 0.0)


def kl_cov(t: Tokens, share: float) -> torch.Tensor:
    """|log r| on the `share` of tokens with the largest covariance (`selection.largest_cov`): KL-Cov.

    arXiv 2505.22617: coefficient 1, share .0002 to .002, and kind "unclipped" beside it.
    """
    return t.log_ratio_BT.abs() * t.chosen["kl_cov"]


# The keys of loss.penalties: tokens and the rule's number -> (B, T) terms to add, logged as loss/<name>;
# outside the mask anything.
PENALTIES = {
    "nll": nll,
    "kl_cov": kl_cov,
}


# ---- LLDS


def token_gate(fall_BT: torch.Tensor, action_ids_BT: torch.Tensor) -> torch.Tensor:
    """The token's own likelihood fell (Eq. 9)."""
    return fall_BT > 0


def action_gate(fall_BT: torch.Tensor, action_ids_BT: torch.Tensor) -> torch.Tensor:
    """The signed falls of the tokens of the token's action add up to more than zero (Eq. 4)."""
    B, T = fall_BT.shape
    # One column per action and one for id 0. T + 1 always suffice and need no max() on the host.
    sums_BK = fall_BT.new_zeros(B, T + 1).scatter_add(1, action_ids_BT.long(), fall_BT)
    return sums_BK.gather(1, action_ids_BT.long()) > 0


def response_gate(fall_BT: torch.Tensor, action_ids_BT: torch.Tensor) -> torch.Tensor:
    """The signed falls of all tokens of the row add up to more than zero (Eq. 10)."""
    return fall_BT.sum(dim=1, keepdim=True) > 0


# The values of loss.lld_gate: falls in likelihood (0 on tokens the model did not write) and action ids ->
# bool that broadcasts to (B, T). Every gate is also logged (gate/*), whichever of them is trained with.
GATES = {
    "token": token_gate,
    "action": action_gate,
    "response": response_gate,
}


def lld_gate(fall_BT: torch.Tensor, action_ids_BT: torch.Tensor, gate: str) -> torch.Tensor:
    """(B, T) bool: whether LLDS acts on a token, given the falls in likelihood log pi_old - log pi.

    `action_ids_BT` is 0 for tokens the model did not write, whose fall may be anything, and k in 1..T for
    those of the row's k-th action. No gradient flows through a gate. Raises ValueError for an unknown one.
    """
    if gate not in GATES:
        raise ValueError(f"LLDS gate {gate!r}: must be one of {', '.join(map(repr, GATES))}")
    written_BT = action_ids_BT > 0
    # In float64, so that a sum near 0 does not depend on the order of a GPU's atomic additions.
    fall_BT = torch.where(written_BT, fall_BT.detach().double(), 0.0)
    return written_BT & GATES[gate](fall_BT, action_ids_BT)


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
    fall_BT = old_logprobs_BT.detach() - logprobs_BT - tolerance
    open_BT = lld_gate(fall_BT, action_ids_BT, gate) & preserved_rows(advantages_B, preserve)[:, None]
    # relu, not maximum or clamp: at a tie, as for every token right after a rollout, its gradient is 0.
    return torch.where(open_BT, torch.relu(fall_BT), 0.0)


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
