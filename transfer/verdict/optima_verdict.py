"""A verdict from published optima alone: there are no losses, so no regret in nats.

Octaves decide the outcome. An optimum read off a grid is known to half a step at best, so the noise
of an optimum is the larger of the scatter about the line and the rounding of the grid (step /
sqrt(12)). Intervals use Student's t distribution.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

from proxies.core.notation import counted
from transfer.question import Outcome, Question, TransferError, at_size
from transfer.regret.drift import LINES, draw_walk
from transfer.regret.reach import describe_assumption, describe_reach, find_largest_ratio
from transfer.regret.regret import Estimate
from transfer.verdict.verdict import Verdict

MIN_OPTIMA = 3
"""Minimum number of optima: any two lie on a line."""
TOLERANCE_OCTAVES = 0.5
"""Largest offset that is allowed, in octaves: half an octave costs about 0.01 nats or less in the
basins we know (0.06 nats / octave**2)."""
ROUNDING_OCTAVES = 0.01
"""Distance in octaves below which two optima count as one grid point with different rounding."""
WALK_DRAWS = 20_000
"""Number of draws of the walk beyond the runs, for its quantile."""
USUAL_STEP_OCTAVES = 1.0
"""Grid step in octaves that is assumed if all optima are equal."""


def judge_optima(optima: Sequence[tuple[int, float]], question: Question) -> Verdict:
    """Judge pairs of (size, log2 of the optimal value).

    The outcome is `holds` if the whole interval of the transferred value lies within half an octave
    of the target's extrapolated optimum; `drifts` if the whole interval lies beyond and the drift's
    interval excludes 0; else `cannot_tell`. The regret is None, and the margin is only passed on.

    Raises:
        TransferError: The optima do not answer the question; all problems are listed.
    """
    q, base = question, question.transferred_log2
    if base is None:
        at_base = [log2_value for size, log2_value in optima if size == q.base_size]
        # If there are several optima at the base, use their mean
        base = statistics.fmean(at_base) if at_base else None
    _check_optima(optima, q, base)
    assert base is not None
    drift, at_target = _fit_line(optima, q)
    power = drift.value if q.power is None else q.power
    value = base + power * q.doublings
    offset = Estimate(
        value=value - at_target.value, low=value - at_target.high, high=value - at_target.low
    )
    outcome = _decide(drift, offset)
    reasons = _explain(drift, offset, q)
    largest_size = max(size for size, _ in optima)
    assumption, ratio = describe_assumption(q, largest_size), None
    if outcome != "drifts":
        ratio = find_largest_ratio(
            lambda size: _holds_at(size, optima, q, base), largest_size, q.target_size, outcome
        )
        if assumption is not None:
            reasons.append(f"{assumption}; {describe_reach(ratio, q, largest_size)}")
    return Verdict(
        question=q,
        outcome=outcome,
        drift=drift,
        power=power,
        offset=offset,
        regret_nats=None,
        transferred_log2=value,
        cost_of_2x_off_nats=None,
        noise_nats=None,
        noise_is_known=False,
        optima=(),
        bounded=None,
        reasons=tuple(reasons),
        what_to_run=(),
        control=None,
        assumption=assumption,
        largest_ratio=ratio,
    )


def _explain(drift: Estimate, offset: Estimate, q: Question) -> list[str]:
    """Return the reasons of a verdict: drift and offset with their intervals."""
    drift_octaves, offset_octaves = (
        f"{e.value:+.2f} octaves [{e.low:+.2f}, {e.high:+.2f}]" for e in (drift, offset)
    )
    target = at_size(q.axis, q.target_size)
    return [
        f"per doubling the optimum moves by {drift_octaves}",
        (
            f"at {target} the transferred value lies {offset_octaves} from it; the tolerance is "
            f"{TOLERANCE_OCTAVES:g}"
        ),
        "no losses were given, so the cost in nats is not known: octaves decide the outcome",
    ]


def _holds_at(size: int, optima: Sequence[tuple[int, float]], q: Question, base: float) -> bool:
    """Return whether the value would hold at a target of another size."""
    asked = dataclasses.replace(q, target_size=size)
    drift, at_target = _fit_line(optima, asked)
    value = base + (drift.value if q.power is None else q.power) * asked.doublings
    return max(abs(value - at_target.low), abs(value - at_target.high)) <= TOLERANCE_OCTAVES


def _check_optima(optima: Sequence[tuple[int, float]], q: Question, base: float | None) -> None:
    num_sizes = len({size for size, _ in optima})
    are_valid = all(size >= 1 and math.isfinite(log2_value) for size, log2_value in optima)
    checks = [
        (
            num_sizes >= MIN_OPTIMA,
            (
                f"optima at {counted(num_sizes, 'size')}: there must be at least {MIN_OPTIMA}, to "
                "see their scatter"
            ),
        ),
        (are_valid, "sizes must be at least 1, and values finite"),
        (
            base is not None,
            f"{at_size(q.axis, q.base_size)} has no optimum: give the value to transfer",
        ),
    ]
    problems = [problem for holds, problem in checks if not holds]
    if problems:
        raise TransferError(problems)


def _fit_line(optima: Sequence[tuple[int, float]], q: Question) -> tuple[Estimate, Estimate]:
    """Fit slope and value at the target by ordinary least squares, log2 against log2."""
    x = np.log2([size for size, _ in optima]) - math.log2(q.target_size)
    y = np.array([log2_value for _, log2_value in optima])
    design = np.stack([np.ones_like(x), x], axis=1)
    covariance = np.linalg.inv(design.T @ design)
    coefficients = covariance @ design.T @ y
    free = len(y) - 2
    # Noise variance: the larger of scatter and grid rounding
    gaps = np.diff(np.unique(y))
    gaps = gaps[gaps > ROUNDING_OCTAVES]
    step = float(gaps.min()) if gaps.size else USUAL_STEP_OCTAVES
    scatter = float(((y - design @ coefficients) ** 2).sum()) / free
    variance = max(scatter, min(step, USUAL_STEP_OCTAVES) ** 2 / 12)
    reach = stdtrit(free, (1 + q.level) / 2) * np.sqrt(variance * np.diag(covariance))
    # Beyond the runs the line may follow a random walk, which the runs cannot rule out.
    walk = draw_walk(
        WALK_DRAWS, float(-x.max()), LINES[q.axis].walk_octaves, np.random.default_rng(0)
    )
    reach[0] = math.hypot(reach[0], float(np.quantile(walk, (1 + q.level) / 2)))
    low, high = (coefficients - reach).tolist(), (coefficients + reach).tolist()
    at_target, slope = (
        Estimate(value=value, low=low[i], high=high[i])
        for i, value in enumerate(coefficients.tolist())
    )
    return slope, at_target


def _decide(drift: Estimate, offset: Estimate) -> Outcome:
    if max(abs(offset.low), abs(offset.high)) <= TOLERANCE_OCTAVES:
        return "holds"
    moves = not drift.low <= 0 <= drift.high
    beyond = offset.low > TOLERANCE_OCTAVES or offset.high < -TOLERANCE_OCTAVES
    return "drifts" if moves and beyond else "cannot_tell"
