"""Accuracy of compute-optimal sizes on simulated runs and on public IsoFLOP points.

    python benchmarks/statistics/isoflop.py --json benchmarks/results/isoflop.json

The first table has runs drawn from a known law with noise, by design: the error of N* (root mean
square of the log, and its mean, the bias), the share of 90 % intervals that cover N*, and the
exponent. The second has the ten setups of arXiv 2406.19146: forerun's exponent of N* with its 95 %
interval and the published one. The third has the same setups with budgets of up to a third, a tenth
and a thirtieth of the largest, which predict N* there (itself an estimate). It takes about three
minutes of one core. The public points are read from `--data`; without them their tables are left
out.
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

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "scaling_fits" / "optima"))

import planted_optima as planted

from scaling_fits.compute.isoflop import fit_isoflop
from scaling_fits.compute.optima import ComputeFit, predict_at

DESIGNS = (  # budgets, sizes each, half width in ln N, noise of a run in log loss
    (5, 7, 1.4, 0.001),
    (5, 7, 2.0, 0.003),
    (8, 9, 2.5, 0.002),
    (11, 12, 3.5, 0.003),
    (3, 7, 1.4, 0.001),
)
RATIOS = (3, 10, 30)


def planted_row(design: tuple[int, int, float, float], worlds: int) -> dict[str, Any]:
    num_budgets, num_sizes, half_width, noise = design
    budgets = 10.0 ** (17 + 0.35 * np.arange(num_budgets))
    off, held, exponents, seconds = [], [], [], 0.0
    for seed in range(worlds):
        table = planted.isoflop_runs(budgets, num_sizes, half_width, noise, seed, shift=0.3)
        start = time.perf_counter()
        fit = fit_isoflop(table, bootstrap=300, seed=seed)
        seconds += time.perf_counter() - start
        for at in fit.optima:
            if at.params and at.params_interval:
                off.append(math.log(at.params / planted.best_params(at.flops)))
                held.append(
                    at.params_interval[0] <= planted.best_params(at.flops) <= at.params_interval[1]
                )
        if fit.params_law is not None:
            low, high = fit.params_law.exponent_interval(0, 0.9)
            exponents.append(low <= planted.PARAMS_EXPONENT <= high)
    return {
        "budgets": num_budgets,
        "sizes": num_sizes,
        "half_width": half_width,
        "noise": noise,
        "bias": float(np.mean(off)),
        "rms": float(np.sqrt(np.mean(np.square(off)))),
        "n_covered": float(np.mean(held)),
        "exponent_covered": float(np.mean(exponents)),
        "seconds": seconds / worlds,
    }


def setup_row(name: str, table: Any, published: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "setup": name,
        "published": published["exponent"],
        "published_95": published["interval"],
    }
    law = fit_isoflop(table).params_law
    row["window"] = None if law is None else law.exponents[0]
    row["window_95"] = None if law is None else law.exponent_interval(0, 0.95)
    return row


def hindcast_rows(tables: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for name, table in tables.items():
        best = [at for at in fit_isoflop(table).optima if at.status == "ok"][-1]
        for ratio in RATIOS:
            fit = fit_isoflop(table.rows(table.flops <= 1.01 * best.flops / ratio))
            if fit.status == "converged":
                rows.append({"setup": name, "ratio": ratio} | _held(fit, best))
    return rows


def _held(fit: ComputeFit, best: Any) -> dict[str, Any]:
    at = predict_at(fit, best.flops)
    assert at.params_interval
    return {
        "params_error": math.log(at.params / best.params),
        "params_covered": at.params_interval[0] <= best.params <= at.params_interval[1],
    }


def show(result: dict[str, Any]) -> None:
    print("budgets sizes width noise  bias N*  rms N*  N* held  exponent held  s per fit")
    for row in result["planted"]:
        print(
            f"{row['budgets']:7} {row['sizes']:5} {row['half_width']:5} {row['noise']:5}"
            f" {row['bias']:+8.2%} {row['rms']:7.2%} {row['n_covered']:8.2f} "
            f"{row['exponent_covered']:14.2f}"
            f" {row['seconds']:10.2f}"
        )
    if "setups" not in result:
        print("the public points are not there: their tables are left out")
        return
    print(f"\n{'setup (arXiv 2406.19146)':40} published 95 %           window 95 %")
    for row in result["setups"]:
        low, high = row["published_95"]
        ours = row["window_95"]
        print(
            f"{row['setup']:40} {row['published']:.4f} [{low:.4f}, {high:.4f}]  "
            f"{row['window']:.4f} "
            f"[{ours[0]:.4f}, {ours[1]:.4f}]"
        )
    print("\nratio  setups  median |error| N*  N* held")
    for ratio in RATIOS:
        part = [row for row in result["hindcasts"] if row["ratio"] == ratio]
        off = np.median([abs(row["params_error"]) for row in part])
        held = np.mean([row["params_covered"] for row in part])
        print(f"{ratio:5}  {len(part):6} {off:18.2%} {held:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--worlds", type=int, default=30, help="of each planted row")
    parser.add_argument(
        "--data", type=Path, default=planted.PORIAN, help="folder of isoflop_points.csv"
    )
    arguments = parser.parse_args()
    start = time.perf_counter()
    result: dict[str, Any] = {"python": platform.python_version(), "worlds": arguments.worlds}
    result["planted"] = [planted_row(design, arguments.worlds) for design in DESIGNS]
    if (arguments.data / "isoflop_points.csv").exists():
        planted.PORIAN = arguments.data
        setups = {"/".join(key): value for key, value in planted.porian_setups().items()}
        result["setups"] = [setup_row(name, *value) for name, value in setups.items()]
        result["hindcasts"] = hindcast_rows({name: table for name, (table, _) in setups.items()})
    result["seconds"] = time.perf_counter() - start
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
