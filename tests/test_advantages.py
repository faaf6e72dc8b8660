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


# ---- other estimators


def test_other_estimators_by_hand():
    def close(kind, rewards, wanted, **options):
        found_PG = group_advantages(torch.tensor(rewards, dtype=torch.float64), Advantage(kind, **options))
        wanted_PG = torch.tensor(wanted, dtype=torch.float64)
        torch.testing.assert_close(found_PG, wanted_PG, rtol=0, atol=1e-5)

    # 1 less the mean 0 of the others; 0 less their mean 1/2
    close("rloo", [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]], [[1.0, -0.5, -0.5], [0.0, 0.0, 0.0]])
    # All rewards 1 0 1 1: mean 3/4, variance (3/16 + 9/16) / 3 = 1/4
    close("batch_std", [[1.0, 0.0], [1.0, 1.0]], [[1.0, -1.0], [0.0, 0.0]])
    close("signed", [[1.0, 0.0], [0.5, 1.0]], [[1.0, -1.0], [0.0, 1.0]])


def test_stratified_by_hand():
    # Strata {1, 0}, {1, 0 0}, {0}: within them +-.707107; 1.154701, -.577350 twice; 0. Whole group: mean 1/3,
    # std sqrt((2 * 4/9 + 4 * 1/9) / 5) = .516398: 1.290994 for right, -.645497 for wrong.
    rewards_PG = torch.tensor([[1.0, 0.0, 1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    searches_PG = torch.tensor([[1, 1, 2, 2, 2, 0]])
    within = [0.707107, -0.707107, 1.154701, -0.577350, -0.577350, 0.0]
    whole = [1.290994, -0.645497, 1.290994, -0.645497, -0.645497, -0.645497]
    for weight in (0.0, 0.25, 1.0):
        found_PG = group_advantages(rewards_PG, Advantage("stratified", stratum_weight=weight), searches_PG)
        wanted = [weight * a + (1 - weight) * b for a, b in zip(within, whole, strict=True)]
        assert found_PG[0].tolist() == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("kind", ["rloo", "batch_std", "signed", "stratified"])
def test_other_estimators_agree_with_a_loop(kind):
    generator = torch.Generator().manual_seed(0)
    rewards_PG = torch.rand(6, 5, generator=generator, dtype=torch.float64)
    searches_PG = torch.randint(0, 3, (6, 5), generator=generator)
    found_PG = group_advantages(rewards_PG, Advantage(kind), searches_PG)

    def std(values):
        mean = sum(values) / len(values)
        return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))

    def scaled(reward, values):
        return (reward - sum(values) / len(values)) / (std(values) + 1e-6) if len(values) > 1 else 0.0

    for p in range(6):
        rewards, searches = rewards_PG[p].tolist(), searches_PG[p].tolist()
        for g, reward in enumerate(rewards):
            others = rewards[:g] + rewards[g + 1 :]
            alike = [r for r, n in zip(rewards, searches, strict=True) if n == searches[g]]
            wanted = {
                "rloo": reward - sum(others) / 4,
                "batch_std": (reward - sum(rewards) / 5) / (std(rewards_PG.flatten().tolist()) + 1e-6),
                "signed": 2 * reward - 1,
                "stratified": (scaled(reward, alike) + scaled(reward, rewards)) / 2,
            }[kind]
            assert found_PG[p, g].item() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("kind", ["rloo", "batch_std", "stratified"])
def test_other_relative_estimators_keep_the_exact_zeros(kind):
    rewards_PG = torch.linspace(-1, 1, 201)[:, None].repeat(1, 7)
    assert (group_advantages(rewards_PG, Advantage(kind)) == 0).all()
