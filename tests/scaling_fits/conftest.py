"""Fixtures of the tests of scaling-law fits."""

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, make_ladder

from forerun._scaling_fits.forecast.uncertainty import fit_runs


@pytest.fixture(scope="session")
def law_fit():
    """A fit of twelve noisy runs with a planted law; tests must not change it."""
    return fit_runs(make_ladder(CHINCHILLA, np.random.default_rng(0), noise=0.01), bootstrap=12)
