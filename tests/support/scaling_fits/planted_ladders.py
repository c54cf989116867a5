"""Synthetic ladders of runs with a planted scaling law.

Their sizes are those of the demo or larger.
"""

import numpy as np

from forerun._scaling_fits.laws.law import center_runs
from forerun._scaling_fits.laws.table import from_columns

SIZES = np.geomspace(3e4, 1e6, 4)
TOKENS = np.array([1e5, 2.8e5, 8e5])
CHINCHILLA = {"E": 1.2, "A": 40.0, "B": 60.0, "alpha": 0.34, "beta": 0.37}
COUPLED = {"E": 1.1, "A": 250.0, "B": 900.0, "alpha": 0.5, "beta": 0.55, "k": 0.6}
POWER = {"A": 12.0, "B": 40.0, "alpha": 0.14, "beta": 0.2}


def compute_law_loss(law, params, tokens):
    """Return the loss of a planted law in nats. The form follows from the names of its
    parameters.
    """
    inner = law["A"] * params ** -law["alpha"] + law["B"] * tokens ** -law["beta"]
    return law.get("E", 0.0) + inner ** law.get("k", 1.0)


def make_ladder(law, rng=None, noise=0.0, num_runs=12, sizes=SIZES, tokens=TOKENS):
    """Return the runs of a grid of sizes and tokens, with noise in nats. With `rng`, only
    `num_runs` random places of the grid are kept.
    """
    n, d = (axis_grid.reshape(-1) for axis_grid in np.meshgrid(sizes, tokens, indexing="ij"))
    if rng is not None and num_runs < len(n):
        kept = np.sort(rng.permutation(len(n))[:num_runs])
        n, d = n[kept], d[kept]
    loss = compute_law_loss(law, n, d)
    if noise:
        loss = loss + rng.normal(0, noise, len(n))
    return from_columns(n, d, loss)


def make_centered_points():
    """Return twelve noisy runs of the law `CHINCHILLA` in centered logs."""
    return center_runs(make_ladder(CHINCHILLA, np.random.default_rng(0), noise=0.01))[0]


TRUTHS = {"chinchilla": CHINCHILLA, "coupled": COUPLED, "power": POWER}
"""Planted law of each form."""
