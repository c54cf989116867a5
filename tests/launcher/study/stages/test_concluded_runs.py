"""Test of concluded main runs: their errors scale the intervals of the next forecast."""

import numpy as np
import pytest

from forerun._launcher.main_run.frozen.concluded_run import ConcludedRun
from forerun._launcher.study.stages import concluded_runs
from forerun._scaling_fits.forecast.conclusive import compute_interval_scale
from forerun._scaling_fits.forecast.uncertainty import fit_runs, predict
from forerun._scaling_fits.laws.table import from_columns


def make_concluded_run(actual):
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


def test_errors_of_concluded_runs_scale_the_next_interval():
    rng = np.random.default_rng(0)
    params, tokens = (column.ravel() for column in np.meshgrid([1e6, 3e6, 1e7], [1e8, 3e8, 1e9]))
    losses = (1.7 + 400 / params**0.34 + 400 / tokens**0.28) * np.exp(rng.normal(0, 0.003, 9))
    fit = fit_runs(from_columns(params, tokens, losses), form="chinchilla", bootstrap=50)
    runs = [make_concluded_run(4.5), make_concluded_run(2.4)]
    scaled = concluded_runs.scale_intervals(fit, runs)
    assert scaled.record_scale == pytest.approx(
        compute_interval_scale([run.forecast_outcome.z for run in runs], 0.9)
    )
    assert scaled.record_scale > 1.2
    assert "2 concluded main runs" in scaled.warnings[-1]
    plain, wide = predict(fit, 3e7, 3e9), predict(scaled, 3e7, 3e9)
    assert wide.loss_nats == plain.loss_nats
    for end in ("low", "high"):
        scaled_width, plain_width = (
            np.log(getattr(prediction, end) / prediction.loss_nats) for prediction in (wide, plain)
        )
        assert scaled_width == pytest.approx(scaled.record_scale * plain_width, rel=1e-9)
    assert concluded_runs.scale_intervals(fit, []).record_scale == 1.0
