"""Tests of the shape that is chosen for a size: whole layers and heads, with or without a template,
divisible by the degree of tensor parallelism, counted exactly.
"""

import itertools
import math

import pytest

from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.flops import compute_flops_per_token, count_params
from forerun._proxies.core.shape import Shape
from forerun._scaling_fits.allocation.shapes import (
    ShapeError,
    ShapeRequest,
    Template,
    WidthCount,
    choose_shape,
    compute_count_per_layer,
    compute_published_aspect,
    compute_published_layers,
    interpolate_count,
)

SMALL = Shape(
    num_layers=2, width=64, num_heads=4, num_kv_heads=2, ffn_width=168, vocab_size=256, seq_len=64
)
DEEP = Shape(
    num_layers=24,
    width=256,
    num_heads=4,
    num_kv_heads=4,
    ffn_width=704,
    vocab_size=50_304,
    seq_len=1024,
)


def choose_from_template(template, params, **changes):
    """Return the choice of a shape for a size. It keeps a template with some fields changed."""
    return choose_shape(ShapeRequest(params=params, template=Template(shape=template, **changes)))


@pytest.mark.parametrize(("params", "width", "heads"), [(1e9, 1536, 24), (7e9, 4608, 72)])
def test_number_of_heads_has_a_large_power_of_two_at_sizes_with_a_nearer_width(
    params, width, heads
):
    """The widths nearest in parameters are 1,664 with 26 heads and 4,736 with 74 heads. Both
    numbers of heads have only one factor of 2.
    """
    choice = choose_from_template(DEEP, params, width_multiple=64)
    shape = choice.option.shape
    assert (shape.num_layers, shape.width, shape.num_heads, shape.head_dim) == (
        24,
        width,
        heads,
        64,
    )


@pytest.mark.parametrize(("ratio", "degree"), [(1, 1), (2, 8), (4, 2)])
def test_template_is_kept_and_heads_divide_evenly_at_a_near_size(ratio, degree):
    for params, head_dim, ffn in itertools.product([3e8, 2.7e9, 1.3e11], [64, 128], [2.75, 4.0]):
        shape = Shape(
            num_layers=24,
            width=4 * head_dim,
            num_heads=4,
            num_kv_heads=4 // ratio,
            seq_len=1024,
            ffn_width=int(4 * head_dim * ffn),
            vocab_size=32_768,
        )
        option = choose_from_template(
            shape, params, width_multiple=64, tensor_parallel=degree
        ).option
        chosen_shape = option.shape
        assert (
            chosen_shape.num_layers,
            chosen_shape.head_dim,
            chosen_shape.vocab_size,
            chosen_shape.seq_len,
        ) == (
            24,
            head_dim,
            32_768,
            1024,
        )
        assert (
            chosen_shape.num_heads == ratio * chosen_shape.num_kv_heads
            and chosen_shape.ffn_width == ffn * chosen_shape.width
        )
        assert (
            chosen_shape.num_kv_heads % degree
            == chosen_shape.ffn_width % degree
            == chosen_shape.width % 64
            == 0
        )
        # Distance between widths that can be divided by the degree
        step = math.lcm(ratio * degree * head_dim, 64)
        assert (
            abs(math.log(option.params_ratio)) < 0.3 + step / chosen_shape.width
            or chosen_shape.width == step
        )
        if chosen_shape.width >= 1024:
            common_divisor = math.gcd(8, chosen_shape.num_heads)
            assert common_divisor >= 4 or abs(math.log(option.params_ratio)) < 0.1, (
                params,
                chosen_shape,
            )


def test_width_does_not_fall_as_parameters_grow():
    widths = [
        choose_from_template(DEEP, 1e8 * 1.07**step, width_multiple=64).option.shape.width
        for step in range(80)
    ]
    assert widths == sorted(widths) and len(set(widths)) > 15


@pytest.mark.parametrize(("params", "family"), [(2e4, "llama"), (6e7, "gpt2")])
def test_nearest_width_is_chosen_below_1024(params, family):
    template = Shape(
        num_layers=2,
        width=64,
        num_heads=4,
        num_kv_heads=2,
        ffn_width=168,
        vocab_size=256,
        seq_len=64,
        family=family,
        tied=family == "gpt2",
    )
    choice = choose_from_template(template, params, width_multiple=32)
    all_shapes = [template.at_width(width) for width in range(32, 4000, 32)]
    best = min(all_shapes, key=lambda shape: abs(math.log(count_params(shape).total / params)))
    option = choice.option
    if best.width < 1024:
        assert option.shape == best
    assert option.params == count_params(option.shape).total
    assert option.flops_per_token == compute_flops_per_token(option.shape)
    assert option.params_ratio == option.params / params


def test_degree_of_the_request_overrides_that_of_the_template():
    request = ShapeRequest(params=1e9, template=Template(shape=DEEP), tensor_parallel=8)
    shape = choose_shape(request).option.shape
    assert shape.num_layers == 24
    assert shape.num_heads % 8 == 0
    assert shape.ffn_width * 256 == 704 * shape.width


def test_impossible_requests_are_refused():
    with pytest.raises(SpecError) as caught:
        ShapeRequest(params=math.nan, tensor_parallel=0, vocab_size=1, seq_len=0)
    assert len(caught.value.problems) == 4
    with pytest.raises(SpecError, match=r"width_multiple = 0.*tensor_parallel = 0"):
        Template(shape=SMALL, width_multiple=0, tensor_parallel=0)
    with pytest.raises(ShapeError, match="the smallest shape of vocabulary 50304"):
        choose_shape(ShapeRequest(params=1e6, vocab_size=50_257))


@pytest.mark.parametrize(("params", "degree"), [(3e8, 1), (4e11, 8)])
def test_chosen_shape_is_divisible_and_near_the_size(params, degree):
    choice = choose_shape(ShapeRequest(params=params, tensor_parallel=degree))
    option, shape = choice.option, choice.option.shape
    assert shape.vocab_size % (128 * degree) == 0
    assert shape.num_heads % degree == shape.num_kv_heads % degree == 0
    assert shape.width % shape.num_heads == 0 and shape.width % (shape.head_dim * degree) == 0
    assert shape.ffn_width % degree == 0 and shape.num_heads % shape.num_kv_heads == 0
    if shape.width >= 2048:
        assert shape.width % 128 == 0 and shape.ffn_width % 256 == 0
    assert option.params == count_params(shape).total
    assert option.flops_per_token == compute_flops_per_token(shape)
    assert option.params_ratio == option.params / params
    assert 0.9 < option.params_ratio < 1.1
    assert 40 < option.aspect_ratio < 256


def test_shape_of_llama_3_8b_is_chosen_for_its_size():
    best = choose_shape(ShapeRequest(params=8.03e9, vocab_size=128_256, seq_len=8192)).option.shape
    assert (
        best.num_layers,
        best.width,
        best.num_heads,
        best.num_kv_heads,
        best.ffn_width,
        best.vocab_size,
    ) == (
        32,
        4096,
        32,
        8,
        14_336,
        128_256,
    )


def test_requested_fields_are_kept_and_defaults_are_reported():
    choice = choose_shape(ShapeRequest(params=5e8, vocab_size=1000, seq_len=512))
    best = choice.option.shape
    assert (best.vocab_size, best.family, best.tied, best.seq_len) == (1024, "llama", False, 512)
    assert best.ffn_width == pytest.approx(3.5 * best.width, rel=0.2)
    assert choice.assumed[0] == "vocabulary padded to 1024, a multiple of 128"
    assert len(choose_shape(ShapeRequest(params=5e8)).assumed) >= 5


@pytest.mark.parametrize("width_per_layer", [16.0, 64.0, 100.0])
@pytest.mark.parametrize("params", [3e5, 1e7, 7e9])
def test_depth_follows_the_width_by_an_aspect_rule(width_per_layer, params):
    option = choose_from_template(SMALL, params, width_multiple=32, width_per_layer=width_per_layer)
    shape = option.option.shape
    assert shape.num_layers == max(1, math.floor(shape.width / width_per_layer + 0.5))
    assert shape.width % 32 == 0
    # One layer more, or one step of the width, changes a small model by about this factor.
    max_ratio = 1.5 if params < 1e6 else 1.25
    assert 1 / max_ratio < option.option.params_ratio < max_ratio


def test_counted_parameters_grow_with_the_layers():
    counts = {
        2: WidthCount(constant=0, linear=512, square=24),
        4: WidthCount(constant=0, linear=512, square=48),
    }
    assert interpolate_count(counts, 7).count_params(64) == 512 * 64 + 7 * 12 * 64**2
    assert interpolate_count({2: counts[2]}, 7) is None
    template = Template(
        shape=SMALL.at_depth(2),
        width_per_layer=16.0,
        count=counts[2],
        per_layer=compute_count_per_layer(counts),
        width_multiple=16,
    )
    shape = choose_shape(ShapeRequest(params=1e6, template=template)).option
    assert (
        shape.params == 512 * shape.shape.width + shape.shape.num_layers * 12 * shape.shape.width**2
    )
    assert 0.6 < shape.params_ratio < 1.5


# Parameters, vocabulary, layers, width
PUBLISHED = {
    "GPT-2": (1.24e8, 50_257, 12, 768),
    "OLMo 2 1B": (1.48e9, 100_352, 16, 2048),
    "Qwen2.5 3B": (3.09e9, 151_936, 36, 2048),
    "Llama 2 7B": (6.74e9, 32_000, 32, 4096),
    "Llama 3 8B": (8.03e9, 128_256, 32, 4096),
    "Llama 2 13B": (1.30e10, 32_000, 40, 5120),
    "OLMo 2 32B": (3.22e10, 100_352, 64, 5120),
    "Llama 3 70B": (7.06e10, 128_256, 80, 8192),
    "GPT-3": (1.75e11, 50_257, 96, 12_288),
    "Llama 3.1 405B": (4.06e11, 128_256, 126, 16_384),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_depth_and_width_are_near_those_of_published_models(name):
    params, vocab_size, layers, width = PUBLISHED[name]
    shape = choose_shape(ShapeRequest(params=params, vocab_size=vocab_size)).option.shape
    max_ratio = 1.25 if params > 5e9 else 2.0
    assert 1 / max_ratio <= shape.num_layers / layers <= max_ratio, shape
    assert 1 / max_ratio <= shape.width / width <= max_ratio, shape


def test_depth_grows_with_size_within_and_beyond_published_sizes():
    layers = [
        compute_published_layers(10**power)
        for power in (6, 7, 8, 9, 9.5, 10, 10.5, 11, 11.5, 12, 13)
    ]
    assert layers == sorted(layers)
    assert compute_published_layers(6.74e9) == pytest.approx(32)
    assert all(
        30 < compute_published_aspect(10**power) < 200 for power in (6, 8, 9, 10, 11, 12, 13)
    )
