"""What keeps a long run from being lost: signals, the watchdog, the heartbeat, a console that goes away, and
the agreement of all processes to stop.

The watchdog is a thread: where no sign of life (a phase begun, an episode finished) came for
`run.watchdog_s`, it names rank and phase, writes every thread's stack to the run's folder, saves what it
safely can and ends the process.
"""

import errno
import faulthandler
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import torch
from tqdm import tqdm

from lld.files import replace_file
from lld.running.lock import Lock, is_alive
from lld.tools import Unplayed

# Exit codes of train.py; 0: done, 1: a bug, with its traceback.
USER, RETRIEVER, PHASE, SIGNAL, NOT_FINITE, DISK, HUNG, PEER = 2, 3, 4, 5, 6, 7, 8, 9
WAITING = "waiting for the other processes"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# What a signal does in a phase that is not cut short; all others are dropped and repeated.
FINISHED = {
    "update": "the update is finished",
    "logs": "the step is logged",
    "checkpoint": "the checkpoint is finished",
    WAITING: "the other processes finish theirs",
    "report": "the report is finished",
}
ENDED = ("done", "stopped", "given up")  # last phases of a process that ended in order
# For the main thread to say itself that a process is gone, which it does with gloo; a collective of NCCL just
# waits
GRACE_S = 10.0
# Who waits for others waits this many times as long, so that the hung process itself is the one that speaks
# first
PATIENCE = 2
LINE_S = 60.0  # seconds between two heartbeat lines on the console
RECENT_STEPS = 20  # whose mean time gives the ETA


class Interrupted(Unplayed):
    """A signal asked the run to stop, so its rollout or evaluation was abandoned."""


class Guard:
    """Looks after one process of a run: from `prepare` on its console and its launcher, from `watch` to
    `close` the run."""

    def __init__(self):
        self.signal = 0  # the first one received
        # Saves a checkpoint; set only while the weights stand still
        self.rescue: Callable[[], Path | None] | None = None
        self.last_beat: dict[str, float] = {}
        self.run_dir, self.rank, self.num_processes, self.watchdog_s = None, 0, 1, 0.0
        self.now, self.alive, self.last_line, self.step_times = ("start", 0), time.monotonic(), 0.0, []
        self.handlers, self.over, self.thread, self.consoles = {}, threading.Event(), None, None
        self.lock: Lock | None = None
        self.saving, self.began, self.missed = threading.Lock(), time.time(), None
        self.outcome = "ended by an error"  # what the heartbeat says in the end

    def close(self) -> None:
        if self.run_dir is not None:
            self.phase(self.outcome)
        self.over.set()
        if self.thread is not None:
            self.thread.join()  # or it could arm the timer once more
            faulthandler.cancel_dump_traceback_later()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.consoles is not None:
            sys.stdout, sys.stderr = self.consoles
        if self.lock is not None:
            self.lock.release()

    def prepare(self, launcher: int | None = None) -> None:
        """From here on a signal ends the process in one line, a console that is gone is written to no more,
        and the end of the launcher, if there is one, is a SIGTERM: it does not hand on its own death."""
        self.consoles = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = Console(sys.stdout), Console(sys.stderr)
        if threading.current_thread() is threading.main_thread():
            # Nohup ignores SIGHUP
            asked = [
                number
                for number in SIGNALS
                if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP
            ]
            self.handlers = {number: signal.signal(number, self._received) for number in asked}
        if launcher is not None:
            threading.Thread(target=self._follow, args=(launcher,), daemon=True).start()

    def _follow(self, launcher: int) -> None:
        while not self.over.wait(0.5):
            if os.getppid() != launcher:
                print(
                    f"\ntrain.py: its launcher (process {launcher}) is gone; this process ends as if by "
                    "SIGTERM.",
                    file=sys.stderr,
                    flush=True,
                )
                if not self.signal:
                    os.kill(os.getpid(), signal.SIGTERM)
                return

    def watch(self, run_dir: Path, accelerator, watchdog_s: float) -> None:
        """From here on signals ask for an orderly end, and silence of more than `watchdog_s` seconds (0: any)
        ends the process."""
        self.run_dir, self.rank, self.num_processes, self.watchdog_s = (
            Path(run_dir),
            accelerator.process_index,
            accelerator.num_processes,
            watchdog_s,
        )
        self.alive = time.monotonic()
        if watchdog_s:
            self.thread = threading.Thread(target=self._look, daemon=True)
            self.thread.start()

    def _received(self, number: int, _) -> None:
        self.signal = number
        for other in self.handlers:
            signal.signal(other, signal.SIG_DFL)
        if self.run_dir is None:
            raise KeyboardInterrupt
        phase, step = self.now
        what = FINISHED.get(phase, "what is being played is dropped and will be repeated")
        then = "" if phase == "report" else ", then the run stops with a checkpoint"
        print(
            f"\ntrain.py: {signal.Signals(number).name} received in phase {phase!r} of step {step}: "
            f"{what}{then}. A second signal ends the process at once.",
            file=sys.stderr,
            flush=True,
        )

    def phase(self, name: str, step: int | None = None) -> None:
        """A phase begins; a sign of life."""
        self.now, self.alive = (name, self.now[1] if step is None else step), time.monotonic()
        self._write()

    def ticks(self, bar: tqdm) -> Callable[[int], None]:
        """`bar.update` that is a sign of life as well, and raises Interrupted once a signal has come."""
        done = 0  # not bar.n, which a disabled bar, as on all ranks but the first, leaves at 0
        if bar.total == 0 and self.num_processes > 1:  # nothing to play here
            self.phase(WAITING)

        def tick(count: int) -> None:
            nonlocal done
            done += count
            bar.update(count)
            self.alive = time.monotonic()
            if self.signal:
                raise Interrupted(f"{signal.Signals(self.signal).name} received")
            if done >= bar.total and self.num_processes > 1:
                self.phase(WAITING)

        return tick

    def agreed(self, accelerator) -> str | None:
        """The signal that any process has received, or None; every process must call."""
        number = largest(accelerator, self.signal)
        return signal.Signals(number).name if number else None

    def beat(self, step: int, num_steps: int, step_s: float, num_tokens: int, reward: float) -> None:
        """The heartbeat after `step`: always in the run's folder; at most every `LINE_S` seconds on a console
        that shows no bar."""
        self.step_times = [*self.step_times, step_s][-RECENT_STEPS:]
        eta_s = sum(self.step_times) / len(self.step_times) * (num_steps - step - 1)
        self.last_beat = {
            "step_s": step_s,
            "tokens_per_s": num_tokens / step_s,
            "memory_gb": memory_gb(),
            "eta_s": eta_s,
        }
        self._write()
        if time.monotonic() - self.last_line > LINE_S and not sys.stderr.isatty():
            self.last_line = time.monotonic()
            hours, minutes = divmod(int(eta_s / 60), 60)
            tqdm.write(
                f"step {step + 1}/{num_steps}: reward {reward:.3f}, {step_s:.1f} s a step, "
                f"{num_tokens / step_s:.0f} tokens/s, {self.last_beat['memory_gb']:.1f} GB, {hours} h "
                f"{minutes:02d} min to go"
            )

    def _write(self) -> None:
        if self.run_dir is None:
            return
        row = {
            "rank": self.rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "phase": self.now[0],
            "step": self.now[1],
        } | self.last_beat
        try:
            replace_file(heartbeat_path(self.run_dir, self.rank), json.dumps(row) + "\n")
        except OSError:  # a full disk is told by what must be written; a heartbeat is not
            pass

    def _look(self) -> None:
        while not self.over.wait(min(1.0, self.watchdog_s / 4)):
            allowed_s = self.watchdog_s * (PATIENCE if self.now[0] == WAITING else 1)
            if time.monotonic() - self.alive > allowed_s:
                self._end(allowed_s)
            gone = self._gone()
            self.missed = (self.missed or time.monotonic()) if gone else None
            if gone and time.monotonic() - self.missed > GRACE_S:
                self._end_alone(gone)
            # In C, for the case that a hung call never lets this thread run again.
            faulthandler.dump_traceback_later(PATIENCE * self.watchdog_s + 1, exit=True, file=2)

    def _end(self, allowed_s: float) -> None:
        phase, step = self.now
        path = self.run_dir / f"watchdog-rank{self.rank}.txt"
        faulthandler.dump_traceback_later(max(60.0, allowed_s), exit=True, file=2)  # saving may hang as well
        others = self._others() if phase == WAITING else ""
        report = f" python -m lld.report {self.run_dir} draws what was logged." if self.rank == 0 else ""
        text = (
            f"train.py: rank {self.rank} has shown no sign of life for {allowed_s:g} s (run.watchdog_s) "
            f"in phase {phase!r} of step {step}{others}."
        )
        try:
            with open(path, "w") as file:
                file.write(text + "\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            text += f" The stacks are in {path}."
        except OSError as error:
            text += f" The stacks could not be written: {error}."
        print(f"\n{text} {self.save_what_stands()}{report}", file=sys.stderr, flush=True)
        os._exit(HUNG)

    def _gone(self) -> str:
        """The processes of this run and machine that do not exist any more and did not end in order; empty
        without any."""
        found = []
        for rank in set(range(self.num_processes)) - {self.rank}:
            path = heartbeat_path(self.run_dir, rank)
            try:
                # An earlier launch's
                row = json.loads(path.read_text()) if path.stat().st_mtime > self.began else {"phase": "done"}
                if (
                    row["phase"] not in ENDED
                    and row["host"] == socket.gethostname()
                    and not is_alive(row["pid"])
                ):
                    found.append(
                        f"rank {rank} (process {row['pid']}, in phase {row['phase']!r} of step {row['step']})"
                    )
            except (OSError, ValueError, KeyError):
                pass
        return ", ".join(found)

    def _end_alone(self, gone: str) -> None:
        faulthandler.dump_traceback_later(60.0, exit=True, file=2)  # saving may hang as well
        print(
            f"\ntrain.py: rank {self.rank}: {gone} is gone, and what this process waits for will not come. "
            f"{self.save_what_stands()}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(PEER)

    def save_what_stands(self) -> str:
        """Saves a checkpoint if the weights stand still, and says how the run goes on."""
        try:
            with self.saving:  # the second of two threads finds it done
                folder = self.rescue() if self.rescue is not None else None
        except Exception as error:
            return f"No checkpoint could be saved ({error}); --resume continues from the last one."
        return (
            f"Saved {folder}; continue with --resume."
            if folder
            else "Continue from the last checkpoint with --resume."
        )

    def _others(self) -> str:
        # Not those of an earlier, larger launch
        paths = [heartbeat_path(self.run_dir, rank) for rank in range(self.num_processes)]
        rows = [json.loads(path.read_text()) for path in paths if path.exists()]
        busy = [
            f"rank {row['rank']} is in phase {row['phase']!r} of step {row['step']} since {row['time']}"
            for row in rows
            if row["phase"] != WAITING
        ]
        return f"; {', '.join(busy)}" if busy else ""


class Console:
    """stdout or stderr that may go away, as when `tee` or a terminal ends: what is written after that is
    dropped, and the run goes on."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        return self._do(lambda: self.stream.write(text), len(text))

    def flush(self) -> None:
        self._do(self.stream.flush, None)

    def _do(self, action: Callable, otherwise):
        try:
            return action()
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self.stream.fileno())  # for what other libraries print as well
        return otherwise


def heartbeat_path(run_dir: Path, rank: int) -> Path:
    return run_dir / (f"heartbeat-rank{rank}.json" if rank else "heartbeat.json")


def largest(accelerator, number: int) -> int:
    """The largest of all processes' numbers: one tiny all-gather; every process must call."""
    return int(accelerator.gather(torch.tensor([number], device=accelerator.device)).max())


def short(error: BaseException) -> str:
    """The first sentence of an error of torch, without the source line it was raised at."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return first.split("] ", 1)[-1].split(". ")[0]


def memory_gb() -> float:
    """Peak memory of this process: on its GPU, or resident where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
    )


def lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another process is gone or silent, in gloo's or NCCL's words."""
    return isinstance(error, torch.distributed.DistError) or any(
        word in str(error)
        for word in (
            "gloo/transport",
            "Connection closed by peer",
            "Connection reset by peer",
            "Timed out waiting",
        )
    )
