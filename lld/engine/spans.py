"""Which rows of the cache the packed tokens of one pass belong to, and how they attend to them."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from lld.model.attention import HALF, row_offsets, varlen_attn

try:  # requirements-gpu.txt
    from flash_attn import flash_attn_with_kvcache
except ImportError:
    flash_attn_with_kvcache = None

# Lengths of masks on a GPU are multiples of this: few shapes, and kernels pad what is no multiple of 8.
KEY_BUCKET = 64


def reads_exactly(ends_R: torch.Tensor, dtype) -> bool:
    """Whether one token a row is attended by a kernel that looks at each row's own length, not at that of the
    longest.
    """
    return flash_attn_with_kvcache is not None and ends_R.is_cuda and dtype in HALF


class Spans:
    """The newest tokens of several cache rows, packed: row r of the A rows has its last counts[r] tokens of
    ends[r].

    Rows with one token come first and attend as one batch, by flash-attn or through SDPA, where the G query
    heads of a key head are its queries (A1, H, G, D). The others follow: packed to the varlen kernel, or
    padded to the longest through SDPA. Masks are float, made once for all layers: SDPA would make them of a
    boolean one in each.
    """

    def __init__(
        self, ends: list[int], counts: list[int], ends_R: torch.Tensor, counts_R: torch.Tensor, dtype
    ):
        """`ends_R` and `counts_R` are the same numbers as `ends` and `counts`, on the device."""
        A, N, A1 = len(counts), sum(counts), sum(count == 1 for count in counts)
        self.num_rows, self.num_single = A, A1
        assert A1 < A and all(count == 1 for count in counts[:A1])
        device, self.longest = ends_R.device, max(counts)
        self.rows_N = torch.arange(A, device=device).repeat_interleave(counts_R, output_size=N)
        last_R = counts_R.cumsum(0) - 1
        self.positions_N = (ends_R - 1 - last_R)[self.rows_N] + torch.arange(N, device=device)
        self.last_R = last_R
        self.last = Spans.one_each(ends_R, max(ends), dtype)  # the same rows with their last token only
        self.one = Spans.one_each(ends_R[:A1], max(ends[:A1]), dtype) if A1 else None
        self.length, self.offsets = max(ends[A1:]), None
        if varlen_attn is not None and ends_R.is_cuda and dtype in HALF:
            self.offsets, self.used = row_offsets(counts_R[A1:]), ends_R[A1:].to(torch.int32)
            return
        within_N = self.positions_N - (ends_R - counts_R)[self.rows_N]
        self.padded_P = ((self.rows_N - A1) * self.longest + within_N)[A1:]
        self.length = _rounded(self.length, device)
        visible_BL = (ends_R - counts_R)[A1:, None] + torch.arange(1, self.longest + 1, device=device)
        self.mask = _mask(self.length, visible_BL[:, None], dtype)

    @classmethod
    def one_each(cls, ends_R: torch.Tensor, length: int, dtype) -> "Spans":
        """One token a row, the last of ends_R (R,); `length` is their largest or more. Asks the device
        nothing, so that a CUDA graph can hold it.
        """
        spans = cls.__new__(cls)
        spans.num_rows = spans.num_single = len(ends_R)
        spans.rows_N, spans.positions_N = torch.arange(len(ends_R), device=ends_R.device), ends_R - 1
        spans.last_R, spans.last, spans.one = None, spans, spans
        if reads_exactly(ends_R, dtype):
            spans.used, spans.mask = ends_R.to(torch.int32), None
        else:
            spans.length = _rounded(length, ends_R.device)
            spans.mask = _mask(spans.length, ends_R[:, None, None], dtype)
        return spans

    def attend(self, query_NHD, keys_RTHD, values_RTHD, scale) -> torch.Tensor:
        """(N, H, D): each token over the keys of its row up to itself. `keys` are those of the A rows, any T
        that holds the longest.
        """
        query_NHD, A1 = query_NHD.to(keys_RTHD.dtype), self.num_single
        out = []
        if A1:
            out.append(self.one._attend_one(query_NHD[:A1], keys_RTHD[:A1], values_RTHD[:A1], scale))
        if self.num_rows > A1:
            several = self._attend_packed if self.offsets is not None else self._attend_padded
            out.append(several(query_NHD[A1:], keys_RTHD[A1:], values_RTHD[A1:], scale))
        return torch.cat(out) if len(out) > 1 else out[0]

    def _attend_one(self, query_AHD, keys_ATHD, values_ATHD, scale) -> torch.Tensor:
        if self.mask is None:
            options = {"cache_seqlens": self.used, "softmax_scale": scale, "causal": True}
            return flash_attn_with_kvcache(query_AHD[:, None], keys_ATHD, values_ATHD, **options)[:, 0]
        key, value = (x[:, : self.length].transpose(1, 2) for x in (keys_ATHD, values_ATHD))
        query = query_AHD.view(len(key), key.shape[1], -1, key.shape[3])
        out = scaled_dot_product_attention(query, key, value, attn_mask=self.mask, scale=scale)
        return out.reshape(query_AHD.shape)

    def _attend_packed(self, query_NHD, keys_BTHD, values_BTHD, scale) -> torch.Tensor:
        """The cache is a packed sequence too: its rows have room for T tokens each, of which the first `used`
        count.
        """
        B, T = keys_BTHD.shape[:2]
        starts = torch.arange(0, (B + 1) * T, T, device=query_NHD.device, dtype=torch.int32)
        keys, values = keys_BTHD.flatten(0, 1), values_BTHD.flatten(0, 1)
        options = {"seqused_k": self.used, "scale": scale, "window_size": (-1, 0), "enable_gqa": True}
        return varlen_attn(
            query_NHD, keys, values, self.offsets, starts, self.longest, self.length, **options
        )

    def _attend_padded(self, query_NHD, keys_BTHD, values_BTHD, scale) -> torch.Tensor:
        (_, H, D), B, L = query_NHD.shape, len(keys_BTHD), self.longest
        key, value = (x[:, : self.length].transpose(1, 2) for x in (keys_BTHD, values_BTHD))
        query = query_NHD.new_zeros(B * L, H, D).index_copy(0, self.padded_P, query_NHD)
        if not query.is_cuda:
            out = scaled_dot_product_attention(
                query.view(B, L, H, D).transpose(1, 2),
                key,
                value,
                attn_mask=self.mask,
                scale=scale,
                enable_gqa=True,
            )
            return out.transpose(1, 2).reshape(-1, H, D)[self.padded_P]
        # No fused kernel of CUDA takes a mask and grouped heads: a key head's query heads become its queries.
        K, G = key.shape[1], H // key.shape[1]
        query = query.view(B, L, K, G, D).permute(0, 2, 1, 3, 4).reshape(B, K, L * G, D)
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=self.mask.repeat_interleave(G, 2), scale=scale
        )
        return out.view(B, K, L, G, D).transpose(1, 2).reshape(-1, H, D)[self.padded_P]


def _rounded(length: int, device: torch.device) -> int:
    return -(-length // KEY_BUCKET) * KEY_BUCKET if device.type == "cuda" else length


def _mask(length: int, num_visible: torch.Tensor, dtype) -> torch.Tensor:
    """(…, length): 0 on the first `num_visible` (…) keys, -inf on the others."""
    hidden = torch.arange(length, device=num_visible.device) >= num_visible[..., None]
    return torch.zeros(hidden.shape, device=hidden.device, dtype=dtype).masked_fill_(hidden, -torch.inf)
