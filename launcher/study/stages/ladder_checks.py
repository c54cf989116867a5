"""The check of a ladder's learning rates: some rungs were also run at other rates, and are judged.

A parabola in log2 of the rate is fitted to the losses of such a rung. It estimates the regret of
the rung's own rate, relative to the best rate within the rates that were run. Three runs of one
seed do not show their noise, so the noise comes from the transfer tests, whose seeds are paired in
the same way. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

from forerun._launcher.study.experiments.ladder import CheckedRung, choose_checked_rungs
from forerun._launcher.study.experiments.transfer_results import Verdicts
from forerun._launcher.study.plan.study import Study
from forerun._proxies.core.notation import format_counted, format_nats
from forerun._proxies.core.spec import RunResult, RunSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from forerun._scaling_fits.forecast.uncertainty import FittedRuns

    Floats = NDArray[np.float64]

TuningOutcome = Literal["tuned", "mis_tuned", "cannot_tell"]
NUM_DRAWS = 2000
"""Number of random parabolas from which intervals are computed."""
MIN_OFFSETS = 3
"""Minimum number of learning rates: a parabola has three parameters."""
SHAPE_SHARE = 0.2
"""Standard deviation of a loss basin about its parabola, as a share of the height above the
minimum. It covers the asymmetry that `forerun._transfer.basin` expects: one octave from the
optimum, a linex curve with slant 0.55 is 18 % above or below the parabola with the same curvature.
"""
MIN_NOISE_NATS = 1e-6
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
        """Mean loss over seeds in nats; None unless every run finished. Near a divergence, the runs
        that survive have low losses by luck.
        """
        finite = [loss for loss in self.losses_nats if loss is not None]
        return sum(finite) / len(finite) if len(finite) == len(self.losses_nats) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RateRegret:
    """Regret of a rung's learning rate, relative to the best rate within the rates that were
    run.
    """

    nats: float
    interval: tuple[float, float]
    """Interval of the regret in nats."""
    optimum_octaves: float
    """Offset of the best rate from the rung's own, in octaves. It is an end of `reach` if the
    parabola falls toward that end.
    """
    optimum_interval: tuple[float, float]
    """Interval of that offset in octaves."""
    reach: tuple[float, float]
    """Lowest and highest offset that was run, in octaves."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RungCheck:
    """Result of the runs that check one rung."""

    rung: RunSpec
    rates: tuple[RungRate, ...]
    noise_nats: float | None
    """Standard deviation of one run's loss; None if unknown."""
    excess: RateRegret | None
    """Regret of the rung's own rate; None if it cannot be estimated."""
    outcome: TuningOutcome
    words: str
    """The rung and the reason for the outcome, in words."""

    @property
    def best(self) -> RungRate | None:
        """Rate with the lowest loss; None if no rate has a loss."""
        return find_best_rate(self.rates)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LadderChecks:
    """Every checked rung whose runs have ended."""

    rungs: tuple[RungCheck, ...]
    num_planned: int
    """Number of rungs that the plan checks; 0 if it asks for none, or its budget for checks pays
    for none.
    """


def judge_ladder(
    study: Study,
    specs: Sequence[RunSpec],
    results: Mapping[str, RunResult],
    verdicts: Verdicts,
    fit: FittedRuns,
) -> LadderChecks:
    """Judge the checked rungs of a ladder."""
    planned, transfer = choose_checked_rungs(study, specs), study.plan.transfer
    test_noise, residual_sd = find_noise(verdicts), fit.fit.residual_sd
    checks = []
    for checked in planned:
        loss, noise = results[checked.rung.id].loss_nats, test_noise
        if noise is None and loss is not None and residual_sd is not None:
            noise = residual_sd * loss
        checks.append(
            judge_rung(
                checked, results, noise, margin_nats=transfer.margin_nats, level=transfer.level
            )
        )
    rungs = tuple(rung_check for rung_check in checks if rung_check is not None)
    return LadderChecks(rungs=rungs, num_planned=len(planned))


def find_noise(verdicts: Verdicts) -> float | None:
    """Return the standard deviation of a run's loss between seeds, in nats: the largest of the
    learning rate's tests; None if unknown.
    """
    noises = [
        verdict.noise_nats
        for test, verdict in verdicts.tests
        if test.hyperparameter == "learning_rate" and verdict.noise_nats is not None
    ]
    return max(noises, default=None)


def judge_rung(
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
    excess = None if noise_nats is None else fit_excess(tried, noise_nats, level)
    outcome, words = _judge(tried, noise_nats, excess, margin_nats, level)
    return RungCheck(
        rung=checked.rung,
        rates=tried,
        noise_nats=noise_nats,
        excess=excess,
        outcome=outcome,
        words=f"{_describe_rung(checked.rung)}: {words}",
    )


def _describe_rung(rung: RunSpec) -> str:
    """Return a rung's width and steps, with its layers if they differ from the base's."""
    num_layers, steps = rung.shape.num_layers, format_counted(rung.schedule.num_steps, "step")
    depth = (
        f" of {format_counted(num_layers, 'layer')}"
        if num_layers != rung.base_shape.num_layers
        else ""
    )
    return f"width {rung.shape.width}{depth}, {steps}"


def fit_excess(tried: Sequence[RungRate], noise_nats: float, level: float) -> RateRegret | None:
    """Fit a parabola to the mean losses; return the regret of the rung's rate over its minimum.

    Beyond the outermost rates nothing is claimed: if the parabola falls toward an end, that end is
    the best. Rates with higher losses get less weight, because a basin is no parabola far from its
    minimum. With more than three rates, a larger misfit widens the interval.

    Args:
        tried: Rates with their losses, by ascending offset.
        noise_nats: Standard deviation of one run's loss.
        level: Level of the intervals.

    Returns:
        The regret; None without three rates that have a loss, with some on each side of the rung's.
    """
    import numpy as np

    points = [
        (rate.octaves, rate.loss_nats, len(rate.losses_nats))
        for rate in tried
        if rate.loss_nats is not None
    ]
    if len(points) < MIN_OFFSETS or not points[0][0] < 0 < points[-1][0]:
        return None
    x, y, num_seeds = np.array(points, dtype=np.float64).T
    low, high = float(x[0]), float(x[-1])

    # Parabola, with less weight on rates higher up in the basin
    noise = max(noise_nats, MIN_NOISE_NATS)
    sd = np.sqrt(noise**2 / num_seeds + (SHAPE_SHARE * (y - y.min())) ** 2)
    design = np.stack([np.ones_like(x), x, x**2], axis=1) / sd[:, None]
    estimate, *_ = np.linalg.lstsq(design, y / sd, rcond=None)

    # Draws of (level, slope, bend), wider if the parabola misfits
    misfit = float(((y / sd - design @ estimate) ** 2).sum()) / max(1, len(x) - MIN_OFFSETS)
    spread = np.linalg.cholesky(np.linalg.inv(design.T @ design)) * max(1.0, misfit) ** 0.5
    draws = estimate + np.random.default_rng(0).standard_normal((NUM_DRAWS, 3)) @ spread.T

    # Lowest point of each parabola within the rates that were run; the first row is the fit
    slope, bend = np.vstack([estimate, draws])[:, 1:].T
    ends = np.where(slope * low + bend * low**2 < slope * high + bend * high**2, low, high)
    inside = np.clip(-slope / np.where(bend > 0, 2 * bend, 1.0), low, high)
    places = np.where(bend > 0, inside, ends)
    regrets = np.maximum(-(slope * places + bend * places**2), 0.0)

    def get_interval(values: Floats) -> tuple[float, float]:
        bounds = np.quantile(values[1:], [(1 - level) / 2, (1 + level) / 2])
        return min(float(bounds[0]), float(values[0])), max(float(bounds[1]), float(values[0]))

    optimum_interval, interval = get_interval(places), get_interval(regrets)
    if optimum_interval[0] <= 0 <= optimum_interval[1]:
        interval = 0.0, interval[1]
    return RateRegret(
        nats=float(regrets[0]),
        interval=interval,
        optimum_octaves=float(places[0]),
        optimum_interval=optimum_interval,
        reach=(low, high),
    )


def _judge(
    tried: Sequence[RungRate],
    noise_nats: float | None,
    excess: RateRegret | None,
    margin_nats: float,
    level: float,
) -> tuple[TuningOutcome, str]:
    """Return the outcome and its reason. A rung is mis-tuned if another rate is surely better by
    more than the margin, and tuned if surely no rate is.
    """
    rung, best = next(rate for rate in tried if rate.octaves == 0), find_best_rate(tried)
    if rung.loss_nats is None or best is None or best.loss_nats is None:
        if rung.diverged and best is not None:
            return "mis_tuned", f"it diverged at its own rate, but not at {best.octaves:+g} octaves"
        return "cannot_tell", "the rung has no loss at its own rate"
    if noise_nats is None:
        return "cannot_tell", (
            "the noise of a run is unknown: no transfer test found a loss basin, and the fit has "
            "no residuals"
        )
    gain = rung.loss_nats - best.loss_nats
    variance = noise_nats**2 * (1 / len(rung.losses_nats) + 1 / len(best.losses_nats))
    least = gain - NormalDist().inv_cdf((1 + level) / 2) * math.sqrt(variance)
    if least > margin_nats:
        return "mis_tuned", (
            f"at {best.octaves:+g} octaves its loss is {format_nats(gain)} nats lower ({least:.4f} "
            f"at least; {margin_nats:g} are allowed): its rate is too "
            f"{'low' if best.octaves > 0 else 'high'}"
        )
    if excess is None:
        return "cannot_tell", _explain_no_parabola(tried)
    low, high = excess.interval
    sentence = (
        f"{format_nats(excess.nats)} nats [{low:.4f}, {high:.4f}] over the best rate within "
        f"{excess.reach[0]:+g} to {excess.reach[1]:+g} octaves, which is at "
        f"{excess.optimum_octaves:+.2f}"
    )
    if high < margin_nats:
        return "tuned", sentence
    return "cannot_tell", (
        f"{sentence}; {margin_nats:g} nats are allowed: more seeds (ladder.check_num_seeds) or "
        "other rates (ladder.check_offsets_octaves) would decide"
    )


def find_best_rate(tried: Sequence[RungRate]) -> RungRate | None:
    """Return the rate with the lowest loss; None if no rate has a loss."""
    finite = [rate for rate in tried if rate.loss_nats is not None]
    return min(finite, key=lambda rate: rate.loss_nats or 0.0, default=None)


def _explain_no_parabola(tried: Sequence[RungRate]) -> str:
    """Return the reason why there is no parabola, and the rates that would give one."""
    lost = [f"{rate.octaves:+g}" for rate in tried if rate.loss_nats is None]
    nearer = [rate.octaves / (2 if rate.loss_nats is None else 1) for rate in tried if rate.octaves]
    return (
        f"no loss at {', '.join(lost)} octaves (a run diverged or failed), so no parabola: run it "
        f"nearer, ladder.check_offsets_octaves = {nearer}"
    )
