"""Runs with a planted best size, learning rate and batch, and the public IsoFLOP points where they
are available.
"""

import csv
from pathlib import Path

import numpy as np
import pytest

from forerun._scaling_fits.laws.table import RunTable

E, A, B, ALPHA, BETA = 1.82, 478.0, 2143.0, 0.347, 0.367
PARAMS_EXPONENT = BETA / (ALPHA + BETA)
PORIAN = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "porian_refinedweb"
# Columns of the public tables that identify a setup
SETUP = ("hparams", "warmup", "decay", "param_count", "val")


def compute_best_params(flops):
    """Return the best size for these FLOPs."""
    return (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA)) * (flops / 6) ** PARAMS_EXPONENT


def compute_loss(params, tokens):
    """Return the loss of the planted law."""
    return E + A * params**-ALPHA + B * tokens**-BETA


def compute_best_loss(flops):
    """Return the loss of the best size for these FLOPs."""
    return compute_loss(compute_best_params(flops), flops / 6 / compute_best_params(flops))


def make_table(params, tokens, loss, flops=None, **extra):
    """Return a table of runs; FLOPs are 6ND unless given."""
    params, tokens, loss = (np.asarray(column, dtype=float) for column in (params, tokens, loss))
    return RunTable(
        params=params,
        tokens=tokens,
        loss=loss,
        flops=6 * params * tokens if flops is None else flops,
        weight=np.ones(len(params)),
        flops_given=flops is not None,
        **extra,
    )


def make_isoflop_runs(budgets, num_sizes=7, half_width=1.4, noise=0.0, seed=0, shift=0.0):
    """Return runs of sizes spaced evenly about each budget's best size.

    All sizes of a budget are moved by up to `shift` in log N.
    """
    rng = np.random.default_rng(seed)
    flops = np.repeat(budgets, num_sizes)
    log_offsets = np.concatenate(
        [
            np.linspace(-half_width, half_width, num_sizes) + rng.uniform(-shift, shift)
            for _ in budgets
        ]
    )
    params = compute_best_params(flops) * np.exp(log_offsets)
    tokens = flops / 6 / params
    return make_table(
        params,
        tokens,
        compute_loss(params, tokens) * np.exp(noise * rng.standard_normal(len(params))),
    )


# Planted laws of the best learning rate and batch: factor, exponent of N, exponent of D
LR_LAW, BATCH_LAW = (1.8, -0.7, 0.3), (0.6, 0.0, 0.57)


def compute_law(law, params, tokens):
    """Return the value of a planted law of learning rate or batch."""
    return law[0] * params ** law[1] * tokens ** law[2]


def make_grid_runs(cells, noise=0.0, scatter=0.0, seed=0):
    """Return a grid of learning rates and batches about the best of each (N, D).

    The loss is a tilted bowl in log2 of both.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for params, tokens in cells:
        lr, batch = (
            np.log2(compute_law(law, params, tokens)) + scatter * rng.standard_normal()
            for law in (LR_LAW, BATCH_LAW)
        )
        for i in np.round(lr) + np.arange(-3, 4):
            for j in np.round(batch) + np.arange(-2, 3):
                x, y = i - lr, j - batch
                loss = 2.5 * np.exp(
                    0.004 * x * x + 0.003 * y * y - 0.002 * x * y + noise * rng.standard_normal()
                )
                rows.append((params, tokens, loss, 2.0**i, 2.0**j))
    params, tokens, loss, lr, batch = np.array(rows).T
    return make_table(
        params,
        tokens,
        loss,
        extra={"lr": lr, "batch_tokens": batch},
        column_names={"learning_rate": "lr", "batch": "batch_tokens"},
    )


def read_porian_setups():
    """Return the public points and the published exponent with its 95 % interval, by setup."""
    if not PORIAN.exists():
        pytest.skip(f"the public data is not at {PORIAN}")
    tables, published = {}, {}
    with (PORIAN / "isoflop_points.csv").open() as file:
        for row in csv.DictReader(file):
            tables.setdefault(tuple(row[name] for name in SETUP), []).append(row)
    with (PORIAN / "published_fits.csv").open() as file:
        for row in csv.DictReader(file):
            key = tuple(row[name] for name in SETUP)
            if row["kind"] == "fit_basic":
                published.setdefault(key, {})["exponent"] = float(row["n_exponent"])
            if row["kind"] == "fit_bootstrap_summary":
                ends = float(row["n_exponent_lo95"]), float(row["n_exponent_hi95"])
                published.setdefault(key, {})["interval"] = ends
    return {
        key: (
            make_table(
                *([float(row[name]) for row in rows] for name in ("params", "tokens", "loss")),
                flops=np.array([float(row["flops"]) for row in rows]),
            ),
            published[key],
        )
        for key, rows in tables.items()
    }
