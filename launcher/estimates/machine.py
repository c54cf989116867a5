"""The accelerators a run is estimated on, of the reference table or as given, and numbers with an interval."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from launcher.base import reference
from launcher.base.reference import Published
from proxies.core.canon import Json
from proxies.core.checks import Checks, SpecError
from proxies.core.flops import Convention
from proxies.core.notation import format_factor

# A number with the ends between which it may lie; and hours of accelerators as such numbers. Standard library only.
#
# The share of the peak is model FLOPs over the peak (MFU, arXiv 2204.02311, appendix B), the whole square of attention
# counted, dense BF16 peaks: counted otherwise, the same run has another MFU, by an eighth for Llama 3 8B at 8k.

MFU_CONVENTION: Convention = "full"


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A positive number and its ends; `source` says who stated it, or what it follows from."""

    value: float
    low: float
    high: float
    source: str = ""

    def times(self, other: Span) -> Span:
        """The product, ends with ends."""
        return Span(value=self.value * other.value, low=self.low * other.low, high=self.high * other.high)

    def over(self, other: Span) -> Span:
        """The quotient, each end with the other's far one."""
        return Span(value=self.value / other.value, low=self.low / other.high, high=self.high / other.low)

    def scaled(self, factor: float) -> Span:
        """All three times a number."""
        return Span(value=self.value * factor, low=self.low * factor, high=self.high * factor)

    def told(self) -> dict[str, Json]:
        """As verbs print it: the interval is null where nothing is in doubt, the source is there if it has one."""
        ends: Json = None if self.low == self.high else [self.low, self.high]
        return {"value": self.value, "interval": ends} | ({"source": self.source} if self.source else {})


def added(spans: Iterable[Span]) -> Span:
    """The sum, ends with ends, as if what is assumed were wrong in all of them at once."""
    every = list(spans)
    return Span(value=sum(s.value for s in every), low=sum(s.low for s in every), high=sum(s.high for s in every))


def exactly(value: float, source: str = "") -> Span:
    """A number that nobody doubts."""
    return Span(value=value, low=value, high=value, source=source)


def gpu_hours(flops: Span, peak_flops: float, mfu: Span) -> Span:
    """Hours of one accelerator that makes progress all the time, of FLOPs in `MFU_CONVENTION`."""
    return flops.over(mfu.scaled(3600.0 * peak_flops))


MOST_GPUS = 10**5
"""More would be interrupted, at published rates, before they have begun again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineOptions:
    """What a user says of the machine; None: of the reference table, or assumed. Bad values are refused all at once."""

    gpu: str = "H100"
    num_gpus: int = 1
    tokens_per_gpu_second: float | None = None
    """Measured."""
    price_usd: float | None = None
    """The price of one for an hour."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.whole("num_gpus")
        if checks.fine:
            checks.that(self.num_gpus <= MOST_GPUS, f"num_gpus = {self.num_gpus}: must be at most {MOST_GPUS}")
        limits = {"tokens_per_gpu_second": (1e-3, 1e9), "price_usd": (1e-4, 1e6)}
        for name, (least, most) in limits.items():
            if getattr(self, name) is not None:
                checks.number(name, least=least, most=most)
        try:
            reference.gpu(self.gpu)
        except reference.UnknownNameError as error:
            checks.that(False, str(error))
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The accelerators of a run."""

    name: str
    num_gpus: int
    peak_flops: float
    memory_gb: float
    mfu: Span | None
    """Share of the peak while it steps, by the user's own throughput; None unless it is given."""
    price_usd: Span | None


def machine_of(given: MachineOptions, flops_per_token: float) -> Machine:
    """The table's numbers, with what was given in their place.

    `flops_per_token` of the run, in the MFU's convention, turn a measured throughput into a share of the peak.

    Raises:
        SpecError: the measured throughput is more than the peak.
    """
    name, found = reference.gpu(given.gpu)
    peak = found.peak_flops
    mfu = None
    if given.tokens_per_gpu_second is not None:
        mfu = exactly(given.tokens_per_gpu_second * flops_per_token / peak, "measured throughput, as given")
        if mfu.value > 1:
            sentence = (
                f"tokens_per_gpu_second = {given.tokens_per_gpu_second}: {format_factor(mfu.value)} times the peak "
                f"of {name}"
            )
            raise SpecError("Machine", [sentence])
    price = None if given.price_usd is None else exactly(given.price_usd, "given")
    if price is None and name in reference.PRICES_USD:
        price = _span(reference.PRICES_USD[name])
    return Machine(
        name=name, num_gpus=given.num_gpus, peak_flops=peak, memory_gb=found.memory_gb, mfu=mfu, price_usd=price,
    )  # fmt: skip


def _span(fact: Published) -> Span:
    return Span(value=fact.value, low=fact.low, high=fact.high, source=fact.source)
