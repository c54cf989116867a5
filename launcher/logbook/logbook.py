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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base import chronicle
from proxies.core import canon
from proxies.core.notation import counted
from sweeps.store.errors import LedgerRefused, StudyMissing, SweepError
from sweeps.store.ledger import LEDGER_NAME, Ledger

# What a study's logbook is made of: dated events of its ledger, its frozen configs, its main run, and its notes.
#
# The ledger keeps no times but those at which drivers began: what is recorded after one is dated by it.

RUN_DIR = "run"
_ATTESTED = {"evidence": "frozen", "parity": "verified", "export": "exported"}
"""Kinds of attestations that are events, by what their names begin with; a chronicle tells of the others."""
_VERDICTS = ("coordinates", "fit", "fork", "growth", "pardon")


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line of the logbook, its text as it was written: it may hold anything."""

    at: str
    """UTC, ISO 8601; whatever else a file says there is not a date."""
    kind: str
    text: str
    digest: str | None = None
    step: int | None = None


def events_of(study_dir: Path) -> list[Event]:
    """Everything known of a study, in no order.

    Raises:
        LedgerRefused: something else lies in the ledger's place.
    """
    found = [*_of_ledger(study_dir), *_of_chronicle(study_dir)]
    for folder in sorted((study_dir / "frozen").glob("*")):
        if folder.is_dir() and len(folder.name) == canon.ID_LENGTH:
            found += [*_of_attestations(folder), *_of_chronicle(folder), *_of_chronicle(folder / RUN_DIR)]
    return found


def _of_chronicle(folder: Path) -> list[Event]:
    try:
        entries = chronicle.entries(folder)
    except PermissionError:
        return []
    found = []
    for entry in entries:
        author = entry.data.get("author")
        by = f"{author}: " if isinstance(author, str) else ""
        found.append(Event(at=entry.at, kind=entry.kind, text=by + entry.text, digest=entry.digest, step=entry.step))
    return found


def _of_attestations(folder: Path) -> list[Event]:
    from launcher.frozen.frozen import TamperedError
    from launcher.frozen.launch_file import created_at, read_attestation

    found = []
    for path in sorted((folder / "attestations").glob("*.json")):
        kind = _ATTESTED.get(path.stem.partition("-")[0])
        if kind is None:
            continue
        try:
            body = read_attestation(path, folder.name)
            at = created_at(path)
        except (TamperedError, OSError, canon.CanonError) as error:
            found.append(Event(at="", kind="corrupt", text=str(error), digest=folder.name))
            continue
        found.append(Event(at=at, kind=kind, text=_said(path.stem, body), digest=folder.name))
    return found


def _said(name: str, body: dict[str, Any]) -> str:
    if name == "evidence":
        gates = [gate for gate in body.get("gates", []) if isinstance(gate, dict)]
        return "; ".join(f"gate {gate.get('name')} {gate.get('outcome')}" for gate in gates) or "no gates are named"
    trainer, version = name.partition("-")[2], body.get("version", "")
    if name.startswith("parity-"):
        return f"{trainer} {version}: {counted(len(body.get('problems', [])), 'difference')} from the frozen numbers"
    return f"{trainer} {version}".strip() or name


def _of_ledger(study_dir: Path) -> list[Event]:
    if not (study_dir / LEDGER_NAME).exists():
        return []
    try:
        records = Ledger.read(study_dir).records()
    except StudyMissing:
        return []
    except LedgerRefused:  # nothing is wrong with its records
        raise
    except SweepError as error:
        return [Event(at="", kind="corrupt", text=f"the ledger is left out: {error}")]
    found: list[Event] = []
    at = ""
    for record in records:
        body: Any = record.body
        if record.kind == "driver":
            at = str(body.get("since", ""))
            found.append(Event(at=at, kind="driver", text=f"pid {body.get('pid')} on {body.get('host')}"))
        elif record.kind in _VERDICTS:
            found.append(Event(at=at, kind=record.kind, text=_verdict(record.kind, record.key, body)))
    return found


def _verdict(kind: str, key: str, body: Any) -> str:
    for name in ("outcome", "status", "reason", "folder"):
        if isinstance(body, dict) and isinstance(body.get(name), str):
            said = body[name]
            return said if kind in ("fit", "pardon", "fork") else f"{key}: {said}"
    return key[:80]


LOGBOOK_FILE = "logbook.md"
MOST_SHOWN = 1000
"""Characters of one event."""
_MARKUP = re.compile(r"[\\`*_\[\]|~$]")
_EMPTY = "Nothing has happened yet."
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
    """When an event was, in UTC; before all others where that is not known."""
    try:
        at = datetime.datetime.fromisoformat(event.at)
        return at.replace(tzinfo=datetime.UTC) if at.tzinfo is None else at.astimezone(datetime.UTC)
    except (ValueError, OverflowError):
        return _UNDATED


def page(events: list[Event]) -> str:
    """The logbook as Markdown: days, oldest first, and under each its events; times in UTC."""
    lines = ["# Logbook", ""]
    for day, of_day in _group_by_day(events):
        lines += [f"## {day}", ""]
        for time, event in of_day:
            lines.append(f"- {time}**{plain(_name_kind(event))}**{_where(event, plain)} {plain(event.text)}")
        lines.append("")
    if not events:
        lines += [_EMPTY, ""]
    return "\n".join(lines)


def format_text(events: list[Event]) -> str:
    """Return the logbook as plain text for a terminal, in the order of `page`."""
    lines = []
    for day, of_day in _group_by_day(events):
        lines.append(day)
        for time, event in of_day:
            kind = f"{_to_one_line(_name_kind(event))}{_where(event, _to_one_line)}"
            lines.append(f"- {time}{kind}: {_to_one_line(event.text)}")
        lines.append("")
    return "\n".join(lines[:-1]) or _EMPTY


def _group_by_day(events: list[Event]) -> Iterator[tuple[str, list[tuple[str, Event]]]]:
    """Yield each day in words, and its events with their times; `Undated`, without times, comes first."""
    for day, of_day in itertools.groupby(sorted(events, key=dated), key=lambda event: dated(event).date()):
        if day == _UNDATED.date():
            yield "Undated", [("", event) for event in of_day]
        else:
            yield str(day), [(f"{dated(event):%H:%M} ", event) for event in of_day]


def _name_kind(event: Event) -> str:
    return event.kind.replace("_", " ")


def _where(event: Event, write: Callable[[str], str]) -> str:
    parts = [f"run {write(event.digest[:8])}"] if event.digest else []
    parts += [f"step {event.step:,}"] if event.step is not None else []
    return f" ({', '.join(parts)})" if parts else ""


def _to_one_line(text: str) -> str:
    """Return a text on one line without control characters, cut where it is long."""
    left = len(text) - MOST_SHOWN
    line = " ".join("".join(c if c.isprintable() else " " for c in text[:MOST_SHOWN]).split())
    return line + (f" ... ({counted(left, 'character')} more)" if left > 0 else "")


def plain(text: str) -> str:
    """A text as one line of Markdown that shows it and does nothing: no markup, no link, no control character."""
    shown = _MARKUP.sub(r"\\\g<0>", _to_one_line(text))
    shown = shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return shown.replace("://", r":\/\/").replace("www.", r"www\.")
