"""The spending of a budget's FLOPs on training and serving, and the best size along it.

Training N parameters on D tokens costs 6 N D FLOPs, and serving costs 2 N per token (arXiv
2401.00448, section 2). For each size N a budget therefore leaves a number D of training tokens.
Repeated tokens count for less than unique ones, and so do parameters beyond those that the unique
tokens can train: N and D count as N' and D' (`repeats`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from forerun._proxies.core.checks import Checks
from forerun._scaling_fits.allocation import repeats
from forerun._scaling_fits.forecast.uncertainty import FittedRuns, compute_expected_log_loss
from forerun._scaling_fits.laws import law
from forerun._scaling_fits.laws.law import compute_finite_exp
from forerun._scaling_fits.laws.solver import Floats, bisect
from forerun._scaling_fits.optima.optima_fit import predict_at

# The limits reach from a run of one parameter to far more than can be built; a value beyond them is
# a typing error
MIN_FLOPS, MAX_FLOPS = 1e6, 1e40
MAX_TOKENS = 1e30
_REACH = 100.0  # Log N searched on each side of the optimum of 6 N D alone
_HALVINGS = 64  # Bisection of a range of 2 * _REACH to the precision of a float
_FAR = 20.0  # Log N searched for the flat range on each side of the best size


@dataclass(frozen=True, kw_only=True, slots=True)
class Spending:
    """A budget and what it has to pay for. Raises `SpecError` with all problems at once."""

    flops: float
    """Total FLOPs: 6 N D, and 2 N per served token."""
    inference_tokens: float = 0.0
    """Tokens served over the model's life."""
    unique_tokens: float | None = None
    """Unique tokens available for training; None if there are more than the run needs."""
    unique_params: float | None = None
    """Size that `unique_tokens` can train. Parameters beyond this size count for less."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_number("flops", least=MIN_FLOPS, most=MAX_FLOPS)
        checks.require_number("inference_tokens", least=0.0, most=MAX_TOKENS)
        for name, low, high in (
            ("unique_tokens", 1.0, MAX_TOKENS),
            ("unique_params", 1e-300, 1e300),
        ):
            if getattr(self, name) is not None:
                checks.require_number(name, least=low, most=high)
        checks.raise_problems()

    @property
    def plain(self) -> bool:
        """Whether the whole budget goes into 6 N D with unlimited data. The optimum then has a
        closed form.
        """
        return self.inference_tokens == 0 and self.unique_tokens is None

    @property
    def ceiling(self) -> float:
        """Log of the size whose serving alone uses up the budget; infinite without serving."""
        if self.inference_tokens == 0:
            return math.inf
        return math.log(self.flops) - math.log(2 * self.inference_tokens)

    def compute_log_tokens(self, log_params: Floats) -> Floats:
        """Compute the log D that the budget leaves at each log N below `ceiling`."""
        return math.log(self.flops / 6) - log_params + self._compute_log_share(log_params)

    def _compute_log_share(self, log_params: Floats) -> Floats:
        """Compute the log of the share of the budget that training gets."""
        return np.log1p(-np.exp(np.minimum(log_params - self.ceiling, -1e-12)))

    def discount_sizes(self, log_params: Floats) -> tuple[Floats, Floats]:
        """Compute (log N', log D'), the effective parameters and tokens at each size."""
        return self.discount_run(log_params, self.compute_log_tokens(log_params))

    def discount_run(self, log_params: Floats, log_tokens: Floats) -> tuple[Floats, Floats]:
        """Compute (log N', log D') of any size and tokens."""
        n, _ = repeats.discount_repeats(log_params, self.unique_params, repeats.PARAMS_DECAY)
        d, _ = repeats.discount_repeats(log_tokens, self.unique_tokens, repeats.TOKENS_DECAY)
        return n, d

    def compute_log_gain(self, theta_MP: Floats, log_params_M: Floats) -> Floats:
        """Compute the log (M,) of the ratio of the gain from a larger N to the loss from fewer
        tokens. This log falls in N and is 0 at each law's optimum.

        The asymptote E and an outer exponent do not affect this ratio, as they depend only on the
        sum of both terms.
        """
        a, b, alpha, beta = theta_MP.T[1:5]
        n, log_n_slope = repeats.discount_repeats(
            log_params_M, self.unique_params, repeats.PARAMS_DECAY
        )
        d, log_d_slope = repeats.discount_repeats(
            self.compute_log_tokens(log_params_M), self.unique_tokens, repeats.TOKENS_DECAY
        )
        gained = np.log(alpha) + a - alpha * n + log_n_slope
        lost: Floats = (
            np.log(beta) + b - beta * d + log_d_slope - self._compute_log_share(log_params_M)
        )
        return gained - lost


def find_log_best_params(theta_MP: Floats, spending: Spending) -> Floats:
    """Find log N* of each law (M,) under any spending: the closed form, or by bisection the root of
    `compute_log_gain`.

    The log loss is convex in log N along the budget: D' is concave in log D, and log D in log N.
    """
    start = law.find_log_best_params(theta_MP, math.log(spending.flops / 6))
    if spending.plain:
        return start
    high = np.minimum(start + _REACH, spending.ceiling)
    low = np.minimum(start - _REACH, high - _REACH)
    low, high = bisect(
        lambda middle: spending.compute_log_gain(theta_MP, middle) > 0, low, high, _HALVINGS
    )
    return (low + high) / 2


def compute_tokens(spending: Spending, log_params: float) -> float:
    """Compute the D that the budget leaves at this size."""
    return compute_finite_exp(float(spending.compute_log_tokens(np.array([log_params]))[0]))


def compute_expected_loss(fitted: FittedRuns, spending: Spending, log_params: float) -> float:
    """Return the expected log loss of the run of this size that the budget pays for."""
    n, d = spending.discount_sizes(np.array([log_params]))
    return float(compute_expected_log_loss(fitted, np.exp(n), np.exp(d))[0])


def find_best_log_params(fitted: FittedRuns, spending: Spending) -> float:
    """Return log N* at a budget.

    N* comes from the runs' own isoFLOP minima if there are enough, or else from the median over the
    draws of the law. If a budget pays for serving or repeats data, the law determines how far that
    moves the optimum.
    """
    best = float(np.median(find_log_best_params(fitted.require_area().theta, spending)))
    if fitted.optima is None:
        return best
    training = Spending(flops=spending.flops)
    moved = best - float(np.median(find_log_best_params(fitted.require_area().theta, training)))
    return math.log(predict_at(fitted.optima, spending.flops).params) + moved


def find_range(
    fitted: FittedRuns, spending: Spending, best: float, excess: float
) -> tuple[float, float]:
    """Find the range of log N in which log loss is within `excess` of that at `best`, as far as
    the budget allows. The range reaches at most `_FAR` to each side.
    """
    from scipy.optimize import brentq

    limit = compute_expected_loss(fitted, spending, best) + excess

    def above(log_params: float) -> float:
        return compute_expected_loss(fitted, spending, log_params) - limit

    reach = (best - _FAR, min(best + _FAR, spending.ceiling - 1e-9))
    ends = [float(brentq(above, best, far)) if above(far) > 0 else far for far in reach]
    return min(ends), max(ends)
