"""The figures of a watched run: numbers about its loss, noise, end, and pace, for JSON and text."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import numpy as np

from forerun._launcher.main_run.watch.alerts import WatchedRun
from forerun._launcher.main_run.watch.logs.columns import Floats, LogColumns
from forerun._launcher.main_run.watch.logs.keys import NOISE_SCALE
from forerun._launcher.main_run.watch.loss_rises import compute_sensitivity
from forerun._launcher.main_run.watch.pace import BLOCK_LINES, Pace, Projection

IN_TIME_SHARE = 0.05
"""Share of the run's steps within which a rise must be found to count as found in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFigures:
    """Numbers about a run so far; None where unknown. They are `figures` of `watch --json`."""

    step: int
    """The newest logged step; 0 before the first."""
    num_steps: int
    """Steps of the whole run."""
    train_loss_nats: float | None
    """Newest training loss; None also if it is not finite."""
    num_spikes: int
    """Spikes that the noise does not explain."""
    noise_nats: float | None
    """Standard deviation of what a line adds to the noise of the loss."""
    noise_autocorrelation: float | None
    """Upper bound of the noise's autocorrelation from line to line."""
    smallest_jump_nats: float | None
    """Smallest jump of the loss that is found in time nine times of ten."""
    smallest_climb_nats: float | None
    """The same for a slow climb."""
    in_time_lines: int | None
    """Lines within which a rise is found in time."""
    foretold_nats: float
    """Final validation loss that was predicted when the config was frozen."""
    foretold_interval_nats: tuple[float, float]
    final_nats: float
    """Final validation loss that is predicted from the newest look at the run."""
    final_interval_nats: tuple[float, float]
    level: float
    """Level of both intervals."""
    departure_sds: float | None
    """Departure of the newest look from the band, in standard deviations of the band."""
    bound_sds: float | None
    """Limit of the absolute departure over the whole run."""
    num_attempts: int | None
    step_seconds: float | None
    """Median seconds of a step."""
    tokens_per_second: float | None
    mfu: float | None
    """Share of the devices' peak (model FLOPs utilization)."""
    goodput: float | None
    """Share of the run's time that was spent on steps which still count."""
    projection: Projection | None
    projection_reason: str | None
    """Reason why the end cannot be projected; None if it can."""
    still_since: str | None
    """Time since which the run makes no step: UTC, ISO 8601; None if it advances or is done."""
    noise_scale_tokens: float | None
    """Newest gradient noise scale."""
    noise_scale_interval_tokens: tuple[float, float | None] | None
    """Interval of the noise scale; the upper end is None if it is not known."""
    batch_tokens: int
    """Tokens of a batch, to compare with the noise scale."""


def compute_figures(run: WatchedRun) -> RunFigures:
    """Return the figures of a run."""
    decision, columns, course, pace = run.decision, run.columns, run.course, run.pace
    predicted, schedule = decision.predicted, run.schedule
    sensitivity = compute_sensitivity(
        columns.steps,
        columns.train_loss_nats,
        schedule.warmup_steps,
        schedule.num_steps,
        IN_TIME_SHARE * schedule.num_steps,
    )
    foretold = (predicted.loss_nats, predicted.low_nats, predicted.high_nats)
    final = course.final if course else foretold
    num_ranks = pace.attempts[-1].num_ranks if pace.attempts else decision.parallelism.num_ranks
    reason, since = pace.explain_no_projection(), pace.still_since
    noise_scale, noise_scale_interval = _find_noise_scale(columns)
    # Launching a finished run again trains nothing, so it does not count as an attempt.
    num_attempts = sum(
        event.get("event") == "started" and event.get("step") != schedule.num_steps
        for event in columns.events
    )
    return RunFigures(
        step=columns.step,
        num_steps=schedule.num_steps,
        train_loss_nats=_to_finite(columns.train_loss_nats[-1]) if len(columns) else None,
        num_spikes=len(run.spikes),
        noise_nats=_to_finite(sensitivity.innovation_nats) if sensitivity else None,
        noise_autocorrelation=_to_finite(sensitivity.phi) if sensitivity else None,
        smallest_jump_nats=_to_finite(sensitivity.jump_nats) if sensitivity else None,
        smallest_climb_nats=_to_finite(sensitivity.climb_nats) if sensitivity else None,
        in_time_lines=sensitivity.num_lines if sensitivity else None,
        foretold_nats=predicted.loss_nats,
        foretold_interval_nats=foretold[1:],
        final_nats=final[0],
        final_interval_nats=final[1:],
        level=predicted.level,
        departure_sds=float(course.departure[-1]) if course else None,
        bound_sds=course.bound if course else None,
        num_attempts=num_attempts or None,
        step_seconds=pace.median_step_seconds,
        tokens_per_second=_estimate_rate(pace, columns.tokens_per_second),
        mfu=_estimate_rate(pace, columns.mfu),
        goodput=pace.goodput if pace.has_enough_timed_steps else None,
        projection=pace.project_end(num_ranks) if reason is None else None,
        projection_reason=reason,
        still_since=None
        if since is None
        else datetime.datetime.fromtimestamp(since, datetime.UTC).isoformat(),
        noise_scale_tokens=noise_scale,
        noise_scale_interval_tokens=noise_scale_interval,
        batch_tokens=decision.batch_tokens,
    )


def _find_noise_scale(
    columns: LogColumns,
) -> tuple[float | None, tuple[float, float | None] | None]:
    """Return the newest gradient noise scale and its interval."""
    lines = np.flatnonzero(np.isfinite(columns.noise_scale_low_tokens))
    if not len(lines):
        return None, None
    scale, low, high = (float(getattr(columns, name)[lines[-1]]) for name in NOISE_SCALE)
    return _to_finite(scale), (low, _to_finite(high))


def _to_finite(value: float) -> float | None:
    """Convert a number for JSON, which has no NaN: None if it is not finite."""
    return float(value) if np.isfinite(value) else None


def _estimate_rate(pace: Pace, rates: Floats) -> float | None:
    """Return the rate at which the run advances, from a logged rate of the newest lines.

    The rate is the median work of a step, divided by the usual seconds of a step. The end of the
    run is projected with the same seconds, so that the two agree. The median of the logged rates
    would be faster than the run: it leaves out the steps that wait for a save, a validation, or
    other processes. That median is returned only if there are no step times.

    Args:
        pace: Pace of the run.
        rates: Work per second as logged (tokens per second, or MFU), [S].
    """
    recent = slice(-BLOCK_LINES, None)
    logged = rates[recent][np.isfinite(rates[recent])]
    per_step = (rates * pace.step_seconds)[recent]
    per_step = per_step[np.isfinite(per_step)]
    usual = pace.usual_step_seconds
    if not len(logged):
        return None
    if not usual or not len(per_step):
        return _to_finite(np.median(logged))
    # Logs whose rates and step times contradict each other must not give a rate that nobody logged.
    return _to_finite(np.clip(np.median(per_step) / usual, logged.min(), logged.max()))
