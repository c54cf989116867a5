"""Whether a forecast is conclusive: the fit's status, its back-test, how far it reaches, how wide
its interval is.

The gate `fit` of a study and every verb that prints a forecast ask here, so all of them say the
same. And the track record: what became of earlier forecasts, how far each lay off, and how wide the
next interval should be.

A forecast whose interval is right misses by z, which is standard normal. How right the intervals of
a fit are is not known before a forecast of it was put to the test, so their scale has a prior, a
scaled inverse chi-square of `PRIOR_RUNS` degrees of freedom about 1; misses make it a posterior,
and the next miss is Student's (Gelman et al., Bayesian Data Analysis, third edition, sections 2.6
and 3.2):

    scale^2 = c (v0 + sum z^2 / c) / (v0 + n) * t(v0 + n)^2 / q^2,    c = q^2 / t(v0)^2,

q and t(.) the upper ends of the interval's level of the normal and of Student's law. Without a miss
it is 1: a fit's own back-test counts. With many it goes to the root mean square of z. One miss
moves it little, unless it is large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxies.core.canon import Json
from proxies.core.checks import Checks
from proxies.core.notation import format_factor, format_loss, format_percent

if TYPE_CHECKING:
    from scaling_fits.forecast.backtest import Backtest
    from scaling_fits.forecast.uncertainty import FittedRuns

INCONCLUSIVE = "the forecast is inconclusive"
"""The start of the warning that is shown before a number."""

FARTHEST_REACH = 100.0
"""Times the largest rung's FLOPs: published ladders were back-tested to 30 and 100 times, with
errors of 4 to 6 %."""

LARGEST_ERROR = 0.05
"""Of a held-out rung's loss: twice the median that public ladders show at 10 times the compute."""

WIDEST_HALF = 0.1
"""Half the predicted loss's interval over the loss: a wider one predicts nothing."""

MAX_LOSS_NATS = 12.0
"""Loss of a uniform guess among 163,000 tokens: no forecast above it is one."""

PRIOR_RUNS = 8
"""Concluded runs that the back-test behind an interval counts for: one miss of 3 widens the next by
half."""


def fit_doubts(fit: FittedRuns, backtest: Backtest | None = None) -> tuple[str, ...]:
    """Return why no forecast by this fit is conclusive; empty where its law converged and predicted
    the largest runs.

    Args:
        fit: The fit.
        backtest: The back-test at the distance that is asked; None: that of the largest rung.
    """
    if fit.status != "converged":
        return (f"{fit.status}: {'; '.join(fit.warnings)}",)
    backtest = backtest or fit.backtest
    if backtest is None:
        return ("too few rungs to hold out the largest one",)
    findings, is_wrong = judge_backtest(backtest, fit.level)
    return (", ".join(findings),) if is_wrong else ()


def judge_backtest(backtest: Backtest, level: float) -> tuple[list[str], bool]:
    """Return what the held-out runs show, and whether it speaks against the fit: too far off, or
    too few inside.
    """
    from scipy.special import bdtr

    num_runs, num_covered = len(backtest.runs), backtest.num_covered
    findings = [
        (
            f"{'largest run' if num_runs == 1 else 'largest runs'} held out ({num_runs}) predicted "
            "with at most "
            f"{format_percent(backtest.largest_error)} error from runs "
            f"{format_factor(backtest.extrapolation)} times "
            "smaller"
        )
    ]
    if num_covered is None:
        return findings, backtest.largest_error > LARGEST_ERROR
    findings.append(f"{num_covered} of {num_runs} inside the {format_percent(level)} interval")
    # The fewest that chance allows in one fit of twenty whose intervals are right; of one run, none
    # at all.
    fewest = next(count for count in range(num_runs + 1) if bdtr(count, num_runs, level) >= 0.05)
    return findings, num_covered < fewest or backtest.largest_error > LARGEST_ERROR


def reach_doubts(
    loss_nats: float, interval: tuple[float, float] | None, extrapolation: float
) -> tuple[str, ...]:
    """Why a conclusive fit may say little about a run so far out, or one whose loss has so wide an
    interval.
    """
    doubts = list(distance_doubts(extrapolation))
    if loss_nats > MAX_LOSS_NATS:
        doubts.append(
            f"the predicted loss of {format_loss(loss_nats)} nats is above {MAX_LOSS_NATS:g}, the "
            "loss of a uniform "
            "guess among 163,000 tokens: the run is too far from the fitted ones"
        )
    if interval is not None:
        half = (interval[1] - interval[0]) / 2 / loss_nats
        if half > WIDEST_HALF:
            known = f"known to {format_percent(half)} only" if half < 1 else "not determined"
            doubts.append(f"the predicted loss is {known}: add rungs")
    return tuple(doubts)


def distance_doubts(extrapolation: float) -> tuple[str, ...]:
    """Return the doubt about a run farther out than any back-test."""
    if extrapolation <= FARTHEST_REACH:
        return ()
    reach = f"target at {format_factor(extrapolation)} times the largest rung's FLOPs"
    return (f"{reach}: no back-test covers more than {FARTHEST_REACH:g} times, add larger rungs",)


def inconclusive(doubts: tuple[str, ...]) -> tuple[str, ...]:
    """The warning that comes before a forecast with such doubts; none without."""
    return (f"{INCONCLUSIVE}: {'; '.join(doubts)}",) if doubts else ()


def first_and_rest(warnings: Json) -> tuple[list[str], list[Json]]:
    """The warnings to show before a number, and those that may follow it; `warnings` as of the
    JSON.
    """
    every = warnings if isinstance(warnings, list) else []
    first = [
        warning
        for warning in every
        if isinstance(warning, str) and warning.startswith(INCONCLUSIVE)
    ]
    return first, [warning for warning in every if warning not in first]


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
            checks.number(name, above=0)
        checks.number("level", above=0, below=1)
        if checks.fine:
            ends = f"[{self.low_nats!r}, {self.high_nats!r}]"
            inside = self.low_nats < self.predicted_nats < self.high_nats
            checks.that(
                inside,
                f"predicted_nats = {self.predicted_nats!r}: must lie between its ends {ends}",
            )
        checks.done()

    @property
    def covered(self) -> bool:
        """Whether the actual loss is inside the interval."""
        return self.low_nats <= self.actual_nats <= self.high_nats

    @property
    def z(self) -> float:
        """The miss in standard deviations of the forecast, in log loss; above 0 where the loss came
        out higher.

        Each side of the interval is its own sd times the normal's quantile at the level.
        """
        from scipy.special import ndtri

        end = self.high_nats if self.actual_nats > self.predicted_nats else self.low_nats
        miss = math.log(self.actual_nats / self.predicted_nats)
        return float(ndtri((1 + self.level) / 2)) * miss / abs(math.log(end / self.predicted_nats))


def interval_scale(misses: Sequence[float], level: float) -> float:
    """The factor for both sides of the next interval, in log loss.

    Args:
        misses: z of every earlier forecast, by the interval that its own fit gave before any such
            scale.
        level: of the next interval.
    """
    from scipy.special import ndtri, stdtrit

    upper = (1 + level) / 2
    normal, prior = float(ndtri(upper)), float(stdtrit(PRIOR_RUNS, upper))
    freedom = PRIOR_RUNS + len(misses)
    about_one = (normal / prior) ** 2
    variance = (PRIOR_RUNS * about_one + math.fsum(z**2 for z in misses)) / freedom
    return math.sqrt(variance) * float(stdtrit(freedom, upper)) / normal
