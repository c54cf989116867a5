"""Residuals and what they tell."""

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, ladder

from scaling_fits import diagnostics, law
from scaling_fits.table import from_columns


@pytest.fixture(scope="module")
def outlier():
    table = ladder(CHINCHILLA, np.random.default_rng(0), 0.0005)
    loss = table.loss.copy()
    loss[7] *= 1.1
    table = from_columns(table.params, table.tokens, loss)
    return table, law.fit_law(table, "chinchilla")


def test_residuals_are_measured_less_predicted(outlier):
    table, fit = outlier
    found = diagnostics.residuals(table, fit)
    assert found[7] == pytest.approx(np.log(1.1), abs=2e-3)
    weight = np.minimum(np.abs(found), 1e-3)
    assert (weight * (np.abs(found) - weight / 2)).sum() == pytest.approx(fit.objective, rel=1e-9)


def test_diagnosis_names_the_outlier_and_finds_the_optimum_sharp(outlier):
    found = diagnostics.diagnose(*outlier)
    assert found.largest_run == 7
    assert found.largest_residual > 0.09
    assert found.num_beyond_delta == 1
    assert found.gain_left < 1e-8
    assert 1 < found.condition < 1e3


def test_an_unidentified_law_has_none(outlier):
    table, _ = outlier
    few = table.rows(np.arange(3))
    with pytest.raises(law.LawError, match="unidentified"):
        diagnostics.residuals(few, law.fit_law(few, "kaplan"))
