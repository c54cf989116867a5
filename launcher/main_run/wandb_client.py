"""Processes that run wandb: their environment, their time limits, and how they end.

The processes read orders on stdin and get only a short list of environment variables. Therefore no
secret of the command line or the environment reaches the disk. No thread or signal handler of wandb
enters this process, and nothing hangs or stays behind. The report's dashboards log runs with these
processes; `watch` reads online runs with them.
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

from forerun._launcher.main_run.process_signals import make_child_die_with_us
from forerun._proxies.core.canon import IMPORT_DIR
from forerun._proxies.core.errors import ForerunError
from forerun._proxies.core.notation import format_duration

WANDB_DIR = "wandb"
OFFLINE_SECONDS, ONLINE_SECONDS = 180.0, 900.0
"""Maximum wait for an answer of wandb."""
ANSWER = "forerun-wandb "
"""Prefix of a line that holds an answer; any other line was printed by wandb itself."""

_VARIABLES = (
    "PATH",
    "HOME",
    "TMPDIR",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "PYTHONPATH",
)
"""Environment variables that a wandb process always gets."""
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")
_VARIABLES_ONLINE = (
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
"""Environment variables that a wandb process also gets if it is online: login, server, and
certificates.
"""
Mode = Literal["offline", "online"]
_MAX_OUTPUT_CHARS = 400
"""Maximum number of characters of wandb's own output in an error message."""
_END_SECONDS = 30.0
"""Seconds for a process that has answered to end by itself."""
_POLL_SECONDS = 0.1
"""Seconds between two checks whether the process has ended: wandb's service may keep its pipe
open.
"""
_LAST_SECONDS = 1.0
"""Seconds to wait for the last output of a process that has ended."""


class DashboardError(ForerunError):
    """The study could not be logged to W&B; the study itself is unchanged."""


def build_wandb_environment(data_dir: Path, *, online: bool) -> dict[str, str]:
    """Return the environment of a wandb process. The only secret in it is the login that an online
    process needs.
    """
    names = _VARIABLES + (_VARIABLES_ONLINE if online else ())
    environment = {name: os.environ[name] for name in names if name in os.environ}
    package_root = str(IMPORT_DIR)
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (package_root, environment.get("PYTHONPATH")))
    )
    # By default wandb writes into the user's home.
    environment |= {"WANDB_DATA_DIR": str(data_dir), "WANDB_CACHE_DIR": str(data_dir / "cache")}
    # Otherwise wandb contacts its error service, even offline.
    environment["WANDB_ERROR_REPORTING"] = "false"
    if not online:
        environment["WANDB_CONFIG_DIR"] = str(data_dir / "config")
    return environment


class WandbProcess:
    """A process that runs wandb; it takes orders and gives answers as lines of JSON."""

    def __init__(
        self, command: list[str], data_dir: Path, *, online: bool, dies_with_us: bool = True
    ) -> None:
        """Start the process.

        Args:
            command: Arguments after the Python executable.
            data_dir: Folder in which wandb may keep files.
            online: Whether the process gets the login and a longer time limit.
            dies_with_us: Whether the kernel kills the process when this one ends. Otherwise it ends
                by itself when its stdin is closed and its work is done.
        """
        self.limit_seconds = ONLINE_SECONDS if online else OFFLINE_SECONDS
        self._online = online
        # The last lines of wandb's own output, for error messages
        self._output: deque[str] = deque(maxlen=20)
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-P", *command],
            cwd=data_dir,
            env=build_wandb_environment(data_dir, online=online),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C must reach only this process
            preexec_fn=make_child_die_with_us() if dies_with_us else None,  # noqa: PLW1509  (one system call, no lock held)
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        """Sort the lines that the process prints into answers and wandb's own output."""
        for raw_line in self._stdout:
            line = raw_line.decode(errors="replace")
            if line.startswith(ANSWER):
                self._answers.put(json.loads(line.removeprefix(ANSWER)))
            elif line.strip():
                self._output.append(line.strip())

    def send(self, order: dict[str, Any]) -> None:
        """Send one order.

        Raises:
            DashboardError: The process does not accept it in time, or has ended.
        """
        unsent, deadline = json.dumps(order).encode() + b"\n", time.monotonic() + self.limit_seconds
        while unsent:
            try:
                # wandb's service may keep its end of the pipe open after the process has ended
                if self._process.poll() is not None:
                    raise BrokenPipeError
                unsent = unsent[os.write(self._stdin.fileno(), unsent) :]
            except BlockingIOError:
                seconds_left = max(0.0, deadline - time.monotonic())
                _, writable, _ = select.select([], [self._stdin], [], seconds_left)
                if not writable:
                    raise DashboardError(
                        f"wandb accepted no data for {format_duration(self.limit_seconds)}, and "
                        "was stopped"
                    ) from None
            except BrokenPipeError:
                self.receive()
                raise DashboardError("wandb exited before everything was logged") from None

    def receive(self, more_seconds: float = 0.0) -> dict[str, Any]:
        """Wait for the next answer.

        Args:
            more_seconds: Seconds beyond the usual limit, for a long order.

        Raises:
            DashboardError: wandb cannot be started, fails, or does not answer in time.
        """
        seconds = self.limit_seconds + more_seconds
        deadline, reply = time.monotonic() + seconds, self._wait_for_answer(0.0)
        while reply is None and self._process.poll() is None:
            if time.monotonic() > deadline:
                raise DashboardError(
                    f"wandb did not finish within {format_duration(seconds)}, and was stopped"
                )
            reply = self._wait_for_answer(_POLL_SECONDS)
        reply = reply or self._wait_for_answer(_LAST_SECONDS)  # sent just before the process ended
        if reply is None:
            output = "\n".join(self._output)[-_MAX_OUTPUT_CHARS:]
            code = self._process.returncode
            raise DashboardError(f"wandb exited with code {code}: {output or 'it printed nothing'}")
        if "problem" in reply:
            hint = (
                " (wandb's own login is used: `wandb login`, or WANDB_API_KEY)"
                if self._online
                else ""
            )
            raise DashboardError(f"wandb failed: {reply['problem']}{hint}")
        return reply

    def _wait_for_answer(self, seconds: float) -> dict[str, Any] | None:
        with contextlib.suppress(queue.Empty):
            return self._answers.get(timeout=seconds)
        return None

    def end(self) -> None:
        """Close stdin, so that the process knows that no more orders come, and wait until it has
        ended.
        """
        with contextlib.suppress(OSError):
            self._stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)

    def stop(self) -> None:
        """Kill the process and its children. Another thread may call this; a caller that waits for
        an answer gets a DashboardError.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process if it still runs, and release its pipes and threads."""
        self.stop()
        self._process.wait()
        self._listener.join(_LAST_SECONDS)
        with contextlib.suppress(OSError):
            self._stdin.close()
        # wandb's service runs in its own session, and may keep the pipe open
        if not self._listener.is_alive():
            self._stdout.close()


@contextlib.contextmanager
def run_wandb_process(
    data_dir: Path, *, online: bool, dies_with_us: bool = True
) -> Iterator[WandbProcess]:
    """Run `forerun._launcher.report.dashboards.wandb_process` within the block; that module
    documents the orders it takes.
    """
    command = ["-m", "forerun._launcher.report.dashboards.wandb_process"]
    with contextlib.closing(
        WandbProcess(command, data_dir, online=online, dies_with_us=dies_with_us)
    ) as running:
        yield running
        running.end()


def ask_wandb(order: dict[str, Any], *, online: bool, more_seconds: float = 0.0) -> dict[str, Any]:
    """Return the answer to one order.

    Args:
        order: Order of `forerun._launcher.report.dashboards.wandb_process`.
        online: Whether the process may use the network.
        more_seconds: Seconds beyond the usual limit.

    Raises:
        DashboardError: See `WandbProcess.receive`.
    """
    with (
        tempfile.TemporaryDirectory(prefix="forerun-wandb-") as scratch,
        run_wandb_process(Path(scratch), online=online) as running,
    ):
        running.send(order)
        return running.receive(more_seconds)


def sync_runs(
    folders: Collection[Path], project: str, entity: str | None, more_seconds: float
) -> None:
    """Upload runs that were logged offline, with `wandb sync`.

    The exit code of `wandb sync` does not tell whether the upload worked. The caller must ask the
    service which rows it has.
    """
    entity_options = ["--entity", entity] if entity else []
    command = [
        "-m",
        "wandb",
        "sync",
        "--include-synced",
        "--project",
        project,
        *entity_options,
        *map(str, folders),
    ]
    with (
        tempfile.TemporaryDirectory(prefix="forerun-wandb-") as scratch,
        contextlib.closing(WandbProcess(command, Path(scratch), online=True)) as running,
        contextlib.suppress(DashboardError),
    ):
        running.receive(more_seconds)


def fetch_history(run_path: str, names: Collection[str], min_step: int) -> list[dict[str, Any]]:
    """Return the rows that a run has logged online, from row `min_step` on, each with `_step` and
    the requested names.

    Args:
        run_path: `entity/project/run`.
        names: Names to return; a row without any of them is left out.
        min_step: First row, by wandb's own count (`_step`).

    Raises:
        DashboardError: W&B does not answer, or this login cannot see such a run.
    """
    rows: list[dict[str, Any]] = ask_wandb(
        {"fetch": run_path, "names": sorted(names), "min_step": min_step}, online=True
    )["rows"]
    return rows
