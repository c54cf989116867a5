"""The verdict on two values that were tested one at a time and are launched together.

Each test varies one value and keeps the other fixed. Suppose that the loss near its optimum is a
quadratic form with the curvatures k1 and k2 and the cross term c, all in nats per octave squared.
The two tests measure the regrets R1 and R2 of the two offsets, and r = c / sqrt(k1 k2) measures how
far one value moves the other's optimum. The regret of the pair is then at most (R1 + R2) / (1 -
|r|), since the matrix [[1, r], [r, 1]] has no eigenvalue under 1 - |r|. At the base, where runs are
cheap, four corners one octave away give c as a difference quotient, and the fitted basins give k1
and k2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import numpy as np

from proxies.core.notation import format_nats
from transfer.basin.optimum import Optimum
from transfer.question import CORNERS, Outcome
from transfer.regret.regret import Estimate
from transfer.verdict.verdict import decide

MIN_OCTAVES = 0.25
"""Octaves that a curve must extend to each side of its minimum so that its curvature can be
measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairVerdict:
    """The verdict on a pair of values, from their two tests and the corners."""

    hyperparameters: tuple[str, str]
    outcome: Outcome
    correlation: Estimate | None
    """Correlation r; 0 if neither value moves the other's optimum."""
    regret_nats: Estimate | None
    margin_nats: float
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairQuestion:
    """The known facts about a pair of values: their tests, optima at the base, and the margin."""

    hyperparameters: tuple[str, str]
    labels: tuple[str, str]
    regrets: tuple[Estimate | None, Estimate | None]
    """Regret of each value at the target in nats; None if its test gave none."""
    base: tuple[Optimum | None, Optimum | None]
    """Optimum of each at the base size."""
    noise_nats: float | None
    """Standard deviation of one run."""
    margin_nats: float
    level: float


def judge_pair(
    corners: Sequence[Mapping[tuple[int, int], float | None]], question: PairQuestion
) -> PairVerdict:
    """Judge a pair of values.

    Args:
        corners: Loss in nats at each of `CORNERS`, by seed; None where the run diverged.
        question: What is known about the pair.
    """
    first_label, second_label = question.labels
    r, doubt = _estimate_correlation(corners, question)
    cost = None
    if r is not None and None not in question.regrets:
        max_correlation = max(abs(r.low), abs(r.high))
        first, second = (regret for regret in question.regrets if regret is not None)
        if max_correlation < 1:
            value = (first.value + second.value) / (1 - abs(r.value))
            high = max(value, (first.high + second.high) / (1 - max_correlation))
            cost = Estimate(value=value, low=min(value, max(first.low, second.low)), high=high)
        else:
            doubt = (
                f"how far one moves the other's optimum is not known: r = {r.value:.2f} "
                f"[{r.low:.2f}, {r.high:.2f}]"
            )
    elif not doubt:
        doubt = "one of their tests has no cost"
    reasons = [doubt] if doubt else []
    if cost is not None and r is not None:
        regret_text = (
            f"as a pair they cost at most {format_nats(cost.value)} nats [{cost.low:.4f}, "
            f"{cost.high:.4f}], margin "
        )
        correlation_text = (
            f"at the base one moves the other's optimum by r = {r.value:.2f} [{r.low:.2f}, "
            f"{r.high:.2f}]"
        )
        reasons = [f"{regret_text}{question.margin_nats:g}; {correlation_text}"]
    outcome: Outcome = "cannot_tell" if cost is None else decide(cost, question.margin_nats)
    return PairVerdict(
        hyperparameters=question.hyperparameters,
        outcome=outcome,
        correlation=r,
        regret_nats=cost,
        margin_nats=question.margin_nats,
        reasons=tuple(f"{first_label} with {second_label}: {reason}" for reason in reasons),
    )


def _estimate_correlation(
    corners: Sequence[Mapping[tuple[int, int], float | None]], question: PairQuestion
) -> tuple[Estimate | None, str]:
    """Estimate r with its interval; if that is impossible, return None and the reason."""
    finite = [
        [loss for at in CORNERS if (loss := losses.get(at)) is not None and math.isfinite(loss)]
        for losses in corners
    ]
    complete = [losses for losses in finite if len(losses) == len(CORNERS)]
    curvatures = [_measure_curvature(optimum) for optimum in question.base]
    if not complete:
        reason = (
            "a run with both values an octave off diverged or failed, so their cross term is not "
            "known"
        )
        return None, reason
    if question.noise_nats is None or any(not curvature for curvature in curvatures):
        return None, "a basin at the base has no known curvature"
    scale = math.sqrt(math.prod(curvature for curvature in curvatures if curvature))
    same, opposite = (0, 1), (2, 3)
    # Difference quotient of the cross term, mean over seeds
    cross = fmean(
        (sum(losses[i] for i in same) - sum(losses[i] for i in opposite)) / 4 for losses in complete
    )
    # Error of that mean: each term is the sum of four runs, divided by 4
    error = (
        NormalDist().inv_cdf((1 + question.level) / 2)
        * question.noise_nats
        / (2 * math.sqrt(len(complete)))
    )
    return Estimate(
        value=cross / scale, low=(cross - error) / scale, high=(cross + error) / scale
    ), ""


def _measure_curvature(optimum: Optimum | None) -> float | None:
    """Measure the curvature of a fitted basin about its minimum in nats per octave squared, over
    one octave to each side or as far as the curve extends.

    Return None if the curve extends less than `MIN_OCTAVES`, or is not convex.
    """
    if optimum is None or optimum.log2_value is None or not optimum.curve:
        return None
    xs, ys = (np.array(column) for column in zip(*optimum.curve, strict=True))
    at = optimum.log2_value
    step = min(1.0, at - float(xs[0]), float(xs[-1]) - at)
    if step < MIN_OCTAVES:
        return None
    below, least, above = np.interp([at - step, at, at + step], xs, ys)
    curvature = float(below + above - 2 * least) / step**2
    return curvature if curvature > 0 else None
