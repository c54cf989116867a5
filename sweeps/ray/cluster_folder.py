"""Folder, token and environment variables of a Ray cluster that forerun starts.

This module imports only the standard library.

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
from collections.abc import Iterator
from pathlib import Path

TOKEN_NAME = "token"
FOLDER_VARIABLE = "FORERUN_RAY_FOLDER"
"""Environment variable that holds the cluster's folder, in Ray's processes and their children.

Some processes outlive a head that was killed. `find_processes` finds them by this variable.
"""

_PREFIX = "forerun-"
# Time limit for processes to end: a process that waits for a dead network disk does not end at all
_END_SECONDS = 10.0
# Maximum length of the temporary folder's path: a socket's path may have 107 bytes, and Ray's part
# of it takes about 60
_MAX_BASE_CHARS = 24
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
        new_token = self.folder / "token.new"
        self._lock = os.open(new_token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, secrets.token_hex(32).encode())
        new_token.rename(self.token)

    @property
    def ray_dir(self) -> str | None:
        """Folder for Ray's files, or None (Ray's default) if the path would be too long for its
        sockets.

        Ray opens its folder to all users; the folder around it stays closed.
        """
        return str(self.folder / "r") if len(str(self.folder.parent)) <= _MAX_BASE_CHARS else None

    def make_environment(self) -> dict[str, str]:
        """Return this process's environment with the mark of processes of this cluster."""
        return {**os.environ, FOLDER_VARIABLE: str(self.folder)}

    def close(self) -> None:
        """End the cluster's remaining processes and remove its folder, after Ray has stopped."""
        end_processes(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class RayEnvironment:
    """Environment variables of this process for Ray; `close` restores the previous values."""

    def __init__(self, token: Path | None) -> None:
        """Set the variables. A variable of Ray's behavior that the user has set keeps its value.

        Args:
            token: token file of a cluster that forerun starts, which accepts only this token; None
                for an existing cluster: keep the token that the user has set.
        """
        self._previous_values = {
            name: os.environ.get(name) for name in (*_ENVIRONMENT, *_AUTH_VARIABLES)
        }
        os.environ.update(
            {name: self._previous_values[name] or value for name, value in _ENVIRONMENT.items()}
        )
        if token is not None:
            os.environ.pop("RAY_AUTH_TOKEN", None)
            os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)})

    def close(self) -> None:
        """Restore the previous values."""
        for name, value in self._previous_values.items():
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
    while (pids := list(find_processes(folder))) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(OSError):  # the process is gone, or another user's
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def find_processes(folder: Path) -> Iterator[int]:
    """Yield the ids of the processes of the cluster in `folder`, except this process and zombies.

    These processes have `FOLDER_VARIABLE` in their environment, or hold a file below the folder
    open for writing. The environment alone does not suffice, because Ray's agents overwrite it with
    their process titles.
    """
    mark, path_prefix = f"{FOLDER_VARIABLE}={folder}\0".encode(), f"{os.path.realpath(folder)}/"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(process.name) != os.getpid() and (
                mark in (process / "environ").read_bytes()
                or _holds_open_for_writing(process, path_prefix)
            ):
                yield int(process.name)


def _holds_open_for_writing(process: Path, path_prefix: str) -> bool:
    """Return whether a process has a file open for writing whose path begins with the prefix."""
    for handle in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # the process may close files meanwhile
            if str(handle.readlink()).startswith(path_prefix):
                flags = re.search(
                    r"^flags:\s*(\d+)", (process / "fdinfo" / handle.name).read_text(), re.M
                )
                if flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY:
                    return True
    return False
