"""The launch of a main run: the embedded trainer is started under torchrun, and restarted from its
newest good checkpoint when it dies or hangs.

A job is restarted as a whole, by this supervisor: torchrun's own restart within the agent was
measured as flaky on gloo. What counts is the ending that the run wrote, not torchrun's exit code,
which is 1 for every failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forerun._launcher.main_run import event_log
from forerun._launcher.main_run.checkpoint_folders import (
    CHECKPOINTS,
    ROLLBACKS_FILE,
    list_complete_checkpoints,
)
from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._launcher.main_run.frozen.launch_file import LAUNCH_FILE, read_launch
from forerun._launcher.main_run.metrics_file import (
    ENDING_FILE,
    METRICS_FILE,
    AttemptEnd,
    EndingEvent,
)
from forerun._launcher.main_run.progress_output import print_progress
from forerun._launcher.main_run.supervisor.attempt import (
    AttemptSpec,
    Signals,
    listen_to_signals,
    read_last_step,
    run_attempt,
)
from forerun._launcher.main_run.supervisor.hang_detector import SilenceLimits
from forerun._launcher.main_run.supervisor.record_guard import RecordGuard
from forerun._launcher.main_run.supervisor.run_folder import RunFolder
from forerun._proxies.core.canon import Json
from forerun._proxies.core.failures import CAUSES, Crash
from forerun._proxies.core.notation import format_duration
from forerun._proxies.core.plain_files import refuse_pipe
from forerun._sweeps.store.lock import DriverLock

TRAINER = "forerun._launcher.main_run.trainer"
"""Module that each rank runs."""
LOG_FILE = "torchrun.log"
BACKOFF_SECONDS, BACKOFF_FACTOR, MAX_BACKOFF_SECONDS = 1.0, 4.0, 300.0
"""Seconds before the first restart without progress, the factor for each one after it, and the
maximum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """The machines of a job."""

    num_nodes: int = 1
    rank: int = 0
    """Number of this machine, if each has a supervisor of its own; the first one keeps the run's
    folder."""
    rendezvous: str = "127.0.0.1:0"
    """HOST:PORT where the machines meet; port 0 for any free one."""
    srun: bool = False
    """Whether one supervisor serves all machines: `srun` starts torchrun on every node of the
    SLURM job."""


ALONE = Nodes()
"""One machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOutcome:
    """The outcome of a launch, over all its attempts."""

    event: EndingEvent | Literal["failed"]
    """Event of the last `AttemptEnd`; `failed` if the last attempt died."""
    exit_code: int
    step: int
    """Number of optimizer steps done."""
    reason: str
    validation_loss_nats: float | None = None
    num_restarts: int = 0
    cause: str = ""
    """Cause of the last failure, one of `forerun._proxies.core.failures.CAUSES`; empty unless the
    event is `failed`.
    """

    def add_losses(self, losses: str) -> LaunchOutcome:
        """Return the outcome of a run that lost metrics or checkpoints, which is no success.

        Args:
            losses: Sentence on what was lost; if it is empty, the outcome stays as it is.
        """
        if not losses:
            return self
        reason = f"{self.reason}; {losses}" if self.reason else losses
        return dataclasses.replace(self, exit_code=self.exit_code or 2, reason=reason)


# ---- Command lines ----


def build_torchrun_command(
    python: str,
    num_ranks: int,
    module: str = TRAINER,
    *,
    nodes: Nodes = ALONE,
    job: str = "",
) -> list[str]:
    """Return the head of a launch line, which starts this machine's share of the ranks.

    Args:
        python: The interpreter.
        num_ranks: Number of ranks on all machines.
        module: Module that each rank runs.
        nodes: The machines.
        job: Name by which several machines know each other.
    """
    num_nodes = str(nodes.num_nodes)
    head = [python, "-m", "torch.distributed.run", "--nnodes", num_nodes]
    head += ["--nproc-per-node", str(num_ranks // nodes.num_nodes)]
    head += ["--rdzv-backend", "c10d", "--rdzv-endpoint", nodes.rendezvous]
    head += ["--rdzv-id", job] if nodes.num_nodes > 1 else []
    head += ["--max-restarts", "0", "-m", module]
    if not nodes.srun:
        return head
    srun = ["srun", "--nodes", num_nodes, "--ntasks", num_nodes, "--ntasks-per-node", "1"]
    return [*srun, "--kill-on-bad-exit=1", *head]


def _build_command(
    python: str,
    frozen: Path,
    decision: Decision,
    data_dir: Path,
    out_dir: Path,
    stop_after: int | None,
    nodes: Nodes,
    code_dir: Path | None,
    program: Sequence[str] = (TRAINER,),
) -> list[str]:
    """Return the command of a launch; the arguments are those of `launch`."""
    module, *arguments = program
    config = frozen / LAUNCH_FILE if frozen.is_dir() else frozen
    words = build_torchrun_command(
        python, decision.parallelism.num_ranks, module, nodes=nodes, job=decision.digest[:16]
    )
    words += ["--config", str(config), "--data", str(data_dir), "--out", str(out_dir)]
    words += ["--code", str(code_dir or Path())] if decision.model else []
    words += [] if stop_after is None else ["--stop-after", str(stop_after)]
    return [*words, *arguments]


def format_launch_line(
    frozen: Path,
    data_dir: Path,
    out_dir: Path,
    stop_after: int | None = None,
    nodes: Nodes = ALONE,
    code_dir: Path | None = None,
) -> str:
    """Return the shell line that launches a frozen config (its folder or file) by hand.

    Raises:
        FrozenError: The config cannot be read, or was tampered with.
    """
    decision = read_launch(frozen)
    words = _build_command(
        "python", frozen, decision, data_dir, out_dir, stop_after, nodes, code_dir
    )
    return shlex.join(words)


# ---- Launch ----


def launch(
    frozen: Path,
    data_dir: Path,
    out_dir: Path,
    stop_after: int | None = None,
    max_restarts: int = 3,
    *,
    program: Sequence[str] = (TRAINER,),
    nodes: Nodes = ALONE,
    limits: SilenceLimits | None = None,
    beside: AbstractContextManager[None] | None = None,
    signals: Signals | None = None,
    code_dir: Path | None = None,
) -> LaunchOutcome:
    """Train a frozen config, and restart the job if it dies or hangs.

    A run that ended in order is not restarted. On SIGTERM or Ctrl-C it saves and ends; a second
    Ctrl-C ends it unsaved. The ranks' messages go to `out_dir/torchrun.log`.

    Args:
        frozen: Folder or file of the config.
        data_dir: Folder of the corpus.
        out_dir: Folder of the run.
        stop_after: Number of steps after which the run saves and stops.
        max_restarts: Maximum number of restarts in a row without a new checkpoint. A second death
            at the same step, of the same cause, with nothing saved between, ends the run at once.
        program: Module that each rank runs, and its own arguments; a rehearsal's injects faults.
        nodes: The machines.
        limits: Maximum silences of the run.
        beside: Context in which the attempts run, such as the run's W&B log.
        signals: Signals that a caller listens to itself.
        code_dir: Folder of a user's own model; None for the working directory.

    Raises:
        FrozenError: The config cannot be read, or was tampered with.
        OSError: `out_dir` cannot be written.
        StudyHeld: Another supervisor works in `out_dir`.
    """
    decision = read_launch(frozen)
    command = _build_command(
        sys.executable, frozen, decision, data_dir, out_dir, stop_after, nodes, code_dir, program
    )
    node_dir = _make_node_folder(out_dir, nodes)
    spec = AttemptSpec(
        command=command,
        run_dir=out_dir,
        log=node_dir / LOG_FILE,
        limits=limits or SilenceLimits(),
        num_steps=decision.learning_rate.schedule.num_steps,
        num_checkpoints=decision.checkpointing.keep,
        keeps_ending=nodes.rank == 0,
    )
    signals = signals or Signals()
    with DriverLock(node_dir) as lock, listen_to_signals(signals.receive), beside or nullcontext():
        run_folder = RunFolder(node_dir, lock, spec.log)
        return _Supervisor(spec, signals, decision.digest, max_restarts, run_folder).run()


def _make_node_folder(out_dir: Path, nodes: Nodes) -> Path:
    """Make this machine's folder of a run, and return it; refuse pipes in the place of files."""
    node_dir = out_dir / f"node-{nodes.rank}" if nodes.rank else out_dir
    node_dir.mkdir(parents=True, exist_ok=True)
    for name in (event_log.EVENT_LOG_FILE, METRICS_FILE, ENDING_FILE, ROLLBACKS_FILE):
        refuse_pipe(out_dir / name)
    return node_dir


@dataclass(slots=True)
class _Supervisor:
    """A supervisor, which makes attempts until one ends in order or the next one would fail too."""

    spec: AttemptSpec
    signals: Signals
    digest: str
    """Digest of the config."""
    max_restarts: int
    run_folder: RunFolder
    num_restarts: int = 0
    """Restarts so far."""

    def run(self) -> LaunchOutcome:
        """Run until there is an outcome; see `launch`."""
        spec, run_folder = self.spec, self.run_folder
        from_step = _find_newest_step(spec.run_dir)
        text = f"launched from step {from_step} of {spec.num_steps}"
        self._record("launched", text, from_step, {"command": shlex.join(spec.command)})
        guard = None
        if spec.keeps_ending:
            guard = RecordGuard(spec.run_dir, from_step, spec.num_checkpoints)
        # Failed attempts since the last save, and failed attempts in a row that saved nothing. The
        # attempt that saves and then fails counts in the first number only.
        num_deaths = num_idle = 0
        last_crash: Crash | None = None
        while not self.signals.save.is_set():
            saves_before = _list_saves(spec.run_dir)
            ended = run_attempt(spec, self.signals, run_folder, guard)
            run_folder.require_lock()
            if run_folder.is_removed:
                return self._conclude_removed(ended)
            if not isinstance(ended, Crash):
                outcome = LaunchOutcome(**dataclasses.asdict(ended))
                losses = guard.describe_losses(outcome.step) if guard else ""
                return self._conclude(outcome.add_losses(losses))
            has_saved = bool(_list_saves(spec.run_dir) - saves_before)
            num_deaths, num_idle = (1, 0) if has_saved else (num_deaths + 1, num_idle + 1)
            is_repeated = last_crash is not None and (
                (last_crash.cause, last_crash.step) == (ended.cause, ended.step)
            )
            would_repeat = is_repeated and not has_saved and not CAUSES[ended.cause].is_transient
            if would_repeat or num_deaths > self.max_restarts:
                return self._conclude_failed(ended, num_idle, would_repeat=would_repeat)
            last_crash = ended
            self._wait(ended, num_deaths, num_idle)
        return self._conclude(
            LaunchOutcome(
                event="interrupted",
                exit_code=130,
                step=_find_newest_step(spec.run_dir),
                reason="by a signal between two attempts",
            )
        )

    def _wait(self, crash: Crash, num_deaths: int, num_idle: int) -> None:
        """Announce a restart and wait for it, or until a signal comes instead."""
        # The exponent is limited: a float cannot hold 4 to the power of a thousand restarts.
        factor = BACKOFF_FACTOR ** min(num_deaths - 1, 100)
        seconds = min(BACKOFF_SECONDS * factor, MAX_BACKOFF_SECONDS)
        from_step = _find_newest_step(self.spec.run_dir)
        text = f"{crash.words}; restarting from step {from_step} in {format_duration(seconds)}"
        print_progress(f"forerun: {text} (log: {self.spec.log})")
        if self.signals.save.wait(seconds):
            return
        self.num_restarts += 1
        data: dict[str, Json] = {
            "cause": crash.cause,
            "reached_step": crash.step,
            "attempts_without_progress": num_idle,
            "log_tail": crash.log_tail,
        }
        self._record("restarted", text, from_step, data)

    def _conclude_removed(self, ended: AttemptEnd | Crash) -> LaunchOutcome:
        """Conclude a run whose folder was removed: a failure, even if it reached its last step."""
        saved_step = _find_newest_step(self.spec.run_dir)
        reason = self.run_folder.describe_lost_files(saved_step)
        outcome = LaunchOutcome(event="failed", exit_code=2, step=saved_step, reason=reason)
        if not isinstance(ended, Crash):
            outcome = LaunchOutcome(
                **{**dataclasses.asdict(ended), "exit_code": 2, "reason": reason}
            )
        return self._conclude(outcome)

    def _conclude_failed(self, crash: Crash, num_idle: int, *, would_repeat: bool) -> LaunchOutcome:
        """Conclude a run that is not restarted after a crash."""
        cause = CAUSES[crash.cause]
        why = "no restart is allowed"
        if would_repeat:
            why = "twice at the same step with no save between, so it would fail again"
        elif self.max_restarts:
            in_a_row = "s in a row" if num_idle > 1 else ""
            why = (
                f"{num_idle} attempt{in_a_row} saved nothing new, and --max-restarts is "
                f"{self.max_restarts}"
            )
        return self._conclude(
            LaunchOutcome(
                event="failed",
                exit_code=cause.exit_code,
                step=read_last_step(self.spec.run_dir),
                reason=f"{crash.words}, {why}. What to do: {cause.launch_advice or cause.advice}. "
                f"The log's last lines:\n{crash.log_tail}",
                cause=crash.cause,
            )
        )

    def _conclude(self, outcome: LaunchOutcome) -> LaunchOutcome:
        """Record the outcome, and return it with the number of restarts."""
        text = f"{outcome.event} at step {outcome.step}"
        text += f": {outcome.reason.splitlines()[0]}" if outcome.reason else ""
        data: dict[str, Json] = {
            "event": outcome.event,
            "num_restarts": self.num_restarts,
            "cause": outcome.cause,
            "validation_loss_nats": outcome.validation_loss_nats,
        }
        self._record("ended", text, outcome.step, data)
        return dataclasses.replace(outcome, num_restarts=self.num_restarts)

    def _record(
        self, kind: event_log.EventKind, text: str, step: int, data: dict[str, Json]
    ) -> None:
        """Record an event, on the machine that keeps the run's folder; a full disk ends no run."""
        if not self.spec.keeps_ending:
            return
        folder = self.spec.run_dir
        try:
            event_log.append_event(folder, kind, text, step=step, digest=self.digest, data=data)
        except OSError as error:
            path = folder / event_log.EVENT_LOG_FILE
            print_progress(f"forerun: {path}: {error.strerror}; not recorded: {text}")


def _list_saves(run_dir: Path) -> frozenset[tuple[int, int]]:
    """Return step and time of each complete checkpoint; a run that went back writes one again."""
    saves = set()
    for step, folder in list_complete_checkpoints(run_dir / CHECKPOINTS).items():
        with contextlib.suppress(OSError):
            saves.add((step, folder.stat().st_mtime_ns))
    return frozenset(saves)


def _find_newest_step(run_dir: Path) -> int:
    """Return the step of the newest complete checkpoint; 0 for the start."""
    return max(list_complete_checkpoints(run_dir / CHECKPOINTS), default=0)
