"""The Hugging Face model: load it, and the log-probability and entropy of every token of a batch.

The only causal shift of training is in `Policy.states`.
"""

import copy
import os
import re
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from lld.config import Model
from lld.model import attention
from lld.model.joined import join_weights

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model")
# Logits in memory at once: 8 MB stay in a CPU's cache; elsewhere 2**27, to fill a GPU
SLICE_LOGITS = {"cpu": 2**21}


def check_folder(where: str, option: str, hub: bool = True) -> None:
    """Raises ValueError where `where` is, or can only be, a folder without a model, with the one that may be
    meant.

    What may be a hub name passes if `hub`, with a line that says so: the hub's answer to a misspelt folder
    comes late and says little.
    """
    path = Path(where).expanduser()
    if (path / "config.json").is_file():
        return
    if path.is_dir():
        inside = sorted(
            found.parent for pattern in ("*/config.json", "*/*/config.json") for found in path.glob(pattern)
        )
        remedy = f"did you mean {inside[-1]}?" if inside else "give a folder that from_pretrained opens"
        raise ValueError(f"{option} {where}: no config.json in it; {remedy}")
    there = sorted(found.parent.name for found in path.parent.glob("step_*/config.json"))
    if there:
        raise ValueError(f"{option} {where}: no such folder; {path.parent} holds {', '.join(there)}")
    # As the hub does
    named = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", where) and (
        path.parent == Path() or not path.parent.is_dir()
    )
    if named and hub:
        print(f"{option} {where}: no such folder here; asking the hub", file=sys.stderr)
        return
    remedy = (
        "or a hub name such as Qwen/Qwen2.5-3B (which cannot begin with the name of a folder here)"
        if hub
        else f"or for a hub name: `hf download {where if named else 'NAME'} --local-dir DIR`"
    )
    raise ValueError(f"{option} {where}: no such folder; give one that from_pretrained opens, {remedy}")


def load_tokenizer(options: Model):
    """The tokenizer of a model; raises ValueError where it has no EOS, and pads with EOS where it has no pad
    token."""
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
        # Harmless here: masks are recorded when a token is born and never inferred from pad ids.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def read_shape(options: Model) -> PreTrainedConfig:
    """The model's config.json, but for its word on how attention is computed: there a file may name a kernel
    on the hub, which is code."""
    shape = AutoConfig.from_pretrained(options.path, trust_remote_code=options.trust_remote_code)
    shape._attn_implementation = attention.NAME
    if getattr(shape, "quantization_config", None):
        raise ValueError(
            "its weights are quantized (quantization_config), and cannot be trained: give the model they "
            "were made from"
        )
    return shape


def load_lm(options: Model):
    """The causal language model from the hub or a folder, float32, on the CPU.

    float32, because at a learning rate of 1e-6 bfloat16 weights would round every update away; compute may be
    bf16 by autocast. Attention is lld/model/attention.py's, for the engine's masks and for packed rows. Raises
    ValueError where weights are missing, damaged or of another shape: transformers would fill the gaps with
    random numbers.
    """
    # Accelerate's launcher turns it on, and then transformers gives all processes but one empty weights
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    try:
        lm, found = AutoModelForCausalLM.from_pretrained(
            options.path,
            config=read_shape(options),
            dtype=torch.float32,
            attn_implementation=attention.NAME,
            trust_remote_code=options.trust_remote_code,
            output_loading_info=True,
        )
    except Exception as error:  # whatever a damaged or hostile file makes of it: transformers checks little
        raise ValueError(
            f"cannot load the weights of model.path = {options.path!r}: {type(error).__name__}: {error}"
        ) from None
    wrong = sorted(
        str(key) for kind in ("missing_keys", "mismatched_keys", "unexpected_keys") for key in found[kind]
    )
    if wrong:
        raise ValueError(
            f"model.path = {options.path!r}: weights and config.json are not of the same model "
            f"({len(wrong)} tensors differ, the first is {wrong[0]})"
        )
    return lm


def eos_ids(lm, tokenizer) -> tuple[int, ...]:
    """Every id that ends a turn: the tokenizer's EOS, the generation config's, and the chat format's end of
    turn."""
    configured = lm.generation_config.eos_token_id
    ids = {tokenizer.eos_token_id, *(configured if isinstance(configured, (list, tuple)) else [configured])}
    if tokenizer.chat_template is not None:
        vocabulary = tokenizer.get_vocab()
        ids |= {vocabulary.get(token) for token in ("<|im_end|>", "<|eot_id|>")}
    return tuple(sorted(i for i in ids if i is not None))


def check_fit(lm, tokenizer, max_episode_tokens: int) -> None:
    """Raises ValueError where tokenizer and model do not belong together or the context is too short for an
    episode."""
    vocabulary = lm.get_input_embeddings().num_embeddings
    if len(tokenizer) > vocabulary:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens but the model embeds {vocabulary}: they are not of "
            "the same model"
        )
    context = getattr(lm.config, "max_position_embeddings", None)
    if context is not None and max_episode_tokens > context:
        raise ValueError(
            f"rollout.max_episode_tokens = {max_episode_tokens} exceeds the model's context of {context}"
        )


def engine_model(lm: nn.Module, device: torch.device, *, half: bool, share: bool = False) -> nn.Module:
    """A frozen copy of `lm` as the engine reads it, in training as in evaluation: on `device`, in bfloat16
    where `half`.

    Buffers keep their type: bf16 is too coarse for rotary frequencies (with Qwen2.5's, 1.15 rad off at
    position 1,000). With `share`, weights that need neither another place nor another type are those of `lm`,
    not copies.
    """
    dtype = torch.bfloat16 if half else torch.float32
    weights = {
        id(weight): nn.Parameter(weight.detach().to(device, dtype, copy=not share), requires_grad=False)
        for weight in lm.parameters()
    }
    # Deepcopy takes these for copies made already, tied ones once
    copied = copy.deepcopy(lm, weights).to(device).eval()
    if device.type == "cuda":
        join_weights(copied)
    return copied


class Policy(nn.Module):
    """A language model as the loss sees it: tokens in, log-probabilities and entropies out."""

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm
        lm.set_attn_implementation(attention.NAME)

    def forward(self, token_ids_BT, scored_BT, temperature: float = 1.0, entropy_gradient: bool = False):
        """Log-probability and entropy of every scored token given all tokens before it, (B, T) each in
        float32, else 0.

        Entry t describes token t. `scored_BT` is True on the tokens the model wrote; only for those the
        vocabulary is visited, in slices whose logits are recomputed in the backward pass. A model in float64
        gives float64.
        """
        head, embeddings = self.lm.get_output_embeddings(), self.lm.get_input_embeddings()
        # In half precision the sum over a frequent token would lose most of its terms
        whole = head.weight.dtype in (torch.float32, torch.float64)
        tied = (
            []
            if whole
            and head.weight is embeddings.weight
            and head.bias is None
            and type(embeddings) is nn.Embedding
            else None
        )
        states_NC, targets_N = self.states(token_ids_BT, scored_BT, tied)
        logprob_N, entropy_N = token_scores(states_NC, head, targets_N, temperature, entropy_gradient, tied)
        zeros_BT = torch.zeros(token_ids_BT.shape, dtype=logprob_N.dtype, device=token_ids_BT.device)
        return zeros_BT.masked_scatter(scored_BT, logprob_N), zeros_BT.masked_scatter(scored_BT, entropy_N)

    def states(self, token_ids_BT, scored_BT, tied: list | None = None):
        """The last hidden states (N, C) that predict the scored tokens, and these tokens (N,), row by row.

        Rows are packed: padding, and whatever follows a row's last scored token, is not computed. `tied`: see
        `TiedEmbedding`.
        """
        position_T = torch.arange(token_ids_BT.shape[1], device=token_ids_BT.device)
        lengths_B = (scored_BT * position_T).amax(1)  # the last scored token is predicted, not read
        # A process without tokens must still take part in the backward pass
        lengths_B[0] = lengths_B[0].clamp(min=1)
        read_BT = position_T < lengths_B[:, None]
        embeddings, tokens_1N = self.lm.get_input_embeddings(), token_ids_BT[read_BT][None]
        inputs = (
            {"input_ids": tokens_1N}
            if tied is None
            else {
                "inputs_embeds": TiedEmbedding.apply(
                    embeddings.weight, tokens_1N, embeddings.padding_idx, tied
                )
            }
        )
        rows = dict(
            position_ids=position_T.expand_as(read_BT)[read_BT][None],
            row_lengths=attention.row_lengths(lengths_B[lengths_B > 0]),
        )
        hidden_NC = self.lm.base_model(**inputs, **rows, use_cache=False).last_hidden_state[0]
        # The state before token t predicts token t
        predicts_BT = torch.nn.functional.pad(scored_BT[:, 1:], (0, 1))
        return hidden_NC[predicts_BT[read_BT]], token_ids_BT[:, 1:][scored_BT[:, 1:]]


class TiedEmbedding(torch.autograd.Function):
    """Rows of a weight that is the LM head's too: their gradient is added to the head's in place, where
    autograd would make a second (V, C) matrix.

    `tied` is a list for one forward pass: the head, whose backward pass always comes first, leaves its
    gradient in it.
    """

    @staticmethod
    def forward(ctx, weight_VC, token_ids, padding_idx, tied):
        ctx.save_for_backward(token_ids)
        ctx.shape, ctx.padding_idx, ctx.tied = weight_VC.shape, padding_idx, tied
        return nn.functional.embedding(token_ids, weight_VC)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (token_ids,) = ctx.saved_tensors
        token_ids_N, grad_NC = token_ids.flatten(), grad.flatten(0, -2)
        if ctx.padding_idx is not None:  # nn.Embedding does not train it
            grad_NC = grad_NC * (token_ids_N != ctx.padding_idx)[:, None]
        alone = not ctx.tied
        weight_grad_VC = grad_NC.new_zeros(ctx.shape) if alone else ctx.tied.pop()
        if grad.is_cuda:  # of the two ways to add rows, the one that always sums in the same order
            weight_grad_VC.index_put_((token_ids_N,), grad_NC.to(weight_grad_VC.dtype), accumulate=True)
        else:
            weight_grad_VC.index_add_(0, token_ids_N, grad_NC.to(weight_grad_VC.dtype))
        return weight_grad_VC if alone else None, None, None, None


def token_scores(
    hidden_NC: torch.Tensor,
    head: nn.Linear,
    targets_N: torch.Tensor,
    temperature: float,
    entropy_gradient: bool,
    tied: list | None = None,
):
    """Log-probability of each target and entropy of its distribution, (N,) each, float32 at least; only a
    slice of the logits is ever in memory.

    Under autocast the head's weights are cast slice by slice. `tied`: see `TiedEmbedding`.
    """
    weight_VC = head.weight
    if head.bias is not None:  # one more input that is always 1
        hidden_NC, weight_VC = (
            nn.functional.pad(hidden_NC, (0, 1), value=1.0),
            torch.cat([weight_VC, head.bias[:, None]], 1),
        )
    if torch.is_autocast_enabled(hidden_NC.device.type):
        hidden_NC = hidden_NC.to(torch.get_autocast_dtype(hidden_NC.device.type))
    return TokenScores.apply(hidden_NC, weight_VC, targets_N, temperature, entropy_gradient, tied)


class TokenScores(torch.autograd.Function):
    """`token_scores` slice by slice over the vocabulary: an online softmax in the forward pass, the logits
    computed again in the backward pass.

    Slices of the vocabulary, not of the tokens: each weight is then read, and its gradient written, once a
    pass.
    """

    @staticmethod
    def forward(ctx, hidden_NC, weight_VC, targets_N, temperature, entropy_gradient, tied):
        dtype = torch.promote_types(hidden_NC.dtype, torch.float32)
        max_N = hidden_NC.new_full(targets_N.shape, torch.finfo(dtype).min, dtype=dtype)
        # Sums of e^(l - max) and of e^(l - max) (l - max) so far; the target's l
        sum_N, dot_N, target_N = (torch.zeros_like(max_N) for _ in range(3))
        for start, _, logits_Nv in sliced_logits(hidden_NC, weight_VC, temperature):
            inside_N, column_N1 = locate(targets_N, start, logits_Nv)
            target_N = torch.where(inside_N, logits_Nv.gather(1, column_N1)[:, 0], target_N)
            past_N, max_N = max_N, torch.maximum(max_N, logits_Nv.amax(1))
            shrink_N = (past_N - max_N).exp()
            exps_Nv = logits_Nv.sub_(max_N[:, None]).exp()
            dot_N = shrink_N * (dot_N + sum_N * (past_N - max_N)) + logits_Nv.mul_(exps_Nv).sum(1)
            sum_N = shrink_N * sum_N + exps_Nv.sum(1)
        entropy_N = sum_N.log() - dot_N / sum_N
        ctx.save_for_backward(hidden_NC, weight_VC, targets_N, max_N + sum_N.log(), entropy_N)
        ctx.temperature, ctx.entropy_gradient, ctx.tied = temperature, entropy_gradient, tied
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return target_N - max_N - sum_N.log(), entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, logprob_grad_N, entropy_grad_N):
        """d log p(target) / dl_v = [v is the target] - p_v and dH / dl_v = -p_v (log p_v + H)."""
        hidden_NC, weight_VC, targets_N, normalizer_N, entropy_N = ctx.saved_tensors
        hidden_grad_NC, weight_grad_VC = (
            torch.zeros_like(hidden_NC, dtype=normalizer_N.dtype),
            torch.empty_like(weight_VC),
        )
        for start, weight_vC, logits_Nv in sliced_logits(hidden_NC, weight_VC, ctx.temperature):
            inside_N, column_N1 = locate(targets_N, start, logits_Nv)
            logp_Nv = logits_Nv.sub_(normalizer_N[:, None])
            pull_Nv = (
                logprob_grad_N[:, None] + (logp_Nv + entropy_N[:, None]) * entropy_grad_N[:, None]
                if ctx.entropy_gradient
                else logprob_grad_N[:, None]
            )
            grad_Nv = (
                logp_Nv.exp_()
                .mul_(-pull_Nv)
                .scatter_add_(1, column_N1, torch.where(inside_N, logprob_grad_N, 0.0)[:, None])
            )
            grad_Nv = (grad_Nv if ctx.temperature == 1 else grad_Nv.div_(ctx.temperature)).to(hidden_NC.dtype)
            hidden_grad_NC += grad_Nv @ weight_vC
            weight_grad_vC = weight_grad_VC[start : start + len(weight_vC)]
            if weight_vC.dtype == weight_VC.dtype:
                torch.mm(grad_Nv.T, hidden_NC, out=weight_grad_vC)
            else:
                weight_grad_vC.copy_(grad_Nv.T @ hidden_NC)
        if ctx.tied is not None:
            ctx.tied.append(weight_grad_VC)
        return hidden_grad_NC.to(hidden_NC.dtype), weight_grad_VC, None, None, None, None


def sliced_logits(hidden_NC: torch.Tensor, weight_VC: torch.Tensor, temperature: float):
    """Yields (first id, weights (v, C) in the type of the states, logits (N, v) in float32 at least) of
    slices of the vocabulary; the caller may write into the logits."""
    width = max(1024, SLICE_LOGITS.get(hidden_NC.device.type, 2**27) // max(1, len(hidden_NC)))
    for start in range(0, len(weight_VC), width):
        weight_vC = weight_VC[start : start + width].to(hidden_NC.dtype)
        logits_Nv = float32_logits(hidden_NC, weight_vC)
        yield start, weight_vC, logits_Nv if temperature == 1 else logits_Nv.div_(temperature)


def float32_logits(hidden_NC: torch.Tensor, weight_VC: torch.Tensor) -> torch.Tensor:
    """hidden @ weight.T (N, V) in float32 at least, for states and weights of one type.

    Products of half precision are summed in float32 anyway. Rounded to bf16 afterwards, a logit near 20 would
    be off by up to .06 and log-probabilities by .02 on average, which is more than an update with a learning
    rate of 1e-6 moves them.
    """
    if hidden_NC.dtype not in (torch.bfloat16, torch.float16):
        return hidden_NC @ weight_VC.T
    if hidden_NC.is_cuda:
        return torch.mm(hidden_NC, weight_VC.T, out_dtype=torch.float32)
    with torch.autocast(hidden_NC.device.type, enabled=False):  # a CPU has no such product
        return hidden_NC.float() @ weight_VC.float().T


def locate(targets_N: torch.Tensor, start: int, logits_Nv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each target lies in this slice, and its column (N, 1) there (column 0 where it does not)."""
    column_N = targets_N - start
    inside_N = (column_N >= 0) & (column_N < logits_Nv.shape[1])
    return inside_N, torch.where(inside_N, column_N, 0)[:, None]
