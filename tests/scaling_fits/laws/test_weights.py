"""Tests of a run's excess loss over the best run of its budget, and of the noise that grows with
it.
"""

import numpy as np
import pytest

from forerun._scaling_fits.forecast.population import PUBLIC
from forerun._scaling_fits.forecast.posterior import merge_runs
from forerun._scaling_fits.laws.table import from_columns
from forerun._scaling_fits.laws.weights import compute_excess


def test_excess_is_over_the_best_run_of_no_larger_cost():
    params = np.array([1e6, 2e6, 1e6, 4e6])
    tokens = np.array([2e7, 1e7, 4e7, 4e7])
    table = from_columns(params, tokens, [3.0, 3.3, 2.8, 2.9])
    assert compute_excess(table) == pytest.approx(np.log([1, 3.3 / 3.0, 1, 2.9 / 2.8]))


def test_run_off_the_frontier_has_more_noise():
    loss = [3.0, 3.0 * np.exp(PUBLIC.near), 3.0 * np.exp(10 * PUBLIC.near), 3.0]
    table = from_columns([1e6, 2e6, 3e6, 4e6], [4e7, 2e7, 1.3e7, 1e7], loss)
    assert merge_runs(table).variance == pytest.approx([1.0, 2.0, 101.0, 1.0])
