"""The accelerators on which a run is estimated, their prices, and numbers with an interval."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forerun._launcher.main_run.estimates import reference_tables
from forerun._proxies.core.canon import Json
from forerun._proxies.core.checks import Checks, SpecError
from forerun._proxies.core.flops import Convention
from forerun._proxies.core.notation import format_factor

MFU_CONVENTION: Convention = "full"
"""Convention in which shares of the peak are counted: model FLOPs divided by the dense BF16 peak
(MFU, arXiv 2204.02311, appendix B). Attention counts in full, without the savings of the causal
mask. In another convention, the MFU of the same run differs: by an eighth for Llama 3 8B at a
sequence length of 8k."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A positive number with an interval."""

    value: float
    low: float
    high: float
    source: str = ""
    """Origin of the number, in words; empty if the number needs no source."""

    def multiply(self, factor: Span) -> Span:
        """Multiply by another number, and each end by the same end."""
        return Span(
            value=self.value * factor.value, low=self.low * factor.low, high=self.high * factor.high
        )

    def divide(self, divisor: Span) -> Span:
        """Divide by another number, and each end by the opposite end."""
        return Span(
            value=self.value / divisor.value,
            low=self.low / divisor.high,
            high=self.high / divisor.low,
        )

    def scale(self, factor: float) -> Span:
        """Multiply number and ends by a factor."""
        return self.multiply(make_exact(factor))

    def to_json(self) -> dict[str, Json]:
        """Return the number as JSON.

        The interval is null if the number is exact, and a missing source is left out.
        """
        interval: Json = None if self.low == self.high else [self.low, self.high]
        source: dict[str, Json] = {"source": self.source} if self.source else {}
        return {"value": self.value, "interval": interval, **source}


def add_spans(spans: Iterable[Span]) -> Span:
    """Add numbers, low ends, and high ends.

    The sum of the ends assumes that all numbers err in the same direction.
    """
    terms = list(spans)
    return Span(
        value=sum(term.value for term in terms),
        low=sum(term.low for term in terms),
        high=sum(term.high for term in terms),
    )


def make_exact(value: float, source: str = "") -> Span:
    """Return an exact number: both ends of its interval are the number itself."""
    return Span(value=value, low=value, high=value, source=source)


def compute_gpu_hours(flops: Span, peak_flops: float, mfu: Span) -> Span:
    """Return the hours of one accelerator that always makes progress.

    Args:
        flops: FLOPs in `MFU_CONVENTION`.
        peak_flops: Peak of the accelerator in FLOP/s.
        mfu: Share of the peak.
    """
    return flops.divide(mfu.scale(3600.0 * peak_flops))


PRICES_USD = {
    "H100": Span(
        value=3.90,
        low=2.00,
        high=3.90,
        source="default: on demand, mid-2025; reserved down to 2.00 and below",
    ),
    "H800": Span(
        value=2.00,
        low=2.00,
        high=2.00,
        source="default: DeepSeek-V3, arXiv 2412.19437, as rented",
    ),
}
"""Published price of an accelerator for an hour, with the range of other published prices, by its
name in `reference_tables.GPUS`."""
MAX_GPUS = 10**5
"""Maximum number of accelerators. At published failure rates, a larger cluster would be interrupted
again before it has restarted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineOptions:
    """The machine as the user describes it.

    A field that is None takes the value of the reference table, or an assumption. One error lists
    all values that are out of range.
    """

    gpu: str = "H100"
    num_gpus: int = 1
    tokens_per_gpu_second: float | None = None
    """Measured throughput of one accelerator."""
    price_usd: float | None = None
    """Price of one accelerator for an hour."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_whole("num_gpus")
        if checks.has_no_problem:
            checks.require(
                self.num_gpus <= MAX_GPUS,
                f"num_gpus = {self.num_gpus}: must be at most {MAX_GPUS}",
            )
        limits = {"tokens_per_gpu_second": (1e-3, 1e9), "price_usd": (1e-4, 1e6)}
        for name, (least, most) in limits.items():
            if getattr(self, name) is not None:
                checks.require_number(name, least=least, most=most)
        try:
            reference_tables.look_up_gpu(self.gpu)
        except reference_tables.UnknownNameError as error:
            checks.require(False, str(error))
        checks.raise_problems()


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The accelerators of a run."""

    name: str
    num_gpus: int
    peak_flops: float
    memory_gb: float
    mfu: Span | None
    """Share of the peak while the run steps, from the user's own throughput; None if it is not
    given."""
    price_usd: Span | None


def build_machine(given: MachineOptions, flops_per_token: float) -> Machine:
    """Return a machine with the user's numbers, or else those of the reference table.

    Args:
        given: The machine as the user describes it.
        flops_per_token: FLOPs of the run in `MFU_CONVENTION`, which turn a measured throughput into
            a share of the peak.

    Raises:
        SpecError: The measured throughput is above the peak.
    """
    name, gpu = reference_tables.look_up_gpu(given.gpu)
    mfu, price = None, PRICES_USD.get(name)
    if given.tokens_per_gpu_second is not None:
        share = given.tokens_per_gpu_second * flops_per_token / gpu.peak_flops
        if share > 1:
            problem = (
                f"tokens_per_gpu_second = {given.tokens_per_gpu_second}: {format_factor(share)} "
                f"times the peak of {name}"
            )
            raise SpecError("Machine", [problem])
        mfu = make_exact(share, "measured throughput, as given")
    if given.price_usd is not None:
        price = make_exact(given.price_usd, "given")
    return Machine(
        name=name,
        num_gpus=given.num_gpus,
        peak_flops=gpu.peak_flops,
        memory_gb=gpu.memory_gb,
        mfu=mfu,
        price_usd=price,
    )
