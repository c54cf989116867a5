"""Decoder transformers (llama-like and gpt2-like) whose every tensor may carry a leading trial
axis.

The bank trains K trials as one batched model; with `num_trials = None`, for one model, no tensor
has the K axis. What it computes in follows from its residual stream: `proxies.model.precision`.

Shape suffixes: K trials, N = B * T tokens (B sequences of T), D width, H query heads, G key/value
heads, E head dim, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from proxies.core.numbers import ForwardNumbers
from proxies.core.shape import Shape
from proxies.model.loss import FusedLoss, LossWeights, loss_weights, token_loss
from proxies.model.precision import widened

# Rotary position embedding (arXiv 2104.09864), halves paired as in Llama's code.

ROPE_BASE = 10_000.0  # arXiv 2104.09864


@lru_cache(maxsize=8)
def _rotary_tables(
    seq_len: int, num_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Cosines and signed sines, [2, T, H, E]: no buffer, which `to_empty` would leave unset."""
    # the cache outlives the mode, and its tensors could not enter a backward pass
    with torch.inference_mode(False):
        frequencies_E = ROPE_BASE ** (
            -torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
        )
        angles_TE = (
            torch.arange(seq_len, device=device, dtype=torch.float64)[:, None] * frequencies_E
        )
        cos_TE, sin_TE = angles_TE.cos().to(dtype), angles_TE.sin().to(dtype)
        tables_TE = torch.stack(
            (torch.cat((cos_TE, cos_TE), dim=-1), torch.cat((-sin_TE, sin_TE), dim=-1))
        )
        return tables_TE[:, :, None].repeat(1, 1, num_heads, 1)


def _constant_tables(
    seq_len: int, num_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    # Compiled, the tables are a constant of the graph: no float64 cosines at every step.
    return _rotary_tables(seq_len, num_heads, head_dim, device, dtype)


# As `torch.compiler.assume_constant_result` marks it, which loads the compiler: two seconds of
# every verb with torch.
_constant_tables._dynamo_marked_constant = True  # type: ignore[attr-defined]


def rotate(x_BTHE: Tensor, seq_len: int, num_heads: int, head_dim: int) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864), halves paired: [B, T, H, E] to the same, in
    float32 at least.

    Whole rows at a time, halves swapped by a roll: half rows of a few floats cost a CPU ten times
    as much. And on a CPU the tables are written out for every head, `num_heads` where keys have
    fewer than queries, so that a model has one pair of them: a loop over one head's few floats
    costs it twice as much. Sizes are numbers of the model, not read off
    x: compiled for batches of any size, torch 2.11 takes those for unknown, and the tables are to
    be constants.
    """
    x_BTHE = widened(x_BTHE)
    table_heads = num_heads if x_BTHE.device.type == "cpu" else 1
    tables_2THE = _constant_tables(seq_len, table_heads, head_dim, x_BTHE.device, x_BTHE.dtype)
    cos_THE, sin_THE = tables_2THE[:, :, : x_BTHE.shape[2]].unbind()
    return torch.addcmul(x_BTHE * cos_THE, x_BTHE.roll(head_dim // 2, -1), sin_THE)


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
    """`branches(*inputs)`, whose insides the backward pass computes again; the gradients are the
    same bits.
    """
    # Else no context at all: torch.compile takes no neutral one.
    context: dict[str, Any] = {"context_fn": _keep_products} if how == "selective" else {}
    out: Tensor = checkpoint(
        branches, *inputs, use_reentrant=False, preserve_rng_state=False, **context
    )
    return out


_VECTOR = 64
"""Elements: torch's loops on a CPU take two vectors at a time, at most so many (of bfloat16 under
AVX-512)."""
_GRAIN = 32768
"""Elements of a thread's share, at least (at::internal::GRAIN_SIZE)."""


def slotwise(function: Callable[[Tensor], Tensor], x_KNF: Tensor) -> Tensor:
    """`function` of every element, [K, N, F] to the same; without K as it stands.

    What is left of a thread's share beyond whole vectors, torch computes on a CPU by scalar code,
    whose exponential may round otherwise. Where a share ends amid vectors, slots are done one after
    the other: then each has the same ends.
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
    loss_weights: LossWeights = field(default_factory=dict)
    """Weights of the loss terms (`proxies.model.loss.LOSS_TERMS`), one per trial as tensors [K]."""

    @classmethod
    def of_run(cls, forward: ForwardNumbers, run_wide: Mapping[str, float | None]) -> Multipliers:
        """Return the multipliers of a run, from its forward numbers and its run-wide settings."""
        return cls(**asdict(forward), loss_weights=loss_weights(run_wide))


class _Products(torch.autograd.Function):
    """`x W^T` of each trial, the gradient of W laid out as W is.

    Torch computes that of a batched product transposed, and copies each once more to turn it; that
    of one it does not.
    """

    @staticmethod
    def forward(ctx: Any, x_KND: Tensor, weight_KFD: Tensor) -> Tensor:
        ctx.save_for_backward(x_KND, weight_KFD)
        return x_KND @ weight_KFD.mT

    @staticmethod
    def backward(ctx: Any, d_out_KNF: Tensor) -> tuple[Tensor, Tensor]:
        x_KND, weight_KFD = ctx.saved_tensors
        return d_out_KNF @ weight_KFD, d_out_KNF.mT @ x_KND


def linear(x_KND: Tensor, weight_KFD: Tensor) -> Tensor:
    """`x W^T` per trial: [K, N, D] and [K, F, D] give [K, N, F]; without K likewise."""
    cast_KFD = weight_KFD.to(x_KND.dtype)
    if x_KND.dim() == 3 and torch.compiler.is_compiling():
        out_KNF: Tensor = _Products.apply(x_KND, cast_KFD)  # type: ignore[no-untyped-call]
        return out_KNF
    return x_KND @ cast_KFD.mT


def _times(x_KND: Tensor, factor: float | Tensor) -> Tensor:
    """`x * factor` in the dtype of x, which a tensor of factors would widen."""
    return (x_KND * factor).to(x_KND.dtype)


def _joined(x_KND: Tensor, branch_KND: Tensor, factor: float | Tensor) -> Tensor:
    """`x + factor * branch`, in one pass."""
    if isinstance(factor, Tensor):
        return torch.addcmul(x_KND, branch_KND, factor).to(x_KND.dtype)
    # torch 2.13 makes this sum and the product before it one, and drops `alpha`
    if torch.compiler.is_compiling():
        return x_KND + branch_KND * factor
    return torch.add(x_KND, branch_KND, alpha=factor)


class Weight(nn.Module):
    """A parameter named `weight` and, if asked for, a `bias` along its first dimension; with or
    without trials.
    """

    def __init__(
        self, *size: int, num_trials: int | None, device: torch.device | None, bias: bool = False
    ) -> None:
        super().__init__()
        lead = () if num_trials is None else (num_trials,)
        # whatever torch's default dtype is set to
        make = partial(torch.empty, dtype=torch.float32, device=device)
        self.weight = nn.Parameter(make(*lead, *size))
        self.bias = nn.Parameter(make(*lead, size[0])) if bias else None

    def biased(self, x_KND: Tensor) -> Tensor:
        """`x` plus the bias, if there is one."""
        return x_KND if self.bias is None else x_KND + self.bias.unsqueeze(-2).to(x_KND.dtype)


class Linear(Weight):
    """A linear map; weight [K, out, in], bias [K, out]."""

    def forward(self, x_KND: Tensor) -> Tensor:
        """[K, N, in] to [K, N, out]."""
        return self.biased(linear(x_KND, self.weight))


def beside(x_KND: Tensor, *maps: Linear) -> list[Tensor]:
    """What each map makes of x. Compiled in bfloat16 by one product, whose joined weight is made as
    it is cast.

    Not elsewhere: without a cast (float32, or weights that FSDP has cast) joining would be a copy
    more, which nobody frees until the backward pass; and uncompiled each map is called by itself,
    for hooks to see.
    """
    cast = x_KND.dtype == torch.bfloat16 != maps[0].weight.dtype
    if not (cast and torch.compiler.is_compiling()):
        return [one(x_KND) for one in maps]
    joined_KFD = torch.cat([one.weight.to(x_KND.dtype) for one in maps], dim=-2)
    parts_KNF = torch.split(
        linear(x_KND, joined_KFD), [one.weight.shape[-2] for one in maps], dim=-1
    )
    return [one.biased(part_KNF) for one, part_KNF in zip(maps, parts_KNF, strict=True)]


class Embedding(Weight):
    """Token table; weight [K, V, D]."""

    def forward(self, ids_KN: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[K, N] token ids to [K, N, D] in `dtype`; None: the weight's."""
        weight_KVD = self.weight.to(dtype or self.weight.dtype)
        if weight_KVD.dim() == 2:
            return functional.embedding(ids_KN, weight_KVD)
        num_trials, vocab_size, _ = weight_KVD.shape
        offsets_K1 = torch.arange(num_trials, device=ids_KN.device)[:, None] * vocab_size
        return functional.embedding(ids_KN + offsets_K1, weight_KVD.flatten(0, 1))


class Positions(Weight):
    """Learned positions; weight [K, T, D]."""

    def forward(self, x_KND: Tensor) -> Tensor:
        """[K, B * T, D] to the same, each token's position added."""
        x_KBTD = x_KND.reshape(*x_KND.shape[:-2], -1, *self.weight.shape[-2:])
        return (x_KBTD + self.weight.unsqueeze(-3).to(x_KND.dtype)).flatten(-3, -2)


class RMSNorm(Weight):
    """Root-mean-square norm (arXiv 1910.07467); gain [K, D]."""

    def forward(self, x_KND: Tensor) -> Tensor:
        """[K, N, D] to the same."""
        normed = functional.rms_norm(widened(x_KND), (x_KND.shape[-1],), eps=NORM_EPS)
        return (normed * self.weight.unsqueeze(-2).to(x_KND.dtype)).to(x_KND.dtype)


class LayerNorm(Weight):
    """Layer norm (arXiv 1607.06450); gain and bias [K, D]."""

    def forward(self, x_KND: Tensor) -> Tensor:
        """[K, N, D] to the same."""
        normed = functional.layer_norm(widened(x_KND), (x_KND.shape[-1],), eps=NORM_EPS)
        assert self.bias is not None
        gain, bias = (each.unsqueeze(-2).to(x_KND.dtype) for each in (self.weight, self.bias))
        return (normed * gain + bias).to(x_KND.dtype)


def _attended(q_BTHE: Tensor, k_BTGE: Tensor, v_BTGE: Tensor) -> Tensor:
    """Causal attention of queries that are scaled already, [B, H, T, E]; H / G of them share a key
    and a value.
    """
    queries_per_key = q_BTHE.shape[2] // k_BTGE.shape[2]
    if queries_per_key > 1 and q_BTHE.device.type == "cuda" and q_BTHE.dtype == torch.float32:
        # There flash attention takes half precision only, and the efficient kernel no groups: torch
        # would hold all logits in memory.
        k_BTGE, v_BTGE = (
            x_BTGE.repeat_interleave(queries_per_key, dim=2) for x_BTGE in (k_BTGE, v_BTGE)
        )
        queries_per_key = 1
    return functional.scaled_dot_product_attention(
        q_BTHE.transpose(1, 2),
        k_BTGE.transpose(1, 2),
        v_BTGE.transpose(1, 2),
        is_causal=True,
        scale=1.0,
        enable_gqa=queries_per_key > 1,
    )


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
        head_norm = partial(RMSNorm, shape.head_dim, num_trials=num_trials, device=device)
        self.q_norm = head_norm() if shape.qk_norm else None
        self.k_norm = head_norm() if shape.qk_norm else None

    def forward(self, x_KND: Tensor, scale: float | Tensor) -> Tensor:
        """[K, N, D] to the same; `scale` multiplies q . k."""
        # Not one product, as w1 and w3: their gradients, turned back by the rotation, would be
        # joined by a slow kernel.
        q_KND, k_KND, v_KND = self.wq(x_KND), self.wk(x_KND), self.wv(x_KND)
        q_BTHE = self._heads(_times(self._normed(q_KND, self.q_norm), scale), self.shape.num_heads)
        k_BTGE = self._heads(self._normed(k_KND, self.k_norm), self.shape.num_kv_heads)
        v_BTGE = self._heads(v_KND, self.shape.num_kv_heads)
        if self.shape.family == "llama":
            sizes = self.shape.seq_len, self.shape.num_heads, self.shape.head_dim
            q_BTHE, k_BTGE = rotate(q_BTHE, *sizes), rotate(k_BTGE, *sizes)
        mixed_BHTE = _attended(q_BTHE.to(v_BTGE.dtype), k_BTGE.to(v_BTGE.dtype), v_BTGE)
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
    """llama: SwiGLU (arXiv 2002.05202). gpt2: GELU (arXiv 1606.08415) by tanh, with biases and
    without w3.
    """

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
            gate_KNF, value_KNF = beside(x_KND, self.w1, self.w3)
            hidden_KNF = slotwise(functional.silu, gate_KNF) * value_KNF
        out_KND: Tensor = self.w2(hidden_KNF)
        return out_KND


class Block(nn.Module):
    """Pre-norm transformer block; `checkpointing` recomputes it in the backward pass rather than
    keep its insides.
    """

    def __init__(
        self,
        shape: Shape,
        num_trials: int | None,
        device: torch.device | None,
        checkpointing: Checkpointing = False,
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.attention_norm = _norm(shape, num_trials, device)
        self.attention = Attention(shape, num_trials, device)
        self.ffn_norm = _norm(shape, num_trials, device)
        self.feed_forward = FeedForward(shape, num_trials, device)

    def forward(
        self, x_KND: Tensor, attention_scale: float | Tensor, residual: float | Tensor = 1.0
    ) -> Tensor:
        """[K, N, D] to the same; `residual` multiplies what each branch adds."""
        if self.checkpointing and torch.is_grad_enabled():
            # Inside the block, so that FSDP's gathering of its weights is not part of what is
            # recomputed.
            return recomputed(self.checkpointing, self._branches, x_KND, attention_scale, residual)
        return self._branches(x_KND, attention_scale, residual)

    def _branches(
        self, x_KND: Tensor, attention_scale: float | Tensor, residual: float | Tensor
    ) -> Tensor:
        x_KND = _joined(
            x_KND, self.attention(self.attention_norm(x_KND), attention_scale), residual
        )
        return _joined(x_KND, self.feed_forward(self.ffn_norm(x_KND)), residual)


def _norm(shape: Shape, num_trials: int | None, device: torch.device | None) -> RMSNorm | LayerNorm:
    if shape.family == "llama":
        return RMSNorm(shape.width, num_trials=num_trials, device=device)
    return LayerNorm(shape.width, num_trials=num_trials, device=device, bias=True)


class Decoder(nn.Module):
    """The model of `shape`, or `num_trials` of them side by side. Weights are left uninitialized.

    `checkpointing` trades about a third more time for memory; gradients stay the same, bit by bit.
    `fused_loss` takes the loss by parts. `compute` is what it computes in
    (`proxies.model.precision`); None: what its weights are in. Weights are made in float32.
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
        place = None if device is None else torch.device(device)
        self.tok_embeddings = Embedding(
            shape.vocab_size, shape.width, num_trials=num_trials, device=place
        )
        self.pos_embeddings: Positions | None = None
        if shape.family == "gpt2":
            self.pos_embeddings = Positions(
                shape.seq_len, shape.width, num_trials=num_trials, device=place
            )
        self.layers = nn.ModuleList(
            Block(shape, num_trials, place, checkpointing) for _ in range(shape.num_layers)
        )
        self.norm = _norm(shape, num_trials, place)
        self.lm_head = Linear(shape.vocab_size, shape.width, num_trials=num_trials, device=place)
        if shape.tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(
        self, ids_KBT: Tensor, multipliers: Multipliers, targets_KBT: Tensor | None = None
    ) -> Tensor:
        """Token ids [K, B, T] (or [B, T]) to logits [K, N, V] (or [N, V]), N = B * T; with targets,
        to the loss.

        Returns:
            Logits, or with `targets_KBT` of the ids' shape the mean loss in nats per token: [K], or
            a scalar.

        Raises:
            ValueError: the sequences are not of the shape's length.
        """
        if ids_KBT.shape[-1] != self.shape.seq_len:
            raise ValueError(
                f"sequences of {ids_KBT.shape[-1]} tokens: must have {self.shape.seq_len}"
            )
        x_KND = self.tok_embeddings(ids_KBT.flatten(-2), self.compute)
        if self.pos_embeddings is not None:
            x_KND = self.pos_embeddings(x_KND)
        x_KND = _times(x_KND, multipliers.embedding)
        for block in self.layers:
            x_KND = block(x_KND, multipliers.attention, multipliers.residual)
        x_KND = _times(self.norm(x_KND), multipliers.output)
        if targets_KBT is not None and self.fused_loss is not None:
            weight_KVD = self.lm_head.weight.to(x_KND.dtype)
            loss_K: Tensor = self.fused_loss(
                x_KND, weight_KVD, targets_KBT, multipliers.loss_weights
            )
            return loss_K
        logits_KNV: Tensor = self.lm_head(x_KND)
        return (
            logits_KNV
            if targets_KBT is None
            else token_loss(logits_KNV, targets_KBT, multipliers.loss_weights)
        )
