"""How much work a step of a main run is, and what share of the machine's peak it makes: the run's own header.

MFU (arXiv 2204.02311, appendix B) counts what the model needs, by the convention `causal` of `proxies.flops`; HFU
counts also what activation checkpointing computes again.
"""

from __future__ import annotations

import datetime
import re
from itertools import pairwise

import torch

from launcher.frozen import Decision, Parallelism
from launcher.metrics import Header
from launcher.reference import GPUS
from proxies import canon
from proxies.flops import flops_per_token
from proxies.shape import Shape

_OTHER_FORMS = {"PCIe", "NVL"}
"""Of a card, slower than the one of the reference table."""


def header(decision: Decision, step: int, num_ranks: int, device: torch.device) -> Header:
    """What the lines of an attempt that begins after `step` updates belong to."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Header(
        digest=decision.digest,
        step=step,
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        num_ranks=num_ranks,
        device=name,
        model_flops_per_token=float(flops_per_token(decision.shape)),
        hardware_flops_per_token=hardware_flops_per_token(decision.shape, decision.parallelism),
        peak_flops_per_second=peak_flops_per_second(name) if decision.precision == "bfloat16" else None,
    )


def hardware_flops_per_token(shape: Shape, parallelism: Parallelism) -> float:
    """With what is computed twice: the blocks' forward pass, a third of their work, under `full`.

    `selective` keeps the products of matrices and attention, which is all that the convention counts.
    """
    model = flops_per_token(shape)
    readout = 6 * shape.vocab_size * shape.width
    return model + (model - readout) / 3 if parallelism.activation_checkpointing == "full" else float(model)


def peak_flops_per_second(device_name: str) -> float | None:
    """Dense bfloat16 peak of the device that a driver names so; None where the reference table has no such one."""
    words = re.split(r"[^A-Za-z0-9]+", device_name)
    names = {*words, *(first + second for first, second in pairwise(words))}  # GeForce RTX 4090
    found = [gpu.peak_flops for name, gpu in GPUS.items() if name in names and not names & _OTHER_FORMS]
    return found[0] if found else None


def shares_of_peak(header: Header, tokens_per_second: float) -> dict[str, canon.Json]:
    """`mfu` and `hfu` of a step, of all ranks together; nothing where the peak is not known."""
    if header.peak_flops_per_second is None:
        return {}
    reached = tokens_per_second / (header.peak_flops_per_second * header.num_ranks)
    return {"mfu": reached * header.model_flops_per_token, "hfu": reached * header.hardware_flops_per_token}
