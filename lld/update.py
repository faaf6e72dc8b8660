"""Batch -> optimizer steps.

Every process holds the whole batch and computes the same plan, so denominators need no communication. They
count all micro-batches and processes of an optimizer step: neither the micro-batch size nor the number of
processes changes a gradient.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object
from torch.distributed.fsdp import FSDPModule

from lld import loss, weights
from lld.episode import ANSWER, Batch

if TYPE_CHECKING:
    from lld.config import Config, Loss, Optim


def learning_rate(step: int, optim: Optim) -> float:
    """Constant after a linear warm-up over rollout steps.

    Steps count from 1, so that no step has a learning rate of 0; the official code's first step does.
    """
    return optim.lr * min(1.0, (step + 1) / max(1, optim.warmup_steps))


def plan_updates(lengths: list[int], num_updates: int, num_processes: int) -> list[list[list[int]]]:
    """Rows of each update on each process, `plan[update][process]`, balanced by token count.

    Updates get equal numbers of rows (give or take one): rows are dealt, longest first, back and forth.
    Within an update the longest row goes to the process with the fewest tokens. The rows of an update do not
    depend on `num_processes`.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    updates = [[] for _ in range(num_updates)]
    for place, row in enumerate(order):
        lap, seat = divmod(place, num_updates)
        updates[seat if lap % 2 == 0 else num_updates - 1 - seat].append(row)
    return [share_out(rows, lengths, num_processes) for rows in updates]


def share_out(rows: list[int], lengths: list[int], num_shares: int) -> list[list[int]]:
    """`rows` in shares of similar token counts: longest first, each to the share with the fewest tokens."""
    shares, loads = [[] for _ in range(num_shares)], [0] * num_shares
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        share = loads.index(min(loads))
        shares[share].append(row)
        loads[share] += lengths[row]
    return shares


def micro_batches(rows: list[int], batch: Batch, optim: Optim) -> list[list[int]]:
    """`rows` in micro-batches, each one forward pass.

    With `micro_batch_tokens` as few as it allows, of similar token counts; else `micro_batch_size` rows each,
    longest first.
    """
    lengths = batch.lengths_B.tolist()
    if optim.micro_batch_tokens is None:
        rows = sorted(rows, key=lambda row: (-lengths[row], row))
        return [rows[i : i + optim.micro_batch_size] for i in range(0, len(rows), optim.micro_batch_size)]
    fewest = math.ceil(sum(lengths[row] for row in rows) / optim.micro_batch_tokens)
    for count in range(min(fewest, len(rows)), len(rows) + 1):
        runs = share_out(rows, lengths, count)
        if max((sum(lengths[row] for row in run) for run in runs), default=0) <= optim.micro_batch_tokens:
            break
    return runs


def own_micro_batches(accelerator, plan, batch: Batch, optim: Optim) -> list[list[int]]:
    """This process's micro-batches of the updates `plan`, then empty ones, up to the most of any process.

    Forward and backward passes of DDP and FSDP2 are collectives: all processes must make equally many.
    """
    of_process = [
        [rows for shares in plan for rows in micro_batches(shares[process], batch, optim)]
        for process in range(accelerator.num_processes)
    ]
    own = of_process[accelerator.process_index]
    return own + [[]] * (max(map(len, of_process)) - len(own))


def take_rows(batch: Batch, rows: list[int], device) -> Batch:
    """The rows of a micro-batch on `device`; for an empty one a row without a scored token."""
    if rows:
        return batch.rows(rows, device)
    row = batch.rows([0], device)
    unwritten_BT = torch.zeros_like(row.action_ids_BT)
    if row.kept is not None:
        row = replace(row, kept_ids_K=row.kept_ids_K[:0], kept_counts_BT=unwritten_BT.int())
    return replace(row, action_ids_BT=unwritten_BT)


def trained_temperature(cfg: Config) -> float:
    """The temperature of the probabilities that the loss reads."""
    return cfg.rollout.temperature if cfg.loss.temperature is None else cfg.loss.temperature


def score(policy, micro: Batch, cfg: Config, entropy_gradient: bool = False):
    """Log-probabilities and entropies (B, T) of the model's tokens under the distribution that is trained.

    That is the softmax over the vocabulary, or with loss.support "kept" over the ids that the sampler kept
    when it drew the token (arXiv 2512.02556), whichever policy is scored. So the ratio of the unmoved policy
    to the sampler is 1, and the KL term compares both policies on the kept ids (why: docs/samplers.md).
    """
    options, kept = cfg.loss, micro.kept if cfg.loss.support == "kept" else None
    if options.support == "kept" and kept is None:
        raise ValueError(
            "loss.support = 'kept' needs the ids that the sampler kept, and these episodes were recorded "
            "without them: use 'full', or episodes of a run with loss.support = 'kept'"
        )
    written_BT = micro.action_ids_BT > 0
    return policy(micro.token_ids_BT, written_BT, trained_temperature(cfg), entropy_gradient, kept)


def score_rows(accelerator, policy, batch: Batch, plan: list[list[list[int]]], cfg: Config) -> torch.Tensor:
    """Log-probabilities (B, T), on the CPU, of the model's tokens in this process's rows of `plan`, else 0.

    Rows are scored in the same micro-batches as in their update, so that an unchanged policy gives
    bit-identical numbers there.
    """
    return score_both(accelerator, policy, batch, plan, cfg)[0]


@torch.no_grad()
def score_both(accelerator, policy, batch: Batch, plan, cfg: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """`score_rows`, and the entropies likewise."""
    logprobs_BT, entropies_BT = torch.zeros(batch.token_ids_BT.shape), torch.zeros(batch.token_ids_BT.shape)
    policy.eval()
    for rows in own_micro_batches(accelerator, plan, batch, cfg.optim):
        micro = take_rows(batch, rows, accelerator.device)
        with accelerator.autocast():
            scores = score(policy, micro, cfg)
        for table_BT, scores_BT in zip((logprobs_BT, entropies_BT), scores, strict=True):
            table_BT[rows, : scores_BT.shape[1]] = scores_BT[: len(rows)].cpu()
    reshard(policy)
    return logprobs_BT, entropies_BT


def reshard(model) -> None:
    """Gives back, after a forward pass alone, the weights that FSDP2 keeps gathered for a backward pass."""
    for module in model.modules() if isinstance(model, FSDPModule) else ():
        if isinstance(module, FSDPModule):
            module.reshard()


def score_batch(accelerator, policy, batch: Batch, cfg: Config, num_updates: int = 1) -> torch.Tensor:
    """`score_rows` of all rows, in the micro-batches of `num_updates` updates, summed over the processes."""
    plan = plan_updates(batch.lengths_B.tolist(), num_updates, accelerator.num_processes)
    own_BT = score_rows(accelerator, policy, batch, plan, cfg)
    return accelerator.reduce(own_BT.to(accelerator.device), "sum").cpu()


def trained_action_ids(batch: Batch) -> torch.Tensor:
    """(B, T) `action_ids_BT`, 0 also in rows that a filter dropped from the loss."""
    if batch.trained_B is None:
        return batch.action_ids_BT
    return batch.action_ids_BT * batch.trained_B[:, None]


def update_counts(batch: Batch, rows: list[int], preserve: str) -> dict[str, int]:
    """Denominators of one update: its rows, the model's tokens, and those in preserved rows.

    Dropped rows do not count.
    """
    tokens_B = (trained_action_ids(batch)[rows] > 0).sum(1)
    preserved_B = loss.preserved_rows(batch.advantages_B[rows], preserve)
    num_rows = len(rows) if batch.trained_B is None else int(batch.trained_B[rows].sum())
    return {"rows": num_rows, "tokens": int(tokens_B.sum()), "preserved": int(tokens_B[preserved_B].sum())}


def loss_of(
    micro: Batch, logprobs_BT, entropy_BT, ratio_old_BT, reference_BT, anchor_BT, counts, beta, options: Loss
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A micro-batch's share (B,) of the update's loss, row by row, and its terms (B, T) for the log.

    The ratio divides by `ratio_old_BT`, log-probabilities of trainer or sampler; LLDS compares with
    `anchor_BT`, always the trainer's. The sum over all micro-batches and processes of an update is its loss:
    aggregation(weights * surrogate + kl_weight * KL + penalties - entropy_weight * H) + lld_weight * LLDS
    (Eq. 6). Terms of weight 0 are not computed, and their tables may be None; outside the mask, terms may be
    anything.
    """
    action_ids_BT = trained_action_ids(micro)
    mask_BT = action_ids_BT > 0
    tokens = loss.Tokens.of(logprobs_BT, ratio_old_BT, micro.advantages_B, mask_BT, micro.chosen)
    terms_BT, terms = policy_terms(micro, tokens, ratio_old_BT, options)
    if options.kl_weight > 0:
        terms["kl"] = loss.KL_ESTIMATORS[options.kl_estimator](tokens, reference_BT)
        terms_BT = terms_BT + options.kl_weight * terms["kl"]
    for name, number in options.penalties.items():
        terms[name] = loss.PENALTIES[name](tokens, number)
        terms_BT = terms_BT + terms[name]
    if options.entropy_weight > 0:
        terms_BT = terms_BT - options.entropy_weight * entropy_BT
    sums_B = torch.where(mask_BT, terms_BT, 0.0).sum(1)  # not a product: 0 * NaN is NaN
    row_losses_B = weights.AGGREGATIONS[options.aggregation](sums_B, mask_BT.sum(1), counts, options)
    if options.lld_weight > 0:
        terms["lld"] = weighted_lld_terms(micro, action_ids_BT, logprobs_BT, anchor_BT, beta, options)
        denominator = counts["preserved"] if options.lld_normalizer == "preserved" else counts["tokens"]
        row_losses_B = row_losses_B + options.lld_weight * terms["lld"].sum(1) / max(1, denominator)
    return row_losses_B, terms


def policy_terms(micro: Batch, tokens: loss.Tokens, ratio_old_BT, options: Loss) -> tuple[torch.Tensor, dict]:
    """(B, T) weighted surrogate terms, and what is logged: them, and the correction and weights if in use."""
    terms_BT, terms = loss.surrogate_terms(tokens, options), {}
    if options.correction != "none":
        sampled_BT = micro.sampled_logprobs_BT
        terms["correction"] = weights.correction_weights(ratio_old_BT, sampled_BT, tokens.mask_BT, options)
        terms_BT = terms["correction"] * terms_BT
    if options.weights:
        terms["weight"] = torch.ones_like(terms_BT)
        for name, number in options.weights.items():
            terms["weight"] = terms["weight"] * weights.WEIGHTS[name](tokens, number)
        terms_BT = terms["weight"] * terms_BT
    return terms_BT, terms | {"policy": terms_BT}


def weighted_lld_terms(
    micro: Batch, action_ids_BT, logprobs_BT, anchor_BT, beta: float, options: Loss
) -> torch.Tensor:
    """(B, T) LLDS terms; those of answer tokens are multiplied by beta."""
    terms_BT = loss.lld_terms(
        logprobs_BT,
        anchor_BT,
        micro.advantages_B,
        action_ids_BT,
        gate=options.lld_gate,
        preserve=options.lld_preserve,
        tolerance=options.lld_tolerance,
    )
    return terms_BT * loss.answer_weights(micro.part_ids_BT == ANSWER, beta)


@dataclass
class Scores:
    """Log-probabilities (B, T) of the whole batch, the same on every process.

    0 on tokens the model did not write. All but `ratio_old_BT` come from the trainer's forward passes over
    the same micro-batches: any two of them differ only by the policy.
    """

    old_BT: torch.Tensor  # before the first update
    new_BT: torch.Tensor  # at the moment of the update that used the row
    entropy_BT: torch.Tensor  # likewise
    final_BT: torch.Tensor | None  # after the last update; None where the rollout was not scored again
    anchor_BT: torch.Tensor  # what LLDS compares with: old_BT, or an older policy's
    rows: list[list[int]]  # the batch's rows that each update used
    ratio_old_BT: torch.Tensor | None = None  # the sampler's, if the ratio divides by them; None: old_BT
    bf16: bool = False  # computed in bf16


@dataclass
class Tables:
    """Log-probabilities (B, T) on the CPU during the updates of a rollout: this process's rows, 0 elsewhere.

    `ratio_old_BT`, `reference_BT` and `anchor_BT` may be aliases of `old_BT`, not copies: what the first
    update writes into it must appear in them (see `score_past`).
    """

    old_BT: torch.Tensor
    ratio_old_BT: torch.Tensor
    reference_BT: torch.Tensor
    anchor_BT: torch.Tensor
    new_BT: torch.Tensor
    entropy_BT: torch.Tensor


def update_policy(
    accelerator, policy, reference, optimizer, batch: Batch, cfg: Config, *, beta: float, anchor=None
) -> tuple[list[dict], Scores]:
    """Makes `updates_per_rollout` optimizer steps on one rollout.

    Returns a row of metrics for each step, and all log-probabilities that were computed.

    policy: prepared `Policy`; reference: frozen `Policy`, or None where kl_weight is 0; beta: LLDS-MA's
    weight on answer tokens; anchor: the older `Policy` LLDS compares with, or None for this rollout's.

    LLDS compares forward passes of the trainer over the same micro-batches, whatever loss.old_logprobs is.
    Its gradient does not depend on the size of a fall, so a fall caused by rounding would count as much as a
    real one. Without `anchor`, LLDS is therefore exactly 0 at the first update.

    A step whose loss or gradient is not finite is skipped on all processes, counted, and the episodes it came
    from are named. Names of the metrics are in lld/record/glossary.py.
    """
    plan = plan_updates(batch.lengths_B.tolist(), cfg.optim.updates_per_rollout, accelerator.num_processes)
    tables = score_past(accelerator, policy, reference, anchor, batch, plan, cfg)
    policy.train()
    update_rows = [
        optimizer_step(accelerator, policy, optimizer, batch, shares, update, tables, beta, cfg)
        for update, shares in enumerate(plan)
    ]
    return update_rows, gather_scores(accelerator, batch, plan, tables, cfg)


def score_past(accelerator, policy, reference, anchor, batch: Batch, plan, cfg: Config) -> Tables:
    """The tables that the updates compare with, computed before the first of them.

    - `old_BT` is not computed for the rows of the first update. There the policy still is the old one, so
      that update's own forward pass fills them in; with one update per rollout nothing is scored twice.
    - `ratio_old_BT` is the sampler's log-probabilities, which are not scored, or `old_BT` itself.
    - `reference_BT` is scored where kl_weight > 0, else it is `old_BT` itself, which the loss does not read.
    - `anchor_BT` is scored where LLDS compares with an older policy, else it is `old_BT` itself.
    """
    old_BT = score_rows(accelerator, policy, batch, plan[1:], cfg)
    ratio_old_BT = reference_BT = anchor_BT = old_BT
    if cfg.loss.old_logprobs == "sampler":
        ratio_old_BT = batch.sampled_logprobs_BT
    if cfg.loss.kl_weight > 0:
        reference_BT = score_rows(accelerator, reference, batch, plan, cfg)
    if anchor is not None:
        anchor_BT = score_rows(accelerator, anchor, batch, plan, cfg)
    new_BT, entropy_BT = torch.zeros_like(old_BT), torch.zeros_like(old_BT)
    return Tables(old_BT, ratio_old_BT, reference_BT, anchor_BT, new_BT, entropy_BT)


def optimizer_step(
    accelerator, policy, optimizer, batch: Batch, shares, update: int, tables: Tables, beta, cfg: Config
) -> dict[str, float]:
    """One update on the rows `shares` (one list per process), by micro-batches; returns its metrics."""
    counts = update_counts(batch, rows_of_update(shares), cfg.loss.lld_preserve)
    micro_rows = own_micro_batches(accelerator, [shares], batch, cfg.optim)
    means, suspects = Means(accelerator.device), []
    for number, rows in enumerate(micro_rows, start=1):
        micro = take_rows(batch, rows, accelerator.device)
        # FSDP2 reduces gradients after every micro-batch: an unsharded gradient would not fit in memory.
        reduces = number == len(micro_rows) or isinstance(policy, FSDPModule)
        with nullcontext() if reduces else accelerator.no_sync(policy):
            losses_B, terms, logprobs_BT, entropies_BT = micro_batch_loss(
                accelerator, policy, micro, rows, update, tables, counts, beta, cfg
            )
            # DDP and FSDP2 average gradients over processes; the denominators already count all of them.
            accelerator.backward(losses_B.sum() * accelerator.num_processes)
        finite_B = losses_B.isfinite()
        suspects += [
            batch.names[row] for row, finite in zip(rows, finite_B.tolist(), strict=False) if not finite
        ]
        # Rows with a non-finite loss are reported, and like dropped ones left out of the means.
        mask_BT = (trained_action_ids(micro) > 0) & finite_B[:, None]
        means.add("loss", losses_B.detach() * counts["rows"], mask_BT.any(1))
        for name, terms_BT in terms.items():
            means.add(f"loss/{name}", terms_BT.detach(), mask_BT)
        if rows:
            width = logprobs_BT.shape[1]
            tables.new_BT[rows, :width] = logprobs_BT.detach().cpu()
            tables.entropy_BT[rows, :width] = entropies_BT.detach().cpu()
    row = means.reduce(accelerator)
    return row | apply_gradient(accelerator, policy, optimizer, suspects, update, cfg.optim.max_grad_norm)


def micro_batch_loss(
    accelerator, policy, micro: Batch, rows, update: int, tables: Tables, counts, beta, cfg: Config
) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """The forward pass and loss of one micro-batch: losses (B,), terms, log-probabilities, entropies (B, T).

    `rows` are its rows in the batch, none for an empty one. In the first update their log-probabilities are
    written into `tables.old_BT`, whose aliases the loss then reads.
    """
    with accelerator.autocast():
        logprobs_BT, entropies_BT = score(policy, micro, cfg, cfg.loss.entropy_weight > 0)
    width = micro.token_ids_BT.shape[1]
    if rows and update == 0:
        tables.old_BT[rows, :width] = logprobs_BT.detach().cpu()
    past = [
        table_BT[rows or [0], :width].to(accelerator.device)
        for table_BT in (tables.ratio_old_BT, tables.reference_BT, tables.anchor_BT)
    ]
    losses_B, terms = loss_of(micro, logprobs_BT, entropies_BT, *past, counts, beta, cfg.loss)
    return losses_B, terms, logprobs_BT, entropies_BT


def rows_of_update(shares: list[list[int]]) -> list[int]:
    """The rows of one update over all processes, in order."""
    return sorted(row for share in shares for row in share)


def gather_scores(accelerator, batch: Batch, plan, tables: Tables, cfg: Config) -> Scores:
    """The tables with the rows of all processes, on every process."""

    def gather(table_BT: torch.Tensor) -> torch.Tensor:
        # Each row belongs to one process and is 0 on the others, so a sum gathers all.
        return accelerator.reduce(table_BT.to(accelerator.device), "sum").cpu()

    old_BT = gather(tables.old_BT)
    return Scores(
        old_BT=old_BT,
        new_BT=gather(tables.new_BT),
        entropy_BT=gather(tables.entropy_BT),
        final_BT=None,
        anchor_BT=old_BT if tables.anchor_BT is tables.old_BT else gather(tables.anchor_BT),
        rows=[rows_of_update(shares) for shares in plan],
        ratio_old_BT=batch.sampled_logprobs_BT if cfg.loss.old_logprobs == "sampler" else None,
        bf16=accelerator.mixed_precision == "bf16",
    )


def apply_gradient(
    accelerator, policy, optimizer, suspects: list[str], update: int, max_grad_norm: float
) -> dict[str, float]:
    """Clips the gradient and makes the step; skips the step, with a message, if the gradient is not finite.

    The message names the episodes `suspects` of all processes.
    """
    grad_norm = float(accelerator.clip_grad_norm_(policy.parameters(), max_grad_norm))
    if math.isfinite(grad_norm):
        optimizer.step()
        metrics = {"grad_norm": grad_norm, "skipped_updates": 0}
    else:
        metrics = {"skipped_updates": 1}
        named = ", ".join(gather_object(suspects)) or "none alone: every loss is finite, the gradient is not"
        accelerator.print(
            f"update {update}: gradient norm is {grad_norm}; step skipped. Episodes with a non-finite "
            f"loss: {named}"
        )
    optimizer.zero_grad()
    return metrics


class Means:
    """Means over the tokens of all processes: sums and counts on the device, reduced in one collective."""

    def __init__(self, device):
        self.device, self.sums = device, {}

    def add(self, name: str, values, mask) -> None:
        """Adds `values`, of any shape, where `mask`, of the same shape, is true."""
        pair = torch.stack([torch.where(mask, values.double(), 0.0).sum(), mask.sum().double()])
        self.sums[name] = self.sums[name] + pair if name in self.sums else pair

    def reduce(self, accelerator) -> dict[str, float]:
        """Means over all processes; a name without values is left out."""
        names = sorted(self.sums)
        pairs = accelerator.reduce(torch.stack([self.sums[name] for name in names]), "sum").tolist()
        return {name: total / count for name, (total, count) in zip(names, pairs, strict=True) if count}
