"""Planted truths: runs drawn from valleys whose optimum, drift and regret are known, and what an
oracle finds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from transfer.question import Point, Question
from transfer.verdict.verdict import judge

Z90 = 1.6449


def parabola(octaves, curvature):
    return 0.5 * curvature * octaves**2


def two_parabolas(octaves, curvature):
    """Twice as steep on the side of divergence."""
    return 0.5 * curvature * octaves**2 * (2 if octaves > 0 else 1)


def linex(octaves, curvature, s=0.3):
    return curvature * (math.expm1(s * octaves) - s * octaves) / s**2


def linex_of(s):
    return lambda octaves, curvature: linex(octaves, curvature, s)


def power_of(p):
    return lambda octaves, curvature: 0.5 * curvature * abs(octaves) ** p


def straight_cliff(octaves, curvature):
    """A parabola that is a straight wall from 1.2 octaves above its minimum on."""
    return 0.5 * curvature * (octaves**2 + 6 * max(octaves - 1.2, 0.0))


def lopsided_quartic(octaves, curvature):
    """x^4 + 0.3 x^2 + 0.3 x, whose minimum lies 0.307 below 0: far out it seems to lie elsewhere
    than it does.
    """
    x = octaves - 0.307035947
    return curvature * (x**4 + 0.3 * x**2 + 0.3 * x + 0.054942427117) / 2


@dataclass(frozen=True)
class World:
    sizes: tuple[int, ...]
    rates: tuple[float, ...]
    num_seeds: int
    noise_nats: float
    target_size: int
    valley: object = linex
    regret_nats: float = 0.0
    """At the target, of the base optimum."""
    curvature: float = 0.06
    seed_sd: float = 0.02
    scatter: float = 0.0
    """Sd of every optimum about the line, octaves; the target's own too."""
    noise_growth: float = 0.0
    """Noise grows as 1 + this times the loss above the minimum in nats."""
    drift_octaves: float | None = None
    """Given instead of the regret."""
    curvature_trend: float = 0.0
    """Change of its log per doubling."""
    curvature_scatter: float = 0.0
    """Sd of its log about that."""
    at_base: float = -6.0

    @property
    def target_curvature(self):
        return self.curvature * math.exp(
            self.curvature_trend * math.log2(self.target_size / self.sizes[0])
        )

    @property
    def drift(self):
        """Octaves per doubling; where it is not given, what makes the planted regret at the target,
        optimum falling.
        """
        if self.drift_octaves is not None:
            return self.drift_octaves
        low, high = 0.0, 8.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (
                (middle, high)
                if self.valley(middle, self.target_curvature) < self.regret_nats
                else (low, middle)
            )
        return -low / math.log2(self.target_size / self.sizes[0])

    @property
    def question(self):
        return Question(target_size=self.target_size, base_size=self.sizes[0])

    def optimum(self, size, base):
        """On the line."""
        return base + self.drift * math.log2(size / self.sizes[0])

    def draw(self, rng, spike=0.0):
        """Runs, and where the line lies at the base. With a scatter, see `draw_all`."""
        points, base, _ = self.draw_all(rng, spike)
        return points, base

    def draw_all(self, rng, spike=0.0):
        """Runs, where the line lies at the base, and the optimum of every size, the target's
        too.
        """
        base = self.at_base + rng.uniform(-0.5, 0.5)
        spiked = (rng.choice(self.sizes), rng.choice(self.rates), rng.integers(self.num_seeds))
        points, optima = [], {}
        for size in (*self.sizes, self.target_size):
            optima[size] = self.optimum(size, base) + (
                self.scatter * rng.normal() if self.scatter else 0.0
            )
        for size in self.sizes:
            offsets = rng.normal(0, self.seed_sd, self.num_seeds)
            curvature = self.curvature * math.exp(
                self.curvature_trend * math.log2(size / self.sizes[0])
            )
            curvature *= (
                math.exp(self.curvature_scatter * rng.normal()) if self.curvature_scatter else 1
            )
            for rate in self.rates:
                above = self.valley(rate - optima[size], curvature)
                for seed in range(self.num_seeds):
                    loss = 3 - 0.1 * math.log2(size) + offsets[seed] + above
                    loss += rng.normal(0, self.noise_nats) * (1 + self.noise_growth * above)
                    loss += spike if (size, rate, seed) == spiked else 0
                    points.append(
                        Point(size=size, log2_value=float(rate), loss_nats=float(loss), seed=seed)
                    )
        return points, base, optima

    def oracle(self, optima):
        """Widths of the 90 % intervals of one who knows the valley's shape and the noise: of every
        optimum, of drift.

        Least squares for the intercepts, curvature and minimum of each size, at the bound of Cramer
        and Rao.
        """
        variances = []
        for size in self.sizes:
            x = np.array(self.rates) - optima[size]
            h = np.array([self.valley(u, 1.0) for u in x])
            slope = np.array(
                [(self.valley(u + 1e-4, 1.0) - self.valley(u - 1e-4, 1.0)) / 2e-4 for u in x]
            )
            weight = 1 / (self.noise_nats * (1 + self.noise_growth * self.curvature * h)) ** 2
            columns = np.stack([np.ones_like(h), h, -self.curvature * slope], axis=1)
            information = self.num_seeds * (columns.T * weight) @ columns
            variances.append(np.linalg.inv(information)[2, 2])
        u = np.log2(self.sizes)
        weight = 1 / (np.array(variances) + self.scatter**2)
        centred = u - np.average(u, weights=weight)
        return 2 * Z90 * np.sqrt(variances), 2 * Z90 / math.sqrt(float((weight * centred**2).sum()))


@dataclass(frozen=True)
class Tally:
    """Shares over many draws of one world, and medians of the widths of intervals over the
    oracle's.
    """

    num: int
    outcomes: dict[str, float]
    optimum_covered: float
    drift_covered: float
    regret_covered: float
    optimum_ratio: float
    drift_ratio: float
    usable: float
    """Share of all optima that are usable."""

    def right(self, world):
        return self.outcomes["drifts" if world.regret_nats else "holds"]

    def wrong(self, world):
        return self.outcomes["holds" if world.regret_nats else "drifts"]

    def __str__(self):
        said = ", ".join(f"{name} {share:.2f}" for name, share in self.outcomes.items())
        return (
            f"{said}; covered: optimum {self.optimum_covered:.2f}, drift {self.drift_covered:.2f}, "
            f"regret {self.regret_covered:.2f}; width over the oracle's: optimum "
            f"{self.optimum_ratio:.2f}, "
            f"drift {self.drift_ratio:.2f}"
        )


def tally(world, num, draws=600, first_seed=1000):
    """Judge `num` draws of a world."""
    outcomes, optimum, drift, regret, optimum_ratio, drift_ratio = [], [], [], [], [], []
    for seed in range(num):
        points, _, optima = world.draw_all(rng(first_seed + seed))
        verdict = judge(points, world.question, seed=seed, draws=draws)
        oracle_optimum, oracle_drift = world.oracle(optima)
        outcomes.append(verdict.outcome)
        for found, width in zip(verdict.optima, oracle_optimum, strict=True):
            if found.interval_log2 is not None:
                low, high = found.interval_log2
                optimum.append(low <= optima[found.size] <= high)
                optimum_ratio.append((high - low) / width)
        if verdict.drift is not None:
            drift.append(verdict.drift.low <= world.drift <= verdict.drift.high)
            drift_ratio.append((verdict.drift.high - verdict.drift.low) / oracle_drift)
        if verdict.regret_nats is not None:
            off = verdict.transferred_log2 - optima[world.target_size]
            true = world.valley(off, world.target_curvature)
            # an end that is more than this holds all beyond it
            true = min(true, verdict.regret_nats.most)
            regret.append(verdict.regret_nats.low - 1e-12 <= true <= verdict.regret_nats.high)
    shares = {name: outcomes.count(name) / num for name in ("holds", "drifts", "cannot_tell")}
    mean, median = (
        lambda found, of=of: float(of(found)) if found else math.nan for of in (np.mean, np.median)
    )
    return Tally(
        num,
        shares,
        mean(optimum),
        mean(drift),
        mean(regret),
        median(optimum_ratio),
        median(drift_ratio),
        len(optimum) / num / len(world.sizes),
    )


WIDE = World((32, 64, 128, 256), tuple(range(-9, -2)), 3, 0.005, 1024)
"""The setting of the promise."""
SMALL = World((32, 64, 128), tuple(range(-8, -3)), 2, 0.01, 256)

# mean validation loss over 3 seeds, Python's standard library as bytes, rates 2^-10 and up
CPU_GRID = {
    ("mup", 32): (2.713, 2.506, 2.376, 2.271, 2.212, 2.202, 2.253, 2.338),
    ("mup", 64): (2.630, 2.436, 2.292, 2.171, 2.103, 2.112, 2.149, 2.278),
    ("mup", 128): (2.573, 2.392, 2.235, 2.097, 2.019, 2.026, 2.103, 2.192),
    ("mup", 256): (2.532, 2.362, 2.185, 2.038, 1.957, 1.976, 2.051),
    ("sp", 64): (2.432, 2.298, 2.176, 2.101, 2.101, 2.140, 2.250, 2.508),
    ("sp", 128): (2.229, 2.078, 2.001, 1.999, 2.093, 2.241, 2.483, 2.666),
    ("sp", 256): (1.997, 1.917, 1.930, 2.040, 2.227, 2.403, 2.563),
}


def cpu_grid(arm, widths):
    return [
        Point(size=width, log2_value=float(i - 10), loss_nats=loss)
        for width in widths
        for i, loss in enumerate(CPU_GRID[arm, width])
    ]


def rng(seed):
    return np.random.default_rng(seed)
