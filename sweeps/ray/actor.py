"""What runs in an actor: a host. No Ray in here."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

from sweeps.run.pool import Advance, HostFactory, Report, carry_out


class RayWorker:
    """A worker; its host is made when it first has something to do, so that starting is quick."""

    def __init__(self, host_factory: HostFactory) -> None:
        self._host = functools.cache(host_factory)

    def ready(self) -> str:
        """Where what this process prints goes: the log of one that is lost."""
        with contextlib.suppress(OSError):
            return str(Path("/proc/self/fd/2").readlink())
        return ""

    def advance(self, worker: int, call: Advance) -> Report:
        """One call to the host, as a report."""
        return carry_out(worker, call, self._host)
