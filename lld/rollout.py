"""The multi-turn state machine: engine + tools -> episodes.

Up to `max_turns` turns that may use a tool, then one last turn that cannot (Search-R1's `run_llm_loop`). A
turn that neither calls a tool nor answers costs a turn and gets the protocol's corrective message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lld import protocol
from lld.engine.engine import Engine, Stopped
from lld.episode import Episode, Question, Turn
from lld.tools import TOOLS, RetrieverError, Search

if TYPE_CHECKING:
    from lld import config
SEARCHES = 8  # calls at once


@dataclass(frozen=True)
class Budgets:
    """How long an episode may become, in turns and tokens (the options of the same names in `rollout`)."""

    max_turns: int  # turns that may use a tool; one more turn may only answer
    max_new_tokens: int  # written per turn
    max_observation_tokens: int  # read after each turn
    max_episode_tokens: int  # prompt, actions and observations together

    @classmethod
    def of(cls, options: config.Rollout, max_turns: int | None = None) -> Budgets:
        """The budgets of training; `max_turns` replaces its number of turns (evaluation has its own)."""
        return cls(
            max_turns=options.max_turns if max_turns is None else max_turns,
            max_new_tokens=options.max_new_tokens,
            max_observation_tokens=options.max_observation_tokens,
            max_episode_tokens=options.max_episode_tokens,
        )


def open_engine(
    lm, tokenizer, options: config.Rollout, sampling: config.Rollout | config.Eval, keep_ids: bool = False
) -> Engine:
    """An engine for rollouts of `lm`, with the temperature and top_p of `sampling`.

    min_p and top_k cut where these are the training's; evaluations have none.
    """
    cut = {"min_p": options.min_p, "top_k": options.top_k} if sampling is options else {}
    return Engine(
        lm,
        tokenizer,
        num_slots=options.num_slots,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        stop_strings=protocol.STOP_STRINGS,
        eos_ids=protocol.eos_ids(lm, tokenizer),
        cuda_graphs=options.cuda_graphs,
        max_tokens=options.max_episode_tokens,
        keep_ids=keep_ids,
        **cut,
    )


def episode_seed(seed: int, step: int, question_id: str, sample: int) -> int:
    """The seed of one episode's own generator.

    It does not depend on slots, on the order of episodes or on the number of processes. Torch's generator
    reads its low 32 bits.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{question_id}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def check_prompts(tokenizer, questions: list[Question], max_prompt_tokens: int) -> None:
    """Raises ValueError naming the first question whose prompt exceeds its budget.

    Search-R1 cuts such a prompt from the left.
    """
    frame = len(protocol.encode_prompt(tokenizer, ""))
    for question in questions:
        # Every token holds at least one byte, so a text this short need not be encoded.
        if frame + len(question.text.encode()) <= max_prompt_tokens:
            continue
        length = len(protocol.encode_prompt(tokenizer, question.text))
        if length > max_prompt_tokens:
            raise ValueError(
                f"question {question.id}: its prompt has {length} tokens, more than "
                f"rollout.max_prompt_tokens = {max_prompt_tokens}; raise the option or remove the question"
            )


def rollout(
    engine: Engine,
    tokenizer,
    questions: list[Question],
    search: Search,
    budgets: Budgets,
    *,
    num_samples: int,
    seed: int,
    step: int,
    repeats: list[int] | None = None,
    max_failed_groups: int = 0,
    empty_results: str = "drop",
    overlap_search: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[Episode]:
    """Plays `num_samples` episodes per question; returns them question by question.

    `repeats[i]` says how often question i was asked earlier in this step: a question asked twice gets new
    seeds. `progress` is called with 1 whenever an episode ends.

    Queries of several episodes are sent together. With `overlap_search` they run in threads while other slots
    decode, and the order of events depends on timing. Without it the loop waits for each call, and a seed
    reproduces every bit.

    Where `search` has a `luck` (retrieval/luck.py), some episodes, by their seeds, find random passages.

    A failed search is never shown to the model: its episodes end with `failure` set, and the RetrieverError
    is raised once more than `max_failed_groups` questions have such episodes. A query without results is
    shown as an empty block where `empty_results` is "show"; with "drop" only its own episode ends, with
    `failure` set and the stop reason "empty_search", which `max_failed_groups` does not count.
    """
    talk = _Conversations(engine, tokenizer, search, budgets, max_failed_groups, empty_results, progress)
    for index, question in enumerate(questions):
        asked = f"{question.id}@{repeats[index]}" if repeats and repeats[index] else question.id
        talk.begin(index, question, [episode_seed(seed, step, asked, n) for n in range(num_samples)])
    pending: dict[Future, list[tuple]] = {}
    pool = ThreadPoolExecutor(SEARCHES, "search")
    try:
        while engine.busy or talk.asking or pending:
            for stopped in engine.step() if engine.busy else ():
                talk.hear(stopped)
            # Many small prefills cost more than one large one: without overlap, queries wait until their
            # episodes are a quarter of the running ones.
            ready = len(pending) < SEARCHES if overlap_search else 4 * len(talk.asking) >= engine.num_active
            for keys, call in talk.take_calls() if ready else ():
                if overlap_search:
                    pending[pool.submit(call)] = keys
                else:
                    talk.observe(keys, call)
            if pending:
                done, _ = wait(pending, timeout=None if not engine.busy else 0, return_when=FIRST_COMPLETED)
                for future in done:
                    talk.observe(pending.pop(future), future.result)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after an error some may hang
    return list(talk.episodes.values())


class _Conversations:
    """The state of all episodes of one rollout."""

    def __init__(
        self, engine, tokenizer, search, budgets: Budgets, max_failed_groups, empty_results, progress
    ):
        self.engine = engine
        self.tokenizer = tokenizer
        self.search = search
        self.luck = getattr(search, "luck", None)
        self.seeds: dict[tuple, int] = {}
        self.budgets = budgets
        self.max_failed_groups = max_failed_groups
        self.empty_results = empty_results
        self.progress = progress
        self.specials = protocol.control_tokens(tokenizer, added=False)
        self.invalid_ids = tokenizer.encode(protocol.INVALID_ACTION, add_special_tokens=False)
        self.episodes: dict[tuple, Episode] = {}
        # (key, kind of tool, query) of calls not made yet
        self.asking: list[tuple[tuple, str, str]] = []

    def begin(self, index: int, question: Question, seeds: list[int]) -> None:
        """Starts the episodes of a question, one per seed."""
        prompt_ids = protocol.encode_prompt(self.tokenizer, question.text)
        for sample, seed in enumerate(seeds):
            unlucky = self.luck is not None and self.luck.fails(seed)
            self.episodes[index, sample] = Episode(question, sample, prompt_ids, unlucky=unlucky)
            self.seeds[index, sample] = seed
        room = self.budgets.max_episode_tokens - len(prompt_ids)
        self.engine.add(index, prompt_ids, seeds, min(self.budgets.max_new_tokens, room))

    def hear(self, stopped: Stopped) -> None:
        """Records a sampled turn; ends the episode, sends the corrective message or queues a call."""
        episode = self.episodes[stopped.key]
        text = protocol.decode(self.tokenizer, stopped.token_ids)
        action = protocol.parse_action(text, self.specials)
        start = len(episode.token_ids)
        episode.token_ids += stopped.token_ids
        episode.logprobs += stopped.logprobs
        episode.kept_ids += stopped.kept_ids
        episode.kept_counts += stopped.kept_counts
        episode.action_ids += [len(episode.turns) + 1] * len(stopped.token_ids)
        end = len(episode.token_ids)
        tag_start = end
        if action.kind != "invalid":
            offset = protocol.tag_offset(text, action.kind)
            tag_start = start + self._tokens_before(stopped.token_ids, offset)
        episode.turns.append(Turn(start, end, end, action.kind, action.content, stopped.reason, tag_start))
        if action.kind == "answer":
            self._finish(stopped.key, "answer")
        elif len(episode.turns) > self.budgets.max_turns:
            self._finish(stopped.key, "turns")
        elif action.kind == "invalid":
            self._reply(stopped.key, self.invalid_ids)
        elif action.kind in TOOLS:
            self.asking.append((stopped.key, action.kind, action.content))
        else:
            raise ValueError(f"no tool for an action of kind {action.kind!r}: add it to lld.tools.TOOLS")

    def take_calls(self) -> list[tuple[list[tuple], Callable[[], list[list]]]]:
        """Empties the queue of queries; returns one call per tool, with the keys of its episodes."""
        calls = []
        for kind, tool in TOOLS.items():
            asked = [(key, query) for key, kind_asked, query in self.asking if kind_asked == kind]
            for unlucky in (False, True):
                some = [(key, query) for key, query in asked if self.episodes[key].unlucky is unlucky]
                if some:
                    keys, queries = map(list, zip(*some, strict=True))
                    search = partial(self.miss, keys) if unlucky else self.search
                    calls.append((keys, partial(tool.run, queries, search)))
        self.asking = []
        return calls

    def miss(self, keys: list[tuple], queries: list[str]) -> list[list[protocol.Passage]]:
        """What the queries of unlucky episodes find; takes the place of the search function."""
        found = []
        for key, query in zip(keys, queries, strict=True):
            episode = self.episodes[key]
            answers = episode.question.golden_answers
            found.append(self.luck.find(query, self.seeds[key], len(episode.turns), answers))
        return found

    def observe(self, keys: list[tuple], call: Callable[[], list[list]]) -> None:
        """Makes the call; appends the results for each key's query, or ends the episodes if it failed."""
        try:
            found = call()
        except RetrieverError as error:
            error.__traceback__ = None  # a future keeps the error, and its frames the engine
            for key in keys:
                self._fail(key, str(error))
            return
        for key, results in zip(keys, found, strict=True):
            turn = self.episodes[key].turns[-1]
            if not results and self.empty_results == "drop":
                self.episodes[key].failure = f"the query {turn.content!r} found nothing"
                self._finish(key, "empty_search")
                continue
            limit = self.budgets.max_observation_tokens
            observation_ids, turn.num_cut_passages = protocol.render_observation(
                self.tokenizer, results, limit, turn.kind
            )
            if turn.kind == "search":
                turn.passages = tuple(protocol.shorten(passage, limit) for passage in results)
                turn.searched = True
            self._reply(key, observation_ids)

    def _fail(self, key: tuple, reason: str) -> None:
        self.episodes[key].failure = reason
        self._finish(key, "failed_search")
        failed = {key[0] for key, e in self.episodes.items() if e.stop_reason == "failed_search"}
        if len(failed) > self.max_failed_groups:
            raise RetrieverError(reason)

    def _reply(self, key: tuple, observation_ids: list[int]) -> None:
        episode = self.episodes[key]
        length = len(episode.prompt_ids) + len(episode.token_ids) + len(observation_ids)
        room = self.budgets.max_episode_tokens - length
        if room <= 0:
            return self._finish(key, "length")
        episode.token_ids += observation_ids
        episode.action_ids += [0] * len(observation_ids)
        episode.logprobs += [0.0] * len(observation_ids)
        episode.kept_counts += [0] * len(observation_ids) if episode.kept_counts else []
        episode.turns[-1].observation_end = len(episode.token_ids)
        self.engine.extend(key, observation_ids, min(self.budgets.max_new_tokens, room))

    def _finish(self, key: tuple, reason: str) -> None:
        self.episodes[key].stop_reason = reason
        self.engine.release(key)
        if self.progress is not None:
            self.progress(1)

    def _tokens_before(self, token_ids: list[int], offset: int) -> int:
        """How many tokens lie wholly before character `offset` of the turn's text."""
        low, high = 0, len(token_ids)
        while low < high:
            middle = (low + high + 1) // 2
            # Without an incomplete last character, which byte-fallback decoders show as one U+FFFD a byte.
            text = protocol.decode(self.tokenizer, token_ids[:middle]).rstrip("\ufffd")
            low, high = (middle, high) if len(text) <= offset else (low, middle - 1)
        return low
