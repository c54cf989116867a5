"""The verdict on a transfer: whether the value that was tuned at the base size can be used at the
target size, and with what regret.

The regret is the loss of one fixed value, with which the main run would be launched, above the loss
at the target's own optimum. The uncertainty of the base optimum therefore does not enter: however
the value was tuned, the main run would get that value. All uncertainty is that of the target's loss
basin, which is extrapolated from the sizes that were run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forerun._proxies.core.checks import Interval
from forerun._proxies.core.hyperparameters import LEARNING_RATE
from forerun._transfer.basin.optimum import (
    Optima,
    Optimum,
    find_optima,
    find_optimum_at_shape,
    has_repeated_value,
)
from forerun._transfer.basin.spikes import find_outvoted, find_suspect
from forerun._transfer.design.added_seeds import suggest_bounded_runs
from forerun._transfer.design.next_runs import (
    Suggestion,
    plan_round,
    suggest_mending_runs,
    suggest_repeats,
)
from forerun._transfer.question import Outcome, Point, Question, TransferError
from forerun._transfer.regret.bounded_regret import BoundedRegret, find_obstacle, judge_bounded
from forerun._transfer.regret.reach import describe_assumption, describe_reach, find_largest_ratio
from forerun._transfer.regret.regret import (
    TargetExtrapolation,
    estimate_cost_of_2x,
    estimate_offset,
    estimate_regret,
    extrapolate,
)
from forerun._transfer.verdict import reasons

MIN_DRAWS = 200
"""Minimum number of posterior draws."""
CLIFF_OCTAVES = 1.0
"""Minimum distance in octaves of a transferred rate below the rates at which runs diverged. At a
smaller distance a larger model might diverge, since the limit of stability may move with size."""
MAX_RUNS_IN_DOUBT = 2
"""Maximum number of runs of a rate among which a single run is suspected to cause a drift by
itself. If there are more runs of the rate, they outvote that run."""
MAX_CULPRITS = 3
"""Maximum number of suspected runs for which all sizes are fitted again without the run. Each such
fit takes a tenth of a second."""
SUSPECT_DRAWS = 600
"""Number of posterior draws of the fit without a suspicious run."""
SUSPECT_NOISE_SHARE = 0.6
"""Largest share of the noise that may remain without a suspicious run. If more remains, the run is
not what makes the losses noisy, and it is not repeated."""
MIN_SD_OCTAVES = 0.01
"""Floor of the standard deviation of an optimum, in octaves, which limits its weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The verdict on a transfer, with its estimates and reasons. An estimate that could not be made
    is None, and `reasons` explains why.
    """

    question: Question
    outcome: Outcome
    drift: Interval | None
    """Drift: octaves by which the optimum moves per doubling of size, in addition to
    `Question.built_in`. This is the measured exponent."""
    power: float | None
    """Exponent used for the transferred value, in addition to `Question.built_in`: the power of the
    question, if the question gives one. Else it is the exponent from the base to the target along
    the line through the optima, which equals the drift unless that line bends."""
    offset: Interval | None
    """Octaves of the transferred value above the target's optimum."""
    transferred_log2: float | None
    """Log2 of the transferred value at the target."""
    reasons: tuple[str, ...]
    regret_nats: Interval | None = None
    most_nats: float | None = None
    """Largest regret that can be determined (`Question.compute_max_regret`). A regret that reaches
    it is known only to be at least this large."""
    cost_of_2x_off_nats: Interval | None = None
    """Regret of a value twice or half the optimum, whichever is worse, at the largest usable
    size."""
    noise_nats: float | None = None
    """Standard deviation of one run about its basin, in nats."""
    noise_is_known: bool = False
    """Whether any value was run with two seeds. Otherwise `noise_nats` is a guess from the
    misfit."""
    optima: tuple[Optimum, ...] = ()
    bounded: BoundedRegret | None = None
    """Regret against the best of the values tried, if that regret is used because not every size
    has an optimum; else None."""
    what_to_run: tuple[Suggestion, ...] = ()
    control: Verdict | None = None
    """Verdict on a control condition, such as runs in standard parametrization. Its outcome is
    reported, but no decision depends on it."""
    bend_probability: float | None = None
    """Posterior probability that the line through the optima bends; None if the runs cannot show
    it."""
    bend: Interval | None = None
    """Octaves per doubling by which the slope from the largest size to the target differs from the
    drift."""
    assumption: str | None = None
    """Assumption of the verdict beyond the runs; None if the target lies within them."""
    largest_ratio: float | None = None
    """Largest target at which the value holds, in multiples of the largest size. None if the value
    holds at no size or drifts, or if the outcome does not rest on the interval of the regret."""
    at_target: TargetExtrapolation | None = field(default=None, compare=False, repr=False)
    """Extrapolation to the target behind the estimates; None without two usable optima."""


def judge(
    points: Sequence[Point],
    question: Question,
    *,
    seed: int = 0,
    control_points: Sequence[Point] = (),
    draws: int = 2000,
) -> Verdict:
    """Judge whether a value set at the base size may be used at the target's.

    The outcome is `holds` if the upper bound of the regret is below the margin, `drifts` if the
    lower bound is above the margin, else `cannot_tell`. For the learning rate, every size needs an
    optimum inside the rates that were run. Many other hyperparameters have no optimum (with
    clipping, the smallest value may be best). If a size has no optimum, the regret of such a
    hyperparameter is measured against the best of the values tried
    (`forerun._transfer.regret.bounded_regret`).

    Args:
        points: Runs of the condition to judge.
        question: The question of the verdict.
        seed: Random seed of the posterior draws.
        control_points: Runs of a control condition (standard parametrization). They are judged in
            the same way, but from the optimum of the control condition at the base.
        draws: Number of posterior draws.

    Raises:
        TransferError: The arguments are invalid; all problems are listed.
    """
    sizes = sorted({p.size for p in points})
    problems = [] if points else ["no runs: give at least two sizes with four values each"]
    if draws < MIN_DRAWS:
        problems.append(f"draws = {draws}: must be at least {MIN_DRAWS}")
    if points and question.transferred_log2 is None and question.base_size not in sizes:
        problems.append(
            f"base_size = {question.base_size} has no runs ({question.axis}: "
            f"{', '.join(map(str, sizes))}): run it, or give the value to transfer"
        )
    if problems:
        raise TransferError(problems)
    verdict = _Judge(points, question, draws, seed).judge()
    if not control_points:
        return verdict
    from_own_base = dataclasses.replace(question, transferred_log2=None)
    control = _Judge(control_points, from_own_base, draws, seed).judge()
    return dataclasses.replace(verdict, control=control)


class _Judge:
    """Judges the runs of one condition."""

    def __init__(self, points: Sequence[Point], question: Question, draws: int, seed: int) -> None:
        self.question, self.draws, self.seed = question, draws, seed
        self.outvoted = find_outvoted(points)
        self.points = [p for p in points if self.outvoted is None or p is not self.outvoted.point]
        self.most_nats = question.compute_max_regret(self.points)
        self.optima, self.at_target = self._extrapolate(self.points)

    def judge(self) -> Verdict:
        """Return the verdict."""
        question, notes = self.question, list[str]()
        # A hyperparameter without an optimum at some size is compared with the best value tried
        has_all_optima = all(o.status == "ok" for o in self.optima.optima)
        if question.hyperparameter == LEARNING_RATE or has_all_optima:
            verdict = self._judge_optima()
        elif (obstacle := find_obstacle(self.points, question)) is not None:
            verdict = self._judge_optima()
            notes.append(obstacle)
        else:
            verdict = self._judge_bounded()
        if self.outvoted is not None:
            notes.append(reasons.explain_left_out(self.outvoted, question))
        return _add_reasons(verdict, *notes)

    def _build_open_verdict(
        self, regret: Interval | None, bounded: BoundedRegret | None = None
    ) -> Verdict:
        """Return a verdict with all estimates, whose outcome is still open."""
        question, at_target, basins = self.question, self.at_target, self.optima.basins
        value, offset = None, None
        if at_target is not None:
            value = at_target.transferred_log2
        elif question.transferred_log2 is not None and question.power is not None:
            value = question.transferred_log2 + question.power * question.doublings
        if at_target is not None and value is not None and bounded is None:
            offset = estimate_offset(at_target, question.level)
        bend = at_target.bend if at_target else None
        return Verdict(
            question=question,
            outcome="cannot_tell",
            drift=at_target.drift if at_target else None,
            power=at_target.power if at_target else question.power,
            offset=offset,
            regret_nats=regret,
            most_nats=self.most_nats,
            transferred_log2=value,
            cost_of_2x_off_nats=estimate_cost_of_2x(self.optima, question.level, self.most_nats),
            noise_nats=None if basins is None else basins.noise_nats,
            noise_is_known=has_repeated_value(self.points),
            optima=self.optima.optima,
            bounded=bounded,
            reasons=(),
            bend_probability=at_target.line.bend_probability if at_target and bend else None,
            bend=bend,
            at_target=at_target,
        )

    def _extrapolate(
        self, points: Sequence[Point], target_size: int | None = None, draws: int | None = None
    ) -> tuple[Optima, TargetExtrapolation | None]:
        """Find the optima of some runs, and extrapolate them to a target: by default the
        question's.
        """
        question, rng = self.question, np.random.default_rng(self.seed)
        if target_size is not None:
            question = dataclasses.replace(question, target_size=target_size)
        # Continue the random numbers where the fit left them, so that a verdict is the same whether
        # or not the fit was cached
        optima, rng.bit_generator.state = _find_cached_optima(
            tuple(points), question.level, draws or self.draws, self.seed
        )
        return optima, extrapolate(optima, question, question.compute_max_regret(points), rng=rng)

    def _estimate_regret(self, at_target: TargetExtrapolation | None) -> Interval | None:
        """Estimate the regret of the transferred value; return None if there is none."""
        if at_target is None or at_target.transferred_log2 is None:
            return None
        return estimate_regret(at_target, at_target.transferred_log2, self.question.level)

    def _decide(self, regret: Interval | None) -> Outcome:
        return "cannot_tell" if regret is None else decide(regret, self.question.margin_nats)

    def _judge_optima(self) -> Verdict:
        """Judge by the optima of all sizes. An unusable optimum leaves the outcome open."""
        question, optima = self.question, self.optima.optima
        verdict = self._build_open_verdict(self._estimate_regret(self.at_target))
        obstacles = [
            reasons.explain_unusable(
                o,
                question,
                [p for p in self.points if p.size == o.size],
                noise_known=verdict.noise_is_known,
            )
            for o in optima
            if o.status != "ok"
        ]
        if len(optima) < 2:
            obstacles.append(f"only one {question.axis}: a drift needs at least two")
        if question.transferred_log2 is None and all(o.size != question.base_size for o in optima):
            obstacles.append(f"{reasons.format_base(question)} gives no value to transfer")
        if obstacles or self.at_target is None or verdict.regret_nats is None:
            return self._plan_next_runs(_add_reasons(verdict, *obstacles))
        return self._judge_regret(verdict, self.at_target, verdict.regret_nats)

    def _judge_regret(
        self, verdict: Verdict, at_target: TargetExtrapolation, regret: Interval
    ) -> Verdict:
        """Judge by the regret at the target, given that every size has an optimum."""
        question, optima = self.question, self.optima.optima
        outcome = self._decide(regret)
        offset = estimate_offset(at_target, question.level)
        verdict = _add_reasons(
            dataclasses.replace(verdict, outcome=outcome),
            *reasons.explain_regret(outcome, regret, offset, question, self.most_nats),
            *reasons.explain_bend(optima, question, at_target),
        )
        verdict = self._add_reach(
            verdict, lambda size: self._estimate_regret(self._extrapolate(self.points, size)[1])
        )
        if outcome == "cannot_tell":
            return self._plan_next_runs(verdict)
        if outcome == "drifts":
            culprit = self._find_lone_culprit(at_target)
            if culprit is None:
                return verdict
            undecided = dataclasses.replace(
                verdict, outcome="cannot_tell", what_to_run=(suggest_repeats(culprit, question),)
            )
            return _add_reasons(undecided, reasons.explain_culprit(culprit, question))
        # More runs would not change divergence near the value, so none are suggested
        near_cliff = reasons.explain_cliff(optima, question, at_target, CLIFF_OCTAVES)
        if not near_cliff:
            return verdict
        return _add_reasons(
            dataclasses.replace(verdict, outcome="cannot_tell", largest_ratio=None), near_cliff
        )

    def _judge_bounded(self) -> Verdict:
        """Judge by the regret against the best of the values tried."""
        question = self.question

        def estimate_bounded(target_size: int) -> BoundedRegret:
            return judge_bounded(
                self.points,
                dataclasses.replace(question, target_size=target_size),
                draws=self.draws,
                rng=np.random.default_rng(self.seed),
            )

        bounded = estimate_bounded(question.target_size)
        outcome = self._decide(bounded.regret_nats)
        runs = []
        if outcome == "cannot_tell":
            runs = suggest_bounded_runs(self.points, bounded, question)
        verdict = dataclasses.replace(
            self._build_open_verdict(bounded.regret_nats, bounded),
            outcome=outcome,
            reasons=tuple(reasons.explain_bounded(outcome, bounded, question, self.most_nats)),
            what_to_run=tuple(runs),
        )
        return self._add_reach(verdict, lambda size: estimate_bounded(size).regret_nats)

    def _add_reach(
        self, verdict: Verdict, estimate_at: Callable[[int], Interval | None]
    ) -> Verdict:
        """Add the assumption beyond the runs, and the largest target that the runs support.
        `estimate_at` returns the regret at a target of another size.
        """
        largest_size = max(p.size for p in self.points)
        assumption = describe_assumption(self.question, largest_size)
        verdict = dataclasses.replace(verdict, assumption=assumption)
        if verdict.outcome == "drifts":
            return verdict
        ratio = find_largest_ratio(
            lambda size: self._decide(estimate_at(size)) == "holds",
            largest_size,
            self.question.target_size,
            verdict.outcome,
        )
        verdict = dataclasses.replace(verdict, largest_ratio=ratio)
        if assumption is None:
            return verdict
        reach = describe_reach(ratio, self.question, largest_size)
        return _add_reasons(verdict, f"{assumption}; {reach}")

    def _plan_next_runs(self, verdict: Verdict) -> Verdict:
        """Add the runs that would decide. A suspicious run is repeated, and the others are chosen
        as if it were left out.
        """
        points, optima, repeats = self.points, self.optima, list[Suggestion]()
        noise = None if optima.basins is None else optima.basins.noise_nats
        suspect = None if noise is None else find_suspect(points, noise)
        if suspect is not None and noise is not None:
            kept_points = [point for point in points if point is not suspect.point]
            optima_without, at_target = self._extrapolate(kept_points, draws=SUSPECT_DRAWS)
            basins = optima_without.basins
            if basins is not None and basins.noise_nats < SUSPECT_NOISE_SHARE * noise:
                verdict = _add_reasons(verdict, reasons.explain_suspect(suspect, self.question))
                repeats = [suggest_repeats(suspect.point, self.question)]
                is_usable = all(optimum.status == "ok" for optimum in optima_without.optima)
                if is_usable and self._decide(self._estimate_regret(at_target)) != "cannot_tell":
                    return dataclasses.replace(verdict, what_to_run=tuple(repeats))
                points, optima = kept_points, optima_without
        mending_runs = self._suggest_mending_runs(points, optima)
        runs, note = plan_round(points, optima, self.question, mending_runs, repeats)
        verdict = dataclasses.replace(verdict, what_to_run=tuple(runs))
        return _add_reasons(verdict, note) if note else verdict

    def _suggest_mending_runs(self, points: Sequence[Point], optima: Optima) -> list[Suggestion]:
        """Suggest runs that make the optima of all sizes usable."""
        is_noise_known = has_repeated_value(points)
        return [
            suggestion
            for optimum in optima.optima
            if optimum.status != "ok"
            for suggestion in suggest_mending_runs(
                optimum,
                [p for p in points if p.size == optimum.size],
                self.question,
                noise_known=is_noise_known,
            )
        ]

    def _find_lone_culprit(self, at_target: TargetExtrapolation) -> Point | None:
        """Return the run without which the estimated regret is within the margin; None if there is
        no such run.

        One gradient spike can move an optimum by an octave. Runs with other seeds outvote the spike
        if there are more than `MAX_RUNS_IN_DOUBT` runs of the rate. First, the fit of one size is
        repeated without each of its runs. All sizes are fitted again only for the few runs whose
        removal moves the target's optimum nearest to the transferred rate.
        """
        seeds = Counter((p.size, p.log2_value) for p in self.points)
        candidates = [
            (abs(self._estimate_offset_without(index, at_target)), index)
            for index, p in enumerate(self.points)
            if p.loss_nats is not None and seeds[p.size, p.log2_value] <= MAX_RUNS_IN_DOUBT
        ]
        for _, index in sorted(candidates)[:MAX_CULPRITS]:
            kept_points = [*self.points[:index], *self.points[index + 1 :]]
            regret = self._estimate_regret(self._extrapolate(kept_points, draws=MIN_DRAWS)[1])
            if regret is not None and regret.estimate <= self.question.margin_nats:
                return self.points[index]
        return None

    def _estimate_offset_without(self, index: int, at_target: TargetExtrapolation) -> float:
        """Estimate the octaves by which the transferred rate lies above the target's optimum if one
        run is left out. The basin keeps the shape that was fitted to all runs.

        The result is infinite if the size has too few rates without the run.
        """
        question, optima, basins = self.question, self.optima.optima, self.optima.basins
        assert basins is not None
        size = self.points[index].size
        kept_points = [p for i, p in enumerate(self.points) if i != index and p.size == size]
        moved_optimum = find_optimum_at_shape(kept_points, int(basins.shape[0]))
        if moved_optimum is None:
            return math.inf
        log2_values = [moved_optimum if o.size == size else o.log2_value or 0.0 for o in optima]
        doublings = [math.log2(o.size / question.target_size) for o in optima]
        weight = 1 / np.hypot(at_target.sds, max(at_target.line.scatter_octaves, MIN_SD_OCTAVES))
        slope, optimum_at_target = np.polyfit(doublings, log2_values, 1, w=weight)
        value = question.transferred_log2
        if value is None:
            value = next(
                x for x, o in zip(log2_values, optima, strict=True) if o.size == question.base_size
            )
        power = slope if question.power is None else question.power
        return float(value + power * question.doublings - optimum_at_target)


def _add_reasons(verdict: Verdict, *more: str) -> Verdict:
    """Return the verdict with more reasons."""
    return dataclasses.replace(verdict, reasons=(*verdict.reasons, *more))


@functools.lru_cache(maxsize=128)
def _find_cached_optima(
    points: tuple[Point, ...], level: float, draws: int, seed: int
) -> tuple[Optima, Mapping[str, Any]]:
    """Find the optima, and return them with the state of the random generator afterward.

    Optima do not depend on the target, and a study needs them for every target and after every
    batch of runs: of 185 calls in one report, 27 had different arguments.
    """
    rng = np.random.default_rng(seed)
    return find_optima(points, level=level, draws=draws, rng=rng), rng.bit_generator.state


def decide(regret: Interval, margin_nats: float) -> Outcome:
    """Return the outcome that a regret's interval allows."""
    if regret.high < margin_nats:
        return "holds"
    return "drifts" if regret.low > margin_nats else "cannot_tell"
