"""A run of train.py: what it was opened with (running/setup.py), and the little state that changes with every
step."""

from collections.abc import Iterator
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
    reference: frozen, for the KL term, or None; anchor: frozen, an older policy for LLDS, or None.
    """

    policy: torch.nn.Module
    bare: Policy
    lm: torch.nn.Module
    rollout_copy: torch.nn.Module | None
    reference: torch.nn.Module | None
    anchor: torch.nn.Module | None


@dataclass
class Progress:
    """How far a run is and which of its checkpoints can be trusted.

    Weights after N steps are proven good once a finite gradient was computed from them; until then their
    checkpoint is not called the best and pushes out no older one. Evaluations are pairs (EM, steps).
    """

    num_steps: int = 0  # finished rollout steps
    num_idle_steps: int = 0  # in a row, without a single update
    num_proven_steps: int = -1  # the weights after so many steps are known to be good
    best: tuple[float, int] | None = None
    best_proven: tuple[float, int] | None = None  # what best.json names
    unproven_checkpoint: int | None = None  # steps of the newest checkpoint, while it is not proven
    checkpoint_overdue: bool = False  # one was due in a step without an update


@dataclass
class Recorder:
    """What the log of a run is computed with: the early warning, the sentinel and the crash box."""

    detector: Detector
    phase: int = 0  # the detector's, at the last step
    sentinel: Batch | None = None
    recent: Recent | None = None  # None without a crash box


@dataclass
class Run:
    """All that a run works with; `snapshots` are the weights, or this process's shards of them, at the start
    of the last lld_lag_steps + 1 steps, oldest first."""

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
    box: Path | None = None  # the crash box whose episodes are trained on; nothing is played then
    bar: tqdm | None = None  # over the steps
    clock: Clock | None = None  # of the step that is being made

    @property
    def dir(self) -> Path:
        return Path(self.cfg.run.dir)

    def steps(self) -> Iterator[int]:
        """The steps still to be made, with a progress bar on a terminal."""
        first, last = self.progress.num_steps, self.cfg.run.steps
        # On a terminal only (`disable=None`): in a log file each redrawing would be a line
        hidden = None if self.accelerator.is_main_process else True
        self.bar = tqdm(range(first, last), desc="training", initial=first, total=last, disable=hidden)
        for step in self.bar:
            self.clock = Clock()
            yield step
