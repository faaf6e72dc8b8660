"""What is spread over processes: weights, gradients and optimizer by torch's fully_shard (FSDP2), and whole
copies of the weights for those who need them, the engine and the checkpoint.

Who shards is told by accelerate's configuration (configs/accelerate/). fully_shard is called here and not by
`Accelerator.prepare`, which shards neither on a CPU nor a model without an optimizer, and would reduce
gradients and return log-probabilities in bf16. Parameters are sharded along their first dimension, rank by
rank, as `torch.chunk` cuts.
"""

import os
from contextlib import contextmanager

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lld.model.load import engine_model
from lld.policy import Policy


def asked(name: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true"


def check_launch() -> None:
    """Raises ValueError, before anything is opened, where accelerate's configuration asks for what train.py
    does not do."""
    if asked("CPU") and "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "`accelerate launch --cpu --num_processes N` starts one process only unless MPI is installed; "
            "use `torchrun --standalone --nproc_per_node N train.py …`, or configs/accelerate/cpu-2.yaml"
        )
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


def is_asked(accelerator: Accelerator) -> bool:
    """Whether weights are to be sharded; one process has nobody to share with."""
    return asked("FSDP") and accelerator.num_processes > 1


def is_sharded(policy) -> bool:
    return isinstance(policy, FSDPModule)


def shard(policy: Policy, accelerator: Accelerator) -> Policy:
    """Shards the policy in place over all processes, each decoder layer a group of its own.

    Embeddings, final norm and head form the root's group: gathered once a pass and kept until its backward is
    over, so chunks of tokens share them and tied weights stay one. Float32 shards; computed in bf16 where
    mixed precision asks for it, gradients reduced in float32. No collectives here: it may be called on one
    process after another.
    """
    plugin = FullyShardedDataParallelPlugin()  # reads what accelerate's launcher put into the environment
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
    """This process's shard, or the tensor itself where it is whole; the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parameters(policy) -> dict[str, torch.Tensor]:
    """The language model's parameters by name, tied ones once: shards where sharded, also right after a
    forward pass."""
    if is_sharded(policy):
        policy.reshard()  # the root's group stays whole after a pass without gradients
    return {name.removeprefix("lm."): weight for name, weight in policy.named_parameters()}


def shapes(policy) -> dict[str, list[int]]:
    """Whole shapes of everything in the language model's state."""
    parameters(policy)
    return {name: list(tensor.shape) for name, tensor in policy.lm.state_dict().items()}


@torch.no_grad()
def whole(weight: torch.Tensor, device, dtype=None) -> torch.Tensor:
    """One parameter as a whole, gathered in `dtype`; every process must call."""
    weight = weight.detach().to(device=device, dtype=dtype or weight.dtype)
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def cut(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This process's shard of a whole tensor, sharded as `like` is."""
    if not isinstance(like, DTensor):
        return tensor
    pieces = tensor.chunk(like.device_mesh.size())  # fewer than processes where the dimension is short
    rank = like.device_mesh.get_local_rank()
    return (pieces[rank] if rank < len(pieces) else tensor[:0]).clone()


def snapshot(policy) -> dict[str, torch.Tensor]:
    """Copies on the CPU of this process's weights."""
    return {name: local(weight.detach()).cpu().clone() for name, weight in parameters(policy).items()}


@torch.no_grad()
def restore(policy, weights: dict[str, torch.Tensor]) -> None:
    for name, weight in parameters(policy).items():
        local(weight).copy_(weights[name])


def rollout_copy(lm, accelerator: Accelerator):
    """The whole model for the engine, in bf16 where that is what is computed in; make it before sharding."""
    return engine_model(lm, accelerator.device, half=accelerator.mixed_precision == "bf16")


@torch.no_grad()
def refresh(twin, policy, device) -> None:
    """Copies the policy's weights into the rollout copy, one parameter at a time; every process must call."""
    for name, weight in parameters(policy).items():
        mine = twin.get_parameter(name)
        mine.copy_(whole(weight, device, mine.dtype))


def whole_weights(policy, accelerator: Accelerator) -> dict[str, torch.Tensor] | None:
    """All weights as they are, on the CPU of the main process, None elsewhere; every process must call."""
    found = {}
    for name, weight in parameters(policy).items():
        tensor = whole(weight, accelerator.device)
        if accelerator.is_main_process:
            found[name] = tensor.cpu()
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
    """The whole of what each process of a run wrote of a tensor; numbers (a step count) are the same in
    all."""
    return torch.cat(pieces) if len(pieces) > 1 and pieces[0].dim() else pieces[0]


def load_optimizer(optimizer: torch.optim.Optimizer, parts: list[dict]) -> None:
    """Loads `optimizer_state`s of all processes of a run, however many they were, or one state that is
    whole."""
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
    """Snapshots of all processes of a run, however many they were, as this process keeps them."""
    return [
        {
            name: cut(join([part[i][name] for part in parts]), weight)
            for name, weight in parameters(policy).items()
        }
        for i in range(len(parts[0]))
    ]


@contextmanager
def optimizer_on_cpu(optimizer: torch.optim.Optimizer, wanted: bool):
    """The optimizer's tensors wait in CPU memory, and their memory on the device is free, until the block is
    left."""
    kept = []
    for entries in optimizer.state.values() if wanted else ():
        for value in entries.values():
            if isinstance(value, torch.Tensor) and value.dim():
                tensor = local(value)
                kept.append((tensor, tensor.to("cpu", copy=True), tensor.untyped_storage().nbytes()))
                tensor.untyped_storage().resize_(0)
    try:
        yield
    finally:
        for tensor, waiting, num_bytes in kept:
            tensor.untyped_storage().resize_(num_bytes)
            tensor.copy_(waiting)
