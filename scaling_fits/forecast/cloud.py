"""Bootstrap refits, and the cloud of losses a new run may have under pooled laws.

Rows are resampled with fractional weights, Dirichlet(1, ..., 1) times their number (Rubin 1981, Annals of
Statistics 9:130; Xu et al. 2020, American Statistician 74:345), not by drawing whole rows: of ten runs a whole
draw keeps six or seven different ones, and a law with five or six parameters runs through those exactly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri, stdtrit

from proxies.core.notation import counted
from scaling_fits.forecast import pooling
from scaling_fits.laws import law, search
from scaling_fits.laws.law import LawFit
from scaling_fits.laws.solver import Floats, bisected
from scaling_fits.laws.table import TRUNK, RunTable

_BISECTIONS = 60
_CLOSEST = (
    64.0  # power: with 64 the pool misses 300 random tables by at most 1.1 times what the best law does, with 16, 1.9
)
_UNSETTLED = 0.05  # share of refits: the ends of a 90 % interval hardly feel fewer
_LEAST_MISS = 1e-12  # of log loss: rounding
_LEAVING = 2.0  # at 1.25 times the largest fitted N * D hindcasts have .36 of the word, at 3 times .89


def with_draws(table: RunTable, fit: LawFit, num_draws: int, seed: int) -> LawFit:
    """The fit with `num_draws` bootstrap refits. An unidentified fit has none."""
    if num_draws == 0 or not fit.identified:
        return fit
    rng = np.random.default_rng(seed)
    sizes = [min(search.BLOCK, num_draws - first) for first in range(0, num_draws, search.BLOCK)]
    found = law.refits(table, fit, (_shares(table, size, rng) * table.weight for size in sizes))
    unconverged = int((~found.converged).sum())
    warnings = fit.warnings
    if unconverged > _UNSETTLED * num_draws:
        warnings += (
            f"{fit.form}: {unconverged} of {counted(num_draws, 'bootstrap refit')} stopped before they converged",
        )
    return dataclasses.replace(fit, draws=found.theta, num_unconverged=unconverged, warnings=warnings)


def _shares(table: RunTable, num_draws: int, rng: np.random.Generator) -> Floats:
    """Dirichlet weights of the runs (M, R): those of a run whatever its place in the file.

    Runs of one trunk share its noise, so that they are not so many runs: weights of the trunks multiply theirs.
    """
    order = np.lexsort((table.loss, table.tokens, table.params))
    shares = np.empty((num_draws, table.num_runs))
    shares[:, order] = rng.dirichlet(np.ones(table.num_runs), size=num_draws)
    trunks, of_run = np.unique(table.extra.get(TRUNK, np.arange(table.num_runs)), return_inverse=True)
    if len(trunks) < table.num_runs:
        shares *= rng.dirichlet(np.ones(len(trunks)), size=num_draws)[:, of_run]
        shares /= shares.sum(axis=1, keepdims=True)
    return shares * table.num_runs


def pooled_log_loss(fits: Sequence[LawFit], weights: Sequence[float], params: Floats, tokens: Floats) -> Floats:
    """Mixture of the laws' log losses at each (N, D)."""

    def value(fit: LawFit, n: Floats, d: Floats) -> Floats:
        return law.log_loss(fit.theta[None, :], n, d)

    return np.asarray(_mixture(fits, np.array(weights)[None, :], value, params, tokens)[0])


def _mixture(
    fits: Sequence[LawFit],
    weights_SM: Floats,
    value: Callable[[LawFit, Floats, Floats], Floats],
    params: Floats,
    tokens: Floats,
) -> Floats:
    """Log losses (S, R): up to the largest fitted N * D as near as each law comes to the runs, beyond it by weight."""
    given = [fits[index] for index in np.flatnonzero(weights_SM.any(axis=0)).tolist()]
    used = [(fit, fit.anchor) for fit in given if fit.anchor]
    largest = max(anchor.log_nd for _, anchor in used)
    leaving_R = -np.expm1(_LEAVING * np.minimum(largest - np.log(params) - np.log(tokens), 0.0))
    at_runs: Floats = np.zeros((len(weights_SM), len(params)))
    # At the runs a law counts by how near it comes to them: the nearest, and such as are about as near.
    missed = np.array([max(anchor.median_miss, _LEAST_MISS) for _, anchor in used])
    near = (missed.min() / missed) ** _CLOSEST
    for (fit, _), share in zip(used, near / near.sum(), strict=True):
        if share > 0:
            at_runs += share * value(fit, params, tokens)
    if not leaving_R.any():
        return at_runs
    return (1 - leaving_R) * at_runs + leaving_R * _beyond(fits, weights_SM, value, params, tokens)


def _beyond(
    fits: Sequence[LawFit],
    weights_SM: Floats,
    value: Callable[[LawFit, Floats, Floats], Floats],
    params: Floats,
    tokens: Floats,
) -> Floats:
    """Log losses (S, R): the laws with a floor mixed at (N, D), and drawn towards the one without as their budget asks.

    The law without an irreducible loss knows how losses fall, and nothing of which shape is best: its best sizes are
    off by factors of 3 to 7 on public families. So it speaks at the tokens per parameter of the runs, and what it adds
    there is added for every shape of that budget.
    """
    used = [index for index, fit in enumerate(fits) if fit.identified and weights_SM[:, index].any()]
    floored = [index for index in used if fits[index].has_floor]
    falling = [index for index in used if not fits[index].has_floor]
    total_S1 = weights_SM[:, floored].sum(axis=1, keepdims=True)
    if not floored:
        return value(fits[falling[0]], params, tokens)
    shares_SM = np.where(total_S1 > 0, weights_SM[:, floored] / np.maximum(total_S1, 1e-12), 1 / len(floored))

    def bounded(n: Floats, d: Floats) -> Floats:
        mixed: Floats = np.zeros((len(weights_SM), len(n)))
        for share_S, index in zip(shares_SM.T, floored, strict=True):
            mixed += share_S[:, None] * value(fits[index], n, d)
        return mixed

    result, anchor = bounded(params, tokens), fits[falling[0]].anchor if falling else None
    if anchor:
        log_nd, log_ratio = np.log(params) + np.log(tokens), anchor.log_ratio
        n, d = np.exp((log_nd - log_ratio) / 2), np.exp((log_nd + log_ratio) / 2)
        result += weights_SM[:, falling[0], None] * (value(fits[falling[0]], n, d) - bounded(n, d))
    return result


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cloud:
    """What one new run may be, as draws: refits, weights, the laws' common error, the noise of a run."""

    weight_draws: Floats
    """Weights of the laws, one row per bootstrap refit (S, M)."""
    misfit_draws: Floats
    """Sd of the laws' common error in log loss at reach 1 (S,)."""
    noise_draws: Floats
    """Sd of one run's log loss (S,)."""
    drift_draws: Floats = dataclasses.field(default_factory=lambda: np.zeros(0))
    """What is subtracted from log losses at `pooling.beyond` 1 (S,); empty where there is no drift."""


def quietest(fits: Sequence[LawFit]) -> LawFit:
    """The identified fit of the least residual sd: what others leave beyond it is misfit."""
    return min(fits, key=lambda fit: math.inf if fit.residual_sd is None else fit.residual_sd)


def noise_draws(fits: Sequence[LawFit], num_draws: int, seed: int) -> Floats:
    """Draws of the noise of a run: the least residual sd of the laws, as uncertain as its degrees of freedom say."""
    least = quietest(fits)
    freedom = least.degrees_of_freedom
    squares = np.random.default_rng([seed, 2]).chisquare(freedom, size=num_draws)
    return (least.residual_sd or 0.0) * np.sqrt(freedom / squares)


def new_run_quantiles(
    fits: Sequence[LawFit], cloud: Cloud, params: Floats, tokens: Floats, ratio_R: Floats, log_best: float,
    level: float, *, beyond_R: Floats | None = None, doubt_R: Floats | float = 0.0,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Ends of the central `level` of log losses of one new run at each (N, D), `ratio_R` times beyond the fitted runs.

    `log_best` is the least log loss of those: what refits say is not believed below `pooling.floor` of it. `beyond_R`
    is how far the drift has come there (None: it is left out), `doubt_R` another sd of the laws' common error: the same
    runs tell of both, so the larger of the two counts.

    Refit s of every law saw the same resampled runs, so draw s mixes them with its weights and moves them by its
    drift; around it lie the laws' common error and the noise of a run, both normal. Each refit's distance from its
    law's fit is widened for small samples. The ends are solved for, not drawn.
    """

    def value(fit: LawFit, n: Floats, d: Floats) -> Floats:
        point_1R = law.log_loss(fit.theta[None, :], n, d)
        return point_1R + small_sample_factor(fit, level) * (law.log_loss(fit.draws, n, d) - point_1R)

    mixed_SR = _mixture(fits, cloud.weight_draws, value, params, tokens)
    reach_R = pooling.reach(ratio_R)
    if beyond_R is not None and len(cloud.drift_draws):
        mixed_SR = mixed_SR - cloud.drift_draws[:, None] * beyond_R
        reach_R = pooling.rest(reach_R, beyond_R)
    middle_SR = np.maximum(mixed_SR, pooling.floor(log_best, ratio_R))
    sd_SR = np.hypot(np.maximum(cloud.misfit_draws[:, None] * reach_R, doubt_R), cloud.noise_draws[:, None])
    tail = (1 - level) / 2
    return mixture_quantile(middle_SR, sd_SR, tail), mixture_quantile(middle_SR, sd_SR, 1 - tail)


def mixture_quantile(middle_SR: Floats, sd_SR: Floats, share: float) -> Floats:
    """Where the mean over draws of normal distribution functions reaches `share`, by bisection (R,)."""
    sd_SR = np.maximum(sd_SR, 1e-12)
    offset = 12.0 * sd_SR
    low, high = (middle_SR - offset).min(axis=0), (middle_SR + offset).max(axis=0)
    low, high = bisected(lambda at: ndtr((at - middle_SR) / sd_SR).mean(axis=0) < share, low, high, _BISECTIONS)
    return (low + high) / 2


def small_sample_factor(fit: LawFit, level: float) -> float:
    """What widens a bootstrap interval of a law with few runs per parameter; near 1 with many.

    Residuals are smaller than the noise by sqrt((n - p) / n), because the fit went after it (the correction of
    MacKinnon and White 1985, HC1); and with an estimated sd the quantiles are Student's, not the normal's.
    """
    freedom = fit.degrees_of_freedom
    upper = (1 + level) / 2
    return math.sqrt(fit.num_effective_runs / freedom) * float(stdtrit(freedom, upper) / ndtri(upper))
