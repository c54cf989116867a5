"""A run's metrics as rows for a window on it: numbers under flat names, every step once. Standard library only.

A run that is resumed takes the steps after its checkpoint again, bit for bit, and its metrics are rewound: those steps
are not told again. A run that was rolled back takes other steps under the same numbers: those are, and a row before
them says that the earlier ones no longer count.
"""

from __future__ import annotations

import select
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.base.following import Following
from proxies.core import canon
from proxies.core.canon import Json

LOOK_SECONDS = 1.0
"""Between two looks at the metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What is told of one step."""

    step: int
    columns: dict[str, float]
    """By name; parts of nested ones, and places in lists, joined with `/`."""
    goes_back: bool = False
    """The run went back: what was told of later steps than `step` no longer counts."""


class MirrorRows:
    """The rows of a run, as its metrics grow."""

    def __init__(self, run_dir: Path) -> None:
        self._following = Following(run_dir)
        self._told_to = 0
        self._rollbacks: set[str] = set()
        self._events: set[tuple[Json, int]] = set()

    @property
    def at_end(self) -> bool:
        """Whether all that was there has been read."""
        return self._following.at_end

    def read(self) -> list[Row]:
        """The next rows.

        Raises:
            OSError: the metrics cannot be read.
        """
        return [row for line in self._following.read().lines for row in self._rows(line)]

    def _rows(self, line: dict[str, Json]) -> list[Row]:
        step, event = line.get("step"), line.get("event")
        if not isinstance(step, int) or isinstance(step, bool) or not isinstance(event, str | None):
            return []
        if event is None:
            if step <= self._told_to:
                return []
            self._told_to = step
            return [Row(step=step, columns=flat(line))]
        columns = {f"{event}/{name}": value for name, value in flat(line).items() if name != "step"}
        if event == "rolled_back":
            return self._rolled_back(line, columns)
        if event == "started" or not columns or (event, step) in self._events:
            return []
        self._events.add((event, step))
        return [Row(step=step, columns=columns)]

    def _rolled_back(self, line: dict[str, Json], columns: dict[str, float]) -> list[Row]:
        told = canon.canonical({key: line[key] for key in line if key != "step"})  # said again at another one
        to_step = line.get("to_step")
        if told in self._rollbacks or not isinstance(to_step, int):
            return []
        self._rollbacks.add(told)
        self._told_to = min(self._told_to, to_step)
        self._events = {(event, step) for event, step in self._events if step <= to_step}
        return [Row(step=self._told_to, columns=columns, goes_back=True)]


def follow(run_dir: Path, tell: Callable[[Row], None], flush: Callable[[], None] = lambda: None) -> int:
    """Tell every row of a run as it comes, until standard input ends, and then what is left; returns how many.

    Raises:
        OSError: the metrics cannot be read.
    """
    rows, num_told, over = MirrorRows(run_dir), 0, False
    while True:
        over = over or bool(select.select([sys.stdin], [], [], LOOK_SECONDS)[0])
        for row in rows.read():
            tell(row)
            num_told += 1
        flush()
        if over and rows.at_end:
            return num_told


def flat(value: Json, name: str = "") -> dict[str, float]:
    """Every number in a line, by its path; text, truth and what is not known are left out."""
    if isinstance(value, bool):
        return {}
    if isinstance(value, int | float):
        return {name: value}
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {
        path: number
        for key, part in parts
        for path, number in flat(part, f"{name}/{key}" if name else str(key)).items()
    }
