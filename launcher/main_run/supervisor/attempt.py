"""One attempt at a main run: its job, that is torchrun and all ranks, is started, watched, asked to
save, and ended.

torchrun puts every rank into a session of its own, so a job is identified by a token in the
environment of its processes, which children inherit. A signal goes to the ranks themselves: on a
signal, torchrun gives its ranks 30 s and then kills them, and a large model takes longer to save.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forerun._launcher.main_run import metrics_file
from forerun._launcher.main_run.process_signals import (
    JOB_VARIABLE,
    SignalFlag,
    make_child_die_with_us,
)
from forerun._launcher.main_run.progress_output import print_progress
from forerun._launcher.main_run.supervisor.hang_detector import HangDetector, RunPace, SilenceLimits
from forerun._launcher.main_run.supervisor.record_guard import RecordGuard
from forerun._launcher.main_run.supervisor.run_folder import RunFolder
from forerun._proxies.core.failures import Crash, count_oom_kills, diagnose_crash, read_log_end
from forerun._proxies.core.notation import format_duration, format_loss, format_speed
from forerun._proxies.core.redaction import LineRedactor
from forerun._proxies.external.log_file import RedactedLog

POLL_SECONDS = 0.1
LIVE_SECONDS, PLAIN_SECONDS = 2.0, 15.0
"""Seconds between two lines of progress, on a terminal and elsewhere."""
LEAVE_SECONDS = 60.0
"""Maximum seconds between the written ending of a job and its end."""
STACK_SECONDS = 3.0
"""Seconds for all ranks of a hung job on this machine to write their stacks."""
SRUN_SECONDS = 60.0
"""Seconds for `srun` to end its tasks on other machines."""
_CLEAR_SECONDS = 20.0
"""Maximum seconds for the killed processes of a job to disappear."""


# ---- Signals ----


class Signals:
    """Requests that came as signals. `save`: save and end. `now`: end at once (Ctrl-C again)."""

    def __init__(self) -> None:
        self.save, self.now = SignalFlag(), SignalFlag()

    def receive(self, number: int) -> None:
        """Take a signal. Only Ctrl-C counts as a second one, because schedulers repeat theirs."""
        if number == signal.SIGINT and self.save.is_set():
            self.now.set()
        self.save.set()


@contextlib.contextmanager
def listen_to_signals(receive: Callable[[int], None]) -> Iterator[None]:
    """Call `receive` for SIGTERM, SIGHUP and Ctrl-C within the block, instead of ending this
    process.

    Only the main thread may set signal handlers; in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda received, _: receive(received))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- One attempt ----


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptSpec:
    """The specification of every attempt of a launch."""

    command: list[str]
    run_dir: Path
    log: Path
    limits: SilenceLimits
    num_steps: int
    keeps_ending: bool = True
    """Whether this supervisor removes the ending of the last attempt; one of several machines
    does."""
    num_checkpoints: int = 1
    """Number of the newest checkpoints that the run keeps at least."""


def run_attempt(
    spec: AttemptSpec, signals: Signals, run_folder: RunFolder, guard: RecordGuard | None
) -> metrics_file.AttemptEnd | Crash:
    """Run the job once, to whatever end; nothing of it is left on this machine on return.

    Args:
        spec: What to run.
        signals: Requests to save and end.
        run_folder: Folder of the run. If it is removed, the job is asked to save and end; if
            another process takes it, the job ends at once.
        guard: Guard that reports at once if metrics or checkpoints of the run are removed; None on
            a machine that does not keep them.

    Returns:
        The end of the attempt, if it ended in order or because of a signal; otherwise the crash.

    Raises:
        OSError: The log cannot be written.
    """
    ending_file = spec.run_dir / metrics_file.ENDING_FILE
    if spec.keeps_ending:
        ending_file.unlink(missing_ok=True)
    old_ending, kills_before = _identify(ending_file), count_oom_kills()

    def has_ended() -> bool:
        return _identify(ending_file) not in (old_ending, None)

    watchdog = HangDetector(spec.run_dir, spec.limits, time.monotonic())
    with contextlib.closing(RedactedLog(spec.log, LineRedactor(), append=True)) as log:
        begins = spec.log.stat().st_size
        job = ProcessSession(spec.command, log.fileno())
        try:
            hung = _follow(job, spec, signals, watchdog, has_ended, run_folder, guard)
        finally:
            job.clear()
    if has_ended() and (ending := metrics_file.read_ending(spec.run_dir)):
        return ending
    if signals.save.is_set():
        # The signal came before the ranks listened, or a second one did not let them finish. The
        # user wants the run to end, so it is not restarted.
        reason = "by a signal, before it could save"
        if signals.now.is_set():
            reason = "killed by a second signal"
        return metrics_file.AttemptEnd(
            event="interrupted", exit_code=130, step=read_last_step(spec.run_dir), reason=reason
        )
    return diagnose_crash(
        read_log_end(spec.log, begins),
        step=watchdog.pace.step,
        exit_code=job.process.returncode,
        hung=hung,
        num_oom_kills=count_oom_kills() - kills_before,
    )


def read_last_step(run_dir: Path) -> int:
    """Return the last step in the metrics; 0 if there is none."""
    steps = [
        step
        for line in metrics_file.read_lines(run_dir)
        if isinstance(step := line.get("step"), int)
    ]
    return max(steps, default=0)


def _identify(path: Path) -> tuple[int, int] | None:
    """Return what distinguishes a file from one that was there before; None if it is missing."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


_SAVING = "forerun: signal received: saving, then ending (Ctrl-C again ends now without saving)"


def _follow(
    job: ProcessSession,
    spec: AttemptSpec,
    signals: Signals,
    watchdog: HangDetector,
    has_ended: Callable[[], bool],
    run_folder: RunFolder,
    guard: RecordGuard | None,
) -> str:
    """Wait for the job, report its progress, and pass a signal on to it.

    Returns:
        The reason why the job counts as hung; empty if it does not.
    """
    interval = LIVE_SECONDS if sys.stderr.isatty() else PLAIN_SECONDS
    reported_step, next_report = -1, time.monotonic() + LIVE_SECONDS
    is_asked, ended_at = False, None
    while job.process.poll() is None:
        if signals.save.wait(POLL_SECONDS):
            time.sleep(POLL_SECONDS)
        now = time.monotonic()
        hung, request = watchdog.check(now), ""
        if guard is not None:
            guard.check(watchdog.recorded)
        run_folder.check()
        if run_folder.new_holder:
            return ""
        if signals.now.is_set():
            print_progress("forerun: second signal: ending now without saving")
            return ""
        if run_folder.is_removed:
            request = (
                f"warning: {run_folder.folder} was removed or emptied: saving the run there again, "
                "then ending"
            )
        elif signals.save.is_set():
            request = _SAVING
        if request and not is_asked:
            print_progress(request)
            job.ask_to_save()
            is_asked = True
        if ended_at is None and has_ended():
            ended_at = now
        if ended_at is not None and now > ended_at + LEAVE_SECONDS:
            return ""
        if hung and ended_at is None:
            print_progress(
                f"forerun: {hung}: writing the stack of every rank to the log, then ending the job"
            )
            job.dump_stacks()
            return hung
        if now >= next_report:
            reported_step = _report(spec, watchdog.pace, reported_step, now)
            next_report = now + interval
    watchdog.check(time.monotonic())
    _report(spec, watchdog.pace, reported_step, time.monotonic())
    return ""


def _report(spec: AttemptSpec, pace: RunPace, reported_step: int, now: float) -> int:
    """Print the step of the run unless it was printed before; return the last printed step."""
    if pace.step is None or pace.loss_nats is None or pace.step == reported_step:
        return reported_step
    text = f"step {pace.step}/{spec.num_steps}  loss {format_loss(pace.loss_nats)} nats"
    if speed := pace.compute_tokens_per_second(now):
        text += f"  {format_speed(speed, 'tokens')}"
    if seconds_left := pace.estimate_seconds_left(spec.num_steps):
        text += f"  {format_duration(seconds_left)} left"
    print_progress(text)
    return pace.step


# ---- The job's processes ----


class ProcessSession:
    """A process in a session of its own, and all that it starts."""

    def __init__(self, command: list[str], log: int) -> None:
        """Start a command whose output goes to the file descriptor `log`."""
        self._token, self._log = secrets.token_hex(16), log
        self._is_remote = Path(command[0]).name == "srun"
        """Whether ranks may be on other machines, where only `srun` reaches them."""
        # One thread a rank unless the user says otherwise, as torchrun chooses with a warning.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, JOB_VARIABLE: self._token}
        # A session of its own: Ctrl-C reaches the supervisor alone, which passes it on once.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            # srun passes SIGTERM on. If it were killed, its tasks on other machines would go on.
            preexec_fn=make_child_die_with_us(  # noqa: PLW1509
                signal.SIGTERM if self._is_remote else signal.SIGKILL
            ),
        )

    def ask_to_save(self) -> None:
        """Send SIGTERM to the ranks on this machine, which tell the others; to the job itself if it
        has no ranks yet.
        """
        for pid in self._list_ranks() or [self.process.pid]:
            _send_signal(pid, signal.SIGTERM)

    def dump_stacks(self) -> None:
        """Have the ranks write the stacks of all their threads into the log, one rank after
        another. A rank that does not listen yet is ended by the signal, just before the job is.
        """
        ranks = self._list_ranks()
        for pid in ranks:
            with contextlib.suppress(OSError):  # a full disk
                os.write(self._log, f"forerun: the stack of process {pid}:\n".encode())
            _send_signal(pid, signal.SIGUSR1)
            time.sleep(STACK_SECONDS / len(ranks))

    def clear(self) -> None:
        """End what is left, and wait until it is gone: it must not write where the next attempt
        writes.
        """
        if self._is_remote and self.process.poll() is None:
            self.process.terminate()  # srun passes it on to other machines
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(SRUN_SECONDS)
        deadline = time.monotonic() + _CLEAR_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            members = self._list_members()
            if not members and self.process.poll() is not None:
                return
            for pid in members:
                _send_signal(pid, signal.SIGKILL)
            time.sleep(POLL_SECONDS)

    def _list_ranks(self) -> list[int]:
        """Return the processes that torchrun's agent started on this machine, without those that a
        rank starts (a compiler's workers).
        """
        members = self._list_members()
        in_rank = {pid for pid, environment in members.items() if b"\0LOCAL_RANK=" in environment}
        return [pid for pid in in_rank if _find_parent(pid) in members.keys() - in_rank]

    def _list_members(self) -> dict[int, bytes]:
        """Return the environment of each running process of the job on this machine, by process id;
        none on systems other than Linux.

        A process that is ending has an empty environment; it writes no more.
        """
        token = f"\0{JOB_VARIABLE}={self._token}\0".encode()
        environments = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                environment = b"\0" + path.read_bytes()
                if token in environment:
                    environments[int(path.parent.name)] = environment
        return environments


def _send_signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _find_parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
    return 0
