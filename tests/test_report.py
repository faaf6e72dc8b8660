"""Figures: what is drawn is what was logged."""

import json

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from lld.record.metrics import described
from lld.report import figure as report

STEPS = 40


def write_run(folder, rows):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def full_rows(shift=0.0):
    rows = []
    for step in range(STEPS):
        row = {
            "step": step,
            "reward/mean": shift + (step % 7) / 10,
            "likelihood/correct_new": -0.3 - shift,
            "likelihood/incorrect_new": -0.5 - shift,
        }
        row |= {
            "displacement/correct": -0.01 * step,
            "entropy": 0.5,
            "grad_norm": 0.0 if step == 3 else 10.0 ** (step % 3),
            "searches": 1.0,
        }
        if step % 20 == 0:
            row["eval/nq/em"] = 0.1 + step / 100
        rows.append(row)
    return rows


def drawn_axes(monkeypatch, runs):
    """The figure that `plot_run` would have saved, and its axes."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: figures.append(self))
    report.plot_run(runs, "nowhere.png")
    return figures[0].axes, figures[0]


def test_every_name_drawn_is_in_the_glossary():
    assert all(described(name) for _, _, styles, _ in report.PANELS for name in styles)


def test_running_mean_looks_back_only():
    values = [0.0, 1.0, 4.0, -2.0, 10.0, 3.0]
    naive = []
    for i in range(len(values)):
        window = [values[j] for j in range(len(values)) if i - 3 < j <= i]
        naive.append(sum(window) / len(window))
    assert report.running_mean(values, 3) == pytest.approx(naive)
    assert report.running_mean([0.0] * 9 + [10.0])[-1] == pytest.approx(1.0)  # by hand: 10 / 10


def test_draws_raw_values_running_means_and_held_out_points(tmp_path, monkeypatch):
    rows = full_rows()
    axes, _ = drawn_axes(monkeypatch, [write_run(tmp_path / "a", rows)])
    reward = [row["reward/mean"] for row in rows]
    raw, smooth, held_out = axes[0].lines
    assert list(raw.get_ydata()) == reward and raw.get_linewidth() < smooth.get_linewidth()
    assert list(smooth.get_ydata()) == pytest.approx(report.running_mean(reward))
    assert list(held_out.get_xdata()) == [0, 21] and list(held_out.get_ydata()) == pytest.approx([0.1, 0.3])
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["reward", "EM nq"]
    assert len(axes[1].lines) == 4 and axes[4].get_yscale() == "log" and axes[3].get_yscale() == "linear"


def test_overlaid_runs_are_told_apart(tmp_path, monkeypatch):
    """Two runs with the same folder name used to be told apart by colour alone."""
    runs = [
        write_run(tmp_path / "seed0" / "grpo", full_rows()),
        write_run(tmp_path / "seed1" / "grpo", full_rows(0.2)),
    ]
    axes, figure = drawn_axes(monkeypatch, runs)
    assert [text.get_text() for text in figure.legends[0].get_texts()][:2] == ["seed0/grpo", "seed1/grpo"]
    first, second = (
        line for line in axes[0].lines if line.get_linestyle() == "-" and line.get_linewidth() > 1
    )
    assert first.get_color() == report.COLORS[0] and second.get_color() == report.COLORS[1]
    assert [b - a for a, b in zip(first.get_ydata(), second.get_ydata(), strict=True)] == pytest.approx(
        [0.2] * STEPS
    )


def test_writes_a_png_with_both_colours(tmp_path):
    runs = [write_run(tmp_path / "a", full_rows()), write_run(tmp_path / "b", full_rows(0.2))]
    report.plot_run(runs, tmp_path / "figure.png")
    pixels = (imread(tmp_path / "figure.png")[..., :3] * 255).round().astype(int)
    for color in report.COLORS[:2]:
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert (abs(pixels - wanted).sum(-1) == 0).sum() > 1000, color
    assert (abs(pixels - [int(report.COLORS[2][i : i + 2], 16) for i in (1, 3, 5)]).sum(-1) == 0).sum() == 0


def test_absent_names_and_a_first_step_are_tolerated(tmp_path, monkeypatch):
    axes, _ = drawn_axes(
        monkeypatch, [write_run(tmp_path / "a", [{"step": 0, "reward/mean": 0.25, "entropy": None}])]
    )
    # A line of one point shows nothing
    assert list(axes[0].lines[0].get_ydata()) == [0.25] and axes[0].lines[0].get_marker() == "o"
    assert [text.get_text() for text in axes[3].texts] == ["not logged"] and axes[4].get_yscale() == "linear"


def test_axes_do_not_blow_up_the_noise_of_a_quiet_run(tmp_path, monkeypatch):
    rows = [
        {"step": step, "entropy": 0.40 + step % 2 / 1000, "grad_norm": 0.4 + step % 2 / 1000}
        for step in range(STEPS)
    ]
    rows += [{"step": STEPS, "entropy": float("nan"), "grad_norm": float("inf")}]
    axes, _ = drawn_axes(monkeypatch, [write_run(tmp_path / "a", rows)])
    assert axes[3].get_ylim()[0] == 0 and axes[4].get_ylim() == pytest.approx((0.1, 1.0))
    assert max(axes[4].lines[0].get_xdata()) == STEPS - 1


def test_dollar_signs_are_no_formula(tmp_path):
    """Two of them used to set what stands between as a formula, or to end in matplotlib's ParseException."""
    run = write_run(tmp_path / "$\\frac{1 in $", [{"step": 0, "reward/mean": 0.1, "eval/a$b$/em": 0.5}])
    report.plot_run([run], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").exists() and report.literal("$5 or $6") == r"\$5 or \$6"


def test_half_written_last_line_is_left_out(tmp_path):
    run = write_run(tmp_path / "a", full_rows())
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 40, "rew')
    assert [row["step"] for row in report.read_metrics(run)] == list(range(STEPS))


def test_refusals_name_the_place_and_the_remedy(tmp_path, capsys):
    assert report.main([str(tmp_path / "nowhere")]) == 2
    assert "give the folder of a run" in capsys.readouterr().err
    run = write_run(tmp_path / "a", [{"step": 0}])
    (run / "metrics.jsonl").write_text('{"step": 0}\n{"step"\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2 is damaged"):
        report.read_metrics(run)
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="no rows yet"):
        report.read_metrics(run)
    with pytest.raises(ValueError, match="7 runs"):
        report.plot_run([run] * 7, tmp_path / "figure.png")


def test_command_writes_the_figure_into_the_first_run(tmp_path, capsys):
    runs = [write_run(tmp_path / "a", full_rows()), write_run(tmp_path / "b", full_rows())]
    assert report.main([str(run) for run in runs]) == 0
    assert (runs[0] / "figure.png").read_bytes().startswith(b"\x89PNG") and not (
        runs[1] / "figure.png"
    ).exists()
