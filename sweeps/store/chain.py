"""An append-only chain of records in one SQLite file: each record carries its own hash and the hash
of the record before it.

A one-row table stores the head, so that a shortened chain is noticed as surely as an altered one. A
hash chain shows accidents and edits; it does not stop a forger who writes a whole new chain.
This module needs no third-party package.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import add_article
from forerun._proxies.core.plain_files import require_plain
from forerun._sweeps.store.errors import (
    DiskFull,
    DuplicateRecord,
    LedgerCorrupt,
    LedgerRefused,
    LedgerTooNew,
    LedgerTooOld,
    StaleDriver,
    SweepError,
    advise,
)

SCHEMA_VERSION = 2
APPLICATION_ID = 0x666F7265  # "fore"
GENESIS = "0" * canon.ID_LENGTH
"""Value of `prev_hash` in the first record."""

_BUSY_SECONDS = 30.0  # a reader (`status`) holds the file while it reads all of it
_SCHEMA = {
    "records": "CREATE TABLE records (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, key TEXT NOT "
    "NULL, "
    "body TEXT NOT NULL, prev_hash TEXT NOT NULL, hash TEXT NOT NULL, UNIQUE (kind, key)) STRICT",
    "head": "CREATE TABLE head (one INTEGER PRIMARY KEY CHECK (one = 1), seq INTEGER NOT NULL, "
    "hash TEXT NOT NULL) STRICT",
}
"""SQL statement that creates each table, by table name.

SQLite stores this text in the file, and `_check_schema` compares it. Any change, even of a space,
makes earlier ledgers unreadable.
"""
_COLUMNS = "seq, kind, key, body, prev_hash, hash"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One link of the chain."""

    seq: int
    """Place in the chain, from 0."""
    kind: str
    key: str
    """Key, unique within the kind."""
    text: str
    """Canonical JSON of the body."""
    prev_hash: str
    hash: str

    @property
    def body(self) -> Json:
        """The body, parsed from its JSON text."""
        return canon.parse(self.text)


def make_record(seq: int, kind: str, key: str, text: str, prev_hash: str) -> Record:
    """Return the record that follows the record with hash `prev_hash`."""
    digest = canon.compute_content_id([seq, kind, key, text, prev_hash])
    return Record(seq=seq, kind=kind, key=key, text=text, prev_hash=prev_hash, hash=digest)


def connect(path: Path, *, write: bool) -> sqlite3.Connection:
    """Open a ledger file in autocommit mode; transactions are written explicitly.

    A writer creates the file if it is missing, and rolls back a commit that a crash cut short. A
    reader changes nothing (see `open_for_reading`).

    Raises:
        LedgerCorrupt: the file is no SQLite file.
        SweepError: the file cannot be opened.
    """
    _require_plain_files(path)
    uri = f"{path.absolute().as_uri()}?mode={'rwc' if write else 'ro'}"
    with _translate_errors("the header"):
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_SECONDS)
        try:
            if write:
                # The journal stays, empty, so that a commit changes no file names: SQLite does not
                # check whether their sync succeeded.
                connection.execute("PRAGMA journal_mode = TRUNCATE")
                connection.execute("PRAGMA synchronous = FULL")
            _read_pragma(connection, "schema_version")  # reads the header
        except BaseException:
            connection.close()
            raise
    return connection


def _require_plain_files(path: Path) -> None:
    """Check that SQLite will open plain files only: it would wait forever for the writer of a pipe.

    Raises:
        LedgerRefused: the ledger, or a file that SQLite keeps next to it, is not a plain file.
    """
    for ending in ("", "-journal", "-wal", "-shm"):
        file = path.with_name(path.name + ending)
        try:
            require_plain(file)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise LedgerRefused(f"{file}: {error.strerror}: {advise(error)}") from error


@contextlib.contextmanager
def open_for_reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a connection that changes nothing, and close it at the end.

    If there is a journal from a crash, or one of another file, SQLite would write the journal's
    content into the ledger. In that case a copy of both files is read instead. If the journal
    belongs to another file, only the copy is damaged.

    Raises:
        LedgerCorrupt: the file is no SQLite file.
        SweepError: the file cannot be opened, or the disk is too full for the copy.
    """
    with contextlib.ExitStack() as stack:
        try:
            connection = stack.enter_context(contextlib.closing(connect(path, write=False)))
        except SweepError as error:
            if getattr(error.__cause__, "sqlite_errorname", "") != "SQLITE_READONLY_ROLLBACK":
                raise
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="forerun-ledger-"))
            )
            try:
                for file in (path, get_journal_path(path)):
                    shutil.copyfile(file, folder / file.name)
            except OSError as copy_error:
                raise SweepError(
                    f"{path} and its journal cannot be copied to {folder} ({copy_error.strerror})"
                ) from copy_error
            connection = stack.enter_context(
                contextlib.closing(connect(folder / path.name, write=True))
            )
        yield connection


def get_journal_path(path: Path) -> Path:
    """Return the path at which SQLite keeps the journal of a commit in progress."""
    return path.with_name(f"{path.name}-journal")


def is_empty(connection: sqlite3.Connection) -> bool:
    """Return whether nothing was ever committed to the file.

    Raises:
        LedgerCorrupt: the header cannot be read.
    """
    with _translate_errors("the header"):
        return bool(_read_pragma(connection, "page_count") == 0)


def create(connection: sqlite3.Connection) -> None:
    """Write the schema and an empty head, in one transaction. Raises DiskFull."""
    with _translate_errors("the schema"), _run_transaction(connection):
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        for statement in _SCHEMA.values():
            connection.execute(statement)
        connection.execute("INSERT INTO head VALUES (1, -1, ?)", (GENESIS,))


def load(connection: sqlite3.Connection) -> Iterator[Record]:
    """Yield every record, and verify the whole chain.

    No other process can write until the last record was taken.

    Raises:
        LedgerCorrupt: names the first record that is not what was written.
        LedgerTooNew, LedgerTooOld: another version wrote the file.
    """
    num, head = 0, GENESIS
    try:
        connection.execute("BEGIN")  # one snapshot of records and head while a driver may write
        _check_schema(connection)
        for row in connection.execute(f"SELECT {_COLUMNS} FROM records ORDER BY seq"):
            record = _verify_row(row, num, head)
            num, head = num + 1, record.hash
            yield record
        if connection.execute("SELECT seq, hash FROM head WHERE one = 1").fetchone() != (
            num - 1,
            head,
        ):
            raise LedgerCorrupt(f"record {num} is missing: the chain ends before its head")
        if (verdict := _read_pragma(connection, "integrity_check(1)")) != "ok":
            raise LedgerCorrupt(f"after record {num - 1}: {verdict}")
        connection.execute("COMMIT")
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise _to_sweep_error(error, f"record {num}") from error


def check_same(connection: sqlite3.Connection, num: int, head: str) -> None:
    """Check that the chain still contains the records that were read before.

    Args:
        connection: to the ledger.
        num: number of records that were read.
        head: hash of the last of them.

    Raises:
        SweepError: the ledger was replaced.
    """
    with _translate_errors(f"record {num - 1}"):
        if connection.execute("SELECT hash FROM records WHERE seq = ?", (num - 1,)).fetchone() != (
            head,
        ):
            raise SweepError(
                f"record {num - 1} has changed: the ledger was replaced; run the command again"
            )


def read_stored(connection: sqlite3.Connection, num: int, **only: str) -> Iterator[Record]:
    """Yield records of a chain that was verified before, in order.

    Args:
        connection: to the ledger.
        num: only the first `num` records.
        only: values of `kind` and `key` that the records must have.

    Raises:
        LedgerCorrupt: a record does not match its own hash.
    """
    with _translate_errors("a record"):
        where = " AND ".join(["seq < ?", *(f"{name} = ?" for name in only)])
        rows = connection.execute(
            f"SELECT {_COLUMNS} FROM records WHERE {where} ORDER BY seq", (num, *only.values())
        )
        for row in rows:
            # Each row is checked against its own `seq` and `prev_hash`: neighbors may be left out
            yield _verify_row(row, row[0], row[4])


def write(connection: sqlite3.Connection, *records: Record) -> None:
    """Append `records` in order and durably, all or none, if they follow the chain's head.

    Raises:
        StaleDriver: the head has moved: another process has written.
        DuplicateRecord: a record of that kind and key exists.
        DiskFull: the records do not fit; the file is unchanged.
    """
    first, last = records[0], records[-1]
    with _translate_errors(f"record {first.seq}"), _run_transaction(connection):
        head = connection.execute("SELECT seq, hash FROM head WHERE one = 1").fetchone()
        if head != (first.seq - 1, first.prev_hash):
            raise StaleDriver(
                f"record {first.seq} refused: another driver has taken over this study; let that "
                "one finish"
            )
        for record in records:
            row = (
                record.seq,
                record.kind,
                record.key,
                record.text,
                record.prev_hash,
                record.hash,
            )
            try:
                connection.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?)", row)
            except sqlite3.IntegrityError as error:
                if error.sqlite_errorname != "SQLITE_CONSTRAINT_UNIQUE":
                    raise
                raise make_duplicate_error(record.kind, record.key) from error
        connection.execute("UPDATE head SET seq = ?, hash = ? WHERE one = 1", (last.seq, last.hash))


def make_duplicate_error(kind: str, key: str) -> DuplicateRecord:
    """Return the error that refuses a second record of one kind and key."""
    return DuplicateRecord(
        f"the ledger has {add_article(kind)} {key!r} already: records are never replaced"
    )


def _check_schema(connection: sqlite3.Connection) -> None:
    """Check that this version wrote the file. Raises LedgerCorrupt, LedgerTooNew, LedgerTooOld."""
    version = _read_pragma(connection, "user_version")
    if _read_pragma(connection, "application_id") != APPLICATION_ID:
        raise LedgerCorrupt("the header: this is not a forerun ledger")
    tables = dict(
        connection.execute("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL").fetchall()
    )
    # A new version number with the old tables may be a flipped bit
    if version > SCHEMA_VERSION and tables != _SCHEMA:
        raise LedgerTooNew(
            f"the ledger has schema {version}, this version reads {SCHEMA_VERSION}: update forerun"
        )
    if version == 1 and tables == _SCHEMA:
        raise LedgerTooOld(
            "the ledger has schema 1, from before the first release: git commit 7aa3a7b of forerun "
            "reads it"
        )
    if version != SCHEMA_VERSION or tables != _SCHEMA:
        raise LedgerCorrupt("the schema is not what was written")


def _verify_row(row: tuple[object, ...], seq: int, hash_before: object) -> Record:
    """Return the record in `row` if it is at place `seq` and follows the record with that hash.

    Raises:
        LedgerCorrupt: the row is another record, or not what was written.
    """
    stored_seq, kind, key, text, prev_hash, digest = row
    expected = None
    if (
        isinstance(kind, str)
        and isinstance(key, str)
        and isinstance(text, str)
        and isinstance(hash_before, str)
    ):
        expected = make_record(seq, kind, key, text, hash_before)
    place = (stored_seq, prev_hash, digest)
    if expected is None or (expected.seq, expected.prev_hash, expected.hash) != place:
        raise LedgerCorrupt(f"record {seq} is not what was written: its hash differs")
    return expected


def _read_pragma(connection: sqlite3.Connection, name: str) -> Any:
    """Return the value of an SQLite pragma, None if it has none."""
    row = connection.execute(f"PRAGMA {name}").fetchone()
    return row[0] if row else None


@contextlib.contextmanager
def _run_transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run the block as one transaction: commit at its end, roll back if it raises."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite may have rolled it back on a full disk
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def _translate_errors(where: str) -> Iterator[None]:
    """Raise the SQLite errors of the block as errors of this package, which name `where`."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError) as error:
        # UnicodeDecodeError comes from damaged text in SQLite's own message
        raise _to_sweep_error(error, where) from error


def _to_sweep_error(error: sqlite3.Error | UnicodeDecodeError, where: str) -> SweepError:
    """Translate an error of SQLite by its primary result code."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _is_write(error)):
        return DiskFull(
            f"{where} could not be written ({error}): free some space and resume; earlier records "
            "are kept"
        )
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return SweepError(
            f"the ledger was busy for {_BUSY_SECONDS:g} s ({error}): another process is writing a "
            "record; if that process is stopped, or on another machine, end it (driver.lock names "
            "the last driver), then try again"
        )
    if getattr(error, "sqlite_errorname", "") == "SQLITE_READONLY_DBMOVED":
        return SweepError(
            f"{where} was not written: the ledger was moved or removed; put it back, then resume"
        )
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY):
        advice = "check the folder's permissions, and that its disk is not mounted read-only"
        return SweepError(f"the ledger cannot be opened ({error}): {advice}")
    return LedgerCorrupt(f"{where} cannot be read ({error})")


def _is_write(error: Exception) -> bool:
    """Return whether an input/output error of SQLite occurred while writing: it did if the error is
    none of the errors of reading.
    """
    name = getattr(error, "sqlite_errorname", "")
    return not name.startswith(
        ("SQLITE_IOERR_READ", "SQLITE_IOERR_SHORT_READ", "SQLITE_IOERR_CORRUPT")
    )
