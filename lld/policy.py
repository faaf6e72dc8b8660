"""The Hugging Face model: load it, and the log-probability and entropy of every token of a batch.

The only causal shift of the project is in `Policy.states`.
"""

import torch
from safetensors import SafetensorError
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from lld import attention
from lld.config import Model

HEAD_CHUNK = 2048  # tokens whose logits are in memory at once


def load_tokenizer(options: Model):
    """The tokenizer of a model; raises ValueError where it has no EOS, and pads with EOS where it has no pad token."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.path, trust_remote_code=options.trust_remote_code)
    except (OSError, ValueError) as error:  # ValueError: a damaged JSON file
        raise ValueError(f"cannot open the tokenizer of model.path = {options.path!r}: give a hub name or a folder with a model and its tokenizer ({error})") from None
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {options.path} has no EOS token, so no turn could end by itself; set `eos_token` in its tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        # Harmless here: masks are recorded when a token is born and never inferred from pad ids.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_lm(options: Model):
    """The causal language model from the hub or a folder, float32, on the CPU.

    float32, because at a learning rate of 1e-6 bfloat16 weights would round every update away; compute may be bf16 by autocast.
    Attention is lld/attention.py's, for the engine's masks and for packed rows. Raises ValueError
    where weights are missing, damaged or of another shape: transformers would fill the gaps with random numbers.
    """
    try:
        lm, found = AutoModelForCausalLM.from_pretrained(
            options.path, dtype=torch.float32, attn_implementation=attention.NAME, trust_remote_code=options.trust_remote_code, output_loading_info=True
        )
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"cannot load the weights of model.path = {options.path!r}: {error}") from None
    wrong = sorted(str(key) for kind in ("missing_keys", "mismatched_keys", "unexpected_keys") for key in found[kind])
    if wrong:
        raise ValueError(f"model.path = {options.path!r}: weights and config.json are not of the same model ({len(wrong)} tensors differ, the first is {wrong[0]})")
    return lm


def eos_ids(lm, tokenizer) -> tuple[int, ...]:
    """Every id that ends a turn: the tokenizer's EOS, the generation config's, and the chat format's end of turn."""
    configured = lm.generation_config.eos_token_id
    ids = {tokenizer.eos_token_id, *(configured if isinstance(configured, (list, tuple)) else [configured])}
    if tokenizer.chat_template is not None:
        vocabulary = tokenizer.get_vocab()
        ids |= {vocabulary.get(token) for token in ("<|im_end|>", "<|eot_id|>")}
    return tuple(sorted(i for i in ids if i is not None))


def check_fit(lm, tokenizer, max_episode_tokens: int) -> None:
    """Raises ValueError where tokenizer and model do not belong together or the context is too short for an episode."""
    vocabulary = lm.get_input_embeddings().num_embeddings
    if len(tokenizer) > vocabulary:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens but the model embeds {vocabulary}: they are not of the same model")
    context = getattr(lm.config, "max_position_embeddings", None)
    if context is not None and max_episode_tokens > context:
        raise ValueError(f"rollout.max_episode_tokens = {max_episode_tokens} exceeds the model's context of {context}")


class Policy(nn.Module):
    """A language model as the loss sees it: tokens in, log-probabilities and entropies out."""

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm
        lm.set_attn_implementation(attention.NAME)

    def forward(self, token_ids_BT, scored_BT, temperature: float = 1.0, entropy_gradient: bool = False):
        """Log-probability and entropy of every scored token given all tokens before it, (B, T) each in float32, else 0.

        Entry t describes token t. `scored_BT` is True on the tokens the model wrote; only for those the vocabulary is
        visited, in chunks whose logits are recomputed in the backward pass. A model in float64 gives float64.
        """
        states_NC, targets_N = self.states(token_ids_BT, scored_BT)
        logprob_N, entropy_N = token_scores(states_NC, self.lm.get_output_embeddings(), targets_N, temperature, entropy_gradient)
        zeros_BT = torch.zeros(token_ids_BT.shape, dtype=logprob_N.dtype, device=token_ids_BT.device)
        return zeros_BT.masked_scatter(scored_BT, logprob_N), zeros_BT.masked_scatter(scored_BT, entropy_N)

    def states(self, token_ids_BT, scored_BT):
        """The last hidden states (N, C) that predict the scored tokens, and these tokens (N,), row by row.

        Rows are packed: padding, and whatever follows a row's last scored token, is not computed.
        """
        position_T = torch.arange(token_ids_BT.shape[1], device=token_ids_BT.device)
        lengths_B = (scored_BT * position_T).amax(1)  # the last scored token is predicted, not read
        lengths_B[0] = lengths_B[0].clamp(min=1)  # a process without tokens must still take part in the backward pass
        read_BT = position_T < lengths_B[:, None]
        hidden_NC = self.lm.base_model(
            token_ids_BT[read_BT][None], position_ids=position_T.expand_as(read_BT)[read_BT][None], use_cache=False, row_lengths=attention.row_lengths(lengths_B[lengths_B > 0])
        ).last_hidden_state[0]
        predicts_BT = torch.nn.functional.pad(scored_BT[:, 1:], (0, 1))  # the state before token t predicts token t
        return hidden_NC[predicts_BT[read_BT]], token_ids_BT[:, 1:][scored_BT[:, 1:]]


def token_scores(hidden_NC: torch.Tensor, head: nn.Module, targets_N: torch.Tensor, temperature: float, entropy_gradient: bool):
    """Log-probability of each target and entropy of its distribution, (N,) each, with the logits of one chunk in memory."""

    def chunk_scores(hidden_nC, targets_n):
        logits_nV = head(hidden_nC)
        logits_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32)) / temperature
        normalizer_n = logits_nV.logsumexp(-1)
        logprob_n = logits_nV.gather(-1, targets_n[:, None])[:, 0] - normalizer_n
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_gradient):
            probs_nV = (logits_nV - normalizer_n[:, None]).exp()
            entropy_n = normalizer_n - (probs_nV * logits_nV).sum(-1)
        return logprob_n, entropy_n

    scores = []
    for hidden_nC, targets_n in zip(hidden_NC.split(HEAD_CHUNK), targets_N.split(HEAD_CHUNK)):
        if torch.is_grad_enabled():
            scores.append(checkpoint(chunk_scores, hidden_nC, targets_n, use_reentrant=False))
        else:
            scores.append(chunk_scores(hidden_nC, targets_n))
    logprobs, entropies = zip(*scores)
    return torch.cat(logprobs), torch.cat(entropies)
