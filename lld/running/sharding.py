"""Shard weights, gradients and optimizer with torch's fully_shard (FSDP2), and gather full weights again.

The rollout engine and the checkpoint need full weights. Accelerate's configuration (configs/accelerate/) says
whether to shard. fully_shard is called here, not by `Accelerator.prepare`: that shards neither on a CPU nor a
model without an optimizer, and would reduce gradients and return log-probabilities in bf16. Parameters are
sharded along their first dimension, in rank order, with the boundaries of `torch.chunk`.
"""

import os
from contextlib import contextmanager

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lld.model import adapters, coarse
from lld.model.load import engine_model
from lld.policy import Policy
from lld.update import reshard


def asked(name: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true"


def check_launch() -> None:
    """Raises ValueError if accelerate's configuration asks for something that train.py does not support.

    Called before any file is opened. With one process there is nothing to shard: FSDP is turned off, as
    accelerate would wrap the model in its own way.
    """
    if asked("FSDP") and os.environ.get("WORLD_SIZE") == "1":
        os.environ["ACCELERATE_USE_FSDP"] = "false"
    steps = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if steps != "1":
        raise ValueError(
            f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS = {steps}, of accelerate's configuration, its "
            "--gradient_accumulation_steps or the environment: accelerate would divide every gradient by it; "
            "set it to 1, an update adds up its micro-batches itself (optim.micro_batch_size)"
        )
    if asked("CPU") and "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "`accelerate launch --cpu --num_processes N` starts one process only unless MPI is installed; "
            "use `torchrun --standalone --nproc_per_node N train.py …`, or configs/accelerate/cpu-2.yaml"
        )
    _check_gpus()
    if asked("FSDP") and os.environ.get("FSDP_VERSION", "1") != "2":
        raise ValueError(
            f"fsdp_version = {os.environ.get('FSDP_VERSION', '1')} in accelerate's configuration: train.py "
            "shards with fully_shard, set `fsdp_version: 2` (as in configs/accelerate/)"
        )
    if asked("FSDP") and os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true":
        raise ValueError(
            "fsdp_offload_params: true in accelerate's configuration has never been run with train.py: set "
            "it to false and shard over more GPUs, or use one GPU with optim.name = adamw_offload"
        )
    if asked("DEEPSPEED"):
        raise ValueError(
            "train.py does not train with DeepSpeed: its engine steps inside the backward pass, where a "
            "gradient that is not finite could not be skipped, and its checkpoints open with pickle; FSDP2 "
            "shards the same things as ZeRO-3: take configs/accelerate/gpu-4.yaml"
        )
    for name in ("MEGATRON_LM", "PARALLELISM_CONFIG"):
        if asked(name):
            raise ValueError(
                f"accelerate's configuration sets use_{name.lower()}: train.py trains with DDP or with "
                "fsdp_version 2 over all processes; take a file of configs/accelerate/"
            )


def _check_gpus() -> None:
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if torch.cuda.is_available() and not asked("CPU") and processes > gpus:
        raise ValueError(
            f"{processes} processes on a machine with {gpus} visible GPUs: launch with --num_processes "
            f"{gpus}, or a file of configs/accelerate/ with as many"
        )


def is_asked(accelerator: Accelerator) -> bool:
    """Whether weights are to be sharded: FSDP is configured and there is more than one process."""
    return asked("FSDP") and accelerator.num_processes > 1


def is_sharded(policy) -> bool:
    return isinstance(policy, FSDPModule)


def shard(policy: Policy, accelerator: Accelerator) -> Policy:
    """Shards the policy in place over all processes, with one FSDP group for each decoder layer.

    Embeddings, final norm and head form the root group. It is gathered once a forward pass and kept until the
    backward pass is over, so that chunks of tokens share it and tied weights stay tied. Shards are float32;
    with bf16 mixed precision, compute is bf16 and gradients are reduced in float32. Runs no collectives, so
    processes may call it at different times.
    """
    plugin = FullyShardedDataParallelPlugin()  # reads accelerate's environment
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else None
    mesh = torch.distributed.device_mesh.init_device_mesh(
        accelerator.device.type, (accelerator.num_processes,)
    )
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None),
    }
    layer_kinds = tuple(policy.lm._no_split_modules or ())
    for module in policy.lm.modules():
        if type(module).__name__ in layer_kinds:
            fully_shard(module, **options, reshard_after_forward=plugin.reshard_after_forward)
    return fully_shard(policy, **options)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard, or the tensor itself if it is not sharded. Shares memory with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parameters(policy) -> dict[str, torch.Tensor]:
    """The language model's parameters by name, tied ones once; as shards if the policy is sharded.

    Where some are frozen (lld/running/lora.py), only the others.
    """
    reshard(policy)
    found = {name.removeprefix("lm."): weight for name, weight in policy.named_parameters()}
    return {name: weight for name, weight in found.items() if weight.requires_grad} or found


def shapes(policy) -> dict[str, list[int]]:
    """Full (unsharded) shape of every tensor in the language model's state_dict."""
    parameters(policy)
    return {name: list(tensor.shape) for name, tensor in policy.lm.state_dict().items()}


@torch.no_grad()
def whole(weight: torch.Tensor, device, dtype=None) -> torch.Tensor:
    """Gathers one full parameter in `dtype` (default: its own). A collective."""
    weight = weight.detach().to(device=device, dtype=dtype or weight.dtype)
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def cut(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This process's shard of a full tensor, sharded like `like`; the tensor itself if `like` is not."""
    if not isinstance(like, DTensor):
        return tensor
    # chunk returns fewer pieces than processes if the dimension is short.
    pieces = tensor.chunk(like.device_mesh.size())
    rank = like.device_mesh.get_local_rank()
    return (pieces[rank] if rank < len(pieces) else tensor[:0]).clone()


def snapshot(policy) -> dict[str, torch.Tensor]:
    """CPU copies of this process's weights (shards if sharded)."""
    return {name: local(weight.detach()).cpu().clone() for name, weight in parameters(policy).items()}


@torch.no_grad()
def restore(policy, weights: dict[str, torch.Tensor]) -> None:
    for name, weight in parameters(policy).items():
        local(weight).copy_(weights[name])


def rollout_copy(lm, accelerator: Accelerator):
    """A full copy of the model for the rollout engine; call before sharding.

    In bf16 if mixed precision is bf16.
    """
    return engine_model(lm, accelerator.device, bf16=accelerator.mixed_precision == "bf16")


@torch.no_grad()
def refresh(twin, policy, device, weights: str = "trainer") -> None:
    """Copies the policy's weights into the rollout copy, one parameter at a time. A collective.

    Adapters are added to the weights that they belong to. `weights`: rollout.weights, which may round them;
    not with adapters, whose rollout copy shares other weights with the policy.
    """
    for name, weight in adapters.merged_weights(policy.lm):
        twin.get_submodule(name).weight.copy_(weight)
    if adapters.has(policy.lm):
        return
    rounded = set() if weights == "trainer" else coarse.rounded_names(policy.lm, weights)
    for name, weight in parameters(policy).items():
        mine = twin.get_parameter(name)
        if name in rounded:
            mine.copy_(coarse.COARSE[weights](whole(weight, device)))
        else:
            mine.copy_(whole(weight, device, mine.dtype))


def whole_weights(policy, accelerator: Accelerator) -> dict[str, torch.Tensor] | None:
    """All full weights and saved buffers, in CPU memory of the main process; None on others. A collective."""
    found = {}
    for name, weight in parameters(policy).items():
        tensor = whole(weight, accelerator.device)
        if accelerator.is_main_process:
            found[name] = tensor.cpu()
    saved = policy.lm.state_dict().keys()
    found |= {name: buffer.cpu() for name, buffer in policy.lm.named_buffers() if name in saved}
    return found if accelerator.is_main_process else None


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict:
    """The optimizer's state_dict with this process's shards as plain tensors."""
    state = optimizer.state_dict()
    return state | {
        "state": {
            index: {key: local(value) for key, value in entries.items()}
            for index, entries in state["state"].items()
        }
    }


def join(pieces: list[torch.Tensor]) -> torch.Tensor:
    """The full tensor from the shards that the processes wrote; a 0-dim tensor is the same in all."""
    return torch.cat(pieces) if len(pieces) > 1 and pieces[0].dim() else pieces[0]


def load_optimizer(optimizer: torch.optim.Optimizer, parts: list[dict]) -> None:
    """Loads an optimizer from the `optimizer_state` of every process that wrote the checkpoint.

    Their number may differ from the current one. `parts` may also be one state with full tensors.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    state = {}
    for index, entries in parts[0]["state"].items():
        state[index] = {}
        for key in entries:
            value = join([part["state"][index][key] for part in parts])
            if isinstance(weights[index], DTensor) and value.dim():
                like = weights[index]
                value = DTensor.from_local(
                    cut(value, like).to(like.to_local().device),
                    like.device_mesh,
                    like.placements,
                    run_check=False,
                    shape=like.shape,
                    stride=like.stride(),
                )
            state[index][key] = value
    optimizer.load_state_dict({"state": state, "param_groups": parts[0]["param_groups"]})


def load_snapshots(policy, parts: list[list[dict]]) -> list[dict]:
    """This process's shards of the snapshots, from the snapshots of every process that wrote the checkpoint.

    Their number may differ from the current one.
    """
    return [
        {
            name: cut(join([part[i][name] for part in parts]), weight)
            for name, weight in parameters(policy).items()
        }
        for i in range(len(parts[0]))
    ]


@contextmanager
def optimizer_on_cpu(optimizer: torch.optim.Optimizer, wanted: bool):
    """Moves the optimizer's tensors to CPU memory for the duration of the block, freeing their device memory.

    Does nothing unless `wanted`. 0-dim tensors stay, and of tensors that parameters share (bitsandbytes'
    tables) one is moved.
    """
    kept = []
    for entries in optimizer.state.values() if wanted else ():
        for value in entries.values():
            if isinstance(value, torch.Tensor) and value.dim():
                tensor = local(value)
                if not tensor.untyped_storage().nbytes():
                    continue
                kept.append((tensor, tensor.to("cpu", copy=True), tensor.untyped_storage().nbytes()))
                tensor.untyped_storage().resize_(0)
    try:
        yield
    finally:
        for tensor, waiting, num_bytes in kept:
            tensor.untyped_storage().resize_(num_bytes)
            tensor.copy_(waiting)
