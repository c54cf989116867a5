"""Exact derivatives, in all coordinates and in those a form frees."""

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, ladder

from scaling_fits.laws import law, solver
from scaling_fits.laws.forms import SHAPES


def _points(seed=0, noise=0.01):
    table = ladder(CHINCHILLA, np.random.default_rng(seed), noise)
    return law.center_points(table)[0]


@pytest.mark.parametrize("form", list(SHAPES))
def test_derivatives_in_the_free_coordinates(form):
    """Fixed coordinates drop out and tied ones add up, as differences along the free ones show."""
    points, rng, space = _points(), np.random.default_rng(2), SHAPES[form]
    theta = np.array([-0.4, -0.9, -1.1, 0.8, 0.7, 0.6])
    free = theta[space.first] + 0.05 * rng.normal(size=(3, space.dim))
    weight = rng.uniform(0.5, 2, size=(3, 12))
    _, gradient, hessian = solver.derivatives(
        space.theta(free), points, weight, 10.0, plain=space.plain
    )
    step = 1e-5
    for i in range(space.dim):
        moved = free[None] + step * np.array([1, -1])[:, None, None] * np.eye(space.dim)[i]
        ends = [
            solver.derivatives(space.theta(at), points, weight, 10.0, plain=space.plain)
            for at in moved
        ]
        slope, curve = (
            (ends[0][0] - ends[1][0]) / (2 * step),
            (ends[0][1] - ends[1][1]) / (2 * step),
        )
        assert space.gradient(gradient)[:, i] == pytest.approx(slope, rel=1e-5, abs=1e-7)
        assert space.hessian(hessian)[:, i] == pytest.approx(
            space.gradient(curve), rel=1e-4, abs=1e-6
        )
