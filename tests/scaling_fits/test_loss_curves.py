"""Planted curves: the main run's is found from smaller runs, and new ones fall into their band as often as said."""

import numpy as np
import pytest

from proxies.core.spec import Curve
from scaling_fits.forecast.loss_curves import SHARES, WINDOW, FinishedRun, expected_curve, memory_octaves

SIZES = [(params, tokens) for params in (1e6, 4e6, 1.6e7) for tokens in (2e7, 8e7, 3.2e8)]
TARGET = (1e8, 2e9)


def final_of(params, tokens):
    return 1.7 + 5.0 * params**-0.1 + 20.0 * tokens**-0.2


def finished(params, tokens, rng, noise=0.004, num_steps=400, bend=0.0):
    """A curve that falls to its end as f^-0.3, a little faster with more tokens; `bend` is no line in log D."""
    steps = np.arange(1, num_steps + 1)
    share = steps / num_steps
    height = 0.12 * (share**-0.3 - 1) * (tokens / 1e8) ** 0.05 - bend * (1 - share) * np.log(tokens / 1e7) ** 2
    common = noise * rng.standard_normal()
    losses = final_of(params, tokens) * np.exp(height + common * (1 - share) + 0.01 * rng.standard_normal(num_steps))
    curve = Curve(steps=tuple(steps.tolist()), train_loss_nats=tuple(losses.tolist()), grad_norm=())
    final = final_of(params, tokens)
    return FinishedRun(params=params, tokens=tokens, num_steps=num_steps, final_loss_nats=final, curve=curve)


def ladder(rng, **options):
    return [finished(params, tokens, rng, **options) for params, tokens in SIZES]


def test_the_planted_curve_of_a_larger_run_is_found():
    exact = (final_of(*TARGET),) * 3
    found = expected_curve(ladder(np.random.default_rng(0), noise=0.0), *TARGET, exact, 0.9)
    assert [point.share for point in found] == list(SHARES)
    for point in found:
        truth = exact[0] * np.exp(0.12 * (point.share**-0.3 - 1) * (TARGET[1] / 1e8) ** 0.05)
        assert point.loss_nats == pytest.approx(truth, rel=0.012)


def test_new_runs_fall_into_the_band_as_often_as_it_says():
    rng = np.random.default_rng(1)
    inside = []
    for _ in range(80):
        runs, new = ladder(rng), finished(*TARGET, rng)
        found = expected_curve(runs, *TARGET, (new.final_loss_nats,) * 3, 0.9)
        losses, steps = np.array(new.curve.train_loss_nats), np.array(new.curve.steps)
        point = next(each for each in found if each.share == 0.3)
        measured = losses[np.abs(steps / 400 - 0.3) <= WINDOW * 0.3].mean()
        inside.append(point.low_nats <= measured <= point.high_nats)
    assert 0.86 <= np.mean(inside) <= 0.99


def test_curves_that_bend_with_length_widen_the_band_until_it_holds():
    """Two and a half times beyond the longest run, a line in log D is off by several times the scatter."""
    rng, target = np.random.default_rng(4), (1e8, 8e8)
    final, bend = (final_of(*target),) * 3, 0.015
    bent = expected_curve(ladder(rng, bend=bend), *target, final, 0.9)
    straight = expected_curve(ladder(rng), *target, final, 0.9)
    new = finished(*target, rng, bend=bend)
    steps, losses = np.array(new.curve.steps) / 400, np.array(new.curve.train_loss_nats)
    off = []
    for point, narrow in zip(bent, straight, strict=True):
        measured = losses[np.abs(steps - point.share) <= WINDOW * point.share].mean()
        assert point.low_nats <= measured <= point.high_nats
        off.append(abs(np.log(measured / point.loss_nats)) > np.log(narrow.high_nats / narrow.loss_nats))
    assert sum(off) > len(off) / 3, "without the drift the band would not have held"


def test_the_interval_of_the_end_is_in_the_band():
    runs, final = ladder(np.random.default_rng(2)), final_of(*TARGET)
    sure = expected_curve(runs, *TARGET, (final, final, final), 0.9)[-1]
    unsure = expected_curve(runs, *TARGET, (final, 0.9 * final, 1.2 * final), 0.9)[-1]
    assert unsure.loss_nats == sure.loss_nats
    assert unsure.low_nats < 0.905 * final < sure.low_nats
    assert unsure.high_nats > 1.195 * final > sure.high_nats


def test_too_few_runs_have_no_band_and_unlogged_shares_no_point():
    rng = np.random.default_rng(3)
    runs = ladder(rng)
    final = (2.0, 1.9, 2.1)
    assert expected_curve(runs[:-1], *TARGET, final, 0.9) != ()
    shorter = [run for run in runs if run.tokens < 1e8]
    assert expected_curve([*shorter[1:], *runs[-1:]], *TARGET, final, 0.9) == (), "five shorter ones foretell nothing"
    assert expected_curve([], *TARGET, final, 0.9) == ()
    late = [
        FinishedRun(
            params=run.params, tokens=run.tokens, num_steps=400, final_loss_nats=run.final_loss_nats,
            curve=Curve(steps=run.curve.steps[200:], train_loss_nats=run.curve.train_loss_nats[200:], grad_norm=()),
        )
        for run in runs
    ]  # fmt: skip
    assert [point.share for point in expected_curve(late, *TARGET, final, 0.9)] == [s for s in SHARES if s >= 0.5]


def remembering(rng, memory, num_runs, noise=0.01):
    """Runs whose departures from one curve are correlated as exp(-octaves / memory) from share to share."""
    steps = np.arange(1, 401)
    octaves = np.log2(np.array(SHARES))
    apart = np.abs(octaves[:, None] - octaves)
    root = np.linalg.cholesky(np.exp(-apart / memory))
    for number in range(num_runs):
        departure = noise * np.interp(np.log2(steps / 400), octaves, root @ rng.standard_normal(len(SHARES)))
        losses = 2.0 * np.exp(0.12 * ((steps / 400) ** -0.3 - 1) + departure)
        curve = Curve(steps=tuple(steps.tolist()), train_loss_nats=tuple(losses.tolist()), grad_norm=())
        sizes = {"params": 1e6 * 2 ** (number % 3), "tokens": 1e7 * 2 ** (number % 4)}
        yield FinishedRun(**sizes, num_steps=400, final_loss_nats=2.0, curve=curve)


@pytest.mark.parametrize("memory", [1.0, 4.0])
def test_a_planted_memory_is_found(memory):
    found = [memory_octaves(list(remembering(np.random.default_rng(seed), memory, 48))) for seed in range(8)]
    assert 0.7 * memory < np.median(found) < 1.6 * memory
