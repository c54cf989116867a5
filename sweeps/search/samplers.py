"""Samplers: each suggestion is a pure function of the past trials, and its cost does not grow with
the search.

This is the only module that imports Optuna, apart from `optuna_storage`.

`SAMPLERS`, below, is the registry: plans, validation, views and the reference pages read it. To add
a sampler, write its class and its entry.

- `tpe`: multivariate tree-structured Parzen estimator (TPE; Bergstra 2011; Falkner 2018), grouped
  if an axis can be off, with a constant liar for trials in flight. It is shown all trials up to
  `MAX_TRIALS_SHOWN`. If there are more, it is shown the `NUM_BEST_TRIALS` best and the latest of
  the others, because it regards at most that many trials as good anyway.
- `gp`: a Gaussian process with log expected improvement, fitted to at most `MAX_TRIALS_FITTED`
  trials, which are chosen the same way. Its batch form integrates over the outcomes of trials in
  flight.
- `random`: uniform sampling; it uses no outcome.

A value that is off is missing for `tpe`; the other samplers get the middle of its axis and a
separate switch. Each suggestion creates Optuna's sampler anew with its own seed; only the converted
trials are kept from one suggestion to the next.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from forerun._sweeps.search.past_trials import PastTrials
from forerun._sweeps.search.space import OFF, Params, SearchSpace

if TYPE_CHECKING:
    import optuna

MAX_TRIALS_SHOWN = 300
"""Maximum number of trials that TPE is shown.

With fewer than 250, TPE would regard fewer trials as good than if it were shown all trials
(benchmarks/README.md).
"""
MAX_TRIALS_FITTED = 200
"""Maximum number of trials that a GP is fitted to. A suggestion takes 0.25 s of processor time with
200 trials, 0.6 s with 400.
"""


@contextlib.contextmanager
def silence_optuna() -> Iterator[None]:
    """Suppress Optuna's `study created` line and its warnings about experimental features."""
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
    """A sampler that is bound to the past trials of one search."""

    def ask(self) -> Params:
        """Return the next point.

        A learning sampler is asked once the past trials have seen every outcome they may see.

        Raises:
            ValueError: there is no point to suggest.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """An entry of the registry: a way to suggest points, as plans name it."""

    name: str
    begin: Callable[[PastTrials], SamplerOnPast]
    """Function that binds the sampler to the past trials of a search."""
    line: str
    """Purpose of the sampler in a few words, for help texts."""
    learns: bool = False
    """Whether it uses outcomes; such a search begins with a quasi-random design."""


class _Tpe:
    """The `tpe` sampler."""

    def __init__(self, past: PastTrials) -> None:
        self._past, self._distributions = past, _make_distributions(past.space)
        self._kept: dict[tuple[int, bool], optuna.trial.FrozenTrial] = {}

    @silence_optuna()
    def ask(self) -> Params:
        import optuna  # takes 0.2 s, and only a search needs it

        space = self._past.space
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=0,
            multivariate=True,
            group=bool(space.switches),
            constant_liar=True,
            seed=self._past.seed,
        )
        return _to_point(space, _ask_optuna(sampler, self._list_trials(), self._distributions))

    def _list_trials(self) -> list[optuna.trial.FrozenTrial]:
        """Return the trials that are shown, as Optuna's trials; an ended trial is
        converted once.
        """
        past, num_seen = self._past, len(self._past.losses)
        indices = past.choose_shown(MAX_TRIALS_SHOWN) + list(range(num_seen, past.index))
        kept, self._kept = self._kept, {}
        for index in indices:
            key = (index, index < num_seen)
            self._kept[key] = kept.get(key) or self._make_past_trial(*key)
        return list(self._kept.values())

    def _make_past_trial(self, index: int, has_ended: bool) -> optuna.trial.FrozenTrial:
        """Convert a past trial for Optuna; a trial that has not ended is running there."""
        past = self._past
        value = None
        if has_ended:
            loss = past.losses[index]
            # TPE uses only ranks, so a diverged trial may have an infinite loss
            value = math.inf if loss is None else loss
        return _make_trial(
            self._distributions,
            _to_optuna_params(past.space, past.points[index], inactive=False),
            value,
            index,
        )


class _Gp:
    """The `gp` sampler."""

    def __init__(self, past: PastTrials) -> None:
        self._past, self._distributions = past, _make_distributions(past.space, fixed=False)

    @silence_optuna()
    def ask(self) -> Params:
        import optuna

        past, axes = self._past, self._distributions
        num_seen = len(past.losses)
        losses = {
            index: past.get_penalized_loss(index) for index in past.choose_shown(MAX_TRIALS_FITTED)
        }
        trials = [
            _make_trial(
                axes, _to_optuna_params(past.space, past.points[index]), losses.get(index), index
            )
            for index in [*losses, *range(num_seen, past.index)]
        ]
        sampler = optuna.samplers.GPSampler(
            n_startup_trials=0, seed=past.seed, warn_independent_sampling=False
        )
        return _to_point(past.space, _ask_optuna(sampler, trials, axes))


class _Random:
    """The `random` sampler."""

    def __init__(self, past: PastTrials) -> None:
        self._past, self._distributions = past, _make_distributions(past.space, fixed=False)

    @silence_optuna()
    def ask(self) -> Params:
        import optuna

        sampler = optuna.samplers.RandomSampler(seed=self._past.seed)
        return _to_point(self._past.space, _ask_optuna(sampler, [], self._distributions))


SAMPLERS: dict[str, Sampler] = {
    sampler.name: sampler
    for sampler in (
        Sampler(name="tpe", begin=_Tpe, line="any space", learns=True),
        Sampler(name="gp", begin=_Gp, line="for few, expensive trials", learns=True),
        Sampler(name="random", begin=_Random, line="by chance"),
    )
}
"""All samplers, by name."""


def _make_distributions(
    space: SearchSpace, *, fixed: bool = True
) -> dict[str, optuna.distributions.BaseDistribution]:
    """Return the Optuna distribution of every axis and switch, by name.

    Args:
        space: the space.
        fixed: whether to include the axes that have only one value.
    """
    import optuna

    axes: dict[str, optuna.distributions.BaseDistribution] = {}
    for axis in space.axes:
        low, high = axis.coordinates
        if axis.choices:
            axes[axis.name] = optuna.distributions.CategoricalDistribution(axis.choices)
        elif fixed or not axis.is_fixed:
            axes[axis.name] = optuna.distributions.FloatDistribution(
                low, high, log=axis.scale != "linear"
            )
    switches = {
        _name_switch(axis.name): optuna.distributions.CategoricalDistribution((True, False))
        for axis in space.switches
    }
    return axes | switches


def _name_switch(name: str) -> str:
    """Return Optuna's name of the switch of an axis."""
    return f"{name} is on"


def _to_optuna_params(
    space: SearchSpace, point: Params, *, inactive: bool = True
) -> dict[str, Any]:
    """Convert a point to Optuna's parameters.

    A value that is off becomes the middle of its axis, or is left out if not `inactive`.
    """
    params: dict[str, Any] = {}
    for axis in space.axes:
        off = axis.can_be_off and point[axis.name] == OFF
        if axis.can_be_off:
            params[_name_switch(axis.name)] = not off
        if inactive or not off:
            value = axis.interpolate(0.5) if off else point[axis.name]
            params[axis.name] = value if axis.choices else axis.coordinate(value)
    return params


def _to_point(space: SearchSpace, params: Mapping[str, Any]) -> Params:
    """Convert Optuna's parameters to a point; a missing parameter has only one value."""
    point: Params = {}
    for axis in space.axes:
        if axis.can_be_off and not params[_name_switch(axis.name)]:
            point[axis.name] = OFF
        elif axis.choices:
            point[axis.name] = float(params[axis.name])
        else:
            point[axis.name] = axis.value(float(params.get(axis.name, axis.coordinates[0])))
    return point


def _ask_optuna(
    sampler: optuna.samplers.BaseSampler,
    trials: Sequence[optuna.trial.FrozenTrial],
    axes: Mapping[str, optuna.distributions.BaseDistribution],
) -> dict[str, Any]:
    """Return the parameters that a sampler suggests after it has seen `trials`."""
    import optuna

    study = optuna.create_study(
        sampler=sampler, direction="minimize", storage=_make_storage_class()(trials)
    )
    return study.ask(dict(axes)).params


@functools.cache
def _make_storage_class() -> Callable[
    [Sequence[optuna.trial.FrozenTrial]], optuna.storages.InMemoryStorage
]:
    """Return a storage class that shows trials as they are given.

    Optuna's own storage would copy each trial for every suggestion.
    """
    import optuna

    class TrialStorage(optuna.storages.InMemoryStorage):
        """A storage with fixed trials, in addition to the trial that is asked for."""

        def __init__(self, trials: Sequence[optuna.trial.FrozenTrial]) -> None:
            super().__init__()
            self._shown = trials

        def get_all_trials(
            self,
            study_id: int,
            deepcopy: bool = True,
            states: Container[optuna.trial.TrialState] | None = None,
        ) -> list[optuna.trial.FrozenTrial]:
            # Optuna's samplers read all trials by this method
            added = super().get_all_trials(study_id, deepcopy, states)
            shown = [trial for trial in self._shown if states is None or trial.state in states]
            return shown + added

    return TrialStorage


def _make_trial(
    axes: Mapping[str, optuna.distributions.BaseDistribution],
    params: Mapping[str, Any],
    loss: float | None,
    index: int,
) -> optuna.trial.FrozenTrial:
    """Make an Optuna trial: complete if its loss is known, else running.

    Args:
        axes: the distributions; parameters of other axes are left out.
        params: Optuna's parameters of the trial.
        loss: loss in nats; None if it is unknown.
        index: index of the trial.
    """
    import optuna

    state = optuna.trial.TrialState.RUNNING if loss is None else optuna.trial.TrialState.COMPLETE
    used_params = {name: value for name, value in params.items() if name in axes}
    distributions = {name: axes[name] for name in used_params}
    trial = optuna.trial.create_trial(
        state=state, value=loss, params=used_params, distributions=distributions
    )
    trial.number = index + 1  # Optuna sorts trials by number; number 0 is the trial to suggest
    return trial
