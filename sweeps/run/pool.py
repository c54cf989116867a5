"""The interface between the driver and a pool of workers: calls, reports, hosts, probes, and the
inline pool.

A worker hosts a bank: K runs that it trains as one batched model, each in one slot. A call may be
lost with its worker, so a run may be executed more than once. The driver and the ledger ensure that
every run gets one outcome.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.failures import Cause, classify, describe_error, get_log_tail
from forerun._proxies.core.notation import format_counted, format_duration
from forerun._proxies.core.spec import Curve, EndedRun, RunResult

# ---- Calls and reports ----


def validate_finished(finished: EndedRun) -> EndedRun:
    """Check a run that a worker has ended, and return it decoded anew.

    A record is not checked when it arrives from another process, which may have another version.

    Raises:
        CanonError, SpecError: the data is not a result with its curve.
    """
    result = canon.decode(RunResult, canon.to_json(finished.result))
    curve = canon.decode(Curve, canon.to_json(finished.curve))
    if canon.compute_content_id(curve) != result.curve_id:
        raise canon.CanonError(
            f"the curve does not match the id in the result, {result.curve_id[:12]}"
        )
    return EndedRun(finished.slot, result, curve)


def validate_paused(paused: EndedRun, run_id: str, num_steps: int) -> EndedRun:
    """Check a run that a worker has paused, and return it decoded anew.

    Raises:
        CanonError, SpecError: the data is not the state of that run after `num_steps` steps.
    """
    paused = validate_finished(paused)
    result = paused.result
    state = (result.id, result.status, result.num_steps, paused.curve.steps)
    if state != (run_id, "pruned", num_steps, tuple(range(1, num_steps + 1))):
        raise canon.CanonError(
            f"it is not a record of this run after {format_counted(num_steps, 'step')}"
        )
    return paused


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCall:
    """One call to a worker's host."""

    bank_key: str
    """Key that all runs of a bank share; the host frees every slot when it changes."""
    num_slots: int
    admit: tuple[tuple[int, dict[str, Json]], ...]
    """(slot, `RunSpec` as JSON data) of each run to start in a free slot, from the run's checkpoint
    if there is a valid one.
    """
    seconds: float
    """Time limit for starting new steps, in seconds, unless a run ends or pauses sooner; 0: no
    steps, the host only saves if `save` is set.
    """
    num_microbatches: int = 1
    """Minimum number of passes that a batch is split into, one value per bank. More passes take
    less memory and give the same result up to rounding.
    """
    save: bool = False
    """Whether to write the state of every slot that is still occupied before answering."""
    hold: dict[int, int | None] = field(default_factory=dict)
    """Every slot that is occupied from now on, with the optimizer step at which its run pauses for
    a pruning decision; None: the run goes to its end.

    Runs in other slots are given up, and so are earlier runs in slots that `admit` fills.
    """
    trunks: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Slot -> (step, trunk id): the slot's state at that step is saved under the trunk's id, so
    that other runs can continue from it.
    """
    probe: dict[str, Json] | None = None
    """A measurement to make instead of training; every slot is given up. The host and the caller
    define its content.
    """
    noise: bool = False
    """Whether to measure the runs' gradient noise too, into a file next to each curve
    (`forerun._sweeps.store.curves`).
    """
    is_rerun: bool = False
    """Whether the runs already have their outcome and are executed again: they start at step 0,
    ignore checkpoints, and write none.
    """
    is_ahead: bool = False
    """Whether the call was sent while the one before it was still running; only `seconds` counts.

    The host continues training as in the call before. It does nothing if that call failed, or if
    runs ended or paused in it, because the driver then sends a call that says what follows.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The result of one `HostCall`: the host's answer, or the reason why there is none."""

    worker: int = 0
    """Number of the worker, which the pool sets."""
    finished: tuple[EndedRun, ...] = ()
    steps: dict[int, int] = field(default_factory=dict)
    """Slot -> optimizer steps done, for slots that are still occupied."""
    paused: tuple[EndedRun, ...] = ()
    """Runs that are paused at a rung, each with its outcome if it is pruned there."""
    notes: tuple[str, ...] = ()
    """Messages for the user: a checkpoint was resumed from, or set aside."""
    answer: dict[str, Json] | None = None
    """Answer to a probe."""
    skipped: bool = False
    """Whether the call was sent ahead and did nothing, because the report of the call before it
    needs a reply. That report may arrive later than this one.
    """
    error: str | None = None
    """Reason why the call failed; the worker has lost every slot and must be restarted."""
    cause: Cause = "error"
    """Kind of `error`, if there is one."""
    log_tail: str = ""
    """Last lines of what the worker printed before an `error`, cut by
    `forerun._proxies.core.failures.get_log_tail`.
    """
    ends_study: bool = False
    """Whether no further attempt can help: the exception has the attribute `refuses_study`."""

    @property
    def needs_reply(self) -> bool:
        """Whether slots became free or runs paused, so that the driver must say what follows."""
        return bool(self.finished or self.paused or self.skipped)


class Host(Protocol):
    """A host of one bank on one device, in a worker. A run's result depends on its spec alone,
    never on the other runs of its bank.

    A host saves the state of its slots from time to time by itself; a run that is admitted again
    continues from its saved state.
    """

    def advance(self, call: HostCall) -> Report:
        """Admit runs, train every occupied slot for the given time, and hand over the runs that
        ended.

        Returns sooner if runs have ended, so that their slots can be refilled, or have paused.
        """
        ...


HostFactory = Callable[[], Host]
"""Function that makes a worker's host, in the worker. Picklable: a top-level callable, or a
dataclass with `__call__`.
"""


def execute_call(worker: int, call: HostCall, host: Callable[[], Host]) -> Report:
    """Make one call in the worker's own process; an exception becomes a report with its cause.

    Args:
        worker: number of the worker, for the report.
        call: the call.
        host: returns the worker's host; making it may fail too.
    """
    try:
        return dataclasses.replace(host().advance(call), worker=worker)
    except Exception as error:  # an error of user code must not end the driver
        return Report(
            worker=worker,
            error=describe_error(error),
            cause=classify(error),
            log_tail=get_log_tail(str(getattr(error, "log_tail", ""))),
            ends_study=bool(getattr(error, "refuses_study", False)),
        )


class Pool(Protocol):
    """Workers 0 ... `num_workers` - 1, each with one call in progress and `calls_ahead` more that
    wait, in order.
    """

    num_workers: int
    calls_ahead: int

    def start(self, worker: int, call: HostCall) -> None:
        """Start a call, or queue it behind the worker's earlier call; if that one fails, the queued
        call is dropped.
        """
        ...

    def wait(self, timeout_seconds: float) -> list[Report]:
        """Return the reports that have arrived; wait for the first at most `timeout_seconds`.
        Raises PoolDead.
        """
        ...

    def restart(self, worker: int) -> None:
        """Give the worker a new, empty host, and kill the old host's process.

        Its call in flight is given up and reports nothing. Raises PoolDead.
        """
        ...

    def close(self) -> None:
        """Stop every worker; calls in flight are lost."""
        ...


# ---- Probes ----

_POLL_SECONDS = 0.5


def send_probe(pool: Pool, worker: int, probe: dict[str, Json]) -> None:
    """Send a probe to an idle worker."""
    pool.start(worker, HostCall(bank_key="", num_slots=1, admit=(), seconds=0, probe=probe))


def take_answers(pool: Pool, asked_at: dict[int, float], seconds: float) -> list[Report]:
    """Return the answers to probes that arrive within `_POLL_SECONDS`.

    A worker whose probe failed, or that has been silent for `seconds`, is restarted.

    Args:
        pool: the pool.
        asked_at: worker -> monotonic seconds at which it was asked; workers with a report are
            removed.
        seconds: maximum time in seconds for an answer.
    """
    reports = pool.wait(_POLL_SECONDS)
    reporting, now = {report.worker for report in reports}, time.monotonic()
    silent = [
        worker for worker, at in asked_at.items() if worker not in reporting and now - at > seconds
    ]
    reports += [
        Report(worker=worker, error=f"no answer in {format_duration(seconds)}", cause="hung")
        for worker in silent
    ]
    for report in reports:
        del asked_at[report.worker]
        if report.answer is None:
            pool.restart(report.worker)
    return reports


def probe_all_workers(
    pool: Pool, probe: dict[str, Json], seconds: float, check: Callable[[], None]
) -> list[Report]:
    """Send a probe to every worker of an idle pool, and return the answers; see `take_answers`.

    Args:
        pool: the pool, idle.
        probe: the probe.
        seconds: maximum time in seconds for an answer.
        check: called several times a second; raises to end the wait.
    """
    for worker in range(pool.num_workers):
        send_probe(pool, worker, probe)
    asked_at, reports = dict.fromkeys(range(pool.num_workers), time.monotonic()), list[Report]()
    while asked_at:
        reports += take_answers(pool, asked_at, seconds)
        check()
    return reports


# ---- Inline pool ----


class InlinePool:
    """A pool of one worker in this process, for tests, debugging and machines without Ray.

    It cannot interrupt a call: `wait` takes as long as the call, and the worker is idle between two
    calls.
    """

    num_workers = 1
    calls_ahead = 0

    def __init__(self, host_factory: HostFactory) -> None:
        """Store `host_factory`, which is called by the first call."""
        self._host = functools.cache(host_factory)
        self._call: HostCall | None = None

    def start(self, worker: int, call: HostCall) -> None:
        """See `Pool`."""
        self._call = call

    def wait(self, timeout_seconds: float) -> list[Report]:
        """Make the call, unless the timeout is 0: then no report has arrived yet."""
        if self._call is None or timeout_seconds <= 0:
            return []
        call, self._call = self._call, None
        return [execute_call(0, call, self._host)]

    def restart(self, worker: int) -> None:
        """See `Pool`."""
        self.close()

    def close(self) -> None:
        """See `Pool`."""
        self._host.cache_clear()
        self._call = None
