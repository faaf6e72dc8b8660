"""Where a policy changes: the recorder's means by what the context of a token has shown, and the kept mass.

The context of a token is what its episode had read when the token was sampled:

    first     no passage yet: the first action, and actions after invalid ones
    lucky     a passage that was read holds a gold answer
    unlucky   passages were read, or a search found nothing, and none held one

A gold answer is found as in `reward.gold_in_results`: normalised, as whole words. After a search for a yes/no
question it cannot be seen, so these tokens have no context. In a question of two hops, the passages of the
first hop are unlucky as a rule.
"""

import torch

from lld.episode import Batch, Episode
from lld.record.means import CLASSES, class_of, means
from lld.reward import gold_in_results
from lld.update import Scores

CONTEXTS = ("first", "lucky", "unlucky")
NONE = -1


def turn_contexts(episode: Episode, known: dict | None = None) -> list[int]:
    """The index in CONTEXTS of each turn's action, or NONE.

    known: results for passages that were looked at before; the episodes of a group often find the same ones.
    """
    golds, known = episode.question.golden_answers, {} if known is None else known
    context, contexts = CONTEXTS.index("first"), []
    for turn in episode.turns:
        contexts.append(context)
        if turn.searched and CONTEXTS[context] != "lucky":
            key = (golds, tuple(passage.contents for passage in turn.passages))
            if key not in known:
                known[key] = gold_in_results(*key)
            context = {True: CONTEXTS.index("lucky"), False: CONTEXTS.index("unlucky"), None: NONE}[
                known[key]
            ]
    return contexts


def contexts_of(batch: Batch, episodes: list[Episode]) -> torch.Tensor:
    """(B, T): the index in CONTEXTS of every token that the model wrote; NONE on the others."""
    known: dict = {}
    table = [turn_contexts(episode, known) for episode in episodes]
    width = max(map(len, table), default=0)
    # By action id, which counts from 1: tokens of no action have no context.
    padded_BK = torch.tensor([[NONE, *row, *[NONE] * (width - len(row))] for row in table])
    return padded_BK.gather(1, batch.action_ids_BT)


def describe(batch: Batch, scores: Scores, episodes: list[Episode]) -> dict[str, float]:
    """Entropy by class, and entropy, likelihood and displacement by class and context; E[A | context].

    Entropy and likelihood are those at the moment of the token's update. Rows with a non-finite value are
    left out.
    """
    context_BT = contexts_of(batch, episodes)
    delta_BT = scores.new_BT - scores.old_BT
    written_BT = batch.action_ids_BT > 0
    fine_B = torch.where(written_BT, delta_BT, 0.0).isfinite().all(1) & batch.advantages_B.isfinite()
    mask_BT = written_BT & fine_B[:, None]
    if not mask_BT.any():
        return {}
    context_N = context_BT[mask_BT]
    advantages_N = batch.advantages_B[:, None].expand_as(mask_BT)[mask_BT]
    class_N = class_of(advantages_N)
    entropy_N, mass_BT = scores.entropy_BT[mask_BT], kept_mass(batch, scores)
    row = means("entropy/", CLASSES, entropy_N, class_N)
    cells = [f"{group}/{context}" for group in CLASSES for context in CONTEXTS]
    cell_N = torch.where(context_N == NONE, NONE, class_N * len(CONTEXTS) + context_N)
    for name, values_BT in (("likelihood", scores.new_BT), ("displacement", delta_BT)):
        row |= means(f"{name}/", cells, values_BT[mask_BT], cell_N)
    row |= means("entropy/", cells, entropy_N, cell_N)
    row |= means("advantage/", CONTEXTS, advantages_N, context_N)
    for index, name in enumerate(CONTEXTS):
        row[f"context/{name}"] = float((context_N == index).double().mean())
    return row | described_mass(mass_BT[mask_BT], context_N)


def kept_mass(batch: Batch, scores: Scores) -> torch.Tensor:
    """(B, T): pi_old / mu of the tokens that the model wrote, mu being the probability they were drawn with.

    The mean over tokens drawn from mu is sum_v mu_v (pi_v / mu_v), over the v that mu can draw: the
    probability that the trainer's policy gives to them. Where mu is pi cut to some tokens and renormalised,
    as by top_p, pi / mu is that mass exactly, token by token.
    """
    return (scores.old_BT - batch.sampled_logprobs_BT).exp()


def described_mass(mass_N: torch.Tensor, context_N: torch.Tensor) -> dict[str, float]:
    fine_N = mass_N.isfinite()
    if not fine_N.any():
        return {}
    row = {"kept_mass": float(mass_N[fine_N].double().mean())}
    return row | means("kept_mass/", CONTEXTS, mass_N[fine_N], context_N[fine_N])
