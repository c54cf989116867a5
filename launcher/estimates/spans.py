"""A number with the ends between which it may lie; and hours of accelerators as such numbers. Standard library only.

The share of the peak is model FLOPs over the peak (MFU, arXiv 2204.02311, appendix B), the whole square of attention
counted, dense BF16 peaks: counted otherwise, the same run has another MFU, by an eighth for Llama 3 8B at 8k.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from proxies.core.canon import Json
from proxies.core.flops import Convention

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
