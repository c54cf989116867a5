"""Weights follow held-out errors, and the laws' common error is as large as they were."""

import numpy as np
import pytest
from scaling_fits.forecast.pooling import beyond, learn, reach, rest
from scaling_fits.laws.lack_of_fit import Structure

from scaling_fits.laws.forms import SHAPES

FORMS = ("chinchilla", "coupled", "power")
SMOOTH = Structure(coefficients=np.zeros((3, 6)), noise_sd=0.002, num_runs=60)
RATIOS = np.array([1.5, 3.0, 10.0])


def _learn(errors, ratios=RATIOS, structure=SMOOTH, seed=0):
    return learn(FORMS, np.array(errors), ratios, structure, num_draws=2000, seed=seed)


def test_without_hindcasts_the_prior_speaks():
    pool = learn(FORMS, np.empty((0, 3)), np.empty(0), SMOOTH, num_draws=2000, seed=0)
    mass = np.array([SHAPES[form].prior_mass for form in FORMS])
    assert pool.weights == pytest.approx(mass / mass.sum(), abs=0.03)
    assert np.median(pool.misfit_draws) < 0.002


def test_the_law_that_predicts_takes_the_weight():
    """Errors of the others are far beyond what kappa may be if the first is right."""
    scale = reach(RATIOS)[:, None]
    assert _learn(scale * [0.0, 0.05, 0.07]).weights[0] > 0.7
    assert _learn(scale * [0.05, 0.0, 0.07]).weights[1] > 0.7


def test_the_truth_between_two_laws_is_found():
    """The floor is wrong by +2, no floor by -4: a third of the weight on the latter is right."""
    pool = _learn(reach(RATIOS)[:, None] * [0.02, 0.02, -0.04])
    assert pool.weights[2] == pytest.approx(1 / 3, abs=0.05)
    assert np.median(pool.misfit_draws) < 0.005


def test_errors_that_all_point_one_way_are_a_drift_shrunk_towards_none():
    """Predictions 3 % too high at reach 1, whatever the law: some of that is subtracted, and never more than all."""
    errors = reach(RATIOS)[:, None] * [0.03, 0.03, 0.03]
    one, three = _learn(errors[2:], RATIOS[2:]).drift, _learn(errors).drift
    assert 0 < one.applied < three.applied < 0.03
    assert one.applied < 0.3 * 0.03, "one cut moves it little"
    assert three.mean == pytest.approx(three.applied)
    pool = _learn(errors)
    assert pool.drift_draws.mean() == pytest.approx(three.applied, rel=0.1)
    assert 0.5 < pool.drift_draws.std() / three.sd < 1.5
    mixed = _learn(reach(RATIOS)[:, None] * [0.03, 0.03, 0.03] * np.array([[1], [-1], [0.1]])).drift
    assert abs(mixed.mean) < 0.3 * three.mean


def test_larger_runs_that_do_worse_are_no_reason_to_expect_it_of_the_next():
    better, worse = (_learn(sign * reach(RATIOS)[:, None] * [0.03, 0.03, 0.03]) for sign in (1, -1))
    assert worse.drift.mean < 0 == worse.drift.applied
    assert np.median(worse.misfit_draws) > np.median(better.misfit_draws)


def test_a_drift_begins_where_the_fitted_runs_end_and_leaves_the_reach_whole():
    assert beyond(np.array([0.01, 1.0])).tolist() == [0.0, 0.0]
    ratios = np.geomspace(1.0, 1e6, 200)
    assert np.abs(np.diff(beyond(1 + np.geomspace(1e-9, 1e-3, 200)))).max() < 1e-3
    assert (rest(reach(ratios), beyond(ratios)) > 0.9 * reach(ratios)).all()
