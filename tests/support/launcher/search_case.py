"""Cases for tests of the search: a planted loss basin, and a driver that runs in this process."""

import hashlib
import math
import random

from tiny_study import make_result, write_plan_with

from forerun._launcher.study.stages.study_folder import read_study
from forerun._sweeps.search.source import SourceSignal

OPTIMUM = -1.0
"""Base-2 logarithm of the best learning rate, which is beyond the plan's highest one, 2^-3."""


# Keys of a plan whose search extends its ranges if the optimum is beyond them
GROWING = """
[search]
num_trials = 12
num_startup = 6
parallelism = 3
max_extensions = 2
extension_trials = 6
num_replicates = 8
can_be_off = ["clip_norm"]
axes = { weight_decay = [0.01, 0.1] }
"""


def draw_noise(spec):
    """Return a run's noise in nats: one part depends on the seed, an equal part on the run."""
    uniform_draws = [
        int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32
        for text in (str(spec.seed), spec.id)
    ]
    return 0.01 * uniform_draws[0] + 0.01 * uniform_draws[1]


def make_outcome(spec):
    """Return a run's outcome in the planted basin. It diverges more than 1.2 octaves above the
    optimum.
    """
    octaves = math.log2(spec.hparams.learning_rate) - OPTIMUM
    clip = spec.hparams.clip_norm
    loss = (
        2.0
        + 0.05 * octaves**2
        + (0.2 if clip is None else 0.02 * math.log2(clip) ** 2)
        + draw_noise(spec)
    )
    return make_result(spec, None if octaves > 1.2 else loss)


class StopError(Exception):
    """Raised in place of the driver's death."""


def make_driver(ledger, seed, stop_after=None, tell=make_outcome):
    """Return a function that runs the trials that a source suggests.

    The outcomes of running trials come in random order.

    Args:
        ledger: Ledger of the study, open for writing.
        seed: Seed of that order.
        stop_after: Number of outcomes after which the function raises StopError; None for never.
        tell: Function that returns the outcome of a run.
    """
    rng = random.Random(seed)
    num_left = math.inf if stop_after is None else stop_after

    def drive(label, source, specs):
        nonlocal num_left
        running = {}
        while True:
            answer = source.next(ledger.get_results())
            if isinstance(answer, SourceSignal):
                if answer is SourceSignal.DONE and not running:
                    return
                spec = running.pop(rng.choice(sorted(running)))
                if num_left == 0:
                    raise StopError
                num_left -= 1
                ledger.commit(spec, tell(spec))
            elif answer.id not in ledger.get_results():
                running[answer.id] = answer

    return drive


def make_study(folder, name, part=GROWING):
    """Return the study `name` in a folder; its plan is the tiny one with the keys of `part`."""
    path = write_plan_with(folder, part)
    return read_study(path, folder / name)
