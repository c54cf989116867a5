import math

import pytest
from spaces import SPACE

from sweeps.search.growth import Edge, grown, open_edges, probes


def trials(space, optimum, num=24, cliff=math.inf, name="learning_rate"):
    """Points spread over one axis, the others in the middle; a parabola in octaves."""
    points = [
        {**space.at([0.5] * space.num_coordinates), name: space.axis(name).at((i * 0.618) % 1)}
        for i in range(num)
    ]
    octaves = [space.axis(name).octaves(point[name]) for point in points]
    return points, [None if at > cliff else 2 + 0.05 * (at - optimum) ** 2 for at in octaves]


def edges(space, *args, **kwargs):
    return [(edge.axis, edge.side) for edge in open_edges(space, *trials(space, *args, **kwargs))]


def test_an_optimum_inside_is_bracketed():
    for optimum in (-10.5, -7, -3.5):
        assert edges(SPACE, optimum) == []


@pytest.mark.parametrize(
    ("optimum", "side"), [(-13, "low"), (-12, "low"), (-2, "high"), (0, "high")]
)
def test_an_optimum_at_an_end_is_not(optimum, side):
    assert edges(SPACE, optimum) == [("learning_rate", side)]


def test_divergence_brackets_from_above_and_not_from_below():
    assert edges(SPACE, -1, cliff=-2.4) == []
    assert edges(SPACE, -14, cliff=-4) == [("learning_rate", "low")]


def test_one_lucky_trial_moves_nothing():
    points, losses = trials(SPACE, -7)
    rates = [point["learning_rate"] for point in points]
    losses[rates.index(max(rates))] = 1.0
    assert open_edges(SPACE, points, losses) == ()


def test_probes_lie_beyond_the_end_and_differ_in_nothing_else():
    edge = Edge(axis="learning_rate", side="high", range=(2**-12, 2**-2), wider=(2**-12, 1.0))
    best = SPACE.at((0.99, 0.3, 0.4))
    found = probes(SPACE, [edge], best)
    assert [math.log2(point["learning_rate"]) for point in found] == pytest.approx(
        [-1.5, -1.0, -0.5, 0.0]
    )
    assert all({**point, "learning_rate": 0} == {**best, "learning_rate": 0} for point in found)
    wider = grown(SPACE, [edge])
    assert wider.axis("learning_rate").range == (2**-12, 1.0) and wider.axes[1:] == SPACE.axes[1:]
    low = Edge(axis="clip_norm", side="low", range=(0.25, 4.0), wider=(0.0625, 4.0))
    assert [point["clip_norm"] for point in probes(SPACE, [low], best)] == pytest.approx(
        [2**-2.5, 2**-3, 2**-3.5, 2**-4]
    )


def test_pruned_trials_say_nothing_of_an_end():
    """Diverged above the best learning rate, they would close that end; given up, they leave it
    open.
    """
    points, losses = trials(SPACE, -1, num=48, cliff=-2.4)
    lost = [index for index, loss in enumerate(losses) if loss is None]
    assert open_edges(SPACE, points, losses) == ()
    assert [(edge.axis, edge.side) for edge in open_edges(SPACE, points, losses, lost)] == [
        ("learning_rate", "high")
    ]
