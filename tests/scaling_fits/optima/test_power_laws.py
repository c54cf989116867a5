import numpy as np
import pytest

from scaling_fits.compute.power_laws import PowerLawError, fit_power_law

X = np.geomspace(1e17, 1e20, 6)


def test_exact_points_give_the_law_back():
    law = fit_power_law({"flops": X}, np.log(0.3 * X**0.52), np.zeros(6))
    assert law.exponents[0] == pytest.approx(0.52, abs=1e-9)
    assert law.coefficient == pytest.approx(0.3, rel=1e-6)
    assert law.at(1e22) == pytest.approx(0.3 * 1e22**0.52, rel=1e-6)


def test_intervals_cover_with_scatter_that_the_points_do_not_know_of():
    """Points that claim to be exact and scatter by 10 %: the regression must find the scatter
    itself.
    """
    covered, at_far = [], []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        law = fit_power_law(
            {"flops": X}, np.log(0.3 * X**0.52) + 0.1 * rng.standard_normal(6), np.zeros(6)
        )
        low, high = law.exponent_interval(0, 0.9)
        covered.append(low <= 0.52 <= high)
        low, high = law.interval_at(1e21, level=0.9)
        at_far.append(low <= 0.3 * 1e21**0.52 * np.exp(0.1 * rng.standard_normal()) <= high)
    assert 0.85 <= np.mean(covered) <= 0.96
    assert 0.85 <= np.mean(at_far) <= 0.96


def test_too_few_points_and_inputs_on_one_line_are_refused():
    with pytest.raises(
        PowerLawError, match="2 points for 2 coefficients: there must be at least 3"
    ):
        fit_power_law({"flops": X[:2]}, np.log(X[:2]), np.zeros(2))
    with pytest.raises(PowerLawError, match="params and tokens do not vary independently"):
        fit_power_law({"params": X, "tokens": 20 * X}, np.log(X), np.zeros(6))
