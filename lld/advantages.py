"""Rewards -> group-relative advantages."""

import torch

from lld.config import Advantage

EPS = 1e-6  # added to the standard deviation, as in Search-R1


def group_advantages(rewards_PG: torch.Tensor, cfg: Advantage = Advantage()) -> torch.Tensor:
    """(P, G) advantages of each question's G episodes, by the estimator `cfg.kind`.

    Raises ValueError for groups of fewer than two.
    """
    shape = tuple(rewards_PG.shape)
    assert len(shape) == 2, f"rewards must be (questions, episodes of each), not {shape}"
    if shape[1] < 2:
        raise ValueError(
            f"groups of {shape[1]} episodes have no advantage to learn from: use rollout.group_size 2 or more"
        )
    rewards_PG = rewards_PG if rewards_PG.is_floating_point() else rewards_PG.float()
    return ADVANTAGES[cfg.kind](rewards_PG, cfg)


def deviations(rewards_PG: torch.Tensor) -> torch.Tensor:
    """(P, G) rewards minus the mean of their group, exactly 0 where all rewards of a group are equal."""
    deviations_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    # The mean of equal rewards may be off in its last bits, and LLDS depends on the sign of an advantage (it
    # preserves A >= 0). Deviations within the summation error are therefore set to 0.
    eps = torch.finfo(rewards_PG.dtype).eps
    error_P1 = rewards_PG.shape[1] * eps * rewards_PG.abs().amax(dim=1, keepdim=True)
    return deviations_PG.masked_fill(deviations_PG.abs() <= error_P1, 0.0)


def normalized(rewards_PG: torch.Tensor, cfg: Advantage) -> torch.Tensor:
    """(r - mean) / (std + 1e-6) with the unbiased std; without `normalize_std` r - mean (Dr. GRPO).

    Paper, Sec. 3, with Search-R1's estimator and epsilon.
    """
    deviations_PG = deviations(rewards_PG)
    if not cfg.normalize_std:
        return deviations_PG
    std_P1 = (deviations_PG.square().sum(dim=1, keepdim=True) / (rewards_PG.shape[1] - 1)).sqrt()
    return deviations_PG / (std_P1 + EPS)


# The values of advantage.kind: (P, G) rewards and the options -> (P, G) advantages.
ADVANTAGES = {
    "grpo": normalized,
}
