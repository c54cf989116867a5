"""Models with the numbers that they are trained with: forerun's decoder, and the protocol of a
user's model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from forerun._proxies.core.numbers import ParameterNumbers
from forerun._proxies.core.spec import RunSpec
from forerun._proxies.model.decoder import Decoder, Multipliers
from forerun._proxies.model.precision import PRECISIONS
from forerun._proxies.parametrization.parametrization import (
    compute_forward_numbers,
    compute_parameter_table,
    draw_initial_tensor,
)


class BuiltModel(Protocol):
    """A model with initialized parameters, and the numbers that they are trained with."""

    @property
    def module(self) -> nn.Module:
        """Module with the parameters. The engine moves it to its device and dtype in place."""

    @property
    def numbers(self) -> tuple[ParameterNumbers, ...]:
        """Numbers of each named parameter of the module."""

    def __call__(self, ids_BT: Tensor) -> Tensor:
        """Return the logits [B * T, V] of token ids [B, T], by calling the module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderModel:
    """A `forerun._proxies.model.decoder.Decoder` with its forward multipliers."""

    module: Decoder
    numbers: tuple[ParameterNumbers, ...]
    multipliers: Multipliers

    def __call__(self, ids_BT: Tensor) -> Tensor:
        """Return the logits [B * T, V] of token ids [B, T]."""
        logits_NV: Tensor = self.module(ids_BT, self.multipliers)
        return logits_NV

    def compute_loss(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean loss in nats per token, a scalar.

        If the module was built with a fused loss, the loss is fused with the readout.
        """
        loss: Tensor = self.module(ids_BT, self.multipliers, targets_BT)
        return loss


@torch.no_grad()
def build_decoder(spec: RunSpec) -> DecoderModel:
    """Build the decoder of a run, and initialize its parameters for the run's seed."""
    numbers, forward = compute_parameter_table(spec), compute_forward_numbers(spec)
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
        parameters[parameter.name].copy_(draw_initial_tensor(parameter, spec.seed))
    multipliers = Multipliers.from_run(forward, spec.hparams.run_wide)
    return DecoderModel(module=module, numbers=numbers, multipliers=multipliers)
