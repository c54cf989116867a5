"""Curves of a main run, predicted from smaller runs: planted ones, recorded ones, and public
ones.
"""

import csv
import sys
from pathlib import Path

import numpy as np
import pytest

from proxies.core.schedule import Schedule, lr_table
from proxies.core.spec import Curve
from scaling_fits.forecast.loss_curves import (
    SHARES,
    WINDOW,
    FinishedRun,
    expected_curve,
    memory_octaves,
)

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = ROOT.parent / "shared" / "data" / "multipowerlaw"
SIZES = [(params, steps) for params in (4e4, 1e5, 2.5e5) for steps in (200, 600, 1600)]
"""A ladder as the demo's: parameters and steps of 512 tokens."""
TARGET = (2.5e5, 14_000)


def schedule_of(num_steps, **given):
    return Schedule(
        **{"kind": "cosine", "num_steps": num_steps, "warmup_steps": min(88, num_steps // 10)}
        | given
    )


def planted(params, schedule):
    """Mean loss of every step: a power law in the area below the schedule, and noise of the present
    rate.
    """
    rates = np.array(lr_table(schedule))
    learned = 14.0 * np.cumsum(rates * 512) ** -0.23
    return (0.7 + 6.0 * params**-0.25 + learned) * (1 + 0.2 * rates**0.8)


def finished(params, num_steps, rng, *, batch_noise=0.18, scatter=0.0, bend=0.0, gap=0.0, **given):
    """A run with the noise of its batches; `scatter`: its own slow departure; `bend`: one that
    grows with length.
    """
    schedule = schedule_of(num_steps, **given)
    means = planted(params, schedule)
    share = np.arange(1, num_steps + 1) / num_steps
    own = (
        scatter * rng.standard_normal() * (1 - share)
        - bend * (1 - share) * np.log(num_steps / 200) ** 2
    )
    losses = means * np.exp(own + gap) + batch_noise * rng.standard_normal(num_steps)
    steps = tuple(range(1, num_steps + 1))
    return FinishedRun(
        params=params,
        tokens=512.0 * num_steps,
        schedule=schedule,
        final_loss_nats=float(means[-1]),
        curve=Curve(steps=steps, train_loss_nats=tuple(losses.tolist()), grad_norm=()),
    )


def ladder(rng, **options):
    return [finished(params, num_steps, rng, **options) for params, num_steps in SIZES]


def means_near(run):
    """Mean training loss near each share."""
    at, losses = (
        np.array(run.curve.steps) / run.schedule.num_steps,
        np.array(run.curve.train_loss_nats),
    )
    return {share: losses[np.abs(at - share) <= WINDOW * share].mean() for share in SHARES}


def predict(runs, new, final=None, level=0.9):
    final = final or (new.final_loss_nats,) * 3
    return expected_curve(runs, new.params, new.tokens, new.schedule, final, level)


@pytest.mark.parametrize("gap", [0.0, 0.08])
def test_the_curve_falls_and_is_the_main_runs_in_spite_of_batch_noise(gap):
    """Noise as on the demo's batches: the means of its shortest runs are off by several times what
    the curve falls.
    """
    for seed in range(4):
        rng = np.random.default_rng(seed)
        runs, new = ladder(rng, gap=gap), finished(*TARGET, rng, gap=gap)
        points = predict(runs, new)
        losses = [point.loss_nats for point in points]
        assert len(points) >= 12 and losses == sorted(losses, reverse=True)
        truth = means_near(new)
        assert max(abs(np.log(point.loss_nats / truth[point.share])) for point in points) < 0.06


@pytest.mark.parametrize(
    "given",
    [
        {"kind": "constant"},
        {"kind": "wsd", "decay_steps": 40},
        {"batch_warmup_steps": 50, "batch_warmup_stages": 4},
    ],
)
def test_the_curve_falls_under_every_schedule(given):
    rng = np.random.default_rng(5)
    runs, new = ladder(rng, **given), finished(*TARGET, rng, **given)
    losses = [point.loss_nats for point in predict(runs, new)]
    assert len(losses) >= 12 and losses == sorted(losses, reverse=True)


def test_new_runs_fall_into_the_band_as_often_as_it_says():
    rng, inside = np.random.default_rng(1), []
    for _ in range(16):
        runs, new = ladder(rng, scatter=0.02), finished(*TARGET, rng, scatter=0.02)
        truth = means_near(new)
        inside += [
            point.low_nats <= truth[point.share] <= point.high_nats for point in predict(runs, new)
        ]
    assert np.mean(inside) >= 0.86
    wide, narrow = (
        np.mean([np.log(p.high_nats / p.low_nats) for p in predict(runs, new, level=level)])
        for level in (0.9, 0.5)
    )
    assert 0.05 < narrow < 0.6 * wide < 0.3


def test_curves_that_bend_with_length_widen_the_band():
    rng, exact = np.random.default_rng(4), finished(*TARGET, np.random.default_rng(4))
    arms = [
        np.mean(
            [
                np.log(point.high_nats / point.loss_nats)
                for point in predict(ladder(rng, bend=bend), exact)
            ]
        )
        for bend in (0.0, 0.03)
    ]
    assert arms[1] > 1.5 * arms[0]


def test_recorded_runs_fall_into_the_band_of_their_ladder():
    """The curves of `benchmarks/statistics/watch.py`: 24 runs twice as long as the longest rung,
    four ladders.
    """
    sys.path.insert(0, str(ROOT / "benchmarks" / "statistics"))
    import watch

    tables, inside, errors = watch.load_file(str(watch.CURVES)), [], []
    steps, losses = (
        np.arange(1, watch.NUM_STEPS + 1),
        tables[f"loss/{watch.WIDTH}/{watch.NUM_STEPS}"].astype(float),
    )
    finals = tables[f"final/{watch.WIDTH}/{watch.NUM_STEPS}"]
    size = (
        watch.params_of(watch.WIDTH),
        watch.NUM_STEPS * watch.BATCH_TOKENS,
        watch.schedule_of(watch.NUM_STEPS),
    )
    for left_out in range(4):
        for point in expected_curve(watch.rungs(tables, left_out), *size, (1.0, 1.0, 1.0), 0.9):
            near = np.abs(steps / watch.NUM_STEPS - point.share) <= WINDOW * point.share
            measured = losses[:, near].mean(axis=1) / finals
            inside.append((measured >= point.low_nats) & (measured <= point.high_nats))
            errors.append(np.log(point.loss_nats / measured))
    assert np.mean(inside) > 0.82, (
        "0.86 of them; 0.61 where the ladder lacks one certain run of each size"
    )
    assert np.sqrt(np.mean(np.square(errors))) < 0.085


def public_run(size, kind, num_steps):
    path = PUBLIC / f"params_{size}m_{kind}_{num_steps}.csv"
    steps, _, losses = np.array(list(csv.reader(path.read_text().splitlines()))[1:], dtype=float).T
    final_fraction = 0.1 if kind == "cosine" else 0.0
    return FinishedRun(
        params=size * 1e6,
        tokens=float(num_steps),
        final_loss_nats=float(losses[-5:].mean()),
        schedule=Schedule(
            kind=kind, num_steps=num_steps, warmup_steps=2160, final_fraction=final_fraction
        ),
        curve=Curve(
            steps=tuple(steps.astype(int).tolist()),
            train_loss_nats=tuple(losses.tolist()),
            grad_norm=(),
        ),
    )


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="needs ../shared/data/multipowerlaw")
@pytest.mark.parametrize("kind", ["cosine", "constant"])
def test_public_curves_of_100m_parameters_are_found(kind, monkeypatch):
    """Three smaller or shorter runs give no band that could be trusted, but the curve."""
    monkeypatch.setattr("scaling_fits.forecast.loss_curves.MIN_RUNS", 2)
    runs = [public_run(25, kind, 24000), public_run(100, kind, 24000)] * 2 + [
        public_run(25, kind, 72000)
    ]
    new = public_run(100, kind, 72000)
    points, truth = predict(runs, new), means_near(new)
    assert len(points) >= 12
    assert max(abs(np.log(point.loss_nats / truth[point.share])) for point in points) < 0.012


def test_the_interval_of_the_end_is_in_the_band():
    rng = np.random.default_rng(2)
    runs, new = ladder(rng), finished(*TARGET, rng)
    final = new.final_loss_nats
    sure = predict(runs, new)[-1]
    unsure = predict(runs, new, (final, 0.8 * final, 1.4 * final))[-1]
    assert unsure.loss_nats == sure.loss_nats
    assert unsure.low_nats < 0.81 * unsure.loss_nats < sure.low_nats
    assert unsure.high_nats > 1.39 * unsure.loss_nats > sure.high_nats


def test_too_few_runs_have_no_band_and_what_no_run_logged_has_no_point():
    rng = np.random.default_rng(3)
    runs, new = ladder(rng), finished(*TARGET, rng)
    assert predict(runs, new) != ()
    assert predict(runs[1:], new) == (), "five shorter ones foretell nothing"
    assert predict([], new) == () and memory_octaves([]) is None
    late = [
        FinishedRun(
            params=run.params,
            tokens=run.tokens,
            schedule=run.schedule,
            final_loss_nats=run.final_loss_nats,
            curve=Curve(
                steps=run.curve.steps[run.schedule.num_steps // 2 :],
                train_loss_nats=run.curve.train_loss_nats[run.schedule.num_steps // 2 :],
                grad_norm=(),
            ),
        )
        for run in runs
    ]
    assert [point.share for point in predict(late, new)] == [
        share for share in SHARES if share >= 0.5
    ]
    slow = finished(*TARGET, rng, warmup_steps=4200)
    assert min(point.share for point in predict(runs, slow)) == 0.4, (
        "a rate that rises has no curve that falls"
    )


def remembering(rng, memory, num_runs, noise=0.01):
    """Runs whose departures from the curve are correlated as exp(-octaves / memory) from share to
    share.
    """
    steps, octaves = np.arange(1, 401), np.log2(np.array(SHARES))
    apart = np.abs(octaves[:, None] - octaves)
    root = np.linalg.cholesky(np.exp(-apart / memory))
    schedule = schedule_of(400, warmup_steps=10)
    for number in range(num_runs):
        params = 4e4 * 2 ** (number % 3)
        departure = noise * np.interp(
            np.log2(steps / 400), octaves, root @ rng.standard_normal(len(SHARES))
        )
        losses = planted(params, schedule) * np.exp(departure)
        curve = Curve(
            steps=tuple(steps.tolist()), train_loss_nats=tuple(losses.tolist()), grad_norm=()
        )
        final = float(planted(params, schedule)[-1])
        yield FinishedRun(
            params=params, tokens=512.0 * 400, schedule=schedule, final_loss_nats=final, curve=curve
        )


@pytest.mark.parametrize("memory", [1.0, 4.0])
def test_a_planted_memory_is_found(memory):
    found = [
        memory_octaves(list(remembering(np.random.default_rng(seed), memory, 48)))
        for seed in range(8)
    ]
    assert 0.6 * memory < np.median(found) < 1.6 * memory
