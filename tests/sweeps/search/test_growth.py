"""Tests of open edges: ends of ranges beyond which the optimum may lie, and how ranges grow."""

import math

import pytest
from spaces import SPACE

from forerun._sweeps.search.growth import Edge, find_open_edges, grow_space, make_probes


def make_trials(space, optimum, num=24, cliff=math.inf, name="learning_rate"):
    """Return points spread over one axis, with the other axes in the middle, and their losses.

    The loss is a parabola about the optimum, and trials above the cliff diverge. Both are given as
    log2 of the value.
    """
    points = [
        {
            **space.make_point([0.5] * space.num_coordinates),
            # Multiples of the golden ratio modulo 1 spread evenly
            name: space.axis(name).interpolate((i * 0.618) % 1),
        }
        for i in range(num)
    ]
    octaves = [space.axis(name).octaves(point[name]) for point in points]
    losses = [None if octave > cliff else 2 + 0.05 * (octave - optimum) ** 2 for octave in octaves]
    return points, losses


def list_open_edges(space, *args, **options):
    """Return the axis and side of each open edge."""
    return [
        (edge.axis, edge.side)
        for edge in find_open_edges(space, *make_trials(space, *args, **options))
    ]


def test_optimum_inside_the_range_is_bracketed():
    for optimum in (-10.5, -7, -3.5):
        assert list_open_edges(SPACE, optimum) == []


@pytest.mark.parametrize(
    ("optimum", "side"), [(-13, "low"), (-12, "low"), (-2, "high"), (0, "high")]
)
def test_optimum_at_or_beyond_an_end_opens_that_edge(optimum, side):
    assert list_open_edges(SPACE, optimum) == [("learning_rate", side)]


def test_divergence_brackets_from_above_only():
    assert list_open_edges(SPACE, -1, cliff=-2.4) == []
    assert list_open_edges(SPACE, -14, cliff=-4) == [("learning_rate", "low")]


def test_single_lucky_trial_opens_no_edge():
    points, losses = make_trials(SPACE, -7)
    rates = [point["learning_rate"] for point in points]
    losses[rates.index(max(rates))] = 1.0
    assert find_open_edges(SPACE, points, losses) == ()


def test_probes_lie_beyond_the_end_and_equal_the_best_point_otherwise():
    edge = Edge(axis="learning_rate", side="high", range=(2**-12, 2**-2), wider=(2**-12, 1.0))
    best = SPACE.make_point((0.99, 0.3, 0.4))
    probes = make_probes(SPACE, [edge], best)
    assert [math.log2(point["learning_rate"]) for point in probes] == pytest.approx(
        [-1.5, -1.0, -0.5, 0.0]
    )
    assert all({**point, "learning_rate": 0} == {**best, "learning_rate": 0} for point in probes)
    wider = grow_space(SPACE, [edge])
    assert wider.axis("learning_rate").range == (2**-12, 1.0) and wider.axes[1:] == SPACE.axes[1:]
    low = Edge(axis="clip_norm", side="low", range=(0.25, 4.0), wider=(0.0625, 4.0))
    assert [point["clip_norm"] for point in make_probes(SPACE, [low], best)] == pytest.approx(
        [2**-2.5, 2**-3, 2**-3.5, 2**-4]
    )


def test_pruned_trials_do_not_close_an_edge():
    """Trials that diverged above the best learning rate close the upper edge. Trials that were
    pruned there leave it open.
    """
    points, losses = make_trials(SPACE, -1, num=48, cliff=-2.4)
    pruned = [index for index, loss in enumerate(losses) if loss is None]
    assert find_open_edges(SPACE, points, losses) == ()
    assert [(edge.axis, edge.side) for edge in find_open_edges(SPACE, points, losses, pruned)] == [
        ("learning_rate", "high")
    ]
