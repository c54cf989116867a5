"""The verdict: does the value tuned at the base size still serve at the target, and if not, at what cost?

The regret is that of one fixed number, the value that would actually be launched with, at the target against
the target's own optimum. How uncertain the base optimum was therefore does not enter it: whether tuned luckily
or not, that value is what the main run would get. All uncertainty is that of the target's basin, extrapolated from
the sizes that were run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from proxies.core.hyperparameters import LEARNING_RATE
from transfer.basin.optimum import Optima, Optimum, find_optima, noise_is_known, place_at
from transfer.basin.spikes import find_outvoted, find_suspect
from transfer.design.next_runs import Suggestion, again, mend, plan_round, sharpen_bounded
from transfer.question import Outcome, Point, Question, TransferError
from transfer.regret.bounded_regret import BoundedRegret, judge_bounded, obstacle
from transfer.regret.reach import describe_assumption, describe_reach, find_largest_ratio
from transfer.regret.regret import (
    AtTarget,
    Estimate,
    cost_of_2x,
    extrapolate,
    offset_of,
    regret_of,
)
from transfer.verdict import reasons as say

MIN_DRAWS = 200
CLIFF_OCTAVES = 1.0
"""Divergence nearer than this to the transferred rate leaves no margin for a cliff that moves with size."""
MOST_SEEDS_IN_DOUBT = 2
"""Rates with more runs than this are not suspected of resting on one of them."""
MOST_CULPRITS = 3
"""Runs without which all sizes are fitted anew: each such fit takes a tenth of a second."""
SUSPECT_DRAWS, SUSPECT_NOISE_SHARE = 600, 0.6
"""A suspicious run is repeated if without it the noise falls to this share; draws of that fit."""
LEAST_SD_OCTAVES = 0.01
"""No optimum outweighs the others by more than this says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the runs say about transfer. An estimate that could not be made is None, and `reasons` says why."""

    question: Question
    outcome: Outcome
    drift: Estimate | None
    """Octaves of the hyperparameter per doubling of size, beyond what is built in: the exponent that was measured."""
    power: float | None
    """Used for the transferred value, beyond what is built in: the question's, or, where that is None, that from the
    base to the target along the line through the optima: the drift, unless that line bends."""
    offset: Estimate | None
    """Transferred value above the target's own optimum, octaves."""
    regret_nats: Estimate | None
    transferred_log2: float | None
    """At the target."""
    cost_of_2x_off_nats: Estimate | None
    """At the largest usable size, to the worse side."""
    noise_nats: float | None
    """Standard deviation of one run about its basin."""
    noise_is_known: bool
    """Whether any value was run with two seeds; else `noise_nats` is what the curve misses, and a guess."""
    optima: tuple[Optimum, ...]
    bounded: BoundedRegret | None
    """Where the regret is against the best of the values tried, since nobody needs an optimum among them."""
    reasons: tuple[str, ...]
    what_to_run: tuple[Suggestion, ...]
    control: Verdict | None
    """The same statistics of a control condition; its outcome is reported, never asserted."""
    culprit: Point | None = None
    """The run that alone makes a drift, where one does."""
    bends: float | None = None
    """Posterior probability that the line through the optima bends; None where the runs cannot show it."""
    bend: Estimate | None = None
    """Octaves per doubling by which the slope from the largest size to the target differs from the drift."""
    assumption: str | None = None
    """What the verdict takes for granted beyond the runs; None where the target lies within them."""
    largest_ratio: float | None = None
    """Largest target at which the value holds, in multiples of the largest size; None if it holds at none, drifts, or
    rests on something else than the regret's interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DetailedVerdict:
    """A verdict with what it was drawn from, for `transfer.verdict.joint_verdict`."""

    verdict: Verdict
    at_target: AtTarget | None
    """None without two usable optima."""


def judge(
    points: Sequence[Point], question: Question, *, seed: int = 0, control_points: Sequence[Point] = (),
    draws: int = 2000,
) -> Verdict:  # fmt: skip
    """Judge whether a value set at the base size may be used at the target's.

    `holds` when the regret's upper bound is under the margin, `drifts` when its lower bound is over it, else
    `cannot_tell`. Of the learning rate every size needs an optimum inside its rates. Of other hyperparameters many
    have none (of clipping, the least may be best): there the regret is against the best of the values tried
    (`transfer.regret.bounded_regret`), wherever not all sizes have an optimum of their own.

    Args:
        points: Runs of the condition to judge.
        question: What is asked of them.
        seed: Of the posterior draws.
        control_points: Runs of a control condition (standard parametrization), judged alike from its own base optimum.
        draws: Posterior draws.

    Raises:
        TransferError: arguments that make no question; all of them are named.
    """
    return examine(points, question, seed=seed, control_points=control_points, draws=draws).verdict


def examine(
    points: Sequence[Point], question: Question, *, seed: int = 0, control_points: Sequence[Point] = (),
    draws: int = 2000,
) -> DetailedVerdict:  # fmt: skip
    """The same as `judge`, with the extrapolation the verdict rests on."""
    sizes = sorted({p.size for p in points})
    problems = [] if points else ["no runs: give at least two sizes with four values each"]
    if draws < MIN_DRAWS:
        problems.append(f"draws = {draws}: must be at least {MIN_DRAWS}")
    if points and question.transferred_log2 is None and question.base_size not in sizes:
        listed = ", ".join(map(str, sizes))
        advice = "run it, or give the value to transfer"
        problems.append(f"base_size = {question.base_size} has no runs ({question.axis}: {listed}): {advice}")
    if problems:
        raise TransferError(problems)
    control = None
    if control_points:
        own = dataclasses.replace(question, transferred_log2=None)
        control = _judge_arm(control_points, own, None, draws, seed).verdict
    return _judge_arm(points, question, control, draws, seed)


def _judge_arm(points: Sequence[Point], q: Question, control: Verdict | None, draws: int, seed: int) -> DetailedVerdict:
    outvoted = find_outvoted(points)
    if outvoted is not None:
        points = [point for point in points if point is not outvoted.point]
    found, at_target = _measure(points, q, draws, seed)
    plain = _judge_optima(points, q, found, at_target, draws, seed)
    bounded = None
    if q.hyperparameter != LEARNING_RATE and any(o.status != "ok" for o in found.optima):
        bounded = judge_bounded(points, q, draws=draws, rng=np.random.default_rng(seed))
        if bounded is not None:
            plain = _judge_bounded(points, bounded, q, draws, seed)
        elif (why := obstacle(points, q)) is not None:
            plain.reasons.append(why)
    if outvoted is not None:
        plain.reasons.append(say.left_out(outvoted, q))
    there = at_target is not None and at_target.transferred_log2 is not None and bounded is None
    verdict = Verdict(
        question=q,
        outcome=plain.outcome,
        drift=at_target.drift if at_target else None,
        power=at_target.power if at_target else q.power,
        offset=offset_of(at_target, q.level) if at_target and there else None,
        regret_nats=plain.regret_nats,
        transferred_log2=at_target.transferred_log2 if at_target else _set_at_target(q),
        cost_of_2x_off_nats=cost_of_2x(found, q.level, q.most_nats(points)),
        noise_nats=None if found.basins is None else found.basins.noise_nats,
        noise_is_known=noise_is_known(points),
        optima=found.optima,
        bounded=bounded,
        reasons=tuple(plain.reasons),
        what_to_run=tuple(plain.todo),
        control=control,
        culprit=plain.culprit,
        bends=at_target.line.bends if at_target and at_target.bend else None,
        bend=at_target.bend if at_target else None,
        assumption=plain.assumption,
        largest_ratio=plain.largest_ratio,
    )
    return DetailedVerdict(verdict=verdict, at_target=at_target)


def _set_at_target(q: Question) -> float | None:
    """The transferred value, where no optimum is needed to know it."""
    if q.transferred_log2 is None or q.power is None:
        return None
    return q.transferred_log2 + q.power * q.doublings


@dataclass(kw_only=True, slots=True)
class _Judgement:
    """An outcome in the making."""

    outcome: Outcome = "cannot_tell"
    regret_nats: Estimate | None = None
    reasons: list[str]
    todo: list[Suggestion]
    culprit: Point | None = None
    assumption: str | None = None
    largest_ratio: float | None = None
    near_cliff: bool = False
    """Whether runs that diverge near the value are all that forbids to hold: more runs here would not change that."""

    def add_reach(self, q: Question, largest_size: int, holds_at: Callable[[int], bool]) -> None:
        """Add what the verdict assumes beyond the runs, and the largest target that they support."""
        self.assumption = describe_assumption(q, largest_size)
        if self.outcome == "drifts":
            return
        self.largest_ratio = find_largest_ratio(holds_at, largest_size, q.target_size, self.outcome)
        reach = describe_reach(self.largest_ratio, q, largest_size)
        if self.assumption is not None:
            self.reasons.append(f"{self.assumption}; {reach}")


def _judge_optima(
    points: Sequence[Point], q: Question, found: Optima, at_target: AtTarget | None, draws: int, seed: int
) -> _Judgement:
    bad = [(o, [p for p in points if p.size == o.size]) for o in found.optima if o.status != "ok"]
    known = noise_is_known(points)
    judged = _Judgement(
        reasons=[say.why_unusable(o, q, own, noise_known=known) for o, own in bad],
        todo=_mend_all(points, q, found),
    )
    value = at_target.transferred_log2 if at_target else None
    judged.reasons += [] if len(found.optima) > 1 else [f"only one {q.axis}: a drift needs at least two"]
    given = q.transferred_log2 is not None or any(o.size == q.base_size for o in found.optima)
    judged.reasons += [] if given else [f"{say.base(q)} gives no value to transfer"]
    if at_target and value is not None:
        judged.regret_nats = regret_of(at_target, value, q.level)
    if not judged.reasons and at_target and judged.regret_nats:
        _decide_and_explain(judged, points, q, found, at_target, draws, seed)
    if judged.outcome == "cannot_tell" and judged.culprit is None and not judged.near_cliff:
        _plan_next_runs(judged, points, q, found, seed)
    return judged


def _plan_next_runs(judged: _Judgement, points: Sequence[Point], q: Question, found: Optima, seed: int) -> None:
    """Ask for the runs that would decide; a suspicious run is repeated, and others are chosen as if it were gone."""
    noise = None if found.basins is None else found.basins.noise_nats
    suspect, repeats = None if noise is None else find_suspect(points, noise), list[Suggestion]()
    if suspect is not None and noise is not None:
        rest = [point for point in points if point is not suspect.point]
        without, at_target = _measure(rest, q, SUSPECT_DRAWS, seed)
        if without.basins is not None and without.basins.noise_nats < SUSPECT_NOISE_SHARE * noise:
            judged.reasons.append(say.is_suspicious(suspect, q))
            repeats, judged.todo = [again(suspect.point, q)], _mend_all(rest, q, without)
            value = at_target.transferred_log2 if at_target else None
            regret = regret_of(at_target, value, q.level) if at_target and value is not None else None
            usable = all(optimum.status == "ok" for optimum in without.optima)
            if usable and regret is not None and decide(regret, q.margin_nats) != "cannot_tell":
                judged.todo = repeats
                return
            points, found = rest, without
    judged.todo, note = plan_round(points, found, q, judged.todo, repeats)
    judged.reasons += [note] if note else []


def _mend_all(points: Sequence[Point], q: Question, found: Optima) -> list[Suggestion]:
    """Runs without which sizes have no usable optimum."""
    known = noise_is_known(points)
    return [
        suggestion
        for optimum in found.optima
        if optimum.status != "ok"
        for suggestion in mend(optimum, [p for p in points if p.size == optimum.size], q, noise_known=known)
    ]


def _decide_and_explain(
    judged: _Judgement, points: Sequence[Point], q: Question, found: Optima, at_target: AtTarget, draws: int, seed: int
) -> None:
    """Outcome and reasons where every size has an optimum."""
    assert judged.regret_nats is not None and at_target.transferred_log2 is not None
    offset = offset_of(at_target, q.level)
    judged.outcome = decide(judged.regret_nats, q.margin_nats)
    judged.reasons = [
        *say.explain(judged.outcome, judged.regret_nats, offset, q),
        *say.bent(found.optima, q, at_target),
    ]
    judged.add_reach(q, found.optima[-1].size, lambda size: _holds_at(size, points, q, draws, seed))
    if judged.outcome == "drifts" and (culprit := _lone_culprit(points, q, found, at_target, seed)) is not None:
        judged.outcome, judged.culprit = "cannot_tell", culprit
        judged.reasons.append(say.rests_on(culprit, q))
        judged.todo = [again(culprit, q)]
    elif judged.outcome == "holds" and (near := say.cliff_near(found.optima, q, at_target, CLIFF_OCTAVES)):
        judged.outcome, judged.largest_ratio, judged.near_cliff = "cannot_tell", None, True
        judged.reasons.append(near)


def _holds_at(size: int, points: Sequence[Point], q: Question, draws: int, seed: int) -> bool:
    """Return whether the value would hold at a target of another size, by the optima."""
    asked = dataclasses.replace(q, target_size=size)
    _, there = _measure(points, asked, draws, seed)
    assert there is not None and there.transferred_log2 is not None
    return decide(regret_of(there, there.transferred_log2, q.level), q.margin_nats) == "holds"


def _judge_bounded(points: Sequence[Point], bounded: BoundedRegret, q: Question, draws: int, seed: int) -> _Judgement:
    outcome = decide(bounded.regret_nats, q.margin_nats)
    judged = _Judgement(
        outcome=outcome,
        regret_nats=bounded.regret_nats,
        reasons=say.explain_bounded(outcome, bounded, q),
        todo=sharpen_bounded(points, bounded, q) if outcome == "cannot_tell" else [],
    )

    def holds_at(size: int) -> bool:
        asked = dataclasses.replace(q, target_size=size)
        there = judge_bounded(points, asked, draws=draws, rng=np.random.default_rng(seed))
        return there is not None and decide(there.regret_nats, q.margin_nats) == "holds"

    judged.add_reach(q, max(p.size for p in points), holds_at)
    return judged


def _measure(points: Sequence[Point], q: Question, draws: int, seed: int) -> tuple[Optima, AtTarget | None]:
    """Optima, and what they say about the target."""
    rng = np.random.default_rng(seed)
    found, rng.bit_generator.state = _optima(tuple(points), q.level, draws, seed)
    return found, extrapolate(found, q, q.most_nats(points), rng=rng)


@functools.lru_cache(maxsize=128)
def _optima(points: tuple[Point, ...], level: float, draws: int, seed: int) -> tuple[Optima, Mapping[str, Any]]:
    """Optima, and where the generator then stands.

    They are the same whatever the target, and a study asks for them at every target and after every batch of runs: of
    185 times in one report, 27 differed.
    """
    rng = np.random.default_rng(seed)
    return find_optima(points, level=level, draws=draws, rng=rng), rng.bit_generator.state


def _lone_culprit(points: Sequence[Point], q: Question, found: Optima, at_target: AtTarget, seed: int) -> Point | None:
    """The run without which the estimated regret is within the margin, if there is one.

    One gradient spike can move an optimum by an octave; three seeds of a rate outvote it, fewer may not. All sizes are
    fitted anew for the few runs only without which the rate lies nearest to the optimum, as far as their own size says.
    """
    seeds = Counter((p.size, p.log2_value) for p in points)
    doubted = [
        (abs(_offset_without(index, points, q, found, at_target)), index)
        for index, p in enumerate(points)
        if p.loss_nats is not None and seeds[p.size, p.log2_value] <= MOST_SEEDS_IN_DOUBT
    ]
    for _, index in sorted(doubted)[:MOST_CULPRITS]:
        _, without = _measure(_without(points, index), q, MIN_DRAWS, seed)
        if without is None or without.transferred_log2 is None:
            continue
        if regret_of(without, without.transferred_log2, q.level).value <= q.margin_nats:
            return points[index]
    return None


def _without(points: Sequence[Point], index: int) -> list[Point]:
    return [*points[:index], *points[index + 1 :]]


def _offset_without(index: int, points: Sequence[Point], q: Question, found: Optima, at_target: AtTarget) -> float:
    """Octaves from the target's optimum up to the rate without one run, at the shape that all runs have.

    Infinite, where the run's size has too few without it.
    """
    assert found.basins is not None
    size = points[index].size
    own = [p for p in _without(points, index) if p.size == size]
    moved = place_at(own, int(found.basins.shape[0]))
    if moved is None:
        return math.inf
    optima = [moved if o.size == size else o.log2_value or 0.0 for o in found.optima]
    doublings = [math.log2(o.size / q.target_size) for o in found.optima]
    weight = 1 / np.hypot(at_target.sds, max(at_target.line.scatter_octaves, LEAST_SD_OCTAVES))
    slope, there = np.polyfit(doublings, optima, 1, w=weight)
    value = q.transferred_log2
    if value is None:
        value = next(x for x, o in zip(optima, found.optima, strict=True) if o.size == q.base_size)
    return float(value + (slope if q.power is None else q.power) * q.doublings - there)


def decide(regret: Estimate, margin_nats: float) -> Outcome:
    """The outcome that a regret's interval allows."""
    if regret.high < margin_nats:
        return "holds"
    return "drifts" if regret.low > margin_nats else "cannot_tell"
