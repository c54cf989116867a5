"""Alerts about the losses of a run, compared with the frozen band and with themselves.

Two kinds need a word on their statistics.

Constant losses: equal losses in a row are normal in a log that is rounded. How many are too many
follows from the noise before them. A line stays within the rounding q of the one before with
probability at most

    p = P(|e| < q / 2) = erf(q / (2 sqrt(2) sd)),

where sd^2 is half the mean square of the differences from line to line (less than the innovation's
variance where the noise is autocorrelated), minus the q^2 / 4 that rounding alone can contribute.
So r equal losses in a row occur somewhere in the N lines of a run with probability at most
N p^(r - 1), and r is too many where that is below `FALSE_ALARMS`. Where the noise is small against
the rounding, p is 1, and no number is too many.

Growing gradients are an early warning: the gradient norm is compared with its own past.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy.special import stdtrit

from launcher.watch.alerts import AlertFinding, WatchedRun, alert
from launcher.watch.course import FALSE_ALARMS, FREEDOM, MIN_NATS, end_sd
from launcher.watch.logs.columns import Floats, LogColumns, spacing
from launcher.watch.loss_rises import RISE_NATS, RISE_SDS, rise
from launcher.watch.noise import noise_of_differences, resolution
from proxies.core.notation import (
    counted,
    format_factor,
    format_interval,
    format_loss,
    format_nats,
    format_percent,
    format_significant,
)
from proxies.core.schedule import Schedule

# ---- Constant losses, and losses that stop while steps continue ----

MIN_EQUAL = 16
"""Minimum number of equal losses in a row that raises the alert."""
NEVER_CHANGED = 64
"""Maximum number of equal losses past the warmup if the loss never changed, so that its noise is
unknown."""
# The quietest of these windows counts: a loss that still falls fast has large differences.
_RECENT, _MIN_LINES_BEFORE = (64, 256, 1024), 8
# A constant loss that is rounded more coarsely than this may have been rounded into one number.
_COARSE_NATS = 0.01
GAPS_MISSED, MIN_MISSED_LINES = 3, 16
"""Multiple of the longest earlier gap, and minimum number of lines, without a loss that raise the
alert."""


def frozen_loss(columns: LogColumns, warmup_steps: int, num_steps: int) -> AlertFinding | None:
    """Find a training loss that is constant; lines without a finite loss are ignored."""
    is_finite = np.isfinite(columns.train_loss_nats)
    steps, losses = columns.steps[is_finite], columns.train_loss_nats[is_finite]
    start = _find_equal_start(losses)
    before = losses[max(0, start - _RECENT[-1]) : start]
    if len(before) >= _MIN_LINES_BEFORE:
        rounding = resolution(np.append(before, losses[-1]))
        variance = (
            min(noise_of_differences(before[-num:]) for num in _RECENT) ** 2 - rounding**2 / 4
        )
        chance = math.erf(rounding / math.sqrt(8 * variance)) if variance > 0 else 1.0
        allowed = max(MIN_EQUAL, _count_improbable(chance, num_steps / spacing(steps))) - 1
        num_equal = len(losses) - start
    else:
        allowed, num_equal = NEVER_CHANGED, int((steps[start:] > warmup_steps).sum())
        if len(losses) and resolution(losses[-1:]) > _COARSE_NATS:
            return None
    if num_equal <= allowed:
        return None
    first, value_nats = int(steps[start]), float(losses[-1])
    return AlertFinding(
        first_step=first,
        seen=f"training loss has been {format_significant(value_nats, 10)} nats "
        f"{counted(num_equal, 'time')} in a row, since "
        f"step {first}: its noise and rounding before explain at most {int(allowed)}",
        evidence={"nats": value_nats, "num_equal": num_equal, "num_allowed": int(allowed)},
    )


def find_stopped_losses(columns: LogColumns) -> list[AlertFinding]:
    """Return findings if losses stop while steps continue.

    They have stopped after `GAPS_MISSED` times their longest earlier gap, and `MIN_MISSED_LINES`
    lines.
    """
    findings = []
    for name, steps in (("training", columns.steps), ("validation", columns.validation_steps)):
        if len(steps) < 3:
            continue
        lines = columns.line_steps[columns.line_steps > steps[-1]]
        has_stopped = len(lines) and lines[-1] - steps[-1] > GAPS_MISSED * np.diff(steps).max()
        if has_stopped and len(lines) >= MIN_MISSED_LINES:
            findings.append(
                AlertFinding(
                    first_step=int(steps[-1]),
                    seen=f"steps continue, but {counted(len(lines), 'line')} without a {name} loss "
                    f"came (last at step {int(steps[-1])})",
                    evidence={"loss": name, "num_lines": len(lines)},
                )
            )
    return findings


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
    return 1 + math.ceil(
        math.log(FALSE_ALARMS / max(num_values, 1.0)) / math.log(max(chance, 1e-300))
    )


# ---- Growing gradients ----

GRAD_NORM_FACTOR = 2.0
"""Ratio of the median gradient norm to that at half the step above which the notice is raised."""
_GRAD_LINES = 32


@alert(
    "gradients_grow",
    "notice",
    next_command="look",
    when="the gradient norm is more than twice that at half the step, in the same part of the "
    "schedule",
)
def find_growing_gradients(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find a gradient norm that has outgrown its own past."""
    finding = find_gradient_growth(run.columns.steps, run.columns.grad_norm, run.schedule)
    if finding is not None:
        yield finding


def list_part_starts(schedule: Schedule) -> list[int]:
    """Return the steps at which a part of the schedule begins.

    These are 0, the end of the warmup, and the start of a final decay.
    """
    starts = {0, schedule.warmup_steps}
    if schedule.kind == "wsd":
        starts.add(schedule.num_steps - schedule.decay_steps)
    return sorted(starts)


def find_gradient_growth(
    steps: Floats, grad_norm: Floats, schedule: Schedule
) -> AlertFinding | None:
    """Return where the gradient norm first was `GRAD_NORM_FACTOR` times its own past."""
    is_positive = np.isfinite(grad_norm) & (grad_norm > 0)
    kept_steps, norms = steps[is_positive], grad_norm[is_positive]
    for end in _generate_ends(len(kept_steps)):
        recent_lines = slice(end - _GRAD_LINES, end)
        past_lines = _select_past_lines(kept_steps, end, schedule)
        if past_lines is None:
            continue
        before, now = float(np.median(norms[past_lines])), float(np.median(norms[recent_lines]))
        if now > GRAD_NORM_FACTOR * before:
            return AlertFinding(
                first_step=int(kept_steps[end - 1]),
                seen=f"the gradient norm is {format_factor(now / before)} times that at half the "
                "step",
                evidence={"before": before, "now": now},
            )
    return None


def _generate_ends(num_lines: int) -> Iterator[int]:
    """Yield the numbers of lines to look back from.

    Later ones are apart by a 200th of the log, so that a long log takes little time.
    """
    end = 2 * _GRAD_LINES
    while end <= num_lines:
        yield end
        end += max(_GRAD_LINES // 4, end // 200)


def _select_past_lines(steps: Floats, end: int, schedule: Schedule) -> slice | None:
    """Return lines about half the steps before `end`, as many as are recent.

    The result is None if they reach beyond the part of the schedule.
    """
    first_step = max(start for start in list_part_starts(schedule) if start <= steps[end - 1])
    middle = float(np.median(steps[end - _GRAD_LINES : end])) / 2
    start = int(np.searchsorted(steps, middle)) - _GRAD_LINES // 2
    if start < 0 or steps[start] <= first_step or start + _GRAD_LINES > end - _GRAD_LINES:
        return None
    return slice(start, start + _GRAD_LINES)


@alert(
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
            seen=f"training loss is not finite at {counted(len(missing), 'logged step')}, first at "
            f"step {missing[0]:.0f}",
            evidence={"num_lines": len(missing), "last_step": int(missing[-1])},
        )


@alert(
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
            f"{above[0]:.0f}: "
            "stop the run",
            evidence={"limit_nats": limit, "num_lines": len(above)},
        )


@alert(
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


@alert(
    "missed_end",
    "alarm",
    next_command="conclude",
    when="the final validation loss is farther from the forecast than in all but "
    f"{format_percent(FALSE_ALARMS)} of healthy runs",
)
def find_missed_end(run: WatchedRun) -> Iterator[AlertFinding]:
    """Compare the validation loss after the last step with its forecast."""
    columns, num_steps, predicted = run.columns, run.schedule.num_steps, run.decision.predicted
    if not len(columns.validation_steps) or columns.validation_steps[-1] < num_steps:
        return
    actual, (low_sd, high_sd) = float(columns.validation_loss_nats[-1]), end_sd(predicted)
    log_error = float(np.log(max(actual, MIN_NATS) / predicted.loss_nats))
    departure = log_error / (low_sd if log_error < 0 else high_sd)
    if abs(departure) > stdtrit(FREEDOM, 1 - FALSE_ALARMS / 2):
        yield AlertFinding(
            first_step=num_steps,
            seen=f"the run ended at {format_loss(actual)} nats, {abs(departure):.1f} standard "
            "deviations from the "
            f"predicted {format_loss(predicted.loss_nats)} "
            f"{format_interval((predicted.low_nats, predicted.high_nats))}",
            evidence={"validation_loss_nats": actual, "departure_sds": departure},
        )


@alert(
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
            seen=f"{counted(len(recovered), 'spike')} recovered, the highest of "
            f"{format_nats(highest.peak_nats - highest.level_nats)} nats at step "
            f"{highest.first_step}, the last at "
            f"step {recovered[-1].first_step}",
            evidence={
                "num_spikes": len(recovered),
                "num_lasted": sum(spike.lasted for spike in recovered),
                "first_steps": [spike.first_step for spike in recovered[-20:]],
            },
        )


@alert(
    "spike_lasts",
    "alarm",
    next_command="note",
    when="a spike (as the frozen policy defines it, and above what earlier noise explains) has "
    "lasted for the policy's "
    "patience and not recovered",
)
def find_lasting_spike(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find a spike that is not over and has lasted for the policy's patience."""
    policy, spike = run.decision.spikes, run.spikes[-1] if run.spikes else None
    if spike is None or spike.over or not spike.lasted:
        return
    yield AlertFinding(
        first_step=spike.first_step,
        seen=f"a spike from {format_loss(spike.level_nats)} to {format_loss(spike.peak_nats)} nats "
        f"has lasted {counted(spike.num_lines, 'logged step')}: the policy is to go back "
        f"{counted(policy.rollback_steps, 'step')} before it and skip "
        f"{counted(policy.skip_batches, 'batch')}; the trainer itself may do so "
        f"{counted(policy.max_rollbacks, 'time')} (launch.spike_rollbacks)",
        evidence={
            "level_nats": spike.level_nats,
            "peak_nats": spike.peak_nats,
            "num_lines": spike.num_lines,
            "patience_steps": policy.patience_steps,
        },
    )


@alert(
    "rising",
    "alarm",
    next_command="verify",
    when=f"the loss rose and stayed up by at least {RISE_NATS:g} nats and {RISE_SDS:g} standard "
    "deviations of the run's own noise (5.5 in a run of 100,000 lines), for 32 lines or 32 medians "
    "of 2, 4, 8, ... "
    "lines",
)
def find_rise(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find a loss that rises more slowly than a spike, and stays up."""
    columns, schedule = run.columns, run.schedule
    loss_rise = rise(
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


@alert(
    "frozen_loss",
    "alarm",
    next_command="verify",
    when="the newest training losses are equal, more often than earlier noise and rounding explain",
)
def find_frozen_loss(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find a training loss that is constant: nothing trains, or nothing measures it."""
    finding = frozen_loss(run.columns, run.schedule.warmup_steps, run.schedule.num_steps)
    if finding is not None:
        yield finding


@alert(
    "metrics_stop",
    "alarm",
    next_command="look",
    when=f"steps continue without a training or validation loss for {GAPS_MISSED} times its "
    "longest earlier gap and "
    f"at least {MIN_MISSED_LINES} lines",
)
def find_stopped_metrics(run: WatchedRun) -> Iterator[AlertFinding]:
    """Find losses that stop while steps continue."""
    yield from find_stopped_losses(run.columns)
