"""An experiment's record -> one figure: curves of its arms or how they end, by world and learning rate."""

from collections.abc import Sequence
from itertools import cycle, product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from lld.experiment import intervals
from lld.experiment.outcomes import END, parse_curve
from lld.experiment.tables import groups
from lld.report.figure import COLORS, literal

# Imported by the functions that draw: a run does not need matplotlib
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ARM_COLORS = ("#000000", *COLORS, "#8C6D31")
LINE_STYLES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)))
CURVES = (
    ("curve_em", "exact match in training"),
    ("curve_entropy_wrong", "entropy of wrong responses (nats)"),
    ("curve_right", "log-likelihood of right responses"),
    ("curve_wrong", "log-likelihood of wrong responses"),
)
LLDS = "-llds"  # an arm so called is drawn beside the one without
ENDINGS = (
    ("em_end", f"exact match in training, last {END} steps"),
    ("held_out_end", "exact match on held-out questions"),
    ("entropy_wrong_end", "entropy of wrong responses (nats)"),
    ("right_end", "log-likelihood of right responses"),
)


def style_of(arm: str, arms: Sequence[str]) -> dict:
    """Colour and line style of an arm, different for up to 32 arms."""
    index = arms.index(arm)
    return {
        "color": ARM_COLORS[index % len(ARM_COLORS)],
        "linestyle": LINE_STYLES[index // len(ARM_COLORS) % len(LINE_STYLES)],
    }


def draw_arm(ax: "Axes", rows: Sequence[dict], name: str, style: dict) -> None:
    """The seeds' mean as a line, their range as a band, and a cross where a seed lost EM."""
    curves = [dict(parse_curve(row[name] or "")) for row in rows]
    steps = sorted(set().union(*curves))
    at_step = [[curve[step] for curve in curves if step in curve] for step in steps]
    ax.plot(steps, [fmean(values) for values in at_step], linewidth=1.5, **style)
    if len(curves) > 1:
        low, high = [min(values) for values in at_step], [max(values) for values in at_step]
        ax.fill_between(steps, low, high, color=style["color"], alpha=0.12, linewidth=0)
    if name != "curve_em":
        return
    for row, curve in zip(rows, curves, strict=True):
        if row["lost_step"] is not None and curve:
            nearest = min(curve, key=lambda step: abs(step - row["lost_step"]))
            ax.plot([nearest], [curve[nearest]], "X", color=style["color"], markersize=6, zorder=4)


def dress(ax: "Axes", title: str) -> None:
    ax.set_title(title, fontsize=9, loc="left")
    ax.tick_params(labelsize=8)
    ax.grid(color="#e6e6e6", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def add_legend(figure: "Figure", handles: list) -> None:
    figure.legend(handles=handles, loc="outside upper left", ncols=8, frameon=False, fontsize=9)


def plot_curves(drawn: Sequence[dict], figure_arms: dict[str, str]) -> "Figure":
    """A row for each world and learning rate that most of the arms have, a column for each of CURVES."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    arms = list(figure_arms)
    lines = groups(drawn, "world", "rate")
    num_arms = {place: len({row["arm"] for row in same}) for place, same in lines.items()}
    lines = {place: same for place, same in lines.items() if num_arms[place] == max(num_arms.values())}
    figure = Figure(figsize=(13.2, 2.7 * len(lines) + 0.6), dpi=130, layout="constrained")
    axes = figure.subplots(len(lines), len(CURVES), squeeze=False, sharey="col", sharex=True)
    for line, ((world, rate), same) in enumerate(lines.items()):
        for ax, (name, unit) in zip(axes[line], CURVES, strict=True):
            for arm in arms:
                of_arm = [row for row in same if row["arm"] == arm and row.get(name)]
                if of_arm:
                    draw_arm(ax, of_arm, name, style_of(arm, arms))
            dress(ax, unit if len(lines) == 1 else f"{unit}; {literal(world)}, lr {rate}")
    for ax in axes[-1]:
        ax.set_xlabel("step", fontsize=8)
    handles = [Line2D([], [], label=literal(figure_arms[arm]), **style_of(arm, arms)) for arm in arms]
    handles.append(Line2D([], [], marker="X", linestyle="", color="#555", label="EM below 3/4 of its best"))
    add_legend(figure, handles)
    return figure


def plot_endings(drawn: Sequence[dict], figure_arms: dict[str, str]) -> "Figure":
    """A line for each arm, a column for each of ENDINGS: a small dot for each seed, a large one for their
    mean, a bar for its 95 % interval; a colour for each world and learning rate, dashed where its first arm
    has its mean. `ARM-llds` lies on ARM's line, hollow."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    arms, lines = list(figure_arms), groups(drawn, "world", "rate")
    figure = Figure(figsize=(13.2, 0.3 * len(arms) + 1.3), dpi=130, layout="constrained")
    axes = figure.subplots(1, len(ENDINGS), sharey=True)
    handles = []
    for (world, rate), color in zip(lines, cycle(ARM_COLORS[1:]), strict=False):
        label = f"{literal(world)}, lr {rate}"
        handles.append(Line2D([], [], marker="o", linestyle="", color=color, label=label))
        for (place, arm), hollow in product(enumerate(arms), (False, True)):
            of_arm = [row for row in lines[world, rate] if row["arm"] == arm + LLDS * hollow]
            height = place + 0.7 * ((len(handles) - 0.75 + 0.5 * hollow) / len(lines) - 0.5)
            for ax, (name, _) in zip(axes, ENDINGS, strict=True):
                values = [row[name] for row in of_arm if row.get(name) is not None]
                if values:
                    draw_ending(ax, values, height, color, hollow)
                    if place == 0 and not hollow:
                        ax.axvline(fmean(values), color=color, linestyle=(0, (4, 3)), linewidth=0.8, zorder=1)
    if any(row["arm"].endswith(LLDS) for row in drawn):
        handles.append(Line2D([], [], marker="o", linestyle="", color="#555", mfc="white", label="with LLDS"))
    for ax, (_, unit) in zip(axes, ENDINGS, strict=True):
        dress(ax, unit)
        ax.set_yticks(range(len(arms)), [literal(label) for label in figure_arms.values()], fontsize=8)
        ax.set_ylim(len(arms) - 0.5, -0.5)
    add_legend(figure, handles)
    return figure


def draw_ending(ax: "Axes", values: Sequence[float], height: float, color: str, hollow: bool) -> None:
    mean, half = intervals.mean_interval(values)
    fill = {"mfc": "white"} if hollow else {}
    ax.plot(values, [height] * len(values), ".", color=color, alpha=0.35, markersize=4, zorder=2)
    ax.errorbar(mean, height, xerr=half, fmt="o", color=color, ms=4.5, linewidth=1.3, zorder=3, **fill)


# The values of an experiment's `figure`
FIGURES = {"curves": plot_curves, "endings": plot_endings}


def plot_experiment(rows: Sequence[dict], figure_arms: dict[str, str], path: str | Path, kind: str) -> None:
    """Draws the played ones of `figure_arms` (arm -> label) into a PNG; `kind`: a key of FIGURES."""
    beside = {arm + LLDS: arm for arm in figure_arms} if kind == "endings" else {}
    drawn = [row for row in rows if row["arm"] in figure_arms or row["arm"] in beside]
    found = {arm for row in drawn for arm in (row["arm"], beside.get(row["arm"]))}
    played = {arm: label for arm, label in figure_arms.items() if arm in found}
    if not played:
        raise ValueError(f"no run of the arms to draw is in the record ({', '.join(figure_arms)})")
    FIGURES[kind](drawn, played).savefig(path)
