"""Runs carried out again, begun anew when a worker is lost; and what two executions say."""

import dataclasses

import pytest
from sweep_fakes import FakeHost, bank_key, executions, make_spec, outcome

from sweeps.run.pool import InlinePool
from sweeps.run.reruns import SEED_SHARE, carried_out, compare


@pytest.mark.parametrize("fault", ["", "raise 1", "nan 1"])
def test_a_run_is_carried_out_alone_as_it_was_and_what_is_lost_is_begun_again(tmp_path, fault):
    spec, calls, pool = (
        make_spec(seed=1, num_slots=1),
        [],
        InlinePool(lambda: FakeHost(tmp_path / "0", fault)),
    )
    pool.start = lambda worker, call: (calls.append(call), InlinePool.start(pool, worker, call))
    found = carried_out(
        pool,
        spec,
        0,
        bank_key=bank_key(spec),
        num_microbatches=2,
        max_attempts=3,
        hang_seconds=60.0,
        check=lambda: None,
    )
    assert executions(tmp_path / "0", "begin") == [spec.id] * (3 if fault else 1)
    assert (
        found.startswith("lost 3 times, the last: ")
        if fault
        else found.curve_id == outcome(spec)[0].curve_id
    )
    assert all(call.again and not call.save for call in calls)
    assert {call.num_microbatches for call in calls} == {2}, (
        "a batch that did not fit is split as it was"
    )


SPEC = make_spec(num_steps=6)
CPU = {"python": "3", "torch": "2", "machine": "x", "device": "cpu", "cpu": "one kind"}


def ran(host="a", shift=0.0, *, process="1", status="finished", **environment):
    """An execution there, its end and its curve other by `shift`."""
    result, _ = outcome(SPEC)
    ended = (
        {"loss_nats": None, "reason": "too high"}
        if status == "diverged"
        else {"loss_nats": result.loss_nats + shift}
    )
    place = {**CPU, "host": host, "process": process, **environment}
    curve_id = "f" * 64 if shift else result.curve_id
    return dataclasses.replace(result, environment=place, status=status, curve_id=curve_id, **ended)


def test_the_same_bits_agree_wherever_they_were_made():
    for again in (ran("b"), ran(process="2"), ran()):
        verdict = compare(SPEC, ran(), again)
        assert (verdict.outcome, verdict.end_nats) == ("agrees", 0.0)
    assert compare(SPEC, ran(), ran("b", cpu="another")).outcome == "agrees"


def test_one_bit_is_enough_where_the_same_are_promised():
    assert compare(SPEC, ran(), ran("b", 2.0**-50)).outcome == "differs"
    assert (
        compare(SPEC, ran(), dataclasses.replace(ran("b"), curve_id="f" * 64)).outcome == "differs"
    )
    assert compare(SPEC, ran(), ran("b", status="diverged")).outcome == "differs"


@pytest.mark.parametrize("key", [*CPU, "resumed_at_step", "num_microbatches"])
def test_where_they_are_not_the_ends_may_be_as_far_apart_as_two_seeds(key):
    """On another chip or with other software, on a GPU, gone on from a checkpoint, with a batch
    that was split.
    """
    seeds = SEED_SHARE * ran().loss_nats
    for shift, wanted in ((0.9 * seeds, "agrees"), (1.1 * seeds, "cannot_tell")):
        assert compare(SPEC, ran(), ran("b", shift, **{key: "other"})).outcome == wanted
    assert (
        compare(SPEC, ran(), ran("b", status="diverged", **{key: "other"})).outcome == "cannot_tell"
    )
