"""Noise that wanders from line to line is learned from the run: no false alarm, and what is large
is still seen.
"""

import numpy as np
import pytest
from planted_watch import columns_of, decision, expected, losses_of
from scipy.signal import lfilter

from launcher.base.policy import SpikePolicy
from launcher.watch.judgment import judge
from launcher.watch.loss_rises import RISE_SDS, limit_sds, rise, sight, spikes
from launcher.watch.noise import learn, mean_variance
from launcher.watch.status_text import headline

NUM_STEPS, WARMUP = 2000, 40
STEPS = np.arange(1.0, NUM_STEPS + 1)


def wandering(seed, phi, sd, num=NUM_STEPS):
    draws = sd * np.sqrt(1 - phi**2) * np.random.default_rng(seed).standard_normal(num)
    draws[0] /= np.sqrt(1 - phi**2)
    return lfilter([1.0], [1.0, -phi], draws)


def run(seed, phi, sd):
    return expected(STEPS, NUM_STEPS) + wandering(seed, phi, sd)


@pytest.mark.parametrize(("phi", "sd"), [(0.0, 0.05), (0.5, 0.05), (0.99, 0.1)])
def test_healthy_noise_that_wanders_raises_no_alarm(phi, sd):
    for seed in range(4):
        judged = judge(decision(NUM_STEPS, warmup_steps=WARMUP), columns_of(run(seed, phi, sd)))
        assert [alert.name for alert in judged.alerts if alert.severity == "alarm"] == [], seed
        level = 3.0 + wandering(seed, phi, sd)
        assert rise(STEPS, level, WARMUP) is None, "nor a loss that falls no more"


def test_slow_noise_below_the_noise_of_the_batch_raises_none_either():
    for seed in range(6):
        losses = 3.0 + wandering(seed, 0.99, 0.02) + wandering(100 + seed, 0.0, 0.05)
        assert rise(STEPS, losses, WARMUP) is None, seed


@pytest.mark.parametrize(
    ("phi", "sd", "share"), [(0.0, 0.05, 1.12), (0.9, 0.05, 1.12), (0.99, 0.05, 1.08)]
)
def test_a_jump_is_seen_within_a_few_dozen_lines(phi, sd, share):
    for seed in range(4):
        losses = run(seed, phi, sd) * np.where(STEPS > 1000, share, 1.0)
        found = rise(STEPS, losses, WARMUP)
        assert found is not None and 1000 < found.seen_step <= 1064, seed
        assert rise(STEPS[: found.seen_step], losses[: found.seen_step], WARMUP) == found, (
            "by what lies before"
        )
        assert rise(STEPS[: found.seen_step - 1], losses[: found.seen_step - 1], WARMUP) is None


@pytest.mark.parametrize("phi", [0.0, 0.9, 0.99])
def test_the_autocorrelation_is_learned_as_an_upper_bound_and_the_noise_of_a_mean_with_it(phi):
    known, above, wide = (
        mean_variance(np.array(phi), np.array(0.05 * np.sqrt(1 - phi**2)), 64),
        0,
        [],
    )
    for seed in range(40):
        noise = learn(STEPS, run(seed, phi, 0.05))
        above += noise.phi[-1] >= phi
        wide.append(float(mean_variance(noise.phi[-1], noise.innovation_nats[-1], 64) / known))
    assert above >= 37 and 0.9 < np.median(wide) < (4 if phi < 0.99 else 15)
    means = wandering(0, phi, 0.05, 64 * 4000).reshape(-1, 64).mean(axis=1)
    assert known == pytest.approx(means.var(), rel=0.15)


def test_a_spike_of_the_policy_that_the_noise_leads_to_is_told_apart_from_a_planted_one():
    found = [
        spike for seed in range(12) for spike in spikes(STEPS, run(seed, 0.97, 0.1), SpikePolicy())
    ]
    assert found and all(spike.within_noise for spike in found)
    losses = run(0, 0.97, 0.1)
    losses[1000:1010] += 1.0
    planted = [spike for spike in spikes(STEPS, losses, SpikePolicy()) if not spike.within_noise]
    assert [(spike.first_step, spike.lasted) for spike in planted] == [(1001, True)]


def test_the_head_line_says_what_is_too_small_to_be_seen():
    frozen, losses = decision(NUM_STEPS, warmup_steps=WARMUP), run(3, 0.99, 0.1)
    judged = judge(frozen, columns_of(losses))
    jump, climb = (judged.figures[f"smallest_{name}_nats"] for name in ("jump", "climb"))
    assert 0.05 < jump < 0.15 and climb > 0.5 and judged.figures["noise_autocorrelation"] >= 0.99
    line = headline("on the band", judged.why, judged, frozen)
    assert f"{jump:.2g} nats" in line and f"{climb:.2g}" in line and "100 logged steps" in line
    early = judge(frozen, columns_of(losses[:60]))
    assert early.figures["smallest_jump_nats"] is None and "too small" not in headline(
        "on the band", "", early, frozen
    )
    seen = 0
    for seed in range(10):
        jumped = run(seed, 0.9, 0.05)
        least = sight(STEPS[:1000], jumped[:1000], WARMUP, NUM_STEPS, 100).jump_nats
        found = rise(STEPS, jumped + least * (STEPS > 1000), WARMUP, NUM_STEPS)
        seen += found is not None and found.seen_step <= 1100
    assert seen >= 7, "nine of ten are"


def test_a_longer_run_asks_for_more():
    assert limit_sds(100) == limit_sds(8000) == 5 < limit_sds(1e5) < limit_sds(1e6) < 6.5


# In independent noise


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
    assert still.lasted and not still.over and still.num_lines == 21


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


def test_neither_a_spike_nor_the_warmup_is_a_rise():
    assert rise(*spiked(3.0, 5), 20) is None
    steps, losses = spiked(0.0, 1)
    losses[:150] = np.linspace(1.0, 5.0, 150)
    assert rise(steps, losses, 150) is None
    assert rise(steps, losses, 0) is not None
