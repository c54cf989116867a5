"""Refits converge, are a function of their seed, and quantiles are weighted."""

import dataclasses

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, ladder

from scaling_fits.forecast import cloud
from scaling_fits.laws import law, search
from scaling_fits.laws.forms import SHAPES
from scaling_fits.laws.table import TRUNK


@pytest.fixture(scope="module")
def small():
    table = ladder(CHINCHILLA, np.random.default_rng(0), 0.01, 10)
    return table, law.fit_law(table, "chinchilla")


def test_refits_of_a_small_ladder_reach_the_optimum():
    """Nine in ten end within 1e-3 of the best that each alone finds from many starts."""
    table = ladder(CHINCHILLA, np.random.default_rng(12), 0.01, 12)
    fit = law.fit_law(table, "chinchilla")
    weights = np.random.default_rng(1).dirichlet(np.ones(12), size=30) * 12
    found = law.refits(table, fit, [weights])
    points, _ = law.centred_points(table)
    many = search.grid_starts(points, np.ones(12), SHAPES["chinchilla"], 8)
    every, starts = np.repeat(weights, len(many), axis=0), np.tile(many, (30, 1))
    alone = search.polish(starts, points, every, SHAPES["chinchilla"]).objective.reshape(30, -1).min(axis=1)
    assert (found.objective <= alone * (1 + 1e-3)).mean() >= 0.9
    assert found.converged.mean() >= 0.9


def test_small_samples_widen(small):
    _, fit = small
    many = dataclasses.replace(fit, num_effective_runs=10_000.0)
    assert cloud.small_sample_factor(fit, 0.9) == pytest.approx(2**0.5 * 2.015 / 1.645, rel=1e-3)
    assert cloud.small_sample_factor(many, 0.9) == pytest.approx(1.0, abs=2e-3)


def test_the_ends_of_a_mixture_are_solved_for(small):
    """One law, one draw: the interval is a normal's."""
    _, fit = small
    one = dataclasses.replace(fit, draws=fit.theta[None, :])
    draws = cloud.Cloud(weight_draws=np.ones((1, 1)), misfit_draws=np.array([0.003]), noise_draws=np.array([0.004]))
    n, d = np.array([4e6]), np.array([3e6])
    low, high = cloud.new_run_quantiles([one], draws, n, d, np.array([np.e / 1.25]), 0.0, 0.9)  # at reach 1
    centre = law.log_loss(fit.theta[None], n, d)[0]
    assert (high - centre) == pytest.approx(1.6449 * 0.005, rel=1e-3)
    assert (centre - low) == pytest.approx(1.6449 * 0.005, rel=1e-3)


def test_refits_that_fall_to_nothing_are_not_believed(small):
    """Half the refits say the loss is gone at 30 times the budget: the interval ends where no loss on record fell."""
    table, fit = small
    gone = fit.theta - np.array([20.0, 20.0, 20.0, 0, 0, 0])
    draws = np.stack([fit.theta, gone] * 20)
    half = dataclasses.replace(fit, draws=draws)
    still = cloud.Cloud(weight_draws=np.ones((40, 1)), misfit_draws=np.full(40, 1e-6), noise_draws=np.full(40, 1e-6))
    n, d, log_best = table.params.max()[None] * 5, table.tokens.max()[None] * 6, float(np.log(table.loss.min()))
    low, _ = cloud.new_run_quantiles([half], still, n, d, np.array([30.0]), log_best, 0.9)
    assert low == pytest.approx(log_best - 0.3 * np.log(1.25 * 30), abs=1e-3)


def test_the_law_without_floor_moves_the_level_of_a_budget_and_not_its_best_size():
    table = ladder(CHINCHILLA, np.random.default_rng(4), 0.01, 12)
    fits = [law.fit_law(table, form) for form in ("chinchilla", "power")]
    flops = 1e14
    sizes = np.geomspace(1e5, 1e8, 301)
    alone, falling, mixed = (
        cloud.pooled_log_loss(fits, weights, sizes, flops / 6 / sizes) for weights in ((1, 0), (0, 1), (0.6, 0.4))
    )
    shift = mixed - alone
    assert np.ptp(shift) < 1e-9
    assert 0 < shift[0] / (falling - alone)[alone.argmin()] < 1
    assert falling.argmin() != alone.argmin()


def test_runs_of_one_trunk_are_weighed_together_and_widen_what_their_noise_reaches(small):
    table, fit = small
    trunks = np.repeat(np.arange(5.0), 2)
    shared = dataclasses.replace(table, extra={TRUNK: trunks})
    each, together = (cloud._shares(one, 4000, np.random.default_rng(3)) for one in (table, shared))
    assert together.sum(axis=1) == pytest.approx(np.full(4000, 10.0))
    assert abs(np.corrcoef(each.T)[0, 1]) < 0.2 < np.corrcoef(together.T)[0, 1]
    assert np.corrcoef(together.T)[0, 2] < 0
    alone = dataclasses.replace(table, extra={TRUNK: np.arange(10.0)})
    assert np.array_equal(
        cloud._shares(alone, 50, np.random.default_rng(3)), cloud._shares(table, 50, np.random.default_rng(3))
    )

    def spread(one):
        found = cloud.with_draws(one, fit, 200, 0).draws
        return law.log_loss(found, np.array([1e8]), np.array([1e10])).std()

    assert spread(shared) > 1.1 * spread(table)
