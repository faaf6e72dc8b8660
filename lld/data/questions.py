"""Questions from Search-R1 parquet, FlashRAG jsonl or the hub, and which of them belong to a step."""

import difflib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch

from lld.config import Config
from lld.episode import Question

SOURCE_NAMES = {"2wikimultihopqa": "2wiki"}  # FlashRAG's name, which Search-R1's files have
SPLIT_NAMES = ("train", "dev", "test", "validation")
WANTED = 'a row is such as {"id": "1", "question": "Who wrote Emma?", "golden_answers": ["Jane Austen"]}'
REMEDY = (
    "give a .parquet (Search-R1) or .jsonl (FlashRAG) file, a folder with one for each split, or a "
    "hub name such as PeterJinGo/nq_hotpotqa_train"
)


def jsonl_lines(path: Path) -> Iterator[tuple[str, str]]:
    """(place, line) of the lines that are not blank."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}): save it as UTF-8") from None
    # Not splitlines: U+2028 may stand inside a JSON string
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path} line {number}", line


def row_of_line(line: str, place: str) -> dict:
    """The object that a line holds; ValueError for anything else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{place} is not valid JSON ({error}): each line must hold one object; {WANTED}"
        ) from None
    if not isinstance(row, dict):
        raise ValueError(
            f"{place} holds {type(row).__name__} {line.strip()[:40]!r}: each line must hold one object; "
            f"{WANTED}"
        )
    return row


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict]]:
    for place, line in jsonl_lines(path):
        yield place, row_of_line(line, place)


def parquet_rows(path: Path) -> Iterator[tuple[str, dict]]:
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield f"{path} row {number}", row
                number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} is not a readable parquet file ({error}): write or download it again"
        ) from None


def _hub_rows(where: str, splits: Sequence[str]) -> Iterator[tuple[str, dict]]:
    import datasets  # slow to import, and only hub names need it

    owner, name, *config = where.split("/")
    repository, config = f"{owner}/{name}", config[0] if config else None
    try:
        # Loads all splits: naming one would also load all of them, and listing them first fails offline even
        # if everything is cached.
        dataset = datasets.load_dataset(repository, config)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"no file or folder {where}, and the hub does not give it ({error}): {REMEDY}"
        ) from error
    split = _first_known(splits, list(dataset), where)
    for number, row in enumerate(dataset[split]):
        yield f"{where} {split} row {number}", row


READERS = {".jsonl": _jsonl_rows, ".parquet": parquet_rows}


def _first_known(splits: Sequence[str], known: Sequence[str], where: str) -> str:
    for split in splits:
        if split in known:
            return split
    raise ValueError(
        f"{where} has no split {splits[0]!r}, only {', '.join(sorted(known)) or 'none'}: name one of "
        "these, or give the file itself"
    )


def _file_of_split(folder: Path, splits: Sequence[str]) -> Path:
    files = [path for suffix in READERS for path in sorted(folder.glob(f"*{suffix}"))]
    split = _first_known(splits, [path.stem for path in files], str(folder))
    found = [path for path in files if path.stem == split]
    if len(found) > 1:
        raise ValueError(f"{folder} holds {found[0].name} and {found[1].name}: give the file itself")
    return found[0]


def _field(row: dict, *keys: str):
    """The value under nested keys, None where one is missing."""
    for key in keys:
        row = row.get(key) if isinstance(row, dict) else None
    return row


def _list_of_json(text: str) -> list[str]:
    """The strings of a JSON list, or the text itself as the only one."""
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        return [text]
    is_list = isinstance(items, list) and items and all(isinstance(item, str) for item in items)
    return items if is_list else [text]


def _texts(value, where: str) -> tuple[str, ...]:
    """A string, or a list, tuple or numpy array of strings, as a tuple without the blank ones.

    A string may also be the JSON of a list of strings.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    value = _list_of_json(value) if isinstance(value, str) else value
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(item, (str, int, float)) and item is not True and item is not False and item == item
        for item in value
    ):
        raise ValueError(f"{where} = {value!r}: must be a list of strings")
    return tuple(text for item in value if (text := str(item).strip()))


def _question_text(row: dict, place: str) -> str:
    text = row.get("question")
    if text is None:
        prompt = row.get("prompt")
        prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        messages = [
            m for m in (prompt if isinstance(prompt, (list, tuple)) else ()) if _field(m, "role") == "user"
        ]
        if not messages:
            raise ValueError(
                f"{place}: missing field 'question' (and no user message in 'prompt'): add a 'question' to "
                f"every row; {WANTED}"
            )
        content = _field(messages[-1], "content")
        if not isinstance(content, str):
            raise ValueError(f"{place}: the prompt's content {content!r} is no text: add a 'question' column")
        # The first one: a question may contain the words itself
        head, marker, text = content.partition("Question: ")
        if not marker:
            raise ValueError(
                f"{place}: the prompt {head[:60]!r} has no 'Question: ' to tell its question by: add a "
                "'question' column"
            )
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{place}: question = {text!r} is empty: remove the row or give it a text")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError(
            f"{place}: question = {text!r} holds half a character (a lone surrogate) and cannot be "
            "encoded: mend the text"
        )
    return text.strip()


def question_of_row(row: dict, place: str, default_source: str) -> Question:
    """The question of one row; ValueError names `place`, the value and the remedy."""
    source = row.get("data_source") or default_source
    if not isinstance(source, str):
        raise ValueError(f"{place}: data_source = {source!r} must be a text, such as 'nq'")
    source = SOURCE_NAMES.get(source, source)
    name = row.get("id")
    if name is None and (index := _field(row, "extra_info", "index")) is not None:
        split = _field(row, "extra_info", "split")
        name = index if split is None else f"{split}_{index}"  # FlashRAG's own form of id, "train_0"
    if name is None:
        raise ValueError(
            f"{place}: missing field 'id' (and no extra_info.index): add an 'id' to every row; {WANTED}"
        )
    if not str(name).strip() or isinstance(name, (list, dict, bool)):
        raise ValueError(f"{place}: id = {name!r} must be a string or a number")
    text = _question_text(row, place)
    target = row.get("golden_answers")
    target = _field(row, "reward_model", "ground_truth", "target") if target is None else target
    if target is None:
        raise ValueError(
            f"{place}: missing field 'golden_answers' (and no reward_model.ground_truth.target): add it to "
            f"every row; {WANTED}"
        )
    golden_answers = _texts(target, f"{place}: golden_answers")
    if not golden_answers:
        raise ValueError(
            f"{place}: golden_answers = {list(target)!r} of {text!r} are empty: such a question cannot be "
            "scored, remove the row"
        )
    try:
        "".join((str(source), str(name), *golden_answers)).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{place}: id {name!r} or golden_answers {golden_answers!r} hold half a character (a lone "
            "surrogate) and cannot be encoded: mend the text"
        ) from None
    titles = _field(row, "metadata", "supporting_titles")
    titles = () if titles is None else _texts(titles, f"{place}: metadata.supporting_titles")
    return Question(f"{source}/{name}", text, golden_answers, source, titles)


def source_of_file(path: Path) -> str:
    """The source of rows that name none: the file's stem, or its folder if the stem is a split."""
    return path.resolve().parent.name if path.stem in SPLIT_NAMES else path.stem


def _open_rows(where: str, splits: Sequence[str]) -> tuple[Iterator[tuple[str, dict]], str]:
    """(place, row) of a file, a folder or a data set on the hub, and the source of rows that name none."""
    path = Path(where).expanduser()
    if path.is_dir():
        path = _file_of_split(path, splits)
    if path.is_file():
        if path.suffix not in READERS:
            raise ValueError(f"{path} is neither .parquet nor .jsonl: {REMEDY}")
        return READERS[path.suffix](path), source_of_file(path)
    if path.suffix not in READERS and re.fullmatch(r"(\w[\w.-]*/){1,2}\w[\w.-]*", where):
        return _hub_rows(where, splits), where.split("/")[-1]
    raise ValueError(f"no file or folder {where}: {REMEDY}")


def load_questions(
    where: str, *, split: str = "train", sources: Sequence[str] = (), source: str | None = None
) -> list[Question]:
    """The questions of a Search-R1 parquet or FlashRAG jsonl file, a folder of such files, or a hub data set.

    `split` picks the file of a folder (`train.jsonl`) or the split of a hub set; "test" falls back to "dev",
    then "train" (FlashRAG's and Search-R1's choice of evaluation split). A single file is read whole. A hub
    name is 'owner/name' or 'owner/name/config'. `sources` keeps only these `data_source`s; `source` names the
    source of rows that carry none (if None: the hub config, the file's stem, or its folder if the stem is a
    split: nq/test.jsonl is of "nq").

    Ids are 'source/id': FlashRAG's "test_0" and Search-R1's extra_info.index start anew in every source (in
    Search-R1 two such questions share one GRPO group). Raises ValueError, with file and line, for anything
    that cannot be read or scored.
    """
    rows, default_source = _open_rows(where, ("test", "dev", "train") if split == "test" else (split,))
    questions, places = [], {}
    for place, row in rows:
        question = question_of_row(row, place, source or default_source)
        if question.id in places:
            raise ValueError(
                f"{place}: id {question.id!r} is already that of {places[question.id]}: ids must be unique "
                "within a source"
            )
        places[question.id] = place
        questions.append(question)
    if not questions:
        raise ValueError(f"{where} holds no questions: {REMEDY}")
    sources = [SOURCE_NAMES.get(name, name) for name in sources]
    known = {question.source for question in questions}
    for name in sources:
        if name not in known:
            raise ValueError(
                f"{where} has no rows of source {name!r}: its sources are {', '.join(sorted(known))}"
            )
    return [question for question in questions if not sources or question.source in sources]


def _epoch_order(size: int, seed: int, epoch: int) -> torch.Tensor:
    """(size,) permutation of one epoch.

    Its seed is hashed, because torch's CPU generator reads only the low 32 bits.
    """
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    return torch.randperm(size, generator=torch.Generator().manual_seed(int.from_bytes(digest[:4], "big")))


def questions_of_step(
    questions: Sequence[Question], step: int, num_questions: int, seed: int
) -> list[Question]:
    """The questions of one step, a pure function of (seed, step).

    They are items [step*P, (step+1)*P), with P = `num_questions`, of an endless stream of epochs, each a
    fresh permutation of all questions. A step may cross from one epoch to the next and then may hold a
    question twice: a group is a position in the step, not a question id.
    """
    assert questions and step >= 0 and num_questions > 0
    size, first, last = len(questions), step * num_questions, (step + 1) * num_questions
    drawn = []
    for epoch in range(first // size, (last - 1) // size + 1):
        order = _epoch_order(size, seed, epoch)[max(first - epoch * size, 0) : last - epoch * size]
        drawn += [questions[index] for index in order.tolist()]
    return drawn


def load_benchmark(cfg: Config, name: str) -> list[Question]:
    """All test questions of the set that `eval.benchmarks` calls `name`.

    From a file with several sources only those rows whose source is `name` are taken. Raises ValueError for
    an unknown name, with the nearest one, and for whatever `load_questions` cannot read.
    """
    where = cfg.eval.benchmarks.get(name)
    if where is None:
        close = difflib.get_close_matches(name, cfg.eval.benchmarks, n=1)
        remedy = (
            f"did you mean {close[0]!r}?"
            if close
            else f"eval.benchmarks has {', '.join(cfg.eval.benchmarks)}"
        )
        raise ValueError(f"unknown benchmark {name!r}: {remedy}")
    questions = load_questions(where, split="test", source=name)
    sources, name = {question.source for question in questions}, SOURCE_NAMES.get(name, name)
    if len(sources) == 1:
        return questions
    if name not in sources:
        raise ValueError(
            f"{where} holds {', '.join(sorted(sources))} but no rows of source {name!r}: name one of these "
            "in eval.benchmarks, or give a file of one source"
        )
    return [question for question in questions if question.source == name]
