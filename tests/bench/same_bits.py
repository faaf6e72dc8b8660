"""Does a change of the code leave a run as it was? Two checkouts train configs/tiny.yaml from the same world
with the same seed; their logs and final weights are compared byte for byte.

    python tests/bench/same_bits.py OLDER NEWER [--steps 20] [--out FOLDER]

The older code makes the world and the warm-started policy, the newer code gets a copy. One thread, so that
sums are taken in one order. With `--out` the older run is kept: another comparison with it costs one run.
Prints a line per file; exit code 1 where anything differs.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

LOGS = ("metrics.jsonl", "updates.jsonl")


def last_checkpoint(steps: int) -> Path:
    return Path("checkpoints") / f"step_{steps:06d}"


def compared_files(run: Path, steps: int) -> list[Path]:
    """Files that hold numbers of the run, and neither times nor paths."""
    played = sorted(path.relative_to(run) for path in (run / "eval").rglob("*.jsonl"))
    return [*map(Path, LOGS), last_checkpoint(steps) / "model.safetensors", *played]


def train(checkout: Path, folder: Path, steps: int) -> Path:
    """Runs the checkout's train.py in `folder`, where its relative paths end up; returns the run's folder."""
    done = folder / "runs" / "tiny"
    if (done / last_checkpoint(steps) / "manifest.json").exists():
        return done
    shutil.rmtree(done, ignore_errors=True)
    command = [
        sys.executable,
        str(checkout / "train.py"),
        "--config",
        str(checkout / "configs" / "tiny.yaml"),
        f"run.steps={steps}",
        f"eval.every={steps // 2}",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    with open(folder / "output.txt", "w") as output:
        ended = subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=output)
    if ended.returncode != 0:
        sys.exit(
            f"{checkout} ended with code {ended.returncode}:\n{(folder / 'output.txt').read_text()[-3000:]}"
        )
    return done


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("older", type=Path)
    parser.add_argument("newer", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, help="keeps the runs here; default: a temporary folder")
    args = parser.parse_args()

    out = (args.out or Path(tempfile.mkdtemp(prefix="same-bits-"))).resolve()
    shutil.rmtree(out / "newer", ignore_errors=True)
    for name in ("older", "newer"):
        (out / name / "runs").mkdir(parents=True, exist_ok=True)
    older = train(args.older.resolve(), out / "older", args.steps)
    shutil.copytree(out / "older" / "runs" / "tinyworld", out / "newer" / "runs" / "tinyworld")
    newer = train(args.newer.resolve(), out / "newer", args.steps)

    num_different = 0
    for path in compared_files(older, args.steps):
        same = (newer / path).exists() and (newer / path).read_bytes() == (older / path).read_bytes()
        num_different += not same
        print(f"{'same     ' if same else 'DIFFERENT'}  {path}")
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
