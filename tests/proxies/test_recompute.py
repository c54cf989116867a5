"""What is recomputed is what was meant to be, and the gradients are the same bits."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from proxies.core.shape import Shape
from proxies.model.decoder import Decoder, Multipliers
from proxies.model.loss import token_loss

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
PRODUCT = {"llama": 7, "gpt2": 6}
"""Matrices of a block."""


class Counted(TorchDispatchMode):
    """How often each operation of torch is carried out."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def passed(family, checkpointing):
    """Gradients, and the operations of the forward and the backward pass."""
    torch.manual_seed(0)
    model = Decoder(SHAPES[family], checkpointing=checkpointing)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(64, (3, 17))
    with Counted() as counted:
        token_loss(model(ids[:, :-1], Multipliers(attention=0.3)), ids[:, 1:]).backward()
    return [parameter.grad for parameter in model.parameters()], counted.calls


@pytest.mark.parametrize("family", SHAPES)
def test_selective_recomputes_all_but_products_and_attention(family):
    gradients, plain = passed(family, checkpointing=False)
    selective, few = passed(family, checkpointing="selective")
    full, many = passed(family, checkpointing=True)
    for other in (selective, full):
        assert all(torch.equal(a, b) for a, b in zip(gradients, other, strict=True))
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    activation = {"llama": "silu", "gpt2": "gelu"}[family]
    assert (plain["mm"], few["mm"]) == (plain["mm"], plain["mm"])
    # What nothing of the backward pass needs, the last product, is not computed again.
    assert plain["mm"] + 2 * (PRODUCT[family] - 1) == many["mm"]
    assert (plain[attention], few[attention], many[attention]) == (2, 2, 4)
    assert (plain[activation], few[activation], many[activation]) == (2, 4, 4)
