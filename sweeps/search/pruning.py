"""Pruning: whether a trial is worth finishing, judged from its losses so far and the trials that
had ended before it began.

The rule, `curve`, predicts the loss at which the trial will end
(`forerun._sweeps.search.loss_forecasts`). Rules that compare losses at one step were measured and
removed: under a decaying schedule they give up the trials that would win (docs/pruning.md).

Trial k is compared only with trials 0 ... k-P (P: trials in flight), which had all ended before k
was suggested, in index order. A decision therefore does not depend on timing, and a resumed search
decides as an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forerun._proxies.core.notation import format_loss
from forerun._proxies.core.spec import RunResult, Status
from forerun._sweeps.search.past_trials import PastTrials
from forerun._sweeps.search.space import OFF, Params, SearchSpace
from forerun._sweeps.store.curves import load_curve
from forerun._sweeps.store.errors import CurveCorrupt

if TYPE_CHECKING:
    from forerun._sweeps.search.loss_forecasts import Forecast

RUNG_SHARES = (0.125, 0.25, 0.5)
"""Shares of the steps after which a trial is judged."""
WINDOW_SHARE = 0.1
"""Share of the steps so far over which the last losses are averaged."""
MIN_PROBABILITY = 0.01
"""A run is given up if the probability that it ends below the best loss, or within the margin above
it, is lower than this.
"""
MARGIN_SHARE = 0.0023
"""Margin above the best loss, as a share of that loss. Within the margin, another seed may reverse
the order of two trials, so both are repeated.

This is 0.005 nats for models of bytes, where the margin forgoes one in fifty of the steps that
pruning would save without it. The noise is the same share of the loss at every vocabulary size
(benchmarks/statistics/vocabularies.py).
"""
MAX_TRIALS_SEEN = 256
"""Maximum number of trials that the forecast uses: the latest trials. The best loss is taken over
all trials. The cost of a decision therefore does not grow with the search.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierTrial:
    """A trial that had ended before the judged trial was suggested."""

    point: Params
    status: Status
    losses_nats: tuple[float, ...]
    """Training loss in nats of each step's batch, finite, up to the end of the run, or to the rung
    of a pruned run.
    """
    loss_nats: float | None
    """Validation loss in nats at the end; None if the trial did not finish."""


def list_rungs(num_steps: int) -> tuple[int, ...]:
    """Return the steps, ascending and before the last, at which a run of `num_steps` is judged."""
    return tuple(sorted({step for share in RUNG_SHARES if (step := int(num_steps * share)) >= 1}))


def judge_trial(
    *,
    space: SearchSpace,
    point: Params,
    num_steps: int,
    losses_nats: Sequence[float],
    earlier_trials: Sequence[EarlierTrial],
    num_startup: int,
) -> str:
    """Return why a run is given up, in a sentence, or an empty string if it continues.

    Args:
        space: the axes as they are now.
        point: hyperparameters of the run.
        num_steps: optimizer steps of a whole run.
        losses_nats: training losses of the run, [step]; their number is one of `list_rungs`.
        earlier_trials: trials 0 ... index-P, by index.
        num_startup: number of trials that must have finished before any run is given up.
    """
    num_finished = sum(trial.loss_nats is not None for trial in earlier_trials)
    if len(losses_nats) not in list_rungs(num_steps) or num_finished < max(num_startup, 1):
        return ""
    forecast = _forecast_end(space, point, losses_nats, earlier_trials)
    best = _find_best(earlier_trials)
    margin_nats = MARGIN_SHARE * abs(best)
    if (
        forecast is None
        or (chance := forecast.compute_probability_below(best + margin_nats)) >= MIN_PROBABILITY
    ):
        return ""
    return (
        f"curve: at step {len(losses_nats)} of {num_steps} it is predicted to end at "
        f"{format_loss(forecast.loss_nats)} nats, the best so far at {format_loss(best)}: the "
        f"chance to end within {margin_nats:.2g} of the best is {chance:.2g}, below "
        f"{MIN_PROBABILITY:g}"
    )


def compute_sampler_loss(
    space: SearchSpace,
    point: Params,
    losses_nats: Sequence[float],
    earlier_trials: Sequence[EarlierTrial],
) -> float:
    """Return the loss, in nats, that a sampler is given for a pruned trial: its forecast, but not
    below the best finished trial; its smoothed training loss if there is no forecast.

    Args:
        space: the axes as they are now.
        point: hyperparameters of the trial.
        losses_nats: training losses of the trial up to its rung, [step].
        earlier_trials: trials 0 ... index-P, by index.
    """
    forecast = _forecast_end(space, point, losses_nats, earlier_trials)
    if forecast is None:
        return smooth_loss(losses_nats, len(losses_nats))
    return max(forecast.loss_nats, _find_best(earlier_trials))


def smooth_loss(losses_nats: Sequence[float], step: int) -> float:
    """Return the training loss at a step, in nats: the mean over the last `WINDOW_SHARE` of the
    steps up to it.
    """
    window = losses_nats[step - max(1, round(WINDOW_SHARE * step)) : step]
    return sum(window) / len(window)


def _find_best(earlier_trials: Sequence[EarlierTrial]) -> float:
    """Return the lowest validation loss of the finished trials, in nats."""
    return min(trial.loss_nats for trial in earlier_trials if trial.loss_nats is not None)


def _forecast_end(
    space: SearchSpace,
    point: Params,
    losses_nats: Sequence[float],
    earlier_trials: Sequence[EarlierTrial],
) -> Forecast | None:
    """Forecast the final loss of a run from the latest finished trials in `earlier_trials`; None if
    there are too few.
    """
    # Imported here: it loads numpy, and only a search that prunes needs it
    from forerun._sweeps.search.loss_forecasts import forecast_loss

    step = len(losses_nats)
    finished = [
        trial
        for trial in earlier_trials[-MAX_TRIALS_SEEN:]
        if trial.loss_nats is not None and len(trial.losses_nats) >= step
    ]
    return forecast_loss(
        [
            [*_to_features(space, trial.point), smooth_loss(trial.losses_nats, step)]
            for trial in finished
        ],
        [trial.loss_nats for trial in finished if trial.loss_nats is not None],
        [*_to_features(space, point), smooth_loss(losses_nats, step)],
    )


def _to_features(space: SearchSpace, point: Params) -> list[float]:
    """Return a point in searched coordinates, octaves or shares, followed by its switches.

    A value that is off is replaced by the middle of its axis.
    """
    values = [
        axis.interpolate(0.5) if axis.can_be_off and point[axis.name] == OFF else point[axis.name]
        for axis in space.axes
    ]
    return [
        value if axis.scale == "linear" else axis.octaves(value)
        for axis, value in zip(space.axes, values, strict=True)
    ] + [float(point[axis.name] == OFF) for axis in space.switches]


_EMPTY_POINT: Params = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """A trial that was given out."""

    point: Params
    num_seen: int
    is_exempt: bool
    """Whether the trial is run to its end, whatever its losses."""


class SearchPruner:
    """A pruner of a search's trials (`forerun._sweeps.search.source.Pruner`).

    The source announces each trial that begins, and passes on each trial that has ended, in the
    order of their indices.
    """

    def __init__(self, search: PastTrials, study_dir: Path, *, num_steps: int) -> None:
        """Create a pruner without past trials.

        Args:
            search: the search; no trial is given up before as many have finished as its startup
                design has.
            study_dir: folder of the study, which has the curves.
            num_steps: optimizer steps of every trial.
        """
        self._search, self._study_dir, self._num_steps = search, study_dir, num_steps
        self._ended_trials: list[EarlierTrial] = []
        self._trials: dict[str, _Trial] = {}

    def begin(self, run_id: str, point: Params, *, num_seen: int, is_exempt: bool) -> None:
        """Register a trial that was given out. If two trials are one run, the first counts.

        Args:
            run_id: id of the trial's run.
            point: hyperparameters of the trial.
            num_seen: number of trials, from the first on, that this trial is compared with; the
                pruner has taken in all of them.
            is_exempt: whether the trial is run to its end, whatever its losses.
        """
        self._trials.setdefault(run_id, _Trial(point=point, num_seen=num_seen, is_exempt=is_exempt))

    def take_in(self, point: Params, result: RunResult) -> float | None:
        """Take in the next trial by index, which has ended.

        Returns:
            The loss in nats that the sampler is given; None if the trial diverged.

        Raises:
            CurveCorrupt: its curve is damaged, so later decisions would differ.
        """
        try:
            losses_nats = load_curve(self._study_dir, result).train_loss_nats
        except CurveCorrupt as error:
            raise CurveCorrupt(
                f"{error}. The search needs it to continue. Without a copy, `forerun run PLAN "
                f"--study ANOTHER --fork {self._study_dir}` keeps the ended runs and repeats this "
                "one"
            ) from error
        sampler_nats = result.loss_nats
        if result.status == "pruned":
            sampler_nats = compute_sampler_loss(
                self._search.space, point, losses_nats, self._ended_trials
            )
        self._ended_trials.append(
            EarlierTrial(
                point=point,
                status=result.status,
                losses_nats=losses_nats,
                loss_nats=result.loss_nats,
            )
        )
        # No trial in flight is compared with this trial any more. Free its losses and its point: in
        # a search of ten thousand trials, they would take much memory.
        freed_index = len(self._ended_trials) - self._search.parallelism - MAX_TRIALS_SEEN - 1
        if freed_index >= 0:
            self._ended_trials[freed_index] = dataclasses.replace(
                self._ended_trials[freed_index], losses_nats=(), point=_EMPTY_POINT
            )
        return sampler_nats

    def list_rungs(self, run_id: str) -> tuple[int, ...]:
        """See `forerun._sweeps.search.source.Pruner`."""
        return () if self._trials[run_id].is_exempt else list_rungs(self._num_steps)

    def judge_run(self, run_id: str, losses_nats: Sequence[float]) -> str:
        """See `forerun._sweeps.search.source.Pruner`."""
        trial = self._trials[run_id]
        return judge_trial(
            space=self._search.space,
            point=trial.point,
            num_steps=self._num_steps,
            losses_nats=losses_nats,
            earlier_trials=self._ended_trials[: trial.num_seen],
            num_startup=self._search.num_startup,
        )
