"""The agent's language: tags, prompt, stop strings, parsing an action, rendering an observation.

Strings are Search-R1's, character for character (`search_r1/llm_agent/generation.py` and its data scripts),
so that its checkpoints work here and ours work there. What differs is what Search-R1 gets wrong; each such
place says so.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

STOP_STRINGS = ("</search>", "</answer>")

PROMPT = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time "
    "you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by "
    "<search> query "
    "</search> and it will return the top searched results between <information> and </information>. You "
    "can search as "
    "many times as your want. If you find no further external knowledge needed, you can directly provide "
    "the answer "
    "inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. "
    "Question: {question}\n"
)
INVALID_ACTION = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and "
    "</search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me "
    "try again.\n"
)
OBSERVATION_HEAD = "\n\n<information>"
OBSERVATION_TAIL = "</information>\n\n"

# The protocol's own sentences, quoted by a model, look like searches. Search-R1 searches for "and".
QUOTED_SEARCHES = ("and", "query")

CHARS_PER_TOKEN = 16  # of a passage are read, for each token of the budget; ordinary text has 2 to 5
MIN_PASSAGE_CHARS = 8192  # are read whatever the budget

# Two `\s*` side by side around an optional `/` would take quadratic time on white space.
_TAG = re.compile(r"<\s*(/\s*)?(think|search|information|answer)\s*>", re.IGNORECASE)
_MARKUP = re.compile(r"[<\[].*[>\]]", re.DOTALL)
_BRACKETS = str.maketrans("<>[]", "()()")


@dataclass(frozen=True)
class Passage:
    """One retrieved document: `contents` is '"Title"\\ntext' as in Search-R1's wiki-18.jsonl."""

    id: str
    contents: str
    score: float = 0.0


@dataclass(frozen=True)
class Action:
    """What one turn asked for: kind is "search", "answer" or "invalid"; content is the query or the answer,
    stripped."""

    kind: str
    content: str = ""


def question_prompt(question: str) -> str:
    """The user's message for a question; a question mark is added where it is missing (Search-R1's data
    scripts)."""
    question = question.strip()
    return PROMPT.format(question=question if question.endswith("?") else question + "?")


def encode_prompt(tokenizer, question: str) -> list[int]:
    """Token ids of a question's prompt: through the chat template if the tokenizer has one (Search-R1 does so
    for base models too), as raw text otherwise, and then without a BOS, as verl does. Control tokens in the
    question's text are read as text."""
    controls = control_tokens(tokenizer)
    message = question_prompt(_as_text(question, tokenizer, lambda text: _respell(text, controls)))
    if tokenizer.chat_template is not None:
        message = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False
        )
    return tokenizer.encode(message, add_special_tokens=False)


def parse_action(text: str, specials: re.Pattern | None = None) -> Action:
    """The action in one turn's text, which the sampler has stopped at the first closing tag.

    The closing tag that comes first decides, and the nearest opening tag before it begins the content, from
    which what `specials` matches is taken out (Search-R1 decodes without special tokens). An empty query, or
    the protocol's own sentence quoted ("<search> and </search>"), is invalid: Search-R1 sends both to the
    retriever. Any answer is one, as in Search-R1: an empty or quoted one ends the episode too, and is wrong.
    """
    ends = [(text.find(stop), stop) for stop in STOP_STRINGS if stop in text]
    if not ends:
        return Action("invalid")
    end, stop = min(ends)
    kind = stop[2:-1]
    start = text.rfind(f"<{kind}>", 0, end)
    if start < 0:
        return Action("invalid")
    content = text[start + len(kind) + 2 : end]
    content = (specials.sub("", content) if specials else content).strip()
    if kind == "search" and (not content or content in QUOTED_SEARCHES):
        return Action("invalid")
    return Action(kind, content)


def tag_offset(text: str, kind: str) -> int:
    """Character offset at which the `<search>` or `<answer>` of a valid action begins in its turn's text."""
    return text.rfind(f"<{kind}>", 0, text.index(f"</{kind}>"))


def defuse(text: str) -> str:
    """Retrieved text with every protocol tag made harmless: `</answer>` becomes `(/answer)`."""
    return _TAG.sub(lambda match: f"({(match[1] or '')[:1]}{match[2].lower()})", text)


def is_blank(text: str) -> bool:
    """Whether there is nothing in `text` to be seen: only white space, control and zero-width characters."""
    return not any(char.isprintable() and not char.isspace() for char in text)


def control_tokens(tokenizer, added: bool = True) -> re.Pattern:
    """Matches the text of every special token, with a role or without (Llama 3's `<|eot_id|>`), and with
    `added` of every added token that is spelled like one (Qwen's `<tool_call>`, `<|fim_pad|>`).

    Other added tokens are text (words, runs of spaces), and so are the protocol's own tags, which a user may
    have added.
    """
    known = [
        token
        for token in tokenizer.added_tokens_decoder.values()
        if token.special or added and _MARKUP.fullmatch(str(token).strip())
    ]
    texts = {*tokenizer.all_special_tokens, *map(str, known)}
    # Some are looked for in normalized text, as they are normalized themselves
    if normalizer := _normalizer(tokenizer):
        texts |= {normalizer.normalize_str(str(token)) for token in known if token.normalized}
    longest_first = sorted(
        (text for text in texts if text.strip() and not _TAG.fullmatch(text)),
        key=lambda text: (-len(text), text),
    )
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _respell(text: str, controls: re.Pattern) -> str:
    """`text` with control tokens spelled so that they encode as text: `<|im_end|>` becomes `(|im_end|)`,
    `EOT` becomes `E OT`."""
    respelled = lambda token: (
        token.translate(_BRACKETS) if token.translate(_BRACKETS) != token else f"{token[0]} {token[1:]}"
    )
    return controls.sub(lambda match: respelled(match[0]), text)


def _normalizer(tokenizer):
    """The tokenizer's normalizer, None where it has none."""
    return getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)


def _as_text(text: str, tokenizer, clean: Callable[[str], str]) -> str:
    """`clean(text)`, also of what only the tokenizer's own normalizer makes a tag or a control token (NFKC,
    lower case)."""
    text, normalizer = clean(text), _normalizer(tokenizer)
    if normalizer is None:
        return text
    normal = normalizer.normalize_str(text)
    return text if clean(normal) == normal else clean(normal)


def passage_text(passage: Passage, rank: int) -> str:
    """One passage as the model reads it: 'Doc 1(Title: "A") text\\n' (Search-R1's `_passages2string`)."""
    title, _, text = passage.contents.partition("\n")
    return f"Doc {rank}(Title: {defuse(title)}) {defuse(text)}\n"


def shorten(passage: Passage, max_tokens: int) -> Passage:
    """The passage without what an observation of `max_tokens` could not show: megabytes are neither parsed
    nor encoded."""
    limit = max(CHARS_PER_TOKEN * max_tokens, MIN_PASSAGE_CHARS)
    return passage if len(passage.contents) <= limit else replace(passage, contents=passage.contents[:limit])


def render_observation(tokenizer, passages: list[Passage], max_tokens: int) -> tuple[list[int], int]:
    """Token ids of '\\n\\n<information>Doc 1(Title: …) …</information>\\n\\n', at most `max_tokens`, and how
    many passages were cut.

    Every passage gets an equal share of the budget and what shorter ones leave goes to the longer ones, so
    that all are seen and the block always closes. (Search-R1 cuts the joined block at 500 ids: the last
    passages and the closing tag are lost.) No passages give an empty block. Raises ValueError if the budget
    cannot hold the empty block.
    """
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    controls = control_tokens(tokenizer)
    clean = lambda text: _respell(defuse(text), controls)
    shown = [shorten(passage, max_tokens) for passage in passages]
    was_long = [short is not passage for short, passage in zip(shown, passages, strict=True)]
    texts = [
        _as_text(passage_text(passage, rank), tokenizer, clean) for rank, passage in enumerate(shown, start=1)
    ]
    whole = encode(OBSERVATION_HEAD + "".join(texts).strip() + OBSERVATION_TAIL)
    if len(whole) <= max_tokens:
        return whole, sum(was_long)
    head, tail = encode(OBSERVATION_HEAD), encode(OBSERVATION_TAIL)
    pieces = [encode(text) for text in texts]
    room = max_tokens - len(head) - len(tail)
    if room < len(pieces):
        raise ValueError(
            f"an observation budget of {max_tokens} tokens cannot hold {len(pieces)} passages: raise "
            "rollout.max_observation_tokens or lower retriever.topk"
        )
    kept, num_cut = {}, 0
    for waiting, index in enumerate(sorted(range(len(pieces)), key=lambda i: len(pieces[i]))):
        share = room // (len(pieces) - waiting)
        kept[index] = pieces[index][:share]
        num_cut += len(pieces[index]) > share or was_long[index]
        room -= len(kept[index])
    return head + [token for index in range(len(pieces)) for token in kept[index]] + tail, num_cut


def check_observation_budget(tokenizer, topk: int, max_tokens: int) -> None:
    """Raises ValueError, before any search, where `max_tokens` cannot hold a block of `topk` long
    passages."""
    long = Passage("", '"Title"\n' + "word " * max_tokens)
    render_observation(tokenizer, [long] * topk, max_tokens)
