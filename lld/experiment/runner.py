"""Many runs as one experiment: worlds x arms x learning rates x seeds, in parallel processes, resumable.

    python -m lld.experiment configs/experiments/causes.yaml [--jobs N] [--only PATTERN] [--out FOLDER]
                                                             [--worlds FOLDER] [--record CSV]
    python -m lld.experiment configs/experiments/causes.yaml --tables [--figure PNG]

The YAML is described in lld/experiment/grid.py. A run lies in OUT/{world}/{arm}-lr{rate}-s{seed}, its console
output in a .log beside it, prepared worlds in OUT/worlds/{world}. Each finished run becomes a row of the
record, a CSV that is kept with the code. A run whose row is there is not repeated, on whatever machine it was
played; half-finished ones go on from their newest checkpoint. `--tables` prints the tables of the record and
starts nothing.
"""

import argparse
import dataclasses
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from tqdm import tqdm

from lld import files
from lld.experiment import outcomes, tables
from lld.experiment.figure import plot_experiment
from lld.experiment.grid import Experiment, Run, check_made_alike, load_experiment
from lld.record.runs import printable

ROOT = Path(__file__).resolve().parents[2]
# Runs are parallel instead of threads; no progress bars in logs
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
POLL_S = 0.5
LOG_TAIL = 12  # lines of a failed run's log that are shown


@dataclass(frozen=True)
class Job:
    name: str
    command: tuple[str, ...]
    log: Path


# ----------------------------------------------------------------------------------------------------
# run


def tail(log: Path, num_lines: int = LOG_TAIL) -> str:
    lines = log.read_text(errors="replace").replace("\r", "\n").rstrip().split("\n") if log.exists() else []
    return "\n".join(f"    {printable(line)}" for line in lines[-num_lines:])


def stop_all(processes: Sequence[subprocess.Popen], patience_s: float = 10.0) -> None:
    """Terminates processes and their children; kills those still running after `patience_s`."""
    for number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, None)):
        running = [process for process in processes if process.poll() is None]
        for process in running:
            os.killpg(process.pid, number)
        deadline = time.monotonic() + (wait_s or 0)
        for process in running:
            try:
                process.wait(timeout=None if wait_s is None else max(0.01, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass


def start(job: Job, keep_open: tuple[int, ...]) -> subprocess.Popen:
    """Starts a job's command in its own session: Ctrl-C reaches only this process, which ends the job."""
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with open(job.log, "a") as log:
        return subprocess.Popen(
            job.command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | ONE_THREAD,
            start_new_session=True,
            pass_fds=keep_open,
        )


def execute(
    jobs: Sequence[Job],
    num_jobs: int,
    what: str,
    keep_open: tuple[int, ...] = (),
    done: Callable[[Job], None] = lambda job: None,
) -> list[str]:
    """Runs the jobs' commands, `num_jobs` at a time, one thread each; returns the names of failed ones.

    A failure is printed with the end of its log and does not stop the others. If this function is
    interrupted, its children are terminated. `keep_open`: file descriptors that the children inherit.
    `done` is called with each job that succeeded.
    """
    waiting, running, failed = list(jobs), {}, []
    with tqdm(total=len(jobs), desc=what, unit="job") as progress:
        try:
            while waiting or running:
                while waiting and len(running) < num_jobs:
                    job = waiting.pop(0)
                    running[job] = start(job, keep_open)
                    progress.set_postfix_str(", ".join(job.name for job in running))
                for job in [job for job, process in running.items() if process.poll() is not None]:
                    code = running.pop(job).returncode
                    progress.update()
                    if code:
                        failed.append(job.name)
                        progress.write(
                            f"{job.name} failed with exit code {code}; the end of {job.log}:\n"
                            f"{tail(job.log)}",
                            file=sys.stderr,
                        )
                    else:
                        done(job)
                time.sleep(POLL_S if running else 0)
        finally:
            stop_all(list(running.values()))
    return failed


def prepare_world(run: Run) -> int:
    """Makes the tiny world of `run` in this process unless it exists; returns the exit code."""
    import torch

    from lld.tinyworld import prepare

    torch.set_num_threads(1)
    try:
        prepare.prepare_world(run.cfg.tinyworld, run.cfg.rollout, run.cfg.retriever.topk)
    except files.WriteError as error:
        print(f"lld.experiment: {error}: make room; the same command continues", file=sys.stderr)
        return 7
    return 0


def run_experiment(experiment: Experiment, num_jobs: int, script: Path, prepare: Sequence[str]) -> list[str]:
    """Prepares the worlds, then runs all unfinished runs; returns the names of failed jobs.

    `script` is train.py; `prepare` the command that makes a world, to which the run's name is added. The
    children hold the lock too: a child left over from a killed experiment cannot write into a run that a
    second experiment continues.
    """
    experiment.out.mkdir(parents=True, exist_ok=True)
    with open(experiment.out / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"another experiment, or a run that one started, is still working in {experiment.out}: "
                "wait for it or end it"
            ) from None
        known = {row["fingerprint"] for row in outcomes.read_record(experiment.record)}
        todo = [run for run in experiment.runs if run.fingerprint not in known]
        for run in [run for run in todo if run.finished()]:  # killed before its row was written
            outcomes.add_to_record(experiment.record, outcomes.record_of(run))
            todo.remove(run)
        jobs = world_jobs(experiment, todo, prepare)
        failed = execute(jobs, num_jobs, "worlds", (lock.fileno(),)) if jobs else []
        ready = {run.name: run for run in todo if f"world {run.world}" not in failed}
        jobs = [Job(run.name, train_command(run, experiment.base, script), run.log) for run in ready.values()]
        print(
            f"{len(experiment.runs)} runs: {len(experiment.runs) - len(todo)} in {experiment.record}, "
            f"{len(jobs)} to do, {len(todo) - len(ready)} without a world",
            file=sys.stderr,
        )

        def add_row(job: Job) -> None:
            outcomes.add_to_record(experiment.record, outcomes.record_of(ready[job.name]))

        return failed + execute(jobs, num_jobs, "runs", (lock.fileno(),), add_row)


def world_jobs(experiment: Experiment, todo: Sequence[Run], prepare: Sequence[str]) -> list[Job]:
    """A job for each tiny world that a run of `todo` needs, named by the first of its runs."""
    first: dict[str, Run] = {}
    for run in todo:
        if run.cfg.tinyworld.dir is not None:
            first.setdefault(run.world, run)
    return [
        Job(f"world {name}", (*prepare, run.name), experiment.out / f"world-{name}.log")
        for name, run in first.items()
    ]


def train_command(run: Run, base: Path, script: Path) -> tuple[str, ...]:
    resume = ["--resume"] if (run.folder / "config.yaml").exists() else []
    return (sys.executable, str(script), "--config", str(base), *resume, *run.overrides)


# ----------------------------------------------------------------------------------------------------
# command line


def rows_of(experiment: Experiment) -> list[dict]:
    """The recorded rows of the experiment's runs, in the order of its YAML; ValueError if there is none.

    A record may hold other experiments too; a run that they share has this one's names here.
    """
    record = {row["fingerprint"]: row for row in outcomes.read_record(experiment.record)}
    found = [(run, record[run.fingerprint]) for run in experiment.runs if run.fingerprint in record]
    if not found:
        raise ValueError(f"no run of this experiment is in {experiment.record}: play it, or give --record")
    return [row | {"world": run.world, "arm": run.arm} for run, row in found]


def write_tables(experiment: Experiment, figure: str | None) -> str:
    """The tables of the experiment's rows as Markdown; draws the figure if it has a path."""
    rows = rows_of(experiment)
    if figure:
        plot_experiment(rows, experiment.figure_arms, figure, experiment.figure)
    return tables.all_tables(experiment, rows)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lld.experiment", description="Runs and tabulates an experiment."
    )
    parser.add_argument("experiment", help="YAML of configs/experiments/")
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        help="runs at a time, one thread each (default: number of cores)",
    )
    parser.add_argument("--only", metavar="PATTERN", help="only runs with such names, as 'wordy/*-s0'")
    parser.add_argument("--tables", action="store_true", help="print the record's tables; start nothing")
    parser.add_argument("--figure", metavar="PNG", help="with --tables: draw the figure into this file")
    parser.add_argument("--record", metavar="CSV", help="in place of the YAML's `record`")
    parser.add_argument("--out", help="in place of the YAML's `out`")
    parser.add_argument("--worlds", help="folder of the prepared worlds (default: OUT/worlds)")
    parser.add_argument(
        "--prepare", metavar="RUN", help="only make the world of that run, named WORLD/ARM-lrRATE-sSEED"
    )
    return parser


def run_command(experiment: Experiment, args: argparse.Namespace, script: Path) -> list[str]:
    """`run_experiment` as the command line asks for it; SIGTERM ends it like Ctrl-C."""
    if args.jobs < 1:
        raise ValueError(f"--jobs {args.jobs}: must be at least 1")
    where = ["--out", str(experiment.out)] + (["--worlds", args.worlds] if args.worlds else [])
    prepare = [sys.executable, "-m", "lld.experiment", args.experiment, *where, "--prepare"]
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run_experiment(experiment, args.jobs, script, prepare)
    finally:
        signal.signal(signal.SIGTERM, before)


def chosen(experiment: Experiment, pattern: str | None) -> Experiment:
    """The experiment with only the runs whose names match; its folders are checked."""
    runs = tuple(run for run in experiment.runs if fnmatch(run.name, pattern or "*"))
    if not runs:
        raise ValueError(f"--only {pattern}: no run has such a name (the first is {experiment.runs[0].name})")
    check_made_alike(runs)
    return dataclasses.replace(experiment, runs=runs)


def main(argv: list[str] | None = None, script: Path = ROOT / "train.py") -> int:
    """The exit code: 0, 1 if a run failed, 2 for a mistake of the user, 7 for a full disk, 130 for Ctrl-C."""
    args, failed = make_parser().parse_args(argv), []
    try:
        if args.figure and not args.tables:
            raise ValueError("--figure without --tables does nothing: add --tables")
        experiment = load_experiment(args.experiment, args.out, args.worlds, args.record)
        if args.prepare:
            by_name = {run.name: run for run in experiment.runs}
            if args.prepare not in by_name:
                raise ValueError(
                    f"--prepare {args.prepare}: no such run (the first is {next(iter(by_name))})"
                )
            return prepare_world(by_name[args.prepare])
        if not args.tables:
            failed = run_command(chosen(experiment, args.only), args, script)
        print(write_tables(experiment, args.figure), flush=True)
    except ValueError as error:
        print(f"lld.experiment: {printable(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the tables has enough of them, as `| head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the exit
    except OSError as error:
        print(
            f"lld.experiment: {printable(error)}: make room or mend the permissions; the same command "
            "continues",
            file=sys.stderr,
        )
        return 7
    except KeyboardInterrupt:
        print("lld.experiment: stopped; the same command continues", file=sys.stderr)
        return 130
    for name in failed:
        print(f"lld.experiment: {name} failed", file=sys.stderr)
    return 1 if failed else 0
