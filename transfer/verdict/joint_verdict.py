"""The verdict on the learning rate at a target that is larger along several axes at once: wider,
deeper, longer, or in larger batches.

Each axis was measured by itself, at the base of all others. The joint verdict assumes that their
shifts in octaves add up and that their changes of the basin's curvature multiply, which holds for
power laws. No run tests this assumption.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forerun._proxies.core.checks import Interval
from forerun._proxies.core.notation import format_factor
from forerun._transfer.basin.shapes import Floats, compute_rise
from forerun._transfer.question import Axis, Outcome, format_size
from forerun._transfer.regret.regret import (
    TargetExtrapolation,
    build_interval,
    estimate_regret_interval,
)
from forerun._transfer.verdict.reasons import format_regret
from forerun._transfer.verdict.verdict import Verdict, decide

NEGLIGIBLE_DOUBLINGS = 0.1
"""Distance between the base and the target along an axis, in doublings, up to which the axis needs
no test: the target is then within 7 % of the base."""


def needs_test(target_size: int, base_size: int) -> bool:
    """Return whether a target lies far enough from the base that its axis needs a test."""
    return abs(math.log2(target_size / base_size)) > NEGLIGIBLE_DOUBLINGS


@dataclass(frozen=True, kw_only=True, slots=True)
class JointVerdict:
    """The verdict on the learning rate over all axes."""

    outcome: Outcome
    transferred_log2: float | None
    """Log2 of the learning rate to launch with at the target."""
    offset: Interval | None
    """Octaves by which `transferred_log2` lies above the target's optimum."""
    regret_nats: Interval | None
    most_nats: float | None
    """Largest regret that can be determined, in nats."""
    margin_nats: float
    level: float
    axes: tuple[Axis, ...]
    """Axes that were tested."""
    untested: tuple[Axis, ...]
    """Axes on which the target differs from the base without a test."""
    reasons: tuple[str, ...]
    assumptions: tuple[str, ...] = ()
    """Assumptions beyond the runs, by axis."""


def judge_axes_together(
    verdicts: Sequence[Verdict], doublings: Mapping[Axis, float]
) -> JointVerdict:
    """Judge all axes at once.

    Args:
        verdicts: Verdicts on the learning rate, one for each axis, with the same number of draws.
            Width comes first: its base optimum is the one that is transferred.
        doublings: Doublings from base to target, for every axis on which the two can differ.
    """
    axes = tuple(v.question.axis for v in verdicts)
    extrapolations = [v.at_target for v in verdicts if v.at_target is not None]
    # All questions have the same margin and level
    question, value = verdicts[0].question, _compute_value(verdicts)
    untested = tuple(
        axis
        for axis, axis_doublings in doublings.items()
        if abs(axis_doublings) > NEGLIGIBLE_DOUBLINGS and axis not in axes
    )
    doubts = [_format_reasons(v) for v in verdicts if _has_unusable_optimum(v) or _is_doubted(v)]
    doubts += [
        f"{axis}: the target is {format_factor(2.0 ** doublings[axis])} times the base, but no run "
        "tests that axis"
        for axis in untested
    ]
    outcome: Outcome = "cannot_tell"
    findings, offset, regret, most_nats = [], None, None, None
    if len(extrapolations) == len(verdicts) and value is not None:
        octaves, nats = _combine_axes(value, extrapolations, verdicts)
        offset = build_interval(octaves, question.level)
        most_nats = max(at_target.most_nats for at_target in extrapolations)
        regret = estimate_regret_interval(nats, octaves, question.level, most_nats)
        outcome = "cannot_tell" if doubts else decide(regret, question.margin_nats)
        where = ", ".join(format_size(v.question.axis, v.question.target_size) for v in verdicts)
        regret_text = format_regret(regret, question, most_nats)
        findings = [f"at {where} together it costs {regret_text}, margin {question.margin_nats:g}"]
    assumptions = tuple(
        f"{v.question.axis}: {v.assumption}" for v in verdicts if v.assumption is not None
    )
    if outcome == "holds":
        findings += assumptions
    return JointVerdict(
        outcome=outcome,
        transferred_log2=value,
        offset=offset,
        regret_nats=regret,
        most_nats=most_nats,
        margin_nats=question.margin_nats,
        level=question.level,
        axes=axes,
        untested=untested,
        reasons=(*findings, *doubts) or ("there is no rate to transfer",),
        assumptions=assumptions,
    )


def _format_reasons(verdict: Verdict) -> str:
    return f"{verdict.question.axis}: {'; '.join(verdict.reasons)}"


def _has_unusable_optimum(verdict: Verdict) -> bool:
    """Return whether a size has no usable optimum, or there is only one size."""
    return len(verdict.optima) < 2 or any(optimum.status != "ok" for optimum in verdict.optima)


def _is_doubted(verdict: Verdict) -> bool:
    """Return whether the verdict is `cannot_tell` although the interval of the regret decides: the
    drift rests on a single run, or runs diverged near the value.
    """
    regret = verdict.regret_nats
    if verdict.outcome != "cannot_tell" or regret is None:
        return False
    return decide(regret, verdict.question.margin_nats) != "cannot_tell"


def _compute_value(verdicts: Sequence[Verdict]) -> float | None:
    """Return the log2 of the rate at the target: the first axis's base value, moved by the power of
    every axis.
    """
    value = verdicts[0].transferred_log2
    for verdict in verdicts[1:]:
        if value is None or verdict.power is None:
            return None
        value += verdict.power * verdict.question.doublings
    return value


def _combine_axes(
    value: float, extrapolations: Sequence[TargetExtrapolation], verdicts: Sequence[Verdict]
) -> tuple[Floats, Floats]:
    """Compute the octaves of the value above the target's optimum, and its regret in nats: one
    entry for the estimate and for each posterior draw.
    """
    width = extrapolations[0]
    # The target has one optimum, so its scatter about the power laws counts once, and not once per
    # axis: the largest scatter is used
    scatter = max(
        (at_target.line.target_scatter for at_target in extrapolations),
        key=lambda octaves: float(np.std(octaves)),
    )
    octaves = value - (width.line.at_target - width.line.target_scatter) - scatter
    log_growth, rng = np.zeros_like(octaves), np.random.default_rng(0)
    for at_target, verdict in zip(extrapolations[1:], verdicts[1:], strict=True):
        doublings = verdict.question.doublings
        # All axes were judged with the same random numbers. Shuffling the draws makes them
        # independent. Row 0, the estimate, keeps its place
        order = np.concatenate([[0], 1 + rng.permutation(len(octaves) - 1)])
        octaves = octaves - at_target.line.shift[order]
        log_growth = log_growth + at_target.curvature_trend[order] * doublings
    return octaves, compute_rise(octaves, width.curvature * np.exp(log_growth), width.shape)
