"""Trains a search agent: `accelerate launch train.py --config configs/tiny.yaml [--resume] [section.option=value …]`."""

import argparse
import copy
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

# On shared cores OpenMP threads that spin while they wait made a step 20 times slower; must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
import yaml
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from lld import checkpoint, config, metrics, monitor, protocol, tinyworld
from lld.advantages import group_advantages
from lld.data import Question, load_questions, questions_of_step
from lld.engine import Engine
from lld.episode import Episode, collate
from lld.evaluate import evaluate_questions, load_benchmark, summarize
from lld.loss import answer_beta
from lld.policy import Policy, check_fit, eos_ids, load_lm, load_tokenizer
from lld.report import plot_run
from lld.reward import score_episodes
from lld.rollout import check_prompts, rollout
from lld.tools import RetrieverError, check_health, make_search
from lld.update import learning_rate, update_policy

RESUMABLE = ("run.dir", "run.steps", "run.save_every", "run.keep_checkpoints", "run.trackers", "optim.micro_batch_size", "rollout.num_slots", "retriever.url", "retriever.timeout_s", "retriever.retries")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--resume", action="store_true", help="continue the run in run.dir from its newest checkpoint")
    parser.add_argument("overrides", nargs="*", metavar="section.option=value")
    args = parser.parse_args(argv)
    try:
        return train(config.load(args.config, args.overrides), args.resume)
    except ValueError as error:  # the user's; everything else is ours and keeps its traceback
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except RetrieverError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 3


class Timed:
    """A search function that knows how long it has run."""

    def __init__(self, search):
        self.search, self.seconds = search, 0.0

    def __call__(self, queries: list[str]):
        start = time.perf_counter()
        try:
            return self.search(queries)
        finally:
            self.seconds += time.perf_counter() - start

    def reset(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Clock:
    """Seconds of the phases of one step."""

    def __init__(self):
        self.start = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self.last = now - self.last, now

    def row(self, search_s: float, episodes: list[Episode], num_processes: int, trained_tokens: int) -> dict[str, float]:
        sampled = sum(episode.num_model_tokens for episode in episodes)
        return {
            **{f"time/{name}_s": seconds for name, seconds in self.laps.items()},
            "time/search_s": search_s,
            "time/step_s": self.last - self.start,
            "speed/sampled_tokens_per_s": sampled / num_processes / self.laps["rollout"],
            "speed/trained_tokens_per_s": trained_tokens / self.laps["update"],
        }


def train(cfg: config.Config, resume: bool) -> int:
    """Runs until `run.steps` rollout steps are done; returns the process's exit code (3: the retriever is gone)."""
    parts, first_step = build(cfg, resume)
    accelerator, run_dir, tokenizer = parts.accelerator, Path(cfg.run.dir), parts.tokenizer
    row = evaluate(parts, cfg, 0) if cfg.eval.at_start and first_step == 0 else {}
    steps = tqdm(range(first_step, cfg.run.steps), desc="training", initial=first_step, total=cfg.run.steps, disable=not accelerator.is_main_process)
    for step in steps:
        clock = Clock()
        questions = questions_of_step(parts.questions, step, cfg.rollout.num_questions, cfg.run.seed)
        episodes, failure = play(parts, cfg, questions, step)
        if failure:
            return stop(parts, cfg, step, failure)
        clock.lap("rollout")
        keep_snapshot(parts, cfg.loss.lld_lag_steps)

        rewards_PG = torch.tensor(score_episodes(episodes, tokenizer, cfg.reward)).view(len(questions), cfg.rollout.group_size)
        advantages_PG = group_advantages(rewards_PG, normalize_std=cfg.advantage.normalize_std)
        batch = collate(episodes, advantages_PG, tokenizer.pad_token_id)
        row |= {"step": step} | metrics.describe_episodes(episodes, rewards_PG)
        row |= {"lld_beta": answer_beta(row["searches"], cfg.loss), "lr": learning_rate(step, cfg.optim)}
        for group in parts.optimizer.param_groups:
            group["lr"] = row["lr"]
        update_rows, scores = update_policy(
            accelerator, parts.policy, parts.reference, parts.optimizer, batch, cfg, beta=row["lld_beta"], anchor=parts.anchor, rescore=due(step, cfg.monitor.rescore_every)
        )
        clock.lap("update")
        row |= metrics.summarize_updates(update_rows) | monitor.describe(batch, scores, episodes, cfg)
        update_rows = [{"step": step, "update": u} | update_row | monitor.describe_update(batch, scores, u, cfg) for u, update_row in enumerate(update_rows)]
        clock.lap("monitor")

        last = step + 1 == cfg.run.steps
        if cfg.eval.every and ((step + 1) % cfg.eval.every == 0 or last):
            try:
                row |= evaluate(parts, cfg, step + 1)
            except RetrieverError as error:
                failure = str(error)
        clock.lap("eval")
        if accelerator.is_main_process:
            timings = clock.row(parts.search.reset(), episodes, accelerator.num_processes, int(batch.lengths_B.sum()))
            metrics.append_rows(run_dir / "updates.jsonl", update_rows)
            metrics.append_rows(run_dir / "metrics.jsonl", [row])
            metrics.append_rows(run_dir / "timings.jsonl", [{"step": step} | timings])
            accelerator.log(row | timings, step=step)
            steps.set_postfix(reward=f"{row['reward/mean']:.3f}", entropy=f"{row['entropy']:.3f}", searches=f"{row['searches']:.2f}")
        row = {}
        if failure:
            return stop(parts, cfg, step + 1, failure)
        if (step + 1) % cfg.run.save_every == 0 or last:
            save(parts, cfg, step + 1)
    accelerator.end_training()
    if accelerator.is_main_process:
        plot_run([run_dir], run_dir / "figure.png")
        print(f"{run_dir}: metrics.jsonl, figure.png and checkpoints/ hold the run")
    return 0


@dataclass
class Parts:
    """What a run works with. `lm` is the model inside `policy`; `snapshots` are its weights at the start of the last
    lld_lag_steps + 1 steps, oldest first."""

    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    questions: list[Question]
    held_out: dict[str, list[Question]]
    search: Timed
    policy: torch.nn.Module
    lm: torch.nn.Module
    reference: torch.nn.Module | None
    anchor: torch.nn.Module | None
    optimizer: torch.optim.Optimizer
    snapshots: list[dict]


def build(cfg: config.Config, resume: bool) -> tuple[Parts, int]:
    """Opens and checks everything before any work starts; returns it with the step to start from."""
    check_launch()
    run_dir, on_gpu = Path(cfg.run.dir), torch.cuda.is_available()
    mixed_precision = cfg.model.mixed_precision if on_gpu else "no"
    accelerator = Accelerator(mixed_precision=mixed_precision, log_with=list(cfg.run.trackers) or None, project_dir=run_dir, cpu=not on_gpu)
    torch.use_deterministic_algorithms(cfg.run.deterministic, warn_only=True)
    set_seed(cfg.run.seed)  # episodes and data order have their own generators; this is for anything a model may draw
    check_run_dir(run_dir, cfg, resume)
    if cfg.tinyworld.dir is not None:
        with accelerator.main_process_first():
            tinyworld.prepare(cfg.tinyworld, cfg.rollout, cfg.retriever.topk)
    resumed = checkpoint.latest(run_dir) if resume else None
    if resumed is not None:
        checkpoint.check(resumed)

    tokenizer = load_tokenizer(cfg.model)
    questions = load_questions(cfg.data.train, split=cfg.data.train_split, sources=cfg.data.train_sources)
    held_out = {name: load_benchmark(cfg, name)[: cfg.eval.max_questions] for name in cfg.eval.during_training} if cfg.eval.every else {}
    for some in (questions, *held_out.values()):
        check_prompts(tokenizer, some, cfg.rollout.max_prompt_tokens)
    protocol.check_observation_budget(tokenizer, cfg.retriever.topk, cfg.rollout.max_observation_tokens)
    if cfg.retriever.url is not None:
        check_health(cfg.retriever.url, cfg.retriever.timeout_s)
    search = Timed(make_search(cfg.retriever))

    lm = load_lm(cfg.model if resumed is None else dataclasses.replace(cfg.model, path=str(resumed)))
    check_fit(lm, tokenizer, cfg.rollout.max_episode_tokens)
    if cfg.model.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    frozen = lambda model: accelerator.prepare_model(Policy(model).requires_grad_(False), evaluation_mode=True)
    reference = frozen(load_lm(cfg.model)) if cfg.loss.kl_weight > 0 else None
    anchor = frozen(copy.deepcopy(lm)) if cfg.loss.lld_lag_steps else None
    policy = Policy(lm)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, betas=cfg.optim.betas, weight_decay=cfg.optim.weight_decay)
    first_step, snapshots = 0, []
    if resumed is not None:
        state = checkpoint.load_trainer_state(resumed, expected_shapes(cfg.model))
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        first_step, snapshots = state["num_steps"], state["snapshots"]
    policy, optimizer = accelerator.prepare(policy, optimizer)
    if accelerator.is_main_process:
        begin_run(run_dir, cfg, first_step)
    if cfg.run.trackers:
        accelerator.init_trackers("lld", config={f"{s}.{k}": str(v) for s, options in config.to_dict(cfg).items() for k, v in options.items()})
    lm = accelerator.unwrap_model(policy).lm
    return Parts(accelerator, tokenizer, questions, held_out, search, policy, lm, reference, anchor, optimizer, snapshots), first_step


def new_engine(parts: Parts, cfg: config.Config, sampling: config.Rollout | config.Eval) -> Engine:
    """An engine on the policy's own weights with the temperature and top_p of training or of evaluation."""
    parts.lm.eval()
    return Engine(
        parts.lm, parts.tokenizer, num_slots=cfg.rollout.num_slots, temperature=sampling.temperature, top_p=sampling.top_p,
        stop_strings=protocol.STOP_STRINGS, eos_ids=eos_ids(parts.lm, parts.tokenizer),
    )  # fmt: skip


def play(parts: Parts, cfg: config.Config, questions: list[Question], step: int) -> tuple[list[Episode], str | None]:
    """All episodes of a step, in the order of `questions`, on every process; or why a search failed, on any of them.

    Each process plays whole groups of every num_processes-th question.
    """
    accelerator, options = parts.accelerator, cfg.rollout
    mine = list(enumerate(questions))[accelerator.process_index :: accelerator.num_processes]
    ids = [question.id for question in questions]
    repeats = [ids[:index].count(ids[index]) for index, _ in mine]
    played, failure = [], None
    try:
        with accelerator.autocast(), progress_bar(parts, len(mine) * options.group_size, "rollout") as progress:
            played = rollout(
                new_engine(parts, cfg, options), parts.tokenizer, [question for _, question in mine], parts.search, num_samples=options.group_size, seed=cfg.run.seed, step=step, repeats=repeats,
                max_turns=options.max_turns, max_new_tokens=options.max_new_tokens, max_observation_tokens=options.max_observation_tokens,
                max_episode_tokens=options.max_episode_tokens, overlap_search=options.overlap_search, progress=progress.update,
            )  # fmt: skip
    except RetrieverError as error:
        failure = str(error)
    failures = [text for text in gather_object([failure]) if text]
    if failures:
        return [], failures[0]
    groups = [(index, played[i * options.group_size : (i + 1) * options.group_size]) for i, (index, _) in enumerate(mine)]
    groups = sorted(gather_object(groups), key=lambda group: group[0])
    return [episode for _, group in groups for episode in group], None


def evaluate(parts: Parts, cfg: config.Config, num_steps: int) -> dict[str, float]:
    """Metrics on the held-out questions after `num_steps` steps; the trajectories go to eval/<benchmark>/ of the run's folder."""
    row = {}
    for name, questions in parts.held_out.items():
        with parts.accelerator.autocast(), progress_bar(parts, len(questions), f"evaluating {name}") as progress:
            engine = new_engine(parts, cfg, cfg.eval)
            records = evaluate_questions(engine, parts.tokenizer, questions, parts.search, cfg, seed=cfg.run.seed, progress=progress.update, accelerator=parts.accelerator)
        row |= {f"eval/{name}/{key}": value for key, value in summarize(records).items()}
        if parts.accelerator.is_main_process:
            path = Path(cfg.run.dir) / "eval" / name / f"step_{num_steps:06d}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return row


def save(parts: Parts, cfg: config.Config, num_steps: int) -> Path:
    """The checkpoint after `num_steps` steps, unless it is there already."""
    folder = checkpoint.folder_of(cfg.run.dir, num_steps)
    if parts.accelerator.is_main_process and not (folder / "manifest.json").exists():
        shapes = {name: list(tensor.shape) for name, tensor in parts.lm.state_dict().items()}
        state = {"optimizer": parts.optimizer.state_dict(), "rng": torch.get_rng_state(), "snapshots": parts.snapshots, "shapes": shapes}
        checkpoint.save(cfg.run.dir, num_steps, parts.lm, parts.tokenizer, state, cfg.run.keep_checkpoints)
    parts.accelerator.wait_for_everyone()
    return folder


def stop(parts: Parts, cfg: config.Config, num_steps: int, failure: str) -> int:
    """Saves the checkpoint after `num_steps` steps, says why the run ends, and returns its exit code."""
    folder = save(parts, cfg, num_steps)
    parts.accelerator.print(f"train.py: {failure}\nNothing was trained on the failed search. Saved {folder}; continue with --resume.", file=sys.stderr)
    return 3


def keep_snapshot(parts: Parts, lag: int) -> None:
    """Remembers this step's weights where LLDS compares with an older policy, and loads the oldest into the anchor."""
    if lag:
        weights = {name: tensor.cpu().clone() for name, tensor in parts.lm.state_dict().items()}
        parts.snapshots = (parts.snapshots + [weights])[-lag - 1 :]
        parts.accelerator.unwrap_model(parts.anchor).lm.load_state_dict(parts.snapshots[0])


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def progress_bar(parts: Parts, total: int, what: str) -> tqdm:
    return tqdm(total=total, desc=what, leave=False, disable=not parts.accelerator.is_main_process)


def expected_shapes(options: config.Model) -> dict[str, torch.Tensor]:
    """The tensors that a model of `options.path` would have, without their memory."""
    with torch.device("meta"):
        model_config = AutoConfig.from_pretrained(options.path, trust_remote_code=options.trust_remote_code)
        return AutoModelForCausalLM.from_config(model_config, trust_remote_code=options.trust_remote_code).state_dict()


def check_launch() -> None:
    """Raises ValueError where accelerate's launcher was asked for several CPU processes and started only this one."""
    if os.environ.get("ACCELERATE_USE_CPU") == "True" and "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ:
        raise ValueError("`accelerate launch --cpu --num_processes N` starts one process only unless MPI is installed; use `torchrun --standalone --nproc_per_node N train.py …`")


def check_run_dir(run_dir: Path, cfg: config.Config, resume: bool) -> None:
    """Raises ValueError where a new run would overwrite an old one, or a resumed one has other options."""
    log = run_dir / "config.yaml"
    if not resume:
        if log.exists():
            raise ValueError(f"run.dir = {run_dir} already holds a run: continue it with --resume, or choose another run.dir, or delete the folder")
        return
    if not log.exists():
        raise ValueError(f"--resume: run.dir = {run_dir} holds no run")
    before, now = yaml.safe_load(log.read_text()), config.to_dict(cfg)
    for section, options in now.items():
        for name, value in options.items():
            if f"{section}.{name}" not in RESUMABLE and before.get(section, {}).get(name) != value:
                raise ValueError(f"--resume: {section}.{name} was {before.get(section, {}).get(name)!r} and is {value!r} now; a resumed run keeps its options (free to change: {', '.join(RESUMABLE)})")


def begin_run(run_dir: Path, cfg: config.Config, first_step: int) -> None:
    """Writes what is run, and drops rows of steps that will be repeated."""
    run_dir.mkdir(parents=True, exist_ok=True)
    config.save(cfg, run_dir / "config.yaml")
    git = shutil.which("git")
    commit = subprocess.run([git, "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip() if git else ""
    about = {"commit": commit, "torch": torch.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0]}
    (run_dir / "run.json").write_text(json.dumps(about, indent=1))
    for name in ("metrics.jsonl", "updates.jsonl", "timings.jsonl"):
        metrics.truncate_rows(run_dir / name, first_step)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
