"""The agent's language: tags, prompt, stop strings, parsing an action, rendering an observation.

Strings are Search-R1's, character for character (`search_r1/llm_agent/generation.py` and its data scripts),
so that its checkpoints work here and ours work there. Where Search-R1 has a bug, ours differs and the
docstring says so. Tags of actions come from the table of tools; the prompt must explain a new tool itself.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date

from lld.tools import TOOLS, Passage

# Tag -> kind of action.
ACTION_TAGS = {tool.tag: kind for kind, tool in TOOLS.items()} | {"answer": "answer"}
TAG_OF_KIND = {kind: tag for tag, kind in ACTION_TAGS.items()}
TAGS = ("think", "information", *ACTION_TAGS)
STOP_STRINGS = tuple(f"</{tag}>" for tag in ACTION_TAGS)
TODAY = "2024-07-26"  # Llama-3.2-Instruct's where its chat template has no clock
TURN_ENDS = ("<|im_end|>", "<|eot_id|>")  # the end of a turn in the chat templates of Qwen and Llama

# Parts of a response. A part's id, in `Batch.part_ids_BT` and in files, is its position here, counted from 1.
# Further tools are appended, so ids 1 to 3 never change.
PARTS = ("think", "search", "answer", *(kind for kind in TOOLS if kind != "search"))
PART_IDS = {part: number for number, part in enumerate(PARTS, start=1)}

PROMPT = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you "
    "get new information. After reasoning, if you find you lack some knowledge, you can call a search engine "
    "by <search> query </search> and it will return the top searched results between <information> and "
    "</information>. You can search as many times as your want. If you find no further external knowledge "
    "needed, you can directly provide the answer inside <answer> and </answer>, without detailed "
    "illustrations. For example, <answer> Beijing </answer>. Question: {question}\n"
)
INVALID_ACTION = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and "
    "</search>. If I want to give the final answer, I should put the answer between <answer> and </answer>. "
    "Let me try again.\n"
)
OBSERVATION_HEAD = "\n\n<information>"
OBSERVATION_TAIL = "</information>\n\n"

# Queries that arise when a model quotes the protocol's own sentences. Search-R1 searches for "and".
QUOTED_SEARCHES = ("and", "query")

# Characters of a result that are kept per token of the budget; ordinary text has 2 to 5 per token.
CHARS_PER_TOKEN = 16
MIN_PASSAGE_CHARS = 8192  # kept whatever the budget

# Two `\s*` side by side around an optional `/` would take quadratic time on white space.
_TAG = re.compile(rf"<\s*(/\s*)?({'|'.join(TAGS)})\s*>", re.IGNORECASE)
_MARKUP = re.compile(r"[<\[].*[>\]]", re.DOTALL)
_BRACKETS = str.maketrans("<>[]", "()()")


@dataclass(frozen=True)
class Action:
    """The action of one turn."""

    kind: str  # a key of TOOLS, "answer" or "invalid"
    content: str = ""  # the query or the answer, stripped


def question_prompt(question: str) -> str:
    """The user's message for a question, as Search-R1's data scripts write it.

    A question mark is added where it is missing.
    """
    question = question.strip()
    return PROMPT.format(question=question if question.endswith("?") else question + "?")


def encode_prompt(tokenizer, question: str) -> list[int]:
    """Token ids of a question's prompt.

    Through the chat template if the tokenizer has one (Search-R1 does so for base models too), as raw text
    otherwise, and then without a BOS, as verl does. Control tokens in the question become plain text. Where
    the template prints today's date (Llama-3.2-Instruct's does), every day's prompt has `TODAY`.
    """
    controls = control_tokens(tokenizer)
    message = question_prompt(_as_text(question, tokenizer, lambda text: _respell(text, controls)))
    if tokenizer.chat_template is not None:
        messages, clock = [{"role": "user", "content": message}], date.fromisoformat(TODAY)
        message = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, strftime_now=clock.strftime
        )
    return tokenizer.encode(message, add_special_tokens=False)


def parse_action(text: str, specials: re.Pattern | None = None) -> Action:
    """The action in one turn's text, which the sampler has stopped at the first closing tag.

    The first closing tag decides the kind; the content begins at the nearest opening tag before it. Matches
    of `specials` are removed from the content (Search-R1 decodes without special tokens). An empty query, or
    a quotation of the protocol's own sentence ("<search> and </search>"), is invalid: Search-R1 sends both to
    the retriever. An empty or quoted answer is an answer, as in Search-R1: it ends the episode, and is wrong.
    """
    ends = [(text.find(f"</{tag}>"), tag) for tag in ACTION_TAGS if f"</{tag}>" in text]
    if not ends:
        return Action("invalid")
    end, tag = min(ends)
    start = text.rfind(f"<{tag}>", 0, end)
    if start < 0:
        return Action("invalid")
    content = text[start + len(tag) + 2 : end]
    content = (specials.sub("", content) if specials else content).strip()
    kind = ACTION_TAGS[tag]
    if kind in TOOLS and (not content or content in QUOTED_SEARCHES):
        return Action("invalid")
    return Action(kind, content)


def tag_offset(text: str, kind: str) -> int:
    """Character offset of the opening tag of a valid action of this kind in its turn's text."""
    tag = TAG_OF_KIND[kind]
    return text.rfind(f"<{tag}>", 0, text.index(f"</{tag}>"))


def defuse(text: str) -> str:
    """Text with every protocol tag made harmless: `</answer>` becomes `(/answer)`."""
    return _TAG.sub(lambda match: f"({(match[1] or '')[:1]}{match[2].lower()})", text)


def is_blank(text: str) -> bool:
    """Whether `text` has no visible character: only white space, control and zero-width characters."""
    return not any(char.isprintable() and not char.isspace() for char in text)


def control_tokens(tokenizer, added: bool = True) -> re.Pattern:
    """A pattern that matches the text of every special token, with or without a role.

    Llama 3's `<|eot_id|>` is one without a role. With `added`, it also matches every added token that is
    spelled like one (Qwen's `<tool_call>`, `<|fim_pad|>`). Other added tokens are text (words, runs of
    spaces), and so are the protocol's own tags, which a user may have added.
    """
    known = [
        token
        for token in tokenizer.added_tokens_decoder.values()
        if token.special or (added and _MARKUP.fullmatch(str(token).strip()))
    ]
    texts = {*tokenizer.all_special_tokens, *map(str, known)}
    # The tokenizer normalizes some of these tokens and looks for them in normalized text.
    if normalizer := _normalizer(tokenizer):
        texts |= {normalizer.normalize_str(str(token)) for token in known if token.normalized}
    longest_first = sorted(
        (text for text in texts if text.strip() and not _TAG.fullmatch(text)),
        key=lambda text: (-len(text), text),
    )
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _respell(text: str, controls: re.Pattern) -> str:
    """`text` with control tokens spelled so that they encode as plain text.

    `<|im_end|>` becomes `(|im_end|)`, and `EOT`, which has no brackets, becomes `E OT`.
    """

    def respell(match: re.Match) -> str:
        token = match[0]
        without_brackets = token.translate(_BRACKETS)
        return without_brackets if without_brackets != token else f"{token[0]} {token[1:]}"

    return controls.sub(respell, text)


def _normalizer(tokenizer):
    """The tokenizer's normalizer, None where it has none."""
    return getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)


def _as_text(text: str, tokenizer, clean: Callable[[str], str]) -> str:
    """`clean(text)`, also safe after the tokenizer's normalizer.

    `clean` is applied again where the normalizer (NFKC, lower case) would create a tag or a control token.
    """
    text, normalizer = clean(text), _normalizer(tokenizer)
    if normalizer is None:
        return text
    normal = normalizer.normalize_str(text)
    return text if clean(normal) == normal else clean(normal)


def shorten(result: Passage | str, max_tokens: int) -> Passage | str:
    """`result` cut to the length that an observation of `max_tokens` could show.

    Keeps megabytes of text from being parsed and encoded.
    """
    limit = max(CHARS_PER_TOKEN * max_tokens, MIN_PASSAGE_CHARS)
    if isinstance(result, str):
        return result if len(result) <= limit else result[:limit]
    return result if len(result.contents) <= limit else replace(result, contents=result.contents[:limit])


def render_observation(
    tokenizer, results: list[Passage | str], max_tokens: int, kind: str = "search"
) -> tuple[list[int], int]:
    """Token ids of a tool's results in an <information> block, and how many results were cut.

    '\\n\\n<information>Doc 1(Title: …) …</information>\\n\\n' has at most `max_tokens` tokens. Every result
    gets an equal share of the budget, and tokens that shorter results leave go to longer ones. So all results
    are seen and the block always closes. (Search-R1 cuts the joined block at 500 ids: the last passages and
    the closing tag are lost.) No results give an empty block. Raises ValueError if the budget cannot hold the
    empty block.
    """

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    controls = control_tokens(tokenizer)

    def clean(text):
        return _respell(defuse(text), controls)

    shown = [shorten(result, max_tokens) for result in results]
    was_long = [short is not result for short, result in zip(shown, results, strict=True)]
    texts = [
        _as_text(TOOLS[kind].render(result, rank), tokenizer, clean)
        for rank, result in enumerate(shown, start=1)
    ]
    whole = encode(OBSERVATION_HEAD + "".join(texts).strip() + OBSERVATION_TAIL)
    if len(whole) <= max_tokens:
        return whole, sum(was_long)
    head, tail = encode(OBSERVATION_HEAD), encode(OBSERVATION_TAIL)
    room = max_tokens - len(head) - len(tail)
    if room < len(texts):
        raise ValueError(
            f"an observation budget of {max_tokens} tokens cannot hold {len(texts)} passages: "
            "raise rollout.max_observation_tokens or lower retriever.topk"
        )
    pieces = [encode(text) for text in texts]
    kept = _share_room(pieces, room)
    num_cut = sum(
        len(short) < len(piece) or long for short, piece, long in zip(kept, pieces, was_long, strict=True)
    )
    return head + [token for piece in kept for token in piece] + tail, num_cut


def _share_room(pieces: list[list[int]], room: int) -> list[list[int]]:
    """The pieces, cut to `room` tokens in total.

    Each gets an equal share; what shorter pieces leave goes to longer ones.
    """
    kept = list(pieces)
    for waiting, index in enumerate(sorted(range(len(pieces)), key=lambda i: len(pieces[i]))):
        share = room // (len(pieces) - waiting)
        kept[index] = pieces[index][:share]
        room -= len(kept[index])
    return kept


def check_observation_budget(tokenizer, topk: int, max_tokens: int) -> None:
    """Raises ValueError where `max_tokens` cannot hold a block of `topk` long passages."""
    long = Passage("", '"Title"\n' + "word " * max_tokens)
    render_observation(tokenizer, [long] * topk, max_tokens)


def decode(tokenizer, token_ids: list[int]) -> str:
    """The text of token ids as they are, special tokens and spaces included."""
    return tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def eos_ids(lm, tokenizer) -> tuple[int, ...]:
    """Every id that ends a turn.

    The EOS of the tokenizer and of the generation config, and the chat template's end-of-turn token.
    """
    configured = lm.generation_config.eos_token_id
    ids = {tokenizer.eos_token_id, *(configured if isinstance(configured, (list, tuple)) else [configured])}
    if tokenizer.chat_template is not None:
        vocabulary = tokenizer.get_vocab()
        ids |= {vocabulary.get(token) for token in TURN_ENDS}
    return tuple(sorted(i for i in ids if i is not None))
