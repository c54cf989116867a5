"""Tests of the checks of a main run's layout: every degree that does not divide is reported."""

import dataclasses

from forerun._launcher.main_run.estimates.layout import find_layout_problems
from forerun._launcher.main_run.frozen.frozen import Parallelism
from forerun._proxies.core.shape import Shape

SMALL = Shape(
    num_layers=4, width=128, num_heads=8, num_kv_heads=4, ffn_width=256, vocab_size=512, seq_len=64
)


def test_every_degree_that_does_not_divide_is_reported():
    degrees = Parallelism(
        data_parallel_shard=3, tensor=3, pipeline=5, context=5, microbatch_sequences=2
    )
    problems = find_layout_problems(degrees, SMALL, 64 * 8)
    names = (
        "num_kv_heads = 4",
        "ffn_width = 256",
        "vocab_size = 512",
        "num_layers = 4",
        "seq_len = 64",
        "batch_tokens",
    )
    assert len(problems) == len(names)
    assert all(any(name in problem for problem in problems) for name in names)
    staged = Parallelism(data_parallel_shard=1, pipeline=2, microbatch_sequences=1)
    tied = dataclasses.replace(SMALL, tied=True)
    assert "model.tied = false" in find_layout_problems(staged, tied, 64 * 8)[0]
    assert "has 1 micro-batches" in find_layout_problems(staged, SMALL, 64)[0]
    even = Parallelism(
        data_parallel_shard=2, tensor=4, pipeline=2, context=2, microbatch_sequences=1
    )
    assert find_layout_problems(even, SMALL, 64 * 8) == []
