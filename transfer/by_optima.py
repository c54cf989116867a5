"""A verdict from optima alone, as papers and pull requests print them: no losses, so no cost in nats.

The outcome is by octaves. An optimum read off a grid is known to half a step at best, so the noise of an optimum is
the larger of the scatter about the line and the rounding of the grid (step / sqrt(12)); intervals are Student's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from transfer.optimum import TransferError
from transfer.regret import Estimate
from transfer.verdict import Outcome, Verdict

MIN_OPTIMA = 3
"""Two lie on a line whatever they are."""
TOLERANCE_OCTAVES = 0.5
"""An offset under half an octave costs about 0.01 nats or less in the valleys we know (0.06 nats / octave**2)."""
ROUNDING_OCTAVES = 0.01
"""Optima closer than this are one grid point, written with other digits."""
USUAL_STEP_OCTAVES = 1.0
"""Grid step assumed when all optima are equal."""


def judge_optima(
    optima: Sequence[tuple[int, float]],
    *,
    target_width: int,
    base_width: int,
    transferred_log2_lr: float | None = None,
    margin_nats: float = 0.01,
    level: float = 0.9,
) -> Verdict:
    """Judge (width, log2 of the optimal learning rate) pairs.

    `holds` when the transferred rate lies within half an octave of the target's extrapolated optimum with
    its whole interval, `drifts` when beyond with its whole interval and the drift's interval excludes 0; else
    `cannot_tell`. The regret is None; `margin_nats` is only handed on.

    Raises:
        TransferError: arguments that make no question; all of them are named.
    """
    transferred = transferred_log2_lr
    if transferred is None:
        transferred = next((log2_lr for width, log2_lr in optima if width == base_width), None)
    _check(optima, target_width, base_width, transferred, level)
    assert transferred is not None
    drift, at_target = _line(optima, target_width, level)
    offset = Estimate(
        value=transferred - at_target.value, low=transferred - at_target.high, high=transferred - at_target.low
    )
    outcome = _decide(drift, offset)
    moved, reach = (f"{e.value:+.2f} octaves [{e.low:+.2f}, {e.high:+.2f}]" for e in (drift, offset))
    reasons = (
        f"per doubling the optimum moves by {moved}",
        f"at width {target_width} the transferred rate lies {reach} from it; {TOLERANCE_OCTAVES:g} are tolerated",
        "no losses were given, so the cost in nats is not known: the outcome is by octaves",
    )
    return Verdict(
        outcome=outcome, drift=drift, offset=offset, regret_nats=None, margin_nats=margin_nats, level=level,
        target_width=target_width, base_width=base_width, transferred_log2_lr=transferred,
        cost_of_2x_off_nats=None, noise_nats=None, optima=(), reasons=reasons, what_to_run=(), control=None,
    )  # fmt: skip


def _check(
    optima: Sequence[tuple[int, float]], target_width: int, base_width: int, transferred: float | None, level: float
) -> None:
    num_widths = len({width for width, _ in optima})
    whole = target_width >= 1 and all(width >= 1 and math.isfinite(log2_lr) for width, log2_lr in optima)
    wanted = [
        (num_widths >= MIN_OPTIMA, f"optima at {num_widths} widths: {MIN_OPTIMA} are needed to see their scatter"),
        (whole, "widths >= 1 and finite rates are wanted"),
        (transferred is not None, f"base_width = {base_width} has no optimum: give the rate to transfer"),
        (0 < level < 1, f"level = {level}: a number between 0 and 1 is wanted"),
    ]
    problems = [problem for holds, problem in wanted if not holds]
    if problems:
        raise TransferError(problems)


def _line(optima: Sequence[tuple[int, float]], target_width: int, level: float) -> tuple[Estimate, Estimate]:
    """Slope, and the line's value at the target: ordinary least squares, log2 against log2."""
    x = np.log2([width for width, _ in optima]) - math.log2(target_width)
    y = np.array([log2_lr for _, log2_lr in optima])
    design = np.stack([np.ones_like(x), x], axis=1)
    covariance = np.linalg.inv(design.T @ design)
    coefficients = covariance @ design.T @ y
    free = len(y) - 2
    gaps = np.diff(np.unique(y))
    gaps = gaps[gaps > ROUNDING_OCTAVES]
    step = float(gaps.min()) if gaps.size else USUAL_STEP_OCTAVES
    scatter = float(((y - design @ coefficients) ** 2).sum()) / free
    variance = max(scatter, min(step, USUAL_STEP_OCTAVES) ** 2 / 12)
    reach = stats.t.ppf((1 + level) / 2, free) * np.sqrt(variance * np.diag(covariance))
    low, high = (coefficients - reach).tolist(), (coefficients + reach).tolist()
    at_target, slope = (
        Estimate(value=value, low=low[i], high=high[i]) for i, value in enumerate(coefficients.tolist())
    )
    return slope, at_target


def _decide(drift: Estimate, offset: Estimate) -> Outcome:
    if max(abs(offset.low), abs(offset.high)) <= TOLERANCE_OCTAVES:
        return "holds"
    moves = not drift.low <= 0 <= drift.high
    beyond = offset.low > TOLERANCE_OCTAVES or offset.high < -TOLERANCE_OCTAVES
    return "drifts" if moves and beyond else "cannot_tell"
