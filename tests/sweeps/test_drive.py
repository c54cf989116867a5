import dataclasses
import math
import time

import pytest
from sweep_fakes import (
    FakeHostFactory,
    bank_key,
    finished,
    make_spec,
    make_specs,
    num_slots,
    outcome,
    pruned_outcome,
)

from proxies.core import canon
from proxies.core.programs import Command
from proxies.core.spec import RunSpec
from sweeps.run.backlog import Attempt
from sweeps.run.crew import FLOOR_SECONDS, AdaptiveTimeouts, Crew
from sweeps.run.driver import drive
from sweeps.run.pool import InlinePool, Report
from sweeps.search.source import SourceSignal, StaticSource
from sweeps.store.errors import RunsFail
from sweeps.store.ledger import Ledger


class Study:
    """A folder, a ledger and a pool."""

    def __init__(self, folder):
        self.folder, self.diary = folder / "study", folder / "diary"
        self.ledger = Ledger.open(self.folder, {}, create=True)
        self.pool = InlinePool(FakeHostFactory(str(self.diary)))
        self.events = []

    def drive(self, specs, **kwargs):
        source = specs if hasattr(specs, "next") else StaticSource(specs, bank_key)
        clock = getattr(self.pool, "clock", time.monotonic)
        kwargs = {"progress": self.events.append, "clock": clock} | kwargs
        drive(source, self.pool, self.ledger, self.folder, num_slots_for=num_slots, bank_key_for=bank_key, **kwargs)
        return self.ledger.results()


@pytest.fixture
def study(tmp_path):
    study = Study(tmp_path)
    yield study
    study.ledger.close()


def expected(specs):
    return {spec.id: outcome(spec)[0] for spec in specs}


class TwoWorkers:
    """Two workers whose every call ends all of their runs; the most runs that were ever in flight is kept."""

    num_workers, calls_ahead = 2, 0

    def __init__(self):
        self.slots, self.arrived, self.started = {}, [], []

    def start(self, worker, call):
        runs = tuple(finished(slot, canon.decode(RunSpec, data)) for slot, data in call.admit)
        self.arrived.append(Report(worker=worker, finished=runs))
        self.started.append(len(self.arrived))

    def wait(self, timeout_seconds):
        arrived, self.arrived = self.arrived, []
        return arrived

    def restart(self, worker):
        raise AssertionError

    def close(self):
        pass


def test_a_command_proves_itself_by_one_run_before_others_begin(study):
    command = Command(
        template="train {run_json}", metrics_format="jsonl", metrics_path="m", step_key="s",
        train_loss_key="t", validation_loss_key="v", grad_norm_key="",
    )  # fmt: skip
    specs = [dataclasses.replace(spec, command=command) for spec in make_specs(5, num_slots=1)]
    study.pool = TwoWorkers()
    assert len(study.drive(specs)) == 5
    assert study.pool.started == [1, 1, 2, 1, 2], "calls in flight as each began"
    study.pool = TwoWorkers()
    study.drive([dataclasses.replace(spec, seed=9 + spec.seed) for spec in specs])
    assert study.pool.started[:2] == [1, 2], "a run has ended well before"


class Scripted:
    """A worker whose every call is answered by `answer(pool, call, number)`: a report, or None for never."""

    num_workers, calls_ahead = 1, 0

    def __init__(self, answer):
        self.answer, self.now, self.calls, self.restarted, self.arrived, self.slots = answer, 0.0, [], [], [], {}

    def clock(self):
        return self.now

    def start(self, worker, call):
        self.calls.append(call)
        self.slots |= {slot: canon.decode(RunSpec, data) for slot, data in call.admit}
        report = self.answer(self, call, len(self.calls) - 1)
        self.arrived += [] if report is None else [report]

    def ends(self):
        """All of its runs end."""
        held, self.slots = self.slots, {}
        return Report(worker=0, finished=tuple(finished(slot, spec) for slot, spec in held.items()))

    def wait(self, timeout_seconds):
        self.now += timeout_seconds
        arrived, self.arrived = self.arrived, []
        return arrived

    def restart(self, worker):
        self.restarted.append(worker)
        self.slots = {}


def scripted(study, answer):
    study.pool = Scripted(answer)
    return study.pool


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


@pytest.mark.parametrize(("kind", "passes"), [("NVIDIA A100", 2), ("NVIDIA H100", 1)])
def test_another_kind_of_device_takes_whole_batches(study, kind, passes):
    scripted(study, lambda pool, call, n: error("out_of_memory"))
    specs = make_specs(3)
    study.drive(specs, kinds=("NVIDIA A100",), should_stop=lambda: bool(lost_records(study)))
    assert {body["kind"] for body in lost_records(study)} == {"NVIDIA A100"}
    pool = scripted(study, lambda pool, call, n: pool.ends())
    assert dict(study.drive(specs, kinds=(kind,))) == expected(specs)
    assert [(call.num_microbatches, len(call.admit)) for call in pool.calls] == [(passes, 3)]


def test_a_worker_killed_for_its_memory_is_known_by_the_kernels_count(study, monkeypatch):
    kills = iter([4, 5, 5])
    monkeypatch.setattr("sweeps.run.driver.oom_kills", lambda: next(kills))
    answers = [error("lost_worker"), error("lost_worker")]
    scripted(study, lambda pool, call, number: answers[number] if number < 2 else pool.ends())
    study.drive(make_specs(1))
    assert [body["cause"] for body in lost_records(study)] == ["out_of_memory", "lost_worker"]


def test_a_study_in_which_nothing_ends_is_refused_with_the_log_and_begins_again(study):
    last_words = "loading\nmodel.py, line 3, in forward: x = y\nNameError: "
    failing = scripted(study, lambda pool, call, number: error("user_code", log_tail=last_words + "xyz"[number]))
    specs = make_specs(1)
    with pytest.raises(RunsFail) as caught:
        study.drive(specs)
    assert "lost 3 times. " in str(caught.value)
    assert str(caught.value).count("your code failed: it went wrong") == 1
    assert "What to do: fix it, then run the same command again\n  | loading\n  | model.py, line 3" in str(caught.value)
    assert len(failing.calls) == 3 and study.ledger.results() == {}
    scripted(study, lambda pool, call, number: error("user_code", log_tail="xy"[number]) if number < 2 else pool.ends())
    assert dict(study.drive(specs)) == expected(specs), "what was mended gets all its attempts"


def test_the_same_failure_twice_ends_a_study_in_which_nothing_has_ended(study):
    failing = scripted(study, lambda pool, call, number: error("user_code", log_tail=f"step {number}\nNameError: y"))
    with pytest.raises(RunsFail, match="failed in the same way") as caught:
        study.drive(make_specs(1), max_attempts=9)
    assert len(failing.calls) == 2 and study.ledger.results() == {}
    assert str(caught.value).count("NameError: y") == 1, "the log was shown when it failed first"
    assert "NameError: y" in study.events[0].lost[0] and "step 0" not in str(caught.value)
    first, second = make_specs(2)
    scripted(study, lambda pool, call, number: pool.ends())
    study.drive([first])
    failing = scripted(study, lambda pool, call, number: error("user_code", log_tail="NameError: y"))
    assert study.drive([second])[second.id].status == "failed" and len(failing.calls) == 3, "a run has ended before"


def test_bad_data_refuses_the_study_and_costs_no_attempt(study):
    scripted(study, lambda pool, call, number: error("bad_data", "train-00000.bin is short", refused=True))
    with pytest.raises(RunsFail, match=r"bad data: train-00000.bin is short. Ended runs are recorded"):
        study.drive(make_specs(1))
    assert lost_records(study) == []


def test_a_deadline_is_learned_from_the_calls(study):
    """The first call may take the longest of all; later ones ten times what such calls took, two minutes at least."""
    pool = scripted(study, lambda pool, call, number: None if number == 6 else slow(pool))

    def slow(pool):
        pool.now += 14.0
        return Report(worker=0, steps={0: min(3 * len(pool.calls), 90)})

    study.drive(make_specs(1, num_steps=99), should_stop=lambda: bool(pool.restarted), clock=pool.clock)
    assert study.events[-1].lost[0].startswith("worker 0: hung: no report for 2 min 25 s")


def test_a_bank_may_take_ten_times_its_longest_call_and_twice_that_once_it_was_given_up():
    leases = AdaptiveTimeouts(600.0)
    assert leases.seconds("a") == 600.0
    leases.learn("a", 20.0)
    leases.learn("a", 3.0)
    leases.learn("b", 1.0)
    assert [leases.seconds(key) for key in ("a", "b", "c")] == [200.0, FLOOR_SECONDS, 600.0]
    leases.missed("a")
    assert leases.seconds("a") == 400.0
    leases.missed("a")
    assert leases.seconds("a") == 600.0


class Looking(StaticSource):
    """A list whose runs are looked at after their first step, and go on."""

    pruner = property(lambda self: self)

    def rungs(self, run_id):
        return (1,)

    def verdict(self, run_id, losses_nats):
        return ""


def test_whoever_does_not_wait_to_be_looked_at_is_not_believed(tmp_path, study):
    study.pool, specs = InlinePool(FakeHostFactory(str(study.diary), "deaf 1")), make_specs(3, num_steps=6)
    results = study.drive(Looking(specs, bank_key))
    assert dict(results) == expected(specs[::2]) | {specs[1].id: results[specs[1].id]}
    assert results[specs[1].id].status == "failed"
    assert "it did not pause at the step" in lost_records(study)[0]["detail"]


def test_whoever_does_not_prune_has_what_was_pruned_run_whole(study):
    (spec,) = make_specs(1)
    study.ledger.commit(spec, pruned_outcome(spec, 2)[0])
    assert dict(study.drive(Looking([spec], bank_key))) == {}
    assert dict(study.drive([spec])) == expected([spec])


def test_a_list_comes_key_by_key_the_costliest_first():
    specs = [make_spec(width=width, seed=seed) for seed in range(3) for width in (32, 128, 64)]
    source = StaticSource(specs, bank_key)
    order = list(iter(lambda: source.next({}), SourceSignal.DONE))
    assert [spec.shape.width for spec in order] == [128] * 3 + [64] * 3 + [32] * 3
    assert [spec.seed for spec in order[:3]] == [0, 1, 2]
    assert source.next({}) is SourceSignal.DONE


def test_what_ends_beside_a_run_that_is_given_up_counts(study):
    """One report has a good outcome and the last invalid result of another run: the first makes the study go on."""

    def answer(pool, call, number):
        good, bad = (finished(slot, spec) for slot, spec in sorted(pool.slots.items()))
        pool.slots = {}
        return Report(worker=0, finished=(good, dataclasses.replace(bad, result=bad.result | {"loss_nats": math.nan})))

    scripted(study, answer)
    specs = make_specs(2)
    results = study.drive(specs, max_attempts=1)
    assert results[specs[0].id] == expected(specs)[specs[0].id] and results[specs[1].id].status == "failed"


def test_no_call_follows_one_that_was_skipped_or_is_slow(study):
    """The answer that the skipped one waited for may be on its way; behind a slow call, a stop would wait for both."""
    pool = scripted(study, lambda pool, call, number: None)
    pool.calls_ahead = 1
    crew = Crew(pool, num_slots, AdaptiveTimeouts(600.0), pool.clock)
    spec = make_spec(num_steps=99)
    crew.workers[0].bank_key, crew.workers[0].slots[0] = "one", Attempt(spec=spec, run_id=spec.id, bank_key="one")

    def calls(report, seconds=1.0):
        """How many are in flight after a report, which is there so many seconds later."""
        pool.now, pool.arrived = pool.now + seconds, [report]
        crew.wait(0.0)
        for index, _ in crew.training():
            crew.go_on(index)
        return crew.workers[0].num_calls

    crew.start(0, {})
    for index, _ in crew.training():
        crew.go_on(index)
    assert crew.workers[0].num_calls == 1, "the first builds a bank, for who knows how long"
    assert calls(Report(worker=0, steps={0: 2})) == 0
    crew.start(0, {})
    for index, _ in crew.training():
        crew.go_on(index)
    assert crew.workers[0].num_calls == 2
    assert calls(Report(worker=0, steps={0: 4})) == 2
    assert calls(Report(worker=0, steps={0: 4}, skipped=True)) == 1
    crew.go_on(0)
    assert calls(Report(worker=0, steps={0: 6}), 9.0) == 1, "nine seconds for one call"
