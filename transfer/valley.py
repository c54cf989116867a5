"""The shape of a learning-rate valley and what the runs say about it: numbers in, posterior draws out.

In log2 of the learning rate, x, a valley is `a + b x + k g(x)` with `g(x) = (exp(s x) - 1 - s x) / s**2`, the
linear-exponential curve of Varian (1975) and Zellner (1986): straight on the side of slow training, exponential
on the side of divergence for s > 0, a parabola as s goes to 0, and never more than one minimum. Shifting x
leaves the family as it is, so one asymmetry s serves all widths while each keeps its own b and k. Given s the
model is linear, so the posterior under flat priors on a, b, k and log(noise) is exact: s lies on a grid.

Seeds are paired: one that trained at several rates has its own intercept `a` (same data order and
initialisation), so what is common to its runs does not count as noise. The noise is pooled over all widths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ASYMMETRIES = np.linspace(-0.575, 1.575, 44)
"""Grid of s, per octave; 0 itself is left out, where `g` is 0 / 0."""
ASYMMETRY_MEAN, ASYMMETRY_SD = 0.15, 0.4
"""Prior on s: divergence is the steeper side, mildly; within 2.5 octaves our CPU grids give about 0."""
LEAST_NOISE_NATS = 1e-6
"""Tables are rounded: no noise is smaller."""
SHAPE_OCTAVES = 0.35
"""Sd of the optimum's error from the assumed shape, octaves per unit of |s|: a lopsided valley made of two
parabolas is read 0.3 to 0.45 |s| too low, a symmetric one exactly. The error is common to all widths, so it is no
drift, and a curve that misplaces its minimum still has its losses right: it widens the optima's intervals only."""
BEYOND_OCTAVES = 1.0
"""How far past the rates that were run a drawn optimum may lie: beyond, the runs say nothing."""
LEAST_CURVATURE_SHARE = 0.05
"""Floor of a drawn curvature, as a share of the fitted one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """The finite runs of one width inside its window: columns of one length n."""

    log2_lr: Floats
    loss_nats: Floats
    group: Ints
    """Intercept each run belongs to, 0 ... G-1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Valleys:
    """Posterior of W valleys, D = draws + 1 rows: row 0 is the point estimate, the others are draws."""

    optimum: Floats
    """(D, W) log2 of the learning rate, at most an octave outside the rates that were run."""
    curvature: Floats
    """(D, W) second derivative at the optimum, nats per octave squared."""
    asymmetry: Floats
    """(D,) s, per octave."""
    shape_error: Floats
    """(D,) octaves to add to every optimum of a row: the valley need not be of the assumed shape."""
    side: Ints
    """(D, W) where the optimum lies: -1 below the lowest rate, 0 inside, 1 above the highest."""
    minimum_nats: Floats
    """(W,) fitted loss at the optimum, mean over seeds."""
    noise_nats: float
    """Standard deviation of one run about its valley."""
    degrees_of_freedom: int
    """Of the noise."""


def rise(octaves: Floats, curvature: Floats, asymmetry: Floats) -> Floats:
    """Loss above the minimum, in nats, `octaves` above (or, negative, below) it."""
    exponent = np.minimum(asymmetry * octaves, 50.0)  # a wild draw may cost much, not overflow
    return np.asarray(curvature * (np.expm1(exponent) - exponent) / asymmetry**2)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Linear:
    """Least squares of one width for every asymmetry on the grid (S of them)."""

    centre: float
    slope: Floats
    """(S,) b, at the centre."""
    bend: Floats
    """(S,) k, at the centre."""
    cholesky: Floats
    """(S, 2, 2) of the covariance of (b, k) for unit noise."""
    squares: Floats
    """(S,) residual sum of squares."""
    rate_squares: Floats
    """(S,) the part of it that all seeds of a rate share: lack of fit."""
    intercept: Floats
    """(S,) mean over seeds, at the centre."""
    num_free: int
    num_rates_free: int


def _least_squares(runs: Runs) -> _Linear:
    centre = float(np.median(np.unique(runs.log2_lr)))
    x = runs.log2_lr - centre
    s = ASYMMETRIES[:, None]
    columns = np.stack(np.broadcast_arrays(x, (np.expm1(s * x) - s * x) / s**2), axis=-1)  # (S, n, 2)
    num_groups = int(runs.group.max()) + 1
    member = np.equal.outer(np.arange(num_groups), runs.group) / np.bincount(runs.group)[:, None]  # (G, n)
    means, level = member @ columns, member @ runs.loss_nats  # (S, G, 2), (G,)
    within, y = columns - means[:, runs.group], runs.loss_nats - level[runs.group]
    covariance = np.linalg.inv(np.swapaxes(within, 1, 2) @ within)
    coefficients = (covariance @ (np.swapaxes(within, 1, 2) @ y)[..., None])[..., 0]  # (S, 2)
    residual = y - (within @ coefficients[..., None])[..., 0]  # (S, n)
    rates, rate = np.unique(runs.log2_lr, return_inverse=True)
    counts = np.bincount(rate)
    by_rate = residual @ np.equal.outer(rate, np.arange(len(rates)))  # (S, rates) sums
    return _Linear(
        centre=centre,
        slope=coefficients[:, 0],
        bend=coefficients[:, 1],
        cholesky=np.linalg.cholesky(covariance),
        squares=(residual**2).sum(axis=1),
        rate_squares=(by_rate**2 / counts).sum(axis=1),
        intercept=level.mean() - (means.mean(axis=1) * coefficients).sum(axis=1),
        num_free=len(x) - num_groups - 2,
        num_rates_free=len(rates) - 3,
    )


def _noise(fits: list[_Linear]) -> tuple[Floats, int]:
    """Variance of one run for every asymmetry (S,), and its degrees of freedom.

    The larger of two mean squares: of all residuals, and of what the seeds of one rate share. The second
    is larger where the model misses the valley's shape: seeds do not average that away.
    """
    free, rates_free = sum(f.num_free for f in fits), sum(f.num_rates_free for f in fits)
    total = np.sum([f.squares for f in fits], axis=0) / free
    shared = np.sum([f.rate_squares for f in fits], axis=0) / max(rates_free, 1)
    misses = bool(shared.min() > total.min())
    variance = np.maximum(total, shared) if misses else total
    return np.maximum(variance, LEAST_NOISE_NATS**2), rates_free if misses else free


def fit_valleys(widths: list[Runs], *, draws: int, rng: np.random.Generator) -> Valleys:
    """Fit all widths together and draw from the posterior.

    Each width needs four different rates or more, so that noise is left to be measured.
    """
    fits = [_least_squares(runs) for runs in widths]
    variance, free = _noise(fits)
    log_posterior = -0.5 * free * np.log(variance) - 0.5 * ((ASYMMETRIES - ASYMMETRY_MEAN) / ASYMMETRY_SD) ** 2
    weight = np.exp(log_posterior - log_posterior.max())
    best = int(weight.argmax())
    chosen = np.concatenate([[best], rng.choice(len(weight), size=draws, p=weight / weight.sum())])
    sd = np.sqrt(variance[chosen] * free / np.concatenate([[free], rng.chisquare(free, size=draws)]))
    normal = rng.standard_normal((draws + 1, len(fits), 2)) * sd[:, None, None]
    normal[0] = 0.0
    shape = SHAPE_OCTAVES * ASYMMETRIES[chosen] * np.concatenate([[0.0], rng.standard_normal(draws)])
    placed = [_place(fit, runs, chosen, normal[:, w]) for w, (fit, runs) in enumerate(zip(fits, widths, strict=True))]
    return Valleys(
        optimum=np.stack([p[0] for p in placed], axis=1),
        curvature=np.stack([p[1] for p in placed], axis=1),
        side=np.stack([p[2] for p in placed], axis=1),
        asymmetry=ASYMMETRIES[chosen],
        shape_error=shape,
        minimum_nats=np.array([p[3] for p in placed]),
        noise_nats=float(sd[0]),
        degrees_of_freedom=free,
    )


def _place(fit: _Linear, runs: Runs, chosen: Ints, normal: Floats) -> tuple[Floats, Floats, Ints, float]:
    """Optimum, curvature and side of every row (D,), and the loss at the optimum of row 0."""
    s = ASYMMETRIES[chosen]
    moved = (fit.cholesky[chosen] @ normal[..., None])[..., 0]
    slope, bend = fit.slope[chosen] + moved[:, 0], fit.bend[chosen] + moved[:, 1]
    low, high = runs.log2_lr.min() - fit.centre, runs.log2_lr.max() - fit.centre
    with np.errstate(divide="ignore", invalid="ignore"):
        argument = 1.0 - slope * s / bend
        optimum = np.log(argument) / s
    # Without a minimum (concave, or monotone) the better end of the rates is the optimum, from outside.
    ends = np.array([low, high])
    at_ends = slope[:, None] * ends + rise(ends, bend[:, None], s[:, None])
    better_end = np.where(at_ends[:, 0] < at_ends[:, 1], -np.inf, np.inf)
    optimum = np.where((bend > 0) & (argument > 0), optimum, better_end)
    side = (optimum > high).astype(np.int64) - (optimum < low).astype(np.int64)
    optimum = np.clip(optimum, low - BEYOND_OCTAVES, high + BEYOND_OCTAVES)
    curvature = bend * np.exp(s * optimum)
    least = LEAST_CURVATURE_SHARE * max(float(curvature[0]), LEAST_NOISE_NATS)
    point = optimum[:1]
    minimum = fit.intercept[chosen[0]] + (slope[:1] * point + rise(point, bend[:1], s[:1]))[0]
    return optimum + fit.centre, np.maximum(curvature, least), side, float(minimum)
