"""A tiny main run whose data has a poisonous stretch, on which the loss spikes, and what is
compared of two runs.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np
from main_run import tiny_decision

from launcher.base import metrics
from launcher.base.policy import SpikePolicy
from launcher.frozen.frozen import learning_rate_of
from launcher.frozen.launch_file import write_launch
from launcher.trainer.rank import RankOptions, run
from launcher.trainer.training import Trainer
from proxies.core.schedule import Schedule

NUM_STEPS, BATCH_SEQUENCES = 32, 8
POISONED = range(20 * BATCH_SEQUENCES, 25 * BATCH_SEQUENCES)
"""Sequences, of which the schedule's steps 20 to 24 are made."""
POLICY = SpikePolicy(
    rollback_steps=4,
    skip_batches=10,
    max_rollbacks=2,
    window_steps=8,
    threshold=2.0,
    least_nats=0.1,
    patience_steps=3,
)
"""A spike's first step is 20, it is found at step 22, and the run goes back to step 16 and skips
until 26."""


def care_decision(corpus, *, num_ranks=1, every_steps=3, policy=POLICY, **changes):
    decision = tiny_decision(corpus, num_ranks=num_ranks, every_steps=every_steps)
    schedule = Schedule(kind="constant", num_steps=NUM_STEPS, warmup_steps=3)
    changes = {
        "learning_rate": learning_rate_of(schedule),
        "num_tokens": NUM_STEPS * 256,
        "spikes": policy,
        **changes,
    }
    return dataclasses.replace(decision, **changes)


def train(decision, corpus, out, build=Trainer, **options):
    """One rank's run in this process, into `out/run`; needs `one_rank`."""
    config = write_launch(out / "frozen", decision)
    return run(RankOptions(config=config, data=corpus, out=out / "run", **options), build=build)


class Poisoned:
    """A corpus with noise in a stretch of the data order, and with a shift of the order from a step
    on.
    """

    def __init__(self, store, poisoned=POISONED, shift=0, from_sequence=0):
        self.store, self.poisoned, self.shift, self.from_sequence = (
            store,
            poisoned,
            shift,
            from_sequence,
        )

    def __getattr__(self, name):
        return getattr(self.store, name)

    def train_batch(self, *, seed, first_sequence, num_sequences, seq_len):
        if first_sequence >= self.from_sequence:
            first_sequence += self.shift
        batch = self.store.train_batch(
            seed=seed, first_sequence=first_sequence, num_sequences=num_sequences, seq_len=seq_len
        )
        for row in range(num_sequences):
            if first_sequence + row in self.poisoned:
                draw = random.Random(first_sequence + row)
                noise = np.array([draw.randrange(256) for _ in range(seq_len + 1)])
                batch[row, ::3] = noise[::3]  # not all of it: the run's ceiling would stop it first
        return batch


def poisoned_run(decision, corpus, out, stop_after=None, hooks=(), **poison):
    """One rank's run in this process."""

    def build(decision, store, run_dir, interrupted, **_):
        return Trainer(decision, Poisoned(store, **poison), run_dir, interrupted, hooks)

    return train(decision, corpus, out, build, stop_after=stop_after)


def curve(run_dir):
    """Step -> what the run computed there."""
    return {
        line["step"]: (line["train_loss_nats"], line["grad_norm"], line["tokens"])
        for line in metrics.read(run_dir)
        if "train_loss_nats" in line
    }


def events(run_dir, name):
    return [line for line in metrics.read(run_dir) if line.get("event") == name]
