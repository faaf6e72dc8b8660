"""Attention of packed rows as its CUDA kernels document it: checked arguments, plain products, a backward
pass in closed form.

Stands in for torch.ops.torch_attn._varlen_attn on the pretended device. Tensors here are plain ones on the
CPU.
"""

import itertools

import torch

HALF = (torch.float16, torch.bfloat16)


def check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"varlen attention: {message}")


def sums(offsets: torch.Tensor, name: str) -> list[int]:
    check(
        offsets.dtype == torch.int32 and offsets.dim() == 1 and offsets.is_contiguous(),
        f"{name} must be contiguous int32",
    )
    return offsets.tolist()


def forward(query, key, value, cu_q, cu_k, max_q, max_k, causal, scale, window, used=None, table=None):
    """(attended (N, H, D), log-sum-exp (H, N)). `key` is packed (M, Hk, D), or pages (P, page, Hk, D) with a
    block `table`."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        check(
            x.dtype in HALF and x.stride(-1) == 1,
            f"{name} must be half precision, contiguous in its last dimension",
        )
    check(query.dtype == key.dtype == value.dtype, "query, key and value must have the same dtype")
    check(
        query.shape[-1] % 8 == 0 and query.shape[-1] <= 256,
        "head dimension must be a multiple of 8, at most 256",
    )
    check(cu_k is not None, "cu_seq_q and cu_seq_k must be both set or both not set")
    ends_q, ends_k = sums(cu_q, "cu_seq_q"), sums(cu_k, "cu_seq_k")
    longest = max(end - start for start, end in itertools.pairwise(ends_q))
    check(ends_q[-1] == len(query) and longest <= max_q, "cu_seq_q does not fit query, or max_q is too small")
    if table is not None:
        check(
            used is not None and table.dtype == torch.int32, "block_table must be int32 and needs seqused_k"
        )
        check(
            table.shape[0] == len(ends_q) - 1 and table.stride(-1) == 1,
            "block_table must have a row for each sequence",
        )
        check(key.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256")
    out, lse = torch.empty_like(query), torch.zeros(query.shape[1], len(query))
    used = None if used is None else sums(used, "seqused_k")
    for row, (start, end) in enumerate(itertools.pairwise(ends_q)):
        if table is None:
            k, v = (x[ends_k[row] : ends_k[row + 1]] for x in (key, value))
        else:
            k, v = (x[table[row].long()].flatten(0, 1) for x in (key, value))
        if used is not None:
            k, v = k[: used[row]], v[: used[row]]
        check(len(k) <= max_k, "max_k is too small")
        attended, lse[:, start:end] = attend(
            query[start:end].float(), k.float(), v.float(), is_causal(causal, window), scale
        )
        out[start:end] = attended.to(out.dtype)
    return out, lse


def is_causal(causal: bool, window) -> bool:
    return causal or (window is not None and list(window) == [-1, 0])


def scores(q, k, causal: bool, scale: float | None) -> torch.Tensor:
    """(H, N, M) of one row; the mask is aligned at the lower right, as in flash attention 2."""
    found = torch.einsum("nhd,mhd->hnm", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    N, M = len(q), len(k)
    hidden = torch.arange(M) > torch.arange(N)[:, None] + (M - N)
    return found.masked_fill(hidden, -torch.inf) if causal else found


def attend(q, k, v, causal: bool, scale: float | None):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    found = scores(q, k, causal, scale)
    return torch.einsum("hnm,mhd->nhd", found.softmax(-1), v), found.logsumexp(-1)


def attend_backward(grad, q, k, v, causal: bool, scale: float | None):
    heads, dim = k.shape[1:]
    k, v = (x.repeat_interleave(q.shape[1] // heads, 1) for x in (k, v))
    p = scores(q, k, causal, scale).softmax(-1)
    dp = torch.einsum("nhd,mhd->hnm", grad, v)
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * (dim**-0.5 if scale is None else scale)
    dk, dv = torch.einsum("hnm,nhd->mhd", ds, q), torch.einsum("hnm,nhd->mhd", p, grad)
    return torch.einsum("hnm,mhd->nhd", ds, k), *(x.view(len(x), heads, -1, dim).sum(2) for x in (dk, dv))


def backward(grad, query, key, value, cu_q, cu_k, causal, scale, window):
    check(grad.dtype == query.dtype, f"the gradient is {grad.dtype}, the query {query.dtype}")
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    for row in range(len(ends_q) - 1):
        cuts = [slice(ends[row], ends[row + 1]) for ends in (ends_q, ends_k, ends_k)]
        q, k, v = (x[cut].float() for x, cut in zip((query, key, value), cuts, strict=True))
        found = attend_backward(grad[cuts[0]].float(), q, k, v, is_causal(causal, window), scale)
        for whole, part, cut in zip(grads, found, cuts, strict=True):
            whole[cut] = part.to(whole.dtype)
    return tuple(grads)
