"""The loss per token: of logits, or by parts from hidden states, so that a batch's logits are never
whole in memory.

By parts, the forward pass computes each part's loss and its gradients at once, so a part's logits
are made once and dropped, and what stays is the gradient of the hidden states and of the weight.
With p the softmax of a token's logits W h, y its target and N tokens, the gradient of the mean loss
by the logits is (p - one_hot(y)) / N; by h it is W^T times that, by W its outer product with h,
summed over tokens. With a leading K every trial is its own; its numbers do not depend on the
others'.

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

from proxies.model.precision import wide_of, widened

LossWeights = Mapping[str, float | Tensor]
"""Weights of loss terms by name: a number, or one per trial as a tensor [K]."""
NO_TERMS: LossWeights = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTerm:
    """A term that a run-wide setting adds to the loss that is differentiated. The reported loss
    stays without it.
    """

    value: Callable[[Tensor, Tensor], Tensor]
    """Returns the term of each token, [..., N], from logits [..., N, V] in float32 at least and
    targets [..., N]."""
    gradient: Callable[[Tensor, Tensor], Tensor]
    """Returns its gradient by the logits, [..., N, V]."""


LOSS_TERMS: dict[str, LossTerm] = {}
"""Loss terms by the run-wide setting that is their weight
(`proxies.core.hyperparameters.RUN_WIDE`)."""


def loss_weights(run_wide: Mapping[str, float | None]) -> dict[str, float | Tensor]:
    """Return the weights of the loss terms that a run has."""
    return {name: value for name in LOSS_TERMS if (value := run_wide[name])}


def token_loss(logits_KNV: Tensor, targets_KBT: Tensor, weights: LossWeights = NO_TERMS) -> Tensor:
    """Return the mean cross-entropy in nats per token, in float32 at least: per trial, [K], or a
    scalar without.

    Its gradient is that of the cross-entropy plus the weighted loss terms.
    """
    losses_KN = functional.cross_entropy(
        widened(logits_KNV.flatten(0, -2)),
        targets_KBT.flatten(),
        reduction="none",
    )
    losses_K = losses_KN.view(logits_KNV.shape[:-1]).mean(dim=-1)
    if torch.is_grad_enabled():
        for name, weight in weights.items():
            targets_KN = targets_KBT.reshape(logits_KNV.shape[:-1])
            term_K = LOSS_TERMS[name].value(widened(logits_KNV), targets_KN).mean(dim=-1) * weight
            losses_K = losses_K + (term_K - term_K.detach())
    return losses_K


PART_LOGITS = {"cpu": 2**18, "cuda": 2**26}
"""Logits of one part, all trials together: what stays in a core's cache, and what fills a GPU."""


OfPart = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


class _FusedLoss(torch.autograd.Function):
    """Mean losses [K] whose gradients were computed with them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KND: Tensor,
        weight_KVD: Tensor,
        targets_KN: Tensor,
        part_tokens: int,
        of_part: OfPart,
        weights: LossWeights,
    ) -> Tensor:
        num_tokens = hidden_KND.shape[1]
        # Sums of many parts: in float32 at least.
        total_K = torch.zeros(len(hidden_KND), dtype=wide_of(hidden_KND), device=hidden_KND.device)
        d_weight_KVD = torch.zeros_like(weight_KVD, dtype=wide_of(weight_KVD))
        d_hidden = []
        for h_KND, y_KN in _parts(hidden_KND, targets_KN, part_tokens):
            logits_KNV = h_KND @ weight_KVD.mT
            surprise_KN, d_logits_KNV = of_part(logits_KNV, y_KN, num_tokens)
            for name, weight in weights.items():
                share = (
                    weight[:, None, None] / num_tokens
                    if isinstance(weight, Tensor)
                    else weight / num_tokens
                )
                d_term_KNV = LOSS_TERMS[name].gradient(widened(logits_KNV), y_KN)
                d_logits_KNV = d_logits_KNV + (d_term_KNV * share).to(d_logits_KNV.dtype)
            total_K += surprise_KN.sum(dim=1)
            d_hidden.append((d_logits_KNV @ weight_KVD).to(hidden_KND.dtype))
            d_weight_KVD += d_logits_KNV.mT @ h_KND
        ctx.save_for_backward(torch.cat(d_hidden, dim=1), d_weight_KVD.to(weight_KVD.dtype))
        return total_K / num_tokens

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_losses_K: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        d_hidden_KND, d_weight_KVD = ctx.saved_tensors
        share_K11 = d_losses_K[:, None, None]
        return (
            d_hidden_KND * share_K11.to(d_hidden_KND.dtype),
            d_weight_KVD * share_K11.to(d_weight_KVD.dtype),
            None,
            None,
            None,
            None,
        )


def fused_token_loss(
    hidden_KND: Tensor,
    weight_KVD: Tensor,
    targets_KBT: Tensor,
    *,
    part_tokens: int | None = None,
    of_part: OfPart | None = None,
    weights: LossWeights = NO_TERMS,
) -> Tensor:
    """Return `token_loss` of the logits `hidden @ weight^T`: mean nats per token, [K], or a scalar
    without K.

    Args:
        hidden_KND: what the readout is applied to, any multiplier included; [N, D] without K.
        weight_KVD: the readout's, tied or not; [V, D] without K.
        targets_KBT: token ids [K, B, T], N = B * T; [B, T] without K.
        part_tokens: tokens per trial whose logits are made at once; None: by `PART_LOGITS`.
        of_part: `surprise_and_gradient`, compiled; None: as it stands.
        weights: weights of the loss terms.
    """
    if hidden_KND.dim() == 2:
        hidden_KND, weight_KVD, targets_KBT = hidden_KND[None], weight_KVD[None], targets_KBT[None]
        losses_1 = fused_token_loss(
            hidden_KND,
            weight_KVD,
            targets_KBT,
            part_tokens=part_tokens,
            of_part=of_part,
            weights=weights,
        )
        return losses_1[0]
    num_trials, vocab_size, _ = weight_KVD.shape
    part = part_tokens or max(1, PART_LOGITS[hidden_KND.device.type] // (num_trials * vocab_size))
    targets_KN = targets_KBT.flatten(1)
    if torch.is_grad_enabled():
        each = of_part or surprise_and_gradient
        losses_K: Tensor = _FusedLoss.apply(hidden_KND, weight_KVD, targets_KN, part, each, weights)  # type: ignore[no-untyped-call]
        return losses_K
    sums = [
        _surprise(h_KND @ weight_KVD.mT, y_KN)[0].sum(dim=1)
        for h_KND, y_KN in _parts(hidden_KND, targets_KN, part)
    ]
    return torch.stack(sums).sum(dim=0) / targets_KN.shape[1]


class FusedLoss(nn.Module):
    """`fused_token_loss` of a model; what it makes of a part's logits can be compiled by itself."""

    of_part: OfPart | None = None
    """`surprise_and_gradient`, compiled; None: as it stands. The whole would be compiled part by
    part, all alike."""

    def forward(
        self,
        hidden_KND: Tensor,
        weight_KVD: Tensor,
        targets_KBT: Tensor,
        weights: LossWeights = NO_TERMS,
    ) -> Tensor:
        """Return losses [K], or a scalar without K."""
        return fused_token_loss(
            hidden_KND, weight_KVD, targets_KBT, of_part=self.of_part, weights=weights
        )


def _parts(hidden_KND: Tensor, targets_KN: Tensor, part_tokens: int) -> zip[tuple[Tensor, Tensor]]:
    return zip(
        torch.split(hidden_KND, part_tokens, dim=1),
        torch.split(targets_KN, part_tokens, dim=1),
        strict=True,
    )


def _surprise(logits_KNV: Tensor, targets_KN: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's loss, [K, N] nats, and the logarithms of all shares, in float32 at least."""
    log_shares_KNV = widened(logits_KNV).log_softmax(dim=-1)
    return -log_shares_KNV.gather(2, targets_KN[..., None])[..., 0], log_shares_KNV


def surprise_and_gradient(
    logits_KNV: Tensor, targets_KN: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Each token's loss, [K, N] nats in float32 at least; the gradient of the mean of `num_tokens`
    by their logits.

    Inside they are in float32 at least; the gradient is as the logits are.
    """
    if torch.compiler.is_compiling():
        # The target by comparison: then the compiler makes one kernel of it all, which reads logits
        # and writes their gradient, in their own dtype. A scatter would end that kernel, with a
        # float32 copy of all shares in memory.
        log_shares_KNV = widened(logits_KNV).log_softmax(dim=-1)
        hit_KNV = targets_KN[..., None] == torch.arange(
            logits_KNV.shape[-1], device=logits_KNV.device
        )
        surprise_KN = -torch.where(hit_KNV, log_shares_KNV, 0).sum(dim=-1)
        d_logits_KNV = log_shares_KNV.exp() - hit_KNV.to(log_shares_KNV)
    else:
        surprise_KN, log_shares_KNV = _surprise(logits_KNV, targets_KN)
        minus_one_KN1 = torch.full_like(surprise_KN, -1)[..., None]
        d_logits_KNV = log_shares_KNV.exp_().scatter_add_(2, targets_KN[..., None], minus_one_KN1)
    return surprise_KN, d_logits_KNV.div_(num_tokens).to(logits_KNV.dtype)
