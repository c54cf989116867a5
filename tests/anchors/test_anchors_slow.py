"""Real sweeps of rates at three widths under each mistake: what the verdict says beside the
coordinate check.

`pytest tests/anchors -m slow -s` prints a row of docs/negative-anchors.md for each. At this scale a
mistake need not be seen in the optimum: that a verdict says `drifts` is reported, never asserted.
Asserted is that one of the two guards catches each mistake, and that neither speaks up without one.
"""

import time

import pytest
from anchors import (
    ANCHORS,
    MUON,
    SWEEP_WIDTHS,
    gradient_spike,
    overwritten_rates,
    sweep,
    told,
    unscaled_readout,
    verdict,
    verdict_said,
)

pytestmark = pytest.mark.slow


def checked(store, monkeypatch, name):
    """The coordinate check of the same mistake."""
    (anchor,) = [anchor for anchor in ANCHORS if anchor.name == name]
    return anchor.check(store, monkeypatch, mistaken=True)


def paid(points):
    """Nats that the base's best rate costs at the largest width, read off the grid: no fit, nothing
    extrapolated.
    """

    def mean_loss(width):
        rates = sorted({p.log2_value for p in points if p.size == width})
        found = {
            rate: [p.loss_nats for p in points if (p.size, p.log2_value) == (width, rate)]
            for rate in rates
        }
        return {
            rate: sum(losses) / len(losses) for rate, losses in found.items() if None not in losses
        }

    base, largest = mean_loss(SWEEP_WIDTHS[0]), mean_loss(SWEEP_WIDTHS[-1])
    return largest[min(base, key=base.get)] - min(largest.values())


def test_without_a_mistake_the_rate_holds(store):
    began = time.perf_counter()
    points = sweep(store)
    found = verdict(points)
    number = (
        f"{verdict_said(found)}; at width {SWEEP_WIDTHS[-1]} it costs {paid(points):.4f} nats "
        "as measured"
    )
    told("none: mup", "verdict", number, time.perf_counter() - began)
    assert found.outcome == "holds"
    assert abs(found.drift.value) < 0.2


def test_match_rms_adamw_drifts_by_half_an_octave_a_doubling_against_original(store):
    """A step's elements stay as large, so its spectral norm grows as the root of the width."""
    drifts = {}
    for rate in ("original", "match_rms_adamw"):
        began = time.perf_counter()
        points = sweep(
            store, optimizer="muon", parametrization=MUON[rate], adamw_learning_rate=2.0**-6
        )
        found = verdict(points)
        told(f"Muon by {rate}", "verdict", verdict_said(found), time.perf_counter() - began)
        drifts[rate] = found.drift
        assert (found.outcome == "drifts") == (rate == "match_rms_adamw")
    assert drifts["match_rms_adamw"].value - drifts["original"].value == pytest.approx(
        -0.5, abs=0.25
    )


@pytest.mark.parametrize(
    ("name", "plant", "own_base", "target"),
    [
        ("each model its own base (silent SP)", None, SWEEP_WIDTHS, 128),
        ("proxies on base 16, target 128 on its own", None, SWEEP_WIDTHS[-1:], SWEEP_WIDTHS[-1]),
        ("scheduler overwrites group rates when it is made", overwritten_rates, (), 128),
        ("readout unscaled", unscaled_readout, (), 128),
    ],
)
def test_one_guard_or_the_other_catches_it(store, monkeypatch, name, plant, own_base, target):
    with monkeypatch.context() as here:
        if plant:
            plant(here)
        began = time.perf_counter()
        points = sweep(store, own_base=own_base)
        seconds = time.perf_counter() - began
    found = verdict(points, target=target)
    number = (
        f"{verdict_said(found)}; at width {SWEEP_WIDTHS[-1]} it costs {paid(points):.4f} nats "
        "as measured"
    )
    told(name.replace("128", str(target)), "verdict", number, seconds)
    check = checked(store, monkeypatch, name)
    assert found.outcome == "drifts" or check.outcome == "blows_up"


ONE_SEED = {
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


def test_a_real_gradient_spike_on_one_seed_is_no_drift(store, monkeypatch):
    """One seed, clipping off, one run's gradient 90 times too large at one step: the published
    false alarm's kind.

    Every run is trained both ways; then each in turn is taken spiked, the others as they are.
    """
    began, outcomes, raised = time.perf_counter(), [], []
    for rates in ONE_SEED.values():
        clean = sweep(store, rates=rates, num_seeds=1, clip_norm=None)
        with monkeypatch.context() as here:
            gradient_spike(here, at_step=60, times=90.0)
            wrong = sweep(store, rates=rates, num_seeds=1, clip_norm=None)
        assert verdict(clean).outcome != "drifts"
        for index, run in enumerate(wrong):
            points = [*clean[:index], run, *clean[index + 1 :]]
            raised.append(run.loss_nats - clean[index].loss_nats)
            outcomes.append(verdict(points).outcome)
    said = ", ".join(
        f"{outcomes.count(o)} {o.replace('_', ' ')}" for o in ("drifts", "cannot_tell", "holds")
    )
    spread = f"losses raised by {min(raised):+.2f} to {max(raised):+.2f} nats"
    told(
        "gradient times 90 at one step of one run, one seed",
        "verdict",
        f"{said}; {spread}",
        time.perf_counter() - began,
    )
    assert max(raised) > 0.05, "the spike must be one that could alarm"
    assert "drifts" not in outcomes
