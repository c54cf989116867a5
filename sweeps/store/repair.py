"""Repair of a damaged ledger: the file is copied, then written again from the records that their
hashes prove. No record is guessed, and no byte is thrown away.

Records are found in the raw bytes of a ledger that SQLite refuses. They are recognized by their
form and accepted only by their hashes. The form is SQLite's (sqlite.org/fileformat2.html, sections
1.6 and 2.1): a record is a header of varints, which gives the size of each column, followed by the
columns. A record of the ledger ends in two texts of 64 bytes, whose sizes are four bytes that never
occur in UTF-8 text, so records are found even if the pages around them are damaged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.plain_files import open_plain
from forerun._sweeps.store import chain
from forerun._sweeps.store.chain import Record, get_journal_path
from forerun._sweeps.store.curves import list_curve_ids
from forerun._sweeps.store.errors import (
    LedgerCorrupt,
    StudyMissing,
    SweepError,
    explain_write_errors,
)
from forerun._sweeps.store.ledger import (
    CALIBRATION,
    IMPORTED,
    LEDGER_NAME,
    PRUNED,
    RESULT,
    SUGGESTION,
    Ledger,
)
from forerun._sweeps.store.lock import DriverLock

# ---- Records in raw bytes ----

_TWO_HASHES = b"\x81\x0d\x81\x0d"  # sizes of the two hashes, as varints
# Possible sizes of a header in bytes: one for its own size, one for the seq (stored as 0), one to
# three each for kind, key and body, and four for the two hashes
_HEADER_SIZES = range(9, 16)
_MIN_PAGE, _USUAL_PAGE, _MAX_PAGE = 512, 4096, 65536  # bytes


def find_rows(content: bytes) -> list[Record]:
    """Return every row in the bytes of a ledger or its journal that has the form of a record. The
    hashes of the rows are not checked.
    """
    page_bytes = int.from_bytes(content[16:18], "big")
    is_power_of_two = page_bytes & (page_bytes - 1) == 0
    if not (_MIN_PAGE <= page_bytes <= _MAX_PAGE and is_power_of_two):
        page_bytes = _USUAL_PAGE
    rows: list[Record] = []
    offset = content.find(_TWO_HASHES)
    while offset >= 0:
        rows += _parse_rows_at(content, offset, page_bytes)
        offset = content.find(_TWO_HASHES, offset + 1)
    return rows


def find_longest_chain(rows: list[Record]) -> list[Record]:
    """Return the records that follow each other from the first on, each proven by its hash, up to
    the first gap.
    """
    followers: dict[str, list[Record]] = {}
    for row in rows:
        followers.setdefault(row.prev_hash, []).append(row)
    records: list[Record] = []
    head = chain.GENESIS
    while proven := [
        record for row in followers.get(head, []) if (record := _prove(row, len(records)))
    ]:
        # There are two records if a write was cut short and another one replaced it: take the
        # record that has followers.
        records.append(next((record for record in proven if record.hash in followers), proven[0]))
        head = records[-1].hash
    return records


def find_intact_records(rows: list[Record]) -> dict[int, Record]:
    """Return every record that its own hash proves, by place in the chain, whatever happened to its
    neighbors.
    """
    return {row.seq: row for row in rows if _prove(row, row.seq)}


def _prove(row: Record, seq: int) -> Record | None:
    """Return the record that a row is at a place in the chain; None if its hash does not match."""
    record = chain.make_record(seq, row.kind, row.key, row.text, row.prev_hash)
    return record if record.hash == row.hash else None


def _parse_rows_at(content: bytes, offset: int, page_bytes: int) -> Iterator[Record]:
    """Yield the row whose header ends in the sizes of two hashes at `offset`, if there is one."""
    for header_size in _HEADER_SIZES:
        begin = offset + len(_TWO_HASHES) - header_size
        if begin < 1 or content[begin] != header_size or content[begin + 1] != 0:
            continue
        # An odd number from 13 on is the type of a text of (number - 13) / 2 bytes
        sizes = [
            (number - 13) // 2
            for number in _decode_varints(content[begin + 2 : offset])
            if number >= 13 and number % 2
        ]
        if len(sizes) != 3:
            continue
        sizes += [len(chain.GENESIS)] * 2
        row_size = header_size + sum(sizes)
        columns = _read_payload(content, begin, row_size, page_bytes)[header_size:]
        texts = list[str]()
        for size in sizes:
            texts.append(columns[:size].decode(errors="replace"))
            columns = columns[size:]
        kind, key, text, prev_hash, digest = texts
        yield Record(
            seq=_read_number_before(content, begin),
            kind=kind,
            key=key,
            text=text,
            prev_hash=prev_hash,
            hash=digest,
        )


def _decode_varints(data: bytes) -> Iterator[int]:
    """Yield SQLite's varints: seven bits a byte, the highest first; the last byte has its top bit
    clear.
    """
    value = 0
    for byte in data:
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            yield value
            value = 0


def _read_number_before(content: bytes, end: int) -> int:
    """Return the varint that ends at `end`: a record's place in the chain, which precedes its
    header.
    """
    begin = end - 1
    while begin > 0 and end - begin < 9 and content[begin - 1] >= 0x80:
        begin -= 1
    return next(_decode_varints(content[begin:end]), -1)


def _read_payload(content: bytes, begin: int, size: int, page_bytes: int) -> bytes:
    """Return `size` bytes from `begin`, following overflow pages; fewer if bytes are missing.

    SQLite stores most of a long record on overflow pages.
    """
    # Bytes of the record on its first page, by the formulas of section 1.6
    max_local, min_local = page_bytes - 35, (page_bytes - 12) * 32 // 255 - 23
    local = size
    if size > max_local:
        local = min_local + (size - min_local) % (page_bytes - 4)
        local = local if local <= max_local else min_local
    payload, next_page = content[begin : begin + local], content[begin + local : begin + local + 4]
    # Each overflow page begins with the number of the next one, from 1, in four bytes
    while len(payload) < size:
        start = (int.from_bytes(next_page, "big") - 1) * page_bytes
        if start < 0 or start + 4 >= len(content):
            break
        next_page = content[start : start + 4]
        payload += content[start + 4 : start + 4 + min(page_bytes - 4, size - len(payload))]
    return payload


# ---- Repair ----

RESTORED_KINDS = (RESULT, IMPORTED, PRUNED, SUGGESTION, CALIBRATION)
"""Kinds of records beyond the damage that are restored: paid results, and the points and choices
that led to them. All other records follow from these.
"""
UNKNOWN = "unknown"
"""Kind of a record whose kind cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairResult:
    """The result of a repair: what was saved and what was lost."""

    copy: str
    """Name of the copy of the damaged file, in the study folder; a copy of its journal, if it had
    one, is next to it.
    """
    num_kept: int
    """Number of records at the beginning of the chain that were kept unchanged."""
    num_put_back: int
    """Number of records beyond the damage that were appended again, each proven by its own hash."""
    lost: dict[str, list[str]]
    """Keys of lost records by kind (run ids for results); places in the chain, under `unknown`, for
    records whose kind cannot be read.
    """
    rerun: tuple[str, ...]
    """Ids of runs that have a curve but lost their outcome: they are executed again if they are
    requested.
    """


def repair(study_dir: Path, plan: Mapping[str, Json] | None = None) -> RepairResult | None:
    """Repair the ledger of a study; return None if it is sound.

    A repair that was killed at any point can be started again.

    Args:
        study_dir: the study folder; no driver holds it.
        plan: plan that record 0 may have held, if that record is lost; accepted only if record 1
            names its hash.

    Raises:
        StudyMissing: there is no study, and no part of one.
        StudyHeld: a driver holds the study.
        LedgerTooNew, LedgerTooOld: another version wrote the ledger, which may be sound.
        LedgerCorrupt: record 0 cannot be proven, or this version cannot decode a proven record.
        DiskFull: the disk is too full for a copy; the ledger is unchanged.
        SweepError: the file cannot be read.
    """
    path = study_dir / LEDGER_NAME
    if not path.exists():
        if list_curve_ids(study_dir):
            raise LedgerCorrupt(_describe_unrepairable(study_dir, "it is missing"))
        raise StudyMissing(f"{study_dir} holds no study: name another folder")
    with DriverLock(study_dir):
        content, journal = _read_content(path), _read_content(get_journal_path(path))
        with contextlib.suppress(LedgerCorrupt):
            Ledger.read(study_dir)
            return None
        rows = [*find_rows(content), *find_rows(journal)]
        record_0 = chain.make_record(
            0, "plan", "plan", canon.to_canonical_json(plan), chain.GENESIS
        )
        rows += [record_0] if any(row.prev_hash == record_0.hash for row in rows) else []
        kept = find_longest_chain(rows)
        if not kept:
            raise LedgerCorrupt(
                _describe_unrepairable(
                    study_dir, "not even its first record, the plan, can be proven"
                )
            )
        try:
            Ledger(study_dir, kept, None, None)
        except LedgerCorrupt as error:
            raise LedgerCorrupt(
                f"{path}: {error}, but its hash is right: another version of forerun wrote it"
            ) from error
        return _replace_ledger(study_dir, _copy_damaged(path, content, journal), rows, kept)


def _replace_ledger(
    study_dir: Path, copy: Path, rows: list[Record], kept: list[Record]
) -> RepairResult:
    """Write the new ledger next to the damaged one, verify it, and put it in its place."""
    # Append the proven records beyond the damage that are not duplicates
    known, intact = {(record.kind, record.key) for record in kept}, find_intact_records(rows)
    restored = [
        record
        for seq, record in sorted(intact.items())
        if seq >= len(kept)
        and record.kind in RESTORED_KINDS
        and (record.kind, record.key) not in known
    ]
    known |= {(record.kind, record.key) for record in restored}
    # List the lost records
    kinds_and_keys = {row.seq: (row.kind, row.key) for row in rows}
    lost: dict[str, list[str]] = {}
    for seq in sorted(
        {
            *range(len(kept), max(intact, default=-1) + 1),
            *(seq for seq in kinds_and_keys if seq >= len(kept)),
        }
    ):
        kind, key = kinds_and_keys.get(seq, (UNKNOWN, str(seq)))
        if (kind, key) not in known:
            lost.setdefault(kind, []).append(key)
    # Write the chain: kept records, a note about the repair, restored records
    note = {
        "copy": copy.name,
        "copy_sha256": canon.hash_file(copy),
        "num_kept": len(kept),
        "lost": lost,
    }
    number = sum(record.kind == "repair" for record in kept)
    appended = [("repair", str(number), canon.to_canonical_json(note))]
    appended += [(record.kind, record.key, record.text) for record in restored]
    records = list(kept)
    for kind, key, text in appended:
        records.append(chain.make_record(len(records), kind, key, text, records[-1].hash))
    ledger = _write_ledger(study_dir, records)
    # List the runs that have a curve but no outcome
    without_result = set(list_curve_ids(study_dir)) - ledger.get_results().keys()
    without_pruned_result = (
        set(list_curve_ids(study_dir, pruned=True)) - ledger.get_first_results().keys()
    )
    rerun = tuple(sorted(without_result | without_pruned_result))
    return RepairResult(
        copy=copy.name, num_kept=len(kept), num_put_back=len(restored), lost=lost, rerun=rerun
    )


def _write_ledger(study_dir: Path, records: list[Record]) -> Ledger:
    """Write the study's ledger from `records`; the old one stays until the new one is verified."""
    path, new_path = study_dir / LEDGER_NAME, study_dir / f"{LEDGER_NAME}.repaired"
    get_journal_path(new_path).unlink(missing_ok=True)
    new_path.unlink(missing_ok=True)
    with contextlib.closing(chain.connect(new_path, write=True)) as connection:
        chain.create(connection)
        chain.write(connection, *records)
        ledger = Ledger(study_dir, chain.load(connection), None, None)
    with explain_write_errors(path, "free some space and repair again; the copy is kept"):
        get_journal_path(new_path).unlink(missing_ok=True)
        # SQLite would apply the damaged file's journal to the new one
        get_journal_path(path).unlink(missing_ok=True)
        new_path.replace(path)
        canon.sync_folder(study_dir)
    return ledger


def _describe_unrepairable(study_dir: Path, why: str) -> str:
    """Return the message about a ledger without any provable record, with advice."""
    copies = sorted(path.name for path in study_dir.glob(f"{LEDGER_NAME}.damaged-*[0-9]"))
    problem = f"{study_dir / LEDGER_NAME}: {why}: restore it from a copy"
    problem += f" (an earlier repair left {', '.join(copies)})" if copies else ""
    return (
        f"{problem}, or start again in another folder. The remaining "
        f"{format_counted(len(list_curve_ids(study_dir)), 'curve')} cannot be used without the "
        "ledger, which describes the runs. Nothing was changed"
    )


def _copy_damaged(path: Path, content: bytes, journal: bytes) -> Path:
    """Make a durable copy of the ledger and its journal, or return the copy that an interrupted
    repair has left.

    Raises:
        DiskFull: the copy does not fit.
    """
    number = 1
    while (copy := path.with_name(f"{path.name}.damaged-{number}")).exists():
        if content == _read_content(copy):
            return copy
        number += 1
    with explain_write_errors(copy, "free some space and repair again; nothing was changed"):
        if journal:
            canon.write_atomic(get_journal_path(copy), journal)
        canon.write_atomic(copy, content)
    return copy


def _read_content(path: Path) -> bytes:
    """Return a file's bytes, empty if it is missing. Raises SweepError if it cannot be read."""
    try:
        if path.exists() and not path.is_file():
            raise SweepError(f"{path} is not a regular file: put the ledger back in its place")
        with open_plain(path) as file:
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise SweepError(
            f"{path} cannot be read ({error.strerror}): copy what can still be read to another disk"
        ) from error
