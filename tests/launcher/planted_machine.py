"""A machine whose speed is planted, behind what a calibration asks."""

import random

from proxies.training.calibration import Answer, Rate


class Machine:
    """Trial-steps a second by mode, with noise; every answer is kept."""

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
        self.asked = []

    def __call__(self, modes):
        self.asked.append(modes)
        return [self.answer(modes) for _ in range(2)]

    def answer(self, modes):
        rates, busy = (
            {mode: [] for mode in modes},
            [self.random.uniform(0.3, 1.0) for _ in range(8)],
        )
        for load in busy:  # what else the machine does falls on all modes of a round
            for mode in modes:
                rates[mode].append(
                    self.speed(mode) * load * self.random.lognormvariate(0, self.noise)
                )
        return Answer(
            rates=tuple(self.rate(mode, tuple(rates[mode])) for mode in modes),
            device=self.kind,
            free_bytes=self.free,
        )

    def rate(self, mode, rates):
        if self.speed(mode) == 0:
            return Rate(mode=mode, refused="RuntimeError: not here")
        first, again = (self.first, self.again) if mode.compiled else (0.0, 0.0)
        return Rate(
            mode=mode,
            trial_steps_per_second=rates,
            first_seconds=first,
            again_seconds=again,
            peak_bytes=self.held(mode),
        )
