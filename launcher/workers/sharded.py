"""One trial over several devices: how its ranks meet, what rank 0 has all of them do, and the engine on rank 0.

Rank 0 has the run's host, which decides; the others obey, so that no two ranks can disagree on when to save, to stop or
to go on. What is told goes over gloo, as JSON: nothing in it can run. At one number of ranks a run repeats bit by bit,
resumed or not; against the same run on one device it is equal up to rounding.
"""

from __future__ import annotations

import enum
import math
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from launcher.trainer.ranks import device
from launcher.workers.shard import Part, state_like
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.spec import DIVERGED_ABOVE_NATS, Curve, RunResult, RunSpec
from proxies.data.tokens import TokenStore
from proxies.training.outcome import Progress, environment
from proxies.training.slot_state import SlotState, captured, resumed
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


class Rank:
    """One rank's part of a trial: every rank does what rank 0 tells, rank 0 too."""

    def __init__(self, store: TokenStore, mesh: DeviceMesh) -> None:
        """`store`: the corpus. `mesh`: the ranks."""
        self._store, self._mesh = store, mesh
        self.part: Part | None = None
        """Of the trial that is admitted."""

    def do(self, order: Order, body: Json = None, tensors: Mapping[str, Tensor] | None = None) -> object:
        """Carry an order out; `tensors`: of rank 0, the state that an admitted run goes on from.

        Raises:
            ValueError: there is nothing to do it with.
        """
        if order is Order.ADMIT and isinstance(body, dict):
            self.part = None  # what it held is free before the next one takes its own
            spec = canon.decode(RunSpec, body["spec"])
            self.part = Part(spec, self._store, self._mesh, cast(int, body["parts"]))
            return self.part.restore(tensors or {}) if body["resumes"] else None
        if order is Order.EVICT:
            self.part = None
            return None
        if self.part is None:
            raise ValueError(f"{order.name}: no run is admitted")
        if order is Order.STEP:
            return self.part.step(cast(int, body))
        return self.part.validation_loss() if order is Order.VALIDATE else self.part.gathered()


class Follower:
    """The host of any other rank."""

    def __init__(self, store: TokenStore, mesh: DeviceMesh) -> None:
        """As of `Rank`."""
        self._rank = Rank(store, mesh)

    def advance(self, call: Advance) -> Advanced:
        """Do what rank 0 says until the call is over; it reports for all."""
        while True:
            order, body = hear()
            if order is Order.REPORT:
                return Advanced()
            self._rank.do(order, body)


class Sharded:
    """One slot for one run at a time, over all ranks of this worker; lives on rank 0.

    Args:
        store: the corpus.
        mesh: the ranks.
        num_microbatches: passes that a rank splits its share of a batch into, at least.
        diverged_above_nats: over ln(vocabulary), the loss at which a run past its warmup has diverged.
    """

    def __init__(
        self, store: TokenStore, mesh: DeviceMesh, *, num_microbatches: int = 1,
        diverged_above_nats: float = DIVERGED_ABOVE_NATS,
    ) -> None:  # fmt: skip
        self._store, self._mesh, self._num_microbatches = store, mesh, num_microbatches
        self._diverged_above_nats = diverged_above_nats
        self._rank = Rank(store, mesh)
        self._run: Progress | None = None

    def admit(self, index: int, spec: RunSpec, state: SlotState | None = None) -> None:
        """Start a run from its own initial weights, or go on from a `state` of it.

        Raises:
            ValueError: the slot is taken or is not slot 0, or the run is not one for these ranks or this corpus.
            StateError: the state is not one of this run; the slot is free.
        """
        self._refuse(index, spec)
        run = Progress(spec, num_microbatches=self._num_microbatches)
        if state is not None:
            run = resumed(spec, state, state_like(spec), self._num_microbatches)
        body = {"spec": canon.to_json(spec), "parts": self._num_microbatches, "resumes": state is not None}
        self._all(Order.ADMIT, body, None if state is None else state.tensors)
        self._run = run

    def _all(self, order: Order, body: Json = None, tensors: Mapping[str, Tensor] | None = None) -> object:
        """Have every rank do something; what came of it here."""
        tell(order, body)
        return self._rank.do(order, body, tensors)

    def _refuse(self, index: int, spec: RunSpec) -> None:
        num_ranks, vocab_size = self._mesh.size(), self._store.manifest.vocab_size
        refusals = {
            f"slot {index}: a trial alone has slot 0": index == 0,
            f"slot {index} is taken": self._run is None,
            f"num_ranks = {spec.numerics.num_ranks}: this worker has {num_ranks}": spec.numerics.num_ranks == num_ranks,
            f"run {spec.id[:12]} is of another corpus": spec.data_id == self._store.manifest.data_id,
            f"vocab_size = {spec.shape.vocab_size} is smaller than the corpus's {vocab_size}": (
                spec.shape.vocab_size >= vocab_size
            ),
        }
        if problems := [problem for problem, holds in refusals.items() if not holds]:
            raise ValueError("; ".join(problems))

    @property
    def steps(self) -> dict[int, int]:
        """Optimizer steps done, by occupied slot."""
        return {} if self._run is None else {0: self._run.step}

    @property
    def environment(self) -> dict[str, str]:
        """What this engine's arithmetic depends on besides the spec."""
        return environment(device())

    def evict(self, index: int) -> None:
        """Free the slot, whatever it is doing."""
        self._all(Order.EVICT)
        self._run = None

    def state(self, index: int) -> SlotState:
        """What the run in the slot can go on from."""
        return captured(self._held(), device(), cast(dict[str, Tensor], self._all(Order.GATHER)))

    def pause_at(self, index: int, step: int | None) -> None:
        """Have `advance` do nothing while the run has done `step` steps or more; None: go on."""
        self._held().pause_step = step

    def pruned(self, index: int, num_steps: int, reason: str) -> tuple[RunResult, Curve]:
        """The outcome of the run if it is given up as it was after `num_steps`; nothing changes here."""
        return self._held().pruned(num_steps, reason, device())

    def advance(self, num_steps: int, seconds: float = math.inf) -> list[tuple[int, RunResult, Curve]]:
        """Up to `num_steps` optimizer steps, none begun after `seconds`; returns early, with (0, result, curve), when
        the run ends.
        """
        if self._run is None:
            return []
        ended = self._run.advance(
            num_steps, seconds, self._step, self._validation_loss,
            diverged_above_nats=self._diverged_above_nats, device=device(),
        )  # fmt: skip
        if ended is None:
            return []
        self.evict(0)
        return [(0, *ended)]

    def _step(self, step: int) -> tuple[float, float]:
        return cast(tuple[float, float], self._all(Order.STEP, step))

    def _validation_loss(self) -> float:
        return cast(float, self._all(Order.VALIDATE))

    def _held(self) -> Progress:
        if self._run is None:
            raise ValueError("no run is admitted")
        return self._run
