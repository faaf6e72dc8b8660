"""Samplers that differ from the trainer: what min-p and top-k keep, rounded weights, another temperature."""

import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import make_lm, play
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lld import settings
from lld.engine.sampling import sample_tokens
from lld.episode import collate
from lld.model.coarse import COARSE, rounded_names
from lld.policy import Policy
from lld.running import playing, sharding
from lld.update import score_batch, trained_temperature

SHORT = {"temperature": 1.5, "max_new_tokens": 25, "max_turns": 1}


def kept(logits_SV, uniform=0.5, temperature=1.0, top_p=1.0, **cut):
    uniforms_S = torch.full((len(logits_SV),), uniform)
    drawn = sample_tokens(logits_SV, uniforms_S, temperature, top_p, True, **cut)
    plain = sample_tokens(logits_SV, uniforms_S, temperature, top_p, **cut)
    assert plain == [(token, logprob) for token, logprob, _ in drawn]
    for token, _, ids in drawn:
        assert token in ids
    return [(logprob, ids.tolist()) for _, logprob, ids in drawn]


def test_what_each_cut_keeps_by_hand():
    """Probabilities .4, .3, .2, .1 of the ids 2, 0, 3, 1."""
    logits_SV = torch.tensor([[0.3, 0.1, 0.4, 0.2]]).log()
    ((logprob, ids),) = kept(logits_SV, 0.99, min_p=0.49)
    assert ids == [2, 0, 3] and logprob == pytest.approx(math.log(0.2 / 0.9), abs=1e-6)
    assert kept(logits_SV, min_p=0.51)[0][1] == kept(logits_SV, top_k=2)[0][1] == [2, 0]
    assert kept(logits_SV, top_p=0.69)[0][1] == [2, 0] and kept(logits_SV, top_p=0.71)[0][1] == [2, 0, 3]
    # Each reads the whole distribution, and the smallest set wins
    assert kept(logits_SV, top_p=0.71, top_k=2)[0][1] == [2, 0]
    assert kept(logits_SV, top_p=0.39, top_k=3, min_p=0.1)[0][1] == [2]
    # At temperature 1/2 the probabilities are .16, .09, .04, .01 of .3
    assert kept(logits_SV, temperature=0.5, min_p=0.49)[0][1] == [2, 0]
    assert kept(logits_SV, top_k=7)[0][1] == [2, 0, 3, 1]


def test_more_than_is_sorted_first_is_kept():
    logits_SV = torch.zeros(2, 3000)
    logits_SV[0, 7] = 10.0
    (_, few), (logprob, many) = kept(logits_SV, min_p=0.5)
    assert few == [7] and len(set(many)) == 3000 and logprob == pytest.approx(-math.log(3000), abs=1e-6)
    (_, few), (_, many) = kept(logits_SV, top_k=2000)
    assert len(set(few)) == len(set(many)) == 2000 and 7 in few


@pytest.mark.parametrize("cut", [{"min_p": 0.1}, {"top_k": 5}, {"top_p": 0.9, "min_p": 0.05, "top_k": 30}])
def test_kept_support_agrees_with_every_cut(cut, lm, tokenizer, questions, search):
    cfg = settings.from_dict({"rollout": SHORT | cut, "loss": {"support": "kept"}})
    episodes = play(lm, tokenizer, questions, search, cfg)
    batch = collate(episodes, torch.zeros(len(questions), 2), tokenizer.pad_token_id)
    trained_BT = score_batch(Accelerator(cpu=True), Policy(lm), batch, cfg)
    assert float((trained_BT - batch.sampled_logprobs_BT).abs().max()) < 1e-4
    assert 1 < int(batch.kept_counts_BT.max()) < len(tokenizer)
    assert "top_k" not in cut or int(batch.kept_counts_BT.max()) <= cut["top_k"]


def test_a_temperature_that_the_loss_does_not_share(lm, tokenizer, questions, search):
    """Sampled at .7, trained at 1: the gap is that of the two distributions, and nothing else."""
    cfg = settings.from_dict({"rollout": SHORT | {"temperature": 0.7}, "loss": {"temperature": 1.0}})
    batch = collate(
        play(lm, tokenizer, questions, search, cfg), torch.zeros(len(questions), 2), tokenizer.pad_token_id
    )
    trained_BT = score_batch(Accelerator(cpu=True), Policy(lm), batch, cfg)
    at = {
        temperature: Policy(lm)(batch.token_ids_BT, batch.action_ids_BT > 0, temperature)[0].detach()
        for temperature in (0.7, 1.0)
    }
    assert float((trained_BT - at[1.0]).abs().max()) < 1e-5 < 0.1 < float((at[0.7] - at[1.0]).abs().max())
    assert float((batch.sampled_logprobs_BT - at[0.7]).abs().max()) < 1e-4


def test_weights_are_rounded_as_their_formats_round():
    weight_RC = torch.tensor([[1.0, 127.0, -64.4, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert COARSE["int8"](weight_RC).tolist() == [[1, 127, -64, 0], [0, 0, 0, 0]]
    # e4m3 has 4 bits of mantissa: steps of 32 from 256 to 448, of 2 from 16 to 32
    weight_RC = torch.tensor([[448.0, -300.0, 17.2, 0.0]])
    assert COARSE["fp8"](weight_RC).tolist() == [[448, -288, 18, 0]]
    assert COARSE["fp8"](weight_RC / 1000)[0].tolist() == pytest.approx([0.448, -0.288, 0.018, 0])
    assert float(COARSE["bf16"](torch.tensor([1 + 2.0**-8 + 2.0**-10]))) == 1 + 2.0**-7
    weight_RC = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    off = {kind: float((to(weight_RC) - weight_RC).norm() / weight_RC.norm()) for kind, to in COARSE.items()}
    assert 1e-3 < off["bf16"] < 2e-3 < 5e-3 < off["int8"] < 1e-2 < 2e-2 < off["fp8"] < 4e-2


@pytest.mark.parametrize("kind", COARSE)
def test_a_rollout_samples_rounded_weights_and_nothing_else_sees_them(kind, tokenizer):
    """The copy is rounded for a rollout, whole again for an evaluation; the trainer's weights stay."""
    accelerator = SimpleNamespace(mixed_precision="no", device=torch.device("cpu"))
    lm = make_lm(tokenizer)
    before = {name: weight.clone() for name, weight in lm.state_dict().items()}
    cfg = settings.from_dict({"rollout": {"weights": kind}})
    models = SimpleNamespace(rollout_copy=sharding.rollout_copy(lm, accelerator), bare=Policy(lm), lm=lm)
    run = SimpleNamespace(cfg=cfg, models=models, accelerator=accelerator, tokenizer=tokenizer)
    for _ in range(2):  # rounded anew, from the trainer's
        engine = playing.new_engine(run, cfg.rollout)
        assert engine.lm is models.rollout_copy
        names = rounded_names(lm, kind)
        for name, weight in engine.lm.named_parameters():
            assert torch.equal(weight, COARSE[kind](before[name]).float() if name in names else before[name])
        engine = playing.new_engine(run, cfg.eval)
        assert all(torch.equal(weight, before[name]) for name, weight in engine.lm.named_parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in lm.state_dict().items())
    head = {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}
    assert (head <= names) == (kind == "bf16") and "model.layers.1.mlp.up_proj.weight" in names


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_mixtures_experts_are_rounded_row_by_row(kind):
    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts": 4, "head_dim": 16}
    lm = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, mlp_only_layers=[]))
    experts = lm.model.layers[0].mlp.experts
    names = {name for name in rounded_names(lm, kind) if ".mlp." in name}
    assert names == {f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}
    rounded = COARSE[kind](experts.down_proj)
    for expert in range(4):
        assert torch.equal(rounded[expert], COARSE[kind](experts.down_proj[expert]))
    assert not torch.equal(rounded, experts.down_proj)


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"rollout": {"min_p": 1.0}}, r"rollout.min_p = 1.0: must be in \[0, 1\)"),
        ({"rollout": {"top_k": 1}}, "use at least 2, or 0 for all ids"),
        ({"rollout": {"top_k": -1}}, "must not be negative"),
        ({"loss": {"temperature": 0.0}}, "loss.temperature = 0.0: must be greater than 0"),
        ({"loss": {"temperature": 0.9, "old_logprobs": "sampler"}}, "would not begin at 1"),
        ({"rollout": {"min_p": 0.1}, "loss": {"old_logprobs": "sampler"}}, "use loss.support 'kept'"),
        ({"rollout": {"weights": "int4"}}, "rollout.weights = 'int4': must be one of"),
        (
            {"rollout": {"weights": "int8"}, "model": {"lora_rank": 4}},
            "rollout.weights = 'int8' does nothing",
        ),
    ],
)
def test_what_contradicts_is_refused(tree, message):
    with pytest.raises(ValueError, match=message):
        settings.from_dict(tree)


def test_what_agrees_is_taken():
    for rollout_options in ({"min_p": 0.1}, {"top_k": 20}):
        cfg = settings.from_dict(
            {"rollout": rollout_options, "loss": {"old_logprobs": "sampler", "support": "kept"}}
        )
        assert cfg.rollout.cuts and trained_temperature(cfg) == 1.0
    cfg = settings.from_dict({"rollout": {"weights": "fp8"}, "loss": {"old_logprobs": "sampler"}})
    assert not cfg.rollout.cuts
    assert trained_temperature(settings.from_dict({"loss": {"temperature": 0.8}})) == 0.8
