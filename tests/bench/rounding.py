"""What rounding does to log-probabilities and to LLDS's gates: one rollout of the tiny world in bf16 on the
CPU.

    python tests/bench/rounding.py FOLDER

FOLDER receives the world of configs/tiny.yaml. Prints two tables, which docs/rounding.md shows: sampler and
trainer against each other and against float64, with logits kept in float32 and with logits rounded to bf16;
and the tokens on which gates open after one optimizer step, in bf16 and in truth (float64 on the same
weights).
"""

import copy
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from accelerate import Accelerator

from lld import loss, protocol, settings
from lld.advantages import group_advantages
from lld.data import load_questions
from lld.engine import decoder
from lld.engine.engine import Engine
from lld.episode import Batch, collate
from lld.model import lm_head, load
from lld.model.load import load_lm, load_tokenizer
from lld.policy import Policy
from lld.protocol import eos_ids
from lld.retrieval.client import make_search
from lld.reward import score_episodes
from lld.rollout import Budgets, rollout
from lld.tinyworld.prepare import prepare_world
from lld.update import plan_updates, update_policy

TOLERANCES = (0.0, 0.001, 0.003, 0.01)
CPU = torch.device("cpu")


def play(cfg, tokenizer, lm, bf16: bool) -> Batch:
    """A training step's episodes as a batch, sampled in bf16 where `bf16`."""
    questions = load_questions(cfg.data.train, split="train", sources=())[: cfg.rollout.num_questions]
    options, sampling = cfg.rollout, dict(temperature=1.0, top_p=1.0, stop_strings=protocol.STOP_STRINGS)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        engine = Engine(
            load.engine_model(lm, CPU, bf16=bf16),
            tokenizer,
            num_slots=80,
            eos_ids=eos_ids(lm, tokenizer),
            **sampling,
        )
        episodes = rollout(
            engine,
            tokenizer,
            questions,
            make_search(cfg.retriever),
            Budgets.of(options),
            num_samples=options.group_size,
            seed=0,
            step=0,
        )
    rewards_PG = torch.tensor(score_episodes(episodes, tokenizer, cfg.reward)).view(-1, options.group_size)
    return collate(episodes, group_advantages(rewards_PG), tokenizer.pad_token_id)


@torch.no_grad()
def score(lm, batch: Batch, kind: str) -> torch.Tensor:
    """Log-probabilities (B, T): "float64", "float32", "autocast" of float32 weights, or "bf16 weights"."""
    lm = (
        copy.deepcopy(lm).double()
        if kind == "float64"
        else load.engine_model(lm, CPU, bf16=kind == "bf16 weights")
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=kind in ("autocast", "bf16 weights")):
        return Policy(lm).eval()(batch.token_ids_BT, batch.action_ids_BT > 0)[0].double()


def gaps(cfg, tokenizer, lm) -> None:
    kept_in_float32 = lm_head.float32_logits

    def rounded(hidden_NC, weight_VC):
        return (hidden_NC @ weight_VC.T).float()

    def say(values_N):
        return f"mean {values_N.abs().mean():.1e}, max {values_N.abs().max():.1e}"

    for name, function, kinds in (
        ("bf16, logits rounded", rounded, ("autocast", "bf16 weights")),
        ("bf16", kept_in_float32, ("autocast", "bf16 weights")),
        ("float32", kept_in_float32, ("float32",)),
    ):
        lm_head.float32_logits = decoder.float32_logits = function
        batch = play(cfg, tokenizer, lm, bf16=name != "float32")
        written_BT, exact_BT = batch.action_ids_BT > 0, score(lm, batch, "float64")
        for kind in kinds:
            trainer_BT = score(lm, batch, kind)
            print(
                f"| {name} | {kind} | {say((trainer_BT - batch.sampled_logprobs_BT)[written_BT])} | "
                f"{say((trainer_BT - exact_BT)[written_BT])} |"
            )


def open_tokens(
    batch: Batch, fall_BT: torch.Tensor, true_BT: torch.Tensor, rows: list[int], what: str
) -> None:
    """Percentages of the tokens of the preserved rows: gate open as computed, of these wrongly, and open in
    truth."""
    rows = [row for row in rows if batch.advantages_B[row] >= 0]
    ids_RT = batch.action_ids_BT[rows]
    written_RT = ids_RT > 0

    def percent(open_RT):
        return 100 * float(open_RT.sum()) / int(written_RT.sum())

    error_N = (fall_BT - true_BT)[rows][written_RT].abs()
    for tolerance in TOLERANCES:
        cells = []
        for gate in loss.GATES:
            seen_RT, true_RT = (
                loss.lld_gate(some_BT[rows] - tolerance, ids_RT, gate) for some_BT in (fall_BT, true_BT)
            )
            cells.append(f"{percent(seen_RT):.0f}, {percent(seen_RT & ~true_RT):.0f}, {percent(true_RT):.0f}")
        print(
            f"| {what} | {true_BT[rows][written_RT].abs().mean():.1e} | {error_N.mean():.1e}, "
            f"{error_N.quantile(0.95):.1e} | {tolerance} | {' | '.join(cells)} |"
        )


def gates(cfg, tokenizer, lm) -> None:
    """One AdamW step on the first update's rows; falls of the other updates' rows."""
    batch = play(cfg, tokenizer, lm, bf16=True)
    plan = plan_updates(batch.lengths_B.tolist(), cfg.optim.updates_per_rollout, 1)
    first, others = plan[0][0], [row for shares in plan[1:] for row in shares[0]]
    own_BT = score(lm, batch, "autocast")
    open_tokens(
        batch, torch.zeros_like(own_BT), torch.zeros_like(own_BT), first, "no update, the trainer's own pass"
    )
    open_tokens(
        batch,
        batch.sampled_logprobs_BT - own_BT,
        torch.zeros_like(own_BT),
        first,
        "no update, against the sampler's",
    )
    some = batch.rows(first)
    plain = dataclasses.replace(
        cfg,
        loss=dataclasses.replace(cfg.loss, lld_weight=0.0, kl_weight=0.0),
        optim=dataclasses.replace(cfg.optim, updates_per_rollout=1),
    )
    accelerator = Accelerator(cpu=True)
    accelerator.autocast = lambda: torch.autocast("cpu", torch.bfloat16)
    for rate in (1e-6, 1e-5, 1e-4, 3e-4):
        moved = copy.deepcopy(lm)
        update_policy(
            accelerator,
            Policy(moved),
            None,
            torch.optim.AdamW(moved.parameters(), lr=rate),
            some,
            plain,
            beta=1.0,
        )
        true_BT = score(lm, batch, "float64") - score(moved, batch, "float64")
        open_tokens(
            batch, own_BT - score(moved, batch, "autocast"), true_BT, others, f"one update at {rate:.0e}"
        )


if __name__ == "__main__":
    world = Path(sys.argv[1])
    paths = {
        "tinyworld.dir": world,
        "model.path": world / "policy",
        "data.train": world / "train.jsonl",
        "retriever.corpus": world / "corpus.jsonl",
        "eval.benchmarks.tiny": world / "heldout.jsonl",
    }
    cfg = settings.load(
        str(Path(__file__).parents[2] / "configs" / "tiny.yaml"),
        [f"{name}={path}" for name, path in paths.items()],
    )
    prepare_world(cfg.tinyworld, cfg.rollout, cfg.retriever.topk)
    tokenizer, lm = load_tokenizer(cfg.model), load_lm(cfg.model).eval()
    gaps(cfg, tokenizer, lm)
    gates(cfg, tokenizer, lm)
