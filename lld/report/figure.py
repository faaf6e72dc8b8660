"""Run folders -> RUN/figure.png and RUN/report.html of the first run, with all of them overlaid.

python -m lld.report RUN [RUN ...]
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lld.record.courses import held_out_scores
from lld.record.runs import WINDOW, labels, printable, read_metrics, read_options, running_mean, series
from lld.report.page import TRAJECTORIES_MB, write_page

# Imported by the functions that draw: training needs no matplotlib before its end.
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

# Okabe & Ito 2008: distinguishable for colour-blind readers.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

# (title, unit, name -> line style, logarithmic). The names are those of glossary.GLOSSARY.
PANELS = (
    ("Reward, and exact match on held-out questions", "score", {"reward/mean": "-"}, False),
    (
        "Likelihood of correct and incorrect responses",
        "mean log-probability per token (nats)",
        {"likelihood/correct_new": "-", "likelihood/incorrect_new": "--"},
        False,
    ),
    (
        "Displacement of correct responses",
        "change of log-probability per token (nats)",
        {"displacement/correct": "-"},
        False,
    ),
    ("Entropy of the next token", "nats", {"entropy": "-", "entropy/incorrect": "--"}, False),
    ("Gradient norm before clipping", "norm (log scale)", {"grad_norm": "-"}, True),
    ("Searches", "per question", {"searches": "-"}, False),
)
STYLE_LABELS = {
    "likelihood/correct_new": "correct",
    "likelihood/incorrect_new": "incorrect",
    "entropy": "all",
    "entropy/incorrect": "incorrect",
}


def literal(text: str) -> str:
    """`text` with its dollar signs escaped: matplotlib would read a formula between two of them."""
    return text.replace("$", r"\$")


def gray_line(**style) -> "Line2D":
    """A grey legend entry that stands for no run in particular."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color="#555", **style)


def _draw_line(ax: "Axes", steps: list[int], values: list[float], color: str, style: str) -> None:
    if len(values) > 2 * WINDOW:
        ax.plot(steps, values, color=color, linewidth=0.6, alpha=0.3)
        values = running_mean(values)
    marker = {"marker": "o", "markersize": 3} if len(values) == 1 else {}
    ax.plot(steps, values, color=color, linewidth=1.6, linestyle=style, **marker)


def _draw_held_out(ax: "Axes", runs: Sequence[list[dict]], options: Sequence[dict]) -> list["Line2D"]:
    """Exact match after so many steps, a marker for each benchmark; returns the legend's entries."""
    found = [held_out_scores(rows, some) for rows, some in zip(runs, options, strict=True)]
    names = sorted({name for scores in found for name in scores})
    line = {"linestyle": ":", "linewidth": 0.8}
    point = {"markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.6}
    # There are at most as many runs as colours. Benchmarks beyond the markers are left out.
    for color, scores in zip(COLORS, found, strict=False):
        for marker, name in zip(MARKERS, names, strict=False):
            steps, values = [at for at, _ in scores.get(name, ())], [em for _, em in scores.get(name, ())]
            ax.plot(steps, values, color=color, marker=marker, zorder=3, clip_on=False, **line, **point)
    return [
        gray_line(marker=marker, markersize=5, label=literal(f"EM {name}"), **line)
        for marker, name in zip(MARKERS, names, strict=False)
    ]


def _draw_panel(
    ax: "Axes", runs: Sequence[list[dict]], options: Sequence[dict], styles: dict[str, str]
) -> None:
    """Draws the lines of all runs, with a legend if a run has more than one kind of line."""
    entries = []
    for name, style in styles.items():
        drawn = [series(rows, name) for rows in runs]
        for color, (steps, values) in zip(COLORS, drawn, strict=False):
            if values:
                _draw_line(ax, steps, values, color, style)
        if name in STYLE_LABELS and any(values for _, values in drawn):
            entries.append(gray_line(linestyle=style, label=STYLE_LABELS[name]))
    if "reward/mean" in styles:
        entries = [gray_line(label="reward"), *_draw_held_out(ax, runs, options)]
    if "displacement/correct" in styles:
        ax.axhline(0, color="#888", linewidth=0.8, zorder=1)
    if not ax.lines:
        ax.text(0.5, 0.5, "not logged", transform=ax.transAxes, ha="center", color="#888")
    if len(entries) > 1:
        ax.legend(handles=entries, fontsize=8, frameon=False)


def _set_scale(ax: "Axes", logarithmic: bool) -> None:
    """Sets the y axis to whole decades, or to start at 0; a tighter one would magnify the noise."""
    from matplotlib.ticker import NullFormatter

    if logarithmic and ax.lines and ax.dataLim.y1 > 0:
        ax.set_yscale("log")
        low = math.floor(math.log10(ax.dataLim.minposy))
        high = math.ceil(math.log10(ax.dataLim.y1))
        ax.set_ylim(10.0**low, 10.0 ** max(high, low + 1))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(NullFormatter())
    elif ax.lines and ax.dataLim.y0 >= 0:
        ax.set_ylim(bottom=0)


def _label_axes(ax: "Axes", title: str, unit: str) -> None:
    ax.set_title(title, fontsize=10, loc="left")
    ax.set_ylabel(unit, fontsize=9)
    ax.tick_params(which="both", labelsize=8)
    ax.grid(color="#e6e6e6", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def plot_run(run_dirs: Sequence[str | Path], path: str | Path) -> None:
    """Draws the runs, overlaid, into one PNG: reward, likelihoods, displacement, entropy, gradient, searches.

    Thin lines are the values of single steps, thick ones the mean of the last 10. A metric that a run did not
    log has no line. Raises ValueError for a folder without metrics and for more runs than colours.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    if not 1 <= len(run_dirs) <= len(COLORS):
        raise ValueError(
            f"{len(run_dirs)} runs: give 1 to {len(COLORS)}, more cannot be told apart in one figure"
        )
    runs = [read_metrics(run_dir) for run_dir in run_dirs]
    options = [read_options(run_dir) for run_dir in run_dirs]
    figure = Figure(figsize=(14, 7.2), dpi=130, layout="constrained")
    axes = figure.subplots(2, 3, sharex=True)
    for ax, (title, unit, styles, logarithmic) in zip(axes.flat, PANELS, strict=True):
        _draw_panel(ax, runs, options, styles)
        _set_scale(ax, logarithmic)
        _label_axes(ax, title, unit)
    for ax in axes[-1]:
        ax.set_xlabel("step", fontsize=9)
    names = labels([Path(run_dir) for run_dir in run_dirs])
    entries = [
        Line2D([], [], color=color, linewidth=2.5, label=literal(name))
        for color, name in zip(COLORS, names, strict=False)
    ]
    thin = f"each step (bold: mean of the last {WINDOW})"
    entries.append(gray_line(linewidth=0.6, alpha=0.6, label=thin))
    figure.legend(handles=entries, loc="outside upper left", ncols=len(entries), frameon=False, fontsize=9)
    figure.align_ylabels()
    # In a folder from elsewhere the file may be a link: do not write through it.
    Path(path).unlink(missing_ok=True)
    figure.savefig(path)


def write_report(run_dirs: Sequence[Path], folder: Path) -> str:
    """Writes FOLDER/report.html and figure.png, each under a temporary name first; returns a message.

    A failure is returned as a message too, because it must not end the run.
    """
    try:
        for draw, name in ((plot_run, "figure.png"), (write_page, "report.html")):
            aside = folder / f"partial-{name}"
            draw(run_dirs, aside)
            os.replace(aside, folder / name)
    except Exception as error:
        return (
            f"no report could be drawn ({type(error).__name__}: {error}); python -m lld.report {folder} "
            "tries again"
        )
    return f"{folder / 'report.html'} and {folder / 'figure.png'} show the run"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lld.report",
        description="Draws RUN/report.html, one self-contained page, and RUN/figure.png from the logs of "
        "one or more runs.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run folders (option run.dir); the first receives the files",
    )
    parser.add_argument("--to", type=Path, help="folder that receives the files instead")
    parser.add_argument(
        "--trajectories-mb",
        type=float,
        default=TRAJECTORIES_MB,
        help="room on the page for trajectories; steps in between are left out beyond it (default "
        f"{TRAJECTORIES_MB})",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Writes the page and the figure; returns the exit code.

    0; 2 for an error of the user; 7 if a file cannot be written (full disk, permissions); 130 for Ctrl-C.
    """
    args = make_parser().parse_intermixed_args(argv)
    folder = args.to or args.runs[0]
    page, figure = folder / "report.html", folder / "figure.png"
    try:
        if args.to is not None:
            folder.mkdir(parents=True, exist_ok=True)
        write_page(args.runs, page, args.trajectories_mb)
        if len(args.runs) <= len(COLORS):
            plot_run(args.runs, figure)
            print(f"written to {page} and {figure}")
        else:
            print(f"written to {page} (no figure.png: it holds at most {len(COLORS)} runs)")
    except KeyboardInterrupt:
        return 130
    except ValueError as error:
        print(f"lld.report: {printable(error)}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"lld.report: {printable(error)}: make room or mend the permissions, or choose another folder "
            "with --to",
            file=sys.stderr,
        )
        return 7
    return 0
