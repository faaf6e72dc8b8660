"""LoRA: peft's numbers, the policy itself as reference, whole runs that resume bit for bit, and checkpoints
that eval.py, peft and transformers open."""

import copy
import json
import re
import sys

import pytest
import torch
from conftest import ROOT, make_lm
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_policy import tied_model
from test_train import draw_nothing, refused, rows, write_config
from transformers import AutoConfig, AutoModelForCausalLM

import eval as evaluation
import train
from lld import settings
from lld.config import LORA_TARGETS, Model, Rollout
from lld.evaluation import play
from lld.model import adapters
from lld.model.load import load_lm
from lld.policy import Policy
from lld.rollout import open_engine
from lld.running import lora, sharding
from lld.running.plan.checks import refuse_combination
from lld.running.plan.processes import Setup
from lld.share import upload

OPTIONS = Model(lora_rank=3, lora_alpha=5.0, lora_targets=("q_proj", "o_proj", "down_proj"))


def adapted(lm, options: Model = OPTIONS):
    """`lm` with random adapters."""
    adapters.add(lm, options)
    generator = torch.Generator().manual_seed(1)
    for weight in adapters.weights(lm).values():
        weight.data = torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * 0.1
    return lm


@pytest.mark.parametrize("targets", [OPTIONS.lora_targets, LORA_TARGETS])
@pytest.mark.parametrize("tied", [False, True])
def test_log_probabilities_and_gradients_are_those_of_plain_peft(tied, targets, tokenizer):
    lm, token_ids_BT, scored_BT = tied_model()
    if not tied:
        lm = make_lm(tokenizer)
        token_ids_BT %= len(tokenizer)
    lm = lm.double()
    theirs = get_peft_model(
        copy.deepcopy(lm),
        LoraConfig(r=3, lora_alpha=5.0, target_modules=list(targets), task_type="CAUSAL_LM"),
    )
    ours = adapted(lm, Model(lora_rank=3, lora_alpha=5.0, lora_targets=targets))
    named = {name.replace(".default", ""): weight for name, weight in theirs.named_parameters()}
    for name, weight in adapters.weights(ours).items():
        named[name].data = weight.data.clone()
    factors_BT = torch.randn(scored_BT.shape, dtype=torch.float64)
    logprobs_BT, entropy_BT = Policy(ours)(token_ids_BT, scored_BT, 0.7, True)
    ((logprobs_BT - entropy_BT) * factors_BT).sum().backward()
    logp_BTV = (theirs(token_ids_BT).logits[:, :-1] / 0.7).log_softmax(-1)
    chosen_BT = logp_BTV.gather(-1, token_ids_BT[:, 1:, None])[..., 0]
    plain_BT = torch.where(scored_BT[:, 1:], chosen_BT, 0.0)
    entropies_BT = torch.where(scored_BT[:, 1:], -(logp_BTV.exp() * logp_BTV).sum(-1), 0.0)
    ((plain_BT - entropies_BT) * factors_BT[:, 1:]).sum().backward()
    assert float((logprobs_BT[:, 1:] - plain_BT).abs().max().detach()) < 1e-6
    for name, weight in adapters.weights(ours).items():
        assert float((weight.grad - named[name].grad).norm() / named[name].grad.norm()) < 1e-6, name
    assert not [
        name for name, weight in ours.named_parameters() if "lora_" not in name and weight.grad is not None
    ]


@pytest.mark.parametrize("targets", [("q_proj",), LORA_TARGETS])
def test_the_engine_samples_from_the_merged_weights(lm, tokenizer, targets):
    """Sampled log-probabilities are the trainer's; matrices without an adapter are not copied."""
    lm = copy.deepcopy(lm)
    twin = lora.rollout_copy(lm, targets)
    policy = Policy(adapted(lm, Model(lora_rank=3, lora_targets=targets)))
    sharding.refresh(twin, policy, torch.device("cpu"))
    assert twin.lm_head.weight.data_ptr() == lm.lm_head.weight.data_ptr()
    k_proj = [model.model.layers[0].self_attn.k_proj for model in (lm, twin)]
    if targets == ("q_proj",):
        assert k_proj[0].weight.data_ptr() == k_proj[1].weight.data_ptr()
    options = Rollout(num_slots=2, max_episode_tokens=64)
    engine = open_engine(twin, tokenizer, options, options)
    prompt = tokenizer.encode("who wrote it")
    engine.add("prompt", prompt, [0, 1], 12)
    stopped = []
    while len(stopped) < 2:
        stopped += engine.step()
    for turn in stopped:
        ids_1T = torch.tensor([prompt + turn.token_ids])
        scored_1T = torch.arange(ids_1T.shape[1])[None] >= len(prompt)
        with torch.no_grad():
            logprobs_1T, _ = policy(ids_1T, scored_1T)
            bare_1T, _ = Policy(make_lm(tokenizer))(ids_1T, scored_1T)
        sampled_T = torch.tensor(turn.logprobs)
        assert float((logprobs_1T[scored_1T] - sampled_T).abs().max()) < 1e-4
        assert float((bare_1T[scored_1T] - sampled_T).abs().max()) > 1e-2  # the adapters matter


def test_the_reference_and_an_anchor_are_the_policy_with_other_adapters_bit_for_bit(lm):
    lm = copy.deepcopy(lm)
    token_ids_BT = torch.arange(60).view(2, 30)
    scored_BT = token_ids_BT % 30 > 9
    before_BT = Policy(lm)(token_ids_BT, scored_BT)[0].detach()
    policy = Policy(adapted(lm))
    older, now_BT = sharding.snapshot(policy), policy(token_ids_BT, scored_BT)[0].detach()
    for weight in adapters.weights(lm).values():
        weight.data += 0.1
    moved_BT = policy(token_ids_BT, scored_BT)[0].detach()
    anchor = lora.Older(policy)
    anchor.weights = older
    assert torch.equal(lora.Without(policy)(token_ids_BT, scored_BT)[0], before_BT)
    assert torch.equal(anchor(token_ids_BT, scored_BT)[0], now_BT) and not torch.equal(now_BT, moved_BT)
    assert torch.equal(policy(token_ids_BT, scored_BT)[0].detach(), moved_BT)
    assert {name for name, weight in lm.named_parameters() if weight.requires_grad} == older.keys()
    assert len(older) == 2 * 3 * 2 and all("lora_" in name for name in older)


def test_adapters_learn_in_float32_over_frozen_bf16(lm):
    lm = copy.deepcopy(lm).bfloat16()
    policy = Policy(adapted(lm))
    token_ids_BT = torch.arange(60).view(2, 30)
    with torch.autocast("cpu", torch.bfloat16):
        policy(token_ids_BT, token_ids_BT % 30 > 9)[0].sum().backward()
    for weight in adapters.weights(lm).values():
        assert weight.dtype == weight.grad.dtype == torch.float32 and weight.grad.any()
    twin = lora.rollout_copy(AutoModelForCausalLM.from_config(lm.config).bfloat16(), OPTIONS.lora_targets)
    with torch.autocast("cpu", torch.bfloat16):  # as in a rollout: it must not round the product
        sharding.refresh(twin, policy, torch.device("cpu"))
    for name, layer in adapters.layers(lm).items():
        product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * (5.0 / 3)
        wanted = (layer.base_layer.weight.float() + product).bfloat16()
        assert torch.equal(twin.get_submodule(name).weight, wanted)


# ---- whole runs ----


def configure(folder, name: str, steps: int = 4, **changes):
    return write_config(
        folder,
        name,
        run={"dir": str(folder / name), "steps": steps, "save_every": 2, "keep_checkpoints": 0},
        model={"path": str(folder / "world" / "policy"), "mixed_precision": "no", "lora_rank": 4},
        eval={
            "every": 4,
            "at_start": False,
            "benchmarks": {"tiny": str(folder / "world" / "heldout.jsonl")},
            "during_training": ["tiny"],
            "max_questions": 8,
        },
        **changes,
    )


@pytest.fixture(scope="module")
def trained(folder):
    """A folder with two runs: four steps at once, and the same in two sessions."""
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        assert train.main(["--config", str(configure(folder, "whole"))]) == 0
        config = str(configure(folder, "parts"))
        assert train.main(["--config", config, "run.steps=2", "eval.every=4"]) == 0
        assert train.main(["--config", config, "--resume"]) == 0
    return folder


def test_a_run_resumes_bit_for_bit_and_keeps_only_adapters(trained):
    whole, parts = (trained / name / "checkpoints" / "step_000004" for name in ("whole", "parts"))
    # The first session of "parts" evaluates after its last step, too
    logs = [
        [{key: row[key] for key in row if not key.startswith("eval/")} for row in rows(trained / name)]
        for name in ("whole", "parts")
    ]
    assert logs[0] == logs[1] and all(row["sampler_gap/max"] < 1e-4 for row in logs[0])
    assert any(row["loss/lld"] > 0 for row in logs[0]) and any(row["loss/kl"] > 0 for row in logs[0])
    files = [load_file(path / "adapter_model.safetensors") for path in (whole, parts)]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    states = [torch.load(path / "trainer_state.pt") for path in (whole, parts)]
    moments = [state["optimizer"]["state"] for state in states]
    assert len(moments[0]) == len(files[0]) == 2 * 2 * len(LORA_TARGETS)
    assert all(
        torch.equal(moments[0][i][key], moments[1][i][key]) for i in moments[0] for key in moments[0][i]
    )
    assert [len(snapshot) for snapshot in states[0]["snapshots"]] == [len(files[0])] * 2
    assert not list(whole.glob("model*.safetensors"))


def test_a_checkpoint_opens_with_peft_with_transformers_and_here(trained, tmp_path):
    path, base = trained / "whole" / "checkpoints" / "step_000004", trained / "world" / "policy"
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), path)
        logits = theirs(ids).logits
        theirs.merge_and_unload().save_pretrained(tmp_path)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits
        direct = AutoModelForCausalLM.from_pretrained(path)(ids).logits
        ours = load_lm(Model(path=str(path)))
        plain = AutoModelForCausalLM.from_pretrained(base)(ids).logits
    for found in (merged, direct, ours(ids).logits):
        torch.testing.assert_close(found, logits, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(plain, logits, atol=1e-3)
    assert not adapters.has(ours) and all(type(w.requires_grad) is bool for w in ours.parameters())
    assert ours.state_dict().keys() == AutoModelForCausalLM.from_pretrained(base).state_dict().keys()


def test_eval_scores_a_checkpoint_of_adapters(trained, tmp_path, capsys):
    path = trained / "whole" / "checkpoints" / "step_000004"
    config = ["--config", str(trained / "whole" / "config.yaml")]
    assert evaluation.main(["--ckpt", str(path), *config, "--out", str(tmp_path)]) == 0
    about = json.loads((tmp_path / "results.json").read_text())
    assert "adapter_config.json" in about["checkpoint"]["sha256"]
    assert re.fullmatch("[0-9a-f]{16}", about["base"])
    in_run = [json.loads(line) for line in open(trained / "whole/eval/tiny/step_000004.jsonl")]
    found = {record["id"]: record["answer"] for record in map(json.loads, open(tmp_path / "tiny.jsonl"))}
    assert all(found[record["id"]] == record["answer"] for record in in_run)


def test_another_base_under_the_same_adapters_is_refused(trained, tmp_path, capsys, monkeypatch):
    path = trained / "whole" / "checkpoints" / "step_000004"
    config = ["--config", str(trained / "whole" / "config.yaml")]
    command = ["--ckpt", str(path), *config, "--out", str(tmp_path)]
    assert evaluation.main(command) == 0
    lines = (tmp_path / "tiny.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "tiny.jsonl").write_text("".join(lines[:-1]))
    monkeypatch.setattr(play, "base_fingerprint", lambda path: "another")
    assert evaluation.main(command) == 2
    assert "found with the base model of the adapters" in capsys.readouterr().err


def test_published_adapters_of_a_local_base_are_noted(trained, tmp_path, capsys, monkeypatch):
    command = [str(trained / "whole"), "--to", "a/b", "--out", str(tmp_path / "share"), "--dry-run"]
    assert upload.main(command) == 0
    note = f"note: these are adapters of {trained / 'world' / 'policy'}, a folder of this machine"
    assert note in capsys.readouterr().err
    assert (tmp_path / "share" / "adapter_model.safetensors").is_file()
    monkeypatch.setattr(adapters, "base_of", lambda folder: "Qwen/Qwen2.5-3B")
    assert upload.main(command) == 0
    assert "adapters of" not in capsys.readouterr().err


# ---- what is refused ----


@pytest.mark.parametrize(
    "override, message",
    [
        ("optim.name=adamw_offload", "the optimizer holds only the adapters"),
        ("optim.cpu_in_rollout=true", "the optimizer holds only the adapters"),
        ("monitor.crash_box=2", "a box holds whole models"),
        ("model.lora_targets=[]", "name at least one matrix"),
        ("model.lora_targets=[q_proj,q_proj]", "each only once"),
        ("model.lora_targets=[qproj]", "did you mean 'q_proj'"),
    ],
)
def test_what_adapters_exclude_is_refused(override, message):
    with pytest.raises(ValueError, match=message):
        settings.load(str(ROOT / "configs" / "3b.yaml"), ["model.lora_rank=16", override])


def test_options_of_adapters_need_a_rank_and_sharding_is_refused():
    with pytest.raises(ValueError, match="lora_alpha = 8.0 does nothing with model.lora_rank = 0"):
        settings.load(str(ROOT / "configs" / "3b.yaml"), ["model.lora_alpha=8"])
    cfg = settings.load(str(ROOT / "configs" / "3b.yaml"), ["model.lora_rank=8"])
    with pytest.raises(ValueError, match="model.lora_rank = 8 with sharded weights"):
        refuse_combination(cfg, Setup(4, True, True, None))
    cfg = settings.load(str(ROOT / "configs" / "3b.yaml"), ["loss.preset=nthr"])
    with pytest.raises(ValueError, match="loss.weights nthr reads hidden states and the whole head"):
        refuse_combination(cfg, Setup(4, True, True, None))


@pytest.mark.parametrize(
    "kind, extra, message",
    [
        (
            "phi3",
            {"pad_token_id": 0},
            r"no gate_proj, k_proj, q_proj, up_proj, v_proj; .*'\[o_proj,down_proj\]'",
        ),
        (
            "qwen3_moe",
            {"num_experts": 2, "num_experts_per_tok": 1},
            r"experts holds the joined weights of exp",
        ),
    ],
)
def test_targets_that_would_stay_without_adapters_are_refused(kind, extra, message):
    shape = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2} | extra
    with pytest.raises(ValueError, match=message):
        adapters.add(
            AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)), Model(lora_rank=2)
        )


def test_adapters_on_adapters_and_a_missing_peft_are_refused(trained, capsys, monkeypatch):
    path = trained / "whole" / "checkpoints" / "step_000004"
    changed = ["run.dir=" + str(trained / "second"), f"model.path={path}"]
    assert "merge them into their base first" in refused(capsys, trained / "whole.yaml", *changed)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="LoRA adapters need peft: pip install"):
        adapters.add(torch.nn.Linear(1, 1), OPTIONS)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"use_dora": True}, "use_dora = 'True' is a variant of LoRA"),
        ({"megatron_config": {"x": 1}, "megatron_core": "evil"}, "megatron_config = .* is a variant"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' is a variant"),
        ({"peft_type": "LOHA"}, "is a variant of LoRA"),
        ({"r": "4"}, "is damaged, or not of LoRA adapters"),
        ({"target_modules": ".*"}, "is damaged, or not of LoRA adapters"),
        ({"r": 5}, "these adapters are not of this model: .* has shape"),
        ({"base_model_name_or_path": None}, "is damaged"),
        (
            {"base_model_name_or_path": "nowhere/to be found"},
            "holds adapters of 'nowhere/to be found', which cannot be opened: cannot load",
        ),
    ],
)
def test_a_strangers_adapters_are_read_strictly(trained, tmp_path, change, message):
    path = trained / "whole" / "checkpoints" / "step_000004"
    tree = json.loads((path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(tree | change))
    save_file(load_file(path / "adapter_model.safetensors"), tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_lm(Model(path=str(tmp_path)))
