"""Tests of how GPU hours, dollars and days become FLOPs."""

import math

import pytest

from forerun._proxies.core.checks import SpecError
from forerun._scaling_fits.allocation.budgets import (
    Assumption,
    BudgetMachine,
    BudgetRequest,
    compute_budget,
)


def make_assumption(value):
    return Assumption(value=value, low=value, high=value, source="given")


H100 = BudgetMachine(
    name="H100", peak_flops=1e15, mfu=make_assumption(0.4), price_usd=make_assumption(2.0)
)


def test_hours_and_dollars_are_converted_to_flops():
    hours = compute_budget(BudgetRequest(gpu_hours=1000.0), H100)
    assert hours.flops == pytest.approx(1000 * 3600 * 4e14)
    assert hours.usd == pytest.approx(2000)
    dollars = compute_budget(BudgetRequest(usd=2000.0), H100)
    assert dollars.flops == pytest.approx(hours.flops)
    assert (dollars.gpu_hours, dollars.binds) == (pytest.approx(1000), "usd")
    flops = compute_budget(BudgetRequest(flops=hours.flops, num_gpus=10), H100)
    assert flops.gpu_hours == pytest.approx(1000)
    assert flops.days == pytest.approx(100 / 24)


def test_tighter_of_budget_and_deadline_binds():
    flops_per_gpu_day = 24 * 3600 * 4e14
    tight = compute_budget(BudgetRequest(flops=1e23, deadline_days=2.0, num_gpus=8), H100)
    assert (tight.binds, tight.flops) == ("deadline", pytest.approx(16 * flops_per_gpu_day))
    assert tight.days == pytest.approx(2.0)
    loose = compute_budget(BudgetRequest(flops=1e15, deadline_days=2.0, num_gpus=8), H100)
    assert (loose.binds, loose.flops) == ("flops", 1e15)
    deadline_only = compute_budget(BudgetRequest(deadline_days=2.0, num_gpus=8), H100)
    assert (deadline_only.binds, deadline_only.flops) == (
        "deadline",
        pytest.approx(16 * flops_per_gpu_day),
    )


@pytest.mark.parametrize("bad", [math.nan, 0.0, 1e300])
def test_invalid_budgets_are_reported_at_once(bad):
    with pytest.raises(SpecError) as caught:
        BudgetRequest(flops=bad, gpu_hours=bad, usd=bad, deadline_days=bad, num_gpus=0)
    assert len(caught.value.problems) == 6  # five values, and three budgets at once
    with pytest.raises(SpecError, match="no budget"):
        BudgetRequest()
    with pytest.raises(SpecError, match="num_gpus"):
        BudgetRequest(deadline_days=1.0)
