"""When and how long to run: thresholds of law, the longest sensible run, and cost beside runs that were made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher.base.reference import model
from launcher.estimates.cost import gpu_hours, usd_of
from launcher.estimates.spans import Span, exactly
from launcher.estimates.utilization import utilization
from proxies.core.flops import count_params, flops_per_token, six_nd

MONTHS_PER_YEAR, DAYS_PER_YEAR = 12.0, 365.25
HARDWARE_DOUBLING_YEARS = 2.46
SOFTWARE_FACTOR, SOFTWARE_YEARS = 44.0, 7.0
INVESTMENT_DOUBLING_MONTHS = 6.3
THRESHOLDS: tuple[tuple[float, str], ...] = (
    (1e25, "EU AI Act (Regulation 2024/1689), article 51(2): presumed to be of systemic risk; the Commission is told"),
    (1e26, "California SB 53, a frontier model; the US order 14110, which named 1e26 first, was revoked in 2025"),
)
"""Training FLOPs and who named them, as known in 2026; no legal advice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LongestRun:
    """How long a run may sensibly last while what it could be replaced with grows."""

    grows: str
    years: float
    """1 / g, g the total growth rate a year."""
    published_years: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceRun:
    """A run that was made; its hours and dollars as published, None where nobody said."""

    name: str
    machine: str
    gpu_hours: float | None
    usd: float | None
    source: str


REFERENCE_RUNS: tuple[ReferenceRun, ...] = (
    ReferenceRun(name="gpt-3-175b", machine="V100", gpu_hours=None, usd=None, source="arXiv 2005.14165"),
    ReferenceRun(
        name="palm-540b", machine="6,144 TPUv4", gpu_hours=6144 * 1200.0 + 3072 * 336.0, usd=None,
        source="arXiv 2204.02311, appendix B: 1,200 hours, and 336 on half of them",
    ),
    ReferenceRun(
        name="opt-175b", machine="992 A100", gpu_hours=992 * 56 * 24.0, usd=None,
        source="arXiv 2205.01068; 56 days, 52 to 59 % of them training",
    ),
    ReferenceRun(
        name="bloom-176b", machine="384 A100", gpu_hours=1_082_990.0, usd=None, source="arXiv 2211.02001, as recalled",
    ),
    ReferenceRun(
        name="llama-3.1-405b", machine="16,384 H100", gpu_hours=30.84e6, usd=None,
        source="its model card, as recalled; 39.3M with 8B and 70B",
    ),
    ReferenceRun(
        name="deepseek-v3", machine="2,048 H800", gpu_hours=2.788e6, usd=5.576e6,
        source="arXiv 2412.19437; 2.664M of them pretraining, at USD 2 an hour",
    ),
)  # fmt: skip


def thresholds_passed(flops: float) -> list[str]:
    """What a run of so many training FLOPs passes, each with what to do about it said by its source."""
    return [f"{flops:.3g} FLOPs >= {limit:g}: {who}" for limit, who in THRESHOLDS if flops >= limit]


def longest_runs() -> tuple[LongestRun, ...]:
    """The longest sensible run under each set of rates ("The longest training run", Epoch AI, 2022).

    Starting later at a growth rate g is worth more than running on once a run is longer than 1 / g. Growth of what is
    invested is growth of compute, and holds that of hardware. The published fourth row does not follow from the
    published rates, so both are shown.
    """
    hardware = math.log(2) / HARDWARE_DOUBLING_YEARS
    software = math.log(SOFTWARE_FACTOR) / SOFTWARE_YEARS
    compute = math.log(2) * MONTHS_PER_YEAR / INVESTMENT_DOUBLING_MONTHS
    rows = (
        ("hardware", hardware, 3.55), ("hardware, software", hardware + software, 1.22),
        ("hardware, investment", compute, 9.1 / MONTHS_PER_YEAR),
        ("hardware, software, investment", compute + software, 2.52 / MONTHS_PER_YEAR),
    )  # fmt: skip
    return tuple(LongestRun(grows=name, years=1 / rate, published_years=said) for name, rate, said in rows)


def duration_warnings(days: Span) -> list[str]:
    """Which of the longest sensible runs a run is longer than."""
    warnings = []
    for row in longest_runs():
        limit = row.years * DAYS_PER_YEAR
        if days.high > limit:
            sure = "lasts" if days.low > limit else "may last"
            warnings.append(
                f"the run {sure} longer than {limit:.0f} days: while {row.grows} grow as published, a run begun later "
                "on what there is then ends earlier"
            )
    return warnings


def beside_reference(
    flops: float, peak_flops: float, mfu: Span | None, price_usd: Span | None
) -> list[dict[str, object]]:
    """The reference runs as a table, each as published and as it would cost on this GPU.

    `flops` of one's own run are 6 * N * D, as theirs are. Without an MFU, all hours paid are told, by published runs.
    """
    rows: list[dict[str, object]] = []
    for run in REFERENCE_RUNS:
        name, found = model(run.name)
        assert found.tokens is not None
        params = found.params_active if found.shape is None else count_params(found.shape).total
        count = six_nd(params, found.tokens)
        square = count if found.shape is None else flops_per_token(found.shape, "full") * found.tokens
        hours = gpu_hours(exactly(square), peak_flops, mfu or utilization(params, peak_flops))
        rows.append(
            {
                "model": name,
                "tokens": found.tokens,
                "six_nd": count,
                "share": flops / count,
                "machine": run.machine,
                "gpu_hours_published": run.gpu_hours,
                "usd_published": run.usd,
                "gpu_hours_here": hours.told(),
                "usd_here": None if price_usd is None else usd_of(hours, price_usd).told(),
                "source": run.source,
            }
        )
    return rows
