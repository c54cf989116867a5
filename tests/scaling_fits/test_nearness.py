"""Runs on the frontier keep their weight; runs far above it lose it."""

import dataclasses

import numpy as np
import pytest

from scaling_fits.nearness import FRONTIER_WIDTH, excess, near_frontier
from scaling_fits.table import from_columns


def test_excess_is_over_the_best_of_no_larger_cost():
    params = np.array([1e6, 2e6, 1e6, 4e6])
    tokens = np.array([2e7, 1e7, 4e7, 4e7])
    table = from_columns(params, tokens, [3.0, 3.3, 2.8, 2.9])
    assert excess(table) == pytest.approx(np.log([1, 3.3 / 3.0, 1, 2.9 / 2.8]))


def test_a_run_one_width_above_weighs_half():
    table = from_columns([1e6, 1e6], [1e7, 1e7], [3.0, 3.0 * np.exp(FRONTIER_WIDTH)])
    first, second = near_frontier(table).weight
    assert second / first == pytest.approx(0.5)


def test_weights_keep_their_sum_and_multiply():
    table = from_columns([1e6, 2e6, 4e6], [1e7, 1e7, 1e7], [3.0, 3.1, 2.7])
    heavy = dataclasses.replace(table, weight=np.array([5.0, 1.0, 1.0]))
    assert near_frontier(heavy).weight.sum() == pytest.approx(7.0)
    ratio = near_frontier(heavy).weight / near_frontier(table).weight
    assert ratio[0] / ratio[1] == pytest.approx(5.0)
