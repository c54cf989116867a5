"""Tests of the coordinate check's verdict on a layer, given measurements of it at several widths.

The changes of a layer's output may shrink with width without a mistake: in small models, an update
acts on the output mostly by chance, and such noise averages out as the layer grows. The verdict
must tell this noise from a wrong learning rate. In names of arrays, P is the number of widths and K
the number of seeds.
"""

import numpy as np
import pytest

from forerun._proxies.coordinates.verdict import (
    CheckSettings,
    LayerMeasurements,
    fit_alignment_slope,
    fit_slope,
    judge_layer,
)
from forerun._proxies.core.rules import get_parametrization


def test_interval_is_a_t_interval_over_seeds():
    """Two seeds have slopes 1 and 2 per doubling.

    At a level of 90 % and one degree of freedom, the half-width is 6.314 standard errors.
    """
    slope = fit_slope(np.array([[1.0, 1.0], [2.0, 4.0], [4.0, 16.0]]), (16, 32, 64), 0.9)
    assert slope.slope == pytest.approx(1.5)
    assert slope.interval == pytest.approx((1.5 - 6.3138 * 0.5, 1.5 + 6.3138 * 0.5), rel=1e-4)
    assert fit_slope(np.zeros((3, 2)), (16, 32, 64), 0.9) is None


def make_measurements(*, rate=None, effect=(1.0, 1.0, 1.0), change=(1.0, 1.0, 1.0)):
    """Return measurements of a hidden matrix at three widths, equal for two seeds.

    Args:
        rate: Size of the layer's own first update at each width; unknown if None.
        effect: Change of the output due to this update, at each width.
        change: Total change of the output after the last step, at each width.
    """

    def add_steps_and_seeds(sizes):
        sizes_PK = np.array([sizes, sizes], dtype=float).T
        return np.stack([np.ones_like(sizes_PK), sizes_PK])

    return LayerMeasurements(
        layer="wq",
        role="hidden",
        size=add_steps_and_seeds((1, 1, 1)),
        change=add_steps_and_seeds(change),
        update=add_steps_and_seeds(effect),
        gain=add_steps_and_seeds((1, 1, 1)),
        rate=add_steps_and_seeds((np.nan,) * 3 if rate is None else rate),
    )


AS_NOISE = (1.0, 0.707, 0.5)
"""Sizes at three widths that fall with the square root of the width, as pure noise does."""
FASTER_THAN_NOISE = (1.0, 0.5, 0.25)
"""Sizes at three widths that fall with the width itself."""


@pytest.mark.parametrize(
    ("measurements", "outcome"),
    [
        # The update has the same size at every width, and noise explains the smaller changes.
        (make_measurements(rate=(1, 1, 1), effect=AS_NOISE, change=AS_NOISE), "passes"),
        # The update itself shrinks.
        (
            make_measurements(rate=AS_NOISE, effect=FASTER_THAN_NOISE, change=FASTER_THAN_NOISE),
            "vanishes",
        ),
        # The effect of the update does not shrink, so noise does not explain the smaller changes.
        (make_measurements(rate=(1, 1, 1), change=AS_NOISE), "vanishes"),
        # Noise explains only a part of the decrease.
        (
            make_measurements(rate=(1, 1, 1), effect=FASTER_THAN_NOISE, change=FASTER_THAN_NOISE),
            "vanishes",
        ),
        # The size of the update is unknown: noise may explain the whole decrease, but no increase
        # and no decrease that is faster than that of noise.
        (make_measurements(effect=AS_NOISE, change=AS_NOISE), "passes"),
        (make_measurements(effect=(1.0, 1.5, 2.25), change=(1, 1, 1)), "blows_up"),
        (make_measurements(effect=(1.0, 0.41, 0.17), change=AS_NOISE), "vanishes"),
    ],
)
def test_shrinking_changes_are_a_mistake_unless_noise_explains_them(measurements, outcome):
    settings = CheckSettings(
        axis="width",
        points=(32, 64, 128),
        level=0.9,
        parametrization=get_parametrization("mup"),
        head_dim_power=0.0,
    )
    verdict = judge_layer(measurements, settings, fit_alignment_slope(measurements, settings))
    assert verdict.outcome == outcome
