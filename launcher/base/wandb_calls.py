"""Calls to wandb, each in a process of its own: what it may know of this one, how long it may take, how it ends.

It gets its order on stdin and an environment from a short list: so no secret of the command line or the environment
reaches the disk, no thread or signal handler of wandb's enters this process, and nothing can hang or stay behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from launcher.base.lifeline import die_with_parent

WANDB_DIR = "wandb"
OFFLINE_SECONDS, ONLINE_SECONDS = 180.0, 900.0
"""The longest wait for wandb."""

_PASSED = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")
_PASSED_ONLINE = (
    "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_CONFIG_DIR", "WANDB_IDENTITY_TOKEN_FILE", "NETRC", "SSL_CERT_FILE",
    "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", *_PROXIES, *(name.lower() for name in _PROXIES),
)  # fmt: skip
Mode = Literal["offline", "online"]
_NUM_SAID = 400
_ANSWERS = {"dir", "dirs", "rows", "problem", "lacking", "spec", "absent"}


class DashboardError(Exception):
    """The study could not be logged; the study itself is untouched."""


def short_environment(data_dir: Path, *, online: bool) -> dict[str, str]:
    """What a process of wandb's gets of our environment: no secret but, online, the login it needs."""
    names = _PASSED + (_PASSED_ONLINE if online else ())
    given = {name: os.environ[name] for name in names if name in os.environ}
    ours = str(Path(__file__).parents[2])
    given["PYTHONPATH"] = os.pathsep.join(filter(None, (ours, given.get("PYTHONPATH"))))
    # Files of tables are staged here, and uploaded from here; the default is a folder of the user's own.
    given |= {"WANDB_DATA_DIR": str(data_dir), "WANDB_CACHE_DIR": str(data_dir / "cache")}
    given["WANDB_ERROR_REPORTING"] = "false"  # else wandb looks its error service up, even offline
    if not online:
        given["WANDB_CONFIG_DIR"] = str(data_dir / "config")
    return given


def ask(order: dict[str, Any], data_dir: Path, *, online: bool, more_seconds: float = 0.0) -> dict[str, Any]:
    """Have `launcher.dashboards.wandb_process` do what is ordered; its answer.

    Args:
        order: see there.
        data_dir: where wandb may keep files.
        online: whether it gets the login, and longer to end.
        more_seconds: that it may take beyond the usual, for a long order.

    Raises:
        DashboardError: wandb cannot be started, fails, or does not end.
    """
    limit_seconds = (ONLINE_SECONDS if online else OFFLINE_SECONDS) + more_seconds
    command = [sys.executable, "-P", "-m", "launcher.dashboards.wandb_process"]
    code, said = _run(command, data_dir, json.dumps(order).encode(), online, limit_seconds)
    if code is None:
        raise DashboardError(f"wandb did not end within {limit_seconds:.0f} s, and was ended")
    text = said.decode(errors="replace").strip()
    try:
        answer = json.loads(text.splitlines()[-1])
    except (ValueError, IndexError):
        answer = None
    if not isinstance(answer, dict) or not answer.keys() & _ANSWERS:
        raise DashboardError(f"wandb ended with code {code}: {text[-_NUM_SAID:] or 'it said nothing'}")
    if "problem" in answer:
        hint = " (wandb's own login is used: `wandb login`, or WANDB_API_KEY)" if online else ""
        raise DashboardError(f"wandb failed: {answer['problem']}{hint}")
    return answer


def upload(folders: Collection[Path], project: str, entity: str | None, limit_seconds: float) -> None:
    """`wandb sync` of runs that were logged offline. How it ended says nothing: ask the service what it has."""
    whose = ["--entity", entity] if entity else []
    options = ["--include-synced", "--project", project, *whose]
    with tempfile.TemporaryDirectory(prefix="forerun-wandb-") as scratch:
        command = [sys.executable, "-P", "-m", "wandb", "sync", *options, *map(str, folders)]
        _run(command, Path(scratch), b"", True, limit_seconds)


def fetch_history(run_path: str, wanted: Collection[str], min_step: int) -> list[dict[str, Any]]:
    """What a run logged online, row by row from `_step` `min_step` on: of each the wanted names and `_step`.

    Args:
        run_path: `entity/project/run`.
        wanted: names; rows with none of them are left out.
        min_step: wandb's own count of rows.

    Raises:
        DashboardError: W&B does not answer, or knows no such run, or not to this login.
    """
    order = {"fetch": run_path, "wanted": sorted(wanted), "min_step": min_step}
    with tempfile.TemporaryDirectory(prefix="forerun-wandb-") as folder:
        rows: list[dict[str, Any]] = ask(order, Path(folder), online=True)["rows"]
    return rows


def _run(
    command: list[str], data_dir: Path, given: bytes, online: bool, limit_seconds: float
) -> tuple[int | None, bytes]:
    """Exit code, None if it had to be ended, and what it said; ends it, whatever happens here."""
    job = subprocess.Popen(
        command,
        cwd=data_dir,
        env=short_environment(data_dir, online=online),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509  (one system call, and no thread of ours holds a lock)
    )
    try:
        said, _ = job.communicate(given, timeout=limit_seconds)
        return job.returncode, said
    except subprocess.TimeoutExpired:
        return None, b""
    finally:
        if job.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        for pipe in (job.stdin, job.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
