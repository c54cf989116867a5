"""Tests of the loss curve of a main run that is predicted from the curves of smaller runs, which
are planted, recorded, or public.
"""

import csv
from pathlib import Path

import numpy as np
import pytest

from forerun._proxies.core.schedule import Schedule, compute_lr_table
from forerun._proxies.core.spec import Curve
from forerun._scaling_fits.forecast.loss_curves import (
    SHARES,
    WINDOW,
    FinishedRun,
    estimate_memory,
    predict_curve,
)

ROOT = Path(__file__).resolve().parents[3]
PUBLIC = ROOT.parent / "shared" / "data" / "multipowerlaw"
SIZES = [(params, steps) for params in (4e4, 1e5, 2.5e5) for steps in (200, 600, 1600)]
"""Parameters and steps (of 512 tokens) of a ladder like the demo's."""
TARGET = (2.5e5, 14_000)


def make_schedule(num_steps, **schedule_fields):
    return Schedule(
        **{"kind": "cosine", "num_steps": num_steps, "warmup_steps": min(88, num_steps // 10)}
        | schedule_fields
    )


def compute_losses(params, schedule):
    """Return the mean loss of every step: a power law in the area below the schedule, times a
    factor that grows with the present learning rate.
    """
    rates = np.array(compute_lr_table(schedule))
    learned = 14.0 * np.cumsum(rates * 512) ** -0.23
    return (0.7 + 6.0 * params**-0.25 + learned) * (1 + 0.2 * rates**0.8)


def finish_run(
    params, num_steps, rng, *, batch_noise=0.18, scatter=0.0, bend=0.0, gap=0.0, **schedule_fields
):
    """Return a finished run with the noise of its batches.

    `scatter` is the size of the run's own slow departure from the mean curve. `bend` is the size of
    a departure that grows with the length of the run. `gap` is a difference between training and
    final loss.
    """
    schedule = make_schedule(num_steps, **schedule_fields)
    means = compute_losses(params, schedule)
    share = np.arange(1, num_steps + 1) / num_steps
    own_departure = scatter * rng.standard_normal() * (1 - share)
    bend_departure = bend * (1 - share) * np.log(num_steps / 200) ** 2
    departure = own_departure - bend_departure
    losses = means * np.exp(departure + gap) + batch_noise * rng.standard_normal(num_steps)
    steps = tuple(range(1, num_steps + 1))
    return FinishedRun(
        params=params,
        tokens=512.0 * num_steps,
        schedule=schedule,
        final_loss_nats=float(means[-1]),
        curve=Curve(steps=steps, train_loss_nats=tuple(losses.tolist()), grad_norm=()),
    )


def make_ladder(rng, **options):
    return [finish_run(params, num_steps, rng, **options) for params, num_steps in SIZES]


def compute_share_means(run):
    """Return the mean training loss near each share of the run."""
    shares_done = np.array(run.curve.steps) / run.schedule.num_steps
    losses = np.array(run.curve.train_loss_nats)
    means = {}
    for share in SHARES:
        is_near = np.abs(shares_done - share) <= WINDOW * share
        means[share] = losses[is_near].mean()
    return means


def predict(runs, main_run, final=None, level=0.9):
    """Predict the curve of a main run whose final loss is known, unless `final` gives an
    interval.
    """
    final = final or (main_run.final_loss_nats,) * 3
    return predict_curve(runs, main_run.params, main_run.tokens, main_run.schedule, final, level)


@pytest.mark.parametrize("gap", [0.0, 0.08])
def test_predicted_curve_falls_and_matches_the_main_run_under_batch_noise(gap):
    """The batch noise is as large as the demo's. It moves the means of the shortest runs by several
    times the fall of the curve.
    """
    for seed in range(4):
        rng = np.random.default_rng(seed)
        runs, main_run = make_ladder(rng, gap=gap), finish_run(*TARGET, rng, gap=gap)
        points = predict(runs, main_run)
        losses = [point.loss_nats for point in points]
        assert len(points) >= 12 and losses == sorted(losses, reverse=True)
        truth = compute_share_means(main_run)
        assert max(abs(np.log(point.loss_nats / truth[point.share])) for point in points) < 0.06


@pytest.mark.parametrize(
    "schedule_fields",
    [
        {"kind": "constant"},
        {"kind": "wsd", "decay_steps": 40},
        {"batch_warmup_steps": 50, "batch_warmup_stages": 4},
    ],
)
def test_predicted_curve_falls_under_every_schedule(schedule_fields):
    rng = np.random.default_rng(5)
    runs, main_run = (
        make_ladder(rng, **schedule_fields),
        finish_run(*TARGET, rng, **schedule_fields),
    )
    losses = [point.loss_nats for point in predict(runs, main_run)]
    assert len(losses) >= 12 and losses == sorted(losses, reverse=True)


def test_band_covers_new_runs_at_its_level():
    rng, is_inside = np.random.default_rng(1), []
    for _ in range(16):
        runs, main_run = make_ladder(rng, scatter=0.02), finish_run(*TARGET, rng, scatter=0.02)
        truth = compute_share_means(main_run)
        is_inside += [
            point.low_nats <= truth[point.share] <= point.high_nats
            for point in predict(runs, main_run)
        ]
    assert np.mean(is_inside) >= 0.86
    width_90, width_50 = (
        np.mean([np.log(p.high_nats / p.low_nats) for p in predict(runs, main_run, level=level)])
        for level in (0.9, 0.5)
    )
    assert 0.05 < width_50 < 0.6 * width_90 < 0.3


def test_curves_that_bend_with_length_widen_the_band():
    rng = np.random.default_rng(4)
    main_run = finish_run(*TARGET, np.random.default_rng(4))
    half_widths = []
    for bend in (0.0, 0.03):
        points = predict(make_ladder(rng, bend=bend), main_run)
        half_widths.append(np.mean([np.log(p.high_nats / p.loss_nats) for p in points]))
    assert half_widths[1] > 1.5 * half_widths[0]


def test_band_covers_recorded_runs(monkeypatch):
    """`benchmarks/statistics/watch.py` recorded 24 runs twice as long as the longest rung. Four
    ladders each lack one run of every size.
    """
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "statistics")
    import watch

    tables = watch.load_file(str(watch.CURVES))
    steps = np.arange(1, watch.NUM_STEPS + 1)
    losses = tables[f"loss/{watch.WIDTH}/{watch.NUM_STEPS}"].astype(float)
    finals = tables[f"final/{watch.WIDTH}/{watch.NUM_STEPS}"]
    is_inside = []
    errors = []
    size = (
        watch.count_model_params(watch.WIDTH),
        watch.NUM_STEPS * watch.BATCH_TOKENS,
        watch.make_schedule(watch.NUM_STEPS),
    )
    for left_out in range(4):
        for point in predict_curve(
            watch.load_ladder(tables, left_out), *size, (1.0, 1.0, 1.0), 0.9
        ):
            is_near = np.abs(steps / watch.NUM_STEPS - point.share) <= WINDOW * point.share
            measured = losses[:, is_near].mean(axis=1) / finals
            is_inside.append((measured >= point.low_nats) & (measured <= point.high_nats))
            errors.append(np.log(point.loss_nats / measured))
    assert np.mean(is_inside) > 0.82, "measured: 0.86 over all ladders, and 0.61 for one of them"
    assert np.sqrt(np.mean(np.square(errors))) < 0.085


def read_public_run(size, kind, num_steps):
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
def test_public_curves_of_100m_parameters_are_predicted(kind, monkeypatch):
    """Three smaller or shorter runs are too few for a reliable band, but predict the curve."""
    monkeypatch.setattr("forerun._scaling_fits.forecast.loss_curves.MIN_RUNS", 2)
    runs = [read_public_run(25, kind, 24000), read_public_run(100, kind, 24000)] * 2 + [
        read_public_run(25, kind, 72000)
    ]
    main_run = read_public_run(100, kind, 72000)
    points, truth = predict(runs, main_run), compute_share_means(main_run)
    assert len(points) >= 12
    assert max(abs(np.log(point.loss_nats / truth[point.share])) for point in points) < 0.012


def test_band_includes_the_interval_of_the_final_loss():
    rng = np.random.default_rng(2)
    runs, main_run = make_ladder(rng), finish_run(*TARGET, rng)
    final = main_run.final_loss_nats
    known_end = predict(runs, main_run)[-1]
    uncertain_end = predict(runs, main_run, (final, 0.8 * final, 1.4 * final))[-1]
    assert uncertain_end.loss_nats == known_end.loss_nats
    assert uncertain_end.low_nats < 0.81 * uncertain_end.loss_nats < known_end.low_nats
    assert uncertain_end.high_nats > 1.39 * uncertain_end.loss_nats > known_end.high_nats


def test_too_few_runs_give_no_curve_and_unlogged_shares_no_point():
    rng = np.random.default_rng(3)
    runs, main_run = make_ladder(rng), finish_run(*TARGET, rng)
    assert predict(runs, main_run) != ()
    assert predict(runs[1:], main_run) == (), "five shorter runs are too few"
    assert predict([], main_run) == () and estimate_memory([]) is None
    late_runs = [
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
    assert [point.share for point in predict(late_runs, main_run)] == [
        share for share in SHARES if share >= 0.5
    ]
    slow_warmup_run = finish_run(*TARGET, rng, warmup_steps=4200)
    assert min(point.share for point in predict(runs, slow_warmup_run)) == 0.4, (
        "no point during warmup, where the rate still rises"
    )


def make_correlated_runs(rng, memory, num_runs):
    """Yield runs whose departures from the curve are correlated as exp(-octaves / memory) between
    shares.
    """
    steps, octaves = np.arange(1, 401), np.log2(np.array(SHARES))
    octaves_apart = np.abs(octaves[:, None] - octaves)
    root = np.linalg.cholesky(np.exp(-octaves_apart / memory))
    schedule = make_schedule(400, warmup_steps=10)
    for number in range(num_runs):
        params = 4e4 * 2 ** (number % 3)
        departure = 0.01 * np.interp(
            np.log2(steps / 400), octaves, root @ rng.standard_normal(len(SHARES))
        )
        losses = compute_losses(params, schedule) * np.exp(departure)
        curve = Curve(
            steps=tuple(steps.tolist()), train_loss_nats=tuple(losses.tolist()), grad_norm=()
        )
        final = float(compute_losses(params, schedule)[-1])
        yield FinishedRun(
            params=params, tokens=512.0 * 400, schedule=schedule, final_loss_nats=final, curve=curve
        )


@pytest.mark.parametrize("memory", [1.0, 4.0])
def test_planted_memory_is_recovered(memory):
    memories = [
        estimate_memory(list(make_correlated_runs(np.random.default_rng(seed), memory, 48)))
        for seed in range(8)
    ]
    assert 0.6 * memory < np.median(memories) < 1.6 * memory
