"""Two processes, DDP and FSDP2, on the same episodes and in whole runs; rank 0 saves what
tests/test_sharding.py compares.

accelerate launch --config_file configs/accelerate/cpu-2.yaml tests/sharded.py FOLDER
"""

import contextlib
import errno
import os
import shutil
import sys
import weakref
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, gather_object
from conftest import make_lm, make_tokenizer
from gradients import OPTIONS, make_episodes, two_steps
from test_train import write_config
from torch.distributed.tensor import DTensor

from lld import files, settings
from lld.episode import collate
from lld.policy import Policy
from lld.record.metrics import summarize_updates
from lld.running import checkpoint, recording, setup, sharding
from lld.selection import choose_tokens
from lld.update import score_batch, update_policy

SPREAD = [[1.0, -0.5, -0.5], [0.0, 0.0, 0.0], [1.1, 0.1, -1.2], [-1.0, 0.5, 0.5], [0.3, -0.6, 0.3]]
STEPS = 3
KEPT = {"support": "kept"}
CASES = {  # advantages, options of the loss, and of the optimizer
    "ragged": (SPREAD, {}, {}),  # 5 rows an update, one a micro-batch: 2 on one process, 3 on the other
    "tied": (SPREAD, KEPT, {"micro_batch_size": 4}),
    "idle": (SPREAD[:1], KEPT, {}),  # one row an update: one process has none
    "no signal": ([[0.0] * 3] * 5, {"kl_weight": 0.0, "entropy_weight": 0.0}, {}),
}


def small(folder: Path, name: str, **rollout) -> Path:
    run = {
        "dir": str(folder / name),
        "steps": STEPS,
        "save_every": 2,
        "keep_checkpoints": 0,
        "watchdog_s": 90,
    }
    return write_config(
        folder,
        name,
        run=run,
        rollout={
            "num_questions": 3,
            "group_size": 4,
            "max_new_tokens": 24,
            "num_slots": 8,
            "top_p": 0.9,
            **rollout,
        },
        loss={"support": "kept"},
        eval={"every": STEPS, "at_start": False, "max_questions": 4},
        monitor={"rescore_every": 1},
    )


def begun_elsewhere(folder: Path, source: str, name: str) -> Path:
    """A run that has made 2 of its steps as `source` did."""
    shutil.copytree(folder / source, folder / name)
    shutil.rmtree(folder / name / "checkpoints" / f"step_{STEPS:06d}")
    saved = folder / name / "config.yaml"
    saved.write_text(saved.read_text().replace(str(folder / source), str(folder / name)))
    return small(folder, name)


class Recorder(torch.optim.SGD):
    """Keeps every gradient, whole and in the order of the parameters."""

    def __init__(self, weights):
        super().__init__(weights, lr=0.05)
        self.gradients = []

    def step(self):
        grads = [
            sharding.whole(weight.grad, "cpu") for group in self.param_groups for weight in group["params"]
        ]
        self.gradients.append(torch.cat([grad.flatten() for grad in grads]))
        super().step()


def new_lm(case: str, seed: int = 0):
    lm = make_lm(make_tokenizer(), scale=1.0, seed=seed)
    if case == "tied":
        lm.lm_head.weight, lm.config.tie_word_embeddings = lm.model.embed_tokens.weight, True
    if case == "ragged":
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    return lm


def three_steps(accelerator, case: str, sharded: bool) -> dict:
    """Gradients of three optimizer steps on fixed episodes, log-probabilities after them, metrics."""
    advantages, loss, changes = CASES[case]
    optim = {"updates_per_rollout": 3, "micro_batch_size": 1} | changes
    rollout = {"num_questions": len(advantages), "group_size": 3, "top_p": 0.9}
    cfg = settings.from_dict(
        OPTIONS | {"rollout": rollout, "optim": OPTIONS["optim"] | optim, "loss": OPTIONS["loss"] | loss}
    )
    tokenizer = make_tokenizer()
    # Where it is false, all layers stay gathered after a forward pass
    os.environ["FSDP_RESHARD_AFTER_FORWARD"] = "false" if case == "tied" else "true"
    place = (
        (lambda model: sharding.shard(model, accelerator))
        if sharded
        else lambda model: accelerator.prepare_model(
            model, evaluation_mode=not next(model.parameters()).requires_grad
        )
    )
    policy, reference = place(Policy(new_lm(case))), place(Policy(new_lm(case, seed=1)).requires_grad_(False))
    batch = collate(
        make_episodes(3 * len(advantages), len(tokenizer)), torch.tensor(advantages), tokenizer.pad_token_id
    )
    optimizer = Recorder(policy.parameters())
    update_rows, scores = update_policy(accelerator, policy, reference, optimizer, batch, cfg, beta=0.3)
    return {
        "gradients": optimizer.gradients,
        "final_BT": score_batch(accelerator, policy, batch, cfg),
        "old_BT": scores.old_BT,
        "metrics": summarize_updates(update_rows),
        "gathered": [
            name
            for model in (policy, reference)
            for name, weight in model.named_parameters()
            if sharded and not isinstance(weight, DTensor)
        ],
    }


def choices(accelerator, sharded: bool) -> dict[str, torch.Tensor]:
    """What the rules choose that compare tokens of several rows; one row is dropped. No NTHR on shards."""
    weights = {"high_entropy": 0.2, "clip_cov": 0.1} | ({} if sharded else {"nthr": 0.0})
    cfg = settings.from_dict(
        OPTIONS
        | {"rollout": {"num_questions": len(SPREAD), "group_size": 3}}
        | {"optim": {"updates_per_rollout": 3, "micro_batch_size": 2}}
        | {"loss": {"weights": weights, "penalties": {"kl_cov": 0.1}}}
    )
    tokenizer = make_tokenizer()
    policy = Policy(make_lm(tokenizer))
    policy = sharding.shard(policy, accelerator) if sharded else accelerator.prepare_model(policy)
    episodes = make_episodes(3 * len(SPREAD), len(tokenizer))
    trained_B = torch.arange(len(episodes)) != 6
    batch = collate(episodes, torch.tensor(SPREAD), tokenizer.pad_token_id, trained_B)
    return choose_tokens(accelerator, policy, batch, cfg).chosen | {"written": batch.action_ids_BT > 0}


def some_tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    token_ids_BT = torch.randint(2, 300, (3, 40), generator=torch.Generator().manual_seed(seed))
    return token_ids_BT, (token_ids_BT > 100) & (torch.arange(40) > 0)


def in_bf16(accelerator) -> dict:
    """FSDP2 that computes in bf16: types, and the gradient beside the float32 one."""
    bf16 = SimpleNamespace(
        mixed_precision="bf16", device=accelerator.device, num_processes=accelerator.num_processes
    )
    found = {}
    for name, kind in (("float32", accelerator), ("bf16", bf16)):
        lm = new_lm("ragged").train()
        twin, policy = sharding.rollout_copy(lm, kind), sharding.shard(Policy(lm), kind)
        token_ids_BT, scored_BT = some_tokens(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "bf16"):
            logprobs_BT, _ = policy(token_ids_BT, scored_BT)
            with torch.no_grad():
                sampled_BT, _ = Policy(twin)(token_ids_BT, scored_BT)
        logprobs_BT.mean().backward()
        weights = list(policy.parameters())
        gradient = torch.cat([sharding.whole(weight.grad, "cpu").flatten() for weight in weights])
        types = {
            "weights": {w.dtype for w in weights},
            "gradients": {w.grad.dtype for w in weights},
            "copy": {w.dtype for w in twin.parameters()},
            "buffers": {b.dtype for b in twin.buffers()},
            "scores": {logprobs_BT.dtype},
        }
        found[name] = {
            "gradient": gradient,
            "gap": float((logprobs_BT - sampled_BT).abs().max()),
            "types": {key: [str(t) for t in some] for key, some in types.items()},
        }
    return found


def optimizer_and_checkpoint(accelerator, folder: Path) -> dict:
    """AdamW on shards: one step, a checkpoint, a second step; and the second step again from the
    checkpoint."""
    found, tokenizer = {}, make_tokenizer()
    token_ids_BT, scored_BT = some_tokens(accelerator.process_index)

    def begin(seed):
        policy = sharding.shard(Policy(new_lm("tied", seed)), accelerator)
        return policy, torch.optim.AdamW(policy.parameters(), lr=1e-2)

    def step(policy, optimizer):
        accelerator.backward(policy(token_ids_BT, scored_BT)[0].mean())
        accelerator.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def save(num_steps):
        shard = {"optimizer": sharding.optimizer_state(optimizer), "snapshots": [sharding.snapshot(policy)]}
        shared = {"rng": torch.get_rng_state(), "shapes": sharding.shapes(policy)}
        return checkpoint.save(
            folder,
            num_steps,
            policy.lm,
            tokenizer,
            shared,
            accelerator=accelerator,
            weights=sharding.whole_weights(policy, accelerator),
            shard=shard,
        )

    policy, optimizer = begin(0)
    step(policy, optimizer)
    twin = sharding.rollout_copy(new_lm("tied", seed=3), accelerator)
    sharding.refresh(twin, policy, accelerator.device)
    found["copy"] = {name: weight.clone() for name, weight in twin.named_parameters()}
    saved = save(1)
    before = {name: value.clone() for name, value in sharding.optimizer_state(optimizer)["state"][0].items()}
    with sharding.optimizer_on_cpu(optimizer, True):
        found["freed"] = [
            sharding.local(value).untyped_storage().nbytes()
            for value in optimizer.state_dict()["state"][0].values()
            if value.dim()
        ]
    found["returned"] = all(
        torch.equal(before[name], value)
        for name, value in sharding.optimizer_state(optimizer)["state"][0].items()
    )
    step(policy, optimizer)
    found["second"] = sharding.whole_weights(policy, accelerator)

    policy, optimizer = begin(5)
    state = checkpoint.load_trainer_state(saved, policy.lm.state_dict())
    sharding.load_optimizer(optimizer, [part["optimizer"] for part in state["parts"]])
    [snapshot] = sharding.load_snapshots(policy, [part["snapshots"] for part in state["parts"]])
    sharding.restore(policy, snapshot)
    found["moments"] = {
        i: {
            name: sharding.whole(value, "cpu") if isinstance(value, DTensor) else value.clone()
            for name, value in entries.items()
        }
        for i, entries in optimizer.state_dict()["state"].items()
    }
    step(policy, optimizer)
    found["again"] = sharding.whole_weights(policy, accelerator)
    lm = new_lm("tied")
    lm.model.register_buffer("routing_bias", torch.arange(3.0))
    lm.model.register_buffer("unsaved", torch.ones(1), persistent=False)
    weights = sharding.whole_weights(sharding.shard(Policy(lm), accelerator), accelerator) or {}
    found["buffers"] = {name: weights[name] for name in weights.keys() - (found["again"] or {}).keys()}

    write = checkpoint._write_shard
    if accelerator.process_index == 1:  # its disk is full

        def full(path, shard):
            raise OSError(errno.ENOSPC, "No space left on device")

        checkpoint._write_shard = full
    try:
        save(2)
        failure = None
    except files.WriteError as error:
        failure = str(error)
    checkpoint._write_shard = write
    found["failures"] = gather_object([failure])
    found["left"] = sorted(path.name for path in (folder / "checkpoints").iterdir())
    return found


def watch_whole_models() -> list[int]:
    """How many whole models this process holds each time that a run has just opened one; the list grows as
    it runs."""
    load, kept, found = setup.load_lm, [], []

    def load_and_count(options):
        lm = load(options)
        kept.append([weakref.ref(weight) for weight in lm.parameters()])
        found.append(sum(all(weight() is not None for weight in weights) for weights in kept))
        return lm

    setup.load_lm = load_and_count
    return found


def whole_runs(accelerator, folder: Path) -> tuple[dict[str, int], list[int]]:
    """Exit codes of runs of train.py, by name, each process making its part of them; and the whole models of
    the first run."""
    import train

    recording.draw_report = Accelerator.end_training = lambda *_: None  # the process group serves all runs
    codes = {}

    def run(name, *more, yaml=None, fsdp=True):
        os.environ["ACCELERATE_USE_FSDP"] = str(fsdp).lower()
        codes[name] = train.main(["--config", str(folder / f"{yaml or name}.yaml"), *more])

    opened = watch_whole_models()
    run("sharded")
    opened = list(opened)
    if accelerator.is_main_process:
        begun_elsewhere(folder, "sharded", "resumed")
    accelerator.wait_for_everyone()
    run("resumed", "--resume")
    run("one_to_two", "--resume")
    run("idle", "run.steps=1", "optim.cpu_in_rollout=true")
    run("boxed", f"run.dir={folder}/boxed", "monitor.crash_box=2", yaml="sharded")
    run("ddp", "optim.cpu_in_rollout=true", fsdp=False)
    return codes, opened


def main(folder: Path) -> None:
    # A hang ends as an error
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=90))]
    )
    found = {
        f"{case}, {kind}": three_steps(accelerator, case, kind == "fsdp")
        for case in CASES
        for kind in ("ddp", "fsdp")
    }
    found |= {
        "processes": accelerator.num_processes,
        "choices": {kind: choices(accelerator, kind == "fsdp") for kind in ("ddp", "fsdp")},
        "two steps": {size: two_steps(OPTIONS, size)[:2] for size in (1, 4)},
        "bf16": in_bf16(accelerator),
        "checkpoint": optimizer_and_checkpoint(accelerator, folder / "unit"),
    }
    found["codes"], found["opened"] = whole_runs(accelerator, folder)
    if accelerator.is_main_process:
        torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        main(Path(sys.argv[1]))
