"""The verb that adds a note to the logbook: note."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import click

from launcher.cli.names import study_option
from launcher.cli.options import answer, json_option
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.notation import counted
from proxies.core.plain_files import read_plain

MOST_NOTE = 10_000
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
    from launcher.logbook.logbook import add_note, dated, events_of, format_text, write_logbook
    from proxies.core.redaction import secret_in
    from sweeps.store.ledger import LEDGER_NAME

    if not (study_dir / LEDGER_NAME).exists() and not (study_dir / "frozen").is_dir():
        raise click.BadParameter(f"--study {study_dir} holds no study: name another folder")
    if text is None:
        path = write_logbook(study_dir)
        events = sorted(events_of(study_dir), key=dated)
        body = {"path": str(path), "events": cast(Json, [canon.to_json(event) for event in events])}
        markdown = read_plain(path).decode("utf-8").rstrip("\n")
        answer(as_json, body, format_text(events) if sys.stdout.isatty() else markdown)
        return
    _check_text(text, secret_in(text))
    events_of(study_dir)  # raises if a file is not a study's, before anything is written
    entry = add_note(study_dir, text.strip())
    path = write_logbook(study_dir)
    answer(
        as_json,
        {"path": str(path), "entry": canon.to_json(entry)},
        f"noted at {entry.at} in {path}",
    )


def _check_text(text: str, secret: str) -> None:
    if not text.strip():
        raise click.UsageError(
            "TEXT is empty: write something, or leave it out to print the logbook"
        )
    if len(text) > MOST_NOTE:
        raise click.UsageError(
            f"TEXT has {counted(len(text), 'character')}; the limit is {MOST_NOTE:,}: name a "
            "document"
        )
    if secret:
        raise click.UsageError(
            f"TEXT seems to contain a secret ({secret}). Remove it: notes are stored and shown"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise click.UsageError("TEXT is not UTF-8: check the terminal's encoding") from None
