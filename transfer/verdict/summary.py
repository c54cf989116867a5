"""Verdicts as plain JSON data, for `--json`, the report, and the frozen config."""

from __future__ import annotations

from typing import cast

from forerun._proxies.core.canon import Json, to_json
from forerun._proxies.core.checks import Interval
from forerun._proxies.core.hyperparameters import LEARNING_RATE
from forerun._transfer.basin.optimum import Optimum
from forerun._transfer.design.next_runs import Suggestion
from forerun._transfer.question import Hyperparameter, from_log2
from forerun._transfer.verdict.joint_verdict import JointVerdict
from forerun._transfer.verdict.verdict import Verdict


def summarize_verdict(verdict: Verdict) -> dict[str, Json]:
    """Return the numbers of a verdict that a reader or a plot needs. The unit of a number is part
    of its key, and null means that there is no such number.

    The verdict on the control condition (runs in standard parametrization), if there is one, has
    the same structure under `control`.
    """
    question, cost, bounded = verdict.question, verdict.cost_of_2x_off_nats, verdict.bounded
    if cost is None and bounded is not None:
        cost = bounded.cost_of_2x_off_nats
    return {
        "axis": question.axis,
        "hyperparameter": question.hyperparameter,
        "outcome": verdict.outcome,
        "drift_octaves_per_doubling": summarize_estimate(verdict.drift),
        "bend": {
            "probability": verdict.bend_probability,
            "octaves_per_doubling": summarize_estimate(verdict.bend),
        },
        "offset_octaves": summarize_estimate(verdict.offset),
        "regret_nats": summarize_regret(verdict),
        "margin_nats": question.margin_nats,
        "level": question.level,
        "assumption": verdict.assumption,
        "largest_ratio": verdict.largest_ratio,
        "target_size": question.target_size,
        "base_size": question.base_size,
        "power": None if verdict.power is None else verdict.power + question.built_in,
        "power_is_measured": question.power is None,
        "transferred_value": _to_value(question.hyperparameter, verdict.transferred_log2),
        "transferred_log2": verdict.transferred_log2,
        "base_log2": _compute_base_log2(verdict),
        "cost_of_2x_off_nats": None if cost is None else cost.estimate,
        "cost_of_2x_off_interval": None if cost is None else [cost.low, cost.high],
        "noise_nats": verdict.noise_nats,
        "noise_is_known": verdict.noise_is_known,
        "optima": [
            _summarize_optimum(optimum, question.hyperparameter) for optimum in verdict.optima
        ],
        "values_tried": _compute_range_tried(verdict),
        "control": None if verdict.control is None else summarize_verdict(verdict.control),
        "reasons": list(verdict.reasons),
        "what_to_run": [_summarize_suggestion(suggestion) for suggestion in verdict.what_to_run],
    }


def summarize_joint_verdict(joint: JointVerdict) -> dict[str, Json]:
    """Return the summary of the learning rate's verdict over all axes."""
    return {
        "outcome": joint.outcome,
        "offset_octaves": summarize_estimate(joint.offset),
        "regret_nats": summarize_regret(joint),
        "transferred_value": _to_value(LEARNING_RATE, joint.transferred_log2),
        "margin_nats": joint.margin_nats,
        "level": joint.level,
        "axes": list(joint.axes),
        "untested": list(joint.untested),
        "assumptions": list(joint.assumptions),
        "reasons": list(joint.reasons),
    }


def _compute_base_log2(verdict: Verdict) -> float | None:
    """Return the log2 of the value as it is set at the base.

    `Question.built_in` does not enter: the parametrization applies it to the value that is set, so
    the transferred value does not contain it.
    """
    if verdict.transferred_log2 is None:
        return None
    return verdict.transferred_log2 - (verdict.power or 0.0) * verdict.question.doublings


def _compute_range_tried(verdict: Verdict) -> Json:
    """Return the lowest and the highest value that was tried at every size, carried to the target;
    null if the regret is not that against the values tried.
    """
    bounded = verdict.bounded
    if bounded is None:
        return None
    ends = (bounded.low_log2, bounded.high_log2)
    # Of a beta, log2 falls as the value rises
    return [*sorted(from_log2(verdict.question.hyperparameter, end) for end in ends)]


def summarize_estimate(estimate: Interval | None) -> dict[str, Json]:
    """Return an estimate with its interval, or nulls."""
    if estimate is None:
        return {"value": None, "interval": None}
    return {"value": estimate.estimate, "interval": [estimate.low, estimate.high]}


def summarize_regret(verdict: Verdict | JointVerdict | None) -> dict[str, Json]:
    """Return the regret of a verdict with its interval, or nulls. `more_than` is present if one of
    these numbers is only a lower bound.
    """
    regret, most = (verdict.regret_nats, verdict.most_nats) if verdict else (None, None)
    is_bound = regret is not None and most is not None and regret.high >= most
    return summarize_estimate(regret) | ({"more_than": most} if is_bound else {})


def _to_value(hyperparameter: Hyperparameter, log2_value: float | None) -> float | None:
    return None if log2_value is None else from_log2(hyperparameter, log2_value)


def _summarize_optimum(optimum: Optimum, hyperparameter: Hyperparameter) -> Json:
    return {
        **cast(dict[str, Json], to_json(optimum)),
        "value": _to_value(hyperparameter, optimum.log2_value),
    }


def _summarize_suggestion(suggestion: Suggestion) -> Json:
    return {
        "axis": suggestion.axis,
        "hyperparameter": suggestion.hyperparameter,
        "size": suggestion.size,
        "log2_value": suggestion.log2_value,
        "num_seeds": suggestion.num_seeds,
        "reason": suggestion.reason,
        "relative_cost": suggestion.relative_cost,
        "value": from_log2(suggestion.hyperparameter, suggestion.log2_value),
        "text": str(suggestion),
    }
