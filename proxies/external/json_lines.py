"""A JSONL file that a trainer appends to, as rows of metrics. Standard library only."""

from __future__ import annotations

import json
import re

from proxies.external.growing import MAX_NAMES, MAX_PENDING_BYTES, MetricsError, Rows

# Python's `f"{loss}"` and C's printf write these; JSON knows none, and Python's own reader only NaN and Infinity.
_BARE = re.compile(r"(?<=[:,\[\s])([-+]?)(nan|inf|infinity)(?=[,}\]\s])", re.IGNORECASE)


class JsonLines(Rows):
    """Objects, one a line. What is no object is passed over and counted; nested keys are written with dots."""

    _num_odd = 0

    def _take(self, rows: list[dict[str, object]]) -> None:
        *lines, self._pending = self._pending.split(b"\n")
        rows += [row for line in lines if (row := self._row(line))]
        if len(self._pending) > MAX_PENDING_BYTES:
            raise MetricsError(f"no end of line within {MAX_PENDING_BYTES} bytes: this is no JSONL file")

    def end(self) -> list[dict[str, object]]:
        """See `Rows`: the last line, if it is whole but for its end."""
        line, self._pending = self._pending, b""
        return [row] if (row := self._row(line)) else []

    def _row(self, line: bytes) -> dict[str, object]:
        if not line.strip():
            return {}
        found = _parsed(line.decode("utf-8", errors="replace"))
        if not isinstance(found, dict):
            self._num_odd += 1
            self.complaint = f"{self._num_odd} lines are no JSON objects"
            return {}
        flat = _flat(found)
        if len(self.names) < MAX_NAMES:
            self.names.update(name for name, value in flat.items() if not isinstance(value, dict))
        return {name: value for name, value in flat.items() if name in self._wanted}


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(_BARE.sub(lambda m: m[1].strip("+") + ("NaN" if m[2][0] in "nN" else "Infinity"), line))
    except (ValueError, RecursionError):
        return None


def _flat(found: dict[str, object], prefix: str = "") -> dict[str, object]:
    """What lies in an object, also deeper down, by its path with dots; a name that has dots itself comes first."""
    flat: dict[str, object] = {}
    for key, value in found.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {}
    return flat | {prefix + key: value for key, value in found.items()}
