"""Tests of the host, the part of a worker that trains runs: it changes engines, saves and resumes
runs, lets a pruner stop them, and answers calls that were sent ahead.
"""

import dataclasses
import json
from unittest import mock

import pytest
from failing_factory import FAILING_FACTORY, WORKING_FACTORY
from main_run import make_spec, write_corpus

from forerun._launcher.study.plan.study import build_bank_key
from forerun._launcher.study.workers import resumable
from forerun._launcher.study.workers.host import HostFactory
from forerun._proxies.core import canon
from forerun._proxies.core.spec import Numerics
from forerun._proxies.external.factory import load_factory
from forerun._sweeps.run.pool import HostCall, execute_call
from forerun._sweeps.run.worker_states import CALL_AHEAD


@pytest.fixture(autouse=True)
def save_only_when_told(monkeypatch):
    """Save a state only if a call says so. On a busy machine, a save would be due in the middle of
    a short run, and the next run with its id would resume from it.
    """
    monkeypatch.setattr(resumable, "MIN_SAVE_SECONDS", 1e6)


MAX_CALLS = 50
"""Maximum number of calls until runs of a dozen steps must have ended."""


def make_call(spec, admit=(), seconds=60.0, **options):
    """Return a call. By default, no run pauses before its end."""
    slots = {
        "bank_key": options.pop("key", build_bank_key(spec)),
        "num_slots": spec.numerics.num_slots,
    }
    hold = options.pop("hold", dict.fromkeys(range(spec.numerics.num_slots)))
    return HostCall(**slots, admit=tuple(admit), seconds=seconds, hold=hold, **options)


def advance_steps(host, num_steps, call):
    """Make a call that ends after `num_steps` steps."""
    # Patch the limit where the host's class looks it up.
    with mock.patch.dict(type(host).advance.__globals__, {"MAX_STEPS": num_steps}):
        return host.advance(call)


def advance_until_finished(host, spec, **options):
    """Make calls until a run finishes."""
    for _ in range(MAX_CALLS):
        report = host.advance(make_call(spec, **options))
        if report.finished:
            return report.finished
    raise AssertionError("no run finishes")


def train_runs(host, specs):
    """Train runs to their end, and return the ended runs by run id. Specs are sent as JSON."""
    finished = {}
    admit = [(slot, json.loads(canon.to_canonical_json(spec))) for slot, spec in enumerate(specs)]
    for _ in range(MAX_CALLS):
        report = host.advance(make_call(specs[0], admit))
        finished |= {run.result.id: run for run in report.finished}
        if len(finished) == len(specs):
            return finished
        admit = ()
    raise AssertionError("some run does not finish")


def test_host_changes_engines_between_bank_single_trial_and_user_model(tmp_path):
    """The same run is trained alone, in a bank of two, and with the user's model, by one host."""
    (tmp_path / "user_model.py").write_text(WORKING_FACTORY)
    alone = dataclasses.replace(make_spec(write_corpus(tmp_path).data_id), numerics=Numerics())
    banked = dataclasses.replace(alone, numerics=Numerics(num_slots=2))
    with_user_model = dataclasses.replace(
        alone, factory=load_factory("user_model:build", tmp_path)[1]
    )
    host = HostFactory(
        study_dir=str(tmp_path / "study"), corpus=str(tmp_path / "tokens"), code_dir=str(tmp_path)
    )()
    losses = {}
    for spec in (alone, banked, with_user_model):
        assert (
            advance_steps(
                host, 3, make_call(spec, [(0, canon.to_json(spec))], key=spec.id)
            ).finished
            == ()
        )
        (finished,) = advance_until_finished(host, spec, key=spec.id)
        result = finished.result
        assert (result.id, result.status) == (spec.id, "finished")
        losses[spec.id] = result.loss_nats
    assert losses[alone.id] == pytest.approx(losses[banked.id], abs=1e-5)
    assert abs(losses[alone.id] - losses[with_user_model.id]) > 0.01


def test_saved_run_resumes_bitwise_in_another_worker(tmp_path):
    spec = dataclasses.replace(
        make_spec(write_corpus(tmp_path).data_id), numerics=Numerics(num_slots=2)
    )
    factory = HostFactory(study_dir=str(tmp_path / "study"), corpus=str(tmp_path / "tokens"))
    admit = [(0, canon.to_json(spec))]
    uninterrupted = train_runs(factory(), [spec])[spec.id]
    host = factory()
    advance_steps(host, 5, make_call(spec, admit))
    saved = host.advance(make_call(spec, seconds=0, save=True))
    assert (saved.steps, saved.notes) == ({0: 5}, ())
    (state,) = (tmp_path / "study" / "checkpoints" / spec.id).iterdir()
    host.advance(make_call(spec, seconds=0, save=True))
    assert list(state.parent.iterdir()) == [state], "nothing is written without a new step"

    second_host = factory()
    first = advance_steps(second_host, 1, make_call(spec, [(1, canon.to_json(spec))]))
    assert (first.steps, first.notes) == ({1: 6}, (f"run {spec.id[:12]} resumes from step 5",))
    (finished,) = advance_until_finished(second_host, spec)
    assert finished.curve == uninterrupted.curve
    assert finished.result.loss_nats == uninterrupted.result.loss_nats


def test_error_in_the_users_model_names_its_line(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING_FACTORY)
    spec = make_spec(write_corpus(tmp_path).data_id)
    spec = dataclasses.replace(
        spec, numerics=Numerics(), factory=load_factory("failing:build", tmp_path)[1]
    )
    factory = HostFactory(
        study_dir=str(tmp_path), corpus=str(tmp_path / "tokens"), code_dir=str(tmp_path)
    )
    report = execute_call(0, make_call(spec, [(0, canon.to_json(spec))]), factory)
    assert report.cause == "user_code" and not report.ends_study
    assert (
        report.error
        == "failing.py, line 21: `if self.calls > 8: raise KeyError('rope')`: KeyError: 'rope'"
    )
    lines = report.log_tail.splitlines()
    assert lines[0] == "failing.py, line 15, in forward: return self.head(self.broken(x))"
    assert lines[-1] == "KeyError: 'rope'" and "Traceback" not in report.log_tail


def advance_until_paused(host, spec, admit, hold):
    """Make calls until a run pauses. Return the paused runs by slot, and the finished ones by id.

    Args:
        host: Host of the runs.
        spec: Any run of the bank.
        admit: Runs that the first call admits, with their slots.
        hold: Step at which the run of each slot pauses; None if it does not.
    """
    finished = {}
    for _ in range(MAX_CALLS):
        report = advance_steps(host, 3, make_call(spec, admit, hold=hold))
        finished |= {run.result.id: run for run in report.finished}
        if report.paused:
            return {run.slot: run for run in report.paused}, finished
        admit = ()
    raise AssertionError("no run pauses")


def test_pruned_run_makes_room_and_changes_no_other_run(tmp_path):
    """The other runs of the bank, the run that gets the freed slot, and the steps of the pruned run
    are bitwise equal to those of runs that are trained alone.
    """
    first = dataclasses.replace(
        make_spec(write_corpus(tmp_path).data_id), numerics=Numerics(num_slots=3)
    )
    specs = [dataclasses.replace(first, seed=seed) for seed in range(4)]
    factory = HostFactory(study_dir=str(tmp_path / "study"), corpus=str(tmp_path / "tokens"))
    alone = {}
    for spec in specs:
        alone |= train_runs(factory(), [spec])

    # Two of three runs pause at a rung (a step at which a pruner looks), also after another call.
    host, num_steps = factory(), first.schedule.num_steps
    admit = [(slot, canon.to_json(spec)) for slot, spec in enumerate(specs[:3])]
    rung = num_steps // 3
    hold = {0: rung, 1: rung, 2: None}
    paused, _ = advance_until_paused(host, first, admit, hold)
    assert set(paused) == {0, 1}
    report = host.advance(make_call(first, seconds=60.0, hold=hold))
    assert {run.slot for run in report.paused} == {0, 1}
    assert set(report.steps.values()) == {rung}

    # The pruned run's result covers the steps that it made.
    result, curve = paused[1].result, paused[1].curve
    full = alone[specs[1].id].curve
    assert (result.status, result.num_steps) == ("pruned", rung)
    assert result.curve_id == canon.compute_content_id(curve)
    assert curve.train_loss_nats == full.train_loss_nats[:rung]
    assert curve.grad_norm == full.grad_norm[:rung]

    # The fourth run takes its slot; the first one goes on to its next rung.
    refill = [(1, canon.to_json(specs[3]))]
    paused, finished = advance_until_paused(host, first, refill, {0: 2 * rung, 1: None, 2: None})
    assert set(paused) == {0}
    for _ in range(MAX_CALLS):
        if len(finished) == 3:
            break
        for run in host.advance(make_call(first, seconds=60.0)).finished:
            finished[run.result.id] = run
    assert set(finished) == {specs[0].id, specs[2].id, specs[3].id}
    for run_id, run in finished.items():
        assert run.curve == alone[run_id].curve
        assert run.result.loss_nats == alone[run_id].result.loss_nats


def test_call_ahead_trains_on_unless_the_last_answer_needs_a_reply(tmp_path):
    """A call ahead is sent before the answer to the last call has arrived. If that answer has a
    paused run, a finished run, or an error, the call ahead does nothing.
    """
    spec = dataclasses.replace(
        make_spec(write_corpus(tmp_path).data_id), numerics=Numerics(num_slots=2)
    )
    host = HostFactory(study_dir=str(tmp_path / "study"), corpus=str(tmp_path / "tokens"))()
    uninterrupted = train_runs(host, [spec])[spec.id]
    rung = spec.schedule.num_steps // 2
    advance_steps(host, 2, make_call(spec, [(0, canon.to_json(spec))], hold={0: rung}))
    assert advance_steps(host, 1, CALL_AHEAD).steps == {0: 3}
    assert [run.slot for run in host.advance(CALL_AHEAD).paused] == [0]
    # The run still pauses, and the driver has been told.
    idle = host.advance(CALL_AHEAD)
    assert (idle.steps, idle.paused, idle.finished) == ({0: rung}, (), ())
    advance_steps(host, 1, make_call(spec))
    with mock.patch(
        "forerun._proxies.training.bank.Bank.advance", side_effect=RuntimeError("broken")
    ):
        assert execute_call(0, CALL_AHEAD, lambda: host).error is not None
    assert host.advance(CALL_AHEAD).steps == {0: rung + 1}, "the state after an error is unknown"
    advance_steps(host, 1, make_call(spec))
    (finished,) = host.advance(CALL_AHEAD).finished
    assert finished.curve == uninterrupted.curve
    assert host.advance(CALL_AHEAD).steps == {}
