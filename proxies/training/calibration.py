"""Measure how fast a device trains runs of one shape in different modes.

A mode is a `Numerics`: slots, threads, compilation, precision. The engines of all modes exist at
the same time and are advanced in turns, so that other load on the machine affects all of them
equally. Modes are compared by the ratios of their rates in the same round. This module does not
import torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from forerun._proxies.core.failures import describe_error
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.spec import Numerics, RunSpec

if TYPE_CHECKING:
    from forerun._proxies.training.engine import Engine
    from forerun._proxies.training.torch_device import TorchDevice

MIN_MODE_SPEEDUP = 0.1
"""Minimum speedup (0.1: by 10 %) at which a mode is chosen over a simpler mode."""
MIN_DOUBLING_SPEEDUP = 0.03
"""Minimum speedup by twice the slots at which four times the slots are measured."""
BLOCK_SECONDS = 0.1
"""Target duration of one mode's turn, in seconds."""
MIN_ROUNDS, MAX_ROUNDS = 6, 40
ENDLESS_STEPS = 10**6
"""Steps of the measured runs, more than any measurement makes."""
_MIN_SECONDS = 1e-9
"""Lower bound of a measured time, so that a rate is finite on a clock that did not advance."""
MAX_REASON_CHARS = 300
"""Maximum length of the reason why a mode is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationProbe:
    """The modes that a worker has to measure."""

    spec: RunSpec
    """A run of the shape and batch, whose numerics each mode replaces."""
    modes: tuple[Numerics, ...]
    """Modes to measure; all others are compared with the first."""
    seconds: float
    """Time limit of all rounds together, in seconds, without building and compiling."""
    worker_cpus: float = 1.0
    """Number of cores that a worker takes, which on a CPU also gives its share of the node's
    memory."""
    worker_gpus: float = 0.0
    """Number of GPUs that a worker takes; below 1, its share of one GPU."""
    most_bytes: int = 0
    """Maximum memory that a worker may take, in bytes; 0 if there is no limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeRate:
    """The speed of one mode on one worker."""

    mode: Numerics
    trial_steps_per_second: tuple[float, ...] = ()
    """Optimizer steps per second in each round, summed over the slots; all modes have the same
    number of rounds."""
    first_seconds: float = 0.0
    """Time to build and compile the engine from scratch, in seconds: the time until the end of the
    first step, minus the time of an ordinary step."""
    again_seconds: float = 0.0
    """Time to start another run in the same engine, in seconds: the time until the end of its first
    step, minus the time of an ordinary step."""
    peak_bytes: int = 0
    """Upper bound of the memory that the engine took while it was built and made its first steps;
    0 if unknown."""
    refused: str = ""
    """Reason why the mode cannot train here; empty if it can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationResult:
    """The measurements of one worker."""

    rates: tuple[ModeRate, ...]
    """Rate of each mode of the probe, in its order."""
    device: str
    """Type of the device, `cpu` or `cuda`."""
    free_bytes: int
    """Free memory of the device before an engine was built, in bytes; 0 if unknown."""
    kind: str = ""
    """Kind of the device, such as its name. A worker leaves it empty, and the driver sets it."""


@dataclass(kw_only=True, slots=True)
class _BuiltMode:
    """A mode whose engine has been built."""

    engine: Engine
    rate: ModeRate
    """The measurements, still without the rates of the rounds."""
    num_steps: int
    """Number of steps in one turn."""
    rates: list[float] = field(default_factory=list)
    """Optimizer steps per second in each round so far, summed over the slots."""


def measure_modes(
    probe: CalibrationProbe,
    open_engine: Callable[[RunSpec], Engine],
    device: TorchDevice,
    clock: Callable[[], float] = time.perf_counter,
) -> CalibrationResult:
    """Measure every mode of a probe; a mode that cannot be built or trained gets a reason instead.

    Args:
        probe: The modes to measure.
        open_engine: Returns an empty engine for runs like the given one.
        device: Device that the engines train on.
        clock: Returns the time in seconds.

    Raises:
        Exception: The first mode failed, so that there is nothing to compare with.
    """
    device.free_memory()
    free_bytes = device.get_free_bytes()
    rates: dict[Numerics, ModeRate] = {}
    built: list[_BuiltMode] = []
    for mode in probe.modes:
        try:
            built.append(_build(probe.spec, mode, open_engine, device, clock))
        # There may be too little memory, no compiler, or no support in this engine: go on with the
        # other modes.
        except Exception as error:
            if not built:
                raise
            rates[mode] = _make_refusal(mode, error)
    rates |= _measure_rounds(built, device, clock, probe.seconds)
    rates |= {
        done.rate.mode: replace(done.rate, trial_steps_per_second=tuple(done.rates))
        for done in built
    }
    # Free the engines, so that the next probe sees the memory as free.
    built.clear()
    device.free_memory()
    return CalibrationResult(
        rates=tuple(rates[mode] for mode in probe.modes), device=device.kind, free_bytes=free_bytes
    )


def _make_refusal(mode: Numerics, error: Exception) -> ModeRate:
    """Return the rate of a mode that failed, with the reason."""
    return ModeRate(mode=mode, refused=describe_error(error).splitlines()[0][:MAX_REASON_CHARS])


def _measure_rounds(
    built: list[_BuiltMode], device: TorchDevice, clock: Callable[[], float], seconds: float
) -> dict[Numerics, ModeRate]:
    """Give every mode its turn, round by round, until the rates of the modes differ clearly.

    This is a function of its own so that no local variable of the caller keeps an engine alive.

    Returns:
        The modes that failed in their turn, for example by memory; they are removed from `built`.
    """
    failed: dict[Numerics, ModeRate] = {}
    began = clock()
    while not _has_enough_rounds(built, clock() - began, seconds):
        for mode in tuple(built):
            try:
                mode.rates.append(_take_turn(mode, device, clock))
            except Exception as error:
                if mode is built[0]:
                    raise
                failed[mode.rate.mode] = _make_refusal(mode.rate.mode, error)
                built.remove(mode)
    return failed


def _build(
    spec: RunSpec,
    mode: Numerics,
    open_engine: Callable[[RunSpec], Engine],
    device: TorchDevice,
    clock: Callable[[], float],
) -> _BuiltMode:
    """Build the engine of a mode, fill its slots, and time its first steps."""
    # The runs must not end during the measurement: the validation at the end takes time.
    rules = replace(
        spec.parametrization, moments="fixed", rate_batch_power=0.0, rate_duration_power=0.0
    )
    endless = replace(
        spec,
        numerics=mode,
        schedule=Schedule(kind="constant", num_steps=ENDLESS_STEPS),
        parametrization=rules,
        base_batch_tokens=spec.base_batch_tokens if rules.needs_tokens else None,
        base_num_tokens=spec.base_num_tokens if rules.needs_tokens else None,
    )
    runs = [replace(endless, seed=seed) for seed in range(mode.num_slots)]
    device.prepare(mode)
    device.start_peak_measurement()

    # First run: build and compile.
    began = clock()
    engine = open_engine(endless)
    for index, run in enumerate(runs):
        engine.admit(index, run)
    engine.advance(1)
    first_seconds = clock() - began

    # Another run in the same engine.
    began = clock()
    engine.evict(0)
    engine.admit(0, runs[0])
    engine.advance(1)
    again_seconds = clock() - began

    # One ordinary step.
    began = clock()
    engine.advance(1)
    step_seconds = max(clock() - began, _MIN_SECONDS)
    rate = ModeRate(
        mode=mode,
        first_seconds=max(0.0, first_seconds - step_seconds),
        again_seconds=max(0.0, again_seconds - step_seconds),
        peak_bytes=device.get_peak_bytes(),
    )
    num_steps = max(1, round(BLOCK_SECONDS / step_seconds))
    return _BuiltMode(engine=engine, rate=rate, num_steps=num_steps)


def _take_turn(built: _BuiltMode, device: TorchDevice, clock: Callable[[], float]) -> float:
    """Make the steps of one turn, and return the steps per second, summed over the slots."""
    device.prepare(built.rate.mode)
    began = clock()
    built.engine.advance(built.num_steps)
    return built.rate.mode.num_slots * built.num_steps / max(clock() - began, _MIN_SECONDS)


def _has_enough_rounds(built: Sequence[_BuiltMode], seconds: float, max_seconds: float) -> bool:
    """Return whether the rounds so far tell the modes apart, or the time is over."""
    num_rounds = len(built[0].rates)
    if num_rounds < MIN_ROUNDS:
        # If a step takes seconds, two rounds are enough once three times the time limit has passed.
        return num_rounds >= 2 and seconds > 3 * max_seconds
    if num_rounds >= MAX_ROUNDS or seconds > max_seconds:
        return True
    # Compare every mode with the first, and the largest number of slots with the next smaller.
    comparisons = [(mode, built[0], MIN_MODE_SPEEDUP) for mode in built[1:]]
    if built[2:]:
        comparisons.append((built[-1], built[-2], MIN_DOUBLING_SPEEDUP))
    for mode, reference, margin in comparisons:
        ratios = [a / b for a, b in zip(mode.rates, reference.rates, strict=True)]
        if not is_one_sided(ratios, 1 + margin):
            return False
    return True


def is_one_sided(ratios: Sequence[float], limit: float) -> bool:
    """Return whether at least seven of eight ratios are on one side of a limit."""
    above = sum(ratio > limit for ratio in ratios)
    return min(above, len(ratios) - above) <= len(ratios) // 8


def bound_median(ratios: Sequence[float]) -> float:
    """Return a lower bound for the median of ratios, at a one-sided level of 90 %.

    The bound is an order statistic (sign test): the largest ratio that exceeds the median with a
    probability of at most 10 %. With too few ratios for this level, it is the smallest ratio.
    """
    ordered, chance, below = sorted(ratios), 0.0, 0
    # `chance` is the probability that at most `below` of the ratios are below the median
    while (chance := chance + math.comb(len(ordered), below) / 2 ** len(ordered)) <= 0.1:
        below += 1
    return ordered[max(0, below - 1)]
