"""Searches end where much heavier ones do, within their bounds."""

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, ladder

from scaling_fits.laws import law, search
from scaling_fits.laws.forms import SHAPES


def _points(seed=0, noise=0.01, num_runs=12):
    table = ladder(CHINCHILLA, np.random.default_rng(seed), noise, num_runs)
    return law.center_points(table)[0]


@pytest.mark.parametrize("form", ["coupled", "power"])
def test_search_ends_where_a_heavier_one_does(form):
    shape, weight, points = SHAPES[form], np.ones(12), _points()
    light = search.best_of(search.grid_starts(points, weight, shape, 12), points, weight, shape)
    many = search.grid_starts(points, weight, shape, 60)
    heavy = search.polish(many, points, np.ones((len(many), 12)), shape)
    assert light.objective.min() <= heavy.objective.min() * (1 + 1e-6)
    assert light.converged[light.objective.argmin()]


@pytest.mark.parametrize("form", ["coupled", "power"])
def test_bounds_hold(form):
    points, shape = _points(), SHAPES[form]
    wild = shape.theta(np.array([[50.0, 0.0, 0.0, 99.0, -5.0, 9.0]])[:, shape.first])
    found = search.polish(wild, points, np.ones((1, 12)), shape)
    lower, upper = search.bounds(shape, points)
    free = found.theta[:, shape.first]
    assert (free >= lower - 1e-12).all()
    assert (free <= upper + 1e-12).all()
    assert np.array_equal(shape.theta(free), found.theta)
