"""`train.py --plan`, and what every run checks before it starts."""

import sys
from dataclasses import replace

import torch

from lld import config
from lld.retrieval import memory
from lld.running.plan.peaks import estimate, highest_peak, total, trained_weights
from lld.running.plan.processes import GB, Setup, is_first_process, local_processes, read_setup, widths_of
from lld.running.plan.remedies import remedies
from lld.running.plan.shape import Shape, read_shape
from lld.running.plan.storage import host_memory
from lld.running.plan.text import format_plan


def print_plan(cfg: config.Config) -> int:
    """`train.py --plan`: prints the plan on the first process; returns 2 if it does not fit, else 0."""
    shape, setup = read_shape(cfg), read_setup(cfg)
    refuse_combination(cfg, setup)
    lines = [format_plan(cfg, shape, setup), ""]
    code = 0
    sums = {phase: total(kinds) for phase, kinds in estimate(cfg, shape, setup).items()}
    phase = max(sums, key=sums.get)
    peak = sums[phase] / GB
    if setup.memory is None:
        lines.append("How much memory a GPU has is not known here: plan.gpu_memory_gb=80 says it.")
    elif sums[phase] <= setup.memory:
        lines.append(f"Fits: {peak:.1f} of {setup.memory / GB:.1f} GB, most of it in phase {phase!r}.")
    else:
        code = 2
        lines.append(
            f"Does not fit: phase {phase!r} needs {peak:.1f} GB and there are {setup.memory / GB:.1f}. "
            "What would, and what it would take:"
        )
        lines += remedies(cfg, shape, setup)
    if is_first_process():
        print("\n".join(lines))
    return code


def check_plan(cfg: config.Config) -> None:
    """Before a run: raises ValueError if opening the models, or what an update holds on a GPU, does not fit.

    Only warns if the peak does not fit, because it is estimated for episodes of maximal length.
    """
    setup = read_setup(replace(cfg, plan=config.Plan()))
    refuse_combination(cfg, setup)
    shape = read_shape(cfg)
    check_host(cfg, shape, setup)
    if not torch.cuda.is_available():
        return
    peak = highest_peak(cfg, shape, setup)
    if peak <= setup.memory:
        return
    remedy = (
        f"GB of a GPU's {setup.memory / GB:.1f} GB; `train.py --plan` prints the terms. What would fit:\n"
        + "\n".join(remedies(cfg, shape, setup))
    )
    fixed = total(trained_weights(cfg, shape, setup, widths_of(cfg, setup)))
    if fixed > setup.memory:
        raise ValueError(f"weights, gradients, optimizer and copies alone take {fixed / GB:.1f} {remedy}")
    if is_first_process():
        print(
            f"train.py: with episodes as long as allowed this run takes {peak / GB:.1f} {remedy}",
            file=sys.stderr,
            flush=True,
        )


def check_host(cfg: config.Config, shape: Shape, setup: Setup) -> None:
    """Raises ValueError if the models do not fit into CPU memory while they are loaded.

    Only warns if training may not fit. Without this check the kernel would kill the largest process without a
    message.
    """
    available = memory.available_bytes()
    for phase, kinds in host_memory(cfg, shape, setup).items():
        if total(kinds) <= available:
            continue
        needed = (
            f"{phase} takes {total(kinds) / GB:.1f} GB of CPU memory on a machine with "
            f"{local_processes(setup)} processes ({', '.join(kinds)}), and {available / GB:.1f} GB are "
            "available"
        )
        if phase == "opening models":
            raise ValueError(f"{needed}: use a machine with more, fewer processes on it, or a smaller model")
        if is_first_process():
            print(f"train.py: {needed}; `train.py --plan` prints the terms", file=sys.stderr, flush=True)


def refuse_combination(cfg: config.Config, setup: Setup) -> None:
    """Raises ValueError for what cannot work on sharded weights, or not under DDP."""
    if setup.sharded and "nthr" in cfg.loss.weights:
        raise ValueError(
            "loss.weights nthr reads hidden states and the whole head, which a sharded policy does not have "
            "in one piece: drop it, or train without FSDP"
        )
    if setup.sharded and cfg.model.lora_rank > 0:
        raise ValueError(
            f"model.lora_rank = {cfg.model.lora_rank} with sharded weights: a group of FSDP cannot hold "
            "frozen bf16 weights and float32 adapters; launch without FSDP (each GPU holds the whole model, "
            "in bf16), or train all weights (model.lora_rank=0)"
        )
    if setup.sharded and cfg.optim.name != "adamw":
        raise ValueError(
            f"optim.name = {cfg.optim.name!r} works on whole weights, and here they are sharded: use adamw "
            "(on one GPU: launch without FSDP)"
        )
    if setup.processes > 1 and cfg.optim.name == "adamw_offload":
        raise ValueError(
            f"optim.name = 'adamw_offload' with {setup.processes} processes: DDP's buckets cannot hold "
            "float32 gradients of bf16 weights; shard instead (configs/accelerate/gpu-8.yaml), or use one "
            "GPU"
        )
