"""Main runs that have ended, with the forecasts made for them. They are rows of `forerun fit
STUDY`, and their misses scale later intervals.

A study's own forecast, and so the digest that it froze, never depends on its main run. No torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxies.core import canon
from proxies.core.notation import format_factor
from scaling_fits.forecast.conclusive import ForecastOutcome, interval_scale

if TYPE_CHECKING:
    from scaling_fits.forecast.uncertainty import FittedRuns
    from sweeps.store.ledger import Ledger

CONCLUDED = "concluded"
"""Kind of the ledger's records of concluded runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConcludedRun:
    """A main run that has ended, with its forecast."""

    digest: str
    params: int
    tokens: int
    predicted_nats: float
    low_nats: float
    high_nats: float
    level: float
    extrapolation: float
    """Training FLOPs divided by those of the largest run that the forecast was fitted to."""
    actual_nats: float
    """Validation loss at the end, in nats."""

    @property
    def foretold(self) -> ForecastOutcome:
        """Forecast and outcome, for scoring."""
        return ForecastOutcome(
            predicted_nats=self.predicted_nats,
            low_nats=self.low_nats,
            high_nats=self.high_nats,
            level=self.level,
            actual_nats=self.actual_nats,
        )


def concluded(ledger: Ledger) -> list[ConcludedRun]:
    """Return the study's concluded runs, oldest first.

    Raises:
        CanonError: This version cannot read a record.
    """
    return [
        canon.decode(ConcludedRun, record.body, f"concluded {record.key[:16]}")
        for record in ledger.records(CONCLUDED)
    ]


def scaled(fit: FittedRuns, runs: Sequence[ConcludedRun]) -> FittedRuns:
    """Return the fit with the interval scale that the misses of earlier forecasts require, and a
    warning that says so.
    """
    if not runs:
        return fit
    misses = [run.foretold.z for run in runs]
    scale = interval_scale(misses, fit.level)
    sentence = (
        f"the fit includes {len(misses)} concluded main runs; their forecasts missed by up to "
        f"{max(map(abs, misses)):.2g} standard deviations, so intervals of a loss are "
        f"{format_factor(scale)} times as wide as the fit's own"
    )
    return dataclasses.replace(fit, record_scale=scale, warnings=(*fit.warnings, sentence))
