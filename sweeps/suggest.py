"""What to try next: a pure function of what came before. The only door to Optuna.

Suggestion k sees the outcomes of trials 0 ... k-P alone (P: trials in flight at once, from the plan) and the
points, not the outcomes, of the P-1 between. So it does not depend on which of those finished first, and a
resumed search suggests exactly what the uninterrupted one would have.

The first suggestions follow a quasi-random design (the R_d sequence, M. Roberts 2018, shifted by the seed); the
rest are Optuna's multivariate TPE (Bergstra 2011; Falkner 2018) with a constant liar for trials in flight.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from proxies import canon
from sweeps.space import LOG_NAMES, NAMES, Params, SearchSpace

if TYPE_CHECKING:
    import optuna

DEFAULT_NUM_STARTUP = 10  # TPE's own default: before it, densities are mostly prior

PENALTY_MARGIN_NATS = 1.0  # TPE reads ranks, not values: any margin puts divergence behind every finished trial


def suggest(
    space: SearchSpace,
    study_seed: int,
    index: int,
    told: Mapping[int, float | None],
    parallelism: int,
    *,
    num_startup: int = DEFAULT_NUM_STARTUP,
    earlier: Sequence[Params] = (),
) -> Params:
    """The point of trial `index` (from 0).

    Args:
        space: the ranges.
        study_seed: of the whole search.
        index: the trial, from 0.
        told: loss in nats of each trial by index, None where it diverged; trials after `index - parallelism`
            are not looked at.
        parallelism: P >= 1; trials that may be in flight at once.
        num_startup: trials of the quasi-random design.
        earlier: points 0, 1, ... already suggested, as recorded. Only a cache: what lacks is computed again.

    Raises:
        ValueError: an argument out of range, or the outcome of a trial up to `index - parallelism` is missing.
    """
    if index < 0 or parallelism < 1:
        raise ValueError(f"index = {index}, parallelism = {parallelism}: index >= 0 and parallelism >= 1 are wanted")
    points = [dict(point) for point in earlier[:index]]
    while len(points) <= index:
        points.append(_suggest(space, study_seed, points, told, parallelism, num_startup))
    return points[index]


def _suggest(
    space: SearchSpace,
    study_seed: int,
    points: Sequence[Params],
    told: Mapping[int, float | None],
    parallelism: int,
    num_startup: int,
) -> Params:
    """The point after `points`."""
    index = len(points)
    num_seen = index - parallelism + 1
    if index < num_startup or num_seen < 1:
        return space.at(_quasi_random(study_seed, index))
    missing = [i for i in range(num_seen) if i not in told]
    if missing:
        raise ValueError(f"suggestion {index} at parallelism {parallelism} needs the outcomes of trials {missing}")
    return _tpe(space, _seed(study_seed, index), points, _penalised([told[i] for i in range(num_seen)]))


def _quasi_random(study_seed: int, index: int) -> list[float]:
    """Element `index` of the R_d sequence over the axes, shifted by the seed: coordinates in [0, 1)."""
    ratio = _positive_root(len(NAMES))
    shifts = [_seed(study_seed, -1 - axis) / 2**32 for axis in range(len(NAMES))]
    return [(shift + (index + 1) * ratio ** -(axis + 1)) % 1.0 for axis, shift in enumerate(shifts)]


def _positive_root(dimension: int) -> float:
    """The root > 1 of x^(d+1) = x + 1, by the contraction x <- (1 + x)^(1/(d+1))."""
    root = 1.5
    for _ in range(64):
        root = (1 + root) ** (1 / (dimension + 1))
    return root


def _seed(study_seed: int, index: int) -> int:
    """A 32-bit seed of its own for every (study, index): a sampler re-created with one seed repeats itself."""
    return int.from_bytes(hashlib.sha256(canon.canonical([study_seed, index]).encode()).digest()[:4], "big")


def _penalised(losses: Sequence[float | None]) -> list[float]:
    """Divergence as a finite loss worse than the worst finished; told as NaN or a failure it would blind TPE."""
    finished = [loss for loss in losses if loss is not None]
    if not all(map(math.isfinite, finished)):
        raise ValueError("a told loss is not finite: tell divergence as None")
    penalty = max(finished, default=0.0) + PENALTY_MARGIN_NATS
    return [penalty if loss is None else loss for loss in losses]


def _tpe(space: SearchSpace, seed: int, points: Sequence[Params], losses: Sequence[float]) -> Params:
    """TPE's next point after `points`, of which the first `len(losses)` are done and the rest in flight."""
    import optuna  # 0.2 s, and only a search needs it

    axes: dict[str, optuna.distributions.BaseDistribution] = {}
    for name in NAMES:
        low, high = getattr(space, name)
        axes[name] = optuna.distributions.FloatDistribution(low, high, log=name in LOG_NAMES)
    with _quiet():
        sampler = optuna.samplers.TPESampler(n_startup_trials=0, multivariate=True, constant_liar=True, seed=seed)
        study = optuna.create_study(sampler=sampler, direction="minimize")
        study.add_trials([_trial(axes, points, losses, i) for i in range(len(points))])
        point = study.ask(axes).params
    return {name: float(point[name]) for name in NAMES}


def _trial(
    axes: dict[str, optuna.distributions.BaseDistribution],
    points: Sequence[Params],
    losses: Sequence[float],
    index: int,
) -> optuna.trial.FrozenTrial:
    """Trial `index` as Optuna sees it: complete if its loss is known, else running."""
    import optuna

    done = index < len(losses)
    state = optuna.trial.TrialState.COMPLETE if done else optuna.trial.TrialState.RUNNING
    value = losses[index] if done else None
    return optuna.trial.create_trial(state=state, value=value, params=points[index], distributions=axes)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No `study created` line, and no warning that multivariate TPE is experimental; as before afterwards."""
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
