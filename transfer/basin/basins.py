"""What the runs say about the basins of all sizes together: numbers in, posterior draws out.

Given a shape (`transfer.basin.shapes`), the minimum m and the noise, a basin `a + k h(x - m)` is
linear, so a and k > 0 are integrated exactly: a, and the basin's depth over the rates that were
run, k |h|, have flat priors. The rest lies on grids: the shape, one for all sizes; m, over the
rates and an octave beyond; the noise, pooled. A shape that the runs identify costs nothing; where
they do not, all that fit share the posterior, and the minimum is as unsure as that.

Seeds are paired: one that trained at several rates has its own intercept `a` (same data order and
initialisation), so what is common to its runs does not count as noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

from transfer.basin.noise import (
    LEAST_NOISE_NATS,
    USUAL_NOISE_SHARE,
    ReducedRuns,
    SizeRuns,
    distrust,
    likeliest_variance,
    noise_grid,
    noise_growth,
    reduce_runs,
)
from transfer.basin.shapes import KIND, KINDS, LOG_PRIOR, SLANT, Floats, Ints, rise, unit_rises

BEYOND_OCTAVES = 1.0
"""How far past the rates that were run an optimum may lie: beyond, the runs say nothing."""
LEAST_CURVATURE_SHARE = 0.05
"""Floor of a drawn curvature, as a share of the fitted one."""
TRUSTS_NATS = (0.3, 0.1, 0.03)
"""What `reduce_runs` may be told; the likeliest is taken."""
COARSE_STRIDE, COARSE_OCTAVES = 40, 0.15
"""The first look is at every fortieth shape, and at optima so far apart."""
FINE_OCTAVES = 0.02
"""Where one shape is looked at only."""
MOST_SHAPES, FINE_STEPS = 96, 64
"""The second look takes so many shapes, and so many places in each size, where the first found
anything likely."""
DOUBTFUL = 12.0
"""Log evidence behind the best at which a trust is given up after the second look."""
NEGLIGIBLE = 10.0
"""Log likelihood below the best at which a shape or an optimum is given up."""
LOG_ODDS = 2.0
"""Prior log odds that basins are trusted throughout."""
CREDIBLE_NOISE_NATS = 5e-4
"""A fit may be better than this by luck: nothing is given up for that."""
OFF_KINKED, OFF_LOPSIDED = 0.05, 0.1
"""Sd of how far an optimum lies off that of a shape with a kink, a cusp or a wall, in steps from
one value that was run to the next; and, of every shape, times its lopsidedness one step out.
Calibrated on curves that are none of our shapes: on 330 random grids of cliffs, quartics, floors
and others, optima are covered .84 without and .93 with them."""
KINKED = ("powers", "walls", "cliffs")
OFF_STEPS = 33
CERTAIN_DEPTH = 6.0
"""A basin so many standard deviations deep has no chance of being upside down."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BasinPosterior:
    """Posterior of W basins, D = draws + 1 rows: row 0 is the point estimate, the others are
    draws.
    """

    optimum: Floats
    """(D, W) log2 of the hyperparameter; but for `off_shape`, at most an octave outside the values
    that were run."""
    off_shape: Floats
    """(D,) octaves by which all optima of a row lie off those of its shape; part of `optimum`."""
    curvature: Floats
    """(D, W) as in `rise`, nats per octave squared."""
    shape: Ints
    """(D,) as in `rise`."""
    side: Ints
    """(D, W) where the optimum lies: -1 below the lowest rate, 0 inside, 1 above the highest."""
    minimum_nats: Floats
    """(W,) fitted loss at the optimum, mean over seeds."""
    noise_nats: float
    """Standard deviation of one run about its basin, near the minimum."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Grid:
    """A size, M places where its optimum may lie, and depth and norm of its basin for each of S
    shapes (S, M).
    """

    size: ReducedRuns
    optimum: Floats
    depth: Floats
    norm: Floats

    @property
    def step(self) -> float:
        """From one place to the next."""
        return float(self.optimum[1] - self.optimum[0])

    @property
    def misfit(self) -> Floats:
        """Squares left unexplained (S, M); a basin upside down explains nothing."""
        return np.maximum(self.size.squares - np.maximum(self.depth, 0.0) ** 2, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Look:
    """All sizes at some shapes."""

    shapes: Ints
    grids: tuple[_Grid, ...]

    @property
    def stride(self) -> int:
        """From one shape to the next, in the tables."""
        return int(np.diff(self.shapes).min(initial=len(SLANT)))

    @property
    def pure(self) -> tuple[float, int]:
        """Squares of seeds against seeds, and their degrees of freedom."""
        return sum(g.size.pure_squares for g in self.grids), sum(
            g.size.num_pure for g in self.grids
        )

    @property
    def num_free(self) -> int:
        """Degrees of freedom of the lack of fit."""
        return max(sum(g.size.num_free for g in self.grids), 1)

    @property
    def usual_nats(self) -> float:
        """Prior median of the noise of one run, in nats."""
        level = min(grid.size.level for grid in self.grids)
        return max(USUAL_NOISE_SHARE * level, LEAST_NOISE_NATS)

    def behind(self, more: Floats, best: float) -> Floats:
        """How much less likely, at the least, a lack of fit larger by so much than the best is."""
        (pure, num_pure), least = self.pure, CREDIBLE_NOISE_NATS**2
        pooled = (num_pure + self.num_free) * np.log1p(more / (best + pure + least))
        return (
            0.5 * np.minimum(pooled, self.num_free * np.log1p(more / (best + least)))
            if num_pure
            else 0.5 * pooled
        )


def _fit(size: ReducedRuns, h: Floats) -> tuple[Floats, Floats]:
    """Depth of basins h (..., R), |h| times their curvature, by least squares, and |h|."""
    flat = h.reshape(-1, h.shape[-1])
    norm = np.sqrt(np.maximum(np.einsum("ij,ij->i", flat @ size.information, flat), 1e-12))
    return ((flat @ size.score) / norm).reshape(h.shape[:-1]), norm.reshape(h.shape[:-1])


def _lowest(misfit: Floats) -> Floats:
    """Minimum over the last axis, by a parabola through the three lowest: the grid may straddle a
    narrow one.
    """
    at = np.clip(misfit.argmin(axis=-1), 1, misfit.shape[-1] - 2)[..., None]
    left, middle, right = (
        np.take_along_axis(misfit, at + step, axis=-1)[..., 0] for step in (-1, 0, 1)
    )
    below = (left - right) ** 2 / (8 * np.maximum(left + right - 2 * middle, 1e-300))
    # else the lowest is at an end, and nothing lies between
    inside = middle <= np.minimum(left, right)
    return np.asarray(np.where(inside, np.maximum(middle - below, 0.0), misfit.min(axis=-1)))


def _look(runs: list[SizeRuns]) -> _Look:
    """A coarse look everywhere, then two finer ones where shape and optima are likely, at the
    likeliest trust.
    """
    growth = noise_growth(runs)
    reduced = [reduce_runs(columns, growth) for columns in runs]
    shapes = np.arange(0, len(SLANT), COARSE_STRIDE)
    places, rises = [], []
    for size in reduced:
        low, high = size.rates[0] - BEYOND_OCTAVES, size.rates[-1] + BEYOND_OCTAVES
        places.append(np.linspace(low, high, int(np.ceil((high - low) / COARSE_OCTAVES)) + 1))
        rises.append(unit_rises(size.rates - places[-1][:, None], shapes))
    by_trust = [reduced, *([distrust(size, trust) for size in reduced] for trust in TRUSTS_NATS)]
    coarse = [
        _Look(shapes=shapes, grids=tuple(map(_grid, sizes, places, rises))) for sizes in by_trust
    ]
    looks = [_closer(look) for look in coarse]
    evidence = [_log_evidence(look) for look in looks]
    likely = [
        look for look, log in zip(looks, evidence, strict=True) if log > max(evidence) - DOUBTFUL
    ]
    return max(map(_closer, likely), key=_log_evidence)


def _grid(size: ReducedRuns, optimum: Floats, rises: Floats) -> _Grid:
    depth, norm = _fit(size, rises)
    return _Grid(size=size, optimum=optimum, depth=depth, norm=norm)


def _closer(look: _Look) -> _Look:
    """A finer look where shape and optima are likely; the same, if so much is that it would be no
    finer.
    """
    likely, ends = _likely(look)
    if len(look.shapes) <= MOST_SHAPES < 2 * len(likely):
        return look
    marks = np.bincount(likely, minlength=len(SLANT))
    shapes = np.flatnonzero(np.convolve(marks, np.ones(2 * look.stride - 1), "same") > 0)
    shapes = shapes[:: int(np.ceil(len(shapes) / MOST_SHAPES))]
    places = [np.linspace(low, high, FINE_STEPS) for low, high in ends]
    sizes = [grid.size for grid in look.grids]
    rises = [
        unit_rises(size.rates - m[:, None], shapes) for size, m in zip(sizes, places, strict=True)
    ]
    return _Look(shapes=shapes, grids=tuple(map(_grid, sizes, places, rises)))


def _likely(look: _Look) -> tuple[Ints, list[tuple[float, float]]]:
    """Shapes that are not negligible, and between which places each size's optimum then lies."""
    misfits = [grid.misfit for grid in look.grids]
    total = np.sum([_lowest(misfit) for misfit in misfits], axis=0)
    best = float(total.min())
    kept = look.behind(total - best, best) - LOG_PRIOR[look.shapes] + LOG_PRIOR.max() < NEGLIGIBLE
    ends = []
    for grid, misfit in zip(look.grids, misfits, strict=True):
        more = misfit[kept] - misfit[kept].min(axis=1, keepdims=True)
        places = np.flatnonzero((look.behind(more, best) < NEGLIGIBLE).any(axis=0))
        low, high = max(places[0] - 1, 0), min(places[-1] + 1, len(grid.optimum) - 1)
        ends.append((float(grid.optimum[low]), float(grid.optimum[high])))
    return look.shapes[kept], ends


def _log_evidence(look: _Look) -> float:
    """Return the log evidence of a trust, up to a constant: flat in every curvature, at the
    likeliest noise.
    """
    misfit = np.sum([g.misfit.min(axis=1) for g in look.grids], axis=0).min()
    pure, num_pure = look.pure
    variance = likeliest_variance(pure + float(misfit), num_pure + look.num_free, look.usual_nats)
    by_shape = LOG_PRIOR[look.shapes] + np.log(look.stride)
    for grid in look.grids:
        by_shape = (
            by_shape
            + _log_sum(-0.5 * grid.misfit / variance - np.log(grid.norm))
            + np.log(grid.step)
        )
    number = num_pure + sum(len(g.size.rates) - 2 for g in look.grids)
    trust = sum(g.size.log_trust for g in look.grids)
    trust -= LOG_ODDS * (trust < 0)
    return float(
        _log_sum(by_shape) - 0.5 * number * np.log(variance) - 0.5 * pure / variance + trust
    )


def _log_sum(log_terms: Floats) -> Floats:
    """Log of the sum of exponentials over the last axis."""
    most = log_terms.max(axis=-1)
    return np.asarray(most + np.log(np.exp(log_terms - most[..., None]).sum(axis=-1)))


def _log_weight(grid: _Grid, depth: Floats, variance: Floats) -> Floats:
    """Log likelihood of (shape, optimum) for a variance, the basin's depth integrated over positive
    values.
    """
    size = grid.size
    log_likelihood = -0.5 * (size.squares - depth**2) / variance - 0.5 * (
        len(size.rates) - 2
    ) * np.log(variance)
    if depth.min() < CERTAIN_DEPTH * np.sqrt(variance.max()):
        log_likelihood += special.log_ndtr(depth / np.sqrt(variance))
    return np.asarray(log_likelihood)


def fit_basins(runs: list[SizeRuns], *, draws: int, rng: np.random.Generator) -> BasinPosterior:
    """Fit all sizes together and draw from the posterior.

    One size at least needs four different rates, so that noise is left to be measured; the others
    three.
    """
    look = _look(runs)
    misfit = np.sum([g.misfit.min(axis=1) for g in look.grids], axis=0).min()
    noise = noise_grid(*look.pure, float(misfit), look.num_free, look.usual_nats)
    log_weight = LOG_PRIOR[look.shapes] + noise.log_prior[:, None]  # (V, S)
    for grid in look.grids:
        by_optimum = _log_weight(grid, grid.depth, noise.variance[:, None, None])
        log_weight = log_weight + _log_sum(by_optimum)
    weight = np.exp(log_weight - log_weight.max())
    chosen = np.concatenate(
        [[weight.argmax()], rng.choice(weight.size, size=draws, p=weight.ravel() / weight.sum())]
    )
    variance, row = noise.variance[chosen // len(look.shapes)], chosen % len(look.shapes)
    placed = [_place(grid, look.shapes, row, variance, rng) for grid in look.grids]
    by_noise = np.cumsum(weight.sum(axis=1))
    step = float(np.median(np.concatenate([np.diff(grid.size.rates) for grid in look.grids])))
    off_shape = _off_shape(look.shapes[row], step, rng)
    return BasinPosterior(
        optimum=np.stack([p[0] for p in placed], axis=1) + off_shape[:, None],
        off_shape=off_shape,
        curvature=np.stack([p[1] for p in placed], axis=1),
        side=np.stack([p[2] for p in placed], axis=1),
        shape=look.shapes[row],
        minimum_nats=np.array([p[3] for p in placed]),
        noise_nats=float(np.sqrt(np.interp(0.5, by_noise / by_noise[-1], noise.variance))),
    )


def _off_shape(shape: Ints, step: float, rng: np.random.Generator) -> Floats:
    """How far each row's optima lie off those of its shape (D,), none in row 0.

    Nobody ran what lies between two values. A curve may differ there from a shape by a share of its
    rise over one step: of a flat floor the optimum then moves far, of a steep basin little, and
    alike at all sizes. The share is larger where the two sides differ, and where a kink may stand
    elsewhere than the shape has it.
    """
    low, high = rise(np.array([[-step], [step]]), np.ones(1), shape)
    kinked = np.array([family in KINKED for family, _ in KINDS])[KIND[shape]]
    off = (
        OFF_KINKED * kinked + OFF_LOPSIDED * np.abs(high - low) / (high + low)
    ) * rng.standard_normal(len(shape))
    off[0] = 0.0
    octaves = np.linspace(0.0, step, OFF_STEPS)
    root = np.sqrt(rise(np.sign(off)[:, None] * octaves, np.ones(1), shape[:, None]))
    wanted = np.abs(off) * root[:, -1]
    cell = np.clip((root < wanted[:, None]).sum(axis=1), 1, OFF_STEPS - 1)[:, None]
    below, above = (np.take_along_axis(root, at, axis=1)[:, 0] for at in (cell - 1, cell))
    share = (wanted - below) / np.maximum(above - below, 1e-300)
    return np.asarray(np.sign(off) * (octaves[1] * (cell[:, 0] - 1 + np.minimum(share, 1.0))))


def likeliest_place(runs: SizeRuns, shape: int) -> float:
    """Where one size has its optimum at a shape that is given, by least squares."""
    size = reduce_runs(runs)
    low, high = size.rates[0] - BEYOND_OCTAVES, size.rates[-1] + BEYOND_OCTAVES
    optimum = np.linspace(low, high, int(np.ceil((high - low) / FINE_OCTAVES)) + 1)
    depth, _ = _fit(size, unit_rises(size.rates - optimum[:, None], np.array([shape])))
    return float(optimum[depth[0].argmax()])


def _place(
    grid: _Grid, shapes: Ints, row: Ints, variance: Floats, rng: np.random.Generator
) -> tuple[Floats, Floats, Ints, float]:
    """Optimum, curvature and side of every draw (D,) of shape and variance, and the loss at the
    optimum of row 0.
    """
    size, shape, sd, num_rows = grid.size, shapes[row], np.sqrt(variance), len(row)
    _, first, pair = np.unique(row + 1j * variance, return_index=True, return_inverse=True)
    log_weight = _log_weight(grid, grid.depth[row[first]], variance[first, None])
    cumulative = np.cumsum(np.exp(log_weight - log_weight.max(axis=1, keepdims=True)), axis=1)
    wanted = rng.random(num_rows) * cumulative[pair, -1]
    cell = np.minimum((cumulative[pair] < wanted[:, None]).sum(axis=1), FINE_STEPS - 1)
    optimum = grid.optimum[cell] + grid.step * (rng.random(num_rows) - 0.5)
    optimum[0] = np.mean(optimum[1:])
    depth, norm = _fit(size, rise(size.rates - optimum[:, None], np.ones(1), shape[:, None]))
    below = special.ndtr(-depth / sd)  # the depth is positive
    depth[1:] += (
        sd * special.ndtri(np.clip(below + (1 - below) * rng.random(num_rows), 1e-15, 1 - 1e-15))
    )[1:]
    curvature = depth / norm
    curvature = np.maximum(
        curvature, LEAST_CURVATURE_SHARE * max(float(curvature[0]), LEAST_NOISE_NATS)
    )
    side = (optimum > size.rates[-1]).astype(np.int64) - (optimum < size.rates[0]).astype(np.int64)
    fitted = rise(size.rates - optimum[0], curvature[0], shape[0])
    return optimum, curvature, side, float(size.level - size.balance @ fitted)
