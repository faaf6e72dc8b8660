"""True changes of likelihoods after small steps, and after one update of a group."""

import copy
import dataclasses
from collections.abc import Callable

import torch
from accelerate import Accelerator

from lld.config import Config
from lld.episode import Batch
from lld.influence.closed_form import Group, Tokens
from lld.model.lm_head import token_scores
from lld.policy import Policy
from lld.update import loss_of, score_batch, update_counts, update_policy

OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
# Learning rates of the small steps. transformers' RMSNorm always computes in float32: the effect of smaller
# steps would be lost in its rounding
HEAD_LR, MODEL_LR = 1e-6, 1e-4


def true_change(
    score: Callable[[], torch.Tensor], parameters: list[torch.Tensor], batch: Batch, cfg: Config, lr: float
) -> torch.Tensor:
    """(G, N) change of the log-probabilities by an SGD step on each member's loss, per unit of learning rate.

    `score()` gives the N tokens' log-probabilities (N,) under `parameters`, which are restored after every
    step. The loss is the real one (`update.loss_of`) of the group as one optimizer step, its policy term
    alone; `lr` must be small enough to be linear.
    """
    options, rows = policy_term_alone(cfg), list(range(len(batch.names)))
    part = batch.rows(rows, parameters[0].device)
    counts = update_counts(batch, rows, options.loss.lld_preserve)
    kept = [tensor.detach().clone() for tensor in parameters]
    change_GN = []
    for row in rows:
        before_N = score()
        logprobs_BT = before_N.new_zeros(part.token_ids_BT.shape).masked_scatter(
            part.action_ids_BT > 0, before_N
        )
        losses_B, _ = loss_of(
            part, logprobs_BT, None, logprobs_BT.detach(), None, None, counts, 1.0, options.loss
        )
        gradients = torch.autograd.grad(losses_B[row], parameters, allow_unused=True)
        with torch.no_grad():
            for tensor, gradient in zip(parameters, gradients, strict=True):
                tensor -= 0.0 if gradient is None else lr * gradient
            change_GN.append((score() - before_N.detach()) / lr)
            for tensor, value in zip(parameters, kept, strict=True):
                tensor.copy_(value)
    return torch.stack(change_GN)


def policy_term_alone(cfg: Config) -> Config:
    """The options of one update by the policy gradient alone, while the policy is still the old one."""
    off = {"kl_weight": 0.0, "entropy_weight": 0.0, "lld_weight": 0.0, "weights": {}, "penalties": {}}
    loss = dataclasses.replace(cfg.loss, old_logprobs="trainer", correction="none", drop=(), **off)
    return dataclasses.replace(cfg, loss=loss, optim=dataclasses.replace(cfg.optim, updates_per_rollout=1))


def head_alone(
    policy: Policy, tokens: Tokens, temperature: float
) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """`score` and `parameters` of `true_change` for an untied copy of the head on the states as they are."""
    head = copy.deepcopy(policy.lm.get_output_embeddings())
    return lambda: token_scores(tokens.states_NC, head, tokens.targets_N, temperature, False)[0], [
        head.weight
    ]


def whole_model(
    policy: Policy, batch: Batch, temperature: float
) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """`score` and `parameters` of `true_change` for all weights, tied as they are."""
    parameters = list(policy.parameters())
    part = batch.rows(list(range(len(batch.names))), parameters[0].device)
    scored_BT = part.action_ids_BT > 0
    return lambda: policy(part.token_ids_BT, scored_BT, temperature)[0][scored_BT], parameters


def displace_each(
    accelerator: Accelerator, policy, groups: list[Group], cfg: Config, optimizer: str, lr: float
) -> list[dict]:
    """The protocol of Fig. 3a: one update per group, from the same weights, on its episodes alone.

    Lowest `delta` first. `delta`: mean over the correct responses of the change of their log-likelihood (a
    sum over tokens); `delta_per_token`: their mean change per token. The optimizer starts without moments;
    gradients are clipped as in training; the KL term is left out.
    """
    kept, bars = copy.deepcopy(policy.state_dict()), []
    for group in groups:
        _, scores = update_policy(
            accelerator,
            policy,
            None,
            OPTIMIZERS[optimizer](policy.parameters(), lr=lr),
            group.batch,
            policy_term_alone(cfg),
            beta=1.0,
        )
        final_BT = score_batch(accelerator, policy, group.batch, cfg)
        policy.load_state_dict(kept)
        change_R = (final_BT - scores.old_BT)[group.right].double().sum(1)
        question = group.episodes[0].question
        num_tokens = int((group.batch.action_ids_BT[group.right] > 0).sum())
        bars.append(
            {
                "question": question.id,
                "text": question.text,
                "num_right": len(group.right),
                "delta": float(change_R.mean()),
                "delta_per_token": float(change_R.sum()) / num_tokens,
            }
        )
    return sorted(bars, key=lambda bar: bar["delta"])
