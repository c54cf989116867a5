"""Whether a trial is worth going on with, from its losses so far: a pure function of trials that
ended before it began.

The rule, `curve`, predicts where the trial will end (`sweeps.search.forecasts`). Rules that compare
losses at one step were measured and taken out: under a decaying schedule they give up what the
search is for (docs/pruning.md).

Trial k is compared with trials 0 ... k-P alone, which had all ended before k was suggested, in
index order (P: trials in flight). So a decision depends on no timing, and a resumed search decides
as the uninterrupted one would have.
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
"""Shares of the steps after which it looks at a trial."""
WINDOW_SHARE = 0.1
"""The last losses are averaged over this share of the steps so far."""
LEAST_CHANCE = 0.01
"""A run that ends near the best or below it with less than this chance is given up."""
MARGIN_SHARE = 0.0023
"""Distance, as a share of the best loss, within which another seed may reverse a pair, so that both
are repeated.

0.005 nats on bytes, where it costs one step saved in fifty; noise is this share at every vocabulary
(benchmarks/vocabularies.py).
"""
MOST_SEEN = 256
"""Trials that it looks at, the latest; the best is that of all. So a verdict costs the same at any
length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierTrial:
    """A trial that had ended before the one in question was suggested."""

    point: Params
    status: Status
    losses_nats: tuple[float, ...]
    """Training loss of each step's batch, finite, to where the run ended; of a pruned one, to its
    rung."""
    loss_nats: float | None
    """Validation loss at the end; of a finished one alone."""


def rungs(num_steps: int) -> tuple[int, ...]:
    """Steps, ascending and before the last, at which a run of `num_steps` is looked at."""
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
    """Empty if the run continues; else why not, in a sentence.

    Args:
        space: the axes, as they are now.
        point: its hyperparameters.
        num_steps: of a whole run.
        losses_nats: its training losses, [step]; as many as one of `rungs`.
        seen: trials 0 ... index-P, by index.
        num_startup: finished trials without which nothing is given up.
    """
    num_finished = sum(one.loss_nats is not None for one in seen)
    if len(losses_nats) not in rungs(num_steps) or num_finished < max(num_startup, 1):
        return ""
    found, best = _predicted(space, point, losses_nats, seen), _best(seen)
    margin_nats = MARGIN_SHARE * abs(best)
    if found is None or (chance := found.chance_below(best + margin_nats)) >= LEAST_CHANCE:
        return ""
    return (
        f"curve: at step {len(losses_nats)} of {num_steps} it is predicted to end at "
        f"{format_loss(found.loss_nats)} "
        f"nats, the best so far at {format_loss(best)}: the chance to end within {margin_nats:.2g} "
        "of the best is "
        f"{chance:.2g}, below {LEAST_CHANCE:g}"
    )


def told_nats(
    space: SearchSpace, point: Params, losses_nats: Sequence[float], seen: Sequence[EarlierTrial]
) -> float:
    """The loss, in nats, given to a sampler for a trial that was given up after `losses_nats`."""
    found = _predicted(space, point, losses_nats, seen)
    if found is None:
        return smoothed(losses_nats, len(losses_nats))
    return max(found.loss_nats, _best(seen))


def smoothed(losses_nats: Sequence[float], step: int) -> float:
    """Training loss at a step, in nats: the mean over the last tenth of the steps so far."""
    window = losses_nats[step - max(1, round(WINDOW_SHARE * step)) : step]
    return sum(window) / len(window)


def _best(seen: Sequence[EarlierTrial]) -> float:
    return min(one.loss_nats for one in seen if one.loss_nats is not None)


def _predicted(
    space: SearchSpace, point: Params, losses_nats: Sequence[float], seen: Sequence[EarlierTrial]
) -> Forecast | None:
    """Where the run will end, by the latest finished trials among `seen`; None with too few of
    them.
    """
    from sweeps.search.forecasts import forecast  # numpy, and only a search that prunes needs it

    step = len(losses_nats)
    known = [
        one
        for one in seen[-MOST_SEEN:]
        if one.loss_nats is not None and len(one.losses_nats) >= step
    ]
    return forecast(
        [[*_coordinates(space, one.point), smoothed(one.losses_nats, step)] for one in known],
        [one.loss_nats for one in known if one.loss_nats is not None],
        [*_coordinates(space, point), smoothed(losses_nats, step)],
    )


def _coordinates(space: SearchSpace, point: Params) -> list[float]:
    """A point as it is searched: octaves or shares; what is off, at the middle of its axis beside a
    switch.
    """
    values = [
        axis.at(0.5) if axis.can_be_off and point[axis.name] == OFF else point[axis.name]
        for axis in space.axes
    ]
    return [
        value if axis.scale == "linear" else axis.octaves(value)
        for axis, value in zip(space.axes, values, strict=True)
    ] + [float(point[axis.name] == OFF) for axis in space.switches]


_FORGOTTEN: Params = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    point: Params
    num_seen: int
    whole: bool


class SearchPruner:
    """See `source.Pruner`. The source says which trials begin, and takes in those that have ended,
    by index.
    """

    def __init__(self, search: PastTrials, study_dir: Path, *, num_steps: int) -> None:
        """A pruner that has seen nothing.

        Args:
            search: whose trials they are: none is given up before as many have finished as its
                design has.
            study_dir: where the curves lie.
            num_steps: of every trial.
        """
        self._search, self._study_dir, self._num_steps = search, study_dir, num_steps
        self._seen: list[EarlierTrial] = []
        self._trials: dict[str, _Trial] = {}

    def begin(self, run_id: str, point: Params, *, num_seen: int, whole: bool) -> None:
        """A trial is given out; two may be one run, of which the first counts.

        Args:
            run_id: of its run.
            point: its values.
            num_seen: trials that it is compared with, the first ones; all of them have been taken
                in.
            whole: whether it is to be run to its end, whatever it loses.
        """
        self._trials.setdefault(run_id, _Trial(point=point, num_seen=num_seen, whole=whole))

    def take_in(self, point: Params, result: RunResult) -> float | None:
        """Take in the next trial by index, which has ended; return the loss given to the sampler,
        None if it diverged.

        Raises:
            CurveCorrupt: no decision can be what it would have been.
        """
        try:
            losses_nats = load_curve(self._study_dir, result).train_loss_nats
        except CurveCorrupt as error:
            raise CurveCorrupt(
                f"{error}. The search needs it to continue: without a copy, `forerun run PLAN "
                "--study ANOTHER "
                f"--fork {self._study_dir}` keeps the ended runs, and repeats this one"
            ) from error
        told = result.loss_nats
        if result.status == "pruned":
            told = told_nats(self._search.space, point, losses_nats, self._seen)
        self._seen.append(
            EarlierTrial(
                point=point,
                status=result.status,
                losses_nats=losses_nats,
                loss_nats=result.loss_nats,
            )
        )
        old = len(self._seen) - self._search.parallelism - MOST_SEEN - 1
        # no trial in flight is compared with it any more, and ten thousand curves and points take
        # room
        if old >= 0:
            self._seen[old] = dataclasses.replace(self._seen[old], losses_nats=(), point=_FORGOTTEN)
        return told

    def rungs(self, run_id: str) -> tuple[int, ...]:
        """See `sweeps.search.source.Pruner`."""
        return () if self._trials[run_id].whole else rungs(self._num_steps)

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
