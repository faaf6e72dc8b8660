"""Keep a long run from being lost: signal handlers, watchdog, heartbeat, and a console that may go away.

The watchdog is a thread. If there is no sign of life (a phase starts, an episode finishes, a model is called)
for `run.watchdog_s` seconds, it prints rank and phase, writes the stack of every thread to the run folder,
saves a checkpoint if that is safe, and ends the process.
"""

import ctypes
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
# Phases that a signal does not interrupt, with the message for each. All others are dropped and repeated.
FINISHED = {
    "update": "the update is finished",
    "logs": "the step is logged",
    "checkpoint": "the checkpoint is finished",
    WAITING: "the other processes finish theirs",
    "report": "the report is finished",
}
ENDED = ("done", "stopped", "given up")  # last phase after a normal exit
# Seconds the watchdog leaves the main thread to report a dead process itself. With gloo it does: the
# collective raises. A NCCL collective just blocks.
GRACE_S = 10.0
# A process that waits for others gets this many times the timeout, so that the hung process reports first.
PATIENCE = 2
# Another signal this soon is the same one: to all processes at once, and passed on by their launcher.
ECHO_S = 5.0
LINE_S = 60.0  # seconds between console heartbeat lines
RECENT_STEPS = 20  # the ETA uses their mean duration


class Interrupted(Unplayed):
    """A signal asked the run to stop, so the current rollout or evaluation was abandoned."""


class Guard:
    """Signal handling, watchdog and heartbeat of one process.

    `prepare` installs the signal handlers, the safe console and the check on the launcher. `watch` adds
    heartbeat and watchdog for the run. `close` undoes both and releases the lock.
    """

    def __init__(self):
        self.signal = 0  # number of the first signal received
        # Saves a checkpoint. Set only while no update is changing the weights.
        self.rescue: Callable[[], Path | None] | None = None
        self.last_beat: dict[str, float] = {}
        self.run_dir, self.rank, self.num_processes, self.watchdog_s = None, 0, 1, 0.0
        self.now, self.alive, self.last_line, self.step_times = ("start", 0), time.monotonic(), 0.0, []
        self.handlers, self.over, self.thread, self.consoles = {}, threading.Event(), None, None
        self.lock: Lock | None = None
        self.echo: threading.Timer | None = None
        self.saving, self.began, self.missed = threading.Lock(), time.time(), None
        self.outcome = "ended by an error"  # phase in the last heartbeat

    def close(self) -> None:
        if self.run_dir is not None:
            self.phase(self.outcome)
        self.over.set()
        if self.thread is not None:
            self.thread.join()  # otherwise it could re-arm the timer
            faulthandler.cancel_dump_traceback_later()
        if self.echo is not None:
            self.echo.cancel()
            self.echo.join()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if self.consoles is not None:
            sys.stdout, sys.stderr = self.consoles
        if self.lock is not None:
            self.lock.release()

    def prepare(self, launcher: int | None = None) -> None:
        """Installs the signal handlers, the safe console and the check on the launcher.

        Until `watch`, a signal raises KeyboardInterrupt. Output to a closed console is dropped. `launcher`
        is the process id of `torchrun` or `accelerate launch`; a killed launcher does not signal its
        children, so this process sends itself SIGTERM once the launcher is gone.
        """
        self.consoles = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = Console(sys.stdout), Console(sys.stderr)
        if threading.current_thread() is threading.main_thread():
            # Under nohup SIGHUP is ignored: leave it so.
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
        """Starts heartbeat and watchdog; from here on a signal stops the run with a checkpoint.

        More than `watchdog_s` seconds without a sign of life end the process; 0 turns the watchdog off.
        """
        self.run_dir, self.rank, self.num_processes, self.watchdog_s = (
            Path(run_dir),
            accelerator.process_index,
            accelerator.num_processes,
            watchdog_s,
        )
        self.alive = time.monotonic()
        launched, patience = "TORCHELASTIC_RUN_ID" in os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        if launched and patience not in os.environ and self.rank == 0:
            print(
                "train.py: torchrun kills its processes 30 s after a SIGTERM or Ctrl-C, unless it has a "
                "--shutdown-timeout. That may be too soon for an update and a checkpoint: start it with "
                f"{patience}=1800 in its environment",
                file=sys.stderr,
                flush=True,
            )
        if watchdog_s:
            self.thread = threading.Thread(target=self._look, daemon=True)
            self.thread.start()

    def _received(self, number: int, _) -> None:
        if self.signal:
            return
        self.signal = number
        self.echo = threading.Timer(ECHO_S, self._let_signals_kill)
        self.echo.daemon = True
        self.echo.start()
        if self.run_dir is None:
            raise KeyboardInterrupt
        phase, step = self.now
        what = FINISHED.get(phase, "what is being played is dropped and will be repeated")
        then = "" if phase == "report" else ", then the run stops with a checkpoint"
        print(
            f"\ntrain.py: {signal.Signals(number).name} received in phase {phase!r} of step {step}: "
            f"{what}{then}. After {ECHO_S:g} s a second signal ends the process at once.",
            file=sys.stderr,
            flush=True,
        )

    def _let_signals_kill(self) -> None:
        """From a thread, and so by libc: a handler of Python's would wait for a call that hangs."""
        for number in () if self.over.is_set() else self.handlers:
            ctypes.CDLL(None).signal(int(number), 0)  # SIG_DFL

    def phase(self, name: str, step: int | None = None) -> None:
        """Enters phase `name`; counts as a sign of life."""
        self.now, self.alive = (name, self.now[1] if step is None else step), time.monotonic()
        self._write()

    def sign_of_life(self) -> None:
        self.alive = time.monotonic()

    def ticks(self, bar: tqdm) -> Callable[[int], None]:
        """`bar.update` that also counts as a sign of life, and raises Interrupted after a signal."""
        # Not bar.n: the bar is disabled on all ranks but the first, and its n stays 0.
        done = 0
        if bar.total == 0 and self.num_processes > 1:  # no episodes on this rank
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
        """Name of the signal that any process has received, or None. A collective."""
        number = largest(accelerator, self.signal)
        return signal.Signals(number).name if number else None

    def beat(self, step: int, num_steps: int, step_s: float, num_tokens: int, reward: float) -> None:
        """Writes the heartbeat after `step`.

        It always goes to the run folder. If stderr is not a terminal (no progress bar), a line is printed
        too, at most every `LINE_S` seconds.
        """
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
        except OSError:
            # Not fatal: on a full disk the writes that matter raise their own error.
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
            # A timer in C, in case a hung call never releases the GIL for this thread.
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
        """The ranks on this machine whose process is dead without a normal exit, as text; "" if none."""
        found = []
        for rank in set(range(self.num_processes)) - {self.rank}:
            path = heartbeat_path(self.run_dir, rank)
            try:
                # A heartbeat older than this process is from an earlier launch.
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
        """Saves a checkpoint if that is safe (`rescue` is set); returns a message on how to continue."""
        try:
            with self.saving:  # one thread at a time
                folder = self.rescue() if self.rescue is not None else None
        except Exception as error:
            return f"No checkpoint could be saved ({error}); --resume continues from the last one."
        return (
            f"Saved {folder}; continue with --resume."
            if folder
            else "Continue from the last checkpoint with --resume."
        )

    def _others(self) -> str:
        # Only current ranks: an earlier launch with more processes leaves files behind.
        paths = [heartbeat_path(self.run_dir, rank) for rank in range(self.num_processes)]
        rows = [json.loads(path.read_text()) for path in paths if path.exists()]
        busy = [
            f"rank {row['rank']} is in phase {row['phase']!r} of step {row['step']} since {row['time']}"
            for row in rows
            if row["phase"] != WAITING
        ]
        return f"; {', '.join(busy)}" if busy else ""


class Console:
    """stdout or stderr that may be closed, as when `tee` or the terminal ends.

    What is written after that is dropped, and the run continues.
    """

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
            # The file descriptor, so that output of other libraries is dropped too.
            os.dup2(nowhere.fileno(), self.stream.fileno())
        return otherwise


def heartbeat_path(run_dir: Path, rank: int) -> Path:
    return run_dir / (f"heartbeat-rank{rank}.json" if rank else "heartbeat.json")


def largest(accelerator, number: int) -> int:
    """The maximum of `number` over all processes. A collective: one small all-gather."""
    return int(accelerator.gather(torch.tensor([number], device=accelerator.device)).max())


def short(error: BaseException) -> str:
    """The first sentence of a torch error, without the source location in front."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return first.split("] ", 1)[-1].split(". ")[0]


def memory_gb() -> float:
    """Peak memory of this process in GB: allocated on the GPU, or resident if there is no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
    )


def lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another process is dead or silent, by gloo's or NCCL's message."""
    return isinstance(error, torch.distributed.DistError) or any(
        word in str(error)
        for word in (
            "gloo/transport",
            "Connection closed by peer",
            "Connection reset by peer",
            "Timed out waiting",
        )
    )
