"""How much each law counts, and how wrong all of them may be: learned from held-out budgets, with a prior.

Laws disagree where it matters. One with an irreducible loss flattens too early on most public families, one without
falls too fast: the truth lies between them, and held-out budgets say where. The pooled prediction is

    log L = sum over laws of v_m * log L_m - drift * beyond + misfit,

    drift ~ Normal(0, kappa^2 / 8),   misfit ~ Normal(0, kappa^2 * rest^2),   rest^2 = reach^2 - beyond^2 / 8,

with weights v on the simplex, reach growing with the extrapolation, log(1.25 * ratio)^0.75, and beyond growing as
log(ratio)^0.75 in FLOPs, from 0 at the largest fitted run. So an eighth of the error's variance goes one way however
far one looks, which is what is shrunk towards none. Each hindcast gives an error e_m of every law, predicted less
measured, at its own reach, and the smooth residuals on the fitted runs give s(v)^2, the mean square by which the
mixture misses what it was fitted to. With x = (e . v) / rest and h = beyond / rest of each cut, and a scaled inverse
chi-square prior on kappa^2, both drop out:

    p(v | errors) ~ Dirichlet(v) * S(v)^-(nu / 2),   nu = 2 + 4 + 3/4 * num_cuts,
    S(v) = 2 * 0.001^2 + 4 * s(v)^2 + 3/4 * sum of x^2 - n * max(d(v), 0)^2,
    n = 8 + 3/4 * sum of h^2,   d(v) = 3/4 * sum of h x / n,   drift | v, kappa ~ Normal(d(v), kappa^2 / n).

A drift above 0 (larger runs do better than those below them say) is subtracted. One below 0 is not added: larger runs
that do worse may have been trained worse (a batch too small, a rate too high), and the run to come need not be. It
stays in the misfit, which it widens both ways. Adding it too made public forecasts no better.

Where a law is the truth, S is small for it alone, and it takes all the weight. The Dirichlet's masses (`laws.forms`)
and the numbers above are the one choice here that was made by looking at public families; `benchmarks/backtests.py`
reports all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scaling_fits.laws.forms import SHAPES
from scaling_fits.laws.lack_of_fit import Structure
from scaling_fits.laws.solver import Floats

_PRIOR_FREEDOM, _PRIOR_MISFIT = 2.0, 0.001
_INNER_FREEDOM = 4.0
_SHARE_OF_CUT = 0.75  # cuts share runs, so one does not count whole
_GRID_STEPS = 20
_REACH_POWER = 0.75
_PRIOR_DRIFT = 8.0  # the misfit's variance at reach 1 over the drift's; 4 and 16 do as well on public families
_NEXT_RUNG = 1.25  # even without extrapolating, a new run is one step away
_STEEPEST = 0.3  # no loss on record falls faster than the 0.3rd power of what is spent more, alone on tokens or in all


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """An error that goes one way: by how much predictions are too high (below 0: too low) in log loss at `beyond` 1."""

    mean: float
    sd: float
    applied: float
    """What is subtracted from predictions: the mean, as far as it is above 0."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pool:
    """What hindcasts say of the laws."""

    weights: tuple[float, ...]
    """Mean weight of each law; they add up to 1."""
    weight_draws: Floats
    """Draws of the weights (S, M)."""
    misfit_draws: Floats
    """Draws of kappa (S,): sd of the laws' common error in log loss at reach 1."""
    drift: Drift
    """The part of that error that goes one way."""
    drift_draws: Floats
    """Draws of what is subtracted for it (S,)."""


def reach(ratio: Floats) -> Floats:
    """How far an extrapolation by the factor `ratio` is, on the scale of the misfit; a ratio below 1 counts as 1."""
    return np.log(_NEXT_RUNG * np.maximum(ratio, 1.0)) ** _REACH_POWER


def beyond(ratio: Floats) -> Floats:
    """How far a drift has come at `ratio` times the largest fitted FLOPs: nowhere up to there."""
    return np.log(np.maximum(ratio, 1.0)) ** _REACH_POWER


def rest(reach_R: Floats, beyond_R: Floats) -> Floats:
    """The reach of the error that goes no way in particular; with the drift's own sd it makes up the whole reach."""
    return np.sqrt(reach_R**2 - beyond_R**2 / _PRIOR_DRIFT)


def floor(log_best: float, ratio: Floats) -> Floats:
    """The least log loss to be believed of a run `ratio` times beyond runs of which the best has `log_best`.

    Refits of runs that hardly tell the exponents extrapolate to losses of nothing; those are no news of the target.
    """
    return log_best - _STEEPEST * np.log(_NEXT_RUNG * np.maximum(ratio, 1.0))


def learn(
    forms: Sequence[str], errors_CM: Floats, ratio_C: Floats, structure: Structure, *, num_draws: int, seed: int
) -> Pool:
    """Weights and misfit from the laws' log errors at each cut, how far each cut reaches, and smooth residuals."""
    grid_GM = _simplex(len(forms))
    mass_M = np.array([SHAPES[form].prior_mass or 1.0 for form in forms])
    inner_GM = (grid_GM * _GRID_STEPS + 0.3) / (_GRID_STEPS + 0.3 * len(forms))  # off the edges, where logs end
    beyond_C = beyond(ratio_C)
    rest_C = rest(reach(ratio_C), beyond_C)
    missed_GC = grid_GM @ (errors_CM / rest_C[:, None]).T
    known = _PRIOR_DRIFT + _SHARE_OF_CUT * float(((beyond_C / rest_C) ** 2).sum())
    drift_G = _SHARE_OF_CUT * (missed_GC @ (beyond_C / rest_C)) / known
    squares_G = (
        _PRIOR_FREEDOM * _PRIOR_MISFIT**2
        + _INNER_FREEDOM * structure.misfit_variance(grid_GM)
        + _SHARE_OF_CUT * (missed_GC**2).sum(axis=1)
        - known * np.maximum(drift_G, 0.0) ** 2
    )
    freedom = _PRIOR_FREEDOM + _INNER_FREEDOM + _SHARE_OF_CUT * len(ratio_C)
    log_posterior_G = ((mass_M - 1) * np.log(inner_GM)).sum(axis=1) - freedom / 2 * np.log(squares_G)
    posterior_G = np.exp(log_posterior_G - log_posterior_G.max())
    posterior_G /= posterior_G.sum()
    rng = np.random.default_rng([seed, 1])
    chosen_S = rng.choice(len(grid_GM), size=num_draws, p=posterior_G)
    misfit_S = np.sqrt(squares_G[chosen_S] / rng.chisquare(freedom, size=num_draws))
    variance_G = squares_G / max(freedom - 2.0, 1.0) / known  # of Student's law
    mean = float(posterior_G @ drift_G)
    return Pool(
        weights=tuple((posterior_G @ grid_GM).tolist()),
        weight_draws=grid_GM[chosen_S],
        misfit_draws=misfit_S,
        drift=Drift(
            mean=mean,
            sd=math.sqrt(float(posterior_G @ (variance_G + (drift_G - mean) ** 2))),
            applied=float(posterior_G @ np.maximum(drift_G, 0.0)),
        ),
        drift_draws=np.maximum(drift_G[chosen_S], 0.0) + misfit_S / math.sqrt(known) * rng.standard_normal(num_draws),
    )


def _simplex(count: int) -> Floats:
    """All ways to share 1 among `count` laws in twentieths (G, M)."""
    steps = range(_GRID_STEPS + 1)
    heads = [head for head in itertools.product(steps, repeat=count - 1) if sum(head) <= _GRID_STEPS]
    return np.array([[*head, _GRID_STEPS - sum(head)] for head in heads]) / _GRID_STEPS
