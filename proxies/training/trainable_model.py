"""Models with the numbers that they are trained with: forerun's decoder, and the protocol of a
user's model.
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
    """A model with initialized parameters, and the numbers that they are trained with."""

    @property
    def module(self) -> nn.Module:
        """Module with the parameters; moved to its device and dtype in place."""

    @property
    def numbers(self) -> tuple[ParameterNumbers, ...]:
        """Numbers of each named parameter of the module."""

    def __call__(self, ids_BT: Tensor) -> Tensor:
        """Return the logits [B * T, V] of token ids [B, T], by calling the module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderModel:
    """A `proxies.model.decoder.Decoder` with its forward multipliers."""

    module: Decoder
    numbers: tuple[ParameterNumbers, ...]
    multipliers: Multipliers

    def __call__(self, ids_BT: Tensor) -> Tensor:
        """Return the logits [B * T, V] of token ids [B, T]."""
        logits_NV: Tensor = self.module(ids_BT, self.multipliers)
        return logits_NV

    def loss(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean loss in nats per token, a scalar; fused with the readout if the module
        was built so.
        """
        loss: Tensor = self.module(ids_BT, self.multipliers, targets_BT)
        return loss


@torch.no_grad()
def our_model(spec: RunSpec) -> DecoderModel:
    """Build the decoder of a run, and initialize its parameters for the run's seed."""
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
