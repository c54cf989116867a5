"""Tests of the gradient noise scale that a main run measures.

The noise scale is the batch size in tokens at which the noise of the gradient is as large as the
gradient. A run that accumulates gradients measures it from the gradient of the first pass of a step
and the gradient of the whole step. The measurement survives a stop, and `forerun watch` shows it.
"""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from main_run import QUIET_TORCH, make_tiny_decision, read_losses
from planted_watch import NUM_STEPS, draw_losses, make_columns, make_watched_decision
from spike_case import make_spike_decision, train

from forerun._launcher.main_run import metrics_file
from forerun._launcher.main_run.checkpoint_folders import CHECKPOINTS
from forerun._launcher.main_run.trainer import telemetry
from forerun._launcher.main_run.trainer.callbacks import StepInfo
from forerun._launcher.main_run.trainer.checkpoints import check_checkpoint, get_checkpoint_folder
from forerun._launcher.main_run.trainer.training import Trainer
from forerun._launcher.main_run.watch.judgment import judge
from forerun._launcher.main_run.watch.status_text import format_figures
from forerun._proxies.core.noise_scale import estimate_moments

pytestmark = QUIET_TORCH
COLUMNS = ("noise_scale_tokens", "noise_scale_low_tokens", "noise_scale_high_tokens")
"""Columns of the noise scale and of its interval in a metrics file."""


def make_accumulating_decision(corpus, sequences=2, **changes):
    """Return a decision that trains in passes of `sequences` sequences; 0 means one pass."""
    decision = make_spike_decision(corpus, **changes)
    layout = dataclasses.replace(decision.parallelism, microbatch_sequences=sequences)
    return dataclasses.replace(decision, parallelism=layout)


class RecordingTrainer(Trainer):
    """A trainer that records the gradient norms of each step and of its first pass."""

    recorded: dict = {}  # noqa: RUF012
    """The norm of a step, and (share of the batch, norm) of its first pass, by step."""

    def compute_gradients(self, step):
        gradients = super().compute_gradients(step)
        first_pass = self.first_pass
        if first_pass is not None:
            first_pass = (first_pass[0], first_pass[1].item())
        self.recorded[step] = (gradients[1].item(), first_pass)
        return gradients


class FirstPassStore:
    """A corpus whose batches repeat the first two of their eight sequences."""

    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        return getattr(self.store, name)

    def read_train_batch(self, *, num_sequences, **kwargs):
        batch = self.store.read_train_batch(num_sequences=num_sequences, **kwargs)
        return np.concatenate([batch[:2]] * 4)


class FirstPassTrainer(RecordingTrainer):
    """A trainer whose batches hold only the sequences of the first pass."""

    def compute_gradients(self, step):
        self.store = FirstPassStore(self.store)
        return super().compute_gradients(step)


def test_noise_is_measured_from_the_gradient_of_the_first_pass(
    one_rank, corpus, tmp_path, monkeypatch
):
    """The gradient norm of the first pass equals that of a run on its sequences alone."""
    monkeypatch.setattr(telemetry, "NOISE_EVERY_STEPS", 1)
    monkeypatch.setattr(RecordingTrainer, "recorded", {})
    in_passes = make_accumulating_decision(corpus)
    train(in_passes, corpus, tmp_path / "passes", build=RecordingTrainer, stop_after=1)
    batch_norm, (share, first_pass_norm) = RecordingTrainer.recorded[0]
    assert share == 0.25

    in_one_pass = make_accumulating_decision(corpus, 0)
    train(in_one_pass, corpus, tmp_path / "first", build=FirstPassTrainer, stop_after=1)
    assert first_pass_norm == pytest.approx(RecordingTrainer.recorded[0][0], rel=1e-4)
    assert first_pass_norm > batch_norm


class HalfStore:
    """A corpus whose batches have one half twice: the half that one of two ranks reads."""

    def __init__(self, store, half):
        self.store, self.half = store, half

    def __getattr__(self, name):
        return getattr(self.store, name)

    def read_train_batch(self, *, num_sequences, **kwargs):
        rows = num_sequences // 2
        batch = self.store.read_train_batch(num_sequences=num_sequences, **kwargs)
        return np.concatenate([batch[self.half * rows : (self.half + 1) * rows]] * 2)


def test_ranks_without_accumulation_measure_the_gradient_of_each_rank(
    two_rank_runs, one_rank, corpus, tmp_path
):
    """The moments of two ranks equal those from one rank that computes both parts of a step.

    They are equal up to rounding.
    """
    squares = []

    class HalvesTrainer(Trainer):
        def compute_gradients(self, step):
            if step == 4:
                store = self.store
                for half in (0, 1):
                    self.store = HalfStore(store, half)
                    squares.append(super().compute_gradients(step)[1].item() ** 2)
                self.store = store
            gradients = super().compute_gradients(step)
            if step == 4:
                squares.append(gradients[1].item() ** 2)
            return gradients

    decision = make_tiny_decision(corpus)
    ending = train(decision, corpus, tmp_path, build=HalvesTrainer, stop_after=5)
    assert ending.exit_code == 0
    folder = get_checkpoint_folder(two_rank_runs / "plain" / "run" / CHECKPOINTS, 8)
    digest = json.loads((folder / "manifest.json").read_bytes())["manifest"]["digest"]
    [(signal, noise), *_] = check_checkpoint(folder, digest).carried["BatchNoise"]
    # A gradient of B tokens has the expected squared norm |G|^2 + noise / B.
    tokens = decision.batch_tokens
    *squares_of_halves, square_of_batch = squares
    assert signal + noise / tokens == pytest.approx(square_of_batch, rel=1e-4)
    assert signal + noise / (tokens / 2) == pytest.approx(np.mean(squares_of_halves), rel=1e-4)


def test_noise_measurement_changes_no_loss_and_survives_a_stop(
    one_rank, corpus, tmp_path, monkeypatch
):
    monkeypatch.setattr(telemetry, "MIN_NOISE_SAMPLES", 6)
    monkeypatch.setattr(telemetry, "NOISE_EVERY_STEPS", 10**9)
    train(make_accumulating_decision(corpus), corpus, tmp_path / "without")
    monkeypatch.setattr(telemetry, "NOISE_EVERY_STEPS", 2)
    train(make_accumulating_decision(corpus), corpus, tmp_path / "with")
    train(make_accumulating_decision(corpus), corpus, tmp_path / "stopped", stop_after=17)
    train(make_accumulating_decision(corpus), corpus, tmp_path / "stopped")
    runs = [tmp_path / name / "run" for name in ("without", "with", "stopped")]
    without, measured, stopped = (
        {line["step"]: line for line in metrics_file.read_lines(run) if "lr" in line}
        for run in runs
    )
    assert read_losses(runs[0]) == read_losses(runs[1]) == read_losses(runs[2])
    columns = {step: [line.get(name) for name in COLUMNS] for step, line in measured.items()}
    stopped_columns = {step: [line.get(name) for name in COLUMNS] for step, line in stopped.items()}
    assert columns == stopped_columns
    assert not any(any(line.get(name) for name in COLUMNS) for line in without.values())
    measured_steps = [step for step, values in columns.items() if values[1] is not None]
    assert measured_steps
    assert all(step % 2 == 0 and step >= 12 for step in measured_steps)


def test_state_of_a_save_does_not_change_while_training_goes_on():
    """A thread writes the state; a later measurement in it would count twice after a resume."""
    noise = telemetry.BatchNoise()
    noise.run = SimpleNamespace(first_pass=(0.25, torch.tensor(3.0)))
    noise.begin(4, [[1.0, 2.0]])
    state = noise.get_state()
    noise.before_update(StepInfo(step=4, num_tokens=512, loss_nats=1.0, grad_norm=2.0))
    assert state == [[1.0, 2.0]]
    assert len(noise.get_state()) == 2


def test_run_in_one_pass_measures_no_noise(one_rank, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry, "NOISE_EVERY_STEPS", 1)
    monkeypatch.setattr(telemetry, "MIN_NOISE_SAMPLES", 5)
    train(make_spike_decision(corpus), corpus, tmp_path)
    assert not any(
        name in line for line in metrics_file.read_lines(tmp_path / "run") for name in COLUMNS
    )


def test_estimated_moments_of_a_planted_gradient_are_unbiased():
    """The planted gradient has 20 elements of 1, with noise of standard deviation 3 per sequence.

    So its squared norm is 20, and the noise is 20 * 9 per sequence of 64 tokens.
    """
    # P: sequences, D: elements of the gradient
    rng, estimates = np.random.default_rng(0), []
    for _ in range(4000):
        noise_PD = rng.normal(size=(8, 20)) * 3
        gradients_PD = 1.0 + noise_PD
        part, mean = gradients_PD[:2].mean(0), gradients_PD.mean(0)
        estimates.append(estimate_moments((2 * 64, part @ part), (8 * 64, mean @ mean)))
    signal, noise = np.mean(estimates, axis=0)
    assert signal == pytest.approx(20, rel=0.05)
    assert noise == pytest.approx(20 * 9 * 64, rel=0.02)
    with pytest.raises(ValueError, match="must be smaller"):
        estimate_moments((64, 1.0), (64, 1.0))


@pytest.mark.parametrize(
    ("scale", "low", "high", "expected"),
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
def test_watch_shows_the_newest_noise_scale_without_an_alert(scale, low, high, expected):
    columns = {name: np.full(NUM_STEPS, np.nan) for name in COLUMNS}
    for name, value in zip(COLUMNS, (scale, low, high), strict=True):
        columns[name][700] = value
    losses_nats = draw_losses(np.random.default_rng(0))
    measured = judge(make_watched_decision(), make_columns(losses_nats, **columns))
    plain = judge(make_watched_decision(), make_columns(losses_nats))
    assert measured.alerts == plain.alerts
    assert any(expected in line for line in format_figures(measured.figures))
    assert plain.figures.noise_scale_interval_tokens is None
    assert not any("noise scale" in line for line in format_figures(plain.figures))
