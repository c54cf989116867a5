"""Cases for tests of the watch: a decision with a planted forecast band, and losses that follow it
or depart from it.
"""

from __future__ import annotations

import dataclasses
import datetime
from types import SimpleNamespace

import numpy as np
import watched_case
from main_run import make_decision, make_spec

from forerun._launcher.main_run.frozen.frozen import CurvePoint, Decision, PredictedLoss
from forerun._launcher.main_run.watch.logs.columns import SCALARS, LogColumns
from forerun._proxies.core.schedule import Schedule
from forerun._scaling_fits.forecast.loss_curves import SHARES, WINDOW

NUM_STEPS, END_NATS = 800, 2.0
END_SHARE, CURVE_SHARE, LEVEL = 0.02, 0.015, 0.9
"""Half widths of the forecast band, relative to the loss: END_SHARE of the final loss, and
CURVE_SHARE of the earlier losses if the final loss is known. LEVEL is the band's probability."""
MANIFEST = SimpleNamespace(tokenizer="bytes", vocab_size=256, count_tokens=lambda split: 10_000_000)
"""Stands for the manifest of a corpus, of which a decision records only these."""
BEGAN = datetime.datetime(2026, 11, 1, tzinfo=datetime.UTC)
"""Time at which a planted run was started."""


def compute_expected_losses(steps, num_steps=NUM_STEPS):
    """Return the planted losses at `steps` in nats; the forecast band lies around them."""
    return END_NATS * np.exp(0.12 * ((np.asarray(steps) / num_steps) ** -0.3 - 1))


def _compute_window_mean(share, num_steps):
    """Return the mean planted loss of the steps near a share of the run."""
    steps = np.arange(1, num_steps + 1)
    is_near = np.abs(steps / num_steps - share) <= max(WINDOW * share, 0.5 / num_steps)
    return compute_expected_losses(steps, num_steps)[is_near].mean()


def make_forecast(num_steps=NUM_STEPS):
    """Return the forecast of the planted losses."""
    half_width = np.hypot(END_SHARE, CURVE_SHARE)
    points = []
    for share in SHARES:
        middle = _compute_window_mean(share, num_steps)
        point = CurvePoint(
            step=round(share * num_steps),
            loss_nats=float(middle),
            low_nats=float(middle * np.exp(-half_width)),
            high_nats=float(middle * np.exp(half_width)),
        )
        points.append(point)
    return PredictedLoss(
        loss_nats=END_NATS,
        low_nats=END_NATS * np.exp(-END_SHARE),
        high_nats=END_NATS * np.exp(END_SHARE),
        level=LEVEL,
        extrapolation=10.0,
        curve=tuple(points),
        memory_octaves=2.0,
    )


def make_watched_decision(
    num_steps=NUM_STEPS, forecast=None, warmup_steps=20, **changes
) -> Decision:
    """Return a decision whose forecast is that of the planted losses, or `forecast`."""
    spec = dataclasses.replace(
        make_spec("data"),
        schedule=Schedule(
            kind="cosine", num_steps=num_steps, warmup_steps=warmup_steps, final_fraction=0.1
        ),
    )
    decision = make_decision(spec, MANIFEST)
    return dataclasses.replace(decision, predicted=forecast or make_forecast(num_steps), **changes)


def draw_losses(rng, num_steps=NUM_STEPS, noise=0.03, departure=0.0):
    """Draw losses of a run that follows the planted ones.

    Args:
        rng: Generator of the noise.
        num_steps: Number of steps of the run.
        noise: Standard deviation of the batch noise in nats.
        departure: Difference of the log losses from the planted ones.
    """
    steps = np.arange(1, num_steps + 1)
    return compute_expected_losses(steps, num_steps) * np.exp(
        departure
    ) + noise * rng.standard_normal(num_steps)


def make_columns(losses, **columns) -> LogColumns:
    """Return the columns of a log that has these losses at steps 1, 2, ..., or at `steps`.

    A column with a number per step is NaN unless it is given; any other column is empty.
    """
    steps = columns.pop("steps", np.arange(1, len(losses) + 1, dtype=np.float64))
    scalars = {name: columns.pop(name, np.full(len(steps), np.nan)) for name in SCALARS}
    validation = {
        name: columns.pop(name, np.empty(0))
        for name in ("validation_steps", "validation_loss_nats")
    }
    if "rank_seconds" in columns:
        columns.setdefault("rank_steps", steps)
    return LogColumns(
        steps=steps, train_loss_nats=np.asarray(losses), **scalars, **validation, **columns
    )


def make_planted_header(step=0, num_ranks=2, after_seconds=0.0):
    """Return the header of an attempt that started `after_seconds` after `BEGAN`, at `step`."""
    started_at = (BEGAN + datetime.timedelta(seconds=after_seconds)).isoformat()
    return dataclasses.replace(
        watched_case.make_header(step), num_ranks=num_ranks, started_at=started_at
    )


def make_attempt_start(**options):
    """Return the event of a log for the start of an attempt; the options are those of
    `make_planted_header`.
    """
    return dataclasses.asdict(make_planted_header(**options))
