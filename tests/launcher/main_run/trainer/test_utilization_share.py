"""Tests of the device's peak FLOPs and of the share of it that a run reaches."""

from __future__ import annotations

import pytest

from forerun._launcher.main_run.metrics_file import AttemptStart
from forerun._launcher.main_run.trainer import telemetry


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
    assert telemetry.peak_flops_per_second(name) == peak


def test_utilization_counts_all_ranks():
    header = AttemptStart(
        digest="d",
        step=0,
        started_at="",
        num_ranks=4,
        device="",
        model_flops_per_token=1e9,
        peak_flops_per_second=1e15,
    )
    assert telemetry.share_of_peak(header, 1.6e6) == {"mfu": pytest.approx(0.4)}
