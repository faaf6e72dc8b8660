"""Scores a checkpoint on held-out questions: all rows of every benchmark, each question's trajectory saved.

    python eval.py --ckpt DIR [--config configs/x.yaml] [--benchmarks nq,hotpotqa] [--out DIR]
    [section.key=value ...]

Without --config the options are those of the run that the checkpoint lies in, RUN/config.yaml.

OUT (default: DIR/eval) receives <benchmark>.jsonl, one record a question, written every `eval.batch_size`
questions, and results.json. The same command again goes on where a killed one stopped. Also runs under
`accelerate launch`. Exit codes: 0 done; 2 a mistake in what was asked for; 3 the search failed, 7 OUT cannot
be written (what was done is kept).
"""

import argparse
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from tqdm import tqdm

from lld import files as files_module
from lld import protocol, rules
from lld import settings as settings_module
from lld.config import Config
from lld.data import load_benchmark
from lld.engine.engine import Engine
from lld.episode import Question
from lld.evaluate import (
    bootstrap_means,
    evaluate_questions,
    options_of,
    paper_averages,
    percentile_interval,
    summarize,
)
from lld.files import replace_file
from lld.model import load
from lld.record import runs
from lld.retrieval.client import check_health, make_search
from lld.rollout import check_prompts
from lld.running import checkpoint
from lld.tools import RetrieverError

ROOT = Path(__file__).resolve().parent
CHECKPOINT_FILES = (
    "*.safetensors",
    "pytorch_model*.bin",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
)
SCORES = ("em", "f1", "cover_em")
# Of a record, and what else it must hold
NUMBERS = (*SCORES, "num_searches", "num_turns", "num_valid_actions", "truncated")
RECORD = ("id", "question", "golden_answers", "answer", "gold_in_results")
REASK = "delete the line, and its question is asked again"
COLUMNS = {
    "searches": "searches",
    "valid_action_rate": "valid",
    "truncation_rate": "truncated",
    "gold_in_results": "gold found",
}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def file_sha256(path: Path) -> str:
    return files_module.fingerprint(path)["sha256"]


def checkpoint_files(folder: Path) -> list[Path]:
    """Every file of a checkpoint that can change an answer; raises ValueError where there is no
    checkpoint."""
    load.check_folder(str(folder), "--ckpt", hub=False)
    if (folder / "manifest.json").is_file():
        checkpoint.check(folder)
    paths = {path for pattern in CHECKPOINT_FILES for path in folder.glob(pattern) if path.is_file()}
    if not any(path.suffix in (".safetensors", ".bin") for path in paths):
        raise ValueError(f"--ckpt {folder}: no weights (*.safetensors) in it; copy the whole checkpoint")
    return sorted(paths)


def code_sha256() -> str:
    """One checksum over the names and contents of eval.py and all of lld/."""
    paths = [ROOT / "eval.py", *sorted((ROOT / "lld").rglob("*.py"))]
    return sha256(b"".join(f"{path.name}\0{file_sha256(path)}\n".encode() for path in paths))


def git_commit() -> str | None:
    """The commit of this code, with "+changes" where files differ from it; None outside a git checkout."""
    try:
        git = lambda *words: subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
        ).stdout.strip()
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def evaluation_settings(cfg: Config, names: list[str], checkpoint: dict[str, str]) -> dict:
    """What a figure depends on. Not `retriever.url`: the same server may come back on another node."""
    tree = settings_module.to_dict(cfg)
    pick = lambda section, *options: {option: tree[section][option] for option in options}
    return {
        "checkpoint": checkpoint,
        "run": pick("run", "seed"),
        "model": pick("model", "mixed_precision"),
        "rollout": pick("rollout", "max_new_tokens", "max_observation_tokens", "max_episode_tokens"),
        "retriever": pick(
            "retriever",
            "index",
            "corpus",
            "encoder",
            "backend",
            "dtype",
            "faiss_params",
            "rerank",
            "oracle_questions",
            "topk",
        ),
        "eval": pick("eval", "max_turns", "temperature", "top_p"),
        "benchmarks": {name: cfg.eval.benchmarks[name] for name in names},
    }


def claim_folder(out: Path, settings: dict) -> list[str]:
    """Writes OUT/settings.json, or raises ValueError where the folder holds an evaluation with other
    settings.

    Returns the checksum of every version of the code that has worked on the folder: a resumed evaluation may
    outlive a mended typo, but its figures must say so.
    """
    path = out / "settings.json"
    out.mkdir(parents=True, exist_ok=True)
    links = [found for found in [out, *out.iterdir()] if found.is_symlink()]
    if links:  # they may be somebody else's, and lead to a file that is none of this
        raise ValueError(f"{links[0]} is a link: delete it, or choose another --out")
    code = [code_sha256()]
    if path.exists():
        earlier = read_settings(path)
        code = list(dict.fromkeys(earlier["code_sha256"] + code))
        for section, values in settings.items():
            for name in values.keys() | earlier[section].keys():
                old, new = earlier[section].get(name), values.get(name)
                # Another benchmark may join
                if old != new and not (section == "benchmarks" and None in (old, new)):
                    raise ValueError(
                        f"{out} holds an evaluation with {section} {name} = {str(old)[:80]!r}, now it is "
                        f"{str(new)[:80]!r}: choose another --out, or delete the folder"
                    )
        settings = settings | {
            "benchmarks": earlier["benchmarks"] | settings["benchmarks"],
            "index": earlier.get("index"),
        }
    elif any(out.glob("*.jsonl")):
        raise ValueError(
            f"{out} holds .jsonl files but no settings.json, so what they are of is unknown: choose "
            "another --out"
        )
    replace_file(path, json.dumps(settings | {"code_sha256": code}, indent=1) + "\n")
    return code


def read_settings(path: Path) -> dict:
    """OUT/settings.json, whose sections and checksums are all there; ValueError where it is damaged."""
    remedy = "choose another --out, or delete the folder"
    settings = runs.parse_json(path.read_bytes(), str(path), remedy)
    sections = ("checkpoint", "run", "model", "rollout", "retriever", "eval", "benchmarks")
    missing = [name for name in sections if not isinstance(settings.get(name), dict)] + ["code_sha256"] * (
        not isinstance(settings.get("code_sha256"), list)
    )
    if missing:
        raise ValueError(f"{path} is damaged (no {missing[0]} in it): {remedy}")
    return settings


def claim_index(out: Path, fingerprint: str | None) -> None:
    """Notes in OUT/settings.json which index answers, or raises ValueError where another one has; None is not
    known, and may be any."""
    settings = read_settings(out / "settings.json")
    if None not in (fingerprint, settings.get("index")) and fingerprint != settings["index"]:
        raise ValueError(
            f"{out} holds answers found with index {settings['index']}, the retriever now has "
            f"{fingerprint}: start it as it was, or choose another --out"
        )
    if fingerprint is not None:
        replace_file(out / "settings.json", json.dumps(settings | {"index": fingerprint}, indent=1) + "\n")


def read_records(path: Path) -> dict[str, dict]:
    """The records of a .jsonl by id; a last line that a kill cut short is removed from the file."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    records = {}
    for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
        record = runs.parse_json(line, f"{path} line {number}", REASK)
        missing = [name for name in RECORD if name not in record] + [
            name for name in NUMBERS if not runs.is_number(record.get(name))
        ]
        if missing or not isinstance(record["id"], str) or not record["num_turns"] > 0:
            raise ValueError(
                f"{path} line {number} is damaged ({', '.join(missing) or 'id or num_turns'} missing or of "
                f"a wrong type): {REASK}"
            )
        records[record["id"]] = record
    return records


def check_records(records: dict[str, dict], questions: list[Question], path: Path) -> None:
    known = {question.id: question for question in questions}
    for id, record in records.items():
        if id not in known:
            raise ValueError(
                f"{path} has question {id}, which the benchmark no longer has: choose another --out"
            )
        question = known[id]
        if (record["question"], record["golden_answers"]) != (question.text, list(question.golden_answers)):
            raise ValueError(
                f"{path}: question {id} was {record['question']!r} with answers "
                f"{record['golden_answers']}, which the benchmark has changed: choose another --out"
            )


def kept_sets(out: Path) -> dict[str, int]:
    """The benchmarks in OUT/results.json and their numbers of questions; none where there is no such file."""
    path, remedy = out / "results.json", "delete the file, it is made again"
    if not path.exists():
        return {}
    benchmarks = runs.parse_json(path.read_bytes(), str(path), remedy).get("benchmarks")
    if not isinstance(benchmarks, dict) or not all(
        isinstance(row, dict) and "num_questions" in row for row in benchmarks.values()
    ):
        raise ValueError(f"{path} is damaged (no benchmarks in it): {remedy}")
    for name in benchmarks:
        rules.check_name(name, str(path))  # it names a file
    return {name: row["num_questions"] for name, row in benchmarks.items()}


def append_records(path: Path, records: list[dict]) -> None:
    try:
        with open(path, "a") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # A full disk's error does not name the file
        raise OSError(error.errno, error.strerror, str(path)) from None


def open_engine(cfg: Config, tokenizer, device: torch.device) -> Engine:
    """The engine with the checkpoint's model, the same as in training: bfloat16 on a GPU where training
    computes in it."""
    half = device.type == "cuda" and cfg.model.mixed_precision == "bf16"
    lm = load.engine_model(load.load_lm(cfg.model), device, half=half, share=True)
    load.check_fit(lm, tokenizer, cfg.rollout.max_episode_tokens)
    return Engine(
        lm,
        tokenizer,
        num_slots=cfg.rollout.num_slots,
        temperature=cfg.eval.temperature,
        top_p=cfg.eval.top_p,
        stop_strings=protocol.STOP_STRINGS,
        eos_ids=load.eos_ids(lm, tokenizer),
        cuda_graphs=cfg.rollout.cuda_graphs,
        max_tokens=cfg.rollout.max_episode_tokens,
    )


def play_missing(
    benchmarks: dict[str, list[Question]], out: Path, cfg: Config, accelerator: Accelerator
) -> None:
    """Asks every question that has no record yet and appends the records, chunk after chunk."""
    done = [None]
    if accelerator.is_main_process:
        done = [{name: list(read_records(out / f"{name}.jsonl")) for name in benchmarks}]
    done = {name: set(ids) for name, ids in broadcast_object_list(done)[0].items()}
    num_done = sum(map(len, done.values()))
    total = sum(map(len, benchmarks.values()))
    if num_done == total:
        return
    tokenizer = load.load_tokenizer(cfg.model)
    for questions in benchmarks.values():
        check_prompts(tokenizer, questions, cfg.rollout.max_prompt_tokens)
    protocol.check_observation_budget(tokenizer, cfg.retriever.topk, cfg.rollout.max_observation_tokens)
    check_health(cfg.retriever)  # before the minutes that a large model takes to load
    search = make_search(cfg.retriever)
    if accelerator.is_main_process:
        claim_index(out, search.fingerprint)
    engine = open_engine(cfg, tokenizer, accelerator.device)
    with tqdm(
        total=total,
        initial=num_done,
        unit="question",
        smoothing=0.02,
        disable=not accelerator.is_main_process,
    ) as bar:
        for name, questions in benchmarks.items():
            bar.set_description(name)
            # Chunks begin at the same questions whatever was done before, so that a resumed run batches like
            # a whole one.
            for start in range(0, len(questions), cfg.eval.batch_size):
                missing = [
                    question
                    for question in questions[start : start + cfg.eval.batch_size]
                    if question.id not in done[name]
                ]
                if not missing:
                    continue
                before = bar.n
                records = evaluate_questions(
                    engine,
                    tokenizer,
                    missing,
                    search,
                    cfg,
                    seed=cfg.run.seed,
                    progress=bar.update,
                    accelerator=accelerator,
                )
                if accelerator.is_main_process:
                    append_records(out / f"{name}.jsonl", records)
                bar.update(before + len(missing) - bar.n)  # what the other processes asked


def score_records(records_by_benchmark: dict[str, list[dict]]) -> dict:
    """{"benchmarks": {name: metrics and 95 % intervals}, "averages": {name: {"em", "em_interval"} or
    None}}."""
    benchmarks, em, resampled = {}, {}, {}
    for name, records in records_by_benchmark.items():
        # Sorted and seeded by name: the figures do not depend on the order of writing nor on the company of
        # other sets.
        records = sorted(records, key=lambda record: record["id"])
        seed = int(sha256(name.encode())[:8], 16)
        means = {score: bootstrap_means([record[score] for record in records], seed=seed) for score in SCORES}
        benchmarks[name] = summarize(records) | {
            f"{score}_interval": percentile_interval(means[score]) for score in SCORES
        }
        em[name], resampled[name] = benchmarks[name]["em"], means["em"]
    spread = paper_averages(resampled)
    averages = {
        name: None if value is None else {"em": value, "em_interval": percentile_interval(spread[name])}
        for name, value in paper_averages(em).items()
    }
    return {"benchmarks": benchmarks, "averages": averages}


def format_table(scores: dict) -> str:
    """The figures as one table, scores in percent."""
    share = lambda value: "–" if value is None else f"{100 * value:.1f}"
    spread = lambda row: (
        "–"
        if row.get("num_questions") == 1
        else f"{share(row['em_interval'][0])}, {share(row['em_interval'][1])}"
    )
    interval = lambda row: f"{share(row['em'])} [{spread(row)}]"
    rows = [["benchmark", "n", "EM [95 %]", "F1", "cover-EM", *COLUMNS.values()]]
    for name, row in scores["benchmarks"].items():
        cells = [
            f"{row[column]:.2f}" if column == "searches" else share(row.get(column)) for column in COLUMNS
        ]
        rows.append(
            [name, str(row["num_questions"]), interval(row), share(row["f1"]), share(row["cover_em"]), *cells]
        )
    for name, row in scores["averages"].items():
        if row is not None:  # all its benchmarks are there
            rows.append([name, "", interval(row)])
    widths = [max(len(row[i]) for row in rows if i < len(row) and len(row) > 3) for i in range(len(rows[0]))]
    align = lambda row: (
        [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
    )
    return "\n".join("  ".join(align(row)) for row in rows)


def evaluate(args: argparse.Namespace) -> None:
    """The whole evaluation; raises ValueError for a mistake of the user and RetrieverError where the search
    fails."""
    files = checkpoint_files(args.ckpt)
    cfg = options_of(args.ckpt, args.config, args.overrides)
    run_dir = args.ckpt.parent.parent if args.ckpt.parent.name == "checkpoints" else args.ckpt
    cfg = dataclasses.replace(
        cfg,
        model=dataclasses.replace(cfg.model, path=str(args.ckpt)),
        run=dataclasses.replace(cfg.run, dir=str(run_dir)),
    )
    names = list(dict.fromkeys(args.benchmarks.split(","))) if args.benchmarks else list(cfg.eval.benchmarks)
    benchmarks = {name: load_benchmark(cfg, name) for name in names}
    out = args.out or args.ckpt / "eval"
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    if accelerator.is_main_process:
        checkpoint = {path.name: file_sha256(path) for path in files}
        code = claim_folder(out, evaluation_settings(cfg, names, checkpoint))
        kept_sets(out)  # before work starts
        for name, questions in benchmarks.items():
            check_records(read_records(out / f"{name}.jsonl"), questions, out / f"{name}.jsonl")
    play_missing(benchmarks, out, cfg, accelerator)
    if not accelerator.is_main_process:
        return
    path = out / "results.json"
    records = {name: list(read_records(out / f"{name}.jsonl").values()) for name in names}
    for name, num_questions in kept_sets(out).items():
        if name not in records and len(kept := read_records(out / f"{name}.jsonl")) == num_questions:
            records[name] = list(kept.values())  # a set of an earlier call stays in the table
    scores = score_records(records)
    tree = settings_module.to_dict(cfg)
    provenance = {
        "checkpoint": {"path": str(args.ckpt), "sha256": checkpoint},
        "config": tree,
        "config_sha256": sha256(json.dumps(tree, sort_keys=True).encode()),
        "code_sha256": code,
        "index": read_settings(out / "settings.json").get("index"),
        "git_commit": git_commit(),
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "device": torch.cuda.get_device_name() if accelerator.device.type == "cuda" else "cpu",
        "num_processes": accelerator.num_processes,
    }
    replace_file(path, json.dumps(scores | provenance, indent=1) + "\n")
    print(format_table(scores))
    print(f"\nwritten to {path}")


def main(argv: list[str] | None = None) -> int:
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
    try:
        settings_module.refuse_dashes(sys.argv[1:] if argv is None else argv)
        args = parser.parse_intermixed_args(argv)
        evaluate(args)
    except RetrieverError as error:
        print(
            runs.printable(
                f"eval.py: the search failed: {error} (answers so far are kept; the same command goes on "
                "from there)"
            ),
            file=sys.stderr,
        )
        return 3
    except ValueError as error:
        print(runs.printable(f"eval.py: {error}"), file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in files_module.DISK_ERRORS:
            raise
        print(
            runs.printable(
                f"eval.py: {error.filename or args.out or args.ckpt / 'eval'} cannot be written: "
                f"{error.strerror}; make room or choose another --out, then the same command goes on with "
                "the answers kept so far"
            ),
            file=sys.stderr,
        )
        return 7
    return 0


if __name__ == "__main__":
    sys.exit(main())
