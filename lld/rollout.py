"""The multi-turn state machine: engine + search -> episodes.

Up to `max_turns` turns that may search, then one last turn that cannot (Search-R1's `run_llm_loop`). A turn
that is neither a search nor an answer costs a turn and gets the protocol's corrective message.
"""

import hashlib
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Callable

from lld import protocol
from lld.engine.engine import Engine, Stopped
from lld.episode import Episode, Question, Turn
from lld.protocol import Passage
from lld.tools import RetrieverError

Search = Callable[[list[str]], list[list[Passage]]]


def episode_seed(seed: int, step: int, question_id: str, sample: int) -> int:
    """The seed of one episode's own generator: the same whatever the slots, the order or the number of
    processes."""
    digest = hashlib.blake2b(f"{seed}/{step}/{question_id}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def check_prompts(tokenizer, questions: list[Question], max_prompt_tokens: int) -> None:
    """Raises ValueError naming the first question whose prompt exceeds its budget (Search-R1 cuts it from the
    left)."""
    frame = len(protocol.encode_prompt(tokenizer, ""))
    for question in questions:
        if frame + len(question.text.encode()) <= max_prompt_tokens:  # no token holds less than a byte
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
    *,
    num_samples: int,
    seed: int,
    step: int,
    repeats: list[int] | None = None,
    max_turns: int,
    max_new_tokens: int,
    max_observation_tokens: int,
    max_episode_tokens: int,
    max_failed_groups: int = 0,
    empty_results: str = "drop",
    overlap_search: bool = False,
    progress: Callable[[int], None] | None = None,
) -> list[Episode]:
    """Plays `num_samples` episodes a question; returns them question by question.

    `repeats[i]` says how often question i was asked earlier in this step: a question asked twice is played
    anew.

    Searches of several episodes are sent together. With `overlap_search` they run in threads while other
    slots decode, so the order of events depends on the clock; without, the loop waits and a seed repeats
    every bit. A failed search never becomes text: its episodes end with `failure` set, and with more than
    `max_failed_groups` questions among them the RetrieverError is raised. A search that found nothing is
    shown as an empty block where `empty_results` is "show"; with "drop" its episode, and no other, ends with
    `failure` set and the stop reason "empty_search", which no limit counts.
    """
    budgets = (max_turns, max_new_tokens, max_observation_tokens, max_episode_tokens, max_failed_groups)
    talk = _Conversation(engine, tokenizer, *budgets, empty_results, progress)
    for index, question in enumerate(questions):
        prompt_ids = protocol.encode_prompt(tokenizer, question.text)
        for sample in range(num_samples):
            talk.episodes[index, sample] = Episode(question, sample, prompt_ids)
        asked = f"{question.id}@{repeats[index]}" if repeats and repeats[index] else question.id
        seeds = [episode_seed(seed, step, asked, sample) for sample in range(num_samples)]
        engine.add(index, prompt_ids, seeds, min(max_new_tokens, max_episode_tokens - len(prompt_ids)))
    pending: dict[Future, list[tuple]] = {}
    with ThreadPoolExecutor(max_workers=8 if overlap_search else 1) as pool:
        while engine.busy or talk.asking or pending:
            for stopped in engine.step() if engine.busy else ():
                talk.hear(stopped)
            # Many small prefills cost more than one; ask when a quarter of the slots would otherwise stand
            # still.
            if talk.asking and (overlap_search or 4 * len(talk.asking) >= engine.num_running):
                keys, queries = zip(*talk.asking)
                talk.asking = []
                if overlap_search:
                    pending[pool.submit(search, list(queries))] = list(keys)
                else:
                    talk.observe(keys, lambda: search(list(queries)))
            if pending:
                done, _ = wait(pending, timeout=None if not engine.busy else 0, return_when=FIRST_COMPLETED)
                for future in done:
                    talk.observe(pending.pop(future), future.result)
    return list(talk.episodes.values())


class _Conversation:
    """What has been said so far, in every episode of one rollout."""

    def __init__(
        self,
        engine,
        tokenizer,
        max_turns,
        max_new_tokens,
        max_observation_tokens,
        max_episode_tokens,
        max_failed_groups,
        empty_results,
        progress,
    ):
        self.engine, self.tokenizer, self.progress = engine, tokenizer, progress
        self.max_turns, self.max_new_tokens = max_turns, max_new_tokens
        self.max_observation_tokens, self.max_episode_tokens, self.max_failed_groups = (
            max_observation_tokens,
            max_episode_tokens,
            max_failed_groups,
        )
        self.empty_results, self.specials = empty_results, protocol.control_tokens(tokenizer, added=False)
        self.invalid_ids = tokenizer.encode(protocol.INVALID_ACTION, add_special_tokens=False)
        self.episodes: dict[tuple, Episode] = {}
        self.asking: list[tuple[tuple, str]] = []  # (key, query) not sent yet

    def hear(self, stopped: Stopped) -> None:
        """Records a turn the moment it was sampled, and decides what happens next."""
        episode = self.episodes[stopped.key]
        text = self.tokenizer.decode(
            stopped.token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        action = protocol.parse_action(text, self.specials)
        start = len(episode.token_ids)
        episode.token_ids += stopped.token_ids
        episode.logprobs += stopped.logprobs
        episode.action_ids += [len(episode.turns) + 1] * len(stopped.token_ids)
        end = len(episode.token_ids)
        tag_start = (
            end
            if action.kind == "invalid"
            else start + self._tokens_before(stopped.token_ids, protocol.tag_offset(text, action.kind))
        )
        episode.turns.append(Turn(start, end, end, action.kind, action.content, stopped.reason, tag_start))
        if action.kind == "answer":
            self._finish(stopped.key, "answer")
        elif len(episode.turns) > self.max_turns:
            self._finish(stopped.key, "turns")
        elif action.kind == "search":
            self.asking.append((stopped.key, action.content))
        else:
            self._reply(stopped.key, self.invalid_ids)

    def observe(self, keys: list[tuple], searched: Callable[[], list[list[Passage]]]) -> None:
        """Appends the passages found for each key's query, or ends the episodes whose search failed."""
        try:
            results = searched()
        except RetrieverError as error:
            for key in keys:
                self._fail(key, str(error))
            return
        assert len(keys) == len(results)
        for key, passages in zip(keys, results):
            turn = self.episodes[key].turns[-1]
            if not passages and self.empty_results == "drop":
                self.episodes[key].failure = f"the query {turn.content!r} found nothing"
                self._finish(key, "empty_search")
                continue
            observation_ids, turn.num_cut_passages = protocol.render_observation(
                self.tokenizer, passages, self.max_observation_tokens
            )
            turn.passages = tuple(
                protocol.shorten(passage, self.max_observation_tokens) for passage in passages
            )
            turn.searched = True
            self._reply(key, observation_ids)

    def _fail(self, key: tuple, reason: str) -> None:
        self.episodes[key].failure = reason
        self._finish(key, "failed_search")
        if (
            len({key[0] for key, episode in self.episodes.items() if episode.stop_reason == "failed_search"})
            > self.max_failed_groups
        ):
            raise RetrieverError(reason)

    def _reply(self, key: tuple, observation_ids: list[int]) -> None:
        episode = self.episodes[key]
        room = (
            self.max_episode_tokens - len(episode.prompt_ids) - len(episode.token_ids) - len(observation_ids)
        )
        if room <= 0:
            return self._finish(key, "length")
        episode.token_ids += observation_ids
        episode.action_ids += [0] * len(observation_ids)
        episode.logprobs += [0.0] * len(observation_ids)
        episode.turns[-1].observation_end = len(episode.token_ids)
        self.engine.extend(key, observation_ids, min(self.max_new_tokens, room))

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
            text = self.tokenizer.decode(
                token_ids[:middle], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            low, high = (middle, high) if len(text) <= offset else (low, middle - 1)
        return low
