"""An experiment's record -> one figure: the curves of its arms at each world and learning rate."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from lld.experiment.outcomes import parse_curve
from lld.experiment.tables import groups
from lld.report.figure import COLORS, literal

# Imported by the functions that draw: a run does not need matplotlib
if TYPE_CHECKING:
    from matplotlib.axes import Axes

ARM_COLORS = ("#000000", *COLORS, "#8C6D31")
LINE_STYLES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)))
CURVES = (
    ("curve_em", "exact match in training"),
    ("curve_entropy_wrong", "entropy of wrong responses (nats)"),
    ("curve_right", "log-likelihood of right responses"),
    ("curve_wrong", "log-likelihood of wrong responses"),
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


def plot_experiment(rows: Sequence[dict], figure_arms: dict[str, str], path: str | Path) -> None:
    """Draws the figure into a PNG: a row for each world and learning rate that most of the arms have, a
    column for each of CURVES. figure_arms: the arms to draw -> their labels."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    drawn = [row for row in rows if row["arm"] in figure_arms]
    arms = [arm for arm in figure_arms if any(row["arm"] == arm for row in drawn)]
    if not arms:
        raise ValueError(f"no run of the arms to draw is in the record ({', '.join(figure_arms)})")
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
            title = unit if len(lines) == 1 else f"{unit}; {literal(world)}, lr {rate}"
            ax.set_title(title, fontsize=9, loc="left")
            ax.tick_params(labelsize=8)
            ax.grid(color="#e6e6e6", linewidth=0.6)
            ax.spines[["top", "right"]].set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel("step", fontsize=8)
    handles = [Line2D([], [], label=literal(figure_arms[arm]), **style_of(arm, arms)) for arm in arms]
    handles.append(Line2D([], [], marker="X", linestyle="", color="#555", label="EM below 3/4 of its best"))
    figure.legend(handles=handles, loc="outside upper left", ncols=8, frameon=False, fontsize=9)
    figure.savefig(path)
