"""Processor time of an update with each arm of configs/experiments/stabilisers.yaml, plain GRPO's being 1.

    python tests/bench/preset_speed.py [--sizes tiny,head] [--repeats 5] [--arms kept,nthr]

An update is all that training does with the episodes of a rollout: advantages, the rules that compare all
tokens, the log-probabilities before the update and of the reference, and the four optimizer steps of the
experiment. Every arm gets the same random rows and weights. "tiny" is near the sizes of the experiment's
world; "head" has a vocabulary of 151,936 on a small body, so that the head is nearly all of the work: real
models lie between the two. The policy has no gradient checkpointing. Repeats go round over the arms, so that
a change of the machine's speed meets all of them; the least of an arm counts. One thread.

What a preset costs in the rollout is not in here: with rollout.extra_draws it plays more groups (metric
drawn_groups), and loss.support=kept records ids (tests/bench/kept_speed.py times its head alone).
"""

import argparse
import copy
import math
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from tqdm import tqdm

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
from update_speed import make_lm

from lld.advantages import group_advantages
from lld.episode import ANSWER, SEARCH, THINK, Batch
from lld.experiment.grid import load_experiment
from lld.policy import Policy
from lld.running import optimizers
from lld.selection import choose_tokens
from lld.update import update_policy

EXPERIMENT = ROOT / "configs/experiments/stabilisers.yaml"
# Name: vocabulary, width, layers, rows, tokens of a row, those that the model wrote, ids kept of a token
SIZES = {"tiny": (400, 128, 2, 60, 70, 32, 20), "head": (151_936, 256, 2, 20, 48, 16, 20)}


def arms() -> dict:
    """Arm -> its options, those of its first run in the experiment."""
    found = {}
    for run in load_experiment(EXPERIMENT).runs:
        found.setdefault(run.arm, run.cfg)
    return found


def make_rows(size: tuple, group_size: int) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """Random rows: a prompt and a passage around what the model wrote; their rewards and searches (P, G)."""
    vocabulary, _, _, B, T, written, kept = size
    generator = torch.Generator().manual_seed(0)
    token_ids_BT = torch.randint(2, vocabulary, (B, T), generator=generator)
    action_ids_BT = torch.zeros(B, T, dtype=torch.long)
    parts_BT = torch.zeros(B, T, dtype=torch.long)
    first, half = (T - written) // 2, written // 2
    for action, start in ((1, first), (2, T - (written - half))):
        end = start + (half if action == 1 else written - half)
        action_ids_BT[:, start:end], parts_BT[:, start:end] = action, THINK
        parts_BT[:, end - written // 8 : end] = SEARCH if action == 1 else ANSWER
    mask_BT = action_ids_BT > 0
    # Near what a random model gives: ratios to the sampler are near 1
    noise_BT = 0.05 * torch.randn(B, T, generator=generator)
    kept_ids_NK = torch.randint(2, vocabulary, (int(mask_BT.sum()), kept), generator=generator)
    kept_ids_NK[:, 0] = token_ids_BT[mask_BT]
    batch = Batch(
        token_ids_BT,
        action_ids_BT,
        parts_BT,
        torch.where(mask_BT, noise_BT - math.log(vocabulary), 0.0),
        torch.zeros(B),
        torch.full((B,), T),
        tuple(map(str, range(B))),
        kept_ids_NK.flatten().int(),
        mask_BT.int() * kept,
        torch.rand(B, generator=generator) < 0.95,
    )
    shape = (B // group_size, group_size)
    rewards_PG = (torch.rand(shape, generator=generator) < 0.4).float()
    return batch, rewards_PG, torch.randint(1, 3, shape, generator=generator)


def make_update(cfg, lm, rows):
    """One rollout's update with the options `cfg`."""
    batch, rewards_PG, searches_PG = rows
    accelerator, policy = Accelerator(cpu=True), Policy(copy.deepcopy(lm))
    reference = Policy(copy.deepcopy(lm)).requires_grad_(False) if cfg.loss.kl_weight else None
    optimizer = optimizers.make(policy, cfg.optim, torch.float32)
    keeps = cfg.loss.support == "kept"
    fields = dict(vars(batch)) | {"trained_B": batch.trained_B if cfg.loss.drop else None}
    fields |= {} if keeps else {"kept_ids_K": None, "kept_counts_BT": None}

    def update() -> None:
        advantages_PG = group_advantages(rewards_PG, cfg.advantage, searches_PG)
        made = Batch(**(fields | {"advantages_B": advantages_PG.flatten()}))
        made = choose_tokens(accelerator, policy, made, cfg)
        update_policy(accelerator, policy, reference, optimizer, made, cfg, beta=1.0)

    return update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="tiny,head")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--arms", help="plain GRPO and these arms (default: all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    configs, columns = arms(), {}
    if args.arms:
        chosen = ["grpo", *args.arms.split(",")]
        if unknown := set(chosen) - set(configs):
            parser.error(f"--arms: {', '.join(sorted(unknown))} not among {', '.join(configs)}")
        configs = {arm: configs[arm] for arm in chosen}
    for name in args.sizes.split(","):
        size = SIZES[name]
        lm = make_lm(*size[:3])
        least = dict.fromkeys(configs, math.inf)
        with tqdm(total=(args.repeats + 1) * len(configs), desc=name) as bar:
            for repeat in range(args.repeats + 1):
                for arm, cfg in configs.items():
                    update = make_update(cfg, lm, make_rows(size, cfg.rollout.group_size))
                    start = time.process_time()
                    update()
                    if repeat:  # the first round warms up
                        least[arm] = min(least[arm], time.process_time() - start)
                    bar.update()
        columns[name] = least
    plain = {name: least["grpo"] for name, least in columns.items()}
    print("plain GRPO: " + ", ".join(f"{name} {1e3 * value:.0f} ms" for name, value in plain.items()))
    print("| arm |" + "".join(f" {name} |" for name in columns) + "\n|---|" + "---|" * len(columns))
    for arm in configs:
        cells = "".join(f" {least[arm] / plain[name]:.2f} |" for name, least in columns.items())
        print(f"| {arm} |{cells}")


if __name__ == "__main__":
    main()
