"""Cases for tests of how the trainer handles a spike: a tiny main run, a corpus that makes its loss
spike, because a few batches are noise instead of text, and readers of the run's metrics.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np
from main_run import make_tiny_decision

from forerun._launcher.main_run import metrics_file
from forerun._launcher.main_run.frozen.frozen import sample_learning_rate
from forerun._launcher.main_run.frozen.launch_file import write_launch
from forerun._launcher.main_run.frozen.run_policies import SpikePolicy
from forerun._launcher.main_run.trainer.inputs import RunOptions
from forerun._launcher.main_run.trainer.training import Trainer, run
from forerun._proxies.core.schedule import Schedule

NUM_STEPS, BATCH_SEQUENCES = 32, 8
POISONED = range(20 * BATCH_SEQUENCES, 25 * BATCH_SEQUENCES)
"""Sequences that make up the batches of steps 20 to 24."""
POLICY = SpikePolicy(
    rollback_steps=4,
    skip_batches=10,
    max_rollbacks=2,
    window_steps=8,
    threshold=2.0,
    least_nats=0.1,
    patience_steps=3,
)
"""The spike begins at step 20 and is detected at step 22; the run goes back to step 16 and skips
batches until step 26."""


def make_spike_decision(corpus, *, num_ranks=1, every_steps=3, policy=POLICY, **changes):
    """Return the decision of a run of `NUM_STEPS` steps with a checkpoint every `every_steps`."""
    decision = make_tiny_decision(corpus, num_ranks=num_ranks, every_steps=every_steps)
    schedule = Schedule(kind="constant", num_steps=NUM_STEPS, warmup_steps=3)
    changes = {
        "learning_rate": sample_learning_rate(schedule),
        "num_tokens": NUM_STEPS * 256,  # 256 tokens a step
        "spikes": policy,
        **changes,
    }
    return dataclasses.replace(decision, **changes)


def train(decision, corpus, out, build=Trainer, **options):
    """Train one rank in this process, in `out/run`; needs the `one_rank` fixture."""
    config = write_launch(out / "frozen", decision)
    return run(RunOptions(config=config, data=corpus, out=out / "run", **options), build=build)


class PoisonedStore:
    """A token store that returns noise for the sequences with the numbers `poisoned`.

    From sequence `from_sequence` on, each read begins `shift` sequences later than asked for.
    """

    def __init__(self, store, poisoned=POISONED, shift=0, from_sequence=0):
        self.store = store
        self.poisoned = poisoned
        self.shift = shift
        self.from_sequence = from_sequence

    def __getattr__(self, name):
        return getattr(self.store, name)

    def read_train_batch(self, *, seed, first_sequence, num_sequences, seq_len):
        if first_sequence >= self.from_sequence:
            first_sequence += self.shift
        batch = self.store.read_train_batch(
            seed=seed, first_sequence=first_sequence, num_sequences=num_sequences, seq_len=seq_len
        )
        for row in range(num_sequences):
            if first_sequence + row in self.poisoned:
                draw = random.Random(first_sequence + row)
                noise = np.array([draw.randrange(256) for _ in range(seq_len + 1)])
                # Every third token only: noise everywhere would trip the run's loss ceiling first.
                batch[row, ::3] = noise[::3]
        return batch


def train_poisoned(decision, corpus, out, stop_after=None, **poison):
    """Train one rank in this process on the poisoned corpus; `poison` goes to PoisonedStore."""

    def build(decision, store, run_dir, interrupted, **_):
        return Trainer(decision, PoisonedStore(store, **poison), run_dir, interrupted)

    return train(decision, corpus, out, build, stop_after=stop_after)


def read_curve(run_dir):
    """Return loss, gradient norm and token count by step."""
    return {
        line["step"]: (line["train_loss_nats"], line["grad_norm"], line["tokens"])
        for line in metrics_file.read_lines(run_dir)
        if "train_loss_nats" in line
    }


def read_events(run_dir, name):
    """Return the lines of the run's metrics file that record events of this name."""
    return [line for line in metrics_file.read_lines(run_dir) if line.get("event") == name]
