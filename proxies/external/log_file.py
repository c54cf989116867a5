"""What a command prints, written into a log without its secrets, and how a log ends. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from proxies.core.plain_files import open_plain, open_to_append

LOG_FILE = "log.txt"
_LONGEST_LINE_BYTES = 2**16  # what a command prints without end is written in such pieces
_READ_BYTES = 2**16
_PIPE_BYTES = 2**20  # the largest that Linux grants everybody
MAX_PENDING_BYTES = 2**26
"""Output that waits to be redacted; what a command prints beyond it is left out of the log, which says so."""
_NUM_LINES, _LINE_CHARS, _TAIL_BYTES = 8, 200, 16384


class RedactedLog:
    """A log file behind a pipe: whoever writes to `fileno()` is read line by line, and `redact` of it is what is kept.

    Nothing is on disk before its secrets are taken out, so a kill of reader or writer leaves none there. A reader that
    is killed loses the lines still in the pipe, and its writers with it: they get SIGPIPE. One thread reads, another
    redacts: a writer never waits for the second.
    """

    def __init__(self, path: Path, redact: Callable[[str], str], *, append: bool = False) -> None:
        """Open the log and begin to read.

        Args:
            path: the log.
            redact: gives a line without its secrets; called in the order of the lines.
            append: keep what the log holds.

        Raises:
            OSError: the log cannot be written.
        """
        self._file = open_to_append(path)
        if not append and path.is_file():
            os.ftruncate(self._file.fileno(), 0)
        self._redact = redact
        self._source, self._sink = os.pipe()
        with contextlib.suppress(OSError):  # the limit may be lower here
            fcntl.fcntl(self._sink, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._parts: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._num_read, self._num_redacted = 0, 0  # bytes; each written by one thread
        threading.Thread(target=self._read, name="forerun-log-reader", daemon=True).start()
        self._thread = threading.Thread(target=self._pump, name="forerun-log", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Where writers write; a child process inherits it as its output."""
        return self._sink

    def release(self) -> None:
        """Let go of our own end, once the writers have theirs: the log ends when they do."""
        sink, self._sink = self._sink, -1
        if sink >= 0:
            os.close(sink)

    def close(self, seconds: float = 10.0) -> None:
        """Wait until what was printed is in the log: a writer that lives on is not waited for longer than `seconds`."""
        self.release()
        self._thread.join(seconds)

    def _read(self) -> None:
        """Take what is written as soon as there is any, until nobody can write any more."""
        num_left_out = 0
        with os.fdopen(self._source, "rb", buffering=0) as source:
            while part := source.read(_READ_BYTES):
                if self._num_read - self._num_redacted > MAX_PENDING_BYTES:
                    num_left_out += len(part)
                    continue
                if num_left_out:
                    self._parts.put(f"\n[forerun: {num_left_out} bytes of output are left out here]\n".encode())
                    num_left_out = 0
                self._num_read += len(part)
                self._parts.put(part)
        if num_left_out:
            self._parts.put(f"\n[forerun: {num_left_out} bytes of output are left out here]\n".encode())
        self._parts.put(None)

    def _pump(self) -> None:
        held = b""
        with self._file:
            while (part := self._parts.get()) is not None:
                self._num_redacted += len(part)
                held += part
                cut = held.rfind(b"\n") + 1
                if len(held) - cut > _LONGEST_LINE_BYTES:
                    cut = len(held)
                self._write(held[:cut])
                held = held[cut:]
            self._write(held)

    def _write(self, lines: bytes) -> None:
        """Whole lines, redacted; on a full disk they are lost, and the command continues."""
        with contextlib.suppress(OSError):
            self._file.write(b"\n".join(self._clean(line) for line in lines.split(b"\n")))

    def _clean(self, line: bytes) -> bytes:
        if not line:
            return line
        text = line.decode("utf-8", errors="surrogateescape")
        return self._redact(text).encode("utf-8", errors="surrogateescape")


def log_end(log: Path) -> str:
    """The last lines of a log, as a part of a sentence."""
    with contextlib.suppress(OSError):
        with open_plain(log) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
        lines = ["".join(c for c in line if c.isprintable())[:_LINE_CHARS] for line in text.splitlines()]
        if lines := [line for line in lines if line.strip()][-_NUM_LINES:]:
            return f"; {LOG_FILE} ends with: " + " | ".join(lines)
    return f"; {LOG_FILE} is empty"
