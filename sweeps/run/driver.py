"""The driver: run everything that a source names, and record one outcome for each run.

The driver fills banks (each trains K runs as one batched model) on the pool's workers, records each
outcome once, survives workers that are lost or hang, and lets workers save before it stops.

An attempt is one execution of a run. It fails if it ends without a valid result, because the worker
died, hung, or reported an error (`forerun._sweeps.run.retries`). Then the run is executed again
from its last checkpoint, up to a limit that holds across drivers. The last attempt has a bank to
itself, so that a run that crashes its worker cannot take other runs with it.

A run may be executed more than once, but it has one outcome: the first valid result is recorded,
and any later one is dropped. Curves are on disk before their results are recorded.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from forerun._proxies.core import canon
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.failures import CAUSES, count_oom_kills
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.spec import Curve, EndedRun, Run, RunResult, RunSpec
from forerun._sweeps.run.backlog import Backlog, OpenRun
from forerun._sweeps.run.pool import Pool, Report, validate_finished, validate_paused
from forerun._sweeps.run.retries import EMPTY_CURVE, FailedAttempt, FailureLog, make_failed_result
from forerun._sweeps.run.trunks import TrunkRuns
from forerun._sweeps.run.worker_states import AdaptiveTimeouts, WorkerStates
from forerun._sweeps.search.source import RunSource, SourceSignal
from forerun._sweeps.store.checkpoints import (
    drop_checkpoints,
    drop_stale_checkpoints,
    find_saved_step,
)
from forerun._sweeps.store.curves import store_curves
from forerun._sweeps.store.errors import BudgetSpent, RunsFail, SourceStuck
from forerun._sweeps.store.ledger import Ledger
from forerun._sweeps.store.live_state import DriverProgress, RunningRun

GRACE_SECONDS = 15.0
"""Seconds that workers have to save after a stop was requested.

SLURM kills a job 30 s after its SIGTERM, and closing the pool must fit into that time too."""
MAX_SILENCE_SECONDS = 600.0
"""Maximum time in seconds that a worker may be silent, whatever it is doing."""

FindReachedCap = Callable[[float, Callable[[], Sequence[float]]], str]
"""Function that returns a message about the cap that keeps a run from starting, or an empty string.

Its arguments are the FLOPs of the run and a function that returns the FLOPs of each run in flight.
"""


def drive(
    source: RunSource,
    pool: Pool,
    ledger: Ledger,
    study_dir: Path,
    *,
    bank_key_for: Callable[[RunSpec], str],
    max_attempts: int = 3,
    noise: bool = False,
    kinds: Sequence[str] = (),
    hang_seconds: float = MAX_SILENCE_SECONDS,
    grace_seconds: float = GRACE_SECONDS,
    progress: Callable[[DriverProgress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    find_reached_cap: FindReachedCap = lambda flops, in_flight: "",
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run everything that `source` names, until the source is done or `should_stop()` is true.

    Args:
        source: names the runs; runs with an outcome are skipped, prunable runs pause at its rungs.
        pool: the workers; stays open.
        ledger: records outcomes and failed attempts; open for writing.
        study_dir: folder of the curves and of the workers' checkpoints.
        bank_key_for: returns what runs of one bank share (shape, parametrization, numerics ...).
        max_attempts: number of failed attempts after which a run is recorded as failed; the other
            runs continue.
        noise: whether workers measure gradient noise too.
        kinds: kind of each worker's device, if known.
        hang_seconds: maximum silence of a worker; `worker_states` usually allows less.
        grace_seconds: seconds that workers have to save after a stop was requested.
        progress: called when a run ends, when an attempt fails, and on notes; else at most once a
            second.
        should_stop: asked several times a second; once true, workers save and no run starts.
        find_reached_cap: asked before each start; once it returns a message, no run starts.
        clock: returns monotonic seconds.

    Raises:
        BudgetSpent: a cap kept a run from starting, and the runs in flight at that time have ended.
        SourceStuck: the source waits for a run that is not running.
        RunsFail: nothing has ended well, and further attempts cannot help (`Driver`).
        PoolDead, DiskFull, StaleDriver: recorded outcomes are kept.
    """
    driver = Driver(
        source,
        ledger,
        study_dir,
        WorkerStates(pool, AdaptiveTimeouts(hang_seconds), clock, noise=noise, kinds=kinds),
        bank_key_for,
        max_attempts=max_attempts,
        should_stop=should_stop,
        find_reached_cap=find_reached_cap,
        clock=clock,
    )
    driver.run(progress, grace_seconds)


POLL_SECONDS = 0.5
"""Maximum time in seconds before a stop is noticed while workers are busy."""
PROGRESS_SECONDS = 1.0
"""Minimum time in seconds between two progress events that only report where each run is."""


class Driver:
    """State of one `drive`: which worker holds which run, which runs wait, and which have an
    outcome.

    RunsFail is raised before any run has ended well, if one run exhausted its retries or the same
    failure occurred twice, and whenever a worker says that a run cannot be executed. No outcome is
    recorded for that run.
    """

    def __init__(
        self,
        source: RunSource,
        ledger: Ledger,
        study_dir: Path,
        worker_states: WorkerStates,
        bank_key_for: Callable[[RunSpec], str],
        *,
        max_attempts: int,
        should_stop: Callable[[], bool],
        find_reached_cap: FindReachedCap,
        clock: Callable[[], float],
    ) -> None:
        self._source, self._ledger, self._study_dir = source, ledger, study_dir
        self._states, self._bank_key_for = worker_states, bank_key_for
        self._backlog = Backlog()
        self._max_attempts = max_attempts
        self._failures = FailureLog(ledger)
        self.settled = ledger.get_results() if source.pruner is None else ledger.get_first_results()
        """Outcomes, by run id, of runs that need no further execution.

        A source without a pruner continues the runs that another source has pruned, so they do not
        count as settled for it.
        """
        self._open: dict[str, OpenRun] = {}  # queued or running, by run id
        self._trunks = TrunkRuns(study_dir)
        self._signal = SourceSignal.WAIT
        self._should_stop, self._clock = should_stop, clock
        self._find_reached_cap = find_reached_cap
        self._reached_cap = ""  # message about the first cap that kept a run from starting
        self._running: tuple[RunningRun, ...] = ()
        self._listed_at = -math.inf
        self._finished = False  # whether a run of this study has finished, once that is known
        self._oom_kills = count_oom_kills()
        self._ended: list[tuple[Run, Curve]] = []  # not recorded yet
        self._outcomes: list[Run] = []  # recorded since the last progress event
        self._failure_messages: list[str] = []  # since the last progress event
        self._announced = set[tuple[str, str]]()  # failures whose log was shown

    def run(self, progress: Callable[[DriverProgress], None], grace_seconds: float) -> None:
        """Run everything; the arguments and errors are those of `drive`."""
        drop_stale_checkpoints(self._study_dir, self.settled)
        while not self._should_stop():
            self.queue_runs()
            self.start_calls()
            if not self._states.is_busy:
                self._check_done()
                return
            if event := self.process_reports(POLL_SECONDS):
                progress(event)
        for event in self.stop_workers(grace_seconds):
            progress(event)

    def _check_done(self) -> None:
        """Check, when no worker is busy, that everything is done.

        Raises:
            BudgetSpent: a cap kept a run from starting.
            SourceStuck: the source still waits for results.
        """
        if self._reached_cap:
            raise BudgetSpent(self._reached_cap)
        if self._signal is not SourceSignal.DONE:
            raise SourceStuck(
                "the source waits for results, but no run is running or queued. This is a bug in "
                "the source"
            )

    def queue_runs(self) -> None:
        """Queue every run that the source can name now.

        A list names all its runs at once; a search waits for results of the trials in flight.
        """
        while self._signal is not SourceSignal.DONE:
            answer = self._source.next(self.settled)
            if isinstance(answer, SourceSignal):
                self._signal = answer
                return
            run_id = answer.id
            if run_id not in self.settled and run_id not in self._open:
                self._open[run_id] = open_run = OpenRun(spec=answer, run_id=run_id, bank_key="")
                self._trunks.add(open_run)
                open_run.rungs = (
                    () if self._source.pruner is None else self._source.pruner.list_rungs(run_id)
                )
                self._plan_attempt(open_run)
                if open_run.retry_plan.has_failed:
                    self._give_up(open_run, None)
                else:
                    self._backlog.add(open_run)

    def start_calls(self) -> None:
        """Start a call on every idle worker that has runs or can get some, and let training workers
        go on.
        """
        # Let a training worker continue past its call unless queued runs wait for its free slots
        for index, worker in self._states.take_training():
            if not self._backlog.has_waiting(worker.bank_key, worker.slots, self._is_ready):
                self._states.queue_continuation(index)
        # Fill the banks of idle workers from the backlog
        none_ready = not len(self._backlog)
        for index, worker in self._states.list_idle():
            if not worker.slots:
                if none_ready:
                    continue
                worker.bank_key = self._backlog.choose_key(worker.bank_key, self._is_ready)
            moved = self._backlog.fill(
                worker.bank_key, worker.slots, self._is_ready, self._can_start
            )
            if worker.slots:
                self._states.start(index, moved, plan_saved_state=self._trunks.plan_saved_state)
            else:
                none_ready = True  # no other empty bank can be filled either

    def _is_ready(self, open_run: OpenRun) -> bool:
        """Return whether a run need not wait for a shorter run of its trunk."""
        return self._trunks.may_start(open_run, self._states.get_steps)

    def _can_start(self, open_run: OpenRun) -> bool:
        """Return whether a run may start; store its FLOPs, and the message about a reached cap."""
        # A user's command may be broken: it runs alone until one run has finished
        if (
            open_run.spec.command is not None
            and self._states.list_flops()
            and not self._has_finished()
        ):
            return False
        open_run.flops = self._trunks.count_flops(open_run)
        self._reached_cap = self._reached_cap or self._find_reached_cap(
            open_run.flops, self._states.list_flops
        )
        return not self._reached_cap

    def process_reports(self, timeout_seconds: float) -> DriverProgress | None:
        """Process the reports that arrive, and give up on workers that hang.

        Returns:
            A progress event, or None if there is no news.
        """
        reports = self._states.wait(timeout_seconds)
        for report in reports:
            for finished in report.finished:
                self._handle_finished(report.worker, finished)
            for paused in report.paused:
                self._handle_paused(report.worker, paused)
        self._commit()
        for report in reports:
            if report.error is not None:
                self._handle_worker_error(report, report.error)
        notes = tuple(note for report in reports for note in report.notes)
        if is_due := bool(reports) and self._clock() - self._listed_at >= PROGRESS_SECONDS:
            self._running, self._listed_at = self._states.list_running_runs(), self._clock()
        if not (is_due or notes or self._outcomes or self._failure_messages):
            return None
        event = DriverProgress(
            outcomes=tuple(self._outcomes),
            failures=tuple(self._failure_messages),
            notes=notes,
            running=self._running,
            num_queued=len(self._backlog),
        )
        self._outcomes, self._failure_messages = [], []
        return event

    def stop_workers(self, grace_seconds: float) -> Iterator[DriverProgress]:
        """Have every worker save its runs, and record the outcomes that arrive in the meantime.

        Args:
            grace_seconds: maximum time in seconds.

        Yields:
            Progress events.
        """
        deadline = self._clock() + grace_seconds
        workers_asked = set[int]()
        while (left_seconds := deadline - self._clock()) > 0:
            for index, worker in self._states.list_idle():
                if worker.slots and index not in workers_asked:
                    workers_asked.add(index)
                    self._states.start(index, {}, 0)
            if not self._states.is_busy:
                return
            if event := self.process_reports(min(POLL_SECONDS, left_seconds)):
                yield event

    def _handle_finished(self, index: int, finished: EndedRun) -> None:
        """Record a result if it is the first valid one of its run; drop a duplicate or late one."""
        slots = self._states.workers[index].slots
        holder = slots.get(finished.slot)
        try:
            _, result, curve = validate_finished(finished)
            expects_pause = holder is not None and holder.run_id == result.id and bool(holder.rungs)
            if result.status == "pruned" or (result.status == "finished" and expects_pause):
                raise canon.CanonError("it did not pause at the step of the pruning decision")
        except (canon.CanonError, SpecError) as error:
            if holder is not None:
                del slots[finished.slot]
                self._fail_invalid(holder, error, index)
            return
        if holder is not None and holder.run_id == result.id:
            del slots[finished.slot]
        open_run = self._open.get(result.id)
        if open_run is not None:
            # A late result: its attempt may count as failed, and the run may be queued again
            self._backlog.discard(open_run)
            self._keep_outcome(open_run, result, curve)

    def _handle_paused(self, index: int, paused: EndedRun) -> None:
        """Decide whether a paused run goes on or is recorded as pruned, which frees its slot."""
        slots = self._states.workers[index].slots
        open_run = slots.get(paused.slot)
        if open_run is None or open_run.pause_step is None or self._source.pruner is None:
            return
        pause_step = open_run.pause_step
        try:
            _, result, curve = validate_paused(paused, open_run.run_id, pause_step)
        except (canon.CanonError, SpecError) as error:
            del slots[paused.slot]
            self._fail_invalid(open_run, error, index)
            return
        reason = self._source.pruner.judge_run(open_run.run_id, curve.train_loss_nats)
        open_run.rungs = open_run.rungs[1:]
        # A late report may have recorded an outcome in the meantime
        if reason or open_run.run_id not in self._open:
            del slots[paused.slot]
        if reason and open_run.run_id in self._open:
            self._keep_outcome(open_run, dataclasses.replace(result, reason=reason), curve)

    def _handle_worker_error(self, report: Report, error: str) -> None:
        """Give up on a worker: the attempts of its runs have failed, and it is restarted.

        Raises:
            RunsFail: no further attempt can help.
        """
        cause = report.cause
        if report.ends_study:
            raise RunsFail(
                f"{CAUSES[cause].words}: {error}. Ended runs are recorded; fix this, then run the "
                "same command to resume"
            )
        stopping = self._should_stop()  # the same signal may have ended the worker
        if cause == "lost_worker":
            killed_before, self._oom_kills = self._oom_kills, count_oom_kills()
            if self._oom_kills > killed_before:
                cause = "out_of_memory"
            elif stopping:
                cause = "preempted"
        open_runs = self._states.dismiss(report.worker, restart=not stopping)
        failure = FailedAttempt(
            cause=cause,
            detail=error,
            log_tail=report.log_tail,
            worker=report.worker,
            alone=len(open_runs) == 1,
            kind=self._states.kinds[report.worker],
        )
        self._announce(failure, len(open_runs))
        for open_run in open_runs:
            if not (stopping and cause == "hung"):  # the worker may only be slow to save
                self._fail_attempt(open_run, failure)

    def _fail_invalid(self, open_run: OpenRun, error: Exception, index: int) -> None:
        """Fail the attempt of a run whose report is not valid."""
        detail = f"its result is not valid: {error}"
        failure = FailedAttempt(cause="error", detail=detail, log_tail="", worker=index, alone=True)
        self._announce(failure, 1)
        self._fail_attempt(open_run, failure)

    def _announce(self, failure: FailedAttempt, num_runs: int) -> None:
        """Queue the message about a failure: in full the first time, one line if it repeats."""
        key = (failure.cause, failure.message)
        self._failure_messages.append(failure.describe(num_runs, is_repeat=key in self._announced))
        self._announced.add(key)

    def _fail_attempt(self, open_run: OpenRun, failure: FailedAttempt) -> None:
        """Record a failed attempt, then queue the run again or give it up."""
        if open_run.run_id not in self._open:
            return  # a late result was recorded in the meantime
        step = find_saved_step(self._study_dir, open_run.run_id)
        self._failures.append(open_run.run_id, dataclasses.replace(failure, step=step))
        self._plan_attempt(open_run)
        if open_run.retry_plan.has_failed:
            self._give_up(open_run, failure)
        elif self._is_hopeless(open_run, failure):
            self._end_study(
                f"run {open_run.run_id[:12]} failed in the same way as an attempt before it"
            )
        else:
            self._backlog.put_back(open_run)

    def _is_hopeless(self, open_run: OpenRun, failure: FailedAttempt) -> bool:
        """Return whether no run is likely to finish: none has, and the same failure occurred twice.

        A proxy that ran out of memory is retried with smaller microbatches first.
        """
        halves_microbatch = failure.cause == "out_of_memory" and open_run.spec.command is None
        return (
            not halves_microbatch
            and not self._has_finished()
            and self._failures.has_repeated(failure)
        )

    def _has_finished(self) -> bool:
        """Return whether a run of this study has finished; pruned and diverged runs count."""
        recorded = (result.status != "failed" for result in self._ledger.get_own_results())
        ended = (run.result.status != "failed" for run, _ in self._ended)
        self._finished = self._finished or any(recorded) or any(ended)
        return self._finished

    def _plan_attempt(self, open_run: OpenRun) -> None:
        """Set the retry plan of a run from its failures so far, and the bank key that follows."""
        plan = self._failures.plan_retry(open_run.run_id, open_run.spec, self._max_attempts)
        suffixes = (
            f"/{number} {kind}".rstrip() for kind, number in sorted(plan.num_microbatches.items())
        )
        open_run.retry_plan = plan
        open_run.bank_key = self._bank_key_for(open_run.spec) + "".join(suffixes)

    def _give_up(self, open_run: OpenRun, last: FailedAttempt | None) -> None:
        """Record that a run failed, if the run itself may be to blame.

        Args:
            open_run: the run.
            last: its last failure; None if it failed under earlier drivers.

        Raises:
            RunsFail: no run has ended well yet.
        """
        self._commit()  # results of the same reports count
        reason = f"lost {format_counted(open_run.retry_plan.num_failures_in_a_row, 'time')}"
        reason += "" if last else ", under earlier drivers"
        if not self._has_finished():
            self._end_study(f"run {open_run.run_id[:12]} was {reason}")
        reason += f", the last: {CAUSES[last.cause].words}: {last.reason}" if last else ""
        self._keep_outcome(open_run, make_failed_result(open_run.run_id, reason), EMPTY_CURVE)
        self._commit()

    def _end_study(self, problem: str) -> NoReturn:
        """Make the failures so far stop counting, and raise RunsFail.

        No run has finished yet, so the user is asked to fix the cause.
        """
        self._failures.pardon_all(problem)
        raise RunsFail(
            f"{problem}. No run of this study has finished yet, so it was not recorded as failed: "
            "fix the cause, then run the same command again"
            + "".join(f"\n{message}" for message in self._failure_messages)
        )

    def _keep_outcome(self, open_run: OpenRun, result: RunResult, curve: Curve) -> None:
        """Keep a run's outcome until it is recorded together with the other reports' outcomes."""
        del self._open[result.id]
        self._ended.append((Run(spec=open_run.spec, result=result), curve))

    def _commit(self) -> None:
        """Record all waiting outcomes, curves first, so that no result lacks one.

        No other function records outcomes.
        """
        ended, self._ended = self._ended, []
        if not ended:
            return
        store_curves(self._study_dir, [(run.result, curve) for run, curve in ended])
        runs = [run for run, _ in ended]
        self._ledger.commit_all(runs)
        for run in runs:
            drop_checkpoints(self._study_dir, run.result.id)
            self._trunks.drop(run.result.id)
        self._outcomes += runs
