"""The chronicle of a study or a run: `chronicle.jsonl`, one dated line an event, appended and never
rewritten.

Metrics are rewound when a run goes back; this is not: it is the history, in the order things
happened, that the logbook is made of. Whoever has something to say appends; one line is one write,
so that two writers do not mix.
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
    """One event."""

    at: str
    """UTC, ISO 8601."""
    kind: Kind
    text: str
    """In a sentence, for people."""
    step: int | None = None
    """Steps of the main run done, where it is about one."""
    digest: str | None = None
    """The launch config's, where it is about one."""
    data: dict[str, object] = field(default_factory=dict)
    """The numbers behind the sentence: JSON."""


def record(
    folder: Path,
    kind: Kind,
    text: str,
    *,
    step: int | None = None,
    digest: str | None = None,
    data: dict[str, Json] | None = None,
) -> Entry:
    """Append an event of now to the chronicle in `folder`, on disk when this returns.

    Raises:
        OSError: it cannot be written.
    """
    at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    entry = Entry(at=at, kind=kind, text=text, step=step, digest=digest, data={**(data or {})})
    folder.mkdir(parents=True, exist_ok=True)
    line = canon.canonical(entry).encode() + b"\n"
    with open_to_append(folder / CHRONICLE_FILE) as file:
        if _ends_within_line(folder / CHRONICLE_FILE):  # somebody died there
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
    """Return the events recorded in `folder`, oldest first; lines that are not events are skipped.

    Raises:
        OSError: The chronicle cannot be read, or is not a plain file.
    """
    path, found = folder / CHRONICLE_FILE, []
    for line in read_plain(path).splitlines() if path.exists() else ():
        try:
            found.append(canon.decode(Entry, canon.parse(line)))
        except ValueError:
            continue
    return found
