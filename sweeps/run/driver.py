"""The driver: run everything that a source names, and record one outcome for each run.

The driver fills banks on the pool's workers, records each outcome once, survives workers that are
lost or hang, and stops in order.

A run may be executed more than once, but it has one outcome: the first valid result is recorded and
any later one is dropped. Curves are on disk before their results are recorded. A lost run is
executed again from its last checkpoint, up to a limit that holds across drivers. Its last attempt
has a bank to itself, so that a run that crashes its worker cannot take other runs with it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from proxies.core import canon
from proxies.core.checks import SpecError
from proxies.core.failures import CAUSES, oom_kills
from proxies.core.notation import counted
from proxies.core.spec import Curve, Run, RunResult, RunSpec
from sweeps.run.backlog import Attempt, Backlog
from sweeps.run.crew import AdaptiveTimeouts, Crew
from sweeps.run.lost_runs import NO_CURVE, Loss, Losses, RetryStatus, failed_result
from sweeps.run.pool import Finished, Pool, Report, decoded, decoded_pause
from sweeps.run.trunks import Trunks
from sweeps.search.source import RunSource, SourceSignal
from sweeps.store.checkpoints import drop_checkpoints, drop_stale_checkpoints, saved_step
from sweeps.store.curves import store_curves
from sweeps.store.errors import BudgetSpent, RunsFail, SourceStuck
from sweeps.store.ledger import Ledger
from sweeps.store.live import DriverProgress, RunningRun

GRACE_SECONDS = 15.0
"""Seconds that workers have to save after a stop was requested.

SLURM kills a job 30 s after its SIGTERM, and closing the pool must fit into that time too.
"""
HANG_SECONDS = 600.0
"""Maximum time in seconds that a worker may be silent, whatever it is doing."""


Refusal = Callable[[float, Callable[[], Sequence[float]]], str]
"""Function that returns why a run may not start, or an empty string if it may.

Its arguments are the FLOPs of the run and a function that returns the FLOPs of each run in flight.
"""


def drive(
    source: RunSource,
    pool: Pool,
    ledger: Ledger,
    study_dir: Path,
    *,
    num_slots_for: Callable[[RunSpec], int],
    bank_key_for: Callable[[RunSpec], str],
    max_attempts: int = 3,
    noise: bool = False,
    kinds: Sequence[str] = (),
    hang_seconds: float = HANG_SECONDS,
    grace_seconds: float = GRACE_SECONDS,
    progress: Callable[[DriverProgress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    refusal: Refusal = lambda flops, in_flight: "",
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run everything that `source` names, until the source is done or `should_stop()` is true.

    Args:
        source: names the runs; runs with an outcome are skipped, prunable runs pause at its rungs.
        pool: the workers; stays open.
        ledger: records outcomes and losses; open for writing.
        study_dir: folder of the curves and of the workers' checkpoints.
        num_slots_for: returns K, the number of slots of a run's bank, part of the run's numerics.
        bank_key_for: returns what runs of one bank share (shape, parametrization, numerics ...).
        max_attempts: number of losses after which a run is recorded as failed; others continue.
        noise: whether workers measure gradient noise too (`sweeps.store.curves.append_noise`).
        kinds: kind of each worker's device (`sweeps.run.kinds`), if known.
        hang_seconds: maximum silence of a worker; `sweeps.run.crew` usually allows less.
        grace_seconds: seconds that workers have to save after a stop was requested.
        progress: called when a run ends or is lost, and on notes; else at most once a second.
        should_stop: asked several times a second; once true, workers save and no run starts.
        refusal: asked before each start; after a refusal no run starts.
        clock: returns monotonic seconds.

    Raises:
        BudgetSpent: a run was refused, and the runs in flight at that time have ended.
        SourceStuck: the source waits for a run that is not running.
        RunsFail: nothing has ended well, and further attempts cannot help (`Driver`).
        PoolDead, DiskFull, StaleDriver: see `sweeps.store.errors`; recorded outcomes are kept.
    """
    crew = Crew(
        pool, num_slots_for, AdaptiveTimeouts(hang_seconds), clock, noise=noise, kinds=kinds
    )
    driver = Driver(
        source,
        ledger,
        study_dir,
        crew,
        Backlog(num_slots_for),
        bank_key_for,
        max_attempts=max_attempts,
        should_stop=should_stop,
        refusal=refusal,
        clock=clock,
    )
    driver.run(progress, grace_seconds)


POLL_SECONDS = 0.5
"""Maximum time in seconds before a stop is noticed while workers are busy."""
LOOK_SECONDS = 1.0
"""Minimum time in seconds between two progress events that only report where each run is."""
_RECORDED = "Ended runs are recorded"


class Driver:
    """State of one `drive`: which worker holds which run, which runs wait, and which have an
    outcome.

    RunsFail is raised before any run has ended well, if one run failed for good or the same failure
    occurred twice, and whenever a worker says that a run cannot be executed. No outcome is recorded
    for that run.
    """

    def __init__(
        self,
        source: RunSource,
        ledger: Ledger,
        study_dir: Path,
        crew: Crew,
        backlog: Backlog,
        bank_key_for: Callable[[RunSpec], str],
        *,
        max_attempts: int,
        should_stop: Callable[[], bool],
        refusal: Refusal,
        clock: Callable[[], float],
    ) -> None:
        self._source, self._ledger, self._study_dir = source, ledger, study_dir
        self._crew, self._backlog, self._bank_key_for = crew, backlog, bank_key_for
        self._max_attempts = max_attempts
        self._losses = Losses(ledger)
        self.settled = ledger.results() if source.pruner is None else ledger.first_results()
        """Outcomes, by run id, of runs that need no further execution.

        A source without a pruner runs to its end what another source has pruned, so it does not
        count pruned runs as settled.
        """
        self._open: dict[str, Attempt] = {}  # queued or running, by run id
        self._trunks = Trunks(study_dir)
        self._signal = SourceSignal.WAIT
        self._should_stop, self._refusal, self._clock = should_stop, refusal, clock
        self._running: tuple[RunningRun, ...] = ()
        self._looked_at = -math.inf
        self._refused = ""
        self._finished = False
        self._oom_kills = oom_kills()
        self._ended: list[tuple[Attempt, RunResult, Curve]] = []  # not recorded yet
        self._outcomes: list[Run] = []
        self._lost: list[str] = []
        self._announced = set[tuple[str, str]]()

    def run(self, progress: Callable[[DriverProgress], None], grace_seconds: float) -> None:
        """Do the work of `drive`, whose arguments and errors these are."""
        drop_stale_checkpoints(self._study_dir, self.settled)
        while not self._should_stop():
            self.pull()
            self.hand_out()
            if not self.has_work():
                return
            if event := self.collect(POLL_SECONDS):
                progress(event)
        for event in self.stop(grace_seconds):
            progress(event)

    def has_work(self) -> bool:
        """Return whether any worker is busy.

        Raises:
            BudgetSpent: no worker is busy, and a run was refused.
            SourceStuck: no worker is busy, and the source still waits for results.
        """
        if self._crew.busy:
            return True
        if self._refused:
            raise BudgetSpent(self._refused)
        if self._signal is not SourceSignal.DONE:
            raise SourceStuck(
                "the source waits for results, but no run is running or queued. This is a bug in "
                "the source"
            )
        return False

    def pull(self) -> None:
        """Queue every run that the source can name now.

        A static list ends here; a search has at most P trials in flight.
        """
        while self._signal is not SourceSignal.DONE:
            answer = self._source.next(self.settled)
            if isinstance(answer, SourceSignal):
                self._signal = answer
                return
            run_id = answer.id
            if run_id not in self.settled and run_id not in self._open:
                self._open[run_id] = attempt = Attempt(spec=answer, run_id=run_id, bank_key="")
                self._trunks.add(attempt)
                attempt.rungs = (
                    () if self._source.pruner is None else self._source.pruner.rungs(run_id)
                )
                if self._update_retry_status(attempt).failed:
                    self._give_up(attempt, None)
                else:
                    self._backlog.add(attempt)

    def hand_out(self) -> None:
        """Start a call on every idle worker that has runs or can get some, and let training workers
        go on.
        """
        # Let a training worker continue past its call unless queued runs wait for its free slots
        for index, worker in self._crew.training():
            if not self._backlog.waits_for(worker.bank_key, worker.slots, self._is_ready):
                self._crew.go_on(index)
        # Fill the banks of idle workers from the backlog
        none_ready = not len(self._backlog)
        for index, worker in self._crew.idle():
            if not worker.slots:
                if none_ready:
                    continue
                worker.bank_key = self._backlog.choose_key(worker.bank_key, self._is_ready)
            moved = self._backlog.fill(
                worker.bank_key, worker.slots, self._is_ready, self._can_start
            )
            if worker.slots:
                self._crew.start(index, moved, kept=self._trunks.kept)
            else:
                none_ready = True  # no other empty bank can be filled either

    def _is_ready(self, attempt: Attempt) -> bool:
        return self._trunks.may_start(attempt, self._crew.steps_done)

    def _can_start(self, attempt: Attempt) -> bool:
        # A user's command may be broken: it runs alone until one run has finished.
        if attempt.spec.command is not None and self._crew.flops() and not self._has_finished():
            return False
        attempt.flops = self._trunks.flops(attempt)
        self._refused = self._refused or self._refusal(attempt.flops, self._crew.flops)
        return not self._refused

    def collect(self, timeout_seconds: float) -> DriverProgress | None:
        """Process the reports that arrive, and give up on workers that hang.

        Returns:
            A progress event, or None if there is no news.
        """
        reports = self._crew.wait(timeout_seconds)
        for report in reports:
            for finished in report.finished:
                self._handle_finished(report.worker, finished)
            for paused in report.paused:
                self._handle_paused(report.worker, paused)
        self._commit()
        for report in reports:
            if report.error is not None:
                self._lose_worker(report, report.error)
        notes = tuple(note for report in reports for note in report.notes)
        if look := bool(reports) and self._clock() - self._looked_at >= LOOK_SECONDS:
            self._running, self._looked_at = self._crew.running(), self._clock()
        if not (look or notes or self._outcomes or self._lost):
            return None
        event = DriverProgress(
            outcomes=tuple(self._outcomes),
            lost=tuple(self._lost),
            notes=notes,
            running=self._running,
            num_queued=len(self._backlog),
        )
        self._outcomes, self._lost = [], []
        return event

    def stop(self, grace_seconds: float) -> Iterator[DriverProgress]:
        """Have every worker save what it holds, and record what arrives in the meantime.

        Args:
            grace_seconds: maximum time in seconds.

        Yields:
            Progress events.
        """
        deadline = self._clock() + grace_seconds
        workers_asked = set[int]()
        while (left_seconds := deadline - self._clock()) > 0:
            for index, worker in self._crew.idle():
                if worker.slots and index not in workers_asked:
                    workers_asked.add(index)
                    self._crew.start(index, {}, 0)
            if not self._crew.busy:
                return
            if event := self.collect(min(POLL_SECONDS, left_seconds)):
                yield event

    def _handle_finished(self, index: int, finished: Finished) -> None:
        """Record a result if it is the first valid one of its run; drop a duplicate or late one."""
        slots = self._crew.workers[index].slots
        holder = slots.get(finished.slot)
        try:
            result, curve = decoded(finished)
            expects_pause = holder is not None and holder.run_id == result.id and bool(holder.rungs)
            if result.status == "pruned" or (result.status == "finished" and expects_pause):
                raise canon.CanonError("it did not pause at the step of the pruning decision")
        except (canon.CanonError, SpecError) as error:
            if holder is not None:
                del slots[finished.slot]
                self._lose_invalid(holder, error, index)
            return
        if holder is not None and holder.run_id == result.id:
            del slots[finished.slot]
        attempt = self._open.get(result.id)
        if attempt is not None:
            # A late result: the run may have been lost and queued again
            self._backlog.discard(attempt)
            self._keep_outcome(attempt, result, curve)

    def _handle_paused(self, index: int, paused: Finished) -> None:
        """Decide whether a paused run goes on or is recorded as pruned, which frees its slot."""
        slots = self._crew.workers[index].slots
        attempt = slots.get(paused.slot)
        if attempt is None or attempt.pause_step is None or self._source.pruner is None:
            return
        pause_step = attempt.pause_step
        try:
            result, curve = decoded_pause(paused, attempt.run_id, pause_step)
        except (canon.CanonError, SpecError) as error:
            del slots[paused.slot]
            self._lose_invalid(attempt, error, index)
            return
        reason = self._source.pruner.verdict(attempt.run_id, curve.train_loss_nats)
        attempt.rungs = attempt.rungs[1:]
        # A late report may have recorded an outcome in the meantime
        if reason or attempt.run_id not in self._open:
            del slots[paused.slot]
        if reason and attempt.run_id in self._open:
            self._keep_outcome(attempt, dataclasses.replace(result, reason=reason), curve)

    def _lose_worker(self, report: Report, error: str) -> None:
        """Give up on a worker: what it held is lost, and it is restarted.

        Raises:
            RunsFail: no further attempt can help.
        """
        cause = report.cause
        if report.refused:
            raise RunsFail(
                f"{CAUSES[cause].words}: {error}. {_RECORDED}; fix this, then run the same command "
                "to resume"
            )
        stopping = self._should_stop()  # the same signal may have ended the worker
        if cause == "lost_worker":
            killed_before, self._oom_kills = self._oom_kills, oom_kills()
            cause = (
                "out_of_memory"
                if self._oom_kills > killed_before
                else "preempted"
                if stopping
                else cause
            )
        attempts = self._crew.dismiss(report.worker, restart=not stopping)
        loss = Loss(
            cause=cause,
            detail=error,
            log_tail=report.log_tail,
            worker=report.worker,
            alone=len(attempts) == 1,
            kind=self._crew.kinds[report.worker],
        )
        self._announce(loss, len(attempts))
        for attempt in attempts:
            if not (stopping and cause == "hung"):  # the worker may only be slow to save
                self._lose(attempt, loss)

    def _lose_invalid(self, attempt: Attempt, error: Exception, index: int) -> None:
        """Give up on one run whose report is not valid."""
        detail = f"its result is not valid: {error}"
        loss = Loss(cause="error", detail=detail, log_tail="", worker=index, alone=True)
        self._announce(loss, 1)
        self._lose(attempt, loss)

    def _announce(self, loss: Loss, num_runs: int) -> None:
        """Queue the message about a loss: in full the first time, one line if it repeats."""
        failure = (loss.cause, loss.message)
        self._lost.append(loss.describe(num_runs, is_repeat=failure in self._announced))
        self._announced.add(failure)

    def _lose(self, attempt: Attempt, loss: Loss) -> None:
        """Record a loss, then queue the run again or give it up."""
        if attempt.run_id not in self._open:
            return  # a late result was recorded in the meantime
        step = saved_step(self._study_dir, attempt.run_id)
        self._losses.record(attempt.run_id, dataclasses.replace(loss, step=step))
        if self._update_retry_status(attempt).failed:
            self._give_up(attempt, loss)
        elif self._is_broken(attempt, loss):
            self._refuse(
                f"run {attempt.run_id[:12]} failed in the same way as an attempt before it"
            )
        else:
            self._backlog.put_back(attempt)

    def _is_broken(self, attempt: Attempt, loss: Loss) -> bool:
        """Return whether no run is likely to finish: none has, and the same failure occurred twice.

        A proxy that ran out of memory is retried with smaller microbatches first.
        """
        halves_microbatch = loss.cause == "out_of_memory" and attempt.spec.command is None
        return (
            not halves_microbatch and not self._has_finished() and self._losses.has_repeated(loss)
        )

    def _has_finished(self) -> bool:
        """Return whether a run of this study has finished; pruned and diverged runs count."""
        recorded = (result.status != "failed" for result in self._ledger.own_results())
        ended = (result.status != "failed" for _, result, _ in self._ended)
        self._finished = self._finished or any(recorded) or any(ended)
        return self._finished

    def _update_retry_status(self, attempt: Attempt) -> RetryStatus:
        """Derive how the next attempt runs from the losses so far, and return the retry status."""
        attempt.standing = standing = self._losses.standing(
            attempt.run_id, attempt.spec, self._max_attempts
        )
        suffixes = (
            f"/{number} {kind}".rstrip()
            for kind, number in sorted(standing.num_microbatches.items())
        )
        attempt.bank_key = self._bank_key_for(attempt.spec) + "".join(suffixes)
        return standing

    def _give_up(self, attempt: Attempt, last: Loss | None) -> None:
        """Record that a run failed, if the run itself may be to blame.

        Raises:
            RunsFail: no run has ended well yet.
        """
        self._commit()  # results of the same reports count
        reason = f"lost {counted(attempt.standing.num_in_a_row, 'time')}"
        reason += "" if last else ", under earlier drivers"
        if self._has_finished():
            reason += f", the last: {CAUSES[last.cause].words}: {last.reason}" if last else ""
            self._keep_outcome(attempt, failed_result(attempt.run_id, reason), NO_CURVE)
            self._commit()
            return
        self._refuse(f"run {attempt.run_id[:12]} was {reason}")

    def _refuse(self, problem: str) -> NoReturn:
        """Raise RunsFail before any run has finished, and stop counting the losses so far."""
        self._losses.pardon(problem)
        raise RunsFail(
            f"{problem}. No run of this study has finished yet, so it was not recorded as failed: "
            "fix the cause, then "
            "run the same command again" + "".join(f"\n{message}" for message in self._lost)
        )

    def _keep_outcome(self, attempt: Attempt, result: RunResult, curve: Curve) -> None:
        """Keep a run's outcome until it is recorded together with those of the other reports."""
        del self._open[result.id]
        self._ended.append((attempt, result, curve))

    def _commit(self) -> None:
        """Record all outcomes that are waiting; curves are written first, so that no result lacks
        one.

        No other function records outcomes.
        """
        ended, self._ended = self._ended, []
        if not ended:
            return
        store_curves(self._study_dir, [(result, curve) for _, result, curve in ended])
        runs = [Run(spec=attempt.spec, result=result) for attempt, result, _ in ended]
        self._ledger.commit_all(runs)
        for run in runs:
            drop_checkpoints(self._study_dir, run.result.id)
            self._trunks.drop(run.result.id)
        self._outcomes += runs
