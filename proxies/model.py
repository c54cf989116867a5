"""Decoder transformer whose every tensor may carry a leading trial axis.

One definition serves the bank (K trials as one batched model) and the distributed trainer (one model, sharded):
with `num_trials = None` no tensor has the K axis.

Shape suffixes: K trials, N = B * T tokens (B sequences of T), D width, H query heads, G key/value heads,
E head dim, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from proxies.spec import Shape

NORM_EPS = 1e-5
ROPE_BASE = 10_000.0  # arXiv 2104.09864


@dataclass(frozen=True, kw_only=True, slots=True)
class Multipliers:
    """Forward multipliers: a number, or one per trial as a tensor of shape [K, 1, 1]."""

    embedding: float | Tensor = 1.0
    attention: float | Tensor
    """Scale of the attention logits q . k."""
    output: float | Tensor = 1.0


def linear(x_KND: Tensor, weight_KFD: Tensor) -> Tensor:
    """`x W^T` per trial: [K, N, D] and [K, F, D] give [K, N, F]; without K likewise."""
    return x_KND @ weight_KFD.mT


class Weight(nn.Module):
    """One parameter named `weight`, with or without the trial axis."""

    def __init__(self, *size: int, num_trials: int | None, device: torch.device | None) -> None:
        super().__init__()
        lead = () if num_trials is None else (num_trials,)
        self.weight = nn.Parameter(torch.empty(*lead, *size, device=device))


class Linear(Weight):
    """A bias-free linear map; weight [K, out, in]."""

    def forward(self, x_KND: Tensor) -> Tensor:
        """[K, N, in] to [K, N, out]."""
        return linear(x_KND, self.weight)


class Embedding(Weight):
    """Token table; weight [K, V, D]."""

    def forward(self, ids_KN: Tensor) -> Tensor:
        """[K, N] token ids to [K, N, D]."""
        if self.weight.dim() == 2:
            return functional.embedding(ids_KN, self.weight)
        num_trials, vocab_size, _ = self.weight.shape
        offsets_K1 = torch.arange(num_trials, device=ids_KN.device)[:, None] * vocab_size
        return functional.embedding(ids_KN + offsets_K1, self.weight.flatten(0, 1))


class RMSNorm(Weight):
    """Root-mean-square norm (arXiv 1910.07467); gain [K, D]."""

    def forward(self, x_KND: Tensor) -> Tensor:
        """[K, N, D] to the same."""
        normed = functional.rms_norm(x_KND, (x_KND.shape[-1],), eps=NORM_EPS)
        return normed * self.weight.unsqueeze(-2)


@lru_cache(maxsize=8)
def _rotary_tables(seq_len: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines, [T, 1, E] each."""
    frequencies_E = ROPE_BASE ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
    angles_TE = torch.arange(seq_len, device=device, dtype=torch.float64)[:, None] * frequencies_E
    cos_TE, sin_TE = angles_TE.cos().to(dtype), angles_TE.sin().to(dtype)
    return torch.cat((cos_TE, cos_TE), dim=-1)[:, None], torch.cat((-sin_TE, sin_TE), dim=-1)[:, None]


def rotate(x_BTHE: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864), halves paired: [B, T, H, E] to the same.

    Whole rows at a time, halves swapped by a roll: half rows of a few floats cost a CPU ten times as much.
    """
    _, seq_len, _, head_dim = x_BTHE.shape
    cos_T1E, sin_T1E = _rotary_tables(seq_len, head_dim, x_BTHE.device, x_BTHE.dtype)
    return torch.addcmul(x_BTHE * cos_T1E, x_BTHE.roll(head_dim // 2, -1), sin_T1E)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads (arXiv 2305.13245)."""

    def __init__(self, shape: Shape, num_trials: int | None, device: torch.device | None) -> None:
        super().__init__()
        self.shape = shape
        self.wq = Linear(shape.width, shape.width, num_trials=num_trials, device=device)
        self.wk = Linear(shape.kv_width, shape.width, num_trials=num_trials, device=device)
        self.wv = Linear(shape.kv_width, shape.width, num_trials=num_trials, device=device)
        self.wo = Linear(shape.width, shape.width, num_trials=num_trials, device=device)

    def forward(self, x_KND: Tensor, scale: float | Tensor) -> Tensor:
        """[K, N, D] to the same; `scale` multiplies q . k."""
        q_BTHE = rotate(self._heads(self.wq(x_KND) * scale, self.shape.num_heads))
        k_BTGE = rotate(self._heads(self.wk(x_KND), self.shape.num_kv_heads))
        v_BTGE = self._heads(self.wv(x_KND), self.shape.num_kv_heads)
        mixed_BHTE = functional.scaled_dot_product_attention(
            q_BTHE.transpose(1, 2),
            k_BTGE.transpose(1, 2),
            v_BTGE.transpose(1, 2),
            is_causal=True,
            scale=1.0,
            enable_gqa=self.shape.num_heads != self.shape.num_kv_heads,
        )
        out_KND: Tensor = self.wo(mixed_BHTE.transpose(1, 2).reshape(x_KND.shape))
        return out_KND

    def _heads(self, x_KND: Tensor, num_heads: int) -> Tensor:
        # Trials join the batch axis: attention has no weights of its own.
        return x_KND.reshape(-1, self.shape.seq_len, num_heads, self.shape.head_dim)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, shape: Shape, num_trials: int | None, device: torch.device | None) -> None:
        super().__init__()
        self.w1 = Linear(shape.ffn_width, shape.width, num_trials=num_trials, device=device)
        self.w2 = Linear(shape.width, shape.ffn_width, num_trials=num_trials, device=device)
        self.w3 = Linear(shape.ffn_width, shape.width, num_trials=num_trials, device=device)

    def forward(self, x_KND: Tensor) -> Tensor:
        """[K, N, D] to the same."""
        out_KND: Tensor = self.w2(functional.silu(self.w1(x_KND)) * self.w3(x_KND))
        return out_KND


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, shape: Shape, num_trials: int | None, device: torch.device | None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.width, num_trials=num_trials, device=device)
        self.attention = Attention(shape, num_trials, device)
        self.ffn_norm = RMSNorm(shape.width, num_trials=num_trials, device=device)
        self.feed_forward = FeedForward(shape, num_trials, device)

    def forward(self, x_KND: Tensor, attention_scale: float | Tensor) -> Tensor:
        """[K, N, D] to the same."""
        x_KND = x_KND + self.attention(self.attention_norm(x_KND), attention_scale)
        out_KND: Tensor = x_KND + self.feed_forward(self.ffn_norm(x_KND))
        return out_KND


class Decoder(nn.Module):
    """The model of `shape`, or `num_trials` of them side by side. Weights are left uninitialized."""

    def __init__(
        self, shape: Shape, *, num_trials: int | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        place = None if device is None else torch.device(device)
        self.shape = shape
        self.tok_embeddings = Embedding(shape.vocab_size, shape.width, num_trials=num_trials, device=place)
        self.layers = nn.ModuleList(Block(shape, num_trials, place) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.width, num_trials=num_trials, device=place)
        self.lm_head = Linear(shape.vocab_size, shape.width, num_trials=num_trials, device=place)
        if shape.tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, ids_KBT: Tensor, multipliers: Multipliers) -> Tensor:
        """Token ids [K, B, T] (or [B, T]) to logits [K, N, V] (or [N, V]), N = B * T."""
        x_KND = self.tok_embeddings(ids_KBT.flatten(-2)) * multipliers.embedding
        for block in self.layers:
            x_KND = block(x_KND, multipliers.attention)
        logits_KNV: Tensor = self.lm_head(self.norm(x_KND) * multipliers.output)
        return logits_KNV


def token_loss(logits_KNV: Tensor, targets_KBT: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token: one number per trial, [K], or a scalar without trials."""
    losses_KN = functional.cross_entropy(
        logits_KNV.flatten(0, -2).float() if logits_KNV.dtype == torch.bfloat16 else logits_KNV.flatten(0, -2),
        targets_KBT.flatten(),
        reduction="none",
    )
    return losses_KN.view(logits_KNV.shape[:-1]).mean(dim=-1)


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and dimensions, from the module itself (on the meta device: nothing is allocated)."""
    return {name: tuple(p.shape) for name, p in Decoder(shape, device="meta").named_parameters()}
