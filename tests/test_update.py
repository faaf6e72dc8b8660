"""Gradients do not depend on memory knobs, agree with a naive loss, and a non-finite one is skipped and
named."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import make_lm, make_tokenizer
from gradients import OPTIONS, Recorder, make_episodes, two_steps

from lld import config, loss, settings
from lld.episode import ANSWER, collate
from lld.policy import Policy
from lld.record import monitor
from lld.update import learning_rate, micro_batches, plan_updates, score_batch, update_policy


def relative(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def with_loss(**changes):
    cut = {"top_p": 0.9} if "support" in changes else {}
    return OPTIONS | {"loss": OPTIONS["loss"] | changes, "rollout": OPTIONS["rollout"] | cut}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"aggregation": "token_mean", "lld_normalizer": "all", "lld_gate": "response"},
        {"kind": "gspo", "lld_gate": "token", "lld_preserve": "positive"},
        {"correction": "tis", "correction_cap": 1.0},
        {"support": "kept"},
        {"kind": "gmpo", "drop": ["void_turn"], "weights": {"off_policy": 0.0, "high_entropy": 0.3}},
        {"weights": {"nthr": 0.1}},
        {"kind": "unclipped", "aggregation": "constant", "penalties": {"kl_cov": 0.1, "nll": 0.1}},
    ],
)
def test_micro_batch_size_does_not_change_the_gradient(changes):
    whole, metrics, _ = two_steps(with_loss(**changes), 12)
    for size in (1, 4):
        split, split_metrics, _ = two_steps(with_loss(**changes), size)
        assert max(relative(s, w) for s, w in zip(split, whole, strict=True)) < 1e-6
        for name, value in metrics.items():
            # A float32 log-probability of 8 nats is off by 5e-7, and a response has twenty
            noise = 1e-5 if "per_response" in name else 1e-6
            assert split_metrics[name] == pytest.approx(value, abs=noise, rel=1e-6), name


@pytest.mark.parametrize("size", [1, 12])
def test_dropped_rows_are_not_in_the_logged_losses(size):
    options = {"aggregation": "token_mean", "kl_weight": 0.0, "entropy_weight": 0.0, "lld_weight": 0.0}
    _, row, _ = two_steps(with_loss(**options, drop=["void_turn"], penalties={"nll": 0.1}), size)
    assert row["loss"] == pytest.approx(row["loss/policy"] + row["loss/nll"], rel=1e-6)


@pytest.mark.parametrize("budget", [64, 150, 10_000])
def test_a_token_budget_does_not_change_the_gradient(budget):
    whole, metrics, _ = two_steps(OPTIONS, 12)
    short = OPTIONS["rollout"] | {
        "max_prompt_tokens": 16,
        "max_new_tokens": 12,
        "max_observation_tokens": 8,
        "max_episode_tokens": 64,
    }
    split, split_metrics, _ = two_steps(
        OPTIONS | {"rollout": short, "optim": OPTIONS["optim"] | {"micro_batch_tokens": budget}}, None
    )
    assert max(relative(s, w) for s, w in zip(split, whole, strict=True)) < 1e-6
    for name, value in metrics.items():
        assert split_metrics[name] == pytest.approx(value, abs=1e-6, rel=1e-6), name


def test_token_budgets_are_kept_with_few_and_even_micro_batches():
    lengths = torch.randint(200, 4096, (256,), generator=torch.Generator().manual_seed(0))
    batch = SimpleNamespace(lengths_B=lengths)
    for budget in (4096, 16_384, 10**6):
        runs = micro_batches(list(range(0, 256, 2)), batch, config.Optim(micro_batch_tokens=budget))
        loads = [int(lengths[run].sum()) for run in runs]
        assert sorted(row for run in runs for row in run) == list(range(0, 256, 2))
        assert max(loads) <= budget and len(runs) <= math.ceil(sum(loads) / budget) * 1.25
        assert max(loads) - min(loads) <= (4096 if budget == 4096 else 300)
    assert micro_batches([], batch, config.Optim(micro_batch_tokens=4096)) == []


class Counting(torch.nn.Module):
    """A policy that counts the tokens it was asked about, with and without gradient."""

    def __init__(self, policy):
        super().__init__()
        self.policy, self.learned, self.scored = policy, 0, 0

    def forward(self, token_ids_BT, scored_BT, *rest):
        count = int(scored_BT.sum())
        self.learned, self.scored = (
            self.learned + count * torch.is_grad_enabled(),
            self.scored + count * (not torch.is_grad_enabled()),
        )
        return self.policy(token_ids_BT, scored_BT, *rest)


@pytest.mark.parametrize(
    "updates, changes, share_scored, reference_scored",
    [
        (1, {"kl_weight": 0.0}, 0, 0),
        (4, {"kl_weight": 0.0}, 3 / 4, 0),
        (2, {"kl_weight": 0.1}, 1 / 2, 1),
        (2, {"kl_weight": 0.1, "old_logprobs": "sampler"}, 1 / 2, 1),
    ],
)
def test_passes_that_cannot_matter_are_not_made(updates, changes, share_scored, reference_scored):
    """pi_old of the first update's rows is that update's own pass; of the others' a pass before any step, as
    it was.

    Where the ratio divides by the sampler's log-probabilities LLDS and the recorder still need the trainer's.
    """
    cfg = settings.from_dict(
        with_loss(lld_weight=0.0, **changes)
        | {"optim": {"updates_per_rollout": updates, "micro_batch_size": 2}}
    )
    tokenizer = make_tokenizer()
    policy, reference = (Counting(Policy(make_lm(tokenizer, seed=seed, scale=1.0))) for seed in (0, 1))
    batch = collate(
        make_episodes(12, len(tokenizer)), torch.linspace(-1, 1, 12).view(4, 3), tokenizer.pad_token_id
    )
    mask = batch.action_ids_BT > 0
    with torch.no_grad():
        before, _ = policy.policy(batch.token_ids_BT, mask)
    _, scores = update_policy(
        Accelerator(cpu=True),
        policy,
        reference,
        torch.optim.SGD(policy.parameters(), 0.1),
        batch,
        cfg,
        beta=1.0,
    )
    rows_scored = [row for rows in scores.rows[1:] for row in rows] if share_scored else []
    assert (policy.learned, policy.scored) == (int(mask.sum()), int(mask[rows_scored].sum()))
    assert (
        len(rows_scored) == share_scored * 12
        and reference.scored == reference_scored * int(mask.sum())
        and reference.learned == 0
    )
    assert float((scores.old_BT - before).abs().max()) < 1e-5
    assert torch.equal(scores.old_BT[scores.rows[0]], scores.new_BT[scores.rows[0]])
    assert all(float((scores.new_BT - scores.old_BT)[rows].abs().max()) > 1e-3 for rows in scores.rows[1:])
    assert scores.ratio_old_BT is (batch.sampled_logprobs_BT if "old_logprobs" in changes else None)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("old_logprobs", ["trainer", "sampler"])
def test_a_policy_that_has_not_moved_has_displaced_nothing(old_logprobs, bf16):
    """At learning rate 0 no gate of LLDS opens in any update and nothing counts as displaced, to the last
    bit, in bf16 as in float32.

    The sampler's log-probabilities differ by rounding, and half of such differences are falls.
    """
    loss_options = {"kl_weight": 0.0, "lld_weight": 1.0, "old_logprobs": old_logprobs}
    cfg = settings.from_dict(
        {
            "loss": loss_options,
            "optim": {"updates_per_rollout": 4, "micro_batch_size": 2},
            "rollout": {"num_questions": 4, "group_size": 3},
        }
    )
    tokenizer = make_tokenizer()
    policy = Policy(make_lm(tokenizer, scale=1.0))
    episodes = make_episodes(12, len(tokenizer))
    batch = collate(episodes, torch.zeros(4, 3), tokenizer.pad_token_id)
    accelerator = Accelerator(cpu=True)
    if bf16:
        accelerator.autocast = lambda: torch.autocast("cpu", torch.bfloat16)
    sampled_BT = score_batch(accelerator, policy, batch, cfg)
    sampled_BT += (
        torch.randn(sampled_BT.shape, generator=torch.Generator().manual_seed(0))
        * 1e-6
        * (batch.action_ids_BT > 0)
    )
    batch = dataclasses.replace(batch, sampled_logprobs_BT=sampled_BT)
    recorder = Recorder(policy.parameters(), lr=0.0)
    update_rows, scores = update_policy(accelerator, policy, None, recorder, batch, cfg, beta=1.0)
    assert torch.equal(scores.new_BT, scores.old_BT) and scores.anchor_BT is scores.old_BT
    assert [row["loss/lld"] for row in update_rows] == [0.0] * 4
    # Nor has a group of equals a policy gradient
    assert not any(gradient.any() for gradient in recorder.gradients)
    scores.final_BT = score_batch(accelerator, policy, batch, cfg, 4)
    found = monitor.describe(batch, scores, episodes, cfg)
    watched = [name for name in found if name.startswith(("gate/", "displacement/", "displaced/", "final/"))]
    assert len(watched) > 20 and [name for name in watched if found[name] != 0] == []
    assert found["ratio/max"] == 1.0 or old_logprobs == "sampler"


def test_rows_are_scored_in_the_micro_batches_of_their_update():
    """Only then is a difference between the two what the update did: kernels choose their order of sums by
    the shape of a batch."""
    cfg = settings.from_dict(
        with_loss(lld_weight=0.5) | {"optim": {"updates_per_rollout": 3, "micro_batch_size": 3}}
    )
    tokenizer, asked = make_tokenizer(), {False: [], True: []}
    policy, reference = (Policy(make_lm(tokenizer, seed=seed, scale=1.0)) for seed in (0, 1))
    policy.register_forward_pre_hook(lambda _, inputs: asked[torch.is_grad_enabled()].append(inputs[0]))
    batch = collate(
        make_episodes(12, len(tokenizer)), torch.linspace(-1, 1, 12).view(4, 3), tokenizer.pad_token_id
    )
    _, _scores = update_policy(
        Accelerator(cpu=True),
        policy,
        reference,
        torch.optim.SGD(policy.parameters(), 0.1),
        batch,
        cfg,
        beta=1.0,
    )
    assert (len(asked[False]), len(asked[True])) == (4, 6)
    assert all(
        torch.equal(scored, learned) for scored, learned in zip(asked[False], asked[True][2:], strict=True)
    )
    score_batch(Accelerator(cpu=True), policy, batch, cfg, 3)
    assert all(
        torch.equal(scored, learned) for scored, learned in zip(asked[False][4:], asked[True], strict=True)
    )


@pytest.mark.parametrize("aggregation, normalizer", [("sequence_mean", "preserved"), ("token_mean", "all")])
def test_gradients_agree_with_a_naive_loss(aggregation, normalizer):
    """Both updates written out row by row: Eq. 1 or the token mean, + KL, - entropy, + LLDS over its own
    denominator."""
    options = with_loss(aggregation=aggregation, lld_normalizer=normalizer)
    found, _, _ = two_steps(options, 4)
    cfg = settings.from_dict(options)
    tokenizer = make_tokenizer()
    policy, reference = Policy(make_lm(tokenizer, scale=1.0)), Policy(make_lm(tokenizer, seed=1, scale=1.0))
    advantages = torch.tensor([1.0, -0.5, -0.5, 0.0, 0.0, 0.0, 1.1, 0.1, -1.2, -1.0, 0.5, 0.5])
    batch = collate(make_episodes(12, len(tokenizer)), advantages.view(4, 3), tokenizer.pad_token_id)
    mask = batch.action_ids_BT > 0
    with torch.no_grad():
        old, _ = policy(batch.token_ids_BT, mask)
        ref, _ = reference(batch.token_ids_BT, mask)
    for update, shares in enumerate(plan_updates(batch.lengths_B.tolist(), 2, 1)):
        policy.zero_grad()
        new, entropy = policy(batch.token_ids_BT, mask, 1.0, True)
        rows = shares[0]
        num_tokens = sum(int(mask[b].sum()) for b in rows)
        preserved = sum(int(mask[b].sum()) for b in rows if advantages[b] >= 0)
        total = 0.0
        for b in rows:
            ratio = (new[b] - old[b]).exp()
            terms = -torch.minimum(ratio * advantages[b], ratio.clamp(0.8, 1.2) * advantages[b])
            terms = terms + 0.1 * ((ref[b] - new[b]).exp() - (ref[b] - new[b]) - 1) - 0.01 * entropy[b]
            total = total + (terms * mask[b]).sum() / (
                mask[b].sum() * len(rows) if aggregation == "sequence_mean" else num_tokens
            )
            if advantages[b] >= 0:
                for action in range(1, int(batch.action_ids_BT[b].max()) + 1):
                    fall = (old[b] - new[b])[batch.action_ids_BT[b] == action]
                    if fall.sum() > 0:
                        weights = torch.where(batch.part_ids_BT[b] == ANSWER, 0.3, 1.0)[
                            batch.action_ids_BT[b] == action
                        ]
                        total = total + cfg.loss.lld_weight * (weights * fall.relu()).sum() / (
                            preserved if normalizer == "preserved" else num_tokens
                        )
        total.backward()
        gradient = torch.cat([p.grad.flatten() for p in policy.parameters()])
        assert relative(found[update], gradient) < 1e-5
        with torch.no_grad():
            for p in policy.parameters():
                p -= 0.05 * p.grad


@pytest.mark.parametrize("old_logprobs", ["trainer", "sampler"])
def test_llds_acts_from_the_second_update_on(old_logprobs):
    """At the first update the policy is the old policy: LLDS must be exactly inert there, and only there.

    Also where the ratio divides by the sampler's log-probabilities, which are off by rounding (here by a
    lot).
    """
    with_llds, _, _ = two_steps(with_loss(old_logprobs=old_logprobs), 12)
    without, _, _ = two_steps(with_loss(lld_weight=0.0, old_logprobs=old_logprobs), 12)
    assert torch.equal(with_llds[0], without[0])
    assert relative(with_llds[1], without[1]) > 1e-3


def test_a_tolerance_keeps_llds_from_small_falls():
    """One larger than any fall makes it plain GRPO; one in between leaves a part of it."""
    gradients = [
        two_steps(with_loss(**options), 12)[0][1]
        for options in ({"lld_weight": 0.0}, {"lld_tolerance": 100.0}, {"lld_tolerance": 1e-3}, {})
    ]
    assert torch.equal(gradients[0], gradients[1])
    assert 0.1 < relative(gradients[2], gradients[0]) / relative(gradients[3], gradients[0]) < 1


def test_beta_zero_frees_the_answer_tokens():
    logprobs = torch.tensor([[-2.0, -2.0, -2.0]], requires_grad=True)
    terms = loss.lld_terms(
        logprobs,
        torch.tensor([[-1.0, -1.0, -1.0]]),
        torch.tensor([1.0]),
        torch.tensor([[1, 1, 1]]),
        gate="action",
    )
    (terms * loss.answer_weights(torch.tensor([[False, True, True]]), 0.0)).sum().backward()
    assert logprobs.grad.tolist() == [[-1.0, 0.0, 0.0]]


def test_plan_balances_rows_and_tokens_and_does_not_depend_on_processes():
    lengths = torch.randint(50, 900, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    plan = plan_updates(lengths, 4, 3)
    assert sorted(row for shares in plan for share in shares for row in share) == list(range(40))
    assert [sum(map(len, shares)) for shares in plan] == [10] * 4
    for shares in plan:
        loads = [sum(lengths[row] for row in share) for share in shares]
        assert max(loads) - min(loads) <= max(lengths)
    totals = [sum(lengths[row] for share in shares for row in share) for shares in plan]
    assert max(totals) / min(totals) < 1.05
    alone = plan_updates(lengths, 4, 1)
    assert [sorted(row for share in shares for row in share) for shares in plan] == [
        sorted(shares[0]) for shares in alone
    ]


def test_a_non_finite_loss_skips_the_step_and_names_the_episode(capsys):
    advantages = torch.tensor([[1.0, -1.0, 0.0], [float("nan"), 1.0, -1.0]])
    options = OPTIONS | {"rollout": {"num_questions": 2, "group_size": 3}}
    gradients, metrics, _ = two_steps(options, 2, advantages)
    assert metrics["skipped_updates"] == 1 and len(gradients) == 1
    assert torch.isfinite(gradients[0]).all()
    printed = capsys.readouterr().out
    assert "step skipped" in printed and "q/1#0" in printed and "q/0#" not in printed


def test_learning_rate_by_hand():
    optim = config.Optim(lr=2e-6, warmup_steps=4)
    assert [learning_rate(step, optim) for step in range(6)] == pytest.approx(
        [0.5e-6, 1e-6, 1.5e-6, 2e-6, 2e-6, 2e-6]
    )
    assert learning_rate(0, config.Optim(lr=3e-4, warmup_steps=0)) == 3e-4
