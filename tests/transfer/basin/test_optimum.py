"""Tests of the optimum that is found at each size, and of sizes where no optimum can be found."""

import dataclasses

import numpy as np
import pytest
from planted_basins import SMALL, WIDE, compute_parabola, compute_two_parabolas

from forerun._transfer.basin.optimum import find_optima
from forerun._transfer.question import Point


def make_points(width, losses, lowest_log2=-8.0, seed=0):
    """Return the runs of one width with these losses, at whole octaves of the rate from the lowest
    one up.
    """
    return [
        Point(size=width, log2_value=lowest_log2 + i, loss_nats=loss, seed=seed)
        for i, loss in enumerate(losses)
    ]


def find_all_optima(points):
    """Return the optimum of each size."""
    return find_optima(points, level=0.9, draws=1000, rng=np.random.default_rng(0)).optima


WELL_SAMPLED = make_points(32, [2.30, 2.15, 2.101, 2.149, 2.301])


@pytest.mark.parametrize(
    ("world", "basin_shape", "num_draws"),
    [(WIDE, compute_two_parabolas, 15), (SMALL, compute_parabola, 30)],
)
def test_intervals_cover_the_planted_optimum(world, basin_shape, num_draws):
    world = dataclasses.replace(world, compute_rise=basin_shape)
    covered = []
    for seed in range(num_draws):
        points, base = world.draw(np.random.default_rng(seed))
        for optimum in find_optima(
            points, level=0.9, draws=600, rng=np.random.default_rng(seed)
        ).optima:
            low, high = optimum.interval_log2
            covered.append(low <= world.compute_optimum(optimum.size, base) <= high)
    # The level is 0.9, and the share varies by chance over so few draws
    assert np.mean(covered) >= 0.85


def test_optimum_at_the_edge_is_refused():
    low, high = find_all_optima(
        [
            *make_points(32, [2.1, 2.2, 2.32, 2.43, 2.56]),
            *make_points(64, [2.55, 2.43, 2.31, 2.20, 2.11]),
        ]
    )
    assert (low.status, high.status) == ("edge", "edge")
    assert low.log2_value is None and low.interval_log2 is None and low.curve == ()


def test_basin_within_the_noise_is_refused():
    statuses = []
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(0, 0.05, (2, 2, 6))
        points = []
        for index, width in enumerate((32, 64)):
            for s in (0, 1):
                points += make_points(width, (2 + noise[index, s]).tolist(), seed=s)
        statuses += [o.status for o in find_all_optima(points)]
    assert statuses.count("ok") <= 0.1 * len(statuses)
    assert statuses.count("flat") > statuses.count("edge")


def test_three_rates_are_too_few_unless_another_size_has_more():
    three = make_points(64, [2.2, 2.1, 2.2], lowest_log2=-7.0)
    assert [o.status for o in find_all_optima([*WELL_SAMPLED, *three])] == ["ok", "ok"]
    assert [o.status for o in find_all_optima([*three, *make_points(32, [2.3, 2.2, 2.3])])] == [
        "too_few",
        "too_few",
    ]
    assert [o.status for o in find_all_optima([*WELL_SAMPLED, *three[:2]])] == ["ok", "too_few"]


def test_diverged_runs_locate_the_cliff_and_are_left_out_of_the_fit():
    """The cliff is the lowest rate above the optimum at which a run diverged. A run of another seed
    that finished at this rate is left out as well.
    """
    diverged_and_survivor = [
        Point(size=32, log2_value=-3.0, loss_nats=None, seed=0),
        Point(size=32, log2_value=-3.0, loss_nats=1.0, seed=1),
    ]
    (alone,), (with_cliff,) = (
        find_all_optima(WELL_SAMPLED),
        find_all_optima([*WELL_SAMPLED, *diverged_and_survivor]),
    )
    assert with_cliff.num_diverged == 1 and with_cliff.num_runs == 7
    # The loss of 1.0 of the surviving seed would have moved the optimum
    assert with_cliff.log2_value == pytest.approx(alone.log2_value)
    assert with_cliff.cliff_octaves == pytest.approx(-3 - with_cliff.log2_value)
    assert alone.cliff_octaves is None


def test_runs_far_from_the_best_rate_do_not_move_the_minimum():
    points, _ = WIDE.draw(np.random.default_rng(1))
    distant = [
        Point(size=w, log2_value=-14.0, loss_nats=9.0, seed=s) for w in WIDE.sizes for s in range(3)
    ]
    assert [o.log2_value for o in find_all_optima([*points, *distant])] == [
        o.log2_value for o in find_all_optima(points)
    ]


@pytest.mark.parametrize(
    ("first_value", "is_below_runs"),
    [(-9.5, True), (-9.0, False)],
    ids=["between two runs", "at a run"],
)
def test_basin_passes_through_its_runs_and_reports_the_lowest(first_value, is_below_runs):
    """A minimum between two values is below both runs; a minimum at a value equals its run."""
    points = [
        Point(size=size, log2_value=value, loss_nats=depth + 0.3 * abs(value + 7.0) ** 1.5, seed=0)
        for size, depth in ((32, 3.0), (64, 2.9))
        for value in (first_value + step for step in range(6))
    ]
    for optimum in find_all_optima(points):
        losses = {p.log2_value: p.loss_nats for p in points if p.size == optimum.size}
        near = {value: loss for value, loss in losses.items() if loss < min(losses.values()) + 1}
        curve_losses = np.interp([*near], *zip(*optimum.curve, strict=True))
        assert curve_losses == pytest.approx([*near.values()], abs=0.02)
        assert optimum.lowest_run_nats == min(losses.values())
        assert (optimum.lowest_run_nats - optimum.loss_nats > 0.05) == is_below_runs
        assert min(loss for _, loss in optimum.curve) == pytest.approx(optimum.loss_nats)
