"""Processes that work with wandb: what each may know of this one, how long it may take, how it
ends.

They get their orders on stdin and an environment from a short list: so no secret of the command
line or the environment reaches the disk, no thread or signal handler of wandb's enters this
process, and nothing can hang or stay behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

from launcher.base.signals import make_child_die_with_us
from proxies.core.errors import ForerunError
from proxies.core.notation import format_duration

WANDB_DIR = "wandb"
OFFLINE_SECONDS, ONLINE_SECONDS = 180.0, 900.0
"""The longest wait for wandb."""
ANSWER = "forerun-wandb "
"""How the line of an answer begins; whatever else is printed is wandb's own."""

_PASSED = (
    "PATH",
    "HOME",
    "TMPDIR",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "PYTHONPATH",
)
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")
_PASSED_ONLINE = (
    "WANDB_API_KEY",
    "WANDB_BASE_URL",
    "WANDB_CONFIG_DIR",
    "WANDB_IDENTITY_TOKEN_FILE",
    "NETRC",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    *_PROXIES,
    *(name.lower() for name in _PROXIES),
)
Mode = Literal["offline", "online"]
_NUM_SAID = 400
_END_SECONDS = 30.0
"""For a process that has answered to end by itself."""
_POLL_SECONDS, _LAST_SECONDS = 0.1, 1.0
"""Between two looks whether it has ended, for wandb's own service may hold its pipe; for its last
output."""


class DashboardError(ForerunError):
    """The study could not be logged; the study itself is untouched."""


def short_environment(data_dir: Path, *, online: bool) -> dict[str, str]:
    """What a process of wandb's gets of our environment: no secret but, online, the login it
    needs.
    """
    names = _PASSED + (_PASSED_ONLINE if online else ())
    given = {name: os.environ[name] for name in names if name in os.environ}
    ours = str(Path(__file__).parents[2])
    given["PYTHONPATH"] = os.pathsep.join(filter(None, (ours, given.get("PYTHONPATH"))))
    # The default is a folder of the user's own.
    given |= {"WANDB_DATA_DIR": str(data_dir), "WANDB_CACHE_DIR": str(data_dir / "cache")}
    given["WANDB_ERROR_REPORTING"] = "false"  # else wandb looks its error service up, even offline
    if not online:
        given["WANDB_CONFIG_DIR"] = str(data_dir / "config")
    return given


class WandbProcess:
    """A process that works with wandb: orders go in and answers come out as lines of JSON."""

    def __init__(
        self, command: list[str], data_dir: Path, *, online: bool, dies_with_us: bool = True
    ) -> None:
        """Start it.

        Args:
            command: after Python's own name.
            data_dir: where wandb may keep files.
            online: whether it gets the login, and longer to answer.
            dies_with_us: or else it ends by itself when its stdin does, once all is done.
        """
        self.limit_seconds = ONLINE_SECONDS if online else OFFLINE_SECONDS
        self._online = online
        self._said: deque[str] = deque(maxlen=20)
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-P", *command],
            cwd=data_dir,
            env=short_environment(data_dir, online=online),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is ours
            preexec_fn=make_child_die_with_us() if dies_with_us else None,  # noqa: PLW1509  (one system call, no lock held)
        )
        assert self._process.stdin is not None
        self._into = self._process.stdin.fileno()
        os.set_blocking(self._into, False)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in (
            raw.decode(errors="replace") for raw in iter(self._process.stdout.readline, b"")
        ):
            if line.startswith(ANSWER):
                self._answers.put(json.loads(line.removeprefix(ANSWER)))
            elif line.strip():
                self._said.append(line.strip())

    def put(self, order: dict[str, Any]) -> None:
        """Give it a line.

        Raises:
            DashboardError: it does not take it, or has ended.
        """
        left, until = json.dumps(order).encode() + b"\n", time.monotonic() + self.limit_seconds
        while left:
            try:
                # wandb's own service may hold its end of the pipe still
                if self._process.poll() is not None:
                    raise BrokenPipeError
                left = left[os.write(self._into, left) :]
            except BlockingIOError:
                if not select.select([], [self._into], [], max(0.0, until - time.monotonic()))[1]:
                    raise DashboardError(
                        f"wandb accepted no data for {format_duration(self.limit_seconds)}, and "
                        "was stopped"
                    ) from None
            except BrokenPipeError:
                self.answer()
                raise DashboardError("wandb exited before everything was logged") from None

    def answer(self, more_seconds: float = 0.0) -> dict[str, Any]:
        """Wait for the next answer.

        Args:
            more_seconds: that it may take beyond the usual, for a long order.

        Raises:
            DashboardError: wandb cannot be started, fails, or does not answer.
        """
        seconds = self.limit_seconds + more_seconds
        until, found = time.monotonic() + seconds, self._next(0.0)
        while found is None and self._process.poll() is None:
            if time.monotonic() > until:
                raise DashboardError(
                    f"wandb did not finish within {format_duration(seconds)}, and was stopped"
                )
            found = self._next(_POLL_SECONDS)
        found = found or self._next(_LAST_SECONDS)  # said with its last breath
        if found is None:
            said = "\n".join(self._said)[-_NUM_SAID:]
            raise DashboardError(
                f"wandb exited with code {self._process.returncode}: {said or 'it printed nothing'}"
            )
        if "problem" in found:
            hint = (
                " (wandb's own login is used: `wandb login`, or WANDB_API_KEY)"
                if self._online
                else ""
            )
            raise DashboardError(f"wandb failed: {found['problem']}{hint}")
        return found

    def _next(self, seconds: float) -> dict[str, Any] | None:
        with contextlib.suppress(queue.Empty):
            return self._answers.get(timeout=seconds)
        return None

    def end(self) -> None:
        """Tell it that nothing more comes, and wait until it has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)

    def stop(self) -> None:
        """Kill it and what it started, as another thread may: whoever waits for it gets a
        DashboardError.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Have nothing of it stay behind, whether it has ended or not."""
        self.stop()
        self._process.wait()
        self._listener.join(_LAST_SECONDS)
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        # wandb's service has a session of its own, and may hold the pipe still
        if not self._listener.is_alive():
            self._process.stdout.close()


@contextlib.contextmanager
def job(data_dir: Path, *, online: bool, dies_with_us: bool = True) -> Iterator[WandbProcess]:
    """Within, `launcher.dashboards.wandb_process` takes orders; see there for them."""
    command = ["-m", "launcher.dashboards.wandb_process"]
    with contextlib.closing(
        WandbProcess(command, data_dir, online=online, dies_with_us=dies_with_us)
    ) as running:
        yield running
        running.end()


def ask(order: dict[str, Any], *, online: bool, more_seconds: float = 0.0) -> dict[str, Any]:
    """The answer to one order; raises as `WandbProcess.answer`."""
    with (
        tempfile.TemporaryDirectory(prefix="forerun-wandb-") as scratch,
        job(Path(scratch), online=online) as running,
    ):
        running.put(order)
        return running.answer(more_seconds)


def upload(
    folders: Collection[Path], project: str, entity: str | None, more_seconds: float
) -> None:
    """`wandb sync` of runs that were logged offline. How it ended says nothing: ask the service
    what it has.
    """
    whose = ["--entity", entity] if entity else []
    command = [
        "-m",
        "wandb",
        "sync",
        "--include-synced",
        "--project",
        project,
        *whose,
        *map(str, folders),
    ]
    with (
        tempfile.TemporaryDirectory(prefix="forerun-wandb-") as scratch,
        contextlib.closing(WandbProcess(command, Path(scratch), online=True)) as running,
        contextlib.suppress(DashboardError),
    ):
        running.answer(more_seconds)


def fetch_history(run_path: str, wanted: Collection[str], min_step: int) -> list[dict[str, Any]]:
    """What a run logged online, row by row from `_step` `min_step` on: of each the asked-for names
    and `_step`.

    Args:
        run_path: `entity/project/run`.
        wanted: names; rows with none of them are left out.
        min_step: wandb's own count of rows.

    Raises:
        DashboardError: W&B does not answer, or knows no such run, or not to this login.
    """
    rows: list[dict[str, Any]] = ask(
        {"fetch": run_path, "wanted": sorted(wanted), "min_step": min_step}, online=True
    )["rows"]
    return rows
