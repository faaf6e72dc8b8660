"""Attention of packed rows, registered with transformers under the name "lld".

Rows of different lengths lie one after another in a single sequence and attend only within themselves, so no padding is
computed: whole rows with `row_lengths` (the trainer), the newest tokens of rows whose past is in a cache with `spans` (the
engine). Without either it is plain SDPA with the mask that is given.
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
PAGED = False  # whether the engine reads its cache by the varlen kernel on a GPU; off until it has run on one (tests/bench/rollout_gpu.py --paged)


@dataclass(frozen=True)
class RowLengths:
    """Lengths of the packed rows, on the host and as the running sums (B + 1,) int32 that GPU kernels read."""

    lengths: list[int]
    offsets: torch.Tensor


def row_lengths(lengths_B: torch.Tensor) -> RowLengths:
    offsets = torch.nn.functional.pad(lengths_B.cumsum(0), (1, 0)).to(torch.int32)
    return RowLengths(lengths_B.tolist(), offsets)


class Spans:
    """The newest tokens of several cache rows, packed: row r of the A rows has tokens at positions [starts[r], starts[r] + counts[r]).

    Rows with one token come first: they attend as one batch (A1, H, G, D) in which the G query heads of a key head are its
    queries; the others as a second one, padded to the longest. Masks are float, made once for all layers: SDPA would make
    them of a boolean one in each. With PAGED the varlen kernel reads the cache by row instead, every row a page, and nothing is padded.
    """

    def __init__(self, starts: list[int], counts: list[int], device, dtype):
        ends = [start + count for start, count in zip(starts, counts)]
        ends_R = torch.tensor(ends, device=device)
        if max(counts) == 1:
            self._one_each(ends_R, max(ends), dtype)
            return
        self.num_rows, self.num_tokens, self.num_single = len(counts), sum(counts), sum(count == 1 for count in counts)
        assert all(count == 1 for count in counts[: self.num_single])
        self.length, self.ends_R, counts_R = max(ends), ends_R, torch.tensor(counts, device=device)
        self.rows_N = torch.arange(self.num_rows, device=device).repeat_interleave(counts_R, output_size=self.num_tokens)
        offsets_R = counts_R.cumsum(0)
        within_N = torch.arange(self.num_tokens, device=device) - (offsets_R - counts_R)[self.rows_N]
        self.positions_N = (ends_R - counts_R)[self.rows_N] + within_N
        self.last_R, self.last = offsets_R - 1, Spans.one_each(ends_R, self.length, dtype)  # the same rows with their last token only
        self.longest = max(counts)
        self.padded_P = (self.rows_N - self.num_single)[self.num_single :] * self.longest + within_N[self.num_single :]
        self.lengths = (max(ends[: self.num_single], default=0), max(ends[self.num_single :]))
        self.varlen = self._varlen(torch.nn.functional.pad(offsets_R, (1, 0)), dtype)
        if self.varlen is None:
            self.single_mask = _mask(self.lengths[0], ends_R[: self.num_single, None, None], dtype)
            first_R1 = (ends_R - counts_R)[self.num_single :, None]
            self.mask = _mask(self.lengths[1], (first_R1 + torch.arange(1, self.longest + 1, device=device))[:, None], dtype)

    @classmethod
    def one_each(cls, ends_R: torch.Tensor, length: int, dtype) -> "Spans":
        """One token a row, the last of ends_R (R,); `length` is their largest or more. Asks the device nothing, so that a CUDA graph can hold it."""
        spans = cls.__new__(cls)
        spans._one_each(ends_R, length, dtype)
        return spans

    def _one_each(self, ends_R: torch.Tensor, length: int, dtype) -> None:
        self.num_rows = self.num_tokens = self.num_single = len(ends_R)
        self.length, self.lengths, self.longest, self.ends_R = length, (length, 0), 1, ends_R
        self.rows_N, self.positions_N = torch.arange(len(ends_R), device=ends_R.device), ends_R - 1
        self.last_R, self.last = None, self
        self.varlen = self._varlen(torch.arange(len(ends_R) + 1, device=ends_R.device), dtype)
        if self.varlen is None:
            self.single_mask = _mask(length, ends_R[:, None, None], dtype)

    def _varlen(self, offsets: torch.Tensor, dtype) -> tuple | None:
        """What the varlen kernel asks for, with every row a page; None where it is not used."""
        if not (PAGED and offsets.is_cuda and dtype in (torch.float16, torch.bfloat16)):
            return None
        return offsets.to(torch.int32), self.longest, self.ends_R.to(torch.int32), torch.arange(self.num_rows, device=offsets.device, dtype=torch.int32)[:, None]

    def attend(self, query_NHD, keys_RTHD, values_RTHD, scale) -> torch.Tensor:
        """(N, H, D): each token over the keys of its row up to itself. `keys` are those of the A rows, any T that holds the longest."""
        query_NHD = query_NHD.to(keys_RTHD.dtype)
        num_heads, dim = query_NHD.shape[1:]
        if self.varlen is not None:
            offsets, longest, ends, table = self.varlen
            return varlen_attn(query_NHD, keys_RTHD, values_RTHD, offsets, None, longest, self.length, seqused_k=ends, block_table=table, scale=scale, window_size=(-1, 0), enable_gqa=True)
        out, A1 = [], self.num_single
        if A1:
            key, value = (x[:A1, : self.lengths[0]].transpose(1, 2) for x in (keys_RTHD, values_RTHD))
            query = query_NHD[:A1].view(A1, key.shape[1], -1, dim)
            out.append(scaled_dot_product_attention(query, key, value, attn_mask=self.single_mask, scale=scale).reshape(A1, num_heads, dim))
        if A1 < self.num_rows:
            key, value = (x[A1:, : self.lengths[1]].transpose(1, 2) for x in (keys_RTHD, values_RTHD))
            query = query_NHD.new_zeros(len(key) * self.longest, num_heads, dim).index_copy(0, self.padded_P, query_NHD[A1:])
            query = query.view(len(key), self.longest, num_heads, dim).transpose(1, 2)
            attended = scaled_dot_product_attention(query, key, value, attn_mask=self.mask, scale=scale, enable_gqa=True)
            out.append(attended.transpose(1, 2).reshape(-1, num_heads, dim)[self.padded_P])
        return torch.cat(out) if len(out) > 1 else out[0]


def _mask(length: int, num_visible: torch.Tensor, dtype) -> torch.Tensor:
    """(…, length): 0 on the first `num_visible` (…) keys, -inf on the others."""
    hidden = torch.arange(length, device=num_visible.device) >= num_visible[..., None]
    return torch.zeros(hidden.shape, device=hidden.device, dtype=dtype).masked_fill_(hidden, -torch.inf)


def attend(module, query_BHND, key_BHND, value_BHND, attention_mask, *, scaling=None, dropout=0.0, row_lengths: RowLengths | None = None, spans: Spans | None = None, **kwargs):
    """(B, N, H, D) attention output and None, as transformers asks of an attention function.

    With `row_lengths` the tensors hold one packed sequence (B = 1): causal attention within each row, by the varlen flash
    kernel for half precision on a GPU and row by row elsewhere (on a CPU a row's cost then is that of its own length). With `spans`
    query holds packed tokens (B = 1), key and value the cache rows (A, T, H, D) that the engine's cache returned.
    """
    if spans is not None:
        return spans.attend(query_BHND[0].transpose(0, 1), key_BHND, value_BHND, scaling)[None], None
    if row_lengths is None and query_BHND.is_cuda:
        return sdpa_attention_forward(module, query_BHND, key_BHND, value_BHND, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    if row_lengths is None:  # transformers repeats keys and values for every query head here, which costs a decode step 4 times its attention
        causal = attention_mask is None and query_BHND.shape[2] > 1
        out_BHND = scaled_dot_product_attention(query_BHND, key_BHND, value_BHND, attn_mask=attention_mask, is_causal=causal, scale=scaling, dropout_p=dropout, enable_gqa=True)
        return out_BHND.transpose(1, 2).contiguous(), None
    assert query_BHND.shape[0] == 1 and sum(row_lengths.lengths) == query_BHND.shape[2]
    query_BHND, key_BHND = query_BHND.to(value_BHND.dtype), key_BHND.to(value_BHND.dtype)  # under autocast rotary angles made them float32
    if varlen_attn is not None and query_BHND.is_cuda and query_BHND.dtype in (torch.float16, torch.bfloat16) and not dropout:
        longest = max(row_lengths.lengths)
        query_NHD, key_NHD, value_NHD = (x[0].transpose(0, 1).contiguous() for x in (query_BHND, key_BHND, value_BHND))
        out_NHD = varlen_attn(query_NHD, key_NHD, value_NHD, row_lengths.offsets, row_lengths.offsets, longest, longest, scale=scaling, window_size=(-1, 0), enable_gqa=True)
        return out_NHD[None], None
    rows = zip(*(x.split(row_lengths.lengths, dim=2) for x in (query_BHND, key_BHND, value_BHND)))
    out = [scaled_dot_product_attention(*row, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=True) for row in rows]
    return torch.cat(out, dim=2).transpose(1, 2), None


AttentionInterface.register(NAME, attend)
