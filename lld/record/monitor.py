"""Likelihood displacement, as exact means by class, part and turn, and the paper's other signals.

All of it is computed from full (B, T) tensors of log-probabilities (`update.Scores`), which every process
holds, so no metric depends on micro-batches or the number of processes. Displacement is log pi - log pi_old,
the paper's Delta of Def. 4.1: negative if a token became less likely.
"""

import dataclasses

import torch

from lld.episode import Batch, Episode
from lld.loss import GATES, MAX_LOG_RATIO, lld_gate
from lld.protocol import PARTS
from lld.record import contexts
from lld.record.means import CLASSES, class_of, means
from lld.record.metrics import answer_match
from lld.rules import clip_bounds
from lld.update import Scores

QUANTILES = (0.05, 0.5, 0.95)
# Rounding noise in nats a token, with float32 (False) and bf16 (True). A smaller fall may not be real; see
# docs/rounding.md.
NOISE = {False: 1e-5, True: 3e-3}
BATCH_FIELDS = [field.name for field in dataclasses.fields(Batch)]


def displacement(
    batch: Batch,
    old_BT: torch.Tensor,
    new_BT: torch.Tensor,
    rows: list[int],
    prefix: str = "",
    *,
    bf16: bool = False,
) -> dict[str, float]:
    """Mean displacement of some rows per token, per action and per response, and shares below 0.

    Per token also by part and turn, with quantiles. The value of an action or a response is the sum over its
    tokens, as in Def. 4.1 and Eq. 2. It counts as displaced if it fell by more than NOISE per token; `bf16`
    selects the noise of bf16. Rows with a non-finite value are left out.
    """
    rows_R = torch.tensor(rows)
    action_ids_RT = batch.action_ids_BT[rows_R]
    delta_RT = torch.where(action_ids_RT > 0, new_BT[rows_R] - old_BT[rows_R], 0.0)
    advantages_R = batch.advantages_B[rows_R]
    fine_R = delta_RT.isfinite().all(1) & advantages_R.isfinite()
    class_R = class_of(advantages_R)
    row_N, column_N = ((action_ids_RT > 0) & fine_R[:, None]).nonzero(as_tuple=True)
    if not len(row_N):
        return {}
    delta_N = delta_RT[row_N, column_N]
    action_N = action_ids_RT[row_N, column_N]
    part_N = batch.part_ids_BT[rows_R][row_N, column_N]
    class_N = class_R[row_N]
    turns = int(action_N.max())
    cells = [f"{group}/{part}/turn{turn + 1}" for group in CLASSES for part in PARTS for turn in range(turns)]
    cell_N = (class_N * len(PARTS) + part_N - 1) * turns + action_N - 1
    table = means(f"{prefix}displacement/", cells, delta_N, cell_N)

    action_of_N = row_N * (turns + 1) + action_N
    sums_A = torch.zeros(len(rows) * (turns + 1)).index_add_(0, action_of_N, delta_N)
    counts_A = torch.bincount(action_of_N, minlength=len(sums_A))
    present_A = counts_A > 0
    class_A = class_R.repeat_interleave(turns + 1)[present_A]
    sums_R = delta_RT.sum(1)[fine_R]
    counts_R = (action_ids_RT > 0).sum(1)[fine_R]
    noise = NOISE[bf16]
    table |= _level(prefix, "token", delta_N, class_N, -noise)
    table |= _level(prefix, "action", sums_A[present_A], class_A, -noise * counts_A[present_A])
    table |= _level(prefix, "response", sums_R, class_R[fine_R], -noise * counts_R)
    return table | _quantiles(f"{prefix}displacement/", delta_N, class_N)


def _level(prefix: str, level: str, values_N, class_N, threshold) -> dict[str, float]:
    """Mean displacement by class, and the share of values below `threshold`."""
    names = list(CLASSES) if level == "token" else [f"{name}/per_{level}" for name in CLASSES]
    displaced_N = (values_N < threshold).float()
    shares = means(f"{prefix}displaced/", [f"{name}/{level}s" for name in CLASSES], displaced_N, class_N)
    return means(f"{prefix}displacement/", names, values_N, class_N) | shares


def _quantiles(prefix: str, delta_N: torch.Tensor, class_N: torch.Tensor) -> dict[str, float]:
    table = {}
    for index, name in enumerate(CLASSES):
        # torch.quantile accepts at most 16 million values.
        ordered_n = delta_N[class_N == index].sort().values
        if not len(ordered_n):
            continue
        for q in QUANTILES:
            value = float(ordered_n[round(q * (len(ordered_n) - 1))])
            table[f"{prefix}{name}/q{round(100 * q):02d}"] = value
    return table


def gates(
    batch: Batch, anchor_BT: torch.Tensor, new_BT: torch.Tensor, rows: list[int], tolerance: float = 0.0
) -> dict[str, float]:
    """What each gate of LLDS would do on the rows with A >= 0, whatever `loss.lld_weight` is.

    That is the share of their tokens with an open gate, and the mean penalty per token before lambda
    (Eqs. 4, 9, 10). anchor_BT: log-probabilities that LLDS compares with; tolerance: loss.lld_tolerance.
    """
    rows_R = torch.tensor(rows)
    fine_R = (new_BT[rows_R] - anchor_BT[rows_R]).isfinite().all(1)
    preserved = rows_R[fine_R & (batch.advantages_B[rows_R] >= 0)]
    action_ids_RT = batch.action_ids_BT[preserved]
    num_tokens = int((action_ids_RT > 0).sum())
    if not num_tokens:
        return {}
    fall_RT = anchor_BT[preserved] - new_BT[preserved] - tolerance
    row = {}
    for gate in GATES:
        open_RT = lld_gate(fall_RT, action_ids_RT, gate)
        row[f"gate/{gate}/open"] = float(open_RT.sum()) / num_tokens
        row[f"gate/{gate}/penalty"] = (
            float(torch.where(open_RT, fall_RT.relu(), 0.0).sum(dtype=torch.float64)) / num_tokens
        )
    return row


def policy_change(batch: Batch, scores: Scores, rows: list[int], cfg) -> dict[str, float]:
    """Likelihoods by class, entropy, and the ratio pi / pi_old: mean, tail, and share of clipped tokens."""
    rows_R = torch.tensor(rows)
    advantages_R = batch.advantages_B[rows_R]
    old_RT, new_RT = scores.old_BT[rows_R], scores.new_BT[rows_R]
    ratio_old_RT = old_RT if scores.ratio_old_BT is None else scores.ratio_old_BT[rows_R]
    written_RT = batch.action_ids_BT[rows_R] > 0
    log_ratio_RT = torch.where(written_RT, new_RT - ratio_old_RT, 0.0)
    mask_RT = written_RT & (log_ratio_RT.isfinite().all(1) & advantages_R.isfinite())[:, None]
    if not mask_RT.any():
        return {}
    if cfg.loss.kind == "gspo":  # one ratio a row
        log_ratio_RT = (
            log_ratio_RT.sum(1, keepdim=True) / written_RT.sum(1, keepdim=True).clamp(min=1)
        ).expand_as(log_ratio_RT)
    ratio_N = log_ratio_RT[mask_RT].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantages_N = advantages_R[:, None].expand_as(mask_RT)[mask_RT]
    low, high = clip_bounds(cfg.loss)
    clipped_N = ((advantages_N > 0) & (ratio_N > high)) | ((advantages_N < 0) & (ratio_N < low))
    if cfg.loss.kind == "dual_clip":
        clipped_N |= (advantages_N < 0) & (ratio_N > cfg.loss.clip_dual)
    class_N = class_of(advantages_N)
    tail_N = ratio_N.sort().values
    row = {
        "entropy": float(scores.entropy_BT[rows_R][mask_RT].double().mean()),
        "ratio/mean": float(ratio_N.double().mean()),
        "ratio/max": float(tail_N[-1]),
        "ratio/q999": float(tail_N[round(0.999 * (len(tail_N) - 1))]),
        "ratio/clipped": float(clipped_N.double().mean()),
    }
    for name, values_RT in (("old", old_RT), ("new", new_RT)):
        row |= means("likelihood/", [f"{group}_{name}" for group in CLASSES], values_RT[mask_RT], class_N)
    return row


def sampler_gap(batch: Batch, scores: Scores) -> dict[str, float]:
    """|log p(trainer) - log p(sampler)| over the rows of the first update, which has the sampling policy."""
    rows = scores.rows[0]
    gap_N = (scores.new_BT[rows] - batch.sampled_logprobs_BT[rows]).abs()[batch.action_ids_BT[rows] > 0]
    gap_N = gap_N[gap_N.isfinite()].double()
    if not len(gap_N):
        return {}
    return {"sampler_gap/mean": float(gap_N.mean()), "sampler_gap/max": float(gap_N.max())}


def episode_likelihoods(batch: Batch, old_BT: torch.Tensor, episodes: list[Episode]) -> dict[str, float]:
    """The paper's Figures 5 and 6, from the likelihoods before the update.

    - nll/searchesN: mean negative log-likelihood per token, by the number of searches.
    - wrong/first_action: mean log-probability per token of the first action of wrong episodes.
    - wrong/second_action: that of the second action, if the first was a search.
    - wrong/observation_match: of the wrong episodes that began with a search and whose question also has a
      right episode, the share whose first search found the same passages as that of a right one.

    Wrong and right are by exact match, whatever the reward. Episodes with a non-finite value are left out.
    """
    right = [is_right(episode) for episode in episodes]
    first_found = [first_passages(episode) for episode in episodes]
    good_finds: dict[str, list] = {}
    for index, episode in enumerate(episodes):
        if right[index]:
            good_finds.setdefault(episode.question.id, []).append(first_found[index])
    sums, counts, matches = {}, {}, []
    totals_BK, tokens_BK = action_sums(batch.action_ids_BT, old_BT)
    for index in old_BT.isfinite().all(1).nonzero()[:, 0].tolist():
        episode, totals_K, tokens_K = episodes[index], totals_BK[index], tokens_BK[index]
        names = [(f"nll/searches{episode.num_searches}", -sum(totals_K[1:]), sum(tokens_K[1:]))]
        if not right[index]:
            names.append(("wrong/first_action", totals_K[1], tokens_K[1]))
            if episode.turns and episode.turns[0].searched:
                names.append(("wrong/second_action", totals_K[2], tokens_K[2]))
            if first_found[index] is not None and episode.question.id in good_finds:
                matches.append(first_found[index] in good_finds[episode.question.id])
        for name, total, tokens in names:
            sums[name] = sums.get(name, 0.0) + total
            counts[name] = counts.get(name, 0) + tokens
    row = {name: sums[name] / counts[name] for name in sorted(sums) if counts[name]}
    if matches:
        row["wrong/observation_match"] = sum(matches) / len(matches)
    return row


def action_sums(
    action_ids_BT: torch.Tensor, values_BT: torch.Tensor
) -> tuple[list[list[float]], list[list[int]]]:
    """Per row and action id, 0 to at least 2: the sum of the values, and the number of tokens."""
    size = len(values_BT), max(2, int(action_ids_BT.max())) + 1
    sums_BK = torch.zeros(size, dtype=torch.float64).scatter_add_(1, action_ids_BT, values_BT.double())
    tokens_BK = torch.zeros(size, dtype=torch.long)
    tokens_BK.scatter_add_(1, action_ids_BT, torch.ones_like(action_ids_BT))
    return sums_BK.tolist(), tokens_BK.tolist()


def is_right(episode: Episode) -> bool:
    return answer_match(episode) == 1.0


def first_passages(episode: Episode) -> frozenset | None:
    """The passages that the first action found; None if it was not a search."""
    searched = [turn for turn in episode.turns[:1] if turn.searched]
    return frozenset(passage.contents for passage in searched[0].passages) if searched else None


def describe(batch: Batch, scores: Scores, episodes: list[Episode], cfg) -> dict[str, float]:
    """One row for a rollout and all its updates; names in lld/record/glossary.py."""
    rows = list(range(len(batch.names)))
    row = _describe_rows(batch, scores, rows, cfg) | sampler_gap(batch, scores)
    row |= episode_likelihoods(batch, scores.old_BT, episodes) | contexts.describe(batch, scores, episodes)
    if scores.final_BT is not None:
        row |= displacement(batch, scores.old_BT, scores.final_BT, rows, "final/", bf16=scores.bf16)
    return row


def describe_update(batch: Batch, scores: Scores, update: int, cfg) -> dict[str, float]:
    """One row for one optimizer step, over the rows it used."""
    return _describe_rows(batch, scores, scores.rows[update], cfg)


def _describe_rows(batch: Batch, scores: Scores, rows: list[int], cfg) -> dict[str, float]:
    row = policy_change(batch, scores, rows, cfg)
    row |= displacement(batch, scores.old_BT, scores.new_BT, rows, bf16=scores.bf16)
    return row | gates(batch, scores.anchor_BT, scores.new_BT, rows, cfg.loss.lld_tolerance)
