"""Optuna's samplers, each made anew for one suggestion and shown the past in index order. The door to Optuna.

- `tpe`: multivariate (Bergstra 2011; Falkner 2018), by groups where an axis can be off; a constant liar for trials in
  flight.
- `gp`: a Gaussian process and log EI; trials in flight by its batch form, which integrates over their outcomes.
- `cmaes`: CMA-ES, replayed from its first generation; trials in flight are draws of a generation as any other.
- `qmc`, `random`, `grid`: a scrambled Sobol sequence, chance, a shuffled grid; they look at no outcome.

What is off is told to `tpe` as not there, to the others as the middle of its axis beside a switch.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from sweeps.design import seed_of
from sweeps.space import OFF, Params, SearchSpace

if TYPE_CHECKING:
    import optuna

Sampler = Literal["tpe", "gp", "cmaes", "qmc", "random", "grid"]
SAMPLERS: tuple[Sampler, ...] = get_args(Sampler)
LEARNING: tuple[Sampler, ...] = ("tpe", "gp", "cmaes")
"""Samplers that look at outcomes."""
PENALTY_MARGIN_NATS = 1.0
"""By which a diverged trial is worse than the worst that finished. TPE and CMA-ES read ranks, so that any will do; of a
GP, 0 and 1 did equally well.
"""
LEAST_SOURCE = 10
"""Trials that CMA-ES wants to begin from: it takes the best tenth. A shorter design is told several times over."""


@dataclass(frozen=True, slots=True)
class Past:
    """All that a suggestion follows from."""

    space: SearchSpace
    study_seed: int
    points: Sequence[Params]
    told: Mapping[int, float | None]
    parallelism: int
    num_startup: int
    num_known: int

    @property
    def index(self) -> int:
        """Of the trial that is asked for."""
        return len(self.points)

    @property
    def seed(self) -> int:
        """Of this suggestion alone."""
        return seed_of(self.study_seed, self.index)

    def num_seen(self, index: int) -> int:
        """Outcomes that suggestion `index` sees, of the first trials."""
        known = self.num_known if index >= self.num_known else 0
        return max(index - self.parallelism + 1, known, 0)

    def losses(self) -> list[float]:
        """Those outcomes, divergence as a finite loss worse than the worst finished.

        Told as NaN or a failure it would blind the sampler.
        """
        num_seen = self.num_seen(self.index)
        missing = [i for i in range(num_seen) if i not in self.told]
        if missing:
            raise ValueError(
                f"suggestion {self.index} at parallelism {self.parallelism} needs the outcomes of trials {missing}"
            )
        losses = [self.told[i] for i in range(num_seen)]
        finished = [loss for loss in losses if loss is not None]
        if not all(map(math.isfinite, finished)):
            raise ValueError("a told loss is not finite: tell divergence as None")
        penalty = max(finished, default=0.0) + PENALTY_MARGIN_NATS
        return [penalty if loss is None else loss for loss in losses]


def ask(sampler: Sampler, past: Past) -> Params:
    """The sampler's next point. Raises ValueError where a grid has none, and as `Past.losses`."""
    asked: dict[Sampler, Callable[[Past], Params]] = {
        "tpe": _tpe, "gp": _gp, "cmaes": _cmaes, "qmc": _qmc, "random": _random, "grid": _grid,
    }  # fmt: skip
    with _quiet():
        return asked[sampler](past)


def _tpe(past: Past) -> Params:
    import optuna  # 0.2 s, and only a search needs it

    space, switched = past.space, bool(past.space.switches)
    sampler = optuna.samplers.TPESampler(
        n_startup_trials=0, multivariate=True, group=switched, constant_liar=True, seed=past.seed
    )
    study = _study(sampler, past, [_told(space, point, inactive=False) for point in past.points], _axes(space))
    return _untold(space, study.ask(_axes(space)).params)


def _gp(past: Past) -> Params:
    import optuna

    space = past.space
    sampler = optuna.samplers.GPSampler(n_startup_trials=0, seed=past.seed, warn_independent_sampling=False)
    axes = _axes(space, fixed=False)
    study = _study(sampler, past, [_only(axes, _told(space, point)) for point in past.points], axes)
    return _untold(space, study.ask(axes).params)


def _cmaes(past: Past) -> Params:
    """CMA-ES has a state: every earlier suggestion is asked for again, given its recorded point, and told as then."""
    import optuna

    space, losses = past.space, past.losses()
    axes = _axes(space, fixed=False)
    told = [_only(axes, _told(space, point)) for point in past.points]
    first = next(i for i in range(past.index + 1) if i >= past.num_startup and past.num_seen(i) >= 1)
    source = [_trial(axes, told[i], losses[i]) for i in range(past.num_seen(first))]
    sampler = optuna.samplers.CmaEsSampler(
        seed=seed_of(past.study_seed, first),
        source_trials=source * math.ceil(LEAST_SOURCE / len(source)),
        # A generation smaller than what is in flight would be over before its last trials were asked for.
        popsize=max(4 + int(3 * math.log(max(len(axes), 1))), past.parallelism),
        n_startup_trials=0,
        warn_independent_sampling=False,
    )
    study = optuna.create_study(sampler=sampler, direction="minimize")
    asked: list[optuna.Trial] = []
    num_told = first
    for index in range(first, past.index + 1):
        for trial in range(num_told, past.num_seen(index)):
            study.tell(asked[trial - first], losses[trial])
        num_told = max(num_told, past.num_seen(index))
        if index < past.index:
            study.enqueue_trial(told[index])
        asked.append(study.ask(axes))
    return _untold(space, asked[-1].params)


def _qmc(past: Past) -> Params:
    """Optuna counts a Sobol sequence's elements, in the study's one attribute: no need to ask for all before this."""
    import optuna

    axes, storage = _axes(past.space, fixed=False), optuna.storages.InMemoryStorage()
    sampler = optuna.samplers.QMCSampler(scramble=True, seed=seed_of(past.study_seed, 0))
    study = optuna.create_study(sampler=sampler, direction="minimize", storage=storage)
    # Without a trial before it, the first would be drawn at random.
    study.add_trial(_trial(axes, _only(axes, _told(past.space, past.space.nearest({}))), 0.0))
    point = study.ask(axes).params
    if past.index > 0 and axes:
        study_id = storage.get_study_id_from_name(study.study_name)
        (counter,) = storage.get_study_system_attrs(study_id)
        storage.set_study_system_attr(study_id, counter, past.index - 1)
        point = study.ask(axes).params
    return _untold(past.space, point)


def _random(past: Past) -> Params:
    import optuna

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=past.seed), direction="minimize")
    return _untold(past.space, study.ask(_axes(past.space, fixed=False)).params)


def _grid(past: Past) -> Params:
    import optuna

    values = {axis.name: axis.grid() for axis in past.space.axes}
    size = math.prod(map(len, values.values()))
    if past.index >= size:
        raise ValueError(f"index = {past.index}: the grid has {size} points")
    sampler = optuna.samplers.GridSampler(values, seed=seed_of(past.study_seed, 0))
    study = optuna.create_study(sampler=sampler, direction="minimize")
    study.add_trials([optuna.trial.create_trial(value=0.0) for _ in range(past.index)])  # it goes by their number
    point = study.ask({name: optuna.distributions.CategoricalDistribution(some) for name, some in values.items()})
    return {name: float(point.params[name]) for name in values}


def _axes(space: SearchSpace, *, fixed: bool = True) -> dict[str, optuna.distributions.BaseDistribution]:
    """Every axis and switch as Optuna has it; without those of one value, if not `fixed`."""
    import optuna

    axes: dict[str, optuna.distributions.BaseDistribution] = {}
    for axis in space.axes:
        low, high = axis.coordinates
        if axis.choices:
            axes[axis.name] = optuna.distributions.CategoricalDistribution(axis.choices)
        elif fixed or not axis.fixed:
            axes[axis.name] = optuna.distributions.FloatDistribution(low, high, log=axis.scale != "linear")
    switches = {
        _switch(axis.name): optuna.distributions.CategoricalDistribution((True, False)) for axis in space.switches
    }
    return axes | switches


def _switch(name: str) -> str:
    return f"{name} is on"


def _told(space: SearchSpace, point: Params, *, inactive: bool = True) -> dict[str, Any]:
    """A point as Optuna has it; a value that is off at the middle of its axis, or, if not `inactive`, not at all."""
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


def _only(axes: Mapping[str, object], told: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in told.items() if name in axes}


def _study(
    sampler: optuna.samplers.BaseSampler,
    past: Past,
    told: Sequence[Mapping[str, Any]],
    axes: Mapping[str, optuna.distributions.BaseDistribution],
) -> optuna.Study:
    """A study that has seen the past: trials whose outcome is known are complete, the others running."""
    import optuna

    losses: list[float | None] = [*past.losses()]
    losses += [None] * (past.index - len(losses))
    study = optuna.create_study(sampler=sampler, direction="minimize")
    study.add_trials([_trial(axes, point, loss) for point, loss in zip(told, losses, strict=True)])
    return study


def _trial(
    axes: Mapping[str, optuna.distributions.BaseDistribution], told: Mapping[str, Any], loss: float | None
) -> optuna.trial.FrozenTrial:
    """A trial as Optuna sees it: complete if its loss is known, else running."""
    import optuna

    state = optuna.trial.TrialState.RUNNING if loss is None else optuna.trial.TrialState.COMPLETE
    return optuna.trial.create_trial(
        state=state, value=loss, params=dict(told), distributions={name: axes[name] for name in told}
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No `study created` line, and no warning that what we use is experimental; as before afterwards."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
