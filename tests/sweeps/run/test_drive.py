"""Tests of the driver: retries, timeouts, pruned runs, and errors that end a study."""

import dataclasses
import time

import pytest
from sweep_fakes import (
    FakeHostFactory,
    get_bank_key,
    make_ended_run,
    make_outcome,
    make_pruned_outcome,
    make_spec,
    make_specs,
    spoil_loss,
)

from forerun._proxies.core import canon
from forerun._proxies.core.programs import Command
from forerun._proxies.core.spec import RunSpec
from forerun._sweeps.run.backlog import OpenRun
from forerun._sweeps.run.driver import drive
from forerun._sweeps.run.pool import InlinePool, Report
from forerun._sweeps.run.worker_states import MIN_TIMEOUT_SECONDS, AdaptiveTimeouts, WorkerStates
from forerun._sweeps.search.source import SourceSignal, StaticSource
from forerun._sweeps.store.errors import RunsFail
from forerun._sweeps.store.ledger import Ledger


class Study:
    """The folder, ledger and pool of one study, with the progress events of its drivers."""

    def __init__(self, folder):
        self.folder, self.diary = folder / "study", folder / "diary"
        self.ledger = Ledger.open(self.folder, {}, create=True)
        self.pool = InlinePool(FakeHostFactory(str(self.diary)))
        self.events = []

    def drive(self, specs, **options):
        """Drive a list of runs, or a source of runs; return the results."""
        source = specs if hasattr(specs, "next") else StaticSource(specs, get_bank_key)
        clock = getattr(self.pool, "clock", time.monotonic)
        options = {"progress": self.events.append, "clock": clock} | options
        drive(source, self.pool, self.ledger, self.folder, bank_key_for=get_bank_key, **options)
        return self.ledger.get_results()


@pytest.fixture
def study(tmp_path):
    """A new study with an inline pool, which a test may replace."""
    study = Study(tmp_path)
    yield study
    study.ledger.close()


def list_expected_results(specs):
    """Return the result of each run by id."""
    return {spec.id: make_outcome(spec)[0] for spec in specs}


class TwoWorkers:
    """Two workers; every call ends all runs of its worker.

    `started` has the number of calls in flight at the start of each call, this call included.
    """

    num_workers, calls_ahead = 2, 0

    def __init__(self):
        self.slots, self.arrived, self.started = {}, [], []

    def start(self, worker, call):
        runs = tuple(make_ended_run(slot, canon.decode(RunSpec, data)) for slot, data in call.admit)
        self.arrived.append(Report(worker=worker, finished=runs))
        self.started.append(len(self.arrived))

    def wait(self, timeout_seconds):
        arrived, self.arrived = self.arrived, []
        return arrived

    def restart(self, worker):
        raise AssertionError

    def close(self):
        pass


def test_command_must_finish_one_run_before_others_start(study):
    command = Command(
        template="train {run_json}",
        metrics_format="jsonl",
        metrics_path="m",
        step_key="s",
        train_loss_key="t",
        validation_loss_key="v",
        grad_norm_key="",
    )
    specs = [dataclasses.replace(spec, command=command) for spec in make_specs(5, num_slots=1)]
    study.pool = TwoWorkers()
    assert len(study.drive(specs)) == 5
    assert study.pool.started == [1, 1, 2, 1, 2], "only the first run must be alone"
    study.pool = TwoWorkers()
    study.drive([dataclasses.replace(spec, seed=9 + spec.seed) for spec in specs])
    assert study.pool.started[:2] == [1, 2], "a run of this command has finished before"


class ScriptedPool:
    """One worker, whose calls are answered by the function `answer(pool, call, number)`.

    The function returns a report, or None for a call that is never answered. A wait takes its whole
    timeout by the pool's own clock.
    """

    num_workers, calls_ahead = 1, 0

    def __init__(self, answer):
        self.answer = answer
        self.now = 0.0
        self.calls = []
        self.restarted = []
        self.arrived = []
        self.slots = {}

    def clock(self):
        return self.now

    def start(self, worker, call):
        self.calls.append(call)
        self.slots |= {slot: canon.decode(RunSpec, data) for slot, data in call.admit}
        report = self.answer(self, call, len(self.calls) - 1)
        self.arrived += [] if report is None else [report]

    def finish_all(self):
        """Report all runs of the worker as finished."""
        held, self.slots = self.slots, {}
        return Report(
            worker=0,
            finished=tuple(make_ended_run(slot, spec) for slot, spec in held.items()),
        )

    def wait(self, timeout_seconds):
        self.now += timeout_seconds
        arrived, self.arrived = self.arrived, []
        return arrived

    def restart(self, worker):
        self.restarted.append(worker)
        self.slots = {}


def use_scripted_pool(study, answer):
    study.pool = ScriptedPool(answer)
    return study.pool


def list_failures(study):
    return [record.body for record in study.ledger.read_records("lost")]


def make_error_report(cause, message="it went wrong", **fields):
    return Report(worker=0, error=message, cause=cause, **fields)


def test_batch_that_does_not_fit_is_split(study):
    pool = use_scripted_pool(
        study,
        lambda pool, call, n: (
            pool.finish_all() if call.num_microbatches >= 2 else make_error_report("out_of_memory")
        ),
    )
    # A batch has two sequences.
    specs = make_specs(3)
    results = study.drive(specs, max_attempts=1)
    assert dict(results) == list_expected_results(specs)
    assert [(call.num_microbatches, len(call.admit)) for call in pool.calls] == [(1, 3), (2, 3)]
    assert pool.calls[1].bank_key == pool.calls[0].bank_key + "/2"
    assert [body["cause"] for body in list_failures(study)] == ["out_of_memory"] * 3
    assert (
        "out of memory: it went wrong; it held 3 runs. What to do: give it more memory"
        in study.events[0].failures[0]
    )


@pytest.mark.parametrize(("kind", "num_microbatches"), [("NVIDIA A100", 2), ("NVIDIA H100", 1)])
def test_batches_are_split_by_kind_of_device(study, kind, num_microbatches):
    use_scripted_pool(study, lambda pool, call, n: make_error_report("out_of_memory"))
    specs = make_specs(3)
    study.drive(specs, kinds=("NVIDIA A100",), should_stop=lambda: bool(list_failures(study)))
    assert {body["kind"] for body in list_failures(study)} == {"NVIDIA A100"}
    pool = use_scripted_pool(study, lambda pool, call, n: pool.finish_all())
    assert dict(study.drive(specs, kinds=(kind,))) == list_expected_results(specs)
    assert [(call.num_microbatches, len(call.admit)) for call in pool.calls] == [
        (num_microbatches, 3)
    ]


def test_worker_killed_for_its_memory_is_recognized_by_the_kernels_count(study, monkeypatch):
    # The count as the driver starts, after the first failure, and after the second
    kills = iter([4, 5, 5])
    monkeypatch.setattr("forerun._sweeps.run.driver.count_oom_kills", lambda: next(kills))
    answers = [make_error_report("lost_worker"), make_error_report("lost_worker")]
    use_scripted_pool(
        study, lambda pool, call, number: answers[number] if number < 2 else pool.finish_all()
    )
    study.drive(make_specs(1))
    assert [body["cause"] for body in list_failures(study)] == ["out_of_memory", "lost_worker"]


def test_study_whose_runs_all_fail_stops_with_the_log_and_can_be_resumed(study):
    # Each failure gets another last line, because two equal ones would end the study sooner
    log_tail = "loading\nmodel.py, line 3, in forward: x = y\nNameError: "
    failing = use_scripted_pool(
        study,
        lambda pool, call, number: make_error_report(
            "user_code", log_tail=log_tail + "xyz"[number]
        ),
    )
    specs = make_specs(1)
    with pytest.raises(RunsFail) as caught:
        study.drive(specs)
    assert "lost 3 times. " in str(caught.value)
    assert str(caught.value).count("your code failed: it went wrong") == 1
    assert (
        "What to do: fix it, then run the same command again\n  | loading\n  | model.py, line 3"
        in str(caught.value)
    )
    assert len(failing.calls) == 3 and study.ledger.get_results() == {}
    use_scripted_pool(
        study,
        lambda pool, call, number: (
            make_error_report("user_code", log_tail="xy"[number])
            if number < 2
            else pool.finish_all()
        ),
    )
    assert dict(study.drive(specs)) == list_expected_results(specs), (
        "after the fix, the run has all its attempts again"
    )


def test_repeated_failure_stops_a_study_without_finished_runs(study):
    failing = use_scripted_pool(
        study,
        lambda pool, call, number: make_error_report(
            "user_code", log_tail=f"step {number}\nNameError: y"
        ),
    )
    with pytest.raises(RunsFail, match="failed in the same way") as caught:
        study.drive(make_specs(1), max_attempts=9)
    assert len(failing.calls) == 2 and study.ledger.get_results() == {}
    assert str(caught.value).count("NameError: y") == 1, "the log was shown at the first failure"
    assert "NameError: y" in study.events[0].failures[0] and "step 0" not in str(caught.value)
    first, second = make_specs(2)
    use_scripted_pool(study, lambda pool, call, number: pool.finish_all())
    study.drive([first])
    failing = use_scripted_pool(
        study, lambda pool, call, number: make_error_report("user_code", log_tail="NameError: y")
    )
    assert study.drive([second])[second.id].status == "failed" and len(failing.calls) == 3, (
        "the study goes on because another run has finished"
    )


def test_bad_data_stops_the_study_and_costs_no_attempt(study):
    use_scripted_pool(
        study,
        lambda pool, call, number: make_error_report(
            "bad_data", "train-00000.bin is short", ends_study=True
        ),
    )
    with pytest.raises(
        RunsFail, match=r"bad data: train-00000.bin is short. Ended runs are recorded"
    ):
        study.drive(make_specs(1))
    assert list_failures(study) == []


def test_timeout_adapts_to_the_calls(study):
    """The first call has the longest timeout. Later calls have ten times the time of the longest
    call of their kind, but at least two minutes.
    """
    pool = use_scripted_pool(
        study, lambda pool, call, number: None if number == 6 else report_slowly(pool)
    )

    def report_slowly(pool):
        pool.now += 14.0
        return Report(worker=0, steps={0: min(3 * len(pool.calls), 90)})

    study.drive(
        make_specs(1, num_steps=99), should_stop=lambda: bool(pool.restarted), clock=pool.clock
    )
    # Ten times 14.5 s: the call of 14 s, and a wait of 0.5 s
    assert study.events[-1].failures[0].startswith("worker 0: hung: no report for 2 min 25 s")


def test_timeout_is_ten_times_the_longest_call_and_doubles_after_a_miss():
    timeouts = AdaptiveTimeouts(600.0)
    assert timeouts.get_timeout("a") == 600.0
    timeouts.add_duration("a", 20.0)
    timeouts.add_duration("a", 3.0)
    timeouts.add_duration("b", 1.0)
    assert [timeouts.get_timeout(key) for key in ("a", "b", "c")] == [
        200.0,
        MIN_TIMEOUT_SECONDS,
        600.0,
    ]
    timeouts.double_timeout("a")
    assert timeouts.get_timeout("a") == 400.0
    timeouts.double_timeout("a")
    assert timeouts.get_timeout("a") == 600.0


class PausingSource(StaticSource):
    """A list of runs that are judged after their first step, and all go on. The source is its own
    pruner.
    """

    pruner = property(lambda self: self)

    def list_rungs(self, run_id):
        return (1,)

    def judge_run(self, run_id, losses_nats):
        return ""


def test_run_that_does_not_pause_to_be_judged_fails(study):
    study.pool = InlinePool(FakeHostFactory(str(study.diary), "deaf 1"))
    specs = make_specs(3, num_steps=6)
    results = study.drive(PausingSource(specs, get_bank_key))
    assert dict(results) == list_expected_results(specs[::2]) | {specs[1].id: results[specs[1].id]}
    assert results[specs[1].id].status == "failed"
    assert "it did not pause at the step" in list_failures(study)[0]["detail"]


def test_source_without_a_pruner_finishes_pruned_runs(study):
    (spec,) = make_specs(1)
    study.ledger.commit(spec, make_pruned_outcome(spec, 2)[0])
    assert dict(study.drive(PausingSource([spec], get_bank_key))) == {}
    assert dict(study.drive([spec])) == list_expected_results([spec])


def test_static_source_orders_runs_by_bank_and_cost():
    specs = [make_spec(width=width, seed=seed) for seed in range(3) for width in (32, 128, 64)]
    source = StaticSource(specs, get_bank_key)
    order = list(iter(lambda: source.next({}), SourceSignal.DONE))
    assert [spec.shape.width for spec in order] == [128] * 3 + [64] * 3 + [32] * 3
    assert [spec.seed for spec in order[:3]] == [0, 1, 2]
    assert source.next({}) is SourceSignal.DONE


def test_result_next_to_a_failing_run_keeps_the_study_alive(study):
    """One report has the good result of one run and the last, invalid result of another run. The
    good result keeps the study alive.
    """

    def answer(pool, call, number):
        good, bad = (make_ended_run(slot, spec) for slot, spec in sorted(pool.slots.items()))
        pool.slots = {}
        return Report(
            worker=0,
            finished=(good, spoil_loss(bad)),
        )

    use_scripted_pool(study, answer)
    specs = make_specs(2)
    results = study.drive(specs, max_attempts=1)
    assert (
        results[specs[0].id] == list_expected_results(specs)[specs[0].id]
        and results[specs[1].id].status == "failed"
    )


def test_no_call_is_queued_behind_a_skipped_or_slow_one(study):
    """While a worker carries out a call, the driver may queue the next call, so that the worker
    need not wait.

    The worker skips the queued call if the driver must first reply to the report of the call before
    it. No call is queued behind a slow one, because a stop would have to wait for both.
    """
    pool = use_scripted_pool(study, lambda pool, call, number: None)
    pool.calls_ahead = 1
    workers = WorkerStates(pool, AdaptiveTimeouts(600.0), pool.clock)
    spec = make_spec(num_steps=99)
    workers.workers[0].bank_key, workers.workers[0].slots[0] = (
        "one",
        OpenRun(spec=spec, run_id=spec.id, bank_key="one"),
    )

    def count_calls_in_flight(report, seconds=1.0):
        """Take in a report after some seconds, and return the number of calls then in flight."""
        pool.now, pool.arrived = pool.now + seconds, [report]
        workers.wait(0.0)
        for index, _ in workers.take_training():
            workers.queue_continuation(index)
        return workers.workers[0].num_calls

    workers.start(0, {})
    for index, _ in workers.take_training():
        workers.queue_continuation(index)
    assert workers.workers[0].num_calls == 1, "the first call builds a bank, which may take long"
    assert count_calls_in_flight(Report(worker=0, steps={0: 2})) == 0
    workers.start(0, {})
    for index, _ in workers.take_training():
        workers.queue_continuation(index)
    assert workers.workers[0].num_calls == 2
    assert count_calls_in_flight(Report(worker=0, steps={0: 4})) == 2
    assert count_calls_in_flight(Report(worker=0, steps={0: 4}, skipped=True)) == 1
    workers.queue_continuation(0)
    assert count_calls_in_flight(Report(worker=0, steps={0: 6}), 9.0) == 1, (
        "one call took nine seconds"
    )
