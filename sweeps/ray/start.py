"""Starting a Ray cluster of our own: its head below a keeper, and how long to wait for it. No Ray
in here.

On a machine with more to do than cores, Ray's start takes minutes; one that gets on is waited for.
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
"""Without any progress, a start is given up. A worker process takes 1 to 5 s, more on a busy
machine."""
MOST_SECONDS = 900.0
"""A start that gets on is given up all the same: at a load of 24 on two cores it took 82 s."""

OBJECT_STORE_BYTES = 80 * 2**20
"""Ray's least is 75 MB; what we send is a few kB."""
_POLL_SECONDS = 0.1


class StartTimeout:
    """Says when a wait has lasted too long: nothing has moved for `IDLE_SECONDS`, or `MOST_SECONDS`
    are over.
    """

    def __init__(
        self,
        check: Callable[[], None],
        size: Callable[[], int] = int,
        *,
        what: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to wait.

        Args:
            check: raises what ends the wait.
            size: of something that changes while there is progress; by default nothing does.
            what: is waited for, first; in words.
            clock: monotonic seconds.
        """
        self._check, self._size, self._clock = check, size, clock
        self.begin(what)

    def begin(self, what: str) -> None:
        """Wait for something else from now on."""
        self.what = what
        """What is waited for."""
        self._began = self._moved_at = self._clock()
        self._last = self._size()

    def look(self) -> None:
        """Go on waiting. Raises TimeoutError, and what `check` does."""
        self._check()
        now, size = self._clock(), self._size()
        if size != self._last:
            self._last, self._moved_at = size, now
        if now - self._moved_at > IDLE_SECONDS:
            raise TimeoutError(f"no progress for {IDLE_SECONDS:g} s")
        if now - self._began > MOST_SECONDS:
            raise TimeoutError(f"not within {MOST_SECONDS:g} s")


class Head:
    """Ray's head, and all that it starts; gone when `close` returns, or when this process ends in
    whatever way.
    """

    def __init__(self, own: ClusterFolder, num_cpus: int) -> None:
        """Begin to start it. Raises OSError."""
        self._own, self._address = own, own.folder / "address"
        self._log = own.folder / "head.log"
        ray_dir = own.ray_dir or f"{os.environ.get('RAY_TMPDIR', '/tmp')}/ray"
        self._session = Path(ray_dir, "session_latest")
        arguments = [str(self._address), str(num_cpus), str(OBJECT_STORE_BYTES), own.ray_dir or ""]
        self._kept = SupervisedCommand(
            [sys.executable, "-P", ray_head.__file__, *arguments],
            folder=Path.cwd(),
            environment=own.marked(os.environ),
            log=RedactedLog(self._log, LineRedactor()),
            grace_seconds=0.0,
        )

    def address(self, patience: StartTimeout) -> str:
        """`host:port`, once it is up.

        Raises:
            RuntimeError: it has ended.
            TimeoutError: it does not get on; and what `patience` raises.
        """
        while not self._address.exists():
            self.check()
            patience.look()
            time.sleep(_POLL_SECONDS)
        return self._address.read_text(encoding="utf-8")

    def check(self) -> None:
        """Raises RuntimeError if it has ended, with the last line that it printed."""
        if self._kept.wait(0.0):
            said = [line.strip() for line in _lines(self._log) if line.strip()]
            raise RuntimeError(
                f"its head ended with {self._kept.ended}: "
                f"{said[-1] if said else 'it printed nothing'}"
            )

    def size(self) -> int:
        """Return the size of all its files, their number counted in: it changes while Ray
        starts.
        """
        size = 0
        for folder, _, names in (*os.walk(self._own.folder), *os.walk(self._session)):
            for name in names:
                with contextlib.suppress(OSError):
                    size += 1 + Path(folder, name).lstat().st_size
        return size

    def keep_log(self) -> Path:
        """What it printed, secrets removed, in a file that outlives the cluster; its path. Raises
        OSError.
        """
        handle, name = tempfile.mkstemp(prefix="forerun-ray-", suffix=".log")
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.writelines(f"{line}\n" for line in _lines(self._log))
        return Path(name)

    def close(self) -> None:
        """End it and all that it has started."""
        self._kept.stop()


def _lines(log: Path) -> list[str]:
    try:
        return log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
