"""The probability that proposed runs decide the verdict, by simulation from the posterior.

The posterior's draws form an ensemble. Each draw predicts the losses of the proposed runs, so
regression over the ensemble gives the shift of the optima and of the offset at the target that
these losses cause (the update of the ensemble Kalman filter, Evensen 1994, cited from memory).
Several draws in turn are taken as the truth, and their losses update all draws. The share of
updated draws whose regret is below the margin determines the verdict that the runs would give. No
basin is fitted again, so hundreds of proposals take a few hundredths of a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from transfer.basin.optimum import MAX_OUTSIDE_SHARE, Optima, list_finite_rates
from transfer.basin.shapes import Floats, Ints, rise
from transfer.question import Point, Question
from transfer.regret.drift import extend_curvature, extend_line_to

NUM_DRAWS, NUM_TRUTHS = 400, 40
"""Number of posterior draws in the ensemble, and number of draws that are taken as the truth."""
MIN_PROPOSAL_NOISE_NATS = 0.002
"""Floor of the noise of a proposed run in nats, since no loss basin is known more exactly."""
SHAPE_COST = 1.6
"""Factor on the noise when the few runs of a new size locate its optimum, since the shape of that
fit is not known. Calibrated on simulated grids, so that the optima are usable about as often as
predicted."""
MAX_EXCESS_NATS = 0.3
"""Upper bound of predicted losses above the minimum, in nats. A draw's loss far up the basin
carries little information on its optimum."""
MAX_OFFSET_OCTAVES, OFFSET_STEP = 4.0, 0.05
"""Largest offset and step, in octaves, of the grid of offsets whose regret is compared with the
margin."""
SURPRISE = 0.5
"""Standard deviation, in normal deviates, between the predicted confidence of the fit to the new
runs and the actual one."""
HOPE = 0.25
"""Credit for a narrower interval and for optima inside their rates, relative to a verdict. Without
it, runs that help only together with others would never be chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Runs of one size that are added together."""

    size: int
    values: tuple[float, ...]
    """Log2 of the values."""
    num_seeds: int
    cost: float
    """Cost in runs at the base size."""
    reason: str
    is_new_grid: bool = False
    """Whether the runs have intercepts of their own: new seeds, or a size that was not run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prospects:
    """The posterior in the form in which proposals are evaluated."""

    sizes: tuple[int, ...]
    """Sizes whose optimum the draws include: those that were fitted, then larger ones."""
    num_fitted: int
    optimum: Floats
    """(D, sizes)"""
    curvature: Floats
    """(D, sizes)"""
    off_shape: Floats
    """(D,) octaves between the optima and those of their shape, which only finer rates can show."""
    shape: Ints
    """(D,)"""
    offset: Floats
    """(D,) octaves from the target's optimum up to the transferred value."""
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
        on_grid = proposal.is_new_grid and column < self.num_fitted
        # At rates that were run already, the curve of the shape is as accurate as the true one.
        predicted = self._predict(column, values + self.off_shape[:, None] if on_grid else values)
        variance = max(self.noise_nats, MIN_PROPOSAL_NOISE_NATS) ** 2 / proposal.num_seeds
        if proposal.is_new_grid:
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
        """Loss above the minimum (D, values) at one size."""
        octaves = values - self.optimum[:, column, None]
        excess = rise(octaves, self.curvature[:, column, None], self.shape[:, None])
        return np.minimum(excess, MAX_EXCESS_NATS)

    def decide(
        self, simulated: Sequence[tuple[Floats, Floats]], proposals: Sequence[Proposal]
    ) -> tuple[float, float]:
        """Return the probability of a verdict after the proposals, and the same with credit for
        progress toward one.
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
        # Each truth moves the whole ensemble by one vector: an outer sum over truths and draws.
        offset = shift[:, :1] + unknown[:, 0]
        holds = np.mean((self.allowed[:, 0] < offset) & (offset < self.allowed[:, 1]), axis=1)
        inside = self._estimate_inside(proposals)
        for column, (low, high) in enumerate(bounds, start=1):
            optimum = shift[:, column, None] + unknown[:, column]
            inside = np.minimum(inside, np.mean((low <= optimum) & (optimum <= high), axis=1))
        # A verdict needs both: enough draws on one side of the margin, and usable optima
        sure = _predict_chance(np.maximum(holds, 1 - holds), (1 + self.level) / 2, len(unknown))
        usable = _predict_chance(inside, 1 - MAX_OUTSIDE_SHARE, len(unknown))
        decided = float(np.mean(sure * usable))
        narrower = 1 - _compute_spread(unknown[:, 0]) / max(
            _compute_spread(self.offset), OFFSET_STEP
        )
        return decided, decided + HOPE * (narrower + float(np.mean(inside)))

    def _widen_bounds(self, proposals: Sequence[Proposal]) -> list[tuple[float, float]]:
        """Return the bounds of the values of each fitted size after the proposals."""
        bounds = []
        for size, (low, high) in zip(self.sizes, self.bounds, strict=False):
            added_values = [value for p in proposals if p.size == size for value in p.values]
            bounds.append((min([low, *added_values]), max([high, *added_values])))
        return bounds

    def _estimate_inside(self, proposals: Sequence[Proposal]) -> Floats:
        """Return the probability that each truth's optimum lies inside the values of new sizes
        (T,), judged by the runs of that size alone.

        The fit of a basin does not use the line through the optima, so only its own runs locate the
        optimum of a new size.
        """
        inside = np.ones(len(self.truths))
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
    return np.asarray(special.ndtr((special.ndtri(share) - special.ndtri(needed)) / SURPRISE))


def look_ahead(
    points: Sequence[Point],
    optima: Optima,
    q: Question,
    larger: Sequence[int],
    rng: np.random.Generator,
) -> Prospects | None:
    """Prepare the posterior of all fitted sizes and of larger ones, usable or not; return None with
    fewer than two sizes or without a value to transfer.

    Args:
        points: All runs of the condition.
        optima: Optima of these runs.
        q: The question.
        larger: Sizes that may be proposed.
        rng: Random numbers of the extension.
    """
    basins = optima.basins
    if basins is None or len(optima.fitted) < 2:
        return None
    rows = slice(0, NUM_DRAWS + 1)
    optimum, curvature, shape = basins.optimum[rows], basins.curvature[rows], basins.shape[rows]
    log2_size, log2_target = np.log2(optima.fitted), math.log2(q.target_size)
    base = q.transferred_log2
    if base is None:
        base = (
            float(optimum[0, optima.fitted.index(q.base_size)])
            if q.base_size in optima.fitted
            else None
        )
    if base is None:
        return None
    places = [log2_target, math.log2(q.base_size), *map(math.log2, larger)]
    extended = extend_line_to(optimum, log2_size, places, q.axis, rng)
    there = extend_curvature(curvature, log2_size, log2_target, rng).at_target
    moved = q.power * q.doublings if q.power is not None else float(extended[0, 0] - extended[0, 1])
    offset = base + moved - extended[:, 0]
    by_size = {size: [p for p in points if p.size == size] for size in optima.fitted}
    rates = [list_finite_rates(by_size[size]) for size in optima.fitted]
    return Prospects(
        sizes=(*optima.fitted, *larger),
        num_fitted=len(optima.fitted),
        optimum=np.hstack([optimum, extended[:, 2:]])[1:],
        curvature=np.hstack([curvature, np.repeat(curvature[:, -1:], len(larger), axis=1)])[1:],
        off_shape=basins.off_shape[rows][1:],
        shape=shape[1:],
        offset=offset[1:],
        allowed=_find_allowed_offsets(there, shape, q.margin_nats)[1:],
        bounds=tuple((values[0], values[-1]) for values in rates),
        run_values=tuple(
            np.array([p.log2_value for p in by_size[size] if p.log2_value in values])
            for size, values in zip(optima.fitted, rates, strict=True)
        ),
        noise_nats=basins.noise_nats,
        level=q.level,
    )


def _compute_spread(draws: Floats) -> float:
    """Return the width of the central 90 % interval."""
    low, high = np.quantile(draws, [0.05, 0.95])
    return float(high - low)


def _find_allowed_offsets(curvature: Floats, shape: Ints, margin_nats: float) -> Floats:
    """Find the lowest and highest offset (D, 2) whose regret is below the margin, on a grid."""
    grid = np.arange(-MAX_OFFSET_OCTAVES, MAX_OFFSET_OCTAVES + OFFSET_STEP / 2, OFFSET_STEP)
    below = rise(grid, curvature[:, None], shape[:, None]) < margin_nats
    low = grid[below.argmax(axis=1)] - OFFSET_STEP / 2
    high = grid[len(grid) - 1 - below[:, ::-1].argmax(axis=1)] + OFFSET_STEP / 2
    return np.column_stack([low, high])


GOAL = 0.9
"""Probability of a verdict at which no more runs are added."""
JUMP = 0.05
"""Minimum gain of that probability for which a round may cost more than all runs so far."""
MIN_GAIN = 0.001
"""Minimum gain of the credited probability for which runs are added."""
NUM_KEPT = 16
"""Number of the best options of one step that are considered again in the next."""
PRICE_OF_SPENT = 0.1
"""Cost in multiples of the spend so far below which a cheaper proposal gets no further
advantage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """Proposals that are run together."""

    proposals: tuple[Proposal, ...]
    probability: float
    """Probability of a verdict after them."""
    value: float
    """Probability of a verdict with credit for progress toward one."""


def choose_round(
    prospects: Prospects,
    options: Sequence[tuple[Proposal, ...]],
    first: Sequence[Proposal],
    *,
    spent: float,
    most: float,
) -> Round:
    """Choose options one by one, each with the largest gain per cost, until the goal or the maximum
    cost is reached.

    Args:
        prospects: The posterior.
        options: Proposals that are taken together or not at all.
        first: Runs that are part of the round in any case.
        spent: Cost of the runs so far, in base runs.
        most: Maximum cost of the round, in base runs.
    """
    unique = list(dict.fromkeys(proposal for option in options for proposal in option))
    losses = {
        proposal: prospects.simulate(proposal, index) for index, proposal in enumerate(unique)
    }
    simulated = [
        prospects.simulate(proposal, len(unique) + index) for index, proposal in enumerate(first)
    ]
    chosen = list(first)
    cost = sum(proposal.cost for proposal in chosen)
    decided, credited = prospects.decide(simulated, chosen)
    remaining = list(options)
    while decided < GOAL:
        taken_cells, ratios = _list_cells(chosen), {}
        best: tuple[float, float, float, tuple[Proposal, ...]] | None = None
        for option in remaining:
            price = sum(proposal.cost for proposal in option)
            if (
                cost + price > most
                or taken_cells & _list_cells(option)
                or set(chosen) & set(option)
            ):
                continue
            option_losses = [losses[proposal] for proposal in option]
            reached, value = prospects.decide([*simulated, *option_losses], [*chosen, *option])
            if cost + price > spent and reached - decided < JUMP:
                continue
            ratio = ratios[option] = (value - credited) / (price / spent + PRICE_OF_SPENT)
            if value - credited > MIN_GAIN and (best is None or ratio > best[0]):
                best = ratio, reached, value, option
        if best is None and len(remaining) < len(options):
            remaining = list(options)
            continue
        if best is None:
            break
        _, decided, credited, option = best
        remaining = sorted(ratios, key=lambda option: -ratios[option])[:NUM_KEPT]
        chosen += option
        simulated += [losses[proposal] for proposal in option]
        cost += sum(proposal.cost for proposal in option)
    return Round(proposals=tuple(chosen), probability=decided, value=credited)


def _list_cells(proposals: Sequence[Proposal]) -> set[tuple[int, float]]:
    """Return the sizes and values of all proposals except new seeds, which may be added
    repeatedly.
    """
    return {(p.size, value) for p in proposals if not p.is_new_grid for value in p.values}
