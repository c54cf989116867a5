"""Tests of model shapes: their limits, and the shapes derived from them at another width."""

import dataclasses

import pytest
from proxy_cases import BASE, TINY

from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.shape import Shape


def list_problems(build):
    """Return the problems of the `SpecError` that `build()` raises."""
    with pytest.raises(SpecError) as caught:
        build()
    return caught.value.problems


def test_all_problems_of_a_shape_are_listed():
    problems = list_problems(
        lambda: Shape(
            num_layers=0,
            width=-1,
            num_heads=2.0,
            num_kv_heads=True,
            ffn_width="8",
            vocab_size=1,
            seq_len=0,
            family="gpt",
            tied=1,
            qk_norm="no",
        )
    )
    assert [problem.split(" ")[0] for problem in problems] == [
        "num_layers",
        "width",
        "num_heads",
        "num_kv_heads",
        "ffn_width",
        "seq_len",
        "vocab_size",
        "family",
        "tied",
        "qk_norm",
    ]


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"num_heads": 3}, "num_heads = 3 does not divide width = 16"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads = 3 does not divide num_heads = 4"),
        ({"num_heads": 16}, "head_dim = 1 is odd"),
        ({"num_layers": 10_001}, "num_layers = 10001: must be at most 10000"),
    ],
)
def test_inconsistent_shape_is_refused(changes, problem):
    (message,) = list_problems(lambda: dataclasses.replace(TINY, **changes))
    assert message.startswith(problem)


def test_at_width_keeps_the_ratios():
    wide = BASE.at_width(64)
    assert wide == dataclasses.replace(BASE, width=64, num_heads=8, num_kv_heads=4, ffn_width=192)
    assert wide.at_width(16) == BASE
    assert (wide.head_dim, wide.num_heads // wide.num_kv_heads) == (BASE.head_dim, 2)


@pytest.mark.parametrize(
    "shape, width, problem",
    [
        (BASE, 20, "width = 20 is not a multiple of the head dim 8"),
        (BASE, 24, "width = 24 has 3 heads, not a multiple of 2 per kv head"),
        (dataclasses.replace(BASE, ffn_width=45), 24, "width = 24 gives the FFN width 67.5"),
    ],
)
def test_width_that_does_not_fit_the_ratios_is_refused(shape, width, problem):
    assert problem in list_problems(lambda: shape.at_width(width))[0]
