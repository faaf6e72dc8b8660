"""Means over groups of tokens, and the classes of responses that the recorder tells apart."""

import torch

CLASSES = ("correct", "incorrect", "neutral")  # A > 0, A < 0, A = 0


def class_of(advantages_N: torch.Tensor) -> torch.Tensor:
    """(N,): the index in CLASSES of each advantage."""
    return torch.where(advantages_N > 0, 0, torch.where(advantages_N < 0, 1, 2))


def means(prefix: str, names: list[str], values_N: torch.Tensor, groups_N: torch.Tensor) -> dict[str, float]:
    """`prefix` + name -> mean of the values whose group is the index of that name; without empty groups.

    Values of a group below 0 are left out.
    """
    values_N, groups_N = values_N[groups_N >= 0], groups_N[groups_N >= 0]
    counts = torch.bincount(groups_N, minlength=len(names)).tolist()
    sums = torch.zeros(len(names), dtype=torch.float64).index_add_(0, groups_N, values_N.double()).tolist()
    return {
        prefix + name: total / count for name, total, count in zip(names, sums, counts, strict=True) if count
    }
