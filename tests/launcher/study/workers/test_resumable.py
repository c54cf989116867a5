"""Tests of how often a worker saves the states of its runs: rarely, and more rarely if saving is
slow. A failed save is no error, and a state that does not fit is replaced by an earlier one.
"""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from forerun._launcher.study.workers import resumable
from forerun._launcher.study.workers.resumable import SAVE_SHARE, SHORT_SAVE_SHARE, ResumableRuns
from forerun._proxies.training.slot_state import StateError
from forerun._sweeps.run.worker_states import CALL_SECONDS

RUN_ID = "0" * 64


class FakeEngine:
    """An engine whose steps take `step_seconds` of a fake clock."""

    environment: dict = {}  # noqa: RUF012
    step_seconds = 0.0

    def __init__(self, clock):
        self.steps, self.admitted, self.refused, self.clock = {}, [], 0, clock

    def admit(self, index, spec, state=None):
        if state is not None and self.refused:
            self.refused -= 1
            raise StateError("unlike the run")
        self.admitted.append(state)
        self.steps[index] = 0 if state is None else state.header.step

    def advance(self, num_steps, seconds):
        until = self.clock.now + seconds
        for _ in range(num_steps):
            if self.clock.now > until:
                break
            self.steps = {index: step + 1 for index, step in self.steps.items()}
            self.clock.now += self.step_seconds
        return []

    def get_state(self, index):
        return SimpleNamespace(header=SimpleNamespace(run_id=RUN_ID, step=self.steps[index]))


class FakeClock:
    """A clock that a test sets by `now`; a save takes `per_save` seconds."""

    now, per_save = 0.0, 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A namespace of resumable runs on a fake engine, the engine, its clock, and the list of saves
    as (time, step).
    """
    clock, saves = FakeClock(), []
    engine = FakeEngine(clock)

    def record_save(folder, state):
        clock.now += clock.per_save
        saves.append((clock.now, state.header.step))

    monkeypatch.setattr(resumable, "save_state", record_save)
    monkeypatch.setattr(resumable, "load_newest_state", lambda *_: None)
    monkeypatch.setattr(resumable, "compute_trunk_id", lambda _: "")
    return SimpleNamespace(
        runs=ResumableRuns(engine, tmp_path, clock=clock),
        clock=clock,
        engine=engine,
        saves=saves,
        monkeypatch=monkeypatch,
    )


def make_spec(num_steps=10**6):
    return SimpleNamespace(id=RUN_ID, schedule=SimpleNamespace(num_steps=num_steps))


def train_and_measure_loss(worker, num_steps, step_seconds):
    """Train, and return the maximum seconds of work that would be lost if the worker died. Assert
    that no call lasts much longer than `CALL_SECONDS`.
    """
    worker.engine.step_seconds, max_lost = step_seconds, 0.0
    until = worker.engine.steps[0] + num_steps
    while worker.engine.steps[0] < until:
        before = worker.clock.now
        worker.runs.advance(until - worker.engine.steps[0], CALL_SECONDS)
        last_save = worker.saves[-1][0] if worker.saves else 0.0
        max_lost = max(max_lost, worker.clock.now - last_save)
        call_limit = CALL_SECONDS + worker.clock.per_save + 2 * step_seconds
        assert worker.clock.now - before < call_limit
    return max_lost


@pytest.mark.parametrize(("num_steps", "step_seconds"), [(200, 0.005), (1200, 0.02)])
def test_short_run_is_saved_at_each_tenth_but_at_most_once_a_second(
    worker, num_steps, step_seconds
):
    worker.runs.admit(0, make_spec(num_steps))
    max_lost = train_and_measure_loss(worker, num_steps, step_seconds)
    assert max_lost <= max(num_steps * step_seconds / 10, 1.0) + 2 * step_seconds
    assert len(worker.saves) <= 11


@pytest.mark.parametrize(("num_steps", "share"), [(10**6, SAVE_SHARE), (250, SHORT_SAVE_SHARE)])
def test_saving_takes_at_most_its_share_of_the_time(worker, num_steps, share):
    worker.runs.admit(0, make_spec(num_steps))
    worker.clock.per_save = 10.0
    train_and_measure_loss(worker, 20_000, 1.0)
    spent = worker.clock.per_save * len(worker.saves)
    assert 0.5 * share < spent / worker.clock.now < 1.1 * share


def test_failed_save_is_a_note(worker):
    def raise_full_disk(folder, state):
        raise StateError("no checkpoint could be written in there (No space left on device)")

    worker.monkeypatch.setattr(resumable, "save_state", raise_full_disk)
    worker.runs.admit(0, make_spec())
    worker.runs.advance(3)
    worker.runs.save()
    (note,) = worker.runs.take_notes()
    assert "No space left on device" in note
    assert worker.runs.take_notes() == ()


def test_spy_of_the_kill_benchmark_records_begun_reached_and_saved_steps(
    worker, tmp_path, monkeypatch
):
    """The spy replaces methods of this module in the workers of benchmarks/cpu/random_kills.py."""
    path = Path(__file__).parents[3] / "support" / "launcher" / "spy" / "sitecustomize.py"
    spec = importlib.util.spec_from_file_location("spy", path)
    spy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(spy)
    for name in ("admit", "advance"):  # restored after the test
        monkeypatch.setattr(ResumableRuns, name, getattr(ResumableRuns, name))
    monkeypatch.setenv("FORERUN_TEST_STEPS", str(tmp_path / "steps"))
    spy.wrap_resumable(resumable)
    worker.runs.admit(0, make_spec())
    worker.runs.advance(3, CALL_SECONDS)
    worker.runs.save()
    assert (tmp_path / "steps").read_text().splitlines() == [
        f"begin {RUN_ID} 0",
        f"at {RUN_ID} 3",
        f"saved {RUN_ID} 3",
    ]


def test_refused_state_is_replaced_by_the_one_before_it(worker):
    states = [SimpleNamespace(header=SimpleNamespace(step=step)) for step in (9, 4)]
    worker.monkeypatch.setattr(
        resumable, "load_newest_state", lambda *_: states[0] if states else None
    )
    worker.monkeypatch.setattr(resumable, "discard_newest_state", lambda *_: states.pop(0))
    worker.engine.refused = 1
    worker.runs.admit(0, make_spec())
    assert worker.runs.steps == {0: 4}
    assert worker.runs.take_notes() == (f"run {RUN_ID[:12]} resumes from step 4",)
    worker.engine.refused = 1
    worker.runs.admit(1, make_spec())
    assert worker.runs.steps == {0: 4, 1: 0}
