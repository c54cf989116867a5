"""Sources of the rows of a run's log: files that others still write, or an online run of W&B.

Files are read completely at every look, so that logs which were cut, replaced, rewound, or came
late need no special treatment.
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

from forerun._launcher.main_run import metrics_file
from forerun._launcher.main_run.wandb_client import fetch_history
from forerun._launcher.main_run.watch.logs.keys import WANDB_STEP, ColumnNames
from forerun._launcher.main_run.watch.logs.text_logs import (
    describe_unknown,
    open_log,
    read_first_line,
)
from forerun._proxies.core.plain_files import require_plain
from forerun._proxies.external.growing_file import MetricsError

READ_BYTES = 2**20
MIN_POLL_SECONDS = 30.0
"""Minimum seconds between two requests to W&B online: each starts a process and takes seconds."""
NUM_RANK_LINES = 1024
"""Newest lines whose rank times are kept. Rank times of all lines of a large run would fill the
memory."""
_RANKS_KEY = "rank_seconds"
_FORERUN_NAMES = frozenset(
    {
        *("event", "to_step", "reason", "exit_code", _RANKS_KEY),
        *(field.name for field in fields(metrics_file.AttemptStart)),
    }
)
"""Names in forerun's own log, apart from those of columns."""
_ONLINE_PATTERN = re.compile(r"(?:https?://[^/]+/)?([\w.-]+)/([\w.-]+)/(?:runs/)?([\w.-]+)/?")

_PATTERNS = ("*.wandb", "*tfevents*", "*.jsonl", "trainer_state.json", "main.log", "*.csv")
"""Patterns of logs in a folder, in order of preference."""

Row = dict[str, Any]
"""Values that were logged together, by the names that their writer gave."""


@dataclass(kw_only=True, slots=True)
class Log:
    """Everything in a run's log at the moment."""

    files: dict[str, list[Row]] = field(default_factory=dict)
    """Rows of each file by the file's name, in order, with the requested names only."""
    logged_names: set[str] = field(default_factory=set)
    """Names of everything that was logged, as many as are kept."""
    notes: list[str] = field(default_factory=list)
    """Notes on what could not be read."""
    unknown: str = ""
    """Message why an existing file is not a log; empty if it is one."""
    newest_at: float | None = None
    """Time at which the last row was written, in seconds since 1970; None if unknown."""


class RowSource(Protocol):
    """A source of a log's rows."""

    def read(self, *, last: bool) -> Log:
        """Read everything there is.

        Args:
            last: Whether this is the last look, so that a last line without a newline counts as
                complete.

        Raises:
            OSError: A file exists and cannot be read.
            DashboardError: W&B does not answer.
        """
        ...


class LogFiles:
    """A log file, or the logs in a folder.

    In a folder, forerun's own log is read. If there is none, the files of the first of `_PATTERNS`
    that matches any file are read.
    """

    def __init__(self, path: Path, wanted: frozenset[str]) -> None:
        self.path, self._wanted = path, wanted

    def read(self, *, last: bool) -> Log:
        """Read the files; see `RowSource`."""
        log, paths = Log(), self._find_paths()
        if len(paths) > 1 and paths[0].suffix in (".jsonl", ".csv", ".log"):
            log.notes.append(
                f"{self.path} holds {len(paths)} {paths[0].suffix} files "
                f"({', '.join(map(self._name, paths[:8]))}): name the run's with --metrics"
            )
            return log
        for path in paths:
            # A file may vanish after it was found.
            with contextlib.suppress(FileNotFoundError):
                self._add(log, path, last=last)
        if not log.files:
            log.notes.append(f"there is no log at {self.path} yet")
        elif not log.notes and not any(log.files.values()):
            log.notes.append(f"there are no rows in {', '.join(log.files)} yet")
        return log

    def _add(self, log: Log, path: Path, *, last: bool) -> None:
        name, reader = self._name(path), open_log(path, self._wanted)
        log.newest_at = max(log.newest_at or 0.0, path.stat().st_mtime)
        rows, rows_with_ranks = log.files.setdefault(name, []), deque[Row]()
        try:
            while not reader.at_end:
                for new_row in reader.read(READ_BYTES):
                    # Without interning, the names in every row would take more memory than the
                    # numbers.
                    rows.append(row := {sys.intern(key): new_row[key] for key in new_row})
                    if _RANKS_KEY in row:
                        rows_with_ranks.append(row)
                    if len(rows_with_ranks) > NUM_RANK_LINES:
                        del rows_with_ranks.popleft()[_RANKS_KEY]
        except MetricsError as error:
            log.notes.append(f"{name}: {error}; the rest of the file is not read")
            return
        finally:
            log.logged_names |= reader.names
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
        """Return the name of a file; in a folder its relative path, since names may repeat."""
        return path.name if path == self.path else str(path.relative_to(self.path))

    def _find_paths(self) -> list[Path]:
        """Return the paths of the log files, after a check that they may be read."""
        if not self.path.exists():
            return []
        if not self.path.is_dir():
            require_plain(self.path)
            return [self.path]
        next(self.path.iterdir(), None)  # Raises OSError if the folder may not be read.
        forerun_log = self.path / metrics_file.METRICS_FILE
        if forerun_log.exists():
            return [forerun_log]
        for pattern in _PATTERNS:
            paths = [path for path in sorted(self.path.rglob(pattern)) if path.is_file()]
            if paths and pattern == "trainer_state.json":
                # Every checkpoint of Hugging Face's Trainer has the whole history so far.
                return [max(paths, key=lambda path: path.stat().st_mtime)]
            if paths:
                return list({path.resolve(): path for path in paths}.values())
        return []


class OnlineRun:
    """An online run of W&B. The history never shrinks, so reading continues after the last look."""

    def __init__(self, run_path: str, wanted: frozenset[str]) -> None:
        """Store the path of the run, `entity/project/run`, and the names to read."""
        self._run_path, self._wanted = run_path, wanted
        self._rows: list[Row] = []
        self._asked_at = -MIN_POLL_SECONDS

    def read(self, *, last: bool) -> Log:
        """Read the new rows; see `RowSource`. `Log.newest_at` stays None: the rows have a time."""
        now = time.monotonic()
        if last or now - self._asked_at >= MIN_POLL_SECONDS:
            first_step = self._rows[-1][WANDB_STEP] + 1 if self._rows else 0
            self._rows += fetch_history(self._run_path, self._wanted, first_step)
            self._asked_at = now
        names = {name for row in self._rows for name in row}
        notes = [] if names else [f"W&B has no rows of {self._run_path} with the names looked for"]
        return Log(files={self._run_path: self._rows}, logged_names=names, notes=notes)


def open_source(where: str, keys: ColumnNames) -> RowSource:
    """Return the source that `--metrics` names.

    The source may be a file, a folder, or a run of W&B as `entity/project/run` or by its address.

    Args:
        where: Value of the option. The value counts as a path if that path exists, or if the value
            does not look like a run of W&B.
        keys: Names of the columns to read.
    """
    path, online = Path(where), _ONLINE_PATTERN.fullmatch(where)
    if online and not path.exists() and (where.startswith("http") or not path.parent.is_dir()):
        return OnlineRun("/".join(online.groups()), keys.wanted)
    return LogFiles(path, keys.wanted | _FORERUN_NAMES)
