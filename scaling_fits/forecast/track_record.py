"""What became of earlier forecasts: how far each lay off in its own units, and how wide the next interval should be.

A forecast whose interval is right misses by z, which is standard normal. How right the intervals of a fit are is not
known before a forecast of it was put to the test, so their scale has a prior, a scaled inverse chi-square of
`PRIOR_RUNS` degrees of freedom about 1; misses make it a posterior, and the next miss is Student's (Gelman et al.,
Bayesian Data Analysis, third edition, sections 2.6 and 3.2):

    scale^2 = c (v0 + sum z^2 / c) / (v0 + n) * t(v0 + n)^2 / q^2,    c = q^2 / t(v0)^2,

q and t(.) the upper ends of the interval's level of the normal and of Student's law. Without a miss it is 1: a fit's
own back-test stands. With many it goes to the root mean square of z. One miss moves it little, unless it is large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import ndtri, stdtrit

from proxies.core.checks import Checks

PRIOR_RUNS = 8
"""Concluded runs that the back-test behind an interval counts for: one miss of 3 widens the next by half."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Foretold:
    """A forecast of one run, and what the run came to. Losses in nats per token."""

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
            checks.that(inside, f"predicted_nats = {self.predicted_nats!r}: not between its ends {ends}")
        checks.done()

    @property
    def covered(self) -> bool:
        """Whether the interval held what came."""
        return self.low_nats <= self.actual_nats <= self.high_nats

    @property
    def z(self) -> float:
        """The miss in standard deviations of the forecast, in log loss; above 0 where the loss came out higher.

        Each arm of the interval is its own sd times the normal's quantile at the level.
        """
        end = self.high_nats if self.actual_nats > self.predicted_nats else self.low_nats
        miss = math.log(self.actual_nats / self.predicted_nats)
        return float(ndtri((1 + self.level) / 2)) * miss / abs(math.log(end / self.predicted_nats))


def interval_scale(misses: Sequence[float], level: float) -> float:
    """What to multiply both arms of the next interval by, in log loss.

    Args:
        misses: z of every earlier forecast, by the interval that its own fit gave before any such scale.
        level: of the next interval.
    """
    upper = (1 + level) / 2
    normal, prior = float(ndtri(upper)), float(stdtrit(PRIOR_RUNS, upper))
    freedom = PRIOR_RUNS + len(misses)
    about_one = (normal / prior) ** 2
    variance = (PRIOR_RUNS * about_one + math.fsum(z**2 for z in misses)) / freedom
    return math.sqrt(variance) * float(stdtrit(freedom, upper)) / normal
