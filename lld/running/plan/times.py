"""Seconds of a step, computed from the hardware figures in config section `plan`."""

from dataclasses import dataclass

from lld import config
from lld.running.plan.processes import GB, Setup
from lld.running.plan.shape import Shape, trained_params


@dataclass(frozen=True)
class Times:
    """Seconds of a step by activity, each with its arithmetic in words.

    The times are those of one process; `tokens` and `written` count the tokens of all processes.
    """

    parts: dict[str, tuple[float, str]]
    tokens: int
    written: int


@dataclass(frozen=True)
class Work:
    """What one process computes in a step, with the episode length that section `plan` assumes."""

    episodes: float
    length: int  # tokens per episode
    token_flop: int  # FLOP per token of a forward pass
    scored: float  # passes without gradients over all tokens
    flops: float  # achieved FLOP/s
    bandwidth: float  # achieved bytes/s
    compute: int  # bytes per number in a matrix multiplication

    @property
    def tokens(self) -> float:
        return self.episodes * self.length

    def seconds(self, tokens: float) -> float:
        """Seconds of one forward pass over `tokens`."""
        return tokens * self.token_flop / self.flops


def episode_length(cfg: config.Config) -> int:
    """Tokens per episode that section `plan` assumes."""
    assumed = cfg.plan
    tokens = assumed.prompt_tokens + assumed.written_tokens + assumed.observation_tokens
    return min(tokens, cfg.rollout.max_episode_tokens)


def work_of_step(cfg: config.Config, shape: Shape, setup: Setup) -> Work:
    length = episode_length(cfg)
    scored = 1 - 1 / cfg.optim.updates_per_rollout
    if cfg.loss.kl_weight > 0:
        scored += 1
    if cfg.loss.lld_lag_steps > 0:
        scored += 1
    if cfg.monitor.rescore_every:
        scored += 1 / cfg.monitor.rescore_every
    return Work(
        episodes=cfg.rollout.num_questions * cfg.rollout.group_size / setup.processes,
        length=length,
        # On average a token attends to half an episode.
        token_flop=2 * shape.matmul_params + 2 * shape.layers * shape.query * length,
        scored=scored,
        flops=cfg.plan.tflops * 1e12 * cfg.plan.efficiency,
        bandwidth=cfg.plan.bandwidth_gb_s * GB * cfg.plan.efficiency,
        compute=2 if cfg.model.mixed_precision == "bf16" else 4,
    )


def step_times(cfg: config.Config, shape: Shape, setup: Setup) -> Times:
    """Estimates the time of a step from the figures in section `plan`.

    FLOP per weight and token: 2 for a forward pass, 6 with the backward pass, 8 with gradient checkpointing;
    2 less where the weights are frozen.
    """
    work = work_of_step(cfg, shape, setup)
    passes = (4 if cfg.model.gradient_checkpointing else 3) - (cfg.model.lora_rank > 0)
    parts = rollout_times(cfg, shape, work)
    parts["scoring"] = (
        work.scored * work.seconds(work.tokens),
        f"{work.scored:.1f} passes over {work.tokens:,.0f} tokens",
    )
    parts["update"] = (
        passes * work.seconds(work.tokens),
        f"{work.tokens:,.0f} tokens x {passes * work.token_flop / 1e9:.0f} GFLOP",
    )
    parts["optimizer"] = optimizer_time(cfg, shape, setup, work)
    if setup.processes > 1:
        parts["communication"] = communication_time(cfg, shape, setup, work)
    rows = cfg.rollout.num_questions * cfg.rollout.group_size
    return Times(parts, rows * work.length, rows * cfg.plan.written_tokens)


def rollout_times(cfg: config.Config, shape: Shape, work: Work) -> dict[str, tuple[float, str]]:
    """Times of decoding (bound by memory or compute) and of prefill: prompts once a group, observations."""
    slots = min(cfg.rollout.num_slots, work.episodes)
    steps = work.episodes * cfg.plan.written_tokens / slots
    cache = slots * work.length * 2 * shape.layers * shape.kv * work.compute
    step_bytes = shape.params * work.compute + cache
    read = work.episodes * (cfg.plan.prompt_tokens / cfg.rollout.group_size + cfg.plan.observation_tokens)
    return {
        "decode": (
            steps * max(step_bytes / work.bandwidth, work.seconds(slots)),
            f"{steps:,.0f} steps of {slots:.0f} slots, each reads {step_bytes / GB:.1f} GB",
        ),
        "prefill": (work.seconds(read), f"{read:,.0f} tokens x {work.token_flop / 1e9:.1f} GFLOP"),
    }


def optimizer_time(cfg: config.Config, shape: Shape, setup: Setup, work: Work) -> tuple[float, str]:
    updates, weights = cfg.optim.updates_per_rollout, trained_params(cfg, shape)
    if cfg.optim.name == "adamw_offload":
        moved = 4 + work.compute
        of_weight = moved / (cfg.plan.host_gb_s * GB) + 32 / (cfg.plan.cpu_gb_s * GB)
        why = f"{updates} x ({moved} bytes a weight to and from CPU memory, 32 within it)"
        return updates * weights * of_weight, why
    moved = 16 if cfg.optim.name == "adamw_8bit" else 28
    share = setup.processes if setup.sharded else 1
    return updates * weights / share * moved / work.bandwidth, f"{updates} x {moved} bytes a weight"


def communication_time(cfg: config.Config, shape: Shape, setup: Setup, work: Work) -> tuple[float, str]:
    link = cfg.plan.link_gb_s * GB
    if not setup.sharded:
        updates = cfg.optim.updates_per_rollout
        moved = updates * 8 * trained_params(cfg, shape)
        return moved / link, f"{updates} x 8 bytes a weight"
    if cfg.optim.micro_batch_tokens is None:
        micro_batches = work.episodes / cfg.optim.micro_batch_size
    else:
        micro_batches = work.tokens / cfg.optim.micro_batch_tokens
    gathers = (work.scored + 2) * micro_batches
    moved = shape.params * (gathers * work.compute + micro_batches * 4 + work.compute)
    why = f"{moved / GB:,.0f} GB of weights and gradients between GPUs, as if nothing hid it"
    return moved / link, why
