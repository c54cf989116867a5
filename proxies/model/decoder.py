"""Decoder transformers (llama-like and gpt2-like) whose every tensor may carry a leading trial axis.

The bank trains K trials as one batched model; with `num_trials = None`, for one model, no tensor has the K axis.
Under autocast or with bfloat16 parameters norms, rotary positions and the loss are still computed in float32.

Shape suffixes: K trials, N = B * T tokens (B sequences of T), D width, H query heads, G key/value heads,
E head dim, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from proxies.core.shape import Shape
from proxies.model.fused_loss import fused_token_loss
from proxies.model.rotary import rotate

Checkpointing = bool | Literal["selective"]
"""Compute again nothing, all (True), or all but products of matrices and attention."""
_ATEN = torch.ops.aten
_KEPT = [
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
]


def _keep_products() -> Any:
    return create_selective_checkpoint_contexts(_KEPT)  # type: ignore[no-untyped-call]


def recomputed(how: Checkpointing, branches: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """`branches(*inputs)`, whose insides the backward pass computes again; the gradients are the same bits."""
    # Else no context at all: torch.compile takes no neutral one.
    context: dict[str, Any] = {"context_fn": _keep_products} if how == "selective" else {}
    out: Tensor = checkpoint(branches, *inputs, use_reentrant=False, preserve_rng_state=False, **context)
    return out


_VECTOR = 64
"""Elements: torch's loops on a CPU take two vectors at a time, at most so many (of bfloat16 under AVX-512)."""
_GRAIN = 32768
"""Elements of a thread's share, at least (at::internal::GRAIN_SIZE)."""


def slotwise(function: Callable[[Tensor], Tensor], x_KNF: Tensor) -> Tensor:
    """`function` of every element, [K, N, F] to the same; without K as it stands.

    What is left of a thread's share beyond whole vectors, torch computes on a CPU by scalar code, whose exponential may
    round otherwise. Where a share ends amid vectors, slots are done one after the other: then each has the same ends.
    """
    if x_KNF.dim() < 3 or x_KNF.device.type != "cpu" or torch.compiler.is_compiling():
        return function(x_KNF)  # compiled code masks its last vector
    num_shares = max(1, min(torch.get_num_threads(), -(-x_KNF.numel() // _GRAIN)))
    if x_KNF.numel() % (_VECTOR * num_shares) == 0:
        return function(x_KNF)
    return torch.stack([function(x_NF) for x_NF in x_KNF])


NORM_EPS = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Multipliers:
    """Forward multipliers: a number, or one per trial as a tensor of shape [K, 1, 1]."""

    embedding: float | Tensor = 1.0
    """Of tokens and positions together."""
    attention: float | Tensor
    """Scale of the attention logits q . k."""
    residual: float | Tensor = 1.0
    """Of each branch, attention and feed-forward, before it joins the residual stream."""
    output: float | Tensor = 1.0


def linear(x_KND: Tensor, weight_KFD: Tensor) -> Tensor:
    """`x W^T` per trial: [K, N, D] and [K, F, D] give [K, N, F]; without K likewise."""
    return x_KND @ weight_KFD.mT


def _wide(x: Tensor) -> Tensor:
    """In float32 where it has fewer bits."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _joined(x_KND: Tensor, branch_KND: Tensor, factor: float | Tensor) -> Tensor:
    """`x + factor * branch`, in one pass."""
    if isinstance(factor, Tensor):
        return torch.addcmul(x_KND, branch_KND, factor)
    if torch.compiler.is_compiling():  # torch 2.13 makes this sum and the product before it one, and drops `alpha`
        return x_KND + branch_KND * factor
    return torch.add(x_KND, branch_KND, alpha=factor)


class Weight(nn.Module):
    """A parameter named `weight` and, if asked for, a `bias` along its first dimension; with or without trials."""

    def __init__(self, *size: int, num_trials: int | None, device: torch.device | None, bias: bool = False) -> None:
        super().__init__()
        lead = () if num_trials is None else (num_trials,)
        self.weight = nn.Parameter(torch.empty(*lead, *size, device=device))
        self.bias = nn.Parameter(torch.empty(*lead, size[0], device=device)) if bias else None

    def _biased(self, x_KND: Tensor) -> Tensor:
        # Under autocast a product is bfloat16; a float32 bias would widen it again.
        return x_KND if self.bias is None else x_KND + self.bias.unsqueeze(-2).to(x_KND.dtype)


class Linear(Weight):
    """A linear map; weight [K, out, in], bias [K, out]."""

    def forward(self, x_KND: Tensor) -> Tensor:
        """[K, N, in] to [K, N, out]."""
        return self._biased(linear(x_KND, self.weight))


class Embedding(Weight):
    """Token table; weight [K, V, D]."""

    def forward(self, ids_KN: Tensor) -> Tensor:
        """[K, N] token ids to [K, N, D]."""
        if self.weight.dim() == 2:
            return functional.embedding(ids_KN, self.weight)
        num_trials, vocab_size, _ = self.weight.shape
        offsets_K1 = torch.arange(num_trials, device=ids_KN.device)[:, None] * vocab_size
        return functional.embedding(ids_KN + offsets_K1, self.weight.flatten(0, 1))


class Positions(Weight):
    """Learned positions; weight [K, T, D]."""

    def forward(self, x_KND: Tensor) -> Tensor:
        """[K, B * T, D] to the same, each token's position added."""
        x_KBTD = x_KND.reshape(*x_KND.shape[:-2], -1, *self.weight.shape[-2:])
        return (x_KBTD + self.weight.unsqueeze(-3)).flatten(-3, -2)


class RMSNorm(Weight):
    """Root-mean-square norm (arXiv 1910.07467); gain [K, D]."""

    def forward(self, x_KND: Tensor) -> Tensor:
        """[K, N, D] to the same."""
        normed = functional.rms_norm(_wide(x_KND), (x_KND.shape[-1],), eps=NORM_EPS)
        return (normed * self.weight.unsqueeze(-2)).to(x_KND.dtype)


class LayerNorm(Weight):
    """Layer norm (arXiv 1607.06450); gain and bias [K, D]."""

    def forward(self, x_KND: Tensor) -> Tensor:
        """[K, N, D] to the same."""
        normed = functional.layer_norm(_wide(x_KND), (x_KND.shape[-1],), eps=NORM_EPS)
        return self._biased(normed * self.weight.unsqueeze(-2)).to(x_KND.dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads (arXiv 2305.13245) and optional QK-norm (arXiv 2505.09388)."""

    def __init__(self, shape: Shape, num_trials: int | None, device: torch.device | None) -> None:
        super().__init__()
        self.shape = shape
        make = partial(Linear, num_trials=num_trials, device=device, bias=shape.family == "gpt2")
        self.wq = make(shape.width, shape.width)
        self.wk = make(shape.kv_width, shape.width)
        self.wv = make(shape.kv_width, shape.width)
        self.wo = make(shape.width, shape.width)
        head_norm = partial(RMSNorm, shape.head_dim, num_trials=num_trials, device=device)
        self.q_norm = head_norm() if shape.qk_norm else None
        self.k_norm = head_norm() if shape.qk_norm else None

    def forward(self, x_KND: Tensor, scale: float | Tensor) -> Tensor:
        """[K, N, D] to the same; `scale` multiplies q . k."""
        q_BTHE = self._heads(self._normed(self.wq(x_KND), self.q_norm) * scale, self.shape.num_heads)
        k_BTGE = self._heads(self._normed(self.wk(x_KND), self.k_norm), self.shape.num_kv_heads)
        v_BTGE = self._heads(self.wv(x_KND), self.shape.num_kv_heads)
        if self.shape.family == "llama":
            most_heads = self.shape.num_heads
            q_BTHE, k_BTGE = rotate(q_BTHE, most_heads), rotate(k_BTGE, most_heads)
        mixed_BHTE = functional.scaled_dot_product_attention(
            q_BTHE.to(v_BTGE.dtype).transpose(1, 2),
            k_BTGE.to(v_BTGE.dtype).transpose(1, 2),
            v_BTGE.transpose(1, 2),
            is_causal=True,
            scale=1.0,
            enable_gqa=self.shape.num_heads != self.shape.num_kv_heads,
        )
        out_KND: Tensor = self.wo(mixed_BHTE.transpose(1, 2).reshape(*x_KND.shape[:-1], -1))
        return out_KND

    def _normed(self, x_KND: Tensor, norm: RMSNorm | None) -> Tensor:
        # Heads join the tokens: all share one gain.
        if norm is None:
            return x_KND
        heads_KNE = x_KND.reshape(*x_KND.shape[:-2], -1, self.shape.head_dim)
        normed_KNE: Tensor = norm(heads_KNE)
        return normed_KNE.view(x_KND.shape)

    def _heads(self, x_KND: Tensor, num_heads: int) -> Tensor:
        # Trials join the batch axis: attention has no weights of its own.
        return x_KND.reshape(-1, self.shape.seq_len, num_heads, self.shape.head_dim)


class FeedForward(nn.Module):
    """llama: SwiGLU (arXiv 2002.05202). gpt2: GELU (arXiv 1606.08415) by tanh, with biases and without w3."""

    def __init__(self, shape: Shape, num_trials: int | None, device: torch.device | None) -> None:
        super().__init__()
        gated = shape.family == "llama"
        make = partial(Linear, num_trials=num_trials, device=device, bias=not gated)
        self.w1 = make(shape.ffn_width, shape.width)
        self.w2 = make(shape.width, shape.ffn_width)
        self.w3 = make(shape.ffn_width, shape.width) if gated else None

    def forward(self, x_KND: Tensor) -> Tensor:
        """[K, N, D] to the same."""
        if self.w3 is None:
            hidden_KNF = slotwise(partial(functional.gelu, approximate="tanh"), self.w1(x_KND))
        else:
            hidden_KNF = slotwise(functional.silu, self.w1(x_KND)) * self.w3(x_KND)
        out_KND: Tensor = self.w2(hidden_KNF)
        return out_KND


class Block(nn.Module):
    """Pre-norm transformer block; `checkpointing` recomputes it in the backward pass rather than keep its insides."""

    def __init__(
        self, shape: Shape, num_trials: int | None, device: torch.device | None, checkpointing: Checkpointing = False
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.attention_norm = _norm(shape, num_trials, device)
        self.attention = Attention(shape, num_trials, device)
        self.ffn_norm = _norm(shape, num_trials, device)
        self.feed_forward = FeedForward(shape, num_trials, device)

    def forward(self, x_KND: Tensor, attention_scale: float | Tensor, residual: float | Tensor = 1.0) -> Tensor:
        """[K, N, D] to the same; `residual` multiplies what each branch adds."""
        if self.checkpointing and torch.is_grad_enabled():
            # Inside the block, so that FSDP's gathering of its weights is not part of what is recomputed.
            return recomputed(self.checkpointing, self._branches, x_KND, attention_scale, residual)
        return self._branches(x_KND, attention_scale, residual)

    def _branches(self, x_KND: Tensor, attention_scale: float | Tensor, residual: float | Tensor) -> Tensor:
        x_KND = _joined(x_KND, self.attention(self.attention_norm(x_KND), attention_scale), residual)
        return _joined(x_KND, self.feed_forward(self.ffn_norm(x_KND)), residual)


def _norm(shape: Shape, num_trials: int | None, device: torch.device | None) -> RMSNorm | LayerNorm:
    if shape.family == "llama":
        return RMSNorm(shape.width, num_trials=num_trials, device=device)
    return LayerNorm(shape.width, num_trials=num_trials, device=device, bias=True)


class Decoder(nn.Module):
    """The model of `shape`, or `num_trials` of them side by side. Weights are left uninitialized.

    `checkpointing` trades about a third more time for memory; gradients stay the same, bit by bit. `fused_loss` takes
    the loss by parts (`proxies.model.fused_loss`).
    """

    def __init__(
        self,
        shape: Shape,
        *,
        num_trials: int | None = None,
        device: torch.device | str | None = None,
        checkpointing: Checkpointing = False,
        fused_loss: bool = False,
    ) -> None:
        super().__init__()
        self.shape, self.fused_loss = shape, fused_loss
        place = None if device is None else torch.device(device)
        self.tok_embeddings = Embedding(shape.vocab_size, shape.width, num_trials=num_trials, device=place)
        self.pos_embeddings: Positions | None = None
        if shape.family == "gpt2":
            self.pos_embeddings = Positions(shape.seq_len, shape.width, num_trials=num_trials, device=place)
        self.layers = nn.ModuleList(Block(shape, num_trials, place, checkpointing) for _ in range(shape.num_layers))
        self.norm = _norm(shape, num_trials, place)
        self.lm_head = Linear(shape.vocab_size, shape.width, num_trials=num_trials, device=place)
        if shape.tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, ids_KBT: Tensor, multipliers: Multipliers, targets_KBT: Tensor | None = None) -> Tensor:
        """Token ids [K, B, T] (or [B, T]) to logits [K, N, V] (or [N, V]), N = B * T; with targets, to the loss.

        Returns:
            Logits, or with `targets_KBT` of the ids' shape the mean loss in nats per token: [K], or a scalar.

        Raises:
            ValueError: the sequences are not of the shape's length.
        """
        if ids_KBT.shape[-1] != self.shape.seq_len:
            raise ValueError(f"sequences of {ids_KBT.shape[-1]} tokens: the model's have {self.shape.seq_len}")
        x_KND = self.tok_embeddings(ids_KBT.flatten(-2))
        if self.pos_embeddings is not None:
            x_KND = self.pos_embeddings(x_KND)
        x_KND = x_KND * multipliers.embedding
        for block in self.layers:
            x_KND = block(x_KND, multipliers.attention, multipliers.residual)
        x_KND = self.norm(x_KND) * multipliers.output
        if targets_KBT is not None and self.fused_loss:
            return fused_token_loss(x_KND, self.lm_head.weight, targets_KBT)
        logits_KNV: Tensor = self.lm_head(x_KND)
        return logits_KNV if targets_KBT is None else token_loss(logits_KNV, targets_KBT)


def token_loss(logits_KNV: Tensor, targets_KBT: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token, in float32 at least: one number per trial, [K], or a scalar without."""
    losses_KN = functional.cross_entropy(
        _wide(logits_KNV.flatten(0, -2)),
        targets_KBT.flatten(),
        reduction="none",
    )
    return losses_KN.view(logits_KNV.shape[:-1]).mean(dim=-1)


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and dimensions, from the module itself (on the meta device: nothing is allocated)."""
    return {name: tuple(p.shape) for name, p in Decoder(shape, device="meta").named_parameters()}
