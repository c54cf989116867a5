"""One chooser: whole shapes near a size, of a study's make or of none, split over degree and tiles,
counted exactly.
"""

import itertools
import math

import pytest

from proxies.core.checks import SpecError
from proxies.core.flops import count_params, flops_per_token
from proxies.core.shape import Shape
from scaling_fits.allocation.shapes import (
    ShapeError,
    ShapeRequest,
    Template,
    WidthCount,
    choose_shape,
    counted_at,
    per_layer,
    published_aspect,
    published_layers,
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


def best_of(template, params, **others):
    return choose_shape(ShapeRequest(params=params, template=Template(shape=template, **others)))


@pytest.mark.parametrize(("params", "width", "heads"), [(1e9, 1536, 24), (7e9, 4608, 72)])
def test_the_two_sizes_that_had_two_answers(params, width, heads):
    """24 layers of 1,664 with 26 heads, and of 4,736 with 74, were nearest in parameters, and split
    by 2 alone.
    """
    found = best_of(DEEP, params, width_multiple=64)
    shape = found.option.shape
    assert (shape.num_layers, shape.width, shape.num_heads, shape.head_dim) == (
        24,
        width,
        heads,
        64,
    )


@pytest.mark.parametrize(("ratio", "degree"), [(1, 1), (2, 8), (4, 2)])
def test_a_template_is_kept_and_heads_split_at_little_cost(ratio, degree):
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
        option = best_of(shape, params, width_multiple=64, tensor_parallel=degree).option
        found = option.shape
        assert (found.num_layers, found.head_dim, found.vocab_size, found.seq_len) == (
            24,
            head_dim,
            32_768,
            1024,
        )
        assert (
            found.num_heads == ratio * found.num_kv_heads and found.ffn_width == ffn * found.width
        )
        assert found.num_kv_heads % degree == found.ffn_width % degree == found.width % 64 == 0
        step = math.lcm(ratio * degree * head_dim, 64)  # between widths that split over the degree
        assert abs(math.log(option.params_ratio)) < 0.3 + step / found.width or found.width == step
        if found.width >= 1024:
            even = math.gcd(8, found.num_heads)
            assert even >= 4 or abs(math.log(option.params_ratio)) < 0.1, (params, found)


def test_more_parameters_never_make_a_narrower_shape():
    widths = [
        best_of(DEEP, 1e8 * 1.07**step, width_multiple=64).option.shape.width for step in range(80)
    ]
    assert widths == sorted(widths) and len(set(widths)) > 15


@pytest.mark.parametrize(("params", "family"), [(2e4, "llama"), (6e7, "gpt2")])
def test_below_a_width_of_1024_the_nearest_of_all_widths(params, family):
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
    found = best_of(template, params, width_multiple=32)
    every = [template.at_width(width) for width in range(32, 4000, 32)]
    best = min(every, key=lambda shape: abs(math.log(count_params(shape).total / params)))
    option = found.option
    if best.width < 1024:
        assert option.shape == best
    assert option.params == count_params(option.shape).total
    assert option.flops_per_token == flops_per_token(option.shape)
    assert option.params_ratio == option.params / params


def test_another_degree_may_be_asked_of_a_template():
    request = ShapeRequest(params=1e9, template=Template(shape=DEEP), tensor_parallel=8)
    shape = choose_shape(request).option.shape
    assert (
        shape.num_layers == 24
        and shape.num_heads % 8 == 0
        and shape.ffn_width * 256 == 704 * shape.width
    )


def test_what_cannot_be_is_said():
    with pytest.raises(SpecError) as caught:
        ShapeRequest(params=math.nan, tensor_parallel=0, vocab_size=1, seq_len=0)
    assert len(caught.value.problems) == 4
    with pytest.raises(SpecError, match=r"width_multiple = 0.*tensor_parallel = 0"):
        Template(shape=SMALL, width_multiple=0, tensor_parallel=0)
    with pytest.raises(ShapeError, match="the smallest shape of vocabulary 50304"):
        choose_shape(ShapeRequest(params=1e6, vocab_size=50_257))


@pytest.mark.parametrize(("params", "degree"), [(3e8, 1), (4e11, 8)])
def test_everything_splits_and_is_near(params, degree):
    found = choose_shape(ShapeRequest(params=params, tensor_parallel=degree))
    option, shape = found.option, found.option.shape
    assert shape.vocab_size % (128 * degree) == 0
    assert shape.num_heads % degree == shape.num_kv_heads % degree == 0
    assert shape.width % shape.num_heads == 0 and shape.width % (shape.head_dim * degree) == 0
    assert shape.ffn_width % degree == 0 and shape.num_heads % shape.num_kv_heads == 0
    if shape.width >= 2048:
        assert shape.width % 128 == 0 and shape.ffn_width % 256 == 0
    assert option.params == count_params(shape).total
    assert option.flops_per_token == flops_per_token(shape)
    assert option.params_ratio == option.params / params
    assert 0.9 < option.params_ratio < 1.1
    assert 40 < option.aspect_ratio < 256


def test_llama_3_8b_comes_back():
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


def test_wishes_are_kept_and_defaults_said():
    found = choose_shape(ShapeRequest(params=5e8, vocab_size=1000, seq_len=512))
    best = found.option.shape
    assert (best.vocab_size, best.family, best.tied, best.seq_len) == (1024, "llama", False, 512)
    assert best.ffn_width == pytest.approx(3.5 * best.width, rel=0.2)
    assert found.assumed[0] == "vocabulary padded to 1024, a multiple of 128"
    assert len(choose_shape(ShapeRequest(params=5e8)).assumed) >= 5


@pytest.mark.parametrize("width_per_layer", [16.0, 64.0, 100.0])
@pytest.mark.parametrize("params", [3e5, 1e7, 7e9])
def test_by_an_aspect_rule_depth_follows_the_width_and_the_size_is_near(width_per_layer, params):
    option = best_of(SMALL, params, width_multiple=32, width_per_layer=width_per_layer)
    shape = option.option.shape
    assert shape.num_layers == max(1, math.floor(shape.width / width_per_layer + 0.5))
    assert shape.width % 32 == 0
    # A layer or a step of the width changes a small model by as much.
    near = 1.5 if params < 1e6 else 1.25
    assert 1 / near < option.option.params_ratio < near


def test_a_counted_model_grows_with_its_layers():
    counts = {
        2: WidthCount(constant=0, linear=512, square=24),
        4: WidthCount(constant=0, linear=512, square=48),
    }
    assert counted_at(counts, 7).params(64) == 512 * 64 + 7 * 12 * 64**2
    assert counted_at({2: counts[2]}, 7) is None
    template = Template(
        shape=SMALL.at_depth(2),
        width_per_layer=16.0,
        count=counts[2],
        per_layer=per_layer(counts),
        width_multiple=16,
    )
    shape = choose_shape(ShapeRequest(params=1e6, template=template)).option
    assert (
        shape.params == 512 * shape.shape.width + shape.shape.num_layers * 12 * shape.shape.width**2
    )
    assert 0.6 < shape.params_ratio < 1.5


PUBLISHED = {  # parameters, vocabulary, layers, width
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
def test_depth_and_width_are_those_of_published_models(name):
    params, vocab_size, layers, width = PUBLISHED[name]
    shape = choose_shape(ShapeRequest(params=params, vocab_size=vocab_size)).option.shape
    most = 1.25 if params > 5e9 else 2.0
    assert 1 / most <= shape.num_layers / layers <= most, shape
    assert 1 / most <= shape.width / width <= most, shape


def test_depth_grows_with_size_on_and_beyond_what_was_published():
    layers = [
        published_layers(10**power) for power in (6, 7, 8, 9, 9.5, 10, 10.5, 11, 11.5, 12, 13)
    ]
    assert layers == sorted(layers)
    assert published_layers(6.74e9) == pytest.approx(32)
    assert all(30 < published_aspect(10**power) < 200 for power in (6, 8, 9, 10, 11, 12, 13))
