"""What the command line says while it works: on stderr, a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
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


def duration(seconds: float) -> str:
    """Seconds as people say them: 42 s, 3 min 05 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Meter:
    """Progress of one stage in any unit of work, with the time left at the rate so far."""

    def __init__(self, label: str, total: float) -> None:
        self._label, self._total, self._done = label, total, 0.0
        self._started = self._said = time.monotonic()
        self._live = sys.stderr.isatty()
        self.left_seconds: float | None = None
        """At the rate so far; None before anything is done."""

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live:
            _put(_CLEAR)

    def add(self, work: float, note: str = "", under_way: float = 0.0) -> None:
        """Count finished work, and say so if it is time; `under_way` is done of what is not finished, as of now."""
        self._done += work
        now = time.monotonic()
        elapsed = now - self._started
        share = min((self._done + under_way) / self._total, 1.0) if self._total else 1.0
        self.left_seconds = elapsed / share * (1 - share) if share else None
        left = f", {duration(self.left_seconds)} left" if self.left_seconds else ""
        line = f"{self._label}: {share:4.0%} in {duration(elapsed)}{left}{'  ' + note if note else ''}"
        if self._live:
            _put(f"{_CLEAR}{shown(line[:150])}")
        elif now - self._said > PLAIN_EVERY_SECONDS or (share == 1 and not under_way):
            say(line)
            self._said = now
