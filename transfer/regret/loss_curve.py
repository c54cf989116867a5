"""The loss against a hyperparameter at the target, where no optimum need be among the values tried.

With x the octaves above the transferred value and u the doublings of size above the largest that
was run,

    loss = a[size, seed] + (b + b' u) x + (k + k' u) g(x) + d(x),   g(x) = (exp(s x) - 1 - s x) /
    s**2

is linear given s, of either sign of k. d is what no such curve follows, a kink say, the same at all
sizes: free at every value tried, as freely as the runs ask for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from transfer.basin.noise import LEAST_NOISE_NATS
from transfer.basin.shapes import Floats, Ints
from transfer.regret.drift import CURVATURE_TREND_SD, SCATTER_OCTAVES, WALK_OCTAVES, draw_walk

SHAPES = np.linspace(-2.85, 2.85, 20)
"""Grid of s times the largest |x|: either side may be the steep one, and 0 itself is left out."""
LEAST_BEND_NATS = 1e-3
"""The least k in the prior of its trend, nats per octave squared: a flat basin may become one that
is not quite."""
FREEDOMS = np.array([1e-3, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1e3, 1e4])
"""Grid of the variance of d, as a multiple of the noise's."""
STEADY_SHARE = 0.5
"""Share of the draws in which trends with size go on as they were; in the others they fade."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveRuns:
    """Runs about a transferred value: columns of one length n."""

    x: Floats
    """Octaves above the transferred value."""
    u: Floats
    """Doublings of size above the largest: none is positive."""
    loss_nats: Floats
    group: Ints
    """Size and seed, 0 ... G-1: each has its own intercept."""

    @property
    def num_free(self) -> int:
        """Degrees of freedom left to the noise: what has a prior takes none."""
        return len(self.x) - int(self.group.max()) - 1 - 3

    @property
    def shapes(self) -> Floats:
        """Grid of s, per octave."""
        return np.asarray(SHAPES / np.abs(self.x).max())

    def within(self, values: Floats) -> Floats:
        """Values less the mean of their group, along the last axis."""
        member = (
            np.equal.outer(np.arange(int(self.group.max()) + 1), self.group)
            / np.bincount(self.group)[:, None]
        )
        return np.asarray(values - (values @ member.T)[..., self.group])


@dataclass(frozen=True, kw_only=True, slots=True)
class LossAtTarget:
    """The loss at the target as rows: row 0 is the estimate, the others are draws of the
    posterior.
    """

    slope: Floats
    """(rows,) nats per octave, at the transferred value."""
    bend: Floats
    """(rows,) k, nats per octave squared."""
    s: Floats
    """(rows,) per octave."""
    knots: Floats
    """(K,) values tried, octaves above the transferred one."""
    off: Floats
    """(rows, K) d at each of them; between them it is straight."""

    def loss(self, x: float) -> Floats:
        """Above that of the transferred value, in nats: one entry per row."""
        off = self.off @ (_between(self.knots, [x]) - _between(self.knots, [0.0]))[0]
        return np.asarray(self.slope * x + self.bend * _bent(self.s, x) + off)


def _bent(s: Floats, x: Floats | float) -> Floats:
    """g(x)."""
    return np.asarray((np.expm1(s * x) - s * x) / s**2)


def _between(knots: Floats, x: Floats | list[float]) -> Floats:
    """Shares of the knots in straight lines between them: (len(x), K)."""
    return np.stack([np.interp(x, knots, own) for own in np.eye(len(knots))], axis=-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fits:
    """Least squares for every s and every freedom of d on their grids: M models."""

    found: Floats
    """(M, 4 + K) of b, b', k, k' and d."""
    covariance: Floats
    """(M, 4 + K, 4 + K) for unit noise."""
    variance: Floats
    """(M,) of one run."""
    weight: Floats
    """(M,) posterior shares."""


def _fit(runs: CurveRuns, knots: Floats) -> _Fits:
    y, columns, num = runs.within(runs.loss_nats), _columns(runs, knots), 4 + len(knots)
    tied = 1 / np.tile(FREEDOMS, len(SHAPES))  # (M,) what d costs, in units of the noise
    information = np.swapaxes(columns, 1, 2) @ columns + 1e-12 * np.eye(num)
    information[:, 3, 3] += _trend_precision(columns[:, :, :4], y, runs)
    free_of_d = np.linalg.slogdet(information[:, :4, :4])[1]
    information[:, range(4, num), range(4, num)] += tied[:, None]
    covariance = np.linalg.inv(information)
    products = np.swapaxes(columns, 1, 2) @ y
    found = (covariance @ products[..., None])[..., 0]
    squares = y @ y - (products * found).sum(axis=1)
    loose = len(knots) - tied * np.trace(covariance[:, 4:, 4:], axis1=1, axis2=2)
    shared = _shared(y - (columns @ found[..., None])[..., 0], runs, loose)
    variance = np.maximum(np.maximum(squares / runs.num_free, shared), LEAST_NOISE_NATS**2)
    log_weight = -0.5 * (
        runs.num_free * np.log(variance) + np.linalg.slogdet(information)[1] - free_of_d
    )
    log_weight += 0.5 * len(knots) * np.log(tied)
    weight = np.exp(log_weight - log_weight.max())
    return _Fits(
        found=found,
        covariance=np.asarray(covariance, np.float64),
        variance=variance,
        weight=weight / weight.sum(),
    )


def _shared(residual: Floats, runs: CurveRuns, loose: Floats) -> Floats:
    """Mean square (M,) of what all seeds of a value share, where d takes `loose` degrees of
    freedom.

    It is the larger one where the shape changes with size in other ways than the model's: seeds do
    not average that away.
    """
    _, cell = np.unique(np.stack([runs.u, runs.x]), axis=1, return_inverse=True)
    counts = np.bincount(cell.reshape(-1))
    by_cell = residual @ np.equal.outer(cell.reshape(-1), np.arange(len(counts)))
    num_free = len(counts) - len(np.unique(runs.u)) - 3 - loose
    return np.asarray((by_cell**2 / counts).sum(axis=1) / np.maximum(num_free, 1.0))


def loss_at_target(
    runs: CurveRuns, doublings: float, draws: int, rng: np.random.Generator
) -> LossAtTarget:
    """Draws from the posterior, extended to so many doublings beyond the largest size."""
    knots = np.unique(runs.x)
    fits = _fit(runs, knots)
    model = np.concatenate(
        [[fits.weight.argmax()], rng.choice(len(fits.weight), size=draws, p=fits.weight)]
    )
    sd = np.sqrt(
        fits.variance[model] * runs.num_free / rng.chisquare(runs.num_free, size=draws + 1)
    )
    normal = rng.standard_normal((draws + 1, 4 + len(knots))) * sd[:, None]
    normal[0] = 0.0
    rows = (
        fits.found[model] + (np.linalg.cholesky(fits.covariance)[model] @ normal[..., None])[..., 0]
    )
    slope, bend = _extended(rows[:, :4], runs, doublings, rng)
    return LossAtTarget(
        slope=slope, bend=bend, s=runs.shapes[model // len(FREEDOMS)], knots=knots, off=rows[:, 4:]
    )


def _columns(runs: CurveRuns, knots: Floats) -> Floats:
    """What b, b', k, k' and every d multiply, less the mean of each group."""
    bent = _bent(runs.shapes[:, None], runs.x)  # (S, n)
    straight = np.broadcast_to(runs.x, bent.shape)
    off = np.broadcast_to(_between(knots, runs.x).T[:, None], (len(knots), *bent.shape))
    columns = runs.within(
        np.concatenate([np.stack([straight, runs.u * straight, bent, runs.u * bent]), off])
    )
    return np.repeat(np.moveaxis(columns, 0, -1), len(FREEDOMS), axis=0)


def _trend_precision(columns: Floats, y: Floats, runs: CurveRuns) -> Floats:
    """Return the precision of the prior on k', in units of the noise: a share of k, by a fit
    without trends.
    """
    plain = columns[:, :, [0, 2]]
    information = np.swapaxes(plain, 1, 2) @ plain + 1e-12 * np.eye(2)
    rough = np.linalg.solve(information, (np.swapaxes(plain, 1, 2) @ y)[..., None])
    variance = ((y - (plain @ rough)[..., 0]) ** 2).sum(axis=1) / (runs.num_free + 1)
    trend_sd = CURVATURE_TREND_SD * np.maximum(np.abs(rough[:, 1, 0]), LEAST_BEND_NATS)
    return np.asarray(np.maximum(variance, LEAST_NOISE_NATS**2) / trend_sd**2)


def _extended(
    rows: Floats, runs: CurveRuns, doublings: float, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """Slope and bend (rows of b, b', k, k') from the largest size to so many doublings beyond.

    What changes with size may go on doing so, or less with each doubling: an effect that fades must
    not be extended to its opposite. So in a share of the draws a trend shrinks by a factor per
    doubling, anything from 0 to 1.
    """
    factor = np.minimum(rng.uniform(size=len(rows)) / (1 - STEADY_SHARE), 1.0)
    factor[0] = 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        faded = np.expm1(doublings * np.log(factor)) / np.log(factor)
    reach = (
        np.where(factor < 1, faded, doublings) if doublings > 0 else np.full(len(rows), doublings)
    )
    middle = rows[:, 2] + rows[:, 3] * runs.u.mean()
    bend = rows[:, 2] + rows[:, 3] * reach
    bend = np.where(bend * middle > 0, bend, 0.0)
    # The target's own basin lies off the line as any size's does, and beyond the runs the line
    # itself walks.
    scatter = rng.standard_normal(len(rows)) * SCATTER_OCTAVES
    scatter[0] = 0.0
    jitter = (scatter + draw_walk(len(rows), doublings, WALK_OCTAVES, rng)) * np.abs(bend)
    return rows[:, 0] + rows[:, 1] * reach + jitter, bend
