"""Trains a search agent: `accelerate launch train.py --config configs/tiny.yaml [section.option=value …]`,
or goes on with a run: `… train.py --resume RUN`.

Exit codes: 0 done; 1 a bug, with its traceback; 2 a mistake in the options; 3 the retriever is gone; 4
stopped by monitor.stop_in_phase; 5 SIGTERM, SIGINT or SIGHUP, or the launcher is gone; 6 numbers that are not
finite; 7 the run's folder cannot be written; 8 the watchdog; 9 another process is gone.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lld import settings
from lld.config import Config
from lld.record.runs import printable
from lld.running import lock
from lld.running.leaving import leave

if TYPE_CHECKING:
    from lld.running.run import Run
    from lld.running.survive import Guard

# Modules that need torch are imported inside the functions below, after the options are read: importing torch
# takes seconds, which would delay the error for a mistyped option. The launcher may exit in that time, so its
# process id is read first.
LAUNCHER = lock.launcher()

# OpenMP threads that spin while waiting made a step 20 times slower on shared cores. Torch reads this when it
# is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def train(run: "Run") -> None:
    """The training loop. A run that ends before its last step raises; see lld/running/ending.py."""
    import torch

    from lld.advantages import group_advantages
    from lld.episode import collate, searches_of
    from lld.reward import score_episodes
    from lld.running import ending, evaluating, playing, recording, saving
    from lld.selection import choose_tokens, trained_rows
    from lld.update import update_policy

    cfg, models = run.cfg, run.models
    row = evaluating.first_evaluation(run)
    for step in run.steps():
        episodes, dropped = playing.play(run, step)

        rewards = score_episodes(episodes, run.tokenizer, cfg.reward)
        rewards_PG = torch.tensor(rewards).view(-1, cfg.rollout.group_size)
        advantages_PG = group_advantages(rewards_PG, cfg.advantage, searches_of(episodes, rewards_PG))
        batch = collate(episodes, advantages_PG, run.tokenizer.pad_token_id, trained_rows(episodes, cfg.loss))
        batch = choose_tokens(run.accelerator, models.policy, batch, cfg)

        row |= recording.describe_rollout(run, step, episodes, rewards_PG)
        recording.prepare_update(run, step, episodes, row["lr"])
        update_rows, scores = update_policy(
            run.accelerator,
            models.policy,
            models.reference,
            run.optimizer,
            batch,
            cfg,
            beta=row["lld_beta"],
            # The first step has no older policy.
            anchor=models.anchor if len(run.snapshots) > 1 else None,
        )

        learned = recording.describe_learning(run, step, episodes, batch, scores, update_rows)
        row |= learned | dropped
        recording.write_trajectories(run, step, episodes, batch, scores, rewards)
        saving.check_weights(run, row, batch)
        row, unplayed = evaluating.evaluate_if_due(run, row)
        began = recording.log_step(run, row, update_rows, episodes, batch)
        ending.stop_if_asked(run, began, unplayed)
        saving.save_if_due(run)
        row = {}


def main(argv: list[str]) -> int:
    args = read_arguments(argv)
    try:
        cfg = read_options(args)
        if args.show:
            print(settings.show(cfg))
            return 0
    except ValueError as error:
        print(f"train.py: {printable(error)}", file=sys.stderr)
        return 2

    from lld.running import ending, survive

    guard = survive.Guard()
    guard.prepare(LAUNCHER)
    try:
        if args.plan:
            from lld.running.plan.checks import print_plan

            return print_plan(cfg)
        return carry_out(guard, cfg, args.resume is not None, args.replay)
    except BaseException as error:
        code = ending.exit_code(error, guard, args.replay)
        if code is None:
            raise
        return code
    finally:
        ending.leave_report(guard, args.replay)
        guard.close()


def read_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", help="YAML of options; needed unless --resume RUN or --replay is given")
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="BOX",
        help="make the updates of a crash box again, with the options given here changed",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help="continue the run in folder RUN, or in run.dir of --config, from its newest checkpoint",
    )
    parser.add_argument(
        "--show", action="store_true", help="print all options as they would be, and end; nothing is run"
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print what the run would take of memory, time and disk, and end: 0 if it fits, 2 if not",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.option=value")
    try:
        settings.refuse_dashes(argv)
    except ValueError as error:
        parser.error(printable(error))
    args = parser.parse_intermixed_args(argv)
    if args.resume and "=" in args.resume and not Path(args.resume).exists():
        args.overrides.insert(0, args.resume)  # `--resume run.steps=300`
        args.resume = ""
    return args


def read_options(args: argparse.Namespace) -> Config:
    """The options of the run, from the command line; ValueError if they are wrong."""
    if args.resume and not args.config and not args.replay:
        return settings.of_run(Path(args.resume), args.overrides)
    if args.resume and args.config:
        raise ValueError(
            f"--resume {args.resume} takes the options of {Path(args.resume) / 'config.yaml'}: leave out "
            "--config (or write `--config CONFIG --resume`, which continues the run in its run.dir)"
        )
    if (args.config is None) == (args.replay is None) or (args.replay and args.resume is not None):
        raise ValueError("give either --config CONFIG, or --resume RUN, or --replay BOX alone")
    if args.config is not None:
        return settings.load(args.config, args.overrides)
    from lld.running import crashbox

    return crashbox.replay_options(args.replay, args.overrides)


def carry_out(guard: "Guard", cfg: Config, resume: bool, box: Path | None) -> int:
    """Runs training from setup to end; returns the exit code.

    With a crash box `box` the episodes are read from it, and nothing is played or evaluated.
    """
    from lld.running import ending, setup
    from lld.tools import Unplayed

    run = setup.open_run(guard, cfg, resume, box)
    try:
        train(run)
    except (Unplayed, ending.PhaseBegun, ending.NotFinite) as error:
        return ending.end_early(run, error)
    return ending.finish(run)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
