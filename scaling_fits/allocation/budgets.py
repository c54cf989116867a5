"""Conversion of GPU-hours, dollars, or a deadline to FLOPs, with every assumption stated.

FLOPs = GPUs * seconds * peak * MFU, where MFU is the share of the dense peak (no sparsity) that a
training run reaches.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun._proxies.core.checks import Checks
from forerun._scaling_fits.allocation.spending import MAX_FLOPS, MIN_FLOPS


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumption:
    """An assumed number with its range and its source."""

    value: float
    low: float
    high: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetMachine:
    """The throughput and price of one accelerator."""

    name: str
    peak_flops: float
    """Peak FLOPs per second, dense BF16."""
    mfu: Assumption
    """Share of `peak_flops` that a training run reaches."""
    price_usd: Assumption | None
    """Price of one accelerator per hour; None if not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetRequest:
    """A request for a budget: an amount (FLOPs, GPU-hours, or dollars), a deadline, or both. Raises
    `SpecError` with all problems at once.
    """

    flops: float | None = None
    gpu_hours: float | None = None
    usd: float | None = None
    deadline_days: float | None = None
    num_gpus: int | None = None

    def __post_init__(self) -> None:
        checks = Checks(self)
        limits = {
            "flops": (MIN_FLOPS, MAX_FLOPS),
            "gpu_hours": (1e-6, 1e12),
            "usd": (1e-6, 1e15),
            "deadline_days": (1e-6, 1e5),
        }
        for name, (low, high) in limits.items():
            if getattr(self, name) is not None:
                checks.require_number(name, least=low, most=high)
        if self.num_gpus is not None:
            is_valid = type(self.num_gpus) is int and 1 <= self.num_gpus <= 10**8
            checks.require(
                is_valid, f"num_gpus = {self.num_gpus!r}: must be a whole number from 1 to 1e8"
            )
        given = [name for name in ("flops", "gpu_hours", "usd") if getattr(self, name) is not None]
        checks.require(len(given) < 2, f"{' and '.join(given)}: give only one budget")
        checks.require(
            bool(given) or self.deadline_days is not None,
            "no budget: give flops, gpu_hours, usd or deadline_days",
        )
        checks.require(
            self.deadline_days is None or self.num_gpus is not None,
            "deadline_days needs num_gpus: how many run until then",
        )
        checks.raise_problems()

    @property
    def needs_machine(self) -> bool:
        """Whether FLOPs cannot be computed without an accelerator."""
        return self.flops is None or self.deadline_days is not None

    @property
    def needs_price(self) -> bool:
        """Whether FLOPs cannot be computed without a price."""
        return self.usd is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeBudget:
    """A budget in FLOPs, with its hours, cost, and days."""

    flops: float
    binds: str
    """Limit that binds: `flops`, `gpu_hours`, `usd`, or `deadline`."""
    gpu_hours: float | None
    usd: float | None
    days: float | None
    """Days on the given GPUs."""


def compute_budget(request: BudgetRequest, machine: BudgetMachine | None) -> ComputeBudget:
    """Compute the FLOPs of a request on a machine. A request in dollars needs the machine's
    price.
    """
    if machine is None:
        flops = request.flops
        assert flops is not None
        return ComputeBudget(flops=flops, binds="flops", gpu_hours=None, usd=None, days=None)
    hour_flops = 3600.0 * machine.peak_flops * machine.mfu.value
    price = None if machine.price_usd is None else machine.price_usd.value
    # GPU-hours that each limit allows
    hours: dict[str, float] = {}
    if request.flops is not None:
        hours["flops"] = request.flops / hour_flops
    if request.gpu_hours is not None:
        hours["gpu_hours"] = request.gpu_hours
    if request.usd is not None:
        assert price is not None
        hours["usd"] = request.usd / price
    if request.deadline_days is not None:
        assert request.num_gpus is not None
        hours["deadline"] = 24.0 * request.deadline_days * request.num_gpus
    binds = min(hours, key=lambda name: hours[name])
    num_hours = hours[binds]
    flops = num_hours * hour_flops
    if binds == "flops" and request.flops is not None:
        flops = request.flops  # As given, without rounding errors
    return ComputeBudget(
        flops=flops,
        binds=binds,
        gpu_hours=num_hours,
        usd=None if price is None else num_hours * price,
        days=None if request.num_gpus is None else num_hours / (24.0 * request.num_gpus),
    )
