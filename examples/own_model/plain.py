"""A transformer in plain torch as a proxy: `factory = "plain:Transformer"`.

forerun calls the class with the shape.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from forerun._proxies.core.shape import Shape


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.mix = nn.Linear(shape.width, shape.width, bias=False)
        self.up = nn.Linear(shape.width, shape.ffn_width)
        self.down = nn.Linear(shape.ffn_width, shape.width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Map [B, T, D] to [B, T, D]."""
        q, k, v = (
            self.qkv(self.norm1(x_BTD))
            .unflatten(-1, (3 * self.num_heads, -1))
            .transpose(1, 2)
            .chunk(3, dim=1)
        )
        heads_BHTE = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.mix(heads_BHTE.transpose(1, 2).flatten(-2))
        return x_BTD + self.down(functional.gelu(self.up(self.norm2(x_BTD))))


class Transformer(nn.Module):
    """A decoder with learned positions and torch's own initial values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.positions = nn.Embedding(shape.seq_len, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.readout = nn.Linear(shape.width, shape.vocab_size, bias=False)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Map token ids [B, T] to logits [B, T, V]."""
        x_BTD = self.tokens(ids_BT) + self.positions(
            torch.arange(ids_BT.shape[1], device=ids_BT.device)
        )
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.readout(self.norm(x_BTD))
