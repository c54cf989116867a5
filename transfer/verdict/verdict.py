"""The verdict on a transfer: whether the value tuned at the base size still serves at the target,
and with what regret.

The regret is that of one fixed number, the value that would be launched, at the target against the
target's own optimum. The uncertainty of the base optimum therefore does not enter: however it was
tuned, the main run would get that value. All uncertainty is that of the target's basin,
extrapolated from the sizes that were run.
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
from transfer.basin.optimum import (
    Optima,
    Optimum,
    find_optima,
    find_optimum_at_shape,
    noise_is_known,
)
from transfer.basin.spikes import find_outvoted, find_suspect
from transfer.design.added_seeds import suggest_bounded_runs
from transfer.design.next_runs import Suggestion, plan_round, suggest_mending_runs, suggest_repeats
from transfer.question import Outcome, Point, Question, TransferError
from transfer.regret.bounded_regret import BoundedRegret, find_obstacle, judge_bounded
from transfer.regret.reach import describe_assumption, describe_reach, find_largest_ratio
from transfer.regret.regret import (
    AtTarget,
    Estimate,
    estimate_cost_of_2x,
    estimate_offset,
    estimate_regret,
    extrapolate,
)
from transfer.verdict import reasons as say

MIN_DRAWS = 200
CLIFF_OCTAVES = 1.0
"""Distance in octaves between divergence and the transferred rate below which no margin is left for
a limit of stability that moves with size."""
MAX_RUNS_IN_DOUBT = 2
"""Number of runs of a rate above which a drift is not suspected of resting on one of them."""
MAX_CULPRITS = 3
"""Maximum number of runs without which all sizes are fitted again. Each such fit takes a tenth of a
second."""
SUSPECT_DRAWS, SUSPECT_NOISE_SHARE = 600, 0.6
"""Number of draws of the fit without a suspicious run, and share of the noise to which it must fall
so that the run is repeated."""
MIN_SD_OCTAVES = 0.01
"""Floor of the standard deviation of an optimum, in octaves, which limits its weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The verdict on a transfer, with its estimates and reasons. An estimate that could not be made
    is None, and `reasons` explains why.
    """

    question: Question
    outcome: Outcome
    drift: Estimate | None
    """Drift: octaves of the hyperparameter per doubling of size, beyond what is built in. This is
    the measured exponent."""
    power: float | None
    """Exponent used for the transferred value, beyond what is built in. It is the question's; if
    that is None, it is the exponent from the base to the target along the line through the optima,
    which is the drift unless that line bends."""
    offset: Estimate | None
    """Octaves of the transferred value above the target's optimum."""
    regret_nats: Estimate | None
    transferred_log2: float | None
    """Log2 of the transferred value at the target."""
    cost_of_2x_off_nats: Estimate | None
    """Regret of a value twice or half the optimum, whichever is worse, at the largest usable
    size."""
    noise_nats: float | None
    """Standard deviation of one run about its basin, in nats."""
    noise_is_known: bool
    """Whether any value was run with two seeds. Otherwise `noise_nats` is a guess from the
    misfit."""
    optima: tuple[Optimum, ...]
    bounded: BoundedRegret | None
    """Regret against the best of the values tried, if it is used because the hyperparameter needs
    no optimum; else None."""
    reasons: tuple[str, ...]
    what_to_run: tuple[Suggestion, ...]
    control: Verdict | None
    """Verdict on a control condition. Its outcome is reported but nothing depends on it."""
    culprit: Point | None = None
    """The single run on which a drift rests, if there is one."""
    bends: float | None = None
    """Posterior probability that the line through the optima bends; None if the runs cannot show
    it."""
    bend: Estimate | None = None
    """Octaves per doubling by which the slope from the largest size to the target differs from the
    drift."""
    assumption: str | None = None
    """Assumption of the verdict beyond the runs; None if the target lies within them."""
    largest_ratio: float | None = None
    """Largest target at which the value holds, in multiples of the largest size. None if it holds
    at none, drifts, or the outcome does not rest on the regret's interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DetailedVerdict:
    """A verdict with the extrapolation behind it, for `transfer.verdict.joint_verdict`."""

    verdict: Verdict
    at_target: AtTarget | None
    """Extrapolation to the target; None without two usable optima."""


def judge(
    points: Sequence[Point],
    question: Question,
    *,
    seed: int = 0,
    control_points: Sequence[Point] = (),
    draws: int = 2000,
) -> Verdict:
    """Judge whether a value set at the base size may be used at the target's.

    The outcome is `holds` if the regret's upper bound is below the margin, `drifts` if its lower
    bound is above it, else `cannot_tell`. For the learning rate, every size needs an optimum inside
    its rates. Many other hyperparameters have none (with clipping, the smallest value may be best).
    If not all sizes have an optimum, their regret is measured against the best of the values tried
    (`transfer.regret.bounded_regret`).

    Args:
        points: Runs of the condition to judge.
        question: The transfer question.
        seed: Random seed of the posterior draws.
        control_points: Runs of a control condition (standard parametrization), judged in the same
            way from its own base optimum.
        draws: Number of posterior draws.

    Raises:
        TransferError: The arguments are invalid; all problems are listed.
    """
    return examine(points, question, seed=seed, control_points=control_points, draws=draws).verdict


def examine(
    points: Sequence[Point],
    question: Question,
    *,
    seed: int = 0,
    control_points: Sequence[Point] = (),
    draws: int = 2000,
) -> DetailedVerdict:
    """Judge like `judge`, and also return the extrapolation behind the verdict."""
    sizes = sorted({p.size for p in points})
    problems = [] if points else ["no runs: give at least two sizes with four values each"]
    if draws < MIN_DRAWS:
        problems.append(f"draws = {draws}: must be at least {MIN_DRAWS}")
    if points and question.transferred_log2 is None and question.base_size not in sizes:
        listed = ", ".join(map(str, sizes))
        advice = "run it, or give the value to transfer"
        problems.append(
            f"base_size = {question.base_size} has no runs ({question.axis}: {listed}): {advice}"
        )
    if problems:
        raise TransferError(problems)
    control = None
    if control_points:
        control_question = dataclasses.replace(question, transferred_log2=None)
        control = _judge_arm(control_points, control_question, None, draws, seed).verdict
    return _judge_arm(points, question, control, draws, seed)


def _judge_arm(
    points: Sequence[Point], q: Question, control: Verdict | None, draws: int, seed: int
) -> DetailedVerdict:
    outvoted = find_outvoted(points)
    if outvoted is not None:
        points = [point for point in points if point is not outvoted.point]
    optima, at_target = _find_and_extrapolate(points, q, draws, seed)
    judgement = _judge_optima(points, q, optima, at_target, draws, seed)
    bounded = None
    # A hyperparameter without an optimum at some size: compare with the best of the values tried
    if q.hyperparameter != LEARNING_RATE and any(o.status != "ok" for o in optima.optima):
        bounded = judge_bounded(points, q, draws=draws, rng=np.random.default_rng(seed))
        if bounded is not None:
            judgement = _judge_bounded(points, bounded, q, draws, seed)
        elif (reason := find_obstacle(points, q)) is not None:
            judgement.reasons.append(reason)
    if outvoted is not None:
        judgement.reasons.append(say.left_out(outvoted, q))
    has_offset = (
        at_target is not None and at_target.transferred_log2 is not None and bounded is None
    )
    verdict = Verdict(
        question=q,
        outcome=judgement.outcome,
        drift=at_target.drift if at_target else None,
        power=at_target.power if at_target else q.power,
        offset=estimate_offset(at_target, q.level) if at_target and has_offset else None,
        regret_nats=judgement.regret_nats,
        transferred_log2=at_target.transferred_log2 if at_target else _get_target_value(q),
        cost_of_2x_off_nats=estimate_cost_of_2x(optima, q.level, q.most_nats(points)),
        noise_nats=None if optima.basins is None else optima.basins.noise_nats,
        noise_is_known=noise_is_known(points),
        optima=optima.optima,
        bounded=bounded,
        reasons=tuple(judgement.reasons),
        what_to_run=tuple(judgement.todo),
        control=control,
        culprit=judgement.culprit,
        bends=at_target.line.bends if at_target and at_target.bend else None,
        bend=at_target.bend if at_target else None,
        assumption=judgement.assumption,
        largest_ratio=judgement.largest_ratio,
    )
    return DetailedVerdict(verdict=verdict, at_target=at_target)


def _get_target_value(q: Question) -> float | None:
    """Return the transferred value at the target, if it is known without an optimum."""
    if q.transferred_log2 is None or q.power is None:
        return None
    return q.transferred_log2 + q.power * q.doublings


@dataclass(kw_only=True, slots=True)
class _Judgement:
    """A verdict under construction."""

    outcome: Outcome = "cannot_tell"
    regret_nats: Estimate | None = None
    reasons: list[str]
    todo: list[Suggestion]
    culprit: Point | None = None
    assumption: str | None = None
    largest_ratio: float | None = None
    near_cliff: bool = False
    """Whether divergence near the value is the only reason not to hold. More runs here would not
    change that."""

    def add_reach(self, q: Question, largest_size: int, holds_at: Callable[[int], bool]) -> None:
        """Add the assumption beyond the runs, and the largest target that the runs support."""
        self.assumption = describe_assumption(q, largest_size)
        if self.outcome == "drifts":
            return
        self.largest_ratio = find_largest_ratio(holds_at, largest_size, q.target_size, self.outcome)
        reach = describe_reach(self.largest_ratio, q, largest_size)
        if self.assumption is not None:
            self.reasons.append(f"{self.assumption}; {reach}")


def _judge_optima(
    points: Sequence[Point],
    q: Question,
    optima: Optima,
    at_target: AtTarget | None,
    draws: int,
    seed: int,
) -> _Judgement:
    unusable = [
        (o, [p for p in points if p.size == o.size]) for o in optima.optima if o.status != "ok"
    ]
    is_noise_known = noise_is_known(points)
    judgement = _Judgement(
        reasons=[
            say.why_unusable(o, q, size_runs, noise_known=is_noise_known)
            for o, size_runs in unusable
        ],
        todo=_suggest_all_mending_runs(points, q, optima),
    )
    value = at_target.transferred_log2 if at_target else None
    judgement.reasons += (
        [] if len(optima.optima) > 1 else [f"only one {q.axis}: a drift needs at least two"]
    )
    has_value = q.transferred_log2 is not None or any(o.size == q.base_size for o in optima.optima)
    judgement.reasons += [] if has_value else [f"{say.base(q)} gives no value to transfer"]
    if at_target and value is not None:
        judgement.regret_nats = estimate_regret(at_target, value, q.level)
    if not judgement.reasons and at_target and judgement.regret_nats:
        _decide_and_explain(judgement, points, q, optima, at_target, draws, seed)
    if (
        judgement.outcome == "cannot_tell"
        and judgement.culprit is None
        and not judgement.near_cliff
    ):
        _plan_next_runs(judgement, points, q, optima, seed)
    return judgement


def _plan_next_runs(
    judgement: _Judgement, points: Sequence[Point], q: Question, optima: Optima, seed: int
) -> None:
    """Plan the runs that would decide. A suspicious run is repeated, and the others are chosen as
    if it were left out.
    """
    noise = None if optima.basins is None else optima.basins.noise_nats
    suspect, repeats = None if noise is None else find_suspect(points, noise), list[Suggestion]()
    if suspect is not None and noise is not None:
        other_runs = [point for point in points if point is not suspect.point]
        optima_without, at_target = _find_and_extrapolate(other_runs, q, SUSPECT_DRAWS, seed)
        if (
            optima_without.basins is not None
            and optima_without.basins.noise_nats < SUSPECT_NOISE_SHARE * noise
        ):
            judgement.reasons.append(say.is_suspicious(suspect, q))
            repeats, judgement.todo = (
                [suggest_repeats(suspect.point, q)],
                _suggest_all_mending_runs(other_runs, q, optima_without),
            )
            value = at_target.transferred_log2 if at_target else None
            regret = (
                estimate_regret(at_target, value, q.level)
                if at_target and value is not None
                else None
            )
            usable = all(optimum.status == "ok" for optimum in optima_without.optima)
            if usable and regret is not None and decide(regret, q.margin_nats) != "cannot_tell":
                judgement.todo = repeats
                return
            points, optima = other_runs, optima_without
    judgement.todo, note = plan_round(points, optima, q, judgement.todo, repeats)
    judgement.reasons += [note] if note else []


def _suggest_all_mending_runs(
    points: Sequence[Point], q: Question, optima: Optima
) -> list[Suggestion]:
    """Suggest runs that make the optima of all sizes usable."""
    is_noise_known = noise_is_known(points)
    return [
        suggestion
        for optimum in optima.optima
        if optimum.status != "ok"
        for suggestion in suggest_mending_runs(
            optimum, [p for p in points if p.size == optimum.size], q, noise_known=is_noise_known
        )
    ]


def _decide_and_explain(
    judgement: _Judgement,
    points: Sequence[Point],
    q: Question,
    optima: Optima,
    at_target: AtTarget,
    draws: int,
    seed: int,
) -> None:
    """Set outcome and reasons if every size has an optimum."""
    assert judgement.regret_nats is not None and at_target.transferred_log2 is not None
    offset = estimate_offset(at_target, q.level)
    judgement.outcome = decide(judgement.regret_nats, q.margin_nats)
    judgement.reasons = [
        *say.explain(judgement.outcome, judgement.regret_nats, offset, q),
        *say.bent(optima.optima, q, at_target),
    ]
    judgement.add_reach(
        q, optima.optima[-1].size, lambda size: _holds_at(size, points, q, draws, seed)
    )
    if (
        judgement.outcome == "drifts"
        and (culprit := _find_lone_culprit(points, q, optima, at_target, seed)) is not None
    ):
        judgement.outcome, judgement.culprit = "cannot_tell", culprit
        judgement.reasons.append(say.rests_on(culprit, q))
        judgement.todo = [suggest_repeats(culprit, q)]
    elif judgement.outcome == "holds" and (
        near := say.cliff_near(optima.optima, q, at_target, CLIFF_OCTAVES)
    ):
        judgement.outcome, judgement.largest_ratio, judgement.near_cliff = "cannot_tell", None, True
        judgement.reasons.append(near)


def _holds_at(size: int, points: Sequence[Point], q: Question, draws: int, seed: int) -> bool:
    """Return whether the value would hold at a target of another size, by the optima."""
    asked_question = dataclasses.replace(q, target_size=size)
    _, at_target = _find_and_extrapolate(points, asked_question, draws, seed)
    assert at_target is not None and at_target.transferred_log2 is not None
    return (
        decide(estimate_regret(at_target, at_target.transferred_log2, q.level), q.margin_nats)
        == "holds"
    )


def _judge_bounded(
    points: Sequence[Point], bounded: BoundedRegret, q: Question, draws: int, seed: int
) -> _Judgement:
    outcome = decide(bounded.regret_nats, q.margin_nats)
    judgement = _Judgement(
        outcome=outcome,
        regret_nats=bounded.regret_nats,
        reasons=say.explain_bounded(outcome, bounded, q),
        todo=suggest_bounded_runs(points, bounded, q) if outcome == "cannot_tell" else [],
    )

    def holds_at(size: int) -> bool:
        asked = dataclasses.replace(q, target_size=size)
        bounded_there = judge_bounded(points, asked, draws=draws, rng=np.random.default_rng(seed))
        return (
            bounded_there is not None
            and decide(bounded_there.regret_nats, q.margin_nats) == "holds"
        )

    judgement.add_reach(q, max(p.size for p in points), holds_at)
    return judgement


def _find_and_extrapolate(
    points: Sequence[Point], q: Question, draws: int, seed: int
) -> tuple[Optima, AtTarget | None]:
    """Find the optima, and extrapolate them to the target."""
    rng = np.random.default_rng(seed)
    optima, rng.bit_generator.state = _find_cached_optima(tuple(points), q.level, draws, seed)
    return optima, extrapolate(optima, q, q.most_nats(points), rng=rng)


@functools.lru_cache(maxsize=128)
def _find_cached_optima(
    points: tuple[Point, ...], level: float, draws: int, seed: int
) -> tuple[Optima, Mapping[str, Any]]:
    """Find the optima, and return them with the state of the random generator afterward.

    They do not depend on the target, and a study needs them for every target and after every batch
    of runs: of 185 calls in one report, 27 had different arguments.
    """
    rng = np.random.default_rng(seed)
    return find_optima(points, level=level, draws=draws, rng=rng), rng.bit_generator.state


def _find_lone_culprit(
    points: Sequence[Point], q: Question, optima: Optima, at_target: AtTarget, seed: int
) -> Point | None:
    """Return the run without which the estimated regret is within the margin; None if there is
    none.

    One gradient spike can move an optimum by an octave. Three seeds of a rate outvote it, but fewer
    may not. All sizes are fitted again only for the few runs whose removal, judged by their own
    size alone, moves the optimum nearest to the rate.
    """
    seeds = Counter((p.size, p.log2_value) for p in points)
    candidates = [
        (abs(_estimate_offset_without(index, points, q, optima, at_target)), index)
        for index, p in enumerate(points)
        if p.loss_nats is not None and seeds[p.size, p.log2_value] <= MAX_RUNS_IN_DOUBT
    ]
    for _, index in sorted(candidates)[:MAX_CULPRITS]:
        _, at_target_without = _find_and_extrapolate(_drop_run(points, index), q, MIN_DRAWS, seed)
        if at_target_without is None or at_target_without.transferred_log2 is None:
            continue
        if (
            estimate_regret(at_target_without, at_target_without.transferred_log2, q.level).value
            <= q.margin_nats
        ):
            return points[index]
    return None


def _drop_run(points: Sequence[Point], index: int) -> list[Point]:
    return [*points[:index], *points[index + 1 :]]


def _estimate_offset_without(
    index: int, points: Sequence[Point], q: Question, optima: Optima, at_target: AtTarget
) -> float:
    """Estimate the octaves from the target's optimum up to the rate without one run, at the shape
    that all runs have.

    Return infinity if the run's size has too few rates without it.
    """
    assert optima.basins is not None
    size = points[index].size
    other_runs = [p for p in _drop_run(points, index) if p.size == size]
    moved_optimum = find_optimum_at_shape(other_runs, int(optima.basins.shape[0]))
    if moved_optimum is None:
        return math.inf
    log2_values = [moved_optimum if o.size == size else o.log2_value or 0.0 for o in optima.optima]
    doublings = [math.log2(o.size / q.target_size) for o in optima.optima]
    weight = 1 / np.hypot(at_target.sds, max(at_target.line.scatter_octaves, MIN_SD_OCTAVES))
    slope, optimum_at_target = np.polyfit(doublings, log2_values, 1, w=weight)
    value = q.transferred_log2
    if value is None:
        value = next(
            x for x, o in zip(log2_values, optima.optima, strict=True) if o.size == q.base_size
        )
    return float(value + (slope if q.power is None else q.power) * q.doublings - optimum_at_target)


def decide(regret: Estimate, margin_nats: float) -> Outcome:
    """Return the outcome that a regret's interval allows."""
    if regret.high < margin_nats:
        return "holds"
    return "drifts" if regret.low > margin_nats else "cannot_tell"
