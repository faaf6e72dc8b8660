"""The stubs that experiments use as controls."""

import json

import pytest

from lld import protocol
from lld.config import Retriever
from lld.retrieval.backends import open_retriever
from lld.retrieval.controls import NOTHING
from lld.settings import from_dict


@pytest.fixture
def options(tmp_path):
    passages = [f'"Page {i}"\nThe tower number {i} was built by builder{i}.' for i in range(40)] + [
        '"Other"\nbuilder7 is a name.'
    ]
    (tmp_path / "c.jsonl").write_text(
        "".join(json.dumps({"id": f"p{i}", "contents": text}) + "\n" for i, text in enumerate(passages))
    )
    (tmp_path / "q.jsonl").write_text(
        "".join(
            json.dumps(
                {"id": f"q{i}", "question": f"Who built tower number {i}?", "golden_answers": [f"Builder{i}"]}
            )
            + "\n"
            for i in (3, 7)
        )
    )
    return lambda backend, **more: Retriever(
        url=None, corpus=str(tmp_path / "c.jsonl"), backend=backend, **more
    )


def test_random_passages_are_the_querys_own_and_spread_over_the_corpus(options):
    once, again = open_retriever(options("random")), open_retriever(options("random"))
    queries = [f"query {i}" for i in range(400)]
    found = once.search(queries, 5)
    assert found == again.search(queries[::-1], 5)[::-1]
    assert all(len({p.id for p in passages}) == 5 for passages in found)
    counts = {f"p{i}": 0 for i in range(41)}
    for passages in found:
        for passage in passages:
            counts[passage.id] += 1
    assert min(counts.values()) > 20 and max(counts.values()) < 90  # 48.8 expected, standard deviation 6.5


def test_the_empty_control_says_so_in_words(options, tokenizer):
    """An empty list would be a failed search, and its group would be dropped."""
    assert open_retriever(options("empty")).search(["x", "y"], 3) == [[NOTHING], [NOTHING]]
    ids, num_cut = protocol.render_observation(tokenizer, [NOTHING], 200)
    assert "finds nothing, on purpose" in tokenizer.decode(ids) and num_cut == 0


def test_the_oracle_finds_the_answer_of_the_nearest_question(options, tmp_path):
    oracle = open_retriever(options("oracle", oracle_questions=str(tmp_path / "q.jsonl")))
    found = oracle.search(["Who built tower number 7?", "builder of tower 3"], 3)
    assert {p.id for p in found[0][:2]} == {"p7", "p40"} and "builder7" not in found[0][2].contents
    assert found[1][0].id == "p3" and len(found[1]) == 3
    with pytest.raises(ValueError, match="needs retriever.oracle_questions"):
        from_dict({"retriever": {"backend": "oracle"}})


def test_the_oracle_does_not_look_for_yes_and_no(options, tmp_path):
    """The passages of a yes/no question are those for its text, with its supporting titles first."""
    passages = [{"id": f"n{i}", "contents": f'"Nay {i}"\nThe no of no, no.'} for i in range(150)]
    with (tmp_path / "c.jsonl").open("a") as corpus:
        corpus.write("".join(json.dumps(passage) + "\n" for passage in passages))
    row = {"id": "1", "question": "Is tower 5 older than Other?", "golden_answers": ["No", "the"]}
    for titles in ([], ["Page 30", "Page 9"]):
        row["metadata"] = {"supporting_titles": titles}
        (tmp_path / "q.jsonl").write_text(json.dumps(row) + "\n")
        oracle = open_retriever(options("oracle", oracle_questions=str(tmp_path / "q.jsonl")))
        [found] = oracle.search([row["question"]], 3)
        [by_words] = open_retriever(options("bm25")).search([row["question"]], 3)
        assert found == by_words if not titles else {p.id for p in found[:2]} == {"p9", "p30"}
        assert found[len(titles)] == by_words[0]
    row["golden_answers"] = ["no", "builder7"]
    (tmp_path / "q.jsonl").write_text(json.dumps(row) + "\n")
    oracle = open_retriever(options("oracle", oracle_questions=str(tmp_path / "q.jsonl")))
    [found] = oracle.search([row["question"]], 2)
    assert {p.id for p in found} == {"p7", "p40"}


def test_the_oracles_fingerprint_is_of_its_questions_not_of_their_place(options, tmp_path):
    def mark(name):
        return open_retriever(options("oracle", oracle_questions=str(tmp_path / name))).fingerprint

    before, text = mark("q.jsonl"), (tmp_path / "q.jsonl").read_text()
    (tmp_path / "copy.jsonl").write_text(text)
    (tmp_path / "q.jsonl").write_text(text.replace("Builder7", "Builder8"))
    assert mark("copy.jsonl") == before != mark("q.jsonl")


def test_controls_have_fingerprints_of_their_own(options):
    assert len({open_retriever(options(backend)).fingerprint for backend in ("random", "empty", "bm25")}) == 3


def test_backend_options_that_nothing_reads_are_refused():
    for section, message in [
        (
            {"backend": "faiss", "dtype": "int8"},
            "dtype = 'int8' does nothing with retriever.backend = 'faiss'",
        ),
        ({"backend": "torch", "rerank": 5}, "rerank = 5 does nothing"),
        ({"backend": "bm25", "faiss_params": "nprobe=1"}, "does nothing"),
        ({"max_memory_gb": 0}, "must be greater than 0"),
        (
            {"url": None, "corpus": "x", "replicas": ["http://x"]},
            "replicas = .* does nothing with retriever.url = null",
        ),
        ({"deadline_s": 0}, "must be greater"),
        (
            {"url": None, "corpus": "x", "backend": "bm25", "empty_results": "show"},
            "empty_results = 'show' does nothing with retriever.backend = 'bm25'",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            from_dict({"retriever": section})
    with pytest.raises(
        ValueError, match="may leave 5 episodes of a step, fewer than optim.updates_per_rollout = 10"
    ):
        from_dict({"rollout": {"num_questions": 2, "max_failed_groups": 0.5}})
    with pytest.raises(ValueError, match=r"max_failed_groups = 1.0: must be in \[0, 1\)"):
        from_dict({"rollout": {"max_failed_groups": 1.0}})
