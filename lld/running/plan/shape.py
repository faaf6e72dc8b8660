"""Widths and parameter counts of a model, read without its weights."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lld import config
from lld.model import load
from lld.tinyworld import policy, world

# config.json files of published models by hub name, so that a plan needs no download.
SHAPES = Path(__file__).parents[3] / "configs" / "shapes"


@dataclass(frozen=True)
class Shape:
    """Widths and parameter counts of a model, on which memory and time depend."""

    hidden: int
    layers: int
    query: int  # total width of the query heads
    kv: int  # total width of the key heads; same for values
    ffn: int
    vocab: int
    tied: bool
    params: int  # of the full model
    layer_params: int  # of one decoder layer

    @property
    def head(self) -> int:
        return self.hidden * self.vocab

    @property
    def matmul_params(self) -> int:
        """Number of weights that every token is multiplied with."""
        return self.params - (0 if self.tied else self.head)


def shape_of(model_config) -> Shape:
    """The shape of a model; parameters are counted on the meta device, including biases and norms."""
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(model_config)
    head_width = getattr(model_config, "head_dim", None)
    if head_width is None:
        head_width = model_config.hidden_size // model_config.num_attention_heads
    layers = [
        sum(weight.numel() for weight in module.parameters())
        for module in lm.modules()
        if type(module).__name__ in (lm._no_split_modules or ())
    ]
    return Shape(
        hidden=model_config.hidden_size,
        layers=model_config.num_hidden_layers,
        query=model_config.num_attention_heads * head_width,
        kv=model_config.num_key_value_heads * head_width,
        ffn=model_config.intermediate_size,
        vocab=model_config.vocab_size,
        tied=bool(model_config.tie_word_embeddings),
        params=sum(weight.numel() for weight in lm.parameters()),
        layer_params=max(layers, default=0),
    )


def read_shape(cfg: config.Config) -> Shape:
    """The shape of `model.path`.

    Read from config.json of a local folder, the options of a tiny-world policy that is not made yet, a file
    in configs/shapes, or the hub. Raises ValueError if none can be read.
    """
    path = cfg.model.path
    if cfg.tinyworld.dir and Path(path) == Path(cfg.tinyworld.dir) / "policy" and not Path(path).exists():
        tokenizer = policy.make_tokenizer(world.make_world(cfg.tinyworld), cfg.retriever.topk)
        return shape_of(policy.policy_shape(cfg.tinyworld, tokenizer))
    published = SHAPES / f"{path.removesuffix('-Instruct')}.json"
    try:
        if not Path(path).exists() and published.is_file():
            options = json.loads(published.read_text())
            return shape_of(AutoConfig.for_model(options.pop("model_type"), **options))
        return shape_of(load.read_shape(cfg.model))
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"cannot read the shape of model.path = {path!r}: give a folder with its config.json, or put "
            f"that file at {published} ({error})"
        ) from None


def matrices(shape: Shape, names: Iterable[str]) -> list[tuple[int, int]]:
    """(inputs, outputs) of the matrices `names` of a decoder layer."""
    sizes = {
        "q_proj": (shape.hidden, shape.query),
        "k_proj": (shape.hidden, shape.kv),
        "v_proj": (shape.hidden, shape.kv),
        "o_proj": (shape.query, shape.hidden),
        "gate_proj": (shape.hidden, shape.ffn),
        "up_proj": (shape.hidden, shape.ffn),
        "down_proj": (shape.ffn, shape.hidden),
    }
    return [sizes[name] for name in names]


def trained_params(cfg: config.Config, shape: Shape) -> int:
    """Number of weights that are trained: all, or those of the adapters."""
    if not cfg.model.lora_rank:
        return shape.params
    sums = [inputs + outputs for inputs, outputs in matrices(shape, cfg.model.lora_targets)]
    return shape.layers * cfg.model.lora_rank * sum(sums)
