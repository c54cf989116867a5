"""Power laws through a few estimated points: value = G * x1^a1 * x2^a2, and loss = E + K * C^-g.

Each point has a log and that log's own variance (of a valley's minimum, say). The regression adds a scatter of the
points about the law, as large as the residuals ask for (Paule and Mandel 1982, J. Res. NBS 87:377), and uses Student
quantiles of the residual degrees of freedom (as Knapp and Hartung 2003, Statistics in Medicine 22:2693): with 3 to 12
points a bootstrap over points is too narrow.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from scaling_fits.laws.law import exp_finite
from scaling_fits.laws.solver import bisected

Floats = NDArray[np.float64]

_EXPONENTS_G = np.exp(np.linspace(math.log(0.005), math.log(1.5), 41))
_LEAST_VARIANCE = 1e-16  # of a log: points known to 1e-8 are exact, and weights stay finite
MOST_AT_ZERO = 0.05
"""Share of refits whose floor is 0, above which a floor is not told from none."""


class PowerLawError(ValueError):
    """Points or inputs that no power law can take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerLaw:
    """log value = intercept + sum of exponents * (log input - centre), with what is not known about it."""

    inputs: tuple[str, ...]
    """Names, in the order of `exponents`."""
    centre: tuple[float, ...]
    """Mean log of each input."""
    intercept: float
    exponents: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    """Of (intercept, exponents), the scatter within."""
    degrees_of_freedom: int
    """Points beyond the number of coefficients; at least 1."""
    scatter: float
    """Sd of the points' logs about the law, beyond their own noise."""

    @property
    def coefficient(self) -> float:
        """G, the value at inputs of 1."""
        return math.exp(self.intercept - sum(a * c for a, c in zip(self.exponents, self.centre, strict=True)))

    def exponent_interval(self, index: int, level: float) -> tuple[float, float]:
        """Central interval of one exponent."""
        half = self._student(level) * math.sqrt(self.covariance[index + 1][index + 1])
        return self.exponents[index] - half, self.exponents[index] + half

    def coefficient_interval(self, level: float) -> tuple[float, float]:
        """Central interval of G; far outside the points it is wide, and strongly tied to the exponents."""
        log, sd = self._log_at(np.zeros(len(self.inputs)))
        half = self._student(level) * sd
        return exp_finite(log - half), exp_finite(log + half)

    def at(self, *values: float) -> float:
        """The law's value at these inputs."""
        return exp_finite(self._log_at(np.log(values))[0])

    def interval_at(self, *values: float, level: float) -> tuple[float, float]:
        """Central interval of the true value at these inputs: the law's error and the scatter about it."""
        log, sd = self._log_at(np.log(values))
        half = self._student(level) * math.hypot(sd, self.scatter)
        return exp_finite(log - half), exp_finite(log + half)

    def _log_at(self, logs: Floats) -> tuple[float, float]:
        row = np.concatenate([[1.0], logs - np.array(self.centre)])
        mean = float(row @ np.array([self.intercept, *self.exponents]))
        return mean, math.sqrt(max(float(row @ np.array(self.covariance) @ row), 0.0))

    def _student(self, level: float) -> float:
        return float(stdtrit(self.degrees_of_freedom, (1 + level) / 2))


def fit_power_law(inputs: dict[str, Floats], log_values: Floats, log_variances: Floats) -> PowerLaw:
    """The law through points (R,) at positive `inputs` (R,) by name.

    Raises:
        PowerLawError: no more points than coefficients, or inputs that lie on one line (one size, a fixed ratio).
    """
    num_points, size = len(log_values), len(inputs) + 1
    if num_points <= size:
        raise PowerLawError(f"{num_points} points for {size} coefficients: at least {size + 1} are wanted")
    logs = np.log(np.stack(list(inputs.values()), axis=1)) if inputs else np.empty((num_points, 0))
    centre = logs.mean(axis=0)
    design = np.concatenate([np.ones((num_points, 1)), logs - centre], axis=1)
    if inputs and np.linalg.svd(logs - centre, compute_uv=False)[-1] < 1e-6:
        raise PowerLawError(f"{' and '.join(inputs)} do not vary apart: their exponents are not identified")
    variances = np.maximum(log_variances, _LEAST_VARIANCE)
    freedom = num_points - size
    tau_squared = _paule_mandel(design, log_values, variances, freedom)
    weights = 1 / (variances + tau_squared)
    theta, _, covariance = _weighted(design, log_values, weights)
    return PowerLaw(
        inputs=tuple(inputs),
        centre=tuple(centre.tolist()),
        intercept=float(theta[0]),
        exponents=tuple(theta[1:].tolist()),
        covariance=tuple(tuple(row) for row in covariance.tolist()),
        degrees_of_freedom=freedom,
        scatter=math.sqrt(tau_squared),
    )


def _weighted(design: Floats, values: Floats, weights: Floats) -> tuple[Floats, float, Floats]:
    """Weighted least squares: coefficients, weighted sum of squares, inverse of the normal matrix."""
    root = np.sqrt(weights)
    theta = np.asarray(np.linalg.lstsq(design * root[:, None], values * root, rcond=None)[0], dtype=np.float64)
    residuals = values - design @ theta
    inverse = np.asarray(np.linalg.inv(design.T @ (design * weights[:, None])), dtype=np.float64)
    return theta, float((weights * residuals**2).sum()), inverse


def _paule_mandel(design: Floats, values: Floats, variances: Floats, freedom: int) -> float:
    """The scatter squared at which the weighted residuals are as large as they should be; 0 if they are smaller."""

    def too_small(tau_squared: Floats | float) -> NDArray[np.bool_]:
        return np.asarray(_weighted(design, values, 1 / (variances + tau_squared))[1] > freedom)

    if not too_small(0.0):
        return 0.0
    high = float(np.var(values)) + float(variances.max())
    while too_small(high):
        high *= 2
    return float(bisected(too_small, 0.0, high, 80)[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class FloorLaw:
    """loss = E + K * (C / C0)^-g in nats, C0 the points' geometric mean; E = 0 where no floor is identified."""

    centre_flops: float
    floor_nats: float
    scale_nats: float
    """K, the part above the floor at C0."""
    exponent: float
    has_floor: bool
    """Whether the points tell the floor from 0; if not this is a pure power law, which falls for ever."""
    draws: tuple[tuple[float, float, float], ...]
    """Refits (E, K, g), E >= 0: they keep a floor even where the law above has none."""
    log_noise_sd: float
    """Of one run about a valley, in log loss."""

    def at(self, flops: float) -> float:
        """Loss in nats at the best size for `flops`."""
        return self.floor_nats + self.scale_nats * math.exp(-self.exponent * math.log(flops / self.centre_flops))

    def interval_at(self, flops: float, level: float, seed: int) -> tuple[float, float] | None:
        """Central interval of the loss of one new run there; None without refits."""
        if not self.draws:
            return None
        floor, scale, exponent = np.array(self.draws).T
        loss = floor + scale * (flops / self.centre_flops) ** -exponent
        noise = np.random.default_rng([seed, 1]).standard_normal((8, len(loss))) * self.log_noise_sd
        low, high = np.quantile(loss * np.exp(noise), [(1 - level) / 2, (1 + level) / 2])
        return min(float(low), self.at(flops)), max(float(high), self.at(flops))

    @property
    def natural(self) -> tuple[float, float, float]:
        """(E, K, g) of E + K * C^-g, C in FLOPs."""
        return self.floor_nats, self.scale_nats * self.centre_flops**self.exponent, self.exponent

    def intervals(self, level: float) -> dict[str, tuple[float, float]] | None:
        """Central intervals of `natural` by name; None without refits."""
        if not self.draws:
            return None
        draws = np.array(self.draws)
        draws[:, 1] *= self.centre_flops ** draws[:, 2]
        low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0).tolist()
        return dict(zip(("E", "K", "g"), zip(low, high, strict=True), strict=True))


def recentred(law: FloorLaw, centre_flops: float) -> FloorLaw:
    """The same law, its K taken at other FLOPs."""
    shift = math.log(centre_flops / law.centre_flops)
    draws = tuple((floor, scale * math.exp(-exponent * shift), exponent) for floor, scale, exponent in law.draws)
    scale = law.scale_nats * math.exp(-law.exponent * shift)
    return dataclasses.replace(law, centre_flops=centre_flops, scale_nats=scale, draws=draws)


def fit_floor_law(
    flops: Floats, loss: Floats, log_variances: Floats, *, num_draws: int, seed: int, log_noise_sd: float
) -> FloorLaw:
    """The frontier's loss through at least 3 points (R,); a floor is kept where at least 4 identify it.

    Refits draw each point about the law with its own variance, scaled up by what the law leaves unexplained.

    Raises:
        PowerLawError: fewer than 3 points.
    """
    if len(flops) < 3:
        raise PowerLawError(f"{len(flops)} points of the frontier's loss: at least 3 are wanted")
    logs = np.log(flops)
    x = logs - logs.mean()
    variances = np.maximum(log_variances * loss**2, (1e-8 * loss) ** 2)
    best = _fit_floor(x, loss[None, :], variances)
    fitted = best[0, 0] + best[0, 1] * np.exp(-best[0, 2] * x)
    unexplained = float(((loss - fitted) ** 2 / variances).sum()) / max(len(loss) - 3, 1)
    rng = np.random.default_rng([seed, 2])
    noise = rng.standard_normal((num_draws, len(loss))) * np.sqrt(variances * max(1.0, unexplained))
    if len(loss) > 3:
        noise *= np.sqrt((len(loss) - 3) / rng.chisquare(len(loss) - 3, size=(num_draws, 1)))
    draws = _fit_floor(x, np.maximum(fitted + noise, 1e-3 * loss), variances) if num_draws else np.empty((0, 3))
    at_zero = float((draws[:, 0] <= 0).mean()) if num_draws else float(best[0, 0] <= 0)
    has_floor = len(loss) >= 4 and at_zero <= MOST_AT_ZERO
    if not has_floor:
        slope, level = np.polyfit(x, np.log(loss), 1, w=loss / np.sqrt(variances))
        best = np.array([[0.0, math.exp(level), -slope]])
    return FloorLaw(
        centre_flops=math.exp(float(logs.mean())),
        floor_nats=float(best[0, 0]),
        scale_nats=float(best[0, 1]),
        exponent=float(best[0, 2]),
        has_floor=has_floor,
        draws=tuple((float(e), float(k), float(g)) for e, k, g in draws),
        log_noise_sd=log_noise_sd,
    )


def _fit_floor(x: Floats, loss_DR: Floats, variances: Floats) -> Floats:
    """Rows (E, K, g) of the best weighted fit of each row of losses: a grid over g, with E and K profiled out."""
    weights = 1 / variances
    objective = np.stack([_profile(x, loss_DR, weights, g)[2] for g in _EXPONENTS_G])
    exponents = _EXPONENTS_G[objective.argmin(axis=0)]
    step = math.log(_EXPONENTS_G[1] / _EXPONENTS_G[0])
    for _ in range(4):  # the profile is smooth: finer grids about its best cell, to 0.05 % of g
        tries = exponents * np.exp(step * np.linspace(-1, 1, 9))[:, None]
        objective = np.stack([_profile(x, loss_DR, weights, g)[2] for g in tries])
        exponents = np.take_along_axis(tries, objective.argmin(axis=0)[None, :], axis=0)[0]
        step /= 4
    floor, scale, _ = _profile(x, loss_DR, weights, exponents)
    return np.stack([floor, scale, exponents], axis=1)


def _profile(x: Floats, loss_DR: Floats, weights: Floats, exponent: float | Floats) -> tuple[Floats, Floats, Floats]:
    """Best E >= 0 and K > 0 of each row at given exponents, and their weighted sum of squares."""
    z = np.exp(-np.multiply.outer(np.broadcast_to(exponent, len(loss_DR)), x))
    total, mean_z = weights.sum(), (z @ weights) / weights.sum()
    mean_y = (loss_DR @ weights) / total
    spread = (z - mean_z[:, None]) * weights
    scale = (spread * loss_DR).sum(axis=1) / (spread * z).sum(axis=1)
    floor = mean_y - scale * mean_z
    through_zero = ((z * weights) * loss_DR).sum(axis=1) / ((z * weights) * z).sum(axis=1)
    scale = np.where(floor < 0, through_zero, scale)
    floor = np.maximum(floor, 0.0)
    flat = scale <= 0  # a loss that does not fall: no law of this kind, and the grid turns to another exponent
    scale = np.where(flat, 1e-12, scale)
    squares = (weights * (loss_DR - floor[:, None] - scale[:, None] * z) ** 2).sum(axis=1)
    return floor, scale, np.where(flat, np.inf, squares)
