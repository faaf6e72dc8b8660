"""Episodes as JSON: lossless, to train on them again (`to_json`, `from_json`), or annotated (`describe`)."""

import dataclasses
import json
from array import array
from functools import partial
from pathlib import Path

from lld.episode import Batch, Episode, Question, Turn
from lld.files import write_jsonl
from lld.loss import GATES, lld_gate
from lld.protocol import Passage, decode
from lld.record.metrics import answer_match
from lld.update import Scores


def to_json(episode: Episode) -> str:
    """One line that `from_json` turns into an equal episode."""
    return json.dumps(dataclasses.asdict(episode), default=list)  # an array is written as a list


def from_json(line: str) -> Episode:
    tree = json.loads(line)
    question = Question(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in tree["question"].items()
        }
    )
    turns = [
        Turn(**turn | {"passages": tuple(Passage(**passage) for passage in turn["passages"])})
        for turn in tree["turns"]
    ]
    kept_ids = array("i", tree.get("kept_ids", ()))
    return Episode(**tree | {"question": question, "turns": turns, "kept_ids": kept_ids})


def read_episodes(path: Path, vocabulary: int) -> list[Episode]:
    """The episodes of a file from elsewhere.

    vocabulary: number of token ids of the model. ValueError names a line that is not a valid episode for it.
    """
    if not path.is_file():
        raise ValueError(f"no file {path}: it is damaged or not of a crash box")
    episodes = []
    for number, line in enumerate(
        path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1], start=1
    ):
        try:
            episodes.append(from_json(line))
            wrong = _wrong(episodes[-1], vocabulary)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            raise ValueError(f"{path} line {number} is no episode ({wrong}): the file is damaged")
    return episodes


def _wrong(episode: Episode, vocabulary: int) -> str | None:
    """Why an episode cannot be trained on; None if it can."""

    def whole(values, below):
        return all(type(value) is int and 0 <= value < below for value in values)

    size = len(episode.token_ids)
    if not whole([*episode.prompt_ids, *episode.token_ids], vocabulary) or not episode.prompt_ids or not size:
        return f"token ids must be whole numbers below {vocabulary}, in prompt and response"
    if (
        not len(episode.action_ids) == len(episode.logprobs) == size
        or not whole(episode.action_ids, size + 1)
        or not all(isinstance(value, float) for value in episode.logprobs)
    ):
        return "action ids and log-probabilities must be as many numbers as token ids"
    if wrong := _wrong_kept(episode, vocabulary):
        return wrong
    for turn in episode.turns:
        places = [turn.start, turn.tag_start, turn.end, turn.observation_end]
        if (
            not whole(places, size + 1)
            or places != sorted(places)
            or not all(
                isinstance(text, str)
                for text in (turn.kind, turn.content, *(passage.contents for passage in turn.passages))
            )
        ):
            return "a turn's offsets or texts are wrong"
    question = episode.question
    if not isinstance(question.golden_answers, tuple) or not all(
        isinstance(text, str) for text in (question.id, question.text, *question.golden_answers)
    ):
        return "the question's texts are wrong"
    return None


def _wrong_kept(episode: Episode, vocabulary: int) -> str | None:
    """Why kept ids cannot be trained on: each token of the model must be one of its own, none twice."""
    counts, ids, start = episode.kept_counts, episode.kept_ids, 0
    if not counts and not ids:
        return None
    if (
        len(counts) != len(episode.token_ids)
        or not all(type(count) is int and count >= 0 for count in counts)
        or sum(counts) != len(ids)
    ):
        return "kept ids must be as many as their counts say, with one count for each token"
    for token, action, count in zip(episode.token_ids, episode.action_ids, counts, strict=True):
        own, start = ids[start : start + count], start + count
        if bool(action) != bool(count) or (action and token not in own) or len(set(own)) < count:
            return "a token that the model wrote must be one of its kept ids, each of them once"
        if count and not 0 <= min(own) <= max(own) < vocabulary:
            return f"kept ids must be whole numbers below {vocabulary}"
    return None


def describe(
    tokenizer,
    step: int,
    episodes: list[Episode],
    batch: Batch,
    scores: Scores,
    rewards: list[float],
    rows: list[int],
    lld_tolerance: float = 0.0,
) -> list[dict]:
    """One record for each of `rows`: the episode, its tokens as text, and what is known of each token.

    Per token: its action (0: not written by the model), its part, its log-probabilities (None if the model
    did not write it) and LLDS's gates. The gates compare anchor with new, whatever the advantage.
    """
    fall_RT = scores.anchor_BT[rows] - scores.new_BT[rows] - lld_tolerance
    gates = {gate: lld_gate(fall_RT, batch.action_ids_BT[rows], gate).int().tolist() for gate in GATES}
    tables = {
        "sampled": batch.sampled_logprobs_BT,
        "old": scores.old_BT,
        "new": scores.new_BT,
        "final": scores.final_BT,
    }

    records = []
    for place, row in enumerate(rows):
        episode = episodes[row]
        start = len(episode.prompt_ids)
        end = start + len(episode.token_ids)
        about = dataclasses.asdict(episode)
        record = {
            "step": step,
            "prompt": decode(tokenizer, episode.prompt_ids),
            "reward": rewards[row],
            "em": answer_match(episode),
            "advantage": float(batch.advantages_B[row]),
            "answer": episode.answer,
            "tokens": pieces(partial(decode, tokenizer), episode.token_ids),
        }
        for name in ("question", "sample", "unlucky", "stop_reason", "turns", "action_ids"):
            record[name] = about[name]
        record["part_ids"] = batch.part_ids_BT[row, start:end].tolist()
        for name, table_BT in tables.items():
            record[name] = None if table_BT is None else _written(table_BT[row, start:end], episode)
        record["gates"] = {gate: values[place][start:end] for gate, values in gates.items()}
        records.append(record)
    return records


def _written(values_T, episode: Episode) -> list[float | None]:
    """The values of tokens that the model wrote, rounded; None for the others."""
    pairs = zip(values_T.tolist(), episode.action_ids, strict=True)
    return [round(value, 6) if action else None for value, action in pairs]


def write(path: Path, records: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(path, records)


def pieces(decode, token_ids: list[int]) -> list[str]:
    """The text that each token adds, spaces included; joined, they are the text of all tokens.

    A character made of several byte-level tokens belongs to the last of them.
    """
    texts, done, begin, whole = [], "", 0, 0
    for end in range(1, len(token_ids) + 1):
        text = decode(token_ids[begin:end])
        # Possibly an incomplete character, which the next tokens may complete. Until then byte-fallback
        # decoders (Llama-2's) show all bytes of its run as U+FFFD, those of complete characters too.
        held = text.endswith("\ufffd") and end < len(token_ids)
        if held and end - begin < 64:
            texts.append("")
            continue
        text = _before_incomplete(text) if held else text
        texts.append(text[len(done) :])
        done = text
        # Decode a window only: decoding all tokens each time would be quadratic. It begins at a whole
        # character; within a run of true U+FFFD it keeps more tokens than four characters have bytes.
        if held or end - begin >= 32:
            begin = end - 16 if held else whole
            done = decode(token_ids[begin:end])
            done = _before_incomplete(done) if held else done
        whole = whole if held else end
    return texts


def _before_incomplete(text: str) -> str:
    """`text` without up to three U+FFFD at its end, which an incomplete character may be."""
    return text[:-3] + text[-3:].rstrip("\ufffd")
