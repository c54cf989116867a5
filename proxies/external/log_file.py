"""Logs of commands: what a command prints, stored without secrets.

Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

from proxies.core.notation import counted
from proxies.core.plain_files import open_plain, open_to_append

LOG_FILE = "log.txt"
_MAX_LINE_BYTES = 2**16
"""Maximum length of a line; a longer one is written in pieces."""
_READ_BYTES = 2**16  # default size of a pipe in Linux
_PIPE_BYTES = 2**20  # maximum size of a pipe for unprivileged users in Linux
MAX_PENDING_BYTES = 2**26
"""Maximum size of output that waits to be redacted; output beyond it is left out of the log, with a
note."""
_MAX_LINE_CHARS, _TAIL_BYTES = 200, 16384
NUM_LINES = 8
"""Number of last lines of a log that a message shows."""


class RedactedLog:
    """A log file behind a pipe: lines written to `fileno()` are redacted, then stored.

    One thread reads and another redacts, so that a command does not wait for the redaction of its
    output. Secrets are removed before anything is on disk, so a kill of reader or writer leaves
    none there. If the reader is killed, lines that it has not stored are lost, and the writers get
    SIGPIPE.
    """

    def __init__(self, path: Path, redact: Callable[[str], str], *, append: bool = False) -> None:
        """Open the log, and start the threads.

        Args:
            path: Path of the log.
            redact: Returns lines without their secrets; it gets one or more complete lines at a
                time, in order.
            append: Whether to keep the existing content of the log.

        Raises:
            OSError: The log cannot be written.
        """
        self._file = open_to_append(path)
        if not append and path.is_file():
            os.ftruncate(self._file.fileno(), 0)
        self._redact = redact
        self._source, self._sink = os.pipe()
        with contextlib.suppress(OSError):  # the machine may allow less
            fcntl.fcntl(self._sink, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._pending, self._num_pending, self._ended = list[bytes](), 0, False
        self._changed = threading.Condition()
        threading.Thread(target=self._read, name="forerun-log-reader", daemon=True).start()
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

    def _read(self) -> None:
        """Read output until the last writer ends, without waiting for its redaction."""
        num_left_out = 0
        with os.fdopen(self._source, "rb", buffering=0) as source:
            while part := source.read(_READ_BYTES):
                if self._num_pending > MAX_PENDING_BYTES:
                    num_left_out += len(part)
                    continue
                self._hand_over(_note_gap(num_left_out) + part)
                num_left_out = 0
        self._hand_over(_note_gap(num_left_out))
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _hand_over(self, part: bytes) -> None:
        """Pass output to the thread that redacts it."""
        with self._changed:
            self._pending.append(part)
            self._num_pending += len(part)
            self._changed.notify()

    def _redact_output(self) -> None:
        """Redact and store complete lines until the output ends."""
        unwritten = b""
        with self._file:
            while part := self._take():
                unwritten += part
                cut = unwritten.rfind(b"\n") + 1
                if len(unwritten) - cut > _MAX_LINE_BYTES:
                    cut = len(unwritten)
                self._write(unwritten[:cut])
                unwritten = unwritten[cut:]
            self._write(unwritten)

    def _take(self) -> bytes:
        """Wait for output and return all of it; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: any(self._pending) or self._ended)
            part = b"".join(self._pending)
            self._pending.clear()
            self._num_pending = 0
        return part

    def _write(self, lines: bytes) -> None:
        """Redact and store lines; on a full disk they are lost, and the command continues."""
        if lines:
            text = lines.decode("utf-8", errors="surrogateescape")
            with contextlib.suppress(OSError):
                self._file.write(self._redact(text).encode("utf-8", errors="surrogateescape"))


def _note_gap(num_bytes: int) -> bytes:
    """Return a line for the log about output that was left out; empty if none was."""
    return (
        f"\n[forerun: left out here: {counted(num_bytes, 'byte')} of output]\n".encode()
        if num_bytes
        else b""
    )


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


def log_end(log: Path) -> str:
    """Return the last lines of a log as the end of a sentence."""
    lines = read_last_lines(log)
    return f"; {LOG_FILE} ends with: " + " | ".join(lines) if lines else f"; {LOG_FILE} is empty"
