"""Starts a Ray cluster on this machine: its head under a supervisor, and limits on how long to
wait.

This module does not import Ray.

On a machine with more work than cores, Ray takes minutes to start; a start that makes progress is
waited for.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from proxies.core.redaction import LineRedactor
from proxies.external.log_file import RedactedLog
from proxies.external.supervised_command import SupervisedCommand
from sweeps.ray import head as ray_head
from sweeps.ray.own import ClusterFolder

IDLE_SECONDS = 60.0
"""Seconds without progress after which a start is given up. A worker process takes 1 to 5 s to
start, more on a busy machine.
"""
MOST_SECONDS = 900.0
"""Maximum duration in seconds of a start that makes progress; at a load of 24 on two cores a start
took 82 s.
"""

OBJECT_STORE_BYTES = 80 * 2**20
"""Size in bytes of Ray's object store. Ray's minimum is 75 MB; forerun sends a few kB."""
_POLL_SECONDS = 0.1


class StartTimeout:
    """A time limit on a wait: at most `IDLE_SECONDS` without progress, and at most `MOST_SECONDS`
    altogether.
    """

    def __init__(
        self,
        check: Callable[[], None],
        size: Callable[[], int] = int,
        *,
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to wait.

        Args:
            check: raises to end the wait.
            size: returns a number that changes while there is progress; constant by default.
            name: name of what is waited for first, for messages.
            clock: returns monotonic seconds.
        """
        self._check, self._size, self._clock = check, size, clock
        self.begin(name)

    def begin(self, name: str) -> None:
        """Begin to wait for something else."""
        self.name = name
        """Name of what is waited for."""
        self._began = self._moved_at = self._clock()
        self._last = self._size()

    def look(self) -> None:
        """Check that the wait may continue.

        Raises:
            TimeoutError: the wait has lasted too long.
            BaseException: whatever `check` raises.
        """
        self._check()
        now, size = self._clock(), self._size()
        if size != self._last:
            self._last, self._moved_at = size, now
        if now - self._moved_at > IDLE_SECONDS:
            raise TimeoutError(f"no progress for {IDLE_SECONDS:g} s")
        if now - self._began > MOST_SECONDS:
            raise TimeoutError(f"not within {MOST_SECONDS:g} s")


class Head:
    """Ray's head and all processes that it starts.

    They have ended when `close` returns, or when this process ends in any way.
    """

    def __init__(self, own: ClusterFolder, num_cpus: int) -> None:
        """Start the head's process. Raises OSError."""
        self._own, self._address = own, own.folder / "address"
        self._log = own.folder / "head.log"
        ray_dir = own.ray_dir or f"{os.environ.get('RAY_TMPDIR', '/tmp')}/ray"
        self._session = Path(ray_dir, "session_latest")
        arguments = [str(self._address), str(num_cpus), str(OBJECT_STORE_BYTES), own.ray_dir or ""]
        self._process = SupervisedCommand(
            [sys.executable, "-P", ray_head.__file__, *arguments],
            folder=Path.cwd(),
            environment=own.marked(os.environ),
            log=RedactedLog(self._log, LineRedactor()),
            grace_seconds=0.0,
        )

    def address(self, patience: StartTimeout) -> str:
        """Return `host:port` of the head, once it is up.

        Raises:
            RuntimeError: the head has ended.
            TimeoutError: the head makes no progress.
            BaseException: whatever `patience` raises.
        """
        while not self._address.exists():
            self.check()
            patience.look()
            time.sleep(_POLL_SECONDS)
        return self._address.read_text(encoding="utf-8")

    def check(self) -> None:
        """Raise RuntimeError if the head has ended, with the last line that it printed."""
        if self._process.wait(0.0):
            lines = [line.strip() for line in _read_lines(self._log) if line.strip()]
            raise RuntimeError(
                f"its head ended with {self._process.ended}: "
                f"{lines[-1] if lines else 'it printed nothing'}"
            )

    def size(self) -> int:
        """Return the total size of the cluster's files plus their number, which changes while Ray
        starts.
        """
        size = 0
        for folder, _, names in (*os.walk(self._own.folder), *os.walk(self._session)):
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
    try:
        return log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
