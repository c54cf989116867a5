"""Caps on what a study may spend, compared with the spend that its ledger records.

The number of runs and their FLOPs are known before a run starts, so no run starts that would exceed
their caps. Hours, device-hours and dollars are only known as time passes: at their caps the driver
saves the runs in flight and stops, as it does when interrupted.

A driver records its spend from time to time; the work between two such records is a stretch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun._proxies.core.notation import (
    format_counted,
    format_duration,
    format_flops,
    format_significant,
    format_usd,
)
from forerun._sweeps.run.caps import BudgetCaps
from forerun._sweeps.store.ledger import WORK_RECORD, Ledger

_HOUR_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class KindSpend:
    """Spend on devices of one kind."""

    kind: str
    """Kind of device; empty if it was not recorded, or the worker did not answer."""
    device_hours: float
    usd: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Spend:
    """Spend of a study so far."""

    num_runs: int
    flops: float
    hours: float
    device_hours: float
    usd: float | None
    """Dollars; None if the price of a kind is unknown."""
    by_kind: tuple[KindSpend, ...]
    """Device-hours and dollars by kind of device, the most device-hours first."""


class StudyBudget:
    """The caps of a study and its spend, counted while one driver works.

    Failed attempts count in the hours, not in the FLOPs.
    """

    def __init__(
        self,
        caps: BudgetCaps,
        ledger: Ledger,
        *,
        num_devices: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start to count.

        Args:
            caps: the caps.
            ledger: the study's ledger, with the spend of earlier drivers.
            num_devices: number of devices that this driver holds, by kind; a share of a device is
                a fraction.
            clock: returns monotonic seconds.
        """
        self.caps, self._ledger, self._num_devices, self._clock = caps, ledger, num_devices, clock
        self._started = clock()
        self._num_runs, self._flops = 0, 0.0
        self._driven = _sum_driven(ledger)

    @property
    def unrecorded(self) -> tuple[float, dict[str, float]]:
        """Seconds, and device-seconds by kind, since this driver began or last recorded them."""
        seconds = self._clock() - self._started
        return seconds, {kind: seconds * number for kind, number in self._num_devices.items()}

    def record_spend(self, driver: int, stretch: int) -> None:
        """Record what this driver has spent since it last did. Raises as `Ledger.append`."""
        seconds, by_kind = self.unrecorded
        self._started += seconds
        record_work(self._ledger, driver, stretch, seconds, by_kind)
        self._driven = _sum_driven(self._ledger)

    def compute_spend(self) -> Spend:
        """Return the spend up to now, including this driver's."""
        self._count_outcomes()
        return _sum_spend(self._num_runs, self._flops, self._driven, self.unrecorded, self.caps)

    def find_reached_cap(self, flops: float, in_flight: Callable[[], Sequence[float]]) -> str:
        """Return a message about the cap that keeps a run from starting, or an empty string.

        Args:
            flops: FLOPs of the run.
            in_flight: returns the FLOPs of each run in flight.
        """
        caps = self.caps
        if caps.num_runs is None and caps.flops is None:
            return ""
        self._count_outcomes()
        running_flops = in_flight()
        num_begun = self._num_runs + len(running_flops)
        if caps.num_runs is not None and num_begun >= caps.num_runs:
            # The past tense, because the runs in flight have ended when this message is read
            begun = (
                f"{format_counted(num_begun, 'run')} {'was' if num_begun == 1 else 'were'} begun"
            )
            return _describe_reached_cap("max_runs", caps.num_runs, begun)
        total = self._flops + sum(running_flops) + flops
        if caps.flops is not None and total > caps.flops:
            return _describe_reached_cap(
                "max_flops",
                caps.flops,
                f"{format_flops(self._flops)} FLOPs are spent, and one more run would make "
                f"{format_flops(total)}",
            )
        return ""

    def find_overrun(self) -> str:
        """Return why the driver must stop now, or an empty string if it may continue."""
        caps, spend = self.caps, self.compute_spend()
        if caps.hours is not None and spend.hours >= caps.hours:
            reason = f"{format_duration(_HOUR_SECONDS * spend.hours)} have passed"
            return _describe_reached_cap("max_hours", caps.hours, reason)
        if caps.device_hours is not None and spend.device_hours >= caps.device_hours:
            return _describe_reached_cap(
                "max_device_hours",
                caps.device_hours,
                f"{format_significant(spend.device_hours)} device-hours are spent",
            )
        # A lower bound if the price of a kind is unknown
        usd = sum(kind_spend.usd or 0.0 for kind_spend in spend.by_kind)
        if caps.usd is not None and usd >= caps.usd:
            return _describe_reached_cap("max_usd", caps.usd, f"{format_usd(usd)} are spent")
        return ""

    def _count_outcomes(self) -> None:
        """Add the outcomes that were recorded since the last call."""
        results = self._ledger.get_own_results()
        if len(results) > self._num_runs:  # this is called several times a second
            self._flops += sum(result.flops for result in results[self._num_runs :])
            self._num_runs = len(results)


DeviceTime = tuple[float, Mapping[str, float]]
"""Seconds that drivers worked, and device-seconds by kind of device."""


def compute_spend(ledger: Ledger, caps: BudgetCaps, unrecorded: DeviceTime = (0.0, {})) -> Spend:
    """Return the spend that the ledger records, plus `unrecorded` time.

    Args:
        ledger: the ledger, as just read.
        caps: caps with the prices.
        unrecorded: time of a driver that has not recorded it yet.
    """
    flops = [result.flops for result in ledger.get_own_results()]
    return _sum_spend(len(flops), sum(flops), _sum_driven(ledger), unrecorded, caps)


def record_work(
    ledger: Ledger, driver: int, stretch: int, seconds: float, device_seconds: Mapping[str, float]
) -> None:
    """Append the `driven` record of a stretch of a driver's work, unless it is there.

    Args:
        ledger: open for writing.
        driver: number of the driver.
        stretch: number of the stretch.
        seconds: duration of the stretch.
        device_seconds: device-seconds by kind of device.

    Raises as `Ledger.append`.
    """
    if not is_work_recorded(ledger, driver, stretch):
        body = {
            "seconds": seconds,
            "device_seconds": sum(device_seconds.values()),
            "by_kind": dict(device_seconds),
        }
        ledger.append(WORK_RECORD, f"{driver}/{stretch}", body)


def is_work_recorded(ledger: Ledger, driver: int, stretch: int) -> bool:
    """Return whether that stretch is recorded."""
    return ledger.find(WORK_RECORD, f"{driver}/{stretch}") is not None


def _sum_driven(ledger: Ledger) -> DeviceTime:
    """Sum the `driven` records of all drivers."""
    bodies: list[Any] = [record.body for record in ledger.read_records(WORK_RECORD)]
    device_seconds = Counter[str]()
    for body in bodies:
        # Older records have no kinds
        device_seconds.update(body.get("by_kind", {"": body["device_seconds"]}))
    return sum(body["seconds"] for body in bodies), device_seconds


def _sum_spend(
    num_runs: int, flops: float, recorded: DeviceTime, unrecorded: DeviceTime, caps: BudgetCaps
) -> Spend:
    """Return the spend of recorded and unrecorded work, priced by kind of device."""
    device_seconds = Counter[str](recorded[1])
    device_seconds.update(unrecorded[1])
    by_kind = []
    for kind, seconds in device_seconds.most_common():
        hours, price = seconds / _HOUR_SECONDS, caps.find_price(kind)
        by_kind.append(
            KindSpend(kind=kind, device_hours=hours, usd=None if price is None else hours * price)
        )
    priced = [kind_spend.usd for kind_spend in by_kind if kind_spend.usd is not None]
    # Before any work, the dollars are 0 if the plan has a price, and unknown otherwise
    known = len(priced) == len(by_kind) and (by_kind or caps.usd_per_device_hour is not None)
    return Spend(
        num_runs=num_runs,
        flops=flops,
        hours=(recorded[0] + unrecorded[0]) / _HOUR_SECONDS,
        device_hours=sum(kind_spend.device_hours for kind_spend in by_kind),
        usd=sum(priced) if known else None,
        by_kind=tuple(by_kind),
    )


def _describe_reached_cap(key: str, cap: float, why: str) -> str:
    """Return the message about a cap that is reached."""
    return (
        f"cluster.{key} = {cap:g} is reached: {why}. All results are kept; raise the cap and "
        "run the command again"
    )
