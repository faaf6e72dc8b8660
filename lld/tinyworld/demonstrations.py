"""Demonstrations for the warm start: episodes with searches and answers, some of them with mistakes."""

import random
from pathlib import Path

from lld import config, protocol
from lld.tinyworld.policy import EOS
from lld.tinyworld.templates import FILLERS, FIRST_THOUGHTS, FOUND_THOUGHTS, NEXT_THOUGHTS, RETRY_THOUGHTS
from lld.tinyworld.world import Entity, TinyQuestion, follow

# The chances of mistakes. They leave room to learn: after the warm start, sampled EM is about 0.4.
EARLY_ANSWER = 0.35  # after the first of two hops
WRONG_QUERY = 0.15
RAMBLE = 0.15  # filler words in a thought
MALFORMED = 0.05  # an action without tags
WRONG_ANSWER = 0.12
WRONG_AFTER_SLIP = 0.6  # instead of WRONG_ANSWER, after a wrong query or rambling, even if noticed
TRUNCATED_ANSWER = 0.2  # one word of the answer


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

    def __init__(self, rng: random.Random, world: list[Entity], seen_by: dict, clumsy: bool, num_hops: int):
        self.rng = rng
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

    def choose(self, templates: tuple[str, ...], **values: str) -> str:
        return self.rng.choice(templates).format(**values)

    def act(self, thought: str, tag: str, content: str, hop: int) -> None:
        """Writes one action, rambling or malformed first if that was drawn for this hop."""
        if hop == self.ramble_at:
            thought = " ".join([thought, *self.rng.choices(FILLERS, k=self.rng.randint(6, 16))])
        if hop == self.malformed_at and not any(kind == "invalid" for kind, _ in self.turns):
            self.turns.append(("action", f"<think> {thought} </think> {content}{EOS}"))
            self.turns.append(("invalid", ""))
        self.turns.append(("action", f"<think> {thought} </think> <{tag}> {content} </{tag}>"))
        if tag == "search":
            self.turns.append(("search", content))
            self.seen = self.seen_by[content]

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
            if hop + 1 < len(path):
                thought += self.choose(NEXT_THOUGHTS, relation=path[hop + 1])
        return thought, len(path)

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


def demonstrate(
    rng: random.Random,
    world: list[Entity],
    question: TinyQuestion,
    seen_by: dict[str, list[int]],
    clumsy: bool = True,
) -> list[tuple[str, str]]:
    """One episode after the prompt as ("action" | "search" | "invalid", text) pairs.

    "search" holds the query whose observation follows. `seen_by` maps a query to the entities whose passages
    it finds. With `clumsy` it makes mistakes at the rates above, else none.
    """
    met = follow(world, question.entity, question.path)
    num_hops = len(question.path)
    writer = _Demonstrator(rng, world, seen_by, clumsy, num_hops)
    thought, num_found = writer.search_path(met, question.path)
    slipped = writer.ramble_at >= 0 or writer.wrong_query_at >= 0
    gold = met[-1]
    if num_found < num_hops or writer.chance(WRONG_AFTER_SLIP if slipped else WRONG_ANSWER):
        gold = writer.wrong_answer(gold)
        subject = met[-2] if num_found == num_hops else met[0]
        values = {"title": writer.name(subject), "value": writer.name(gold)}
        thought = writer.choose(FOUND_THOUGHTS, relation=question.path[-1], **values)
    answer = writer.name(gold)
    if writer.chance(TRUNCATED_ANSWER):
        answer = rng.choice(answer.split())
    writer.act(thought, "answer", answer, num_hops)
    return writer.turns


def render_demonstration(
    tokenizer, question: str, turns: list[tuple[str, str]], observation_ids: dict[str, list[int]]
) -> tuple[list[int], list[bool]]:
    """Token ids of a whole episode, as in a rollout, and which of them the model writes."""
    pieces = [(protocol.encode_prompt(tokenizer, question), False)]
    for kind, text in turns:
        if kind == "action":
            pieces.append((tokenizer.encode(text, add_special_tokens=False), True))
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
) -> tuple[list[tuple[list[int], list[bool]]], dict[str, int]]:
    """`count` rendered demonstrations over `questions`, and the tokens of the longest flawless ones.

    The lengths are those of the longest prompt, turn, observation and episode when no mistake is made.
    """
    rng = random.Random(f"demonstrations {seed}")
    found = search_all(corpus, all_queries(world), topk)
    seen_by = {query: [int(passage.id) for passage in row] for query, row in found.items()}
    observation_ids = {
        query: protocol.render_observation(tokenizer, row, 1_000_000)[0] for query, row in found.items()
    }
    longest = dict.fromkeys(("prompt", "turn", "observation", "episode"), 0)
    for question in questions:
        turns = demonstrate(rng, world, question, seen_by, clumsy=False)
        lengths = _measure_episode(tokenizer, question, turns, observation_ids)
        longest = {what: max(longest[what], lengths[what]) for what in longest}
    observation_ids[""] = tokenizer.encode(protocol.INVALID_ACTION, add_special_tokens=False)
    demonstrations = []
    for number in range(count):
        question = questions[number % len(questions)]
        turns = demonstrate(rng, world, question, seen_by)
        demonstrations.append(render_demonstration(tokenizer, question.text, turns, observation_ids))
    return demonstrations, longest


def _measure_episode(
    tokenizer, question: TinyQuestion, turns: list[tuple[str, str]], observation_ids: dict[str, list[int]]
) -> dict[str, int]:
    """Tokens of an episode, of its prompt, its longest turn and its longest observation."""
    actions = [tokenizer.encode(text, add_special_tokens=False) for kind, text in turns if kind == "action"]
    observations = [observation_ids[text] for kind, text in turns if kind == "search"]
    episode, _ = render_demonstration(tokenizer, question.text, turns, observation_ids)
    return {
        "prompt": len(protocol.encode_prompt(tokenizer, question.text)),
        "turn": max(map(len, actions)),
        "observation": max(map(len, observations)),
        "episode": len(episode),
    }
