"""Group advantages: numbers by hand, exact zeros, and the cases that have no advantage."""

import math

import pytest
import torch

from lld.advantages import group_advantages
from lld.config import Advantage


def test_numbers_by_hand():
    # mean 1/4, deviations (3/4, -1/4, -1/4, -1/4), unbiased variance (9 + 1 + 1 + 1)/16/3 = 1/4, std 1/2
    # (biased: 0.433)
    rewards_PG = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    expected_PG = torch.tensor([[0.75, -0.25, -0.25, -0.25]], dtype=torch.float64)
    torch.testing.assert_close(group_advantages(rewards_PG), expected_PG / (0.5 + 1e-6), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        group_advantages(rewards_PG, Advantage(normalize_std=False)), expected_PG, rtol=0, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_agrees_with_a_python_loop_and_groups_do_not_mix(dtype, normalize_std):
    rewards_PG = torch.rand(6, 5, generator=torch.Generator().manual_seed(0), dtype=dtype)
    advantages_PG = group_advantages(rewards_PG, Advantage(normalize_std=normalize_std))
    assert advantages_PG.dtype == dtype
    for rewards, advantages in zip(rewards_PG.tolist(), advantages_PG.tolist(), strict=True):
        mean = sum(rewards) / 5
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 4)
        scale = std + 1e-6 if normalize_std else 1.0
        assert advantages == pytest.approx(
            [(r - mean) / scale for r in rewards], abs=1e-12 if dtype == torch.float64 else 2e-6
        )


def test_epsilon_is_added_to_the_std_and_not_inside_its_root():
    rewards_PG = torch.tensor([[0.0, 2e-6]], dtype=torch.float64)  # std = sqrt(2) 1e-6
    assert group_advantages(rewards_PG)[0, 1].item() == pytest.approx(1 / (math.sqrt(2) + 1), rel=1e-6)


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("group_size", [2, 3, 5, 7, 10, 11, 49])
def test_a_constant_group_is_exactly_zero_though_its_mean_is_off_by_the_last_bit(normalize_std, group_size):
    rewards_PG = torch.linspace(-1, 1, 201)[:, None].repeat(1, group_size)
    assert (group_advantages(rewards_PG, Advantage(normalize_std=normalize_std)) == 0).all()


def test_the_constant_groups_would_not_be_zero_without_care():
    rewards_PG = torch.linspace(-1, 1, 201)[:, None].repeat(1, 7)
    assert (rewards_PG - rewards_PG.mean(dim=1, keepdim=True) != 0).any()


def test_a_reward_equal_to_the_mean_of_others_is_not_negative():
    """The sign decides whether LLDS preserves the episode."""
    for step in range(1, 100):
        rewards_PG = torch.tensor([[0.0, step / 100, 2 * step / 100]])
        assert group_advantages(rewards_PG)[0, 1] == 0


def test_a_small_real_difference_is_kept():
    advantages_PG = group_advantages(torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.9999]]))
    assert (advantages_PG[0, :4] > 0).all() and advantages_PG[0, 4] < -0.5


def test_integer_rewards_and_groups_of_one():
    assert group_advantages(torch.tensor([[1, 0]]), Advantage(normalize_std=False)).tolist() == [[0.5, -0.5]]
    with pytest.raises(ValueError, match="groups of 1 episodes have no advantage.*group_size 2 or more"):
        group_advantages(torch.ones(3, 1))
