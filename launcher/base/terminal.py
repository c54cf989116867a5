"""The terminal: standard streams, width, color, and how text and tables are laid out. Standard library only.

Everything that a verb prints goes through `print_answer` (stdout) or `launcher.base.talk.say` (stderr). On a terminal,
lines are wrapped at spaces, never inside a number, an interval, or a word. Elsewhere nothing is wrapped or colored.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections.abc import Collection, Sequence
from typing import TextIO
from unicodedata import category, combining, east_asian_width

_STEERING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of Unicode: controls, marks that turn the direction of text, halves of characters, ends of lines."""
_GLUE = "\ue000"
"""Stands for a space at which no line is broken (a private character; text that has it keeps it)."""
_UNBROKEN = re.compile(r"\[[^\[\]\n]{1,60}\]|(?<=\d) to (?=[-+\d])|(?<=\d) (?=%)")
"""Intervals: `[0.1, 0.2]`, `1.2 to 18`; and the sign after a number, `85 %`."""
_LEAD = re.compile(r"\s*(?:[-*] )?")
_COMMAND = re.compile(r"\s*(?:[a-z ]+: )?(?:forerun|python3?|torchrun|srun|sbatch) ")
_HANGING_COLUMNS = 2
_GAP = "  "
"""Separator of the columns of a table."""


def open_standard_streams() -> None:
    """Open what is closed of stdin, stdout and stderr (`>&-`) on the null device, and print any character.

    A file that is opened later would otherwise get the number of the closed stream, and whatever a child process
    prints would end up in it. What an encoding cannot say is spelled out, as \\xe9.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as Python runs
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop_stream(stream: TextIO) -> None:
    """Send what a standard stream still holds, and all that comes, to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def print_answer(text: str) -> None:
    """Print on stdout, laid out for a terminal if it is one; if its reader has hung up (`| head`), go on without it.

    The exit code still says what a verb found.
    """
    try:
        print(lay_out(text, sys.stdout), flush=True)
    except BrokenPipeError:
        drop_stream(sys.stdout)


def shown(text: str) -> str:
    """A text as a terminal may have it: what would steer it is spelled out, as \\x1b. New lines and tabs stay.

    Names of files, runs and hosts, and the environment, are not ours: an escape in one could colour a line, hide it, or
    write another.
    """
    return "".join(
        c if c in "\n\t" or category(c) not in _STEERING else c.encode("unicode_escape").decode() for c in text
    )


def lay_out(text: str, stream: TextIO) -> str:
    """Return a text wrapped and colored for a stream that is a terminal, and as it is for any other."""
    if not stream.isatty():
        return text
    wrapped = wrap(text, terminal_columns(stream))
    return _color(wrapped) if has_color(stream) else wrapped


def terminal_columns(stream: TextIO) -> int:
    """Return the width of the terminal behind a stream: `COLUMNS`, or what the terminal says, or 80."""
    if os.environ.get("COLUMNS", "").isdecimal() and int(os.environ["COLUMNS"]) > 0:
        return int(os.environ["COLUMNS"])
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns


def has_color(stream: TextIO) -> bool:
    """Whether a stream is a terminal with color; `NO_COLOR` and `TERM=dumb` say no."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def count_columns(text: str) -> int:
    """Return how many columns of a terminal a text takes: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


# ---- Lines ----


def wrap(text: str, columns: int) -> str:
    """Wrap every line at spaces. A word, number, path, or interval is never broken, however long.

    A command is continued by a backslash, so that it can be pasted into a shell.
    """
    return "\n".join(part for line in text.split("\n") for part in _wrap_line(line, columns))


def _wrap_line(line: str, columns: int) -> list[str]:
    if count_columns(line) <= columns:
        return [line]
    lead = _LEAD.match(line)
    assert lead is not None
    hanging = " " * max(lead.end(), _HANGING_COLUMNS)
    ending = " \\" if _COMMAND.match(line) else ""
    first, *words = re.split(r"( +)", _glue(line[lead.end() :]))
    lines = [lead[0] + first]
    for gap, word in zip(words[::2], words[1::2], strict=True):
        if count_columns(lines[-1] + gap + word + ending) <= columns:
            lines[-1] += gap + word
        elif word:
            lines[-1] += ending
            lines.append(hanging + word)
    return [wrapped.replace(_GLUE, " ") for wrapped in lines]


def _glue(text: str) -> str:
    return _UNBROKEN.sub(lambda match: match[0].replace(" ", _GLUE), text)


# ---- Tables ----


def lay_out_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int], columns: int | None
) -> str:
    """Return a table with its columns under heads, those of `left` aligned left, the others right.

    Args:
        head: Name of each column.
        rows: Cells of each row, as many as `head`.
        left: Indexes of the columns that are aligned left.
        columns: Width of the terminal; None for no limit. Cells are wrapped between words to fit; if that is not
            enough, each row becomes a line `name: cell; name: cell`.
    """
    table = [[_glue(shown(cell)) for cell in row] for row in (head, *rows)]
    widths = [max(count_columns(line) for row in table for line in row[at].split("\n")) for at in range(len(head))]
    if columns is not None:
        smallest = [
            max(count_columns(word) for row in table for word in (row[at].split() or [""])) for at in range(len(head))
        ]
        room = columns - len(_GAP) * (len(head) - 1)
        if sum(smallest) > room:
            return _sentences(table)
        while sum(widths) > room:  # the widest column gives way first
            at = max(range(len(head)), key=lambda at: (widths[at] > smallest[at], widths[at]))
            widths[at] -= 1
    lines = []
    for index, row in enumerate(table):
        cells = [_wrap_cell(cell, width) for cell, width in zip(row, widths, strict=True)]
        height = max(map(len, cells))
        for cell in cells:  # heads stand on their columns, cells hang from their row
            at = 0 if index == 0 else len(cell)
            cell[at:at] = [""] * (height - len(cell))
        for parts in zip(*cells, strict=True):
            line = _GAP.join(_align(part, widths[at], at in left) for at, part in enumerate(parts))
            lines.append(line.rstrip().replace(_GLUE, " "))
    return "\n".join(lines)


def _sentences(table: Sequence[Sequence[str]]) -> str:
    head, *rows = table
    lines = (
        "; ".join(f"{name}: {cell}" if name else cell for name, cell in zip(head, row, strict=True) if cell)
        for row in rows
    )
    return "\n".join(lines).replace(_GLUE, " ")


def _wrap_cell(cell: str, width: int) -> list[str]:
    lines: list[str] = []
    for paragraph in cell.split("\n"):
        lines.append("")
        for gap, word in re.findall(r"( *)([^ ]*)", paragraph):
            if count_columns(lines[-1] + gap + word) <= width:
                lines[-1] += gap + word
            else:
                lines.append(word)
    return lines


def _align(text: str, width: int, left: bool) -> str:
    padding = " " * (width - count_columns(text))
    return text + padding if left else padding + text


# ---- Color ----

_RED, _GREEN, _YELLOW, _BOLD = "31", "32", "33", "1"
_END = r"(?=$|[,;:]|  | \()"
_COLORS = (
    (re.compile(r"^(?:ok(?=   )|ready to launch(?=:))", re.M), _GREEN),
    (re.compile(r"^(?:forerun:|fail(?=  ))", re.M), _RED),
    (re.compile(r"^(?:warning:|warn(?=  )|UNREHEARSED:|cannot tell\b|CANNOT TELL\b)", re.M), _YELLOW),
    (re.compile(r"^next:", re.M), _BOLD),
    # An outcome stands after a colon, or alone in its cell.
    (re.compile(rf"(?<=: |  )(?:passed|passes|holds|converged|tuned){_END}", re.M), _GREEN),
    (re.compile(rf"(?<=: |  )(?:drifts|blows up|vanishes){_END}|(?<=: )(?:failed|diverged){_END}", re.M), _RED),
    (re.compile(rf"(?<=: |  )cannot tell{_END}", re.M), _YELLOW),
)


def _color(text: str) -> str:
    for pattern, color in _COLORS:
        text = pattern.sub(rf"\033[{color}m\g<0>\033[0m", text)
    return text
