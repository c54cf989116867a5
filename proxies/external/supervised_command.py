"""A command that ends with the process that started it.

The command runs under `forerun._proxies.external.command_supervisor`; this module is the side of
the parent. It and the modules of forerun that it imports need only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from forerun._proxies.external import command_supervisor
from forerun._proxies.external.log_file import RedactedLog

_STOP_SECONDS = command_supervisor.KILL_SECONDS + 5.0
"""Time to wait after the grace period, longer than the supervisor waits after SIGKILL."""
_START_SECONDS = 30.0
"""Time limit for the start of the supervisor."""


class SupervisedCommand:
    """A command that runs under a supervisor process of its own."""

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
            OSError: The supervisor cannot be started.
        """
        self.exit_status: int | str | None = None
        """Exit code, -N for signal N, or the reason why there is none; None while any process of
        the command runs."""
        self.end_time: float | None = None
        """Time at which the end was noticed (`time.monotonic`); the log may be completed later."""
        self.supervisor_killed = False
        """Whether the supervisor was killed from outside, so that the command's exit code is
        unknown."""
        self._grace_seconds = grace_seconds
        self._answer = b""
        # Isolated and without site-packages: it starts in 20 ms, and cannot import a file of the
        # user by mistake.
        command = [
            sys.executable,
            "-I",
            "-S",
            command_supervisor.__file__,
            str(grace_seconds),
            *argv,
        ]
        self._log = log
        try:
            self._supervisor = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log.fileno(),
            )
        finally:
            log.release()
        # The first process forks and ends at once: the supervisor is not a child of this process.
        self._supervisor.wait(_START_SECONDS)

    def __del__(self) -> None:
        """Close the supervisor's standard input, which makes it kill the command."""
        if hasattr(self, "_supervisor"):
            self._close()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the command and all processes that it started.

        Args:
            seconds: Maximum time to wait.

        Returns:
            Whether they have ended.
        """
        assert self._supervisor.stdout is not None
        deadline = time.monotonic() + seconds
        while self.exit_status is None:
            remaining_seconds = max(0.0, deadline - time.monotonic())
            if not select.select([self._supervisor.stdout], [], [], remaining_seconds)[0]:
                return False
            part = os.read(self._supervisor.stdout.fileno(), 4096)
            self._answer += part
            if not part:
                self._end()
        return True

    def stop(self) -> None:
        """Stop the command by SIGTERM, then by SIGKILL, and wait until it has ended.

        Does nothing if it has ended already.
        """
        assert self._supervisor.stdin is not None
        if self.exit_status is None:
            with contextlib.suppress(OSError):  # the supervisor may have ended just now
                os.write(self._supervisor.stdin.fileno(), b"t")
            if not self.wait(self._grace_seconds + _STOP_SECONDS):
                self._end()

    def _end(self) -> None:
        """Read the supervisor's answer; there is none if it was killed, which ends the command."""
        self.end_time = time.monotonic()
        self.supervisor_killed = not self._answer
        self.exit_status = _read_answer(self._answer)
        self._close()

    def _close(self) -> None:
        for pipe in (self._supervisor.stdin, self._supervisor.stdout):
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
            else "forerun's supervisor of the command was killed from outside, and the command "
            "with it"
        )
