"""The band over the whole course: false alarms as said, planted departures found, the end foretold
better.
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
    expected,
    losses_of,
    predicted,
)
from scipy.special import stdtrit

from launcher.watch.course import FALSE_ALARMS, FREEDOM, course
from scaling_fits.forecast.loss_curves import SHARES, WINDOW

STEPS = np.arange(1, NUM_STEPS + 1, dtype=np.float64)
MEMORY = 2.0


def drawn(rng, memory=MEMORY):
    """A healthy run by the law of the band: an error of the end, and one of the curve that is
    forgotten.
    """
    scale = np.sqrt(FREEDOM / rng.chisquare(FREEDOM)) / stdtrit(FREEDOM, (1 + LEVEL) / 2)
    octaves = np.log2(SHARES)
    root = np.linalg.cholesky(np.exp(-np.abs(octaves[:, None] - octaves) / memory))
    curve = np.interp(np.log2(STEPS / NUM_STEPS), octaves, root @ rng.standard_normal(len(SHARES)))
    end = END_SHARE * scale * rng.standard_normal()
    return expected(STEPS) * np.exp(end + CURVE_SHARE * scale * curve), END_NATS * np.exp(end)


def test_healthy_runs_depart_as_seldom_as_said_though_they_leave_the_band_often():
    rng, num_runs, forecast = np.random.default_rng(0), 400, predicted()
    found = [course(forecast, NUM_STEPS, STEPS, drawn(rng)[0]) for _ in range(num_runs)]
    alarms = sum(each.departed is not None for each in found)
    assert 0.2 * FALSE_ALARMS * num_runs <= alarms <= 2 * FALSE_ALARMS * num_runs
    arm = stdtrit(FREEDOM, (1 + LEVEL) / 2)
    outside = np.mean([np.abs(each.departure).max() > arm for each in found])
    assert outside > 1.5 * (1 - LEVEL), "looking again and again at the band itself"


@pytest.mark.parametrize("sign", [1, -1])
def test_a_planted_departure_is_found_soon_after_it_is_large_enough(sign):
    losses = losses_of(np.random.default_rng(1))
    losses[400:] *= np.exp(sign * 0.2)
    found = course(predicted(), NUM_STEPS, STEPS, losses)
    assert found.departed is not None
    at = found.seen_at[found.departed]
    assert 400 < at < 600, "half the steps of a look are within 15 % after it"
    assert np.sign(found.departure[found.departed]) == sign
    assert course(predicted(), NUM_STEPS, STEPS[:395], losses[:395]).departed is None


def test_looks_are_complete_before_they_count_and_the_last_ends_with_the_run():
    losses = losses_of(np.random.default_rng(2), noise=0.0)
    first = min(point.step for point in predicted().curve)
    assert (
        course(
            predicted(),
            NUM_STEPS,
            STEPS[: int(first * (1 + WINDOW)) - 1],
            losses[: int(first * 1.15) - 1],
        )
        is None
    )
    for upto in (100, 517, NUM_STEPS):
        found = course(predicted(), NUM_STEPS, STEPS[:upto], losses[:upto])
        assert (found.seen_at <= upto).all() and (found.looked_at <= upto).all()
    assert (
        found.looked_at[-1] == pytest.approx(found.seen_at[-1]) and found.seen_at[-1] == NUM_STEPS
    )
    assert np.abs(found.departure).max() < 0.2, "nothing departs in a run that is the truth"


def test_a_short_run_and_one_without_a_curve_are_no_trouble():
    short = predicted(12)
    assert course(short, 12, STEPS[:12], expected(STEPS[:12], 12)).looked_at[-1] == pytest.approx(
        12
    )
    bare = dataclasses.replace(predicted(), curve=())
    assert course(bare, NUM_STEPS, STEPS, expected(STEPS)) is None
    assert course(predicted(), NUM_STEPS, STEPS[:0], STEPS[:0]) is None


def test_the_end_is_foretold_better_with_what_was_seen():
    rng, rows = np.random.default_rng(3), []
    for _ in range(100):
        losses, end = drawn(rng)
        found = course(predicted(), NUM_STEPS, STEPS[:600], losses[:600]).final
        rows.append((np.log(END_NATS / end), np.log(found[0] / end), found[1] < end < found[2]))
    before, after, inside = np.array(rows).T
    assert (after**2).mean() < 0.5 * (before**2).mean()
    assert 0.84 < inside.mean() < 0.97, "as often as the band's level says"
