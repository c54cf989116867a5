"""The drills of a user's own trainer: short runs of its command at the base width, which `launch`
supervises while they are killed, stopped, or made to hang.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from forerun._launcher.main_run.frozen.frozen import Decision, OwnTrainer, sample_learning_rate
from forerun._launcher.main_run.rehearsal.registry import (
    USER_HANG_SECONDS,
    Observation,
)
from forerun._launcher.main_run.supervisor.attempt import Signals
from forerun._launcher.main_run.supervisor.launch import LaunchOutcome
from forerun._launcher.main_run.supervisor.user_launch import UserRunFolders, launch_user_trainer
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import format_loss, format_significant
from forerun._proxies.external.command import RUN_DIR_VARIABLE, get_size_values
from forerun._proxies.external.growing_file import MetricsError
from forerun._proxies.external.metric_files import MetricFiles

MAX_LOSS_SHARE = 0.01
"""Share by which the validation loss of a resumed run may differ from the uninterrupted run's. A
user's trainer need not resume bit by bit, so only a clear difference counts."""
DIVERGENT_FACTOR = 1e6
"""Factor on the learning rate with which the loss is soon not finite."""
MAX_TRIES = 4
"""Number of times that a drill starts a command that ends before it is disturbed."""
NUM_CUT_BYTES = 7
"""Number of bytes that are cut from the end of a log: less than a line."""
_POLL_SECONDS = 0.02

Disturbance = Callable[[Path, Signals], object]
"""Function that disturbs a run, given its folder and the signals to which its `launch` listens."""


@dataclass(frozen=True, kw_only=True)
class UserRehearsal:
    """The folders and the configs of a rehearsal of a user's own trainer; it starts the runs."""

    real: Decision
    """The config that is rehearsed."""
    decision: Decision
    """The copy: the command at the base width, for the proxies' number of steps."""
    folder: Path
    """Folder of all runs."""
    frozen_dir: Path
    """Folder of the real config and its attestations."""
    places: UserRunFolders
    """Folders of the command; each run replaces `run_dir`."""

    @property
    def trainer(self) -> OwnTrainer:
        """The user's trainer, with the values of the copy."""
        return cast(OwnTrainer, self.decision.own)

    @property
    def num_steps(self) -> int:
        """Number of steps that the copy trains."""
        return self.decision.learning_rate.schedule.num_steps

    def describe_copy(self) -> dict[str, Json]:
        """Return what the attestation says of the copy."""
        return {"kind": "scaled", "width": self.decision.shape.width, "num_steps": self.num_steps}

    def run(self, name: str, **values: float) -> LaunchOutcome:
        """Start or resume a run.

        Args:
            name: Name of the run and its folder, which is kept.
            values: Values of the trainer that differ from the copy's.
        """
        trainer = dataclasses.replace(self.trainer, values={**self.trainer.values, **values})
        decision = dataclasses.replace(self.decision, own=trainer)
        return self._launch(decision, self.folder / name, Signals())

    def run_disturbed(self, name: str, disturb: Disturbance) -> LaunchOutcome | None:
        """Start a run, and disturb it once a third of its steps is logged.

        A command of short steps may log its last step before it is disturbed. Then the run starts
        again from its first step.

        Returns:
            The outcome; None if each of `MAX_TRIES` runs was disturbed too late or not at all.
        """
        run_dir = self.folder / name
        for _ in range(MAX_TRIES):
            shutil.rmtree(run_dir, ignore_errors=True)
            signals, ended = Signals(), threading.Event()
            with ThreadPoolExecutor(1) as pool:
                disturbing = pool.submit(self._disturb_later, run_dir, disturb, signals, ended)
                try:
                    outcome = self._launch(self.decision, run_dir, signals)
                finally:
                    ended.set()
            if disturbing.result():
                return outcome
        return None

    def _launch(self, decision: Decision, run_dir: Path, signals: Signals) -> LaunchOutcome:
        places = dataclasses.replace(self.places, run_dir=run_dir)
        return launch_user_trainer(decision, places, 1, signals, hang_seconds=USER_HANG_SECONDS)

    def _disturb_later(
        self, run_dir: Path, disturb: Disturbance, signals: Signals, ended: threading.Event
    ) -> bool:
        """Disturb a run once a third of its steps is logged, unless `ended` is set before.

        Returns:
            Whether the run was disturbed while steps were left.
        """
        while not ended.wait(_POLL_SECONDS):
            if self._count_steps_done(run_dir) >= max(1, self.num_steps // 3):
                disturb(run_dir, signals)
                return self._count_steps_done(run_dir) < self.num_steps
        return False

    def _count_steps_done(self, run_dir: Path) -> int:
        """Return the number of logged steps; 0 while the metrics cannot be read."""
        metrics = MetricFiles(self.trainer.command, self.trainer.get_metrics_path(run_dir))
        with contextlib.suppress(OSError, MetricsError):
            while metrics.read(self.num_steps):
                pass
            return metrics.merge_metrics().count_steps_done(self.num_steps)
        return 0

    @functools.cached_property
    def undisturbed(self) -> LaunchOutcome:
        """Outcome of the undisturbed run; the first drill that uses it trains that run."""
        return self.run("whole")


def set_up_user_rehearsal(
    frozen_dir: Path, decision: Decision, places: UserRunFolders, num_steps: int, scratch: Path
) -> UserRehearsal:
    """Set up a rehearsal, and remove the runs that an earlier one left in `scratch`."""
    for path in scratch.iterdir():
        if path.is_dir():  # not the lock
            shutil.rmtree(path)
    return UserRehearsal(
        real=decision,
        decision=build_small_copy(decision, num_steps),
        folder=scratch,
        frozen_dir=frozen_dir,
        places=places,
    )


def build_small_copy(decision: Decision, num_steps: int) -> Decision:
    """Return the config at the base shape, with at most `num_steps` steps. Warmup and decay keep
    their shares of the steps.
    """
    trainer, base, schedule = decision.own, decision.base_shape, decision.learning_rate.schedule
    assert trainer is not None
    num_steps = min(num_steps, schedule.num_steps)
    share = num_steps / schedule.num_steps
    steps: dict[str, Any] = {
        "num_steps": num_steps,
        "warmup_steps": math.floor(schedule.warmup_steps * share),
        "decay_steps": max(math.floor(schedule.decay_steps * share), schedule.decay_steps > 0),
        "batch_warmup_steps": 0,
        "batch_warmup_stages": 1,
    }
    values = {**trainer.values, **get_size_values(base, base), **steps}
    return dataclasses.replace(
        decision,
        shape=base,
        learning_rate=sample_learning_rate(dataclasses.replace(schedule, **steps)),
        num_tokens=num_steps * decision.batch_tokens,
        own=dataclasses.replace(trainer, values={name: values[name] for name in trainer.values}),
    )


# ---- Disturbances ----


def _signal_command(number: int, run_dir: Path) -> None:
    """Send a signal to every process of the command in `run_dir`, but not to its supervisor.

    The processes are those that have `RUN_DIR_VARIABLE` in their environment.
    """
    variable = f"{RUN_DIR_VARIABLE}={run_dir.resolve()}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_of_run = variable in (entry / "environ").read_bytes().split(b"\0")
            if is_of_run and b"command_supervisor.py" not in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), number)


def _interrupt(run_dir: Path, signals: Signals) -> None:
    signals.receive(signal.SIGTERM)


# ---- Drills ----


def run_undisturbed(rehearsal: UserRehearsal) -> Observation:
    """Run the command to its end."""
    loss = _get_final_loss(rehearsal.undisturbed)
    seen: dict[str, Json] = {"validation_loss_nats": loss}
    if loss is not None:
        return Observation(True, f"it ran to its end at {format_loss(loss)} nats", seen)
    reason = rehearsal.undisturbed.reason or "it logged no finite validation loss"
    return Observation(False, reason, seen)


def kill_command(rehearsal: UserRehearsal) -> Observation:
    """Kill every process of the command."""
    outcome = rehearsal.run_disturbed(
        "killed", lambda run_dir, _: _signal_command(signal.SIGKILL, run_dir)
    )
    if outcome is None:
        return _report_late("killed")
    sentence = f"it was killed, restarted {outcome.num_restarts} time"
    return _compare(rehearsal, outcome, sentence)


def interrupt_command(rehearsal: UserRehearsal) -> Observation:
    """Interrupt `launch`, and start it again."""
    first = rehearsal.run_disturbed("stopped", _interrupt)
    if first is None:
        return _report_late("stopped")
    if first.event != "interrupted":
        sentence = f"it did not stop at SIGTERM: {first.event}"
        return Observation(False, sentence, {"event": first.event})
    sentence = f"it stopped at step {first.step}, was started again"
    return _compare(rehearsal, rehearsal.run("stopped"), sentence)


def hang_command(rehearsal: UserRehearsal) -> Observation:
    """Stop every process of the command, so that it hangs."""
    outcome = rehearsal.run_disturbed(
        "hang", lambda run_dir, _: _signal_command(signal.SIGSTOP, run_dir)
    )
    if outcome is None:
        return _report_late("made to hang")
    return _compare(rehearsal, outcome, "it hung, was ended")


def cut_log(rehearsal: UserRehearsal) -> Observation:
    """Cut the last line of the log while the run is interrupted."""
    first = rehearsal.run_disturbed("cut_log", _interrupt)
    if first is None:
        return _report_late("interrupted")
    log = rehearsal.trainer.get_metrics_path(rehearsal.folder / "cut_log")
    files = [path for path in (log, *log.rglob("*")) if path.is_file()]
    if first.event != "interrupted" or not files:
        sentence = f"there is no log to cut: {first.event}"
        return Observation(False, sentence, {"event": first.event})
    newest = max(files, key=lambda file: file.stat().st_mtime)
    os.truncate(newest, max(1, newest.stat().st_size - NUM_CUT_BYTES))
    sentence = f"the last line of {newest.name} was cut, it was started"
    return _compare(rehearsal, rehearsal.run("cut_log"), sentence)


def diverge(rehearsal: UserRehearsal) -> Observation:
    """Run with a learning rate at which the loss is soon not finite."""
    learning_rate = cast(float, rehearsal.trainer.values["lr"]) * DIVERGENT_FACTOR
    outcome = rehearsal.run("divergence", lr=learning_rate)
    loss = outcome.validation_loss_nats
    sentence = outcome.reason or f"it ran on and {outcome.event} at {loss} nats"
    seen: dict[str, Json] = {"event": outcome.event}
    return Observation(outcome.event == "aborted", sentence, seen)


def _report_late(participle: str) -> Observation:
    """Return the observation that a command ended before a drill could disturb it."""
    return Observation(False, f"it ended before it could be {participle}: raise proxy.num_steps")


def _compare(rehearsal: UserRehearsal, outcome: LaunchOutcome, event_text: str) -> Observation:
    """Observe whether a run that was disturbed went on and ended as the undisturbed one did."""
    undisturbed, loss = _get_final_loss(rehearsal.undisturbed), _get_final_loss(outcome)
    seen: dict[str, Json] = {
        "event": outcome.event,
        "validation_loss_nats": outcome.validation_loss_nats,
        "uninterrupted_nats": undisturbed,
    }
    if loss is None or undisturbed is None:
        return Observation(False, f"{event_text}: {outcome.reason or outcome.event}", seen)
    sentence = (
        f"{event_text} and went on; validation loss {format_significant(loss, 6)}, uninterrupted "
        f"{format_significant(undisturbed, 6)} nats"
    )
    return Observation(abs(loss / undisturbed - 1) <= MAX_LOSS_SHARE, sentence, seen)


def _get_final_loss(outcome: LaunchOutcome) -> float | None:
    """Return the validation loss of a run in nats; None if it is not finite, or the run did not
    finish.
    """
    loss = outcome.validation_loss_nats
    has_loss = outcome.event == "finished" and loss is not None and math.isfinite(loss)
    return loss if has_loss else None
