"""Rewards -> advantages, most of them relative to the group; docs/losses.md lists them."""

import torch

from lld.config import Advantage

EPS = 1e-6  # added to the standard deviation, as in Search-R1


def group_advantages(
    rewards_PG: torch.Tensor, cfg: Advantage = Advantage(), strata_PG: torch.Tensor | None = None
) -> torch.Tensor:
    """(P, G) advantages of each question's G episodes, by the estimator `cfg.kind`.

    `strata_PG` are the numbers of searches of the episodes, which only "stratified" reads. Raises ValueError
    for groups of fewer than two.
    """
    shape = tuple(rewards_PG.shape)
    assert len(shape) == 2, f"rewards must be (questions, episodes of each), not {shape}"
    if shape[1] < 2:
        raise ValueError(
            f"groups of {shape[1]} episodes have no advantage to learn from: use rollout.group_size 2 or more"
        )
    rewards_PG = rewards_PG if rewards_PG.is_floating_point() else rewards_PG.float()
    strata_PG = torch.zeros_like(rewards_PG) if strata_PG is None else strata_PG
    return ADVANTAGES[cfg.kind](rewards_PG, strata_PG, cfg)


def deviations(rewards_PG: torch.Tensor) -> torch.Tensor:
    """(P, G) rewards minus the mean of their group, exactly 0 where all rewards of a group are equal."""
    deviations_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    # The mean of equal rewards may be off in its last bits, and LLDS depends on the sign of an advantage (it
    # preserves A >= 0). Deviations within the summation error are therefore set to 0.
    eps = torch.finfo(rewards_PG.dtype).eps
    error_P1 = rewards_PG.shape[1] * eps * rewards_PG.abs().amax(dim=1, keepdim=True)
    return deviations_PG.masked_fill(deviations_PG.abs() <= error_P1, 0.0)


def normalized(rewards_PG: torch.Tensor, strata_PG: torch.Tensor, cfg: Advantage) -> torch.Tensor:
    """(r - mean) / (std + 1e-6) with the unbiased std; without `normalize_std` r - mean (Dr. GRPO).

    Paper, Sec. 3, with Search-R1's estimator and epsilon; Dr. GRPO is arXiv 2503.20783.
    """
    return standardized(rewards_PG) if cfg.normalize_std else deviations(rewards_PG)


def standardized(rewards_PG: torch.Tensor) -> torch.Tensor:
    """(P, G) of (r - mean) / (std + 1e-6) of each group, with the unbiased std."""
    deviations_PG = deviations(rewards_PG)
    std_P1 = (deviations_PG.square().sum(dim=1, keepdim=True) / (rewards_PG.shape[1] - 1)).sqrt()
    return deviations_PG / (std_P1 + EPS)


def leave_one_out(rewards_PG: torch.Tensor, strata_PG: torch.Tensor, cfg: Advantage) -> torch.Tensor:
    """r - mean of the group's other rewards = G / (G - 1) (r - mean): RLOO (arXiv 2402.14740)."""
    G = rewards_PG.shape[1]
    return deviations(rewards_PG) * G / (G - 1)


def batch_std(rewards_PG: torch.Tensor, strata_PG: torch.Tensor, cfg: Advantage) -> torch.Tensor:
    """(r - mean of the group) / (std of all rewards of the step + 1e-6): Lite PPO (arXiv 2508.08221).

    The unbiased std. Groups of equal rewards stay 0 and do count in the std.
    """
    return deviations(rewards_PG) / (rewards_PG.std() + EPS)


def signed(rewards_PG: torch.Tensor, strata_PG: torch.Tensor, cfg: Advantage) -> torch.Tensor:
    """2 r - 1: +1 for right and -1 for wrong, without a baseline: REINFORCE as in arXiv 2506.01347.

    With loss.weights positives .1 it is W-REINFORCE, with 0 NSR.
    """
    return 2 * rewards_PG - 1


def stratified(rewards_PG: torch.Tensor, strata_PG: torch.Tensor, cfg: Advantage) -> torch.Tensor:
    """a (r - mean_k) / (std_k + 1e-6) + (1 - a) (r - mean) / (std + 1e-6), with a = stratum_weight.

    Stratified GRPO (arXiv 2510.06214); k are the group's episodes with as many searches. An episode that is
    alone in its stratum has r - mean_k = 0.
    """
    advantages_PG = torch.zeros_like(rewards_PG)
    for group, (rewards_G, strata_G) in enumerate(zip(rewards_PG, strata_PG, strict=True)):
        for stratum in strata_G.unique():
            inside_G = strata_G == stratum
            if inside_G.sum() > 1:
                advantages_PG[group, inside_G] = standardized(rewards_G[None, inside_G])[0]
    return cfg.stratum_weight * advantages_PG + (1 - cfg.stratum_weight) * standardized(rewards_PG)


# The values of advantage.kind: (P, G) rewards, (P, G) numbers of searches, and the options -> (P, G)
# advantages.
ADVANTAGES = {
    "grpo": normalized,
    "rloo": leave_one_out,
    "batch_std": batch_std,
    "signed": signed,
    "stratified": stratified,
}
