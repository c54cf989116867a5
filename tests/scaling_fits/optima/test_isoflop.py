"""Tests of the fit of best sizes to runs of equal budgets."""

import dataclasses

import numpy as np
import pytest
from planted_optima import (
    PARAMS_EXPONENT,
    compute_best_loss,
    compute_best_params,
    make_isoflop_runs,
    make_table,
    read_porian_setups,
)

from forerun._scaling_fits.optima.isoflop import fit_isoflop
from forerun._scaling_fits.optima.optima_fit import OptimaError, predict_at

BUDGETS = 10.0 ** np.arange(17, 20, 0.5)


def test_planted_optima_are_recovered():
    fit = fit_isoflop(make_isoflop_runs(BUDGETS, half_width=1.0), bootstrap=50)
    assert fit.status == "converged"
    log_errors = [np.log(at.params / compute_best_params(at.flops)) for at in fit.optima]
    assert np.abs(log_errors).max() < 0.002
    assert fit.params_law.exponents[0] == pytest.approx(PARAMS_EXPONENT, abs=0.002)
    assert fit.tokens_law.exponents[0] == pytest.approx(1 - PARAMS_EXPONENT, abs=0.002)
    assert [at.loss_nats for at in fit.optima] == pytest.approx(
        [compute_best_loss(at.flops) for at in fit.optima], rel=1e-4
    )
    far = predict_at(fit, 1e21)
    assert far.params * far.tokens * 6 == pytest.approx(1e21, rel=1e-2)


def test_intervals_cover_planted_optima_under_noise():
    optima, exponent_covered, size_covered = [], [], []
    for seed in range(20):
        table = make_isoflop_runs(BUDGETS, noise=0.002, seed=seed, shift=0.3)
        fit = fit_isoflop(table, bootstrap=100, seed=seed)
        optima += [
            at.params_interval[0] <= compute_best_params(at.flops) <= at.params_interval[1]
            for at in fit.optima
            if at.status == "ok"
        ]
        low, high = fit.params_law.compute_exponent_interval(0, 0.9)
        exponent_covered.append(low <= PARAMS_EXPONENT <= high)
        low, high = predict_at(fit, 3e20).params_interval
        size_covered.append(low <= compute_best_params(3e20) <= high)
    assert 0.78 <= np.mean(optima) <= 0.97
    assert np.mean(exponent_covered) >= 0.85
    assert np.mean(size_covered) >= 0.85


def test_wide_asymmetric_basins_do_not_bias_the_optimum():
    """A parabola through all sizes is off by more than 2 % here."""
    fit = fit_isoflop(make_isoflop_runs(BUDGETS, num_sizes=12, half_width=3.5), bootstrap=50)
    assert max(abs(np.log(at.params / compute_best_params(at.flops))) for at in fit.optima) < 0.02


def test_budget_without_an_optimum_is_refused_with_advice():
    table = make_isoflop_runs(BUDGETS[:4])
    kept = np.ones(table.num_runs, dtype=bool)
    # The first budget keeps four sizes.
    kept[:3] = False
    # The second budget keeps its four smallest sizes.
    kept[11:14] = False
    loss = table.loss.copy()
    # The losses of the third budget have a maximum instead of a minimum.
    loss[14:21] = 6.5 - loss[14:21]
    fit = fit_isoflop(dataclasses.replace(table, loss=loss).select_runs(kept), bootstrap=50)
    assert [at.status for at in fit.optima] == ["too_few", "too_few", "edge", "ok"]
    assert (fit.status, fit.params_law) == ("unidentified", None)
    assert "4 of the 5 sizes needed: add 1 more" in fit.optima[0].reason
    assert any(
        "1 of 4 budgets with an optimum: there must be at least 3" in warning
        for warning in fit.warnings
    )


def test_runs_are_grouped_by_near_flops_or_by_the_budget_column():
    table = make_isoflop_runs(BUDGETS)
    tokens = table.tokens * np.exp(np.random.default_rng(0).uniform(-0.01, 0.01, table.num_runs))
    near = make_table(table.params, tokens, table.loss)
    assert len(fit_isoflop(near, bootstrap=50).optima) == len(BUDGETS)
    spread = make_table(
        table.params,
        table.tokens * np.exp(np.random.default_rng(0).uniform(-0.2, 0.2, table.num_runs)),
        table.loss,
    )
    assert fit_isoflop(spread, bootstrap=50).status == "unidentified"
    fit = fit_isoflop(dataclasses.replace(spread, budget=np.repeat(BUDGETS, 7)), bootstrap=50)
    assert len(fit.optima) == len(BUDGETS)


def test_flops_of_the_table_are_used():
    """Doubling the FLOPs of the same runs leaves N* and D* as they are."""
    table = make_isoflop_runs(BUDGETS)
    doubled = make_table(table.params, table.tokens, table.loss, flops=2 * table.flops)
    plain_fit = fit_isoflop(
        make_table(table.params, table.tokens, table.loss, flops=table.flops), bootstrap=50
    )
    doubled_fit = fit_isoflop(doubled, bootstrap=50)
    plain_optima = [(at.params, at.tokens) for at in plain_fit.optima]
    doubled_optima = [(at.params, at.tokens) for at in doubled_fit.optima]
    assert np.array(doubled_optima) == pytest.approx(np.array(plain_optima))
    best_size = plain_fit.params_law.compute_value(1e21)
    assert doubled_fit.params_law.compute_value(2e21) == pytest.approx(best_size)


def test_no_bootstrap_gives_no_intervals_and_bad_options_are_reported_at_once():
    fit = fit_isoflop(make_isoflop_runs(BUDGETS), bootstrap=0)
    assert {at.params_interval for at in fit.optima} == {None}
    assert predict_at(fit, 1e21).params_interval is None
    with pytest.raises(OptimaError) as error:
        fit_isoflop(make_isoflop_runs(BUDGETS), bootstrap=-1, level=2, seed=-1)
    assert len(error.value.problems) == 3


def test_published_exponents_of_porian_are_reproduced():
    """Our 95 % intervals and the published ones overlap. One of the ten may miss by chance."""
    overlaps = []
    for table, published in read_porian_setups().values():
        law = fit_isoflop(table, bootstrap=30).params_law
        low, high = law.compute_exponent_interval(0, 0.95)
        published_low, published_high = published["interval"]
        overlaps.append(low <= published_high and published_low <= high)
        assert law.exponents[0] == pytest.approx(published["exponent"], abs=0.03)
    assert len(overlaps) == 10
    assert sum(overlaps) >= 9
