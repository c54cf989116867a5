"""Tests of forecasts from planted ladders: they cover, do not depend on the order of rows, and are
refused where the runs do not support them.
"""

import math
import warnings

import numpy as np
import pytest
from planted_ladders import compute_law_loss

from forerun._scaling_fits.allocation.allocate import allocate
from forerun._scaling_fits.forecast.backtest import Backtest, HeldOut, find_nearest_backtest
from forerun._scaling_fits.forecast.conclusive import (
    INCONCLUSIVE,
    judge_backtest,
    list_reach_doubts,
)
from forerun._scaling_fits.forecast.posterior import fit_posterior
from forerun._scaling_fits.forecast.uncertainty import fit_runs, predict
from forerun._scaling_fits.laws.law import CannotTellError
from forerun._scaling_fits.laws.table import from_columns
from forerun._scaling_fits.laws.traps import is_along_schedules
from forerun._scaling_fits.summary import summarize_fit, summarize_prediction

PUBLISHED = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}
"""The law of arXiv 2203.15556."""
# Parameters and tokens of a grid of twenty runs
N, D = (
    x.ravel()
    for x in np.meshgrid(np.geomspace(1e8, 2e9, 5), np.geomspace(2e9, 4e10, 4), indexing="ij")
)
NOISE = 0.003
"""Standard deviation of the log loss."""


def make_runs(law=PUBLISHED, seed=0, n=N, d=D):
    """Return a ladder of a planted law with log-normal noise."""
    noise = np.random.default_rng(seed).normal(0, NOISE, len(n))
    return from_columns(n, d, compute_law_loss(law, n, d) * np.exp(noise))


def draw_law(rng):
    """Draw a law like the published ones; half of them have an outer exponent."""
    k = rng.choice([1.0, rng.uniform(0.4, 1.0)])
    alpha, beta = rng.uniform(0.22, 0.42, 2) / k
    terms = rng.uniform(0.15, 0.6, 2) ** (1 / k)
    return {
        "E": rng.uniform(0.5, 2.0),
        "A": terms[0] * 5e8**alpha,
        "B": terms[1] * 1e10**beta,
        "alpha": alpha,
        "beta": beta,
        "k": k,
    }


def test_intervals_of_planted_ladders_cover_and_their_median_is_unbiased():
    shares = (0.5, 0.05, 0.95, 0.25, 0.75)
    log_errors, covered_90, covered_50 = [], [], []
    for index in range(40):
        rng = np.random.default_rng([7, index])
        law = draw_law(rng)
        posterior = fit_posterior(make_runs(law, seed=index), num_draws=100, seed=0)
        scale = np.sqrt([3.0, 30.0])
        n, d = 2e9 * scale, 4e10 * scale
        loss = np.log(compute_law_loss(law, n, d)) + rng.normal(0, NOISE, 2)
        middle, low, high, low_half, high_half = posterior.compute_quantiles(n, d, shares)
        log_errors.append(middle - loss)
        covered_90.append((low <= loss) & (loss <= high))
        covered_50.append((low_half <= loss) & (loss <= high_half))
    # Levels are 0.9 and 0.5. Exact laws may be covered more often, because intervals include the
    # error that laws of real runs have
    for reach in (0, 1):
        assert 0.8 <= np.mean(covered_90, axis=0)[reach] <= 1.0
        assert 0.35 <= np.mean(covered_50, axis=0)[reach] <= 0.95
    assert np.abs(np.mean(log_errors, axis=0)) == pytest.approx(0, abs=0.015)
    assert np.mean(np.abs(log_errors), axis=0) == pytest.approx(0, abs=0.03)


def test_forecast_of_a_clean_ladder_is_unbiased():
    # 25 times the largest run, where the planted law gives 2.133 nats
    n, d = 1e10, 2e11
    truth = math.log(compute_law_loss(PUBLISHED, n, d))
    middles = [
        fit_posterior(make_runs(seed=seed), num_draws=100, seed=0).compute_quantiles(
            np.array([n]), np.array([d]), (0.5,)
        )
        for seed in range(12)
    ]
    assert np.mean(middles) == pytest.approx(truth, abs=0.015)


@pytest.mark.parametrize("is_isoflop", [False, True])
def test_forecast_does_not_depend_on_the_order_of_rows(is_isoflop):
    n, d = N, D
    if is_isoflop:
        n = np.tile(np.geomspace(1e8, 2e9, 7), 3)
        d = np.repeat([1e18, 4e18, 1.6e19], 7) / 6 / n
    table = make_runs(n=n, d=d)
    forecasts = []
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(n))
        prediction = predict(
            fit_runs(from_columns(table.params[order], table.tokens[order], table.loss[order])),
            1e10,
            2e11,
        )
        forecasts.append((prediction.loss_nats, prediction.low, prediction.high))
    assert forecasts[1] == pytest.approx(forecasts[0], rel=1e-9)
    assert forecasts[2] == pytest.approx(forecasts[0], rel=1e-9)


def test_runs_entered_five_times_count_once():
    n, d = (x.ravel() for x in np.meshgrid([1e8, 4e8, 1.6e9], [2e9, 8e9, 3.2e10]))
    once = make_runs(n=n, d=d)
    loss = np.tile(once.loss, 5) + 1e-6 * np.repeat(np.arange(5), 9)
    order = np.random.default_rng(0).permutation(45)
    repeated_fit = fit_runs(from_columns(np.tile(n, 5)[order], np.tile(d, 5)[order], loss[order]))
    assert repeated_fit.span.num_runs == 9
    predictions = [predict(fitted, 1e10, 2e11) for fitted in (repeated_fit, fit_runs(once))]
    assert (predictions[0].low, predictions[0].high) == pytest.approx(
        (predictions[1].low, predictions[1].high), rel=1e-8
    )


def test_backtest_does_not_use_the_runs_that_it_holds_out():
    table = make_runs()
    largest = int(table.flops.argmax())
    second_largest = int(np.argsort(table.flops)[-2])
    predictions = [
        [run.predicted_nats for test in fit_runs(changed).backtests for run in test.runs]
        for changed in (
            table,
            *(_scale_loss(table, index, 1.02) for index in (largest, second_largest)),
        )
    ]
    assert predictions[1] == predictions[0]
    assert predictions[2][0] != predictions[0][0], "the nearest backtest fits that run"
    assert predictions[2][1:] == predictions[0][1:], "the farther backtests hold it out"


def _scale_loss(table, index, factor):
    loss = table.loss.copy()
    loss[index] *= factor
    return from_columns(table.params, table.tokens, loss)


def _make_backtest(*is_covered, extrapolation=2.0):
    held_out = [
        HeldOut(
            params=1e9,
            tokens=1e10,
            loss_nats=2.0,
            predicted_nats=2.01,
            interval_nats=(1.9, 2.1) if inside else (2.005, 2.1),
        )
        for inside in is_covered
    ]
    return Backtest(runs=tuple(held_out), num_fitted=9, extrapolation=extrapolation)


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_one_run_outside_its_interval_raises_no_doubt(level):
    assert judge_backtest(_make_backtest(False), level)[1] is False
    assert judge_backtest(_make_backtest(*[False] * 10), level)[1] is True


def test_forecast_is_judged_by_the_backtest_of_nearest_extrapolation():
    backtests = tuple(_make_backtest(True, extrapolation=reach) for reach in (2.0, 12.0, 60.0))
    assert find_nearest_backtest(backtests, 77.0) is backtests[2]
    assert find_nearest_backtest(backtests, 0.1) is backtests[0]
    assert find_nearest_backtest((), 77.0) is None
    fitted = fit_runs(make_runs())
    assert [test.extrapolation for test in fitted.backtests] == sorted(
        test.extrapolation for test in fitted.backtests
    )
    assert fitted.backtests[-1].extrapolation > 10


def test_wide_interval_implausible_loss_and_long_reach_raise_doubts():
    assert list_reach_doubts(2.0, (1.81, 2.19), extrapolation=3.0) == ()
    assert len(list_reach_doubts(2.0, (1.79, 2.21), extrapolation=3.0)) == 1
    assert len(list_reach_doubts(12.1, (12.0, 12.2), extrapolation=3.0)) == 1
    assert len(list_reach_doubts(2.0, (1.9, 2.1), extrapolation=101.0)) == 1


def test_implausible_loss_of_a_tiny_run_is_doubted():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forecast = predict(fit_runs(make_runs()), 1000, 1000)
    assert forecast.loss_nats > 12
    assert any("above 12" in doubt for doubt in forecast.doubts)


CEREBRAS = {
    "n": np.array([1.11e8, 2.56e8, 5.9e8, 1.316e9, 2.652e9]),
    "loss": np.array([2.608, 2.349, 2.181, 1.997, 1.834]),
}
"""Cerebras-GPT (arXiv 2304.03208), trained on 20 tokens per parameter."""


def test_ladder_of_one_ratio_forecasts_only_along_its_line():
    n = CEREBRAS["n"]
    fitted = fit_runs(from_columns(n, 20 * n, CEREBRAS["loss"]))
    forecast = predict(fitted, 1.29e10, 20 * 1.29e10)
    assert forecast.loss_nats == pytest.approx(1.572, rel=0.025)
    assert forecast.low < 1.572 < forecast.high
    with pytest.raises(CannotTellError, match="20 tokens per parameter"):
        predict(fitted, 1e9, 1e12)
    with pytest.raises(CannotTellError, match="20 tokens per parameter"):
        allocate(fitted, 1e21)
    summary = summarize_fit(fitted)
    assert summary["members"][0]["form"] == "compute"
    parameters = summary["parameters"]
    assert [name for name, value in parameters.items() if value is None] == [
        "A",
        "B",
        "alpha",
        "beta",
    ]
    assert [name for name, value in parameters.items() if value is not None] == ["E", "F", "gamma"]
    at_end = parameters["E"] + parameters["F"] * (6 * 20 * n[-1] ** 2) ** -parameters["gamma"]
    assert at_end == pytest.approx(1.834, rel=0.04)
    assert set(summary["exponents"]["params_vs_flops"].values()) == {None}


@pytest.mark.parametrize("fixed", ["tokens", "params"])
def test_ladder_of_one_duration_or_size_forecasts_only_along_its_line(fixed):
    growing = np.geomspace(1e8, 3e9, 6)
    if fixed == "tokens":
        n, d = growing, np.full(6, 3e11)
        on_line, off_line = (2e10, 3e11), (2e10, 3e12)
    else:
        n, d = np.full(6, 1e9), 30 * growing
        on_line, off_line = (1e9, 1e12), (1e10, 1e12)
    fitted = fit_runs(make_runs(n=n, d=d))
    forecast = predict(fitted, *on_line)
    assert forecast.low < compute_law_loss(PUBLISHED, *on_line) < forecast.high
    with pytest.raises(CannotTellError, match="lies off that line"):
        predict(fitted, *off_line)


def test_form_compute_is_refused_for_runs_over_an_area():
    fitted = fit_runs(make_runs(), "compute")
    assert fitted.status == "unidentified"
    assert "spread over an area" in fitted.warnings[0]


def test_accuracies_are_refused_as_losses():
    fitted = fit_runs(from_columns(N, D, np.linspace(70, 75, 20)))
    assert fitted.status == "degenerate"
    assert fitted.warnings[0].startswith("values of 70 to 75 are no losses in nats")
    assert predict(fitted, 1e10, 2e11).doubts


def test_losses_that_grow_with_tokens_make_the_fit_inconclusive():
    fitted = fit_runs(from_columns(N, D, compute_law_loss(PUBLISHED, N, 1e10) * (D / 1e10) ** 0.02))
    assert "losses grow with tokens" in fitted.warnings[0]
    assert summarize_fit(fitted)["warnings"][0].startswith(INCONCLUSIVE)
    assert summarize_prediction(predict(fitted, 1e10, 2e11))["warnings"][0].startswith(INCONCLUSIVE)


def test_implausible_allocation_is_doubted():
    table = make_runs()
    wrong_unit = from_columns(table.params, table.tokens / 1e3, table.loss)
    allocation = allocate(fit_runs(wrong_unit), 6 * 1e10 * 2e8)
    assert allocation.tokens_per_param < 1
    assert any("tokens per parameter" in doubt for doubt in allocation.doubts)


def test_conclusive_forecast_has_no_doubt_and_lists_its_backtests():
    fitted = fit_runs(make_runs())
    assert summarize_prediction(predict(fitted, 4e9, 8e10))["warnings"] == []
    keys = {
        "num_fitted",
        "num_held_out",
        "extrapolation",
        "mean_error",
        "largest_error",
        "num_covered",
    }
    summary = summarize_fit(fitted)
    assert [set(test) for test in summary["backtests"]] == [keys] * len(fitted.backtests)
    assert summary["backtest"].keys() == keys | {"runs"}
    assert not summary.keys() & {"misfit_sd", "drift", "trend", "interval_inflation", "weighting"}


def test_points_along_training_curves_are_recognized():
    sizes, steps = np.array([1e8, 3e8, 1e9, 3e9]), np.arange(1, 31)
    n = np.repeat(sizes, 30)
    assert is_along_schedules(n, np.tile(steps * 1e9, 4))
    assert is_along_schedules(n, np.concatenate([steps * 2e9 * (i + 1) for i in range(4)]))
    assert not is_along_schedules(N, D)
    assert not is_along_schedules(
        np.repeat(sizes, 6), np.concatenate([x * np.geomspace(5, 160, 6) for x in sizes])
    )
    assert not is_along_schedules(
        np.tile(sizes, 5), np.repeat(10.0 ** np.arange(18, 23), 4) / 6 / np.tile(sizes, 5)
    )
