"""Evaluation: figures against loops and numbers by hand, and eval.py from the command line to results.json.

The policy is a Llama whose next token depends on the last one only, set by hand, so that every trajectory is
known: a question ending in "alpha" is searched and answered, "beta" is answered at once, "gamma" rambles
through a turn first.
"""

import json
import random
import resource
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml

import eval as command
from lld import config, data, evaluate, protocol, rollout, settings
from lld.engine.engine import Engine
from lld.episode import Question
from lld.evaluate import bootstrap_means, paper_averages, percentile_interval, summarize
from lld.evaluation import options as options_module
from lld.evaluation import play as play_module
from lld.evaluation import scores as scores_module
from lld.model import load
from lld.retrieval.client import Search
from lld.reward import gold_in_results
from lld.running import sharding
from lld.tools import RetrieverError

FOLLOWS = {
    "alpha?": "<search>",
    "<search>": "ada",
    "ada": "</search>",
    "</information>": "<answer>",
    "<answer>": "arden",
    "arden": "</answer>",
    "beta?": "<answer>",
    "gamma?": "hmm",
    "hmm": "hmm",
    "again.": "<answer>",
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """A model of this size runs many times faster on one thread, most of all where the cores are shared."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def make_checkpoint(folder, answer="arden"):
    """Saves the hand-set policy, whose every answer is `answer`, and its word-level tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    # Beside a Qwen2 the tokenizer would be read as Qwen's own
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    follows = FOLLOWS | {"<answer>": answer, answer: "</answer>"}
    words = ["<unk>", "<eos>", "brill", *dict.fromkeys([*FOLLOWS, *FOLLOWS.values()])]
    vocabulary = {word: i for i, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    )
    tokenizer.add_tokens(
        [word for word in words if word.startswith(("<search", "</search", "<answer", "</answer", "</info"))]
    )
    width = 32
    lm = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=width,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=1,
        )
    )
    with torch.no_grad():
        lm.model.embed_tokens.weight.copy_(torch.eye(len(words), width))
        lm.model.layers[0].self_attn.o_proj.weight.zero_()
        lm.model.layers[0].mlp.down_proj.weight.zero_()
        lm.lm_head.weight.zero_()
        for word, index in vocabulary.items():
            lm.lm_head.weight[vocabulary[follows.get(word, "<eos>")], index] = 1
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


ROWS = [
    ("alpha", "Arden"),
    ("beta", "Brill"),
    ("gamma", "Arden"),
    ("alpha", "Brill"),
    ("beta", "Arden"),
    ("alpha", "yes"),
    ("gamma", "the Arden"),
    ("alpha", "arden!"),
    ("beta", "no"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A checkpoint, a corpus, two benchmarks and the options to evaluate with, all in one folder."""
    folder = tmp_path_factory.mktemp("world")
    make_checkpoint(folder / "ckpt")
    passages = [
        '"Ada"\nAda was born in Arden.',
        '"Cole"\nCole was born in Brillport.',
        '"Arden"\nArden is a city.',
        '"Ada"\nAda works for Cole.',
    ]
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"id": str(i), "contents": text}) + "\n" for i, text in enumerate(passages))
    )
    for name, rows in {"nq": ROWS, "hotpotqa": ROWS[:5]}.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(
                json.dumps(
                    {"id": f"test_{i}", "question": f"question {i} of kind {kind}", "golden_answers": [gold]}
                )
                + "\n"
                for i, (kind, gold) in enumerate(rows)
            )
        )
    options = {
        "model": {"mixed_precision": "no"},
        "rollout": {
            "max_prompt_tokens": 200,
            "max_new_tokens": 8,
            "max_observation_tokens": 60,
            "max_episode_tokens": 400,
            "num_slots": 3,
            "overlap_search": False,
        },
        "retriever": {"url": None, "corpus": str(folder / "corpus.jsonl"), "backend": "bm25", "topk": 2},
        "eval": {
            "benchmarks": {name: str(folder / f"{name}.jsonl") for name in ("nq", "hotpotqa")},
            "during_training": [],
            "batch_size": 4,
        },
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(options, sort_keys=False))
    return folder


def run_eval(world, out, *more, ckpt=None):
    return command.main(
        [
            "--ckpt",
            str(ckpt or world / "ckpt"),
            "--config",
            str(world / "tiny.yaml"),
            "--out",
            str(out),
            *more,
        ]
    )


@pytest.fixture(scope="module")
def whole(world):
    """An uninterrupted evaluation: its folder."""
    assert run_eval(world, world / "whole") == 0
    return world / "whole"


def read(out):
    results = json.loads((out / "results.json").read_text())
    return results, {
        name: [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        for name in ("nq", "hotpotqa")
    }


def open_world(world):
    cfg = settings.load(str(world / "tiny.yaml"), [f"model.path={world / 'ckpt'}"])
    tokenizer, lm = load.load_tokenizer(cfg.model), load.load_lm(cfg.model)
    engine = Engine(
        lm,
        tokenizer,
        num_slots=3,
        temperature=0.0,
        top_p=1.0,
        stop_strings=protocol.STOP_STRINGS,
        eos_ids=protocol.eos_ids(lm, tokenizer),
    )

    def search(queries):
        return [[protocol.Passage("0", f'"Found"\n{query} was born in Arden.')] for query in queries]

    return cfg, tokenizer, engine, search


# ---- figures ----


def bootstrap_interval(values, level=0.95, **options):
    return percentile_interval(bootstrap_means(values, **options), level)


def test_bootstrap_against_a_loop():
    values = [random.Random(i).random() for i in range(17)]
    rows = torch.randint(17, (200, 17), generator=torch.Generator().manual_seed(3)).tolist()
    means = sorted(sum(values[i] for i in row) / 17 for row in rows)

    def quantile(share):
        place = share * (len(means) - 1)
        below = int(place)
        return means[below] + (place - below) * (means[min(below + 1, 199)] - means[below])

    assert bootstrap_interval(values, num_resamples=200, seed=3, level=0.9) == pytest.approx(
        (quantile(0.05), quantile(0.95)), abs=1e-12
    )


def test_bootstrap_of_many_values_draws_in_blocks(monkeypatch):
    values = [random.Random(i).random() for i in range(50)]
    at_once = bootstrap_means(values, num_resamples=101, seed=1)
    monkeypatch.setattr(evaluate, "RESAMPLED_VALUES", 50 * 7)
    in_blocks = bootstrap_means(values, num_resamples=101, seed=1)
    assert in_blocks.shape == (101,) and torch.equal(in_blocks, at_once)


def test_bootstrap_of_a_proportion_agrees_with_the_normal_interval():
    low, high = bootstrap_interval([1.0] * 300 + [0.0] * 700)
    half = 1.96 * (0.3 * 0.7 / 1000) ** 0.5  # 0.0284
    assert low == pytest.approx(0.3 - half, abs=0.003) and high == pytest.approx(0.3 + half, abs=0.003)
    assert bootstrap_interval([0.25] * 9) == (0.25, 0.25)


def test_bootstrap_covers_the_truth_about_as_often_as_it_says():
    draws = torch.rand(200, 80, generator=torch.Generator().manual_seed(0)) < 0.4
    intervals = [bootstrap_interval(row.double(), num_resamples=300, seed=i) for i, row in enumerate(draws)]
    assert 0.90 <= sum(low <= 0.4 <= high for low, high in intervals) / 200 <= 0.98


def test_averages_of_a_row_of_the_paper():
    """Table 1, Qwen2.5-3B Base + LLDS."""
    em = {
        "nq": 0.479,
        "triviaqa": 0.627,
        "popqa": 0.453,
        "hotpotqa": 0.345,
        "2wiki": 0.323,
        "musique": 0.082,
        "bamboogle": 0.210,
    }
    averages = paper_averages(em)
    for name, printed in {"GenAvg": 0.520, "MHAvg": 0.240, "Avg": 0.360}.items():
        assert averages[name] == pytest.approx(printed, abs=0.0006)
    assert set(em) == set(config.BENCHMARKS)


def test_average_with_a_benchmark_missing_is_none():
    assert paper_averages({"nq": 0.4, "triviaqa": 0.5, "popqa": 0.6, "hotpotqa": 0.3}) == {
        "GenAvg": pytest.approx(0.5),
        "MHAvg": None,
        "Avg": None,
    }


@pytest.mark.parametrize(
    "golds, passages, found",
    [
        (["Arden"], ['"Ada"\nShe was born in ARDEN, then left.'], True),
        (["Arden"], ['"Ada"\nShe was born in Ardenville.'], False),  # a substring is no word
        (["The  New-York Times"], ['"A"\nthe newyork times'], True),  # both sides are normalised
        (["Ada"], ['"Ada"\nA title counts.'], True),
        (["x y"], ["x", "y"], False),  # not across passages
        (["nothing", "born in"], ["She was born in 1815"], True),  # any alias
        (["1815"], [], False),  # no search found nothing
        (["Yes"], ["yes indeed"], None),
        (["no", "NO."], ["no"], None),
        (["The"], ["the"], None),
    ],
)
def test_gold_in_results(golds, passages, found):
    assert gold_in_results(golds, passages) is found


def test_summary_by_hand():
    base = {
        "em": 1.0,
        "f1": 1.0,
        "cover_em": 1.0,
        "num_searches": 3,
        "num_turns": 4,
        "num_valid_actions": 4,
        "truncated": False,
        "gold_in_results": True,
        "answer": "x",
    }
    other = {
        "em": 0.0,
        "f1": 0.5,
        "cover_em": 0.0,
        "num_searches": 0,
        "num_turns": 1,
        "num_valid_actions": 0,
        "truncated": True,
        "gold_in_results": False,
        "answer": None,
    }
    left_out = base | {"gold_in_results": None, "num_turns": 3, "num_valid_actions": 2}
    assert summarize([base, other, left_out]) == pytest.approx(
        {
            "em": 2 / 3,
            "f1": 2.5 / 3,
            "cover_em": 2 / 3,
            "searches": 2.0,
            "valid_action_rate": 6 / 8,
            "truncation_rate": 1 / 3,
            "answered_rate": 2 / 3,
            "gold_in_results": 1 / 2,
            "num_questions": 3,
        }
    )
    assert "gold_in_results" not in summarize([left_out])


# ---- episodes ----


def test_records_hold_what_happened(whole):
    _, records = read(whole)
    by_id = {record["id"]: record for record in records["nq"]}
    assert [record["id"] for record in records["nq"]] == [f"nq/test_{i}" for i in range(9)]
    searched, direct, rambled = by_id["nq/test_0"], by_id["nq/test_1"], by_id["nq/test_2"]
    assert [turn["kind"] for turn in searched["turns"]] == ["search", "answer"] and searched["turns"][0][
        "content"
    ] == "ada"
    assert (
        searched["turns"][0]["text"] == "<search> ada </search>"
        and searched["turns"][1]["text"] == "<answer> arden </answer>"
    )
    assert [text.split("\n")[0] for text in searched["turns"][0]["passages"]] == [
        '"Ada"',
        '"Ada"',
    ] and searched["turns"][0]["observation"].endswith("</information>")
    assert searched["turns"][1]["passages"] == [] and searched["turns"][1]["observation"] == ""
    assert (
        searched["answer"],
        searched["em"],
        searched["num_searches"],
        searched["gold_in_results"],
        searched["truncated"],
    ) == ("arden", 1.0, 1, True, False)
    assert (direct["em"], direct["num_searches"], direct["num_turns"], direct["gold_in_results"]) == (
        0.0,
        0,
        1,
        False,
    )
    assert (rambled["num_turns"], rambled["num_valid_actions"], rambled["truncated"], rambled["em"]) == (
        2,
        1,
        True,
        1.0,
    )
    assert (
        rambled["turns"][0]["text"] == " ".join(["hmm"] * 8)
        and rambled["turns"][0]["stop"] == "length"
        and rambled["stop_reason"] == "answer"
    )
    assert by_id["nq/test_3"]["gold_in_results"] is False  # "Brillport" is not "Brill"
    assert by_id["nq/test_5"]["gold_in_results"] is None and by_id["nq/test_8"]["gold_in_results"] is None


def test_evaluation_takes_its_own_number_of_turns(world):
    cfg, tokenizer, engine, search = open_world(world)
    talk = settings.from_dict(
        settings.to_dict(cfg)
        | {
            "eval": settings.to_dict(cfg)["eval"] | {"max_turns": 1},
            "rollout": settings.to_dict(cfg)["rollout"] | {"max_turns": 3},
        }
    )
    with torch.no_grad():
        end, again = tokenizer.convert_tokens_to_ids(["</information>", "<search>"])
        engine.lm.lm_head.weight[:, end] = 0
        engine.lm.lm_head.weight[again, end] = 1  # searches for ever
    for options, num_turns in ((talk, 2), (cfg, 5)):
        (record,) = evaluate.evaluate_questions(
            engine, tokenizer, [Question("a", "of kind alpha", ("Arden",), "nq")], search, options, seed=0
        )
        assert (
            record["num_turns"],
            record["num_searches"],
            record["stop_reason"],
            record["answer"],
            record["em"],
        ) == (num_turns, num_turns - 1, "turns", None, 0.0)


def test_a_question_whose_search_finds_nothing_is_scored_like_any_other(world):
    """Whatever training does with it (retriever.empty_results): dropping questions would change what is
    measured."""
    cfg, tokenizer, engine, _ = open_world(world)
    questions = [
        Question(f"q{i}", f"of kind {kind}", (gold,), "nq") for i, (kind, gold) in enumerate(ROWS[:5])
    ]
    assert cfg.retriever.empty_results == "drop"
    records = evaluate.evaluate_questions(
        engine, tokenizer, questions, lambda queries: [[] for _ in queries], cfg, seed=0
    )
    assert [(r["id"], r["em"], r["num_searches"], r["gold_in_results"]) for r in records] == [
        ("q0", 1.0, 1, False),
        ("q1", 0.0, 0, False),
        ("q2", 1.0, 0, False),
        ("q3", 0.0, 1, False),
        ("q4", 1.0, 0, False),
    ]
    assert records[0]["turns"][0]["passages"] == [] and records[0]["turns"][0]["observation"].endswith(
        "</information>"
    )


def test_processes_share_the_questions_and_restore_the_order(world, monkeypatch):
    cfg, tokenizer, engine, search = open_world(world)
    questions = [
        Question(f"q{i}", f"of kind {kind}", (gold,), "nq") for i, (kind, gold) in enumerate(ROWS[:5])
    ]
    alone = evaluate.evaluate_questions(engine, tokenizer, questions, search, cfg, seed=0)
    assert [record["id"] for record in alone] == ["q0", "q1", "q2", "q3", "q4"]
    sent = []  # what rank 1 hands to each gather: its records, its errors
    ranks = [SimpleNamespace(process_index=rank, num_processes=2) for rank in (0, 1)]
    monkeypatch.setattr(evaluate, "gather_object", lambda items: sent.append(items) or items)
    of_rank_1 = evaluate.evaluate_questions(
        engine, tokenizer, questions, search, cfg, seed=0, accelerator=ranks[1]
    )
    assert [record["id"] for record in of_rank_1] == ["q1", "q3"]
    monkeypatch.setattr(evaluate, "gather_object", lambda items: sent.pop(0) + items)
    assert (
        evaluate.evaluate_questions(engine, tokenizer, questions, search, cfg, seed=0, accelerator=ranks[0])
        == alone
    )


def test_search_failure_of_one_process_reaches_the_others(world, monkeypatch):
    """A process that left its peers waiting in the gather would hang the job until the collective's
    timeout."""
    cfg, tokenizer, engine, search = open_world(world)

    def failing(queries):
        raise RetrieverError("retriever gone")

    for own_search, from_peer in ((search, [[], [RetrieverError("retriever gone")]]), (failing, [[], []])):
        monkeypatch.setattr(evaluate, "gather_object", lambda items: from_peer.pop(0) + items)
        with pytest.raises(RetrieverError, match="retriever gone"):
            evaluate.evaluate_questions(
                engine,
                tokenizer,
                [Question("q", "of kind alpha", ("x",), "nq")],
                own_search,
                cfg,
                seed=0,
                accelerator=SimpleNamespace(process_index=0, num_processes=2),
            )
        assert not from_peer, "left before both gathers"


# ---- eval.py ----


def test_figures_of_a_whole_evaluation(whole, capsys):
    results, _records = read(whole)
    nq = results["benchmarks"]["nq"]
    # Right: alpha/Arden, gamma/Arden, beta/Arden, gamma/the Arden, alpha/arden!. Found: 2 of 3 alpha, none of
    # 2 beta or 2 gamma.
    num_turns = 4 * 2 + 3 * 1 + 2 * 2  # alpha, beta, gamma
    assert {name: value for name, value in nq.items() if "interval" not in name} == pytest.approx(
        {
            "em": 5 / 9,
            "f1": 5 / 9,
            "cover_em": 5 / 9,
            "searches": 4 / 9,
            "valid_action_rate": (num_turns - 2) / num_turns,
            "truncation_rate": 2 / 9,
            "answered_rate": 1.0,
            "gold_in_results": 2 / 7,
            "num_questions": 9,
        }
    )
    assert nq["em_interval"][0] < 5 / 9 < nq["em_interval"][1]
    assert results["averages"] == {"GenAvg": None, "MHAvg": None, "Avg": None}
    assert (
        results["config"]["retriever"]["backend"] == "bm25"
        and results["versions"]["torch"] == torch.__version__
    )
    assert (
        set(results["checkpoint"]["sha256"]) >= {"model.safetensors", "tokenizer.json", "config.json"}
        and len(results["code_sha256"]) == 1
    )


def test_averages_get_their_intervals_from_all_sets():
    def records(name, hits):
        return [
            {
                "id": f"{name}/{i}",
                "num_searches": 1,
                "num_turns": 1,
                "num_valid_actions": 1,
                "truncated": False,
                "gold_in_results": None,
                "answer": "x",
            }
            | dict.fromkeys(("em", "f1", "cover_em"), float(i < hits))
            for i in range(400)
        ]

    sets = {name: records(name, 200) for name in ("nq", "triviaqa", "popqa")}
    scores = scores_module.score_records(sets)
    assert (
        scores_module.score_records({name: rows[::-1] for name, rows in reversed(sets.items())}) == scores
    ), "the order of writing must not matter"
    low, high = scores["averages"]["GenAvg"]["em_interval"]
    # Three independent sets: sqrt(3) narrower than one; equal seeds would draw the same rows and give no
    # narrowing.
    assert scores["averages"]["GenAvg"]["em"] == 0.5 and high - low == pytest.approx(
        2 * 1.96 * (0.25 / 400 / 3) ** 0.5, rel=0.12
    )
    assert "GenAvg" in scores_module.format_table(scores) and "50.0 [4" in scores_module.format_table(scores)


def test_resumed_evaluation_gives_the_figures_of_a_whole_one(world, whole, tmp_path, monkeypatch):
    assert run_eval(world, tmp_path) == 0
    before, _ = read(tmp_path)
    lines = (tmp_path / "nq.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "nq.jsonl").write_text("".join(lines[:5]) + lines[5][:40])  # killed while writing the sixth
    (tmp_path / "hotpotqa.jsonl").unlink()
    (tmp_path / "results.json").unlink()
    asked = []
    play = play_module.evaluate_questions
    monkeypatch.setattr(
        play_module,
        "evaluate_questions",
        lambda engine, tokenizer, questions, *args, **kwargs: (
            asked.append([q.id for q in questions]) or play(engine, tokenizer, questions, *args, **kwargs)
        ),
    )
    assert run_eval(world, tmp_path) == 0
    assert (
        asked[:2] == [["nq/test_5", "nq/test_6", "nq/test_7"], ["nq/test_8"]]
        and sum(map(len, asked)) == 4 + 5
    )
    results, records = read(tmp_path)
    assert results == before and records == read(whole)[1]
    asked.clear()
    assert run_eval(world, tmp_path) == 0 and not asked


def test_sets_may_be_evaluated_one_after_the_other(world, whole, tmp_path):
    assert run_eval(world, tmp_path, "--benchmarks", "hotpotqa") == 0
    assert list(json.loads((tmp_path / "results.json").read_text())["benchmarks"]) == ["hotpotqa"]
    assert run_eval(world, tmp_path, "--benchmarks", "nq") == 0
    assert json.loads((tmp_path / "results.json").read_text())["benchmarks"] == read(whole)[0]["benchmarks"]


def test_folder_of_another_checkpoint_or_configuration_is_refused(world, whole, tmp_path, capsys):
    make_checkpoint(tmp_path / "other", answer="brill")
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    assert run_eval(world, whole, ckpt=tmp_path / "other") == 2
    message = capsys.readouterr().err
    assert (
        "checkpoint model.safetensors" in message
        and "another --out" in message
        and "Traceback" not in message
    )
    assert run_eval(world, whole, "eval.max_turns=2") == 2
    assert "eval max_turns = '4', now it is '2'" in capsys.readouterr().err
    assert run_eval(world, whole, "retriever.fail_share=0.5") == 2
    assert "retriever fail_share = '0.0', now it is '0.5'" in capsys.readouterr().err
    assert run_eval(world, whole, f"eval.benchmarks.nq={world / 'hotpotqa.jsonl'}") == 2
    assert "benchmarks nq" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == before


def test_changed_questions_are_refused(world, whole, tmp_path, capsys):
    assert run_eval(world, tmp_path / "out", "--benchmarks", "hotpotqa") == 0
    rows = (world / "hotpotqa.jsonl").read_text()
    try:
        (world / "hotpotqa.jsonl").write_text(rows.replace('["Brill"]', '["Bril"]'))
        assert run_eval(world, tmp_path / "out", "--benchmarks", "hotpotqa") == 2
        assert "hotpotqa/test_1 was" in capsys.readouterr().err
    finally:
        (world / "hotpotqa.jsonl").write_text(rows)


def test_search_failure_keeps_what_was_done(world, whole, tmp_path, monkeypatch, capsys):
    make_search, queries = play_module.make_search, []

    def failing(options):
        search = make_search(options)

        def search_or_fail(asked):
            queries.extend(asked)
            if len(queries) > 2:
                raise RetrieverError("no reply from the retriever")
            return search(asked)

        return Search(search_or_fail, search.fingerprint)

    monkeypatch.setattr(play_module, "make_search", failing)
    assert run_eval(world, tmp_path) == 3
    error = capsys.readouterr().err
    assert "eval.py: the search failed: no reply from the retriever" in error and "Traceback" not in error
    assert (
        len((tmp_path / "nq.jsonl").read_text().splitlines()) == 4
        and not (tmp_path / "results.json").exists()
    )
    monkeypatch.setattr(play_module, "make_search", lambda options: Search(make_search(options), "another"))
    assert run_eval(world, tmp_path) == 2
    assert "now it is another: bring back the earlier one" in capsys.readouterr().err
    monkeypatch.setattr(play_module, "make_search", make_search)
    assert run_eval(world, tmp_path) == 0
    assert read(tmp_path)[1] == read(whole)[1]


def test_mistakes_are_one_line_with_the_remedy(world, tmp_path, capsys):
    for arguments, ckpt, wanted in (
        (["--benchmarks", "hotpot"], None, "eval.py: unknown benchmark 'hotpot': did you mean 'hotpotqa'?"),
        ([], tmp_path / "nowhere", "no such folder"),
        ([], world, "did you mean " + str(world / "ckpt")),
        (["eval.max_turn=3"], None, "did you mean 'max_turns'?"),
        (["rollout.max_prompt_tokens=50"], None, "rollout.max_prompt_tokens = 50"),
    ):
        assert run_eval(world, tmp_path / "out", *arguments, ckpt=ckpt) == 2
        error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eval.py:")]
        assert len(error) == 1 and wanted in error[0]


def test_averages_with_a_benchmark_missing_take_no_line_and_one_question_has_no_interval(
    world, tmp_path, capsys
):
    (world / "one.jsonl").write_text((world / "nq.jsonl").read_text().splitlines()[0] + "\n")
    assert run_eval(world, tmp_path, "--benchmarks", "one", f"eval.benchmarks.one={world / 'one.jsonl'}") == 0
    table = capsys.readouterr().out.split("\n\n")[0]
    assert len(table.splitlines()) == 2 and "100.0 [–]" in table and "Avg" not in table
    assert json.loads((tmp_path / "results.json").read_text())["averages"]["Avg"] is None


def test_damaged_files_of_an_evaluation_are_named_with_the_remedy(world, whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "out")
    record = (whole / "nq.jsonl").read_text().splitlines()[0]
    for name, text, wanted in (
        (
            "settings.json",
            "{}",
            "settings.json is damaged (no checkpoint in it): choose another --out, or delete the folder",
        ),
        ("settings.json", "[]", "settings.json is damaged (list in place of an object)"),
        ("settings.json", "", "settings.json is damaged"),
        ("results.json", '{"benchm', "results.json is damaged"),
        (
            "results.json",
            "{}",
            "results.json is damaged (no benchmarks in it): delete the file, it is made again",
        ),
        (
            "results.json",
            '{"benchmarks": {"../../diary": {"num_questions": 1}}}',
            "results.json: '../../diary' cannot name a file",
        ),
        (
            "nq.jsonl",
            "[]\n",
            "nq.jsonl line 1 is damaged (list in place of an object): delete the line, and its question is "
            "asked again",
        ),
        (
            "nq.jsonl",
            record.replace('"em": 1.0', '"em": "x"') + "\n",
            "nq.jsonl line 1 is damaged (em missing or of a wrong type): delete the line",
        ),
        ("nq.jsonl", record.replace('"num_turns": 2', '"num_turns": 0') + "\n", "nq.jsonl line 1 is damaged"),
        ("nq.jsonl", "[" * 100_000 + "\n", "nq.jsonl line 1 is damaged (brackets nested too deeply)"),
    ):
        (tmp_path / "out" / name).write_text(text)
        assert run_eval(world, tmp_path / "out") == 2
        error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eval.py:")]
        assert len(error) == 1 and wanted in error[0], (name, text[:40], error)
        shutil.copy(whole / name, tmp_path / "out" / name)
    assert run_eval(world, tmp_path / "out") == 0
    (tmp_path / "diary").write_text("mine")
    (tmp_path / "out" / "hotpotqa.jsonl").unlink()
    (tmp_path / "out" / "hotpotqa.jsonl").symlink_to(tmp_path / "diary")
    assert (
        run_eval(world, tmp_path / "out") == 2
        and "hotpotqa.jsonl is a link: delete it" in capsys.readouterr().err
    )
    assert (tmp_path / "diary").read_text() == "mine"


@pytest.mark.parametrize("num_bytes, what", [(100, "settings.json"), (3000, "nq.jsonl")])
def test_a_full_disk_ends_with_one_line_and_the_same_command_goes_on(
    world, whole, tmp_path, capsys, num_bytes, what
):
    (tmp_path / "out").mkdir()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        assert run_eval(world, tmp_path / "out") == 7
    finally:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        )
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eval.py:")]
    assert (
        len(error) == 1
        and "File too large; make room, mend the permissions or choose another --out" in error[0]
        and str(tmp_path / "out") in error[0]
    )
    assert what == "settings.json" or what in error[0]
    assert run_eval(world, tmp_path / "out") == 0 and read(tmp_path / "out")[1] == read(whole)[1]


def test_an_out_that_can_be_no_folder_is_named(world, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    for name, why in {"file": "File exists", "file/x": "Not a directory", "x" * 300: "name too long"}.items():
        assert run_eval(world, tmp_path / name) == 7
        told = capsys.readouterr().err
        assert str(tmp_path / name) in told and why in told and "choose another --out" in told
    assert (tmp_path / "file").read_text() == "mine"


def test_without_a_config_the_runs_own_options_are_used(world, whole, tmp_path, capsys):
    """Another YAML would give figures of other options, and nothing would say so."""
    shutil.copytree(world / "ckpt", tmp_path / "run" / "checkpoints" / "step_000002")
    options = yaml.safe_load((world / "tiny.yaml").read_text()) | {"run": {"dir": "/elsewhere"}}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(options, sort_keys=False))
    ckpt = tmp_path / "run" / "checkpoints" / "step_000002"
    assert command.main(["--ckpt", str(ckpt)]) == 0
    told = capsys.readouterr().err
    assert (
        f"options of {tmp_path / 'run' / 'config.yaml'}; search: bm25 over {world / 'corpus.jsonl'}; "
        f"benchmarks: nq = {world / 'nq.jsonl'}" in told
    )
    files = {"index": "theirs", "corpus": "c.jsonl", "oracle_questions": "q.jsonl", "replay": None}
    told = options_module._what_is_read(ckpt, settings.from_dict({"retriever": files}), [], False)
    assert told.endswith(
        "search: the backend of the index over c.jsonl, theirs with encoder intfloat/e5-base-v2, q.jsonl"
    )
    files = {"index": "theirs", "corpus": "c.jsonl", "backend": "bm25", "fail_share": 0.5}
    told = options_module._what_is_read(ckpt, settings.from_dict({"retriever": files}), [], False)
    assert told.endswith("bm25 over c.jsonl, theirs; failed searches: random passages of c.jsonl")
    results, records = read(ckpt / "eval")
    assert records == read(whole)[1] and results["config"]["run"]["dir"] == str(tmp_path / "run")
    assert command.main(["--ckpt", str(ckpt.with_name("step_000099"))]) == 2
    assert (
        "step_000099: no such folder; " in (told := capsys.readouterr().err) and "holds step_000002" in told
    )
    assert (
        command.main(["--ckpt", str(world / "ckpt")]) == 2
        and "does not lie in a run's folder" in capsys.readouterr().err
    )
    assert (
        command.main(["--ckpt", str(ckpt), "--run.seed", "3"]) == 2
        and "without dashes: run.seed=3" in capsys.readouterr().err
    )


def test_a_file_of_several_sources_gives_the_rows_of_its_name(tmp_path):
    rows = [
        {"id": f"t{i}", "question": "q", "golden_answers": ["x"], "data_source": source}
        for i, source in enumerate(["nq", "popqa", "nq"])
    ]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = settings.from_dict(
        {
            "eval": {
                "benchmarks": {"nq": str(tmp_path / "test.jsonl"), "musique": str(tmp_path / "test.jsonl")},
                "during_training": [],
            }
        }
    )
    assert [question.id for question in data.load_benchmark(cfg, "nq")] == ["nq/t0", "nq/t2"]
    with pytest.raises(ValueError, match="nq, popqa but no rows of source 'musique'"):
        data.load_benchmark(cfg, "musique")
    (tmp_path / "test.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows[:2]).replace("popqa", "2wikimultihopqa")
    )
    cfg.eval.benchmarks["2wiki"] = cfg.eval.benchmarks["nq"]
    assert [question.source for question in data.load_benchmark(cfg, "2wiki")] == ["2wiki"], "as in AVERAGES"
    where, named = cfg.eval.benchmarks["nq"], ["2wikimultihopqa"]
    assert len(data.load_questions(where, split="test", sources=named)) == 1, "as the file names it"


def test_a_gpu_evaluates_the_model_that_training_plays_with(world, monkeypatch):
    """Rotary frequencies rounded to bf16 are off by a radian at position 1,000: weights are cast, buffers
    never are."""
    cfg = settings.load(
        str(world / "tiny.yaml"), [f"model.path={world / 'ckpt'}", "model.mixed_precision=bf16"]
    )
    tokenizer, lm = load.load_tokenizer(cfg.model), load.load_lm(cfg.model)
    asked, opened = [], []
    make = load.engine_model
    monkeypatch.setattr(
        load,
        "engine_model",
        lambda lm, device, **how: asked.append(device.type) or make(lm, torch.device("cpu"), **how),
    )
    monkeypatch.setattr(rollout, "Engine", lambda lm, *_, **__: opened.append(lm))
    play_module.open_engine(cfg, tokenizer, torch.device("cuda"))
    play_module.open_engine(cfg, tokenizer, torch.device("cpu"))
    assert asked == ["cuda", "cpu"]
    twin = sharding.rollout_copy(lm, SimpleNamespace(mixed_precision="bf16", device=torch.device("cpu")))
    for model in (opened[0], twin):
        assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
        assert (
            {buffer.dtype for buffer in model.buffers()}
            == {torch.float32}
            == {buffer.dtype for buffer in lm.buffers()}
        )

    def tensors(model):
        return [*model.parameters(), *model.buffers()]

    assert all(torch.equal(one, other) for one, other in zip(tensors(opened[0]), tensors(twin), strict=True))
    assert all(torch.equal(one, other) for one, other in zip(tensors(opened[1]), tensors(lm), strict=True))


def test_each_process_plays_a_full_batch_of_every_chunk(world, tmp_path, monkeypatch):
    """`batch_size` counts a process's questions: three processes share chunks of three times as many."""
    cfg = settings.load(
        str(world / "tiny.yaml"),
        [f"model.path={world / 'ckpt'}", "eval.batch_size=2"],
    )
    benchmarks = {"nq": data.load_benchmark(cfg, "nq")}
    played = []
    monkeypatch.setattr(play_module.folder, "claim_found", lambda *_: None)
    monkeypatch.setattr(
        play_module,
        "evaluate_questions",
        lambda engine, tokenizer, questions, *_, **__: played.append(len(questions)) or [],
    )
    for processes, chunks in ((1, [2, 2, 2, 2, 1]), (3, [6, 3])):
        played.clear()
        accelerator = SimpleNamespace(
            is_main_process=True, num_processes=processes, device=torch.device("cpu")
        )
        play_module.play_missing(benchmarks, tmp_path, cfg, accelerator)
        assert played == chunks
