"""The runs of the scaling ladder, and the runs that check some of its rungs at other learning
rates. No torch.

A rung is a small main run: its learning rate follows the same rules
(`sweep_grids.transferred_rate`), and it has its own schedule, which ends with it. So no rung is a
longer run cut short. If the plan has decay branches, rungs that differ only in duration share their
stable phase (`proxies.core.branches`).

If larger rungs are tuned worse, the fitted exponents are too small, because the fit mistakes loss
from a wrong rate for loss from size. Therefore some rungs are run at other rates too, and a
parabola in log2 of the rate estimates the regret of each relative to the best rate between the
outermost. Three runs of one seed do not show their noise, so the noise comes from the transfer
tests, whose seeds are paired in the same way. The better neighbor is never used in the fit: the
minimum of several noisy losses is biased low.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

from launcher.experiments.conventions import Rule, as_proxy
from launcher.experiments.sweep_grids import Sizes, base_sizes, transferred_rate
from launcher.plan.study import Study
from proxies.core.notation import counted, format_nats
from proxies.core.spec import RunResult, RunSpec
from sweeps.search.space import Params
from transfer.question import Axis

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

DIGITS = 6
"""Number of significant digits of a learning rate at an offset."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRung:
    """A rung, with the runs that show whether its learning rate is right."""

    rung: RunSpec
    runs: tuple[tuple[float, tuple[RunSpec, ...]], ...]
    """Runs by offset in octaves from the rung's own rate, ascending, with 0 among them: a run for
    every seed, the rung's own first.
    """

    @property
    def extra(self) -> list[RunSpec]:
        """Runs of the check other than the rung itself."""
        return [spec for _, specs in self.runs for spec in specs if spec.id != self.rung.id]


def ladder_runs(
    study: Study,
    point: Params,
    powers_at: Callable[[Sizes], Mapping[Axis, float]] = lambda there: {},
    warmup: Rule = "share",
) -> list[RunSpec]:
    """Return the runs of the ladder: every width, at its depths, at every duration and seed.

    The point is set at the base; the learning rate moves by the exponents for the sizes of a rung,
    if there are any. Durations that share a stable phase have the rate of their geometric mean.
    """
    ladder, plan = study.plan.ladder, study.plan
    batch = ladder.batch_tokens or plan.proxy.batch_tokens
    shared_tokens = round(
        math.sqrt(math.prod(plan.num_tokens(f(ladder.num_steps), batch) for f in (min, max)))
    )
    runs = []
    for shape in (
        study.shape(width).at_depth(depth)
        for width in ladder.widths
        for depth in plan.ladder_depths(width)
    ):
        for num_steps in ladder.num_steps:
            tokens = plan.num_tokens(num_steps, batch)
            tuned = shared_tokens if plan.proxy.decay_branches else tokens
            there = Sizes(width=shape.width, depth=shape.num_layers, batch=batch, duration=tuned)
            rate = transferred_rate(
                point["learning_rate"], powers_at(there), base_sizes(study), there
            )
            rung = study.run(
                shape=shape,
                point=as_proxy(study, warmup, {**point, "learning_rate": rate}, tokens, num_steps),
                seed=ladder.seed,
                num_steps=num_steps,
                batch_tokens=batch,
                part="ladder",
            )
            runs += [
                dataclasses.replace(rung, seed=ladder.seed + number)
                for number in range(ladder.num_seeds)
            ]
    return runs


def stage_specs(study: Study, rungs: Sequence[RunSpec]) -> list[RunSpec]:
    """Return all runs of the ladder's stage, each once: the rungs, and the runs that check some of
    them.
    """
    needed = [*rungs, *(spec for checked in checked_rungs(study, rungs) for spec in checked.extra)]
    return list({spec.id: spec for spec in needed}.values())


def checked_rungs(study: Study, specs: Sequence[RunSpec]) -> tuple[CheckedRung, ...]:
    """Return the rungs to check, cheapest first: evenly by rank, from the cheapest to the largest
    that the plan's budget for checks allows.

    If possible these are the two ends of the ladder, because a mistake that grows along the ladder,
    which bends a fit, differs most between them. The largest rung may be a third of the ladder, so
    `ladder.check_share` limits its cost.
    """
    ladder = study.plan.ladder
    if not ladder.check_offsets_octaves:
        return ()
    ordered = sorted(
        (spec for spec in specs if spec.seed == ladder.seed), key=lambda spec: spec.flops
    )
    limit = ladder.check_share * sum(spec.flops for spec in ordered)
    # The limit counts only the rungs, so that more rates or seeds check the same rungs.
    for number in range(min(ladder.num_checked, len(ordered)), 0, -1):
        for top in range(len(ordered) - 1, number - 2, -1):
            rungs = _spread(ordered[: top + 1], number)
            if sum(spec.flops for spec in rungs) <= limit:
                seeds = [ladder.seed + number for number in range(ladder.check_num_seeds)]
                rates = sorted((*ladder.check_offsets_octaves, 0.0))
                return tuple(
                    CheckedRung(
                        rung=rung,
                        runs=tuple((x, tuple(_at(rung, x, seed) for seed in seeds)) for x in rates),
                    )
                    for rung in rungs
                )
    return ()


def _spread(ordered: Sequence[RunSpec], number: int) -> list[RunSpec]:
    """Return `number` of the runs, evenly by rank, with the first and the last; if only one, the
    last.
    """
    top = len(ordered) - 1
    return (
        [ordered[round(top * i / (number - 1))] for i in range(number)]
        if number > 1
        else [ordered[top]]
    )


def _at(rung: RunSpec, octaves: float, seed: int) -> RunSpec:
    """Return the rung at another learning rate, or with another seed."""
    own = rung.hparams.learning_rate
    rate = own if octaves == 0 else float(f"{own * 2.0**octaves:.{DIGITS}g}")
    return dataclasses.replace(
        rung, seed=seed, hparams=dataclasses.replace(rung.hparams, learning_rate=rate)
    )


Tuned = Literal["tuned", "mis_tuned", "cannot_tell"]
NUM_DRAWS = 2000
LEAST_OFFSETS = 3
"""Minimum number of learning rates: a parabola has three parameters."""
SHAPE_SHARE = 0.2
"""Standard deviation of a loss basin about its parabola, as a share of its height. It covers the
asymmetry that `transfer.basin` expects: one octave from the optimum, linex with slant 0.55 is 18 %
above or below the parabola with the same curvature.
"""
LEAST_NOISE_NATS = 1e-6
"""Minimum noise of a run in nats that is assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RungRate:
    """One learning rate of a checked rung, with its losses."""

    octaves: float
    """Offset from the rung's own rate, in octaves."""
    learning_rate: float
    losses_nats: tuple[float | None, ...]
    """Losses by seed; None for a run that diverged or failed."""
    diverged: bool
    """Whether any of the runs diverged."""

    @property
    def loss_nats(self) -> float | None:
        """Mean loss over seeds; None unless every run finished, because the runs that survive near
        a divergence are the lucky ones.
        """
        finite = [loss for loss in self.losses_nats if loss is not None]
        return sum(finite) / len(finite) if len(finite) == len(self.losses_nats) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Excess:
    """Regret of a rung's learning rate, relative to the best rate between the outermost ones that
    were run.
    """

    nats: float
    interval: tuple[float, float]
    optimum_octaves: float
    """Offset of the best rate from the rung's own, in octaves; an end of the range if the parabola
    falls toward it.
    """
    optimum_interval: tuple[float, float]
    reach: tuple[float, float]
    """Range of offsets, in octaves, in which the best rate was searched."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RungCheck:
    """Result of the runs that check one rung."""

    rung: RunSpec
    tried: tuple[RungRate, ...]
    noise_nats: float | None
    """Standard deviation of one run's loss; None if unknown."""
    excess: Excess | None
    outcome: Tuned
    words: str

    @property
    def best(self) -> RungRate | None:
        """Rate with the lowest loss; None if no rate has a loss."""
        return best_of(self.tried)


def check(
    checked: CheckedRung,
    results: Mapping[str, RunResult],
    noise_nats: float | None,
    *,
    margin_nats: float,
    level: float,
) -> RungCheck | None:
    """Judge one rung; return None while a run is missing.

    Args:
        checked: Rung and its runs.
        results: Results by run id.
        noise_nats: Standard deviation of one run's loss relative to others with its seed.
        margin_nats: Regret that is allowed.
        level: Level of two-sided intervals; each bound is one-sided at (1 + level) / 2.
    """
    if any(spec.id not in results for _, specs in checked.runs for spec in specs):
        return None
    tried = tuple(
        RungRate(
            octaves=octaves,
            learning_rate=specs[0].hparams.learning_rate,
            losses_nats=tuple(results[spec.id].loss_nats for spec in specs),
            diverged=any(results[spec.id].status == "diverged" for spec in specs),
        )
        for octaves, specs in checked.runs
    )
    excess = None if noise_nats is None else excess_of(tried, noise_nats, level)
    outcome, words = _judge(tried, noise_nats, excess, margin_nats, level)
    return RungCheck(
        rung=checked.rung,
        tried=tried,
        noise_nats=noise_nats,
        excess=excess,
        outcome=outcome,
        words=f"{_shape_words(checked.rung)}, {counted(checked.rung.schedule.num_steps, 'step')}: "
        f"{words}",
    )


def _shape_words(rung: RunSpec) -> str:
    """Return a rung's width, with its layers if they differ from the base's."""
    layers = rung.shape.num_layers
    return f"width {rung.shape.width}" + (
        f" of {counted(layers, 'layer')}" if layers != rung.base_shape.num_layers else ""
    )


def excess_of(tried: Sequence[RungRate], noise_nats: float, level: float) -> Excess | None:
    """Fit a parabola to the mean losses, and return the regret of the rung's own rate relative to
    its minimum.

    None with fewer than three rates that finished, or with none on one side of the rung's own.
    Beyond the outermost rates nothing is claimed: if the parabola falls toward an end, that end is
    the best. Rates higher up in the basin get less weight, because no basin is a parabola there.
    With more than three rates, a misfit beyond that widens the interval.

    Args:
        tried: Rates with their losses.
        noise_nats: Standard deviation of one run's loss.
        level: Level of the intervals.
    """
    import numpy as np

    kept = [one for one in tried if one.loss_nats is not None]
    if len(kept) < LEAST_OFFSETS or not kept[0].octaves < 0 < kept[-1].octaves:
        return None
    x, y = (
        np.array(column, dtype=np.float64)
        for column in zip(*((k.octaves, k.loss_nats) for k in kept), strict=True)
    )
    seeds = np.array([float(len(one.losses_nats)) for one in kept])
    sd = np.sqrt(
        max(noise_nats, LEAST_NOISE_NATS) ** 2 / seeds + (SHAPE_SHARE * (y - y.min())) ** 2
    )
    design = np.stack([np.ones_like(x), x, x**2], axis=1) / sd[:, None]
    centre, *_ = np.linalg.lstsq(design, y / sd, rcond=None)
    misfit = float(((y / sd - design @ centre) ** 2).sum()) / max(1, len(x) - LEAST_OFFSETS)
    spread = np.linalg.cholesky(np.linalg.inv(design.T @ design)) * max(1.0, misfit) ** 0.5
    draws = centre + np.random.default_rng(0).standard_normal((NUM_DRAWS, 3)) @ spread.T
    value, place = _lowest(centre[None, :], float(x[0]), float(x[-1]))
    values, places = _lowest(draws, float(x[0]), float(x[-1]))
    reach = _interval(places, float(place[0]), level)
    low, high = _interval(values, float(value[0]), level)
    return Excess(
        nats=float(value[0]),
        interval=(0.0 if reach[0] <= 0 <= reach[1] else low, high),
        optimum_octaves=float(place[0]),
        optimum_interval=reach,
        reach=(float(x[0]), float(x[-1])),
    )


def _lowest(rows_M3: Floats, low: float, high: float) -> tuple[Floats, Floats]:
    """Return how far parabolas (level, slope, bend) fall from offset 0 to their minimum in [low,
    high], and the offset of the minimum, each of shape (M,).
    """
    import numpy as np

    slope, bend = rows_M3[:, 1], rows_M3[:, 2]
    ends = np.where(slope * low + bend * low**2 < slope * high + bend * high**2, low, high)
    inside = np.clip(-slope / np.where(bend > 0, 2 * bend, 1.0), low, high)
    place = np.where(bend > 0, inside, ends)
    return np.asarray(np.maximum(-(slope * place + bend * place**2), 0.0)), np.asarray(place)


def _interval(draws: Floats, value: float, level: float) -> tuple[float, float]:
    import numpy as np

    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return min(float(low), value), max(float(high), value)


def _judge(
    tried: Sequence[RungRate],
    noise_nats: float | None,
    excess: Excess | None,
    margin_nats: float,
    level: float,
) -> tuple[Tuned, str]:
    """Return the outcome and its reason: mis-tuned if another rate is better by more than the
    margin and the noise; tuned if no rate can be.
    """
    own, best = next(one for one in tried if one.octaves == 0), best_of(tried)
    if own.loss_nats is None:
        if own.diverged and best is not None:
            return "mis_tuned", f"it diverged at its own rate, but not at {best.octaves:+g} octaves"
        return "cannot_tell", "the rung has no loss at its own rate"
    if noise_nats is None:
        why = (
            "the noise of a run is unknown: no transfer test found a loss basin, and the fit has "
            "no residuals"
        )
        return "cannot_tell", why
    assert best is not None and best.loss_nats is not None
    gain = own.loss_nats - best.loss_nats
    spread = NormalDist().inv_cdf((1 + level) / 2) * noise_nats
    if (
        least := gain - spread * math.sqrt(sum(1 / len(one.losses_nats) for one in (own, best)))
    ) > margin_nats:
        return "mis_tuned", (
            f"at {best.octaves:+g} octaves its loss is {format_nats(gain)} nats lower ({least:.4f} "
            "at least; "
            f"{margin_nats:g} are allowed): its rate is too {'low' if best.octaves > 0 else 'high'}"
        )
    if excess is None:
        return "cannot_tell", _why_no_excess(tried)
    low, high = excess.interval
    sentence = (
        f"{format_nats(excess.nats)} nats [{low:.4f}, {high:.4f}] over the best rate within "
        f"{excess.reach[0]:+g} to "
        f"{excess.reach[1]:+g} octaves, which is at {excess.optimum_octaves:+.2f}"
    )
    if high < margin_nats:
        return "tuned", sentence
    more = (
        "more seeds (ladder.check_num_seeds) or other rates (ladder.check_offsets_octaves) "
        "would decide"
    )
    return "cannot_tell", f"{sentence}; {margin_nats:g} nats are allowed: {more}"


def best_of(tried: Sequence[RungRate]) -> RungRate | None:
    """Return the rate with the lowest loss; None if no rate has a loss."""
    finite = [one for one in tried if one.loss_nats is not None]
    return min(finite, key=lambda one: one.loss_nats or 0.0, default=None)


def _why_no_excess(tried: Sequence[RungRate]) -> str:
    """Return the reason why there is no parabola, and the rates that would give one."""
    lost = [f"{one.octaves:+g}" for one in tried if one.loss_nats is None]
    nearer = [
        one.octaves if one.loss_nats is not None else one.octaves / 2
        for one in tried
        if one.octaves
    ]
    return (
        f"no loss at {', '.join(lost)} octaves (a run diverged or failed), so no parabola: run it "
        "nearer, "
        f"ladder.check_offsets_octaves = {nearer}"
    )
