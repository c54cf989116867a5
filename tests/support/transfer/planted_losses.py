"""Planted losses of a value that need not have an optimum, such as a clip norm or a warmup, and
runs drawn from them.
"""

from __future__ import annotations

import numpy as np

from forerun._transfer.question import Point, Question

BASE = 32
OFFSETS = (-2, -1, 0, 1, 2)
"""Octaves of the values that are run from the transferred value."""
MARGIN = 0.01
"""Default margin of a question, in nats."""

# The functions below return the loss at x octaves above the transferred value and d doublings above
# the base. In `HARMLESS`, the regret of the transferred value is below the margin.
HARMLESS = {
    "flat": lambda x, d: 0.0 * x,
    "saturated": lambda x, d: 0.04 * np.exp(-1.5 * (x + 2)),
    "kink": lambda x, d: 0.03 * np.maximum(0, -x),
    "steep kink": lambda x, d: 0.2 * np.maximum(0, -x),
    "cliff above": lambda x, d: 0.2 * np.maximum(0, x - 1),
    "inner optimum": lambda x, d: 0.03 * x**2 / 2,
    "fading basin": lambda x, d: 0.06 * 2.0**-d * x**2 / 2,
    "fading slope": lambda x, d: -0.012 * 2.0**-d * x,
}
# In these, the regret is three margins at every size
HARMFUL = {
    "falling to the edge": lambda x, d: -0.015 * x,
    "kink above": lambda x, d: 0.03 * np.maximum(0, 1 - x),
    "optimum elsewhere": lambda x, d: 0.06 * (x - 1) ** 2 / 2,
    "one-sided": lambda x, d: 0.03 * (np.exp(-x) - np.exp(-2)) / (1 - np.exp(-2)),
}
# In these, the regret grows with the doublings
GROWING = {
    "slope": lambda x, d: -0.004 * d * x,
    "optimum": lambda x, d: 0.02 * (x - 0.35 * d) ** 2 / 2,
}


def make_question(num_sizes, beyond, **changes):
    """Return a question whose target is `beyond` times the largest size that is run."""
    fields = {"hyperparameter": "clip_norm", "transferred_log2": 0.0, **changes}
    return Question(target_size=BASE * 2 ** (num_sizes - 1) * beyond, base_size=BASE, **fields)


def draw(truth, rng, num_sizes=3, noise_nats=0.005, num_seeds=2, offsets=OFFSETS):
    """Draw the runs of one planted loss: `num_sizes` sizes, each twice the one before."""
    points = []
    for d in range(num_sizes):
        seed_offsets = rng.normal(0, 0.02, num_seeds)
        for x in offsets:
            for seed in range(num_seeds):
                loss = (
                    3
                    - 0.1 * d
                    + seed_offsets[seed]
                    + truth(np.float64(x), d)
                    + rng.normal(0, noise_nats)
                )
                points.append(
                    Point(size=BASE * 2**d, log2_value=float(x), loss_nats=float(loss), seed=seed)
                )
    return points


def compute_regret(truth, d):
    """Return the regret of the transferred value against the best of the values tried."""
    return float(truth(np.float64(0), d) - min(truth(np.float64(x), d) for x in OFFSETS))
