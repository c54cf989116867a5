"""The gradient noise of a main run that accumulates: measured in passing, carried over a stop,
shown by the watch.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from care_case import care_decision, train
from main_run import QUIET_TORCH, losses, tiny_decision
from planted_watch import NUM_STEPS, columns_of, decision, losses_of

from launcher.base import metrics
from launcher.base.run_files import CHECKPOINTS
from launcher.trainer import telemetry, training
from launcher.trainer.checkpoints import manifest_of
from launcher.trainer.training import Trainer
from launcher.watch.judgment import judge
from launcher.watch.status_text import figure_lines
from proxies.core.noise_scale import split

pytestmark = QUIET_TORCH
COLUMNS = ("noise_scale_tokens", "noise_scale_low_tokens", "noise_scale_high_tokens")


def accumulating(corpus, sequences=2, **changes):
    decision = care_decision(corpus, **changes)
    layout = dataclasses.replace(decision.parallelism, microbatch_sequences=sequences)
    return dataclasses.replace(decision, parallelism=layout)


class Recorded(Trainer):
    """Keeps what every step's gradient and first part were."""

    seen: dict = {}  # noqa: RUF012

    def gradients(self, step):
        found = super().gradients(step)
        self.seen[step] = (
            found[1].item(),
            None if self.part is None else (self.part[0], self.part[1].item()),
        )
        return found


def test_what_is_measured_is_the_first_passs_gradient(one_rank, corpus, tmp_path, monkeypatch):
    """Held against the gradient of those sequences alone, at the initial weights."""
    monkeypatch.setattr(training, "NOISE_EVERY_STEPS", 1)
    Recorded.seen = {}
    train(accumulating(corpus), corpus, tmp_path / "parts", build=Recorded, stop_after=1)
    whole_norm, (share, part_norm) = Recorded.seen[0]
    assert share == 0.25

    class FirstPart(Recorded):
        def gradients(self, step):
            self.store = OnlyFirst(self.store)
            return super().gradients(step)

    class OnlyFirst:
        def __init__(self, store):
            self.store = store

        def __getattr__(self, name):
            return getattr(self.store, name)

        def train_batch(self, *, num_sequences, **asked):
            batch = self.store.train_batch(num_sequences=num_sequences, **asked)
            return np.concatenate([batch[:2]] * 4)

    Recorded.seen = {}
    train(accumulating(corpus, 0), corpus, tmp_path / "first", build=FirstPart, stop_after=1)
    assert part_norm == pytest.approx(Recorded.seen[0][0], rel=1e-4)
    assert part_norm > whole_norm


class Half:
    """One rank's part of two of every batch."""

    def __init__(self, store, half):
        self.store, self.half = store, half

    def __getattr__(self, name):
        return getattr(self.store, name)

    def train_batch(self, *, num_sequences, **asked):
        rows = num_sequences // 2
        batch = self.store.train_batch(num_sequences=num_sequences, **asked)
        return np.concatenate([batch[self.half * rows : (self.half + 1) * rows]] * 2)


def test_ranks_without_accumulation_measure_each_ones_own_gradient(
    two_ranks, one_rank, corpus, tmp_path
):
    """Held against one rank that computes either's part at the same step; all of it up to
    rounding.
    """
    squares = []

    class Halves(Trainer):
        def gradients(self, step):
            if step == 4:
                whole = self.store
                for half in (0, 1):
                    self.store = Half(whole, half)
                    squares.append(super().gradients(step)[1].item() ** 2)
                self.store = whole
            found = super().gradients(step)
            if step == 4:
                squares.append(found[1].item() ** 2)
            return found

    decision = tiny_decision(corpus)
    assert train(decision, corpus, tmp_path, build=Halves, stop_after=5).exit_code == 0
    [(signal, noise), *_] = manifest_of(two_ranks / "plain" / "run" / CHECKPOINTS, 8).carried[
        "BatchNoise"
    ]
    tokens = decision.batch_tokens
    assert signal + noise / tokens == pytest.approx(squares[2], rel=1e-4)
    assert signal + noise / (tokens / 2) == pytest.approx(np.mean(squares[:2]), rel=1e-4)


def test_measuring_changes_no_bit_and_a_stop_loses_nothing(one_rank, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry, "LEAST_NOISE_SAMPLES", 6)
    monkeypatch.setattr(training, "NOISE_EVERY_STEPS", 10**9)
    train(accumulating(corpus), corpus, tmp_path / "without")
    monkeypatch.setattr(training, "NOISE_EVERY_STEPS", 2)
    train(accumulating(corpus), corpus, tmp_path / "with")
    train(accumulating(corpus), corpus, tmp_path / "stopped", stop_after=17)
    train(accumulating(corpus), corpus, tmp_path / "stopped")
    runs = [tmp_path / name / "run" for name in ("without", "with", "stopped")]
    without, whole, stopped = (
        {line["step"]: line for line in metrics.read(run) if "lr" in line} for run in runs
    )
    assert losses(runs[0]) == losses(runs[1]) == losses(runs[2])
    told = {step: [line.get(name) for name in COLUMNS] for step, line in whole.items()}
    assert told == {step: [line.get(name) for name in COLUMNS] for step, line in stopped.items()}
    assert not any(any(line.get(name) for name in COLUMNS) for line in without.values())
    shown = [step for step, values in told.items() if values[1] is not None]
    assert shown
    assert all(step % 2 == 0 and step >= 12 for step in shown)


def test_a_run_in_one_pass_tells_nothing(one_rank, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "NOISE_EVERY_STEPS", 1)
    monkeypatch.setattr(telemetry, "LEAST_NOISE_SAMPLES", 5)
    train(care_decision(corpus), corpus, tmp_path)
    assert not any(name in line for line in metrics.read(tmp_path / "run") for name in COLUMNS)


def test_splits_of_a_planted_gradient_are_right_on_average():
    rng, told = np.random.default_rng(0), []
    for _ in range(4000):
        noise_PD = rng.normal(size=(8, 20)) * 3
        gradients_PD = 1.0 + noise_PD
        part, whole = gradients_PD[:2].mean(0), gradients_PD.mean(0)
        told.append(split((2 * 64, part @ part), (8 * 64, whole @ whole)))
    signal, noise = np.mean(told, axis=0)
    assert signal == pytest.approx(20, rel=0.05)
    assert noise == pytest.approx(20 * 9 * 64, rel=0.02)
    with pytest.raises(ValueError, match="must be smaller"):
        split((64, 1.0), (64, 1.0))


@pytest.mark.parametrize(
    ("scale", "low", "high", "said"),
    [
        (
            2e5,
            1.5e5,
            3e5,
            "200,000 tokens (150,000 to 300,000); the batch of 256 tokens is under it",
        ),
        (
            np.nan,
            100.0,
            np.nan,
            "not determined (100 or more); the batch of 256 tokens is about it",
        ),
        (100.0, 50.0, 200.0, "100 tokens (50 to 200); the batch of 256 tokens is over it"),
    ],
)
def test_the_watch_shows_the_newest_noise_scale_and_calls_no_alarm(scale, low, high, said):
    rng = np.random.default_rng(0)
    told = {name: np.full(NUM_STEPS, np.nan) for name in COLUMNS}
    for name, value in zip(COLUMNS, (scale, low, high), strict=True):
        told[name][700] = value
    losses_nats = losses_of(rng)
    found, plain = (
        judge(decision(), columns_of(losses_nats, **told)),
        judge(decision(), columns_of(losses_nats)),
    )
    assert found.alerts == plain.alerts
    assert any(said in line for line in figure_lines(found.figures))
    assert plain.figures["noise_scale_interval_tokens"] is None
    assert not any("noise scale" in line for line in figure_lines(plain.figures))
