"""Runs in, outcomes out: fills banks, commits each run once, survives lost and hung workers.

Executions may repeat, outcomes may not: the first valid result of a run is recorded, any other is dropped. Curves
are on disk before their results are recorded. A run that is lost is run again, up to a limit; its last attempt has a
bank to itself, so that a run which brings its worker down cannot take its neighbours with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from proxies import canon
from proxies.checks import SpecError
from proxies.spec import Curve, RunResult, RunSpec
from sweeps.backlog import Attempt, Backlog
from sweeps.curves import store_curve
from sweeps.errors import RunsFail, SourceStuck
from sweeps.ledger import Ledger
from sweeps.pool import Advance, Finished, Pool
from sweeps.source import Signal, Source

POLL_SECONDS = 0.5  # how soon a stop is noticed while workers are busy
NO_CURVE = Curve(steps=(), train_loss_nats=(), grad_norm=())
"""Of a run that never reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What happened since the last call, and how things stand."""

    outcomes: tuple[RunResult, ...]
    """Just recorded."""
    lost: tuple[str, ...]
    """A sentence for every worker just lost."""
    num_running: int
    num_queued: int
    """Known and waiting for a slot; a search may bring more."""


@dataclass(kw_only=True, slots=True)
class _Worker:
    """What the driver believes a worker holds."""

    bank_key: str = ""
    slots: dict[int, Attempt] = field(default_factory=dict)
    busy_since: float | None = None
    """Monotonic seconds; None when idle."""


def drive(
    source: Source,
    pool: Pool,
    ledger: Ledger,
    study_dir: Path,
    *,
    num_slots_for: Callable[[RunSpec], int],
    bank_key_for: Callable[[RunSpec], str],
    steps_per_call: int,
    max_attempts: int = 3,
    hang_seconds: float = 600.0,
    progress: Callable[[Progress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run everything `source` gives, until it is done or `should_stop()`.

    Args:
        source: what to run; runs that have an outcome in the ledger are skipped.
        pool: where; it stays open.
        ledger: where outcomes go, open for writing.
        study_dir: where curves go.
        num_slots_for: K of a run's bank; part of the run's numerics.
        bank_key_for: what runs must share to share a bank (shape, parametrization, numerics ...).
        steps_per_call: optimizer steps between reports of a worker.
        max_attempts: after as many losses a run is recorded as failed; the others go on.
        hang_seconds: a worker that has not reported for so long is given up; longer than any call takes.
        progress: called whenever something happened.
        should_stop: asked several times a second: on true, no new work is given out, and what has arrived is
            recorded. What is in flight is lost and runs again on resume.
        clock: monotonic seconds.

    Raises:
        SourceStuck: the source waits for what is not running.
        RunsFail: a run failed for good before any other had ended, or cannot be run at all; it is not recorded.
        PoolDead, DiskFull, StaleDriver: as named; what was recorded stands.
    """
    driver = _Driver(
        source, pool, ledger, study_dir, num_slots_for, bank_key_for,
        steps_per_call=steps_per_call, max_attempts=max_attempts, hang_seconds=hang_seconds, clock=clock,
    )  # fmt: skip
    while not should_stop():
        driver.pull()
        driver.hand_out()
        if not driver.has_work():
            return
        if event := driver.collect(POLL_SECONDS):
            progress(event)
    if event := driver.collect(0.0):
        progress(event)


class _Driver:
    """The state of one `drive`: who holds what, what waits, what is settled."""

    def __init__(
        self,
        source: Source,
        pool: Pool,
        ledger: Ledger,
        study_dir: Path,
        num_slots_for: Callable[[RunSpec], int],
        bank_key_for: Callable[[RunSpec], str],
        *,
        steps_per_call: int,
        max_attempts: int,
        hang_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._source, self._pool, self._ledger, self._study_dir = source, pool, ledger, study_dir
        self._num_slots_for, self._bank_key_for = num_slots_for, bank_key_for
        self._steps_per_call, self._max_attempts = steps_per_call, max_attempts
        self._hang_seconds, self._clock = hang_seconds, clock
        self._workers = [_Worker() for _ in range(pool.num_workers)]
        self._backlog = Backlog(num_slots_for)
        self._open: dict[str, Attempt] = {}  # by run id: queued or running, no outcome yet
        self._signal = Signal.WAIT
        self._outcomes: list[RunResult] = []
        self._lost: list[str] = []

    def has_work(self) -> bool:
        """Whether any worker is busy.

        Raises:
            SourceStuck: none is, and the source still waits.
        """
        if any(worker.busy_since is not None for worker in self._workers):
            return True
        if self._signal is not Signal.DONE:
            raise SourceStuck("the source waits for results, yet nothing is running or queued: a bug in the source")
        return False

    def pull(self) -> None:
        """Queue every run the source can name now. A list is short, and a search has P in flight at most."""
        while self._signal is not Signal.DONE:
            answer = self._source.next(self._ledger.results())
            if isinstance(answer, Signal):
                self._signal = answer
                return
            if answer.id not in self._ledger.results() and answer.id not in self._open:
                attempt = Attempt(spec=answer, bank_key=self._bank_key_for(answer))
                self._open[answer.id] = attempt
                self._backlog.add(attempt)

    def hand_out(self) -> None:
        """Start a call on every idle worker that has, or can get, something to do."""
        for index, worker in enumerate(self._workers):
            if worker.busy_since is not None:
                continue
            if not worker.slots:
                worker.bank_key = self._backlog.choose_key(worker.bank_key)
            moved = self._backlog.fill(worker.bank_key, worker.slots)
            if worker.slots:
                call = Advance(
                    bank_key=worker.bank_key,
                    num_slots=self._num_slots_for(next(iter(worker.slots.values())).spec),
                    admit=tuple((slot, _as_json(attempt.spec)) for slot, attempt in moved.items()),
                    max_steps=self._steps_per_call,
                )
                worker.busy_since = self._clock()
                self._pool.start(index, call)

    def collect(self, timeout_seconds: float) -> Progress | None:
        """Take in what arrives, give up on what hangs; None if nothing happened."""
        for report in self._pool.wait(timeout_seconds):
            worker = self._workers[report.worker]
            worker.busy_since = None
            for finished in report.finished:
                self._settle(worker, finished)
            if report.error is not None and report.refused:
                raise RunsFail(f"{report.error}. What has ended is recorded; mend it, and the same command goes on")
            if report.error is not None:
                self._lose_worker(report.worker, report.error)
        now = self._clock()
        for index, worker in enumerate(self._workers):
            if worker.busy_since is not None and now - worker.busy_since > self._hang_seconds:
                self._lose_worker(index, f"no report for {self._hang_seconds:g} s")
        if not (self._outcomes or self._lost):
            return None
        event = Progress(
            outcomes=tuple(self._outcomes),
            lost=tuple(self._lost),
            num_running=sum(len(worker.slots) for worker in self._workers),
            num_queued=len(self._backlog),
        )
        self._outcomes, self._lost = [], []
        return event

    def _settle(self, worker: _Worker, finished: Finished) -> None:
        """Record a result if it is the first valid one of its run; a duplicate or a late one is dropped."""
        held = worker.slots.get(finished.slot)
        try:
            result, curve = _decode(finished)
        except (canon.CanonError, SpecError) as error:
            if held is not None:
                del worker.slots[finished.slot]
                self._lose(held, f"its result is not valid: {error}")
            return
        if held is not None and held.spec.id == result.id:
            del worker.slots[finished.slot]
        attempt = self._open.get(result.id)
        if attempt is not None:
            self._backlog.discard(attempt)  # it may have been lost, queued again, and now come in late
            self._commit(attempt, result, curve)

    def _lose_worker(self, index: int, reason: str) -> None:
        """Give up on a worker: what it held is lost, and it starts afresh."""
        worker = self._workers[index]
        held, worker.slots, worker.busy_since, worker.bank_key = list(worker.slots.values()), {}, None, ""
        self._lost.append(f"worker {index}: {reason}; it held {len(held)} runs")
        for attempt in held:
            self._lose(attempt, reason)
        self._pool.restart(index)

    def _lose(self, attempt: Attempt, reason: str) -> None:
        """Queue a lost run again, or record that it failed."""
        if attempt.spec.id not in self._open:
            return  # settled meanwhile, by a late result
        attempt.num_lost += 1
        attempt.alone = attempt.num_lost == self._max_attempts - 1
        if attempt.num_lost < self._max_attempts:
            self._backlog.put_back(attempt)
            return
        reason = f"lost {attempt.num_lost} times, the last: {reason}"
        if not any(result.status != "failed" for result in self._ledger.results().values()):
            raise RunsFail(
                f"run {attempt.spec.id[:12]} was {reason}. No run of this study has ended well yet, so nothing was "
                "recorded: mend what fails, and the same command begins again"
            )
        self._commit(attempt, _failed(attempt.spec.id, reason), NO_CURVE)

    def _commit(self, attempt: Attempt, result: RunResult, curve: Curve) -> None:
        """The one place where an outcome is recorded: curve first, so that no result lacks one."""
        store_curve(self._study_dir, result.id, curve)
        self._ledger.commit(attempt.spec, result)
        del self._open[result.id]
        self._outcomes.append(result)


def _as_json(spec: RunSpec) -> dict[str, canon.Json]:
    return cast(dict[str, canon.Json], canon.to_json(spec))


def _decode(finished: Finished) -> tuple[RunResult, Curve]:
    """What a worker sent, as records. Raises CanonError or SpecError."""
    result = canon.decode(RunResult, finished.result)
    curve = canon.decode(Curve, finished.curve)
    if canon.content_id(curve) != result.curve_id:
        raise canon.CanonError(f"the curve is not the one the result names, {result.curve_id[:12]}")
    return result, curve


def _failed(run_id: str, reason: str) -> RunResult:
    return RunResult(
        id=run_id, status="failed", loss_nats=None, num_steps=0, last_train_loss_nats=None,
        curve_id=canon.content_id(NO_CURVE), flops=0.0, tokens=0, seconds=0.0, environment={}, reason=reason,
    )  # fmt: skip
