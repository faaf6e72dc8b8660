"""One evaluation: plays the questions that have no record yet, then scores all records."""

import json
import sys
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from tqdm import tqdm

from lld import protocol, rollout, settings
from lld.config import Config
from lld.data import load_benchmark
from lld.engine.engine import Engine
from lld.engine.fit import check_fit
from lld.episode import Question
from lld.evaluate import evaluate_questions
from lld.evaluation import folder
from lld.evaluation.scores import format_table, score_records
from lld.files import append_jsonl, fingerprint, replace_file
from lld.model import load
from lld.retrieval.client import check_health, make_search
from lld.running.provenance import base_fingerprint, git_commit


def evaluate(ckpt: Path, cfg: Config, names: list[str], out: Path) -> None:
    """Evaluates `ckpt`, which `cfg.model.path` also names, on the benchmarks `names`; writes to `out`.

    Raises ValueError for a mistake of the user and RetrieverError where the search fails.
    """
    files = folder.checkpoint_files(ckpt)
    benchmarks = {name: load_benchmark(cfg, name) for name in names}
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    checksums, code = {}, []
    if accelerator.is_main_process:
        checksums = {path.name: fingerprint(path)["sha256"] for path in files}
        code = folder.claim(out, folder.settings_of(cfg, names, checksums))
        folder.kept_sets(out)  # a damaged results.json is refused before work starts
        for name, questions in benchmarks.items():
            path = record_file(out, name)
            folder.check_records(folder.read_records(path), questions, path)
    play_missing(benchmarks, out, cfg, accelerator)
    if accelerator.is_main_process:
        scores = score_records(read_all_records(out, names))
        about = provenance(ckpt, cfg, out, checksums, code, accelerator)
        replace_file(out / "results.json", json.dumps(scores | about, indent=1) + "\n")
        print(format_table(scores))
        print(f"\nwritten to {out / 'results.json'}")


def record_file(out: Path, name: str) -> Path:
    return out / f"{name}.jsonl"


def play_missing(
    benchmarks: dict[str, list[Question]], out: Path, cfg: Config, accelerator: Accelerator
) -> None:
    """Plays every question that has no record yet and appends the records, chunk by chunk."""
    done = {}
    if accelerator.is_main_process:
        done = {name: set(folder.read_records(record_file(out, name))) for name in benchmarks}
    done = broadcast_object_list([done])[0]
    num_done, num_all = sum(map(len, done.values())), sum(map(len, benchmarks.values()))
    if num_done == num_all:
        return
    tokenizer = load.load_tokenizer(cfg.model)
    for questions in benchmarks.values():
        rollout.check_prompts(tokenizer, questions, cfg.rollout.max_prompt_tokens)
    protocol.check_observation_budget(tokenizer, cfg.retriever.topk, cfg.rollout.max_observation_tokens)
    check_health(cfg.retriever)  # before loading, which takes minutes for a large model
    search = make_search(cfg.retriever)
    if accelerator.is_main_process:
        folder.claim_found(out, "index", search.fingerprint)
    engine = open_engine(cfg, tokenizer, accelerator.device)
    if accelerator.is_main_process:
        folder.claim_found(out, "base", base_fingerprint(cfg.model.path))
    size = cfg.eval.batch_size * accelerator.num_processes
    with progress_bar(num_all, num_done, accelerator) as bar:
        for name, missing in missing_chunks(benchmarks, done, size):
            bar.set_description(name)
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
                append_jsonl(record_file(out, name), records)
            bar.update(before + len(missing) - bar.n)  # those played by other processes


def missing_chunks(benchmarks: dict[str, list[Question]], done: dict[str, set[str]], batch_size: int):
    """Yields (benchmark, its next questions without a record).

    Chunk boundaries do not depend on what was done before, so that an evaluation resumed on as many processes
    batches its questions as an uninterrupted one does.
    """
    for name, questions in benchmarks.items():
        for start in range(0, len(questions), batch_size):
            chunk = questions[start : start + batch_size]
            missing = [question for question in chunk if question.id not in done[name]]
            if missing:
                yield name, missing


def progress_bar(num_all: int, num_done: int, accelerator: Accelerator) -> tqdm:
    hidden = not accelerator.is_main_process
    return tqdm(total=num_all, initial=num_done, unit="question", smoothing=0.02, disable=hidden)


def open_engine(cfg: Config, tokenizer, device: torch.device) -> Engine:
    """The engine with the checkpoint's model, in bfloat16 on a GPU if training computes in bfloat16."""
    bf16 = device.type == "cuda" and cfg.model.mixed_precision == "bf16"
    lm = load.engine_model(load.load_lm(cfg.model), device, bf16=bf16, share=True)
    check_fit(lm, tokenizer, cfg.rollout.max_episode_tokens)
    return rollout.open_engine(lm, tokenizer, cfg.rollout, cfg.eval)


def read_all_records(out: Path, names: list[str]) -> dict[str, list[dict]]:
    """The records of the benchmarks `names`, and of those that an earlier call finished in this folder."""
    records = {name: list(folder.read_records(record_file(out, name)).values()) for name in names}
    for name, num_questions in folder.kept_sets(out).items():
        if name not in records:
            kept = list(folder.read_records(record_file(out, name)).values())
            if len(kept) == num_questions:
                records[name] = kept
    return records


def provenance(
    ckpt: Path, cfg: Config, out: Path, checksums: dict[str, str], code: list[str], accelerator: Accelerator
) -> dict:
    """The origin of the figures, for results.json: checkpoint, options, code, index, machine."""
    tree = settings.to_dict(cfg)
    return {
        "checkpoint": {"path": str(ckpt), "sha256": checksums},
        "config": tree,
        "config_sha256": folder.sha256(json.dumps(tree, sort_keys=True)),
        "code_sha256": code,
        **{name: folder.read_settings(out / "settings.json").get(name) for name in folder.FOUND},
        "git_commit": git_commit(),
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "device": torch.cuda.get_device_name() if accelerator.device.type == "cuda" else "cpu",
        "num_processes": accelerator.num_processes,
    }
