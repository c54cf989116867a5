"""A command that dies with whoever began it: the asker's side of `proxies.external.keeper`.
Standard library only.
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

_STOP_SECONDS = 35.0  # after the grace; a keeper gives up after 30 s on what SIGKILL does not end
_START_SECONDS = 30.0
_KILL_SECONDS = 5.0
_POLL_SECONDS = 0.02
_TOKEN_VARIABLE = "FORERUN_COMMAND"
"""Environment variable of the keeper and of the command's processes; it holds the token of the
command."""


class SupervisedCommand:
    """One command under a keeper of its own."""

    def __init__(
        self,
        argv: list[str],
        *,
        folder: Path,
        environment: dict[str, str],
        log: RedactedLog,
        grace_seconds: float,
    ) -> None:
        """Begin.

        Args:
            argv: the program and its arguments.
            folder: where it runs.
            environment: all of its environment.
            log: takes its output and error, and is closed when it has ended.
            grace_seconds: between SIGTERM and SIGKILL, at a `stop` and for what it leaves behind.

        Raises:
            OSError: the keeper cannot be started.
        """
        self.ended: int | str | None = None
        """An exit code, -N for signal N, or why there is none; None while anything of it runs."""
        self.end_time: float | None = None
        """Time at which the end was noticed (`time.monotonic`); the log may be complete only
        later."""
        self.keeper_killed = False
        """Whether the keeper was killed from outside, so that the command's own end is unknown."""
        self._token, self._grace_seconds = secrets.token_hex(16), grace_seconds
        self._answer = b""
        # Isolated and without site-packages: a matter of 20 ms, and no file of ours or the user's
        # in its way.
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
        self._keeper.wait(_START_SECONDS)  # it forks at once, and lives on as nobody's child

    def __del__(self) -> None:
        """Nobody looks after it any more: let go of the lifeline, and it is killed."""
        if hasattr(self, "_keeper"):
            self._close()

    def wait(self, seconds: float) -> bool:
        """Whether the command and all it started are gone, after at most that long."""
        assert self._keeper.stdout is not None
        until = time.monotonic() + seconds
        while self.ended is None:
            left = max(0.0, until - time.monotonic())
            if not select.select([self._keeper.stdout], [], [], left)[0]:
                return False
            part = os.read(self._keeper.stdout.fileno(), 4096)
            self._answer += part
            if not part:
                self._end()
        return True

    def stop(self) -> None:
        """End it in order, and wait until it is gone; after its own end, nothing."""
        assert self._keeper.stdin is not None
        if self.ended is None:
            with contextlib.suppress(OSError):  # it may just have ended
                os.write(self._keeper.stdin.fileno(), b"t")
            _signal_all(self._token, signal.SIGCONT)  # a keeper that somebody stopped keeps no time
            if not self.wait(self._grace_seconds + _STOP_SECONDS):
                self._end()

    def _end(self) -> None:
        """Read the keeper's answer. If it gave none, kill the command's processes, which it has
        left.
        """
        self.end_time = time.monotonic()
        if not self._answer:
            self.keeper_killed = True
            until = self.end_time + _KILL_SECONDS
            while _signal_all(self._token, signal.SIGKILL) and time.monotonic() < until:
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
    """Signal the keeper and the command's processes, on Linux; return whether any of them runs."""
    variable = f"{_TOKEN_VARIABLE}={token}".encode()
    is_running = False
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if variable in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), number)
                is_running = True
    return is_running
