"""The cache of keys and values, and one forward pass of packed tokens through a decoder that reads and fills it.

Llama, Qwen2 and Qwen3 decoders are run layer by layer here, through their own modules: transformers' forward takes twice the
operations, which is what a small batch costs, and computes the last layer for tokens whose output nobody reads. Every other
decoder, and one whose weights are sharded, goes through its own forward; both ways the numbers agree to rounding.
"""

import torch
from torch.nn.functional import silu

from lld import attention
from lld.attention import Spans
from lld.policy import float32_logits

KINDS = ("llama", "qwen2", "qwen3")
LENGTH_BUCKET = 256  # the cache grows in steps of this many tokens
FEW, LARGE = range(2, 129), 2**22  # rows and weights for which a CPU multiplies slice by slice
ROPES = ("default", "linear", "llama3", "yarn")  # angles that do not depend on the length of the sequence


def grown(room: int, length: int) -> int:
    """Tokens a row has room for after a cache with `room` had to take `length`: half as many again at least, in whole buckets."""
    return -(-max(length, room * 3 // 2) // LENGTH_BUCKET) * LENGTH_BUCKET


class SlotCache:
    """Keys and values of all slots in one tensor (layers, 2, S, T, H, D); what transformers calls `past_key_values`.

    `spans` says which rows and positions the tokens of the present pass belong to.
    """

    def __init__(self, config, num_slots: int, device, dtype):
        heads = config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.shape, self.options = (config.num_hidden_layers, 2, num_slots, heads, dim), dict(device=torch.device(device), dtype=dtype)
        self.state = self._allocate(LENGTH_BUCKET)

    def _allocate(self, length: int) -> torch.Tensor:
        *outer, heads, dim = self.shape
        # Zeros, because masked keys still enter the softmax as 0 * value and must be finite. In memory a head's tokens are
        # neighbours on a CPU, whose attention takes 4 times longer otherwise; a GPU's varlen kernel asks for whole tokens.
        if self.options["device"].type == "cuda":
            return torch.zeros(*outer, length, heads, dim, **self.options)
        return torch.zeros(*outer, heads, length, dim, **self.options).transpose(3, 4)

    def reserve(self, length: int) -> None:
        """Makes room for `length` tokens a row."""
        old = self.state
        if length > old.shape[3]:
            self.state = self._allocate(grown(old.shape[3], length))
            self.state[:, :, :, : old.shape[3]] = old

    def write(self, layer: int, keys_NHD: torch.Tensor, values_NHD: torch.Tensor) -> torch.Tensor:
        """Stores the pass's tokens and returns keys and values (2, A, T, H, D) of its rows."""
        at = (self.spans.rows_N, self.spans.positions_N)
        for kept, new in zip(self.state[layer], (keys_NHD, values_NHD)):
            kept.index_put_(at, new.to(kept.dtype))
        return self.state[layer, :, : self.spans.num_rows]

    def update(self, keys_1HND, values_1HND, layer_idx, *_args, **_kwargs):
        return self.write(layer_idx, keys_1HND[0].transpose(0, 1), values_1HND[0].transpose(0, 1)).unbind()

    def move_rows(self, moves: list[tuple[int, int, int]]) -> None:
        """Copies (source, target, tokens) rows, all at once: a target may be another's source."""
        held = [self.state[:, :, source, :length].clone() for source, _, length in moves]
        for (_, target, length), row in zip(moves, held):
            self.state[:, :, target, :length] = row

    # transformers asks this of a cache; the mask and positions it would derive from it are always given.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class Decoder:
    """`lm`'s body as a function of packed tokens; reads the weights but never keeps them."""

    def __init__(self, lm):
        self.lm, self.base, config = lm, lm.base_model, lm.config
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        plain = all(type(parameter) is torch.nn.Parameter for parameter in lm.parameters())  # FSDP's are DTensors
        self.direct = config.model_type in KINDS and rope in ROPES and config.hidden_act == "silu" and plain
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cos_T1D = torch.empty(0)
        if not self.direct:
            lm.set_attn_implementation(attention.NAME)

    def __call__(self, token_ids_N: torch.Tensor, spans: Spans, cache) -> torch.Tensor:
        """The last hidden states (A, C) after the last token of each of the A rows; writes the keys and values of all tokens."""
        cache.spans = spans
        if not self.direct:
            inputs = dict(position_ids=spans.positions_N[None], past_key_values=cache, use_cache=True, spans=spans)
            hidden_NC = self.base(token_ids_N[None], **inputs).last_hidden_state[0]
            return hidden_NC if spans.last_R is None else hidden_NC[spans.last_R]
        hidden_NC = self.base.embed_tokens(token_ids_N)
        cos_N1D, sin_N1D = self._angles(spans, hidden_NC)
        for number, layer in enumerate(self.base.layers):
            attn, normed_NC = layer.self_attn, _rms_norm(hidden_NC, layer.input_layernorm)
            heads = lambda project, norm: self._heads(linear(normed_NC, project), getattr(attn, norm, None))
            keys, values = cache.write(number, _rotate(heads(attn.k_proj, "k_norm"), cos_N1D, sin_N1D), heads(attn.v_proj, ""))
            if number == len(self.base.layers) - 1 and spans.last_R is not None:  # of the last layer only each row's last token is read
                hidden_NC, normed_NC, cos_N1D, sin_N1D = (x[spans.last_R] for x in (hidden_NC, normed_NC, cos_N1D, sin_N1D))
                spans = spans.last
            query = _rotate(heads(attn.q_proj, "q_norm"), cos_N1D, sin_N1D)
            hidden_NC = hidden_NC + linear(spans.attend(query, keys, values, attn.scaling).flatten(1), attn.o_proj)
            normed_NC = _rms_norm(hidden_NC, layer.post_attention_layernorm)
            hidden_NC = hidden_NC + linear(silu(linear(normed_NC, layer.mlp.gate_proj)) * linear(normed_NC, layer.mlp.up_proj), layer.mlp.down_proj)
        return _rms_norm(hidden_NC, self.base.norm)

    def _heads(self, x_NC: torch.Tensor, norm) -> torch.Tensor:
        x_NHD = x_NC.view(len(x_NC), -1, self.dim)
        return x_NHD if norm is None else _rms_norm(x_NHD, norm)

    def _angles(self, spans: Spans, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (N, 1, D) of the tokens' positions, from a table that the model's own module fills."""
        if len(self.cos_T1D) < spans.length:
            positions_1T = torch.arange(2 * spans.length, device=like.device)[None]
            cos_1TD, sin_1TD = self.base.rotary_emb(like, positions_1T)
            sin_1TD[..., : self.dim // 2] *= -1  # so that rotating is x * cos + roll(x) * sin
            self.cos_T1D, self.sin_T1D = cos_1TD[0, :, None], sin_1TD[0, :, None]
        return self.cos_T1D[spans.positions_N], self.sin_T1D[spans.positions_N]


def linear(x_NC: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    """module(x_NC). On a CPU a few rows meet large weights slice by slice, in slices that stay in its cache: the libraries' own product copies the weights first."""
    few = type(module) is torch.nn.Linear and not x_NC.is_cuda and len(x_NC) in FEW and not torch.is_autocast_enabled("cpu")
    if not few or module.weight.numel() < LARGE or len(module.weight) < 2048 or x_NC.dtype != module.weight.dtype:
        return module(x_NC)
    weight = module.weight
    out_NV, width = x_NC.new_empty(len(x_NC), len(weight)), max(256, 2**19 // weight.shape[1]) * torch.get_num_threads()
    for start in range(0, len(weight), width):
        torch.mm(x_NC, weight[start : start + width].T, out=out_NV[:, start : start + width])
    return out_NV if module.bias is None else out_NV.add_(module.bias)


def head_logits(hidden_NC: torch.Tensor, head: torch.nn.Module) -> torch.Tensor:
    """The LM head's logits (N, V) of all states at once, for the engine, with the rounding that `token_scores` has."""
    device = hidden_NC.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_NC.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return linear(hidden_NC, head)
    logits_NV = float32_logits(hidden_NC.to(dtype), head.weight.to(dtype))
    return logits_NV if head.bias is None else logits_NV.add_(head.bias.to(dtype))


def _rotate(x_NHD: torch.Tensor, cos_N1D: torch.Tensor, sin_N1D: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(x_NHD * cos_N1D, x_NHD.roll(x_NHD.shape[-1] // 2, -1), sin_N1D)


def _rms_norm(x: torch.Tensor, norm) -> torch.Tensor:
    wide = x.float()
    return norm.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)).to(x.dtype)
