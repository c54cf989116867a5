"""Tests of the alerts for rises and spikes of the loss under autocorrelated noise.

The watch learns the noise from the run's own losses, raises no false alarm, and still detects rises
and spikes that are large against the noise.
"""

import numpy as np
import pytest
from planted_watch import compute_expected_losses, draw_losses, make_columns, make_watched_decision
from scipy.signal import lfilter

from forerun._launcher.main_run.frozen.run_policies import SpikePolicy
from forerun._launcher.main_run.watch.judgment import judge
from forerun._launcher.main_run.watch.loss_rises import (
    RISE_SDS,
    compute_limit_sds,
    compute_sensitivity,
    find_spikes,
    measure_rise,
)
from forerun._launcher.main_run.watch.noise import compute_mean_variance, learn_noise
from forerun._launcher.main_run.watch.status_text import format_headline

NUM_STEPS, WARMUP = 2000, 40
STEPS = np.arange(1.0, NUM_STEPS + 1)


def draw_noise(seed, phi, sd, num=NUM_STEPS):
    """Draw stationary autoregressive noise.

    Args:
        seed: Seed of the draw.
        phi: Correlation of neighboring steps.
        sd: Standard deviation in nats.
        num: Number of steps.
    """
    draws = sd * np.sqrt(1 - phi**2) * np.random.default_rng(seed).standard_normal(num)
    draws[0] /= np.sqrt(1 - phi**2)
    return lfilter([1.0], [1.0, -phi], draws)


def draw_run(seed, phi, sd):
    """Return the losses of a healthy run with such noise."""
    return compute_expected_losses(STEPS, NUM_STEPS) + draw_noise(seed, phi, sd)


@pytest.mark.parametrize(("phi", "sd"), [(0.0, 0.05), (0.5, 0.05), (0.99, 0.1)])
def test_autocorrelated_noise_raises_no_alarm(phi, sd):
    for seed in range(4):
        judgment = judge(
            make_watched_decision(NUM_STEPS, warmup_steps=WARMUP),
            make_columns(draw_run(seed, phi, sd)),
        )
        assert [alert.name for alert in judgment.alerts if alert.severity == "alarm"] == [], seed
        constant_loss = 3.0 + draw_noise(seed, phi, sd)
        assert measure_rise(STEPS, constant_loss, WARMUP) is None, "a constant loss does not rise"


def test_slow_noise_below_batch_noise_raises_no_alarm():
    for seed in range(6):
        losses = 3.0 + draw_noise(seed, 0.99, 0.02) + draw_noise(100 + seed, 0.0, 0.05)
        assert measure_rise(STEPS, losses, WARMUP) is None, seed


@pytest.mark.parametrize(
    ("phi", "sd", "jump_factor"), [(0.0, 0.05, 1.12), (0.9, 0.05, 1.12), (0.99, 0.05, 1.08)]
)
def test_jump_is_detected_within_64_lines(phi, sd, jump_factor):
    for seed in range(4):
        losses = draw_run(seed, phi, sd) * np.where(STEPS > 1000, jump_factor, 1.0)
        rise = measure_rise(STEPS, losses, WARMUP)
        assert rise is not None and 1000 < rise.seen_step <= 1064, seed
        # The rise is known at the step where it is seen, and not one line before.
        seen, before = rise.seen_step, rise.seen_step - 1
        assert measure_rise(STEPS[:seen], losses[:seen], WARMUP) == rise
        assert measure_rise(STEPS[:before], losses[:before], WARMUP) is None


@pytest.mark.parametrize("phi", [0.0, 0.9, 0.99])
def test_learned_noise_bounds_the_planted_autocorrelation(phi):
    # Variance of a mean over 64 lines
    planted = compute_mean_variance(np.array(phi), np.array(0.05 * np.sqrt(1 - phi**2)), 64)
    num_above, ratios = 0, []
    for seed in range(40):
        noise = learn_noise(STEPS, draw_run(seed, phi, 0.05))
        num_above += noise.phi[-1] >= phi
        learned = compute_mean_variance(noise.phi[-1], noise.innovation_nats[-1], 64)
        ratios.append(float(learned / planted))
    assert num_above >= 37, "an upper bound in about 95 % of the runs"
    assert 0.9 < np.median(ratios) < (4 if phi < 0.99 else 15)
    # The formula for the variance of a mean agrees with a simulation.
    means = draw_noise(0, phi, 0.05, 64 * 4000).reshape(-1, 64).mean(axis=1)
    assert planted == pytest.approx(means.var(), rel=0.15)


def test_planted_spike_is_distinguished_from_spikes_within_the_noise():
    spikes = []
    for seed in range(12):
        spikes += find_spikes(STEPS, draw_run(seed, 0.97, 0.1), SpikePolicy())
    assert spikes and all(spike.within_noise for spike in spikes)
    losses = draw_run(0, 0.97, 0.1)
    losses[1000:1010] += 1.0
    planted = [
        spike for spike in find_spikes(STEPS, losses, SpikePolicy()) if not spike.within_noise
    ]
    assert [(spike.first_step, spike.lasted) for spike in planted] == [(1001, True)]


def test_headline_names_the_smallest_detectable_rise():
    """A jump happens at once, and a climb is a slow rise."""
    decision = make_watched_decision(NUM_STEPS, warmup_steps=WARMUP)
    losses = draw_run(3, phi=0.99, sd=0.1)
    judgment = judge(decision, make_columns(losses))
    jump, climb = judgment.figures.smallest_jump_nats, judgment.figures.smallest_climb_nats
    assert 0.05 < jump < 0.15 and climb > 0.5 and judgment.figures.noise_autocorrelation >= 0.99
    line = format_headline(judgment)
    assert f"{jump:.2g} nats" in line and f"{climb:.2g}" in line and "100 logged steps" in line
    early = judge(decision, make_columns(losses[:60]))
    assert early.figures.smallest_jump_nats is None
    assert "not detectable" in line
    assert "not detectable" not in format_headline(early)


def test_jump_of_the_stated_size_is_detected():
    num_detected = 0
    for seed in range(10):
        losses = draw_run(seed, phi=0.9, sd=0.05)
        sensitivity = compute_sensitivity(STEPS[:1000], losses[:1000], WARMUP, NUM_STEPS, 100)
        jumped = losses + sensitivity.jump_nats * (STEPS > 1000)
        rise = measure_rise(STEPS, jumped, WARMUP, NUM_STEPS)
        num_detected += rise is not None and rise.seen_step <= 1100
    assert num_detected >= 7, "about nine of ten runs are expected"


def test_limit_grows_with_the_length_of_the_run():
    assert (
        compute_limit_sds(100)
        == compute_limit_sds(8000)
        == 5
        < compute_limit_sds(1e5)
        < compute_limit_sds(1e6)
        < 6.5
    )


# ---- Independent noise ----


POLICY = SpikePolicy(patience_steps=8, window_steps=64)
"""A spike that lasts 8 lines counts as lasting."""


def make_spiked_losses(height_nats, length):
    """Return steps and losses with a spike of `length` lines from line 400 on."""
    losses = draw_losses(np.random.default_rng(0))
    losses[399 : 399 + length] += height_nats
    return np.arange(1.0, len(losses) + 1), losses


def test_spike_lasts_from_the_patience_on():
    for length, has_lasted in ((POLICY.patience_steps - 1, False), (POLICY.patience_steps, True)):
        steps, losses = make_spiked_losses(height_nats=1.0, length=length)
        assert [spike.lasted for spike in find_spikes(steps, losses, POLICY)] == [has_lasted]
    steps, losses = make_spiked_losses(height_nats=1.0, length=60)
    (spike,) = find_spikes(steps[:420], losses[:420], POLICY)
    assert spike.lasted and not spike.over and spike.num_lines == 21


def make_drifting_losses():
    """Return steps and losses that rise by 0.001 nats a step from step 400 on."""
    losses = draw_losses(np.random.default_rng(0))
    steps = np.arange(1.0, len(losses) + 1)
    return steps, losses + 1e-3 * np.maximum(0, steps - 400)


def test_slow_rise_is_found_with_its_start():
    steps, losses = make_drifting_losses()
    rise = measure_rise(steps, losses, warmup_steps=20)
    assert 400 < rise.first_step < 560
    assert rise.now_nats > rise.lowest_nats + 0.02 and rise.sds > RISE_SDS
    assert find_spikes(steps, losses, POLICY) == [], "too slow for a spike"


def test_spike_and_warmup_are_no_rise():
    steps, losses = make_spiked_losses(height_nats=3.0, length=5)
    assert measure_rise(steps, losses, warmup_steps=20) is None
    losses = draw_losses(np.random.default_rng(0))
    losses[:150] = np.linspace(1.0, 5.0, 150)
    assert measure_rise(steps, losses, warmup_steps=150) is None
    assert measure_rise(steps, losses, warmup_steps=0) is not None
