"""Values of plans for CPUs that depend on the vocabulary. Standard library only.

The presets for CPUs were made for a vocabulary of bytes. `benchmarks/statistics/vocabularies.py`
measures what a learned vocabulary changes at their size (width 32, 200 steps of 512 tokens):

| vocabulary | best rate, log2 | sd between seeds | parameters at width 64 | bytes per token |
| --- | --- | --- | --- | --- |
| 256 | -5.7 | 0.66 % of the loss | 0.12e6 | 1 |
| 1,000 | -4.6 | 0.63 % | 0.21e6 | 2.57 |
| 4,096 | -3.8 | 0.65 % | 0.61e6 | 3.35 |
| 16,384 | -3.9 | 0.51 % | 2.2e6 | 3.81 |

At base width 256 and 6.5e6 tokens, the best rate with a vocabulary of 32,768 lies half an octave
above that with bytes (benchmarks/results/gpu_transfer_bpe-mup.csv), so the presets for GPUs do not
depend on the vocabulary.
"""

from __future__ import annotations

import bisect
import math

BYTES_VOCAB = 256
"""Size of a vocabulary of bytes."""
MAX_SHIFT_OCTAVES = 2.0
"""Maximum shift of the learning-rate range: the table shows no further shift above 4,096 tokens."""
MIN_WIDTH_MULTIPLE = 2
"""Minimum width of the main run divided by the base width; below it there is nothing to
transfer.
"""
BYTES_PER_TOKEN = ((256, 1.0), (1000, 2.57), (4096, 3.35), (16384, 3.81))
"""Vocabulary sizes of byte-level BPEs, and their bytes of Python source per token."""
FLOPS_PER_SQUARE = 120.0
"""FLOPs 6ND divided by N^2, at D = 20N tokens (arXiv 2203.15556): 6 * 20."""


def shift_learning_rate_range(
    on_bytes: tuple[float, float], vocab_size: int
) -> tuple[float, float]:
    """Return the range of learning rates to search: the range for bytes, moved up by half an octave
    per doubling of the vocabulary, in whole octaves.

    Args:
        on_bytes: Range for a vocabulary of 256.
        vocab_size: Number of entries of the vocabulary; from 4,096 on the range moves no further.
    """
    octaves = 0.5 * math.log2(max(vocab_size, BYTES_VOCAB) / BYTES_VOCAB)
    factor = 2.0 ** round(min(octaves, MAX_SHIFT_OCTAVES))
    return on_bytes[0] * factor, on_bytes[1] * factor


def choose_budget(on_bytes: float, params: int) -> float:
    """Return the main run's budget in FLOPs: the preset's, or that of a model with `params`
    parameters if that is more.

    Args:
        on_bytes: Budget of the preset.
        params: Number of parameters of the smallest main run, `MIN_WIDTH_MULTIPLE` times as wide as
            the base.
    """
    return max(on_bytes, float(f"{FLOPS_PER_SQUARE * params**2:.2g}"))


def scale_margin(on_bytes: float, vocab_size: int) -> float:
    """Return the margin in nats per token that is the same loss per byte of text as the margin for
    bytes.

    Args:
        on_bytes: Margin for a vocabulary of 256.
        vocab_size: Number of entries of the vocabulary; the table is interpolated in its logarithm
            and constant beyond its ends.
    """
    sizes, num_bytes = zip(*BYTES_PER_TOKEN, strict=True)
    place = bisect.bisect_right(sizes, vocab_size)
    if place in (0, len(sizes)):
        factor = num_bytes[min(place, len(sizes) - 1)]
    else:
        low, high = sizes[place - 1 : place + 1]
        share = math.log(vocab_size / low) / math.log(high / low)
        factor = num_bytes[place - 1] + share * (num_bytes[place] - num_bytes[place - 1])
    return float(f"{on_bytes * factor:.2g}")
