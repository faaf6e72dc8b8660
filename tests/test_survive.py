"""Long runs: signals, the watchdog, full disks, numbers that are not finite, hostile checkpoints. Each fault
ends or continues as the table of docs/long-runs.md says."""

import builtins
import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from conftest import ROOT
from test_train import Failing, draw_nothing, refused, rows, write_config
from tqdm import tqdm

import train
from lld import config, files, settings, update
from lld.policy import Policy
from lld.running import (
    checkpoint,
    crashbox,
    ending,
    evaluating,
    lock,
    playing,
    provenance,
    recording,
    run_folder,
    saving,
    survive,
)

STEPS = 4


def small(folder: Path, name: str, **changes) -> Path:
    """A run of 4 steps with an evaluation and a checkpoint after every second one."""
    tree = {
        "run": {"steps": STEPS, "save_every": 2},
        "eval": {"every": 2, "max_questions": 3},
        "rollout": {"num_questions": 2, "group_size": 4, "max_new_tokens": 24, "num_slots": 8},
    }
    tree = {
        section: tree.get(section, {}) | changes.get(section, {}) for section in tree.keys() | changes.keys()
    }
    return write_config(folder, name, **(tree | {"run": tree["run"] | {"dir": str(folder / name)}}))


@pytest.fixture(autouse=True)
def without_figures(monkeypatch):
    draw_nothing(monkeypatch)


@pytest.fixture(scope="module")
def undisturbed(folder):
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        assert train.main(["--config", str(small(folder, "undisturbed_small"))]) == 0
    return folder / "undisturbed_small"


def same(run_dir: Path, undisturbed: Path) -> bool:
    """Whether the logs and the last checkpoint's weights and optimizer are equal, bit for bit."""
    last = f"checkpoints/step_{STEPS:06d}"
    return all(
        (run_dir / name).read_bytes() == (undisturbed / name).read_bytes()
        for name in (
            "metrics.jsonl",
            "updates.jsonl",
            f"{last}/model.safetensors",
            f"{last}/trainer_state.pt",
        )
    )


def on_visit(patch, where: str, visit: int, do) -> None:
    """Calls `do()` at the beginning of that visit of the run's `where`."""
    module = {
        "play": playing,
        "update_policy": update,
        "evaluate": evaluating,
        "save": saving,
        "write_checkpoint": saving,
        "warn": recording,
    }[where]
    original, visits = getattr(module, where), []

    def wrapped(*args, **kwargs):
        visits.append(where)
        if len(visits) == visit:
            do()
        return original(*args, **kwargs)

    patch.setattr(module, where, wrapped)


@pytest.mark.parametrize(
    "where, visit, number, saved, logged",
    [
        ("play", 2, signal.SIGTERM, 1, 1),  # the second rollout is dropped
        # The second update is finished; the evaluation after it is made up on resuming
        ("update_policy", 2, signal.SIGINT, 2, 2),
        ("evaluate", 1, signal.SIGTERM, 0, 0),  # the evaluation at the start
        ("save", 1, signal.SIGTERM, 2, 2),  # the checkpoint is finished; the next rollout is not begun
    ],
)
def test_a_signal_ends_the_run_with_a_checkpoint_and_nothing_is_lost(
    folder, undisturbed, capsys, monkeypatch, where, visit, number, saved, logged
):
    name = f"{where}_{number.name}"
    config = small(folder, name)
    with monkeypatch.context() as patch:
        on_visit(patch, where, visit, lambda: os.kill(os.getpid(), number))
        message = refused(capsys, config, code=5)
    assert (
        f"{number.name} received" in message
        and f"stopped by {number.name}, as asked. Saved" in message
        and "continue with --resume" in message
    )
    assert checkpoint.latest(folder / name) == checkpoint.folder_of(folder / name, saved)
    assert len(rows(folder / name)) == logged if logged else not (folder / name / "metrics.jsonl").exists()
    assert (
        signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        and signal.getsignal(signal.SIGINT) == signal.default_int_handler
    )
    assert train.main(["--config", str(config), "--resume"]) == 0
    assert same(folder / name, undisturbed)


class Alone:
    """As much of an accelerator as the guard asks for."""

    process_index, num_processes = 0, 1


def test_a_second_signal_is_the_same_one_at_first_and_then_ends_a_process_that_hangs(tmp_path, monkeypatch):
    """A process group and the launcher in it both pass on a SIGTERM to the processes that train."""
    monkeypatch.setattr(survive, "ECHO_S", 0.5)
    child = os.fork()
    if not child:
        guard = survive.Guard()
        guard.prepare()
        guard.watch(tmp_path, Alone, 0.0)
        (tmp_path / "ready").write_text("")
        while not guard.signal:
            time.sleep(0.01)
        (tmp_path / "heard").write_text("")
        time.sleep(0.3)
        (tmp_path / "survived").write_text("")
        ctypes.CDLL(None).sleep(60)  # no handler of Python's runs in here
        os._exit(0)
    wait_for(tmp_path / "ready")
    os.kill(child, signal.SIGTERM)
    wait_for(tmp_path / "heard")
    os.kill(child, signal.SIGTERM)
    wait_for(tmp_path / "survived")
    time.sleep(1.0)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_the_guard_gives_the_signals_back(tmp_path, monkeypatch):
    monkeypatch.setattr(survive, "ECHO_S", 0.01)
    guard, before = survive.Guard(), signal.getsignal(signal.SIGINT)  # a background job ignores it
    guard.prepare()
    guard.watch(tmp_path, Alone, 0.0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert guard.signal == signal.SIGTERM
    guard.close()
    assert signal.getsignal(signal.SIGINT) == before


def test_a_run_says_that_torchrun_will_not_wait_for_its_checkpoint(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    for patience, rank, told in ((None, 0, True), (None, 1, False), ("600", 0, False)):
        if patience:
            monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", patience)
        survive.Guard().watch(tmp_path, SimpleNamespace(process_index=rank, num_processes=2), 0.0)
        assert ("torchrun kills its processes 30 s after" in capsys.readouterr().err) == told


def test_a_hangup_stops_the_run_like_sigterm_unless_nohup_ignores_it(tmp_path):
    for ignored in (False, True):
        guard, before = (
            survive.Guard(),
            signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL),
        )
        guard.prepare()
        guard.watch(tmp_path, Alone, 0.0)
        os.kill(os.getpid(), signal.SIGHUP)
        assert guard.signal == (0 if ignored else signal.SIGHUP)
        guard.close()
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "phase, what",
    [
        ("rollout", "is dropped and will be repeated, then the run stops with a checkpoint"),
        ("logs", "the step is logged, then the run stops"),
        ("report", "the report is finished. After 5 s a second"),
    ],
)
def test_a_signal_says_what_becomes_of_the_phase_it_comes_in(tmp_path, capsys, phase, what):
    guard = survive.Guard()
    guard.prepare()
    guard.watch(tmp_path, Alone, 0.0)
    guard.phase(phase, 3)
    os.kill(os.getpid(), signal.SIGTERM)
    guard.close()
    assert what in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_world_is_made_ends_in_one_line(folder, capsys, monkeypatch, number):

    def stop(*_):
        os.kill(os.getpid(), number)
        time.sleep(5)

    monkeypatch.setattr("lld.tinyworld.prepare.prepare_world", stop)
    message = refused(capsys, small(folder, "early_signal"), code=5)
    assert (
        f"{number.name} received while the run was prepared: nothing was trained" in message
        and "Traceback" not in message
    )
    assert not (folder / "early_signal").exists()


def test_a_folder_in_use_is_refused_with_who_uses_it(folder, undisturbed, capsys):
    """A fresh run, a resumed one, and one whose first process is gone while its second still writes."""
    config = small(folder, "used")
    held = lock.take(folder / "used")
    message = refused(capsys, config)
    assert (
        f"is in use by process {os.getpid()} on {socket.gethostname()} (rank 0, since 20" in message
        and "or choose another run.dir" in message
    )
    held.release()
    assert not (folder / "used").exists()  # nothing is left of a run that never began
    shutil.copytree(undisturbed, folder / "used")
    held, second = lock.take(folder / "used"), lock.take(folder / "used", rank=1)
    held.release()
    logged = (folder / "used" / "metrics.jsonl").read_bytes()
    assert "is in use by" in refused(capsys, config, "--resume", "run.steps=9")
    assert (folder / "used" / "metrics.jsonl").read_bytes() == logged
    second.release()
    assert train.main(["--config", str(config), "--resume"]) == 0
    lock.take(folder / "used").release()  # given up by a run that is done


def test_a_replay_of_a_box_in_use_is_refused(tmp_path, monkeypatch, capsys):
    held = lock.take(tmp_path / "box" / "replays" / "unchanged")
    monkeypatch.setattr(
        crashbox,
        "replay_options",
        lambda box, overrides: settings.with_overrides({}, [f"run.dir={box}/replays/unchanged"]),
    )
    assert train.main(["--replay", str(tmp_path / "box")]) == 2 and "is in use by" in capsys.readouterr().err
    held.release()


def test_the_lock_goes_with_a_killed_process(tmp_path):
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            (
                "import time; from pathlib import Path; from lld.running import lock; held = "
                f"lock.take(Path({str(tmp_path)!r})); print('held', flush=True); time.sleep(60)"
            ),
        ],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert child.stdout.readline() == b"held\n"
    with pytest.raises(ValueError, match=f"in use by process {child.pid} on"):
        lock.take(tmp_path)
    child.kill()
    child.wait()
    child.stdout.close()
    lock.take(tmp_path).release()


def test_a_lock_that_cannot_be_made_is_no_endless_loop(tmp_path):
    (tmp_path / ".lock").symlink_to(tmp_path / "nowhere" / "lock")
    with pytest.raises(FileNotFoundError):
        lock.take(tmp_path)


PARENT = """
import subprocess, sys
child = "from lld.running import lock; import os; print(lock.launcher() == os.getppid())"
subprocess.run([sys.executable, "-c", child])
"""


def test_only_a_launcher_is_a_parent_to_follow(tmp_path):
    clean = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    for name, follows in (("torchrun", True), ("accelerate", True), ("sweep.py", False)):
        (tmp_path / name).write_text(PARENT)
        done = subprocess.run(
            [sys.executable, str(tmp_path / name), b"\xff"],  # no UTF-8
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=clean | {"LOCAL_RANK": "0"},
        )
        assert done.stdout.strip() == str(follows), done.stderr


def test_a_process_ends_with_its_killed_launcher(tmp_path):
    """A real parent, killed with -9, and its child, which is told as by SIGTERM, once."""
    parent = os.fork()
    if not parent:
        if os.fork():
            time.sleep(60)
        survive.ECHO_S = 0.1
        guard = survive.Guard()
        guard.prepare(os.getppid())
        guard.watch(tmp_path, Alone, 0.0)
        (tmp_path / "ready").write_text("")
        deadline = time.monotonic() + 30
        while not guard.signal and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(1.2)  # a second signal would end the process here
        (tmp_path / "end.partial").write_text(signal.Signals(guard.signal).name)
        (tmp_path / "end.partial").rename(tmp_path / "end")
        os._exit(0)
    wait_for(tmp_path / "ready")
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_for(tmp_path / "end")
    assert (tmp_path / "end").read_text() == "SIGTERM"


def wait_for(path: Path, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)


@pytest.mark.parametrize("hangs", [True, False])
def test_a_program_does_not_wait_for_a_search_that_hangs(hangs):
    code = f"""
import time
from concurrent.futures import ThreadPoolExecutor
from lld.running.leaving import leave
pool = ThreadPoolExecutor(2, "search")
pool.submit(time.sleep, {600 if hangs else 0})
pool.shutdown(wait=False, cancel_futures=True)
print("told")
leave(5)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 5 and done.stdout == "told\n"


def test_a_closed_console_loses_no_step(tmp_path):
    """As `train.py … 2>&1 | tee log` does when tee ends: writes to a pipe that nobody reads."""
    out, into = os.pipe()
    os.close(out)
    child = os.fork()
    if not child:
        os.dup2(into, 1)
        os.dup2(into, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        guard = survive.Guard()
        guard.prepare()
        try:
            for _ in range(3):
                print("a step", flush=True)
                tqdm.write("a warning", file=sys.stderr)
                sys.stderr.flush()
                os.write(2, b"from C")
            os._exit(0)
        except BaseException:
            os._exit(1)
    os.close(into)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_options_may_stand_on_both_sides_of_a_flag(folder, capsys):
    assert "run.steps was" not in refused(
        capsys, folder / "nowhere.yaml", "run.steps=3", "--resume", "run.seed=3"
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_watchdog_names_rank_phase_and_stacks_and_saves_what_stands(tmp_path, capsys, monkeypatch):
    codes, ended, guard = [], threading.Event(), survive.Guard()

    def end_thread(code):
        codes.append(code)
        ended.set()
        raise SystemExit

    monkeypatch.setattr(survive.os, "_exit", end_thread)
    guard.watch(tmp_path, Alone, 3.0)
    guard.rescue = lambda: tmp_path / "checkpoints" / "step_000003"
    for _ in range(5):  # signs of life
        guard.phase("rollout", 3)
        time.sleep(0.8)
    assert not ended.is_set()
    assert ended.wait(60) and codes == [survive.HUNG]
    assert json.loads((tmp_path / "heartbeat.json").read_text())["phase"] == "rollout"
    guard.close()
    message = capsys.readouterr().err
    assert (
        "rank 0 has shown no sign of life for 3 s (run.watchdog_s) in phase 'rollout' of step 3" in message
        and "Saved" in message
        and "step_000003; continue with --resume" in message
    )
    # The stack of the thread that slept
    assert "test_the_watchdog_names_rank" in (tmp_path / "watchdog-rank0.txt").read_text()


class Second:
    """The second of two processes."""

    process_index, num_processes = 1, 2


def test_a_process_that_has_played_its_share_waits_for_the_others_and_names_them(tmp_path):
    """Its bar is disabled, as on every rank but the first, and does not count."""
    guard = survive.Guard()
    guard.watch(tmp_path, Second, 0.0)
    guard.phase("rollout", 3)
    tick = guard.ticks(tqdm(total=5, disable=True))
    tick(3)
    assert guard.now == ("rollout", 3)
    tick(2)
    assert guard.now == (survive.WAITING, 3)
    (tmp_path / "heartbeat-rank2.json").write_text("{}")  # an earlier launch had three processes
    (tmp_path / "heartbeat.json").write_text(
        json.dumps({"rank": 0, "phase": "rollout", "step": 3, "time": "now"})
    )
    assert guard._others() == "; rank 0 is in phase 'rollout' of step 3 since now"
    guard.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "phase, age_s, code", [("update", 0, survive.PEER), ("done", 0, None), ("update", 1000, None)]
)
def test_a_process_of_this_machine_that_is_gone_is_noticed_where_no_collective_fails(
    tmp_path, capsys, monkeypatch, phase, age_s, code
):
    """With NCCL a collective just waits. One that ended in order, or an earlier launch's, is not missed."""
    codes, ended, guard = [], threading.Event(), survive.Guard()

    def end_thread(found):
        codes.append(found)
        ended.set()
        raise SystemExit

    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    path = tmp_path / "heartbeat.json"
    path.write_text(
        json.dumps(
            {"rank": 0, "pid": child, "host": socket.gethostname(), "phase": phase, "step": 3, "time": "now"}
        )
    )
    os.utime(path, (time.time() + 1 - age_s,) * 2)
    monkeypatch.setattr(survive.os, "_exit", end_thread)
    monkeypatch.setattr(survive, "GRACE_S", 0.1)
    guard.watch(tmp_path, Second, 2.0)
    guard.rescue = lambda: tmp_path / "checkpoints" / "step_000003"
    assert ended.wait(30 if code else 1.2) == (code is not None) and codes[:1] == ([code] if code else [])
    guard.close()
    if code:
        assert (
            f"rank 1: rank 0 (process {child}, in phase 'update' of step 3) is gone"
            in (message := capsys.readouterr().err)
            and "step_000003; continue with --resume" in message
        )


def test_the_heartbeat_says_how_fast_and_how_long(undisturbed, tmp_path, capsys):
    guard = survive.Guard()
    guard.run_dir = tmp_path
    guard.beat(9, 100, 2.0, 5000, 0.25)
    guard.beat(10, 100, 4.0, 5000, 0.25)
    told = json.loads((tmp_path / "heartbeat.json").read_text())
    assert (told["step_s"], told["tokens_per_s"], told["eta_s"]) == (4.0, 1250.0, 3.0 * 89) and told[
        "memory_gb"
    ] > 0
    assert capsys.readouterr().out.count("tokens/s") == 1  # at most a line a minute
    last = json.loads((undisturbed / "heartbeat.json").read_text())
    assert last["step"] == STEPS - 1 and last["eta_s"] == 0.0 and last["phase"] == "done"
    assert "heartbeat" not in (undisturbed / "metrics.jsonl").read_text()


def limit_files(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize("num_bytes", [100_000, 500_000], ids=["weights", "optimizer"])
def test_a_disk_that_is_full_while_a_checkpoint_is_written_loses_no_older_one(
    folder, undisturbed, capsys, monkeypatch, num_bytes
):
    name = f"full_{num_bytes}"
    config = small(folder, name)
    try:
        with monkeypatch.context() as patch:
            on_visit(patch, "write_checkpoint", 2, lambda: limit_files(num_bytes))
            message = refused(capsys, config, code=7)
    finally:
        limit_files(resource.RLIM_INFINITY)
    good = checkpoint.folder_of(folder / name, 2)
    assert (
        "step_000004 could not be written" in message
        and f"The last good checkpoint is {good}, and it is untouched: make room" in message
    )
    checkpoint.check(good)
    assert sorted(path.name for path in good.parent.iterdir()) == ["step_000002"]
    assert train.main(["--config", str(config), "--resume"]) == 0 and same(folder / name, undisturbed)


def test_a_disk_that_is_full_while_the_log_is_written_ends_the_run(folder, undisturbed, capsys, monkeypatch):
    """/dev/full gives the real error: no space left on device."""
    config, log = small(folder, "full_log"), folder / "full_log" / "updates.jsonl"

    def fill():
        log.rename(log.with_suffix(".kept"))
        log.symlink_to("/dev/full")

    with monkeypatch.context() as patch:
        on_visit(patch, "update_policy", 4, fill)
        message = refused(capsys, config, code=7)
    assert f"No space left on device: '{log}'" in message and "step_000002, and it is untouched" in message
    log.unlink()
    log.with_suffix(".kept").rename(log)
    assert train.main(["--config", str(config), "--resume"]) == 0 and same(folder / "full_log", undisturbed)


def test_a_folder_that_cannot_be_written_is_named(folder, capsys, monkeypatch):
    """Before any work where it is so from the start; with the last good checkpoint where it becomes so."""
    (folder / "plain").write_text("")
    assert "plain is a file, not a folder" in refused(
        capsys, small(folder, "a"), f"run.dir={folder}/plain/run"
    )
    # os.access, because root may write everywhere but on a file system mounted read-only
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "access", lambda path, mode: False)
        assert "is read-only, or not yours to write to" in refused(capsys, small(folder, "b"))
    assert not (folder / "b").exists()

    def read_only(path, mode="r", *args, **kwargs):
        if "a" in mode and str(path).endswith(".jsonl"):
            raise OSError(30, "Read-only file system", str(path))
        return opened(path, mode, *args, **kwargs)

    opened = builtins.open
    with monkeypatch.context() as patch:
        on_visit(patch, "update_policy", 3, lambda: patch.setattr(builtins, "open", read_only))
        message = refused(capsys, small(folder, "c"), code=7)
    assert "Read-only file system" in message and "step_000002, and it is untouched" in message


def test_without_a_checkpoint_none_is_called_untouched_and_the_advice_can_be_followed(tmp_path):
    assert (
        ending.after_disk(tmp_path, False)
        == "There is no checkpoint yet: make room, mend the permissions or remove what is in the way, then "
        "start the run again."
    )
    (tmp_path / "config.yaml").write_text("")
    assert "then continue with --resume" in ending.after_disk(tmp_path, False)


def test_a_run_whose_folder_is_removed_ends_in_one_line(folder, capsys, monkeypatch):
    config = small(folder, "removed", eval={"every": 0})
    with monkeypatch.context() as patch:
        on_visit(patch, "update_policy", 2, lambda: shutil.rmtree(folder / "removed"))
        message = refused(capsys, config, code=7)
    assert f"{folder / 'removed'} is gone, and all that was in it" in message and "Traceback" not in message


def test_a_gradient_that_is_not_finite_skips_its_update_and_the_run_goes_on(folder, capsys, monkeypatch):
    calls, original = [], vars(update)["loss_of"]

    def poisoned(*args, **kwargs):
        row_losses_B, terms = original(*args, **kwargs)
        calls.append(1)
        return (row_losses_B * float("nan") if len(calls) == 1 else row_losses_B), terms

    monkeypatch.setitem(vars(update), "loss_of", poisoned)
    assert train.main(["--config", str(small(folder, "poisoned", eval={"every": 0}))]) == 0
    assert [row["skipped_updates"] for row in rows(folder / "poisoned")] == [1, 0, 0, 0]
    assert "step skipped. Episodes with a non-finite loss: " in capsys.readouterr().out
    state = torch.load(checkpoint.latest(folder / "poisoned") / "trainer_state.pt", weights_only=True)
    assert all(
        moment.isfinite().all()
        for moments in state["optimizer"]["state"].values()
        for moment in moments.values()
    )


@pytest.mark.parametrize("what", ["loss", "logprobs"])
def test_a_run_whose_every_gradient_is_not_finite_ends_before_it_wastes_days(
    folder, capsys, monkeypatch, what
):
    nan = float("nan")
    if what == "loss":
        original = vars(update)["loss_of"]
        monkeypatch.setitem(
            vars(update),
            "loss_of",
            lambda *args, **kwargs: (original(*args, **kwargs)[0] * nan, original(*args, **kwargs)[1]),
        )
    else:  # nothing is left that entropy or a likelihood could be the mean of
        forward = Policy.forward
        monkeypatch.setattr(
            Policy, "forward", lambda *args: tuple(values_BT * nan for values_BT in forward(*args))
        )
    message = refused(capsys, small(folder, f"hopeless_{what}", eval={"every": 0}), code=6)
    assert (
        "step 2: no update could be made in 3 steps: every gradient was not finite" in message
        and "There is no good checkpoint" in message
    )
    assert checkpoint.latest(folder / f"hopeless_{what}") is None  # none is saved while no update can be made


def test_weights_that_are_not_finite_are_never_saved(folder, capsys, monkeypatch):
    steps, learned = [], recording.describe_learning

    def break_weights(run, step, *args):
        found = learned(run, step, *args)
        steps.append(step)
        if len(steps) == 4:
            next(run.models.lm.parameters()).data[0, 0] = float("nan")
        return found

    monkeypatch.setattr(recording, "describe_learning", break_weights)
    message = refused(capsys, small(folder, "broken", eval={"every": 0}), code=6)
    good = checkpoint.folder_of(folder / "broken", 2)
    assert (
        "step 3: weights are not finite after the update (model.embed_tokens.weight). No checkpoint was "
        "written."
        in message
        and f"The last good checkpoint is {good}" in message
    )
    assert checkpoint.latest(folder / "broken") == good
    checkpoint.check(good)


# An empty list is an answer: tests/test_faults.py
@pytest.mark.parametrize(
    "how, reason",
    [("gone", "ConnectError"), ("slow", "no reply within 0.3 s"), ("html", "JSON"), ("short", "results for")],
)
def test_a_retriever_that_goes_slows_or_lies_ends_the_run_with_a_checkpoint(folder, capsys, how, reason):
    class Faulty(Failing):
        def do_POST(self):
            if type(self).good > 0 or how == "short":
                return super().do_POST()
            self.rfile.read(int(self.headers["Content-Length"]))
            if how == "gone":
                self.server.socket.close()
                return self.connection.close()
            if how == "slow":
                time.sleep(0.5)
            body = b"<html>Please log in</html>" if how == "html" else b""
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            try:
                self.wfile.write(body)
            except OSError:
                pass  # the client has hung up

    Faulty.good, Faulty.how = 3, "short"
    server = HTTPServer(("127.0.0.1", 0), Faulty)
    server.handle_error = lambda *_: None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    name = f"retriever_{how}"
    retriever = {
        "url": f"http://127.0.0.1:{server.server_port}",
        "retries": 1,
        "timeout_s": 0.3 if how == "slow" else 5,
    }
    message = refused(
        capsys,
        small(
            folder,
            name,
            retriever=retriever,
            eval={"every": 0},
            rollout={"num_questions": 4, "group_size": 3},
        ),
        code=3,
    )
    server.shutdown()
    assert reason in message and "Nothing was trained on the failed search. Saved" in message
    logged = len(rows(folder / name)) if (folder / name / "metrics.jsonl").exists() else 0
    assert checkpoint.latest(folder / name) == checkpoint.folder_of(folder / name, logged)


def blow_up(patch, step: int) -> None:
    """The update of `step` leaves weights that are finite and useless."""
    learned = recording.describe_learning

    def learn(run, now, *args):
        found = learned(run, now, *args)
        for weight in run.models.lm.parameters() if now == step else ():
            weight.data.mul_(1e12)
        return found

    patch.setattr(recording, "describe_learning", learn)


@pytest.mark.parametrize("keep", [1, 3])
def test_weights_that_are_finite_but_broken_push_out_no_good_checkpoint(folder, capsys, monkeypatch, keep):
    """They are told by the gradients of later steps: until then a checkpoint is neither the last good one nor
    the best, and none is saved."""
    blow_up(monkeypatch, 2)
    name = f"blown_up_{keep}"
    message = refused(
        capsys,
        small(folder, name, run={"steps": 9, "save_every": 1, "keep_checkpoints": keep}, eval={"every": 0}),
        code=6,
    )
    good = checkpoint.folder_of(folder / name, 2)
    assert (
        "step 5: no update could be made in 3 steps" in message
        and f"The last good checkpoint is {good} (" in message
        and "step_000003 is newer, but no update could be made from it" in message
    )
    checkpoint.check(good)
    assert sorted(path.name for path in good.parent.iterdir()) == [
        f"step_{number:06d}" for number in ((2, 3) if keep == 1 else (1, 2, 3))
    ]


def test_weights_broken_by_the_last_update_are_not_saved(folder, capsys, monkeypatch):
    blow_up(monkeypatch, STEPS - 1)
    message = refused(capsys, small(folder, "blown_last", eval={"every": 0}), code=6)
    assert (
        "step 3: log-probabilities are not finite after the last update. No checkpoint was written."
        in message
    )
    assert checkpoint.latest(folder / "blown_last") == checkpoint.folder_of(folder / "blown_last", 2)


def without_gradient(patch, steps: set[int]) -> None:
    """Every update of these steps has a loss that is not finite."""
    original, prepared, now = vars(update)["loss_of"], recording.prepare_update, []
    patch.setattr(
        recording,
        "prepare_update",
        lambda run, step, *args: (now.append(step), prepared(run, step, *args))[1],
    )
    patch.setitem(
        vars(update),
        "loss_of",
        lambda *args, **kwargs: (
            original(*args, **kwargs)[0] * (float("nan") if now[-1] in steps else 1.0),
            original(*args, **kwargs)[1],
        ),
    )


def test_a_checkpoint_due_when_no_update_could_be_made_waits_for_one_that_is(folder, capsys, monkeypatch):
    without_gradient(monkeypatch, {1})
    monkeypatch.setattr(
        evaluating,
        "evaluate",
        lambda run, num_steps: {"eval/tiny/em": {2: 0.9, 4: 0.5}.get(num_steps, 0.0)},
    )
    assert train.main(["--config", str(small(folder, "owed"))]) == 0
    assert sorted(path.name for path in (folder / "owed" / "checkpoints").iterdir()) == [
        "best.json",
        "step_000003",
        "step_000004",
    ]
    # step_000002's weights would be step_000001's
    assert (
        json.loads((folder / "owed" / "checkpoints" / "best.json").read_text())["checkpoint"] == "step_000004"
    )


def test_a_resumed_run_goes_on_counting_steps_without_an_update(folder, capsys, monkeypatch):
    """A signal after the first of three saves what there is, and not as good."""
    without_gradient(monkeypatch, {1, 2, 3})
    config = small(folder, "counting", run={"steps": 9, "save_every": 1}, eval={"every": 0})
    with monkeypatch.context() as patch:
        on_visit(patch, "warn", 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert "step_000002; continue" in refused(capsys, config, code=5)
    message = refused(capsys, config, "--resume", code=6)
    assert "step 3: no update could be made in 3 steps" in message
    assert "There is no good checkpoint (" in message  # no update was made from step_000001's weights either
    assert checkpoint.latest(folder / "counting") == checkpoint.folder_of(folder / "counting", 2)


def test_what_a_kill_left_undone_after_the_last_checkpoint_is_done_on_resuming(
    folder, undisturbed, monkeypatch
):
    """best.json and the pruning of older checkpoints."""
    monkeypatch.setattr(
        evaluating,
        "evaluate",
        lambda run, num_steps: {"eval/tiny/em": {2: 0.2, 4: 0.5}.get(num_steps, 0.0)},
    )
    path = small(folder, "undone", run={"keep_checkpoints": 1})
    with monkeypatch.context() as patch:
        patch.setattr(
            checkpoint,
            "write_best",
            lambda *_: os._exit(9) if checkpoint.latest(folder / "undone").name == "step_000004" else None,
        )
        child = os.fork()
        if not child:
            os._exit(train.main(["--config", str(path)]))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    folders = folder / "undone" / "checkpoints"
    assert sorted(p.name for p in folders.iterdir()) == ["step_000002", "step_000004"]
    assert train.main(["--config", str(path), "--resume"]) == 0
    assert sorted(p.name for p in folders.iterdir()) == ["best.json", "step_000004"]
    assert json.loads((folders / "best.json").read_text())["checkpoint"] == "step_000004"


def test_a_log_with_holes_is_refused_by_name(folder, undisturbed, capsys):
    config, copy = small(folder, "holes", run={"steps": STEPS + 1}), folder / "holes"
    damages = {
        "cut": lambda lines: lines[:2],
        "a line lost": lambda lines: lines[:1] + lines[2:],
        "twice": lambda lines: lines[:2] + lines[1:],
        "emptied": lambda lines: [],
        "not JSON": lambda lines: [*lines[:2], "{\x00", *lines[3:]],
        "no object": lambda lines: [*lines[:1], "[]", *lines[2:]],
    }
    for name in ("metrics.jsonl", "updates.jsonl"):
        for what, damage in damages.items():
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(undisturbed, copy)
            lines = (copy / name).read_text().split("\n")[:-1]
            (copy / name).write_text("".join(line + "\n" for line in damage(lines)))
            before = (copy / name).read_bytes()
            with pytest.raises(
                ValueError,
                match=rf"{name} does not hold steps 0 to 3 once each: it goes wrong at step [0-3].*restore "
                r"it, or delete the checkpoints after more than",
            ):
                run_folder.check_logs(copy, STEPS, 2)
            assert (copy / name).read_bytes() == before, what
    assert "it goes wrong at step" in refused(capsys, config, "--resume")
    shutil.rmtree(copy)
    shutil.copytree(undisturbed, copy)
    # A clock's log stops nobody
    (copy / "timings.jsonl").write_text("\n\x00\n{}\n[]\n" + (copy / "timings.jsonl").read_text())
    (copy / "metrics.jsonl").open("a").write('{"step": 4, "rew')
    (copy / "warnings.log").write_text("step 2: kept\nstep 4: repeated\n")
    assert train.main(["--config", str(config), "--resume"]) == 0
    assert [row["step"] for row in rows(copy)] == list(range(STEPS + 1)) and len(
        (copy / "timings.jsonl").read_text().splitlines()
    ) == STEPS + 1
    assert (
        "repeated" not in (copy / "warnings.log").read_text()
        and "step 2: kept" in (copy / "warnings.log").read_text()
    )


def test_the_sentinel_is_in_the_checkpoint(folder, capsys, monkeypatch):
    """Resumed, a run goes on with it; it needs no file of its own that could be lost."""
    monkeypatch.setattr("lld.record.sentinel.is_right", lambda episode: True)
    for name in ("sentinel", "sentinel_cut"):
        config = small(folder, name, monitor={"sentinel_every": 1, "sentinel_size": 3}, eval={"every": 0})
        with monkeypatch.context() as patch:
            if name == "sentinel_cut":
                on_visit(patch, "play", 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
            train.main(["--config", str(config)])
    assert train.main(["--config", str(config), "--resume"]) == 0
    assert same(folder / "sentinel_cut", folder / "sentinel") and all(
        "sentinel/displacement" in row for row in rows(folder / "sentinel")
    )
    assert not (folder / "sentinel" / "sentinel.pt").exists()


def test_only_what_train_py_named_is_taken_for_a_checkpoint(undisturbed, tmp_path):
    """A copy, a file, a link and an empty folder are neither the newest nor counted as kept, and stay; a run
    may have a million steps."""
    folders = tmp_path / "checkpoints"
    shutil.copytree(undisturbed / "checkpoints", folders)
    shutil.copytree(folders / "step_000002", folders / "step_backup")
    (folders / "step_000009").write_text("")
    (folders / "step_000008").mkdir()
    (folders / "step_000001").symlink_to(undisturbed / "checkpoints" / "step_000002")
    (folders / "step_000006.partial").write_text("")
    assert checkpoint.latest(tmp_path).name == "step_000004"
    checkpoint.prune(tmp_path, 2, 4)
    assert sorted(path.name for path in folders.iterdir() if path.name != "best.json") == [
        "step_000001",
        "step_000002",
        "step_000004",
        "step_000008",
        "step_000009",
        "step_backup",
    ]
    checkpoint.prune(tmp_path, 1, 4)
    assert (
        not (folders / "step_000002").exists()
        and (undisturbed / "checkpoints" / "step_000002" / "manifest.json").exists()
    )
    shutil.copytree(folders / "step_000004", folders / "step_1000000")
    assert checkpoint.latest(tmp_path).name == "step_1000000"
    with pytest.raises(ValueError, match="is that of a checkpoint after 4 steps: step_1000000 is a copy"):
        checkpoint.check(folders / "step_1000000")


def test_a_file_in_a_checkpoints_way_does_not_stop_it(tmp_path, lm, tokenizer):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step_000003.partial").write_text("")
    checkpoint.check(checkpoint.save(tmp_path, 3, lm, tokenizer, {}))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda text: "", "manifest.json is damaged"),
        (lambda text: text[:40], "manifest.json is damaged"),
        (lambda text: "[]", "list in place of an object"),
        (lambda text: "{}", "lists no files"),
        (lambda text: '{"num_steps": 4, "files": {}}', "does not list"),
        (
            lambda text: text.replace('"model.safetensors"', '"model.safetensors.old"'),
            "does not list model.safetensors",
        ),
    ],
)
def test_a_damaged_manifest_is_named(undisturbed, tmp_path, change, message):
    shutil.copytree(undisturbed / "checkpoints" / "step_000004", tmp_path / "step_000004")
    path = tmp_path / "step_000004" / "manifest.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=message):
        checkpoint.check(path.parent)


@pytest.fixture(scope="module")
def own_world(folder, undisturbed):
    """A run of two steps with a world of its own, and KL, so that the start policy is read again."""
    shutil.copytree(folder / "world", folder / "own_world")
    world = folder / "own_world"
    path = small(
        folder,
        "own",
        run={"steps": 2},
        loss={"kl_weight": 0.01},
        tinyworld={"dir": str(world)},
        model={"path": str(world / "policy")},
        data={"train": str(world / "train.jsonl")},
        retriever={"corpus": str(world / "corpus.jsonl")},
        eval={"benchmarks": {"tiny": str(world / "heldout.jsonl")}},
    )
    with pytest.MonkeyPatch.context() as patch:
        draw_nothing(patch)
        assert train.main(["--config", str(path)]) == 0
    return path, world


@pytest.mark.parametrize(
    "name, what",
    [
        ("train.jsonl", "questions"),
        ("heldout.jsonl", "held-out questions tiny"),
        ("corpus.jsonl", "corpus and index"),
        ("policy/model.safetensors", "start policy"),
        ("policy/tokenizer_config.json", "tokenizer"),
    ],
)
def test_input_that_changed_since_the_run_began_is_refused(own_world, folder, capsys, name, what):
    path, world = own_world
    before, logged = (world / name).read_bytes(), (folder / "own" / "metrics.jsonl").read_bytes()
    if name.startswith("policy/model"):
        weights = safetensors.torch.load(before)
        changed = safetensors.torch.save(
            {key: weight * 1.01 for key, weight in weights.items()}, {"format": "pt"}
        )
    elif name.endswith(".jsonl"):
        changed = b"".join(reversed(before.splitlines(keepends=True))).replace(b"was born", b"was  born")
    else:
        changed = before.replace(b"{", b"{\n", 1)
    (world / name).write_bytes(changed)
    message = refused(capsys, path, "--resume", "run.steps=3")
    (world / name).write_bytes(before)
    assert (
        f"the {what} of {folder / 'own'} changed since the run began" in message
        and f'delete "{what}" from "inputs" in' in message
    )
    assert (folder / "own" / "metrics.jsonl").read_bytes() == logged


def test_run_json_keeps_every_session_and_other_code_is_told(own_world, folder, capsys, monkeypatch):
    path, _ = own_world
    first = json.loads((folder / "own" / "run.json").read_text())
    assert (
        len(first["sessions"]) == 1
        and first["sessions"][0]["first_step"] == 0
        and first["sessions"][0]["processes"] == 1
        and "start policy" in first["inputs"]
    )
    assert (
        train.main(["--config", str(path), "--resume", "run.steps=3"]) == 0
        and "resumed with other" not in capsys.readouterr().err
    )
    code, alive = provenance.of_code(), []
    monkeypatch.setattr(provenance, "of_code", lambda: code | {"code": "other", "torch": "9.9"})
    monkeypatch.setattr(survive.Guard, "sign_of_life", lambda self: alive.append(self.now[0]))
    assert train.main(["--config", str(path), "--resume", "run.steps=4", "monitor.trajectories_every=3"]) == 0
    assert (
        f"resumed with other torch {torch.__version__} -> 9.9, code {code['code']} -> other: from step 3 on"
        in capsys.readouterr().err
    )
    assert "update" in alive, "every pass of an update is a sign of life"
    about = folder / "own" / "run.json"
    told = json.loads(about.read_text())
    assert (
        [session["first_step"] for session in told["sessions"]] == [0, 2, 3]
        and told["torch"] == first["torch"]
        and told["inputs"] == first["inputs"]
    )
    assert told["sessions"][2]["changed"] == {"run.steps": [3, 4], "monitor.trajectories_every": [10, 3]}
    for damage in ({"inputs": []}, {"sessions": {}}, {"sessions": [1]}):
        about.write_text(json.dumps(told | damage))
        assert train.main(["--config", str(path), "--resume", "run.steps=5"]) == 2
        assert 'run.json is damaged ("inputs" or "sessions"): restore it' in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("config.yaml", "", "holds no options: restore it"),
        ("config.yaml", "run: {dir", "config.yaml is damaged"),
        ("run.json", "{", "run.json is damaged"),
        ("run.json", "[]", "run.json is damaged"),
    ],
)
def test_a_damaged_file_of_a_run_is_named_when_it_is_resumed(
    undisturbed, folder, capsys, name, content, message
):
    shutil.copytree(undisturbed, folder / "damaged", dirs_exist_ok=True)
    (folder / "damaged" / name).write_text(content)
    told = refused(capsys, small(folder, "damaged", run={"steps": STEPS + 1}), "--resume")
    assert message in told and str(folder / "damaged") in told and "Traceback" not in told


class Bomb:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_checkpoint_that_would_run_code_is_refused_even_with_a_manifest_that_fits(
    folder, undisturbed, capsys
):
    shutil.copytree(undisturbed, folder / "bombed")
    last = checkpoint.latest(folder / "bombed")
    state = torch.load(last / "trainer_state.pt", weights_only=True)
    torch.save(state | {"rng": Bomb(folder / "exploded")}, last / "trainer_state.pt")
    manifest = json.loads((last / "manifest.json").read_text())
    manifest["files"]["trainer_state.pt"] = files.fingerprint(last / "trainer_state.pt")
    (last / "manifest.json").write_text(json.dumps(manifest))
    message = refused(capsys, small(folder, "bombed", run={"steps": STEPS + 1}), "--resume")
    assert (
        "trainer_state.pt holds more than tensors, numbers and strings and is not opened, because it could "
        "run code" in message
    )
    assert not (folder / "exploded").exists()


def test_nothing_is_opened_with_pickle_and_no_remote_code_is_trusted_unasked():
    code = {path.name: path.read_text() for path in [*(ROOT / "lld").rglob("*.py"), *ROOT.glob("*.py")]}
    for name, text in code.items():
        for call in (
            "pickle.load",
            "yaml.unsafe_load",
            "yaml.full_load",
            "allow_pickle=True",
            "trust_remote_code=True",
        ):
            assert call not in text, f"{name}: {call}"
        for rest in text.split("torch.load(")[1:]:
            assert "weights_only=True" in rest.split("\n")[0], f"{name}: torch.load({rest[:60]}"
    assert config.Config().model.trust_remote_code is False


def test_the_best_checkpoint_is_kept_when_older_ones_go(folder, monkeypatch):
    """Held-out EM .1 .4 .4 .2 after steps 1 to 4, of which only the newest is to be kept: the best is that of
    step 2, the earlier at a tie."""
    scores = iter([0.1, 0.4, 0.4, 0.2, 0.3])
    monkeypatch.setattr(evaluating, "evaluate", lambda run, num_steps: {"eval/tiny/em": next(scores)})
    path = small(
        folder, "best", run={"save_every": 1, "keep_checkpoints": 1}, eval={"every": 1, "at_start": False}
    )
    assert train.main(["--config", str(path)]) == 0
    assert sorted(p.name for p in (folder / "best" / "checkpoints").iterdir()) == [
        "best.json",
        "step_000002",
        "step_000004",
    ]
    best = json.loads((folder / "best" / "checkpoints" / "best.json").read_text())
    assert (best["checkpoint"], best["em"]) == ("step_000002", 0.4) and "highest mean of eval/*/em" in best[
        "rule"
    ]
    evaluated = folder / "best" / "checkpoints" / "step_000004"
    (evaluated / "eval").mkdir()
    (evaluated / "eval" / "results.json").write_text("{}")
    # The resumed run knows what was best
    assert train.main(["--config", str(path), "--resume", "run.steps=5"]) == 0
    assert sorted(p.name for p in (folder / "best" / "checkpoints").iterdir()) == [
        "best.json",
        "step_000002",
        "step_000004",
        "step_000005",
    ]
    # What eval.py wrote there stays
    assert [p.name for p in evaluated.rglob("*")] == ["eval", "results.json"]


def test_the_start_is_not_taken_for_an_evaluation_that_failed(folder, monkeypatch):
    """With an evaluation after every step the first row holds the one after step 1; it fails, and is made up
    on resuming."""
    scores = iter([0.9, None, 0.2, 0.4])

    def evaluate(run, num_steps):
        score = next(scores)
        if score is None:
            raise survive.Unplayed("the search failed")
        return {"eval/tiny/em": score}

    monkeypatch.setattr(evaluating, "evaluate", evaluate)
    path = small(folder, "start", run={"save_every": 1, "steps": 2}, eval={"every": 1, "at_start": True})
    assert train.main(["--config", str(path)]) == 3
    assert "eval/tiny/em" not in rows(folder / "start")[0]
    assert train.main(["--config", str(path), "--resume"]) == 0
    assert [row["eval/tiny/em"] for row in rows(folder / "start")] == [0.2, 0.4]
    assert (
        json.loads((folder / "start" / "checkpoints" / "best.json").read_text())["checkpoint"]
        == "step_000002"
    )


def test_an_evaluation_that_is_the_best_so_far_saves_its_checkpoint(folder, monkeypatch):
    monkeypatch.setattr(
        evaluating,
        "evaluate",
        lambda run, num_steps: {
            "eval/tiny/em": {1: 0.2, 2: 0.5}.get(num_steps, 0.0),
            "eval/other/em": 0.0,
        },
    )
    path = small(folder, "early", run={"save_every": 50, "steps": 3}, eval={"every": 1, "at_start": False})
    assert train.main(["--config", str(path)]) == 0
    assert sorted(p.name for p in (folder / "early" / "checkpoints").iterdir()) == [
        "best.json",
        "step_000001",
        "step_000002",
        "step_000003",
    ]
    assert json.loads((folder / "early" / "checkpoints" / "best.json").read_text())["em"] == 0.25


def test_a_module_that_moved_to_another_folder_is_other_code(tmp_path, monkeypatch):
    """Names without their folders did not tell lld/report/figure.py from lld/experiment/figure.py."""
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    (tmp_path / "train.py").write_text("")
    found = set()
    for folder in ("experiment", "report"):
        (tmp_path / "lld" / folder).mkdir(parents=True)
        path = tmp_path / "lld" / folder / "figure.py"
        path.write_text("x = 1\n")
        found.add(provenance.code_sha256("train.py"))
        path.unlink()
    assert len(found) == 2


def test_an_update_waits_for_the_watchdogs_checkpoint():
    """Else the file would hold weights of later updates under the step's name."""
    guard = SimpleNamespace(saving=threading.Lock(), rescue=print, phase=lambda name: None)
    guard.saving.acquire()  # the watchdog, in save_what_stands
    main = threading.Thread(target=saving.enter_update, args=(SimpleNamespace(guard=guard),))
    main.start()
    main.join(0.2)
    assert main.is_alive() and guard.rescue is print
    guard.saving.release()
    main.join(10)
    assert not main.is_alive() and guard.rescue is None
