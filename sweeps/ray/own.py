"""The folder, the token and the environment of a Ray cluster of our own. Standard library only.

Ray's parts listen on every interface of the machine, so nobody without the token may talk to them.
The token is a file of mode 0600 in a folder of mode 0700; both go when the cluster does. A driver
that was killed leaves its folder behind: the next one removes it, told by the lock on the token,
which the kernel drops with its holder.
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
"""In the environment of Ray's own processes and of what they start: some outlive a head that was
killed."""

_PREFIX = "forerun-"
_END_SECONDS = 10.0  # a process that a dead network disk holds does not end at all
_MAX_BASE_CHARS = 24  # a socket's whole path may have 107 bytes, and Ray's part of it takes some 60
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's coming default; the old one warns
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run`, workers would install the project anew
    # Ray ends a process, unasked, that misses its head for 60 s
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
    # A Python for each core before anybody asks. None becomes a worker of ours: those have their
    # own environment.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # workers run at the driver's; Ray's own 15 starves them beside others
    "RAY_worker_niceness": "0",
}
_AUTH_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class ClusterFolder:
    """A folder for one cluster, with its token; removed by `close`."""

    def __init__(self) -> None:
        """Make it, and remove those whose drivers are dead. Raises OSError."""
        base = Path(tempfile.gettempdir())
        remove_abandoned(base)
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self.token = self.folder / TOKEN_NAME
        # it gets its name once it is locked: no other driver may think it abandoned
        new = self.folder / "token.new"
        self._lock = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, secrets.token_hex(32).encode())
        new.rename(self.token)

    @property
    def ray_dir(self) -> str | None:
        """Where Ray may put its files, or None (Ray's default) if the path would be too long for
        its sockets.

        Ray opens its folder to all; ours around it is not.
        """
        return str(self.folder / "r") if len(str(self.folder.parent)) <= _MAX_BASE_CHARS else None

    def marked(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment of processes that belong to this cluster."""
        return {**environment, MARK: str(self.folder)}

    def close(self) -> None:
        """Remove everything, once Ray has stopped; what is left of its processes ends."""
        end_processes(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class Environment:
    """This process's variables for Ray, until `close` puts back what was there."""

    def __init__(self, token: Path | None) -> None:
        """`token`: of a cluster of our own, the only one that its parts accept; None: whatever the
        user has set.
        """
        self._before = {name: os.environ.get(name) for name in (*_ENVIRONMENT, *_AUTH_VARIABLES)}
        os.environ.update(
            {name: self._before[name] or value for name, value in _ENVIRONMENT.items()}
        )
        if token is not None:
            os.environ.pop("RAY_AUTH_TOKEN", None)
            os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)})

    def close(self) -> None:
        """Put back what was there."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def remove_abandoned(base: Path) -> None:
    """Remove the folders of drivers that were killed; folders of others, or in use, stay."""
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
    """SIGKILL every process of the cluster in `folder`, and wait until it is gone.

    Linux only; elsewhere nothing happens.
    """
    deadline = time.monotonic() + _END_SECONDS
    while (left := list(processes(folder))) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):  # gone, or another user's
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def processes(folder: Path) -> Iterator[int]:
    """Processes of the cluster in `folder`, without this one; those that only wait for their parent
    are none.

    They carry its mark, or hold a file below it open for writing: Ray's agents write titles over
    their environment.
    """
    mark, below = f"{MARK}={folder}\0".encode(), f"{os.path.realpath(folder)}/"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(process.name) != os.getpid() and (
                mark in (process / "environ").read_bytes() or _writes(process, below)
            ):
                yield int(process.name)


def _writes(process: Path, below: str) -> bool:
    """Whether a process holds a file open for writing whose path begins so."""
    for handle in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # it closes files meanwhile
            if str(handle.readlink()).startswith(below):
                flags = re.search(
                    r"^flags:\s*(\d+)", (process / "fdinfo" / handle.name).read_text(), re.M
                )
                if flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY:
                    return True
    return False
