"""Exact derivatives, and searches that end where a much heavier one does."""

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, ladder

from scaling_fits import law, solver


def _points(seed=0, noise=0.01):
    table = ladder(CHINCHILLA, np.random.default_rng(seed), noise)
    return law.centred_points(table)[0]


def test_derivatives_match_central_differences():
    rng = np.random.default_rng(0)
    points = _points()
    theta = np.array([0.2, -0.5, -0.8, 0.4, 0.3, 0.7]) + 0.05 * rng.normal(size=(4, 6))
    weight = rng.uniform(0.5, 2, size=(4, 12))
    delta = 10.0  # smooth: differences across Huber's kinks prove nothing
    _, gradient, hessian = solver.derivatives(theta, points, weight, delta)
    step = 1e-5
    for i in range(6):
        up, down = theta.copy(), theta.copy()
        up[:, i] += step
        down[:, i] -= step
        slope = (solver.objective(up, points, weight, delta) - solver.objective(down, points, weight, delta)) / (
            2 * step
        )
        assert gradient[:, i] == pytest.approx(slope, rel=1e-6, abs=1e-8)
        curve = (
            solver.derivatives(up, points, weight, delta)[1] - solver.derivatives(down, points, weight, delta)[1]
        ) / (2 * step)
        assert hessian[:, i] == pytest.approx(curve, rel=1e-5, abs=1e-7)


def test_gradient_of_the_linear_part_of_huber():
    points = _points()
    theta = np.array([[0.5, 0.5, 0.5, 0.4, 0.3, 1.0]])  # every residual far beyond delta
    weight = np.ones((1, 12))
    f, gradient, _ = solver.derivatives(theta, points, weight)
    nudged = theta + np.array([[1e-6, 0, 0, 0, 0, 0]])
    assert (solver.objective(nudged, points, weight)[0] - f[0]) / 1e-6 == pytest.approx(gradient[0, 0], rel=1e-4)


@pytest.mark.parametrize("dim", [5, 6])
def test_search_ends_where_a_heavier_one_does(dim):
    for seed in range(3):
        points = _points(seed)
        weight = np.ones(12)
        coupled = dim == 6
        light = solver.polish_best(
            solver.grid_starts(points, weight, coupled=coupled, num_starts=12), points, weight, dim=dim
        )
        many = solver.grid_starts(points, weight, coupled=coupled, num_starts=60)
        heavy = solver.polish(many, points, np.ones((len(many), 12)), dim=dim, max_steps=1000)
        assert light.objective.min() <= heavy.objective.min() * (1 + 1e-3)


def test_a_lone_start_would_not_do():
    """The guard's reason: one search from one plausible point may end far above the optimum."""
    points = _points(1)
    starts = solver.grid_starts(points, np.ones(12), coupled=False, num_starts=60)
    found = solver.polish(starts, points, np.ones((len(starts), 12)), dim=5, max_steps=60)
    assert found.objective.max() > 1.05 * found.objective.min()


def test_bounds_hold():
    points = _points()
    wild = np.array([[50.0, 0.0, 0.0, 99.0, -5.0, 1.0]])
    found = solver.polish(wild, points, np.ones((1, 12)), dim=5)
    assert (found.theta >= points.lower - 1e-12).all()
    assert (found.theta <= points.upper + 1e-12).all()
    assert found.theta[0, 5] == 1.0
