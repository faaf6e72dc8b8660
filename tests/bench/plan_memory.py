"""Planned against measured peak memory: `python tests/bench/plan_memory.py [--sizes 24M 110M 305M] [--gpu]`,
one table.

For each model size a fresh process plays a rollout, scores it and makes updates with the run's own code
(lld/rollout.py, lld/update.py), random weights and episodes as long as allowed. On a CPU the peak of a phase
is the kernel's VmHWM, set back before the phase (Linux), less what was resident before the model was made;
glibc is told to give freed memory back, which it would otherwise keep in its arenas. With `--gpu` it is
torch.cuda.max_memory_allocated, and the sizes are those of configs/shapes; the plan's allowance for CUDA's
own memory and fragmentation is left out on both sides.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from lld import settings

PLAIN = {"mixed_precision": "no", "gradient_checkpointing": False}
SIZES = {  # Qwen2 shapes for a CPU, and the options of the run
    "24M": (
        {
            "hidden_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "intermediate_size": 1536,
            "vocab_size": 12000,
            "tie_word_embeddings": True,
        },
        PLAIN,
        {"rows": 12, "micro": 6, "turns": 2},
    ),
    "110M": (
        {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 6,
            "intermediate_size": 2304,
            "vocab_size": 32000,
            "tie_word_embeddings": True,
        },
        PLAIN | {"gradient_checkpointing": True},
        {"rows": 6, "micro": 3, "turns": 2},
    ),
    "305M": (
        {
            "hidden_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "intermediate_size": 4096,
            "vocab_size": 32000,
            "tie_word_embeddings": False,
        },
        PLAIN,
        {"rows": 2, "micro": 1, "turns": 2},
    ),
}
# For a pretended GPU
TINY = {
    "1M": (
        {
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "intermediate_size": 384,
            "vocab_size": 3000,
            "tie_word_embeddings": False,
        },
        {"gradient_checkpointing": True},
        {"rows": 4, "micro": 2, "turns": 2},
    )
}
GPU_SIZES = {
    "Qwen/Qwen2.5-1.5B": ("adamw_offload", {"rows": 32, "micro": 1, "turns": 27}),
    "Qwen/Qwen2.5-3B": ("adamw", {"rows": 32, "micro": 2, "turns": 27}),
}
QUESTION, TURN = "who wrote it?", 32  # TURN: tokens written a turn
MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "1000000",
    "MALLOC_TRIM_THRESHOLD_": "1000000",
    "OMP_WAIT_POLICY": "PASSIVE",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", metavar="SIZE")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--here", action="store_true", help="in this process, which serves one size")
    args = parser.parse_args()
    if args.child:
        return print(json.dumps(measure(args.child, args.gpu)))
    print(
        "| model | phase | planned GB | measured GB | planned / measured | largest terms of the plan "
        "|\n|---|---|---|---|---|---|"
    )
    for size in args.sizes or (GPU_SIZES if args.gpu else SIZES):
        if args.here:
            print_rows(measure(size, args.gpu))
            continue
        done = subprocess.run(
            [sys.executable, __file__, "--child", size] + ["--gpu"] * args.gpu,
            env=os.environ | MALLOC,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        print_rows(json.loads(done.stdout.splitlines()[-1]))


def print_rows(rows: list) -> None:
    for size, phase, planned, measured, terms in rows:
        largest = ", ".join(
            f"{name} {value:.2f}" for name, value in sorted(terms.items(), key=lambda item: -item[1])[:4]
        )
        print(f"| {size} | {phase} | {planned:.2f} | {measured:.2f} | {planned / measured:.2f} | {largest} |")


def options(size: str, gpu: bool):
    """(config of transformers, Config) of a size. No turn of a random policy ends by itself, so all episodes
    are of the length allowed."""
    from conftest import make_tokenizer
    from transformers import AutoConfig

    from lld import protocol
    from lld.running.plan.shape import SHAPES

    if gpu and size not in TINY:
        name, run = GPU_SIZES[size]
        shape = json.loads((SHAPES / f"{size}.json").read_text())
        model, optim = {"gradient_checkpointing": True}, {"name": name}
    else:
        shape, model, run = (SIZES | TINY)[size]
        optim = {}
    prompt, reply = (
        len(ids)
        for ids in (
            protocol.encode_prompt(make_tokenizer(), QUESTION),
            make_tokenizer().encode(protocol.INVALID_ACTION),
        )
    )
    cfg = settings.from_dict(
        {
            "model": model,
            "rollout": {
                "num_questions": run["rows"] // 2,
                "group_size": 2,
                "max_turns": run["turns"] - 1,
                "max_prompt_tokens": prompt,
                "max_new_tokens": TURN,
                "max_observation_tokens": 100,
                "max_episode_tokens": prompt + TURN * run["turns"] + reply * (run["turns"] - 1),
                "num_slots": run["rows"],
            },
            "optim": optim
            | {"updates_per_rollout": 1, "micro_batch_size": run["micro"], "lr": 1e-6, "warmup_steps": 0},
            "loss": {"lld_weight": 0.0},
            "plan": {"prompt_tokens": prompt},
        }
    )
    return AutoConfig.for_model(**{"model_type": "qwen2", "max_position_embeddings": 8192} | shape), cfg


def resident(name: str = "VmRSS") -> int:
    return next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(name)
    )


def measure(size: str, gpu: bool) -> list:
    """[size, phase, planned GB, measured GB, terms of the plan] for each phase."""
    import torch

    from lld.running.plan.peaks import estimate
    from lld.running.plan.processes import Setup
    from lld.running.plan.shape import shape_of

    shape, cfg = options(size, gpu)
    small = type(shape)(
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=64,
        vocab_size=1000,
    )
    play_and_learn(small, cfg, gpu, lambda phase: None)  # loads all that torch loads when it is first used
    peaks, base, begun = {}, resident(), time.perf_counter()

    def note(phase: str | None) -> None:
        if phase is not None:
            peaks[phase] = torch.cuda.max_memory_allocated() if gpu else resident("VmHWM") - base
            print(
                f"{size}, {phase}: {peaks[phase] / 1e9:.3f} GB after {time.perf_counter() - begun:.0f} s",
                file=sys.stderr,
            )
        torch.cuda.reset_peak_memory_stats() if gpu else Path("/proc/self/clear_refs").write_text("5")

    play_and_learn(shape, cfg, gpu, note)
    phases = estimate(cfg, shape_of(shape), Setup(1, False, gpu, None))
    phases["update"] = max(
        phases["update"], phases.pop("optimizer step"), key=lambda kinds: sum(kinds.values())
    )

    def told(kinds):
        return {name: value / 1e9 for name, value in kinds.items() if name != "CUDA, fragments"}

    return [
        [size, phase, sum(told(phases[phase]).values()), peak / 1e9, told(phases[phase])]
        for phase, peak in peaks.items()
    ]


def play_and_learn(shape, cfg, gpu: bool, note) -> None:
    """A rollout, the scoring of a micro-batch and an update of two, on a policy whose optimizer has made a
    step; `note(phase)` after each, `note(None)` before."""
    import copy
    import dataclasses

    import torch
    from accelerate import Accelerator
    from conftest import make_tokenizer
    from transformers import AutoModelForCausalLM

    from lld import protocol
    from lld.engine.engine import Engine
    from lld.episode import Question, collate
    from lld.model import attention
    from lld.model.load import engine_model
    from lld.policy import Policy
    from lld.rollout import Budgets, rollout
    from lld.running import optimizers
    from lld.update import score_rows, update_policy

    accelerator, tokenizer, options = (
        Accelerator(mixed_precision=cfg.model.mixed_precision, cpu=not gpu),
        make_tokenizer(),
        cfg.rollout,
    )
    dtype = optimizers.weight_dtype(cfg.optim, accelerator.mixed_precision)
    with accelerator.device:  # random weights of 3B take half a minute of a CPU
        lm = AutoModelForCausalLM.from_config(shape, dtype=torch.float32, attn_implementation=attention.NAME)
    if cfg.model.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    reference = accelerator.prepare_model(
        Policy(optimizers.cast(copy.deepcopy(lm), dtype)).requires_grad_(False), evaluation_mode=True
    )
    policy = Policy(lm)
    optimizer = optimizers.make(policy, cfg.optim, dtype)
    policy, optimizer = accelerator.prepare(
        policy, optimizer, device_placement=[True, cfg.optim.name != "adamw_offload"]
    )
    for group in optimizer.param_groups:
        group["lr"] = cfg.optim.lr
    questions = [Question(f"bench/{i}", QUESTION, ("nobody",), "bench") for i in range(options.num_questions)]

    bf16 = accelerator.mixed_precision == "bf16"
    twin = engine_model(lm, accelerator.device, bf16=True) if bf16 and dtype == torch.float32 else lm

    def play(questions):
        with accelerator.autocast():
            engine = Engine(
                twin.eval(),
                tokenizer,
                max_tokens=options.max_episode_tokens,
                num_slots=options.num_slots,
                temperature=1.0,
                top_p=1.0,
                stop_strings=protocol.STOP_STRINGS,
                eos_ids=(),
            )
            episodes = rollout(
                engine,
                tokenizer,
                questions,
                None,
                Budgets.of(options),
                num_samples=2,
                seed=0,
                step=0,
            )
        batch = collate(episodes, torch.tensor([1.0, -1.0]).repeat(len(questions), 1), tokenizer.pad_token_id)
        assert set(batch.lengths_B.tolist()) == {options.max_episode_tokens}
        return batch

    for weight in policy.parameters():  # a step makes the moments
        weight.grad = torch.zeros_like(weight, dtype=torch.float32)
    optimizer.step()
    optimizer.zero_grad()
    note(None)
    batch = play(questions)
    note("rollout")
    score_rows(accelerator, reference, batch, [[list(range(cfg.optim.micro_batch_size))]], cfg)
    note("scoring")
    # The reference is there, but its pass was measured just now
    unscored = dataclasses.replace(cfg, loss=dataclasses.replace(cfg.loss, kl_weight=0.0))
    update_policy(accelerator, policy, None, optimizer, batch, unscored, beta=1.0)
    note("update")


if __name__ == "__main__":
    main()
