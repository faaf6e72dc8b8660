"""The loss against naive loops, numbers by hand, and the official code's definitions, in values and in
gradients."""

import math

import pytest
import torch

from lld import loss
from lld.config import Loss
from lld.loss import answer_beta, answer_weights, kl_terms, lld_gate, lld_terms

GATES = ("token", "response", "action")
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
LAMBDA = 0.2


def surrogate_terms(logprobs_BT, old_BT, advantages_B, mask_BT, **options):
    tokens = loss.Tokens.of(logprobs_BT, old_BT, advantages_B, mask_BT)
    return loss.surrogate_terms(tokens, Loss(**options))


def ragged(seed, dtype=torch.float64):
    """logprobs, old, ref, advantages, action ids and answer mask of 8 rows: ragged, with zero advantages,
    ties, and a row without actions.

    Actions are kept apart by at least one token of observation, as the official code needs in order to tell
    them apart.
    """
    generator = torch.Generator().manual_seed(seed)

    def rand(*size):
        return torch.rand(*size, generator=generator, dtype=torch.float64)

    def randint(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    num_rows, num_tokens = 8, 17
    ids_BT = torch.zeros(num_rows, num_tokens, dtype=torch.long)
    answer_mask_BT = torch.zeros(num_rows, num_tokens, dtype=torch.bool)
    for row in range(1, num_rows):  # row 0: no action at all
        at, action = 0, 1
        end = randint(6, num_tokens + 1)
        while at < end:
            stop = min(at + randint(1, 5), end)
            ids_BT[row, at:stop] = action
            last, at, action = (at, stop), stop + randint(1, 4), action + 1
        answer_mask_BT[row, (last[0] + last[1]) // 2 : last[1]] = True  # the latter half of the last action
    logprobs_BT = -3 * rand(num_rows, num_tokens)
    old_BT = logprobs_BT + (rand(num_rows, num_tokens) - 0.5) * 1.2
    ref_BT = logprobs_BT + (rand(num_rows, num_tokens) - 0.5) * 8
    # Rows that fell, rows that rose
    old_BT += torch.tensor([0.0, 0.0, 0.3, 0.3, 0.3, 0.3, -0.3, -0.3], dtype=torch.float64)[:, None]
    old_BT[:, ::5] = logprobs_BT[:, ::5]  # ties
    old_BT[1] = logprobs_BT[1]  # a row of ties
    advantages_B = torch.tensor([1.0, 0.7, 0.0, -0.4, 1.3, -1.1, 0.0, 0.2], dtype=torch.float64)
    return *(x.to(dtype) for x in (logprobs_BT, old_BT, ref_BT, advantages_B)), ids_BT, answer_mask_BT


def value_and_gradient(function, logprobs_BT, weights_BT=None):
    """Terms (or a scalar) and the gradient of their weighted sum; the weights tell apart gradients that land
    on a wrong token."""
    leaf_BT = logprobs_BT.clone().requires_grad_()
    terms = function(leaf_BT)
    (terms.sum() if weights_BT is None else (terms * weights_BT).sum()).backward()
    return terms.detach(), leaf_BT.grad


def assert_same(function, naive, logprobs_BT, atol):
    weights_BT = (
        torch.rand(logprobs_BT.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(
            logprobs_BT.dtype
        )
        + 0.5
    )
    value_BT, gradient_BT = value_and_gradient(function, logprobs_BT, weights_BT)
    naive_value_BT, naive_gradient_BT = value_and_gradient(naive, logprobs_BT, weights_BT)
    assert value_BT.dtype == logprobs_BT.dtype
    torch.testing.assert_close(value_BT, naive_value_BT, rtol=0, atol=atol)
    torch.testing.assert_close(gradient_BT, naive_gradient_BT, rtol=0, atol=atol)
    assert naive_gradient_BT.abs().sum() > 0


def stack(rows):
    return torch.stack([torch.stack(row) for row in rows])


def cells(tensor_BT):
    return [(b, t) for b in range(tensor_BT.shape[0]) for t in range(tensor_BT.shape[1])]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("gate", GATES)
def test_the_ragged_batches_open_and_close_every_gate_in_preserved_rows(gate, seed):
    """Without this the comparisons below could be of zeros with zeros."""
    logprobs_BT, old_BT, _, advantages_B, ids_BT, _ = ragged(seed)
    gates_BT = naive_gates(old_BT - logprobs_BT, ids_BT, gate)
    for preserved_B in (advantages_B >= 0, advantages_B > 0):
        gates = gates_BT[preserved_B][ids_BT[preserved_B] > 0]
        assert gates.any() and not gates.all()


# ---- naive loops


def naive_gates(fall_BT, ids_BT, gate):
    gates_BT = torch.zeros(ids_BT.shape, dtype=torch.bool)
    for b, t in cells(ids_BT):
        alike = {
            "token": lambda u: u == t,
            "response": lambda u: ids_BT[b, u] > 0,
            "action": lambda u: ids_BT[b, u] == ids_BT[b, t],
        }[gate]
        gates_BT[b, t] = (
            ids_BT[b, t] > 0 and sum(fall_BT[b, u].item() for u in range(ids_BT.shape[1]) if alike(u)) > 0
        )
    return gates_BT


def naive_surrogate(logprobs_BT, old_BT, advantages_B, mask_BT, kind, clip_low, clip_high):
    rows = []
    for b in range(logprobs_BT.shape[0]):
        written = [t for t in range(logprobs_BT.shape[1]) if mask_BT[b, t]]
        mean = sum((logprobs_BT[b, t] - old_BT[b, t]).item() for t in written) / max(len(written), 1)
        row = [logprobs_BT.new_zeros(()) for _ in range(logprobs_BT.shape[1])]
        for t in written:
            if kind == "grpo":
                ratio = torch.exp(logprobs_BT[b, t] - old_BT[b, t])
            else:
                ratio = torch.exp(logprobs_BT[b, t] - logprobs_BT[b, t].item() + mean)
            clipped = (
                ratio
                if 1 - clip_low <= ratio <= 1 + clip_high
                else min(max(ratio.item(), 1 - clip_low), 1 + clip_high)
            )
            free, bounded = ratio * advantages_B[b], clipped * advantages_B[b]
            row[t] = -(free if free <= bounded else bounded)
        rows.append(row)
    return stack(rows)


def naive_lld(logprobs_BT, old_BT, advantages_B, ids_BT, gate, preserve, tolerance=0.0):
    gates_BT = naive_gates(old_BT - logprobs_BT.detach() - tolerance, ids_BT, gate)
    rows = [[logprobs_BT.new_zeros(()) for _ in row] for row in logprobs_BT]
    for b, t in cells(ids_BT):
        preserved = advantages_B[b] >= 0 if preserve == "nonnegative" else advantages_B[b] > 0
        fall = old_BT[b, t].item() - logprobs_BT[b, t]
        if gates_BT[b, t] and preserved and fall.item() > tolerance:
            rows[b][t] = fall - tolerance
    return stack(rows)


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_surrogate_agrees_with_a_loop(kind, dtype, atol):
    for seed in range(3):
        logprobs_BT, old_BT, _, advantages_B, ids_BT, _ = ragged(seed, dtype)
        assert_same(
            lambda x: surrogate_terms(x, old_BT, advantages_B, ids_BT > 0, kind=kind, **CLIP),
            lambda x: naive_surrogate(x, old_BT, advantages_B, ids_BT > 0, kind, **CLIP),
            logprobs_BT,
            atol,
        )


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    "preserve, tolerance", [("nonnegative", 0.0), ("positive", 0.0), ("nonnegative", 0.1)]
)
@pytest.mark.parametrize("gate", GATES)
def test_lld_agrees_with_a_loop(gate, preserve, tolerance, dtype, atol):
    for seed in range(3):
        logprobs_BT, old_BT, _, advantages_B, ids_BT, _ = ragged(seed, dtype)
        assert_same(
            lambda x: lld_terms(
                x, old_BT, advantages_B, ids_BT, gate=gate, preserve=preserve, tolerance=tolerance
            ),
            lambda x: naive_lld(x, old_BT, advantages_B, ids_BT, gate, preserve, tolerance),
            logprobs_BT,
            atol,
        )


@pytest.mark.parametrize("gate", GATES)
def test_gates_agree_with_a_loop(gate):
    for seed in range(6):
        logprobs_BT, old_BT, _, _, ids_BT, _ = ragged(seed)
        assert torch.equal(
            lld_gate(old_BT - logprobs_BT, ids_BT, gate), naive_gates(old_BT - logprobs_BT, ids_BT, gate)
        )


@pytest.mark.parametrize("gate", ["action", "response"])
def test_a_gate_does_not_depend_on_the_order_of_its_sum(gate):
    """.5 + 1e-9 - .5 is 0 in float32 if taken from the left and 1e-9 if the last two come first; a GPU takes
    them as they come."""
    for order in ([0.5, 1e-9, -0.5], [0.5, -0.5, 1e-9]):
        assert lld_gate(torch.tensor([order]), torch.ones(1, 3, dtype=torch.long), gate).all()


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_kl_agrees_with_a_loop(dtype, atol):
    logprobs_BT, _, ref_BT, _, _, _ = ragged(0, dtype)

    def naive(x):
        def k3(b, t):
            ratio = torch.exp(ref_BT[b, t] - x[b, t])
            value = ratio - (ref_BT[b, t] - x[b, t]) - 1
            return value if value <= 10 else x.new_tensor(10.0)

        return stack([[k3(b, t) for t in range(x.shape[1])] for b in range(x.shape[0])])

    assert (naive(logprobs_BT) == 10).any() and (naive(logprobs_BT) < 1).any()
    assert_same(lambda x: kl_terms(x, ref_BT), naive, logprobs_BT, atol)


def test_answer_weights_agree_with_a_loop():
    *_, answer_mask_BT = ragged(0)
    weights_BT = answer_weights(answer_mask_BT, 0.25)
    assert all(weights_BT[b, t] == (0.25 if answer_mask_BT[b, t] else 1.0) for b, t in cells(weights_BT))
    assert (weights_BT == 0.25).any() and torch.equal(answer_weights(answer_mask_BT.int(), 0.25), weights_BT)


# ---- numbers by hand

# 2 x 4, delta = old - new. Row 0: actions 1 1 2 2 with delta .3 -.5 | -.1 .4; row 1: 1 1 (observation) 2 with
# delta .2 .1 (9) -.6.
# Sums: row 0 action 1: -.2, action 2: +.3, response: +.1. Row 1 action 1: +.3, action 2: -.6, response: -.3
# (the 9 does not count).
IDS_BT = torch.tensor([[1, 1, 2, 2], [1, 1, 0, 2]])
DELTA_BT = torch.tensor([[0.3, -0.5, -0.1, 0.4], [0.2, 0.1, 9.0, -0.6]], dtype=torch.float64)
OLD_BT = torch.full((2, 4), -1.0, dtype=torch.float64)
NEW_BT = OLD_BT - DELTA_BT
BY_HAND = {
    "token": [[0.3, 0.0, 0.0, 0.4], [0.2, 0.1, 0.0, 0.0]],
    "response": [[0.3, 0.0, 0.0, 0.4], [0.0, 0.0, 0.0, 0.0]],
    "action": [[0.0, 0.0, 0.0, 0.4], [0.2, 0.1, 0.0, 0.0]],
}
GATE_BY_HAND = {
    "token": [[1, 0, 0, 1], [1, 1, 0, 0]],
    "response": [[1, 1, 1, 1], [0, 0, 0, 0]],
    "action": [[0, 0, 1, 1], [1, 1, 0, 0]],
}


@pytest.mark.parametrize("gate", GATES)
def test_lld_by_hand(gate):
    value_BT, gradient_BT = value_and_gradient(
        lambda x: lld_terms(x, OLD_BT, torch.tensor([0.5, 0.0]), IDS_BT, gate=gate), NEW_BT
    )
    expected_BT = torch.tensor(BY_HAND[gate], dtype=torch.float64)
    torch.testing.assert_close(value_BT, expected_BT, rtol=0, atol=1e-12)
    # d(old - new)/d new = -1 where the term is on
    assert torch.equal(gradient_BT, -(expected_BT > 0).double())
    assert lld_gate(DELTA_BT, IDS_BT, gate).int().tolist() == GATE_BY_HAND[gate]


# The same places with falls .5 -.25 | -.125 .875 and .25 .75 (9) -1. With a tolerance of .25 nats a token the
# margins are
# .25 -.5 | -.375 .625 and 0 .5 (8.75) -1.25; sums: row 0 action 1: -.25, action 2: +.25, response: 0, which
# is not more than 0.
# With .125: .375 -.375 | -.25 .75 and .125 .625 (8.875) -1.125; sums: row 0 action 1: 0, action 2: +.5,
# response: +.5; row 1 -.375.
FALLS_BT = torch.tensor([[0.5, -0.25, -0.125, 0.875], [0.25, 0.75, 9.0, -1.0]], dtype=torch.float64)
TOLERANT = {
    ("token", 0.25): [[0.25, 0.0, 0.0, 0.625], [0.0, 0.5, 0.0, 0.0]],
    ("action", 0.25): [[0.0, 0.0, 0.0, 0.625], [0.0, 0.5, 0.0, 0.0]],
    ("response", 0.25): [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]],
    ("token", 0.125): [[0.375, 0.0, 0.0, 0.75], [0.125, 0.625, 0.0, 0.0]],
    ("action", 0.125): [[0.0, 0.0, 0.0, 0.75], [0.125, 0.625, 0.0, 0.0]],
    ("response", 0.125): [[0.375, 0.0, 0.0, 0.75], [0.0, 0.0, 0.0, 0.0]],
}


@pytest.mark.parametrize("gate, tolerance", TOLERANT)
def test_lld_with_a_tolerance_by_hand(gate, tolerance):
    def terms(x):
        return lld_terms(x, OLD_BT, torch.tensor([0.5, 0.0]), IDS_BT, gate=gate, tolerance=tolerance)

    value_BT, gradient_BT = value_and_gradient(terms, OLD_BT - FALLS_BT)
    expected_BT = torch.tensor(TOLERANT[gate, tolerance], dtype=torch.float64)
    assert torch.equal(value_BT, expected_BT)
    assert torch.equal(gradient_BT, -(expected_BT > 0).double())


def test_surrogate_by_hand():
    # ratios 1.5, .5, 1.1, 1 in both rows; clip to [.8, 1.28]
    # A = +2: -min(3, 2.56) = -2.56 flat; -min(1, 1.6) = -1, slope -r A = -1; -2.2, slope -2.2; the last is
    # masked
    # A = -1: -min(-1.5, -1.28) = 1.5, slope 1.5; -min(-.5, -.8) = .8 flat; 1.1, slope 1.1; masked
    old_BT = torch.zeros(2, 4, dtype=torch.float64)
    logprobs_BT = torch.tensor([[1.5, 0.5, 1.1, 1.0]] * 2, dtype=torch.float64).log()
    mask_BT = torch.tensor([[1, 1, 1, 0]] * 2)
    advantages_B = torch.tensor([2.0, -1.0], dtype=torch.float64)
    value_BT, gradient_BT = value_and_gradient(
        lambda x: surrogate_terms(x, old_BT, advantages_B, mask_BT, **CLIP), logprobs_BT
    )

    def close(x, y):
        return torch.testing.assert_close(x, torch.tensor(y, dtype=torch.float64), rtol=0, atol=1e-12)

    close(value_BT, [[-2.56, -1.0, -2.2, 0.0], [1.5, 0.8, 1.1, 0.0]])
    close(gradient_BT, [[0.0, -1.0, -2.2, 0.0], [1.5, 0.0, 1.1, 0.0]])


def test_gspo_by_hand():
    # log-ratios .3, -.1, .1 of three tokens: mean .1, so s = e^.1 = 1.10517 for every token, slope -s A; the
    # masked 5 does not count
    logprobs_BT = torch.tensor([[0.3, -0.1, 5.0, 0.1]], dtype=torch.float64)
    advantages_B, mask_BT = (
        torch.tensor([2.0], dtype=torch.float64),
        torch.tensor([[True, True, False, True]]),
    )

    def terms(x):
        return surrogate_terms(x, torch.zeros_like(logprobs_BT), advantages_B, mask_BT, kind="gspo", **CLIP)

    value_BT, gradient_BT = value_and_gradient(terms, logprobs_BT)
    expected_BT = torch.tensor([[-2.0, -2.0, 0.0, -2.0]], dtype=torch.float64) * math.exp(0.1)
    torch.testing.assert_close(value_BT, expected_BT, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient_BT, expected_BT, rtol=0, atol=1e-12)


def test_gspo_gradient_of_the_row_mean_is_that_of_the_sequence_ratio():
    """mean_k s_k has the gradient of s = exp(mean_k log-ratio), GSPO's own definition (its Eq. 7)."""
    logprobs_BT, old_BT = (
        torch.tensor([[-0.3, -0.1, -0.2]], dtype=torch.float64),
        torch.tensor([[-0.2, -0.2, -0.15]], dtype=torch.float64),
    )
    advantages_B, mask_BT = torch.tensor([1.7], dtype=torch.float64), torch.ones(1, 3)
    _, gradient_BT = value_and_gradient(
        lambda x: surrogate_terms(x, old_BT, advantages_B, mask_BT, kind="gspo", **CLIP).mean(), logprobs_BT
    )
    _, expected_BT = value_and_gradient(lambda x: -(x - old_BT).mean().exp() * 1.7, logprobs_BT)
    torch.testing.assert_close(gradient_BT, expected_BT, rtol=0, atol=1e-12)


def test_kl_by_hand():
    # d = ln 2: 2 - ln 2 - 1 = .306853, slope d k3/d new = 1 - e^d = -1; d = 0: 0; d = 3: 16.09 and d = -12:
    # 11.00001, both cut at 10 and flat
    logprobs_BT = torch.zeros(1, 4, dtype=torch.float64)
    value_BT, gradient_BT = value_and_gradient(
        lambda x: kl_terms(x, torch.tensor([[math.log(2), 0.0, 3.0, -12.0]], dtype=torch.float64)),
        logprobs_BT,
    )
    torch.testing.assert_close(
        value_BT, torch.tensor([[1 - math.log(2), 0.0, 10.0, 10.0]], dtype=torch.float64), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(
        gradient_BT, torch.tensor([[-1.0, 0.0, 0.0, 0.0]], dtype=torch.float64), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(
    "schedule, searches, weight, beta",
    [
        ("constant", 5.0, 0.3, 0.3),
        ("paper", 0.0, 1.0, 0.0),
        ("paper", 1.0, 1.0, 0.5),  # where paper and code differ most (paper.md 2.5)
        ("paper", 2.0, 1.0, 1.0),
        ("paper", 3.5, 1.0, 1.0),
        ("code", 0.4, 1.0, 0.0),
        ("code", 1.0, 1.0, 0.0),
        ("code", 1.5, 1.0, 0.5),
        ("code", 1.5, 0.5, 0.25),
        ("code", 9.0, 0.5, 1.0),
    ],
)
def test_answer_beta(schedule, searches, weight, beta):
    assert answer_beta(searches, Loss(lld_answer_schedule=schedule, lld_answer_weight=weight)) == beta


# ---- the official code's definitions (paper.md 2.1), written out from its formulas


def official_lld(
    logprobs_BT, old_BT, advantages_B, mask_BT, code_answer_mask_BT, chunks, weight_lambda, mask_weight
):
    """sum(v c m) / sum(m); chunks are the contiguous runs of ones of M = m·1[A >= 0]; c = lambda where the
    answer mask is 1."""
    total = logprobs_BT.new_zeros(())
    for b in range(mask_BT.shape[0]):
        positive = 1 if advantages_B[b] >= 0 else 0
        kept = [int(mask_BT[b, t]) * positive for t in range(mask_BT.shape[1])] + [0]
        if chunks:
            runs, start = [], None
            for t, one in enumerate(kept):
                if one and start is None:
                    start = t
                elif not one and start is not None:
                    runs.append(range(start, t))
                    start = None
        else:
            runs = [[t for t, one in enumerate(kept) if one]]
        for run in runs:
            falls = [old_BT[b, t].item() - logprobs_BT[b, t] for t in run]
            if sum(fall.item() for fall in falls) > 0:
                for t, fall in zip(run, falls, strict=True):
                    coefficient = (
                        weight_lambda if code_answer_mask_BT[b, t] else min(mask_weight, weight_lambda)
                    )
                    if fall.item() > 0:
                        total = total + coefficient * fall
    return total / int(mask_BT.sum())


def official_policy(logprobs_BT, old_BT, advantages_B, mask_BT, gspo):
    """Token mean of max(-A r, -A clip(r, .8, 1.2)), or for GSPO the mean over rows of each row's token
    mean."""
    rows, num_tokens = [], int(mask_BT.sum())
    for b in range(mask_BT.shape[0]):
        written = [t for t in range(mask_BT.shape[1]) if mask_BT[b, t]]
        length = max(len(written), 1)
        mean = sum((logprobs_BT[b, t] - old_BT[b, t]).item() for t in written) / length
        losses = [logprobs_BT.new_zeros(())]
        for t in written:
            exponent = (
                logprobs_BT[b, t] - logprobs_BT[b, t].detach() + mean
                if gspo
                else logprobs_BT[b, t] - old_BT[b, t]
            )
            ratio = torch.exp(exponent)
            first, second = -advantages_B[b] * ratio, -advantages_B[b] * ratio.clamp(0.8, 1.2)
            losses.append(first if first >= second else second)
        rows.append(sum(losses) / (length if gspo else num_tokens))
    return sum(rows) / (len(rows) if gspo else 1)


def official_kl(logprobs_BT, ref_BT, mask_BT):
    ratio_BT = ref_BT - logprobs_BT
    written = [torch.exp(ratio_BT[b, t]) - ratio_BT[b, t] - 1 for b, t in cells(mask_BT) if mask_BT[b, t]]
    return sum(value.clamp(-10, 10) for value in written) / len(written)


def assert_scalar_same(ours, theirs, logprobs_BT):
    value, gradient_BT = value_and_gradient(ours, logprobs_BT)
    their_value, their_gradient_BT = value_and_gradient(theirs, logprobs_BT)
    torch.testing.assert_close(value, their_value, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient_BT, their_gradient_BT, rtol=0, atol=1e-6)
    assert their_gradient_BT.abs().sum() > 1e-3  # the comparison is not of nothing with nothing


@pytest.mark.parametrize("mask_weight", [None, 0.05, 0.2, 0.7])
@pytest.mark.parametrize("gate, chunks", [("action", True), ("response", False)])
def test_lld_is_the_official_codes(gate, chunks, mask_weight):
    """With beta = min(mask_weight, lambda) / lambda and the mean over all loss tokens; None: mask_answer
    off."""
    for seed in range(3):
        logprobs_BT, old_BT, _, advantages_B, ids_BT, answer_mask_BT = ragged(seed)
        if mask_weight is None:
            code_mask_BT, beta = torch.ones_like(ids_BT), 1.0
        else:
            code_mask_BT, beta = 1 - answer_mask_BT.long(), min(mask_weight, LAMBDA) / LAMBDA
        weights_BT = answer_weights(answer_mask_BT, beta).double()
        assert_scalar_same(
            lambda x: (
                LAMBDA
                * (lld_terms(x, old_BT, advantages_B, ids_BT, gate=gate) * weights_BT).sum()
                / (ids_BT > 0).sum()
            ),
            lambda x: official_lld(
                x, old_BT, advantages_B, ids_BT > 0, code_mask_BT, chunks, LAMBDA, mask_weight or 0.0
            ),
            logprobs_BT,
        )


def test_code_schedule_of_beta_is_the_official_coefficient():
    for searches in (0.0, 0.8, 1.0, 1.3, 2.0, 3.0):
        for lambda_answer in (0.05, 0.2, 0.4):
            beta = answer_beta(
                searches, Loss(lld_answer_schedule="code", lld_answer_weight=lambda_answer / LAMBDA)
            )
            assert beta * LAMBDA == pytest.approx(min(lambda_answer * max(searches - 1, 0), LAMBDA))


@pytest.mark.parametrize("gate", GATES)
def test_lld_over_the_papers_normaliser(gate):
    """Eq. 4, 9 and 10: the mean over the tokens of the preserving set only, the inner sums by action."""
    logprobs_BT, old_BT, _, advantages_B, ids_BT, _ = ragged(3)

    def eq(x):
        total, num_preserved = 0.0, 0
        for b in range(x.shape[0]):
            if advantages_B[b] < 0:
                continue
            actions = [
                [t for t in range(x.shape[1]) if ids_BT[b, t] == k]
                for k in range(1, int(ids_BT[b].max()) + 1)
            ]
            num_preserved += sum(map(len, actions))

            def fall(tokens):
                return sum(old_BT[b, t] - x[b, t] for t in tokens)

            def penalty(tokens):
                return sum((old_BT[b, t] - x[b, t]) * bool(old_BT[b, t] > x[b, t]) for t in tokens)

            inner = sum(penalty(action) for action in actions if gate != "action" or fall(action) > 0)
            if gate != "response" or fall([t for action in actions for t in action]) > 0:
                total = total + inner
        return total / num_preserved

    num_preserved = ((ids_BT > 0) & (advantages_B >= 0)[:, None]).sum()
    assert_scalar_same(
        lambda x: lld_terms(x, old_BT, advantages_B, ids_BT, gate=gate).sum() / num_preserved, eq, logprobs_BT
    )


def test_policy_terms_are_the_official_codes_token_mean_and_gspo_row_mean():
    for seed in range(3):
        logprobs_BT, old_BT, _, advantages_B, ids_BT, _ = ragged(seed)
        mask_BT = ids_BT > 0

        def terms(x, kind):
            return surrogate_terms(x, old_BT, advantages_B, mask_BT, kind=kind, clip_low=0.2, clip_high=0.2)

        assert_scalar_same(
            lambda x: terms(x, "grpo").sum() / mask_BT.sum(),
            lambda x: official_policy(x, old_BT, advantages_B, mask_BT, False),
            logprobs_BT,
        )

        def row_mean(x):
            return (terms(x, "gspo").sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)).mean()

        assert_scalar_same(
            row_mean, lambda x: official_policy(x, old_BT, advantages_B, mask_BT, True), logprobs_BT
        )


def test_policy_terms_are_the_papers_sequence_mean():
    """Eq. 1 as it stands, to be maximised: mean over rows of (1/|y|) sum min(gamma A, clip(gamma, 1 - eps, 1
    + eps) A)."""
    logprobs_BT, old_BT, _, advantages_B, ids_BT, _ = ragged(4)
    # Eq. 1 has no empty rows
    logprobs_BT, old_BT, advantages_B, ids_BT = (x[1:] for x in (logprobs_BT, old_BT, advantages_B, ids_BT))

    def eq1(x):
        rows = []
        for b in range(x.shape[0]):
            gammas = [(x[b, t] - old_BT[b, t]).exp() for t in range(x.shape[1]) if ids_BT[b, t]]
            terms = [
                torch.stack([g * advantages_B[b], g.clamp(0.8, 1.2) * advantages_B[b]]).min() for g in gammas
            ]
            rows.append(sum(terms) / len(terms))
        return sum(rows) / len(rows)

    mask_BT = ids_BT > 0

    def terms(x):
        return surrogate_terms(x, old_BT, advantages_B, mask_BT, clip_low=0.2, clip_high=0.2)

    assert_scalar_same(
        lambda x: (terms(x).sum(dim=1) / mask_BT.sum(dim=1)).mean(), lambda x: -eq1(x), logprobs_BT
    )


def test_kl_is_the_official_codes():
    logprobs_BT, _, ref_BT, _, ids_BT, _ = ragged(5)
    assert_scalar_same(
        lambda x: kl_terms(x, ref_BT)[ids_BT > 0].mean(),
        lambda x: official_kl(x, ref_BT, ids_BT > 0),
        logprobs_BT,
    )


# ---- misreadings (paper.md 2.7) and the edges of floating point


@pytest.mark.parametrize("gate", GATES)
def test_zero_advantage_rows_are_preserved_and_negative_ones_not(gate):
    """Misread as A != 0, all-wrong and all-right groups go unprotected and wrong answers are held up."""
    old_BT, new_BT, ids_BT = torch.zeros(3, 2), -torch.ones(3, 2), torch.ones(3, 2, dtype=torch.long)
    advantages_B = torch.tensor([0.0, -1.0, 1.0])
    assert lld_terms(new_BT, old_BT, advantages_B, ids_BT, gate=gate).tolist() == [[1, 1], [0, 0], [1, 1]]
    assert lld_terms(new_BT, old_BT, advantages_B, ids_BT, gate=gate, preserve="positive").tolist() == [
        [0, 0],
        [0, 0],
        [1, 1],
    ]


def test_action_gate_is_one_for_the_action():
    """Misread as a gate per token, a token that fell inside an action that rose is penalised."""
    terms = lld_terms(
        torch.tensor([[-1.0, 2.0]]), torch.zeros(1, 2), torch.ones(1), torch.tensor([[1, 1]]), gate="action"
    )
    assert terms.tolist() == [[0, 0]]


def test_actions_without_an_observation_between_them_keep_their_own_gates():
    """Where the official code's runs of ones merge two turns (an empty observation), the paper's actions do
    not."""
    terms = lld_terms(
        torch.tensor([[-1.0, 2.0]]), torch.zeros(1, 2), torch.ones(1), torch.tensor([[1, 2]]), gate="action"
    )
    assert terms.tolist() == [[1, 0]]


def test_response_gate_sums_signed_changes():
    """Summing max(0, delta), as the official code did before 6453f61, opens the gate with any falling
    token."""
    new_BT, old_BT, ids_BT = torch.tensor([[-1.0, 2.0]]), torch.zeros(1, 2), torch.tensor([[1, 2]])
    assert lld_terms(new_BT, old_BT, torch.ones(1), ids_BT, gate="response").tolist() == [[0, 0]]


@pytest.mark.parametrize("gate", GATES)
def test_penalty_pulls_fallen_tokens_up_and_nothing_flows_into_old_advantages_or_gate(gate):
    """A penalty turned into a number has no gradient; a gradient into old cancels the pull on a shared
    policy."""
    new_BT = NEW_BT.clone().requires_grad_()
    old_BT, advantages_B = OLD_BT.clone().requires_grad_(), torch.tensor([0.5, 0.0], requires_grad=True)
    lld_terms(new_BT, old_BT, advantages_B, IDS_BT, gate=gate).sum().backward()
    assert old_BT.grad is None and advantages_B.grad is None
    assert torch.equal(new_BT.grad, -torch.tensor(BY_HAND[gate]).gt(0).double())
    assert not lld_gate(DELTA_BT.clone().requires_grad_(), IDS_BT, gate).requires_grad


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_surrogate_and_kl_send_no_gradient_into_old_or_ref(kind):
    new_BT, old_BT, ref_BT = (x.clone().requires_grad_() for x in (NEW_BT, OLD_BT, OLD_BT))
    terms_BT = surrogate_terms(
        new_BT, old_BT, torch.ones(2, dtype=torch.float64), IDS_BT > 0, kind=kind, **CLIP
    ) + kl_terms(new_BT, ref_BT)
    terms_BT.sum().backward()
    assert old_BT.grad is None and ref_BT.grad is None and new_BT.grad.abs().sum() > 0


@pytest.mark.parametrize("gate", GATES)
def test_at_a_tie_the_gradient_is_exactly_zero_even_in_an_open_gate(gate):
    """Right after a rollout every token is a tie; torch.maximum would give 1/2 and clamp 1."""
    old_BT, ids_BT = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.long)
    new_BT = torch.tensor([[0.0, 0.0, 0.0], [0.0, -1.0, 0.0]])
    value_BT, gradient_BT = value_and_gradient(
        lambda x: lld_terms(x, old_BT, torch.ones(2), ids_BT, gate=gate), new_BT
    )
    assert value_BT.tolist() == [[0, 0, 0], [0, 1, 0]] and gradient_BT.tolist() == [[0, 0, 0], [0, -1, 0]]


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
@pytest.mark.parametrize("hole", [float("nan"), float("inf"), float("-inf"), 1e4])
def test_whatever_stands_outside_the_mask_reaches_neither_values_nor_gradients(kind, hole):
    for side in ("new", "old", "both"):
        new_BT, old_BT = NEW_BT.float().clone(), OLD_BT.float().clone()
        clean = [new_BT.clone(), old_BT.clone()]
        for tensor_BT in {"new": [new_BT], "old": [old_BT], "both": [new_BT, old_BT]}[side]:
            tensor_BT[1, 2] = hole  # the one token the model did not write
        advantages_B, mask_BT = torch.tensor([1.0, 0.5]), IDS_BT > 0

        def policy(old):
            return lambda x: surrogate_terms(x, old, advantages_B, mask_BT, kind=kind, **CLIP)

        def lld(old):
            return lambda x: sum(lld_terms(x, old, advantages_B, IDS_BT, gate=gate) for gate in GATES)

        for terms in (policy, lld):
            for got, expected in zip(
                value_and_gradient(terms(old_BT), new_BT),
                value_and_gradient(terms(clean[1]), clean[0]),
                strict=True,
            ):
                assert torch.equal(got, expected) and got.isfinite().all()


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
@pytest.mark.parametrize("jump", [-500.0, 500.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_an_enormous_log_ratio_stays_finite(kind, jump, advantage):
    """exp(500) is inf in float32, and inf times a zero advantage is NaN."""
    old_BT, mask_BT = torch.zeros(1, 2), torch.ones(1, 2)

    def terms(x):
        return surrogate_terms(x, old_BT, torch.tensor([advantage]), mask_BT, kind=kind, **CLIP)

    for tensor_BT in (
        *value_and_gradient(terms, old_BT + jump),
        *value_and_gradient(lambda x: kl_terms(x, old_BT), old_BT + jump),
    ):
        assert tensor_BT.isfinite().all()


def test_rows_without_any_token_of_the_model_are_zero():
    ids_BT, zeros_BT = torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.float64)
    for kind in ("grpo", "gspo"):
        for tensor_BT in value_and_gradient(
            lambda x: surrogate_terms(x, OLD_BT, torch.ones(2), ids_BT > 0, kind=kind, **CLIP), NEW_BT
        ):
            assert torch.equal(tensor_BT, zeros_BT)
    for gate in GATES:
        for tensor_BT in value_and_gradient(
            lambda x: lld_terms(x, OLD_BT, torch.ones(2), ids_BT, gate=gate), NEW_BT
        ):
            assert torch.equal(tensor_BT, zeros_BT)


def test_as_many_actions_as_tokens_and_narrow_integers_fit_the_gate():
    ids_BT = torch.arange(1, 6, dtype=torch.int32)[None]
    fall_BT = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0]])
    assert lld_gate(fall_BT, ids_BT, "action").tolist() == [[True, False, True, False, True]]


def test_unknown_words_are_refused():
    rows = (NEW_BT, OLD_BT, torch.ones(2))
    with pytest.raises(ValueError, match="loss.kind = 'ppo': must be one of 'grpo', 'gspo', "):
        surrogate_terms(*rows, IDS_BT > 0, kind="ppo", **CLIP)
    with pytest.raises(ValueError, match="LLDS gate 'turn': must be"):
        lld_terms(*rows, IDS_BT, gate="turn")
    with pytest.raises(ValueError, match="LLDS preserve 'all': must be"):
        lld_terms(*rows, IDS_BT, gate="token", preserve="all")
    with pytest.raises(ValueError, match="lld_answer_schedule = 'linear'"):
        answer_beta(1.0, Loss(lld_answer_schedule="linear"))
