"""The plan before a run: every recipe prints one offline, its terms are what the code holds, and what does
not fit is refused with what would."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, make_lm

import train
from lld import config, settings
from lld.engine import engine
from lld.model import adapters, attention
from lld.retrieval import memory
from lld.running import ending, sharding
from lld.running.plan.checks import check_host, check_plan, print_plan
from lld.running.plan.peaks import cache_sizes, estimate, highest_peak, saved_bytes, total
from lld.running.plan.processes import Setup, read_setup
from lld.running.plan.shape import read_shape, shape_of, trained_params
from lld.running.plan.storage import disk_use, host_memory
from lld.running.plan.times import step_times

YAMLS = sorted((ROOT / "configs").glob("*.yaml"))
ON_8 = ["plan.gpus=8", "plan.gpu_memory_gb=80", "plan.shard=fsdp"]
ON_1 = ["plan.gpus=1", "plan.gpu_memory_gb=80", "plan.shard=none"]
GPUS = {  # GB -> name, figures of the maker for bf16 without sparsity
    24: ("RTX 4090", ["plan.gpu_memory_gb=24", "plan.tflops=165", "plan.bandwidth_gb_s=1008"]),
    40: ("A100", ["plan.gpu_memory_gb=40", "plan.tflops=312", "plan.bandwidth_gb_s=1555"]),
    80: ("H100", ["plan.gpu_memory_gb=80", "plan.tflops=989", "plan.bandwidth_gb_s=3350"]),
}
WIDE, WIDER, WIDEST = (
    [f"rollout.num_slots={slots}", f"optim.micro_batch_tokens={tokens}"]
    for slots, tokens in ((128, 16384), (256, 32768), (512, 65536))
)
NEEDS = [  # rows of the table in docs/memory.md: config, number of GPUs, their GB, options
    ("0.5b", 1, 24, []),
    ("0.5b", 1, 40, WIDER),
    ("0.5b", 1, 80, WIDEST),
    ("1.5b", 1, 24, ["optim.name=adamw_offload", "rollout.num_slots=64"]),
    ("1.5b", 1, 40, []),
    ("1.5b", 1, 80, ["optim.name=adamw", *WIDER]),
    ("3b-lora", 1, 24, []),
    ("3b-lora", 1, 40, WIDE),
    ("3b-lora", 1, 80, WIDER),
    ("7b-one-gpu", 1, 80, []),
    ("3b", 4, 80, []),
    ("3b", 8, 80, []),
    ("llama3b", 8, 80, []),
    ("7b", 8, 80, []),
]
# The index that the configs of one GPU name: ivf-pq of 21,015,324 vectors of 768; its vectors, and the
# passages as they come and as they are kept, are on the disk.
INDEX_GB = memory.choices(21_015_324, 768)["faiss ivf-pq"] / 1e9
INDEX_DISK_GB = INDEX_GB + 21_015_324 * 768 * 2 / 1e9 + 2 * 14
MEMORY = ROOT / "docs" / "memory.md"
HEADER = (
    "| config | GPUs | GB of each, of | CPU GB of the machine | GB of disk | s a step | h (steps) | with |\n"
    "|---|---|---|---|---|---|---|---|\n"
)


def load(name: str, *overrides: str) -> config.Config:
    return settings.load(str(ROOT / "configs" / f"{name}.yaml"), list(overrides))


def peak(cfg: config.Config) -> float:
    return max(map(total, estimate(cfg, read_shape(cfg), read_setup(cfg)).values()))


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
    has_plan = load(path.stem).plan.gpus is not None
    elsewhere = ON_1 if path.stem in ("tiny", "7b-one-gpu") else ON_8
    code = print_plan(load(path.stem) if has_plan else load(path.stem, *elsewhere))
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
    "name, params",
    [
        ("0.5b", 494_032_768),
        ("1.5b", 1_543_714_304),
        ("3b", 3_085_938_688),
        ("7b", 7_615_616_512),
        ("llama3b", 3_212_749_824),
    ],
)
def test_the_shapes_have_the_published_numbers_of_parameters(name, params):
    assert read_shape(load(name)).params == params


def row_of(name: str, number: int, gigabytes: int, options: list[str], shapes: dict) -> str:
    """A line of the table of needs, after the checks that the run fits and that nothing is planned idly."""
    card, figures = GPUS[gigabytes]
    sharded = "fsdp" if number > 1 else "none"
    cfg = load(name, f"plan.gpus={number}", f"plan.shard={sharded}", *figures, *options)
    shape = shapes.setdefault(cfg.model.path, read_shape(cfg))
    setup = read_setup(cfg)
    highest = highest_peak(cfg, shape, setup) / 1e9
    assert 0.4 * gigabytes < highest < 0.97 * gigabytes, (name, gigabytes, highest)
    host = max(map(total, host_memory(cfg, shape, setup).values())) / 1e9
    disk = sum(size for size, _ in disk_use(cfg, shape).values()) / 1e9
    if cfg.retriever.index:
        host, disk = host + INDEX_GB, disk + INDEX_DISK_GB
    seconds = sum(part for part, _ in step_times(cfg, shape, setup).parts.values())
    hours = cfg.run.steps * seconds / 3600
    cells = [f"`{name}`", number, f"{highest:.1f}, {gigabytes} ({card})", f"{host:.0f}", f"{disk:.0f}"]
    cells += [f"{seconds:.0f}", f"{hours:.0f} ({cfg.run.steps})", " ".join(f"`{o}`" for o in options) or "–"]
    return "| " + " | ".join(map(str, cells)) + " |\n"


def table_of_needs() -> str:
    shapes = {}
    return HEADER + "".join(row_of(*row, shapes) for row in NEEDS)


def test_the_table_of_needs_is_what_the_plan_says():
    """`python tests/test_plan.py` writes it anew."""
    assert table_of_needs() + "\n" in MEMORY.read_text()


def test_the_index_of_one_gpu_configs_fits_a_machine_of_16_gb():
    """Beside the run: the server's limit is above what the index takes, and both are below 16 GB."""
    for name in ("0.5b", "1.5b", "3b-lora"):
        cfg = load(name)
        host = host_memory(cfg, read_shape(cfg), read_setup(cfg))
        largest = max(map(total, host.values())) / 1e9
        assert cfg.retriever.max_memory_gb > INDEX_GB and largest + cfg.retriever.max_memory_gb < 16


def test_adapters_are_counted_as_peft_makes_them(tokenizer):
    lm, options = make_lm(tokenizer), config.Model(lora_rank=3, lora_targets=("k_proj", "o_proj", "up_proj"))
    shape, cfg = shape_of(lm.config), config.Config(model=options)
    adapters.add(lm, options)
    trained = sum(weight.numel() for weight in lm.parameters() if weight.requires_grad)
    assert trained_params(cfg, shape) == trained
    assert trained_params(config.Config(), shape) == shape.params


def test_adapters_need_no_second_model_and_neither_moments_nor_gradients_of_the_weights():
    one = ["plan.gpus=1", "plan.shard=none"]
    cfg, whole = load("3b", "model.lora_rank=16", *one), load("3b", *one)
    shape = read_shape(cfg)
    sizes, all_weights = (estimate(c, shape, read_setup(c))["update"] for c in (cfg, whole))
    assert sizes["weights"] == 2 * shape.params == all_weights["weights"] / 2
    assert "reference" not in sizes and sizes["rollout copy"] < all_weights["rollout copy"]
    assert sizes["optimizer"] < all_weights["optimizer"] / 100 > sizes["gradients"]
    disk = [disk_use(c, shape)["checkpoints"][0] for c in (cfg, whole)]
    assert disk[0] < disk[1] / 100


def test_the_cache_is_predicted_to_the_token(lm):
    for prompt, longest in ((1, 300), (250, 4096), (700, 1500), (256, 256)):
        cache = engine.SlotCache(lm.config, 1, torch.device("cpu"), torch.float32, longest)
        sizes = [cache.keys_values.shape[3]]
        for length in range(prompt, longest + 1):
            cache.reserve(length)
            sizes += [cache.keys_values.shape[3]] * (cache.keys_values.shape[3] != sizes[-1])
        assert cache_sizes(prompt, longest) == (sizes[-2] if len(sizes) > 1 else sizes[0], sizes[-1])


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
    shape, widths = shape_of(lm.config), {"float32": (4, 4), "autocast": (4, 2), "bf16": (2, 2)}[kind]
    assert (kept[1] - kept[0]) / 101 == pytest.approx(saved_bytes(shape, *widths), rel=0.1)


def test_sharding_spreads_weights_gradients_and_moments():
    whole, spread = (
        estimate(cfg, read_shape(cfg), read_setup(cfg))["update"]
        for cfg in (load("7b", "plan.gpus=8"), load("7b", *ON_8))
    )
    assert spread["weights"] == whole["weights"] / 8 and spread["optimizer"] == whole["optimizer"] / 8
    assert spread["gradients"] == whole["gradients"] / 8
    assert whole["DDP"] == whole["gradients"] and "DDP" not in spread  # its buckets; kept in every phase
    assert spread["rollout copy"] == 2 * 7_615_616_512


def test_optimizers_and_options_have_their_price():
    def size(*overrides):
        cfg = load("3b", "plan.gpus=1", *overrides)
        return estimate(cfg, read_shape(cfg), read_setup(cfg))["update"]

    assert size()["optimizer"] == 8 * 3_085_938_688 and size("optim.name=adamw_8bit")[
        "optimizer"
    ] == pytest.approx(2.03 * 3_085_938_688, rel=0.01)
    offloaded = size("optim.name=adamw_offload")
    assert offloaded["optimizer"] == 0 and offloaded["weights"] == 2 * 3_085_938_688
    assert "reference" in size() and "reference" not in size("loss.kl_weight=0")
    assert size("model.gradient_checkpointing=false")["activations"] > 5 * size()["activations"]


def test_offloading_is_neither_offered_nor_taken_under_ddp(capsys):
    asked = ["plan.gpus=8", "plan.shard=none", "plan.gpu_memory_gb=48"]
    assert print_plan(load("3b", *asked)) == 2
    printed = capsys.readouterr().out
    assert "optim.name=adamw_8bit:" in printed and "adamw_offload" not in printed
    with pytest.raises(ValueError, match="adamw_offload' with 8 processes"):
        print_plan(load("3b", *asked, "optim.name=adamw_offload"))


def test_what_does_not_fit_is_refused_with_what_would(capsys):
    asked = [
        "plan.gpus=1",
        "plan.gpu_memory_gb=80",
        "rollout.num_slots=256",
        "optim.micro_batch_tokens=65536",
    ]
    assert print_plan(load("7b", *asked)) == 2
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
    assert peak(advised) / 1e9 == pytest.approx(float(found[2]), abs=0.06) and print_plan(advised) == 0


def test_without_a_gpu_the_machine_is_judged_and_a_gpu_of_unknown_size_is_not(capsys, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 16e9)
    assert print_plan(load("7b")) == 2
    printed = capsys.readouterr().out
    assert "1 CPU process of 16.0 GB" in printed and printed.startswith(
        "No GPU here: this is the plan of a CPU process. For GPUs elsewhere: plan.gpus=8 "
        "plan.gpu_memory_gb=80"
    )
    assert print_plan(load("7b", "plan.gpus=8")) == 0
    assert "plan.gpu_memory_gb=80 says it" in capsys.readouterr().out


def test_the_launcher_tells_processes_and_sharding(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    assert read_setup(load("7b", "plan.gpu_memory_gb=80")) == Setup(4, False, True, 80e9)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert read_setup(load("7b", "plan.gpu_memory_gb=80")) == Setup(4, True, True, 80e9)
    print_plan(load("7b", "plan.gpu_memory_gb=80"))
    assert capsys.readouterr().out == ""  # the first process speaks
    with pytest.raises(ValueError, match="optim.name = 'adamw_8bit' works on whole weights"):
        print_plan(load("7b", "plan.gpu_memory_gb=80", "optim.name=adamw_8bit"))


def test_a_run_on_a_gpu_is_refused_only_where_weights_gradients_and_optimizer_alone_do_not_fit(
    monkeypatch, capsys
):
    properties = type("Properties", (), {"total_memory": 80e9})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(memory, "available_bytes", lambda: 64e9)
    with pytest.raises(
        ValueError, match=r"weights, gradients, optimizer and copies alone take 167.5 GB of a GPU's 80.0 GB"
    ):
        check_plan(load("7b"))
    check_plan(load("3b"))
    # May fit: said, not refused
    assert "with episodes as long as allowed this run takes" in capsys.readouterr().err
    check_plan(load("tiny"))
    assert capsys.readouterr().err == ""
    # Where no GPU is visible, nothing else would say that 7B is about to be opened on the CPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(memory, "available_bytes", lambda: 24e9)
    with pytest.raises(ValueError, match="opening models takes 30.5 GB of CPU memory"):
        check_plan(load("7b"))


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    sharding.check_launch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match="8 processes on a machine with 4 visible GPUs: .*--num_processes 4"):
        sharding.check_launch()


def test_cpu_memory_is_counted_for_all_processes_of_a_machine(monkeypatch, capsys):
    """Each opens one whole float32 model at a time: 8 x 30.5 GB for 7B; a machine with less is refused before
    anything is opened."""
    N, cfg = 7_615_616_512, load("7b", *ON_8)
    host = host_memory(cfg, read_shape(cfg), read_setup(cfg))
    assert total(host["opening models"]) == 8 * 4 * N and total(host["training"]) == 4 * N
    assert print_plan(cfg) == 0 and re.search(
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
    host = host_memory(one, read_shape(one), read_setup(one))
    assert (
        total(host["opening models"]) == 8 * N
        and host["training"]["snapshots"] == 2 * 2 * N
        and host["training"]["crash box"] == 2 * 14 * N
    )
    monkeypatch.setattr(memory, "available_bytes", lambda: 200e9)
    with pytest.raises(
        ValueError,
        match=r"opening models takes 243.7 GB of CPU memory on a machine with 8 processes .* and 200.0 GB "
        r"are available",
    ):
        check_host(cfg, read_shape(cfg), read_setup(cfg))
    monkeypatch.setattr(memory, "available_bytes", lambda: 100e9)
    check_host(one, read_shape(one), read_setup(one))
    assert "training takes" in capsys.readouterr().err


def test_an_unknown_model_is_named_with_the_remedy():
    with pytest.raises(
        ValueError,
        match=r"cannot read the shape of model.path = 'nobody/nothing': give a folder with its "
        r"config.json, or put that file at .*nobody/nothing.json",
    ):
        read_shape(load("3b", "model.path=nobody/nothing"))


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
    assert read_shape(cfg) == shape_of(lm.config)


if __name__ == "__main__":
    text = MEMORY.read_text()
    start = text.index("| config | GPUs | GB of each, of |")
    end = text.index("\n\n", start) + 1
    MEMORY.write_text(text[:start] + table_of_needs() + text[end:])


def test_lack_of_gpu_memory_is_told_with_what_lowers_it(tmp_path, capsys):
    guard = SimpleNamespace(rank=3, now=("update", 7), run_dir=tmp_path)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert ending.exit_code(error, guard, None) == 2
    told = capsys.readouterr().err
    assert "rank 3: no GPU memory left (phase 'update' of step 7; CUDA out of memory)" in told
    assert "Lower optim.micro_batch_tokens for an update" in told and "No checkpoint yet" in told
