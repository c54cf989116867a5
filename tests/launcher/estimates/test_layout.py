"""Layouts of a main run: what they do not divide is said of every axis."""

import dataclasses

from launcher.estimates.layout import layout_problems
from launcher.frozen.frozen import Parallelism
from proxies.core.shape import Shape

SMALL = Shape(
    num_layers=4, width=128, num_heads=8, num_kv_heads=4, ffn_width=256, vocab_size=512, seq_len=64
)


def test_every_axis_says_what_it_does_not_divide():
    degrees = Parallelism(
        data_parallel_shard=3, tensor=3, pipeline=5, context=5, microbatch_sequences=2
    )
    said = layout_problems(degrees, SMALL, 64 * 8)
    names = (
        "num_kv_heads = 4",
        "ffn_width = 256",
        "vocab_size = 512",
        "num_layers = 4",
        "seq_len = 64",
        "batch_tokens",
    )
    assert len(said) == len(names)
    assert all(any(name in one for one in said) for name in names)
    staged = Parallelism(data_parallel_shard=1, pipeline=2, microbatch_sequences=1)
    tied = dataclasses.replace(SMALL, tied=True)
    assert "model.tied = false" in layout_problems(staged, tied, 64 * 8)[0]
    assert "has 1 micro-batches" in layout_problems(staged, SMALL, 64)[0]
    even = Parallelism(
        data_parallel_shard=2, tensor=4, pipeline=2, context=2, microbatch_sequences=1
    )
    assert layout_problems(even, SMALL, 64 * 8) == []
