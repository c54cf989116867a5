"""Planted spikes and rises are found where they are, and not where they are not."""

import numpy as np
import pytest
from planted_watch import losses_of

from launcher.base.policy import SpikePolicy
from launcher.watch.rises import RISE_SDS, rise
from launcher.watch.spikes import spikes

POLICY = SpikePolicy(patience_steps=8, window_steps=64)


def spiked(height, length, at=400, seed=0):
    losses = losses_of(np.random.default_rng(seed))
    losses[at - 1 : at - 1 + length] += height
    return np.arange(1.0, len(losses) + 1), losses


def test_one_that_lasts_for_the_patience_is_told_apart():
    assert [each.lasted for each in spikes(*spiked(1.0, 7), POLICY)] == [False]
    assert [each.lasted for each in spikes(*spiked(1.0, 8), POLICY)] == [True]
    steps, losses = spiked(1.0, 60)
    (still,) = spikes(steps[:420], losses[:420], POLICY)
    assert still.lasted and not still.over and still.last_step == 420


def drifting(slope, start=400, seed=0):
    """Nats a step, from `start` on."""
    losses = losses_of(np.random.default_rng(seed))
    steps = np.arange(1.0, len(losses) + 1)
    return steps, losses + slope * np.maximum(0, steps - start)


def test_a_slow_rise_is_found_and_where_it_began():
    found = rise(*drifting(1e-3), 20)
    assert 400 < found.first_step < 560
    assert found.now_nats > found.lowest_nats + 0.02 and found.sds > RISE_SDS
    assert spikes(*drifting(1e-3), POLICY) == [], "too slow for a spike"


@pytest.mark.parametrize("seed", range(5))
def test_a_healthy_run_never_rises(seed):
    assert rise(*drifting(0.0, seed=seed), 20) is None
    rng = np.random.default_rng(seed)
    assert rise(np.arange(1.0, 1001), 2.0 + 0.05 * rng.standard_normal(1000), 0) is None, "nor one that is level"


def test_neither_a_spike_nor_the_warmup_is_a_rise():
    assert rise(*spiked(3.0, 5), 20) is None
    steps, losses = spiked(0.0, 1)
    losses[:150] = np.linspace(1.0, 5.0, 150)
    assert rise(steps, losses, 150) is None
    assert rise(steps, losses, 0) is not None
