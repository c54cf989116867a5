"""The truth of a study: its plan, its drivers, every suggestion and every outcome, in order, in `ledger.db`.

One writer (the driver, under `sweeps.lock`); what `append` returned from survives a power loss (`sweeps.chain`).
Record 0 is the plan. Each driver that opens the study adds a `driver` record: the head moves, and a driver that was
taken over can commit nothing more.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

from proxies import canon
from proxies.canon import Json
from proxies.checks import SpecError
from proxies.spec import Run, RunResult, RunSpec
from sweeps import chain
from sweeps.chain import Record
from sweeps.curves import CURVES_DIR, has_curves
from sweeps.errors import DuplicateRecord, LedgerCorrupt, PlanChanged, StudyMissing, SweepError
from sweeps.lock import DriverLock

LEDGER_NAME = "ledger.db"

_KIND = re.compile(r"[a-z_]+")


class Ledger:
    """The records of a study, verified when opened. Use `open` (the driver) or `read` (anyone else)."""

    def __init__(self, records: list[Record], connection: sqlite3.Connection | None, lock: DriverLock | None) -> None:
        self._records = records
        self._connection = connection
        self._lock = lock
        self._runs: dict[str, Run] = {}
        self._results: dict[str, RunResult] = {}
        self._index = {(record.kind, record.key): record for record in records}
        for record in records:
            self._take_in(record)

    @classmethod
    def open(cls, study_dir: Path, plan: Mapping[str, Json], *, create: bool) -> Ledger:
        """Open for writing, as the only driver; `plan` is the question, in which nothing may change.

        Args:
            study_dir: the study folder; made if `create`.
            plan: record 0: compared whole, key by key.
            create: whether to start a study where there is none.

        Raises:
            StudyMissing: no study here, and `create` is false.
            StudyHeld: another driver has it.
            LedgerCorrupt: see `read`; or the ledger is missing or empty although curves are there.
            LedgerTooNew: written by a later version.
            PlanChanged: the study has another plan; every changed key with both values.
            DiskFull: no room for the first record.
        """
        path = study_dir / LEDGER_NAME
        if not path.exists():
            _refuse_missing(study_dir, create)
            _make(study_dir)
        lock = DriverLock(study_dir)
        connection: sqlite3.Connection | None = None
        try:
            connection = chain.connect(path, write=True)
            if chain.is_empty(connection):
                _refuse_missing(study_dir, create)
                chain.create(connection)
            ledger = cls(chain.load(connection), connection, lock)
            ledger._greet(plan, lock)
        except BaseException:
            if connection is not None:
                connection.close()
            lock.close()
            raise
        return ledger

    @classmethod
    def read(cls, study_dir: Path) -> Ledger:
        """The records as they are now, for reading; works while a driver runs, and holds nothing open.

        Raises:
            StudyMissing: no study here.
            LedgerCorrupt: the number of the first record that is not what was written; or the ledger is missing or
                empty although curves are there.
            LedgerTooNew: written by a later version.
        """
        path = study_dir / LEDGER_NAME
        if not path.exists():
            _refuse_missing(study_dir, create=False)
        with contextlib.closing(chain.connect(path, write=False)) as connection:
            if chain.is_empty(connection):
                _refuse_missing(study_dir, create=False)
            records = chain.load(connection)
        if not records:  # a driver is about to write record 0
            raise StudyMissing(f"{study_dir} holds no plan yet: try again in a moment")
        return cls(records, None, None)

    def append(self, kind: str, key: str, body: object) -> Record:
        """Add a record; on return it is durable.

        Args:
            kind: lower-case word: plan, driver, suggestion, result, verdict ...
            key: unique within the kind.
            body: a record of ours, or JSON data.

        Raises:
            DuplicateRecord: (kind, key) is there already.
            StaleDriver: someone else has written since: this driver was taken over.
            DiskFull: it does not fit; nothing was added.
            CanonError: `body` has no canonical form (NaN, say).
        """
        if self._connection is None:
            raise SweepError("this ledger was opened for reading: only the driver adds records")
        if not _KIND.fullmatch(kind):
            raise ValueError(f"kind = {kind!r}: a lower-case word is wanted")
        if (kind, key) in self._index:
            raise DuplicateRecord(f"the ledger has a {kind} {key!r} already: records are never replaced")
        record = chain.link(len(self._records), kind, key, canon.canonical(body), self.head_hash)
        chain.write(self._connection, record)
        self._records.append(record)
        self._index[kind, key] = record
        self._take_in(record)
        return record

    def commit(self, spec: RunSpec, result: RunResult) -> None:
        """Record the one outcome of a run. Raises as `append`, and SpecError if they do not belong together."""
        self.append("result", spec.id, Run(spec=spec, result=result))

    def results(self) -> Mapping[str, RunResult]:
        """Every outcome so far by run id, in the order of commitment; a live view."""
        return MappingProxyType(self._results)

    def runs(self) -> tuple[Run, ...]:
        """Every outcome so far with its spec, in the order of commitment."""
        return tuple(self._runs.values())

    def records(self, kind: str | None = None) -> tuple[Record, ...]:
        """All records in order, or those of one kind."""
        return tuple(record for record in self._records if kind is None or record.kind == kind)

    def find(self, kind: str, key: str) -> Record | None:
        """The record of that kind and key, if there is one."""
        return self._index.get((kind, key))

    @property
    def plan(self) -> Json:
        """What the study was started with."""
        return self._records[0].body

    @property
    def head_hash(self) -> str:
        """Hash of the last record: names everything recorded so far."""
        return self._records[-1].hash if self._records else chain.GENESIS

    def check_plan(self, plan: Mapping[str, Json]) -> None:
        """Hold a plan against record 0; raises PlanChanged with every changed key."""
        if changes := _changes(_flat(self.plan), _flat(canon.to_json(dict(plan)))):
            raise PlanChanged(changes)

    def close(self) -> None:
        """Close the file and let the study go."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _greet(self, plan: Mapping[str, Json], lock: DriverLock) -> None:
        """Record the plan, or hold it against the recorded one; then record this driver."""
        if not self._records:
            self.append("plan", "plan", plan)
        self.check_plan(plan)
        self.append("driver", str(len(self.records("driver"))), lock.holder)

    def _take_in(self, record: Record) -> None:
        if record.kind == "result":
            try:
                run = canon.decode(Run, record.body)
            except (canon.CanonError, SpecError) as error:
                raise LedgerCorrupt(f"record {record.seq} is no result of a run ({error}): {chain.REPAIR}") from error
            self._runs[record.key] = run
            self._results[record.key] = run.result


def _refuse_missing(study_dir: Path, create: bool) -> None:
    """No ledger, or an empty one: fine only where nothing can have been lost, and a study is to be started."""
    if has_curves(study_dir):
        raise LedgerCorrupt(
            f"{study_dir / LEDGER_NAME} is missing or empty, yet {CURVES_DIR}/ holds finished runs: "
            "restore the ledger from a copy, or start in another folder"
        )
    if not create:
        raise StudyMissing(f"{study_dir} holds no study: name another folder, or start one with `forerun run PLAN`")


def _make(study_dir: Path) -> None:
    try:
        study_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SweepError(f"{study_dir} cannot be made ({error.strerror}): name another folder") from error


def _flat(value: Json, prefix: str = "") -> dict[str, str]:
    """Dotted keys to values as JSON text; lists are values."""
    if not isinstance(value, dict) or (not value and prefix):
        return {prefix: canon.canonical(value)}
    flat: dict[str, str] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else key)
    return flat


def _changes(old: dict[str, str], new: dict[str, str]) -> dict[str, tuple[str, str]]:
    absent = "(not there)"
    pairs = {key: (old.get(key, absent), new.get(key, absent)) for key in sorted(old | new)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
