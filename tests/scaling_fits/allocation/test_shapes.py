"""The nearest width, by trying them all."""

import math

import pytest

from proxies.flops import count_params, flops_per_token
from proxies.shape import Shape
from scaling_fits.allocation.shapes import ShapeError, shape_near

TEMPLATE = Shape(num_layers=2, width=64, num_heads=4, num_kv_heads=2, ffn_width=168, vocab_size=256, seq_len=64)


@pytest.mark.parametrize("params", [1e4, 3.3e5, 1e6, 7.7e6, 2.5e9])
def test_nearest_of_all_widths(params):
    choice = shape_near(TEMPLATE, params, 32)
    every = [TEMPLATE.at_width(width) for width in range(32, 20_000, 32)]
    best = min(every, key=lambda shape: abs(math.log(count_params(shape).total / params)))
    assert choice.shape == best
    assert choice.counts == count_params(best)
    assert choice.flops_per_token == flops_per_token(best)
    assert choice.ratio == count_params(best).total / params


def test_ratios_and_multiple_are_kept():
    choice = shape_near(TEMPLATE, 5e6, 48)
    assert choice.shape.width % 48 == 0
    assert (choice.shape.num_layers, choice.shape.head_dim) == (2, 16)
    assert choice.shape.num_heads == 2 * choice.shape.num_kv_heads
    assert choice.shape.ffn_width * 64 == 168 * choice.shape.width


def test_bad_wishes_are_named():
    with pytest.raises(ShapeError, match=r"params = nan.*width_multiple = 0"):
        shape_near(TEMPLATE, math.nan, 0)
