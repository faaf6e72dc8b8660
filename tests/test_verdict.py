"""The line that says whether a run worked: each answer by hand, the alarm before the scores."""

import math
from unittest.mock import MagicMock

import pytest

from lld import settings
from lld.record import courses, phases
from lld.record.verdict import held_out_course, judge
from lld.running import recording

OPTIONS = {"run.steps": 150, "optim.updates_per_rollout": 4, "eval.every": 25}


def made(num_steps, ems=(), rewards=None, questions=200, **more):
    """Rows of a run; `ems`: steps done -> EM; `rewards`: a function of the step."""
    rows = [
        {"step": step, "reward/mean": (rewards or (lambda at: 0.3 + 0.002 * at))(step)}
        | {
            "reward/mixed_groups": 0.7,
            "answered": 1.0,
            "valid_actions": 1.0,
            "entropy": 0.3,
            "truncated": 0.0,
        }
        | more
        for step in range(num_steps)
    ]
    for at, em in dict(ems).items():
        rows[max(0, at - 1)] |= {"eval/tiny/em": em, "eval/tiny/num_questions": questions}
    return rows


@pytest.mark.parametrize(
    "num_steps, ems, kind, begins",
    [
        (4, {}, "plain", "Too early to tell after 4 steps"),
        (26, {0: 0.455, 25: 0.6}, "good", "It works so far: held-out EM 0.455 -> 0.600"),
        (26, {0: 0.455, 25: 0.5}, "plain", "No clear change yet: held-out EM 0.455 -> 0.500"),
        (
            150,
            {0: 0.455, 75: 0.78, 150: 0.77},
            "good",
            "It worked: held-out EM 0.455 -> 0.770, best 0.780 after",
        ),
        (150, {0: 0.455, 75: 0.77, 150: 0.6}, "plain", "It worked and is losing it"),
        (150, {0: 0.455, 75: 0.455, 150: 0.3}, "bad", "It gets worse"),
        # A rise that may be chance was not lost
        (150, {0: 0.5, 75: 0.56, 150: 0.44}, "plain", "No clear change at the end"),
        (150, {0: 0.455, 150: 0.48}, "plain", "No clear change at the end"),
        (150, {}, "good", "It worked: reward 0.31 -> 0.59"),
    ],
)
def test_a_run_without_an_alarm_is_judged_by_its_scores(num_steps, ems, kind, begins):
    line = judge(made(num_steps, ems), OPTIONS)
    assert line["kind"] == kind and line["text"].startswith(begins), line


def test_chance_is_two_standard_errors_of_a_difference():
    course = held_out_course(made(30, {0: 0.5, 25: 0.6}), OPTIONS)
    by_hand = 2 * math.sqrt((0.5 * 0.5 + 0.6 * 0.4) / 200)
    assert course == pytest.approx((0.5, 0.6, 0.6, 25, by_hand))
    assert held_out_course(made(30, {0: 0.5}), OPTIONS) is None
    two = made(30, {0: 0.5, 25: 0.6})
    for at in (0, 24):  # a second benchmark: the mean counts, in which 50 questions weigh as much as 200
        two[at] |= {"eval/other/em": 0.1, "eval/other/num_questions": 50}
    by_hand = 2 * math.sqrt((0.3 * 0.7 + 0.35 * 0.65) * (1 / 200 + 1 / 50) / 4)
    assert held_out_course(two, OPTIONS) == pytest.approx((0.3, 0.35, 0.35, 25, by_hand))


def test_the_alarm_goes_before_the_scores():
    ems = {0: 0.4, 25: 0.6}
    dead = made(60, ems, lambda step: 0.5 if step < 30 else 0.0)
    for row in dead[30:]:
        row |= {"reward/mixed_groups": 0.0, "answered": 0.0}
    assert phases.detect(dead, 4)[-1] == phases.COLLAPSE
    line = judge(dead, OPTIONS)
    assert line["kind"] == "bad" and line["text"].startswith(
        "It collapsed: reward 0.50 at its best, 0.00 now."
    )
    assert "the checkpoint after 25 steps" in line["text"]
    spiral = judge(made(60, ems, phase=3), OPTIONS)  # as the run itself logged it
    assert spiral["kind"] == "bad" and "in phase 3 (spiral)" in spiral["text"] and "0.600" in spiral["text"]
    assert "loss.support=kept" in spiral["text"]
    kept = judge(made(60, ems, phase=3), OPTIONS | {"loss.support": "kept"})
    assert "loss.support" not in kept["text"] and "Lower optim.lr" in kept["text"]
    whole = judge(made(60, ems, phase=3), OPTIONS | {"rollout.top_p": 1.0})
    assert "loss.support" not in whole["text"] and "Lower optim.lr" in whole["text"]
    idle = made(40, {}, lambda step: 0.0, **{"reward/mixed_groups": 0.0})
    assert judge(idle, OPTIONS)["text"].startswith("Nothing to learn from: no group was mixed for 40 steps.")


def test_damaged_options_and_values_are_left_out():
    rows = made(30, {0: 0.4, 25: 0.7})
    rows[3] |= {"entropy": None, "phase": "no", "reward/mean": float("nan"), "answered": [1]}
    line = judge(rows, {"run.steps": "many", "optim.updates_per_rollout": [4], "eval.every": None})
    assert line["kind"] == "good" and line["text"].startswith("It worked")
    held_out = courses.outcome(rows, {})["held_out"]
    assert held_out["tiny"] == {"scores": [(0, 0.4), (25, 0.7)], "best": (25, 0.7)}


@pytest.mark.parametrize("box, at", [(None, [9, 24]), ("box", [24])], ids=["run", "replay"])
def test_the_first_page_comes_after_ten_steps_and_then_with_each_evaluation(tmp_path, monkeypatch, box, at):
    run, drawn = MagicMock(cfg=settings.from_dict({"eval": {"every": 25}}), dir=tmp_path, box=box), []
    monkeypatch.setattr(
        recording, "draw_report", lambda *_: drawn.append(run.guard.beat.call_count - 1) or ""
    )
    monkeypatch.setattr(recording.trackers, "log_figure", lambda *_: None)
    run.clock.row.return_value = {"time/step_s": 1.0}
    for row in made(26, {25: 0.5}):
        recording.write_rows(run, row | {"searches": 1.0}, [], [], MagicMock())
    assert drawn == at
