"""Synthetic ladders with a planted law, of the size the demo trains or larger."""

import numpy as np

from scaling_fits.laws.table import from_columns

SIZES = np.geomspace(3e4, 1e6, 4)
TOKENS = np.array([1e5, 2.8e5, 8e5])
CHINCHILLA = {"E": 1.2, "A": 40.0, "B": 60.0, "alpha": 0.34, "beta": 0.37}
COUPLED = {"E": 1.1, "A": 250.0, "B": 900.0, "alpha": 0.5, "beta": 0.55, "k": 0.6}
POWER = {"A": 12.0, "B": 40.0, "alpha": 0.14, "beta": 0.2}


def law_loss(law, params, tokens):
    """Loss of a planted law, in nats; the law is known by its names."""
    inner = law["A"] * params ** -law["alpha"] + law["B"] * tokens ** -law["beta"]
    return law.get("E", 0.0) + inner ** law.get("k", 1.0)


def ladder(law, rng=None, noise=0.0, num_runs=12, sizes=SIZES, tokens=TOKENS):
    """Runs of a grid of sizes and tokens, all or a random part, with noise in nats."""
    n, d = (grid.reshape(-1) for grid in np.meshgrid(sizes, tokens, indexing="ij"))
    if rng is not None and num_runs < len(n):
        kept = np.sort(rng.permutation(len(n))[:num_runs])
        n, d = n[kept], d[kept]
    loss = law_loss(law, n, d)
    if noise:
        loss = loss + rng.normal(0, noise, len(n))
    return from_columns(n, d, loss)


TRUTHS = {"chinchilla": CHINCHILLA, "coupled": COUPLED, "power": POWER}
