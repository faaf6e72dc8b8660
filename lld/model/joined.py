"""One matmul in place of several with the same input, for weights that are adjacent in memory.

For few rows, launching a matmul costs a GPU as much as computing it. q, k and v read the same input, as do
gate and up. The weights stay separate parameters, read and written by name.
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
    """Replaces weights and biases of such modules by adjacent ones, for a model that only samples."""
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
    """Weight and bias of all `modules`, each as one view; None unless `join_weights` made them adjacent."""
    if any(type(module) is not nn.Linear for module in modules):
        return None
    weight, biased = _whole([module.weight for module in modules]), modules[0].bias is not None
    bias = _whole([module.bias for module in modules]) if biased else None
    return None if weight is None or (biased and bias is None) else (weight, bias)


def _whole(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    """The tensor that `parts` are consecutive pieces of, as a view; None if they are not adjacent."""
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
