"""Where the FLOPs of a budget go; along it the best size for one law, and the least of the pooled
log loss.

Training costs 6 N D, serving 2 N a token (arXiv 2401.00448, section 2). Fewer unique tokens than
are trained on count for less (`repeats`). So for a size N the budget leaves D tokens, and N and D
count as N' and D'.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from proxies.core.checks import Checks
from scaling_fits.allocation import repeats
from scaling_fits.compute.optima import predict_at
from scaling_fits.forecast.uncertainty import FittedRuns, expected_log_loss
from scaling_fits.laws import law
from scaling_fits.laws.law import exp_finite
from scaling_fits.laws.solver import Floats, bisected

# a run of one parameter and of a galaxy: beyond, a typing error
LEAST_FLOPS, MOST_FLOPS = 1e6, 1e40
MOST_TOKENS = 1e30
_REACH = 100.0  # log N searched on each side of 6 N D's own optimum
_HALVINGS = 64
_FAR = 20.0  # log N searched on each side of the best


@dataclass(frozen=True, kw_only=True, slots=True)
class Spending:
    """A budget and what it has to pay for. All-at-once `SpecError` for values out of range."""

    flops: float
    """In all: 6 N D, and 2 N a served token."""
    inference_tokens: float = 0.0
    """To be served over the model's life."""
    unique_tokens: float | None = None
    """That exist to train on; None: enough."""
    unique_params: float | None = None
    """The size that fits `unique_tokens` best; what it is made larger by counts for less."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.number("flops", least=LEAST_FLOPS, most=MOST_FLOPS)
        checks.number("inference_tokens", least=0.0, most=MOST_TOKENS)
        for name, least, most in (
            ("unique_tokens", 1.0, MOST_TOKENS),
            ("unique_params", 1e-300, 1e300),
        ):
            if getattr(self, name) is not None:
                checks.number(name, least=least, most=most)
        checks.done()

    @property
    def plain(self) -> bool:
        """Whether all goes into 6 N D, of data without end: then the optimum has a closed form."""
        return self.inference_tokens == 0 and self.unique_tokens is None

    @property
    def ceiling(self) -> float:
        """Log of the size whose serving alone eats the budget; infinite without serving."""
        if self.inference_tokens == 0:
            return math.inf
        return math.log(self.flops) - math.log(2 * self.inference_tokens)

    def log_tokens(self, log_params: Floats) -> Floats:
        """Log D that the budget leaves at each log N below `ceiling`."""
        return math.log(self.flops / 6) - log_params + self._log_share(log_params)

    def _log_share(self, log_params: Floats) -> Floats:
        """Log of the share of the budget that training gets."""
        return np.log1p(-np.exp(np.minimum(log_params - self.ceiling, -1e-12)))

    def counted(self, log_params: Floats) -> tuple[Floats, Floats]:
        """(log N', log D'): what the size and the tokens it leaves count for in a law of fresh
        data.
        """
        return self.worth(log_params, self.log_tokens(log_params))

    def worth(self, log_params: Floats, log_tokens: Floats) -> tuple[Floats, Floats]:
        """(log N', log D') of any size and tokens."""
        n, _ = repeats.counted(log_params, self.unique_params, repeats.PARAMS_HALF)
        d, _ = repeats.counted(log_tokens, self.unique_tokens, repeats.TOKENS_HALF)
        return n, d

    def log_gain(self, theta_MP: Floats, log_params_M: Floats) -> Floats:
        """Log of what a larger N gains over what the fewer tokens lose (M,): falls in N, 0 at each
        law's optimum.

        The asymptote E and an outer exponent move neither, as they see only the sum of both terms.
        """
        a, b, alpha, beta = (theta_MP[:, i] for i in (1, 2, 3, 4))
        n, log_n_slope = repeats.counted(log_params_M, self.unique_params, repeats.PARAMS_HALF)
        d, log_d_slope = repeats.counted(
            self.log_tokens(log_params_M), self.unique_tokens, repeats.TOKENS_HALF
        )
        gained = np.log(alpha) + a - alpha * n + log_n_slope
        lost: Floats = np.log(beta) + b - beta * d + log_d_slope - self._log_share(log_params_M)
        return gained - lost


def log_best_params(theta_MP: Floats, spending: Spending) -> Floats:
    """Log N* of each law (M,) under any spending: the closed form, or the one root of `log_gain` by
    halving.

    The log loss is convex in log N along the budget: D' is concave in log D, and log D in log N.
    """
    start = law.log_best_params(theta_MP, math.log(spending.flops / 6))
    if spending.plain:
        return start
    high = np.minimum(start + _REACH, spending.ceiling)
    low = np.minimum(start - _REACH, high - _REACH)
    low, high = bisected(
        lambda middle: spending.log_gain(theta_MP, middle) > 0, low, high, _HALVINGS
    )
    return (low + high) / 2


def tokens_at(spending: Spending, log_params: float) -> float:
    """D that the budget leaves at this size."""
    return exp_finite(float(spending.log_tokens(np.array([log_params]))[0]))


def expected_along(fitted: FittedRuns, spending: Spending, log_params: float) -> float:
    """Return the expected log loss of the run of this size that the budget pays for."""
    n, d = spending.counted(np.array([log_params]))
    return float(expected_log_loss(fitted, np.exp(n), np.exp(d))[0])


def best_log_params(fitted: FittedRuns, spending: Spending) -> float:
    """Return log N*: that of the runs' own isoFLOP minima, or else the median over the draws of the
    law.

    Where a budget pays for serving, or repeats data, the law says how far that moves the optimum.
    """
    best = float(np.median(log_best_params(fitted.require_area().theta, spending)))
    if fitted.optima is None:
        return best
    training = Spending(flops=spending.flops)
    moved = best - float(np.median(log_best_params(fitted.require_area().theta, training)))
    return math.log(predict_at(fitted.optima, spending.flops).params) + moved


def range_within(
    fitted: FittedRuns, spending: Spending, best: float, excess: float
) -> tuple[float, float]:
    """Log N between which log loss is within `excess` of the best, no further than the budget
    allows.
    """
    from scipy.optimize import brentq

    limit = expected_along(fitted, spending, best) + excess

    def above(log_params: float) -> float:
        return expected_along(fitted, spending, log_params) - limit

    reach = (best - _FAR, min(best + _FAR, spending.ceiling - 1e-9))
    ends = [float(brentq(above, best, far)) if above(far) > 0 else far for far in reach]
    return min(ends), max(ends)
