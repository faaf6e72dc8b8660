"""train.py as a user runs it: whole runs of a world made in seconds, killed, resumed, refused and deprived of
its retriever."""

import contextlib
import errno
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
import yaml
from conftest import ROOT

import train
from lld import reward, settings, update
from lld.record import metrics, phases
from lld.running import checkpoint, crashbox, evaluating, recording, trackers
from lld.tools import RetrieverError

STEPS = 6


def write_config(folder: Path, name: str, **changes) -> Path:
    world = folder / "world"
    tree = {
        "run": {"dir": str(folder / name), "steps": STEPS, "save_every": 2, "keep_checkpoints": 0},
        "tinyworld": {"dir": str(world), "num_people": 24, "warm_start_steps": 80, "hidden_size": 64},
        "model": {"path": str(world / "policy"), "mixed_precision": "no"},
        "data": {"train": str(world / "train.jsonl")},
        "rollout": {
            "num_questions": 4,
            "group_size": 3,
            "max_turns": 2,
            "max_prompt_tokens": 64,
            "max_new_tokens": 30,
            "max_observation_tokens": 100,
            "max_episode_tokens": 300,
            "num_slots": 5,
            "overlap_search": False,
        },
        "optim": {"lr": 1e-3, "warmup_steps": 2, "updates_per_rollout": 2, "micro_batch_size": 4},
        "reward": {"kind": "format"},  # a policy this raw never answers rightly, but its formats differ
        "loss": {"lld_lag_steps": 1},
        "retriever": {"url": None, "corpus": str(world / "corpus.jsonl"), "backend": "bm25"},
        "eval": {
            "every": 3,
            "benchmarks": {"tiny": str(world / "heldout.jsonl")},
            "during_training": ["tiny"],
            "max_questions": 8,
        },
    }
    for section, options in changes.items():
        tree[section] = tree.get(section, {}) | options
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def command(config: Path, *more: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), "--config", str(config), *more]


def run(config: Path, *more: str, timeout: int = 900):
    return subprocess.run(
        command(config, *more),
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    """Figures take longer than the runs of these tests."""
    patch.setattr(recording, "draw_report", lambda *_: "")


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(first_run):
    return first_run


def test_a_run_leaves_what_it_promises(folder):
    whole = folder / "whole"
    logged = rows(whole)
    assert [row["step"] for row in logged] == list(range(STEPS))
    assert all(metrics.described(name) for row in logged for name in row)
    # At the start, then every third
    assert [step for step, row in enumerate(logged) if "eval/tiny/em" in row] == [0, 2, 5]
    assert all(row["sampler_gap/max"] < 1e-4 for row in logged)
    assert any(row["loss/lld"] > 0 for row in logged[1:])
    assert (whole / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert 'id="trajectories-0-0"' in (whole / "report.html").read_text()
    assert list((whole / "lld").rglob("events.out.tfevents*"))  # TensorBoard, through accelerate's tracker
    assert [path.name for path in sorted((whole / "checkpoints").iterdir())] == [
        "step_000002",
        "step_000004",
        "step_000006",
    ]
    timed = [json.loads(line) for line in (whole / "timings.jsonl").read_text().splitlines()]
    assert all(row["time/step_s"] >= row["time/rollout_s"] + row["time/update_s"] > 0 for row in timed)
    assert yaml.safe_load((whole / "config.yaml").read_text())["optim"]["lr"] == 1e-3


def test_the_console_tells_scores_and_what_to_type_next(folder):
    told = (folder / "whole.txt").read_text()
    ems = {
        (row["step"] + 1) * (row["step"] > 0): row["eval/tiny/em"]
        for row in rows(folder / "whole")
        if "eval/tiny/em" in row
    }
    assert f"held-out tiny EM {ems[0]:.3f} at the start; {folder}/whole/report.html comes after 10" in told
    best = max(ems, key=lambda step: ems[step])
    at = f"after {best} steps" if best else "at the start"
    line = f"tiny EM {ems[6]:.3f} after 6 steps (start {ems[0]:.3f}, best {ems[best]:.3f} {at})"
    assert f"held-out {line}; {folder}/whole/report.html" in told  # also while the run goes on
    assert (
        f"{folder}/whole: 6 of 6 steps; held-out {line}; reward " in told
        and "python eval.py --ckpt" in told.splitlines()[-2]
    )
    # No bars where nobody watches
    assert "it/s" not in told and "%|" not in told and "step 1/6: reward" in told


def test_a_checkpoint_opens_with_from_pretrained(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = folder / "whole" / "checkpoints" / "step_000006"
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert len({file.stat().st_mode for file in path.iterdir() if file.is_file()}) == 1, (
        "who may read one file may read all"
    )
    assert lm(torch.tensor([tokenizer.encode("who")])).logits.isfinite().all()
    started = AutoModelForCausalLM.from_pretrained(folder / "world" / "policy")
    assert not torch.equal(lm.get_input_embeddings().weight, started.get_input_embeddings().weight)


def test_kill_and_resume_repeat_the_run_bit_for_bit_and_a_rank_may_go(folder):
    """kill -9 in a rollout, an update, a checkpoint and an evaluation, then --resume: logs, weights and
    optimizer equal the undisturbed run's.

    Then rank 1 of 2 alone gets SIGTERM, is killed, or hangs: rank 0 ends too, says why and has saved what
    stood. So does a process alone whose search hangs.
    """
    script = ROOT / "tests" / "bench" / "kill_and_resume.py"
    done = subprocess.run(
        [sys.executable, str(script), "--moments", "4", "--out", str(folder)],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "4 of 4 killed runs" in done.stdout and "5 of 5 checks" in done.stdout


def refused(capsys, config: Path, *more: str, code: int = 2) -> str:
    """The message of a run that train.py, called in this process, ends with exit code `code`."""
    assert train.main(["--config", str(config), *more]) == code
    return capsys.readouterr().err


def test_a_folder_that_holds_a_run_is_refused(folder, capsys):
    message = refused(capsys, folder / "whole.yaml")
    assert re.search(
        r"run.dir = .*whole already holds a run: continue it with --resume .*whole, or choose another",
        message,
    )
    (folder / "headless").mkdir()
    (folder / "headless" / "metrics.jsonl").write_text("")
    message = refused(capsys, folder / "whole.yaml", f"run.dir={folder}/headless")
    assert "headless holds metrics.jsonl of a run whose config.yaml is gone: restore that file" in message


def test_a_resumed_run_keeps_its_options(folder, capsys):
    message = refused(capsys, folder / "whole.yaml", "--resume", "optim.lr=0.5")
    assert (
        "--resume: optim.lr was 0.001 and is 0.5 now" in message
        and f"give `--resume {folder}/whole` alone" in message
    )


@pytest.mark.parametrize(
    "name, remedy", [("mlflow", "pip install mlflow"), ("tensorbord", "accelerate knows aim, ")]
)
def test_a_tracker_that_would_be_left_out_is_refused(folder, capsys, monkeypatch, name, remedy):
    monkeypatch.setattr(trackers, "get_available_trackers", list)
    message = refused(capsys, folder / "whole.yaml", f"run.trackers=[{name}]", f"run.dir={folder}/tracked")
    assert (
        f"run.trackers names {name!r}" in message and remedy in message and not (folder / "tracked").exists()
    )


def test_resuming_nothing_is_refused(folder, capsys):
    assert "nothing holds no run" in refused(
        capsys, folder / "whole.yaml", "--resume", f"run.dir={folder}/nothing"
    )


def test_a_mistaken_option_is_named_before_anything_slow_is_imported():
    code = (
        "import sys, train\n"
        f"code = train.main(['--config', {str(ROOT / 'configs' / 'tiny.yaml')!r}, 'optim.lrr=1'])\n"
        "slow = {'torch', 'transformers', 'accelerate', 'faiss', 'bm25s', 'matplotlib'}\n"
        "print(code, sorted(slow & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 []\n", done.stdout + done.stderr
    assert done.stderr == "train.py: unknown option optim.lrr: did you mean 'lr'?\n"


def test_a_run_without_an_index_loads_no_library_of_one():
    """Nor one that draws: the modules that a run imports, without what it opens."""
    code = (
        "import sys\n"
        "from lld.running import ending, setup\n"
        "print(sorted({'faiss', 'bm25s', 'matplotlib'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_dashes_and_a_full_disk_in_the_warm_start_end_with_one_line(folder, capsys):
    with pytest.raises(SystemExit) as ended:
        train.main(["--config", str(folder / "whole.yaml"), "--run.steps", "3"])
    assert (
        ended.value.code == 2 and "options are written without dashes: run.steps=3" in capsys.readouterr().err
    )
    world = [f"run.dir={folder}/x", f"tinyworld.dir={folder}/full_world"]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        message = refused(capsys, folder / "whole.yaml", *world, code=7)
    finally:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        )
    assert "full_world' cannot be written" in message and "Nothing was trained: make room" in message
    assert not (folder / "x").exists() and not list(folder.glob("full_world*"))


def test_a_missing_model_and_a_missing_question_file_are_named(folder, capsys):
    assert "model.path" in refused(
        capsys, folder / "whole.yaml", f"run.dir={folder}/x", f"model.path={folder}/nowhere"
    )
    assert "nowhere.jsonl" in refused(
        capsys, folder / "whole.yaml", f"run.dir={folder}/x", f"data.train={folder}/nowhere.jsonl"
    )
    assert not (folder / "x").exists()


def test_a_truncated_checkpoint_is_named(folder, capsys):
    copy = folder / "truncated"
    shutil.copytree(folder / "whole", copy)
    weights = copy / "checkpoints" / "step_000006" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    config = write_config(
        folder, "truncated", run={"dir": str(copy), "steps": 8, "save_every": 2, "keep_checkpoints": 0}
    )
    before = (copy / "metrics.jsonl").read_bytes()
    message = refused(capsys, config, "--resume")
    assert re.search(
        r"step_000006: model.safetensors has \d+ bytes .* it is damaged, delete the folder to resume from "
        r"the one before",
        message,
    )
    assert (copy / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_of_another_model_is_named(folder):
    here = {"lm_head.weight": torch.zeros(3, 4)}
    with pytest.raises(
        ValueError, match="is of another model: .* resume with the model.path it was trained with"
    ):
        checkpoint.load_trainer_state(folder / "whole" / "checkpoints" / "step_000006", here)


def test_half_written_checkpoints_are_not_taken_for_whole(folder, tmp_path):
    shutil.copytree(
        folder / "whole" / "checkpoints" / "step_000002", tmp_path / "checkpoints" / "step_000002"
    )
    (tmp_path / "checkpoints" / "step_000004.partial").mkdir()
    (tmp_path / "checkpoints" / "step_000006").mkdir()  # no manifest
    assert checkpoint.latest(tmp_path).name == "step_000002"


class Failing(BaseHTTPRequestHandler):
    """Answers well until `good` requests were made, then fails as `how` says."""

    good, how = 3, "500"

    def do_POST(self):
        cls = type(self)
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        cls.good -= 1
        status, lists = (
            (200, len(queries))
            if cls.good >= 0
            else {"500": (500, 0), "short": (200, len(queries) - 1)}[cls.how]
        )
        body = json.dumps(
            {"result": [[{"document": {"id": "0", "contents": '"T"\ntext'}, "score": 1.0}] * 3] * lists}
        ).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("how", ["500", "short"])
def test_a_failing_retriever_stops_the_run_with_a_checkpoint(folder, how, capsys):
    """Bounded retries, then a checkpoint and exit code 3; no step was trained on the failed search."""
    handler = type("Handler", (Failing,), {"good": 3, "how": how})
    server = HTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    retriever = {"url": f"http://127.0.0.1:{server.server_port}", "retries": 1, "timeout_s": 5}
    some = folder / "three.jsonl"
    some.write_text("".join((folder / "world" / "train.jsonl").open().readlines()[:3]))
    changes = {"retriever": retriever, "eval": {"every": 0}, "data": {"train": str(some)}}
    message = refused(capsys, write_config(folder, f"failing_{how}", **changes), code=3)
    server.shutdown()
    assert "3 training questions: a step asks each of them 1.3 times (rollout.num_questions)" in message
    assert "failed 2 attempts" in message and "Nothing was trained on the failed search" in message
    finished = (
        len(rows(folder / f"failing_{how}")) if (folder / f"failing_{how}" / "metrics.jsonl").exists() else 0
    )
    assert checkpoint.latest(folder / f"failing_{how}") == checkpoint.folder_of(
        folder / f"failing_{how}", finished
    )


def test_a_retriever_that_fails_in_an_evaluation_loses_nothing_and_the_run_resumes_exactly(
    folder, capsys, monkeypatch
):
    """The step before the evaluation is logged and saved; resumed with a good retriever, the run equals one
    that was never disturbed."""
    rows_of, evaluate = {}, evaluating.evaluate

    def without_retriever(*args):
        handler.good = 0
        return evaluate(*args)

    for name in ("disturbed", "undisturbed"):
        handler = type("Handler", (Failing,), {"good": 10**9, "how": "500"})
        server = HTTPServer(("127.0.0.1", 0), handler)
        Thread(target=server.serve_forever, daemon=True).start()
        retriever = {"url": f"http://127.0.0.1:{server.server_port}", "retries": 0, "timeout_s": 5}
        config = write_config(
            folder,
            name,
            retriever=retriever,
            eval={"every": 2, "at_start": False},
            run={"dir": str(folder / name), "steps": 4, "save_every": 50},
        )
        with monkeypatch.context() as patch:
            if name == "disturbed":
                patch.setattr(evaluating, "evaluate", without_retriever)
            code = train.main(["--config", str(config)])
        if name == "disturbed":
            assert code == 3 and "Saved" in capsys.readouterr().err
            assert len(rows(folder / name)) == 2 and checkpoint.latest(folder / name) == checkpoint.folder_of(
                folder / name, 2
            )
            handler.good = 10**9
            code = train.main(["--config", str(config), "--resume"])
        assert code == 0
        server.shutdown()
        rows_of[name] = (folder / name / "metrics.jsonl").read_bytes()
    assert rows_of["disturbed"] == rows_of["undisturbed"]  # the evaluation that failed is made up


@pytest.mark.parametrize(
    "change, message",
    [
        ("rollout.max_prompt_tokens=1", "its prompt has"),
        ("rollout.max_observation_tokens=4", "rollout.max_observation_tokens"),
        ("rollout.max_episode_tokens=99999", "exceeds the model's context"),
    ],
)
def test_budgets_are_checked_before_work_starts(folder, capsys, change, message):
    more = [
        "tinyworld.dir=null",
        "tinyworld.num_people=160",
        "tinyworld.warm_start_steps=600",
        "tinyworld.hidden_size=128",
    ]
    assert message in refused(capsys, folder / "whole.yaml", f"run.dir={folder}/budget", change, *more)
    assert not (folder / "budget").exists()


def test_weights_of_another_model_are_refused(folder, capsys, tmp_path):
    """transformers only warns and fills missing layers with random numbers."""
    shutil.copytree(folder / "world" / "policy", tmp_path / "deeper")
    shape = json.loads((tmp_path / "deeper" / "config.json").read_text())
    (tmp_path / "deeper" / "config.json").write_text(
        json.dumps(shape | {"num_hidden_layers": shape["num_hidden_layers"] + 1})
    )
    assert "weights and config.json are not of the same model" in refused(
        capsys, folder / "whole.yaml", f"run.dir={folder}/x", f"model.path={tmp_path}/deeper"
    )
    weights = tmp_path / "deeper" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    assert "cannot load the weights of model.path" in refused(
        capsys, folder / "whole.yaml", f"run.dir={folder}/x", f"model.path={tmp_path}/deeper"
    )
    (tmp_path / "deeper" / "tokenizer.json").write_text('{"cut')
    assert "cannot open the tokenizer of model.path" in refused(
        capsys, folder / "whole.yaml", f"run.dir={folder}/x", f"model.path={tmp_path}/deeper"
    )


def python_block(page: str, words: str) -> str:
    """The code block of a page of docs/ that holds `words`."""
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL
    )
    [block] = [block for block in blocks if words in block]
    return block


def phases_of(*numbers):
    """An update of the detector that finds these phases, with an entropy of wrong responses to tell of."""

    def update(self, row):
        self.wrong.update(1.0)
        return numbers[row["step"]]

    return update


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def wait_for_port(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)


def test_a_run_with_the_retriever_and_the_reward_of_the_docs(folder, tmp_path, monkeypatch):
    """The whole server of docs/retriever.md answers a run's searches, the function of docs/data.md scores."""
    (tmp_path / "my_server.py").write_text(python_block("retriever.md", "serve_forever"))
    (tmp_path / "rewards_of_mine.py").write_text(python_block("data.md", "def thrifty"))
    monkeypatch.syspath_prepend(tmp_path)
    port = free_port()
    program = [sys.executable, str(tmp_path / "my_server.py"), str(folder / "world" / "corpus.jsonl")]
    server = subprocess.Popen([*program, str(port)], stderr=subprocess.DEVNULL)
    scored, score = [], reward.score_episodes
    config = write_config(
        folder,
        "own",
        retriever={"url": f"http://127.0.0.1:{port}"},
        eval={"every": 0, "at_start": False},
    )
    try:
        wait_for_port(port)
        with pytest.MonkeyPatch.context() as patch:
            draw_nothing(patch)
            patch.setattr(
                reward,
                "score_episodes",
                lambda *args: scored.append((args[0], score(*args))) or scored[-1][1],
            )
            more = ["run.steps=2", "reward.kind=rewards_of_mine:thrifty"]
            assert train.main(["--config", str(config), *more]) == 0
    finally:
        server.kill()
        server.wait()
    searches = [turn for episodes, _ in scored for e in episodes for turn in e.turns if turn.searched]
    assert len(scored) == 2 and searches
    for turn in searches:
        assert len(turn.passages) == 3
        for passage in turn.passages:
            common = {*turn.content.lower().split()} & {*passage.contents.lower().split()}
            assert passage.score == len(common)
    for episodes, scores in scored:
        for episode, value in zip(episodes, scores, strict=True):
            if episode.answer is None:
                assert value == 0
            else:
                right = reward.token_f1(episode.answer, episode.question.golden_answers)
                searched = sum(turn.tool_was_read for turn in episode.turns)
                assert value == pytest.approx(right - 0.05 * searched)


def test_a_retriever_that_is_down_is_named_before_work_starts(folder, capsys):
    config = write_config(folder, "down", retriever={"url": "http://127.0.0.1:9", "retries": 0})
    message = refused(capsys, config, code=3)
    assert "127.0.0.1:9" in message and "retriever_server.py" in message
    assert not (folder / "down").exists()


def test_a_crash_box_replays_bit_for_bit_and_shows_another_loss(folder, capsys, monkeypatch):
    """Unchanged options give the original's every number, compared with the same older policy.

    With more LLDS the first replayed update still agrees, later ones do not. What is trained are the ids that
    the sampler kept, which the box holds.
    """
    monkeypatch.setattr(phases.Detector, "update", phases_of(0, 2, 2, 3))
    config = write_config(
        folder,
        "boxed",
        eval={"every": 0},
        run={"dir": str(folder / "boxed"), "steps": 4, "save_every": 50},
        monitor={"crash_box": 1, "stop_in_phase": 3},
        rollout={"top_p": 0.8},
        loss={"support": "kept"},
    )
    anchors, update_policy = [], update.update_policy
    monkeypatch.setattr(
        update,
        "update_policy",
        lambda *args, anchor, **more: (
            anchors.append(anchor is not None) or update_policy(*args, anchor=anchor, **more)
        ),
    )
    assert train.main(["--config", str(config)]) == 4
    # At the first step an older policy is this one, scored by another pass
    assert anchors == [False, True, True, True]
    box = folder / "boxed" / "boxes" / "step_000004"
    assert sorted(path.name for path in box.parent.iterdir()) == ["step_000002", "step_000004"]
    assert "phase 3 (spiral) begins" in (folder / "boxed" / "warnings.log").read_text()
    assert sorted(path.name for path in (box / "episodes").iterdir()) == [
        "step_000002.jsonl",
        "step_000003.jsonl",
    ]
    capsys.readouterr()
    assert train.main(["--replay", str(box)]) == 0
    assert "bit for bit" in capsys.readouterr().out
    originals = rows(folder / "boxed")[2:]
    assert rows(box / "replays" / "unchanged") == originals
    # The same box from a stranger: a model whose code runs when it is opened, a world to be made elsewhere, a
    # log elsewhere.
    shutil.copytree(folder / "world" / "policy", box.parent / "evil")
    evil_shape = json.loads((box.parent / "evil" / "config.json").read_text()) | {
        "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},
        "model_type": "evil",
    }
    (box.parent / "evil" / "config.json").write_text(json.dumps(evil_shape))
    (box.parent / "evil" / "evil.py").write_text(f"open({str(box.parent / 'PWNED')!r}, 'w')")
    (box.parent / "victim.partial").mkdir()
    (box.parent / "victim.partial" / "thesis.tex").write_text("years of work")
    options = yaml.safe_load((box / "config.yaml").read_text())
    options["model"] |= {"path": str(box.parent / "evil"), "trust_remote_code": True}
    options["tinyworld"]["dir"] = str(box.parent / "victim")
    options["run"] |= {"dir": str(box.parent / "elsewhere"), "trackers": ["tensorboard"]}
    (box / "config.yaml").write_text(yaml.safe_dump(options))
    assert train.main(["--replay", str(box), "loss.lld_weight=5.0"]) == 0
    changed = rows(box / "replays" / "lld_weight=5.0")
    assert (
        changed[0]["likelihood/correct_old"] == originals[0]["likelihood/correct_old"]
        and changed[1]["likelihood/correct_old"] != originals[1]["likelihood/correct_old"]
    )
    assert (
        not any((box.parent / name).exists() for name in ("PWNED", "victim", "elsewhere"))
        and (box.parent / "victim.partial" / "thesis.tex").read_text() == "years of work"
    )
    assert "rollout.max_turns cannot be changed" in refused_replay(capsys, box, "rollout.max_turns=1")
    assert "optim.name cannot be changed" in refused_replay(capsys, box, "optim.name=adamw_offload")
    (box / "episodes" / "step_000002.jsonl").unlink()
    assert "the box is damaged" in refused_replay(capsys, box)
    assert "no crash box" in refused_replay(capsys, folder)


def refused_replay(capsys, box: Path, *overrides: str) -> str:
    assert train.main(["--replay", str(box), *overrides]) == 2
    return capsys.readouterr().err


def test_a_run_can_stop_when_a_phase_begins_and_leaves_its_report(folder, capsys, monkeypatch):
    monkeypatch.setattr(phases.Detector, "update", phases_of(0, 2, 2, 2))
    config = write_config(
        folder,
        "stopped",
        eval={"every": 0},
        run={"dir": str(folder / "stopped"), "steps": 4, "save_every": 50},
        monitor={"stop_in_phase": 2},
    )
    assert train.main(["--config", str(config)]) == 4
    told, stopped = capsys.readouterr(), folder / "stopped"
    assert "phase 2 (flattening) has begun" in told.err
    assert told.out.endswith(
        f"python eval.py --ckpt {stopped}/checkpoints/step_000002 --config "
        f"{stopped}/config.yaml\n{stopped}/report.html and {stopped}/figure.png show the run\n"
    )
    assert f"{stopped}: 2 of 4 steps; reward " in told.out and "newest checkpoint" in told.out
    assert 'id="content"' in (stopped / "report.html").read_text() and (
        stopped / "figure.png"
    ).read_bytes().startswith(b"\x89PNG")
    assert not list(stopped.glob("partial-*"))
    assert len(rows(stopped)) == 2 and checkpoint.latest(stopped) == checkpoint.folder_of(stopped, 2)


@pytest.mark.parametrize(
    "ending, code",
    [
        (3, 3),
        (5, 5),
        (6, 6),
        (RetrieverError("gone"), 3),
        (OSError(errno.ENOSPC, "full"), 7),
        (KeyError("a bug"), 1),
    ],
    ids=str,
)
def test_however_a_run_ends_it_leaves_its_report(tmp_path, monkeypatch, capsys, ending, code):
    def ends(guard, cfg, *_):
        guard.run_dir = tmp_path
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "reward/mean": 0.25}) + "\n")
        if isinstance(ending, Exception):
            raise ending
        return ending

    monkeypatch.setattr(train, "carry_out", ends)

    def call():
        return train.main(["--config", str(ROOT / "configs" / "tiny.yaml")])

    if code == 1:
        with pytest.raises(KeyError):
            call()
    else:
        assert call() == code
    assert f"{tmp_path / 'report.html'} and {tmp_path / 'figure.png'} show the run" in capsys.readouterr().out
    assert (tmp_path / "report.html").exists() and (tmp_path / "figure.png").exists()


def test_a_collapse_stops_the_run_fills_the_box_and_no_report_hides_why(folder, capsys, monkeypatch):
    """The rule itself, on made-up rewards that are lost at once; a report that fails costs neither message
    nor exit code."""
    seen = phases.Detector.update

    def made_up(row):
        return row | {
            "reward/mean": 0.5 * (row["step"] == 0),
            "reward/mixed_groups": float(row["step"] == 0),
            "answered": 1.0 * (row["step"] == 0),
        }

    monkeypatch.setattr(phases.Detector, "update", lambda self, row: seen(self, made_up(row)))
    monkeypatch.setattr("lld.report.figure.write_page", lambda *_: 1 / 0)
    config = write_config(
        folder,
        "dead",
        eval={"every": 0},
        run={"dir": str(folder / "dead"), "steps": 9, "save_every": 50},
        monitor={"stop_in_phase": 4, "crash_box": 2},
    )
    assert train.main(["--config", str(config)]) == 4
    told = capsys.readouterr()
    assert (
        "phase 4 (collapse) begins: reward/mean 0.50 -> 0.10, answered 1.00 -> 0.20" in told.err
        and "phase 4 (collapse) has begun" in told.err
        and "--resume would go on with a collapsed policy" in told.err
    )
    assert (
        len(rows(folder / "dead")) == 5
        and (folder / "dead" / "boxes" / "step_000005" / "config.yaml").exists()
    )
    assert (
        "no report could be drawn (ZeroDivisionError: division by zero); python -m lld.report "
        f"{folder}/dead tries again" in told.out
    )


def test_a_later_crash_box_leaves_the_first_and_those_with_replays(tmp_path, monkeypatch):
    monkeypatch.setattr(crashbox.checkpoint, "save", lambda *_, **__: None)
    recent = crashbox.Recent(1)

    def write(step):
        recent.states, recent.episodes = [(step, {}, {})], {step: []}
        return recent.write(tmp_path, settings.from_dict({}), None, None)

    write(60)
    replay = write(70) / "replays" / "mine"
    replay.mkdir(parents=True)
    for step in (80, 100, 70):  # the last one by a resumed run
        write(step)
    assert replay.is_dir()
    left = sorted(path.name for path in (tmp_path / "boxes").iterdir())
    assert left == ["step_000061", "step_000071"]
