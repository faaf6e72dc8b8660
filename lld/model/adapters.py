"""LoRA adapters (arXiv 2106.09685) through the library peft: added, read, switched off, merged.

An adapter adds (alpha / rank) B A to a matrix W of a decoder layer. Only A (rank, inputs) and B (outputs,
rank) are trained. B begins at 0, so the first policy is the model itself. peft is imported in the functions:
runs without adapters do not need it.
"""

import json
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from lld.config import LORA_TARGETS, Model

# Entries of adapter_config.json that change nothing for a reader, and the values that others may have
IGNORED = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "layers_pattern", "lora_alpha"),
    *("lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "revision"),
    *("target_modules", "task_type"),
}
PLAIN = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian")}


def add(lm: nn.Module, options: Model) -> None:
    """Puts new adapters into the layers of `lm`, in float32 at least, and freezes all other weights.

    In half precision the weights of an adapter would round away their updates. Raises ValueError without
    peft, or if a name in `lora_targets` is no matrix of the model's layers.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ValueError(f"LoRA adapters need peft: pip install -r requirements.txt ({error})") from None
    lm.requires_grad_(False)
    lm.add_adapter(
        LoraConfig(
            r=options.lora_rank,
            lora_alpha=options.lora_alpha,
            target_modules=list(options.lora_targets),
            task_type="CAUSAL_LM",
        )
    )
    _check_targets(lm, options)
    for layer in layers(lm).values():
        layer.cast_input_dtype_enabled = False  # a float32 copy of each input, which autocast would undo
    trained = [(name, weight) for name, weight in lm.named_parameters() if weight.requires_grad]
    for name, weight in trained:
        module, _, leaf = name.rpartition(".")
        whole = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
        setattr(lm.get_submodule(module), leaf, nn.Parameter(whole))


def _check_targets(lm: nn.Module, options: Model) -> None:
    found = layers(lm)
    for name, layer in found.items():
        if not isinstance(layer.get_base_layer(), nn.Linear):
            raise ValueError(
                f"model.lora_targets: {name} holds the joined weights of experts, which get no adapters: "
                "give model.lora_targets='[q_proj,k_proj,v_proj,o_proj]'"
            )
    there = [target for target in LORA_TARGETS if any(name.endswith(f".{target}") for name in found)]
    if missing := sorted(set(options.lora_targets) - set(there)):
        raise ValueError(
            f"model.lora_targets: the layers of this model have no {', '.join(missing)}; its other matrices "
            f"get no adapters: give model.lora_targets='[{','.join(there)}]' if that is meant"
        )


def layers(lm: nn.Module) -> dict[str, nn.Module]:
    """The modules with an adapter, by name; none in a model without adapters."""
    if not has(lm):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in lm.named_modules() if isinstance(module, LoraLayer)}


def has(lm: nn.Module) -> bool:
    return bool(getattr(lm, "_hf_peft_config_loaded", False))


def weights(lm: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' weights, by the names that peft gives them in adapter_model.safetensors."""
    return {
        "base_model.model." + name.replace(".default.", "."): weight
        for name, weight in lm.named_parameters()
        if ".lora_A." in name or ".lora_B." in name
    }


@torch.no_grad()
def read(lm: nn.Module, folder: Path) -> None:
    """Copies the adapters' weights from a folder written by peft or by a checkpoint into those of `lm`.

    Raises ValueError unless names and shapes are the same.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(folder / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {folder / 'adapter_model.safetensors'}: {error}") from None
    own = weights(lm)
    shapes, there = ({name: tuple(w.shape) for name, w in some.items()} for some in (own, found))
    if shapes != there:
        name = min(name for name in shapes.keys() | there.keys() if shapes.get(name) != there.get(name))
        raise ValueError(
            f"{folder}: these adapters are not of this model: {name} has shape {there.get(name)} there and "
            f"{shapes.get(name)} here"
        )
    for name, weight in own.items():
        weight.copy_(found[name])


@contextmanager
def switched_off(lm: nn.Module):
    """Within the block `lm` computes what it did before it had adapters."""
    lm.disable_adapters()
    try:
        yield
    finally:
        lm.enable_adapters()


@torch.no_grad()
def merged_weights(lm: nn.Module):
    """Yields (name of the module, its weight plus its adapter's product, in float32)."""
    for name, layer in layers(lm).items():
        weight = layer.get_base_layer().weight
        with torch.autocast(weight.device.type, enabled=False):
            merged = weight.float() + layer.get_delta_weight("default")
        yield name, merged


def base_of(folder: str | Path) -> str | None:
    """The model that the adapters in `folder` belong to; None for a folder or hub name without adapters.

    Raises ValueError for a damaged adapter_config.json, or one whose base is adapters, too.
    """
    if not (Path(folder) / "adapter_config.json").is_file():
        return None
    base = _settings(Path(folder))["base_model_name_or_path"]
    if (Path(base) / "adapter_config.json").is_file():
        raise ValueError(f"{folder} holds adapters of {base}, which holds adapters, too: give plain weights")
    return base


def merge(lm: nn.Module, folder: Path) -> nn.Module:
    """`lm` with the adapters in `folder` added to its weights: a plain model again."""
    tree = _settings(folder)
    _refuse_others(tree, folder)
    options = Model(lora_rank=tree["r"], lora_alpha=tree["lora_alpha"], lora_targets=tree["target_modules"])
    add(lm, options)
    read(lm, folder)
    for name, weight in list(merged_weights(lm)):
        plain = lm.get_submodule(name).get_base_layer()
        plain.weight.data.copy_(weight)
        lm.set_submodule(name, plain)
    lm._hf_peft_config_loaded = False
    del lm.peft_config
    return lm.requires_grad_(True)


def _settings(folder: Path) -> dict:
    path = folder / "adapter_config.json"
    try:
        tree = json.loads(path.read_bytes())
        sound = (
            isinstance(tree["base_model_name_or_path"], str)
            and type(tree["r"]) is int
            and tree["r"] > 0
            and type(tree["lora_alpha"]) in (int, float)
            and set(tree["target_modules"]) <= set(LORA_TARGETS)
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise ValueError(
            f"{path} is damaged, or not of LoRA adapters of {', '.join(LORA_TARGETS)}: merge them with the "
            "tool they were made with"
        )
    return tree


def _refuse_others(tree: dict, folder: Path) -> None:
    """Raises ValueError for a variant of LoRA: its entries may even name a module to import."""
    for name, value in tree.items():
        plain = name in IGNORED or (value in PLAIN[name] if name in PLAIN else not value)
        if not plain or tree.get("peft_type") != "LORA":
            raise ValueError(
                f"{folder / 'adapter_config.json'}: {name} = {str(value)[:80]!r} is a variant of LoRA that "
                "is not read here: merge it into its base with peft's merge_and_unload"
            )
