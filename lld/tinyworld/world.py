"""The laptop-scale world: made-up facts, one passage each, questions over them, a tokenizer and a
warm-started policy.

It exercises every part of the project in minutes on two CPU cores, through the same files a real run reads.
Numbers from it illustrate the mechanism; they are no evidence for models of real size.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import random
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch.nn import functional as F
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lld import config, files, protocol
from lld.record import runs
from lld.retrieval import backends

VERSION = 1  # of what `prepare` writes; raise it with every change of the bytes
HELD_OUT_SHARE = 0.15
BATCH_SIZE = 32
MAX_DEMONSTRATIONS = 16_000  # more are not seen often enough to be worth their rendering

TAGS = tuple(
    f"<{slash}{name}>" for name in ("think", "search", "answer", "information") for slash in ("", "/")
)
PAD, EOS, UNKNOWN, TURN = "<|endoftext|>", "<|im_end|>", "<unk>", "<|im_start|>"
# Only the question of Search-R1's long instruction: the policy has learned the protocol, and 120 words would
# be most of a tiny episode.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ "
    "message['content'].split('Question: ')[-1].strip() }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

PASSAGES = {
    "person": (
        "{title} was born in {birthplace} and works for {employer}.",
        "The employer of {title} is {employer}, the birthplace {birthplace}.",
    ),
    "company": (
        "{title} has its base in {base} and was founded by {founder}.",
        "The founder of {title} is {founder}, its base {base}.",
    ),
    "city": (
        "{title} is a city in the country {country}.",
        "The city {title} lies in the country {country}.",
    ),
    "country": (
        "The capital of {title} is {capital} and its language {language}.",
        "{title} has the language {language} and the capital {capital}.",
    ),
}
QUESTIONS = {
    "birthplace": ("where was {} born?", "what is the birthplace of {}?"),
    "employer": ("who does {} work for?", "who is the employer of {}?"),
    "founder": ("who founded {}?", "who is the founder of {}?"),
    "base": ("where does {} have its base?", "in which city is the base of {}?"),
    "country": ("in which country is {}?", "what is the country of {}?"),
    "capital": ("what is the capital of {}?", "which city is the capital of {}?"),
    "language": ("what language is spoken in {}?", "what is the language of {}?"),
}
BRIDGES = {
    "birthplace": ("the birthplace of {}", "the city where {} was born"),
    "employer": ("the employer of {}", "the company that {} works for"),
    "founder": ("the founder of {}", "the person who founded {}"),
    "base": ("the base of {}", "the city where {} has its base"),
    "country": ("the country of {}",),
}
CITY_PREFIXES, COMPANY_SUFFIXES = ("Port", "New", "Lake", "Fort"), ("Motors", "Foods", "Press", "Mills")
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

# Thinking of the demonstrations, and the chances of their mistakes, which leave room to learn: after the warm
# start sampled
# EM is about 0.4. A slip (wrong query, rambling) is followed by a wrong answer with WRONG_AFTER_SLIP, also
# when it was noticed.
FIRST_THOUGHTS = ("i need the {relation} of {title}", "let me search the {relation} of {title}")
FOUND_THOUGHTS = ("the {relation} of {title} is {value}", "i found that the {relation} of {title} is {value}")
NEXT_THOUGHTS = (" so i need its {relation}", " and now its {relation}")
RETRY_THOUGHTS = ("this is not about {title} , try again", "i need the {relation} of {title} and not this")
FILLERS = tuple("well hmm maybe perhaps so then again okay really just still anyway now wait".split())
EARLY_ANSWER, WRONG_QUERY, WRONG_ANSWER, WRONG_AFTER_SLIP, TRUNCATED_ANSWER, RAMBLE, MALFORMED = (
    0.35,
    0.15,
    0.12,
    0.6,
    0.2,
    0.15,
    0.05,
)


@dataclass(frozen=True)
class Entity:
    """The subject of one passage; `facts` maps a relation to the index of the entity it leads to (languages
    have none)."""

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


# ----------------------------------------------------------------------------------------------------------------
# world


def _invent_words(rng: random.Random, count: int, taken: set[str]) -> list[str]:
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
    """Titles by kind. First and last names, city stems and company names share words, so that a search meets
    distractors."""
    taken = set(_template_words())
    scale = math.sqrt(cfg.num_people / 160)
    first_names = _invent_words(rng, math.ceil(32 * scale), taken)
    last_names = _invent_words(rng, math.ceil(48 * scale), taken)
    num_cities, num_companies, num_countries = (max(6, round(n * scale)) for n in (36, 30, 12))
    num_pairs = round(cfg.namesake_share * cfg.num_people / 2)
    people = rng.sample([f"{a} {b}" for a in first_names for b in last_names], cfg.num_people - num_pairs)
    stems = _invent_words(rng, math.ceil(0.75 * num_cities), taken)
    two_words = rng.sample([f"{a} {b}" for a in CITY_PREFIXES for b in stems], num_cities // 2)
    return {
        "person": people + people[:num_pairs],
        "company": rng.sample([f"{a} {b}" for a in last_names for b in COMPANY_SUFFIXES], num_companies),
        "city": rng.sample(stems, num_cities - len(two_words)) + two_words,
        "country": _invent_words(rng, num_countries, taken),
        "language": _invent_words(rng, num_countries, taken),
    }


def make_world(cfg: config.TinyWorld) -> list[Entity]:
    """All entities, a pure function of `cfg`; an entity's index is its passage's id. `namesake_share` of the
    people come in pairs of one title and different facts, and questions are asked about both: no policy can
    know which is meant."""
    rng = random.Random(f"world {cfg.seed}")
    titles = _invent_titles(rng, cfg)
    flat = [(kind, title) for kind in titles for title in titles[kind]]
    of_kind = {kind: [i for i, (k, _) in enumerate(flat) if k == kind] for kind in titles}
    cities, countries = rng.sample(of_kind["city"], len(of_kind["city"])), of_kind["country"]
    # Every country has a city
    country_of = {
        city: countries[i] if i < len(countries) else rng.choice(countries) for i, city in enumerate(cities)
    }
    facts = [
        {relation: rng.choice(of_kind[LEADS_TO[relation]]) for relation in RELATIONS[kind]}
        for kind, _ in flat
    ]
    for city, country in country_of.items():
        facts[city]["country"] = country
    for country in countries:
        facts[country]["capital"] = rng.choice(
            [city for city in sorted(country_of) if country_of[city] == country]
        )
    twins = {}
    for person in of_kind["person"]:
        first = twins.setdefault(flat[person][1], person)
        while first != person and any(
            facts[first][relation] == facts[person][relation] for relation in RELATIONS["person"]
        ):
            facts[person] = {
                relation: rng.choice(of_kind[LEADS_TO[relation]]) for relation in RELATIONS["person"]
            }
    world = []
    for (kind, title), fact in zip(flat, facts):
        named = {relation: flat[index][1] for relation, index in fact.items()}
        world.append(
            Entity(kind, title, fact, rng.choice(PASSAGES[kind]).format(title=title, **named) if fact else "")
        )
    return world


def passages(world: list[Entity]) -> list[protocol.Passage]:
    """One passage per entity with facts, its id the entity's index, its contents '"Title"\\ntext'
    (Search-R1's wiki-18)."""
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
    """Training and held-out questions, disjoint in (title, path); `two_hop_share` of the paths have two
    hops."""
    rng = random.Random(f"questions {cfg.seed}")
    one = [(i, (relation,)) for i, entity in enumerate(world) for relation in entity.facts]
    two = [(i, path) for i, entity in enumerate(world) for kind, path in TWO_HOPS if kind == entity.kind]
    # The capital of a capital's own country is no question
    two = [(i, path) for i, path in two if follow(world, i, path)[-1] != i]
    total = min(
        len(keys) / share if share > 0 else math.inf
        for keys, share in ((one, 1 - cfg.two_hop_share), (two, cfg.two_hop_share))
    )
    keys = rng.sample(one, round(total * (1 - cfg.two_hop_share))) + rng.sample(
        two, round(total * cfg.two_hop_share)
    )
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


# ------------------------------------------------------------------------------------------------------------
# tokenizer


# A passage's frame 'Doc 1(Title: "' is one token: with a word each, half of an observation would be frame.
_PIECE = Regex(r'doc \d+\(title: "|"\)|\w+|[^\w\s]')


def _pieces() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(_PIECE, "removed", invert=True)


def _words(text: str) -> set[str]:
    return {word for word, _ in _pieces().pre_tokenize_str(text.lower())}


def _template_words() -> list[str]:
    """Every word of the fixed sentences, sorted."""
    by_kind = (*PASSAGES.values(), *QUESTIONS.values(), *BRIDGES.values())
    spoken = (
        FIRST_THOUGHTS,
        FOUND_THOUGHTS,
        NEXT_THOUGHTS,
        RETRY_THOUGHTS,
        FILLERS,
        CITY_PREFIXES,
        COMPANY_SUFFIXES,
    )
    fixed = (protocol.defuse(protocol.INVALID_ACTION), "user", "assistant")
    return sorted(
        set().union(*(_words(sentence) for sentences in (*by_kind, *spoken, fixed) for sentence in sentences))
    )


def make_tokenizer(world: list[Entity], topk: int) -> PreTrainedTokenizerFast:
    """A lower-casing word-level tokenizer over the world's words; tags are single tokens that decoding never
    drops."""
    names = sorted(set().union(*(_words(entity.title) for entity in world)) - set(_template_words()))
    frames = ['")'] + [f'doc {rank}(title: "' for rank in range(1, max(topk, 10) + 1)]
    vocabulary = dict.fromkeys([PAD, EOS, UNKNOWN, TURN, *TAGS, *frames, *_template_words(), *names])
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = _pieces()
    tokenizer.add_special_tokens(
        [AddedToken(word, normalized=False, special=True) for word in (PAD, EOS, UNKNOWN, TURN)]
    )
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


# -------------------------------------------------------------------------------------------------------
# demonstrations


def all_queries(world: list[Entity]) -> list[str]:
    """Every query a demonstration may write: title and relation, the title alone, and the title's last word
    with a relation."""
    named = {(entity.title.lower(), relation) for entity in world for relation in entity.facts}
    return sorted(
        {
            q
            for title, relation in named
            for q in (f"{title} {relation}", title, f"{title.split()[-1]} {relation}")
        }
    )


def _search_all(corpus: Path, queries: list[str], topk: int) -> dict[str, list[protocol.Passage]]:
    retriever = backends.open_retriever(
        config.Retriever(url=None, index=None, corpus=str(corpus), backend="bm25", topk=topk)
    )
    return dict(zip(queries, retriever.search(queries, topk)))


def _slip(rng: random.Random, world: list[Entity], gold: int, seen: list[int]) -> int:
    """A wrong answer of the gold answer's kind: from the passages in sight if they hold one, any other if
    not."""
    same = lambda i: i != gold and world[i].kind == world[gold].kind and world[i].title != world[gold].title
    in_sight = sorted({i for subject in seen for i in world[subject].facts.values() if same(i)})
    return rng.choice(in_sight or [i for i in range(len(world)) if same(i)])


def demonstrate(
    rng: random.Random,
    world: list[Entity],
    question: TinyQuestion,
    seen_by: dict[str, list[int]],
    clumsy: bool = True,
) -> list[tuple[str, str]]:
    """One episode after the prompt as ("action" | "search" | "invalid", text) pairs; "search" holds the query
    whose observation follows.

    `seen_by` maps a query to the entities whose passages it finds. A `clumsy` one makes mistakes at the rates
    above.
    """
    met = follow(world, question.entity, question.path)
    name = lambda i: world[i].title.lower()
    chance = lambda p: clumsy and rng.random() < p
    hops = len(question.path)
    wrong_query_at = rng.randrange(hops) if chance(WRONG_QUERY) else -1
    ramble_at = rng.randrange(hops + 1) if chance(RAMBLE) else -1
    malformed_at = rng.randrange(hops + 1) if chance(MALFORMED) else -1
    early = hops == 2 and chance(EARLY_ANSWER)
    turns, seen, slipped = [], [], ramble_at >= 0

    def act(thought: str, tag: str, content: str, hop: int) -> None:
        if hop == ramble_at:
            thought = " ".join([thought, *rng.choices(FILLERS, k=rng.randint(6, 16))])
        if hop == malformed_at and not any(kind == "invalid" for kind, _ in turns):
            turns.extend([("action", f"<think> {thought} </think> {content}{EOS}"), ("invalid", "")])
        turns.append(("action", f"<think> {thought} </think> <{tag}> {content} </{tag}>"))
        if tag == "search":
            turns.append(("search", content))
            seen[:] = seen_by[content]

    thought = None
    for hop, relation in enumerate(question.path):
        subject = {"relation": relation, "title": name(met[hop])}
        thought = thought or rng.choice(FIRST_THOUGHTS).format(**subject)
        query = f"{name(met[hop])} {relation}"
        if hop == wrong_query_at:
            slipped = True
            wrong = rng.choice([i for i in range(len(world)) if world[i].kind == world[met[hop]].kind])
            act(
                thought,
                "search",
                rng.choice((f"{name(wrong)} {relation}", f"{name(met[hop]).split()[-1]} {relation}")),
                hop,
            )
            if chance(WRONG_AFTER_SLIP):
                break
            thought = rng.choice(RETRY_THOUGHTS).format(**subject)
        act(thought, "search", query, hop)
        if met[hop] not in seen:  # the retriever prefers another passage: ask by name only
            act(rng.choice(RETRY_THOUGHTS).format(**subject), "search", name(met[hop]), hop)
        thought = rng.choice(FOUND_THOUGHTS).format(value=name(met[hop + 1]), **subject)
        if hop == 0 and early:
            break
        if hop + 1 < hops:
            thought += rng.choice(NEXT_THOUGHTS).format(relation=question.path[hop + 1])
    else:
        hop = hops
    gold = met[-1]
    if hop < hops or chance(WRONG_AFTER_SLIP if slipped else WRONG_ANSWER):
        gold = _slip(rng, world, gold, seen)
        thought = rng.choice(FOUND_THOUGHTS).format(
            relation=question.path[-1], title=name(met[-2] if hop == hops else met[0]), value=name(gold)
        )
    answer = name(gold)
    if chance(TRUNCATED_ANSWER):
        answer = rng.choice(answer.split())
    act(thought, "answer", answer, hops)
    return turns


def render_demonstration(
    tokenizer, question: str, turns: list[tuple[str, str]], observation_ids: dict[str, list[int]]
) -> tuple[list[int], list[bool]]:
    """Token ids of a whole episode as the rollout would have them, and which of them the model writes."""
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
    """`count` rendered demonstrations over `questions`, and the tokens of the longest prompt, turn,
    observation and episode when no mistake is made."""
    rng = random.Random(f"demonstrations {seed}")
    found = _search_all(corpus, all_queries(world), topk)
    seen_by = {query: [int(passage.id) for passage in row] for query, row in found.items()}
    observation_ids = {
        query: protocol.render_observation(tokenizer, row, 1_000_000)[0] for query, row in found.items()
    }
    longest = dict.fromkeys(("prompt", "turn", "observation", "episode"), 0)
    for question in questions:
        turns = demonstrate(rng, world, question, seen_by, clumsy=False)
        prompt, episode = (
            protocol.encode_prompt(tokenizer, question.text),
            render_demonstration(tokenizer, question.text, turns, observation_ids)[0],
        )
        actions = [
            len(tokenizer.encode(text, add_special_tokens=False)) for kind, text in turns if kind == "action"
        ]
        observations = [len(observation_ids[text]) for kind, text in turns if kind == "search"]
        for what, size in (
            ("prompt", len(prompt)),
            ("turn", max(actions)),
            ("observation", max(observations)),
            ("episode", len(episode)),
        ):
            longest[what] = max(longest[what], size)
    observation_ids[""] = tokenizer.encode(protocol.INVALID_ACTION, add_special_tokens=False)
    drawn = [questions[i % len(questions)] for i in range(count)]
    return [
        render_demonstration(tokenizer, q.text, demonstrate(rng, world, q, seen_by), observation_ids)
        for q in drawn
    ], longest


# -----------------------------------------------------------------------------------------------------------
# warm start


def policy_shape(cfg: config.TinyWorld, tokenizer) -> LlamaConfig:
    """A Llama of `num_layers` and `hidden_size`; float32, tied embeddings, 4 heads on 2 key-value heads.

    Not Qwen2: transformers 5 opens whatever tokenizer lies beside a "qwen2" config as Qwen's byte-level one,
    without a word.
    """
    if cfg.hidden_size % 8:
        raise ValueError(
            f"tinyworld.hidden_size = {cfg.hidden_size}: must be a multiple of 8 (four heads of even width)"
        )
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=cfg.hidden_size,
        intermediate_size=2 * cfg.hidden_size,
        num_hidden_layers=cfg.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        dtype="float32",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def make_policy(cfg: config.TinyWorld, tokenizer) -> LlamaForCausalLM:
    """A random policy of that shape."""
    shape = policy_shape(cfg, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.seed)
        return LlamaForCausalLM(shape)


def _batches(lengths: list[int], num_steps: int, rng: random.Random):
    """Indices of `num_steps` batches of about equal lengths, epoch after epoch: no forward pass is mostly
    padding."""
    pool = 50 * BATCH_SIZE
    done = 0
    while True:
        order = rng.sample(range(len(lengths)), len(lengths))
        batches = []
        for start in range(0, len(order), pool):
            near = sorted(order[start : start + pool], key=lengths.__getitem__)
            batches.extend(near[i : i + BATCH_SIZE] for i in range(0, len(near), BATCH_SIZE))
        rng.shuffle(batches)
        for batch in batches:
            if done == num_steps:
                return
            done += 1
            yield batch


def warm_start(
    policy: LlamaForCausalLM, demonstrations: list[tuple[list[int], list[bool]]], num_steps: int, seed: int
) -> list[float]:
    """Supervised training in place; returns each step's loss in nats per weighted token.

    The policy's own tokens weigh 1 and all others 0.3: to predict passages teaches the heads to copy names.
    AdamW at 3e-3 with 50 steps of linear warm-up, cosine to 5 %.
    """
    lengths = [len(ids) for ids, _ in demonstrations]
    longest = max(lengths)
    token_ids_NT = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in demonstrations])
    weights_NT = torch.tensor(
        [[1.0 if own else 0.3 for own in owns] + [0.0] * (longest - len(owns)) for _, owns in demonstrations]
    )
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    num_warmup = min(50, max(1, num_steps // 10))
    cosine = lambda step: (
        min(1.0, (step + 1) / num_warmup) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / num_steps)))
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)
    losses = []
    policy.train()
    for rows in tqdm(
        _batches(lengths, num_steps, random.Random(f"batches {seed}")),
        total=num_steps,
        desc="warm start",
        disable=None,
    ):
        width = max(lengths[row] for row in rows)
        token_ids_BT, weights_BT = token_ids_NT[rows, :width], weights_NT[rows, :width]
        # Padding is on the right: causality hides it
        logits_BTV = policy(input_ids=token_ids_BT, use_cache=False).logits
        loss_BT = F.cross_entropy(logits_BTV[:, :-1].transpose(1, 2), token_ids_BT[:, 1:], reduction="none")
        loss = (loss_BT * weights_BT[:, 1:]).sum() / weights_BT[:, 1:].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    policy.eval()
    return losses


# --------------------------------------------------------------------------------------------------------------
# prepare


def _write_jsonl(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _identity(cfg: config.TinyWorld, topk: int) -> dict:
    """What the bytes of a prepared folder depend on; its place is not among them."""
    options = {name: value for name, value in dataclasses.asdict(cfg).items() if name != "dir"}
    return {**options, "topk": topk, "version": VERSION}


def _check_prepared(folder: Path, identity: dict) -> dict:
    """The description of a prepared folder; ValueError if it is not a world or one made with other
    options."""
    description = folder / "world.json"
    if not description.is_file():
        raise ValueError(
            f"tinyworld.dir = {str(folder)!r} holds other files and no world.json: choose another "
            "tinyworld.dir or empty it"
        )
    remedy = "delete the folder or choose another tinyworld.dir"
    world = runs.parse_json(description.read_bytes(), str(description), remedy)
    found = world.get("identity")
    if not isinstance(found, dict) or not isinstance(world.get("longest"), dict):
        raise ValueError(f"{description} is damaged (no identity and longest in it): {remedy}")
    if found != identity:
        names = [
            name for name in sorted(found.keys() | identity.keys()) if found.get(name) != identity.get(name)
        ]
        apart = ", ".join(f"{name} {found.get(name)!r} there, {identity.get(name)!r} asked" for name in names)
        raise ValueError(
            f"tinyworld.dir = {str(folder)!r} holds a world made with other options ({apart}): {remedy}"
        )
    return world


def _check_room(cfg: config.TinyWorld, longest: dict[str, int], rollout: config.Rollout) -> None:
    """Refuses a rollout that would cut the prompts, turns or observations which the warm start has taught."""
    options = {
        "prompt": "max_prompt_tokens",
        "turn": "max_new_tokens",
        "observation": "max_observation_tokens",
        "episode": "max_episode_tokens",
    }
    for what, option in options.items():
        asked = getattr(rollout, option)
        if asked < longest[what]:
            raise ValueError(
                f"rollout.{option} = {asked}: the tiny world's longest flawless {what} has {longest[what]} "
                "tokens; raise the option"
            )
    if cfg.two_hop_share > 0 and rollout.max_turns < 2:
        raise ValueError(
            f"rollout.max_turns = {rollout.max_turns}: two-hop questions take two searches; raise it or "
            "set tinyworld.two_hop_share 0"
        )


@contextlib.contextmanager
def _alone(folder: Path):
    """Makes the folder if it is not there, and holds it against other processes that want to make the same
    world.

    Where the file system has no locks, all of them make it and the first one's stays.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(
                    f"{folder}: another process is making this world; waiting for it",
                    file=sys.stderr,
                    flush=True,
                )
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # not empty: another process has made the world
            if made:
                folder.rmdir()
        raise
    finally:
        os.close(descriptor)


def prepare(cfg: config.TinyWorld, rollout: config.Rollout, topk: int) -> None:
    """Writes corpus.jsonl, train.jsonl, heldout.jsonl, policy/ and world.json under `cfg.dir`, or returns at
    once if they are there.

    The text files are a pure function of `cfg` and `topk`, the policy's weights up to the rounding of the
    machine and its number of threads. Call it on one process; a second run waits for the first one's world.
    Written into a new folder beside it and renamed, so a killed call leaves nothing that looks whole, and no
    folder that was there is removed or written into. Raises ValueError if the folder was made with other
    options or if the `rollout` lengths are too short for this world, checkpoint.WriteError if it cannot be
    written.
    """
    folder = Path(cfg.dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"tinyworld.dir = {cfg.dir!r} is a file, not a folder: choose another tinyworld.dir")
    identity = _identity(cfg, topk)
    whole = lambda: folder.is_dir() and any(folder.iterdir())
    try:
        if not whole():
            with _alone(folder):
                if not whole():
                    _make(cfg, rollout, topk, folder, identity)
    except (OSError, RuntimeError, SafetensorError) as error:
        if (
            isinstance(error, RuntimeError)
            and "inline_container" not in str(error)
            or isinstance(error, OSError)
            and error.errno not in files.DISK_ERRORS
        ):
            raise
        raise files.WriteError(
            f"tinyworld.dir = {cfg.dir!r} cannot be written: {str(error).splitlines()[0]}"
        ) from error
    _check_room(cfg, _check_prepared(folder, identity)["longest"], rollout)


def _make(cfg: config.TinyWorld, rollout: config.Rollout, topk: int, folder: Path, identity: dict) -> None:
    """Makes the world in a folder of a name of its own, which takes the place of the empty `folder` when it
    is whole."""
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        partial.chmod(folder.stat().st_mode & 0o7777)  # mkdtemp's is for the owner alone
        world = make_world(cfg)
        train, held_out = make_questions(world, cfg)
        tokenizer = make_tokenizer(world, topk)
        _write_jsonl(
            partial / "corpus.jsonl",
            [{"id": passage.id, "contents": passage.contents} for passage in passages(world)],
        )
        _write_jsonl(
            partial / "train.jsonl",
            [question_row(world, question, f"tiny_train_{i}") for i, question in enumerate(train)],
        )
        _write_jsonl(
            partial / "heldout.jsonl",
            [question_row(world, question, f"tiny_heldout_{i}") for i, question in enumerate(held_out)],
        )
        count = min(MAX_DEMONSTRATIONS, BATCH_SIZE * cfg.warm_start_steps)
        demonstrations, longest = make_demonstrations(
            world, train, tokenizer, partial / "corpus.jsonl", count, topk, cfg.seed
        )
        _check_room(cfg, longest, rollout)  # before the minutes of training
        policy = make_policy(cfg, tokenizer)
        print(
            f"{folder}: making passages, questions and a policy, with {cfg.warm_start_steps} steps of warm "
            "start (some minutes, once)",
            flush=True,
        )
        losses = warm_start(policy, demonstrations, cfg.warm_start_steps, cfg.seed)
        policy.save_pretrained(partial / "policy")
        tokenizer.save_pretrained(partial / "policy")
        description = {"identity": identity, "longest": longest, "warm_start_losses": [losses[0], losses[-1]]}
        (partial / "world.json").write_text(json.dumps(description, indent=2) + "\n")
        try:
            os.rename(partial, folder)
        except OSError:
            if not any(folder.iterdir()):  # else another process was first, where there are no locks
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
