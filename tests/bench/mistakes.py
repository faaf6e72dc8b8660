"""Makes 37 typical mistakes and prints what a newcomer reads: a table of message, exit code and CPU seconds.

    python tests/bench/mistakes.py --run runs/tiny [--only 13,14]

RUN is a finished run of configs/tiny.yaml; nothing in it is changed.
A row is marked + where the message holds the remedy written here, - where it does not.
"""

import argparse
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600


def mistakes(run: Path, work: Path, port: int) -> list[tuple[str, str, str]]:
    """(what was done, the command, a part of the remedy that its message must name)."""
    own = f"train.py --config {run}/config.yaml run.dir={work}/new"
    ckpt = max(run.glob("checkpoints/step_*"))
    tiny = "train.py --config configs/tiny.yaml"
    corpus = work / "corpus.jsonl"
    return [
        ("a misspelt option", f"{tiny} optim.lrr=1", "did you mean 'lr'?"),
        ("another project's name of an option", f"{tiny} optim.learning_rate=1", "did you mean optim.lr?"),
        ("an option with dashes", f"{tiny} --run.steps 3", "without dashes: run.steps=3"),
        ("an option without its section", f"{tiny} steps=3", "did you mean run.steps=3?"),
        ("a misspelt value", f"{tiny} loss.lld_gate=actions", "did you mean 'action'?"),
        ("a misspelt config", "train.py --config configs/tinny.yaml", "did you mean configs/tiny.yaml?"),
        ("no arguments", "train.py", "give either --config CONFIG"),
        ("a folder that holds a run", f"train.py --config {run}/config.yaml run.dir={run}", "--resume"),
        ("--resume of nothing", f"train.py --resume {work}/nothing", "the folder that holds config.yaml"),
        ("--resume with another rate", f"train.py --resume {run} optim.lr=0.5", f"give `--resume {run}`"),
        ("--resume without the options given", f"{tiny} --resume run.dir={run}", f"give `--resume {run}`"),
        ("a broken line of questions", f"{own} data.train={work}/broken.jsonl", "broken.jsonl"),
        ("questions without a field", f"{own} data.train={work}/fields.jsonl", '"golden_answers": ['),
        ("a model folder that is missing", f"{own} model.path=runs/nomodel", "no such folder"),
        ("a run's folder as model", f"{own} model.path={run}", f"did you mean {ckpt}?"),
        ("eval.py of a run's folder", f"eval.py --ckpt {run}", f"did you mean {ckpt}?"),
        ("eval.py of a step that is missing", f"eval.py --ckpt {run}/checkpoints/step_000099", "holds step_"),
        ("eval.py of a hub name", "eval.py --ckpt Qwen/Qwen2.5-3B", "hf download Qwen/Qwen2.5-3B"),
        ("a misspelt benchmark", f"eval.py --ckpt {ckpt} --benchmarks tinny", "did you mean 'tiny'?"),
        (
            "no retriever running",
            f"{own} retriever.url=http://127.0.0.1:{port + 1} retriever.backend=null retriever.retries=0",
            "python retriever_server.py --index",
        ),
        ("a corpus that is missing", f"{own} retriever.corpus={work}/none.jsonl", "none.jsonl"),
        (
            "an index that is missing",
            f"retriever_server.py --index {work}/none --corpus {corpus}",
            "lld.retrieval build",
        ),
        ("the server without arguments", "retriever_server.py", "--corpus"),
        (
            "a port in use",
            f"retriever_server.py --index {work}/index --corpus {corpus} --port {port}",
            f"{port}",
        ),
        (
            "a BM25 folder, with the README's line",
            f"retriever_server.py --index {work}/index --corpus {corpus} --port 0",
            "http://127.0.0.1:",
        ),
        ("a machine that is too small", "train.py --config configs/3b.yaml --plan", "plan.gpus="),
        ("a tracker that is not installed", f"{own} run.trackers=[wandb]", "pip install wandb"),
        ("--replay of no crash box", f"train.py --replay {work}", "monitor.crash_box"),
        ("lld.influence of a run's folder", f"-m lld.influence --ckpt {run}", f"did you mean {ckpt}?"),
        ("lld.report of nothing", f"-m lld.report {work}/none", "none"),
        (
            "tables of an experiment not played",
            f"-m lld.experiment configs/experiments/tiny.yaml --record {work}/none.csv --tables",
            "none.csv",
        ),
        (
            "the real-data script without data",
            f"tests/bench/real_data.py --data {work}/none --out {work}/x",
            "none",
        ),
        (
            "a misspelt option under accelerate",
            f"-m accelerate.commands.launch --num_processes 1 {tiny} optim.lrr=1",
            "did you mean 'lr'?",
        ),
        # Not of the review: of what came after it.
        ("the kept ids of a sampler that keeps all", f"{tiny} loss.support=kept", "rollout.top_p = 1.0"),
        ("a check of a broken file", f"-m lld.data check {work}/broken.jsonl", '"golden_answers": ['),
        (
            "a question to a missing step",
            f"-m lld.ask --ckpt {run}/checkpoints/step_000099 who?",
            "holds step_",
        ),
        ("publishing what is no run", f"-m lld.share {work} --to a/b --dry-run", "give a run's folder"),
    ]


def prepare(work: Path) -> None:
    (work / "broken.jsonl").write_text('{"id": "1", "question": "a", "golden_answers": ["b"]}\n{"id": \n')
    (work / "fields.jsonl").write_text('{"text": "who?", "answer": "me"}\n')
    row = '{"id": "%d", "contents": "\\"Title %d\\"\\nThe text of passage %d."}\n'
    (work / "corpus.jsonl").write_text("".join(row % (i, i, i) for i in range(20)))
    build = f"-m lld.retrieval build --corpus {work}/corpus.jsonl --out {work}/index --index bm25"
    code, text, _ = make(build, "passages")
    assert code == 0, text


def make(command: str, remedy: str) -> tuple[int, str, float]:
    """Exit code (a server that serves is ended), everything printed, CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, *command.split()],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    late = threading.Timer(TIMEOUT_S, process.kill)
    late.start()
    lines = []
    for line in process.stdout:
        lines.append(line)
        if command.startswith("retriever_server.py") and re.search(r"http://\S+:\d+", line):
            time.sleep(0.2)
            process.terminate()
    code = process.wait()
    late.cancel()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return code, "".join(lines), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def shortened(text: str, names: dict[str, str]) -> str:
    """What was printed as one cell of a table: without this machine's folders, at most 300 characters."""
    for long, short in names.items():
        text = text.replace(long, short)
    text = " / ".join(line.strip() for line in text.splitlines() if line.strip()).replace("|", "\\|")
    return text if len(text) <= 300 else f"{text[:150]} … {text[-145:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--only", help="numbers of rows, such as 13,14")
    args = parser.parse_args()
    os.environ.setdefault("LLD_CACHE", tempfile.mkdtemp(prefix="lld-cache-"))
    with tempfile.TemporaryDirectory(prefix="lld-mistakes-") as folder, socket.socket() as taken:
        work = Path(folder)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        prepare(work)
        print(
            "| # | mistake | what is printed | exit | lines | CPU s | remedy |\n|---|---|---|---|---|---|---|"
        )
        rows = mistakes(args.run, work, taken.getsockname()[1])
        chosen = set(map(int, args.only.split(","))) if args.only else set(range(1, len(rows) + 1))
        for number, (name, command, remedy) in enumerate(rows, start=1):
            if number in chosen:
                code, text, seconds = make(command, remedy)
                cell = shortened(text, {str(work): "W", str(args.run): "RUN", f"{ROOT}/": ""})
                mark = "+" if remedy in text else "-"
                count = len(text.splitlines())
                print(
                    f"| {number} | {name} | {cell} | {code} | {count} | {seconds:.1f} | {mark} |", flush=True
                )


if __name__ == "__main__":
    main()
