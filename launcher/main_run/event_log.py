"""The event log of a study or a run: `chronicle.jsonl`, one dated line per event.

Lines are appended and never rewritten. A run that goes back to a checkpoint rewinds its metrics,
but not its event log. So the log holds the full history, and the logbook is made from it. Any
process may append: one line is one write, so lines of two writers do not mix.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.plain_files import open_plain, open_to_append, read_plain

EVENT_LOG_FILE = "chronicle.jsonl"

EventKind = Literal[
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
class Event:
    """One event of the log."""

    at: str
    """Time of the event: UTC, ISO 8601."""
    kind: EventKind
    text: str
    """One sentence for people."""
    step: int | None = None
    """Number of completed steps of the main run; None if the event is not about a step."""
    digest: str | None = None
    """Digest of the launch config; None if the event is not about one."""
    data: dict[str, object] = field(default_factory=dict)
    """Numbers behind the sentence, as JSON values."""


def append_event(
    folder: Path,
    kind: EventKind,
    text: str,
    *,
    step: int | None = None,
    digest: str | None = None,
    data: dict[str, Json] | None = None,
) -> Event:
    """Append an event with the current time to the log in `folder`, and return it.

    The folder is made if it is missing. The line is on disk when this returns.

    Raises:
        OSError: The log cannot be written.
    """
    at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    entry = Event(at=at, kind=kind, text=text, step=step, digest=digest, data={**(data or {})})
    folder.mkdir(parents=True, exist_ok=True)
    line = canon.to_canonical_json(entry).encode() + b"\n"
    with open_to_append(folder / EVENT_LOG_FILE) as file:
        if _ends_within_line(folder / EVENT_LOG_FILE):  # a writer died within its line
            line = b"\n" + line
        try:
            file.write(line)
            os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(folder / EVENT_LOG_FILE)) from error
    return entry


def parse_time(text: str) -> datetime.datetime:
    """Parse an ISO 8601 time; a time without a zone is in UTC.

    Raises:
        ValueError: The text is no such time.
    """
    at = datetime.datetime.fromisoformat(text)
    return at if at.tzinfo else at.replace(tzinfo=datetime.UTC)


def _ends_within_line(path: Path) -> bool:
    size = path.stat().st_size
    if not size:
        return False
    with open_plain(path) as file:
        file.seek(size - 1)
        return file.read(1) != b"\n"


def read_events(folder: Path) -> list[Event]:
    """Return the events recorded in `folder`, oldest first. Lines that hold no event are skipped.

    Raises:
        OSError: The log cannot be read, or is not a plain file.
    """
    path, events = folder / EVENT_LOG_FILE, []
    for line in read_plain(path).splitlines() if path.exists() else ():
        try:
            events.append(canon.decode(Event, canon.parse(line)))
        except ValueError:
            continue
    return events
