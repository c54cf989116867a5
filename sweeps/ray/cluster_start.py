"""Start of a Ray cluster on this machine: its head under a supervisor, and limits on how long to
wait.

On a machine with more work than cores, Ray takes minutes to start. The wait therefore ends early
only if a start makes no progress. This module does not import Ray.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from forerun._proxies.core.redaction import LineRedactor
from forerun._proxies.external.log_file import RedactedLog
from forerun._proxies.external.supervised_command import SupervisedCommand
from forerun._sweeps.ray import head as ray_head
from forerun._sweeps.ray.cluster_folder import ClusterFolder

MAX_IDLE_SECONDS = 60.0
"""Seconds without progress after which a start is given up. A worker process takes 1 to 5 s to
start, more on a busy machine.
"""
MAX_START_SECONDS = 900.0
"""Maximum duration in seconds of a start that makes progress; at a load of 24 on two cores a start
took 82 s.
"""

OBJECT_STORE_BYTES = 80 * 2**20
"""Size in bytes of Ray's object store. Ray's minimum is 75 MB; forerun sends a few kB."""
_POLL_SECONDS = 0.1


class StartTimeout:
    """A time limit on a wait: at most `MAX_IDLE_SECONDS` without progress, and at most
    `MAX_START_SECONDS` altogether. `begin` starts both limits anew for the next wait.
    """

    def __init__(
        self,
        check: Callable[[], None],
        measure_progress: Callable[[], int] = int,
        *,
        name: str,
    ) -> None:
        """Begin to wait.

        Args:
            check: raises to end the wait.
            measure_progress: returns a number that changes while there is progress. The default,
                `int`, always returns 0.
            name: name, for messages, of what the caller waits for first.
        """
        self._check, self._measure_progress = check, measure_progress
        self.begin(name)

    def begin(self, name: str) -> None:
        """Begin to wait for something else; `name` is its name in messages."""
        self.name = name
        """Name of what the caller waits for."""
        self._began = self._progressed_at = time.monotonic()
        self._last_progress = self._measure_progress()

    def check(self) -> None:
        """Check that the wait may continue.

        Raises:
            TimeoutError: the wait has lasted too long.
            BaseException: whatever `check` raises.
        """
        self._check()
        now, progress = time.monotonic(), self._measure_progress()
        if progress != self._last_progress:
            self._last_progress, self._progressed_at = progress, now
        if now - self._progressed_at > MAX_IDLE_SECONDS:
            raise TimeoutError(f"no progress for {MAX_IDLE_SECONDS:g} s")
        if now - self._began > MAX_START_SECONDS:
            raise TimeoutError(f"not within {MAX_START_SECONDS:g} s")


class RayHead:
    """Ray's head and all processes that it starts.

    All of them have ended when `close` returns, or when this process ends in any way.
    """

    def __init__(self, cluster_folder: ClusterFolder, num_cpus: int) -> None:
        """Start the head's process. Raises OSError."""
        self._cluster_folder, self._address = cluster_folder, cluster_folder.folder / "address"
        self._log = cluster_folder.folder / "head.log"
        ray_dir = cluster_folder.ray_dir or f"{os.environ.get('RAY_TMPDIR', '/tmp')}/ray"
        self._session = Path(ray_dir, "session_latest")
        self._process = SupervisedCommand(
            [
                sys.executable,
                "-P",
                ray_head.__file__,
                str(self._address),
                str(num_cpus),
                str(OBJECT_STORE_BYTES),
                cluster_folder.ray_dir or "",
            ],
            folder=Path.cwd(),
            environment=cluster_folder.make_environment(),
            log=RedactedLog(self._log, LineRedactor()),
            grace_seconds=0.0,
        )

    def await_address(self, timeout: StartTimeout) -> str:
        """Return `host:port` of the head, once it is up.

        Raises:
            RuntimeError: the head has ended.
            TimeoutError: the head makes no progress.
            BaseException: whatever `timeout` raises.
        """
        while not self._address.exists():
            self.check()
            timeout.check()
            time.sleep(_POLL_SECONDS)
        return self._address.read_text(encoding="utf-8")

    def check(self) -> None:
        """Raise RuntimeError if the head has ended, with the last line that it printed."""
        if self._process.wait(0.0):
            lines = [line.strip() for line in _read_lines(self._log) if line.strip()]
            raise RuntimeError(
                f"its head ended with {self._process.exit_status}: "
                f"{lines[-1] if lines else 'it printed nothing'}"
            )

    def measure_size(self) -> int:
        """Return the total size of the cluster's files plus their number, which changes while Ray
        starts.
        """
        size = 0
        for folder, _, names in (*os.walk(self._cluster_folder.folder), *os.walk(self._session)):
            for name in names:
                with contextlib.suppress(OSError):
                    size += 1 + Path(folder, name).lstat().st_size
        return size

    def keep_log(self) -> Path:
        """Copy what the head printed, with secrets removed, to a file that outlives the cluster.

        Returns:
            The path of the file.

        Raises:
            OSError: the file cannot be written.
        """
        handle, name = tempfile.mkstemp(prefix="forerun-ray-", suffix=".log")
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.writelines(f"{line}\n" for line in _read_lines(self._log))
        return Path(name)

    def close(self) -> None:
        """End the head and all processes that it has started."""
        self._process.stop()


def _read_lines(log: Path) -> list[str]:
    """Return the lines of a log, none if it cannot be read."""
    try:
        return log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
