"""When states are written: not often, less often where it takes long, and a failure is no error."""

from types import SimpleNamespace

import pytest

from launcher import resumable
from launcher.resumable import SAVE_SECONDS, SAVE_SHARE, Resumable
from proxies.slot_state import StateError

RUN_ID = "0" * 64


class Engine:
    """Two slots; time passes as told."""

    environment: dict = {}  # noqa: RUF012

    def __init__(self):
        self.steps, self.admitted, self.refused = {}, [], 0

    def admit(self, index, spec, state=None):
        if state is not None and self.refused:
            self.refused -= 1
            raise StateError("unlike the run")
        self.admitted.append(state)
        self.steps[index] = 0 if state is None else state.header.step

    def advance(self, num_steps, seconds):
        self.steps = {index: step + num_steps for index, step in self.steps.items()}
        return []

    def state(self, index):
        return SimpleNamespace(header=SimpleNamespace(run_id=RUN_ID, step=self.steps[index]))


class Clock:
    now, per_save = 0.0, 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def made(tmp_path, monkeypatch):
    clock, engine, saved = Clock(), Engine(), []

    def store(folder, state):
        clock.now += clock.per_save
        saved.append((clock.now, state.header.step))

    monkeypatch.setattr(resumable, "store", store)
    monkeypatch.setattr(resumable, "newest", lambda *_: None)
    return SimpleNamespace(
        it=Resumable(engine, tmp_path, clock=clock), clock=clock, engine=engine, saved=saved, monkeypatch=monkeypatch
    )


def train(made, seconds, seconds_per_call=1.0):
    until = made.clock.now + seconds
    while made.clock.now < until:
        made.clock.now += seconds_per_call
        made.it.advance(5)


def test_a_run_is_saved_every_so_often(made):
    made.it.admit(0, SimpleNamespace(id=RUN_ID))
    train(made, SAVE_SECONDS - 1)
    assert made.saved == []
    train(made, 3 * SAVE_SECONDS)
    assert len(made.saved) == 3
    assert [step for _, step in made.saved] == sorted({step for _, step in made.saved})


def test_saving_never_takes_more_than_its_share(made):
    made.it.admit(0, SimpleNamespace(id=RUN_ID))
    made.clock.per_save = 10.0
    train(made, 20_000.0, 5.0)
    spent = made.clock.per_save * len(made.saved)
    assert 0.5 * SAVE_SHARE < spent / made.clock.now < 1.1 * SAVE_SHARE


def test_all_slots_are_saved_when_asked_and_none_twice(made):
    for index in (0, 1):
        made.it.admit(index, SimpleNamespace(id=RUN_ID))
    made.it.save()
    assert made.saved == [], "nothing has been trained"
    made.it.advance(3)
    made.it.save()
    made.it.save()
    assert [step for _, step in made.saved] == [3, 3]


def test_a_failed_save_is_a_note(made):
    def full(folder, state):
        raise StateError("no checkpoint could be written in there (No space left on device)")

    made.monkeypatch.setattr(resumable, "store", full)
    made.it.admit(0, SimpleNamespace(id=RUN_ID))
    made.it.advance(3)
    made.it.save()
    (note,) = made.it.take_notes()
    assert note == "no checkpoint could be written in there (No space left on device); the run goes on without"
    assert made.it.take_notes() == ()


def test_a_state_the_engine_refuses_makes_room_for_the_one_before(made):
    states = [SimpleNamespace(header=SimpleNamespace(step=step)) for step in (9, 4)]
    made.monkeypatch.setattr(resumable, "newest", lambda *_: states[0] if states else None)
    made.monkeypatch.setattr(resumable, "put_newest_aside", lambda *_: states.pop(0))
    made.engine.refused = 1
    made.it.admit(0, SimpleNamespace(id=RUN_ID))
    assert made.it.steps == {0: 4}
    assert made.it.take_notes() == (f"run {RUN_ID[:12]} goes on from step 4",)
    made.engine.refused = 1
    made.it.admit(1, SimpleNamespace(id=RUN_ID))
    assert made.it.steps == {0: 4, 1: 0}
