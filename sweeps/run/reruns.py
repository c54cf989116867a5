"""Reruns: a run that has its outcome is executed again on another worker, and the two executions
are compared.

On one kind of processor, with one version of torch, a run gives the same bits wherever it runs
(docs/banks.md), so a single flipped bit shows that a machine computes wrongly. Elsewhere (a GPU, or
another processor) the two executions may differ by rounding, which training amplifies: there they
agree if their final losses differ by no more than those of two seeds. Nothing is recorded here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from forerun._proxies.core import canon
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.notation import format_counted, format_nats
from forerun._proxies.core.spec import EndedRun, RunResult, RunSpec
from forerun._sweeps.run.backlog import OpenRun
from forerun._sweeps.run.pool import Pool, validate_finished
from forerun._sweeps.run.retries import RetryPlan
from forerun._sweeps.run.worker_states import AdaptiveTimeouts, WorkerStates
from forerun._sweeps.store.sites import CPU, DEVICE, HOST, RESUMED

POLL_SECONDS = 0.5
SEED_NOISE_SHARE = 0.009
"""Share of the loss by which two seeds of one learning rate differ.

This is 0.02 nats on bytes (docs/pruning.md), and the same share within a fifth at vocabularies up
to 16,384 (benchmarks/statistics/vocabularies.py). A smaller fault misleads no search.
"""
# Keys of a result's environment that must agree before identical bits can be expected
_KIND_KEYS = ("python", "torch", "machine", DEVICE, CPU)

Outcome = Literal["agrees", "differs", "cannot_tell"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RerunVerdict:
    """The result of comparing two executions of a run."""

    outcome: Outcome
    hosts: tuple[str, ...]
    """Hosts of the two executions, in their order. If both ran on one host, a fault of that host
    would not be seen.
    """
    curve_ids: tuple[str, ...]
    """Ids of the two loss curves, in the same order."""
    end_nats: float | None
    """Distance between the validation losses in nats; None if one is missing."""
    reason: str
    """Reason for the outcome, as text for the user."""


def compare_executions(spec: RunSpec, first: RunResult, again: RunResult) -> RerunVerdict:
    """Compare the second execution of a run with the first."""
    end_nats = None
    if first.loss_nats is not None and again.loss_nats is not None:
        end_nats = abs(first.loss_nats - again.loss_nats)
    outcome: Outcome
    if _get_comparable_bits(first) == _get_comparable_bits(again):
        outcome, reason = "agrees", "bitwise identical"
    elif _promises_same_bits(spec, first, again):
        outcome, reason = "differs", "these two places promise bitwise identical results"
    else:
        outcome, reason = "cannot_tell", "bitwise identity is not promised there"
        seed_nats = SEED_NOISE_SHARE * max(first.loss_nats or 0.0, again.loss_nats or 0.0)
        if end_nats is not None and end_nats <= seed_nats:
            outcome = "agrees"
            reason = (
                f"{format_nats(end_nats)} nats apart; {reason}, and two seeds differ by "
                f"{format_nats(seed_nats)}"
            )
    return RerunVerdict(
        outcome=outcome,
        hosts=tuple(result.environment.get(HOST, "") for result in (first, again)),
        curve_ids=(first.curve_id, again.curve_id),
        end_nats=end_nats,
        reason=reason,
    )


def _get_comparable_bits(result: RunResult) -> tuple[object, ...]:
    """Return everything that two executions must share; the id of a curve is the hash of its losses
    and gradient norms.
    """
    return result.status, result.num_steps, result.loss_nats, result.curve_id


def _promises_same_bits(spec: RunSpec, first: RunResult, again: RunResult) -> bool:
    """Return whether both executions must have the same bits.

    That requires one kind of CPU and of software, a start at step 0, whole batches, and forerun's
    own model code. On a GPU, atomic additions sum in any order; the code of a user's model is
    unknown.
    """
    places = (first.environment, again.environment)
    have_same_kind = CPU in places[0] and all(
        places[0].get(key) == places[1].get(key) for key in _KIND_KEYS
    )
    have_changed_steps = any(
        key in place for key in (RESUMED, "num_microbatches") for place in places
    )
    is_on_cpu = places[0].get(DEVICE) == "cpu"
    return have_same_kind and not have_changed_steps and is_on_cpu and spec.factory is None


def execute_again(
    pool: Pool,
    spec: RunSpec,
    index: int,
    *,
    bank_key: str,
    num_microbatches: int,
    max_attempts: int,
    hang_seconds: float,
    check: Callable[[], None],
) -> RunResult | str:
    """Execute a run alone on worker `index`, from step 0.

    Args:
        pool: the pool.
        spec: the run.
        index: number of the worker.
        bank_key: key of the run's bank.
        num_microbatches: number of microbatches of the first execution, whose batches did not fit
            in fewer.
        max_attempts: number of failed attempts after which the run is given up.
        hang_seconds: maximum silence of the worker, as in `forerun._sweeps.run.driver`.
        check: called several times a second; raises to end the work.

    Returns:
        The outcome, or why there is none after `max_attempts`.
    """
    worker_states = WorkerStates(pool, AdaptiveTimeouts(hang_seconds), time.monotonic)
    open_run = OpenRun(
        spec=spec,
        run_id=spec.id,
        retry_plan=RetryPlan(num_microbatches={"": num_microbatches}),
        is_rerun=True,
        bank_key=f"{bank_key}/{num_microbatches}/again",
    )
    num_failures = 0
    while True:
        check()
        worker = worker_states.workers[index]
        if not worker.num_calls:
            admitted = {} if worker.slots else {0: open_run}
            worker.bank_key, worker.slots[0] = open_run.bank_key, open_run
            worker_states.start(index, admitted)
        for report in worker_states.wait(POLL_SECONDS):
            error = f"{report.cause}: {report.error}" if report.error is not None else ""
            for finished in report.finished:
                outcome = _validate_outcome(finished, open_run.run_id)
                if isinstance(outcome, RunResult):
                    return outcome
                error = outcome
            if error:
                worker_states.dismiss(index, restart=True)
                num_failures += 1
                if num_failures == max_attempts:
                    return f"lost {format_counted(num_failures, 'time')}, the last: {error}"


def _validate_outcome(finished: EndedRun, run_id: str) -> RunResult | str:
    """Return a worker's result of that run, or what is wrong with it."""
    try:
        result = validate_finished(finished).result
    except (canon.CanonError, SpecError) as error:
        return f"its result is not valid: {error}"
    ended = result.id == run_id and result.status in ("finished", "diverged")
    return (
        result
        if ended
        else f"its result belongs to another run, or did not end: {result.id[:12]}, {result.status}"
    )
