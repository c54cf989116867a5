"""The learning rate at a target that is larger in several ways at once: wider, deeper, longer, in
larger batches.

Each axis was measured by itself, at the base of all others. What follows takes their shifts in
octaves as adding up, and their changes of the basin's curvature as multiplying, which is what power
laws do; no run tests it.
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
"""A target within 7 % of the base needs no test on an axis."""


def differs(target_size: int, base_size: int) -> bool:
    """Whether a target lies so far from the base that an axis wants a test."""
    return abs(math.log2(target_size / base_size)) > NEGLIGIBLE_DOUBLINGS


@dataclass(frozen=True, kw_only=True, slots=True)
class JointVerdict:
    """The verdict on the learning rate over all axes."""

    outcome: Outcome
    transferred_log2: float | None
    """The rate to launch with, at the target."""
    offset: Estimate | None
    """Octaves by which it lies above the target's optimum."""
    regret_nats: Estimate | None
    margin_nats: float
    level: float
    axes: tuple[Axis, ...]
    """Tested."""
    untested: tuple[Axis, ...]
    """On which the target differs from the base, without a test."""
    reasons: tuple[str, ...]
    assumptions: tuple[str, ...] = ()
    """What it takes for granted beyond the runs, by axis."""


def judge_together(
    judged: Sequence[DetailedVerdict], doublings: Mapping[Axis, float]
) -> JointVerdict:
    """All axes at once.

    Args:
        judged: The learning rate's verdicts, one for each axis and of as many draws, width's first:
            its base optimum is the one that is carried.
        doublings: From base to target, of every axis on which the two can differ.
    """
    verdicts = [found.verdict for found in judged]
    axes = tuple(v.question.axis for v in verdicts)
    rows = [found.at_target for found in judged if found.at_target is not None]
    first, value = verdicts[0].question, _value(verdicts)
    untested = tuple(
        a for a, by in doublings.items() if abs(by) > NEGLIGIBLE_DOUBLINGS and a not in axes
    )
    doubts = [_named(v) for v in verdicts if _unusable(v) or _doubted(v)]
    doubts += [
        f"{axis}: the target is {format_factor(2.0 ** doublings[axis])} times the base, but no run "
        "tests that axis"
        for axis in untested
    ]
    outcome: Outcome = "cannot_tell"
    costs, offset, cost = [], None, None
    if len(rows) == len(judged) and value is not None:
        octaves, nats = _combined(value, rows, verdicts)
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


def _named(verdict: Verdict) -> str:
    return f"{verdict.question.axis}: {'; '.join(verdict.reasons)}"


def _unusable(verdict: Verdict) -> bool:
    """Whether a size has no optimum, or there is one size only."""
    return len(verdict.optima) < 2 or any(optimum.status != "ok" for optimum in verdict.optima)


def _doubted(verdict: Verdict) -> bool:
    """Whether its interval decides and it does not: a run alone makes the drift, or a cliff is
    near.
    """
    cost = verdict.regret_nats
    if verdict.outcome != "cannot_tell" or cost is None:
        return False
    return decide(cost, verdict.question.margin_nats) != "cannot_tell"


def _value(verdicts: Sequence[Verdict]) -> float | None:
    """The rate at the target: the first axis's base, moved by every axis's power."""
    value = verdicts[0].transferred_log2
    for verdict in verdicts[1:]:
        if value is None or verdict.power is None:
            return None
        value += verdict.power * verdict.question.doublings
    return value


def _combined(
    value: float, rows: Sequence[AtTarget], verdicts: Sequence[Verdict]
) -> tuple[Floats, Floats]:
    """Octaves above the optimum, and cost in nats: one entry per row."""
    first = rows[0]
    # The target has one optimum, which lies off what power laws say once, and not once for every
    # axis.
    scatter = max(
        (there.line.target_scatter for there in rows), key=lambda octaves: float(np.std(octaves))
    )
    octaves = value - (first.line.at_target - first.line.target_scatter) - scatter
    log_growth, rng = np.zeros_like(octaves), np.random.default_rng(0)
    for there, verdict in zip(rows[1:], verdicts[1:], strict=True):
        doublings = verdict.question.doublings
        # Axes were judged with the same random numbers: only shuffled are their draws those of
        # independent evidence.
        row = np.concatenate([[0], 1 + rng.permutation(len(octaves) - 1)])
        octaves = octaves - there.line.shift[row]
        log_growth = log_growth + there.curvature.trend[row] * doublings
    return octaves, rise(octaves, first.curvature.at_target * np.exp(log_growth), first.shape)
