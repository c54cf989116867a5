"""Alerts about the losses of a run: against the frozen band, and against themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy.special import stdtrit

from launcher.watch.alerts import AlertFinding, WatchedRun, alert
from launcher.watch.course import FALSE_ALARMS, FREEDOM, LEAST_NATS, end_sd
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

# Constant losses, and losses that stop while steps continue.
#
# Equal losses in a row are no fault by themselves: a log that is rounded has them. How many are too
# many follows from the noise before them. A line stays within the rounding q of the one before with
# probability at most
#
#     p = P(|e| < q / 2) = erf(q / (2 sqrt(2) sd)),
#
# with sd^2 half the mean square of the differences from line to line (less than the innovation's
# where the noise is autocorrelated), without the q^2 / 4 that rounding alone can make of them. So r
# equal ones in a row come about somewhere in the N lines of a run with probability N p^(r - 1) at
# most, and r is too many where that is below `FALSE_ALARMS`. Where the noise is small against the
# rounding p is 1, and no number is too many.

LEAST_EQUAL = 16
NEVER_CHANGED = 64
"""Lines past the warmup of a loss that was one number from the start: there is no noise to go
by."""
# the quietest counts: a loss that still falls fast has large differences
_RECENT, _LEAST_BEFORE = (64, 256, 1024), 8
# a number that never changed and is rounded more coarsely may have been rounded into one
_COARSE_NATS = 0.01
GAPS_MISSED, LEAST_MISSED = 3, 16


def frozen_loss(columns: LogColumns, warmup_steps: int, num_steps: int) -> AlertFinding | None:
    """Whether the training loss is constant; lines without a finite loss are ignored."""
    there = np.isfinite(columns.train_loss_nats)
    steps, losses = columns.steps[there], columns.train_loss_nats[there]
    start = _start(losses)
    before = losses[max(0, start - _RECENT[-1]) : start]
    if len(before) >= _LEAST_BEFORE:
        rounding = resolution(np.append(before, losses[-1]))
        variance = (
            min(noise_of_differences(before[-num:]) for num in _RECENT) ** 2 - rounding**2 / 4
        )
        chance = math.erf(rounding / math.sqrt(8 * variance)) if variance > 0 else 1.0
        allowed = max(LEAST_EQUAL, _too_many(chance, num_steps / spacing(steps))) - 1
        num_equal = len(losses) - start
    else:
        allowed, num_equal = NEVER_CHANGED, int((steps[start:] > warmup_steps).sum())
        if len(losses) and resolution(losses[-1:]) > _COARSE_NATS:
            return None
    if num_equal <= allowed:
        return None
    first, nats = int(steps[start]), float(losses[-1])
    return AlertFinding(
        first_step=first,
        seen=f"training loss has been {format_significant(nats, 10)} nats "
        f"{counted(num_equal, 'time')} in a row, since "
        f"step {first}: its noise and rounding before explain at most {int(allowed)}",
        evidence={"nats": nats, "num_equal": num_equal, "num_allowed": int(allowed)},
    )


def stopped(columns: LogColumns) -> list[AlertFinding]:
    """Losses without a value for three times their longest earlier gap and 16 lines, while steps
    continue.
    """
    found = []
    for name, at in (("training", columns.steps), ("validation", columns.validation_steps)):
        if len(at) < 3:
            continue
        lines = columns.line_steps[columns.line_steps > at[-1]]
        missed = len(lines) and lines[-1] - at[-1] > GAPS_MISSED * np.diff(at).max()
        if missed and len(lines) >= LEAST_MISSED:
            found.append(
                AlertFinding(
                    first_step=int(at[-1]),
                    seen=f"steps continue, but {counted(len(lines), 'line')} without a {name} loss "
                    "came "
                    f"(last at step {int(at[-1])})",
                    evidence={"loss": name, "num_lines": len(lines)},
                )
            )
    return found


def _start(values: Floats) -> int:
    """Where the newest run of equal values begins."""
    other = np.flatnonzero(values != values[-1]) if len(values) else np.empty(0)
    return int(other[-1]) + 1 if len(other) else 0


def _too_many(chance: float, num: float) -> float:
    """Equal ones in a row, of so many values; `chance`: of one that equals the one before."""
    if chance >= 1:
        return math.inf
    return 1 + math.ceil(math.log(FALSE_ALARMS / max(num, 1.0)) / math.log(max(chance, 1e-300)))


# An early warning: the gradient norm grows out of line, against its own past.

GRAD_NORM_FACTOR = 2.0
"""The alert is raised where the median gradient norm is more than so many times that of half the
steps ago."""
_GRAD_LINES = 32


@alert(
    "gradients_grow",
    "notice",
    next_command="look",
    when="the gradient norm is more than twice that at half the step, in the same part of the "
    "schedule",
)
def gradients_grow(run: WatchedRun) -> Iterator[AlertFinding]:
    """The norm of the whole gradient."""
    found = gradient_growth(run.columns.steps, run.columns.grad_norm, run.schedule)
    if found is not None:
        yield found


def part_starts(schedule: Schedule) -> list[int]:
    """Steps at which a part of the schedule begins: 0, the end of the warmup, the start of a final
    decay.
    """
    starts = {0, schedule.warmup_steps}
    if schedule.kind == "wsd":
        starts.add(schedule.num_steps - schedule.decay_steps)
    return sorted(starts)


def gradient_growth(steps: Floats, grad_norm: Floats, schedule: Schedule) -> AlertFinding | None:
    """Where the gradient norm first was `GRAD_NORM_FACTOR` times its own past."""
    there = np.isfinite(grad_norm) & (grad_norm > 0)
    at, norms = steps[there], grad_norm[there]
    for end in _ends(len(at)):
        recent = slice(end - _GRAD_LINES, end)
        past = _past(at, end, schedule)
        if past is None:
            continue
        before, now = float(np.median(norms[past])), float(np.median(norms[recent]))
        if now > GRAD_NORM_FACTOR * before:
            return AlertFinding(
                first_step=int(at[end - 1]),
                seen=f"the gradient norm is {format_factor(now / before)} times that at half the "
                "step",
                evidence={"before": before, "now": now},
            )
    return None


def _ends(num_lines: int) -> Iterator[int]:
    """Numbers of lines to look back from: by a part in 200 later on, so that a long log is soon
    done.
    """
    end = 2 * _GRAD_LINES
    while end <= num_lines:
        yield end
        end += max(_GRAD_LINES // 4, end // 200)


def _past(steps: Floats, end: int, schedule: Schedule) -> slice | None:
    """As many lines, about half the steps of those before `end`; None where they reach out of the
    part.
    """
    first_step = max(start for start in part_starts(schedule) if start <= steps[end - 1])
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
def non_finite(run: WatchedRun) -> Iterator[AlertFinding]:
    """Losses that are not finite."""
    missing = run.columns.steps[~np.isfinite(run.columns.train_loss_nats)]
    if len(missing):
        yield AlertFinding(
            first_step=int(missing[0]),
            seen=f"training loss is not finite at {counted(len(missing), 'logged step')}, first at "
            "step "
            f"{missing[0]:.0f}",
            evidence={"num_lines": len(missing), "last_step": int(missing[-1])},
        )


@alert(
    "diverged",
    "alarm",
    next_command="resume",
    when="a training loss is above the frozen ceiling after the warmup",
)
def diverged(run: WatchedRun) -> Iterator[AlertFinding]:
    """Losses above where the run must stop by itself."""
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
def departed(run: WatchedRun) -> Iterator[AlertFinding]:
    """A look beyond the bound over the whole run."""
    found = run.course
    if found is None or found.departed is None:
        return
    which = found.departed
    loss, expected, departure = (
        float(column[which]) for column in (found.loss_nats, found.expected_nats, found.departure)
    )
    advice = (
        ""
        if departure > 0
        else "; a lower loss may mean easier data than the ladder's, or repeated data"
    )
    yield AlertFinding(
        first_step=int(found.seen_at[which]),
        seen=f"training loss near step {found.looked_at[which]:.0f} is {format_loss(loss)} nats, "
        f"{'above' if departure > 0 else 'below'} the predicted {format_loss(expected)} by "
        f"{abs(departure):.1f} "
        f"standard deviations of the band; only {format_percent(FALSE_ALARMS)} of healthy runs "
        "ever pass "
        f"{found.bound:.1f}{advice}",
        evidence={
            "loss_nats": loss,
            "expected_nats": expected,
            "departure_sds": departure,
            "bound_sds": found.bound,
            "false_alarms_per_run": FALSE_ALARMS,
            "final_nats": found.final[0],
            "final_low_nats": found.final[1],
            "final_high_nats": found.final[2],
        },
    )


@alert(
    "missed_end",
    "alarm",
    next_command="conclude",
    when="the final validation loss is farther from the forecast than in all but "
    f"{format_percent(FALSE_ALARMS)} of healthy runs",
)
def missed_end(run: WatchedRun) -> Iterator[AlertFinding]:
    """The validation loss after the last step, against the forecast of it."""
    columns, num_steps, predicted = run.columns, run.schedule.num_steps, run.decision.predicted
    if not len(columns.validation_steps) or columns.validation_steps[-1] < num_steps:
        return
    actual, (low_sd, high_sd) = float(columns.validation_loss_nats[-1]), end_sd(predicted)
    off = float(np.log(max(actual, LEAST_NATS) / predicted.loss_nats))
    departure = off / (low_sd if off < 0 else high_sd)
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
def spikes_over(run: WatchedRun) -> Iterator[AlertFinding]:
    """One notice for all that came back."""
    back = [spike for spike in run.spikes if spike.over]
    if back:
        highest = max(back, key=lambda spike: spike.peak_nats - spike.level_nats)
        yield AlertFinding(
            first_step=back[0].first_step,
            seen=f"{counted(len(back), 'spike')} recovered, the highest of "
            f"{format_nats(highest.peak_nats - highest.level_nats)} nats at step "
            f"{highest.first_step}, the last at "
            f"step {back[-1].first_step}",
            evidence={
                "num_spikes": len(back),
                "num_lasted": sum(spike.lasted for spike in back),
                "first_steps": [spike.first_step for spike in back[-20:]],
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
def spike_lasts(run: WatchedRun) -> Iterator[AlertFinding]:
    """A spike that is not over, and has lasted for the policy's patience."""
    policy, spike = run.decision.spikes, run.spikes[-1] if run.spikes else None
    if spike is None or spike.over or not spike.lasted:
        return
    yield AlertFinding(
        first_step=spike.first_step,
        seen=f"a spike from {format_loss(spike.level_nats)} to {format_loss(spike.peak_nats)} nats "
        "has lasted "
        f"{counted(spike.num_lines, 'logged step')}: the policy is to go back "
        f"{counted(policy.rollback_steps, 'step')} before it and skip "
        f"{counted(policy.skip_batches, 'batch')}; the "
        f"trainer itself may do so {counted(policy.max_rollbacks, 'time')} (launch.spike_rollbacks)",  # noqa: E501
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
def rising(run: WatchedRun) -> Iterator[AlertFinding]:
    """A loss that goes up and stays there, slower than a spike."""
    columns, schedule = run.columns, run.schedule
    found = rise(columns.steps, columns.train_loss_nats, schedule.warmup_steps, schedule.num_steps)
    if found is not None:
        # it has none
        by = f", {found.sds:.4g} standard deviations of its noise" if np.isfinite(found.sds) else ""
        yield AlertFinding(
            first_step=found.first_step,
            seen=f"training loss rose from {format_loss(found.lowest_nats)} to "
            f"{format_loss(found.now_nats)} nats by "
            f"step {found.first_step} and stayed up{by}",
            evidence={
                "lowest_nats": found.lowest_nats,
                "now_nats": found.now_nats,
                "rise_sds": found.sds,
            },
        )


@alert(
    "frozen_loss",
    "alarm",
    next_command="verify",
    when="the newest training losses are equal, more often than earlier noise and rounding explain",
)
def training_stands_still(run: WatchedRun) -> Iterator[AlertFinding]:
    """Nothing trains, or nothing measures it."""
    found = frozen_loss(run.columns, run.schedule.warmup_steps, run.schedule.num_steps)
    if found is not None:
        yield found


@alert(
    "metrics_stop",
    "alarm",
    next_command="look",
    when=f"steps continue without a training or validation loss for {GAPS_MISSED} times its "
    "longest earlier gap and "
    f"at least {LEAST_MISSED} lines",
)
def metrics_stop(run: WatchedRun) -> Iterator[AlertFinding]:
    """Losses that stop while steps continue."""
    yield from stopped(run.columns)
