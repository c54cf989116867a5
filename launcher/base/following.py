"""A run's `metrics.jsonl`, followed while it is written, also over rewinds. Standard library only."""

from __future__ import annotations

from pathlib import Path

from launcher.base.metrics import METRICS_FILE
from proxies.core import canon
from proxies.core.canon import Json
from proxies.external.growing import Growing

_PORTION_BYTES = 8 * 2**20
_MAX_LINE_BYTES = 64 * 2**20
"""A longer line is none: what is pending of it is dropped."""


class Following:
    """Reads on where it stopped; lines that are not whole wait for their rest, lines that are none are skipped."""

    def __init__(self, run_dir: Path) -> None:
        self._file = Growing(run_dir / METRICS_FILE)
        self._pending = b""

    @property
    def at_end(self) -> bool:
        """Whether all that was there has been read."""
        return self._file.at_end

    def read(self) -> tuple[list[dict[str, Json]], bool]:
        """The next lines, and whether they are the file's first: it was replaced, by a shorter one as a rule.

        Raises:
            OSError: it cannot be read; a file that is not there yet is empty.
        """
        data, begins = self._file.read(_PORTION_BYTES)
        if begins:
            self._pending = b""
        *whole, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > _MAX_LINE_BYTES:
            self._pending = b""
        return [value for line in whole if isinstance(value := _parsed(line), dict)], begins


def _parsed(line: bytes) -> Json:
    try:
        return canon.parse(line)
    except canon.CanonError:
        return None
