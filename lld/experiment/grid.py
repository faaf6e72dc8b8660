"""An experiment's YAML -> its runs, each with its checked config, its folder and the overrides that train.py
takes.

The YAML names a `base` config, the folder `out`, common `options`, `worlds` and `arms` with their overrides,
and the grid: `learning_rates`, `seeds` and `steps` for everything, or `grids`, a list of blocks each of which
may name its own `worlds`, `arms`, `learning_rates`, `seeds`, `steps` and `options`. Later ones win: options,
world, block, arm. `reference` is the arm that others are compared with ("grpo" if there is one),
`figure_arms` those whose curves are drawn (all).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lld import config, settings
from lld.record.runs import read_rows

KEYS = (
    "base",
    "out",
    "options",
    "worlds",
    "arms",
    "reference",
    "figure_arms",
    "learning_rates",
    "seeds",
    "steps",
    "grids",
)
GRID_KEYS = ("worlds", "arms", "learning_rates", "seeds", "steps", "options")
# What a resumed run may change, where a world lies and what only watches: none makes it another run.
FREE = (
    *settings.RESUMABLE,
    "tinyworld.dir",
    "model.path",
    "data.train",
    "retriever.corpus",
    "eval.benchmarks",
    "monitor.rescore_every",
    "monitor.sentinel_every",
    "monitor.sentinel_size",
    "monitor.trajectories_every",
    "monitor.trajectories_questions",
    "monitor.crash_box",
)


@dataclass(frozen=True)
class Run:
    """One training run; `overrides` on the experiment's base config make `cfg`."""

    world: str
    arm: str
    rate: str
    seed: int
    steps: int
    folder: Path
    overrides: tuple[str, ...]
    cfg: config.Config

    @property
    def name(self) -> str:
        return f"{self.world}/{self.folder.name}"

    @property
    def log(self) -> Path:
        return self.folder.with_name(self.folder.name + ".log")

    def finished(self) -> bool:
        """Whether all steps are in the log (a last line still being written is none) and, where there is one,
        the last one's evaluation."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        if len(lines) != self.steps or not (self.cfg.eval.every and self.cfg.eval.during_training):
            return len(lines) >= self.steps
        return any(name.startswith("eval/") for name in read_rows(path)[-1])


@dataclass(frozen=True)
class Experiment:
    """What the YAML asks for: `reference` is the arm others are compared with, `figure_arms` those whose
    curves are drawn."""

    base: Path
    out: Path
    runs: tuple[Run, ...]
    reference: str | None
    figure_arms: tuple[str, ...]


def rate_name(rate: float | str) -> str:
    """A learning rate as folders and tables spell it: 3e-4, 2.5e-4."""
    try:
        mantissa, exponent = f"{float(rate):e}".split("e")
    except (TypeError, ValueError):
        raise ValueError(f"learning_rates: {rate!r} is no number") from None
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def overrides_of(value, where: str) -> list[str]:
    """A list of 'section.option=value' as it is; a mapping {section: {option: value}} in that form."""
    if value is None:
        return []
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return list(value)
    if isinstance(value, dict) and all(isinstance(options, dict) for options in value.values()):
        return [
            f"{section}.{name}={json.dumps(option)}"
            for section, options in value.items()
            for name, option in options.items()
        ]
    raise ValueError(
        f"{where} = {value!r}: give a list of 'section.option=value' or a mapping of sections to options"
    )


def _check_keys(tree, known: Sequence[str], where: str) -> None:
    if not isinstance(tree, dict):
        raise ValueError(f"{where} = {tree!r}: must be a mapping with {', '.join(known)}")
    for name in tree:
        if name not in known:
            raise ValueError(f"{where}: unknown name {name!r} (known: {', '.join(known)})")


def _check_named(tree: dict, kind: str) -> dict[str, list[str]]:
    """{name: overrides} of `worlds` or `arms`, whose names must serve as parts of file names."""
    if not isinstance(tree.get(kind), dict) or not tree[kind]:
        raise ValueError(
            f"{kind} = {tree.get(kind)!r}: give each a name, such as '{kind}: {{name: "
            f"[section.option=value]}}'"
        )
    for name in tree[kind]:
        if (
            not isinstance(name, str)
            or not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", name)
            or "-lr" in name
            or (kind == "worlds" and name == "worlds")
        ):
            raise ValueError(
                f"{kind}: {name!r} cannot name a folder: use letters, digits, '.', '_' and '-', without "
                "'-lr', and quote numbers"
            )
    return {name: overrides_of(value, f"{kind}.{name}") for name, value in tree[kind].items()}


def _grids(tree: dict, worlds: dict, arms: dict) -> list[dict]:
    """The blocks with all their keys: what one leaves out is that of the top level, and all worlds and
    arms."""
    given = {name: tree[name] for name in ("learning_rates", "seeds", "steps") if name in tree}
    if not isinstance(tree.get("grids", [{}]), list) or tree.get("grids") == []:
        raise ValueError("grids: must be a list of blocks")
    blocks = []
    for number, block in enumerate(tree.get("grids", [{}])):
        where = f"grids[{number}]" if "grids" in tree else "experiment"
        _check_keys(block, GRID_KEYS, where)
        block = {"worlds": list(worlds), "arms": list(arms), "options": None} | given | block
        for name in ("worlds", "arms", "learning_rates", "seeds"):
            if not isinstance(block.get(name), list) or not block[name]:
                raise ValueError(f"{where}: {name} = {block.get(name)!r}: must be a list of at least one")
        for kind, known in (("worlds", worlds), ("arms", arms)):
            for name in block[kind]:
                if name not in known:
                    raise ValueError(
                        f"{where}: {kind} names {name!r}, which is not there (known: {', '.join(known)})"
                    )
        for what, values in (("seeds", block["seeds"]), ("steps", [block.get("steps")])):
            if not all(type(value) is int and value >= (what == "steps") for value in values):
                raise ValueError(
                    f"{where}: {what} = {block.get(what)!r}: must be whole numbers"
                    + (" of at least 1" if what == "steps" else "")
                )
        block["learning_rates"] = [rate_name(rate) for rate in block["learning_rates"]]
        block["options"] = overrides_of(block["options"], f"{where}: options")
        blocks.append(block)
    return blocks


def world_paths(base: config.Config, folder: Path) -> list[str]:
    """Overrides that move every path of `base` inside its tinyworld.dir into `folder`; none where `base` has
    no tiny world."""
    if base.tinyworld.dir is None:
        return []
    home, moved = Path(base.tinyworld.dir), []
    for section, options in settings.to_dict(base).items():
        entries = [
            (f"{section}.{name}", value) for name, value in options.items() if not isinstance(value, dict)
        ]
        entries += [
            (f"{section}.{name}.{key}", value)
            for name, values in options.items()
            if isinstance(values, dict)
            for key, value in values.items()
        ]
        for name, value in entries:
            if isinstance(value, str) and Path(value).is_relative_to(home):
                moved.append(f"{name}={folder / Path(value).relative_to(home)}")
    return moved


def load_experiment(path: str | Path, out: str | None = None, worlds_dir: str | None = None) -> Experiment:
    """Reads and checks an experiment file, building the config of each run; ValueError names the place and
    the remedy."""
    tree = settings.read_yaml(path)
    _check_keys(tree, KEYS, str(path))
    for name in ("base", "out"):
        if not isinstance(tree.get(name), str):
            raise ValueError(
                f"{path}: {name} = {tree.get(name)!r}: must be "
                f"{'a config file' if name == 'base' else 'the folder of the runs'}"
            )
    worlds, arms, common = (
        _check_named(tree, "worlds"),
        _check_named(tree, "arms"),
        overrides_of(tree.get("options"), "options"),
    )
    out = Path(out or tree["out"]).resolve()
    worlds_dir = Path(worlds_dir).resolve() if worlds_dir else out / "worlds"
    base_tree, runs = settings.read_yaml(tree["base"]), {}
    base = settings.with_overrides(base_tree, [])
    for grid in _grids(tree, worlds, arms):
        points = [
            (seed, rate, world, arm)
            for seed in grid["seeds"]
            for rate in grid["learning_rates"]
            for world in grid["worlds"]
            for arm in grid["arms"]
        ]
        # A seed of everything before the next one: an early reading covers the grid
        for seed, rate, world, arm in points:
            folder = out / world / f"{arm}-lr{rate}-s{seed}"
            own = [
                f"run.dir={folder}",
                f"run.seed={seed}",
                f"run.steps={grid['steps']}",
                f"optim.lr={rate}",
                *world_paths(base, worlds_dir / world),
            ]
            asked = [*common, *worlds[world], *grid["options"], *arms[arm]]
            for override in asked:
                if override.partition("=")[0] in [setting.partition("=")[0] for setting in own]:
                    raise ValueError(
                        f"{path}: run {world}/{folder.name}: {override!r} does nothing: the experiment "
                        "sets this option for each run (out, seeds, steps, learning_rates, the world's "
                        "folder)"
                    )
            overrides = [*asked, *own]
            try:
                cfg = settings.with_overrides(base_tree, overrides)
            except ValueError as error:
                raise ValueError(f"{path}: run {world}/{folder.name}: {error}") from None
            if folder in runs and runs[folder].cfg != cfg:
                raise ValueError(
                    f"{path}: two blocks ask for {world}/{folder.name} with different options or steps: "
                    "give one of the arms another name"
                )
            runs[folder] = Run(world, arm, rate, seed, grid["steps"], folder, tuple(overrides), cfg)
    reference = tree.get("reference", "grpo" if "grpo" in arms else None)
    figure_arms = tree.get("figure_arms", list(arms))
    for name in [reference, *figure_arms]:
        if name is not None and name not in arms:
            raise ValueError(
                f"{path}: reference and figure_arms name {name!r}, which is not among the arms "
                f"({', '.join(arms)})"
            )
    return Experiment(Path(tree["base"]), out, tuple(runs.values()), reference, tuple(figure_arms))


def check_made_alike(runs: Sequence[Run]) -> None:
    """Raises ValueError where a run's folder was made with other options than the experiment asks for now."""
    plain = lambda value: json.loads(json.dumps(value))
    for run in runs:
        path = run.folder / "config.yaml"
        if not path.exists():
            continue
        # An option younger than the run had its default
        made, default = settings.read_yaml(path), settings.to_dict(config.Config())
        for section, options in settings.to_dict(run.cfg).items():
            for name, value in options.items():
                own = made.get(section)
                there = (
                    own.get(name, default[section][name]) if isinstance(own, dict) else default[section][name]
                )
                if f"{section}.{name}" not in FREE and plain(there) != plain(value):
                    raise ValueError(
                        f"{run.folder} was made with {section}.{name} = {there!r}, and {value!r} is asked "
                        "for now: delete the folder, or give the arm or world another name"
                    )
