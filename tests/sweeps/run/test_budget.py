"""Tests of the caps on runs, FLOPs, time and money: what may start, and when to stop."""

import pytest
from sweep_fakes import make_outcome, make_spec, make_specs

from forerun._sweeps.run.budget import StudyBudget, compute_spend, record_work
from forerun._sweeps.run.caps import BudgetCaps
from forerun._sweeps.store.ledger import Ledger


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path, {}, create=True) as ledger:
        yield ledger


class Clock:
    """A clock that a test sets by `now`, in seconds."""

    now = 0.0

    def __call__(self):
        return self.now


def make_budget(ledger, clock=None, num_devices=2.0, **caps):
    return StudyBudget(
        BudgetCaps(**caps), ledger, num_devices={"cpu": num_devices}, clock=clock or Clock()
    )


def make_flops_in_flight(specs):
    """Return a function that returns the FLOPs of these runs."""
    return lambda: [spec.flops for spec in specs]


def test_cap_on_runs_counts_those_in_flight(ledger):
    specs = make_specs(5)
    study_budget = make_budget(ledger, num_runs=3)
    assert study_budget.find_reached_cap(specs[0].flops, make_flops_in_flight([])) == ""
    assert study_budget.find_reached_cap(specs[2].flops, make_flops_in_flight(specs[:2])) == ""
    assert study_budget.find_reached_cap(
        specs[3].flops, make_flops_in_flight(specs[:3])
    ).startswith("cluster.max_runs = 3 is reached: 3 runs were begun")
    ledger.commit(specs[0], make_outcome(specs[0])[0])
    assert study_budget.find_reached_cap(specs[3].flops, make_flops_in_flight(specs[1:2])) == ""
    assert "3 runs were begun" in study_budget.find_reached_cap(
        specs[3].flops, make_flops_in_flight(specs[1:3])
    )
    assert "is reached: 1 run was begun." in make_budget(ledger, num_runs=1).find_reached_cap(
        specs[3].flops, make_flops_in_flight([])
    )


def test_run_that_would_exceed_the_flops_does_not_start(ledger):
    spec = make_spec()
    study_budget = make_budget(ledger, flops=2.5 * spec.flops)
    assert study_budget.find_reached_cap(spec.flops, make_flops_in_flight([spec])) == ""
    assert "max_flops" in study_budget.find_reached_cap(
        spec.flops, make_flops_in_flight([spec, spec])
    )
    # The recorded result says 1 FLOP.
    ledger.commit(spec, make_outcome(spec)[0])
    assert study_budget.find_reached_cap(spec.flops, make_flops_in_flight([spec])) == ""


@pytest.mark.parametrize(
    ("cap", "message"),
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
def test_time_is_added_up_over_all_drivers(ledger, cap, message):
    record_work(ledger, 0, 0, 3600.0, {"cpu": 7200.0})
    # The same driver's work is recorded only once.
    record_work(ledger, 0, 0, 9.9, {"cpu": 9.9})
    clock = Clock()
    study_budget = make_budget(ledger, clock, **cap)
    clock.now = 7199.0
    assert study_budget.find_overrun() == ""
    clock.now = 7200.0
    assert study_budget.find_overrun().startswith(f"{message}. ")
    study_budget.record_spend(1, 0)
    assert ledger.find("driven", "1/0").body == {
        "seconds": 7200.0,
        "device_seconds": 14400.0,
        "by_kind": {"cpu": 14400.0},
    }
    assert (
        study_budget.compute_spend().device_hours
        == 6.0
        == compute_spend(ledger, BudgetCaps()).device_hours
    )
    clock.now = 10800.0
    assert study_budget.compute_spend().device_hours == 8.0
    assert study_budget.unrecorded == (3600.0, {"cpu": 7200.0})


A100, H100 = "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3"


def test_each_kind_of_device_has_its_price(ledger):
    """Two A100 and one H100 work for three hours, one of them under an earlier driver. Then a
    device without a price works.
    """
    record_work(ledger, 0, 0, 3600.0, {A100: 7200.0, H100: 3600.0})
    clock, prices = Clock(), {"A100": 1.5, "h100": 4.0, "NVIDIA H100": 2.5}
    devices = {A100: 2.0, H100: 1.0}
    study_budget = StudyBudget(
        BudgetCaps(usd=16.5, usd_per_device_hour_by_kind=prices),
        ledger,
        num_devices=devices,
        clock=clock,
    )
    clock.now = 7199.0
    assert study_budget.find_overrun() == ""
    clock.now = 7200.0
    assert study_budget.find_overrun().startswith(
        "cluster.max_usd = 16.5 is reached: USD 16.5 are spent"
    )
    spend = study_budget.compute_spend()
    assert [(entry.kind, entry.device_hours, entry.usd) for entry in spend.by_kind] == [
        (A100, 6.0, 9.0),
        (H100, 3.0, 7.5),
    ]
    record_work(ledger, 1, 0, 3600.0, {"NVIDIA L4": 3600.0})
    assert compute_spend(ledger, BudgetCaps(usd_per_device_hour_by_kind=prices)).usd is None, (
        "the price of one kind is unknown"
    )
    assert "max_usd" in study_budget.find_overrun(), "the known part alone is over the cap"
    assert (
        compute_spend(
            ledger, BudgetCaps(usd_per_device_hour=1.0, usd_per_device_hour_by_kind=prices)
        ).usd
        == 6.5
    )
    # A record of an older version, without kinds of devices
    ledger.append("driven", "2/0", {"seconds": 3600.0, "device_seconds": 3600.0})
    assert (
        compute_spend(
            ledger, BudgetCaps(usd_per_device_hour=1.0, usd_per_device_hour_by_kind=prices)
        ).usd
        == 7.5
    )
