"""The loss per token: from logits, or part by part from hidden states (the fused loss).

The fused loss never has the logits of a whole batch in memory. Its forward pass computes the loss
of each part of the batch together with its gradients. The logits of the part are then dropped, and
only the gradients with respect to the hidden states and the readout's weight are kept.

Let p be the softmax of a token's logits W h, y the token's target, and N the number of tokens. The
gradient of the mean loss with respect to the logits is g = (p - one_hot(y)) / N. The gradient with
respect to h is W^T g. The gradient with respect to W is the outer product g h^T, summed over the
tokens. In a bank (K trials trained as one batched model), a trial's numbers do not depend on the
other trials.

Shape suffixes: K trials, N = B * T tokens (B sequences of T), D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from forerun._proxies.model.precision import get_wide_dtype, widen

# ---- Loss terms ----

LossWeights = Mapping[str, float | Tensor]
"""Weights of loss terms by name, each a number, or a tensor [K] with one number per trial."""
NO_TERMS: LossWeights = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerm:
    """A term that a run-wide setting adds to the loss that is differentiated, not to the reported
    loss.
    """

    value: Callable[[Tensor, Tensor], Tensor]
    """Function from logits [..., N, V] in float32 at least and targets [..., N] to the term of each
    token [..., N]."""
    gradient: Callable[[Tensor, Tensor], Tensor]
    """Function from the same arguments to the gradient of the term by the logits, [..., N, V]."""


LOSS_TERMS: dict[str, LossTerm] = {}
"""Loss terms by the run-wide setting that is their weight
(`forerun._proxies.core.hyperparameters.RUN_WIDE`)."""


def get_loss_weights(run_wide: Mapping[str, float | None]) -> dict[str, float | Tensor]:
    """Return the weights of the loss terms of a run, from its run-wide settings."""
    return {name: weight for name in LOSS_TERMS if (weight := run_wide[name])}


# ---- Loss of logits ----


def compute_token_loss(
    logits_KNV: Tensor, targets_KBT: Tensor, weights: LossWeights = NO_TERMS
) -> Tensor:
    """Return the mean cross-entropy in nats per token, in float32 at least.

    Its gradient is that of the cross-entropy plus the weighted loss terms.

    Args:
        logits_KNV: Logits; [N, V] for one model.
        targets_KBT: Token ids; [B, T] for one model.
        weights: Weights of the loss terms.

    Returns:
        Losses [K], or a scalar.
    """
    losses_KN = functional.cross_entropy(
        widen(logits_KNV.flatten(0, -2)), targets_KBT.flatten(), reduction="none"
    )
    losses_K = losses_KN.view(logits_KNV.shape[:-1]).mean(dim=-1)
    if torch.is_grad_enabled():
        targets_KN = targets_KBT.reshape(logits_KNV.shape[:-1])
        for name, weight in weights.items():
            term_K = LOSS_TERMS[name].value(widen(logits_KNV), targets_KN).mean(dim=-1) * weight
            losses_K = losses_K + (term_K - term_K.detach())  # the gradient alone
    return losses_K


# ---- Fused loss ----

PART_LOGITS = {"cpu": 2**18, "cuda": 2**26}
"""Number of logits of one part, of all trials together, by device. On a CPU they fit into a core's
cache; on a GPU they are enough to use all of it."""

PartLoss = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Type of `compute_part_loss`."""


class _FusedLoss(torch.autograd.Function):
    """Mean losses [K], whose gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KND: Tensor,
        weight_KVD: Tensor,
        targets_KN: Tensor,
        part_tokens: int,
        part_loss: PartLoss,
        weights: LossWeights,
    ) -> Tensor:
        num_tokens = hidden_KND.shape[1]
        # Sums over many parts, in float32 at least
        total_K = torch.zeros(
            len(hidden_KND), dtype=get_wide_dtype(hidden_KND), device=hidden_KND.device
        )
        d_weight_KVD = torch.zeros_like(weight_KVD, dtype=get_wide_dtype(weight_KVD))
        d_hidden = []
        for h_KND, y_KN in _split_parts(hidden_KND, targets_KN, part_tokens):
            # Loss and gradient by the logits
            logits_KNV = h_KND @ weight_KVD.mT
            losses_KN, d_logits_KNV = part_loss(logits_KNV, y_KN, num_tokens)
            for name, weight in weights.items():
                token_weight = weight / num_tokens
                if isinstance(token_weight, Tensor):
                    token_weight = token_weight[:, None, None]
                d_term_KNV = LOSS_TERMS[name].gradient(widen(logits_KNV), y_KN)
                d_logits_KNV = d_logits_KNV + (d_term_KNV * token_weight).to(d_logits_KNV.dtype)
            total_K += losses_KN.sum(dim=1)

            # Gradients by the hidden states and the weight
            d_hidden.append((d_logits_KNV @ weight_KVD).to(hidden_KND.dtype))
            d_weight_KVD += d_logits_KNV.mT @ h_KND
        ctx.save_for_backward(torch.cat(d_hidden, dim=1), d_weight_KVD.to(weight_KVD.dtype))
        return total_K / num_tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_losses_K: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        d_hidden_KND, d_weight_KVD = ctx.saved_tensors
        d_losses_K11 = d_losses_K[:, None, None]
        d_hidden_KND = d_hidden_KND * d_losses_K11.to(d_hidden_KND.dtype)
        d_weight_KVD = d_weight_KVD * d_losses_K11.to(d_weight_KVD.dtype)
        return d_hidden_KND, d_weight_KVD, None, None, None, None


def compute_fused_token_loss(
    hidden_KND: Tensor,
    weight_KVD: Tensor,
    targets_KBT: Tensor,
    *,
    part_tokens: int | None = None,
    part_loss: PartLoss | None = None,
    weights: LossWeights = NO_TERMS,
) -> Tensor:
    """Return `compute_token_loss` of the logits `hidden @ weight^T`, without all logits in memory.

    Args:
        hidden_KND: Input of the readout, its multiplier included; [N, D] for one model.
        weight_KVD: Weight of the readout; [V, D] for one model.
        targets_KBT: Token ids, N = B * T; [B, T] for one model.
        part_tokens: Tokens per trial whose logits are computed at once; None for `PART_LOGITS`.
        part_loss: Compiled `compute_part_loss`; None for the uncompiled function.
        weights: Weights of the loss terms.

    Returns:
        Mean losses in nats per token, [K], or a scalar.
    """
    if hidden_KND.dim() == 2:
        losses_1 = compute_fused_token_loss(
            hidden_KND[None],
            weight_KVD[None],
            targets_KBT[None],
            part_tokens=part_tokens,
            part_loss=part_loss,
            weights=weights,
        )
        return losses_1[0]
    num_trials, vocab_size, _ = weight_KVD.shape
    if part_tokens is None:
        part_logits = PART_LOGITS[hidden_KND.device.type]
        part_tokens = max(1, part_logits // (num_trials * vocab_size))
    targets_KN = targets_KBT.flatten(1)
    if torch.is_grad_enabled():
        losses_K: Tensor = _FusedLoss.apply(  # type: ignore[no-untyped-call]
            hidden_KND,
            weight_KVD,
            targets_KN,
            part_tokens,
            part_loss or compute_part_loss,
            weights,
        )
        return losses_K
    sums_K = [
        _compute_losses(h_KND @ weight_KVD.mT, y_KN)[0].sum(dim=1)
        for h_KND, y_KN in _split_parts(hidden_KND, targets_KN, part_tokens)
    ]
    return torch.stack(sums_K).sum(dim=0) / targets_KN.shape[1]


class FusedLoss(nn.Module):
    """`compute_fused_token_loss` as a module of a model.

    In a compiled model only the loss of one part is compiled (`compiled_part_loss`). Compiling the
    whole loss would compile every part, although all are the same.
    """

    compiled_part_loss: PartLoss | None = None
    """Compiled `compute_part_loss`; None for the uncompiled function."""

    def forward(
        self,
        hidden_KND: Tensor,
        weight_KVD: Tensor,
        targets_KBT: Tensor,
        weights: LossWeights = NO_TERMS,
    ) -> Tensor:
        """Return mean losses [K], or a scalar for one model."""
        return compute_fused_token_loss(
            hidden_KND, weight_KVD, targets_KBT, part_loss=self.compiled_part_loss, weights=weights
        )


def _split_parts(
    hidden_KND: Tensor, targets_KN: Tensor, part_tokens: int
) -> zip[tuple[Tensor, Tensor]]:
    return zip(
        torch.split(hidden_KND, part_tokens, dim=1),
        torch.split(targets_KN, part_tokens, dim=1),
        strict=True,
    )


def _compute_losses(logits_KNV: Tensor, targets_KN: Tensor) -> tuple[Tensor, Tensor]:
    """Return each token's loss in nats [K, N], and its log-probabilities, in float32 at least."""
    log_probs_KNV = widen(logits_KNV).log_softmax(dim=-1)
    return -log_probs_KNV.gather(2, targets_KN[..., None])[..., 0], log_probs_KNV


def compute_part_loss(
    logits_KNV: Tensor, targets_KN: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Compute the losses of a part, and their gradient by the logits.

    Args:
        logits_KNV: Logits of the part.
        targets_KN: Token ids.
        num_tokens: Tokens of the whole batch, over which the mean loss is taken.

    Returns:
        Each token's loss in nats [K, N], in float32 at least; the gradient of the mean loss
        [K, N, V], computed in float32 at least and returned in the dtype of the logits.
    """
    if torch.compiler.is_compiling():
        # A comparison finds the target, so that the compiler makes a single kernel, which reads
        # logits and writes their gradient in their own dtype. A scatter would end this kernel, and
        # leave a float32 copy of all probabilities in memory.
        log_probs_KNV = widen(logits_KNV).log_softmax(dim=-1)
        ids_V = torch.arange(logits_KNV.shape[-1], device=logits_KNV.device)
        is_target_KNV = targets_KN[..., None] == ids_V
        losses_KN = -torch.where(is_target_KNV, log_probs_KNV, 0).sum(dim=-1)
        d_logits_KNV = log_probs_KNV.exp() - is_target_KNV.to(log_probs_KNV)
    else:
        losses_KN, log_probs_KNV = _compute_losses(logits_KNV, targets_KN)
        minus_one_KN1 = torch.full_like(losses_KN, -1)[..., None]
        d_logits_KNV = log_probs_KNV.exp_().scatter_add_(2, targets_KN[..., None], minus_one_KN1)
    return losses_KN, d_logits_KNV.div_(num_tokens).to(logits_KNV.dtype)
