"""What runs in an actor: a host. No Ray in here."""

from __future__ import annotations

import contextlib
from pathlib import Path

from sweeps.run.pool import Advance, Host, HostFactory, Report, carry_out


class RayWorker:
    """A worker; its host is made when it first has something to do, so that starting is quick."""

    def __init__(self, host_factory: HostFactory) -> None:
        self._factory = host_factory
        self._host: Host | None = None

    def ready(self) -> str:
        """Where what this process prints goes: the log of one that is lost."""
        with contextlib.suppress(OSError):
            return str(Path("/proc/self/fd/2").readlink())
        return ""

    def advance(self, worker: int, call: Advance) -> Report:
        """One call to the host, as a report."""
        return carry_out(worker, call, self._hosted)

    def _hosted(self) -> Host:
        self._host = self._host or self._factory()
        return self._host
