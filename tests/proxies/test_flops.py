import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from proxies.core.flops import CONVENTIONS, count_params, flops_per_token, six_nd
from proxies.core.shape import Shape
from proxies.model.decoder import Decoder, Multipliers
from proxies.model.loss import token_loss
from proxies.parametrization.parametrization import kind_of

LLAMA = {"vocab_size": 128_256, "num_kv_heads": 8, "seq_len": 8192}
MODELS = {
    "8B": (Shape(num_layers=32, width=4096, num_heads=32, ffn_width=14_336, **LLAMA), 15e12),
    "70B": (Shape(num_layers=80, width=8192, num_heads=64, ffn_width=28_672, **LLAMA), 15e12),
    "405B": (
        Shape(num_layers=126, width=16_384, num_heads=128, ffn_width=53_248, **LLAMA),
        15.6e12,
    ),
}


def gpt2(num_layers, width, num_heads, seq_len=1024):
    return Shape(
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        ffn_width=4 * width,
        vocab_size=50_257,
        seq_len=seq_len,
        family="gpt2",
        tied=True,
    )


def qwen3(num_layers, width, num_heads, ffn_width, tied):
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


SMALL = Shape(
    num_layers=2, width=32, num_heads=4, num_kv_heads=2, ffn_width=80, vocab_size=64, seq_len=16
)


@pytest.mark.parametrize(
    "name, params, six, full, causal, chinchilla",
    [
        # Parameters; then FLOPs of the whole training run, from the trainers' own code.
        ("8B", 8.030e9, 7.227e23, 8.687e23, 7.721e23, 9.171e23),
        ("70B", 70.554e9, 6.350e24, 7.222e24, 6.738e24, 7.322e24),
        ("405B", 405.853e9, 3.799e25, 4.096e25, 3.937e25, 4.117e25),
    ],
)
def test_worked_totals(name, params, six, full, causal, chinchilla):
    shape, tokens = MODELS[name]
    total = count_params(shape).total
    assert f"{total:.3e}" == f"{params:.3e}"
    found = [
        six_nd(total, tokens),
        *(flops_per_token(shape, c) * tokens for c in ("full", "causal", "chinchilla")),
    ]
    assert [f"{x:.3e}" for x in found] == [f"{x:.3e}" for x in (six, full, causal, chinchilla)]


@pytest.mark.parametrize(
    ("shape", "params"),
    [
        (gpt2(12, 768, 12), 124_439_808),
        (gpt2(24, 1024, 16), 354_823_168),
        (gpt2(48, 1600, 25), 1_557_611_200),
        (MODELS["8B"][0], 8_030_261_248),
        (MODELS["70B"][0], 70_553_706_496),
        (qwen3(28, 2048, 16, 6144, tied=True), 1_720_574_976),
        (qwen3(36, 4096, 32, 12_288, tied=False), 8_190_735_360),
    ],
    ids=["gpt2", "gpt2-medium", "gpt2-xl", "Llama-3-8B", "Llama-3-70B", "Qwen3-1.7B", "Qwen3-8B"],
)
def test_parameters_of_published_models(shape, params):
    assert count_params(shape).total == params


def test_chinchilla_counts_as_its_appendix():
    """Forward FLOPs of a sequence, operation by operation (arXiv 2203.15556, appendix F), with
    their 70B model.
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
    assert flops_per_token(shape, "chinchilla") * seq_len == 3 * forward
    assert f"{flops_per_token(shape, 'chinchilla') * 1.4e12:.2e}" == "5.68e+23"


shapes = st.builds(
    lambda layers, heads, groups, half, ffn, vocab, seq, tied, qk_norm, family: Shape(
        num_layers=layers,
        width=heads * groups * 2 * half,
        num_heads=heads * groups,
        num_kv_heads=groups,
        ffn_width=ffn,
        vocab_size=vocab,
        seq_len=seq,
        tied=tied,
        qk_norm=qk_norm,
        family=family,
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
def test_parameters_are_the_modules_own_tensors(shape):
    found = dict.fromkeys(("embedding", "readout", "hidden", "gain", "bias"), 0)
    for name, parameter in Decoder(shape, device="meta").named_parameters():
        found[kind_of(name).rsplit("_", 1)[-1]] += parameter.numel()
    params = count_params(shape)
    assert found == {kind: getattr(params, kind) for kind in found}
    assert params.total == sum(found.values())
    assert params.non_embedding == found["hidden"] + found["gain"] + found["bias"]


@settings(deadline=None, derandomize=True, database=None, max_examples=40)
@given(shapes)
def test_the_conventions_differ_by_what_they_say(shape):
    causal, full, palm, chinchilla = (flops_per_token(shape, c) for c in CONVENTIONS)
    params, table = count_params(shape), shape.vocab_size * shape.width
    square = 12 * shape.num_layers * shape.num_heads * shape.head_dim * shape.seq_len
    assert all(type(x) is int for x in (causal, full, palm, chinchilla))
    assert full - causal == square / 2
    positions = shape.seq_len * shape.width if shape.family == "gpt2" else 0
    assert palm - full == 6 * (params.gain + params.bias + positions + (0 if shape.tied else table))
    assert chinchilla - full == 6 * table + 9 * shape.num_layers * shape.num_heads * shape.seq_len


def counted_flops(shape, backend, **options):
    model = Decoder(shape, **options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(shape.vocab_size, (3, shape.seq_len + 1))
    with sdpa_kernel(backend), FlopCounterMode(display=False) as counter:
        token_loss(model(ids[:, :-1], Multipliers(attention=0.3)), ids[:, 1:]).backward()
    return counter.get_total_flops(), 3 * shape.seq_len


@settings(deadline=None, derandomize=True, database=None, max_examples=25)
@given(shapes)
def test_full_is_what_torch_counts(shape):
    """Attention written out as two products forward and four backward is exactly the `full`
    convention, in every family: torch counts matrix products alone, as the convention does.

    `causal` counts half of that square, which only a kernel that skips the upper triangle saves;
    and the fused CPU kernel is unknown to torch's counter, which then counts no attention at all.
    """
    counted, num_tokens = counted_flops(shape, SDPBackend.MATH)
    assert counted == flops_per_token(shape, "full") * num_tokens


def test_an_unknown_convention_is_refused():
    with pytest.raises(ValueError, match=r"'half'.*causal, full, palm, chinchilla"):
        flops_per_token(SMALL, "half")
