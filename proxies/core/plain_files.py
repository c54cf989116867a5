"""Functions that open files without ever waiting for another process.

A command that opens a named pipe waits until somebody writes to it, and a device may never end. So
every file whose path a person or another program chose is opened here. To read, only plain files
are opened; to write, devices such as `/dev/null` too. Everything else is refused at once.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Literal

from forerun._proxies.core.notation import format_counted

MAX_RECORD_BYTES = 2**26
"""Upper limit for a file that is read as a whole; a large study's evidence takes a hundredth
of it."""

_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
}


def name_kind(mode: int) -> str:
    """Return what `st_mode` says an entry is: file, folder, link, pipe, socket, or device."""
    return _KINDS.get(stat.S_IFMT(mode), "device")


def require_plain(path: Path) -> None:
    """Check a file before a library opens it by its path; links are followed.

    Raises:
        OSError: The file does not exist or is not a plain file.
    """
    _check_kind(path.stat().st_mode, path)


def open_plain(path: Path, mode: Literal["rb", "ab", "r+b"] = "rb") -> BinaryIO:
    """Open a plain file, or the target of a link.

    Raises:
        OSError: The file cannot be opened or is not a plain file.
    """
    file = open(path, mode, opener=_open_without_waiting)  # noqa: SIM115 - the caller closes it
    try:
        _check_kind(os.fstat(file.fileno()).st_mode, path)
    except OSError:
        file.close()
        raise
    return file


def open_to_append(path: Path) -> BinaryIO:
    """Open a plain file or a device for appending, unbuffered; create the file if it is missing.

    Raises:
        OSError: The file cannot be opened, or is a pipe or socket.
    """
    refuse_pipe(path)
    return open(path, "ab", buffering=0, opener=_open_without_waiting)


def refuse_pipe(path: Path) -> None:
    """Check that a path to write to is not a pipe or a socket; it may not exist yet.

    Raises:
        OSError: It is a pipe or a socket, or its kind cannot be determined.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        _check_kind(mode, path)


def read_plain(path: Path, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
    """Return the content of a plain file, or of a link's target.

    Raises:
        OSError: The file cannot be opened, is not a plain file, or has more than `max_bytes` bytes.
    """
    with open_plain(path) as file:
        content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            # The size is too small for a file of /proc, whose size is 0, or that grows meanwhile
            num_bytes = max(len(content), os.fstat(file.fileno()).st_size)
            raise OSError(
                errno.EFBIG,
                f"it has {format_counted(num_bytes, 'byte')}: must be at most {max_bytes}",
                str(path),
            )
        return content


def _check_kind(mode: int, path: Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is a {name_kind(mode)}: must be a plain file", str(path))


def _open_without_waiting(path: str, flags: int) -> int:
    """Open with O_NONBLOCK: a pipe opens at once, and a plain file as usual."""
    try:
        return os.open(path, flags | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a pipe that nobody reads, or a socket: say which
            _check_kind(Path(path).stat().st_mode, Path(path))
        raise
