"""Which rows of the cache the packed tokens of one pass belong to, and how they attend to them."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from lld.model.attention import HALF, row_offsets, varlen_attn

try:  # requirements-gpu.txt
    from flash_attn import flash_attn_with_kvcache
except ImportError:
    flash_attn_with_kvcache = None

# On a GPU, mask lengths are multiples of this: few shapes, and kernels would pad to multiples of 8.
KEY_BUCKET = 64


def reads_exactly(ends_R: torch.Tensor, dtype) -> bool:
    """Whether a kernel attends one token per row over that row's own length instead of the longest."""
    return flash_attn_with_kvcache is not None and ends_R.is_cuda and dtype in HALF


class SingleSpans:
    """The newest token of each of several cache rows: they attend as one batch.

    By flash-attn, or through SDPA with the G query heads of a key head as its queries (R, H, G, D). The mask
    is float and shared by all layers: SDPA would convert a boolean one in each.
    """

    last_R = None  # every token is the last of its row

    def __init__(self, ends_R: torch.Tensor, length: int, dtype):
        """`ends_R`: tokens in each row, the new one included; `length`: their maximum or more.

        Never synchronises, so it can be captured in a CUDA graph.
        """
        self.num_rows = len(ends_R)
        self.rows_N = torch.arange(len(ends_R), device=ends_R.device)
        self.positions_N = ends_R - 1
        self.mask = None
        if reads_exactly(ends_R, dtype):
            self.used = ends_R.to(torch.int32)
        else:
            self.length = _rounded(length, ends_R.device)
            self.mask = _mask(self.length, ends_R[:, None, None], dtype)

    def attend(self, query_RHD, keys_RTHD, values_RTHD, scale) -> torch.Tensor:
        """(R, H, D): each token over the keys of its row up to itself."""
        query_RHD = query_RHD.to(keys_RTHD.dtype)
        if self.mask is None:
            options = {"cache_seqlens": self.used, "softmax_scale": scale, "causal": True}
            return flash_attn_with_kvcache(query_RHD[:, None], keys_RTHD, values_RTHD, **options)[:, 0]
        key, value = (x[:, : self.length].transpose(1, 2) for x in (keys_RTHD, values_RTHD))
        query = query_RHD.view(len(key), key.shape[1], -1, key.shape[3])
        out = scaled_dot_product_attention(query, key, value, attn_mask=self.mask, scale=scale)
        return out.reshape(query_RHD.shape)


class Spans:
    """The newest tokens of several cache rows, packed: the last counts[r] tokens of row r of the A rows.

    Rows with one token come first and attend as `SingleSpans`. The others follow: packed for the varlen
    kernel, or padded to the longest for SDPA.
    """

    def __init__(
        self, ends: list[int], counts: list[int], ends_R: torch.Tensor, counts_R: torch.Tensor, dtype
    ):
        """`ends`: tokens in each row, the new ones included. `ends_R`, `counts_R`: the same on the device."""
        A1 = sum(count == 1 for count in counts)
        assert len(counts) > A1 and all(count == 1 for count in counts[:A1])
        device = ends_R.device
        self.num_rows = len(counts)
        self.num_single = A1
        self.longest = max(counts)
        self.rows_N = torch.arange(self.num_rows, device=device).repeat_interleave(
            counts_R, output_size=sum(counts)
        )
        self.last_R = counts_R.cumsum(0) - 1
        self.positions_N = (ends_R - 1 - self.last_R)[self.rows_N] + torch.arange(sum(counts), device=device)
        self.last = SingleSpans(ends_R, max(ends), dtype)  # the same rows with their last token only
        self.single = SingleSpans(ends_R[:A1], max(ends[:A1]), dtype) if A1 else None
        self.length = max(ends[A1:])
        self.offsets = None
        if varlen_attn is not None and ends_R.is_cuda and dtype in HALF:
            self.offsets = row_offsets(counts_R[A1:])
            self.used = ends_R[A1:].to(torch.int32)
            return
        within_N = self.positions_N - (ends_R - counts_R)[self.rows_N]
        self.padded_P = ((self.rows_N - A1) * self.longest + within_N)[A1:]
        self.length = _rounded(self.length, device)
        visible_BL = (ends_R - counts_R)[A1:, None] + torch.arange(1, self.longest + 1, device=device)
        self.mask = _mask(self.length, visible_BL[:, None], dtype)

    def attend(self, query_NHD, keys_RTHD, values_RTHD, scale) -> torch.Tensor:
        """(N, H, D): each token over the keys of its row up to itself.

        Keys and values are those of the A rows; T is at least the longest row's length.
        """
        A1 = self.num_single
        query_NHD = query_NHD.to(keys_RTHD.dtype)
        attend_several = self._attend_padded if self.offsets is None else self._attend_packed
        out_NHD = attend_several(query_NHD[A1:], keys_RTHD[A1:], values_RTHD[A1:], scale)
        if not A1:
            return out_NHD
        single_NHD = self.single.attend(query_NHD[:A1], keys_RTHD[:A1], values_RTHD[:A1], scale)
        return torch.cat([single_NHD, out_NHD])

    def _attend_packed(self, query_NHD, keys_BTHD, values_BTHD, scale) -> torch.Tensor:
        """Treats the cache as a packed sequence too: rows of T tokens, of which the first `used` are read."""
        B, T = keys_BTHD.shape[:2]
        starts = torch.arange(0, (B + 1) * T, T, device=query_NHD.device, dtype=torch.int32)
        keys, values = keys_BTHD.flatten(0, 1), values_BTHD.flatten(0, 1)
        options = {"seqused_k": self.used, "scale": scale, "window_size": (-1, 0), "enable_gqa": True}
        return varlen_attn(
            query_NHD, keys, values, self.offsets, starts, self.longest, self.length, **options
        )

    def _attend_padded(self, query_NHD, keys_BTHD, values_BTHD, scale) -> torch.Tensor:
        _, H, D = query_NHD.shape
        B, L = len(keys_BTHD), self.longest
        key, value = (x[:, : self.length].transpose(1, 2) for x in (keys_BTHD, values_BTHD))
        query = query_NHD.new_zeros(B * L, H, D).index_copy(0, self.padded_P, query_NHD)
        if not query.is_cuda:
            query = query.view(B, L, H, D).transpose(1, 2)
            out = scaled_dot_product_attention(
                query, key, value, attn_mask=self.mask, scale=scale, enable_gqa=True
            )
            return out.transpose(1, 2).reshape(-1, H, D)[self.padded_P]
        # No fused CUDA kernel takes a mask and grouped heads: a key head's query heads become its queries.
        K, G = key.shape[1], H // key.shape[1]
        query = query.view(B, L, K, G, D).permute(0, 2, 1, 3, 4).reshape(B, K, L * G, D)
        mask = self.mask.repeat_interleave(G, 2)
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        return out.view(B, K, L, G, D).transpose(1, 2).reshape(-1, H, D)[self.padded_P]


def _rounded(length: int, device: torch.device) -> int:
    return -(-length // KEY_BUCKET) * KEY_BUCKET if device.type == "cuda" else length


def _mask(length: int, num_visible: torch.Tensor, dtype) -> torch.Tensor:
    """(…, length): 0 on the first `num_visible` (…) keys, -inf on the others."""
    hidden = torch.arange(length, device=num_visible.device) >= num_visible[..., None]
    return torch.zeros(hidden.shape, device=hidden.device, dtype=dtype).masked_fill_(hidden, -torch.inf)
