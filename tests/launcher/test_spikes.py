"""What a spike is: planted ones are found on the step that the policy says, and nothing else is."""

from __future__ import annotations

import math
import random

import pytest

from launcher.base.policy import SpikePolicy
from launcher.trainer.spikes import Detector

POLICY = SpikePolicy(window_steps=16, threshold=6.0, least_nats=0.1, patience_steps=4)


def seen(losses, policy=POLICY):
    """The steps at which the detector speaks."""
    detector = Detector(policy)
    return [step for step, loss in enumerate(losses) if detector.see(loss)]


def descent(num_steps, seed=0, noise_nats=0.02):
    """A loss that falls as a power of the step, with noise."""
    draw = random.Random(seed)
    return [2 + 3 / (1 + step) ** 0.5 + draw.gauss(0, noise_nats) for step in range(num_steps)]


def planted(at, length, height_nats, **options):
    losses = descent(200, **options)
    for step in range(at, at + length):
        losses[step] += height_nats
    return losses


@pytest.mark.parametrize("seed", range(4))
def test_a_planted_spike_is_found_when_it_has_lasted_and_once(seed):
    assert seen(planted(100, 20, 1.0, seed=seed)) == [103]


def test_one_that_comes_back_in_time_is_none():
    assert seen(planted(100, 3, 1.0)) == []
    assert seen(planted(100, 4, 1.0)) == [103]


def test_a_spikes_losses_do_not_become_the_level():
    """One that lasts for longer than the window is still one, and the loss before it still the
    measure.
    """
    detector, losses = Detector(POLICY), planted(100, 80, 1.0)
    assert [step for step in range(150) if detector.see(losses[step])] == [103]
    assert detector.num_above == 50 and max(detector.window) < 2.5
    assert [step for step in range(150, 200) if detector.see(losses[step])] == []
    assert detector.num_above == 0


def test_blind_until_the_window_is_full():
    assert seen([5.0] * 10 + [9.0] * 6) == []
    assert Detector(POLICY, (5.0,) * 15).limit_nats == math.inf
    assert seen([5.0] * 16 + [9.0] * 10) == [19]


def test_the_limit_is_in_robust_deviations_and_at_least_so_many_nats():
    window = tuple(float(number) for number in range(16))  # median 7.5, median absolute deviation 4
    assert Detector(POLICY, window).limit_nats == pytest.approx(7.5 + 6 * 1.4826 * 4)
    assert Detector(POLICY, (3.0,) * 16).limit_nats == pytest.approx(3.1)
    wild = (*window[:15], 1e6)  # one loss moves it little
    assert Detector(POLICY, wild).limit_nats == pytest.approx(7.5 + 6 * 1.4826 * 4)
