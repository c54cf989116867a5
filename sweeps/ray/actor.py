"""What runs in an actor: a host, and the actor's seat among the ranks of its worker. No Ray in here."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sweeps.run.pool import Advance, Host, Report, carry_out


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """An actor's place among the ranks of its worker."""

    rank: int
    num_ranks: int
    address: str
    """`host:port` where rank 0 listens."""
    one_node: bool
    """All ranks are on one machine, so that nobody else needs to reach them."""
    listen_fd: int | None = None
    """Of rank 0: its listening socket, in its own process."""


class RayWorker:
    """A worker, or one of its ranks; its host is made when it first has something to do, so that starting is quick."""

    def __init__(self, host_factory: Callable[..., Host]) -> None:
        """`host_factory` is called with this actor's `Seat`, if it gets one."""
        self._factory = host_factory
        self._host: Host | None = None
        self._listener: socket.socket | None = None
        self._seat: tuple[Seat, ...] = ()

    def ready(self) -> str:
        """Where what this process prints goes: the log of one that is lost."""
        with contextlib.suppress(OSError):
            return str(Path("/proc/self/fd/2").readlink())
        return ""

    def listen(self, head: str) -> str:
        """Of rank 0: where the others will find it, on the address from which it sees the cluster's `host:port`."""
        host, _, port = head.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
            probe.connect((host.strip("[]"), int(port)))
            own = probe.getsockname()[0]
        self._listener = socket.create_server((own, 0), family=family)
        return f"{own}:{self._listener.getsockname()[1]}"

    def sit(self, seat: Seat) -> None:
        """Be one of several ranks."""
        listen_fd = None if self._listener is None else self._listener.fileno()
        self._seat = (dataclasses.replace(seat, listen_fd=listen_fd),)

    def advance(self, worker: int, call: Advance) -> Report:
        """One call to the host, as a report."""
        return carry_out(worker, call, self._hosted)

    def _hosted(self) -> Host:
        self._host = self._host or self._factory(*self._seat)
        return self._host
