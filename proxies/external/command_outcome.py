"""Decide how a run of a user's trainer ended, from the metrics that it logged.

This module and the modules of forerun that it imports need only the standard library.
"""

from __future__ import annotations

import math
import platform

from forerun._proxies.core import canon, flops
from forerun._proxies.core.notation import format_loss
from forerun._proxies.core.spec import DIVERGED_ABOVE_NATS, Curve, RunResult, RunSpec
from forerun._proxies.external.growing_file import MetricsError
from forerun._proxies.external.metric_files import LoggedMetrics, MetricFiles


def find_divergence(
    spec: RunSpec, logged: LoggedMetrics, *, has_ended: bool
) -> tuple[int, str] | None:
    """Return the step at which a run diverged, and the reason; None if it has not.

    A run has diverged if a loss is NaN or infinite, or if after the warmup a loss is above the
    ceiling: worse than a uniform guess. A validation loss is compared with the ceiling only if it
    is the last one of a run that has ended.

    Args:
        spec: The run.
        logged: Metrics that the run has logged so far.
        has_ended: Whether the run has ended by itself.
    """
    ceiling = math.log(spec.shape.vocab_size) + DIVERGED_ABOVE_NATS
    losses = list(logged.train_loss.items())
    last = max(logged.validation_loss, default=None)
    if has_ended and last is not None:
        losses.append((last, logged.validation_loss[last]))
    divergences = [logged.first_nonfinite] if logged.first_nonfinite else []
    divergences += [
        (
            step,
            (
                f"loss {loss:.6g} at step {step} is above {format_loss(ceiling)} nats, worse than "
                "a uniform guess"
            ),
        )
        for step, loss in losses
        # One more step than the warmup, because trainers count steps from 0 or from 1
        if loss > ceiling and step > spec.schedule.warmup_steps + 1
    ]
    return min(divergences, default=None)


def judge_run(
    spec: RunSpec,
    metrics: MetricFiles,
    *,
    exit_problem: str,
    seconds: float,
    has_ended: bool = True,
) -> tuple[RunResult, Curve]:
    """Return the result and the curve of a run that has ended, or was stopped as diverged.

    A trainer may count steps from 0 or from 1. A trainer that logs a training loss at step 0 counts
    from 0. The last validation loss must be logged at the run's last step. If the run has N steps,
    this step has the number N, or N - 1 if the trainer counts from 0; both are accepted.

    Args:
        spec: The run.
        metrics: Files with the metrics of the run.
        exit_problem: Problem of the command's exit; empty for exit code 0, and for a command that
            was stopped because of its metrics.
        seconds: Duration of the run.
        has_ended: Whether the run has ended by itself.

    Raises:
        MetricsError: The run neither diverged nor finished.
    """
    logged = metrics.merge_metrics()
    if divergence := find_divergence(spec, logged, has_ended=has_ended):
        return _make_result(spec, logged, seconds, reason=divergence[1], until=divergence[0])
    problem = exit_problem or _find_missing_metric(spec, logged)
    # Strict JSON writers log null for NaN.
    if problem and logged.null:
        step, key = logged.null
        reason = f"{key} is null at step {step}, and no number after it"
        return _make_result(spec, logged, seconds, reason=reason, until=step)
    if problem:
        raise MetricsError(f"{problem}; {metrics.describe_contents()}")
    return _make_result(spec, logged, seconds, reason="", until=spec.schedule.num_steps)


def _find_missing_metric(spec: RunSpec, logged: LoggedMetrics) -> str:
    """Describe the metric that a finished run did not log; empty if none is missing."""
    command, num_steps = spec.command, spec.schedule.num_steps
    assert command is not None
    for key, series in (
        (command.train_loss_key, logged.train_loss),
        (command.validation_loss_key, logged.validation_loss),
    ):
        if not series:
            return f"it ended with exit code 0 but logged no {key!r}"
    last_step, last_validation_step = logged.last_step or 0, max(logged.validation_loss)
    if last_step < num_steps - 1:
        return f"it ended with exit code 0 at step {last_step} of {num_steps}"
    if last_validation_step < num_steps - 1:
        name = command.validation_loss_key
        return (
            f"its last {name!r} is of step {last_validation_step}: it must also log one at the "
            f"end, at step {num_steps}"
        )
    return ""


def _make_result(
    spec: RunSpec, logged: LoggedMetrics, seconds: float, *, reason: str, until: int
) -> tuple[RunResult, Curve]:
    """Return the result and the curve of a run, from its metrics up to the step `until`.

    An empty reason means that the run has finished, any other reason that it diverged.
    """
    # A result counts steps from 1; a trainer that logs a loss at step 0 counts from 0
    shift = 1 if 0 in logged.train_loss else 0
    planned_steps = spec.schedule.num_steps
    steps = sorted(
        step for step in logged.train_loss if step <= until and 1 <= step + shift <= planned_steps
    )
    has_norms = bool(steps) and all(step in logged.grad_norm for step in steps)
    losses = [logged.train_loss[step] for step in steps]
    curve = Curve(
        steps=tuple(step + shift for step in steps),
        train_loss_nats=tuple(losses),
        grad_norm=tuple(logged.grad_norm[step] for step in steps) if has_norms else (),
    )
    num_steps = planned_steps if not reason else (steps[-1] + shift if steps else 0)
    tokens = spec.count_tokens_by(num_steps)
    result = RunResult(
        id=spec.id,
        status="diverged" if reason else "finished",
        loss_nats=None if reason else logged.validation_loss[max(logged.validation_loss)],
        num_steps=num_steps,
        last_train_loss_nats=losses[-1] if losses else None,
        curve_id=canon.compute_content_id(curve),
        flops=float(flops.compute_flops_per_token(spec.shape)) * tokens,
        tokens=tokens,
        seconds=seconds,
        environment={"machine": platform.machine()},
        reason=reason,
    )
    return result, curve
