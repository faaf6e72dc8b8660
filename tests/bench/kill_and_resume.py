"""kill -9 at random moments of every phase, and faults of one rank of two; each run is then resumed and
compared with one that nothing disturbed, bit for bit; and a hung search.

    python tests/bench/kill_and_resume.py [--moments 20] [--seed 0] [--out FOLDER]

Every run is a forked child of this process, which imports train.py once and never computes. Prints a table;
exit code 1 where anything differs. A kill falls at a random time within a random visit of its phase, as the
undisturbed run timed it.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a forked child has none of its parent's threads
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path[:0] = [str(Path(__file__).parent.parent.parent), str(Path(__file__).parent.parent)]

import itertools

from test_train import write_config

import train
from lld.record.runs import read_rows
from lld.running import checkpoint, recording, setup, survive

PHASES = ("rollout", "update", "checkpoint", "evaluation")
STEPS = 4
OPTIONS = {
    "run": {"steps": STEPS, "save_every": 2},
    "eval": {"every": 2, "max_questions": 3},
    "rollout": {"num_questions": 2, "group_size": 4, "max_new_tokens": 24, "num_slots": 8},
}


def start(config: Path, *more: str, before=None, rank: int = 0, num_ranks: int = 1, port: int = 0) -> int:
    """Forks a run of train.py, its output in a file beside the YAML; returns its process id. `before()` runs
    in the child."""
    child = os.fork()
    if child:
        return child
    log = os.open(config.with_suffix(f".rank{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if num_ranks > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(num_ranks),
            LOCAL_WORLD_SIZE=str(num_ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    recording.draw_report = lambda *_: ""  # figures take longer than these runs
    try:
        if before is not None:
            before()
        code = train.main(["--config", str(config), *more])
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def finish(child: int, timeout_s: float = 300.0) -> int:
    """The exit code of a child, negative where a signal ended it; it is killed if it takes too long."""
    deadline = time.monotonic() + timeout_s
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError(f"process {child} was still running after {timeout_s:g} s")
        time.sleep(0.01)


def on_phase(do) -> None:
    """`do(name, visit, step)` at the beginning of every phase of the run in this process."""
    phase, visits = survive.Guard.phase, {}

    def counting(self, name, step=None):
        phase(self, name, step)
        visits[name] = visits.get(name, 0) + 1
        do(name, visits[name], self.now[1])

    survive.Guard.phase = counting


def timed(path: Path):
    """Writes when every phase began; the last one's end is that of the process."""
    moments = []

    def note(name, visit, _):
        moments.append((name, visit, time.monotonic()))
        path.write_text(json.dumps(moments))

    return lambda: on_phase(note)


def killed_in(phase: str, visit: int, delay_s: float):
    """kill -9 so many seconds into that visit of the phase."""

    def strike(name, number, _):
        if (name, number) == (phase, visit):
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    return lambda: on_phase(strike)


def content(run_dir: Path) -> dict[str, str]:
    """Checksums of what must not differ: both logs, and weights and optimizer after the last step."""
    last = checkpoint.folder_of(run_dir, STEPS)
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (
            run_dir / "metrics.jsonl",
            run_dir / "updates.jsonl",
            last / "model.safetensors",
            last / "trainer_state.pt",
        )
    }


def options(folder: Path, name: str, **changes) -> Path:
    tree = {
        section: OPTIONS.get(section, {}) | changes.get(section, {})
        for section in OPTIONS.keys() | changes.keys()
    }
    tree["run"] = tree["run"] | {"dir": str(folder / name)}
    return write_config(folder, name, **tree)


def resume(config: Path, run_dir: Path) -> None:
    more = ["--resume"] if (run_dir / "config.yaml").exists() else []  # killed before there was a run
    code = finish(start(config, *more))
    assert code == 0, config.with_suffix(".rank0.log").read_text()[-3000:]


def kills(folder: Path, num_moments: int, seed: int) -> list[bool]:
    """One row of the table a moment; whether each resumed run equals the undisturbed one."""
    undisturbed = options(folder, "kills_undisturbed")
    assert finish(start(undisturbed, before=timed(folder / "moments.json"))) == 0, undisturbed.with_suffix(
        ".rank0.log"
    ).read_text()[-3000:]
    expected = content(folder / "kills_undisturbed")
    began = json.loads((folder / "moments.json").read_text())
    lengths = {(name, visit): later - at for (name, visit, at), (_, _, later) in itertools.pairwise(began)}
    chance, equal = random.Random(seed), []
    print(
        "| # | phase | visit | killed after | steps logged | resumed from step | equal "
        "|\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    for number in range(num_moments):
        phase = PHASES[number % len(PHASES)]
        visit = chance.choice([visit for name, visit in lengths if name == phase])
        delay_s = chance.uniform(0, lengths[phase, visit])
        run_dir = folder / f"killed_{number}"
        config = options(folder, run_dir.name)
        code = finish(start(config, before=killed_in(phase, visit, delay_s)))
        found = checkpoint.latest(run_dir)
        logged, kept = (
            len(read_rows(run_dir / "metrics.jsonl")),
            int(found.name.removeprefix("step_")) if found else 0,
        )
        resume(config, run_dir)
        different = [name for name, value in content(run_dir).items() if value != expected[name]]
        equal.append(code in (-9, 0) and not different)
        print(
            f"| {number + 1} | {phase if code == -9 else 'over before the kill'} | {visit} | "
            f"{1000 * delay_s:.0f} of {1000 * lengths[phase, visit]:.0f} ms | {logged} | {kept} | "
            f"{', '.join(different) or 'yes'} |",
            flush=True,
        )
        shutil.rmtree(run_dir)
    return equal


def hang(rank: int):
    """The search of `rank` never returns."""

    def before():
        make = setup.make_search
        setup.make_search = lambda retriever: (
            (lambda queries: time.sleep(3600))
            if os.environ.get("RANK", "0") == str(rank)
            else make(retriever)
        )

    return before


def struck(rank: int, number: int):
    """`rank` gets a signal when the rollout of step 1 begins; the others do not."""

    def strike(name, _, step):
        if name == "rollout" and step == 1 and os.environ["RANK"] == str(rank):
            os.kill(os.getpid(), number)

    return lambda: on_phase(strike)


def two_ranks(folder: Path) -> list[bool]:
    """Rank 1 of two alone is told to stop, is killed, hangs; then the run goes on with one process."""
    found = []
    print(
        "| rank 1 of 2 | exit codes | resumed from step | message of rank 0 |\n|---|---|---|---|", flush=True
    )
    faults = {
        "gets SIGTERM": (struck(1, signal.SIGTERM), [5, 5], "1", "stopped by SIGTERM, as asked"),
        "is killed": (
            struck(1, signal.SIGKILL),
            [9, -9],
            "1",
            "another process of this run ended or fell silent",
        ),
        "hangs in a search": (hang(1), [9, 8], "0", "another process of this run ended or fell silent"),
    }
    for what, (before, codes, step, message) in faults.items():
        name = what.replace(" ", "_")
        config = options(
            folder,
            name,
            eval={"every": 0},
            run={"watchdog_s": 4 if "hangs" in what else 120, "save_every": 50},
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = [start(config, before=before, rank=rank, num_ranks=2, port=port) for rank in (0, 1)]
        ended = [finish(child) for child in children]
        said = [config.with_suffix(f".rank{rank}.log").read_text() for rank in (0, 1)]
        saved = checkpoint.latest(folder / name)
        line = next(
            (line for line in said[0].splitlines() if message in line), said[0][-1500:] + said[1][-1500:]
        )
        fine = (
            ended == codes
            and saved is not None
            and int(saved.name.removeprefix("step_")) == int(step)
            and message in line
        )
        if "hangs" in what:
            fine = (
                fine
                and "rank 1 has shown no sign of life for 4 s (run.watchdog_s) in phase 'rollout' of step 0"
                in said[1]
                and "Thread" in (folder / name / "watchdog-rank1.txt").read_text()
            )
        print(f"| {what} | {ended} | {saved and saved.name} | {line} |", flush=True)
        found.append(fine)
    alone = options(folder, "alone_and_hung", eval={"every": 0}, run={"watchdog_s": 4})
    code = finish(start(alone, before=hang(0)))
    line = next(
        (line for line in alone.with_suffix(".rank0.log").read_text().splitlines() if "sign of life" in line),
        "",
    )
    found.append(
        code == 8
        and "Saved" in line
        and checkpoint.latest(folder / alone.stem) == checkpoint.folder_of(folder / alone.stem, 0)
    )
    print(f"| the only process hangs in a search | {code} | step_000000 | {line} |", flush=True)
    resume(alone, folder / alone.stem)
    resume(folder / "is_killed.yaml", folder / "is_killed")  # on one process
    found.append(len(read_rows(folder / "is_killed" / "metrics.jsonl")) == STEPS)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the runs; it may hold a tiny world already")
    args = parser.parse_args()
    folder = args.out or Path(tempfile.mkdtemp())
    equal = kills(folder, args.moments, args.seed)
    print(f"{sum(equal)} of {len(equal)} killed runs equal the undisturbed one bit for bit\n")
    ranks = two_ranks(folder)
    print(f"{sum(ranks)} of {len(ranks)} checks of hung, killed and interrupted processes hold")
    if args.out is None:
        shutil.rmtree(folder)
    return 0 if all(equal + ranks) else 1


if __name__ == "__main__":
    sys.exit(main())
