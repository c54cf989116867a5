"""Runs that are off, or entered again: said by name, and no more than they are worth."""

import dataclasses
import math

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, ladder, law_loss

from scaling_fits.forecast.uncertainty import fit_runs, predict
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
    assert fitted.fit.outliers == (8, 20)
    assert not any("more than noise" in text for text in clean.warnings)


def test_rows_entered_three_times_change_nothing(clean):
    columns = (np.tile(column, 3) for column in (CLEAN.params, CLEAN.tokens, CLEAN.loss))
    tripled = fit_runs(from_columns(*columns), bootstrap=40)
    assert (tripled.span.num_runs, predict(tripled, *FAR)) == (36, predict(clean, *FAR))
    seeds = dataclasses.replace(CLEAN, seed=np.zeros(36))
    assert seeds.distinct() is seeds


def test_rows_entered_again_with_rounding_count_once():
    """Five copies whose losses differ by a millionth are one run, not five seeds."""
    params, tokens, loss = (np.tile(column, 5) for column in (CLEAN.params, CLEAN.tokens, CLEAN.loss))
    copies = params, tokens, loss + 1e-6 * np.repeat(np.arange(5), 36)
    assert from_columns(*copies).distinct().num_runs == 36
    seeds = dataclasses.replace(from_columns(*copies), seed=np.repeat(np.arange(5.0), 36))
    assert seeds.distinct().num_runs == 180


def test_a_clean_ladder_is_not_moved():
    """A Chinchilla ladder with .3 % noise is predicted where its law lies."""
    misses = []
    for seed in range(10):
        table = ladder(CHINCHILLA, np.random.default_rng([seed, 5]), 0.003 * 2, 36, **WIDE)
        misses.append(math.log(predict(fit_runs(table, bootstrap=0), *FAR).loss_nats / TRUTH))
    assert abs(np.mean(misses)) < 0.01
