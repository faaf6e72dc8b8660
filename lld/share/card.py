"""The model card of a checkpoint: what it is, its scores, how it was made, how to use it."""

import re
from pathlib import Path

import yaml

from lld import settings
from lld.config import Config
from lld.record import runs
from lld.running import provenance
from lld.share.usage import loading_code

CARD = """\
---
{front}---

# {title}

A search agent: it thinks, writes a query, reads the passages that come back, and answers. {base} was
trained with {method} ([arXiv 2512.04220](https://arxiv.org/abs/2512.04220)) for {steps} rollout steps by
`lld`, commit `{commit}`.

{figure}## Scores

{scores}

## How to use it

It needs a search engine of your own, at best over the passages it was trained with. With transformers{peft}:

```python
{code}```

`ask("Who wrote Emma?", search)` then returns the answer. With vLLM{merge} the part up to `write` is:

```python
{vllm}```

The stop strings are part of the protocol: after `</search>` the passages are appended, and the model goes on.
Answers may be wrong; read the passages.

## Recipe

The options that differ from lld's defaults; `train.py --config FILE` takes them.

```yaml
{recipe}```

Licence: that of the base model and of its data; the authors of this checkpoint may add theirs.
"""
SCORES_HEAD = (
    "| benchmark | questions | EM | 95 % interval | F1 | searches a question |",
    "|---|---|---|---|---|---|",
)
SCORES_NOTE = "One episode a question (eval.py); intervals by a bootstrap over the questions."
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# They name places of the machine that trained it, and change nothing
PLACES = ("run.dir", "run.trackers", "retriever.url", "retriever.replicas", "retriever.record")


def write_card(name: str, ckpt: Path, run_dir: Path, cfg: Config) -> str:
    """The card's Markdown for the checkpoint `ckpt` of the run `run_dir`, to be published as `name`."""
    code, vllm = loading_code(name, ckpt, cfg)
    adapters = (ckpt / "adapter_config.json").is_file()
    about = provenance.read(run_dir)
    steps = runs.parse_json((ckpt / "manifest.json").read_bytes(), str(ckpt / "manifest.json"), "restore it")
    figure = "![Reward, likelihood and displacement while training](figure.png)\n\n"
    return CARD.format(
        front=front_matter(cfg, adapters),
        title=name.rpartition("/")[2],
        base=f"`{short(cfg.model.path)}`",
        method=runs.method(runs.read_options(run_dir)),
        steps=steps.get("num_steps"),
        commit=str(about.get("commit", "unknown"))[:60],
        figure=figure if (run_dir / "figure.png").is_file() else "",
        scores=describe_scores(ckpt, run_dir, steps.get("num_steps")),
        peft=" (and `pip install peft`: the files are adapters of the base model)" if adapters else "",
        merge=" (after merging the adapters: peft's `merge_and_unload`)" if adapters else "",
        code=code,
        vllm=vllm,
        recipe=recipe(cfg),
    )


def front_matter(cfg: Config, adapters: bool) -> str:
    """The card's metadata; base model and data are named where they are on the hub."""
    tags = ["search-agent", "retrieval", "reinforcement-learning", "grpo"]
    tree = {"library_name": "peft" if adapters else "transformers", "pipeline_tag": "text-generation"}
    if on_hub(cfg.model.path):
        tree["base_model"] = cfg.model.path
    if on_hub(cfg.data.train):
        tree["datasets"] = [cfg.data.train]
    tags += ["lld"] if cfg.loss.lld_weight > 0 else []
    return yaml.safe_dump(tree | {"tags": tags}, sort_keys=False)


def on_hub(name: str) -> bool:
    return HUB_NAME.fullmatch(name) is not None and not Path(name).exists() and "." not in name[:1]


def describe_scores(ckpt: Path, run_dir: Path, num_steps: int) -> str:
    """The table of eval.py's results in the checkpoint, else the run's own evaluation after these steps."""
    path = ckpt / "eval" / "results.json"
    if path.is_file():
        remedy = "delete the file, and run eval.py again"
        scores = runs.parse_json(path.read_bytes(), str(path), remedy)
        try:
            rows = [score_row(name, row) for name, row in scores["benchmarks"].items()]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ValueError(f"{path} is damaged (a score is missing): {remedy}") from None
        return "\n".join([*SCORES_HEAD, *rows, "", SCORES_NOTE])
    found = [row for row in runs.read_metrics(run_dir) if row.get("step") == num_steps - 1]
    held_out = {k: v for k, v in (found[0] if found else {}).items() if re.fullmatch(r"eval/.+/em", k)}
    told = ", ".join(f"{name.split('/')[1]} {value:.3f}" for name, value in held_out.items())
    return (
        f"Held-out exact match while training, on the first questions of each set: {told}."
        if told
        else "Not evaluated."
    )


def score_row(name: str, row: dict) -> str:
    low, high = row["em_interval"]
    interval = f"{low:.3f} – {high:.3f}" if row["num_questions"] > 1 else "–"
    return (
        f"| {name} | {row['num_questions']} | {row['em']:.3f} | {interval} | {row['f1']:.3f} "
        f"| {row['searches']:.2f} |"
    )


def recipe(cfg: Config) -> str:
    """The run's options other than the defaults, as YAML, without places of the machine it ran on."""
    tree, defaults = settings.to_dict(cfg), settings.to_dict(Config())
    chosen = {}
    for section, options in tree.items():
        for name, value in options.items():
            hidden = section == "plan" or (f"{section}.{name}" in PLACES and value)
            if value != defaults[section][name] and not hidden:
                chosen.setdefault(section, {})[name] = shorten(value)
    preset = chosen.get("loss", {}).pop("preset", None)  # its options are among the chosen ones
    head = f"# loss.preset {preset}, written out\n" if preset else ""
    return head + yaml.safe_dump(chosen, sort_keys=False, default_flow_style=None, width=100)


def shorten(value: object) -> object:
    """An option's value without the folders of this machine."""
    if isinstance(value, dict):
        return {name: shorten(item) for name, item in value.items()}
    return short(value) if isinstance(value, str) else value


def short(path: str) -> str:
    """A path's last two names if it is absolute, else the path."""
    return "/".join(Path(path).parts[-2:]) if Path(path).expanduser().is_absolute() else path
