"""Products of one input with several weights, taken at once where the weights lie one after the other in
memory.

A product of few rows costs a GPU as much for being launched as for its numbers; q, k and v are small ones,
and gate and up read the same rows. The weights stay parameters of their own, read and written by name.
"""

import torch
from torch import nn

KINDS = ("llama", "qwen2", "qwen3")  # models whose layers are built of these modules


def neighbours(layer: nn.Module) -> tuple[tuple[nn.Module, ...], tuple[nn.Module, ...]]:
    """The modules of a decoder layer that read the same input: q, k and v; gate and up."""
    attn, mlp = layer.self_attn, layer.mlp
    return (attn.q_proj, attn.k_proj, attn.v_proj), (mlp.gate_proj, mlp.up_proj)


@torch.no_grad()
def join_weights(lm: nn.Module) -> None:
    """Lays weights and biases of such modules out one after the other, in place of those they had. For a
    model that only samples.
    """
    for layer in lm.base_model.layers if lm.config.model_type in KINDS else ():
        for modules in neighbours(layer):
            for name in ("weight", "bias"):
                parts = [getattr(module, name) for module in modules]
                if any(part is None for part in parts):
                    continue
                pieces = torch.cat([part.detach() for part in parts]).split([len(part) for part in parts])
                for module, piece in zip(modules, pieces, strict=True):
                    setattr(module, name, nn.Parameter(piece, requires_grad=False))


def joined(modules: tuple[nn.Module, ...]) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Weight and bias of all `modules` as one, the same memory; None where `join_weights` has not laid them
    out.
    """
    if any(type(module) is not nn.Linear for module in modules):
        return None
    weight, biased = _whole([module.weight for module in modules]), modules[0].bias is not None
    bias = _whole([module.bias for module in modules]) if biased else None
    return None if weight is None or (biased and bias is None) else (weight, bias)


def _whole(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    """The tensor whose pieces `parts` are, in this order; None where they are not."""
    if any(part is None for part in parts):
        return None
    first = parts[0].detach()
    end = first.storage_offset()
    for part in parts:
        if (
            part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or part.storage_offset() != end
        ):
            return None
        end += part.numel()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride(), first.storage_offset())
