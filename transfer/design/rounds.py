"""Choice of a round of runs by the simulated probability that these runs decide the verdict.

`build_ensemble` prepares the simulation, and `choose_round` chooses the runs.

A proposal is a set of runs that may be added. The posterior's draws form an ensemble. Each draw
predicts the losses of the proposed runs, so regression over the ensemble gives the shift of the
optima, and of the offset at the target, that these losses would cause (the update of the ensemble
Kalman filter, Evensen 1994, cited from memory). The offset is the number of octaves by which the
transferred value lies above the target's optimum. Several draws in turn are taken as the truth, and
their losses update all draws. The share of updated draws whose regret is below the margin
determines the verdict that the runs would give. No basin is fitted again, so hundreds of proposals
take a few hundredths of a second.

`SHAPE_COST`, `SURPRISE_SD`, and `PROGRESS_CREDIT` were set by hand, as a whole: with them, one
round of suggested runs decides 107 of the 174 undecided grids with odd numbers of
benchmarks/statistics/transfer_mix.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from forerun._transfer.basin.optimum import MAX_OUTSIDE_SHARE, Optima, list_finite_rates
from forerun._transfer.basin.shapes import Floats, Ints, compute_rise
from forerun._transfer.question import Point, Question
from forerun._transfer.regret.extrapolation import draw_optima_at_sizes, extend_curvature

NUM_DRAWS, NUM_TRUTHS = 400, 40
"""Number of posterior draws in the ensemble, and number of draws that are taken as the truth."""
MIN_PROPOSAL_NOISE_NATS = 0.002
"""Floor of the noise of a proposed run in nats, since no loss basin is known more exactly."""
SHAPE_COST = 1.6
"""Factor by which the noise is increased when the runs of a new size are predicted to locate an
optimum, because the shape of that basin is not known. With this factor, the optima of new sizes are
usable about as often as predicted (tests/transfer/design/test_next_runs.py)."""
MAX_EXCESS_NATS = 0.3
"""Upper bound of predicted losses above the minimum, in nats. A draw's loss far up the basin
carries little information on its optimum."""
MAX_OFFSET_OCTAVES, OFFSET_STEP = 4.0, 0.05
"""Largest offset and step, in octaves, of the grid of offsets whose regret is compared with the
margin."""
SURPRISE_SD = 0.5
"""Standard deviation of the error with which a share of draws is predicted: the share in the fit to
the new runs minus the predicted share, both converted to normal deviates."""
PROGRESS_CREDIT = 0.25
"""Credit for an interval of the offset that narrows to nothing, and for optima that all lie inside
their rates. A verdict has a credit of 1. Without this credit, runs that help only together with
other runs would never be chosen."""
MAX_PROBABILITY = 0.9
"""Probability of a verdict at which no more runs are added."""
MIN_EXPENSIVE_GAIN = 0.05
"""Minimum gain of that probability for which a round may cost more than all runs so far."""
MIN_GAIN = 0.001
"""Minimum gain of the credited probability for which runs are added."""
NUM_KEPT = 16
"""Number of the best options of one step that are considered again in the next."""
MIN_RELATIVE_COST = 0.1
"""Cost, in multiples of the spend so far, that is added to every option when gains per cost are
compared, so that much cheaper options get no further advantage."""


class Proposal(NamedTuple):
    """Runs of one size that are added together."""

    size: int
    values: tuple[float, ...]
    """Log2 of the values."""
    num_seeds: int
    cost: float
    """Cost in runs at the base size."""
    reason: str
    has_own_intercepts: bool = False
    """Whether the runs have intercepts of their own: new seeds, or a size that was not run."""


class Round(NamedTuple):
    """Proposals that are run together."""

    proposals: tuple[Proposal, ...]
    probability: float
    """Probability of a verdict after them."""
    credited_probability: float
    """Probability of a verdict, plus the credit for progress toward one (`PROGRESS_CREDIT`)."""


class Ensemble(NamedTuple):
    """Draws of the posterior, by which the losses of proposed runs and their effect on the verdict
    are simulated.
    """

    sizes: tuple[int, ...]
    """Sizes whose optimum the draws include: those that were fitted, then larger ones."""
    num_fitted: int
    optimum: Floats
    """(D, sizes) log2 of the optimal hyperparameter, by draw and size."""
    curvature: Floats
    """(D, sizes) curvature of the basins, nats per octave squared."""
    off_shape: Floats
    """(D,) octaves between the optima and the minima of their fitted basins. Only finer rates can
    show this difference."""
    shape: Ints
    """(D,) index of the basins' shape."""
    offset: Floats
    """(D,) octaves by which the transferred value lies above the target's optimum."""
    allowed: Floats
    """(D, 2) lowest and highest offset whose regret is below the margin."""
    bounds: tuple[tuple[float, float], ...]
    """Lowest and highest value of each fitted size."""
    run_values: tuple[Floats, ...]
    """Values of every run of each fitted size."""
    noise_nats: float
    level: float

    @property
    def truths(self) -> Ints:
        """Indices of the draws that are taken as the truth (T,)."""
        return np.linspace(0, len(self.offset) - 1, min(NUM_TRUTHS, len(self.offset))).astype(
            np.int64
        )

    def simulate(self, proposal: Proposal, seed: int) -> tuple[Floats, Floats]:
        """Simulate a proposal's losses with noise, as predicted by each draw (D, R) and by each
        truth (T, R).
        """
        column, values = self.sizes.index(proposal.size), np.array(proposal.values)
        is_repeat = proposal.has_own_intercepts and column < self.num_fitted
        # At rates that were run already, the fitted shape is as accurate as the true curve
        predicted = self._predict(column, values + self.off_shape[:, None] if is_repeat else values)
        variance = max(self.noise_nats, MIN_PROPOSAL_NOISE_NATS) ** 2 / proposal.num_seeds
        if proposal.has_own_intercepts:
            predicted = predicted - predicted.mean(axis=1, keepdims=True)
        else:
            size_values = self.run_values[column]
            predicted = predicted - self._predict(column, size_values).mean(axis=1, keepdims=True)
            variance *= 1 + proposal.num_seeds / len(size_values)
        normal = np.random.default_rng(seed).standard_normal(
            (len(predicted) + len(self.truths), len(values))
        )
        noise = math.sqrt(variance) * normal
        return predicted + noise[: len(predicted)], predicted[self.truths] + noise[len(predicted) :]

    def _predict(self, column: int, values: Floats) -> Floats:
        """Predict the loss above the minimum (D, values) at one size, in nats."""
        octaves = values - self.optimum[:, column, None]
        excess = compute_rise(octaves, self.curvature[:, column, None], self.shape[:, None])
        return np.minimum(excess, MAX_EXCESS_NATS)

    def evaluate(
        self, proposals: Sequence[Proposal], simulated: Sequence[tuple[Floats, Floats]]
    ) -> Round:
        """Estimate the probability of a verdict after the proposals, given their losses as
        `simulate` returns them.
        """
        bounds = self._widen_bounds(proposals)
        unknown = np.column_stack([self.offset, self.optimum[:, : self.num_fitted]])
        shift = np.zeros((len(self.truths), unknown.shape[1]))
        # Update the ensemble: regress the unknowns on the simulated losses
        if simulated:
            losses, true_losses = (np.hstack(columns) for columns in zip(*simulated, strict=True))
            mean = losses.mean(axis=0)
            centered = losses - mean
            ridge = MIN_PROPOSAL_NOISE_NATS**2 * np.eye(losses.shape[1])
            gain = np.linalg.solve(
                centered.T @ centered / len(losses) + ridge, centered.T @ unknown / len(losses)
            )
            unknown = unknown - centered @ gain
            shift = (true_losses - mean) @ gain
        # Each truth moves the whole ensemble by one vector: an outer sum over truths and draws
        offset = shift[:, :1] + unknown[:, 0]
        holds = np.mean((self.allowed[:, 0] < offset) & (offset < self.allowed[:, 1]), axis=1)
        inside = self._estimate_inside(proposals)
        for column, (low, high) in enumerate(bounds, start=1):
            optimum = shift[:, column, None] + unknown[:, column]
            inside = np.minimum(inside, np.mean((low <= optimum) & (optimum <= high), axis=1))
        # A verdict needs both: enough draws on one side of the margin, and usable optima
        sure = _predict_chance(np.maximum(holds, 1 - holds), (1 + self.level) / 2, len(unknown))
        usable = _predict_chance(inside, 1 - MAX_OUTSIDE_SHARE, len(unknown))
        probability = float(np.mean(sure * usable))
        narrower = 1 - _compute_spread(unknown[:, 0]) / max(
            _compute_spread(self.offset), OFFSET_STEP
        )
        return Round(
            proposals=tuple(proposals),
            probability=probability,
            credited_probability=probability
            + PROGRESS_CREDIT * (narrower + float(np.mean(inside))),
        )

    def _widen_bounds(self, proposals: Sequence[Proposal]) -> list[tuple[float, float]]:
        """Return the bounds of the values of each fitted size after the proposals."""
        bounds = []
        # `bounds` covers the fitted sizes only, which come first in `sizes`
        for size, (low, high) in zip(self.sizes, self.bounds, strict=False):
            added_values = [value for p in proposals if p.size == size for value in p.values]
            bounds.append((min([low, *added_values]), max([high, *added_values])))
        return bounds

    def _estimate_inside(self, proposals: Sequence[Proposal]) -> Floats:
        """Return the probability (T,) that the optimum of every new size lies inside its values,
        given each truth.

        The fit of a basin does not use the line through the optima, so only the runs of a new size
        locate the optimum of that size.
        """
        inside = np.ones(len(self.truths))
        # Rounds of as many proposals are compared by the same random numbers
        rng = np.random.default_rng(len(proposals))
        for column, size in enumerate(self.sizes[self.num_fitted :], start=self.num_fitted):
            size_proposals = [p for p in proposals if p.size == size]
            if not size_proposals:
                continue
            values = np.array([value for p in size_proposals for value in p.values])
            num_seeds = np.array(
                [p.num_seeds for p in size_proposals for _ in p.values], dtype=np.float64
            )
            ends = np.array([values.min(), values.max()])
            # Least squares of a parabola (R, 3); the optimum lies inside if the loss rises toward
            # both ends
            design = (
                np.stack([np.ones_like(values), values, values**2], axis=1)
                * np.sqrt(num_seeds)[:, None]
            )
            # Slope of the parabola at the lower and the upper end, outward
            outward = np.stack([np.zeros(2), np.ones(2), 2 * ends]) * [-1, 1]
            variance = np.sum(outward * np.linalg.solve(design.T @ design, outward), axis=0)
            sd = SHAPE_COST * max(self.noise_nats, MIN_PROPOSAL_NOISE_NATS) * np.sqrt(variance)
            octaves = (ends - self.optimum[self.truths, column, None]) * [-1, 1]
            slope = self.curvature[self.truths, column, None] * octaves / sd
            measured = slope + rng.standard_normal(slope.shape)
            inside = np.minimum(inside, np.maximum(special.ndtr(measured).sum(axis=1) - 1, 0.0))
        return inside


def _predict_chance(share: Floats, needed: float, num_draws: int) -> Floats:
    """Return the probability that the share of draws in the coming fit reaches the needed one,
    given the predicted share.
    """
    share = np.clip(share, 0.5 / num_draws, 1 - 0.5 / num_draws)
    return special.ndtr((special.ndtri(share) - special.ndtri(needed)) / SURPRISE_SD)


def build_ensemble(
    points: Sequence[Point],
    optima: Optima,
    question: Question,
    larger: Sequence[int],
) -> Ensemble | None:
    """Build the ensemble of all fitted sizes, even those without a usable optimum, and of larger
    sizes.

    Args:
        points: All runs that are judged.
        optima: Optima of these runs.
        question: The question of the verdict.
        larger: Larger sizes that may be proposed.

    Returns:
        The ensemble; None with fewer than two fitted sizes or without a value to transfer.
    """
    basins = optima.basins
    if basins is None or len(optima.fitted) < 2:
        return None
    rows = slice(0, NUM_DRAWS + 1)
    optimum, curvature, shape = basins.optimum[rows], basins.curvature[rows], basins.shape[rows]
    log2_size, log2_target = np.log2(optima.fitted), math.log2(question.target_size)
    base = question.transferred_log2
    if base is None and question.base_size in optima.fitted:
        base = float(optimum[0, optima.fitted.index(question.base_size)])
    if base is None:
        return None
    places = [log2_target, math.log2(question.base_size), *map(math.log2, larger)]
    rng = np.random.default_rng(0)  # The same runs get the same plan
    extended = draw_optima_at_sizes(optimum, log2_size, places, question.axis, rng)
    target_curvature, _ = extend_curvature(curvature, log2_size, log2_target, rng)
    moved = (
        question.power * question.doublings
        if question.power is not None
        else float(extended[0, 0] - extended[0, 1])
    )
    offset = base + moved - extended[:, 0]
    by_size = {size: [p for p in points if p.size == size] for size in optima.fitted}
    rates = [list_finite_rates(by_size[size]) for size in optima.fitted]
    return Ensemble(
        sizes=(*optima.fitted, *larger),
        num_fitted=len(optima.fitted),
        optimum=np.hstack([optimum, extended[:, 2:]])[1:],
        curvature=np.hstack([curvature, np.repeat(curvature[:, -1:], len(larger), axis=1)])[1:],
        off_shape=basins.off_shape[rows][1:],
        shape=shape[1:],
        offset=offset[1:],
        allowed=_find_allowed_offsets(target_curvature, shape, question.margin_nats)[1:],
        bounds=tuple((values[0], values[-1]) for values in rates),
        run_values=tuple(
            np.array([p.log2_value for p in by_size[size] if p.log2_value in values])
            for size, values in zip(optima.fitted, rates, strict=True)
        ),
        noise_nats=basins.noise_nats,
        level=question.level,
    )


def _compute_spread(draws: Floats) -> float:
    """Return the width of the central 90 % interval."""
    low, high = np.quantile(draws, [0.05, 0.95])
    return float(high - low)


def _find_allowed_offsets(curvature: Floats, shape: Ints, margin_nats: float) -> Floats:
    """Find the lowest and highest offset (D, 2) whose regret is below the margin, on a grid."""
    grid = np.arange(-MAX_OFFSET_OCTAVES, MAX_OFFSET_OCTAVES + OFFSET_STEP / 2, OFFSET_STEP)
    below = compute_rise(grid, curvature[:, None], shape[:, None]) < margin_nats
    low = grid[below.argmax(axis=1)] - OFFSET_STEP / 2
    # The last offset below the margin is the first one of the reversed grid
    high = grid[len(grid) - 1 - below[:, ::-1].argmax(axis=1)] + OFFSET_STEP / 2
    return np.column_stack([low, high])


def choose_round(
    ensemble: Ensemble,
    options: Sequence[tuple[Proposal, ...]],
    fixed: Sequence[Proposal],
    *,
    spent: float,
    max_cost: float,
) -> Round:
    """Choose options one by one, each with the largest gain per cost, up to the maximum cost.

    Args:
        ensemble: The draws by which proposals are evaluated.
        options: Sets of proposals that are taken together or not at all.
        fixed: Proposals that are part of the round in any case. They come first in the result.
        spent: Cost of the runs so far, in runs at the base size.
        max_cost: Maximum cost of the round, in the same unit.
    """
    unique = list(dict.fromkeys(proposal for option in options for proposal in option))
    # Every proposal has noise of its own: its place in the list is the seed
    losses = {proposal: ensemble.simulate(proposal, seed) for seed, proposal in enumerate(unique)}
    simulated = [
        ensemble.simulate(proposal, seed) for seed, proposal in enumerate(fixed, len(unique))
    ]
    chosen = ensemble.evaluate(fixed, simulated)
    cost = sum(proposal.cost for proposal in fixed)
    remaining = list(options)
    while chosen.probability < MAX_PROBABILITY:
        # The round with each option, its gain of probability, and the gain per cost of the option
        rounds, gains, ratios = {}, {}, {}
        for option in remaining:
            option_cost = sum(proposal.cost for proposal in option)
            if cost + option_cost > max_cost or _overlap(option, chosen.proposals):
                continue
            option_losses = [losses[proposal] for proposal in option]
            after = ensemble.evaluate((*chosen.proposals, *option), [*simulated, *option_losses])
            is_expensive = cost + option_cost > spent
            if is_expensive and after.probability - chosen.probability < MIN_EXPENSIVE_GAIN:
                continue
            rounds[option] = after
            gains[option] = after.credited_probability - chosen.credited_probability
            ratios[option] = gains[option] / (option_cost / spent + MIN_RELATIVE_COST)
        ranked = sorted(ratios, key=lambda option: -ratios[option])
        best = next((option for option in ranked if gains[option] > MIN_GAIN), None)
        if best is None:
            if len(remaining) == len(options):
                break
            remaining = list(options)  # None of the kept options helps: consider all again
            continue
        remaining = ranked[:NUM_KEPT]
        chosen = rounds[best]
        simulated += [losses[proposal] for proposal in best]
        cost += sum(proposal.cost for proposal in best)
    return chosen


def _overlap(first: Sequence[Proposal], second: Sequence[Proposal]) -> bool:
    """Return whether two sets of proposals have a proposal in common, or a size and value. New
    seeds may be added repeatedly at the same size and value.
    """
    cells = [
        {(p.size, value) for p in proposals if not p.has_own_intercepts for value in p.values}
        for proposals in (first, second)
    ]
    return bool(set(first) & set(second) or cells[0] & cells[1])
