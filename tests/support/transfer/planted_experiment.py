"""A planted experiment, to which runs can be added one by one.

The loss of a run depends only on its size, value, and seed.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from planted_basins import compute_linex

from forerun._transfer.question import Point, Question
from forerun._transfer.verdict.verdict import judge

OFFSETS = (-2, -1, 0, 1, 2)
"""Octaves of the grid's values from its center."""
CURVATURE = 0.07
"""Curvature of the planted loss basin, nats per octave squared."""


@dataclass(frozen=True)
class Experiment:
    """A planted loss that can be measured at any size, value, and seed."""

    loss: object
    """Loss as a function of log2 of the value and of the doublings above the base."""
    base: int
    noise_nats: float
    seed: int

    def run(self, size, value, seed):
        """Return the run at a size, log2 of the value, and seed. A run that is repeated has the
        same loss.
        """
        doublings = math.log2(size / self.base)
        # An integer key for the value, so that its noise is the same in every round
        value_key = round((value + 100) * 1000)
        seed_offset = np.random.default_rng([self.seed, size, seed]).normal(0, 0.02)
        noise_rng = np.random.default_rng([self.seed, size, seed, value_key])
        noise = noise_rng.normal(0, self.noise_nats)
        loss = 3 - 0.1 * doublings + seed_offset + self.loss(np.float64(value), doublings) + noise
        return Point(size=size, log2_value=float(value), loss_nats=float(loss), seed=seed)

    def add_suggested_runs(self, points, suggestions):
        """Return the points together with the suggested runs. A suggested run gets the smallest
        seed that is new at its size and value.
        """
        seeds_by_cell = defaultdict(set)
        for point in points:
            seeds_by_cell[point.size, round(point.log2_value, 6)].add(point.seed)
        new_points = []
        for suggestion in suggestions:
            used_seeds = seeds_by_cell[suggestion.size, round(suggestion.log2_value, 6)]
            for _ in range(suggestion.num_seeds):
                seed = next(k for k in itertools.count() if k not in used_seeds)
                used_seeds.add(seed)
                new_points.append(self.run(suggestion.size, suggestion.log2_value, seed))
        return [*points, *new_points]


def make_rate_experiment(
    noise_nats,
    lost_nats,
    seed,
    *,
    axis="width",
    sizes=(32, 64, 128),
    target=1024,
    measured=False,
    off=0,
    offsets=OFFSETS,
    num_seeds=2,
):
    """Return an experiment on learning rates, the runs of a first design, and its question.

    Args:
        noise_nats: Standard deviation of the noise of a run.
        lost_nats: Regret at the target that the drift causes. With `measured`, the drift is -0.3
            octaves per doubling instead.
        seed: Seed of the experiment.
        axis: Axis of the question.
        sizes: Sizes of the first design; the first one is the base.
        target: Target of the question.
        measured: Whether the question asks for the exponent.
        off: Octaves from the optimum to the center of the grid of rates.
        offsets: Octaves of the rates from the center of the grid.
        num_seeds: Number of seeds of each rate.
    """
    # Bisection for the octaves at which the planted basin loses `lost_nats`
    low, high = 0.0, 8.0
    for _ in range(60):
        middle = (low + high) / 2
        loses_too_little = compute_linex(middle, CURVATURE) < lost_nats
        low, high = (middle, high) if loses_too_little else (low, middle)
    power = -0.3 if measured else -low / math.log2(target / sizes[0])
    at_base = -6 + np.random.default_rng(seed).uniform(-0.5, 0.5)
    experiment = Experiment(
        loss=lambda x, doublings: compute_linex(x - at_base - power * doublings, CURVATURE),
        base=sizes[0],
        noise_nats=noise_nats,
        seed=seed,
    )
    points = [
        experiment.run(size, round(at_base + power * math.log2(size / sizes[0])) + off + x, k)
        for size in sizes
        for x in offsets
        for k in range(num_seeds)
    ]
    question = Question(
        axis=axis, base_size=sizes[0], target_size=target, power=None if measured else 0.0
    )
    return experiment, points, question


def make_clip_experiment(truth, noise_nats, seed):
    """Return an experiment on clip norms, which need not have an optimum, the runs of a first
    design, and its question. `truth` is the planted loss.
    """
    experiment = Experiment(loss=truth, base=32, noise_nats=noise_nats, seed=seed)
    points = [
        experiment.run(size, x, k) for size in (32, 64, 128) for x in OFFSETS for k in range(2)
    ]
    question = Question(
        base_size=32, target_size=1024, hyperparameter="clip_norm", transferred_log2=0.0
    )
    return experiment, points, question


def judge_round(points, question):
    """Return the outcome, and the runs that the verdict suggests if it cannot tell."""
    verdict = judge(points, question, draws=400)
    return verdict.outcome, list(verdict.what_to_run) if verdict.outcome == "cannot_tell" else []


def play_rounds(experiment, points, question, num_rounds=3):
    """Run what the verdict suggests, for up to `num_rounds` rounds.

    Return the outcomes before and after each round, and the cost of the added runs in base runs.
    """
    outcomes, cost = [], 0.0
    for number in range(num_rounds + 1):
        outcome, suggestions = judge_round(points, question)
        outcomes.append(outcome)
        if outcome != "cannot_tell" or not suggestions or number == num_rounds:
            break
        cost += sum(s.relative_cost for s in suggestions)
        points = experiment.add_suggested_runs(points, suggestions)
    return outcomes, cost
