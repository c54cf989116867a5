"""Noise passes as noise, and a wrong law is told from it."""

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, COUPLED, POWER, ladder
from scaling_fits.laws.lack_of_fit import p_value, structure_of

from scaling_fits.laws import law
from scaling_fits.laws.table import from_columns

WIDE = {"sizes": np.geomspace(1e5, 1e8, 7), "tokens": np.geomspace(1e6, 1e9, 7)}


@pytest.mark.parametrize("form", ["chinchilla", pytest.param("coupled", marks=pytest.mark.slow)])
def test_a_true_law_fails_as_often_as_it_should(form):
    truth = CHINCHILLA if form == "chinchilla" else COUPLED
    tables = [ladder(truth, np.random.default_rng(seed), 0.01, 40, **WIDE) for seed in range(30)]
    values = np.array([p_value(table, law.fit_law(table, form)) for table in tables])
    assert 0.0 <= (values < 0.1).mean() <= 0.3  # Huber is not least squares: the F test is near, not exact
    assert 0.3 < np.median(values) < 0.7


def test_a_wrong_law_fails():
    table = ladder(CHINCHILLA, np.random.default_rng(0), 0.005, 49, **WIDE)
    assert p_value(table, law.fit_law(table, "chinchilla")) > 0.02
    assert p_value(table, law.fit_law(table, "power")) < 1e-4


def test_misfit_is_what_smooth_residuals_hold_beyond_noise():
    """Of a law that misses by 3 % of smooth tilt, and of the truth."""
    table = ladder(POWER, np.random.default_rng(2), 0.0, 49, **WIDE)
    n, d = np.log(table.params), np.log(table.tokens)
    bend = 0.03 * (n - n.mean()) * (d - d.mean()) / (n.std() * d.std())
    noise = 0.002 * np.random.default_rng(3).standard_normal(49)
    bent = from_columns(table.params, table.tokens, table.loss * np.exp(bend + noise))
    fits = [law.fit_law(bent, form) for form in ("chinchilla", "power")]
    found = structure_of(bent, fits)
    left = [np.log(bent.loss) - law.log_loss(fit.theta[None], bent.params, bent.tokens)[0] for fit in fits]
    sizes = np.sqrt(found.misfit_variance(np.eye(2)))
    assert sizes == pytest.approx([rough.std() for rough in left], rel=0.35)
    clean = ladder(POWER, np.random.default_rng(2), 0.01, 49, **WIDE)
    small = structure_of(clean, [law.fit_law(clean, "power")])
    assert np.sqrt(small.misfit_variance(np.ones((1, 1))))[0] < 0.5 * sizes.min()
