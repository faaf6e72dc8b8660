"""A crash box: the last rollouts of a run, with the weights and optimizer state from before their updates.

`BOX/checkpoints/step_N` is an ordinary checkpoint, `BOX/episodes/step_M.jsonl` holds the episodes of each
later step, `BOX/reference` the model of the KL term if there is one, and `BOX/metrics.jsonl` the run's log up
to that step. `train.py --replay BOX [section.option=value …]` makes the same updates again: bit for bit with
the same options, or with another loss. A box may come from somebody else, so a replay reads only the box and
writes only into it (`settings.read_back`).
"""

import copy
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from lld import config, settings
from lld.episode import Episode
from lld.record import runs, trajectories
from lld.running import checkpoint, sharding


class Recent:
    """Episodes of at least the last `num_steps` steps, and the training state before the first of them.

    Weights and optimizer state are copied to the CPU every `num_steps` steps; the last two copies are kept.
    """

    def __init__(self, num_steps: int):
        self.num_steps = num_steps
        self.states: list[tuple[int, dict, dict]] = []  # (step, weights, trainer state), oldest first
        self.episodes: dict[int, list[Episode]] = {}

    def before(self, step: int, policy, trainer_state: Callable[[], dict]) -> None:
        """Copies the training state if a copy is due; call before the update of `step`."""
        if not self.states or step - self.states[-1][0] >= self.num_steps:
            self.states = [*self.states[-1:], (step, sharding.snapshot(policy), on_cpu(trainer_state()))]
            self.episodes = {s: some for s, some in self.episodes.items() if s >= self.states[0][0]}

    def keep(self, step: int, episodes: list[Episode]) -> None:
        self.episodes[step] = episodes

    def write(self, run_dir: Path, cfg: config.Config, lm, tokenizer, reference=None) -> Path:
        """Writes RUN/boxes/step_N and returns its path.

        The box is written to a temporary folder and renamed when complete. Of earlier boxes the first and
        those with replays are kept. `reference` is the model of the KL term, or None.
        """
        step, weights, trainer_state = self.states[0]
        folder = run_dir / "boxes" / f"step_{max(self.episodes) + 1:06d}"
        aside = folder.with_name(folder.name + ".partial")
        shutil.rmtree(aside, ignore_errors=True)
        (aside / "episodes").mkdir(parents=True)
        checkpoint.save(aside, step, lm, tokenizer, trainer_state, weights=weights)
        if reference is not None:
            reference.save_pretrained(aside / "reference")
            tokenizer.save_pretrained(aside / "reference")
        for number, episodes in self.episodes.items():
            (aside / "episodes" / f"step_{number:06d}.jsonl").write_text(
                "".join(trajectories.to_json(episode) + "\n" for episode in episodes)
            )
        settings.save(cfg, aside / "config.yaml")
        if (run_dir / "metrics.jsonl").exists():
            shutil.copy(run_dir / "metrics.jsonl", aside / "metrics.jsonl")
        if (folder / "replays").exists():  # a resumed run repeats steps
            os.replace(folder / "replays", aside / "replays")
        shutil.rmtree(folder, ignore_errors=True)
        for old in sorted(folder.parent.glob("step_??????"))[1:]:
            if not (old / "replays").exists():
                shutil.rmtree(old)
        os.replace(aside, folder)
        return folder


def on_cpu(tree):
    """A deep copy of nested dicts and lists, with tensors in CPU memory."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().cpu().clone()
    if isinstance(tree, dict):
        return {name: on_cpu(value) for name, value in tree.items()}
    return [on_cpu(value) for value in tree] if isinstance(tree, list) else copy.deepcopy(tree)


def steps_of(box: Path) -> list[int]:
    """The steps whose episodes are in the box; ValueError if the box is incomplete."""
    names = [path.stem.removeprefix("step_") for path in (box / "episodes").glob("step_??????.jsonl")]
    steps = sorted(int(name) for name in names if re.fullmatch("[0-9]{6}", name))
    latest = checkpoint.latest(box)
    if latest is None or not steps or not (box / "config.yaml").is_file():
        raise ValueError(
            f"--replay {box}: no crash box, it needs config.yaml, checkpoints/ and episodes/ (a run with "
            "monitor.crash_box > 0 writes one to its boxes/ when flattening, spiral or collapse begins)"
        )
    first = int(latest.name.removeprefix("step_"))
    if steps != list(range(first, first + len(steps))):
        raise ValueError(
            f"--replay {box}: episodes of steps {steps} do not follow the checkpoint of step {first}: the "
            "box is damaged"
        )
    return steps


def read_episodes(box: Path, step: int, group_size: int, vocabulary: int) -> list[Episode]:
    """The episodes of a step, in complete groups.

    Raises ValueError if the file is damaged or has token ids of `vocabulary` or above.
    """
    path = box / "episodes" / f"step_{step:06d}.jsonl"
    episodes = trajectories.read_episodes(path, vocabulary)
    if not episodes or len(episodes) % group_size:
        raise ValueError(
            f"{path} holds {len(episodes)} episodes, no whole groups of {group_size} (rollout.group_size): "
            "the box is damaged"
        )
    return episodes


def read_dropped(box: Path, step: int) -> dict:
    """The shares of the step's groups that the original run dropped or drew, as they were logged."""
    logged = [row for row in runs.read_rows(box / "metrics.jsonl") if row["step"] == step]
    names = ("failed_groups", "empty_groups", "drawn_groups")
    return {name: logged[-1][name] for name in names if logged and name in logged[-1]}


def same_rows(original: list[dict], replayed: list[dict]) -> list[str]:
    """Names of the replayed log whose values differ from the original log.

    Only names in the replay count, so evaluations are left out. Values are compared as text, so that NaN
    equals NaN.
    """
    by_step = {row["step"]: row for row in original}
    return sorted(
        {
            name
            for row in replayed
            for name, value in row.items()
            if repr(by_step.get(row["step"], {}).get(name)) != repr(value)
        }
    )


def replay_options(box: Path, overrides: list[str]) -> config.Config:
    """Options of a replay: those of the original run with `overrides`.

    It trains on the steps in the box and writes to BOX/replays.
    """
    steps, latest = steps_of(box), checkpoint.latest(box)
    name = (
        re.sub(r"[^\w.=+-]", "-", "_".join(override.partition(".")[2] for override in overrides))[
            :100
        ].lstrip(".")
        or "unchanged"
    )
    folder = box / "replays" / name
    if not folder.resolve().is_relative_to(box.resolve()):
        raise ValueError(f"--replay {box}: {folder} is a link that leads out of the box: delete the link")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--replay {box}: {folder} already holds files: delete it, or change another option")
    given = [override.partition("=")[0] for override in overrides]
    model = latest if not (box / "reference").is_dir() else box / "reference"
    own = [
        f"run.dir={folder}",
        f"run.steps={steps[-1] + 1}",
        "eval.every=0",
        "eval.at_start=false",
        "monitor.crash_box=0",
        "monitor.stop_in_phase=0",
    ]
    own += [] if "model.path" in given else [f"model.path={model}"]
    cfg, dropped = settings.read_back(box / "config.yaml", [*overrides, *own], reads=False)
    if "reward.kind" in dropped and "reward.kind" not in given:
        kind = settings.read_yaml(box / "config.yaml")["reward"]["kind"]
        raise ValueError(
            f"--replay {box}: reward.kind = {kind!r} is code, which is not taken from a box: give "
            f"reward.kind={kind} if it is meant, or another"
        )
    before = settings.read_back(box / "config.yaml", reads=False)[0]
    # May be set on the command line; a replay draws no questions
    free = ("model.path", "model.trust_remote_code", "rollout.extra_draws")
    theirs = runs.flat(settings.to_dict(before))
    for name, value in runs.flat(settings.to_dict(cfg)).items():
        played_with = name.partition(".")[0] in ("data", "model", "rollout", "retriever", "tinyworld")
        if (name == "optim.name" or (played_with and name not in free)) and value != theirs.get(name):
            raise ValueError(
                f"--replay: {name} cannot be changed, the box's episodes and its optimizer state were made "
                "with the other value; loss, advantage, reward, monitor and the rest of optim can"
            )
    if cfg.loss.support == "kept" != before.loss.support:
        raise ValueError(
            "--replay: loss.support = 'kept' needs the ids that the sampler kept, which only a run with "
            "that option records: leave it 'full'"
        )
    if cfg.loss.kl_weight > 0 and model == latest and "model.path" not in given:
        raise ValueError(
            f"--replay {box}: loss.kl_weight = {cfg.loss.kl_weight}, and the box holds no reference/ "
            "model: give model.path=MODEL, the model the run began with, or loss.kl_weight=0"
        )
    return cfg


def compare(box: Path, run_dir: Path) -> str:
    """Compares a replay with the original log; returns the verdict as text."""
    different = same_rows(runs.read_rows(box / "metrics.jsonl"), runs.read_rows(run_dir / "metrics.jsonl"))
    verdict = (
        "every logged value equals the original, bit for bit"
        if not different
        else (
            f"{len(different)} logged values differ from the original's, "
            f"{runs.printable(', '.join(different[:4]))} among them"
        )
    )
    return f"{run_dir}: {verdict}"
