"""The ledger of a study, `ledger.db`: its plan, drivers, suggestions, and outcomes, in order.

The ledger has one writer: the driver, which holds the lock of `forerun._sweeps.store.lock`. A
record survives a power loss once `append` has returned (`forerun._sweeps.store.chain`). Record 0 is
the plan. Each driver that opens the study adds a `driver` record, which moves the head of the
chain, so a driver that was taken over can commit no further record.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.spec import Run, RunResult, RunSpec
from forerun._sweeps.store import chain
from forerun._sweeps.store.chain import Record
from forerun._sweeps.store.curves import CURVES_DIR
from forerun._sweeps.store.errors import (
    KEPT_ADVICE,
    LedgerCorrupt,
    LedgerLost,
    PlanChanged,
    StudyMissing,
    SweepError,
    explain_write_errors,
)
from forerun._sweeps.store.lock import DriverLock


def compare_plans(old: Json, new: Json) -> dict[str, tuple[str, str]]:
    """Return the dotted keys whose values differ between two plans, with both values as JSON text.

    Args:
        old: a plan; a list counts as one value.
        new: another plan.
    """
    flat_old, flat_new = _flatten(old), _flatten(new)
    absent = "(not there)"
    pairs = {
        key: (flat_old.get(key, absent), flat_new.get(key, absent))
        for key in sorted(flat_old | flat_new)
    }
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _flatten(value: Json, prefix: str = "") -> dict[str, str]:
    """Map dotted keys to values as JSON text; a list counts as one value."""
    if not isinstance(value, dict) or (not value and prefix):
        return {prefix: canon.to_canonical_json(value)}
    flat: dict[str, str] = {}
    for key, item in value.items():
        flat |= _flatten(item, f"{prefix}.{key}" if prefix else key)
    return flat


LEDGER_NAME = "ledger.db"
PLAN = "plan"
"""Kind of the records of the plan, and key of the first, which is record 0."""
RESULT, IMPORTED, PRUNED = "result", "imported", "pruned"
"""Kinds of records that are outcomes of runs: of this study (`result`), of the study that it was
forked from (`imported`), and of a run that a search gave up (`pruned`).

A pruned outcome describes the first steps of a run; the outcome of the whole run may follow.
"""

CALIBRATION = "calibration"
"""Kind of the records of settings that were measured, such as the number of slots of a bank. These
settings are part of the runs' specs.
"""
SUGGESTION = "suggestion"
"""Kind of the records of a search's points."""
OUTCOMES = (RESULT, IMPORTED, PRUNED)
WORK_RECORD = "driven"
"""Kind of the records of how long a driver worked.

Their key is the number of the driver and the number of the stretch of its work.
"""
_KIND = re.compile(r"[a-z_]+")


class Ledger:
    """Records of a study, verified when opened.

    Use `open` (the driver) or `read` (everyone else). Records stay in the file: each is read on
    request, and its hash is verified again. A driver keeps only results in memory, because it may
    see 30,000 runs; a reader, which soon ends, keeps the specs too.
    """

    def __init__(
        self,
        study_dir: Path,
        records: Iterable[Record],
        connection: sqlite3.Connection | None,
        lock: DriverLock | None,
    ) -> None:
        self._study_dir = study_dir
        self._connection = connection
        self._lock = lock
        self._num_records, self._head_hash = 0, chain.GENESIS
        self._runs: list[Run] | None = [] if connection is None else None
        self._results: dict[str, RunResult] = {}
        self._pruned: dict[str, RunResult] = {}
        self._own: list[RunResult] = []
        self._num_imported = 0
        for record in records:
            self._index_record(record)

    @classmethod
    def open(
        cls,
        study_dir: Path,
        plan: Mapping[str, Json],
        *,
        create: bool,
        is_amendable: Callable[[str], bool] = lambda key: False,
    ) -> Ledger:
        """Open the ledger for writing, as the only driver.

        Args:
            study_dir: study folder; made if `create`.
            plan: compared with the recorded plan, key by key; recorded as record 0 of a new study.
            create: whether to start a study if there is none.
            is_amendable: returns whether a dotted key of the plan may change while no run is
                recorded; the changed plan is then recorded.

        Raises:
            StudyMissing: there is no study, and `create` is false.
            StudyHeld: another driver holds the study.
            LedgerCorrupt: see `read`; or the ledger is missing or empty although there are curves.
            LedgerTooNew, LedgerTooOld: another version wrote the ledger.
            PlanChanged: the study has another plan; names every changed key with both values.
            DiskFull: the first record does not fit.
        """
        path = study_dir / LEDGER_NAME
        if not path.exists():
            with _add_repair_advice(study_dir):
                _refuse_missing(study_dir, create)
            _make_study_folder(study_dir)
        lock = DriverLock(study_dir)
        connection: sqlite3.Connection | None = None
        try:
            cls._check_journal(study_dir)
            with _add_repair_advice(study_dir):
                connection = chain.connect(path, write=True)
                if chain.is_empty(connection):
                    _refuse_missing(study_dir, create)
                    chain.create(connection)
                ledger = cls(study_dir, chain.load(connection), connection, lock)
            if ledger._num_records:
                ledger._amend_plan(plan, is_amendable)
            ledger._record_driver(plan, lock)
            # The names of the ledger and its journal survive a power loss from here on
            with explain_write_errors(study_dir, KEPT_ADVICE):
                canon.sync_folder(study_dir)
        except BaseException:
            if connection is not None:
                connection.close()
            lock.close()
            raise
        return ledger

    @classmethod
    def _check_journal(cls, study_dir: Path) -> None:
        """Check that a journal that was left behind is the ledger's own, before SQLite applies it.

        Raises as `read`.
        """
        journal_size = 0
        with contextlib.suppress(OSError):
            journal_size = chain.get_journal_path(study_dir / LEDGER_NAME).stat().st_size
        if journal_size:
            with contextlib.suppress(StudyMissing):  # the first commit was cut short
                cls.read(study_dir)

    @classmethod
    def read(cls, study_dir: Path) -> Ledger:
        """Read the records as they are now; works while a driver runs, and holds nothing open.

        Raises:
            StudyMissing: there is no study.
            LedgerCorrupt: names the first record that is not what was written; or the ledger is
                missing or empty although there are curves.
            LedgerTooNew, LedgerTooOld: another version wrote the ledger.
        """
        path = study_dir / LEDGER_NAME
        with _add_repair_advice(study_dir):
            if not path.exists():
                _refuse_missing(study_dir, create=False)
            with chain.open_for_reading(path) as connection:
                if chain.is_empty(connection):
                    _refuse_missing(study_dir, create=False)
                # Read all records before decoding: a driver waits until the file is released
                records = list(chain.load(connection))
        if not records:
            raise StudyMissing(f"{study_dir} has no plan yet: try again in a moment")
        return cls(study_dir, records, None, None)

    def append(self, kind: str, key: str, body: object) -> Record:
        """Append a record, which is durable on return. Arguments and errors as in `append_all`."""
        return self.append_all([(kind, key, body)])[0]

    def append_all(self, entries: Sequence[tuple[str, str, object]]) -> list[Record]:
        """Append records, all or none, in one transaction; on return they are durable.

        Args:
            entries: (kind, key, body) of each record. The kind is a lower-case word (plan, driver,
                suggestion, result, verdict ...), the key is unique within the kind, and the body is
                a record class or JSON data.

        Raises:
            DuplicateRecord: (kind, key) is already recorded.
            StaleDriver: another process has written since: this driver was taken over.
            DiskFull: the records do not fit; none was added.
            CanonError: a body has no canonical form (NaN, for example).
        """
        if self._connection is None:
            raise SweepError("this ledger was opened for reading: only the driver adds records")
        records, head = list[Record](), self.head_hash
        for kind, key, body in entries:
            if not _KIND.fullmatch(kind):
                raise ValueError(f"kind = {kind!r}: must be a lower-case word")
            if kind in OUTCOMES and key in self._results:
                raise chain.make_duplicate_error(kind, key)
            seq = self._num_records + len(records)
            records.append(chain.make_record(seq, kind, key, canon.to_canonical_json(body), head))
            head = records[-1].hash
        with _add_repair_advice(self._study_dir):
            chain.write(self._connection, *records)
        for record, (_, _, body) in zip(records, entries, strict=True):
            self._index_record(record, body)
        return records

    def commit(self, spec: RunSpec, result: RunResult) -> None:
        """Record the outcome of a run. A pruned run may later have a second one, of the whole run.

        Raises:
            SpecError: the spec and the result do not belong together; and the errors of `append`.
        """
        self.commit_all([Run(spec=spec, result=result)])

    def commit_all(self, runs: Sequence[Run]) -> None:
        """Record the outcomes of several runs, all or none. Raises as `commit`."""
        self.append_all(
            [
                (PRUNED if run.result.status == "pruned" else RESULT, run.spec.id, run)
                for run in runs
            ]
        )

    def get_results(self) -> Mapping[str, RunResult]:
        """Return a live view of the outcomes of whole runs by run id, in the order of
        commitment.
        """
        return MappingProxyType(self._results)

    def get_first_results(self) -> Mapping[str, RunResult]:
        """Return a live view of the first outcome of every run, pruned or not, which a
        search uses.
        """
        # A run that was pruned and later run whole was pruned first
        return MappingProxyType(ChainMap(self._pruned, self._results))

    def get_own_results(self) -> Sequence[RunResult]:
        """Return a live view of the outcomes that this study paid for, in the order of commitment.

        Pruned outcomes are included; imported ones are not.
        """
        return self._own

    def read_runs(self) -> tuple[Run, ...]:
        """Return every outcome with its spec, in the order of commitment; a pruned run may occur
        twice.
        """
        return tuple(self.iterate_runs())

    def iterate_runs(self) -> Iterator[Run]:
        """Yield the outcomes one by one; a driver reads them from the file, never all at once."""
        if self._runs is not None:
            yield from self._runs
        else:
            yield from (
                _decode_run(record) for record in self.iterate_records() if record.kind in OUTCOMES
            )

    @property
    def num_runs(self) -> int:
        """Number of outcomes that `read_runs` returns."""
        return len(self._own) + self._num_imported

    def read_imported_ids(self) -> frozenset[str]:
        """Return the ids of imported runs: another study paid for them, so they are outcomes but no
        spend.
        """
        return frozenset(record.key for record in self.iterate_records(IMPORTED))

    def read_records(self, kind: str | None = None) -> tuple[Record, ...]:
        """Return all records in order, or those of one kind."""
        return tuple(self.iterate_records(kind))

    def iterate_records(self, kind: str | None = None, key: str | None = None) -> Iterator[Record]:
        """Yield records in order, read from the file one by one.

        Args:
            kind: only records of this kind.
            key: only records with this key.

        Raises:
            LedgerCorrupt: a record is not what was written.
            SweepError: the file was replaced since it was opened for reading.
        """
        with _add_repair_advice(self._study_dir), contextlib.ExitStack() as stack:
            connection = self._connection
            if connection is None:
                connection = stack.enter_context(
                    chain.open_for_reading(self._study_dir / LEDGER_NAME)
                )
                chain.check_same(connection, self._num_records, self._head_hash)
            conditions = {
                name: value for name, value in (("kind", kind), ("key", key)) if value is not None
            }
            yield from chain.read_stored(connection, self._num_records, **conditions)

    def find(self, kind: str, key: str) -> Record | None:
        """Return the record of that kind and key, or None."""
        return next(self.iterate_records(kind, key), None)

    def append_for_plan(self, kind: str, name: str, body: object) -> Record:
        """Append a record about the user's code, which the plan names.

        The record no longer counts once the plan is amended (`read_records_for_plan`).
        """
        num_amendments = len(self.read_records(PLAN)) - 1
        return self.append(kind, f"{name}/{num_amendments}" if num_amendments else name, body)

    def read_records_for_plan(self, kind: str) -> dict[str, Json]:
        """Return name -> body of the records of `append_for_plan` since the plan was last
        amended.
        """
        *_, plan = self.iterate_records(PLAN)
        return {
            record.key.partition("/")[0]: record.body
            for record in self.iterate_records(kind)
            if record.seq > plan.seq
        }

    @property
    def plan(self) -> Json:
        """The plan that the study was started with, or the newest plan if it was amended before any
        run was recorded.
        """
        *_, record = self.iterate_records(PLAN)
        return record.body

    @property
    def head_hash(self) -> str:
        """Hash of the last record; it identifies everything recorded so far."""
        return self._head_hash

    def check_plan(self, plan: Mapping[str, Json]) -> None:
        """Compare a plan with the recorded one.

        Args:
            plan: the plan as given now.

        Raises:
            PlanChanged: names every changed key with both values.
        """
        if changes := compare_plans(self.plan, canon.to_json(dict(plan))):
            raise PlanChanged(changes, self._study_dir, num_runs=self.num_runs)

    def _amend_plan(self, plan: Mapping[str, Json], is_amendable: Callable[[str], bool]) -> None:
        """Record a plan that may differ from the recorded one. Raises as `check_plan`."""
        try:
            self.check_plan(plan)
        except PlanChanged as error:
            if self.num_runs or not all(map(is_amendable, error.changes)):
                raise
            self.append(PLAN, f"plan/{len(self.read_records(PLAN))}", plan)

    def close(self) -> None:
        """Close the file and release the study's lock."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record_driver(self, plan: Mapping[str, Json], lock: DriverLock) -> None:
        """Record this driver; before the first driver, record the plan."""
        if not self._num_records:
            self.append(PLAN, PLAN, plan)
        self.append("driver", str(len(self.read_records("driver"))), lock.holder)

    def _index_record(self, record: Record, body: object = None) -> None:
        """Count a record, and keep its outcome in memory if it has one.

        Args:
            record: a record that was read or appended.
            body: the appended body; if it is not a `Run`, the run is decoded from the record.

        Raises:
            LedgerCorrupt: the record's kind does not fit its run.
        """
        self._num_records, self._head_hash = record.seq + 1, record.hash
        if record.kind not in OUTCOMES:
            return
        run = body if isinstance(body, Run) else _decode_run(record)
        pruned = record.kind == PRUNED
        is_whole = run.result.num_steps >= run.spec.schedule.num_steps
        if pruned != (run.result.status == "pruned") or (pruned and is_whole):
            state = f"{run.result.status} after {format_counted(run.result.num_steps, 'step')}"
            raise LedgerCorrupt(f"record {record.seq}, {record.kind}: its run is {state}")
        if self._runs is not None:
            self._runs.append(run)
        (self._pruned if pruned else self._results)[run.result.id] = run.result
        if record.kind == IMPORTED:
            self._num_imported += 1
        else:
            self._own.append(run.result)


def _decode_run(record: Record) -> Run:
    """Decode the run that a record holds. Raises LedgerCorrupt."""
    try:
        return canon.decode(Run, record.body)
    except (canon.CanonError, SpecError) as error:
        raise LedgerCorrupt(f"record {record.seq} is not the result of a run ({error})") from error


def _refuse_missing(study_dir: Path, create: bool) -> None:
    """Check that a study may be started where the ledger is missing or empty.

    Raises:
        LedgerLost: there are curves of finished runs.
        StudyMissing: there is no study, and `create` is false.
    """
    if any((study_dir / CURVES_DIR).glob("*.parquet")):
        raise LedgerLost(
            f"{study_dir / LEDGER_NAME}: missing or empty, yet {CURVES_DIR}/ holds finished runs: "
            "restore it from a copy, or name another folder"
        )
    if not create:
        raise StudyMissing(
            f"{study_dir} holds no study: name another folder, or start one with `forerun run PLAN`"
        )


@contextlib.contextmanager
def _add_repair_advice(study_dir: Path) -> Iterator[None]:
    """Add the file's path, and how to repair it, to an error of corruption."""
    try:
        yield
    except LedgerLost:
        raise
    except LedgerCorrupt as error:
        raise LedgerCorrupt(
            f"{study_dir / LEDGER_NAME}: {error}; nothing was changed. `forerun repair "
            f"{study_dir}` copies the file, then keeps every record that its hash proves"
        ) from error


def _make_study_folder(study_dir: Path) -> None:
    """Make the folder so that it survives a power loss."""
    try:
        canon.make_folder(study_dir)
    except OSError as error:
        raise SweepError(
            f"{study_dir} cannot be made ({error.strerror}): name another folder"
        ) from error
