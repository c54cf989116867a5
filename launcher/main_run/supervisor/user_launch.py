"""The main run in the user's own trainer: started with the frozen values, supervised, and resumed
by its own option.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from forerun._launcher.main_run.progress_output import print_progress
from forerun._launcher.main_run.supervisor.hang_detector import START_SECONDS, STEP_FACTOR
from forerun._launcher.main_run.supervisor.launch import LaunchOutcome
from forerun._launcher.main_run.supervisor.record_guard import UserRecordGuard
from forerun._launcher.main_run.supervisor.run_folder import RunFolder
from forerun._proxies.core import canon
from forerun._proxies.core.errors import ExitCode, InputError
from forerun._proxies.core.notation import format_loss
from forerun._proxies.core.redaction import LineRedactor
from forerun._proxies.external.command import (
    RUN_FILE,
    fill_template,
    find_program,
    make_command_environment,
)
from forerun._proxies.external.log_file import LOG_FILE, RedactedLog, describe_log_end
from forerun._proxies.external.metric_files import MetricFiles
from forerun._proxies.external.supervised_command import SupervisedCommand
from forerun._sweeps.store.lock import DriverLock

if TYPE_CHECKING:
    from forerun._launcher.main_run.frozen.frozen import Decision, OwnTrainer
    from forerun._launcher.main_run.supervisor.attempt import Signals

GRACE_SECONDS = 60.0
"""Seconds between SIGTERM and SIGKILL: a trainer may save."""
_POLL_SECONDS, _REPORT_SECONDS = 1.0, 30.0
_SIGNAL_SECONDS = 0.02
"""Seconds between two looks for a signal. A rehearsal interrupts runs that are over in a second."""
_NUM_TIMED = 64
"""Number of gaps between logged steps in their median."""


class OwnLaunchError(InputError):
    """A run of a user's own trainer that cannot be started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UserRunFolders:
    """The folders of a run on one machine."""

    run_dir: Path
    code_dir: Path
    """Working directory of the command."""
    corpus: Path | None
    """Value of `{data}`; None if the trainer has its own corpus."""


def build_command_words(trainer: OwnTrainer, places: UserRunFolders, *, resume: bool) -> list[str]:
    """Return the words of the command, with the trainer's resume arguments if it resumes.

    Raises:
        OwnLaunchError: The command needs a corpus, and there is none.
    """
    if "data" in trainer.command.placeholders and places.corpus is None:
        raise OwnLaunchError("the command names {data}: give the corpus with --data")
    run_dir = places.run_dir.resolve()
    values = {
        **trainer.values,
        "run_dir": str(run_dir),
        "run_json": str(run_dir / RUN_FILE),
        "data": str(places.corpus),
    }
    words = [*fill_template(trainer.command.template, values)]
    return [*words, *fill_template(trainer.resume, values)] if resume else words


def start_user_trainer(
    decision: Decision,
    places: UserRunFolders,
    *,
    resume: bool,
    environment: Mapping[str, str] = MappingProxyType({}),
    grace_seconds: float = GRACE_SECONDS,
) -> SupervisedCommand:
    """Start the command, with run.json and log.txt in `places.run_dir`.

    Args:
        decision: The config.
        places: The folders.
        resume: Whether the trainer resumes.
        environment: Further environment variables.
        grace_seconds: Seconds between SIGTERM and SIGKILL.

    Raises:
        OwnLaunchError: See `build_command_words`.
        CommandError: There is no such program.
    """
    trainer, run_dir = decision.own, places.run_dir.resolve()
    assert trainer is not None
    words = build_command_words(trainer, places, resume=resume)
    find_program(words[0], places.code_dir)
    values = {"digest": decision.digest, "values": trainer.values, "argv": words}
    canon.write_atomic(run_dir / RUN_FILE, canon.to_pretty_json(values))
    trainer_environment = make_command_environment(
        trainer.command, run_dir, os.environ.get("PYTHONPATH")
    )
    return SupervisedCommand(
        words,
        folder=places.code_dir,
        environment={**trainer_environment, **environment},
        log=RedactedLog(run_dir / LOG_FILE, LineRedactor(), append=True),
        grace_seconds=grace_seconds,
    )


def launch_user_trainer(
    decision: Decision,
    places: UserRunFolders,
    max_restarts: int,
    signals: Signals,
    *,
    hang_seconds: float = 0.0,
) -> LaunchOutcome:
    """Run the command to its end; restart it if it dies or hangs and the plan says how it resumes.

    Args:
        decision: The config.
        places: The folders.
        max_restarts: Maximum number of restarts in a row that bring no new step.
        signals: Signals that end the run in order.
        hang_seconds: Minimum seconds without a logged step that count as a hang, if `STEP_FACTOR`
            median gaps between logged steps are not longer; 0 for never.

    Raises:
        OwnLaunchError: The run was begun before, and nothing says how it resumes.
        StudyHeld: Another process runs it in this folder.
        CommandError: There is no such program.
    """
    trainer, log = decision.own, places.run_dir / LOG_FILE
    assert trainer is not None
    is_resumed = log.exists()
    if is_resumed and not trainer.resume:
        raise OwnLaunchError(
            f"{places.run_dir}: this run was begun before, and launch.resume_arguments is empty: "
            "give a fresh --out, or freeze with the arguments by which your trainer resumes"
        )
    canon.make_folder(places.run_dir)
    num_idle = num_restarts = last_step = 0
    guard = UserRecordGuard()
    with DriverLock(places.run_dir) as lock:
        run_folder = RunFolder(places.run_dir, lock, log)
        while True:
            metrics = MetricFiles(trainer.command, trainer.get_metrics_path(places.run_dir))
            command = start_user_trainer(decision, places, resume=is_resumed)
            guard.begin(is_resumed=is_resumed)
            num_steps = decision.learning_rate.schedule.num_steps
            ending = _follow(command, metrics, num_steps, signals, hang_seconds, run_folder, guard)
            outcome = _conclude(metrics, num_steps, ending, log, num_restarts)
            run_folder.require_lock()
            if run_folder.is_removed:
                reason = run_folder.describe_lost_files(0)
                return dataclasses.replace(outcome, event="failed", exit_code=2, reason=reason)
            losses = guard.describe_losses(metrics)
            step = metrics.merge_metrics().last_step or 0
            num_idle, last_step = 0 if step > last_step else num_idle + 1, max(last_step, step)
            can_restart = outcome.event == "failed" and not (losses and ending == 0)
            if not can_restart or not trainer.resume or num_idle >= max_restarts:
                return outcome.add_losses(losses)
            num_restarts, is_resumed = num_restarts + 1, True
            # The end of the log is shown only for the last failure.
            failure = outcome.reason.removesuffix(describe_log_end(log))
            print_progress(
                f"forerun: {failure}; restart {num_restarts} with {trainer.resume} (log: {log})"
            )


class _Silence:
    """The time since the last logged step changed, compared with the limits of
    `forerun._launcher.main_run.supervisor.hang_detector`.
    """

    def __init__(self, hang_seconds: float) -> None:
        """Begin now; `hang_seconds` is as in `launch_user_trainer`."""
        self._floor_seconds, self._changed_at = hang_seconds, time.monotonic()
        self._step: int | None = None
        self._gaps: collections.deque[float] = collections.deque(maxlen=_NUM_TIMED)

    def check(self, step: int | None) -> bool:
        """Note the last logged step, None if there is none; return whether it has been the same for
        too long.
        """
        now = time.monotonic()
        if step != self._step:
            if self._step is not None:
                self._gaps.append(now - self._changed_at)
            self._step, self._changed_at = step, now
        limit = self._floor_seconds
        if step is None:
            limit = max(limit, START_SECONDS)
        elif self._gaps:
            limit = max(limit, STEP_FACTOR * statistics.median(self._gaps))
        return self._floor_seconds > 0 and now - self._changed_at > limit


def _follow(
    command: SupervisedCommand,
    metrics: MetricFiles,
    num_steps: int,
    signals: Signals,
    hang_seconds: float,
    run_folder: RunFolder,
    guard: UserRecordGuard,
) -> int | str:
    """Follow one attempt to its end, or stop it.

    Returns:
        The exit code of the command, -N for signal N; or the reason why the command was stopped:
        `interrupted`, `aborted`, `hung`, or `removed` (its folder).
    """
    next_report, silence = time.monotonic() + _REPORT_SECONDS, _Silence(hang_seconds)
    stopped = ""
    while not stopped and not _wait_for_end(command, signals):
        has_more, logged = metrics.read(num_steps), metrics.merge_metrics()
        run_folder.check()
        if run_folder.is_removed or run_folder.new_holder:
            command.stop()
            return "removed"
        if not has_more:
            guard.check(metrics)
        if signals.save.is_set():
            stopped = "interrupted"
        elif logged.first_nonfinite:
            stopped = "aborted"
        elif silence.check(logged.last_step):
            stopped = "hung"
        elif time.monotonic() > next_report:
            next_report = time.monotonic() + _REPORT_SECONDS
            loss = logged.train_loss.get(max(logged.train_loss, default=0))
            text = "" if loss is None else f"  loss {format_loss(loss)} nats"
            print_progress(f"step {logged.count_steps_done(num_steps)}/{num_steps}{text}")
    if stopped:
        command.stop()
    while metrics.read(num_steps):
        pass
    metrics.end(num_steps)
    guard.check(metrics, is_over=True)
    if stopped:
        return stopped
    return command.exit_status if command.exit_status is not None else "it did not end"


def _wait_for_end(command: SupervisedCommand, signals: Signals) -> bool:
    """Wait for the end of the command, until a signal comes or the next poll is due.

    Returns:
        Whether the command has ended.
    """
    deadline = time.monotonic() + _POLL_SECONDS
    while not command.wait(_SIGNAL_SECONDS):
        if signals.save.is_set() or time.monotonic() > deadline:
            return False
    return True


def _conclude(
    metrics: MetricFiles, num_steps: int, ending: int | str, log: Path, num_restarts: int
) -> LaunchOutcome:
    """Return the outcome of an attempt from its logs and its ending, which `_follow` returned."""
    logged = metrics.merge_metrics()
    step = logged.count_steps_done(num_steps)
    loss = logged.validation_loss.get(max(logged.validation_loss, default=0))
    outcome = LaunchOutcome(
        event="failed",
        exit_code=ExitCode.INPUT,
        step=step,
        reason=f"it ended with exit code {ending} at step {step} of {num_steps}",
        validation_loss_nats=loss,
        num_restarts=num_restarts,
    )
    if logged.first_nonfinite:
        reason = logged.first_nonfinite[1]
        return dataclasses.replace(outcome, event="aborted", exit_code=ExitCode.GATE, reason=reason)
    if ending == "interrupted":
        return dataclasses.replace(
            outcome, event="interrupted", exit_code=ExitCode.INTERRUPTED, reason=""
        )
    if ending == 0 and step >= num_steps - 1 and loss is not None:
        return dataclasses.replace(outcome, event="finished", exit_code=ExitCode.DONE, reason="")
    reason = outcome.reason
    if ending == "hung":
        reason = (
            f"it logged no step after {step} of {num_steps} for too long (--hang-seconds), and "
            "was ended"
        )
    elif ending == 0:
        reason += f"; {metrics.describe_contents()}"
    elif isinstance(ending, int) and ending < 0:
        reason = f"it was killed by signal {-ending} at step {step} of {num_steps}"
    return dataclasses.replace(outcome, reason=reason + describe_log_end(log))
