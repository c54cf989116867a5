"""Where the rows of a run's log come from: files, which others still write, or a run of W&B online.

Files are read whole at every look, so that what was cut, replaced, rewound or came late needs no thought.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from launcher.base import metrics
from launcher.base.wandb_calls import fetch_history
from launcher.watch.logs.keys import UNASKED_STEP, Keys
from proxies.external.growing import MetricsError
from proxies.external.metric_files import rows_of

READ_BYTES = 2**20
LEAST_SECONDS = 30.0
"""Between two looks at W&B online: each asking starts a process and takes seconds."""
_EVENT_FIELDS = ("event", "to_step", "skipped_sequences", "wait_seconds", "difference", "reason", "exit_code")
_OURS = frozenset({
    *_EVENT_FIELDS, "rank_seconds", *(field.name for field in fields(metrics.Header))
})  # fmt: skip
_ONLINE = re.compile(r"(?:https?://[^/]+/)?([\w.-]+)/([\w.-]+)/(?:runs/)?([\w.-]+)/?")


_Rows = Sequence[Mapping[str, Any]]


class Source(Protocol):
    """Where rows come from."""

    def rows(self, *, last: bool) -> Iterator[tuple[str, _Rows]]:
        """Whatever there is, in order, with the name of its file; `last`: a last line without its end counts.

        Raises:
            OSError: something is there and cannot be read.
        """
        ...

    def there(self) -> set[str]:
        """Names of what was logged, as many as are kept."""
        ...

    def notes(self) -> list[str]:
        """What of it could not be read."""
        ...

    def newest_at(self) -> float | None:
        """When the last row came, in seconds since 1970, where that is known."""
        ...


class _File:
    """One file, read once."""

    def __init__(self, path: Path, name: str, wanted: frozenset[str]) -> None:
        self.name, self.notes, self.num_rows = name, list[str](), 0
        self.written_at = path.stat().st_mtime
        self.reader = rows_of(path, wanted, "step")

    def rows(self, *, last: bool) -> Iterator[_Rows]:
        """See `Source`."""
        reader = self.reader
        try:
            while True:
                yield reader.read(READ_BYTES)
                if reader.at_end:
                    break
        except MetricsError as error:
            self.notes.append(f"{self.name}: {error}; what comes after is not read")
            return
        if complaint := reader.complaint:
            self.notes.append(f"{self.name}: {complaint}: left out")
        if last:
            yield reader.end()
            if reader.complaint != complaint:
                self.notes.append(
                    f"{self.name}: its last line is cut short (it is being written, or its writer was killed)"
                )


class Files:
    """A file, or what lies in a folder: our own log if it is there, else W&B's, else TensorBoard's, else one JSONL."""

    def __init__(self, path: Path, wanted: frozenset[str]) -> None:
        self.path, self._wanted = path, wanted
        self._files: list[_File] = []
        self._ambiguous: list[Path] = []

    def rows(self, *, last: bool) -> Iterator[tuple[str, _Rows]]:
        """See `Source`."""
        self._files = []
        for path in self._found():
            try:
                file = _File(path, self._name(path), self._wanted)
                self._files.append(file)
                for rows in file.rows(last=last):
                    file.num_rows += len(rows)
                    yield file.name, rows
            except FileNotFoundError:  # since it was found
                continue

    def there(self) -> set[str]:
        """See `Source`."""
        return {name for file in self._files for name in file.reader.names}

    def notes(self) -> list[str]:
        """See `Source`."""
        if self._ambiguous:
            held = ", ".join(self._name(path) for path in self._ambiguous[:8])
            return [f"{self.path} holds {len(self._ambiguous)} JSONL files ({held}): name the run's with --metrics"]
        if not self._files:
            return [f"there is nothing at {self.path} yet"]
        said = [note for file in self._files for note in file.notes]
        if not said and not any(file.num_rows for file in self._files):
            said.append(f"there is nothing in {', '.join(file.name for file in self._files)} yet")
        return said

    def newest_at(self) -> float | None:
        """See `Source`."""
        return max((file.written_at for file in self._files), default=None)

    def _name(self, path: Path) -> str:
        """Of a file in the folder its way there: two may have one name."""
        if path == self.path:
            return path.name
        home = next((home for home in (self.path, self.path.resolve()) if path.is_relative_to(home)), None)
        return str(path.relative_to(home) if home else path)

    def _found(self) -> list[Path]:
        self._ambiguous = []
        if not self.path.is_dir():
            if self.path.exists() and not self.path.is_file():
                raise OSError(errno.EINVAL, "neither a file nor a folder, and cannot be read twice", str(self.path))
            return [self.path] if self.path.exists() else []
        next(self.path.iterdir(), None)  # what may not be looked into would look empty
        own = self.path / metrics.METRICS_FILE
        if own.exists():
            return [own]
        for pattern in ("*.wandb", "*tfevents*", "*.jsonl"):
            paths = (path for path in sorted(self.path.rglob(pattern)) if path.is_file())
            found = list({path.resolve(): path for path in paths}.values())
            if pattern == "*.jsonl" and len(found) > 1:
                self._ambiguous, found = found, []
            if found:
                return found
        return []


class OnlineRun:
    """A run of W&B, whose history never shrinks. See `Source`."""

    def __init__(self, run_path: str, wanted: frozenset[str]) -> None:
        """`run_path` is `entity/project/run`."""
        self._run_path, self._wanted = run_path, wanted
        self._names: set[str] = set()
        self._rows: list[Mapping[str, Any]] = []
        self._after, self._asked_at = 0, -LEAST_SECONDS

    def rows(self, *, last: bool) -> Iterator[tuple[str, _Rows]]:
        """See `Source`.

        Raises:
            DashboardError: it does not answer.
        """
        now = time.monotonic()
        if last or now - self._asked_at >= LEAST_SECONDS:
            rows = fetch_history(self._run_path, self._wanted, self._after)
            self._asked_at = now
            self._names.update(*rows)
            self._after = rows[-1][UNASKED_STEP] + 1 if rows else self._after
            self._rows += rows
        yield self._run_path, self._rows

    def there(self) -> set[str]:
        """See `Source`."""
        return set(self._names)

    def notes(self) -> list[str]:
        """See `Source`."""
        return [] if self._names else [f"W&B has logged nothing of {self._run_path} under the names looked for"]

    def newest_at(self) -> float | None:
        """See `Source`: the rows themselves say."""
        return None


def source_of(where: str, keys: Keys) -> Source:
    """What a `--metrics` names: a file, a folder, or a run of W&B as `entity/project/run` or by its address.

    Args:
        where: as typed; a path that exists is one, and so is what does not look like a run of W&B.
        keys: the names asked for.
    """
    path, online = Path(where), _ONLINE.fullmatch(where)
    if online and not path.exists() and (where.startswith("http") or not path.parent.is_dir()):
        return OnlineRun("/".join(online.groups()), keys.wanted)
    return Files(path, keys.wanted | _OURS)
