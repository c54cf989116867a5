"""Tests of the search for a law's parameters: a light search ends where a heavy one does, within
the bounds.
"""

import numpy as np
import pytest
from planted_ladders import make_centered_points

from forerun._scaling_fits.laws import search
from forerun._scaling_fits.laws.forms import FORMS


@pytest.mark.parametrize("form", ["coupled", "power"])
def test_light_search_ends_where_a_heavy_one_does(form):
    spec, weight, points = FORMS[form], np.ones(12), make_centered_points()
    light = search.polish_best(
        search.build_grid_starts(points, weight, spec, 12), points, weight, spec
    )
    many_starts = search.build_grid_starts(points, weight, spec, 60)
    heavy = search.polish(many_starts, points, np.ones((len(many_starts), 12)), spec)
    assert light.objective.min() <= heavy.objective.min() * (1 + 1e-6)
    assert light.converged[light.objective.argmin()]


@pytest.mark.parametrize("form", ["coupled", "power"])
def test_solutions_stay_within_the_bounds(form):
    points, spec = make_centered_points(), FORMS[form]
    far_start = spec.to_theta(
        np.array([[50.0, 0.0, 0.0, 99.0, -5.0, 9.0]])[:, spec.free_coordinates]
    )
    solutions = search.polish(far_start, points, np.ones((1, 12)), spec)
    lower, upper = spec.compute_bounds(points)
    free_parameters = solutions.theta[:, spec.free_coordinates]
    assert (free_parameters >= lower - 1e-12).all()
    assert (free_parameters <= upper + 1e-12).all()
    assert np.array_equal(spec.to_theta(free_parameters), solutions.theta)
