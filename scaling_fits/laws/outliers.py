"""Runs too far off a law to be noise, and the noise of the others.

One run that diverged and came back, or was read off the wrong file, makes an ordinary standard deviation as large as
itself, and every interval with it. So the noise is that of the runs that are not such, and such runs are named.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scaling_fits.laws.solver import HUBER_DELTA, Floats

OUTLIER_SDS = 5.0
"""Robust sds, at least; few runs need more (`outlier_limit`). Of 100 clean tables 1 to 3 show an outlier."""
_NORMAL_MAD = 1.4826  # sd of a normal over its median absolute deviation
_MOST = 0.2  # of the runs; more are no outliers but the way these runs scatter


def outlier_limit(num_runs: int, freedom: float) -> float:
    """Robust sds beyond which a run is no noise: what 1 clean table in 100 reaches by Student's tails, at least 5.

    Of 12 runs with 1 % noise, one that is 4 % off is caught every other time; of 30, always.
    """
    from scipy.special import stdtrit  # here: the forms' names are read by verbs that load nothing heavy

    return max(OUTLIER_SDS, float(stdtrit(max(freedom, 1.0), 1 - 0.005 / num_runs)))


def robust_sds(residuals: Floats, num_parameters: int) -> Floats:
    """Residuals over their robust sd.

    A fit that forgives large residuals runs through about as many runs as it has parameters, so that many of the
    smallest residuals say nothing of noise and are left out of the median. The sd is no smaller than what the
    objective takes for noise: runs that fit a law exactly have no outliers.
    """
    telling = np.sort(np.abs(residuals))[num_parameters:]
    scores: Floats = residuals / max(_NORMAL_MAD * float(np.median(telling)), HUBER_DELTA)
    return scores


def outliers(residuals: Floats, num_parameters: int, freedom: float) -> NDArray[np.bool_]:
    """Which runs are too far off to be noise; none where they would be more than a fifth of all."""
    found = np.abs(robust_sds(residuals, num_parameters)) > outlier_limit(len(residuals), freedom)
    return found if found.mean() <= _MOST else np.zeros_like(found)
