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

from proxies.core.notation import format_factor
from transfer.basin.shapes import Floats, rise
from transfer.question import Axis, Outcome, at_size
from transfer.regret.regret import AtTarget, Estimate, estimate, regret
from transfer.verdict import reasons as say
from transfer.verdict.verdict import DetailedVerdict, Verdict, decide

NEGLIGIBLE_DOUBLINGS = 0.1
"""Doublings within which an axis needs no test: a target within 7 % of the base."""


def differs(target_size: int, base_size: int) -> bool:
    """Return whether a target lies far enough from the base that its axis needs a test."""
    return abs(math.log2(target_size / base_size)) > NEGLIGIBLE_DOUBLINGS


@dataclass(frozen=True, kw_only=True, slots=True)
class JointVerdict:
    """The verdict on the learning rate over all axes."""

    outcome: Outcome
    transferred_log2: float | None
    """Log2 of the learning rate to launch with at the target."""
    offset: Estimate | None
    """Octaves by which that rate lies above the target's optimum."""
    regret_nats: Estimate | None
    margin_nats: float
    level: float
    axes: tuple[Axis, ...]
    """Axes that were tested."""
    untested: tuple[Axis, ...]
    """Axes on which the target differs from the base without a test."""
    reasons: tuple[str, ...]
    assumptions: tuple[str, ...] = ()
    """Assumptions beyond the runs, by axis."""


def judge_together(
    judged: Sequence[DetailedVerdict], doublings: Mapping[Axis, float]
) -> JointVerdict:
    """Judge all axes at once.

    Args:
        judged: Verdicts on the learning rate, one for each axis, with the same number of draws.
            Width comes first: its base optimum is the one that is transferred.
        doublings: Doublings from base to target, for every axis on which the two can differ.
    """
    verdicts = [detailed.verdict for detailed in judged]
    axes = tuple(v.question.axis for v in verdicts)
    rows = [detailed.at_target for detailed in judged if detailed.at_target is not None]
    first, value = verdicts[0].question, _compute_value(verdicts)
    untested = tuple(
        a for a, by in doublings.items() if abs(by) > NEGLIGIBLE_DOUBLINGS and a not in axes
    )
    doubts = [_format_reasons(v) for v in verdicts if _has_unusable_optimum(v) or _is_doubted(v)]
    doubts += [
        f"{axis}: the target is {format_factor(2.0 ** doublings[axis])} times the base, but no run "
        "tests that axis"
        for axis in untested
    ]
    outcome: Outcome = "cannot_tell"
    costs, offset, cost = [], None, None
    if len(rows) == len(judged) and value is not None:
        octaves, nats = _combine_axes(value, rows, verdicts)
        offset = estimate(octaves, first.level)
        cost = regret(nats, octaves, first.level, max(there.most_nats for there in rows))
        outcome = "cannot_tell" if doubts else decide(cost, first.margin_nats)
        where = ", ".join(at_size(v.question.axis, v.question.target_size) for v in verdicts)
        costs = [
            f"at {where} together it costs {say.cost(cost, first)}, margin {first.margin_nats:g}"
        ]
    assumptions = tuple(
        f"{v.question.axis}: {v.assumption}" for v in verdicts if v.assumption is not None
    )
    if outcome == "holds":
        costs += assumptions
    return JointVerdict(
        outcome=outcome,
        transferred_log2=value,
        offset=offset,
        regret_nats=cost,
        margin_nats=first.margin_nats,
        level=first.level,
        axes=axes,
        untested=untested,
        reasons=(*costs, *doubts) or ("there is no rate to transfer",),
        assumptions=assumptions,
    )


def _format_reasons(verdict: Verdict) -> str:
    return f"{verdict.question.axis}: {'; '.join(verdict.reasons)}"


def _has_unusable_optimum(verdict: Verdict) -> bool:
    """Return whether a size has no usable optimum, or there is only one size."""
    return len(verdict.optima) < 2 or any(optimum.status != "ok" for optimum in verdict.optima)


def _is_doubted(verdict: Verdict) -> bool:
    """Return whether the interval decides but the verdict does not, because the drift rests on a
    single run or divergence is near.
    """
    cost = verdict.regret_nats
    if verdict.outcome != "cannot_tell" or cost is None:
        return False
    return decide(cost, verdict.question.margin_nats) != "cannot_tell"


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
    value: float, rows: Sequence[AtTarget], verdicts: Sequence[Verdict]
) -> tuple[Floats, Floats]:
    """Compute the octaves above the optimum and the regret in nats: one entry per row."""
    first = rows[0]
    # The target has one optimum, so its scatter about the power laws counts once, and not once per
    # axis.
    scatter = max(
        (there.line.target_scatter for there in rows), key=lambda octaves: float(np.std(octaves))
    )
    octaves = value - (first.line.at_target - first.line.target_scatter) - scatter
    log_growth, rng = np.zeros_like(octaves), np.random.default_rng(0)
    for there, verdict in zip(rows[1:], verdicts[1:], strict=True):
        doublings = verdict.question.doublings
        # All axes were judged with the same random numbers. Shuffling makes their draws
        # independent.
        row = np.concatenate([[0], 1 + rng.permutation(len(octaves) - 1)])
        octaves = octaves - there.line.shift[row]
        log_growth = log_growth + there.curvature.trend[row] * doublings
    return octaves, rise(octaves, first.curvature.at_target * np.exp(log_growth), first.shape)
