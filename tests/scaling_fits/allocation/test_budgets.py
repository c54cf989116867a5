"""Hours, dollars and days become FLOPs, and the doubt of MFU and price stays with them."""

import math

import pytest

from proxies.core.checks import SpecError
from scaling_fits.allocation.budgets import Assumption, Machine, Wish, budget_of


def stated(value, low=None, high=None):
    return Assumption(value=value, low=low or value, high=high or value, source="given")


H100 = Machine(name="H100", peak_flops=1e15, mfu=stated(0.4), price_usd=stated(2.0))
VAGUE = Machine(name="H100", peak_flops=1e15, mfu=stated(0.35, 0.25, 0.45), price_usd=stated(3.9, 2.0, 3.9))


def test_hours_and_dollars():
    hours = budget_of(Wish(gpu_hours=1000.0), H100)
    assert hours.flops.value == pytest.approx(1000 * 3600 * 4e14)
    assert hours.flops.interval is None and hours.usd.value == pytest.approx(2000)
    money = budget_of(Wish(usd=2000.0), H100)
    assert money.flops.value == pytest.approx(hours.flops.value)
    assert (money.gpu_hours.value, money.binds) == (pytest.approx(1000), "usd")
    flops = budget_of(Wish(flops=hours.flops.value, num_gpus=10), H100)
    assert flops.gpu_hours.value == pytest.approx(1000)
    assert flops.days.value == pytest.approx(100 / 24)


def test_doubt_is_carried():
    money = budget_of(Wish(usd=1000.0), VAGUE)
    low, high = money.flops.interval
    assert low == pytest.approx(1000 / 3.9 * 3600e15 * 0.25)
    assert high == pytest.approx(1000 / 2.0 * 3600e15 * 0.45)
    assert money.gpu_hours.interval == pytest.approx((1000 / 3.9, 500))
    assert money.usd.interval is None
    flops = budget_of(Wish(flops=1e21), VAGUE)
    assert flops.flops.interval is None
    assert flops.gpu_hours.interval == pytest.approx((1e21 / 3600e15 / 0.45, 1e21 / 3600e15 / 0.25))


def test_the_nearer_of_budget_and_deadline_binds():
    day = 24 * 3600 * 4e14
    tight = budget_of(Wish(flops=1e23, deadline_days=2.0, num_gpus=8), H100)
    assert (tight.binds, tight.flops.value) == ("deadline", pytest.approx(16 * day))
    assert tight.deadline_flops.value == tight.flops.value
    assert tight.days.value == pytest.approx(2.0)
    loose = budget_of(Wish(flops=1e15, deadline_days=2.0, num_gpus=8), H100)
    assert (loose.binds, loose.flops.value) == ("flops", 1e15)
    alone = budget_of(Wish(deadline_days=2.0, num_gpus=8), H100)
    assert (alone.binds, alone.flops.value) == ("deadline", pytest.approx(16 * day))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 0.0, 1e300, 1e-300])
def test_absurd_wishes_are_all_named(bad):
    with pytest.raises(SpecError) as caught:
        Wish(flops=bad, gpu_hours=bad, usd=bad, deadline_days=bad, num_gpus=0)
    assert len(caught.value.problems) == 6  # five values, and three budgets at once
    with pytest.raises(SpecError, match="no budget"):
        Wish()
    with pytest.raises(SpecError, match="num_gpus"):
        Wish(deadline_days=1.0)


def test_assumptions_and_machines_are_checked():
    with pytest.raises(SpecError, match="not in"):
        Assumption(value=2.0, low=3.0, high=4.0, source="")
    with pytest.raises(SpecError, match=r"mfu = 1\.5"):
        Machine(name="H100", peak_flops=1e15, mfu=stated(1.5), price_usd=None)
    with pytest.raises(ValueError, match="wants a machine"):
        budget_of(Wish(usd=1.0), None)
