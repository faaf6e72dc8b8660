"""What the early warning and the collapse alarm (lld/record/phases.py) are worth on recorded runs: misses,
delays, false alarms.

    python tests/bench/alarm.py              # the table of the first world, from tests/fixtures/alarm.jsonl
    python tests/bench/alarm.py --causes     # signs in some runs of configs/experiments/causes.yaml
    python tests/bench/alarm.py --add RUN …  # adds run folders to the fixture of those

A run counts as collapsed if the mean reward of its last 10 steps is below half of its best level (the highest
mean of 10 steps, of fewer at the start), and its reward as lost from the first step at which the mean of the
last 5 steps is below half of the level so far and stays there for 10 steps.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean, median

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lld.experiment.outcomes import SIGNS, alarms
from lld.record import phases, runs

FIXTURE = ROOT / "tests" / "fixtures" / "alarm.jsonl"
CAUSES = ROOT / "tests" / "fixtures" / "causes.jsonl"
NAMES = (*phases.WATCHED, "displacement/correct")
DIGITS = 3


def add(folders: list[Path]) -> None:
    """Adds the columns that the rule reads, a line a run."""
    lines = []
    for folder in folders:
        rows, options = runs.read_metrics(folder), runs.read_options(folder)
        about = {
            "method": runs.method(options),
            "rate": options["optim.lr"],
            "seed": options["run.seed"],
            "name": folder.name,
            "questions": options["rollout.num_questions"],
            "updates": options["optim.updates_per_rollout"],
        }
        columns = {
            name: [short(row[name]) if name in row else None for row in rows]
            for name in NAMES
            if any(name in row for row in rows)
        }
        lines.append(json.dumps(about | {"columns": columns}, separators=(",", ":")))
    with open(CAUSES, "a") as file:
        file.write("".join(line + "\n" for line in lines))


def short(value: float) -> float | int:
    """The value with three digits, 1 in place of 1.0."""
    value = float(f"{value:.{DIGITS}g}")
    return int(value) if value.is_integer() else value


def read(path: Path = FIXTURE) -> list[tuple[dict, list[dict]]]:
    """(what a run is, its rows) of every recorded run."""
    found = []
    for line in path.read_text().splitlines():
        about = json.loads(line)
        columns = about.pop("columns")
        count = len(columns["reward/mean"])
        rows = [
            {"step": step}
            | {name: values[step] for name, values in columns.items() if values[step] is not None}
            for step in range(count)
        ]
        found.append((about, rows))
    return found


def reward_lost(rewards: list[float]) -> tuple[bool, int | None]:
    """Whether a run has collapsed by its end, and from which step its reward was lost; None if it never was
    for 10 steps."""
    levels = runs.running_mean(rewards, phases.WINDOW)
    low = [fmean(rewards[max(0, s - 4) : s + 1]) < max(levels[: s + 1]) / 2 for s in range(len(rewards))]
    since = next((s for s in range(len(rewards) - 9) if all(low[s : s + 10])), None)
    return fmean(rewards[-10:]) < max(levels) / 2, since


def judge(about: dict, rows: list[dict]) -> dict:
    """One row of the table: whether and when the reward was lost, and the first step of each alarm."""
    collapsed, since = reward_lost([row["reward/mean"] for row in rows])
    return (
        about | {"steps": len(rows), "collapsed": collapsed, "lost": since} | alarms(rows, about["updates"])
    )


def table() -> tuple[list[dict], str]:
    """The judged runs, and the table as text."""
    judged = sorted(
        (judge(about, rows) for about, rows in read()),
        key=lambda run: (run["questions"], run["rate"], run["method"], run["seed"]),
    )

    def show(value):
        return "–" if value is None else str(value)

    lines = [
        (
            "| questions | rate | method | seed | steps | collapsed | reward lost from | "
            + " | ".join(SIGNS)
            + " |"
        ),
        "|---" * (7 + len(SIGNS)) + "|",
    ]
    for run in judged:
        lines.append(
            f"| {run['questions']} | {run['rate']:g} | {run['method']} | {run['seed']} | {run['steps']} | "
            f"{'yes' if run['collapsed'] else 'no'} | {show(run['lost'])} | "
            + " | ".join(show(run[f"alarm_{name}"]) for name in SIGNS)
            + " |"
        )
    dead = [run for run in judged if run["collapsed"]]
    alive = [run for run in judged if not run["collapsed"]]
    for name in SIGNS:
        column = f"alarm_{name}"
        delays = sorted(run[column] - run["lost"] for run in dead if run[column] is not None)
        before = sum(delay < 0 for delay in delays)
        middle = f", {delays[0]:+d} to {delays[-1]:+d} steps, median {median(delays):+g}" if delays else ""
        lines.append(
            f"\n{name}: of {len(dead)} collapsed runs {before} before the loss, {len(delays) - before} after "
            f"it, {len(dead) - len(delays)} missed{middle}; false alarms in "
            f"{sum(run[column] is not None for run in alive)} of {len(alive)} others"
        )
    return judged, "\n".join(lines)


def signs_of_causes() -> dict[str, dict[str, int | None]]:
    """Run -> the first step of each sign, of the recorded runs of configs/experiments/causes.yaml."""
    return {about["name"]: alarms(rows, about["updates"]) for about, rows in read(CAUSES)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--add", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--causes", action="store_true")
    args = parser.parse_args()
    if args.add:
        add(args.add)
    if args.causes or args.add:
        for name, signs in signs_of_causes().items():
            print(name, signs)
    else:
        print(table()[1])
