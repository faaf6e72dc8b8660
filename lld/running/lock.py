"""A lock on the run folder, so that only one run writes to it; and the process id of the launcher.

The lock is flock on RUN/.lock, held by every process of the run. The kernel releases it when the last holder
exits, even if killed, so there is nothing to clean up. On NFS, Linux turns flock into a lock on the server,
visible to other machines. There is no protection on a file system that refuses locks (Lustre without `-o
flock`; a warning is printed) or keeps them local to the machine (NFS with `local_lock=flock`; no warning).
Imported before torch, so it uses only the standard library.
"""

import errno
import fcntl
import itertools
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
    """The run folder was removed or replaced."""


@dataclass
class Lock:
    """A lock held until `release` or process exit; `made` lists the folders created for it, deepest first."""

    run_dir: Path
    file: IO | None = None
    made: list[Path] = field(default_factory=list)

    def release(self) -> None:
        """Releases the lock; if the run wrote nothing, also removes .lock and the folders made for it."""
        if self.file is not None and self.made and self.holds() and os.listdir(self.run_dir) == [".lock"]:
            (self.run_dir / ".lock").unlink()
            for folder in self.made:
                try:
                    folder.rmdir()
                except OSError:  # not empty
                    break
        if self.file is not None:
            self.file.close()
            self.file = None

    def holds(self) -> bool:
        """Whether the locked file is still the one in the folder."""
        path = self.run_dir / ".lock"
        return path.exists() and os.path.samestat(os.stat(path), os.fstat(self.file.fileno()))

    def check(self) -> None:
        """Raises Gone if the folder was removed, even if another one now has its name."""
        if self.file is not None and not self.holds():
            raise Gone(errno.ENOENT, "removed while the run wrote into it", str(self.run_dir))


def take(run_dir: Path, rank: int = 0) -> Lock:
    """Takes the lock of a run folder for one process; ValueError with the holder if another run has it.

    Rank 0 must call first: it takes an exclusive lock, which shows that no other process holds one, and then
    turns it into a shared lock for the other ranks.
    """
    lock = Lock(
        run_dir,
        made=[] if rank else [path for path in (run_dir, *run_dir.absolute().parents) if not path.exists()],
    )
    path = run_dir / ".lock"
    for attempt in itertools.count():
        try:
            if rank == 0:
                run_dir.mkdir(parents=True, exist_ok=True)
            lock.file = open(path, "a+")  # noqa: SIM115
            fcntl.flock(lock.file, (fcntl.LOCK_SH if rank else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if lock.holds():
                break
            lock.file.close()  # the previous holder just removed the file
        except BlockingIOError:
            raise ValueError(in_use(run_dir)) from None
        except FileNotFoundError:
            if rank:
                # This machine does not see the folder, so it writes nothing there.
                return lock
            if attempt > 100:  # nobody else removes it again and again: it cannot be made
                raise
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
    except BlockingIOError:  # exclusive -> shared is not atomic
        raise ValueError(in_use(run_dir)) from None
    return lock


def in_use(run_dir: Path) -> str:
    """Error message that names who holds the lock of a folder."""
    holders, here = [], socket.gethostname()
    for line in (run_dir / ".lock").read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
            if row["host"] != here or is_alive(row["pid"]):
                holders.append(
                    f"process {row['pid']} on {row['host']} (rank {row['rank']}, since {row['since']})"
                )
        except (ValueError, KeyError, TypeError):  # line only half written
            pass
    who = ", ".join(holders[:3]) + (f" and {len(holders) - 3} more" if len(holders) > 3 else "")
    who = who or f"another process (`fuser -v {run_dir}/.lock` names it)"
    return f"run.dir = {run_dir} is in use by {who}: wait until it ends or end it, or choose another run.dir"


def is_alive(pid: int) -> bool:
    """Whether process `pid` exists on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # exists, of another user
        pass
    return True


def launcher() -> int | None:
    """Process id of the parent if it is `accelerate launch` or `torchrun`, else None.

    Any other parent (a shell, nohup, a scheduler) may exit without ending the run.
    """
    parent = os.getppid()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return parent
    try:
        words = Path(f"/proc/{parent}/cmdline").read_text(errors="replace").split("\0")
    except OSError:  # no /proc: not Linux
        return None
    return parent if LAUNCHERS & {Path(word).name for word in words[:4]} else None
