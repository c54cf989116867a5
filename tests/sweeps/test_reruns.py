"""Runs carried out again on named workers, begun anew when a worker is lost; and what two executions say."""

import dataclasses
from collections import Counter

import pytest
from sweep_fakes import FakeHost, bank_key, executions, make_spec, outcome

from sweeps.run.pool import InlinePool
from sweeps.run.reruns import SEED_NATS, Task, compare
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


def carried_out(pool, tasks, max_attempts=2, check=lambda: None):
    return list(under_way(
        pool, tasks, bank_key_for=bank_key, steps_per_call=3, max_attempts=max_attempts, hang_seconds=60.0, check=check
    ))  # fmt: skip


def test_every_task_is_carried_out_on_its_worker(tmp_path):
    specs = [make_spec(seed=seed) for seed in range(4)] + [make_spec(width=64)]
    pool = Workers(FakeHost(tmp_path / "0"), FakeHost(tmp_path / "1"))
    tasks = [Task(spec=spec, worker=index % 2, num_microbatches=2) for index, spec in enumerate(specs)]
    ended = carried_out(pool, tasks)
    assert {(task.spec.id, again.curve_id) for task, again in ended} == {
        (spec.id, outcome(spec)[0].curve_id) for spec in specs
    }
    for worker in range(2):
        ran_there = executions(tmp_path / str(worker))
        assert sorted(ran_there) == sorted(task.spec.id for task in tasks if task.worker == worker)
    assert all(call.again and not call.save for _, call in pool.calls)
    assert {call.num_microbatches for _, call in pool.calls} == {2}, "a batch that did not fit is split as it was"


@pytest.mark.parametrize("fault", ["raise 1", "nan 1"])
def test_what_is_lost_is_begun_again_and_given_up_at_last(tmp_path, fault):
    pool = Workers(FakeHost(tmp_path / "0", fault))
    tasks = [Task(spec=make_spec(seed=seed, num_slots=1), worker=0) for seed in range(2)]
    ended = {task.spec.seed: again for task, again in carried_out(pool, tasks, max_attempts=3)}
    assert ended[0].id == tasks[0].spec.id
    assert ended[1].startswith("lost 3 times, the last: ")
    assert executions(tmp_path / "0", "begin").count(tasks[1].spec.id) == 3


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
    for again, apart in ((ran("b"), "host"), (ran(process="2"), "process"), (ran(), "nothing"), (ran(""), "unknown")):
        verdict = compare(SPEC, ran(), again)
        assert (verdict.outcome, verdict.apart, verdict.end_nats) == ("agrees", apart, 0.0)
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
