import dataclasses
import time

import pytest
from sweep_fakes import (
    FakeHostFactory,
    bank_key,
    executions,
    finished,
    make_spec,
    make_specs,
    num_slots,
    outcome,
    pruned_outcome,
)

from proxies.core import canon
from proxies.core.spec import RunSpec
from sweeps.run.drive import drive
from sweeps.run.losses import Loss
from sweeps.run.pool import InlinePool, Report
from sweeps.search.source import StaticSource
from sweeps.store.curves import load_curve
from sweeps.store.errors import RunsFail
from sweeps.store.ledger import Ledger


class Study:
    """A folder, a ledger and a pool."""

    def __init__(self, folder, fault=""):
        self.folder, self.diary = folder / "study", folder / "diary"
        self.ledger = Ledger.open(self.folder, {}, create=True)
        self.pool = InlinePool(FakeHostFactory(str(self.diary), fault))
        self.events = []

    def drive(self, specs, **kwargs):
        source = specs if hasattr(specs, "next") else StaticSource(specs, bank_key)
        clock = getattr(self.pool, "clock", time.monotonic)
        kwargs = {"steps_per_call": 3, "progress": self.events.append, "clock": clock} | kwargs
        drive(source, self.pool, self.ledger, self.folder, num_slots_for=num_slots, bank_key_for=bank_key, **kwargs)
        return self.ledger.results()


@pytest.fixture
def study(tmp_path):
    study = Study(tmp_path)
    yield study
    study.ledger.close()


@pytest.fixture
def faulty(tmp_path):
    studies = []

    def make(fault):
        studies.append(Study(tmp_path, fault))
        return studies[-1]

    yield make
    for study in studies:
        study.ledger.close()


def expected(specs):
    return {spec.id: outcome(spec)[0] for spec in specs}


def test_an_error_costs_an_attempt_and_not_the_neighbours(faulty):
    study = faulty("raise 1")
    specs = make_specs(5)
    results = study.drive(specs)
    poisoned = results[specs[1].id]
    assert poisoned.status == "failed"
    assert poisoned.reason == "lost 3 times, the last: error: ValueError: the corpus is not there"
    assert dict(results) == expected(specs) | {poisoned.id: poisoned}
    assert executions(study.diary, "begin").count(specs[1].id) == 3
    assert "ValueError" in study.events[0].lost[0]


def test_without_the_lone_attempt_neighbours_would_fail(faulty, monkeypatch):
    """The mutation check of the test above: whoever is there is to blame."""
    monkeypatch.setattr("sweeps.run.backlog.Attempt.alone", property(lambda self: False, lambda self, value: None))
    monkeypatch.setattr("sweeps.run.driver.Loss", lambda **said: Loss(**said | {"alone": True}))
    study, specs = faulty("raise 1"), make_specs(5)
    study.drive(specs[3:])  # something has ended well before
    results = study.drive(specs)
    assert sum(result.status == "failed" for result in results.values()) > 1


def test_a_result_that_is_none_is_not_believed(faulty):
    study = faulty("nan 2")
    specs = make_specs(3)
    results = study.drive(specs)
    assert results[specs[2].id].status == "failed"
    assert "finite" in results[specs[2].id].reason
    assert [results[spec.id].status for spec in specs[:2]] == ["finished"] * 2


class Scripted:
    """Several workers whose every call is answered by `answer(call, number)`: a report, or None for never."""

    def __init__(self, answer, num_workers=1):
        self.num_workers, self.answer = num_workers, answer
        self.now, self.calls, self.restarted, self.arrived = 0.0, [], [], []
        self.slots = [{} for _ in range(num_workers)]

    def clock(self):
        return self.now

    def start(self, worker, call):
        self.calls.append(call)
        self.slots[worker] |= {slot: canon.decode(RunSpec, data) for slot, data in call.admit}
        report = self.answer(call, len(self.calls) - 1)
        if report is not None:
            self.arrived.append(dataclasses.replace(report, worker=worker))

    def ends(self, worker=0):
        """All of a worker's runs end."""
        held, self.slots[worker] = self.slots[worker], {}
        return Report(worker=worker, finished=tuple(finished(slot, spec) for slot, spec in held.items()))

    def wait(self, timeout_seconds):
        self.now += timeout_seconds
        arrived, self.arrived = self.arrived, []
        return arrived

    def restart(self, worker):
        self.restarted.append(worker)
        self.slots[worker] = {}


def scripted(study, answer, **options):
    study.pool = pool = Scripted(lambda call, number: answer(pool, call, number), **options)
    return pool


def lost_records(study):
    return [record.body for record in study.ledger.records("lost")]


def error(cause, said="it went wrong", **more):
    return Report(worker=0, error=said, cause=cause, **more)


def test_what_does_not_fit_is_tried_in_more_parts(study):
    pool = scripted(study, lambda pool, call, n: pool.ends() if call.num_microbatches >= 2 else error("out_of_memory"))
    specs = make_specs(3)  # two sequences a batch
    results = study.drive(specs, max_attempts=1)
    assert dict(results) == expected(specs)
    assert [(call.num_microbatches, len(call.admit)) for call in pool.calls] == [(1, 3), (2, 3)]
    assert pool.calls[1].bank_key == pool.calls[0].bank_key + "/2"
    assert [body["cause"] for body in lost_records(study)] == ["out_of_memory"] * 3
    assert "out of memory: it went wrong; it held 3 runs. What to do: give it more memory" in study.events[0].lost[0]


def test_what_never_fits_fails(study):
    (good,), big = make_specs(1), make_spec(seed=5, width=64)

    def answer(pool, call, number):
        return pool.ends() if "32" in call.bank_key else error("out_of_memory")

    pool = scripted(study, answer)
    study.drive([good])
    result = study.drive([big], max_attempts=2)[big.id]
    assert (result.status, result.reason) == ("failed", "lost 2 times, the last: out of memory: it went wrong")
    assert [call.num_microbatches for call in pool.calls] == [1, 1, 2, 2]


def test_a_worker_killed_for_its_memory_is_known_by_the_kernels_count(study, monkeypatch):
    kills = iter([4, 5, 5])
    monkeypatch.setattr("sweeps.run.driver.oom_kills", lambda: next(kills))
    answers = [error("lost_worker"), error("lost_worker")]
    scripted(study, lambda pool, call, number: answers[number] if number < 2 else pool.ends())
    study.drive(make_specs(1))
    assert [body["cause"] for body in lost_records(study)] == ["out_of_memory", "lost_worker"]


def test_a_study_in_which_nothing_ends_is_refused_with_the_log_and_begins_again(study):
    last_words = "loading\nmodel.py, line 3, in forward: x = y\nNameError: y"
    failing = scripted(study, lambda pool, call, number: error("user_code", log_tail=last_words))
    specs = make_specs(1)
    with pytest.raises(RunsFail) as caught:
        study.drive(specs)
    assert "lost 3 times, the last: your code failed: it went wrong" in str(caught.value)
    assert "What to do: mend it, then give the same command again\n  | loading\n  | model.py, line 3" in str(
        caught.value
    )
    assert len(failing.calls) == 3 and study.ledger.results() == {}
    scripted(study, lambda pool, call, number: error("user_code") if number < 2 else pool.ends())
    assert dict(study.drive(specs)) == expected(specs), "what was mended gets all its attempts"


def test_bad_data_refuses_the_study_and_costs_no_attempt(study):
    scripted(study, lambda pool, call, number: error("bad_data", "train-00000.bin is short", refused=True))
    with pytest.raises(RunsFail, match=r"bad data: train-00000.bin is short. What has ended is recorded; mend it"):
        study.drive(make_specs(1))
    assert lost_records(study) == []


def test_a_deadline_is_learned_from_the_calls(study):
    """The first call may take the longest of all; later ones ten times what such calls took, two minutes at least."""
    pool = scripted(study, lambda pool, call, number: None if number == 6 else slow(pool))

    def slow(pool):
        pool.now += 14.0
        return Report(worker=0, steps={0: min(3 * len(pool.calls), 90)})

    study.drive(make_specs(1, num_steps=99), should_stop=lambda: bool(pool.restarted), clock=pool.clock)
    assert study.events[-1].lost[0].startswith("worker 0: hung: no report for 145 s")


class Looking:
    """A list whose runs are looked at; those of some seeds are given up at their second rung."""

    def __init__(self, specs, losers, rungs=(1, 3)):
        self.inner, self.losers, self.steps = StaticSource(specs, bank_key), losers, rungs
        self.seeds = {spec.id: spec.seed for spec in specs}
        self.asked = []

    def next(self, results):
        return self.inner.next(results)

    @property
    def pruner(self):
        return self

    def rungs(self, run_id):
        return self.steps

    def verdict(self, run_id, losses_nats):
        seed, step = self.seeds[run_id], len(losses_nats)
        self.asked.append((seed, step))
        assert losses_nats == outcome(make_spec(seed=seed, num_steps=6))[1].train_loss_nats[:step]
        return "it loses" if seed in self.losers and step == self.steps[-1] else ""


def pruned(ledger):
    return {run.spec.id: run.result for run in ledger.runs() if run.result.status == "pruned"}


def test_a_run_that_loses_is_recorded_as_its_first_steps(study):
    specs = make_specs(7, num_steps=6)
    source = Looking(specs, losers={1, 4})
    results = study.drive(source)
    assert dict(results) == expected(specs[:1] + specs[2:4] + specs[5:])
    assert pruned(study.ledger) == {
        spec.id: pruned_outcome(spec, 3, "it loses")[0] for spec in specs if spec.seed in source.losers
    }
    for result in study.ledger.first_results().values():
        curve = load_curve(study.folder, result)
        assert len(curve.steps) == (3 if result.status == "pruned" else 6)
    assert sorted(source.asked) == [(seed, step) for seed in range(7) for step in (1, 3)]
    told = [result.id for event in study.events for result in event.outcomes]
    assert sorted(told) == sorted(spec.id for spec in specs)
