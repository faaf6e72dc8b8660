"""Options: load YAML plus section.option=value, check, save."""

import copy
import dataclasses
import difflib
import math
import os
import re
import types
import typing
from operator import attrgetter
from pathlib import Path
from typing import Literal

import yaml

from lld.config import PRESETS, Config, type_text
from lld.rules import nearest, validate

# Options that a resumed run may change.
RESUMABLE = (
    "run.dir",
    "run.steps",
    "run.save_every",
    "run.keep_checkpoints",
    "run.watchdog_s",
    "run.trackers",
    "run.tracker_project",
    "run.tracker_name",
    "run.tracker_group",
    "run.tracker_tags",
    "optim.micro_batch_size",
    "optim.micro_batch_tokens",
    "optim.cpu_in_rollout",
    "rollout.num_slots",
    "rollout.cuda_graphs",
    "rollout.max_failed_groups",
    "retriever.url",
    "retriever.replicas",
    "retriever.timeout_s",
    "retriever.deadline_s",
    "retriever.retries",
    "retriever.record",
    "monitor.crash_box",
    "monitor.stop_in_phase",
    "monitor.trajectories_every",
    "monitor.trajectories_questions",
    "retriever.empty_results",
)

# Every option that holds text is in one of the next three lists (a test checks it). A file that is read back,
# from a run or a crash box that may be somebody else's, cannot set code to load or places to write. The
# caller decides whether it may set what is read.
CODE_AND_WRITES = (
    "run.dir",
    "run.trackers",
    "run.tracker_project",
    "run.tracker_name",
    "run.tracker_group",
    "run.tracker_tags",
    "model.path",
    "model.trust_remote_code",
    "reward.kind",
    "retriever.record",
    "tinyworld.dir",
)
# Of these options a value with this mark is code; other values are words.
CODE_MARKS = {"reward.kind": ":"}
READS = (
    "data.train",
    "retriever.url",
    "retriever.replicas",
    "retriever.replay",
    "retriever.index",
    "retriever.corpus",
    "retriever.encoder",
    "retriever.oracle_questions",
    "eval.benchmarks",
)
WORDS = ("data.train_split", "data.train_sources", "retriever.faiss_params", "eval.during_training")

MAX_YAML_BYTES = 1 << 20


def _option_like(name: str, section: str | None = None) -> str | None:
    """The `section.option` that `name` may mean.

    An option of that name in any section, one with its initials (learning_rate: lr), in `section` if it
    has one, or a similar one.
    """
    options = {
        f"{s.name}.{option}": option
        for s in dataclasses.fields(Config)
        for option in typing.get_type_hints(s.type)
    }
    initials = "".join(word[:1] for word in name.split("_"))
    close = difflib.get_close_matches(name, options.values(), n=1, cutoff=0.8)
    meant = [full for full, option in options.items() if option == name]
    short = [full for full, option in options.items() if option == initials and "_" in name]
    meant += sorted(short, key=lambda full: full.partition(".")[0] != section)
    return next(iter(meant + [full for full, option in options.items() if option in close]), None)


def refuse_dashes(arguments: list[str]) -> None:
    """Raises ValueError for `--run.steps 3`, which argparse would only call unrecognized."""
    for place, argument in enumerate(arguments):
        if match := re.fullmatch(r"--(\w+\.[\w.]+)(?:=(.*))?", argument, re.DOTALL):
            value = match[2] if match[2] is not None else next(iter(arguments[place + 1 :]), "VALUE")
            raise ValueError(f"{argument}: options are written without dashes: {match[1]}={value}")


def _convert(value, kind, where: str):
    """`value` as the type `kind`; a ValueError names the option `where`.

    An int is accepted as a float, and so is a string such as '1e-6', which YAML does not read as a number.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        kinds = [kind for kind in args if kind is not type(None)]
        if len(kinds) == 1:
            return _convert(value, kinds[0], where)
        try:
            return _convert(value, kinds[":" in str(value)], where)  # a word, or an import path
        except ValueError as error:
            raise ValueError(f"{error}, or package.module:function") from None
    if origin is Literal:
        value = "no" if value is False and "no" in args else value  # YAML reads `no` as false
        if value not in args:
            known = f"must be one of {', '.join(map(repr, args))}"
            close = difflib.get_close_matches(str(value), map(str, args), n=1)
            raise ValueError(
                f"{where} = {value!r}: {known}" + (f"; did you mean {close[0]!r}?" if close else "")
            )
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_convert(item, args[0], f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {_convert(k, args[0], where): _convert(v, args[1], f"{where}.{k}") for k, v in value.items()}
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            number = None
        except OverflowError:  # a whole number of hundreds of digits
            number = math.inf
        if number is not None and not math.isfinite(number):
            raise ValueError(f"{where} = {value!r}: must be a finite number")
        if number is not None:
            return number
    elif kind in (int, bool, str) and type(value) is kind:
        return os.path.expanduser(value) if kind is str and value.startswith("~/") else value
    raise ValueError(f"{where} = {value!r}: must be {type_text(kind)}, not {type(value).__name__}")


def _preset(name) -> dict:
    """The options of a preset; none where there is none of that name, which its type refuses later."""
    path = PRESETS / f"{name}.yaml"
    return read_yaml(path) if path in PRESETS.glob("*.yaml") else {}


def _over(tree: dict, upper: dict) -> dict:
    """`tree` with the options of `upper` in place of its own; neither is changed."""
    merged = copy.deepcopy(tree)
    for section, options in upper.items():
        below = merged.get(section) or {}
        if isinstance(below, dict):  # else it is refused when the options are checked
            merged[section] = below | copy.deepcopy(options or {})
    return merged


def _beneath(tree: dict) -> dict:
    """What holds where `tree` says nothing: the options of its preset, and below them the defaults."""
    loss = tree.get("loss")
    return _over(to_dict(Config()), _preset(loss.get("preset")) if isinstance(loss, dict) else {})


def from_dict(tree: dict) -> Config:
    """A checked `Config` from nested dicts; `loss.preset` gives options that `tree` does not.

    Unknown names, wrong types and what rules.py refuses raise ValueError, with the nearest name or a remedy.
    """
    sections = {f.name: f.type for f in dataclasses.fields(Config)}
    built, tree = {}, tree or {}
    if isinstance(tree.get("loss"), dict) and all(isinstance(values, dict) for values in tree.values()):
        tree = _over(_preset(tree["loss"].get("preset")), tree)
    for section, values in tree.items():
        if section not in sections:
            near = difflib.get_close_matches(str(section), sections)
            likes = filter(None, map(_option_like, map(str, values if isinstance(values, dict) else ())))
            like = None if near else next(likes, None)
            hint = f"did you mean {like}?" if like else nearest(str(section), sections)
            raise ValueError(f"unknown section {section!r}: {hint}")
        if not isinstance(values, dict):
            raise ValueError(f"section {section!r} = {values!r}: must hold options, one 'name: value' a line")
        kinds = typing.get_type_hints(sections[section])
        for name in values:
            if name not in kinds:
                near = difflib.get_close_matches(str(name), kinds)
                like = _option_like(str(name), section)
                if near and not (like or "").endswith(f".{name}"):  # the very name, of another section
                    like = None
                raise ValueError(
                    f"unknown option {section}.{name}: "
                    + (f"did you mean {like}?" if like else nearest(str(name), kinds))
                )
        built[section] = sections[section](
            **{name: _convert(v, kinds[name], f"{section}.{name}") for name, v in values.items()}
        )
    cfg = Config(**built)
    _refuse_nul(cfg)
    validate(cfg)
    return cfg


def _refuse_nul(cfg: Config) -> None:
    for name in (*CODE_AND_WRITES, *READS):
        value = attrgetter(name)(cfg)
        texts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
        for text in texts:
            if isinstance(text, str) and "\0" in text:
                raise ValueError(f"{name} = {text!r}: a path cannot hold the character NUL")


class _PlainLoader(yaml.SafeLoader):
    """A YAML loader that refuses aliases, a few of which may expand to gigabytes, and repeated names.

    Of two sections `loss:` PyYAML would silently drop the first.
    """

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.YAMLError(
                f"line {event.start_mark.line + 1}: the alias *{event.anchor} is not read: write out what "
                "it stands for"
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep)
            if isinstance(key, (str, int, float)) and key in seen:
                raise yaml.YAMLError(
                    f"{key!r} is given twice, the second time at line {key_node.start_mark.line + 1}"
                )
            seen.add(key if isinstance(key, (str, int, float)) else None)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str):
    """The value of a YAML text of at most a megabyte; ValueError for anything that cannot be read."""
    if len(text) > MAX_YAML_BYTES:
        raise ValueError(f"{len(text)} characters, more than {MAX_YAML_BYTES}")
    try:
        return yaml.load(text, _PlainLoader)
    except RecursionError:
        raise ValueError("brackets nested too deeply") from None
    # ValueError: a number of thousands of digits, a date that does not exist
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ValueError(str(error)) from None


def read_yaml(path: str | Path) -> dict:
    """The mapping that a YAML file holds; ValueError names the file where it holds anything else."""
    if not Path(path).is_file():
        own, name = {other.name: other for other in Path(path).parent.glob("*.yaml")}, Path(path).name
        theirs = {other.name: other for other in Path("configs").glob("*.yaml")} | own
        close = difflib.get_close_matches(name, own, n=1)
        meant = theirs.get(f"{name}.yaml") or theirs.get(name) or (own[close[0]] if close else None)
        raise ValueError(f"no config file {path}" + (f": did you mean {meant}?" if meant else ""))
    try:
        tree = parse_yaml(Path(path).read_text(encoding="utf-8")) or {}
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; mend its permissions") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path} must hold sections such as 'loss:', not {type(tree).__name__}")
    return tree


def load(path: str, overrides: list[str] = ()) -> Config:
    """Reads a YAML file and applies overrides such as `loss.lld_weight=0.1` (values are YAML too)."""
    return with_overrides(read_yaml(path), overrides)


def of_run(run_dir: Path, overrides: list[str] = ()) -> Config:
    """The options of a run's folder, to continue it where it lies now; ValueError if it is not one."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        inside = run_dir.absolute().parent.name == "checkpoints" and run_dir.absolute().parents[1]
        remedy = f"did you mean {inside}?" if inside else "give the folder that holds config.yaml"
        raise ValueError(f"--resume {run_dir}: no run's folder; {remedy}")
    return load(path, [f"run.dir={yaml.safe_dump(str(run_dir), default_style=chr(34)).strip()}", *overrides])


def with_overrides(tree: dict, overrides: list[str]) -> Config:
    """The checked `Config` of a file's mapping, which is not changed, with overrides applied to it."""
    tree = copy.deepcopy(tree)
    for override in overrides:
        name, sign, value = override.partition("=")
        section, dot, option = name.partition(".")
        if not (sign and dot and option):
            like = _option_like(name) if sign and not dot else None
            raise ValueError(
                f"override {override!r}: "
                + (
                    f"did you mean {like}={value}?"
                    if like
                    else "write section.option=value, such as loss.lld_weight=0.1"
                )
            )
        try:
            given = parse_yaml(value)
        except ValueError as error:
            raise ValueError(f"override {override!r}: {value!r} is not a YAML value ({error})") from None
        if isinstance(given, str) and " #" in value and value.lstrip()[0] not in "\"'":
            given = value.strip()  # no comment here: a path may hold such a sign
        if name == "loss.preset":
            tree = _over(tree, _preset(given))
        if tree.get(section) is None:
            tree[section] = {}
        target = tree[section]
        if "." in option and isinstance(target, dict):  # one entry of a dict option: eval.benchmarks.nq=path
            option, _, key = option.partition(".")
            target.setdefault(option, _beneath(tree).get(section, {}).get(option, {}))
            target, option = target[option], key or "?"
        if not isinstance(target, dict):
            raise ValueError(f"override {override!r}: {name.rpartition('.')[0]} holds no options of its own")
        target[option] = given
    return from_dict(tree)


def read_back(path: str | Path, overrides: list[str] = (), reads: bool = True) -> tuple[Config, list[str]]:
    """The options of a file that somebody else may have written, such as RUN/config.yaml.

    Options of CODE_AND_WRITES keep their defaults unless an override, which the user typed, gives them; so do
    those of READS where `reads` is False. Also returns the names of the options not taken from the file.
    A word is taken where only an import path is code (CODE_MARKS).
    """
    tree, default, dropped = copy.deepcopy(read_yaml(path)), to_dict(Config()), []
    for name in CODE_AND_WRITES + (() if reads else READS):
        section, _, option = name.partition(".")
        options = tree.get(section)
        if not isinstance(options, dict) or CODE_MARKS.get(name, "") not in str(options.get(option, "")):
            continue
        if option in options and options.pop(option) != default[section][option]:
            dropped.append(name)
    tree.pop("tinyworld", None)  # its options say how to make what `dir` names
    if not reads and isinstance(tree.get("eval"), dict):
        tree["eval"].pop("during_training", None)  # names of the benchmarks
    if not reads and isinstance(tree.get("retriever"), dict):
        tree["retriever"] = {"topk": tree["retriever"]["topk"]} if "topk" in tree["retriever"] else {}
    return with_overrides(tree, overrides), dropped


def to_dict(cfg: Config) -> dict:
    """Every option, nested, as plain YAML types."""

    def plain(v):
        return list(v) if isinstance(v, tuple) else v

    return {s: {k: plain(v) for k, v in options.items()} for s, options in dataclasses.asdict(cfg).items()}


def save(cfg: Config, path: str | Path) -> None:
    """Writes all options, defaults included, so that a run's folder says what was run."""
    Path(path).write_text(yaml.safe_dump(to_dict(cfg), sort_keys=False))


def show(cfg: Config) -> str:
    """All options as YAML that `load` reads again; those that differ from their defaults name them."""
    tree, defaults, lines, num_changed = to_dict(cfg), to_dict(Config()), [], 0

    def flow(value) -> str:
        text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False)
        return text.removesuffix("...\n").strip()

    for section, options in tree.items():
        lines.append(f"{section}:")
        for name, value in options.items():
            line, default = f"  {name}: {flow(value)}", defaults[section][name]
            changed = value != default
            lines.append(f"{line:<50}  # default: {flow(default)}" if changed else line)
            num_changed += changed
    return "\n".join([f"# {num_changed} options differ from their defaults; those name them", *lines])
