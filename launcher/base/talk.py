"""What the command line says while it works: on stderr, a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from types import TracebackType
from unicodedata import category

PLAIN_EVERY_SECONDS = 15.0


_CLEAR = "\r\033[K"
_STEERING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of Unicode: controls, marks that turn the direction of text, halves of characters, ends of lines."""


def shown(text: str) -> str:
    """A text as a terminal may have it: what would steer it is spelled out, as \\x1b. New lines and tabs stay.

    Names of files, runs and hosts, and the environment, are not ours: an escape in one could colour a line, hide it, or
    write another.
    """
    return "".join(
        c if c in "\n\t" or category(c) not in _STEERING else c.encode("unicode_escape").decode() for c in text
    )


def say(text: str) -> None:
    """A line on stderr, in the place of a live one."""
    _put(f"{_CLEAR if sys.stderr.isatty() else ''}{shown(text)}\n")


def _put(text: str) -> None:
    """Work continues where nobody reads: a terminal that is gone, a log's disk that is full.

    A signal's handler may speak while a line is being written, which Python refuses as a RuntimeError.
    """
    with contextlib.suppress(OSError, RuntimeError):
        print(text, end="", file=sys.stderr, flush=True)


def counted(number: int, noun: str) -> str:
    """Return a number of things: `1 run`, `2 runs`, `2 batches`."""
    plural = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number} {noun}{plural * (number != 1)}"


def with_article(noun: str) -> str:
    """Return a noun behind its indefinite article: `a readout`, `an embedding`."""
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"


def duration(seconds: float) -> str:
    """Seconds as people say them: 42 s, 3 min 05 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class LiveLine:
    """A line that is redrawn in place on a terminal, with a bar; elsewhere a plain line now and then."""

    def __init__(self) -> None:
        self._said = time.monotonic()
        self._live = sys.stderr.isatty()

    def show(self, text: str, share: float | None = None, *, last: bool = False) -> None:
        """Show how things stand, with a bar of `share` (0 to 1); `last`: also where it is not time yet."""
        now = time.monotonic()
        if self._live:
            _put(f"{_CLEAR}{_fitted(shown(text), share)}")
        elif last or now - self._said > PLAIN_EVERY_SECONDS:
            say(text)
            self._said = now

    def clear(self) -> None:
        """Take the live line away."""
        if self._live:
            _put(_CLEAR)


_BAR_COLUMNS = 20


def _fitted(text: str, share: float | None) -> str:
    """A text that fits a terminal's line, with a bar before it where there is room: what wraps is not redrawn."""
    columns = _columns() - 1
    room = columns - len(text) - 1
    if share is None or room < _BAR_COLUMNS // 2:
        return text[:columns]
    from rich.console import Console
    from rich.progress_bar import ProgressBar

    console = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system="standard")
    with console.capture() as bar:
        console.print(ProgressBar(total=1.0, completed=share, width=min(room, _BAR_COLUMNS)), end="")
    return f"{bar.get()} {text}"


def _columns() -> int:
    """Of the terminal that stderr is; 150 where it does not tell."""
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns or 150
    return 150


class Meter:
    """Progress of one stage in any unit of work, with the time left at the rate so far."""

    def __init__(self, label: str, total: float) -> None:
        self._label, self._total, self._done = label, total, 0.0
        self._started, self._line = time.monotonic(), LiveLine()
        self.left_seconds: float | None = None
        """At the rate so far; None before anything is done."""

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._line.clear()

    def add(self, work: float, note: str = "", under_way: float = 0.0) -> None:
        """Count finished work, and say so if it is time; `under_way` is done of what is not finished, as of now."""
        self._done += work
        elapsed = time.monotonic() - self._started
        share = min((self._done + under_way) / self._total, 1.0) if self._total else 1.0
        self.left_seconds = elapsed / share * (1 - share) if share else None
        left = f", {duration(self.left_seconds)} left" if self.left_seconds else ""
        line = f"{self._label}: {share:4.0%} in {duration(elapsed)}{left}{'  ' + note if note else ''}"
        self._line.show(line, last=share == 1 and not under_way)
