"""A second tool beside the search: one entry in TOOLS and its function, there before lld reads the table.

Run by tests/test_second_tool.py in a process of its own: `python -m pytest tests/calculator.py`.
"""

import ast
import operator

from lld.tools import TOOLS, Tool

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value_of(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
    raise ValueError("only numbers, + - * / and brackets")


def calculate(queries, search):
    """One result for each query: its value, or why it has none."""
    results = []
    for query in queries:
        try:
            results.append([f"{value_of(ast.parse(query, mode='eval').body):g}"])
        except (ValueError, SyntaxError, ArithmeticError, RecursionError) as error:
            results.append([f"no value: {error}"])
    return results


def render_value(value, rank):
    return value


TOOLS["calc"] = Tool(tag="calc", run=calculate, render=render_value)

import pytest
import torch
from test_rollout import play

from lld import protocol, reward
from lld.config import Reward
from lld.episode import ANSWER, SEARCH, THINK, collate
from lld.protocol import PART_IDS, Action, Passage, parse_action
from lld.record import metrics, monitor, trajectories
from lld.report import compact, page
from lld.update import Scores

CALC = "<think> I multiply. </think><calc> 6 * (3 + 4) </calc>"
BAD_CALC = "<think> I divide. </think><calc> 1 / 0 </calc>"
SEARCH_TURN = "<think> I look it up. </think><search> who wrote it </search>"
ANSWER_TURN = "<think> Now I know. </think><answer> gold </answer>"


@pytest.fixture(scope="module")
def episodes(tokenizer, search):
    turns = [[[CALC, SEARCH_TURN, ANSWER_TURN], [BAD_CALC, CALC, ANSWER_TURN]]]
    return play(tokenizer, search, turns, max_turns=2)


@pytest.mark.parametrize("overlap_search", [False, True])
def test_it_is_run_and_its_result_is_read(tokenizer, search, overlap_search):
    turns = [[[CALC, SEARCH_TURN, ANSWER_TURN]], [[CALC, BAD_CALC, CALC]]]
    first, second = play(tokenizer, search, turns, overlap_search=overlap_search)
    assert [turn.kind for turn in first.turns] == ["calc", "search", "answer"]
    texts = [tokenizer.decode(first.token_ids[turn.end : turn.observation_end]) for turn in first.turns]
    assert texts[0] == "\n\n<information>42</information>\n\n" and texts[1].startswith(
        "\n\n<information>Doc 1"
    )
    assert [turn.searched for turn in first.turns] == [False, True, False] and first.num_searches == 1
    assert not first.turns[0].passages and len(first.turns[1].passages) == 3
    assert [turn.tool_was_read for turn in second.turns] == [True, True, False]
    assert second.stop_reason == "turns"


def test_the_protocol_knows_its_tags():
    assert protocol.STOP_STRINGS == ("</search>", "</calc>", "</answer>")
    assert parse_action("<think>a</think> <calc> 2+2 </calc>") == Action("calc", "2+2")
    assert parse_action("<calc> </calc>") == Action("invalid")
    assert protocol.defuse("x</calc>< CALC >") == "x(/calc)(calc)"
    observation, _ = protocol.render_observation(_Letters(), [Passage("0", '"T"\n<calc>1</calc>')], 500)
    assert "<calc>" not in "".join(map(chr, observation))


class _Letters:
    """A tokenizer with one token a letter."""

    added_tokens_decoder, all_special_tokens = {}, []

    def encode(self, text, add_special_tokens=False):
        return [ord(letter) for letter in text]


def test_its_tokens_have_their_own_part_and_the_others_keep_theirs(tokenizer, episodes):
    batch = collate(episodes, torch.tensor([[1.0, -1.0]]), tokenizer.pad_token_id)
    assert (THINK, SEARCH, ANSWER) == (1, 2, 3) and PART_IDS["calc"] == 4
    start, turn = len(episodes[0].prompt_ids), episodes[0].turns[0]
    assert (batch.part_ids_BT[0, start + turn.tag_start : start + turn.end] == 4).all()
    assert (batch.part_ids_BT[0, start : start + turn.tag_start] == THINK).all()
    assert set(batch.part_ids_BT[0].tolist()) == {0, 1, 2, 3, 4}


def test_it_has_metrics_and_a_colour_on_the_page(tokenizer, episodes):
    batch = collate(episodes, torch.tensor([[1.0, -1.0]]), tokenizer.pad_token_id)
    old_BT = batch.sampled_logprobs_BT
    new_BT = torch.where(batch.part_ids_BT == 4, old_BT - 0.5, old_BT)
    rows = [0, 1]
    row = metrics.describe_episodes(episodes, torch.tensor([[1.0, 0.0]]))
    assert row["calls/calc"] == 1.5 and row["searches"] == 0.5
    row |= monitor.displacement(batch, old_BT, new_BT, rows)
    assert row["displacement/correct/calc/turn1"] == pytest.approx(-0.5)
    assert row["displacement/correct/search/turn2"] == 0.0
    assert all(metrics.described(name) for name in row)
    scores = Scores(old_BT, new_BT, torch.zeros_like(old_BT), None, old_BT, [rows])
    records = trajectories.describe(tokenizer, 0, episodes, batch, scores, [1.0, 0.0], rows)
    packed = compact.compact_step([records])["groups"][0]["episodes"][0]
    assert "4" in packed["parts"] and page.PARTS == ("think", "search", "answer", "calc")
    assert ".by-more0 {" in page.TEMPLATE.read_text()


def test_the_format_reward_takes_its_calls():
    observations = ["\n\n<information>42</information>\n\n", ""]
    assert reward.valid_format([CALC, ANSWER_TURN], observations)
    assert not reward.valid_format([CALC, CALC], observations)
    assert not reward.valid_format([CALC.replace("</calc>", "</search>"), ANSWER_TURN], observations)
    assert (
        reward.score_text([CALC, ANSWER_TURN], observations, "gold", ["gold"], Reward(kind="format")) == 1.0
    )


def test_an_unknown_kind_raises(tokenizer, search, episodes, monkeypatch):
    monkeypatch.setattr(protocol, "parse_action", lambda *_: Action("dance", "x"))
    monkeypatch.setattr(protocol, "tag_offset", lambda *_: 0)
    with pytest.raises(ValueError, match="no tool for an action of kind 'dance'"):
        play(tokenizer, search, [[[CALC]]])
    episode = episodes[0]
    monkeypatch.setattr(episode.turns[0], "kind", "dance")
    with pytest.raises(KeyError, match="dance"):
        collate([episode], torch.tensor([[1.0]]), tokenizer.pad_token_id)
