"""Tests of the comparison of a run's losses with the forecast band.

The band is the interval of the forecast loss curve. False alarms must have the stated rate, planted
departures must be detected, and the losses so far must improve the forecast of the final loss.
"""

import dataclasses

import numpy as np
import pytest
from planted_watch import (
    CURVE_SHARE,
    END_NATS,
    END_SHARE,
    LEVEL,
    NUM_STEPS,
    compute_expected_losses,
    draw_losses,
    make_forecast,
)
from scipy.special import stdtrit

from forerun._launcher.main_run.watch.course import FALSE_ALARMS, FREEDOM, compare_with_band
from forerun._scaling_fits.forecast.loss_curves import SHARES, WINDOW

STEPS = np.arange(1, NUM_STEPS + 1, dtype=np.float64)
MEMORY_OCTAVES = 2.0
"""Octaves of training over which the correlation of the curve's error falls by a factor e."""


def draw_healthy_run(rng):
    """Draw losses and the final loss of a run from the distribution that the band assumes.

    The log losses have two errors: one of the final loss, which shifts the whole curve, and one of
    the curve, which is correlated over neighboring steps. Both have the tails of Student's t
    distribution.
    """
    scale = np.sqrt(FREEDOM / rng.chisquare(FREEDOM)) / stdtrit(FREEDOM, (1 + LEVEL) / 2)
    octaves = np.log2(SHARES)
    root = np.linalg.cholesky(np.exp(-np.abs(octaves[:, None] - octaves) / MEMORY_OCTAVES))
    curve = np.interp(np.log2(STEPS / NUM_STEPS), octaves, root @ rng.standard_normal(len(SHARES)))
    end = END_SHARE * scale * rng.standard_normal()
    return compute_expected_losses(STEPS) * np.exp(
        end + CURVE_SHARE * scale * curve
    ), END_NATS * np.exp(end)


def test_healthy_runs_raise_false_alarms_at_the_stated_rate():
    rng, num_runs, forecast = np.random.default_rng(0), 400, make_forecast()
    comparisons = []
    for _ in range(num_runs):
        losses, _ = draw_healthy_run(rng)
        comparisons.append(compare_with_band(forecast, NUM_STEPS, STEPS, losses))
    num_alarms = sum(comparison.departed is not None for comparison in comparisons)
    assert 0.2 * FALSE_ALARMS * num_runs <= num_alarms <= 2 * FALSE_ALARMS * num_runs
    # Repeated looks at the band itself would raise far more alarms than its level says.
    half_width_sds = stdtrit(FREEDOM, (1 + LEVEL) / 2)
    share_outside = np.mean(
        [np.abs(comparison.departure).max() > half_width_sds for comparison in comparisons]
    )
    assert share_outside > 1.5 * (1 - LEVEL)


@pytest.mark.parametrize("sign", [1, -1])
def test_planted_departure_is_detected_soon(sign):
    losses = draw_losses(np.random.default_rng(1))
    losses[400:] *= np.exp(sign * 0.2)
    comparison = compare_with_band(make_forecast(), NUM_STEPS, STEPS, losses)
    assert comparison.departed is not None
    seen_step = comparison.seen_at[comparison.departed]
    assert 400 < seen_step < 600, "half the steps of a look are within 15 % after it"
    assert np.sign(comparison.departure[comparison.departed]) == sign
    assert compare_with_band(make_forecast(), NUM_STEPS, STEPS[:395], losses[:395]).departed is None


def test_looks_are_complete_before_they_count():
    losses = draw_losses(np.random.default_rng(2), noise=0.0)
    first = min(point.step for point in make_forecast().curve)
    end_of_first_look = int(first * (1 + WINDOW)) - 1
    early = compare_with_band(
        make_forecast(), NUM_STEPS, STEPS[:end_of_first_look], losses[:end_of_first_look]
    )
    assert early is None
    for num_seen in (100, 517, NUM_STEPS):
        comparison = compare_with_band(
            make_forecast(), NUM_STEPS, STEPS[:num_seen], losses[:num_seen]
        )
        assert (comparison.seen_at <= num_seen).all()
        assert (comparison.looked_at <= num_seen).all()
    # The last look ends with the run.
    assert comparison.looked_at[-1] == pytest.approx(comparison.seen_at[-1])
    assert comparison.seen_at[-1] == NUM_STEPS
    assert np.abs(comparison.departure).max() < 0.2, "losses equal to the forecast do not depart"


def test_short_run_and_forecast_without_a_curve_are_handled():
    short = compare_with_band(
        make_forecast(12), 12, STEPS[:12], compute_expected_losses(STEPS[:12], 12)
    )
    assert short.looked_at[-1] == pytest.approx(12)
    without_curve = dataclasses.replace(make_forecast(), curve=())
    assert (
        compare_with_band(without_curve, NUM_STEPS, STEPS, compute_expected_losses(STEPS)) is None
    )
    assert compare_with_band(make_forecast(), NUM_STEPS, STEPS[:0], STEPS[:0]) is None


def test_seen_losses_improve_the_forecast_of_the_end():
    rng, rows = np.random.default_rng(3), []
    for _ in range(100):
        losses, end = draw_healthy_run(rng)
        middle, low, high = compare_with_band(
            make_forecast(), NUM_STEPS, STEPS[:600], losses[:600]
        ).final
        rows.append((np.log(END_NATS / end), np.log(middle / end), low < end < high))
    before, after, inside = np.array(rows).T
    assert (after**2).mean() < 0.5 * (before**2).mean()
    assert 0.84 < inside.mean() < 0.97, "the coverage is that of the band's level, 0.9"
