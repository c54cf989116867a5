"""A pool of Ray actors, on a cluster that forerun starts or on an existing one.

This is the only module that imports Ray in the driver.

Ray never restarts or retries an actor: the driver (the process that runs a study) executes again
the runs that a lost worker held. Every wait has a deadline. If a worker dies, the driver gets a
report; `PoolDead` is raised when Ray itself is gone (its head, or the node of this driver). Actors
belong to this driver alone: Ray ends them when the driver ends, however it ends.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import queue
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from forerun._proxies.core.failures import Cause, get_log_tail, has_crashed
from forerun._proxies.core.notation import format_counted
from forerun._sweeps.ray import cluster_start as ray_start
from forerun._sweeps.ray.cluster_folder import ClusterFolder, RayEnvironment
from forerun._sweeps.ray.cluster_start import RayHead, StartTimeout
from forerun._sweeps.ray.connection import RESUME_ADVICE, RayConnection
from forerun._sweeps.ray.gpu_shares import SchedulingStrategies, reserve_places
from forerun._sweeps.ray.nodes import (
    NodeCheck,
    WorkerPlacement,
    check_nodes,
    count_workers_that_fit,
    find_head,
    format_resources,
    measure_resources,
)
from forerun._sweeps.run.cores import count_cores
from forerun._sweeps.run.pool import HostCall, HostFactory, Report, execute_call
from forerun._sweeps.store.errors import ClusterUnfit, PoolDead


class RayWorker:
    """Ray actor that runs a worker's host (`forerun._sweeps.run.pool.Host`), which trains a bank of
    runs.

    The host is made by the first call, so that the actor starts quickly.
    """

    def __init__(self, host_factory: HostFactory) -> None:
        self._host = functools.cache(host_factory)

    def report_log_path(self) -> str:
        """Return the path of this process's log, empty if unknown; the first answer shows that the
        worker is up. The driver reads the log if the worker is lost.
        """
        with contextlib.suppress(OSError):
            return str(Path("/proc/self/fd/2").readlink())
        return ""

    def advance(self, worker: int, call: HostCall) -> Report:
        """Make one call to the host and return its report."""
        return execute_call(worker, call, self._host)


_MAX_WORKERS_PER_CORE = 16
"""Maximum number of workers per core on a cluster that forerun starts.

Each worker is a process of about 300 MB, and more workers would only wait for each other.
"""

ANSWER_SECONDS = 30.0
"""Time limit in seconds for an actor that has already answered to transfer its result."""


# Beginnings of the lines that Ray itself writes into a worker's log
_RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


class RayPool:
    """A pool of Ray actors, each with its share of a node and one arithmetic thread."""

    calls_ahead = 1  # see `Pool`

    def __init__(
        self,
        num_workers: int,
        host_factory: HostFactory,
        *,
        place: WorkerPlacement | None = None,
        node_check: NodeCheck | None = None,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """Start Ray (about 5 s, minutes on a busy machine) or join a cluster, then start the
        workers.

        If the start of a cluster fails, forerun tries it once more.

        Args:
            num_workers: number of worker processes; 0: as many as fit now.
            host_factory: makes a worker's host; picklable.
            place: cluster to use, and the resources that a worker takes.
            node_check: run on every node of an existing cluster; returns its problems.
            check_stop: called several times a second while Ray starts; raises to end the start.

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
        is_last = bool(self._place.address)  # only the start of a cluster is tried twice
        while not self._try_open(num_workers, node_check, is_last=is_last):
            is_last = True

    def _try_open(self, num_workers: int, node_check: NodeCheck | None, *, is_last: bool) -> bool:
        """Start Ray and the workers; return False if that failed and may be tried again.

        Raises:
            PoolDead: it failed, and this attempt `is_last` or its connection has not ended.
            ClusterUnfit: see `__init__`.
        """
        self._clear()
        try:
            with _silence_ray_warnings():
                self._open(num_workers, node_check)
        except (ClusterUnfit, KeyboardInterrupt):
            self.close()  # the caller does not have this pool yet and cannot close it
            raise
        except Exception as error:  # Ray raises bare exceptions too
            try:
                self._check_stop()  # after a stop, the error is no failure
                # A second connection of this process would meet the first one, which may never end.
                is_last = is_last or self._connection.is_pending
                problem = self._describe_failure(error) if is_last else ""
            finally:
                self.close()
            if is_last:
                raise PoolDead(problem) from error
            return False
        return True

    def _clear(self) -> None:
        """Reset the pool to the state before Ray is started."""
        self._actors: list[Any] = []  # by worker
        self._logs: dict[int, str] = {}
        # Workers that are not up yet, by their pending `report_log_path` call
        self._starting: dict[Any, int] = {}
        self._start_timeout = StartTimeout(self._check_stop, name="the cluster")
        # Calls that have ended: worker, actor, answer
        self._arrived: queue.SimpleQueue[tuple[int, Any, Future[Report]]] = queue.SimpleQueue()
        # Workers that must be restarted; calls that wait in them are given up
        self._failed: set[int] = set()
        self._head: RayHead | None = None
        self._connection = RayConnection(self._ray)
        self._cluster_folder = None if self._place.address else ClusterFolder()
        self._environment = RayEnvironment(
            self._cluster_folder.token if self._cluster_folder else None
        )

    def _describe_failure(self, error: Exception) -> str:
        """Return why Ray did not start, what it waited for, where its log is, and what to do."""
        # Ray puts the traceback into the message; its last line is the error itself
        lines = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        problem = f"Ray did not start: it waited for {self._start_timeout.name}: {lines[0].strip()}"
        with contextlib.suppress(OSError):
            problem += (
                f" (the machine's load is {os.getloadavg()[0]:.0f} on "
                f"{format_counted(count_cores(), 'core')})"
            )
            if self._head is not None:
                problem += f". Its log: {self._head.keep_log()}"
        problem += ". Run the same command again when the machine is less busy"
        return f"{problem}, or without Ray: `--set 'cluster.backend=\"inline\"'`"

    def start(self, worker: int, call: HostCall) -> None:
        """See `Pool`."""
        actor, arrived = self._actors[worker], self._arrived
        # A callback instead of `ray.wait`, which takes a list of all calls in flight: 0.8 ms for
        # 2,000 calls at each wait.
        answer: Future[Report] = actor.advance.remote(worker, call).future()
        answer.add_done_callback(lambda done: arrived.put((worker, actor, done)))

    def wait(self, timeout_seconds: float) -> list[Report]:
        """See `Pool`."""
        if self._dead is not None:
            raise self._dead
        done = self._take_arrived(timeout_seconds)
        try:  # even while calls return: workers continue for a while without their node or head
            self._connection.probe()
        except PoolDead as error:
            if not done:
                raise
            self._dead = error  # raised by the next wait, after these reports are returned
        self._check_starting_workers()
        reports = []
        for worker, actor, answer in done:
            if actor is self._actors[worker] and worker not in self._failed:
                reports.append(report := self._make_report(worker, answer))
                if report.error is not None:
                    self._failed.add(worker)
        return reports

    def _take_arrived(self, timeout_seconds: float) -> list[tuple[int, Any, Future[Report]]]:
        """Return the calls that have ended, including calls of actors that were given up since.

        The wait for the first one takes at most `timeout_seconds`.
        """
        arrivals = []
        with contextlib.suppress(queue.Empty):
            arrivals.append(self._arrived.get(timeout=max(timeout_seconds, 0.001)))
            while True:
                arrivals.append(self._arrived.get_nowait())
        return arrivals

    def restart(self, worker: int) -> None:
        """See `Pool`."""
        ray = self._ray
        self._connection.probe(0.0)  # a head that hangs would block the calls below
        self._starting = {
            reference: index for reference, index in self._starting.items() if index != worker
        }
        try:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self._actors[worker], no_restart=True)
            # Not ended by a stop: the other workers must be able to save
            self._start_actors([worker], lambda: None)
        except (ray.exceptions.RayError, OSError, RuntimeError) as error:
            raise PoolDead(
                f"Ray is gone: worker {worker} could not be restarted ({type(error).__name__}: "
                f"{error}). {RESUME_ADVICE}"
            ) from error

    def close(self) -> None:
        """End the workers.

        A cluster that forerun started ends too, and its files are removed; an existing cluster
        stays as it was.
        """
        with _silence_ray_warnings():
            # Ray may end this process if the head disappears while it connects
            has_ended = self._connection.await_pending()
            if self._head is not None and not has_ended:
                self._head.close()
                has_ended = self._connection.await_pending()
            if has_ended:
                self._shut_down()
        if self._head is not None:
            self._head.close()
        if self._cluster_folder is not None:
            self._cluster_folder.close()
        self._environment.close()
        self._connection.forget_token()

    def _shut_down(self) -> None:
        """End the workers, and Ray in this process."""
        if self._ray.is_initialized():
            for actor in self._actors:
                with contextlib.suppress(self._ray.exceptions.RayError, RuntimeError):
                    self._ray.kill(actor, no_restart=True)
        self._actors = []
        self._ray.shutdown()

    def _open(self, num_workers: int, node_check: NodeCheck | None) -> None:
        """Start or find Ray, connect this process to it, and start the workers."""
        place = self._place
        self._connection.forget_token()
        if self._cluster_folder is None:
            address = find_head(self._ray, place.address)
        else:
            if num_workers > (limit := _MAX_WORKERS_PER_CORE * count_cores()):
                raise ClusterUnfit(
                    f"cluster.num_workers = {num_workers}: must be at most {limit} on this "
                    f"machine, {_MAX_WORKERS_PER_CORE} for each core; 0: as many as fit"
                )
            num_cpus = math.ceil(num_workers * place.worker_cpus) or count_cores()
            self._head = RayHead(self._cluster_folder, num_cpus)
            self._start_timeout = StartTimeout(
                self._check_stop, self._head.measure_size, name="its head"
            )
            address = self._head.await_address(self._start_timeout)
        self._start_timeout.begin("this process's connection")
        self._connection.open(address, self._check_start)
        self._start_workers(num_workers, node_check)

    def _check_start(self) -> None:
        """Check that Ray is still starting.

        Raises:
            RuntimeError: the head has ended.
            TimeoutError: the start takes too long.
            BaseException: whatever `check_stop` raises.
        """
        if self._head is not None:
            self._head.check()
        self._start_timeout.check()

    def _start_workers(self, num_workers: int, node_check: NodeCheck | None) -> None:
        """Check the nodes, count how many workers fit, and start the workers."""
        ray, place = self._ray, self._place
        environment = dict.fromkeys(_THREAD_VARIABLES, "1")
        # Workers can import what this process can import
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        if not place.worker_gpus:
            # Otherwise all workers would use the node's first GPU
            environment["CUDA_VISIBLE_DEVICES"] = ""
        # Check the nodes and count how many workers fit
        self._start_timeout.begin("its nodes")
        nodes = self._connection.list_alive_nodes()
        if node_check is not None:
            check_nodes(ray, nodes, node_check, environment, self._check_stop)
        total, free = measure_resources(ray, place, num_workers, self._check_start)
        num_total, num_free = (count_workers_that_fit(amounts, place) for amounts in (total, free))
        self.num_workers = num_workers or num_free
        problem = (
            f"cluster.num_workers = {num_workers}: {format_counted(num_total, 'worker')} of "
            f"{place} can be placed, {num_free} of them now: ask for fewer, or less for each. Free "
            f"resources:{format_resources(free, nodes)}"
        )
        if not 0 < self.num_workers <= num_total:
            raise ClusterUnfit(problem)
        self.where = (
            f"{format_counted(self.num_workers, 'worker')} on {format_counted(len(nodes), 'node')}"
        )
        idle_gpus = 0 if place.worker_gpus else sum(node.get("GPU", 0) for node in free.values())
        if idle_gpus:
            self.where += f"; GPUs free: {idle_gpus:g} (cluster.worker_gpus gives them shares)"
        # Reserve the places and start the actors
        self._actor_class = ray.remote(
            num_cpus=place.worker_cpus,
            num_gpus=place.gpu_share,
            memory=place.resources.get("memory"),
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": environment},
        )(RayWorker)
        available = free if num_free >= self.num_workers else total
        self._actors = [None] * self.num_workers
        try:
            self._start_timeout.begin("resources for its workers")
            self._strategies: SchedulingStrategies = reserve_places(
                ray, available, place, self.num_workers, self._check_start
            )
            self._start_actors(list(range(self.num_workers)), self._check_stop)
            self._await_ready()
        except TimeoutError as error:  # Ray's own timeouts included
            if available is free:
                raise
            problem += (
                "\nOther jobs hold the remaining resources, and released none of them in "
                f"{ray_start.MAX_IDLE_SECONDS:g} s"
            )
            raise ClusterUnfit(problem) from error

    def _start_actors(self, workers: list[int], check: Callable[[], None]) -> None:
        """Have Ray start the actors of `workers`.

        Calls may follow at once; they wait until the actor is up.
        """
        self._start_timeout = StartTimeout(
            check, int if self._head is None else self._head.measure_size, name="its workers"
        )
        for worker in workers:
            actor = self._actor_class.options(scheduling_strategy=self._strategies[worker]).remote(
                self._factory
            )
            self._actors[worker] = actor
            self._failed.discard(worker)
            self._logs.pop(worker, None)
            self._starting[actor.report_log_path.remote()] = worker

    def _await_ready(self) -> None:
        """Wait until every worker answers.

        Raises:
            PoolDead: a node is dead.
            TimeoutError: the start takes too long.
            Exception: whatever an actor raised.
        """
        while self._starting:
            self._take_started(1.0)
            if self._starting:
                self._connection.probe()
                self._check_start()

    def _take_started(self, timeout_seconds: float, *ignored: type[BaseException]) -> None:
        """Store the log paths of the workers that are up, after a wait for all that are starting.

        Args:
            timeout_seconds: maximum time to wait.
            ignored: errors of a worker's start that are ignored.
        """
        done, _ = self._ray.wait(
            list(self._starting), num_returns=len(self._starting), timeout=timeout_seconds
        )
        for reference in done:
            worker = self._starting.pop(reference)
            with contextlib.suppress(*ignored):
                self._logs[worker] = self._ray.get(reference, timeout=ANSWER_SECONDS)

    def _check_starting_workers(self) -> None:
        """Take note of the workers that are up by now. Raises PoolDead if one takes too long."""
        if self._starting:
            # A worker that was lost while it started is reported by its call
            self._take_started(0.0, self._ray.exceptions.RayError)
        if self._starting:
            try:
                self._start_timeout.check()
            except TimeoutError as error:
                worker = next(iter(self._starting.values()))
                raise PoolDead(
                    f"Ray is gone: worker {worker} could not be restarted: {error}. {RESUME_ADVICE}"
                ) from error

    def _make_report(self, worker: int, answer: Future[Report]) -> Report:
        """Return the report of an actor's call that has ended."""
        exceptions = self._ray.exceptions
        try:
            return answer.result()
        except exceptions.RayError as error:
            log = self._read_log(worker)
            cause: Cause = "crashed" if has_crashed(log) else "lost_worker"
            if isinstance(error, exceptions.OutOfMemoryError):
                cause = "out_of_memory"
            problem = f"worker lost ({type(error).__name__})"
            return Report(worker=worker, error=problem, cause=cause, log_tail=get_log_tail(log))

    def _read_log(self, worker: int) -> str:
        """Return the text that a lost actor printed.

        The text is empty if the actor was on another machine, or died before it reported the path
        of its log.
        """
        with contextlib.suppress(OSError, KeyError):
            lines = (
                Path(self._logs[worker]).read_text(encoding="utf-8", errors="replace").splitlines()
            )
            return "\n".join(line for line in lines if not line.startswith(_RAY_MARKS))
        return ""


@contextlib.contextmanager
def _silence_ray_warnings() -> Iterator[None]:
    """Suppress the warnings that Ray raises."""
    with warnings.catch_warnings():
        for category in (FutureWarning, DeprecationWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        yield
