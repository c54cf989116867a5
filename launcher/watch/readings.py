"""A main run's metrics from wherever they are: our `metrics.jsonl`, any trainer's JSONL, W&B, TensorBoard.

A run is read on from look to look; what a look says is what a fresh reading would say. What is odd in a log is told
and is no error; a log that names another config is one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from launcher import metrics
from launcher.metrics import Ending, Header
from launcher.watch.assembly import columns_of
from launcher.watch.columns import Columns
from launcher.watch.gathering import Gathered, counts_from_zero
from launcher.watch.keys import TIME, Keys
from launcher.watch.log_files import Files, Portion, Source
from launcher.watch.oddities import not_finite, odd_notes
from proxies import canon

_EVENT_FIELDS = ("event", "to_step", "skipped_sequences", "wait_seconds", "difference", "noise", "reason", "exit_code")
_OURS = frozenset({*_EVENT_FIELDS, "rank_seconds", "layers", "gpus", *(field.name for field in fields(Header))})
_ONLINE = re.compile(r"(?:https?://[^/]+/)?([\w.-]+)/([\w.-]+)/(?:runs/)?([\w.-]+)/?")
_MOST_PASSES = 8
"""Over one log at one look: its names are chosen anew when it turns out to have better ones."""


class OtherRunError(ValueError):
    """A log that names another config: nothing in it is about this run."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reading:
    """A run so far."""

    columns: Columns
    notes: tuple[str, ...]
    """What is odd about the log, in sentences."""
    not_finite: tuple[int, ...]
    """Steps whose training loss is NaN or infinite."""
    names_digest: bool
    """Whether the log says of which config it is."""
    ending: Ending | None
    """Of the newest attempt, if it came to one that it could write down."""


def source_of(where: str, keys: Keys) -> Source:
    """What a `--metrics` names: a file, a folder, or a run of W&B as `entity/project/run` or by its address.

    Args:
        where: as typed; a path that exists is one, and so is what does not look like a run of W&B.
        keys: the names asked for.
    """
    path, online = Path(where), _ONLINE.fullmatch(where)
    if online and not path.exists() and (where.startswith("http") or not path.parent.is_dir()):
        from launcher.watch.online import OnlineRun

        return OnlineRun("/".join(online.groups()), keys.wanted)
    return Files(path, keys.wanted | _OURS)


class _Part:
    """What is known of one file."""

    def __init__(self) -> None:
        self.gathered: Gathered | None = None
        """None: nothing of it is taken yet."""
        self.there: set[str] = set()
        self.others: list[str] = []
        """Other configs that it names."""
        self.from_zero = False
        self.step: object = None
        """The one last named."""
        self.written_at: float | None = None


class Readings:
    """Follows one run."""

    def __init__(self, source: Source, keys: Keys, digest: str, num_steps: int, num_ranks: int = 1) -> None:
        """`num_steps` and `num_ranks` are those of the frozen config."""
        self._source, self._keys, self._digest = source, keys, digest
        self._num_steps, self._num_ranks = num_steps, num_ranks
        self._parts: dict[str, _Part] = {}
        self._names: dict[str, str] = {}
        self._from_zero = False
        self._hint: tuple[set[str], bool] = (set(), False)
        """What a reading before found: names, and whether steps count from 0."""

    def read(self, *, last: bool = False) -> Reading:
        """The run as it is now; `last`: nobody will read again.

        Raises:
            OtherRunError: a header in the log has another digest.
            OSError: what is there cannot be read.
            DashboardError: W&B was asked online, and did not answer.
        """
        for _ in range(_MOST_PASSES):
            if self._read_on(last=last):
                break
            self._source.again()
        files = self._source.files()
        self._check(files)
        parts = [part.gathered for name in files if (part := self._parts[name]).gathered]
        columns = columns_of(parts, self._newest_at(files))
        names_digest = any(event["event"] == "started" for event in columns.events)
        there = sorted(self._source.there())
        odd = odd_notes(parts, self._keys, self._names, there, self._num_steps, self._num_ranks)
        notes = [*self._source.notes(), *odd]
        if parts and not names_digest:
            notes.append("it does not say of which config it is: it is taken to be of this one")
        return Reading(
            columns=columns, notes=tuple(notes), not_finite=tuple(not_finite(parts)), names_digest=names_digest,
            ending=_ending(columns.events),
        )  # fmt: skip

    def _read_on(self, *, last: bool) -> bool:
        """Take what came; False where all must be taken again, by names that came too late for the rows before."""
        names_before, right = dict(self._names), True
        for portion in self._source.portions(last=last):
            part = self._learned(portion)
            right = right and self._settled()
            if right and portion.rows:
                part.gathered = part.gathered or Gathered(self._keys, self._num_steps, self._num_ranks)
                part.gathered.take(portion.rows, self._names, from_zero=self._from_zero)
        self._parts = {name: self._parts.get(name) or _Part() for name in self._source.files()}
        self._hint, hinted = (set(), False), self._hint
        there = self._there()
        if right and self._settled() and (not hinted[0] or self._keys.chosen(there) == self._keys.chosen(hinted[0])):
            return True
        # Whether steps count from 0 was asked of rows by the names of then.
        zero = self._keys.chosen(there) == names_before and any(part.from_zero for part in self._parts.values())
        self._hint = (there, zero)
        self._parts, self._names, self._from_zero = {}, self._keys.chosen(there), zero
        return False

    def _learned(self, portion: Portion) -> _Part:
        """The file of the portion, with what its rows say of it."""
        if portion.begins or portion.name not in self._parts:
            self._parts[portion.name] = _Part()
        part, rows = self._parts[portion.name], portion.rows
        part.there.update(*rows)
        part.others += [str(row.get("digest")) for row in rows
                        if row.get("event") == "started" and row.get("digest") != self._digest]  # fmt: skip
        zero, part.step = counts_from_zero(rows, self._keys.chosen(self._there()), part.step)
        part.from_zero = part.from_zero or zero
        if rows:
            at = rows[-1].get(TIME)
            part.written_at = at if isinstance(at, int | float) and math.isfinite(at) else None
        return part

    def _there(self) -> set[str]:
        """Names in all files, and those that the reading before found."""
        return {name for part in self._parts.values() for name in part.there} | self._hint[0]

    def _settled(self) -> bool:
        """Choose the names of what is there; False where rows were taken by others.

        A name for a column that had none changes nothing of the rows before: none of them has it.
        """
        names = self._keys.chosen(self._there())
        from_zero = self._hint[1] or any(part.from_zero for part in self._parts.values())
        same = from_zero == self._from_zero and all(
            (names[column], self._factor(column, names)) == (self._names[column], self._factor(column, self._names))
            for column in names.keys() & self._names.keys()
        )
        self._names, self._from_zero = names, from_zero
        return same or not any(part.gathered for part in self._parts.values())

    def _factor(self, column: str, names: Mapping[str, str]) -> float:
        return self._keys.factor(column, names)

    def _newest_at(self, files: Sequence[str]) -> float | None:
        """By the rows' own time where they have one: a file may be a copy."""
        times = [at for name in files if (at := self._parts[name].written_at) is not None]
        return max(times, default=self._source.newest_at())

    def _check(self, files: Sequence[str]) -> None:
        for name in files:
            others = dict.fromkeys(self._parts[name].others)
            if others:
                raise OtherRunError(
                    f"{name} is of the config {', '.join(f'{digest[:16]}...' for digest in others)}, and this one is "
                    f"{self._digest[:16]}...: nothing of it is judged; name this run's own with --metrics"
                )


def _ending(events: Sequence[Mapping[str, Any]]) -> Ending | None:
    """The last event, if it is how an attempt ended."""
    if not events or events[-1]["event"] not in metrics.ENDINGS:
        return None
    names = {field.name for field in fields(Ending)}
    try:
        return canon.decode(Ending, {key: value for key, value in events[-1].items() if key in names})
    except canon.CanonError:
        return None
