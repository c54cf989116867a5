"""Runs carried out again on named workers, begun anew when a worker is lost; and what two executions say."""

import dataclasses
from collections import Counter

import pytest
from sweep_fakes import FakeHost, bank_key, executions, make_spec, outcome

from sweeps.run.pool import InlinePool
from sweeps.run.reruns import SEED_NATS, compare
from sweeps.run.reruns import carried_out as under_way


class Workers:
    """Several inline workers as one pool; what each was called with is kept."""

    def __init__(self, *hosts):
        self.num_workers = len(hosts)
        self.pools = [InlinePool(lambda host=host: host) for host in hosts]
        self.calls, self.busy, self.restarted = [], [], Counter()

    def start(self, worker, call):
        self.calls.append((worker, call))
        self.busy.append(worker)
        self.pools[worker].start(0, call)

    def wait(self, timeout_seconds):
        if not self.busy:
            return []
        worker = self.busy.pop()
        (report,) = self.pools[worker].wait(timeout_seconds)
        return [dataclasses.replace(report, worker=worker)]

    def restart(self, worker):
        self.restarted[worker] += 1
        self.pools[worker].restart(0)


def carried_out(pool, spec, worker, max_attempts=2):
    return under_way(
        pool, spec, worker, bank_key=bank_key(spec), num_microbatches=2, steps_per_call=3, max_attempts=max_attempts,
        hang_seconds=60.0, check=lambda: None,
    )  # fmt: skip


def test_a_run_is_carried_out_on_its_worker(tmp_path):
    spec, pool = make_spec(seed=1), Workers(FakeHost(tmp_path / "0"), FakeHost(tmp_path / "1"))
    assert carried_out(pool, spec, 1).curve_id == outcome(spec)[0].curve_id
    assert executions(tmp_path / "1") == [spec.id] and executions(tmp_path / "0") == []
    assert all(call.again and not call.save for _, call in pool.calls)
    assert {call.num_microbatches for _, call in pool.calls} == {2}, "a batch that did not fit is split as it was"


@pytest.mark.parametrize("fault", ["raise 1", "nan 1"])
def test_what_is_lost_is_begun_again_and_given_up_at_last(tmp_path, fault):
    spec, pool = make_spec(seed=1, num_slots=1), Workers(FakeHost(tmp_path / "0", fault))
    assert carried_out(pool, spec, 0, max_attempts=3).startswith("lost 3 times, the last: ")
    assert executions(tmp_path / "0", "begin").count(spec.id) == 3


SPEC = make_spec(num_steps=6)
CPU = {"python": "3", "torch": "2", "machine": "x", "device": "cpu", "cpu": "one kind"}


def ran(host="a", shift=0.0, *, process="1", status="finished", **environment):
    """An execution there, its end and its curve other by `shift`."""
    result, _ = outcome(SPEC)
    ended = {"loss_nats": None, "reason": "too high"} if status == "diverged" else {
        "loss_nats": result.loss_nats + shift
    }  # fmt: skip
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
    assert compare(SPEC, ran(), dataclasses.replace(ran("b"), curve_id="f" * 64)).outcome == "differs"
    assert compare(SPEC, ran(), ran("b", status="diverged")).outcome == "differs"


@pytest.mark.parametrize("key", [*CPU, "resumed_at_step", "num_microbatches"])
def test_where_they_are_not_the_ends_may_be_as_far_apart_as_two_seeds(key):
    """On another chip or with other software, on a GPU, gone on from a checkpoint, with a batch that was split."""
    for shift, wanted in ((0.9 * SEED_NATS, "agrees"), (1.1 * SEED_NATS, "cannot_tell")):
        assert compare(SPEC, ran(), ran("b", shift, **{key: "other"})).outcome == wanted
    assert compare(SPEC, ran(), ran("b", status="diverged", **{key: "other"})).outcome == "cannot_tell"
