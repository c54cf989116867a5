"""Logs of commands: the output of a command, stored without secrets.

This module and the modules of forerun that it imports need only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from forerun._proxies.core.plain_files import open_plain, open_to_append

LOG_FILE = "log.txt"
_MAX_LINE_BYTES = 2**16
"""Maximum length of a line that waits for its end; a longer one is redacted and stored in
pieces."""
_READ_BYTES = 2**16  # default size of a pipe in Linux
_MAX_LINE_CHARS, _TAIL_BYTES = 200, 16384
"""Maximum length of a line in a message, and size of the end of a log from which these lines are
taken."""
NUM_LINES = 8
"""Number of last lines of a log that a message shows."""


class RedactedLog:
    """A log file behind a pipe: lines written to `fileno()` are redacted, then stored.

    A thread redacts the lines, about 30 MB/s; a command that prints faster waits for the thread.
    Secrets are removed before anything is on disk, so they are not there either if the reader or
    the writer is killed. The one exception is a line longer than `_MAX_LINE_BYTES`. It is redacted
    in pieces, so a secret across the end of a piece may be stored. If the reader is killed, lines
    that it has not stored are lost, and the writers get SIGPIPE.
    """

    def __init__(self, path: Path, redact: Callable[[str], str], *, append: bool = False) -> None:
        """Open the log, and start the thread.

        Args:
            path: Path of the log.
            redact: Function that returns lines without their secrets. It gets one or more complete
                lines at a time, in order, or a piece of a line longer than `_MAX_LINE_BYTES`.
            append: Whether to keep the existing content of the log.

        Raises:
            OSError: The log cannot be written.
        """
        self._file = open_to_append(path)
        if not append and path.is_file():
            os.ftruncate(self._file.fileno(), 0)
        self._redact = redact
        self._source, self._sink = os.pipe()
        self._thread = threading.Thread(target=self._redact_output, name="forerun-log", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the file descriptor to write to; a child process gets it as its output."""
        return self._sink

    def release(self) -> None:
        """Close this process's copy of the descriptor, so that the log ends with its writers."""
        sink, self._sink = self._sink, -1
        if sink >= 0:
            os.close(sink)

    def close(self, seconds: float = 10.0) -> None:
        """Wait until all output is in the log.

        Args:
            seconds: Maximum time to wait for writers that are still running.
        """
        self.release()
        self._thread.join(seconds)

    def _redact_output(self) -> None:
        """Redact and store complete lines, and long ones in pieces, until the last writer ends."""
        unwritten = b""
        with self._file, os.fdopen(self._source, "rb", buffering=0) as source:
            while part := source.read(_READ_BYTES):
                unwritten += part
                cut = unwritten.rfind(b"\n") + 1
                if len(unwritten) - cut > _MAX_LINE_BYTES:
                    cut = len(unwritten)
                self._write(unwritten[:cut])
                unwritten = unwritten[cut:]
            self._write(unwritten)

    def _write(self, lines: bytes) -> None:
        """Redact and store lines; on a full disk they are lost, and the command continues."""
        if lines:
            text = lines.decode("utf-8", errors="surrogateescape")
            with contextlib.suppress(OSError):
                self._file.write(self._redact(text).encode("utf-8", errors="surrogateescape"))


def read_last_lines(log: Path) -> list[str]:
    """Return the last lines of a log that are not blank, without control characters.

    Returns none if the log cannot be read.
    """
    with contextlib.suppress(OSError):
        with open_plain(log) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
        lines = [
            "".join(char for char in line if char.isprintable())[:_MAX_LINE_CHARS]
            for line in text.splitlines()
        ]
        return [line for line in lines if line.strip()][-NUM_LINES:]
    return []


def describe_log_end(log: Path) -> str:
    """Return the last lines of a log as the end of a sentence."""
    lines = read_last_lines(log)
    return f"; {LOG_FILE} ends with: " + " | ".join(lines) if lines else f"; {LOG_FILE} is empty"
