"""Trackers: what Weights & Biases is told, by a module that stands in for it, and what is refused."""

import sys
from types import ModuleType

import accelerate.tracking
import pytest
from conftest import ROOT
from test_train import rows, write_config

import train
from lld import settings
from lld.running import recording, trackers


class Wandb(ModuleType):
    """The part of wandb that accelerate calls; keeps what it is given."""

    def __init__(self):
        super().__init__("wandb")
        self.logged, self.options, self.begun, self.finished = [], {}, None, False
        self.config = self.run = self

    def init(self, **options):
        self.begun = options
        return self

    def update(self, options, **_):
        self.options |= options

    def log(self, values, step=None):
        self.logged.append((step, values))

    def finish(self):
        self.finished = True

    def Table(self, columns, data, dataframe=None):
        assert dataframe is None and all(len(row) == len(columns) for row in data)
        return [dict(zip(columns, row, strict=True)) for row in data]

    def Image(self, path):
        return ("image", path)


@pytest.fixture
def wandb(monkeypatch):
    stub = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    known = [*accelerate.tracking._available_trackers, accelerate.tracking.LoggerType.WANDB]
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", known)
    return stub


def test_weights_and_biases_gets_metrics_trajectories_and_figures(folder, wandb, monkeypatch):
    def draw(folders, out):
        (out / "figure.png").write_bytes(b"")
        return "drawn"

    monkeypatch.setattr(recording, "draw_report", draw)
    config = write_config(
        folder, "tracked", run={"dir": str(folder / "tracked"), "steps": 2, "save_every": 2}
    )
    about = ["run.tracker_project=mine", "run.tracker_group=seeds", "run.tracker_tags=[a,b]"]
    more = ["run.trackers=[wandb]", "eval.every=2", "eval.at_start=false", "monitor.trajectories_every=1"]
    assert train.main(["--config", str(config), *about, *more, "monitor.trajectories_questions=1"]) == 0
    assert wandb.begun == {
        "project": "mine",
        "name": "tracked",
        "dir": str(folder / "tracked"),
        "group": "seeds",
        "tags": ["a", "b"],
    }
    assert wandb.options["optim.lr"] == 0.001 and wandb.options["model.lora_rank"] == 0 and wandb.finished
    assert wandb.options["run.tracker_tags"] == "['a', 'b']" and wandb.options["loss.temperature"] == "None"
    steps = [step for step, _ in wandb.logged]
    assert steps == sorted(steps)  # Weights & Biases drops what comes late
    for number, row in enumerate(rows(folder / "tracked")):
        told = {
            name: value for step, values in wandb.logged if step == number for name, value in values.items()
        }
        assert row.items() <= told.items() and "time/step_s" in told
        table = told["trajectories"]
        assert len(table) == 3 and [line["sample"] for line in table] == [0, 1, 2]
        assert all(line["step"] == number and "<" in line["text"] for line in table)
    assert told["figure"] == [("image", str(folder / "tracked" / "figure.png"))]


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["run.tracker_project=x"], "run.tracker_project = 'x' does nothing with run.trackers = "),
        (
            ["run.trackers=[tensorboard]", "run.tracker_group=x"],
            "run.trackers without 'wandb', which reads it",
        ),
        (
            ["run.trackers=[wandb]", "run.tracker_project=../x"],
            "run.tracker_project: '../x' cannot name a file",
        ),
    ],
)
def test_options_that_no_tracker_reads_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        settings.load(str(ROOT / "configs" / "tiny.yaml"), overrides)


def test_a_table_counts_the_searches_that_were_carried_out():
    record = {"step": 0, "question": {"text": "who?", "golden_answers": ["a"]}, "sample": 0, "answer": None}
    record |= {"reward": 0.0, "advantage": 0.0, "tokens": []}
    turns = [{"kind": "search", "searched": searched} for searched in (True, False)]  # the last turn's is not
    assert trackers.about_episode(record | {"turns": turns})["searches"] == 1
