import math

import pytest
from spaces import SPACE

from sweeps.search.past import NUM_BEST, PENALTY_MARGIN_NATS, Past


def past_of(losses, parallelism=1):
    past = Past(space=SPACE, study_seed=0, parallelism=parallelism, num_startup=4, num_known=0)
    past.points.extend([SPACE.lowest] * (len(losses) + parallelism - 1))
    past.see(dict(enumerate(losses)))
    return past


def test_all_trials_are_shown_up_to_the_bound():
    assert past_of([2.0] * 40).shown(40) == list(range(40))


def test_beyond_it_the_best_and_the_latest():
    losses = [3.0 - 0.01 * (i % 30) if i < 60 else 4.0 for i in range(200)]
    shown = past_of(losses).shown(100)
    best = sorted(range(200), key=lambda i: (losses[i], i))[:NUM_BEST]
    assert len(shown) == 100
    assert shown == sorted({*best, *range(200 - (100 - NUM_BEST), 200)})


def test_the_best_are_the_earlier_of_equals_and_divergence_is_the_worst():
    past = past_of([None, 2.0, None, 2.0, 1.0, *[None] * 40])
    assert [index for _, index in past.best[:5]] == [4, 1, 3, 0, 2]
    assert len(past.best) == NUM_BEST


def test_what_was_seen_bit_by_bit_is_what_is_seen_at_once():
    losses = [None if i % 7 == 0 else 2.0 + math.sin(i) for i in range(90)]
    slow = past_of(losses[:1], parallelism=3)
    for index in range(1, 90):
        slow.points.append(SPACE.lowest)
        slow.see(dict(enumerate(losses[: index + 1])))
    quick = past_of(losses, parallelism=3)
    assert (slow.losses, slow.best, slow.worst) == (quick.losses, quick.best, quick.worst)


def test_divergence_costs_more_than_the_worst_that_finished():
    past = past_of([2.0, None, 5.0, None])
    penalty = 5.0 + PENALTY_MARGIN_NATS
    assert [past.penalised(index) for index in range(4)] == [2.0, penalty, 5.0, penalty]


def test_an_outcome_is_looked_at_once_and_then_stays():
    past = past_of([2.0, 3.0])
    past.points.append(SPACE.lowest)
    past.see({2: 1.0})
    assert past.losses == [2.0, 3.0, 1.0]
    past.points.append(SPACE.lowest)
    with pytest.raises(ValueError, match=r"needs the outcomes of trials \[3\]"):
        past.see({})
    with pytest.raises(ValueError, match="not finite"):
        past.see({3: math.inf})
