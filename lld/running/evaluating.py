"""Evaluations on held-out questions during a run: when they are made, and where they go."""

import json

from lld.evaluate import evaluate_questions, summarize
from lld.record import metrics, runs
from lld.running.playing import new_engine, own_places, progress_bar
from lld.running.recording import tell_scores
from lld.running.run import Run
from lld.running.saving import best_of, save, settle
from lld.tools import Unplayed


def evaluate(run: Run, num_steps: int) -> dict[str, float]:
    """Metrics on the held-out questions after `num_steps` steps; the trajectories go to eval/<benchmark>/ of
    the run's folder. Raises Unplayed, on all processes."""
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
    """What belongs before the first step: the evaluation of the start, for the first row of the log; or what
    a kill or a failed search kept a resumed run from finishing."""
    if run.progress.num_steps == 0:
        row = evaluate(run, 0) if run.cfg.eval.at_start else {}
        if row and run.accelerator.is_main_process:
            tell_scores(run, [{"step": 0} | row])
        return row
    if run.box is None:
        settle(run)  # the kill may have come after a checkpoint and before this
        make_up_evaluation(run)
    return {}


def is_evaluation_due(run: Run, num_steps: int) -> bool:
    every = run.cfg.eval.every
    return every > 0 and (num_steps % every == 0 or num_steps == run.cfg.run.steps)


def evaluate_if_due(run: Run, row: dict) -> tuple[dict, Unplayed | None]:
    """The row of a step with its evaluation where one is due; or, where that could not be played, without
    any, and why. A resumed run makes it up."""
    num_steps = row["step"] + 1
    if not is_evaluation_due(run, num_steps):
        return row, None
    try:
        evaluated = evaluate(run, num_steps)
    except Unplayed as error:
        # The evaluation at the start, which the first row holds, must not pass for this one
        without = {name: value for name, value in row.items() if not name.startswith("eval/")}
        return without, error.with_traceback(None)
    run.progress.best = best_of(run, row, evaluated)
    return row | evaluated, None


def make_up_evaluation(run: Run) -> None:
    """Makes the evaluation that a signal or a failed search cut short before the run was resumed."""
    num_steps, log = run.progress.num_steps, run.dir / "metrics.jsonl"
    row = runs.read_rows(log)[-1]
    is_made = any(name.startswith("eval/") for name in row)
    if is_made or not is_evaluation_due(run, num_steps):
        return
    evaluated = evaluate(run, num_steps)
    run.progress.best = best_of(run, row, evaluated)
    if run.accelerator.is_main_process:
        phase = row.pop("phase")  # the last name of a row
        metrics.replace_last_row(log, row | evaluated | {"phase": phase})
        run.accelerator.log(evaluated, step=num_steps - 1)
        tell_scores(run, runs.read_rows(log))
    save(run, num_steps)
