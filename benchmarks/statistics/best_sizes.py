"""Accuracy of the predicted best size of a larger budget on public isoFLOP families.

    python benchmarks/statistics/best_sizes.py --json benchmarks/results/best_sizes.json

An isoFLOP family has runs of several sizes, of N parameters, at each of several FLOP budgets. The
true best size is the minimum over log N of a parabola through the runs of the largest budget within
a factor 3.7 of its best run. Budgets whose minimum lies at an edge are left out. Fits see the runs
of up to 1/r of that budget. Errors are in log N: 0.1 is 10 %, and 0.6 costs about 0.3 % of the
loss. For comparison with `auto` the results have single laws, as most people fit them, and the law
of optima of `--form isoflop`. Intervals have level 0.9.

The script prints a table and writes it with all tasks. It needs the public families (`make data`)
and takes about 3 minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import platform
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from datasets import load_families

from forerun._scaling_fits.allocation.allocate import allocate
from forerun._scaling_fits.allocation.spending import Spending, find_log_best_params
from forerun._scaling_fits.forecast.uncertainty import fit_runs
from forerun._scaling_fits.laws import law
from forerun._scaling_fits.laws.forms import Form
from forerun._scaling_fits.laws.law import CannotTellError, LawError
from forerun._scaling_fits.laws.solver import Floats
from forerun._scaling_fits.laws.table import RunTable
from forerun._scaling_fits.optima import isoflop
from forerun._scaling_fits.optima.optima_fit import OptimaError, predict_at

RATIOS = (3, 10, 30)
SAME_BUDGET_RATIO = 1.15
"""Ratio of FLOPs within which two runs have the same budget."""
NEAR_LOG_PARAMS = 1.3
"""Distance in log N from the best run up to which runs fit the parabola: a factor of 3.7."""
MIN_RUNS = 12
FORMS: tuple[Form, ...] = ("chinchilla", "coupled", "power")


def find_best_size(table: RunTable) -> tuple[float, float] | None:
    """Return log N of the minimum at the largest budget, and its FLOPs 6ND for D tokens.

    The result is None if the runs show no minimum.
    """
    top = table.flops > table.flops.max() / SAME_BUDGET_RATIO
    log_params, log_loss = np.log(table.params[top]), np.log(table.loss[top])
    log_tokens = np.log(table.tokens[top])
    near = np.abs(log_params - log_params[log_loss.argmin()]) < NEAR_LOG_PARAMS
    if near.sum() < 4:  # one more than a parabola has coefficients
        return None
    square, slope, _ = np.polyfit(log_params[near], log_loss[near], 2)
    if square <= 0 or not log_params.min() < -slope / 2 / square < log_params.max():
        return None
    best = float(-slope / 2 / square)
    order = np.argsort(log_params)
    log_tokens_at_best = np.interp(best, log_params[order], log_tokens[order])
    return best, 6 * float(np.exp(best + log_tokens_at_best))


def measure_errors(table: RunTable, six_nd: float, truth: float) -> dict[str, float] | None:
    """Return the error in log N of `auto` with its interval, and of single laws.

    The result is None if the runs identify no law.
    """
    fitted = fit_runs(table, bootstrap=100)
    if fitted.status == "unidentified":
        return None
    choice = allocate(fitted, six_nd)
    assert choice.params_interval is not None
    low, high = np.log(choice.params_interval)
    errors = {
        "auto": float(np.log(choice.params)) - truth,
        "auto covered": float(low <= truth <= high),
        "auto width": float(high - low),
    }
    for form in FORMS:
        fit = law.fit_law(table, form)
        if fit.identified:
            optimum: Floats = find_log_best_params(fit.theta[None, :], Spending(flops=six_nd))
            errors[form] = float(optimum[0]) - truth
    try:
        curves = isoflop.fit_isoflop(
            table, bootstrap=100, flops_from="6nd" if table.budget is None else None
        )
        prediction = predict_at(curves, six_nd)
    except (CannotTellError, LawError, OptimaError):
        return errors
    assert prediction.params_interval is not None
    low, high = np.log(prediction.params_interval)
    errors |= {
        "isoflop": float(np.log(prediction.params)) - truth,
        "isoflop covered": float(low <= truth <= high),
        "isoflop width": float(high - low),
    }
    return errors


def main() -> None:
    """Measure all tasks, print the table, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="Result file.")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for family in load_families():
        best = find_best_size(family.table)
        for ratio in RATIOS if best else ():
            # 1.0001: rounding must not leave out runs at the limit
            below = family.table.flops <= family.table.flops.max() / ratio * 1.0001
            errors = (
                measure_errors(family.table.select_runs(below), best[1], best[0])
                if below.sum() >= MIN_RUNS and best
                else None
            )
            if errors:
                rows.append(
                    {"family": family.name, "group": family.group, "ratio": ratio, **errors}
                )
    means: dict[str, Any] = {}
    print(f"{len(rows)} tasks\nlog N*       tasks    rms  median |error|  covered  width")
    for name in ("auto", "isoflop", *FORMS):
        rows_with_name = [row for row in rows if name in row]
        errors_of_name = np.array([row[name] for row in rows_with_name])
        means[name] = {
            "num_tasks": len(rows_with_name),
            "rms": float(np.sqrt((errors_of_name**2).mean())),
            "median_abs": float(np.median(np.abs(errors_of_name))),
        }
        text = (
            f"{name:12s} {len(rows_with_name):5d} {means[name]['rms']:6.2f} "
            f"{means[name]['median_abs']:15.2f}"
        )
        if f"{name} width" in rows_with_name[0]:
            covered = float(np.mean([row[f"{name} covered"] for row in rows_with_name]))
            width = float(np.median([row[f"{name} width"] for row in rows_with_name]))
            means[name] |= {"covered": covered, "median_width": width}
            text += f" {covered:8.2f} {width:6.2f}"
        print(text)
    both = [row for row in rows if "isoflop" in row]
    widths = [
        float(np.median([row[f"{name} width"] for row in both])) for name in ("auto", "isoflop")
    ]
    print(f"on the {len(both)} tasks of both: auto {widths[0]:.2f} wide, isoflop {widths[1]:.2f}")
    if options.json:
        result = {
            "machine": platform.platform(),
            "means": means,
            "tasks": rows,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
