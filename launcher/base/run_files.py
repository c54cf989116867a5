"""Files of a run's folder: which are plain (a pipe keeps its reader waiting), and where checkpoints lie."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.base import chronicle, metrics
from launcher.base.talk import say

# Where a run's checkpoints lie, which of them are complete, by their names alone, and what is said of one that is not
# gone on from. Standard library only.

CHECKPOINTS, ROLLBACKS_FILE = "checkpoints", "rollbacks.json"
"""In a run's folder; the second is written before a run goes back, and loads a checkpoint again."""
_COMPLETE = re.compile(r"step-(\d{8})")


def complete_folders(root: Path) -> dict[int, Path]:
    """Complete checkpoints by the updates made, newest first."""
    if not root.is_dir():
        return {}
    found = {int(named[1]): folder for folder in root.iterdir() if (named := _COMPLETE.fullmatch(folder.name))}
    return dict(sorted(found.items(), reverse=True))


def expected(run_dir: Path, digest: str) -> str:
    """Why this run must have a complete checkpoint, in words; empty where it may not have saved one yet."""
    events = [entry for entry in chronicle.entries(run_dir) if entry.digest == digest]
    begun = max((entry.step or 0 for entry in events if entry.kind in ("launched", "restarted")), default=0)
    if begun:
        return f"{chronicle.CHRONICLE_FILE} says that it resumed from step {begun}"
    saved = [line.get("step") for line in metrics.read(run_dir) if line.get("event") == "saved"]
    return f"{metrics.METRICS_FILE} says that it saved at step {saved[-1]}" if saved else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedCheckpoint:
    """A complete checkpoint that a run does not go on from."""

    step: int
    text: str
    """Why, and what became of it."""
    corrupt: bool
    """Or else of a path that the run went back from, which the chronicle tells as a rollback."""


def tell(run_dir: Path, digest: str, refused: Sequence[RefusedCheckpoint]) -> None:
    """Say it on stderr, and of corrupt ones in the run's chronicle, which a full disk may prevent. One rank only."""
    for each in refused:
        say(each.text)
        if each.corrupt:
            try:
                chronicle.record(run_dir, "corrupt", each.text, step=each.step, digest=digest)
            except OSError as error:
                say(f"{run_dir / chronicle.CHRONICLE_FILE}: {error.strerror}; not recorded")


MOST_BYTES = 2**26
"""The largest launch file or attestation: hundreds of times what a large study's evidence takes."""


def read_plain(path: Path) -> bytes:
    """The bytes of a plain file, or of one that a link leads to.

    Raises:
        OSError: it is not there, is no plain file, or has more than `MOST_BYTES`.
    """
    with open(path, "rb", opener=_without_waiting) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"it is a {_kind(status.st_mode)}: must be a plain file", str(path))
        if status.st_size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has {status.st_size} bytes: must be at most {MOST_BYTES}", str(path))
        return file.read(MOST_BYTES + 1)


def _without_waiting(path: str, flags: int) -> int:
    """A pipe that nobody writes to is opened too."""
    return os.open(path, flags | os.O_NONBLOCK)


def kinds_in(folder: Path) -> dict[str, str]:
    """What lies in a folder and below, by path: `file`, or the name of what is none; no folders, no bytecode caches.

    A link is a link, wherever it leads. A folder that is not there has nothing in it.
    """
    kinds: dict[str, str] = {}
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        kind = _kind(entry.lstat().st_mode)
        if kind != "folder":
            kinds[entry.name] = kind
        elif entry.name != "__pycache__":
            kinds |= {f"{entry.name}/{name}": of for name, of in kinds_in(entry).items()}
    return kinds


def _kind(mode: int) -> str:
    names = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link", stat.S_IFIFO: "pipe",
             stat.S_IFSOCK: "socket"}  # fmt: skip
    return names.get(stat.S_IFMT(mode), "device")
