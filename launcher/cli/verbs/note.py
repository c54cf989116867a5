"""The verb that adds a note to the logbook, or prints it: note."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import click

from forerun._launcher.cli.names import study_option
from forerun._launcher.cli.options import json_option, print_result
from forerun._launcher.main_run.logbook.logbook import (
    add_note,
    format_text,
    parse_time,
    read_events,
    write_logbook,
)
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.plain_files import read_plain
from forerun._proxies.core.redaction import find_secret
from forerun._sweeps.store.ledger import LEDGER_NAME

MAX_NOTE = 10_000
"""Maximum number of characters of a note."""


@click.command()
@click.argument("text", required=False)
@study_option
@json_option
def note(text: str | None, study_dir: Path, as_json: bool) -> None:
    """Add TEXT, dated and signed with your user name, to the logbook of a study and its main run.

    The logbook is written anew from all records, day by day, times in UTC. Without TEXT it is
    printed: as plain text on a terminal, as Markdown elsewhere.
    """
    if not (study_dir / LEDGER_NAME).exists() and not (study_dir / "frozen").is_dir():
        raise click.BadParameter(f"--study {study_dir} holds no study: name another folder")
    if text is None:
        path = write_logbook(study_dir)
        events = sorted(read_events(study_dir), key=parse_time)
        body = {"path": str(path), "events": cast(Json, [canon.to_json(event) for event in events])}
        markdown = read_plain(path).decode("utf-8").rstrip("\n")
        print_result(as_json, body, format_text(events) if sys.stdout.isatty() else markdown)
        return
    _check_text(text)
    read_events(study_dir)  # raises if a file is not a study's, before anything is written
    entry = add_note(study_dir, text.strip())
    path = write_logbook(study_dir)
    print_result(
        as_json,
        {"path": str(path), "entry": canon.to_json(entry)},
        f"noted at {entry.at} in {path}",
    )


def _check_text(text: str) -> None:
    if not text.strip():
        raise click.UsageError(
            "TEXT is empty: write something, or leave it out to print the logbook"
        )
    if len(text) > MAX_NOTE:
        raise click.UsageError(
            f"TEXT has {format_counted(len(text), 'character')}; the limit is {MAX_NOTE:,}: name a "
            "document"
        )
    if secret := find_secret(text):
        raise click.UsageError(
            f"TEXT seems to contain a secret ({secret}). Remove it: notes are stored and shown"
        )
