"""The plan as `train.py --plan` prints it."""

from lld import config
from lld.running.plan.peaks import estimate, micro_batch, total
from lld.running.plan.processes import GB, Setup, local_processes
from lld.running.plan.shape import Shape, trained_params
from lld.running.plan.storage import disk_use, host_memory
from lld.running.plan.times import step_times


def format_plan(cfg: config.Config, shape: Shape, setup: Setup) -> str:
    """The plan as text."""
    lines = [*format_run(cfg, shape, setup), "", *format_peaks(cfg, shape, setup)]
    if setup.on_gpu:
        lines += ["", *format_host_memory(cfg, shape, setup), "", *format_times(cfg, shape, setup)]
    lines += ["", "Disk:"]
    for what, (size, why) in disk_use(cfg, shape).items():
        lines.append(f"  {what:14}{size / GB:8.2f} GB  {why}")
    return "\n".join(lines)


def format_run(cfg: config.Config, shape: Shape, setup: Setup) -> list[str]:
    """Lines with the model, the devices and the options that memory depends on."""
    lines = []
    if not setup.on_gpu:
        lines += [
            "No GPU here: this is the plan of a CPU process. For GPUs elsewhere: plan.gpus=8 "
            "plan.gpu_memory_gb=80, and plan.shard=fsdp for sharded weights.",
            "",
        ]
    if setup.sharded:
        how = "weights, gradients and optimizer sharded"
    elif setup.processes > 1:
        how = "each with the whole model"
    else:
        how = "not sharded"
    device = "GPU" if setup.on_gpu else "CPU process"
    plural = "s" if setup.on_gpu else "es"
    devices = f"{setup.processes} {device}{plural if setup.processes > 1 else ''}"
    if setup.memory:
        devices += f" of {setup.memory / GB:.1f} GB"
    tied = " (tied)" if shape.tied else ""
    precision = cfg.model.mixed_precision if setup.on_gpu else "no"
    checkpointing = "on" if cfg.model.gradient_checkpointing else "off"
    adapters = ""
    if cfg.model.lora_rank:
        adapters = f"; {trained_params(cfg, shape) / 1e6:.1f} M in adapters of rank {cfg.model.lora_rank}"
    return [
        *lines,
        f"{cfg.model.path}: {shape.params / 1e9:.2f} B parameters, {shape.layers} layers of "
        f"{shape.hidden}, vocabulary {shape.vocab:,}{tied}{adapters}",
        f"{devices}, {how}; {cfg.optim.name}, {precision} mixed precision, gradient checkpointing "
        f"{checkpointing}",
    ]


def format_peaks(cfg: config.Config, shape: Shape, setup: Setup) -> list[str]:
    """Lines of the memory table: one column per phase, one line per kind, and the sums."""
    peaks = estimate(cfg, shape, setup)
    unit, name = unit_of(peaks)
    tokens, written = micro_batch(cfg)
    device = "GPU" if setup.on_gpu else "CPU process"
    lines = [
        f"Memory of each {device}, {name}, with all episodes as long as allowed "
        f"({cfg.rollout.max_episode_tokens:,} tokens): {cfg.rollout.num_slots} slots, micro-batches of "
        f"{tokens:,} tokens, {written:,} of them written",
        f"{'':22}" + "".join(f"{phase:>16}" for phase in peaks),
    ]
    for kind in dict.fromkeys(kind for kinds in peaks.values() for kind in kinds):
        sizes = [kinds.get(kind, 0) / unit for kinds in peaks.values()]
        if any(sizes):
            lines.append(f"{kind:22}" + "".join(f"{size:16.2f}" if size else f"{'':16}" for size in sizes))
    sums = [total(kinds) / unit for kinds in peaks.values()]
    return [*lines, f"{'sum':22}" + "".join(f"{size:16.2f}" for size in sums)]


def format_host_memory(cfg: config.Config, shape: Shape, setup: Setup) -> list[str]:
    unit, name = unit_of(estimate(cfg, shape, setup))
    number = local_processes(setup)
    processes = "1 process" if number == 1 else f"{number} processes"
    lines = [f"CPU memory of each machine ({processes}), {name}:"]
    for phase, kinds in host_memory(cfg, shape, setup).items():
        terms = ", ".join(f"{kind} {size / unit:.2f}" for kind, size in kinds.items())
        lines.append(f"  {phase:14}{total(kinds) / unit:8.2f}  {terms}")
    return lines


def format_times(cfg: config.Config, shape: Shape, setup: Setup) -> list[str]:
    step, assumed = step_times(cfg, shape, setup), cfg.plan
    seconds = sum(part for part, _ in step.parts.values())
    lines = [
        f"A step, estimated for {assumed.tflops:.0f} TFLOP/s and {assumed.bandwidth_gb_s:.0f} GB/s of which "
        f"{100 * assumed.efficiency:.0f} % are reached, {assumed.link_gb_s:.0f} GB/s between GPUs, "
        f"{assumed.host_gb_s:.0f} GB/s to CPU memory;",
        f"an episode assumed to have {assumed.prompt_tokens} prompt + {assumed.written_tokens} written + "
        f"{assumed.observation_tokens} observation tokens (options plan.…)",
    ]
    for what, (part, why) in step.parts.items():
        lines.append(f"  {what:14}{part:8.0f} s   {why}")
    lines.append(
        f"  {'sum':14}{seconds:8.0f} s   {step.tokens:,} tokens, {step.written:,} written; "
        f"{cfg.run.steps} steps: {cfg.run.steps * seconds / 3600:.0f} h, without searches and evaluations"
    )
    return lines


def unit_of(peaks: dict[str, dict[str, float]]) -> tuple[float, str]:
    """Unit of the printed table: (bytes, name)."""
    return (GB, "GB") if max(map(total, peaks.values())) > GB else (1e6, "MB")
