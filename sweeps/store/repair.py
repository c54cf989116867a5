"""A damaged ledger copied, then written anew from what its hashes prove. Nothing is guessed, nothing is thrown away."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from proxies.core import canon
from proxies.core.canon import Json
from sweeps.store import chain, salvage
from sweeps.store.chain import Record, journal_of
from sweeps.store.curves import curve_ids
from sweeps.store.errors import DiskFull, LedgerCorrupt, StudyMissing, SweepError
from sweeps.store.ledger import CALIBRATION, IMPORTED, LEDGER_NAME, PRUNED, RESULT, SUGGESTION, Ledger
from sweeps.store.lock import DriverLock
from sweeps.store.salvage import Row

PUT_BACK = (RESULT, IMPORTED, PRUNED, SUGGESTION, CALIBRATION)
"""Kinds that are taken over from beyond the damage: what was paid for, and what it was asked by. The rest follows."""
UNKNOWN = "unknown"
"""Kind of what cannot be told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Repaired:
    """What a repair saved and what it could not."""

    copy: str
    """The damaged file's name, beside the new one; its journal, if it had one, beside it in turn."""
    num_kept: int
    """Records of the chain's beginning, as they were."""
    num_put_back: int
    """From beyond the damage, each proven by its own hash, on the chain anew."""
    lost: dict[str, list[str]]
    """Keys (of results: run ids) by kind; of what cannot be told, places in the chain under `unknown`."""
    rerun: tuple[str, ...]
    """Ids of runs with a curve and no outcome any more: they run again if they are asked for."""


def repair(study_dir: Path, plan: Mapping[str, Json] | None = None) -> Repaired | None:
    """Repair the ledger of a study; None if it is sound. Killed anywhere, it can be begun again.

    Args:
        study_dir: the study; nobody drives it.
        plan: what record 0 may have been, if it is lost: believed only if record 1 names its hash.

    Raises:
        StudyMissing: there is no study, and nothing of one.
        StudyHeld: a driver has it.
        LedgerTooNew: a later version wrote it; it may be sound.
        LedgerCorrupt: not even record 0 can be proven, or a record that is proven is none of this version's.
        DiskFull: there is no room for a second copy; the ledger is as before.
        SweepError: the disk does not give the file.
    """
    if not (study_dir / LEDGER_NAME).exists():
        if curve_ids(study_dir):
            raise LedgerCorrupt(_nothing_proven(study_dir, "it is missing"))
        raise StudyMissing(f"{study_dir} holds no study: name another folder")
    with DriverLock(study_dir):
        copy, is_new = _copy(study_dir)
        try:
            rows = _damage(study_dir, copy, plan)
        except BaseException:
            _remove(copy if is_new else None)
            raise
        if rows is None:
            _remove(copy if is_new else None)
            return None
        return _replace(study_dir, copy, rows)


def _damage(study_dir: Path, copy: Path, plan: Mapping[str, Json] | None) -> list[Row] | None:
    """What stands in the copy; None if the ledger is sound. Nothing here writes."""
    with contextlib.suppress(LedgerCorrupt):
        Ledger.read(study_dir)
        return None
    rows = [*salvage.rows(_content(copy)), *salvage.rows(_content(journal_of(copy)))]
    if plan is not None:
        first = chain.link(0, "plan", "plan", canon.canonical(plan), chain.GENESIS)
        if any(row.prev_hash == first.hash for row in rows):
            rows.append(Row(seq=0, kind="plan", key="plan", text=first.text, prev_hash=chain.GENESIS, hash=first.hash))
    records = salvage.longest_chain(rows)
    if not records:
        raise LedgerCorrupt(_nothing_proven(study_dir, "not even its first record, the plan, can be proven", copy))
    try:
        Ledger(study_dir, records, None, None)
    except LedgerCorrupt as error:
        path = study_dir / LEDGER_NAME
        raise LedgerCorrupt(f"{path}: {error}, yet its hash is right: another version of forerun wrote it") from error
    return rows


def _replace(study_dir: Path, copy: Path, rows: list[Row]) -> Repaired:
    """Write the new ledger beside the damaged one, prove it, put it in its place."""
    kept = salvage.longest_chain(rows)
    known = {(record.kind, record.key) for record in kept}
    beyond = [record for seq, record in sorted(salvage.intact(rows).items()) if seq >= len(kept)]
    again = [record for record in beyond if record.kind in PUT_BACK and (record.kind, record.key) not in known]
    lost = _lost(copy, rows, len(kept), known | {(record.kind, record.key) for record in again})
    key = str(sum(record.kind == "repair" for record in kept))
    note = {"copy": copy.name, "copy_sha256": canon.file_sha256(copy), "num_kept": len(kept), "lost": lost}
    records = [*kept, chain.link(len(kept), "repair", key, canon.canonical(note), kept[-1].hash)]
    for record in again:
        records.append(chain.link(len(records), record.kind, record.key, record.text, records[-1].hash))
    ledger = _write(study_dir, records)
    return Repaired(
        copy=copy.name, num_kept=len(kept), num_put_back=len(again), lost=lost, rerun=_rerun(study_dir, ledger)
    )  # fmt: skip


def _write(study_dir: Path, records: list[Record]) -> Ledger:
    """The study's ledger made anew of `records`; the old one is there until the new one is proven."""
    path, beside = study_dir / LEDGER_NAME, study_dir / f"{LEDGER_NAME}.repaired"
    _remove(beside)
    with contextlib.closing(chain.connect(beside, write=True)) as connection:
        chain.create(connection)
        chain.write(connection, *records)
        ledger = Ledger(study_dir, chain.load(connection), None, None)
    try:
        journal_of(beside).unlink(missing_ok=True)
        journal_of(path).unlink(missing_ok=True)  # of the damaged file: it would be played back into the new one
        beside.replace(path)
        canon.sync_folder(study_dir)
    except OSError as error:
        raise DiskFull(f"{path}: {error.strerror}: free some space and repair again; the copy stands") from error
    return ledger


def _rerun(study_dir: Path, ledger: Ledger) -> tuple[str, ...]:
    """Runs of which a curve tells, whole or up to where they were pruned, and no outcome any more; sorted."""
    whole = set(curve_ids(study_dir)) - ledger.results().keys()
    pruned = set(curve_ids(study_dir, pruned=True)) - ledger.first_results().keys()
    return tuple(sorted(whole | pruned))


def _lost(copy: Path, rows: list[Row], num_kept: int, saved: set[tuple[str, str]]) -> dict[str, list[str]]:
    """What was in the ledger and is not among `saved`, by kind: the copy's index tells, or what remains of a row."""
    names = {row.seq: (row.kind, row.key) for row in rows} | _indexed(copy)
    last = max(salvage.intact(rows), default=num_kept - 1)
    lost: dict[str, list[str]] = {}
    for seq in sorted({*range(num_kept, last + 1), *(seq for seq in names if seq >= num_kept)}):
        kind, key = names.get(seq, (UNKNOWN, str(seq)))
        if (kind, key) not in saved:
            lost.setdefault(kind, []).append(key)
    return lost


def _indexed(copy: Path) -> dict[int, tuple[str, str]]:
    """Kind and key by place in the chain, as far as SQLite can read its index of them; it is not proven."""
    names: dict[int, tuple[str, str]] = {}
    uri = f"{copy.absolute().as_uri()}?mode=ro&immutable=1"
    index = "SELECT seq, kind, key FROM records INDEXED BY sqlite_autoindex_records_1"
    failures = contextlib.suppress(sqlite3.Error, UnicodeDecodeError)
    with failures, contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
        for seq, kind, key in connection.execute(index):
            if isinstance(seq, int) and isinstance(kind, str) and isinstance(key, str):
                names[seq] = kind, key
    return names


def _nothing_proven(study_dir: Path, why: str, mine: Path | None = None) -> str:
    copies = sorted(path.name for path in study_dir.glob(f"{LEDGER_NAME}.damaged-*[0-9]") if path != mine)
    said = f"{study_dir / LEDGER_NAME}: {why}: restore it from a copy"
    said += f" (an earlier repair left {', '.join(copies)})" if copies else ""
    return (
        f"{said}. {len(curve_ids(study_dir))} curves are left: a curve does not tell what run it is of, so without the "
        "ledger they prove nothing, and another folder starts anew. Nothing was changed"
    )


def _copy(study_dir: Path) -> tuple[Path, bool]:
    """A durable copy of the ledger and its journal, and whether it is new: a repair cut short has left one.

    Raises:
        DiskFull: it does not fit.
    """
    path, number = study_dir / LEDGER_NAME, 1
    content = _content(path)
    while (copy := study_dir / f"{LEDGER_NAME}.damaged-{number}").exists():
        if content == _content(copy):
            return copy, False
        number += 1
    try:
        if _content(journal_of(path)):
            canon.write_atomic(journal_of(copy), _content(journal_of(path)))
        canon.write_atomic(copy, content)
    except OSError as error:
        raise DiskFull(f"{copy}: {error.strerror}: free some space and repair again; nothing was changed") from error
    return copy, True


def _content(path: Path) -> bytes:
    """A file's bytes; none if it is not there. Raises SweepError if the disk does not give them."""
    try:
        if path.exists() and not path.is_file():
            raise SweepError(f"{path} is no plain file: put the ledger back in its place")
        return path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise SweepError(
            f"{path} cannot be read ({error.strerror}): copy what the disk still gives, elsewhere"
        ) from error


def _remove(path: Path | None) -> None:
    """Remove a file that nobody needs, its journal first; None: nothing."""
    if path is not None:
        journal_of(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
