"""Windows on a main run: W&B and TensorBoard, each kept up to date by a process beside the run, never by its ranks.

The metrics are the truth; a window is made anew by every launch. Its process ends when its standard input does, in
whatever way the supervisor went, after telling what is left. One that dies is told of, and hurts nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launcher.base.flag import Flag
from launcher.base.talk import say
from launcher.base.wandb_calls import WANDB_DIR, Mode, short_environment
from launcher.dashboards.runs import main_settings
from launcher.frozen.frozen import Decision
from launcher.supervisor.attempt import hearing
from proxies.external.growing import MetricsError
from proxies.external.wandb_run import WandbRun
from sweeps.run.redaction import redacted

FINISH_SECONDS = 120.0
"""How long a window may take for what is left once the run has ended; well within SLURM's grace."""
_POLL_SECONDS = 0.1
_LAST_SECONDS = 10.0
"""For its end, once it was killed."""
_READ_BACK_BYTES = 64 * 2**20
_MOST_SAID = 400
Mirror = Literal["wandb", "tensorboard"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mirrored:
    """What became of a window."""

    name: Mirror
    text: str
    """In a sentence."""
    path: str | None
    """A run's folder, which `wandb sync` takes if it was logged offline; or an event file."""
    url: str | None
    num_rows: int
    whole: bool
    """Whether all that was told is there."""


@contextlib.contextmanager
def mirrored(
    run_dir: Path, decision: Decision, found: list[Mirrored], *, wandb: Mode | None = None,
    tensorboard_dir: Path | None = None,
) -> Iterator[None]:  # fmt: skip
    """Within, the run in `run_dir` is shown in the windows asked for; afterwards `found` says what became of them.

    A signal that comes while they finish cuts them short. What earlier launches showed is taken away: to be entered by
    the one supervisor that has the folder.
    """
    windows: list[_Window] = []
    if wandb is not None:
        windows.append(_wandb(run_dir.absolute(), decision, wandb))
    if tensorboard_dir is not None:
        order = {"follow": str(run_dir.absolute()), "log_dir": str(tensorboard_dir.absolute()),
                 "digest": decision.digest}  # fmt: skip
        windows.append(_Window("tensorboard", "launcher.dashboards.mirror_tensorboard", order, FINISH_SECONDS))
    try:
        yield
    finally:
        signalled = Flag()
        with hearing(lambda _: signalled.set()):
            for window in windows:
                window.ask_to_end()
            found += [window.ended(signalled) for window in windows]


def _wandb(run_dir: Path, decision: Decision, mode: Mode) -> _Window:
    run_id = decision.digest[:16]
    (run_dir / WANDB_DIR).mkdir(parents=True, exist_ok=True)
    order = {
        "follow": str(run_dir), "mode": mode, "project": "forerun", "run_id": run_id, "name": f"run {run_id[:8]}",
        "config": main_settings(decision),
    }  # fmt: skip
    return _Window("wandb", "launcher.dashboards.wandb_process", order, FINISH_SECONDS, online=mode == "online")


class _Window:
    """A process that shows a run until it is asked to end."""

    def __init__(
        self, name: Mirror, module: str, order: dict[str, Any], limit_seconds: float,
        online: bool = False,
    ) -> None:  # fmt: skip
        self._name, self._order, self._limit_seconds, self._asked, self._said = name, order, limit_seconds, False, b""
        self._scratch = tempfile.TemporaryDirectory(prefix="forerun-mirror-")
        self._job = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            cwd=self._scratch.name,
            env=short_environment(Path(self._scratch.name), online=online),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is the run's
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        assert self._job.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died at once: `_listen` says so
            self._job.stdin.write(json.dumps(order).encode() + b"\n")
            self._job.stdin.flush()

    def _listen(self) -> None:
        """Take what it says; it says something only at its end."""
        assert self._job.stdout is not None
        self._said = self._job.stdout.read()
        self._job.wait()
        if not self._asked:
            say(f"forerun: the {self._name} mirror ended early, the run goes on: {self._problem()}")

    def ask_to_end(self) -> None:
        """Let it tell what is left, and end."""
        self._asked = True
        assert self._job.stdin is not None
        with contextlib.suppress(OSError):
            self._job.stdin.close()

    def ended(self, signalled: Flag) -> Mirrored:
        """Wait until it has; one that takes too long is ended, or at once when a signal comes."""
        deadline = time.monotonic() + self._limit_seconds
        while self._listener.is_alive() and not signalled.is_set() and time.monotonic() < deadline:
            self._listener.join(_POLL_SECONDS)
        late = self._listener.is_alive()
        with contextlib.suppress(ProcessLookupError):  # it, or what it left: none stays behind
            os.killpg(self._job.pid, signal.SIGKILL)
        self._listener.join(_LAST_SECONDS)
        if not self._listener.is_alive():  # wandb's service has a session of its own, and may hold the pipe still
            assert self._job.stdout is not None
            self._job.stdout.close()
        self._scratch.cleanup()
        answer = {} if late else self._answer()
        problem = self._problem()
        if late:
            problem = "a signal came while it told what was left"
            if not signalled.is_set():
                problem = f"it did not end within {self._limit_seconds:.0f} s"
        num_rows = answer.get("num_rows", 0)
        path = answer.get("path") or (str(Path(answer["dir"]).parent) if "dir" in answer else None)
        if not problem and self._name == "wandb":
            problem = self._wandb_problem(Path(str(path)), num_rows)
        text = f"{num_rows} rows in {path}" if not problem else f"not whole: {problem}"
        return Mirrored(name=self._name, text=text, path=path, url=answer.get("url"), num_rows=num_rows,
                        whole=not problem)  # fmt: skip

    def _answer(self) -> dict[str, Any]:
        with contextlib.suppress(ValueError, IndexError):
            answer = json.loads(self._said.decode(errors="replace").strip().splitlines()[-1])
            if isinstance(answer, dict):
                return answer
        return {}

    def _problem(self) -> str:
        answer = self._answer()
        if "problem" in answer:
            return redacted(str(answer["problem"]))[:_MOST_SAID]
        if "num_rows" in answer:
            return ""
        said = redacted(self._said.decode(errors="replace").strip())[-_MOST_SAID:]
        return f"code {self._job.returncode}: {said or 'it said nothing'}"

    def _wandb_problem(self, path: Path, num_rows: int) -> str:
        """Why what W&B wrote is not what it was told, empty if it is; then the runs of earlier launches go."""
        home, run_id = Path(self._order["follow"]) / WANDB_DIR, self._order["run_id"]
        if path.parent != home:
            return f"wandb wrote to {path}, not below {home}: is that folder writable?"
        file = path / f"run-{run_id}.wandb"
        try:
            rows = WandbRun(file, frozenset({"take"}))
            found = len(rows.read(_READ_BACK_BYTES))
        except (MetricsError, OSError) as error:
            return f"what wandb wrote cannot be read back: {error}; is the disk full?"
        if rows.at_end and found != num_rows:
            return f"{found} of {num_rows} rows are in {file}; is the disk full?"
        for older in (*home.glob(f"offline-run-*-{run_id}"), *home.glob(f"run-*-{run_id}")):
            if older != path and older.is_dir() and not older.is_symlink():
                shutil.rmtree(older, ignore_errors=True)
        return ""
