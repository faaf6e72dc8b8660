import dataclasses
import itertools
import json
import random
import resource
import threading
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lld import config, files, protocol
from lld.tinyworld import demonstrations
from lld.tinyworld import policy as policy_module
from lld.tinyworld import prepare as prepare_module
from lld.tinyworld import world as tinyworld
from lld.tinyworld.prepare import prepare_world
from lld.tools import TOOLS

TINY = config.TinyWorld(num_people=30, warm_start_steps=12, hidden_size=32, namesake_share=0.2)
TOPK = 3


def files_of(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    cfg = dataclasses.replace(TINY, dir=str(tmp_path_factory.mktemp("tiny") / "world"))
    prepare_world(cfg, config.Rollout(), TOPK)
    return cfg, tmp_path_factory.getbasetemp() / cfg.dir


@pytest.fixture(scope="module")
def world():
    return tinyworld.make_world(TINY)


@pytest.fixture(scope="module")
def tokenizer(world, tmp_path_factory):
    """The tokenizer as a run gets it: saved beside the policy's config, which decides what AutoTokenizer
    opens, and loaded again."""
    folder = tmp_path_factory.mktemp("policy")
    made = policy_module.make_tokenizer(world, TOPK)
    policy_module.make_policy(TINY, made).save_pretrained(folder)
    made.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def search(world, tmp_path_factory):
    corpus = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    corpus.write_text(
        "".join(
            json.dumps({"id": passage.id, "contents": passage.contents}) + "\n"
            for passage in tinyworld.passages(world)
        )
    )
    return demonstrations.search_all(corpus, demonstrations.all_queries(world), TOPK)


def test_every_file_opens_in_the_format_its_reader_expects(prepared):
    _, folder = prepared
    passages = rows_of(folder / "corpus.jsonl")
    assert [row["id"] for row in passages] == [str(i) for i in range(len(passages))]
    assert all(
        set(row) == {"id", "contents"}
        and row["contents"].startswith('"')
        and row["contents"].count("\n") == 1
        for row in passages
    )
    for name in ("train", "heldout"):
        rows = rows_of(folder / f"{name}.jsonl")
        assert len({row["id"] for row in rows}) == len(rows) > 0
        for row in rows:
            assert (
                set(row) == {"id", "question", "golden_answers", "data_source", "metadata"}
                and row["data_source"] == "tiny"
            )
            assert row["metadata"]["hops"] == len(row["metadata"]["supporting_titles"]) in (1, 2)
            assert (
                row["question"].endswith("?")
                and isinstance(row["golden_answers"], list)
                and row["golden_answers"][0]
            )
    tokenizer, policy = (
        AutoTokenizer.from_pretrained(folder / "policy"),
        AutoModelForCausalLM.from_pretrained(folder / "policy"),
    )
    assert policy.config.vocab_size == len(tokenizer) and policy.dtype == torch.float32
    assert policy.get_output_embeddings().weight is policy.get_input_embeddings().weight
    assert (
        policy.config.eos_token_id
        == tokenizer.eos_token_id
        != tokenizer.pad_token_id
        == policy.config.pad_token_id
    )
    assert not folder.with_name(folder.name + ".partial").exists()


def test_every_gold_answer_is_found_by_reading_the_passages_along_the_path(prepared):
    """Reads only what is written on disk: a passage states each fact by naming the entity it leads to."""
    _cfg, folder = prepared
    texts = {}
    for row in rows_of(folder / "corpus.jsonl"):
        title, text = row["contents"].split("\n")
        texts.setdefault(title.strip('"'), []).append(text)
    for name in ("train", "heldout"):
        for row in rows_of(folder / f"{name}.jsonl"):
            chain = [*row["metadata"]["supporting_titles"], *row["golden_answers"]]
            assert chain[0] in row["question"]
            for title, found in itertools.pairwise(chain):
                assert any(f" {found}" in text for text in texts[title]), f"{title} does not lead to {found}"


def test_a_flawless_demonstration_answers_every_question_with_its_gold(world, search):
    train, held_out = tinyworld.make_questions(world, TINY)
    seen_by = {query: [int(passage.id) for passage in row] for query, row in search.items()}
    for question in train + held_out:
        turns = demonstrations.demonstrate(random.Random(0), world, question, seen_by, clumsy=False)
        gold = tinyworld.question_row(world, question, "x")["golden_answers"][0]
        assert protocol.parse_action(turns[-1][1]) == protocol.Action("answer", gold.lower())
        searched = [index for kind, query in turns if kind == "search" for index in seen_by[query]]
        assert set(tinyworld.follow(world, question.entity, question.path)[:-1]) <= set(searched)


def test_held_out_questions_share_no_title_and_path_with_training(world):
    train, held_out = tinyworld.make_questions(world, TINY)
    keys = [
        {(world[question.entity].title, question.path) for question in side} for side in (train, held_out)
    ]
    assert keys[0] and keys[1] and not keys[0] & keys[1]
    assert not {question.text for question in train} & {question.text for question in held_out}


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_two_hop_share_is_the_share_of_two_hop_paths(world, share):
    train, held_out = tinyworld.make_questions(world, dataclasses.replace(TINY, two_hop_share=share))
    hops = [len(path) for _, path in {(question.entity, question.path) for question in train + held_out}]
    assert sum(h == 2 for h in hops) / len(hops) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.8, 1.0])
def test_namesakes_exist_at_the_asked_share_and_differ_in_every_fact(share):
    world = tinyworld.make_world(dataclasses.replace(TINY, num_people=40, namesake_share=share))
    people = [entity for entity in world if entity.kind == "person"]
    count = Counter(person.title for person in people)
    assert len(people) == 40 and set(count.values()) <= {1, 2}
    assert sum(count[person.title] == 2 for person in people) / 40 == pytest.approx(share, abs=0.05)
    for title in (title for title in count if count[title] == 2):
        one, other = (person.facts for person in people if person.title == title)
        assert all(one[relation] != other[relation] for relation in one)


def test_same_seed_same_bytes_and_another_seed_another_world(prepared, tmp_path):
    cfg, folder = prepared
    prepare_world(dataclasses.replace(cfg, dir=str(tmp_path / "again")), config.Rollout(), TOPK)
    assert files_of(tmp_path / "again") == files_of(folder)
    assert [e.title for e in tinyworld.make_world(cfg)] != [
        e.title for e in tinyworld.make_world(dataclasses.replace(cfg, seed=1))
    ]


def test_the_saved_tokenizer_opens_as_the_word_level_one_and_knows_every_word(world, tokenizer):
    assert tokenizer.tokenize("<think> Port  x</think>") == ["<think>", "port", "<unk>", "</think>"]
    assert all(len(tokenizer.encode(tag)) == 1 for tag in policy_module.TAGS)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token != tokenizer.eos_token
    train, held_out = tinyworld.make_questions(world, TINY)
    written = (
        [protocol.INVALID_ACTION]
        + [TOOLS["search"].render(passage, 1) for passage in tinyworld.passages(world)]
        + [question.text for question in train + held_out]
    )
    for text in written:
        assert tokenizer.unk_token_id not in tokenizer.encode(text, add_special_tokens=False), text


def test_the_prompt_holds_the_question_and_little_else(world, tokenizer):
    question = tinyworld.make_questions(world, TINY)[0][0].text
    words = len(tokenizer.encode(question, add_special_tokens=False))
    prompt = protocol.encode_prompt(tokenizer, question)
    assert (
        tokenizer.decode(prompt)
        == f"<|im_start|> user {tokenizer.decode(tokenizer.encode(question))} <|im_end|> <|im_start|> "
        "assistant"
    )
    assert len(prompt) == words + 5 and tokenizer.unk_token_id not in prompt


def test_every_kind_of_turn_survives_the_tokenizer_and_parses_as_meant(world, tokenizer, search):
    """The sampler hands parse_action the decoded ids, so tags and two-word names must come back literally."""
    train, _ = tinyworld.make_questions(world, TINY)
    seen_by = {query: [int(passage.id) for passage in row] for query, row in search.items()}
    rng = random.Random(0)
    kinds = Counter()
    for question in train * 2:
        for kind, text in demonstrations.demonstrate(rng, world, question, seen_by):
            if kind != "action":
                continue
            decoded = tokenizer.decode(
                tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False
            )
            action = protocol.parse_action(decoded)
            assert action == protocol.parse_action(text)
            assert decoded.endswith(
                {"search": "</search>", "answer": "</answer>", "invalid": "<|im_end|>"}[action.kind]
            )
            assert (
                tokenizer.decode(
                    tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=True
                ).count("<think>")
                == 1
            )
            kinds[action.kind, len(action.content.split()) > 1] += 1
    assert {("search", True), ("answer", True), ("answer", False), ("invalid", False)} <= set(kinds)


def test_observations_are_whole_and_short_and_every_fact_is_in_reach_of_a_search(world, tokenizer, search):
    for index, entity in enumerate(world):
        for relation, leads_to in entity.facts.items():
            found = {
                passage.id: passage
                for query in (f"{entity.title} {relation}", entity.title)
                for passage in search[query.lower()]
            }
            assert world[leads_to].title in found[str(index)].contents
    for found in search.values():
        ids, num_cut = protocol.render_observation(tokenizer, found, 80)
        assert num_cut == 0 and tokenizer.unk_token_id not in ids


def test_a_rendered_demonstration_masks_exactly_what_the_model_writes(world, tokenizer, search):
    question = tinyworld.make_questions(world, TINY)[0][0]
    observation_ids = {
        query: protocol.render_observation(tokenizer, row, 200)[0] for query, row in search.items()
    }
    seen_by = {query: [int(passage.id) for passage in row] for query, row in search.items()}
    turns = demonstrations.demonstrate(random.Random(1), world, question, seen_by, clumsy=False)
    encoder = demonstrations.Encoder(tokenizer)
    ids, own = demonstrations.render_demonstration(encoder, question.text, turns, observation_ids)
    written = " ".join(text for kind, text in turns if kind == "action")
    assert tokenizer.decode([i for i, mine in zip(ids, own, strict=True) if mine]) == tokenizer.decode(
        tokenizer.encode(written, add_special_tokens=False)
    )
    # The sampler stops there: an EOS after it would never be sampled
    assert ids[-1] == tokenizer.convert_tokens_to_ids("</answer>")


def test_demonstration_loss_falls_to_what_a_hand_written_mean_says(prepared):
    """The saved policy's loss, weighed token by token in Python, is far below that of the uniform guess it
    began with."""
    cfg, folder = prepared
    uniform = (
        torch.tensor(float(AutoModelForCausalLM.from_pretrained(folder / "policy").config.vocab_size))
        .log()
        .item()
    )
    first, last = json.loads((folder / "world.json").read_text())["warm_start_losses"]
    assert first == pytest.approx(uniform, abs=0.2) and last < first - 0.3
    policy = policy_module.make_policy(cfg, AutoTokenizer.from_pretrained(folder / "policy"))
    demonstration = ([5, 6, 7, 8], [False, False, True, True])
    with torch.no_grad():
        logprobs_TV = policy(input_ids=torch.tensor([demonstration[0]])).logits[0].log_softmax(-1)
    expected = -(0.3 * logprobs_TV[0, 6] + logprobs_TV[1, 7] + logprobs_TV[2, 8]).item() / 2.3
    assert policy_module.warm_start(policy, [demonstration] * 3, 1, seed=0)[0] == pytest.approx(
        expected, abs=1e-5
    )


def test_a_second_call_returns_at_once_and_leaves_the_files_alone(prepared, monkeypatch):
    cfg, folder = prepared
    before = files_of(folder)
    monkeypatch.setattr(prepare_module, "warm_start", lambda *_: pytest.fail("trained again"))
    prepare_world(cfg, config.Rollout(), TOPK)
    assert files_of(folder) == before


def test_other_options_are_refused_with_both_values_and_the_remedy(prepared):
    cfg, _ = prepared
    with pytest.raises(
        ValueError, match="num_people 30 there, 31 asked.*delete the folder or choose another"
    ):
        prepare_world(dataclasses.replace(cfg, num_people=31), config.Rollout(), TOPK)
    with pytest.raises(ValueError, match="topk 3 there, 2 asked"):
        prepare_world(cfg, config.Rollout(), 2)


def test_a_rollout_too_short_for_this_world_is_refused(prepared):
    with pytest.raises(ValueError, match="rollout.max_observation_tokens = 20.*raise"):
        prepare_world(prepared[0], config.Rollout(max_observation_tokens=20), TOPK)
    with pytest.raises(ValueError, match="rollout.max_turns = 1.*two_hop_share 0"):
        prepare_world(prepared[0], config.Rollout(max_turns=1), TOPK)


def test_a_rollout_too_short_is_refused_before_any_training(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "warm_start", lambda *_: pytest.fail("trained first"))
    with pytest.raises(ValueError, match="rollout.max_new_tokens = 10"):
        prepare_world(
            dataclasses.replace(TINY, dir=str(tmp_path / "world")), config.Rollout(max_new_tokens=10), TOPK
        )


def test_a_folder_with_other_files_is_never_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="no world.json"):
        prepare_world(dataclasses.replace(TINY, dir=str(tmp_path)), config.Rollout(), TOPK)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_call_that_ends_early_leaves_nothing_and_touches_no_folder_that_was_there(
    prepared, tmp_path, monkeypatch
):
    """A folder that only has the name of an unfinished world is somebody's, and stays as it is."""
    cfg = dataclasses.replace(prepared[0], dir=str(tmp_path / "world"))
    (tmp_path / "world.partial").mkdir()
    (tmp_path / "world.partial" / "thesis.tex").write_text("years of work")
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "warm_start", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare_world(cfg, config.Rollout(), TOPK)
    assert [path.name for path in tmp_path.iterdir()] == ["world.partial"]
    prepare_world(cfg, config.Rollout(), TOPK)
    assert files_of(tmp_path / "world") == files_of(prepared[1])
    assert {path.name for path in tmp_path.iterdir()} == {"world", "world.partial"}
    assert (tmp_path / "world.partial" / "thesis.tex").read_text() == "years of work"
    assert (tmp_path / "world").stat().st_mode == (tmp_path / "world.partial").stat().st_mode


@pytest.mark.parametrize("locks", [True, False])
def test_two_runs_that_want_one_new_world_share_it(prepared, tmp_path, monkeypatch, capfd, locks):
    """The second waits for the first one's; where the file system has no locks, both make it and one of the
    two stays."""
    if not locks:
        monkeypatch.setattr(
            prepare_module.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(37, "No locks available"))
        )
    cfg, made, failed = dataclasses.replace(prepared[0], dir=str(tmp_path / "world")), [], []
    both = threading.Barrier(2)
    identity = prepare_module._identity

    def together(*args):
        both.wait()
        return identity(*args)

    monkeypatch.setattr(prepare_module, "_identity", together)
    make_policy = policy_module.make_policy
    monkeypatch.setattr(prepare_module, "make_policy", lambda *args: made.append(1) or make_policy(*args))

    def prepare():
        try:
            prepare_world(cfg, config.Rollout(), TOPK)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=prepare) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(made) == (1 if locks else 2)
    assert [path.name for path in tmp_path.iterdir()] == ["world"] and {
        str(name) for name in files_of(tmp_path / "world")
    } == {str(name) for name in files_of(prepared[1])}
    assert ("waiting for it" in capfd.readouterr().err) == locks


def test_a_full_disk_in_the_warm_start_is_named_and_the_next_call_succeeds(prepared, tmp_path):
    cfg = dataclasses.replace(prepared[0], dir=str(tmp_path / "world"))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        with pytest.raises(files.WriteError, match="tinyworld.dir = .*world' cannot be written: "):
            prepare_world(cfg, config.Rollout(), TOPK)
    finally:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        )
    assert not list(tmp_path.iterdir())
    prepare_world(cfg, config.Rollout(), TOPK)
    assert files_of(tmp_path / "world") == files_of(prepared[1])


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 100_000, '{"identity": 1, "longest": {}}'])
def test_a_damaged_world_is_named(prepared, tmp_path, text):
    (tmp_path / "world.json").write_text(text)
    with pytest.raises(
        ValueError, match="world.json is damaged .*delete the folder or choose another tinyworld.dir"
    ):
        prepare_world(dataclasses.replace(prepared[0], dir=str(tmp_path)), config.Rollout(), TOPK)
