"""Hours and dollars of a run: by a share of the peak, or by a throughput that was measured. Standard library only.

The share is model FLOPs over the peak (MFU, arXiv 2204.02311, appendix B), the whole square of attention counted, dense
BF16 peaks: counted otherwise, the same run has another MFU, by an eighth for Llama 3 8B at 8k.
"""

from __future__ import annotations

from launcher.estimates.spans import Span, exactly
from proxies.core.flops import Convention

MFU_CONVENTION: Convention = "full"


def gpu_hours(flops: Span, peak_flops: float, mfu: Span) -> Span:
    """Hours of one accelerator that makes progress all the time, of FLOPs in `MFU_CONVENTION`."""
    return flops.over(mfu.scaled(3600.0 * peak_flops))


def measured_mfu(tokens_per_gpu_second: float, flops_per_token: float, peak_flops: float) -> Span:
    """The share that a measured throughput is."""
    return exactly(tokens_per_gpu_second * flops_per_token / peak_flops, "measured throughput, as given")


def usd_of(hours: Span, price_usd: Span) -> Span:
    """Dollars of GPU-hours."""
    return hours.times(price_usd)
