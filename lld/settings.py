"""Options: load YAML plus section.option=value, check, save."""

import copy
import dataclasses
import difflib
import math
import re
import types
import typing
from pathlib import Path
from typing import Literal

import yaml

from lld.config import Config, Loss, TinyWorld

# Options that a resumed run may change.
RESUMABLE = (
    "run.dir",
    "run.steps",
    "run.save_every",
    "run.keep_checkpoints",
    "run.watchdog_s",
    "run.trackers",
    "optim.micro_batch_size",
    "optim.micro_batch_tokens",
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


# Every option that holds text falls into one of these three (tests/test_security.py). A file that is read
# back, of a run or a
# crash box that may be somebody else's, may name neither code nor a place to write; what it may have read is
# the reader's to say.
CODE_AND_WRITES = (
    "run.dir",
    "run.trackers",
    "model.path",
    "model.trust_remote_code",
    "retriever.record",
    "tinyworld.dir",
)


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


MAX_SEED = 2**32 - 1  # the most that numpy's generator takes


MAX_WATCHDOG_S = 1e7  # 115 days


def _nearest(name: str, names) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(names))}"


def _option_like(name: str, section: str | None = None) -> str | None:
    """The `section.option` that `name` may mean: by its initials (learning_rate: lr) in the section, else by
    its name in any section."""
    options = {
        f"{s.name}.{option}": option
        for s in dataclasses.fields(Config)
        for option in typing.get_type_hints(s.type)
    }
    initials = "".join(word[:1] for word in name.split("_"))
    close = difflib.get_close_matches(name, options.values(), n=1, cutoff=0.8)
    meant = [full for full, option in options.items() if option == name]
    meant += [
        full
        for full, option in options.items()
        if option == initials and section in (None, full.partition(".")[0])
    ]
    return next(iter(meant + [full for full, option in options.items() if option in close]), None)


def refuse_dashes(arguments: list[str]) -> None:
    """Raises ValueError for `--run.steps 3`, the form of other command lines, which argparse would only call
    unrecognized."""
    for place, argument in enumerate(arguments):
        if match := re.fullmatch(r"--(\w+\.[\w.]+)(?:=(.*))?", argument, re.DOTALL):
            value = match[2] if match[2] is not None else next(iter(arguments[place + 1 :]), "VALUE")
            raise ValueError(f"{argument}: options are written without dashes: {match[1]}={value}")


def check_name(name: str, where: str) -> None:
    """Raises ValueError unless `name` can name a file: no separator, no control character, neither empty nor
    hidden."""
    if not re.fullmatch(r"[^\W_][\w.+-]{0,99}", name):
        raise ValueError(
            f"{where}: {name!r} cannot name a file: use letters, digits, '.', '_', '+' and '-', first a "
            "letter or digit, at most 100"
        )


def _convert(value, kind, where: str):
    """`value` as `kind`, or a ValueError that names the option; ints pass as floats, YAML's '1e-6' string
    too."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _convert(value, next(a for a in args if a is not type(None)), where)
    if origin is Literal:
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
        if number is not None and not math.isfinite(number):
            raise ValueError(f"{where} = {value!r}: must be a finite number")
        if number is not None:
            return number
    elif kind in (int, bool, str) and type(value) is kind:
        return value
    name = getattr(kind, "__name__", str(kind)) if origin is None else str(kind)
    raise ValueError(f"{where} = {value!r}: must be {name}, not {type(value).__name__}")


def from_dict(tree: dict) -> Config:
    """A validated `Config` from nested dicts; unknown names and wrong types raise ValueError with the nearest
    name."""
    sections = {f.name: f.type for f in dataclasses.fields(Config)}
    built = {}
    for section, values in (tree or {}).items():
        if section not in sections:
            raise ValueError(f"unknown section {section!r}: {_nearest(section, sections)}")
        if not isinstance(values, dict):
            raise ValueError(f"section {section!r} = {values!r}: must hold options, one 'name: value' a line")
        kinds = typing.get_type_hints(sections[section])
        for name in values:
            if name not in kinds:
                near = difflib.get_close_matches(str(name), kinds)
                like = None if near else _option_like(str(name), section)
                raise ValueError(
                    f"unknown option {section}.{name}: "
                    + (f"did you mean {like}?" if like else _nearest(str(name), kinds))
                )
        built[section] = sections[section](
            **{name: _convert(v, kinds[name], f"{section}.{name}") for name, v in values.items()}
        )
    cfg = Config(**built)
    validate(cfg)
    return cfg


class _PlainLoader(yaml.SafeLoader):
    """YAML without aliases, of which a few lines may stand for gigabytes, and in which a name may be given
    once: of two sections `loss:` the first would be lost without a word."""

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
    """What a YAML text of at most a megabyte holds; ValueError for anything that cannot be read."""
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
        near = difflib.get_close_matches(
            Path(path).name, [other.name for other in Path(path).parent.glob("*.yaml")], n=1
        )
        raise ValueError(
            f"no config file {path}" + (f": did you mean {Path(path).parent / near[0]}?" if near else "")
        )
    try:
        tree = parse_yaml(Path(path).read_text(encoding="utf-8")) or {}
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path} must hold sections such as 'loss:', not {type(tree).__name__}")
    return tree


def load(path: str, overrides: list[str] = ()) -> Config:
    """Reads a YAML file and applies overrides such as `loss.lld_weight=0.1` (values are YAML too)."""
    return with_overrides(read_yaml(path), overrides)


def with_overrides(tree: dict, overrides: list[str]) -> Config:
    """The validated `Config` of a file's mapping, which is left as it is, and overrides on it."""
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
        if tree.get(section) is None:
            tree[section] = {}
        target = tree[section]
        if "." in option and isinstance(target, dict):  # one entry of a dict option: eval.benchmarks.nq=path
            option, _, key = option.partition(".")
            target.setdefault(option, to_dict(Config()).get(section, {}).get(option, {}))
            target, option = target[option], key or "?"
        if not isinstance(target, dict):
            raise ValueError(f"override {override!r}: {name.rpartition('.')[0]} holds no options of its own")
        try:
            target[option] = parse_yaml(value)
        except ValueError as error:
            raise ValueError(f"override {override!r}: {value!r} is not a YAML value ({error})") from None
    return from_dict(tree)


def read_back(path: str | Path, overrides: list[str] = (), reads: bool = True) -> tuple[Config, list[str]]:
    """The options of a file that somebody else may have written, such as RUN/config.yaml, and the names of
    those not taken from it.

    Options of CODE_AND_WRITES keep their defaults unless an override, which the user typed, gives them; so do
    those of READS where `reads` is False.
    """
    tree, default, dropped = copy.deepcopy(read_yaml(path)), to_dict(Config()), []
    for name in CODE_AND_WRITES + (() if reads else READS):
        section, _, option = name.partition(".")
        options = tree.get(section)
        if (
            isinstance(options, dict)
            and option in options
            and options.pop(option) != default[section][option]
        ):
            dropped.append(name)
    tree.pop("tinyworld", None)  # its options say how to make what `dir` names
    if not reads and isinstance(tree.get("eval"), dict):
        tree["eval"].pop("during_training", None)  # names of the benchmarks
    if not reads and isinstance(tree.get("retriever"), dict):
        tree["retriever"] = {"topk": tree["retriever"]["topk"]} if "topk" in tree["retriever"] else {}
    return with_overrides(tree, overrides), dropped


def to_dict(cfg: Config) -> dict:
    """Every option, nested, as plain YAML types."""
    plain = lambda v: list(v) if isinstance(v, tuple) else v
    return {s: {k: plain(v) for k, v in options.items()} for s, options in dataclasses.asdict(cfg).items()}


def save(cfg: Config, path: str | Path) -> None:
    """Writes the whole configuration, defaults included, so that a run folder says what was run."""
    Path(path).write_text(yaml.safe_dump(to_dict(cfg), sort_keys=False))


def _refuse_unread(cfg: Config, section: str, names: list[str], unread: bool, why: str) -> None:
    """Raises ValueError where an option was changed that nothing would read."""
    default = getattr(Config(), section)
    for name in names:
        value = getattr(getattr(cfg, section), name)
        if unread and value != getattr(default, name):
            raise ValueError(f"{section}.{name} = {value!r} does nothing with {why}: drop one of the two")


def validate(cfg: Config) -> None:
    """Refuses values out of range and combinations that cannot act, each with the value and the remedy."""
    for section, names in {
        "run": ("steps", "save_every"),
        "rollout": (
            "num_questions",
            "max_turns",
            "max_prompt_tokens",
            "max_new_tokens",
            "max_observation_tokens",
            "num_slots",
        ),
        "optim": ("updates_per_rollout", "micro_batch_size", "lr", "max_grad_norm"),
        "retriever": ("topk", "timeout_s", "deadline_s"),
        "eval": ("max_questions", "max_turns", "batch_size"),
        "monitor": ("sentinel_size", "trajectories_questions"),
        "plan": (
            "gpus",
            "gpu_memory_gb",
            "prompt_tokens",
            "written_tokens",
            "observation_tokens",
            "tflops",
            "bandwidth_gb_s",
            "link_gb_s",
            "host_gb_s",
            "cpu_gb_s",
            "efficiency",
        ),
        "tinyworld": ("num_people", "warm_start_steps", "num_layers", "hidden_size"),
    }.items():
        for name in names:
            value = getattr(getattr(cfg, section), name)
            if value is not None and not value > 0:
                raise ValueError(f"{section}.{name} = {value}: must be greater than 0")
    for section, names in {
        "run": ("seed", "keep_checkpoints", "watchdog_s"),
        "rollout": ("temperature",),
        "loss": (
            "clip_low",
            "clip_high",
            "kl_weight",
            "entropy_weight",
            "lld_weight",
            "lld_tolerance",
            "lld_answer_weight",
            "lld_lag_steps",
        ),
        "optim": ("warmup_steps", "weight_decay"),
        "retriever": ("retries", "rerank"),
        "eval": ("every", "temperature"),
        "monitor": ("rescore_every", "sentinel_every", "trajectories_every", "crash_box"),
    }.items():
        for name in names:
            value = getattr(getattr(cfg, section), name)
            if not value >= 0:
                raise ValueError(f"{section}.{name} = {value}: must not be negative")
    if not cfg.run.dir:
        raise ValueError("run.dir is empty: name the folder that is to receive what the run writes")
    for name, most in {
        "run.seed": MAX_SEED,
        "tinyworld.seed": MAX_SEED,
        "run.watchdog_s": MAX_WATCHDOG_S,
    }.items():
        section, _, option = name.partition(".")
        if (value := getattr(getattr(cfg, section), option)) > most:
            raise ValueError(f"{name} = {value}: must be at most {most:g}")
    for name in (*CODE_AND_WRITES, *READS):
        section, _, option = name.partition(".")
        value = getattr(getattr(cfg, section), option)
        for text in (
            value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
        ):
            if isinstance(text, str) and "\0" in text:
                raise ValueError(f"{name} = {text!r}: a path cannot hold the character NUL")
    rollout, loss, optim = cfg.rollout, cfg.loss, cfg.optim
    if rollout.group_size < 2:
        raise ValueError(
            f"rollout.group_size = {rollout.group_size}: a group of one has no advantage to learn from; "
            "use 2 or more"
        )
    if rollout.temperature == 0:
        raise ValueError(
            "rollout.temperature = 0: greedy episodes of a group are all alike and teach nothing; use 1.0 "
            "(eval.temperature may be 0)"
        )
    for section in ("rollout", "eval"):
        top_p = getattr(cfg, section).top_p
        if not 0 < top_p <= 1:
            raise ValueError(f"{section}.top_p = {top_p}: must be in (0, 1]")
    if loss.old_logprobs == "sampler" and rollout.top_p < 1:
        raise ValueError(
            f"loss.old_logprobs = 'sampler' with rollout.top_p = {rollout.top_p}: the sampler's "
            "log-probabilities are those of the cut distribution and no ratio can be built on them; use "
            "'trainer' or top_p 1.0"
        )
    if cfg.eval.top_p < 1 and cfg.eval.temperature == 0:
        raise ValueError(
            f"eval.top_p = {cfg.eval.top_p} does nothing with eval.temperature = 0 (greedy): drop one of "
            "the two"
        )
    if loss.clip_low >= 1:
        raise ValueError(
            f"loss.clip_low = {loss.clip_low}: must be below 1, or the ratio is never clipped from below"
        )
    if rollout.max_new_tokens + rollout.max_observation_tokens > rollout.max_episode_tokens - 1:
        raise ValueError(
            "rollout.max_new_tokens + rollout.max_observation_tokens = "
            f"{rollout.max_new_tokens + rollout.max_observation_tokens} leave no room for a prompt and a "
            "second turn "
            f"in rollout.max_episode_tokens = {rollout.max_episode_tokens}"
        )
    if rollout.max_episode_tokens <= rollout.max_prompt_tokens:
        raise ValueError(
            f"rollout.max_episode_tokens = {rollout.max_episode_tokens}: must exceed "
            f"rollout.max_prompt_tokens = {rollout.max_prompt_tokens}"
        )
    num_rows = rollout.num_questions * rollout.group_size
    if num_rows % optim.updates_per_rollout:
        raise ValueError(
            f"rollout.num_questions x rollout.group_size = {num_rows} episodes do not divide into "
            f"optim.updates_per_rollout = {optim.updates_per_rollout} equal mini-batches"
        )
    if loss.lld_weight > 0 and optim.updates_per_rollout == 1 and loss.lld_lag_steps == 0:
        raise ValueError(
            "loss.lld_weight > 0 with optim.updates_per_rollout = 1 and loss.lld_lag_steps = 0 cannot act: "
            "at the only update the policy still is the old policy and no likelihood has fallen yet; use "
            "more updates per rollout, lld_lag_steps >= 1, or lld_weight 0"
        )
    if (
        optim.updates_per_rollout == 1
        and cfg.monitor.rescore_every == 0
        and cfg.monitor.stop_in_phase in (2, 3)
    ):
        raise ValueError(
            f"monitor.stop_in_phase = {cfg.monitor.stop_in_phase} with optim.updates_per_rollout = 1 and "
            "monitor.rescore_every = 0 would never act: displacement is then seen only where a rollout is "
            "re-scored; "
            "set monitor.rescore_every, 1 for every step, or stop at 4 (collapse), which needs none"
        )
    lld_options = [
        f.name for f in dataclasses.fields(Loss) if f.name.startswith("lld_") and f.name != "lld_weight"
    ]
    _refuse_unread(cfg, "loss", lld_options, loss.lld_weight == 0, "loss.lld_weight = 0")
    _refuse_unread(
        cfg,
        "loss",
        ["lld_answer_weight"],
        loss.lld_answer_schedule == "paper",
        "loss.lld_answer_schedule = 'paper', which reads lld_answer_searches",
    )
    _refuse_unread(
        cfg,
        "loss",
        ["lld_answer_searches"],
        loss.lld_answer_schedule != "paper",
        f"loss.lld_answer_schedule = {loss.lld_answer_schedule!r}",
    )
    _refuse_unread(
        cfg,
        "reward",
        ["structure_format_score", "final_format_score", "retrieval_score"],
        cfg.reward.kind != "format",
        f"reward.kind = {cfg.reward.kind!r}",
    )
    _refuse_unread(
        cfg,
        "tinyworld",
        [f.name for f in dataclasses.fields(TinyWorld) if f.name != "dir"],
        cfg.tinyworld.dir is None,
        "tinyworld.dir = null",
    )
    if loss.lld_answer_schedule == "paper" and not loss.lld_answer_searches > 0:
        raise ValueError(f"loss.lld_answer_searches = {loss.lld_answer_searches}: must be greater than 0")
    if loss.lld_answer_schedule == "constant" and loss.lld_answer_weight > 1:
        raise ValueError(f"loss.lld_answer_weight = {loss.lld_answer_weight}: beta lies in [0, 1]")
    _refuse_unread(
        cfg,
        "optim",
        ["micro_batch_size"],
        optim.micro_batch_tokens is not None,
        f"optim.micro_batch_tokens = {optim.micro_batch_tokens}",
    )
    if optim.micro_batch_tokens is not None and optim.micro_batch_tokens < rollout.max_episode_tokens:
        raise ValueError(
            f"optim.micro_batch_tokens = {optim.micro_batch_tokens}: must hold the longest episode, "
            f"rollout.max_episode_tokens = {rollout.max_episode_tokens}; null counts rows instead "
            "(micro_batch_size)"
        )
    if len(optim.betas) != 2 or not all(0 <= b < 1 for b in optim.betas):
        raise ValueError(f"optim.betas = {list(optim.betas)}: must be two numbers in [0, 1)")
    for name in cfg.eval.benchmarks:
        check_name(name, "eval.benchmarks")
    unknown = [name for name in cfg.eval.during_training if name not in cfg.eval.benchmarks]
    if unknown:
        raise ValueError(
            f"eval.during_training names {unknown[0]!r}: {_nearest(unknown[0], cfg.eval.benchmarks)}"
        )
    if not 0 <= rollout.max_failed_groups < 1:
        raise ValueError(
            f"rollout.max_failed_groups = {rollout.max_failed_groups}: must be in [0, 1), a share of the "
            "step's groups"
        )
    fewest = (
        rollout.num_questions - int(rollout.max_failed_groups * rollout.num_questions)
    ) * rollout.group_size
    if fewest < optim.updates_per_rollout:
        raise ValueError(
            f"rollout.max_failed_groups = {rollout.max_failed_groups} may leave {fewest} episodes of a "
            f"step, fewer than optim.updates_per_rollout = {optim.updates_per_rollout}: lower one of the "
            "two"
        )
    if cfg.plan.efficiency > 1:
        raise ValueError(
            f"plan.efficiency = {cfg.plan.efficiency}: a share of what the hardware does at most; must be "
            "in (0, 1]"
        )
    validate_retriever(cfg)
    if cfg.retriever.url is None and cfg.retriever.corpus is None and cfg.retriever.replay is None:
        raise ValueError(
            "retriever.url is null, so the search runs in this process and needs retriever.corpus (and "
            "retriever.index, unless backend is bm25)"
        )
    if cfg.tinyworld.num_people < 20:
        raise ValueError(
            f"tinyworld.num_people = {cfg.tinyworld.num_people}: too small for distractors; use 20 or more"
        )
    for name in ("namesake_share", "two_hop_share"):
        if not 0 <= getattr(cfg.tinyworld, name) <= 1:
            raise ValueError(f"tinyworld.{name} = {getattr(cfg.tinyworld, name)}: must be in [0, 1]")


def validate_retriever(cfg: Config) -> None:
    options = cfg.retriever
    _refuse_unread(cfg, "retriever", ["replicas"], options.url is None, "retriever.url = null")
    for name, backend in (
        ("dtype", "torch"),
        ("faiss_params", "faiss"),
        ("rerank", "faiss"),
        ("oracle_questions", "oracle"),
    ):
        _refuse_unread(
            cfg,
            "retriever",
            [name],
            options.backend not in (backend, None),
            f"retriever.backend = {options.backend!r}",
        )
    finds_always = options.url is None and options.replay is None and options.backend not in ("faiss", None)
    _refuse_unread(
        cfg,
        "retriever",
        ["empty_results"],
        finds_always,
        f"retriever.backend = {options.backend!r} in this process, which finds something for every query",
    )
    _refuse_unread(
        cfg, "retriever", ["record"], options.replay is not None, f"retriever.replay = {options.replay!r}"
    )
    if options.backend == "oracle" and options.oracle_questions is None:
        raise ValueError(
            "retriever.backend = 'oracle' needs retriever.oracle_questions: the questions whose gold "
            "answers it is to find"
        )
    if options.max_memory_gb is not None and not options.max_memory_gb > 0:
        raise ValueError(
            f"retriever.max_memory_gb = {options.max_memory_gb}: must be greater than 0, or null for what "
            "is free"
        )
