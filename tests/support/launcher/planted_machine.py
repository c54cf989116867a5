"""A fake of the machine that a calibration measures, with planted speeds."""

import random

from forerun._proxies.training.calibration import CalibrationResult, ModeRate


class PlantedMachine:
    """A function in place of a calibration's measurement, with planted speeds.

    It returns two results for a list of modes, and records each list in `asked`.
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
        """Store the planted numbers.

        Args:
            speed: Function of a mode that returns trial-steps per second; 0 if the machine refuses
                the mode.
            noise: Standard deviation of the logarithm of each measured speed.
            seed: Seed of the noise.
            first: Seconds that a compiled mode takes to begin its first run.
            again: Seconds that a compiled mode takes to begin another run in the same engine.
            free: Free bytes of the device.
            held: Function of a mode that returns its peak memory in bytes.
            kind: Kind of the device.
        """
        self.speed, self.noise, self.random, self.kind = speed, noise, random.Random(seed), kind
        self.first, self.again, self.free, self.held = first, again, free, held
        self.asked = []

    def __call__(self, modes):
        self.asked.append(modes)
        return [self.measure(modes) for _ in range(2)]

    def measure(self, modes):
        """Return one result, with eight rounds of measurements of every mode."""
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
