"""Tests of the counts of parameters and FLOPs, against published models and torch's own counter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from forerun._proxies.core.flops import (
    CONVENTIONS,
    compute_flops_per_token,
    compute_six_nd,
    count_params,
)
from forerun._proxies.core.shape import Shape
from forerun._proxies.model.decoder import Decoder, Multipliers
from forerun._proxies.model.loss import compute_token_loss
from forerun._proxies.parametrization.parametrization import get_kind

LLAMA = {"vocab_size": 128_256, "num_kv_heads": 8, "seq_len": 8192}
LLAMA_3 = {
    "8B": (Shape(num_layers=32, width=4096, num_heads=32, ffn_width=14_336, **LLAMA), 15e12),
    "70B": (Shape(num_layers=80, width=8192, num_heads=64, ffn_width=28_672, **LLAMA), 15e12),
    "405B": (
        Shape(num_layers=126, width=16_384, num_heads=128, ffn_width=53_248, **LLAMA),
        15.6e12,
    ),
}
"""Shape and number of training tokens of each Llama 3."""


def make_gpt2_shape(num_layers, width, num_heads):
    """Return the shape of a published GPT-2."""
    return Shape(
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        ffn_width=4 * width,
        vocab_size=50_257,
        seq_len=1024,
        family="gpt2",
        tied=True,
    )


def make_qwen3_shape(num_layers, width, num_heads, ffn_width, tied):
    """Return the shape of a published Qwen3."""
    return Shape(
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=8,
        ffn_width=ffn_width,
        vocab_size=151_936,
        seq_len=4096,
        tied=tied,
        qk_norm=True,
    )


@pytest.mark.parametrize(
    "name, params, six_nd, full, causal, chinchilla",
    [
        # Parameters; then FLOPs of the whole training run by 6ND (6 times parameters times tokens)
        # and by three other conventions, from the trainers' own code.
        ("8B", 8.030e9, 7.227e23, 8.687e23, 7.721e23, 9.171e23),
        ("70B", 70.554e9, 6.350e24, 7.222e24, 6.738e24, 7.322e24),
        ("405B", 405.853e9, 3.799e25, 4.096e25, 3.937e25, 4.117e25),
    ],
)
def test_total_flops_of_llama_3_match_the_trainers_own_code(
    name, params, six_nd, full, causal, chinchilla
):
    shape, tokens = LLAMA_3[name]
    num_params = count_params(shape).total
    assert f"{num_params:.3e}" == f"{params:.3e}"
    assert f"{compute_six_nd(num_params, tokens):.3e}" == f"{six_nd:.3e}"
    expected_by_convention = {"full": full, "causal": causal, "chinchilla": chinchilla}
    for convention, expected in expected_by_convention.items():
        flops = compute_flops_per_token(shape, convention) * tokens
        assert f"{flops:.3e}" == f"{expected:.3e}", convention


@pytest.mark.parametrize(
    ("shape", "params"),
    [
        (make_gpt2_shape(12, 768, 12), 124_439_808),
        (make_gpt2_shape(24, 1024, 16), 354_823_168),
        (make_gpt2_shape(48, 1600, 25), 1_557_611_200),
        (LLAMA_3["8B"][0], 8_030_261_248),
        (LLAMA_3["70B"][0], 70_553_706_496),
        (make_qwen3_shape(28, 2048, 16, 6144, tied=True), 1_720_574_976),
        (make_qwen3_shape(36, 4096, 32, 12_288, tied=False), 8_190_735_360),
    ],
    ids=["gpt2", "gpt2-medium", "gpt2-xl", "Llama-3-8B", "Llama-3-70B", "Qwen3-1.7B", "Qwen3-8B"],
)
def test_parameter_counts_match_published_models(shape, params):
    assert count_params(shape).total == params


def test_chinchilla_convention_matches_the_appendix_of_the_paper():
    """Forward FLOPs of a sequence of the 70B model are summed by operation.

    Source: arXiv 2203.15556, appendix F.
    """
    num_layers, width, num_heads, key_size, ffn_width, vocab_size, seq_len = (
        80,
        8192,
        64,
        128,
        32_768,
        32_000,
        2048,
    )
    attention = (
        2 * 3 * seq_len * width * (key_size * num_heads)
        + 2 * seq_len * seq_len * (key_size * num_heads)
        + 3 * num_heads * seq_len * seq_len
        + 2 * seq_len * seq_len * (key_size * num_heads)
        + 2 * seq_len * (key_size * num_heads) * width
    )
    dense = 2 * seq_len * (width * ffn_width + ffn_width * width)
    embeddings = logits = 2 * seq_len * vocab_size * width
    forward = embeddings + num_layers * (attention + dense) + logits
    shape = Shape(
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        ffn_width=ffn_width,
        vocab_size=vocab_size,
        seq_len=seq_len,
        family="gpt2",
    )
    assert compute_flops_per_token(shape, "chinchilla") * seq_len == 3 * forward
    assert f"{compute_flops_per_token(shape, 'chinchilla') * 1.4e12:.2e}" == "5.68e+23"


shapes = st.builds(
    # The head dim must be even, and `num_kv_heads` must divide `num_heads`.
    lambda layers, queries_per_kv, kv_heads, half_dim, ffn, vocab, seq, tied, qk_norm, family: (
        Shape(
            num_layers=layers,
            width=queries_per_kv * kv_heads * 2 * half_dim,
            num_heads=queries_per_kv * kv_heads,
            num_kv_heads=kv_heads,
            ffn_width=ffn,
            vocab_size=vocab,
            seq_len=seq,
            tied=tied,
            qk_norm=qk_norm,
            family=family,
        )
    ),
    *(st.integers(1, 4) for _ in range(4)),
    st.integers(1, 40),
    st.integers(2, 50),
    st.integers(1, 30),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["llama", "gpt2"]),
)


@settings(deadline=None, derandomize=True, database=None, max_examples=80)
@given(shapes)
def test_parameter_counts_match_the_tensors_of_the_module(shape):
    counts = dict.fromkeys(("embedding", "readout", "hidden", "gain", "bias"), 0)
    for name, parameter in Decoder(shape, device="meta").named_parameters():
        counts[get_kind(name).rsplit("_", 1)[-1]] += parameter.numel()
    params = count_params(shape)
    assert counts == {kind: getattr(params, kind) for kind in counts}
    assert params.total == sum(counts.values())
    assert params.non_embedding == counts["hidden"] + counts["gain"] + counts["bias"]


@settings(deadline=None, derandomize=True, database=None, max_examples=40)
@given(shapes)
def test_conventions_differ_by_the_documented_terms(shape):
    causal, full, palm, chinchilla = (compute_flops_per_token(shape, c) for c in CONVENTIONS)
    params, table = count_params(shape), shape.vocab_size * shape.width
    # Attention over all pairs of tokens; `causal` counts half of the pairs.
    square = 12 * shape.num_layers * shape.num_heads * shape.head_dim * shape.seq_len
    assert all(type(x) is int for x in (causal, full, palm, chinchilla))
    assert full - causal == square / 2
    positions = shape.seq_len * shape.width if shape.family == "gpt2" else 0
    assert palm - full == 6 * (params.gain + params.bias + positions + (0 if shape.tied else table))
    assert chinchilla - full == 6 * table + 9 * shape.num_layers * shape.num_heads * shape.seq_len


def count_flops_with_torch(shape, backend, **options):
    """Return the FLOPs that torch counts in a forward and a backward pass, and the pass's tokens.

    Args:
        options: Options of `Decoder`.
    """
    model = Decoder(shape, **options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(shape.vocab_size, (3, shape.seq_len + 1))
    with sdpa_kernel(backend), FlopCounterMode(display=False) as counter:
        compute_token_loss(model(ids[:, :-1], Multipliers(attention=0.3)), ids[:, 1:]).backward()
    return counter.get_total_flops(), 3 * shape.seq_len


@settings(deadline=None, derandomize=True, database=None, max_examples=12)
@given(shapes)
def test_full_convention_matches_the_counter_of_torch(shape):
    """Torch's counter and the `full` convention both count matrix products only.

    The math backend writes attention out as two products forward and four backward. Torch cannot
    count the fused CPU kernel, and none of its kernels skips half of the square as `causal` does.
    """
    num_flops, num_tokens = count_flops_with_torch(shape, SDPBackend.MATH)
    assert num_flops == compute_flops_per_token(shape, "full") * num_tokens


def test_unknown_convention_is_refused():
    with pytest.raises(ValueError, match=r"'half'.*causal, full, palm, chinchilla"):
        compute_flops_per_token(LLAMA_3["8B"][0], "half")
