"""Intervals cover planted truths, and nothing is numbered that is not known."""

import dataclasses
import math

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, ladder, law_loss

from scaling_fits.forecast.uncertainty import draw_intervals, fit_runs, predict
from scaling_fits.laws import law
from scaling_fits.laws.table import from_columns


@pytest.fixture(scope="module")
def fitted():
    return fit_runs(ladder(CHINCHILLA, np.random.default_rng(0), 0.01), bootstrap=40)


def _truth(rng, coupled):
    law_ = {"E": rng.uniform(0.8, 1.5), "alpha": rng.uniform(0.25, 0.5), "beta": rng.uniform(0.25, 0.5)}
    law_ |= {"k": rng.uniform(0.4, 1.0)} if coupled else {}
    near_n, near_d = rng.uniform(0.3, 1.0, 2)
    return law_ | {"A": near_n * 2e5 ** law_["alpha"], "B": near_d * 4e5 ** law_["beta"]}


def _coverage(count, bootstrap, form):
    """Share of new runs at 3, 10 and 20 times the largest fitted FLOPs within their interval, and mean log width."""
    covered, widths = [], []
    for index in range(count):
        rng = np.random.default_rng([0, index])
        truth = _truth(rng, coupled=bool(index % 2))
        fit = fit_runs(ladder(truth, rng, 0.01, int(rng.integers(9, 13))), form, bootstrap=bootstrap, seed=index)
        for ratio in (3, 10, 20):
            n, d = 1e6 * math.sqrt(ratio), 8e5 * math.sqrt(ratio)
            band = predict(fit, n, d)
            covered.append(band.low <= law_loss(truth, n, d) + rng.normal(0, 0.01) <= band.high)
            widths.append(math.log(band.high / band.low))
    return float(np.mean(covered)), float(np.mean(widths))


@pytest.mark.slow
@pytest.mark.parametrize(("form", "max_width"), [("auto", 0.2), ("chinchilla", 0.3), ("coupled", 0.55)])
def test_new_runs_are_covered_with_more_draws(form, max_width):
    """Exact laws are covered too often: intervals count the error that laws of real runs have."""
    covered, width = _coverage(100, 60, form)
    assert covered >= 0.82
    assert width < max_width


def test_predict_says_how_far_it_reaches(fitted):
    far = predict(fitted, 4e6, 3.2e6)
    assert far.extrapolation == pytest.approx(16)
    assert far.flops == 6.0 * 4e6 * 3.2e6
    assert far.low < far.loss_nats < far.high
    near = predict(fitted, 1e6, 8e5)
    assert math.log(near.high / near.low) < math.log(far.high / far.low)


def test_runs_off_the_frontier_hardly_move_the_forecast():
    """Runs fed far too long are better than any law says: even weights would carry that to the frontier."""
    wide = {"sizes": np.geomspace(1e5, 1e9, 9), "tokens": np.geomspace(1e6, 1e11, 9)}
    clean = ladder(CHINCHILLA, np.random.default_rng(0), 0.002, 81, **wide)
    stretch = np.abs(np.log(clean.tokens / clean.params / 20))
    bent = from_columns(clean.params, clean.tokens, clean.loss * np.exp(-0.002 * stretch**2))
    n, d = 1e10, 2e11
    errors = [abs(predict(fit_runs(bent, form, bootstrap=0), n, d).loss_nats / law_loss(CHINCHILLA, n, d) - 1)
              for form in ("auto", "chinchilla")]  # fmt: skip
    assert errors[0] < 0.7 * errors[1]


def test_the_error_of_a_law_grows_with_the_extrapolation(fitted):
    """Without it, far forecasts would be as sure as the draws are."""
    posterior = fitted.posterior
    none = dataclasses.replace(posterior, population=dataclasses.replace(posterior.population, error_sd=0.0))
    gains = []
    for ratio in (1, 30):
        n, d = 1e6 * math.sqrt(ratio), 8e5 * math.sqrt(ratio)
        with_, without = (predict(each, n, d) for each in (fitted, dataclasses.replace(fitted, posterior=none)))
        gains.append((with_.high - with_.low) / (without.high - without.low))
    assert 1 <= gains[0] < gains[1]


def test_a_run_far_off_in_size_alone_is_far(fitted):
    """The same FLOPs, with a model a thousand times smaller than any."""
    near, far = predict(fitted, 1e6, 8e5), predict(fitted, 3e1, 8e5 * 1e6 / 3e1)
    assert far.extrapolation == pytest.approx(near.extrapolation)
    assert math.log(far.high / far.low) > 2 * math.log(near.high / near.low)


def test_without_a_bootstrap_there_are_no_intervals():
    fit = fit_runs(ladder(CHINCHILLA, np.random.default_rng(2), 0.01), bootstrap=0)
    band = predict(fit, 3e6, 3e6)
    assert (band.low, band.high) == (None, None)
    assert draw_intervals(fit) is None
    assert fit.backtest is not None


def test_unidentified_runs_predict_nothing():
    fit = fit_runs(ladder(CHINCHILLA, sizes=np.array([1e5])), bootstrap=20)
    assert fit.status == "unidentified"
    with pytest.raises(law.CannotTellError, match="3 different pairs"):
        predict(fit, 1e6, 1e6)


def test_what_is_no_size_is_refused_and_what_is_far_is_warned_of(fitted):
    with pytest.raises(law.LawError, match=r"params = 1e\+200: .* tokens = 0.5: "):
        predict(fitted, 1e200, 0.5)
    assert predict(fitted, 2e6, 2e6).warnings == ()
    assert "FLOPs lie 1e+12 times beyond" in predict(fitted, 1e12, 8e11).warnings[0]


TINY_RUNS = """
86176 153600 4.496, 86176 409600 4.027, 86176 1024000 3.790, 144624 153600 4.314, 144624 409600 3.906,
144624 1024000 3.630, 213312 153600 4.240, 213312 409600 3.797, 213312 1024000 3.510, 381408 153600 4.150,
381408 409600 3.721, 381408 1024000 3.412, 590464 153600 4.086, 590464 409600 3.635, 590464 1024000 3.309
"""
"""Parameters, tokens, and loss of the tutorial's ladder: widths 32 to 128, a vocabulary of 1,024, one seed."""
LONGER_TINY_RUNS = ((86176, 3.617), (213312, 3.231), (381408, 3.076), (590464, 2.972))
"""Parameters and loss of runs of 2,822,144 tokens, trained after the forecast of the first one had failed."""


def test_forecasts_of_tiny_models_hold_where_their_loss_falls_faster_than_that_of_published_studies():
    params, tokens, loss = np.array([run.split() for run in TINY_RUNS.split(",")], dtype=float).T
    fit = fit_runs(from_columns(params, tokens, loss))
    for longer_params, measured in LONGER_TINY_RUNS:
        forecast = predict(fit, longer_params, 2_822_144)
        assert forecast.low < measured < forecast.high
        assert forecast.loss_nats == pytest.approx(measured, rel=0.03)
        assert math.log(forecast.high / forecast.low) < 0.08
