"""Tests of `SpikeDetector`, which finds stretches of training steps with unusually high losses.

It must report a planted spike at the step that the policy gives, and report nothing else.
"""

from __future__ import annotations

import math
import random

import pytest

from forerun._launcher.main_run.frozen.run_policies import SpikeDetector, SpikePolicy

POLICY = SpikePolicy(window_steps=16, threshold=6.0, least_nats=0.1, patience_steps=4)
"""A loss is high if it exceeds the median of the last 16 losses by more than 6 robust standard
deviations and by more than 0.1 nats. The detector reports a spike at its fourth high loss."""
SPIKE_START = 100
DETECTED_STEP = SPIKE_START + POLICY.patience_steps - 1
MAD_TO_SD = 1.4826
"""Standard deviations of a normal sample per median absolute deviation."""


def detect_spikes(losses, policy=POLICY):
    """Return the steps at which the detector reports a spike."""
    detector = SpikeDetector(policy)
    return [step for step, loss in enumerate(losses) if detector.add_loss(loss)]


def make_losses(num_steps, seed=0, noise_nats=0.02):
    """Return losses that fall as a power of the step, with noise."""
    draw = random.Random(seed)
    return [2 + 3 / (1 + step) ** 0.5 + draw.gauss(0, noise_nats) for step in range(num_steps)]


def plant_spike(length, **options):
    """Return 200 losses; from step `SPIKE_START` on, `length` losses are one nat higher."""
    losses = make_losses(200, **options)
    for step in range(SPIKE_START, SPIKE_START + length):
        losses[step] += 1.0
    return losses


@pytest.mark.parametrize("seed", range(4))
def test_planted_spike_is_detected_once_after_the_patience(seed):
    assert detect_spikes(plant_spike(length=20, seed=seed)) == [DETECTED_STEP]


def test_spike_shorter_than_the_patience_is_ignored():
    assert detect_spikes(plant_spike(length=POLICY.patience_steps - 1)) == []
    assert detect_spikes(plant_spike(length=POLICY.patience_steps)) == [DETECTED_STEP]


def test_losses_of_a_spike_do_not_enter_the_window():
    """A spike longer than the window stays a spike, measured against the losses before it."""
    detector, losses = SpikeDetector(POLICY), plant_spike(length=80)
    assert [step for step in range(150) if detector.add_loss(losses[step])] == [DETECTED_STEP]
    assert detector.num_above == 50 and max(detector.window) < 2.5
    assert [step for step in range(150, 200) if detector.add_loss(losses[step])] == []
    assert detector.num_above == 0


def test_detector_waits_until_the_window_is_full():
    assert detect_spikes([5.0] * 10 + [9.0] * 6) == []
    assert SpikeDetector(POLICY, (5.0,) * 15).limit_nats == math.inf
    assert detect_spikes([5.0] * 16 + [9.0] * 10) == [19]  # the fourth high loss


def test_limit_uses_the_median_deviation_and_a_minimum_in_nats():
    window = tuple(float(number) for number in range(16))  # median 7.5, median absolute deviation 4
    limit_nats = 7.5 + POLICY.threshold * MAD_TO_SD * 4
    assert SpikeDetector(POLICY, window).limit_nats == pytest.approx(limit_nats)
    # Equal losses have no deviation, so the limit is 0.1 nats above the median.
    assert SpikeDetector(POLICY, (3.0,) * 16).limit_nats == pytest.approx(3.1)
    wild = (*window[:15], 1e6)  # one extreme loss hardly moves the limit
    assert SpikeDetector(POLICY, wild).limit_nats == pytest.approx(limit_nats)
