"""Files that are read in portions while another program is still writing them.

`GrowingFile` returns the new bytes, and `RowReader` is the base of readers of metrics, which return
new rows. This module and the modules of forerun that it imports need only the standard library.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path

from forerun._proxies.core.errors import InputError
from forerun._proxies.core.plain_files import open_plain

MAX_PENDING_BYTES = 64 * 2**20
"""Maximum size of an incomplete line or record; a larger one is an error."""
MAX_NAMES = 40
"""Maximum number of metric names that are kept per file, for messages."""


class MetricsError(InputError):
    """A trainer's metrics cannot be read, or are not those of the run."""


class GrowingFile:
    """A file in which each read continues where the last one ended.

    Reading starts again at the beginning if the file was replaced or truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at_end = False
        """Whether the last read reached the end of the file at that time."""
        self._offset = 0
        self._inode = 0

    def read(self, max_bytes: int) -> tuple[bytes, bool]:
        """Read the next bytes. A file that does not exist yet counts as empty.

        Returns:
            Up to `max_bytes` bytes, and whether they are the first of the file. If they are, the
            caller must forget incomplete data of earlier reads.

        Raises:
            OSError: The file cannot be read, or is not a regular file.
        """
        try:
            with open_plain(self.path) as file:
                stat = os.fstat(file.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._offset, self._inode = 0, stat.st_ino
                is_beginning = self._offset == 0
                file.seek(self._offset)
                data = file.read(max_bytes)
        except FileNotFoundError:
            self.at_end = True
            return b"", False
        self._offset += len(data)
        self.at_end = self._offset >= stat.st_size
        return data, is_beginning


class RowReader(ABC):
    """A reader of a metrics file, as rows of values that were logged together.

    The rows come in the order of the file. An incomplete row is returned when its end was written.
    """

    def __init__(self, path: Path, metric_names: frozenset[str]) -> None:
        self.names: set[str] = set()
        """Metric names in the file, for the message that a requested one is missing."""
        self.complaint = ""
        """Sentence about parts of the file that could not be read; empty if there are none."""
        self.num_beginnings = 0
        """Number of reads that started at the beginning of the file: more than 1 if the file was
        replaced or truncated."""
        self._file, self._metric_names = GrowingFile(path), metric_names
        # Bytes that are not parsed yet, and the place of the first of them in the file.
        self._pending, self._offset = b"", 0
        self._damage: MetricsError | None = None

    def read(self, max_bytes: int) -> list[dict[str, object]]:
        """Return the next rows, with the requested names only.

        If the file is damaged, the rows before the damage are returned, and the next call raises
        the error.

        Args:
            max_bytes: Maximum number of bytes to read.

        Raises:
            MetricsError: The file is damaged, or has another format.
            OSError: The file cannot be read.
        """
        data, is_beginning = self._file.read(max_bytes)
        if is_beginning:
            self._pending, self._offset, self._damage = b"", 0, None
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
        """Add the rows that are complete by now, and remove them from the pending bytes."""

    def end(self) -> list[dict[str, object]]:
        """Return the rows that are complete only because the trainer has ended, such as a last line
        without a line break.

        By default there are none: an incomplete record has no values.
        """
        return []

    @property
    def at_end(self) -> bool:
        """Whether the whole file has been read."""
        return self._file.at_end and self._damage is None
