"""Batch -> optimizer steps.

Every process holds the whole batch and computes the same plan, so all denominators are known without
communication and count all micro-batches and processes of an optimizer step: neither the micro-batch size nor
the number of processes changes a gradient.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate.utils import gather_object
from torch.distributed.fsdp import FSDPModule

from lld import loss
from lld.config import Config, Optim
from lld.episode import ANSWER, Batch


def learning_rate(step: int, optim: Optim) -> float:
    """Constant after a linear warm-up over rollout steps, counted from 1 so that no step is spent at zero
    (the official code's first rollout step runs with a learning rate of 0)."""
    return optim.lr * min(1.0, (step + 1) / max(1, optim.warmup_steps))


def plan_updates(lengths: list[int], num_updates: int, num_processes: int) -> list[list[list[int]]]:
    """Rows of each optimizer step on each process, `plan[update][process]`, balanced by token count.

    Steps get equal numbers of rows (give or take one) by dealing the rows, longest first, back and forth;
    within a step the longest row goes to the process with the fewest tokens. The rows of a step do not depend
    on `num_processes`.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    updates = [[] for _ in range(num_updates)]
    for place, row in enumerate(order):
        lap, seat = divmod(place, num_updates)
        updates[seat if lap % 2 == 0 else num_updates - 1 - seat].append(row)
    return [share_out(rows, lengths, num_processes) for rows in updates]


def share_out(rows: list[int], lengths: list[int], num_shares: int) -> list[list[int]]:
    """`rows` in shares of like token counts: longest first, each to the share with the fewest tokens."""
    shares, loads = [[] for _ in range(num_shares)], [0] * num_shares
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        share = loads.index(min(loads))
        shares[share].append(row)
        loads[share] += lengths[row]
    return shares


def micro_batches(rows: list[int], batch: Batch, optim: Optim) -> list[list[int]]:
    """`rows` in runs of one forward pass each: as few as `micro_batch_tokens` allows, of like token counts,
    or `micro_batch_size` rows, longest first."""
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


def select(batch: Batch, rows: list[int], device) -> dict[str, torch.Tensor]:
    """The tensors of some rows, cut to the longest of them, on `device`."""
    length = int(batch.lengths_B[rows].max())
    cut = {
        name: getattr(batch, name)[rows, :length] for name in ("token_ids_BT", "action_ids_BT", "part_ids_BT")
    }
    cut["advantages_B"] = batch.advantages_B[rows]
    return {name: tensor.to(device) for name, tensor in cut.items()}


@torch.no_grad()
def score_rows(accelerator, policy, batch: Batch, plan: list[list[list[int]]], cfg: Config) -> torch.Tensor:
    """Log-probabilities (B, T) of the model's tokens in this process's rows of `plan`, 0 elsewhere, on the
    CPU.

    Rows are scored in the micro-batches in which their update will read them, so that a policy that has not
    moved gives the same numbers there, to the last bit. All processes make as many forward passes as the one
    with most: those of a sharded model are collectives.
    """
    logprobs_BT = torch.zeros(batch.token_ids_BT.shape)
    policy.eval()
    runs_of = lambda process: [
        run for shares in plan for run in micro_batches(shares[process], batch, cfg.optim)
    ]
    runs = [runs_of(process) for process in range(accelerator.num_processes)]
    own = runs[accelerator.process_index]
    for number in range(max(map(len, runs))):
        some = own[number] if number < len(own) else []
        part = select(batch, some or [0], accelerator.device)
        scored_BT = (part["action_ids_BT"] > 0) & bool(some)
        with accelerator.autocast():
            scores_BT, _ = policy(part["token_ids_BT"], scored_BT, cfg.rollout.temperature)
        logprobs_BT[some, : scores_BT.shape[1]] = scores_BT[: len(some)].cpu()
    return logprobs_BT


def score_batch(accelerator, policy, batch: Batch, cfg: Config, num_updates: int = 1) -> torch.Tensor:
    """`score_rows` of all rows, in the micro-batches of that many updates; every process gets the whole."""
    plan = plan_updates(batch.lengths_B.tolist(), num_updates, accelerator.num_processes)
    own_BT = score_rows(accelerator, policy, batch, plan, cfg)
    return accelerator.reduce(own_BT.to(accelerator.device), "sum").cpu()


def minibatch_counts(batch: Batch, rows: list[int], preserve: str) -> dict[str, int]:
    """Denominators of one optimizer step: its rows, the model's tokens in them, and those of the preserving
    set."""
    tokens_B = (batch.action_ids_BT[rows] > 0).sum(1)
    preserved_B = loss.preserved_rows(batch.advantages_B[rows], preserve)
    return {"rows": len(rows), "tokens": int(tokens_B.sum()), "preserved": int(tokens_B[preserved_B].sum())}


def loss_of(
    part: dict,
    logprobs_BT,
    entropy_BT,
    old_BT,
    reference_BT,
    anchor_BT,
    counts: dict,
    beta: float,
    cfg: Config,
):
    """This micro-batch's share (B,) of the step's loss, row by row, and its unreduced terms (B, T) for the
    record.

    `old_BT` is what the ratio divides by, the trainer's or the sampler's; `anchor_BT`, with which LLDS
    compares, is always the trainer's. Sums over all micro-batches and processes of a step are the loss of the
    step: Eq. 1 (or its token mean) + kl_weight * k3 - entropy_weight * H + lambda * LLDS (Eq. 6).
    """
    options = cfg.loss
    mask_BT = part["action_ids_BT"] > 0
    terms_BT = loss.surrogate_terms(
        logprobs_BT,
        old_BT,
        part["advantages_B"],
        mask_BT,
        kind=options.kind,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
    )
    terms = {"policy": terms_BT}
    if options.kl_weight > 0:
        terms["kl"] = loss.kl_terms(logprobs_BT, reference_BT) * mask_BT
        terms_BT = terms_BT + options.kl_weight * terms["kl"]
    if options.entropy_weight > 0:
        terms_BT = terms_BT - options.entropy_weight * entropy_BT
    if options.aggregation == "sequence_mean":
        row_losses_B = terms_BT.sum(1) / mask_BT.sum(1).clamp(min=1) / counts["rows"]
    else:
        row_losses_B = terms_BT.sum(1) / counts["tokens"]
    if options.lld_weight > 0:
        terms["lld"] = loss.lld_terms(
            logprobs_BT,
            anchor_BT,
            part["advantages_B"],
            part["action_ids_BT"],
            gate=options.lld_gate,
            preserve=options.lld_preserve,
            tolerance=options.lld_tolerance,
        )
        terms["lld"] = terms["lld"] * loss.answer_weights(part["part_ids_BT"] == ANSWER, beta)
        denominator = counts["preserved"] if options.lld_normalizer == "preserved" else counts["tokens"]
        row_losses_B = row_losses_B + options.lld_weight * terms["lld"].sum(1) / max(1, denominator)
    return row_losses_B, terms


@dataclass
class Scores:
    """Log-probabilities (B, T) of the whole batch, the same on every process, 0 on tokens the model did not
    write.

    All are the trainer's, by the same forward passes, so that what differs between two of them is the policy:
    `old_BT` before the first update, `new_BT` and `entropy_BT` at the moment of the update that used the row,
    `final_BT` after the last one (None where the rollout was not re-scored), `anchor_BT` what LLDS compares
    with, which is `old_BT` unless it is an older policy. Only `divisor_BT`, what the ratio divides by, may be
    the sampler's; None: it is `old_BT`. `rows[u]` are the rows of update u; `half`: whether all this was
    computed in bf16.
    """

    old_BT: torch.Tensor
    new_BT: torch.Tensor
    entropy_BT: torch.Tensor
    final_BT: torch.Tensor | None
    anchor_BT: torch.Tensor
    rows: list[list[int]]
    divisor_BT: torch.Tensor | None = None
    half: bool = False


def update_policy(
    accelerator, policy, reference, optimizer, batch: Batch, cfg: Config, *, beta: float, anchor=None
) -> tuple[list[dict], Scores]:
    """Makes `updates_per_rollout` optimizer steps on one rollout; returns a row of metrics for each and what
    was scored on the way.

    policy: prepared `Policy`; reference: frozen `Policy`, or None where kl_weight is 0; beta: LLDS-MA's
    weight on answer tokens; anchor: the older `Policy` LLDS compares with, or None for this rollout's.

    LLDS compares forward passes of the trainer over the same micro-batches, whatever loss.old_logprobs says:
    its gradient does not shrink with the size of a fall, so a fall that is rounding would count as much as a
    true one. At the first update it is therefore exactly 0.

    A step whose loss or gradient is not finite is skipped on all processes, counted, and the episodes it came
    from are named. Names of the rows are in metrics.GLOSSARY.
    """
    plan = plan_updates(batch.lengths_B.tolist(), cfg.optim.updates_per_rollout, accelerator.num_processes)
    score = lambda model, updates: score_rows(accelerator, model, batch, updates, cfg)
    # At its first update the policy still is the old one: those rows' pass is the update's own (all rows',
    # where there is one update).
    old_BT = score(policy, plan[1:])
    divisor_BT = batch.sampled_logprobs_BT if cfg.loss.old_logprobs == "sampler" else old_BT
    reference_BT = score(reference, plan) if cfg.loss.kl_weight > 0 else old_BT
    anchor_BT = score(anchor, plan) if anchor is not None else old_BT
    new_BT, entropy_BT = torch.zeros_like(old_BT), torch.zeros_like(old_BT)
    policy.train()
    update_rows = []
    rows_of = [sorted(row for share in shares for row in share) for shares in plan]
    for shares, rows_of_step in zip(plan, rows_of, strict=True):
        counts = minibatch_counts(batch, rows_of_step, cfg.loss.lld_preserve)
        runs_of = [micro_batches(share, batch, cfg.optim) for share in shares]
        runs, most = runs_of[accelerator.process_index], max(map(len, runs_of))
        means, suspects = Means(accelerator.device), []
        for number in range(most):
            rows = runs[number] if number < len(runs) else [0]
            part = select(batch, rows, accelerator.device)
            # Collectives must pair up: a process with fewer micro-batches goes along with no tokens
            if number >= len(runs):
                part["action_ids_BT"] = torch.zeros_like(part["action_ids_BT"])
            width = part["token_ids_BT"].shape[1]
            # Shards are reduced each time: a whole gradient is what does not fit
            with (
                nullcontext()
                if number == most - 1 or isinstance(policy, FSDPModule)
                else accelerator.no_sync(policy)
            ):
                with accelerator.autocast():
                    logprobs_BT, entropies_BT = policy(
                        part["token_ids_BT"],
                        part["action_ids_BT"] > 0,
                        cfg.rollout.temperature,
                        cfg.loss.entropy_weight > 0,
                    )
                if number < len(runs) and not update_rows:
                    old_BT[rows, :width] = logprobs_BT.detach().cpu()
                past = [
                    tensor[rows, :width].to(accelerator.device)
                    for tensor in (divisor_BT, reference_BT, anchor_BT)
                ]
                row_losses_B, terms = loss_of(part, logprobs_BT, entropies_BT, *past, counts, beta, cfg)
                # DDP and FSDP2 average gradients over processes; the denominators already count all of them.
                accelerator.backward(row_losses_B.sum() * accelerator.num_processes)
            finite_B = row_losses_B.isfinite()
            suspects += [
                batch.names[row] for row, fine in zip(rows, finite_B.tolist(), strict=True) if not fine
            ]
            # A row that is not finite is named, not averaged
            mask_BT = (part["action_ids_BT"] > 0) & finite_B[:, None]
            means.add("loss", row_losses_B.detach() * counts["rows"], mask_BT.any(1))
            for name, terms_BT in terms.items():
                means.add(f"loss/{name}", terms_BT.detach(), mask_BT)
            if number < len(runs):
                new_BT[rows, :width] = logprobs_BT.detach().cpu()
                entropy_BT[rows, :width] = entropies_BT.detach().cpu()
        update_rows.append(
            means.reduce(accelerator)
            | make_step(accelerator, policy, optimizer, suspects, len(update_rows), cfg.optim.max_grad_norm)
        )
    own = {"old": old_BT, "new": new_BT, "entropy": entropy_BT} | (
        {} if anchor is None else {"anchor": anchor_BT}
    )
    whole = {
        name: accelerator.reduce(tensor.to(accelerator.device), "sum").cpu() for name, tensor in own.items()
    }
    divisor_BT = batch.sampled_logprobs_BT if cfg.loss.old_logprobs == "sampler" else None
    anchor_BT, half = whole.get("anchor", whole["old"]), accelerator.mixed_precision == "bf16"
    scores = Scores(whole["old"], whole["new"], whole["entropy"], None, anchor_BT, rows_of, divisor_BT, half)
    return update_rows, scores


def make_step(
    accelerator, policy, optimizer, suspects: list[str], update: int, max_grad_norm: float
) -> dict[str, float]:
    """Clips and applies the gradient, or skips it where it is not finite, naming the episodes `suspects` of
    all processes."""
    grad_norm = float(accelerator.clip_grad_norm_(policy.parameters(), max_grad_norm))
    finite = math.isfinite(grad_norm)
    if finite:
        optimizer.step()
    else:
        named = ", ".join(gather_object(suspects)) or "none alone: every loss is finite, the gradient is not"
        accelerator.print(
            f"update {update}: gradient norm is {grad_norm}; step skipped. Episodes with a non-finite "
            f"loss: {named}"
        )
    optimizer.zero_grad()
    return ({"grad_norm": grad_norm} if finite else {}) | {"skipped_updates": int(not finite)}


class Means:
    """Sums and counts on the device, reduced over processes at once: true means over their own tokens."""

    def __init__(self, device):
        self.device, self.sums = device, {}

    def add(self, name: str, values, mask) -> None:
        """Adds `values` where `mask`."""
        pair = torch.stack([torch.where(mask, values.double(), 0.0).sum(), mask.sum().double()])
        self.sums[name] = self.sums[name] + pair if name in self.sums else pair

    def reduce(self, accelerator) -> dict[str, float]:
        """Means over all processes; a mean over nothing is absent."""
        names = sorted(self.sums)
        pairs = accelerator.reduce(torch.stack([self.sums[name] for name in names]), "sum").tolist()
        metrics = {name: total / count for name, (total, count) in zip(names, pairs, strict=True) if count}
        return metrics
