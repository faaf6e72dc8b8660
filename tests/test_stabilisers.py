"""Every method of docs/stabilisers.md against a naive loop and a number by hand."""

import dataclasses
import math

import pytest
import torch
from gradients import make_episodes
from test_loss import cells, ragged

from lld import settings
from lld.config import Loss
from lld.episode import collate
from lld.loss import CORRECTIONS, correction_weights
from lld.update import loss_of, minibatch_counts

ADVANTAGES_PG = torch.tensor([[1.0, -0.5, -0.5], [0.0, 0.0, 0.0], [1.1, 0.1, -1.2], [-1.0, 0.5, 0.5]])


def make_batch():
    return collate(make_episodes(12, 50), ADVANTAGES_PG, pad_id=0)


# ---- corrections for a sampler other than the trainer


def naive_weight(ratio, kind, floor, cap):
    if kind == "tis":
        return min(max(ratio, floor), cap)
    return ratio if floor <= ratio <= cap else 0.0


@pytest.mark.parametrize("floor, cap", [(0.0, 2.0), (0.5, 1.2)])
@pytest.mark.parametrize("kind", CORRECTIONS)
def test_corrections_agree_with_a_loop(kind, floor, cap):
    options, seen = Loss(correction=kind, correction_floor=floor, correction_cap=cap), set()
    for seed in range(3):
        old_BT, sampled_BT, _, _, ids_BT, _ = ragged(seed)
        weights_BT = correction_weights(old_BT, sampled_BT, ids_BT > 0, options)
        for b, t in cells(ids_BT):
            written = [u for u in range(ids_BT.shape[1]) if ids_BT[b, u]]
            alike = written if kind.endswith("_sequence") else [t]
            ratio = math.prod(math.exp(old_BT[b, u] - sampled_BT[b, u]) for u in alike)
            wanted = naive_weight(ratio, kind[:3], floor, cap) if ids_BT[b, t] else 1.0
            assert weights_BT[b, t].item() == pytest.approx(wanted, abs=1e-12)
            seen.add((wanted == ratio, wanted == 0))
    assert (True, False) in seen and len(seen) > 1  # some are kept, some are cut


# Ratios pi_old / mu of three tokens: 3, .5, 1.5; of the response 2.25. The fourth token was not written.
BY_HAND = {
    ("tis", 0.0, 2.0): [2.0, 0.5, 1.5, 1.0],
    ("tis", 0.8, 2.0): [2.0, 0.8, 1.5, 1.0],
    ("mis", 0.0, 2.0): [0.0, 0.5, 1.5, 1.0],
    ("mis", 0.6, 5.0): [3.0, 0.0, 1.5, 1.0],
    ("tis_sequence", 0.0, 2.0): [2.0, 2.0, 2.0, 1.0],
    ("mis_sequence", 0.0, 2.0): [0.0, 0.0, 0.0, 1.0],
    ("mis_sequence", 0.0, 2.5): [2.25, 2.25, 2.25, 1.0],
}


@pytest.mark.parametrize("kind, floor, cap", BY_HAND)
def test_corrections_by_hand(kind, floor, cap):
    old_BT = torch.tensor([[3.0, 0.5, 1.5, 7.0]], dtype=torch.float64).log()
    options = Loss(correction=kind, correction_floor=floor, correction_cap=cap)
    mask_BT = torch.tensor([[1, 1, 1, 0]])
    weights_BT = correction_weights(old_BT, torch.zeros_like(old_BT), mask_BT, options)
    assert weights_BT[0].tolist() == pytest.approx(BY_HAND[kind, floor, cap], abs=1e-12)


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_an_enormous_gap_and_whatever_stands_outside_the_mask_stay_finite(kind):
    old_BT = torch.tensor([[500.0, float("nan")], [-500.0, float("inf")]])
    weights_BT = correction_weights(
        old_BT, torch.zeros(2, 2), torch.tensor([[1, 0], [1, 0]]), Loss(correction=kind)
    )
    assert weights_BT.isfinite().all()


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_correction_weighs_the_policy_term_alone(kind):
    """Neither KL nor LLDS; the sampler that equals the trainer changes nothing, bit for bit."""
    batch = make_batch()
    old_BT = batch.sampled_logprobs_BT - 0.3 * (batch.action_ids_BT > 0)
    new_BT = old_BT - 0.1
    counts = minibatch_counts(batch, list(range(len(batch.names))), "nonnegative")
    options = Loss(kl_weight=0.1)

    def terms(options, sampled_BT):
        part = dataclasses.replace(batch, sampled_logprobs_BT=sampled_BT)
        return loss_of(part, new_BT, None, old_BT, old_BT, old_BT, counts, 1.0, options)

    plain_B, plain = terms(options, batch.sampled_logprobs_BT)
    corrected = dataclasses.replace(options, correction=kind)
    same_B, _ = terms(corrected, old_BT)
    assert torch.equal(same_B, plain_B)
    _, weighed = terms(corrected, batch.sampled_logprobs_BT)
    assert not torch.equal(weighed["policy"], plain["policy"])
    assert torch.equal(weighed["kl"], plain["kl"]) and torch.equal(weighed["lld"], plain["lld"])


def test_contradictions_of_a_correction_are_refused():
    for tree, told in (
        ({"correction": "tis", "old_logprobs": "sampler"}, "would correct twice"),
        ({"correction_cap": 3.0}, "loss.correction_cap = 3.0 does nothing with loss.correction = 'none'"),
        ({"correction": "mis", "correction_floor": 2.0}, "0 <= floor < cap"),
        ({"correction": "tiss"}, "did you mean 'tis'"),
    ):
        with pytest.raises(ValueError, match=told):
            settings.from_dict({"loss": tree})
