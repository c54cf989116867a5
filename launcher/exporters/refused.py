"""Trainers that get no export, each with the reason that was found in its own code."""

from __future__ import annotations

REFUSED = {
    "gpt-neox": (
        "its muP loses the scaling of learning rates at the first scheduler step: `learning_rates.py` looks for "
        '`group["width_mult"]`, which mup 1.0.0 never sets (measured: a hidden rate of 0.0025 became 0.01; GPT-NeoX '
        "issue 956, pull request 1087)"
    ),
    "litgpt": (
        "its training loop gives every parameter group one learning rate (`pretrain.py` overwrites each), and its "
        "initial values are fixed at sqrt(2 / 5 / width)"
    ),
    "llm-foundry": (
        "its trainer does not install beside a current torch (Composer 0.32.1 asks for torch < 2.7.1), and it has had "
        "no commit since July 2025"
    ),
    "nanotron": (
        "its package does not import (a circular import in 0.4; the source needs flash_attn), and its use_mup is the "
        "spectral rule, a hidden rate times fan_out / fan_in, of which its own README says that the loss blew up"
    ),
}
"""By the name that users type: why there is no export. A sentence that follows "there is no export to X: "."""
