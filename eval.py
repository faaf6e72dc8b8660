"""Scores a checkpoint on held-out questions: all rows of every benchmark, each question's trajectory saved.

    python eval.py --ckpt DIR [--config configs/x.yaml] [--benchmarks nq,hotpotqa] [--out DIR]
    [section.key=value ...]

Without --config the options are those of the run that the checkpoint lies in, RUN/config.yaml.

OUT (default: DIR/eval) receives <benchmark>.jsonl, one record a question, written every `eval.batch_size`
questions of a process, and results.json. The same command again continues where a killed one stopped. Also
runs under `accelerate launch`. Exit codes: 0 done; 2 a mistake in what was asked for; 3 the search failed, 7
OUT cannot be written (what was done is kept).
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from lld import files, settings
from lld.config import Config
from lld.evaluation.options import options_of
from lld.model.folder import check_folder
from lld.record.runs import printable
from lld.running.leaving import leave
from lld.tools import RetrieverError


def main(argv: list[str] | None = None) -> int:
    try:
        settings.refuse_dashes(sys.argv[1:] if argv is None else argv)
        args = parse_arguments(argv)
        out = args.out or args.ckpt / "eval"
        cfg = read_options(args)
        names = list(dict.fromkeys(args.benchmarks.split(","))) if args.benchmarks else cfg.eval.benchmarks
        # Imports torch, which takes seconds: mistakes in the options are reported before.
        from lld.evaluation.play import evaluate

        evaluate(args.ckpt, cfg, list(names), out)
    except RetrieverError as error:
        tell(f"the search failed: {error} (answers so far are kept; the same command continues from there)")
        return 3
    except KeyboardInterrupt:
        tell("stopped; answers so far are kept, and the same command continues from there")
        return 130
    except ValueError as error:
        tell(str(error))
        return 2
    except OSError as error:
        if error.errno not in files.DISK_ERRORS:
            raise
        tell(
            f"{error.filename or out}: {error.strerror}; make room, mend the permissions or choose another "
            "--out, then the same command continues with the answers kept so far"
        )
        return 7
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="eval.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ckpt", type=Path, required=True, metavar="DIR", help="checkpoint folder with model and tokenizer"
    )
    parser.add_argument(
        "--config",
        metavar="YAML",
        help="the run's configuration; default: RUN/config.yaml of a checkpoint RUN/checkpoints/step_N",
    )
    parser.add_argument(
        "--benchmarks", metavar="NAME,…", help="names in eval.benchmarks; default: all of them"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the records and results; default: <ckpt>/eval"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args(argv)


def read_options(args: argparse.Namespace) -> Config:
    """The options to evaluate with; model.path is the checkpoint, run.dir the run that it lies in."""
    check_folder(str(args.ckpt), "--ckpt", hub=False)
    cfg = options_of(args.ckpt, args.config, args.overrides)
    run_dir = args.ckpt.parent.parent if args.ckpt.parent.name == "checkpoints" else args.ckpt
    return dataclasses.replace(
        cfg,
        model=dataclasses.replace(cfg.model, path=str(args.ckpt)),
        run=dataclasses.replace(cfg.run, dir=str(run_dir)),
    )


def tell(text: str) -> None:
    print(printable(f"eval.py: {text}"), file=sys.stderr)


if __name__ == "__main__":
    leave(main())
