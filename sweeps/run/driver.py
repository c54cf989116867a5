"""What one `drive` does step by step: who holds what, what waits, what is settled."""

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

# Runs in, outcomes out: fills banks, commits each run once, survives lost and hung workers, stops in order.
#
# Executions may repeat, outcomes may not: the first valid result of a run is recorded, any other is dropped. Curves are
# on disk before their results are recorded. A run that is lost is run again, from its last checkpoint, up to a limit
# that holds across drivers; its last attempt has a bank to itself, so that a run which brings its worker down cannot
# take its neighbours with it.

GRACE_SECONDS = 15.0
"""For workers to save once a stop was asked for. SLURM kills 30 s after its SIGTERM, and the pool must close too."""
HANG_SECONDS = 600.0
"""The longest that a worker may be silent, whatever it does."""


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
    refusal: Callable[[float, Callable[[], Sequence[float]]], str] = lambda flops, in_flight: "",
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run everything `source` gives, until it is done or `should_stop()`.

    Args:
        source: what to run; runs that have an outcome in the ledger are skipped, those that it may prune are looked at.
        pool: where; it stays open.
        ledger: where outcomes and losses go, open for writing.
        study_dir: where curves go, and where workers keep checkpoints.
        num_slots_for: K of a run's bank; part of the run's numerics.
        bank_key_for: what runs must share to share a bank (shape, parametrization, numerics ...).
        max_attempts: losses after which a run is recorded as failed; the others continue.
        noise: whether workers also measure the runs' gradient noise (`sweeps.store.curves.append_noise`).
        hang_seconds: a worker that is silent for so long is given up, mostly sooner: `sweeps.run.crew`.
        grace_seconds: for workers to save, once a stop was asked for.
        progress: called when a run has ended, was lost, or a worker has a note; otherwise once a second at most.
        kinds: of the workers' devices (`sweeps.run.kinds`), if known.
        should_stop: asked several times a second; if so, workers save what they hold, and nothing more begins.
        refusal: why a run of so many FLOPs may not start beside those in flight, whose FLOPs a call gives; then none
            does.
        clock: monotonic seconds.

    Raises:
        BudgetSpent: a run was refused, and those in flight then have ended.
        SourceStuck: the source waits for what is not running.
        RunsFail: none ended well and one failed for good, or twice in the same way; or one cannot be run. Not recorded.
        PoolDead, DiskFull, StaleDriver: as named; what was recorded is kept.
    """
    crew = Crew(pool, num_slots_for, AdaptiveTimeouts(hang_seconds), clock, noise=noise, kinds=kinds)
    driver = Driver(
        source, ledger, study_dir, crew, Backlog(num_slots_for), bank_key_for,
        max_attempts=max_attempts, should_stop=should_stop, refusal=refusal, clock=clock,
    )  # fmt: skip
    drop_stale_checkpoints(study_dir, driver.settled)
    while not should_stop():
        driver.pull()
        driver.hand_out()
        if not driver.has_work():
            return
        if event := driver.collect(POLL_SECONDS):
            progress(event)
    for event in driver.stop(grace_seconds):
        progress(event)


POLL_SECONDS = 0.5  # how soon a stop is noticed while workers are busy
LOOK_SECONDS = 1.0
"""Between two looks at where every run is."""
_KEPT = "Ended runs are recorded"
NUM_LOG_LINES = 8
"""Number of last lines of a log that are shown with a loss."""


class Driver:
    """The state of one `drive`: who holds what, what waits, what is settled."""

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
        refusal: Callable[[float, Callable[[], Sequence[float]]], str],
        clock: Callable[[], float],
    ) -> None:
        self._source, self._ledger, self._study_dir = source, ledger, study_dir
        self._crew, self._backlog, self._bank_key_for = crew, backlog, bank_key_for
        self._max_attempts = max_attempts
        self._losses = Losses(ledger)
        self.settled = ledger.results() if source.pruner is None else ledger.first_results()
        """Outcomes that need no further run. Whoever does not prune wants the whole of what another has pruned."""
        self._open: dict[str, Attempt] = {}  # by run id: queued or running, no outcome yet
        self._trunks = Trunks(study_dir)
        self._signal = SourceSignal.WAIT
        self._should_stop, self._refusal, self._clock = should_stop, refusal, clock
        self._running: tuple[RunningRun, ...] = ()
        self._looked_at = -math.inf
        self._refused = ""
        self._finished = False
        self._oom_kills = oom_kills()
        self._ended: list[tuple[Attempt, RunResult, Curve]] = []  # and not yet recorded
        self._outcomes: list[Run] = []
        self._lost: list[str] = []
        self._announced = set[tuple[str, str]]()

    def has_work(self) -> bool:
        """Whether any worker is busy.

        Raises:
            BudgetSpent: none is, and a run was refused.
            SourceStuck: none is, and the source still waits.
        """
        if self._crew.busy:
            return True
        if self._refused:
            raise BudgetSpent(self._refused)
        if self._signal is not SourceSignal.DONE:
            raise SourceStuck("the source waits for results, yet nothing is running or queued: a bug in the source")
        return False

    def pull(self) -> None:
        """Queue every run the source can name now. A list is short, and a search has P in flight at most."""
        while self._signal is not SourceSignal.DONE:
            answer = self._source.next(self.settled)
            if isinstance(answer, SourceSignal):
                self._signal = answer
                return
            run_id = answer.id
            if run_id not in self.settled and run_id not in self._open:
                self._open[run_id] = attempt = Attempt(spec=answer, run_id=run_id, bank_key="")
                self._trunks.add(attempt)
                attempt.rungs = () if self._source.pruner is None else self._source.pruner.rungs(run_id)
                if self._judge(attempt).failed:
                    self._give_up(attempt, None)
                else:
                    self._backlog.add(attempt)

    def hand_out(self) -> None:
        """Start a call on every idle worker that has, or can get, something to do; and have those that train go on."""
        for index, worker in self._crew.training():
            if not self._backlog.waits_for(worker.bank_key, worker.slots, self._ready):
                self._crew.go_on(index)
        none_ready = not len(self._backlog)
        for index, worker in self._crew.idle():
            if not worker.slots:
                if none_ready:
                    continue
                worker.bank_key = self._backlog.choose_key(worker.bank_key, self._ready)
            moved = self._backlog.fill(worker.bank_key, worker.slots, self._ready, self._may_start)
            if worker.slots:
                self._crew.start(index, moved, kept=self._trunks.kept)
            else:
                none_ready = True  # nor for any other empty bank

    def _ready(self, attempt: Attempt) -> bool:
        return self._trunks.may_start(attempt, self._crew.steps_done)

    def _may_start(self, attempt: Attempt) -> bool:
        # A user's command may be broken: until one run of it has ended, it runs alone.
        if attempt.spec.command is not None and self._crew.flops() and not self._has_finished():
            return False
        attempt.flops = self._trunks.flops(attempt)
        self._refused = self._refused or self._refusal(attempt.flops, self._crew.flops)
        return not self._refused

    def collect(self, timeout_seconds: float) -> DriverProgress | None:
        """Take in what arrives, give up on what hangs; None if there is nothing to tell."""
        reports = self._crew.wait(timeout_seconds)
        for report in reports:
            for finished in report.finished:
                self._settle(report.worker, finished)
            for paused in report.paused:
                self._look(report.worker, paused)
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
            outcomes=tuple(self._outcomes), lost=tuple(self._lost), notes=notes, running=self._running,
            num_queued=len(self._backlog),
        )  # fmt: skip
        self._outcomes, self._lost = [], []
        return event

    def stop(self, grace_seconds: float) -> Iterator[DriverProgress]:
        """Have every worker save what it holds, for so long at most; what arrives meanwhile is recorded."""
        until, asked = self._clock() + grace_seconds, set[int]()
        while (left_seconds := until - self._clock()) > 0:
            for index, worker in self._crew.idle():
                if worker.slots and index not in asked:
                    asked.add(index)
                    self._crew.start(index, {}, 0)
            if not self._crew.busy:
                return
            if event := self.collect(min(POLL_SECONDS, left_seconds)):
                yield event

    def _settle(self, index: int, finished: Finished) -> None:
        """Record a result if it is the first valid one of its run; a duplicate or a late one is dropped."""
        slots = self._crew.workers[index].slots
        held = slots.get(finished.slot)
        try:
            result, curve = decoded(finished)
            mine = held is not None and held.run_id == result.id and bool(held.rungs)
            if result.status == "pruned" or (result.status == "finished" and mine):
                raise canon.CanonError("it did not pause at the step where it was to be judged")
        except (canon.CanonError, SpecError) as error:
            if held is not None:
                del slots[finished.slot]
                self._lose_one(held, error, index)
            return
        if held is not None and held.run_id == result.id:
            del slots[finished.slot]
        attempt = self._open.get(result.id)
        if attempt is not None:
            self._backlog.discard(attempt)  # it may have been lost, queued again, and now come in late
            self._end(attempt, result, curve)

    def _look(self, index: int, paused: Finished) -> None:
        """Have a run that waits go on, or record it as pruned: then its slot is free, for the next call refills it."""
        slots = self._crew.workers[index].slots
        held = slots.get(paused.slot)
        if held is None or held.pause_step is None or self._source.pruner is None:
            return
        try:
            result, curve = decoded_pause(paused, held.run_id, held.pause_step)
        except (canon.CanonError, SpecError) as error:
            del slots[paused.slot]
            self._lose_one(held, error, index)
            return
        why = self._source.pruner.verdict(held.run_id, curve.train_loss_nats)
        held.rungs = held.rungs[1:]
        if why or held.run_id not in self._open:  # a late report may have settled it
            del slots[paused.slot]
        if why and held.run_id in self._open:
            self._end(held, dataclasses.replace(result, reason=why), curve)

    def _lose_worker(self, report: Report, error: str) -> None:
        """Give up on a worker: what it held is lost, and it starts afresh.

        Raises:
            RunsFail: no further attempt can help.
        """
        cause = report.cause
        if report.refused:
            raise RunsFail(f"{CAUSES[cause].words}: {error}. {_KEPT}; fix this, then run the same command to resume")
        stopping = self._should_stop()  # the signal may have ended both of us
        if cause == "lost_worker":
            killed_before, self._oom_kills = self._oom_kills, oom_kills()
            cause = "out_of_memory" if self._oom_kills > killed_before else "preempted" if stopping else cause
        held = self._crew.dismiss(report.worker, restart=not stopping)
        loss = Loss(
            cause=cause, detail=error, log_tail=report.log_tail, worker=report.worker, alone=len(held) == 1,
            kind=self._crew.kinds[report.worker],
        )  # fmt: skip
        self._announce(loss, len(held))
        for attempt in held:
            if not (stopping and cause == "hung"):  # it may just be slow to save
                self._lose(attempt, loss)

    def _lose_one(self, attempt: Attempt, error: Exception, index: int) -> None:
        """Give up on what a worker says of one run."""
        detail = f"its result is not valid: {error}"
        loss = Loss(cause="error", detail=detail, log_tail="", worker=index, alone=True)
        self._announce(loss, 1)
        self._lose(attempt, loss)

    def _announce(self, loss: Loss, num_runs: int) -> None:
        """Queue the words on a loss: in full the first time, in one line when the same failure comes again."""
        lead, failure = f"worker {loss.worker}: {CAUSES[loss.cause].words}", (loss.cause, loss.message)
        if failure in self._announced:
            self._lost.append(f"{lead}, as before: {loss.last_line}; it held {counted(num_runs, 'run')}")
            return
        self._announced.add(failure)
        line = f"{lead}: {loss.detail}; it held {counted(num_runs, 'run')}. What to do: {CAUSES[loss.cause].advice}"
        self._lost.append("\n  | ".join([line, *loss.log_tail.splitlines()[-NUM_LOG_LINES:]]))

    def _lose(self, attempt: Attempt, loss: Loss) -> None:
        """Record a loss, and queue the run again or give it up."""
        if attempt.run_id not in self._open:
            return  # settled meanwhile, by a late result
        step = saved_step(self._study_dir, attempt.run_id)
        self._losses.record(attempt.run_id, dataclasses.replace(loss, step=step))
        if self._judge(attempt).failed:
            self._give_up(attempt, loss)
        elif self._is_broken(attempt, loss):
            self._refuse(f"run {attempt.run_id[:12]} failed in the same way as an attempt before it")
        else:
            self._backlog.put_back(attempt)

    def _is_broken(self, attempt: Attempt, loss: Loss) -> bool:
        """Return whether no run is likely to finish: none has, and the same failure occurred twice.

        Our own runs that ran out of memory are tried with smaller microbatches first.
        """
        halves_microbatch = loss.cause == "out_of_memory" and attempt.spec.command is None
        return not halves_microbatch and not self._has_finished() and self._losses.has_repeated(loss)

    def _has_finished(self) -> bool:
        """Return whether a run of this study has finished; pruned and diverged runs count."""
        own = (result.status != "failed" for result in self._ledger.own_results())
        self._finished = self._finished or any(own) or any(r.status != "failed" for _, r, _ in self._ended)
        return self._finished

    def _judge(self, attempt: Attempt) -> RetryStatus:
        """Have the next attempt follow from the losses so far."""
        attempt.standing = standing = self._losses.standing(attempt.run_id, attempt.spec, self._max_attempts)
        parts = (f"/{number} {kind}".rstrip() for kind, number in sorted(standing.num_microbatches.items()))
        attempt.bank_key = self._bank_key_for(attempt.spec) + "".join(parts)
        return standing

    def _give_up(self, attempt: Attempt, last: Loss | None) -> None:
        """Record that a run failed, if it may be the run that is to blame.

        Raises:
            RunsFail: nothing has ended well yet.
        """
        self._commit()  # what came in beside it counts
        reason = f"lost {counted(attempt.standing.num_in_a_row, 'time')}"
        reason += "" if last else ", under earlier drivers"
        if self._has_finished():
            reason += f", the last: {CAUSES[last.cause].words}: {last.reason}" if last else ""
            self._end(attempt, failed_result(attempt.run_id, reason), NO_CURVE)
            self._commit()
            return
        self._refuse(f"run {attempt.run_id[:12]} was {reason}")

    def _refuse(self, problem: str) -> NoReturn:
        """Raise RunsFail before any run has finished, and stop counting the lost attempts so far."""
        self._losses.pardon(problem)
        raise RunsFail(
            f"{problem}. No run of this study has finished yet, so it was not recorded as failed: fix the cause, then "
            "run the same command again" + "".join(f"\n{each}" for each in self._lost)
        )

    def _end(self, attempt: Attempt, result: RunResult, curve: Curve) -> None:
        """A run has its outcome, which is recorded with those of the other reports."""
        del self._open[result.id]
        self._ended.append((attempt, result, curve))

    def _commit(self) -> None:
        """The one place where outcomes are recorded: curves first, so that no result lacks one."""
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
