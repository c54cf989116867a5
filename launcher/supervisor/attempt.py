"""One attempt at a main run: a job of processes from its start to its end, asked to save, watched, and cleared away.

torchrun puts every rank into a session of its own, so a job is known by a token in its processes' environment, which
children inherit. A signal goes to the ranks themselves: torchrun, on a signal, gives them 30 s and then kills them, and
a large model takes longer to save.
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

from launcher.base import metrics
from launcher.base.signals import JOB_VARIABLE, Flag, make_child_die_with_us
from launcher.base.talk import say
from launcher.base.watchdog import Limits, Pace, Watchdog
from launcher.supervisor.run_folder import RunFolder
from launcher.supervisor.run_record import RunRecord
from proxies.core.failures import Crash, crash_of, end_of, oom_kills
from proxies.core.notation import format_duration, format_loss, format_speed
from proxies.core.redaction import LineRedactor
from proxies.external.log_file import RedactedLog

POLL_SECONDS = 0.1
LIVE_SECONDS, PLAIN_SECONDS = 2.0, 15.0
"""Between two lines of progress: on a terminal, and elsewhere."""
LEAVE_SECONDS = 60.0
"""What a job may take to end once its ending is written."""
STACK_SECONDS = 3.0
"""What the ranks of a hung job on this machine have, all together, to write where they are."""
SRUN_SECONDS = 60.0
"""What `srun` has to end its tasks on other machines."""
_CLEAR_SECONDS = 20.0


class Signals:
    """What signals ask for: to save and end, or (Ctrl-C again) to end now."""

    def __init__(self) -> None:
        self.save, self.now = Flag(), Flag()

    def hear(self, number: int) -> None:
        """A signal came. Only a person's impatience counts as a second one: schedulers repeat theirs."""
        if number == signal.SIGINT and self.save.is_set():
            self.now.set()
        self.save.set()


@contextlib.contextmanager
def hearing(hear: Callable[[int], None]) -> Iterator[None]:
    """Within, SIGTERM, SIGHUP and Ctrl-C call `hear` instead of ending this process; in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [n for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = [signal.signal(number, lambda got, _: hear(got)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptSpec:
    """What is attempted, the same for every attempt."""

    command: list[str]
    run_dir: Path
    log: Path
    limits: Limits
    num_steps: int
    keeps_ending: bool = True
    """Whether this supervisor is the one that clears the last attempt's ending away: of several machines' one."""
    num_checkpoints: int = 1
    """Number of the newest checkpoints that the run keeps at least."""

    @property
    def remote(self) -> bool:
        """Whether ranks may be on other machines, where only `srun` reaches them."""
        return self.command[0] == "srun"


def attempt(
    spec: AttemptSpec, signals: Signals, run_folder: RunFolder | None = None, record: RunRecord | None = None
) -> metrics.AttemptEnd | Crash:
    """Run the job once, to whatever end; nothing of it is left on this machine when this returns.

    A job whose `run_folder` is removed is asked to save and end; one whose folder somebody else holds ends at once.
    What disappears of the `record` meanwhile is told at once.

    Returns:
        How it ended, in order or because it was asked to; or why it died.

    Raises:
        OSError: the log cannot be written.
    """
    ending_file = spec.run_dir / metrics.ENDING_FILE
    if spec.keeps_ending:
        ending_file.unlink(missing_ok=True)
    before, kills_before = _stamp(ending_file), oom_kills()
    watchdog = Watchdog(spec.run_dir, spec.limits, time.monotonic())
    with contextlib.closing(RedactedLog(spec.log, LineRedactor(), append=True)) as log:
        begins = spec.log.stat().st_size
        job = ProcessSession(spec.command, log.fileno())
        try:
            hung = _follow(
                job, spec, signals, watchdog, lambda: _stamp(ending_file) not in (before, None), run_folder, record
            )
        finally:
            job.clear(remote=spec.remote)
    if _stamp(ending_file) not in (before, None) and (ending := metrics.read_ending(spec.run_dir)):
        return ending
    if signals.save.is_set():
        # Too early for the ranks to listen, or too late for patience; no restart answers what was asked for.
        reason = "killed by a second signal" if signals.now.is_set() else "by a signal, before it could save"
        return metrics.AttemptEnd(event="interrupted", exit_code=130, step=last_step(spec.run_dir), reason=reason)
    return crash_of(
        end_of(spec.log, begins), step=watchdog.pace.step, exit_code=job.process.returncode, hung=hung,
        num_oom_kills=oom_kills() - kills_before,
    )  # fmt: skip


def last_step(run_dir: Path) -> int:
    """The last step that the metrics name; 0 where there is none."""
    steps = [step for line in metrics.read(run_dir) if isinstance(step := line.get("step"), int)]
    return max(steps, default=0)


def _stamp(path: Path) -> tuple[int, int] | None:
    """What tells a file from the one that was there before."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _follow(
    job: ProcessSession,
    spec: AttemptSpec,
    signals: Signals,
    watchdog: Watchdog,
    has_ended: Callable[[], bool],
    run_folder: RunFolder | None,
    record: RunRecord | None,
) -> str:
    """Wait for the job, telling its progress, and pass a signal on to it; returns why it is called hung, if it is."""
    every = LIVE_SECONDS if sys.stderr.isatty() else PLAIN_SECONDS
    shown, next_report, passed_on = -1, time.monotonic() + LIVE_SECONDS, False
    ended_at = None
    while job.process.poll() is None:
        if signals.save.wait(POLL_SECONDS):
            time.sleep(POLL_SECONDS)
        now = time.monotonic()
        hung = watchdog.look(now)
        if record is not None:
            record.check(watchdog.recorded)
        if run_folder is not None:
            run_folder.check()
            if run_folder.new_holder:
                return ""
            if run_folder.is_removed and not passed_on:
                say(f"warning: {run_folder.folder} was removed or emptied: saving the run there again, then ending")
                job.tell_to_save()
                passed_on = True
        if signals.now.is_set():
            say("forerun: second signal: ending now without saving")
            return ""
        if signals.save.is_set() and not passed_on:
            say("forerun: signal received: saving, then ending (Ctrl-C again ends now without saving)")
            job.tell_to_save()
            passed_on = True
        if ended_at is None and has_ended():
            ended_at = now
        if ended_at is not None and now > ended_at + LEAVE_SECONDS:
            return ""
        if hung and ended_at is None:
            say(f"forerun: {hung}: writing the stack of every rank to the log, then ending the job")
            job.dump_stacks()
            return hung
        if now >= next_report:
            shown, next_report = _report(spec, watchdog.pace, shown, now), now + every
    watchdog.look(time.monotonic())
    _report(spec, watchdog.pace, shown, time.monotonic())
    return ""


def _report(spec: AttemptSpec, pace: Pace, shown: int, now: float) -> int:
    """Print the step of the run, unless already printed; returns the last one printed."""
    if pace.step is None or pace.loss_nats is None or pace.step == shown:
        return shown
    said = f"step {pace.step}/{spec.num_steps}  loss {format_loss(pace.loss_nats)} nats"
    if speed := pace.tokens_per_second(now):
        said += f"  {format_speed(speed, 'tokens')}"
    if left_seconds := pace.seconds_left(spec.num_steps):
        said += f"  {format_duration(left_seconds)} left"
    say(said)
    return pace.step


class ProcessSession:
    """A process in a session of its own, and all that it starts."""

    def __init__(self, command: list[str], log: int) -> None:
        self._token, self._log = secrets.token_hex(16), log
        # One thread a rank unless told otherwise, as torchrun itself would choose, but without its warning.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, JOB_VARIABLE: self._token}
        # Its own session: Ctrl-C reaches the supervisor alone, which passes it on once.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            # srun passes SIGTERM on; killed, it would leave its tasks on other machines alone.
            preexec_fn=make_child_die_with_us(signal.SIGTERM if command[0] == "srun" else signal.SIGKILL),  # noqa: PLW1509
        )

    def tell_to_save(self) -> None:
        """SIGTERM to the ranks on this machine; they tell the others. To the job itself if it has none yet."""
        for pid in self._ranks() or [self.process.pid]:
            _send(pid, signal.SIGTERM)

    def dump_stacks(self) -> None:
        """Have the ranks write the stacks of all their threads into the log, one after another: their words would mix.

        A rank that does not listen yet ends of it, a moment before the job does.
        """
        asked = self._ranks()
        for pid in asked:
            with contextlib.suppress(OSError):  # a full disk
                os.write(self._log, f"forerun: the stack of process {pid}:\n".encode())
            _send(pid, signal.SIGUSR1)
            time.sleep(STACK_SECONDS / len(asked))

    def clear(self, *, remote: bool) -> None:
        """End what is left, and wait until it is gone: none may write on where the next attempt writes."""
        if remote and self.process.poll() is None:
            self.process.terminate()  # srun passes it on; killed, it would leave its tasks elsewhere alone
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(SRUN_SECONDS)
        deadline = time.monotonic() + _CLEAR_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            if not (left := self._members()) and self.process.poll() is not None:
                return
            for pid in left:
                _send(pid, signal.SIGKILL)
            time.sleep(POLL_SECONDS)

    def _ranks(self) -> list[int]:
        """What torchrun's agent here started; what a rank starts itself (a compiler's workers) is its own business."""
        members = self._members()
        in_rank = {pid for pid, environment in members.items() if b"\0LOCAL_RANK=" in environment}
        return [pid for pid in in_rank if (parent := _parent(pid)) in members and parent not in in_rank]

    def _members(self) -> dict[int, bytes]:
        """Return the environment of each running process of the job on this machine; on systems other than Linux none.

        A process that is ending has an empty environment; it writes no more.
        """
        token = f"{JOB_VARIABLE}={self._token}".encode()
        environments = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                environment = b"\0" + path.read_bytes()
                if b"\0" + token + b"\0" in environment:
                    environments[int(path.parent.name)] = environment
        return environments


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
    return 0
