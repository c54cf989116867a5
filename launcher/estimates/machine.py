"""The accelerators a run is estimated on: of the reference table, with whatever was given in its place."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.base import reference
from launcher.base.reference import Published
from launcher.estimates.spans import Span, exactly
from proxies.core.checks import Checks, SpecError

MOST_GPUS = 10**5
"""More would be interrupted, at published rates, before they have begun again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
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
            checks.that(self.num_gpus <= MOST_GPUS, f"num_gpus = {self.num_gpus}: at most {MOST_GPUS} is wanted")
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
    mfu: Span
    """While it steps."""
    measured: bool
    """Whether the MFU is of the user's own throughput, not that of published runs."""
    price_usd: Span | None


def machine_of(given: Given, flops_per_token: float) -> Machine:
    """The table's numbers, with what was given in their place.

    `flops_per_token` of the run, in the MFU's convention, turn a measured throughput into a share of the peak.

    Raises:
        SpecError: the measured throughput is more than the peak.
    """
    name, found = reference.gpu(given.gpu)
    peak = found.peak_flops
    mfu = _span(reference.MFU)
    if given.tokens_per_gpu_second is not None:
        mfu = exactly(given.tokens_per_gpu_second * flops_per_token / peak, "measured throughput, as given")
        if mfu.value > 1:
            said = f"tokens_per_gpu_second = {given.tokens_per_gpu_second}: {mfu.value:.3g} times the peak of {name}"
            raise SpecError("Machine", [said])
    price = None if given.price_usd is None else exactly(given.price_usd, "given")
    if price is None and name in reference.PRICES_USD:
        price = _span(reference.PRICES_USD[name])
    return Machine(
        name=name, num_gpus=given.num_gpus, peak_flops=peak, memory_gb=found.memory_gb, mfu=mfu, price_usd=price,
        measured=given.tokens_per_gpu_second is not None,
    )  # fmt: skip


def _span(fact: Published) -> Span:
    return Span(value=fact.value, low=fact.low, high=fact.high, source=fact.source)
