"""Executions that were lost, as the ledger has them: what a run's next attempt follows from, across drivers.

Each is a record of kind `lost`, key `<run id>/<n>`. A `pardon` record says that the losses before it no longer count:
nothing had ended well, and the user was asked to fix the cause.

Whoever is killed from outside is not to blame. So a loss counts against a run only for a cause of its own (an error,
memory, a signal that its own code raised, silence), and only until the run has been saved at a later step. A run at a
limit is given up only if it was alone on its worker at the last loss that counts toward that limit; otherwise another
run may be to blame. What kills a worker without a word may still be the run (`os._exit`):
`MOST_IN_A_ROW` such losses, with nothing gained in between, are one too many.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from proxies.core import canon
from proxies.core.failures import Cause
from proxies.core.spec import Curve, RunResult, RunSpec
from sweeps.store.ledger import Ledger

LOST, PARDON = "lost", "pardon"
NO_CURVE = Curve(steps=(), train_loss_nats=(), grad_norm=())
"""The curve of a run that never reported."""
MOST_IN_A_ROW = 10
"""Losses of a run without any progress between them, whatever the cause. Where kills from outside hit each worker once
in 20 s, a run that starts and is saved within 7 s is lost so by chance once in 170,000 times.
"""


_NUMBER = re.compile(r"\b(?:0x)?[0-9a-f]{8,}\b|\d[\d.]*(?:e[-+]?\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The body of a `lost` record."""

    cause: Cause
    detail: str
    log_tail: str
    """The last lines of what the worker printed; 2 kB at most, secrets removed."""
    worker: int
    step: int = 0
    """The step of its newest state then, from which it is resumed."""
    alone: bool = False
    """Whether it had its worker to itself."""
    kind: str = field(default="", metadata=canon.UNLESS_DEFAULT)
    """Of its worker's device (`sweeps.run.kinds`); empty: not known."""

    @property
    def last_line(self) -> str:
        """Last line of the log, or the detail if nothing was logged."""
        return (self.log_tail or self.detail).strip().rpartition("\n")[2].rpartition(" | ")[2]

    @property
    def message(self) -> str:
        """Last line of the failure without numbers and ids; equal failures have equal messages."""
        return _NUMBER.sub("#", self.last_line)

    @property
    def reason(self) -> str:
        """The failure in one line, for the outcome of a run."""
        is_told = self.last_line in self.detail
        return self.detail if is_told else f"{self.detail}; its log ends with: {self.last_line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryStatus:
    """What a run's losses mean for its next attempt."""

    num_lost: int = 0
    """Losses that count against its attempts."""
    num_in_a_row: int = 0
    """Losses since it last got on, whatever the cause."""
    num_microbatches: Mapping[str, int] = field(default_factory=dict)
    """Passes that its batches are to be split into, at least, on a device of a kind that ran out of memory; one
    elsewhere.
    """
    alone: bool = False
    """It is to have a worker to itself: the next loss may be its last."""
    failed: bool = False
    """It was lost as often as it may be."""


NEVER_LOST = RetryStatus()


class Losses:
    """Reads the losses of a ledger, and adds to them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        pardoned = max((record.seq for record in ledger.records(PARDON)), default=-1)
        self._num: dict[str, int] = {}
        self._losses: dict[str, list[Loss]] = {}
        for record in ledger.records(LOST):
            run_id = record.key.partition("/")[0]
            self._num[run_id] = self._num.get(run_id, 0) + 1
            if record.seq > pardoned:
                self._losses.setdefault(run_id, []).append(canon.decode(Loss, record.body))

    def record(self, run_id: str, loss: Loss) -> None:
        """Add a loss. Raises as `Ledger.append`."""
        number = self._num.get(run_id, 0)
        self._ledger.append(LOST, f"{run_id}/{number}", loss)
        self._num[run_id] = number + 1
        self._losses.setdefault(run_id, []).append(loss)

    def has_repeated(self, loss: Loss) -> bool:
        """Return whether this recorded loss and an earlier one of any run are the same failure.

        Only failures of runs that were alone are compared: one failure of a shared worker is recorded
        for each run that it held.
        """
        if not loss.alone or loss.cause in ("preempted", "lost_worker"):
            return False
        recorded = [each for losses in self._losses.values() for each in losses if each.alone]
        same = [each for each in recorded if (each.cause, each.message) == (loss.cause, loss.message)]
        return len(same) > 1

    def pardon(self, reason: str) -> None:
        """Let no loss so far count any more. Raises as `Ledger.append`."""
        self._ledger.append(PARDON, str(len(self._ledger.records(PARDON))), {"reason": reason})
        self._losses.clear()

    def standing(self, run_id: str, spec: RunSpec, max_attempts: int) -> RetryStatus:
        """What the losses of a run say.

        Pre-emption counts against nobody. Out of memory doubles the passes per batch on devices of that kind, down to
        one sequence each, and counts only from there on; a command's memory is its own business, and its losses count
        like any other.

        Args:
            run_id: of the run.
            spec: the run.
            max_attempts: losses that count, after which it has failed.
        """
        most = spec.batch_sequences if spec.command is None else 1
        own_microbatches = spec.batch_tokens // (spec.numerics.microbatch_tokens or spec.batch_tokens)
        passes, num_lost, num_in_a_row, step = dict[str, int](), 0, 0, 0
        last_was_alone = last_in_a_row_was_alone = False
        for loss in self._losses.get(run_id, []):
            if loss.step > step:
                num_lost, num_in_a_row, step = 0, 0, loss.step
            if loss.cause == "out_of_memory" and (now := passes.get(loss.kind, own_microbatches)) < most:
                passes[loss.kind] = min(2 * now, most)
            elif loss.cause != "preempted":
                num_in_a_row += 1
                last_in_a_row_was_alone = loss.alone
                if loss.cause != "lost_worker":
                    num_lost += 1
                    last_was_alone = loss.alone
        most_in_a_row = max(MOST_IN_A_ROW, max_attempts)
        return RetryStatus(
            num_lost=num_lost,
            num_in_a_row=num_in_a_row,
            num_microbatches=passes,
            alone=num_lost >= max(1, max_attempts - 1) or num_in_a_row >= most_in_a_row - 1,
            failed=(num_lost >= max_attempts and last_was_alone)
            or (num_in_a_row >= most_in_a_row and last_in_a_row_was_alone),
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
