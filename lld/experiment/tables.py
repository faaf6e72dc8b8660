"""An experiment's record -> its tables in Markdown."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from operator import itemgetter
from statistics import fmean, median

from lld.config import Config
from lld.experiment import intervals
from lld.experiment.grid import Experiment, Run
from lld.experiment.outcomes import CHANGES, END, FELL, SIGNS
from lld.record.contexts import CONTEXTS

DASH = "–"
EXPLODED = 2.0
DEAD = 0.05
LLDS = "-llds"  # an arm so called is shown beside the one without
WIDTH = 110  # columns of text in docs/


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


def markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    lines = [line(cells) for cells in (table.header, ["---"] * len(table.header), *table.rows)]
    return "\n".join([*textwrap.wrap(table.title, WIDTH), "", *lines])


def cell(values: Sequence[float | None], digits: int = 2, signed: bool = False) -> str:
    """'0.81 ± 0.03'; with the number of seeds in brackets if some have no value; a dash if none has."""
    present = [value for value in values if value is not None]
    if not present:
        return DASH
    mean, half = intervals.mean_interval(present)
    text = f"{mean:+.{digits}f}" if signed else f"{mean:.{digits}f}"
    if half is not None:
        text += f" ± {half:.{digits}f}"
    return text if len(present) == len(values) else f"{text} [{len(present)}]"


def p_text(p: float | None) -> str:
    return DASH if p is None else f"{p:.2g}"


def groups(rows: Sequence[dict], *names: str) -> dict[tuple, list[dict]]:
    """Rows by the values of `names`: worlds and arms in order of appearance, rates and seeds rising."""
    worlds = list(dict.fromkeys(row["world"] for row in rows))
    arms = list(dict.fromkeys(row["arm"] for row in rows))

    def place(row: dict) -> tuple:
        return worlds.index(row["world"]), arms.index(row["arm"]), float(row["rate"]), row["seed"]

    found: dict[tuple, list[dict]] = {}
    for row in sorted(rows, key=place):
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def of(name: str, digits: int, rows: Sequence[dict]) -> str:
    """The cell of one number of the record."""
    return cell([row[name] for row in rows], digits)


def happened(name: str, rows: Sequence[dict]) -> str:
    """'3 of 5 (.15 to .95), step 212': how many runs have that step, and the median."""
    steps = [row[name] for row in rows if row[name] is not None]
    return share(len(steps), len(rows)) + (f", step {median(steps):.0f}" if steps else "")


def share(count: int, total: int) -> str:
    """'3 of 5 (.15 to .95)': with the exact 95 % interval of the share, which says nothing below three."""
    if total < 3:
        return f"{count} of {total}"
    low, high = intervals.share_interval(count, total)
    return f"{count} of {total} ({low:.2f} to {high:.2f})"


def has_lost(row: dict) -> bool:
    return row["lost_step"] is not None


def has_exploded(row: dict) -> bool | None:
    """Whether the entropy of wrong responses ended above twice that of the start; None if there were none."""
    start, end = row["entropy_wrong_start"], row["entropy_wrong_end"]
    return None if None in (start, end) else end > EXPLODED * start


def is_sick(row: dict) -> bool:
    """Whether it ended exploded or dead: of a dead run hardly any wrong response has an advantage."""
    return bool(has_exploded(row)) or row["em_end"] is None or row["em_end"] < DEAD


def exploded(rows: Sequence[dict]) -> str:
    known = [row for row in rows if has_exploded(row) is not None]
    return share(sum(map(has_exploded, known)), len(known)) if known else DASH


def when(name: str, rows: Sequence[dict]) -> str:
    """'212 (4 of 5)': the median step of the runs that have it."""
    steps = [row[name] for row in rows if row[name] is not None]
    return f"{median(steps):.0f} ({len(steps)} of {len(rows)})" if steps else f"{DASH} (0 of {len(rows)})"


def arrow(names: Sequence[str], rows: Sequence[dict], between: str = " -> ") -> str:
    """'0.82 -> 0.69 -> 2.60': means over seeds of several numbers."""
    values = [[row[name] for row in rows if row[name] is not None] for name in names]
    return between.join(f"{fmean(some):.2f}" if some else DASH for some in values)


def displacement(rows: Sequence[dict]) -> str:
    return cell([None if row["displacement"] is None else 1e4 * row["displacement"] for row in rows], 1, True)


# ----------------------------------------------------------------------------------------------------
# what became of each arm

OUTCOMES_TITLE = (
    f"**What became of each arm.** EM: training episodes, mean of the last {END} steps and highest "
    f"mean of {END}; held-out EM after the last step; ± 95 % t-interval over the n seeds. "
    f"Largest fall: of the {END}-step mean, as a share of the best one before. Lost: that mean was "
    f"below {FELL:.0%} of the best one before, in how many runs, with the exact 95 % interval of the "
    "share, and the median step at which it first was; for good: runs that ended so. Halved: the 10-step "
    "mean reward below half of its best, and at least .1 lower, for ten steps, and the first of them. "
    f"Exploded: entropy of wrong responses at the end above {EXPLODED:g} times that of the start. A dash: "
    f"no such response in the last {END} steps."
)
OUTCOMES: dict[str, Callable[[Sequence[dict]], str]] = {
    "EM end": partial(of, "em_end", 3),
    "EM peak": partial(of, "em_peak", 3),
    "held out": partial(of, "held_out_end", 3),
    "largest fall": partial(of, "em_fall", 2),
    "lost": partial(happened, "lost_step"),
    "for good": partial(when, "fell_step"),
    "halved": partial(when, "collapse_step"),
    "exploded": exploded,
    "valid actions": partial(of, "valid_end", 2),
    "truncated": partial(of, "truncated_end", 2),
    "tokens": partial(arrow, ("tokens_start", "tokens_end")),
}
LIKELIHOODS_TITLE = (
    "**What became of likelihoods and entropies**, means over seeds, nats a token. Right, wrong: "
    "log-likelihood of responses with A > 0 and A < 0, at the start, at its highest (10-step mean) and "
    "at the end. Entropy of wrong responses at the start, at its least and at the end; by context: its end "
    "where no passage has been read yet (first), one with the answer (lucky), only others (unlucky); then of "
    "right ones at the end. Flattening: median step from which the entropy of wrong responses is 30 % above "
    "its least and above its start for ten steps, of how many runs; as a whole and by context. Displacement: "
    "mean of displacement/correct, 10⁻⁴ nats a token and step."
)
LIKELIHOODS: dict[str, Callable[[Sequence[dict]], str]] = {
    "right": partial(arrow, ("right_start", "right_most", "right_end")),
    "wrong": partial(arrow, ("wrong_start", "wrong_most", "wrong_end")),
    "entropy of wrong": partial(arrow, ("entropy_wrong_start", "entropy_wrong_least", "entropy_wrong_end")),
    "by context": partial(arrow, [f"entropy_wrong_{name}_end" for name in CONTEXTS], between=" / "),
    "of right": partial(arrow, ("entropy_right_end",)),
    "flattening": partial(when, "onset"),
    **{f"{name} contexts": partial(when, f"onset_{name}") for name in CONTEXTS},
    "displacement": displacement,
}


def by_arm(rows: Sequence[dict], title: str, columns: dict[str, Callable[[Sequence[dict]], str]]) -> Table:
    """World x arm x rate, over seeds."""
    table = []
    for (world, arm, rate, steps), same in groups(rows, "world", "arm", "rate", "steps").items():
        about = {"world": world, "arm": arm, "lr": rate, "steps": str(steps), "n": str(len(same))}
        table.append(about | {name: column(same) for name, column in columns.items()})
    return table_of(title, table)


# ----------------------------------------------------------------------------------------------------
# arms compared

PAIRS_TITLE = (
    "**Arms compared at the same world, learning rate and number of steps**: first arm minus second, "
    "over the n seeds that both have, ± 95 % t-interval. p of signs: exact, over all signs of the "
    "differences of EM (five pairs give at least .0625); p of dealing: exact, over all ways of dealing the "
    "runs to the two arms (five and five: at least .0079). Lost, exploded: runs of each arm, p of "
    "Fisher's exact test. Entropy, right, gap: entropy of wrong responses, log-likelihood of right ones, "
    "wrong minus right log-likelihood, and valid actions, at the end."
)


def compared(rows: Sequence[dict], pairs: Sequence[tuple[str, str]]) -> Table:
    """Each pair of arms at each world, rate and number of steps that both have."""
    points = groups(rows, "world", "rate", "steps", "arm")
    table = []
    for place in dict.fromkeys(point[:3] for point in points):
        for arm, other in pairs:
            ones, others = points.get((*place, arm)), points.get((*place, other))
            if ones and others:
                about = dict(zip(("world", "lr", "steps"), map(str, place), strict=True))
                table.append(about | {"arms": f"{arm} - {other}"} | _pair(ones, others))
    return table_of(PAIRS_TITLE, table)


def _pair(ones: Sequence[dict], others: Sequence[dict]) -> dict[str, str]:
    by_seed = {row["seed"]: row for row in others}
    pairs = [(row, by_seed[row["seed"]]) for row in ones if row["seed"] in by_seed]

    def differences(name: str) -> list[float | None]:
        both = [(one[name], other[name]) for one, other in pairs]
        return [None if None in pair else pair[0] - pair[1] for pair in both]

    def both(happened: Callable[[dict], bool | None]) -> str:
        one, other = ([yes for yes in map(happened, some) if yes is not None] for some in (ones, others))
        p = intervals.fisher_p(sum(one), len(one), sum(other), len(other))
        return f"{sum(one)} of {len(one)}, {sum(other)} of {len(other)}; {p_text(p)}"

    ends = [[row["em_end"] for row in some] for some in (ones, others)]
    return {
        "n": str(len(pairs)),
        "EM": cell(differences("em_end"), 3, signed=True),
        "held out": cell(differences("held_out_end"), 3, signed=True),
        "p of signs": p_text(intervals.sign_flip_p([d for d in differences("em_end") if d is not None])),
        "p of dealing": p_text(intervals.swap_p(*ends)),
        "lost; p": both(has_lost),
        "exploded; p": both(has_exploded),
        "entropy": cell(differences("entropy_wrong_end"), 2, signed=True),
        "right": cell(differences("right_end"), 2, signed=True),
        "gap": cell(differences("gap_end"), 2, signed=True),
        "valid actions": cell(differences("valid_end"), 2, signed=True),
    }


BESIDE_TITLE = (
    f"**Each loss alone -> with LLDS, {{world}}**: runs; how many lost EM (its mean over {END} steps fell "
    f"below {FELL:.0%} of its best); how many ended exploded (entropy of wrong responses above {EXPLODED:g} "
    f"times that of the start) or dead (EM below {DEAD}); held-out EM after the last step, ± 95 % t-interval "
    "over seeds; what LLDS adds to it, over the seeds that both have."
)
BESIDE: dict[str, Callable[[Sequence[dict]], str]] = {
    "runs": lambda rows: str(len(rows)),
    "lost EM": lambda rows: str(sum(map(has_lost, rows))),
    "exploded or dead": lambda rows: str(sum(map(is_sick, rows))),
    "held out": partial(of, "held_out_end", 3),
}


def beside_llds(experiment: Experiment, rows: Sequence[dict], world: str) -> Table:
    """The arms of `figure_arms` that a world has, each beside the arm with LLDS that is called like it."""
    arms, table = groups([row for row in rows if row["world"] == world], "arm"), []
    for heading, labels in experiment.figure_arms.items():
        section = []
        for arm, label in labels.items():
            alone, beside = arms.get((arm,), []), arms.get((arm + LLDS,), [])
            same, held_out = itemgetter("rate", "steps", "seed"), itemgetter("held_out_end")
            of_alone = {same(row): held_out(row) for row in alone}
            pairs = [(held_out(row), of_alone.get(same(row))) for row in beside]
            gains = [after - before for after, before in pairs if None not in (after, before)]
            pair = [alone, beside] if beside else [alone]
            entry = {name: " -> ".join(column(rows) for rows in pair) for name, column in BESIDE.items()}
            if alone:
                section.append({"loss": label} | entry | {"LLDS adds": cell(gains, 3, signed=True)})
        if heading and section:
            section.insert(0, dict.fromkeys(section[0], "") | {"loss": f"**{heading}**"})
        table += section
    return table_of(BESIDE_TITLE.format(world=world), table)


# ----------------------------------------------------------------------------------------------------
# alarms

ALARMS_TITLE = (
    "**What each sign of lld/record/phases.py was worth** in the runs that lost EM: how many had it before "
    "that loss, then or after, or never; lead: steps from the sign to the loss, least, median and largest. "
    "And how many had it of those that lost nothing: where what is trained is what is sampled (the sampler "
    "does not cut, or its kept ids are trained), and the rest."
)


def samples_what_it_trains(cfg: Config) -> bool:
    """Whether the loss is taken under the distribution that was sampled; rounded weights do not count."""
    same_temperature = cfg.loss.temperature in (None, cfg.rollout.temperature)
    return same_temperature and (not cfg.rollout.cuts or cfg.loss.support == "kept")


def alarms(rows: Sequence[dict], runs: Sequence[Run]) -> Table:
    """How often each sign came before the loss, after it or not at all, and in the other runs."""
    sound = {run.fingerprint for run in runs if samples_what_it_trains(run.cfg)}
    dead, alive = [row for row in rows if has_lost(row)], [row for row in rows if not has_lost(row)]
    table = []

    def arms_of(some: Sequence[dict]) -> str:
        names = [row["arm"] for row in some]
        counts = ", ".join(f"{names.count(arm)} {arm}" for arm in dict.fromkeys(names))
        return f" ({counts})" if counts else ""

    for name in SIGNS:
        column = f"alarm_{name}"
        leads = sorted(row["lost_step"] - row[column] for row in dead if row[column] is not None)
        before = sum(lead > 0 for lead in leads)
        entry = {"sign": name, "runs that lost EM": str(len(dead)), "before": str(before)}
        missed = [row for row in dead if row[column] is None]
        entry["after"] = str(len(leads) - before)
        entry["missed"] = f"{len(missed)}{arms_of(missed) if leads else ''}"
        entry["lead"] = f"{leads[0]:.0f}, {median(leads):.0f}, {leads[-1]:.0f}" if leads else DASH
        for title, same in (("trained as sampled", True), ("the rest", False)):
            some = [row for row in alive if (row["fingerprint"] in sound) is same]
            shown = [row for row in some if row[column] is not None]
            entry[title] = f"{len(shown)} of {len(some)}{arms_of(shown) if same else ''}"
        table.append(entry)
    return table_of(ALARMS_TITLE, table)


# ----------------------------------------------------------------------------------------------------
# the law of the onset

LAW_TITLE = (
    "**When the flattening begins**: log onset = intercept + sum of coefficient x factor + noise, with 95 % "
    "intervals. Runs without an onset count as later than their last step."
)


def law(rows: Sequence[dict], runs: Sequence[Run], arms: Sequence[str]) -> Table:
    """The fit over the runs of `arms`.

    Factors: log(1 - top_p) and log learning rate, and with several worlds the log entropy of the first steps'
    text, as far as the runs differ in them.
    """
    by_fingerprint = {run.fingerprint: run.cfg for run in runs if run.arm in arms}
    used = [
        (row, by_fingerprint[row["fingerprint"]])
        for row in rows
        if row["fingerprint"] in by_fingerprint and by_fingerprint[row["fingerprint"]].rollout.top_p < 1
    ]
    factors = {
        "log(1 - top_p)": [log(1 - cfg.rollout.top_p) for _, cfg in used],
        "log learning rate": [log(float(row["rate"])) for row, _ in used],
    }
    if len({row["world"] for row, _ in used}) > 1:  # within a world the first steps differ by noise alone
        factors["log entropy of the first steps"] = [log(row["entropy_start"] or 1.0) for row, _ in used]
    factors = {name: values for name, values in factors.items() if len(set(values)) > 1}
    seen = [row["onset"] is not None for row, _ in used]
    times = [row["onset"] or row["steps"] for row, _ in used]
    fit = intervals.survival_fit(list(zip(*factors.values(), strict=True)), times, seen) if factors else None
    if fit is None:
        return Table(LAW_TITLE, (), [])
    entries = [
        {"factor": name, "coefficient": f"{value:+.2f} ± {half:.2f}"}
        for name, value, half in zip(("intercept", *factors), fit.coefficients, fit.halves, strict=True)
    ]
    runs_used = f"{fit.scatter:.2f}; {sum(seen)} onsets in {len(used)} runs"
    return table_of(LAW_TITLE, [*entries, {"factor": "scatter of log onset", "coefficient": runs_used}])


def all_tables(experiment: Experiment, rows: Sequence[dict]) -> str:
    """The tables of a record as Markdown."""
    made = {commit for row in rows for commit in row["commit"].split()}
    commits = sorted({commit[:7] + CHANGES * commit.endswith(CHANGES) for commit in made})
    head = (
        f"{experiment.name}: {len(rows)} of {len(experiment.runs)} runs played, their rows in "
        f"{experiment.record.name}, commit {', '.join(commits) or 'unknown'}."
    )
    worlds = dict.fromkeys(row["world"] for row in rows) if experiment.figure == "endings" else ()
    tables = [
        *[beside_llds(experiment, rows, world) for world in worlds],
        by_arm(rows, OUTCOMES_TITLE, OUTCOMES),
        by_arm(rows, LIKELIHOODS_TITLE, LIKELIHOODS),
        compared(rows, experiment.pairs),
        alarms(rows, experiment.runs),
        law(rows, experiment.runs, experiment.law),
    ]
    head = "\n".join(textwrap.wrap(head, WIDTH))
    return "\n\n".join([head, *[markdown(table) for table in tables if table.rows]]) + "\n"
