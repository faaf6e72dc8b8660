"""The mask kept: probabilities over the ids that the sampler kept are the same in sampler and trainer."""

import dataclasses
import json
import math

import pytest
import torch
from accelerate import Accelerator
from conftest import make_lm, play

from lld import settings
from lld.engine.sampling import sample_tokens
from lld.episode import collate
from lld.model import lm_head
from lld.model.lm_head import token_scores
from lld.policy import Policy
from lld.record import sentinel, trajectories
from lld.running.crashbox import read_episodes
from lld.update import take_rows, update_policy

KEPT = {"rollout": {"top_p": 0.8}, "loss": {"support": "kept"}}


def made(dtype, num_tokens=37, num_ids=3001, bias=False):
    """Random states, head, targets and kept ids: from 1 to 120 of each token, ids of all slices."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    head = torch.nn.Linear(24, num_ids, bias=bias, dtype=dtype)
    for parameter in head.parameters():
        parameter.data = draw(*parameter.shape)
    hidden_NC = draw(num_tokens, 24).requires_grad_()
    counts = torch.randint(1, 120, (num_tokens,), generator=generator).tolist()
    ids = [torch.randperm(num_ids, generator=generator)[:count] for count in counts]
    targets_N = torch.stack([own[len(own) // 2] for own in ids]) if ids else torch.zeros(0, dtype=torch.long)
    kept = (torch.cat([*ids, torch.zeros(0)]).int(), torch.tensor(counts, dtype=torch.int32))
    return hidden_NC, head, targets_N, kept, draw(2, num_tokens)


def naive_scores(hidden_NC, head, targets_N, temperature, kept):
    """A loop over tokens with all their logits."""
    logprobs, entropies, start = [], [], 0
    for state_C, target, count in zip(hidden_NC, targets_N, kept[1].tolist(), strict=True):
        ids = kept[0][start : start + count].long()
        start += count
        logp_k = (head(state_C) / temperature)[ids].log_softmax(-1)
        logprobs.append(logp_k[(ids == target).nonzero()[0, 0]])
        entropies.append(-(logp_k.exp() * logp_k).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_and_gradients_are_those_of_a_loop_over_whole_logits(
    temperature, entropy_gradient, bias, monkeypatch
):
    monkeypatch.setattr(lm_head, "SLICE_LOGITS", {"cpu": 1})  # the ids kept by any token make two slices
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        found = []
        for ours in (True, False):
            hidden_NC, head, targets_N, kept, (one_N, other_N) = made(dtype, bias=bias)
            if ours:
                logprob_N, entropy_N = token_scores(
                    hidden_NC, head, targets_N, temperature, entropy_gradient, None, kept
                )
                assert entropy_N.requires_grad == entropy_gradient
            else:
                logprob_N, entropy_N = naive_scores(hidden_NC, head, targets_N, temperature, kept)
                entropy_N = entropy_N if entropy_gradient else entropy_N.detach()
            ((logprob_N * one_N).sum() + (entropy_N * other_N).sum()).backward()
            gradients = [hidden_NC.grad, *(parameter.grad for parameter in head.parameters())]
            found.append([logprob_N.detach(), entropy_N.detach(), *gradients])
        assert len(kept[0].unique()) > 1024
        for one, other in zip(*found, strict=True):
            assert one.dtype == dtype and float((one - other).norm() / other.norm()) < tolerance


def test_a_number_by_hand():
    """Logits 0, ln 2, ln 3, ln 94 of 100: kept are the ids 1 and 2, of probabilities 2/5 and 3/5."""
    head = torch.nn.Linear(1, 4, bias=False)
    head.weight.data = torch.tensor([1.0, 2, 3, 94]).log()[:, None]
    hidden_NC = torch.ones(1, 1, requires_grad=True)
    kept = (torch.tensor([2, 1], dtype=torch.int32), torch.tensor([2], dtype=torch.int32))
    logprob_N, entropy_N = token_scores(hidden_NC, head, torch.tensor([1]), 1.0, False, None, kept)
    assert float(logprob_N.detach()) == pytest.approx(math.log(0.4))
    assert float(entropy_N.detach()) == pytest.approx(-0.4 * math.log(0.4) - 0.6 * math.log(0.6))
    logprob_N.sum().backward()
    assert head.weight.grad[:, 0].tolist() == pytest.approx([0, 0.6, -0.6, 0])
    assert float(hidden_NC.grad.sum()) == pytest.approx(0.6 * math.log(2) - 0.6 * math.log(3))
    whole_N, _ = token_scores(hidden_NC, head, torch.tensor([1]), 1.0, False)
    assert float((whole_N - logprob_N).detach().exp()) == pytest.approx(0.05)  # the mass of what was kept


def test_a_target_outside_its_kept_ids_is_impossible_and_no_tokens_have_no_gradient():
    hidden_NC, head, targets_N, kept, _ = made(torch.float32)
    outside = next(i for i in range(3001) if i not in kept[0][: int(kept[1][0])])
    targets_N[0] = outside
    logprob_N, _ = token_scores(hidden_NC, head, targets_N, 1.0, False, None, kept)
    assert logprob_N[0] == -torch.inf and logprob_N[1:].isfinite().all()
    hidden_NC, head, targets_N, kept, _ = made(torch.float32, num_tokens=0)
    logprob_N, _ = token_scores(hidden_NC, head, targets_N, 1.0, False, None, kept)
    logprob_N.sum().backward()
    assert hidden_NC.grad.shape == (0, 24) and not head.weight.grad.any()


def test_the_sampler_names_what_it_kept():
    """Also where the nucleus is larger than what is sorted first; the ids are those above the cut."""
    logits_SV = torch.zeros(2, 3000)
    logits_SV[0, :3] = torch.tensor([5.0, 30.0, 29.0])
    drawn = sample_tokens(logits_SV, torch.tensor([0.99, 0.5]), 1.0, 0.8999, keep_ids=True)
    assert drawn[0][2].tolist() == [1, 2] and drawn[0][0] == 2
    assert drawn[0][1] == pytest.approx(-math.log(1 + math.e), abs=1e-6)
    assert len(drawn[1][2].unique()) == len(drawn[1][2]) == 2700 and drawn[1][0] in drawn[1][2]
    assert drawn[1][1] == pytest.approx(-math.log(2700), abs=1e-6)
    plain = sample_tokens(logits_SV, torch.tensor([0.99, 0.5]), 1.0, 0.8999)
    assert plain == [pair[:2] for pair in drawn]


@pytest.fixture(scope="module")
def played(lm, tokenizer, questions, search):
    """Episodes of a random policy at top_p .8 and temperature 1.5, with their kept ids."""
    changes = {"top_p": 0.8, "temperature": 1.5, "max_new_tokens": 25, "max_turns": 2}
    cfg = settings.from_dict(KEPT | {"rollout": changes})
    return cfg, play(lm, tokenizer, questions, search, cfg)


@pytest.fixture(scope="module")
def batch(played, tokenizer):
    _, episodes = played
    advantages_PG = torch.linspace(-1, 1, len(episodes)).view(-1, 2)
    return collate(episodes, advantages_PG, tokenizer.pad_token_id)


def test_sampled_and_trained_log_probabilities_agree_to_1e_4(played, batch, lm):
    _, episodes = played
    written_BT = batch.action_ids_BT > 0
    with torch.no_grad():
        whole_BT, _ = Policy(lm)(batch.token_ids_BT, written_BT, 1.5)
        kept_BT, entropy_BT = Policy(lm)(batch.token_ids_BT, written_BT, 1.5, False, batch.kept)
    assert written_BT.sum() > 500 and torch.equal(batch.kept_counts_BT > 0, written_BT)
    assert float((kept_BT - batch.sampled_logprobs_BT).abs().max()) < 1e-4
    mass_N = (whole_BT - kept_BT).exp()[written_BT]
    assert 0.8 - 1e-4 < float(mass_N.min()) <= float(mass_N.max()) < 1 + 1e-4
    assert float((entropy_BT - batch.kept_counts_BT.clamp(min=1).log()).max()) < 1e-4  # at most ln(count)
    for episode in episodes:
        ids = iter(episode.kept_ids)
        for token, count in zip(episode.token_ids, episode.kept_counts, strict=True):
            own = [next(ids) for _ in range(count)]
            assert not count or token in own
        assert next(ids, None) is None


def test_rows_of_a_batch_have_the_kept_ids_of_their_tokens(played, batch):
    _, episodes = played
    some = batch.rows([5, 2])
    ids = [*episodes[5].kept_ids, *episodes[2].kept_ids]
    assert some.kept_ids_K.tolist() == ids and some.kept_counts_BT.shape == some.token_ids_BT.shape
    assert some.kept_counts_BT.sum(1).tolist() == [len(episodes[5].kept_ids), len(episodes[2].kept_ids)]
    empty = take_rows(batch, [], None)
    assert len(empty.kept_ids_K) == 0 and not empty.kept_counts_BT.any()
    taken = dataclasses.replace(batch, kept_ids_K=None, kept_counts_BT=None).rows([0])
    assert taken.kept is None


def updates(batch, tokenizer, cfg, policy=None, **changes):
    """Log-probabilities of two updates, and the weights after them."""
    policy = policy or Policy(make_lm(tokenizer))
    reference, optimizer = Policy(make_lm(tokenizer, seed=1)), torch.optim.SGD(policy.parameters(), 0.01)
    cfg = dataclasses.replace(
        cfg,
        loss=dataclasses.replace(cfg.loss, kl_weight=0.1, entropy_weight=0.01, lld_weight=0.5),
        optim=dataclasses.replace(cfg.optim, updates_per_rollout=2, **changes),
    )
    rows, scores = update_policy(Accelerator(cpu=True), policy, reference, optimizer, batch, cfg, beta=0.3)
    return rows, scores, torch.cat([weight.detach().flatten() for weight in policy.parameters()])


def test_micro_batches_and_slices_change_nothing(played, batch, tokenizer, monkeypatch):
    cfg, _ = played
    runs = [updates(batch, tokenizer, cfg, micro_batch_size=20)]
    monkeypatch.setattr(lm_head, "slices", lambda n, *_: (slice(s, min(n, s + 50)) for s in range(0, n, 50)))
    runs.append(updates(batch, tokenizer, cfg, micro_batch_size=3))
    (rows, scores, weights), (other_rows, other_scores, other_weights) = runs
    assert float((scores.new_BT - other_scores.new_BT).abs().max()) < 1e-4
    assert float((weights - other_weights).norm()) < 1e-4 * float(
        (weights - updates(batch, tokenizer, cfg, lr=0)[2]).norm() + 1
    )
    for row, other in zip(rows, other_rows, strict=True):
        assert row == pytest.approx(other, abs=1e-4, rel=1e-4)


def test_the_ratio_of_the_unmoved_policy_to_its_sampler_is_1(played, batch, tokenizer):
    cfg, _ = played
    cfg = dataclasses.replace(cfg, loss=dataclasses.replace(cfg.loss, old_logprobs="sampler"))
    _, scores, _ = updates(batch, tokenizer, cfg)
    first = scores.rows[0]
    assert scores.ratio_old_BT is batch.sampled_logprobs_BT
    assert float((scores.new_BT - scores.ratio_old_BT)[first].abs().max()) < 1e-4


def test_kept_ids_survive_a_crash_box_and_a_checkpoint(played, batch, tmp_path, tokenizer):
    _, episodes = played
    (tmp_path / "episodes").mkdir()
    lines = [trajectories.to_json(episode) for episode in episodes]
    path = tmp_path / "episodes" / "step_000003.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    assert read_episodes(tmp_path, 3, 2, len(tokenizer)) == episodes
    for damage, message in (
        (lambda e: e["kept_ids"].__setitem__(0, 2**40), "OverflowError"),
        (lambda e: e["kept_ids"].__setitem__(slice(0, e["kept_counts"][0]), [9999]), "counts"),
        (lambda e: e["kept_counts"].__setitem__(0, 0) or e["kept_ids"].__delitem__(slice(0, 1)), "kept"),
        (lambda e: e["kept_counts"].append(0), "one count for each token"),
        (lambda e: e["kept_counts"].__setitem__(0, "2"), "one count for each token"),
    ):
        tree = json.loads(lines[0])
        damage(tree)
        path.write_text(json.dumps(tree) + "\n")
        with pytest.raises(ValueError, match=message):
            read_episodes(tmp_path, 3, 1, len(tokenizer))
    packed = sentinel.pack_sentinel(batch.rows([3, 1]))
    torch.save(packed, tmp_path / "state.pt")
    again = type(batch)(**torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(again.kept_ids_K, batch.rows([3, 1]).kept_ids_K)


def test_what_contradicts_is_refused(batch, tokenizer, played):
    with pytest.raises(ValueError, match=r"loss.support = 'kept' does nothing with rollout.top_p = 1"):
        settings.from_dict({"loss": {"support": "kept"}})
    with pytest.raises(ValueError, match="use loss.support 'kept'"):
        settings.from_dict({"rollout": {"top_p": 0.9}, "loss": {"old_logprobs": "sampler"}})
    settings.from_dict({"rollout": {"top_p": 0.9}, "loss": {"old_logprobs": "sampler", "support": "kept"}})
    without = dataclasses.replace(batch, kept_ids_K=None, kept_counts_BT=None)
    with pytest.raises(ValueError, match="recorded without them"):
        updates(without, tokenizer, played[0])
