"""From GPU-hours, dollars or a deadline to FLOPs, with what was assumed on the way said aloud.

FLOPs = GPUs * seconds * peak * MFU: the share of the peak (dense, no sparsity) that a training run reaches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from proxies.core.checks import Checks
from scaling_fits.allocation.spending import LEAST_FLOPS, MOST_FLOPS
from scaling_fits.forecast.uncertainty import Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumption:
    """A number somebody stated: who, and between what it may lie."""

    value: float
    low: float
    high: float
    source: str

    def __post_init__(self) -> None:
        checks = Checks(self)
        for name in ("value", "low", "high"):
            checks.number(name, least=1e-6, most=1e6)
        if checks.fine:
            checks.that(self.low <= self.value <= self.high, f"{self.value} is not in [{self.low}, {self.high}]")
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One accelerator as a budget sees it."""

    name: str
    peak_flops: float
    """A second, dense BF16."""
    mfu: Assumption
    price_usd: Assumption | None
    """Of one for an hour; None when nobody said."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.number("peak_flops", least=1e9, most=1e18)
        checks.that(self.mfu.high <= 1, f"mfu = {self.mfu.high}: at most 1 is wanted")
        checks.done()

    def hour_flops(self, mfu: float) -> float:
        """FLOPs of one accelerator in an hour."""
        return 3600.0 * self.peak_flops * mfu


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What was asked for: one budget at most, and a deadline. All-at-once `SpecError` for what does not fit."""

    flops: float | None = None
    gpu_hours: float | None = None
    usd: float | None = None
    deadline_days: float | None = None
    num_gpus: int | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        limits = {
            "flops": (LEAST_FLOPS, MOST_FLOPS), "gpu_hours": (1e-6, 1e12), "usd": (1e-6, 1e15),
            "deadline_days": (1e-6, 1e5),
        }  # fmt: skip
        for name, (least, most) in limits.items():
            if getattr(self, name) is not None:
                checks.number(name, least=least, most=most)
        if self.num_gpus is not None:
            whole = type(self.num_gpus) is int and 1 <= self.num_gpus <= 10**8
            checks.that(whole, f"num_gpus = {self.num_gpus!r}: a whole number >= 1 and <= 1e8 is wanted")
        given = [name for name in ("flops", "gpu_hours", "usd") if getattr(self, name) is not None]
        checks.that(len(given) < 2, f"{' and '.join(given)}: one budget is wanted")
        checks.that(bool(given) or self.deadline_days is not None,
                    "no budget: flops, gpu_hours, usd or deadline_days is wanted")  # fmt: skip
        checks.that(self.deadline_days is None or self.num_gpus is not None,
                    "deadline_days wants num_gpus: how many run until then")  # fmt: skip
        checks.done()

    @property
    def needs_machine(self) -> bool:
        """Whether no FLOPs can be told without an accelerator."""
        return self.flops is None or self.deadline_days is not None

    @property
    def needs_price(self) -> bool:
        """Whether no FLOPs can be told without a price."""
        return self.usd is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """FLOPs, and what they are in hours, money and days. Intervals hold the doubt of MFU and price."""

    flops: Interval
    binds: str
    """`flops`, `gpu_hours`, `usd` or `deadline`: what kept it from being larger."""
    deadline_flops: Interval | None
    """What the deadline alone allows: GPUs that run without a stop."""
    gpu_hours: Interval | None
    usd: Interval | None
    days: Interval | None
    """On the GPUs given."""


def budget_of(wish: Wish, machine: Machine | None) -> Budget:
    """The FLOPs that a wish comes down to on a machine.

    Raises:
        ValueError: a machine or a price is missing; the verb asks for both first.
    """
    price = None if machine is None else machine.price_usd
    if (wish.needs_machine and machine is None) or (wish.needs_price and price is None):
        raise ValueError("a budget in hours, dollars or days wants a machine, and one in dollars its price")
    flops, binds = _asked(wish, machine)
    deadline = None
    if wish.deadline_days is not None and machine is not None:
        assert wish.num_gpus is not None
        deadline = _hours_flops(24 * wish.deadline_days * wish.num_gpus, machine)
        if flops is None or deadline.value < flops.value:
            binds = "deadline"
        flops = deadline if flops is None else _least(flops, deadline)
    assert flops is not None
    hours = usd = days = None
    if machine is not None:
        hours = _hours(flops, binds, wish, machine)
        days = None if wish.num_gpus is None else _scaled(hours, 1 / (24 * wish.num_gpus))
        usd = _usd(hours, binds, wish, machine)
    return Budget(flops=flops, binds=binds, deadline_flops=deadline, gpu_hours=hours, usd=usd, days=days)


def _asked(wish: Wish, machine: Machine | None) -> tuple[Interval | None, str]:
    if wish.flops is not None:
        return Interval(value=wish.flops, interval=None), "flops"
    if wish.gpu_hours is not None and machine is not None:
        return _hours_flops(wish.gpu_hours, machine), "gpu_hours"
    if wish.usd is not None and machine is not None and machine.price_usd is not None:
        price, mfu = machine.price_usd, machine.mfu
        low = wish.usd / price.high * machine.hour_flops(mfu.low)
        high = wish.usd / price.low * machine.hour_flops(mfu.high)
        return _interval(wish.usd / price.value * machine.hour_flops(mfu.value), low, high), "usd"
    return None, "deadline"


def _hours_flops(hours: float, machine: Machine) -> Interval:
    mfu = machine.mfu
    return _interval(*(hours * machine.hour_flops(share) for share in (mfu.value, mfu.low, mfu.high)))


def _hours(flops: Interval, binds: str, wish: Wish, machine: Machine) -> Interval:
    """GPU-hours: as given, or those that these FLOPs take."""
    if binds == "gpu_hours" and wish.gpu_hours is not None:
        return Interval(value=wish.gpu_hours, interval=None)
    if binds == "deadline" and wish.deadline_days is not None and wish.num_gpus is not None:
        return Interval(value=24 * wish.deadline_days * wish.num_gpus, interval=None)
    if binds == "usd" and wish.usd is not None and machine.price_usd is not None:
        price = machine.price_usd
        return _interval(wish.usd / price.value, wish.usd / price.high, wish.usd / price.low)
    mfu = machine.mfu
    return _interval(*(flops.value / machine.hour_flops(share) for share in (mfu.value, mfu.high, mfu.low)))


def _usd(hours: Interval, binds: str, wish: Wish, machine: Machine) -> Interval | None:
    if binds == "usd" and wish.usd is not None:
        return Interval(value=wish.usd, interval=None)
    if machine.price_usd is None:
        return None
    price, (low, high) = machine.price_usd, hours.interval or (hours.value, hours.value)
    return _interval(hours.value * price.value, low * price.low, high * price.high)


def _interval(value: float, low: float, high: float) -> Interval:
    """No interval where nothing is in doubt."""
    return Interval(value=value, interval=None if math.isclose(low, high, rel_tol=1e-12) else (low, high))


def _scaled(of: Interval, factor: float) -> Interval:
    ends = None if of.interval is None else (of.interval[0] * factor, of.interval[1] * factor)
    return Interval(value=of.value * factor, interval=ends)


def _least(one: Interval, other: Interval) -> Interval:
    ends = [of.interval or (of.value, of.value) for of in (one, other)]
    return _interval(min(one.value, other.value), min(e[0] for e in ends), min(e[1] for e in ends))
