"""A JSONL file that a trainer appends to, as rows of metrics. Standard library only."""

from __future__ import annotations

import json
import re
from pathlib import Path

from proxies.external.growing import MAX_PENDING_BYTES, Growing, MetricsError

_MAX_NAMES = 40
# Python's `f"{loss}"` and C's printf write these; JSON knows none, and Python's own reader only NaN and Infinity.
_BARE = re.compile(r"(?<=[:,\[\s])([-+]?)(nan|inf|infinity)(?=[,}\]\s])", re.IGNORECASE)


class JsonLines:
    """Objects, one a line. What is no object is passed over and counted; nested keys are written with dots."""

    def __init__(self, path: Path, wanted: frozenset[str]) -> None:
        self.names: set[str] = set()
        self.complaint = ""
        self._file, self._wanted = Growing(path), wanted
        self._nested = [(key, key.partition(".")[0]) for key in wanted if "." in key]
        self._pending, self._num_odd = b"", 0

    def read(self, max_bytes: int) -> list[dict[str, object]]:
        """See `Rows`; a line without its end waits for it."""
        data, begins = self._file.read(max_bytes)
        if begins:
            self._pending = b""
        *lines, rest = (self._pending + data).split(b"\n") if b"\n" in data else (self._pending + data,)
        self._pending = rest
        if len(rest) > MAX_PENDING_BYTES:
            raise MetricsError(f"no end of line within {MAX_PENDING_BYTES} bytes: this is no JSONL file")
        return [row for line in lines if (row := self._row(line))]

    def end(self) -> list[dict[str, object]]:
        """See `Rows`: the last line, if it is whole but for its end."""
        line, self._pending = self._pending, b""
        return [row] if (row := self._row(line)) else []

    @property
    def at_end(self) -> bool:
        """See `Rows`."""
        return self._file.at_end

    def _row(self, line: bytes) -> dict[str, object]:
        if not line.strip():
            return {}
        found = _parsed(line.decode("utf-8", errors="replace"))
        if not isinstance(found, dict):
            self._num_odd += 1
            self.complaint = f"{self._num_odd} lines are no JSON objects"
            return {}
        if len(self.names) < _MAX_NAMES:
            self.names.update(_paths(found))
        row = {key: value for key, value in found.items() if key in self._wanted}
        for key, first in self._nested:
            if first in found and key not in row:
                row.update((key, value) for value in _look(found, key))
        return row


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(_BARE.sub(lambda m: m[1].strip("+") + ("NaN" if m[2][0] in "nN" else "Infinity"), line))
    except (ValueError, RecursionError):
        return None


def _look(found: dict[str, object], key: str) -> list[object]:
    """The value under a path; a list of one, or of none."""
    here: object = found
    for part in key.split("."):
        if not isinstance(here, dict) or part not in here:
            return []
        here = here[part]
    return [here]


def _paths(found: dict[str, object], prefix: str = "") -> list[str]:
    """Names of what lies in an object, nested ones with dots."""
    names = []
    for key, value in found.items():
        names += _paths(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
    return names
