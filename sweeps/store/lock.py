"""The driver's lock: an advisory lock on the file `driver.lock`, which names its holder. It keeps a
second driver out of a study.

The kernel drops the lock when its holder dies in any way, so a stale file blocks nobody. Advisory
locks are not reliable on every network filesystem; there the ledger's chain catches a second driver
(`StaleDriver`). The module also tells whether a driver's process is still alive, and whether a file
was replaced. It needs no third-party package.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import os
import socket
from pathlib import Path

from forerun._proxies.core import canon
from forerun._proxies.core.plain_files import read_plain, refuse_pipe
from forerun._sweeps.store.errors import DiskFull, StudyHeld, SweepError, advise

LOCK_NAME = "driver.lock"


class FileIdentity:
    """The identity of the file at a path, to notice when the file is removed or replaced."""

    def __init__(self, path: Path, descriptor: int | None = None) -> None:
        """Store the identity of the file open as `descriptor`, or else of the file at `path`.

        The caller keeps the file open: its inode number might be reused otherwise.
        """
        self.path = path
        self._stat = path.stat() if descriptor is None else os.fstat(descriptor)

    def is_there(self) -> bool:
        """Return whether the path still names that file; true if the disk cannot answer now."""
        try:
            return os.path.samestat(self._stat, self.path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True


class DriverLock:
    """The lock on a study; held until closed, or until this process ends."""

    def __init__(self, study_dir: Path) -> None:
        """Take the lock of `study_dir`, which exists.

        Raises:
            StudyHeld: another process holds the lock; the message names its host, pid and start.
            DiskFull: there is no room for the holder's name.
            SweepError: the folder cannot be written to.
        """
        self.holder: dict[str, canon.Json] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "born": get_process_start(os.getpid()),
            # For people; never compared
            "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        self._study_dir, self._held, self._file = study_dir, False, -1
        self._take()

    def _take(self) -> None:
        """Take the lock, and write the holder into its file. Raises as `__init__`."""
        path = self._study_dir / LOCK_NAME
        try:
            refuse_pipe(path)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise SweepError(f"{path}: {error.strerror}: {advise(error)}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._held = True
            self._identity = FileIdentity(path, self._file)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, canon.to_canonical_json(self.holder).encode(), 0)
        except BlockingIOError:
            holder = _describe_holder(os.pread(self._file, 4096, 0))
            self.close()
            raise StudyHeld(
                f"{self._study_dir} is held by {holder}: wait for it or stop it; `status` works "
                "meanwhile"
            ) from None
        except OSError as error:
            self.close()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise SweepError(f"{path}: {error.strerror}: {advise(error)}") from error
            raise DiskFull(f"{path}: {error.strerror}: free some space and resume") from error

    def is_in_place(self) -> bool:
        """Return whether the locked file is still at the path that another driver would lock."""
        return self._identity.is_there()

    def take_again(self) -> None:
        """Take the lock again after its file was removed.

        Raises:
            StudyHeld: another process has taken the lock.
            DiskFull, SweepError: see `__init__`.
        """
        self.close()
        self._take()

    def close(self) -> None:
        """Release the lock.

        The file stays, empty: if it were removed, two drivers could lock two different files.
        """
        if self._file >= 0:
            if self._held:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file, self._held = -1, False

    def __enter__(self) -> DriverLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_held(study_dir: Path) -> bool | None:
    """Return whether the driver that took the lock last is still alive; None if it is on another
    host.

    The lock itself is not tried, because a driver that starts at that moment would be refused.
    """
    path = study_dir / LOCK_NAME
    with contextlib.suppress(OSError, canon.CanonError):
        holder = canon.parse(read_plain(path)) if path.is_file() else None
        if isinstance(holder, dict):
            return is_alive(holder.get("host"), holder.get("pid"), holder.get("born"))
    return False


def is_alive(host: object, pid: object, birth: object) -> bool | None:
    """Return whether a process is alive and is not a later process with the same id.

    Args:
        host: name of the process's host.
        pid: process id.
        birth: start of the process, as `get_process_start` returned it.

    Returns:
        None if the process is on another host.
    """
    if host != socket.gethostname():
        return None
    if not isinstance(pid, int) or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return birth == get_process_start(pid)


def get_process_start(pid: int) -> str:
    """Return the start of a process, which distinguishes it from a later process with the same id.

    Returns:
        The start in clock ticks since the machine booted; empty if the system does not provide it;
        `dead` for a zombie.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (OSError, ValueError):
        return ""
    # `starttime` is field 22 of proc(5), and `fields` begins with field 4
    return "dead" if state == "Z" else fields[18]


def _describe_holder(content: bytes) -> str:
    """Describe the holder of the lock; the file may be empty just before the holder writes it."""
    with contextlib.suppress(canon.CanonError):
        holder = canon.parse(content)
        if isinstance(holder, dict):
            return f"pid {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"
    return "another driver"
