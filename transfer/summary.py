"""A verdict as plain JSON data, for `--json`, the report and the frozen config."""

from __future__ import annotations

from proxies.canon import Json
from transfer.next_runs import Suggestion
from transfer.optimum import Optimum
from transfer.regret import Estimate
from transfer.verdict import Verdict


def verdict_summary(verdict: Verdict) -> dict[str, Json]:
    """What a reader or a plot needs; units are in the keys, a null says that there is no such number.

    The control arm, where there is one, has the same shape under `control`.
    """
    lr = verdict.transferred_log2_lr
    cost = verdict.cost_of_2x_off_nats
    return {
        "outcome": verdict.outcome,
        "drift_octaves_per_doubling": _estimate(verdict.drift),
        "offset_octaves": _estimate(verdict.offset),
        "regret_nats": _estimate(verdict.regret_nats),
        "margin_nats": verdict.margin_nats,
        "level": verdict.level,
        "target_width": verdict.target_width,
        "base_width": verdict.base_width,
        "transferred_lr": None if lr is None else 2.0**lr,
        "cost_of_2x_off_nats": None if cost is None else cost.value,
        "cost_of_2x_off_interval": None if cost is None else [cost.low, cost.high],
        "noise_nats": verdict.noise_nats,
        "optima": [_optimum(optimum) for optimum in verdict.optima],
        "control": None if verdict.control is None else verdict_summary(verdict.control),
        "reasons": list(verdict.reasons),
        "what_to_run": [_suggestion(suggestion) for suggestion in verdict.what_to_run],
    }


def _estimate(estimate: Estimate | None) -> Json:
    if estimate is None:
        return {"value": None, "interval": None}
    return {"value": estimate.value, "interval": [estimate.low, estimate.high]}


def _optimum(optimum: Optimum) -> Json:
    interval = optimum.interval_log2
    return {
        "width": optimum.width,
        "lr": None if optimum.log2_lr is None else 2.0**optimum.log2_lr,
        "log2_lr": optimum.log2_lr,
        "interval_log2": None if interval is None else list(interval),
        "status": optimum.status,
        "loss_nats": optimum.loss_nats,
        "num_runs": optimum.num_runs,
        "num_diverged": optimum.num_diverged,
        "cliff_octaves": optimum.cliff_octaves,
        "curve": [list(sample) for sample in optimum.curve],
    }


def _suggestion(suggestion: Suggestion) -> Json:
    return {
        "width": suggestion.width,
        "lr": 2.0**suggestion.log2_lr,
        "log2_lr": suggestion.log2_lr,
        "num_seeds": suggestion.num_seeds,
        "text": str(suggestion),
    }
