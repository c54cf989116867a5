"""The main run in the user's own trainer: started from the frozen values, kept an eye on, resumed
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
from typing import TYPE_CHECKING, cast

from launcher.base.talk import say
from launcher.base.watchdog import START_SECONDS, STEP_FACTOR
from launcher.supervisor.launch import LaunchEvent, LaunchOutcome
from launcher.supervisor.run_folder import RunFolder
from launcher.supervisor.run_record import UserRunRecord
from proxies.core import canon
from proxies.core.errors import ExitCode, InputError
from proxies.core.notation import format_loss
from proxies.core.redaction import LineRedactor
from proxies.external.command import RUN_FILE, command_environment, filled, find_program
from proxies.external.log_file import LOG_FILE, RedactedLog, log_end
from proxies.external.metric_files import MetricFiles
from proxies.external.supervised_command import SupervisedCommand
from sweeps.store.errors import StudyHeld
from sweeps.store.lock import DriverLock

if TYPE_CHECKING:
    from launcher.frozen.frozen import Decision, OwnTrainer
    from launcher.supervisor.attempt import Signals

GRACE_SECONDS = 60.0
"""Between SIGTERM and SIGKILL: a trainer may save."""
_POLL_SECONDS, _TOLD_SECONDS = 1.0, 30.0
_NUM_TIMED = 64
"""Gaps between looks at which the log had moved, of which the median is taken."""


class OwnLaunchError(InputError):
    """A run that cannot be started as asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnPlaces:
    """Where one machine runs it."""

    run_dir: Path
    code_dir: Path
    """Where the command runs."""
    corpus: Path | None
    """What `{data}` stands for; None: the trainer has its own."""


def words_of(own: OwnTrainer, places: OwnPlaces, *, resume: bool) -> list[str]:
    """The words of the command; with those of `resume` behind them, where it is to go on.

    Raises:
        OwnLaunchError: the command needs a corpus, and there is none.
    """
    if "data" in own.command.named and places.corpus is None:
        raise OwnLaunchError("the command names {data}: give the corpus with --data")
    run_dir = places.run_dir.resolve()
    here = {
        "run_dir": str(run_dir),
        "run_json": str(run_dir / RUN_FILE),
        "data": str(places.corpus),
    }
    values = {**cast(dict[str, canon.Json], own.values), **here}
    return [*filled(own.command.template, values), *(filled(own.resume, values) if resume else [])]


def launch_own(
    decision: Decision,
    places: OwnPlaces,
    max_restarts: int,
    signals: Signals,
    *,
    hang_seconds: float = 0.0,
) -> LaunchOutcome:
    """Run it to its end; restart it where it dies or hangs, if the plan says how it resumes.

    It hangs if it logs no step for `hang_seconds` (0: never) and for 20 median gaps between logged
    steps. A restart that brings no new step counts against `max_restarts`. Ctrl-C or SIGTERM stops
    it in order.

    Raises:
        OwnLaunchError: the run was begun before, and nothing says how it resumes.
        StudyHeld: another process runs it in this folder.
        CommandError: there is no such program.
    """
    own = decision.own
    assert own is not None
    begun = (places.run_dir / LOG_FILE).exists()
    if begun and not own.resume:
        raise OwnLaunchError(
            f"{places.run_dir}: this run was begun before, and launch.resume_arguments is empty: "
            "give a fresh --out, "
            "or freeze with the arguments by which your trainer resumes"
        )
    canon.make_folder(places.run_dir)
    with DriverLock(places.run_dir) as lock:
        run_folder = RunFolder(places.run_dir, lock, places.run_dir / LOG_FILE)
        return _attempts(
            decision,
            own,
            places,
            max_restarts,
            signals,
            run_folder,
            begun=begun,
            hang_seconds=hang_seconds,
        )


def start_own(
    decision: Decision,
    places: OwnPlaces,
    *,
    resume: bool,
    told: Mapping[str, str] = MappingProxyType({}),
    grace_seconds: float = GRACE_SECONDS,
) -> SupervisedCommand:
    """Start the command in `places.run_dir`, with run.json and log.txt there; `told`: more of its
    environment.

    Raises:
        OwnLaunchError: see `words_of`.
        CommandError: there is no such program.
    """
    own, run_dir = decision.own, places.run_dir.resolve()
    assert own is not None
    words = words_of(own, places, resume=resume)
    find_program(words[0], places.code_dir)
    values = {"digest": decision.digest, "values": own.values, "argv": words}
    canon.write_atomic(run_dir / RUN_FILE, canon.pretty(values))
    return SupervisedCommand(
        words,
        folder=places.code_dir,
        environment={
            **command_environment(own.command, run_dir, os.environ.get("PYTHONPATH")),
            **told,
        },
        log=RedactedLog(run_dir / LOG_FILE, LineRedactor(), append=True),
        grace_seconds=grace_seconds,
    )


def _attempts(
    decision: Decision,
    own: OwnTrainer,
    places: OwnPlaces,
    max_restarts: int,
    signals: Signals,
    run_folder: RunFolder,
    *,
    begun: bool,
    hang_seconds: float,
) -> LaunchOutcome:
    """One after another, while they die and may be restarted."""
    idle = restarts = last = 0
    record = UserRunRecord()
    while True:
        metrics = MetricFiles(own.command, own.metrics_at(places.run_dir.resolve()))
        kept = start_own(decision, places, resume=begun)
        record.begin(is_resumed=begun)
        num_steps = decision.learning_rate.schedule.num_steps
        ended = _attempt(kept, metrics, num_steps, signals, hang_seconds, run_folder, record)
        step = metrics.logged().last_step or 0
        outcome = _outcome(decision, metrics, ended, restarts, places.run_dir / LOG_FILE)
        run_folder.check()
        if run_folder.new_holder:
            raise StudyHeld(
                f"the lock file was removed while the run trained, and {run_folder.new_holder}"
            )
        if run_folder.is_removed:
            reason = run_folder.describe_lost_files(0)
            return dataclasses.replace(outcome, event="failed", exit_code=2, reason=reason)
        losses = record.describe_losses(metrics)
        if outcome.event != "failed" or not own.resume or (losses and ended == 0):
            return _add_losses(outcome, losses)
        idle, last = (0 if step > last else idle + 1), max(last, step)
        if idle >= max_restarts:
            return _add_losses(outcome, losses)
        restarts, begun = restarts + 1, True
        log = places.run_dir / LOG_FILE
        # the last attempt's log is shown at the end
        failure = outcome.reason.removesuffix(log_end(log))
        say(f"forerun: {failure}; restart {restarts} with {own.resume} (log: {log})")


def _add_losses(outcome: LaunchOutcome, losses: str) -> LaunchOutcome:
    """Return the outcome with what the logs lost while the run trained, which is no success."""
    if not losses:
        return outcome
    reason = f"{losses}; {outcome.reason}" if outcome.reason else losses
    exit_code = 2 if outcome.event in ("finished", "failed") else outcome.exit_code
    return dataclasses.replace(outcome, exit_code=exit_code, reason=reason)


class _Silence:
    """How long a log has stood still, against the limits that `launcher.base.watchdog` has for our
    own trainer.
    """

    def __init__(self, hang_seconds: float) -> None:
        self._floor_seconds, self._moved = hang_seconds, time.monotonic()
        self._step: int | None = None
        self._gaps: collections.deque[float] = collections.deque(maxlen=_NUM_TIMED)

    def hangs(self, step: int | None) -> bool:
        """Whether the last logged step has been the same for too long."""
        now = time.monotonic()
        if step != self._step:
            self._gaps += [] if self._step is None else [now - self._moved]
            self._step, self._moved = step, now
        limit = self._floor_seconds
        if step is None:
            limit = max(limit, START_SECONDS)
        elif self._gaps:
            limit = max(limit, STEP_FACTOR * statistics.median(self._gaps))
        return self._floor_seconds > 0 and now - self._moved > limit


def _attempt(
    kept: SupervisedCommand,
    metrics: MetricFiles,
    num_steps: int,
    signals: Signals,
    hang_seconds: float,
    run_folder: RunFolder,
    record: UserRunRecord,
) -> int | str:
    """How one attempt ended: its exit code, -N for signal N, or `interrupted`, `aborted` or `hung`
    by us.
    """
    told, stopped, silence = time.monotonic(), "", _Silence(hang_seconds)
    while not kept.wait(_POLL_SECONDS):
        has_more = metrics.read(num_steps)
        run_folder.check()
        if run_folder.is_removed or run_folder.new_holder:
            kept.stop()
            return "removed"
        if not has_more:
            record.check(metrics)
        step = metrics.logged().last_step
        ending = {
            "interrupted": signals.save.is_set(),
            "aborted": metrics.logged().bad,
            "hung": silence.hangs(step),
        }
        if stopped := next((how for how, true in ending.items() if true), ""):
            kept.stop()
            break
        if time.monotonic() - told > _TOLD_SECONDS:
            told = time.monotonic()
            logged = metrics.logged()
            loss = logged.train_loss.get(max(logged.train_loss, default=0))
            said = "" if loss is None else f"  loss {format_loss(loss)} nats"
            say(f"step {logged.steps_done(num_steps)}/{num_steps}{said}")
    while metrics.read(num_steps):
        pass
    metrics.end(num_steps)
    record.check(metrics, is_over=True)
    return stopped or (kept.ended if kept.ended is not None else "it did not end")


def _outcome(
    decision: Decision, metrics: MetricFiles, ended: int | str, num_restarts: int, log: Path
) -> LaunchOutcome:
    logged, num_steps = metrics.logged(), decision.learning_rate.schedule.num_steps
    step = logged.steps_done(num_steps)
    loss = logged.validation_loss.get(max(logged.validation_loss, default=0))

    def conclude(event: LaunchEvent, exit_code: ExitCode, reason: str = "") -> LaunchOutcome:
        return LaunchOutcome(
            event=event,
            exit_code=exit_code,
            step=step,
            reason=reason,
            validation_loss_nats=loss,
            num_restarts=num_restarts,
        )

    if logged.bad:
        return conclude("aborted", ExitCode.GATE, logged.bad[1])
    if ended == "interrupted":
        return conclude("interrupted", ExitCode.INTERRUPTED)
    if ended == 0 and step >= num_steps - 1 and loss is not None:
        return conclude("finished", ExitCode.DONE)
    reason = f"it ended with exit code {ended} at step {step} of {num_steps}"
    if ended == "hung":
        reason = (
            f"it logged no step after {step} of {num_steps} for too long (--hang-seconds), and "
            "was ended"
        )
    if ended == 0:
        reason += "; " + metrics.hint()
    elif isinstance(ended, int) and ended < 0:
        reason = f"it was killed by signal {-ended} at step {step} of {num_steps}"
    return conclude("failed", ExitCode.INPUT, f"{reason}{log_end(log)}")
