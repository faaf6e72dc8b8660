"""The agent's language: tags, prompt, stop strings, parsing an action, rendering an observation.

Strings are Search-R1's, character for character (`search_r1/llm_agent/generation.py` and its data scripts), so that its
checkpoints work here and ours work there. What differs is what Search-R1 gets wrong; each such place says so.
"""

import re
from dataclasses import dataclass

STOP_STRINGS = ("</search>", "</answer>")

PROMPT = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new "
    "information. After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query "
    "</search> and it will return the top searched results between <information> and </information>. You can search as "
    "many times as your want. If you find no further external knowledge needed, you can directly provide the answer "
    "inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. "
    "Question: {question}\n"
)
INVALID_ACTION = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
OBSERVATION_HEAD = "\n\n<information>"
OBSERVATION_TAIL = "</information>\n\n"

# The protocol's own sentences, quoted by a model, look like actions. Search-R1 searches for "and" and scores "and".
QUOTED_SEARCHES = ("and", "query")
QUOTED_ANSWERS = ("and",)

_TAG = re.compile(r"<\s*(/?)\s*(think|search|information|answer)\s*>", re.IGNORECASE)


@dataclass(frozen=True)
class Passage:
    """One retrieved document: `contents` is '"Title"\\ntext' as in Search-R1's wiki-18.jsonl."""

    id: str
    contents: str
    score: float = 0.0


@dataclass(frozen=True)
class Action:
    """What one turn asked for: kind is "search", "answer" or "invalid"; content is the query or the answer, stripped."""

    kind: str
    content: str = ""


def question_prompt(question: str) -> str:
    """The user's message for a question; a question mark is added where it is missing (Search-R1's data scripts)."""
    question = question.strip()
    return PROMPT.format(question=question if question.endswith("?") else question + "?")


def encode_prompt(tokenizer, question: str) -> list[int]:
    """Token ids of a question's prompt: through the chat template if the tokenizer has one (Search-R1 does so for base
    models too), as raw text otherwise. Control tokens in the question's text are read as text."""
    message = question_prompt(_without_controls(question, tokenizer))
    if tokenizer.chat_template is None:
        return tokenizer.encode(message)
    text = tokenizer.apply_chat_template([{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def parse_action(text: str) -> Action:
    """The action in one turn's text, which the sampler has stopped at the first closing tag.

    The closing tag that comes first decides, and the nearest opening tag before it begins the content. An empty content,
    or the protocol's own sentence quoted ("<search> and </search>"), is invalid: Search-R1 sends both to the retriever.
    """
    ends = [(text.find(stop), stop) for stop in STOP_STRINGS if stop in text]
    if not ends:
        return Action("invalid")
    end, stop = min(ends)
    kind = stop[2:-1]
    start = text.rfind(f"<{kind}>", 0, end)
    if start < 0:
        return Action("invalid")
    content = text[start + len(kind) + 2 : end].strip()
    quoted = QUOTED_SEARCHES if kind == "search" else QUOTED_ANSWERS
    if not content or content in quoted:
        return Action("invalid")
    return Action(kind, content)


def tag_offset(text: str, kind: str) -> int:
    """Character offset at which the `<search>` or `<answer>` of a valid action begins in its turn's text."""
    return text.rfind(f"<{kind}>", 0, text.index(f"</{kind}>"))


def defuse(text: str) -> str:
    """Retrieved text with every protocol tag made harmless: `</answer>` becomes `(/answer)`."""
    return _TAG.sub(lambda match: f"({match[1]}{match[2].lower()})", text)


def _without_controls(text: str, tokenizer) -> str:
    """`text` with the tokenizer's special tokens spelled so that they encode as text: `<|im_end|>` becomes `(|im_end|)`.

    Those without a role (Llama 3's `<|eot_id|>`) are not among `all_special_tokens`.
    """
    for token in {*tokenizer.all_special_tokens, *(str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)}:
        if token in text:
            text = text.replace(token, re.sub(r"[<>\[\]]", lambda bracket: "()"[bracket[0] in ">]"], token))
    return text


def passage_text(passage: Passage, rank: int) -> str:
    """One passage as the model reads it: 'Doc 1(Title: "A") text\\n' (Search-R1's `_passages2string`)."""
    title, _, text = passage.contents.partition("\n")
    return f"Doc {rank}(Title: {defuse(title)}) {defuse(text)}\n"


def render_observation(tokenizer, passages: list[Passage], max_tokens: int) -> tuple[list[int], int]:
    """Token ids of '\\n\\n<information>Doc 1(Title: …) …</information>\\n\\n', at most `max_tokens`, and how many passages were cut.

    Every passage gets an equal share of the budget and what shorter ones leave goes to the longer ones, so that all are
    seen and the block always closes. (Search-R1 cuts the joined block at 500 ids: the last passages and the closing tag
    are lost.) Raises ValueError if the budget cannot hold the empty block.
    """
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    texts = [_without_controls(passage_text(passage, rank), tokenizer) for rank, passage in enumerate(passages, start=1)]
    whole = encode(OBSERVATION_HEAD + "".join(texts).strip() + OBSERVATION_TAIL)
    if len(whole) <= max_tokens:
        return whole, 0
    head, tail = encode(OBSERVATION_HEAD), encode(OBSERVATION_TAIL)
    pieces = [encode(text) for text in texts]
    room = max_tokens - len(head) - len(tail)
    if room < len(pieces):
        raise ValueError(f"an observation budget of {max_tokens} tokens cannot hold {len(pieces)} passages: raise rollout.max_observation_tokens or lower retriever.topk")
    kept, num_cut = {}, 0
    for waiting, index in enumerate(sorted(range(len(pieces)), key=lambda i: len(pieces[i]))):
        share = room // (len(pieces) - waiting)
        kept[index] = pieces[index][:share]
        num_cut += len(pieces[index]) > share
        room -= len(kept[index])
    return head + [token for index in range(len(pieces)) for token in kept[index]] + tail, num_cut


def check_observation_budget(tokenizer, topk: int, max_tokens: int) -> None:
    """Raises ValueError, before any search, where `max_tokens` cannot hold a block of `topk` long passages."""
    long = Passage("", '"Title"\n' + "word " * max_tokens)
    render_observation(tokenizer, [long] * topk, max_tokens)
