import numpy as np
import pytest
from planted_optima import PARAMS_EXPONENT, best_loss, best_params, curves, loss_at, runs

from scaling_fits.compute.frontier import fit_frontier
from scaling_fits.compute.optima import OptimaError, predict_at
from scaling_fits.compute.power_laws import fit_power_law


def test_planted_optima_are_found():
    fit = fit_frontier(curves(), bootstrap=50)
    assert fit.status == "converged"
    assert len(fit.optima) == 7
    assert np.abs([np.log(at.params / best_params(at.flops)) for at in fit.optima]).max() < 0.02
    assert fit.params_law.exponents[0] == pytest.approx(PARAMS_EXPONENT, abs=0.003)
    assert predict_at(fit, 2e21).loss_nats == pytest.approx(best_loss(2e21), rel=5e-3)


def test_handovers_do_not_need_even_sizes():
    sizes = 2e7 * np.cumprod([1.0, 1.3, 2.2, 1.3, 2.2, 1.3, 2.2])
    params = np.repeat(sizes, 12)
    tokens = params * np.tile(np.geomspace(2, 300, 12), 7)
    fit = fit_frontier(runs(params, tokens, loss_at(params, tokens)), bootstrap=0)
    assert fit.params_law.exponents[0] == pytest.approx(PARAMS_EXPONENT, abs=0.01)


def test_intervals_cover_noisy_runs():
    covered = []
    for seed in range(12):
        low, high = fit_frontier(curves(noise=0.002, seed=seed), bootstrap=0).params_law.exponent_interval(0, 0.9)
        covered.append(low <= PARAMS_EXPONENT <= high)
    assert np.mean(covered) >= 0.85


def test_few_sizes_cannot_tell():
    fit = fit_frontier(curves(num_sizes=4), bootstrap=50)
    assert (fit.status, fit.loss_law) == ("unidentified", None)
    assert any("3 times, and 4 are wanted: add sizes" in warning for warning in fit.warnings)
    assert fit_frontier(curves(num_sizes=1), bootstrap=0).status == "unidentified"


def test_a_size_with_one_length_has_no_curve():
    table = curves()
    keep = np.ones(table.num_runs, dtype=bool)
    keep[1:12] = False
    assert any(
        "1 of the sizes: one length only" in text for text in fit_frontier(table.rows(keep), bootstrap=0).warnings
    )


def test_every_bad_option_at_once():
    with pytest.raises(OptimaError) as error:
        fit_frontier(curves(), bootstrap=-1, level=0, seed=-1)
    assert len(error.value.problems) == 3


def test_sizes_stand_and_fall_together():
    """Leaving out a size moves both of its handovers: more than a regression through them can see."""
    law = fit_frontier(curves(noise=0.002, seed=4), bootstrap=0)
    flops, params = (np.array([getattr(at, name) for at in law.optima]) for name in ("flops", "params"))
    regression = fit_power_law({"flops": flops}, np.log(params), np.zeros(len(flops)))
    assert law.params_law.exponents == pytest.approx(regression.exponents)
    assert law.params_law.covariance[1][1] > 2 * regression.covariance[1][1]
