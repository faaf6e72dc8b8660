"""Records a session of lld.ask on a terminal and writes it as a picture: docs/ask.svg.

    python tests/bench/ask_recording.py --ckpt runs/tiny --out docs/ask.svg "question" "question" …

The command runs in a pseudo-terminal; the questions are typed, then Ctrl-D. What it printed is drawn as it
came, colours included; the time at which each line began stands in the picture's `data-s`.
"""

import argparse
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from fcntl import ioctl
from html import escape
from pathlib import Path

COLUMNS, ROWS = 84, 40
PROMPT = b"? "
# Colours by ANSI code, on a dark ground
INK = {"": "#e6e6e6", "2": "#9aa4b2", "33": "#f2c14e", "36": "#6cc5d9", "32": "#8fd694", "1;32": "#8fd694"}
GROUND = "#1b1f27"
NBSP = "\N{NO-BREAK SPACE}"  # of several plain spaces a picture shows one
_CODE = re.compile(r"\x1b\[([\d;]*)m|\x1b\[\?\d+[hl]|\x1b\[K|\r")


def record(command: list[str], typed: list[str], timeout_s: float) -> list[tuple[float, bytes]]:
    """(seconds, bytes) of everything that the command prints while the lines are typed at its prompts."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ |= {"TERM": "xterm", "COLUMNS": str(COLUMNS), "INPUTRC": "/dev/null"}
        os.environ.pop("NO_COLOR", None)
        os.execvp(command[0], command)
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    waiting, seen, began, pieces = [*typed, None], b"", time.monotonic(), []
    while time.monotonic() - began < timeout_s:
        if not select.select([terminal], [], [], 0.2)[0]:
            continue
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # the command has ended
            break
        if not piece:
            break
        pieces.append((time.monotonic() - began, piece))
        seen += piece
        if seen.endswith(PROMPT) and waiting:
            line, seen = waiting.pop(0), b""
            time.sleep(0.3)
            os.write(terminal, b"\x04" if line is None else line.encode() + b"\n")
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 0, b"".join(piece for _, piece in pieces).decode()
    return pieces


def lines_of(pieces: list[tuple[float, bytes]]) -> list[tuple[float, list[tuple[str, str]]]]:
    """Lines with the time at which each began, as (colour, text) pieces."""
    lines, colour, began = [], "", None
    current: list[tuple[str, str]] = []
    for seconds, piece in pieces:
        for part in re.split(r"(\x1b\[[\d;?]*[a-zA-Z]|\r|\n)", piece.decode()):
            if part == "\n":
                lines.append((seconds if began is None else began, current))
                current, began = [], None
            elif match := _CODE.fullmatch(part):
                colour = colour if match[1] is None else match[1].removeprefix("0")
            elif part:
                began = seconds if began is None else began
                current.append((colour, part))
    lines += [(began or 0.0, current)] if current else []
    return [(seconds, row) for seconds, line in lines for row in wrapped(line)]


def wrapped(line: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """The rows that a line takes on the terminal."""
    rows, column = [[]], 0
    for colour, text in line:
        while text:
            if column == COLUMNS:
                rows, column = [*rows, []], 0
            fits = text[: COLUMNS - column]
            before = rows[-1].pop()[1] if rows[-1] and rows[-1][-1][0] == colour else ""
            rows[-1].append((colour, before + fits))
            text, column = text[len(fits) :], column + len(fits)
    return rows


def draw(lines: list[tuple[float, list[tuple[str, str]]]], title: str) -> str:
    """The SVG picture of a terminal with these lines."""
    width, height, left, top = 8.43, 19, 16, 52
    rows = []
    for number, (seconds, pieces) in enumerate(lines):
        spans, column = "", 0
        for colour, text in pieces:
            weight = ' font-weight="bold"' if colour.startswith("1;") else ""
            x, shown = left + column * width, escape(text).replace(" ", NBSP)
            spans += f'<tspan x="{x:.1f}" fill="{INK.get(colour, INK[""])}"{weight}>{shown}</tspan>'
            column += len(text)
        rows.append(f'<text y="{top + number * height}" data-s="{seconds:.2f}">{spans}</text>')
    across, down = 2 * left + COLUMNS * width, top + len(lines) * height + 8
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across:.0f} {down}" width="{across:.0f}" '
            'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14">',
            f"<title>{escape(title)}</title>",
            f'<rect width="100%" height="100%" rx="8" fill="{GROUND}"/>',
            *(
                f'<circle cx="{22 + 18 * n}" cy="20" r="5.5" fill="{ink}"/>'
                for n, ink in enumerate(("#e0645c", "#e0b23e", "#6fbf73"))
            ),
            *rows,
            "</svg>\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ckpt", required=True)
    parser.add_argument("--out", type=Path, default=Path("docs/ask.svg"))
    parser.add_argument("--timeout-s", type=float, default=180.0)
    parser.add_argument("questions", nargs="+")
    args = parser.parse_args()
    pieces = record([sys.executable, "-m", "lld.ask", "--ckpt", args.ckpt], args.questions, args.timeout_s)
    shown = f"$ python -m lld.ask --ckpt {args.ckpt}"
    args.out.write_text(draw([(0.0, [("", shown)]), *lines_of(pieces)], shown), encoding="utf-8")
    print(f"{args.out}: {len(lines_of(pieces))} lines, {pieces[-1][0]:.1f} s")


if __name__ == "__main__":
    main()
