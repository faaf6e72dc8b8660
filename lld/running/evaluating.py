"""Evaluations on held-out questions during a run: when they are due, and where results are written."""

import json

from lld.evaluate import evaluate_questions, summarize
from lld.record import metrics, runs
from lld.running import sharding
from lld.running.playing import new_engine, own_places, progress_bar
from lld.running.recording import tell_scores
from lld.running.run import Run
from lld.running.saving import best_of, save, settle
from lld.tools import Unplayed


def evaluate(run: Run, num_steps: int) -> dict[str, float]:
    """Metrics on the held-out questions after `num_steps` steps.

    Trajectories are written to eval/<benchmark>/ of the run folder. Raises Unplayed, on all processes.
    """
    failure = None
    with sharding.optimizer_on_cpu(run.optimizer, run.cfg.optim.cpu_in_rollout):
        try:
            row = _play_all(run, num_steps)
        except Unplayed as error:
            failure = type(error)(str(error))  # another one: its frames hold the engine, with its cache
    if failure is not None:
        raise failure
    return row


def _play_all(run: Run, num_steps: int) -> dict[str, float]:
    row, accelerator = {}, run.accelerator
    for name, questions in run.held_out.items():
        run.guard.phase("evaluation")
        num_mine = len(own_places(run, len(questions)))
        with accelerator.autocast(), progress_bar(run, num_mine, f"evaluating {name}") as progress:
            records = evaluate_questions(
                new_engine(run, run.cfg.eval),
                run.tokenizer,
                questions,
                run.search,
                run.cfg,
                seed=run.cfg.run.seed,
                progress=run.guard.ticks(progress),
                accelerator=accelerator,
            )
        row |= {f"eval/{name}/{key}": value for key, value in summarize(records).items()}
        if accelerator.is_main_process:
            path = run.dir / "eval" / name / f"step_{num_steps:06d}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return row


def first_evaluation(run: Run) -> dict:
    """The evaluation before the first step of a new run, for the first row of the log; {} if there is none.

    For a resumed run, instead makes up what an interruption or a failed search left undone.
    """
    if run.progress.num_steps == 0:
        row = evaluate(run, 0) if run.cfg.eval.at_start else {}
        if row and run.accelerator.is_main_process:
            tell_scores(run, [{"step": 0} | row])
        return row
    if run.box is None:
        settle(run)  # may have been killed between checkpoint and this
        make_up_evaluation(run)
    return {}


def is_evaluation_due(run: Run, num_steps: int) -> bool:
    every = run.cfg.eval.every
    return every > 0 and (num_steps % every == 0 or num_steps == run.cfg.run.steps)


def evaluate_if_due(run: Run, row: dict) -> tuple[dict, Unplayed | None]:
    """The row of a step, with its evaluation if one is due, and None.

    If the evaluation could not be played: the row without any, and why. A resumed run makes it up.
    """
    num_steps = row["step"] + 1
    if not is_evaluation_due(run, num_steps):
        return row, None
    try:
        evaluated = evaluate(run, num_steps)
    except Unplayed as error:
        # Drop the evaluation at the start, which the first row holds: it would be taken for this one.
        without = {name: value for name, value in row.items() if not name.startswith("eval/")}
        return without, error.with_traceback(None)
    run.progress.best = best_of(run, row, evaluated)
    return row | evaluated, None


def make_up_evaluation(run: Run) -> None:
    """Repeats the evaluation that a signal or a failed search interrupted before the run was resumed."""
    num_steps, log = run.progress.num_steps, run.dir / "metrics.jsonl"
    row = runs.read_rows(log)[-1]
    is_made = any(name.startswith("eval/") for name in row)
    if is_made or not is_evaluation_due(run, num_steps):
        return
    evaluated = evaluate(run, num_steps)
    run.progress.best = best_of(run, row, evaluated)
    if run.accelerator.is_main_process:
        phase = row.pop("phase")  # stays the last key of the row
        metrics.replace_last_row(log, row | evaluated | {"phase": phase})
        run.accelerator.log(evaluated, step=num_steps - 1)
        tell_scores(run, runs.read_rows(log))
    save(run, num_steps)
