"""Bootstrap refits, and the cloud of losses a new run may have under pooled laws.

Rows are resampled with fractional weights, Dirichlet(1, ..., 1) times their number (Rubin 1981, Annals of
Statistics 9:130; Xu et al. 2020, American Statistician 74:345), not by drawing whole rows: of ten runs a whole
draw keeps six or seven different ones, and a law with five or six parameters runs through those exactly.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy.special import ndtri, stdtrit

from scaling_fits import law
from scaling_fits.law import LawFit
from scaling_fits.solver import Floats
from scaling_fits.table import RunTable

_NOISE_PER_DRAW = 8  # new runs imagined per refit: smooths the quantiles at no cost in refits


def with_draws(table: RunTable, fit: LawFit, num_draws: int, seed: int) -> LawFit:
    """The fit with `num_draws` bootstrap refits. An unidentified fit has none."""
    if num_draws == 0 or not fit.identified:
        return fit
    shares = np.random.default_rng(seed).dirichlet(np.ones(table.num_runs), size=num_draws)
    found = law.refit(table, fit, shares * table.num_runs * table.weight)
    unconverged = int((~found.converged).sum())
    warnings = fit.warnings
    if unconverged > 0.01 * num_draws:
        warnings += (f"{fit.form}: {unconverged} of {num_draws} bootstrap refits stopped before they settled",)
    return dataclasses.replace(fit, draws=found.theta, num_unconverged=unconverged, warnings=warnings)


def pooled_log_loss(fits: tuple[LawFit, ...], weights: tuple[float, ...], params: Floats, tokens: Floats) -> Floats:
    """Weighted mean of the laws' log losses at each (N, D)."""
    total = np.zeros(len(params))
    for fit, weight in zip(fits, weights, strict=True):
        if weight > 0:
            total += weight * law.log_loss(fit.theta[None, :], params, tokens)[0]
    return total


def new_run_quantiles(
    fits: tuple[LawFit, ...], weights: tuple[float, ...], params: Floats, tokens: Floats, level: float, seed: int
) -> tuple[Floats, Floats]:
    """Ends of the central `level` of log losses of one new run at each (N, D).

    The cloud mixes the laws by weight. Each refit's distance from its law's fit is widened for small samples,
    and carries the noise of a run, a normal whose sd is itself uncertain by the degrees of freedom.
    """
    clouds, masses = [], []
    for index, (fit, weight) in enumerate(zip(fits, weights, strict=True)):
        if weight == 0 or len(fit.draws) == 0:
            continue
        rng = np.random.default_rng([seed, index])
        size = len(fit.draws) * _NOISE_PER_DRAW
        noise = (fit.residual_sd or 0.0) * rng.standard_t(fit.degrees_of_freedom, size=size)
        point = law.log_loss(fit.theta[None, :], params, tokens)
        distance = small_sample_factor(fit, level) * (law.log_loss(fit.draws, params, tokens) - point)
        clouds.append(point + np.repeat(distance, _NOISE_PER_DRAW, axis=0) + noise[:, None])
        masses.append(np.full(size, weight / size))
    cloud, mass = np.concatenate(clouds), np.concatenate(masses)
    tail = (1 - level) / 2
    return weighted_quantile(cloud, mass, tail), weighted_quantile(cloud, mass, 1 - tail)


def small_sample_factor(fit: LawFit, level: float) -> float:
    """What widens a bootstrap interval of a law with few runs per parameter; near 1 with many.

    Residuals are smaller than the noise by sqrt((n - p) / n), because the fit went after it (the correction of
    MacKinnon and White 1985, HC1); and with an estimated sd the quantiles are Student's, not the normal's.
    """
    freedom = fit.degrees_of_freedom
    upper = (1 + level) / 2
    return math.sqrt(fit.num_runs / freedom) * float(stdtrit(freedom, upper) / ndtri(upper))


def weighted_quantile(values: Floats, mass: Floats, share: float) -> Floats:
    """The `share` quantile of every column of `values` (draws by columns), draws weighted by `mass`."""
    order = np.argsort(values, axis=0, kind="stable")
    ranked = np.take_along_axis(values, order, axis=0)
    below = np.cumsum(mass[order], axis=0) / mass.sum()
    first = np.minimum((below < share).sum(axis=0), len(values) - 1)
    result: Floats = np.take_along_axis(ranked, first[None, :], axis=0)[0]
    return result
