"""The cheapest runs that would help a verdict which cannot be given yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transfer.optimum import MIN_RATES, Optimum, Point, best_rate, finite_rates

MOST_SEEDS = 8
"""Beyond this many seeds at a width another width is the better purchase."""
COST_EXPONENT = 2.0
"""A run's FLOPs grow with the square of width, steps being equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """Runs to add: one width, one rate, some seeds that were not run there yet."""

    width: int
    log2_lr: float
    num_seeds: int
    reason: str

    def __str__(self) -> str:
        """As a person would say it: `run width 128 at 2^-3 (2 seeds): ...`."""
        seeds = "1 seed" if self.num_seeds == 1 else f"{self.num_seeds} seeds"
        return f"run width {self.width} at {power(self.log2_lr)} ({seeds}): {self.reason}"


def power(log2_lr: float) -> str:
    """`2^-6`, or `2^-5.58` between whole powers."""
    return f"2^{round(log2_lr, 2):g}"


def mend(optimum: Optimum, points: Sequence[Point]) -> list[Suggestion]:
    """What makes the optimum of one width usable. `points` are the runs of that width."""
    seeds, rates, best = len({p.seed for p in points}), finite_rates(points), best_rate(points)
    if best is None:
        low = min(p.log2_lr for p in points)
        return [_run(optimum.width, low - k, seeds, "every rate here diverged") for k in range(2, 2 + MIN_RATES)]
    step = float(np.median(np.diff(rates))) if len(rates) > 1 else 1.0
    if optimum.status == "flat":
        core = sorted(rates, key=lambda rate: abs(rate - best))[:MIN_RATES]
        why = "the valley is no deeper than the noise"
        ends = [_run(optimum.width, rates[0] - step, seeds, why)]
        return ends + [_run(optimum.width, rate, 2, why) for rate in sorted(core)]
    above = _above(points, rates, step)
    if optimum.status == "too_few":
        wanted = [x for k in (1, 2, 3) for x in (best - k * step, best + k * step)]
        new = [x for x in wanted if x not in rates and rates[0] - 3 * step <= x <= above + 1e-9]
        why = f"{len(rates)} finished rates, {MIN_RATES} are needed"
        return [_run(optimum.width, x, seeds, why) for x in new[: MIN_RATES - len(rates)]]
    middle = (rates[0] + rates[-1]) / 2
    where, end = (above, "upper") if best > middle else (rates[0] - step, "lower")
    return [_run(optimum.width, where, seeds, f"the optimum lies at or beyond the {end} end of the rates run")]


def again(point: Point) -> Suggestion:
    """Repeat one run with other seeds: does it stand?"""
    return _run(point.width, point.log2_lr, 2, "the verdict rests on a single run here")


def _above(points: Sequence[Point], rates: Sequence[float], step: float) -> float:
    """The next rate above the grid: halfway to the cliff where there is one."""
    cliff = min((p.log2_lr for p in points if p.loss_nats is None and p.log2_lr > rates[-1]), default=None)
    return rates[-1] + step if cliff is None else (rates[-1] + cliff) / 2


def _run(width: int, log2_lr: float, num_seeds: int, reason: str) -> Suggestion:
    return Suggestion(width=width, log2_lr=float(log2_lr), num_seeds=num_seeds, reason=reason)


def sharpen(
    points: Sequence[Point],
    optima: Sequence[Optimum],
    *,
    pull: Sequence[float],
    sds: Sequence[float],
    share: float,
    target_width: int,
) -> list[Suggestion]:
    """What narrows the interval of the target's optimum, cheapest first.

    Args:
        points: All runs of the arm.
        optima: Usable optima, as many as `pull` and `sds`.
        pull: How far the target's optimum moves with each width's.
        sds: Standard deviation of each width's optimum, octaves.
        share: The standard deviation that would decide, as a share of today's.
        target_width: Never suggested itself.
    """  # fmt: skip
    counts = [len({p.seed for p in points if p.width == o.width}) for o in optima]
    variance = (np.asarray(pull) * np.asarray(sds)) ** 2
    have, now = np.array(counts, dtype=float), np.array(counts, dtype=float)
    cost = np.array([o.width for o in optima], dtype=float) ** COST_EXPONENT
    while (variance * have / now).sum() > share**2 * variance.sum() and now.max() < MOST_SEEDS:
        now[int(np.argmax(variance * have * (1 / now - 1 / (now + 1)) / cost))] += 1
    enough = bool((variance * have / now).sum() <= share**2 * variance.sum())
    found = [
        _run(o.width, rate, int(more), "more seeds sharpen the optimum at the target")
        for o, more in zip(optima, now - have, strict=True)
        if more > 0
        for rate in _core(points, o)
    ]
    wider = 2 * max(o.width for o in optima)
    if enough or wider >= target_width:
        return found
    why = f"seeds alone would take more than {MOST_SEEDS}; a wider proxy shortens the extrapolation"
    last = max(optima, key=lambda o: o.width)
    return [_run(wider, rate, max(counts), why) for rate in _core(points, last)] + found


def _core(points: Sequence[Point], optimum: Optimum) -> list[float]:
    """The four rates nearest to an optimum."""
    rates = finite_rates([p for p in points if p.width == optimum.width])
    assert optimum.log2_lr is not None
    centre = optimum.log2_lr
    return sorted(sorted(rates, key=lambda rate: abs(rate - centre))[:MIN_RATES])
