"""Folder, token and environment variables of a Ray cluster that forerun starts. Standard library
only.

Ray's processes listen on every interface of the machine, so they accept only clients with the
token. The token is a file of mode 0600 in a folder of mode 0700; both are removed with the cluster.
A driver that was killed leaves its folder behind, and the next driver removes it: the kernel drops
the lock on the token when its holder dies, so a token without a lock is abandoned.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

TOKEN_NAME = "token"
MARK = "FORERUN_RAY_FOLDER"
"""Environment variable of Ray's processes and of what they start, set to the cluster's folder.

Some processes outlive a head that was killed; this finds them.
"""

_PREFIX = "forerun-"
_END_SECONDS = 10.0  # a process that waits for a dead network disk does not end at all
_MAX_BASE_CHARS = 24  # a socket's path may have 107 bytes, and Ray's part of it takes about 60
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default; the old one warns
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run`, workers would reinstall the project
    # By default Ray ends a process that has no connection to its head for 60 s
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
    # By default Ray starts a Python process for each core in advance. They cannot become forerun's
    # workers, which have another environment.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # The driver's niceness; Ray's default of 15 starves workers on a shared machine
    "RAY_worker_niceness": "0",
}
_AUTH_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class ClusterFolder:
    """A folder for one cluster, with the cluster's token; `close` removes it."""

    def __init__(self) -> None:
        """Make the folder, and remove the folders of dead drivers. Raises OSError."""
        base = Path(tempfile.gettempdir())
        remove_abandoned(base)
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self.token = self.folder / TOKEN_NAME
        # The token gets its name only once it is locked, so that no other driver takes it for
        # abandoned
        new = self.folder / "token.new"
        self._lock = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, secrets.token_hex(32).encode())
        new.rename(self.token)

    @property
    def ray_dir(self) -> str | None:
        """Folder for Ray's files, or None (Ray's default) if the path would be too long for its
        sockets.

        Ray opens its folder to all users; the folder around it stays closed.
        """
        return str(self.folder / "r") if len(str(self.folder.parent)) <= _MAX_BASE_CHARS else None

    def marked(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of processes that belong to this cluster."""
        return {**environment, MARK: str(self.folder)}

    def close(self) -> None:
        """End the processes that are left of the cluster, and remove its folder. Call it after Ray
        has stopped.
        """
        end_processes(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class Environment:
    """Environment variables of this process for Ray; `close` restores the previous values."""

    def __init__(self, token: Path | None) -> None:
        """Set the variables.

        Args:
            token: token file of a cluster that forerun starts, the only token that the cluster
                accepts; None: keep the token that the user has set.
        """
        self._before = {name: os.environ.get(name) for name in (*_ENVIRONMENT, *_AUTH_VARIABLES)}
        os.environ.update(
            {name: self._before[name] or value for name, value in _ENVIRONMENT.items()}
        )
        if token is not None:
            os.environ.pop("RAY_AUTH_TOKEN", None)
            os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)})

    def close(self) -> None:
        """Restore the previous values."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def remove_abandoned(base: Path) -> None:
    """Remove the folders of drivers that were killed.

    Folders of other users, and folders in use, stay.
    """
    for token in base.glob(f"{_PREFIX}*/{TOKEN_NAME}"):
        with contextlib.suppress(OSError):
            if token.parent.stat().st_uid != os.getuid():
                continue
            handle = os.open(token, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                end_processes(token.parent)
                shutil.rmtree(token.parent, ignore_errors=True)
            finally:
                os.close(handle)


def end_processes(folder: Path) -> None:
    """Send SIGKILL to every process of the cluster in `folder`, and wait until they are gone.

    Linux only; elsewhere this does nothing.
    """
    deadline = time.monotonic() + _END_SECONDS
    while (left := list(processes(folder))) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):  # the process is gone, or another user's
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def processes(folder: Path) -> Iterator[int]:
    """Yield the ids of the processes of the cluster in `folder`, except this process and zombies.

    They have the mark in their environment, or hold a file below the folder open for writing: Ray's
    agents overwrite their environment with titles.
    """
    mark, below = f"{MARK}={folder}\0".encode(), f"{os.path.realpath(folder)}/"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(process.name) != os.getpid() and (
                mark in (process / "environ").read_bytes()
                or _holds_open_for_writing(process, below)
            ):
                yield int(process.name)


def _holds_open_for_writing(process: Path, below: str) -> bool:
    """Return whether a process holds a file open for writing whose path begins with `below`."""
    for handle in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # the process may close files meanwhile
            if str(handle.readlink()).startswith(below):
                flags = re.search(
                    r"^flags:\s*(\d+)", (process / "fdinfo" / handle.name).read_text(), re.M
                )
                if flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY:
                    return True
    return False
