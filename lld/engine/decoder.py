"""The cache of keys and values, and one forward pass of packed tokens through a decoder that reads and fills
it.

Llama, Qwen2 and Qwen3 decoders are run layer by layer here, through their own modules: transformers' forward
takes twice the operations, which is what a small batch costs, and computes the last layer for tokens whose
output nobody reads. Every other decoder, and one whose weights are sharded, goes through its own forward;
both ways the numbers agree to rounding.
"""

import torch
from torch.nn.functional import rms_norm, silu

from lld.engine.spans import Spans
from lld.model import attention
from lld.model.joined import KINDS, joined, neighbours
from lld.model.lm_head import float32_logits

LENGTH_BUCKET = 256  # the cache grows in steps of this many tokens
FEW, LARGE = range(2, 129), 2**22  # rows and weights for which a CPU multiplies slice by slice
ROPES = ("default", "linear", "llama3", "yarn")  # angles that do not depend on the length of the sequence


def grown(room: int, length: int, limit: int | None = None) -> int:
    """Tokens a row has room for after a cache with `room` had to take `length`: half as many again at least,
    no more than `limit` asks for, in whole buckets.
    """
    wanted = max(length, room * 3 // 2)
    return -(-(wanted if limit is None else max(length, min(wanted, limit))) // LENGTH_BUCKET) * LENGTH_BUCKET


class SlotCache:
    """Keys and values of all slots in one tensor (layers, 2, S, T, H, D); what transformers calls
    `past_key_values`.

    `spans` says which rows and positions the tokens of the present pass belong to. It grows with the rows up
    to `max_tokens`. On a GPU it has that size from the start: the memory must be there anyway, growing takes
    the old and the new one at once, and graphs hold its address.
    """

    def __init__(self, config, num_slots: int, device, dtype, max_tokens: int | None = None):
        heads = config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.shape, self.max_tokens = (config.num_hidden_layers, 2, num_slots, heads, dim), max_tokens
        self.options = {"device": torch.device(device), "dtype": dtype}
        whole = max_tokens is not None and self.options["device"].type == "cuda"
        self.state = self._allocate(grown(0, max_tokens) if whole else LENGTH_BUCKET)

    @property
    def room(self) -> int:
        """Tokens a row has room for."""
        return self.state.shape[3]

    def _allocate(self, length: int) -> torch.Tensor:
        *outer, heads, dim = self.shape
        # Zeros, because masked keys still enter the softmax as 0 * value and must be finite. In memory a
        # head's
        # tokens are neighbours on a CPU, whose attention takes 4 times longer otherwise; a GPU's flash
        # kernels
        # ask for whole tokens.
        if self.options["device"].type == "cuda":
            return torch.zeros(*outer, length, heads, dim, **self.options)
        return torch.zeros(*outer, heads, length, dim, **self.options).transpose(3, 4)

    def reserve(self, length: int) -> None:
        """Makes room for `length` tokens a row."""
        old = self.state
        if length > self.room:
            self.state = self._allocate(grown(self.room, length, self.max_tokens))
            self.state[:, :, :, : old.shape[3]] = old

    def write(self, layer: int, kept_N2HD: torch.Tensor) -> torch.Tensor:
        """Stores the pass's keys and values and returns those (2, A, T, H, D) of its rows."""
        state = self.state[layer]
        state[:, self.spans.rows_N, self.spans.positions_N] = kept_N2HD.transpose(0, 1).to(state.dtype)
        return state[:, : self.spans.num_rows]

    def update(self, keys_1HND, values_1HND, layer_idx, *_args, **_kwargs):
        kept_H2ND = torch.stack([keys_1HND[0], values_1HND[0]], 1)
        return self.write(layer_idx, kept_H2ND.permute(2, 1, 0, 3)).unbind()

    def move_rows(self, moves: list[tuple[int, int, int]]) -> None:
        """Copies (source, target, tokens) rows, all at once: a target may be another's source."""
        held = [self.state[:, :, source, :length].clone() for source, _, length in moves]
        for (_, target, length), row in zip(moves, held, strict=True):
            self.state[:, :, target, :length] = row

    # transformers asks this of a cache; the mask and positions it would derive from it are always given.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class Decoder:
    """`lm`'s body as a function of packed tokens; reads the weights but never keeps them (those of
    `join_weights` as views).
    """

    def __init__(self, lm):
        self.lm, self.base, config = lm, lm.base_model, lm.config
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        plain = all(type(weight) is torch.nn.Parameter for weight in lm.parameters())  # FSDP's are DTensors
        self.direct = config.model_type in KINDS and rope in ROPES and config.hidden_act == "silu" and plain
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.num_kv, self.angles_T21D = config.num_key_value_heads, torch.empty(0)
        if self.direct:
            self.qkv, self.gate_up = zip(
                *(map(joined, neighbours(layer)) for layer in self.base.layers), strict=True
            )
        else:
            lm.set_attn_implementation(attention.NAME)

    def __call__(self, token_ids_N: torch.Tensor, spans: Spans, cache) -> torch.Tensor:
        """The last hidden states (A, C) after the last token of each of the A rows; writes the keys and
        values of all tokens.
        """
        cache.spans = spans
        if not self.direct:
            inputs = dict(
                position_ids=spans.positions_N[None], past_key_values=cache, use_cache=True, spans=spans
            )
            hidden_NC = self.base(token_ids_N[None], **inputs).last_hidden_state[0]
            return hidden_NC if spans.last_R is None else hidden_NC[spans.last_R]
        hidden_NC = self.base.embed_tokens(token_ids_N)
        angles = self._angles(spans, hidden_NC, cache.room)
        for number, layer in enumerate(self.base.layers):
            attn, mlp, num_kv = layer.self_attn, layer.mlp, self.num_kv
            heads_NHD = self._heads(number, attn, _rms_norm(hidden_NC, layer.input_layernorm), *angles)
            query_NHD, kept_NHD = heads_NHD[:, : -2 * num_kv], heads_NHD[:, -2 * num_kv :]
            keys, values = cache.write(number, kept_NHD.view(len(kept_NHD), 2, num_kv, self.dim))
            last_R = spans.last_R if number == len(self.base.layers) - 1 else None
            if last_R is not None:  # of the last layer only each row's last token is read
                hidden_NC, query_NHD, spans = hidden_NC[last_R], query_NHD[last_R], spans.last
            attended_NC = spans.attend(query_NHD, keys, values, attn.scaling).flatten(1)
            hidden_NC = _add_product(hidden_NC, attended_NC, attn.o_proj)
            normed_NC = _rms_norm(hidden_NC, layer.post_attention_layernorm)
            if self.gate_up[number] is not None:
                gate_NF, up_NF = torch.nn.functional.linear(normed_NC, *self.gate_up[number]).chunk(2, 1)
                gated_NF = silu(gate_NF, inplace=True).mul_(up_NF)
            else:
                gated_NF = silu(linear(normed_NC, mlp.gate_proj)) * linear(normed_NC, mlp.up_proj)
            hidden_NC = _add_product(hidden_NC, gated_NF, mlp.down_proj)
        return _rms_norm(hidden_NC, self.base.norm)

    def _heads(
        self, number: int, attn, normed_NC: torch.Tensor, cos_N1D: torch.Tensor, sin_N1D: torch.Tensor
    ) -> torch.Tensor:
        """Queries, keys and values (N, H + 2 K, D), the first two rotated at once."""
        if self.qkv[number] is not None:
            heads_NC = torch.nn.functional.linear(normed_NC, *self.qkv[number])
        else:
            heads_NC = torch.cat([linear(normed_NC, x) for x in (attn.q_proj, attn.k_proj, attn.v_proj)], 1)
        heads_NHD = heads_NC.view(len(heads_NC), -1, self.dim)
        rotated_NHD = heads_NHD[:, : -self.num_kv]
        if hasattr(attn, "q_norm"):
            query_NHD, key_NHD = rotated_NHD[:, : -self.num_kv], rotated_NHD[:, -self.num_kv :]
            query_NHD.copy_(_rms_norm(query_NHD, attn.q_norm))
            key_NHD.copy_(_rms_norm(key_NHD, attn.k_norm))
        other_NHD = rotated_NHD.roll(self.dim // 2, -1)
        rotated_NHD.mul_(cos_N1D).addcmul_(other_NHD, sin_N1D)
        return heads_NHD

    def _angles(self, spans: Spans, like: torch.Tensor, room: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (N, 1, D) of the tokens' positions, from a table that the model's own module fills for
        a row's `room`.
        """
        if len(self.angles_T21D) < room:
            cos_1TD, sin_1TD = self.base.rotary_emb(like, torch.arange(room, device=like.device)[None])
            sin_1TD[..., : self.dim // 2] *= -1  # so that rotating is x * cos + roll(x) * sin
            self.angles_T21D = torch.stack([cos_1TD[0], sin_1TD[0]], 1)[:, :, None]
        return self.angles_T21D[spans.positions_N].unbind(1)


def linear(x_NC: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    """module(x_NC). On a CPU a few rows meet large weights slice by slice, in slices that stay in its cache:
    the libraries' own product copies the weights first.
    """
    few = type(module) is torch.nn.Linear and not x_NC.is_cuda and len(x_NC) in FEW
    if not few or torch.is_autocast_enabled("cpu") or module.weight.numel() < LARGE:
        return module(x_NC)
    weight = module.weight
    if len(weight) < 2048 or x_NC.dtype != weight.dtype:
        return module(x_NC)
    out_NV = x_NC.new_empty(len(x_NC), len(weight))
    width = max(256, 2**19 // weight.shape[1]) * torch.get_num_threads()
    for start in range(0, len(weight), width):
        torch.mm(x_NC, weight[start : start + width].T, out=out_NV[:, start : start + width])
    return out_NV if module.bias is None else out_NV.add_(module.bias)


def head_logits(hidden_NC: torch.Tensor, head: torch.nn.Module) -> torch.Tensor:
    """The LM head's logits (N, V) of all states at once, for the engine, with the rounding that
    `token_scores` has.
    """
    device = hidden_NC.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_NC.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return linear(hidden_NC, head)
    logits_NV = float32_logits(hidden_NC.to(dtype), head.weight.to(dtype))
    return logits_NV if head.bias is None else logits_NV.add_(head.bias.to(dtype))


def _fused(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a GPU's fused kernels may be called: nothing is cast on the way."""
    return x.is_cuda and x.dtype == weight.dtype and not torch.is_autocast_enabled("cuda")


def _add_product(hidden_NC: torch.Tensor, x_ND: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    """hidden + module(x), on a GPU one kernel, which writes into `hidden` and rounds the sum once."""
    plain = type(module) is torch.nn.Linear and module.bias is None and hidden_NC.dtype == x_ND.dtype
    if plain and _fused(x_ND, module.weight):
        return hidden_NC.addmm_(x_ND, module.weight.T)
    return hidden_NC + linear(x_ND, module)


def _rms_norm(x: torch.Tensor, norm) -> torch.Tensor:
    """The model's own norm. On a GPU one kernel, which rounds once: transformers rounds what is normed before
    it meets the weight as well.
    """
    if _fused(x, norm.weight):
        return rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (wide * scale).to(x.dtype)
