"""A Hugging Face model as the loss sees it: the log-probability and entropy of every token of a batch.

The only causal shift of the RL update is in `Policy.states`.
"""

import torch
from torch import nn

from lld.model import attention
from lld.model.lm_head import TiedEmbedding, token_scores


class Policy(nn.Module):
    """A language model as the loss sees it: tokens in, log-probabilities and entropies out."""

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm
        lm.set_attn_implementation(attention.NAME)

    def forward(
        self, token_ids_BT, scored_BT, temperature: float = 1.0, entropy_gradient: bool = False, kept=None
    ):
        """(B, T) log-probability and entropy of every scored token given all tokens before it, 0 elsewhere.

        Entry t describes token t. `scored_BT` is True on the tokens the model wrote; logits are computed only
        for those, in slices that are recomputed in the backward pass. In float32; float64 for such a model.

        With `kept`, a batch's `Batch.kept`, probabilities are those among the ids that each token was drawn
        from. Tokens that are not scored must have none.
        """
        head, embeddings = self.lm.get_output_embeddings(), self.lm.get_input_embeddings()
        # In half precision, summing the gradient of a frequent token would lose most of the terms.
        is_whole = head.weight.dtype in (torch.float32, torch.float64)
        is_tied = head.weight is embeddings.weight and head.bias is None and head.weight.requires_grad
        tied = [] if is_whole and is_tied and type(embeddings) is nn.Embedding else None
        states_NC, targets_N = self.states(token_ids_BT, scored_BT, tied)
        if kept is not None:
            kept = kept[0], kept[1][scored_BT]
        logprob_N, entropy_N = token_scores(
            states_NC, head, targets_N, temperature, entropy_gradient, tied, kept
        )
        zeros_BT = torch.zeros(token_ids_BT.shape, dtype=logprob_N.dtype, device=token_ids_BT.device)
        return zeros_BT.masked_scatter(scored_BT, logprob_N), zeros_BT.masked_scatter(scored_BT, entropy_N)

    def states(self, token_ids_BT, scored_BT, tied: list | None = None):
        """The last hidden states (N, C) that predict the scored tokens, and these tokens (N,), row by row.

        Rows are packed into one sequence; padding and tokens after a row's last scored one are not computed.
        `tied`: see `TiedEmbedding`.
        """
        position_T = torch.arange(token_ids_BT.shape[1], device=token_ids_BT.device)
        lengths_B = (scored_BT * position_T).amax(1)  # the last scored token is predicted, not read
        # An empty micro-batch reads one token: its process must take part in the backward pass
        lengths_B[0] = lengths_B[0].clamp(min=1)
        read_BT = position_T < lengths_B[:, None]
        embeddings, tokens_1N = self.lm.get_input_embeddings(), token_ids_BT[read_BT][None]
        inputs = {"input_ids": tokens_1N}
        if tied is not None:
            embedded = TiedEmbedding.apply(embeddings.weight, tokens_1N, embeddings.padding_idx, tied)
            inputs = {"inputs_embeds": embedded}
        rows = dict(
            position_ids=position_T.expand_as(read_BT)[read_BT][None],
            row_lengths=attention.row_lengths(lengths_B[lengths_B > 0]),
        )
        hidden_NC = self.lm.base_model(**inputs, **rows, use_cache=False).last_hidden_state[0]
        # The state before token t predicts token t
        predicts_BT = torch.nn.functional.pad(scored_BT[:, 1:], (0, 1))
        return hidden_NC[predicts_BT[read_BT]], token_ids_BT[:, 1:][scored_BT[:, 1:]]
