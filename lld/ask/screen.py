"""Shows an episode on a terminal while it is played: thoughts, queries, titles of passages, the answer."""

import os
import re
import shutil
from collections.abc import Sequence
from typing import TextIO

from lld.protocol import TAGS
from lld.record.runs import printable
from lld.tools import Passage

INDENT = 9  # columns for the label
# ANSI codes: 2 dim, 33 yellow, 1;32 bold green, 36 cyan
COLOURS = {"think": "2", "search": "33", "answer": "1;32", "read": "36", "sources": "32", "doubt": "33"}
COLOURS |= {"note": "2"}
_TAG = re.compile(rf"<(/?)({'|'.join(TAGS)})>")
_WHOLE_TAGS = tuple(f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/"))


def wants_colour(out: TextIO) -> bool:
    """Whether `out` is a terminal that shows colours, and the environment does not forbid them.

    NO_COLOR: https://no-color.org.
    """
    return out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def split_parts(text: str, ended: bool) -> list[tuple[str, list[str]]]:
    """The words of a turn's text by part: [("think", ["I", "need", …]), ("search", [… ]), …].

    A part is named by its tag, "text" outside of all tags; parts without words are left out. Until the turn
    has `ended`, what may still change is left out too: an incomplete tag, and the last word.
    """
    if not ended:
        start = text.rfind("<")
        if start >= 0 and any(tag.startswith(text[start:]) for tag in _WHOLE_TAGS):
            text = text[:start]
    parts, label, place = [], "text", 0
    for match in _TAG.finditer(text):
        parts.append((label, text[place : match.start()].split()))
        label, place = "text" if match[1] else match[2], match.end()
    rest = text[place:]
    words = rest.split()
    if not ended and words and not rest[-1].isspace():
        words.pop()
    return [(label, words) for label, words in [*parts, (label, words)] if words]


class Screen:
    """Prints to `out` word by word, wrapped to the terminal's width; untrusted text is made harmless."""

    def __init__(self, out: TextIO, colour: bool):
        self.out, self.colour = out, colour
        self.shown: list[int] = []  # words of each part of this turn that are printed
        self.column = 0

    def writes(self, text: str, ended: bool) -> None:
        """Prints what is new in the text that the model has written in this turn."""
        for number, (label, words) in enumerate(split_parts(text, ended)):
            if number == len(self.shown):
                self._begin(label)
                self.shown.append(0)
            for word in words[self.shown[number] :]:
                self._word(word, COLOURS.get(label))
            self.shown[number] = len(words)
        if ended:
            self.shown = []
        self.out.flush()

    def finds(self, passages: Sequence[Passage]) -> None:
        """Prints the titles of the passages that a search found, one a line."""
        self.end_line()
        for rank, passage in enumerate(passages, start=1):
            title = passage.contents.partition("\n")[0].strip('"') or "(no title)"
            room = shutil.get_terminal_size().columns - INDENT - 4
            title = title if len(title) <= room else title[: room - 1] + "…"
            self.line("", f"{rank}  {title}", "read")
        if not passages:
            self.line("", "nothing found", "read")

    def line(self, label: str, text: str, colour: str = "note") -> None:
        """Prints a label and a text on lines of their own."""
        self._begin(label)
        for word in text.split(" "):
            self._word(word, COLOURS.get(colour))
        self.end_line()

    def end_line(self) -> None:
        if self.column:
            self.out.write("\n")
            self.out.flush()
        self.column = 0

    def _begin(self, label: str) -> None:
        self.end_line()
        self._write(label.ljust(INDENT), COLOURS.get(label))
        self.column = INDENT

    def _word(self, word: str, colour: str | None) -> None:
        word = printable(word)
        width = shutil.get_terminal_size().columns
        if self.column > INDENT and self.column + 1 + len(word) > width:
            self.out.write("\n" + " " * INDENT)
            self.column = INDENT
        self._write((" " if self.column > INDENT else "") + word, colour)
        self.column += len(word) + (self.column > INDENT)

    def _write(self, text: str, colour: str | None) -> None:
        self.out.write(f"\x1b[{colour}m{text}\x1b[0m" if self.colour and colour else text)
