"""Forecasts of planted ladders: covered, the same in any order of rows, and refused where the runs
say nothing.
"""

import math
import warnings

import numpy as np
import pytest
from planted_ladders import law_loss

from scaling_fits.allocation.allocate import allocate
from scaling_fits.forecast.backtest import Backtest, HeldOut, nearest_backtest
from scaling_fits.forecast.conclusive import INCONCLUSIVE, judge_backtest, reach_doubts
from scaling_fits.forecast.posterior import fit_posterior
from scaling_fits.forecast.uncertainty import fit_runs, predict
from scaling_fits.laws.law import CannotTellError
from scaling_fits.laws.table import from_columns
from scaling_fits.laws.traps import is_along_schedules
from scaling_fits.summary import fit_summary, prediction_summary

PUBLISHED = {"E": 1.69, "A": 406.4, "B": 410.7, "alpha": 0.34, "beta": 0.28}
"""The law of arXiv 2203.15556."""
N, D = (
    x.ravel()
    for x in np.meshgrid(np.geomspace(1e8, 2e9, 5), np.geomspace(2e9, 4e10, 4), indexing="ij")
)
NOISE = 0.003


def runs(law=PUBLISHED, seed=0, n=N, d=D):
    """A ladder of a planted law with log-normal noise."""
    noise = np.random.default_rng(seed).normal(0, NOISE, len(n))
    return from_columns(n, d, law_loss(law, n, d) * np.exp(noise))


def random_law(rng):
    """A law like published ones, of which every other has an outer exponent."""
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


def test_intervals_of_planted_ladders_cover_and_their_middle_is_right():
    shares = (0.5, 0.05, 0.95, 0.25, 0.75)
    misses, covered_90, covered_50 = [], [], []
    for index in range(40):
        rng = np.random.default_rng([7, index])
        law = random_law(rng)
        posterior = fit_posterior(runs(law, seed=index), num_draws=100, seed=0)
        scale = np.sqrt([3.0, 30.0])
        n, d = 2e9 * scale, 4e10 * scale
        loss = np.log(law_loss(law, n, d)) + rng.normal(0, NOISE, 2)
        middle, low, high, low_half, high_half = posterior.quantiles(n, d, shares)
        misses.append(middle - loss)
        covered_90.append((low <= loss) & (loss <= high))
        covered_50.append((low_half <= loss) & (loss <= high_half))
    for reach in (0, 1):
        assert 0.8 <= np.mean(covered_90, axis=0)[reach] <= 1.0
        assert 0.35 <= np.mean(covered_50, axis=0)[reach] <= 0.95
    assert np.abs(np.mean(misses, axis=0)) == pytest.approx(0, abs=0.015)
    assert np.mean(np.abs(misses), axis=0) == pytest.approx(0, abs=0.03)


def test_a_clean_ladder_is_forecast_where_its_law_lies():
    n, d = 1e10, 2e11  # 2.133 nats, 25 times the largest run
    truth = math.log(law_loss(PUBLISHED, n, d))
    middles = [
        fit_posterior(runs(seed=seed), num_draws=100, seed=0).quantiles(
            np.array([n]), np.array([d]), (0.5,)
        )
        for seed in range(12)
    ]
    assert np.mean(middles) == pytest.approx(truth, abs=0.015)


@pytest.mark.parametrize("is_isoflop", [False, True])
def test_the_order_of_rows_changes_nothing(is_isoflop):
    n, d = N, D
    if is_isoflop:
        n = np.tile(np.geomspace(1e8, 2e9, 7), 3)
        d = np.repeat([1e18, 4e18, 1.6e19], 7) / 6 / n
    table = runs(n=n, d=d)
    forecasts = []
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(n))
        each = predict(
            fit_runs(from_columns(table.params[order], table.tokens[order], table.loss[order])),
            1e10,
            2e11,
        )
        forecasts.append((each.loss_nats, each.low, each.high))
    assert forecasts[1] == pytest.approx(forecasts[0], rel=1e-9)
    assert forecasts[2] == pytest.approx(forecasts[0], rel=1e-9)


def test_nine_runs_entered_five_times_are_nine():
    n, d = (x.ravel() for x in np.meshgrid([1e8, 4e8, 1.6e9], [2e9, 8e9, 3.2e10]))
    once = runs(n=n, d=d)
    loss = np.tile(once.loss, 5) + 1e-6 * np.repeat(np.arange(5), 9)
    order = np.random.default_rng(0).permutation(45)
    again = fit_runs(from_columns(np.tile(n, 5)[order], np.tile(d, 5)[order], loss[order]))
    assert again.span.num_runs == 9
    told = [predict(fitted, 1e10, 2e11) for fitted in (again, fit_runs(once))]
    assert (told[0].low, told[0].high) == pytest.approx((told[1].low, told[1].high), rel=1e-8)


def test_no_back_test_sees_a_run_that_it_holds_out():
    table = runs()
    top = int(table.flops.argmax())
    largest_but_one = int(np.argsort(table.flops)[-2])
    told = [
        [run.predicted_nats for test in fit_runs(changed).backtests for run in test.runs]
        for changed in (table, *(_scaled(table, place, 1.02) for place in (top, largest_but_one)))
    ]
    assert told[1] == told[0]
    assert told[2][0] != told[0][0], "the nearest one fits it"
    assert told[2][1:] == told[0][1:], "the farther ones do not"


def _scaled(table, place, factor):
    loss = table.loss.copy()
    loss[place] *= factor
    return from_columns(table.params, table.tokens, loss)


def _backtest(*covered, extrapolation=2.0):
    held = [
        HeldOut(
            params=1e9,
            tokens=1e10,
            loss_nats=2.0,
            predicted_nats=2.01,
            interval_nats=(1.9, 2.1) if inside else (2.005, 2.1),
        )
        for inside in covered
    ]
    return Backtest(runs=tuple(held), num_fitted=9, extrapolation=extrapolation)


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_one_run_outside_its_interval_speaks_against_nothing(level):
    assert judge_backtest(_backtest(False), level)[1] is False
    assert judge_backtest(_backtest(*[False] * 10), level)[1] is True


def test_a_far_forecast_is_judged_by_the_back_test_nearest_to_it():
    tests = tuple(_backtest(True, extrapolation=reach) for reach in (2.0, 12.0, 60.0))
    assert nearest_backtest(tests, 77.0) is tests[2]
    assert nearest_backtest(tests, 0.1) is tests[0]
    assert nearest_backtest((), 77.0) is None
    fitted = fit_runs(runs())
    assert [test.extrapolation for test in fitted.backtests] == sorted(
        test.extrapolation for test in fitted.backtests
    )
    assert fitted.backtests[-1].extrapolation > 10


def test_what_is_too_wide_or_above_any_loss_is_inconclusive():
    assert reach_doubts(2.0, (1.81, 2.19), 3.0) == ()
    assert len(reach_doubts(2.0, (1.79, 2.21), 3.0)) == 1
    assert len(reach_doubts(12.1, (12.0, 12.2), 3.0)) == 1
    assert len(reach_doubts(2.0, (1.9, 2.1), 101.0)) == 1


def test_a_run_of_a_thousand_parameters_has_no_loss_worth_a_number():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forecast = predict(fit_runs(runs()), 1000, 1000)
    assert forecast.loss_nats > 12
    assert any("above 12" in doubt for doubt in forecast.doubts)


CEREBRAS = {
    "n": np.array([1.11e8, 2.56e8, 5.9e8, 1.316e9, 2.652e9]),
    "loss": np.array([2.608, 2.349, 2.181, 1.997, 1.834]),
}
"""Cerebras-GPT (arXiv 2304.03208): 20 tokens for each parameter."""


def test_a_ladder_of_one_ratio_forecasts_along_its_line_alone():
    n = CEREBRAS["n"]
    fitted = fit_runs(from_columns(n, 20 * n, CEREBRAS["loss"]))
    forecast = predict(fitted, 1.29e10, 20 * 1.29e10)
    assert forecast.loss_nats == pytest.approx(1.572, rel=0.025)
    assert forecast.low < 1.572 < forecast.high
    for refused in (lambda: predict(fitted, 1e9, 1e12), lambda: allocate(fitted, 1e21)):
        with pytest.raises(CannotTellError, match="20 tokens per parameter"):
            refused()
    summary = fit_summary(fitted)
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
def test_a_ladder_of_one_duration_or_one_size_forecasts_along_its_line(fixed):
    grow = np.geomspace(1e8, 3e9, 6)
    n, d = (grow, np.full(6, 3e11)) if fixed == "tokens" else (np.full(6, 1e9), 30 * grow)
    fitted = fit_runs(runs(n=n, d=d))
    at = (2e10, 3e11) if fixed == "tokens" else (1e9, 1e12)
    forecast = predict(fitted, *at)
    assert forecast.low < law_loss(PUBLISHED, *at) < forecast.high
    with pytest.raises(CannotTellError, match="lies off that line"):
        predict(
            fitted,
            at[0] * (1 if fixed == "tokens" else 10),
            at[1] * (10 if fixed == "tokens" else 1),
        )


def test_the_form_compute_is_refused_for_runs_over_an_area():
    fitted = fit_runs(runs(), "compute")
    assert fitted.status == "unidentified"
    assert "spread over an area" in fitted.warnings[0]


def test_accuracies_are_no_losses():
    fitted = fit_runs(from_columns(N, D, np.linspace(70, 75, 20)))
    assert fitted.status == "degenerate"
    assert fitted.warnings[0].startswith("values of 70 to 75 are no losses in nats")
    assert predict(fitted, 1e10, 2e11).doubts


def test_losses_that_grow_with_tokens_are_said_and_decide_nothing():
    fitted = fit_runs(from_columns(N, D, law_loss(PUBLISHED, N, 1e10) * (D / 1e10) ** 0.02))
    assert "losses grow with tokens" in fitted.warnings[0]
    assert fit_summary(fitted)["warnings"][0].startswith(INCONCLUSIVE)
    assert prediction_summary(predict(fitted, 1e10, 2e11))["warnings"][0].startswith(INCONCLUSIVE)


def test_a_best_run_that_nobody_would_build_is_inconclusive():
    thousandth = runs()
    wrong_unit = from_columns(thousandth.params, thousandth.tokens / 1e3, thousandth.loss)
    found = allocate(fit_runs(wrong_unit), 6 * 1e10 * 2e8)
    assert found.tokens_per_param < 1
    assert any("tokens per parameter" in doubt for doubt in found.doubts)


def test_a_conclusive_forecast_has_no_doubt_and_each_back_test_its_figures():
    fitted = fit_runs(runs())
    assert prediction_summary(predict(fitted, 4e9, 8e10))["warnings"] == []
    keys = {
        "num_fitted",
        "num_held_out",
        "extrapolation",
        "mean_error",
        "largest_error",
        "num_covered",
    }
    summary = fit_summary(fitted)
    assert [set(test) for test in summary["backtests"]] == [keys] * len(fitted.backtests)
    assert summary["backtest"].keys() == keys | {"runs"}
    assert not summary.keys() & {"misfit_sd", "drift", "trend", "interval_inflation", "weighting"}


def test_points_along_curves_are_known_without_a_column_of_runs():
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
