"""Whether wider is better: in muP a wider model's training loss is lower at every step, at one rate
and on one order of the data (Tensor Programs V, arXiv 2203.03466, section 8). Where it is not,
something does not scale as it should, though the optimum may stay. No torch.

Runs of two widths share a seed, so the same batches: the difference of their losses has little of
the data's noise. It is averaged over parts of the run that grow evenly in log steps; the intervals
over seeds hold for all parts and pairs together (Bonferroni).
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
"""Of the steps, at the start: there all models are as bad."""
FREE_PARTS = 2
"""Parts of a curve are not independent: so many count for the degrees of freedom of their common
variance."""
LEAST_SEEDS = 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CurvePair:
    """Training losses of two widths at one rate, by seed."""

    small: int
    large: int
    log2_value: float
    steps: NDArray[np.int64]
    """[S], counted from 1."""
    small_nats: NDArray[np.float64]
    """[K, S], of the narrower model."""
    large_nats: NDArray[np.float64]
    """[K, S], of the wider one, seed by seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedPair:
    """What a pair says: the part of the run in which the wider model does worst."""

    small: int
    large: int
    log2_value: float
    num_seeds: int
    first_step: int
    last_step: int
    excess_nats: float
    """Of the wider model's loss over the narrower one's there."""
    interval: tuple[float, float]
    outcome: Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class WiderVerdict:
    """All pairs."""

    outcome: Outcome
    level: float
    margin_nats: float
    pairs: tuple[JudgedPair, ...]


def judge_wider(
    pairs: Sequence[CurvePair], *, level: float, margin_nats: float
) -> WiderVerdict | None:
    """The verdict on pairs of widths; None where none was run with two seeds, which show the noise.

    Args:
        pairs: at equal rates; each with the steps that both logged.
        level: of the intervals, of all of them together.
        margin_nats: how much worse a wider model may be and the check pass; it fails where that is
            surely worse at all.
    """
    kept = [pair for pair in pairs if len(pair.steps) >= NUM_PARTS]
    excess = [_excess(pair) for pair in kept]
    told = [each_KP for each_KP in excess if len(each_KP) >= LEAST_SEEDS]
    if not told:
        return None
    # Two seeds alone would not tell a part's variance: it is that of all pairs, and no less than
    # that of all parts.
    free = [len(each_KP) - 1 for each_KP in told]
    variance_P = sum(
        n * each_KP.var(axis=0, ddof=1) for n, each_KP in zip(free, told, strict=True)
    ) / sum(free)
    sd_P = np.sqrt(np.maximum(variance_P, np.mean(variance_P)))
    t_value = float(stdtrit(FREE_PARTS * sum(free), 1 - (1 - level) / (2 * len(kept) * NUM_PARTS)))
    judged = tuple(
        _judged(pair, each_KP, t_value * sd_P / math.sqrt(len(each_KP)), margin_nats)
        for pair, each_KP in zip(kept, excess, strict=True)
    )
    outcomes = {pair.outcome for pair in judged}
    outcome: Outcome = (
        "fails" if "fails" in outcomes else "cannot_tell" if "cannot_tell" in outcomes else "passes"
    )
    return WiderVerdict(outcome=outcome, level=level, margin_nats=margin_nats, pairs=judged)


def _excess(pair: CurvePair) -> NDArray[np.float64]:
    """The wider model's loss over the narrower one's, by seed and part of the run, [K, P]."""
    excess_KS = pair.large_nats - pair.small_nats
    return np.stack([excess_KS[:, part].mean(axis=1) for part in parts_of(pair.steps)], axis=1)


def _judged(
    pair: CurvePair, excess_KP: NDArray[np.float64], half_P: NDArray[np.float64], margin_nats: float
) -> JudgedPair:
    mean_P, parts = excess_KP.mean(axis=0), parts_of(pair.steps)
    # Where it is surely worse, else where it may be worst.
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
    """So many parts of the logged steps, evenly in their logarithm but none empty, without the
    first few.
    """
    first = min(len(steps) - number, math.ceil(SKIPPED_SHARE * len(steps)))
    logs = np.log(steps[first:].astype(np.float64))
    wanted = np.linspace(logs[0], logs[-1], number + 1)[1:-1]
    edges = [0, *np.searchsorted(logs, wanted, side="right").tolist(), len(logs)]
    for index in range(1, number):
        edges[index] = min(max(edges[index], edges[index - 1] + 1), len(logs) - (number - index))
    return [slice(first + low, first + high) for low, high in itertools.pairwise(edges)]


def spike_ratio(grad_norms: Sequence[float], first: int = 0) -> float | None:
    """A run's largest gradient norm over its median, from an entry on; None where none is logged,
    or it stays zero.
    """
    norms = np.array(grad_norms[first:], dtype=np.float64)
    middle = float(np.median(norms)) if len(norms) else 0.0
    return float(norms.max()) / middle if middle > 0 else None
