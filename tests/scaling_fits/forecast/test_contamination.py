"""Tests of runs that are outliers or entered twice: they are named, and do not change a forecast by
more than they should.
"""

import dataclasses
import math

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, compute_law_loss, make_ladder

from forerun._scaling_fits.forecast.uncertainty import fit_runs, predict
from forerun._scaling_fits.laws.table import from_columns

WIDE = {"sizes": np.geomspace(1e6, 1e8, 6), "tokens": np.geomspace(1e7, 1e10, 6)}
CLEAN = make_ladder(CHINCHILLA, np.random.default_rng(3), noise=0.006, num_runs=36, **WIDE)
FAR = (4e8, 2e10)
"""Parameters and tokens of the run that is predicted."""
TRUTH = compute_law_loss(CHINCHILLA, *FAR)


def _scale_losses(factor):
    return from_columns(CLEAN.params, CLEAN.tokens, CLEAN.loss * factor)


def _compute_interval_width(fitted):
    prediction = predict(fitted, *FAR)
    return math.log(prediction.high / prediction.low)


@pytest.fixture(scope="module")
def clean_fit():
    """The fit of the ladder without outliers."""
    return fit_runs(CLEAN, bootstrap=40)


def test_outliers_are_named_and_hardly_widen_the_interval(clean_fit):
    factor = np.ones(36)
    factor[[8, 20]] = 1.12, 1.09
    fitted = fit_runs(_scale_losses(factor), bootstrap=40)
    assert _compute_interval_width(fitted) < 1.5 * _compute_interval_width(clean_fit)
    prediction = predict(fitted, *FAR)
    assert prediction.low < TRUTH < prediction.high
    (warning,) = (text for text in fitted.warnings if "more than noise" in text)
    assert warning.startswith(f"{CLEAN.name_run(8)} and {CLEAN.name_run(20)} are off the ")
    assert fitted.fit.outliers == (8, 20)
    assert not any("more than noise" in text for text in clean_fit.warnings)


def test_rows_entered_three_times_count_once(clean_fit):
    columns = (np.tile(column, 3) for column in (CLEAN.params, CLEAN.tokens, CLEAN.loss))
    tripled = fit_runs(from_columns(*columns), bootstrap=40)
    assert (tripled.span.num_runs, predict(tripled, *FAR)) == (36, predict(clean_fit, *FAR))
    distinct_runs = dataclasses.replace(CLEAN, seed=np.zeros(36))
    assert distinct_runs.drop_repeats() is distinct_runs


def test_rows_entered_again_with_rounding_count_once():
    """Five copies whose losses differ by a millionth are one run, not five seeds."""
    params, tokens, loss = (
        np.tile(column, 5) for column in (CLEAN.params, CLEAN.tokens, CLEAN.loss)
    )
    copies = params, tokens, loss + 1e-6 * np.repeat(np.arange(5), 36)
    assert from_columns(*copies).drop_repeats().num_runs == 36
    seeds = dataclasses.replace(from_columns(*copies), seed=np.repeat(np.arange(5.0), 36))
    assert seeds.drop_repeats().num_runs == 180


def test_forecast_of_a_clean_ladder_is_unbiased():
    """A run far beyond the ladder is predicted at the loss of the planted law, although the ladder
    has noise of 0.006 nats.
    """
    log_errors = []
    for seed in range(5):
        rng = np.random.default_rng([seed, 5])
        table = make_ladder(CHINCHILLA, rng, noise=0.006, num_runs=36, **WIDE)
        log_errors.append(math.log(predict(fit_runs(table, bootstrap=0), *FAR).loss_nats / TRUTH))
    assert abs(np.mean(log_errors)) < 0.01
