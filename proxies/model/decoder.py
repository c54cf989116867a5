"""Decoder transformers (llama-like and gpt2-like) for one model, or for the K trials of a bank.

With `num_trials = K` every tensor has a leading trial axis, and K models are trained as one batched
model; with `num_trials = None` no tensor has it. The model computes in the dtype of its residual
stream (`forerun._proxies.model.precision`). In a bank, the result of a trial must not depend on the
other trials, not even by rounding, so activation functions are called through `apply_slotwise`.

Shape suffixes: K trials, N = B * T tokens (B sequences of T), D width, H query heads, G key/value
heads, E head dim, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from forerun._proxies.core.numbers import ForwardNumbers
from forerun._proxies.core.shape import Shape
from forerun._proxies.model.layers import (
    Embedding,
    LayerNorm,
    Linear,
    Positions,
    RMSNorm,
    add_branch,
    apply_slotwise,
    apply_together,
    scale,
)
from forerun._proxies.model.loss import FusedLoss, LossWeights, compute_token_loss, get_loss_weights
from forerun._proxies.model.rotary import rotate

# ---- Activation checkpointing ----

Checkpointing = bool | Literal["selective"]
"""Activations that the backward pass recomputes: none, all (True), or all except matrix products
and attention."""
_ATEN = torch.ops.aten
_KEPT_OPERATIONS = [
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
]
"""Operations whose results selective checkpointing keeps."""


def _make_selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_KEPT_OPERATIONS)  # type: ignore[no-untyped-call]


def run_checkpointed(
    checkpointing: Checkpointing, branches: Callable[..., Tensor], *inputs: Any
) -> Tensor:
    """Return `branches(*inputs)`, whose activations the backward pass recomputes.

    The gradients are the same to the bit.
    """
    # Pass no `context_fn` if nothing is kept: torch.compile rejects a function without effect
    context: dict[str, Any] = {}
    if checkpointing == "selective":
        context["context_fn"] = _make_selective_contexts
    output: Tensor = checkpoint(
        branches, *inputs, use_reentrant=False, preserve_rng_state=False, **context
    )
    return output


# ---- Blocks ----


@dataclass(frozen=True, kw_only=True, slots=True)
class Multipliers:
    """Forward multipliers, each a number, or a tensor [K, 1, 1] with one number per trial."""

    embedding: float | Tensor = 1.0
    """Multiplier of the sum of token and position embeddings."""
    attention: float | Tensor
    """Scale of the attention logits q . k."""
    residual: float | Tensor = 1.0
    """Multiplier of each branch (attention, feed-forward) before it joins the residual stream."""
    output: float | Tensor = 1.0
    """Multiplier of the readout's input."""
    loss_weights: LossWeights = field(default_factory=dict)
    """Weights of the loss terms by name (`forerun._proxies.model.loss.LOSS_TERMS`); in a bank,
    tensors [K]."""

    @classmethod
    def from_run(cls, forward: ForwardNumbers, run_wide: Mapping[str, float | None]) -> Multipliers:
        """Return the multipliers of a run, from its forward numbers and its run-wide settings."""
        return cls(**asdict(forward), loss_weights=get_loss_weights(run_wide))


def _make_norm(
    shape: Shape, num_trials: int | None, device: torch.device | None
) -> RMSNorm | LayerNorm:
    if shape.family == "llama":
        return RMSNorm(shape.width, num_trials=num_trials, device=device)
    return LayerNorm(shape.width, num_trials=num_trials, device=device, bias=True)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads (arXiv 2305.13245) and optional QK-norm
    (arXiv 2505.09388).
    """

    def __init__(self, shape: Shape, num_trials: int | None, device: torch.device | None) -> None:
        super().__init__()
        self.shape = shape
        make = partial(Linear, num_trials=num_trials, device=device, bias=shape.family == "gpt2")
        self.wq = make(shape.width, shape.width)
        self.wk = make(shape.kv_width, shape.width)
        self.wv = make(shape.kv_width, shape.width)
        self.wo = make(shape.width, shape.width)
        make_head_norm = partial(RMSNorm, shape.head_dim, num_trials=num_trials, device=device)
        self.q_norm = make_head_norm() if shape.qk_norm else None
        self.k_norm = make_head_norm() if shape.qk_norm else None

    def forward(self, x_KND: Tensor, multiplier: float | Tensor) -> Tensor:
        """Map [K, N, D] to the same; `multiplier` scales q . k."""
        # q, k, and v are three separate products. `apply_together` would make them one, as
        # `FeedForward` does with w1 and w3, but its backward pass concatenates the gradients. That
        # is slow here, because the rotation leaves the gradients of q and k in another layout.
        q_KND, k_KND, v_KND = self.wq(x_KND), self.wk(x_KND), self.wv(x_KND)

        # QK-norm and scale
        q_KND = scale(self._normalize_heads(q_KND, self.q_norm), multiplier)
        k_KND = self._normalize_heads(k_KND, self.k_norm)
        q_BTHE = self._split_heads(q_KND, self.shape.num_heads)
        k_BTGE = self._split_heads(k_KND, self.shape.num_kv_heads)
        v_BTGE = self._split_heads(v_KND, self.shape.num_kv_heads)

        # Positions
        if self.shape.family == "llama":
            sizes = self.shape.seq_len, self.shape.num_heads, self.shape.head_dim
            q_BTHE, k_BTGE = rotate(q_BTHE, *sizes), rotate(k_BTGE, *sizes)

        # Attention and output
        mixed_BHTE = _attend(q_BTHE.to(v_BTGE.dtype), k_BTGE.to(v_BTGE.dtype), v_BTGE)
        out_KND: Tensor = self.wo(mixed_BHTE.transpose(1, 2).reshape(*x_KND.shape[:-1], -1))
        return out_KND

    def _normalize_heads(self, x_KND: Tensor, norm: RMSNorm | None) -> Tensor:
        """Normalize each head by a gain that all heads share, so heads are treated as tokens."""
        if norm is None:
            return x_KND
        heads_KNE = x_KND.reshape(*x_KND.shape[:-2], -1, self.shape.head_dim)
        normed_KNE: Tensor = norm(heads_KNE)
        return normed_KNE.view(x_KND.shape)

    def _split_heads(self, x_KND: Tensor, num_heads: int) -> Tensor:
        """Return [K * B, T, H, E]: attention has no weights, so trials are treated as sequences."""
        return x_KND.reshape(-1, self.shape.seq_len, num_heads, self.shape.head_dim)


def _attend(q_BTHE: Tensor, k_BTGE: Tensor, v_BTGE: Tensor) -> Tensor:
    """Return the causal attention [B, H, T, E]; H / G query heads share one key/value head.

    The queries are scaled already, so the attention scales by 1.
    """
    queries_per_key = q_BTHE.shape[2] // k_BTGE.shape[2]
    if queries_per_key > 1 and q_BTHE.device.type == "cuda" and q_BTHE.dtype == torch.float32:
        # In float32 on a GPU, flash attention does not work, and the memory-efficient kernel does
        # not support grouped heads. torch would fall back to a kernel that holds all logits in
        # memory, so give every query head its own copy of the keys and values.
        k_BTGE = k_BTGE.repeat_interleave(queries_per_key, dim=2)
        v_BTGE = v_BTGE.repeat_interleave(queries_per_key, dim=2)
        queries_per_key = 1
    return functional.scaled_dot_product_attention(
        q_BTHE.transpose(1, 2),
        k_BTGE.transpose(1, 2),
        v_BTGE.transpose(1, 2),
        is_causal=True,
        scale=1.0,
        enable_gqa=queries_per_key > 1,
    )


class FeedForward(nn.Module):
    """Feed-forward branch of a block.

    `llama`: SwiGLU (arXiv 2002.05202), w2(silu(w1 x) * w3 x). `gpt2`: w2(gelu(w1 x)) with biases
    and the tanh approximation of GELU (arXiv 1606.08415); there is no w3.
    """

    def __init__(self, shape: Shape, num_trials: int | None, device: torch.device | None) -> None:
        super().__init__()
        is_gated = shape.family == "llama"
        make = partial(Linear, num_trials=num_trials, device=device, bias=not is_gated)
        self.w1 = make(shape.ffn_width, shape.width)
        self.w2 = make(shape.width, shape.ffn_width)
        self.w3 = make(shape.ffn_width, shape.width) if is_gated else None

    def forward(self, x_KND: Tensor) -> Tensor:
        """Map [K, N, D] to the same."""
        if self.w3 is None:
            hidden_KNF = apply_slotwise(
                partial(functional.gelu, approximate="tanh"), self.w1(x_KND)
            )
        else:
            gate_KNF, value_KNF = apply_together(x_KND, self.w1, self.w3)
            hidden_KNF = apply_slotwise(functional.silu, gate_KNF) * value_KNF
        out_KND: Tensor = self.w2(hidden_KNF)
        return out_KND


class Block(nn.Module):
    """A pre-norm transformer block; `checkpointing` recomputes it in the backward pass."""

    def __init__(
        self,
        shape: Shape,
        num_trials: int | None,
        device: torch.device | None,
        checkpointing: Checkpointing = False,
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.attention_norm = _make_norm(shape, num_trials, device)
        self.attention = Attention(shape, num_trials, device)
        self.ffn_norm = _make_norm(shape, num_trials, device)
        self.feed_forward = FeedForward(shape, num_trials, device)

    def forward(
        self, x_KND: Tensor, attention_scale: float | Tensor, residual: float | Tensor = 1.0
    ) -> Tensor:
        """Map [K, N, D] to the same; `residual` multiplies what each branch adds."""
        if self.checkpointing and torch.is_grad_enabled():
            # Checkpoint inside the block and not around it: FSDP gathers a block's weights when the
            # block is called, and recomputing the call would gather them again
            return run_checkpointed(
                self.checkpointing, self._add_branches, x_KND, attention_scale, residual
            )
        return self._add_branches(x_KND, attention_scale, residual)

    def _add_branches(
        self, x_KND: Tensor, attention_scale: float | Tensor, residual: float | Tensor
    ) -> Tensor:
        attention_KND = self.attention(self.attention_norm(x_KND), attention_scale)
        x_KND = add_branch(x_KND, attention_KND, residual)
        return add_branch(x_KND, self.feed_forward(self.ffn_norm(x_KND)), residual)


# ---- Model ----


class Decoder(nn.Module):
    """A decoder of a shape, or `num_trials` of them as one batched model.

    The weights are created in float32 and left uninitialized.

    Args:
        shape: Shape of the model.
        num_trials: Number of trials; None for one model without a trial axis.
        device: Device of the weights.
        checkpointing: Activations that the backward pass recomputes. It takes about a third more
            time and less memory; the gradients are the same to the bit.
        fused_loss: Whether the loss is computed part by part from the hidden states, so that the
            logits of a batch are never all in memory (`forerun._proxies.model.loss`).
        compute: Dtype of the computation (`forerun._proxies.model.precision`); None for that of the
            weights.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        num_trials: int | None = None,
        device: torch.device | str | None = None,
        checkpointing: Checkpointing = False,
        fused_loss: bool = False,
        compute: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.compute = shape, compute
        self.fused_loss = FusedLoss() if fused_loss else None
        device = None if device is None else torch.device(device)
        options: dict[str, Any] = {"num_trials": num_trials, "device": device}
        self.tok_embeddings = Embedding(shape.vocab_size, shape.width, **options)
        self.pos_embeddings: Positions | None = None
        if shape.family == "gpt2":
            self.pos_embeddings = Positions(shape.seq_len, shape.width, **options)
        self.layers = nn.ModuleList(
            Block(shape, num_trials, device, checkpointing) for _ in range(shape.num_layers)
        )
        self.norm = _make_norm(shape, num_trials, device)
        self.lm_head = Linear(shape.vocab_size, shape.width, **options)
        if shape.tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(
        self, ids_KBT: Tensor, multipliers: Multipliers, targets_KBT: Tensor | None = None
    ) -> Tensor:
        """Compute logits, or with targets the loss.

        Args:
            ids_KBT: Token ids [K, B, T], or [B, T] for one model.
            multipliers: Forward multipliers.
            targets_KBT: Token ids of the same shape; None for logits.

        Returns:
            Logits [K, N, V] with N = B * T; with targets the mean loss in nats per token, [K]. For
            one model [N, V], or a scalar.

        Raises:
            ValueError: The sequences do not have the shape's length.
        """
        if ids_KBT.shape[-1] != self.shape.seq_len:
            raise ValueError(
                f"sequences of {ids_KBT.shape[-1]} tokens: must have {self.shape.seq_len}"
            )
        # Embeddings
        x_KND = self.tok_embeddings(ids_KBT.flatten(-2), self.compute)
        if self.pos_embeddings is not None:
            x_KND = self.pos_embeddings(x_KND)
        x_KND = scale(x_KND, multipliers.embedding)

        # Blocks
        for block in self.layers:
            x_KND = block(x_KND, multipliers.attention, multipliers.residual)
        x_KND = scale(self.norm(x_KND), multipliers.output)

        # Fused loss, which never holds the logits of a whole batch
        if targets_KBT is not None and self.fused_loss is not None:
            weight_KVD = self.lm_head.weight.to(x_KND.dtype)
            loss_K: Tensor = self.fused_loss(
                x_KND, weight_KVD, targets_KBT, multipliers.loss_weights
            )
            return loss_K

        # Logits
        logits_KNV: Tensor = self.lm_head(x_KND)
        if targets_KBT is None:
            return logits_KNV
        return compute_token_loss(logits_KNV, targets_KBT, multipliers.loss_weights)
