"""Options: every one is read somewhere, wrong ones are named with a remedy, and the shipped YAMLs are the
paper's."""

import ast
import dataclasses
import json
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from conftest import ROOT

import train
from lld import config, settings
from lld.advantages import ADVANTAGES
from lld.config import Model
from lld.engine.fit import check_fit, check_passes
from lld.loss import GATES
from lld.model.load import load_lm, load_tokenizer
from lld.record import glossary
from lld.reward import ANSWER_SCORES
from lld.running import dry_row
from lld.update import loss_of

YAMLS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_shipped_configs_load_and_state_only_departures(path):
    cfg = settings.load(str(path))
    defaults = settings.to_dict(config.Config())
    for section, options in yaml.safe_load(path.read_text()).items():
        for name, _value in options.items():
            if (section, name) not in {("run", "dir"), ("run", "seed")}:
                assert settings.to_dict(cfg)[section][name] != defaults[section][name], (
                    f"{section}.{name} is the default"
                )


def recipes() -> dict[str, tuple[str, list[str]]]:
    """The table of docs/recipes.md: name -> ("table: row", the paper's seven scores and their average)."""
    lines = re.findall(
        r"^\| (`[\w`., -]+`) \| (\d: [^|]+) \| ((?:\.\d{3} \| ){7}\.\d{3}) \|$",
        (ROOT / "docs" / "recipes.md").read_text(),
        re.MULTILINE,
    )
    return {
        name: (row, figures.split(" | "))
        for names, row, figures in lines
        for name in re.findall(r"`([\w.-]+)`", names)
    }


def test_every_recipe_names_its_row_and_the_average_that_the_paper_gives():
    """Averages are the means of the seven scores but for GSPO + LLDS, where the paper prints .451 for
    .4503."""
    assert len(recipes()) == 27
    for name, (row, figures) in recipes().items():
        *scores, average = map(float, figures)
        assert abs(sum(scores) / 7 - average) < 0.0011, name
        first = (ROOT / "configs" / f"{name}.yaml").read_text().split("\n")[0]
        assert (
            first.startswith(f"# Table {row.replace(': ', ', ', 1)}")
            and f"EM average {figures[-1]} in the paper; not run by us." in first
        ), first
    named = recipes().keys() | {"tiny", "7b-one-gpu", "3b-instruct-v1", "3b-instruct-code"}
    named |= {"collapse", "collapse-topp1", "collapse-kept", "collapse-llds"}
    named |= {"0.5b", "1.5b", "3b-lora"}
    assert {path.stem for path in YAMLS} == named


@pytest.mark.parametrize("name", sorted(recipes()))
def test_a_recipe_is_what_its_row_says(name):
    cfg, (row, _) = settings.load(str(ROOT / "configs" / f"{name}.yaml")), recipes()[name]
    loss, size = cfg.loss, "7B" if row[0] == "2" else "3B"
    model = (
        "meta-llama/Llama-3.2-3B" if row[0] == "4" else f"Qwen/Qwen2.5-{size}" + "-Instruct" * ("Ins" in row)
    )
    assert (cfg.model.path, cfg.run.dir) == (model, f"runs/{name}")
    assert cfg.data.train_sources == (("nq",) if "NQ only" in row else ())
    assert loss.kind == ("gspo" if "GSPO" in row else "grpo")
    preserved = any(word in row for word in ("LLDS", "token", "response", "action"))
    assert loss.lld_weight == ((0.3 if name == "7b-instruct" else 0.2) if preserved else 0.0)
    assert loss.lld_gate == next((gate for gate in ("token", "response") if gate in row), "action")
    assert loss.lld_answer_schedule == ("paper" if "LLDS-MA" in row else "constant")
    if name.startswith("search-r1"):
        assert (cfg.rollout.max_turns, cfg.rollout.top_p, loss.aggregation, loss.entropy_weight) == (
            4,
            0.95,
            "token_mean",
            0.001,
        )
        assert (cfg.run.steps, cfg.optim.lr, cfg.reward.kind) == {
            "1": (305, 1e-6, "em"),
            "2": (1005, 1e-6, "em"),
            "3": (1005, 5e-7, "format"),
        }[name[-1]]
        assert cfg.optim.warmup_steps in (int(0.95 * 305), 286)
    else:
        assert (cfg.rollout.max_turns, cfg.rollout.top_p, loss.aggregation, cfg.optim.lr, cfg.run.steps) == (
            3,
            1.0,
            "sequence_mean",
            1e-6,
            1005,
        )


def test_the_defaults_are_the_papers():
    cfg = settings.load(str(ROOT / "configs" / "3b.yaml"))
    rollout, loss, optim = cfg.rollout, cfg.loss, cfg.optim
    assert (rollout.num_questions, rollout.group_size, rollout.max_turns, cfg.eval.max_turns) == (
        512,
        5,
        3,
        4,
    )
    assert (
        rollout.max_episode_tokens,
        rollout.max_new_tokens,
        rollout.max_observation_tokens,
        rollout.temperature,
        rollout.top_p,
    ) == (4096, 500, 500, 1.0, 1.0)
    # Trajectories a mini-batch
    assert rollout.num_questions * rollout.group_size / optim.updates_per_rollout == 256
    assert (optim.lr, optim.warmup_steps, optim.betas, optim.weight_decay, optim.max_grad_norm) == (
        1e-6,
        int(0.285 * 1005),
        (0.9, 0.999),
        0.01,
        1.0,
    )
    assert (
        loss.lld_weight,
        loss.lld_gate,
        loss.kl_weight,
        loss.clip_low,
        loss.clip_high,
        loss.lld_normalizer,
    ) == (0.2, "action", 0.001, 0.2, 0.2, "preserved")
    assert settings.load(str(ROOT / "configs" / "7b-instruct.yaml")).loss.lld_weight == 0.3
    first = settings.load(str(ROOT / "configs" / "3b-instruct-v1.yaml")).loss
    # Beta 1: the first script masks no answers
    assert (first.lld_gate, first.lld_weight, first.lld_answer_weight) == ("response", 0.1, 1.0)
    official = settings.load(str(ROOT / "configs" / "3b-instruct-code.yaml"))
    assert (
        official.loss.aggregation,
        official.loss.lld_normalizer,
        official.loss.entropy_weight,
        official.rollout.top_p,
    ) == ("token_mean", "all", 0.001, 0.95)


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"loss": {"lld_wieght": 0.1}}, "unknown option loss.lld_wieght: did you mean 'lld_weight'?"),
        ({"los": {}}, "unknown section 'los': did you mean 'loss'?"),
        ({"loss": 3}, "section 'loss' = 3: must hold options"),
        ({"loss": {"lld_weight": "much"}}, "loss.lld_weight = 'much': must be float, not str"),
        ({"rollout": {"group_size": 2.5}}, "rollout.group_size = 2.5: must be int, not float"),
        ({"rollout": {"group_size": True}}, "rollout.group_size = True: must be int, not bool"),
        ({"rollout": {"overlap_search": "no"}}, "rollout.overlap_search = 'no': must be bool, not str"),
        ({"loss": {"lld_gate": "acton"}}, "'response'; did you mean 'action'?"),
        ({"advantage": {"kind": "grop"}}, "'stratified'; did you mean 'grpo'?"),
        ({"model": {"mixed_precision": True}}, "model.mixed_precision = True: must be one of 'no', 'bf16'"),
        ({"run": {"trackers": "wandb"}}, "run.trackers = 'wandb': must be list of text, not str"),
        (
            {"loss": {"lld_gate": "turn"}},
            "loss.lld_gate = 'turn': must be one of 'token', 'action', 'response'",
        ),
        (
            {"optim": {"updates_per_rollout": 7}},
            "2560 episodes do not divide into optim.updates_per_rollout = 7 equal mini-batches",
        ),
        (
            {"optim": {"updates_per_rollout": 1}},
            "cannot act: at the only update the policy still is the old policy",
        ),
        (
            {"loss": {"lld_weight": 0.0, "lld_lag_steps": 2}},
            "loss.lld_lag_steps = 2 does nothing with loss.lld_weight = 0",
        ),
        (
            {"loss": {"lld_weight": 0.0, "lld_tolerance": 0.01}},
            "loss.lld_tolerance = 0.01 does nothing with loss.lld_weight = 0",
        ),
        ({"loss": {"lld_tolerance": -0.01}}, "loss.lld_tolerance = -0.01: must not be negative"),
        (
            {"loss": {"old_logprobs": "sampler"}, "rollout": {"top_p": 0.9}},
            "use loss.support 'kept', old_logprobs 'trainer' or top_p 1.0",
        ),
        ({"rollout": {"temperature": 0}}, "greedy episodes of a group are all alike"),
        ({"rollout": {"group_size": 1}}, "a group of one has no advantage"),
        ({"rollout": {"top_p": 0.0}}, "rollout.top_p = 0.0: must be in (0, 1]"),
        ({"rollout": {"max_episode_tokens": 2048}}, "must exceed rollout.max_prompt_tokens"),
        ({"optim": {"lr": -1}}, "optim.lr = -1.0: must be greater than 0"),
        (
            {"optim": {"micro_batch_tokens": 0}},
            "optim.micro_batch_tokens = 0: must hold the longest episode, rollout.max_episode_tokens = 4096",
        ),
        (
            {"optim": {"micro_batch_tokens": 4095}},
            "must hold the longest episode, rollout.max_episode_tokens = 4096; null counts rows instead",
        ),
        (
            {"optim": {"micro_batch_tokens": "many"}},
            "optim.micro_batch_tokens = 'many': must be int, not str",
        ),
        (
            {"optim": {"micro_batch_tokens": 8192, "micro_batch_size": 4}},
            "optim.micro_batch_size = 4 does nothing with optim.micro_batch_tokens = 8192",
        ),
        ({"optim": {"betas": [0.9, 1.0]}}, "must be two numbers in [0, 1)"),
        (
            {"eval": {"during_training": ["hotpot"]}},
            "eval.during_training names 'hotpot': did you mean 'hotpotqa'?",
        ),
        ({"retriever": {"url": None}}, "needs retriever.corpus"),
        ({"loss": {"lld_answer_weight": 1.5}}, "beta lies in [0, 1]"),
        (
            {"loss": {"lld_answer_weight": 0.5, "lld_weight": 0.0}},
            "loss.lld_answer_weight = 0.5 does nothing with loss.lld_weight = 0",
        ),
        (
            {"loss": {"lld_answer_schedule": "paper", "lld_answer_weight": 0.5}},
            "loss.lld_answer_weight = 0.5 does nothing with loss.lld_answer_schedule = 'paper', which "
            "reads lld_answer_searches",
        ),
        (
            {"loss": {"lld_answer_searches": 3.0}},
            "loss.lld_answer_searches = 3.0 does nothing with loss.lld_answer_schedule = 'constant'",
        ),
        (
            {"reward": {"final_format_score": 0.3}},
            "reward.final_format_score = 0.3 does nothing with reward.kind = 'em'",
        ),
        (
            {"tinyworld": {"num_people": 50}},
            "tinyworld.num_people = 50 does nothing with tinyworld.dir = null",
        ),
    ],
)
def test_bad_options_are_named(tree, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        settings.from_dict(tree)


def test_one_update_per_rollout_can_act_against_a_lagged_snapshot_or_without_llds():
    settings.from_dict({"optim": {"updates_per_rollout": 1}, "loss": {"lld_lag_steps": 1}})
    settings.from_dict({"optim": {"updates_per_rollout": 1}, "loss": {"lld_weight": 0.0}})


def test_overrides_beat_the_file_and_bad_ones_are_named(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("loss: {lld_weight: 0.3}\n")
    cfg = settings.load(
        str(path),
        ["loss.lld_weight=0.1", "optim.lr=1e-5", "eval.benchmarks.nq=here.jsonl", "retriever.corpus=null"],
    )
    assert (cfg.loss.lld_weight, cfg.optim.lr, cfg.eval.benchmarks["nq"]) == (0.1, 1e-5, "here.jsonl")
    for bad, message in {
        "loss.lld_weight.x=1": "loss.lld_weight holds no options",
        "run.dir=[": "is not a YAML value",
        "optim.lr=.inf": "must be a finite number",
    }.items():
        with pytest.raises(ValueError, match=message):
            settings.load(str(path), [bad])
    for bad in ("loss", "nonsense=1", "loss.=1"):
        with pytest.raises(ValueError, match="write section.option=value"):
            settings.load(str(path), [bad])
    for wrong, meant in {
        str(tmp_path / "aa.yaml"): path,
        str(tmp_path / "3b"): "configs/3b.yaml",
        "3b": "configs/3b.yaml",
        "configs/3b": "configs/3b.yaml",
        "configs/3b.yml": "configs/3b.yaml",
    }.items():
        with pytest.raises(ValueError, match=re.escape(f"no config file {wrong}: did you mean {meant}?")):
            settings.load(wrong)
    path.write_text("loss: {lld_weight: 0.3}\nloss: {lld_gate: token}\n")
    with pytest.raises(ValueError, match="'loss' is given twice, the second time at line 2"):
        settings.load(str(path))
    path.write_text("loss: {lld_weight: [0.3\n")
    with pytest.raises(ValueError, match="is not valid YAML"):
        settings.load(str(path))


def test_saved_options_load_again(tmp_path):
    cfg = settings.load(str(ROOT / "configs" / "tiny.yaml"), ["optim.lr=1e-6"])
    settings.save(cfg, tmp_path / "saved.yaml")
    assert settings.load(str(tmp_path / "saved.yaml")) == cfg


# ---- every option is read ----

SECTIONS = {field.name: field.type for field in dataclasses.fields(config.Config)}
NO_USE = ("config.py", "settings.py", "rules.py")  # they declare, load and check options


def sections_of(node: ast.expr | None, classes: dict[str, str]) -> set[str]:
    """The sections whose classes an annotation names: {"loss"} for `Loss` or `config.Loss`."""
    names = set()
    for part in ast.walk(node) if node is not None else ():
        if isinstance(part, ast.Name):
            names.add(part.id)
        elif isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            names.add(f"{part.value.id}.{part.attr}")
    return {classes[name] for name in names if name in classes}


def section_named(node: ast.expr) -> set[str]:
    """{"loss"} for `cfg.loss` and `run.cfg.loss`, else nothing."""
    if not isinstance(node, ast.Attribute) or node.attr not in SECTIONS:
        return set()
    owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
    return {node.attr} if owner == "cfg" else set()


def aliases_in(function: ast.FunctionDef, classes: dict[str, str]) -> dict[str, set[str]]:
    """The variables of a function that hold a section: annotated parameters, and `x = cfg.loss`."""
    given = function.args
    aliases = {
        argument.arg: sections_of(argument.annotation, classes)
        for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)
    }
    for node in ast.walk(function):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=True)
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    aliases[name.id] = aliases.get(name.id, set()) | section_named(value)
    return aliases


def reads(source: str) -> set[tuple[str, str]]:
    """(section, attribute) of every `cfg.section.attribute` and `alias.attribute` in a module."""
    tree = ast.parse(source)
    classes = {f"config.{kind.__name__}": section for section, kind in SECTIONS.items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "lld.config":
            imported = {alias.name for alias in node.names}
            classes |= {kind.__name__: name for name, kind in SECTIONS.items() if kind.__name__ in imported}
    found = set()

    def visit(node: ast.AST, aliases: dict[str, set[str]]) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            aliases = aliases | aliases_in(node, classes)
        if isinstance(node, ast.Attribute):
            held = aliases.get(node.value.id, set()) if isinstance(node.value, ast.Name) else set()
            found.update((section, node.attr) for section in held | section_named(node.value))
        for child in ast.iter_child_nodes(node):
            visit(child, aliases)

    visit(tree, {})
    return found


@pytest.fixture(scope="module")
def all_reads() -> set[tuple[str, str]]:
    paths = [*(ROOT / "lld").rglob("*.py"), *ROOT.glob("*.py")]
    return set().union(*(reads(path.read_text()) for path in paths if path.name not in NO_USE))


def unread(sections: dict[str, type], found: set[tuple[str, str]]) -> list[str]:
    return [
        f"{section}.{option.name}"
        for section, kind in sections.items()
        for option in dataclasses.fields(kind)
        if (section, option.name)
        not in found | {("loss", "preset")}  # settings.py replaces it by its options
    ]


def test_every_option_is_read_in_its_own_section(all_reads):
    assert unread(SECTIONS, all_reads) == []


def test_an_unread_option_is_found_although_another_section_has_one_of_its_name(all_reads):
    """Options of these names are read in other sections, and so are attributes of other things."""
    for name in ("dir", "seed", "temperature", "max_turns", "index", "device", "path"):
        mutated = dataclasses.make_dataclass(
            "Advantage", [(name, int, 0)], bases=(config.Advantage,), frozen=True
        )
        assert unread(SECTIONS | {"advantage": mutated}, all_reads) == [f"advantage.{name}"]


def test_reads_are_told_by_section():
    source = """
from lld import config
from lld.config import Loss
def one(cfg, run, other):
    options, optim = cfg.loss, run.cfg.optim
    return options.kind, optim.lr, cfg.eval.every, other.model.path
def two(options: Loss | None, sampling: config.Eval): return options.clip_low, sampling.top_p
def three(options): return options.clip_high
"""
    assert reads(source) == {
        *(("loss", "kind"), ("optim", "lr"), ("eval", "every")),
        *(("loss", "clip_low"), ("eval", "top_p")),
    }


# ---- tables of the code ----


def test_an_entry_of_a_table_is_an_accepted_value():
    kinds = typing.get_type_hints(config.Loss) | {"reward": typing.get_type_hints(config.Reward)["kind"]}
    assert typing.get_args(kinds["lld_gate"]) == tuple(GATES)
    words, path = typing.get_args(kinds["reward"])
    assert typing.get_args(words) == (*ANSWER_SCORES, "format") and path is str
    assert typing.get_args(typing.get_type_hints(config.Advantage)["kind"]) == tuple(ADVANTAGES)


def test_options_are_read_without_torch_and_without_the_tables_own_imports():
    code = "import sys, lld.settings, eval; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_eval_tells_a_mistaken_option_before_it_imports_torch(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    command = ["eval.py", "--ckpt", str(tmp_path), "--config", "configs/tiny.yaml", "optim.lrr=1"]
    code = f"import sys, eval; print(eval.main({command[1:]}), 'torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["2", "False"]
    assert "eval.py: unknown option optim.lrr: did you mean 'lr'?" in told.stderr


# ---- options told ----


def test_every_option_is_explained_without_any_library():
    """By its default, its type and the comment at its declaration."""
    told = config.meanings()
    assert [name for name, text in told.items() if len(text) < 4] == []
    names = {f"{s}.{name}" for s, kind in SECTIONS.items() for name in typing.get_type_hints(kind)}
    assert told.keys() == names
    code = (
        "import sys; sys.argv = ['lld.config', 'optim']; import runpy\n"
        "try: runpy.run_module('lld.config', run_name='__main__')\n"
        "finally: print([m for m in ('torch', 'numpy', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("\n[]\n"), done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "optim.name = adamw    (adamw | adamw_8bit | adamw_offload)"
    assert lines[lines.index("optim.lr = 1e-06    (float)") + 1] == "    learning rate after the warm-up"
    assert "optim.micro_batch_tokens = null    (int or null)" in lines


def test_a_part_of_the_options_is_told_and_a_wrong_name_corrected(capsys):
    assert config.main(["loss.lld_gate"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("loss.lld_gate = action    (") and len(told) == 2
    for wrong, remedy in {
        "lr": "did you mean optim.lr?",
        "loss.lr": "did you mean optim.lr?",
        "optimm": "did you mean optim",
        "xyzzy": "sections: run, model",
    }.items():
        assert config.main([wrong]) == 2 and remedy in capsys.readouterr().err
    for options, remedy in {
        "optim.learning_rate=1": "did you mean optim.lr?",
        "loss.learning_rate=1": "did you mean optim.lr?",
        "lr=1": "did you mean optim.lr=1?",
        "rollout.kl_weight=1": "did you mean loss.kl_weight?",
        "algorithm.kl_weight=1": "did you mean loss.kl_weight?",
    }.items():
        with pytest.raises(ValueError, match=re.escape(remedy)):
            settings.load(str(ROOT / "configs" / "tiny.yaml"), [options])


def test_what_is_shown_is_what_would_run(capsys, tmp_path):
    tiny = str(ROOT / "configs" / "tiny.yaml")
    assert train.main(["--config", tiny, "--show", "optim.lr=1e-4"]) == 0
    shown = capsys.readouterr().out
    (tmp_path / "shown.yaml").write_text(shown)
    cfg = settings.load(tiny, ["optim.lr=1e-4"])
    assert settings.load(str(tmp_path / "shown.yaml")) == cfg
    marked = [line.split(":")[0].strip() for line in shown.splitlines() if "# default: " in line]
    assert f"# {len(marked)} options differ" in shown and len(marked) > 20
    assert re.search(r"^  lr: 0\.0001 +# default: 1\.0e-06$", shown, re.MULTILINE)
    assert re.search(r"^  clip_low: 0\.2$", shown, re.MULTILINE)


def test_a_run_is_resumed_by_its_folder_alone(tmp_path):
    run_dir = tmp_path / "my: run"
    run_dir.mkdir()
    settings.save(
        settings.load(str(ROOT / "configs" / "tiny.yaml"), ["optim.lr=1e-5"]), run_dir / "config.yaml"
    )

    def read(*argv):
        args = train.read_arguments(list(argv))
        return args.resume, train.read_options(args)

    resume, cfg = read("--resume", str(run_dir), "run.steps=7")
    assert resume and (cfg.run.dir, cfg.run.steps, cfg.optim.lr) == (str(run_dir), 7, 1e-5)
    resume, cfg = read("--config", str(ROOT / "configs" / "tiny.yaml"), "--resume", "run.steps=7")
    assert resume == "" and (cfg.run.dir, cfg.run.steps) == ("runs/tiny", 7)
    (run_dir / "checkpoints" / "step_000001").mkdir(parents=True)
    for argv, message in [
        ([str(run_dir), "--config", "x.yaml"], "leave out --config"),
        ([str(tmp_path)], "give the folder that holds config.yaml"),
        ([str(run_dir / "checkpoints" / "step_000001")], f"did you mean {run_dir}?"),
        ([], "or --resume RUN"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            read("--resume", *argv)


# ---- names of metrics ----


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_what_a_shipped_config_logs_is_in_the_glossary(path):
    dry_row.check_names(settings.load(str(path)))


def add_length_term(part, logprobs_BT, *others):
    row_losses_B, terms = loss_of(part, logprobs_BT, *others)
    return row_losses_B, terms | {"length": torch.ones_like(logprobs_BT)}


LENGTH_TERM = "the run would log loss/length, which lld/record/glossary.py does not define: add an entry"


def test_a_loss_term_without_glossary_entry_is_named(monkeypatch):
    monkeypatch.setattr(dry_row, "loss_of", add_length_term)
    with pytest.raises(ValueError, match=re.escape(LENGTH_TERM)):
        dry_row.check_names(config.Config())
    monkeypatch.setitem(glossary.GLOSSARY, "loss/length", "mean length term per token")
    dry_row.check_names(config.Config())


def test_such_a_run_ends_before_anything_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dry_row, "loss_of", add_length_term)
    paths = [f"run.dir={tmp_path / 'run'}", f"tinyworld.dir={tmp_path / 'world'}"]
    assert train.main(["--config", str(ROOT / "configs" / "tiny.yaml"), *paths]) == 2
    assert f"train.py: {LENGTH_TERM}" in capsys.readouterr().err
    assert not (tmp_path / "world").exists() and not (tmp_path / "run" / "metrics.jsonl").exists()


def save_tokenizer(tokenizer, folder: Path, **changes):
    from transformers import PreTrainedTokenizerFast

    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"} | changes
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, **{k: v for k, v in special.items() if v}
    ).save_pretrained(folder)
    return config.Model(path=str(folder))


def test_a_tokenizer_without_eos_is_refused_and_one_without_pad_is_mended(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="has no EOS token, so no turn could end by itself; set `eos_token`"):
        load_tokenizer(save_tokenizer(tokenizer, tmp_path / "a", eos_token=None))
    mended = load_tokenizer(save_tokenizer(tokenizer, tmp_path / "b", pad_token=None))
    assert mended.pad_token_id == mended.eos_token_id is not None


def test_a_tokenizer_of_another_model_and_a_short_context_are_refused(lm, tokenizer):
    check_fit(lm, tokenizer, 4096)
    with pytest.raises(ValueError, match="max_episode_tokens = 5000 exceeds the model's context of 4096"):
        check_fit(lm, tokenizer, 5000)
    from conftest import make_lm

    with pytest.raises(ValueError, match="they are not of the same model"):
        check_fit(make_lm(tokenizer, vocab_size=50), tokenizer, 100)


def test_a_sliding_window_of_all_layers_and_angles_that_change_with_the_length_are_refused(tokenizer):
    """Phi-3's: without the check, engine and policy would attend to everything (2 to 5 nats off)."""
    shape = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    shape |= {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    factors = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    for options, message in (
        (
            {"sliding_window": 512},
            "= 513 exceeds the model's sliding window, which is not applied here, of 512",
        ),
        (
            {"rope_scaling": factors, "original_max_position_embeddings": 512},
            r"rotary angles change \(longrope\), 512",
        ),
    ):
        kind = transformers.Phi3Config(**shape, max_position_embeddings=4096, **options)
        lm = transformers.Phi3ForCausalLM(kind)
        check_fit(lm, tokenizer, 512)
        with pytest.raises(ValueError, match=message):
            check_fit(lm, tokenizer, 513)


def small(kind: str):
    options = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    lm = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **options))
    with torch.no_grad():
        for weight in lm.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return lm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mistral", "olmo2", "mixtral", "phi", "starcoder2"])
def test_the_passes_of_other_decoders_are_tried_and_they_are_left_as_they_were(kind, dtype):
    torch.manual_seed(0)
    lm = small(kind).to(dtype).train()
    check_passes(lm)
    assert lm.training and lm.config._attn_implementation == "lld"


@pytest.mark.parametrize("kind", ["bloom", "stablelm", "nemotron", "bert", "mpt", "diffllama"])
def test_models_with_their_own_attention_or_cache_are_refused(kind):
    """transformers takes the name of another attention from them without a word, and does not call it."""
    torch.manual_seed(0)
    lm = small(kind)
    read = "rows in a cache" if kind == "diffllama" else "packed rows"
    with pytest.raises(ValueError, match=f"{kind} does not compute {read} as it does each row alone"):
        check_fit(lm, range(64), 8)


def test_dropout_of_the_config_is_off(tmp_path):
    """Else the log-probabilities before and in an update differ by up to .1 nats while nothing moves."""
    names = ("attention_dropout", "residual_dropout", "embedding_dropout")
    lm = small("starcoder2")
    for name in names:
        setattr(lm.config, name, 0.1)
    lm.save_pretrained(tmp_path)
    lm, ids = load_lm(Model(path=str(tmp_path))), torch.arange(20)[None]
    assert [getattr(lm.config, name) for name in names] == [0.0] * 3
    assert torch.equal(lm.train()(ids).logits, lm.eval()(ids).logits)


@pytest.mark.parametrize("bad, kept", [({"temperature": 0.9}, None), ({"pad_token_id": -1}, None), ({}, 0.7)])
def test_a_generation_config_that_cannot_be_written_again_loses_all_but_its_ids(tmp_path, bad, kept):
    """As of Vicuna; transformers opens it, and would end the run at the first checkpoint."""
    small("starcoder2").save_pretrained(tmp_path / "a")
    found = {"eos_token_id": [2, 3], "bos_token_id": 1} | (bad or {"temperature": 0.7, "do_sample": True})
    (tmp_path / "a" / "generation_config.json").write_text(json.dumps(found))
    load_lm(Model(path=str(tmp_path / "a"))).save_pretrained(tmp_path / "b")
    again = load_lm(Model(path=str(tmp_path / "b"))).generation_config
    assert (again.eos_token_id, again.bos_token_id, again.pad_token_id) == ([2, 3], 1, None)
    assert again.temperature == kept


def test_experts_that_are_drawn_at_random_are_refused():
    with pytest.raises(ValueError, match="phimoe draws its experts at random in training"):
        check_fit(small("phimoe"), range(64), 8)


def test_lack_of_memory_in_the_trial_is_not_a_refusal(monkeypatch):
    lm = small("mistral")

    def forward(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(lm.base_model, "forward", forward)
    with pytest.raises(torch.OutOfMemoryError):
        check_passes(lm)


def test_a_model_without_a_number_of_key_heads_is_refused():
    lm = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="gpt2's config.json has no num_key_value_heads"):
        check_fit(lm, range(64), 8)


def test_a_path_keeps_a_sharp_sign_and_a_tilde_is_the_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    cfg = settings.with_overrides({}, ["run.dir=runs/try #2", "data.train=~/train.jsonl"])
    assert (cfg.run.dir, cfg.data.train) == ("runs/try #2", "/home/ada/train.jsonl")
    assert settings.with_overrides({}, ["run.steps=7 # of them"]).run.steps == 7
    assert settings.with_overrides({}, ["model.mixed_precision=no"]).model.mixed_precision == "no"


@pytest.mark.parametrize(
    "tree, overrides, message",
    [
        ({}, ["optim.lr=1" + "0" * 400], "optim.lr = 1000.*must be a finite number"),
        ({"loss": 5}, ["loss.preset=gspo"], "loss"),
    ],
)
def test_numbers_and_shapes_beyond_all_bounds_are_refused(tree, overrides, message):
    with pytest.raises(ValueError, match=message):
        settings.with_overrides(tree, overrides)


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    path = tmp_path / "mine.yaml"
    path.touch()

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ValueError, match="mine.yaml cannot be read: Permission denied; mend its permissions"):
        settings.read_yaml(path)
