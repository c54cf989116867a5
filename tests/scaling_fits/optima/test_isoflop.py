import dataclasses

import numpy as np
import pytest
from planted_optima import (
    PARAMS_EXPONENT,
    best_loss,
    best_params,
    isoflop_runs,
    porian_setups,
    runs,
)

from scaling_fits.compute.isoflop import fit_isoflop
from scaling_fits.compute.optima import OptimaError, predict_at

BUDGETS = 10.0 ** np.arange(17, 20, 0.5)


def test_planted_optima_are_found():
    fit = fit_isoflop(isoflop_runs(BUDGETS, half_width=1.0), bootstrap=50)
    assert fit.status == "converged"
    off = [np.log(at.params / best_params(at.flops)) for at in fit.optima]
    assert np.abs(off).max() < 0.002
    assert fit.params_law.exponents[0] == pytest.approx(PARAMS_EXPONENT, abs=0.002)
    assert fit.tokens_law.exponents[0] == pytest.approx(1 - PARAMS_EXPONENT, abs=0.002)
    assert [at.loss_nats for at in fit.optima] == pytest.approx(
        [best_loss(at.flops) for at in fit.optima], rel=1e-4
    )
    far = predict_at(fit, 1e21)
    assert far.params * far.tokens * 6 == pytest.approx(1e21, rel=1e-2)


def test_intervals_cover_noisy_runs():
    optima, exponents, sizes = [], [], []
    for seed in range(20):
        table = isoflop_runs(BUDGETS, noise=0.002, seed=seed, shift=0.3)
        fit = fit_isoflop(table, bootstrap=100, seed=seed)
        optima += [
            at.params_interval[0] <= best_params(at.flops) <= at.params_interval[1]
            for at in fit.optima
            if at.status == "ok"
        ]
        low, high = fit.params_law.exponent_interval(0, 0.9)
        exponents.append(low <= PARAMS_EXPONENT <= high)
        low, high = predict_at(fit, 3e20).params_interval
        sizes.append(low <= best_params(3e20) <= high)
    assert 0.78 <= np.mean(optima) <= 0.97
    assert np.mean(exponents) >= 0.85
    assert np.mean(sizes) >= 0.85


def test_wide_lopsided_valleys_do_not_bend_the_optimum():
    """A parabola through all sizes is off by more than 2 % here."""
    fit = fit_isoflop(isoflop_runs(BUDGETS, num_sizes=12, half_width=3.5), bootstrap=50)
    assert max(abs(np.log(at.params / best_params(at.flops))) for at in fit.optima) < 0.02


def test_what_has_no_optimum_is_refused_and_says_what_to_run():
    table = isoflop_runs(BUDGETS[:4])
    kept = np.ones(table.num_runs, dtype=bool)
    kept[:3] = False  # the first budget: four sizes
    kept[11:14] = False  # the second: its best size is the largest
    loss = table.loss.copy()
    loss[14:21] = 6.5 - loss[14:21]  # the third is a hill
    fit = fit_isoflop(dataclasses.replace(table, loss=loss).rows(kept), bootstrap=50)
    assert [at.status for at in fit.optima] == ["too_few", "too_few", "edge", "ok"]
    assert (fit.status, fit.params_law) == ("unidentified", None)
    assert "4 of the 5 sizes needed: add 1 more" in fit.optima[0].reason
    assert any(
        "1 of 4 budgets with an optimum: there must be at least 3" in warning
        for warning in fit.warnings
    )


def test_budgets_are_flops_within_a_few_percent_or_the_column():
    table = isoflop_runs(BUDGETS)
    tokens = table.tokens * np.exp(np.random.default_rng(0).uniform(-0.01, 0.01, table.num_runs))
    near = runs(table.params, tokens, table.loss)
    assert len(fit_isoflop(near, bootstrap=50).optima) == len(BUDGETS)
    spread = runs(
        table.params,
        table.tokens * np.exp(np.random.default_rng(0).uniform(-0.2, 0.2, table.num_runs)),
        table.loss,
    )
    assert fit_isoflop(spread, bootstrap=50).status == "unidentified"
    fit = fit_isoflop(dataclasses.replace(spread, budget=np.repeat(BUDGETS, 7)), bootstrap=50)
    assert len(fit.optima) == len(BUDGETS)


def test_flops_are_the_tables_own():
    """Twice the FLOPs at the same runs: the same N* and D*, half the coefficient to the power."""
    table = isoflop_runs(BUDGETS)
    ours, theirs = (
        fit_isoflop(
            runs(table.params, table.tokens, table.loss, flops=scale * table.flops), bootstrap=50
        )
        for scale in (1.0, 2.0)
    )
    assert [at.params for at in theirs.optima] == pytest.approx([at.params for at in ours.optima])
    assert [at.tokens for at in theirs.optima] == pytest.approx([at.tokens for at in ours.optima])
    assert theirs.params_law.at(2e21) == pytest.approx(ours.params_law.at(1e21))


def test_no_bootstrap_no_intervals_and_every_bad_option_at_once():
    fit = fit_isoflop(isoflop_runs(BUDGETS), bootstrap=0)
    assert {at.params_interval for at in fit.optima} == {None}
    assert predict_at(fit, 1e21).params_interval is None
    with pytest.raises(OptimaError) as error:
        fit_isoflop(isoflop_runs(BUDGETS), bootstrap=-1, level=2, seed=-1)
    assert len(error.value.problems) == 3


def test_published_exponents_of_porian():
    """Window against the published interpolation: 95 % intervals that overlap, one of ten may miss
    by chance.
    """
    met = {}
    for key, (table, published) in porian_setups().items():
        law = fit_isoflop(table, bootstrap=30).params_law
        ours, theirs = law.exponent_interval(0, 0.95), published["interval"]
        met["/".join(key)] = ours[0] <= theirs[1] and theirs[0] <= ours[1]
        assert law.exponents[0] == pytest.approx(published["exponent"], abs=0.03)
    assert len(met) == 10
    assert sum(met.values()) >= 9
