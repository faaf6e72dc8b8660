"""All that one GPU has to answer, in one command of at most nine minutes; prints one table and writes one
JSON.

    python tests/bench/gpu_day.py [--out gpu_day.json] [--only NAME …]
    python tests/bench/gpu_day.py --pretend        # the same on the pretended device (tests/cuda), with tiny
      shapes

Each part is a process of its own with a time limit of its own, so that a failure, or a kernel that hangs,
does not end the others. What a part prints as a table is read into the JSON; its whole output lies there too.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
BENCH, SELF = ROOT / "tests" / "bench", str(Path(__file__).resolve())
BUDGET = 540  # seconds of the whole command
SHAPES, SLOTS = ("0.5b", "3b", "7b"), ("64", "128", "256")
TINY_RUN = ["model.mixed_precision=bf16", "model.gradient_checkpointing=true"]


@dataclass(frozen=True)
class Part:
    """A command with its limit in seconds; `pretended` is the one for the pretended device, None where it has
    none."""

    name: str
    limit: float
    command: list[str]
    pretended: list[str] | None
    hooked: bool = True  # whether the pretended device has to be put around it, or it does that itself


def parts(folder: Path) -> list[Part]:
    """In the order in which they are wanted if time runs out."""
    bench = {path.stem: str(path) for path in BENCH.glob("*.py")}
    train = [str(ROOT / "train.py"), "--config", str(ROOT / "configs" / "tiny.yaml"), *TINY_RUN]
    train += [f"{name}={folder}/world{rest}" for name, rest in PATHS.items()]
    train += [f"run.dir={folder}/run", f"eval.benchmarks={{tiny: {folder}/world/heldout.jsonl}}"]
    tests = ["-m", "pytest", "-v", "-m", "not whole_runs", str(ROOT / "tests" / "test_cuda_paths.py")]
    tiny = ["--shape", "tiny", "--slots", "4", "--context", "40"]
    mfu = [bench["update_mfu"], "--shapes", "tiny", "--tokens", "1200"]
    found = [Part("device tests", 100, tests, tests, hooked=False)]
    found += [Part("parity", 40, [SELF, "--part", "parity"], [SELF, "--part", "parity"])]
    found += [Part("sampler gap", 40, [SELF, "--part", "gap"], [SELF, "--part", "gap"])]
    for shape in SHAPES:
        command = [bench["rollout_gpu"], "--shape", shape, "--slots", *SLOTS, "--modes", "eager", "graphs"]
        pretended = (
            [bench["rollout_gpu"], *tiny, "--modes", "eager", "graphs"] if shape == SHAPES[0] else None
        )
        found += [Part(f"decode {shape}", 50, command, pretended)]
        flash = ["flash-attn", "flash-attn graphs"]
        found += [Part(f"decode {shape}, flash-attn", 40, [*command[:-2], *flash], None)]
    found += [Part("update", 60, [bench["update_mfu"], "--shapes", "3b,7b", "--tokens", "16384"], mfu)]
    compiled = [bench["update_mfu"], "--shapes", "3b", "--tokens", "16384", "--compile"]
    found += [Part("update, torch.compile", 60, compiled, None)]
    planned = [bench["plan_memory"], "--gpu"]
    found += [Part("plan", 60, planned, [bench["plan_memory"], "--sizes", "1M", "--gpu", "--here"])]
    found += [Part("exact search", 40, [bench["retrieval_gpu"]], [bench["retrieval_gpu"], "--num", "20000"])]
    few = ["run.steps=1", "rollout.num_questions=2", "rollout.group_size=2", "optim.updates_per_rollout=2"]
    few += ["eval.max_questions=4", "tinyworld.warm_start_steps=30"]
    longer = ["run.steps=8", "eval.max_questions=40", "tinyworld.warm_start_steps=100"]
    return [*found, Part("tiny world", 100, [*train, *longer], [*train, *few])]


PATHS = {
    "tinyworld.dir": "",
    "model.path": "/policy",
    "data.train": "/train.jsonl",
    "retriever.corpus": "/corpus.jsonl",
}


def tables(text: str) -> list[dict]:
    """The rows of all markdown tables in `text`, by column."""
    rows, head = [], None
    for line in text.splitlines():
        if not line.startswith("|"):
            head = None
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if head is None:
            head = cells
        elif not set(line) <= set("|-: "):
            rows.append(dict(zip(head, cells, strict=False)))
    return rows


def carry_out(part: Part, folder: Path, pretend: bool, seconds: float) -> dict:
    command = part.pretended if pretend else part.command
    if command is None:
        return {
            "part": part.name,
            "outcome": "not on the pretended device",
            "s": 0.0,
            "rows": [],
            "output": "",
        }
    before = [str(ROOT / "tests" / "cuda" / "program.py"), str(folder)] if pretend and part.hooked else []
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1" if pretend else "8"}
    environment |= {} if pretend else {"LLD_REAL_GPU": "1"}
    began, outcome = time.monotonic(), "ok"
    with open(folder / "output.txt", "w+") as output:
        process = subprocess.Popen(
            [sys.executable, *before, *command],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
            outcome = "ok" if code == 0 else f"exit code {code}"
        except BaseException as error:
            # Its children too: they would hold the GPU.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            outcome = f"stopped after {seconds:.0f} s"
        output.seek(0)
        text = output.read()
    taken = time.monotonic() - began
    return {
        "part": part.name,
        "outcome": outcome,
        "s": round(taken, 1),
        "rows": tables(text),
        "output": text[-20000:],
    }


def summary(result: dict) -> list[str]:
    """Lines of the one table: a row for each row that the part printed, or its last line."""
    start = f"| {result['part']} | {result['outcome']} | {result['s']:.0f} |"
    last = next((line for line in reversed(result["output"].splitlines()) if line.strip()), "")
    told = [", ".join(f"{name} {value}" for name, value in row.items() if value) for row in result["rows"]]
    return [f"{start} {text} |" for text in told or [last.strip().replace("|", "/")[:150]]]


# ---- parts that are no script of their own
# -----------------------------------------------------------------------------


def parity() -> None:
    """Log-probabilities and gradients of one random model on CPU and GPU, float32, without TF32."""
    import torch
    from conftest import make_lm, make_tokenizer

    from lld.policy import Policy

    found, ids_BT = {}, torch.randint(2, 300, (4, 60), generator=torch.Generator().manual_seed(0))
    scored_BT = (ids_BT > 100) & (torch.arange(60) > 0)
    for device in ("cpu", "cuda"):
        policy = Policy(make_lm(make_tokenizer(), hidden_size=128, num_layers=4, scale=1.0).to(device))
        logprobs_BT, entropy_BT = policy(ids_BT.to(device), scored_BT.to(device))
        logprobs_BT.sum().backward()
        gradient = torch.cat([weight.grad.flatten() for weight in policy.parameters()])
        found[device] = [x.detach().cpu() for x in (logprobs_BT, entropy_BT, gradient)]
    print("| compared | largest difference | relative to the norm |\n|---|---|---|")
    for name, a, b in zip(
        ("log-probability", "entropy", "gradient"), found["cpu"], found["cuda"], strict=True
    ):
        print(f"| {name} | {float((a - b).abs().max()):.2e} | {float((a - b).norm() / a.norm()):.2e} |")


def gap() -> None:
    """|log p(trainer) - log p(sampler)| of sampled tokens, by the type that is computed in: the noise floor
    of LLDS."""
    import torch
    from conftest import make_lm, make_tokenizer

    from lld.engine.engine import Engine
    from lld.model.load import engine_model
    from lld.policy import Policy

    device, tokenizer = torch.device("cuda"), make_tokenizer()
    print("| computed in | tokens | mean gap | largest |\n|---|---|---|---|")
    for bf16 in (False, True):
        lm = make_lm(tokenizer, hidden_size=256, num_layers=6, scale=8.0)
        twin = engine_model(lm, device, bf16=bf16)
        options = {"num_slots": 8, "temperature": 1.0, "top_p": 1.0, "stop_strings": (), "eos_ids": ()}
        engine = Engine(twin, tokenizer, **options, max_tokens=100)
        engine.add("row", list(range(20, 50)), list(range(8)), 40)
        ended = []
        while engine.busy:
            ended += engine.step()
        rows_BT = torch.tensor([[*range(20, 50), *stopped.token_ids] for stopped in ended])
        scored_BT = (torch.arange(rows_BT.shape[1]) >= 30).expand_as(rows_BT)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            policy = Policy(lm.to(device))
            trained_BT = policy(rows_BT.to(device), scored_BT.to(device))[0].cpu()
        gap_BT = (trained_BT[:, 30:] - torch.tensor([stopped.logprobs for stopped in ended])).abs()
        kind = "bf16, trainer by autocast" if bf16 else "float32"
        print(f"| {kind} | {gap_BT.numel()} | {float(gap_BT.mean()):.1e} | {float(gap_BT.max()):.1e} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pretend", action="store_true", help="on the pretended device, with tiny shapes")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts whose names begin so")
    parser.add_argument("--out", type=Path, default=Path("gpu_day.json"))
    parser.add_argument("--part", choices=("parity", "gap"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
        return parity() if args.part == "parity" else gap()
    import torch

    if not args.pretend and not torch.cuda.is_available():
        sys.exit("gpu_day.py: no GPU here; --pretend runs all parts on the pretended device")
    name = "the pretended device" if args.pretend else torch.cuda.get_device_name()
    began, results = time.monotonic(), []
    print(
        f"On {name}, torch {torch.__version__}:\n\n| part | outcome | s | found |\n|---|---|---|---|",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        for part in parts(Path(folder)):
            if args.only and not any(part.name.startswith(only) for only in args.only):
                continue
            left = BUDGET - (time.monotonic() - began) if not args.pretend else 600.0
            if left < 5:
                results.append(
                    {"part": part.name, "outcome": "no time left", "s": 0.0, "rows": [], "output": ""}
                )
            else:
                limit = 600.0 if args.pretend else min(part.limit, left)
                results.append(carry_out(part, Path(folder), args.pretend, limit))
            print("\n".join(summary(results[-1])), flush=True)
            told = {"device": name, "torch": torch.__version__, "parts": results}
            args.out.write_text(json.dumps(told, indent=1) + "\n")
    print(f"\n{time.monotonic() - began:.0f} s; written to {args.out}")


if __name__ == "__main__":
    main()
