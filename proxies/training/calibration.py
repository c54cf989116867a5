"""How fast a device trains runs of one shape, by how it does so: slots, threads, compilation,
precision. Measured.

Modes are `Numerics`. Their engines are built side by side and advanced in turns, so that what else
the machine does falls on all of them alike: what counts is a mode's rate over the first one's,
round by round. No torch here.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from proxies.core.checks import Checks
from proxies.core.failures import described
from proxies.core.schedule import Schedule
from proxies.core.spec import Curve, Numerics, RunResult, RunSpec

if TYPE_CHECKING:
    from proxies.training.torch_device import TorchDevice

MARGIN = 0.1
"""What a mode has to be faster by to be chosen over a simpler one."""
STEP = 0.03
"""What twice the slots have to be faster by for four times as many to be looked at."""
BLOCK_SECONDS = 0.1
"""Of one mode's turn."""
LEAST_ROUNDS, MOST_ROUNDS = 6, 40
ENDLESS_STEPS = 10**6
MOST_SAID = 300
"""Characters of why a mode is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationProbe:
    """What a worker is to measure."""

    spec: RunSpec
    """A run of the shape and batch, whose numerics each mode replaces."""
    modes: tuple[Numerics, ...]
    """The first is what the others are compared with."""
    seconds: float
    """For all rounds together, building and compiling not counted."""
    worker_cpus: float = 1.0
    """Cores that a worker takes: on a CPU, its share of the node's memory."""
    worker_gpus: float = 0.0
    """The same of GPUs; below 1 it is the share of one."""
    most_bytes: int = 0
    """Of memory, that a worker may take; 0: not said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """One mode on one worker."""

    mode: Numerics
    trial_steps_per_second: tuple[float, ...] = ()
    """By round, of all its slots together; as many as the first mode has."""
    first_seconds: float = 0.0
    """From nothing to the end of the first step, beyond what a step takes: building, and compiling
    from nothing."""
    again_seconds: float = 0.0
    """The same of one more run in the same engine."""
    peak_bytes: int = 0
    """The most it held while it was built and took its first steps, or more; 0 where nobody can
    tell."""
    refused: str = ""
    """Why it does not train here."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        for name in ("first_seconds", "again_seconds"):
            checks.number(name, least=0)
        checks.whole("peak_bytes", least=0)
        checks.that(
            all(0 < rate < 1e12 for rate in self.trial_steps_per_second), "a rate must be positive"
        )
        checks.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a worker measured."""

    rates: tuple[Rate, ...]
    """One per mode of the probe, in its order."""
    device: str
    """`cpu` or `cuda`."""
    free_bytes: int
    """Of the device's memory before anything was built; 0 where nobody can tell."""
    kind: str = ""
    """The device's name, set by who asked."""


class Engine(Protocol):
    """A bank, or one trial alone."""

    def admit(self, index: int, spec: RunSpec) -> None:
        """Start a run in a free slot."""

    def evict(self, index: int) -> None:
        """Free a slot."""

    def advance(self, num_steps: int) -> list[tuple[int, RunResult, Curve]]:
        """So many optimizer steps of every occupied slot."""


@dataclass(kw_only=True, slots=True)
class _Built:
    """A mode whose engine is there."""

    mode: Numerics
    engine: Engine
    first_seconds: float
    again_seconds: float
    peak_bytes: int
    num_steps: int = 1
    """Of one turn."""
    rates: list[float] = dataclasses.field(default_factory=list)


def measure(
    probe: CalibrationProbe,
    open_engine: Callable[[RunSpec], Engine],
    device: TorchDevice,
    clock: Callable[[], float] = time.perf_counter,
) -> Answer:
    """Measure every mode of a probe; one that cannot be built or trained is refused in words.

    Args:
        probe: what to measure.
        open_engine: an empty engine for runs like this one.
        device: where it trains.
        clock: seconds.

    Raises:
        Exception: whatever the first mode raises: nothing can be compared with it then.
    """
    device.forget()
    free_bytes = device.free_bytes()
    found: dict[Numerics, Rate] = {}
    built: list[_Built] = []
    for mode in probe.modes:
        try:
            built.append(_build(probe.spec, mode, open_engine, device, clock))
        except (
            Exception
        ) as error:  # no room, no compiler, not for this engine: another mode does without
            if not built:
                raise
            found[mode] = _refused(mode, error)
    found |= _rounds(built, device, clock, probe.seconds)
    found |= {
        one.mode: Rate(
            mode=one.mode,
            trial_steps_per_second=tuple(one.rates),
            first_seconds=one.first_seconds,
            again_seconds=one.again_seconds,
            peak_bytes=one.peak_bytes,
        )
        for one in built
    }
    built.clear()
    device.forget()  # before anybody is asked again, and looks at what is free
    return Answer(
        rates=tuple(found[mode] for mode in probe.modes), device=device.kind, free_bytes=free_bytes
    )


def _refused(mode: Numerics, error: Exception) -> Rate:
    return Rate(mode=mode, refused=described(error).splitlines()[0][:MOST_SAID])


def _rounds(
    built: list[_Built], device: TorchDevice, clock: Callable[[], float], seconds: float
) -> dict[Numerics, Rate]:
    """A turn of each, again and again. Of its own, so that no name here holds an engine beyond it.

    Returns:
        The modes that failed in their turn, out of memory beside the others for instance; they are
        out of `built`.
    """
    failed: dict[Numerics, Rate] = {}
    began = clock()
    while not _enough(built, clock() - began, seconds):
        for one in tuple(built):
            try:
                one.rates.append(_turn(one, device, clock))
            except Exception as error:
                if one is built[0]:
                    raise
                failed[one.mode] = _refused(one.mode, error)
                built.remove(one)
    return failed


def _build(
    spec: RunSpec,
    mode: Numerics,
    open_engine: Callable[[RunSpec], Engine],
    device: TorchDevice,
    clock: Callable[[], float],
) -> _Built:
    """Every slot occupied, and its steps known to take some time."""
    # A run that does not end meanwhile: an end is a validation, and no step's time.
    rules = dataclasses.replace(
        spec.parametrization, moments="fixed", rate_batch_power=0.0, rate_duration_power=0.0
    )
    endless = dataclasses.replace(
        spec,
        numerics=mode,
        schedule=Schedule(kind="constant", num_steps=ENDLESS_STEPS),
        parametrization=rules,
        base_batch_tokens=spec.base_batch_tokens if rules.needs_tokens else None,
        base_num_tokens=spec.base_num_tokens if rules.needs_tokens else None,
    )
    runs = [dataclasses.replace(endless, seed=seed) for seed in range(mode.num_slots)]
    device.prepare(mode)
    device.watch()
    began = clock()
    engine = open_engine(endless)
    for index, run in enumerate(runs):
        engine.admit(index, run)
    engine.advance(1)
    first, began = clock() - began, clock()
    engine.evict(0)
    engine.admit(0, runs[0])
    engine.advance(1)
    again, began = clock() - began, clock()
    engine.advance(1)
    step = max(clock() - began, 1e-9)
    return _Built(
        mode=mode,
        engine=engine,
        first_seconds=max(0.0, first - step),
        again_seconds=max(0.0, again - step),
        peak_bytes=device.peak_bytes(),
        num_steps=max(1, round(BLOCK_SECONDS / step)),
    )


def _turn(one: _Built, device: TorchDevice, clock: Callable[[], float]) -> float:
    """Trial-steps a second of one turn."""
    device.prepare(one.mode)
    began = clock()
    one.engine.advance(one.num_steps)
    return one.mode.num_slots * one.num_steps / max(clock() - began, 1e-9)


def _enough(built: Sequence[_Built], seconds: float, most_seconds: float) -> bool:
    """Whether the rounds so far tell the modes apart, or time is up."""
    rounds = len(built[0].rates)
    if rounds < LEAST_ROUNDS:
        # of a step that takes seconds, a few have to do
        return rounds >= 2 and seconds > 3 * most_seconds
    if rounds >= MOST_ROUNDS or seconds > most_seconds:
        return True
    pairs = [(one, built[0], MARGIN) for one in built[1:]] + (
        [(built[-1], built[-2], STEP)] if built[2:] else []
    )
    return all(
        clear([a / b for a, b in zip(one.rates, to.rates, strict=True)], 1 + by)
        for one, to, by in pairs
    )


def clear(ratios: Sequence[float], limit: float) -> bool:
    """Whether ratios lie on one side of a limit, but for one in eight."""
    above = sum(ratio > limit for ratio in ratios)
    return min(above, len(ratios) - above) <= len(ratios) // 8


def surely(ratios: Sequence[float]) -> float:
    """What the median of so many ratios is not below, but in one case of ten: an order statistic
    (sign test).
    """
    ordered, chance, below = sorted(ratios), 0.0, 0
    while (chance := chance + math.comb(len(ordered), below) / 2 ** len(ordered)) <= 0.1:
        below += 1
    return ordered[max(0, below - 1)]
