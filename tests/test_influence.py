"""The closed form is the derivative of the real loss at the head; true steps and the per-question updates
leave no trace."""

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import make_lm, make_tokenizer
from gradients import make_episodes

from lld import settings as settings_module
from lld.config import Loss
from lld.episode import Question, Turn, collate
from lld.influence import command as program
from lld.influence.analysis import analyse, strongest_pairs
from lld.influence.closed_form import (
    Group,
    Tokens,
    influence_matrix,
    loss_shares,
    pair_influence,
    read_tokens,
)
from lld.influence.measured import displace_each, head_alone, policy_term_alone, true_change, whole_model
from lld.influence.view import agreement, compare
from lld.policy import Policy
from lld.update import loss_of, update_counts

ADVANTAGES = torch.tensor([1.2, -0.7, 0.9, -1.4])
MODEL = {"mixed_precision": "no"}


def make_group(advantages=ADVANTAGES):
    tokenizer = make_tokenizer()
    episodes = make_episodes(len(advantages), len(tokenizer))
    for sample, episode in enumerate(episodes):
        episode.sample, episode.question = sample, episodes[0].question
    return Group(episodes, collate(episodes, advantages[None], tokenizer.pad_token_id))


def exact_policy(seed=0):
    return Policy(make_lm(make_tokenizer(), hidden_size=32, scale=3.0, seed=seed).double())


def options(aggregation="sequence_mean", temperature=1.0, **loss):
    return settings_module.from_dict(
        {
            "loss": {"aggregation": aggregation, **loss},
            "rollout": {"temperature": temperature},
            "model": MODEL,
        }
    )


def summed(changes_GN, tokens, right):
    """(G, R) sums over the tokens of each correct response."""
    return torch.stack([changes_GN[:, tokens.row_N == row].sum(1) for row in right], dim=1)


@pytest.mark.parametrize(
    "aggregation, temperature, kind",
    [("sequence_mean", 1.0, "grpo"), ("token_mean", 0.7, "grpo"), ("sequence_mean", 1.3, "gspo")],
)
def test_closed_form_is_the_jacobian_vector_product_of_the_real_loss(aggregation, temperature, kind):
    """d log p / dW along minus the gradient of `update.loss_of` for one member, by forward-mode
    differentiation."""
    policy, group, cfg = exact_policy(), make_group(), options(aggregation, temperature, kind=kind)
    tokens, head = read_tokens(policy, group.batch), policy.lm.get_output_embeddings()
    pairs_MN = pair_influence(
        tokens, head, loss_shares(group.batch, cfg.loss), group.right, temperature, chunk=7
    )
    part, counts = (
        group.batch.rows([0, 1, 2, 3]),
        update_counts(group.batch, [0, 1, 2, 3], "nonnegative"),
    )

    def logprobs(weight):
        return (
            (tokens.states_NC @ weight.T / temperature)
            .log_softmax(1)
            .gather(1, tokens.targets_N[:, None])[:, 0]
        )

    def member_loss(weight, member):
        logprobs_BT = tokens.states_NC.new_zeros(part.token_ids_BT.shape).masked_scatter(
            part.action_ids_BT > 0, logprobs(weight)
        )
        return loss_of(
            part,
            logprobs_BT,
            None,
            logprobs_BT.detach(),
            None,
            None,
            counts,
            1.0,
            policy_term_alone(cfg).loss,
        )[0][member]

    weight = head.weight.detach()
    heard = torch.cat([(tokens.row_N == row).nonzero()[:, 0] for row in group.right])
    for member in range(4):
        gradient = torch.autograd.functional.jacobian(lambda some: member_loss(some, member), weight)
        _, wanted_N = torch.func.jvp(logprobs, (weight,), (-gradient,))
        found_M = pairs_MN[:, tokens.row_N == member].sum(1)
        assert float((found_M - wanted_N[heard]).norm() / wanted_N[heard].norm()) < 1e-8


def test_closed_form_and_matrix_agree_with_a_naive_double_loop():
    policy, group, temperature = exact_policy(), make_group(), 0.8
    tokens, weight = read_tokens(policy, group.batch), policy.lm.lm_head.weight.detach()
    pairs_MN = pair_influence(
        tokens,
        policy.lm.lm_head,
        loss_shares(group.batch, Loss()),
        group.right,
        temperature,
        chunk=5,
    )
    matrix = influence_matrix(pairs_MN, tokens, group.right, 4)
    num_tokens = [sum(action > 0 for action in episode.action_ids) for episode in group.episodes]
    residuals = []
    for state_C, target in zip(tokens.states_NC, tokens.targets_N, strict=True):
        residual_V = -(weight @ state_C / temperature).softmax(0)
        residual_V[target] += 1
        residuals.append(residual_V)
    assert group.right == [0, 2]
    for r, response in enumerate(group.right):
        for member in range(4):
            raising = lowering = 0.0
            for n in (tokens.row_N == response).nonzero()[:, 0]:
                for m in (tokens.row_N == member).nonzero()[:, 0]:
                    share = float(ADVANTAGES[member]) / num_tokens[member] / 4
                    value = (
                        share
                        * float(residuals[n] @ residuals[m])
                        * float(tokens.states_NC[n] @ tokens.states_NC[m])
                        / temperature**2
                    )
                    raising, lowering = raising + max(value, 0.0), lowering + min(value, 0.0)
            for name, value in {
                "raising": raising,
                "lowering": lowering,
                "total": raising + lowering,
            }.items():
                assert float(matrix[name][member, r]) == pytest.approx(value, rel=1e-6), name


def test_two_token_vocabulary_by_hand():
    """W = 0, so pi = (1/2, 1/2) and g = ±(1/2, -1/2). Right: token 0, h = 2; wrong: h = 3; A = ±1; c = ±1/2.

    Same token: on the right one -1/2 · 1/2 · 6 = -1.5, the pull of a look-alike; other token: +1.5. On itself
    +1/2 · 1/2 · 4 = 1.
    """
    head = torch.nn.Linear(1, 2, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(head.weight)
    shares_B = torch.tensor([0.5, -0.5])
    for wrong_token, temperature, wanted in ((0, 1.0, -1.5), (1, 1.0, 1.5), (0, 2.0, -0.375)):
        tokens = Tokens(
            torch.tensor([[2.0], [3.0]], dtype=torch.float64),
            torch.tensor([0, wrong_token]),
            torch.tensor([0, 1]),
            torch.tensor([1, 1]),
        )
        pairs_MN = pair_influence(tokens, head, shares_B, [0], temperature)
        assert pairs_MN[0].tolist() == pytest.approx([1.0 / temperature**2, wanted])
        matrix = influence_matrix(pairs_MN, tokens, [0], 2)
        assert matrix["total"][:, 0].tolist() == pytest.approx([1.0 / temperature**2, wanted])
        assert matrix["lowering"][1, 0] == min(wanted, 0.0) and matrix["raising"][1, 0] == max(wanted, 0.0)


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
def test_closed_form_is_the_true_change_after_a_step_on_the_head_alone(aggregation):
    policy, group, cfg = exact_policy(), make_group(), options(aggregation, 0.9)
    tokens, right = read_tokens(policy, group.batch), group.right
    pairs_MN = pair_influence(
        tokens, policy.lm.get_output_embeddings(), loss_shares(group.batch, cfg.loss), right, 0.9
    )
    found_GR = influence_matrix(pairs_MN, tokens, right, 4)["total"]
    score, parameters = head_alone(policy, tokens, 0.9)
    before = parameters[0].detach().clone()
    wanted_GR = summed(true_change(score, parameters, group.batch, cfg, 1e-6), tokens, right)
    assert torch.equal(parameters[0], before) and parameters[0] is not policy.lm.lm_head.weight
    row = agreement(found_GR.flatten(), wanted_GR.flatten())
    assert (
        row["correlation"] > 0.999999
        and row["slope"] == pytest.approx(1, abs=1e-4)
        and row["same_sign"] == 1.0
    )


def test_tokens_are_those_the_policy_scores():
    """A step on the head inside the whole model moves what `Policy.forward` returns as the closed form
    says."""
    policy, group, cfg = exact_policy(seed=3), make_group(), options()
    tokens = read_tokens(policy, group.batch)
    pairs_MN = pair_influence(tokens, policy.lm.lm_head, loss_shares(group.batch, Loss()), [0, 1, 2, 3])
    score, parameters = whole_model(policy, group.batch, 1.0)
    changes_GN = true_change(score, [policy.lm.lm_head.weight], group.batch, cfg, 1e-5)
    wanted_GN = torch.stack([pairs_MN[:, tokens.row_N == member].sum(1) for member in range(4)])
    assert float((changes_GN - wanted_GN).norm() / wanted_GN.norm()) < 1e-3
    assert len(parameters) == len(list(policy.parameters()))


def test_true_change_of_the_whole_model_is_minus_the_product_of_gradients():
    policy, group, cfg = exact_policy(seed=1), make_group(), options()
    score, parameters = whole_model(policy, group.batch, 1.0)
    kept = copy.deepcopy(policy.state_dict())
    tokens = read_tokens(policy, group.batch)
    changes_GN = true_change(score, parameters, group.batch, cfg, 1e-5)
    assert all(torch.equal(value, kept[name]) for name, value in policy.state_dict().items())
    shares_N = loss_shares(group.batch, Loss()).double()[tokens.row_N]
    for member in range(4):
        update = torch.autograd.grad((score() * shares_N)[tokens.row_N == member].sum(), parameters)
        for response in group.right:
            own = torch.autograd.grad(score()[tokens.row_N == response].sum(), parameters)
            wanted = sum(float((a * b).sum()) for a, b in zip(update, own, strict=True))
            assert float(changes_GN[member, tokens.row_N == response].sum()) == pytest.approx(
                wanted, rel=2e-2, abs=2e-2
            )


def test_strongest_pairs_name_tokens_where_they_stand():
    policy, group, tokenizer = exact_policy(), make_group(), make_tokenizer()
    tokens = read_tokens(policy, group.batch)
    pairs_MN = pair_influence(tokens, policy.lm.lm_head, loss_shares(group.batch, Loss()), group.right)
    found = strongest_pairs(pairs_MN, group, tokens, tokenizer, member=3, response=2, count=5)
    total = float(influence_matrix(pairs_MN, tokens, group.right, 4)["total"][3, 1])
    assert sum(part["value"] for part in found["parts"]) == pytest.approx(total)
    assert sum(token["value"] for token in found["by_token"]) == pytest.approx(total)
    lowest = found["lowering"][0]
    block_mn = pairs_MN[tokens.row_N[tokens.of(group.right)] == 2][:, tokens.row_N == 3]
    assert lowest["value"] == float(block_mn.min()) and found["raising"][0]["value"] == float(block_mn.max())
    for end, sample in (("of", 3), ("on", 2)):
        episode, token = group.episodes[sample], lowest[end]
        assert token["sample"] == sample and token["turn"] == episode.action_ids[token["offset"]]
        assert token["text"] == tokenizer.decode([episode.token_ids[token["offset"]]])


def test_the_case_is_a_wrong_answer_with_the_first_search_of_a_correct_one():
    """Samples 1 and 2 found the same; of the wrong ones only 1 answered, so no other pair may be shown. Word
    for word the same response with A < 0 pulls by -c |sum of g h^T|^2, always below 0."""
    tokenizer, policy = make_tokenizer(), exact_policy()
    episodes = make_group().episodes
    episodes[1] = dataclasses.replace(copy.deepcopy(episodes[2]), sample=1)
    group = Group(episodes, collate(episodes, ADVANTAGES[None], tokenizer.pad_token_id))
    for episode in group.episodes:
        search = Turn(
            0,
            1,
            1,
            "search",
            "q",
            "stop_string",
            0,
            group.episodes[0].turns[0].passages if episode.sample in (1, 2) else (),
            searched=episode.sample in (1, 2),
        )
        kind = "invalid" if episode.sample == 3 else "answer"
        episode.turns = [search, Turn(1, len(episode.token_ids), len(episode.token_ids), kind, "b", "eos", 1)]
    found = analyse(policy, group, tokenizer, options(), True)
    value = found["matrix"]["total"][1][1]
    assert (found["pair"]["member"], found["pair"]["response"], found["pair"]["value"]) == (
        1,
        2,
        value,
    ) and value < 0
    table = compare([found])
    assert table["all"]["head"]["pairs"] == 8 and table["all"]["head"]["correlation"] > 0.9999
    assert {kind: row["head"]["pairs"] for kind, row in table.items()} == {
        "all": 8,
        "wrong on right": 4,
        "right on other right": 2,
        "right on itself": 2,
    }


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_each_question_is_updated_from_the_same_weights_which_are_put_back(optimizer):
    policy = Policy(make_lm(make_tokenizer(), hidden_size=32, scale=3.0))
    first, second = make_group(), make_group(torch.tensor([-0.5, 1.5, -0.5, -0.5]))
    cfg = settings_module.from_dict(
        {
            "model": MODEL,
            "optim": {"max_grad_norm": 0.5, "weight_decay": 0.0},
            "loss": {"aggregation": "token_mean"},
        }
    )
    kept = copy.deepcopy(policy.state_dict())
    bars = displace_each(Accelerator(cpu=True), policy, [first, second], cfg, optimizer, 1e-2)
    assert all(torch.equal(value, kept[name]) for name, value in policy.state_dict().items())
    assert [bar["delta"] for bar in bars] == sorted(bar["delta"] for bar in bars) and [
        bar["num_right"] for bar in sorted(bars, key=lambda bar: bar["num_right"])
    ] == [1, 2]
    for group in (first, second):
        twin = copy.deepcopy(policy)
        scored_BT = group.batch.action_ids_BT > 0
        before_BT, _ = twin(group.batch.token_ids_BT, scored_BT)
        (-(before_BT.sum(1) * group.batch.advantages_B).sum() / scored_BT.sum()).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer](twin.parameters(), lr=1e-2).step()
        wanted = float(
            (twin(group.batch.token_ids_BT, scored_BT)[0] - before_BT)[group.right].sum(1).mean().detach()
        )
        assert any(bar["delta"] == pytest.approx(wanted, rel=1e-3, abs=1e-5) for bar in bars)


def test_the_command_plays_prints_and_writes(tmp_path, monkeypatch, capsys):
    tokenizer = make_tokenizer()
    make_lm(tokenizer, hidden_size=32).save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    # A dollar begins no formula, an escape no colour
    rows = [
        {"id": str(i), "question": f"who wrote $\\frac{{book {i} in $?\x1b[31m", "golden_answers": ["ada"]}
        for i in range(3)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "corpus.jsonl").write_text(
        "".join(
            json.dumps({"id": str(i), "contents": f'"Title {i}"\nbook {i} by ada'}) + "\n" for i in range(4)
        )
    )
    settings = [
        f"data.train={tmp_path / 'train.jsonl'}",
        "retriever.url=null",
        "retriever.backend=bm25",
        f"retriever.corpus={tmp_path / 'corpus.jsonl'}",
        "rollout.max_new_tokens=6",
        "rollout.max_turns=1",
        "rollout.max_observation_tokens=200",
        "rollout.max_prompt_tokens=400",
        "rollout.max_episode_tokens=900",
        "rollout.overlap_search=false",
        "optim.lr=1e-3",
    ]
    (tmp_path / "empty.yaml").write_text("")
    command = [
        "--ckpt",
        str(tmp_path / "policy"),
        "--config",
        str(tmp_path / "empty.yaml"),
        "--questions",
        "3",
        "--group-size",
        "2",
        "--checks",
        "1",
        "--out",
        str(tmp_path / "out" / "found.json"),
    ]
    assert program.main([*command, *settings]) == 2  # a random policy answers nothing right
    assert "no group of the 3 questions has both rewards" in capsys.readouterr().err
    # The second question's two episodes are alike in reward and must be dropped.
    monkeypatch.setattr(program, "score_episodes", lambda episodes, *_: [1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    assert program.main([*command, *settings]) == 0
    found = json.loads((tmp_path / "out" / "found.json").read_text())
    assert len(found["bars"]) == len(found["groups"]) == 2 and found["num_questions"] == 3
    assert found["num_negative"] == sum(bar["delta"] < 0 for bar in found["bars"])
    assert (tmp_path / "out" / "found.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "closed form at the LM head" in printed
    lines = printed.strip().splitlines()
    conclusions = [place for place, line in enumerate(lines) if line.startswith("Delta below 0 in")]
    assert len(conclusions) == 2 and conclusions[0] < 5 and conclusions[1] >= len(lines) - 3, (
        "first and last, the cases between"
    )
    assert program.main([*command, *settings, "--questions", "0"]) == 2
    for wrong in (["--lr", "inf"], ["--lr", "nan"], ["--lr", "0"], ["--checks", "-1"]):
        assert program.main([*command, *settings, *wrong]) == 2, wrong
    assert program.main([*command, "--run.steps", "3"]) == 2 and "run.steps=3" in capsys.readouterr().err
    assert program.main(["--ckpt", str(tmp_path), "--config", str(tmp_path / "empty.yaml")]) == 2
    assert f"did you mean {tmp_path / 'policy'}?" in capsys.readouterr().err


def test_without_out_the_figures_go_into_the_runs_folder_and_follow_no_link(tmp_path, monkeypatch):
    def where(ckpt, out=None):
        return program.out_file(SimpleNamespace(ckpt=ckpt, out=out))

    ckpt = tmp_path / "run" / "checkpoints" / "step_000040"
    ckpt.mkdir(parents=True)
    assert where(ckpt) == tmp_path / "run" / "influence" / "step_000040.json" and where(ckpt).parent.is_dir()
    assert (
        where(tmp_path / "model") == Path("influence.json")
        and where(ckpt, tmp_path / "new" / "a.json").parent.is_dir()
    )
    (tmp_path / "run" / "influence" / "step_000040.png").symlink_to(tmp_path / "diary")
    with pytest.raises(ValueError, match="step_000040.png is a link"):
        where(ckpt)


def test_a_group_whose_search_found_nothing_is_treated_as_in_training(monkeypatch):
    """Dropped, or with `retriever.empty_results: show` played on with an empty block."""
    from test_rollout import ScriptedEngine

    tokenizer, questions = make_tokenizer(), [Question("q/0", "who?", ("gold",), "q")]
    turns = [[["<search> none </search>", "<answer> no </answer>"], ["<answer> gold </answer>"]]]
    monkeypatch.setattr(program, "open_engine", lambda *_: ScriptedEngine(tokenizer, turns))
    lm = SimpleNamespace(eval=lambda: None)
    played = {}
    for empty in ("drop", "show"):
        cfg = settings_module.from_dict(
            {
                "retriever": {"empty_results": empty},
                "rollout": {"num_questions": 10, "group_size": 2, "overlap_search": False},
            }
        )
        groups = program.play(lm, tokenizer, questions, lambda queries: [[] for _ in queries], cfg)
        played[empty] = [[episode.answer for episode in group.episodes] for group in groups]
    assert played == {"drop": [], "show": [["no", "gold"]]}
