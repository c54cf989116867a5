"""When states are written: not often, less often where it takes long, and a failure is no error."""

from types import SimpleNamespace

import pytest

from launcher.workers import resumable
from launcher.workers.resumable import SAVE_SHARE, SHORT_SAVE_SHARE, ResumableRuns
from proxies.training.slot_state import StateError
from sweeps.run.crew import CALL_SECONDS

RUN_ID = "0" * 64


class Engine:
    """Two slots; every step takes so long."""

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

    def state(self, index):
        return SimpleNamespace(header=SimpleNamespace(run_id=RUN_ID, step=self.steps[index]))


class Clock:
    now, per_save = 0.0, 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def made(tmp_path, monkeypatch):
    clock, saved = Clock(), []
    engine = Engine(clock)

    def store(folder, state):
        clock.now += clock.per_save
        saved.append((clock.now, state.header.step))

    monkeypatch.setattr(resumable, "store", store)
    monkeypatch.setattr(resumable, "newest", lambda *_: None)
    monkeypatch.setattr(resumable, "trunk_id", lambda _: "")
    return SimpleNamespace(
        it=ResumableRuns(engine, tmp_path, clock=clock),
        clock=clock,
        engine=engine,
        saved=saved,
        monkeypatch=monkeypatch,
    )


def run_of(num_steps=10**6):
    return SimpleNamespace(id=RUN_ID, schedule=SimpleNamespace(num_steps=num_steps))


def train(made, num_steps, step_seconds):
    """The most seconds that are lost if the worker dies."""
    made.engine.step_seconds, worst = step_seconds, 0.0
    until = made.engine.steps[0] + num_steps
    while made.engine.steps[0] < until:
        before = made.clock.now
        made.it.advance(until - made.engine.steps[0], CALL_SECONDS)
        last = made.saved[-1][0] if made.saved else 0.0
        worst = max(worst, made.clock.now - last)
        assert made.clock.now - before < CALL_SECONDS + made.clock.per_save + 2 * step_seconds
    return worst


@pytest.mark.parametrize(("num_steps", "step_seconds"), [(200, 0.005), (1200, 0.02)])
def test_a_short_run_is_saved_at_each_tenth(made, num_steps, step_seconds):
    """But not more often than each second."""
    made.it.admit(0, run_of(num_steps))
    worst = train(made, num_steps, step_seconds)
    assert worst <= max(num_steps * step_seconds / 10, 1.0) + 2 * step_seconds
    assert len(made.saved) <= 11


@pytest.mark.parametrize(("num_steps", "share"), [(10**6, SAVE_SHARE), (250, SHORT_SAVE_SHARE)])
def test_saving_never_takes_more_than_its_share(made, num_steps, share):
    made.it.admit(0, run_of(num_steps))
    made.clock.per_save = 10.0
    train(made, 20_000, 1.0)
    spent = made.clock.per_save * len(made.saved)
    assert 0.5 * share < spent / made.clock.now < 1.1 * share


def test_a_failed_save_is_a_note(made):
    def full(folder, state):
        raise StateError("no checkpoint could be written in there (No space left on device)")

    made.monkeypatch.setattr(resumable, "store", full)
    made.it.admit(0, run_of())
    made.it.advance(3)
    made.it.save()
    (note,) = made.it.take_notes()
    assert "No space left on device" in note
    assert made.it.take_notes() == ()


def test_a_state_the_engine_refuses_makes_room_for_the_one_before(made):
    states = [SimpleNamespace(header=SimpleNamespace(step=step)) for step in (9, 4)]
    made.monkeypatch.setattr(resumable, "newest", lambda *_: states[0] if states else None)
    made.monkeypatch.setattr(resumable, "put_newest_aside", lambda *_: states.pop(0))
    made.engine.refused = 1
    made.it.admit(0, run_of())
    assert made.it.steps == {0: 4}
    assert made.it.take_notes() == (f"run {RUN_ID[:12]} resumes from step 4",)
    made.engine.refused = 1
    made.it.admit(1, run_of())
    assert made.it.steps == {0: 4, 1: 0}
