"""How much each law counts, and how wrong all of them may be: learned from held-out budgets, with a prior.

Laws disagree where it matters. One with an irreducible loss flattens too early on most public families, one without
falls too fast: the truth lies between them, and held-out budgets say where. The pooled prediction is

    log L = sum over laws of v_m * log L_m + misfit,   misfit ~ Normal(0, (kappa * reach)^2),

with weights v on the simplex and reach growing with the extrapolation, log(1.25 * ratio)^0.75. Each hindcast gives
an error e_m of every law at its own reach, and the smooth residuals on the fitted runs give s(v)^2, the mean square
by which the mixture misses what it was fitted to. With a scaled inverse chi-square prior on kappa^2 it drops out:

    p(v | errors) ~ Dirichlet(v) * S(v)^-(nu / 2),
    S(v) = 2 * 0.001^2 + 4 * s(v)^2 + 3/4 * sum over cuts of ((e . v) / reach)^2,   nu = 2 + 4 + 3/4 * num_cuts.

Where a law is the truth, S is small for it alone, and it takes all the weight. The Dirichlet's masses and the numbers
above are the one choice here that was made by looking at public families; `benchmarks/backtests.py` reports all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scaling_fits.lack_of_fit import Structure
from scaling_fits.solver import Floats

PRIOR_MASS = {"chinchilla": 4.0, "coupled": 5.0, "power": 2.5}
_PRIOR_FREEDOM, _PRIOR_MISFIT = 2.0, 0.001
_INNER_FREEDOM = 4.0
_SHARE_OF_CUT = 0.75  # cuts share runs, so one does not count whole
_GRID_STEPS = 20
_REACH_POWER = 0.75
_NEXT_RUNG = 1.25  # even without extrapolating, a new run is one step away
_STEEPEST = 0.3  # no loss on record falls faster than the 0.3rd power of what is spent more, alone on tokens or in all


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pool:
    """What hindcasts say of the laws."""

    weights: tuple[float, ...]
    """Mean weight of each law; they add up to 1."""
    weight_draws: Floats
    """Draws of the weights (S, M)."""
    misfit_draws: Floats
    """Draws of kappa (S,): sd of the laws' common error in log loss at reach 1."""


def reach(ratio: Floats) -> Floats:
    """How far an extrapolation by the factor `ratio` is, on the scale of the misfit; a ratio below 1 counts as 1."""
    result: Floats = np.log(_NEXT_RUNG * np.maximum(ratio, 1.0)) ** _REACH_POWER
    return result


def floor(log_best: float, ratio: Floats) -> Floats:
    """The least log loss to be believed of a run `ratio` times beyond runs of which the best has `log_best`.

    Refits of runs that hardly tell the exponents extrapolate to losses of nothing; those are no news of the target.
    """
    result: Floats = log_best - _STEEPEST * np.log(_NEXT_RUNG * np.maximum(ratio, 1.0))
    return result


def learn(
    forms: Sequence[str], errors_CM: Floats, ratio_C: Floats, structure: Structure, *, num_draws: int, seed: int
) -> Pool:
    """Weights and misfit from the laws' log errors at each cut, how far each cut reaches, and smooth residuals."""
    grid_GM = _simplex(len(forms))
    mass_M = np.array([PRIOR_MASS.get(form, 1.0) for form in forms])
    inner_GM = (grid_GM * _GRID_STEPS + 0.3) / (_GRID_STEPS + 0.3 * len(forms))  # off the edges, where logs end
    scaled_CM = errors_CM / reach(ratio_C)[:, None]
    squares_G = (
        _PRIOR_FREEDOM * _PRIOR_MISFIT**2
        + _INNER_FREEDOM * structure.misfit_variance(grid_GM)
        + _SHARE_OF_CUT * ((grid_GM @ scaled_CM.T) ** 2).sum(axis=1)
    )
    freedom = _PRIOR_FREEDOM + _INNER_FREEDOM + _SHARE_OF_CUT * len(ratio_C)
    log_posterior_G = ((mass_M - 1) * np.log(inner_GM)).sum(axis=1) - freedom / 2 * np.log(squares_G)
    posterior_G = np.exp(log_posterior_G - log_posterior_G.max())
    posterior_G /= posterior_G.sum()
    rng = np.random.default_rng([seed, 1])
    chosen_S = rng.choice(len(grid_GM), size=num_draws, p=posterior_G)
    return Pool(
        weights=tuple((posterior_G @ grid_GM).tolist()),
        weight_draws=grid_GM[chosen_S],
        misfit_draws=np.sqrt(squares_G[chosen_S] / rng.chisquare(freedom, size=num_draws)),
    )


def _simplex(count: int) -> Floats:
    """All ways to share 1 among `count` laws in twentieths (G, M)."""
    steps = range(_GRID_STEPS + 1)
    heads = [head for head in itertools.product(steps, repeat=count - 1) if sum(head) <= _GRID_STEPS]
    return np.array([[*head, _GRID_STEPS - sum(head)] for head in heads]) / _GRID_STEPS
