"""A fake of the machine that a calibration measures, with planted speeds."""

import random

from forerun._proxies.training.calibration import CalibrationResult, ModeRate


class PlantedMachine:
    """A machine with planted trial-steps per second, by mode.

    Args:
        speed: Function that returns the steps per second of all trials together in a mode; 0 if the
            machine cannot train in it.
        noise: Standard deviation of the logarithm of a measured rate.
        seed: Seed of the noise.
        first: Seconds to build a compiled engine.
        again: Seconds to start another run in a compiled engine.
        free: Free memory in bytes; 0 if unknown.
        held: Function that returns the memory in bytes that a mode takes.
        kind: Kind of the device, `cpu` or `cuda`.
    """

    def __init__(
        self,
        speed,
        *,
        noise=0.0,
        seed=0,
        first=0.0,
        again=0.0,
        free=0,
        held=lambda mode: 0,
        kind="cpu",
    ):
        self.speed, self.noise, self.random, self.kind = speed, noise, random.Random(seed), kind
        self.first, self.again, self.free, self.held = first, again, free, held

    def __call__(self, modes):
        """Return the answers of two workers that measure these modes at the same time."""
        return [self.answer(modes) for _ in range(2)]

    def answer(self, modes):
        """Return the answer of one worker, which measures each mode in eight rounds."""
        rates = {mode: [] for mode in modes}
        loads = [self.random.uniform(0.3, 1.0) for _ in range(8)]
        # Other programs on the machine slow all modes of a round by the same factor.
        for load in loads:
            for mode in modes:
                rates[mode].append(
                    self.speed(mode) * load * self.random.lognormvariate(0, self.noise)
                )
        return CalibrationResult(
            rates=tuple(self.make_rate(mode, tuple(rates[mode])) for mode in modes),
            device=self.kind,
            free_bytes=self.free,
        )

    def make_rate(self, mode, rates):
        """Return what the machine reports of a mode with these measured speeds."""
        if self.speed(mode) == 0:
            return ModeRate(mode=mode, refused="RuntimeError: not here")
        first, again = (self.first, self.again) if mode.compiled else (0.0, 0.0)
        return ModeRate(
            mode=mode,
            trial_steps_per_second=rates,
            first_seconds=first,
            again_seconds=again,
            peak_bytes=self.held(mode),
        )
