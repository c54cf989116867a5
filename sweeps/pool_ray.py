"""A pool of Ray actors, on a cluster of our own or on one that exists. The only door to Ray.

Actors are never restarted or retried by Ray: what a lost worker held is the driver's to run again. Every wait has a
deadline. A worker that dies is a report; when Ray itself is gone (its head, or the node that this driver is on), that
is `PoolDead`. Actors belong to this driver alone: when it ends, however it ends, Ray ends them. A worker is one actor,
or several ranks that train one run together: they get the same calls, and are lost and started again together.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sweeps.causes import Cause, log_tail
from sweeps.cores import num_cores
from sweeps.errors import ClusterUnfit, PoolDead
from sweeps.pool import Advance, HostFactory, Report
from sweeps.ray_actor import RayWorker, Seat
from sweeps.ray_groups import Calls, Spots, on_one_node, reserved
from sweeps.ray_nodes import NodeCheck, Place, alive_nodes, allowed, answers, check_nodes, described, found_head, room
from sweeps.ray_own import Environment, OwnFolder

START_SECONDS = 60.0  # a worker process takes 1 to 5 s, more on a busy machine
RESTART_SECONDS = 30.0

_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least is 75 MB; what we send is a few kB
_PROBE_SECONDS = 2.0  # Ray itself needs 10 to 15 s to tell that its node is dead
_BUSY_HEAD_SECONDS = 30.0  # it lives, by its socket: on a machine with more to do than cores it was seen to take 5
_RESUME = "What was recorded stands; run the same command again to resume"
_RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")  # lines of a worker's log that are Ray's own
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class RayPool:
    """Workers as Ray actors, each with its share of a node and one arithmetic thread."""

    def __init__(
        self, num_workers: int, host_factory: HostFactory, *, place: Place | None = None,
        node_check: NodeCheck | None = None,
    ) -> None:  # fmt: skip
        """Start Ray (some 5 s) or join it, then start the workers.

        Args:
            num_workers: each its own process, or one for every rank; 0: as many as there is room for now.
            host_factory: makes a worker's host; picklable. Of several ranks, each calls it with its `Seat`.
            place: whose cluster, and what a worker takes of it.
            node_check: asked on every node of a cluster that is not our own.

        Raises:
            PoolDead: Ray or a worker did not start.
            ClusterUnfit: the cluster cannot be joined, has no room, or has nodes that cannot run the study.
        """
        import ray

        self._ray: Any = ray
        self._factory, self._place = host_factory, place or Place()
        self._actors: list[list[Any]] = []  # by worker and rank
        self._logs: dict[tuple[int, int], str] = {}
        self._calls = Calls(self._place.num_ranks)
        self._probed_at = time.monotonic()
        self._dead: PoolDead | None = None
        self._own = None if self._place.address else OwnFolder()
        self._environment = Environment(self._own.token if self._own else None)
        try:
            with _quiet():
                self._forget_token()
                self._join(num_workers)
                self._hire(num_workers, node_check)
        except (ClusterUnfit, KeyboardInterrupt):  # nobody else can: this pool is not the caller's yet
            self.close()
            raise
        except (ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:  # a TimeoutError is an OSError
            self.close()
            reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]  # Ray's tracebacks end in it
            without = ": `--set 'cluster.backend=\"inline\"'` does without it" if self._place.num_ranks == 1 else ""
            raise PoolDead(f"Ray did not start ({reason[0].strip()}){without}") from error

    def start(self, worker: int, call: Advance) -> None:
        """See `Pool`."""
        for rank, actor in enumerate(self._actors[worker]):
            self._calls.begin(actor.advance.remote(worker, call), worker, rank)

    def wait(self, timeout_seconds: float) -> list[Report]:
        """See `Pool`."""
        if self._dead is not None:
            raise self._dead
        pending = self._calls.pending
        if not pending:
            return []
        done, _ = self._ray.wait(pending, num_returns=1, timeout=max(timeout_seconds, 0.001))
        try:  # also while calls come back: workers go on for a while without their node or head
            self._probe()
        except PoolDead as error:
            if not done:
                raise
            self._dead = error  # raised once what has arrived is taken in
        if done:
            done, _ = self._ray.wait(pending, num_returns=len(pending), timeout=0.001)
        for reference in done:
            self._take(reference)
        return self._calls.over()

    def restart(self, worker: int) -> None:
        """See `Pool`."""
        ray = self._ray
        self._calls.forget(worker)
        self._probe(0.0)  # a head that hangs would hang us too
        try:
            for actor in self._actors[worker]:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.kill(actor, no_restart=True)
            self._staff([worker], RESTART_SECONDS if self._place.num_ranks == 1 else START_SECONDS)
        except (ray.exceptions.RayError, OSError, RuntimeError) as error:
            raise PoolDead(
                f"Ray is gone: worker {worker} could not be restarted ({type(error).__name__}). {_RESUME}"
            ) from error

    def close(self) -> None:
        """End the workers. A cluster of our own ends too, and its files go; another is left as it was."""
        with _quiet():
            if self._ray.is_initialized():
                for actor in (actor for ranks in self._actors for actor in ranks):
                    with contextlib.suppress(self._ray.exceptions.RayError, RuntimeError):
                        self._ray.kill(actor, no_restart=True)
            self._actors = []
            self._ray.shutdown()
        if self._own is not None:
            self._own.close()
        self._environment.close()
        self._forget_token()

    def _forget_token(self) -> None:
        """Have Ray read the environment anew: it keeps what it read first."""
        self._ray._raylet.Config.initialize("")
        self._ray._raylet.AuthenticationTokenLoader.instance().reset_cache()

    def _join(self, num_workers: int) -> None:
        """Connect this process to the cluster; start it, if it is our own."""
        ray, place, ours = self._ray, self._place, {}
        address = found_head(ray, place.address) if self._own is None else "local"
        if self._own is not None:
            ours = {
                "num_cpus": math.ceil(num_workers * place.num_ranks * place.worker_cpus) or num_cores(),
                "include_dashboard": False,
                "object_store_memory": _OBJECT_STORE_BYTES,
                "_temp_dir": self._own.ray_dir,
            }
        with self._own.marking() if self._own is not None else contextlib.nullcontext():
            ray.init(address=address, namespace="forerun", log_to_driver=False, logging_level=logging.ERROR, **ours)
        # Ray prints its workers' deaths on stdout, where our JSON goes; the driver reports them itself.
        ray._private.worker._worker_logs_enabled = False
        context = ray.get_runtime_context()
        self._head, self._node = str(context.gcs_address), str(context.get_node_id())
        self._gcs = ray._raylet.GcsClient(address=self._head)
        (node,) = [node for node in ray.nodes() if node["NodeID"] == self._node]
        self._raylet = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"

    def _hire(self, num_workers: int, node_check: NodeCheck | None) -> None:
        """Ask the nodes, count their room, start the workers."""
        ray, place = self._ray, self._place
        environment = dict.fromkeys(_THREAD_VARIABLES, "1")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # workers import what we can import
        if not place.worker_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""  # else all of them would share the node's first
        nodes = alive_nodes(self._gcs)
        if node_check is not None:
            check_nodes(ray, nodes, node_check, environment)
        total, free = ray._private.state.total_resources_per_node(), ray._private.state.available_resources_per_node()
        if place.avoided:
            nodes = allowed(ray, nodes, place, environment)
            total, free = ({node: has for node, has in each.items() if node in nodes} for each in (total, free))
        self.num_workers = num_workers or room(free, place)
        said = (
            f"cluster.num_workers = {num_workers}: there is room for {room(total, place)} workers of {place}, "
            f"for {room(free, place)} of them now. Free are:{described(free, nodes)}"
        )
        if not 0 < self.num_workers <= room(total, place):
            raise ClusterUnfit(said)
        of_ranks = f" of {place.num_ranks} ranks" if place.num_ranks > 1 else ""
        self.where = f"{self.num_workers} workers{of_ranks} on {len(nodes)} node{'s' if len(nodes) > 1 else ''}"
        idle_gpus = sum(node.get("GPU", 0) for node in free.values()) if not place.worker_gpus else 0
        self.where += f"; GPUs free: {idle_gpus:g} (cluster.worker_gpus gives them shares)" if idle_gpus else ""
        self._actor_class = ray.remote(
            num_cpus=place.worker_cpus, num_gpus=place.gpu_share, memory=place.needs.get("memory"),
            max_restarts=0, max_task_retries=0, runtime_env={"env_vars": environment},
        )(RayWorker)  # fmt: skip
        there = free if room(free, place) >= self.num_workers else total
        self._one_node = on_one_node(there, place)
        self._actors = [[] for _ in range(self.num_workers)]
        try:
            self._spots: Spots = reserved(ray, there, place, self.num_workers, START_SECONDS)
            self._staff(list(range(self.num_workers)), START_SECONDS)
        except TimeoutError as error:  # Ray's own is one too
            if there is free:
                raise
            raise ClusterUnfit(f"{said}\nOthers hold the rest, and gave none back in {START_SECONDS:g} s") from error

    def _staff(self, workers: list[int], seconds: float) -> None:
        """Start the actors of `workers`, and tell those of several ranks where rank 0 is. Raises as `_await_ready`."""
        for worker in workers:
            self._actors[worker] = [
                self._actor_class.options(scheduling_strategy=spot).remote(self._factory)
                for spot in self._spots[worker]
            ]
        self._await_ready(workers, seconds)
        num_ranks = self._place.num_ranks
        if num_ranks > 1:
            head = "127.0.0.1:1" if self._one_node else self._head
            heads = [self._actors[worker][0].listen.remote(head) for worker in workers]
            seats = [
                actor.sit.remote(Seat(rank=rank, num_ranks=num_ranks, address=address, one_node=self._one_node))
                for worker, address in zip(workers, self._ray.get(heads, timeout=RESTART_SECONDS), strict=True)
                for rank, actor in enumerate(self._actors[worker])
            ]
            self._ray.get(seats, timeout=RESTART_SECONDS)

    def _await_ready(self, workers: list[int], seconds: float) -> None:
        """Wait until all `workers` answer. Raises PoolDead on a dead node, GetTimeoutError or what an actor raised."""
        asked = {
            (worker, rank): actor.ready.remote()
            for worker in workers
            for rank, actor in enumerate(self._actors[worker])
        }
        pending = list(asked.values())
        deadline = time.monotonic() + seconds
        while pending and time.monotonic() < deadline:
            _, pending = self._ray.wait(pending, num_returns=len(pending), timeout=1.0)
            if pending:
                self._probe()
        logs = self._ray.get(list(asked.values()), timeout=0.001 if pending else RESTART_SECONDS)
        self._logs.update(zip(asked, logs, strict=True))

    def _take(self, reference: Any) -> None:
        """Take in the outcome of an actor's call that has ended."""
        exceptions = self._ray.exceptions
        worker, rank = self._calls.ended(reference)
        try:
            report: Report = self._ray.get(reference, timeout=RESTART_SECONDS)
        except exceptions.RayError as error:
            cause: Cause = "out_of_memory" if isinstance(error, exceptions.OutOfMemoryError) else "lost_worker"
            which = "worker" if self._place.num_ranks == 1 else f"rank {rank}"
            said = f"{which} lost ({type(error).__name__})"
            report = Report(worker=worker, error=said, cause=cause, log_tail=self._log_tail(worker, rank))
        self._calls.answered(rank, report)

    def _log_tail(self, worker: int, rank: int) -> str:
        """What a lost actor printed last; empty if it was on another machine."""
        with contextlib.suppress(OSError):
            lines = Path(self._logs[worker, rank]).read_text(encoding="utf-8", errors="replace").splitlines()
            return log_tail("\n".join(line for line in lines if not line.startswith(_RAY_MARKS)))
        return ""

    def _probe(self, every_seconds: float = _PROBE_SECONDS) -> None:
        """Ask whether Ray's head and our node live, unless just asked; calls in flight on a dead one may stay pending.

        Raises:
            PoolDead: one does not.
        """
        if time.monotonic() - self._probed_at < every_seconds:
            return
        self._probed_at = time.monotonic()
        if not answers(self._head, _PROBE_SECONDS):  # asked through Ray, a dead head ends this process after 60 s
            raise PoolDead(f"Ray is gone: its head does not answer. {_RESUME}")
        if not answers(self._raylet, _PROBE_SECONDS):  # the head takes half a minute to believe it
            raise PoolDead(f"Ray is gone: the node of this driver does not answer. {_RESUME}")
        try:
            alive = alive_nodes(self._gcs, _BUSY_HEAD_SECONDS)
        except self._ray.exceptions.RayError as error:
            raise PoolDead(f"Ray is gone: its head does not answer ({type(error).__name__}). {_RESUME}") from error
        if self._node not in alive:
            raise PoolDead(f"Ray is gone: the node of this driver is dead. {_RESUME}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ray's own warnings muted, and the handler for SIGTERM as it was: Ray puts its own."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if in_main_thread else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", ResourceWarning)
            yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
