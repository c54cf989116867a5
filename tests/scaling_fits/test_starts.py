"""The grid's cells are filled by the best A and B, and its best cells are apart."""

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, TRUTHS, ladder

from scaling_fits.laws import law, search, solver
from scaling_fits.laws.forms import SHAPES


@pytest.mark.parametrize("form", list(SHAPES))
def test_starts_obey_their_form_and_come_best_first(form):
    points, _ = law.centred_points(ladder(TRUTHS[form]))
    shape = SHAPES[form]
    found = search.grid_starts(points, np.ones(12), shape, 10)
    assert np.array_equal(shape.space.theta(found[:, shape.space.first]), found)
    scores = solver.objective(found, points, np.ones((1, 12)))
    assert (np.diff(scores) >= 0).all()
    slopes = np.log(found[:, 3:5] * found[:, 5:])
    gaps = np.abs(slopes[:, None] - slopes[None]).max(axis=2) + np.eye(len(found))
    assert gaps.min() > 0.25


def test_a_and_b_are_the_best_for_their_cell():
    points, _ = law.centred_points(ladder(CHINCHILLA))
    weight = np.linspace(0.5, 2, 12)
    for theta in search.grid_starts(points, weight, SHAPES["chinchilla"], 5):

        def misfit(moved):
            share = np.exp(solver.log_loss(moved[None], points.n, points.d)[0] - points.y) - 1
            return (weight * share**2).sum()

        for index in (1, 2):
            for step in (-1e-3, 1e-3):
                assert misfit(theta) <= misfit(theta + step * np.eye(6)[index]) * (1 + 1e-9)


def test_a_term_the_runs_do_not_want_is_next_to_nothing_and_not_negative():
    """Where more parameters do harm no A above zero helps."""
    table = ladder(CHINCHILLA)
    points, _ = law.centred_points(table)
    rising = solver.Points(n=-points.n, d=points.d, y=points.y)
    found = search.grid_starts(rising, np.ones(12), SHAPES["chinchilla"], 12)
    assert np.isfinite(found).all()
    assert (found[:, 1] < -10).any()
