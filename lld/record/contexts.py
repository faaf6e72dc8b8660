"""Where a policy changes, and why: means by what a token's context has shown, kept mass and drift.

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
    """Entropy, likelihood and displacement by class and context, and what drives them.

    That is E[A | context], the kept mass and the drift. Entropy and likelihood are those at the moment of the
    token's update. Rows with a non-finite value are left out.
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
    old_N, entropy_N = scores.old_BT[mask_BT], scores.entropy_BT[mask_BT]
    row = means("entropy/", CLASSES, entropy_N, class_N) | means("entropy/", CONTEXTS, entropy_N, context_N)
    cells = [f"{group}/{context}" for group in CLASSES for context in CONTEXTS]
    cell_N = torch.where(context_N == NONE, NONE, class_N * len(CONTEXTS) + context_N)
    tables = {"entropy": entropy_N, "likelihood": scores.new_BT[mask_BT], "displacement": delta_BT[mask_BT]}
    for name, values_N in tables.items():
        row |= means(f"{name}/", cells, values_N, cell_N)
    mass_N = kept_mass(old_N, batch.sampled_logprobs_BT[mask_BT])
    row |= {f"context/{name}": float((context_N == i).double().mean()) for i, name in enumerate(CONTEXTS)}
    causes = {"advantage": advantages_N, "kept_mass": mass_N}
    causes["drift"] = drift(advantages_N, old_N, entropy_N, mass_N)
    for name, values_N in causes.items():
        row |= {name: float(values_N.double().mean())} | means(f"{name}/", CONTEXTS, values_N, context_N)
    return row


def kept_mass(old_N: torch.Tensor, sampled_N: torch.Tensor) -> torch.Tensor:
    """(N,): pi / mu of sampled tokens, from the logarithms of both: pi is trained, mu was sampled from.

    The mean over tokens drawn from mu is sum_v mu_v (pi_v / mu_v) over the v that mu can draw: the
    probability that pi gives to them. Where mu is pi cut to some tokens and renormalised, as by top_p, pi /
    mu is that mass exactly, token by token.
    """
    return (old_N - sampled_N).exp()


def drift(
    advantages_N: torch.Tensor, old_N: torch.Tensor, entropy_N: torch.Tensor, mass_N: torch.Tensor
) -> torch.Tensor:
    """(N,): the change of entropy that the gap between sampler and policy predicts, per unit of step.

    Let pi be the trained distribution over the tokens v at some place of an episode, z its logits, H its
    entropy, and mu the sampler's distribution. A step of size eta on the policy gradient moves z by

        eta E_{a ~ mu}[A d log pi(a) / dz] = eta E[A] (mu - pi)

    if the choice of the token does not matter for A. It is 0 where mu = pi, whatever A is. To first order,
    with dH / dz_v = -pi_v (log pi_v + H), the entropy then changes by

        -eta E[A] sum_v (mu_v - pi_v) pi_v (log pi_v + H)

    Over the tokens that mu can draw, the sum is the mean of (1 - pi_a / mu_a) pi_a (log pi_a + H) over a ~
    mu, so sampled tokens give it without bias: this function returns -A (1 - m) pi_a (log pi_a + H) with m =
    pi_a / mu_a, the `kept_mass`. The tokens that mu cuts add eta E[A] sum_v pi_v^2 (log pi_v + H), which is
    left out. It has the same sign where these tokens are rarer than e^-H, so the drift is understated;
    nothing is left out of a sampler that only has another temperature. Adam and clipping make
    eta unknown: signs and courses can be compared with the entropy, sizes cannot.
    """
    return -advantages_N * (1 - mass_N) * old_N.exp() * (old_N + entropy_N)
