"""The event log of a study or a run: `chronicle.jsonl`, one dated line per event.

Lines are appended and never rewritten. A run that goes back to a checkpoint rewinds its metrics,
but not its event log, so the log holds the full history from which the logbook is made. Any process
may append: one line is one write, so lines of two writers do not mix.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.plain_files import open_plain, open_to_append, read_plain

CHRONICLE_FILE = "chronicle.jsonl"

Kind = Literal[
    "launched",
    "restarted",
    "ended",
    "saved",
    "corrupt",
    "rolled_back",
    "replayed",
    "quarantined",
    "alert",
    "rehearsed",
    "concluded",
    "accepted",
    "note",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One event of the log."""

    at: str
    """Time of the event: UTC, ISO 8601."""
    kind: Kind
    text: str
    """One sentence for people."""
    step: int | None = None
    """Number of completed steps of the main run; None if the event is not about a step."""
    digest: str | None = None
    """Digest of the launch config; None if the event is not about one."""
    data: dict[str, object] = field(default_factory=dict)
    """Numbers behind the sentence, as JSON values."""


def record(
    folder: Path,
    kind: Kind,
    text: str,
    *,
    step: int | None = None,
    digest: str | None = None,
    data: dict[str, Json] | None = None,
) -> Entry:
    """Append an event to the log in `folder`, with the current time. The line is on disk when this
    returns.

    Raises:
        OSError: The log cannot be written.
    """
    at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    entry = Entry(at=at, kind=kind, text=text, step=step, digest=digest, data={**(data or {})})
    folder.mkdir(parents=True, exist_ok=True)
    line = canon.canonical(entry).encode() + b"\n"
    with open_to_append(folder / CHRONICLE_FILE) as file:
        if _ends_within_line(folder / CHRONICLE_FILE):  # a writer died within its line
            line = b"\n" + line
        try:
            file.write(line)
            os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(folder / CHRONICLE_FILE)) from error
    return entry


def _ends_within_line(path: Path) -> bool:
    size = path.stat().st_size
    if not size:
        return False
    with open_plain(path) as file:
        file.seek(size - 1)
        return file.read(1) != b"\n"


def entries(folder: Path) -> list[Entry]:
    """Return the events recorded in `folder`, oldest first. Lines that are not events are skipped.

    Raises:
        OSError: The log cannot be read, or is not a plain file.
    """
    path, events = folder / CHRONICLE_FILE, []
    for line in read_plain(path).splitlines() if path.exists() else ():
        try:
            events.append(canon.decode(Entry, canon.parse(line)))
        except ValueError:
            continue
    return events
