"""Attention of packed rows, registered with transformers under the name "lld".

Rows of different lengths lie one after another in a single sequence and attend only within themselves, so no padding is
computed. Without `row_lengths` it is plain SDPA with the mask that is given, which is what the engine uses.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

try:  # flash attention for packed rows, part of torch since 2.10; needs a GPU
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

NAME = "lld"


@dataclass(frozen=True)
class RowLengths:
    """Lengths of the packed rows, on the host and as the running sums (B + 1,) int32 that GPU kernels read."""

    lengths: list[int]
    offsets: torch.Tensor


def row_lengths(lengths_B: torch.Tensor) -> RowLengths:
    offsets = torch.nn.functional.pad(lengths_B.cumsum(0), (1, 0)).to(torch.int32)
    return RowLengths(lengths_B.tolist(), offsets)


def attend(module, query_BHND, key_BHND, value_BHND, attention_mask, *, scaling=None, dropout=0.0, row_lengths: RowLengths | None = None, **kwargs):
    """(B, N, H, D) attention output and None, as transformers asks of an attention function.

    With `row_lengths` the tensors hold one packed sequence (B = 1): causal attention within each row, by the varlen flash
    kernel for half precision on a GPU and row by row elsewhere (on a CPU a row's cost then is that of its own length).
    """
    if row_lengths is None and query_BHND.is_cuda:
        return sdpa_attention_forward(module, query_BHND, key_BHND, value_BHND, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    if row_lengths is None:  # transformers repeats keys and values for every query head here, which costs a decode step 4 times its attention
        causal = attention_mask is None and query_BHND.shape[2] > 1
        out_BHND = scaled_dot_product_attention(query_BHND, key_BHND, value_BHND, attn_mask=attention_mask, is_causal=causal, scale=scaling, dropout_p=dropout, enable_gqa=True)
        return out_BHND.transpose(1, 2).contiguous(), None
    assert query_BHND.shape[0] == 1 and sum(row_lengths.lengths) == query_BHND.shape[2]
    if varlen_attn is not None and query_BHND.is_cuda and query_BHND.dtype in (torch.float16, torch.bfloat16) and not dropout:
        longest = max(row_lengths.lengths)
        query_NHD, key_NHD, value_NHD = (x[0].transpose(0, 1).contiguous() for x in (query_BHND, key_BHND, value_BHND))
        out_NHD = varlen_attn(query_NHD, key_NHD, value_NHD, row_lengths.offsets, row_lengths.offsets, longest, longest, scale=scaling, window_size=(-1, 0), enable_gqa=True)
        return out_NHD[None], None
    rows = zip(*(x.split(row_lengths.lengths, dim=2) for x in (query_BHND, key_BHND, value_BHND)))
    out = [scaled_dot_product_attention(*row, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=True) for row in rows]
    return torch.cat(out, dim=2).transpose(1, 2), None


AttentionInterface.register(NAME, attend)
