"""An experiment's YAML -> its runs, each with its checked config, its folder and its overrides for train.py.

The YAML names a `base` config, the folder `out`, common `options`, `worlds` and `arms` with their overrides,
and the grid: `learning_rates`, `seeds` and `steps` for all, or `grids`, a list of blocks, each of which may
have its own `worlds`, `arms`, `learning_rates`, `seeds`, `steps` and `options`. Later options override
earlier ones in the order options, world, block, arm. Blocks are in the order in which they are played, and a
block plays all its runs of one seed before those of the next, so that whatever was played until an
interruption compares the arms evenly. `record` is the CSV that holds a row for each finished run, and is kept
with the code; `pairs` are the arms that are compared, [[arm, other], …]; `law` are the arms of the fit of the
onset (default: none); `figure_arms` are those that are drawn (default: all), a list, {arm: its label} or
{heading: {arm: its label}}, and `figure` tells how: curves (the default) or endings.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from lld import config, settings
from lld.record.runs import read_rows

KEYS = (
    "base",
    "out",
    "record",
    "options",
    "worlds",
    "arms",
    "pairs",
    "law",
    "figure_arms",
    "figure",
    "learning_rates",
    "seeds",
    "steps",
    "grids",
)
GRID_KEYS = ("worlds", "arms", "learning_rates", "seeds", "steps", "options")
# Options that may differ from those a run was made with: those a resumed run may change, the place of its
# world, what is only recorded, and the name of a preset, whose options count by themselves
FREE = (
    *settings.RESUMABLE,
    "loss.preset",
    "tinyworld.dir",
    "monitor.rescore_every",
    "monitor.sentinel_every",
    "monitor.sentinel_size",
    "monitor.trajectories_every",
    "monitor.trajectories_questions",
    "monitor.crash_box",
)
# Free too where they lie in the run's tiny world, which its options describe
PLACES = ("model.path", "data.train", "retriever.corpus", "eval.benchmarks")


def is_free(name: str, value: object, home: str | None) -> bool:
    """Whether an option with this value does not decide a run's course; `home` is its tinyworld.dir."""
    if name not in PLACES or home is None:
        return name in FREE
    paths = value.values() if isinstance(value, dict) else [value]
    return all(isinstance(path, str) and Path(path).is_relative_to(home) for path in paths)


@dataclass(frozen=True)
class Run:
    """One training run; `overrides` on the experiment's base config make `cfg`."""

    world: str
    arm: str
    rate: str
    seed: int
    steps: int
    folder: Path
    asked: tuple[str, ...]  # what the YAML says
    overrides: tuple[str, ...]  # and the run's own: folders, seed, steps, learning rate
    cfg: config.Config

    @property
    def name(self) -> str:
        return f"{self.world}/{self.folder.name}"

    @property
    def fingerprint(self) -> str:
        """Ten digits for the options that decide a run's course: those that are not free, and its steps.

        Options with their default do not count, so that adding an option changes no fingerprint.
        """
        default = settings.to_dict(config.Config())
        told = {
            f"{section}.{name}": value
            for section, options in settings.to_dict(self.cfg).items()
            for name, value in options.items()
            if section != "plan"
            and value != default[section][name]
            and not is_free(f"{section}.{name}", value, self.cfg.tinyworld.dir)
        }
        text = json.dumps(told | {"run.steps": self.steps}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    @property
    def log(self) -> Path:
        return self.folder.with_name(self.folder.name + ".log")

    def finished(self) -> bool:
        """Whether the log holds all steps and, if the run evaluates, the last step's evaluation.

        A last line that is still being written does not count.
        """
        path = self.folder / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        if len(lines) < self.steps or not (self.cfg.eval.every and self.cfg.eval.during_training):
            return len(lines) >= self.steps
        return any(name.startswith("eval/") for name in read_rows(path)[self.steps - 1])


@dataclass(frozen=True)
class Experiment:
    """What the YAML asks for; the module's docstring describes its fields."""

    name: str
    base: Path
    out: Path
    record: Path
    runs: tuple[Run, ...]
    pairs: tuple[tuple[str, str], ...]
    law: tuple[str, ...]
    figure_arms: dict[str, dict[str, str]]  # heading ("" for none) -> arm -> label
    figure: str  # "curves" or "endings"


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
    """{name: overrides} of `worlds` or `arms`; the names become parts of file names."""
    if not isinstance(tree.get(kind), dict) or not tree[kind]:
        raise ValueError(
            f"{kind} = {tree.get(kind)!r}: give each a name, such as '{kind}: {{name: "
            f"[section.option=value]}}'"
        )
    for name in tree[kind]:
        valid = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", name)
        # Run folders are named ARM-lrRATE-sSEED; prepared worlds lie in OUT/worlds
        if not valid or "-lr" in name or (kind, name) == ("worlds", "worlds"):
            raise ValueError(
                f"{kind}: {name!r} cannot name a folder: use letters, digits, '.', '_' and '-', without "
                "'-lr', and quote numbers"
            )
    return {name: overrides_of(value, f"{kind}.{name}") for name, value in tree[kind].items()}


def _grids(tree: dict, worlds: dict, arms: dict) -> list[dict]:
    """The checked blocks with all their keys.

    Missing keys are taken from the top level; missing worlds and arms are all of them.
    """
    given = {name: tree[name] for name in ("learning_rates", "seeds", "steps") if name in tree}
    if not isinstance(tree.get("grids", [{}]), list) or tree.get("grids") == []:
        raise ValueError("grids: must be a list of blocks")
    blocks = []
    for number, block in enumerate(tree.get("grids", [{}])):
        where = f"grids[{number}]" if "grids" in tree else "experiment"
        _check_keys(block, GRID_KEYS, where)
        block = {"worlds": list(worlds), "arms": list(arms), "options": None} | given | block
        _check_block(block, worlds, arms, where)
        block["learning_rates"] = [rate_name(rate) for rate in block["learning_rates"]]
        block["options"] = overrides_of(block["options"], f"{where}: options")
        blocks.append(block)
    return blocks


def _check_block(block: dict, worlds: dict, arms: dict, where: str) -> None:
    for name in ("worlds", "arms", "learning_rates", "seeds"):
        if not isinstance(block.get(name), list) or not block[name]:
            raise ValueError(f"{where}: {name} = {block.get(name)!r}: must be a list of at least one")
    for kind, known in (("worlds", worlds), ("arms", arms)):
        for name in block[kind]:
            if not isinstance(name, str) or name not in known:
                raise ValueError(
                    f"{where}: {kind} names {name!r}, which is not there (known: {', '.join(known)})"
                )
    if not all(type(seed) is int and seed >= 0 for seed in block["seeds"]):
        raise ValueError(f"{where}: seeds = {block['seeds']!r}: must be whole numbers")
    steps = block.get("steps")
    if type(steps) is not int or steps < 1:
        raise ValueError(f"{where}: steps = {steps!r}: must be whole numbers of at least 1")


def world_paths(base: config.Config, folder: Path) -> list[str]:
    """Overrides that move every path of `base` inside its tinyworld.dir into `folder`.

    None if `base` has no tiny world.
    """
    if base.tinyworld.dir is None:
        return []
    home, moved = Path(base.tinyworld.dir), []
    for name, value in _flat_options(base):
        if isinstance(value, str) and Path(value).is_relative_to(home):
            moved.append(f"{name}={folder / Path(value).relative_to(home)}")
    return moved


def _flat_options(cfg: config.Config) -> list[tuple[str, object]]:
    """('section.option', value) of each option; a mapping gives a ('section.option.key', value) per entry."""
    entries = []
    for section, options in settings.to_dict(cfg).items():
        for name, value in options.items():
            if isinstance(value, dict):
                entries += [(f"{section}.{name}.{key}", item) for key, item in value.items()]
            else:
                entries.append((f"{section}.{name}", value))
    return entries


def load_experiment(
    path: str | Path, out: str | None = None, worlds_dir: str | None = None, record: str | None = None
) -> Experiment:
    """Reads and checks an experiment file and builds the config of each run.

    `out`, `worlds_dir` and `record` replace the file's. Raises ValueError that names the place and the
    remedy.
    """
    tree = settings.read_yaml(path)
    _check_keys(tree, KEYS, str(path))
    texts = {"base": "a config file", "out": "the folder of the runs", "record": "the CSV of finished runs"}
    for name, what in texts.items():
        if not isinstance(tree.get(name), str):
            raise ValueError(f"{path}: {name} = {tree.get(name)!r}: must be {what}")
    worlds, arms = _check_named(tree, "worlds"), _check_named(tree, "arms")
    pairs = _check_pairs(tree, arms, path)
    law = _check_arms(tree, "law", arms, [], path)
    figure_arms = _figure_arms(tree, arms, path)
    out = Path(out or tree["out"]).resolve()
    worlds_dir = Path(worlds_dir).resolve() if worlds_dir else out / "worlds"
    figure = tree.get("figure", "curves")
    if figure not in ("curves", "endings"):
        raise ValueError(f"{path}: figure = {figure!r}: must be curves or endings")
    runs = _make_runs(tree, worlds, arms, out, worlds_dir, path)
    record = Path(record or tree["record"])
    return Experiment(Path(path).stem, Path(tree["base"]), out, record, runs, pairs, law, figure_arms, figure)


def _make_runs(
    tree: dict, worlds: dict, arms: dict, out: Path, worlds_dir: Path, path: str | Path
) -> tuple[Run, ...]:
    common = overrides_of(tree.get("options"), "options")
    base = settings.read_yaml(tree["base"])
    base_cfg, runs = settings.with_overrides(base, []), {}
    for grid in _grids(tree, worlds, arms):
        for seed, rate, world, arm in product(
            grid["seeds"], grid["learning_rates"], grid["worlds"], grid["arms"]
        ):
            asked = [*common, *worlds[world], *grid["options"], *arms[arm]]
            point = (world, arm, rate, seed, grid["steps"])
            moved = world_paths(base_cfg, worlds_dir / world)
            run = _make_run(point, base, asked, moved, out, path)
            first = runs.setdefault(run.folder, run)  # a run that two blocks ask for keeps its first place
            if first.cfg != run.cfg:
                raise ValueError(
                    f"{path}: two blocks ask for {run.name} with different options or steps: "
                    "give one of the arms another name"
                )
    by_fingerprint: dict[str, Run] = {}
    for run in runs.values():
        first = by_fingerprint.setdefault(run.fingerprint, run)
        if first is not run:
            raise ValueError(
                f"{path}: {first.name} and {run.name} are one run under two names: remove one of them"
            )
    return tuple(runs.values())


def _check_arms(tree: dict, name: str, arms: dict, default: list, path: str | Path) -> tuple[str, ...]:
    """The arms that `name` lists."""
    given = tree.get(name, default)
    if not isinstance(given, list):
        raise ValueError(f"{path}: {name} = {given!r}: must be a list of arms")
    for arm in given:
        if not isinstance(arm, str) or arm not in arms:
            raise ValueError(f"{path}: {name} names {arm!r}, which is not among the arms ({', '.join(arms)})")
    return tuple(given)


def _figure_arms(tree: dict, arms: dict, path: str | Path) -> dict[str, dict[str, str]]:
    """The arms to draw with their labels, under their headings."""
    given, figure_arms = tree.get("figure_arms", list(arms)), {}
    headed = isinstance(given, dict) and given and all(isinstance(part, dict) for part in given.values())
    for heading, drawn in (given if headed else {"": given}).items():
        labels = drawn if isinstance(drawn, dict) else {}
        names = _check_arms({"figure_arms": list(labels) or drawn}, "figure_arms", arms, [], path)
        figure_arms[str(heading)] = {arm: str(labels.get(arm, arm)) for arm in names}
    return figure_arms


def _check_pairs(tree: dict, arms: dict, path: str | Path) -> tuple[tuple[str, str], ...]:
    pairs = tree.get("pairs", [])
    if not (isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)):
        raise ValueError(f"{path}: pairs = {pairs!r}: must be a list of [arm, arm it is compared with]")
    return tuple(_check_arms({"pairs": pair}, "pairs", arms, [], path) for pair in pairs)


def _make_run(
    point: tuple[str, str, str, int, int],
    base: dict,
    asked: list[str],
    moved: list[str],
    out: Path,
    path: str | Path,
) -> Run:
    """The run of one point (world, arm, rate, seed, steps).

    Its overrides are those `asked` for, those of the world's `moved` paths and the point's own.
    """
    world, arm, rate, seed, steps = point
    folder = out / world / f"{arm}-lr{rate}-s{seed}"
    own = [
        f"run.dir={folder}",
        f"run.seed={seed}",
        f"run.steps={steps}",
        f"optim.lr={rate}",
        *moved,
    ]
    taken = {override.partition("=")[0] for override in own}
    for override in asked:
        if override.partition("=")[0] in taken:
            raise ValueError(
                f"{path}: run {world}/{folder.name}: {override!r} does nothing: the experiment "
                "sets this option for each run (out, seeds, steps, learning_rates, the world's "
                "folder)"
            )
    overrides = (*asked, *own)
    try:
        cfg = settings.with_overrides(base, list(overrides))
    except ValueError as error:
        raise ValueError(f"{path}: run {world}/{folder.name}: {error}") from None
    return Run(*point, folder, tuple(asked), overrides, cfg)


def check_made_alike(runs: Sequence[Run]) -> None:
    """Raises ValueError if a run's folder was made with other options than the experiment asks for now."""
    default = settings.to_dict(config.Config())
    for run in runs:
        path = run.folder / "config.yaml"
        if not path.exists():
            continue
        made = settings.read_yaml(path)
        world = made.get("tinyworld") if isinstance(made.get("tinyworld"), dict) else {}
        homes = (world.get("dir"), run.cfg.tinyworld.dir)
        for section, options in settings.to_dict(run.cfg).items():
            saved = made.get(section) if isinstance(made.get(section), dict) else {}
            for name, value in options.items():
                # An option added after the run was made had its default
                before = saved.get(name, default[section][name])
                both = zip((before, value), homes, strict=True)
                free = all(is_free(f"{section}.{name}", some, home) for some, home in both)
                if not free and _plain(before) != _plain(value):
                    raise ValueError(
                        f"{run.folder} was made with {section}.{name} = {before!r}, and {value!r} is asked "
                        "for now: delete the folder, or give the arm or world another name"
                    )


def _plain(value: object) -> object:
    """The value as JSON types, so that a tuple equals a list."""
    return json.loads(json.dumps(value))
