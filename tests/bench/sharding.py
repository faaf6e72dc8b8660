"""Runs with rollouts on one process, on two with DDP and on two with FSDP2, for several seeds: do they end in
the same place?

    python tests/bench/sharding.py [--seeds 3] [--steps 12] [--out FOLDER]

Every run is a forked child of this process, as in kill_and_resume.py. Prints a table: means over seeds and
the last third of the steps, with the standard deviation over seeds, and how far each kind is from one
process, seed by seed.
"""

import argparse
import os
import socket
import statistics
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).parent),
    str(Path(__file__).parent.parent),
    str(Path(__file__).parent.parent.parent),
]

from kill_and_resume import finish, start
from safetensors.torch import load_file
from test_train import write_config

from lld.record.runs import read_rows

KINDS = {"1 process": 1, "2 processes, DDP": 2, "2 processes, FSDP2": 2}
FIGURES = ("reward/mean", "entropy", "response_tokens", "likelihood/correct_old")


def run(folder: Path, kind: str, seed: int, steps: int) -> Path:
    """Makes a run; returns its folder."""
    name = f"{kind.replace(' ', '_').replace(',', '')}-{seed}"
    config = write_config(
        folder,
        name,
        run={"dir": str(folder / name), "steps": steps, "seed": seed, "save_every": steps, "watchdog_s": 600},
        loss={"lld_lag_steps": 0},
        rollout={"num_questions": 6, "group_size": 4, "max_new_tokens": 32, "num_slots": 12},
        tinyworld={"warm_start_steps": 300},
        eval={"every": 0},
        optim={"lr": 5e-4, "micro_batch_size": 8},
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"ACCELERATE_USE_FSDP": str("FSDP2" in kind).lower(), "FSDP_VERSION": "2"}
    children = [
        start(
            config, before=lambda: os.environ.update(environment), rank=rank, num_ranks=KINDS[kind], port=port
        )
        for rank in range(KINDS[kind])
    ]
    codes = [finish(child, 1800.0) for child in children]
    assert codes == [0] * len(codes), (name, codes, config.with_suffix(".rank0.log").read_text()[-2000:])
    return folder / name


def distance(one: Path, other: Path, begun: Path, steps: int) -> float:
    """|other - one| / |one - begun| of the final weights."""
    first, last, start = (
        load_file(path / "model.safetensors")
        for path in (one / f"checkpoints/step_{steps:06d}", other / f"checkpoints/step_{steps:06d}", begun)
    )

    def norm(a, b):
        return sum(float((a[name] - b[name]).square().sum()) for name in a) ** 0.5

    return norm(last, first) / norm(first, start)


def first_difference(one: Path, other: Path) -> str:
    """The first step whose episodes differ, by reward and length; they are drawn with the same seeds."""
    for a, b in zip(read_rows(one / "metrics.jsonl"), read_rows(other / "metrics.jsonl"), strict=True):
        if any(a[key] != b[key] for key in ("reward/mean", "response_tokens", "searches")):
            return str(a["step"])
    return "none"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = args.out or Path(tempfile.mkdtemp(prefix="lld-sharding-"))
    folder.mkdir(parents=True, exist_ok=True)
    runs = {kind: [run(folder, kind, seed, args.steps) for seed in range(args.seeds)] for kind in KINDS}
    print(
        f"| {args.seeds} seeds, {args.steps} steps | "
        + " | ".join(FIGURES)
        + " | first step with other episodes | distance of the final weights / way they went |"
    )
    print("|---" * (len(FIGURES) + 3) + "|")
    for kind, folders in runs.items():
        cells = []
        for key in FIGURES:
            ends = [
                [row[key] for row in read_rows(path / "metrics.jsonl")[-args.steps // 3 :] if key in row]
                for path in folders
            ]
            means = [statistics.fmean(values) for values in ends if values]
            cells.append(
                f"{statistics.fmean(means):.4f} ± {statistics.stdev(means) if len(means) > 1 else 0.0:.4f}"
                if means
                else "–"
            )
        alike = zip(runs["1 process"], folders, strict=True)
        pairs = [
            (
                first_difference(one, other),
                f"{distance(one, other, folder / 'world' / 'policy', args.steps):.1e}",
            )
            for one, other in alike
        ]
        print(
            f"| {kind} | "
            + " | ".join(cells)
            + f" | {', '.join(first for first, _ in pairs)} | {', '.join(far for _, far in pairs)} |"
        )


if __name__ == "__main__":
    main()
