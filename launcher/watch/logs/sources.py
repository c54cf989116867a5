"""Where the rows of a run's log come from: files that grow, are cut, replaced, or come later; a run of W&B online.

Files are read on where they were left, and anew when they were cut or replaced, as our trainer's own are when a run
resumes. That a file is another one is seen by its number, by its size, and by the bytes at its beginning and before
the end that it had: a number is used again at once, and a file that was cut may have grown past its old size.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from launcher.base import metrics
from launcher.base.wandb_calls import fetch_history
from launcher.watch.logs.keys import UNASKED_STEP, Keys
from proxies.external.event_files import EventFile
from proxies.external.growing import MetricsError, Rows
from proxies.external.json_lines import JsonLines
from proxies.external.wandb_run import WandbRun

READ_BYTES = 2**20
LEAST_SECONDS = 30.0
"""Between two looks at W&B online: each asking starts a process and takes seconds."""
_MARK_BYTES = 512
_EVENT_FIELDS = ("event", "to_step", "skipped_sequences", "wait_seconds", "difference", "reason", "exit_code")
_OURS = frozenset({
    *_EVENT_FIELDS, "rank_seconds", *(field.name for field in fields(metrics.Header))
})  # fmt: skip
_ONLINE = re.compile(r"(?:https?://[^/]+/)?([\w.-]+)/([\w.-]+)/(?:runs/)?([\w.-]+)/?")


@dataclass(frozen=True, slots=True)
class Portion:
    """Rows that came."""

    name: str
    """Of the file."""
    rows: Sequence[Mapping[str, Any]]
    begins: bool
    """They are its first: what was of it before is void."""


class Source(Protocol):
    """Where rows come from."""

    def portions(self, *, last: bool) -> Iterator[Portion]:
        """What came since, in order; `last`: a last line without its end is taken as it is.

        Raises:
            OSError: something is there and cannot be read.
        """
        ...

    def files(self) -> list[str]:
        """Names of what was there at the last reading, in order."""
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


class _File:
    """One file, up to where it was read."""

    def __init__(self, path: Path, name: str, wanted: frozenset[str]) -> None:
        self.path, self.name = path, name
        self.damage, self.cut, self.written_at = "", False, 0.0
        self._wanted, self._inode, self.size, self._marks = wanted, 0, 0, (b"", b"")
        self.begin()

    def begin(self) -> None:
        """Read it from its beginning."""
        self.reader, self._begins = self._opened(), True

    def _opened(self) -> Rows:
        if self.path.name.endswith(".wandb"):
            return WandbRun(self.path, self._wanted)
        if "tfevents" in self.path.name:
            return EventFile(self.path, self._wanted, "step")
        return JsonLines(self.path, self._wanted)

    def portions(self, *, last: bool) -> Iterator[Portion]:
        """See `Source`."""
        with self.path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self.size or self._changed(file):
                self.begin()
            self._inode, self.size, self._marks = found.st_ino, found.st_size, _marks(file, found.st_size)
        self.written_at, self.damage, self.cut = found.st_mtime, "", False
        try:
            while True:
                rows = self.reader.read(READ_BYTES)
                yield self._portion(rows)
                if self.reader.at_end:
                    break
        except MetricsError as error:
            self.damage = f"{self.name}: {error}; what comes after is not read"
            return
        if last:
            complaint = self.reader.complaint
            rows = self.reader.end()
            self.cut = self.reader.complaint != complaint
            self.reader.complaint = complaint
            yield self._portion(rows)

    def _portion(self, rows: Sequence[Mapping[str, Any]]) -> Portion:
        begins, self._begins = self._begins, False
        return Portion(self.name, rows, begins)

    def _changed(self, file: BinaryIO) -> bool:
        return _marks(file, self.size) != self._marks

    def notes(self) -> list[str]:
        said = [self.damage] if self.damage else []
        said += [f"{self.name}: {self.reader.complaint}: left out"] if self.reader.complaint else []
        if self.cut:
            said.append(f"{self.name}: its last line is cut short (it is being written, or its writer was killed)")
        return said


def _marks(file: BinaryIO, size: int) -> tuple[bytes, bytes]:
    """By which a file of that size is known again."""
    file.seek(0)
    head = file.read(min(_MARK_BYTES, size))
    file.seek(max(0, size - _MARK_BYTES))
    return head, file.read(min(_MARK_BYTES, size))


class Files:
    """A file, or what lies in a folder: our own log if it is there, else W&B's, else TensorBoard's, else one JSONL."""

    def __init__(self, path: Path, wanted: frozenset[str]) -> None:
        self.path, self._wanted = path, wanted
        self._files: dict[Path, _File] = {}
        self._ambiguous: list[Path] = []

    def portions(self, *, last: bool) -> Iterator[Portion]:
        """See `Source`."""
        paths = self._found()
        self._files = {path: self._files.get(path) or _File(path, self._name(path), self._wanted) for path in paths}
        for path, file in list(self._files.items()):
            try:
                yield from file.portions(last=last)
            except FileNotFoundError:  # since it was found
                del self._files[path]

    def files(self) -> list[str]:
        """See `Source`."""
        return [file.name for file in self._files.values()]

    def there(self) -> set[str]:
        """See `Source`."""
        return {name for file in self._files.values() for name in file.reader.names}

    def notes(self) -> list[str]:
        """See `Source`."""
        if self._ambiguous:
            held = ", ".join(self._name(path) for path in self._ambiguous[:8])
            return [f"{self.path} holds {len(self._ambiguous)} JSONL files ({held}): name the run's with --metrics"]
        if not self._files:
            return [f"there is nothing at {self.path} yet"]
        said = [note for file in self._files.values() for note in file.notes()]
        if not any(file.size for file in self._files.values()):
            said.append(f"there is nothing in {', '.join(self.files())} yet")
        return said

    def newest_at(self) -> float | None:
        """See `Source`."""
        return max((file.written_at for file in self._files.values()), default=None)

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
    """A run of W&B. See `Source`."""

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
