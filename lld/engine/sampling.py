"""One token per row from logits: temperature, top-p, the draw and its log-probability."""

import torch

TOP = 1024  # top-p sorts this many tokens of a row, and all of them if the nucleus is larger
FEW = 128  # sorted before that on a CPU, where trying again costs no synchronisation
BLOCK = 512  # tokens summed at once when a long row is searched
BELOW = 1 - 2**-53  # a positive float64 times this is smaller than before


def sample_tokens(
    logits_SV: torch.Tensor,
    uniforms_S: torch.Tensor,
    temperature: float,
    top_p: float,
    keep_ids: bool = False,
    min_p: float = 0.0,
    top_k: int = 0,
) -> list[tuple]:
    """One token per row by inverse CDF, and its log-probability under the distribution it was drawn from.

    logits_SV (S, V), uniforms_S (S,): one number per token from the episode's own generator, so that a draw
    does not depend on how rows are batched. Temperature 0 takes the argmax and records its log-probability at
    temperature 1. top_p < 1 keeps the smallest set of likeliest tokens whose probability reaches top_p, and
    renormalises. Synchronises with the device once, and a second time if a nucleus has more than TOP tokens.

    min_p > 0 keeps the tokens of at least min_p times the largest probability, top_k > 0 the top_k likeliest.
    All three read the whole distribution; what each of them keeps is kept.

    With `keep_ids`, where anything is cut, a third value is the ids that were kept (int32, on the CPU),
    likeliest first. They take two more synchronisations.
    """
    logits_SV = logits_SV.float()
    if temperature == 0:
        token_S1 = logits_SV.argmax(-1, keepdim=True)
        return _to_host(token_S1, logits_SV.log_softmax(-1).gather(-1, token_S1))
    if temperature != 1:
        logits_SV = logits_SV / temperature
    if top_p == 1 and min_p == 0 and top_k == 0:
        return _to_host(*_invert_cdf(logits_SV, uniforms_S))
    return _sample_cut(logits_SV, uniforms_S, (top_p, min_p, top_k), keep_ids)


def _sample_cut(
    logits_SV: torch.Tensor, uniforms_S: torch.Tensor, cut: tuple[float, float, int], keep_ids: bool
) -> list[tuple]:
    """`sample_tokens` with `cut` = (top_p, min_p, top_k); rows that keep all of what was sorted go again."""
    drawn, rows, V = {}, list(range(len(logits_SV))), logits_SV.shape[-1]
    for num_sorted in (TOP, V) if logits_SV.is_cuda else (FEW, TOP, V):
        nucleus_SV, order_SK, kept_SK = _nucleus(logits_SV, min(num_sorted, V), *cut)
        some = _to_host(*_invert_cdf(nucleus_SV, uniforms_S), kept_SK[:, -1:])
        for row, (token, logprob, _) in zip(rows, some, strict=True):
            drawn[row] = (token, logprob)
        if keep_ids:
            ids_S = order_SK[kept_SK].int().cpu().split(kept_SK.sum(1).tolist())
            drawn |= {row: (*drawn[row], ids) for row, ids in zip(rows, ids_S, strict=True)}
        more = [place for place, (_, _, is_more) in enumerate(some) if is_more]
        if not more or num_sorted >= V:
            break
        rows, logits_SV, uniforms_S = [rows[place] for place in more], logits_SV[more], uniforms_S[more]
    return [drawn[row] for row in range(len(drawn))]


def _to_host(token_S1: torch.Tensor, *columns_S1: torch.Tensor) -> list[tuple]:
    rows = torch.cat([token_S1.double(), *columns_S1], 1).tolist()  # token ids are exact in float64
    return [(int(token), *rest) for token, *rest in rows]


def _nucleus(
    logits_SV: torch.Tensor, num_sorted: int, top_p: float, min_p: float, top_k: int
) -> tuple[torch.Tensor, ...]:
    """The logits of the tokens to keep, else -inf; the `num_sorted` likeliest ids; which of these to keep.

    Where the last of these is kept, more might be.
    """
    weights_SV = (logits_SV - logits_SV.amax(-1, keepdim=True)).exp_()
    total_S1 = weights_SV.sum(-1, keepdim=True, dtype=torch.float64)
    best_SK, order_SK = logits_SV.topk(num_sorted)
    share_SK = (best_SK - best_SK[:, :1]).exp().double() / total_S1
    before_SK = share_SK.cumsum(-1) - share_SK
    kept_SK = (before_SK < top_p) & (share_SK >= min_p * share_SK[:, :1])
    if top_k > 0:
        kept_SK[:, top_k:] = False
    nucleus_SV = torch.full_like(logits_SV, -torch.inf)
    nucleus_SV.scatter_(-1, order_SK, best_SK.masked_fill(~kept_SK, -torch.inf))
    return nucleus_SV, order_SK, kept_SK


def _invert_cdf(logits_SV: torch.Tensor, uniforms_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first token of each row at which the running sum of probabilities exceeds its uniform number.

    Returns it and its log-probability (S, 1). Sums are float64: in float32 the error of a sum over 150k
    tokens exceeds the tail's probabilities. Where rounding would carry the search past the last token with a
    probability above 0, it ends at that token.
    """
    S, V = logits_SV.shape
    filled = -V % BLOCK if V > BLOCK else 0
    weights_SV = logits_SV.new_empty(S, V + filled)
    torch.sub(logits_SV, logits_SV.amax(-1, keepdim=True), out=weights_SV[:, :V])
    if filled:
        weights_SV[:, V:] = -torch.inf
    weights_SV.exp_()
    uniforms_S1 = uniforms_S.double().clamp(max=BELOW)[:, None]
    if V > BLOCK:
        token_S1, total_S1 = _search_blocks(weights_SV, uniforms_S1)
    else:
        cdf_SV = weights_SV.cumsum(-1, dtype=torch.float64)
        total_S1 = cdf_SV[:, -1:]
        token_S1 = torch.searchsorted(cdf_SV, uniforms_S1 * total_S1, right=True)
    token_S1 = token_S1.clamp_(max=V - 1)  # larger only where a row holds NaN
    return token_S1, (weights_SV.gather(1, token_S1) / total_S1).log()


def _search_blocks(weights_SV: torch.Tensor, uniforms_S1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the block of BLOCK tokens, then the token in it, without a running sum over the whole row.

    Returns tokens and total weights (S, 1).
    """
    blocks_SNB = weights_SV.view(len(weights_SV), -1, BLOCK)
    cdf_SN = blocks_SNB.sum(-1, dtype=torch.float64).cumsum(-1)
    total_S1 = cdf_SN[:, -1:]
    target_S1 = uniforms_S1 * total_S1
    block_S1 = torch.searchsorted(cdf_SN, target_S1, right=True).clamp_(max=cdf_SN.shape[1] - 1)
    chosen_SB = blocks_SNB.gather(1, block_S1[:, :, None].expand(-1, -1, BLOCK))[:, 0]
    inside_SB = chosen_SB.cumsum(-1, dtype=torch.float64)
    target_S1 = target_S1 - torch.nn.functional.pad(cdf_SN, (1, 0)).gather(1, block_S1)
    target_S1 = torch.minimum(target_S1, inside_SB[:, -1:] * BELOW)
    token_S1 = torch.add(torch.searchsorted(inside_SB, target_S1, right=True), block_S1, alpha=BLOCK)
    return token_S1, total_S1
