"""Rows of runs -> what became of each run, statistics over seeds, and the tables of an experiment.

A run here is a dict: world, arm, rate, seed, steps and the numbers of `describe_run`. None stands for "does
not exist": no collapse, no correct response left whose likelihood could be given.
"""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from lld.record.runs import COLLAPSE_FALL, WINDOW, find_collapse, running_mean, series

RECOVERED_SHARE = 0.8  # of the reward before the collapse
# Nats per token; below it the likelihood of correct responses falls by the measure of the feasibility study
DISPLACED = -0.01
NEAR_BEST = 0.05  # EM; rates this near to the best are in the stability range
TIE = 0.005  # EM; half a question in a hundred decides nothing, and the lower of two such rates is taken
MIN_SEEDS = 3  # from which a rate can be chosen without the seed it is reported on
# Two-sided 95 % points of Student's t for 1 to 20 degrees of freedom; beyond, the last one (at most 6 % too
# wide).
T_95 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
)


@dataclass(frozen=True)
class Table:
    """A title with what to know for reading it, column names, and cells as text."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


# ---------------------------------------------------------------------------------------------------------------
# one run


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _mean_between(rows: Sequence[dict], name: str, start: float, end: float) -> float | None:
    """The mean of `name` from share `start` to share `end` of the rows; at least one row."""
    first = min(round(start * len(rows)), len(rows) - 1)
    return _mean(series(rows[first : max(first + 1, round(end * len(rows)))], name)[1])


def describe_run(rows: Sequence[dict], benchmark: str) -> dict:
    """What became of a run, from the rows of its metrics.jsonl; `benchmark` is the held-out set whose EM
    counts."""
    steps, rewards = series(rows, "reward/mean")
    collapse = find_collapse(steps, rewards)
    em_steps, ems = series(rows, f"eval/{benchmark}/em")
    displacement = series(rows, "displacement/correct")[1]
    full_windows = running_mean(displacement)[WINDOW - 1 :]
    final_reward = _mean_between(rows, "reward/mean", 0.9, 1.0)
    recovered = (
        None
        if collapse["collapse_step"] is None or final_reward is None
        else final_reward >= RECOVERED_SHARE * collapse["peak"]
    )
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


# -----------------------------------------------------------------------------------------------------------
# over seeds


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and the half width of its 95 % t-interval over seeds, None for a single one."""
    if len(values) < 2:
        return fmean(values), None
    return fmean(values), T_95[min(len(values) - 1, len(T_95)) - 1] * stdev(values) / math.sqrt(len(values))


def cell(values: Sequence[float | None], digits: int = 2, signed: bool = False) -> str:
    """'0.81 ± 0.03'; the number of seeds behind it in brackets where some have no value; a dash where none
    has."""
    there = [value for value in values if value is not None]
    if not there:
        return "–"
    mean, half = mean_interval(there)
    text = f"{mean:{'+' if signed else ''}.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")
    return text if len(there) == len(values) else f"{text} [{len(there)}]"


def groups(runs: Sequence[dict], *names: str) -> dict[tuple, list[dict]]:
    """Runs by the values of `names`, in order of first appearance, rates rising, seeds rising."""
    found: dict[tuple, list[dict]] = {}
    worlds = list(dict.fromkeys(run["world"] for run in runs))
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    for run in sorted(
        runs,
        key=lambda run: (worlds.index(run["world"]), arms.index(run["arm"]), float(run["rate"]), run["seed"]),
    ):
        found.setdefault(tuple(run[name] for name in names), []).append(run)
    return found


def collapses(runs: Sequence[dict]) -> str:
    """'2/5 @ 63, 88 (1 recovered)'."""
    steps = sorted(run["collapse_step"] for run in runs if run["collapse_step"] is not None)
    recovered = sum(run["recovered"] is True for run in runs)
    return (
        f"{len(steps)}/{len(runs)}"
        + (f" @ {', '.join(map(str, steps))}" if steps else "")
        + (f" ({recovered} recovered)" if recovered else "")
    )


def halved(runs: Sequence[dict]) -> str:
    """'1/5': runs whose final held-out EM is below half of their best."""
    return f"{sum(run['em_halved'] is True for run in runs)}/{len(runs)}"


def by_rate(runs: Sequence[dict]) -> Table:
    """The experiment's table: world x arm x learning rate, over seeds."""
    title = (
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
    header = (
        "world",
        "arm",
        "lr",
        "n",
        "EM start",
        "EM best",
        "EM final",
        "EM halved",
        "final reward",
        "fall",
        "collapsed",
        "likelihood start",
        "middle",
        "end",
        "displacement",
        "whole rollout",
        "displaced",
        "max entropy",
        "max grad norm",
    )
    columns = (
        ("em_start", 2),
        ("em_best", 2),
        ("em_final", 2),
        halved,
        ("reward_final", 2),
        ("reward_fall", 2),
        collapses,
        ("likelihood_start", 3),
        ("likelihood_middle", 3),
        ("likelihood_end", 3),
        ("displacement", 4),
        ("displacement_rollout", 3),
        ("displaced_steps", 2),
        ("entropy_max", 2),
        ("grad_norm_max", 1),
    )
    rows = []
    for (world, arm, rate), same in groups(runs, "world", "arm", "rate").items():
        cells = [
            column(same) if callable(column) else cell([run[column[0]] for run in same], column[1])
            for column in columns
        ]
        rows.append((world, arm, rate, str(len(same)), *cells))
    return Table(title, header, rows)


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
            there = (
                [float(run[name]) for run in same if run[name] is not None]
                if name not in ("world", "arm", "rate", "seed", "steps")
                else []
            )
            if there:
                row[name], row[f"{name}_half"] = mean_interval(there)
                row[f"{name}_n"] = len(there)
        rows.append(row)
    return rows


# --------------------------------------------------------------------------------------------------------
# arms compared


def choose_rate(em: dict[str, dict[int, float]], seeds: Sequence[int] | None) -> str:
    """The learning rate of the highest mean over `seeds` (None: over each rate's own); of rates within TIE of
    it the lowest."""
    means = {
        rate: fmean(of_seed[seed] for seed in (of_seed if seeds is None else seeds))
        for rate, of_seed in em.items()
    }
    return min((rate for rate in means if means[rate] >= max(means.values()) - TIE), key=float)


def at_own_best(em: dict[str, dict[int, float]]) -> tuple[str, dict[int, float], bool]:
    """(rate chosen on all common seeds, {seed: EM}, whether no seed's EM took part in the choice of its
    rate), from {rate: {seed: EM}}.

    The best of several noisy means is too good on average. With three common seeds or more each seed is
    therefore reported at the rate that the *other* seeds choose (which may differ from seed to seed), and
    seeds that ran at the chosen rate alone, which took no part in choosing it, are added. With fewer, the
    chosen rate's own seeds are given, and said to be so. Rates with fewer seeds than the others (and than
    three) do not take part: one lucky seed would win.
    """
    enough = min(MIN_SEEDS, max(map(len, em.values())))
    em = {rate: of_seed for rate, of_seed in em.items() if len(of_seed) >= enough}
    common = sorted(set.intersection(*map(set, em.values())))
    chosen = choose_rate(em, common or None)
    if not common:
        return chosen, em[chosen], False
    fresh = {seed: value for seed, value in em[chosen].items() if seed not in common}
    if len(common) >= MIN_SEEDS:
        return (
            chosen,
            {seed: em[choose_rate(em, [other for other in common if other != seed])][seed] for seed in common}
            | fresh,
            True,
        )
    return (chosen, fresh, True) if len(fresh) >= 2 else (chosen, em[chosen], len(em) == 1)


def difference(one: dict[int, float], other: dict[int, float], digits: int = 2) -> str:
    """Mean paired difference over common seeds with its interval, or a dash."""
    return cell([one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())], digits, signed=True)


def own_best(runs: Sequence[dict], reference: str | None) -> Table:
    """Each arm at its own best learning rate, and over which rates it works."""
    title = (
        "**Each arm at its own best learning rate**, chosen by mean final held-out EM (of rates within "
        f"{TIE} the lowest). EM: each seed at the rate that the other seeds choose, so the choice does not "
        f"flatter it; * marks fewer than {MIN_SEEDS} seeds, where the value is the one chosen by. "
        "Stable: rates at which no seed collapsed or halved its EM, and mean final EM is not below the "
        f"start and within {NEAR_BEST} of this arm's best; of all: within {NEAR_BEST} of the world's best."
    )
    header = (
        "world",
        "arm",
        "rates run",
        "best lr",
        "n",
        "EM at own best",
        f"minus {reference} at its own",
        "stable",
        "stable, of all",
        "collapsed runs, all rates",
    )
    rows, chosen = [], {}
    by_arm = {
        key: [run for run in same if run["em_final"] is not None]
        for key, same in groups(runs, "world", "arm").items()
    }
    for key, same in by_arm.items():
        em: dict[str, dict[int, float]] = {}
        for run in same:
            em.setdefault(run["rate"], {})[run["seed"]] = run["em_final"]
        if em:
            chosen[key] = (em, *at_own_best(em))
    world_best = {
        world: max(
            fmean(of_seed.values())
            for (place, _), (em, *_) in chosen.items()
            if place == world
            for of_seed in em.values()
        )
        for world, _ in chosen
    }
    references = {world: values for (world, arm), (_, _, values, _) in chosen.items() if arm == reference}
    for (world, arm), (em, rate, values, unbiased) in chosen.items():
        means = {some: fmean(of_seed.values()) for some, of_seed in em.items()}
        start = _mean([run["em_start"] for run in by_arm[world, arm] if run["em_start"] is not None]) or 0.0
        lost = {
            run["rate"]
            for run in by_arm[world, arm]
            if run["collapse_step"] is not None or run["em_halved"] or means[run["rate"]] < start
        }
        near = lambda best: (
            ", ".join(some for some in means if some not in lost and means[some] >= best - NEAR_BEST)
            or "none"
        )
        against = difference(values, references[world]) if arm != reference and world in references else "–"
        rows.append(
            (
                world,
                arm,
                ", ".join(em),
                rate,
                str(len(values)),
                cell(list(values.values())) + ("" if unbiased else " *"),
                against,
                near(max(means.values())),
                near(world_best[world]),
                collapses(by_arm[world, arm]).split(" @")[0],
            )
        )
    return Table(title, header, rows)


def paired(runs: Sequence[dict], reference: str | None) -> Table:
    """Every arm against the reference at the same learning rate, over the seeds both have."""
    title = (
        f"**Against {reference} at the same learning rate**: mean paired difference over common seeds "
        "± 95 % t-interval."
    )
    header = (
        "world",
        "lr",
        "arm",
        "n",
        "EM final",
        "EM best",
        "final reward",
        "fall",
        "displacement",
        f"collapsed: arm, {reference}",
    )
    points = groups(runs, "world", "rate", "arm")
    rows = []
    for (world, rate, arm), same in points.items():
        others = {run["seed"]: run for run in points.get((world, rate, reference), [])}
        common = [run for run in same if run["seed"] in others]
        if arm == reference or not common:
            continue
        cells = []
        for name, digits in (
            ("em_final", 2),
            ("em_best", 2),
            ("reward_final", 2),
            ("reward_fall", 2),
            ("displacement", 4),
        ):
            pairs = [(run[name], others[run["seed"]][name]) for run in common]
            cells.append(
                cell([None if None in pair else pair[0] - pair[1] for pair in pairs], digits, signed=True)
            )
        lost = [
            sum(run["collapse_step"] is not None for run in some)
            for some in (common, [others[run["seed"]] for run in common])
        ]
        rows.append((world, rate, arm, str(len(common)), *cells, f"{lost[0]}, {lost[1]}"))
    return Table(title, header, rows)


# --------------------------------------------------------------------------------------------------------
# early warning


def recorded_phases(rows: Sequence[dict]) -> list[int]:
    """The phase of each row as the run logged it, 0 where it logged none."""
    return [int(row.get("phase", 0)) for row in rows]


def onsets(phases: Sequence[int], level: int) -> list[int]:
    """Indices at which the phase rises to `level` or above from below it."""
    return [
        index
        for index, phase in enumerate(phases)
        if phase >= level and (index == 0 or phases[index - 1] < level)
    ]


def warnings(
    runs: Sequence[tuple[dict, Sequence[dict]]], phases: Sequence[Sequence[int]] | None = None
) -> Table:
    """How early phases 2 to 4 begin before a collapse or how late after it, and how often where none comes.

    `runs` are pairs of a run and its rows, `phases` the phase of each row of each run, the logged one if
    None. A median counts a run without a warning up to its collapse as one with none at all.
    """
    title = (
        "**Early warning.** Of each phase, or a later one. Lead: steps from the start of the phase to the "
        "collapse, median over all collapsing runs; first start, and last start up to the collapse (an "
        "early false alarm that passed lends the first a long lead); "
        f"before the fall: from the first start to where the reward began to lie {COLLAPSE_FALL} below its "
        "maximum. Caught later: runs without a warning up to their collapse that got one after it, and "
        "the median of steps between. False alarms: over the stable runs, which neither collapsed nor "
        "halved their EM."
    )
    header = (
        "phase",
        "collapsing runs",
        "warned",
        "lead, first",
        "lead, last",
        "before the fall",
        "caught later",
        "by",
        "stable runs",
        "runs with a false alarm",
        "false alarms",
    )
    if phases is None:
        phases = [recorded_phases(rows) for _, rows in runs]
    judged = [(run, [row["step"] for row in rows], of_run) for (run, rows), of_run in zip(runs, phases)]
    if not any(phase for of_run in phases for phase in of_run):
        return Table(title, header, [])
    rows = []
    for level, name in ((2, "2 decay"), (3, "3 acceleration"), (4, "4 collapse")):
        leads, last_leads, fall_leads, delays, false_alarms = [], [], [], [], []
        for run, steps, of_run in judged:
            starts = [steps[index] for index in onsets(of_run, level)]
            if run["collapse_step"] is None:
                false_alarms += [] if run["em_halved"] else [len(starts)]
                continue
            if starts and starts[0] > run["collapse_step"]:
                delays.append(starts[0] - run["collapse_step"])
            starts = [step for step in starts if step <= run["collapse_step"]]
            leads.append(run["collapse_step"] - starts[0] if starts else -math.inf)
            last_leads.append(run["collapse_step"] - starts[-1] if starts else -math.inf)
            fall_leads.append(run["falling_step"] - starts[0] if starts else -math.inf)
        middle = lambda values: (
            "–" if not values else "no warning" if median(values) == -math.inf else f"{median(values):g}"
        )
        num_warned = sum(lead > -math.inf for lead in leads)
        rows.append(
            (
                name,
                str(len(leads)),
                str(num_warned),
                middle(leads),
                middle(last_leads),
                middle(fall_leads),
                str(len(delays)),
                middle(delays),
                str(len(false_alarms)),
                str(sum(map(bool, false_alarms))),
                str(sum(false_alarms)),
            )
        )
    return Table(title, header, rows)


# ---------------------------------------------------------------------------------------------------------------
# as text


def markdown(table: Table) -> str:
    line = lambda cells: "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    return "\n".join(
        [table.title, "", line(table.header), line(["---"] * len(table.header)), *map(line, table.rows)]
    )


def csv_text(rows: Sequence[dict]) -> str:
    """Comma-separated lines with the names of all rows in order of first appearance; None is empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows([{name: "" if value is None else value for name, value in row.items()} for row in rows])
    return file.getvalue()
