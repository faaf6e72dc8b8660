"""CPU memory of a machine with GPUs, and disk."""

from lld import config
from lld.running.plan.peaks import episodes_kept
from lld.running.plan.processes import GB, Setup, local_processes
from lld.running.plan.shape import Shape, trained_params
from lld.running.plan.times import episode_length


def host_memory(cfg: config.Config, shape: Shape, setup: Setup) -> dict[str, dict[str, float]]:
    """Bytes of CPU memory of one machine with GPUs, by kind: while models are loaded, and during training.

    Every process loads one full float32 model at a time, and moves or shards it before it loads the next.
    """
    weights, processes = shape.params, local_processes(setup)
    offload = cfg.optim.name == "adamw_offload"
    stored = 2 if offload and cfg.model.mixed_precision == "bf16" else 4
    trained = trained_params(cfg, shape)
    share = setup.processes if setup.sharded else 1
    frozen = 2.0 if cfg.model.lora_rank and cfg.model.mixed_precision == "bf16" else 4.0
    opening = {"a whole model in each process": frozen * weights * processes}
    training = {}
    if offload:
        opening["float32 weights"] = 4.0 * weights * processes
        training["float32 weights"] = 4.0 * weights * processes
        training["gradients, moments"] = 12.0 * weights * processes
    elif cfg.optim.cpu_in_rollout:
        training["moments in a rollout"] = 8.0 * weights / share * processes
    if cfg.loss.lld_lag_steps:
        snapshots = cfg.loss.lld_lag_steps + 1
        training["snapshots"] = float(stored) * trained / share * processes * snapshots
    if cfg.monitor.crash_box:
        moments = {"adamw": 8, "adamw_8bit": 2, "adamw_offload": 12}[cfg.optim.name]
        training["crash box"] = 2.0 * weights * (stored + moments)
    if cfg.loss.support == "kept":
        training["kept ids"] = episodes_kept(cfg) * processes
    training["a checkpoint's weights"] = float(4 if setup.sharded else stored) * trained
    return {"opening models": opening, "training": training}


def disk_use(cfg: config.Config, shape: Shape) -> dict[str, tuple[float, str]]:
    """Bytes that a run leaves in `run.dir`, by kind, each with its arithmetic in words."""
    run, length = cfg.run, episode_length(cfg)
    weight, trained = checkpoint_bytes(cfg), trained_params(cfg, shape)
    count = -(-run.steps // run.save_every) + 1
    why = ""
    if run.keep_checkpoints:
        count = run.keep_checkpoints + 2
        why = ": the newest, the best, and one being written"
    logs = -(-run.steps // cfg.monitor.trajectories_every) if cfg.monitor.trajectories_every else 0
    episodes = cfg.monitor.trajectories_questions * cfg.rollout.group_size
    evaluations = 0
    if cfg.eval.every:
        evaluations = (run.steps // cfg.eval.every + cfg.eval.at_start) * len(cfg.eval.during_training)
    return {
        "checkpoints": (
            trained * float(weight) * count,
            f"{trained * weight / GB:.1f} GB each ({weight} bytes a weight), {count} at most{why}",
        ),
        "trajectories": (
            float(logs * episodes * length * 70),
            f"{logs} logs of {episodes} episodes, about 70 bytes a token",
        ),
        "evaluations": (
            float(evaluations * cfg.eval.max_questions * length * 6),
            f"{evaluations} of {cfg.eval.max_questions} questions at most, about 6 bytes a token",
        ),
    }


def checkpoint_bytes(cfg: config.Config) -> int:
    """Bytes per weight in a checkpoint: weight, moments, and the snapshots that a lagged anchor needs."""
    bf16 = cfg.model.mixed_precision == "bf16"
    size = {"adamw": 4 + 8, "adamw_8bit": 4 + 2, "adamw_offload": (2 if bf16 else 4) + 12}[cfg.optim.name]
    if cfg.loss.lld_lag_steps > 0:
        size += 4 * (cfg.loss.lld_lag_steps + 1)
    return size
