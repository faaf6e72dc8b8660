"""The Hugging Face model and its tokenizer: opens them and checks that they fit."""

import copy
import dataclasses
import os
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from lld.config import Model
from lld.model import adapters, attention
from lld.model.folder import check_folder
from lld.model.joined import KINDS, join_weights

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

    The file's own choice of attention is overwritten: it may name a kernel on the hub, which is code.
    """
    path = adapters.base_of(options.path) or options.path
    shape = AutoConfig.from_pretrained(path, trust_remote_code=options.trust_remote_code)
    shape._attn_implementation = attention.NAME
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
    return lm


def check_fit(lm, tokenizer, max_episode_tokens: int) -> None:
    """Raises ValueError if the model has fewer tokens than the tokenizer, or too short a context.

    Also beyond a sliding window of all layers (Mistral, Phi-3), which engine and policy do not apply, and
    beyond the length at which longrope's angles change, as they would for all rows that share a pass; if the
    engine cannot shape its cache; and if a model that is not of `KINDS` fails `check_packed_pass`.
    """
    vocabulary = lm.get_input_embeddings().num_embeddings
    if len(tokenizer) > vocabulary:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens but the model embeds {vocabulary}: they are not of "
            "the same model"
        )
    config = lm.config
    rope = getattr(config, "rope_parameters", None) or {}
    same = rope.get("rope_type") == "longrope" and rope.get("original_max_position_embeddings")
    slides = not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None)
    for limit, what in (
        (getattr(config, "max_position_embeddings", None), "the model's context of"),
        (same, "the length at which the model's rotary angles change (longrope),"),
        (slides, "the model's sliding window, which is not applied here, of"),
    ):
        if limit and max_episode_tokens > limit:
            raise ValueError(f"rollout.max_episode_tokens = {max_episode_tokens} exceeds {what} {limit}")
    if getattr(config, "num_key_value_heads", None) is None:
        raise ValueError(
            f"{config.model_type}'s config.json has no num_key_value_heads, which gives the engine's cache "
            "its shape: use a plain Llama/Qwen kind of decoder"
        )
    if config.model_type not in KINDS:
        check_packed_pass(lm)


@torch.no_grad()
def check_packed_pass(lm) -> None:
    """Raises ValueError if packed rows are not what transformers' eager attention makes of each row alone.

    So with models that do their own attention (nemotron, stablelm): their rows would see each other.
    """
    rows = [torch.arange(length, device=lm.device) % lm.config.vocab_size for length in (14, 9)]
    packed = dict(
        input_ids=torch.cat(rows)[None],
        position_ids=torch.cat([torch.arange(len(row), device=lm.device) for row in rows])[None],
        row_lengths=attention.row_lengths(torch.tensor([len(row) for row in rows], device=lm.device)),
    )
    training, lm_passes = lm.training, lm.eval().base_model
    lm.set_attn_implementation(attention.NAME)
    try:
        ours = lm_passes(**packed, use_cache=False).last_hidden_state[0].split([len(row) for row in rows])
        lm.set_attn_implementation("eager")
        alone = [lm_passes(row[None], use_cache=False).last_hidden_state[0] for row in rows]
    except Exception as error:  # whatever a forward pass makes of arguments that it does not know
        raise _unpackable(lm, f"{type(error).__name__}: {error}") from None
    finally:
        lm.set_attn_implementation(attention.NAME)
        lm.train(training)
    # The median: in half precision single tokens may be routed to other experts
    gaps = [
        float(((a - b).norm(dim=1) / b.norm(dim=1).clamp(min=1e-6)).median())
        for a, b in zip(ours, alone, strict=True)
    ]
    if not max(gaps) < 0.1:
        raise _unpackable(lm, f"its last hidden states differ by {max(gaps):.0%}")


def _unpackable(lm, why: str) -> ValueError:
    return ValueError(
        f"{lm.config.model_type} does not compute packed rows as it does each alone ({why}): use a decoder "
        "whose attention transformers can replace, such as Llama, Qwen or Mistral"
    )


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
