"""Experiments: grids are checked before anything runs, runs are resumed and not repeated, and the numbers are
those of a hand.

`python tests/test_experiment.py` writes the tables of docs/experiment.md and docs/stabilisers*.md anew from
their record.
"""

import dataclasses
import functools
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from conftest import ROOT

from lld import settings
from lld.experiment import figure as outcome_figure
from lld.experiment import grid, intervals, outcomes, runner, tables
from lld.record import courses


def signs(plan, rows) -> str:
    return tables.markdown(tables.alarms(rows, plan.runs)) + "\n"


def beside_llds(plan, rows, world: str) -> str:
    return tables.markdown(tables.beside_llds(plan, rows, world)) + "\n"


def others(plan, rows) -> str:
    """What `--tables` prints, but for the tables of stabilisers.md and alarm.md."""
    text = tables.all_tables(plan, rows)
    for made in (signs(plan, rows), *[beside_llds(plan, rows, world) for world in ("cut", "whole")]):
        text = text.replace("\n" + made, "")
    return text


# Page -> its tables: the experiment, and what to make of its plan and its rows
PAGES = {
    "experiment.md": [("causes", others)],
    "stabilisers-tables.md": [("stabilisers", others)],
    "stabilisers.md": [
        ("stabilisers", functools.partial(beside_llds, world=world)) for world in ("cut", "whole")
    ],
    "alarm.md": [(name, signs) for name in ("causes", "stabilisers")],
}
TABLES_MARK, TABLES_END = "<!-- tables -->\n", "<!-- end of tables -->\n"
FAKE_TRAIN = """
import json, os, sys, time
from pathlib import Path
from lld import settings
args = sys.argv[1:]
cfg = settings.load(args[args.index("--config") + 1], [a for a in args if "=" in a])
folder = Path(cfg.run.dir)
path = folder / "metrics.jsonl"
if ("--resume" in args) != (folder / "config.yaml").exists():
    sys.exit("wrong use of --resume")
folder.mkdir(parents=True, exist_ok=True)
settings.save(cfg, folder / "config.yaml")
(folder / "run.json").write_text(json.dumps({"commit": "abcdef012345"}))
with open(folder.parent / "started.txt", "a") as file:
    file.write(folder.name + " " + str(os.getpid()) + " " + os.environ["OMP_NUM_THREADS"] + "\\n")
for step in range(len(path.read_text().splitlines()) if path.exists() else 0, cfg.run.steps):
    if cfg.run.seed == 7 and step == 3:
        sys.exit("seed 7 is cursed")
    if cfg.run.seed == 9:
        time.sleep(60)
    row = {"step": step, "reward/mean": 0.5, "em": 0.5, "entropy/incorrect": 0.4}
    if step + 1 == cfg.run.steps:
        row["eval/nq/em"] = 0.5 + cfg.loss.lld_weight + cfg.run.seed / 100
    for name, line in ((path, row), (folder / "timings.jsonl", {"step": step, "time/step_s": 0.25})):
        with open(name, "a") as file:
            file.write(json.dumps(line) + "\\n")
"""

BASE = {
    "rollout": {"num_questions": 4, "group_size": 5},
    "optim": {"updates_per_rollout": 2},
    "eval": {"during_training": ["nq"]},
}


def tree_of(folder, **changes):
    (folder / "base.yaml").write_text(yaml.safe_dump(BASE))
    tree = {
        "base": str(folder / "base.yaml"),
        "out": str(folder / "out"),
        "record": str(folder / "runs.csv"),
        "steps": 12,
        "seeds": [0, 1],
        "learning_rates": ["1e-4"],
        "worlds": {"plain": None},
        "arms": {"grpo": ["loss.lld_weight=0"], "action": {"loss": {"lld_weight": 0.2}}},
    }
    return {name: value for name, value in (tree | changes).items() if value != "left out"}


def write_experiment(folder, **changes):
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(tree_of(folder, **changes), sort_keys=False))
    return path


@pytest.fixture
def fake_train(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "POLL_S", 0.02)
    monkeypatch.setattr(runner, "plot_experiment", lambda *args: None)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = tmp_path / "fake_train.py"
    path.write_text(FAKE_TRAIN)
    return path


def started(folder, world="plain"):
    path = folder / "out" / world / "started.txt"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


# ----------------------------------------------------------------------------------------------------
# plan


def test_every_point_of_the_grid_becomes_a_checked_run_seed_by_seed(tmp_path):
    planned = grid.load_experiment(
        write_experiment(tmp_path, learning_rates=["3e-4", 0.00025], options=["loss.kl_weight=0"])
    )
    assert [run.name for run in planned.runs[:4]] == [
        "plain/grpo-lr3e-4-s0",
        "plain/action-lr3e-4-s0",
        "plain/grpo-lr2.5e-4-s0",
        "plain/action-lr2.5e-4-s0",
    ]
    assert len(planned.runs) == 8 and all(run.seed == 1 for run in planned.runs[4:])
    run = planned.runs[3]
    assert (
        run.cfg.optim.lr,
        run.cfg.loss.lld_weight,
        run.cfg.loss.kl_weight,
        run.cfg.run.steps,
        run.cfg.run.seed,
    ) == (2.5e-4, 0.2, 0.0, 12, 0)
    assert run.cfg.run.dir == str(tmp_path / "out/plain/action-lr2.5e-4-s0")


def test_blocks_cross_only_what_they_name(tmp_path):
    blocks = [
        {"arms": ["grpo"], "learning_rates": ["1e-4", "2e-4"]},
        {"arms": ["grpo", "action"], "seeds": [4]},
    ]
    names = [
        run.name.split("/")[1] for run in grid.load_experiment(write_experiment(tmp_path, grids=blocks)).runs
    ]
    assert names == [
        "grpo-lr1e-4-s0",
        "grpo-lr2e-4-s0",
        "grpo-lr1e-4-s1",
        "grpo-lr2e-4-s1",
        "grpo-lr1e-4-s4",
        "action-lr1e-4-s4",
    ]


@pytest.mark.parametrize("name", ["causes", "tiny", "stabilisers"])
def test_every_run_of_the_experiments_is_checked_and_another_run(name):
    planned = grid.load_experiment(ROOT / f"configs/experiments/{name}.yaml")
    assert len({run.fingerprint for run in planned.runs}) == len(planned.runs) > 20


def test_a_preset_of_an_arm_lies_above_the_base(tmp_path):
    arms = {
        "gspo": {"loss": {"preset": "gspo"}},
        "token": ["loss.preset=gspo", "loss.aggregation=token_mean"],
    }
    path = write_experiment(tmp_path, arms=arms, options=["loss.aggregation=token_mean"], seeds=[0])
    means = [run.cfg.loss.aggregation for run in grid.load_experiment(path).runs]
    assert means == ["sequence_mean", "token_mean"]


def test_every_path_inside_the_tiny_world_moves_to_the_world_of_the_run():
    planned = grid.load_experiment(ROOT / "configs/experiments/tiny.yaml", out="elsewhere")
    run = next(run for run in planned.runs if run.world == "namesakes" and run.arm == "ma")
    world = run.folder.parents[1] / "worlds" / "namesakes"
    assert (
        run.cfg.tinyworld.dir == str(world)
        and run.cfg.model.path == str(world / "policy")
        and run.cfg.data.train == str(world / "train.jsonl")
    )
    assert run.cfg.retriever.corpus == str(world / "corpus.jsonl") and run.cfg.eval.benchmarks == {
        "tiny": str(world / "heldout.jsonl")
    }
    assert run.cfg.tinyworld.namesake_share == 0.8 and run.cfg.loss.lld_answer_schedule == "paper"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"arm": {}}, "unknown name 'arm'"),
        ({"base": "left out"}, "base = None"),
        ({"record": "left out"}, "record = None"),
        ({"arms": [["loss.lld_weight=0"]]}, "give each a name"),
        ({"arms": {"a/b": None}}, "'a/b' cannot name a folder"),
        ({"arms": {"grpo": {"lld_weight": 0}}}, "arms.grpo"),
        (
            {"arms": {"grpo": ["loss.lld_wait=0"]}},
            "run plain/grpo-lr1e-4-s0: unknown option loss.lld_wait: did you mean 'lld_weight'",
        ),
        (
            {"arms": {"grpo": ["loss.lld_weight=0", "loss.lld_gate=token"]}},
            "does nothing with loss.lld_weight = 0",
        ),
        ({"worlds": {"worlds": None}}, "cannot name a folder"),
        ({"learning_rates": ["fast"]}, "'fast' is no number"),
        ({"learning_rates": "left out"}, "learning_rates = None"),
        ({"seeds": [0.5]}, "seeds = [0.5]"),
        ({"steps": "left out"}, "steps = None"),
        ({"grids": [{"arms": ["token"]}]}, "grids[0]: arms names 'token'"),
        ({"grids": [{"lr": ["1e-4"]}]}, "grids[0]: unknown name 'lr'"),
        ({"grids": [{}, {"options": ["loss.kl_weight=0"]}]}, "two blocks ask for plain/grpo-lr1e-4-s0"),
        ({"options": ["optim.lr=1e-3"]}, "'optim.lr=1e-3' does nothing: the experiment sets this option"),
        ({"pairs": [["grpo", "ppo"]]}, "pairs names 'ppo', which is not among the arms"),
        ({"pairs": ["grpo"]}, "must be a list of [arm, arm it is compared with]"),
        ({"law": "grpo"}, "law = 'grpo': must be a list of arms"),
        ({"figure_arms": {}}, "figure_arms = {}: must be a list of arms"),
        ({"figure_arms": {"a heading": {"ppo": "PPO"}}}, "figure_arms names 'ppo', which is not among"),
        ({"law": [["grpo"]]}, "law names ['grpo'], which is not among the arms"),
        ({"grids": [{"arms": [{"grpo": 1}]}]}, "grids[0]: arms names {'grpo': 1}"),
    ],
)
def test_mistakes_are_refused_with_their_place_before_anything_runs(
    tmp_path, capsys, fake_train, changes, message
):
    assert runner.main([str(write_experiment(tmp_path, **changes))], fake_train) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------------------------
# run


def test_finished_runs_are_skipped_and_half_finished_ones_continue(tmp_path, capsys, fake_train):
    path = write_experiment(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    assert runner.main([str(path), "--jobs", "2"], fake_train) == 0
    assert signal.getsignal(signal.SIGTERM) == before
    assert sorted(started(tmp_path)) == [
        "action-lr1e-4-s0",
        "action-lr1e-4-s1",
        "grpo-lr1e-4-s0",
        "grpo-lr1e-4-s1",
    ]
    assert "4 of 4 runs played, their rows in runs.csv" in (printed := capsys.readouterr().out)
    assert "commit abcdef0" in printed
    rows = outcomes.read_record(tmp_path / "runs.csv")
    assert {(row["arm"], row["seed"]): row["held_out_end"] for row in rows} == {
        ("grpo", 0): 0.5,
        ("grpo", 1): 0.51,
        ("action", 0): 0.7,
        ("action", 1): 0.71,
    }
    assert all(row["seconds"] == 3.0 and row["steps"] == 12 and row["rate"] == "1e-4" for row in rows)
    assert {row["options"] for row in rows if row["arm"] == "grpo"} == {"loss.lld_weight=0"}
    # One thread a run
    assert all(
        line.split()[2] == "1" for line in (tmp_path / "out/plain/started.txt").read_text().splitlines()
    )
    # Another machine has the record and no folder: nothing is repeated
    assert runner.main([str(path), "--out", str(tmp_path / "else")], fake_train) == 0
    assert not (tmp_path / "else/plain").exists()
    # A killed experiment: one run was not recorded yet, one is half done
    lines = (tmp_path / "runs.csv").read_text().splitlines()
    (tmp_path / "runs.csv").write_text("".join(line + "\n" for line in lines[:3]))
    lost = [row["arm"] + f"-lr1e-4-s{row['seed']}" for row in rows[2:]]
    metrics = tmp_path / "out/plain" / lost[1] / "metrics.jsonl"
    metrics.write_text("".join(line + "\n" for line in metrics.read_text().splitlines()[:5]))
    assert runner.main([str(path)], fake_train) == 0
    assert started(tmp_path)[4:] == lost[1:]  # with --resume, which the stand-in insists on
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(12))
    assert sorted((tmp_path / "runs.csv").read_text().splitlines()) == sorted(lines)


def test_a_run_whose_last_evaluation_was_cut_short_is_not_finished(tmp_path, fake_train):
    """A signal in the last evaluation: the row is there, the evaluation is made up by --resume."""
    path = write_experiment(tmp_path)
    assert runner.main([str(path)], script=fake_train) == 0
    (run,) = [run for run in grid.load_experiment(path).runs if run.name == "plain/action-lr1e-4-s1"]
    log = run.folder / "metrics.jsonl"
    *lines, last = log.read_text().splitlines()
    last = {name: value for name, value in json.loads(last).items() if "eval" not in name}
    log.write_text("".join(line + "\n" for line in [*lines, json.dumps(last)]))
    assert not run.finished()
    # A run that went on beyond these steps counts if it was evaluated at the last of them
    later = json.dumps(last | {"step": last["step"] + 1, "eval/nq/em": 0.5})
    log.write_text("".join(line + "\n" for line in [*lines, json.dumps(last), later]))
    assert not run.finished()
    evaluated = json.dumps(last | {"eval/nq/em": 0.5})
    log.write_text("".join(line + "\n" for line in [*lines, evaluated, later]))
    assert run.finished()


def test_a_fingerprint_tells_options_that_matter_and_no_folders(tmp_path):
    def fingerprints(**changes):
        path = write_experiment(tmp_path, **changes)
        return [run.fingerprint for run in grid.load_experiment(path).runs]

    first = fingerprints()
    assert len(set(first)) == 4
    assert fingerprints(out=str(tmp_path / "x"), options=["run.save_every=7"]) == first
    # An option with its default is no other option
    assert fingerprints(arms={"a": ["loss.lld_weight=0"], "b": None}) == first
    # A preset counts by its options, not by its name
    assert fingerprints(arms={"a": ["loss.preset=grpo"], "b": None}) == first
    other = "model.path=Qwen/Qwen2.5-7B"  # no file of a tiny world
    for options in ({"steps": 13}, {"options": ["loss.clip_high=0.3"]}, {"options": [other]}):
        assert not set(fingerprints(**options)) & set(first), options
    assert not set(fingerprints(learning_rates=["2e-4"])) & set(first)
    base = ROOT / "configs/collapse.yaml"
    inside = fingerprints(base=str(base))
    assert fingerprints(base=str(base), out=str(tmp_path / "x")) == inside
    assert grid.is_free("model.path", "runs/w/policy", "runs/w") and not grid.is_free("model.path", "x", None)
    assert not grid.is_free("eval.benchmarks", {"a": "runs/w/x.jsonl", "b": "b.jsonl"}, "runs/w")
    with pytest.raises(
        ValueError, match="plain/a-lr1e-4-s0 and plain/b-lr1e-4-s0 are one run under two names"
    ):
        fingerprints(arms={"a": ["loss.preset=grpo"], "b": ["loss.lld_weight=0"]})


def add_rows(path, first):
    for number in range(first, first + 12):
        row = dict.fromkeys(outcomes.ABOUT, "0") | {"fingerprint": f"f{number}"}
        outcomes.add_to_record(path, row)


def test_two_experiments_may_write_one_record_and_a_run_stands_there_once(tmp_path):
    path = tmp_path / "runs.csv"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=add_rows, args=(path, first)) for first in (0, 6, 12)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert {row["fingerprint"] for row in outcomes.read_record(path)} == {f"f{n}" for n in range(24)}
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, lines[3]]))
    with pytest.raises(ValueError, match="lines 4 and 26 hold the same run"):
        outcomes.read_record(path)


def test_a_shared_record_shows_an_experiment_its_own_runs_under_its_own_names(tmp_path, capsys, fake_train):
    assert runner.main([str(write_experiment(tmp_path))], fake_train) == 0
    path = write_experiment(tmp_path, arms={"dose": {"loss": {"lld_weight": 0.2}}}, worlds={"mine": None})
    capsys.readouterr()
    assert runner.main([str(path), "--tables"], fake_train) == 0
    printed = capsys.readouterr().out
    assert "2 of 2 runs played" in printed and "| mine | dose |" in printed
    assert "grpo" not in printed and "action" not in printed.replace("valid actions", "")


def test_only_some_runs_and_tables_without_runs(tmp_path, capsys, fake_train):
    path = write_experiment(tmp_path)
    assert runner.main([str(path), "--tables"], fake_train) == 2
    assert "no run of this experiment is in" in capsys.readouterr().err
    assert runner.main([str(path), "--only", "*-s0"], fake_train) == 0
    assert sorted(started(tmp_path)) == ["action-lr1e-4-s0", "grpo-lr1e-4-s0"]
    assert runner.main([str(path), "--only", "nothing"], fake_train) == 2
    assert "the first is plain/grpo-lr1e-4-s0" in capsys.readouterr().err
    assert runner.main([str(path), "--tables"], fake_train) == 0
    assert "2 of 4 runs played" in capsys.readouterr().out and len(started(tmp_path)) == 2


def test_a_reader_that_leaves_is_no_error(monkeypatch, capsys):
    """`--tables | head -1`: the tables are longer than a pipe holds."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert runner.main([str(ROOT / "configs/experiments/stabilisers.yaml"), "--tables"]) == 0
    assert capsys.readouterr().err == ""


def test_a_damaged_record_is_named(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("world,arm,rate,seed,steps,fingerprint\neasy,grpo,1e-4,0,10\n")
    with pytest.raises(ValueError, match="line 2 is damaged"):
        outcomes.read_record(path)
    path.write_text("world,arm,rate,seed,steps,fingerprint,em_end\neasy,grpo,1e-4,0,10,ab,much\n")
    with pytest.raises(ValueError, match="em_end = 'much' is no number"):
        outcomes.read_record(path)
    path.write_bytes("world,arm".encode("utf-16"))
    with pytest.raises(ValueError, match=r"runs.csv is damaged \(.*decode byte.*\): restore it"):
        outcomes.read_record(path)


def test_a_failed_run_shows_its_log_and_does_not_stop_the_others(tmp_path, capsys, fake_train):
    path = write_experiment(tmp_path, seeds=[7, 0])
    assert runner.main([str(path), "--jobs", "1"], fake_train) == 1
    printed = capsys.readouterr()
    assert printed.err.count("seed 7 is cursed") == 2 and "plain/grpo-lr1e-4-s7 failed" in printed.err
    assert "2 of 4 runs played" in printed.out


def test_a_run_made_with_other_options_is_not_counted_as_this_one(tmp_path, capsys, fake_train):
    runner.main([str(write_experiment(tmp_path))], fake_train)
    assert runner.main([str(write_experiment(tmp_path, options=["loss.clip_high=0.3"]))], fake_train) == 2
    assert "was made with loss.clip_high = 0.2, and 0.3 is asked for now" in capsys.readouterr().err
    assert runner.main([str(write_experiment(tmp_path, options=["run.save_every=7"]))], fake_train) == 0


def test_what_a_resumed_run_may_change_makes_it_no_other_run():
    assert set(settings.RESUMABLE) <= set(grid.FREE)


def test_an_interrupt_ends_the_children(tmp_path, fake_train):
    path = write_experiment(tmp_path, seeds=[9])
    code = (
        "import sys; from lld.experiment import runner as experiment; from pathlib import Path; "
        f"sys.exit(experiment.main([{str(path)!r}, '--jobs', '2'], Path({str(fake_train)!r})))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while len(started(tmp_path)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # The lock: two experiments would write into the same runs
    assert runner.main([str(path)], fake_train) == 2
    parent.send_signal(signal.SIGINT)
    assert "the same command continues" in parent.communicate(timeout=200)[1] and parent.returncode == 130
    for line in (tmp_path / "out/plain/started.txt").read_text().splitlines():
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[1]), 0)


def test_a_world_is_made_once_before_its_runs(tmp_path, monkeypatch, fake_train):
    monkeypatch.setitem(BASE, "tinyworld", {"dir": str(tmp_path / "home")})
    monkeypatch.setitem(BASE, "model", {"path": str(tmp_path / "home/policy")})
    planned = grid.load_experiment(write_experiment(tmp_path))
    made = tmp_path / "made.txt"
    prepare = [
        sys.executable,
        "-c",
        (
            f"import sys, pathlib; open({str(made)!r}, 'a').write(sys.argv[1] + "
            f"str(pathlib.Path({str(tmp_path / 'out/plain')!r}).exists()))"
        ),
    ]
    assert runner.run_experiment(planned, 2, fake_train, prepare) == []
    assert made.read_text() == "plain/grpo-lr1e-4-s0False" and len(started(tmp_path)) == 4
    assert (
        runner.run_experiment(planned, 2, fake_train, prepare) == [] and made.read_text().count("plain") == 1
    )
    broken = [sys.executable, "-c", "import sys; sys.exit('no room')"]
    more = grid.load_experiment(write_experiment(tmp_path, seeds=[5]))
    assert (
        runner.run_experiment(more, 2, fake_train, broken) == ["world plain"] and len(started(tmp_path)) == 4
    )


# ----------------------------------------------------------------------------------------------------
# statistics


def test_intervals_by_hand():
    mean, half = intervals.mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    # Variance 10 / 4, t with 4 degrees
    assert mean == 3.0 and half == pytest.approx(2.776 * math.sqrt(2.5) / math.sqrt(5))
    # Sd 0.2 sqrt 2, over sqrt 2
    assert intervals.mean_interval([0.2, 0.6]) == (0.4, pytest.approx(12.706 * 0.2))
    assert intervals.mean_interval([0.7]) == (0.7, None)
    # None of five: (1 - p)^5 = .025; the tables of Clopper and Pearson give .478, and .284 to .995 for 4 of 5
    assert intervals.share_interval(0, 5) == (0.0, pytest.approx(1 - 0.025**0.2))
    assert intervals.share_interval(5, 5) == (pytest.approx(0.025**0.2), 1.0)
    assert intervals.share_interval(4, 5) == (
        pytest.approx(0.2836, abs=1e-4),
        pytest.approx(0.9949, abs=1e-4),
    )


def test_exact_tests_by_hand():
    # Five of five against none of five: the two extreme ones of C(10, 5) = 252 tables
    assert intervals.fisher_p(5, 5, 0, 5) == pytest.approx(2 / 252)
    # Fisher's tea: 3 of 4 against 1 of 4, p = (16 + 1 + 16 + 1) / 70
    assert intervals.fisher_p(3, 4, 1, 4) == pytest.approx(34 / 70)
    assert intervals.fisher_p(2, 5, 2, 5) == pytest.approx(1.0)
    # All five differences positive: only all signs alike are as far out
    assert intervals.sign_flip_p([0.1, 0.2, 0.1, 0.3, 0.2]) == 2 / 32
    # |0.1| or more: of the sums ±.3±.2, all four
    assert intervals.sign_flip_p([0.3, -0.2]) == 1.0 and intervals.sign_flip_p([]) is None
    # Sums that are 0 but for rounding
    assert intervals.sign_flip_p([0.1, 0.2, 0.3, -0.6, 0.1, -0.1]) == 1.0
    assert intervals.swap_p([0.7, 0.2, 0.2], [0.7, 0.3, 0.1]) == 1.0
    assert intervals.swap_p([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(2 / 252)
    # Means 1.5 and 3.5 are as far apart as {1, 2} can be; {1, 3}, {2, 3}, … are nearer
    assert intervals.swap_p([1, 2], [3, 4]) == pytest.approx(2 / 6) and intervals.swap_p([], [1.0]) is None


def test_the_fit_finds_a_law_in_spite_of_runs_that_were_cut_off():
    """onset = 40 / (cut * rate) with 10 % of scatter; a third of the runs end before it."""
    noise = [0.1, -0.1, 0.05, -0.05, 0.12, -0.12] * 2
    points = [(cut, rate) for cut in (0.05, 0.1, 0.2) for rate in (1, 2, 4, 8)]
    onsets = [40 / (cut * rate) * math.exp(e) for (cut, rate), e in zip(points, noise, strict=True)]
    factors = [[math.log(cut), math.log(rate)] for cut, rate in points]
    seen = [onset < 200 for onset in onsets]
    assert 3 <= seen.count(False) <= 5
    fit = intervals.survival_fit(factors, [min(onset, 200) for onset in onsets], seen)
    for value, half, truth in zip(fit.coefficients, fit.halves, (math.log(40), -1, -1), strict=True):
        assert abs(value - truth) < half < (0.5 if truth < 0 else 0.55)  # the intercept's is wider
    # Without the runs that were cut off the law is flatter, and none is found in too few onsets
    kept = [index for index, happened in enumerate(seen) if happened]
    naive = intervals.survival_fit([factors[i] for i in kept], [onsets[i] for i in kept], [True] * len(kept))
    assert naive is not None and abs(naive.coefficients[1] + 1) < 0.5
    assert intervals.survival_fit(factors[:3], onsets[:3], [True] * 3) is None
    assert intervals.survival_fit([[1.0]] * 9, onsets[:9], [True] * 9) is None  # one point: no slope
    # Where all were seen it is least squares, with t at 12 - 3 degrees of freedom
    fit = intervals.survival_fit(factors, onsets, [True] * 12)
    X, y = np.array([[1.0, *row] for row in factors]), np.log(onsets)
    best, (rss,), *_ = np.linalg.lstsq(X, y, rcond=None)
    assert fit.coefficients == pytest.approx(best, abs=1e-5) and fit.scatter == pytest.approx(
        (rss / 9) ** 0.5
    )
    halves = 2.262 * (rss / 9 * np.diag(np.linalg.inv(X.T @ X))) ** 0.5
    assert fit.halves == pytest.approx(halves, rel=1e-4)


def collapse_of(rewards):
    return courses.find_collapse(range(len(rewards)), rewards)


def test_collapse_by_hand():
    # Means: 0.8 up to step 29, then down 0.08 a step; 0.1 below at step 31 (0.64), below 0.4 at step 35
    # (0.32; 0.4 at step 34 is not below).
    crash = collapse_of([0.8] * 30 + [0.0] * 20)
    assert (
        crash["collapse_step"] == 35
        and crash["falling_step"] == 31
        and crash["peak"] == pytest.approx(0.8)
        and crash["fall"] == pytest.approx(0.8)
    )
    # Nine steps below: not yet ten in a row
    assert collapse_of([0.8] * 30 + [0.0] * 14)["collapse_step"] is None
    assert collapse_of([0.8] * 30 + [0.0] * 15)["collapse_step"] == 35


def test_wobbles_plateaus_and_poor_starts_are_no_collapse():
    assert collapse_of([0.8] * 30 + [0.5] * 30)["collapse_step"] is None and collapse_of(
        [0.8] * 30 + [0.5] * 30
    )["fall"] == pytest.approx(0.3)
    # A policy that had less than 0.1 has nothing to lose
    assert collapse_of([0.09] * 30 + [0.0] * 30)["collapse_step"] is None
    # Below half for fewer than ten steps
    assert collapse_of([0.8] * 30 + [0.0] * 6 + [0.8] * 30)["collapse_step"] is None
    assert collapse_of([0.9] + [0.0] * 40)["collapse_step"] is None  # one lucky step is no ten-step mean
    assert collapse_of([0.3] * 10 + [0.0] * 30)["collapse_step"] is not None  # losing the warm start counts
    assert collapse_of([0.5] * 5) == {"collapse_step": None, "falling_step": None, "peak": None, "fall": 0.0}


def test_the_fall_is_dated_from_its_unbroken_part():
    """A dip that was made good, then a new maximum, has no part in the collapse that comes later."""
    rewards = [0.6] * 20 + [0.3] * 6 + [0.9] * 20 + [0.01] * 20
    # 0.722; 0.366 < 0.45
    assert collapse_of(rewards)["falling_step"] == 47 and collapse_of(rewards)["collapse_step"] == 51


def test_a_run_fell_if_its_end_is_below_three_quarters_of_its_best_level():
    """Levels of 40 steps: .4 up to step 59, then lower with each step."""
    steps = list(range(200))
    assert outcomes.fall(steps, [0.4] * 60 + [0.31] * 140)["lost_step"] is None
    # .4 - .0075 k < .3 at k = 14
    found = outcomes.fall(steps, [0.4] * 60 + [0.1] * 140)
    assert found == pytest.approx({"em_peak": 0.4, "em_fall": 0.75, "lost_step": 73, "fell_step": 73})
    # What was made good was lost, and not for good
    found = outcomes.fall(steps, [0.4] * 60 + [0.1] * 60 + [0.4] * 80)
    assert (found["lost_step"], found["fell_step"]) == (73, None)
    assert set(outcomes.fall(steps[:10], [0.4] * 10).values()) == {None}


def test_a_description_by_hand():
    """A run of 100 steps whose wrong responses flatten from step 50 on, and whose EM is lost from 60 on."""
    rows = [
        {
            "step": step,
            "em": 0.4 if step < 60 else 0.1,
            "reward/mean": 0.4 if step < 60 else 0.1,
            "entropy/incorrect": 0.5 if step < 50 else 1.5,
            "entropy/incorrect/unlucky": 0.5 if step < 40 else 1.5,
            "likelihood/correct_old": -0.4,
            "likelihood/incorrect_old": -0.4 if step < 70 else -1.4,
            "valid_actions": 1.0,
        }
        for step in range(100)
    ]
    rows[99]["eval/tiny/em"] = 0.2
    row = outcomes.describe_run(rows, "tiny")
    wanted = {"em_end": 0.1, "em_peak": 0.4, "held_out_end": 0.2, "valid_end": 1.0}
    # The last 40 steps have 30 of the wide gap
    wanted |= {"gap_end": -0.75, "wrong_end": -1.15, "entropy_wrong_end": 1.5, "entropy_wrong_least": 0.5}
    assert {name: row[name] for name in wanted} == pytest.approx(wanted)
    # The median is 1 at the fifth step of 1.5, and 9 steps later it has been high for ten steps
    assert (row["onset"], row["onset_unlucky"], row["onset_lucky"]) == (54, 44, None)
    assert (row["alarm_flattening"], row["alarm_gap"], row["alarm_spiral"]) == (63, 74, 74)
    assert row["alarm_displacement"] is None and row["alarm_collapse"] is not None
    # .4 - .0075 k < .3 at k = 14; the 10-step mean is below .2 at the seventh step
    assert row["lost_step"] == row["fell_step"] == 73 and row["collapse_step"] == 66
    assert row["curve_em"] == "0.4 0.4 0.22 0.1" and row["curve_right"] == "-0.4 -0.4 -0.4 -0.4"
    assert row["curve_tokens"] == "" and outcomes.parse_curve("- 0.5") == [(37.5, 0.5)]
    # A series that has stopped has no end, though it has a last value
    early = [
        {name: row[name] for name in row if step < 55 or name in ("step", "em")}
        for step, row in enumerate(rows)
    ]
    row = outcomes.describe_run(early, "tiny")
    ends = ("entropy_wrong_end", "entropy_wrong_unlucky_end", "right_end", "gap_end")
    assert [row[name] for name in ends] == [None] * 4 and row["entropy_wrong_start"] == 0.5
    assert tables.has_exploded(row) is None and tables.exploded([row]) == "–"


def test_a_row_names_every_commit_of_its_run_and_whether_files_were_changed(tmp_path):
    """Only the first commit was kept, cut so that the mark of changes was always lost."""
    run = grid.load_experiment(write_experiment(tmp_path)).runs[0]
    run.folder.mkdir(parents=True)
    rows = [{"step": step, "reward/mean": 0.5, "em": 0.5} for step in range(12)]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run.folder / "timings.jsonl").write_text("")

    def commit(about):
        (run.folder / "run.json").write_text(json.dumps(about))
        return outcomes.record_of(run)["commit"]

    one, other = "a" * 40, "b" * 40 + "+changes"
    assert commit({"commit": one}) == "a" * 18 and commit({"commit": None}) == ""
    assert commit({"commit": one, "sessions": [{"commit": one}, {"commit": other}, {"commit": one}]}) == (
        "a" * 18 + " " + "b" * 18 + "+changes"
    )
    continued = [{"commit": one}, {"commit": None}, {"commit": other, "first_step": 12}]
    assert commit({"sessions": continued}) == "a" * 18  # the last one played steps beyond these
    rows = [record_of("cut", "2e-4", 0, 0.1, commit=f"{one[:18]} {other[:18]}+changes")]
    assert "commit aaaaaaa, bbbbbbb+changes." in tables.all_tables(
        grid.load_experiment(write_experiment(tmp_path)), rows
    )


# ----------------------------------------------------------------------------------------------------
# tables


def record_of(arm, rate, seed, em, fell=None, onset=None, **more):
    rows = [{"step": step, "em": em, "reward/mean": em} for step in range(50)]
    row = {"world": "easy", "arm": arm, "rate": rate, "seed": seed, "steps": 50, "commit": "abcdef0"}
    row |= outcomes.describe_run(rows) | {
        "lost_step": fell,
        "fell_step": fell,
        "onset": onset,
        "fingerprint": f"{arm}{rate}{seed}",
    }
    return row | more


def cells(table):
    return [dict(zip(table.header, row, strict=True)) for row in table.rows]


def test_tables_by_hand():
    rows = [record_of("cut", "2e-4", seed, em, fell=120 + seed) for seed, em in enumerate([0.1, 0.2, 0.3])]
    rows += [record_of("whole", "2e-4", seed, em) for seed, em in enumerate([0.4, 0.5, 0.6])]
    first, second = cells(tables.by_arm(rows, tables.OUTCOMES_TITLE, tables.OUTCOMES))
    # Sd .1, t 4.303, / sqrt 3
    assert first["EM end"] == "0.200 ± 0.248" and first["lost"] == "3 of 3 (0.29 to 1.00), step 121"
    assert second["lost"] == "0 of 3 (0.00 to 0.71)" and second["held out"] == "–"
    (pair,) = cells(tables.compared(rows, [("cut", "whole"), ("cut", "absent")]))
    assert pair["arms"] == "cut - whole" and pair["EM"] == "-0.300 ± 0.000" and pair["p of signs"] == "0.25"
    # Two of C(6, 3) = 20
    assert pair["p of dealing"] == "0.1" and pair["lost; p"] == "3 of 3, 0 of 3; 0.1"
    assert pair["exploded; p"] == "0 of 0, 0 of 0; 1"  # not logged
    flat = {"entropy_wrong_start": 1.0, "entropy_wrong_end": 2.1}
    assert tables.has_exploded(flat) and not tables.has_exploded(flat | {"entropy_wrong_start": 1.1})
    lines = tables.markdown(tables.compared(rows, [("cut", "whole")])).splitlines()
    assert lines[-3].count("|") == lines[-1].count("|") == len(pair) + 1 and max(map(len, lines[:-3])) <= 110
    assert (
        tables.cell([0.5, None, 0.5]) == "0.50 ± 0.00 [2]"
        and tables.cell([None]) == "–"
        and tables.cell([0.25], signed=True) == "+0.25"
    )


def test_alarms_are_counted_before_and_after_the_fall_and_in_runs_that_did_not_fall():
    rows = [
        record_of("cut", "2e-4", 0, 0.1, fell=120, alarm_spiral=50),
        record_of("cut", "2e-4", 1, 0.1, fell=120, alarm_spiral=130),
        record_of("cut", "2e-4", 2, 0.1, fell=120),
        record_of("whole", "2e-4", 0, 0.4, alarm_spiral=10),
        record_of("whole", "2e-4", 1, 0.4),
        record_of("kept", "2e-4", 1, 0.4),
        record_of("cool", "2e-4", 1, 0.4, alarm_spiral=10),
    ]
    options = {
        "whole": {},
        "kept": {"rollout": {"top_p": 0.8}, "loss": {"support": "kept"}},
        "cut": {"rollout": {"top_p": 0.8}},
        "cool": {"rollout": {"temperature": 0.8}, "loss": {"temperature": 1.0}},
    }
    runs = [
        SimpleNamespace(fingerprint=r["fingerprint"], cfg=settings.from_dict(options[r["arm"]])) for r in rows
    ]
    spiral = next(row for row in cells(tables.alarms(rows, runs)) if row["sign"] == "spiral")
    told = ["3", "1", "1", "1 (1 cut)", "-10, 30, 70", "1 of 3 (1 whole)", "1 of 1"]
    assert list(spiral.values())[1:] == told


def test_the_law_is_fitted_to_the_arms_that_the_yaml_names(tmp_path):
    arms = {f"cut{cut}": [f"rollout.top_p={1 - cut}", "loss.lld_weight=0"] for cut in (0.1, 0.2, 0.4)}
    arms |= {"whole": ["loss.lld_weight=0"]}
    path = write_experiment(tmp_path, arms=arms, seeds=[0, 1], law=list(arms))
    planned = grid.load_experiment(path)
    rows = [
        record_of(run.arm, run.rate, run.seed, 0.4, fingerprint=run.fingerprint, onset=onset)
        for run in planned.runs
        for onset in [None if run.arm == "whole" else (10 + run.seed) / (1 - run.cfg.rollout.top_p)]
    ]
    table = cells(tables.law(rows, planned.runs, planned.law))
    assert [row["factor"] for row in table] == ["intercept", "log(1 - top_p)", "scatter of log onset"]
    assert table[1]["coefficient"].startswith("-1.00 ± ") and "6 onsets in 6 runs" in table[2]["coefficient"]
    assert not tables.law(rows, planned.runs, ()).rows


def test_the_figure_draws_the_arms_that_were_played(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, path: figures.append(self))
    rows = [record_of("grpo", rate, seed, 0.4, fell=30) for rate in ("1e-4", "2e-4") for seed in (0, 1)]
    outcome_figure.plot_experiment(
        rows, {"": {"grpo": "plain $", "action": "a"}}, tmp_path / "figure.png", "curves"
    )
    (figure,) = figures
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "plain \\$",
        "EM below 3/4 of its best",
    ]
    assert [ax.get_title(loc="left") for ax in figure.axes[:5:4]] == [
        "exact match in training; easy, lr 1e-4",
        "exact match in training; easy, lr 2e-4",
    ]
    assert len(figure.axes[0].lines) == 3  # the mean, and a cross for each seed
    with pytest.raises(ValueError, match="no run of the arms to draw"):
        outcome_figure.plot_experiment(rows, {"": {"action": "a"}}, tmp_path / "figure.png", "curves")


def test_the_figure_of_endings_shows_seeds_means_and_intervals(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, path: figures.append(self))
    ems = {"grpo": (0.2, 0.3, 0.4), "action": (0.5, 0.7)}
    rows = [
        record_of(arm, "1e-4", seed, em, fell=9 if em == 0.3 else None, held_out_end=em)
        for arm in ems
        for seed, em in enumerate(ems[arm])
    ]
    parts = {"first": {"grpo": "x", "none": "not played"}, "second": {"action": "y"}, "third": {"none": "z"}}
    outcome_figure.plot_experiment(rows, parts, tmp_path / "a.png", "endings")
    ax = figures[0].axes[0]
    names = [(label.get_text(), label.get_fontweight()) for label in ax.get_yticklabels()]
    assert names == [("first", "bold"), ("x", "normal"), ("second", "bold"), ("y", "normal")]
    seeds = {
        mark: [list(line.get_xdata()) for line in ax.lines if line.get_marker() == mark] for mark in ".x"
    }
    assert seeds == {".": [[0.2, 0.4], [0.5, 0.7]], "x": [[0.3], []]}
    (bar,) = [c.get_segments()[0][:, 0] for c in ax.collections if len(c.get_segments()) == 1]
    assert bar == pytest.approx([0.3 - 4.303 * 0.1 / 3**0.5, 0.3 + 4.303 * 0.1 / 3**0.5])  # two have none
    (dashed,) = [line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == "--"]
    assert dashed == pytest.approx(0.3)
    rows = [record_of("grpo", f"{rate}e-4", 0, 0.4) for rate in range(1, 10)]  # more than colours
    outcome_figure.plot_experiment(rows, {"": {"grpo": "x"}}, tmp_path / "a.png", "endings")
    assert len(figures[1].legends[0].get_texts()) == 10
    assert [label.get_text() for label in figures[1].axes[0].get_yticklabels()] == ["x"]


def test_endings_show_change_where_arms_start_from_another_measure(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, path: figures.append(self))
    ends = {"entropy_wrong_start": 0.5, "entropy_wrong_end": 1.5, "right_start": -1.0, "right_end": -0.25}
    rows = [record_of("grpo", "1e-4", 0, 0.3, **ends), record_of("kept", "1e-4", 0, 0.3)]
    outcome_figure.plot_experiment(rows, {"": {"grpo": "x", "kept": "y"}}, tmp_path / "a.png", "endings")
    means = [[line.get_xdata()[0] for line in ax.lines if line.get_marker() == "o"] for ax in figures[0].axes]
    assert means == [[], [0.3, 0.3], [3.0], [0.75]]


def test_endings_draw_an_arm_with_llds_hollow_on_the_line_of_the_arm_without(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, path: figures.append(self))
    rows = [record_of(arm, "1e-4", 0, em) for arm, em in {"dapo": 0.2, "dapo-llds": 0.3}.items()]
    parts = {"": {"dapo": "x", "grpo": "y"}}
    outcome_figure.plot_experiment(rows, parts, tmp_path / "a.png", "endings")
    ax = figures[0].axes[1]
    assert [text.get_text() for text in figures[0].axes[0].get_yticklabels()] == ["x"]
    fills = {line.get_xdata()[0]: line.get_mfc() for line in ax.lines if line.get_marker() == "o"}
    assert fills[0.3] == "white" != fills[0.2]
    assert [0.2, 0.3] in [list(line.get_xdata()) for line in ax.lines if line.get_linestyle() == "-"]
    assert [text.get_text() for text in figures[0].legends[0].get_texts()][-2] == "with LLDS"
    rows += [record_of("dapo", "2e-4", 0, 0.2)]
    outcome_figure.plot_experiment(rows, {"": {"dapo": "x"}}, tmp_path / "a.png", "curves")
    assert len(figures[1].axes) == 2 * 4, "both rates, although one has an arm with LLDS too"
    rows = rows[:2]
    with pytest.raises(ValueError, match="no run of the arms to draw"):  # curves draw what is named
        outcome_figure.plot_experiment(rows[1:], {"": {"dapo": "x"}}, tmp_path / "a.png", "curves")


def test_the_table_of_losses_beside_llds_by_hand(tmp_path):
    drawn = {"one": {"grpo": "GRPO", "dapo": "DAPO"}, "two": {"vespo-llds": "none without LLDS"}}
    planned = dataclasses.replace(grid.load_experiment(write_experiment(tmp_path)), figure_arms=drawn)
    ends = {"grpo": (0.1, 0.2), "grpo-llds": (0.3,), "dapo": (0.5,)}
    rows = [
        record_of(arm, "1e-4", seed, em, fell=9 if em == 0.1 else None, held_out_end=em)
        for arm in ends
        for seed, em in enumerate(ends[arm])
    ]
    rows[1] |= {"entropy_wrong_start": 1.0, "entropy_wrong_end": 2.1}  # exploded
    rows[2] |= {"em_end": 0.04}  # dead
    rows += [record_of("grpo-llds", "2e-4", 1, 0.3, held_out_end=0.3)]  # no run without LLDS at this rate
    rows += [record_of("dapo-llds", "1e-4", 0, 0.3)]  # nothing held out
    table = tables.beside_llds(planned, rows, "easy")
    assert "-> with LLDS, easy**" in table.title and table.rows == [
        ("**one**", "", "", "", "", ""),
        ("GRPO", "2 -> 2", "1 -> 0", "1 -> 1", "0.150 ± 0.635 -> 0.300 ± 0.000", "+0.200"),
        ("DAPO", "1 -> 1", "0 -> 0", "0 -> 0", "0.500 -> –", "–"),
    ]
    assert not tables.beside_llds(planned, rows, "hard").rows
    titles = {
        kind: tables.all_tables(dataclasses.replace(planned, figure=kind), rows)
        for kind in ("curves", "endings")
    }
    assert ["with LLDS, easy" in text for text in titles.values()] == [False, True]


def test_every_figure_that_an_experiment_may_ask_for_is_there(tmp_path):
    for kind in outcome_figure.FIGURES:
        assert grid.load_experiment(write_experiment(tmp_path, figure=kind)).figure == kind
    with pytest.raises(ValueError, match="figure = 'dots': must be curves or endings"):
        grid.load_experiment(write_experiment(tmp_path, figure="dots"))


def page_of(name: str) -> str:
    """The page with its tables, made from the record."""
    text, *parts = (ROOT / "docs" / name).read_text().split(TABLES_MARK)
    for (experiment, make), part in zip(PAGES[name], parts, strict=True):
        plan = grid.load_experiment(ROOT / f"configs/experiments/{experiment}.yaml")
        plan = dataclasses.replace(plan, record=ROOT / plan.record)
        made = make(plan, runner.rows_of(plan))
        text += TABLES_MARK + made + TABLES_END + part.partition(TABLES_END)[2]
    return text


@pytest.mark.parametrize("name", PAGES)
def test_the_page_has_the_tables_of_its_record(name):
    assert (ROOT / "docs" / name).read_text() == page_of(name), "run python tests/test_experiment.py"


if __name__ == "__main__":
    for name in PAGES:
        (ROOT / "docs" / name).write_text(page_of(name))
