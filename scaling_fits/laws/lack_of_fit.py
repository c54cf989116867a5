"""Do the residuals of a law look like noise, or like the law being the wrong one?

Noise is rough; what a wrong law leaves behind is smooth over log N and log D. So residuals are laid on a few smooth
functions of both (polynomials, orthonormal under the runs' weights). What they hold beyond the noise is misfit.

What grows with compute is the worst of it, for a forecast goes there: a batch too small at the top, a rate mis-tuned
at large runs, a frontier that falls faster than the law. `trend` asks for it alone, among the largest runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import fdtrc

from scaling_fits.laws import law, solver
from scaling_fits.laws.forms import SHAPES
from scaling_fits.laws.law import LawFit
from scaling_fits.laws.solver import Floats
from scaling_fits.laws.table import RunTable

_CUBIC_FROM = 30  # runs from which third powers can be told from noise
_STEP = 1e-5  # of a coordinate, for the tangents of a law
_CLIP = 4.0  # robust sds: an outlier is no structure
_DEPENDENT = 1e-7  # singular values below this share of the largest are the same direction twice
_TOP_SHARE = 1 / 3  # of the logs of the FLOPs: what counts as the largest runs
_LEAST_TOP = 3  # runs there, below which a trend is a single run's noise
_USUAL_TREND = 0.004  # sd of trends, log loss a factor e: public families have up to 0.02, most none
_SURE = 2.0  # sds: one healthy ladder in twenty shows such a trend
_USUAL_PARAMETERS = 4  # directions of the smooth functions that a fitted law has emptied already


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Structure:
    """Smooth residuals of several laws on the same runs."""

    coefficients: Floats
    """Of log-loss residuals (measured less predicted) on K smooth functions, law by law."""
    noise_sd: float
    """Of one run, as the smoothest of the laws leaves it."""
    num_runs: int

    def misfit_variance(self, weights_GM: Floats) -> Floats:
        """Mean square of the smooth residual of each mixture of the laws (G,), less what noise puts there."""
        num_smooth = self.coefficients.shape[1]
        squares_G = ((weights_GM @ self.coefficients) ** 2).sum(axis=1)
        expected = max(num_smooth - _USUAL_PARAMETERS, 1) * self.noise_sd**2
        return np.asarray((np.maximum(squares_G - expected, 0.0) + 2 * self.noise_sd**2) / self.num_runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trend:
    """How the residuals of the largest runs go with compute, beside what the law could follow."""

    slope: float
    """Log loss, measured less the law's, per factor e of FLOPs beyond `from_flops`; above 0: larger runs do worse."""
    sd: float
    from_flops: float
    """6ND from which runs count as the largest."""

    @property
    def size(self) -> float:
        """What to believe of the slope, without its sign: 0 up to two sds, then shrunk by how uncertain it is."""
        beyond = max(self.slope**2 - (_SURE * self.sd) ** 2, 0.0)
        return math.sqrt(beyond) * _USUAL_TREND**2 / (_USUAL_TREND**2 + self.sd**2)


def trend(table: RunTable, fit: LawFit) -> Trend | None:
    """The trend among the largest runs, by regression on log FLOPs beyond a knee and on the law's tangents.

    None where the runs are too few to tell.
    """
    shares = np.sqrt(law.shares_of(table.weight))
    log_nd = np.log(table.params) + np.log(table.tokens)
    knee = float(log_nd.max() - _TOP_SHARE * np.ptp(log_nd))
    tangents = _orthonormal(_tangents(table, fit) * shares[:, None])
    freedom = fit.num_effective_runs - tangents.shape[1] - 1
    if freedom < 1 or (log_nd > knee).sum() < _LEAST_TOP:
        return None
    ramp = np.maximum(log_nd - knee, 0.0) * shares
    ramp = ramp - tangents @ (tangents.T @ ramp)
    squares = float(ramp @ ramp)
    if squares < _DEPENDENT:
        return None
    rough = _clipped(table, fit)
    slope = float(ramp @ rough) / squares
    rest = rough - tangents @ (tangents.T @ rough) - slope * ramp
    noise = float((rest**2).mean()) * fit.num_effective_runs / freedom
    return Trend(slope=slope, sd=math.sqrt(noise / squares), from_flops=6.0 * math.exp(knee))


def structure_of(table: RunTable, fits: Sequence[LawFit]) -> Structure:
    """Smooth residuals of identified fits of one table."""
    shares = np.sqrt(law.shares_of(table.weight))
    smooth_RK, _ = np.linalg.qr(_smooth(table) * shares[:, None])
    left = [_clipped(table, fit) for fit in fits]
    return Structure(
        coefficients=np.stack([smooth_RK.T @ rough for rough in left]),
        noise_sd=min(_rest(table, fit)[1] for fit in fits),
        num_runs=table.num_runs,
    )


def p_value(table: RunTable, fit: LawFit) -> float:
    """Chance of residuals this smooth if the law were true (an F test); 1 where the runs are too few to tell."""
    smooth, noise_sd, num_smooth, freedom = _rest(table, fit)
    if num_smooth < 1 or freedom < 1 or noise_sd == 0:
        return 1.0
    return float(fdtrc(num_smooth, freedom, smooth / num_smooth / noise_sd**2))


def _rest(table: RunTable, fit: LawFit) -> tuple[float, float, int, int]:
    """Sum of squares on smooth functions that the law cannot follow, the noise beyond, and the freedoms of both."""
    shares = np.sqrt(law.shares_of(table.weight))
    rough = _clipped(table, fit)
    tangents = _orthonormal(_tangents(table, fit) * shares[:, None])
    smooth = _smooth(table) * shares[:, None]
    smooth = _orthonormal(smooth - tangents @ (tangents.T @ smooth), at_least=1e-3 * np.sqrt(table.num_runs))
    on_smooth = smooth.T @ rough
    rest = rough - smooth @ on_smooth - tangents @ (tangents.T @ rough)
    freedom = table.num_runs - smooth.shape[1] - tangents.shape[1]
    noise_sd = float(np.sqrt((rest**2).sum() / max(freedom, 1)))
    return float((on_smooth**2).sum()), noise_sd, smooth.shape[1], freedom


def _clipped(table: RunTable, fit: LawFit) -> Floats:
    """Weighted residuals of log loss, outliers drawn in."""
    missed = np.log(table.loss) - law.log_loss(fit.theta[None, :], table.params, table.tokens)[0]
    missed = missed * np.sqrt(law.shares_of(table.weight))
    free = np.sort(np.abs(missed))[SHAPES[fit.form].dim :]  # the law runs through about as many as it has
    limit = _CLIP * 1.4826 * np.median(free)
    return np.asarray(np.clip(missed, -limit, limit))


def _smooth(table: RunTable) -> Floats:
    """Powers of standardised log N and log D up to the second, or the third with many runs (R, K)."""
    n, d = (
        (column - column.mean()) / max(float(column.std()), 1e-9)
        for column in (np.log(table.params), np.log(table.tokens))
    )
    degree = 3 if table.num_runs >= _CUBIC_FROM else 2
    return np.stack([n**i * d**j for i in range(degree + 1) for j in range(degree + 1 - i)], axis=1)


def _tangents(table: RunTable, fit: LawFit) -> Floats:
    """Change of log loss with each free coordinate of the law (R, Q)."""
    points, centre = law.centred_points(table)
    space = SHAPES[fit.form]
    free = law.centred(fit.theta[None, :], centre)[:, space.first]
    steps = _STEP * np.eye(space.dim)
    up, down = (solver.log_loss(space.theta(free + sign * steps), points.n, points.d) for sign in (1, -1))
    return ((up - down) / (2 * _STEP)).T


def _orthonormal(columns: Floats, at_least: float = 0.0) -> Floats:
    """An orthonormal basis of the columns, without directions that are rounding or below `at_least`."""
    left, size, _ = np.linalg.svd(columns, full_matrices=False)
    return left[:, size > max(at_least, _DEPENDENT * float(size.max(initial=0.0)))]
