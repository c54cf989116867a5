"""A damaged ledger copied, then written anew from what its hashes prove. Nothing is guessed,
nothing is thrown away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.notation import counted
from proxies.core.plain_files import open_plain
from sweeps.store import (
    chain,
)
from sweeps.store.chain import Record, journal_of
from sweeps.store.curves import curve_ids
from sweeps.store.errors import DiskFull, LedgerCorrupt, StudyMissing, SweepError
from sweeps.store.ledger import (
    CALIBRATION,
    IMPORTED,
    LEDGER_NAME,
    PRUNED,
    RESULT,
    SUGGESTION,
    Ledger,
)
from sweeps.store.lock import DriverLock

# Records in the bytes of a ledger that SQLite refuses: found by their form, believed by their
# hashes alone.
#
# The form is SQLite's (sqlite.org/fileformat2.html, sections 1.6 and 2.1): a record is a header of
# varints, the size of each column, and then the columns. Ours ends in two texts of 64 bytes, whose
# sizes are four bytes that no UTF-8 text holds, so records are found although the pages around them
# are damaged.

_TWO_HASHES = b"\x81\x0d\x81\x0d"
# its own size, the seq's (0), those of kind, key and body, and the two hashes
_HEADER_SIZES = range(9, 16)
_MIN_PAGE, _USUAL_PAGE, _MAX_PAGE = 512, 4096, 65536  # bytes


def rows_in(content: bytes) -> list[Record]:
    """Everything in the bytes of a ledger, or of its journal, that has a record's form; nothing of
    it is proven.
    """
    page = int.from_bytes(content[16:18], "big")
    page = page if _MIN_PAGE <= page <= _MAX_PAGE and page & (page - 1) == 0 else _USUAL_PAGE
    found: list[Record] = []
    at = content.find(_TWO_HASHES)
    while at >= 0:
        found += _rows_at(content, at, page)
        at = content.find(_TWO_HASHES, at + 1)
    return found


def longest_chain(found: list[Record]) -> list[Record]:
    """The records that follow each other from the first on, each proven by its hash, as far as they
    are there.
    """
    followers: dict[str, list[Record]] = {}
    for row in found:
        followers.setdefault(row.prev_hash, []).append(row)
    records: list[Record] = []
    head = chain.GENESIS
    while proven := [
        record for row in followers.get(head, []) if (record := _proven(row, len(records)))
    ]:
        # Two, where a write was cut short and another took its place: the one that was gone on
        # with.
        records.append(next((record for record in proven if record.hash in followers), proven[0]))
        head = records[-1].hash
    return records


def intact_records(found: list[Record]) -> dict[int, Record]:
    """Every record that its own hash proves, whatever became of its neighbours, by place in the
    chain.
    """
    return {row.seq: row for row in found if _proven(row, row.seq)}


def _proven(row: Record, seq: int) -> Record | None:
    """The record that a row is at a place in the chain; None if it is not the one its hash
    names.
    """
    record = chain.link(seq, row.kind, row.key, row.text, row.prev_hash)
    return record if record.hash == row.hash else None


def _rows_at(content: bytes, at: int, page: int) -> Iterator[Record]:
    """The rows whose header ends in the two sizes at `at`: one, where there is any."""
    for size in _HEADER_SIZES:
        begin = at + len(_TWO_HASHES) - size
        if begin < 1 or content[begin] != size or content[begin + 1] != 0:
            continue
        sizes = [
            (number - 13) // 2
            for number in _varints(content[begin + 2 : at])
            if number >= 13 and number % 2
        ]
        if len(sizes) != 3:
            continue
        sizes += [len(chain.GENESIS)] * 2
        payload, texts = _payload(content, begin, size + sum(sizes), page)[size:], list[str]()
        for length in sizes:
            texts.append(payload[:length].decode(errors="replace"))
            payload = payload[length:]
        kind, key, text, prev_hash, digest = texts
        yield Record(
            seq=_number_before(content, begin),
            kind=kind,
            key=key,
            text=text,
            prev_hash=prev_hash,
            hash=digest,
        )


def _varints(data: bytes) -> Iterator[int]:
    """SQLite's numbers: seven bits a byte, the highest first, the last one's top bit clear."""
    value = 0
    for byte in data:
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            yield value
            value = 0


def _number_before(content: bytes, end: int) -> int:
    """The varint that ends at `end`: a record's place in the chain, which stands before its
    header.
    """
    begin = end - 1
    while begin > 0 and end - begin < 9 and content[begin - 1] >= 0x80:
        begin -= 1
    return next(_varints(content[begin:end]), -1)


def _payload(content: bytes, begin: int, size: int, page: int) -> bytes:
    """`size` bytes from `begin`, of which a long record has most on overflow pages; fewer if they
    are not there.
    """
    most_local, least_local = page - 35, (page - 12) * 32 // 255 - 23
    local = size
    if size > most_local:
        local = least_local + (size - least_local) % (page - 4)
        local = local if local <= most_local else least_local
    payload, next_page = content[begin : begin + local], content[begin + local : begin + local + 4]
    while len(payload) < size:
        start = (int.from_bytes(next_page, "big") - 1) * page
        if start < 0 or start + 4 >= len(content):
            break
        next_page = content[start : start + 4]
        payload += content[start + 4 : start + 4 + min(page - 4, size - len(payload))]
    return payload


PUT_BACK = (RESULT, IMPORTED, PRUNED, SUGGESTION, CALIBRATION)
"""Kinds that are taken over from beyond the damage: what was paid for, and what it was asked by.
The rest follows."""
UNKNOWN = "unknown"
"""Kind of what cannot be told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Repaired:
    """What a repair saved and what it could not."""

    copy: str
    """The damaged file's name, beside the new one; its journal, if it had one, beside it in
    turn."""
    num_kept: int
    """Records of the chain's beginning, as they were."""
    num_put_back: int
    """From beyond the damage, each proven by its own hash, on the chain anew."""
    lost: dict[str, list[str]]
    """Keys (of results: run ids) by kind; of what cannot be told, places in the chain under
    `unknown`."""
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
        LedgerTooNew, LedgerTooOld: another version wrote it; it may be sound.
        LedgerCorrupt: not even record 0 can be proven, or a record that is proven is none of this
            version's.
        DiskFull: the disk is too full for a second copy; the ledger is as before.
        SweepError: the disk does not give the file.
    """
    path = study_dir / LEDGER_NAME
    if not path.exists():
        if curve_ids(study_dir):
            raise LedgerCorrupt(_nothing_proven(study_dir, "it is missing"))
        raise StudyMissing(f"{study_dir} holds no study: name another folder")
    with DriverLock(study_dir):
        content, journal = _content(path), _content(journal_of(path))
        with contextlib.suppress(LedgerCorrupt):
            Ledger.read(study_dir)
            return None
        rows = [*rows_in(content), *rows_in(journal)]
        first = chain.link(0, "plan", "plan", canon.canonical(plan), chain.GENESIS)
        rows += [first] if any(row.prev_hash == first.hash for row in rows) else []
        kept = longest_chain(rows)
        if not kept:
            raise LedgerCorrupt(
                _nothing_proven(study_dir, "not even its first record, the plan, can be proven")
            )
        try:
            Ledger(study_dir, kept, None, None)
        except LedgerCorrupt as error:
            raise LedgerCorrupt(
                f"{path}: {error}, yet its hash is right: another version of forerun wrote it"
            ) from error
        return _replace(study_dir, _copy(path, content, journal), rows, kept)


def _replace(study_dir: Path, copy: Path, rows: list[Record], kept: list[Record]) -> Repaired:
    """Write the new ledger beside the damaged one, prove it, put it in its place."""
    known, intact = {(record.kind, record.key) for record in kept}, intact_records(rows)
    beyond = [
        record
        for seq, record in sorted(intact.items())
        if seq >= len(kept) and record.kind in PUT_BACK
    ]
    again = [record for record in beyond if (record.kind, record.key) not in known]
    known |= {(record.kind, record.key) for record in again}
    names = {row.seq: (row.kind, row.key) for row in rows}
    lost: dict[str, list[str]] = {}
    for seq in sorted(
        {
            *range(len(kept), max(intact, default=-1) + 1),
            *(seq for seq in names if seq >= len(kept)),
        }
    ):
        kind, key = names.get(seq, (UNKNOWN, str(seq)))
        if (kind, key) not in known:
            lost.setdefault(kind, []).append(key)
    note = {
        "copy": copy.name,
        "copy_sha256": canon.file_sha256(copy),
        "num_kept": len(kept),
        "lost": lost,
    }
    number = sum(record.kind == "repair" for record in kept)
    records = [
        *kept,
        chain.link(len(kept), "repair", str(number), canon.canonical(note), kept[-1].hash),
    ]
    for record in again:
        records.append(
            chain.link(len(records), record.kind, record.key, record.text, records[-1].hash)
        )
    ledger = _write(study_dir, records)
    whole = set(curve_ids(study_dir)) - ledger.results().keys()
    pruned = set(curve_ids(study_dir, pruned=True)) - ledger.first_results().keys()
    rerun = tuple(sorted(whole | pruned))
    return Repaired(
        copy=copy.name, num_kept=len(kept), num_put_back=len(again), lost=lost, rerun=rerun
    )


def _write(study_dir: Path, records: list[Record]) -> Ledger:
    """The study's ledger made anew of `records`; the old one is there until the new one is
    proven.
    """
    path, beside = study_dir / LEDGER_NAME, study_dir / f"{LEDGER_NAME}.repaired"
    journal_of(beside).unlink(missing_ok=True)
    beside.unlink(missing_ok=True)
    with contextlib.closing(chain.connect(beside, write=True)) as connection:
        chain.create(connection)
        chain.write(connection, *records)
        ledger = Ledger(study_dir, chain.load(connection), None, None)
    try:
        journal_of(beside).unlink(missing_ok=True)
        # of the damaged file: it would be played back into the new one
        journal_of(path).unlink(missing_ok=True)
        beside.replace(path)
        canon.sync_folder(study_dir)
    except OSError as error:
        raise DiskFull(
            f"{path}: {error.strerror}: free some space and repair again; the copy is kept"
        ) from error
    return ledger


def _nothing_proven(study_dir: Path, why: str) -> str:
    copies = sorted(path.name for path in study_dir.glob(f"{LEDGER_NAME}.damaged-*[0-9]"))
    problem = f"{study_dir / LEDGER_NAME}: {why}: restore it from a copy"
    problem += f" (an earlier repair left {', '.join(copies)})" if copies else ""
    return (
        f"{problem}. What is left, {counted(len(curve_ids(study_dir)), 'curve')}, does not name "
        "the runs, so without "
        "the ledger it cannot be used: else start again in another folder. Nothing was changed"
    )


def _copy(path: Path, content: bytes, journal: bytes) -> Path:
    """A durable copy of the ledger and its journal; the one that a repair cut short has left, if
    there is one.

    Raises:
        DiskFull: it does not fit.
    """
    number = 1
    while (copy := path.with_name(f"{path.name}.damaged-{number}")).exists():
        if content == _content(copy):
            return copy
        number += 1
    try:
        if journal:
            canon.write_atomic(journal_of(copy), journal)
        canon.write_atomic(copy, content)
    except OSError as error:
        raise DiskFull(
            f"{copy}: {error.strerror}: free some space and repair again; nothing was changed"
        ) from error
    return copy


def _content(path: Path) -> bytes:
    """A file's bytes; none if it is not there. Raises SweepError if the disk does not give them."""
    try:
        if path.exists() and not path.is_file():
            raise SweepError(f"{path} is not a regular file: put the ledger back in its place")
        if not path.exists():
            return b""
        with open_plain(path) as file:
            return file.read()
    except OSError as error:
        raise SweepError(
            f"{path} cannot be read ({error.strerror}): copy what can still be read to another disk"
        ) from error
