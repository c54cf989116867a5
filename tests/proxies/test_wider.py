"""Is wider better, by the curves of runs: a planted crossing is found, noise is not, and a spike is
measured.
"""

import itertools

import numpy as np
import pytest

from proxies.coordinates.wider import NUM_PARTS, CurvePair, judge_wider, parts_of, spike_ratio

STEPS = np.arange(1, 201)
LEVEL, MARGIN = 0.9, 0.01


def pair(seed=0, *, gain=0.05, crossing=0.0, num_seeds=3, noise=0.02, common=0.1):
    """Losses of two widths: the wider is better by `gain`, but for the last half, where it is worse
    by `crossing`.
    """
    generator = np.random.default_rng(seed)
    # both widths see the same
    batches = common * generator.standard_normal((num_seeds, len(STEPS)))
    base = 5.0 - 0.5 * np.log(STEPS)

    def drifting():  # what a run departs by is not forgotten at once
        return (
            np.cumsum(generator.standard_normal((num_seeds, len(STEPS))), axis=1)
            * noise
            / np.sqrt(len(STEPS))
        )

    wide = base - gain + batches + drifting()
    wide[:, 100:] += gain + crossing
    return CurvePair(
        small=32,
        large=64,
        log2_value=-6.0,
        steps=STEPS,
        small_nats=base + batches + drifting(),
        large_nats=wide,
    )


def outcome(*pairs):
    return judge_wider(pairs, level=LEVEL, margin_nats=MARGIN).outcome


def test_a_wider_model_that_is_better_passes():
    pairs = [pair(seed, gain=0.05, crossing=-0.05, num_seeds=4) for seed in range(3)]
    found = judge_wider(pairs, level=LEVEL, margin_nats=MARGIN)
    assert found.outcome == "passes"
    assert all(each.interval[1] < MARGIN for each in found.pairs)


def test_a_late_crossing_fails_and_is_named_with_its_steps():
    found = judge_wider([pair(), pair(crossing=0.2)], level=LEVEL, margin_nats=MARGIN)
    assert found.outcome == "fails"
    worst = found.pairs[1]
    assert worst.first_step > 100 and worst.last_step == 200
    assert worst.interval[0] < 0.2 < worst.interval[1]


def test_few_noisy_seeds_cannot_tell():
    assert outcome(pair(gain=0.0, num_seeds=2, noise=0.3)) == "cannot_tell"
    assert judge_wider([pair(num_seeds=1)], level=LEVEL, margin_nats=MARGIN) is None


def test_equal_models_seldom_fail():
    """Six pairs at a time: one in ten verdicts may be wrong, on one of two sides."""
    failed = [
        outcome(*(pair(100 * trial + i, gain=0.0, crossing=0.0) for i in range(6))) == "fails"
        for trial in range(100)
    ]
    assert np.mean(failed) <= 0.09


def test_without_pairing_by_seed_a_crossing_is_lost_in_the_batches_noise():
    """The mutant: the wider runs' seeds in another order."""
    one = pair(crossing=0.05, common=0.5, noise=0.005)
    assert outcome(one) == "fails"
    other = CurvePair(
        **{name: getattr(one, name) for name in CurvePair.__slots__ if name != "large_nats"},
        large_nats=one.large_nats[[1, 2, 0]],
    )
    assert outcome(other) == "cannot_tell"


@pytest.mark.parametrize("number", [8, 9, 20, 200, 5000])
def test_parts_follow_each_other_and_none_is_empty(number):
    parts = parts_of(np.arange(1, number + 1))
    assert len(parts) == NUM_PARTS
    assert all(part.stop > part.start for part in parts)
    assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
    assert parts[-1].stop == number


def test_a_spike_is_a_multiple_of_the_median_after_the_warmup():
    assert spike_ratio([50.0, 1.0, 1.0, 1.0, 9.0], first=1) == 9.0
    assert spike_ratio([], 0) is None
    assert spike_ratio([0.0, 0.0]) is None
