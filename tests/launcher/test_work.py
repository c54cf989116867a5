"""The device's peak, and the share of it that a run reaches."""

from __future__ import annotations

import pytest

from launcher.base.metrics import Header
from launcher.trainer import training


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
def test_a_peak_is_told_for_the_device_that_it_is_of(name, peak):
    assert training.peak_flops_per_second(name) == peak


def test_shares_are_of_all_ranks_together():
    header = Header(
        digest="d",
        step=0,
        started_at="",
        num_ranks=4,
        device="",
        model_flops_per_token=1e9,
        peak_flops_per_second=1e15,
    )
    assert training.share_of_peak(header, 1.6e6) == {"mfu": pytest.approx(0.4)}
