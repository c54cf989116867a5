"""Tests of the negative anchors on real sweeps of the learning rate at three widths.

`pytest tests/anchors -m slow -s` prints the rows of docs/negative-anchors.md. At this scale a
mistake may leave the optimum where it is, so no test asserts that the verdict is `drifts`. The
tests assert that the verdict or the coordinate check catches each mistake, and that neither raises
an alarm without a mistake.
"""

import time

import pytest
from anchors import (
    ANCHORS,
    MUON,
    SWEEP_WIDTHS,
    format_verdict,
    judge_points,
    plant_gradient_spike,
    plant_overwritten_rates,
    plant_unscaled_readout,
    print_row,
    sweep_rates,
)

pytestmark = pytest.mark.slow


def run_anchor_check(store, monkeypatch, name):
    """Return the coordinate check of the anchor with this name, mistake included."""
    (anchor,) = [anchor for anchor in ANCHORS if anchor.name == name]
    return anchor.run_check(store, monkeypatch, is_mistaken=True)


def average_losses(points, width):
    """Return the mean loss by rate at one width, without the rates at which a run diverged."""
    losses_by_rate = {}
    for point in points:
        if point.size == width:
            losses_by_rate.setdefault(point.log2_value, []).append(point.loss_nats)
    return {
        rate: sum(losses) / len(losses)
        for rate, losses in losses_by_rate.items()
        if None not in losses
    }


def measure_regret(points):
    """Return the regret in nats of the base's best rate at the largest width, without a fit."""
    base = average_losses(points, SWEEP_WIDTHS[0])
    largest = average_losses(points, SWEEP_WIDTHS[-1])
    return largest[min(base, key=base.get)] - min(largest.values())


def describe_sweep(verdict, points):
    """Return the verdict and the measured regret as text for the table."""
    regret = measure_regret(points)
    return (
        f"{format_verdict(verdict)}; measured regret at width {SWEEP_WIDTHS[-1]}: {regret:.4f} nats"
    )


def test_rate_holds_without_a_mistake(store):
    began = time.perf_counter()
    points = sweep_rates(store)
    verdict = judge_points(points)
    findings = describe_sweep(verdict, points)
    print_row("none: mup", "verdict", findings, time.perf_counter() - began)
    assert verdict.outcome == "holds"
    assert abs(verdict.drift.estimate) < 0.2


def test_match_rms_adamw_drifts_by_half_an_octave_per_doubling(store):
    """Muon with match_rms_adamw keeps the size of a step's elements at every width.

    The spectral norm of a step then grows as the square root of the width, so the best rate falls
    by half an octave per doubling against the `original` scale.
    """
    drifts = {}
    for rate in ("original", "match_rms_adamw"):
        began = time.perf_counter()
        points = sweep_rates(
            store, optimizer="muon", parametrization=MUON[rate], adamw_learning_rate=2.0**-6
        )
        verdict = judge_points(points)
        seconds = time.perf_counter() - began
        print_row(f"Muon by {rate}", "verdict", format_verdict(verdict), seconds)
        drifts[rate] = verdict.drift
        assert (verdict.outcome == "drifts") == (rate == "match_rms_adamw")
    assert drifts["match_rms_adamw"].estimate - drifts["original"].estimate == pytest.approx(
        -0.5, abs=0.25
    )


@pytest.mark.parametrize(
    # Name of the anchor, function that plants it (None if `own_base` is the mistake), widths at
    # which each model is its own base, and width of the main run that the verdict is about
    ("name", "plant", "own_base", "target"),
    [
        ("each model its own base (silent SP)", None, SWEEP_WIDTHS, 128),
        ("proxies on base 16, target 128 on its own", None, SWEEP_WIDTHS[-1:], SWEEP_WIDTHS[-1]),
        ("scheduler overwrites group rates when it is made", plant_overwritten_rates, (), 128),
        ("readout unscaled", plant_unscaled_readout, (), 128),
    ],
)
def test_verdict_or_coordinate_check_catches_the_mistake(
    store, monkeypatch, name, plant, own_base, target
):
    with monkeypatch.context() as patch:
        if plant:
            plant(patch)
        began = time.perf_counter()
        points = sweep_rates(store, own_base=own_base)
        seconds = time.perf_counter() - began
    verdict = judge_points(points, target=target)
    findings = describe_sweep(verdict, points)
    # The anchor's name has the coordinate check's target, which may differ from this sweep's.
    print_row(name.replace("128", str(target)), "verdict", findings, seconds)
    check = run_anchor_check(store, monkeypatch, name)
    assert verdict.outcome == "drifts" or check.outcome == "blows_up"


ONE_SEED_RATES_BY_WIDTH = {
    "five rates at the base, four above": {
        16: (-6.0, -5.0, -4.0, -3.0, -2.0),
        32: (-6.0, -5.0, -4.0, -3.0),
        64: (-6.0, -5.0, -4.0, -3.0),
    },
    "five, three, four": {
        16: (-6.0, -5.0, -4.0, -3.0, -2.0),
        32: (-5.0, -4.0, -3.0),
        64: (-6.0, -5.0, -4.0, -3.0),
    },
}
"""Grids of log2 learning rates by width, as wide as in published sweeps with one seed."""


def test_gradient_spike_in_one_run_is_no_drift(store, monkeypatch):
    """One run's gradient is 90 times too large at one step, with one seed and no clipping.

    This is the kind of fault behind the published false alarm. Every run is trained with and
    without the spike, and each verdict sees one spiked run among clean ones.
    """
    began, outcomes, loss_increases = time.perf_counter(), [], []
    for rates in ONE_SEED_RATES_BY_WIDTH.values():
        clean = sweep_rates(store, rates=rates, num_seeds=1, clip_norm=None)
        with monkeypatch.context() as patch:
            plant_gradient_spike(patch, at_step=60, times=90.0)
            spiked = sweep_rates(store, rates=rates, num_seeds=1, clip_norm=None)
        assert judge_points(clean).outcome != "drifts"
        for index, run in enumerate(spiked):
            points = [*clean[:index], run, *clean[index + 1 :]]
            loss_increases.append(run.loss_nats - clean[index].loss_nats)
            outcomes.append(judge_points(points).outcome)
    counts = ", ".join(
        f"{outcomes.count(outcome)} {outcome.replace('_', ' ')}"
        for outcome in ("drifts", "cannot_tell", "holds")
    )
    spread = f"losses raised by {min(loss_increases):+.2f} to {max(loss_increases):+.2f} nats"
    print_row(
        "gradient times 90 at one step of one run, one seed",
        "verdict",
        f"{counts}; {spread}",
        time.perf_counter() - began,
    )
    # Without an increase of the size that misled people, the test would prove nothing.
    assert max(loss_increases) > 0.05
    assert "drifts" not in outcomes
