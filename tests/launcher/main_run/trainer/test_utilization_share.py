"""Tests of the device's peak FLOP/s, and of the share of it that a step reaches (`mfu`)."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from forerun._launcher.main_run.metrics_file import AttemptStart
from forerun._launcher.main_run.trainer import telemetry
from forerun._launcher.main_run.trainer.callbacks import StepInfo

HEADER = AttemptStart(
    digest="d",
    step=0,
    started_at="",
    num_ranks=4,
    device="",
    model_flops_per_token=1e9,
    peak_flops_per_second=1e15,
)


def build_line(header):
    """Return the metrics line of a step that trains 1.6 million tokens in a second."""
    run = SimpleNamespace(
        header=header,
        optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}]),
        decision=SimpleNamespace(shape=SimpleNamespace(seq_len=32)),
        count_sequences=lambda step: (100_000, 50_000),
    )
    info = StepInfo(step=1, num_tokens=1_600_000, loss_nats=3.0, grad_norm=1.0)
    return telemetry.build_step_line(run, info, seconds=1.0)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("cpu", None),
    ],
)
def test_peak_is_known_by_the_devices_exact_name(name, peak):
    assert telemetry.look_up_peak(name) == peak


def test_utilization_counts_all_ranks():
    assert build_line(HEADER)["mfu"] == pytest.approx(0.4)


def test_utilization_is_left_out_if_the_peak_is_unknown():
    assert "mfu" not in build_line(dataclasses.replace(HEADER, peak_flops_per_second=None))
