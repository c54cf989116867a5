"""Accuracy of the predicted best size of a larger budget on public isoFLOP families.

    python benchmarks/statistics/best_sizes.py --json benchmarks/results/best_sizes.json

The true best size is the minimum over log N of a parabola through the runs of the largest budget
within a factor 3.7 of its best run. Budgets whose minimum lies at an edge are left out. Fits see
the runs of up to 1/r of that budget. Errors are in log N: 0.1 is 10 %, and 0.6 costs about 0.3 % of
the loss. For comparison with `auto` the results have single laws, as most people fit them, and the
law of optima of `--form isoflop`. Intervals have level 0.9. It takes about 3 minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import platform
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from datasets import families

from scaling_fits.allocation.allocate import allocate
from scaling_fits.allocation.spending import Spending, log_best_params
from scaling_fits.compute import isoflop
from scaling_fits.compute.optima import OptimaError, predict_at
from scaling_fits.forecast.uncertainty import fit_runs
from scaling_fits.laws import law
from scaling_fits.laws.forms import Form
from scaling_fits.laws.law import CannotTellError, LawError
from scaling_fits.laws.solver import Floats
from scaling_fits.laws.table import RunTable

RATIOS = (3, 10, 30)
SAME_BUDGET, NEAR, LEAST_RUNS = 1.15, 1.3, 12
FORMS: tuple[Form, ...] = ("chinchilla", "coupled", "power")


def best_size(table: RunTable) -> tuple[float, float] | None:
    """Log N of the minimum at the largest budget, and 6ND there; None where the runs show none."""
    top = table.flops > table.flops.max() / SAME_BUDGET
    n, y = np.log(table.params[top]), np.log(table.loss[top])
    near = np.abs(n - n[y.argmin()]) < NEAR
    if near.sum() < 4:
        return None
    square, slope, _ = np.polyfit(n[near], y[near], 2)
    if square <= 0 or not n.min() < -slope / 2 / square < n.max():
        return None
    best = float(-slope / 2 / square)
    order = np.argsort(n)
    return best, 6 * float(
        np.exp(best + np.interp(best, n[order], np.log(table.tokens[top])[order]))
    )


def errors(table: RunTable, six_nd: float, truth: float) -> dict[str, float] | None:
    """Error in log N of `auto` with its interval, and of single laws; None where the runs identify
    none.
    """
    fitted = fit_runs(table, bootstrap=100)
    if fitted.status == "unidentified":
        return None
    choice = allocate(fitted, six_nd)
    assert choice.params_interval is not None
    low, high = np.log(choice.params_interval)
    found = {
        "auto": float(np.log(choice.params)) - truth,
        "auto covered": float(low <= truth <= high),
        "auto width": float(high - low),
    }
    for form in FORMS:
        fit = law.fit_law(table, form)
        if fit.identified:
            optimum: Floats = log_best_params(fit.theta[None, :], Spending(flops=six_nd))
            found[form] = float(optimum[0]) - truth
    try:
        curves = isoflop.fit_isoflop(
            table, bootstrap=100, flops_from="6nd" if table.budget is None else None
        )
        there = predict_at(curves, six_nd)
    except (CannotTellError, LawError, OptimaError):
        return found
    assert there.params_interval is not None
    low, high = np.log(there.params_interval)
    found |= {
        "isoflop": float(np.log(there.params)) - truth,
        "isoflop covered": float(low <= truth <= high),
        "isoflop width": float(high - low),
    }
    return found


def main() -> None:
    """Run all, print, and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for family in families():
        best = best_size(family.table)
        for ratio in RATIOS if best else ():
            below = family.table.flops <= family.table.flops.max() / ratio * 1.0001
            found = (
                errors(family.table.rows(below), best[1], best[0])
                if below.sum() >= LEAST_RUNS and best
                else None
            )
            if found:
                rows.append({"family": family.name, "group": family.group, "ratio": ratio, **found})
    means: dict[str, Any] = {}
    print(f"{len(rows)} tasks\nlog N*       tasks    rms  median |error|  covered  width")
    for name in ("auto", "isoflop", *FORMS):
        kept = [row for row in rows if name in row]
        each = np.array([row[name] for row in kept])
        means[name] = {
            "num_tasks": len(kept),
            "rms": float(np.sqrt((each**2).mean())),
            "median_abs": float(np.median(np.abs(each))),
        }
        text = (
            f"{name:12s} {len(kept):5d} {means[name]['rms']:6.2f} {means[name]['median_abs']:15.2f}"
        )
        if f"{name} width" in kept[0]:
            covered = float(np.mean([row[f"{name} covered"] for row in kept]))
            width = float(np.median([row[f"{name} width"] for row in kept]))
            means[name] |= {"covered": covered, "median_width": width}
            text += f" {covered:8.2f} {width:6.2f}"
        print(text)
    both = [row for row in rows if "isoflop" in row]
    widths = [
        float(np.median([row[f"{name} width"] for row in both])) for name in ("auto", "isoflop")
    ]
    print(f"on the {len(both)} tasks of both: auto {widths[0]:.2f} wide, isoflop {widths[1]:.2f}")
    if options.json:
        body = {
            "machine": platform.platform(),
            "means": means,
            "tasks": rows,
        }
        options.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
