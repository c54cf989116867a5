"""A command that ends with the process that started it.

The command runs under `proxies.external.keeper`; this module is the side of the parent. Standard
library only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from proxies.external import keeper
from proxies.external.log_file import RedactedLog

_STOP_SECONDS = 35.0
"""Time to wait after the grace period; the keeper gives up on processes 30 s after SIGKILL."""
_START_SECONDS = 30.0
_KILL_SECONDS = 5.0
_POLL_SECONDS = 0.02
_TOKEN_VARIABLE = "FORERUN_COMMAND"
"""Environment variable by which the processes of the keeper and the command are found; its value is
the command's token."""


class SupervisedCommand:
    """A command that runs under its own keeper process."""

    def __init__(
        self,
        argv: list[str],
        *,
        folder: Path,
        environment: dict[str, str],
        log: RedactedLog,
        grace_seconds: float,
    ) -> None:
        """Start the command.

        Args:
            argv: The program and its arguments.
            folder: Working folder of the command.
            environment: Complete environment of the command.
            log: Log for standard output and standard error; closed when the command has ended.
            grace_seconds: Time between SIGTERM and SIGKILL, in a `stop` and for processes that the
                command leaves running.

        Raises:
            OSError: The keeper cannot be started.
        """
        self.ended: int | str | None = None
        """Exit code, -N for signal N, or the reason why there is none; None while any process of
        the command runs."""
        self.end_time: float | None = None
        """Time at which the end was noticed (`time.monotonic`); the log may be completed later."""
        self.keeper_killed = False
        """Whether the keeper was killed from outside, so that the command's exit code is
        unknown."""
        self._token, self._grace_seconds = secrets.token_hex(16), grace_seconds
        self._answer = b""
        # Isolated and without site-packages: it starts in 20 ms, and cannot import a file of the
        # user by mistake.
        command = [sys.executable, "-I", "-S", keeper.__file__, str(grace_seconds), *argv]
        self._log = log
        try:
            self._keeper = subprocess.Popen(
                command,
                cwd=folder,
                env={**environment, _TOKEN_VARIABLE: self._token},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log.fileno(),
            )
        finally:
            log.release()
        # The first process forks and ends at once; the keeper is then not a child of this process.
        self._keeper.wait(_START_SECONDS)

    def __del__(self) -> None:
        """Close the keeper's standard input, which makes it kill the command."""
        if hasattr(self, "_keeper"):
            self._close()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the command and all processes that it started.

        Args:
            seconds: Maximum time to wait.

        Returns:
            Whether they have ended.
        """
        assert self._keeper.stdout is not None
        deadline = time.monotonic() + seconds
        while self.ended is None:
            remaining_seconds = max(0.0, deadline - time.monotonic())
            if not select.select([self._keeper.stdout], [], [], remaining_seconds)[0]:
                return False
            part = os.read(self._keeper.stdout.fileno(), 4096)
            self._answer += part
            if not part:
                self._end()
        return True

    def stop(self) -> None:
        """Stop the command by SIGTERM, then by SIGKILL, and wait until it has ended.

        Does nothing if it has ended already.
        """
        assert self._keeper.stdin is not None
        if self.ended is None:
            with contextlib.suppress(OSError):  # the keeper may have ended just now
                os.write(self._keeper.stdin.fileno(), b"t")
            # A keeper that was suspended by SIGSTOP has to be resumed first.
            _signal_all(self._token, signal.SIGCONT)
            if not self.wait(self._grace_seconds + _STOP_SECONDS):
                self._end()

    def _end(self) -> None:
        """Read the keeper's answer; if there is none, kill the processes that it has left."""
        self.end_time = time.monotonic()
        if not self._answer:
            self.keeper_killed = True
            deadline = self.end_time + _KILL_SECONDS
            while _signal_all(self._token, signal.SIGKILL) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        self.ended = _read_answer(self._answer)
        self._close()

    def _close(self) -> None:
        for pipe in (self._keeper.stdin, self._keeper.stdout):
            if pipe is not None:
                pipe.close()
        self._log.close()


def _read_answer(answer: bytes) -> int | str:
    text = answer.decode("utf-8", errors="replace")
    try:
        return int(text)
    except ValueError:
        return (
            f"it {text}"
            if text
            else "forerun's keeper of the command was killed from outside, and the command with it"
        )


def _signal_all(token: str, number: int) -> bool:
    """Send a signal to the keeper and all processes of the command; return whether there are any.

    Works on Linux only.
    """
    variable = f"{_TOKEN_VARIABLE}={token}".encode()
    is_running = False
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if variable in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), number)
                is_running = True
    return is_running
