"""A slow optimum to hold the solver's against: scipy's searches from random starts, on an objective written anew.

Shares no code with `scaling_fits`. The laws are written in their papers' terms and the gradient by the chain rule.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

Floats = NDArray[np.float64]

DELTA = 1e-3
# Free coordinates of each form among (log E, log A, log B, alpha, beta, k); the values of the others.
FREE = {
    "chinchilla": [0, 1, 2, 3, 4],
    "coupled": [0, 1, 2, 3, 4, 5],
    "power": [1, 2, 3, 4],
}
FIXED = {
    "chinchilla": [0, 0, 0, 0, 0, 1.0],
    "coupled": [0.0] * 6,
    "power": [-700, 0, 0, 0, 0, 1.0],
}
LEAST_K = {"chinchilla": 1.0, "coupled": 0.2, "power": 1.0}


def theta_of(x: Floats, form: str) -> Floats:
    """All six coordinates."""
    theta = np.array(FIXED[form], dtype=float)
    theta[FREE[form]] = x
    return theta


def value_and_slope(x: Floats, form: str, n: Floats, d: Floats, y: Floats, weight: Floats) -> tuple[float, Floats]:
    """The objective and its gradient in the free coordinates; n, d and y are logs."""
    e, a, b, alpha, beta, k = theta_of(x, form)
    u, v = a - alpha * n, b - beta * d
    m = np.logaddexp(u, v)
    z = np.logaddexp(e, k * m)
    residual = z - y
    size = np.abs(residual)
    f = (weight * np.where(size <= DELTA, residual**2 / 2, DELTA * (size - DELTA / 2))).sum()
    pull = weight * np.clip(residual, -DELTA, DELTA)
    p, q = np.exp(k * m - z), np.exp(u - m)
    by_u, by_v = pull * p * k * q, pull * p * k * (1 - q)
    full = np.array(
        [(pull * (1 - p)).sum(), by_u.sum(), by_v.sum(), -(by_u * n).sum(), -(by_v * d).sum(), (pull * p * m).sum()]
    )
    return float(f), full[FREE[form]]


def optimum(
    form: str, n: Floats, d: Floats, y: Floats, weight: Floats, num_starts: int, rng: np.random.Generator
) -> tuple[float, Floats]:
    """Lowest objective found and its theta: L-BFGS-B from every start, the five best polished. Logs, centred."""
    low = np.array([y.min() - 12, -100, -100, 1e-3, 1e-3, LEAST_K[form]])[FREE[form]]
    high = np.array([y.max() + 1, 100, 100, 10, 10, 5])[FREE[form]]
    box, ends = list(zip(low, high, strict=True)), []
    for _ in range(num_starts):
        k = rng.uniform(max(LEAST_K[form], 0.03), 1.5)
        inner = y.mean() / k + rng.normal(-1.0, 1.0, size=2)
        slopes = np.exp(rng.uniform(np.log(0.05), np.log(1.5), size=2))
        start = np.array([y.min() - rng.exponential(0.5), *inner, *slopes, k])[FREE[form]]
        scale = DELTA * weight.sum()

        def scaled(x: Floats, scale: float = scale) -> tuple[float, Floats]:
            f, g = value_and_slope(x, form, n, d, y, weight)
            return f / scale, g / scale

        found = minimize(scaled, np.clip(start, low, high), jac=True, method="L-BFGS-B", bounds=box,
                         options={"maxiter": 2000, "ftol": 1e-15, "gtol": 1e-10, "maxcor": 30})  # fmt: skip
        ends.append((found.fun * scale, found.x))
    ends.sort(key=lambda end: end[0])
    polished = [_polished(x, form, n, d, y, weight, low, high) for _, x in ends[:5]]
    f, x = min(polished, key=lambda end: end[0])
    return f, theta_of(x, form)


def _polished(
    x: Floats, form: str, n: Floats, d: Floats, y: Floats, weight: Floats, low: Floats, high: Floats
) -> tuple[float, Floats]:
    """Alternate L-BFGS-B and a trust region with differences of the gradient until neither helps."""
    scale = DELTA * weight.sum()
    box = list(zip(low, high, strict=True))

    def value(x: Floats) -> float:
        return value_and_slope(x, form, n, d, y, weight)[0] / scale

    def slope(x: Floats) -> Floats:
        return value_and_slope(x, form, n, d, y, weight)[1] / scale

    def curve(x: Floats) -> Floats:
        steps = 1e-6 * np.eye(len(x))
        rows = np.array([(slope(x + step) - slope(x - step)) / 2e-6 for step in steps])
        return (rows + rows.T) / 2

    best = value(x)
    for _ in range(8):
        before = best
        for options in (
            {"method": "trust-exact", "jac": slope, "hess": curve, "options": {"gtol": 1e-13, "maxiter": 300}},
            {"method": "L-BFGS-B", "jac": slope, "bounds": box, "options": {"ftol": 1e-16, "gtol": 1e-13}},
        ):
            found = minimize(value, x, **options)
            if found.fun < best and (found.x >= low).all() and (found.x <= high).all():
                best, x = float(found.fun), found.x
        if best >= before * (1 - 1e-12):
            break
    return best * scale, x
