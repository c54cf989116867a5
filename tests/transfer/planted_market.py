"""Runs that can be bought one by one: what each reaches depends only on its size, value and
seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from planted_valleys import linex

from transfer.question import Point, Question
from transfer.verdict.verdict import examine

OFFSETS = (-2, -1, 0, 1, 2)


@dataclass(frozen=True)
class Market:
    loss: object
    """A function of log2 of the value, and of doublings above the base."""
    base: int
    noise_nats: float
    seed: int

    def run(self, size, value, seed):
        d, place = math.log2(size / self.base), round((value + 100) * 1000)
        own = np.random.default_rng([self.seed, size, seed]).normal(0, 0.02)
        noise = np.random.default_rng([self.seed, size, seed, place]).normal(0, self.noise_nats)
        loss = 3 - 0.1 * d + own + self.loss(np.float64(value), d) + noise
        return Point(size=size, log2_value=float(value), loss_nats=float(loss), seed=seed)

    def buy(self, points, wanted):
        """Points with the suggested runs: seeds that are new at their size and value."""
        cells = {}
        for p in points:
            cells.setdefault((p.size, round(p.log2_value, 6)), set()).add(p.seed)
        new = []
        for s in wanted:
            cell = cells.setdefault((s.size, round(s.log2_value, 6)), set())
            for _ in range(s.num_seeds):
                seed = next(k for k in range(10**6) if k not in cell)
                cell.add(seed)
                new.append(self.run(s.size, s.log2_value, seed))
        return [*points, *new]


def rates(
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
    """A first design of learning rates, on grids `off` octaves off, and the question it leaves
    open.
    """
    low, high = 0.0, 8.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if linex(middle, 0.07) < lost_nats else (low, middle)
    power = -0.3 if measured else -low / math.log2(target / sizes[0])
    at_base = -6 + np.random.default_rng(seed).uniform(-0.5, 0.5)
    market = Market(lambda x, d: linex(x - at_base - power * d, 0.07), sizes[0], noise_nats, seed)
    points = [
        market.run(size, round(at_base + power * math.log2(size / sizes[0])) + off + x, k)
        for size in sizes
        for x in offsets
        for k in range(num_seeds)
    ]
    q = Question(axis=axis, base_size=sizes[0], target_size=target, power=None if measured else 0.0)
    return market, points, q


def clips(truth, noise_nats, seed, *, target=1024, sizes=(32, 64, 128), num_seeds=2):
    """The same of a clip that need have no optimum."""
    market = Market(truth, sizes[0], noise_nats, seed)
    points = [market.run(size, x, k) for size in sizes for x in OFFSETS for k in range(num_seeds)]
    q = Question(
        base_size=sizes[0], target_size=target, hyperparameter="clip_norm", transferred_log2=0.0
    )
    return market, points, q


def wanted(points, q):
    """The outcome, and the runs that a verdict asks for."""
    verdict = examine(points, q, draws=400).verdict
    return verdict.outcome, list(verdict.what_to_run) if verdict.outcome == "cannot_tell" else []


def play(market, points, q, num_rounds=3):
    """Outcome before and after each round of buying what is asked for, and what they cost in base
    runs.
    """
    outcomes, cost = [], 0.0
    for number in range(num_rounds + 1):
        outcome, asked = wanted(points, q)
        outcomes.append(outcome)
        if outcome != "cannot_tell" or not asked or number == num_rounds:
            break
        cost += sum(s.relative_cost for s in asked)
        points = market.buy(points, asked)
    return outcomes, cost
