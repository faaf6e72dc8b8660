"""Every recorded figure against a loop over tokens; the phases on made-up histories; the sentinel;
trajectories."""

import copy
import dataclasses
import json
import math
import random
import re

import pytest
import tokenizers
import torch
from bench import alarm
from conftest import ROOT, make_lm, make_tokenizer
from gradients import OPTIONS, make_episodes

from lld import loss, settings
from lld.episode import ANSWER, SEARCH, THINK, Batch, collate
from lld.record import metrics, monitor, phases, trajectories
from lld.record import sentinel as sentinel_module
from lld.running import setup
from lld.update import Scores

ADVANTAGES_PG = torch.tensor([[1.0, -0.5, -0.5], [0.0, 0.0, 0.0], [1.1, 0.1, -1.2], [-1.0, 0.5, 0.5]])


@pytest.fixture(scope="module")
def recorded():
    """(episodes, batch, scores) of made-up episodes with made-up likelihoods before, at and after the
    updates."""
    episodes = make_episodes(12, 300)
    batch = collate(episodes, ADVANTAGES_PG, 0)
    generator = torch.Generator().manual_seed(3)
    written_BT = batch.action_ids_BT > 0

    def draw(scale):
        return torch.randn(batch.token_ids_BT.shape, generator=generator) * scale * written_BT

    old_BT = -draw(1.0).abs()
    scores = Scores(
        old_BT,
        old_BT + draw(0.1),
        draw(1.0).abs(),
        old_BT + draw(0.2),
        old_BT,
        [list(range(0, 12, 2)), list(range(1, 12, 2))],
    )
    return episodes, batch, scores


def naive_displacement(episodes, old_BT, new_BT, advantages_B, rows):
    """Sums and counts in plain Python, from the episodes' own lists."""
    sums = {}

    def add(name, value):
        total, count = sums.get(name, (0.0, 0))
        sums[name] = (total + value, count + 1)

    for row in rows:
        episode, advantage = episodes[row], float(advantages_B[row])
        group = "correct" if advantage > 0 else "incorrect" if advantage < 0 else "neutral"
        offset, response, num_tokens = len(episode.prompt_ids), 0.0, 0
        for number, turn in enumerate(episode.turns, start=1):
            action = 0.0
            for t in range(turn.start, turn.end):
                delta = float(new_BT[row, offset + t]) - float(old_BT[row, offset + t])
                part = "think" if t < turn.tag_start else turn.kind
                add(f"displacement/{group}", delta)
                add(f"displacement/{group}/{part}/turn{number}", delta)
                add(f"displaced/{group}/tokens", float(delta < -1e-5))
                action += delta
            add(f"displacement/{group}/per_action", action)
            add(f"displaced/{group}/actions", float(action < -1e-5 * (turn.end - turn.start)))
            response, num_tokens = response + action, num_tokens + turn.end - turn.start
        add(f"displacement/{group}/per_response", response)
        add(f"displaced/{group}/responses", float(response < -1e-5 * num_tokens))
    return {name: total / count for name, (total, count) in sums.items()}


@pytest.mark.parametrize("rows", [list(range(12)), [1, 3, 8], [4]])
def test_displacement_agrees_with_a_loop_over_tokens(recorded, rows):
    episodes, batch, scores = recorded
    found = monitor.displacement(batch, scores.old_BT, scores.new_BT, rows)
    wanted = naive_displacement(episodes, scores.old_BT, scores.new_BT, batch.advantages_B, rows)
    assert {name for name in found if "/q" not in name} == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, abs=1e-6), name


def test_what_counts_as_displaced_depends_on_the_type_of_the_computation(recorded):
    """A millinat is a fall in float32; in bf16 it is rounding. Likelihoods are the trainer's, whatever the
    ratio divides by."""
    episodes, batch, scores = recorded
    written_BT = batch.action_ids_BT > 0
    fallen = dataclasses.replace(
        scores, new_BT=scores.old_BT - 1e-3 * written_BT, ratio_old_BT=scores.old_BT - 0.5 * written_BT
    )
    for bf16 in (False, True):
        row = monitor.describe(
            batch, dataclasses.replace(fallen, bf16=bf16), episodes, settings.from_dict(OPTIONS)
        )
        assert [row[f"displaced/correct/{unit}"] for unit in ("tokens", "actions", "responses")] == [
            1.0 - bf16
        ] * 3
        assert row["displacement/correct"] == pytest.approx(-1e-3, rel=1e-3) and row[
            "ratio/mean"
        ] == pytest.approx(math.exp(0.499), rel=1e-4)


def test_parts_of_a_response_are_those_of_its_turns(recorded):
    episodes, batch, _ = recorded
    for row, episode in enumerate(episodes):
        start = len(episode.prompt_ids)
        wanted = [0] * start
        for turn in episode.turns:
            wanted += (
                [THINK] * (turn.tag_start - turn.start)
                + [SEARCH if turn.kind == "search" else ANSWER] * (turn.end - turn.tag_start)
                + [0] * (turn.observation_end - turn.end)
            )
        assert (
            batch.part_ids_BT[row, : len(wanted)].tolist() == wanted
            and not batch.part_ids_BT[row, len(wanted) :].any()
        )


def test_quantiles_are_those_of_the_class(recorded):
    _, batch, scores = recorded
    found = monitor.displacement(batch, scores.old_BT, scores.new_BT, list(range(12)))
    written_BT = (batch.action_ids_BT > 0) & (batch.advantages_B > 0)[:, None]
    delta_n = sorted((scores.new_BT - scores.old_BT)[written_BT].tolist())
    assert [found[f"displacement/correct/q{q}"] for q in ("05", "50", "95")] == pytest.approx(
        [delta_n[round(p * (len(delta_n) - 1))] for p in (0.05, 0.5, 0.95)]
    )


def test_gates_are_watched_whether_llds_is_on_or_not(recorded):
    """Each gate by hand over the rows with A >= 0: Eqs. 4, 9 and 10."""
    episodes, batch, scores = recorded
    found = monitor.gates(batch, scores.old_BT, scores.new_BT, list(range(12)))
    open_tokens, penalty, num_tokens = (
        dict.fromkeys(("token", "action", "response"), 0),
        dict.fromkeys(("token", "action", "response"), 0.0),
        0,
    )
    for row, episode in enumerate(episodes):
        if batch.advantages_B[row] < 0:
            continue
        offset = len(episode.prompt_ids)

        def fall(t):
            return float(scores.old_BT[row, offset + t] - scores.new_BT[row, offset + t])

        tokens = [t for turn in episode.turns for t in range(turn.start, turn.end)]
        whole = sum(fall(t) for t in tokens)
        for turn in episode.turns:
            action = sum(fall(t) for t in range(turn.start, turn.end))
            for t in range(turn.start, turn.end):
                num_tokens += 1
                for gate, is_open in (
                    ("token", fall(t) > 0),
                    ("action", action > 0),
                    ("response", whole > 0),
                ):
                    open_tokens[gate] += is_open
                    penalty[gate] += max(0.0, fall(t)) * is_open
    for gate in open_tokens:
        assert found[f"gate/{gate}/open"] == pytest.approx(open_tokens[gate] / num_tokens, abs=1e-6)
        assert found[f"gate/{gate}/penalty"] == pytest.approx(penalty[gate] / num_tokens, abs=1e-6)
    tolerant = monitor.gates(batch, scores.old_BT + 0.01, scores.new_BT, list(range(12)), tolerance=0.01)
    assert tolerant == pytest.approx(found, abs=1e-3)
    # LLDS compares with an older policy: every token fell by 0.01
    older = dataclasses.replace(scores, anchor_BT=scores.new_BT + 0.01)
    row = monitor.describe(batch, older, episodes, settings.from_dict(OPTIONS))
    assert [
        row[f"gate/{gate}/{what}"] for gate in open_tokens for what in ("open", "penalty")
    ] == pytest.approx([1.0, 0.01] * 3, rel=1e-4)
    assert (
        row["displacement/correct"]
        == monitor.describe(batch, scores, episodes, settings.from_dict(OPTIONS))["displacement/correct"]
    )


@pytest.mark.parametrize("kind", ["grpo", "gspo", "gmpo", "dual_clip"])
def test_clipped_tokens_are_those_without_a_gradient(recorded, kind):
    _, batch, scores = recorded
    cfg = settings.from_dict(OPTIONS | {"loss": OPTIONS["loss"] | {"kind": kind}})
    noise_BT = torch.randn(batch.token_ids_BT.shape, generator=torch.Generator().manual_seed(0))
    advantages_B = torch.tensor([1.0, -1.0] * 6)
    batch = dataclasses.replace(batch, advantages_B=advantages_B)
    mask_BT = batch.action_ids_BT > 0
    new_BT = (scores.old_BT + noise_BT).requires_grad_()
    tokens = loss.Tokens.of(new_BT, scores.old_BT, advantages_B, mask_BT, {})
    loss.surrogate_terms(tokens, cfg.loss).sum().backward()
    share = float((new_BT.grad == 0)[mask_BT].double().mean())
    found = monitor.policy_change(
        batch, dataclasses.replace(scores, new_BT=new_BT.detach()), list(range(12)), cfg
    )
    assert found["ratio/clipped"] == pytest.approx(share) and 0.05 < share < 0.95


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_likelihood_ratio_and_clip_agree_with_a_loop(recorded, kind):
    _, batch, scores = recorded
    cfg = settings.from_dict(OPTIONS | {"loss": OPTIONS["loss"] | {"kind": kind}})
    rows = list(range(12))
    found = monitor.policy_change(batch, scores, rows, cfg)
    ratios, clipped, entropies, new = [], 0, [], {"correct": [], "incorrect": [], "neutral": []}
    for row in rows:
        advantage = float(batch.advantages_B[row])
        tokens = [t for t in range(batch.token_ids_BT.shape[1]) if batch.action_ids_BT[row, t]]
        logs = [float(scores.new_BT[row, t] - scores.old_BT[row, t]) for t in tokens]
        logs = [sum(logs) / len(logs)] * len(logs) if kind == "gspo" else logs
        for t, log in zip(tokens, logs, strict=True):
            ratio = math.exp(log)
            ratios.append(ratio)
            clipped += (advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < 0.8)
            entropies.append(float(scores.entropy_BT[row, t]))
            new["correct" if advantage > 0 else "incorrect" if advantage < 0 else "neutral"].append(
                float(scores.new_BT[row, t])
            )

    def mean(values):
        return sum(values) / len(values)

    assert [found[name] for name in ("ratio/mean", "ratio/max", "ratio/clipped", "entropy")] == pytest.approx(
        [mean(ratios), max(ratios), clipped / len(ratios), mean(entropies)], abs=1e-6
    )
    assert found["ratio/q999"] == pytest.approx(sorted(ratios)[round(0.999 * (len(ratios) - 1))])
    for name, values in new.items():
        assert found[f"likelihood/{name}_new"] == pytest.approx(mean(values), abs=1e-6)


def test_first_and_second_actions_of_wrong_episodes_and_the_likelihood_by_searches(recorded):
    """Figures 5 and 6, from the episodes themselves."""
    episodes, batch, scores = recorded
    found = monitor.episode_likelihoods(batch, scores.old_BT, episodes)
    right = [episode.answer == "a" for episode in episodes]
    assert 0 < sum(right) < 12
    actions, rounds, matches = {1: [], 2: []}, {}, []
    for row, episode in enumerate(episodes):
        offset = len(episode.prompt_ids)
        for number, turn in enumerate(episode.turns, start=1):
            values = [float(scores.old_BT[row, offset + t]) for t in range(turn.start, turn.end)]
            rounds.setdefault(sum(t.searched for t in episode.turns), []).extend(values)
            if not right[row] and (number == 1 or (number == 2 and episode.turns[0].searched)):
                actions[number] += values
        if not right[row] and episode.turns[0].searched:
            friends = [
                other
                for j, other in enumerate(episodes)
                if right[j] and other.question.id == episode.question.id
            ]
            if friends:
                matches.append(any(other.turns[0].passages == episode.turns[0].passages for other in friends))

    def mean(values):
        return sum(values) / len(values)

    assert found["wrong/first_action"] == pytest.approx(mean(actions[1]), abs=1e-6)
    assert found["wrong/second_action"] == pytest.approx(mean(actions[2]), abs=1e-6)
    assert matches and found["wrong/observation_match"] == mean(matches)
    for count, values in rounds.items():
        assert found[f"nll/searches{count}"] == pytest.approx(-mean(values), abs=1e-6)


def test_a_second_action_after_an_invalid_one_has_read_no_passage(recorded):
    """Figure 5 is of second actions after feedback; the corrective message is none."""
    episodes, batch, scores = copy.deepcopy(recorded)
    before = monitor.episode_likelihoods(batch, scores.old_BT, episodes)
    wrong = [row for row, episode in enumerate(episodes) if episode.answer != "a" and len(episode.turns) > 1]
    turn = episodes[wrong[0]].turns[0]
    episodes[wrong[0]].turns[0] = dataclasses.replace(turn, kind="invalid", searched=False, passages=())
    found = monitor.episode_likelihoods(batch, scores.old_BT, episodes)
    kept = [
        value for row in wrong[1:] for value in scores.old_BT[row][batch.action_ids_BT[row] == 2].tolist()
    ]
    assert found["wrong/first_action"] == before["wrong/first_action"] and found[
        "wrong/second_action"
    ] == pytest.approx(sum(kept) / len(kept), abs=1e-6)
    assert found["wrong/second_action"] != before["wrong/second_action"]


def test_every_recorded_name_is_in_the_glossary(recorded):
    episodes, batch, scores = recorded
    cfg = settings.from_dict(OPTIONS)
    names = (
        monitor.describe(batch, scores, episodes, cfg).keys()
        | monitor.describe_update(batch, scores, 1, cfg).keys()
    )
    assert len(names) > 80 and [name for name in names if not metrics.described(name)] == []


def test_a_row_that_is_not_finite_is_left_out(recorded):
    episodes, batch, scores = recorded
    new_BT = scores.new_BT.clone()
    new_BT[0, len(episodes[0].prompt_ids)] = float("nan")
    rest = monitor.displacement(batch, scores.old_BT, scores.new_BT, list(range(1, 12)))
    assert monitor.displacement(batch, scores.old_BT, new_BT, list(range(12))) == pytest.approx(rest)
    without = dataclasses.replace(batch, action_ids_BT=batch.action_ids_BT * (torch.arange(12) > 0)[:, None])
    rest = monitor.episode_likelihoods(without, scores.old_BT, episodes)
    found = monitor.episode_likelihoods(batch, torch.where(new_BT.isnan(), new_BT, scores.old_BT), episodes)
    names = [name for name in rest if name != "wrong/observation_match"]  # which is no likelihood
    assert len(names) >= 4 and [found[name] for name in names] == pytest.approx(
        [rest[name] for name in names]
    )


def test_the_sentinel_is_scored_under_the_policy_of_the_moment(tmp_path, recorded):
    from accelerate import Accelerator

    from lld.policy import Policy

    tokenizer = make_tokenizer()
    episodes = make_episodes(12, len(tokenizer))
    batch = collate(episodes, ADVANTAGES_PG, tokenizer.pad_token_id)
    # The whole distribution's; made-up episodes were sampled at -1 of a cut one
    old_BT = torch.where(batch.action_ids_BT > 0, -0.5, 0.0)
    sentinel = sentinel_module.choose_sentinel(batch, old_BT, episodes, 2)
    right = [row for row, episode in enumerate(episodes) if episode.answer == "a"][:2]
    assert sentinel.names == tuple(batch.names[row] for row in right)
    torch.save(sentinel_module.pack_sentinel(sentinel), tmp_path / "state.pt")
    again = Batch(**torch.load(tmp_path / "state.pt", weights_only=True))
    policy = Policy(make_lm(tokenizer, scale=1.0).eval())
    found = sentinel_module.describe_sentinel(
        Accelerator(cpu=True), policy, again, settings.from_dict(OPTIONS)
    )
    sums = []
    for row in right:
        ids = torch.tensor([episodes[row].prompt_ids + episodes[row].token_ids])
        with torch.no_grad():
            logprobs_TV = policy.lm(ids).logits[0].log_softmax(-1)
        start = len(episodes[row].prompt_ids)
        sums += [
            float(logprobs_TV[start + t - 1, token])
            for t, (token, action) in enumerate(
                zip(episodes[row].token_ids, episodes[row].action_ids, strict=True)
            )
            if action
        ]
    assert found["sentinel/likelihood"] == pytest.approx(sum(sums) / len(sums), abs=1e-5)
    assert found["sentinel/displacement"] == pytest.approx(sum(sums) / len(sums) + 0.5, abs=1e-5)


def history(displacements, flat=lambda s: 0.5, gap=lambda s: 0.0):
    return [
        {
            "step": s,
            "displacement/correct": d,
            "likelihood/correct_old": -0.2,
            "likelihood/incorrect_old": -0.2 + gap(s),
            "entropy": 0.3,
            "entropy/incorrect": flat(s),
        }
        for s, d in enumerate(displacements)
    ]


def test_displacement_alone_is_no_alarm():
    """Rising or quietly falling likelihood is healthy; a steady fall is phase 1 and warns of nothing."""
    noise = [0.002 * (-1) ** s for s in range(100)]
    assert set(phases.detect(history([0.005 + n for n in noise]))) == {0}
    assert set(phases.detect(history([-0.002 + n for n in noise]))) == {0}  # 1 % of 0.2 a step is allowed for
    # By hand: -0.0125 / 0.2 = -6.25 % a step, 5.25 % beyond the allowance, so S > 2 after 39 steps of falling
    falling = phases.detect(history([0.005] * 40 + [-0.0125] * 60))
    assert falling == [0] * 78 + [1] * 22
    # S = 2.5725, and 0.31 less a step
    assert phases.detect(history([0.005] * 40 + [-0.0125] * 49 + [0.2] * 8))[-8:] == [1] + [0] * 7


def test_wrong_responses_that_flatten_are_an_alarm_and_with_a_gap_the_spiral():
    """Entropy .5, and .7 from step 30 on. Its 10-step median is .6 at the fifth such step, .7 from
    the sixth on, step 35, and has been above .65 ten times in a row at step 44."""
    flat = phases.detect(history([0.0] * 60, flat=lambda s: 0.5 if s < 30 else 0.7))
    assert flat == [0] * 44 + [2] * 16
    # The gap's mean is below -.4 from the ninth step of -.5 on, and alone it is nothing
    wide = history([0.0] * 60, flat=lambda s: 0.5 if s < 30 else 0.7, gap=lambda s: 0.0 if s < 40 else -0.5)
    assert phases.detect(wide) == [0] * 44 + [2] * 4 + [3] * 12
    assert set(phases.detect(history([0.0] * 60, gap=lambda s: -0.5))) == {0}
    # Entropy that falls and comes back is no alarm, until it is above its start
    back = [0.5] * 10 + [0.2] * 20 + [0.45] * 20 + [0.6] * 20
    # The median is .525 at the fifth step of .6, step 54, and ten times in a row at step 63
    assert phases.detect(history([0.0] * 70, flat=lambda s: back[s])) == [0] * 63 + [2] * 7
    # Four wild steps are no rise
    assert set(phases.detect(history([0.0] * 60, flat=lambda s: 9.0 if 30 <= s < 34 else 0.5))) == {0}
    detector = phases.Detector()
    for row in wide[:49]:
        last = detector.update(row)
    text = detector.warning(row, last)
    assert text.startswith(
        "step 48: phase 3 (spiral) begins: entropy of wrong responses 0.50 at its least -> 0.70 nats; they "
        "are 0.45 nats a token less likely than right ones."
    )
    assert "loss.support=kept" in text and "rollout.top_p=1" in text


@pytest.mark.parametrize(
    "options, has, lacks",
    [
        ([], ["Lower optim.lr, or raise loss.lld_weight (0.2 now)."], ["kept", "top_p"]),
        (
            ["rollout.top_p=0.8", "loss.lld_weight=0"],
            ["(rollout.top_p 0.8)", "loss.support=kept, or rollout.top_p=1. Or lower", "(0 now)"],
            ["min_p", "top_k"],
        ),
        (["rollout.top_k=9", "rollout.min_p=0.1"], ["rollout.min_p=0 rollout.top_k=0"], ["top_p"]),
        (["rollout.top_p=0.8", "loss.support=kept"], ["Lower optim.lr"], ["kept", "top_p"]),
        (
            ["rollout.temperature=0.8", "loss.temperature=1"],
            ["temperature 0.8, trained at 1"],
            ["loss.support", "top_p"],
        ),
    ],
)
def test_the_warning_advises_what_would_change_this_run(options, has, lacks):
    cfg = settings.load(str(ROOT / "configs" / "tiny.yaml"), options)
    detector = setup.make_detector(cfg)
    rows = history([0.0] * 50, flat=lambda s: 0.5 if s < 30 else 0.7)
    row, phase = rows[-1], [detector.update(row) for row in rows][-1]
    text = detector.warning(row, phase)
    assert "(flattening) begins" in text
    assert all(part in text for part in has) and not any(part in text for part in lacks), text


def test_with_one_update_the_rescored_displacement_is_what_is_watched():
    """At the only update pi is pi_old: displacement/correct is 0 however much the update displaces."""
    rows = history([0.0] * 100)
    for step in range(0, 100, 5):
        # 25 % of 0.2, 24 % beyond the allowance: S > 2 at the ninth
        rows[step]["final/displacement/correct"] = -0.05
    assert set(phases.detect(rows)) == {0}
    assert phases.detect(rows, num_updates=1) == [0] * 40 + [1] * 60


def test_no_phase_where_nothing_is_learned():
    """All-right groups have no advantage: there is no correct response to displace, and none wrong."""
    assert set(phases.detect([{"entropy": 0.1}] * 60)) == {0}


def course(reward, mixed=0.5, answered=1.0, valid_actions=1.0, truncated=0.0, entropy=0.4):
    """Rows of a run in which no likelihood is logged; each argument a value, or one a step."""

    def at(value, s):
        return value[s] if isinstance(value, list) else value

    names = {
        "reward/mean": reward,
        "reward/mixed_groups": mixed,
        "answered": answered,
        "valid_actions": valid_actions,
        "truncated": truncated,
        "entropy": entropy,
    }
    return [{"step": s} | {name: at(value, s) for name, value in names.items()} for s in range(len(reward))]


def test_a_dead_run_is_a_collapse_and_its_signs_are_named():
    """As at a learning rate of 2e-3: a dead run displaces nothing, so that the CUSUM alone calls it
    healthy."""
    rows = course(
        [0.36, 0.13, *[0.0] * 18],
        [0.75, 0.4, *[0.0] * 18],
        answered=[1.0, 0.9, *[0.0] * 18],
        truncated=[0.0, 0.1, *[1.0] * 18],
    )
    found = phases.detect(rows)
    assert found == [0] * 4 + [4] * 16
    detector = phases.Detector()
    for row in rows[:5]:
        last = detector.update(row)
    text = detector.warning(row, last)
    assert text.startswith(
        "step 4: phase 4 (collapse) begins: reward/mean 0.36 -> 0.10, answered 1.00 -> 0.38, truncated "
        "0.00 -> 0.62 ("
    )
    assert "monitor.stop_in_phase=4" in text and "optim.lr" in text


def test_one_sign_alone_is_no_collapse_but_a_lost_reward_is_after_ten_steps():
    rises = [0.3 + 0.01 * s for s in range(60)]
    for sign in (
        {"entropy": [0.4] * 30 + [2.0] * 30},
        {"truncated": [0.0] * 30 + [0.9] * 30},
        {"answered": [1.0] * 30 + [0.3] * 30},
        {"mixed": [0.5] * 30 + [0.0] * 30},
    ):
        assert set(phases.detect(course(rises, **sign))) == {0}, sign
    # The mean of 5 falls from .6 by .08 a step, below half and .1 lower at the fourth step of the fall, 33,
    # and for the tenth time at 42.
    assert phases.detect(course([0.6] * 30 + [0.2] * 30)) == [0] * 42 + [4] * 18
    # It comes back, and so does the phase
    assert set(phases.detect(course([0.6] * 30 + [0.2] * 12 + [0.5] * 18))[30:]) == {0, 4}
    assert phases.detect(course([0.6] * 30 + [0.2] * 12 + [0.5] * 18))[-1] == 0
    # Together with another sign at once.
    assert (
        phases.detect(course([0.6] * 30 + [0.2] * 30, valid_actions=[1.0] * 30 + [0.0] * 30))
        == [0] * 33 + [4] * 27
    )
    assert phases.detect(course([0.6] * 30 + [0.2] * 30, entropy=[0.4] * 30 + [0.001] * 30))[35:] == [4] * 25
    # Below .1 there is nothing to lose
    assert set(phases.detect(course([0.15] * 30 + [0.06] * 30, valid_actions=0.9))) == {0}


def test_the_alarm_on_recorded_runs():
    """tests/fixtures/alarm.jsonl: plain GRPO and LLDS at learning rates from 1e-4 to 2e-3; docs/alarm.md has
    the table."""
    judged, text = alarm.table()
    dead, alive = [run for run in judged if run["collapsed"]], [run for run in judged if not run["collapsed"]]
    assert len(dead) >= 10 and len(alive) >= 6
    assert all(
        run["alarm_collapse"] is not None and run["alarm_collapse"] - run["lost"] < 10 for run in dead
    ), text
    assert not any(run["alarm_collapse"] is not None for run in alive), text
    assert (
        sum(run["alarm_displacement"] is None for run in dead) > len(dead) / 2
    )  # what displacement alone misses

    def figures(some):
        return [line for line in some.splitlines() if re.match(r"\| (8|16) ", line)]

    assert figures(text) == figures((ROOT / "docs" / "alarm.md").read_text())


def test_the_spiral_is_seen_before_the_reward_is_lost_and_only_where_the_sampler_cuts():
    """tests/fixtures/causes.jsonl: the same run with top-p .8, which loses EM at step 268, and with 1."""
    signs = alarm.signs_of_causes()
    cut = {name: step for name, step in signs["p80-lr2e-4-s0"].items() if step is not None}
    assert cut == {"alarm_flattening": 143, "alarm_gap": 238, "alarm_spiral": 238}
    assert set(signs["p100-lr2e-4-s0"].values()) == {None}


def test_noise_is_no_collapse():
    """Made-up runs of 16 questions whose true reward stays .3, half of the questions always right or
    wrong."""
    rng, alarms = random.Random(0), 0
    for _ in range(100):
        # 80 episodes that are worth 24
        rewards = [sum(rng.random() < 0.3 for _ in range(24)) / 24 for _ in range(100)]
        alarms += 4 in phases.detect(course(rewards, [float(rng.random() < 0.9) for _ in rewards]))
    assert alarms <= 1


def test_groups_all_wrong_from_the_start_get_their_own_words():
    detector, said = phases.Detector(), []
    for row in course([0.0] * 30, 0.0, answered=0.2):
        said.append(detector.warning(row, detector.update(row)))
    assert [step for step, text in enumerate(said) if text] == [9]
    assert said[9].startswith(
        "step 9: nothing to learn from: for 10 steps no group held both right and wrong answers, and the "
        "mean reward is 0.00."
    )
    assert phases.detect(course([1.0] * 30, 0.0))[-1] == 0


def test_episodes_survive_a_round_trip_through_json():
    for episode in make_episodes(12, 300):
        episode.logprobs[0] = -0.1 + 0.2  # a float with all its digits
        assert trajectories.from_json(trajectories.to_json(episode)) == episode


def test_trajectories_hold_every_token_with_its_numbers(recorded):
    _, batch, scores = recorded
    tokenizer = make_tokenizer()
    episodes = make_episodes(12, 300)
    records = [
        json.loads(json.dumps(r))
        for r in trajectories.describe(tokenizer, 7, episodes, batch, scores, [0.5] * 12, [0, 5])
    ]
    for row, record in zip((0, 5), records, strict=True):
        episode, start = episodes[row], len(episodes[row].prompt_ids)
        assert "".join(record["tokens"]) == tokenizer.decode(episode.token_ids, skip_special_tokens=False)
        assert (
            len(record["tokens"])
            == len(record["new"])
            == len(record["gates"]["action"])
            == len(episode.token_ids)
        )
        for t, action in enumerate(episode.action_ids):
            assert record["final"][t] == (
                pytest.approx(float(scores.final_BT[row, start + t]), abs=1e-6) if action else None
            )
            fall = float(scores.old_BT[row, start + t] - scores.new_BT[row, start + t])
            assert record["gates"]["token"][t] == int(action > 0 and fall > 0)
        assert record["advantage"] == pytest.approx(float(batch.advantages_B[row])) and record["step"] == 7


def test_pieces_of_text_add_up_to_the_text():
    """Characters of several byte-level tokens, and more tokens than the decoding window."""
    tokenizer = make_tokenizer()
    text = "<search> naïve 北京 😀 </search> " * 9
    ids = tokenizer.encode(text, add_special_tokens=False)

    def decode(some):
        return tokenizer.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    texts = trajectories.pieces(decode, ids)
    assert len(texts) == len(ids) and "".join(texts) == decode(ids)


def test_pieces_of_text_add_up_to_the_text_with_a_byte_fallback():
    """Llama-2's kind of decoder shows a run of bytes as U+FFFD until its last character is complete."""
    tokens = ["a", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(dict(zip(tokens, range(257), strict=True)), []))
    fallback, fuse = tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()
    tokenizer.decoder = tokenizers.decoders.Sequence([fallback, fuse])
    text = "aéa中a😀é中文字aa\ufffd\ufffd\ufffd\ufffd😀" * 9
    ids = [0 if byte == ord("a") else byte + 1 for byte in text.encode()]
    assert "".join(trajectories.pieces(tokenizer.decode, ids)) == tokenizer.decode(ids) == text
