"""Planted truths: runs drawn from basins whose optimum, drift and regret are known, and the
intervals that an observer with full knowledge would report.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from forerun._transfer.question import Point, Question
from forerun._transfer.verdict.verdict import judge

Z90 = 1.6449
"""Half width of a 90 % interval in standard deviations of a normal distribution."""


def compute_parabola(octaves, curvature):
    """Return the rise of a parabola."""
    return 0.5 * curvature * octaves**2


def compute_two_parabolas(octaves, curvature):
    """Return the rise of a parabola that is twice as steep on the side of divergence."""
    return 0.5 * curvature * octaves**2 * (2 if octaves > 0 else 1)


def compute_linex(octaves, curvature, s=0.3):
    """Return the rise of a linex curve: exponential on one side, linear on the other."""
    return curvature * (math.expm1(s * octaves) - s * octaves) / s**2


def make_linex(s):
    """Return the linex rise with slant `s`."""
    return lambda octaves, curvature: compute_linex(octaves, curvature, s)


def make_power(p):
    """Return the rise of the power `p` of the distance."""
    return lambda octaves, curvature: 0.5 * curvature * abs(octaves) ** p


def compute_straight_cliff(octaves, curvature):
    """Return the rise of a parabola that becomes a straight wall 1.2 octaves above its minimum."""
    return 0.5 * curvature * (octaves**2 + 6 * max(octaves - 1.2, 0.0))


def compute_lopsided_quartic(octaves, curvature):
    """Return the rise of x^4 + 0.3 x^2 + 0.3 x about its minimum at -0.307.

    Far from the minimum, the curve looks as if its minimum were elsewhere.
    """
    x = octaves - 0.307035947
    # The constant term makes the rise at the minimum 0
    return curvature * (x**4 + 0.3 * x**2 + 0.3 * x + 0.054942427117) / 2


@dataclass(frozen=True)
class World:
    """One planted truth and the design of the runs that measure it."""

    sizes: tuple[int, ...]
    rates: tuple[float, ...]
    num_seeds: int
    noise_nats: float
    target_size: int
    compute_rise: object = compute_linex
    """Loss above the minimum as a function of the octaves from it and of the curvature."""
    regret_nats: float = 0.0
    """Regret of the base optimum at the target, in nats."""
    curvature: float = 0.06
    """Curvature of the basin at the smallest size, nats per octave squared."""
    seed_sd: float = 0.02
    """Standard deviation of the offsets of seeds, in nats."""
    scatter: float = 0.0
    """Standard deviation of every optimum about the line in octaves, the target's included."""
    noise_growth: float = 0.0
    """Growth of the noise: a loss of x nats above the minimum has 1 + noise_growth * x times the
    noise."""
    drift_octaves: float | None = None
    """Drift in octaves per doubling. If it is given, `regret_nats` does not determine the drift."""
    curvature_trend: float = 0.0
    """Change of the log of the curvature, per doubling."""
    curvature_scatter: float = 0.0
    """Standard deviation of the log of the curvature about its trend."""
    at_base: float = -6.0
    """Mean of the optimum at the base, as log2 of the rate."""

    @property
    def target_curvature(self):
        return self.curvature * math.exp(
            self.curvature_trend * math.log2(self.target_size / self.sizes[0])
        )

    @property
    def drift(self):
        """Drift in octaves per doubling.

        If it is not given, the optimum falls so fast that the regret at the target is the planted
        one.
        """
        if self.drift_octaves is not None:
            return self.drift_octaves
        # Bisection for the octaves at which the basin loses `regret_nats`
        low, high = 0.0, 8.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (
                (middle, high)
                if self.compute_rise(middle, self.target_curvature) < self.regret_nats
                else (low, middle)
            )
        return -low / math.log2(self.target_size / self.sizes[0])

    @property
    def question(self):
        return Question(target_size=self.target_size, base_size=self.sizes[0])

    def compute_optimum(self, size, base):
        """Return log2 of the optimum of a size on the line, given that at the smallest size."""
        return base + self.drift * math.log2(size / self.sizes[0])

    def draw(self, rng, spike=0.0):
        """Draw the runs of one world. Return them, and log2 of the optimum on the line at the
        smallest size. For a world with scatter, use `draw_all`.
        """
        points, base, _ = self.draw_all(rng, spike)
        return points, base

    def draw_all(self, rng, spike=0.0):
        """Draw the runs of one world. Return them, log2 of the optimum on the line at the smallest
        size, and the optimum of every size, the target included.

        The loss of one random run is raised by `spike` nats. The order of the random draws fixes
        the runs that a seed gives, and tests rely on particular seeds.
        """
        base = self.at_base + rng.uniform(-0.5, 0.5)
        spiked = (rng.choice(self.sizes), rng.choice(self.rates), rng.integers(self.num_seeds))
        points, optima = [], {}
        for size in (*self.sizes, self.target_size):
            optima[size] = self.compute_optimum(size, base)
            if self.scatter:
                optima[size] += self.scatter * rng.normal()
        for size in self.sizes:
            offsets = rng.normal(0, self.seed_sd, self.num_seeds)
            curvature = self.curvature * math.exp(
                self.curvature_trend * math.log2(size / self.sizes[0])
            )
            if self.curvature_scatter:
                curvature *= math.exp(self.curvature_scatter * rng.normal())
            for rate in self.rates:
                rise = self.compute_rise(rate - optima[size], curvature)
                for seed in range(self.num_seeds):
                    loss = 3 - 0.1 * math.log2(size) + offsets[seed] + rise
                    loss += rng.normal(0, self.noise_nats) * (1 + self.noise_growth * rise)
                    if (size, rate, seed) == spiked:
                        loss += spike
                    points.append(
                        Point(size=size, log2_value=float(rate), loss_nats=float(loss), seed=seed)
                    )
        return points, base, optima

    def compute_oracle_widths(self, optima):
        """Return the widths of the 90 % intervals of each optimum and of the drift, for an observer
        who knows the basin's shape and the noise.

        Such an observer fits the height, curvature and minimum of each size by least squares, whose
        variances are at the Cramer-Rao bound.
        """
        variances = []
        for size in self.sizes:
            x = np.array(self.rates) - optima[size]
            h = np.array([self.compute_rise(u, 1.0) for u in x])
            # Central differences
            slope = np.array(
                [
                    (self.compute_rise(u + 1e-4, 1.0) - self.compute_rise(u - 1e-4, 1.0)) / 2e-4
                    for u in x
                ]
            )
            weight = 1 / (self.noise_nats * (1 + self.noise_growth * self.curvature * h)) ** 2
            columns = np.stack([np.ones_like(h), h, -self.curvature * slope], axis=1)
            information = self.num_seeds * (columns.T * weight) @ columns
            variances.append(np.linalg.inv(information)[2, 2])
        u = np.log2(self.sizes)
        weight = 1 / (np.array(variances) + self.scatter**2)
        centered = u - np.average(u, weights=weight)
        slope_width = 2 * Z90 / math.sqrt(float((weight * centered**2).sum()))
        return 2 * Z90 * np.sqrt(variances), slope_width


@dataclass(frozen=True)
class Tally:
    """Shares over many draws of one world, and median interval widths relative to the oracle's."""

    num: int
    outcomes: dict[str, float]
    optimum_covered: float
    drift_covered: float
    regret_covered: float
    optimum_ratio: float
    drift_ratio: float
    usable: float
    """Share of all optima that are usable."""

    def compute_share_right(self, world):
        """Return the share of verdicts that are right."""
        return self.outcomes["drifts" if world.regret_nats else "holds"]

    def compute_share_wrong(self, world):
        """Return the share of verdicts that are wrong."""
        return self.outcomes["holds" if world.regret_nats else "drifts"]

    def __str__(self):
        shares = ", ".join(f"{name} {share:.2f}" for name, share in self.outcomes.items())
        return (
            f"{shares}; covered: optimum {self.optimum_covered:.2f}, drift "
            f"{self.drift_covered:.2f}, regret {self.regret_covered:.2f}; width over the oracle's: "
            f"optimum {self.optimum_ratio:.2f}, drift {self.drift_ratio:.2f}"
        )


def tally_verdicts(world, num, draws=600):
    """Judge `num` draws of a world and count the outcomes."""
    outcomes = []
    # Whether each interval covers the truth
    optimum_covered, drift_covered, regret_covered = [], [], []
    # Width of each interval over the width of the oracle's
    optimum_ratio, drift_ratio = [], []
    for seed in range(num):
        points, _, optima = world.draw_all(np.random.default_rng(1000 + seed))
        verdict = judge(points, world.question, seed=seed, draws=draws)
        oracle_optimum, oracle_drift = world.compute_oracle_widths(optima)
        outcomes.append(verdict.outcome)
        for size_optimum, width in zip(verdict.optima, oracle_optimum, strict=True):
            if size_optimum.interval_log2 is not None:
                low, high = size_optimum.interval_log2
                optimum_covered.append(low <= optima[size_optimum.size] <= high)
                optimum_ratio.append((high - low) / width)
        if verdict.drift is not None:
            drift_covered.append(verdict.drift.low <= world.drift <= verdict.drift.high)
            drift_ratio.append((verdict.drift.high - verdict.drift.low) / oracle_drift)
        if verdict.regret_nats is not None:
            octaves_off = verdict.transferred_log2 - optima[world.target_size]
            true_regret = world.compute_rise(octaves_off, world.target_curvature)
            # An interval that ends at the largest possible regret covers every regret beyond it
            true_regret = min(true_regret, verdict.most_nats)
            regret_covered.append(
                verdict.regret_nats.low - 1e-12 <= true_regret <= verdict.regret_nats.high
            )
    shares = {name: outcomes.count(name) / num for name in ("holds", "drifts", "cannot_tell")}

    def mean(values):
        return float(np.mean(values)) if values else math.nan

    def median(values):
        return float(np.median(values)) if values else math.nan

    return Tally(
        num=num,
        outcomes=shares,
        optimum_covered=mean(optimum_covered),
        drift_covered=mean(drift_covered),
        regret_covered=mean(regret_covered),
        optimum_ratio=median(optimum_ratio),
        drift_ratio=median(drift_ratio),
        usable=len(optimum_covered) / num / len(world.sizes),
    )


WIDE = World(
    sizes=(32, 64, 128, 256),
    rates=tuple(range(-9, -2)),
    num_seeds=3,
    noise_nats=0.005,
    target_size=1024,
)
"""Setting for which the error rates of a verdict are promised."""
SMALL = World(
    sizes=(32, 64, 128),
    rates=tuple(range(-8, -3)),
    num_seeds=2,
    noise_nats=0.01,
    target_size=256,
)
"""Setting with few and noisy runs."""

# Measured mean validation losses over 3 seeds of a byte model of Python's standard library, by
# parametrization and width, at rates of 2^-10 and up
CPU_GRID = {
    ("mup", 32): (2.713, 2.506, 2.376, 2.271, 2.212, 2.202, 2.253, 2.338),
    ("mup", 64): (2.630, 2.436, 2.292, 2.171, 2.103, 2.112, 2.149, 2.278),
    ("mup", 128): (2.573, 2.392, 2.235, 2.097, 2.019, 2.026, 2.103, 2.192),
    ("mup", 256): (2.532, 2.362, 2.185, 2.038, 1.957, 1.976, 2.051),
    ("sp", 64): (2.432, 2.298, 2.176, 2.101, 2.101, 2.140, 2.250, 2.508),
    ("sp", 128): (2.229, 2.078, 2.001, 1.999, 2.093, 2.241, 2.483, 2.666),
    ("sp", 256): (1.997, 1.917, 1.930, 2.040, 2.227, 2.403, 2.563),
}


def list_cpu_points(arm, widths):
    """Return the measured points of a parametrization (`mup` or `sp`) at these widths."""
    return [
        Point(size=width, log2_value=float(i - 10), loss_nats=loss)
        for width in widths
        for i, loss in enumerate(CPU_GRID[arm, width])
    ]
