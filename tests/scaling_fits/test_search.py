"""Searches end where much heavier ones do, within their bounds, and refits help each other."""

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, COUPLED, ladder

from scaling_fits import law, search, solver, starts
from scaling_fits.forms import SHAPES


def _points(seed=0, noise=0.01, num_runs=12):
    table = ladder(CHINCHILLA, np.random.default_rng(seed), noise, num_runs)
    return law.centred_points(table)[0]


def _weights(num, num_runs, seed=1):
    return np.random.default_rng(seed).dirichlet(np.ones(num_runs), size=num) * num_runs


@pytest.mark.parametrize("form", list(SHAPES))
def test_search_ends_where_a_heavier_one_does(form):
    shape, weight = SHAPES[form], np.ones(12)
    for seed in range(3):
        points = _points(seed)
        light = search.best_of(starts.grid_starts(points, weight, shape, 12), points, weight, shape)
        many = starts.grid_starts(points, weight, shape, 60)
        heavy = search.polish(many, points, np.ones((len(many), 12)), shape)
        assert light.objective.min() <= heavy.objective.min() * (1 + 1e-6)
        assert light.converged[light.objective.argmin()]


def test_a_lone_start_would_not_do():
    """The guard's reason: one search from one plausible point may end above the optimum by more than the bar."""
    points, shape = _points(1), SHAPES["kaplan"]
    many = starts.grid_starts(points, np.ones(12), shape, 40)
    found = search.polish(many, points, np.ones((len(many), 12)), shape)
    assert found.objective.max() > 1.003 * found.objective.min()


@pytest.mark.parametrize("form", list(SHAPES))
def test_bounds_hold(form):
    points, shape = _points(), SHAPES[form]
    wild = shape.space.theta(np.array([[50.0, 0.0, 0.0, 99.0, -5.0, 9.0]])[:, shape.space.first])
    found = search.polish(wild, points, np.ones((1, 12)), shape)
    lower, upper = search.bounds(shape, points)
    free = found.theta[:, shape.space.first]
    assert (free >= lower - 1e-12).all()
    assert (free <= upper + 1e-12).all()
    assert np.array_equal(shape.space.theta(free), found.theta)


def _reference(points, weight, shape, near):
    """Each problem alone from very many starts."""
    best = np.full(len(weight), np.inf)
    many = np.concatenate([near, starts.grid_starts(points, np.ones(points.n.size), shape, 16)])
    for index in range(len(weight)):
        found = search.polish(many, points, np.repeat(weight[index : index + 1], len(many), axis=0), shape)
        best[index] = found.objective.min()
    return best


@pytest.mark.parametrize("form", ["chinchilla", "coupled"])
def test_refits_reach_what_each_alone_reaches_from_many_starts(form):
    table = ladder(COUPLED, np.random.default_rng(3), 0.01, 11)
    points, shape = law.centred_points(table)[0], SHAPES[form]
    weight = _weights(16, 11)
    pool = starts.grid_starts(points, np.ones(11), shape, 12)
    found = search.refits(pool, points, weight, shape, 3)
    best = np.minimum(_reference(points, weight, shape, found.theta[::4]), found.objective)
    assert (found.objective <= best * (1 + 1e-3) + 1e-10 * 11).sum() >= 15


def test_neighbours_help(monkeypatch):
    """The rounds of starts from neighbours are needed: without them more refits stay in a worse basin."""
    table = ladder(
        CHINCHILLA, np.random.default_rng(17), 0.01, 17, np.geomspace(1e6, 1e9, 8), np.geomspace(1e7, 1e10, 8)
    )
    points, shape = law.centred_points(table)[0], SHAPES["kaplan"]
    weight = _weights(96, 17)
    pool = starts.grid_starts(points, np.ones(17), shape, 2)
    helped = search.refits(pool, points, weight, shape, 1).objective
    monkeypatch.setattr(search, "_TURNS", 0)
    alone = search.refits(pool, points, weight, shape, 1).objective
    assert (helped <= alone).all()
    assert (alone > helped * (1 + 1e-3)).mean() > 0.02


def test_gain_left_tells_an_optimum_from_a_point_beside_it():
    points, shape, weight = _points(), SHAPES["chinchilla"], np.ones((1, 12))
    found = search.best_of(starts.grid_starts(points, weight[0], shape, 12), points, weight[0], shape)
    best = found.theta[[found.objective.argmin()]]
    assert search.gain_left(best, points, weight, shape)[0] < 1e-9
    assert search.gain_left(best + 0.01 * np.eye(6)[[1]], points, weight, shape)[0] > 1e-4


def test_condition_sees_a_term_that_two_sizes_cannot_pin_down():
    theta = np.array([-0.3, -1.5, -1.5, 0.34, 0.37, 1.0])
    points = _points()
    two = points.n > 0
    flat = solver.Points(n=np.where(two, 1.0, -1.0), d=points.d, y=points.y)
    assert search.condition(theta, points, SHAPES["chinchilla"]) < 1e3
    assert search.condition(theta, flat, SHAPES["chinchilla"]) > 1e6
