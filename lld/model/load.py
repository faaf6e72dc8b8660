"""Opens the Hugging Face model and its tokenizer."""

import copy
import dataclasses
import os
import re
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig

from lld.config import Model
from lld.model import adapters, attention
from lld.model.folder import check_folder
from lld.model.joined import join_weights

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model")


def load_tokenizer(options: Model):
    """The tokenizer of a model; without a pad token it pads with EOS.

    Raises ValueError where it cannot be opened or has no EOS token.
    """
    folder = Path(options.path)
    if not any(found for name in TOKENIZER_FILES for found in folder.glob(name)):
        check_folder(options.path, "model.path =")
        if folder.is_dir():
            raise ValueError(
                f"model.path = {options.path!r} holds no tokenizer ({', '.join(TOKENIZER_FILES)}): copy "
                "the one the model was trained with into it"
            )
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.path, trust_remote_code=options.trust_remote_code)
    except Exception as error:  # whatever a damaged or hostile file makes of it: transformers checks little
        raise ValueError(
            f"cannot open the tokenizer of model.path = {options.path!r}: give a hub name or a folder with "
            f"a model and its tokenizer ({type(error).__name__}: {error})"
        ) from None
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {options.path} has no EOS token, so no turn could end by itself; set "
            "`eos_token` in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        # Harmless here: masks are recorded when a token is sampled, and never inferred from pad ids.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def read_shape(options: Model) -> PreTrainedConfig:
    """The config.json of the model, or of the base of adapters, with this project's attention.

    The file's own choice of attention is overwritten: it may name a kernel on the hub, which is code. Dropout
    and router jitter are turned off: old and new log-probabilities would differ by their noise.
    """
    path = adapters.base_of(options.path) or options.path
    shape = AutoConfig.from_pretrained(path, trust_remote_code=options.trust_remote_code)
    shape._attn_implementation = attention.NAME
    for name in vars(shape):
        if re.search("drop(out)?$|router_jitter_noise", name) and isinstance(getattr(shape, name), float):
            setattr(shape, name, 0.0)
    if getattr(shape, "quantization_config", None):
        raise ValueError(
            "its weights are quantized (quantization_config), and cannot be trained: give the model they "
            "were made from"
        )
    return shape


def load_lm(options: Model, dtype: torch.dtype = torch.float32):
    """The causal language model from the hub or a folder, in float32 unless it stays frozen, on the CPU.

    In bfloat16, weights would round away every update at a learning rate of 1e-6; the computation may be
    bf16, by autocast. Attention is that of lld/model/attention.py, which supports the engine's cache and
    packed rows. Adapters in a folder are added to the weights of their base, which is opened by the name
    that the folder gives. Raises ValueError where weights are missing, damaged or of another shape:
    transformers would fill the gaps with random numbers.
    """
    base = adapters.base_of(options.path)
    if base is not None:
        try:
            lm = load_lm(dataclasses.replace(options, path=base))
        except ValueError as error:
            raise ValueError(
                f"{options.path} holds adapters of {base!r}, which cannot be opened: {error}"
            ) from None
        return adapters.merge(lm, Path(options.path))
    # Accelerate's launcher turns this on, and then transformers loads weights in one process only
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    try:
        lm, found = AutoModelForCausalLM.from_pretrained(
            options.path,
            config=read_shape(options),
            dtype=dtype,
            attn_implementation=attention.NAME,
            trust_remote_code=options.trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # whatever a damaged or hostile file makes of it: transformers checks little
        raise ValueError(
            f"cannot load the weights of model.path = {options.path!r}: {type(error).__name__}: {error}"
        ) from None
    if adapters.has(lm):
        raise ValueError(
            f"model.path = {options.path!r} holds adapters on the hub: give a folder, "
            f"`hf download {options.path} --local-dir DIR`"
        )
    wrong = sorted(
        str(key) for kind in ("missing_keys", "mismatched_keys", "unexpected_keys") for key in found[kind]
    )
    if wrong:
        raise ValueError(
            f"model.path = {options.path!r}: weights and config.json are not of the same model "
            f"({len(wrong)} tensors differ, the first is {wrong[0]})"
        )
    lm.generation_config = savable(lm.generation_config)
    return lm


def savable(found: GenerationConfig) -> GenerationConfig:
    """`found`, or its token ids alone where transformers has read what it refuses to write.

    Such as a temperature without `do_sample`, which would end a run at its first checkpoint.
    """
    try:
        found.validate(strict=True)
    except ValueError:
        ids = {name: getattr(found, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return GenerationConfig(**{name: value for name, value in ids.items() if value != -1})
    return found


def engine_model(lm: nn.Module, device: torch.device, *, bf16: bool, share: bool = False) -> nn.Module:
    """A frozen copy of `lm` for the engine, on `device`, in bfloat16 if `bf16`.

    The same in training and in evaluation. Buffers keep their dtype: bf16 is too coarse for rotary
    frequencies (with Qwen2.5's, 1.15 rad off at position 1,000). With `share`, weights that need neither
    another device nor another dtype are those of `lm`, not copies.
    """
    dtype = torch.bfloat16 if bf16 else torch.float32
    weights = {
        id(weight): nn.Parameter(weight.detach().to(device, dtype, copy=not share), requires_grad=False)
        for weight in lm.parameters()
    }
    # A memo for deepcopy: it takes these as copies already made, and tied weights stay tied
    copied = copy.deepcopy(lm, weights).to(device).eval()
    if device.type == "cuda":
        join_weights(copied)
    return copied
