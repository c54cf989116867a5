"""Planted truths: runs drawn from valleys whose optimum, drift and regret are known."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from transfer.optimum import Point


def parabola(octaves, curvature):
    return 0.5 * curvature * octaves**2


def two_parabolas(octaves, curvature):
    """Twice as steep on the side of divergence, with a kink our fit does not have."""
    return 0.5 * curvature * octaves**2 * (2 if octaves > 0 else 1)


def linex(octaves, curvature, s=0.3):
    return curvature * (math.expm1(s * octaves) - s * octaves) / s**2


@dataclass(frozen=True)
class World:
    widths: tuple[int, ...]
    rates: tuple[float, ...]
    num_seeds: int
    noise_nats: float
    target_width: int
    valley: object = linex
    regret_nats: float = 0.0
    curvature: float = 0.06
    seed_sd: float = 0.02

    @property
    def drift(self):
        """Octaves per doubling that make the planted regret at the target, optimum falling."""
        low, high = 0.0, 8.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.valley(middle, self.curvature) < self.regret_nats else (low, middle)
        return -low / math.log2(self.target_width / self.widths[0])

    def optimum(self, width, base):
        return base + self.drift * math.log2(width / self.widths[0])

    def draw(self, rng, spike=0.0):
        base = -6 + rng.uniform(-0.5, 0.5)
        spiked = (rng.choice(self.widths), rng.choice(self.rates), rng.integers(self.num_seeds))
        points = []
        for width in self.widths:
            offsets = rng.normal(0, self.seed_sd, self.num_seeds)
            for rate in self.rates:
                for seed in range(self.num_seeds):
                    loss = 3 - 0.1 * math.log2(width) + offsets[seed] + rng.normal(0, self.noise_nats)
                    loss += self.valley(rate - self.optimum(width, base), self.curvature)
                    loss += spike if (width, rate, seed) == spiked else 0
                    points.append(Point(width=width, log2_lr=rate, loss_nats=float(loss), seed=seed))
        return points, base


WIDE = World((32, 64, 128, 256), tuple(range(-9, -2)), 3, 0.005, 1024)
SMALL = World((32, 64, 128), tuple(range(-8, -3)), 2, 0.01, 256)

CPU_GRID = {  # mean validation loss over 3 seeds, Python's standard library as bytes, rates 2^-10 and up
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
        Point(width=width, log2_lr=float(i - 10), loss_nats=loss)
        for width in widths
        for i, loss in enumerate(CPU_GRID[arm, width])
    ]


def rng(seed):
    return np.random.default_rng(seed)
