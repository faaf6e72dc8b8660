"""The folder of an evaluation: settings.json, <benchmark>.jsonl, results.json; read, checked and written."""

import hashlib
import json
import os
from pathlib import Path

from lld import rules, settings
from lld.config import Config
from lld.episode import Question
from lld.files import replace_file
from lld.model.folder import check_folder
from lld.record import runs
from lld.running import checkpoint, provenance

# Files of a checkpoint that can change an answer
CHECKPOINT_FILES = (
    "*.safetensors*",  # weights, and the index of sharded ones
    "pytorch_model*.bin*",
    "*.py",  # of model.trust_remote_code
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "tokenizer*",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)
# Options that change a figure. retriever.url is not one: the same server may restart on another node.
OPTIONS = (
    "run.seed",
    "model.mixed_precision",
    "rollout.max_new_tokens",
    "rollout.max_observation_tokens",
    "rollout.max_episode_tokens",
    "retriever.index",
    "retriever.corpus",
    "retriever.encoder",
    "retriever.backend",
    "retriever.dtype",
    "retriever.faiss_params",
    "retriever.rerank",
    "retriever.oracle_questions",
    "retriever.topk",
    "retriever.fail_share",
    "retriever.replay",
    "eval.max_turns",
    "eval.temperature",
    "eval.top_p",
)
# Fingerprints that are known only once index and model are open
FOUND = {"index": "the retriever's index", "base": "the base model of the adapters"}
SECTIONS = ("checkpoint", "run", "model", "rollout", "retriever", "eval", "benchmarks")
SCORES = ("em", "f1", "cover_em")
# Fields of a record: those that are numbers, and the other required ones
NUMBERS = (*SCORES, "num_searches", "num_turns", "num_valid_actions", "truncated")
RECORD = ("id", "question", "golden_answers", "answer", "gold_in_results")

ANOTHER = "choose another --out, or delete the folder"
REASK = "delete the line, and its question is asked again"


def checkpoint_files(folder: Path) -> list[Path]:
    """Every file of a checkpoint that can change an answer.

    Raises ValueError if there is no checkpoint, or its manifest does not match its files.
    """
    check_folder(str(folder), "--ckpt", hub=False)
    if (folder / "manifest.json").is_file():
        checkpoint.check(folder)
    paths = {path for pattern in CHECKPOINT_FILES for path in folder.glob(pattern) if path.is_file()}
    if not any(path.suffix in (".safetensors", ".bin") for path in paths):
        raise ValueError(f"--ckpt {folder}: no weights (*.safetensors) in it; copy the whole checkpoint")
    return sorted(paths)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def settings_of(cfg: Config, names: list[str], checkpoint: dict[str, str]) -> dict[str, dict]:
    """What a figure depends on: checksums of the checkpoint's files, options, and the benchmarks `names`."""
    tree, chosen = settings.to_dict(cfg), {"checkpoint": checkpoint}
    for name in OPTIONS:
        section, _, option = name.partition(".")
        chosen.setdefault(section, {})[option] = tree[section][option]
    chosen["benchmarks"] = {name: cfg.eval.benchmarks[name] for name in names}
    return chosen


def claim(out: Path, wanted: dict[str, dict]) -> list[str]:
    """Writes OUT/settings.json; raises ValueError where the folder holds an evaluation with other settings.

    Returns the checksum of every version of the code that has worked on the folder: an evaluation may be
    resumed after a correction of the code, but its figures must say so.
    """
    path = out / "settings.json"
    out.mkdir(parents=True, exist_ok=True)
    # A link may belong to somebody else and lead to a file outside the folder.
    links = [found for found in [out, *out.iterdir()] if found.is_symlink()]
    if links:
        raise ValueError(f"{links[0]} is a link: delete it, or choose another --out")
    code = [provenance.code_sha256("eval.py")]
    if path.exists():
        earlier = read_settings(path)
        _refuse_other_settings(out, earlier, wanted)
        code = list(dict.fromkeys(earlier["code_sha256"] + code))
        benchmarks = earlier["benchmarks"] | wanted["benchmarks"]
        wanted = wanted | {"benchmarks": benchmarks} | {name: earlier.get(name) for name in FOUND}
    elif any(out.glob("*.jsonl")):
        raise ValueError(
            f"{out} holds .jsonl files but no settings.json, so what they are of is unknown: "
            "choose another --out"
        )
    _write_settings(path, wanted | {"code_sha256": code})
    return code


def _refuse_other_settings(out: Path, earlier: dict, wanted: dict) -> None:
    for section, values in wanted.items():
        for name in values.keys() | earlier[section].keys():
            old, new = earlier[section].get(name), values.get(name)
            joins = section == "benchmarks" and None in (old, new)  # another benchmark may be added
            if old != new and not joins:
                raise ValueError(
                    f"{out} holds an evaluation with {section} {name} = {str(old)[:80]!r}, "
                    f"now it is {str(new)[:80]!r}: {ANOTHER}"
                )


def _write_settings(path: Path, tree: dict) -> None:
    replace_file(path, json.dumps(tree, indent=1) + "\n")


def read_settings(path: Path) -> dict:
    """OUT/settings.json with all its sections and checksums; ValueError if it is damaged."""
    tree = runs.parse_json(path.read_bytes(), str(path), ANOTHER)
    missing = [name for name in SECTIONS if not isinstance(tree.get(name), dict)]
    if not isinstance(tree.get("code_sha256"), list):
        missing.append("code_sha256")
    if missing:
        raise ValueError(f"{path} is damaged (no {missing[0]} in it): {ANOTHER}")
    return tree


def claim_found(out: Path, name: str, fingerprint: str | None) -> None:
    """Writes a fingerprint of `FOUND` into OUT/settings.json; ValueError where another one is there.

    None stands for an unknown one, which agrees with any.
    """
    if fingerprint is None:
        return
    earlier = read_settings(out / "settings.json")
    if earlier.get(name) not in (None, fingerprint):
        raise ValueError(
            f"{out} holds answers found with {FOUND[name]} {earlier[name]}, now it is {fingerprint}: "
            "bring back the earlier one, or choose another --out"
        )
    _write_settings(out / "settings.json", earlier | {name: fingerprint})


def read_records(path: Path) -> dict[str, dict]:
    """The records of a .jsonl by id.

    An incomplete last line, left by a killed process, is removed from the file.
    """
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    records = {}
    for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
        record = runs.parse_json(line, f"{path} line {number}", REASK)
        missing = [name for name in RECORD if name not in record]
        missing += [name for name in NUMBERS if not runs.is_number(record.get(name))]
        if missing or not isinstance(record["id"], str) or not record["num_turns"] > 0:
            raise ValueError(
                f"{path} line {number} is damaged ({', '.join(missing) or 'id or num_turns'} missing or of "
                f"a wrong type): {REASK}"
            )
        records[record["id"]] = record
    return records


def check_records(records: dict[str, dict], questions: list[Question], path: Path) -> None:
    """Raises ValueError for a record whose question the benchmark lacks or has with other contents."""
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
    """The benchmarks in OUT/results.json and their numbers of questions; empty without such a file."""
    path, remedy = out / "results.json", "delete the file, it is made again"
    if not path.exists():
        return {}
    benchmarks = runs.parse_json(path.read_bytes(), str(path), remedy).get("benchmarks")
    rows = benchmarks.values() if isinstance(benchmarks, dict) else [None]
    if not all(isinstance(row, dict) and "num_questions" in row for row in rows):
        raise ValueError(f"{path} is damaged (no benchmarks in it): {remedy}")
    for name in benchmarks:
        rules.check_name(name, str(path))  # it names a file
    return {name: row["num_questions"] for name, row in benchmarks.items()}
