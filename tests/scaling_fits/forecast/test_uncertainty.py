"""Tests of predictions and their intervals, on ladders with planted laws and on tiny real runs.

Intervals have a level of 0.9. The bound on coverage lies below 0.9, because the share varies by
chance over the ladders.
"""

import dataclasses
import math

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, compute_law_loss, make_ladder

from forerun._scaling_fits.forecast.uncertainty import draw_intervals, fit_runs, predict
from forerun._scaling_fits.laws import law
from forerun._scaling_fits.laws.table import from_columns


@pytest.fixture(scope="module")
def law_fit():
    """A fit of twelve noisy runs with the planted law `CHINCHILLA`; tests must not change it."""
    return fit_runs(make_ladder(CHINCHILLA, np.random.default_rng(0), noise=0.01), bootstrap=40)


def _draw_law(rng, coupled):
    """Draw a law, coupled or not, whose terms matter at the ladder's sizes."""
    law = {
        "E": rng.uniform(0.8, 1.5),
        "alpha": rng.uniform(0.25, 0.5),
        "beta": rng.uniform(0.25, 0.5),
    }
    if coupled:
        law["k"] = rng.uniform(0.4, 1.0)
    # The terms of N and D have these values at 2e5 parameters and 4e5 tokens
    params_term, tokens_term = rng.uniform(0.3, 1.0, 2)
    law["A"] = params_term * 2e5 ** law["alpha"]
    law["B"] = tokens_term * 4e5 ** law["beta"]
    return law


def _measure_coverage(count, bootstrap, form):
    """Return the share of intervals that contain new runs at 3, 10, and 20 times the largest fitted
    FLOPs, and the mean log width of the intervals.
    """
    covered, widths = [], []
    for index in range(count):
        rng = np.random.default_rng([0, index])
        truth = _draw_law(rng, coupled=bool(index % 2))
        fit = fit_runs(
            make_ladder(truth, rng, noise=0.01, num_runs=int(rng.integers(9, 13))),
            form,
            bootstrap=bootstrap,
            seed=index,
        )
        for ratio in (3, 10, 20):
            n, d = 1e6 * math.sqrt(ratio), 8e5 * math.sqrt(ratio)
            prediction = predict(fit, n, d)
            covered.append(
                prediction.low
                <= compute_law_loss(truth, n, d) + rng.normal(0, 0.01)
                <= prediction.high
            )
            widths.append(math.log(prediction.high / prediction.low))
    return float(np.mean(covered)), float(np.mean(widths))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "max_width"), [("auto", 0.2), ("chinchilla", 0.3), ("coupled", 0.55)]
)
def test_intervals_cover_new_runs(form, max_width):
    """Exact laws are covered more often than the level, because intervals include the error that
    laws of real runs have.
    """
    covered, width = _measure_coverage(100, 60, form)
    assert covered >= 0.82
    assert width < max_width


def test_prediction_states_its_extrapolation(law_fit):
    far = predict(law_fit, 4e6, 3.2e6)
    assert far.extrapolation == pytest.approx(16)
    assert far.flops == 6.0 * 4e6 * 3.2e6
    assert far.low < far.loss_nats < far.high
    near = predict(law_fit, 1e6, 8e5)
    assert math.log(near.high / near.low) < math.log(far.high / far.low)


def test_runs_off_the_frontier_hardly_change_the_forecast():
    """The frontier consists of the runs with the best loss for their FLOPs. Here, runs far off the
    best ratio of tokens to parameters are better than the law. With even weights, they would bend
    the law at the frontier.
    """
    wide = {"sizes": np.geomspace(1e5, 1e9, 9), "tokens": np.geomspace(1e6, 1e11, 9)}
    clean = make_ladder(CHINCHILLA, np.random.default_rng(0), noise=0.002, num_runs=81, **wide)
    stretch = np.abs(np.log(clean.tokens / clean.params / 20))
    bent = from_columns(clean.params, clean.tokens, clean.loss * np.exp(-0.002 * stretch**2))
    n, d = 1e10, 2e11
    errors = [
        abs(
            predict(fit_runs(bent, form, bootstrap=0), n, d).loss_nats
            / compute_law_loss(CHINCHILLA, n, d)
            - 1
        )
        for form in ("auto", "chinchilla")
    ]
    weighted_error, even_error = errors
    assert weighted_error < 0.7 * even_error


def test_error_of_the_law_widens_far_forecasts(law_fit):
    """A law is only nearly right, and the intervals include this error. The test compares them with
    intervals that do not.
    """
    posterior = law_fit.posterior
    without_error = dataclasses.replace(
        posterior, population=dataclasses.replace(posterior.population, error_sd=0.0)
    )
    gains = []
    for ratio in (1, 30):
        n, d = 1e6 * math.sqrt(ratio), 8e5 * math.sqrt(ratio)
        with_error, narrow = (
            predict(fit, n, d)
            for fit in (law_fit, dataclasses.replace(law_fit, posterior=without_error))
        )
        gains.append((with_error.high - with_error.low) / (narrow.high - narrow.low))
    assert 1 <= gains[0] < gains[1]


def test_distance_in_size_alone_widens_the_interval(law_fit):
    """The FLOPs are the same, but the model is a thousand times smaller than any that was run."""
    near, far = predict(law_fit, 1e6, 8e5), predict(law_fit, 3e1, 8e5 * 1e6 / 3e1)
    assert far.extrapolation == pytest.approx(near.extrapolation)
    assert math.log(far.high / far.low) > 2 * math.log(near.high / near.low)


def test_no_bootstrap_gives_no_intervals():
    fit = fit_runs(make_ladder(CHINCHILLA, np.random.default_rng(2), noise=0.01), bootstrap=0)
    prediction = predict(fit, 3e6, 3e6)
    assert (prediction.low, prediction.high) == (None, None)
    assert draw_intervals(fit) is None
    assert fit.backtest is not None


def test_runs_that_identify_no_law_predict_nothing():
    fit = fit_runs(make_ladder(CHINCHILLA, sizes=np.array([1e5])), bootstrap=20)
    assert fit.status == "unidentified"
    with pytest.raises(law.CannotTellError, match="3 different pairs"):
        predict(fit, 1e6, 1e6)


def test_invalid_size_is_refused_and_distant_size_has_a_warning(law_fit):
    with pytest.raises(law.LawError, match=r"params = 1e\+200: .* tokens = 0.5: "):
        predict(law_fit, 1e200, 0.5)
    assert predict(law_fit, 2e6, 2e6).warnings == ()
    assert "FLOPs lie 1e+12 times beyond" in predict(law_fit, 1e12, 8e11).warnings[0]


TINY_RUNS = """
86176 153600 4.496, 86176 409600 4.027, 86176 1024000 3.790, 144624 153600 4.314, 144624 409600 3.906,
144624 1024000 3.630, 213312 153600 4.240, 213312 409600 3.797, 213312 1024000 3.510, 381408 153600 4.150,
381408 409600 3.721, 381408 1024000 3.412, 590464 153600 4.086, 590464 409600 3.635, 590464 1024000 3.309
"""  # noqa: E501
"""Parameters, tokens and loss of the tutorial's ladder: widths 32 to 128, a vocabulary of 1,024,
one seed.
"""
LONGER_TINY_RUNS = ((86176, 3.617), (213312, 3.231), (381408, 3.076), (590464, 2.972))
"""Parameters and loss of runs of 2,822,144 tokens, which were trained after the forecast of the
first run failed.
"""


def test_forecasts_cover_tiny_models_whose_loss_falls_faster_than_published():
    params, tokens, loss = np.array([run.split() for run in TINY_RUNS.split(",")], dtype=float).T
    fit = fit_runs(from_columns(params, tokens, loss))
    for longer_params, measured in LONGER_TINY_RUNS:
        forecast = predict(fit, longer_params, 2_822_144)
        assert forecast.low < measured < forecast.high
        assert forecast.loss_nats == pytest.approx(measured, rel=0.03)
        assert math.log(forecast.high / forecast.low) < 0.08
