"""A pool of Ray actors, on a cluster of our own or on one that exists. The only module that imports
Ray.

Actors are never restarted or retried by Ray: what a lost worker held is the driver's to run again.
Every wait has a deadline. A worker that dies is a report; when Ray itself is gone (its head, or the
node that this driver is on), that is `PoolDead`. Actors belong to this driver alone: when it ends,
however it ends, Ray ends them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import queue
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from proxies.core.failures import Cause, crashed, log_tail
from proxies.core.notation import counted
from sweeps.ray import start as ray_start
from sweeps.ray.nodes import (
    NodeCheck,
    WorkerPlacement,
    alive_nodes,
    answers,
    check_nodes,
    described,
    devices,
    found_head,
    measure_resources,
    node_room,
    room,
)
from sweeps.ray.own import ClusterFolder, Environment
from sweeps.ray.start import Head, StartTimeout
from sweeps.run.pool import HostCall, HostFactory, Report, carry_out, num_cores
from sweeps.store.errors import ClusterUnfit, PoolDead


class RayWorker:
    """A host in an actor; it is made when it first has something to do, so that starting is
    quick.
    """

    def __init__(self, host_factory: HostFactory) -> None:
        self._host = functools.cache(host_factory)

    def ready(self) -> str:
        """Where what this process prints goes: the log of one that is lost."""
        with contextlib.suppress(OSError):
            return str(Path("/proc/self/fd/2").readlink())
        return ""

    def advance(self, worker: int, call: HostCall) -> Report:
        """One call to the host, as a report."""
        return carry_out(worker, call, self._host)


# Where on a Ray cluster workers sit: shares of GPUs dealt out evenly.
#
# Ray by itself puts shares of GPUs together: four workers of a quarter each all sit on the node's
# first GPU. So there is a placement group for each GPU that is shared.

_APART = 0.5001  # of a GPU, the least that cannot lie on one with another: Ray counts in 1/10,000

_MOST_PER_CORE = 16
"""Workers that a machine of our own starts: each is a process of some 300 MB, and more only wait
for one another."""

Spots = list[Any]
"""By worker: a scheduling strategy of Ray's."""


def dealt(
    resources: Mapping[str, Mapping[str, float]], place: WorkerPlacement, num_workers: int
) -> list[tuple[str, float, int]]:
    """Workers with a share of a GPU each, dealt out one by one: no GPU has two before every one has
    one.

    Args:
        resources: node id -> resource -> amount.
        place: what a worker takes.
        num_workers: there is room for so many.

    Returns:
        (node id, share of its GPU to take, workers on it) of every GPU that gets any.
    """
    gpus = [(node, part) for node, has in resources.items() for part in devices(has)]
    counts, left = [0] * len(gpus), num_workers
    room = {node: node_room(has, place) for node, has in resources.items()}
    while left:
        before = left
        for index, (node, part) in enumerate(gpus):
            if left and room[node] and (counts[index] + 1) * place.gpu_share <= part + 1e-9:
                counts[index], room[node], left = counts[index] + 1, room[node] - 1, left - 1
        if left == before:
            raise ValueError(
                f"{left} of {counted(num_workers, 'worker')} do not fit on the cluster's nodes"
            )
    several = {node for node, has in resources.items() if len(devices(has)) > 1}
    return [
        (
            node,
            max(count * place.gpu_share, _APART if node in several and part == 1 else 0.0),
            count,
        )
        for (node, part), count in zip(gpus, counts, strict=True)
        if count
    ]


def reserved(
    ray: Any,
    resources: Mapping[str, Mapping[str, float]],
    place: WorkerPlacement,
    num_workers: int,
    look: Callable[[], None],
) -> Spots:
    """Have Ray keep the places of all workers, in placement groups that end with this driver.

    Args:
        ray: the module, connected.
        resources: node id -> resource -> amount, of the nodes to use.
        place: what a worker takes.
        num_workers: there is room for so many.
        look: called each second while Ray makes the room: raises what ends that.
    """
    if not place.shares_gpus:
        return ["DEFAULT"] * num_workers
    groups, rounds = [], []
    for node, share, count in dealt(resources, place, num_workers):
        bundle = {name: amount * count for name, amount in place.needs.items()} | {"GPU": share}
        bundle = {name: round_amount(amount) for name, amount in bundle.items()}
        groups.append(
            ray.util.placement_group([bundle], strategy="STRICT_PACK", _soft_target_node_id=node)
        )
        rounds += [(turn, len(groups) - 1) for turn in range(count)]
    for group in groups:
        while not group.wait(timeout_seconds=1.0):
            look()
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    return [strategy(groups[index], placement_group_bundle_index=0) for _, index in sorted(rounds)]


def round_amount(amount: float) -> float:
    """Return an amount that Ray counts as it is: it cuts off what is below 1/10,000, and 3 * 0.7 is
    under 2.1.
    """
    exact = round(amount, 4)
    return exact if exact.is_integer() else exact + 0.2e-4


ANSWER_SECONDS = 30.0
"""For an actor that answers already to hand over what it has."""

_POLL_SECONDS = 0.02  # as long Ray's own handler of SIGTERM, which ends the process, may stand
_THREAD_SECONDS = 4.0  # for a connection to come about (1 s), or to fail once its head is gone
_PROBE_SECONDS = 2.0  # Ray itself needs 10 to 15 s to tell that its node is dead
# it lives, by its socket: on a machine with more to do than cores it was seen to take 5
_BUSY_HEAD_SECONDS = 30.0
_RESUME = "Recorded results are kept; run the same command again to resume"
# lines of a worker's log that are Ray's own
_RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


class RayPool:
    """Workers as Ray actors, each with its share of a node and one arithmetic thread."""

    calls_ahead = 1

    def __init__(
        self,
        num_workers: int,
        host_factory: HostFactory,
        *,
        place: WorkerPlacement | None = None,
        node_check: NodeCheck | None = None,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """Start Ray (some 5 s, minutes on a busy machine) or join it, then start the workers.

        A start of our own that fails is tried once more.

        Args:
            num_workers: each its own process; 0: as many as fit now.
            host_factory: makes a worker's host; picklable.
            place: whose cluster, and what a worker takes of it.
            node_check: asked on every node of a cluster that is not our own.
            check_stop: asked several times a second while Ray starts: raises what ends that.

        Raises:
            PoolDead: Ray or a worker did not start.
            ClusterUnfit: the cluster cannot be joined, is too small or full, or has nodes that
                cannot run the study.
        """
        import ray

        self._ray: Any = ray
        self._factory, self._place, self._check_stop = (
            host_factory,
            place or WorkerPlacement(),
            check_stop,
        )
        self._dead: PoolDead | None = None
        tries = 1 if self._place.address else 2
        while True:
            self._clear()
            try:
                with _quiet():
                    self._open(num_workers, node_check)
                return
            except (
                ClusterUnfit,
                KeyboardInterrupt,
            ):  # nobody else can: this pool is not the caller's yet
                self.close()
                raise
            except Exception as error:  # Ray raises a bare one too
                tries -= 1
                try:
                    check_stop()  # then it is no failure
                    # A second connection of this process would meet the first one, which may never
                    # end.
                    wrong = (
                        self._failure(error) if not tries or self._connecting is not None else ""
                    )
                finally:
                    self.close()
                if wrong:
                    raise PoolDead(wrong) from error

    def _clear(self) -> None:
        """Begin without anything."""
        self._actors: list[Any] = []  # by worker
        self._logs: dict[int, str] = {}
        self._starting: dict[Any, int] = {}  # workers that have not said that they are up
        self._patience = StartTimeout(self._check_stop, what="the cluster")
        # worker, actor, answer
        self._arrived: queue.SimpleQueue[tuple[int, Any, Future[Report]]] = queue.SimpleQueue()
        # workers that must be restarted: what waited in them is given up
        self._failed: set[int] = set()
        self._probed_at = time.monotonic()
        self._head: Head | None = None
        self._connecting: threading.Thread | None = None
        self._own = None if self._place.address else ClusterFolder()
        self._environment = Environment(self._own.token if self._own else None)

    def _failure(self, error: Exception) -> str:
        """Why Ray did not start, what it waited for, where that can be read, and what to do."""
        # Ray's tracebacks end in it
        lines = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        problem = f"Ray did not start: it waited for {self._patience.what}: {lines[0].strip()}"
        with contextlib.suppress(OSError):
            problem += (
                f" (the machine's load is {os.getloadavg()[0]:.0f} on "
                f"{counted(num_cores(), 'core')})"
            )
            if self._head is not None:
                problem += f". Its log: {self._head.keep_log()}"
        problem += ". Run the same command again when the machine is less busy"
        return f"{problem}, or without Ray: `--set 'cluster.backend=\"inline\"'`"

    def start(self, worker: int, call: HostCall) -> None:
        """See `Pool`."""
        actor, arrived = self._actors[worker], self._arrived
        # Not `ray.wait`: it takes a list of all calls in flight, 0.8 ms for 2,000 of them, at each
        # wait.
        answer: Future[Report] = actor.advance.remote(worker, call).future()
        answer.add_done_callback(lambda done: arrived.put((worker, actor, done)))

    def wait(self, timeout_seconds: float) -> list[Report]:
        """See `Pool`."""
        if self._dead is not None:
            raise self._dead
        done = self._arrivals(timeout_seconds)
        try:  # also while calls come back: workers go on for a while without their node or head
            self._probe()
        except PoolDead as error:
            if not done:
                raise
            self._dead = error  # raised once what has arrived is taken in
        self._look_at_starting()
        reports = []
        for worker, actor, answer in done:
            if actor is self._actors[worker] and worker not in self._failed:
                reports.append(report := self._report(worker, answer))
                if report.error is not None:
                    self._failed.add(worker)
        return reports

    def _arrivals(self, timeout_seconds: float) -> list[tuple[int, Any, Future[Report]]]:
        """Calls that have ended, also of actors that were given up since; waits for a first one so
        long.
        """
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._arrived.get(timeout=max(timeout_seconds, 0.001)))
            while True:
                found.append(self._arrived.get_nowait())
        return found

    def restart(self, worker: int) -> None:
        """See `Pool`."""
        ray = self._ray
        self._probe(0.0)  # a head that hangs would hang us too
        self._starting = {actor: held for actor, held in self._starting.items() if held != worker}
        try:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self._actors[worker], no_restart=True)
            self._begin([worker], lambda: None)  # whoever stops has the others save
        except (ray.exceptions.RayError, OSError, RuntimeError) as error:
            raise PoolDead(
                f"Ray is gone: worker {worker} could not be restarted ({type(error).__name__}: "
                f"{error}). {_RESUME}"
            ) from error

    def close(self) -> None:
        """End the workers. A cluster of our own ends too, and its files go; another is left as it
        was.
        """
        with _quiet():
            # Ray may end a process whose head goes while it connects
            if self._connecting is not None:
                self._connecting.join(_THREAD_SECONDS)
            if self._head is not None and self._connecting is not None:
                self._head.close()
                self._connecting.join(_THREAD_SECONDS)
            if self._connecting is None or not self._connecting.is_alive():
                self._connecting = None
                self._shut_down()
        if self._head is not None:
            self._head.close()
        if self._own is not None:
            self._own.close()
        self._environment.close()
        self._forget_token()

    def _shut_down(self) -> None:
        """End the workers, and this process's part of Ray."""
        if self._ray.is_initialized():
            for actor in self._actors:
                with contextlib.suppress(self._ray.exceptions.RayError, RuntimeError):
                    self._ray.kill(actor, no_restart=True)
        self._actors = []
        self._ray.shutdown()

    def _forget_token(self) -> None:
        """Have Ray read the environment anew: it keeps what it read first."""
        self._ray._raylet.Config.initialize("")
        self._ray._raylet.AuthenticationTokenLoader.instance().reset_cache()

    def _open(self, num_workers: int, node_check: NodeCheck | None) -> None:
        """Start Ray or find it, connect this process to it, start the workers."""
        place = self._place
        self._forget_token()
        if self._own is None:
            address = found_head(self._ray, place.address)
        else:
            if num_workers > (most := _MOST_PER_CORE * num_cores()):
                of = f"on this machine, {_MOST_PER_CORE} for each core; 0: as many as fit"
                raise ClusterUnfit(
                    f"cluster.num_workers = {num_workers}: must be at most {most} {of}"
                )
            num_cpus = math.ceil(num_workers * place.worker_cpus) or num_cores()
            self._head = Head(self._own, num_cpus)
            self._patience = StartTimeout(self._check_stop, self._head.size, what="its head")
            address = self._head.address(self._patience)
        self._join(address)
        self._hire(num_workers, node_check)

    def _join(self, address: str) -> None:
        """Connect this process to the cluster whose head is at `host:port`."""
        ray, failed = self._ray, list[BaseException]()

        def connect() -> None:
            try:
                ray.init(
                    address=address,
                    namespace="forerun",
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            except BaseException as error:  # Ray raises a bare Exception too
                failed.append(error)

        # In a thread of its own, for it may last minutes, and a stop must be heard.
        self._patience.begin("this process's connection")
        self._connecting = threading.Thread(target=connect, name="forerun-ray", daemon=True)
        self._connecting.start()
        while self._connecting.is_alive():
            self._connecting.join(_POLL_SECONDS)
            _hear_sigterm()
            self._look()
        self._connecting = None
        _hear_sigterm()
        if failed:
            raise failed[0]
        # Ray prints its workers' deaths on stdout, where our JSON goes; the driver reports them
        # itself.
        ray._private.worker._worker_logs_enabled = False
        context = ray.get_runtime_context()
        self._gcs_address, self._node = str(context.gcs_address), str(context.get_node_id())
        self._gcs = ray._raylet.GcsClient(address=self._gcs_address)
        (node,) = [node for node in ray.nodes() if node["NodeID"] == self._node]
        self._raylet = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"

    def _look(self) -> None:
        """Go on waiting for Ray to start. Raises RuntimeError, TimeoutError, and what a stop
        does.
        """
        if self._head is not None:
            self._head.check()
        self._patience.look()

    def _hire(self, num_workers: int, node_check: NodeCheck | None) -> None:
        """Ask the nodes, count their room, start the workers."""
        ray, place = self._ray, self._place
        environment = dict.fromkeys(_THREAD_VARIABLES, "1")
        # workers import what we can import
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        if not place.worker_gpus:
            # else all of them would share the node's first
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self._patience.begin("its nodes")
        nodes = alive_nodes(self._gcs, _BUSY_HEAD_SECONDS)
        if node_check is not None:
            check_nodes(ray, nodes, node_check, environment, self._check_stop)
        total, free = measure_resources(ray, place, num_workers, self._look)
        self.num_workers = num_workers or room(free, place)
        problem = (
            f"cluster.num_workers = {num_workers}: {counted(room(total, place), 'worker')} of "
            f"{place} can be placed, "
            f"{room(free, place)} of them now: ask for fewer, or less for each. Free "
            f"resources:{described(free, nodes)}"
        )
        if not 0 < self.num_workers <= room(total, place):
            raise ClusterUnfit(problem)
        self.where = f"{counted(self.num_workers, 'worker')} on {counted(len(nodes), 'node')}"
        idle_gpus = (
            sum(node.get("GPU", 0) for node in free.values()) if not place.worker_gpus else 0
        )
        self.where += (
            f"; GPUs free: {idle_gpus:g} (cluster.worker_gpus gives them shares)"
            if idle_gpus
            else ""
        )
        self._actor_class = ray.remote(
            num_cpus=place.worker_cpus,
            num_gpus=place.gpu_share,
            memory=place.needs.get("memory"),
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": environment},
        )(RayWorker)
        there = free if room(free, place) >= self.num_workers else total
        self._actors = [None] * self.num_workers
        try:
            self._patience.begin("resources for its workers")
            self._spots: Spots = reserved(ray, there, place, self.num_workers, self._look)
            self._begin(list(range(self.num_workers)), self._check_stop)
            self._await_ready()
        except TimeoutError as error:  # Ray's own is one too
            if there is free:
                raise
            problem += (
                f"\nOther jobs hold the rest, and released nothing in {ray_start.IDLE_SECONDS:g} s"
            )
            raise ClusterUnfit(problem) from error

    def _begin(self, workers: list[int], check: Callable[[], None]) -> None:
        """Have Ray start the actors of `workers`: calls may follow at once, and wait for them."""
        self._patience = StartTimeout(
            check, int if self._head is None else self._head.size, what="its workers"
        )
        for worker in workers:
            actor = self._actor_class.options(scheduling_strategy=self._spots[worker]).remote(
                self._factory
            )
            self._actors[worker] = actor
            self._failed.discard(worker)
            self._logs.pop(worker, None)
            self._starting[actor.ready.remote()] = worker

    def _await_ready(self) -> None:
        """Wait until every worker answers. Raises PoolDead on a dead node, TimeoutError, or what an
        actor raised.
        """
        while self._starting:
            done, _ = self._ray.wait(
                list(self._starting), num_returns=len(self._starting), timeout=1.0
            )
            for reference in done:
                self._logs[self._starting.pop(reference)] = self._ray.get(
                    reference, timeout=ANSWER_SECONDS
                )
            if self._starting:
                self._probe()
                self._look()

    def _look_at_starting(self) -> None:
        """Take in which workers are up by now. Raises PoolDead where one takes too long."""
        if not self._starting:
            return
        done, _ = self._ray.wait(list(self._starting), num_returns=len(self._starting), timeout=0)
        for reference in done:
            worker = self._starting.pop(reference)
            with contextlib.suppress(self._ray.exceptions.RayError):  # lost: so is its call
                self._logs[worker] = self._ray.get(reference, timeout=ANSWER_SECONDS)
        if self._starting:
            try:
                self._patience.look()
            except TimeoutError as error:
                worker = next(iter(self._starting.values()))
                raise PoolDead(
                    f"Ray is gone: worker {worker} could not be restarted: {error}. {_RESUME}"
                ) from error

    def _report(self, worker: int, answer: Future[Report]) -> Report:
        """What came of an actor's call that has ended."""
        exceptions = self._ray.exceptions
        try:
            return answer.result()
        except exceptions.RayError as error:
            log = self._log(worker)
            cause: Cause = "crashed" if crashed(log) else "lost_worker"
            if isinstance(error, exceptions.OutOfMemoryError):
                cause = "out_of_memory"
            problem = f"worker lost ({type(error).__name__})"
            return Report(worker=worker, error=problem, cause=cause, log_tail=log_tail(log))

    def _log(self, worker: int) -> str:
        """What a lost actor printed; empty if it was on another machine, or died before it said
        where.
        """
        with contextlib.suppress(OSError, KeyError):
            lines = (
                Path(self._logs[worker]).read_text(encoding="utf-8", errors="replace").splitlines()
            )
            return "\n".join(line for line in lines if not line.startswith(_RAY_MARKS))
        return ""

    def _probe(self, every_seconds: float = _PROBE_SECONDS) -> None:
        """Ask whether Ray's head and our node live, unless just asked; calls in flight on a dead
        one may stay pending.

        Raises:
            PoolDead: one does not.
        """
        if time.monotonic() - self._probed_at < every_seconds:
            return
        self._probed_at = time.monotonic()
        # through Ray, a dead head ends this process after 60 s
        if not answers(self._gcs_address, _PROBE_SECONDS):
            raise PoolDead(f"Ray is gone: its head does not answer. {_RESUME}")
        if not answers(self._raylet, _PROBE_SECONDS):  # the head takes half a minute to believe it
            raise PoolDead(f"Ray is gone: the node of this driver does not answer. {_RESUME}")
        try:
            alive = alive_nodes(self._gcs, _BUSY_HEAD_SECONDS)
        except self._ray.exceptions.RayError as error:
            raise PoolDead(
                f"Ray is gone: its head does not answer ({type(error).__name__}). {_RESUME}"
            ) from error
        if self._node not in alive:
            raise PoolDead(f"Ray is gone: the node of this driver is dead. {_RESUME}")


def _hear_sigterm() -> None:
    """Put back this process's handler of SIGTERM: Ray's connection puts one below Python's that
    ends the process.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ray's own warnings muted."""
    with warnings.catch_warnings():
        for category in (FutureWarning, DeprecationWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        yield
