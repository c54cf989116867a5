"""Progress output on stderr: a live line on a terminal, plain lines elsewhere.

All commands print with this module and with `terminal_layout`. They are in `main_run` because that
is the layer of `launcher` from which all others import.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import time
from typing import Literal, Self

from forerun._launcher.main_run.terminal_layout import (
    count_columns,
    escape_control_characters,
    get_terminal_columns,
    has_color,
    lay_out,
    wrap,
)
from forerun._proxies.core.notation import format_duration, format_percent

PLAIN_EVERY_SECONDS = 15.0
"""Minimum seconds between two progress lines if stderr is not a terminal."""

_CLEAR = "\r\033[K"


def print_progress(text: str) -> None:
    """Print a line on stderr; it replaces a live line."""
    clear = _CLEAR if sys.stderr.isatty() else ""
    _print_safely(f"{clear}{lay_out(escape_control_characters(text), sys.stderr)}\n")


def _print_safely(text: str) -> None:
    """Write a text on stderr and ignore failures, so that work continues if the terminal is gone or
    the disk of a log is full.

    A signal handler may print while a line is being written, which Python reports as a
    RuntimeError.
    """
    with contextlib.suppress(OSError, RuntimeError):
        print(text, end="", file=sys.stderr, flush=True)


class ProgressLine:
    """A progress line: on a terminal redrawn in place with a bar, elsewhere printed as a plain line
    from time to time.
    """

    def __init__(self) -> None:
        self._printed_at = time.monotonic()
        self._live = sys.stderr.isatty()

    def show(self, text: str, share: float | None = None, *, at_once: bool = False) -> None:
        """Show the state of the work.

        Args:
            text: The state; parts that may be dropped for room are separated by two spaces.
            share: Share of the work that is done, 0 to 1, for the bar; None for no bar.
            at_once: Whether to print a plain line now, however recent the last one is.
        """
        now = time.monotonic()
        if self._live:
            _print_safely(f"{_CLEAR}{_fit_line(escape_control_characters(text), share)}")
        elif at_once or now - self._printed_at > PLAIN_EVERY_SECONDS:
            print_progress(text)
            self._printed_at = now

    def clear(self) -> None:
        """Remove the live line from the terminal."""
        if self._live:
            _print_safely(_CLEAR)


_BAR_COLUMNS = 20


def _fit_line(text: str, share: float | None) -> str:
    """Return a text cut to one line of the terminal, with a bar before it if there is room. A line
    that wraps could not be redrawn.

    Parts of the text, which are separated by two spaces, are dropped from the end until it fits; no
    part is cut.
    """
    columns = get_terminal_columns(sys.stderr) - 1
    parts = text.split("  ")
    while len(parts) > 1 and count_columns("  ".join(parts)) > columns:
        parts.pop()
    text = wrap("  ".join(parts), columns).split("\n")[0]
    room = columns - count_columns(text) - 1
    if share is None or room < _BAR_COLUMNS // 2:
        return text[:columns]
    from rich.console import Console
    from rich.progress_bar import ProgressBar

    system: Literal["standard"] | None = "standard" if has_color(sys.stderr) else None
    console = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=system)
    with console.capture() as bar:
        console.print(
            ProgressBar(total=1.0, completed=share, width=min(room, _BAR_COLUMNS)), end=""
        )
    return f"{bar.get()} {text}"


class WorkMeter:
    """Progress of one stage in any unit of work, with the time left at the rate so far."""

    def __init__(self, label: str, total: float) -> None:
        self._label, self._total, self._done = label, total, 0.0
        self._started, self._line = time.monotonic(), ProgressLine()
        self.left_seconds: float | None = None
        """Seconds left at the rate so far; None before any work is done."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.clear()

    def add(self, work: float, note: str = "", under_way: float = 0.0) -> None:
        """Count finished work, and print the progress if it is time.

        Args:
            work: Work that has finished.
            note: Text behind the progress.
            under_way: Work done so far on items that have not finished.
        """
        self._done += work
        elapsed = time.monotonic() - self._started
        share = min((self._done + under_way) / self._total, 1.0) if self._total else 1.0
        self.left_seconds = elapsed / share * (1 - share) if share else None
        left = f", {format_duration(self.left_seconds)} left" if self.left_seconds else ""
        done = f"{format_percent(share, is_whole=True):>5} in {format_duration(elapsed)}"
        line = f"{self._label}: {done}{left}{'  ' + note if note else ''}"
        self._line.show(line, at_once=share == 1 and not under_way)


class StepProgress:
    """A progress line that a thread draws while the main thread is in long steps.

    Work that ends within `FIRST_AFTER_SECONDS` prints nothing.
    """

    FIRST_AFTER_SECONDS = 4.0
    EVERY_SECONDS = 1.0

    def __init__(self, label: str) -> None:
        """Store the name of the work, which begins the line."""
        self._label, self._step, self._share = label, "", 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def step(self, name: str, share: float) -> None:
        """Begin a step.

        Args:
            name: Name of the step.
            share: Share of all work that is done before the step.
        """
        self._step, self._share = name, share

    def _show(self) -> None:
        """Draw the line until the work is done."""
        began, line, is_first = time.monotonic(), ProgressLine(), True
        while not self._stop.wait(self.FIRST_AFTER_SECONDS if is_first else self.EVERY_SECONDS):
            elapsed = format_duration(time.monotonic() - began)
            share = format_percent(self._share, is_whole=True)
            line.show(
                f"{self._label}: {share} in {elapsed}  {self._step}", self._share, at_once=is_first
            )
            is_first = False
        line.clear()
