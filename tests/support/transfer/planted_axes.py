"""Planted truths over several scaling axes: each axis has its own runs, and all axes share the runs
at the base.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from planted_basins import compute_linex

from forerun._transfer.question import Point, Question
from forerun._transfer.verdict.verdict import judge

# By axis: the sizes that are run, the base among them, and the target
SIZES = {"width": (32, 64, 128), "duration": (50, 100, 200, 400), "depth": (2, 4, 8)}
BASE = {"width": 32, "duration": 100, "depth": 2}
TARGET = {"width": 256, "duration": 3200, "depth": 16}
DOUBLINGS = {axis: math.log2(TARGET[axis] / BASE[axis]) for axis in SIZES}
POWERS = {"width": 0.0, "duration": None, "depth": 0.0}
"""Exponent by which the rate is scaled along each axis; None if the runs measure it."""
OFFSETS = (-2, -1, 0, 1, 2)
"""Octaves of the rates from the rounded optimum of a size."""


@dataclass(frozen=True)
class Axes:
    """A planted truth: drift and curvature trend for each scaling axis, and the noise of a run."""

    drift: dict = field(default_factory=lambda: {"width": 0.0, "duration": -0.3, "depth": 0.1})
    """Drift of the optimum by axis, in octaves per doubling."""
    trend: dict = field(default_factory=lambda: {"width": 0.1, "duration": -0.15, "depth": 0.1})
    """Change of the log of the curvature by axis, per doubling."""
    noise_nats: float = 0.005
    num_seeds: int = 3
    curvature: float = 0.06

    def draw(self, rng):
        """Draw the runs of every axis. Return them, and log2 of the optimum at the base.

        The order of the random draws fixes the runs that a seed gives.
        """
        at_base = -6 + rng.uniform(-0.5, 0.5)
        base_losses = {}
        points = {}
        for axis, sizes in SIZES.items():
            points[axis] = []
            for size in sizes:
                doublings = math.log2(size / BASE[axis])
                seed_offsets = rng.normal(0, 0.02, self.num_seeds)
                optimum = at_base + self.drift[axis] * doublings
                curvature = self.curvature * math.exp(self.trend[axis] * doublings)
                for offset in OFFSETS:
                    rate = round(optimum) + offset
                    for seed in range(self.num_seeds):
                        loss = (
                            3
                            - 0.1 * doublings
                            + seed_offsets[seed]
                            + compute_linex(rate - optimum, curvature)
                            + rng.normal(0, self.noise_nats)
                        )
                        if doublings == 0:
                            # The base is one set of runs: all axes share its losses
                            loss = base_losses.setdefault((rate, seed), loss)
                        points[axis].append(
                            Point(
                                size=size, log2_value=float(rate), loss_nats=float(loss), seed=seed
                            )
                        )
        return points, at_base

    def judge(self, points, seed=0, **question_fields):
        """Return one verdict for each axis, all on the value that is fitted at the base over width.
        Width must be the first axis of `points`.
        """
        transferred = None
        verdicts = []
        for axis, runs in points.items():
            question = Question(
                axis=axis,
                base_size=BASE[axis],
                target_size=TARGET[axis],
                power=POWERS[axis],
                transferred_log2=transferred,
                **question_fields,
            )
            verdicts.append(judge(runs, question, draws=400, seed=seed))
            if axis == "width":
                transferred = verdicts[0].transferred_log2
        return verdicts

    def get_target_basin(self, at_base):
        """Return the optimum and the curvature at the target."""
        shift = sum(self.drift[axis] * doublings for axis, doublings in DOUBLINGS.items())
        log_growth = sum(self.trend[axis] * doublings for axis, doublings in DOUBLINGS.items())
        return at_base + shift, self.curvature * math.exp(log_growth)
