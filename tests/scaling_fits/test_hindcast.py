"""Held-out budgets weigh the laws and stretch the interval."""

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, COUPLED, ladder
from scaling_fits.forecast.hindcast import hindcast

from scaling_fits.forecast import cloud
from scaling_fits.laws import law
from scaling_fits.laws.forms import SHAPES
from scaling_fits.laws.table import from_columns
from scaling_fits.laws.weights import near_frontier


def _fits(table, draws=24):
    return tuple(cloud.with_draws(table, law.fit_law(table, form), draws, 0) for form in SHAPES)


def test_the_largest_rung_is_held_out_and_predicted():
    table = ladder(CHINCHILLA, np.random.default_rng(0), 0.005)
    learned = hindcast(table, _fits(table), near=False, num_draws=24, level=0.9, seed=0)
    backtest = learned.backtest
    assert [(run.params, run.tokens) for run in backtest.runs] == [(pytest.approx(1e6), 8e5)]
    assert backtest.num_fitted == 11
    assert backtest.extrapolation == pytest.approx(8 / 2.8, rel=0.2)
    assert backtest.largest_error < 0.02
    assert backtest.num_covered in (0, 1)
    assert sum(learned.pool.weights) == pytest.approx(1)


def test_the_true_law_gets_the_weight():
    wide = {"sizes": np.geomspace(1e5, 1e8, 5), "tokens": np.geomspace(1e6, 1e9, 5)}
    table = ladder(COUPLED | {"k": 0.4}, np.random.default_rng(0), 0.001, 25, **wide)
    learned = hindcast(table, _fits(table, 0), near=False, num_draws=0, level=0.9, seed=0)
    assert learned.pool.weights[1] > 0.8
    assert learned.inflation == 1.0
    assert learned.backtest.num_covered is None


@pytest.mark.slow
def test_a_broken_law_inflates_the_interval():
    """The largest runs stop short by 5 %: no power law of the rest says so, and the interval must."""
    wide = {"sizes": np.geomspace(1e5, 1e8, 6), "tokens": np.geomspace(1e6, 1e9, 6)}
    table = ladder(CHINCHILLA, np.random.default_rng(0), 0.002, 36, **wide)
    honest = hindcast(table, _fits(table), near=False, num_draws=24, level=0.9, seed=0)
    assert (honest.inflation < 1.5, honest.warnings) == (True, ())
    bent = from_columns(table.params, table.tokens, table.loss * np.where(table.flops > 6e16, 1.05, 1.0))
    learned = hindcast(bent, _fits(bent), near=False, num_draws=24, level=0.9, seed=0)
    assert learned.inflation > 4
    assert "no law fits these" in learned.warnings[0]
    assert np.median(learned.pool.misfit_draws) > 10 * np.median(honest.pool.misfit_draws)


def test_too_few_runs_for_a_back_test_say_so():
    table = ladder(CHINCHILLA, np.random.default_rng(1), 0.01, 7)
    learned = hindcast(table, _fits(table), near=False, num_draws=24, level=0.9, seed=0)
    assert learned.backtest is None
    assert "no back-test" in learned.warnings[0]


WIDE = {"sizes": np.geomspace(1e5, 1e8, 6), "tokens": np.geomspace(1e6, 1e9, 6)}


@pytest.mark.parametrize("near", [False, True])
def test_cuts_are_fitted_as_the_whole_is(near):
    """Runs far off the frontier are 20 % too bad: what a cut foretells hangs on whether they count less there too."""
    table = ladder(CHINCHILLA, np.random.default_rng(0), 0.002, 36, **WIDE)
    far = np.abs(np.log(table.tokens / table.params / 10)) > 3
    table = from_columns(table.params, table.tokens, table.loss * np.where(far, 1.2, 1.0))
    fits = (law.fit_law(near_frontier(table) if near else table, "chinchilla"),)
    (run,) = hindcast(table, fits, near=near, num_draws=0, level=0.9, seed=0).backtest.runs
    below = table.rows(table.flops < table.flops.max() / 1.25)
    even, weighed = (law.fit_law(each, "chinchilla") for each in (below, near_frontier(below)))
    told = [law.log_loss(fit.theta[None, :], table.params[-1:], table.tokens[-1:])[0, 0] for fit in (even, weighed)]
    assert abs(told[1] - told[0]) > 0.01, "or nothing is tested"
    assert np.log(run.predicted_nats) == pytest.approx(told[near], abs=1e-6)
