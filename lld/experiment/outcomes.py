"""Rows of runs -> the outcome of each run, statistics over seeds, and the tables of an experiment.

A run here is a dict: world, arm, rate, seed, steps and the numbers of `describe_run`. None means that the
value does not exist: the run did not collapse, or has no correct response with a likelihood.
"""

import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev

from lld.record.runs import COLLAPSE_FALL, WINDOW, find_collapse, running_mean, series

RECOVERED_SHARE = 0.8  # of the reward before the collapse
DISPLACED = -0.01  # nats per token; below it correct responses count as losing likelihood
NEAR_BEST = 0.05  # EM; rates this close to the best are in the stability range
TIE = 0.005  # EM; of rates closer to each other than this, the lower one is chosen
MIN_SEEDS = 3  # minimum to choose a rate without the seed it is reported on
# Two-sided 95 % points of Student's t for 1 to 20 degrees of freedom. Beyond 20 the last one is used; the
# interval is at most 6 % too wide.
T_95 = [
    float(point)
    for point in (
        "12.706 4.303 3.182 2.776 2.571 2.447 2.365 2.306 2.262 2.228 "
        "2.201 2.179 2.160 2.145 2.131 2.120 2.110 2.101 2.093 2.086"
    ).split()
]


@dataclass(frozen=True)
class Table:
    """A title that says how to read it, column names, and cells as text."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def table_of(title: str, rows: Sequence[dict[str, str]]) -> Table:
    """A table of rows that all have the same columns."""
    header = tuple(rows[0]) if rows else ()
    return Table(title, header, [tuple(row.values()) for row in rows])


# ----------------------------------------------------------------------------------------------------
# one run


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _mean_between(rows: Sequence[dict], name: str, start: float, end: float) -> float | None:
    """The mean of `name` from share `start` to share `end` of the rows; at least one row."""
    first = min(round(start * len(rows)), len(rows) - 1)
    return _mean(series(rows[first : max(first + 1, round(end * len(rows)))], name)[1])


def describe_run(rows: Sequence[dict], benchmark: str) -> dict:
    """The outcome of a run as numbers, from the rows of its metrics.jsonl.

    `benchmark` is the held-out set whose EM counts.
    """
    steps, rewards = series(rows, "reward/mean")
    collapse = find_collapse(steps, rewards)
    em_steps, ems = series(rows, f"eval/{benchmark}/em")
    displacement = series(rows, "displacement/correct")[1]
    full_windows = running_mean(displacement)[WINDOW - 1 :]
    final_reward = _mean_between(rows, "reward/mean", 0.9, 1.0)
    recovered = None
    if collapse["collapse_step"] is not None and final_reward is not None:
        recovered = final_reward >= RECOVERED_SHARE * collapse["peak"]
    return {
        "em_start": ems[0] if ems and em_steps[0] == 0 else None,
        "em_best": max(ems, default=None),
        "em_final": ems[-1] if ems else None,
        "em_halved": ems[-1] < max(ems) / 2 if ems else None,
        "reward_final": final_reward,
        "reward_peak": collapse["peak"],
        "reward_fall": collapse["fall"],
        "collapse_step": collapse["collapse_step"],
        "falling_step": collapse["falling_step"],
        "recovered": recovered,
        "likelihood_start": _mean_between(rows, "likelihood/correct_old", 0.0, 0.1),
        "likelihood_middle": _mean_between(rows, "likelihood/correct_old", 0.45, 0.55),
        "likelihood_end": _mean_between(rows, "likelihood/correct_old", 0.9, 1.0),
        "displacement": _mean_between(rows, "displacement/correct", 0.5, 1.0),
        "displacement_rollout": _mean_between(rows, "final/displacement/correct", 0.5, 1.0),
        "displaced_steps": _mean([value < DISPLACED for value in full_windows]),
        "entropy_max": max(series([row for row in rows if row["step"] > 20], "entropy")[1], default=None),
        "grad_norm_max": max(series(rows, "grad_norm_max")[1], default=None),
        "skipped_updates": sum(series(rows, "skipped_updates")[1]),
    }


# ----------------------------------------------------------------------------------------------------
# over seeds


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and the half width of its 95 % t-interval over seeds, None for a single one."""
    if len(values) < 2:
        return fmean(values), None
    return fmean(values), T_95[min(len(values) - 1, len(T_95)) - 1] * stdev(values) / math.sqrt(len(values))


def cell(values: Sequence[float | None], digits: int = 2, signed: bool = False) -> str:
    """'0.81 ± 0.03'; with the number of seeds in brackets if some have no value; a dash if none has."""
    present = [value for value in values if value is not None]
    if not present:
        return "–"
    mean, half = mean_interval(present)
    text = f"{mean:+.{digits}f}" if signed else f"{mean:.{digits}f}"
    if half is not None:
        text += f" ± {half:.{digits}f}"
    return text if len(present) == len(values) else f"{text} [{len(present)}]"


def over_seeds(name: str, digits: int, runs: Sequence[dict]) -> str:
    """The cell of one number of `describe_run`."""
    return cell([run[name] for run in runs], digits)


def groups(runs: Sequence[dict], *names: str) -> dict[tuple, list[dict]]:
    """Runs by the values of `names`, in order of first appearance, rates rising, seeds rising."""
    worlds = list(dict.fromkeys(run["world"] for run in runs))
    arms = list(dict.fromkeys(run["arm"] for run in runs))

    def place(run: dict) -> tuple:
        return worlds.index(run["world"]), arms.index(run["arm"]), float(run["rate"]), run["seed"]

    found: dict[tuple, list[dict]] = {}
    for run in sorted(runs, key=place):
        found.setdefault(tuple(run[name] for name in names), []).append(run)
    return found


def collapses(runs: Sequence[dict]) -> str:
    """'2/5 @ 63, 88 (1 recovered)'."""
    steps = sorted(run["collapse_step"] for run in runs if run["collapse_step"] is not None)
    recovered = sum(run["recovered"] is True for run in runs)
    text = f"{len(steps)}/{len(runs)}"
    if steps:
        text += f" @ {', '.join(map(str, steps))}"
    if recovered:
        text += f" ({recovered} recovered)"
    return text


def halved(runs: Sequence[dict]) -> str:
    """'1/5': runs whose final held-out EM is below half of their best."""
    return f"{sum(run['em_halved'] is True for run in runs)}/{len(runs)}"


BY_RATE_TITLE = (
    "**Each learning rate** (mean ± 95 % t-interval over the n seeds). EM halved: runs whose final EM "
    "is below half of their best. Final reward: last 10 % of the steps. Fall: largest distance of the "
    f"{WINDOW}-step mean reward from an earlier maximum. "
    f"Collapsed: that mean lay below half of its earlier maximum, and at least {COLLAPSE_FALL} below "
    f"it, for {WINDOW} steps in a row, from these steps on; recovered: the final reward is at least "
    f"{RECOVERED_SHARE:.0%} of that maximum. "
    "Likelihood: of correct responses under the policy that sampled them, nats per token, first, "
    "middle and last 10 % of the steps. Displacement: of correct responses, nats per token, second "
    "half of the run; "
    f"displaced: share of steps at which its {WINDOW}-step mean is below {DISPLACED}; whole rollout: "
    "from before its first to after its last update. Entropy: largest after step 20."
)
# Column -> its cell, from the runs of one world, arm and rate
BY_RATE_COLUMNS: dict[str, Callable[[Sequence[dict]], str]] = {
    "EM start": partial(over_seeds, "em_start", 2),
    "EM best": partial(over_seeds, "em_best", 2),
    "EM final": partial(over_seeds, "em_final", 2),
    "EM halved": halved,
    "final reward": partial(over_seeds, "reward_final", 2),
    "fall": partial(over_seeds, "reward_fall", 2),
    "collapsed": collapses,
    "likelihood start": partial(over_seeds, "likelihood_start", 3),
    "middle": partial(over_seeds, "likelihood_middle", 3),
    "end": partial(over_seeds, "likelihood_end", 3),
    "displacement": partial(over_seeds, "displacement", 4),
    "whole rollout": partial(over_seeds, "displacement_rollout", 3),
    "displaced": partial(over_seeds, "displaced_steps", 2),
    "max entropy": partial(over_seeds, "entropy_max", 2),
    "max grad norm": partial(over_seeds, "grad_norm_max", 1),
}


def by_rate(runs: Sequence[dict]) -> Table:
    """The experiment's main table: world x arm x learning rate, over seeds."""
    rows = []
    for (world, arm, rate), same in groups(runs, "world", "arm", "rate").items():
        cells = [column(same) for column in BY_RATE_COLUMNS.values()]
        rows.append((world, arm, rate, str(len(same)), *cells))
    return Table(BY_RATE_TITLE, ("world", "arm", "lr", "n", *BY_RATE_COLUMNS), rows)


def aggregate_rows(runs: Sequence[dict]) -> list[dict]:
    """by_rate as numbers, for a file: each number of describe_run as mean, half width and count."""
    rows = []
    for (world, arm, rate), same in groups(runs, "world", "arm", "rate").items():
        row = {
            "world": world,
            "arm": arm,
            "rate": rate,
            "n": len(same),
            "collapsed": sum(run["collapse_step"] is not None for run in same),
        }
        for name in same[0]:
            if name in ("world", "arm", "rate", "seed", "steps"):
                continue
            values = [float(run[name]) for run in same if run[name] is not None]
            if values:
                row[name], row[f"{name}_half"] = mean_interval(values)
                row[f"{name}_n"] = len(values)
        rows.append(row)
    return rows


# ----------------------------------------------------------------------------------------------------
# arms compared


def choose_rate(em: dict[str, dict[int, float]], seeds: Sequence[int] | None) -> str:
    """The lowest learning rate whose mean over `seeds` is within TIE of the highest.

    `seeds` None: all seeds of each rate.
    """
    means = {
        rate: fmean(of_seed[seed] for seed in (of_seed if seeds is None else seeds))
        for rate, of_seed in em.items()
    }
    return min((rate for rate in means if means[rate] >= max(means.values()) - TIE), key=float)


def at_own_best(em: dict[str, dict[int, float]]) -> tuple[str, dict[int, float], bool]:
    """{rate: {seed: EM}} -> (the rate chosen on all common seeds, {seed: EM}, whether the EMs are unbiased).

    The best of several noisy means is biased upwards. With three common seeds or more each seed is therefore
    reported at the rate that the *other* seeds choose (which may differ between seeds). Seeds that ran at the
    chosen rate only, and had no part in choosing it, are added. With fewer common seeds, the EMs are those of
    the chosen rate, and biased. Rates with fewer seeds than the others (and than three) are left out:
    otherwise one lucky seed would win.
    """
    enough = min(MIN_SEEDS, max(map(len, em.values())))
    em = {rate: of_seed for rate, of_seed in em.items() if len(of_seed) >= enough}
    common = sorted(set.intersection(*map(set, em.values())))
    chosen = choose_rate(em, common or None)
    if not common:
        return chosen, em[chosen], False
    fresh = {seed: value for seed, value in em[chosen].items() if seed not in common}
    if len(common) < MIN_SEEDS:
        return (chosen, fresh, True) if len(fresh) >= 2 else (chosen, em[chosen], len(em) == 1)
    values = {}
    for seed in common:
        rate = choose_rate(em, [other for other in common if other != seed])
        values[seed] = em[rate][seed]
    return chosen, values | fresh, True


def difference(one: dict[int, float], other: dict[int, float], digits: int = 2) -> str:
    """Mean paired difference over common seeds with its interval, or a dash."""
    return cell([one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())], digits, signed=True)


def final_ems(runs: Sequence[dict]) -> dict[str, dict[int, float]]:
    """{rate: {seed: final held-out EM}} of the runs of one arm."""
    em: dict[str, dict[int, float]] = {}
    for run in runs:
        em.setdefault(run["rate"], {})[run["seed"]] = run["em_final"]
    return em


def failed_rates(runs: Sequence[dict], means: dict[str, float]) -> set[str]:
    """Rates at which a seed collapsed or halved its EM, or at which the mean final EM is below the start."""
    start = _mean([run["em_start"] for run in runs if run["em_start"] is not None]) or 0.0
    return {
        run["rate"]
        for run in runs
        if run["collapse_step"] is not None or run["em_halved"] or means[run["rate"]] < start
    }


def stable_rates(means: dict[str, float], failed: set[str], best: float) -> str:
    """The rates within NEAR_BEST of `best` at which nothing failed, as text."""
    stable = [rate for rate in means if rate not in failed and means[rate] >= best - NEAR_BEST]
    return ", ".join(stable) or "none"


OWN_BEST_TITLE = (
    "**Each arm at its own best learning rate**, chosen by mean final held-out EM (of rates within "
    f"{TIE} the lowest). EM: each seed at the rate that the other seeds choose, so the choice does not "
    f"flatter it; * marks fewer than {MIN_SEEDS} seeds, where the value is the one chosen by. "
    "Stable: rates at which no seed collapsed or halved its EM, and mean final EM is not below the "
    f"start and within {NEAR_BEST} of this arm's best; of all: within {NEAR_BEST} of the world's best."
)


def own_best(runs: Sequence[dict], reference: str | None) -> Table:
    """Each arm at its own best learning rate, and the rates at which it is stable."""
    evaluated = groups([run for run in runs if run["em_final"] is not None], "world", "arm")
    means, chosen, world_best = {}, {}, {}
    for (world, arm), same in evaluated.items():
        em = final_ems(same)
        means[world, arm] = {rate: fmean(of_seed.values()) for rate, of_seed in em.items()}
        chosen[world, arm] = at_own_best(em)
        world_best[world] = max(world_best.get(world, 0.0), *means[world, arm].values())
    rows = []
    for (world, arm), same in evaluated.items():
        rate, values, unbiased = chosen[world, arm]
        of_rate = means[world, arm]
        failed = failed_rates(same, of_rate)
        against = "–"
        if arm != reference and (world, reference) in chosen:
            against = difference(values, chosen[world, reference][1])
        row = {
            "world": world,
            "arm": arm,
            "rates run": ", ".join(of_rate),
            "best lr": rate,
            "n": str(len(values)),
            "EM at own best": cell(list(values.values())) + ("" if unbiased else " *"),
            f"minus {reference} at its own": against,
            "stable": stable_rates(of_rate, failed, max(of_rate.values())),
            "stable, of all": stable_rates(of_rate, failed, world_best[world]),
            "collapsed runs, all rates": collapses(same).split(" @")[0],
        }
        rows.append(row)
    return table_of(OWN_BEST_TITLE, rows)


def paired(runs: Sequence[dict], reference: str | None) -> Table:
    """Every arm against the reference at the same learning rate, over the seeds both have."""
    title = (
        f"**Against {reference} at the same learning rate**: mean paired difference over common seeds "
        "± 95 % t-interval."
    )
    points = groups(runs, "world", "rate", "arm")
    rows = []
    for (world, rate, arm), same in points.items():
        others = {run["seed"]: run for run in points.get((world, rate, reference), [])}
        pairs = [(run, others[run["seed"]]) for run in same if run["seed"] in others]
        if arm == reference or not pairs:
            continue
        lost = [sum(run["collapse_step"] is not None for run in some) for some in zip(*pairs, strict=True)]
        row = {
            "world": world,
            "lr": rate,
            "arm": arm,
            "n": str(len(pairs)),
            "EM final": paired_cell(pairs, "em_final", 2),
            "EM best": paired_cell(pairs, "em_best", 2),
            "final reward": paired_cell(pairs, "reward_final", 2),
            "fall": paired_cell(pairs, "reward_fall", 2),
            "displacement": paired_cell(pairs, "displacement", 4),
            f"collapsed: arm, {reference}": f"{lost[0]}, {lost[1]}",
        }
        rows.append(row)
    return table_of(title, rows)


def paired_cell(pairs: Sequence[tuple[dict, dict]], name: str, digits: int) -> str:
    """The cell of the difference of one number within each pair of runs, None where either has none."""
    values = [(one[name], other[name]) for one, other in pairs]
    return cell([None if None in pair else pair[0] - pair[1] for pair in values], digits, signed=True)


# ----------------------------------------------------------------------------------------------------
# as text


def markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def markdown(table: Table) -> str:
    lines = [markdown_line(cells) for cells in (table.header, ["---"] * len(table.header), *table.rows)]
    return "\n".join([table.title, "", *lines])


def csv_text(rows: Sequence[dict]) -> str:
    """Comma-separated lines with the names of all rows in order of first appearance; None is empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows([{name: "" if value is None else value for name, value in row.items()} for row in rows])
    return file.getvalue()
