"""Alerts about losses and gradient norms of a run, compared with the frozen band (the forecast's
interval for the training loss over the run) and with their own past.

Constant losses: equal losses in a row are normal in a log that is rounded. The number that is too
large follows from the noise before them. A line stays within the rounding q of the one before with
probability at most

    p = P(|e| < q / 2) = erf(q / (2 sqrt(2) sd)),

where sd^2 is half the mean square of the differences from line to line (less than the innovation's
variance where the noise is autocorrelated), minus the q^2 / 4 that rounding alone can contribute.
In the N lines of a run, r equal losses in a row occur somewhere with probability at most N p^(r -
1). The number r is too large if that probability is below `FALSE_ALARMS`. Where the noise is small
against the rounding, p is 1, and no number is too many.

Growing gradients are an early warning: the gradient norm is compared with its own past.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy.special import stdtrit

from forerun._launcher.main_run.watch.alerts import AlertFinding, WatchedRun, register_alert
from forerun._launcher.main_run.watch.course import FALSE_ALARMS, FREEDOM, MIN_NATS, compute_end_sd
from forerun._launcher.main_run.watch.logs.columns import Floats, compute_spacing
from forerun._launcher.main_run.watch.loss_rises import (
    LINES_AFTER,
    RISE_NATS,
    RISE_SDS,
    compute_limit_sds,
    measure_rise,
)
from forerun._launcher.main_run.watch.noise import estimate_noise_from_differences, find_resolution
from forerun._proxies.core.notation import (
    format_counted,
    format_factor,
    format_interval,
    format_loss,
    format_nats,
    format_percent,
    format_significant,
)
from forerun._proxies.core.schedule import Schedule

# ---- Constant losses, and losses that stop while steps continue ----

MIN_EQUAL = 16
"""Minimum number of equal losses in a row that raises the alert."""
MAX_EQUAL_UNCHANGED = 64
"""Maximum number of equal losses past the warmup that raises no alert if the loss never changed.
The noise of such a loss is unknown."""
# Numbers of newest lines from which the noise is estimated, and minimum number of lines for an
# estimate. The smallest estimate counts: the differences of a loss that still falls fast are large.
_RECENT, _MIN_LINES_BEFORE = (64, 256, 1024), 8
# A constant loss that is rounded more coarsely than this may have been rounded into one number.
_COARSE_NATS = 0.01
GAPS_MISSED, MIN_MISSED_LINES = 3, 16
"""The alert is raised if there is no loss for this multiple of the longest earlier gap, and for at
least this number of lines."""


@register_alert(
    "frozen_loss",
    "alarm",
    next_command="verify",
    when="the newest training losses are equal, more often than earlier noise and rounding explain",
)
def find_constant_loss(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find a training loss that is constant: nothing trains, or nothing measures it.

    Lines without a finite loss are ignored.
    """
    columns, schedule = run.columns, run.schedule
    is_finite = np.isfinite(columns.train_loss_nats)
    steps, losses = columns.steps[is_finite], columns.train_loss_nats[is_finite]
    start = _find_equal_start(losses)
    before = losses[max(0, start - _RECENT[-1]) : start]
    if len(before) >= _MIN_LINES_BEFORE:
        rounding = find_resolution(np.append(before, losses[-1]))
        variance = (
            min(estimate_noise_from_differences(before[-num:]) for num in _RECENT) ** 2
            - rounding**2 / 4
        )
        chance = math.erf(rounding / math.sqrt(8 * variance)) if variance > 0 else 1.0
        num_lines = schedule.num_steps / compute_spacing(steps)
        allowed = max(MIN_EQUAL, _count_improbable(chance, num_lines)) - 1
        num_equal = len(losses) - start
    else:
        allowed, num_equal = MAX_EQUAL_UNCHANGED, int((steps[start:] > schedule.warmup_steps).sum())
        if len(losses) and find_resolution(losses[-1:]) > _COARSE_NATS:
            return
    if num_equal <= allowed:
        return
    first, value_nats = int(steps[start]), float(losses[-1])
    yield AlertFinding(
        first_step=first,
        seen=f"training loss has been {format_significant(value_nats, 10)} nats "
        f"{format_counted(num_equal, 'time')} in a row, since step {first}: its noise and "
        f"rounding before explain at most {int(allowed)}",
        evidence={"nats": value_nats, "num_equal": num_equal, "num_allowed": int(allowed)},
    )


@register_alert(
    "metrics_stop",
    "alarm",
    next_command="look",
    when=f"steps continue without a training or validation loss for {GAPS_MISSED} times its "
    f"longest earlier gap and at least {MIN_MISSED_LINES} lines",
)
def find_stopped_losses(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find losses that stop while steps continue."""
    columns = run.columns
    for name, steps in (("training", columns.steps), ("validation", columns.validation_steps)):
        if len(steps) < 3:
            continue
        lines = columns.line_steps[columns.line_steps > steps[-1]]
        if len(lines) < MIN_MISSED_LINES:
            continue
        if lines[-1] - steps[-1] > GAPS_MISSED * np.diff(steps).max():
            yield AlertFinding(
                first_step=int(steps[-1]),
                seen=f"steps continue, but {format_counted(len(lines), 'line')} without a {name} "
                f"loss came (last at step {int(steps[-1])})",
                evidence={"loss": name, "num_lines": len(lines)},
            )


def _find_equal_start(values: Floats) -> int:
    """Return the index at which the newest series of equal values begins."""
    other_lines = np.flatnonzero(values != values[-1]) if len(values) else np.empty(0)
    return int(other_lines[-1]) + 1 if len(other_lines) else 0


def _count_improbable(chance: float, num_values: float) -> float:
    """Return how many equal values in a row are too many.

    Args:
        chance: Probability that a value equals the one before.
        num_values: Number of values in the whole run.
    """
    if chance >= 1:
        return math.inf
    # A chance of 0 has no logarithm.
    return 1 + math.ceil(
        math.log(FALSE_ALARMS / max(num_values, 1.0)) / math.log(max(chance, 1e-300))
    )


# ---- Growing gradients ----

GRAD_NORM_FACTOR = 2.0
"""Ratio of the median gradient norm to that at half the step above which the notice is raised."""
_GRAD_LINES = 32
"""Number of lines in each of the two compared medians."""


@register_alert(
    "gradients_grow",
    "notice",
    next_command="look",
    when=f"the gradient norm is more than {GRAD_NORM_FACTOR:g} times that at half the step, in the "
    "same part of the schedule",
)
def find_growing_gradients(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find the first step at which the gradient norm was `GRAD_NORM_FACTOR` times its own past."""
    grad_norm, schedule = run.columns.grad_norm, run.schedule
    is_positive = np.isfinite(grad_norm) & (grad_norm > 0)
    steps, norms = run.columns.steps[is_positive], grad_norm[is_positive]
    for end in _generate_ends(len(steps)):
        past_lines = _select_past_lines(steps, end, schedule)
        if past_lines is None:
            continue
        before = float(np.median(norms[past_lines]))
        now = float(np.median(norms[end - _GRAD_LINES : end]))
        if now > GRAD_NORM_FACTOR * before:
            yield AlertFinding(
                first_step=int(steps[end - 1]),
                seen=f"the gradient norm is {format_factor(now / before)} times that at half the "
                "step",
                evidence={"before": before, "now": now},
            )
            return


def list_part_starts(schedule: Schedule) -> list[int]:
    """Return the steps at which a part of the schedule begins.

    These are 0, the end of the warmup, and the start of a final decay.
    """
    starts = {0, schedule.warmup_steps}
    if schedule.kind == "wsd":
        starts.add(schedule.num_steps - schedule.decay_steps)
    return sorted(starts)


def _generate_ends(num_lines: int) -> Iterator[int]:
    """Yield the numbers of lines after which the newest gradients are compared with earlier ones.

    Late in a log they are a 200th of it apart, so that a long log takes little time.
    """
    end = 2 * _GRAD_LINES
    while end <= num_lines:
        yield end
        end += max(_GRAD_LINES // 4, end // 200)


def _select_past_lines(steps: Floats, end: int, schedule: Schedule) -> slice | None:
    """Return `_GRAD_LINES` lines around half the step of the lines before `end`.

    The result is None if they are not all in the same part of the schedule as `end`, or overlap
    the lines that they are compared with.
    """
    first_step = max(start for start in list_part_starts(schedule) if start <= steps[end - 1])
    middle = float(np.median(steps[end - _GRAD_LINES : end])) / 2
    start = int(np.searchsorted(steps, middle)) - _GRAD_LINES // 2
    if start < 0 or steps[start] <= first_step or start + _GRAD_LINES > end - _GRAD_LINES:
        return None
    return slice(start, start + _GRAD_LINES)


# ---- Losses against the limits, the band, and themselves ----


@register_alert(
    "non_finite",
    "alarm",
    next_command="resume",
    when="a training loss is not finite",
)
def find_non_finite_losses(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find training losses that are not finite."""
    missing = run.columns.steps[~np.isfinite(run.columns.train_loss_nats)]
    if len(missing):
        yield AlertFinding(
            first_step=int(missing[0]),
            seen=f"training loss is not finite at {format_counted(len(missing), 'logged step')}, "
            f"first at step {missing[0]:.0f}",
            evidence={"num_lines": len(missing), "last_step": int(missing[-1])},
        )


@register_alert(
    "diverged",
    "alarm",
    next_command="resume",
    when="a training loss is above the frozen ceiling after the warmup",
)
def find_divergence(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find losses above the ceiling at which the run must stop by itself."""
    limit, columns = run.decision.abort.train_loss_above_nats, run.columns
    above = columns.steps[
        (columns.steps > run.schedule.warmup_steps) & (columns.train_loss_nats > limit)
    ]
    if len(above):
        yield AlertFinding(
            first_step=int(above[0]),
            seen=f"training loss passed the frozen ceiling of {format_loss(limit)} nats at step "
            f"{above[0]:.0f}: stop the run",
            evidence={"limit_nats": limit, "num_lines": len(above)},
        )


@register_alert(
    "departed",
    "alarm",
    next_command="verify",
    when=f"the mean training loss near a step is farther from the predicted curve than all but "
    f"{format_percent(FALSE_ALARMS)} of healthy runs ever get, over the whole run",
)
def find_departure(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find the first look whose departure exceeds the bound over the whole run."""
    look = run.course
    if look is None or look.departed is None:
        return
    index = look.departed
    loss, expected, departure = (
        float(column[index]) for column in (look.loss_nats, look.expected_nats, look.departure)
    )
    advice = (
        ""
        if departure > 0
        else "; a lower loss may mean easier data than the ladder's, or repeated data"
    )
    yield AlertFinding(
        first_step=int(look.seen_at[index]),
        seen=f"training loss near step {look.looked_at[index]:.0f} is {format_loss(loss)} nats, "
        f"{'above' if departure > 0 else 'below'} the predicted {format_loss(expected)} by "
        f"{abs(departure):.1f} standard deviations of the band; only "
        f"{format_percent(FALSE_ALARMS)} of healthy runs ever pass {look.bound:.1f}{advice}",
        evidence={
            "loss_nats": loss,
            "expected_nats": expected,
            "departure_sds": departure,
            "bound_sds": look.bound,
            "false_alarms_per_run": FALSE_ALARMS,
            "final_nats": look.final[0],
            "final_low_nats": look.final[1],
            "final_high_nats": look.final[2],
        },
    )


@register_alert(
    "missed_end",
    "alarm",
    next_command="conclude",
    when="the final validation loss is farther from the forecast than in all but "
    f"{format_percent(FALSE_ALARMS)} of healthy runs",
)
def find_missed_end(run: WatchedRun) -> Iterator[AlertFinding]:
    """Compare the validation loss after the last step with its forecast."""
    num_steps, predicted = run.schedule.num_steps, run.decision.predicted
    actual = run.columns.find_final_loss(num_steps)
    if actual is None:
        return
    low_sd, high_sd = compute_end_sd(predicted)
    log_error = float(np.log(max(actual, MIN_NATS) / predicted.loss_nats))
    departure = log_error / (low_sd if log_error < 0 else high_sd)
    if abs(departure) > stdtrit(FREEDOM, 1 - FALSE_ALARMS / 2):
        yield AlertFinding(
            first_step=num_steps,
            seen=f"the run ended at {format_loss(actual)} nats, {abs(departure):.1f} standard "
            f"deviations from the predicted {format_loss(predicted.loss_nats)} "
            f"{format_interval((predicted.low_nats, predicted.high_nats))}",
            evidence={"validation_loss_nats": actual, "departure_sds": departure},
        )


@register_alert(
    "spikes",
    "notice",
    next_command="look",
    when="one or more spikes occurred and recovered; one notice counts them",
)
def find_recovered_spikes(run: WatchedRun) -> Iterator[AlertFinding]:
    """Count the spikes that recovered in one notice."""
    recovered = [spike for spike in run.spikes if spike.over]
    if recovered:
        highest = max(recovered, key=lambda spike: spike.peak_nats - spike.level_nats)
        yield AlertFinding(
            first_step=recovered[0].first_step,
            seen=f"{format_counted(len(recovered), 'spike')} recovered, the highest of "
            f"{format_nats(highest.peak_nats - highest.level_nats)} nats at step "
            f"{highest.first_step}, the last at step {recovered[-1].first_step}",
            evidence={
                "num_spikes": len(recovered),
                "num_lasted": sum(spike.lasted for spike in recovered),
                # The newest 20 are enough to look at, and keep the event log small.
                "first_steps": [spike.first_step for spike in recovered[-20:]],
            },
        )


@register_alert(
    "spike_lasts",
    "alarm",
    next_command="note",
    when="a spike (as the frozen policy defines it, and above what earlier noise explains) has "
    "lasted for the policy's patience and not recovered",
)
def find_lasting_spike(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find a spike that is not over and has lasted for the policy's patience."""
    policy, spike = run.decision.spikes, run.spikes[-1] if run.spikes else None
    if spike is None or spike.over or not spike.lasted:
        return
    yield AlertFinding(
        first_step=spike.first_step,
        seen=f"a spike from {format_loss(spike.level_nats)} to {format_loss(spike.peak_nats)} nats "
        f"has lasted {format_counted(spike.num_lines, 'logged step')}: the policy is to go back "
        f"{format_counted(policy.rollback_steps, 'step')} before it and skip "
        f"{format_counted(policy.skip_batches, 'batch')}; the trainer itself may do so "
        f"{format_counted(policy.max_rollbacks, 'time')} (launch.spike_rollbacks)",
        evidence={
            "level_nats": spike.level_nats,
            "peak_nats": spike.peak_nats,
            "num_lines": spike.num_lines,
            "patience_steps": policy.patience_steps,
        },
    )


@register_alert(
    "rising",
    "alarm",
    next_command="verify",
    when=f"the loss rose and stayed up by at least {RISE_NATS:g} nats and {RISE_SDS:g} standard "
    f"deviations of the run's own noise ({compute_limit_sds(100_000):.1f} in a run of 100,000 "
    f"lines), for {LINES_AFTER} lines or {LINES_AFTER} medians of 2, 4, 8, ... lines",
)
def find_rise(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find a loss that rises more slowly than a spike, and stays up."""
    columns, schedule = run.columns, run.schedule
    loss_rise = measure_rise(
        columns.steps, columns.train_loss_nats, schedule.warmup_steps, schedule.num_steps
    )
    if loss_rise is not None:
        # Losses without noise have no standard deviation.
        size = (
            f", {loss_rise.sds:.4g} standard deviations of its noise"
            if np.isfinite(loss_rise.sds)
            else ""
        )
        yield AlertFinding(
            first_step=loss_rise.first_step,
            seen=f"training loss rose from {format_loss(loss_rise.lowest_nats)} to "
            f"{format_loss(loss_rise.now_nats)} nats by "
            f"step {loss_rise.first_step} and stayed up{size}",
            evidence={
                "lowest_nats": loss_rise.lowest_nats,
                "now_nats": loss_rise.now_nats,
                "rise_sds": loss_rise.sds,
            },
        )
