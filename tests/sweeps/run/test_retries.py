"""Tests of how a run is retried after failures, by this driver and by the next one."""

import dataclasses

import pytest
from sweep_fakes import make_spec

from forerun._sweeps.run.retries import MAX_FAILURES_IN_A_ROW, FailedAttempt, FailureLog, RetryPlan
from forerun._sweeps.store.ledger import Ledger

# A batch of eight sequences
SPEC = dataclasses.replace(make_spec(), batch_tokens=8 * 8)


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path / "study", {}, create=True) as ledger:
        yield ledger


def record_failures(failure_log, *causes, spec=SPEC, **fields):
    for cause in causes:
        failure_log.append(
            spec.id,
            FailedAttempt(cause=cause, detail="why", log_tail="last words", worker=2, **fields),
        )


def read_plan(ledger, spec=SPEC, max_attempts=3):
    """Return the retry plan as the next driver reads it."""
    return FailureLog(ledger).plan_retry(spec.id, spec, max_attempts)


@pytest.mark.parametrize(
    ("causes", "expected"),  # expected: counted failures, and number of microbatches
    [
        ([], (0, 1)),
        (["lost_worker", "crashed", "hung", "user_code", "error"], (4, 1)),
        (["preempted"] * 5, (0, 1)),
        (["out_of_memory"], (0, 2)),
        (["out_of_memory"] * 3, (0, 8)),
        (["out_of_memory"] * 5, (2, 8)),
        (["lost_worker", "out_of_memory", "hung"], (1, 2)),
    ],
)
def test_failures_count_by_their_cause(ledger, causes, expected):
    failure_log = FailureLog(ledger)
    record_failures(failure_log, *causes)
    num_lost, num_microbatches = expected
    plan = failure_log.plan_retry(SPEC.id, SPEC, 3)
    assert (plan.num_failures, plan.num_microbatches.get("", 1)) == (num_lost, num_microbatches)
    assert read_plan(ledger) == plan
    assert read_plan(ledger, make_spec(seed=9)) == RetryPlan(
        num_failures=0, num_failures_in_a_row=0
    )


def test_batches_are_split_by_kind_of_device(ledger):
    """The small device runs out of memory three times; the large one takes whole batches until it
    fails.
    """
    failure_log = FailureLog(ledger)
    record_failures(failure_log, *["out_of_memory"] * 3, kind="NVIDIA A100")
    assert read_plan(ledger).num_microbatches == {"NVIDIA A100": 8}
    record_failures(failure_log, "out_of_memory", kind="NVIDIA H100")
    assert (
        read_plan(ledger).num_microbatches == {"NVIDIA A100": 8, "NVIDIA H100": 2}
        and read_plan(ledger).num_failures == 0
    )
    record_failures(failure_log, "out_of_memory", kind="NVIDIA A100")
    assert read_plan(ledger).num_failures == 1, "a batch cannot be split below one sequence"


def test_run_fails_only_through_its_own_fault(ledger):
    failure_log = FailureLog(ledger)
    record_failures(failure_log, "crashed", "error")
    assert (read_plan(ledger).needs_own_worker, read_plan(ledger).has_failed) == (True, False)
    record_failures(failure_log, "lost_worker", alone=True)
    assert not read_plan(ledger).has_failed, "the kill may have come from outside"
    record_failures(failure_log, "crashed")
    assert not read_plan(ledger).has_failed, "another run on the worker may be to blame"
    record_failures(failure_log, "crashed", alone=True)
    assert read_plan(ledger).has_failed
    assert not read_plan(ledger, max_attempts=5).has_failed


@pytest.mark.parametrize("cause", ["preempted", "lost_worker", "out_of_memory"])
def test_uncounted_failure_does_not_fail_a_run(ledger, cause):
    """The error came on a shared worker, so another run may be to blame. A later failure that does
    not count proves nothing about the error, even if the run was alone.
    """
    failure_log = FailureLog(ledger)
    record_failures(failure_log, "error")
    record_failures(failure_log, cause, alone=True)
    assert (
        read_plan(ledger, max_attempts=1).needs_own_worker,
        read_plan(ledger, max_attempts=1).has_failed,
    ) == (
        True,
        False,
    )
    record_failures(failure_log, "error", alone=True)
    record_failures(failure_log, cause)
    assert read_plan(ledger, max_attempts=1).has_failed, "the run has failed while it was alone"


def test_repeated_failure_is_recognized_by_its_last_line(ledger):
    """Failures of all runs are compared by their last lines without numbers. Failures on shared
    workers, or from outside, are not compared.
    """
    failure_log = FailureLog(ledger)
    detail = "run {}, attempt-1: exit code 1; log ends with: step {} | AssertionError: {} != 7"

    def is_repeated(cause, *numbers, seed=0, alone=True, log_tail=""):
        failure = FailedAttempt(
            cause=cause, detail=detail.format(*numbers), log_tail=log_tail, worker=0, alone=alone
        )
        failure_log.append(make_spec(seed=seed).id, failure)
        return failure_log.has_repeated(failure)

    assert not is_repeated("user_code", "0123456789ab", 5, 3)
    assert not is_repeated("user_code", "0123456789ab", 5, 3, log_tail="KeyError: 'x'"), (
        "the last line differs"
    )
    assert not is_repeated("user_code", "ba9876543210", 5, 3, alone=False, seed=1)
    assert not any(
        is_repeated(cause, "0123456789ab", 5, 3)
        for cause in ("preempted", "lost_worker")
        for _ in range(2)
    )
    assert is_repeated("user_code", "ba9876543210", 6, 2.5e-3, seed=1)
    failure_log.pardon_all("fixed")
    assert not is_repeated("user_code", "0123456789ab", 5, 3)


def test_progress_resets_the_count_of_failures(ledger):
    failure_log = FailureLog(ledger)
    for step in (0, 20, 20, 40, 60):
        record_failures(failure_log, "error", step=step, alone=True)
        assert not read_plan(ledger).has_failed
    assert read_plan(ledger).num_failures == 1
    record_failures(failure_log, "error", "error", step=60, alone=True)
    assert read_plan(ledger).has_failed


def test_run_that_is_lost_too_often_without_progress_fails(ledger):
    failure_log = FailureLog(ledger)
    record_failures(failure_log, *["lost_worker"] * (MAX_FAILURES_IN_A_ROW - 1))
    assert (read_plan(ledger).needs_own_worker, read_plan(ledger).has_failed) == (True, False)
    record_failures(failure_log, "lost_worker", step=7, alone=True)
    assert (read_plan(ledger).needs_own_worker, read_plan(ledger).has_failed) == (False, False)
    record_failures(failure_log, *["lost_worker"] * (MAX_FAILURES_IN_A_ROW - 1), step=7, alone=True)
    assert read_plan(ledger).has_failed
    assert read_plan(ledger).num_failures_in_a_row == MAX_FAILURES_IN_A_ROW
    assert not read_plan(ledger, max_attempts=20).has_failed
