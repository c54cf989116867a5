"""A run as W&B has it online, asked anew from where it was left, at most every `LEAST_SECONDS`."""

from __future__ import annotations

import time
from collections.abc import Iterator

from launcher.wandb_calls import fetch_history
from launcher.watch.keys import UNASKED_STEP
from launcher.watch.log_files import Portion

LEAST_SECONDS = 30.0
"""Each asking starts a process and takes seconds."""


class OnlineRun:
    """See `launcher.watch.log_files.Source`."""

    def __init__(self, run_path: str, wanted: frozenset[str]) -> None:
        """`run_path` is `entity/project/run`."""
        self._run_path, self._wanted = run_path, wanted
        self._names: set[str] = set()
        self._after, self._asked_at = 0, -LEAST_SECONDS

    def portions(self, *, last: bool) -> Iterator[Portion]:
        """See `Source`; what W&B shows of a run never shrinks.

        Raises:
            DashboardError: it does not answer.
        """
        now = time.monotonic()
        if not last and now - self._asked_at < LEAST_SECONDS:
            return
        rows = fetch_history(self._run_path, self._wanted, self._after)
        self._asked_at, begins = now, self._after == 0
        self._names.update(*rows)
        self._after = rows[-1][UNASKED_STEP] + 1 if rows else self._after
        yield Portion(self._run_path, rows, begins)

    def again(self) -> None:
        """See `Source`."""
        self._after, self._asked_at = 0, -LEAST_SECONDS

    def files(self) -> list[str]:
        """See `Source`."""
        return [self._run_path]

    def there(self) -> set[str]:
        """See `Source`."""
        return set(self._names)

    def notes(self) -> list[str]:
        """See `Source`."""
        return [] if self._names else [f"W&B has logged nothing of {self._run_path} under the names looked for"]

    def newest_at(self) -> float | None:
        """See `Source`: the rows themselves say."""
        return None
