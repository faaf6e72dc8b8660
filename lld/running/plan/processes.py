"""A run's processes, and the bytes per number of each kind of tensor."""

import os
from dataclasses import dataclass

import torch

from lld import config
from lld.retrieval import memory
from lld.running import sharding

GB = 1e9


@dataclass(frozen=True)
class Setup:
    """Number and kind of processes of a run, and the bytes that each has (None: unknown)."""

    processes: int
    sharded: bool  # FSDP2
    on_gpu: bool
    memory: float | None


def read_setup(cfg: config.Config) -> Setup:
    """The setup as launched, unless section `plan` describes GPUs of another machine."""
    asked, here = cfg.plan, torch.cuda.is_available()
    on_gpu = here or asked.gpus is not None or asked.gpu_memory_gb is not None
    processes = asked.gpus or int(os.environ.get("WORLD_SIZE", 1))
    fsdp = sharding.asked("FSDP") if asked.shard == "launcher" else asked.shard == "fsdp"
    if asked.gpu_memory_gb is not None:
        available = asked.gpu_memory_gb * GB
    elif here:
        device = int(os.environ.get("LOCAL_RANK", 0))
        available = float(torch.cuda.get_device_properties(device).total_memory)
    elif on_gpu:
        available = None
    else:
        available = memory.available_bytes() / int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return Setup(processes, fsdp and processes > 1, on_gpu, available)


def local_processes(setup: Setup) -> int:
    """Processes on one machine: as launched, or at most 8 if `plan` describes GPUs of another machine."""
    launched = os.environ.get("LOCAL_WORLD_SIZE")
    if launched and int(os.environ.get("WORLD_SIZE", 1)) == setup.processes:
        return int(launched)
    return min(setup.processes, 8)


def is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


@dataclass(frozen=True)
class Widths:
    """Bytes per number of each kind of tensor, and the number of processes that weights are sharded over."""

    compute: int  # result of a matrix multiplication
    stored: int  # weight
    stream: int  # residual stream; autocast keeps the weights' dtype
    cast: int  # autocast's copy of a weight; 0 if none
    share: int  # processes that share one copy of the weights


def widths_of(cfg: config.Config, setup: Setup) -> Widths:
    """The widths of a run, from mixed precision, optimizer and sharding."""
    bf16 = setup.on_gpu and cfg.model.mixed_precision == "bf16"
    stored = 2 if bf16 and (cfg.optim.name == "adamw_offload" or cfg.model.lora_rank) else 4
    return Widths(
        compute=2 if bf16 else 4,
        stored=stored,
        stream=2 if bf16 and (stored == 2 or setup.sharded) else 4,
        cast=2 if bf16 and stored == 4 and not setup.sharded else 0,
        share=setup.processes if setup.sharded else 1,
    )
