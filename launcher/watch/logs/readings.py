"""A main run's metrics from wherever they are. What is odd in a log is told and is no error; a log that names another
config is one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from launcher.base import metrics
from launcher.base.metrics import Ending
from launcher.watch.logs.columns import Columns
from launcher.watch.logs.gathering import Gathered, gather
from launcher.watch.logs.keys import LOSS, PER_DEVICE, STEP, TIME, TOKENS_PER_SECOND, Keys, number
from launcher.watch.logs.sources import Log, Source
from proxies.core import canon

_SENTENCES = {
    "bad step": "{n} lines have a step that is no whole number: they are left out",
    "no step": "{n} lines have a loss and no step: they are left out",
    "beyond": "{n} lines are of steps outside 1 to {top}, and are left out: does it count something else, or is it "
    "another run?",
    "again": "{n} steps were logged again: the last value counts",
    "no number": "{n} training losses are no numbers",
}


class OtherRunError(ValueError):
    """A log that names another config: nothing in it is about this run."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reading:
    """A run so far."""

    columns: Columns
    notes: tuple[str, ...]
    """What is odd about the log, in sentences."""
    names_digest: bool
    """Whether the log says of which config it is."""
    ending: Ending | None
    """How the newest attempt ended, if it could write that down."""


class Readings:
    """Follows one run."""

    def __init__(self, source: Source, keys: Keys, digest: str, num_steps: int, num_ranks: int = 1) -> None:
        """`num_steps` and `num_ranks` are those of the frozen config."""
        self._source, self._keys, self._digest = source, keys, digest
        self._num_steps, self._num_ranks = num_steps, num_ranks

    def read(self, *, last: bool = False) -> Reading:
        """The run as it is now; `last`: nobody will read again.

        Raises:
            OtherRunError: a header in the log has another digest.
            OSError: what is there cannot be read.
            DashboardError: W&B was asked online, and did not answer.
        """
        log = self._source.read(last=last)
        self._check(log)
        # By the rows' own time where they have one: a file may be a copy.
        times = [number(rows[-1].get(TIME)) for rows in log.files.values() if rows]
        known = [at for at in times if at is not None and math.isfinite(at)]
        newest_at = max(known, default=log.newest_at)
        found = gather([*log.files.values()], self._keys, self._num_steps, self._num_ranks, newest_at)
        names_digest = any(event["event"] == "started" for event in found.columns.events)
        notes = [*log.notes, *self._notes(found, log.there)]
        if any(log.files.values()) and not names_digest:
            notes.append("it does not say of which config it is: it is taken to be of this one")
        return Reading(
            columns=found.columns, notes=tuple(notes), names_digest=names_digest,
            ending=_ending(found.columns.events),
        )  # fmt: skip

    def _check(self, log: Log) -> None:
        for name, rows in log.files.items():
            started = [str(row.get("digest")) for row in rows if row.get("event") == "started"]
            others = dict.fromkeys(digest for digest in started if digest != self._digest)
            if others:
                raise OtherRunError(
                    f"{name} is of the config {', '.join(f'{digest[:16]}...' for digest in others)}, and this one is "
                    f"{self._digest[:16]}...: nothing of it is judged; name this run's own with --metrics"
                )

    def _notes(self, found: Gathered, there: Collection[str]) -> list[str]:
        """What a reader must know of the log, in sentences."""
        names, odd = found.names, found.odd
        said = [
            text.format(n=odd[what], top=self._num_steps)
            for what, text in _SENTENCES.items() if odd[what]
        ]  # fmt: skip
        said += [_missing(column, self._keys, there) for column in (STEP, LOSS) if there and column not in names]
        absent = [column for column in ("grad_norm", TOKENS_PER_SECOND) if column not in names]
        if absent and LOSS in names:
            said.append(f"it has no {' and no '.join(absent)}: what needs that is not judged")
        speed, num_ranks = names.get(TOKENS_PER_SECOND, ""), self._num_ranks
        if speed in PER_DEVICE and num_ranks > 1:
            said.append(f"its {speed!r} is of one device: taken {num_ranks} times, for the ranks of the frozen config")
        return said


def _missing(column: str, keys: Keys, there: Collection[str]) -> str:
    option = {STEP: "--step-key", LOSS: "--train-loss-key"}[column]
    held = ", ".join(sorted(there)[:20])
    return f"it has no {column}, looked for as {keys.told(column)}: it holds {held}; name it with {option}"


def _ending(events: Sequence[Mapping[str, Any]]) -> Ending | None:
    """The last event, if it is how an attempt ended."""
    if not events or events[-1]["event"] not in metrics.ENDINGS:
        return None
    names = {field.name for field in fields(Ending)}
    try:
        return canon.decode(Ending, {key: value for key, value in events[-1].items() if key in names})
    except canon.CanonError:
        return None
