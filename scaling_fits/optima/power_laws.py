"""Fits of power laws through a few estimated points: value = G * x1^a1 * x2^a2.

Each point, such as the minimum of a fitted basin, has a log with a variance of its own. The
regression adds a scatter of the points about the law, as large as the residuals require (Paule and
Mandel 1982, J. Res. NBS 87:377). Intervals use Student quantiles of the residual degrees of freedom
(as Knapp and Hartung 2003, Statistics in Medicine 22:2693), because a bootstrap over 3 to 12 points
gives too narrow intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from forerun._proxies.core.canon import Json
from forerun._proxies.core.errors import InputError
from forerun._scaling_fits.laws.law import compute_finite_exp
from forerun._scaling_fits.laws.solver import Bools, Floats, bisect

Pair = tuple[float, float]

# Smallest variance of a log: points known to 1e-8 are exact, and weights stay finite
_MIN_VARIANCE = 1e-16


class PowerLawError(InputError):
    """The inputs do not determine the exponents of a power law."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerLaw:
    """A power law with its uncertainty: log value = intercept + sum of exponents * (log input -
    centre).
    """

    inputs: tuple[str, ...]
    """Names of the inputs, in the order of `exponents`."""
    centre: tuple[float, ...]
    """Mean log of each input."""
    intercept: float
    exponents: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    """Covariance of (intercept, exponents), including the scatter."""
    degrees_of_freedom: int
    """Number of points beyond the number of coefficients; at least 1."""
    scatter: float
    """Standard deviation of the points' logs about the law, beyond their own noise."""

    @property
    def coefficient(self) -> float:
        """G, the value at inputs of 1."""
        return math.exp(
            self.intercept - sum(a * c for a, c in zip(self.exponents, self.centre, strict=True))
        )

    def compute_exponent_interval(self, index: int, level: float) -> tuple[float, float]:
        """Return the central interval of one exponent."""
        half = self._compute_student_quantile(level) * math.sqrt(
            self.covariance[index + 1][index + 1]
        )
        return self.exponents[index] - half, self.exponents[index] + half

    def compute_coefficient_interval(self, level: float) -> tuple[float, float]:
        """Return the central interval of G. If inputs of 1 are far from the points, the interval is
        wide, and G is strongly correlated with the exponents.
        """
        log, sd = self._predict_log(np.zeros(len(self.inputs)))
        half = self._compute_student_quantile(level) * sd
        return compute_finite_exp(log - half), compute_finite_exp(log + half)

    def compute_value(self, *values: float) -> float:
        """Return the law's value at these inputs."""
        return compute_finite_exp(self._predict_log(np.log(values))[0])

    def compute_interval_at(self, *values: float, level: float) -> tuple[float, float]:
        """Return the central interval of the true value at these inputs, from the law's error and
        the scatter about it.
        """
        log, sd = self._predict_log(np.log(values))
        half = self._compute_student_quantile(level) * math.hypot(sd, self.scatter)
        return compute_finite_exp(log - half), compute_finite_exp(log + half)

    def _predict_log(self, logs: Floats) -> tuple[float, float]:
        row = np.concatenate([[1.0], logs - np.array(self.centre)])
        mean = float(row @ np.array([self.intercept, *self.exponents]))
        return mean, math.sqrt(max(float(row @ np.array(self.covariance) @ row), 0.0))

    def _compute_student_quantile(self, level: float) -> float:
        return float(stdtrit(self.degrees_of_freedom, (1 + level) / 2))


def summarize_law(
    law: PowerLaw | None, names: Sequence[str], level: float | None
) -> tuple[dict[str, Json], dict[str, Json]]:
    """Return the coefficient and the exponents of a law by `names`, and their intervals; null for
    unknown numbers.
    """
    values: dict[str, Json] = dict.fromkeys(names)
    intervals: dict[str, Json] = dict.fromkeys(names)
    if law is not None:
        values.update(zip(names, (law.coefficient, *law.exponents), strict=True))
        if level is not None:
            ends = (
                law.compute_coefficient_interval(level),
                *(law.compute_exponent_interval(i, level) for i in range(len(law.inputs))),
            )
            intervals.update(zip(names, map(list, ends), strict=True))
    return values, intervals


def fit_power_law(inputs: dict[str, Floats], log_values: Floats, log_variances: Floats) -> PowerLaw:
    """Fit a law through more points than it has coefficients.

    Args:
        inputs: Positive inputs (R,) by name.
        log_values: Logs of the values of the points (R,).
        log_variances: Variances of these logs (R,).

    Raises:
        PowerLawError: The inputs lie on one line (one size, a fixed ratio).
    """
    logs = np.log(np.stack(list(inputs.values()), axis=1))
    centre = logs.mean(axis=0)
    if np.linalg.svd(logs - centre, compute_uv=False)[-1] < 1e-6:
        raise PowerLawError(
            f"{' and '.join(inputs)} do not vary independently: their exponents are not identified"
        )
    design = np.concatenate([np.ones((len(logs), 1)), logs - centre], axis=1)
    variances = np.maximum(log_variances, _MIN_VARIANCE)
    freedom = len(logs) - len(inputs) - 1
    tau_squared = _estimate_scatter(design, log_values, variances, freedom)
    weights = 1 / (variances + tau_squared)
    theta, _, covariance = _solve_weighted(design, log_values, weights)
    return PowerLaw(
        inputs=tuple(inputs),
        centre=tuple(centre.tolist()),
        intercept=float(theta[0]),
        exponents=tuple(theta[1:].tolist()),
        covariance=tuple(tuple(row) for row in covariance.tolist()),
        degrees_of_freedom=freedom,
        scatter=math.sqrt(tau_squared),
    )


def _solve_weighted(
    design: Floats, values: Floats, weights: Floats
) -> tuple[Floats, float, Floats]:
    """Solve weighted least squares: return the coefficients, the weighted sum of squares, and the
    inverse of the normal matrix.
    """
    root = np.sqrt(weights)
    theta = np.asarray(
        np.linalg.lstsq(design * root[:, None], values * root, rcond=None)[0], dtype=np.float64
    )
    residuals = values - design @ theta
    inverse = np.asarray(np.linalg.inv(design.T @ (design * weights[:, None])), dtype=np.float64)
    return theta, float((weights * residuals**2).sum()), inverse


def _estimate_scatter(design: Floats, values: Floats, variances: Floats, freedom: int) -> float:
    """Estimate the squared scatter at which the weighted residuals have their expected size; 0 if
    the residuals are smaller than expected even without scatter.
    """

    def is_too_small(tau_squared: Floats | float) -> Bools:
        _, squares, _ = _solve_weighted(design, values, 1 / (variances + tau_squared))
        return np.asarray(squares > freedom)

    if not is_too_small(0.0):
        return 0.0
    high = float(np.var(values)) + float(variances.max())
    while is_too_small(high):
        high *= 2
    return float(bisect(is_too_small, 0.0, high, 80)[1])
