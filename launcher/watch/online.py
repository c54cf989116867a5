"""A run as W&B has it online, asked anew from where it was left, at most every `LEAST_SECONDS`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.dashboards import fetch_history
from launcher.watch.keys import TIME, UNASKED_STEP

LEAST_SECONDS = 30.0
"""Each asking starts a process and takes seconds."""


class OnlineRun:
    """See `launcher.watch.readings.Source`."""

    def __init__(self, run_path: str, wanted: frozenset[str]) -> None:
        """`run_path` is `entity/project/run`."""
        self._run_path, self._wanted = run_path, wanted
        self._rows: list[dict[str, Any]] = []
        self._asked_at = -LEAST_SECONDS

    def read(self, *, last: bool) -> None:
        """See `Source`; what W&B shows of a run never shrinks.

        Raises:
            DashboardError: it does not answer.
        """
        now = time.monotonic()
        if not last and now - self._asked_at < LEAST_SECONDS:
            return
        self._asked_at = now
        after = self._rows[-1][UNASKED_STEP] + 1 if self._rows else 0
        self._rows += fetch_history(self._run_path, self._wanted, after)

    def batches(self) -> list[tuple[str, Sequence[Mapping[str, Any]]]]:
        """See `Source`."""
        return [(self._run_path, self._rows)] if self._rows else []

    def there(self) -> set[str]:
        """See `Source`."""
        return {name for row in self._rows for name in row}

    def notes(self) -> list[str]:
        """See `Source`."""
        return [] if self._rows else [f"W&B has logged nothing of {self._run_path} under the names looked for"]

    def newest_at(self) -> float | None:
        """See `Source`: of the rows themselves."""
        return self._rows[-1].get(TIME) if self._rows else None
