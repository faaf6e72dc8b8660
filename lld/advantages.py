"""Rewards → group-relative advantages."""

import torch

EPS = 1e-6  # added to the standard deviation, as in Search-R1


def group_advantages(rewards_PG: torch.Tensor, *, normalize_std: bool = True) -> torch.Tensor:
    """(P, G) advantages (r - mean) / (std + 1e-6) within each group, std unbiased; `normalize_std=False`
    leaves r - mean (Dr. GRPO).

    Paper, Sec. 3, with Search-R1's estimator and epsilon. Raises ValueError for groups of fewer than two.
    """
    assert rewards_PG.dim() == 2, (
        f"rewards must be (questions, episodes of each), not {tuple(rewards_PG.shape)}"
    )
    group_size = rewards_PG.shape[1]
    if group_size < 2:
        raise ValueError(
            f"groups of {group_size} episodes have no advantage to learn from: use rollout.group_size 2 or "
            "more"
        )
    rewards_PG = rewards_PG if rewards_PG.is_floating_point() else rewards_PG.float()
    deviations_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    # The mean of equal rewards may miss them by its last bits. The sign counts (LLDS preserves A >= 0, not A
    # > -1e-17),
    # so what the summation error can explain is zero.
    error_P1 = group_size * torch.finfo(rewards_PG.dtype).eps * rewards_PG.abs().amax(dim=1, keepdim=True)
    deviations_PG = deviations_PG.masked_fill(deviations_PG.abs() <= error_P1, 0.0)
    if not normalize_std:
        return deviations_PG
    std_P1 = (deviations_PG.square().sum(dim=1, keepdim=True) / (group_size - 1)).sqrt()
    return deviations_PG / (std_P1 + EPS)
