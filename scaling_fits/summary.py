"""The JSON that `fit`, `predict`, and `allocate` print. Unknown numbers are null."""

from __future__ import annotations

import dataclasses

from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._scaling_fits.allocation.allocate import Allocation, ExactRun
from forerun._scaling_fits.allocation.budgets import Assumption, BudgetMachine, ComputeBudget
from forerun._scaling_fits.allocation.repeats import SOURCE, DataLimit
from forerun._scaling_fits.allocation.shapes import ShapeChoice
from forerun._scaling_fits.forecast import path as paths
from forerun._scaling_fits.forecast.backtest import Backtest
from forerun._scaling_fits.forecast.conclusive import format_doubts, list_fit_doubts
from forerun._scaling_fits.forecast.uncertainty import (
    FittedRuns,
    Prediction,
    compute_exponents,
    draw_intervals,
)
from forerun._scaling_fits.laws.forms import FORMS


def summarize_fit(fitted: FittedRuns) -> dict[str, Json]:
    """Return the output of `fit --json`. Parameters that are not identified are null."""
    parameters, intervals = _summarize_parameters(fitted), draw_intervals(fitted) or {}
    is_area = fitted.posterior is not None and fitted.path is None
    growth = compute_exponents(fitted) if is_area else ((None, None), (None, None))
    doubts = list_fit_doubts(fitted)
    if fitted.status != "converged":
        doubts = (f"the fit is {fitted.status}",)
    form = "compute" if fitted.path is not None else fitted.fit.form
    return {
        "form": fitted.form,
        "status": fitted.status,
        "parameters": parameters,
        "members": [
            {"form": form, "weight": 1.0, "status": fitted.status, "parameters": parameters}
        ],
        "intervals": {name: canon.to_json(intervals.get(name)) for name in parameters},
        "level": fitted.level,
        "exponents": {
            f"{name}_vs_flops": {"value": value, "interval": canon.to_json(ends)}
            for name, (value, ends) in zip(("params", "tokens"), growth, strict=True)
        },
        "num_runs": fitted.span.num_runs,
        "dropped": [{"row": row.row, "reason": row.reason} for row in fitted.dropped],
        "backtest": _summarize_backtest(fitted.backtest),
        "backtests": [_summarize_errors(each) for each in fitted.backtests],
        "warnings": [*format_doubts(doubts), *fitted.warnings],
        "objective": fitted.fit.objective,
        "residual_sd": fitted.fit.residual_sd,
        "record_scale": fitted.record_scale,
        "bootstrap": {"draws": fitted.bootstrap, "unconverged": fitted.fit.num_unconverged},
        "flops_from": "table" if fitted.span.flops_given else "6ND",
    }


def summarize_prediction(prediction: Prediction) -> dict[str, Json]:
    """Return the output of `predict --json`."""
    return {
        "params": prediction.params,
        "tokens": prediction.tokens,
        "flops": prediction.flops,
        "loss": prediction.loss_nats,
        "interval": canon.to_json(prediction.interval),
        "level": prediction.level,
        "extrapolation": prediction.extrapolation,
        "warnings": [*format_doubts(prediction.doubts), *prediction.warnings],
    }


def summarize_allocation(
    allocation: Allocation, batch_tokens: int | None = None
) -> dict[str, Json]:
    """Return the output of `allocate --json`. An interval that does not determine the size is null,
    with a warning.

    `batch_tokens` is null if all runs have one batch size, which does not determine it.
    """
    params_interval, tokens_interval = allocation.params_interval, allocation.tokens_interval
    if not allocation.size_determined:
        params_interval = tokens_interval = None
    return {
        "flops": allocation.flops,
        "params": allocation.params,
        "tokens": allocation.tokens,
        "tokens_per_param": allocation.tokens_per_param,
        "batch_tokens": batch_tokens,
        "loss": allocation.loss_nats,
        "interval": canon.to_json(allocation.interval),
        "params_interval": canon.to_json(params_interval),
        "tokens_interval": canon.to_json(tokens_interval),
        "flat_range": {
            "params": list(allocation.flat_params),
            "tokens": list(allocation.flat_tokens),
        },
        "level": allocation.level,
        "extrapolation": allocation.extrapolation,
        "warnings": [*format_doubts(allocation.doubts), *allocation.warnings],
    }


def _summarize_parameters(fitted: FittedRuns) -> dict[str, Json]:
    """Return parameters by name, null if they are not identified. A law without an irreducible loss
    has E = 0.
    """
    fit = fitted.fit
    if fitted.path is not None:
        values = fitted.path.compute_parameters(fit.theta[None, :]) if fit.identified else {}
        along: dict[str, Json] = {
            name: float(values[name][0]) if values else None for name in paths.NAMES
        }
        return {**along, **dict.fromkeys(paths.UNIDENTIFIED_NAMES)}
    named: dict[str, Json] = {name: fit.parameters.get(name) for name in FORMS[fit.form].names}
    return named if "E" in named else {"E": 0.0, **named}


def _summarize_backtest(backtest: Backtest | None) -> Json:
    """Return the back-test of the largest rung; null, with a warning, if there are too few runs
    below it.
    """
    if backtest is None:
        return None
    return {
        **_summarize_errors(backtest),
        "runs": [
            {
                "params": run.params,
                "tokens": run.tokens,
                "loss": run.loss_nats,
                "predicted": run.predicted_nats,
                "interval": canon.to_json(run.interval_nats),
                "covered": run.covered,
            }
            for run in backtest.runs
        ],
    }


def _summarize_errors(backtest: Backtest) -> dict[str, Json]:
    """Return one back-test without its runs."""
    return {
        "num_fitted": backtest.num_fitted,
        "num_held_out": len(backtest.runs),
        "extrapolation": backtest.extrapolation,
        "mean_error": backtest.mean_error,
        "largest_error": backtest.largest_error,
        "num_covered": backtest.num_covered,
    }


def summarize_budget(budget: ComputeBudget, machine: BudgetMachine | None) -> dict[str, Json]:
    """Return the `budget` object: FLOPs, hours, dollars, and days, with their assumptions."""
    gpu: Json = None
    if machine is not None:
        gpu = {
            "name": machine.name,
            "peak_flops": machine.peak_flops,
            "mfu": _summarize_assumption(machine.mfu),
            "mfu_convention": "six_nd",
            "price_usd": _summarize_assumption(machine.price_usd),
        }
    return {**dataclasses.asdict(budget), "gpu": gpu}


def summarize_data_limit(limit: DataLimit) -> dict[str, Json]:
    """Return the `data_limit` object: epochs, and the value of repeated tokens."""
    return {**dataclasses.asdict(limit), "source": SOURCE}


def summarize_shape(
    chosen: ShapeChoice, exact: ExactRun | None, allocation: Allocation
) -> dict[str, Json]:
    """Return `shape`, its exact counts and run (null if the budget pays for none), and the
    assumptions.
    """
    option, (low, high) = chosen.option, allocation.flat_params
    return {
        "shape": canon.to_json(option.shape),
        "shape_exact": {
            "params": option.params,
            "params_ratio": option.params_ratio,
            "aspect_ratio": option.aspect_ratio,
            "flops_per_token": option.flops_per_token,
            "flops_over_six_nd": option.flops_ratio,
            "within_flat_range": low <= option.params <= high,
            "tokens": None if exact is None else exact.tokens,
            "loss": None if exact is None else exact.loss_nats,
            "interval": None if exact is None else canon.to_json(exact.interval),
        },
        "shape_assumed": list(chosen.assumed),
    }


def _summarize_assumption(assumption: Assumption | None) -> Json:
    if assumption is None:
        return None
    return {
        "value": assumption.value,
        "interval": [assumption.low, assumption.high],
        "source": assumption.source,
    }
