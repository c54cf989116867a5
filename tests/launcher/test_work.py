"""FLOPs a token and the device's peak: what MFU and HFU are made of."""

from __future__ import annotations

import pytest

from launcher.base.metrics import Header
from launcher.frozen.frozen import Parallelism
from launcher.trainer import training
from proxies.core.flops import flops_per_token
from proxies.core.shape import Shape

SHAPE = Shape(num_layers=3, width=64, num_heads=4, num_kv_heads=2, ffn_width=160, vocab_size=512, seq_len=128)


def hardware(kept):
    return training.hardware_flops_per_token(SHAPE, Parallelism(data_parallel_shard=1, activation_checkpointing=kept))


def test_full_recomputation_does_the_blocks_forward_pass_twice():
    model = flops_per_token(SHAPE)
    assert hardware("none") == hardware("selective") == model
    forward_of_blocks = 2 * 3 * (2 * 64 * (64 + 32) + 3 * 64 * 160) + 2 * 3 * 64 * 128
    assert hardware("full") == pytest.approx(model + forward_of_blocks, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA H100 PCIe", None), ("NVIDIA H100 NVL", None), ("NVIDIA RTX A1000", None), ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12), ("cpu", None),
    ],
)  # fmt: skip
def test_a_peak_is_told_for_the_device_that_it_is_of(name, peak):
    assert training.peak_flops_per_second(name) == peak


def test_shares_are_of_all_ranks_together():
    header = Header(
        digest="d", step=0, started_at="", num_ranks=4, device="", model_flops_per_token=1e9,
        hardware_flops_per_token=1.25e9, peak_flops_per_second=1e15,
    )  # fmt: skip
    assert training.shares_of_peak(header, 1.6e6) == {"mfu": pytest.approx(0.4), "hfu": pytest.approx(0.5)}
