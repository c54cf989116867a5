"""The truth of a study: its plan, its drivers, every suggestion and every outcome, in order, in
`ledger.db`.

One writer (the driver, under `sweeps.store.lock`); what `append` returned from survives a power
loss (`sweeps.store.chain`). Record 0 is the plan. Each driver that opens the study adds a `driver`
record: the head moves, and a driver that was taken over can commit nothing more.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType

from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.checks import SpecError
from proxies.core.notation import counted
from proxies.core.spec import Run, RunResult, RunSpec
from sweeps.store import chain
from sweeps.store.chain import Record
from sweeps.store.curves import CURVES_DIR
from sweeps.store.errors import (
    DiskFull,
    LedgerCorrupt,
    LedgerLost,
    PlanChanged,
    StudyMissing,
    SweepError,
)
from sweeps.store.lock import DriverLock


def plan_changes(old: Json, new: Json) -> dict[str, tuple[str, str]]:
    """Dotted keys whose values differ, with both as JSON text.

    Args:
        old: a plan; a list is a value.
        new: another one.
    """
    flat_old, flat_new = _flat(old), _flat(new)
    absent = "(not there)"
    pairs = {
        key: (flat_old.get(key, absent), flat_new.get(key, absent))
        for key in sorted(flat_old | flat_new)
    }
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _flat(value: Json, prefix: str = "") -> dict[str, str]:
    """Dotted keys to values as JSON text; lists are values."""
    if not isinstance(value, dict) or (not value and prefix):
        return {prefix: canon.canonical(value)}
    flat: dict[str, str] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{prefix}.{key}" if prefix else key)
    return flat


LEDGER_NAME = "ledger.db"
PLAN = "plan"
"""Kind of the records of the plan, and the key of the first, which is record 0."""
RESULT, IMPORTED, PRUNED = "result", "imported", "pruned"
"""Kinds of records that are outcomes of runs: of this study, of another that it was forked from,
and of a run that a search gave up: a fact about its first steps, which the outcome of the whole run
may follow.
"""

CALIBRATION = "calibration"
"""Kind of the records of how runs are to compute: which runs there are depends on it."""
SUGGESTION = "suggestion"
"""Kind of the records of a search's points."""
OUTCOMES = (RESULT, IMPORTED, PRUNED)
DRIVEN = "driven"
"""Kind of the records of how long a driver worked; the key: the driver's number and that of the
stretch of its work."""
_KIND = re.compile(r"[a-z_]+")


class Ledger:
    """The records of a study, verified when opened. Use `open` (the driver) or `read` (anyone
    else).

    Records stay in the file and are read from it when asked for, each proven again by its hash. In
    memory are results, and of a reader, who soon ends, the specs as well: a driver may see 30,000
    runs.
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
            self._take_in(record)

    @classmethod
    def open(
        cls,
        study_dir: Path,
        plan: Mapping[str, Json],
        *,
        create: bool,
        is_amendable: Callable[[str], bool] = lambda key: False,
    ) -> Ledger:
        """Open for writing, as the only driver; `plan` is the question, in which nothing may
        change.

        Args:
            study_dir: the study folder; made if `create`.
            plan: record 0: compared whole, key by key.
            create: whether to start a study where there is none.
            is_amendable: whether a dotted key of the plan may change while no run is recorded; the
                changed plan is then recorded.

        Raises:
            StudyMissing: no study here, and `create` is false.
            StudyHeld: another driver has it.
            LedgerCorrupt: see `read`; or the ledger is missing or empty although curves are there.
            LedgerTooNew, LedgerTooOld: written by another version.
            PlanChanged: the study has another plan; every changed key with both values.
            DiskFull: no room for the first record.
        """
        path = study_dir / LEDGER_NAME
        if not path.exists():
            with _advised(study_dir):
                _refuse_missing(study_dir, create)
            _make(study_dir)
        lock = DriverLock(study_dir)
        journal, waiting = chain.journal_of(path), False
        with contextlib.suppress(OSError):
            waiting = journal.stat().st_size > 0
        if waiting:  # before SQLite writes it into the ledger: is it the ledger's own?
            try:
                cls.read(study_dir)
            except StudyMissing:  # the first commit was cut short
                pass
            except BaseException:
                lock.close()
                raise
        connection: sqlite3.Connection | None = None
        try:
            with _advised(study_dir):
                connection = chain.connect(path, write=True)
                if chain.is_empty(connection):
                    _refuse_missing(study_dir, create)
                    chain.create(connection)
                ledger = cls(study_dir, chain.load(connection), connection, lock)
            if ledger._num_records:
                ledger._amend_plan(plan, is_amendable)
            ledger._greet(plan, lock)
            _keep_names(study_dir)
        except BaseException:
            if connection is not None:
                connection.close()
            lock.close()
            raise
        return ledger

    @classmethod
    def read(cls, study_dir: Path) -> Ledger:
        """The records as they are now, for reading; works while a driver runs, and holds nothing
        open.

        Raises:
            StudyMissing: no study here.
            LedgerCorrupt: the number of the first record that is not what was written; or the
                ledger is missing or empty although curves are there.
            LedgerTooNew, LedgerTooOld: written by another version.
        """
        path = study_dir / LEDGER_NAME
        with _advised(study_dir):
            if not path.exists():
                _refuse_missing(study_dir, create=False)
            with chain.reading(path) as connection:
                if chain.is_empty(connection):
                    _refuse_missing(study_dir, create=False)
                # first all of it: a driver waits until the file is let go
                records = list(chain.load(connection))
        if not records:
            raise StudyMissing(f"{study_dir} has no plan yet: try again in a moment")
        return cls(study_dir, records, None, None)

    def append(self, kind: str, key: str, body: object) -> Record:
        """Add a record; on return it is durable. Arguments and errors as in `append_all`."""
        return self.append_all([(kind, key, body)])[0]

    def append_all(self, entries: Sequence[tuple[str, str, object]]) -> list[Record]:
        """Add records, all or none, for the price of one; on return they are durable.

        Args:
            entries: of each its kind, a lower-case word (plan, driver, suggestion, result, verdict
                ...), its key, unique within the kind, and its body: a record of ours, or JSON data.

        Raises:
            DuplicateRecord: (kind, key) is there already.
            StaleDriver: someone else has written since: this driver was taken over.
            DiskFull: they do not fit; nothing was added.
            CanonError: a body has no canonical form (NaN, say).
        """
        if self._connection is None:
            raise SweepError("this ledger was opened for reading: only the driver adds records")
        records, head = list[Record](), self.head_hash
        for kind, key, body in entries:
            if not _KIND.fullmatch(kind):
                raise ValueError(f"kind = {kind!r}: must be a lower-case word")
            if kind in OUTCOMES and key in self._results:
                raise chain.duplicate(kind, key)
            seq = self._num_records + len(records)
            records.append(chain.link(seq, kind, key, canon.canonical(body), head))
            head = records[-1].hash
        with _advised(self._study_dir):
            chain.write(self._connection, *records)
        for record, (_, _, body) in zip(records, entries, strict=True):
            self._take_in(record, body)
        return records

    def commit(self, spec: RunSpec, result: RunResult) -> None:
        """Record the one outcome of a run; one that was pruned may have another, of the whole of
        it.

        Raises as `append`, and SpecError if they do not belong together.
        """
        self.commit_all([Run(spec=spec, result=result)])

    def commit_all(self, runs: Sequence[Run]) -> None:
        """The same of several runs, all or none."""
        self.append_all(
            [
                (PRUNED if run.result.status == "pruned" else RESULT, run.spec.id, run)
                for run in runs
            ]
        )

    def results(self) -> Mapping[str, RunResult]:
        """Every outcome of a whole run so far by run id, in the order of commitment; a live
        view.
        """
        return MappingProxyType(self._results)

    def first_results(self) -> Mapping[str, RunResult]:
        """What a search goes by: of every run its first outcome, pruned or not; a live view."""
        # what was pruned was so before it ran whole
        return MappingProxyType(ChainMap(self._pruned, self._results))

    def own_results(self) -> Sequence[RunResult]:
        """What this study paid for, none imported, pruned ones too; in the order of commitment, a
        live view.
        """
        return self._own

    def runs(self) -> tuple[Run, ...]:
        """Every outcome so far with its spec, in the order of commitment; a pruned run may be there
        twice.
        """
        return tuple(self.each_run())

    def each_run(self) -> Iterator[Run]:
        """`runs` one by one, and never all in memory where this is the driver."""
        if self._runs is not None:
            yield from self._runs
        else:
            yield from (_run_in(record) for record in self.stream() if record.kind in OUTCOMES)

    @property
    def num_runs(self) -> int:
        """How many `runs` there are."""
        return len(self._own) + self._num_imported

    def imported(self) -> frozenset[str]:
        """Ids of the runs that another study paid for: outcomes here, but no spend."""
        return frozenset(record.key for record in self.stream(IMPORTED))

    def records(self, kind: str | None = None) -> tuple[Record, ...]:
        """All records in order, or those of one kind."""
        return tuple(self.stream(kind))

    def stream(self, kind: str | None = None, key: str | None = None) -> Iterator[Record]:
        """`records`, and of them those with that key, read from the file one by one.

        Raises:
            LedgerCorrupt: one is not what was written.
            SweepError: the file is another than when it was opened for reading.
        """
        with _advised(self._study_dir), contextlib.ExitStack() as stack:
            connection = self._connection
            if connection is None:
                connection = stack.enter_context(chain.reading(self._study_dir / LEDGER_NAME))
                chain.check_same(connection, self._num_records, self._head_hash)
            only = {
                name: value for name, value in (("kind", kind), ("key", key)) if value is not None
            }
            yield from chain.stored(connection, self._num_records, **only)

    def find(self, kind: str, key: str) -> Record | None:
        """The record of that kind and key, if there is one."""
        return next(self.stream(kind, key), None)

    def append_for_plan(self, kind: str, name: str, body: object) -> Record:
        """Append a record that describes the plan's own code, and that an amended plan
        supersedes.
        """
        num_amendments = len(self.records(PLAN)) - 1
        return self.append(kind, f"{name}/{num_amendments}" if num_amendments else name, body)

    def records_for_plan(self, kind: str) -> dict[str, Json]:
        """Return name -> body of the records of `append_for_plan` since the plan was last
        amended.
        """
        *_, plan = self.stream(PLAN)
        return {
            record.key.partition("/")[0]: record.body
            for record in self.stream(kind)
            if record.seq > plan.seq
        }

    @property
    def plan(self) -> Json:
        """The plan that the study was started with, or the newest one if it changed before any run
        was recorded.
        """
        *_, record = self.stream(PLAN)
        return record.body

    @property
    def head_hash(self) -> str:
        """Hash of the last record: names everything recorded so far."""
        return self._head_hash

    def check_plan(self, plan: Mapping[str, Json]) -> None:
        """Hold a plan against record 0.

        Args:
            plan: the question as asked now.

        Raises:
            PlanChanged: every changed key, with both values.
        """
        if changes := plan_changes(self.plan, canon.to_json(dict(plan))):
            raise PlanChanged(changes, self._study_dir, num_runs=self.num_runs)

    def _amend_plan(self, plan: Mapping[str, Json], is_amendable: Callable[[str], bool]) -> None:
        """Record a plan that may differ from the recorded one. Raises as `check_plan`."""
        try:
            self.check_plan(plan)
        except PlanChanged as error:
            if self.num_runs or not all(map(is_amendable, error.changes)):
                raise
            self.append(PLAN, f"plan/{len(self.records(PLAN))}", plan)

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _greet(self, plan: Mapping[str, Json], lock: DriverLock) -> None:
        """Record this driver; before the first one, the plan."""
        if not self._num_records:
            self.append(PLAN, PLAN, plan)
        self.append("driver", str(len(self.records("driver"))), lock.holder)

    def _take_in(self, record: Record, body: object = None) -> None:
        """Keep an outcome at hand; `body` is what was appended."""
        self._num_records, self._head_hash = record.seq + 1, record.hash
        if record.kind not in OUTCOMES:
            return
        run = body if isinstance(body, Run) else _run_in(record)
        pruned, whole = record.kind == PRUNED, run.result.num_steps >= run.spec.schedule.num_steps
        if pruned != (run.result.status == "pruned") or (pruned and whole):
            state = f"{run.result.status} after {counted(run.result.num_steps, 'step')}"
            raise LedgerCorrupt(f"record {record.seq}, {record.kind}: its run is {state}")
        if self._runs is not None:
            self._runs.append(run)
        (self._pruned if pruned else self._results)[run.result.id] = run.result
        if record.kind == IMPORTED:
            self._num_imported += 1
        else:
            self._own.append(run.result)


def _run_in(record: Record) -> Run:
    """The outcome that a record holds. Raises LedgerCorrupt."""
    try:
        return canon.decode(Run, record.body)
    except (canon.CanonError, SpecError) as error:
        raise LedgerCorrupt(f"record {record.seq} is not the result of a run ({error})") from error


def _refuse_missing(study_dir: Path, create: bool) -> None:
    """No ledger, or an empty one: fine only where nothing can have been lost, and a study is to be
    started.
    """
    if any((study_dir / CURVES_DIR).glob("*.parquet")):
        raise LedgerLost(
            f"{study_dir / LEDGER_NAME}: missing or empty, yet {CURVES_DIR}/ holds finished runs: "
            "restore it from a "
            "copy, or name another folder"
        )
    if not create:
        raise StudyMissing(
            f"{study_dir} holds no study: name another folder, or start one with `forerun run PLAN`"
        )


@contextlib.contextmanager
def _advised(study_dir: Path) -> Iterator[None]:
    """Add to an error of corruption the file it is in, and what to do about it."""
    try:
        yield
    except LedgerLost:
        raise
    except LedgerCorrupt as error:
        raise LedgerCorrupt(
            f"{study_dir / LEDGER_NAME}: {error}; nothing was changed. `forerun repair "
            f"{study_dir}` copies the file, "
            "then keeps every record that its hash proves"
        ) from error


def _make(study_dir: Path) -> None:
    """Make the folder, so that it outlasts a power cut."""
    try:
        canon.make_folder(study_dir)
    except OSError as error:
        raise SweepError(
            f"{study_dir} cannot be made ({error.strerror}): name another folder"
        ) from error


def _keep_names(study_dir: Path) -> None:
    """Make the names of ledger and journal outlast a power cut, once and for all that is recorded
    after.
    """
    try:
        canon.sync_folder(study_dir)
    except OSError as error:
        raise DiskFull(
            f"{study_dir}: {error.strerror}: free some space and resume; recorded results are kept"
        ) from error
