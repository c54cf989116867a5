"""Executions that were lost, as the ledger has them: what a run's next attempt follows from, across drivers.

Each is a record of kind `lost`, key `<run id>/<n>`. A `pardon` record says that the losses before it no longer count:
nothing had ended well, and the user was asked to mend what fails.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxies import canon
from proxies.spec import Curve, RunResult, RunSpec
from sweeps.causes import Cause
from sweeps.ledger import Ledger

LOST, PARDON = "lost", "pardon"
NO_CURVE = Curve(steps=(), train_loss_nats=(), grad_norm=())
"""Of a run that never reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The body of a `lost` record."""

    cause: Cause
    detail: str
    log_tail: str
    """The last lines of what the worker printed; 2 kB at most, secrets removed."""
    worker: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What a run's losses mean for its next attempt."""

    num_lost: int
    """Losses that count against its attempts."""
    num_microbatches: int
    """Passes that its batches are to be split into, at least."""


class Losses:
    """Reads the losses of a ledger, and adds to them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        pardoned = max((record.seq for record in ledger.records(PARDON)), default=-1)
        self._num: dict[str, int] = {}
        self._causes: dict[str, list[Cause]] = {}
        for record in ledger.records(LOST):
            run_id = record.key.partition("/")[0]
            self._num[run_id] = self._num.get(run_id, 0) + 1
            if record.seq > pardoned:
                self._causes.setdefault(run_id, []).append(canon.decode(Loss, record.body).cause)

    def record(self, run_id: str, loss: Loss) -> None:
        """Add a loss. Raises as `Ledger.append`."""
        number = self._num.get(run_id, 0)
        self._ledger.append(LOST, f"{run_id}/{number}", loss)
        self._num[run_id] = number + 1
        self._causes.setdefault(run_id, []).append(loss.cause)

    def pardon(self, reason: str) -> None:
        """Let no loss so far count any more. Raises as `Ledger.append`."""
        self._ledger.append(PARDON, str(len(self._ledger.records(PARDON))), {"reason": reason})
        self._causes.clear()

    def standing(self, run_id: str, spec: RunSpec) -> Standing:
        """What the losses of a run say.

        Pre-emption counts against nobody. Out of memory doubles the passes per batch, down to one sequence each, and
        counts only from there on; a command's memory is its own business, and its losses count like any other.
        """
        most = spec.batch_sequences if spec.command is None else 1
        own_microbatches = spec.batch_tokens // (spec.numerics.microbatch_tokens or spec.batch_tokens)
        num_microbatches, num_lost = own_microbatches, 0
        for cause in self._causes.get(run_id, []):
            if cause == "out_of_memory" and num_microbatches < most:
                num_microbatches = min(2 * num_microbatches, most)
            elif cause != "preempted":
                num_lost += 1
        return Standing(
            num_lost=num_lost, num_microbatches=num_microbatches if num_microbatches > own_microbatches else 1
        )


def failed_result(run_id: str, reason: str) -> RunResult:
    """The outcome of a run that was lost as often as it may be."""
    return RunResult(
        id=run_id,
        status="failed",
        loss_nats=None,
        num_steps=0,
        last_train_loss_nats=None,
        curve_id=canon.content_id(NO_CURVE),
        flops=0.0,
        tokens=0,
        seconds=0.0,
        environment={},
        reason=reason,
    )
