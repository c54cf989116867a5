"""A study's runs in TensorBoard: a folder each, scalars by step, settings as text and for its view of hyperparameters.

Written with our own writer. A run whose event file was made from the same content is left as it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.dashboards.event_writer import EventWriter
from launcher.dashboards.record import Record, Wanted
from proxies.core.canon import Json
from sweeps.store.errors import CurveCorrupt

_MARK_DIGITS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What TensorBoard has."""

    log_dir: Path
    num_runs: int
    num_written: int
    """Just now."""
    damaged: tuple[str, ...]
    """A sentence for every run whose curve is not what was recorded: it is not there."""


def write_events(log_dir: Path, wanted: Sequence[Wanted]) -> Shown:
    """Write every run that is not there as it is now, in place of what was.

    Raises:
        OSError: `log_dir` cannot be written.
    """
    num_written, damaged = 0, []
    for one in wanted:
        folder = log_dir / _folder(one.record)
        mark = f"forerun-{one.content[:_MARK_DIGITS]}"
        older = sorted(folder.glob("events.out.tfevents.*.forerun-*"))
        if [path for path in older if path.name.endswith(mark)]:
            continue
        try:
            _write(folder, mark, one)
        except CurveCorrupt as error:
            damaged.append(f"{one.record.name} is not shown: {error}")
            continue
        for path in older:
            path.unlink(missing_ok=True)
        num_written += 1
    return Shown(log_dir=log_dir, num_runs=len(wanted) - len(damaged), num_written=num_written, damaged=tuple(damaged))


def _folder(record: Record) -> str:
    """`search/mup-w64-0123abcd`: what a person reads in the list of runs."""
    return f"{record.group}/{record.name.removeprefix(record.group).strip()}-{record.run_id[:8]}".replace(" ", "-")


def _write(folder: Path, mark: str, one: Wanted) -> None:
    """Under another name until it is whole: a reader, or a later call, must not take a part of it for all."""
    rows = one.rows()
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"events.out.tfevents.{time.time_ns()}.{os.uname().nodename}.{os.getpid()}.{mark}"
    for left in folder.glob("*.part"):
        left.unlink()
    part = folder / f"{os.getpid()}.part"
    writer = EventWriter(part)
    try:
        record = one.record
        writer.text("settings", _as_table({**_plain(record.config), **_plain(record.summary)}))
        writer.hyperparameters(_plain(record.config), record.name)
        last = 0
        for row in rows:
            last = int(row["step"])
            writer.scalars(last, {name: value for name, value in row.items() if name != "step"})
        numbers = {name: value for name, value in _plain(record.summary).items() if not isinstance(value, str)}
        if numbers:
            writer.scalars(last, {f"summary/{name}": float(value) for name, value in numbers.items()})
    finally:
        writer.close()
    part.rename(final)


def _plain(values: Mapping[str, Json]) -> dict[str, str | float | bool]:
    """Numbers, texts and truths, those of nested settings by their path."""
    found: dict[str, str | float | bool] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= {f"{name}/{key}": part for key, part in _plain(value).items()}
        elif isinstance(value, str | float | int):
            found[name] = value
    return found


def _as_table(values: Mapping[str, str | float | bool]) -> str:
    """In Markdown."""
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in values.items())])
