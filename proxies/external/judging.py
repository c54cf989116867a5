"""What came of a command: from its metrics and its ending to a result, by the rules that hold for every trial."""

from __future__ import annotations

import math
from dataclasses import dataclass

from proxies import canon, flops
from proxies.external.growing import MetricsError
from proxies.external.metric_files import Logged, MetricFiles
from proxies.spec import DIVERGED_ABOVE_NATS, Curve, RunResult, RunSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a command ended."""

    said: str
    """What was wrong with it; empty for exit code 0, and for one that was stopped because of its metrics."""
    seconds: float
    environment: dict[str, str]


def trouble(spec: RunSpec, logged: Logged, *, ended: bool) -> tuple[int, str] | None:
    """Where and why a run has diverged: a loss that is no number, or worse than knowing nothing after the warmup.

    A null counts only once the run has `ended`: until then it may be a column without a value. Of the validation
    losses the last alone is held against the ceiling.
    """
    found = [logged.bad, logged.null if ended else None]
    ceiling = math.log(spec.shape.vocab_size) + DIVERGED_ABOVE_NATS
    last = max(logged.validation_loss, default=None)
    above = list(logged.train_loss.items())
    above += [(last, logged.validation_loss[last])] if ended and last is not None else []
    found += [
        (step, f"loss {loss:.6g} over {ceiling:.3f} nats, that of knowing nothing and more, at step {step}")
        for step, loss in above
        if loss > ceiling and step > spec.schedule.warmup_steps + 1
    ]
    return min((one for one in found if one), default=None)


def judge(spec: RunSpec, metrics: MetricFiles, ending: Ending, *, ended: bool = True) -> tuple[RunResult, Curve]:
    """The outcome of a run that has ended, or is stopped for its `trouble`.

    Steps may be counted from 0 or from 1: a trainer whose first training loss is of step 0 counts from 0. Its last
    validation loss must be of the run's last step (or of the one before: the last one's name, counted from 0).

    Raises:
        MetricsError: it neither diverged nor finished.
    """
    logged = metrics.logged()
    diverged = trouble(spec, logged, ended=ended)
    if diverged is not None:
        return _outcome(spec, logged, ending, reason=diverged[1], until=diverged[0])
    if problem := ending.said or _incomplete(spec, logged):
        raise MetricsError(f"{problem}; {metrics.hint()}")
    return _outcome(spec, logged, ending, reason="", until=spec.schedule.num_steps)


def _incomplete(spec: RunSpec, logged: Logged) -> str:
    """What a run that finished would have logged, and this one did not."""
    command, wanted = spec.command, spec.schedule.num_steps
    assert command is not None
    for key, series in (
        (command.train_loss_key, logged.train_loss),
        (command.validation_loss_key, logged.validation_loss),
    ):
        if not series:
            return f"it ended well (exit code 0) but logged no {key!r}"
    last, judged = logged.last_step or 0, max(logged.validation_loss)
    if last < wanted - 1:
        return f"it ended well (exit code 0) at step {last}, and {wanted} steps were asked for"
    if judged < wanted - 1:
        name = command.validation_loss_key
        return f"its last {name!r} is of step {judged}: one of step {wanted}, at the end, is wanted"
    return ""


def _outcome(spec: RunSpec, logged: Logged, ending: Ending, *, reason: str, until: int) -> tuple[RunResult, Curve]:
    shift = 1 if 0 in logged.train_loss else 0
    wanted = spec.schedule.num_steps
    steps = sorted(step for step in logged.train_loss if step <= until and 1 <= step + shift <= wanted)
    has_norms = bool(steps) and all(step in logged.grad_norm for step in steps)
    losses = [logged.train_loss[step] for step in steps]
    curve = Curve(
        steps=tuple(step + shift for step in steps),
        train_loss_nats=tuple(losses),
        grad_norm=tuple(logged.grad_norm[step] for step in steps) if has_norms else (),
    )
    num_steps = wanted if not reason else (steps[-1] + shift if steps else 0)
    tokens = spec.tokens_by(num_steps)
    result = RunResult(
        id=spec.id,
        status="diverged" if reason else "finished",
        loss_nats=None if reason else logged.validation_loss[max(logged.validation_loss)],
        num_steps=num_steps,
        last_train_loss_nats=losses[-1] if losses else None,
        curve_id=canon.content_id(curve),
        flops=float(flops.flops_per_token(spec.shape)) * tokens,
        tokens=tokens,
        seconds=ending.seconds,
        environment=ending.environment,
        reason=reason,
    )
    return result, curve
