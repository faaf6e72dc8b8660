"""Attention of packed rows, registered with transformers under the name "lld".

Rows of different lengths are concatenated into a single sequence and attend only within themselves, so no
padding is computed. With `row_lengths` (the trainer) the rows are whole; with `spans` (the engine) they are
the newest tokens of rows whose past is in a cache. Without either it is plain SDPA with the given mask.

In half precision on a GPU packed rows use torch's varlen flash kernel, and one token per row uses flash-attn
where that is installed: both read only each row's own length. Elsewhere rows attend through SDPA.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

try:  # flash attention for packed rows, part of torch since 2.10; needs a GPU
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

NAME = "lld"
HALF = (torch.float16, torch.bfloat16)
# cuDNN, torch's first choice on Hopper, builds a plan per shape, and growing rows change it at every step.
torch.backends.cuda.enable_cudnn_sdp(False)


@dataclass(frozen=True)
class RowLengths:
    """Lengths of the packed rows.

    lengths: on the host. offsets: their running sums (B + 1,) int32 on the device, as GPU kernels read them.
    """

    lengths: list[int]
    offsets: torch.Tensor


def row_lengths(lengths_B: torch.Tensor) -> RowLengths:
    return RowLengths(lengths_B.tolist(), row_offsets(lengths_B))


def row_offsets(lengths_B: torch.Tensor) -> torch.Tensor:
    return pad(lengths_B.cumsum(0), (1, 0)).to(torch.int32)


def attend(
    module,
    query_BHND,
    key_BHND,
    value_BHND,
    attention_mask,
    *,
    scaling=None,
    dropout=0.0,
    row_lengths: RowLengths | None = None,
    spans=None,
    **kwargs,
):
    """(B, N, H, D) attention output and None, the interface of transformers' attention functions.

    With `row_lengths` the tensors hold one packed sequence (B = 1): causal attention within each row, by the
    varlen flash kernel for half precision on a GPU and row by row elsewhere (a row then costs no more than
    its own length). With `spans`, query holds packed tokens (B = 1), and key and value are the rows (A, T, H,
    D) of the engine's cache.
    """
    if spans is not None:
        return spans.attend(query_BHND[0].transpose(0, 1), key_BHND, value_BHND, scaling)[None], None
    if row_lengths is not None:
        return _attend_packed(query_BHND, key_BHND, value_BHND, row_lengths, scaling, dropout), None
    if query_BHND.is_cuda:
        options = {"scaling": scaling, "dropout": dropout, **kwargs}
        return sdpa_attention_forward(module, query_BHND, key_BHND, value_BHND, attention_mask, **options)
    # On a CPU transformers would repeat keys and values, which makes decoding's attention 4 times slower.
    out_BHND = scaled_dot_product_attention(
        query_BHND,
        key_BHND,
        value_BHND,
        attn_mask=attention_mask,
        is_causal=attention_mask is None and query_BHND.shape[2] > 1,
        scale=scaling,
        dropout_p=dropout,
        enable_gqa=True,
    )
    return out_BHND.transpose(1, 2).contiguous(), None


def _attend_packed(query_1HND, key_1HND, value_1HND, row_lengths: RowLengths, scale, dropout) -> torch.Tensor:
    """(1, N, H, D): causal attention within each row of one packed sequence."""
    assert query_1HND.shape[0] == 1 and sum(row_lengths.lengths) == query_1HND.shape[2]
    dtype = value_1HND.dtype
    # Under autocast the float32 rotary angles have promoted queries and keys.
    query_1HND, key_1HND = query_1HND.to(dtype), key_1HND.to(dtype)
    tensors = (query_1HND, key_1HND, value_1HND)
    if varlen_attn is not None and query_1HND.is_cuda and dtype in HALF and not dropout:
        packed = [x[0].transpose(0, 1).contiguous() for x in tensors]
        offsets, longest = row_lengths.offsets, max(row_lengths.lengths)
        options = {"scale": scale, "window_size": (-1, 0), "enable_gqa": True}
        return varlen_attn(*packed, offsets, offsets, longest, longest, **options)[None]
    if query_1HND.is_cuda:  # no fused kernel supports float32 with grouped heads
        group = query_1HND.shape[1] // key_1HND.shape[1]
        tensors = (query_1HND, key_1HND.repeat_interleave(group, 1), value_1HND.repeat_interleave(group, 1))
    rows = zip(*(x.split(row_lengths.lengths, dim=2) for x in tensors), strict=True)
    options = {"is_causal": True, "scale": scale, "dropout_p": dropout, "enable_gqa": True}
    out = [scaled_dot_product_attention(*row, **options) for row in rows]
    return torch.cat(out, dim=2).transpose(1, 2)


AttentionInterface.register(NAME, attend)
