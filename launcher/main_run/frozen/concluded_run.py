"""A main run that has ended, with the forecast that was frozen for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forerun._proxies.core.errors import ExitCode, InputError
from forerun._scaling_fits.forecast.conclusive import ForecastOutcome


class NotConcludedError(InputError):
    """A run's forecast cannot be scored. The message has the reason and advice."""

    exit_code = ExitCode.CANNOT_TELL


class ConcludedOtherwiseError(InputError):
    """This config was concluded before, with another final loss."""


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
    def forecast_outcome(self) -> ForecastOutcome:
        """Forecast and outcome, for scoring."""
        return ForecastOutcome(
            predicted_nats=self.predicted_nats,
            low_nats=self.low_nats,
            high_nats=self.high_nats,
            level=self.level,
            actual_nats=self.actual_nats,
        )

    def require_same_loss(self, known_nats: object, place: Path) -> None:
        """Check that the run ended with the loss that is already recorded.

        Raises:
            ConcludedOtherwiseError: The run ended with another loss.
        """
        if known_nats != self.actual_nats:
            raise ConcludedOtherwiseError(
                f"{place} records {known_nats} nats at the end of this config, and this log ends "
                f"at {self.actual_nats:.6g}: the recorded value is kept; check that this log is of "
                "the same run"
            )
