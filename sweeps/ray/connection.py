"""The connection of this process to a Ray cluster: made in a thread, then probed.

Ray itself is passed as an argument, from the only module that imports it
(`forerun._sweeps.ray.pool`).
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from forerun._sweeps.ray.nodes import is_listening, list_alive_nodes
from forerun._sweeps.store.errors import PoolDead

RESUME_ADVICE = "Recorded results are kept; run the same command again to resume"

# Ray installs a SIGTERM handler that ends the process; it is replaced within this time
_POLL_SECONDS = 0.02
# Interval between two probes, and time limit of each. Ray itself needs 10 to 15 s to notice that
# its node is dead.
_PROBE_SECONDS = 2.0
# The head's socket answers, so the head is alive: on an overloaded machine a reply took 5 s
_BUSY_HEAD_SECONDS = 30.0
# Time limit for a pending connection at the end: it takes 1 s, or fails once its head is gone
_THREAD_SECONDS = 4.0


class RayConnection:
    """This process's connection to a Ray cluster."""

    def __init__(self, ray: Any) -> None:
        """Prepare a connection; `ray` is the imported module."""
        self._ray = ray
        self._thread: threading.Thread | None = None
        self._probed_at = time.monotonic()

    @property
    def is_pending(self) -> bool:
        """Whether `open` was left before its thread had ended."""
        return self._thread is not None

    def open(self, address: str, check: Callable[[], None]) -> None:
        """Connect to the cluster whose head is at `host:port`.

        Args:
            address: address of the head.
            check: called several times a second; raises to end the wait.

        Raises:
            Exception: whatever Ray raises; it raises bare exceptions too.
        """
        ray, errors = self._ray, list[BaseException]()

        def connect() -> None:
            try:
                ray.init(
                    address=address,
                    namespace="forerun",
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            except BaseException as error:
                errors.append(error)

        # In a thread, because connecting may take minutes and a stop must be noticed meanwhile.
        self._thread = threading.Thread(target=connect, name="forerun-ray", daemon=True)
        self._thread.start()
        while self._thread.is_alive():
            self._thread.join(_POLL_SECONDS)
            _restore_sigterm_handler()
            check()
        self._thread = None
        _restore_sigterm_handler()
        if errors:
            raise errors[0]
        # Ray prints the deaths of workers on stdout, where JSON is written; the driver reports
        # them itself.
        ray._private.worker._worker_logs_enabled = False
        context = ray.get_runtime_context()
        self.gcs_address, self._node = str(context.gcs_address), str(context.get_node_id())
        self._gcs = ray._raylet.GcsClient(address=self.gcs_address)
        (node,) = [node for node in ray.nodes() if node["NodeID"] == self._node]
        self._raylet = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"

    def await_pending(self) -> bool:
        """Wait for the thread of `open`, at most `_THREAD_SECONDS`; return whether it has ended."""
        if self._thread is not None:
            self._thread.join(_THREAD_SECONDS)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def list_alive_nodes(self) -> dict[str, str]:
        """Return the address of every node that is alive, by node id. Raises RayError."""
        return list_alive_nodes(self._gcs, _BUSY_HEAD_SECONDS)

    def probe(self, every_seconds: float = _PROBE_SECONDS) -> None:
        """Check that Ray's head and this driver's node are alive, at most once every
        `every_seconds`.

        Without a probe, calls in flight on a dead node may stay pending.

        Raises:
            PoolDead: the head or the node is dead.
        """
        if time.monotonic() - self._probed_at < every_seconds:
            return
        self._probed_at = time.monotonic()
        # Not through Ray's own calls: on a dead head they end this process after 60 s
        if not is_listening(self.gcs_address, _PROBE_SECONDS):
            raise PoolDead(f"Ray is gone: its head does not answer. {RESUME_ADVICE}")
        # The head notices a dead node only after half a minute, so the node is asked directly
        if not is_listening(self._raylet, _PROBE_SECONDS):
            raise PoolDead(f"Ray is gone: the node of this driver does not answer. {RESUME_ADVICE}")
        try:
            nodes = self.list_alive_nodes()
        except self._ray.exceptions.RayError as error:
            raise PoolDead(
                f"Ray is gone: its head does not answer ({type(error).__name__}). {RESUME_ADVICE}"
            ) from error
        if self._node not in nodes:
            raise PoolDead(f"Ray is gone: the node of this driver is dead. {RESUME_ADVICE}")

    def forget_token(self) -> None:
        """Have Ray read its settings and the token from the environment again, which it otherwise
        reads only once.
        """
        self._ray._raylet.Config.initialize("")
        self._ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _restore_sigterm_handler() -> None:
    """Restore Python's handler of SIGTERM.

    While Ray connects, it installs a handler below Python's that ends the process.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
