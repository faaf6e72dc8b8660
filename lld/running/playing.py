"""The rollout of a step: played by all processes, or read from a crash box."""

import dataclasses
import hashlib

from accelerate.utils import gather_object
from tqdm import tqdm

from lld.config import Eval, Rollout
from lld.data import questions_of_step
from lld.engine.engine import Engine
from lld.episode import Episode, Question
from lld.reward import score_episodes
from lld.rollout import Budgets, open_engine, rollout
from lld.running import crashbox, saving, sharding
from lld.running.run import Run
from lld.tools import Unplayed

# Largest share of a step's groups that may be dropped because a search found nothing. Dropping more would
# favour episodes that never search.
MAX_EMPTY_GROUPS = 0.5


def new_engine(run: Run, sampling: Rollout | Eval, keep_ids: bool = False) -> Engine:
    """Makes an engine with the temperature and top_p of training or of evaluation.

    It reads the policy's weights, or the rollout copy, which is updated here, rounded as rollout.weights says
    if it is to train on. Every process must call it.
    """
    models = run.models
    if models.rollout_copy is not None:
        weights = sampling.weights if isinstance(sampling, Rollout) else "trainer"
        sharding.refresh(models.rollout_copy, models.bare, run.accelerator.device, weights)
    lm = (models.rollout_copy or models.lm).eval()
    return open_engine(lm, run.tokenizer, run.cfg.rollout, sampling, keep_ids)


def play(run: Run, step: int) -> tuple[list[Episode], dict[str, float]]:
    """The episodes of a step, grouped by question, and the shares of groups that were dropped.

    The same on every process. A replay of a crash box reads both from the box. Raises Unplayed, on all
    processes.
    """
    cfg = run.cfg
    saving.enter_rollout(run, step)
    run.search.reset()  # an evaluation's searches are not the rollout's
    with sharding.optimizer_on_cpu(run.optimizer, cfg.optim.cpu_in_rollout):
        if run.box is None:
            played = draw_groups(run, step)
        else:
            played = replay(run, step)
    run.clock.lap("rollout")
    run.clock.search_s = run.search.reset()
    saving.enter_update(run)
    return played


def draw_groups(run: Run, step: int) -> tuple[list[Episode], dict[str, float]]:
    """Plays the questions of a step, and further ones while too few groups differ in reward.

    Dynamic sampling (DAPO, arXiv 2503.14476): up to rollout.extra_draws times, as many questions again. Kept
    are the first num_questions groups whose rewards differ by more than an overlong punishment, and where
    there are fewer, the first of the others as well; in the order in which they were drawn. Which questions
    are drawn is a pure function of seed, step and number of the draw, so that nothing about it is in a
    checkpoint. Raises Unplayed, on all processes, as `play_questions` and `check_empty` do.
    """
    cfg, asked, groups, failures, empty, rewards, mixed = run.cfg, [], [], [], [], [], []
    wanted, size = cfg.rollout.num_questions, cfg.rollout.group_size
    of_answers = dataclasses.replace(cfg.reward, overlong_max=0, overlong_cache=0)
    for draw in range(1 + cfg.rollout.extra_draws):
        questions = questions_of_step(run.questions, step, wanted, draw_seed(cfg.run.seed, draw))
        kept, failed, found_nothing = play_questions(run, questions, step, asked)
        asked += [question.id for question in questions]
        groups += [kept[start : start + size] for start in range(0, len(kept), size)]
        failures += failed
        empty += found_nothing
        if cfg.rollout.extra_draws:
            drawn = groups[len(rewards) :]
            rewards += [score_episodes(group, run.tokenizer, of_answers) for group in drawn]
            mixed = [place for place in range(len(groups)) if len(set(rewards[place])) > 1]
            if len(mixed) >= wanted:
                break
    check_empty(run, empty, len(asked), len(groups) * size)
    others = [place for place in range(len(groups)) if place not in mixed]
    places = sorted((mixed + others)[:wanted])
    row = {"failed_groups": len(failures) / len(asked), "empty_groups": len(empty) / len(asked)}
    if cfg.rollout.extra_draws:
        row["drawn_groups"] = len(asked) / wanted
    return [episode for place in places for episode in groups[place]], row


def draw_seed(seed: int, draw: int) -> int:
    """The seed of the stream of questions of a step's first (0: the run's own) or further draw."""
    if draw == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/draw {draw}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")


def play_questions(
    run: Run, questions: list[Question], step: int, asked: list[str]
) -> tuple[list[Episode], list[str], list[str]]:
    """Plays questions of a step; each process plays complete groups, of every num_processes-th question.

    Groups in which a search failed are dropped, and so are groups in which a search found nothing, unless
    `retriever.empty_results` is "show". Returns the episodes of the others, and why groups were dropped, as
    `sort_groups` does. Raises Unplayed, on all processes, if more groups failed than
    `rollout.max_failed_groups` allows.
    """
    if asked:  # a further draw begins: this process no longer waits for the others
        run.guard.phase("rollout", step)
    played, failure = play_own_groups(run, questions, step, asked)
    failures = [text for text in gather_object([failure]) if text]
    if failures:
        raise Unplayed(failures[0])
    groups = gather_groups(run, played, len(questions))
    run.clock.sampled_tokens += sum(episode.num_model_tokens for group in groups for episode in group)
    kept, failures, empty = sort_groups(groups)
    if len(failures) > run.cfg.rollout.max_failed_groups * len(questions):
        raise Unplayed(failures[0])
    return kept, failures, empty


def check_empty(run: Run, empty: list[str], num_groups: int, num_kept: int) -> None:
    """Raises Unplayed if searches that found nothing cost a step more than MAX_EMPTY_GROUPS of its groups.

    Or if they left fewer episodes (`num_kept`) than optim.updates_per_rollout. `empty`: one reason a group.
    """
    too_few_left = num_kept < run.cfg.optim.updates_per_rollout
    if len(empty) > MAX_EMPTY_GROUPS * num_groups or (empty and too_few_left):
        raise Unplayed(
            f"{len(empty)} of {num_groups} groups were dropped for a search without a passage "
            f"({empty[0]}, for one): mend the index, or set retriever.empty_results=show, "
            "which shows the model an empty block and which a resumed run may change"
        )


def play_own_groups(
    run: Run, questions: list[Question], step: int, asked: list[str]
) -> tuple[list[Episode], str | None]:
    """The episodes of this process's questions and None; or no episodes and why they could not be played.

    `asked`: ids of the questions that the step has asked before; one that is asked again gets new seeds.
    """
    cfg, accelerator = run.cfg, run.accelerator
    places = own_places(run, len(questions))
    ids = [question.id for question in questions]
    try:
        with (
            accelerator.autocast(),
            progress_bar(run, len(places) * cfg.rollout.group_size, "rollout") as progress,
        ):
            episodes = rollout(
                new_engine(run, cfg.rollout, keep_ids=cfg.loss.support == "kept"),
                run.tokenizer,
                [questions[place] for place in places],
                run.search,
                Budgets.of(cfg.rollout),
                num_samples=cfg.rollout.group_size,
                seed=cfg.run.seed,
                step=step,
                repeats=[(asked + ids[:place]).count(ids[place]) for place in places],
                max_failed_groups=int(cfg.rollout.max_failed_groups * len(questions)),
                empty_results=cfg.retriever.empty_results,
                overlap_search=cfg.rollout.overlap_search,
                progress=run.guard.ticks(progress),
            )
    except Unplayed as error:
        return [], str(error)
    return episodes, None


def own_places(run: Run, num_questions: int) -> range:
    """Indices of the questions that this process plays."""
    return range(run.accelerator.process_index, num_questions, run.accelerator.num_processes)


def gather_groups(run: Run, played: list[Episode], num_questions: int) -> list[list[Episode]]:
    """The groups that all processes played, in the order of the step's questions."""
    size = run.cfg.rollout.group_size
    own = [
        (place, played[i * size : (i + 1) * size]) for i, place in enumerate(own_places(run, num_questions))
    ]
    return [group for _, group in sorted(gather_object(own), key=lambda pair: pair[0])]


def sort_groups(groups: list[list[Episode]]) -> tuple[list[Episode], list[str], list[str]]:
    """Splits groups by whether their searches worked.

    Returns the episodes of the groups to keep, the reasons of groups with a failed search, and the reasons of
    groups with a search that found nothing.
    """
    kept, failures, empty = [], [], []
    for group in groups:
        reasons = {episode.stop_reason: episode.failure for episode in group if episode.failure}
        if "failed_search" in reasons:
            failures.append(reasons["failed_search"])
        elif reasons:
            empty.append(reasons["empty_search"])
        else:
            kept += group
    return kept, failures, empty


def replay(run: Run, step: int) -> tuple[list[Episode], dict[str, float]]:
    """What `play` returned at this step of the original run, read from the crash box."""
    vocabulary = run.models.lm.get_input_embeddings().num_embeddings
    episodes = crashbox.read_episodes(run.box, step, run.cfg.rollout.group_size, vocabulary)
    return episodes, crashbox.read_dropped(run.box, step)


def progress_bar(run: Run, total: int, what: str) -> tqdm:
    """A progress bar on a terminal only (`disable=None`): in a log file every redraw would be a line."""
    hidden = None if run.accelerator.is_main_process else True
    return tqdm(total=total, desc=what, leave=False, disable=hidden)
