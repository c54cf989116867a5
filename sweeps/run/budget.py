"""Hard caps on what a study may spend, compared with what its ledger says was spent.

Runs and FLOPs are known before a run starts: none starts that would pass the cap. Hours, device-hours and dollars are
known only as they pass: at the cap the driver saves what is in flight and stops, as it does when interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from sweeps.store.ledger import DRIVEN, Ledger

_HOUR_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetCaps:
    """The most a study may take, over all its drivers; None: no cap. A plan checks them (`launcher.plan`)."""

    num_runs: int | None = None
    """Outcomes, of whatever kind; imported ones cost nothing."""
    flops: float | None = None
    """FLOPs of training, counted `causal`."""
    hours: float | None = None
    """During which a driver was at work."""
    device_hours: float | None = None
    """The same times the devices held."""
    usd: float | None = None
    usd_per_device_hour: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """What a study has taken so far."""

    num_runs: int
    flops: float
    hours: float
    device_hours: float
    usd: float | None
    """None where no price is known."""


class StudyBudget:
    """What one driver may still spend. Lost executions are in the hours, not in the FLOPs."""

    def __init__(
        self, caps: BudgetCaps, ledger: Ledger, *, num_devices: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`num_devices`: held while this driver works, fractions counted. `clock`: monotonic seconds."""
        self.caps, self._ledger, self._num_devices, self._clock = caps, ledger, num_devices, clock
        self._started = clock()
        self._num_runs, self._flops = 0, 0.0
        self._driven = _driven(ledger)

    @property
    def seconds(self) -> float:
        """Seconds since this driver began, or last wrote down what it took."""
        return self._clock() - self._started

    def write_down(self, driver: int, stretch: int) -> None:
        """Record what this driver has taken since it last did. Raises what `Ledger.append` raises."""
        seconds, self._started = self.seconds, self._clock()
        record_driven(self._ledger, driver, stretch, seconds, seconds * self._num_devices)
        self._driven = _driven(self._ledger)

    def spent(self) -> Spent:
        """Everything up to now, this driver's share included."""
        self._count()
        more = (self.seconds, self.seconds * self._num_devices)
        return _spent(self._num_runs, self._flops, self._driven, more, self.caps.usd_per_device_hour)

    def refusal(self, flops: float, in_flight: Callable[[], Sequence[float]]) -> str:
        """Why a run of so many FLOPs may not start beside those `in_flight`, by theirs; empty if it may."""
        caps = self.caps
        if caps.num_runs is None and caps.flops is None:
            return ""
        self._count()
        there = in_flight()
        if caps.num_runs is not None and self._num_runs + len(there) >= caps.num_runs:
            return _reached("max_runs", caps.num_runs, f"{self._num_runs} runs have ended, {len(there)} are in flight")
        total = self._flops + sum(there) + flops
        if caps.flops is not None and total > caps.flops:
            return _reached(
                "max_flops", caps.flops, f"{self._flops:.4g} are spent, and one more run would make {total:.4g}"
            )
        return ""

    def overrun(self) -> str:
        """Why the driver must stop now; empty while it may work."""
        caps, now = self.caps, self.spent()
        if caps.hours is not None and now.hours >= caps.hours:
            return _reached("max_hours", caps.hours, f"{now.hours:.4g} hours have passed")
        if caps.device_hours is not None and now.device_hours >= caps.device_hours:
            return _reached("max_device_hours", caps.device_hours, f"{now.device_hours:.4g} device-hours are spent")
        if caps.usd is not None and now.usd is not None and now.usd >= caps.usd:
            return _reached("max_usd", caps.usd, f"{now.usd:.4g} dollars are spent")
        return ""

    def _count(self) -> None:
        """Take in the outcomes recorded since the last look."""
        results = self._ledger.own_results()
        if len(results) > self._num_runs:  # it is asked several times a second
            self._flops += sum(result.flops for result in results[self._num_runs :])
            self._num_runs = len(results)


def spent(ledger: Ledger, usd_per_device_hour: float | None, more: tuple[float, float] = (0.0, 0.0)) -> Spent:
    """What the records say: the hours are those of drivers that have ended.

    Args:
        ledger: as just read.
        usd_per_device_hour: the price; None: dollars are not known.
        more: seconds and device-seconds of a driver that has recorded none yet.
    """
    own = [result.flops for result in ledger.own_results()]
    return _spent(len(own), sum(own), _driven(ledger), more, usd_per_device_hour)


def record_driven(ledger: Ledger, driver: int, stretch: int, seconds: float, device_seconds: float) -> None:
    """Add the `driven` record of a stretch of a driver's work, once. Raises what `Ledger.append` raises."""
    if not is_driven(ledger, driver, stretch):
        ledger.append(DRIVEN, f"{driver}/{stretch}", {"seconds": seconds, "device_seconds": device_seconds})


def is_driven(ledger: Ledger, driver: int, stretch: int) -> bool:
    """Whether that stretch is recorded."""
    return ledger.find(DRIVEN, f"{driver}/{stretch}") is not None


def _driven(ledger: Ledger) -> tuple[float, float]:
    """Seconds and device-seconds of the drivers that have ended."""
    bodies = [cast(dict[str, float], record.body) for record in ledger.records(DRIVEN)]
    return sum(body["seconds"] for body in bodies), sum(body["device_seconds"] for body in bodies)


def _spent(
    num_runs: int, flops: float, driven: tuple[float, float], more: tuple[float, float], price: float | None
) -> Spent:
    hours, device_hours = ((held + new) / _HOUR_SECONDS for held, new in zip(driven, more, strict=True))
    usd = None if price is None else device_hours * price
    return Spent(num_runs=num_runs, flops=flops, hours=hours, device_hours=device_hours, usd=usd)


def _reached(key: str, cap: float, why: str) -> str:
    return f"cluster.{key} = {cap:g} is reached: {why}. All results are kept; raise the cap and run the command again"
