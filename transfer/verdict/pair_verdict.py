"""Two values that were tested one at a time, judged as the pair that is launched.

Each test moves one value and holds the other. If the loss near its optimum is a quadratic form with
the curvatures k1 and k2 and the cross term c, all in nats per octave squared, the two tests give
the costs R1 and R2 of the offsets that they see, and r = c / sqrt(k1 k2) says how one value moves
the other's optimum. What the pair costs is then at most (R1 + R2) / (1 - |r|): the matrix [[1, r],
[r, 1]] has no eigenvalue under 1 - |r|. At the base, where runs are cheap, four corners one octave
away give c by its difference quotient, and the fitted basins give k1 and k2.
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

LEAST_OCTAVES = 0.25
"""On each side of a minimum, that a curvature is taken from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairVerdict:
    """What two tests and the corners say of the pair."""

    hyperparameters: tuple[str, str]
    outcome: Outcome
    correlation: Estimate | None
    """r: 0 where neither value moves the other's optimum."""
    regret_nats: Estimate | None
    margin_nats: float
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairQuestion:
    """What is asked of a pair."""

    hyperparameters: tuple[str, str]
    labels: tuple[str, str]
    regrets: tuple[Estimate | None, Estimate | None]
    """What each test found its value to cost at the target, nats; None: it could not say."""
    base: tuple[Optimum | None, Optimum | None]
    """Of each at the base size."""
    noise_nats: float | None
    """Standard deviation of one run."""
    margin_nats: float
    level: float


def judge_pair(
    corners: Sequence[Mapping[tuple[int, int], float | None]], question: PairQuestion
) -> PairVerdict:
    """The verdict on a pair.

    Args:
        corners: by seed, the loss in nats at each of `CORNERS`; None where it diverged.
        question: what is known of each.
    """
    one, other = question.labels
    r, doubt = _correlation(corners, question)
    cost = None
    if r is not None and None not in question.regrets:
        most = max(abs(r.low), abs(r.high))
        first, second = (found for found in question.regrets if found is not None)
        if most < 1:
            value = (first.value + second.value) / (1 - abs(r.value))
            high = max(value, (first.high + second.high) / (1 - most))
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
        found = (
            f"as a pair they cost at most {format_nats(cost.value)} nats [{cost.low:.4f}, "
            f"{cost.high:.4f}], margin "
        )
        moved = (
            f"at the base one moves the other's optimum by r = {r.value:.2f} [{r.low:.2f}, "
            f"{r.high:.2f}]"
        )
        reasons = [f"{found}{question.margin_nats:g}; {moved}"]
    outcome: Outcome = "cannot_tell" if cost is None else decide(cost, question.margin_nats)
    return PairVerdict(
        hyperparameters=question.hyperparameters,
        outcome=outcome,
        correlation=r,
        regret_nats=cost,
        margin_nats=question.margin_nats,
        reasons=tuple(f"{one} with {other}: {said}" for said in reasons),
    )


def _correlation(
    corners: Sequence[Mapping[tuple[int, int], float | None]], question: PairQuestion
) -> tuple[Estimate | None, str]:
    """R with its interval, or why there is none."""
    whole = [
        [loss for at in CORNERS if (loss := found.get(at)) is not None and math.isfinite(loss)]
        for found in corners
    ]
    whole = [losses for losses in whole if len(losses) == len(CORNERS)]
    curvatures = [_curvature(optimum) for optimum in question.base]
    if not whole:
        return (
            None,
            (
                "a run with both values an octave off diverged or failed, so their cross term is "
                "not "
                "known"
            ),
        )
    if question.noise_nats is None or any(not curvature for curvature in curvatures):
        return None, "a basin at the base has no known curvature"
    scale = math.sqrt(math.prod(curvature for curvature in curvatures if curvature))
    same, opposite = (0, 1), (2, 3)
    cross = fmean((sum(f[i] for i in same) - sum(f[i] for i in opposite)) / 4 for f in whole)
    # Of a mean over seeds of four runs' sum over 4.
    error = (
        NormalDist().inv_cdf((1 + question.level) / 2)
        * question.noise_nats
        / (2 * math.sqrt(len(whole)))
    )
    return Estimate(
        value=cross / scale, low=(cross - error) / scale, high=(cross + error) / scale
    ), ""


def _curvature(optimum: Optimum | None) -> float | None:
    """Of a fitted basin about its minimum, nats per octave squared, over an octave each way or as
    far as it goes.

    None where that is under `LEAST_OCTAVES`.
    """
    if optimum is None or optimum.log2_value is None or not optimum.curve:
        return None
    xs, ys = (np.array(column) for column in zip(*optimum.curve, strict=True))
    at = optimum.log2_value
    step = min(1.0, at - float(xs[0]), float(xs[-1]) - at)
    if step < LEAST_OCTAVES:
        return None
    below, least, above = np.interp([at - step, at, at + step], xs, ys)
    curvature = float(below + above - 2 * least) / step**2
    return curvature if curvature > 0 else None
