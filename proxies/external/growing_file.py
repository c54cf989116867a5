"""A file that somebody else is still writing, read on in portions. Standard library only."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path

from proxies.core.errors import InputError
from proxies.core.plain_files import open_plain

MAX_PENDING_BYTES = 64 * 2**20
"""A line or record longer than this is none."""
MAX_NAMES = 40
"""So many of the names seen in a file are kept, for a message."""


class MetricsError(InputError):
    """A trainer's metrics that cannot be read, or are not those of the run asked for."""


class GrowingFile:
    """Reads on where it stopped; begins again when the file was replaced or cut."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at_end = False
        """Whether the last read reached the end the file had then."""
        self._offset = 0
        self._inode = 0

    def read(self, max_bytes: int) -> tuple[bytes, bool]:
        """Up to `max_bytes` more, and whether they are the file's first: of a new file, what was pending is void.

        Raises:
            OSError: it cannot be read, or is no plain file; a file that is not there yet is empty.
        """
        try:
            with open_plain(self.path) as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._offset, self._inode = 0, found.st_ino
                begins = self._offset == 0
                file.seek(self._offset)
                data = file.read(max_bytes)
        except FileNotFoundError:
            self.at_end = True
            return b"", False
        self._offset += len(data)
        self.at_end = self._offset >= found.st_size
        return data, begins


class Rows(ABC):
    """A metrics file as rows of what was logged together, in its order: what is not whole yet waits for its rest."""

    def __init__(self, path: Path, wanted: frozenset[str]) -> None:
        self.names: set[str] = set()
        """Names seen in it, for the message that a wanted one is missing."""
        self.complaint = ""
        """What in the file could not be read so far."""
        self.num_beginnings = 0
        """Number of reads that began at the file's start: more after it was replaced or cut."""
        self._file, self._wanted = GrowingFile(path), wanted
        self._pending, self._at = b"", 0  # bytes not read yet, and the file's offset of the first
        self._damage: MetricsError | None = None

    def read(self, max_bytes: int) -> list[dict[str, object]]:
        """The next rows, wanted names only, from up to that many bytes. Damage is raised after the rows before it.

        Raises:
            MetricsError, OSError: the file is not what it should be, or cannot be read.
        """
        data, begins = self._file.read(max_bytes)
        if begins:
            self._pending, self._at, self._damage = b"", 0, None
            self.num_beginnings += 1
        if self._damage is not None:
            raise self._damage
        self._pending += data
        rows: list[dict[str, object]] = []
        try:
            self._take(rows)
        except MetricsError as error:
            if not rows:
                raise
            self._damage = error
        return rows

    @abstractmethod
    def _take(self, rows: list[dict[str, object]]) -> None:
        """Add the rows that are whole by now, and drop these from what is pending."""

    def end(self) -> list[dict[str, object]]:
        """The rows that only a file nobody writes any more gives: what is torn holds nothing."""
        return []

    @property
    def at_end(self) -> bool:
        """Whether all that was there has been read."""
        return self._file.at_end and self._damage is None
