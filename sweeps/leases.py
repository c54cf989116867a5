"""How long a worker may be silent: learned from how long its calls take. Standard library only."""

from __future__ import annotations

from collections.abc import Hashable

FACTOR = 10.0
"""Times the longest call so far of its kind."""
FLOOR_SECONDS = 120.0
"""A busy machine, the first checkpoint of a large model on a slow disk: less is no sign of anything."""


class Leases:
    """Deadlines of calls by kind: what takes alike. A kind that has never been seen may take the longest of all."""

    def __init__(self, ceiling_seconds: float) -> None:
        """`ceiling_seconds`: longer is no call waited for."""
        self._ceiling_seconds = ceiling_seconds
        self._longest: dict[Hashable, float] = {}

    def seconds(self, kind: Hashable) -> float:
        """What a call of this kind may take."""
        if kind not in self._longest:
            return self._ceiling_seconds
        return min(self._ceiling_seconds, max(FLOOR_SECONDS, FACTOR * self._longest[kind]))

    def learn(self, kind: Hashable, seconds: float) -> None:
        """A call of this kind took so long."""
        self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))

    def missed(self, kind: Hashable) -> None:
        """A call of this kind was given up: the next one may take twice as long, for it may be we who were wrong."""
        self.learn(kind, 2 * self.seconds(kind) / FACTOR)
