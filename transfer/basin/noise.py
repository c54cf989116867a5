"""The runs of one size as a basin sees them, and the noise about it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from transfer.basin.shapes import Floats, Ints

LEAST_NOISE_NATS = 1e-6
"""Tables are rounded: no noise is smaller."""
USUAL_NOISE_SHARE, NOISE_EFOLDS = 0.0023, 1.2
"""Prior median of the noise as a share of the loss, and sd of its log. Seeds of our CPU grids on
bytes differ by 0.0018 to 0.011 of the loss; the share is the same within a fifth at vocabularies of
256 to 16,384 (benchmarks/statistics/vocabularies.py). It matters where there are hardly more runs
than numbers to fit."""
FEW_DEGREES = 8
"""With fewer degrees of freedom the grid of the noise holds all that the prior allows."""
MISFIT_SHARE = 0.5
"""Prior probability that no shape fits, so that the variance about the basin is above that between
seeds..."""
MISFIT_EFOLDS = 1.0
"""... by so many e-folds, in the mean."""
NUM_VARIANCES = 16

GROWTHS_NATS = (math.inf, 0.3, 0.1)
"""What `noise_growth` may be; infinite: one noise everywhere."""
GROWTH_LOG_ODDS = 2.0
"""Prior log odds that the noise is the same everywhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeRuns:
    """The finite runs of one size inside its window: columns of one length n."""

    log2_value: Floats
    loss_nats: Floats
    group: Ints
    """Intercept each run belongs to, 0 ... G-1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducedRuns:
    """Runs as quadratic forms over their R rates, intercepts removed: all that a fit needs."""

    rates: Floats
    information: Floats
    """(R, R)"""
    score: Floats
    """(R,)"""
    squares: float
    """Sum of squares of what the rates may explain of the losses."""
    pure_squares: float
    """Sum of squares of what they cannot: seeds against seeds."""
    num_pure: int
    """Degrees of freedom of that."""
    excess_nats: Floats
    """(R,) mean loss above that of the best rate."""
    log_trust: float
    """Log likelihood of the rates that distrust costs: half the log determinant of their
    information, relative."""
    level: float
    """Mean loss over intercepts, and over rates by `balance`, in nats."""
    balance: Floats
    """Weight of each rate in `level` (R,); the sum is 1."""

    @property
    def num_free(self) -> int:
        """Degrees of freedom of the lack of fit: rates less intercept, curvature and minimum."""
        return len(self.rates) - 3


def noise_growth(sizes: Sequence[SizeRuns]) -> float:
    """How far up a basin the noise has doubled its variance, in nats above the best rate: the
    likeliest by the seeds.

    Near divergence seeds part by ten times what they do at the minimum, and one such rate would
    make all noise large.
    """
    return max(GROWTHS_NATS, key=lambda growth: _log_growth(sizes, growth))


def _log_growth(sizes: Sequence[SizeRuns], growth_nats: float) -> float:
    """Restricted log likelihood of seeds against seeds, all sizes having one noise at their
    minimum.
    """
    squares, number, log_scale = LEAST_NOISE_NATS**2, 0, 0.0
    for runs in sizes:
        rates, rate = np.unique(runs.log2_value, return_inverse=True)
        root = np.sqrt(_weights(runs, rate, growth_nats))
        groups = np.equal.outer(runs.group, np.arange(int(runs.group.max()) + 1))
        design = np.hstack([groups, np.equal.outer(rate, np.arange(1, len(rates)))]) * root[:, None]
        y = runs.loss_nats * root
        effects, _, rank, singular = np.linalg.lstsq(design, y, rcond=None)
        squares += float(((y - design @ effects) ** 2).sum())
        number += len(y) - int(rank)
        log_scale += float(np.log(root).sum() - np.log(singular[:rank]).sum())
    doubt = GROWTH_LOG_ODDS if np.isfinite(growth_nats) else 0.0
    return log_scale - 0.5 * number * float(np.log(squares)) - doubt


def _weights(runs: SizeRuns, rate: Ints, growth_nats: float) -> Floats:
    """(n,) inverse of each run's variance, relative to that at the minimum."""
    mean = np.bincount(rate, runs.loss_nats) / np.bincount(rate)
    return np.asarray(1 / (1 + ((mean - mean.min()) / growth_nats) ** 2))[rate]


def reduce_runs(runs: SizeRuns, growth_nats: float = math.inf) -> ReducedRuns:
    """Take out the intercepts, and sum over rates; each run weighs as much as its noise allows
    (`noise_growth`).
    """
    rates, rate = np.unique(runs.log2_value, return_inverse=True)
    weight = _weights(runs, rate, growth_nats)
    root = np.sqrt(weight)[:, None]
    is_rate = np.equal.outer(rate, np.arange(len(rates))).astype(np.float64)  # (n, R)
    of_group = np.equal.outer(np.arange(int(runs.group.max()) + 1), runs.group)  # (G, n)
    member = of_group * weight / (of_group @ weight)[:, None]
    y = (runs.loss_nats - (member @ runs.loss_nats)[runs.group]) * root[:, 0]
    within = (is_rate - (member @ is_rate)[runs.group]) * root
    explained = within @ np.linalg.lstsq(within, y, rcond=None)[0]
    mean = runs.loss_nats @ is_rate / is_rate.sum(axis=0)
    return ReducedRuns(
        rates=rates,
        information=within.T @ within,
        score=within.T @ y,
        squares=float(explained @ explained),
        pure_squares=float(((y - explained) ** 2).sum()),
        num_pure=len(y) - len(of_group) - (len(rates) - 1),
        excess_nats=mean - mean.min(),
        log_trust=0.0,
        level=float((member @ runs.loss_nats).mean()),
        balance=(member @ is_rate).mean(axis=0),
    )


def distrust(size: ReducedRuns, trust_nats: float) -> ReducedRuns:
    """The same runs where a basin of our shapes is trusted near its minimum only.

    Each rate gets a deviation of its own, that its seeds share, so that its mean loss at
    `trust_nats` above the best has twice the standard deviation of noise alone, and one further up
    much more.
    """
    num_seeds = np.maximum(np.diag(size.information), 0.5)
    extra = ((1 + (size.excess_nats / trust_nats) ** 2) ** 2 - 1) / num_seeds
    # (Q^-1 + D)^-1 = (1 + Q D)^-1 Q, for Q without inverse too
    mixing = np.eye(len(extra)) + size.information * extra
    information = np.linalg.solve(mixing, size.information)
    score = np.linalg.solve(mixing, size.score).astype(np.float64)
    effects = np.linalg.lstsq(size.information, size.score, rcond=None)[0]
    # The curve's height rests on the rates as its shape does: a rate far up must not lift it off
    # its minimum.
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
    """Grid of the variance of one run about its basin, and what the seeds alone say of it."""

    variance: Floats
    log_prior: Floats


def _chi2_quantile(probability: float, num_degrees: int) -> float:
    return 2 * float(special.gammaincinv(num_degrees / 2, probability))


def likeliest_variance(squares: float, num_degrees: int, usual_nats: float) -> float:
    """Return the likeliest variance of one run, by a sum of squares; of few, the usual noise counts
    as one more.

    With so many shapes one of them fits a handful of runs exactly, which is no evidence for it.
    """
    few = num_degrees < FEW_DEGREES
    return (squares + LEAST_NOISE_NATS**2 + few * usual_nats**2) / (num_degrees + few)


def noise_grid(
    pure: float, num_pure: int, misfit: float, num_free: int, usual_nats: float
) -> NoiseGrid:
    """The grid spans what seeds, and the lack of fit of the best shape, allow.

    If a shape fits, both have one variance. Else that of the lack of fit, which places the minimum,
    is larger, by a factor whose log has an exponential prior: seeds do not average a missed shape
    away.

    Args:
        pure: Sum of squares of seeds against seeds, all sizes.
        num_pure: Its degrees of freedom.
        misfit: Sum of squares that the best shape leaves of what the seeds of a rate share.
        num_free: Its degrees of freedom.
        usual_nats: Prior median of the noise.
    """
    least, number = LEAST_NOISE_NATS**2, num_pure + num_free
    low = max((pure + misfit) / float(special.chdtri(number, 0.001)), least)
    high = (pure + misfit) / _chi2_quantile(0.002, number)
    if num_free:
        high = max(high, misfit / _chi2_quantile(0.002, num_free))
    usual = 2 * np.log(usual_nats)
    if number < FEW_DEGREES:
        high = max(high, float(np.exp(usual + 2 * NOISE_EFOLDS)))
    log_variance = np.linspace(np.log(low), np.log(max(high, 2 * low)), NUM_VARIANCES)
    expected = -0.5 * ((log_variance - usual) / (2 * NOISE_EFOLDS)) ** 2
    if num_pure == 0:
        return NoiseGrid(variance=np.exp(log_variance), log_prior=expected)
    wide = np.linspace(log_variance[0] - 8.0, log_variance[-1], 8 * NUM_VARIANCES)
    step = wide[1] - wide[0]
    log_seeds = -0.5 * (num_pure * wide + max(pure, least) / np.exp(wide))
    seeds = np.exp(log_seeds - log_seeds.max())  # an inverse gamma, by log variance
    seeds /= seeds.sum() * step
    excess = log_variance[:, None] - wide
    misfits = np.where(excess >= 0, np.exp(-np.maximum(excess, 0.0) / MISFIT_EFOLDS), 0.0) @ seeds
    prior = (1 - MISFIT_SHARE) * np.interp(
        log_variance, wide, seeds
    ) + MISFIT_SHARE * misfits * step / MISFIT_EFOLDS
    return NoiseGrid(
        variance=np.exp(log_variance), log_prior=expected + np.log(np.maximum(prior, 1e-300))
    )
