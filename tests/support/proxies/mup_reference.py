"""Reference decoders, written simply with torch's modules and mup's readout.

Tests compare forerun's decoder and its parametrizations with them. Suffixes of tensors name their
dimensions: B sequences, T tokens, D features, H heads, and E features of a head.
"""

import math

import mup
import torch
from torch import nn

from forerun._proxies.model.layers import NORM_EPS
from forerun._proxies.model.rotary import ROPE_BASE


def rotate(x_BTHE):
    """Apply rotary positions as complex numbers; component j is paired with j + E / 2."""
    seq_len, head_dim = x_BTHE.shape[1], x_BTHE.shape[3]
    low, high = x_BTHE.chunk(2, dim=-1)
    angles = torch.tensor(
        [
            [t / ROPE_BASE ** (2 * j / head_dim) for j in range(head_dim // 2)]
            for t in range(seq_len)
        ],
        dtype=torch.float64,
    )
    turned = torch.complex(low, high) * torch.polar(torch.ones_like(angles), angles)[:, None, :]
    return torch.cat((turned.real, turned.imag), dim=-1)


def build_norm(shape):
    """Build the norm of the shape's family."""
    return (nn.LayerNorm if shape.family == "gpt2" else nn.RMSNorm)(shape.width, eps=NORM_EPS)


class ReferenceAttention(nn.Module):
    """Causal attention, one head after another."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        bias = shape.family == "gpt2"
        self.wq = nn.Linear(shape.width, shape.width, bias=bias)
        self.wk = nn.Linear(shape.width, shape.kv_width, bias=bias)
        self.wv = nn.Linear(shape.width, shape.kv_width, bias=bias)
        self.wo = nn.Linear(shape.width, shape.width, bias=bias)
        if shape.qk_norm:
            self.q_norm = nn.RMSNorm(shape.head_dim, eps=NORM_EPS)
            self.k_norm = nn.RMSNorm(shape.head_dim, eps=NORM_EPS)

    def forward(self, x_BTD, scale):
        shape, (num_sequences, seq_len, _) = self.shape, x_BTD.shape
        q = self.wq(x_BTD).view(num_sequences, seq_len, shape.num_heads, shape.head_dim)
        k = self.wk(x_BTD).view(num_sequences, seq_len, shape.num_kv_heads, shape.head_dim)
        v = self.wv(x_BTD).view(num_sequences, seq_len, shape.num_kv_heads, shape.head_dim)
        if shape.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if shape.family == "llama":
            q, k = rotate(q), rotate(k)
        heads = []
        for head in range(shape.num_heads):
            group = head // (shape.num_heads // shape.num_kv_heads)
            scores = scale * q[:, :, head] @ k[:, :, group].mT
            future = torch.ones(seq_len, seq_len, dtype=torch.bool).triu(1)
            heads.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[:, :, group])
        return self.wo(torch.cat(heads, dim=-1))


class ReferenceFeedForward(nn.Module):
    """A SwiGLU feed-forward of Llama, or the GELU feed-forward of GPT-2."""

    def __init__(self, shape):
        super().__init__()
        self.gated = shape.family == "llama"
        self.w1 = nn.Linear(shape.width, shape.ffn_width, bias=not self.gated)
        self.w2 = nn.Linear(shape.ffn_width, shape.width, bias=not self.gated)
        if self.gated:
            self.w3 = nn.Linear(shape.width, shape.ffn_width, bias=False)

    def forward(self, x):
        y = self.w1(x)
        if self.gated:
            return self.w2(y * y.sigmoid() * self.w3(x))
        # GELU in the approximation by tanh that GPT-2 uses
        return self.w2(0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))))


class ReferenceBlock(nn.Module):
    """A block with norms before attention and feed-forward."""

    def __init__(self, shape):
        super().__init__()
        self.attention_norm = build_norm(shape)
        self.attention = ReferenceAttention(shape)
        self.ffn_norm = build_norm(shape)
        self.feed_forward = ReferenceFeedForward(shape)

    def forward(self, x, scale, residual=1.0):
        x = x + residual * self.attention(self.attention_norm(x), scale)
        return x + residual * self.feed_forward(self.ffn_norm(x))


class ReferenceDecoder(nn.Module):
    """A decoder whose parameters have the names of `forerun._proxies.model.decoder.Decoder`.

    Args:
        base_head_dim: Head dim at which attention is scaled by 1 / sqrt(head_dim); the shape's own
            head dim if None.
        readout: Class of the last layer, `nn.Linear` or mup's `MuReadout`.
        options: Options of the readout's class.
    """

    def __init__(self, shape, *, base_head_dim=None, readout=nn.Linear, **options):
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.vocab_size, shape.width)
        if shape.family == "gpt2":
            self.pos_embeddings = nn.Embedding(shape.seq_len, shape.width)
        self.layers = nn.ModuleList(ReferenceBlock(shape) for _ in range(shape.num_layers))
        self.norm = build_norm(shape)
        self.lm_head = readout(shape.width, shape.vocab_size, bias=False, **options)
        if shape.tied:
            self.lm_head.weight = self.tok_embeddings.weight
        self.scale = math.sqrt(base_head_dim or shape.head_dim) / shape.head_dim

    def forward(self, ids_BT, *, embedding=1.0, residual=1.0, output=1.0):
        x = self.tok_embeddings(ids_BT)
        if hasattr(self, "pos_embeddings"):
            x = x + self.pos_embeddings(torch.arange(ids_BT.shape[1]))
        x = x * embedding
        for block in self.layers:
            x = block(x, self.scale, residual)
        return self.lm_head(self.norm(x) * output)


def build_mup_model(shape, base_shape, *, output_mult=1.0, delta_shape=None):
    """Build a `ReferenceDecoder` as a user of mup does, from base, delta and target models."""
    delta_shape = delta_shape or base_shape.at_width(2 * base_shape.width)
    base, delta, target = (
        ReferenceDecoder(
            s, base_head_dim=base_shape.head_dim, readout=mup.MuReadout, output_mult=output_mult
        )
        for s in (base_shape, delta_shape, shape)
    )
    return mup.set_base_shapes(target, base, delta=delta)
