"""Starts the embedded trainer under torchrun, and starts it again from its newest good checkpoint when it is killed.

A job is restarted whole, by this supervisor: torchrun's own in-agent restart was measured as flaky on gloo. What counts
is the ending the run wrote, not torchrun's exit code, which says 1 for every failure.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher import metrics
from launcher.frozen import Decision
from launcher.launch_file import LAUNCH_FILE, read_launch
from launcher.lifeline import die_with_parent
from sweeps.lock import DriverLock

LOG_FILE = "torchrun.log"
POLL_SECONDS = 0.1
PROGRESS_SECONDS = 2.0
NUM_LOG_LINES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOutcome:
    """What came of a launch, all its attempts together."""

    event: Literal["finished", "stopped", "interrupted", "aborted", "refused", "failed"]
    """As `launcher.metrics.Ending`; `failed`: every attempt was killed or crashed."""
    exit_code: int
    step: int
    """Optimizer steps done."""
    reason: str
    validation_loss_nats: float | None
    num_restarts: int


def torchrun_command(python: str, num_ranks: int) -> list[str]:
    """The head of a launch line: one machine, `num_ranks` processes, on a free local port."""
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--max-restarts", "0"]
    ranks = ["--nnodes", "1", "--nproc-per-node", str(num_ranks)]
    return [python, "-m", "torch.distributed.run", *ranks, *rendezvous, "-m", "launcher.trainer"]


def _command(
    python: str, frozen: Path, decision: Decision, data_dir: Path, out_dir: Path, stop_after: int | None
) -> list[str]:
    config = frozen / LAUNCH_FILE if frozen.is_dir() else frozen
    paths = ["--config", str(config), "--data", str(data_dir), "--out", str(out_dir)]
    stop = [] if stop_after is None else ["--stop-after", str(stop_after)]
    return [*torchrun_command(python, decision.parallelism.num_ranks), *paths, *stop]


def launch_line(frozen: Path, data_dir: Path, out_dir: Path, stop_after: int | None = None) -> str:
    """The exact line that launches a frozen config (its folder or file) by hand, quoted for a shell.

    Raises:
        FrozenError: it cannot be read, or was tampered with.
    """
    return shlex.join(_command("python", frozen, read_launch(frozen), data_dir, out_dir, stop_after))


def launch(
    frozen: Path, data_dir: Path, out_dir: Path, stop_after: int | None = None, max_restarts: int = 3
) -> LaunchOutcome:
    """Train a frozen config (its folder or file) into `out_dir`, restarting a killed job at most `max_restarts` times.

    A run that ended in order, well or not, is never restarted. On SIGTERM or Ctrl-C it saves and ends. Progress goes to
    stderr, what the ranks say to `out_dir/torchrun.log`.

    Raises:
        FrozenError: the config cannot be read, or was tampered with.
        OSError: `out_dir` cannot be written.
        StudyHeld: another supervisor is at work in `out_dir`.
    """
    decision = read_launch(frozen)
    command = _command(sys.executable, frozen, decision, data_dir, out_dir, stop_after)
    out_dir.mkdir(parents=True, exist_ok=True)
    with DriverLock(out_dir):
        return _supervise(command, decision, out_dir, max_restarts)


def _supervise(command: list[str], decision: Decision, out_dir: Path, max_restarts: int) -> LaunchOutcome:
    """Attempt after attempt, until one comes to an end of its own."""
    for attempt in range(max_restarts + 1):
        ending = _attempt(command, decision, out_dir)
        if ending is not None:
            return LaunchOutcome(
                event=ending.event,
                exit_code=ending.exit_code,
                step=ending.step,
                reason=ending.reason,
                validation_loss_nats=ending.validation_loss_nats,
                num_restarts=attempt,
            )
        again = "starting it again from the newest checkpoint" if attempt < max_restarts else "giving up"
        _say(f"attempt {attempt + 1} was killed or crashed; {again} (log: {out_dir / LOG_FILE})")
    log = (out_dir / LOG_FILE).read_text(errors="replace").splitlines()
    return LaunchOutcome(
        event="failed",
        exit_code=1,
        step=_last_step(out_dir),
        reason="\n".join(
            [f"{max_restarts + 1} attempts, none came to an end; the log's last lines:", *log[-NUM_LOG_LINES:]]
        ),
        validation_loss_nats=None,
        num_restarts=max_restarts,
    )


def _attempt(command: list[str], decision: Decision, out_dir: Path) -> metrics.Ending | None:
    """Run torchrun once, to whatever end."""
    (out_dir / metrics.ENDING_FILE).unlink(missing_ok=True)
    # One thread a rank unless told otherwise, as torchrun itself would choose, but without its warning.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with (out_dir / LOG_FILE).open("ab") as log, _signals() as told:
        # Its own session: Ctrl-C reaches the supervisor alone, which passes it on once.
        job = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  (one system call, and no thread of ours holds a lock)
        )
        _follow(job, told, decision, out_dir)
    ending = metrics.read_ending(out_dir)
    if ending is None and told.is_set():
        # Too early for the ranks to listen; what was asked for is an end all the same, not a restart.
        reason = "by a signal, before it could save"
        return metrics.Ending(event="interrupted", exit_code=130, step=_last_step(out_dir), reason=reason)
    return ending


def _follow(job: subprocess.Popen[bytes], told: threading.Event, decision: Decision, out_dir: Path) -> None:
    """Wait for the job, telling its progress, and pass a signal on to it."""
    shown, next_report, passed_on = -1, time.monotonic() + PROGRESS_SECONDS, False
    while job.poll() is None:
        if told.wait(POLL_SECONDS) and not passed_on:
            _say("asked to end: saving")
            job.send_signal(signal.SIGTERM)
            passed_on = True
        if time.monotonic() >= next_report:
            shown = _report(decision, out_dir, shown)
            next_report = time.monotonic() + PROGRESS_SECONDS
    _report(decision, out_dir, shown)


def _report(decision: Decision, out_dir: Path, shown: int) -> int:
    """Say where the run is, unless that was said already; returns the step said last."""
    lines = [line for line in metrics.read(out_dir) if "train_loss_nats" in line]
    if not lines or lines[-1]["step"] == shown:
        return shown
    step, loss, speed = (lines[-1][key] for key in ("step", "train_loss_nats", "tokens_per_second"))
    assert isinstance(step, int) and isinstance(loss, float) and isinstance(speed, float)
    num_steps = decision.learning_rate.schedule.num_steps
    eta_seconds = (num_steps - step) * decision.batch_tokens / speed
    _say(f"step {step}/{num_steps}  loss {loss:.4f} nats  {speed:,.0f} tokens/s  {eta_seconds:,.0f} s to the end")
    return step


def _last_step(out_dir: Path) -> int:
    steps = [step for line in metrics.read(out_dir) if isinstance(step := line.get("step"), int)]
    return max(steps, default=0)


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set, instead of ending this process; only the main thread can listen."""
    told = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield told
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: told.set()) for number in numbers]
    try:
        yield told
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
