"""Replays on named workers: carried out once each, begun again when a worker is lost, given up at last."""

import dataclasses
from collections import Counter

import pytest
from sweep_fakes import FakeHost, bank_key, executions, make_spec, num_slots, outcome

from sweeps.run.pool import Advanced, InlinePool
from sweeps.run.reruns import Reruns, Task, where
from sweeps.store.sites import WHERE


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


class Placed:
    """Says where it is, as `launcher.workers.host.Host` does; then what it is told."""

    def __init__(self, answer):
        self.answer = answer

    def advance(self, call):
        assert call.probe == WHERE
        if isinstance(self.answer, Exception):
            raise self.answer
        return Advanced(answer=self.answer)


def carried_out(pool, tasks, max_attempts=2):
    under_way = Reruns(
        pool, tasks, num_slots_for=num_slots, bank_key_for=bank_key, steps_per_call=3, max_attempts=max_attempts,
        hang_seconds=60.0,
    )  # fmt: skip
    return list(under_way.ended(lambda: None))


def test_every_task_is_carried_out_on_its_worker(tmp_path):
    specs = [make_spec(seed=seed) for seed in range(4)] + [make_spec(width=64)]
    pool = Workers(FakeHost(tmp_path / "0"), FakeHost(tmp_path / "1"))
    tasks = [Task(spec=spec, replay="again", worker=index % 2) for index, spec in enumerate(specs)]
    ended = carried_out(pool, tasks)
    assert {(task.spec.id, ran.result.id, ran.curve) for task, ran in ended} == {
        (spec.id, spec.id, outcome(spec)[1]) for spec in specs
    }
    for worker in range(2):
        ran_there = executions(tmp_path / str(worker))
        assert sorted(ran_there) == sorted(task.spec.id for task in tasks if task.worker == worker)
    assert all(call.replay == "again" and not call.save for _, call in pool.calls)


def test_those_of_one_bank_share_it_and_a_nudged_one_does_not(tmp_path):
    pool = Workers(FakeHost(tmp_path / "0"))
    specs = [make_spec(seed=seed) for seed in range(2)]
    carried_out(pool, [
        *(Task(spec=spec, replay="again", worker=0) for spec in specs), Task(spec=specs[0], replay="nudged", worker=0)
    ])  # fmt: skip
    begun = [(call.replay, len(call.admit)) for _, call in pool.calls if call.admit]
    assert begun == [("again", 2), ("nudged", 1)]
    assert len({call.bank_key for _, call in pool.calls}) == 2


def test_a_batch_that_did_not_fit_is_split_as_it_was(tmp_path):
    pool = Workers(FakeHost(tmp_path / "0"))
    carried_out(pool, [Task(spec=make_spec(), replay="again", worker=0, num_microbatches=2)])
    assert {call.num_microbatches for _, call in pool.calls} == {2}


@pytest.mark.parametrize("fault", ["raise 1", "nan 1"])
def test_what_is_lost_is_begun_again_and_given_up_at_last(tmp_path, fault):
    """The neighbour of a run that brings its worker down ends well."""
    pool = Workers(FakeHost(tmp_path / "0", fault))
    tasks = [Task(spec=make_spec(seed=seed, num_slots=1), replay="again", worker=0) for seed in range(2)]
    ended = {task.spec.seed: ran for task, ran in carried_out(pool, tasks, max_attempts=3)}
    assert ended[0].result.id == tasks[0].spec.id
    assert ended[1].startswith("lost 3 times, the last: ")
    assert executions(tmp_path / "0", "begin").count(tasks[1].spec.id) == 3


def test_workers_say_where_they_are_and_one_that_cannot_starts_anew():
    pool = Workers(Placed({"host": "a"}), Placed(ValueError("no")), Placed({"host": "c"}))
    assert where(pool, lambda: None) == {0: {"host": "a"}, 2: {"host": "c"}}
    assert pool.restarted == {1: 1}


def test_whoever_stops_it_is_heard(tmp_path):
    def stop():
        raise KeyboardInterrupt

    under_way = Reruns(
        Workers(FakeHost(tmp_path / "0")), [Task(spec=make_spec(), replay="again", worker=0)], num_slots_for=num_slots,
        bank_key_for=bank_key, steps_per_call=3, max_attempts=2, hang_seconds=60.0,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        list(under_way.ended(stop))
