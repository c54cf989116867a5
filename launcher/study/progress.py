"""How far a whole study is: work done of all its stages, the range of the time left, the best loss
so far.
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
_RUN = (CHECK, "sweep", "transfer", "ladder", FIT)
_OF_VERB = {"check": 1, "sweep": 2, "transfer": 3, "ladder": 5, "run": 5}
"""How many of these a verb runs."""
ENOUGH_SECONDS, ENOUGH_SHARE = 10.0, 0.005
"""Of a stage's runs, and of the study's work: with less, no speed is derived from a stage."""
OWN_SPREAD = (0.8, 1.25)
"""Seconds per FLOP in the rest of a stage, in terms of the same stage's so far."""
ALONE_SPREAD = (0.4, 1.5)
"""The same of another stage, while one alone is measured. On the demo (2 cores) a FLOP of transfer
took 0.4, one of the ladder 0.6 of the time that one of the sweep took, whose models are the
smallest."""
EXTRA_SHARE = 0.5
"""Of the runs that the plan's extensions may add, what the upper end of the time left counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStage:
    """A stage and the FLOPs of its runs; none: its time is assumed (`AFTER_SECONDS`)."""

    name: str
    least: float = 0.0
    most: float = 0.0
    """With all the extensions that the plan allows."""


def planned_stages(study: Study, verb: str) -> list[PlannedStage]:
    """The stages that `forerun VERB` runs, as `forerun estimate` counts them; a stage without runs
    is left out.
    """
    runs = {stage.name: stage for stage in runs_of(study)}
    if verb not in ("check", "run") and study.factory is None:
        del runs[CHECK]  # a sweep asks for it before a model that is not ours, and for no other
    found = []
    for name in _RUN[: _OF_VERB[verb]]:
        least, most = 0.0, 0.0
        if name in runs:
            least = float(sum(own_flops(runs[name].runs)))
            most = least + float(sum(own_flops(runs[name].more)))
        if least or name == FIT:
            found.append(PlannedStage(name=name, least=least, most=most))
    return found or [PlannedStage(name=CHECK)]  # the check of a command, which is refused


class StudyProgress:
    """The one place that knows how far the whole study is; plain numbers in, a `StudyState` out.

    All work is in FLOPs. Seconds of a stage count from its first run until the next stage begins,
    so that they hold all that happens between its runs too; Ray's start and the checks are behind
    us by then.
    """

    def __init__(
        self,
        stages: Sequence[PlannedStage],
        done: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`done`: see `resume`."""
        self._stages, self._clock = list(stages), clock
        self._done = [0.0] * len(self._stages)
        self.resume(done)
        self._here = 0
        self._began = self._entered = clock()
        self._first: float | None = None  # when the stage's first run could start
        self._fresh = 0.0  # done in this stage since then
        self._seconds_per_flop: dict[int, float] = {}  # of stages that have ended
        self._asked = self._asked_done = self._under_way = 0.0
        self._asked_at = self._entered
        self._shown = 0.0
        self._best: tuple[float, float] | None = None

    @property
    def seconds(self) -> float:
        """Since this command began."""
        return self._clock() - self._began

    @property
    def batch_left_seconds(self) -> float | None:
        """What is left of the runs asked for last, at their rate so far; None before any work is
        done.
        """
        done = self._asked_done + self._under_way
        if not done:
            return None
        return (self._clock() - self._asked_at) / done * max(0.0, self._asked - done)

    def resume(self, done: float) -> None:
        """FLOPs of the runs that were recorded before; they are counted to the stages in order."""
        for index, stage in enumerate(self._stages):
            if stage.name != CHECK:  # its runs are not recorded one by one
                self._done[index] = min(done, stage.least)
                done -= self._done[index]

    def begin(self, name: str) -> None:
        """A stage begins, and those before it are complete. One that is not planned, or has passed,
        is ignored.
        """
        index = next((i for i, stage in enumerate(self._stages) if stage.name == name), -1)
        if index <= self._here:
            return
        if (speed := self._speed_here()) is not None:
            self._seconds_per_flop[self._here] = speed
        self._here, self._entered, self._first = index, self._clock(), None
        self._fresh = self._asked = self._asked_done = self._under_way = 0.0

    def ask(self, flops: float) -> None:
        """Runs of so much work are about to start in this stage."""
        self._asked_at = self._clock()
        self._first = self._asked_at if self._first is None else self._first
        self._asked, self._asked_done, self._under_way = flops, 0.0, 0.0

    def add(self, flops: float, under_way: float = 0.0) -> None:
        """So much more has ended in this stage; `under_way` is what runs that have not ended have
        done, as of now.
        """
        self._done[self._here] += flops
        self._fresh += flops
        self._asked_done += flops
        self._under_way = under_way

    def see(self, runs: Iterable[Run], parametrization: str) -> float:
        """Take in outcomes, and return their FLOPs; the best loss is the lowest among runs of this
        parametrization.
        """
        flops = 0.0
        for run in runs:
            flops += trained_flops(run)
            loss = run.result.loss_nats
            better = loss is not None and (self._best is None or loss < self._best[0])
            if better and loss is not None and run.spec.parametrization.name == parametrization:
                self._best = (loss, run.spec.hparams.learning_rate)
        return flops

    def state(self) -> StudyState:
        """How things stand now; the share never falls, although verdicts may ask for runs that
        nobody planned.
        """
        left = self._left(self._here)[0] + sum(self._left(index)[0] for index in self._later)
        passed = sum(max(self._done[i], self._stages[i].least) for i in range(self._here))
        done = passed + self._done[self._here] + self._under_way
        share = done / (done + left) if done + left else 0.0
        self._shown = max(self._shown, min(share, 0.99))  # it has not ended yet
        low, high = self._left_seconds(done + left) or (None, None)
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

    def _left(self, index: int) -> tuple[float, float]:
        """FLOPs that a stage still needs: as planned or asked for, and with some of the
        extensions.
        """
        stage, done = self._stages[index], self._done[index]
        asked = 0.0
        if index == self._here:
            done += self._under_way
            asked = self._asked - self._asked_done - self._under_way
        least = max(asked, stage.least - done, 0.0)
        return least, least + EXTRA_SHARE * max(0.0, stage.most - done - least)

    def _speed_here(self) -> float | None:
        """Seconds per FLOP of this stage, all that happened between its runs included; None: not
        enough yet.
        """
        done = self._fresh + self._under_way
        seconds = 0.0 if self._first is None else self._clock() - self._first
        whole = sum(max(stage.least, self._done[i]) for i, stage in enumerate(self._stages))
        if seconds < ENOUGH_SECONDS or done < ENOUGH_SHARE * whole or not done:
            return None
        return seconds / done

    def _left_seconds(self, whole: float) -> tuple[float, float] | None:
        """From at least to at most; None where nothing tells yet."""
        name = self._stages[self._here].name
        here, before = self._speed_here(), [*self._seconds_per_flop.values()]
        known = [*before, *([] if here is None else [here])]
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
                least, most = self._left(index)
                low, high = low + fast * least, high + slow * most
        return low, high


class Reporter:
    """Prints a study's progress: one line for the whole, and with `verbose` a line per run that has
    ended.
    """

    def __init__(
        self, study: Study, ledger: Ledger, verb: str = "run", *, verbose: bool = False
    ) -> None:
        """`verb`: the command that runs stages of this study."""
        self._parametrization = study.plan.proxy.parametrization
        self._verbose, self._line = verbose, LiveLine()
        self._running: Sequence[RunningRun] = ()
        self.progress = StudyProgress(planned_stages(study, verb))
        self.progress.resume(self.progress.see(ledger.each_run(), self._parametrization))

    def begin(self, name: str) -> None:
        """A stage begins."""
        self.progress.begin(name)
        self.draw()

    def ended(self, runs: Sequence[Run], running: Sequence[RunningRun], under_way: float) -> None:
        """Take in `runs`, just recorded; `under_way`: FLOPs done of runs that have not ended."""
        self._running = running
        self.progress.add(self.progress.see(runs, self._parametrization), under_way)
        for run in runs if self._verbose else ():
            say(run_text(run))
        self.draw()

    def checked(self, flops: float) -> None:
        """A coordinate check has done so much of its work."""
        self.progress.add(flops)
        self.draw()

    def draw(self) -> StudyState:
        """Show how things stand, if it is time; returns it."""
        state = self.progress.state()
        self._line.show(line_of(state, len(self._running)), state.done)
        return state

    def pause(self) -> None:
        """Nothing runs any more, for now."""
        self._running = ()

    def close(self) -> None:
        """Take the live line away."""
        self._line.clear()

    def done(self) -> None:
        """Everything has ended well."""
        self.close()
        say(f"study: done in {format_duration(self.progress.seconds)}")
