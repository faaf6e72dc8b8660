"""The sentinel: correct episodes from early in training, re-scored as it continues."""

import dataclasses

import torch

from lld.episode import Batch, Episode
from lld.record.monitor import BATCH_FIELDS, is_right
from lld.update import score_batch


def choose_sentinel(batch: Batch, old_BT: torch.Tensor, episodes: list[Episode], size: int) -> Batch | None:
    """The first `size` right episodes of a rollout as a batch; None if there are none.

    Its `sampled_logprobs_BT` are `old_BT`, because with top_p < 1 the sampler's are those of the truncated
    distribution.
    """
    rows = [
        row for row, episode in enumerate(episodes) if is_right(episode) and old_BT[row].isfinite().all()
    ][:size]
    if not rows:
        return None
    return dataclasses.replace(batch, sampled_logprobs_BT=old_BT).rows(rows)


def describe_sentinel(accelerator, policy, sentinel: Batch, cfg) -> dict[str, float]:
    """Mean log-likelihood per token of the sentinel now, and its change since its episodes were sampled."""
    written_BT = sentinel.action_ids_BT > 0
    now_N = score_batch(accelerator, policy, sentinel, cfg)[written_BT].double()
    return {
        "sentinel/likelihood": float(now_N.mean()),
        "sentinel/displacement": float((now_N - sentinel.sampled_logprobs_BT[written_BT]).mean()),
    }


def pack_sentinel(sentinel: Batch | None) -> dict | None:
    """The sentinel as stored in a checkpoint: tensors and strings."""
    return None if sentinel is None else {name: getattr(sentinel, name) for name in BATCH_FIELDS}
