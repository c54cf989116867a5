"""Where the rows of a run's log come from: files, which others still write, or a run of W&B online.

Files are read whole at every look, so that what was cut, replaced, rewound or came late needs no
thought.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections import deque
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from launcher.base import metrics
from launcher.base.wandb_calls import fetch_history
from launcher.watch.logs.keys import UNASKED_STEP, ColumnNames
from launcher.watch.logs.text_logs import describe_unknown, open_log, read_first_line
from proxies.core.plain_files import require_plain
from proxies.external.growing_file import MetricsError

READ_BYTES = 2**20
LEAST_SECONDS = 30.0
"""Between two looks at W&B online: each asking starts a process and takes seconds."""
NUM_RANK_LINES = 1024
"""Times of all ranks are kept of so many newest lines; of all lines of a large run they would fill
the memory."""
_RANKS = "rank_seconds"
_EVENT_FIELDS = (
    "event",
    "to_step",
    "skipped_sequences",
    "wait_seconds",
    "difference",
    "reason",
    "exit_code",
)
_OURS = frozenset({*_EVENT_FIELDS, _RANKS, *(field.name for field in fields(metrics.Header))})
_ONLINE = re.compile(r"(?:https?://[^/]+/)?([\w.-]+)/([\w.-]+)/(?:runs/)?([\w.-]+)/?")

_PATTERNS = ("*.wandb", "*tfevents*", "*.jsonl", "trainer_state.json", "main.log", "*.csv")
"""Patterns of logs in a folder, in order of preference."""

Row = dict[str, Any]
"""What was logged together, by the names that its writer gave."""


@dataclass(kw_only=True, slots=True)
class Log:
    """What there is of a run's log now."""

    files: dict[str, list[Row]] = field(default_factory=dict)
    """By the name of a file its rows, in order, with the names asked for only."""
    there: set[str] = field(default_factory=set)
    """Names of what was logged, as many as are kept."""
    notes: list[str] = field(default_factory=list)
    """What of it could not be read."""
    unknown: str = ""
    """Message why an existing file is not a log; empty if it is one."""
    newest_at: float | None = None
    """When the last row came, in seconds since 1970, where that is known."""


class RowSource(Protocol):
    """Where a log comes from."""

    def read(self, *, last: bool) -> Log:
        """Read all there is; `last`: a last line without its end counts.

        Raises:
            OSError: something is there and cannot be read.
            DashboardError: W&B does not answer.
        """
        ...


class Files:
    """A log file, or the logs in a folder: forerun's own, or else those of the first of `_PATTERNS`
    that has files.
    """

    def __init__(self, path: Path, wanted: frozenset[str]) -> None:
        self.path, self._wanted = path, wanted

    def read(self, *, last: bool) -> Log:
        """See `RowSource`."""
        log, paths = Log(), self._found()
        if len(paths) > 1 and (kind := paths[0].suffix) in (".jsonl", ".csv", ".log"):
            held = ", ".join(map(self._name, paths[:8]))
            log.notes.append(
                f"{self.path} holds {len(paths)} {kind} files ({held}): name the run's with "
                "--metrics"
            )
            return log
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # since it was found
                self._add(log, path, last=last)
        if not log.files:
            log.notes.append(f"there is no log at {self.path} yet")
        elif not log.notes and not any(log.files.values()):
            log.notes.append(f"there are no rows in {', '.join(log.files)} yet")
        return log

    def _add(self, log: Log, path: Path, *, last: bool) -> None:
        name, reader = self._name(path), open_log(path, self._wanted)
        log.newest_at = max(log.newest_at or 0.0, path.stat().st_mtime)
        rows, with_ranks = log.files.setdefault(name, []), deque[Row]()
        try:
            while not reader.at_end:
                # A line's names are its own: as many copies would take more room than the numbers.
                portion = [
                    {sys.intern(key): row[key] for key in row} for row in reader.read(READ_BYTES)
                ]
                rows += portion
                with_ranks += (row for row in portion if _RANKS in row)
                while len(with_ranks) > NUM_RANK_LINES:
                    del with_ranks.popleft()[_RANKS]
        except MetricsError as error:
            log.notes.append(f"{name}: {error}; the rest is not read")
            return
        finally:
            log.there |= reader.names
        if complaint := reader.complaint:
            log.notes.append(f"{name}: {complaint}: ignored")
        if last:
            rows += reader.end()
            if reader.complaint != complaint:
                log.notes.append(
                    f"{name}: its last line is cut short (it is being written, or its writer was "
                    "killed)"
                )
        if not rows and not reader.names and (line := read_first_line(path)):
            log.unknown = describe_unknown(path, line)

    def _name(self, path: Path) -> str:
        """The name of a file, in a folder its way there: two may have one name."""
        if path == self.path:
            return path.name
        home = next(
            (home for home in (self.path, self.path.resolve()) if path.is_relative_to(home)), None
        )
        return str(path.relative_to(home) if home else path)

    def _found(self) -> list[Path]:
        if not self.path.is_dir():
            if not self.path.exists():
                return []
            require_plain(self.path)
            return [self.path]
        next(self.path.iterdir(), None)  # what may not be looked into would look empty
        own = self.path / metrics.METRICS_FILE
        if own.exists():
            return [own]
        for pattern in _PATTERNS:
            paths = (path for path in sorted(self.path.rglob(pattern)) if path.is_file())
            if found := list({path.resolve(): path for path in paths}.values()):
                # Every checkpoint of Hugging Face's Trainer has the whole history so far.
                newest = max(found, key=lambda path: path.stat().st_mtime)
                return [newest] if pattern == "trainer_state.json" else found
        return []


class OnlineRun:
    """A run of W&B, whose history never shrinks: it is read on from where the last look ended."""

    def __init__(self, run_path: str, wanted: frozenset[str]) -> None:
        """`run_path` is `entity/project/run`."""
        self._run_path, self._wanted = run_path, wanted
        self._rows: list[Row] = []
        self._asked_at = -LEAST_SECONDS

    def read(self, *, last: bool) -> Log:
        """See `RowSource`. When the newest row came the rows themselves say."""
        now = time.monotonic()
        if last or now - self._asked_at >= LEAST_SECONDS:
            after = self._rows[-1][UNASKED_STEP] + 1 if self._rows else 0
            self._rows += fetch_history(self._run_path, self._wanted, after)
            self._asked_at = now
        there = {name for row in self._rows for name in row}
        notes = [] if there else [f"W&B has no rows of {self._run_path} with the names looked for"]
        return Log(files={self._run_path: self._rows}, there=there, notes=notes)


def source_of(where: str, keys: ColumnNames) -> RowSource:
    """What a `--metrics` names: a file, a folder, or a run of W&B as `entity/project/run` or by its
    address.

    Args:
        where: as typed; a path that exists is one, and so is what does not look like a run of W&B.
        keys: the names asked for.
    """
    path, online = Path(where), _ONLINE.fullmatch(where)
    if online and not path.exists() and (where.startswith("http") or not path.parent.is_dir()):
        return OnlineRun("/".join(online.groups()), keys.wanted)
    return Files(path, keys.wanted | _OURS)
