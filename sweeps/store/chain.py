"""An append-only chain of records in one SQLite file: each carries the hash of itself and of the
one before.

A one-row table names the head, so that a shorter chain is noticed as surely as an altered one. A
hash chain shows accident and edit, not a forger who writes a whole new chain. Standard library
only.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.notation import with_article
from proxies.core.plain_files import require_plain
from sweeps.store.errors import (
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
"""What the first record names as the hash before it."""

_BUSY_SECONDS = 30.0  # a reader (`status`) may hold the file for as long as it takes to read it
_SCHEMA = {
    "records": "CREATE TABLE records (seq INTEGER PRIMARY KEY, kind TEXT NOT NULL, key TEXT NOT "
    "NULL, "
    "body TEXT NOT NULL, prev_hash TEXT NOT NULL, hash TEXT NOT NULL, UNIQUE (kind, key)) STRICT",
    "head": "CREATE TABLE head (one INTEGER PRIMARY KEY CHECK (one = 1), seq INTEGER NOT NULL, "
    "hash TEXT NOT NULL) STRICT",
}
"""By table, what SQLite is told."""
_COLUMNS = "seq, kind, key, body, prev_hash, hash"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One link of the chain."""

    seq: int
    """Place in the chain, from 0."""
    kind: str
    key: str
    """Unique within the kind."""
    text: str
    """Canonical JSON of the body."""
    prev_hash: str
    hash: str

    @property
    def body(self) -> Json:
        """What was recorded."""
        return canon.parse(self.text)


def link(seq: int, kind: str, key: str, text: str, prev_hash: str) -> Record:
    """The record that follows the one with `prev_hash`."""
    digest = canon.content_id([seq, kind, key, text, prev_hash])
    return Record(seq=seq, kind=kind, key=key, text=text, prev_hash=prev_hash, hash=digest)


def connect(path: Path, *, write: bool) -> sqlite3.Connection:
    """Open in autocommit (transactions are spelled out); a writer takes back a commit that a crash
    cut short.

    A writer creates a file that is not there. A reader changes nothing (see `reading`).

    Raises:
        LedgerCorrupt: this is no SQLite file.
        SweepError: it cannot be opened.
    """
    _refuse_other_kinds(path)
    uri = f"{path.absolute().as_uri()}?mode={'rwc' if write else 'ro'}"
    with _named_errors("the header"):
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_SECONDS)
        try:
            if write:
                # The journal stays, empty: a commit then changes no names, whose syncs SQLite does
                # not check.
                connection.execute("PRAGMA journal_mode = TRUNCATE")
                connection.execute("PRAGMA synchronous = FULL")
            _pragma(connection, "schema_version")  # reads the header
        except BaseException:
            connection.close()
            raise
    return connection


def _refuse_other_kinds(path: Path) -> None:
    """Check that SQLite will open plain files only: it would wait forever for the writer of a pipe.

    Raises:
        LedgerRefused: One is not.
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
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that changes nothing, closed at the end.

    Beside a journal that a crash left, or one of another file, SQLite would write what it holds
    into the ledger: then a copy of both is read instead. Where the journal is another file's, the
    copy is damaged, and not the ledger.

    Raises:
        LedgerCorrupt: this is no SQLite file.
        SweepError: it cannot be opened, or the disk is too full for the copy.
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
                for file in (path, journal_of(path)):
                    shutil.copyfile(file, folder / file.name)
            except OSError as failed:
                raise SweepError(
                    f"{path} and its journal cannot be copied to {folder} ({failed.strerror})"
                ) from failed
            connection = stack.enter_context(
                contextlib.closing(connect(folder / path.name, write=True))
            )
        yield connection


def journal_of(path: Path) -> Path:
    """Where SQLite keeps what a commit in the making changes."""
    return path.with_name(f"{path.name}-journal")


def is_empty(connection: sqlite3.Connection) -> bool:
    """Whether nothing was ever committed to the file. Raises LedgerCorrupt if that cannot be
    told.
    """
    with _named_errors("the header"):
        return _pragma(connection, "page_count") == 0


def create(connection: sqlite3.Connection) -> None:
    """Write the schema and an empty head, in one transaction. Raises DiskFull."""
    with _named_errors("the schema"), _transaction(connection):
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        for statement in _SCHEMA.values():
            connection.execute(statement)
        connection.execute("INSERT INTO head VALUES (1, -1, ?)", (GENESIS,))


def load(connection: sqlite3.Connection) -> Iterator[Record]:
    """Every record, the whole chain verified; nobody else writes until the last was taken.

    Raises:
        LedgerCorrupt: the number of the first record that is not what was written.
        LedgerTooNew, LedgerTooOld: another version wrote the file.
    """
    num, head = 0, GENESIS
    try:
        connection.execute("BEGIN")  # one view of records and head, though a driver may be writing
        _check_schema(connection)
        for row in connection.execute(f"SELECT {_COLUMNS} FROM records ORDER BY seq"):
            record = _verified(row, num, head)
            num, head = num + 1, record.hash
            yield record
        if connection.execute("SELECT seq, hash FROM head WHERE one = 1").fetchone() != (
            num - 1,
            head,
        ):
            raise LedgerCorrupt(f"record {num} is missing: the chain ends before its head")
        if (verdict := _pragma(connection, "integrity_check(1)")) != "ok":
            raise LedgerCorrupt(f"after record {num - 1}: {verdict}")
        connection.execute("COMMIT")
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise _named(error, f"record {num}") from error


def check_same(connection: sqlite3.Connection, num: int, head: str) -> None:
    """Raise SweepError if the chain whose first `num` records end with the hash `head` is not there
    any more.
    """
    with _named_errors(f"record {num - 1}"):
        if connection.execute("SELECT hash FROM records WHERE seq = ?", (num - 1,)).fetchone() != (
            head,
        ):
            raise SweepError(
                f"record {num - 1} is another than it was: the ledger was replaced; run the "
                "command again"
            )


def stored(connection: sqlite3.Connection, num: int, **only: str) -> Iterator[Record]:
    """Those of the first `num` records, by `kind` and `key` if given, in order, of a chain that was
    verified before.

    Raises:
        LedgerCorrupt: one is not what its own hash proves.
    """
    with _named_errors("a record"):
        where = " AND ".join(["seq < ?", *(f"{name} = ?" for name in only)])
        rows = connection.execute(
            f"SELECT {_COLUMNS} FROM records WHERE {where} ORDER BY seq", (num, *only.values())
        )
        for row in rows:
            yield _verified(row, row[0], row[4])


def write(connection: sqlite3.Connection, *records: Record) -> None:
    """Add `records`, in order and durably, all or none, if the chain's head is the one they follow.

    Raises:
        StaleDriver: the head is another: someone else has written.
        DuplicateRecord: one of that kind and key is there.
        DiskFull: they do not fit; the file is as before.
    """
    first, last = records[0], records[-1]
    with _named_errors(f"record {first.seq}"), _transaction(connection):
        head = connection.execute("SELECT seq, hash FROM head WHERE one = 1").fetchone()
        if head != (first.seq - 1, first.prev_hash):
            raise StaleDriver(
                f"record {first.seq} refused: another driver has taken over this study; let that "
                "one finish"
            )
        for r in records:
            row = (r.seq, r.kind, r.key, r.text, r.prev_hash, r.hash)
            try:
                connection.execute("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?)", row)
            except sqlite3.IntegrityError as error:
                if error.sqlite_errorname != "SQLITE_CONSTRAINT_UNIQUE":
                    raise
                raise duplicate(r.kind, r.key) from error
        connection.execute("UPDATE head SET seq = ?, hash = ? WHERE one = 1", (last.seq, last.hash))


def duplicate(kind: str, key: str) -> DuplicateRecord:
    """What a second record of one kind and key is refused with."""
    return DuplicateRecord(
        f"the ledger has {with_article(kind)} {key!r} already: records are never replaced"
    )


def _check_schema(connection: sqlite3.Connection) -> None:
    version = cast(int, _pragma(connection, "user_version"))
    if _pragma(connection, "application_id") != APPLICATION_ID:
        raise LedgerCorrupt("the header: this is not a forerun ledger")
    found = dict(
        connection.execute("SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL").fetchall()
    )
    if version > SCHEMA_VERSION and found != _SCHEMA:  # a number alone may be a flipped bit
        raise LedgerTooNew(
            f"the ledger has schema {version}, this version reads {SCHEMA_VERSION}: update forerun"
        )
    if version == 1 and found == _SCHEMA:
        raise LedgerTooOld(
            "the ledger has schema 1, from before the first release: git commit 7aa3a7b of forerun "
            "reads it"
        )
    if version != SCHEMA_VERSION or found != _SCHEMA:
        raise LedgerCorrupt("the schema is not what was written")


def _verified(row: tuple[object, ...], seq: int, before: object) -> Record:
    """The record in `row`, if it is the one at `seq` that follows the hash `before`."""
    found, kind, key, text, prev_hash, digest = row
    expected = None
    if (
        isinstance(kind, str)
        and isinstance(key, str)
        and isinstance(text, str)
        and isinstance(before, str)
    ):
        expected = link(seq, kind, key, text, before)
    if expected is None or (expected.seq, expected.prev_hash, expected.hash) != (
        found,
        prev_hash,
        digest,
    ):
        raise LedgerCorrupt(f"record {seq} is not what was written: its hash differs")
    return expected


def _pragma(connection: sqlite3.Connection, name: str) -> object:
    row = connection.execute(f"PRAGMA {name}").fetchone()
    return row[0] if row else None


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk may have rolled it back already
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def _named_errors(where: str) -> Iterator[None]:
    try:
        yield
    except (
        sqlite3.Error,
        UnicodeDecodeError,
    ) as error:  # the latter from a damaged text in SQLite's own message
        raise _named(error, where) from error


def _named(error: sqlite3.Error | UnicodeDecodeError, where: str) -> SweepError:
    """SQLite's error as ours, by its primary result code."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _is_write(error)):
        return DiskFull(
            f"{where} could not be written ({error}): free some space and resume; earlier records "
            "are kept"
        )
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return SweepError(
            f"the ledger was busy for {_BUSY_SECONDS:g} s ({error}): another process is writing a "
            "record; if it "
            "is stopped, or on another machine, end it (driver.lock names the last driver), then "
            "try again"
        )
    if getattr(error, "sqlite_errorname", "") == "SQLITE_READONLY_DBMOVED":
        return SweepError(
            f"{where} was not written: the ledger was moved or removed, with all that it held; put "
            "it back, then resume"
        )
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY):
        advice = "check the folder's permissions, and that its disk is not mounted read-only"
        return SweepError(f"the ledger cannot be opened ({error}): {advice}")
    return LedgerCorrupt(f"{where} cannot be read ({error})")


def _is_write(error: Exception) -> bool:
    name = getattr(error, "sqlite_errorname", "")
    return not name.startswith(
        ("SQLITE_IOERR_READ", "SQLITE_IOERR_SHORT_READ", "SQLITE_IOERR_CORRUPT")
    )
