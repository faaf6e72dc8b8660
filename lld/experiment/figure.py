"""An experiment's record -> one figure: curves of its arms or how they end, by world and learning rate."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from lld.experiment import intervals
from lld.experiment.outcomes import END, parse_curve
from lld.experiment.tables import EXPLODED, LLDS, groups, has_lost
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


def end(name: str, row: dict) -> float | None:
    return row.get(f"{name}_end")


def gain(name: str, row: dict) -> float | None:
    """End minus start: what is measured over the kept ids has another start than the rest."""
    both = row.get(f"{name}_end"), row.get(f"{name}_start")
    return None if None in both else both[0] - both[1]


def growth(name: str, row: dict) -> float | None:
    both = row.get(f"{name}_end"), row.get(f"{name}_start")
    return both[0] / both[1] if None not in both and both[1] > 0 else None


ENDINGS = (
    ("exact match on held-out questions", partial(end, "held_out")),
    (f"exact match in training, last {END} steps", partial(end, "em")),
    ("entropy of wrong responses, end / start", partial(growth, "entropy_wrong")),
    ("right log-likelihood, end - start (nats)", partial(gain, "right")),
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


def plot_curves(drawn: Sequence[dict], parts: dict[str, dict[str, str]]) -> "Figure":
    """A row for each world and learning rate that most of the arms have, a column for each of CURVES."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    labels = {arm: label for part in parts.values() for arm, label in part.items()}
    arms = list(labels)
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
    handles = [Line2D([], [], label=literal(labels[arm]), **style_of(arm, arms)) for arm in arms]
    handles.append(Line2D([], [], marker="X", linestyle="", color="#555", label="EM below 3/4 of its best"))
    add_legend(figure, handles)
    return figure


def plot_endings(drawn: Sequence[dict], parts: dict[str, dict[str, str]]) -> "Figure":
    """A line for each arm under its heading, a column for each of ENDINGS, a colour for each world and rate.

    A dot is a seed (a cross: it lost EM), a circle their mean, a bar its 95 % interval, from three seeds on.
    `ARM-llds` lies on ARM's line, hollow, joined to it. Dashed: the mean of the first arm; dotted: above it
    entropy counts as exploded.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    places = [place for head, part in parts.items() for place in [head, *part.items()] if place]
    lines, first = groups(drawn, "world", "rate"), next(iter(next(iter(parts.values()))))
    figure = Figure(figsize=(13.2, 0.3 * len(places) + 1.3), dpi=130, layout="constrained")
    axes = figure.subplots(1, len(ENDINGS), sharey=True)
    handles = []
    for number, ((world, rate), color) in enumerate(zip(lines, cycle(ARM_COLORS[1:]), strict=False)):
        label = literal(world if len({rate for _, rate in lines}) == 1 else f"{world}, lr {rate}")
        handles.append(Line2D([], [], marker="o", linestyle="", color=color, label=label))
        for height, (arm, _) in ((i, place) for i, place in enumerate(places) if isinstance(place, tuple)):
            height += 0.8 * ((number + 0.25) / len(lines) - 0.5)
            both = [[row for row in lines[world, rate] if row["arm"] == arm + end] for end in ("", LLDS)]
            for ax, (_, value) in zip(axes, ENDINGS, strict=True):
                means = [
                    draw_ending(ax, rows, value, height + 0.4 / len(lines) * hollow, color, bool(hollow))
                    for hollow, rows in enumerate(both)
                ]
                if None not in means:
                    ax.plot(means, [height, height + 0.4 / len(lines)], color=color, linewidth=0.8, zorder=1)
                if arm == first and means[0] is not None:
                    ax.axvline(means[0], color=color, linestyle=(0, (4, 3)), linewidth=0.8, zorder=1)
    if any(row["arm"].endswith(LLDS) for row in drawn):
        handles.append(Line2D([], [], marker="o", linestyle="", color="#555", mfc="white", label="with LLDS"))
    handles.append(Line2D([], [], marker="x", linestyle="", color="#555", label="a seed that lost EM"))
    label_endings(axes, places)
    add_legend(figure, handles)
    return figure


def label_endings(axes: Sequence["Axes"], places: Sequence[str | tuple[str, str]]) -> None:
    """Names the columns and the lines, which are headings and (arm, label)."""
    for ax, (unit, value) in zip(axes, ENDINGS, strict=True):
        dress(ax, unit)
        names = [literal(place if isinstance(place, str) else place[1]) for place in places]
        ax.set_yticks(range(len(places)), names, fontsize=8)
        ax.set_ylim(len(places) - 0.5, -0.5)
        if value.func is growth:
            ax.axvline(EXPLODED, color="#555", linestyle=(0, (1, 2)), linewidth=1, zorder=1)
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter("{x:g}")
    for label, place in zip(axes[0].get_yticklabels(), places, strict=True):
        label.set_fontweight("bold" if isinstance(place, str) else "normal")


def draw_ending(
    ax: "Axes",
    rows: Sequence[dict],
    value: Callable[[dict], float | None],
    height: float,
    color: str,
    hollow: bool,
) -> float | None:
    """Draws one arm's seeds; returns their mean, None without a value."""
    seeds = [(value(row), has_lost(row)) for row in rows if value(row) is not None]
    if not seeds:
        return None
    for marker, losing in ((".", False), ("x", True)):
        some = [at for at, lost in seeds if lost is losing]
        ax.plot(some, [height] * len(some), marker, color=color, alpha=0.6, markersize=4, zorder=2)
    mean, half = intervals.mean_interval([at for at, _ in seeds])
    fill = {"mfc": "white"} if hollow else {}
    bar = half if len(seeds) > 2 else None
    ax.errorbar(mean, height, xerr=bar, fmt="o", color=color, ms=4.5, linewidth=1.3, zorder=3, **fill)
    return mean


# The values of an experiment's `figure`
FIGURES = {"curves": plot_curves, "endings": plot_endings}


def plot_experiment(
    rows: Sequence[dict], figure_arms: dict[str, dict[str, str]], path: str | Path, kind: str
) -> None:
    """Draws the played ones of `figure_arms` (heading -> arm -> label) into a PNG; `kind` is in FIGURES."""
    found = {row["arm"] for row in rows}
    if kind == "endings":
        found |= {arm.removesuffix(LLDS) for arm in found}
    parts = {
        head: {arm: label for arm, label in part.items() if arm in found}
        for head, part in figure_arms.items()
    }
    parts = {head: part for head, part in parts.items() if part}
    if not parts:
        named = [arm for part in figure_arms.values() for arm in part]
        raise ValueError(f"no run of the arms to draw is in the record ({', '.join(named)})")
    arms = {arm for part in parts.values() for arm in part}
    beside = {arm + LLDS for arm in arms} if kind == "endings" else set()
    drawn = [row for row in rows if row["arm"] in arms | beside]
    FIGURES[kind](drawn, parts).savefig(path)
