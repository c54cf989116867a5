"""Concluded main runs, and their misses in the fit."""

import numpy as np
import pytest

from launcher.study import history
from launcher.study.history import ConcludedRun
from scaling_fits.forecast.conclusive import interval_scale
from scaling_fits.forecast.uncertainty import fit_runs, predict
from scaling_fits.laws.table import from_columns


def concluded(actual):
    return ConcludedRun(
        digest="a" * 64,
        params=10**6,
        tokens=10**6,
        predicted_nats=2.5,
        low_nats=2.0,
        high_nats=3.0,
        level=0.9,
        extrapolation=10.0,
        actual_nats=actual,
    )


def test_misses_are_counted_by_the_fits_own_interval_and_scale_the_next():
    rng = np.random.default_rng(0)
    params, tokens = (column.ravel() for column in np.meshgrid([1e6, 3e6, 1e7], [1e8, 3e8, 1e9]))
    losses = (1.7 + 400 / params**0.34 + 400 / tokens**0.28) * np.exp(rng.normal(0, 0.003, 9))
    fit = fit_runs(from_columns(params, tokens, losses), form="chinchilla", bootstrap=50)
    runs = [concluded(4.5), concluded(2.4)]
    scaled = history.scaled(fit, runs)
    assert scaled.record_scale == pytest.approx(
        interval_scale([run.foretold.z for run in runs], 0.9)
    )
    assert scaled.record_scale > 1.2
    assert "2 concluded main runs" in scaled.warnings[-1]
    plain, wide = predict(fit, 3e7, 3e9), predict(scaled, 3e7, 3e9)
    assert wide.loss_nats == plain.loss_nats
    for end in ("low", "high"):
        arm, own = (np.log(getattr(at, end) / at.loss_nats) for at in (wide, plain))
        assert arm == pytest.approx(scaled.record_scale * own, rel=1e-9)
    assert history.scaled(fit, []).record_scale == 1.0
