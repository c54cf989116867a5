"""Tests of activation checkpointing: which operations are recomputed, with the same gradients."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from forerun._proxies.core.shape import Shape
from forerun._proxies.model.decoder import Decoder, Multipliers
from forerun._proxies.model.loss import compute_token_loss

SHAPES = {
    family: Shape(
        num_layers=2,
        width=32,
        num_heads=4,
        num_kv_heads=2 if family == "llama" else 4,
        ffn_width=64,
        vocab_size=64,
        seq_len=16,
        family=family,
    )
    for family in ("llama", "gpt2")
}
NUM_MATRICES = {"llama": 7, "gpt2": 6}
"""Number of matrices in a block."""


class OperationCounter(TorchDispatchMode):
    """Counts how often each operation of torch is executed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def count_operations(family, checkpointing):
    """Return the gradients of a batch, and how often each operation of its two passes was executed.

    Args:
        checkpointing: False, True (recompute whole blocks), or "selective".
    """
    torch.manual_seed(0)
    model = Decoder(SHAPES[family], checkpointing=checkpointing)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    shape = SHAPES[family]
    ids = torch.randint(shape.vocab_size, (3, shape.seq_len + 1))
    with OperationCounter() as counter:
        compute_token_loss(model(ids[:, :-1], Multipliers(attention=0.3)), ids[:, 1:]).backward()
    return [parameter.grad for parameter in model.parameters()], counter.calls


@pytest.mark.parametrize("family", SHAPES)
def test_selective_checkpointing_recomputes_all_but_products_and_attention(family):
    gradients, without = count_operations(family, checkpointing=False)
    selective_gradients, selective = count_operations(family, checkpointing="selective")
    full_gradients, full = count_operations(family, checkpointing=True)
    for recomputed_gradients in (selective_gradients, full_gradients):
        for gradient, expected in zip(recomputed_gradients, gradients, strict=True):
            assert torch.equal(gradient, expected)

    assert selective["mm"] == without["mm"]
    # The backward pass does not need the last product of each block.
    num_layers = SHAPES[family].num_layers
    assert full["mm"] == without["mm"] + num_layers * (NUM_MATRICES[family] - 1)
    # Each block has one attention and one activation. Those that are recomputed count twice.
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert without[attention] == selective[attention] == num_layers
    assert full[attention] == 2 * num_layers
    activation = {"llama": "silu", "gpt2": "gelu"}[family]
    assert without[activation] == num_layers
    assert selective[activation] == full[activation] == 2 * num_layers
