"""The ranks of one worker: how they meet, and how rank 0 tells the others what to do with it.

Rank 0 has the run's host, which decides; the others obey, so that no two ranks can disagree on when to save, to stop or
to go on. What is told goes over gloo, as JSON: nothing in it can run.
"""

from __future__ import annotations

import enum
import os
import socket
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from launcher.trainer.ranks import device
from proxies.core import canon
from proxies.core.canon import Json
from sweeps.ray.actor import Seat
from sweeps.run.pool import Advance, Advanced, Host

WAIT_SECONDS = 600.0
"""For one another: as long as the driver waits for a worker that says nothing."""


class Order(enum.IntEnum):
    """What rank 0 has all ranks do."""

    REPORT = 0
    """The call is over."""
    ADMIT = 1
    STEP = 2
    VALIDATE = 3
    GATHER = 4
    EVICT = 5


def join(seat: Seat) -> DeviceMesh:
    """Meet the other ranks; the mesh of all of them.

    Raises:
        RuntimeError: they did not come in time.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
    if seat.one_node and loopback:  # nobody else is to be heard, or reached
        os.environ.update({"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback})
    host, _, port = seat.address.rpartition(":")
    wait = timedelta(seconds=WAIT_SECONDS)
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch's list of names lacks it
        host, int(port), seat.num_ranks, seat.rank == 0, timeout=wait, master_listen_fd=seat.listen_fd,
        wait_for_workers=False,
    )  # fmt: skip
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.num_ranks, timeout=wait)
    return init_device_mesh(device().type, (seat.num_ranks,))


def tell(order: Order, body: Json = None) -> None:
    """From rank 0 to all others."""
    said = torch.tensor(list(canon.canonical(body).encode()), dtype=torch.uint8)
    dist.broadcast(torch.tensor([order, len(said)]), 0)
    dist.broadcast(said, 0)


def hear() -> tuple[Order, Json]:
    """What rank 0 tells."""
    head = torch.zeros(2, dtype=torch.int64)
    dist.broadcast(head, 0)
    order, length = head.tolist()
    said = torch.zeros(length, dtype=torch.uint8)
    dist.broadcast(said, 0)
    return Order(order), canon.parse(bytes(said.tolist()).decode())


class Leader:
    """The host of rank 0, which lets the others report when it does. One that fails does not: all are ended."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def advance(self, call: Advance) -> Advanced:
        """See `sweeps.run.pool.Host`."""
        done = self._host.advance(call)
        tell(Order.REPORT)
        return done


class Follower:
    """The host of any other rank."""

    def __init__(self, obey: Callable[[Order, Json], None]) -> None:
        self._obey = obey

    def advance(self, call: Advance) -> Advanced:
        """Do what rank 0 says until the call is over; it reports for all."""
        while True:
            order, body = hear()
            if order is Order.REPORT:
                return Advanced()
            self._obey(order, body)
