"""The losses and norms of a run as alerts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from launcher.frozen.frozen import Decision
from launcher.watch.alerts import Alert, Commands
from launcher.watch.course import FALSE_ALARMS, FREEDOM, LEAST_NATS, Course, end_sd
from launcher.watch.logs.columns import Columns, Floats
from launcher.watch.losses import Spike, spikes
from launcher.watch.rises import rise
from launcher.watch.standstill import frozen_loss, frozen_validation
from proxies.core.schedule import Schedule

GRAD_NORM_FACTOR = 2.0
"""Of the median gradient norm over that half the steps ago."""
LAYER_FACTORS = {"weight_rms": 1.5, "grad_norm": 3.0, "update_ratio": 3.0}
"""By how much a layer's growth over an octave may be beyond its own before and the others'; gradients scatter more.

A layer's `param_norm` is its `weight_rms` times a constant: one fact, told once.
"""
_GRAD_LINES, _LAYER_LINES = 32, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Something grew out of line."""

    first_step: int
    """At which it had."""
    layer: str | None
    """None: of the whole model."""
    column: str
    before: float
    """Median about half the steps ago."""
    now: float
    others: float | None = None
    """Median growth of the other layers over the same steps, as a factor."""


def part_starts(schedule: Schedule) -> list[int]:
    """Steps at which a part of the schedule begins: 0, the end of the warmup, the start of a final decay."""
    starts = {0, schedule.warmup_steps}
    if schedule.kind == "wsd":
        starts.add(schedule.num_steps - schedule.decay_steps)
    return sorted(starts)


def gradient_growth(steps: Floats, grad_norm: Floats, schedule: Schedule) -> Growth | None:
    """Where the gradient norm first was `GRAD_NORM_FACTOR` times its own past."""
    there = np.isfinite(grad_norm) & (grad_norm > 0)
    at, norms = steps[there], grad_norm[there]
    for end in _ends(2 * _GRAD_LINES, len(at), _GRAD_LINES // 4):
        recent = slice(end - _GRAD_LINES, end)
        past = _past(at, end, _GRAD_LINES, _start_of(at[end - 1], schedule))
        if past is None:
            continue
        before, now = float(np.median(norms[past])), float(np.median(norms[recent]))
        if now > GRAD_NORM_FACTOR * before:
            return Growth(first_step=int(at[end - 1]), layer=None, column="grad_norm", before=before, now=now)
    return None


def layer_growths(steps: Floats, layers: Mapping[str, Mapping[str, Floats]], schedule: Schedule) -> list[Growth]:
    """For each layer and column where it first grew out of line; the earliest first."""
    found: dict[tuple[str, str], Growth] = {}
    for column, factor in LAYER_FACTORS.items():
        names = [
            name for name in layers if np.isfinite(layers[name][column]).all() and (layers[name][column] > 0).all()
        ]
        if len(names) < 2 or len(steps) < _LAYER_LINES:
            continue
        logs_NL = np.log([layers[name][column] for name in names])
        medians_NL = np.median(np.lib.stride_tricks.sliding_window_view(logs_NL, _LAYER_LINES, axis=1), axis=2)
        for end in _ends(_LAYER_LINES, len(steps), 1):
            first = _start_of(steps[end - 1], schedule)
            past = _past(steps, end, _LAYER_LINES, first)
            older = None if past is None else _past(steps, past.stop, _LAYER_LINES, first)
            if past is None or older is None:
                continue
            now_N, before_N, older_N = (medians_NL[:, at] for at in (end - _LAYER_LINES, past.start, older.start))
            grown_N, earlier_N = now_N - before_N, before_N - older_N
            for i in np.flatnonzero(grown_N - np.maximum(earlier_N, 0.0) > np.log(factor)):
                name, others = names[i], float(np.median(np.delete(grown_N, i)))
                if (name, column) not in found and grown_N[i] - max(earlier_N[i], others, 0.0) > np.log(factor):
                    found[name, column] = Growth(
                        first_step=int(steps[end - 1]), layer=name, column=column, before=float(np.exp(before_N[i])),
                        now=float(np.exp(now_N[i])), others=float(np.exp(others)),
                    )  # fmt: skip
    return sorted(found.values(), key=lambda growth: growth.first_step)


def _ends(first: int, last: int, least: int) -> Iterator[int]:
    """Numbers of lines to look back from: by `least`, later by a part in 200, so that a long log is soon done."""
    end = first
    while end <= last:
        yield end
        end += max(least, end // 200)


def _start_of(step: float, schedule: Schedule) -> int:
    return max(start for start in part_starts(schedule) if start <= step)


def _past(steps: Floats, end: int, num_lines: int, first_step: int) -> slice | None:
    """As many lines, about half the steps of those before `end`; None where they reach out of the part."""
    middle = float(steps[end - num_lines // 2 - 1] + steps[end - (num_lines + 1) // 2]) / 4  # half their median
    start = int(np.searchsorted(steps, middle)) - num_lines // 2
    if start < 0 or steps[start] <= first_step or start + num_lines > end - num_lines:
        return None
    return slice(start, start + num_lines)


def departures(decision: Decision, found: Course | None, commands: Commands) -> list[Alert]:
    """The course against the frozen band: an alarm beyond the bound over the whole run, a notice outside the band."""
    if found is None:
        return []
    first = found.departed
    which = len(found.departure) - 1 if first is None else first
    if first is None and abs(found.outside[which]) <= 1:
        return []
    loss, expected, departure = (
        float(column[which]) for column in (found.loss_nats, found.expected_nats, found.departure)
    )
    level, side = decision.predicted.level, "above" if departure > 0 else "below"
    rule = (
        f"outside the {level:.0%} band at that point, as {1 - level:.0%} of healthy runs are"
        if first is None
        else f"beyond the {found.bound:.1f} that {FALSE_ALARMS:.0%} of healthy runs ever reach"
    )
    advice = "" if departure > 0 else "; lower may mean easier data than the ladder's, or data seen twice"
    return [
        Alert(
            name="departed" if first is not None else "outside_band",
            severity="alarm" if first is not None else "notice",
            first_step=int(found.seen_at[which]),
            seen=f"training loss near step {found.looked_at[which]:.0f} is {loss:.4f} nats, {side} the foretold "
            f"{expected:.4f} by {abs(departure):.1f} standard deviations of the band: {rule}{advice}",
            evidence={
                "loss_nats": loss, "expected_nats": expected, "departure_sds": departure, "bound_sds": found.bound,
                "false_alarms_per_run": FALSE_ALARMS, "final_nats": found.final[0], "final_low_nats": found.final[1],
                "final_high_nats": found.final[2],
            },
            next_command=commands.verify,
        )
    ]  # fmt: skip


def missed_end(decision: Decision, columns: Columns, commands: Commands) -> list[Alert]:
    """The validation loss after the last step, against the forecast of it."""
    num_steps = decision.learning_rate.schedule.num_steps
    if not len(columns.validation_steps) or columns.validation_steps[-1] < num_steps:
        return []
    predicted, actual = decision.predicted, float(columns.validation_loss_nats[-1])
    low_sd, high_sd = end_sd(predicted)
    off = float(np.log(max(actual, LEAST_NATS) / predicted.loss_nats))
    departure = off / (low_sd if off < 0 else high_sd)
    if abs(departure) <= stdtrit(FREEDOM, 1 - FALSE_ALARMS / 2):
        return []
    return [
        Alert(
            name="missed_end",
            severity="alarm",
            first_step=num_steps,
            seen=f"the run ended at {actual:.4f} nats, {abs(departure):.1f} standard deviations from the foretold "
            f"{predicted.loss_nats:.4f} [{predicted.low_nats:.4f}, {predicted.high_nats:.4f}]",
            evidence={"validation_loss_nats": actual, "departure_sds": departure},
            next_command=f"{commands.watch} --conclude",
        )
    ]


def bad_values(decision: Decision, columns: Columns, commands: Commands) -> list[Alert]:
    """Losses that are no numbers, or above where the run must stop by itself."""
    found = []
    missing = columns.steps[~np.isfinite(columns.train_loss_nats)]
    if len(missing):
        found.append(
            Alert(
                name="non_finite",
                severity="alarm",
                first_step=int(missing[0]),
                seen=f"training loss is no number at {len(missing)} logged steps, the first {missing[0]:.0f}",
                evidence={"num_lines": len(missing), "last_step": int(missing[-1])},
                next_command=commands.resume,
            )
        )
    limit = decision.abort.train_loss_above_nats
    past = columns.steps > decision.learning_rate.schedule.warmup_steps
    above = columns.steps[past & (columns.train_loss_nats > limit)]
    if len(above):
        found.append(
            Alert(
                name="diverged",
                severity="alarm",
                first_step=int(above[0]),
                seen=f"training loss passed {limit:.4f} nats at step {above[0]:.0f}: a run must stop there",
                evidence={"limit_nats": limit, "num_lines": len(above)},
                next_command=commands.resume,
            )
        )
    return found


def spike_alerts(decision: Decision, columns: Columns, commands: Commands) -> tuple[list[Alert], list[Spike]]:
    """An alarm for a spike that lasts, one notice for all that came back; and the spikes."""
    policy, alerts = decision.spikes, []
    found = [spike for spike in spikes(columns.steps, columns.train_loss_nats, policy) if not spike.within_noise]
    back = [spike for spike in found if spike.over]
    if back:
        highest = max(back, key=lambda spike: spike.peak_nats - spike.level_nats)
        alerts.append(
            Alert(
                name="spikes",
                severity="notice",
                first_step=back[0].first_step,
                seen=f"{len(back)} spikes that came back, the highest of {highest.peak_nats - highest.level_nats:.3f} "
                f"nats at step {highest.first_step}, the last at step {back[-1].first_step}",
                evidence={
                    "num_spikes": len(back),
                    "num_lasted": sum(spike.lasted for spike in back),
                    "first_steps": [spike.first_step for spike in back[-20:]],
                },
                next_command=f"{commands.watch} --once",
            )
        )
    if found and not found[-1].over and found[-1].lasted:
        spike = found[-1]
        by_itself = (
            f"the trainer may do so by itself {policy.max_rollbacks} times"
            if policy.max_rollbacks
            else "the frozen config leaves that to people (launch.spike_rollbacks = 0)"
        )
        alerts.append(
            Alert(
                name="spike_lasts",
                severity="alarm",
                first_step=spike.first_step,
                seen=f"a spike from {spike.level_nats:.4f} to {spike.peak_nats:.4f} nats lasts for {spike.num_lines} "
                f"logged steps: the policy is to go back {policy.rollback_steps} steps before it and to skip "
                f"{policy.skip_batches} batches; {by_itself}",
                evidence={
                    "level_nats": spike.level_nats,
                    "peak_nats": spike.peak_nats,
                    "num_lines": spike.num_lines,
                    "patience_steps": policy.patience_steps,
                },
                next_command=commands.note(f"spike at step {spike.first_step}: ..."),
            )
        )
    return alerts, found


def risen(decision: Decision, columns: Columns, commands: Commands) -> list[Alert]:
    """A loss that goes up and stays there, slower than a spike."""
    schedule = decision.learning_rate.schedule
    found = rise(columns.steps, columns.train_loss_nats, schedule.warmup_steps, schedule.num_steps)
    if found is None:
        return []
    by = f", {found.sds:.0f} standard deviations of its noise" if np.isfinite(found.sds) else ""  # rounded: it has none
    return [
        Alert(
            name="rising", severity="alarm", first_step=found.first_step,
            seen=f"training loss rose from {found.lowest_nats:.4f} to {found.now_nats:.4f} nats by step "
            f"{found.first_step} and stayed up{by}",
            evidence={"lowest_nats": found.lowest_nats, "now_nats": found.now_nats, "rise_sds": found.sds},
            next_command=commands.verify,
        )
    ]  # fmt: skip


def stands_still(decision: Decision, columns: Columns, commands: Commands) -> list[Alert]:
    """Losses that are one number again and again: nothing trains, or nothing measures it."""
    schedule = decision.learning_rate.schedule
    found = [
        ("frozen_loss", "training", frozen_loss(columns, schedule.warmup_steps, schedule.num_steps)),
        ("frozen_validation", "validation", frozen_validation(columns, schedule.num_steps)),
    ]
    return [
        Alert(
            name=name, severity="alarm", first_step=frozen.first_step,
            seen=f"{what} loss is {frozen.nats:.10g} nats {frozen.num_equal} times in a row, since step "
            f"{frozen.first_step}: given the noise and the rounding before, {frozen.allowed} may come about",
            evidence={"nats": frozen.nats, "num_equal": frozen.num_equal, "num_allowed": frozen.allowed},
            next_command=commands.verify,
        )
        for name, what, frozen in found
        if frozen is not None
    ]  # fmt: skip


def precursors(decision: Decision, columns: Columns, commands: Commands) -> list[Alert]:
    """Notices of gradient norms and layers that grow out of line."""
    schedule = decision.learning_rate.schedule
    whole = gradient_growth(columns.steps, columns.grad_norm, schedule)
    layers = layer_growths(columns.layer_steps, columns.layers, schedule)
    return [_grown(growth, commands) for growth in ([whole] if whole else []) + layers]


def _grown(growth: Growth, commands: Commands) -> Alert:
    times, of = growth.now / growth.before, f"{growth.column} of {growth.layer}" if growth.layer else "gradient norm"
    others = "" if growth.others is None else f", where the other layers' went by {growth.others:.2f}"
    return Alert(
        name="layer_grows" if growth.layer else "gradients_grow", severity="notice", first_step=growth.first_step,
        seen=f"{of} is {times:.2f} times what it was half the steps before{others}",
        evidence={
            "layer": growth.layer, "column": growth.column, "before": growth.before, "now": growth.now,
            "others_factor": growth.others,
        },
        next_command=f"{commands.watch} --once",
    )  # fmt: skip
