"""When and how long to run: thresholds of law, the longest sensible run, and cost beside runs that were made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher.estimates.published import PUBLISHED_RUNS
from launcher.estimates.spans import Span, exactly, gpu_hours
from launcher.estimates.utilization import utilization
from proxies.core.flops import six_nd

DAYS_PER_YEAR = 365.25
HARDWARE = math.log(2) / 2.46
SOFTWARE = math.log(44.0) / 7.0
INVESTMENT = math.log(2) * 12 / 6.3
"""Growth rates a year ("The longest training run", Epoch AI, 2022); of what is invested, it holds that of hardware."""
THRESHOLDS: tuple[tuple[float, str], ...] = (
    (1e25, "EU AI Act (Regulation 2024/1689), article 51(2): presumed to be of systemic risk; the Commission is told"),
    (1e26, "California SB 53, a frontier model; the US order 14110, which named 1e26 first, was revoked in 2025"),
)
"""Training FLOPs and who named them, as known in 2026; no legal advice."""
BESIDE = ("smollm3-3b", "llama-3-8b", "bloom-176b", "palm-540b", "llama-3.1-405b", "deepseek-v3")
"""Published runs that an estimate is shown beside."""
PUBLISHED_USD = {"deepseek-v3": 5.328e6}
"""Dollars that their authors named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LongestRun:
    """How long a run may sensibly last while what it could be replaced with grows."""

    grows: str
    years: float
    """1 / g, g the total growth rate a year."""
    published_years: float
    """The fourth row's does not follow from the published rates, so both are shown."""


LONGEST_RUNS = (
    LongestRun(grows="hardware", years=1 / HARDWARE, published_years=3.55),
    LongestRun(grows="hardware, software", years=1 / (HARDWARE + SOFTWARE), published_years=1.22),
    LongestRun(grows="hardware, investment", years=1 / INVESTMENT, published_years=9.1 / 12),
    LongestRun(grows="hardware, software, investment", years=1 / (INVESTMENT + SOFTWARE), published_years=2.52 / 12),
)
"""Starting later at a growth rate g is worth more than running on once a run is longer than 1 / g."""


def thresholds_passed(flops: float) -> list[str]:
    """What a run of so many training FLOPs passes, each with what to do about it said by its source."""
    return [f"{flops:.3g} FLOPs >= {limit:g}: {who}" for limit, who in THRESHOLDS if flops >= limit]


def duration_warnings(days: Span) -> list[str]:
    """Which of the longest sensible runs a run is longer than."""
    return [
        f"the run {'lasts' if days.low > limit else 'may last'} longer than {limit:.0f} days: while {row.grows} grow "
        "as published, a run begun later on what there is then ends earlier"
        for row in LONGEST_RUNS
        if days.high > (limit := row.years * DAYS_PER_YEAR)
    ]


def beside_reference(
    flops: float, peak_flops: float, mfu: Span | None, price_usd: Span | None
) -> list[dict[str, object]]:
    """Some published runs as a table, each as published and as it would cost on this GPU.

    `flops` of one's own run are 6 * N * D, as theirs are. Without an MFU, all hours paid are told, by published runs.
    """
    rows: list[dict[str, object]] = []
    for run in (run for run in PUBLISHED_RUNS if run.name in BESIDE):
        count = six_nd(run.params, run.tokens)
        hours = gpu_hours(exactly(run.flops), peak_flops, mfu or utilization(run.params, peak_flops))
        rows.append(
            {
                "model": run.name,
                "tokens": run.tokens,
                "six_nd": count,
                "share": flops / count,
                "machine": run.gpu,
                "gpu_hours_published": run.gpu_hours,
                "usd_published": PUBLISHED_USD.get(run.name),
                "gpu_hours_here": hours.told(),
                "usd_here": None if price_usd is None else hours.times(price_usd).told(),
                "source": run.source,
            }
        )
    return rows
