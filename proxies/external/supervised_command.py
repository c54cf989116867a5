"""A command that dies with whoever began it: the asker's side of `proxies.external.keeper`. Standard library only."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from proxies.external import keeper
from proxies.external.log_file import RedactedLog

_STOP_SECONDS = 60.0  # a keeper gives up on what SIGKILL does not end
_START_SECONDS = 30.0


class SupervisedCommand:
    """One command under a keeper of its own."""

    def __init__(
        self, argv: list[str], *, folder: Path, environment: dict[str, str], log: RedactedLog, grace_seconds: float
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
        self._answer = b""
        # Isolated and without site-packages: a matter of 20 ms, and no file of ours or the user's in its way.
        command = [sys.executable, "-I", "-S", keeper.__file__, str(grace_seconds), *argv]
        self._log = log
        try:
            self._keeper = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.fileno()
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
                self.ended = _read_answer(self._answer)
                self._close()
        return True

    def stop(self) -> None:
        """End it in order, and wait until it is gone; after its own end, nothing."""
        assert self._keeper.stdin is not None
        if self.ended is None:
            with contextlib.suppress(OSError):  # it may just have ended
                os.write(self._keeper.stdin.fileno(), b"t")
            if not self.wait(_STOP_SECONDS):
                self.ended = "it did not end, not even by SIGKILL"
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
        return f"it {text}" if text else "its keeper was killed, and the command with it"
