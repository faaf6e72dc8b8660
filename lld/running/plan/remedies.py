"""What would fit where a run does not."""

from dataclasses import replace

from lld import config
from lld.running.plan.peaks import estimate, highest_peak, micro_batch, total
from lld.running.plan.processes import GB, Setup
from lld.running.plan.shape import Shape


def remedies(cfg: config.Config, shape: Shape, setup: Setup) -> list[str]:
    """One line per alternative: the memory it needs, and whether it fits."""
    lines = []
    for label, (changed, changed_setup) in alternatives(cfg, setup).items():
        peak = highest_peak(changed, shape, changed_setup)
        lines.append(f"  {label}: {peak / GB:.1f} GB; {verdict(changed, shape, changed_setup)}")
    return lines


def verdict(cfg: config.Config, shape: Shape, setup: Setup) -> str:
    """Whether it fits as it is, with fewer slots and smaller micro-batches, or not at all; as text."""
    less = shrink_to_fit(cfg, shape, setup)
    if less is None:
        return "does not fit, whatever the slots and micro-batches"
    options = []
    if less.rollout.num_slots != cfg.rollout.num_slots:
        options.append(f"rollout.num_slots={less.rollout.num_slots}")
    if less.optim.micro_batch_tokens != cfg.optim.micro_batch_tokens:
        options.append(f"optim.micro_batch_tokens={less.optim.micro_batch_tokens}")
    if not options:
        return "fits"
    return f"with {' '.join(options)} {highest_peak(less, shape, setup) / GB:.1f} GB"


def shrink_to_fit(cfg: config.Config, shape: Shape, setup: Setup) -> config.Config | None:
    """`cfg` with slots and micro-batches halved until it fits; None if even the smallest do not fit."""
    while True:
        over = [name for name, kinds in estimate(cfg, shape, setup).items() if total(kinds) > setup.memory]
        rollout, optim = cfg.rollout, cfg.optim
        if not over:
            return cfg
        if "rollout" in over:
            if rollout.num_slots <= 8:
                return None
            cfg = replace(cfg, rollout=replace(rollout, num_slots=max(8, rollout.num_slots // 2)))
        elif "optimizer step" in over or micro_batch(cfg)[0] <= rollout.max_episode_tokens:
            return None
        else:
            tokens = max(rollout.max_episode_tokens, micro_batch(cfg)[0] // 2)
            cfg = replace(cfg, optim=replace(optim, micro_batch_tokens=tokens))


def alternatives(cfg: config.Config, setup: Setup) -> dict[str, tuple[config.Config, Setup]]:
    """Changes that save memory: {label: (options, setup)}; the first entry changes nothing."""
    found = {"as it is": (cfg, setup)}
    if not cfg.model.gradient_checkpointing:
        model = replace(cfg.model, gradient_checkpointing=True)
        found["model.gradient_checkpointing=true"] = (replace(cfg, model=model), setup)
    if not setup.sharded and setup.on_gpu and not cfg.model.lora_rank:
        # DDP cannot train offloaded weights (see refuse_combination).
        offered = ("adamw_8bit", "adamw_offload") if setup.processes == 1 else ("adamw_8bit",)
        for name in offered:
            if cfg.optim.name != name:
                found[f"optim.name={name}"] = (replace(cfg, optim=replace(cfg.optim, name=name)), setup)
        if cfg.optim == replace(cfg.optim, name="adamw", cpu_in_rollout=False):
            found["model.lora_rank=16"] = (replace(cfg, model=replace(cfg.model, lora_rank=16)), setup)
        for number in sorted({setup.processes, 2, 4, 8} - {1}):
            if number >= setup.processes and "nthr" not in cfg.loss.weights:
                whole = replace(cfg, optim=replace(cfg.optim, name="adamw"))
                spread = replace(setup, processes=number, sharded=True)
                found[f"sharded over {number} GPUs (FSDP)"] = (whole, spread)
    if setup.sharded and setup.processes < 8:
        found["sharded over 8 GPUs"] = (cfg, replace(setup, processes=8))
    if cfg.loss.kl_weight > 0 and not cfg.model.lora_rank:
        found["loss.kl_weight=0"] = (replace(cfg, loss=replace(cfg.loss, kl_weight=0.0)), setup)
    return found
