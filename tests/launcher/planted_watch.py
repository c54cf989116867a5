"""A decision with a planted band, and runs that keep to it, or do not."""

from __future__ import annotations

import dataclasses
import datetime
from types import SimpleNamespace

import numpy as np
import watched_case
from main_run import decision_of, spec_of

from launcher.frozen.frozen import CurvePoint, Decision, PredictedLoss
from launcher.watch.logs.columns import SCALARS, LogColumns
from proxies.core.schedule import Schedule
from scaling_fits.forecast.loss_curves import SHARES, WINDOW

NUM_STEPS, END_NATS = 800, 2.0
END_SHARE, CURVE_SHARE, LEVEL = 0.02, 0.015, 0.9
"""Arms of the band: of the end, and of the curve given the end."""
MANIFEST = SimpleNamespace(tokenizer="bytes", vocab_size=256, num_tokens=lambda split: 10_000_000)
BEGAN = datetime.datetime(2026, 11, 1, tzinfo=datetime.UTC)


def expected(steps, num_steps=NUM_STEPS):
    """The truth that the band is about."""
    return END_NATS * np.exp(0.12 * ((np.asarray(steps) / num_steps) ** -0.3 - 1))


def _mean_near(share, num_steps):
    steps = np.arange(1, num_steps + 1)
    near = np.abs(steps / num_steps - share) <= max(WINDOW * share, 0.5 / num_steps)
    return expected(steps, num_steps)[near].mean()


def predicted(
    num_steps=NUM_STEPS, memory_octaves=2.0, end_share=END_SHARE, curve_share=CURVE_SHARE
):
    arm = np.hypot(end_share, curve_share)
    points = tuple(
        CurvePoint(
            step=round(share * num_steps),
            loss_nats=float(middle),
            low_nats=float(middle * np.exp(-arm)),
            high_nats=float(middle * np.exp(arm)),
        )
        for share in SHARES
        for middle in [_mean_near(share, num_steps)]
    )
    return PredictedLoss(
        loss_nats=END_NATS,
        low_nats=END_NATS * np.exp(-end_share),
        high_nats=END_NATS * np.exp(end_share),
        level=LEVEL,
        extrapolation=10.0,
        curve=points,
        memory_octaves=memory_octaves,
    )


def decision(num_steps=NUM_STEPS, forecast=None, warmup_steps=20, **changes) -> Decision:
    spec = dataclasses.replace(
        spec_of("data"),
        schedule=Schedule(
            kind="cosine", num_steps=num_steps, warmup_steps=warmup_steps, final_fraction=0.1
        ),
    )
    made = decision_of(spec, MANIFEST)
    return dataclasses.replace(made, predicted=forecast or predicted(num_steps), **changes)


def losses_of(rng, num_steps=NUM_STEPS, noise=0.03, departure=0.0):
    """Noise of the batch, in nats, about the truth."""
    steps = np.arange(1, num_steps + 1)
    return expected(steps, num_steps) * np.exp(departure) + noise * rng.standard_normal(num_steps)


def columns_of(losses, **given) -> LogColumns:
    steps = given.pop("steps", np.arange(1, len(losses) + 1, dtype=np.float64))
    scalars = {name: given.pop(name, np.full(len(steps), np.nan)) for name in SCALARS}
    validation = {
        name: given.pop(name, np.empty(0)) for name in ("validation_steps", "validation_loss_nats")
    }
    ranks = {"rank_steps": steps, **given} if "rank_seconds" in given else given
    return LogColumns(
        steps=steps, train_loss_nats=np.asarray(losses), **scalars, **validation, **ranks
    )


def header(step=0, num_ranks=2, after_seconds=0.0):
    started_at = (BEGAN + datetime.timedelta(seconds=after_seconds)).isoformat()
    return dataclasses.replace(
        watched_case.header(step), num_ranks=num_ranks, started_at=started_at
    )


def started(**given):
    return dataclasses.asdict(header(**given))
