"""Shapes that split over degree and tiles, near what was wanted, counted exactly."""

import pytest

from proxies.core.checks import SpecError
from proxies.core.flops import count_params, flops_per_token
from scaling_fits.allocation.shapes import ShapeError, ShapeRequest, choose_shapes


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("params", [3e8, 1.3e9, 8e9, 7e10, 4e11])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_everything_splits_and_is_near(params, degree, family):
    found = choose_shapes(ShapeRequest(params=params, tensor_parallel=degree, family=family))
    for option in found.options:
        shape = option.shape
        assert shape.vocab_size % (128 * degree) == 0
        assert shape.num_heads % degree == shape.num_kv_heads % degree == 0
        assert shape.width % shape.num_heads == 0 and shape.width % (shape.head_dim * degree) == 0
        assert shape.ffn_width % degree == 0 and shape.num_heads % shape.num_kv_heads == 0
        if shape.width >= 2048:
            assert shape.width % 128 == 0 and shape.ffn_width % 256 == 0
        assert option.params == count_params(shape).total
        assert option.flops_per_token == flops_per_token(shape)
        assert option.params_ratio == option.params / params
    best = found.options[0]
    assert 0.9 < best.params_ratio < 1.1
    assert 64 < best.aspect_ratio < 256
    widths = [option.shape.width for option in found.options]
    assert len(set(widths)) == len(widths) > 1


def test_llama_3_8b_comes_back():
    best = choose_shapes(ShapeRequest(params=8.03e9, vocab_size=128_256, seq_len=8192)).options[0].shape
    assert (best.num_layers, best.width, best.num_heads, best.num_kv_heads, best.ffn_width, best.vocab_size) == (
        32, 4096, 32, 8, 14_336, 128_256,
    )  # fmt: skip


@pytest.mark.parametrize(("seq_len", "over"), [(2048, 0.95), (8192, 1.05), (16_384, 1.15)])
def test_attention_is_in_the_exact_count(seq_len, over):
    option = choose_shapes(ShapeRequest(params=2e9, seq_len=seq_len)).options[0]
    assert option.flops_ratio > over
    attention = 6 * option.shape.num_layers * option.shape.width * seq_len
    outside = option.shape.vocab_size * option.shape.width
    gains = (2 * option.shape.num_layers + 1) * option.shape.width
    assert option.flops_per_token == 6 * (option.params - outside - gains) + attention


def test_wishes_are_kept_and_defaults_said():
    wish = ShapeRequest(
        params=5e8, vocab_size=1000, head_dim=96, query_heads_per_kv_head=2, ffn_ratio=2.0, aspect_ratio=40.0,
        family="gpt2", tied=True, seq_len=512,
    )  # fmt: skip
    found = choose_shapes(wish)
    best = found.options[0].shape
    assert (best.vocab_size, best.head_dim, best.family, best.tied, best.seq_len) == (1024, 96, "gpt2", True, 512)
    assert best.num_heads == 2 * best.num_kv_heads
    assert best.ffn_width == pytest.approx(2.0 * best.width, rel=0.2)
    assert found.options[0].aspect_ratio == pytest.approx(40, rel=0.5)
    assert found.assumed == ("vocabulary padded to 1024, a multiple of 128",)
    assert len(choose_shapes(ShapeRequest(params=5e8)).assumed) >= 5


@pytest.mark.parametrize("degree", [1, 8])
def test_four_query_heads_per_kv_head_or_it_is_said(degree):
    groups = []
    for params in (1e8, 2e8, 5e8, 1e9, 2e9, 5e9, 1e10, 2e10, 5e10):
        found = choose_shapes(ShapeRequest(params=params, tensor_parallel=degree))
        best = found.options[0].shape
        groups.append(best.num_heads // best.num_kv_heads)
        said = [text for text in found.assumed if "query heads per key-value head" in text]
        assert len(said) == 1 and said[0].startswith(f"{groups[-1]} query heads")
        assert ("not the usual 4" in said[0]) == (groups[-1] != 4)
    assert all(2 <= group <= 8 for group in groups)
    assert groups.count(4) >= (8 if degree == 1 else 2)


def test_a_vocabulary_nobody_asked_for_fits_the_size():
    for params in (1e6, 1e8, 1e9, 1e11):
        shape = choose_shapes(ShapeRequest(params=params)).options[0].shape
        assert 2 * shape.vocab_size * shape.width < 0.5 * params


def test_what_cannot_be_is_said():
    with pytest.raises(ShapeError, match="the smallest shape of vocabulary 50304"):
        choose_shapes(ShapeRequest(params=1e6, vocab_size=50_257))
    with pytest.raises(SpecError) as caught:
        ShapeRequest(params=float("nan"), tensor_parallel=0, vocab_size=1, seq_len=0, head_dim=7, ffn_ratio=-1.0)
    assert len(caught.value.problems) == 6
