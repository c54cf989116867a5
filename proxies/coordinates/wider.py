"""Check whether wider models are better at every step.

In muP, the training loss of a wider model is lower at every step, at the same learning rate and on
the same order of the data (Tensor Programs V, arXiv 2203.03466, section 8). If it is not, something
does not scale as it should, although the optimum may still transfer.

Runs of two widths share a seed and so the batches, so the difference of their losses has little of
the data's noise. It is averaged over parts of the run that are even in the logarithm of the step.
The intervals over seeds hold for all parts and pairs jointly (Bonferroni). This module does not
import torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Outcome = Literal["passes", "fails", "cannot_tell"]
NUM_PARTS = 8
SKIPPED_SHARE = 0.02
"""Share of the steps that is left out at the start, where all models are equally bad."""
FREE_PARTS = 2
"""Number of parts that count for the degrees of freedom of the pooled variance, because the parts
of a curve are not independent."""
MIN_SEEDS = 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CurvePair:
    """The training losses of two widths at one learning rate."""

    small: int
    """Width of the narrower model."""
    large: int
    """Width of the wider model."""
    log2_value: float
    """Base-2 logarithm of the learning rate."""
    steps: NDArray[np.int64]
    """Steps of the losses, counted from 1, [S]."""
    small_nats: NDArray[np.float64]
    """Losses of the narrower model in nats, [K, S], by seed."""
    large_nats: NDArray[np.float64]
    """Losses of the wider model in nats, [K, S], in the same order of seeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedPair:
    """The verdict on a pair, from the part of the run in which the wider model does worst."""

    small: int
    large: int
    log2_value: float
    num_seeds: int
    first_step: int
    last_step: int
    excess_nats: float
    """Loss of the wider model minus loss of the narrower one in that part, in nats."""
    interval: tuple[float, float]
    outcome: Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class WiderVerdict:
    """The verdict on all pairs of widths."""

    outcome: Outcome
    level: float
    margin_nats: float
    pairs: tuple[JudgedPair, ...]


def judge_wider(
    pairs: Sequence[CurvePair], *, level: float, margin_nats: float
) -> WiderVerdict | None:
    """Judge pairs of widths; None if no pair has two seeds, which are needed to see the noise.

    Args:
        pairs: Pairs at equal learning rates, each with the steps that both widths logged.
        level: Joint level of all intervals.
        margin_nats: Maximum excess loss of a wider model at which the check passes. It fails if the
            excess is above 0 with that confidence.
    """
    kept = [pair for pair in pairs if len(pair.steps) >= NUM_PARTS]
    excesses = [_compute_excess(pair) for pair in kept]
    repeated = [excess_KP for excess_KP in excesses if len(excess_KP) >= MIN_SEEDS]
    if not repeated:
        return None

    # Pooled variance of each part. Two seeds are too few to estimate the variance of a part in one
    # pair, so it is averaged over the pairs, and is not smaller than the mean over the parts.
    degrees = [len(excess_KP) - 1 for excess_KP in repeated]
    total_P = sum(
        degree * excess_KP.var(axis=0, ddof=1)
        for degree, excess_KP in zip(degrees, repeated, strict=True)
    )
    variance_P = total_P / sum(degrees)
    sd_P = np.sqrt(np.maximum(variance_P, np.mean(variance_P)))

    # Joint intervals over all pairs and parts (Bonferroni).
    num_intervals = len(kept) * NUM_PARTS
    t_value = float(stdtrit(FREE_PARTS * sum(degrees), 1 - (1 - level) / (2 * num_intervals)))
    verdicts = tuple(
        _judge_pair(pair, excess_KP, t_value * sd_P / math.sqrt(len(excess_KP)), margin_nats)
        for pair, excess_KP in zip(kept, excesses, strict=True)
    )
    outcomes = {verdict.outcome for verdict in verdicts}
    outcome: Outcome = (
        "fails" if "fails" in outcomes else "cannot_tell" if "cannot_tell" in outcomes else "passes"
    )
    return WiderVerdict(outcome=outcome, level=level, margin_nats=margin_nats, pairs=verdicts)


def _compute_excess(pair: CurvePair) -> NDArray[np.float64]:
    """Return the wider model's loss minus the narrower one's, [K, P], by seed and part."""
    excess_KS = pair.large_nats - pair.small_nats
    return np.stack([excess_KS[:, part].mean(axis=1) for part in parts_of(pair.steps)], axis=1)


def _judge_pair(
    pair: CurvePair, excess_KP: NDArray[np.float64], half_P: NDArray[np.float64], margin_nats: float
) -> JudgedPair:
    """Judge one pair by the part of the run in which the wider model does worst.

    Args:
        pair: The pair.
        excess_KP: Excess of the wider model, by seed and part.
        half_P: Half the width of the interval of each part.
        margin_nats: Maximum excess at which the pair passes.
    """
    mean_P, parts = excess_KP.mean(axis=0), parts_of(pair.steps)
    # If a part is worse for certain, take the largest lower bound, else the largest upper bound.
    worst = int(
        (mean_P - half_P).argmax() if (mean_P > half_P).any() else (mean_P + half_P).argmax()
    )
    low, high = float(mean_P[worst] - half_P[worst]), float(mean_P[worst] + half_P[worst])
    return JudgedPair(
        small=pair.small,
        large=pair.large,
        log2_value=pair.log2_value,
        num_seeds=len(excess_KP),
        first_step=int(pair.steps[parts[worst]][0]),
        last_step=int(pair.steps[parts[worst]][-1]),
        excess_nats=float(mean_P[worst]),
        interval=(low, high),
        outcome="fails" if low > 0 else "passes" if high < margin_nats else "cannot_tell",
    )


def parts_of(steps: NDArray[np.int64], number: int = NUM_PARTS) -> list[slice]:
    """Divide the logged steps into parts that are even in the logarithm of the step.

    The first few steps are left out, and no part is empty.

    Args:
        steps: Logged steps, increasing, at least as many as parts.
        number: Number of parts.
    """
    first = min(len(steps) - number, math.ceil(SKIPPED_SHARE * len(steps)))
    logs = np.log(steps[first:].astype(np.float64))
    boundaries = np.linspace(logs[0], logs[-1], number + 1)[1:-1]
    edges = [0, *np.searchsorted(logs, boundaries, side="right").tolist(), len(logs)]
    # Move the edges apart where a part would be empty.
    for index in range(1, number):
        edges[index] = min(max(edges[index], edges[index - 1] + 1), len(logs) - (number - index))
    return [slice(first + low, first + high) for low, high in itertools.pairwise(edges)]


def spike_ratio(grad_norms: Sequence[float], first: int = 0) -> float | None:
    """Return the ratio of a run's largest gradient norm to its median.

    Args:
        grad_norms: Gradient norm of each step.
        first: Index of the first norm that counts.

    Returns:
        The ratio; None if there is no norm, or the median is zero.
    """
    norms = np.array(grad_norms[first:], dtype=np.float64)
    median = float(np.median(norms)) if len(norms) else 0.0
    return float(norms.max()) / median if median > 0 else None
