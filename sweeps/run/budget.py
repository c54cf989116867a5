"""Hard caps on what a study may spend, compared with what its ledger says was spent.

Runs and FLOPs are known before a run starts: none starts that would pass the cap. Hours,
device-hours and dollars are known only as they pass: at the cap the driver saves what is in flight
and stops, as it does when interrupted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxies.core.notation import (
    counted,
    format_duration,
    format_flops,
    format_significant,
    format_usd,
)
from sweeps.run.kinds import price_of
from sweeps.store.ledger import DRIVEN, Ledger

_HOUR_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetCaps:
    """The most a study may take, over all its drivers; None: no cap. A plan checks them
    (`launcher.plan`).
    """

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
    usd_per_device_hour_by_kind: dict[str, float] = field(default_factory=dict)

    def price(self, kind: str) -> float | None:
        """Dollars for an hour of a device of that kind; None: not known."""
        return price_of(kind, self.usd_per_device_hour_by_kind, self.usd_per_device_hour)


@dataclass(frozen=True, kw_only=True, slots=True)
class KindSpent:
    """What devices of one kind were held for."""

    kind: str
    """Empty: not recorded, or a worker that did not answer."""
    device_hours: float
    usd: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """What a study has taken so far."""

    num_runs: int
    flops: float
    hours: float
    device_hours: float
    usd: float | None
    """None where the price of some kind is not known."""
    by_kind: tuple[KindSpent, ...]
    """The device-hours and dollars again, the most first."""


class StudyBudget:
    """What one driver may still spend. Lost executions are in the hours, not in the FLOPs."""

    def __init__(
        self,
        caps: BudgetCaps,
        ledger: Ledger,
        *,
        num_devices: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_devices`: by kind, held while this driver works, fractions counted. `clock`:
        monotonic seconds.
        """
        self.caps, self._ledger, self._num_devices, self._clock = caps, ledger, num_devices, clock
        self._started = clock()
        self._num_runs, self._flops = 0, 0.0
        self._driven = _driven(ledger)

    @property
    def seconds(self) -> float:
        """Seconds since this driver began, or last wrote down what it took."""
        return self._clock() - self._started

    @property
    def device_seconds(self) -> dict[str, float]:
        """The same times the devices, by kind."""
        seconds = self.seconds
        return {kind: seconds * number for kind, number in self._num_devices.items()}

    def write_down(self, driver: int, stretch: int) -> None:
        """Record what this driver has taken since it last did. Raises what `Ledger.append`
        raises.
        """
        now = self._clock()
        seconds, self._started = now - self._started, now
        by_kind = {kind: seconds * number for kind, number in self._num_devices.items()}
        record_driven(self._ledger, driver, stretch, seconds, by_kind)
        self._driven = _driven(self._ledger)

    def spent(self) -> Spent:
        """Everything up to now, this driver's share included."""
        self._count()
        return _spent(
            self._num_runs,
            self._flops,
            self._driven,
            (self.seconds, self.device_seconds),
            self.caps,
        )

    def refusal(self, flops: float, in_flight: Callable[[], Sequence[float]]) -> str:
        """Why a run of so many FLOPs may not start beside those `in_flight`, by theirs; empty if it
        may.
        """
        caps = self.caps
        if caps.num_runs is None and caps.flops is None:
            return ""
        self._count()
        there = in_flight()
        num_begun = self._num_runs + len(there)
        if caps.num_runs is not None and num_begun >= caps.num_runs:
            # What is in flight now has ended when somebody reads this.
            begun = f"{counted(num_begun, 'run')} {'was' if num_begun == 1 else 'were'} begun"
            return _reached("max_runs", caps.num_runs, begun)
        total = self._flops + sum(there) + flops
        if caps.flops is not None and total > caps.flops:
            return _reached(
                "max_flops",
                caps.flops,
                f"{format_flops(self._flops)} FLOPs are spent, and one more run would make "
                f"{format_flops(total)}",
            )
        return ""

    def overrun(self) -> str:
        """Why the driver must stop now; empty while it may work."""
        caps, now = self.caps, self.spent()
        if caps.hours is not None and now.hours >= caps.hours:
            return _reached(
                "max_hours", caps.hours, f"{format_duration(3600 * now.hours)} have passed"
            )
        if caps.device_hours is not None and now.device_hours >= caps.device_hours:
            return _reached(
                "max_device_hours",
                caps.device_hours,
                f"{format_significant(now.device_hours)} device-hours are spent",
            )
        usd = sum(each.usd or 0.0 for each in now.by_kind)  # at least, where a price is not known
        if caps.usd is not None and usd >= caps.usd:
            return _reached("max_usd", caps.usd, f"{format_usd(usd)} are spent")
        return ""

    def _count(self) -> None:
        """Take in the outcomes recorded since the last look."""
        results = self._ledger.own_results()
        if len(results) > self._num_runs:  # it is asked several times a second
            self._flops += sum(result.flops for result in results[self._num_runs :])
            self._num_runs = len(results)


Held = tuple[float, Mapping[str, float]]
"""Seconds, and device-seconds by kind."""


def spent(ledger: Ledger, caps: BudgetCaps, more: Held = (0.0, {})) -> Spent:
    """What the records say: the hours are those of drivers that have ended.

    Args:
        ledger: as just read.
        caps: have the prices.
        more: of a driver that has recorded none yet.
    """
    own = [result.flops for result in ledger.own_results()]
    return _spent(len(own), sum(own), _driven(ledger), more, caps)


def record_driven(
    ledger: Ledger, driver: int, stretch: int, seconds: float, device_seconds: Mapping[str, float]
) -> None:
    """Add the `driven` record of a stretch of a driver's work, once; `device_seconds` by kind of
    device.

    Raises what `Ledger.append` raises.
    """
    if not is_driven(ledger, driver, stretch):
        body = {
            "seconds": seconds,
            "device_seconds": sum(device_seconds.values()),
            "by_kind": dict(device_seconds),
        }
        ledger.append(DRIVEN, f"{driver}/{stretch}", body)


def is_driven(ledger: Ledger, driver: int, stretch: int) -> bool:
    """Whether that stretch is recorded."""
    return ledger.find(DRIVEN, f"{driver}/{stretch}") is not None


def _driven(ledger: Ledger) -> Held:
    """Of the drivers that have ended."""
    bodies: list[Any] = [record.body for record in ledger.records(DRIVEN)]
    held = Counter[str]()
    for body in bodies:
        # records of before there were kinds
        held.update(body.get("by_kind", {"": body["device_seconds"]}))
    return sum(body["seconds"] for body in bodies), held


def _spent(num_runs: int, flops: float, driven: Held, more: Held, caps: BudgetCaps) -> Spent:
    held = Counter[str](driven[1])
    held.update(more[1])
    by_kind = []
    for kind, seconds in held.most_common():
        hours, price = seconds / _HOUR_SECONDS, caps.price(kind)
        by_kind.append(
            KindSpent(kind=kind, device_hours=hours, usd=None if price is None else hours * price)
        )
    priced = [each.usd for each in by_kind if each.usd is not None]
    known = len(priced) == len(by_kind) and (by_kind or caps.usd_per_device_hour is not None)
    return Spent(
        num_runs=num_runs,
        flops=flops,
        hours=(driven[0] + more[0]) / _HOUR_SECONDS,
        device_hours=sum(each.device_hours for each in by_kind),
        usd=sum(priced) if known else None,
        by_kind=tuple(by_kind),
    )


def _reached(key: str, cap: float, why: str) -> str:
    return (
        f"cluster.{key} = {cap:g} is reached: {why}. All results are kept; raise the cap and "
        "run the command again"
    )
