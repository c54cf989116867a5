"""What was logged of a study so far: `wandb/index.json` in its folder, by run. Standard library only.

It saves time, and nothing hangs on it: without it, all is logged anew from the ledger.
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from launcher.base.wandb_calls import WANDB_DIR, DashboardError
from proxies.core import canon
from proxies.core.canon import Json

INDEX_FILE, LOCK_FILE, WORKSPACE_FILE = "index.json", "index.lock", "workspace.json"
_SCHEMA_VERSION = 1
_FOLDER = re.compile(r"(?:offline-)?run-\d{8}_\d{6}-(?P<id>[0-9a-f]+)|data-(?P<data_id>[0-9a-f]+)-\w+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A run that was logged."""

    content: str
    """Of the `Wanted` that it was made of."""
    folder: str
    num_rows: int
    files: dict[str, int] = field(default_factory=dict)
    """Bytes of its tables and pictures, by their path below the run's `files`."""
    digests: dict[str, str] = field(default_factory=dict)
    """Of its artifacts, as W&B names their content."""
    home: str = ""
    """Where the folder lay: set of runs whose files W&B keeps by their full path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """The runs by id, and the workspace's content and places."""

    schema_version: int = _SCHEMA_VERSION
    runs: dict[str, Entry] = field(default_factory=dict)
    workspace: str = ""
    """Content id of what the workspace was built from."""
    views: dict[str, dict[str, str]] = field(default_factory=dict)
    """By `entity/project`, names and ids of the workspaces that were saved online."""


def home_of(study_dir: Path) -> Path:
    """Where wandb writes for a study; made if need be."""
    home = study_dir.absolute() / WANDB_DIR
    home.mkdir(parents=True, exist_ok=True)
    return home


def read_index(home: Path) -> Index:
    """The index; an empty one where there is none, or none of ours."""
    try:
        found = canon.decode(Index, canon.parse((home / INDEX_FILE).read_bytes()))
    except (OSError, ValueError):
        return Index()
    return found if found.schema_version == _SCHEMA_VERSION else Index()


def write_index(home: Path, index: Index) -> None:
    """Write it, whole or not at all."""
    canon.write_atomic(home / INDEX_FILE, canon.pretty(index))


@contextlib.contextmanager
def alone(home: Path) -> Iterator[None]:
    """Within, no other process logs this study.

    Raises:
        DashboardError: one does.
    """
    with (home / LOCK_FILE).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DashboardError(f"another process logs this study just now (it holds {home / LOCK_FILE})") from None
        yield


def folders_of(home: Path) -> dict[str, list[Path]]:
    """What was logged so far by run id: runs, and the files of their tables and artifacts."""
    found: dict[str, list[Path]] = {}
    for path in sorted(home.iterdir()):
        named = _FOLDER.fullmatch(path.name)
        if named is not None and path.is_dir() and not path.is_symlink():
            found.setdefault(named["id"] or named["data_id"], []).append(path)
    return found


def is_there(home: Path, run_id: str, entry: Entry | None, content: str, *, offline: bool) -> bool:
    """Whether a run was logged with this content, and still lies where wandb finds all of it.

    `offline`: only as one that can be uploaded.
    """
    if entry is None or entry.content != content or (offline and not entry.folder.startswith("offline-")):
        return False
    return (not entry.home or entry.home == str(home)) and (home / entry.folder / f"run-{run_id}.wandb").is_file()


def remove(folders: list[Path]) -> None:
    """Take folders away, as far as that is allowed."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def write_workspace(home: Path, spec: Json) -> Path:
    """Keep a workspace beside the runs."""
    path = home / WORKSPACE_FILE
    canon.write_atomic(path, canon.pretty(spec))
    return path
