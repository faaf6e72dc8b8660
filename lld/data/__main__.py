"""`python -m lld.data get` fetches the real data; `python -m lld.data check FILE` looks over a file.

Exit codes: 0 done, 2 a mistake or a file with problems, 3 the hub, 7 the disk, 130 Ctrl-C.
"""

import argparse
import shlex
import sys
from pathlib import Path

from lld.data.check import check
from lld.data.get import BENCHMARKS, PARTS, HubError, get
from lld.files import DISK_ERRORS


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lld.data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    getting = commands.add_parser("get", help="fetch Search-R1's questions, passages and index")
    getting.add_argument(
        "--to", type=Path, required=True, metavar="DIR", help="the folder that receives them"
    )
    getting.add_argument(
        "--what",
        default=",".join(PARTS),
        metavar="NAMES",
        help=f"which of {', '.join(PARTS)}, with commas; all by default",
    )
    getting.add_argument(
        "--delete-parts",
        action="store_true",
        help="remove the index's two parts and the packed corpus once the whole is written",
    )
    checking = commands.add_parser("check", help="look over a file of questions or passages of your own")
    checking.add_argument("file", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.command == "get":
        args.what = args.what.split(",")
        if unknown := [name for name in args.what if name not in PARTS]:
            parser.error(f"--what {unknown[0]!r}: known are {', '.join(PARTS)}")
    return args


def next_commands(to: Path, names: list[str]) -> str:
    """How to use what was fetched."""
    lines, place = [], shlex.quote(str(to))
    corpus = f"--corpus {place}/wiki-18.jsonl"
    if "index" in names:
        lines.append(f"python retriever_server.py --index {place}/e5_Flat.index {corpus}")
    elif "corpus" in names:
        lines.append(f"python -m lld.retrieval build {corpus} --out indexes/e5-pq --index ivf-pq")
    if "questions" in names:
        sets = ", ".join(f"{name}: {to / 'questions' / path}" for name, path in BENCHMARKS.items())
        lines.append(
            f"python train.py --config configs/7b.yaml data.train={place}/questions/train.parquet "
            + shlex.quote(f"eval.benchmarks={{{sets}}}")
        )
    return "\n".join(["to use it:", *lines])


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        if args.command == "check":
            report = check(args.file)
            print("\n".join(report.lines(args.file)))
            return 2 if report.bad or not report.good else 0
        get(args.what, args.to, args.delete_parts)
        print(next_commands(args.to, args.what))
        return 0
    except (ValueError, HubError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3 if isinstance(error, HubError) else 2
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        print(f"error: {error}: make room or choose another --to; the same command goes on", file=sys.stderr)
        return 7
    except KeyboardInterrupt:
        print("stopped: the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
