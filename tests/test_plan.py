"""The plan before a run: every recipe prints one offline, its terms are what the code holds, and what does
not fit is refused with what would."""

import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, make_lm

import train
from lld import config, settings
from lld.engine import engine
from lld.model import attention
from lld.running import plan

YAMLS = sorted((ROOT / "configs").glob("*.yaml"))
ON_8 = ["plan.gpus=8", "plan.gpu_memory_gb=80", "plan.shard=fsdp"]


def load(name: str, *overrides: str) -> config.Config:
    return settings.load(str(ROOT / "configs" / f"{name}.yaml"), list(overrides))


def peak(cfg: config.Config) -> float:
    return max(map(plan.total, plan.estimate(cfg, plan.read_shape(cfg), plan.read_setup(cfg)).values()))


@pytest.fixture(autouse=True)
def no_hub(monkeypatch, tmp_path):
    """Nothing may come from a network or a cache of the hub; and the launcher's variables are this test's."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in (
        "WORLD_SIZE",
        "RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "ACCELERATE_USE_FSDP",
        "FSDP_OFFLOAD_PARAMS",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_every_recipe_prints_its_plan_offline(path, capsys):
    code = plan.main(
        load(path.stem, *ON_8)
        if path.stem not in ("tiny", "7b-one-gpu")
        else load(path.stem, "plan.gpus=1", "plan.gpu_memory_gb=80")
    )
    printed = capsys.readouterr().out
    for kind in (
        "weights",
        "gradients",
        "optimizer",
        "KV cache",
        "activations",
        "sum",
        "decode",
        "update",
        "checkpoints",
        "tokens",
    ):
        assert re.search(rf"^ *{kind}", printed, re.MULTILINE) or (
            kind == "tokens" and "tokens, " in printed
        ), kind
    assert code == 0 and "Fits: " in printed, printed


@pytest.mark.parametrize(
    "name, params", [("3b", 3_085_938_688), ("7b", 7_615_616_512), ("llama3b", 3_212_749_824)]
)
def test_the_shapes_have_the_published_numbers_of_parameters(name, params):
    assert plan.read_shape(load(name)).params == params


def test_the_cache_is_predicted_to_the_token(lm):
    for prompt, longest in ((1, 300), (250, 4096), (700, 1500), (256, 256)):
        cache = engine.SlotCache(lm.config, 1, torch.device("cpu"), torch.float32, longest)
        sizes = [cache.keys_values.shape[3]]
        for length in range(prompt, longest + 1):
            cache.reserve(length)
            sizes += [cache.keys_values.shape[3]] * (cache.keys_values.shape[3] != sizes[-1])
        assert plan.cache_sizes(prompt, longest) == (sizes[-2] if len(sizes) > 1 else sizes[0], sizes[-1])


@pytest.mark.parametrize("kind", ["float32", "autocast", "bf16"])
def test_what_a_layer_keeps_for_its_backward_pass_is_counted(kind, tokenizer):
    """The tensors that autograd packs, each storage once; a second layer more of the same model leaves what
    one layer keeps."""
    kept = []
    for num_layers in (1, 2):
        lm = make_lm(tokenizer, num_layers=num_layers)
        if kind == "bf16":
            for weight in lm.parameters():
                weight.data = weight.data.bfloat16()
        own, storages = {weight.untyped_storage().data_ptr() for weight in lm.parameters()}, {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if (
                storage.data_ptr() not in own
                and tensor.numel() >= 64 * 50
                and not any(tensor.shape in (weight.shape, weight.shape[::-1]) for weight in lm.parameters())
            ):
                storages[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        lm.set_attn_implementation(attention.NAME)
        ids = torch.arange(101)[None]  # a number of tokens that no weight has
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"),
        ):
            out = lm.base_model(
                ids, position_ids=ids, use_cache=False, row_lengths=attention.row_lengths(torch.tensor([101]))
            )
        kept.append(sum(size for size, _ in storages.values()))
        del out
    shape, widths = plan.shape_of(lm.config), {"float32": (4, 4), "autocast": (4, 2), "bf16": (2, 2)}[kind]
    assert (kept[1] - kept[0]) / 101 == pytest.approx(plan.saved_bytes(shape, *widths), rel=0.1)


def test_sharding_spreads_weights_gradients_and_moments():
    whole, spread = (
        plan.estimate(cfg, plan.read_shape(cfg), plan.read_setup(cfg))["update"]
        for cfg in (load("7b", "plan.gpus=8"), load("7b", *ON_8))
    )
    assert spread["weights"] == whole["weights"] / 8 and spread["optimizer"] == whole["optimizer"] / 8
    assert spread["gradients"] == whole["gradients"] / 16  # DDP has buckets of the same size besides
    assert spread["rollout copy"] == 2 * 7_615_616_512


def test_optimizers_and_options_have_their_price():
    def size(*overrides):
        return plan.estimate(
            cfg := load("3b", "plan.gpus=1", *overrides), plan.read_shape(cfg), plan.read_setup(cfg)
        )["update"]

    assert size()["optimizer"] == 8 * 3_085_938_688 and size("optim.name=adamw_8bit")[
        "optimizer"
    ] == pytest.approx(2.03 * 3_085_938_688, rel=0.01)
    offloaded = size("optim.name=adamw_offload")
    assert offloaded["optimizer"] == 0 and offloaded["weights"] == 2 * 3_085_938_688
    assert "reference" in size() and "reference" not in size("loss.kl_weight=0")
    assert size("model.gradient_checkpointing=false")["activations"] > 5 * size()["activations"]


def test_offloading_is_neither_offered_nor_taken_under_ddp(capsys):
    asked = ["plan.gpus=8", "plan.shard=none", "plan.gpu_memory_gb=48"]
    assert plan.main(load("3b", *asked)) == 2
    printed = capsys.readouterr().out
    assert "optim.name=adamw_8bit:" in printed and "adamw_offload" not in printed
    with pytest.raises(ValueError, match="adamw_offload' with 8 processes"):
        plan.main(load("3b", *asked, "optim.name=adamw_offload"))


def test_what_does_not_fit_is_refused_with_what_would(capsys):
    asked = [
        "plan.gpus=1",
        "plan.gpu_memory_gb=80",
        "rollout.num_slots=256",
        "optim.micro_batch_tokens=65536",
    ]
    assert plan.main(load("7b", *asked)) == 2
    printed = capsys.readouterr().out
    assert "Does not fit: phase" in printed and "there are 80.0" in printed
    for remedy in (
        "as it is",
        "optim.name=adamw_8bit",
        "optim.name=adamw_offload",
        "sharded over 8 GPUs (FSDP)",
        "loss.kl_weight=0",
    ):
        assert re.search(rf"^  {re.escape(remedy)}: \d+\.\d GB; ", printed, re.MULTILINE), remedy
    found = re.search(r"adamw_offload: .* with ((?:\S+=\d+ )+)(\d+\.\d) GB", printed)
    advised = load("7b", *asked, "optim.name=adamw_offload", *found[1].split())
    # The advice is good
    assert peak(advised) / 1e9 == pytest.approx(float(found[2]), abs=0.06) and plan.main(advised) == 0


def test_without_a_gpu_the_machine_is_judged_and_a_gpu_of_unknown_size_is_not(capsys, monkeypatch):
    monkeypatch.setattr(plan.memory, "available_bytes", lambda: 16e9)
    assert plan.main(load("7b")) == 2
    printed = capsys.readouterr().out
    assert "1 CPU process of 16.0 GB" in printed and printed.startswith(
        "No GPU here: this is the plan of a CPU process. For GPUs elsewhere: plan.gpus=8 "
        "plan.gpu_memory_gb=80"
    )
    assert plan.main(load("7b", "plan.gpus=8")) == 0
    assert "plan.gpu_memory_gb=80 says it" in capsys.readouterr().out


def test_the_launcher_tells_processes_and_sharding(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    assert plan.read_setup(load("7b", "plan.gpu_memory_gb=80")) == plan.Setup(4, False, True, 80e9)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert plan.read_setup(load("7b", "plan.gpu_memory_gb=80")) == plan.Setup(4, True, True, 80e9)
    plan.main(load("7b", "plan.gpu_memory_gb=80"))
    assert capsys.readouterr().out == ""  # the first process speaks
    with pytest.raises(ValueError, match="optim.name = 'adamw_8bit' works on whole weights"):
        plan.main(load("7b", "plan.gpu_memory_gb=80", "optim.name=adamw_8bit"))


def test_a_run_on_a_gpu_is_refused_only_where_weights_gradients_and_optimizer_alone_do_not_fit(
    monkeypatch, capsys
):
    properties = type("Properties", (), {"total_memory": 80e9})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(plan.memory, "available_bytes", lambda: 64e9)
    with pytest.raises(
        ValueError, match=r"weights, gradients, optimizer and copies alone take 167.5 GB of a GPU's 80.0 GB"
    ):
        plan.check(load("7b"))
    plan.check(load("3b"))
    # May fit: said, not refused
    assert "with episodes as long as allowed this run takes" in capsys.readouterr().err
    plan.check(load("tiny"))
    assert capsys.readouterr().err == ""


def test_cpu_memory_is_counted_for_all_processes_of_a_machine(monkeypatch, capsys):
    """Each opens one whole float32 model at a time: 8 x 30.5 GB for 7B; a machine with less is refused before
    anything is opened."""
    N, cfg = 7_615_616_512, load("7b", *ON_8)
    host = plan.host_memory(cfg, plan.read_shape(cfg), plan.read_setup(cfg))
    assert plan.total(host["opening models"]) == 8 * 4 * N and plan.total(host["training"]) == 4 * N
    assert plan.main(cfg) == 0 and re.search(
        r"CPU memory of each machine \(8 processes\), GB:\n +opening models +243.70 ", capsys.readouterr().out
    )
    one = load(
        "7b-one-gpu",
        "plan.gpus=1",
        "plan.gpu_memory_gb=80",
        "loss.lld_lag_steps=1",
        "optim.updates_per_rollout=1",
        "monitor.crash_box=1",
    )
    host = plan.host_memory(one, plan.read_shape(one), plan.read_setup(one))
    assert (
        plan.total(host["opening models"]) == 8 * N
        and host["training"]["snapshots"] == 2 * 2 * N
        and host["training"]["crash box"] == 2 * 14 * N
    )
    monkeypatch.setattr(plan.memory, "available_bytes", lambda: 200e9)
    with pytest.raises(
        ValueError,
        match=r"opening models takes 243.7 GB of CPU memory on a machine with 8 processes .* and 200.0 GB "
        r"are available",
    ):
        plan.check_host(cfg, plan.read_shape(cfg), plan.read_setup(cfg))
    monkeypatch.setattr(plan.memory, "available_bytes", lambda: 100e9)
    plan.check_host(one, plan.read_shape(one), plan.read_setup(one))
    assert "training takes" in capsys.readouterr().err


def test_an_unknown_model_is_named_with_the_remedy():
    with pytest.raises(
        ValueError,
        match=r"cannot read the shape of model.path = 'nobody/nothing': give a folder with its "
        r"config.json, or put that file at .*nobody/nothing.json",
    ):
        plan.read_shape(load("3b", "model.path=nobody/nothing"))


def test_the_command_prints_and_exits(tmp_path, capsys, monkeypatch):
    command = ["--config", str(ROOT / "configs" / "7b.yaml"), "--plan"]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *command, *ON_8],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "Fits: " in done.stdout, done.stderr
    monkeypatch.chdir(tmp_path)
    assert train.main([*command, "plan.gpus=1", "plan.gpu_memory_gb=80"]) == 2
    assert "Does not fit" in capsys.readouterr().out
    assert not any(tmp_path.glob("runs*"))  # nothing was begun


def test_the_shape_of_a_folder_is_read(lm, tmp_path):
    lm.save_pretrained(tmp_path)
    cfg = config.Config(model=config.Model(path=str(tmp_path)))
    assert plan.read_shape(cfg) == plan.shape_of(lm.config)
