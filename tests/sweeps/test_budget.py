"""Caps: what may start, and when to stop."""

import pytest
from sweep_fakes import make_spec, make_specs, outcome

from sweeps.run.budget import BudgetCaps, StudyBudget, record_driven, spent
from sweeps.store.ledger import Ledger


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path, {}, create=True) as ledger:
        yield ledger


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def budget(ledger, clock=None, num_devices=2.0, **caps):
    return StudyBudget(
        BudgetCaps(**caps), ledger, num_devices={"cpu": num_devices}, clock=clock or Clock()
    )


def flops_of(specs):
    return lambda: [spec.flops for spec in specs]


def test_runs_are_counted_with_those_in_flight(ledger):
    specs = make_specs(5)
    mine = budget(ledger, num_runs=3)
    assert mine.refusal(specs[0].flops, flops_of([])) == ""
    assert mine.refusal(specs[2].flops, flops_of(specs[:2])) == ""
    assert mine.refusal(specs[3].flops, flops_of(specs[:3])).startswith(
        "cluster.max_runs = 3 is reached: 3 runs were begun"
    )
    ledger.commit(specs[0], outcome(specs[0])[0])
    assert mine.refusal(specs[3].flops, flops_of(specs[1:2])) == ""
    assert "3 runs were begun" in mine.refusal(specs[3].flops, flops_of(specs[1:3]))
    assert "is reached: 1 run was begun." in budget(ledger, num_runs=1).refusal(
        specs[3].flops, flops_of([])
    )


def test_no_run_starts_that_would_pass_the_flops(ledger):
    spec = make_spec()
    mine = budget(ledger, flops=2.5 * spec.flops)
    assert mine.refusal(spec.flops, flops_of([spec])) == ""
    assert "max_flops" in mine.refusal(spec.flops, flops_of([spec, spec]))
    ledger.commit(spec, outcome(spec)[0])  # records 1 FLOP
    assert mine.refusal(spec.flops, flops_of([spec])) == ""


@pytest.mark.parametrize(
    ("cap", "said"),
    [
        ({"hours": 3.0}, "cluster.max_hours = 3 is reached: 3 h 00 min have passed"),
        (
            {"device_hours": 6.0},
            "cluster.max_device_hours = 6 is reached: 6 device-hours are spent",
        ),
        (
            {"usd": 12.0, "usd_per_device_hour": 2.0},
            "cluster.max_usd = 12 is reached: USD 12 are spent",
        ),
    ],
)
def test_time_is_counted_over_every_driver(ledger, cap, said):
    record_driven(ledger, 0, 0, 3600.0, {"cpu": 7200.0})
    record_driven(ledger, 0, 0, 9.9, {"cpu": 9.9})  # once
    clock = Clock()
    mine = budget(ledger, clock, **cap)
    clock.now = 7199.0
    assert mine.overrun() == ""
    clock.now = 7200.0
    assert mine.overrun().startswith(f"{said}. ")
    mine.write_down(1, 0)
    assert ledger.find("driven", "1/0").body == {
        "seconds": 7200.0,
        "device_seconds": 14400.0,
        "by_kind": {"cpu": 14400.0},
    }
    assert mine.spent().device_hours == 6.0 == spent(ledger, BudgetCaps()).device_hours
    clock.now = 10800.0
    assert mine.spent().device_hours == 8.0 and mine.seconds == 3600.0


A100, H100 = "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3"


def test_an_hour_of_each_kind_has_its_price(ledger):
    """Two A100 and one H100 for three hours, one of them by a driver of before; then a device
    without a price.
    """
    record_driven(ledger, 0, 0, 3600.0, {A100: 7200.0, H100: 3600.0})
    clock, prices = Clock(), {"A100": 1.5, "h100": 4.0, "NVIDIA H100": 2.5}
    devices = {A100: 2.0, H100: 1.0}
    mine = StudyBudget(
        BudgetCaps(usd=16.5, usd_per_device_hour_by_kind=prices),
        ledger,
        num_devices=devices,
        clock=clock,
    )
    clock.now = 7199.0
    assert mine.overrun() == ""
    clock.now = 7200.0
    assert mine.overrun().startswith("cluster.max_usd = 16.5 is reached: USD 16.5 are spent")
    found = mine.spent()
    assert [(each.kind, each.device_hours, each.usd) for each in found.by_kind] == [
        (A100, 6.0, 9.0),
        (H100, 3.0, 7.5),
    ]
    record_driven(ledger, 1, 0, 3600.0, {"NVIDIA L4": 3600.0})
    assert spent(ledger, BudgetCaps(usd_per_device_hour_by_kind=prices)).usd is None, (
        "one price is not known"
    )
    assert "max_usd" in mine.overrun(), "what is known is over the cap by itself"
    assert (
        spent(ledger, BudgetCaps(usd_per_device_hour=1.0, usd_per_device_hour_by_kind=prices)).usd
        == 6.5
    )
    # of before there were kinds
    ledger.append("driven", "2/0", {"seconds": 3600.0, "device_seconds": 3600.0})
    assert (
        spent(ledger, BudgetCaps(usd_per_device_hour=1.0, usd_per_device_hour_by_kind=prices)).usd
        == 7.5
    )
