"""Files of a stranger: a crash box, a run's folder, a checkpoint, a YAML. They choose neither code nor a
place to write, and damage is named."""

import dataclasses
import json
import shutil
import time
import typing
from pathlib import Path

import pytest
import yaml
from test_report import full_rows, write_run

from lld import config, settings
from lld.evaluation.options import options_of
from lld.experiment import grid
from lld.model import load
from lld.model.folder import check_folder
from lld.record import runs
from lld.report import figure
from lld.running import crashbox

EVIL = {
    "run": {"dir": "/elsewhere/run", "trackers": ["wandb"]},
    "model": {"path": "/elsewhere/model", "trust_remote_code": True},
    "data": {"train": "/elsewhere/private.jsonl", "train_sources": ["x"]},
    "retriever": {
        "url": "http://evil.example",
        "replicas": ["http://evil.example:2"],
        "record": "/elsewhere/record.sqlite",
        "corpus": "/elsewhere/c.jsonl",
        "index": "/elsewhere/i",
        "encoder": "/elsewhere/e",
        "topk": 2,
    },
    "eval": {"benchmarks": {"mine": "/elsewhere/b.jsonl"}, "during_training": ["mine"]},
    "tinyworld": {"dir": "/elsewhere/world", "num_people": 40},
    "optim": {"lr": 3e-5},
    "rollout": {"max_turns": 2},
}


def texts(value) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.items() for part in item for text in texts(part)]
    return (
        [text for item in value for text in texts(item)]
        if isinstance(value, (list, tuple))
        else [value]
        if isinstance(value, str)
        else []
    )


def write_box(box: Path, tree: dict, reference: bool = True) -> Path:
    """As much of a crash box as its options are read from."""
    (box / "checkpoints" / "step_000002").mkdir(parents=True)
    (box / "checkpoints" / "step_000002" / "manifest.json").write_text("{}")
    (box / "episodes").mkdir()
    for step in (2, 3):
        (box / "episodes" / f"step_{step:06d}.jsonl").write_text("")
    (box / "config.yaml").write_text(yaml.safe_dump(tree))
    if reference:
        (box / "reference").mkdir()
    return box


# ---- options that are read back ----


def test_every_option_that_holds_text_is_known_as_code_or_write_read_or_word():
    """Who adds an option that may name a file, a host or code must say here which it is."""
    found = []
    for section in dataclasses.fields(config.Config):
        for name, kind in typing.get_type_hints(section.type).items():
            if str in (kind, *typing.get_args(kind)):
                found.append(f"{section.name}.{name}")
    assert sorted([*found, "model.trust_remote_code"]) == sorted(
        settings.CODE_AND_WRITES + settings.READS + settings.WORDS
    )


def test_a_replay_takes_numbers_from_a_box_and_neither_code_nor_places(tmp_path):
    box = write_box(tmp_path / "box", EVIL)
    cfg = crashbox.replay_options(box, ["loss.lld_weight=0.7"])
    assert not [
        text
        for text in texts(settings.to_dict(cfg))
        if "elsewhere" in text or "evil" in text or "wandb" in text
    ]
    assert (cfg.optim.lr, cfg.rollout.max_turns, cfg.retriever.topk, cfg.loss.lld_weight, cfg.run.steps) == (
        3e-5,
        2,
        2,
        0.7,
        4,
    )
    assert cfg.tinyworld.dir is None and not cfg.model.trust_remote_code and cfg.run.trackers == ()
    assert (
        Path(cfg.model.path) == box / "reference" and Path(cfg.run.dir) == box / "replays" / "lld_weight=0.7"
    )
    typed = crashbox.replay_options(box, ["model.path=/mine", "model.trust_remote_code=true"])
    assert typed.model.path == "/mine" and typed.model.trust_remote_code, "who types them chooses them"


def test_a_reward_that_is_code_is_not_taken_from_a_file_and_a_word_is(tmp_path, capsys):
    own, word = {"reward": {"kind": "evil.module:score"}}, {"reward": {"kind": "f1"}}
    for name, tree in (("own", own), ("word", word)):
        write_box(tmp_path / name, EVIL | tree)
        run_folder(tmp_path / "runs" / name, **tree)
    with pytest.raises(ValueError, match="reward.kind = 'evil.module:score' is code, .* give reward.kind="):
        crashbox.replay_options(tmp_path / "own", [])
    assert crashbox.replay_options(tmp_path / "own", ["reward.kind=f1"]).reward.kind == "f1"
    assert crashbox.replay_options(tmp_path / "own", ["reward.kind=a.b:c"]).reward.kind == "a.b:c"
    assert crashbox.replay_options(tmp_path / "word", []).reward.kind == "f1"
    server = ["retriever.url=http://127.0.0.1:9"]
    for name, kind in (("own", "em"), ("word", "f1")):
        ckpt = tmp_path / "runs" / name / "checkpoints" / "step_000002"
        assert options_of(ckpt, None, server).reward.kind == kind
        told = capsys.readouterr().err
        assert ("reward.kind is not taken from a file" in told) == (name == "own")


def test_a_box_without_the_reference_model_says_what_to_give(tmp_path):
    box = write_box(tmp_path / "box", EVIL, reference=False)
    with pytest.raises(
        ValueError,
        match="loss.kl_weight = 0.001, and the box holds no reference/ model: give model.path=MODEL",
    ):
        crashbox.replay_options(box, [])
    assert Path(crashbox.replay_options(box, ["loss.kl_weight=0"]).model.path).name == "step_000002"


def test_a_replay_writes_nowhere_but_into_the_box(tmp_path):
    (tmp_path / "home").mkdir()
    box = write_box(tmp_path / "box", EVIL)
    (box / "replays").symlink_to(tmp_path / "home")
    with pytest.raises(ValueError, match="is a link that leads out of the box"):
        crashbox.replay_options(box, [])
    (box / "replays").unlink()
    (box / "replays" / "unchanged").mkdir(parents=True)
    (box / "replays" / "unchanged" / "metrics.jsonl").symlink_to(tmp_path / "home" / "diary")
    with pytest.raises(ValueError, match="already holds files"):
        crashbox.replay_options(box, [])
    assert (
        Path(crashbox.replay_options(box, ["eval.benchmarks.nq=../../x/y"]).run.dir).parent == box / "replays"
    )
    for name in ("step_abcdef.jsonl", "step_000009.jsonl"):
        (box / "episodes" / name).write_text("")
    with pytest.raises(ValueError, match=r"steps \[2, 3, 9\] do not follow"):
        crashbox.replay_options(box, [])


def good_episode() -> dict:
    turn = {
        "start": 0,
        "end": 2,
        "observation_end": 3,
        "kind": "answer",
        "content": "x",
        "stop": "eos",
        "tag_start": 1,
        "passages": [{"id": "1", "contents": "text", "score": 1.0}],
        "num_cut_passages": 0,
        "searched": False,
    }
    question = {"id": "a/1", "text": "who?", "golden_answers": ["x"], "source": "a", "supporting_titles": []}
    return {
        "question": question,
        "sample": 0,
        "prompt_ids": [1],
        "token_ids": [2, 3, 4],
        "action_ids": [1, 1, 0],
        "logprobs": [-0.5, -0.5, 0.0],
        "turns": [turn],
        "stop_reason": "answer",
        "failure": "",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [2, 3, 10]},
        {"token_ids": [2, 3, -1]},
        {"token_ids": [2, 3, 4.0]},
        {"prompt_ids": []},
        {"prompt_ids": "abc"},
        {"action_ids": [1, 1]},
        {"action_ids": [1, 1, 10**12]},
        {"logprobs": [None] * 3},
        {"turns": [good_episode()["turns"][0] | {"end": 99}]},
        {"turns": [good_episode()["turns"][0] | {"start": -5}]},
        {"turns": [good_episode()["turns"][0] | {"content": 3}]},
        {"turns": [3]},
        {"turns": [{}]},
        {"question": good_episode()["question"] | {"golden_answers": "x"}},
        {"question": {}},
        {"question": None},
        {"evil": 1},
        [],
        "[" * 100_000,
        "9" * 9000,
        "",
    ],
    ids=str,
)
def test_episodes_of_a_box_that_are_none_are_named(tmp_path, change):
    (tmp_path / "episodes").mkdir()
    path, good = tmp_path / "episodes" / "step_000002.jsonl", json.dumps(good_episode())
    path.write_text(f"{good}\n{good}\n")
    assert len(crashbox.read_episodes(tmp_path, 2, 2, 10)) == 2
    bad = (
        json.dumps(good_episode() | change)
        if isinstance(change, dict)
        else change
        if isinstance(change, str)
        else json.dumps(change)
    )
    path.write_text(f"{good}\n{bad}\n")
    with pytest.raises(ValueError, match="step_000002.jsonl line 2 is no episode"):
        crashbox.read_episodes(tmp_path, 2, 2, 10)
    for text, count in (("", 0), (good + "\n", 1)):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"holds {count} episodes, no whole groups of 2"):
            crashbox.read_episodes(tmp_path, 2, 2, 10)


def run_folder(folder: Path, **changes) -> Path:
    """RUN/checkpoints/step_000002 of a run with these options; returns the checkpoint."""
    ckpt = folder / "checkpoints" / "step_000002"
    ckpt.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        yaml.safe_dump(
            {
                section: EVIL.get(section, {}) | changes.get(section, {})
                for section in EVIL.keys() | changes.keys()
            }
        )
    )
    return ckpt


def test_a_runs_own_options_choose_no_code_no_place_to_write_and_no_server_elsewhere(tmp_path, capsys):
    ckpt = run_folder(tmp_path / "run")
    with pytest.raises(
        ValueError,
        match="config.yaml names the server 'http://evil.example', .* give "
        "retriever.url=http://evil.example if it is meant",
    ):
        options_of(ckpt, None, [])
    told = capsys.readouterr().err
    assert (
        "model.trust_remote_code is not taken from a file" in told
        and "retriever.record is not taken from a file" in told
    )
    cfg = options_of(ckpt, None, ["retriever.url=http://127.0.0.1:9"])
    assert (cfg.optim.lr, cfg.rollout.max_turns, cfg.eval.benchmarks) == (
        3e-5,
        2,
        {"mine": "/elsewhere/b.jsonl"},
    )
    assert (
        not cfg.model.trust_remote_code
        and cfg.retriever.record is None
        and cfg.tinyworld.dir is None
        and cfg.run.trackers == ()
    )
    assert "benchmarks: mine = /elsewhere/b.jsonl" in capsys.readouterr().err, "what will be read is said"
    assert cfg.retriever.replicas == (), "the file's replicas are of the file's url"
    both = ["retriever.url=http://a:1", "retriever.replicas=[http://b:1]"]
    assert options_of(ckpt, None, both).retriever.replicas == ("http://b:1",)
    with pytest.raises(ValueError, match="names the server 'http://evil.example'"):
        options_of(ckpt, None, ["retriever.replicas=[]"])
    near = run_folder(
        tmp_path / "near", retriever={"url": "http://localhost:1", "replicas": ["http://evil.example"]}
    )
    with pytest.raises(ValueError, match=r"give retriever.replicas=\[http://evil.example\] if it is meant"):
        options_of(near, None, [])
    named = options_of(ckpt, str(tmp_path / "run" / "config.yaml"), ["model.trust_remote_code=true"])
    assert (
        named.model.trust_remote_code
        and named.retriever.url == "http://evil.example"
        and named.retriever.record is None
    )
    local = run_folder(tmp_path / "local", retriever={"url": "http://localhost.evil.example", "replicas": []})
    with pytest.raises(ValueError, match="names the server 'http://localhost.evil.example'"):
        options_of(local, None, [])
    with pytest.raises(ValueError, match="does not lie in a run's folder .*: give --config"):
        options_of(tmp_path, None, [])


@pytest.mark.parametrize(
    "name", ["../x", "/x", "..", ".", "", "a/b", "a\0b", "a\nb", "\x1b[31m", "a\\b", "x" * 101, ".hidden"]
)
def test_a_name_that_becomes_a_path_is_refused_where_it_leads_elsewhere(name, tmp_path):
    for tree in (
        {"benchmarks": {name: "b.jsonl"}, "during_training": []},
        {"benchmarks": {name: "b.jsonl"}, "during_training": [name]},
    ):
        with pytest.raises(ValueError, match="eval.benchmarks: .* cannot name a file"):
            settings.from_dict({"eval": tree})
    for kind in ("worlds", "arms"):
        with pytest.raises(ValueError, match=f"{kind}: .* cannot name a folder"):
            grid._check_named({kind: {name: []}}, kind)


def test_paths_with_nul_and_numbers_beyond_any_use_are_refused():
    for tree, message in (
        ({"data": {"train": "a\0b"}}, "data.train = .* a path cannot hold the character NUL"),
        ({"run": {"dir": ""}}, "run.dir is empty"),
        ({"run": {"seed": 2**40}}, "run.seed = 1099511627776: must be at most"),
        ({"run": {"watchdog_s": 1e300}}, "run.watchdog_s = 1e\\+300: must be at most"),
        ({"optim": {"lr": 1e6}}, "optim.lr = 1000000.0: must be at most 1"),
        ({"retriever": {"timeout_s": 1e300}}, "retriever.timeout_s = 1e\\+300: must be at most 1e\\+07"),
        ({"rollout": {"num_slots": 10**20}}, "rollout.num_slots = 10*: must be at most 1e\\+06"),
    ):
        with pytest.raises(ValueError, match=message):
            settings.from_dict(tree)


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "a: &a [lol]\n"
            + "".join(
                f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
                for old, new in zip("abcdefghij", "bcdefghijk", strict=True)
            ),
            "the alias \\*a is not read",
        ),
        ("loss: " + "[" * 100_000, "brackets nested too deeply"),
        ("loss: {lld_weight: " + "9" * 10_000 + "}", "Exceeds the limit"),
        ("loss: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("loss: {lld_weight: 2001-99-99}", "month must be"),
        ("# " + "x" * (1 << 20), "more than 1048576"),
        ("loss: \x1b[31m", "special characters are not allowed"),
    ],
    ids=["laughs", "nested", "digits", "tag", "date", "long", "escape"],
)
def test_a_yaml_made_to_harm_is_refused_at_once(tmp_path, text, message):
    (tmp_path / "config.yaml").write_text(text)
    start = time.monotonic()
    with pytest.raises(ValueError, match=f"config.yaml is not valid YAML: (.|\n)*{message}"):
        settings.read_yaml(tmp_path / "config.yaml")
    with pytest.raises(ValueError, match="config.yaml is damaged"):
        runs.read_options(tmp_path)
    assert time.monotonic() - start < 20


def test_the_option_that_is_meant_is_named():
    for override, message in {
        "optim.learning_rate=1": "did you mean optim.lr?",
        "steps=3": "did you mean run.steps=3?",
        "learning_rate=1": "did you mean optim.lr=1?",
        "run.lr=1": "did you mean optim.lr?",
        "loss.lld_wieght=1": "did you mean 'lld_weight'?",
        "nonsense=1": "write section.option=value",
    }.items():
        with pytest.raises(ValueError) as caught:
            settings.with_overrides({}, [override])
        assert message in str(caught.value)
    for arguments in (["--run.steps", "3"], ["--run.steps=3"]):
        with pytest.raises(ValueError, match="options are written without dashes: run.steps=3"):
            settings.refuse_dashes(arguments)
    settings.refuse_dashes(["--config", "x.yaml", "run.steps=3", "--out", "a.b"])


# ---- a run's folder ----


def damaged(capsys, run: Path) -> str:
    """The message of the report, which must refuse the folder."""
    assert figure.main([str(run)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "3",
        '{"step": "1"}',
        '{"step": true}',
        '{"step": -1}',
        '{"step": 1e3}',
        "{}",
        "[" * 100_000,
        "9" * 10_000,
        '{"step": 1',
        "\0",
        '{"step": 1000000000000}',
        b"\xff\xfe",
    ],
)
def test_a_row_of_no_use_is_named_with_its_file_and_line(tmp_path, capsys, line):
    run = write_run(tmp_path / "a", full_rows())
    good = (run / "metrics.jsonl").read_bytes()
    for name in ("metrics.jsonl", "updates.jsonl"):
        (run / name).write_bytes(
            good.split(b"\n")[0] + b"\n" + (line if isinstance(line, bytes) else line.encode()) + b"\n"
        )
        assert f"{name} line 2 is damaged" in damaged(capsys, run)
        (run / name).write_bytes(good)


def test_hostile_values_are_drawn_as_missing_or_named(tmp_path, capsys):
    rows = full_rows()
    rows[3] |= {
        "reward/mean": float("nan"),
        "entropy": float("inf"),
        "grad_norm": 1e308,
        "searches": 10**400,
        "phase": "<b>",
        "skipped_updates": "many",
        "eval/$\\frac{$/em": 0.5,
        "x\x1b[31m": 1.0,
    }
    rows[4] |= {"reward/mean": "high", "entropy": [1], "grad_norm": 1e308, "phase": 1e400}
    run = write_run(tmp_path / "$\\frac{$", rows)
    (run / "run.json").write_text('{"commit": "</script>"}')
    (run / "config.yaml").write_text(
        "run: {steps: 2001-01-01, seed: 0x"
        + "f" * 9000
        + ", dir: .nan}\nloss: {lld_weight: [[[[[[1]]]]]], 3: 4, kind: {? 2001-01-01 : 2}}\nx: 3\n"
    )
    assert figure.main([str(run)]) == 0 and '</script>"' not in (run / "report.html").read_text()
    (run / "run.json").write_text("[" * 100_000)
    assert "run.json is damaged (brackets nested too deeply): delete it" in damaged(capsys, run)
    (run / "run.json").unlink()
    (run / "trajectories").mkdir()
    for text in (
        '{"step": 0}\n',
        '{"step": 0, "question": 3}\n',
        '{"step": 0, "question": {"id": {}}, "tokens": 3}\n',
    ):
        (run / "trajectories" / "step_000000.jsonl").write_text(text)
        assert "step_000000.jsonl is damaged" in damaged(capsys, run)


def test_what_is_written_into_a_folder_follows_no_link(tmp_path, capsys):
    run = write_run(tmp_path / "a", full_rows())
    (tmp_path / "diary").write_text("mine")
    for name in ("report.html", "figure.png"):
        (run / name).symlink_to(tmp_path / "diary")
    assert figure.main([str(run)]) == 0
    assert (
        (tmp_path / "diary").read_text() == "mine"
        and not (run / "figure.png").is_symlink()
        and (run / "figure.png").read_bytes().startswith(b"\x89PNG")
    )


def test_text_of_a_file_does_not_drive_the_terminal(tmp_path, capsys):
    assert (
        runs.printable("a\x1b[31mb\x07\r\u202e\u009bc\n\td") == "a\ufffd[31mb\ufffd\ufffd\ufffd\ufffdc\n\td"
    )
    run = write_run(tmp_path / "a\x1b]0;title\x07", [{"step": 0}])
    (run / "metrics.jsonl").write_text("[]\n")
    assert "\x1b" not in damaged(capsys, run)


def test_the_command_takes_runs_before_and_after_options_and_makes_the_folder(tmp_path, capsys):
    made = [write_run(tmp_path / name, full_rows()) for name in "ab"]
    assert figure.main([str(made[0]), "--to", str(tmp_path / "new" / "page"), str(made[1])]) == 0
    assert (tmp_path / "new" / "page" / "report.html").is_file()
    (tmp_path / "plain").write_text("")
    assert figure.main([str(made[0]), "--to", str(tmp_path / "plain" / "x")]) == 7
    assert "plain/x" in capsys.readouterr().err


# ---- a model's folder ----


@pytest.fixture
def model(tmp_path, lm, tokenizer):
    lm.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(model: Path, **values) -> config.Model:
    """The model with these entries in its config.json."""
    tree = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(tree | values))
    return config.Model(path=str(model))


def test_a_models_config_names_no_code(model):
    """`_attn_implementation` outranked the loader's argument: a name with a slash is a kernel on the hub."""
    (model / "evil.py").write_text(f"open({str(model / 'PWNED')!r}, 'w')")
    mapped = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": "evil.T"}
    options = change(
        model, _attn_implementation="evil/kernel", attn_implementation="evil/kernel", auto_map=mapped
    )
    assert (
        load.read_shape(options)._attn_implementation
        == "lld"
        == load.load_lm(options).config._attn_implementation
    )
    load.load_tokenizer(options)
    assert not (model / "PWNED").exists()


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": "much"},
        {"model_type": ["a"]},
        {"num_attention_heads": 0},
        {"rope_parameters": {"rope_theta": "x"}},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    ],
    ids=lambda values: next(iter(values)),
)
def test_a_config_that_breaks_the_loader_is_named(model, values):
    with pytest.raises(ValueError, match="cannot load the weights of model.path = .*model"):
        load.load_lm(change(model, **values))


def test_a_folder_without_a_model_says_which_one_is_meant(model, tmp_path, capsys, monkeypatch):
    steps = tmp_path / "run" / "checkpoints"
    for step in (2, 4):
        shutil.copytree(model, steps / f"step_{step:06d}")
    monkeypatch.chdir(tmp_path)
    for where, message in {
        str(tmp_path / "run"): f"no config.json in it; did you mean {steps / 'step_000004'}",
        str(steps / "step_000099"): "no such folder; .*checkpoints holds step_000002, step_000004",
        "run/nomodel": "no such folder",
        "./x": "no such folder",
        "/nowhere/x": "no such folder",
        "../x": "no such folder",
    }.items():
        start = time.monotonic()
        with pytest.raises(ValueError, match=f"model.path = {where}: {message}"):
            load.load_tokenizer(config.Model(path=where))
        assert time.monotonic() - start < 1, "the hub is not asked for what can only be a folder"
        assert not capsys.readouterr().err
    check_folder("owner/name", "model.path =")
    assert "model.path = owner/name: no such folder here; asking the hub" in capsys.readouterr().err
    for path in model.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(
        ValueError, match="model' holds no tokenizer .* copy the one the model was trained with into it$"
    ):
        load.load_tokenizer(config.Model(path=str(model)))
