"""The drills of a user's own trainer: short runs of its command at the base width, disturbed under
`launch`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.frozen.frozen import Decision, learning_rate_of
from launcher.rehearsal.registry import OWN_HANG_SECONDS, DrillResult, judged
from launcher.supervisor.attempt import Signals
from launcher.supervisor.launch import LaunchOutcome
from launcher.supervisor.own_launch import OwnPlaces, launch_own
from proxies.core.canon import Json
from proxies.core.notation import format_loss, format_significant
from proxies.external.command import RUN_DIR_VARIABLE, size_values
from proxies.external.growing_file import MetricsError
from proxies.external.metric_files import MetricFiles

SAME_SHARE = 0.01
"""That the validation loss of a run that was resumed may be away from the uninterrupted one's."""
HUGE = 1e6
"""Times the learning rate, so that the loss is soon no number."""
_POLL_SECONDS, _MOST_SECONDS = 0.05, 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnCopy:
    """What is run in the drills: the command at the base width, for the proxies' number of
    steps.
    """

    decision: Decision

    def told(self) -> dict[str, object]:
        """For the attestation."""
        shape, schedule = self.decision.shape, self.decision.learning_rate.schedule
        return {"kind": "scaled", "width": shape.width, "num_steps": schedule.num_steps}


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnRehearsal:
    """Where the drills take place."""

    real: Decision
    scaled: OwnCopy
    folder: Path
    frozen_dir: Path
    places: OwnPlaces

    def start(
        self, name: str, disturb: Callable[[Path, Signals], None] | None = None, **values: float
    ) -> LaunchOutcome:
        """Run the copy in the folder `name`; `disturb`, once a third of its steps is logged. The
        folder is kept.
        """
        decision, run_dir = self.scaled.decision, self.folder / name
        if values:
            own = dataclasses.replace(decision.own, values={**decision.own.values, **values})  # type: ignore[type-var, union-attr]
            decision = dataclasses.replace(decision, own=own)
        signals, ended = Signals(), threading.Event()
        watcher = threading.Thread(
            target=self._watch, args=(decision, run_dir, signals, disturb, ended), daemon=True
        )
        if disturb:
            watcher.start()
        try:
            places = dataclasses.replace(self.places, run_dir=run_dir)
            return launch_own(decision, places, 1, signals, hang_seconds=OWN_HANG_SECONDS)
        finally:
            ended.set()
            if disturb:
                watcher.join()

    def _watch(
        self,
        decision: Decision,
        run_dir: Path,
        signals: Signals,
        disturb: Callable[[Path, Signals], None],
        ended: threading.Event,
    ) -> None:
        own, num_steps = decision.own, decision.learning_rate.schedule.num_steps
        assert own is not None
        until = time.monotonic() + _MOST_SECONDS
        while not ended.wait(_POLL_SECONDS) and time.monotonic() < until:
            metrics = MetricFiles(own.command, own.metrics_at(run_dir))
            with contextlib.suppress(OSError, MetricsError):
                while metrics.read(num_steps):
                    pass
                if (metrics.logged().last_step or 0) >= max(1, num_steps // 3):
                    disturb(run_dir, signals)
                    return


def set_up_own(
    frozen_dir: Path, decision: Decision, places: OwnPlaces, num_steps: int, scratch: Path
) -> OwnRehearsal:
    """The copy, and an empty folder for its runs; what an earlier rehearsal left goes, but for the
    lock.
    """
    for other in scratch.iterdir():
        if other.is_dir():
            shutil.rmtree(other)
    return OwnRehearsal(
        real=decision,
        scaled=OwnCopy(decision=small_copy(decision, num_steps)),
        folder=scratch,
        frozen_dir=frozen_dir,
        places=places,
    )


def small_copy(decision: Decision, num_steps: int) -> Decision:
    """The config at the base shape and for at most `num_steps`, its warmup and decay the same
    shares.
    """
    own, base, schedule = decision.own, decision.base_shape, decision.learning_rate.schedule
    assert own is not None
    num_steps = min(num_steps, schedule.num_steps)
    share = num_steps / schedule.num_steps
    warmup, decay = (
        math.floor(steps * share) for steps in (schedule.warmup_steps, schedule.decay_steps)
    )
    short = dataclasses.replace(
        schedule,
        num_steps=num_steps,
        warmup_steps=warmup,
        decay_steps=max(decay, schedule.decay_steps > 0),
        batch_warmup_steps=0,
        batch_warmup_stages=1,
    )
    values = {
        **own.values,
        **size_values(base, base),
        "num_steps": num_steps,
        "warmup_steps": short.warmup_steps,
        "decay_steps": short.decay_steps,
        "batch_warmup_steps": 0,
        "batch_warmup_stages": 1,
    }
    return dataclasses.replace(
        decision,
        shape=base,
        learning_rate=learning_rate_of(short),
        num_tokens=num_steps * decision.batch_tokens,
        own=dataclasses.replace(own, values={name: values[name] for name in own.values}),
    )


def _kill(run_dir: Path, signals: Signals) -> None:
    _signal(run_dir, signal.SIGKILL)


def _stop(run_dir: Path, signals: Signals) -> None:
    _signal(run_dir, signal.SIGSTOP)


def _interrupt(run_dir: Path, signals: Signals) -> None:
    signals.hear(signal.SIGTERM)


def _signal(run_dir: Path, number: int) -> None:
    """To every process of the command, found by the variable that it was started with; not to its
    keeper.
    """
    wanted = f"{RUN_DIR_VARIABLE}={run_dir.resolve()}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            mine = wanted in (entry / "environ").read_bytes().split(b"\0")
            if mine and b"keeper.py" not in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), number)


def _uninterrupted(stage: OwnRehearsal) -> float:
    """Validation loss of the whole run, made once, in nats; NaN where it did not finish."""
    kept = stage.folder / "whole" / "validation_loss_nats"
    if not kept.is_file():
        outcome = stage.start("whole")
        kept.parent.mkdir(exist_ok=True)
        loss = outcome.validation_loss_nats
        kept.write_text(repr(math.nan if outcome.event != "finished" or loss is None else loss))
        (kept.parent / "reason").write_text(outcome.reason)
    return float(kept.read_text())


def _resumed(name: str, stage: OwnRehearsal, outcome: LaunchOutcome, how: str) -> DrillResult:
    """Whether a run that was disturbed has gone on and ended as the uninterrupted one."""
    whole, found = _uninterrupted(stage), outcome.validation_loss_nats
    seen: dict[str, Json] = {
        "event": outcome.event,
        "validation_loss_nats": found,
        "uninterrupted_nats": _finite(whole),
    }
    if outcome.event != "finished" or found is None or not math.isfinite(whole):
        return judged(name, False, f"{how}: {outcome.reason or outcome.event}", seen)
    share = abs(found / whole - 1)
    losses = f"{format_significant(found, 6)}, uninterrupted {format_significant(whole, 6)} nats"
    said = f"{how} and went on; validation loss {losses}"
    return judged(name, share <= SAME_SHARE, said, seen)


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def own_run(stage: OwnRehearsal) -> DrillResult:
    """See the registry."""
    loss = _uninterrupted(stage)
    said = f"it ran to its end at {format_loss(loss)} nats"
    if not math.isfinite(loss):
        said = (
            stage.folder / "whole" / "reason"
        ).read_text() or "it logged no finite validation loss"
    return judged("own_run", math.isfinite(loss), said, {"validation_loss_nats": _finite(loss)})


def own_killed(stage: OwnRehearsal) -> DrillResult:
    """See the registry."""
    outcome = stage.start("killed", _kill)
    if outcome.event == "finished" and not outcome.num_restarts:
        return judged(
            "own_killed", False, "it ended before it could be killed: raise proxy.num_steps", {}
        )
    return _resumed(
        "own_killed", stage, outcome, f"it was killed, restarted {outcome.num_restarts} time"
    )


def own_stopped(stage: OwnRehearsal) -> DrillResult:
    """See the registry."""
    first = stage.start("stopped", _interrupt)
    if first.event != "interrupted":
        return judged(
            "own_stopped",
            False,
            f"it did not stop at SIGTERM: {first.event}",
            {"event": first.event},
        )
    return _resumed(
        "own_stopped",
        stage,
        stage.start("stopped"),
        f"it stopped at step {first.step}, was started again",
    )


def own_hang(stage: OwnRehearsal) -> DrillResult:
    """See the registry."""
    return _resumed("own_hang", stage, stage.start("hang", _stop), "it hung, was ended")


def own_cut_log(stage: OwnRehearsal) -> DrillResult:
    """See the registry."""
    first = stage.start("cut_log", _interrupt)
    own = stage.scaled.decision.own
    assert own is not None
    place = own.metrics_at(stage.folder / "cut_log")
    files = (
        [place] if place.is_file() else sorted(file for file in place.rglob("*") if file.is_file())
    )
    if first.event != "interrupted" or not files:
        return judged(
            "own_cut_log", False, f"there is no log to cut: {first.event}", {"event": first.event}
        )
    newest = max(files, key=lambda file: file.stat().st_mtime)
    os.truncate(newest, max(1, newest.stat().st_size - 7))
    return _resumed(
        "own_cut_log",
        stage,
        stage.start("cut_log"),
        f"the last line of {newest.name} was cut, it was started",
    )


def own_divergence(stage: OwnRehearsal) -> DrillResult:
    """See the registry."""
    own = stage.scaled.decision.own
    assert own is not None
    outcome = stage.start("divergence", lr=float(own.values["lr"]) * HUGE)  # type: ignore[arg-type]
    said = outcome.reason or f"it ran on and {outcome.event} at {outcome.validation_loss_nats} nats"
    return judged("own_divergence", outcome.event == "aborted", said, {"event": outcome.event})
