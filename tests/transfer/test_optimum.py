import dataclasses

import numpy as np
import pytest
from planted_valleys import SMALL, WIDE, parabola, rng, two_parabolas

from transfer.basin.optimum import find_optima
from transfer.question import Point


def grid(width, losses, first=-8.0, seed=0):
    return [
        Point(size=width, log2_value=first + i, loss_nats=x, seed=seed)
        for i, x in enumerate(losses)
    ]


def find(points):
    return find_optima(points, level=0.9, draws=1000, rng=rng(0)).optima


GOOD = grid(32, [2.30, 2.15, 2.101, 2.149, 2.301])


@pytest.mark.parametrize(("world", "valley"), [(WIDE, two_parabolas), (SMALL, parabola)])
def test_intervals_cover_the_planted_optimum(world, valley):
    world, covered = dataclasses.replace(world, valley=valley), []
    for seed in range(30):
        points, base = world.draw(rng(seed))
        for optimum in find_optima(points, level=0.9, draws=600, rng=rng(seed)).optima:
            low, high = optimum.interval_log2
            covered.append(low <= world.optimum(optimum.size, base) <= high)
    print(f"{valley.__name__}, {len(world.sizes)} sizes: {np.mean(covered):.3f} covered at 0.9")
    assert np.mean(covered) >= 0.85


def test_an_optimum_at_the_edge_is_refused():
    low, high = find(
        [*grid(32, [2.1, 2.2, 2.32, 2.43, 2.56]), *grid(64, [2.55, 2.43, 2.31, 2.20, 2.11])]
    )
    assert (low.status, high.status) == ("edge", "edge")
    assert low.log2_value is None and low.interval_log2 is None and low.curve == ()


def test_a_valley_within_the_noise_is_refused():
    statuses = []
    for seed in range(20):
        noise = rng(seed).normal(0, 0.05, (2, 2, 6))
        points = [
            p
            for w in (0, 1)
            for s in (0, 1)
            for p in grid(32 << w, (2 + noise[w, s]).tolist(), seed=s)
        ]
        statuses += [o.status for o in find(points)]
    assert statuses.count("ok") <= 0.1 * len(statuses)
    assert statuses.count("flat") > statuses.count("edge")


def test_three_rates_are_too_few_unless_another_size_has_more():
    three = grid(64, [2.2, 2.1, 2.2], first=-7.0)
    assert [o.status for o in find([*GOOD, *three])] == ["ok", "ok"]
    assert [o.status for o in find([*three, *grid(32, [2.3, 2.2, 2.3])])] == ["too_few", "too_few"]
    assert [o.status for o in find([*GOOD, *three[:2]])] == ["ok", "too_few"]


def test_diverged_runs_give_the_cliff_and_leave_the_fit():
    cliff = [
        Point(size=32, log2_value=-3.0, loss_nats=None, seed=0),
        Point(size=32, log2_value=-3.0, loss_nats=1.0, seed=1),
    ]
    (alone,), (found,) = find(GOOD), find([*GOOD, *cliff])
    assert found.num_diverged == 1 and found.num_runs == 7
    # the survivor's 1.0 would have moved it
    assert found.log2_value == pytest.approx(alone.log2_value)
    assert found.cliff_octaves == pytest.approx(-3 - found.log2_value)
    assert alone.cliff_octaves is None


def test_far_points_do_not_bend_the_minimum():
    points, _ = WIDE.draw(rng(1))
    far = [
        Point(size=w, log2_value=-14.0, loss_nats=9.0, seed=s) for w in WIDE.sizes for s in range(3)
    ]
    assert [o.log2_value for o in find([*points, *far])] == [o.log2_value for o in find(points)]


@pytest.mark.parametrize(
    ("first", "below"), [(-9.5, True), (-9.0, False)], ids=["between two runs", "at a run"]
)
def test_a_basin_goes_through_its_runs_and_knows_the_lowest(first, below):
    """A minimum between two values lies below both; one at a value lies at its run."""
    points = [
        Point(size=size, log2_value=value, loss_nats=depth + 0.3 * abs(value + 7.0) ** 1.5, seed=0)
        for size, depth in ((32, 3.0), (64, 2.9))
        for value in (first + step for step in range(6))
    ]
    for optimum in find(points):
        losses = {p.log2_value: p.loss_nats for p in points if p.size == optimum.size}
        near = {value: loss for value, loss in losses.items() if loss < min(losses.values()) + 1}
        drawn = np.interp([*near], *zip(*optimum.curve, strict=True))
        assert drawn == pytest.approx([*near.values()], abs=0.02)
        assert optimum.lowest_run_nats == min(losses.values())
        assert (optimum.lowest_run_nats - optimum.loss_nats > 0.05) == below
        assert min(loss for _, loss in optimum.curve) == pytest.approx(optimum.loss_nats)
