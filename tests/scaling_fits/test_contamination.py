"""Runs that are off, entered again, or worse the larger they are: said by name, and no more than they are worth."""

import dataclasses
import math

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, ladder, law_loss
from scaling_fits.laws.lack_of_fit import trend

from scaling_fits.forecast.uncertainty import fit_runs, predict
from scaling_fits.laws import law
from scaling_fits.laws.table import from_columns

WIDE = {"sizes": np.geomspace(1e6, 1e8, 6), "tokens": np.geomspace(1e7, 1e10, 6)}
CLEAN = ladder(CHINCHILLA, np.random.default_rng(3), 0.006, 36, **WIDE)
FAR = (4e8, 2e10)
TRUTH = law_loss(CHINCHILLA, *FAR)


def _changed(factor):
    return from_columns(CLEAN.params, CLEAN.tokens, CLEAN.loss * factor)


def _width(fitted):
    band = predict(fitted, *FAR)
    return math.log(band.high / band.low)


def _worse_with_compute(amount):
    """The largest third of the runs, by the log of FLOPs, worse by up to `amount`."""
    log_flops = np.log(CLEAN.flops)
    return np.exp(amount * np.clip((log_flops - log_flops.max()) / np.ptp(log_flops) * 3 + 1, 0, None))


@pytest.fixture(scope="module")
def clean():
    return fit_runs(CLEAN, bootstrap=40)


def test_outliers_are_named_and_leave_the_width(clean):
    factor = np.ones(36)
    factor[[8, 20]] = 1.12, 1.09
    fitted = fit_runs(_changed(factor), bootstrap=40)
    assert _width(fitted) < 1.5 * _width(clean)
    band = predict(fitted, *FAR)
    assert band.low < TRUTH < band.high
    (said,) = (text for text in fitted.warnings if "more than noise" in text)
    assert said.startswith(f"{CLEAN.name(8)} and {CLEAN.name(20)} are off the ")
    assert fitted.heaviest.outliers == (8, 20)
    assert not any("more than noise" in text for text in clean.warnings)


def test_rows_entered_three_times_change_nothing(clean):
    columns = (np.tile(column, 3) for column in (CLEAN.params, CLEAN.tokens, CLEAN.loss))
    tripled = fit_runs(from_columns(*columns), bootstrap=40)
    assert (tripled.weights, tripled.weighting) == (clean.weights, clean.weighting)
    assert (tripled.span.num_runs, predict(tripled, *FAR)) == (36, predict(clean, *FAR))
    seeds = dataclasses.replace(CLEAN, seed=np.zeros(36))
    assert seeds.distinct() is seeds


def test_runs_that_do_worse_the_larger_they_are_are_said_and_widen(clean):
    fitted = fit_runs(_changed(_worse_with_compute(0.02)), bootstrap=40)
    (said,) = (text for text in fitted.warnings if "the largest runs" in text)
    assert "above" in said
    assert _width(fitted) > 1.7 * _width(clean)
    band = predict(fitted, *FAR)
    assert band.low < TRUTH < band.high
    small = predict(fitted, CLEAN.params[0], CLEAN.tokens[0])
    before = predict(clean, CLEAN.params[0], CLEAN.tokens[0])
    assert math.log(small.high / small.low) < 1.5 * math.log(before.high / before.low)
    assert not any("the largest runs" in text for text in clean.warnings)


def test_runs_that_do_better_the_larger_they_are_lower_the_forecast():
    better = _changed(1 / _worse_with_compute(0.02))
    fitted = fit_runs(better, bootstrap=0)
    assert fitted.trend.slope < 0 < fitted.trend.size <= fitted.drift.applied
    assert any("the largest runs" in text and "lowered" in text for text in fitted.warnings)
    without = dataclasses.replace(fitted, drift=dataclasses.replace(fitted.drift, applied=0.0))
    assert predict(fitted, *FAR).loss_nats < predict(without, *FAR).loss_nats
    top = CLEAN.flops.argmax()
    at = CLEAN.params[top], CLEAN.tokens[top]
    assert predict(fitted, *at).loss_nats == predict(without, *at).loss_nats
    just = predict(fitted, at[0], at[1] * (1 + 1e-9)).loss_nats
    assert just == pytest.approx(predict(fitted, *at).loss_nats, rel=1e-8)


def test_a_healthy_ladder_shows_a_trend_about_once_in_twenty():
    seen = 0
    for seed in range(40):
        table = ladder(CHINCHILLA, np.random.default_rng([seed, 8]), 0.006, 36, **WIDE)
        seen += trend(table, law.fit_law(table, "chinchilla")).size > 0
    assert seen <= 6
