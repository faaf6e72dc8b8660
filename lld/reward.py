"""Episode → score: exact match, cover match, token F1, and Search-R1's format reward.

Only what the model wrote is scored. Search-R1 reads prompt, passages and its own error message too: "<answer>
and </answer>" in that message counts as an answer there.
"""

import functools
import importlib
import inspect
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from lld.config import Reward
from lld.episode import Episode
from lld.protocol import ACTION_TAGS, TAGS, decode

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NO_TAGS = rf"(?:(?!</?(?:{'|'.join(TAGS)})>).)*"
_ACTION = rf"<({'|'.join(ACTION_TAGS)})>{_NO_TAGS}</\1>"
_TURN = re.compile(rf"\s*<think>{_NO_TAGS}</think>\s*{_ACTION}\s*", re.DOTALL)
_INFORMATION = re.compile(r"\s*<information>(.*)</information>\s*", re.DOTALL)


def normalize_answer(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces, applied in this order.

    SQuAD's and Search-R1's normalisation: punctuation is removed without leaving a space, and other scripts'
    punctuation stays.
    """
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction: str, golden_answers: Sequence[str]) -> float:
    """1.0 if the normalised prediction equals a normalised gold answer, else 0.0 (Search-R1's `em_check`)."""
    return float(normalize_answer(prediction) in {normalize_answer(gold) for gold in golden_answers})


def cover_exact_match(prediction: str, golden_answers: Sequence[str]) -> float:
    """1.0 if a normalised gold answer is a substring of the normalised prediction, else 0.0.

    Search-R1's `subem_check` and FlashRAG's sub-EM, with one difference: a gold answer that normalises to
    nothing ("The") matches nothing here and every prediction there.
    """
    prediction = normalize_answer(prediction)
    return float(any(gold in prediction for gold in map(normalize_answer, golden_answers) if gold))


def token_f1(prediction: str, golden_answers: Sequence[str]) -> float:
    """The best F1 of the normalised prediction's words with those of a gold answer, in [0, 1] (SQuAD).

    HotpotQA's special case (no credit for a partial match with "yes", "no" or "noanswer") is left out, so
    that all benchmarks share one definition. Where both sides have no words left the score is 1.0, where only
    one has none 0.0.
    """
    predicted = Counter(normalize_answer(prediction).split())
    best = 0.0
    for gold in golden_answers:
        wanted = Counter(normalize_answer(gold).split())
        num_common = (predicted & wanted).total()
        num_words = predicted.total() + wanted.total()
        best = max(best, 2 * num_common / num_words if num_words else 1.0)
    return best


def valid_format(turn_texts: Sequence[str], observations: Sequence[str], *, eos: str = "") -> bool:
    """Whether an episode is (think, tool call, information)* think answer, with only white space between.

    `turn_texts` are what the model wrote, `observations` what it got after each turn ("" for none), `eos` an
    end-of-sequence text that a turn may end with. Search-R1 v0.3's `is_valid_sequence`, except that it knows
    who wrote a tag: an observation must be an information block (the invalid-action message is none), and a
    turn with an information tag of its own is invalid.
    """
    assert len(turn_texts) == len(observations), "one observation a turn, '' for none"
    if not turn_texts:
        return False
    for index, (text, observation) in enumerate(zip(turn_texts, observations, strict=True)):
        turn = _TURN.fullmatch(text.rstrip().removesuffix(eos))
        is_last = index == len(turn_texts) - 1
        if turn is None or (turn[1] == "answer") != is_last:
            return False
        if observation.strip() if is_last else not _INFORMATION.fullmatch(observation):
            return False
    return True


def retrieval_correct(observations: Sequence[str], golden_answers: Sequence[str]) -> bool:
    """Whether an information block contains a normalised gold answer.

    Search-R1 v0.3's `is_retrieval_correct`.
    """
    blocks = [block[1] for observation in observations if (block := _INFORMATION.fullmatch(observation))]
    return any(cover_exact_match(block, golden_answers) for block in blocks)


def format_score(
    turn_texts: Sequence[str],
    observations: Sequence[str],
    answer: str | None,
    golden_answers: Sequence[str],
    cfg: Reward,
    *,
    eos: str = "",
) -> float:
    """Search-R1 v0.3's reward of answer and format.

    Its `qa_em_format.compute_score_em`; arguments as for `score_text`.

    | answer | valid format                              | invalid format             |
    |--------|-------------------------------------------|----------------------------|
    | right  | 1                                         | 1 - structure_format_score |
    | wrong  | structure_format_score (+ retrieval_score)| final_format_score         |
    | none   | structure_format_score (+ retrieval_score)| 0                          |

    `retrieval_score` is added where a passage contains a gold answer.
    """
    valid = valid_format(turn_texts, observations, eos=eos)
    if answer is not None and exact_match(answer, golden_answers):
        return 1.0 if valid else 1.0 - cfg.structure_format_score
    if valid:
        return cfg.structure_format_score + (
            cfg.retrieval_score if retrieval_correct(observations, golden_answers) else 0.0
        )
    return 0.0 if answer is None else cfg.final_format_score


ANSWER_SCORES = {"em": exact_match, "f1": token_f1, "cover_em": cover_exact_match}


# What a reward function of one's own may take, by name.
OWN_ARGUMENTS = ("answer", "golden_answers", "question", "turn_texts", "observations")


@functools.cache
def own_reward(path: str) -> Callable[..., float]:
    """The function that reward.kind names as package.module:function, taking all of OWN_ARGUMENTS by name.

    The function itself may take any of them; `answer` is None where the model gave none. It must depend on
    nothing else: every process calls it, and a resumed run calls it again. Raises ValueError if it cannot be
    imported, needs something else, or does not return a finite number.
    """
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        parameters = inspect.signature(function).parameters.values()
    except (Exception, SystemExit) as error:  # whatever a module of somebody else's does
        raise ValueError(
            f"reward.kind = {path!r} cannot be imported ({type(error).__name__}: {error}): is its folder in "
            "PYTHONPATH?"
        ) from error
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    taken = [name for name in OWN_ARGUMENTS if takes_all or name in {p.name for p in named}]
    for p in parameters:
        if p.default is p.empty and p.name not in taken and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise ValueError(
                f"reward.kind = {path!r} needs {p.name!r}: it may take {', '.join(OWN_ARGUMENTS)}, by name"
            )

    def score(**arguments) -> float:
        value = function(**{name: arguments[name] for name in taken})
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{path} returns {value!r} for {arguments}: it must be a finite number")
        return float(value)

    return score


def check_own_reward(cfg: Reward) -> None:
    """Tries a reward function of one's own on two made-up episodes; ValueError if it cannot score them."""
    if ":" not in cfg.kind:
        return
    own_reward(cfg.kind)
    for answer, text in (("Ada", "<answer>Ada</answer>"), (None, "<think>No idea.</think>")):
        try:
            score_text([text], [""], answer, ["Ada"], cfg, question="Who?")
        except Exception as error:
            raise ValueError(
                f"reward.kind = {cfg.kind!r} fails for the answer {answer!r} ({type(error).__name__}: "
                f"{error}): it must score every answer, and None where there is none"
            ) from error


def score_text(
    turn_texts: Sequence[str],
    observations: Sequence[str],
    answer: str | None,
    golden_answers: Sequence[str],
    cfg: Reward,
    *,
    question: str = "",
    eos: str = "",
) -> float:
    """The reward of one episode, in [0, 1] for the default constants.

    `turn_texts` are what the model wrote, one text a turn; `observations` what it got after each turn ("" for
    none); `answer` the parsed final answer, None if it gave none; `eos` an end-of-sequence text that a turn
    may end with; `question` is read by rewards of one's own alone.
    """
    if ":" in cfg.kind:
        return own_reward(cfg.kind)(
            answer=answer,
            golden_answers=list(golden_answers),
            question=question,
            turn_texts=list(turn_texts),
            observations=list(observations),
        )
    if cfg.kind == "format":
        return format_score(turn_texts, observations, answer, golden_answers, cfg, eos=eos)
    return 0.0 if answer is None else ANSWER_SCORES[cfg.kind](answer, golden_answers)


def overlong_punishment(num_tokens: int, cfg: Reward) -> float:
    """0 up to L_max - L_cache tokens, from there linearly down to -1 at L_max and beyond.

    DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13). L_max is overlong_max, L_cache overlong_cache;
    the length is that of all that the model wrote in the episode.
    """
    over = num_tokens - (cfg.overlong_max - cfg.overlong_cache)
    return -min(max(over / cfg.overlong_cache, 0.0), 1.0) if cfg.overlong_cache else 0.0


def score_episodes(episodes: list[Episode], tokenizer, cfg: Reward) -> list[float]:
    """The reward of each episode, less its overlong punishment."""
    scores = []
    for episode in episodes:
        turn_texts = [decode(tokenizer, episode.token_ids[turn.start : turn.end]) for turn in episode.turns]
        if cfg.kind == "format" and decode(tokenizer, episode.prompt_ids).rstrip().endswith("<think>"):
            turn_texts[:1] = ["<think>" + text for text in turn_texts[:1]]  # the chat template opened it
        observations = [
            decode(tokenizer, episode.token_ids[turn.end : turn.observation_end]) for turn in episode.turns
        ]
        scores.append(
            score_text(
                turn_texts,
                observations,
                episode.answer,
                episode.question.golden_answers,
                cfg,
                question=episode.question.text,
                eos=tokenizer.eos_token or "",
            )
            + overlong_punishment(episode.num_model_tokens, cfg)
        )
    return scores


def quotable(golden_answers: Sequence[str]) -> list[str]:
    """The gold answers without those that are "yes", "no" or empty once normalised.

    Such an answer is inferred, not quoted from a passage.
    """
    return [gold for gold in golden_answers if normalize_answer(gold) not in ("", "yes", "no")]


def gold_in_results(golden_answers: Sequence[str], contents: Sequence[str]) -> bool | None:
    """Whether a normalised gold answer occurs, as whole words, in one of the retrieved passages.

    None where no gold answer is `quotable`.
    """
    golds = [normalize_answer(gold) for gold in quotable(golden_answers)]
    if not golds:
        return None
    texts = [f" {normalize_answer(text)} " for text in contents]
    return any(f" {gold} " in text for gold in golds for text in texts)
