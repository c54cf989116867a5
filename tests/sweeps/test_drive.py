import dataclasses
import math

import pytest
from sweep_fakes import FakeHostFactory, bank_key, executions, make_spec, make_specs, num_slots, outcome

from sweeps.curves import load_curve
from sweeps.drive import drive
from sweeps.errors import RunsFail, SourceStuck
from sweeps.ledger import Ledger
from sweeps.pool import InlinePool, Report
from sweeps.source import Signal, StaticSource


class Study:
    """A folder, a ledger and a pool."""

    def __init__(self, folder, fault=""):
        self.folder, self.diary = folder / "study", folder / "diary"
        self.ledger = Ledger.open(self.folder, {}, create=True)
        self.pool = InlinePool(FakeHostFactory(str(self.diary), fault))
        self.events = []

    def drive(self, specs, **kwargs):
        source = specs if hasattr(specs, "next") else StaticSource(specs, bank_key)
        kwargs = {"steps_per_call": 3, "progress": self.events.append} | kwargs
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


def test_every_run_has_its_outcome_and_its_curve(study):
    specs = [make_spec(seed=seed, width=width) for seed in range(5) for width in (32, 64)] + [make_spec(log2_lr=-1)]
    results = study.drive(specs)
    assert dict(results) == expected(specs)
    for spec in specs:
        assert load_curve(study.folder, results[spec.id]) == outcome(spec)[1]
    assert sum(len(event.outcomes) for event in study.events) == len(specs)
    assert (study.events[-1].num_running, study.events[-1].num_queued) == (0, 0)


def test_the_costliest_key_runs_first_and_keys_do_not_alternate(study):
    specs = [make_spec(seed=seed, width=width) for seed in range(4) for width in (32, 128)]
    study.drive(specs)
    widths = {spec.id: spec.shape.width for spec in specs}
    assert [widths[run_id] for run_id in executions(study.diary)] == [128] * 4 + [32] * 4


def test_what_has_an_outcome_is_not_run_again(study):
    specs = make_specs(6)
    study.drive(specs[:4])
    study.drive(specs + specs)
    assert sorted(executions(study.diary, "begin")) == sorted(spec.id for spec in specs)


def test_an_error_costs_an_attempt_and_not_the_neighbours(faulty):
    study = faulty("raise 1")
    specs = make_specs(5)
    results = study.drive(specs)
    poisoned = results[specs[1].id]
    assert poisoned.status == "failed"
    assert poisoned.reason == "lost 3 times, the last: ValueError: the corpus is not there"
    assert dict(results) == expected(specs) | {poisoned.id: poisoned}
    assert executions(study.diary, "begin").count(specs[1].id) == 3
    assert "ValueError" in study.events[0].lost[0]


def test_without_the_lone_attempt_neighbours_would_fail(faulty, monkeypatch):
    """The mutation check of the test above."""
    monkeypatch.setattr("sweeps.backlog.Attempt.alone", property(lambda self: False, lambda self, value: None))
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


def test_one_attempt_means_one(faulty):
    study = faulty("raise 0")
    with pytest.raises(RunsFail, match="nothing was recorded"):
        study.drive(make_specs(1), max_attempts=1)
    assert len(executions(study.diary, "begin")) == 1
    assert study.ledger.results() == {}


def test_a_stop_gives_out_nothing_more_and_a_resume_finishes(study):
    specs = make_specs(9)
    calls = iter(range(100))
    study.drive(specs, should_stop=lambda: next(calls) >= 4)
    done = set(study.ledger.results())
    assert 0 < len(done) < 9
    study.drive(specs)
    assert dict(study.ledger.results()) == expected(specs)
    assert all(executions(study.diary).count(run_id) == 1 for run_id in done)


class HangingPool:
    """One worker that never answers its first call; time passes when it is waited for."""

    num_workers = 1

    def __init__(self, inner):
        self.inner, self.now, self.hangs, self.restarts = inner, 0.0, 1, 0

    def start(self, worker, call):
        if not self.hangs:
            self.inner.start(worker, call)

    def wait(self, timeout_seconds):
        self.now += timeout_seconds
        return self.inner.wait(timeout_seconds)

    def restart(self, worker):
        self.hangs, self.restarts = 0, self.restarts + 1
        self.inner.restart(worker)


def test_a_hung_worker_is_given_up(study):
    study.pool = pool = HangingPool(study.pool)
    specs = make_specs(2)
    results = study.drive(specs, hang_seconds=60, clock=lambda: pool.now)
    assert dict(results) == expected(specs)
    assert pool.restarts == 1
    assert 60 < pool.now < 70
    assert study.events[0].lost == ("worker 0: no report for 60 s; it held 2 runs",)


class WaitingSource:
    def next(self, results):
        return Signal.WAIT


def test_a_source_that_waits_for_nothing(study):
    with pytest.raises(SourceStuck, match="nothing is running"):
        study.drive(WaitingSource())


class EchoPool:
    """Reports each finished run again, with another loss, in the next report."""

    num_workers = 1

    def __init__(self, inner):
        self.inner, self.echoes = inner, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def wait(self, timeout_seconds):
        (report,) = self.inner.wait(timeout_seconds)
        echoes, self.echoes = (
            self.echoes,
            [dataclasses.replace(end, result=end.result | {"loss_nats": math.pi}) for end in report.finished],
        )
        return [Report(worker=0, finished=(*report.finished, *echoes))]


def test_the_first_result_stands(study):
    study.pool = EchoPool(study.pool)
    specs = make_specs(12)
    assert dict(study.drive(specs)) == expected(specs)
