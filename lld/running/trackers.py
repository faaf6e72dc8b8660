"""Trackers through accelerate: TensorBoard, Weights & Biases and others.

Every tracker gets the options and each step's metrics. Weights & Biases also gets a table of the logged
trajectories and the figure of each evaluation.
"""

from collections.abc import Sequence

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from lld import settings
from lld.running.run import Run

COLUMNS = (
    "step",
    "question",
    "golden_answers",
    "sample",
    "answer",
    "reward",
    "advantage",
    "searches",
    "text",
)


def check(names: Sequence[str]) -> None:
    """Raises ValueError for a tracker that accelerate does not know or whose package is not installed.

    Accelerate would skip the latter.
    """
    installed = [tracker.value for tracker in get_available_trackers()]
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ValueError(
                f"run.trackers names {name!r}: accelerate knows {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}"
            )
        if name not in installed:
            raise ValueError(
                f"run.trackers names {name!r}, which is not installed: pip install "
                f"{name.replace('_', '-')}, or drop it from run.trackers"
            )


def begin(run: Run) -> None:
    """Opens the trackers of run.trackers, if there are any, and gives them the options."""
    asked = run.cfg.run
    if not asked.trackers:
        return
    options = {
        # Numbers stay numbers, so that runs can be sorted by them; trackers take no lists or null.
        f"{section}.{name}": value if isinstance(value, bool | int | float | str) else str(value)
        for section, values in settings.to_dict(run.cfg).items()
        for name, value in values.items()
    }
    wandb = {
        "name": asked.tracker_name or run.dir.name,
        "dir": str(run.dir),
        "group": asked.tracker_group,
        "tags": list(asked.tracker_tags) or None,
    }
    run.accelerator.init_trackers(asked.tracker_project, config=options, init_kwargs={"wandb": wandb})


def log_trajectories(run: Run, step: int, records: list[dict]) -> None:
    """Logs records of lld/record/trajectories.py as a table of Weights & Biases, one row an episode."""
    if "wandb" in run.cfg.run.trackers:
        rows = [[about_episode(record)[column] for column in COLUMNS] for record in records]
        tracker = run.accelerator.get_tracker("wandb")
        tracker.log_table("trajectories", columns=list(COLUMNS), data=rows, step=step)


def about_episode(record: dict) -> dict:
    """The entries of COLUMNS for one record."""
    question = record["question"]
    return {
        "step": record["step"],
        "question": question["text"],
        "golden_answers": " | ".join(question["golden_answers"]),
        "sample": record["sample"],
        "answer": record["answer"] or "",
        "reward": record["reward"],
        "advantage": record["advantage"],
        "searches": sum(turn["searched"] for turn in record["turns"]),
        "text": "".join(record["tokens"]),
    }


def log_figure(run: Run, step: int) -> None:
    """Logs RUN/figure.png, if it was drawn, to Weights & Biases."""
    path = run.dir / "figure.png"
    if "wandb" in run.cfg.run.trackers and path.exists():
        run.accelerator.get_tracker("wandb").log_images({"figure": [str(path)]}, step=step)
