"""A model to train with the numbers it is trained with: our decoder's, and the protocol of a user's
own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from proxies.core.numbers import ParameterNumbers
from proxies.core.spec import RunSpec
from proxies.model.decoder import Decoder, Multipliers
from proxies.model.precision import PRECISIONS
from proxies.parametrization.parametrization import forward_numbers, initial_tensor, parameter_table


class BuiltModel(Protocol):
    """A model to train: its parameters initialised for the run's seed, and the numbers they are
    trained with.
    """

    @property
    def module(self) -> nn.Module:
        """What holds the parameters; moved to its device and dtype in place."""

    @property
    def numbers(self) -> tuple[ParameterNumbers, ...]:
        """One entry per named parameter of the module."""

    def __call__(self, ids_BT: Tensor) -> Tensor:
        """Logits [N, V] of token ids [B, T], N = B * T, by calling the module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderModel:
    """`proxies.model.decoder.Decoder` with its forward multipliers."""

    module: Decoder
    numbers: tuple[ParameterNumbers, ...]
    multipliers: Multipliers

    def __call__(self, ids_BT: Tensor) -> Tensor:
        """Logits [N, V] of token ids [B, T]."""
        logits_NV: Tensor = self.module(ids_BT, self.multipliers)
        return logits_NV

    def loss(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean loss in nats per token, a scalar; by parts where the module was made so."""
        loss: Tensor = self.module(ids_BT, self.multipliers, targets_BT)
        return loss


@torch.no_grad()
def our_model(spec: RunSpec) -> DecoderModel:
    """The run's decoder, initialised."""
    numbers, forward = parameter_table(spec), forward_numbers(spec)
    numerics = spec.numerics
    module = Decoder(
        spec.shape,
        device="cpu",
        checkpointing=numerics.activation_checkpointing,
        fused_loss=numerics.fused_loss,
        compute=PRECISIONS[numerics.dtype].compute,
    )
    parameters = dict(module.named_parameters())
    for parameter in numbers:
        parameters[parameter.name].copy_(initial_tensor(parameter, spec.seed))
    multipliers = Multipliers.of_run(forward, spec.hparams.run_wide)
    return DecoderModel(module=module, numbers=numbers, multipliers=multipliers)
