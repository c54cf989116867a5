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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun._launcher.main_run import event_log
from forerun._launcher.main_run.frozen.frozen import TamperedError
from forerun._launcher.main_run.frozen.launch_file import read_attestation, read_creation_time
from forerun._proxies.core import canon
from forerun._proxies.core.notation import format_counted
from forerun._sweeps.store.errors import LedgerRefused, StudyMissing, SweepError
from forerun._sweeps.store.ledger import LEDGER_NAME, Ledger

# ---- Reading events ----

RUN_DIR = "run"
_ATTESTED = {"evidence": "frozen", "parity": "verified", "export": "exported"}
"""Kind of event by the beginning of an attestation's name. Other attestations are left out, because
the event log has events for them.
"""
_EVENT_RECORDS = ("coordinates", "fit", "fork", "growth", "pardon")
"""Kinds of ledger records, apart from `driver`, that are events."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line of the logbook. The text is as it was recorded, so any character may be in it."""

    at: str
    """Time in UTC, ISO 8601; empty or invalid if unknown."""
    kind: str
    text: str
    digest: str | None = None
    step: int | None = None


def read_events(study_dir: Path) -> list[Event]:
    """Return all events of a study, in no particular order.

    They come from its ledger, its frozen configs, its main run, and its notes.

    Raises:
        LedgerRefused: The file in the ledger's place is no ledger.
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
        entries = event_log.read_events(folder)
    except PermissionError:
        return []
    return [
        Event(
            at=entry.at,
            kind=entry.kind,
            text=f"{entry.data['author']}: {entry.text}" if "author" in entry.data else entry.text,
            digest=entry.digest,
            step=entry.step,
        )
        for entry in entries
    ]


def _read_attestations(folder: Path) -> list[Event]:
    """Read the attestations of a frozen config; a damaged one becomes an undated event."""
    events = []
    for path in sorted((folder / "attestations").glob("*.json")):
        kind = _ATTESTED.get(path.stem.partition("-")[0])
        if kind is None:
            continue
        try:
            text = _describe_attestation(path.stem, read_attestation(path, folder.name))
            at = read_creation_time(path)
        except (TamperedError, OSError, canon.CanonError) as error:
            kind, text, at = "corrupt", str(error), ""
        events.append(Event(at=at, kind=kind, text=text, digest=folder.name))
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
            f"{trainer} {version}: {format_counted(len(body.get('problems', [])), 'difference')} "
            "from the frozen numbers"
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
        records = Ledger.read(study_dir).read_records()
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
            text = f"pid {body.get('pid')} on {body.get('host')}"
        elif record.kind in _EVENT_RECORDS:
            text = _describe_record(record.kind, record.key, body)
        else:
            continue
        events.append(Event(at=at, kind=record.kind, text=text))
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
MAX_EVENT_CHARS = 1000
"""Maximum number of characters shown of one event."""
_MARKUP = re.compile(r"[\\`*_\[\]|~$]")
_EMPTY = "Nothing has happened yet."
_UNDATED = datetime.datetime.min.replace(tzinfo=datetime.UTC)


def get_author() -> str:
    """Return the name of the current user, from the system."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user without a name
        return f"uid {os.getuid()}"


def add_note(study_dir: Path, text: str) -> event_log.Event:
    """Record a note with the current time and its author.

    Raises:
        OSError: The event log cannot be written.
    """
    return event_log.append_event(study_dir, "note", text, data={"author": get_author()})


def write_logbook(study_dir: Path) -> Path:
    """Write `logbook.md` from the records.

    Raises:
        OSError: The file cannot be written.
    """
    path = study_dir / LOGBOOK_FILE
    canon.write_atomic(path, format_page(read_events(study_dir)).encode())
    return path


def parse_time(event: Event) -> datetime.datetime:
    """Return the time of an event in UTC; the earliest possible time if it is unknown."""
    try:
        return event_log.parse_time(event.at).astimezone(datetime.UTC)
    except (ValueError, OverflowError):
        return _UNDATED


def format_page(events: list[Event]) -> str:
    """Format the logbook as Markdown: days, the oldest first, each with its events; times are in
    UTC.
    """
    days = _format_days(events, "## {}\n", "- {time}**{kind}**{place} {text}", escape_markdown)
    return "# Logbook\n\n" + "\n\n".join(days or [_EMPTY]) + "\n"


def format_text(events: list[Event]) -> str:
    """Return the logbook as plain text for a terminal, in the order of `format_page`."""
    days = _format_days(events, "{}", "- {time}{kind}{place}: {text}", _to_one_line)
    return "\n\n".join(days or [_EMPTY])


def _format_days(
    events: list[Event], heading: str, line: str, write: Callable[[str], str]
) -> list[str]:
    """Format each day with its events. Events without a known time come first, as `Undated`.

    Args:
        events: Events in any order.
        heading: Template of a day's heading.
        line: Template of an event's line.
        write: Function that makes a text harmless.
    """
    days = []
    for day, day_events in itertools.groupby(
        sorted(events, key=parse_time), key=lambda event: parse_time(event).date()
    ):
        is_dated = day != _UNDATED.date()
        lines = [heading.format(day if is_dated else "Undated")]
        lines += [
            line.format(
                time=f"{parse_time(event):%H:%M} " if is_dated else "",
                kind=write(event.kind.replace("_", " ")),
                place=_format_place(event, write),
                text=write(event.text),
            )
            for event in day_events
        ]
        days.append("\n".join(lines))
    return days


def _format_place(event: Event, write: Callable[[str], str]) -> str:
    """Return the run and the step of an event in parentheses, empty if it has neither."""
    parts = [f"run {write(event.digest[:8])}"] if event.digest else []
    parts += [f"step {event.step:,}"] if event.step is not None else []
    return f" ({', '.join(parts)})" if parts else ""


def _to_one_line(text: str) -> str:
    """Return a text on one line without control characters, shortened if it is long."""
    left = len(text) - MAX_EVENT_CHARS
    line = " ".join(
        "".join(char if char.isprintable() else " " for char in text[:MAX_EVENT_CHARS]).split()
    )
    return line + (f" ... ({format_counted(left, 'character')} more)" if left > 0 else "")


def escape_markdown(text: str) -> str:
    """Return a text as one line of Markdown that is shown literally: without markup, links, or
    control characters.
    """
    escaped = _MARKUP.sub(r"\\\g<0>", _to_one_line(text))
    escaped = escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return escaped.replace("://", r":\/\/").replace("www.", r"www\.")
