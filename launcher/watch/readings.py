"""A main run's metrics from wherever they are: our `metrics.jsonl`, any trainer's JSONL, W&B, TensorBoard.

Files are read on where they were left, and anew when they were cut or replaced, as our trainer's own are when a run
resumes. What is odd in them is told and is no error; a log that names another config is one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from launcher import metrics
from launcher.metrics import Ending, Header
from launcher.watch.columns import Columns, from_lines
from launcher.watch.gathering import Gathered, counts_from_zero
from launcher.watch.keys import TIME, Keys
from proxies import canon
from proxies.external.event_files import EventFile
from proxies.external.growing import MetricsError, Rows
from proxies.external.json_lines import JsonLines
from proxies.external.wandb_run import WandbRun

READ_BYTES = 2**22
_HEAD_BYTES = 512  # by which a file is known to be another one: a number of an inode is used again at once
_EVENT_FIELDS = ("event", "to_step", "skipped_sequences", "wait_seconds", "difference", "noise", "reason", "exit_code")
_OURS = frozenset({*_EVENT_FIELDS, "rank_seconds", "layers", "gpus", *(field.name for field in fields(Header))})
_ONLINE = re.compile(r"(?:https?://[^/]+/)?([\w.-]+)/([\w.-]+)/(?:runs/)?([\w.-]+)/?")


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


class Source(Protocol):
    """Where rows come from."""

    def read(self, *, last: bool) -> None:
        """Read on; `last`: nobody will read again, so a last line without its end is taken as it is.

        Raises:
            OSError: something is there and cannot be read.
        """
        ...

    def batches(self) -> list[tuple[str, Sequence[Mapping[str, Any]]]]:
        """The name and all rows so far of each file, in order."""
        ...

    def there(self) -> set[str]:
        """Names of what was logged, as many as are kept."""
        ...

    def notes(self) -> list[str]:
        """What of it cannot be read."""
        ...

    def newest_at(self) -> float | None:
        """When the last row came, in seconds since 1970, where that is known."""
        ...


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


class _File:
    """One file and its rows."""

    def __init__(self, path: Path, wanted: frozenset[str]) -> None:
        self.path, self.damage, self.cut, self.written_at = path, "", False, 0.0
        self.rows: list[dict[str, Any]] = []
        self._wanted, self._inode, self._size, self._head = wanted, 0, 0, b""
        self.reader = self._begin()

    def _begin(self) -> Rows:
        self.rows = []
        if self.path.name.endswith(".wandb"):
            return WandbRun(self.path, self._wanted)
        if "tfevents" in self.path.name:
            return EventFile(self.path, self._wanted, "step")
        return JsonLines(self.path, self._wanted)

    def read(self, *, last: bool) -> None:
        with self.path.open("rb") as file:
            found, head = os.fstat(file.fileno()), file.read(_HEAD_BYTES)
        if found.st_ino != self._inode or found.st_size < self._size or not head.startswith(self._head):
            self.reader = self._begin()
        self._inode, self._size, self._head = found.st_ino, found.st_size, head
        self.written_at, self.damage = found.st_mtime, ""
        try:
            while True:
                self.rows += self.reader.read(READ_BYTES)
                if self.reader.at_end:
                    break
        except MetricsError as error:
            self.damage = f"{self.path.name}: {error}; what comes after is not read"
            return
        if last:
            complaint = self.reader.complaint
            self.rows += self.reader.end()
            self.cut = self.reader.complaint != complaint
            self.reader.complaint = complaint

    def notes(self) -> list[str]:
        said = [self.damage] if self.damage else []
        said += [f"{self.path.name}: {self.reader.complaint}: left out"] if self.reader.complaint else []
        if self.cut:
            said.append(f"{self.path.name}: its last line is cut short (it is being written, or its writer was killed)")
        return said


class Files:
    """A file, or what lies in a folder: our own log if it is there, else W&B's, else TensorBoard's, else one JSONL."""

    def __init__(self, path: Path, wanted: frozenset[str]) -> None:
        self.path, self._wanted = path, wanted
        self._files: dict[Path, _File] = {}

    def read(self, *, last: bool) -> None:
        """See `Source`."""
        paths = self._found()
        self._files = {path: self._files.get(path) or _File(path, self._wanted) for path in paths}
        for file in self._files.values():
            file.read(last=last)

    def batches(self) -> list[tuple[str, Sequence[Mapping[str, Any]]]]:
        """See `Source`."""
        return [(path.name, file.rows) for path, file in self._files.items()]

    def there(self) -> set[str]:
        """See `Source`."""
        return {name for file in self._files.values() for name in file.reader.names}

    def notes(self) -> list[str]:
        """See `Source`."""
        if not self._files:
            return [f"there is nothing at {self.path} yet"]
        return [note for file in self._files.values() for note in file.notes()]

    def newest_at(self) -> float | None:
        """See `Source`."""
        return max((file.written_at for file in self._files.values()), default=None)

    def _found(self) -> list[Path]:
        if not self.path.is_dir():
            return [self.path] if self.path.exists() else []
        own = self.path / metrics.METRICS_FILE
        if own.exists():
            return [own]
        for pattern in ("*.wandb", "*tfevents*", "*.jsonl"):
            found = {path.resolve(): path for path in sorted(self.path.rglob(pattern)) if path.is_file()}
            if found and (pattern != "*.jsonl" or len(found) == 1):
                return list(found.values())
        return []


class Readings:
    """Follows one run."""

    def __init__(self, source: Source, keys: Keys, digest: str, num_steps: int) -> None:
        self._source, self._keys, self._digest, self._num_steps = source, keys, digest, num_steps

    def read(self, *, last: bool = False) -> Reading:
        """The run as it is now.

        Raises:
            OtherRunError: a header in the log has another digest.
            OSError: what is there cannot be read.
            DashboardError: W&B was asked online, and did not answer.
        """
        self._source.read(last=last)
        gathered, batches = Gathered(self._num_steps), self._source.batches()
        there = {name for _, rows in batches for row in rows for name in row}
        names = self._keys.chosen(there)
        from_zero = any(counts_from_zero(rows, names) for _, rows in batches)
        for name, rows in batches:
            self._check(name, rows)
            gathered.take(rows, names, from_zero=from_zero)
        names_digest = any(event["event"] == "started" for event in gathered.events)
        notes = [*self._source.notes(), *gathered.notes(self._keys, names, sorted(self._source.there()))]
        if batches and not names_digest:
            notes.append("it does not say of which config it is: it is taken to be of this one")
        validation = np.array(gathered.validation(), dtype=np.float64).reshape(-1, 2)
        columns = replace(
            from_lines(gathered.lines(), self._newest_at(batches)),
            validation_steps=validation[:, 0], validation_loss_nats=validation[:, 1],
        )  # fmt: skip
        return Reading(
            columns=columns, notes=tuple(notes), not_finite=tuple(gathered.not_finite), names_digest=names_digest,
            ending=_ending(gathered.events),
        )  # fmt: skip

    def _newest_at(self, batches: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> float | None:
        """By the rows' own time where they have one: a file may be a copy."""
        times = [at for _, rows in batches for row in rows[-1:] if isinstance(at := row.get(TIME), int | float)]
        return max(times, default=self._source.newest_at())

    def _check(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        others = {str(row.get("digest")): number for number, row in enumerate(rows)
                  if row.get("event") == "started" and row.get("digest") != self._digest}  # fmt: skip
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
