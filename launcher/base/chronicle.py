"""The chronicle of a study or a run: `chronicle.jsonl`, one dated line an event, appended and never rewritten.

Metrics are rewound when a run goes back; this is not: it is the history, in the order things happened, that the
logbook is made of. Whoever has something to say appends; one line is one write, so that two writers do not mix.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.plain_files import read_plain

CHRONICLE_FILE = "chronicle.jsonl"

Kind = Literal[
    "launched", "restarted", "ended", "saved", "corrupt", "rolled_back", "replayed", "quarantined", "alert",
    "rehearsed", "concluded", "accepted", "note",
]  # fmt: skip


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
    file = os.open(folder / CHRONICLE_FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":  # somebody died within a line
            line = b"\n" + line
        os.write(file, line)
        os.fsync(file)
    finally:
        os.close(file)
    return entry


def entries(folder: Path) -> list[Entry]:
    """Return the events recorded in `folder`, oldest first; lines that are no events are skipped.

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
