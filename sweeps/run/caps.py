"""The caps of a plan on what a study may spend. Standard library only, so that a plan can be read
without SQLite.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetCaps:
    """Maximum spend of a study over all its drivers; None: no cap. A plan checks them
    (`forerun._launcher.study.plan`).
    """

    num_runs: int | None = None
    """Maximum number of outcomes of any kind; imported ones cost nothing."""
    flops: float | None = None
    """Maximum training FLOPs, with attention counted as causal."""
    hours: float | None = None
    """Maximum hours during which a driver was at work."""
    device_hours: float | None = None
    """Maximum device-hours: the hours of each driver times the devices that it held."""
    usd: float | None = None
    usd_per_device_hour: float | None = None
    usd_per_device_hour_by_kind: dict[str, float] = field(default_factory=dict)
    """Prices by part of a device name such as "H100", ignoring case; the longest match counts."""

    def find_price(self, kind: str) -> float | None:
        """Return the price of an hour of a device of that kind in dollars; None if unknown."""
        prices = self.usd_per_device_hour_by_kind
        matches = [name for name in prices if name.lower() in kind.lower()]
        return prices[max(matches, key=len)] if matches else self.usd_per_device_hour
