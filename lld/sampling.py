"""One token a row from logits: temperature, top-p, the draw and its log-probability in one pass over the vocabulary."""

import torch

TOP = 1024  # top-p sorts this many tokens of a row, and all of them where these do not hold the nucleus
BLOCK = 512  # tokens summed at once when a long row is searched


def sample_tokens(logits_SV: torch.Tensor, uniforms_S: torch.Tensor, temperature: float, top_p: float):
    """One token a row by inverse CDF, and its log-probability under the very distribution it was drawn from.

    One uniform number a token, taken from the episode's own generator, makes a draw independent of how rows are batched.
    temperature 0 takes the argmax and records its log-probability at temperature 1. top_p < 1 keeps the smallest set of
    likeliest tokens whose probability reaches top_p, and renormalises. Shapes: (S, V), (S,) -> (S,) int64, (S,) float32.
    """
    logits_SV = logits_SV.float()
    if temperature == 0:
        token_S = logits_SV.argmax(-1)
        return token_S, logits_SV.log_softmax(-1).gather(-1, token_S[:, None])[:, 0]
    if temperature != 1:
        logits_SV = logits_SV / temperature
    if top_p < 1:
        logits_SV = _nucleus(logits_SV, top_p)
    largest_S1 = logits_SV.amax(-1, keepdim=True)
    token_S, total_S = _invert_cdf((logits_SV - largest_S1).exp_(), uniforms_S)
    return token_S, (logits_SV.gather(-1, token_S[:, None]) - largest_S1)[:, 0] - total_S.log().float()


def _nucleus(logits_SV: torch.Tensor, top_p: float) -> torch.Tensor:
    """The logits of each row's nucleus, -inf elsewhere; sorts only the likeliest tokens where they hold it."""
    total_S1 = (logits_SV - logits_SV.amax(-1, keepdim=True)).exp_().sum(-1, keepdim=True, dtype=torch.float64)
    for num in (TOP, logits_SV.shape[-1]):
        best_SK, order_SK = logits_SV.topk(min(num, logits_SV.shape[-1]))
        share_SK = (best_SK - best_SK[:, :1]).exp().double() / total_S1
        before_SK = share_SK.cumsum(-1) - share_SK
        if bool((before_SK[:, -1] >= top_p).all()):
            break
    return torch.full_like(logits_SV, -torch.inf).scatter_(-1, order_SK, best_SK.masked_fill(before_SK >= top_p, -torch.inf))


def _invert_cdf(weights_SV: torch.Tensor, uniforms_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first token of each row at which the running sum of weights exceeds its uniform number times their sum, and that sum.

    Sums are float64: in float32 that of a vocabulary of 150k drifts by more than the tail's probabilities. Long rows are
    searched in two steps, first the block of BLOCK tokens and then the token in it, which needs no running sum of all.
    """
    S, V = weights_SV.shape
    rows_S = torch.arange(S, device=weights_SV.device)
    blocks_SNB = torch.nn.functional.pad(weights_SV, (0, -V % BLOCK)).view(S, -1, BLOCK) if V > BLOCK else weights_SV[:, None]
    if blocks_SNB.shape[1] > 1:
        cdf_SN = blocks_SNB.sum(-1, dtype=torch.float64).cumsum(-1)
        total_S, target_S1 = cdf_SN[:, -1], uniforms_S.to(cdf_SN)[:, None] * cdf_SN[:, -1:]
        block_S = torch.searchsorted(cdf_SN, target_S1, right=True)[:, 0].clamp(max=cdf_SN.shape[1] - 1)
        inside_SB = blocks_SNB[rows_S, block_S].cumsum(-1, dtype=torch.float64)
        target_S1 = target_S1 - torch.nn.functional.pad(cdf_SN, (1, 0)).gather(1, block_S[:, None])
    else:
        inside_SB, block_S = weights_SV.cumsum(-1, dtype=torch.float64), 0
        total_S, target_S1 = inside_SB[:, -1], uniforms_S.to(inside_SB)[:, None] * inside_SB[:, -1:]
    token_S = (block_S * BLOCK + torch.searchsorted(inside_SB, target_S1, right=True)[:, 0].clamp(max=inside_SB.shape[1] - 1)).clamp(max=V - 1)
    met_S = weights_SV[rows_S, token_S] > 0
    if met_S.is_cuda or not bool(met_S.all()):  # the very end of the interval, or rounding: a token of no probability; take the likeliest (a GPU is not asked whether it happened)
        token_S = torch.where(met_S, token_S, weights_SV.argmax(-1))
    return token_S, total_S
