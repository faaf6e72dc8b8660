"""Batch -> optimizer steps.

Every process holds the whole batch and computes the same plan, so all denominators are known without communication and
count all micro-batches and processes of an optimizer step: neither the micro-batch size nor the number of processes
changes a gradient.
"""

from contextlib import nullcontext

import torch
from accelerate.utils import gather_object

from lld import loss
from lld.config import Config, Optim
from lld.episode import Batch
from lld.metrics import Means


def learning_rate(step: int, optim: Optim) -> float:
    """Constant after a linear warm-up over rollout steps, counted from 1 so that no step is spent at zero
    (the official code's first rollout step runs with a learning rate of 0)."""
    return optim.lr * min(1.0, (step + 1) / max(1, optim.warmup_steps))


def plan_updates(lengths: list[int], num_updates: int, num_processes: int) -> list[list[list[int]]]:
    """Rows of each optimizer step on each process, `plan[update][process]`, balanced by token count.

    Steps get equal numbers of rows (give or take one) by dealing the rows, longest first, back and forth; within a step
    the longest row goes to the process with the fewest tokens. The rows of a step do not depend on `num_processes`.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    updates = [[] for _ in range(num_updates)]
    for place, row in enumerate(order):
        lap, seat = divmod(place, num_updates)
        updates[seat if lap % 2 == 0 else num_updates - 1 - seat].append(row)
    plan = []
    for rows in updates:
        shares, loads = [[] for _ in range(num_processes)], [0] * num_processes
        for row in rows:
            process = loads.index(min(loads))
            shares[process].append(row)
            loads[process] += lengths[row]
        plan.append(shares)
    return plan


def micro_batches(rows: list[int], batch: Batch, size: int) -> list[list[int]]:
    """`rows` in runs of at most `size`, longest first, so that rows of like length share their padding."""
    rows = sorted(rows, key=lambda row: (-int(batch.lengths_B[row]), row))
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def select(batch: Batch, rows: list[int], device) -> dict[str, torch.Tensor]:
    """The tensors of some rows, cut to the longest of them, on `device`."""
    length = int(batch.lengths_B[rows].max())
    cut = {name: getattr(batch, name)[rows, :length] for name in ("token_ids_BT", "action_ids_BT", "answer_mask_BT", "sampled_logprobs_BT")}
    cut["advantages_B"] = batch.advantages_B[rows]
    return {name: tensor.to(device) for name, tensor in cut.items()}


@torch.no_grad()
def score_rows(accelerator, policy, batch: Batch, rows: list[int], cfg: Config) -> torch.Tensor:
    """Log-probabilities (B, T) of the model's tokens in `rows`, 0 elsewhere, on the CPU."""
    logprobs_BT = torch.zeros(batch.token_ids_BT.shape)
    policy.eval()
    for some in micro_batches(rows, batch, cfg.optim.micro_batch_size):
        part = select(batch, some, accelerator.device)
        with accelerator.autocast():
            scored_BT, _ = policy(part["token_ids_BT"], part["action_ids_BT"] > 0, cfg.rollout.temperature)
        logprobs_BT[some, : scored_BT.shape[1]] = scored_BT.cpu()
    return logprobs_BT


def minibatch_counts(batch: Batch, rows: list[int], preserve: str) -> dict[str, int]:
    """Denominators of one optimizer step: its rows, the model's tokens in them, and those of the preserving set."""
    tokens_B = (batch.action_ids_BT[rows] > 0).sum(1)
    preserved_B = batch.advantages_B[rows] >= 0 if preserve == "nonnegative" else batch.advantages_B[rows] > 0
    return {"rows": len(rows), "tokens": int(tokens_B.sum()), "preserved": int(tokens_B[preserved_B].sum())}


def loss_of(part: dict, logprobs_BT, entropy_BT, old_BT, reference_BT, anchor_BT, counts: dict, beta: float, cfg: Config):
    """This micro-batch's share (B,) of the step's loss, row by row, and its unreduced terms (B, T) for the record.

    Sums over all micro-batches and processes of a step are the loss of the step:
    Eq. 1 (or its token mean) + kl_weight * k3 - entropy_weight * H + lambda * LLDS (Eq. 6).
    """
    options = cfg.loss
    mask_BT = part["action_ids_BT"] > 0
    terms_BT = loss.surrogate_terms(
        logprobs_BT, old_BT, part["advantages_B"], mask_BT, kind=options.kind, clip_low=options.clip_low, clip_high=options.clip_high
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
        terms["lld"] = loss.lld_terms(logprobs_BT, anchor_BT, part["advantages_B"], part["action_ids_BT"], gate=options.lld_gate, preserve=options.lld_preserve)
        terms["lld"] = terms["lld"] * loss.answer_weights(part["answer_mask_BT"], beta)
        denominator = counts["preserved"] if options.lld_normalizer == "preserved" else counts["tokens"]
        row_losses_B = row_losses_B + options.lld_weight * terms["lld"].sum(1) / max(1, denominator)
    return row_losses_B, terms


def update_policy(accelerator, policy, reference, optimizer, batch: Batch, cfg: Config, *, beta: float, anchor=None) -> dict[str, float]:
    """Makes `updates_per_rollout` optimizer steps on one rollout and returns its metrics (names in metrics.GLOSSARY).

    policy: prepared `Policy`; reference: frozen `Policy`, or None where kl_weight is 0; beta: LLDS-MA's weight on answer
    tokens; anchor: the older `Policy` LLDS compares with, or None for this rollout's. A step whose loss or gradient is
    not finite is skipped on all processes, counted, and the episodes it came from are named.
    """
    plan = plan_updates(batch.lengths_B.tolist(), cfg.optim.updates_per_rollout, accelerator.num_processes)
    mine = [row for shares in plan for row in shares[accelerator.process_index]]
    score = lambda model: score_rows(accelerator, model, batch, mine, cfg)
    old_BT = batch.sampled_logprobs_BT if cfg.loss.old_logprobs == "sampler" else score(policy)
    reference_BT = score(reference) if cfg.loss.kl_weight > 0 else old_BT
    anchor_BT = score(anchor) if anchor is not None else old_BT
    means, grad_norms, num_skipped = Means(accelerator.device), [], 0
    policy.train()
    for update, shares in enumerate(plan):
        counts = minibatch_counts(batch, sorted(row for share in shares for row in share), cfg.loss.lld_preserve)
        runs = micro_batches(shares[accelerator.process_index], batch, cfg.optim.micro_batch_size)
        most = max(len(micro_batches(share, batch, cfg.optim.micro_batch_size)) for share in shares)
        suspects = []
        for number in range(most):
            rows = runs[number] if number < len(runs) else [0]
            part = select(batch, rows, accelerator.device)
            if number >= len(runs):  # collectives must pair up: a process with fewer micro-batches goes along with no tokens
                part["action_ids_BT"] = torch.zeros_like(part["action_ids_BT"])
            past = [tensor[rows, : part["token_ids_BT"].shape[1]].to(accelerator.device) for tensor in (old_BT, reference_BT, anchor_BT)]
            with nullcontext() if number == most - 1 else accelerator.no_sync(policy):
                with accelerator.autocast():
                    logprobs_BT, entropy_BT = policy(part["token_ids_BT"], part["action_ids_BT"] > 0, cfg.rollout.temperature, cfg.loss.entropy_weight > 0)
                row_losses_B, terms = loss_of(part, logprobs_BT, entropy_BT, *past, counts, beta, cfg)
                # DDP averages gradients over processes; the denominators already count all of them.
                accelerator.backward(row_losses_B.sum() * accelerator.num_processes)
            suspects += [batch.names[row] for row, fine in zip(rows, row_losses_B.isfinite().tolist()) if not fine]
            record(means, part, logprobs_BT.detach(), entropy_BT.detach(), past[0], row_losses_B.detach() * counts["rows"], terms, cfg, update == 0)
        grad_norm = float(accelerator.clip_grad_norm_(policy.parameters(), cfg.optim.max_grad_norm))
        if torch.isfinite(torch.tensor(grad_norm)):
            optimizer.step()
            grad_norms.append(grad_norm)
        else:
            num_skipped += 1
            suspects = gather_object(suspects)
            named = ", ".join(suspects) or "none alone: every loss is finite, the gradient is not"
            accelerator.print(f"update {update}: gradient norm is {grad_norm}; step skipped. Episodes with a non-finite loss: {named}")
        optimizer.zero_grad()
    metrics = means.reduce(accelerator)
    metrics["grad_norm"] = sum(grad_norms) / len(grad_norms) if grad_norms else 0.0
    metrics["grad_norm_max"] = max(grad_norms, default=0.0)
    metrics["skipped_updates"] = num_skipped
    return metrics


def record(means: Means, part: dict, logprobs_BT, entropy_BT, old_BT, row_losses_B, terms: dict, cfg: Config, first: bool) -> None:
    """Adds one micro-batch to the running means; each mean is taken over its own tokens, of all micro-batches and processes."""
    mask_BT = (part["action_ids_BT"] > 0) & row_losses_B.isfinite()[:, None]  # a row that is not finite is named, not averaged
    log_ratio_BT = torch.where(mask_BT, logprobs_BT - old_BT, 0.0)
    advantages_B1 = part["advantages_B"][:, None]
    means.add("entropy", entropy_BT, mask_BT)
    means.add("loss", row_losses_B, mask_BT.any(1))
    for name, terms_BT in terms.items():
        means.add(f"loss/{name}", terms_BT.detach(), mask_BT)
    if cfg.loss.kind == "gspo":  # one ratio a row
        used_BT = (log_ratio_BT.sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)).expand_as(log_ratio_BT)
    else:
        used_BT = log_ratio_BT
    ratio_BT = torch.where(mask_BT, used_BT.clamp(max=20), 0.0).exp()  # clamped as in the loss
    means.add("ratio/mean", ratio_BT, mask_BT)
    means.maximum("ratio/max", ratio_BT)
    clipped_BT = ((advantages_B1 > 0) & (ratio_BT > 1 + cfg.loss.clip_high)) | ((advantages_B1 < 0) & (ratio_BT < 1 - cfg.loss.clip_low))
    means.add("ratio/clipped", clipped_BT.float(), mask_BT)
    for name, chosen_B1 in {"correct": advantages_B1 > 0, "incorrect": advantages_B1 < 0, "neutral": advantages_B1 == 0}.items():
        chosen_BT = mask_BT & chosen_B1
        means.add(f"likelihood/{name}_old", old_BT, chosen_BT)
        means.add(f"likelihood/{name}_new", logprobs_BT, chosen_BT)
        means.add(f"displacement/{name}", log_ratio_BT, chosen_BT)
    if first:  # before the first optimizer step the trainer's policy still is the sampler's
        gap_BT = torch.where(mask_BT, (logprobs_BT - part["sampled_logprobs_BT"]).abs(), 0.0)
        means.add("sampler_gap/mean", gap_BT, mask_BT)
        means.maximum("sampler_gap/max", gap_BT)
