"""What two packages from PyPI make of the same runs: run by `fits.py --peers PYTHON`, with the packages' interpreter.

Reads {"params": [...], "tokens": [...], "loss": [...]} from stdin, writes {package: {version, theta, cpu_seconds, ...}}
to stdout; CPU time counts child processes. A package that is not there or fails says so in "not_compared".
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import resource
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

# The grid of arXiv 2203.15556, section D.1, has 4,500 starts; its corners and middles are these 243.
GRID = {"e": [-1, 0, 1], "a": [0, 10, 20], "b": [0, 10, 20], "alpha": [0.2, 0.6, 1.2], "beta": [0.2, 0.6, 1.2]}
NUM_DRAWS = 100


def cpu_seconds() -> float:
    """Of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def chinchilla(runs: dict[str, list[float]]) -> dict[str, Any]:
    """The package `chinchilla`: BFGS with finite differences from every point of a grid, our objective given to it."""
    from chinchilla import Chinchilla
    from chinchilla._metrics import log_huber

    def objective(y_true: np.ndarray, y_pred: np.ndarray) -> np.ndarray:
        return log_huber(y_true, np.maximum(y_pred, 1e-300), delta=1e-3)

    with tempfile.TemporaryDirectory() as folder:
        fitter = Chinchilla(folder, param_grid=GRID, loss_fn=objective, log_level=50)
        fitter.visualizer.optim = lambda *_args, **_kwargs: None  # a picture, no part of the fit
        for n, d, loss in zip(runs["params"], runs["tokens"], runs["loss"], strict=True):
            fitter.database.append(C=6 * n * d, N=n, D=d, loss=loss)
        started = cpu_seconds()
        fitter.fit()
        used = cpu_seconds() - started
    theta = [float(np.log(fitter.E)), float(np.log(fitter.A)), float(np.log(fitter.B)), fitter.alpha, fitter.beta, 1.0]
    return {"theta": [float(value) for value in theta], "cpu_seconds": used, "num_starts": 3**5}


def simple_scaling_laws(runs: dict[str, list[float]]) -> dict[str, Any]:
    """The package `simple-scaling-laws`: least squares, its own objective; once alone, once with refits."""
    import polars as pl
    from simple_scaling_laws import fit

    frame = pl.DataFrame(
        {
            "training_run_id": [str(i) for i in range(len(runs["loss"]))],
            "model_size__n_params": runs["params"],
            "dataset_size__n_tokens": runs["tokens"],
            "test_loss__cross_entropy": runs["loss"],
        }
    )
    used = []
    for num_draws in (2, NUM_DRAWS):
        started = cpu_seconds()
        model = fit(frame, law="separable-power", n_draws=num_draws, seed=0)
        used.append(cpu_seconds() - started)
    p = model.params("test_loss__cross_entropy")
    domain = model.observed_domain  # its A and B are of sizes over this reference
    for name, exponent, column in (("A", "alpha", "model_size__n_params"), ("B", "beta", "dataset_size__n_tokens")):
        p[name] *= domain[column]["reference"] ** p[exponent]
    theta = [*(float(np.log(p[name])) for name in "EAB"), float(p["alpha"]), float(p["beta"]), 1.0]
    return {"theta": theta, "cpu_seconds": used[0], "num_draws": NUM_DRAWS, "draws_cpu_seconds": used[1] - used[0]}


def tried(name: str, fit: Callable[[dict[str, list[float]]], dict[str, Any]], runs: dict[str, Any]) -> dict[str, Any]:
    """One package's answer, or why there is none."""
    try:
        version = importlib.metadata.version(name)
        with contextlib.redirect_stdout(io.StringIO()):
            return {"version": version, **fit(runs)}
    except Exception as error:  # a peer may fail in any way; the benchmark goes on and says so
        return {"not_compared": f"{type(error).__name__}: {error}"[:300]}


if __name__ == "__main__":
    table = json.load(sys.stdin)
    answer = {
        "chinchilla": tried("chinchilla", chinchilla, table),
        "simple-scaling-laws": tried("simple-scaling-laws", simple_scaling_laws, table),
    }
    json.dump(answer, sys.stdout)
