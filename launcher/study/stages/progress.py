"""Progress of a whole study: the work done in all its stages, the range of the time left, and the
best loss so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from forerun._launcher.main_run.progress_output import ProgressLine, print_progress
from forerun._launcher.study.calibration.stage_runs import list_stage_runs
from forerun._launcher.study.calibration.study_cost import AFTER_SECONDS
from forerun._launcher.study.plan.study import Study
from forerun._launcher.study.stages.progress_text import format_progress_line, format_run
from forerun._proxies.core.branches import compute_own_flops, compute_trained_flops
from forerun._proxies.core.notation import format_duration
from forerun._proxies.core.spec import Run
from forerun._sweeps.store.ledger import Ledger
from forerun._sweeps.store.live_state import RunningRun, StudyState

CHECK_STAGE, FIT_STAGE = "check", "fit"
_STAGES = (CHECK_STAGE, "sweep", "transfer", "ladder", FIT_STAGE)
_NUM_STAGES = {"check": 1, "sweep": 2, "transfer": 3, "ladder": 5, "run": 5}
"""Number of these stages that a verb runs."""
MIN_SPEED_SECONDS, MIN_SPEED_SHARE = 10.0, 0.005
"""Minimum seconds of a stage, and minimum share of the study's work done in it, before a speed is
estimated from the stage. Chosen, not measured.
"""
OWN_SPREAD = (0.8, 1.25)
"""Range of the seconds per FLOP in the rest of a stage, relative to the same stage so far. Chosen,
not measured.
"""
OTHER_STAGE_SPREAD = (0.4, 1.5)
"""Range of the seconds per FLOP of another stage, relative to the only stage that has been
measured. In the demo (2 cores), a FLOP of transfer took 0.4 times as long as a FLOP of the sweep,
whose models are the smallest, and a FLOP of the ladder 0.6 times.
"""
EXTRA_SHARE = 0.5
"""Share of the plan's extensions that is counted in the upper end of the time left. Chosen, not
measured.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStage:
    """A stage with the FLOPs of its runs. The stage of the fit has no runs, and its time is assumed
    (`AFTER_SECONDS`).
    """

    name: str
    min_flops: float = 0.0
    """FLOPs without extensions."""
    max_flops: float = 0.0
    """FLOPs with all extensions that the plan allows."""


def plan_stages(study: Study, verb: str) -> list[PlannedStage]:
    """Return the stages that `forerun VERB` runs, with the FLOPs that `forerun estimate` counts.
    Stages without runs are left out.
    """
    runs = {stage.name: stage for stage in list_stage_runs(study)}
    if verb not in ("check", "run") and study.factory is None:
        del runs[CHECK_STAGE]  # a sweep checks coordinates only if the model is the user's own
    stages = []
    for name in _STAGES[: _NUM_STAGES[verb]]:
        min_flops, max_flops = 0.0, 0.0
        if name in runs:
            min_flops = float(sum(compute_own_flops(runs[name].runs)))
            max_flops = min_flops + float(sum(compute_own_flops(runs[name].extensions)))
        if min_flops or name == FIT_STAGE:
            stages.append(PlannedStage(name=name, min_flops=min_flops, max_flops=max_flops))
    return stages or [PlannedStage(name=CHECK_STAGE)]  # a command's check, which will be refused


class StudyProgress:
    """The progress of a whole study. It takes in the FLOPs of runs, and returns a `StudyState`.

    The seconds of a stage count from its first run until the next stage begins. They include
    everything between its runs, but not the start of Ray.
    """

    def __init__(
        self, stages: Sequence[PlannedStage], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start at the first stage, without any work done."""
        self._stages, self._clock = list(stages), clock
        self._done = [0.0] * len(self._stages)
        self._here = 0  # index of the current stage
        # Times at which this command, the current stage, and the current batch of runs began
        self._began = self._entered = self._asked_at = clock()
        self._first: float | None = None  # time at which the stage's first run could start
        self._fresh = 0.0  # FLOPs done in this stage since then
        self._speeds: dict[int, float] = {}  # seconds per FLOP, by index of stages that have ended
        # FLOPs of the current batch: asked for, of runs that have ended, of runs that have not
        self._asked = self._asked_done = self._under_way = 0.0
        self._shown = 0.0  # share done that was shown last
        self._best: tuple[float, float] | None = None  # lowest loss, and its learning rate

    @property
    def seconds(self) -> float:
        """Seconds since this command began."""
        return self._clock() - self._began

    @property
    def batch_left_seconds(self) -> float | None:
        """Seconds left of the runs that were asked for last, at their rate so far; None before any
        work is done.
        """
        done = self._asked_done + self._under_way
        if not done:
            return None
        return (self._clock() - self._asked_at) / done * max(0.0, self._asked - done)

    def resume(self, done: float) -> None:
        """Assign the FLOPs of runs that were recorded before to the stages, in order."""
        for index, stage in enumerate(self._stages):
            if stage.name != CHECK_STAGE:  # runs of coordinate checks are not recorded one by one
                self._done[index] = min(done, stage.min_flops)
                done -= self._done[index]

    def begin(self, name: str) -> None:
        """Begin a stage; the stages before it are complete. A stage that is not planned, or has
        passed, is ignored.
        """
        index = next((i for i, stage in enumerate(self._stages) if stage.name == name), -1)
        if index <= self._here:
            return
        if (speed := self._measure_speed()) is not None:
            self._speeds[self._here] = speed
        self._here, self._entered, self._first = index, self._clock(), None
        self._fresh = self._asked = self._asked_done = self._under_way = 0.0

    def begin_batch(self, flops: float) -> None:
        """Begin a batch of runs in this stage, which take `flops` FLOPs together."""
        self._asked_at = self._clock()
        self._first = self._asked_at if self._first is None else self._first
        self._asked, self._asked_done, self._under_way = flops, 0.0, 0.0

    def add(self, flops: float, under_way: float = 0.0) -> None:
        """Add the FLOPs of runs that have ended in this stage. `under_way` is the number of FLOPs
        that runs that have not ended have done so far.
        """
        self._done[self._here] += flops
        self._fresh += flops
        self._asked_done += flops
        self._under_way = under_way

    def add_outcomes(self, runs: Iterable[Run], parametrization: str) -> float:
        """Take in outcomes of runs and return their FLOPs. The best loss is the lowest among runs
        of this parametrization.
        """
        flops = 0.0
        for run in runs:
            flops += compute_trained_flops(run)
            loss = run.result.loss_nats
            if loss is not None and run.spec.parametrization.name == parametrization:
                outcome = (loss, run.spec.hparams.learning_rate)
                self._best = min(self._best or outcome, outcome, key=lambda pair: pair[0])
        return flops

    def update_state(self) -> StudyState:
        """Update the share done, and return the current state. The share never falls, although
        verdicts may ask for runs that were not planned.
        """
        left = sum(self._count_flops_left(index)[0] for index in self._unfinished)
        done = sum(max(self._done[i], self._stages[i].min_flops) for i in range(self._here))
        done += self._done[self._here] + self._under_way
        share = done / (done + left) if done + left else 0.0
        self._shown = max(self._shown, min(share, 0.99))  # the study has not ended yet
        low, high = self._estimate_seconds_left() or (None, None)
        loss, rate = self._best or (None, None)
        return StudyState(
            done=self._shown,
            stage=self._stages[self._here].name,
            number=self._here + 1,
            num_stages=len(self._stages),
            left_low_seconds=low,
            left_high_seconds=high,
            best_loss_nats=loss,
            best_learning_rate=rate,
        )

    @property
    def _unfinished(self) -> range:
        """Indexes of the current stage and of those after it."""
        return range(self._here, len(self._stages))

    def _count_flops_left(self, index: int) -> tuple[float, float]:
        """Return the FLOPs that a stage still needs, without and with some of the plan's
        extensions.
        """
        stage, done, asked = self._stages[index], self._done[index], 0.0
        if index == self._here:
            done += self._under_way
            asked = self._asked - self._asked_done - self._under_way
        least = max(asked, stage.min_flops - done, 0.0)
        return least, least + EXTRA_SHARE * max(0.0, stage.max_flops - done - least)

    def _measure_speed(self) -> float | None:
        """Return the seconds per FLOP of this stage, including everything between its runs; None
        before there is enough work to tell.
        """
        done = self._fresh + self._under_way
        seconds = 0.0 if self._first is None else self._clock() - self._first
        study_flops = sum(map(max, (stage.min_flops for stage in self._stages), self._done))
        if seconds < MIN_SPEED_SECONDS or done < MIN_SPEED_SHARE * study_flops or not done:
            return None
        return seconds / done

    def _estimate_seconds_left(self) -> tuple[float, float] | None:
        """Return the minimum and maximum of the seconds left; None if nothing has been measured
        yet.
        """
        here = self._measure_speed()
        speeds = [*self._speeds.values(), *([] if here is None else [here])]
        if not speeds and self._stages[self._here].name != FIT_STAGE:
            return None
        low = high = 0.0
        for index in self._unfinished:
            if self._stages[index].name == FIT_STAGE:
                passed = self._clock() - self._entered if index == self._here else 0.0
                low += max(1.0, AFTER_SECONDS.low - passed)
                high += max(AFTER_SECONDS.low, AFTER_SECONDS.high - passed)
                continue
            fastest, slowest = min(speeds), max(speeds)
            if index == self._here and here is not None:
                fastest, slowest = OWN_SPREAD[0] * here, OWN_SPREAD[1] * here
            elif len(speeds) == 1:
                fastest, slowest = OTHER_STAGE_SPREAD[0] * fastest, OTHER_STAGE_SPREAD[1] * slowest
            least, most = self._count_flops_left(index)
            low, high = low + fastest * least, high + slowest * most
        return low, high


class ProgressReporter:
    """A printer of a study's progress: one line for the whole study, and with `verbose` a line for
    each run that has ended.
    """

    def __init__(
        self, study: Study, ledger: Ledger, verb: str = "run", *, verbose: bool = False
    ) -> None:
        """Count the recorded runs. `verb`: the command that runs stages of this study."""
        self._parametrization = study.plan.proxy.parametrization
        self._verbose, self._line = verbose, ProgressLine()
        self._running: Sequence[RunningRun] = ()
        self.progress = StudyProgress(plan_stages(study, verb))
        self.progress.resume(
            self.progress.add_outcomes(ledger.iterate_runs(), self._parametrization)
        )

    def begin(self, name: str) -> None:
        """Begin a stage."""
        self.progress.begin(name)
        self.draw()

    def add_runs(
        self, runs: Sequence[Run], running: Sequence[RunningRun], under_way: float
    ) -> None:
        """Take in `runs`, which were just recorded. `under_way`: FLOPs done by runs that have not
        ended.
        """
        self._running = running
        self.progress.add(self.progress.add_outcomes(runs, self._parametrization), under_way)
        for run in runs if self._verbose else ():
            print_progress(format_run(run))
        self.draw()

    def add_check_flops(self, flops: float) -> None:
        """Add FLOPs that a coordinate check has done."""
        self.progress.add(flops)
        self.draw()

    def draw(self) -> StudyState:
        """Show the state if it is time, and return it."""
        state = self.progress.update_state()
        self._line.show(format_progress_line(state, len(self._running)), state.done)
        return state

    def pause(self) -> None:
        """Note that no runs are running."""
        self._running = ()

    def close(self) -> None:
        """Remove the live line."""
        self._line.clear()

    def finish(self) -> None:
        """Report that everything has ended well."""
        self.close()
        print_progress(f"study: done in {format_duration(self.progress.seconds)}")
