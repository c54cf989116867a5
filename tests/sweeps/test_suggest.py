import logging
import math
import random
import statistics

import optuna
import pytest

from sweeps.space import SearchSpace
from sweeps.suggest import suggest

SPACE = SearchSpace(learning_rate=(2**-12, 2**-2), warmup_fraction=(0.0, 0.3), clip_norm=(0.25, 4.0))
CLIFF_LOG2_LR = -5.5  # half an octave above the optimum: what a learning rate range really looks like


def toy_loss(point):
    """Best 2.0 at learning rate 2^-6; diverges past the cliff."""
    log2_lr = math.log2(point["learning_rate"])
    if log2_lr > CLIFF_LOG2_LR:
        return None
    valley = 0.02 * (log2_lr + 6) ** 2 + 0.1 * (point["warmup_fraction"] - 0.1) ** 2
    return 2.0 + valley + 0.005 * math.log2(point["clip_norm"]) ** 2


def search(seed, num_trials=40, parallelism=4, tell=toy_loss):
    points, told = [], {}
    for index in range(num_trials):
        points.append(suggest(SPACE, seed, index, told, parallelism, earlier=points))
        told[index] = tell(points[-1])
    return points, told


def test_suggestions_lie_in_the_space_and_differ():
    points, _ = search(0)
    assert len({tuple(point.values()) for point in points}) == len(points)
    assert {tuple(points[0].values())} != {tuple(search(1, 1)[0][0].values())}


@pytest.mark.parametrize("parallelism", [1, 4, 16])
def test_the_cache_changes_nothing(parallelism):
    points, told = search(3, 25, parallelism)
    assert suggest(SPACE, 3, 24, told, parallelism) == points[24]
    assert suggest(SPACE, 3, 24, told, parallelism, earlier=points[:13]) == points[24]


def test_outcomes_of_trials_in_flight_are_not_looked_at():
    points, told = search(0, 30, 4)
    for wrong in (None, 0.0, 99.0):
        later = told | dict.fromkeys(range(27, 30), wrong)
        assert suggest(SPACE, 0, 30, later, 4, earlier=points) == suggest(SPACE, 0, 30, told, 4, earlier=points)


def test_outcomes_that_are_seen_do_matter():
    """The mutation check of the test above: trial 26 = 30 - 4 is the last one seen."""
    points, told = search(0, 30, 4)
    other = told | {26: 0.0}
    assert suggest(SPACE, 0, 30, other, 4, earlier=points) != suggest(SPACE, 0, 30, told, 4, earlier=points)


def test_trials_in_flight_repel():
    """Without the constant liar, the points in flight would not matter at all."""
    points, told = search(0, 30, 8)
    chosen = suggest(SPACE, 0, 30, told, 8, earlier=points)
    crowded = [*points[:23], *[chosen] * 7]  # trials 23 to 29 are in flight
    assert suggest(SPACE, 0, 30, told, 8, earlier=crowded) != chosen


def test_order_of_telling_is_irrelevant():
    points, told = search(5, 30)
    shuffled = list(told.items())
    random.Random(0).shuffle(shuffled)
    assert suggest(SPACE, 5, 30, dict(shuffled), 4, earlier=points) == suggest(SPACE, 5, 30, told, 4, earlier=points)


def test_divergence_does_not_blind_the_search():
    """Told as a failure, divergence wasted 29.5 of 40 trials on such a toy; half is our bar."""
    runs = [search(seed)[1].values() for seed in range(12)]
    wasted = [sum(loss is None for loss in losses) for losses in runs]
    regrets = [min(loss for loss in losses if loss is not None) - 2.0 for losses in runs]
    assert statistics.mean(wasted) < 20
    assert max(wasted) < 24
    assert statistics.median(regrets) < 0.01


def test_finite_penalty_is_what_does_it():
    """The mutation check: where divergence is told as a good loss, the search runs over the cliff."""
    points, _ = search(0, tell=lambda point: toy_loss(point) or 0.0)
    assert sum(toy_loss(point) is None for point in points) > 24


def test_all_diverged_is_survived():
    points, _ = search(0, 20, tell=lambda _: None)
    assert len(points) == 20


def test_startup_covers_every_axis():
    points = [suggest(SPACE, 7, index, {}, 1, num_startup=16) for index in range(16)]
    eighths = {math.floor((math.log2(point["learning_rate"]) + 12) / 10 * 8) for point in points}
    assert len(eighths) == 8


def test_fixed_axis():
    space = SearchSpace(learning_rate=(2**-12, 2**-2), warmup_fraction=(0.1, 0.1), clip_norm=(1.0, 1.0))
    told = {index: 2.0 + index for index in range(15)}
    assert suggest(space, 0, 15, told, 1)["clip_norm"] == 1.0


def test_refusals():
    with pytest.raises(ValueError, match=r"needs the outcomes of trials \[3\]"):
        suggest(SPACE, 0, 14, {i: 1.0 for i in range(14) if i != 3}, 1)
    with pytest.raises(ValueError, match="parallelism = 0"):
        suggest(SPACE, 0, 0, {}, 0)
    with pytest.raises(ValueError, match="not finite"):
        suggest(SPACE, 0, 14, dict.fromkeys(range(14), math.nan), 1)


def test_optuna_is_silent_and_left_as_it_was(capfd):
    optuna.logging.set_verbosity(optuna.logging.INFO)
    search(0, 14, 1)
    assert optuna.logging.get_verbosity() == logging.INFO
    assert capfd.readouterr() == ("", "")
