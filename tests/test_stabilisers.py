"""Every method of docs/losses.md against a naive loop and a number by hand."""

import dataclasses
import itertools
import math
import re
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate import Accelerator
from conftest import ROOT, make_lm, make_tokenizer
from gradients import make_episodes
from test_loss import assert_same, cells, ragged, stack, value_and_gradient

from lld import loss, selection, settings, weights
from lld.config import Loss
from lld.episode import Episode, Question, collate
from lld.loss import SURROGATES, Tokens, surrogate_terms
from lld.policy import Policy
from lld.record.metrics import Clock
from lld.reward import overlong_punishment
from lld.running import playing
from lld.running.dry_row import check_names
from lld.selection import chosen_by_update, trained_rows
from lld.tools import Unplayed
from lld.update import loss_of, update_counts
from lld.weights import AGGREGATIONS, CORRECTIONS, correction_weights

ADVANTAGES_PG = torch.tensor([[1.0, -0.5, -0.5], [0.0, 0.0, 0.0], [1.1, 0.1, -1.2], [-1.0, 0.5, 0.5]])


def make_batch():
    return collate(make_episodes(12, 50), ADVANTAGES_PG, pad_id=0)


def close(found, wanted):
    wanted = torch.tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-6)


# ---- surrogates; "grpo" and "gspo" are in tests/test_loss.py


def naive_term(x, old, mean_clipped, product, A, kind, o):
    """The term of one token, x its log pi with a gradient; `product` of its row's ratios."""
    ratio = torch.exp(x - old)
    if kind == "vespo":
        k, decay = (2, 3) if A >= 0 else (3, 2)
        return -(product**k) * math.exp(decay - decay * product) * A * x
    if kind == "unclipped":
        return -ratio * A
    if kind == "dual_clip":
        bounded = min(max(ratio.item(), 1 - o.clip_low), 1 + o.clip_high)
        best = ratio * A if ratio.item() * A <= bounded * A else x.new_tensor(bounded * A)
        return x.new_tensor(-o.clip_dual * A) if A < 0 and -best.item() > -o.clip_dual * A else -best
    if kind == "cispo":
        return -min(max(ratio.item(), 1 - o.clip_low), 1 + o.clip_high) * A * x
    if kind == "sapo":
        tau = o.sapo_tau_positive if A > 0 else o.sapo_tau_negative
        return -4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * A
    log_ratio = x - old
    is_cut = log_ratio.item() > o.clip_high if A > 0 else log_ratio.item() < -o.clip_low
    own = x.detach() if is_cut else x
    return -torch.exp(own - own.detach() + mean_clipped) * A


@pytest.mark.parametrize("kind", sorted(SURROGATES.keys() - {"grpo", "gspo"}))
def test_surrogates_agree_with_a_loop(kind):
    options = Loss(kind=kind, clip_low=0.2, clip_high=0.28, clip_dual=1.4)
    for seed in range(3):
        logprobs_BT, old_BT, _, advantages_B, ids_BT, _ = ragged(seed)

        def naive(x):
            rows = []
            for b in range(x.shape[0]):
                A, written = advantages_B[b].item(), [t for t in range(x.shape[1]) if ids_BT[b, t]]
                logs = [(x[b, t] - old_BT[b, t]).item() for t in written]
                product = math.exp(sum(logs))
                logs = [min(v, options.clip_high) if A > 0 else max(v, -options.clip_low) for v in logs]
                mean = sum(logs) / max(1, len(logs))
                row = [x.new_zeros(()) for _ in range(x.shape[1])]
                for t in written:
                    row[t] = naive_term(x[b, t], old_BT[b, t].item(), mean, product, A, kind, options)
                rows.append(row)
            return stack(rows)

        def terms(x):
            return surrogate_terms(Tokens.of(x, old_BT, advantages_B, ids_BT > 0), options)

        assert_same(terms, naive, logprobs_BT, 1e-12)


# Ratios 1.5, .5, 1.1 with A = 2 (row 0) and -1 (row 1), clip to [.8, 1.28], c = 1.4, log pi_old = -1. Values,
# then slopes in log pi. cispo: -clip(r) A log pi with log pi = -1 + log r = -.594535, -1.693147, -.904690.
# sapo, tau 1 and 1.05: sigma(.5, -.5, .1) = .622459, .377541, .524979; sigma(.525, -.525, .105) = .628316,
# .371684, .526226; slope -4 r sigma (1 - sigma) A.
BY_HAND_SURROGATES = {
    "unclipped": ([[-3.0, -1.0, -2.2], [1.5, 0.5, 1.1]], [[-3.0, -1.0, -2.2], [1.5, 0.5, 1.1]]),
    "dual_clip": ([[-2.56, -1.0, -2.2], [1.4, 0.8, 1.1]], [[0.0, -1.0, -2.2], [0.0, 0.0, 1.1]]),
    "cispo": (
        [[1.522009, 2.709035, 1.990318], [-0.761004, -1.354518, -0.995159]],
        [[-2.56, -1.6, -2.2], [1.28, 0.8, 1.1]],
    ),
    "sapo": (
        [[-4.979675, -3.020325, -4.199833], [2.393585, 1.415938, 2.00467]],
        [[-2.820045, -0.940015, -2.194509], [1.40121, 0.46707, 1.096974]],
    ),
}


@pytest.mark.parametrize("kind", BY_HAND_SURROGATES)
def test_surrogates_by_hand(kind):
    options = Loss(kind=kind, clip_low=0.2, clip_high=0.28, clip_dual=1.4)
    old_BT, advantages_B = torch.full((2, 3), -1.0).double(), torch.tensor([2.0, -1.0]).double()
    logprobs_BT = (torch.tensor([[1.5, 0.5, 1.1]] * 2, dtype=torch.float64)).log() + old_BT

    def terms(x):
        return surrogate_terms(Tokens.of(x, old_BT, advantages_B, torch.ones(2, 3)), options)

    for found, wanted in zip(value_and_gradient(terms, logprobs_BT), BY_HAND_SURROGATES[kind], strict=True):
        close(found, wanted)


def test_gmpo_by_hand():
    # log r = .5, -.1, .3, bounds .4: for A = 1 c = .4, -.1, .3 with mean .2, the first token without slope;
    # for A = -1 nothing is cut, mean .233333, e^.233333 = 1.262802
    options, old_BT = Loss(kind="gmpo", clip_low=0.4, clip_high=0.4), torch.zeros(2, 3).double()
    logprobs_BT = torch.tensor([[0.5, -0.1, 0.3]] * 2, dtype=torch.float64)

    def terms(x):
        advantages_B = torch.tensor([1.0, -1.0], dtype=torch.float64)
        return surrogate_terms(Tokens.of(x, old_BT, advantages_B, torch.ones(2, 3)), options)

    value_BT, gradient_BT = value_and_gradient(terms, logprobs_BT)
    close(value_BT, [[-1.221403] * 3, [1.262802] * 3])
    close(gradient_BT, [[0.0, -1.221403, -1.221403], [1.262802] * 3])


def test_vespo_by_hand():
    # W = 4 * .5 = 2: 4 e^-3 = .199148 for A = 1, 8 e^-2 = 1.082682 for A = -1; log pi -1 and -2
    logprobs_BT = torch.tensor([[-1.0, -2.0]] * 2, dtype=torch.float64)
    old_BT = logprobs_BT - torch.tensor([4.0, 0.5], dtype=torch.float64).log()

    def terms(x):
        advantages_B = torch.tensor([1.0, -1.0], dtype=torch.float64)
        return surrogate_terms(Tokens.of(x, old_BT, advantages_B, torch.ones(2, 2)), Loss(kind="vespo"))

    value_BT, gradient_BT = value_and_gradient(terms, logprobs_BT)
    close(value_BT, [[0.199148, 0.398297], [-1.082682, -2.165365]])
    close(gradient_BT, [[-0.199148] * 2, [1.082682] * 2])


def test_the_row_mean_of_gmpo_is_the_geometric_mean_and_has_its_gradient():
    options = Loss(kind="gmpo", clip_low=0.1, clip_high=0.2)
    for seed in range(3):
        logprobs_BT, old_BT, _, advantages_B, ids_BT, _ = ragged(seed)
        mask_BT, A_B1 = ids_BT > 0, advantages_B[:, None]
        lengths_B = mask_BT.sum(1).clamp(min=1)

        def ours(x):
            terms_BT = surrogate_terms(Tokens.of(x, old_BT, advantages_B, mask_BT), options)
            return terms_BT.sum(1) / lengths_B

        def whole(x):
            log_ratio_BT = (x - old_BT) * mask_BT
            cut_BT = torch.where(A_B1 > 0, log_ratio_BT.clamp(max=0.2), log_ratio_BT.clamp(min=-0.1))
            ratio_B = (cut_BT.sum(1) / lengths_B).exp()
            return torch.where(mask_BT.any(1), -advantages_B * ratio_B, 0.0)

        for found, wanted in zip(
            value_and_gradient(ours, logprobs_BT), value_and_gradient(whole, logprobs_BT), strict=True
        ):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", SURROGATES)
def test_at_ratio_one_every_surrogate_is_the_policy_gradient(kind):
    logprobs_BT, _, _, advantages_B, ids_BT, _ = ragged(0)

    def terms(x):
        return surrogate_terms(Tokens.of(x, logprobs_BT, advantages_B, ids_BT > 0), Loss(kind=kind))

    _, gradient_BT = value_and_gradient(terms, logprobs_BT)
    torch.testing.assert_close(gradient_BT, -advantages_B[:, None] * (ids_BT > 0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", SURROGATES)
@pytest.mark.parametrize("jump", [-500.0, 500.0])
def test_enormous_ratios_and_holes_stay_finite(kind, jump):
    options = Loss(kind=kind)
    for advantage in (-1.0, 0.0, 1.0):
        new_BT, mask_BT = torch.tensor([[jump, float("nan"), 0.0]]), torch.tensor([[1, 0, 1]])

        def terms(x, advantage=advantage, mask_BT=mask_BT):
            return surrogate_terms(
                Tokens.of(x, torch.zeros(1, 3), torch.tensor([advantage]), mask_BT), options
            )

        value_BT, gradient_BT = value_and_gradient(terms, new_BT)
        assert value_BT.isfinite().all() and gradient_BT.isfinite().all()
        assert value_BT[0, 1] == 0 and gradient_BT[0, 1] == 0


# ---- aggregation, KL, penalties


def test_aggregations_by_hand():
    # Rows of 3 and 1 tokens with sums 6 and 2; 2 rows and 4 tokens in the step
    sums_B, lengths_B, counts = torch.tensor([6.0, 2.0]), torch.tensor([3, 1]), {"rows": 2, "tokens": 4}
    wanted = {"sequence_mean": [1.0, 1.0], "token_mean": [1.5, 0.5], "constant": [0.3, 0.1]}
    assert wanted.keys() == AGGREGATIONS.keys()
    for name, shares in wanted.items():
        close(AGGREGATIONS[name](sums_B, lengths_B, counts, Loss(constant_tokens=10.0)), shares)


def test_unbiased_kl_by_hand_and_against_a_loop():
    # pi_ref / pi = 2: k3 = 2 - log 2 - 1 = .306853; r = 1.5: value .460279, slope r (k3 + 1 - 2) = -1.039721
    x = torch.tensor([[0.0]], dtype=torch.float64)
    old_BT, ref_BT = x - math.log(1.5), x + math.log(2)

    def term(x):
        return loss.unbiased(Tokens.of(x, old_BT, torch.ones(1).double(), torch.ones(1, 1)), ref_BT)

    value_BT, gradient_BT = value_and_gradient(term, x)
    close(value_BT, [[0.460279]])
    close(gradient_BT, [[-1.039721]])
    logprobs_BT, old_BT, _, advantages_B, ids_BT, _ = ragged(0)
    ref_BT = logprobs_BT + 0.5 * torch.sin(torch.arange(logprobs_BT.numel())).view_as(logprobs_BT)

    def ours(x):
        tokens = Tokens.of(x, old_BT, advantages_B, ids_BT > 0)
        return torch.where(tokens.mask_BT, loss.KL_ESTIMATORS["unbiased"](tokens, ref_BT), 0.0)

    def naive(x):
        rows = [[x.new_zeros(()) for _ in row] for row in x]
        for b, t in cells(x):
            if ids_BT[b, t]:
                d = ref_BT[b, t] - x[b, t]
                rows[b][t] = torch.exp(x[b, t] - old_BT[b, t]) * (torch.exp(d) - d - 1)
        return stack(rows)

    assert_same(ours, naive, logprobs_BT, 1e-12)


def test_its_gradient_is_that_of_the_kl_divergence_under_samples_of_the_old_policy():
    """Mean over pi_old of r k3 = KL(pi || pi_ref), whose gradient k3 alone misses."""
    generator = torch.Generator().manual_seed(0)
    logits_V, old_V, ref_V = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(3))
    logits_V.requires_grad_()
    new_V, old_V, ref_V = logits_V.log_softmax(0), old_V.log_softmax(0), ref_V.log_softmax(0)
    (wanted_V,) = torch.autograd.grad((new_V.exp() * (new_V - ref_V)).sum(), logits_V, retain_graph=True)
    tokens = Tokens.of(new_V[None], old_V[None], torch.ones(1).double(), torch.ones(1, 6))
    found = {}
    for name, estimate in loss.KL_ESTIMATORS.items():
        mean = (old_V.exp() * estimate(tokens, ref_V[None])[0]).sum()
        (found[name],) = torch.autograd.grad(mean, logits_V, retain_graph=True)
    torch.testing.assert_close(found["unbiased"], wanted_V, rtol=0, atol=1e-12)
    assert (found["k3"] - wanted_V).abs().max() > 0.05


def test_penalties_by_hand():
    logprobs_BT = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], dtype=torch.float64)
    old_BT = torch.tensor([[-1.5, -1.0], [-3.0, -4.5]], dtype=torch.float64)
    chosen = {"kl_cov": torch.tensor([[1.0, 1.0], [0.0, 1.0]])}

    def penalty(name, number):
        def terms(x):
            A_B = torch.tensor([0.5, -0.5], dtype=torch.float64)
            return loss.PENALTIES[name](Tokens.of(x, old_BT, A_B, torch.ones(2, 2), chosen), number)

        return value_and_gradient(terms, logprobs_BT)

    value_BT, gradient_BT = penalty("nll", 0.1)
    close(value_BT, [[0.1, 0.2], [0.0, 0.0]])
    close(gradient_BT, [[-0.1, -0.1], [0.0, 0.0]])
    value_BT, gradient_BT = penalty("kl_cov", 0.002)
    close(value_BT, [[0.5, 1.0], [0.0, 0.5]])
    close(gradient_BT, [[1.0, -1.0], [0.0, 1.0]])


# ---- weights and choices


def test_weights_by_hand_and_against_a_loop():
    # Row 2 (A < 0) fell by .3 a token in the mean, row 3 (A < 0) by .1
    old_BT = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]])
    new_BT = torch.tensor([[-2.0, -2.0], [-2.0, -2.0], [-1.5, -1.1], [-1.3, -0.9]])
    tokens = Tokens.of(new_BT, old_BT, torch.tensor([1.0, 0.0, -1.0, -0.5]), torch.ones(4, 2))
    assert weights.positives(tokens, 0.25).tolist() == [[0.25], [1.0], [1.0], [1.0]]
    assert weights.negatives(tokens, 0.0).tolist() == [[1.0], [1.0], [0.0], [0.0]]
    assert weights.off_policy(tokens, 0.2).tolist() == [[1.0], [1.0], [0.0], [1.0]]
    for seed in range(3):
        logprobs_BT, old_BT, _, advantages_B, ids_BT, _ = ragged(seed)
        found_B1 = weights.off_policy(Tokens.of(logprobs_BT, old_BT, advantages_B, ids_BT > 0), 0.1)
        for b in range(len(ids_BT)):
            falls = [(old_BT[b, t] - logprobs_BT[b, t]).item() for t in range(17) if ids_BT[b, t]]
            is_stale = advantages_B[b] < 0 and sum(falls) / max(1, len(falls)) > 0.1
            assert found_B1[b, 0] == (0.0 if is_stale else 1.0)


def made_up_step(seed=0, rows=40, tokens=30):
    generator = torch.Generator().manual_seed(seed)
    logprobs_RT = -4 * torch.rand(rows, tokens, generator=generator)
    advantages_R1 = torch.randn(rows, 1, generator=generator)
    mask_RT = torch.rand(rows, tokens, generator=generator) < 0.8
    entropies_RT = 3 * torch.rand(rows, tokens, generator=generator)
    return selection.Update(logprobs_RT, entropies_RT, advantages_R1, mask_RT, seed)


def naive_covariances(step):
    places = [(r, t) for r, t in cells(step.mask_RT) if step.mask_RT[r, t]]
    mean_A = sum(step.advantages_R1[r, 0].item() for r, _ in places) / len(places)
    mean_logp = sum(step.logprobs_RT[r, t].item() for r, t in places) / len(places)
    return {
        (r, t): (step.advantages_R1[r, 0].item() - mean_A) * (step.logprobs_RT[r, t].item() - mean_logp)
        for r, t in places
    }


def places_of(chosen_RT):
    return {tuple(place) for place in chosen_RT.nonzero().tolist()}


def test_choices_agree_with_a_loop():
    step = made_up_step()
    covariances = naive_covariances(step)
    count = int(0.05 * len(covariances))
    largest = sorted(covariances, key=covariances.get)[-count:]
    assert places_of(selection.largest_cov(step, 0.05)) == set(largest)
    drawn = places_of(selection.some_of_high_cov(step, 0.05))
    high = {place for place, value in covariances.items() if 1 < value < 5}
    assert drawn <= high and len(drawn) == min(count, len(high)) and drawn != high
    again = dataclasses.replace(step, seed=1)
    assert places_of(selection.some_of_high_cov(step, 0.05)) == drawn
    assert places_of(selection.some_of_high_cov(again, 0.05)) != drawn
    entropies = sorted(step.entropies_RT[step.mask_RT].tolist())
    at = 0.8 * (len(entropies) - 1)  # the quantile between its neighbours
    low, part = int(at), at - int(at)
    threshold = entropies[low] + part * (entropies[low + 1] - entropies[low])
    most = places_of(selection.highest_entropies(step, 0.2))
    assert most == {(r, t) for r, t in covariances if step.entropies_RT[r, t] >= threshold}


def test_choices_by_hand():
    # A = 2, -2 about their mean 0; log pi = -1, -3, -1, -3 about -2: cov = 2 * 1, 2 * -1, -2 * 1, -2 * -1;
    # the fifth token of each row was not written
    logprobs_RT = torch.tensor([[-1.0, -3.0, 0.0], [-1.0, -3.0, 0.0]])
    mask_RT = torch.tensor([[True, True, False]] * 2)
    entropies_RT = torch.tensor([[0.1, 0.9, 5.0], [0.5, 0.4, 5.0]])
    step = selection.Update(logprobs_RT, entropies_RT, torch.tensor([[2.0], [-2.0]]), mask_RT, 0)
    assert places_of(selection.largest_cov(step, 0.5)) == {(0, 0), (1, 1)}
    assert places_of(selection.some_of_high_cov(step, 0.5)) == {(0, 0), (1, 1)}
    # The quantile .75 of .1 .4 .5 .9 is .6
    assert places_of(selection.highest_entropies(step, 0.25)) == {(0, 1)}
    # No more where entropies are equal, as those of tokens with one kept id, which are 0
    flat = dataclasses.replace(step, entropies_RT=torch.zeros(2, 3))
    assert len(places_of(selection.highest_entropies(flat, 0.25))) == 1


def parts_of(options, trained_B=None):
    """(row losses, terms) of made-up episodes under `options`."""
    batch = dataclasses.replace(make_batch(), trained_B=trained_B)
    mask_BT = batch.action_ids_BT > 0
    noise_BT = torch.sin(torch.arange(mask_BT.numel())).view(mask_BT.shape)
    old_BT, entropy_BT = (-1.5 + noise_BT) * mask_BT, (1 + noise_BT.cos()) * mask_BT
    new_BT = old_BT - 0.3 * noise_BT.flip(1) * mask_BT
    rows = list(range(len(batch.names)))
    batch = dataclasses.replace(batch, chosen={"nthr": 0.5 + 0.5 * (noise_BT > 0)})
    batch = chosen_by_update(batch, [rows], old_BT, entropy_BT, options)
    counts = update_counts(batch, rows, options.lld_preserve)
    return loss_of(batch, new_BT, entropy_BT, old_BT, old_BT - 0.1, old_BT, counts, 1.0, options)


RULES = [("weights", name) for name in weights.WEIGHTS] + [("penalties", name) for name in loss.PENALTIES]


@pytest.mark.parametrize("option, name", RULES)
def test_a_rule_changes_its_own_term_alone(option, name):
    plain_B, plain = parts_of(Loss(kl_weight=0.1))
    number = 0.0 if name == "off_policy" else 0.05
    ruled_B, ruled = parts_of(Loss(kl_weight=0.1, **{option: {name: number}}))
    assert torch.equal(ruled["kl"], plain["kl"]) and torch.equal(ruled["lld"], plain["lld"])
    assert not torch.equal(ruled_B, plain_B)
    assert torch.equal(ruled["policy"], plain["policy"]) == (option == "penalties")
    if option == "weights":
        assert torch.equal(ruled["policy"], plain["policy"] * ruled["weight"])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_dropped_rows_are_as_if_they_had_not_been_played(aggregation):
    options = Loss(kl_weight=0.1, entropy_weight=0.1, aggregation=aggregation, penalties={"nll": 0.1})
    trained_B = torch.tensor([True, False, True, True, False, True] * 2)
    some_B, _ = parts_of(options, trained_B)
    batch = make_batch()
    whole_B, _ = parts_of(options)
    counts, fewer = (
        update_counts(dataclasses.replace(batch, trained_B=mask_B), list(range(12)), "nonnegative")
        for mask_B in (None, trained_B)
    )
    assert (some_B[~trained_B] == 0).all() and fewer["rows"] == 8 < counts["rows"]
    kept = trained_B.nonzero()[:, 0].tolist()
    alone = update_counts(batch, kept, "nonnegative")
    assert alone == fewer
    if aggregation != "sequence_mean":  # the rows' losses differ by their denominators alone
        assert not torch.allclose(some_B[trained_B], whole_B[trained_B])


@pytest.mark.parametrize("estimator", loss.KL_ESTIMATORS)
def test_numbers_that_are_none_in_a_dropped_row_or_outside_the_mask_do_not_reach_the_loss(estimator):
    batch, holes_B = make_batch(), torch.arange(12) == 4
    batch = dataclasses.replace(
        batch, trained_B=~holes_B, chosen={"nthr": torch.ones(batch.token_ids_BT.shape)}
    )
    mask_BT = (batch.action_ids_BT > 0) & ~holes_B[:, None]
    old_BT = -1 - torch.sin(torch.arange(mask_BT.numel())).view(mask_BT.shape) / 2
    counts = update_counts(batch, list(range(12)), "nonnegative")
    options = Loss(
        kl_weight=0.1,
        kl_estimator=estimator,
        entropy_weight=0.1,
        weights={"off_policy": 0.1, "nthr": 1.0},
        penalties={"nll": 0.1},
        correction="tis_sequence",
    )

    def whole(new_BT, hole):
        def holed(table_BT):
            return torch.where(mask_BT, table_BT, hole)

        part = dataclasses.replace(
            batch, sampled_logprobs_BT=holed(old_BT - 0.1), chosen={"nthr": holed(batch.chosen["nthr"])}
        )
        tables = holed(new_BT), holed(-new_BT), *(holed(old_BT + gap) for gap in (0.0, 0.2, 0.1))
        return loss_of(part, *tables, counts, 0.5, options)[0]

    wanted_B, wanted_BT = value_and_gradient(lambda new_BT: whole(new_BT, 0.0), old_BT + 0.05)
    for hole in (float("nan"), float("inf"), -float("inf")):
        found_B, found_BT = value_and_gradient(lambda new_BT, hole=hole: whole(new_BT, hole), old_BT + 0.05)
        assert torch.equal(found_B, wanted_B) and torch.equal(found_BT, wanted_BT)


def test_filters_tell_truncated_and_void_episodes():
    episodes = make_episodes(12, 50)
    episodes[3].stop_reason = "length"
    episodes[5].turns[0].stop = "length"
    assert trained_rows(episodes, Loss()) is None
    kept_B = trained_rows(episodes, Loss(drop=("truncated",)))
    assert (~kept_B).nonzero()[:, 0].tolist() == [3, 5]
    void = [row for row, e in enumerate(episodes) if any(turn.kind == "invalid" for turn in e.turns)]
    assert (~trained_rows(episodes, Loss(drop=("void_turn",)))).nonzero()[:, 0].tolist() == void != []
    both_B = trained_rows(episodes, Loss(drop=("void_turn", "truncated")))
    assert (~both_B).nonzero()[:, 0].tolist() == sorted({3, 5, *void})


@pytest.mark.parametrize(
    "tree, told",
    [
        (
            {"loss": {"kind": "sapo", "clip_high": 0.3}},
            "loss.clip_high = 0.3 does nothing with loss.kind = 'sapo'",
        ),
        ({"loss": {"clip_dual": 2.0}}, "loss.clip_dual = 2.0 does nothing with loss.kind = 'grpo'"),
        ({"loss": {"kind": "dual_clip", "clip_dual": 1.1}}, "must exceed 1 + loss.clip_high"),
        ({"loss": {"sapo_tau_negative": 2.0}}, "loss.sapo_tau_negative = 2.0 does nothing"),
        ({"loss": {"kind": "grpo", "clip_low": 1.2}}, "which clips no ratio from below"),
        ({"loss": {"constant_tokens": 100}}, "does nothing with loss.aggregation = 'sequence_mean'"),
        ({"loss": {"kind": "gspo", "aggregation": "constant"}}, "use 'sequence_mean'"),
        ({"loss": {"kl_weight": 0.0, "kl_estimator": "unbiased"}}, "does nothing with loss.kl_weight = 0"),
        ({"loss": {"weights": {"positives": -1.0}}}, "must not be negative"),
        ({"loss": {"weights": {"high_entropy": 20}}}, "a share of the tokens, must be in (0, 1)"),
        ({"loss": {"penalties": {"kl_cov": 0.0}}}, "a share of the tokens, must be in (0, 1)"),
        ({"loss": {"weights": {"positives": 0.0, "negatives": 0.0}}}, "leave no policy term"),
        ({"loss": {"weights": {"nthr": 1.0}, "support": "kept"}, "rollout": {"top_p": 0.9}}, "use 'full'"),
        ({"loss": {"kind": "vespo", "correction": "tis"}}, "undoes that; use correction none, or 'sampler'"),
        ({"loss": {"weights": {"positive": 0.1}}}, "did you mean 'positives'?"),
        ({"loss": {"drop": ["void"]}}, "must be one of 'truncated', 'void_turn'"),
        (
            {
                "loss": {"weights": {"off_policy": 0.1}, "lld_weight": 0.0},
                "optim": {"updates_per_rollout": 1},
            },
            "off_policy with optim.updates_per_rollout = 1 cannot act",
        ),
        (
            {
                "loss": {"penalties": {"kl_cov": 0.1}, "lld_weight": 0.0},
                "optim": {"updates_per_rollout": 1},
            },
            "kl_cov with optim.updates_per_rollout = 1 cannot act",
        ),
        (
            {"advantage": {"kind": "rloo", "normalize_std": False}},
            "does nothing with advantage.kind = 'rloo'",
        ),
        (
            {"advantage": {"kind": "signed"}, "rollout": {"extra_draws": 1}},
            "there groups of equal rewards teach",
        ),
        ({"rollout": {"extra_draws": -1}}, "rollout.extra_draws = -1: must not be negative"),
        ({"advantage": {"stratum_weight": 0.7}}, "does nothing with advantage.kind = 'grpo'"),
        ({"advantage": {"kind": "stratified", "stratum_weight": 1.5}}, "must be in [0, 1]"),
    ],
)
def test_contradictions_are_refused(tree, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        settings.from_dict(tree)


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
    counts = update_counts(batch, list(range(len(batch.names))), "nonnegative")
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


# ---- NTHR


def naive_nthr(states_NC, residual_NV, row_N, advantages_G, beta):
    def score(n):
        return sum(
            float(residual_NV[m] @ residual_NV[n]) * float(states_NC[m] @ states_NC[n])
            for m in range(len(row_N))
            if advantages_G[row_N[m]] > 0
        )

    scores = [score(n) for n in range(len(row_N))]
    means = []
    for row in range(len(advantages_G)):
        own = [scores[n] for n in range(len(row_N)) if row_N[n] == row]
        if advantages_G[row] > 0 and own:
            means.append(sum(own) / len(own))
    eta = 2 * abs(0.5 - sum(a > 0 for a in advantages_G.tolist()) / len(advantages_G))
    return [
        eta if advantages_G[row_N[n]] < 0 and scores[n] > beta * min(means) else 1.0
        for n in range(len(row_N))
    ]


@pytest.mark.parametrize("beta", [0.0, 0.2, 1.0])
def test_nthr_agrees_with_a_loop_whatever_the_chunks(beta, monkeypatch):
    seen = set()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        states_NC = torch.randn(30, 4, generator=generator, dtype=torch.float64) + 0.5
        logits_NV = torch.randn(30, 6, generator=generator, dtype=torch.float64)
        targets_N = torch.randint(0, 6, (30,), generator=generator)
        residual_NV = torch.nn.functional.one_hot(targets_N, 6) - logits_NV.softmax(1)
        row_N = torch.arange(5).repeat_interleave(6)
        advantages_G = torch.tensor([1.0, -1.0, -0.5, -0.5, 0.0])
        wanted = naive_nthr(states_NC, residual_NV, row_N, advantages_G, beta)
        for chunk in (1, 7, 256):
            monkeypatch.setattr(selection, "CHUNK", chunk)
            found_N = selection.nthr_weights(
                states_NC, lambda index, g=residual_NV: g[index], row_N, advantages_G, beta
            )
            assert found_N.tolist() == pytest.approx(wanted)
        seen |= set(wanted)
    assert sorted(seen) == pytest.approx([0.6, 1.0])


def test_nthr_by_hand():
    # Token 0 is right, g h = (1, 0) 2; tokens 1 and 2 are wrong with g h = (.5, 0) 1 and (0, 1) 3.
    # Scores: 1 * 4 = 4; .5 * 2 = 1; 0 * 6 = 0. Threshold beta * 4; p = 1/3, eta = 1/3.
    states_NC = torch.tensor([[2.0], [1.0], [3.0]])
    g_NV = torch.tensor([[1.0, 0.0], [0.5, 0.0], [0.0, 1.0]])
    for beta, wanted in ((0.2, [1.0, 1 / 3, 1.0]), (1.0, [1.0, 1.0, 1.0]), (-1.0, [1.0, 1 / 3, 1 / 3])):
        found_N = selection.nthr_weights(
            states_NC, lambda index: g_NV[index], torch.arange(3), torch.tensor([1.0, -1.0, -1.0]), beta
        )
        assert found_N.tolist() == pytest.approx(wanted)


def test_tokens_of_dropped_rows_enter_no_nthr_score():
    """The table of a batch with dropped rows against a loop over the tokens of the others, group by group."""
    accelerator, tokenizer = Accelerator(cpu=True), make_tokenizer()
    rollout = {"num_questions": 4, "group_size": 3}
    options = {"weights": {"nthr": 0.0}}
    cfg = settings.from_dict({"rollout": rollout, "loss": options, "optim": {"updates_per_rollout": 2}})
    policy, trained_B = Policy(make_lm(tokenizer)), torch.arange(12) != 6  # one of two right answers
    batch = collate(make_episodes(12, len(tokenizer)), ADVANTAGES_PG, 0, trained_B)
    found_BT = selection.nthr_table(accelerator, policy, batch, cfg)
    states_NC, targets_N = policy.states(batch.token_ids_BT, batch.action_ids_BT > 0)
    residual_NV = torch.nn.functional.one_hot(targets_N, len(tokenizer)) - policy.lm.lm_head(
        states_NC
    ).softmax(1)
    rows_N = (batch.action_ids_BT > 0).nonzero()[:, 0]
    for rows, changed in ((range(3), False), (range(6, 9), True)):
        advantages_G, kept_G = batch.advantages_B[list(rows)], trained_B[list(rows)]
        tables = []
        for some_G in (kept_G, torch.ones(3, dtype=torch.bool)):
            of_N = torch.isin(rows_N, torch.tensor(rows)[some_G])
            args = states_NC[of_N].detach(), residual_NV[of_N].detach(), rows_N[of_N] - rows[0], advantages_G
            tables.append(naive_nthr(*args, 0.0))
        written = [found_BT[row][batch.action_ids_BT[row] > 0].tolist() for row in rows if trained_B[row]]
        assert list(itertools.chain(*written)) == pytest.approx(tables[0])
        assert (tables[1][-len(written[-1]) :] != tables[0][-len(written[-1]) :]) == changed
    assert (found_BT[6][batch.action_ids_BT[6] > 0] == 1).all()


# ---- dynamic sampling


def drawn(monkeypatch, groups, extra_draws, wanted=2, step=3, reward=None, lost=("", "")):
    """Names of the kept groups, the row, and what was asked; `groups` {question: rewards}, played in turn.

    lost: questions whose search failed in every draw, and those for which one found nothing.
    """
    questions = [Question(name, name, ("a",), "q") for name in groups]
    rollout = {"num_questions": wanted, "group_size": 2, "extra_draws": extra_draws}
    cfg = settings.from_dict({"rollout": rollout, "optim": OPTIM, "reward": reward or {}})
    asked = []

    def play_questions(run, some, step, before):
        asked.append([question.id for question in some])
        assert before == list(itertools.chain(*asked[:-1]))
        failed, empty = ([q.id for q in some if q.id in names] for names in lost)
        played = [q for q in some if q.id not in failed + empty]
        episodes = [
            Episode(q, n, [0], stop_reason=str(r)) for q in played for n, r in enumerate(groups[q.id])
        ]
        return episodes, failed, empty

    monkeypatch.setattr(playing, "play_questions", play_questions)
    punished = lambda cfg, n: overlong_punishment(100 * n, cfg)  # noqa: E731
    monkeypatch.setattr(
        playing,
        "score_episodes",
        lambda some, _, cfg: [float(e.stop_reason) + punished(cfg, n) for n, e in enumerate(some)],
    )
    run = SimpleNamespace(cfg=cfg, questions=questions, tokenizer=None)
    kept, row = playing.draw_groups(run, step)
    return [episode.question.id for episode in kept[::2]], row, asked


def test_a_further_draw_is_a_phase_of_its_own_and_tokens_of_dropped_groups_count(monkeypatch):
    def play_own_groups(run, questions, step, asked):
        samples = [(question, number) for question in questions for number in range(2)]
        episodes = [Episode(q, n, [0], action_ids=[0] + [1] * i) for i, (q, n) in enumerate(samples)]
        if asked:
            episodes[-1].stop_reason, episodes[-1].failure = "failed_search", "lost"
        return episodes, None

    monkeypatch.setattr(playing, "play_own_groups", play_own_groups)
    rollout = {"num_questions": 2, "group_size": 2, "max_failed_groups": 0.5}
    cfg = settings.from_dict({"rollout": rollout, "optim": OPTIM})
    phases = []
    guard = SimpleNamespace(phase=lambda *names: phases.append(names))
    single = SimpleNamespace(process_index=0, num_processes=1)
    run = SimpleNamespace(cfg=cfg, clock=Clock(), guard=guard, accelerator=single)
    questions = [Question(name, name, ("a",), "q") for name in "ab"]
    assert len(playing.play_questions(run, questions, 3, [])[0]) == 4 and not phases
    kept, failures, _ = playing.play_questions(run, questions, 3, ["a", "b"])
    assert phases == [("rollout", 3)] and len(kept) == 2 and failures == ["lost"]
    run.clock.lap("rollout")
    run.clock.laps |= {"rollout": 4.0, "update": 1.0}
    assert run.clock.row(2, 0)["speed/sampled_tokens_per_s"] == 2 * (0 + 1 + 2 + 3) / 2 / 4


OPTIM = {"updates_per_rollout": 2}


def test_draws_stop_when_enough_groups_differ_and_fill_up_when_they_never_do(monkeypatch):
    mixed, equal = [1.0, 0.0], [0.0, 0.0]
    kept, row, asked = drawn(monkeypatch, dict.fromkeys("abcdefgh", mixed), 3)
    assert kept == asked[0] and row == {"failed_groups": 0.0, "empty_groups": 0.0, "drawn_groups": 1.0}
    kept, row, asked = drawn(monkeypatch, dict.fromkeys("abcdefgh", equal), 3)
    assert kept == asked[0] and len(asked) == 4 and row["drawn_groups"] == 4.0
    groups = {name: mixed if name in "ac" else equal for name in "abcdefgh"}
    for step in range(8):
        kept, row, asked = drawn(monkeypatch, groups, 3, step=step)
        flat = list(itertools.chain(*asked))
        places = [place for place, name in enumerate(flat) if name in "ac"][:2]
        others = [place for place, name in enumerate(flat) if name not in "ac"]
        assert kept == [flat[place] for place in sorted((places + others)[:2])]
        assert row["drawn_groups"] == len(asked) and (len(places) == 2 or len(asked) == 4)


def test_groups_lost_to_a_search_are_counted_over_all_draws_of_the_step(monkeypatch):
    """A draw that alone lost more than half of its groups does not end a step that has enough."""
    groups = {name: [0.0, 0.0] for name in "abcdefgh"}
    _, _, asked = drawn(monkeypatch, groups, 3)
    flat, (first, second) = list(itertools.chain(*asked)), asked[-1]
    lost = (first, second) if first != second else (first, "")
    kept, row, again = drawn(monkeypatch, groups, 3, lost=lost)
    assert again == asked and kept == [name for name in flat if name not in lost][:2]
    assert row["failed_groups"] == flat.count(lost[0]) / 8 and row["empty_groups"] == flat.count(lost[1]) / 8
    assert drawn(monkeypatch, groups, 3, lost=("", set(asked[-1])))[1]["empty_groups"] <= 0.5
    with pytest.raises(Unplayed, match="^8 of 8 groups were dropped for a search without a passage"):
        drawn(monkeypatch, groups, 3, lost=("", "abcdefgh"))
    with pytest.raises(Unplayed, match="2 of 2 groups"):
        drawn(monkeypatch, groups, 0, lost=("", "abcdefgh"))


def test_groups_that_differ_by_their_overlong_punishment_alone_are_not_mixed(monkeypatch):
    reward = {"overlong_max": 100, "overlong_cache": 50}
    _, row, _ = drawn(monkeypatch, {name: [0.0, 0.0] for name in "abcd"}, 3, reward=reward)
    assert row["drawn_groups"] == 4.0


def test_draws_are_a_function_of_seed_step_and_number_and_the_first_is_the_plain_runs(monkeypatch):
    equal = {name: [0.0, 0.0] for name in "abcdefgh"}
    _, _, first = drawn(monkeypatch, equal, 3)
    _, _, again = drawn(monkeypatch, equal, 3)
    _, row, plain = drawn(monkeypatch, equal, 0)
    assert first == again and plain == first[:1] and row == {"failed_groups": 0.0, "empty_groups": 0.0}
    _, _, later = drawn(monkeypatch, equal, 3, step=4)
    assert later[0] != first[0] and len({tuple(some) for some in first}) > 1


# ---- presets

PRESETS = sorted((ROOT / "configs" / "presets").glob("*.yaml"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_states_departures_and_loads_alone_and_with_llds(path):
    tree = yaml.safe_load(path.read_text())
    cfg = settings.from_dict({"loss": {"preset": path.stem}})
    built, wanted, defaults = map(settings.to_dict, (cfg, settings.from_dict(tree), settings.Config()))
    for section, options in tree.items():
        for name in options:
            assert built[section][name] == wanted[section][name]
            assert built[section][name] != defaults[section][name] or (section, name) in SAID_FOR_CLARITY
    assert cfg.loss.lld_weight == 0.0
    with_llds = settings.from_dict({"loss": {"preset": path.stem, "lld_weight": 0.2}})
    assert with_llds.loss.lld_weight == 0.2 and with_llds.loss.kind == cfg.loss.kind
    check_names(with_llds)


SAID_FOR_CLARITY = {
    *(
        ("loss", name)
        for name in ("clip_low", "clip_dual", "correction_cap", "constant_tokens", "aggregation")
    ),
    ("advantage", "stratum_weight"),
}


def test_a_preset_lies_below_the_file_and_above_it_on_the_command_line(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("loss: {aggregation: sequence_mean, preset: dapo}\n")
    cfg = settings.load(str(path))
    assert (cfg.loss.aggregation, cfg.loss.clip_high) == ("sequence_mean", 0.28)
    path.write_text("loss: {aggregation: sequence_mean, clip_low: 0.1}\n")
    cfg = settings.load(str(path), ["loss.clip_high=0.3", "loss.preset=dapo", "loss.kl_weight=0.01"])
    assert (cfg.loss.aggregation, cfg.loss.clip_high) == ("token_mean", 0.28)
    assert (cfg.loss.clip_low, cfg.loss.kl_weight) == (0.2, 0.01)
    settings.save(cfg, path)
    assert settings.load(str(path)) == cfg


def test_options_on_the_command_line_replace_a_files_preset_and_another_preset_ends_it(tmp_path):
    path, default = tmp_path / "config.yaml", settings.Config()
    path.write_text("loss: {preset: dapo, kl_weight: 0.01}\n")

    def load(*overrides):
        cfg = settings.load(str(path), list(overrides))
        return cfg.loss, cfg.rollout.extra_draws

    for options in (load("loss.clip_high=0.2"), load("loss.preset=dapo", "loss.clip_high=0.2")):
        assert (options[0].clip_high, options[0].aggregation) == (default.loss.clip_high, "token_mean")
    loss, draws = load("loss.drop=[]", "rollout.extra_draws=0")
    assert (loss.drop, loss.clip_high, draws) == ((), 0.28, 0)
    assert load("loss.preset=dapo")[0].kl_weight == 0.0  # from above; the file's own was 0.01
    loss, draws = load("loss.preset=sapo")
    assert (loss.kind, loss.drop, loss.aggregation, draws) == ("sapo", (), "sequence_mean", 0)
    assert (loss.clip_high, loss.kl_weight) == (default.loss.clip_high, 0.01)
    assert load("loss.preset=none")[0] == dataclasses.replace(default.loss, kl_weight=0.01)
    with pytest.raises(ValueError, match="loss.clip_high = 0.28 does nothing with loss.kind = 'sapo'"):
        load("loss.kind=sapo")


def test_one_entry_of_a_dict_option_leaves_those_of_the_files_preset(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("loss: {preset: nthr}\n")
    cfg = settings.load(str(path), ["loss.weights.positives=0.1"])
    assert cfg.loss.weights == {"nthr": 1.0, "positives": 0.1}
    cfg = settings.load(str(path), ["loss.weights.positives=0.1", "loss.weights.nthr=2"])
    assert cfg.loss.weights == {"nthr": 2.0, "positives": 0.1}


def test_the_80_20_rule_is_dapo_on_the_tokens_of_highest_entropy():
    """As in its authors' scripts, dynamic sampling included."""
    dapo, ruled = (
        settings.to_dict(settings.from_dict({"loss": {"preset": name}})) for name in ("dapo", "high_entropy")
    )
    dapo["loss"] |= {"preset": "high_entropy", "weights": {"high_entropy": 0.2}}
    assert ruled == dapo and ruled["rollout"]["extra_draws"] == 3


@pytest.mark.parametrize("name", ["gspo", "gmpo", "sapo"])
def test_methods_of_a_mean_over_responses_have_it_in_a_config_of_the_token_mean(name):
    tree = {"loss": {"aggregation": "token_mean"}}
    assert settings.with_overrides(tree, [f"loss.preset={name}"]).loss.aggregation == "sequence_mean"


@pytest.mark.parametrize("name", ["dapoo", "../tiny", 3, ["dapo"]])
def test_an_unknown_preset_is_refused(name):
    with pytest.raises(ValueError, match=r"loss.preset = .*: must be one of 'none', 'cispo'"):
        settings.from_dict({"loss": {"preset": name}})
