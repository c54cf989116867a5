"""Checks whether a forecast is conclusive: the fit's status, its back-test, its extrapolation, and
the width of its interval.

The gate `fit` of a study (a check before the plan of the main run is frozen) and every command that
prints a forecast use these checks. The module also computes from the outcomes of earlier forecasts
how wide the next interval must be.

Let z be the error of a forecast, in the standard deviations that its interval implies. If intervals
are correct, z is standard normal. Before a forecast has been tested, the accuracy of the intervals
is not known. Their scale therefore has a prior, a scaled inverse chi-square of `PRIOR_RUNS` degrees
of freedom about 1. Errors of concluded runs turn the prior into a posterior, and the predictive
distribution of the next error is Student's t (Gelman et al., Bayesian Data Analysis, third edition,
sections 2.6 and 3.2):

    scale^2 = c (v0 + sum z^2 / c) / (v0 + n) * t(v0 + n)^2 / q^2,    c = q^2 / t(v0)^2,

where q and t(.) are the upper ends of the interval at its level under the normal and Student's t
distribution, v0 is `PRIOR_RUNS`, and n is the number of outcomes. Without an outcome the scale is
1, since the back-test of the fit supports its intervals. With many outcomes the scale approaches
the root mean square of z. One error changes the scale little, unless the error is large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun._proxies.core.canon import Json
from forerun._proxies.core.checks import Checks
from forerun._proxies.core.notation import format_factor, format_loss, format_percent

if TYPE_CHECKING:
    from forerun._scaling_fits.forecast.backtest import Backtest
    from forerun._scaling_fits.forecast.uncertainty import FittedRuns

INCONCLUSIVE = "the forecast is inconclusive"
"""The start of the warning that is shown before a number."""

FARTHEST_REACH = 100.0
"""Largest extrapolation, in multiples of the largest rung's FLOPs. Published ladders were
back-tested to 30 and 100 times, with errors of 4 to 6 %."""

MAX_ERROR = 0.05
"""Largest relative error of a held-out rung's loss: twice the median that public ladders show at 10
times the compute."""

WIDEST_HALF = 0.1
"""Largest half-width of the predicted loss's interval relative to the loss. A wider interval
predicts nothing."""

MAX_LOSS_NATS = 12.0
"""Loss of a uniform guess among 163,000 tokens, the largest valid forecast."""

PRIOR_RUNS = 8
"""Number of concluded runs for which the back-test behind an interval counts. One error of z = 3
widens the next interval by half."""


def list_fit_doubts(fit: FittedRuns, backtest: Backtest | None = None) -> tuple[str, ...]:
    """Return the reasons why no forecast by this fit is conclusive; empty if its law converged and
    predicted the largest runs.

    Args:
        fit: The fit.
        backtest: The back-test at the requested distance; None for that of the largest rung.
    """
    if fit.status != "converged":
        return (f"{fit.status}: {'; '.join(fit.warnings)}",)
    backtest = backtest or fit.backtest
    if backtest is None:
        return ("too few rungs to hold out the largest one",)
    findings, is_wrong = judge_backtest(backtest, fit.level)
    return (", ".join(findings),) if is_wrong else ()


def judge_backtest(backtest: Backtest, level: float) -> tuple[list[str], bool]:
    """Return sentences on the held-out runs, and whether they contradict the fit: an error is too
    large, or too few runs are inside their intervals.
    """
    from scipy.special import bdtr

    num_runs, num_covered = len(backtest.runs), backtest.num_covered
    findings = [
        (
            f"{'largest run' if num_runs == 1 else 'largest runs'} held out ({num_runs}) predicted "
            f"with at most {format_percent(backtest.largest_error)} error from runs "
            f"{format_factor(backtest.extrapolation)} times smaller"
        )
    ]
    if num_covered is None:
        return findings, backtest.largest_error > MAX_ERROR
    findings.append(f"{num_covered} of {num_runs} inside the {format_percent(level)} interval")
    # The smallest count that has a probability of at least 0.05 if the intervals are right; for one
    # run, 0.
    min_covered = next(
        count for count in range(num_runs + 1) if bdtr(count, num_runs, level) >= 0.05
    )
    return findings, num_covered < min_covered or backtest.largest_error > MAX_ERROR


def list_reach_doubts(
    loss_nats: float, interval: tuple[float, float] | None, extrapolation: float
) -> tuple[str, ...]:
    """Return the reasons why a conclusive fit does not determine the loss of one run: the run is
    too far from the fitted ones, or the interval of its loss is too wide.
    """
    doubts = list(list_distance_doubts(extrapolation))
    if loss_nats > MAX_LOSS_NATS:
        doubts.append(
            f"the predicted loss of {format_loss(loss_nats)} nats is above {MAX_LOSS_NATS:g}, the "
            "loss of a uniform guess among 163,000 tokens: the run is too far from the fitted ones"
        )
    if interval is not None:
        half = (interval[1] - interval[0]) / 2 / loss_nats
        if half > WIDEST_HALF:
            precision = f"known to {format_percent(half)} only" if half < 1 else "not determined"
            doubts.append(f"the predicted loss is {precision}: add rungs")
    return tuple(doubts)


def list_distance_doubts(extrapolation: float) -> tuple[str, ...]:
    """Return a doubt if a run lies farther beyond the fitted ones than any back-test covers."""
    if extrapolation <= FARTHEST_REACH:
        return ()
    reach = f"target at {format_factor(extrapolation)} times the largest rung's FLOPs"
    return (f"{reach}: no back-test covers more than {FARTHEST_REACH:g} times, add larger rungs",)


def format_doubts(doubts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the warning that precedes a forecast with these doubts; empty without doubts."""
    return (f"{INCONCLUSIVE}: {'; '.join(doubts)}",) if doubts else ()


def split_warnings(warnings: Json) -> tuple[list[str], list[Json]]:
    """Split the warnings of a JSON output into those to show before its numbers and the others."""
    all_warnings = warnings if isinstance(warnings, list) else []
    first = [
        warning
        for warning in all_warnings
        if isinstance(warning, str) and warning.startswith(INCONCLUSIVE)
    ]
    return first, [warning for warning in all_warnings if warning not in first]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastOutcome:
    """A forecast of one run, and the run's actual loss. Losses in nats per token."""

    predicted_nats: float
    low_nats: float
    high_nats: float
    level: float
    actual_nats: float

    def __post_init__(self) -> None:
        checks = Checks(self)
        for name in ("predicted_nats", "low_nats", "high_nats", "actual_nats"):
            checks.require_number(name, above=0)
        checks.require_number("level", above=0, below=1)
        if checks.has_no_problem:
            ends = f"[{self.low_nats!r}, {self.high_nats!r}]"
            inside = self.low_nats < self.predicted_nats < self.high_nats
            checks.require(
                inside,
                f"predicted_nats = {self.predicted_nats!r}: must lie between its ends {ends}",
            )
        checks.raise_problems()

    @property
    def covered(self) -> bool:
        """Whether the actual loss is inside the interval."""
        return self.low_nats <= self.actual_nats <= self.high_nats

    @property
    def z(self) -> float:
        """The error in standard deviations of the forecast, in log loss; positive if the loss was
        higher.

        Each side of the interval has its own standard deviation: its width over the normal quantile
        at the level.
        """
        from scipy.special import ndtri

        end = self.high_nats if self.actual_nats > self.predicted_nats else self.low_nats
        miss = math.log(self.actual_nats / self.predicted_nats)
        return float(ndtri((1 + self.level) / 2)) * miss / abs(math.log(end / self.predicted_nats))


def compute_interval_scale(misses: Sequence[float], level: float) -> float:
    """Return the factor for both sides of the next interval, in log loss.

    Args:
        misses: z of every earlier forecast, computed with the interval that its fit gave before any
            such factor was applied.
        level: Level of the next interval.
    """
    from scipy.special import ndtri, stdtrit

    upper = (1 + level) / 2
    normal, prior = float(ndtri(upper)), float(stdtrit(PRIOR_RUNS, upper))
    freedom = PRIOR_RUNS + len(misses)
    about_one = (normal / prior) ** 2
    variance = (PRIOR_RUNS * about_one + math.fsum(z**2 for z in misses)) / freedom
    return math.sqrt(variance) * float(stdtrit(freedom, upper)) / normal
