"""A run of train.py: what was opened for it (running/setup.py), and the state that changes with each step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from lld.config import Config
from lld.episode import Batch, Question
from lld.policy import Policy
from lld.record.metrics import Clock, Timed
from lld.record.phases import Detector
from lld.running.crashbox import Recent
from lld.running.survive import Guard


@dataclass(frozen=True)
class Models:
    """The policy and the models beside it.

    policy: the one that is trained, under DDP or sharded where there are several processes;
    bare: the `Policy` inside `policy`; lm: the language model inside `bare`;
    rollout_copy: the engine's copy of `lm`, None where the engine reads `lm` itself;
    reference: frozen, for the KL term, or None; anchor: frozen, an older policy for LLDS, or None. With
    adapters these two are views of `bare` (running/lora.py).
    """

    policy: torch.nn.Module
    bare: Policy
    lm: torch.nn.Module
    rollout_copy: torch.nn.Module | None
    reference: Callable | None
    anchor: Callable | None


@dataclass
class Progress:
    """How far a run is and which of its checkpoints can be trusted.

    Weights after N steps are proven good once a finite gradient was computed from them. Until then their
    checkpoint is not named best and does not replace an older one. Evaluations are pairs (EM, steps).
    """

    num_steps: int = 0  # finished rollout steps
    num_idle_steps: int = 0  # consecutive, without an update
    num_proven_steps: int = -1  # weights after these steps are good
    best: tuple[float, int] | None = None
    best_proven: tuple[float, int] | None = None  # named in best.json
    # Steps of the newest checkpoint while it is not proven good, else None.
    unproven_checkpoint: int | None = None
    checkpoint_overdue: bool = False  # was due in a step without an update


@dataclass
class Recorder:
    """State for the log of a run: phase detector, sentinel and crash box."""

    detector: Detector
    phase: int = 0  # of the detector at the last step
    sentinel: Batch | None = None
    recent: Recent | None = None  # None without a crash box


@dataclass
class Run:
    """Everything a run works with.

    `snapshots` holds this process's weights (shards if sharded) before the updates of the last lld_lag_steps
    + 1 steps, oldest first.
    """

    cfg: Config
    guard: Guard
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    questions: list[Question]
    held_out: dict[str, list[Question]]
    search: Timed
    models: Models
    optimizer: torch.optim.Optimizer
    snapshots: list[dict]
    recorder: Recorder
    progress: Progress
    box: Path | None = None  # the crash box, in a replay
    bar: tqdm | None = None  # over the steps
    clock: Clock | None = None  # of the current step

    @property
    def dir(self) -> Path:
        return Path(self.cfg.run.dir)

    def steps(self) -> Iterator[int]:
        """The remaining steps, with a progress bar on a terminal."""
        first, last = self.progress.num_steps, self.cfg.run.steps
        # On a terminal only (`disable=None`): in a log file every redraw would be a line.
        hidden = None if self.accelerator.is_main_process else True
        self.bar = tqdm(range(first, last), desc="training", initial=first, total=last, disable=hidden)
        for step in self.bar:
            self.clock = Clock()
            yield step
