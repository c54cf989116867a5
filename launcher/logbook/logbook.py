"""The logbook of a study and its main run: `logbook.md`, a page of dated events like those that the
OPT and BLOOM teams kept by hand.

OPT's logbook was published with arXiv 2205.01068, BLOOM's with arXiv 2211.05100. The whole page is
written from the records each time; to add something, add a note (`forerun note TEXT`). Text that
people and programs wrote is shown as plain text: it cannot add markup, start a line of its own, or
fill more than a screen.
"""

from __future__ import annotations

import datetime
import itertools
import os
import pwd
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base import chronicle
from proxies.core import canon
from proxies.core.notation import counted
from sweeps.store.errors import LedgerRefused, StudyMissing, SweepError
from sweeps.store.ledger import LEDGER_NAME, Ledger

# ---- Reading events ----

RUN_DIR = "run"
_ATTESTED = {"evidence": "frozen", "parity": "verified", "export": "exported"}
"""Kinds of events, by the beginning of an attestation's name; other attestations have events in the
event log.
"""
_VERDICTS = ("coordinates", "fit", "fork", "growth", "pardon")
"""Kinds of ledger records, apart from `driver`, that are events."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line of the logbook; its text is unchanged and may contain anything."""

    at: str
    """Time in UTC, ISO 8601; empty or invalid if unknown."""
    kind: str
    text: str
    digest: str | None = None
    step: int | None = None


def events_of(study_dir: Path) -> list[Event]:
    """Return all events of a study, in no particular order.

    They come from its ledger, its frozen configs, its main run, and its notes.

    Raises:
        LedgerRefused: another kind of file is in the ledger's place.
    """
    events = [*_read_ledger(study_dir), *_read_event_log(study_dir)]
    for folder in sorted((study_dir / "frozen").glob("*")):
        if folder.is_dir() and len(folder.name) == canon.ID_LENGTH:
            events += [
                *_read_attestations(folder),
                *_read_event_log(folder),
                *_read_event_log(folder / RUN_DIR),
            ]
    return events


def _read_event_log(folder: Path) -> list[Event]:
    """Read the event log in a folder; an unreadable one has no events."""
    try:
        entries = chronicle.entries(folder)
    except PermissionError:
        return []
    events = []
    for entry in entries:
        author = entry.data.get("author")
        prefix = f"{author}: " if isinstance(author, str) else ""
        events.append(
            Event(
                at=entry.at,
                kind=entry.kind,
                text=prefix + entry.text,
                digest=entry.digest,
                step=entry.step,
            )
        )
    return events


def _read_attestations(folder: Path) -> list[Event]:
    """Read the attestations of a frozen config; a damaged one becomes an undated event."""
    from launcher.frozen.frozen import TamperedError
    from launcher.frozen.launch_file import created_at, read_attestation

    events = []
    for path in sorted((folder / "attestations").glob("*.json")):
        kind = _ATTESTED.get(path.stem.partition("-")[0])
        if kind is None:
            continue
        try:
            body = read_attestation(path, folder.name)
            at = created_at(path)
        except (TamperedError, OSError, canon.CanonError) as error:
            events.append(Event(at="", kind="corrupt", text=str(error), digest=folder.name))
            continue
        events.append(
            Event(at=at, kind=kind, text=_describe_attestation(path.stem, body), digest=folder.name)
        )
    return events


def _describe_attestation(name: str, body: dict[str, Any]) -> str:
    """Describe an attestation in one line."""
    if name == "evidence":
        gates = [gate for gate in body.get("gates", []) if isinstance(gate, dict)]
        return (
            "; ".join(f"gate {gate.get('name')} {gate.get('outcome')}" for gate in gates)
            or "no gates are named"
        )
    trainer, version = name.partition("-")[2], body.get("version", "")
    if name.startswith("parity-"):
        return (
            f"{trainer} {version}: {counted(len(body.get('problems', [])), 'difference')} from "
            "the frozen numbers"
        )
    return f"{trainer} {version}".strip() or name


def _read_ledger(study_dir: Path) -> list[Event]:
    """Read the events of the ledger.

    The ledger stores only the times at which drivers began, so each event gets the time of the
    driver before it.
    """
    if not (study_dir / LEDGER_NAME).exists():
        return []
    try:
        records = Ledger.read(study_dir).records()
    except StudyMissing:
        return []
    except LedgerRefused:  # the file is of another kind, so its records are not damaged
        raise
    except SweepError as error:
        return [Event(at="", kind="corrupt", text=f"the ledger is left out: {error}")]
    events: list[Event] = []
    at = ""
    for record in records:
        body: Any = record.body
        if record.kind == "driver":
            at = str(body.get("since", ""))
            events.append(
                Event(at=at, kind="driver", text=f"pid {body.get('pid')} on {body.get('host')}")
            )
        elif record.kind in _VERDICTS:
            events.append(
                Event(at=at, kind=record.kind, text=_describe_record(record.kind, record.key, body))
            )
    return events


def _describe_record(kind: str, key: str, body: Any) -> str:
    """Describe a record in one line, by the first of its fields that has text."""
    for name in ("outcome", "status", "reason", "folder"):
        if isinstance(body, dict) and isinstance(body.get(name), str):
            text = body[name]
            return text if kind in ("fit", "pardon", "fork") else f"{key}: {text}"
    return key[:80]


# ---- Writing the page ----

LOGBOOK_FILE = "logbook.md"
MOST_SHOWN = 1000
"""Maximum number of characters shown of one event."""
_MARKUP = re.compile(r"[\\`*_\[\]|~$]")
_EMPTY = "Nothing has happened yet."
_UNDATED = datetime.datetime.min.replace(tzinfo=datetime.UTC)


def author() -> str:
    """Return the name of the current user, from the system."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user without a name
        return f"uid {os.getuid()}"


def add_note(study_dir: Path, text: str) -> chronicle.Entry:
    """Record a note with the current time and its author.

    Raises:
        OSError: the event log cannot be written.
    """
    return chronicle.record(study_dir, "note", text, data={"author": author()})


def write_logbook(study_dir: Path) -> Path:
    """Write `logbook.md` from the records.

    Raises:
        OSError: the file cannot be written.
    """
    path = study_dir / LOGBOOK_FILE
    canon.write_atomic(path, page(events_of(study_dir)).encode())
    return path


def dated(event: Event) -> datetime.datetime:
    """Return the time of an event in UTC; the earliest possible time if it is unknown."""
    try:
        at = datetime.datetime.fromisoformat(event.at)
        return at.replace(tzinfo=datetime.UTC) if at.tzinfo is None else at.astimezone(datetime.UTC)
    except (ValueError, OverflowError):
        return _UNDATED


def page(events: list[Event]) -> str:
    """Format the logbook as Markdown: days, the oldest first, each with its events; times are in
    UTC.
    """
    lines = ["# Logbook", ""]
    for day, day_events in _group_by_day(events):
        lines += [f"## {day}", ""]
        for time, event in day_events:
            kind = f"**{plain(_name_kind(event))}**{_format_place(event, plain)}"
            lines.append(f"- {time}{kind} {plain(event.text)}")
        lines.append("")
    if not events:
        lines += [_EMPTY, ""]
    return "\n".join(lines)


def format_text(events: list[Event]) -> str:
    """Return the logbook as plain text for a terminal, in the order of `page`."""
    lines = []
    for day, day_events in _group_by_day(events):
        lines.append(day)
        for time, event in day_events:
            kind = f"{_to_one_line(_name_kind(event))}{_format_place(event, _to_one_line)}"
            lines.append(f"- {time}{kind}: {_to_one_line(event.text)}")
        lines.append("")
    return "\n".join(lines[:-1]) or _EMPTY


def _group_by_day(events: list[Event]) -> Iterator[tuple[str, list[tuple[str, Event]]]]:
    """Yield each day as text, with its events and their times; `Undated` comes first, without
    times.
    """
    for day, day_events in itertools.groupby(
        sorted(events, key=dated), key=lambda event: dated(event).date()
    ):
        if day == _UNDATED.date():
            yield "Undated", [("", event) for event in day_events]
        else:
            yield str(day), [(f"{dated(event):%H:%M} ", event) for event in day_events]


def _name_kind(event: Event) -> str:
    """Return the kind of an event in words."""
    return event.kind.replace("_", " ")


def _format_place(event: Event, write: Callable[[str], str]) -> str:
    """Return the run and the step of an event in parentheses, empty if it has neither."""
    parts = [f"run {write(event.digest[:8])}"] if event.digest else []
    parts += [f"step {event.step:,}"] if event.step is not None else []
    return f" ({', '.join(parts)})" if parts else ""


def _to_one_line(text: str) -> str:
    """Return a text on one line without control characters, shortened if it is long."""
    left = len(text) - MOST_SHOWN
    line = " ".join(
        "".join(char if char.isprintable() else " " for char in text[:MOST_SHOWN]).split()
    )
    return line + (f" ... ({counted(left, 'character')} more)" if left > 0 else "")


def plain(text: str) -> str:
    """Return a text as one line of Markdown that is shown literally: without markup, links, or
    control characters.
    """
    escaped = _MARKUP.sub(r"\\\g<0>", _to_one_line(text))
    escaped = escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return escaped.replace("://", r":\/\/").replace("www.", r"www\.")
