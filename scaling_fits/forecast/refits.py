"""The fit of one form by the method of its paper, with refits to resampled runs for intervals.

Shape suffixes: M or S refits (draws), P coordinates of a law, R runs.

Rows are resampled with fractional weights, Dirichlet(1, ..., 1) times their number (Rubin 1981,
Annals of Statistics 9:130; Xu et al. 2020, American Statistician 74:345), not by drawing whole
rows. Among ten runs, a draw of whole rows keeps six or seven different ones, and a law with five or
six parameters passes through those exactly.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from forerun._proxies.core.notation import format_counted
from forerun._scaling_fits.forecast.population import PUBLIC
from forerun._scaling_fits.forecast.posterior import LawPosterior, merge_runs
from forerun._scaling_fits.laws import law, search
from forerun._scaling_fits.laws.forms import Form
from forerun._scaling_fits.laws.law import LawFit
from forerun._scaling_fits.laws.solver import Floats
from forerun._scaling_fits.laws.table import TRUNK, RunTable

SINGLE_LAW = dataclasses.replace(PUBLIC, error_sd=0.02, error_power=0.6, error_growth=0.0)
"""Population with the error of a single law beyond its runs. `error_sd` and `error_power` were
chosen by hand for errors that Chinchilla's law, fitted by Huber loss, has in public studies: 1.6,
3.1, 3.9, and 5.6 % at 3, 10, 30, and 100 times the FLOPs (`benchmarks/statistics/forecasts.py`)."""
_MIN_EXPONENT = 1e-3
"""Smallest alpha, beta, and k of a widened draw: in every law, loss falls as runs grow."""
_MAX_UNCONVERGED = 0.05
"""Largest share of refits that may stop early without a warning. So few hardly affect the ends of a
90 % interval."""


def fit_form(
    table: RunTable, form: Form, num_draws: int, seed: int
) -> tuple[LawFit, LawPosterior | None]:
    """Fit one form to the runs. Return the fit, and a posterior whose draws are bootstrap refits;
    the posterior is None if the runs do not identify the form.
    """
    fit = law.fit_law(table, form)
    if not fit.identified:
        return fit, None
    rng = np.random.default_rng(seed)
    sizes = [min(search.BLOCK, num_draws - first) for first in range(0, num_draws, search.BLOCK)]
    refits = law.refit_law(
        table, fit, (_draw_weights(table, size, rng) * table.weight for size in sizes)
    )
    unconverged = int((~refits.converged).sum())
    warnings = fit.warnings
    if unconverged > _MAX_UNCONVERGED * num_draws:
        refits_text = format_counted(num_draws, "refit")
        warnings += (
            f"{form}: {unconverged} of the bootstrap's {refits_text} stopped before they converged",
        )
    fit = dataclasses.replace(fit, num_unconverged=unconverged, warnings=warnings)
    # Residuals are smaller than the noise by sqrt((n - p) / n), because they were minimized
    # (MacKinnon and White 1985).
    widening = math.sqrt(fit.num_effective_runs / fit.degrees_of_freedom)
    theta_SP = fit.theta + widening * (refits.theta - fit.theta)
    theta_SP[:, 3:6] = np.maximum(theta_SP[:, 3:6], _MIN_EXPONENT)  # alpha, beta, k
    squares_S = rng.chisquare(fit.degrees_of_freedom, size=num_draws)
    return fit, LawPosterior(
        population=SINGLE_LAW,
        cells=merge_runs(table),
        theta=theta_SP,
        noise_sds=(fit.residual_sd or 0.0) * np.sqrt(fit.degrees_of_freedom / squares_S),
        departures=np.zeros(num_draws),
        mode=fit.theta,
        left_out=np.zeros(0),
    )


def _draw_weights(table: RunTable, num_draws: int, rng: np.random.Generator) -> Floats:
    """Draw Dirichlet weights of the runs (M, R) that do not depend on the order of rows.

    Runs of one trunk share its noise, so they count as fewer runs: their weights are multiplied by
    a weight of the trunk.
    """
    order = np.lexsort((table.loss, table.tokens, table.params))
    shares = np.empty((num_draws, table.num_runs))
    shares[:, order] = rng.dirichlet(np.ones(table.num_runs), size=num_draws)
    trunks, of_run = np.unique(
        table.extra.get(TRUNK, np.arange(table.num_runs)), return_inverse=True
    )
    if len(trunks) < table.num_runs:
        shares *= rng.dirichlet(np.ones(len(trunks)), size=num_draws)[:, of_run]
        shares /= shares.sum(axis=1, keepdims=True)
    return shares * table.num_runs
