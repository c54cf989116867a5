"""What a command printed: how it ends, and the whole of it without secrets. Standard library only."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

LOG_FILE = "log.txt"
_BLOCK_LINES = 256  # most hold no secret, and are looked at as one
_NUM_LINES, _LINE_CHARS, _TAIL_BYTES = 8, 200, 16384


def told(log: Path, redact: Callable[[str], str]) -> str:
    """The last lines, as `redact` gives each, as a part of a sentence."""
    with contextlib.suppress(OSError):
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
        lines = ["".join(c for c in line if c.isprintable())[:_LINE_CHARS] for line in text.splitlines()]
        if lines := [line for line in lines if line.strip()][-_NUM_LINES:]:
            return f"; {LOG_FILE} ends: " + " | ".join(map(redact, lines))
    return f"; {LOG_FILE} is empty"


def clean(log: Path, redact: Callable[[str], str]) -> None:
    """Put `redact` of every line in its place, as far as that can be done; a log without secrets stays as it is."""
    scratch = log.with_name(f"{log.name}.{os.getpid()}.part")
    changed = False
    with contextlib.suppress(OSError):
        with (
            log.open(encoding="utf-8", errors="surrogateescape", newline="") as lines,
            scratch.open("w", encoding="utf-8", errors="surrogateescape", newline="") as kept,
        ):
            while block := list(itertools.islice(lines, _BLOCK_LINES)):
                whole = "".join(block)
                said = "".join(map(partial(_line, redact), block)) if redact(whole) != whole else whole
                changed |= said != whole
                kept.write(said)
        if changed:
            scratch.replace(log)
    with contextlib.suppress(OSError):
        scratch.unlink()


def _line(redact: Callable[[str], str], line: str) -> str:
    """With its own end."""
    body = line.rstrip("\r\n")
    return redact(body) + line[len(body) :]


def clean_earlier(run_dir: Path, redact: Callable[[str], str]) -> None:
    """The same for the attempts before this one: who looked after them may have been killed."""
    for log in run_dir.parent.glob(f"*/{LOG_FILE}"):
        if log.parent != run_dir:
            clean(log, redact)
