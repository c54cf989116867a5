"""Megatron's own GPT layers, whose branches (attention and feed-forward) are multiplied before they
are added to the residual stream.

`--spec forerun_megatron_spec SPEC` selects them. The code uses the public functions of
Megatron-core and copies nothing from it.
"""

from collections.abc import Callable
from typing import Any

import torch
from forerun_numbers import read_numbers
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.training import get_args

RESIDUAL = read_numbers().forward.residual
Branch = tuple[torch.Tensor, torch.Tensor | None]


def get_scaled_add(
    training: bool, fused: bool
) -> Callable[[Branch, torch.Tensor, float], torch.Tensor]:
    """Return a function that multiplies a branch and adds it to the residual stream.

    The addition is Megatron's own. The branches of this run have no bias, so only their output is
    multiplied.
    """
    add = get_bias_dropout_add(training, fused)

    def scale_and_add(branch: Branch, residual: torch.Tensor, prob: float) -> torch.Tensor:
        out, bias = branch
        joined: torch.Tensor = add((out * RESIDUAL, bias), residual, prob)
        return joined

    return scale_and_add


def build_layers() -> Any:
    """Return the layers that the run's arguments ask for."""
    args = get_args()
    if args.transformer_impl == "local":
        spec = get_gpt_layer_local_spec(
            qk_layernorm=args.qk_layernorm, normalization=args.normalization
        )
    else:
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=args.qk_layernorm)
    spec.submodules.self_attn_bda = spec.submodules.mlp_bda = get_scaled_add
    return spec


SPEC = build_layers()
