"""The logbook of a study and its main run: `logbook.md`, one dated chronicle, as the OPT and BLOOM teams kept by hand.

It is drawn from what is recorded, whole, each time: who wants something in it adds a note (`forerun note TEXT`). OPT's
was published with arXiv 2205.01068, BLOOM's with arXiv 2211.05100. What people and programs wrote is shown as text,
whatever it holds: nothing in it is markup, on a line of its own, or longer than a screen.
"""

from __future__ import annotations

import datetime
import itertools
import os
import pwd
import re
from pathlib import Path

from launcher.base import chronicle
from launcher.logbook.events import Event, events_of
from proxies.core import canon

LOGBOOK_FILE = "logbook.md"
MOST_SHOWN = 1000
"""Characters of one event."""
_MARKUP = re.compile(r"[\\`*_\[\]|~$]")
_UNDATED = datetime.datetime.min.replace(tzinfo=datetime.UTC)


def author() -> str:
    """The name of whoever runs this, as the system knows it."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user without a name
        return f"uid {os.getuid()}"


def add_note(study_dir: Path, text: str) -> chronicle.Entry:
    """Record a note of now, with its author.

    Raises:
        OSError: the chronicle cannot be written.
    """
    return chronicle.record(study_dir, "note", text, data={"author": author()})


def write_logbook(study_dir: Path) -> Path:
    """Write `logbook.md` anew.

    Raises:
        OSError: it cannot be written.
    """
    path = study_dir / LOGBOOK_FILE
    canon.write_atomic(path, page(events_of(study_dir)).encode())
    return path


def dated(event: Event) -> datetime.datetime:
    """When an event was, in UTC; before all others where that cannot be told."""
    try:
        at = datetime.datetime.fromisoformat(event.at)
        return at.replace(tzinfo=datetime.UTC) if at.tzinfo is None else at.astimezone(datetime.UTC)
    except (ValueError, OverflowError):
        return _UNDATED


def page(events: list[Event]) -> str:
    """The logbook as Markdown: days, oldest first, and under each its events; times in UTC."""
    lines = ["# Logbook", ""]
    for day, those in itertools.groupby(sorted(events, key=dated), key=lambda event: dated(event).date()):
        lines += [f"## {day}" if day != _UNDATED.date() else "## Undated", ""]
        for event in those:
            time = f"{dated(event):%H:%M} " if day != _UNDATED.date() else ""
            lines.append(f"- {time}**{plain(event.kind.replace('_', ' '))}**{_where(event)} {plain(event.text)}")
        lines.append("")
    if not events:
        lines += ["Nothing has happened yet.", ""]
    return "\n".join(lines)


def _where(event: Event) -> str:
    parts = [f"run {plain(event.digest[:8])}"] if event.digest else []
    parts += [f"step {event.step:,}"] if event.step is not None else []
    return f" ({', '.join(parts)})" if parts else ""


def plain(text: str) -> str:
    """A text as one line of Markdown that shows it and does nothing: no markup, no link, no control character."""
    left = len(text) - MOST_SHOWN
    shown = " ".join("".join(c if c.isprintable() else " " for c in text[:MOST_SHOWN]).split())
    shown = _MARKUP.sub(r"\\\g<0>", shown).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    shown = shown.replace("://", r":\/\/").replace("www.", r"www\.")
    return shown + (f" ... ({left:,} characters more)" if left > 0 else "")
