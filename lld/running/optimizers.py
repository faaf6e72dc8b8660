"""AdamW with float32 moments, with 8-bit moments (bitsandbytes), or with its state in CPU memory."""

import torch
from torch import nn

from lld.config import Optim


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW with float32 master weights in CPU memory.

    The device keeps the weights in `dtype` and gradients in float32. With bf16 that is 6 bytes a weight on
    the device instead of 16, and 16 in CPU memory; a step moves 6 bytes a weight between the two. Gradients
    are copied to the CPU when `step` is called, so clipping and skipped updates work as usual. torchao's
    CPUOffloadOptimizer copies them during the backward pass, before their norm is known.
    """

    def __init__(self, weights, dtype: torch.dtype, **options):
        self.weights = list(weights)
        # On the CPU, and kept: new memory at every step is several times slower.
        self.gradients: list[torch.Tensor] = []
        super().__init__(
            [nn.Parameter(weight.detach().to("cpu", torch.float32, copy=True)) for weight in self.weights],
            fused=True,
            **options,
        )
        for weight in self.weights:
            weight.data = weight.data.to(dtype)
            weight.grad_dtype = torch.float32  # accumulate micro-batches in float32

    @property
    def masters(self) -> list[nn.Parameter]:
        return self.param_groups[0]["params"]

    @torch.no_grad()
    def step(self, closure=None) -> None:
        self.gradients = self.gradients or [torch.empty_like(master) for master in self.masters]
        for weight, master, gradient in zip(self.weights, self.masters, self.gradients, strict=True):
            master.grad = None if weight.grad is None else gradient.copy_(weight.grad)
        super().step()
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)
            master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight in self.weights:
            weight.grad = None

    def state_dict(self) -> dict:
        """AdamW's state and the float32 master weights; those in the model's checkpoint are rounded."""
        state = super().state_dict()
        return state | {
            "state": {
                index: state["state"].get(index, {}) | {"master": master.detach()}
                for index, master in enumerate(self.masters)
            }
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        entries = {index: dict(values) for index, values in state["state"].items()}
        for index, master in enumerate(self.masters):
            master.copy_(entries[index].pop("master"))
        super().load_state_dict(
            state | {"state": {index: values for index, values in entries.items() if values}}
        )
        self._publish()


def make(policy: nn.Module, options: Optim, dtype: torch.dtype) -> torch.optim.Optimizer:
    """Makes the optimizer named by `optim.name`, at learning rate 0, of the weights that are not frozen.

    "adamw_offload" casts the policy's weights to `dtype` in place.
    """
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    common = {"lr": 0.0, "betas": options.betas, "weight_decay": options.weight_decay}
    if options.name == "adamw_offload":
        return OffloadedAdamW(weights, dtype, **common)
    if options.name == "adamw_8bit":
        try:
            from bitsandbytes.optim import AdamW8bit
        except ImportError as error:
            raise ValueError(
                "optim.name = 'adamw_8bit' needs bitsandbytes: pip install -r requirements-8bit.txt, or "
                f"use adamw or adamw_offload ({error})"
            ) from None
        return AdamW8bit(weights, **common)
    # torch's default (foreach) would hold the square roots of all second moments at once: 4 bytes a weight.
    return torch.optim.AdamW(weights, fused=True, **common)


def weight_dtype(options: Optim, mixed_precision: str) -> torch.dtype:
    """dtype of the weights on the device: float32, or bf16 for adamw_offload under bf16 mixed precision."""
    return torch.bfloat16 if options.name == "adamw_offload" and mixed_precision == "bf16" else torch.float32


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts the parameters of a model to `dtype` in place, and returns the model.

    Buffers are left unchanged: bf16 is too coarse for rotary frequencies.
    """
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    return model
