"""Pruning: whether a trial is worth finishing, judged from its losses so far and the trials that
had ended before it began.

The rule, `curve`, predicts the loss at which the trial will end (`sweeps.search.forecasts`). Rules
that compare losses at one step were measured and removed: under a decaying schedule they give up
the trials that the search is for (docs/pruning.md).

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

from proxies.core.notation import format_loss
from proxies.core.spec import RunResult, Status
from sweeps.search.past_trials import PastTrials
from sweeps.search.space import OFF, Params, SearchSpace
from sweeps.store.curves import load_curve
from sweeps.store.errors import CurveCorrupt

if TYPE_CHECKING:
    from sweeps.search.forecasts import Forecast

SHARES = (0.125, 0.25, 0.5)
"""Shares of the steps after which a trial is judged."""
WINDOW_SHARE = 0.1
"""Share of the steps so far over which the last losses are averaged."""
LEAST_CHANCE = 0.01
"""A run is given up if its probability of ending below the best, or near it, is lower than this."""
MARGIN_SHARE = 0.0023
"""Distance from the best loss, as a share of it, within which another seed may reverse the order of
two trials, so that both are repeated.

This is 0.005 nats on bytes, where it forgoes one in fifty of the steps saved; noise is this share
at every vocabulary (benchmarks/statistics/vocabularies.py).
"""
MOST_SEEN = 256
"""Maximum number of trials that the forecast uses, the latest ones; the best is taken over all
trials. The cost of a decision therefore does not grow with the search.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierTrial:
    """A trial that had ended before the trial in question was suggested."""

    point: Params
    status: Status
    losses_nats: tuple[float, ...]
    """Training loss in nats of each step's batch, finite, up to the end of the run, or to the rung
    of a pruned run.
    """
    loss_nats: float | None
    """Validation loss in nats at the end; None if the trial did not finish."""


def rungs(num_steps: int) -> tuple[int, ...]:
    """Return the steps, ascending and before the last, at which a run of `num_steps` is judged."""
    return tuple(sorted({step for share in SHARES if (step := int(num_steps * share)) >= 1}))


def verdict(
    *,
    space: SearchSpace,
    point: Params,
    num_steps: int,
    losses_nats: Sequence[float],
    seen: Sequence[EarlierTrial],
    num_startup: int,
) -> str:
    """Return why a run is given up, in a sentence, or an empty string if it continues.

    Args:
        space: the axes as they are now.
        point: hyperparameters of the run.
        num_steps: optimizer steps of a whole run.
        losses_nats: training losses of the run, [step]; their number is one of `rungs`.
        seen: trials 0 ... index-P, by index.
        num_startup: number of finished trials before any run is given up.
    """
    num_finished = sum(trial.loss_nats is not None for trial in seen)
    if len(losses_nats) not in rungs(num_steps) or num_finished < max(num_startup, 1):
        return ""
    forecast, best = _forecast_end(space, point, losses_nats, seen), _find_best(seen)
    margin_nats = MARGIN_SHARE * abs(best)
    if forecast is None or (chance := forecast.chance_below(best + margin_nats)) >= LEAST_CHANCE:
        return ""
    return (
        f"curve: at step {len(losses_nats)} of {num_steps} it is predicted to end at "
        f"{format_loss(forecast.loss_nats)} "
        f"nats, the best so far at {format_loss(best)}: the chance to end within {margin_nats:.2g} "
        "of the best is "
        f"{chance:.2g}, below {LEAST_CHANCE:g}"
    )


def told_nats(
    space: SearchSpace, point: Params, losses_nats: Sequence[float], seen: Sequence[EarlierTrial]
) -> float:
    """Return the loss, in nats, that a sampler is given for a trial that was given up after
    `losses_nats`.
    """
    forecast = _forecast_end(space, point, losses_nats, seen)
    if forecast is None:
        return smoothed(losses_nats, len(losses_nats))
    return max(forecast.loss_nats, _find_best(seen))


def smoothed(losses_nats: Sequence[float], step: int) -> float:
    """Return the training loss at a step, in nats: the mean over the last tenth of the steps so
    far.
    """
    window = losses_nats[step - max(1, round(WINDOW_SHARE * step)) : step]
    return sum(window) / len(window)


def _find_best(seen: Sequence[EarlierTrial]) -> float:
    """Return the lowest validation loss of the finished trials, in nats."""
    return min(trial.loss_nats for trial in seen if trial.loss_nats is not None)


def _forecast_end(
    space: SearchSpace, point: Params, losses_nats: Sequence[float], seen: Sequence[EarlierTrial]
) -> Forecast | None:
    """Forecast the final loss of a run from the latest finished trials in `seen`; None if there are
    too few.
    """
    # Imported here: it loads numpy, and only a search that prunes needs it
    from sweeps.search.forecasts import forecast

    step = len(losses_nats)
    finished = [
        trial
        for trial in seen[-MOST_SEEN:]
        if trial.loss_nats is not None and len(trial.losses_nats) >= step
    ]
    return forecast(
        [
            [*_to_features(space, trial.point), smoothed(trial.losses_nats, step)]
            for trial in finished
        ],
        [trial.loss_nats for trial in finished if trial.loss_nats is not None],
        [*_to_features(space, point), smoothed(losses_nats, step)],
    )


def _to_features(space: SearchSpace, point: Params) -> list[float]:
    """Return a point in searched coordinates, octaves or shares, followed by its switches.

    A value that is off is replaced by the middle of its axis.
    """
    values = [
        axis.at(0.5) if axis.can_be_off and point[axis.name] == OFF else point[axis.name]
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
    """Whether it is run to its end, whatever its losses."""


class SearchPruner:
    """A pruner of a search's trials (`sweeps.search.source.Pruner`).

    The source announces the trials that begin, and passes on those that have ended, by index.
    """

    def __init__(self, search: PastTrials, study_dir: Path, *, num_steps: int) -> None:
        """Create a pruner that has seen no trial.

        Args:
            search: the search; no trial is given up before as many have finished as its startup
                design has.
            study_dir: folder of the study, which has the curves.
            num_steps: optimizer steps of every trial.
        """
        self._search, self._study_dir, self._num_steps = search, study_dir, num_steps
        self._seen: list[EarlierTrial] = []
        self._trials: dict[str, _Trial] = {}

    def begin(self, run_id: str, point: Params, *, num_seen: int, is_exempt: bool) -> None:
        """Register a trial that was given out. If two trials are one run, the first counts.

        Args:
            run_id: id of the trial's run.
            point: hyperparameters of the trial.
            num_seen: number of trials, the first ones, that it is compared with; all of them have
                been taken in.
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
            sampler_nats = told_nats(self._search.space, point, losses_nats, self._seen)
        self._seen.append(
            EarlierTrial(
                point=point,
                status=result.status,
                losses_nats=losses_nats,
                loss_nats=result.loss_nats,
            )
        )
        old = len(self._seen) - self._search.parallelism - MOST_SEEN - 1
        # No trial in flight is compared with this one any more. Its losses and point are freed:
        # those of ten thousand trials would take much memory.
        if old >= 0:
            self._seen[old] = dataclasses.replace(
                self._seen[old], losses_nats=(), point=_EMPTY_POINT
            )
        return sampler_nats

    def rungs(self, run_id: str) -> tuple[int, ...]:
        """See `sweeps.search.source.Pruner`."""
        return () if self._trials[run_id].is_exempt else rungs(self._num_steps)

    def verdict(self, run_id: str, losses_nats: Sequence[float]) -> str:
        """See `sweeps.search.source.Pruner`."""
        trial = self._trials[run_id]
        return verdict(
            space=self._search.space,
            point=trial.point,
            num_steps=self._num_steps,
            losses_nats=losses_nats,
            seen=self._seen[: trial.num_seen],
            num_startup=self._search.num_startup,
        )
