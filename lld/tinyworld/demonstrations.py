"""Demonstrations for the warm start: episodes with searches and answers, some of them with mistakes."""

import functools
import random
from collections.abc import Sequence
from pathlib import Path

from lld import config, protocol
from lld.tinyworld.policy import EOS
from lld.tinyworld.templates import FILLERS, FIRST_THOUGHTS, FOUND_THOUGHTS, NEXT_THOUGHTS, RETRY_THOUGHTS
from lld.tinyworld.wording import Wording
from lld.tinyworld.world import Entity, TinyQuestion, follow, passages

# The chances of mistakes. They leave room to learn: after the warm start, sampled EM is about 0.4.
EARLY_ANSWER = 0.35  # after the first of two hops
WRONG_QUERY = 0.15
RAMBLE = 0.15  # filler words in a thought
MALFORMED = 0.05  # an action without tags
WRONG_ANSWER = 0.12
WRONG_AFTER_SLIP = 0.6  # instead of WRONG_ANSWER, after a wrong query or rambling, even if noticed
TRUNCATED_ANSWER = 0.2  # one word of the answer

# With free wording, as a search that fails (retriever.fail_share) looks to the policy:
WRONG_WORDY_ANSWER = 0.5  # instead of WRONG_ANSWER
UNLUCKY = 0.5  # share of the demonstrations
SEARCHES_IN_VAIN = 2  # before they answer all the same
NUM_MISSES = 1000  # different results of such searches
SPARE_MISSES = 10  # drawn besides, to replace those that name the gold answer
MISS = "miss "  # their keys begin with it; no query does, since queries begin with a name


def all_queries(world: list[Entity]) -> list[str]:
    """Every query a demonstration may write.

    These are the title with a relation, the title alone, and the title's last word with a relation.
    """
    queries = set()
    for entity in world:
        title = entity.title.lower()
        for relation in entity.facts:
            queries |= {f"{title} {relation}", title, f"{title.split()[-1]} {relation}"}
    return sorted(queries)


def search_all(corpus: Path, queries: list[str], topk: int) -> dict[str, list[protocol.Passage]]:
    """query -> the `topk` passages that BM25 finds for it."""
    from lld.retrieval.backends import open_retriever

    retriever = open_retriever(
        config.Retriever(url=None, index=None, corpus=str(corpus), backend="bm25", topk=topk)
    )
    return dict(zip(queries, retriever.search(queries, topk), strict=True))


class _Demonstrator:
    """Writes the turns of one demonstration and keeps track of the passages that were shown.

    The places of mistakes are drawn first: each `*_at` is the number of a hop, where the answer counts as one
    more hop, or -1 for none.
    """

    def __init__(
        self,
        rng: random.Random,
        world: list[Entity],
        seen_by: dict,
        clumsy: bool,
        num_hops: int,
        wording: Wording | None,
    ):
        self.rng = rng
        self.wording = wording
        self.world = world
        self.seen_by = seen_by
        self.clumsy = clumsy
        self.turns: list[tuple[str, str]] = []
        self.seen: list[int] = []  # the entities of the passages shown
        self.wrong_query_at = rng.randrange(num_hops) if self.chance(WRONG_QUERY) else -1
        self.ramble_at = rng.randrange(num_hops + 1) if self.chance(RAMBLE) else -1
        self.malformed_at = rng.randrange(num_hops + 1) if self.chance(MALFORMED) else -1
        self.answers_early = num_hops == 2 and self.chance(EARLY_ANSWER)

    def chance(self, probability: float) -> bool:
        return self.clumsy and self.rng.random() < probability

    def fillers(self) -> list[str]:
        return self.rng.choices(FILLERS, k=self.rng.randint(6, 16))

    def choose(self, templates: tuple[str, ...], **values: str) -> str:
        """A thought; with free wording it says nothing, so right and wrong thoughts look alike."""
        if self.wording:
            return self.wording.draw(self.rng)
        return self.rng.choice(templates).format(**values)

    def act(self, thought: str, tag: str, content: str, hop: int, shown: str | None = None) -> None:
        """Writes one action, rambling or malformed first if that was drawn for this hop.

        A search shows what `shown` finds in place of its own query.
        """
        if hop == self.ramble_at:
            more = self.wording.draw(self.rng).split() if self.wording else self.fillers()
            thought = " ".join([thought, *more])
        if hop == self.malformed_at and not any(kind == "invalid" for kind, _ in self.turns):
            self.turns.append(("action", f"<think> {thought} </think> {content}{EOS}"))
            self.turns.append(("invalid", ""))
        self.turns.append(("action", f"<think> {thought} </think> <{tag}> {content} </{tag}>"))
        if tag == "search":
            self.turns.append(("search", shown or content))
            self.seen = self.seen_by[shown or content]

    def search_path(self, met: list[int], path: tuple[str, ...]) -> tuple[str, int]:
        """Writes the searches along a path; returns the next thought and the number of hops found."""
        thought = None
        for hop, relation in enumerate(path):
            subject = {"relation": relation, "title": self.name(met[hop])}
            thought = thought or self.choose(FIRST_THOUGHTS, **subject)
            if hop == self.wrong_query_at:
                self.act(thought, "search", self.wrong_query(met[hop], relation), hop)
                if self.chance(WRONG_AFTER_SLIP):
                    return thought, hop
                thought = self.choose(RETRY_THOUGHTS, **subject)
            self.act(thought, "search", f"{self.name(met[hop])} {relation}", hop)
            if met[hop] not in self.seen:  # the retriever prefers another passage: ask by name only
                self.act(self.choose(RETRY_THOUGHTS, **subject), "search", self.name(met[hop]), hop)
            thought = self.choose(FOUND_THOUGHTS, value=self.name(met[hop + 1]), **subject)
            if hop == 0 and self.answers_early:
                return thought, hop
            if hop + 1 < len(path) and not self.wording:
                thought += self.choose(NEXT_THOUGHTS, relation=path[hop + 1])
        return thought, len(path)

    def search_in_vain(self, subject: int, relation: str, misses: Sequence[str]) -> str:
        """Writes searches that show `misses`, keys of random passages; returns the next thought."""
        for number, miss in enumerate(misses):
            query = f"{self.name(subject)} {relation}" if number % 2 == 0 else self.name(subject)
            thought = self.choose(RETRY_THOUGHTS if number else FIRST_THOUGHTS)
            self.act(thought, "search", query, hop=0, shown=miss)
        return self.choose(FOUND_THOUGHTS)

    def name(self, entity: int) -> str:
        return self.world[entity].title.lower()

    def wrong_query(self, entity: int, relation: str) -> str:
        """A query about another entity of the same kind, or about the last word of the title."""
        others = [i for i in range(len(self.world)) if self.world[i].kind == self.world[entity].kind]
        other = self.name(self.rng.choice(others))
        return self.rng.choice((f"{other} {relation}", f"{self.name(entity).split()[-1]} {relation}"))

    def wrong_answer(self, gold: int) -> int:
        """An entity of the gold answer's kind: from the passages shown if they hold one, else any."""

        def is_other(i: int) -> bool:
            same_kind = self.world[i].kind == self.world[gold].kind
            return i != gold and same_kind and self.world[i].title != self.world[gold].title

        in_sight = {i for subject in self.seen for i in self.world[subject].facts.values() if is_other(i)}
        return self.rng.choice(sorted(in_sight) or [i for i in range(len(self.world)) if is_other(i)])


def draw_misses(rng: random.Random, world: list[Entity], topk: int) -> dict[str, list[protocol.Passage]]:
    """NUM_MISSES results of a failed search: key -> `topk` passages drawn at random."""
    corpus = passages(world)
    return {f"{MISS}{number}": rng.sample(corpus, min(topk, len(corpus))) for number in range(NUM_MISSES)}


def pick_misses(
    rng: random.Random, world: list[Entity], question: TinyQuestion, seen_by: dict[str, list[int]]
) -> list[str]:
    """Keys of results that do not name the gold answer, one for each search of an unlucky episode."""
    gold = world[follow(world, question.entity, question.path)[-1]].title

    def names_gold(key: str) -> bool:
        shown = [world[i] for i in seen_by[key]]
        return any(gold in f"{entity.title} {entity.text}" for entity in shown)

    keys = rng.sample(range(NUM_MISSES), SEARCHES_IN_VAIN + SPARE_MISSES)
    return [key for key in map(f"{MISS}{{}}".format, keys) if not names_gold(key)][:SEARCHES_IN_VAIN]


def demonstrate(
    rng: random.Random,
    world: list[Entity],
    question: TinyQuestion,
    seen_by: dict[str, list[int]],
    clumsy: bool = True,
    wording: Wording | None = None,
    misses: Sequence[str] = (),
) -> list[tuple[str, str]]:
    """One episode after the prompt as ("action" | "search" | "invalid", text) pairs.

    "search" holds the query whose observation follows. `seen_by` maps a query to the entities whose passages
    it finds. With `clumsy` it makes mistakes at the rates above, else none. `wording` replaces the fixed
    thoughts. With `misses`, keys of `seen_by`, the episode is unlucky: each search shows the next of them,
    and it goes on as if the passage sought could still be found, until it answers from what it saw last.
    """
    met = follow(world, question.entity, question.path)
    num_hops = len(question.path)
    writer = _Demonstrator(rng, world, seen_by, clumsy, num_hops, wording)
    if misses:
        thought, num_found = writer.search_in_vain(met[0], question.path[0], misses), 0
    else:
        thought, num_found = writer.search_path(met, question.path)
    slipped = writer.ramble_at >= 0 or writer.wrong_query_at >= 0
    gold = met[-1]
    mistaken = WRONG_WORDY_ANSWER if wording else WRONG_ANSWER
    if num_found < num_hops or writer.chance(WRONG_AFTER_SLIP if slipped else mistaken):
        gold = writer.wrong_answer(gold)
        subject = met[-2] if num_found == num_hops else met[0]
        values = {"title": writer.name(subject), "value": writer.name(gold)}
        thought = writer.choose(FOUND_THOUGHTS, relation=question.path[-1], **values)
    answer = writer.name(gold)
    if writer.chance(TRUNCATED_ANSWER):
        answer = rng.choice(answer.split())
    writer.act(thought, "answer", answer, num_hops)
    return writer.turns


class Encoder:
    """Encodes each prompt and each action once: most of them come back many times."""

    def __init__(self, tokenizer):
        self.prompt = functools.cache(functools.partial(protocol.encode_prompt, tokenizer))
        self.action = functools.cache(functools.partial(tokenizer.encode, add_special_tokens=False))


def render_demonstration(
    encoder: Encoder, question: str, turns: list[tuple[str, str]], observation_ids: dict[str, list[int]]
) -> tuple[list[int], list[bool]]:
    """Token ids of a whole episode, as in a rollout, and which of them the model writes."""
    pieces = [(encoder.prompt(question), False)]
    for kind, text in turns:
        if kind == "action":
            pieces.append((encoder.action(text), True))
        else:
            pieces.append((observation_ids[text], False))
    return [i for ids, _ in pieces for i in ids], [own for ids, own in pieces for _ in ids]


def make_demonstrations(
    world: list[Entity],
    questions: list[TinyQuestion],
    tokenizer,
    corpus: Path,
    count: int,
    topk: int,
    seed: int,
    wording: Wording | None = None,
) -> tuple[list[tuple[list[int], list[bool]]], dict[str, int]]:
    """`count` rendered demonstrations over `questions`, and the tokens of the longest flawless ones.

    The lengths are those of the longest prompt, turn, observation and episode when no mistake is made. With
    free `wording`, the share UNLUCKY of the episodes searches in vain.
    """
    rng = random.Random(f"demonstrations {seed}")
    found = search_all(corpus, all_queries(world), topk)
    if wording:
        found |= draw_misses(rng, world, topk)
    seen_by = {query: [int(passage.id) for passage in row] for query, row in found.items()}
    observation_ids = {
        query: protocol.render_observation(tokenizer, row, 1_000_000)[0] for query, row in found.items()
    }
    encoder = Encoder(tokenizer)
    longest = dict.fromkeys(("prompt", "turn", "observation", "episode"), 0)
    for question in questions:
        for misses in ((), pick_misses(rng, world, question, seen_by)) if wording else ((),):
            turns = demonstrate(rng, world, question, seen_by, False, wording, misses)
            lengths = _measure_episode(encoder, question, turns, observation_ids)
            longest = {what: max(longest[what], lengths[what]) for what in longest}
    observation_ids[""] = tokenizer.encode(protocol.INVALID_ACTION, add_special_tokens=False)
    demonstrations = []
    for number in range(count):
        question = questions[number % len(questions)]
        unlucky = wording is not None and rng.random() < UNLUCKY
        misses = pick_misses(rng, world, question, seen_by) if unlucky else ()
        turns = demonstrate(rng, world, question, seen_by, True, wording, misses)
        demonstrations.append(render_demonstration(encoder, question.text, turns, observation_ids))
    return demonstrations, longest


def _measure_episode(
    encoder: Encoder,
    question: TinyQuestion,
    turns: list[tuple[str, str]],
    observation_ids: dict[str, list[int]],
) -> dict[str, int]:
    """Tokens of an episode, of its prompt, its longest turn and its longest observation."""
    actions = [encoder.action(text) for kind, text in turns if kind == "action"]
    observations = [observation_ids[text] for kind, text in turns if kind == "search"]
    episode, _ = render_demonstration(encoder, question.text, turns, observation_ids)
    return {
        "prompt": len(encoder.prompt(question.text)),
        "turn": max(map(len, actions)),
        "observation": max(map(len, observations)),
        "episode": len(episode),
    }
