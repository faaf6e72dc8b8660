"""A run folder -> figures.

    python -m lld.report RUN [RUN ...]     # writes RUN/figure.png, of the first run, with all of them overlaid
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe & Ito 2008, told apart by colour-blind readers
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WINDOW = 10  # steps of the running mean

# (title, unit, name -> line style, logarithmic). Names are those of metrics.GLOSSARY.
PANELS = (
    ("Reward, and exact match on held-out questions", "score", {"reward/mean": "-"}, False),
    ("Likelihood of correct and incorrect responses", "mean log-probability per token (nats)", {"likelihood/correct_new": "-", "likelihood/incorrect_new": "--"}, False),
    ("Displacement of correct responses", "change of log-probability per token (nats)", {"displacement/correct": "-"}, False),
    ("Entropy of the next token", "nats", {"entropy": "-"}, False),
    ("Gradient norm before clipping", "norm (log scale)", {"grad_norm": "-"}, True),
    ("Searches", "per question", {"searches": "-"}, False),
)
STYLE_LABELS = {"likelihood/correct_new": "correct", "likelihood/incorrect_new": "incorrect"}


def read_metrics(run_dir: str | Path) -> list[dict]:
    """The rows of RUN/metrics.jsonl in order of steps; a last line still being written is left out."""
    path = Path(run_dir) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"no {path}: give the folder of a run (option run.dir)")
    rows = []
    for number, line in enumerate(path.read_text().split("\n")[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} line {number} is damaged ({error}): delete the line") from None
    if not rows:
        raise ValueError(f"{path} has no rows yet: wait for the first step")
    return rows


def series(rows: Sequence[dict], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of the rows that have a finite number under `name`."""
    pairs = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), (int, float)) and math.isfinite(row[name])]
    return [step for step, _ in pairs], [value for _, value in pairs]


def running_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """The mean of each value and the up to `window` - 1 before it: nothing from the future, so a collapse is not drawn early."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / len(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def _labels(run_dirs: Sequence[Path]) -> list[str]:
    """The folders' names, with as many of their parents as tell them apart."""
    parts = [path.resolve().parts for path in run_dirs]
    depth = 1
    while depth < max(map(len, parts)) and len({path[-depth:] for path in parts}) < len(set(parts)):
        depth += 1
    return ["/".join(path[-depth:]) for path in parts]


def _draw_line(ax: Axes, steps: list[int], values: list[float], color: str, style: str) -> None:
    if len(values) > 2 * WINDOW:
        ax.plot(steps, values, color=color, linewidth=0.6, alpha=0.3)
        values = running_mean(values)
    alone = {"marker": "o", "markersize": 3} if len(values) == 1 else {}
    ax.plot(steps, values, color=color, linewidth=1.6, linestyle=style, **alone)


def _draw_held_out(ax: Axes, runs: Sequence[list[dict]]) -> list[Line2D]:
    """Points of eval/<benchmark>/em, a marker a benchmark; returns the legend's entries."""
    names = sorted({name for rows in runs for row in rows for name in row if name.startswith("eval/") and name.endswith("/em")})
    for color, rows in zip(COLORS, runs):
        for marker, name in zip(MARKERS, names):
            steps, values = series(rows, name)
            ax.plot(steps, values, color=color, marker=marker, markersize=5.5, linestyle=":", linewidth=0.8, markeredgecolor="white", markeredgewidth=0.6, zorder=3, clip_on=False)
    return [Line2D([], [], color="#555", marker=marker, linestyle=":", linewidth=0.8, markersize=5, label=f"EM {name.split('/')[1]}") for marker, name in zip(MARKERS, names)]


def plot_run(run_dirs: Sequence[str | Path], path: str | Path) -> None:
    """Draws the runs' health over training, overlaid, into one PNG: reward, likelihoods, displacement, entropy, gradient, searches.

    Thin lines are the steps' own values, thick ones the mean of the last 10. Names a run did not log leave no line.
    Raises ValueError for a folder without metrics and for more runs than there are colours.
    """
    if not 1 <= len(run_dirs) <= len(COLORS):
        raise ValueError(f"{len(run_dirs)} runs: give 1 to {len(COLORS)}, more cannot be told apart in one figure")
    runs = [read_metrics(run_dir) for run_dir in run_dirs]
    figure = Figure(figsize=(14, 7.2), dpi=130, layout="constrained")
    for ax, (title, unit, styles, logarithmic) in zip(figure.subplots(2, 3, sharex=True).flat, PANELS):
        entries = []
        for name, style in styles.items():
            drawn = [series(rows, name) for rows in runs]
            for color, (steps, values) in zip(COLORS, drawn):
                if values:
                    _draw_line(ax, steps, values, color, style)
            if name in STYLE_LABELS and any(values for _, values in drawn):
                entries.append(Line2D([], [], color="#555", linestyle=style, label=STYLE_LABELS[name]))
        if "reward/mean" in styles:
            entries = [Line2D([], [], color="#555", label="reward")] + _draw_held_out(ax, runs)
        if "displacement/correct" in styles:
            ax.axhline(0, color="#888", linewidth=0.8, zorder=1)
        if not ax.lines:
            ax.text(0.5, 0.5, "not logged", transform=ax.transAxes, ha="center", color="#888")
        # Whole decades, or from 0: on a tighter axis the noise of a quiet run would fill the panel.
        if logarithmic and ax.lines and ax.dataLim.y1 > 0:
            ax.set_yscale("log")
            low, high = math.log10(ax.dataLim.minposy), math.log10(ax.dataLim.y1)
            ax.set_ylim(10.0 ** math.floor(low), 10.0 ** max(math.ceil(high), math.floor(low) + 1))
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter(NullFormatter())
        elif ax.lines and ax.dataLim.y0 >= 0:
            ax.set_ylim(bottom=0)
        if len(entries) > 1:
            ax.legend(handles=entries, fontsize=8, frameon=False)
        ax.set_title(title, fontsize=10, loc="left")
        ax.set_ylabel(unit, fontsize=9)
        ax.tick_params(which="both", labelsize=8)
        ax.grid(color="#e6e6e6", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in figure.axes[-3:]:
        ax.set_xlabel("step", fontsize=9)
    labels = [Line2D([], [], color=color, linewidth=2.5, label=label) for color, label in zip(COLORS, _labels([Path(run_dir) for run_dir in run_dirs]))]
    labels.append(Line2D([], [], color="#555", linewidth=0.6, alpha=0.6, label=f"each step (bold: mean of the last {WINDOW})"))
    figure.legend(handles=labels, loc="outside upper left", ncols=len(labels), frameon=False, fontsize=9)
    figure.align_ylabels()
    figure.savefig(path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="lld.report", description="Draws RUN/figure.png from the metrics of one or more runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders (option run.dir)")
    runs = parser.parse_args(argv).runs
    try:
        plot_run(runs, runs[0] / "figure.png")
    except ValueError as error:
        print(f"lld.report: {error}", file=sys.stderr)
        return 2
    print(f"written to {runs[0] / 'figure.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
