"""The folder, the token and the environment of a Ray cluster of our own. Standard library only.

Ray's parts listen on every interface of the machine, so nobody without the token may talk to them. The token is a
file of mode 0600 in a folder of mode 0700; both go when the cluster does. A driver that was killed leaves its folder
behind: the next one removes it, told by the lock on the token, which the kernel drops with its holder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

TOKEN_NAME = "token"
MARK = "FORERUN_RAY_FOLDER"
"""In the environment of Ray's own processes and of what they start: some outlive a head that was killed."""

_PREFIX = "forerun-"
_MAX_BASE_CHARS = 24  # a socket's whole path may have 107 bytes, and Ray's part of it takes some 60
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's coming default; the old one warns
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run`, workers would install the project anew
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",  # Ray ends a process, unasked, that misses its head for 60 s
}
_AUTH_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class OwnFolder:
    """A folder for one cluster, with its token; removed by `close`."""

    def __init__(self) -> None:
        """Make it, and remove those whose drivers are dead. Raises OSError."""
        base = Path(tempfile.gettempdir())
        remove_abandoned(base)
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self.token = self.folder / TOKEN_NAME
        new = self.folder / "token.new"  # it gets its name once it is locked: no other driver may think it abandoned
        self._lock = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, secrets.token_hex(32).encode())
        new.rename(self.token)

    @property
    def ray_dir(self) -> str | None:
        """Where Ray may put its files, or None (Ray's default) if the path would be too long for its sockets.

        Ray opens its folder to all; ours around it is not.
        """
        return str(self.folder / "r") if len(str(self.folder.parent)) <= _MAX_BASE_CHARS else None

    @contextlib.contextmanager
    def marking(self) -> Iterator[None]:
        """Processes started meanwhile carry the mark."""
        os.environ[MARK] = str(self.folder)
        try:
            yield
        finally:
            del os.environ[MARK]

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
        """`token`: of a cluster of our own, the only one that its parts accept; None: whatever the user has set."""
        self._before = {name: os.environ.get(name) for name in (*_ENVIRONMENT, *_AUTH_VARIABLES)}
        os.environ.update({name: self._before[name] or value for name, value in _ENVIRONMENT.items()})
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
    """SIGKILL every process that carries the mark of `folder`. Linux only; elsewhere nothing happens."""
    mark = f"{MARK}={folder}\0".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes() and int(process.name) != os.getpid():
                os.kill(int(process.name), signal.SIGKILL)
