"""What drives runs: workers that host banks of slots. The driver knows pools only through this
file.

A pool is at-least-once: a call may be lost with its worker, and a run executed again. That every
run gets one outcome is the driver's and the ledger's business.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.failures import Cause, classify, described, log_tail
from proxies.core.notation import counted, format_duration
from proxies.core.spec import Curve, RunResult

# How many cores this process may keep busy: in a container fewer than there are. Standard library
# only.

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def num_cores(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Cores of this process's affinity, or as many as the quotas of its control groups (v2) come
    to, rounded up.

    `cgroups`: where control groups are mounted; `own`: the file that names this process's.
    """
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min([allowed, *(math.ceil(quota) for quota in _quotas(cgroups, own))]))


def _quotas(cgroups: Path, own: Path) -> Iterator[float]:
    """Yield the quotas, in cores, of this process's group and of all above it, as far as they can
    be seen here.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            inner = cgroups / path.lstrip("/")
            for group in () if controllers else (inner, *inner.parents):
                if group.is_relative_to(cgroups):
                    yield from _quota(group)


def _quota(group: Path) -> Iterator[float]:
    with contextlib.suppress(OSError, ValueError):  # "max 100000" is no number
        quota, period = (group / "cpu.max").read_text().split()
        yield float(quota) / float(period)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A run that ended in a slot, which is free again; or what came of one so far, that waits to be
    looked at.
    """

    slot: int
    result: dict[str, Json]
    """A `RunResult` as JSON data."""
    curve: dict[str, Json]
    """Its `Curve` as JSON data."""


def decoded(finished: Finished) -> tuple[RunResult, Curve]:
    """What a worker sent, as records.

    Raises:
        CanonError, SpecError: it is no such record.
    """
    result = canon.decode(RunResult, finished.result)
    curve = canon.decode(Curve, finished.curve)
    if canon.content_id(curve) != result.curve_id:
        raise canon.CanonError(
            f"the curve does not match the id in the result, {result.curve_id[:12]}"
        )
    return result, curve


def decoded_pause(paused: Finished, run_id: str, num_steps: int) -> tuple[RunResult, Curve]:
    """What a worker sent of a run that waits, as records.

    Raises:
        CanonError, SpecError: it is not what came of that run in so many steps.
    """
    result, curve = decoded(paused)
    found = (result.id, result.status, result.num_steps, curve.steps)
    if found != (run_id, "pruned", num_steps, tuple(range(1, num_steps + 1))):
        raise canon.CanonError(f"it is not a record of this run after {counted(num_steps, 'step')}")
    return result, curve


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCall:
    """One call to a worker's host."""

    bank_key: str
    """What all runs of a bank share; the host drops every slot when it changes."""
    num_slots: int
    admit: tuple[tuple[int, dict[str, Json]], ...]
    """(slot, `RunSpec` as JSON data) to begin, from the run's checkpoint if it has a good one; the
    slots are free."""
    seconds: float
    """For which steps are begun, unless a run ends or waits sooner; 0: none, only what `save` asks
    for."""
    num_microbatches: int = 1
    """Passes a batch is split into, at least: more take less memory and give the same up to
    rounding. One per bank."""
    save: bool = False
    """Write the state of every slot that is still occupied before answering."""
    hold: dict[int, int | None] = field(default_factory=dict)
    """Every slot that is occupied from now on, with the optimizer step at which its run is to be
    looked at before it goes on; None: it goes to its end. What another slot holds, or one that
    `admit` fills held before, is given up.
    """
    trunks: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Slots whose state at a step is written down under a trunk's id: other runs go on from it."""
    probe: dict[str, Json] | None = None
    """Something to measure in place of all that: every slot is given up. What it is, host and asker
    know."""
    noise: bool = False
    """Also measure the runs' gradient noise, into a file beside each curve
    (`sweeps.store.curves`)."""
    again: bool = False
    """The runs have their outcome: they begin at step 0 whatever checkpoints there are, and write
    none."""
    ahead: bool = False
    """Sent while the call before it is under way: nothing in it but `seconds` counts. Train on as
    that call did; or do nothing, if that call failed or its answer has runs that ended or wait, for
    then a call that says what follows is on its way.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class HostAnswer:
    """A host's answer to one call."""

    finished: tuple[Finished, ...] = ()
    steps: dict[int, int] = field(default_factory=dict)
    """Slot -> optimizer steps done, of the slots still occupied."""
    paused: tuple[Finished, ...] = ()
    """Runs that wait to be looked at: each with its outcome if it were pruned there."""
    notes: tuple[str, ...] = ()
    """What the user should hear: a checkpoint resumed from, or put aside."""
    answer: dict[str, Json] | None = None
    """To a probe."""
    skipped: bool = False
    """It was sent ahead, and nothing was done: the answer before it, which may arrive after it,
    needs a reply."""

    @property
    def needs_reply(self) -> bool:
        """Whether slots became free or runs wait: what follows is for the driver to say."""
        return bool(self.finished or self.paused or self.skipped)


class Host(Protocol):
    """A bank on one device. A run's result depends on its spec alone, never on its neighbours.

    It saves the state of its slots now and then by itself, and a run that is admitted again goes on
    from there.
    """

    def advance(self, call: HostCall) -> HostAnswer:
        """Admit runs, train every occupied slot for so many seconds, hand over those that ended.

        Returns sooner when some have ended, for their slots are then refilled, or are where they
        are to be looked at.
        """
        ...


HostFactory = Callable[[], Host]
"""Makes a worker's host, in the worker. Picklable: a top-level callable, or a dataclass with
`__call__`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report(HostAnswer):
    """What came of one `HostCall`: the host's answer, or why there is none."""

    worker: int
    error: str | None = None
    """Why the call failed; the worker has lost every slot and must be restarted."""
    cause: Cause = "error"
    """The kind of `error`, where there is one."""
    log_tail: str = ""
    """The last lines of what the worker printed before an `error`, as
    `proxies.core.failures.log_tail` cuts them."""
    refused: bool = False
    """The error says of itself, by `refuses_study = True`, that no further attempt can help."""


def carry_out(worker: int, call: HostCall, host: Callable[[], Host]) -> Report:
    """Make one call in the worker's own process: what it raises becomes a report, with its cause.

    Args:
        worker: its number, for the report.
        call: what to do.
        host: gives the worker's host; making it may fail too.
    """
    try:
        done = host().advance(call)
    except Exception as error:  # whatever user code raises is the run's, not the driver's
        return Report(
            worker=worker,
            error=described(error),
            cause=classify(error),
            log_tail=log_tail(str(getattr(error, "log_tail", ""))),
            refused=bool(getattr(error, "refuses_study", False)),
        )
    return Report(
        worker=worker,
        finished=done.finished,
        steps=done.steps,
        paused=done.paused,
        notes=done.notes,
        answer=done.answer,
        skipped=done.skipped,
    )


class Pool(Protocol):
    """Workers 0 ... `num_workers` - 1, each with one call under way and `calls_ahead` more that
    wait, in order.
    """

    num_workers: int
    calls_ahead: int

    def start(self, worker: int, call: HostCall) -> None:
        """Begin a call, or have it wait for the worker's earlier one; if that fails, the one that
        waits is given up.
        """
        ...

    def wait(self, timeout_seconds: float) -> list[Report]:
        """The reports that have arrived; waits for a first one at most that long. Raises
        PoolDead.
        """
        ...

    def restart(self, worker: int) -> None:
        """Give the worker a new, empty host; the old one's process is killed. Its call in flight is
        given up and reports nothing. Raises PoolDead.
        """
        ...

    def close(self) -> None:
        """Stop every worker; what is in flight is lost."""
        ...


_POLL_SECONDS = 0.5


def ask(pool: Pool, worker: int, probe: dict[str, Json]) -> None:
    """Have an idle worker begin on a probe."""
    pool.start(worker, HostCall(bank_key="", num_slots=1, admit=(), seconds=0, probe=probe))


def take_answers(pool: Pool, asked_at: dict[int, float], seconds: float) -> list[Report]:
    """What has come of workers' probes in half a second; one that failed, or is silent for so long,
    is restarted.

    `asked_at`: by worker, monotonic seconds at which it was asked; who is in a report leaves it.
    """
    reports = pool.wait(_POLL_SECONDS)
    here, now = {report.worker for report in reports}, time.monotonic()
    silent = [
        worker for worker, at in asked_at.items() if worker not in here and now - at > seconds
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


def ask_all(
    pool: Pool, probe: dict[str, Json], seconds: float, check: Callable[[], None]
) -> list[Report]:
    """What every worker of an idle pool answers to a probe, within so many seconds; see
    `take_answers`.

    `check` is called a few times a second, and raises what ends the work.
    """
    for worker in range(pool.num_workers):
        ask(pool, worker, probe)
    asked_at, found = dict.fromkeys(range(pool.num_workers), time.monotonic()), list[Report]()
    while asked_at:
        found += take_answers(pool, asked_at, seconds)
        check()
    return found


class InlinePool:
    """One worker, in this process: for tests, debugging and machines without Ray.

    It cannot interrupt a call, so `wait` takes as long as the call does; and it idles between two
    in any case.
    """

    num_workers = 1
    calls_ahead = 0

    def __init__(self, host_factory: HostFactory) -> None:
        """`host_factory` is called when there is something to do."""
        self._host = functools.cache(host_factory)
        self._call: HostCall | None = None

    def start(self, worker: int, call: HostCall) -> None:
        """See `Pool`."""
        self._call = call

    def wait(self, timeout_seconds: float) -> list[Report]:
        """Carry out the call, unless the timeout is 0: then nothing has arrived yet."""
        if self._call is None or timeout_seconds <= 0:
            return []
        call, self._call = self._call, None
        return [carry_out(0, call, self._host)]

    def restart(self, worker: int) -> None:
        """See `Pool`."""
        self.close()

    def close(self) -> None:
        """See `Pool`."""
        self._host.cache_clear()
        self._call = None
