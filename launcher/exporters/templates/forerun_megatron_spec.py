"""Megatron's own GPT layers, whose branches are multiplied before they join the residual stream.

`--spec forerun_megatron_spec SPEC` takes them. Written against Megatron-core's public functions;
nothing of theirs is copied.
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


def scaled_add(
    training: bool, fused: bool
) -> Callable[[Branch, torch.Tensor, float], torch.Tensor]:
    """Megatron's addition of a branch, which has no bias here, to the residual stream, the branch
    multiplied.
    """
    add = get_bias_dropout_add(training, fused)

    def scaled(branch: Branch, residual: torch.Tensor, prob: float) -> torch.Tensor:
        out, bias = branch
        joined: torch.Tensor = add((out * RESIDUAL, bias), residual, prob)
        return joined

    return scaled


def layers() -> Any:
    """The layers of the run's arguments."""
    args = get_args()
    if args.transformer_impl == "local":
        spec = get_gpt_layer_local_spec(
            qk_layernorm=args.qk_layernorm, normalization=args.normalization
        )
    else:
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=args.qk_layernorm)
    spec.submodules.self_attn_bda = spec.submodules.mlp_bda = scaled_add
    return spec


SPEC = layers()
