"""The accelerators on which a run is estimated, and numbers with an interval."""

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
(MFU, arXiv 2204.02311, appendix B), with the whole square of attention. In another convention the
same run has another MFU, by an eighth for Llama 3 8B at 8k."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A positive number with an interval."""

    value: float
    low: float
    high: float
    source: str = ""
    """Origin of the number, in words; empty if the number needs no source."""

    def multiply(self, factor: Span) -> Span:
        """Multiply both numbers and both ends."""
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
    """Add numbers and ends. Adding the ends assumes that all numbers err in the same direction."""
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


MAX_GPUS = 10**5
"""Maximum number of accelerators: at published rates of failure, more would be interrupted before
they have started again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineOptions:
    """A user's statements about the machine.

    None stands for the number of the reference table, or for an assumption. If several values are
    bad, one error lists them all.
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
    """Return a machine with the numbers of the reference table, or those given in their place.

    Args:
        given: The user's statements.
        flops_per_token: FLOPs of the run in `MFU_CONVENTION`, which turn a measured throughput into
            a share of the peak.

    Raises:
        SpecError: The measured throughput is above the peak.
    """
    name, gpu = reference_tables.look_up_gpu(given.gpu)
    mfu, price = None, None
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
    elif (fact := reference_tables.PRICES_USD.get(name)) is not None:
        price = Span(value=fact.value, low=fact.low, high=fact.high, source=fact.source)
    return Machine(
        name=name,
        num_gpus=given.num_gpus,
        peak_flops=gpu.peak_flops,
        memory_gb=gpu.memory_gb,
        mfu=mfu,
        price_usd=price,
    )
