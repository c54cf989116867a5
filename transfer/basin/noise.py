"""Reduced runs of one size, and the noise of a run about its basin."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from transfer.basin.shapes import Floats, Ints

MIN_NOISE_NATS = 1e-6
"""Smallest noise in nats that is assumed, since losses in tables are rounded."""
USUAL_NOISE_SHARE, NOISE_EFOLDS = 0.0023, 1.2
"""Prior median of the noise as a share of the loss, and standard deviation of its log. Seeds of our
CPU grids on bytes differ by 0.0018 to 0.011 of the loss. The share is the same within a fifth at
vocabularies of 256 to 16,384 (benchmarks/statistics/vocabularies.py). The prior matters where there
are hardly more runs than parameters to fit."""
FEW_DEGREES = 8
"""Number of degrees of freedom below which the noise grid covers everything that the prior
allows."""
MISFIT_SHARE = 0.5
"""Prior probability that no shape fits, so that the variance about the basin exceeds the variance
between seeds."""
MISFIT_EFOLDS = 1.0
"""Mean excess of that variance, in e-folds."""
NUM_VARIANCES = 16

GROWTHS_NATS = (math.inf, 0.3, 0.1)
"""Candidates for `choose_noise_growth`, in nats; infinite means the same noise everywhere."""
GROWTH_LOG_ODDS = 2.0
"""Prior log odds that the noise is the same everywhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeRuns:
    """Finite runs of one size inside its window, as columns of the same length n."""

    log2_value: Floats
    loss_nats: Floats
    group: Ints
    """Index of each run's intercept, 0 ... G-1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducedRuns:
    """Runs as quadratic forms over their R rates with intercepts removed: the sufficient statistics
    of a fit.
    """

    rates: Floats
    information: Floats
    """(R, R) information matrix of the rates' effects."""
    score: Floats
    """(R,) score of the rates' effects."""
    squares: float
    """Sum of squares of the losses that the rates can explain."""
    pure_squares: float
    """Sum of squares that they cannot explain: differences between seeds of one rate."""
    num_pure: int
    """Degrees of freedom of `pure_squares`."""
    excess_nats: Floats
    """(R,) mean loss above that of the best rate."""
    log_trust: float
    """Log likelihood that distrust costs: half the log determinant of the rates' information,
    relative to full trust."""
    level: float
    """Mean loss over intercepts, and over rates weighted by `balance`, in nats."""
    balance: Floats
    """Weight of each rate in `level` (R,); the sum is 1."""

    @property
    def num_free(self) -> int:
        """Degrees of freedom of the lack of fit: rates less intercept, curvature and minimum."""
        return len(self.rates) - 3


def choose_noise_growth(sizes: Sequence[SizeRuns]) -> float:
    """Return the height above the best rate, in nats, at which the noise variance has doubled; the
    candidate with the largest likelihood between seeds.

    Near divergence, losses of seeds differ by ten times as much as at the minimum, and one such
    rate would inflate the noise of all rates.
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
    doubt = GROWTH_LOG_ODDS if np.isfinite(growth_nats) else 0.0
    return log_scale - 0.5 * number * float(np.log(squares)) - doubt


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

    Each rate gets a deviation of its own, shared by its seeds. The mean loss of a rate `trust_nats`
    above the best then has twice the standard deviation of noise alone, and that of a rate further
    up much more.
    """
    num_seeds = np.maximum(np.diag(size.information), 0.5)
    extra = ((1 + (size.excess_nats / trust_nats) ** 2) ** 2 - 1) / num_seeds
    # Woodbury: (Q^-1 + D)^-1 = (1 + Q D)^-1 Q, which also holds for a singular Q
    mixing = np.eye(len(extra)) + size.information * extra
    information = np.linalg.solve(mixing, size.information)
    score = np.linalg.solve(mixing, size.score).astype(np.float64)
    effects = np.linalg.lstsq(size.information, size.score, rcond=None)[0]
    # The curve's height uses the same weights as its shape, so that a rate far up does not lift it
    # off its minimum.
    trusted = 1 / (1 / num_seeds + extra)
    trusted /= trusted.sum()
    level = size.level - size.balance @ effects + trusted @ effects
    return dataclasses.replace(
        size,
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
    """Return the likeliest variance of one run given a sum of squares. With few degrees of freedom
    the usual noise counts as one more.

    With so many shapes, one of them always fits a handful of runs exactly, which is no evidence for
    it.
    """
    few = num_degrees < FEW_DEGREES
    return (squares + MIN_NOISE_NATS**2 + few * usual_nats**2) / (num_degrees + few)


def build_noise_grid(
    pure: float, num_pure: int, misfit: float, num_free: int, usual_nats: float
) -> NoiseGrid:
    """Build the grid of noise variances that the seeds and the lack of fit of the best shape allow.

    If a shape fits, pure error and lack of fit have the same variance. Otherwise the variance of
    the lack of fit, which determines the precision of the minimum, is larger, by a factor whose log
    has an exponential prior: more seeds do not average out a wrong shape.

    Args:
        pure: Sum of squares between seeds of one rate, all sizes.
        num_pure: Degrees of freedom of `pure`.
        misfit: Residual sum of squares of the rates' means under the best shape.
        num_free: Degrees of freedom of `misfit`.
        usual_nats: Prior median of the noise, in nats.
    """
    # Bounds of the grid, from chi-squared quantiles
    least, number = MIN_NOISE_NATS**2, num_pure + num_free
    low = max((pure + misfit) / float(special.chdtri(number, 0.001)), least)
    high = (pure + misfit) / _compute_chi2_quantile(0.002, number)
    if num_free:
        high = max(high, misfit / _compute_chi2_quantile(0.002, num_free))
    usual = 2 * np.log(usual_nats)
    if number < FEW_DEGREES:
        high = max(high, float(np.exp(usual + 2 * NOISE_EFOLDS)))
    log_variance = np.linspace(np.log(low), np.log(max(high, 2 * low)), NUM_VARIANCES)
    # Log-normal prior on the noise
    expected = -0.5 * ((log_variance - usual) / (2 * NOISE_EFOLDS)) ** 2
    if num_pure == 0:
        return NoiseGrid(variance=np.exp(log_variance), log_prior=expected)
    # Density of the seeds' log variance: an inverse gamma distribution
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
