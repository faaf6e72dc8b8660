"""Looks over a file of questions or passages: `python -m lld.data check FILE`.

What a file holds is told by its first row. Every row is read as training or the retriever would read it; the
first problems are listed with their places, instead of ending at the first one.
"""

import array
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from lld.data.passages import open_lines, parse_passage, read_lines, repeated_ids
from lld.data.questions import (
    WANTED,
    jsonl_lines,
    parquet_rows,
    question_of_row,
    row_of_line,
    source_of_file,
)
from lld.reward import normalize_answer

MOST_PROBLEMS = 10  # that are listed
ROWS = {
    "questions": WANTED.removeprefix("a row is such as "),
    "passages": r'{"id": "0", "contents": "\"Emma (novel)\"\nEmma is a novel written by Jane Austen."}',
}
BOTH = "; ".join(f"a row of {kind} is such as {row}" for kind, row in ROWS.items())
# A row with one of these fields holds …; the first that is found decides.
FIELDS = {
    "contents": "passages",
    "question": "questions",
    "golden_answers": "questions",
    "prompt": "questions",
}


@dataclass
class Report:
    """What a file holds: `good` rows can be used, `bad` ones not; `problems` are the first of the latter."""

    kind: str  # "questions" or "passages"
    good: int = 0
    bad: int = 0
    problems: list[str] = field(default_factory=list)
    facts: str = ""

    def add_problem(self, error: ValueError | str) -> None:
        self.bad += 1
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(str(error).removesuffix(f"; {WANTED}"))

    def lines(self, path: Path) -> Iterator[str]:
        """The report as text, one line each."""
        yield f"{path}: {self.good} {self.kind} can be used, {self.bad} rows cannot; {self.facts}"
        yield from (f"  {problem}" for problem in self.problems)
        if self.bad > len(self.problems):
            yield f"  … and {self.bad - len(self.problems)} more"
        if self.bad or not self.good:
            yield f"a row of {self.kind} is such as"
            yield f"  {ROWS[self.kind]}"


def check(path: Path) -> Report:
    """Reads every row of a .jsonl, .jsonl.gz or .parquet file; ValueError if it is none of them."""
    if not path.is_file():
        raise ValueError(f"no file {path}")
    if path.suffix == ".parquet":
        return check_questions(parquet_rows(path), path)
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(f"{path} is neither .jsonl, .jsonl.gz (passages) nor .parquet (questions); {BOTH}")
    if kind_of(path) == "passages":
        return check_passages(path)
    if path.suffix == ".gz":
        raise ValueError(f"{path}: questions are read from .jsonl or .parquet: unpack the file")
    return check_questions(jsonl_lines(path), path)


def kind_of(path: Path) -> str:
    """Questions or passages, told by the first line that holds an object with a field of one of them."""
    with open_lines(str(path)) as file:
        for line in islice(read_lines(file, str(path)), 1000):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and row.keys() & FIELDS.keys():
                return next(FIELDS[name] for name in FIELDS if name in row)
    raise ValueError(f"{path}: none of its first 1000 lines holds an object with a known field; {BOTH}")


def check_questions(rows: Iterator[tuple[str, str | dict]], path: Path) -> Report:
    report, places, sources, wordless = Report("questions"), {}, Counter(), 0
    for place, row in rows:
        try:
            row = row_of_line(row, place) if isinstance(row, str) else row
            question = question_of_row(row, place, source_of_file(path))
            if question.id in places:
                raise ValueError(f"{place}: id {question.id!r} is already that of {places[question.id]}")
        except ValueError as error:
            report.add_problem(error)
            continue
        places[question.id] = place
        sources[question.source] += 1
        wordless += not all(map(normalize_answer, question.golden_answers))
        report.good += 1
    names = [f"{name!r} ({count})" for name, count in sources.most_common(10)]
    report.facts = f"sources: {', '.join(names) or 'none'}" + (", …" if len(sources) > 10 else "")
    if wordless:
        report.facts += f'; {wordless} with a gold answer that an empty one matches, such as "The" or "?"'
    return report


def check_passages(path: Path) -> Report:
    report, hashes, titled, characters = Report("passages"), array.array("q"), 0, 0
    with open_lines(str(path)) as file:
        for number, line in enumerate(read_lines(file, str(path)), start=1):
            try:
                passage = parse_passage(line, f"{path} line {number}")
            except ValueError as error:
                report.add_problem(error)
                hashes.append(-number)
                continue
            hashes.append(hash(passage.id))
            report.good += 1
            titled += passage.contents.startswith('"') and '"\n' in passage.contents
            characters += len(passage.contents)
    mean = characters / max(1, report.good)
    report.facts = f"{titled} with a title in quotes as their first line, {mean:.0f} characters on average"
    for problem in repeated_ids(str(path), hashes):  # of lines that were counted as good
        report.add_problem(problem)
        report.good -= 1
    return report
