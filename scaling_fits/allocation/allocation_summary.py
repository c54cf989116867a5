"""The JSON of what `allocate` says beyond `summary.allocation_summary`: money, serving, data, shapes, next runs."""

from __future__ import annotations

import dataclasses

from proxies.core.canon import Json
from scaling_fits.allocation.allocate import Allocation
from scaling_fits.allocation.budgets import Assumption, Budget, Machine
from scaling_fits.allocation.exact_runs import ExactRun
from scaling_fits.allocation.next_rungs import NextRun
from scaling_fits.allocation.repeats import SOURCE, DataLimit
from scaling_fits.allocation.serving import Serving
from scaling_fits.allocation.shapes import ShapeChoices, ShapeOption
from scaling_fits.forecast.derived import Interval


def flat_summary(allocation: Allocation) -> dict[str, Json]:
    """`flat_range`: sizes and tokens within 0.3 % of the best loss, and what the smallest saves when served."""
    return {
        "params": list(allocation.flat_params),
        "tokens": list(allocation.flat_tokens),
        "serving_saved_by_smallest": allocation.flat_saving,
    }


def budget_summary(
    budget: Budget, machine: Machine | None, at_ends: tuple[Allocation, Allocation] | None
) -> dict[str, Json]:
    """`budget`: FLOPs, hours, dollars and days, what they rest on, and the answer at the ends of the FLOPs."""
    body: dict[str, Json] = {
        "flops": _valued(budget.flops),
        "binds": budget.binds,
        "deadline_flops": _valued(budget.deadline_flops),
        "gpu_hours": _valued(budget.gpu_hours),
        "usd": _valued(budget.usd),
        "days": _valued(budget.days),
        "gpu": None,
    }
    if machine is not None:
        body["gpu"] = {
            "name": machine.name,
            "peak_flops": machine.peak_flops,
            "mfu": _assumed(machine.mfu),
            "mfu_convention": "six_nd",
            "price_usd": None if machine.price_usd is None else _assumed(machine.price_usd),
        }
    if at_ends is not None:
        body["at_flops_interval"] = {
            "params": [end.params for end in at_ends],
            "tokens": [end.tokens for end in at_ends],
            "loss": [end.loss_nats for end in at_ends],
        }
    return body


def serving_summary(serving: Serving) -> dict[str, Json]:
    """`serving`: the choice against the compute-optimal model of equal loss."""
    return {
        "inference_tokens": serving.inference_tokens,
        "inference_cost": serving.inference_cost,
        "training_flops": serving.training_flops,
        "serving_flops": serving.serving_flops,
        "compute_optimal": {
            "params": serving.compute_optimal_params,
            "tokens": serving.compute_optimal_tokens,
            "life_flops": _valued(serving.compute_optimal_life_flops),
        },
        "extra_training_flops": _valued(serving.extra_training_flops),
        "saved_share": _valued(serving.saved_share),
    }


def data_summary(limit: DataLimit) -> dict[str, Json]:
    """`data_limit`: epochs, what repeated tokens are worth, and what the limit costs."""
    return {
        "unique_tokens": limit.unique_tokens,
        "epochs": limit.epochs,
        "effective_tokens": limit.effective_tokens,
        "effective_params": limit.effective_params,
        "unlimited": {"params": limit.unlimited_params, "tokens": limit.unlimited_tokens},
        "loss_cost": limit.loss_cost_nats,
        "loss_cost_interval": None if limit.loss_cost_interval is None else list(limit.loss_cost_interval),
        "enough_params": limit.enough_params,
        "source": SOURCE,
    }


def shapes_summary(shapes: ShapeChoices, exact: ExactRun | None, allocation: Allocation) -> dict[str, Json]:
    """`shape`, its exact counts and run (null: the budget pays for none), alternatives, what was assumed and traded."""
    best, *others = shapes.options
    run: dict[str, Json] = {
        "tokens": None if exact is None else exact.tokens,
        "loss": None if exact is None else exact.loss_nats,
        "interval": None if exact is None or exact.interval is None else list(exact.interval),
    }
    return {
        "shape": _shape(best),
        "shape_exact": _counts(best, allocation) | run,
        "shape_alternatives": [{"shape": _shape(option)} | _counts(option, allocation) for option in others],
        "shape_assumed": list(shapes.assumed),
        "shape_traded": shapes.traded or None,
    }


def next_summary(runs: tuple[NextRun, ...], flops: float, note: str) -> dict[str, Json]:
    """`next_runs`: what to add to the ladder, in order, and their share of a budget of `flops`; `note` judges them."""
    return {
        "next_runs": [
            {
                "params": run.params,
                "tokens": run.tokens,
                "flops": run.flops,
                "interval_shrink": run.interval_shrink,
                "budget_share": run.flops / flops,
            }
            for run in runs
        ],
        "next_runs_note": note,
    }


def _shape(option: ShapeOption) -> Json:
    return dict(dataclasses.asdict(option.shape))


def _counts(option: ShapeOption, allocation: Allocation) -> dict[str, Json]:
    low, high = allocation.flat_params
    return {
        "params": option.params,
        "params_ratio": option.params_ratio,
        "aspect_ratio": option.aspect_ratio,
        "flops_per_token": option.flops_per_token,
        "flops_over_six_nd": option.flops_ratio,
        "within_flat_range": low <= option.params <= high,
    }


def _valued(of: Interval | None) -> Json:
    return None if of is None else {"value": of.value, "interval": None if of.interval is None else list(of.interval)}


def _assumed(of: Assumption) -> Json:
    return {"value": of.value, "interval": [of.low, of.high], "source": of.source}
