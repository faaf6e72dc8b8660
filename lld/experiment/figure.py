"""An experiment's runs -> one figure: reward and displacement at each learning rate, EM against the rate."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from lld.experiment.outcomes import DISPLACED, groups, mean_interval
from lld.record.runs import WINDOW, running_mean, series
from lld.report.figure import COLORS, MARKERS, literal

# Imported by the functions that draw: a run does not need matplotlib
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure
    from matplotlib.lines import Line2D

ARM_COLORS = ("#000000", *COLORS, "#8C6D31")  # the first arm, usually plain GRPO, in black
DISPLACEMENT_TICKS = (-10, -1, -0.1, -0.03, -0.01, 0, 0.01, 0.03, 0.1, 1)
LINE_STYLES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)))
CURVES = (
    ("reward/mean", "training reward"),
    ("displacement/correct", "displacement of correct\nresponses (nats/token)"),
)
Curve = tuple[dict, Sequence[dict]]  # a run of lld.experiment.outcomes and its rows


def smooth_by_step(rows: Sequence[dict], name: str) -> dict[int, float]:
    """Step -> mean of `name` over the last 10 steps that have it, once there are 10."""
    steps, values = series(rows, name)
    return dict(list(zip(steps, running_mean(values), strict=True))[WINDOW - 1 :])


def style_of(arm: str, arms: Sequence[str]) -> dict:
    """Colour and line style of an arm, different for up to 32 arms."""
    index = arms.index(arm)
    return {
        "color": ARM_COLORS[index % len(ARM_COLORS)],
        "linestyle": LINE_STYLES[index // len(ARM_COLORS) % len(LINE_STYLES)],
    }


def draw_curves(ax: "Axes", curves: Sequence[Curve], name: str, style: dict) -> None:
    """The seeds' mean as a line, their range as a band, and a cross where a seed collapsed."""
    smoothed = [smooth_by_step(rows, name) for _, rows in curves]
    steps = sorted(set().union(*smoothed))
    at_step = [[values[step] for values in smoothed if step in values] for step in steps]
    ax.plot(steps, list(map(fmean, at_step)), linewidth=1.5, **style)
    if len(curves) > 1:
        ax.fill_between(
            steps,
            list(map(min, at_step)),
            list(map(max, at_step)),
            color=style["color"],
            alpha=0.12,
            linewidth=0,
        )
    for (run, _), values in zip(curves, smoothed, strict=True):
        if run["collapse_step"] in values:
            ax.plot(
                [run["collapse_step"]],
                [values[run["collapse_step"]]],
                "X",
                color=style["color"],
                markersize=7,
                markeredgecolor="white",
                markeredgewidth=0.7,
                zorder=4,
            )


def draw_rates(
    ax: "Axes", runs: Sequence[dict], name: str, arms: Sequence[str], rates: Sequence[str]
) -> None:
    """`name` against the learning rate: mean and 95 % interval of each arm, side by side; seeds as dots."""
    for (arm,), of_arm in groups(runs, "arm").items():
        shift = 0.5 * (arms.index(arm) - (len(arms) - 1) / 2) / max(len(arms), 1)
        points = [
            (rates.index(rate) + shift, [run[name] for run in same if run[name] is not None])
            for (rate,), same in groups(of_arm, "rate").items()
        ]
        points = [(x, values) for x, values in points if values]
        intervals = [mean_interval(values) for _, values in points]
        style = style_of(arm, arms)
        for x, values in points:
            ax.plot([x] * len(values), values, ".", color=style["color"], markersize=3, alpha=0.5)
        marker = MARKERS[arms.index(arm) % len(MARKERS)]
        ax.errorbar(
            [x for x, _ in points],
            [mean for mean, _ in intervals],
            yerr=[half or 0.0 for _, half in intervals],
            marker=marker,
            markersize=5,
            linewidth=1.2,
            elinewidth=0.8,
            **style,
        )
    ax.set_xticks(range(len(rates)), rates)
    ax.set_xlim(-0.5, len(rates) - 0.5)
    ax.set_ylim(-0.02, 1.02)
    ax.set_xlabel("learning rate", fontsize=8)


def label_axes(ax: "Axes", title: str, unit: str) -> None:
    ax.set_title(title, fontsize=9, loc="left")
    ax.set_ylabel(unit, fontsize=8)
    ax.tick_params(labelsize=7.5)
    ax.grid(color="#e6e6e6", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def draw_world(
    figure: "SubFigure", world: str, curves: Sequence[Curve], arms: Sequence[str], curve_arms: Sequence[str]
) -> None:
    """A column of panels per learning rate, reward above displacement; then one of EM against the rate."""
    rates = sorted({run["rate"] for run, _ in curves}, key=float)
    axes = figure.subplots(
        2, len(rates) + 1, squeeze=False, width_ratios=[1] * len(rates) + [max(1.0, 0.42 * len(rates))]
    )
    for column, rate in enumerate(rates):
        of_rate = [curve for curve in curves if curve[0]["rate"] == rate]
        for ax, (name, _) in zip(axes[:, column], CURVES, strict=True):
            for arm in curve_arms:
                same = [(run, rows) for run, rows in of_rate if run["arm"] == arm]
                same = [(run, rows) for run, rows in same if smooth_by_step(rows, name)]
                if same:
                    draw_curves(ax, same, name, style_of(arm, arms))
            if not ax.lines:
                ax.text(0.5, 0.5, "not run", transform=ax.transAxes, ha="center", color="#888", fontsize=8)
            ax.set_xlim(0, max(run["steps"] for run, _ in curves))
        label_axes(axes[0][column], f"{literal(world)}, lr {rate}", CURVES[0][1] if column == 0 else "")
        label_axes(axes[1][column], "", CURVES[1][1] if column == 0 else "")
        axes[0][column].tick_params(labelbottom=False, labelleft=column == 0)
        axes[1][column].tick_params(labelleft=column == 0)
        axes[1][column].set_xlabel("step", fontsize=8)
    set_limits(axes[:, :-1], curves)
    runs = [run for run, _ in curves]
    for row, (name, title) in enumerate((("em_final", "final held-out EM"), ("em_best", "best held-out EM"))):
        draw_rates(axes[row][-1], runs, name, arms, rates)
        label_axes(axes[row][-1], title, "EM (dots: seeds; bars: 95 %)")


def set_limits(axes: Sequence[Sequence["Axes"]], curves: Sequence[Curve]) -> None:
    """One vertical scale for all panels of the reward (first row), and one for displacement (second row)."""
    rewards, displacements = (
        [value for _, rows in curves for value in smooth_by_step(rows, name).values()] for name, _ in CURVES
    )
    top = max(rewards, default=1.0)
    low = min(1.3 * min(displacements, default=0.0), 3 * DISPLACED)
    high = max(1.3 * max(displacements, default=0.0), -1.5 * DISPLACED)
    for ax in axes[0]:
        ax.set_ylim(0, 1.08 * top or 1)
    for ax in axes[1]:
        ax.axhline(0, color="#888", linewidth=0.8, zorder=1)
        ax.axhline(DISPLACED, color="#888", linewidth=0.6, linestyle=":", zorder=1)
        # Linear up to 0.01 and logarithmic beyond: 0.01 is significant, and a collapsed run falls by 1.
        ax.set_yscale("symlog", linthresh=-DISPLACED)
        ax.set_ylim(low, high)
        ax.set_yticks([tick for tick in DISPLACEMENT_TICKS if low <= tick <= high])
        ax.yaxis.set_major_formatter("{x:g}")


def legend_entries(arms: Sequence[str]) -> list["Line2D"]:
    """The figure's legend: an entry for each arm, and the cross."""
    from matplotlib.lines import Line2D

    entries = []
    for index, arm in enumerate(arms):
        marker = MARKERS[index % len(MARKERS)]
        entries.append(
            Line2D([], [], marker=marker, linewidth=1.6, label=literal(arm), **style_of(arm, arms))
        )
    cross = {"marker": "X", "linestyle": "", "color": "#555", "markeredgecolor": "white", "markersize": 8}
    return [*entries, Line2D([], [], label="reward collapsed", **cross)]


def plot_experiment(curves: Sequence[Curve], curve_arms: Sequence[str], path: str | Path) -> None:
    """Draws the figure into a PNG.

    For each world: the curves of `curve_arms` at each learning rate, and final and best EM of all arms.
    """
    from matplotlib.figure import Figure

    runs = [run for run, _ in curves]
    arms = list(dict.fromkeys(arm for (_, arm) in groups(runs, "world", "arm")))
    by_world = {
        world: [curve for curve in curves if curve[0]["world"] == world] for (world,) in groups(runs, "world")
    }
    num_columns = max(len({run["rate"] for run, _ in some}) for some in by_world.values())
    width = 2.6 * num_columns + 4.4
    figure = Figure(figsize=(width, 0.8 + 4.6 * len(by_world)), dpi=130, layout="constrained")
    rows = figure.subfigures(len(by_world), 1, squeeze=False)[:, 0]
    for row, (world, some) in zip(rows, by_world.items(), strict=True):
        draw_world(row, world, some, arms, [arm for arm in curve_arms if arm in arms])
    columns = max(2, int(width / 1.5))
    figure.legend(
        handles=legend_entries(arms), loc="outside upper left", ncols=columns, frameon=False, fontsize=8.5
    )
    figure.supxlabel(
        f"Curves: {WINDOW}-step mean, line over seeds, band from lowest to highest seed.\nDotted: "
        f"{DISPLACED} nats/token; beyond ±{-DISPLACED} that axis is logarithmic.",
        x=0.01,
        ha="left",
        fontsize=8,
    )
    figure.savefig(path)
