"""Noise of a run about its loss basin, and the runs of one size as the fit of a basin needs them.

A basin is the loss as a function of the log learning rate at one size. Values of another
hyperparameter are called rates here too. The runs of one size are reduced to the sufficient
statistics of a fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import special

from forerun._transfer.basin.shapes import Floats, Ints

MIN_NOISE_NATS = 1e-6
"""Smallest noise in nats that is assumed, since losses in tables are rounded."""
USUAL_NOISE_SHARE, NOISE_EFOLDS = 0.0023, 1.2
"""Prior median of the noise as a share of the loss, and standard deviation of its log. Seeds of
small models trained on bytes differ by 0.0018 to 0.011 of the loss. At vocabularies of 256 to
16,384, the share differs by a fifth at most (benchmarks/statistics/vocabularies.py). The prior
matters if there are hardly more runs than parameters to fit."""
FEW_DEGREES = 8
"""Number of degrees of freedom below which the noise grid covers everything that the prior
allows."""
MISFIT_SHARE = 0.5
"""Prior probability that no shape fits, so that the variance about the basin exceeds the variance
between seeds."""
MISFIT_EFOLDS = 1.0
"""Mean excess of the variance about the basin over that between seeds if no shape fits, in
e-folds."""
TAIL_PROBABILITY = 0.002
"""Probability that the noise variance lies outside the grid, by chi-squared quantiles."""
NUM_VARIANCES = 16
"""Number of variances in the noise grid."""

GROWTHS_NATS = (math.inf, 0.3, 0.1)
"""Heights above the minimum at which the noise variance may have doubled, in nats: the candidates
of `choose_noise_growth`. Infinite means the same noise everywhere."""
GROWTH_LOG_ODDS = 2.0
"""Prior log odds that the noise is the same everywhere."""


class SizeRuns(NamedTuple):
    """Finite runs of one size near its best rate, as columns of the same length n."""

    log2_value: Floats
    loss_nats: Floats
    group: Ints
    """Index of each run's intercept, 0 ... G-1."""


class ReducedRuns(NamedTuple):
    """Runs as quadratic forms over their R rates with intercepts removed: the sufficient statistics
    of a fit.
    """

    rates: Floats
    """(R,) log2 of the different values of the hyperparameter, in ascending order."""
    information: Floats
    """(R, R) information matrix of the rates' effects."""
    score: Floats
    """(R,) score of the rates' effects."""
    squares: float
    """Sum of squares of the losses that the rates can explain."""
    pure_squares: float
    """Sum of squares that the rates cannot explain: differences between seeds of one rate."""
    num_pure: int
    """Degrees of freedom of `pure_squares`."""
    excess_nats: Floats
    """(R,) mean loss above that of the best rate."""
    log_trust: float
    """Change of the log likelihood by `reduce_trust`: half the log determinant of the rates'
    information, relative to full trust."""
    level: float
    """Mean loss over intercepts, and over rates weighted by `balance`, in nats."""
    balance: Floats
    """Weight of each rate in `level` (R,); the sum is 1."""

    @property
    def num_free(self) -> int:
        """Degrees of freedom of the lack of fit: the number of rates minus 3 for intercept,
        curvature, and minimum.
        """
        return len(self.rates) - 3


def choose_noise_growth(sizes: Sequence[SizeRuns]) -> float:
    """Return the height above the best rate, in nats, at which the noise variance has doubled: the
    candidate under which the differences between seeds are most likely.

    Near divergence, losses of seeds differ by ten times as much as at the minimum. With equal
    weights, one rate near divergence would inflate the noise of all rates.
    """
    return max(GROWTHS_NATS, key=lambda growth: _compute_log_likelihood(sizes, growth))


def _compute_log_likelihood(sizes: Sequence[SizeRuns], growth_nats: float) -> float:
    """Compute the restricted log likelihood of differences between seeds, with one noise at the
    minima of all sizes.
    """
    squares, number, log_scale = MIN_NOISE_NATS**2, 0, 0.0
    for runs in sizes:
        rates, rate = np.unique(runs.log2_value, return_inverse=True)
        root = np.sqrt(_compute_weights(runs, rate, growth_nats))
        groups = np.equal.outer(runs.group, np.arange(int(runs.group.max()) + 1))
        design = np.hstack([groups, np.equal.outer(rate, np.arange(1, len(rates)))]) * root[:, None]
        y = runs.loss_nats * root
        effects, _, rank, singular = np.linalg.lstsq(design, y, rcond=None)
        squares += float(((y - design @ effects) ** 2).sum())
        number += len(y) - int(rank)
        log_scale += float(np.log(root).sum() - np.log(singular[:rank]).sum())
    penalty = GROWTH_LOG_ODDS if np.isfinite(growth_nats) else 0.0
    return log_scale - 0.5 * number * float(np.log(squares)) - penalty


def _compute_weights(runs: SizeRuns, rate: Ints, growth_nats: float) -> Floats:
    """Compute the inverse of each run's variance (n,), relative to that at the minimum."""
    mean = np.bincount(rate, runs.loss_nats) / np.bincount(rate)
    return np.asarray(1 / (1 + ((mean - mean.min()) / growth_nats) ** 2))[rate]


def reduce_runs(runs: SizeRuns, growth_nats: float = math.inf) -> ReducedRuns:
    """Remove the intercepts and sum over rates, weighting each run by its inverse variance
    (`choose_noise_growth`).
    """
    rates, rate = np.unique(runs.log2_value, return_inverse=True)
    # Weight each run by its inverse variance
    weight = _compute_weights(runs, rate, growth_nats)
    root_weight = np.sqrt(weight)[:, None]
    rate_indicator = np.equal.outer(rate, np.arange(len(rates))).astype(np.float64)  # (n, R)
    group_indicator = np.equal.outer(np.arange(int(runs.group.max()) + 1), runs.group)  # (G, n)
    group_mean = group_indicator * weight / (group_indicator @ weight)[:, None]
    # Subtract group means from losses and from rate indicators
    residual = (runs.loss_nats - (group_mean @ runs.loss_nats)[runs.group]) * root_weight[:, 0]
    design = (rate_indicator - (group_mean @ rate_indicator)[runs.group]) * root_weight
    # Project the losses on the rates
    explained = design @ np.linalg.lstsq(design, residual, rcond=None)[0]
    mean = runs.loss_nats @ rate_indicator / rate_indicator.sum(axis=0)
    return ReducedRuns(
        rates=rates,
        information=design.T @ design,
        score=design.T @ residual,
        squares=float(explained @ explained),
        pure_squares=float(((residual - explained) ** 2).sum()),
        num_pure=len(residual) - len(group_indicator) - (len(rates) - 1),
        excess_nats=mean - mean.min(),
        log_trust=0.0,
        level=float((group_mean @ runs.loss_nats).mean()),
        balance=(group_mean @ rate_indicator).mean(axis=0),
    )


def reduce_trust(size: ReducedRuns, trust_nats: float) -> ReducedRuns:
    """Reduce the trust in the basin's shape to the neighborhood of its minimum.

    Each rate gets a deviation of its own from the shape, shared by its seeds. The mean loss of a
    rate that lies `trust_nats` above the best one then has twice the standard deviation of noise
    alone, and the mean loss of a rate with a higher loss has much more.
    """
    num_seeds = np.maximum(np.diag(size.information), 0.5)
    extra = ((1 + (size.excess_nats / trust_nats) ** 2) ** 2 - 1) / num_seeds
    # Woodbury: (Q^-1 + D)^-1 = (1 + Q D)^-1 Q, which also holds for a singular Q
    mixing = np.eye(len(extra)) + size.information * extra
    information = np.linalg.solve(mixing, size.information)
    score = np.linalg.solve(mixing, size.score).astype(np.float64)
    effects = np.linalg.lstsq(size.information, size.score, rcond=None)[0]
    # The curve's height uses the same weights as its shape, so that a rate with a high loss does
    # not raise the fitted minimum
    trusted = 1 / (1 / num_seeds + extra)
    trusted /= trusted.sum()
    level = size.level - size.balance @ effects + trusted @ effects
    return size._replace(
        information=(information + information.T) / 2,
        score=score,
        squares=float(effects @ score),
        log_trust=-0.5 * float(np.linalg.slogdet(mixing)[1]),
        level=float(level),
        balance=trusted,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseGrid:
    """Grid of the variance of one run about its basin (V,), and its log prior given the differences
    between seeds (V,).
    """

    variance: Floats
    log_prior: Floats


def _compute_chi2_quantile(probability: float, num_degrees: int) -> float:
    return 2 * float(special.gammaincinv(num_degrees / 2, probability))


def estimate_variance(squares: float, num_degrees: int, usual_nats: float) -> float:
    """Return the likeliest variance of one run given a sum of squares.

    With fewer than `FEW_DEGREES` degrees of freedom, the usual noise counts as one more
    observation. One of the many shapes always fits a handful of runs exactly, and such a fit is no
    evidence of low noise.
    """
    num_usual = 1 if num_degrees < FEW_DEGREES else 0
    return (squares + MIN_NOISE_NATS**2 + num_usual * usual_nats**2) / (num_degrees + num_usual)


def build_noise_grid(
    pure: float, num_pure: int, misfit: float, num_free: int, usual_nats: float
) -> NoiseGrid:
    """Build the grid of noise variances that the seeds and the lack of fit of the best shape allow.

    The pure error is the difference between seeds of one rate. If a shape fits, pure error and lack
    of fit have the same variance. Otherwise the variance of the lack of fit is larger by a factor
    whose log has an exponential prior, because more seeds do not average out a wrong shape. The
    variance of the lack of fit determines the precision of the minimum.

    Args:
        pure: Sum of squares between seeds of one rate, all sizes.
        num_pure: Degrees of freedom of `pure`.
        misfit: Residual sum of squares of the rates' means under the best shape.
        num_free: Degrees of freedom of `misfit`.
        usual_nats: Prior median of the noise, in nats.
    """
    # Bounds of the grid, from chi-squared quantiles
    least, number = MIN_NOISE_NATS**2, num_pure + num_free
    low = max((pure + misfit) / float(special.chdtri(number, TAIL_PROBABILITY / 2)), least)
    high = (pure + misfit) / _compute_chi2_quantile(TAIL_PROBABILITY, number)
    if num_free:
        high = max(high, misfit / _compute_chi2_quantile(TAIL_PROBABILITY, num_free))
    usual = 2 * np.log(usual_nats)
    if number < FEW_DEGREES:
        high = max(high, float(np.exp(usual + 2 * NOISE_EFOLDS)))
    log_variance = np.linspace(np.log(low), np.log(max(high, 2 * low)), NUM_VARIANCES)
    # Log-normal prior on the noise
    expected = -0.5 * ((log_variance - usual) / (2 * NOISE_EFOLDS)) ** 2
    if num_pure == 0:
        return NoiseGrid(variance=np.exp(log_variance), log_prior=expected)
    # Density of the seeds' log variance: an inverse gamma distribution, on a grid that also reaches
    # 8 e-folds below, since the variance about the basin may be that much larger
    wide = np.linspace(log_variance[0] - 8.0, log_variance[-1], 8 * NUM_VARIANCES)
    step = wide[1] - wide[0]
    log_seeds = -0.5 * (num_pure * wide + max(pure, least) / np.exp(wide))
    seeds = np.exp(log_seeds - log_seeds.max())
    seeds /= seeds.sum() * step
    # Mixture: either the same variance, or one larger by an exponential number of e-folds
    excess = log_variance[:, None] - wide
    misfits = np.where(excess >= 0, np.exp(-np.maximum(excess, 0.0) / MISFIT_EFOLDS), 0.0) @ seeds
    prior = (1 - MISFIT_SHARE) * np.interp(
        log_variance, wide, seeds
    ) + MISFIT_SHARE * misfits * step / MISFIT_EFOLDS
    return NoiseGrid(
        variance=np.exp(log_variance), log_prior=expected + np.log(np.maximum(prior, 1e-300))
    )
