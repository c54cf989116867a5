"""Measuring: turns, when it is enough, what is refused; on engines of a planted speed, and once on
real ones.
"""

import dataclasses

import pytest
from proxy_cases import run_spec

from proxies.core import canon
from proxies.core.spec import Numerics
from proxies.training.bank import Bank
from proxies.training.calibration import (
    MAX_ROUNDS,
    MIN_ROUNDS,
    Answer,
    CalibrationProbe,
    clear,
    measure,
)
from proxies.training.solo import Solo
from proxies.training.torch_device import TorchDevice

ONE, TWO, COMPILED = Numerics(), Numerics(num_slots=2), Numerics(compiled=True)


class World:
    """Engines whose steps take planned seconds of a clock of ours."""

    kind = "cpu"

    def __init__(self, seconds, *, compiling=0.0, fails=lambda mode: False):
        self.now, self.seconds, self.compiling, self.fails = 0.0, seconds, compiling, fails
        self.prepared, self.turns, self.held = None, [], 0

    def open(self, spec):
        assert self.prepared == spec.numerics, "threads and precision are of the whole process"
        if self.fails(spec.numerics):
            raise RuntimeError("no compiler\nfor it")
        return Engine(self, spec)

    def forget(self):
        pass

    def free_bytes(self):
        return 7

    def watch(self):
        self.held = 0

    def peak_bytes(self):
        return self.held

    def prepare(self, mode):
        self.prepared = mode

    def clock(self):
        return self.now


class Engine:
    def __init__(self, world, spec):
        self.world, self.spec, self.slots, self.fresh = world, spec, {}, set()

    def admit(self, index, spec):
        assert index not in self.slots and spec.numerics == self.spec.numerics
        self.slots[index] = spec
        self.fresh.add(index)
        self.world.held += 100

    def evict(self, index):
        del self.slots[index]

    def advance(self, num_steps):
        mode = self.spec.numerics
        assert sorted(self.slots) == list(range(mode.num_slots)), "every slot is occupied"
        assert len({spec.seed for spec in self.slots.values()}) == mode.num_slots
        assert self.world.prepared == mode
        self.world.turns.append((mode, num_steps))
        self.world.now += num_steps * self.world.seconds(mode)
        self.world.now += self.world.compiling if self.fresh and mode.compiled else 0.0
        self.fresh = set()
        return []


def measured(world, *modes, seconds=1000.0):
    probe = CalibrationProbe(
        spec=run_spec("d", num_slots=1, learning_rate=0.01), modes=modes, seconds=seconds
    )
    return measure(probe, world.open, world, world.clock)


def test_rates_are_of_trials_and_modes_take_turns():
    world = World(lambda mode: 0.01 * mode.num_slots**0.5)
    answer = measured(world, ONE, TWO)
    one, two = answer.rates
    assert one.trial_steps_per_second == pytest.approx([100.0] * len(one.trial_steps_per_second))
    assert two.trial_steps_per_second == pytest.approx(
        [200 / 2**0.5] * len(two.trial_steps_per_second)
    )
    assert (answer.device, answer.free_bytes, one.peak_bytes, two.peak_bytes) == (
        "cpu",
        7,
        200,
        300,
    )
    turns = [mode for mode, _ in world.turns[6:]]
    assert turns == [ONE, TWO] * (len(turns) // 2)
    assert {number for mode, number in world.turns[6:] if mode == ONE} == {10}, (
        "turns take a tenth of a second each"
    )


def test_it_ends_as_soon_as_modes_are_told_apart_or_time_is_up():
    far = measured(World(lambda mode: 0.01 / mode.num_slots), ONE, TWO)
    assert len(far.rates[0].trial_steps_per_second) == MIN_ROUNDS
    flips = iter([1.0, 1.2] * 1000)
    near = measured(World(lambda mode: 0.01 * (next(flips) if mode == TWO else 2.2)), ONE, TWO)
    assert len(near.rates[0].trial_steps_per_second) == MAX_ROUNDS or clear(
        [b / a for a, b in zip(*(rate.trial_steps_per_second for rate in near.rates), strict=True)],
        1.1,
    )
    short = measured(World(lambda mode: 10.0), ONE, TWO, seconds=1.0)
    assert len(short.rates[0].trial_steps_per_second) == 2, (
        "steps of ten seconds: two rounds have to do"
    )


def test_a_mode_that_fails_is_refused_and_the_first_one_raises():
    world = World(lambda mode: 0.01, fails=lambda mode: mode.num_slots > 1)
    one, two, compiled = measured(world, ONE, TWO, COMPILED).rates
    assert two.refused == "RuntimeError: no compiler"
    assert two.trial_steps_per_second == ()
    assert one.trial_steps_per_second and compiled.trial_steps_per_second
    with pytest.raises(RuntimeError, match="no compiler"):
        measured(World(lambda mode: 0.01, fails=lambda mode: True), ONE)


@pytest.mark.parametrize("failing", [TWO, ONE])
def test_a_mode_that_fails_in_its_turn_is_refused_and_the_others_are_measured(failing):
    calls = iter(range(1000))

    def seconds(mode):
        if mode == failing and next(calls) > 4:
            raise RuntimeError("CUDA out of memory")
        return 0.01

    if failing == ONE:
        with pytest.raises(RuntimeError, match="out of memory"):
            measured(World(seconds), ONE, TWO, COMPILED)
        return
    one, two, compiled = measured(World(seconds), ONE, TWO, COMPILED).rates
    assert (two.refused, two.trial_steps_per_second) == ("CUDA out of memory", ())
    assert len(one.trial_steps_per_second) == len(compiled.trial_steps_per_second) >= MIN_ROUNDS


def test_real_engines_are_measured_and_the_answer_travels(store):
    def opened(spec):
        if spec.numerics.num_slots == 1:
            return Solo(store, device="cpu")
        return Bank(spec.shape, spec.batch_tokens, spec.numerics, store, optimizer="adamw")

    spec = run_spec(store.manifest.data_id, num_slots=1, learning_rate=1e-3)
    probe = CalibrationProbe(
        spec=spec, modes=(ONE, TWO, Numerics(num_slots=4, dtype="float64")), seconds=0.2
    )
    answer = measure(
        canon.decode(CalibrationProbe, canon.to_json(probe)), opened, TorchDevice(probe)
    )
    assert canon.decode(Answer, canon.parse(canon.canonical(answer))) == answer
    assert [rate.mode for rate in answer.rates] == list(probe.modes)
    for rate in answer.rates:
        assert not rate.refused and min(rate.trial_steps_per_second) > 0
    capped = dataclasses.replace(probe, most_bytes=10**6)
    assert 0 < TorchDevice(capped).free_bytes() == 10**6 < TorchDevice(probe).free_bytes()
