"""Means by what a context has shown, and the kept mass, against loops over tokens and hand-made numbers."""

import dataclasses
import math

import pytest
import torch
from gradients import make_episodes

from lld.engine.sampling import sample_tokens
from lld.episode import Episode, Question, Turn, collate
from lld.protocol import Passage
from lld.record import contexts, metrics
from lld.update import Scores

ADVANTAGES_PG = torch.tensor([[1.0, -0.5, -0.5], [0.0, 0.0, 0.0], [1.1, 0.1, -1.2], [-1.0, 0.5, 0.5]])
# What a search may bring; only the third holds the gold answer, as a whole word
FINDS = ("", "He lived in Parisville.", "It is, in PARIS!", "Lyon, Rome")


@pytest.fixture(scope="module")
def recorded():
    """(episodes, batch, scores) of made-up episodes whose searches find what FINDS says, in turn."""
    episodes = make_episodes(12, 300)
    for row, episode in enumerate(episodes):
        question = dataclasses.replace(episode.question, golden_answers=("the Paris",))
        if row == 4:
            question = dataclasses.replace(question, golden_answers=("yes",))
        episode.question = question
        for number, turn in enumerate(episode.turns):
            text = FINDS[(row + number) % 4]
            if turn.kind == "search":
                turn.passages = (Passage("1", f"Title\n{text}"), Passage("2", "Title\nRome")) if text else ()
    batch = collate(episodes, ADVANTAGES_PG, 0)
    generator = torch.Generator().manual_seed(3)
    written_BT = batch.action_ids_BT > 0

    def draw(scale):
        return torch.randn(written_BT.shape, generator=generator) * scale * written_BT

    old_BT, rows = -draw(1.0).abs(), [list(range(12))]
    scores = Scores(old_BT, old_BT + draw(0.1), draw(1.0).abs(), None, old_BT, rows)
    return episodes, batch, scores


def context_of(episode, turn_number):
    """In words, by reading what came before the turn."""
    before = [turn for turn in episode.turns[:turn_number] if turn.searched]
    if not before:
        return "first"
    if episode.question.golden_answers == ("yes",):
        return None
    lucky = any("PARIS!" in passage.contents for turn in before for passage in turn.passages)
    return "lucky" if lucky else "unlucky"


def naive(episodes, batch, scores):
    """name -> the values of its tokens, from the episodes' own lists."""
    found, tokens = {}, 0
    for row, episode in enumerate(episodes):
        advantage = float(batch.advantages_B[row])
        group = "correct" if advantage > 0 else "incorrect" if advantage < 0 else "neutral"
        for number, turn in enumerate(episode.turns):
            context = context_of(episode, number)
            for t in range(turn.start, turn.end):
                tokens += 1
                place = row, len(episode.prompt_ids) + t
                old, new = float(scores.old_BT[place]), float(scores.new_BT[place])
                entropy = float(scores.entropy_BT[place])
                mass = math.exp(old - episode.logprobs[t])
                drift = -advantage * (1 - mass) * math.exp(old) * (old + entropy)
                values = {"advantage": advantage, "kept_mass": mass, "drift": drift}
                values[f"entropy/{group}"] = entropy
                if context:
                    values |= {
                        f"entropy/{context}": entropy,
                        f"entropy/{group}/{context}": entropy,
                        f"likelihood/{group}/{context}": new,
                        f"displacement/{group}/{context}": new - old,
                        f"advantage/{context}": advantage,
                        f"kept_mass/{context}": mass,
                        f"drift/{context}": drift,
                    }
                for name, value in values.items():
                    found.setdefault(name, []).append(value)
    shares = {f"context/{name}": len(found[f"advantage/{name}"]) / tokens for name in contexts.CONTEXTS}
    return {name: sum(values) / len(values) for name, values in found.items()} | shares


def test_every_mean_agrees_with_a_loop_over_tokens(recorded):
    episodes, batch, scores = recorded
    found, wanted = contexts.describe(batch, scores, episodes), naive(episodes, batch, scores)
    assert found.keys() == wanted.keys() and len(found) > 30
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, abs=1e-5), name
    assert [name for name in found if not metrics.described(name)] == []


def test_a_row_that_is_not_finite_is_left_out(recorded):
    episodes, batch, scores = recorded
    new_BT = scores.new_BT.clone()
    new_BT[0, len(episodes[0].prompt_ids)] = float("nan")
    found = contexts.describe(batch, dataclasses.replace(scores, new_BT=new_BT), episodes)
    rest = dataclasses.replace(batch, action_ids_BT=batch.action_ids_BT * (torch.arange(12) > 0)[:, None])
    assert found == pytest.approx(contexts.describe(rest, scores, episodes))


def turn(kind, number, *passages, searched=False):
    found = tuple(Passage("1", f"Title\n{text}") for text in passages)
    return Turn(number, number + 1, number + 1, kind, "", "stop_string", number, found, 0, searched)


@pytest.mark.parametrize(
    ("golds", "turns", "wanted"),
    [
        # An invalid action brings no passage; a lucky context stays lucky
        (("Paris",), [("invalid",), ("search", "Rome"), ("search", "Paris"), ("search", "Rome"), ("answer",)],
         ["first", "first", "unlucky", "lucky", "lucky"]),
        # A search that found nothing, one that was not carried out
        (("Paris",), [("search",), ("search", None)], ["first", "unlucky"]),
        (("no",), [("search", "no"), ("answer",)], ["first", None]),
    ],
)  # fmt: skip
def test_contexts_by_hand(golds, turns, wanted):
    episode = Episode(Question("q/1", "where?", golds, "q"), 0, [1])
    for number, (kind, *texts) in enumerate(turns):
        carried_out = kind == "search" and texts != [None]
        episode.turns.append(turn(kind, number, *(texts if carried_out else ()), searched=carried_out))
    names = [*contexts.CONTEXTS, None]
    assert [names[index] for index in contexts.turn_contexts(episode)] == wanted


def test_the_kept_mass_is_the_probability_of_the_nucleus():
    """By hand: of (.5, .3, .15, .05) top_p = .6 keeps two tokens, of mass .8."""
    pi_V = torch.tensor([0.5, 0.3, 0.15, 0.05])
    uniforms_S = torch.rand(64, generator=torch.Generator().manual_seed(0))
    drawn = sample_tokens(pi_V.log().expand(64, 4), uniforms_S, 1.0, 0.6)
    token_N, sampled_N = torch.tensor([pair[0] for pair in drawn]), torch.tensor([pair[1] for pair in drawn])
    assert set(token_N.tolist()) == {0, 1}
    assert contexts.kept_mass(pi_V.log()[token_N], sampled_N).tolist() == pytest.approx([0.8] * 64)


def predicted(pi_V, mu_V, advantage):
    """The mean of `drift` over tokens drawn from mu, by enumeration."""
    entropy = -(pi_V * pi_V.log()).sum()
    drawn_N = mu_V.nonzero()[:, 0]
    logs_N, mass_N = pi_V.log()[drawn_N], pi_V[drawn_N] / mu_V[drawn_N]
    values_N = contexts.drift(torch.tensor(advantage), logs_N, entropy.expand_as(logs_N), mass_N)
    return float((mu_V[drawn_N] * values_N).sum())


def measured(pi_V, mu_V, advantage, eta=1e-6):
    """The change of entropy by one small step on the mean policy gradient of all tokens, per unit of step."""
    logits_V = pi_V.log().requires_grad_()
    (mu_V * advantage * logits_V.log_softmax(-1)).sum().backward()
    moved_V = (logits_V + eta * logits_V.grad).detach().softmax(-1)
    return float((pi_V * pi_V.log()).sum() - (moved_V * moved_V.log()).sum()) / eta


@pytest.mark.parametrize("advantage", [0.7, -1.3])
def test_the_drift_predicts_how_entropy_changes(advantage):
    """Sharper where A > 0, flatter where A < 0: for a temperature exactly, for a cut less than in truth."""
    logits_V = 2 * torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pi_V = logits_V.softmax(-1)
    colder_V = (logits_V / 0.8).softmax(-1)
    assert predicted(pi_V, pi_V, advantage) == 0
    assert measured(pi_V, pi_V, advantage) == pytest.approx(0, abs=1e-6)
    exact = measured(pi_V, colder_V, advantage)
    assert predicted(pi_V, colder_V, advantage) == pytest.approx(exact, rel=1e-3) and exact * advantage < 0
    ordered_V = pi_V.sort(descending=True).values
    kept_V = pi_V >= ordered_V[int((ordered_V.cumsum(0) < 0.8).sum())]
    nucleus_V = torch.where(kept_V, pi_V, 0.0) / pi_V[kept_V].sum()
    entropy = -(pi_V * pi_V.log()).sum()
    left_out = advantage * float((pi_V**2 * (pi_V.log() + entropy))[~kept_V].sum())
    found, exact = predicted(pi_V, nucleus_V, advantage), measured(pi_V, nucleus_V, advantage)
    assert found + left_out == pytest.approx(exact, rel=1e-3)
    assert found * advantage < 0 and left_out * advantage < 0
