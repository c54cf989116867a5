"""A run that has its outcome is carried out once more on another worker, and the two executions are
compared.

On one kind of processor, with one version of torch, a run gives the same bits wherever it runs
(docs/banks.md), so one flipped bit is enough to see that a machine computes wrongly. Elsewhere (a
GPU, another chip) the two may differ by rounding, which training makes larger: there they agree
while they end no further apart than two seeds do. Nothing is recorded here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from proxies.core import canon
from proxies.core.checks import SpecError
from proxies.core.notation import counted, format_nats
from proxies.core.spec import RunResult, RunSpec
from sweeps.run.backlog import Attempt
from sweeps.run.crew import AdaptiveTimeouts, Crew
from sweeps.run.lost_runs import RetryStatus
from sweeps.run.pool import Finished, Pool, decoded
from sweeps.store.sites import CPU, DEVICE, HOST, RESUMED

POLL_SECONDS = 0.5
SEED_SHARE = 0.009
"""Share of the loss by which two seeds of one rate differ: 0.02 nats on bytes (docs/pruning.md),
the same share within a fifth at vocabularies up to 16,384 (benchmarks/vocabularies.py). A fault
below it misleads no search."""
_KIND = ("python", "torch", "machine", DEVICE, CPU)

Outcome = Literal["agrees", "differs", "cannot_tell"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RerunVerdict:
    """What two executions of a run say."""

    outcome: Outcome
    hosts: tuple[str, ...]
    """Where the two executions ran, the first one first. A fault of a host that both ran on would
    not be seen."""
    curve_ids: tuple[str, ...]
    end_nats: float | None
    """Between the validation losses; None where one has none."""
    reason: str


def compare(spec: RunSpec, first: RunResult, again: RunResult) -> RerunVerdict:
    """Whether the second execution of a run gave what the first one did."""
    losses = (first.loss_nats, again.loss_nats)
    end_nats = None if losses[0] is None or losses[1] is None else abs(losses[0] - losses[1])
    bits = _promised(spec, first, again)
    outcome: Outcome = "differs" if bits else "cannot_tell"
    reason = (
        "these two places promise bitwise identical results"
        if bits
        else "bitwise identity is not promised there"
    )
    if _bits(first) == _bits(again):
        outcome, reason = "agrees", "bitwise identical"
    elif (
        not bits
        and end_nats is not None
        and end_nats <= (seed_nats := SEED_SHARE * max(filter(None, losses)))
    ):
        outcome, reason = (
            "agrees",
            (
                f"{format_nats(end_nats)} nats apart; {reason}, and two seeds differ by "
                f"{format_nats(seed_nats)}"
            ),
        )
    places = (first.environment, again.environment)
    return RerunVerdict(
        outcome=outcome,
        hosts=tuple(place.get(HOST, "") for place in places),
        curve_ids=(first.curve_id, again.curve_id),
        end_nats=end_nats,
        reason=reason,
    )


def _bits(result: RunResult) -> tuple[object, ...]:
    """All that two executions must share: the id of a curve is the hash of its losses and gradient
    norms.
    """
    return result.status, result.num_steps, result.loss_nats, result.curve_id


def _promised(spec: RunSpec, first: RunResult, again: RunResult) -> bool:
    """Whether both must have the same bits: one kind of CPU and of software, begun at step 0, whole
    batches, our code.

    On a GPU, sums by atomic additions come in any order; what a user's own model does, we do not
    know.
    """
    one, other = first.environment, again.environment
    alike = all(one.get(key) == other.get(key) for key in _KIND) and CPU in one
    changed = any(key in place for key in (RESUMED, "num_microbatches") for place in (one, other))
    return alike and not changed and one.get(DEVICE) == "cpu" and spec.factory is None


def carried_out(
    pool: Pool,
    spec: RunSpec,
    index: int,
    *,
    bank_key: str,
    num_microbatches: int,
    max_attempts: int,
    hang_seconds: float,
    check: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> RunResult | str:
    """The outcome of a run carried out alone on worker `index`; or why there is none, after
    `max_attempts`.

    `num_microbatches` are those of the first time: its batches did not fit in fewer. The others as
    in `sweeps.run.driver`; `check`, called a few times a second, raises what ends the work.
    """
    crew = Crew(pool, lambda spec: spec.numerics.num_slots, AdaptiveTimeouts(hang_seconds), clock)
    held = Attempt(
        spec=spec,
        run_id=spec.id,
        standing=RetryStatus(num_microbatches={"": num_microbatches}),
        again=True,
        bank_key=f"{bank_key}/{num_microbatches}/again",
    )
    num_lost = 0
    while True:
        check()
        worker = crew.workers[index]
        if not worker.num_calls:
            admitted = {} if worker.slots else {0: held}
            worker.bank_key, worker.slots[0] = held.bank_key, held
            crew.start(index, admitted)
        for report in crew.wait(POLL_SECONDS):
            error = f"{report.cause}: {report.error}" if report.error is not None else ""
            for finished in report.finished:
                outcome = _decoded(finished, held.run_id)
                if isinstance(outcome, RunResult):
                    return outcome
                error = outcome
            if error:
                crew.dismiss(index, restart=True)
                num_lost += 1
                if num_lost == max_attempts:
                    return f"lost {counted(num_lost, 'time')}, the last: {error}"


def _decoded(finished: Finished, run_id: str) -> RunResult | str:
    """A worker's outcome of that run; or what is wrong with it."""
    try:
        result, _ = decoded(finished)
    except (canon.CanonError, SpecError) as error:
        return f"its result is not valid: {error}"
    ended = result.id == run_id and result.status in ("finished", "diverged")
    return (
        result
        if ended
        else f"its result belongs to another run, or did not end: {result.id[:12]}, {result.status}"
    )
