"""Failures, cadence and goodput against published numbers, and against a simulation."""

import random

import pytest

from launcher.base.reference import MODELS
from launcher.estimates.failures import RATE, cadence, daly, goodput_of, mtbf_seconds, young


def test_llama_3s_rate():
    """466 interruptions, 47 of them planned, in 54 days on 16,384 H100."""
    assert RATE.value == pytest.approx(3.79, abs=0.005)
    assert mtbf_seconds(16_384, RATE.value) / 3600 == pytest.approx(54 * 24 / 419)
    assert RATE.low < RATE.value < RATE.high


@pytest.mark.parametrize(
    ("num_gpus", "write", "minutes", "goodput"),
    [(8, 30, 616, 0.998), (4096, 120, 53, 0.916), (16_384, 120, 26, 0.815)],
)
def test_dalys_interval_and_goodput(num_gpus, write, minutes, goodput):
    """The table of our research notes, ten minutes to restart."""
    mtbf = mtbf_seconds(num_gpus, 3.79)
    interval = daly(write, mtbf)
    assert interval / 60 == pytest.approx(minutes, rel=0.03)
    assert goodput_of(interval, write, mtbf, 600) == pytest.approx(goodput, abs=1e-3)
    assert interval == pytest.approx(young(write, mtbf) - write, rel=0.2)


def simulated(interval, write, mtbf, restart, seed=0):
    rng, clock, done, num_segments = random.Random(seed), 0.0, 0, 4000
    next_failure = rng.expovariate(1 / mtbf)
    while done < num_segments:
        if clock + interval + write <= next_failure:
            clock, done = clock + interval + write, done + 1
            continue
        clock = next_failure
        while True:  # a restart may fail too
            next_failure = clock + rng.expovariate(1 / mtbf)
            if clock + restart <= next_failure:
                clock += restart
                break
            clock = next_failure
    return num_segments * interval / clock


@pytest.mark.parametrize("interval", [300, 1116, 3600])
def test_goodput_is_what_events_give(interval):
    mtbf = mtbf_seconds(16_384, 3.79)
    assert goodput_of(interval, 60, mtbf, 600) == pytest.approx(simulated(interval, 60, mtbf, 600), abs=0.015)


@pytest.mark.parametrize("write", [10.0, 60.0])
def test_no_other_interval_does_better_than_dalys(write):
    mtbf = mtbf_seconds(4096, 3.79)
    best = daly(write, mtbf)
    found = goodput_of(best, write, mtbf, 600)
    assert all(goodput_of(best * factor, write, mtbf, 600) <= found + 1e-6 for factor in (0.5, 0.8, 1.25, 2.0))


def test_the_work_one_accepts_to_lose_caps_the_cadence():
    shape = MODELS["llama-3-8b"].shape
    small = cadence(shape, 8)
    assert small.interval_seconds == 3600
    assert small.checkpoint_bytes == 12 * 8_030_261_248
    large = cadence(MODELS["llama-3.1-405b"].shape, 16_384)
    assert large.interval_seconds == daly(large.write_seconds.value, large.mtbf_seconds.value) < 3600
    assert large.goodput.low < large.goodput.value < large.goodput.high < 1


def test_a_save_longer_than_the_work_between_two_interruptions():
    assert daly(100.0, 10.0) == 10.0
