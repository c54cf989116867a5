"""Retries of runs whose attempts failed, that is, ended without a result.

Each failure is a ledger record of kind `lost` with the key `<run id>/<n>`, so the count survives a
restart of the driver. A `pardon` record makes all earlier failures stop counting: it is written
when no run has ended well yet and the user was asked to fix the cause.

The cause decides what a failure counts toward:

- `preempted` counts toward no limit.
- `out_of_memory` counts toward no limit while the microbatch can be halved for that kind of device.
  With a microbatch of one sequence, or for a user's command, it counts toward both limits.
- `lost_worker` (the worker died without a message) counts only toward `MAX_FAILURES_IN_A_ROW`,
  because the worker may have been killed from outside or by the run itself (`os._exit`).
- Any other cause counts toward both limits, `max_attempts` and `MAX_FAILURES_IN_A_ROW`.

If a run was saved at a later step than at all failures before, both counts start again with this
failure. A run at a limit is given up only if it was alone on its worker at the last failure that
counts toward that limit; otherwise another run may be to blame.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from forerun._proxies.core import canon
from forerun._proxies.core.failures import CAUSES, Cause
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.spec import Curve, RunResult, RunSpec
from forerun._sweeps.store.ledger import Ledger

FAILURE_RECORD, PARDON_RECORD = "lost", "pardon"
EMPTY_CURVE = Curve(steps=(), train_loss_nats=(), grad_norm=())
"""Curve of a run that never reported."""
MAX_FAILURES_IN_A_ROW = 10
"""Maximum number of failures of a run without progress between them; `max_attempts` if that is
larger.

If kills from outside hit each worker once in 20 s, a run that starts and is saved within 7 s is
lost this often by chance about once in 200,000 times: (1 - exp(-7 / 20))^10.
"""
NUM_LOG_LINES = 8
"""Number of last lines of a worker's log that are shown with a failure."""

# Numbers and ids, which differ between messages of the same failure
_NUMBER = re.compile(r"\b(?:0x)?[0-9a-f]{8,}\b|\d[\d.]*(?:e[-+]?\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedAttempt:
    """Body of a `lost` record."""

    cause: Cause
    detail: str
    log_tail: str
    """Last lines that the worker printed, at most 2 kB, with secrets removed."""
    worker: int
    step: int = 0
    """Newest saved step at the time of the failure; the next attempt resumes there."""
    alone: bool = False
    """Whether no other run shared the worker."""
    kind: str = field(default="", metadata=canon.UNLESS_DEFAULT)
    """Kind of the worker's device (`forerun._sweeps.run.device_kinds`); empty if unknown."""

    @property
    def last_line(self) -> str:
        """Last line of the log, or of the detail if nothing was logged.

        A detail may quote several lines of a log file, joined by " | "
        (`forerun._proxies.external.log_file`).
        """
        return (self.log_tail or self.detail).strip().rpartition("\n")[2].rpartition(" | ")[2]

    @property
    def message(self) -> str:
        """Last line without numbers and ids, which is the same if the failure occurs again."""
        return _NUMBER.sub("#", self.last_line)

    @property
    def reason(self) -> str:
        """The failure in one line, for the outcome of a run."""
        is_in_detail = self.last_line in self.detail
        return (
            self.detail if is_in_detail else f"{self.detail}; its log ends with: {self.last_line}"
        )

    def describe(self, num_runs: int, *, is_repeat: bool) -> str:
        """Return the message about this failure for the user.

        Args:
            num_runs: number of runs that the worker held.
            is_repeat: whether the same failure was described before; then one line is enough.
        """
        prefix = f"worker {self.worker}: {CAUSES[self.cause].words}"
        held = f"it held {format_counted(num_runs, 'run')}"
        if is_repeat:
            return f"{prefix}, as before: {self.last_line}; {held}"
        line = f"{prefix}: {self.detail}; {held}. What to do: {CAUSES[self.cause].advice}"
        return "\n  | ".join([line, *self.log_tail.splitlines()[-NUM_LOG_LINES:]])


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPlan:
    """A plan for the next attempt of a run, given its failures."""

    num_failures: int = 0
    """Failures that count toward `max_attempts`."""
    num_failures_in_a_row: int = 0
    """Failures since the last progress, except preemptions and those that halved a microbatch."""
    num_microbatches: Mapping[str, int] = field(default_factory=dict)
    """Minimum number of microbatches by kind of device, for the kinds that ran out of memory."""
    needs_own_worker: bool = False
    """Whether the next attempt must not share its worker: one more failure may be the last."""
    has_failed: bool = False
    """Whether the run is given up."""


NO_FAILURES = RetryPlan()


class FailureLog:
    """The failed attempts in a ledger: read from it, and appended to it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        last_pardon = max((record.seq for record in ledger.read_records(PARDON_RECORD)), default=-1)
        self._num_records = Counter[str]()
        self._failures = defaultdict[str, list[FailedAttempt]](list)
        for record in ledger.read_records(FAILURE_RECORD):
            run_id = record.key.partition("/")[0]
            self._num_records[run_id] += 1
            if record.seq > last_pardon:
                self._failures[run_id].append(canon.decode(FailedAttempt, record.body))

    def append(self, run_id: str, failure: FailedAttempt) -> None:
        """Record a failure. Raises as `Ledger.append`."""
        self._ledger.append(FAILURE_RECORD, f"{run_id}/{self._num_records[run_id]}", failure)
        self._num_records[run_id] += 1
        self._failures[run_id].append(failure)

    def has_repeated(self, failure: FailedAttempt) -> bool:
        """Return whether this recorded failure has occurred before, in any run.

        Only failures of runs that were alone are compared: one failure of a shared worker is
        recorded for each run that it held.
        """
        if not failure.alone or failure.cause in ("preempted", "lost_worker"):
            return False
        same = [
            recorded
            for recorded in chain.from_iterable(self._failures.values())
            if recorded.alone
            and (recorded.cause, recorded.message) == (failure.cause, failure.message)
        ]
        return len(same) > 1

    def pardon_all(self, reason: str) -> None:
        """Make all failures so far stop counting. Raises as `Ledger.append`."""
        self._ledger.append(
            PARDON_RECORD, str(len(self._ledger.read_records(PARDON_RECORD))), {"reason": reason}
        )
        self._failures.clear()

    def plan_retry(self, run_id: str, spec: RunSpec, max_attempts: int) -> RetryPlan:
        """Return how the next attempt of a run must be made, by the rules in the module's
        docstring.

        Args:
            run_id: id of the run.
            spec: the run.
            max_attempts: number of counted failures after which the run has failed.
        """
        # At least one sequence per microbatch; forerun cannot split the batch of a user's command
        max_microbatches = spec.batch_sequences if spec.command is None else 1
        first_microbatches = spec.batch_tokens // (
            spec.numerics.microbatch_tokens or spec.batch_tokens
        )
        num_microbatches, num_failures, num_in_a_row, step = dict[str, int](), 0, 0, 0
        last_was_alone = last_in_a_row_was_alone = False
        for failure in self._failures.get(run_id, ()):
            if failure.step > step:
                num_failures, num_in_a_row, step = 0, 0, failure.step
            current = num_microbatches.get(failure.kind, first_microbatches)
            if failure.cause == "out_of_memory" and current < max_microbatches:
                num_microbatches[failure.kind] = min(2 * current, max_microbatches)
            elif failure.cause != "preempted":
                num_in_a_row += 1
                last_in_a_row_was_alone = failure.alone
                if failure.cause != "lost_worker":
                    num_failures += 1
                    last_was_alone = failure.alone
        max_in_a_row = max(MAX_FAILURES_IN_A_ROW, max_attempts)
        return RetryPlan(
            num_failures=num_failures,
            num_failures_in_a_row=num_in_a_row,
            num_microbatches=num_microbatches,
            needs_own_worker=num_failures >= max(1, max_attempts - 1)
            or num_in_a_row >= max_in_a_row - 1,
            has_failed=(num_failures >= max_attempts and last_was_alone)
            or (num_in_a_row >= max_in_a_row and last_in_a_row_was_alone),
        )


def make_failed_result(run_id: str, reason: str) -> RunResult:
    """Return the outcome of a run that is given up."""
    return RunResult(
        id=run_id,
        status="failed",
        loss_nats=None,
        num_steps=0,
        last_train_loss_nats=None,
        curve_id=canon.compute_content_id(EMPTY_CURVE),
        flops=0.0,
        tokens=0,
        seconds=0.0,
        environment={},
        reason=reason,
    )
