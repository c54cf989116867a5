"""Tests of runs that are trained again, and of the comparison of two executions of one run."""

import dataclasses

import pytest
from sweep_fakes import FakeHost, get_bank_key, list_executions, make_outcome, make_spec

from forerun._sweeps.run.pool import InlinePool
from forerun._sweeps.run.reruns import SEED_NOISE_SHARE, compare_executions, execute_again


@pytest.mark.parametrize("fault", ["", "raise 1", "nan 1"])
def test_rerun_trains_alone_and_starts_again_after_a_failure(tmp_path, fault):
    spec = make_spec(seed=1, num_slots=1)
    calls = []
    pool = InlinePool(lambda: FakeHost(tmp_path / "0", fault))

    def start(worker, call):
        calls.append(call)
        InlinePool.start(pool, worker, call)

    pool.start = start
    result_or_reason = execute_again(
        pool,
        spec,
        0,
        bank_key=get_bank_key(spec),
        num_microbatches=2,
        max_attempts=3,
        hang_seconds=60.0,
        check=lambda: None,
    )
    assert list_executions(tmp_path / "0", "begin") == [spec.id] * (3 if fault else 1)
    if fault:
        assert result_or_reason.startswith("lost 3 times, the last: ")
    else:
        assert result_or_reason.curve_id == make_outcome(spec)[0].curve_id
    assert all(call.is_rerun and not call.save for call in calls)
    assert {call.num_microbatches for call in calls} == {2}, (
        "the batch is split as in the first execution"
    )


SPEC = make_spec(num_steps=6)
ENVIRONMENT = {"python": "3", "torch": "2", "machine": "x", "device": "cpu", "cpu": "one kind"}


def make_execution(host="a", shift=0.0, *, process="1", status="finished", **environment):
    """Return a result from some place; `shift` changes its final loss and its curve."""
    result, _ = make_outcome(SPEC)
    end_fields = (
        {"loss_nats": None, "reason": "too high"}
        if status == "diverged"
        else {"loss_nats": result.loss_nats + shift}
    )
    place = {**ENVIRONMENT, "host": host, "process": process, **environment}
    curve_id = "f" * 64 if shift else result.curve_id
    return dataclasses.replace(
        result, environment=place, status=status, curve_id=curve_id, **end_fields
    )


def test_identical_results_agree_from_any_place():
    for second in (make_execution("b"), make_execution(process="2"), make_execution()):
        verdict = compare_executions(SPEC, make_execution(), second)
        assert (verdict.outcome, verdict.end_nats) == ("agrees", 0.0)
    assert (
        compare_executions(SPEC, make_execution(), make_execution("b", cpu="another")).outcome
        == "agrees"
    )


def test_any_difference_counts_where_identical_results_are_promised():
    for second in (
        make_execution("b", shift=2.0**-50),
        dataclasses.replace(make_execution("b"), curve_id="f" * 64),
        make_execution("b", status="diverged"),
    ):
        assert compare_executions(SPEC, make_execution(), second).outcome == "differs"


@pytest.mark.parametrize("key", [*ENVIRONMENT, "resumed_at_step", "num_microbatches"])
def test_losses_may_differ_as_two_seeds_do_where_identical_results_are_not_promised(key):
    """The second execution differs in one thing: the chip, the software, the device, a resume from
    a checkpoint, or a split batch.
    """
    seed_noise = SEED_NOISE_SHARE * make_execution().loss_nats

    def compare_with(shift=0.0, status="finished"):
        second = make_execution("b", shift, status=status, **{key: "other"})
        return compare_executions(SPEC, make_execution(), second).outcome

    assert compare_with(0.9 * seed_noise) == "agrees"
    assert compare_with(1.1 * seed_noise) == "cannot_tell"
    assert compare_with(status="diverged") == "cannot_tell"
