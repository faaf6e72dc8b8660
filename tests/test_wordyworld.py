"""Free wording of the tiny world's thoughts, and a search that fails on a share of the episodes."""

import dataclasses
import hashlib
import itertools
import json
import math
import random
import re
from collections import Counter, defaultdict

import pytest
from conftest import ROOT
from test_rollout import play

from lld import config, files, settings
from lld.record import trajectories
from lld.retrieval.client import make_search
from lld.retrieval.luck import Luck
from lld.reward import gold_in_results
from lld.rollout import episode_seed
from lld.tinyworld import demonstrations, prepare
from lld.tinyworld.policy import make_tokenizer
from lld.tinyworld.templates import split_words
from lld.tinyworld.wording import NUM_CLASSES, Wording, zipf_weights
from lld.tinyworld.world import make_questions, make_world, passages, question_row

TINY = config.TinyWorld(num_people=30, warm_start_steps=12, hidden_size=32, namesake_share=0.2)
WORDY = dataclasses.replace(TINY, num_words=300, two_hop_share=0.0, namesake_share=0.0)
TOPK = 1


@pytest.fixture(scope="module")
def world():
    return make_world(WORDY)


@pytest.fixture(scope="module")
def corpus(world, tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    files.write_jsonl(path, [{"id": p.id, "contents": p.contents} for p in passages(world)])
    return path


def test_without_free_wording_the_world_is_what_it_was(tmp_path):
    """The checksum is that of the passages, questions and demonstrations before there was free wording."""
    world = make_world(TINY)
    train, held_out = make_questions(world, TINY)
    path = tmp_path / "c.jsonl"
    files.write_jsonl(path, [{"id": p.id, "contents": p.contents} for p in passages(world)])
    rows = [question_row(world, question, "x") for question in train + held_out]
    made = demonstrations.make_demonstrations(world, train, make_tokenizer(world, 3), path, 200, 3, 0)
    text = json.dumps([[p.contents for p in passages(world)], rows, made])
    checksum = hashlib.sha256(text.encode()).hexdigest()
    assert checksum == "f4ff482adb94559b0322abfded3c3fac33b30efba62dbfba70574902e996ac02"
    identity = prepare._identity(TINY, 3)
    assert identity.keys() == {
        *("seed", "num_people", "namesake_share", "two_hop_share", "warm_start_steps", "num_layers"),
        *("hidden_size", "topk", "version"),
    }
    assert prepare._identity(WORDY, 3).keys() - identity.keys() == {
        *("num_words", "thought_words", "word_entropy", "thought_spread"),
    }


@pytest.mark.parametrize(("num_words", "entropy"), [(20, 0.5), (300, 2.0), (8000, 2.0), (300, 5.5)])
def test_zipf_weights_have_the_entropy_asked_for(num_words, entropy):
    weights = zipf_weights(num_words, entropy)
    assert sum(weights) == pytest.approx(1)
    assert -sum(w * math.log(w) for w in weights if w) == pytest.approx(entropy, abs=1e-6)
    slopes = [math.log(weights[0] / weights[rank - 1]) / math.log(rank) for rank in (2, 5, 20)]
    assert slopes == pytest.approx(slopes[:1] * 3)  # a power law


def test_the_wording_is_a_function_of_the_options_and_shares_no_word_with_the_world(world):
    one, same, other = (Wording(cfg, world) for cfg in (WORDY, WORDY, dataclasses.replace(WORDY, seed=1)))
    assert [one.draw(random.Random(5)) for _ in range(3)] == [same.draw(random.Random(5)) for _ in range(3)]
    assert one.words != other.words and len(set(one.words)) == 300
    names = set().union(*(split_words(entity.title) for entity in world))
    assert not set(one.words) & names


def test_words_follow_one_another_with_the_entropy_asked_for_and_a_long_tail(world):
    wording, rng = Wording(WORDY, world), random.Random(0)
    after, lengths, single = defaultdict(Counter), Counter(), Counter()
    place = {word: number for number, word in enumerate(wording.words)}
    for _ in range(8000):
        thought = [place[word] for word in wording.draw(rng).split()]
        lengths[len(thought)] += 1
        for before, word in itertools.pairwise(thought):
            after[before % NUM_CLASSES][word] += 1
            single[word] += 1
    assert set(lengths) == {7, 8, 9}
    for counts in after.values():
        total = counts.total()
        entropy = -sum(n / total * math.log(n / total) for n in counts.values())
        assert entropy == pytest.approx(WORDY.word_entropy, abs=0.1)
        assert sum(n for _, n in counts.most_common(30)) / total < 0.97  # the tail is written, too
    # Conditional on the word before: without it, a word is far less certain.
    total = single.total()
    assert -sum(n / total * math.log(n / total) for n in single.values()) > WORDY.word_entropy + 1


def test_a_thought_has_a_spread_of_lengths_all_alike(world):
    wording = Wording(dataclasses.replace(WORDY, thought_words=6, thought_spread=3), world)
    rng = random.Random(0)
    lengths = Counter(len(wording.draw(rng).split()) for _ in range(7000))
    assert set(lengths) == set(range(3, 10))
    for count in lengths.values():
        assert count == pytest.approx(1000, abs=100)  # three standard deviations


def test_demonstrations_put_the_entropy_in_thoughts_and_go_on_after_a_miss(world, corpus):
    questions, _ = make_questions(world, WORDY)
    wording = Wording(WORDY, world)
    tokenizer = make_tokenizer(world, TOPK, wording.words)
    made, longest = demonstrations.make_demonstrations(
        world, questions, tokenizer, corpus, 400, TOPK, 0, wording
    )
    again, _ = demonstrations.make_demonstrations(
        world, questions, tokenizer, corpus, 400, TOPK, 0, Wording(WORDY, world)
    )
    assert made == again
    assert not any(tokenizer.unk_token_id in ids for ids, _ in made)
    free = set(tokenizer.convert_tokens_to_ids(wording.words))
    written = [token for ids, owns in made for token, own in zip(ids, owns, strict=True) if own]
    share = sum(token in free for token in written) / len(written)
    assert 0.8 <= share * WORDY.word_entropy <= 1.5  # nats a written token, at least
    num_searches, unlucky = Counter(), 0
    for (ids, _), question in zip(made, questions * 400, strict=False):
        text = tokenizer.decode(ids).split("assistant", 1)[1]
        blocks = re.findall(r"<information>(.*?)</information>", text)
        gold = question_row(world, question, "x")["golden_answers"]
        assert text.rstrip().endswith("</answer>")
        if not gold_in_results(gold, blocks):
            unlucky += 1
            num_searches[len(blocks)] += 1
    assert 0.4 < unlucky / len(made) < 0.65
    assert num_searches[demonstrations.SEARCHES_IN_VAIN] > 0.8 * unlucky  # else a wrong query
    assert longest["episode"] >= longest["prompt"] + 3 * 15 + 2 * longest["observation"] - 20


def test_luck_is_a_function_of_the_seed_its_share_exact_and_groups_mixed():
    luck = Luck(0.45, draw=None, topk=1)
    seeds = [[episode_seed(7, step, f"q/{q}", n) for n in range(5)] for step in range(40) for q in range(50)]
    failed = [[luck.fails(seed) for seed in group] for group in seeds]
    assert failed == [[Luck(0.45, None, 3).fails(seed) for seed in group] for group in seeds]
    assert sum(map(sum, failed)) / 10_000 == pytest.approx(0.45, abs=0.015)  # three standard deviations
    mixed = sum(0 < sum(group) < 5 for group in failed) / len(failed)
    assert mixed == pytest.approx(1 - 0.45**5 - 0.55**5, abs=0.02)
    more = Luck(0.6, None, 1)
    assert all(more.fails(seed) for group in seeds for seed in group if luck.fails(seed))


def test_an_unlucky_episode_finds_no_gold_in_any_search_and_a_lucky_one_is_as_before(tokenizer, tmp_path):
    path = tmp_path / "c.jsonl"
    towers = [
        {"id": str(i), "contents": f'"Tower {i}"\nBuilt by {"gold" if i % 2 else "nobody"}.'}
        for i in range(40)
    ]
    files.write_jsonl(path, towers)
    options = dict(url=None, corpus=str(path), backend="bm25", topk=2)
    search = make_search(config.Retriever(**options, fail_share=0.5))
    plain = make_search(config.Retriever(**options))
    assert search.luck is not None and plain.luck is None and search.fingerprint == plain.fingerprint
    turns = [[["<search> tower 7 </search>"] * 2 + ["<answer> x </answer>"]] * 8] * 6
    episodes, before = play(tokenizer, search, turns), play(tokenizer, plain, turns)
    assert 12 < sum(e.unlucky for e in episodes) < 36 and not any(e.unlucky for e in before)
    assert any(0 < sum(e.unlucky for e in episodes[i : i + 8]) < 8 for i in range(0, 48, 8))
    for episode, was in zip(episodes, before, strict=True):
        shown = [turn.passages for turn in episode.turns[:2]]
        assert all(len(found) == 2 for found in shown)
        if episode.unlucky:
            assert not gold_in_results(("gold",), [p.contents for found in shown for p in found])
            assert shown[0] != shown[1]
        else:
            assert episode == was
        assert trajectories.from_json(trajectories.to_json(episode)) == episode
    # By question and sample, not by the order of play.
    again = play(tokenizer, search, turns[:3], overlap_search=True)
    assert [e.turns for e in again] == [e.turns for e in episodes[:24]]


def test_wrong_values_are_named():
    for tree, message in (
        ({"tinyworld": {"dir": "x", "thought_words": 5}}, "does nothing with tinyworld.num_words = 0"),
        ({"tinyworld": {"dir": "x", "thought_spread": 2}}, "does nothing with tinyworld.num_words = 0"),
        ({"tinyworld": {"dir": "x", "num_words": 300, "thought_spread": 8}}, "thought_spread = 8: must be"),
        ({"tinyworld": {"dir": "x", "num_words": 7}}, "word_entropy = 2.0: 7 words"),
        ({"retriever": {"fail_share": 1.0}}, r"fail_share = 1.0: must be in \[0, 1\)"),
        ({"retriever": {"fail_share": 0.5}}, "needs retriever.corpus"),
    ):
        with pytest.raises(ValueError, match=message):
            settings.from_dict(tree)


def test_the_collapsing_run_is_one_file_and_its_variants_change_one_line():
    base = settings.to_dict(settings.load(str(ROOT / "configs" / "collapse.yaml")))
    for name, option, value in (
        ("collapse-topp1", ("rollout", "top_p"), 1.0),
        ("collapse-kept", ("loss", "support"), "kept"),
        ("collapse-llds", ("loss", "lld_weight"), 0.2),
    ):
        other = settings.to_dict(settings.load(str(ROOT / "configs" / f"{name}.yaml")))
        assert other[option[0]][option[1]] == value
        other[option[0]][option[1]] = base[option[0]][option[1]]
        other["run"]["dir"] = base["run"]["dir"]
        assert other == base, name
    assert base["retriever"]["fail_share"] > 0
