"""Planted truths without an optimum: how a loss depends on a clip or a warmup, and runs drawn from
it.
"""

from __future__ import annotations

import numpy as np

from transfer.question import Point, Question

BASE = 32
OFFSETS = (-2, -1, 0, 1, 2)
MARGIN = 0.01

# loss at x octaves above the transferred value, d doublings above the base; it costs under the
# margin
HARMLESS = {
    "flat": lambda x, d: 0.0 * x,
    "saturated": lambda x, d: 0.04 * np.exp(-1.5 * (x + 2)),
    "kink": lambda x, d: 0.03 * np.maximum(0, -x),
    "steep kink": lambda x, d: 0.2 * np.maximum(0, -x),
    "cliff above": lambda x, d: 0.2 * np.maximum(0, x - 1),
    "inner optimum": lambda x, d: 0.03 * x**2 / 2,
    "fading valley": lambda x, d: 0.06 * 2.0**-d * x**2 / 2,
    "fading slope": lambda x, d: -0.012 * 2.0**-d * x,
}
HARMFUL = {  # three margins lost
    "falling to the edge": lambda x, d: -0.015 * x,
    "kink above": lambda x, d: 0.03 * np.maximum(0, 1 - x),
    "optimum elsewhere": lambda x, d: 0.06 * (x - 1) ** 2 / 2,
    "one-sided": lambda x, d: 0.03 * (np.exp(-x) - np.exp(-2)) / (1 - np.exp(-2)),
}
GROWING = {  # d doublings make it worse
    "slope": lambda x, d: -0.004 * d * x,
    "optimum": lambda x, d: 0.02 * (x - 0.35 * d) ** 2 / 2,
}


def question(num_sizes, beyond, **others):
    """The target `beyond` times the largest size that is run."""
    wanted = {"hyperparameter": "clip_norm", "transferred_log2": 0.0, **others}
    return Question(target_size=BASE * 2 ** (num_sizes - 1) * beyond, base_size=BASE, **wanted)


def draw(truth, rng, num_sizes=3, noise_nats=0.005, num_seeds=2, offsets=OFFSETS):
    points = []
    for d in range(num_sizes):
        own = rng.normal(0, 0.02, num_seeds)
        for x in offsets:
            for seed in range(num_seeds):
                loss = 3 - 0.1 * d + own[seed] + truth(np.float64(x), d) + rng.normal(0, noise_nats)
                points.append(
                    Point(size=BASE * 2**d, log2_value=float(x), loss_nats=float(loss), seed=seed)
                )
    return points


def regret(truth, d, offsets=OFFSETS):
    """Against the best of the values tried."""
    return float(truth(np.float64(0), d) - min(truth(np.float64(x), d) for x in offsets))
