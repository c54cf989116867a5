"""What the driver believes of its workers."""

from types import SimpleNamespace

import pytest
from sweep_fakes import bank_key, make_spec, num_slots

from sweeps.run.backlog import Attempt
from sweeps.run.crew import Crew, Leases
from sweeps.run.pool import Report
from sweeps.store.live import Running


class Pool:
    num_workers = 2

    def __init__(self):
        self.calls, self.reports, self.restarted = [], [], []

    def start(self, worker, call):
        self.calls.append((worker, call))

    def wait(self, timeout_seconds):
        reports, self.reports = self.reports, []
        return reports

    def restart(self, worker):
        self.restarted.append(worker)


@pytest.fixture
def made():
    pool, clock = Pool(), SimpleNamespace(now=0.0)
    crew = Crew(pool, num_slots, Leases(600.0), lambda: clock.now)
    spec = make_spec(num_steps=7)
    attempt = Attempt(spec=spec, run_id=spec.id, bank_key=bank_key(spec), num_microbatches=2, rungs=(5, 6))
    return SimpleNamespace(crew=crew, pool=pool, clock=clock, attempt=attempt)


def begin(made, index=0, slot=1, max_steps=3):
    worker = made.crew.workers[index]
    admitted = {} if worker.slots else {slot: made.attempt}
    worker.bank_key = made.attempt.bank_key
    worker.slots |= admitted
    made.crew.start(index, admitted, max_steps)
    return made.pool.calls[-1][1]


def answer(made, index=0, steps=None, seconds=1.0, **more):
    made.clock.now += seconds
    made.pool.reports = [Report(worker=index, steps=steps or {}, **more)]
    return made.crew.wait(0.1)


def test_a_call_says_what_to_do(made):
    call = begin(made)
    assert (call.bank_key, call.num_slots, call.num_microbatches) == (made.attempt.bank_key, 3, 2)
    assert [slot for slot, _ in call.admit] == [1]
    assert (call.max_steps, call.save, call.hold) == (3, False, {1: 5})
    assert made.crew.busy and [index for index, _ in made.crew.idle()] == [1]
    answer(made, steps={1: 3})
    assert not made.crew.busy
    call = begin(made, max_steps=0)
    assert (call.admit, call.max_steps, call.save) == ((), 0, True)


def test_calls_that_do_the_same_take_alike(made):
    kinds = []
    for max_steps, step in ((3, 1), (3, 3), (3, 5), (0, 5), (3, 7)):
        begin(made, max_steps=max_steps)
        kinds.append(made.crew.workers[0].kind[1])
        answer(made, steps={1: step})
    assert kinds == ["build", "train", "train", "save", "end"]


def look_until(made, seconds):
    while made.clock.now < seconds:
        made.clock.now += 2.0
        if reports := made.crew.wait(0.5):
            return reports
    return []


def test_who_is_silent_is_reported_by_us(made):
    begin(made)
    assert look_until(made, 600.0) == []
    (report,) = look_until(made, 603.0)
    assert (report.worker, report.cause, report.error) == (0, "hung", "no report for 600 s")


def test_whoever_failed_teaches_nothing_and_builds_again(made):
    begin(made)
    answer(made, seconds=5.0, error="gone", cause="lost_worker")
    assert made.crew.dismiss(0, restart=True) == [made.attempt]
    assert made.pool.restarted == [0]
    begin(made)
    assert made.crew.workers[0].kind[1] == "build"
    assert made.crew._leases.seconds(made.crew.workers[0].kind) == 600.0
    assert made.crew.dismiss(0, restart=False) == [made.attempt]
    assert made.pool.restarted == [0] and not made.crew.busy


def test_running_is_what_is_in_slots(made):
    begin(made, index=1)
    assert made.crew.running() == (Running(run_id=made.attempt.run_id, worker=1, step=0, num_steps=7),)
    answer(made, index=1, steps={1: 4})
    assert made.crew.running()[0].step == 4


def test_our_own_absence_is_not_a_workers_silence(made):
    """The driver was suspended for an hour; the report is there, but the pool hands it over at the second look."""
    begin(made)
    look_until(made, 500.0)
    made.clock.now += 3600.0
    assert made.crew.wait(0.5) == []
    assert [report.error for report in answer(made, steps={1: 3})] == [None]
    begin(made)
    (report,) = look_until(made, made.clock.now + 603.0)
    assert report.cause == "hung"
