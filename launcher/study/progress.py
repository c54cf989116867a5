"""Progress of a whole study: the work done in all its stages, the range of the time left, and the
best loss so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from launcher.base.talk import LiveLine, say
from launcher.calibration.stage_runs import runs_of
from launcher.calibration.study_cost import AFTER_SECONDS
from launcher.plan.study import Study
from launcher.study.progress_text import line_of, run_text
from proxies.core.branches import own_flops, trained_flops
from proxies.core.notation import format_duration
from proxies.core.spec import Run
from sweeps.store.ledger import Ledger
from sweeps.store.live import RunningRun, StudyState

CHECK, FIT = "check", "fit"
_STAGES = (CHECK, "sweep", "transfer", "ladder", FIT)
_NUM_STAGES = {"check": 1, "sweep": 2, "transfer": 3, "ladder": 5, "run": 5}
"""Number of these stages that a verb runs."""
ENOUGH_SECONDS, ENOUGH_SHARE = 10.0, 0.005
"""Minimum seconds of a stage, and minimum share of the study's work done in it, before a speed is
estimated from the stage.
"""
OWN_SPREAD = (0.8, 1.25)
"""Range of the seconds per FLOP in the rest of a stage, relative to the same stage so far."""
ALONE_SPREAD = (0.4, 1.5)
"""Range of the seconds per FLOP of another stage while only one stage has been measured. On the
demo (2 cores) a FLOP of transfer took 0.4 times, and one of the ladder 0.6 times, as long as one of
the sweep, whose models are the smallest.
"""
EXTRA_SHARE = 0.5
"""Share of the runs that the plan's extensions may add which the upper end of the time left
includes.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStage:
    """A stage with the FLOPs of its runs. With no FLOPs, its time is assumed (`AFTER_SECONDS`)."""

    name: str
    least: float = 0.0
    """FLOPs without extensions."""
    most: float = 0.0
    """FLOPs with all extensions that the plan allows."""


def planned_stages(study: Study, verb: str) -> list[PlannedStage]:
    """Return the stages that `forerun VERB` runs, with the FLOPs that `forerun estimate` counts.
    Stages without runs are left out.
    """
    runs = {stage.name: stage for stage in runs_of(study)}
    if verb not in ("check", "run") and study.factory is None:
        del runs[CHECK]  # a sweep checks coordinates only if the model is the user's own
    stages = []
    for name in _STAGES[: _NUM_STAGES[verb]]:
        min_flops, max_flops = 0.0, 0.0
        if name in runs:
            min_flops = float(sum(own_flops(runs[name].runs)))
            max_flops = min_flops + float(sum(own_flops(runs[name].more)))
        if min_flops or name == FIT:
            stages.append(PlannedStage(name=name, least=min_flops, most=max_flops))
    return stages or [PlannedStage(name=CHECK)]  # a command's check, which will be refused


class StudyProgress:
    """The progress of a whole study; it takes plain numbers and returns a `StudyState`.

    All work is in FLOPs. Seconds of a stage count from its first run until the next stage begins,
    so they include everything between its runs, but not the start of Ray and the coordinate checks.
    """

    def __init__(
        self,
        stages: Sequence[PlannedStage],
        done: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start at the first stage. `done`: FLOPs of the runs that were recorded before (see
        `resume`).
        """
        self._stages, self._clock = list(stages), clock
        self._done = [0.0] * len(self._stages)
        self.resume(done)
        self._here = 0
        self._began = self._entered = clock()
        self._first: float | None = None  # time at which the stage's first run could start
        self._fresh = 0.0  # FLOPs done in this stage since then
        self._seconds_per_flop: dict[int, float] = {}  # by index of stages that have ended
        self._asked = self._asked_done = self._under_way = 0.0
        self._asked_at = self._entered
        self._shown = 0.0
        self._best: tuple[float, float] | None = None

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
            if stage.name != CHECK:  # runs of coordinate checks are not recorded one by one
                self._done[index] = min(done, stage.least)
                done -= self._done[index]

    def begin(self, name: str) -> None:
        """Begin a stage; the stages before it are complete. A stage that is not planned, or has
        passed, is ignored.
        """
        index = next((i for i, stage in enumerate(self._stages) if stage.name == name), -1)
        if index <= self._here:
            return
        if (speed := self._measure_speed()) is not None:
            self._seconds_per_flop[self._here] = speed
        self._here, self._entered, self._first = index, self._clock(), None
        self._fresh = self._asked = self._asked_done = self._under_way = 0.0

    def ask(self, flops: float) -> None:
        """Note that runs with so many FLOPs are about to start in this stage."""
        self._asked_at = self._clock()
        self._first = self._asked_at if self._first is None else self._first
        self._asked, self._asked_done, self._under_way = flops, 0.0, 0.0

    def add(self, flops: float, under_way: float = 0.0) -> None:
        """Add FLOPs of runs that have ended in this stage; `under_way` is the FLOPs done so far by
        runs that have not ended.
        """
        self._done[self._here] += flops
        self._fresh += flops
        self._asked_done += flops
        self._under_way = under_way

    def see(self, runs: Iterable[Run], parametrization: str) -> float:
        """Take in outcomes of runs and return their FLOPs. The best loss is the lowest among runs
        of this parametrization.
        """
        flops = 0.0
        for run in runs:
            flops += trained_flops(run)
            loss = run.result.loss_nats
            is_better = loss is not None and (self._best is None or loss < self._best[0])
            if is_better and loss is not None and run.spec.parametrization.name == parametrization:
                self._best = (loss, run.spec.hparams.learning_rate)
        return flops

    def state(self) -> StudyState:
        """Return the current state. The share done never falls, although verdicts may ask for runs
        that were not planned.
        """
        left = self._count_flops_left(self._here)[0] + sum(
            self._count_flops_left(index)[0] for index in self._later
        )
        passed = sum(max(self._done[i], self._stages[i].least) for i in range(self._here))
        done = passed + self._done[self._here] + self._under_way
        share = done / (done + left) if done + left else 0.0
        self._shown = max(self._shown, min(share, 0.99))  # the study has not ended yet
        low, high = self._estimate_seconds_left(done + left) or (None, None)
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
    def _later(self) -> range:
        return range(self._here + 1, len(self._stages))

    def _count_flops_left(self, index: int) -> tuple[float, float]:
        """Return the FLOPs that a stage still needs: as planned or asked for, and the same with
        some of the extensions.
        """
        stage, done = self._stages[index], self._done[index]
        asked = 0.0
        if index == self._here:
            done += self._under_way
            asked = self._asked - self._asked_done - self._under_way
        min_left = max(asked, stage.least - done, 0.0)
        return min_left, min_left + EXTRA_SHARE * max(0.0, stage.most - done - min_left)

    def _measure_speed(self) -> float | None:
        """Return the seconds per FLOP of this stage, including everything between its runs; None
        before there is enough work to tell.
        """
        done = self._fresh + self._under_way
        seconds = 0.0 if self._first is None else self._clock() - self._first
        study_flops = sum(max(stage.least, self._done[i]) for i, stage in enumerate(self._stages))
        if seconds < ENOUGH_SECONDS or done < ENOUGH_SHARE * study_flops or not done:
            return None
        return seconds / done

    def _estimate_seconds_left(self, total_flops: float) -> tuple[float, float] | None:
        """Return the minimum and maximum of the seconds left; None if nothing has been measured
        yet.
        """
        name = self._stages[self._here].name
        here, ended_speeds = self._measure_speed(), [*self._seconds_per_flop.values()]
        known = [*ended_speeds, *([] if here is None else [here])]
        if not known and name != FIT:
            return None
        low = high = 0.0
        for index in (self._here, *self._later):
            if self._stages[index].name == FIT:
                passed = self._clock() - self._entered if index == self._here else 0.0
                low += max(1.0, AFTER_SECONDS.low - passed)
                high += max(AFTER_SECONDS.low, AFTER_SECONDS.high - passed)
            elif known:
                fast, slow = min(known), max(known)
                if index == self._here and here is not None:
                    fast, slow = OWN_SPREAD[0] * here, OWN_SPREAD[1] * here
                elif len(known) == 1:
                    fast, slow = ALONE_SPREAD[0] * fast, ALONE_SPREAD[1] * slow
                min_flops, max_flops = self._count_flops_left(index)
                low, high = low + fast * min_flops, high + slow * max_flops
        return low, high


class Reporter:
    """A printer of a study's progress: one line for the whole study, and with `verbose` a line for
    each run that has ended.
    """

    def __init__(
        self, study: Study, ledger: Ledger, verb: str = "run", *, verbose: bool = False
    ) -> None:
        """Count the recorded runs. `verb`: the command that runs stages of this study."""
        self._parametrization = study.plan.proxy.parametrization
        self._verbose, self._line = verbose, LiveLine()
        self._running: Sequence[RunningRun] = ()
        self.progress = StudyProgress(planned_stages(study, verb))
        self.progress.resume(self.progress.see(ledger.each_run(), self._parametrization))

    def begin(self, name: str) -> None:
        """Begin a stage."""
        self.progress.begin(name)
        self.draw()

    def ended(self, runs: Sequence[Run], running: Sequence[RunningRun], under_way: float) -> None:
        """Take in `runs`, which were just recorded. `under_way`: FLOPs done by runs that have not
        ended.
        """
        self._running = running
        self.progress.add(self.progress.see(runs, self._parametrization), under_way)
        for run in runs if self._verbose else ():
            say(run_text(run))
        self.draw()

    def checked(self, flops: float) -> None:
        """Add FLOPs that a coordinate check has done."""
        self.progress.add(flops)
        self.draw()

    def draw(self) -> StudyState:
        """Show the state if it is time, and return it."""
        state = self.progress.state()
        self._line.show(line_of(state, len(self._running)), state.done)
        return state

    def pause(self) -> None:
        """Note that no runs are running."""
        self._running = ()

    def close(self) -> None:
        """Remove the live line."""
        self._line.clear()

    def done(self) -> None:
        """Report that everything has ended well."""
        self.close()
        say(f"study: done in {format_duration(self.progress.seconds)}")
