"""How sharp a verdict a design of runs will give, told before any of it is paid for.

The design itself is simulated: losses are drawn from valleys of the shapes that the verdict averages over, with a noise
and a curvature one has reason to expect, and judged by the very code that will judge the runs: once with nothing lost
at the target, and once with three margins lost to the rule. How often the answer is right, and how wide the intervals
are, is the expectation.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from proxies.core.checks import Checks
from transfer.basin.shapes import LOG_PRIOR, rise
from transfer.design.next_runs import COST_EXPONENTS
from transfer.question import Axis, Point, Question, TransferError
from transfer.verdict.verdict import MIN_DRAWS, Verdict, judge

USUAL_NOISE_NATS = (0.005, 0.015)
USUAL_CURVATURE_NATS = (0.05, 0.1)
"""Nats per octave squared. Both as in our small CPU studies (docs/log.md)."""
MARGINS_LOST = 3.0
CENTRE_OCTAVES = 0.5
"""Half the range in which the base's optimum lies about the middle of the grid."""
USUAL_POWERS: dict[Axis, float] = {"batch": 0.5, "duration": -0.3}
"""What an exponent that will be measured is likely to be (`transfer.regret.regret`); 0 along the other axes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """What a design runs at one size: these offsets, so many seeds each."""

    size: int
    offsets_octaves: tuple[float, ...]
    num_seeds: int
    follows: bool = False
    """Whether the offsets lie about the optimum that smaller sizes predict, not about the base's grid."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.whole("size", "num_seeds")
        checks.that(bool(self.offsets_octaves), f"size {self.size}: no offsets")
        checks.that(all(map(math.isfinite, self.offsets_octaves)), f"size {self.size}: offsets must be finite")
        if checks.problems:
            raise TransferError(checks.problems)

    @property
    def num_runs(self) -> int:
        """At this size."""
        return len(self.offsets_octaves) * self.num_seeds


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """What a design's verdict will be like, at one noise and one curvature."""

    noise_nats: float
    curvature: float
    """Nats per octave squared."""
    num_runs: int
    cost: float
    """Of all runs, in FLOPs where those of a run are given, else in runs at the base size."""
    num_simulations: int
    nothing_lost: dict[str, float]
    """Share of each outcome where the rule is right: `holds` is the right one."""
    margins_lost: dict[str, float] | None
    """The same where it costs three margins: `drifts` is right. None where the rule is measured, not given."""
    regret_high_nats: float | None
    """Median upper bound of the regret where nothing is lost: under the margin is decided."""
    drift_width_octaves: float | None
    """Median width of the drift's interval."""

    @property
    def decided(self) -> float:
        """Share of verdicts that are right, in the worse case."""
        lost = 1.0 if self.margins_lost is None else self.margins_lost.get("drifts", 0.0)
        return min(self.nothing_lost.get("holds", 0.0), lost)


def expect(
    design: Sequence[Cells], question: Question, *, noise_nats: float, curvature: float, seed: int = 0,
    num_simulations: int = 24, flops: Mapping[int, float] | None = None,
) -> Expectation:  # fmt: skip
    """Simulate a design for a question about the learning rate.

    Args:
        design: What would be run, a size each.
        question: What will be asked; its transferred value is not used, the base's fitted optimum is carried.
        noise_nats: Standard deviation of one run about its valley.
        curvature: Of the valley at every size, nats per octave squared.
        seed: Of the draws; the same gives the same.
        num_simulations: Per case; the shares are known to 1 / sqrt of it.
        flops: Of one run at each size; None: they grow as `transfer.design.next_runs` says.

    Raises:
        TransferError: numbers out of range; all of them are named.
    """
    wanted = [
        (len({cells.size for cells in design}) >= 2, "a design of two sizes or more is wanted"),
        (0 < noise_nats < math.inf, f"noise_nats = {noise_nats}: a number > 0 is wanted"),
        (0 < curvature < math.inf, f"curvature = {curvature}: a number > 0 is wanted"),
        (num_simulations >= 1, f"num_simulations = {num_simulations}: a whole number >= 1 is wanted"),
        (
            flops is None or all(cells.size in flops for cells in design),
            "flops: those of a run at every size are wanted",
        ),
    ]
    if problems := [problem for holds, problem in wanted if not holds]:
        raise TransferError(problems)
    asked = dataclasses.replace(question, transferred_log2=None)
    rng = np.random.default_rng(seed)
    right = USUAL_POWERS.get(question.axis, 0.0) - question.built_in if question.power is None else question.power
    wrong = right
    if question.power is not None and question.doublings != 0:
        wrong -= math.sqrt(2 * MARGINS_LOST * question.margin_nats / curvature) / question.doublings

    def judged(power: float) -> list[Verdict]:
        return [
            judge(_drawn(design, asked, power, noise_nats, curvature, rng), asked, seed=number, draws=MIN_DRAWS)
            for number in range(num_simulations)
        ]

    nothing, lost = judged(right), judged(wrong) if wrong != right else []
    bounds = [v.regret_nats.high for v in nothing if v.regret_nats is not None]
    widths = [v.drift.high - v.drift.low for v in nothing if v.drift is not None]
    return Expectation(
        noise_nats=noise_nats,
        curvature=curvature,
        num_runs=sum(cells.num_runs for cells in design),
        cost=sum(cells.num_runs * _price(cells.size, question, flops) for cells in design),
        num_simulations=num_simulations,
        nothing_lost=_shares([v.outcome for v in nothing]),
        margins_lost=_shares([v.outcome for v in lost]) if wrong != right else None,
        regret_high_nats=float(np.median(bounds)) if bounds else None,
        drift_width_octaves=float(np.median(widths)) if widths else None,
    )


def _price(size: int, q: Question, flops: Mapping[int, float] | None) -> float:
    return float((size / q.base_size) ** COST_EXPONENTS[q.axis]) if flops is None else flops[size]


def _shares(outcomes: Sequence[str]) -> dict[str, float]:
    return {outcome: count / len(outcomes) for outcome, count in sorted(Counter(outcomes).items())}


def _drawn(
    design: Sequence[Cells], q: Question, power: float, noise_nats: float, curvature: float, rng: np.random.Generator
) -> list[Point]:
    """Runs of a design whose optimum moves as size^power."""
    base = rng.uniform(-CENTRE_OCTAVES, CENTRE_OCTAVES)
    shape = rng.choice(len(LOG_PRIOR), p=np.exp(LOG_PRIOR) / np.exp(LOG_PRIOR).sum())
    points = []
    for cells in design:
        optimum = base + power * math.log2(cells.size / q.base_size)
        centre = optimum if cells.follows else 0.0
        for offset in cells.offsets_octaves:
            height = float(rise(np.array(centre + offset - optimum), np.array(curvature), np.array(shape)))
            for number in range(cells.num_seeds):
                loss = 3.0 + height + float(rng.normal(0.0, noise_nats))
                points.append(Point(size=cells.size, log2_value=centre + offset, loss_nats=loss, seed=number))
    return points
