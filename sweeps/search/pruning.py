"""Whether a run is worth going on with, from its losses so far: a pure function of trials that ended before it began.

The rules: `curve`, our own, foretells where the run will end (`sweeps.search.forecasts`); `asha`, `hyperband` and
`median` are Optuna's, and compare losses at one step (`sweeps.search.pruners`). docs/pruning.md says what each costs in
regret.

Trials are looked at as they were when the run in question was suggested, in index order and whatever came to an end
since: so a search that is resumed gives up the same runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from proxies.core.spec import Status
from sweeps.search.pruners import Named, Report, halving_rungs, prunes
from sweeps.search.space import OFF, Params, SearchSpace

if TYPE_CHECKING:
    from sweeps.search.forecasts import Forecast

PrunerName = Literal["none", "curve", "asha", "hyperband", "median"]
PRUNERS: tuple[PrunerName, ...] = get_args(PrunerName)

CURVE_SHARES = (0.125, 0.25, 0.5)
"""Of the steps, where `curve` looks."""
MEDIAN_SHARES = (0.25, 0.5, 0.75)
"""Of the steps, where `median` looks."""
WINDOW_SHARE = 0.1
"""Of the steps so far: the last losses are averaged over so many."""
LEAST_CHANCE = 0.01
"""A run that ends near the best or below it with less than this chance is given up."""
MARGIN_NATS = 0.005
"""How near: another seed may turn such a pair round, so that repeats want both. It costs one step saved in fifty."""
LEVEL = 0.9
"""Of the intervals that are said."""
MOST_SEEN = 256
"""Trials that a rule looks at, the latest; the best is that of all. So a verdict costs the same at any length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A trial that had ended before the one in question was suggested."""

    point: Params
    status: Status
    losses_nats: tuple[float, ...]
    """Training loss of each step's batch, finite, to where the run ended; of a pruned one, to its rung."""
    loss_nats: float | None
    """Validation loss at the end; of a finished one alone."""


def rungs(name: PrunerName, num_steps: int) -> tuple[int, ...]:
    """Steps, ascending and before the last, at which a run of `num_steps` is looked at; none for "none"."""
    if name in ("asha", "hyperband"):
        return halving_rungs(num_steps)
    shares = {"none": (), "curve": CURVE_SHARES, "median": MEDIAN_SHARES}[name]
    return tuple(sorted({step for share in shares if (step := int(num_steps * share)) >= 1}))


def verdict(
    name: PrunerName,
    *,
    space: SearchSpace,
    study_seed: int,
    index: int,
    point: Params,
    num_steps: int,
    losses_nats: Sequence[float],
    seen: Sequence[Seen],
    num_startup: int,
) -> str:
    """Empty if the run goes on; else why not, in a sentence.

    Args:
        name: the rule.
        space: the axes, as they are now.
        study_seed: of the search.
        index: of the trial in question.
        point: its hyperparameters.
        num_steps: of a whole run.
        losses_nats: its training losses, [step]; as many as one of `rungs`.
        seen: trials 0 ... index-P, by index.
        num_startup: finished trials without which nothing is given up.
    """
    step = len(losses_nats)
    if name == "none" or step not in rungs(name, num_steps):
        return ""
    finished = [one.loss_nats for one in seen if one.loss_nats is not None]
    if len(finished) < max(num_startup, 1):
        return ""
    if name == "curve":
        return _unlikely(space, point, num_steps, losses_nats, seen, min(finished))
    return _outranked(name, study_seed, index, num_steps, losses_nats, seen)


def told_nats(
    name: PrunerName,
    *,
    space: SearchSpace,
    point: Params,
    num_steps: int,
    losses_nats: Sequence[float],
    seen: Sequence[Seen],
) -> float:
    """What a sampler is told, in nats, of a trial that was given up after `losses_nats`."""
    finished = [one.loss_nats for one in seen if one.loss_nats is not None]
    found = _foretold(space, point, losses_nats, seen)
    if found is None:
        return smoothed(losses_nats, len(losses_nats))
    return max(found.loss_nats, min(finished))


def smoothed(losses_nats: Sequence[float], step: int) -> float:
    """Training loss at a step, in nats: the mean over the last tenth of the steps so far."""
    window = losses_nats[step - max(1, round(WINDOW_SHARE * step)) : step]
    return sum(window) / len(window)


def _unlikely(
    space: SearchSpace, point: Params, num_steps: int, losses_nats: Sequence[float], seen: Sequence[Seen], best: float
) -> str:
    """Why a run will not be the best; empty if it may."""
    found = _foretold(space, point, losses_nats, seen)
    if found is None or (chance := found.chance_below(best + MARGIN_NATS)) >= LEAST_CHANCE:
        return ""
    low, high = found.interval(LEVEL)
    return (
        f"curve: at step {len(losses_nats)} of {num_steps} it is expected to end at {found.loss_nats:.4g} nats "
        f"({LEVEL:.0%} interval {low:.4g} to {high:.4g}), the best so far at {best:.4g}: the chance to come within "
        f"{MARGIN_NATS:g} of that is {chance:.2g}, under {LEAST_CHANCE:g}"
    )


def _foretold(space: SearchSpace, point: Params, losses_nats: Sequence[float], seen: Sequence[Seen]) -> Forecast | None:
    """Where the run will end, by the finished among `seen`."""
    from sweeps.search.forecasts import forecast  # numpy, and only a search that prunes needs it

    step = len(losses_nats)
    known: list[list[float]] = []
    final_nats: list[float] = []
    for _, one in _come_as_far(seen, step):
        if one.loss_nats is not None:
            known.append([*_coordinates(space, one.point), smoothed(one.losses_nats, step)])
            final_nats.append(one.loss_nats)
    return forecast(known, final_nats, [*_coordinates(space, point), smoothed(losses_nats, step)])


def _coordinates(space: SearchSpace, point: Params) -> list[float]:
    """A point as it is searched: octaves or shares; what is off, at the middle of its axis beside a switch."""
    values = [axis.at(0.5) if axis.can_be_off and point[axis.name] == OFF else point[axis.name] for axis in space.axes]
    return [
        value if axis.scale == "linear" else axis.octaves(value) for axis, value in zip(space.axes, values, strict=True)
    ] + [float(point[axis.name] == OFF) for axis in space.switches]


def _outranked(
    name: Named, study_seed: int, index: int, num_steps: int, losses_nats: Sequence[float], seen: Sequence[Seen]
) -> str:
    """Why one of Optuna's pruners gives a run up; empty if it does not."""
    step = len(losses_nats)
    asked = [rung for rung in rungs(name, num_steps) if rung <= step]
    others = [
        Report(number=number, values_nats={step: smoothed(one.losses_nats, step)}, loss_nats=one.loss_nats)
        for number, one in _come_as_far(seen, step)
    ]
    values_nats = {rung: smoothed(losses_nats, rung) for rung in asked}
    trial = Report(number=index, values_nats=values_nats, loss_nats=None)
    if not prunes(name, study_seed=study_seed, num_steps=num_steps, trial=trial, others=others):
        return ""
    lower = sum(other.values_nats[step] < values_nats[step] for other in others)
    return (
        f"{name}: at step {step} of {num_steps} its training loss is {values_nats[step]:.4g} nats; of {len(others)} "
        f"trials that came as far, {lower} were lower there"
    )


def _come_as_far(seen: Sequence[Seen], step: int) -> list[tuple[int, Seen]]:
    """Index and trial of the latest that were trained for `step` steps."""
    first = max(0, len(seen) - MOST_SEEN)
    return [(first + i, one) for i, one in enumerate(seen[first:]) if len(one.losses_nats) >= step]
