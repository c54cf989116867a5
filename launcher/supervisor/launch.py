"""Starts the embedded trainer under torchrun; when it dies or hangs, starts it again from its
newest good checkpoint.

A job is restarted whole, by this supervisor: torchrun's own in-agent restart was measured as flaky
on gloo. What counts is the ending the run wrote, not torchrun's exit code, which says 1 for every
failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.base import chronicle
from launcher.base.metrics import ENDING_FILE, METRICS_FILE, AttemptEnd
from launcher.base.run_files import CHECKPOINTS, ROLLBACKS_FILE, complete_folders
from launcher.base.talk import say
from launcher.base.watchdog import Limits
from launcher.frozen.frozen import Decision
from launcher.frozen.launch_file import LAUNCH_FILE, read_launch
from launcher.supervisor.attempt import AttemptSpec, Signals, attempt, hearing, last_step
from launcher.supervisor.run_folder import RunFolder
from launcher.supervisor.run_record import RunRecord
from proxies.core.canon import Json
from proxies.core.failures import CAUSES, Crash
from proxies.core.notation import format_duration
from proxies.core.plain_files import refuse_pipe
from sweeps.store.errors import StudyHeld
from sweeps.store.lock import DriverLock

LOG_FILE = "torchrun.log"
BACKOFF_SECONDS, BACKOFF_FACTOR, MOST_BACKOFF_SECONDS = 1.0, 4.0, 300.0
"""Before the first restart without progress, each one after it, and at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """The machines of a job."""

    num_nodes: int = 1
    rank: int = 0
    """This machine's number, where each has a supervisor of its own; the first one keeps the run's
    folder."""
    rendezvous: str = "127.0.0.1:0"
    """HOST:PORT where they meet."""
    srun: bool = False
    """One supervisor for all: `srun` starts torchrun on every node of the SLURM job that this
    is."""


ALONE = Nodes()

LaunchEvent = Literal["finished", "stopped", "interrupted", "aborted", "refused", "failed"]
"""How a launch ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOutcome:
    """What came of a launch, all its attempts together."""

    event: LaunchEvent
    """As `launcher.base.metrics.AttemptEnd`; `failed`: every attempt died."""
    exit_code: int
    step: int
    """Optimizer steps done."""
    reason: str
    validation_loss_nats: float | None = None
    num_restarts: int = 0
    cause: str = ""
    """Why the last attempt failed, one of `proxies.core.failures.CAUSES`; empty unless `failed`."""


def torchrun_command(
    python: str,
    num_ranks: int,
    module: str = "launcher.trainer",
    *,
    nodes: Nodes = ALONE,
    job: str = "",
) -> list[str]:
    """The head of a launch line: this machine's share of `num_ranks` processes of `module`, which
    `nodes` divides.

    Alone they meet on a free local port; several machines know each other by the name of their
    `job`.
    """
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", nodes.rendezvous]
    meeting += ["--rdzv-id", job] if nodes.num_nodes > 1 else []
    ranks = [
        "--nnodes",
        str(nodes.num_nodes),
        "--nproc-per-node",
        str(num_ranks // nodes.num_nodes),
    ]
    each = str(nodes.num_nodes)
    head = [
        "srun",
        "--nodes",
        each,
        "--ntasks",
        each,
        "--ntasks-per-node",
        "1",
        "--kill-on-bad-exit=1",
    ]
    torchrun = [
        python,
        "-m",
        "torch.distributed.run",
        *ranks,
        *meeting,
        "--max-restarts",
        "0",
        "-m",
        module,
    ]
    return [*(head if nodes.srun else []), *torchrun]


def _command(
    python: str,
    frozen: Path,
    decision: Decision,
    data_dir: Path,
    out_dir: Path,
    stop_after: int | None,
    program: Sequence[str] = ("launcher.trainer",),
    nodes: Nodes = ALONE,
    code_dir: Path | None = None,
) -> list[str]:
    config = frozen / LAUNCH_FILE if frozen.is_dir() else frozen
    paths = ["--config", str(config), "--data", str(data_dir), "--out", str(out_dir)]
    stop = [] if stop_after is None else ["--stop-after", str(stop_after)]
    module, *arguments = program
    head = (python, decision.parallelism.num_ranks, module)
    code = ["--code", str(code_dir or Path())] if decision.model else []
    return [
        *torchrun_command(*head, nodes=nodes, job=decision.digest[:16]),
        *paths,
        *code,
        *stop,
        *arguments,
    ]


def launch_line(
    frozen: Path,
    data_dir: Path,
    out_dir: Path,
    stop_after: int | None = None,
    nodes: Nodes = ALONE,
    code_dir: Path | None = None,
) -> str:
    """The exact line that launches a frozen config (its folder or file) by hand, quoted for a
    shell.

    Raises:
        FrozenError: it cannot be read, or was tampered with.
    """
    command = _command(
        "python",
        frozen,
        read_launch(frozen),
        data_dir,
        out_dir,
        stop_after,
        nodes=nodes,
        code_dir=code_dir,
    )
    return shlex.join(command)


def launch(
    frozen: Path,
    data_dir: Path,
    out_dir: Path,
    stop_after: int | None = None,
    max_restarts: int = 3,
    *,
    program: Sequence[str] = ("launcher.trainer",),
    nodes: Nodes = ALONE,
    limits: Limits | None = None,
    beside: AbstractContextManager[None] | None = None,
    signals: Signals | None = None,
    code_dir: Path | None = None,
) -> LaunchOutcome:
    """Train a frozen config (its folder or file) into `out_dir`; a job that dies or hangs is
    started again.

    At most `max_restarts` times in a row: an attempt that leaves a new complete checkpoint begins
    the count anew, for a run of weeks dies more often than any fixed number, while one that gets
    nowhere will not by itself. A second death at the same step, of the same cause, with nothing
    saved between, ends it at once.

    `program` is the module that each rank runs and its own arguments (a rehearsal's injects
    faults); `limits` say how long it may be silent; `beside` is entered while the folder is ours;
    `signals` is what a caller has heard who listens himself; `code_dir` is the folder of a user's
    own model, by default the one that this process is in.

    A run that ended in order, well or not, is never restarted. On SIGTERM or Ctrl-C it saves and
    ends; a second Ctrl-C ends it unsaved. Progress goes to stderr, what the ranks say to
    `out_dir/torchrun.log`, what happened to the chronicle in `out_dir`.

    Raises:
        FrozenError: the config cannot be read, or was tampered with.
        OSError: `out_dir` cannot be written.
        StudyHeld: another supervisor is at work in `out_dir`.
    """
    decision = read_launch(frozen)
    command = _command(
        sys.executable, frozen, decision, data_dir, out_dir, stop_after, program, nodes, code_dir
    )
    own_dir = out_dir / f"node-{nodes.rank}" if nodes.rank else out_dir
    own_dir.mkdir(parents=True, exist_ok=True)
    for name in (chronicle.CHRONICLE_FILE, METRICS_FILE, ENDING_FILE, ROLLBACKS_FILE):
        refuse_pipe(out_dir / name)
    spec = AttemptSpec(
        command=command,
        run_dir=out_dir,
        log=own_dir / LOG_FILE,
        limits=limits or Limits(),
        num_steps=decision.learning_rate.schedule.num_steps,
        num_checkpoints=decision.checkpointing.keep,
        keeps_ending=nodes.rank == 0,
    )
    signals = signals or Signals()
    with DriverLock(own_dir) as lock, hearing(signals.hear), beside or contextlib.nullcontext():
        run_folder = RunFolder(own_dir, lock, spec.log)
        return _Supervisor(spec, signals, decision.digest, max_restarts, run_folder).run()


class _Supervisor:
    """Attempt after attempt, until one comes to an end of its own, or none will."""

    def __init__(
        self,
        spec: AttemptSpec,
        signals: Signals,
        digest: str,
        max_restarts: int,
        run_folder: RunFolder,
    ) -> None:
        self._spec, self._signals, self._digest, self._most = spec, signals, digest, max_restarts
        self._run_folder = run_folder
        self._num_restarts = 0

    def run(self) -> LaunchOutcome:
        """See `launch`."""
        spec = self._spec
        from_step = _newest_step(spec.run_dir)
        self._record(
            "launched",
            f"launched from step {from_step} of {spec.num_steps}",
            from_step,
            {"command": shlex.join(spec.command)},
        )
        record = (
            RunRecord(spec.run_dir, from_step, spec.num_checkpoints) if spec.keeps_ending else None
        )
        num_deaths, num_idle, last = 0, 0, None  # in a row
        while not self._signals.save.is_set():
            saved = _saved(spec.run_dir)
            ended = attempt(spec, self._signals, self._run_folder, record)
            self._run_folder.check()
            if self._run_folder.new_holder:
                raise StudyHeld(
                    "the lock file was removed while the run trained, and "
                    f"{self._run_folder.new_holder}"
                )
            if self._run_folder.is_removed:
                return self._end_removed_run(ended)
            if not isinstance(ended, Crash):
                return self._over(_add_losses(LaunchOutcome(**dataclasses.asdict(ended)), record))
            progressed = bool(_saved(spec.run_dir) - saved)
            num_deaths, num_idle = (1, 0) if progressed else (num_deaths + 1, num_idle + 1)
            again = last is not None and (last.cause, last.step) == (ended.cause, ended.step)
            why = ""
            if again and not progressed and not CAUSES[ended.cause].passes:
                why = "twice at the same step with no save between, so it would fail again"
            elif num_deaths > self._most:
                why = "no restart is allowed"
                if self._most:
                    why = (
                        f"{num_idle} attempt{'s in a row' if num_idle > 1 else ''} saved nothing "
                        "new, "
                    )
                    why += f"and --max-restarts is {self._most}"
            if why:
                return self._failed(ended, why)
            last = ended
            self._wait(ended, num_deaths, num_idle)
        reason = "by a signal between two attempts"
        step = _newest_step(spec.run_dir)
        return self._over(
            LaunchOutcome(event="interrupted", exit_code=130, step=step, reason=reason)
        )

    def _end_removed_run(self, ended: AttemptEnd | Crash) -> LaunchOutcome:
        """Return the outcome of a run whose folder was removed: a failure, even if the run reached
        its last step.
        """
        saved_step = _newest_step(self._spec.run_dir)
        reason = self._run_folder.describe_lost_files(saved_step)
        if isinstance(ended, Crash):
            return self._over(
                LaunchOutcome(event="failed", exit_code=2, step=saved_step, reason=reason)
            )
        outcome = LaunchOutcome(**dataclasses.asdict(ended))
        return self._over(dataclasses.replace(outcome, exit_code=2, reason=reason))

    def _wait(self, crash: Crash, num_deaths: int, num_idle: int) -> None:
        """Tell of a restart and wait for its moment, or until a signal comes instead."""
        # A float cannot hold 4 to the power of a thousand restarts.
        seconds = min(
            BACKOFF_SECONDS * BACKOFF_FACTOR ** min(num_deaths - 1, 100), MOST_BACKOFF_SECONDS
        )
        from_step = _newest_step(self._spec.run_dir)
        text = f"{crash.words}; restarting from step {from_step} in {format_duration(seconds)}"
        say(f"forerun: {text} (log: {self._spec.log})")
        if self._signals.save.wait(seconds):
            return
        self._num_restarts += 1
        self._record(
            "restarted",
            text,
            from_step,
            {
                "cause": crash.cause,
                "reached_step": crash.step,
                "attempts_without_progress": num_idle,
                "log_tail": crash.log_tail,
            },
        )

    def _failed(self, crash: Crash, why: str) -> LaunchOutcome:
        kind = CAUSES[crash.cause]
        advice = kind.launch_advice or kind.advice
        reason = (
            f"{crash.words}, {why}. What to do: {advice}. The log's last lines:\n{crash.log_tail}"
        )
        step = last_step(self._spec.run_dir)
        return self._over(
            LaunchOutcome(
                event="failed",
                exit_code=kind.exit_code,
                step=step,
                reason=reason,
                cause=crash.cause,
            )
        )

    def _over(self, outcome: LaunchOutcome) -> LaunchOutcome:
        """Record what came of the launch, its restarts counted."""
        outcome = dataclasses.replace(outcome, num_restarts=self._num_restarts)
        text = f"{outcome.event} at step {outcome.step}"
        text += f": {outcome.reason.splitlines()[0]}" if outcome.reason else ""
        data: dict[str, Json] = {
            "event": outcome.event,
            "num_restarts": outcome.num_restarts,
            "cause": outcome.cause,
            "validation_loss_nats": outcome.validation_loss_nats,
        }
        self._record("ended", text, outcome.step, data)
        return outcome

    def _record(self, kind: chronicle.Kind, text: str, step: int, data: dict[str, Json]) -> None:
        """Into the run's chronicle, by the one supervisor that keeps its folder; a full disk ends
        no run.
        """
        if not self._spec.keeps_ending:
            return
        try:
            chronicle.record(
                self._spec.run_dir, kind, text, step=step, digest=self._digest, data=data
            )
        except OSError as error:
            say(
                f"forerun: {self._spec.run_dir / chronicle.CHRONICLE_FILE}: {error.strerror}; not "
                f"recorded: {text}"
            )


def _add_losses(outcome: LaunchOutcome, record: RunRecord | None) -> LaunchOutcome:
    """Return the outcome with what the run's record lost while it trained, which is no success."""
    losses = record.describe_losses(outcome.step) if record else ""
    if not losses:
        return outcome
    reason = f"{outcome.reason}; {losses}" if outcome.reason else losses
    return dataclasses.replace(outcome, exit_code=outcome.exit_code or 2, reason=reason)


def _saved(run_dir: Path) -> frozenset[tuple[int, int]]:
    """Steps of the complete checkpoints, and when each was written; a run that went back writes one
    again.
    """
    found = set()
    for step, folder in complete_folders(run_dir / CHECKPOINTS).items():
        with contextlib.suppress(OSError):
            found.add((step, folder.stat().st_mtime_ns))
    return frozenset(found)


def _newest_step(run_dir: Path) -> int:
    """The step that the run would resume from, if that checkpoint is good; 0 for the start."""
    return max(complete_folders(run_dir / CHECKPOINTS), default=0)
