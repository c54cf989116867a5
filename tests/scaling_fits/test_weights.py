"""Runs on the frontier keep their weight; runs far above it lose it."""

import dataclasses

import numpy as np
import pytest

from scaling_fits.laws.table import from_columns
from scaling_fits.laws.weights import FRONTIER_WIDTH, LEAST_EFFECTIVE_RUNS, effective_runs, excess, near_frontier


def test_excess_is_over_the_best_of_no_larger_cost():
    params = np.array([1e6, 2e6, 1e6, 4e6])
    tokens = np.array([2e7, 1e7, 4e7, 4e7])
    table = from_columns(params, tokens, [3.0, 3.3, 2.8, 2.9])
    assert excess(table) == pytest.approx(np.log([1, 3.3 / 3.0, 1, 2.9 / 2.8]))


def cloud_of_runs(excesses):
    """Runs of one budget, the best first, the others so far above it in log loss."""
    loss = 3.0 * np.exp(np.array([0.0, *excesses]))
    return from_columns(np.geomspace(1e6, 2e6, len(loss)), np.geomspace(2e7, 1e7, len(loss)), loss)


def test_a_run_one_width_above_weighs_half():
    table = cloud_of_runs([0.0] * 18 + [FRONTIER_WIDTH])
    weight = near_frontier(table).weight
    assert weight[-1] / weight[0] == pytest.approx(0.5)
    assert weight[1] == weight[0]


def test_weights_keep_their_sum_and_multiply():
    table = cloud_of_runs([0.0] * 18 + [FRONTIER_WIDTH])
    heavy = dataclasses.replace(table, weight=np.array([2.0] + [1.0] * 19))
    assert near_frontier(heavy).weight.sum() == pytest.approx(21.0)
    ratio = near_frontier(heavy).weight / near_frontier(table).weight
    assert ratio[0] / ratio[1] == pytest.approx(2.0)


def test_few_runs_weigh_alike_and_more_keep_as_many_as_a_law_needs():
    few = cloud_of_runs(np.linspace(0, 0.2, 14))
    assert (near_frontier(few).weight == few.weight).all()
    more = near_frontier(cloud_of_runs(np.linspace(0, 0.2, 29)))
    assert effective_runs(more.weight) == pytest.approx(LEAST_EFFECTIVE_RUNS)
    assert (np.diff(more.weight)[1:] < 0).all()
    many = near_frontier(cloud_of_runs([0.0] * 14 + [0.2] * 300)).weight
    assert effective_runs(many) > LEAST_EFFECTIVE_RUNS  # as many as there are: nothing is evened out
    assert many[-1] / many[0] == pytest.approx(1 / (1 + (0.2 / FRONTIER_WIDTH) ** 2))
