"""Weights as a coarser sampler has them, rounded to fewer bits: what a rollout can sample with.

Values are rounded and stored in their old type, so that the same code computes with them: what a sampler with
such weights would draw, not how fast it would be. Activations are not rounded.
"""

from collections.abc import Callable

import torch
from torch import nn

FP8_MAX = 448.0  # the largest number of float8_e4m3fn


def to_bf16(weight: torch.Tensor) -> torch.Tensor:
    """8 bits of mantissa: at most 2**-9 of a value off."""
    return weight.bfloat16()


def to_fp8(weight_RC: torch.Tensor) -> torch.Tensor:
    """e4m3: 4 bits of mantissa, at most 2**-4 of a value off; each row's largest becomes FP8_MAX."""
    scale_R1 = _largest(weight_RC) / FP8_MAX
    return (weight_RC.float() / scale_R1).to(torch.float8_e4m3fn).float() * scale_R1


def to_int8(weight_RC: torch.Tensor) -> torch.Tensor:
    """Whole multiples, -127 to 127, of the 127th part of a row's largest."""
    scale_R1 = _largest(weight_RC) / 127
    return (weight_RC.float() / scale_R1).round() * scale_R1


def _largest(weight_RC: torch.Tensor) -> torch.Tensor:
    """The largest size in each row (R, 1); above 0. Experts have a leading dimension more."""
    return weight_RC.float().abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny * 1e3)


COARSE: dict[str, Callable] = {"bf16": to_bf16, "fp8": to_fp8, "int8": to_int8}


def rounded_names(lm: nn.Module, kind: str) -> set[str]:
    """Names of the weights that `kind` rounds.

    bf16: all. fp8, int8: the matrices of the decoder layers, experts' too; embedding, head, routers, norms
    and biases stay, as is usual for samplers with such weights.
    """
    if kind == "bf16":
        return {name for name, _ in lm.named_parameters()}
    head = lm.get_output_embeddings()
    experts = {name for name, weight in lm.named_parameters() if weight.dim() == 3}
    return experts | {
        f"{name}.weight"
        for name, module in lm.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
