"""One run folder, one run: a lock that every process of a run holds while it lives, and its launcher.

The lock is flock on RUN/.lock: the kernel gives it up when the last process that holds it ends, however it
ends, so nothing has to be cleaned up. On NFS Linux turns flock into a lock of the server, which other
machines see too; a file system that refuses locks (Lustre without `-o flock`) or keeps them to the machine
(NFS with `local_lock=flock`) does not guard against a second run, the first with a warning.
Imported before torch: it needs the standard library alone.
"""

import errno
import fcntl
import json
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

LAUNCHERS = {
    "accelerate",
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
}


class Gone(OSError):
    """The run's folder is not there any more."""


@dataclass
class Lock:
    """Held until `release` or the end of the process; `made` are the folders made for it, deepest first."""

    run_dir: Path
    file: IO | None = None
    made: list[Path] = field(default_factory=list)

    def release(self) -> None:
        """Gives the lock up; of a run that never began nothing is left."""
        if self.file is not None and self.made and self.holds() and os.listdir(self.run_dir) == [".lock"]:
            (self.run_dir / ".lock").unlink()
            for folder in self.made:
                try:
                    folder.rmdir()
                except OSError:  # something else has come into it
                    break
        if self.file is not None:
            self.file.close()
            self.file = None

    def holds(self) -> bool:
        """Whether the file that is locked is still the one in the folder."""
        path = self.run_dir / ".lock"
        return path.exists() and os.path.samestat(os.stat(path), os.fstat(self.file.fileno()))

    def check(self) -> None:
        """Gone where the folder was removed, whatever has come into its place."""
        if self.file is not None and not self.holds():
            raise Gone(errno.ENOENT, "removed while the run wrote into it", str(self.run_dir))


def take(run_dir: Path, rank: int = 0) -> Lock:
    """The lock of a run's folder, for one of its processes; ValueError with who has it, if another run.

    Rank 0 first: it proves with an exclusive lock that nobody else is there, then shares it with the others.
    """
    lock = Lock(
        run_dir,
        made=[] if rank else [path for path in (run_dir, *run_dir.absolute().parents) if not path.exists()],
    )
    path = run_dir / ".lock"
    while True:
        try:
            if rank == 0:
                run_dir.mkdir(parents=True, exist_ok=True)
            lock.file = open(path, "a+")  # noqa: SIM115
            fcntl.flock(lock.file, (fcntl.LOCK_SH if rank else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if lock.holds():
                break
            lock.file.close()  # whoever held it has just removed the file
        except BlockingIOError:
            raise ValueError(in_use(run_dir)) from None
        except FileNotFoundError:
            if rank:  # a machine that does not see the folder writes nothing there
                return lock
        except OSError as error:
            if lock.file is None:
                raise
            print(
                f"train.py: {path} cannot be locked ({error}): a second run here would not be refused",
                file=sys.stderr,
            )
            return lock
    me = {
        "rank": rank,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }
    if rank == 0:
        lock.file.truncate(0)
    lock.file.write(json.dumps(me) + "\n")
    lock.file.flush()
    try:
        fcntl.flock(lock.file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:  # the change from exclusive to shared is not one step
        raise ValueError(in_use(run_dir)) from None
    return lock


def in_use(run_dir: Path) -> str:
    """Who holds the lock of a folder, as a refusal."""
    holders, here = [], socket.gethostname()
    for line in (run_dir / ".lock").read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
            if row["host"] != here or is_alive(row["pid"]):
                holders.append(
                    f"process {row['pid']} on {row['host']} (rank {row['rank']}, since {row['since']})"
                )
        except (ValueError, KeyError, TypeError):  # being written
            pass
    who = ", ".join(holders[:3]) + (f" and {len(holders) - 3} more" if len(holders) > 3 else "")
    who = who or f"another process (`fuser -v {run_dir}/.lock` names it)"
    return f"run.dir = {run_dir} is in use by {who}: wait until it ends or end it, or choose another run.dir"


def is_alive(pid: int) -> bool:
    """Whether a process of this machine exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def launcher() -> int | None:
    """The process id of the launcher (`accelerate launch`, `torchrun`) whose child this process is; None if
    a shell, nohup, a scheduler or another program started it, whose end means nothing."""
    parent = os.getppid()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return parent
    try:
        words = Path(f"/proc/{parent}/cmdline").read_text().split("\0")
    except OSError:  # no Linux
        return None
    return parent if LAUNCHERS & {Path(word).name for word in words[:4]} else None
