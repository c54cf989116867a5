"""What drives runs: workers that host banks of slots. The driver knows pools only through this file.

A pool is at-least-once: a call may be lost with its worker, and a run executed again. That every run gets one
outcome is the driver's and the ledger's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from proxies.canon import Json


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A run that ended in a slot, which is free again."""

    slot: int
    result: dict[str, Json]
    """A `RunResult` as JSON data."""
    curve: dict[str, Json]
    """Its `Curve` as JSON data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advance:
    """One call to a worker's host."""

    bank_key: str
    """What all runs of a bank share; the host drops every slot when it changes."""
    num_slots: int
    admit: tuple[tuple[int, dict[str, Json]], ...]
    """(slot, `RunSpec` as JSON data) to begin at step 0; the slots are free."""
    max_steps: int


class Host(Protocol):
    """A bank on one device. A run's result depends on its spec alone, never on its neighbours."""

    def advance(
        self, bank_key: str, num_slots: int, admit: list[tuple[int, dict[str, Json]]], max_steps: int
    ) -> list[Finished]:
        """Admit runs, train every occupied slot for up to `max_steps` steps, hand over those that ended.

        May return sooner, as soon as some have ended: their slots are then refilled.
        """
        ...


HostFactory = Callable[[], Host]
"""Makes a worker's host, in the worker. Picklable: a top-level callable, or a dataclass with `__call__`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What came of one `Advance`."""

    worker: int
    finished: tuple[Finished, ...] = ()
    error: str | None = None
    """Why the call failed; the worker has lost every slot and must be restarted."""
    refused: bool = False
    """The error says of itself, by `refuses_study = True`, that no attempt can mend it."""


class Pool(Protocol):
    """Workers 0 ... `num_workers` - 1, each with one call in flight at most."""

    num_workers: int

    def start(self, worker: int, call: Advance) -> None:
        """Begin a call on an idle worker."""
        ...

    def wait(self, timeout_seconds: float) -> list[Report]:
        """The reports that have arrived; waits for a first one at most that long. Raises PoolDead."""
        ...

    def restart(self, worker: int) -> None:
        """Give the worker a new, empty host. Its call in flight is given up and reports nothing. Raises PoolDead."""
        ...

    def close(self) -> None:
        """Stop every worker; what is in flight is lost."""
        ...


class InlinePool:
    """One worker, in this process: for tests, debugging and machines without Ray.

    It cannot interrupt a call, so `wait` takes as long as the call does.
    """

    num_workers = 1

    def __init__(self, host_factory: HostFactory) -> None:
        """`host_factory` is called when there is something to do."""
        self._factory = host_factory
        self._host: Host | None = None
        self._call: Advance | None = None

    def start(self, worker: int, call: Advance) -> None:
        """See `Pool`."""
        self._call = call

    def wait(self, timeout_seconds: float) -> list[Report]:
        """Carry out the call, unless the timeout is 0: then nothing has arrived yet."""
        if self._call is None or timeout_seconds <= 0:
            return []
        call, self._call = self._call, None
        try:
            self._host = self._host or self._factory()
            finished = self._host.advance(call.bank_key, call.num_slots, list(call.admit), call.max_steps)
        except Exception as error:  # whatever user code raises is the run's, not the driver's
            refused = bool(getattr(error, "refuses_study", False))
            return [Report(worker=0, error=f"{type(error).__name__}: {error}", refused=refused)]
        return [Report(worker=0, finished=tuple(finished))]

    def restart(self, worker: int) -> None:
        """See `Pool`."""
        self.close()

    def close(self) -> None:
        """See `Pool`."""
        self._host = self._call = None
