"""Retrieved text as an attacker or a damaged index would have it: a megabyte each, and random strings made of
what matters."""

import gzip
import json
import random
import re
import time

import pytest
from conftest import SHARED, make_tokenizer
from test_rollout import play
from tokenizers import normalizers
from transformers import AddedToken

from lld import protocol
from lld.protocol import Passage, render_observation
from lld.record.trajectories import pieces
from lld.report.compact import escaped_json
from lld.retrieval.client import read_result
from lld.retrieval.controls import _spaced
from lld.reward import gold_in_results, normalize_answer, retrieval_correct, valid_format

SIZE = 1_000_000
UNITS = [
    "<" + " " * (SIZE - 1),
    "< ",
    "</",
    "<",
    "</ think ",
    "<search",
    " ",
    "\n",
    "\u200b",
    "x",
    "a b ",
    "<|im_end|>",
    "<tool_call",
    "\ufffd",
    "e\u0301",
    "\ufdfa",
    "</information>\n",
    "[",
    "the ",
    "$\\frac{1",
    "🙂",
]
HOSTILE = {repr(unit[:12]): (unit * (SIZE // len(unit) + 1))[:SIZE] for unit in UNITS}
# Of processor time, for what takes some tenths of a second; quadratic in a megabyte takes hours
BOUND_S = 8.0


def odd_tokenizer():
    """One that normalizes, with added tokens of every kind."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(
        [
            AddedToken("<Tool_Call>", special=False, normalized=True),
            AddedToken("Beijing", special=False),
            AddedToken("</search>", special=False),
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken("<|eot_id|>", special=True),
            AddedToken("EOT", special=True, normalized=False),
            AddedToken("<|eot_id|><|im_end|>", special=True),
        ]
    )
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase()]
    )
    return tokenizer


TOKENIZERS = {"plain": make_tokenizer(), "odd": odd_tokenizer()}


def control_ids(tokenizer) -> set[int]:
    return {
        i
        for i, token in tokenizer.added_tokens_decoder.items()
        if token.special or str(token) == "<Tool_Call>"
    }


def check_block(tokenizer, ids: list[int], max_tokens: int) -> None:
    """All that must hold of any block."""
    text = tokenizer.decode(ids)
    assert (
        len(ids) <= max_tokens
        and text.startswith(protocol.OBSERVATION_HEAD)
        and text.endswith(protocol.OBSERVATION_TAIL)
    )
    inner = text.removeprefix(protocol.OBSERVATION_HEAD).removesuffix(protocol.OBSERVATION_TAIL)
    assert not re.search(r"</?(think|search|information|answer)>", inner, re.IGNORECASE), inner
    assert protocol.parse_action(inner) == protocol.Action("invalid")
    assert not control_ids(tokenizer) & set(ids), inner


@pytest.mark.parametrize("name", HOSTILE)
def test_a_megabyte_takes_linear_time(name):
    text = HOSTILE[name]
    started = time.process_time()
    found = read_result(
        {
            "result": [
                [
                    {"document": {"id": "0", "contents": contents}}
                    for contents in (text, '"T"\n' + text, text + "x")
                ]
            ]
        },
        1,
        3,
    )[0]
    for tokenizer in TOKENIZERS.values():
        ids, num_cut = render_observation(tokenizer, found, 500)
        check_block(tokenizer, ids, 500)
        assert num_cut == len(found)
        protocol.encode_prompt(tokenizer, text[:10_000])
    observation = f"{protocol.OBSERVATION_HEAD}{text}{protocol.OBSERVATION_TAIL}"
    for whole in (
        protocol.defuse,
        normalize_answer,
        escaped_json,
        _spaced,
        protocol.is_blank,
        protocol.parse_action,
    ):
        whole(text)
    gold_in_results(["gold", "a b"], [text])
    retrieval_correct([observation], ["gold"])
    valid_format(
        ["<think>a</think><search>b</search>", "<think>a</think><answer>b</answer>"], [observation, ""]
    )
    valid_format([text, text], [text, ""])
    assert time.process_time() - started < BOUND_S


def test_a_rollout_survives_them_all():
    hostile = list(HOSTILE.values())
    started = time.process_time()
    turns = [[["<search> q </search>", "<answer> a </answer>"]] for _ in hostile]
    episodes = play(
        TOKENIZERS["plain"], lambda queries: [[Passage("0", hostile.pop())] for _ in queries], turns
    )
    assert all(episode.answer == "a" and not episode.failure for episode in episodes)
    assert time.process_time() - started < BOUND_S


def test_tokens_shown_one_by_one_take_linear_time():
    """A text of replacement characters looks like a character that is never complete."""
    tokenizer, decoded = TOKENIZERS["plain"], [0]
    ids = tokenizer.encode("ok \ufffd" + "\ufffd" * 1000 + " é🙂 ok", add_special_tokens=False)

    def decode(some):
        decoded[0] += len(some)
        return tokenizer.decode(some)

    assert "".join(pieces(decode, ids)) == tokenizer.decode(ids) and decoded[0] < 50 * len(ids)


FRAGMENTS = [
    "<",
    ">",
    "/",
    "</",
    " ",
    "\n",
    "\t",
    "search",
    "answer",
    "information",
    "think",
    "SEARCH",
    "ſearch",
    "<search>",
    "</answer>",
    "</information>",
    "< / information >",
    "<|im_end|>",
    "<|endoftext|>",
    "|im_end|",
    "<|eot_id|>",
    "EOT",
    "eot",
    "<tool_call>",
    "<Tool_Call>",
    "tool_call",
    "Beijing",
    "\uff1c",
    "\uff1e",
    "\uff0f",
    "ｉｎｆｏｒｍａｔｉｏｎ",
    "＜/answer＞",
    "\u0338",
    "\u226e",
    "\u226f",
    "\u200b",
    "\u202e",
    "\x00",
    "\r",
    "é",
    "e\u0301",
    "🙂",
    "\ufffd",
    "\ufdfa",
    "(",
    ")",
    "[",
    "]",
    "Doc 2(Title: ",
    "x" * 50,
    "word ",
]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_random_hostile_text_stays_within_its_block(name):
    tokenizer, draw = TOKENIZERS[name], random.Random(0)
    for _ in range(600):
        passages = [
            Passage("0", "".join(draw.choices(FRAGMENTS, k=draw.randint(0, 40))))
            for _ in range(draw.randint(0, 4))
        ]
        max_tokens = draw.choice((60, 90, 150, 500))
        ids, num_cut = render_observation(tokenizer, passages, max_tokens)
        assert (ids, num_cut) == render_observation(tokenizer, passages, max_tokens)
        check_block(tokenizer, ids, max_tokens)
        text = "".join(passage.contents for passage in passages)
        assert not control_ids(tokenizer) & set(protocol.encode_prompt(tokenizer, text)), text
        assert (
            protocol.defuse(protocol.defuse(text))
            == protocol.defuse(text)
            == OLD_TAG.sub(lambda match: f"({match[1]}{match[2].lower()})", text)
        )
        assert protocol.parse_action(text).kind in ("search", "answer", "invalid")


# Says it more simply, and takes quadratic time
OLD_TAG = re.compile(r"<\s*(/?)\s*(think|search|information|answer)\s*>", re.IGNORECASE)


@pytest.mark.skipif(not (SHARED / "data" / "corpus.jsonl.gz").is_file(), reason="needs the shared passages")
def test_real_passages_give_the_tokens_that_they_always_gave(monkeypatch):
    """Against a rendering that neither cuts nor respells nor normalizes."""
    tokenizer, passages = TOKENIZERS["plain"], []
    with gzip.open(SHARED / "data" / "corpus.jsonl.gz", "rt", encoding="utf-8") as file:
        for number, line in enumerate(file):
            passage = Passage("0", json.loads(line)["contents"])
            assert protocol.defuse(passage.contents) == passage.contents or OLD_TAG.search(passage.contents)
            assert protocol.shorten(passage, 500) is passage
            passages += [passage] * (number % 400 == 0 or len(passage.contents) > 5000)
    normalizing = make_tokenizer()
    normalizing.backend_tokenizer.normalizer = normalizers.NFC()  # as Qwen2.5's
    triples = [passages[start : start + 3] for start in range(0, len(passages) - 2, 3)]
    shown = [[render_observation(t, some, 500) for some in triples] for t in (tokenizer, normalizing)]
    monkeypatch.setattr(protocol, "_as_text", lambda text, tokenizer, clean: text)
    monkeypatch.setattr(protocol, "defuse", lambda text: text)
    assert len(triples) > 50 and shown == [
        [render_observation(t, some, 500) for some in triples] for t in (tokenizer, normalizing)
    ]
