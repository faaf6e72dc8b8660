"""Log-probability and entropy of each target token, from slices of the LM head."""

import torch
from torch import nn

# Logits in memory at once: 8 MB, which fit into a CPU's cache; on other devices 2**27, which fill a GPU
SLICE_LOGITS = {"cpu": 2**21}


class TiedEmbedding(torch.autograd.Function):
    """An embedding whose weight is also the LM head's; adds its gradient to the head's in place.

    Autograd would allocate a second (V, C) matrix. `tied` is a list for one forward pass, in which the head,
    whose backward pass always comes first, leaves its gradient.
    """

    @staticmethod
    def forward(ctx, weight_VC, token_ids, padding_idx, tied):
        ctx.save_for_backward(token_ids)
        ctx.shape, ctx.padding_idx, ctx.tied = weight_VC.shape, padding_idx, tied
        return nn.functional.embedding(token_ids, weight_VC)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (token_ids,) = ctx.saved_tensors
        token_ids_N, grad_NC = token_ids.flatten(), grad.flatten(0, -2)
        if ctx.padding_idx is not None:  # nn.Embedding does not train it
            grad_NC = grad_NC * (token_ids_N != ctx.padding_idx)[:, None]
        alone = not ctx.tied
        weight_grad_VC = grad_NC.new_zeros(ctx.shape) if alone else ctx.tied.pop()
        if grad.is_cuda:  # index_add_ on a GPU sums in no fixed order
            weight_grad_VC.index_put_((token_ids_N,), grad_NC.to(weight_grad_VC.dtype), accumulate=True)
        else:
            weight_grad_VC.index_add_(0, token_ids_N, grad_NC.to(weight_grad_VC.dtype))
        return weight_grad_VC if alone else None, None, None, None


def token_scores(
    hidden_NC: torch.Tensor,
    head: nn.Linear,
    targets_N: torch.Tensor,
    temperature: float,
    entropy_gradient: bool,
    tied: list | None = None,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
):
    """Log-probability of each target and entropy of its distribution, (N,) each, float32 at least.

    The distribution is the softmax over the vocabulary, or with `kept` over the ids that the sampler kept
    for each target: all ids (K,), target by target and each once, and their number for each target (N,). A
    target that is not among its own ids has log-probability -inf.

    Only a slice of the logits is in memory at a time. Under autocast the head's weights are cast slice by
    slice. `tied`: see `TiedEmbedding`.
    """
    weight_VC = head.weight
    if head.bias is not None:  # the bias as the weight of one more input, always 1
        hidden_NC, weight_VC = (
            nn.functional.pad(hidden_NC, (0, 1), value=1.0),
            torch.cat([weight_VC, head.bias[:, None]], 1),
        )
    if torch.is_autocast_enabled(hidden_NC.device.type):
        hidden_NC = hidden_NC.to(torch.get_autocast_dtype(hidden_NC.device.type))
    rest = (targets_N, temperature, entropy_gradient, tied)
    if kept is None:
        return TokenScores.apply(hidden_NC, weight_VC, *rest)
    return KeptScores.apply(hidden_NC, weight_VC, *kept, *rest)


class TokenScores(torch.autograd.Function):
    """`token_scores` by an online softmax over slices of the vocabulary.

    The backward pass recomputes the logits. Slices are of the vocabulary, not of the tokens, so that each
    weight is read, and its gradient written, once per pass.
    """

    @staticmethod
    def forward(ctx, hidden_NC, weight_VC, targets_N, temperature, entropy_gradient, tied):
        dtype = torch.promote_types(hidden_NC.dtype, torch.float32)
        max_N = hidden_NC.new_full(targets_N.shape, torch.finfo(dtype).min, dtype=dtype)
        # Sums of e^(l - max) and of e^(l - max) (l - max) so far; the target's l
        sum_N, dot_N, target_N = (torch.zeros_like(max_N) for _ in range(3))
        for start, _, logits_Nv in sliced_logits(hidden_NC, weight_VC, temperature):
            inside_N, column_N1 = locate(targets_N, start, logits_Nv)
            target_N = torch.where(inside_N, logits_Nv.gather(1, column_N1)[:, 0], target_N)
            past_N, max_N = max_N, torch.maximum(max_N, logits_Nv.amax(1))
            shrink_N = (past_N - max_N).exp()
            exps_Nv = logits_Nv.sub_(max_N[:, None]).exp()
            dot_N = shrink_N * (dot_N + sum_N * (past_N - max_N)) + logits_Nv.mul_(exps_Nv).sum(1)
            sum_N = shrink_N * sum_N + exps_Nv.sum(1)
        entropy_N = sum_N.log() - dot_N / sum_N
        ctx.save_for_backward(hidden_NC, weight_VC, targets_N, max_N + sum_N.log(), entropy_N)
        ctx.temperature, ctx.entropy_gradient, ctx.tied = temperature, entropy_gradient, tied
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return target_N - max_N - sum_N.log(), entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, logprob_grad_N, entropy_grad_N):
        """d log p(target) / dl_v = [v is the target] - p_v and dH / dl_v = -p_v (log p_v + H)."""
        hidden_NC, weight_VC, targets_N, normalizer_N, entropy_N = ctx.saved_tensors
        hidden_grad_NC = torch.zeros_like(hidden_NC, dtype=normalizer_N.dtype)
        weight_grad_VC = torch.empty_like(weight_VC) if ctx.needs_input_grad[1] else None
        for start, weight_vC, logits_Nv in sliced_logits(hidden_NC, weight_VC, ctx.temperature):
            inside_N, column_N1 = locate(targets_N, start, logits_Nv)
            logp_Nv = logits_Nv.sub_(normalizer_N[:, None])
            pull_Nv = (
                logprob_grad_N[:, None] + (logp_Nv + entropy_N[:, None]) * entropy_grad_N[:, None]
                if ctx.entropy_gradient
                else logprob_grad_N[:, None]
            )
            grad_Nv = (
                logp_Nv.exp_()
                .mul_(-pull_Nv)
                .scatter_add_(1, column_N1, torch.where(inside_N, logprob_grad_N, 0.0)[:, None])
            )
            grad_Nv = (grad_Nv if ctx.temperature == 1 else grad_Nv.div_(ctx.temperature)).to(hidden_NC.dtype)
            hidden_grad_NC += grad_Nv @ weight_vC
            part = slice(start, start + len(weight_vC))
            if weight_grad_VC is not None and weight_vC.dtype == weight_VC.dtype:  # None: a frozen head
                torch.mm(grad_Nv.T, hidden_NC, out=weight_grad_VC[part])
            elif weight_grad_VC is not None:
                weight_grad_VC[part] = grad_Nv.T @ hidden_NC
        if ctx.tied is not None:
            ctx.tied.append(weight_grad_VC)
        return hidden_grad_NC.to(hidden_NC.dtype), weight_grad_VC, None, None, None, None


class KeptScores(torch.autograd.Function):
    """`token_scores` over the ids that the sampler kept for each token.

    Logits are those of the ids kept by any token of the batch, U of V, for all N tokens: one matrix
    multiplication over U columns. Gathering a row of weights per kept id would multiply less, but read C
    numbers for each of K ids, and on a GPU would add up gradients in no fixed order. So the matrices cost at
    most what the whole softmax costs, less the logits of the backward pass: it needs the K kept ones only,
    which are in memory. Work on these K is of the order of the whole where most ids are kept.
    """

    @staticmethod
    def forward(ctx, hidden_NC, weight_VC, ids_K, counts_N, targets_N, temperature, entropy_gradient, tied):
        row_K = torch.arange(len(targets_N), device=ids_K.device).repeat_interleave(counts_N)
        ids_K = ids_K.long()
        kept_V = torch.zeros(len(weight_VC), dtype=torch.bool, device=ids_K.device)
        kept_V[ids_K] = True
        ids_U, place_K = kept_V.nonzero()[:, 0], (kept_V.cumsum(0) - 1)[ids_K]
        dtype = torch.promote_types(hidden_NC.dtype, torch.float32)
        logit_K = hidden_NC.new_zeros(ids_K.shape, dtype=dtype)
        for start, _, logits_Nv in sliced_logits(hidden_NC, weight_VC, temperature, ids_U):
            inside_K, column_K1 = locate(place_K, start, logits_Nv)
            logit_K = torch.where(inside_K, logits_Nv[row_K, column_K1[:, 0]], logit_K)

        def over_row(values_K: torch.Tensor, how: str) -> torch.Tensor:
            return torch.segment_reduce(values_K, how, lengths=counts_N, unsafe=True)

        shifted_K = logit_K - over_row(logit_K, "max")[row_K]
        logp_K = shifted_K - over_row(shifted_K.exp(), "sum").log()[row_K]
        entropy_N = -over_row(logp_K.exp() * logp_K, "sum")
        is_target_K = ids_K == targets_N[row_K]
        ctx.save_for_backward(hidden_NC, weight_VC, ids_U, place_K, row_K, logp_K, is_target_K, entropy_N)
        ctx.temperature, ctx.entropy_gradient, ctx.tied = temperature, entropy_gradient, tied
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return over_row(logp_K.masked_fill(~is_target_K, -torch.inf), "max"), entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, logprob_grad_N, entropy_grad_N):
        """As in `TokenScores`; the derivative by the logit of an id that was not kept is 0."""
        hidden_NC, weight_VC, ids_U, place_K, row_K, logp_K, is_target_K, entropy_N = ctx.saved_tensors
        p_K, pull_K = logp_K.exp(), logprob_grad_N[row_K]
        grad_K = pull_K * (is_target_K.to(p_K.dtype) - p_K)
        if ctx.entropy_gradient:
            grad_K -= p_K * (logp_K + entropy_N[row_K]) * entropy_grad_N[row_K]
        grad_K /= ctx.temperature
        hidden_grad_NC = torch.zeros_like(hidden_NC, dtype=logp_K.dtype)
        weight_grad_VC = torch.zeros_like(weight_VC) if ctx.needs_input_grad[1] else None
        for part in slices(len(ids_U), len(hidden_NC), hidden_NC.device):
            ids_v, column_K = ids_U[part], place_K - part.start
            weight_vC = weight_VC[ids_v].to(hidden_NC.dtype)
            inside_K = (column_K >= 0) & (column_K < len(ids_v))
            # One column more takes what lies in other slices
            grad_Nv = grad_K.new_zeros(len(hidden_NC), len(ids_v) + 1)
            grad_Nv[row_K, torch.where(inside_K, column_K, len(ids_v))] = grad_K
            grad_Nv = grad_Nv[:, :-1].to(hidden_NC.dtype)
            hidden_grad_NC += grad_Nv @ weight_vC
            if weight_grad_VC is not None:  # else the head is frozen
                weight_grad_VC[ids_v] = (grad_Nv.T @ hidden_NC).to(weight_VC.dtype)
        if ctx.tied is not None:
            ctx.tied.append(weight_grad_VC)
        return hidden_grad_NC.to(hidden_NC.dtype), weight_grad_VC, *(None,) * 6


def slices(num_ids: int, num_tokens: int, device: torch.device):
    """Yields slices of `num_ids` ids, each so long that the logits of `num_tokens` tokens fit into memory."""
    width = max(1024, SLICE_LOGITS.get(device.type, 2**27) // max(1, num_tokens))
    for start in range(0, num_ids, width):
        yield slice(start, min(start + width, num_ids))


def sliced_logits(
    hidden_NC: torch.Tensor, weight_VC: torch.Tensor, temperature: float, ids_U: torch.Tensor | None = None
):
    """Yields (start, weights (v, C), logits (N, v)) of slices of the vocabulary, or of `ids_U` of it.

    Weights have the dtype of the states; logits are float32 at least, and the caller may overwrite them.
    """
    num_ids = len(weight_VC if ids_U is None else ids_U)
    for part in slices(num_ids, len(hidden_NC), hidden_NC.device):
        weight_vC = weight_VC[part if ids_U is None else ids_U[part]].to(hidden_NC.dtype)
        logits_Nv = float32_logits(hidden_NC, weight_vC)
        yield part.start, weight_vC, logits_Nv if temperature == 1 else logits_Nv.div_(temperature)


def float32_logits(hidden_NC: torch.Tensor, weight_VC: torch.Tensor) -> torch.Tensor:
    """hidden @ weight.T (N, V) in float32 at least, for states and weights of one dtype.

    Half-precision matmuls accumulate in float32 anyway. Rounded to bf16 afterwards, a logit near 20 would be
    off by up to .06 and log-probabilities by .02 on average, which is more than an update at a learning rate
    of 1e-6 changes them.
    """
    if hidden_NC.dtype not in (torch.bfloat16, torch.float16):
        return hidden_NC @ weight_VC.T
    if hidden_NC.is_cuda:
        return torch.mm(hidden_NC, weight_VC.T, out_dtype=torch.float32)
    with torch.autocast(hidden_NC.device.type, enabled=False):  # a CPU has no matmul with `out_dtype`
        return hidden_NC.float() @ weight_VC.float().T


def locate(targets_N: torch.Tensor, start: int, logits_Nv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each target lies in this slice, and its column (N, 1) there (column 0 where it does not)."""
    column_N = targets_N - start
    inside_N = (column_N >= 0) & (column_N < logits_Nv.shape[1])
    return inside_N, torch.where(inside_N, column_N, 0)[:, None]
