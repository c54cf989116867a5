"""Verdicts as plain JSON data, for `--json`, the report, and the frozen config."""

from __future__ import annotations

from typing import cast

from proxies.core.canon import Json, to_json
from proxies.core.hyperparameters import LEARNING_RATE
from transfer.basin.optimum import Optimum
from transfer.design.next_runs import Suggestion
from transfer.question import Hyperparameter, from_log2
from transfer.regret.regret import Estimate
from transfer.verdict.joint_verdict import JointVerdict
from transfer.verdict.pair_verdict import PairVerdict
from transfer.verdict.verdict import Verdict


def verdict_summary(verdict: Verdict) -> dict[str, Json]:
    """Return the numbers of a verdict that a reader or a plot needs. Units are in the keys, and
    null means that there is no such number.

    The control condition, if there is one, has the same structure under `control`.
    """
    q, cost, bounded = verdict.question, verdict.cost_of_2x_off_nats, verdict.bounded
    if cost is None and bounded is not None:
        cost = bounded.cost_of_2x_off_nats
    return {
        "axis": q.axis,
        "hyperparameter": q.hyperparameter,
        "outcome": verdict.outcome,
        "drift_octaves_per_doubling": estimate_summary(verdict.drift),
        "bend": {
            "probability": verdict.bends,
            "octaves_per_doubling": estimate_summary(verdict.bend),
        },
        "offset_octaves": estimate_summary(verdict.offset),
        "regret_nats": estimate_summary(verdict.regret_nats),
        "margin_nats": q.margin_nats,
        "level": q.level,
        "assumption": verdict.assumption,
        "largest_ratio": verdict.largest_ratio,
        "target_size": q.target_size,
        "base_size": q.base_size,
        "power": _compute_absolute_power(verdict),
        "power_is_measured": q.power is None,
        "transferred_value": _to_value(q.hyperparameter, verdict.transferred_log2),
        "transferred_log2": verdict.transferred_log2,
        "base_log2": _compute_base_log2(verdict),
        "cost_of_2x_off_nats": None if cost is None else cost.value,
        "cost_of_2x_off_interval": None if cost is None else [cost.low, cost.high],
        "noise_nats": verdict.noise_nats,
        "noise_is_known": verdict.noise_is_known,
        "optima": [_summarize_optimum(optimum, q.hyperparameter) for optimum in verdict.optima],
        "values_tried": _list_values_tried(verdict),
        "control": None if verdict.control is None else verdict_summary(verdict.control),
        "reasons": list(verdict.reasons),
        "what_to_run": [_summarize_suggestion(suggestion) for suggestion in verdict.what_to_run],
    }


def together_summary(together: JointVerdict) -> dict[str, Json]:
    """Return the summary of the learning rate's verdict over all axes."""
    return {
        "outcome": together.outcome,
        "offset_octaves": estimate_summary(together.offset),
        "regret_nats": estimate_summary(together.regret_nats),
        "transferred_value": _to_value(LEARNING_RATE, together.transferred_log2),
        "margin_nats": together.margin_nats,
        "level": together.level,
        "axes": list(together.axes),
        "untested": list(together.untested),
        "assumptions": list(together.assumptions),
        "reasons": list(together.reasons),
    }


def pair_summary(pair: PairVerdict) -> dict[str, Json]:
    """Return the summary of the verdict on two values that are launched together."""
    return {
        "hyperparameters": list(pair.hyperparameters),
        "outcome": pair.outcome,
        "correlation": estimate_summary(pair.correlation),
        "regret_nats": estimate_summary(pair.regret_nats),
        "margin_nats": pair.margin_nats,
        "reasons": list(pair.reasons),
    }


def _compute_base_log2(verdict: Verdict) -> float | None:
    """Return the log2 of the value as it is set at the base."""
    if verdict.transferred_log2 is None:
        return None
    return verdict.transferred_log2 - (verdict.power or 0.0) * verdict.question.doublings


def _list_values_tried(verdict: Verdict) -> Json:
    bounded = verdict.bounded
    if bounded is None:
        return None
    low, high = (
        from_log2(verdict.question.hyperparameter, end)
        for end in (bounded.low_log2, bounded.high_log2)
    )
    return [min(low, high), max(low, high)]


def _compute_absolute_power(verdict: Verdict) -> float | None:
    return None if verdict.power is None else verdict.power + verdict.question.built_in


def estimate_summary(estimate: Estimate | None) -> dict[str, Json]:
    """Return a value with its interval, or nulls. `more_than` is present if one of these numbers is
    only a lower bound.
    """
    if estimate is None:
        return {"value": None, "interval": None}
    summary: dict[str, Json] = {"value": estimate.value, "interval": [estimate.low, estimate.high]}
    if estimate.at_bound(estimate.high):
        summary["more_than"] = estimate.most
    return summary


def _to_value(hyperparameter: Hyperparameter, log2_value: float | None) -> float | None:
    return None if log2_value is None else from_log2(hyperparameter, log2_value)


def _summarize_optimum(optimum: Optimum, hyperparameter: Hyperparameter) -> Json:
    return {
        **cast(dict[str, Json], to_json(optimum)),
        "value": _to_value(hyperparameter, optimum.log2_value),
    }


def _summarize_suggestion(suggestion: Suggestion) -> Json:
    summary = cast(dict[str, Json], to_json(suggestion))
    del summary["mends"]
    value = from_log2(suggestion.hyperparameter, suggestion.log2_value)
    return {**summary, "value": value, "text": str(suggestion)}
