"""Questions: every file form gives the same questions, every defect is named with its place, and a step's
draw is a pure function."""

import gzip
import json
from pathlib import Path

import datasets
import numpy
import pyarrow
import pyarrow.parquet
import pytest

from lld.data import __main__ as program
from lld.data import load_questions, questions_of_step
from lld.episode import Question
from lld.protocol import question_prompt

QA = Path(__file__).resolve().parents[2] / "shared" / "data" / "qa"


def write_jsonl(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
        + "\n",
        encoding="utf-8",
    )
    return str(path)


def flashrag(id="test_0", question="who wrote Emma", golden_answers=("Jane Austen",), **more):
    return {"id": id, "question": question, "golden_answers": list(golden_answers), **more}


def search_r1(source, index, question, golden_answers, split="train"):
    """A row as Search-R1's data scripts write it, without the columns that FlashRAG had."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question_prompt(question)}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": golden_answers}},
        "extra_info": {"split": split, "index": index},
    }


def write_parquet(path, *rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return str(path)


# ---- forms


def test_flashrag_jsonl_with_a_metadata_title_and_its_stem_as_source(tmp_path):
    where = write_jsonl(
        tmp_path / "nq.jsonl",
        flashrag(metadata={"supporting_titles": ["Emma (novel)", "Jane Austen"]}),
        "",
        flashrag("test_1"),
    )
    first, second = load_questions(where)
    assert first == Question(
        "nq/test_0", "who wrote Emma", ("Jane Austen",), "nq", ("Emma (novel)", "Jane Austen")
    )
    assert second == Question("nq/test_1", "who wrote Emma", ("Jane Austen",), "nq")


def test_source_is_the_rows_own_then_the_callers_then_the_files(tmp_path):
    where = write_jsonl(tmp_path / "qa.jsonl", flashrag("0", data_source="popqa"), flashrag("1"))
    assert [q.id for q in load_questions(where)] == ["popqa/0", "qa/1"]
    assert [q.id for q in load_questions(where, source="mine")] == ["popqa/0", "mine/1"]
    # A split is no source
    assert load_questions(write_jsonl(tmp_path / "musique" / "dev.jsonl", flashrag()))[0].source == "musique"


def test_search_r1_parquet_gives_back_the_question_without_its_prompt(tmp_path):
    tricky = "Question: who said 'Question: what?'"
    where = write_parquet(
        tmp_path / "train.parquet",
        search_r1("nq", 0, "who wrote Emma", ["Jane Austen", " Austen "]),
        search_r1("nq", 1, tricky + "?", ["nobody"]),
    )
    first, second = load_questions(where)
    # The script added the '?'
    assert first == Question("nq/train_0", "who wrote Emma?", ("Jane Austen", "Austen"), "nq")
    assert second.text == tricky + "?"
    # The model reads the same prompt either way
    assert question_prompt(first.text) == question_prompt("who wrote Emma")


def test_the_same_index_in_two_sources_gives_two_ids(tmp_path):
    where = write_parquet(
        tmp_path / "train.parquet", search_r1("nq", 7, "a", ["x"]), search_r1("hotpotqa", 7, "b", ["y"])
    )
    assert [q.id for q in load_questions(where)] == ["nq/train_7", "hotpotqa/train_7"]


def test_the_hubs_own_columns_win_over_prompt_and_ground_truth(tmp_path):
    row = search_r1("nq", 0, "x", ["y"]) | flashrag("train_0", "who wrote Emma?", ["Jane Austen"])
    assert load_questions(write_parquet(tmp_path / "t.parquet", row)) == [
        Question("nq/train_0", "who wrote Emma?", ("Jane Austen",), "nq")
    ]


def test_parquet_longer_than_one_read_keeps_order_and_row_numbers(tmp_path):
    rows = [search_r1("nq", i, f"q{i}", [str(i)]) for i in range(2500)]
    questions = load_questions(write_parquet(tmp_path / "a.parquet", *rows))
    assert [q.golden_answers for q in questions] == [(str(i),) for i in range(2500)]
    rows[2100]["reward_model"] = {"style": "rule", "ground_truth": {"target": []}}
    with pytest.raises(ValueError, match=r"b\.parquet row 2100: golden_answers = \[\]"):
        load_questions(write_parquet(tmp_path / "b.parquet", *rows))


def test_line_separator_inside_a_json_string_is_no_line_end(tmp_path):
    where = write_jsonl(tmp_path / "nq.jsonl", flashrag(question="one\u2028two\x85three"))
    assert load_questions(where)[0].text == "one\u2028two\x85three"


def test_blank_golden_answers_are_dropped_and_numbers_and_a_single_string_accepted(tmp_path):
    where = write_jsonl(
        tmp_path / "nq.jsonl",
        flashrag("0", golden_answers=["", " ", 1815]),
        {**flashrag("1"), "golden_answers": "Emma"},
    )
    assert [q.golden_answers for q in load_questions(where)] == [("1815",), ("Emma",)]


@pytest.mark.parametrize(
    "text, golds",
    [
        ('["Jane Austen", "Austen"]', ("Jane Austen", "Austen")),
        ("[1815]", ("[1815]",)),
        ("1815", ("1815",)),
        ('["Emma"', ('["Emma"',)),
        ("[]", ("[]",)),
    ],
)
def test_a_string_that_is_a_json_list_of_strings_is_read_as_one(tmp_path, text, golds):
    where = write_jsonl(tmp_path / "nq.jsonl", flashrag() | {"golden_answers": text})
    assert load_questions(where)[0].golden_answers == golds


def test_a_folder_gives_the_file_of_the_split_and_test_falls_back_to_dev_then_train(tmp_path):
    for split in ("train", "dev", "test"):
        write_jsonl(tmp_path / "nq" / f"{split}.jsonl", flashrag(f"{split}_0"))
    folder = str(tmp_path / "nq")

    def ids(split):
        return [q.id for q in load_questions(folder, split=split)]

    assert ids("train") == ["nq/train_0"] and ids("dev") == ["nq/dev_0"] and ids("test") == ["nq/test_0"]
    (tmp_path / "nq" / "test.jsonl").unlink()
    assert ids("test") == ["nq/dev_0"]
    (tmp_path / "nq" / "dev.jsonl").unlink()
    assert ids("test") == ["nq/train_0"]
    with pytest.raises(ValueError, match="nq has no split 'dev', only train: name one of these"):
        ids("dev")
    (tmp_path / "nq" / "train.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"nq holds train\.\w+ and train\.\w+: give the file itself"):
        ids("train")
    write_jsonl(tmp_path / "list.jsonl", flashrag("a") | {"data_source": ["nq"]})
    with pytest.raises(ValueError, match=r"data_source = \['nq'\] must be a text"):
        load_questions(str(tmp_path / "list.jsonl"))


def test_sources_keeps_only_those_named(tmp_path):
    where = write_jsonl(
        tmp_path / "qa.jsonl",
        *(flashrag(str(i), data_source=s) for i, s in enumerate(["nq", "popqa", "nq", "musique"])),
    )
    assert [q.id for q in load_questions(where, sources=("nq", "musique"))] == ["nq/0", "nq/2", "musique/3"]


# ---- hub


@pytest.fixture
def hub(monkeypatch):
    """A hub with two sets; `calls` are the arguments of each load_dataset."""
    calls = []

    def load_dataset(repository, config=None):
        calls.append((repository, config))
        if repository == "PeterJinGo/nq_hotpotqa_train":
            rows = {
                "train": [search_r1("nq", 0, "a?", ["x"]), search_r1("hotpotqa", 0, "b?", ["y"])],
                "test": [search_r1("nq", 0, "c?", ["z"], "test")],
            }
        elif (repository, config) == ("RUC-NLPIR/FlashRAG_datasets", "hotpotqa"):
            rows = {"train": [flashrag("train_0")], "dev": [flashrag("dev_0")]}
        else:
            raise FileNotFoundError(f"Dataset '{repository}' doesn't exist on the Hub")
        return datasets.DatasetDict(
            {split: datasets.Dataset.from_list(items) for split, items in rows.items()}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def test_hub_name_without_config(hub):
    assert [q.id for q in load_questions("PeterJinGo/nq_hotpotqa_train")] == [
        "nq/train_0",
        "hotpotqa/train_0",
    ]
    assert [q.text for q in load_questions("PeterJinGo/nq_hotpotqa_train", split="test")] == ["c?"]
    assert hub[0] == ("PeterJinGo/nq_hotpotqa_train", None)


def test_third_part_of_a_hub_name_is_the_config_and_the_source(hub):
    where = "RUC-NLPIR/FlashRAG_datasets/hotpotqa"
    # No test split: dev, not train
    assert [q.id for q in load_questions(where, split="test")] == ["hotpotqa/dev_0"]
    assert [q.id for q in load_questions(where)] == ["hotpotqa/train_0"]
    assert hub[0] == ("RUC-NLPIR/FlashRAG_datasets", "hotpotqa")


def test_hub_errors_name_the_set_the_cause_and_the_remedy(hub):
    with pytest.raises(
        ValueError,
        match=r"no file or folder no/such, and the hub does not give it \(Dataset 'no/such' doesn't "
        r"exist.*: give a \.parquet",
    ):
        load_questions("no/such")
    with pytest.raises(
        ValueError, match="PeterJinGo/nq_hotpotqa_train has no split 'validation', only test, train"
    ):
        load_questions("PeterJinGo/nq_hotpotqa_train", split="validation")


def test_numpy_arrays_in_rows_are_read_as_lists(monkeypatch):
    """Rows that went through pandas hold arrays, whose truth value raises."""
    row = search_r1("nq", 0, "who wrote Emma", numpy.array(["Jane Austen", ""], dtype=object))
    row["prompt"] = numpy.array(row["prompt"], dtype=object)
    row["metadata"] = {"supporting_titles": numpy.array(["Emma"], dtype=object)}
    monkeypatch.setattr(datasets, "load_dataset", lambda repository, config=None: {"train": [row]})
    assert load_questions("some/set") == [
        Question("nq/train_0", "who wrote Emma?", ("Jane Austen",), "nq", ("Emma",))
    ]


# ---- errors


@pytest.mark.parametrize(
    "where", ["nowhere/questions.jsonl", "./folder", "/no/such/folder", "train.parquet", "a/b/c/d"]
)
def test_a_missing_file_is_not_looked_for_on_the_hub(where, hub):
    with pytest.raises(ValueError, match=f"no file or folder {where}: give a .parquet"):
        load_questions(where)
    assert hub == []


@pytest.mark.parametrize(
    "row, message",
    [
        ('{"id": "x", ', r"nq\.jsonl line 2 is not valid JSON \(.*\): each line must hold one object"),
        ('{"id": ' + "[" * 100_000, r"nq\.jsonl line 2 is not valid JSON"),
        ("[1, 2]", r"nq\.jsonl line 2 holds list '\[1, 2\]': each line must hold one object"),
        ({"question": "q", "golden_answers": ["a"]}, r"nq\.jsonl line 2: missing field 'id'"),
        ({"id": "1", "golden_answers": ["a"]}, r"nq\.jsonl line 2: missing field 'question'"),
        ({"id": "1", "question": "q"}, r"nq\.jsonl line 2: missing field 'golden_answers'"),
        (
            {"question": "q"},
            r'missing field .*; a row is such as {"id": "1", "question": "Who wrote Emma\?", '
            r'"golden_answers": \["Jane Austen"\]}',
        ),
        (
            {"id": "1"},
            r'missing field .*; a row is such as {"id": "1", "question": "Who wrote Emma\?", '
            r'"golden_answers"',
        ),
        (flashrag(True), r"nq\.jsonl line 2: id = True must be a string or a number"),
        (
            '{"id": "\\ud800", "question": "q", "golden_answers": ["a"]}',
            r"nq\.jsonl line 2: id .* hold half a character",
        ),
        (
            '{"id": "1", "question": "q", "golden_answers": ["\\udfff"]}',
            r"nq\.jsonl line 2: .*golden_answers .* hold half a character",
        ),
        (flashrag("1", question="  "), r"nq\.jsonl line 2: question = '  ' is empty: remove the row"),
        (flashrag("1", question=7), r"nq\.jsonl line 2: question = 7 is empty"),
        (
            flashrag("1", golden_answers=[]),
            r"nq\.jsonl line 2: golden_answers = \[\] of 'who wrote Emma' are empty: .* remove the row",
        ),
        (
            flashrag("1", golden_answers=["", "  "]),
            r"nq\.jsonl line 2: golden_answers = \['', '  '\] of 'who wrote Emma' are empty",
        ),
        (
            {**flashrag("1"), "golden_answers": {"a": 1}},
            r"nq\.jsonl line 2: golden_answers = \{'a': 1\}: must be a list of strings",
        ),
        (
            flashrag("1", metadata={"supporting_titles": 3}),
            r"nq\.jsonl line 2: metadata.supporting_titles = 3: must be a list of strings",
        ),
        (
            flashrag("test_0"),
            r"nq\.jsonl line 2: id 'nq/test_0' is already that of .*nq\.jsonl line 1: ids must be unique "
            r"within a source",
        ),
        (
            {"id": "1", "prompt": [{"role": "user", "content": "hm"}], "golden_answers": ["a"]},
            r"line 2: the prompt 'hm' has no 'Question: '",
        ),
    ],
)
def test_a_defective_line_is_named_with_its_file_number_and_remedy(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        load_questions(write_jsonl(tmp_path / "nq.jsonl", flashrag(), row))


def test_an_empty_file_another_suffix_broken_parquet_and_wrong_encoding_are_refused(tmp_path):
    with pytest.raises(ValueError, match="empty.jsonl holds no questions"):
        load_questions(write_jsonl(tmp_path / "empty.jsonl", ""))
    with pytest.raises(ValueError, match=r"nq\.csv is neither \.parquet nor \.jsonl"):
        load_questions(write_jsonl(tmp_path / "nq.csv", flashrag()))
    (tmp_path / "bad.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(ValueError, match=r"bad\.parquet is not a readable parquet file"):
        load_questions(str(tmp_path / "bad.parquet"))
    (tmp_path / "latin.jsonl").write_bytes('{"id": "é"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.jsonl is not UTF-8"):
        load_questions(str(tmp_path / "latin.jsonl"))
    with pytest.raises(ValueError, match="has no split 'train', only none"):
        (tmp_path / "hollow").mkdir()
        load_questions(str(tmp_path / "hollow"))


def test_a_source_without_rows_is_refused_even_beside_one_that_has_some(tmp_path):
    where = write_jsonl(
        tmp_path / "qa.jsonl", flashrag("0", data_source="nq"), flashrag("1", data_source="hotpotqa")
    )
    for sources in (("squad",), ("nq", "squad")):
        with pytest.raises(
            ValueError, match=r"qa\.jsonl has no rows of source 'squad': its sources are hotpotqa, nq"
        ):
            load_questions(where, sources=sources)


# ---- python -m lld.data check


def check(path, capsys) -> tuple[int, str]:
    code = program.main(["check", str(path)])
    return code, "".join(capsys.readouterr())


def test_check_lists_every_problem_with_its_line_and_the_wanted_row_once(tmp_path, capsys):
    bad = [{"id": "7", "question": "q"}, '{"id"', flashrag(), *[{"id": str(n)} for n in range(10)]]
    where = write_jsonl(tmp_path / "mine.jsonl", flashrag(), flashrag("8", data_source="b\x1b[1m"), *bad)
    code, told = check(where, capsys)
    lines = told.splitlines()
    assert code == 2
    assert lines[0] == (
        f"{where}: 2 questions can be used, 13 rows cannot; sources: 'mine' (1), 'b\\x1b[1m' (1)"
    )
    assert [line.split()[2] for line in lines[1:11]] == [f"{n}:" if n != 4 else "4" for n in range(3, 13)]
    assert "missing field 'golden_answers'" in lines[1] and "already that of" in lines[3]
    assert lines[11:] == [
        "  … and 3 more",
        "a row of questions is such as",
        '  {"id": "1", "question": "Who wrote Emma?", "golden_answers": ["Jane Austen"]}',
    ]


def test_check_reads_good_files_as_a_run_would(tmp_path, capsys):
    where = write_parquet(tmp_path / "train.parquet", search_r1("nq", 0, "who wrote Emma", ["Jane Austen"]))
    assert check(where, capsys) == (
        0,
        f"{where}: 1 questions can be used, 0 rows cannot; sources: 'nq' (1)\n",
    )
    where = write_jsonl(tmp_path / "q.jsonl", flashrag(golden_answers=["The", "Emma"]), flashrag("8"))
    code, told = check(where, capsys)
    assert code == 0 and "; 1 with a gold answer that an empty one matches" in told
    passages = [{"id": str(n), "contents": f'"Title {n}"\ntext'} for n in range(3)]
    write_jsonl(tmp_path / "c.jsonl", *passages)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress((tmp_path / "c.jsonl").read_bytes()))
    for name in ("c.jsonl", "c.jsonl.gz"):
        code, told = check(tmp_path / name, capsys)
        assert code == 0 and told.endswith(
            f"{name}: 3 passages can be used, 0 rows cannot; 3 with a title in quotes as their first line, "
            "14 characters on average\n"
        )


def test_check_of_passages_names_bad_lines_and_repeated_ids(tmp_path, capsys):
    write_jsonl(
        tmp_path / "c.jsonl",
        {"id": "a", "contents": "no title"},
        {"id": "b", "contents": " "},
        {"id": "a", "contents": '"T"\ntext'},
        {"text": "other"},
        {"id": "a", "contents": "third"},
    )
    code, told = check(tmp_path / "c.jsonl", capsys)
    assert code == 2 and "1 passages can be used, 4 rows cannot; 1 with a title" in told
    assert "7 characters on average" in told  # of the three that were read
    assert "line 5: id 'a' was used on line 1" in told
    assert "line 2: " in told and "line 4: " in told and "line 3: id 'a' was used on line 1" in told
    assert """line 4: '{"text": "other"}' must be a JSON object""" in told and "(no field 'id')" in told
    assert told.endswith(
        '{"id": "0", "contents": "\\"Emma (novel)\\"\\nEmma is a novel written by Jane Austen."}\n'
    )
    wanted = json.loads(told.splitlines()[-1])
    assert wanted["contents"].split("\n") == ['"Emma (novel)"', "Emma is a novel written by Jane Austen."]


def test_check_of_a_file_of_neither_kind_shows_both_rows(tmp_path, capsys):
    write_jsonl(tmp_path / "x.jsonl", {"prediction": 1}, "[]", "hm")
    write_jsonl(tmp_path / "empty.jsonl", "")
    (tmp_path / "x.csv").write_text("id,question\n")
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b'{"id": "1", "contents": "x"}' * 9)[:-9])
    (tmp_path / "q.jsonl.gz").write_bytes(gzip.compress(json.dumps(flashrag()).encode()))
    for name, message in {
        "x.jsonl": "none of its first 1000 lines holds an object with a known field",
        "empty.jsonl": "none of its first 1000 lines",
        "x.csv": "is neither .jsonl",
        "torn.jsonl.gz": "cannot unpack",
        "q.jsonl.gz": "unpack the file",
        "none.jsonl": "no file",
    }.items():
        code, told = check(tmp_path / name, capsys)
        assert code == 2 and message in told, name
        both = "a row of questions is such as" in told and "a row of passages is such as" in told
        assert both == (name in ("x.jsonl", "empty.jsonl", "x.csv")), name


# ---- which questions belong to a step

TEN = [Question(f"s/{i}", f"q{i}", ("a",), "s") for i in range(10)]


def stream(num_items, num_questions, seed=0, questions=TEN):
    return [
        q
        for step in range(num_items // num_questions)
        for q in questions_of_step(questions, step, num_questions, seed)
    ]


def test_a_step_is_a_pure_function_of_seed_and_step():
    later_first = [questions_of_step(TEN, step, 4, 0) for step in (7, 3, 0)]
    in_order = [questions_of_step(TEN, step, 4, 0) for step in range(8)]
    assert later_first == [in_order[7], in_order[3], in_order[0]]


def test_every_epoch_holds_every_question_once_in_an_order_of_its_own():
    items = stream(40, 4)  # 4 does not divide 10: steps cross epochs
    epochs = [items[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(q.id for q in epoch) == sorted(q.id for q in TEN) for epoch in epochs)
    assert len({tuple(q.id for q in epoch) for epoch in epochs}) == 4
    assert TEN not in epochs


def test_the_stream_does_not_depend_on_how_many_questions_a_step_takes():
    assert stream(60, 4) == stream(60, 5) == stream(60, 30)  # 30: one step holds three epochs


def test_seeds_give_different_streams_and_a_seed_is_not_a_later_epoch_of_another():
    """torch's CPU generator drops all but 32 bits of a seed, so (seed << 32) + epoch would make all seeds
    alike."""
    streams = [[q.id for q in stream(10, 10, seed)] for seed in range(5)]
    assert len(set(map(tuple, streams))) == 5
    second_epochs = [[q.id for q in stream(20, 10, seed)[10:]] for seed in range(5)]
    assert not any(epoch in streams for epoch in second_epochs)


# ---- the real files

real = pytest.mark.skipif(not QA.is_dir(), reason="real questions are not here")


@real
def test_the_real_training_file():
    questions = load_questions(str(QA / "train.jsonl"))
    assert len(questions) == 2500 and len({q.id for q in questions}) == 2500
    assert (
        sum(q.source == "nq" for q in questions) == 1800
        and sum(q.source == "hotpotqa" for q in questions) == 700
    )
    assert load_questions(str(QA), split="train", sources=("hotpotqa",)) == [
        q for q in questions if q.source == "hotpotqa"
    ]
    assert questions[0] == Question(
        "nq/train_nq_0", "What are the neighboring countries of dominican republic?", ("Haiti",), "nq"
    )


@real
@pytest.mark.parametrize(
    "name, count",
    [
        ("nq", 500),
        ("triviaqa", 500),
        ("popqa", 500),
        ("hotpotqa", 500),
        ("2wiki", 500),
        ("musique", 500),
        ("bamboogle", 125),
    ],
)
def test_the_real_benchmarks(name, count):
    questions = load_questions(str(QA / f"{name}.jsonl"), split="test")
    assert len(questions) == count and {q.source for q in questions} == {name}
    assert all(q.golden_answers and q.id.startswith(f"{name}/") for q in questions)


def test_the_real_data_benchmark_says_what_its_data_folder_must_hold(tmp_path):
    from bench.real_data import find_data, first_rows

    for missing, path in (
        ("a corpus", "corpus.jsonl"),
        ("qa/train.jsonl", "qa/train.jsonl"),
        ("any benchmark", "qa/nq.jsonl"),
    ):
        with pytest.raises(
            ValueError,
            match=f"--data .* lacks {missing}. It must hold corpus.jsonl or .*qa/nq.jsonl, qa/triviaqa.jsonl",
        ):
            find_data(tmp_path)
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("1\n2\n3\n")
    assert find_data(tmp_path) == (
        tmp_path / "corpus.jsonl",
        {name: tmp_path / "qa" / f"{name}.jsonl" for name in ("train", "nq")},
    )
    assert first_rows(tmp_path / "qa" / "nq.jsonl", 2, tmp_path / "few").read_text() == "1\n2\n"
