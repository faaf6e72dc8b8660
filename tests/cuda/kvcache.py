"""flash-attn's `flash_attn_with_kvcache` as it documents itself: its signature, its checks, plain products.

Stands in for the package on the pretended device. What the project does not ask for is refused; with a block
table the kernel's host code reads the longest row back (since flash-attn 2.8.4), which is counted as a wait.
"""

import types

import torch
import varlen
from pretended import SIM, CudaTensor


def check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"flash_attn_with_kvcache: {message}")


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    others = (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes)
    assert (
        all(other is None for other in others) and not softcap and not return_softmax_lse and not num_splits
    )
    given = [x for x in (q, k_cache, v_cache, cache_seqlens, block_table) if x is not None]
    check(all(isinstance(x, CudaTensor) for x in given), "all tensors must be on the device")
    check(q.dtype in varlen.HALF, "FlashAttention only support fp16 and bf16 data type")
    check(q.dtype == k_cache.dtype == v_cache.dtype, "query, key and value must have the same dtype")
    contiguous = all(x.stride(-1) == 1 for x in (q, k_cache, v_cache))
    check(contiguous, "Input tensor must have contiguous last dimension")
    (B, _, H, D), K = q.shape, k_cache.shape[2]
    check(D <= 256 and H % K == 0, "head dimension at most 256, key heads must divide query heads")
    check(
        cache_seqlens.dtype == torch.int32 and cache_seqlens.is_contiguous(),
        "seqlens_k must be contiguous int32",
    )
    check(tuple(cache_seqlens.shape) == (B,), "seqlens_k must have shape (batch,)")
    if block_table is None:
        check(
            k_cache.shape == v_cache.shape and len(k_cache) >= B,
            "kcache must have shape (batch, T, heads, dim)",
        )
    else:
        check(
            block_table.dtype == torch.int32 and len(block_table) == B,
            "block_table must be int32 (batch, pages)",
        )
        check(k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
        SIM.wait("longest row of a block table")
    call = Call(
        *(getattr(x, "elem", x) for x in (q, k_cache, v_cache, cache_seqlens, block_table)),
        softmax_scale,
        causal,
    )
    out = call()
    SIM.launch()
    SIM.varlen["kvcache"] += 1
    if SIM.capturing:
        SIM.tape.append((call, (), {}, out))
    return CudaTensor(out, q.index)


class Call:
    """A call that a graph repeats on the same memory."""

    _schema = types.SimpleNamespace(is_mutable=True)

    def __init__(self, *args):
        self.args = args

    def __call__(self):
        q, k_cache, v_cache, lengths, table, scale, causal = self.args
        out = torch.empty_like(q)
        for row, length in enumerate(lengths.tolist()):
            rows = [row] if table is None else table[row].long()
            k, v = (x[rows].flatten(0, 1)[:length].float() for x in (k_cache, v_cache))
            check(len(k) == length, "cache_seqlens is longer than the cache")
            out[row] = varlen.attend(q[row].float(), k, v, causal, scale)[0].to(out.dtype)
        return out
