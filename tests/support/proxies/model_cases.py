"""Tiny shapes of every model family, and random weights and token ids for them."""

import dataclasses

import torch

from forerun._proxies.core.shape import Shape

SHAPE = Shape(
    num_layers=2, width=32, num_heads=4, num_kv_heads=2, ffn_width=48, vocab_size=23, seq_len=12
)
FAMILIES = {
    f"{family}{'-qk' if qk_norm else ''}": dataclasses.replace(
        SHAPE, family=family, qk_norm=qk_norm
    )
    for family in ("llama", "gpt2")
    for qk_norm in (False, True)
}


def fill_parameters(model, dtype=torch.float64):
    """Draw every parameter, gains and biases too, from a normal distribution; return the model."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.to(dtype).parameters():
        parameter.data = (
            torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype) * 0.3
        )
    return model


def draw_token_ids(*size, seed=1):
    """Draw token ids of shape [*size, seq_len]."""
    return torch.randint(
        SHAPE.vocab_size, (*size, SHAPE.seq_len), generator=torch.Generator().manual_seed(seed)
    )
