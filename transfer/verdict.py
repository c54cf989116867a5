"""The verdict: does the learning rate tuned at the base width still serve at the target, and if not, at what cost?

The regret is that of one fixed number, the rate that would actually be launched with, at the target width against
the target's own optimum. How uncertain the base optimum was therefore does not enter it: whether tuned luckily
or not, that rate is what the main run would get. All uncertainty is that of the target's valley, extrapolated from
the widths that were run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from proxies.checks import Checks
from transfer.next_runs import Suggestion, again, mend, power, sharpen
from transfer.optimum import Optima, Optimum, Point, TransferError, find_optima
from transfer.regret import AtTarget, Estimate, cost_of_2x, extrapolate

Outcome = Literal["holds", "drifts", "cannot_tell"]
MIN_DRAWS = 200
CLIFF_OCTAVES = 1.0
"""Divergence nearer than this to the transferred rate leaves no room for a cliff that moves with width."""
MOST_SEEDS_IN_DOUBT = 2
"""Rates with more runs than this are not suspected of resting on one of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the runs say about transfer. An estimate that could not be made is None, and `reasons` says why."""

    outcome: Outcome
    drift: Estimate | None
    """Octaves of learning rate per doubling of width."""
    offset: Estimate | None
    """Transferred rate above the target's own optimum, octaves."""
    regret_nats: Estimate | None
    margin_nats: float
    level: float
    target_width: int
    base_width: int
    transferred_log2_lr: float | None
    cost_of_2x_off_nats: Estimate | None
    """At the largest usable width, to the worse side."""
    noise_nats: float | None
    """Standard deviation of one run about its valley."""
    optima: tuple[Optimum, ...]
    reasons: tuple[str, ...]
    what_to_run: tuple[Suggestion, ...]
    control: Verdict | None
    """The same statistics of a control arm; its outcome is reported, never asserted."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.one_of("outcome", get_args(Outcome))
        checks.that(bool(self.reasons), "reasons are empty")
        if checks.problems:
            raise TransferError(checks.problems)


def judge(
    points: Sequence[Point],
    *,
    target_width: int,
    base_width: int,
    transferred_log2_lr: float | None = None,
    margin_nats: float = 0.01,
    level: float = 0.9,
    seed: int = 0,
    control_points: Sequence[Point] = (),
    draws: int = 2000,
) -> Verdict:
    """Judge whether the base width's learning rate may be used at the target width.

    `holds` when the regret's upper bound is under the margin, `drifts` when its lower bound is over it, else
    `cannot_tell`, which also is the answer whenever fewer than two widths, or not all of them, have a
    usable optimum.

    Args:
        points: Runs of the arm to judge, learning rates as they are set at the base width.
        target_width: Width of the main run.
        base_width: Width the rate was tuned at.
        transferred_log2_lr: The rate to launch with; by default the fitted optimum of the base width.
        margin_nats: The largest loss one is ready to give away.
        level: Of all intervals, equal-tailed: each bound is one-sided at (1 + level) / 2.
        seed: Of the posterior draws.
        control_points: Runs of a control arm (standard parametrization), judged alike from its own base optimum.
        draws: Posterior draws.

    Raises:
        TransferError: arguments that make no question; all of them are named.
    """
    _check_question(points, target_width, base_width, transferred_log2_lr, margin_nats, level, draws)
    question = _Question(target_width, base_width, transferred_log2_lr, margin_nats, level)
    control = None
    if control_points:
        own = _Question(target_width, base_width, None, margin_nats, level)
        control = _judge_arm(control_points, own, None, draws, seed)
    return _judge_arm(points, question, control, draws, seed)


@dataclass(frozen=True, slots=True)
class _Question:
    target_width: int
    base_width: int
    transferred: float | None
    margin_nats: float
    level: float


def _check_question(
    points: Sequence[Point], target_width: int, base_width: int, transferred: float | None,
    margin_nats: float, level: float, draws: int,
) -> None:  # fmt: skip
    fine = transferred is None or math.isfinite(transferred)
    wanted = [
        (len(points) > 0, "no runs: give at least two widths of four learning rates each"),
        (target_width >= 1, f"target_width = {target_width}: a whole number >= 1 is wanted"),
        (base_width >= 1, f"base_width = {base_width}: a whole number >= 1 is wanted"),
        (fine, f"transferred_log2_lr = {transferred}: a finite number is wanted"),
        (0 < margin_nats < math.inf, f"margin_nats = {margin_nats}: a number > 0 is wanted"),
        (0 < level < 1, f"level = {level}: a number between 0 and 1 is wanted"),
        (draws >= MIN_DRAWS, f"draws = {draws}: at least {MIN_DRAWS} are wanted"),
    ]
    widths = sorted({p.width for p in points})
    if points and transferred is None and base_width not in widths:
        listed = ", ".join(map(str, widths))
        advice = "run it, or give the rate to transfer"
        wanted.append((False, f"base_width = {base_width} has no runs (widths: {listed}): {advice}"))
    problems = [problem for holds, problem in wanted if not holds]
    if problems:
        raise TransferError(problems)


def _judge_arm(points: Sequence[Point], q: _Question, control: Verdict | None, draws: int, seed: int) -> Verdict:
    found, at_target, transferred = _measure(points, q, draws, seed)
    bad = [o for o in found.optima if o.status != "ok"]
    reasons = [_why_unusable(o) for o in bad]
    todo = [s for o in bad for s in mend(o, [p for p in points if p.width == o.width])]
    reasons += [] if len(found.optima) > 1 else ["one width only: drift needs two or more"]
    reasons += [] if transferred is not None else [f"base width {q.base_width} gives no rate to transfer"]
    outcome: Outcome = "cannot_tell"
    if not reasons and at_target and at_target.regret_nats and at_target.offset:
        outcome = _decide(at_target.regret_nats, q.margin_nats)
        reasons = _explain(outcome, at_target.regret_nats, at_target.offset, q)
        culprit = _lone_culprit(points, q, seed) if outcome == "drifts" else None
        if culprit is not None:
            outcome = "cannot_tell"
            reasons.append(f"but without one run (width {culprit.width}, {power(culprit.log2_lr)}, seed "
                           f"{culprit.seed}) the cost is within the margin: a single run proves no drift")  # fmt: skip
            todo = [again(culprit)]
        elif outcome == "cannot_tell":
            todo = _sharpen(points, found, at_target, q)
        elif outcome == "holds" and (near := _cliff_near(found.optima, transferred)):
            outcome = "cannot_tell"
            reasons.append(near)
    usable = [o for o in found.optima if o.status == "ok"]
    reasons += _about_cliffs(usable, q, transferred)
    return Verdict(
        outcome=outcome,
        drift=at_target.drift if at_target else None,
        offset=at_target.offset if at_target else None,
        regret_nats=at_target.regret_nats if at_target else None,
        margin_nats=q.margin_nats,
        level=q.level,
        target_width=q.target_width,
        base_width=q.base_width,
        transferred_log2_lr=transferred,
        cost_of_2x_off_nats=cost_of_2x(found, q.level),
        noise_nats=None if found.valleys is None else found.valleys.noise_nats,
        optima=found.optima,
        reasons=tuple(reasons),
        what_to_run=tuple(todo),
        control=control,
    )


def _measure(
    points: Sequence[Point], q: _Question, draws: int, seed: int
) -> tuple[Optima, AtTarget | None, float | None]:
    """Optima, what they say about the target, and the rate that is transferred."""
    rng = np.random.default_rng(seed)
    found = find_optima(points, level=q.level, draws=draws, rng=rng)
    transferred = q.transferred
    if transferred is None:
        transferred = next((o.log2_lr for o in found.optima if o.width == q.base_width), None)
    at_target = extrapolate(found, target_width=q.target_width, transferred=transferred, level=q.level, rng=rng)
    return found, at_target, transferred


def _lone_culprit(points: Sequence[Point], q: _Question, seed: int) -> Point | None:
    """The run without which the estimated regret is within the margin, if there is one.

    One gradient spike can move an optimum by an octave; three seeds of a rate outvote it, fewer may not.
    """
    for index, left_out in enumerate(points):
        cell = [p for p in points if (p.width, p.log2_lr) == (left_out.width, left_out.log2_lr)]
        if left_out.loss_nats is None or len(cell) > MOST_SEEDS_IN_DOUBT:
            continue
        _, at_target, _ = _measure([*points[:index], *points[index + 1 :]], q, MIN_DRAWS, seed)
        regret = at_target and at_target.regret_nats
        if regret and regret.value <= q.margin_nats:
            return left_out
    return None


def _decide(regret: Estimate, margin_nats: float) -> Outcome:
    if regret.high < margin_nats:
        return "holds"
    return "drifts" if regret.low > margin_nats else "cannot_tell"


def _why_unusable(optimum: Optimum) -> str:
    runs = f"width {optimum.width}: {optimum.num_runs} runs, {optimum.num_diverged} diverged; "
    if optimum.status == "too_few":
        return runs + "fewer than four rates at which every run finished"
    if optimum.status == "flat":
        return runs + "the valley is flat within the noise"
    return runs + "the optimum may lie outside the rates that were run"


def _explain(outcome: Outcome, regret: Estimate, offset: Estimate, q: _Question) -> list[str]:
    where = {"holds": "all of it under", "drifts": "all of it over", "cannot_tell": "on both sides of"}[outcome]
    cost = f"{regret.value:.4f} nats [{regret.low:.4f}, {regret.high:.4f}] at level {q.level:g}"
    reach = f"{offset.value:+.2f} octaves [{offset.low:+.2f}, {offset.high:+.2f}]"
    said = [
        f"at width {q.target_width} the transferred rate costs {cost}: {where} the margin of {q.margin_nats:g}",
        f"it lies {reach} from the optimum there",
    ]
    return said if q.target_width > q.base_width else [*said, "no wider than the base: nothing is transferred"]


def _cliff_near(optima: Sequence[Optimum], transferred: float | None) -> str:
    """A sentence if runs of the widest width diverged too near the transferred rate; else nothing."""
    widest = max(optima, key=lambda optimum: optimum.width)
    if widest.cliff_octaves is None or widest.log2_lr is None or transferred is None:
        return ""
    distance = widest.log2_lr + widest.cliff_octaves - transferred
    if distance >= CLIFF_OCTAVES:
        return ""
    return (
        f"but at width {widest.width} runs diverged {distance:.1f} octaves above it, under {CLIFF_OCTAVES:g}: "
        "a wider one may diverge at the rate itself"
    )


def _about_cliffs(usable: Sequence[Optimum], q: _Question, transferred: float | None) -> list[str]:
    """One sentence where divergence is near the rate that would be launched."""
    return [
        f"width {o.width}: runs diverged {o.cliff_octaves:.1f} octaves above the optimum, "
        f"{o.log2_lr + o.cliff_octaves - transferred:+.1f} from the transferred rate {power(transferred)}"
        for o in usable[-1:]
        if o.cliff_octaves is not None and o.log2_lr is not None and transferred is not None
    ]


def _sharpen(points: Sequence[Point], found: Optima, at_target: AtTarget, q: _Question) -> list[Suggestion]:
    """Runs that would decide, if the estimates stay where they are."""
    assert at_target.offset is not None
    allowed = math.sqrt(2 * q.margin_nats / at_target.curvature)  # octaves; the parabola will do for planning
    half_width = max(at_target.offset.high - at_target.offset.low, 1e-9) / 2
    share = min(abs(allowed - abs(at_target.offset.value)) / half_width, 0.9)
    usable = [o for o in found.optima if o.status == "ok"]
    pull = at_target.line.pull.tolist()
    return sharpen(points, usable, pull=pull, sds=at_target.sds, share=share, target_width=q.target_width)
