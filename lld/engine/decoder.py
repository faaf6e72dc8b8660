"""The KV cache, and one forward pass of packed tokens through a decoder that reads and fills it.

Llama, Qwen2 and Qwen3 decoders are run layer by layer here, through their own modules: transformers' forward
launches twice as many operations, which dominates the cost of a small batch, and computes the last layer for
tokens whose output is not used. Other decoders, and sharded ones, run through their own forward. The two
agree up to rounding.
"""

import torch
from torch.nn.functional import rms_norm, silu

from lld.engine.spans import SingleSpans, Spans
from lld.model import attention
from lld.model.joined import KINDS, joined, neighbours
from lld.model.lm_head import float32_logits

LENGTH_BUCKET = 256  # the cache grows in steps of this many tokens
# On a CPU, matmuls with this many rows and at least this many weights run slice by slice.
FEW = range(2, 129)
LARGE = 2**22
ROPES = ("default", "linear", "llama3", "yarn")  # types whose angles do not depend on the sequence length


def grown(room: int, length: int, limit: int | None = None) -> int:
    """The new row length of a cache with `room` tokens per row that must hold `length`, in whole buckets.

    At least 1.5 times `room`, but no more than `limit` or `length` requires.
    """
    wanted = max(length, room * 3 // 2)
    if limit is not None:
        wanted = max(length, min(wanted, limit))
    return -(-wanted // LENGTH_BUCKET) * LENGTH_BUCKET


class SlotCache:
    """Keys and values of all slots in one tensor (layers, 2, S, T, H, D); transformers' `past_key_values`.

    It grows with the rows up to `max_tokens`. On a GPU it has that size from the start: the memory is needed
    anyway, growing keeps the old and the new tensor in memory at once, and CUDA graphs hold its address.
    """

    def __init__(self, config, num_slots: int, device, dtype, max_tokens: int | None = None):
        heads = config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.shape = (config.num_hidden_layers, 2, num_slots, heads, dim)
        self.max_tokens = max_tokens
        self.options = {"device": torch.device(device), "dtype": dtype}
        whole = max_tokens is not None and self.options["device"].type == "cuda"
        self.keys_values = self._allocate(grown(0, max_tokens) if whole else LENGTH_BUCKET)
        self.spans: Spans | SingleSpans | None = None

    def begin_pass(self, spans: Spans | SingleSpans) -> None:
        """Sets the rows and positions of the tokens of the next forward pass.

        transformers passes only keys and values to `update`.
        """
        self.spans = spans

    @property
    def room(self) -> int:
        """Capacity of a row in tokens."""
        return self.keys_values.shape[3]

    def _allocate(self, length: int) -> torch.Tensor:
        *outer, heads, dim = self.shape
        # Zeros, because masked values still enter the sum as 0 * value and must be finite. On a CPU the
        # tokens of a head are contiguous: attention takes 4 times longer otherwise. A GPU's flash kernels
        # need all heads of a token contiguous.
        if self.options["device"].type == "cuda":
            return torch.zeros(*outer, length, heads, dim, **self.options)
        return torch.zeros(*outer, heads, length, dim, **self.options).transpose(3, 4)

    def reserve(self, length: int) -> None:
        """Grows the rows to hold `length` tokens."""
        if length > self.room:
            old = self.keys_values
            self.keys_values = self._allocate(grown(self.room, length, self.max_tokens))
            self.keys_values[:, :, :, : old.shape[3]] = old

    def write(self, layer: int, kept_N2HD: torch.Tensor) -> torch.Tensor:
        """Stores the pass's keys and values and returns those (2, A, T, H, D) of its rows."""
        stored = self.keys_values[layer]
        stored[:, self.spans.rows_N, self.spans.positions_N] = kept_N2HD.transpose(0, 1).to(stored.dtype)
        return stored[:, : self.spans.num_rows]

    def update(self, keys_1HND, values_1HND, layer_idx, *_args, **_kwargs):
        """Called by transformers' attention modules; returns keys and values of the pass's rows."""
        kept_H2ND = torch.stack([keys_1HND[0], values_1HND[0]], 1)
        return self.write(layer_idx, kept_H2ND.permute(2, 1, 0, 3)).unbind()

    def move_rows(self, moves: list[tuple[int, int, int]]) -> None:
        """Copies rows (source, target, tokens); reads all of them first, as a target may be a source."""
        held = [self.keys_values[:, :, source, :length].clone() for source, _, length in moves]
        for (_, target, length), row in zip(moves, held, strict=True):
            self.keys_values[:, :, target, :length] = row

    # transformers calls this to derive mask and positions, which are always passed explicitly here.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class Decoder:
    """`lm`'s body as a function of packed tokens.

    It reads the model's weights in place and keeps no copies, only views of joined weights (`join_weights`).
    """

    def __init__(self, lm):
        config = lm.config
        self.lm = lm
        self.base = lm.base_model
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        # FSDP2's parameters are DTensors
        plain = all(type(weight) is torch.nn.Parameter for weight in lm.parameters())
        self.direct = config.model_type in KINDS and rope in ROPES and config.hidden_act == "silu" and plain
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.num_kv = config.num_key_value_heads
        self.angles_T21D = torch.empty(0)  # a table, filled when needed
        if self.direct:
            views = [map(joined, neighbours(layer)) for layer in self.base.layers]
            self.qkv, self.gate_up = zip(*views, strict=True)
        else:
            lm.set_attn_implementation(attention.NAME)

    def __call__(self, token_ids_N: torch.Tensor, spans: Spans | SingleSpans, cache) -> torch.Tensor:
        """The last hidden states (A, C) after the last token of each of the A rows.

        Writes the keys and values of all tokens to the cache.
        """
        cache.begin_pass(spans)
        if self.direct:
            return self._run_layers(token_ids_N, spans, cache)
        inputs = {"position_ids": spans.positions_N[None], "past_key_values": cache, "use_cache": True}
        hidden_NC = self.base(token_ids_N[None], spans=spans, **inputs).last_hidden_state[0]
        return hidden_NC if spans.last_R is None else hidden_NC[spans.last_R]

    def _run_layers(self, token_ids_N: torch.Tensor, spans: Spans | SingleSpans, cache) -> torch.Tensor:
        hidden_NC = self.base.embed_tokens(token_ids_N)
        angles = self._angles(spans, hidden_NC, cache.room)
        num_kv = self.num_kv
        for number, layer in enumerate(self.base.layers):
            attn = layer.self_attn
            heads_NHD = self._heads(number, attn, _rms_norm(hidden_NC, layer.input_layernorm), *angles)
            query_NHD, kept_NHD = heads_NHD[:, : -2 * num_kv], heads_NHD[:, -2 * num_kv :]
            keys, values = cache.write(number, kept_NHD.view(len(kept_NHD), 2, num_kv, self.dim))
            if number == len(self.base.layers) - 1 and spans.last_R is not None:
                # Only each row's last token is used of the last layer.
                hidden_NC, query_NHD = hidden_NC[spans.last_R], query_NHD[spans.last_R]
                spans = spans.last
            attended_NC = spans.attend(query_NHD, keys, values, attn.scaling).flatten(1)
            hidden_NC = _add_product(hidden_NC, attended_NC, attn.o_proj)
            normed_NC = _rms_norm(hidden_NC, layer.post_attention_layernorm)
            gated_NF = self._gated(number, layer.mlp, normed_NC)
            hidden_NC = _add_product(hidden_NC, gated_NF, layer.mlp.down_proj)
        return _rms_norm(hidden_NC, self.base.norm)

    def _gated(self, number: int, mlp, normed_NC: torch.Tensor) -> torch.Tensor:
        if self.gate_up[number] is None:
            return silu(linear(normed_NC, mlp.gate_proj)) * linear(normed_NC, mlp.up_proj)
        gate_NF, up_NF = torch.nn.functional.linear(normed_NC, *self.gate_up[number]).chunk(2, 1)
        return silu(gate_NF, inplace=True).mul_(up_NF)

    def _heads(
        self, number: int, attn, normed_NC: torch.Tensor, cos_N1D: torch.Tensor, sin_N1D: torch.Tensor
    ) -> torch.Tensor:
        """Queries, keys and values (N, H + 2 K, D); queries and keys are rotated in one operation."""
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

    def _angles(
        self, spans: Spans | SingleSpans, like: torch.Tensor, room: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (N, 1, D) of the tokens' positions, from a table of `room` positions.

        The model's own rotary module fills the table.
        """
        if len(self.angles_T21D) < room:
            cos_1TD, sin_1TD = self.base.rotary_emb(like, torch.arange(room, device=like.device)[None])
            sin_1TD[..., : self.dim // 2] *= -1  # so that rotating is x * cos + roll(x) * sin
            self.angles_T21D = torch.stack([cos_1TD[0], sin_1TD[0]], 1)[:, :, None]
        return self.angles_T21D[spans.positions_N].unbind(1)


def linear(x_NC: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    """module(x_NC).

    On a CPU a matmul of few rows with a large matrix runs in slices that fit into the cache: the library's
    own matmul copies the weights first.
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
    """The LM head's logits (N, V), rounded as in training's `token_scores`."""
    device = hidden_NC.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_NC.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return linear(hidden_NC, head)
    logits_NV = float32_logits(hidden_NC.to(dtype), head.weight.to(dtype))
    return logits_NV if head.bias is None else logits_NV.add_(head.bias.to(dtype))


def _fused(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether fused GPU kernels may be called: on a GPU, with equal dtypes and no autocast."""
    return x.is_cuda and x.dtype == weight.dtype and not torch.is_autocast_enabled("cuda")


def _add_product(hidden_NC: torch.Tensor, x_ND: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    """hidden + module(x); on a GPU one kernel, which works in place on `hidden` and rounds the sum once."""
    plain = type(module) is torch.nn.Linear and module.bias is None and hidden_NC.dtype == x_ND.dtype
    if plain and _fused(x_ND, module.weight):
        return hidden_NC.addmm_(x_ND, module.weight.T)
    return hidden_NC + linear(x_ND, module)


def _rms_norm(x: torch.Tensor, norm) -> torch.Tensor:
    """The model's norm. On a GPU one kernel, which rounds once; transformers rounds twice."""
    if _fused(x, norm.weight):
        return rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (wide * scale).to(x.dtype)
