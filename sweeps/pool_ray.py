"""A pool of Ray actors on this machine. The only door to Ray.

Actors are never restarted or retried by Ray: what a lost worker held is the driver's to run again. Every wait has a
deadline. A worker that dies is a report; when Ray itself is gone (raylet or its head), the next restart cannot
succeed, and that is `PoolDead`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

from proxies.canon import Json
from sweeps.errors import PoolDead
from sweeps.pool import Advance, Finished, Host, HostFactory, Report

START_SECONDS = 60.0  # a worker process takes 1 to 5 s, more on a busy machine
RESTART_SECONDS = 30.0

_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least is 75 MB; what we send is a few kB
_PROBE_SECONDS = 2.0  # Ray itself needs 10 to 15 s to tell that its node is dead
_RESUME = "What was recorded stands; run the same command again to resume"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_DRIVER_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's coming default; the old one warns
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run`, workers would install the project anew
}


class _Worker:
    """The actor: a host, made when it first has something to do, so that starting is quick."""

    def __init__(self, host_factory: HostFactory) -> None:
        self._factory = host_factory
        self._host: Host | None = None

    def ready(self) -> bool:
        return True

    def advance(
        self, bank_key: str, num_slots: int, admit: list[tuple[int, dict[str, Json]]], max_steps: int
    ) -> list[Finished]:
        self._host = self._host or self._factory()
        return self._host.advance(bank_key, num_slots, admit, max_steps)


class RayPool:
    """Workers as local Ray actors, one CPU and `num_threads` arithmetic threads each."""

    def __init__(self, num_workers: int, host_factory: HostFactory, *, num_threads: int = 1) -> None:
        """Start Ray and the workers (some 5 s).

        Args:
            num_workers: actors, each its own process.
            host_factory: makes a worker's host; picklable.
            num_threads: per worker, as the usual environment variables say it (OMP_NUM_THREADS ...).

        Raises:
            PoolDead: Ray or a worker did not start.
        """
        import ray

        self.num_workers = num_workers
        self._ray: Any = ray
        self._factory = host_factory
        self._temp_dir = _short_temp_dir()
        self._actors: list[Any] = []
        self._calls: dict[Any, int] = {}  # reference of a call in flight -> its worker
        self._probed_at = time.monotonic()
        environment = {name: str(num_threads) for name in _THREAD_VARIABLES}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # workers import what we can import
        try:
            with _quiet():
                self._start_ray()
            self._head: str = ray.get_runtime_context().gcs_address
            remote = ray.remote(_Worker)
            self._actor_class = remote.options(
                num_cpus=1, max_restarts=0, max_task_retries=0, runtime_env={"env_vars": environment}
            )
            self._actors = [self._actor_class.remote(host_factory) for _ in range(num_workers)]
            self._await_ready(self._actors, START_SECONDS)
        except (ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
            self.close()
            reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]  # Ray's tracebacks end in it
            without = """`--set 'cluster.backend="inline"'` does without it"""
            raise PoolDead(f"Ray did not start ({reason[0].strip()}): {without}") from error

    def start(self, worker: int, call: Advance) -> None:
        """See `Pool`."""
        actor = self._actors[worker]
        reference = actor.advance.remote(call.bank_key, call.num_slots, list(call.admit), call.max_steps)
        self._calls[reference] = worker

    def wait(self, timeout_seconds: float) -> list[Report]:
        """See `Pool`."""
        if not self._calls:
            return []
        done, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=max(timeout_seconds, 0.001))
        if not done:
            self._probe()
            return []
        more, _ = self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0.001)
        return [self._report(reference) for reference in {*done, *more}]

    def restart(self, worker: int) -> None:
        """See `Pool`."""
        ray = self._ray
        self._calls = {reference: held for reference, held in self._calls.items() if held != worker}
        try:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self._actors[worker], no_restart=True)
            self._actors[worker] = self._actor_class.remote(self._factory)
            self._await_ready([self._actors[worker]], RESTART_SECONDS)
        except (ray.exceptions.RayError, OSError, RuntimeError) as error:
            raise PoolDead(
                f"Ray is gone: worker {worker} could not be restarted ({type(error).__name__}). {_RESUME}"
            ) from error

    def close(self) -> None:
        """Stop Ray and remove its files."""
        with _quiet():
            self._ray.shutdown()
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)

    def _start_ray(self) -> None:
        """A cluster of our own, never one that happens to run: its workers may not have our code."""
        os.environ.update({name: os.environ.get(name, value) for name, value in _DRIVER_ENVIRONMENT.items()})
        ray_dir = self._temp_dir and f"{self._temp_dir}/r"  # Ray opens its folder to all: ours around it is not
        umask = os.umask(0o077)  # Ray writes its token for all to read
        try:
            self._ray.init(
                address="local",
                num_cpus=self.num_workers,
                include_dashboard=False,
                namespace="forerun",
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=ray_dir,
            )
        finally:
            os.umask(umask)
        # Ray prints its workers' deaths on stdout, where our JSON goes; the driver reports them itself.
        self._ray._private.worker._worker_logs_enabled = False

    def _await_ready(self, actors: list[Any], seconds: float) -> None:
        """Wait until all `actors` answer. Raises PoolDead on a dead node, GetTimeoutError or what an actor raised."""
        pending = ready = [actor.ready.remote() for actor in actors]
        deadline = time.monotonic() + seconds
        while pending and time.monotonic() < deadline:
            _, pending = self._ray.wait(pending, num_returns=len(pending), timeout=1.0)
            if pending:
                self._probe()
        self._ray.get(ready, timeout=0.001 if pending else RESTART_SECONDS)

    def _report(self, reference: Any) -> Report:
        """The outcome of a call that has ended."""
        exceptions = self._ray.exceptions
        worker = self._calls.pop(reference)
        try:
            finished = self._ray.get(reference, timeout=RESTART_SECONDS)
        except exceptions.RayTaskError as error:  # raised by the host
            refused = bool(getattr(error.cause, "refuses_study", False))
            return Report(worker=worker, error=f"{type(error.cause).__name__}: {error.cause}", refused=refused)
        except exceptions.RayError as error:
            return Report(worker=worker, error=f"worker lost ({type(error).__name__})")
        return Report(worker=worker, finished=tuple(finished))

    def _probe(self) -> None:
        """Ask whether Ray's head and node live; calls in flight on a dead one may stay pending."""
        if time.monotonic() - self._probed_at < _PROBE_SECONDS:
            return
        self._probed_at = time.monotonic()
        host, _, port = self._head.rpartition(":")
        try:  # asked through Ray, a dead head ends this process after 60 s
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_SECONDS).close()
        except OSError as error:
            raise PoolDead(f"Ray is gone: its head does not answer. {_RESUME}") from error
        if not any(node["Alive"] for node in self._ray.nodes()):
            raise PoolDead(f"Ray is gone: its node is dead. {_RESUME}")


def _short_temp_dir() -> str | None:
    """A new folder for Ray's files, or None (Ray's default): a socket's whole path may have 107 bytes, Ray's part
    of it takes some 60.
    """
    return tempfile.mkdtemp(prefix="forerun-") if len(tempfile.gettempdir()) <= 24 else None


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
