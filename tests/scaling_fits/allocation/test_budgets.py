"""Hours, dollars and days become FLOPs, by the nearer of budget and deadline."""

import math

import pytest

from proxies.core.checks import SpecError
from scaling_fits.allocation.budgets import Assumption, BudgetMachine, BudgetRequest, budget_of


def stated(value):
    return Assumption(value=value, low=value, high=value, source="given")


H100 = BudgetMachine(name="H100", peak_flops=1e15, mfu=stated(0.4), price_usd=stated(2.0))


def test_hours_and_dollars():
    hours = budget_of(BudgetRequest(gpu_hours=1000.0), H100)
    assert hours.flops == pytest.approx(1000 * 3600 * 4e14)
    assert hours.usd == pytest.approx(2000)
    money = budget_of(BudgetRequest(usd=2000.0), H100)
    assert money.flops == pytest.approx(hours.flops)
    assert (money.gpu_hours, money.binds) == (pytest.approx(1000), "usd")
    flops = budget_of(BudgetRequest(flops=hours.flops, num_gpus=10), H100)
    assert flops.gpu_hours == pytest.approx(1000)
    assert flops.days == pytest.approx(100 / 24)


def test_the_nearer_of_budget_and_deadline_binds():
    day = 24 * 3600 * 4e14
    tight = budget_of(BudgetRequest(flops=1e23, deadline_days=2.0, num_gpus=8), H100)
    assert (tight.binds, tight.flops) == ("deadline", pytest.approx(16 * day))
    assert tight.days == pytest.approx(2.0)
    loose = budget_of(BudgetRequest(flops=1e15, deadline_days=2.0, num_gpus=8), H100)
    assert (loose.binds, loose.flops) == ("flops", 1e15)
    alone = budget_of(BudgetRequest(deadline_days=2.0, num_gpus=8), H100)
    assert (alone.binds, alone.flops) == ("deadline", pytest.approx(16 * day))


@pytest.mark.parametrize("bad", [math.nan, 0.0, 1e300])
def test_absurd_wishes_are_all_named(bad):
    with pytest.raises(SpecError) as caught:
        BudgetRequest(flops=bad, gpu_hours=bad, usd=bad, deadline_days=bad, num_gpus=0)
    assert len(caught.value.problems) == 6  # five values, and three budgets at once
    with pytest.raises(SpecError, match="no budget"):
        BudgetRequest()
    with pytest.raises(SpecError, match="num_gpus"):
        BudgetRequest(deadline_days=1.0)
