"""The losses that TRL ships too: value and gradient of its GRPOTrainer on random batches, to 1e-6 and closer.

Skipped where trl is not installed. Run as a script, it prints the table of docs/losses.md.
"""

import dataclasses
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from test_loss import ragged

from lld.config import Loss, Reward
from lld.episode import Batch
from lld.reward import overlong_punishment
from lld.selection import chosen_by_update
from lld.update import loss_of, update_counts

LENGTH = 17  # of the rows of `ragged`
# Options of the loss here, and what the trainer's attributes, its arguments (args) and inputs are there
CASES = {
    "GRPO": ({}, {}),
    "GRPO, token mean": ({"aggregation": "token_mean"}, {"loss_type": "bnpo"}),
    "DAPO": ({"aggregation": "token_mean", "clip_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "Dr. GRPO": (
        {"aggregation": "constant", "constant_tokens": float(LENGTH)},
        {"loss_type": "dr_grpo", "max_completion_length": LENGTH},
    ),
    "GSPO": (
        {"kind": "gspo", "clip_low": 0.03, "clip_high": 0.04},
        {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
    ),
    "CISPO": (
        {"kind": "cispo", "aggregation": "token_mean", "clip_low": 1.0, "clip_high": 0.1},
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
    "SAPO": (
        {"kind": "sapo"},
        {"loss_type": "sapo", "args": {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}},
    ),
    "VESPO": (
        {"kind": "vespo", "aggregation": "token_mean"},
        {
            "loss_type": "vespo",
            "args": {
                "vespo_k_pos": 2.0,
                "vespo_lambda_pos": 3.0,
                "vespo_k_neg": 3.0,
                "vespo_lambda_neg": 2.0,
            },
        },
    ),
    "dual clip": ({"kind": "dual_clip", "clip_dual": 1.4}, {"args": {"delta": 1.4}}),
    "k3 KL": ({"kl_weight": 0.1}, {"beta": 0.1}),
    "unbiased KL": (
        {"kl_weight": 0.1, "kl_estimator": "unbiased"},
        {"beta": 0.1, "args": {"use_bias_correction_kl": True}},
    ),
    "off-policy sequence masking": ({"weights": {"off_policy": 0.1}}, {"off_policy_mask_threshold": 0.1}),
    "80/20 entropy": ({"weights": {"high_entropy": 0.2}}, {"top_entropy_quantile": 0.2}),
}


def made_up(seed):
    """A batch of ragged rows, and log pi, log pi_old, log pi_ref and entropies (B, T)."""
    logprobs_BT, old_BT, _, advantages_B, ids_BT, _ = (rows[1:] for rows in ragged(seed))  # no empty row
    generator = torch.Generator().manual_seed(seed)
    ref_BT = logprobs_BT + torch.rand(logprobs_BT.shape, generator=generator, dtype=torch.float64) - 0.5
    entropies_BT = 3 * torch.rand(logprobs_BT.shape, generator=generator, dtype=torch.float64)
    B, T = ids_BT.shape
    batch = Batch(
        token_ids_BT=torch.ones(B, T, dtype=torch.long),
        action_ids_BT=ids_BT,
        part_ids_BT=torch.zeros(B, T, dtype=torch.long),
        sampled_logprobs_BT=old_BT,
        advantages_B=advantages_B,
        lengths_B=torch.full((B,), T),
        names=tuple(map(str, range(B))),
    )
    return batch, logprobs_BT, old_BT, ref_BT, entropies_BT


def ours(changes, seed):
    """Loss and gradient with respect to log pi."""
    batch, logprobs_BT, old_BT, ref_BT, entropies_BT = made_up(seed)
    options = dataclasses.replace(Loss(kl_weight=0.0, lld_weight=0.0), **changes)
    rows, leaf_BT = list(range(len(batch.names))), logprobs_BT.clone().requires_grad_()
    batch = chosen_by_update(batch, [rows], logprobs_BT, entropies_BT, options)
    counts = update_counts(batch, rows, "nonnegative")
    losses_B, _ = loss_of(batch, leaf_BT, entropies_BT, old_BT, ref_BT, None, counts, 1.0, options)
    losses_B.sum().backward()
    return losses_B.sum().detach(), leaf_BT.grad


def theirs(changes, seed):
    """The same by TRL's trainer, of which only the method that computes the loss is used."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    batch, logprobs_BT, old_BT, ref_BT, entropies_BT = made_up(seed)
    leaf_BT, mask_BT = logprobs_BT.clone().requires_grad_(), (batch.action_ids_BT > 0).double()
    accelerator = SimpleNamespace(
        num_processes=1,
        gather=lambda tensor: tensor,
        reduce=lambda tensor, reduction: tensor,
        pad_across_processes=lambda tensor, dim, pad_index: tensor,
    )
    arguments = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
    trainer = SimpleNamespace(
        **{
            "loss_type": "grpo",
            "importance_sampling_level": "token",
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "beta": 0.0,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "max_completion_length": LENGTH,
            "aux_loss_enabled": False,
            "use_vllm": False,
            "vllm_importance_sampling_correction": False,
            "current_gradient_accumulation_steps": 1,
            "_entropy_bonus_enabled": False,
            "_metrics": defaultdict(lambda: defaultdict(list)),
            "model": SimpleNamespace(training=True),
            "accelerator": accelerator,
        }
        | changes
        | {"args": SimpleNamespace(**arguments | changes.get("args", {}))}
    )
    trainer.get_gamma_weights = GRPOTrainer.get_gamma_weights
    trainer.get_off_policy_mask = GRPOTrainer.get_off_policy_mask
    trainer.get_high_entropy_mask = GRPOTrainer.get_high_entropy_mask.__get__(trainer)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf_BT, entropies_BT, None)
    ones_B1 = torch.ones(len(leaf_BT), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": ones_B1,
        "prompt_mask": ones_B1,
        "completion_ids": batch.token_ids_BT,
        "completion_mask": mask_BT,
        "advantages": batch.advantages_B,
        "old_per_token_logps": old_BT,
        "ref_per_token_logps": ref_BT,
        "num_items_in_batch": mask_BT.sum(),
    }
    value = GRPOTrainer._compute_loss(trainer, None, inputs)
    value.backward()
    return value.detach(), leaf_BT.grad


def largest_differences(name: str) -> tuple[float, float]:
    """Of value and gradient, over five random batches."""
    differences = []
    for seed in range(5):
        (value, gradient_BT), (other, other_BT) = ours(CASES[name][0], seed), theirs(CASES[name][1], seed)
        assert other_BT.abs().sum() > 0
        differences.append((float((value - other).abs()), float((gradient_BT - other_BT).abs().max())))
    return tuple(max(column) for column in zip(*differences, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_trls(name):
    pytest.importorskip("trl")
    value, gradient = largest_differences(name)
    assert value < 1e-6 and gradient < 1e-6


def test_the_overlong_punishment_is_trls():
    rewards = pytest.importorskip("trl.rewards")
    theirs_of = rewards.get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    cfg = Reward(overlong_max=100, overlong_cache=20)
    assert theirs_of([[1] * n for n in range(120)]) == [overlong_punishment(n, cfg) for n in range(120)]


if __name__ == "__main__":
    for name in CASES:
        value, gradient = largest_differences(name)
        print(f"| {name} | {value:.0e} | {gradient:.0e} |")
