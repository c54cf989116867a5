"""What is a plain file and what is not: a pipe in a file's place would keep its reader waiting for ever."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

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
            raise OSError(errno.EINVAL, f"it is a {_kind(status.st_mode)}: a plain file is wanted", str(path))
        if status.st_size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it has {status.st_size} bytes: at most {MOST_BYTES} are read", str(path))
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
