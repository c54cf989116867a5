"""A `ComputeFit` as data: the JSON that is printed, and the file that carries it to `predict`."""

from __future__ import annotations

from proxies.core import canon
from proxies.core.canon import Json
from scaling_fits.compute import optima_file
from scaling_fits.compute.compute_fit import ComputeFit, ComputePrediction, Optimum
from scaling_fits.compute.compute_laws import Pair


def fit_body(fit: ComputeFit) -> dict[str, Json]:
    """What `fit --form isoflop|frontier --json` prints. What is not identified is null, never a number."""
    values, intervals = _parameters(fit)
    return {
        "form": fit.form,
        "method": fit.method,
        "status": fit.status,
        "parameters": dict(values),
        "members": [],
        "intervals": {name: _list(ends) for name, ends in intervals.items()},
        "level": fit.level,
        "exponents": {
            f"{what}_vs_flops": {"value": values[f"{what}_exponent"], "interval": _list(intervals[f"{what}_exponent"])}
            for what in ("params", "tokens")
        },
        "num_runs": fit.num_runs,
        "rows": fit.rows,
        "dropped": [{"row": row.row, "reason": row.reason} for row in fit.dropped],
        "backtest": None,
        "warnings": list(fit.warnings),
        "budgets": [_optimum(optimum) for optimum in fit.optima],
        "floor_identified": None if fit.loss_law is None else fit.loss_law.has_floor,
        "scatter": {"params": None if fit.params_law is None else fit.params_law.scatter,
                    "tokens": None if fit.tokens_law is None else fit.tokens_law.scatter},
        "interval_inflation": canon.to_json(fit.inflation),
        "bootstrap": {"draws": fit.bootstrap},
        "flops_from": "table" if fit.flops_given else "6ND",
    }  # fmt: skip


def prediction_body(prediction: ComputePrediction) -> dict[str, Json]:
    """What `predict FIT --flops C --json` prints."""
    return {
        "params": prediction.params,
        "params_interval": _list(prediction.params_interval),
        "tokens": prediction.tokens,
        "tokens_interval": _list(prediction.tokens_interval),
        "flops": prediction.flops,
        "loss": prediction.loss_nats,
        "interval": _list(prediction.interval),
        "level": prediction.level,
        "extrapolation": prediction.extrapolation,
        "warnings": list(prediction.warnings),
    }


def _parameters(fit: ComputeFit) -> tuple[dict[str, float | None], dict[str, Pair | None]]:
    values: dict[str, float | None] = {}
    intervals: dict[str, Pair | None] = {}
    for what, law in (("params", fit.params_law), ("tokens", fit.tokens_law)):
        values[f"{what}_coefficient"] = law.coefficient if law else None
        values[f"{what}_exponent"] = law.exponents[0] if law else None
        intervals[f"{what}_coefficient"] = law.coefficient_interval(fit.level) if law and fit.bootstrap else None
        intervals[f"{what}_exponent"] = law.exponent_interval(0, fit.level) if law and fit.bootstrap else None
    loss = fit.loss_law
    values |= dict(zip(("E", "K", "g"), loss.natural if loss else (None, None, None), strict=True))
    found = loss.intervals(fit.level) if loss else None
    intervals |= {name: found[name] if found else None for name in ("E", "K", "g")}
    return values, intervals


def _list(ends: Pair | None) -> Json:
    return None if ends is None else list(ends)


def _optimum(optimum: Optimum) -> Json:
    return {
        "flops": optimum.flops,
        "status": optimum.status,
        "reason": optimum.reason,
        "params": optimum.params,
        "params_interval": _list(optimum.params_interval),
        "tokens": optimum.tokens,
        "tokens_interval": _list(optimum.tokens_interval),
        "loss": optimum.loss_nats,
        "loss_interval": _list(optimum.loss_interval),
        "num_runs": optimum.num_runs,
        "num_sizes": optimum.num_sizes,
    }


def to_file(fit: ComputeFit) -> dict[str, Json]:
    """The fit as plain JSON data, floats in full."""
    return optima_file.write(fit)


def from_file(data: Json) -> ComputeFit:
    """The fit that `to_file` wrote.

    Raises:
        OptimaError: no such fit, or one that was changed; the message says what is wrong with it.
    """
    return optima_file.read(ComputeFit, data)
