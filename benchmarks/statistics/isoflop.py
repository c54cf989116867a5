"""Accuracy of compute-optimal sizes on simulated runs and on public IsoFLOP points.

    python benchmarks/statistics/isoflop.py --json benchmarks/results/isoflop.json

The script prints three tables and writes them. N* is the best number of parameters for a budget.

1. Runs drawn from a known law with noise, one row per design. The row has the error of N* (the root
   mean square of its log, and the mean, which is the bias), the share of 90 % intervals that cover
   N*, and the same share for the exponent.
2. The ten setups of arXiv 2406.19146, with forerun's exponent of N*, its 95 % interval, and the
   published exponent.
3. The same setups. The budgets of up to a third, a tenth and a thirtieth of the largest budget
   predict N* at the largest budget. The N* fitted there is an estimate too.

The script takes about three minutes of one core. It reads the public points from `--data`; without
them, it leaves out the second and the third table.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support" / "scaling_fits"))

import planted_optima as planted

from forerun._scaling_fits.optima.isoflop import fit_isoflop
from forerun._scaling_fits.optima.optima_fit import ComputeFit, predict_at

DESIGNS = (
    (5, 7, 1.4, 0.001),
    (5, 7, 2.0, 0.003),
    (8, 9, 2.5, 0.002),
    (11, 12, 3.5, 0.003),
    (3, 7, 1.4, 0.001),
)
"""Budgets, sizes per budget, half width in ln N, and noise of a run in log loss."""
RATIOS = (3, 10, 30)
"""Ratios of the largest budget to the largest budget that a prediction uses."""


def measure_design(design: tuple[int, int, float, float], num_worlds: int) -> dict[str, Any]:
    """Fit planted runs of one design in many worlds and return the row."""
    num_budgets, num_sizes, half_width, noise = design
    # From 1e17 FLOPs, each budget 2.2 times the one before
    budgets = 10.0 ** (17 + 0.35 * np.arange(num_budgets))
    errors, covered, exponents, seconds = [], [], [], 0.0
    for seed in range(num_worlds):
        table = planted.make_isoflop_runs(budgets, num_sizes, half_width, noise, seed, shift=0.3)
        start = time.perf_counter()
        fit = fit_isoflop(table, bootstrap=300, seed=seed)
        seconds += time.perf_counter() - start
        for optimum in fit.optima:
            if optimum.params and optimum.params_interval:
                errors.append(math.log(optimum.params / planted.compute_best_params(optimum.flops)))
                covered.append(
                    optimum.params_interval[0]
                    <= planted.compute_best_params(optimum.flops)
                    <= optimum.params_interval[1]
                )
        if fit.params_law is not None:
            low, high = fit.params_law.compute_exponent_interval(0, 0.9)
            exponents.append(low <= planted.PARAMS_EXPONENT <= high)
    return {
        "budgets": num_budgets,
        "sizes": num_sizes,
        "half_width": half_width,
        "noise": noise,
        "bias": float(np.mean(errors)),
        "rms": float(np.sqrt(np.mean(np.square(errors)))),
        "n_covered": float(np.mean(covered)),
        "exponent_covered": float(np.mean(exponents)),
        "seconds": seconds / num_worlds,
    }


def fit_setup(name: str, table: Any, published: dict[str, Any]) -> dict[str, Any]:
    """Return forerun's and the published exponent of one public setup."""
    row: dict[str, Any] = {
        "setup": name,
        "published": published["exponent"],
        "published_95": published["interval"],
    }
    law = fit_isoflop(table).params_law
    row["window"] = None if law is None else law.exponents[0]
    row["window_95"] = None if law is None else law.compute_exponent_interval(0, 0.95)
    return row


def predict_largest_budgets(tables: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the errors of N* at each setup's largest budget, predicted from smaller budgets."""
    rows = []
    for name, table in tables.items():
        largest = [optimum for optimum in fit_isoflop(table).optima if optimum.status == "ok"][-1]
        for ratio in RATIOS:
            # 1.01: rounding must not leave out a budget at the limit
            fit = fit_isoflop(table.select_runs(table.flops <= 1.01 * largest.flops / ratio))
            if fit.status == "converged":
                rows.append({"setup": name, "ratio": ratio} | _compare_with_optimum(fit, largest))
    return rows


def _compare_with_optimum(fit: ComputeFit, largest: Any) -> dict[str, Any]:
    """Return the error of N* at a budget, and whether its interval covers the fitted optimum."""
    prediction = predict_at(fit, largest.flops)
    assert prediction.params_interval
    return {
        "params_error": math.log(prediction.params / largest.params),
        "params_covered": prediction.params_interval[0]
        <= largest.params
        <= prediction.params_interval[1],
    }


def print_tables(result: dict[str, Any]) -> None:
    """Print the three tables."""
    print("budgets sizes width noise  bias N*  rms N*  N* held  exponent held  s per fit")
    for row in result["planted"]:
        print(
            f"{row['budgets']:7} {row['sizes']:5} {row['half_width']:5} {row['noise']:5}"
            f" {row['bias']:+8.2%} {row['rms']:7.2%} {row['n_covered']:8.2f} "
            f"{row['exponent_covered']:14.2f}"
            f" {row['seconds']:10.2f}"
        )
    if "setups" not in result:
        print("no isoflop_points.csv in --data: the tables of public points are left out")
        return
    print(f"\n{'setup (arXiv 2406.19146)':40} published 95 %           window 95 %")
    for row in result["setups"]:
        low, high = row["published_95"]
        interval = row["window_95"]
        print(
            f"{row['setup']:40} {row['published']:.4f} [{low:.4f}, {high:.4f}]  "
            f"{row['window']:.4f} "
            f"[{interval[0]:.4f}, {interval[1]:.4f}]"
        )
    print("\nratio  setups  median |error| N*  N* held")
    for ratio in RATIOS:
        ratio_rows = [row for row in result["hindcasts"] if row["ratio"] == ratio]
        median_error = np.median([abs(row["params_error"]) for row in ratio_rows])
        covered = np.mean([row["params_covered"] for row in ratio_rows])
        print(f"{ratio:5}  {len(ratio_rows):6} {median_error:18.2%} {covered:8.2f}")


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="Result file.")
    parser.add_argument("--worlds", type=int, default=30, help="Worlds of each planted row.")
    parser.add_argument(
        "--data", type=Path, default=planted.PORIAN, help="Folder of isoflop_points.csv."
    )
    options = parser.parse_args()
    start = time.perf_counter()
    result: dict[str, Any] = {"python": platform.python_version(), "worlds": options.worlds}
    result["planted"] = [measure_design(design, options.worlds) for design in DESIGNS]
    if (options.data / "isoflop_points.csv").exists():
        planted.PORIAN = options.data  # `read_porian_setups` reads from this folder.
        setups = {"/".join(key): value for key, value in planted.read_porian_setups().items()}
        result["setups"] = [fit_setup(name, *value) for name, value in setups.items()]
        result["hindcasts"] = predict_largest_budgets(
            {name: table for name, (table, _) in setups.items()}
        )
    result["seconds"] = time.perf_counter() - start
    print_tables(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
