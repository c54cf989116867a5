"""Planted truths over several axes at once: each axis has its runs, and all share those at the
base.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from planted_valleys import linex

from transfer.question import Point, Question
from transfer.verdict.verdict import examine

SIZES = {"width": (32, 64, 128), "duration": (50, 100, 200, 400), "depth": (2, 4, 8)}
BASE = {"width": 32, "duration": 100, "depth": 2}
TARGET = {"width": 256, "duration": 3200, "depth": 16}
DOUBLINGS = {axis: math.log2(TARGET[axis] / BASE[axis]) for axis in SIZES}
POWERS = {"width": 0.0, "duration": None, "depth": 0.0}
OFFSETS = (-2, -1, 0, 1, 2)


@dataclass(frozen=True)
class Axes:
    drift: dict = field(default_factory=lambda: {"width": 0.0, "duration": -0.3, "depth": 0.1})
    """Octaves per doubling."""
    trend: dict = field(default_factory=lambda: {"width": 0.1, "duration": -0.15, "depth": 0.1})
    """Change of the log of the curvature, per doubling."""
    noise_nats: float = 0.005
    num_seeds: int = 3
    curvature: float = 0.06

    def draw(self, rng):
        """Runs of every axis, and the optimum at the base."""
        at_base, shared, points = -6 + rng.uniform(-0.5, 0.5), {}, {}
        for axis, sizes in SIZES.items():
            points[axis] = []
            for size in sizes:
                d, own = math.log2(size / BASE[axis]), rng.normal(0, 0.02, self.num_seeds)
                optimum, bend = (
                    at_base + self.drift[axis] * d,
                    self.curvature * math.exp(self.trend[axis] * d),
                )
                for rate in (round(optimum) + x for x in OFFSETS):
                    for seed in range(self.num_seeds):
                        loss = (
                            3
                            - 0.1 * d
                            + own[seed]
                            + linex(rate - optimum, bend)
                            + rng.normal(0, self.noise_nats)
                        )
                        if d == 0:
                            loss = shared.setdefault((rate, seed), loss)
                        points[axis].append(
                            Point(
                                size=size, log2_value=float(rate), loss_nats=float(loss), seed=seed
                            )
                        )
        return points, at_base

    def judged(self, points, seed=0, **questions):
        """One verdict for each axis, of the fitted optimum at the base."""
        found, value = [], None
        for axis, runs in points.items():
            q = Question(
                axis=axis,
                base_size=BASE[axis],
                target_size=TARGET[axis],
                power=POWERS[axis],
                transferred_log2=value,
                **questions,
            )
            found.append(examine(runs, q, draws=400, seed=seed))
            if axis == "width":
                value = found[0].verdict.transferred_log2
        return found

    def truth(self, at_base):
        """Optimum and curvature at the target."""
        optimum = at_base + sum(self.drift[axis] * by for axis, by in DOUBLINGS.items())
        return optimum, self.curvature * math.exp(
            sum(self.trend[axis] * by for axis, by in DOUBLINGS.items())
        )
