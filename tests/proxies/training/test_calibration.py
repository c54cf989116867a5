"""Tests of calibration, which measures how fast each mode of training is on a device.

A mode is, for example, a single trial, several trials as one batched model (a bank), or a compiled
model. A fake device has engines with planted speeds and a clock of its own; one test uses real
engines.
"""

import dataclasses
import itertools

import pytest
from proxy_cases import make_run_spec

from forerun._proxies.core import canon
from forerun._proxies.core.spec import Numerics
from forerun._proxies.training.bank import Bank
from forerun._proxies.training.calibration import (
    BLOCK_SECONDS,
    MAX_ROUNDS,
    MIN_MODE_SPEEDUP,
    MIN_ROUNDS,
    CalibrationProbe,
    CalibrationResult,
    measure_modes,
)
from forerun._proxies.training.single_trial import SingleTrialEngine
from forerun._proxies.training.torch_device import TorchDevice

SINGLE, PAIR, COMPILED = Numerics(), Numerics(num_slots=2), Numerics(compiled=True)
"""Modes of one trial, of a bank of two, and compiled."""


class FakeDevice:
    """A device and its clock, with engines whose steps take planned seconds.

    Args:
        seconds: Function of a mode that returns the seconds per step.
        fails: Function of a mode that returns whether its engine cannot be built.
    """

    kind = "cpu"
    free_bytes = 7

    def __init__(self, seconds, *, fails=lambda mode: False):
        self.now, self.seconds, self.fails = 0.0, seconds, fails
        # Mode and number of steps of each call of an engine
        self.turns = []
        self.prepared_mode, self.used_bytes = None, 0

    def open(self, spec):
        assert self.prepared_mode == spec.numerics, "the process has one mode at a time"
        if self.fails(spec.numerics):
            raise RuntimeError("no compiler\nfor it")
        return FakeEngine(self, spec)

    def free_memory(self):
        pass

    def get_free_bytes(self):
        return self.free_bytes

    def start_peak_measurement(self):
        self.used_bytes = 0

    def get_peak_bytes(self):
        return self.used_bytes

    def prepare(self, mode):
        self.prepared_mode = mode

    def clock(self):
        return self.now


class FakeEngine:
    """An engine that only advances the clock of its device."""

    def __init__(self, device, spec):
        self.device, self.spec, self.slots = device, spec, {}

    def admit(self, index, spec):
        assert index not in self.slots and spec.numerics == self.spec.numerics
        self.slots[index] = spec
        self.device.used_bytes += 100

    def evict(self, index):
        del self.slots[index]

    def advance(self, num_steps):
        mode = self.spec.numerics
        assert sorted(self.slots) == list(range(mode.num_slots)), "every slot is occupied"
        assert len({spec.seed for spec in self.slots.values()}) == mode.num_slots
        assert self.device.prepared_mode == mode
        self.device.turns.append((mode, num_steps))
        self.device.now += num_steps * self.device.seconds(mode)
        return []


def measure(device, *modes, seconds=1000.0):
    """Measure modes on a fake device within a time limit."""
    probe = CalibrationProbe(
        spec=make_run_spec("d", num_slots=1, learning_rate=0.01), modes=modes, seconds=seconds
    )
    return measure_modes(probe, device.open, device, device.clock)


def test_modes_take_turns_and_rates_count_the_steps_of_all_trials():
    device = FakeDevice(lambda mode: 0.01 * mode.num_slots**0.5)
    result = measure(device, SINGLE, PAIR)
    single, pair = result.rates
    num_rounds = len(single.trial_steps_per_second)
    assert single.trial_steps_per_second == pytest.approx([100.0] * num_rounds)
    assert pair.trial_steps_per_second == pytest.approx([200 / 2**0.5] * num_rounds)
    assert (result.device, result.free_bytes) == ("cpu", FakeDevice.free_bytes)
    # A run takes 100 bytes, and one run more is started in each engine.
    assert (single.peak_bytes, pair.peak_bytes) == (200, 300)
    # Each of the two modes is called three times before the rounds.
    turns = device.turns[2 * 3 :]
    assert [mode for mode, _ in turns] == [SINGLE, PAIR] * (len(turns) // 2)
    # A step of this mode takes 0.01 seconds.
    turn_steps = round(BLOCK_SECONDS / 0.01)
    assert {num_steps for mode, num_steps in turns if mode == SINGLE} == {turn_steps}


def test_measuring_ends_when_modes_are_distinguished_or_time_is_up():
    different = measure(FakeDevice(lambda mode: 0.01 / mode.num_slots), SINGLE, PAIR)
    assert len(different.rates[0].trial_steps_per_second) == MIN_ROUNDS

    # The speed of the pair varies around the speedup that would make it worth its use.
    factors = itertools.cycle([0.9, 1.1])
    single_seconds = 0.01
    pair_seconds = 2 * single_seconds / (1 + MIN_MODE_SPEEDUP)
    device = FakeDevice(
        lambda mode: pair_seconds * next(factors) if mode == PAIR else single_seconds
    )
    undecided = measure(device, SINGLE, PAIR)
    assert len(undecided.rates[0].trial_steps_per_second) == MAX_ROUNDS

    # Steps of ten seconds: the time limit allows only the minimum of two rounds.
    slow = measure(FakeDevice(lambda mode: 10.0), SINGLE, PAIR, seconds=1.0)
    assert len(slow.rates[0].trial_steps_per_second) == 2


def test_failing_mode_is_refused_unless_it_is_the_first():
    device = FakeDevice(lambda mode: 0.01, fails=lambda mode: mode.num_slots > 1)
    single, pair, compiled = measure(device, SINGLE, PAIR, COMPILED).rates
    assert pair.refused == "RuntimeError: no compiler"
    assert pair.trial_steps_per_second == ()
    assert single.trial_steps_per_second and compiled.trial_steps_per_second
    with pytest.raises(RuntimeError, match="no compiler"):
        measure(FakeDevice(lambda mode: 0.01, fails=lambda mode: True), SINGLE)


def make_device_that_fails_later(failing_mode):
    """Return a fake device on which a mode runs out of memory at its sixth call."""
    calls = itertools.count()

    def get_seconds(mode):
        if mode == failing_mode and next(calls) > 4:
            raise RuntimeError("CUDA out of memory")
        return 0.01

    return FakeDevice(get_seconds)


def test_mode_that_fails_while_it_is_measured_is_refused_unless_it_is_the_first():
    device = make_device_that_fails_later(PAIR)
    single, pair, compiled = measure(device, SINGLE, PAIR, COMPILED).rates
    assert (pair.refused, pair.trial_steps_per_second) == ("CUDA out of memory", ())
    assert len(single.trial_steps_per_second) == len(compiled.trial_steps_per_second) >= MIN_ROUNDS
    with pytest.raises(RuntimeError, match="out of memory"):
        measure(make_device_that_fails_later(SINGLE), SINGLE, PAIR, COMPILED)


def test_real_engines_are_measured_and_the_result_survives_json(store):
    def build_engine(spec):
        if spec.numerics.num_slots == 1:
            return SingleTrialEngine(store, device="cpu")
        return Bank(spec.shape, spec.batch_tokens, spec.numerics, store, optimizer="adamw")

    spec = make_run_spec(store.manifest.data_id, num_slots=1, learning_rate=1e-3)
    probe = CalibrationProbe(
        spec=spec, modes=(SINGLE, PAIR, Numerics(num_slots=4, dtype="float64")), seconds=0.2
    )
    decoded_probe = canon.decode(CalibrationProbe, canon.to_json(probe))
    result = measure_modes(decoded_probe, build_engine, TorchDevice(probe))
    assert canon.decode(CalibrationResult, canon.parse(canon.to_canonical_json(result))) == result
    assert [rate.mode for rate in result.rates] == list(probe.modes)
    for rate in result.rates:
        assert not rate.refused and min(rate.trial_steps_per_second) > 0
    capped = dataclasses.replace(probe, most_bytes=10**6)
    assert 0 < TorchDevice(capped).get_free_bytes() == 10**6 < TorchDevice(probe).get_free_bytes()
