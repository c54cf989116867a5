"""The terminal: standard streams, width, color, and the layout of text and tables.

Everything that a verb prints goes through `print_answer` (stdout) or
`forerun._launcher.main_run.progress_output.print_progress` (stderr), which says why both modules
are in this layer. On a terminal, lines are wrapped at spaces, never inside a number, an interval,
or a word. In files and pipes, text is neither wrapped nor colored.
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
"""Unicode categories of control characters, text direction marks, surrogates, and line separators.
"""
_GLUE = "\ue000"
"""Private character that stands for a space at which a line must not be broken."""
_UNBROKEN = re.compile(r"\[[^\[\]\n]{1,60}\]|(?<=\d) to (?=[-+\d])|(?<=\d) (?=%)")
"""Text with spaces that must not be broken: intervals (`[0.1, 0.2]`, `1.2 to 18`) and percentages
(`85 %`)."""
_LEAD = re.compile(r"\s*(?:[-*] )?")
"""Indent of a line, with the mark of a list's item."""
_COMMAND = re.compile(r"\s*(?:[a-z ]+: )?(?:forerun|python3?|torchrun|srun|sbatch) ")
_HANGING_COLUMNS = 2
"""Minimum indent of the second and later lines of a wrapped line."""
_GAP = "  "
"""Space between the columns of a table."""


def open_standard_streams() -> None:
    """Open closed standard streams (`>&-`) on the null device, and let stdout and stderr print any
    character.

    A file that is opened later would otherwise get the number of the closed stream, and the output
    of a child process would be written into it. Characters that the stream's encoding does not have
    are printed as escapes, such as \\xe9.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - open until Python ends
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop_stream(stream: TextIO) -> None:
    """Send a standard stream's buffered and later output to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def print_answer(text: str) -> None:
    """Print a text on stdout, laid out if stdout is a terminal.

    If the reader of a pipe has closed it (`| head`), the output is dropped, and the verb still ends
    with its exit code.
    """
    try:
        print(lay_out(text, sys.stdout), flush=True)
    except BrokenPipeError:
        drop_stream(sys.stdout)


def escape_control_characters(text: str) -> str:
    """Return a text with control characters written as escapes, such as \\x1b; newlines and tabs
    stay.

    Names of files, runs, hosts, and environment variables are not trusted: a control sequence in
    one could color a line, hide it, or write another.
    """
    return "".join(
        c if c in "\n\t" or category(c) not in _STEERING else c.encode("unicode_escape").decode()
        for c in text
    )


def lay_out(text: str, stream: TextIO) -> str:
    """Return a text wrapped and colored if the stream is a terminal, else unchanged."""
    if not stream.isatty():
        return text
    wrapped = wrap(text, get_terminal_columns(stream))
    return _color(wrapped) if has_color(stream) else wrapped


def get_terminal_columns(stream: TextIO) -> int:
    """Return the width of a stream's terminal in columns: `COLUMNS` if set, else the terminal's
    own, else 80.
    """
    if os.environ.get("COLUMNS", "").isdecimal() and int(os.environ["COLUMNS"]) > 0:
        return int(os.environ["COLUMNS"])
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns


def has_color(stream: TextIO) -> bool:
    """Return whether a stream is a terminal with color, and neither `NO_COLOR` nor `TERM=dumb` is
    set.
    """
    return (
        stream.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM", "dumb") != "dumb"
    )


def count_columns(text: str) -> int:
    """Return the width of a text in columns of a terminal: wide characters take two, combining ones
    none.
    """
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


# ---- Lines ----


def wrap(text: str, columns: int) -> str:
    """Wrap the lines of a text at spaces. Words, numbers, paths, and intervals are never broken,
    even if they are long.

    A line that is a command gets backslashes, so that it can be pasted into a shell.
    """
    return "\n".join(part for line in text.split("\n") for part in _wrap_line(line, columns))


def _wrap_line(line: str, columns: int) -> list[str]:
    if count_columns(line) <= columns:
        return [line]
    lead = _LEAD.match(line)
    assert lead is not None
    lines = _break_at_spaces(
        lead[0].replace(" ", _GLUE) + _glue(line[lead.end() :]),
        columns,
        hanging=" " * max(lead.end(), _HANGING_COLUMNS),
        ending=" \\" if _COMMAND.match(line) else "",
    )
    return [wrapped.replace(_GLUE, " ") for wrapped in lines]


def _break_at_spaces(text: str, columns: int, hanging: str = "", ending: str = "") -> list[str]:
    """Break one line of text into lines of at most `columns`; a longer word is kept whole.

    Args:
        text: The text.
        columns: Maximum width of a line.
        hanging: Indent of the second and later lines.
        ending: Text at the end of every line except the last.
    """
    first, *words = re.split(r"( +)", text)
    lines = [first]
    for gap, word in zip(words[::2], words[1::2], strict=True):
        if count_columns(lines[-1] + gap + word + ending) <= columns:
            lines[-1] += gap + word
        elif word:
            lines[-1] += ending
            lines.append(hanging + word)
    return lines


def _glue(text: str) -> str:
    return _UNBROKEN.sub(lambda match: match[0].replace(" ", _GLUE), text)


# ---- Tables ----


def format_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,)
) -> str:
    """Return a table for stdout, as wide as its terminal; not wrapped if stdout is no terminal.

    Args:
        head: Name of each column.
        rows: Cells of each row, as many as `head`.
        left: Indexes of the columns that are aligned left; the others are aligned right.
    """
    columns = get_terminal_columns(sys.stdout) if sys.stdout.isatty() else None
    return lay_out_table(head, rows, left, columns)


def lay_out_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int], columns: int | None
) -> str:
    """Return a table as aligned columns below their names.

    Args:
        head: See `format_table`.
        rows: See `format_table`.
        left: See `format_table`.
        columns: Width of the terminal; None for no limit. Cells are wrapped between words to fit;
            if that is not enough, each row becomes a line `name: cell; name: cell`.
    """
    table = [[_glue(escape_control_characters(cell)) for cell in row] for row in (head, *rows)]
    widths = [
        max(count_columns(line) for row in table for line in row[at].split("\n"))
        for at in range(len(head))
    ]
    if columns is not None:
        min_widths = [
            max(count_columns(word) for row in table for word in (row[at].split() or [""]))
            for at in range(len(head))
        ]
        room = columns - len(_GAP) * (len(head) - 1)
        if sum(min_widths) > room:
            return _lay_out_rows_as_lines(table)
        while sum(widths) > room:  # Narrow the widest column that can still be narrowed.
            at = max(range(len(head)), key=lambda at: (widths[at] > min_widths[at], widths[at]))
            widths[at] -= 1
    lines = []
    for index, row in enumerate(table):
        cells = [
            [part for line in cell.split("\n") for part in _break_at_spaces(line, width)]
            for cell, width in zip(row, widths, strict=True)
        ]
        height = max(map(len, cells))
        for cell in cells:  # align names at the bottom and cells at the top
            at = 0 if index == 0 else len(cell)
            cell[at:at] = [""] * (height - len(cell))
        for parts in zip(*cells, strict=True):
            line = _GAP.join(_align(part, widths[at], at in left) for at, part in enumerate(parts))
            lines.append(line.rstrip().replace(_GLUE, " "))
    return "\n".join(lines)


def _lay_out_rows_as_lines(table: Sequence[Sequence[str]]) -> str:
    head, *rows = table
    lines = (
        "; ".join(
            f"{name}: {cell}" if name else cell
            for name, cell in zip(head, row, strict=True)
            if cell
        )
        for row in rows
    )
    return "\n".join(lines).replace(_GLUE, " ")


def _align(text: str, width: int, left: bool) -> str:
    padding = " " * (width - count_columns(text))
    return text + padding if left else padding + text


# ---- Color ----

# Words of outcomes and prefixes of messages that other modules print. An unlisted word has no
# color.
_RED, _GREEN, _YELLOW, _BOLD = "31", "32", "33", "1"
_END = r"(?=$|[,;:]|  | \()"
_COLORS = (
    (re.compile(r"^(?:ok(?=   )|ready to launch(?=:))", re.M), _GREEN),
    (re.compile(r"^(?:forerun:|fail(?=  ))", re.M), _RED),
    (
        re.compile(r"^(?:warning:|warn(?=  )|UNREHEARSED:|cannot tell\b|CANNOT TELL\b)", re.M),
        _YELLOW,
    ),
    (re.compile(r"^next:", re.M), _BOLD),
    # An outcome follows a colon, or is alone in its cell
    (re.compile(rf"(?<=: |  )(?:passed|passes|holds|converged|tuned){_END}", re.M), _GREEN),
    (
        re.compile(
            rf"(?<=: |  )(?:drifts|blows up|vanishes){_END}|(?<=: )(?:failed|diverged){_END}", re.M
        ),
        _RED,
    ),
    (re.compile(rf"(?<=: |  )cannot tell{_END}", re.M), _YELLOW),
)


def _color(text: str) -> str:
    for pattern, color in _COLORS:
        text = pattern.sub(rf"\033[{color}m\g<0>\033[0m", text)
    return text
