"""Samplers, each suggestion a pure function of the past, at a cost that stays as the search grows.

The only module that imports Optuna.

`SAMPLERS`, below, is the registry: plans, validation, views and the reference pages read it. To add
a sampler is to write its class, and its entry.

- `tpe`: multivariate (Bergstra 2011; Falkner 2018), by groups where an axis can be off; a constant
  liar for trials in flight. It is shown all trials up to `MOST_SHOWN`, then the `NUM_BEST` best and
  the latest of the others: no more than `NUM_BEST` are good ones to it anyway.
- `gp`: a Gaussian process and log EI, on `MOST_FITTED` trials chosen likewise; trials in flight by
  its batch form, which integrates over their outcomes.
- `random`: chance; it looks at no outcome.

What is off is told to `tpe` as not there, to the others as the middle of its axis beside a switch.
Optuna's samplers are made anew with a seed of each suggestion's own; what is kept from one to the
next is only what they are shown.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sweeps.search.past_trials import PastTrials
from sweeps.search.space import OFF, Params, SearchSpace

if TYPE_CHECKING:
    import optuna

MOST_SHOWN = 300
"""Trials that TPE is shown. Not below 250, where it would have fewer good ones than of all.
benchmarks/NOTES.md."""
MOST_FITTED = 200
"""Trials that a GP is fitted to: a suggestion takes 0.25 s of processor time with these, 0.6 s with
400."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No `study created` line, and no warning that what we use is experimental; as before
    afterwards.
    """
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)


class SamplerOnPast(Protocol):
    """A sampler on one search's past."""

    def ask(self) -> Params:
        """The next point; a learning sampler's once `past` has seen what it may. Raises ValueError
        if there is none.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """A way to suggest points, as plans name it."""

    name: str
    begin: Callable[[PastTrials], SamplerOnPast]
    line: str
    """When to use it, in a few words."""
    learns: bool = False
    """Whether it looks at outcomes: such a search begins with a quasi-random design."""


class _Tpe:
    def __init__(self, past: PastTrials) -> None:
        self._past, self._axes = past, _axes(past.space)
        self._kept: dict[tuple[int, bool], optuna.trial.FrozenTrial] = {}

    @quiet()
    def ask(self) -> Params:
        import optuna  # 0.2 s, and only a search needs it

        space = self._past.space
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=0,
            multivariate=True,
            group=bool(space.switches),
            constant_liar=True,
            seed=self._past.seed,
        )
        return _untold(space, _asked(sampler, self._trials(), self._axes))

    def _trials(self) -> list[optuna.trial.FrozenTrial]:
        """What is shown, as Optuna sees it, each made once: an ended trial stays as it is."""
        past, num_seen = self._past, len(self._past.losses)
        wanted = past.shown(MOST_SHOWN) + list(range(num_seen, past.index))
        kept, self._kept = self._kept, {}
        for index in wanted:
            key = (index, index < num_seen)
            self._kept[key] = kept.get(key) or self._made(*key)
        return list(self._kept.values())

    def _made(self, index: int, ended: bool) -> optuna.trial.FrozenTrial:
        past = self._past
        loss = past.losses[index] if ended else None
        value = (math.inf if loss is None else loss) if ended else None  # it reads ranks alone
        return _trial(
            self._axes, _told(past.space, past.points[index], inactive=False), value, index
        )


class _Gp:
    def __init__(self, past: PastTrials) -> None:
        self._past, self._axes = past, _axes(past.space, fixed=False)

    @quiet()
    def ask(self) -> Params:
        import optuna

        past, axes = self._past, self._axes
        num_seen = len(past.losses)
        told = {index: past.penalised(index) for index in past.shown(MOST_FITTED)}
        trials = [
            _trial(axes, _told(past.space, past.points[index]), told.get(index), index)
            for index in [*told, *range(num_seen, past.index)]
        ]
        sampler = optuna.samplers.GPSampler(
            n_startup_trials=0, seed=past.seed, warn_independent_sampling=False
        )
        return _untold(past.space, _asked(sampler, trials, axes))


class _Random:
    def __init__(self, past: PastTrials) -> None:
        self._past, self._axes = past, _axes(past.space, fixed=False)

    @quiet()
    def ask(self) -> Params:
        import optuna

        sampler = optuna.samplers.RandomSampler(seed=self._past.seed)
        return _untold(self._past.space, _asked(sampler, [], self._axes))


SAMPLERS: dict[str, Sampler] = {
    sampler.name: sampler
    for sampler in (
        Sampler(name="tpe", begin=_Tpe, line="any space", learns=True),
        Sampler(name="gp", begin=_Gp, line="for few, expensive trials", learns=True),
        Sampler(name="random", begin=_Random, line="by chance"),
    )
}
"""Every sampler there is, by name."""


def _axes(
    space: SearchSpace, *, fixed: bool = True
) -> dict[str, optuna.distributions.BaseDistribution]:
    """Every axis and switch as Optuna has it; without those of one value, if not `fixed`."""
    import optuna

    axes: dict[str, optuna.distributions.BaseDistribution] = {}
    for axis in space.axes:
        low, high = axis.coordinates
        if axis.choices:
            axes[axis.name] = optuna.distributions.CategoricalDistribution(axis.choices)
        elif fixed or not axis.fixed:
            axes[axis.name] = optuna.distributions.FloatDistribution(
                low, high, log=axis.scale != "linear"
            )
    switches = {
        _switch(axis.name): optuna.distributions.CategoricalDistribution((True, False))
        for axis in space.switches
    }
    return axes | switches


def _switch(name: str) -> str:
    return f"{name} is on"


def _told(space: SearchSpace, point: Params, *, inactive: bool = True) -> dict[str, Any]:
    """A point as Optuna has it; a value that is off at the middle of its axis, or, if not
    `inactive`, not at all.
    """
    told: dict[str, Any] = {}
    for axis in space.axes:
        off = axis.can_be_off and point[axis.name] == OFF
        if axis.can_be_off:
            told[_switch(axis.name)] = not off
        if inactive or not off:
            value = axis.at(0.5) if off else point[axis.name]
            told[axis.name] = value if axis.choices else axis.coordinate(value)
    return told


def _untold(space: SearchSpace, told: Mapping[str, Any]) -> Params:
    """The inverse; what is not told has one value."""
    return {
        axis.name: OFF
        if axis.can_be_off and not told[_switch(axis.name)]
        else float(told[axis.name])
        if axis.choices
        else axis.value(float(told.get(axis.name, axis.coordinates[0])))
        for axis in space.axes
    }


def _asked(
    sampler: optuna.samplers.BaseSampler,
    trials: Sequence[optuna.trial.FrozenTrial],
    axes: Mapping[str, optuna.distributions.BaseDistribution],
) -> dict[str, Any]:
    """What a sampler suggests that has seen these trials."""
    import optuna

    study = optuna.create_study(sampler=sampler, direction="minimize", storage=_showing()(trials))
    return study.ask(dict(axes)).params


@functools.cache
def _showing() -> Callable[[Sequence[optuna.trial.FrozenTrial]], optuna.storages.InMemoryStorage]:
    """A storage that shows trials as they are given: one's own would copy each, for every
    suggestion.
    """
    import optuna

    class Showing(optuna.storages.InMemoryStorage):
        def __init__(self, shown: Sequence[optuna.trial.FrozenTrial]) -> None:
            super().__init__()
            self._shown = shown

        def get_all_trials(
            self,
            study_id: int,
            deepcopy: bool = True,
            states: Container[optuna.trial.TrialState] | None = None,
        ) -> list[optuna.trial.FrozenTrial]:
            own = super().get_all_trials(study_id, deepcopy, states)
            return [trial for trial in self._shown if states is None or trial.state in states] + own

    return Showing


def _trial(
    axes: Mapping[str, optuna.distributions.BaseDistribution],
    told: Mapping[str, Any],
    loss: float | None,
    index: int,
) -> optuna.trial.FrozenTrial:
    """A trial as Optuna sees it, without what is told of other axes: complete if its loss is known,
    else running.
    """
    import optuna

    state = optuna.trial.TrialState.RUNNING if loss is None else optuna.trial.TrialState.COMPLETE
    params = {name: value for name, value in told.items() if name in axes}
    distributions = {name: axes[name] for name in params}
    trial = optuna.trial.create_trial(
        state=state, value=loss, params=params, distributions=distributions
    )
    trial.number = index + 1  # it is sorted by it; 0 is the one that is asked for
    return trial
