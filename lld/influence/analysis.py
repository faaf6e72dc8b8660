"""The groups of a checkpoint as plain JSON types: matrices, true changes, the case that is shown."""

import torch
from torch.nn.functional import one_hot

from lld.config import Config
from lld.influence.closed_form import (
    Group,
    Tokens,
    influence_matrix,
    loss_shares,
    pair_influence,
    read_tokens,
)
from lld.influence.measured import HEAD_LR, MODEL_LR, head_alone, true_change, whole_model
from lld.influence.view import compare, readable
from lld.policy import Policy
from lld.protocol import PARTS
from lld.record.monitor import first_passages
from lld.update import trained_temperature


def analyse_groups(exact: Policy, groups: list[Group], tokenizer, cfg: Config, checks: int) -> dict:
    """All groups, the agreement with the true changes, and the case shown.

    True changes are measured for the first `checks` groups and for the case: the group with the strongest
    look-alike pair.
    """
    analyses = [analyse(exact, group, tokenizer, cfg, index < checks) for index, group in enumerate(groups)]
    agreements = compare(analyses)
    strengths = [analysis["pair"]["value"] if analysis["pair"] else 0.0 for analysis in analyses]
    shown = strengths.index(min(strengths))
    if "true_model" not in analyses[shown]["matrix"]:
        analyses[shown] = analyse(exact, groups[shown], tokenizer, cfg, True)
    return {"agreement": agreements, "case": analyses[shown], "groups": analyses}


def analyse(exact: Policy, group: Group, tokenizer, cfg: Config, measure: bool) -> dict:
    """One group as plain JSON types.

    Its responses, the matrices, the true changes if `measure`, and the look-alike pair of lowest influence.
    `exact` is the policy in float64.
    """
    tokens, right, temperature = read_tokens(exact, group.batch), group.right, trained_temperature(cfg)
    pairs_MN = pair_influence(
        tokens,
        exact.lm.get_output_embeddings(),
        loss_shares(group.batch, cfg.loss),
        right,
        temperature,
    )
    matrices = influence_matrix(pairs_MN, tokens, right, len(group.episodes))
    if measure:
        per_response_NR = one_hot(tokens.row_N, len(group.episodes)).double()[:, right]
        head = head_alone(exact, tokens, temperature)
        matrices["true_head"] = true_change(*head, group.batch, cfg, HEAD_LR) @ per_response_NR
        model = whole_model(exact, group.batch, temperature)
        matrices["true_model"] = true_change(*model, group.batch, cfg, MODEL_LR) @ per_response_NR
    matrix = {name: values_GR.tolist() for name, values_GR in matrices.items()}
    pair = look_alike_pair(group, matrix["total"])
    if pair is not None:
        pair |= strongest_pairs(pairs_MN, group, tokens, tokenizer, pair["member"], pair["response"])
    question = group.episodes[0].question
    responses = [
        {"advantage": advantage, "answer": episode.answer, "text": readable(episode, tokenizer)}
        for episode, advantage in zip(group.episodes, group.batch.advantages_B.tolist(), strict=True)
    ]
    return {
        "question": question.id,
        "text": question.text,
        "golden_answers": list(question.golden_answers),
        "responses": responses,
        "right": right,
        "matrix": matrix,
        "pair": pair,
    }


def strongest_pairs(
    pairs_MN: torch.Tensor,
    group: Group,
    tokens: Tokens,
    tokenizer,
    member: int,
    response: int,
    count: int = 8,
) -> dict:
    """The influence of one member on one correct response.

    The `count` most lowering and most raising token pairs, and the sums by part and turn.
    """
    on_m, of_n = tokens.of([response]), tokens.of([member])
    block_mn = pairs_MN[torch.isin(tokens.of(group.right), on_m)][:, of_n]
    heard, said = ([place(group, tokens, n, tokenizer) for n in some.tolist()] for some in (on_m, of_n))
    order = block_mn.flatten().argsort().tolist()
    values = block_mn.flatten().tolist()

    def pair(index: int) -> dict:
        return {"value": values[index], "of": said[index % len(said)], "on": heard[index // len(said)]}

    parts = {}
    for m, row in enumerate(block_mn.tolist()):
        for n, value in enumerate(row):
            key = (f"{said[n]['part']} {said[n]['turn']}", f"{heard[m]['part']} {heard[m]['turn']}")
            parts[key] = parts.get(key, 0.0) + value
    return {
        "lowering": [pair(index) for index in order[:count] if values[index] < 0],
        "raising": [pair(index) for index in order[::-1][:count] if values[index] > 0],
        "parts": [
            {"of": of, "on": on, "value": value}
            for (of, on), value in sorted(parts.items(), key=lambda item: item[1])
        ],
        "by_token": [
            token | {"value": value} for token, value in zip(heard, block_mn.sum(1).tolist(), strict=True)
        ],
    }


def place(group: Group, tokens: Tokens, n: int, tokenizer) -> dict:
    """Token n for the report: its episode, turn (from 1), part, offset in the response, and text."""
    row, column = int(tokens.row_N[n]), int(tokens.column_N[n])
    turn, part = (
        int(group.batch.action_ids_BT[row, column]),
        PARTS[int(group.batch.part_ids_BT[row, column]) - 1],
    )
    return {
        "sample": row,
        "turn": turn,
        "part": part,
        "offset": column - len(group.episodes[row].prompt_ids),
        "text": tokenizer.decode([int(tokens.targets_N[n])]),
    }


def look_alike_pair(group: Group, total: list[list[float]]) -> dict | None:
    """The wrong answer and correct response of lowest influence whose first searches found the same passages.

    The paper's case study. None if no such influence is negative.
    """
    found = [first_passages(episode) for episode in group.episodes]
    alike = [
        (total[member][r], member, response)
        for member, episode in enumerate(group.episodes)
        for r, response in enumerate(group.right)
        if group.batch.advantages_B[member] < 0
        and episode.answer is not None
        and found[member] is not None
        and found[member] == found[response]
    ]
    if not alike or min(alike)[0] >= 0:
        return None
    value, member, response = min(alike)
    return {"member": member, "response": response, "value": value}
