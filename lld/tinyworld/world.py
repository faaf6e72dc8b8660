"""The tiny world: made-up entities and facts, one passage for each entity, and questions over them.

It exercises every part of the project in minutes on two CPU cores, through the same files as a real run. Its
numbers illustrate the mechanism; they are not evidence about models of real size.
"""

import math
import random
from dataclasses import dataclass

from lld import config, protocol
from lld.tinyworld.templates import (
    BRIDGES,
    CITY_PREFIXES,
    COMPANY_SUFFIXES,
    PASSAGES,
    QUESTIONS,
    template_words,
)

HELD_OUT_SHARE = 0.15

RELATIONS = {
    "person": ("birthplace", "employer"),
    "company": ("founder", "base"),
    "city": ("country",),
    "country": ("capital", "language"),
    "language": (),
}
LEADS_TO = {
    "birthplace": "city",
    "employer": "company",
    "founder": "person",
    "base": "city",
    "country": "country",
    "capital": "city",
    "language": "language",
}
TWO_HOPS = tuple(
    (kind, (first, second))
    for kind in RELATIONS
    for first in RELATIONS[kind]
    if first in BRIDGES
    for second in RELATIONS[LEADS_TO[first]]
)


@dataclass(frozen=True)
class Entity:
    """The subject of one passage.

    `facts` maps a relation to the index of the entity it leads to. Languages have no facts and no passage.
    """

    kind: str
    title: str
    facts: dict[str, int]
    text: str = ""


@dataclass(frozen=True)
class TinyQuestion:
    """A question, the index of its entity and the relations that lead from there to the gold answer."""

    text: str
    entity: int
    path: tuple[str, ...]


def invent_words(rng: random.Random, count: int, taken: set[str]) -> list[str]:
    """`count` new pronounceable words, none of them in `taken`, to which they are added."""
    words = []
    while len(words) < count:
        syllables = [rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.choice((2, 2, 3)))]
        word = "".join(syllables) + rng.choice(("", "l", "n", "r", "s", "t"))
        if word not in taken:
            taken.add(word)
            words.append(word.capitalize())
    return words


def _invent_titles(rng: random.Random, cfg: config.TinyWorld) -> dict[str, list[str]]:
    """Titles by kind.

    First and last names, city stems and company names share words, so that searches find distractors.
    """
    taken = set(template_words())
    scale = math.sqrt(cfg.num_people / 160)
    first_names = invent_words(rng, math.ceil(32 * scale), taken)
    last_names = invent_words(rng, math.ceil(48 * scale), taken)
    num_cities, num_companies, num_countries = (max(6, round(n * scale)) for n in (36, 30, 12))
    num_pairs = round(cfg.namesake_share * cfg.num_people / 2)
    people = rng.sample([f"{a} {b}" for a in first_names for b in last_names], cfg.num_people - num_pairs)
    stems = invent_words(rng, math.ceil(0.75 * num_cities), taken)
    two_words = rng.sample([f"{a} {b}" for a in CITY_PREFIXES for b in stems], num_cities // 2)
    return {
        "person": people + people[:num_pairs],
        "company": rng.sample([f"{a} {b}" for a in last_names for b in COMPANY_SUFFIXES], num_companies),
        "city": rng.sample(stems, num_cities - len(two_words)) + two_words,
        "country": invent_words(rng, num_countries, taken),
        "language": invent_words(rng, num_countries, taken),
    }


def make_world(cfg: config.TinyWorld) -> list[Entity]:
    """All entities, a pure function of `cfg`; an entity's index is its passage's id.

    `namesake_share` of the people come in pairs with the same title and different facts, and questions ask
    about both: no policy can know which one is meant.
    """
    rng = random.Random(f"world {cfg.seed}")
    titles = _invent_titles(rng, cfg)
    flat = [(kind, title) for kind in titles for title in titles[kind]]
    of_kind = {kind: [i for i, (k, _) in enumerate(flat) if k == kind] for kind in titles}
    country_of = _place_cities(rng, of_kind)
    facts = [_draw_facts(rng, kind, of_kind) for kind, _ in flat]
    for city, country in country_of.items():
        facts[city]["country"] = country
    for country in of_kind["country"]:
        cities = [city for city in sorted(country_of) if country_of[city] == country]
        facts[country]["capital"] = rng.choice(cities)
    namesakes = {}
    for person in of_kind["person"]:
        first = namesakes.setdefault(flat[person][1], person)
        while first != person and _share_a_fact(facts[first], facts[person]):
            facts[person] = _draw_facts(rng, "person", of_kind)
    world = []
    for (kind, title), fact in zip(flat, facts, strict=True):
        named = {relation: flat[index][1] for relation, index in fact.items()}
        text = rng.choice(PASSAGES[kind]).format(title=title, **named) if fact else ""
        world.append(Entity(kind, title, fact, text))
    return world


def _place_cities(rng: random.Random, of_kind: dict[str, list[int]]) -> dict[int, int]:
    """city -> country, at random, with at least one city in every country."""
    cities = rng.sample(of_kind["city"], len(of_kind["city"]))
    countries = of_kind["country"]
    first = dict(zip(cities, countries, strict=False))
    return first | {city: rng.choice(countries) for city in cities[len(countries) :]}


def _draw_facts(rng: random.Random, kind: str, of_kind: dict[str, list[int]]) -> dict[str, int]:
    return {relation: rng.choice(of_kind[LEADS_TO[relation]]) for relation in RELATIONS[kind]}


def _share_a_fact(facts: dict[str, int], others: dict[str, int]) -> bool:
    return any(facts[relation] == others[relation] for relation in facts)


def passages(world: list[Entity]) -> list[protocol.Passage]:
    """One passage for each entity with facts; its id is the entity's index.

    Its contents are '"Title"\\ntext', the format of Search-R1's wiki-18.
    """
    return [
        protocol.Passage(str(i), f'"{entity.title}"\n{entity.text}')
        for i, entity in enumerate(world)
        if entity.facts
    ]


def follow(world: list[Entity], entity: int, path: tuple[str, ...]) -> list[int]:
    """The entities met on `path`, `entity` first and the gold answer last."""
    met = [entity]
    for relation in path:
        met.append(world[met[-1]].facts[relation])
    return met


def make_questions(
    world: list[Entity], cfg: config.TinyWorld
) -> tuple[list[TinyQuestion], list[TinyQuestion]]:
    """Training and held-out questions, disjoint in (title, path).

    `two_hop_share` of the paths have two hops. Each path is asked in one or two wordings.
    """
    rng = random.Random(f"questions {cfg.seed}")
    one = [(i, (relation,)) for i, entity in enumerate(world) for relation in entity.facts]
    two = [(i, path) for i, entity in enumerate(world) for kind, path in TWO_HOPS if kind == entity.kind]
    # Paths that lead back to their start are left out, such as from a capital to its country's capital.
    two = [(i, path) for i, path in two if follow(world, i, path)[-1] != i]
    shares = ((one, 1 - cfg.two_hop_share), (two, cfg.two_hop_share))
    total = min(len(keys) / share if share > 0 else math.inf for keys, share in shares)
    keys = [key for keys, share in shares for key in rng.sample(keys, round(total * share))]
    named = sorted({(world[i].title, path) for i, path in keys})
    held_out = set(rng.sample(named, round(HELD_OUT_SHARE * len(named))))
    split = ([], [])
    for entity, path in keys:
        title = world[entity].title
        subjects = [title] if len(path) == 1 else [bridge.format(title) for bridge in BRIDGES[path[0]]]
        texts = [template.format(subject) for template in QUESTIONS[path[-1]] for subject in subjects]
        side = split[(title, path) in held_out]
        side.extend(TinyQuestion(text, entity, path) for text in rng.sample(texts, rng.choice((1, 2))))
    for side in split:
        rng.shuffle(side)
    return split


def question_row(world: list[Entity], question: TinyQuestion, id: str) -> dict:
    """One line of FlashRAG's question format, with the titles of the passages that lead to the answer."""
    met = follow(world, question.entity, question.path)
    metadata = {"supporting_titles": [world[i].title for i in met[:-1]], "hops": len(question.path)}
    return {
        "id": id,
        "question": question.text,
        "golden_answers": [world[met[-1]].title],
        "data_source": "tiny",
        "metadata": metadata,
    }
